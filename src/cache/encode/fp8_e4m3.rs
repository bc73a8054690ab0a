//! `fp8_e4m3`: E4M3FN with a scale of 1, one byte per channel.
//!
//! Byte: `s eeee mmm`, bias 7, no infinities; 0x7f and 0xff are NaN, the largest number is 448, the smallest 2⁻⁹.
//! Rounding and saturation are `float8`'s.

use std::sync::Arc;

use super::super::stage::{Codec, Kind, RowCodec, Stage, StageDef, Tolerance, never};
use super::float8::{self, Float8};
use crate::compute::cpu::vector::multiversion;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "fp8_e4m3",
    kind: Kind::Encode,
    doc: "FP8 E4M3 by plain cast, 1 byte per channel, saturating at 448",
    paper: "FP8 Formats for Deep Learning, arXiv 2209.05433",
    params: &[],
    calibrated: never,
    examples: &["\"fp8_e4m3\""],
    // No normal number is off by more than 2^-4.
    tolerance: Tolerance::RelativeL2(0.055),
    build: |_, _| Ok(Stage::Encode(Codec::Rows(Arc::new(Fp8E4m3)))),
};

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct Fp8E4m3;

impl Float8 for Fp8E4m3 {
    const MANTISSA_BITS: u32 = 3;
    const BIAS: u32 = 7;
    const MAX: f32 = 448.0;
    const FIRST_SPECIAL: u32 = 0x7f;
    const SPECIAL: f32 = f32::NAN;
}

impl RowCodec for Fp8E4m3 {
    fn row_bytes(&self, dim: usize) -> usize {
        dim
    }

    fn scale_bytes(&self, _dim: usize) -> usize {
        0
    }

    fn encode(&self, row: &[f32], out: &mut [u8]) {
        encode(row, out);
    }

    fn decode(&self, bytes: &[u8], row: &mut [f32]) {
        decode(bytes, row);
    }

    fn decode_rows(&self, bytes: &[u8], _dim: usize, rows: &mut [f32]) {
        decode(bytes, rows);
    }
}

multiversion! {
    fn encode(row: &[f32], out: &mut [u8]) = encode_body;
}

multiversion! {
    fn decode(bytes: &[u8], rows: &mut [f32]) = decode_body;
}

#[inline(always)]
fn encode_body(row: &[f32], out: &mut [u8]) {
    for (b, &x) in out.iter_mut().zip(row) {
        *b = float8::from_f32::<Fp8E4m3>(x);
    }
}

#[inline(always)]
fn decode_body(bytes: &[u8], rows: &mut [f32]) {
    for (x, &b) in rows.iter_mut().zip(bytes) {
        *x = float8::to_f32::<Fp8E4m3>(b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::encode::float8::tests;

    #[test]
    fn every_byte_is_its_value_and_comes_back() {
        tests::every_byte_is_its_value_and_comes_back::<Fp8E4m3>();
    }

    #[test]
    fn ties_go_to_the_even_code_and_their_neighbours_to_the_nearest() {
        tests::ties_go_to_the_even_code_and_their_neighbours_to_the_nearest::<Fp8E4m3>();
    }

    #[test]
    fn saturates_and_keeps_nan() {
        tests::saturates_and_keeps_nan::<Fp8E4m3>();
    }
}
