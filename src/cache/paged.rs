//! A codec over larger pages than its own: how a side waits for the other one.
//!
//! Invariant: the bytes are those of the codec's own pages back to back, so rows decode to what they would have been.

use super::stage::{Codec, PageCodec};

/// A row-wise codec, or a page-wise one of smaller pages, that codes `page_rows` rows together.
pub struct Paged {
    /// The codec.
    pub codec: Codec,
    /// Rows that are encoded together: a multiple of the codec's own.
    pub page_rows: usize,
}

impl Paged {
    /// Sums over the codec's own pages of `n_rows` rows.
    fn sum(&self, n_rows: usize, of: impl Fn(usize) -> usize) -> usize {
        let own = self.codec.page_rows();
        (0..n_rows)
            .step_by(own)
            .map(|i| of(own.min(n_rows - i)))
            .sum()
    }

    fn own_bytes(&self, n_rows: usize, dim: usize) -> usize {
        match &self.codec {
            Codec::Rows(codec) => n_rows * codec.row_bytes(dim),
            Codec::Pages(codec) => codec.page_bytes(n_rows, dim),
        }
    }
}

impl PageCodec for Paged {
    fn page_rows(&self) -> usize {
        self.page_rows
    }

    fn page_bytes(&self, n_rows: usize, dim: usize) -> usize {
        self.sum(n_rows, |n| self.own_bytes(n, dim))
    }

    fn scale_bytes(&self, n_rows: usize, dim: usize) -> usize {
        self.sum(n_rows, |n| match &self.codec {
            Codec::Rows(codec) => n * codec.scale_bytes(dim),
            Codec::Pages(codec) => codec.scale_bytes(n, dim),
        })
    }

    fn encode(&self, rows: &[f32], dim: usize, out: &mut [u8]) {
        let mut out = out;
        for rows in rows.chunks(self.codec.page_rows() * dim) {
            let n = self.own_bytes(rows.len() / dim, dim);
            let (own, later) = out.split_at_mut(n);
            match &self.codec {
                Codec::Rows(codec) => codec.encode(rows, own),
                Codec::Pages(codec) => codec.encode(rows, dim, own),
            }
            out = later;
        }
    }

    fn decode(&self, bytes: &[u8], dim: usize, rows: &mut [f32]) {
        if let Codec::Rows(codec) = &self.codec {
            return codec.decode_rows(bytes, dim, rows);
        }
        let mut bytes = bytes;
        for rows in rows.chunks_mut(self.codec.page_rows() * dim) {
            let (own, later) = bytes.split_at(self.own_bytes(rows.len() / dim, dim));
            if let Codec::Pages(codec) = &self.codec {
                codec.decode(own, dim, rows);
            }
            bytes = later;
        }
    }

    fn table_bytes(&self) -> u64 {
        self.codec.table_bytes()
    }
}
