//! Scores and weighted sums over rows as they are stored: by a format's own kernels, or over decoded rows.
//!
//! Invariant: both ways give the same bits, those of `gemm` over decoded rows.

use std::ops::Range;

use super::formats::{Format, Mask, pages};
use super::rope::Rope;
use super::scratch::room;
use super::stage::{Codec, RowCodec};
use crate::compute::cpu::gemm::{Mat, MatMut};
use crate::compute::cpu::rows::{F32, Kernel, Room, Rows, Turn};

/// Rows that lie back to back, or the rows of one page.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    /// Their bytes.
    pub bytes: &'a [u8],
    /// How many.
    pub n_rows: usize,
    /// Channels of a row.
    pub dim: usize,
    /// What is read next: its beginning is asked for meanwhile.
    pub ahead: &'a [u8],
    /// How keys are turned before they meet queries, if they are.
    pub turn: Option<Turn<'a>>,
}

/// What turns keys that are stored before RoPE.
#[derive(Debug, Clone, Copy)]
pub struct Turning<'a> {
    /// Angles by position.
    pub rope: &'a Rope,
    /// The range's first position.
    pub first: u32,
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
    /// What turns them before they meet queries, if anything.
    pub turning: Option<Turning<'a>>,
}

impl<'a> StoredRange<'a> {
    /// What is read after a part of these bytes.
    fn after(&self, part: &Range<usize>) -> &'a [u8] {
        match &self.bytes[part.end..] {
            [] => self.ahead,
            later => later,
        }
    }
}

/// Working memory of the kernels.
#[derive(Debug, Default)]
pub struct Work {
    /// Of kernels over rows.
    pub room: Room,
    /// Decoded rows.
    pub rows: Vec<f32>,
    /// Tables that a codec makes for a page.
    pub tables: Vec<f32>,
    /// Angles of rows with others missing between them.
    pub angles: Vec<f32>,
}

/// Decoded rows.
pub struct Decoded<'a> {
    rows: &'a [f32],
    room: &'a mut Room,
    dim: usize,
    turn: Option<Turn<'a>>,
}

impl Work {
    /// Decodes rows.
    pub fn decoded<'a>(
        &'a mut self,
        stored: Stored<'a>,
        decode: impl FnOnce(&[u8], &mut [f32]),
    ) -> Decoded<'a> {
        let n = stored.n_rows * stored.dim;
        if self.rows.len() < n {
            room(&mut self.rows, n);
            self.rows.resize(n, 0.0);
        }
        decode(stored.bytes, &mut self.rows[..n]);
        Decoded {
            rows: &self.rows[..n],
            room: &mut self.room,
            dim: stored.dim,
            turn: stored.turn,
        }
    }

    /// Bytes of each buffer.
    pub fn sizes(&self) -> impl Iterator<Item = usize> {
        let buffers = [&self.rows, &self.tables, &self.angles];
        let buffers = buffers.map(|b| b.capacity() * size_of::<f32>());
        self.room.sizes().into_iter().chain(buffers)
    }
}

impl<'a> Decoded<'a> {
    /// Rows that are decoded already, `[row][dim]`.
    pub fn new(rows: &'a [f32], dim: usize, room: &'a mut Room) -> Self {
        Self {
            rows,
            room,
            dim,
            turn: None,
        }
    }

    /// The same rows, to be turned before they meet queries.
    pub fn turned(self, turn: Option<Turn<'a>>) -> Self {
        Self { turn, ..self }
    }

    fn part(&self, rows: Range<usize>) -> Rows<'a> {
        Rows {
            bytes: bytemuck::cast_slice(&self.rows[rows.start * self.dim..rows.end * self.dim]),
            stride: 4 * self.dim,
            dim: self.dim,
            ahead: &[],
            turn: self.turn,
        }
    }

    /// Scores of all rows.
    pub fn scores(&mut self, q: &[f32], out: MatMut<'_>) {
        let all = self.part(0..self.rows.len() / self.dim);
        F32.scores(all, q, self.room, out);
    }

    /// The columns of all rows.
    pub fn columns(&mut self, out: MatMut<'_>) {
        let all = self.part(0..self.rows.len() / self.dim);
        F32.columns(all, self.room, out);
    }

    /// The weighted sum of some rows.
    pub fn weighted_sum(&self, rows: Range<usize>, weights: Mat<'_>, out: &mut [f32]) {
        F32.weighted_sum(self.part(rows), weights, out);
    }
}

