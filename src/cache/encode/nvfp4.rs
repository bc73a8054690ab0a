//! `nvfp4`: E2M1 codes in blocks of 16 channels with an E4M3 scale each, 4.5 bits per channel, bit for bit as NVIDIA's
//! Model Optimizer stores a KV cache cast with a constant amax (`nvfp4_cast`).
//!
//! Row layout: all codes, two per byte, even channel in the low nibble; then one E4M3 byte per block.
//! A channel is `E2M1(code) · (scale · s2)` with `s2 = 448 / 2688`, the tensor scale that a constant amax of 448 gives.
//!
//! Invariants: the block's scale is `E4M3(clamp(max|x| / (6·s2), 2⁻⁹, 448))`, 1.0 for a block of zeros; a code is the
//! E2M1 number nearest to `x / (scale · s2)`, ties to the even code, magnitudes over 6 to 6; a negative number that
//! rounds to zero has code 8, while −0.0 has code 0. A last block that is short is padded with zeros and stored whole:
//! a row takes ⌈dim/16⌉ · 9 bytes.

use std::sync::Arc;

use super::super::stage::{Codec, Kind, RowCodec, Stage, StageDef, Tolerance, never};
use super::float8::{self, Float8};
use super::fp8_e4m3::Fp8E4m3;
use super::{blocks, e2m1};
use crate::compute::cpu::vector::multiversion;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "nvfp4",
    kind: Kind::Encode,
    doc: "NVFP4: E2M1 blocks of 16 with an E4M3 scale, 4.5 bits per channel",
    paper: "NVIDIA/Model-Optimizer, nvfp4_tensor.py; recipe nvfp4_cast (constant amax)",
    params: &[],
    calibrated: never,
    examples: &["\"nvfp4\""],
    tolerance: Tolerance::RelativeL2(0.18),
    build: |_, _| Ok(Stage::Encode(Codec::Rows(Arc::new(Nvfp4)))),
};

const BLOCK: usize = 16;
const CODE_BYTES: usize = BLOCK / 2;
/// The tensor's scale: amax / (6 · 448) with the amax pinned to 448.
const TENSOR_SCALE: f32 = 448.0 / 2688.0;

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct Nvfp4;

impl RowCodec for Nvfp4 {
    fn row_bytes(&self, dim: usize) -> usize {
        dim.div_ceil(BLOCK) * (CODE_BYTES + 1)
    }

    fn scale_bytes(&self, dim: usize) -> usize {
        dim.div_ceil(BLOCK)
    }

    fn encode(&self, row: &[f32], out: &mut [u8]) {
        encode(row, out);
    }

    fn decode(&self, bytes: &[u8], row: &mut [f32]) {
        decode_rows(bytes, row.len(), row);
    }

    fn decode_rows(&self, bytes: &[u8], dim: usize, rows: &mut [f32]) {
        decode_rows(bytes, dim, rows);
    }
}

multiversion! {
    fn encode(row: &[f32], out: &mut [u8]) = encode_body;
}

multiversion! {
    fn decode_rows(bytes: &[u8], dim: usize, rows: &mut [f32]) = decode_rows_body;
}

#[inline(always)]
fn encode_body(row: &[f32], out: &mut [u8]) {
    let n_blocks = row.len().div_ceil(BLOCK);
    let (codes, scales) = out.split_at_mut(n_blocks * CODE_BYTES);
    let (whole, rest) = row.as_chunks::<BLOCK>();
    let (codes, _) = codes.as_chunks_mut::<CODE_BYTES>();
    let mut targets = codes.iter_mut().zip(scales);
    // The blocks come first in the zip: it must not take a target that the short block needs.
    for (x, (q, s)) in whole.iter().zip(targets.by_ref()) {
        *s = encode_block(x, q);
    }
    if let (false, Some((q, s))) = (rest.is_empty(), targets.next()) {
        *s = encode_block(&blocks::padded(rest), q);
    }
}

#[inline(always)]
fn decode_rows_body(bytes: &[u8], dim: usize, rows: &mut [f32]) {
    let row_bytes = Nvfp4.row_bytes(dim);
    for (b, row) in bytes
        .chunks_exact(row_bytes)
        .zip(rows.chunks_exact_mut(dim))
    {
        decode_row(b, row);
    }
}

#[inline(always)]
fn decode_row(bytes: &[u8], row: &mut [f32]) {
    let n_blocks = row.len().div_ceil(BLOCK);
    let (codes, scales) = bytes.split_at(n_blocks * CODE_BYTES);
    let (codes, _) = codes.as_chunks::<CODE_BYTES>();
    let (whole, rest) = row.as_chunks_mut::<BLOCK>();
    let mut sources = codes.iter().zip(scales);
    for (x, (q, &s)) in whole.iter_mut().zip(sources.by_ref()) {
        decode_block(q, s, x);
    }
    if let (false, Some((q, &s))) = (rest.is_empty(), sources.next()) {
        let mut x = [0.0; BLOCK];
        decode_block(q, s, &mut x);
        rest.copy_from_slice(&x[..rest.len()]);
    }
}

