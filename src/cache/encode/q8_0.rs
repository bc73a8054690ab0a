//! `q8_0`: ggml's blocks of 32 channels with one scale, 8.5 bits per channel.
//!
//! Block of 34 bytes: `d` as f16 little-endian, then 32 signed bytes; channel j is `q[j] · d`.
//! Invariants, as ggml's reference code has them: `d = max|x| / 127` in f32; codes are `round(x · (1/d))` with halves
//! away from zero, from the d *before* it is rounded to f16; a block of zeros has d = 0. A last block that is short is
//! padded with zeros and stored whole: a row takes ⌈dim/32⌉ · 34 bytes.

use std::sync::Arc;

use half::f16;

use super::super::stage::{Codec, Kind, Stage, StageDef, Tolerance, never};
use super::blocks::{self, Block};
use crate::compute::cpu::rows;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "q8_0",
    kind: Kind::Encode,
    doc: "ggml's 8-bit blocks of 32 with an f16 scale, 8.5 bits per channel",
    paper: "ggml-org/llama.cpp, ggml/src/ggml-quants.c: quantize_row_q8_0_ref",
    params: &[],
    calibrated: never,
    examples: &["\"q8_0\""],
    tolerance: Tolerance::RelativeL2(0.013),
    build: |_, _| Ok(Stage::Encode(Codec::Rows(Arc::new(Q8_0)))),
};

const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 34;

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct Q8_0;

blocks::block_codec!(Q8_0, BLOCK, BLOCK_BYTES, 2, Some(&rows::Bytes));

impl Block<BLOCK, BLOCK_BYTES> for Q8_0 {
    #[inline(always)]
    fn encode_block(x: &[f32; BLOCK], out: &mut [u8; BLOCK_BYTES]) {
        let d = f32::from_bits(blocks::max_magnitude_bits(x)) / 127.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        let (scale, codes) = out.split_at_mut(2);
        scale.copy_from_slice(&f16::from_f32(d).to_le_bytes());
        for (q, v) in codes.iter_mut().zip(x) {
            *q = blocks::low_byte((v * inverse).round());
        }
    }

    #[inline(always)]
    fn decode_block(bytes: &[u8; BLOCK_BYTES], x: &mut [f32; BLOCK]) {
        let d = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        for (v, &q) in x.iter_mut().zip(&bytes[2..]) {
            *v = f32::from(q as i8) * d;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::stage::RowCodec;

    #[test]
    fn halves_go_away_from_zero() {
        let mut x = [0.0; BLOCK];
        x[..5].copy_from_slice(&[127.0, 0.5, -0.5, 2.5, -126.5]);
        let mut out = [0; BLOCK_BYTES];
        Q8_0.encode(&x, &mut out);
        assert_eq!(out[..2], f16::ONE.to_le_bytes());
        let codes: Vec<i8> = out[2..7].iter().map(|&q| q as i8).collect();
        assert_eq!(codes, [127, 1, -1, 3, -127]);
    }

    #[test]
    fn codes_come_from_the_scale_before_rounding() {
        // d = 1.0004 rounds to 1.0 in f16; 60.52 / 1.0004 = 60.496 goes down, 60.52 / 1.0 would go up.
        let mut x = [0.0; BLOCK];
        x[0] = 127.0 * 1.0004;
        x[1] = 60.52;
        let mut out = [0; BLOCK_BYTES];
        Q8_0.encode(&x, &mut out);
        assert_eq!(out[..2], f16::ONE.to_le_bytes());
        assert_eq!(out[3], 60);
    }

    #[test]
    fn zeros_have_scale_zero() {
        let mut out = [1; BLOCK_BYTES];
        Q8_0.encode(&[0.0; BLOCK], &mut out);
        assert_eq!(out, [0; BLOCK_BYTES]);
    }
}
