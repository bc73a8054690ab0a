//! `fp8_e4m3`: E4M3FN, one byte per channel.
//!
//! Byte: `s eeee mmm`, bias 7, no infinities; 0x7f and 0xff are NaN, the largest number is 448, the smallest 2⁻⁹.
//! Rounding and saturation are `float8`'s, scales `fp8`'s.

use super::super::stage::{Kernel, Kind, StageDef, Tolerance};
use super::float8::Float8;
use super::fp8::{self, Layout};
use crate::compute::cpu::rows;
use crate::compute::cpu::vector::multiversion;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "fp8_e4m3",
    kind: Kind::Encode,
    doc: "FP8 E4M3, 1 byte per channel, saturating at 448: by plain cast or scaled",
    paper: "FP8 Formats for Deep Learning, arXiv 2209.05433",
    params: fp8::PARAMS,
    calibrated: fp8::is_calibrated,
    examples: &[
        "\"fp8_e4m3\"",
        "{ method = \"fp8_e4m3\", scale = \"tensor\" }",
        "{ method = \"fp8_e4m3\", scale = \"token\" }",
    ],
    // No normal number is off by more than 2^-4.
    tolerance: Tolerance::RelativeL2(0.055),
    build: |params, context| fp8::build::<Fp8E4m3>(DEF.name, params, context),
};

/// The layout.
#[derive(Debug, Clone, Copy)]
pub struct Fp8E4m3;

impl Float8 for Fp8E4m3 {
    const MANTISSA_BITS: u32 = 3;
    const BIAS: u32 = 7;
    const MAX: f32 = 448.0;
    const FIRST_SPECIAL: u32 = 0x7f;
    const SPECIAL: f32 = f32::NAN;
}

impl Layout for Fp8E4m3 {
    fn encode(row: &[f32], up: f32, out: &mut [u8]) {
        encode(row, up, out);
    }

    fn decode(bytes: &[u8], down: f32, row: &mut [f32]) {
        decode(bytes, down, row);
    }

    fn kernel(down: Option<f32>) -> Box<dyn Kernel> {
        Box::new(rows::Float8::<4> { down })
    }
}

multiversion! {
    fn encode(row: &[f32], up: f32, out: &mut [u8]) = fp8::encode::<Fp8E4m3>;
}

multiversion! {
    fn decode(bytes: &[u8], down: f32, row: &mut [f32]) = fp8::decode::<Fp8E4m3>;
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
