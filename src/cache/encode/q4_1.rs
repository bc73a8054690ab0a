//! `q4_1`: ggml's blocks of 32 channels with a scale and a minimum, 5 bits per channel.
//!
//! Block of 20 bytes: `d` and `m` as f16 little-endian, then 16 bytes of codes; byte j holds channel j in its low nibble
//! and channel j + 16 in its high one; a channel is `q · d + m`, the product rounded before the sum.
//! Invariants, as ggml's reference code has them: `m` is the smallest value, `d = (largest − m) / 15` in f32; codes are
//! `min(15, ⌊(x − m) · (1/d) + 0.5⌋)` from the d and m before they are rounded to f16, each operation rounded on its
//! own. A last block that is short is padded with zeros (which m and d see) and stored whole: a row takes
//! ⌈dim/32⌉ · 20 bytes.

use std::sync::Arc;

use half::f16;

use super::super::stage::{Codec, Kind, Stage, StageDef, Tolerance, never};
use super::blocks::{self, Block};
use crate::compute::cpu::rows;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "q4_1",
    kind: Kind::Encode,
    doc: "ggml's 4-bit blocks of 32 with an f16 scale and minimum, 5 bits per channel",
    paper: "ggml-org/llama.cpp, ggml/src/ggml-quants.c: quantize_row_q4_1_ref",
    params: &[],
    calibrated: never,
    examples: &["\"q4_1\""],
    tolerance: Tolerance::RelativeL2(0.14),
    build: |_, _| Ok(Stage::Encode(Codec::Rows(Arc::new(Q4_1)))),
};

const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 20;
const HALF: usize = BLOCK / 2;

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct Q4_1;

/// How stored rows are read.
static KERNEL: rows::Nibbles<rows::HalfAndMin> = rows::Nibbles {
    scale: rows::HalfAndMin,
    levels: [
        0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
    ],
};

blocks::block_codec!(Q4_1, BLOCK, BLOCK_BYTES, 4, Some(&KERNEL));

impl Block<BLOCK, BLOCK_BYTES> for Q4_1 {
    #[inline(always)]
    fn encode_block(x: &[f32; BLOCK], out: &mut [u8; BLOCK_BYTES]) {
        let (min, max) = blocks::range(x);
        let d = (max - min) / 15.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        out[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
        out[2..4].copy_from_slice(&f16::from_f32(min).to_le_bytes());
        let code = |v: f32| blocks::low_byte(((v - min) * inverse + 0.5).floor().min(15.0));
        let (low, high) = x.split_at(HALF);
        for ((q, &a), &b) in out[4..].iter_mut().zip(low).zip(high) {
            *q = code(a) | code(b) << 4;
        }
    }

    #[inline(always)]
    fn decode_block(bytes: &[u8; BLOCK_BYTES], x: &mut [f32; BLOCK]) {
        let d = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        let m = f16::from_le_bytes([bytes[2], bytes[3]]).to_f32();
        let (low, high) = x.split_at_mut(HALF);
        for ((a, b), &q) in low.iter_mut().zip(high).zip(&bytes[4..]) {
            *a = f32::from(q & 15) * d + m;
            *b = f32::from(q >> 4) * d + m;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::stage::RowCodec;

    #[test]
    fn both_ends_of_the_range_are_codes_0_and_15() {
        let mut x = [2.0; BLOCK];
        x[0] = -1.0; // m
        x[17] = 6.5; // d = 0.5
        x[1] = 0.24; // 2.48 rounds to 2
        x[16] = 0.25; // 2.5 is a half and goes up
        let mut out = [0; BLOCK_BYTES];
        Q4_1.encode(&x, &mut out);
        assert_eq!(out[..2], f16::from_f32(0.5).to_le_bytes());
        assert_eq!(out[2..4], f16::from_f32(-1.0).to_le_bytes());
        assert_eq!(out[4..7], [0x30, 0xf2, 0x66]);
        let mut back = [0.0; BLOCK];
        Q4_1.decode(&out, &mut back);
        assert_eq!(
            (back[0], back[17], back[1], back[16]),
            (-1.0, 6.5, 0.0, 0.5)
        );
    }

    #[test]
    fn equal_values_have_scale_zero() {
        let mut out = [1; BLOCK_BYTES];
        Q4_1.encode(&[-3.0; BLOCK], &mut out);
        assert_eq!(out[..4], [0, 0, 0, 0xc2]);
        assert_eq!(out[4..], [0; HALF]);
        let mut back = [0.0; BLOCK];
        Q4_1.decode(&out, &mut back);
        assert_eq!(back, [-3.0; BLOCK]);
    }

    #[test]
    fn the_first_of_two_zeros_gives_the_minimum_its_sign() {
        let mut x = [1.0; BLOCK];
        let mut out = [0; BLOCK_BYTES];
        (x[9], x[16]) = (-0.0, 0.0);
        Q4_1.encode(&x, &mut out);
        assert_eq!(out[2..4], [0, 0x80]);
        (x[9], x[16]) = (0.0, -0.0);
        Q4_1.encode(&x, &mut out);
        assert_eq!(out[2..4], [0, 0]);
    }
}
