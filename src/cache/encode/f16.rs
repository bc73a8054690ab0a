//! `f16`: IEEE half, little-endian, 2 bytes per channel, rounded to nearest with ties to even.
//!
//! Invariants: a magnitude of 65,520 or more becomes infinity, as IEEE rounding asks; there is no clamp.

use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::super::stage::{Codec, Kernel, Kind, RowCodec, Stage, StageDef, Tolerance, never};
use crate::compute::cpu::rows;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "f16",
    kind: Kind::Encode,
    doc: "IEEE half, 2 bytes per channel: the base of every ratio in a report",
    paper: "IEEE 754-2019, binary16",
    params: &[],
    calibrated: never,
    examples: &["\"f16\""],
    // No channel is off by more than 2^-11.
    tolerance: Tolerance::RelativeL2(4.5e-4),
    build: |_, _| Ok(Stage::Encode(Codec::Rows(Arc::new(F16)))),
};

/// Channels converted at a time, through a buffer that is aligned whatever the row's address is.
const BUFFER: usize = 64;

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct F16;

impl RowCodec for F16 {
    fn row_bytes(&self, dim: usize) -> usize {
        2 * dim
    }

    fn scale_bytes(&self, _dim: usize) -> usize {
        0
    }

    fn encode(&self, row: &[f32], out: &mut [u8]) {
        let mut buffer = [f16::ZERO; BUFFER];
        for (x, b) in row.chunks(BUFFER).zip(out.chunks_mut(2 * BUFFER)) {
            let halves = &mut buffer[..x.len()];
            halves.convert_from_f32_slice(x);
            for (pair, h) in b.as_chunks_mut().0.iter_mut().zip(halves) {
                *pair = h.to_le_bytes();
            }
        }
    }

    fn decode(&self, bytes: &[u8], row: &mut [f32]) {
        let mut buffer = [f16::ZERO; BUFFER];
        for (x, b) in row.chunks_mut(BUFFER).zip(bytes.chunks(2 * BUFFER)) {
            let halves = &mut buffer[..x.len()];
            for (h, pair) in halves.iter_mut().zip(b.as_chunks().0) {
                *h = f16::from_le_bytes(*pair);
            }
            halves.convert_to_f32_slice(x);
        }
    }

    fn decode_rows(&self, bytes: &[u8], _dim: usize, rows: &mut [f32]) {
        self.decode(bytes, rows);
    }

    fn kernel(&self) -> Option<&dyn Kernel> {
        Some(&rows::F16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_to_nearest_even_and_overflows_to_infinity() {
        let x = [
            1.0,
            1.0 + 2f32.powi(-11),       // tie, goes down to 1
            1.0 + 3.0 * 2f32.powi(-11), // tie, goes up to 1 + 2^-9
            65_519.0,
            65_520.0,
            -0.0,
            2f32.powi(-24), // smallest subnormal
            2f32.powi(-25), // tie with 0
        ];
        let mut bytes = [0; 16];
        F16.encode(&x, &mut bytes);
        let codes: Vec<_> = bytes
            .chunks(2)
            .map(|b| u16::from_le_bytes([b[0], b[1]]))
            .collect();
        assert_eq!(
            codes,
            [0x3c00, 0x3c00, 0x3c02, 0x7bff, 0x7c00, 0x8000, 1, 0]
        );
    }

    #[test]
    fn every_half_survives_at_any_alignment() {
        let codes: Vec<u16> = (0..=u16::MAX)
            .filter(|&c| !f16::from_bits(c).is_nan())
            .collect();
        let mut bytes = vec![0u8; 2 * codes.len() + 1];
        for (b, c) in bytes[1..].chunks_exact_mut(2).zip(&codes) {
            b.copy_from_slice(&c.to_le_bytes());
        }
        let mut x = vec![0.0; codes.len()];
        F16.decode(&bytes[1..], &mut x);
        for (x, &c) in x.iter().zip(&codes) {
            assert_eq!(x.to_bits(), f16::from_bits(c).to_f32().to_bits());
        }
        let mut again = vec![0u8; bytes.len()];
        F16.encode(&x, &mut again[1..]);
        assert_eq!(again, bytes);
    }
}
