//! A codec with the kernels that its parameters ask for.
//!
//! Invariant: bytes and decoded values are the codec's own.

use std::sync::Arc;

use super::super::stage::{Kernel, PageCodec, RowCodec};

/// The codec, and how its stored rows are read.
pub(super) struct WithKernel<C> {
    pub codec: C,
    pub kernel: Box<dyn Kernel>,
}

impl<C: RowCodec> RowCodec for WithKernel<C> {
    fn row_bytes(&self, dim: usize) -> usize {
        self.codec.row_bytes(dim)
    }

    fn scale_bytes(&self, dim: usize) -> usize {
        self.codec.scale_bytes(dim)
    }

    fn encode(&self, row: &[f32], out: &mut [u8]) {
        self.codec.encode(row, out);
    }

    fn decode(&self, bytes: &[u8], row: &mut [f32]) {
        self.codec.decode(bytes, row);
    }

    fn decode_rows(&self, bytes: &[u8], dim: usize, rows: &mut [f32]) {
        self.codec.decode_rows(bytes, dim, rows);
    }

    fn kernel(&self) -> Option<&dyn Kernel> {
        Some(&*self.kernel)
    }

    fn leveled(&self) -> Option<Arc<dyn PageCodec>> {
        self.codec.leveled()
    }

    fn table_bytes(&self) -> u64 {
        self.codec.table_bytes()
    }
}
