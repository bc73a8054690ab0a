//! How rows lie in memory: a codec for a number of channels, K and V apart.
//!
//! Invariant: every row of a table has the same format and the same number of bytes.

use std::sync::Arc;

use super::stage::{RowCodec, Side};

/// How the rows of one side are laid out.
#[derive(Clone)]
pub struct RowFormat {
    /// Codec.
    pub codec: Arc<dyn RowCodec>,
    /// Channels per row.
    pub dim: usize,
}

impl RowFormat {
    /// Bytes per row.
    pub fn row_bytes(&self) -> usize {
        self.codec.row_bytes(self.dim)
    }
}

/// Both sides' formats.
#[derive(Clone)]
pub struct PairFormat {
    /// Keys.
    pub k: RowFormat,
    /// Values.
    pub v: RowFormat,
}

impl PairFormat {
    /// One side's format.
    pub fn side(&self, side: Side) -> &RowFormat {
        match side {
            Side::K => &self.k,
            Side::V => &self.v,
        }
    }
}
