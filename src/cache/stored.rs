//! Scores and weighted sums over rows as they are stored: by a format's own kernels, or over decoded rows.
//!
//! Invariant: both ways give the same bits, those of `gemm` over decoded rows.

use std::ops::Range;

use super::formats::{Format, Mask, pages};
use super::scratch::room;
use super::stage::{Codec, RowCodec};
use crate::compute::cpu::gemm::{Mat, MatMut};
use crate::compute::cpu::rows::{F32, Kernel, Rows};

/// Rows that lie back to back, or the rows of one page.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    /// Their bytes.
    pub bytes: &'a [u8],
    /// How many.
    pub n_rows: usize,
    /// Channels of a row.
    pub dim: usize,
    /// What is read next, from elsewhere: kernels ask for it meanwhile.
    pub ahead: &'a [u8],
}

/// The stored rows of a range.
#[derive(Debug, Clone, Copy)]
pub struct StoredRange<'a> {
    /// Which rows.
    pub stored: Mask,
    /// Their bytes.
    pub bytes: &'a [u8],
    /// What is read next, from elsewhere.
    pub ahead: &'a [u8],
}

impl<'a> StoredRange<'a> {
    /// As large a part of what is read next as `part` is of these bytes.
    fn ahead(&self, part: Range<usize>) -> &'a [u8] {
        let (n, all) = (self.ahead.len(), self.bytes.len().max(1));
        &self.ahead[part.start * n / all..part.end * n / all]
    }
}

/// Working memory of the kernels.
#[derive(Debug, Default)]
pub struct Work {
    /// A few rows, filled up to a vector's.
    pub padding: Vec<u8>,
    /// Decoded rows.
    pub rows: Vec<f32>,
    /// Tables that a codec makes for a page.
    pub tables: Vec<f32>,
}

/// Decoded rows.
pub struct Decoded<'a> {
    rows: &'a [f32],
    padding: &'a mut Vec<u8>,
    dim: usize,
}

impl Work {
    /// Decodes rows.
    pub fn decoded(
        &mut self,
        stored: Stored<'_>,
        decode: impl FnOnce(&[u8], &mut [f32]),
    ) -> Decoded<'_> {
        let n = stored.n_rows * stored.dim;
        if self.rows.len() < n {
            room(&mut self.rows, n);
            self.rows.resize(n, 0.0);
        }
        decode(stored.bytes, &mut self.rows[..n]);
        Decoded {
            rows: &self.rows[..n],
            padding: &mut self.padding,
            dim: stored.dim,
        }
    }

    /// Bytes of each buffer.
    pub fn sizes(&self) -> [usize; 3] {
        [
            self.padding.capacity(),
            self.rows.capacity() * size_of::<f32>(),
            self.tables.capacity() * size_of::<f32>(),
        ]
    }
}

impl<'a> Decoded<'a> {
    /// Rows that are decoded already, `[row][dim]`.
    pub fn new(rows: &'a [f32], dim: usize, padding: &'a mut Vec<u8>) -> Self {
        Self { rows, padding, dim }
    }

    fn part(&self, rows: Range<usize>) -> Rows<'a> {
        Rows {
            bytes: bytemuck::cast_slice(&self.rows[rows.start * self.dim..rows.end * self.dim]),
            stride: 4 * self.dim,
            dim: self.dim,
            ahead: &[],
        }
    }

    /// Scores of all rows.
    pub fn scores(&mut self, q: &[f32], out: MatMut<'_>) {
        let all = self.part(0..self.rows.len() / self.dim);
        F32.scores(all, q, self.padding, out);
    }

    /// The weighted sum of some rows.
    pub fn weighted_sum(&self, rows: Range<usize>, weights: Mat<'_>, out: &mut [f32]) {
        F32.weighted_sum(self.part(rows), weights, out);
    }
}