impl Format {
    /// `out[query][row]` = the score of each stored row of a range for each query. `q`: `[query][dim]`.
    pub fn scores(&self, range: StoredRange<'_>, q: &[f32], work: &mut Work, out: MatMut<'_>) {
        self.keys(range, work, out, |codec, stored, work, out| match codec {
            Codec::Rows(codec) => row_scores(codec.as_ref(), stored, q, work, out),
            Codec::Pages(codec) => codec.scores(stored, q, work, out),
        });
    }

    /// `out[channel][row]` = the stored rows of a range as they meet queries.
    pub fn columns(&self, range: StoredRange<'_>, work: &mut Work, out: MatMut<'_>) {
        self.keys(range, work, out, |codec, stored, work, out| match codec {
            Codec::Rows(codec) => row_columns(codec.as_ref(), stored, work, out),
            Codec::Pages(codec) => codec.columns(stored, work, out),
        });
    }

    /// Does something with what lies together of a range, whose results stand one after the other.
    fn keys(
        &self,
        range: StoredRange<'_>,
        work: &mut Work,
        out: MatMut<'_>,
        mut each: impl FnMut(&Codec, Stored<'_>, &mut Work, MatMut<'_>),
    ) {
        let mut angles = std::mem::take(&mut work.angles);
        let (mut at, mut first) = (0, 0);
        for rows in self.codec.together(range.stored) {
            let n_rows = rows.count_ones();
            let held = &range.bytes[at..];
            let end = at + self.codec.bytes_of(n_rows as usize, self.dim, held);
            let turn = range
                .turning
                .map(|t| t.rope.turn(t.first, rows, &mut angles));
            let stored = Stored {
                turn,
                ..self.part(range, at..end, n_rows)
            };
            let out = MatMut {
                data: &mut out.data[first..],
                stride: out.stride,
            };
            each(&self.codec, stored, work, out);
            (at, first) = (end, first + n_rows as usize);
        }
        work.angles = angles;
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
            let end = at + self.codec.bytes_of(n_rows, self.dim, &range.bytes[at..]);
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
            ahead: range.after(&bytes),
            bytes: &range.bytes[bytes],
            n_rows: n_rows as usize,
            dim: self.dim,
            turn: None,
        }
    }
}

fn fitting<'a>(codec: &'a dyn RowCodec, stored: Stored<'a>) -> Option<(&'a dyn Kernel, Rows<'a>)> {
    let rows = Rows {
        bytes: stored.bytes,
        stride: codec.row_bytes(stored.dim),
        dim: stored.dim,
        ahead: stored.ahead,
        turn: stored.turn,
    };
    let kernel = codec.kernel().filter(|k| k.takes(stored.dim))?;
    Some((kernel, rows))
}

/// Scores of rows that lie back to back.
fn row_scores(
    codec: &dyn RowCodec,
    stored: Stored<'_>,
    q: &[f32],
    work: &mut Work,
    out: MatMut<'_>,
) {
    match fitting(codec, stored) {
        Some((kernel, rows)) => kernel.scores(rows, q, &mut work.room, out),
        None => work
            .decoded(stored, |b, r| codec.decode_rows(b, stored.dim, r))
            .scores(q, out),
    }
}

/// Columns of rows that lie back to back.
fn row_columns(codec: &dyn RowCodec, stored: Stored<'_>, work: &mut Work, out: MatMut<'_>) {
    match fitting(codec, stored) {
        Some((kernel, rows)) => kernel.columns(rows, &mut work.room, out),
        None => work
            .decoded(stored, |b, r| codec.decode_rows(b, stored.dim, r))
            .columns(out),
    }
}

/// Decodes rows that lie back to back, `[row][dim]`.
pub fn decode_rows(codec: &dyn RowCodec, bytes: &[u8], dim: usize, rows: &mut [f32]) {
    let stored = Stored {
        bytes,
        n_rows: rows.len() / dim,
        dim,
        ahead: &[],
        turn: None,
    };
    match fitting(codec, stored) {
        Some((kernel, stored)) => kernel.decode(stored, rows),
        None => codec.decode_rows(bytes, dim, rows),
    }
}

/// The weighted sum of rows that lie back to back.
fn row_weighted_sum(
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
