//! `q5_0`: ggml's blocks of 32 channels with one signed scale, 5.5 bits per channel.
//!
//! Block of 22 bytes: `d` as f16 little-endian, then 5-bit codes packed as `fifth_bits` has it; a channel is
//! `(q − 16) · d`.
//! Invariants, as ggml's reference code has them: `d = m / −16`, m the value of largest magnitude *with its sign* (the
//! first of several); codes are `min(31, ⌊x · (1/d) + 16.5⌋)` from the d before it is rounded to f16, product and sum
//! rounded one by one. A last block that is short is padded with zeros and stored whole: a row takes
//! ⌈dim/32⌉ · 22 bytes.

use std::sync::Arc;

use half::f16;

use super::super::stage::{Codec, Kind, Stage, StageDef, Tolerance, never};
use super::blocks::{self, Block};
use super::fifth_bits;
use crate::compute::cpu::rows;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "q5_0",
    kind: Kind::Encode,
    doc: "ggml's 5-bit blocks of 32 with a signed f16 scale, 5.5 bits per channel",
    paper: "ggml-org/llama.cpp, ggml/src/ggml-quants.c: quantize_row_q5_0_ref",
    params: &[],
    calibrated: never,
    examples: &["\"q5_0\""],
    tolerance: Tolerance::RelativeL2(0.09),
    build: |_, _| Ok(Stage::Encode(Codec::Rows(Arc::new(Q5_0)))),
};

const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 2 + fifth_bits::BYTES;

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct Q5_0;

static KERNEL: rows::Fives<rows::Half, 16> = rows::Fives { scale: rows::Half };

blocks::block_codec!(Q5_0, BLOCK, BLOCK_BYTES, 2, Some(&KERNEL));

impl Block<BLOCK, BLOCK_BYTES> for Q5_0 {
    #[inline(always)]
    fn encode_block(x: &[f32; BLOCK], out: &mut [u8; BLOCK_BYTES]) {
        let d = blocks::extreme(x) / -16.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        let mut codes = [0; BLOCK];
        for (q, v) in codes.iter_mut().zip(x) {
            *q = blocks::low_byte((v * inverse + 16.5).floor().min(31.0));
        }
        out[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
        fifth_bits::pack(&codes, &mut out[2..]);
    }

    #[inline(always)]
    fn decode_block(bytes: &[u8; BLOCK_BYTES], x: &mut [f32; BLOCK]) {
        let d = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        for (v, q) in x.iter_mut().zip(fifth_bits::unpack(&bytes[2..])) {
            *v = (i32::from(q) - 16) as f32 * d;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::stage::RowCodec;

    #[test]
    fn the_value_opposite_to_the_extreme_is_cut() {
        let mut x = [0.0; BLOCK];
        x[2] = -16.0; // code 0, d = 1
        x[3] = 16.0; // 32 is cut to 31
        x[18] = 1.5; // 18
        x[19] = -1.51; // ⌊14.99⌋
        let mut out = [0; BLOCK_BYTES];
        Q5_0.encode(&x, &mut out);
        assert_eq!(out[..2], f16::ONE.to_le_bytes());
        let mut back = [0.0; BLOCK];
        Q5_0.decode(&out, &mut back);
        assert_eq!(
            (back[2], back[3], back[18], back[19], back[0]),
            (-16.0, 15.0, 2.0, -2.0, 0.0)
        );
    }

    #[test]
    fn zeros_stay_zeros() {
        let mut out = [1; BLOCK_BYTES];
        Q5_0.encode(&[0.0; BLOCK], &mut out);
        // 0 / −16 is −0, and code 16 has nothing but its fifth bit.
        assert_eq!(out[..6], [0, 0x80, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(out[6..], [0; 16]);
        let mut back = [1.0; BLOCK];
        Q5_0.decode(&out, &mut back);
        assert_eq!(back, [0.0; BLOCK]);
    }
}
