//! `q4_0`: ggml's blocks of 32 channels with one signed scale, 4.5 bits per channel.
//!
//! Block of 18 bytes: `d` as f16 little-endian, then 16 bytes of codes; byte j holds channel j in its low nibble and
//! channel j + 16 in its high one; a channel is `(q − 8) · d`.
//! Invariants, as ggml's reference code has them: `d = m / −8`, m the value of largest magnitude *with its sign* (the
//! first of several); codes are `min(15, ⌊x · (1/d) + 8.5⌋)` from the d before it is rounded to f16, product and sum
//! rounded one by one (x86 builds of ggml's library are compiled without fused instructions, and gguf-py does the
//! same). The value opposite to m may be off by |d|. A last block that is short is padded with zeros and stored whole:
//! a row takes ⌈dim/32⌉ · 18 bytes.

use std::sync::Arc;

use half::f16;

use super::super::stage::{Codec, Kind, Stage, StageDef, Tolerance, never};
use super::blocks::{self, Block};
use crate::compute::cpu::rows;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "q4_0",
    kind: Kind::Encode,
    doc: "ggml's 4-bit blocks of 32 with a signed f16 scale, 4.5 bits per channel",
    paper: "ggml-org/llama.cpp, ggml/src/ggml-quants.c: quantize_row_q4_0_ref",
    params: &[],
    calibrated: never,
    examples: &["\"q4_0\""],
    tolerance: Tolerance::RelativeL2(0.18),
    build: |_, _| Ok(Stage::Encode(Codec::Rows(Arc::new(Q4_0)))),
};

const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 18;
const HALF: usize = BLOCK / 2;

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct Q4_0;

/// How stored rows are read.
static KERNEL: rows::Nibbles<rows::Half> = rows::Nibbles {
    scale: rows::Half,
    levels: [
        -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
    ],
};

blocks::block_codec!(Q4_0, BLOCK, BLOCK_BYTES, 2, Some(&KERNEL));

#[inline(always)]
fn code(x: f32, inverse: f32) -> u8 {
    blocks::low_byte((x * inverse + 8.5).floor().min(15.0))
}

impl Block<BLOCK, BLOCK_BYTES> for Q4_0 {
    #[inline(always)]
    fn encode_block(x: &[f32; BLOCK], out: &mut [u8; BLOCK_BYTES]) {
        let d = blocks::extreme(x) / -8.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        let (scale, codes) = out.split_at_mut(2);
        scale.copy_from_slice(&f16::from_f32(d).to_le_bytes());
        let (low, high) = x.split_at(HALF);
        for ((q, &a), &b) in codes.iter_mut().zip(low).zip(high) {
            *q = code(a, inverse) | code(b, inverse) << 4;
        }
    }

    #[inline(always)]
    fn decode_block(bytes: &[u8; BLOCK_BYTES], x: &mut [f32; BLOCK]) {
        let d = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        let (low, high) = x.split_at_mut(HALF);
        for ((a, b), &q) in low.iter_mut().zip(high).zip(&bytes[2..]) {
            *a = (i32::from(q & 15) - 8) as f32 * d;
            *b = (i32::from(q >> 4) - 8) as f32 * d;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::stage::RowCodec;

    fn encoded(x: &[f32; BLOCK]) -> [u8; BLOCK_BYTES] {
        let mut out = [0; BLOCK_BYTES];
        Q4_0.encode(x, &mut out);
        out
    }

    #[test]
    fn the_scale_has_the_opposite_sign_of_the_extreme_value() {
        let mut x = [0.0; BLOCK];
        x[3] = 8.0;
        assert_eq!(encoded(&x)[..2], f16::from_f32(-1.0).to_le_bytes());
        x[3] = -8.0;
        assert_eq!(encoded(&x)[..2], f16::ONE.to_le_bytes());
        // Of two equal magnitudes the first one gives the sign.
        x[4] = 8.0;
        assert_eq!(encoded(&x)[..2], f16::ONE.to_le_bytes());
        x[2] = 8.0;
        assert_eq!(encoded(&x)[..2], f16::from_f32(-1.0).to_le_bytes());
    }

    #[test]
    fn nibbles_hold_channels_j_and_j_plus_16() {
        let mut x = [0.0; BLOCK];
        x[0] = -8.0; // code 0, d = 1
        x[1] = 1.5; // floor(1.5 + 8.5) = 10
        x[17] = 1.49; // floor(9.99) = 9
        x[16] = 8.0; // 16 is cut to 15
        let out = encoded(&x);
        assert_eq!(out[2], 0xf0);
        assert_eq!(out[3], 0x9a);
        assert_eq!(out[4..], [0x88; 14]);
        let mut back = [0.0; BLOCK];
        Q4_0.decode(&out, &mut back);
        assert_eq!(
            (back[0], back[1], back[16], back[17]),
            (-8.0, 2.0, 7.0, 1.0)
        );
    }

    #[test]
    fn zeros_stay_zeros() {
        let out = encoded(&[0.0; BLOCK]);
        let mut back = [1.0; BLOCK];
        Q4_0.decode(&out, &mut back);
        assert_eq!(back, [0.0; BLOCK]);
        assert_eq!(out[2..], [0x88; 16]);
    }

    #[test]
    fn product_and_sum_are_rounded_one_by_one() {
        let mut n_differ = 0;
        for i in 0..200_000u32 {
            // x/d within an ulp of −1/2, −3/2 … −15/2: there the sum is finer than a rounded product.
            let inverse = 0.5 + (i % 4001) as f32 / 8192.0;
            let x = -((i % 8) as f32 + 0.5) / inverse;
            let product = (f64::from(x) * f64::from(inverse)) as f32;
            let sum = (f64::from(product) + 8.5) as f32;
            assert_eq!(code(x, inverse), sum.floor().min(15.0) as u8);
            let fused = x.mul_add(inverse, 8.5).floor().min(15.0) as u8;
            n_differ += u32::from(code(x, inverse) != fused);
        }
        assert!(n_differ > 0);
    }
}
