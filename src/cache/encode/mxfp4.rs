//! `mxfp4`: E2M1 codes in blocks of 32 channels with a power of two each, 4.25 bits per channel, by the rules of OCP's
//! Microscaling Formats 1.0, section 6.3.
//!
//! Block of 17 bytes, laid out as ggml's: the scale E8M0 first (`2^(e − 127)`, 255 is NaN), then 16 bytes of codes; byte
//! j holds channel j in its low nibble and channel j + 16 in its high one. A channel is `E2M1(code) · scale`.
//!
//! Invariants: the scale is `2^(⌊log₂ max|x|⌋ − 2)`, cut at 2⁻¹²⁷, which a block of zeros has too; a code is the E2M1
//! number nearest to `x / scale`, ties to the even code, magnitudes over 6 to 6 (x / scale stays below 8); the sign bit
//! is x's own, that of a zero too. A NaN makes the whole block NaN. A last block that is short is padded with zeros and
//! stored whole: a row takes ⌈dim/32⌉ · 17 bytes.
//!
//! ggml's own quantizer has the same scales but takes ties to the smaller magnitude; NVIDIA's Model Optimizer rounds the
//! scale up (`2^⌈log₂(max|x| / 6)⌉`) and never saturates.

use std::sync::Arc;

use super::super::stage::{Codec, Kind, Stage, StageDef, Tolerance, never};
use super::blocks::{self, Block};
use super::e2m1;
use crate::compute::cpu::rows;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "mxfp4",
    kind: Kind::Encode,
    doc: "MXFP4: E2M1 blocks of 32 with a power-of-two scale, 4.25 bits per channel",
    paper: "OCP Microscaling Formats (MX) Specification 1.0",
    params: &[],
    calibrated: never,
    examples: &["\"mxfp4\""],
    tolerance: Tolerance::RelativeL2(0.25),
    build: |_, _| Ok(Stage::Encode(Codec::Rows(Arc::new(Mxfp4)))),
};

const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 17;
const HALF: usize = BLOCK / 2;
/// The exponent of E2M1's largest power of two, 4.
const E2M1_EXPONENT: u32 = 2;
const NAN: u32 = 255;

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct Mxfp4;

/// How stored rows are read.
static KERNEL: rows::Nibbles<rows::Power> = rows::Nibbles {
    scale: rows::Power,
    levels: e2m1::LEVELS,
};

blocks::block_codec!(Mxfp4, BLOCK, BLOCK_BYTES, 1, Some(&KERNEL));

/// The scale's byte. f32 and E8M0 have the same bias, so it is the exponent of the largest magnitude less 2.
#[inline(always)]
fn scale_byte(amax_bits: u32) -> u32 {
    if amax_bits > f32::INFINITY.to_bits() {
        NAN
    } else {
        (amax_bits >> 23).saturating_sub(E2M1_EXPONENT)
    }
}

/// 2^(e − 127), the smallest of which is a subnormal f32.
#[inline(always)]
fn scale(e: u32) -> f32 {
    let bits = match e {
        0 => 1 << 22,
        NAN => f32::NAN.to_bits(),
        _ => e << 23,
    };
    f32::from_bits(bits)
}

impl Block<BLOCK, BLOCK_BYTES> for Mxfp4 {
    #[inline(always)]
    fn encode_block(x: &[f32; BLOCK], out: &mut [u8; BLOCK_BYTES]) {
        let e = scale_byte(blocks::max_magnitude_bits(x));
        // 2^(127 − e) is a normal number for every e that a finite block has; the product is exact wherever it matters.
        let inverse = f32::from_bits(254u32.saturating_sub(e) << 23);
        let code = |v: f32| (e2m1::magnitude_code(v * inverse) | v.to_bits() >> 28 & 8) as u8;
        let (low, high) = x.split_at(HALF);
        out[0] = e as u8;
        for ((q, &a), &b) in out[1..].iter_mut().zip(low).zip(high) {
            *q = code(a) | code(b) << 4;
        }
    }

    #[inline(always)]
    fn decode_block(bytes: &[u8; BLOCK_BYTES], x: &mut [f32; BLOCK]) {
        let step = scale(u32::from(bytes[0]));
        let (low, high) = x.split_at_mut(HALF);
        for ((a, b), &q) in low.iter_mut().zip(high).zip(&bytes[1..]) {
            *a = e2m1::to_f32(u32::from(q) & 15) * step;
            *b = e2m1::to_f32(u32::from(q) >> 4) * step;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::stage::RowCodec;

    fn round_trip(x: &[f32; BLOCK]) -> ([u8; BLOCK_BYTES], [f32; BLOCK]) {
        let (mut out, mut back) = ([0xee; BLOCK_BYTES], [1.0; BLOCK]);
        Mxfp4.encode(x, &mut out);
        Mxfp4.decode(&out, &mut back);
        (out, back)
    }

    #[test]
    fn the_scale_is_a_power_of_two_and_the_largest_may_saturate() {
        let mut x = [0.0; BLOCK];
        for (amax, e, back) in [
            (4.0, 127, 4.0),
            (7.99, 127, 6.0),
            (8.0, 128, 8.0),
            (-5.0, 127, -4.0),
            (3.999_999_8, 126, 3.0),
            (f32::MAX, 252, 6.0 * 2f32.powi(125)),
        ] {
            x[31] = amax;
            let (out, got) = round_trip(&x);
            assert_eq!((out[0], got[31]), (e, back), "{amax}");
        }
    }

    #[test]
    fn subnormal_blocks_use_the_smallest_scale_and_zeros_too() {
        let tiny = 2f32.powi(-127);
        let mut x = [0.0; BLOCK];
        let (out, back) = round_trip(&x);
        assert_eq!(out, [0; BLOCK_BYTES]);
        assert_eq!(back, x);
        x[0] = 3.0 * tiny;
        x[16] = -tiny;
        x[1] = tiny / 4.0; // a tie, to the even 0
        x[17] = -tiny / 4.0; // −0
        let (out, back) = round_trip(&x);
        assert_eq!(out[..3], [0, 0xa5, 0x80]);
        assert_eq!((back[0], back[16], back[1]), (x[0], x[16], 0.0));
        assert!(back[17] == 0.0 && back[17].is_sign_negative());
        // The first block whose own exponent is below the range, and the last one whose is not.
        for (amax, e) in [(2f32.powi(-125), 0), (2f32.powi(-124), 1)] {
            x[0] = amax;
            let (out, back) = round_trip(&x);
            assert_eq!((out[0], back[0]), (e, amax));
        }
    }

    #[test]
    fn a_nan_is_not_hidden() {
        let mut x = [1.0; BLOCK];
        x[7] = f32::NAN;
        let (out, back) = round_trip(&x);
        assert_eq!(out[0], 255);
        assert!(back.iter().all(|v| v.is_nan()));
    }
}