impl Format {
    /// `out[query][row]` = the score of each stored row of a range for each query. `q`: `[query][dim]`.
    pub fn scores(&self, range: StoredRange<'_>, q: &[f32], work: &mut Work, out: MatMut<'_>) {
        let codec = match &self.codec {
            Codec::Rows(codec) => {
                let all = self.part(range, 0..range.bytes.len(), range.stored.count_ones());
                return row_scores(codec.as_ref(), all, q, work, out);
            }
            Codec::Pages(codec) => codec,
        };
        let (mut at, mut first) = (0, 0);
        for page in pages(range.stored, codec.page_rows()) {
            let n_rows = page.count_ones();
            let end = at + codec.page_bytes(n_rows as usize, self.dim);
            let out = MatMut {
                data: &mut out.data[first..],
                stride: out.stride,
            };
            codec.scores(self.part(range, at..end, n_rows), q, work, out);
            (at, first) = (end, first + n_rows as usize);
        }
    }

    /// `out[query]` += Σ `weights[query][row]` · row over some of the stored rows of a range; the weights of these rows
    /// come first. `out`: `[query][dim]`.
    pub fn weighted_sum(
        &self,
        range: StoredRange<'_>,
        rows: Range<usize>,
        weights: Mat<'_>,
        work: &mut Work,
        out: &mut [f32],
    ) {
        let codec = match &self.codec {
            Codec::Rows(codec) => {
                let n = codec.row_bytes(self.dim);
                let part = self.part(range, rows.start * n..rows.end * n, rows.len() as u32);
                return row_weighted_sum(codec.as_ref(), part, weights, work, out);
            }
            Codec::Pages(codec) => codec,
        };
        let (mut at, mut first) = (0, 0);
        for page in pages(range.stored, codec.page_rows()) {
            let n_rows = page.count_ones() as usize;
            let end = at + codec.page_bytes(n_rows, self.dim);
            let part = rows.start.max(first)..rows.end.min(first + n_rows);
            if !part.is_empty() {
                let weights = Mat {
                    data: &weights.data[part.start - rows.start..],
                    stride: weights.stride,
                };
                let part = part.start - first..part.end - first;
                let page = self.part(range, at..end, n_rows as u32);
                codec.weighted_sum(page, part, weights, work, out);
            }
            (at, first) = (end, first + n_rows);
        }
    }

    fn part<'a>(&self, range: StoredRange<'a>, bytes: Range<usize>, n_rows: u32) -> Stored<'a> {
        Stored {
            ahead: range.ahead(bytes.clone()),
            bytes: &range.bytes[bytes],
            n_rows: n_rows as usize,
            dim: self.dim,
        }
    }
}

fn fitting<'a>(codec: &'a dyn RowCodec, stored: Stored<'a>) -> Option<(&'a dyn Kernel, Rows<'a>)> {
    let rows = Rows {
        bytes: stored.bytes,
        stride: codec.row_bytes(stored.dim),
        dim: stored.dim,
        ahead: stored.ahead,
    };
    let kernel = codec.kernel().filter(|k| k.takes(stored.dim))?;
    Some((kernel, rows))
}

/// Scores of rows that lie back to back.
pub fn row_scores(
    codec: &dyn RowCodec,
    stored: Stored<'_>,
    q: &[f32],
    work: &mut Work,
    out: MatMut<'_>,
) {
    match fitting(codec, stored) {
        Some((kernel, rows)) => kernel.scores(rows, q, &mut work.padding, out),
        None => work
            .decoded(stored, |b, r| codec.decode_rows(b, stored.dim, r))
            .scores(q, out),
    }
}

/// The weighted sum of rows that lie back to back.
pub fn row_weighted_sum(
    codec: &dyn RowCodec,
    stored: Stored<'_>,
    weights: Mat<'_>,
    work: &mut Work,
    out: &mut [f32],
) {
    match fitting(codec, stored) {
        Some((kernel, rows)) => kernel.weighted_sum(rows, weights, out),
        None => work
            .decoded(stored, |b, r| codec.decode_rows(b, stored.dim, r))
            .weighted_sum(0..stored.n_rows, weights, out),
    }
}
