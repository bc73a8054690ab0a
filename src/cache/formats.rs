//! How rows lie in memory: a codec for a number of channels, K and V apart.
//!
//! Invariant: every row of a table has the same format and the same number of bytes.

use std::sync::Arc;

use super::stage::{Codec, RowCodec, Side};

/// How the rows of one side are laid out.
#[derive(Clone)]
pub struct Format {
    /// Codec.
    pub codec: Codec,
    /// Channels per row.
    pub dim: usize,
}

impl Codec {
    /// Bytes of tables shared by all rows.
    pub fn table_bytes(&self) -> u64 {
        match self {
            Codec::Rows(codec) => codec.table_bytes(),
            Codec::Pages(codec) => codec.table_bytes(),
        }
    }
}

impl Format {
    /// The row codec.
    pub fn rows(&self) -> &Arc<dyn RowCodec> {
        match &self.codec {
            Codec::Rows(codec) => codec,
            Codec::Pages(_) => unreachable!("page-wise codecs are refused when stages are built"),
        }
    }

    /// Bytes per row.
    pub fn row_bytes(&self) -> usize {
        self.rows().row_bytes(self.dim)
    }
}

/// Both sides' formats.
#[derive(Clone)]
pub struct PairFormat {
    /// Keys.
    pub k: Format,
    /// Values.
    pub v: Format,
}

impl PairFormat {
    /// One side's format.
    pub fn side(&self, side: Side) -> &Format {
        match side {
            Side::K => &self.k,
            Side::V => &self.v,
        }
    }
}
