//! `fp8_e5m2`: E5M2, one byte per channel.
//!
//! Byte: `s eeeee mm`, bias 15, the upper half of an f16: 0x7c is infinity, codes above it NaN, the largest number is
//! 57,344, the smallest 2⁻¹⁶.
//! Rounding and saturation are `float8`'s, scales `fp8`'s. (torch casts to this type without saturation: from 61,440 on
//! it gives infinity.)

use super::super::stage::{Kernel, Kind, StageDef, Tolerance};
use super::float8::Float8;
use super::fp8::{self, Layout};
use crate::compute::cpu::rows;
use crate::compute::cpu::vector::multiversion;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "fp8_e5m2",
    kind: Kind::Encode,
    doc: "FP8 E5M2, 1 byte per channel, saturating at 57,344: by plain cast or scaled",
    paper: "FP8 Formats for Deep Learning, arXiv 2209.05433",
    params: fp8::PARAMS,
    calibrated: fp8::is_calibrated,
    examples: &[
        "\"fp8_e5m2\"",
        "{ method = \"fp8_e5m2\", scale = \"head\" }",
    ],
    // No normal number is off by more than 2^-3.
    tolerance: Tolerance::RelativeL2(0.11),
    build: |params, context| fp8::build::<Fp8E5m2>(DEF.name, params, context),
};

/// The layout.
#[derive(Debug, Clone, Copy)]
pub struct Fp8E5m2;

impl Float8 for Fp8E5m2 {
    const MANTISSA_BITS: u32 = 2;
    const BIAS: u32 = 15;
    const MAX: f32 = 57_344.0;
    const FIRST_SPECIAL: u32 = 0x7c;
    const SPECIAL: f32 = f32::INFINITY;
}

impl Layout for Fp8E5m2 {
    fn encode(row: &[f32], up: f32, out: &mut [u8]) {
        encode(row, up, out);
    }

    fn decode(bytes: &[u8], down: f32, row: &mut [f32]) {
        decode(bytes, down, row);
    }

    fn kernel(down: Option<f32>) -> Box<dyn Kernel> {
        Box::new(rows::Float8::<5> { down })
    }
}

multiversion! {
    fn encode(row: &[f32], up: f32, out: &mut [u8]) = fp8::encode::<Fp8E5m2>;
}

multiversion! {
    fn decode(bytes: &[u8], down: f32, row: &mut [f32]) = fp8::decode::<Fp8E5m2>;
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
