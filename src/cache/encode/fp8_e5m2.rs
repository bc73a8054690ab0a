//! `fp8_e5m2`: E5M2 with a scale of 1, one byte per channel.
//!
//! Byte: `s eeeee mm`, bias 15, the upper half of an f16: 0x7c is infinity, codes above it NaN, the largest number is
//! 57,344, the smallest 2⁻¹⁶.
//! Rounding and saturation are `float8`'s. (torch casts to this type without saturation: from 61,440 on it gives infinity.)

use std::sync::Arc;

use super::super::stage::{Codec, Kind, RowCodec, Stage, StageDef, Tolerance, never};
use super::float8::{self, Float8};
use crate::compute::cpu::vector::multiversion;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "fp8_e5m2",
    kind: Kind::Encode,
    doc: "FP8 E5M2 by plain cast, 1 byte per channel, saturating at 57,344",
    paper: "FP8 Formats for Deep Learning, arXiv 2209.05433",
    params: &[],
    calibrated: never,
    examples: &["\"fp8_e5m2\""],
    // No normal number is off by more than 2^-3.
    tolerance: Tolerance::RelativeL2(0.11),
    build: |_, _| Ok(Stage::Encode(Codec::Rows(Arc::new(Fp8E5m2)))),
};

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct Fp8E5m2;

impl Float8 for Fp8E5m2 {
    const MANTISSA_BITS: u32 = 2;
    const BIAS: u32 = 15;
    const MAX: f32 = 57_344.0;
    const FIRST_SPECIAL: u32 = 0x7c;
    const SPECIAL: f32 = f32::INFINITY;
}

impl RowCodec for Fp8E5m2 {
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
        *b = float8::from_f32::<Fp8E5m2>(x);
    }
}

#[inline(always)]
fn decode_body(bytes: &[u8], rows: &mut [f32]) {
    for (x, &b) in rows.iter_mut().zip(bytes) {
        *x = float8::to_f32::<Fp8E5m2>(b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::encode::float8::tests;

    #[test]
    fn every_byte_is_its_value_and_comes_back() {
        tests::every_byte_is_its_value_and_comes_back::<Fp8E5m2>();
    }

    #[test]
    fn ties_go_to_the_even_code_and_their_neighbours_to_the_nearest() {
        tests::ties_go_to_the_even_code_and_their_neighbours_to_the_nearest::<Fp8E5m2>();
    }

    #[test]
    fn saturates_and_keeps_nan() {
        tests::saturates_and_keeps_nan::<Fp8E5m2>();
    }
}
