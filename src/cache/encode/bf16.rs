//! `bf16`: the upper half of an f32, little-endian, 2 bytes per channel, rounded to nearest with ties to even.

use std::sync::Arc;

use half::bf16;

use super::super::stage::{Codec, Kernel, Kind, RowCodec, Stage, StageDef, Tolerance, never};
use crate::compute::cpu::rows;
use crate::compute::cpu::vector::multiversion;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "bf16",
    kind: Kind::Encode,
    doc: "bfloat16, 2 bytes per channel: f32's range with 8 bits of precision",
    paper: "bfloat16: the leading 16 bits of IEEE binary32",
    params: &[],
    calibrated: never,
    examples: &["\"bf16\""],
    // No channel is off by more than 2^-8.
    tolerance: Tolerance::RelativeL2(3.6e-3),
    build: |_, _| Ok(Stage::Encode(Codec::Rows(Arc::new(Bf16)))),
};

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct Bf16;

impl RowCodec for Bf16 {
    fn row_bytes(&self, dim: usize) -> usize {
        2 * dim
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

    fn kernel(&self) -> Option<&dyn Kernel> {
        Some(&rows::Bf16)
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
    for (b, &x) in out.as_chunks_mut().0.iter_mut().zip(row) {
        *b = bf16::from_f32(x).to_le_bytes();
    }
}

#[inline(always)]
fn decode_body(bytes: &[u8], rows: &mut [f32]) {
    for (x, &b) in rows.iter_mut().zip(bytes.as_chunks().0) {
        *x = f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_to_nearest_even() {
        let x = [1.0, 1.0 + 2f32.powi(-8), 1.0 + 3.0 * 2f32.powi(-8), -0.0];
        let mut bytes = [0; 8];
        Bf16.encode(&x, &mut bytes);
        let codes: Vec<_> = bytes
            .chunks(2)
            .map(|b| u16::from_le_bytes([b[0], b[1]]))
            .collect();
        assert_eq!(codes, [0x3f80, 0x3f80, 0x3f82, 0x8000]);
        let mut back = [0.0; 4];
        Bf16.decode(&bytes, &mut back);
        assert_eq!(back, [1.0, 1.0, 1.0 + 2f32.powi(-6), 0.0]);
    }
}