/// Writes a block's codes and returns its scale.
#[inline(always)]
fn encode_block(x: &[f32; BLOCK], codes: &mut [u8; CODE_BYTES]) -> u8 {
    let amax = f32::from_bits(blocks::max_magnitude_bits(x));
    let wanted = if amax == 0.0 {
        1.0
    } else {
        // Unclamped, a small block would get scale 0 and a large one NaN.
        (amax / (6.0 * TENSOR_SCALE)).clamp(Fp8E4m3::MIN_POSITIVE, Fp8E4m3::MAX)
    };
    let scale = float8::from_f32::<Fp8E4m3>(wanted);
    let step = float8::to_f32::<Fp8E4m3>(scale) * TENSOR_SCALE;
    for (q, pair) in codes.iter_mut().zip(x.as_chunks::<2>().0) {
        *q = (to_e2m1(pair[0] / step) | to_e2m1(pair[1] / step) << 4) as u8;
    }
    scale
}

#[inline(always)]
fn decode_block(codes: &[u8; CODE_BYTES], scale: u8, x: &mut [f32; BLOCK]) {
    let step = float8::to_f32::<Fp8E4m3>(scale) * TENSOR_SCALE;
    for (pair, &q) in x.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
        pair[0] = e2m1::to_f32(u32::from(q) & 15) * step;
        pair[1] = e2m1::to_f32(u32::from(q) >> 4) * step;
    }
}

/// By comparison, not by the sign bit: a negative number that rounds to zero has code 8, −0.0 has code 0.
#[inline(always)]
fn to_e2m1(x: f32) -> u32 {
    e2m1::magnitude_code(x) | u32::from(x < 0.0) << 3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(x: &[f32; BLOCK]) -> [u8; CODE_BYTES + 1] {
        let mut out = [0; CODE_BYTES + 1];
        Nvfp4.encode(x, &mut out);
        out
    }

    #[test]
    fn a_negative_that_rounds_to_zero_keeps_its_sign_but_minus_zero_does_not() {
        assert_eq!((to_e2m1(-0.1), to_e2m1(-0.0), to_e2m1(-2.5)), (8, 0, 12));
    }

    #[test]
    fn the_block_scale_is_e4m3_of_its_amax() {
        assert_eq!(6.0 * TENSOR_SCALE, 1.0);
        let scale_of = |amax: f32| {
            let mut x = [0.0; BLOCK];
            x[5] = -amax;
            float8::to_f32::<Fp8E4m3>(encoded(&x)[CODE_BYTES])
        };
        assert_eq!(scale_of(0.0), 1.0);
        assert_eq!(scale_of(3.3), 3.25);
        assert_eq!(scale_of(1e-6), 1.0 / 512.0);
        assert_eq!(scale_of(448.0), 448.0);
        assert_eq!(scale_of(1e6), 448.0);
    }

    #[test]
    fn the_even_channel_is_in_the_low_nibble_and_scales_follow_the_codes() {
        let mut row = [0.0; 2 * BLOCK];
        row[0] = 6.0; // scale 6, step 1
        row[1] = -1.0;
        row[BLOCK + 2] = -0.01;
        row[BLOCK + 3] = 3.0; // scale 3, step 0.5; −0.01 rounds to −0
        let mut out = [0xee; 18];
        Nvfp4.encode(&row, &mut out);
        assert_eq!(out[..2], [0xa7, 0]);
        assert_eq!(out[CODE_BYTES..CODE_BYTES + 2], [0, 0x78]);
        assert_eq!(
            out[16..],
            [
                float8::from_f32::<Fp8E4m3>(6.0),
                float8::from_f32::<Fp8E4m3>(3.0)
            ]
        );
        let mut back = [1.0; 2 * BLOCK];
        Nvfp4.decode(&out, &mut back);
        assert_eq!((back[0], back[1], back[BLOCK + 3]), (6.0, -1.0, 3.0));
        assert!(back[BLOCK + 2] == 0.0 && back[BLOCK + 2].is_sign_negative());
    }

    #[test]
    fn large_blocks_saturate() {
        let mut x = [0.0; BLOCK];
        x[0] = 1e4;
        let mut back = [0.0; BLOCK];
        Nvfp4.decode(&encoded(&x), &mut back);
        assert_eq!(back[0], 6.0 * (448.0 * TENSOR_SCALE));
    }
}
