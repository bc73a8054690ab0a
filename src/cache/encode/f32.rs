//! `f32`: rows as they are, little-endian, 4 bytes per channel. The reference that drift is measured against.

use std::sync::Arc;

use super::super::stage::{Codec, Kernel, Kind, RowCodec, Stage, StageDef, Tolerance, never};
use crate::compute::cpu::rows;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "f32",
    kind: Kind::Encode,
    doc: "IEEE single, 4 bytes per channel, exact: the reference",
    paper: "IEEE 754-2019, binary32",
    params: &[],
    calibrated: never,
    examples: &["\"f32\""],
    tolerance: Tolerance::Exact,
    build: |_, _| Ok(Stage::Encode(Codec::Rows(Arc::new(F32)))),
};

/// The codec.
#[derive(Debug, Clone, Copy)]
pub struct F32;

impl RowCodec for F32 {
    fn row_bytes(&self, dim: usize) -> usize {
        4 * dim
    }

    fn scale_bytes(&self, _dim: usize) -> usize {
        0
    }

    fn encode(&self, row: &[f32], out: &mut [u8]) {
        for (b, x) in out.as_chunks_mut().0.iter_mut().zip(row) {
            *b = x.to_le_bytes();
        }
    }

    fn decode(&self, bytes: &[u8], row: &mut [f32]) {
        for (x, b) in row.iter_mut().zip(bytes.as_chunks().0) {
            *x = f32::from_le_bytes(*b);
        }
    }

    fn decode_rows(&self, bytes: &[u8], _dim: usize, rows: &mut [f32]) {
        self.decode(bytes, rows);
    }

    fn kernel(&self) -> Option<&dyn Kernel> {
        Some(&rows::F32)
    }
}
