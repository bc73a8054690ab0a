//! `iq4_nl`: ggml's 4-bit blocks of 32 channels with uneven levels, 4.5 bits per channel.
//!
//! Block of 18 bytes: `d` as f16 little-endian, then 16 bytes of codes; byte j holds channel j in its low nibble and
//! channel j + 16 in its high one; a channel is `LEVELS[q] · d`.
//! Invariants, as ggml codes a row of a cache (its reference, without a search over scales): the value of largest
//! magnitude, the first of several, is laid on the level −127; every channel takes the level nearest to it, a tie the
//! upper one; then `d = Σ x²·q·x / Σ x²·q·q` in f32, channel after channel, every operation rounded on its own, and the
//! codes stay. Blocks whose magnitudes are below 10⁻¹⁵ are all zeros, codes included. A last block that is short is
//! padded with zeros and stored whole: a row takes ⌈dim/32⌉ · 18 bytes.

use std::sync::Arc;

use half::f16;

use super::super::stage::{Codec, Kind, Stage, StageDef, Tolerance, never};
use super::blocks::{self, Block};
use crate::compute::cpu::rows;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "iq4_nl",
    kind: Kind::Encode,
    doc: "ggml's 4-bit blocks of 32 with uneven levels and an f16 scale, 4.5 bits per channel",
    paper: "ggml-org/llama.cpp, ggml/src/ggml-quants.c: quantize_row_iq4_nl_ref",
    params: &[],
    calibrated: never,
    examples: &["\"iq4_nl\""],
    tolerance: Tolerance::RelativeL2(0.16),
    build: |_, _| Ok(Stage::Encode(Codec::Rows(Arc::new(Iq4Nl)))),
};

const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 18;
const HALF: usize = BLOCK / 2;
/// ggml's `kvalues_iq4nl`.
const LEVELS: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0,
    89.0, 113.0,
];
/// Below this largest magnitude a block counts as zeros.
const SMALLEST: f32 = 1e-15;

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct Iq4Nl;

/// How stored rows are read.
static KERNEL: rows::Nibbles<rows::Half> = rows::Nibbles {
    scale: rows::Half,
    levels: LEVELS,
};

blocks::block_codec!(Iq4Nl, BLOCK, BLOCK_BYTES, 2, Some(&KERNEL));

/// The code of the nearest level: how many midpoints between neighbours are not above x. Midpoints are exact.
#[inline(always)]
fn nearest(x: f32) -> u8 {
    let mut code = 0;
    for pair in LEVELS.windows(2) {
        code += u8::from(x >= (pair[0] + pair[1]) / 2.0);
    }
    code
}

/// Σ x²·q·x / Σ x²·q·q. One chain per sum, since the order decides the last bits.
#[inline(always)]
fn least_squares(x: &[f32; BLOCK], codes: &[u8; BLOCK]) -> f32 {
    let (mut qx, mut qq) = (0.0, 0.0);
    for (&v, &code) in x.iter().zip(codes) {
        let q = LEVELS[usize::from(code & 15)];
        let weighted = v * v * q;
        qx += weighted * v;
        qq += weighted * q;
    }
    if qq > 0.0 { qx / qq } else { 0.0 }
}

impl Block<BLOCK, BLOCK_BYTES> for Iq4Nl {
    #[inline(always)]
    fn encode_block(x: &[f32; BLOCK], out: &mut [u8; BLOCK_BYTES]) {
        let extreme = blocks::extreme(x);
        if extreme.abs() < SMALLEST {
            *out = [0; BLOCK_BYTES];
            return;
        }
        let inverse = 1.0 / (extreme / LEVELS[0]);
        let mut codes = [0; BLOCK];
        for (q, v) in codes.iter_mut().zip(x) {
            *q = nearest(inverse * v);
        }
        let d = least_squares(x, &codes);
        out[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
        let (low, high) = codes.split_at(HALF);
        for ((q, a), b) in out[2..].iter_mut().zip(low).zip(high) {
            *q = a | b << 4;
        }
    }

    #[inline(always)]
    fn decode_block(bytes: &[u8; BLOCK_BYTES], x: &mut [f32; BLOCK]) {
        let d = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        let (low, high) = x.split_at_mut(HALF);
        for ((a, b), &q) in low.iter_mut().zip(high).zip(&bytes[2..]) {
            *a = LEVELS[usize::from(q & 15)] * d;
            *b = LEVELS[usize::from(q >> 4)] * d;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::stage::RowCodec;

    #[test]
    fn every_level_is_its_own_nearest_and_ties_go_up() {
        for (code, &level) in LEVELS.iter().enumerate() {
            assert_eq!(usize::from(nearest(level)), code);
        }
        for (code, pair) in LEVELS.windows(2).enumerate() {
            let tie = (pair[0] + pair[1]) / 2.0;
            assert_eq!(usize::from(nearest(tie)), code + 1);
            assert_eq!(usize::from(nearest(tie.next_down())), code);
        }
        assert_eq!((nearest(-1e9), nearest(1e9)), (0, 15));
    }

    #[test]
    fn the_extreme_is_laid_on_the_lowest_level_whatever_its_sign() {
        let mut x = [0.0; BLOCK];
        x[4] = 127.0 * 0.5;
        x[20] = -113.0 * 0.5;
        let mut out = [0; BLOCK_BYTES];
        Iq4Nl.encode(&x, &mut out);
        assert_eq!(out[..2], f16::from_f32(-0.5).to_le_bytes());
        assert_eq!((out[6], out[2]), (0xf0, 0x88));
        let mut back = [0.0; BLOCK];
        Iq4Nl.decode(&out, &mut back);
        // Zero has no level of its own: the nearest is 1.
        assert_eq!((back[4], back[20], back[0]), (63.5, -56.5, -0.5));
    }

    #[test]
    fn tiny_blocks_are_zeros() {
        for amax in [0.0, 9e-16] {
            let mut out = [1; BLOCK_BYTES];
            Iq4Nl.encode(&[amax; BLOCK], &mut out);
            assert_eq!(out, [0; BLOCK_BYTES]);
            let mut back = [1.0; BLOCK];
            Iq4Nl.decode(&out, &mut back);
            assert!(back.iter().all(|x| *x == 0.0));
        }
    }
}
