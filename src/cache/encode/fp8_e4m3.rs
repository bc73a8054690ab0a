//! `fp8_e4m3`: E4M3FN with a scale of 1, one byte per channel.
//!
//! Byte: `s eeee mmm`, bias 7, no infinities; 0x7f and 0xff are NaN, the largest number is 448, the smallest 2⁻⁹.
//! Invariants: rounds to nearest with ties to even; magnitudes above 448, infinity too, become 448; NaN stays NaN.

use std::sync::Arc;

use super::super::stage::{Codec, Kind, RowCodec, Stage, StageDef, Tolerance, never};
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

/// The largest finite magnitude.
pub(super) const MAX: f32 = 448.0;
/// The smallest positive number.
pub(super) const MIN_POSITIVE: f32 = 1.0 / 512.0;
// The smallest normal number is 2^-6.
const MIN_NORMAL: f32 = 1.0 / 64.0;
// Adding it leaves an f32 with a unit in the last place of 2^-9, E4M3's fixed step below 2^-6.
const SUBNORMAL_ROUND: f32 = 16_384.0;
const NAN: u32 = 0x7f;
// f32's exponent bias less E4M3's, in units of E4M3's exponent.
const REBIAS: u32 = (127 - 7) << 3;

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct Fp8E4m3;

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
        *b = from_f32(x);
    }
}

#[inline(always)]
fn decode_body(bytes: &[u8], rows: &mut [f32]) {
    for (x, &b) in rows.iter_mut().zip(bytes) {
        *x = to_f32(b);
    }
}

/// The nearest E4M3 number, ties to even, saturating.
#[inline(always)]
pub(super) fn from_f32(x: f32) -> u8 {
    let bits = x.to_bits();
    let abs = bits & 0x7fff_ffff;
    let clamped = abs.min(MAX.to_bits());
    // 20 mantissa bits go; an odd last bit that stays turns a tie upwards.
    let rounded = (clamped + 0x7_ffff + ((clamped >> 20) & 1)) >> 20;
    let normal = rounded.wrapping_sub(REBIAS);
    let subnormal = (f32::from_bits(clamped) + SUBNORMAL_ROUND)
        .to_bits()
        .wrapping_sub(SUBNORMAL_ROUND.to_bits());
    let number = if clamped < MIN_NORMAL.to_bits() {
        subnormal
    } else {
        normal
    };
    let code = if abs > f32::INFINITY.to_bits() {
        NAN
    } else {
        number
    };
    ((bits >> 24) & 0x80 | code) as u8
}

/// The number that a byte stands for.
#[inline(always)]
pub(super) fn to_f32(byte: u8) -> f32 {
    let code = u32::from(byte & 0x7f);
    let normal = f32::from_bits((code + REBIAS) << 20);
    let subnormal = code as f32 * MIN_POSITIVE;
    let number = if code < 8 { subnormal } else { normal };
    let magnitude = if code == NAN { f32::NAN } else { number };
    f32::from_bits(magnitude.to_bits() | u32::from(byte & 0x80) << 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, in f64.
    fn value(byte: u8) -> f64 {
        let (e, m) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
        let magnitude = if e == 0 {
            m / 8.0 * 2f64.powi(-6)
        } else {
            (1.0 + m / 8.0) * 2f64.powi(e - 7)
        };
        if byte & 0x80 == 0 {
            magnitude
        } else {
            -magnitude
        }
    }

    #[test]
    fn every_byte_is_its_value_and_comes_back() {
        for byte in 0..=255u8 {
            let x = to_f32(byte);
            if byte & 0x7f == 0x7f {
                assert!(x.is_nan());
            } else {
                assert_eq!(f64::from(x), value(byte));
            }
            assert_eq!(from_f32(x), byte);
        }
    }

    #[test]
    fn ties_go_to_the_even_code_and_their_neighbours_to_the_nearest() {
        for code in 0..0x7eu8 {
            let tie = ((value(code) + value(code + 1)) / 2.0) as f32;
            assert_eq!(from_f32(tie), code + (code & 1), "{tie}");
            assert_eq!(from_f32(tie.next_down()), code);
            assert_eq!(from_f32(tie.next_up()), code + 1);
            assert_eq!(from_f32(-tie), 0x80 | (code + (code & 1)));
        }
    }

    #[test]
    fn saturates_and_keeps_nan() {
        for x in [448.0, 463.0, 465.0, 1e30, f32::INFINITY] {
            assert_eq!(from_f32(x), 0x7e);
            assert_eq!(from_f32(-x), 0xfe);
        }
        assert_eq!(from_f32(f32::NAN) & 0x7f, 0x7f);
        assert_eq!(from_f32(-0.0), 0x80);
        assert_eq!(from_f32(f32::MIN_POSITIVE), 0);
    }
}
