//! `q5_1`: ggml's blocks of 32 channels with a scale and a minimum, 6 bits per channel.
//!
//! Block of 24 bytes: `d` and `m` as f16 little-endian, then 5-bit codes packed as `fifth_bits` has it; a channel is
//! `q · d + m`, the product rounded before the sum.
//! Invariants, as ggml's reference code has them: `m` is the smallest value, `d = (largest − m) / 31` in f32; codes are
//! `⌊(x − m) · (1/d) + 0.5⌋` from the d and m before they are rounded to f16, each operation rounded on its own. A last
//! block that is short is padded with zeros (which m and d see) and stored whole: a row takes ⌈dim/32⌉ · 24 bytes.

use std::sync::Arc;

use half::f16;

use super::super::stage::{Codec, Kind, Stage, StageDef, Tolerance, never};
use super::blocks::{self, Block};
use super::fifth_bits;
use crate::compute::cpu::rows;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "q5_1",
    kind: Kind::Encode,
    doc: "ggml's 5-bit blocks of 32 with an f16 scale and minimum, 6 bits per channel",
    paper: "ggml-org/llama.cpp, ggml/src/ggml-quants.c: quantize_row_q5_1_ref",
    params: &[],
    calibrated: never,
    examples: &["\"q5_1\""],
    tolerance: Tolerance::RelativeL2(0.07),
    build: |_, _| Ok(Stage::Encode(Codec::Rows(Arc::new(Q5_1)))),
};

const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 4 + fifth_bits::BYTES;

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct Q5_1;

static KERNEL: rows::Fives<rows::HalfAndMin, 0> = rows::Fives {
    scale: rows::HalfAndMin,
};

blocks::block_codec!(Q5_1, BLOCK, BLOCK_BYTES, 4, Some(&KERNEL));

impl Block<BLOCK, BLOCK_BYTES> for Q5_1 {
    #[inline(always)]
    fn encode_block(x: &[f32; BLOCK], out: &mut [u8; BLOCK_BYTES]) {
        let (min, max) = blocks::range(x);
        let d = (max - min) / 31.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        let mut codes = [0; BLOCK];
        for (q, v) in codes.iter_mut().zip(x) {
            *q = blocks::low_byte(((v - min) * inverse + 0.5).floor().min(31.0));
        }
        out[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
        out[2..4].copy_from_slice(&f16::from_f32(min).to_le_bytes());
        fifth_bits::pack(&codes, &mut out[4..]);
    }

    #[inline(always)]
    fn decode_block(bytes: &[u8; BLOCK_BYTES], x: &mut [f32; BLOCK]) {
        let d = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        let m = f16::from_le_bytes([bytes[2], bytes[3]]).to_f32();
        for (v, q) in x.iter_mut().zip(fifth_bits::unpack(&bytes[4..])) {
            *v = f32::from(q) * d + m;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::stage::RowCodec;

    #[test]
    fn both_ends_of_the_range_are_codes_0_and_31() {
        let mut x = [2.0; BLOCK];
        x[0] = -1.0; // m
        x[17] = 14.5; // d = 0.5
        x[1] = 7.24; // 16.48 goes down
        x[16] = 7.25; // 16.5 goes up
        let mut out = [0; BLOCK_BYTES];
        Q5_1.encode(&x, &mut out);
        assert_eq!(out[..2], f16::from_f32(0.5).to_le_bytes());
        assert_eq!(out[2..4], f16::from_f32(-1.0).to_le_bytes());
        let mut back = [0.0; BLOCK];
        Q5_1.decode(&out, &mut back);
        assert_eq!(
            (back[0], back[17], back[1], back[16]),
            (-1.0, 14.5, 7.0, 7.5)
        );
    }
}
