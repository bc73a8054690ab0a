//! Groups along the rows of one channel: a page of rows together.
//!
//! Page layout: the codes of each row as one stream of bits ([`bits`](super::super::bits)), padded to a whole byte, row
//! after row; then steps `[group][channel]`, then zeros `[group][channel]`. A row's codes lie together, so a page is
//! decoded along its rows with a step and a zero per lane. int3, three rows of 9 channels in groups of 2 rows, f16:
//!
//! ```text
//! byte     0 … 3   4 … 7   8 … 11   12 … 29         30 … 47          48 … 65         66 … 83
//! holds    row 0   row 1   row 2    steps, rows 01  steps, row 2     zeros, rows 01  zeros, row 2
//! ```

use std::ops::Range;
use std::sync::Arc;

use super::super::bits::stream_bytes;
use super::Grid;
use super::fit::Fit;
use super::leveled::{Axis, Leveled};
use super::tile::{self, TILE, Tile, larger, smaller, tile_bytes};
use crate::cache::scratch::room;
use crate::cache::stage::{Kernel, PageCodec, Stored, Work};
use crate::compute::cpu::gemm::{Mat, MatMut};
use crate::compute::cpu::rows::{ByChannel, Rows};
use crate::compute::cpu::vector::multiversion;

/// The codec.
#[derive(Debug, Clone, Copy)]
pub(super) struct Channel {
    pub grid: Grid,
    /// Rows of a group; divides `page`.
    pub group: usize,
    /// Rows coded together.
    pub page: usize,
}

impl PageCodec for Channel {
    fn page_rows(&self) -> usize {
        self.page
    }

    fn page_bytes(&self, n_rows: usize, dim: usize) -> usize {
        n_rows * stream_bytes(dim, self.grid.bits) + self.scale_bytes(n_rows, dim)
    }

    fn scale_bytes(&self, n_rows: usize, dim: usize) -> usize {
        self.grid.scale_bytes(n_rows.div_ceil(self.group) * dim)
    }

    fn encode(&self, rows: &[f32], dim: usize, out: &mut [u8]) {
        encode(self, rows, dim, out);
    }

    fn decode(&self, bytes: &[u8], dim: usize, rows: &mut [f32]) {
        decode(self, bytes, dim, rows);
    }

    fn leveled(&self) -> Option<Arc<dyn PageCodec>> {
        Some(Arc::new(Leveled::new(self.grid, Axis::Channel)?))
    }

    fn scores(&self, page: Stored<'_>, q: &[f32], work: &mut Work, out: MatMut<'_>) {
        if !self.is_read_in_place(page) {
            return work
                .decoded(page, |bytes, rows| self.decode(bytes, page.dim, rows))
                .scores(q, out);
        }
        for part in self.parts(page, 0..page.n_rows) {
            let (steps, zeros) = self.scales(&part, page, &mut work.rows);
            let out = MatMut {
                data: &mut out.data[part.rows.start..],
                stride: out.stride,
            };
            self.read(steps, zeros, Some(&mut work.tables), |kernel| {
                kernel.scores(part.stored, q, &mut work.room, out);
            });
        }
    }

    fn columns(&self, page: Stored<'_>, work: &mut Work, out: MatMut<'_>) {
        if !self.is_read_in_place(page) {
            return work
                .decoded(page, |bytes, rows| self.decode(bytes, page.dim, rows))
                .columns(out);
        }
        for part in self.parts(page, 0..page.n_rows) {
            let (steps, zeros) = self.scales(&part, page, &mut work.rows);
            let out = MatMut {
                data: &mut out.data[part.rows.start..],
                stride: out.stride,
            };
            self.read(steps, zeros, Some(&mut work.tables), |kernel| {
                kernel.columns(part.stored, &mut work.room, out);
            });
        }
    }

    fn weighted_sum(
        &self,
        page: Stored<'_>,
        rows: Range<usize>,
        weights: Mat<'_>,
        work: &mut Work,
        out: &mut [f32],
    ) {
        if !self.is_read_in_place(page) {
            return work
                .decoded(page, |bytes, rows| self.decode(bytes, page.dim, rows))
                .weighted_sum(rows, weights, out);
        }
        for part in self.parts(page, rows.clone()) {
            let (steps, zeros) = self.scales(&part, page, &mut work.rows);
            let weights = Mat {
                data: &weights.data[part.rows.start - rows.start..],
                stride: weights.stride,
            };
            self.read(steps, zeros, None, |kernel| {
                kernel.weighted_sum(part.stored, weights, out);
            });
        }
    }
}

/// Rows of one group of a page.
struct Part<'a> {
    group: usize,
    /// Of the page's rows.
    rows: Range<usize>,
    stored: Rows<'a>,
}

impl Channel {
    /// Whether kernels read a page as it is stored: whole steps of channels, and groups that begin where angles do.
    fn is_read_in_place(&self, page: Stored<'_>) -> bool {
        let in_step = page
            .turn
            .is_none_or(|turn| turn.from_row(self.group).is_some());
        // What a kernel takes doesn't depend on its bits.
        ByChannel::<4>::new(&[], &[], None).takes(page.dim)
            && (in_step || self.group >= page.n_rows)
    }

    /// Reads with the kernels of a group, which has these steps and zeros by channel; scores and columns need tables.
    fn read(
        &self,
        steps: &[f32],
        zeros: &[f32],
        tables: Option<&mut Vec<f32>>,
        run: impl FnOnce(&dyn Kernel),
    ) {
        match self.grid.bits {
            1 => run(&ByChannel::<1>::new(steps, zeros, tables)),
            2 => run(&ByChannel::<2>::new(steps, zeros, tables)),
            3 => run(&ByChannel::<3>::new(steps, zeros, tables)),
            4 => run(&ByChannel::<4>::new(steps, zeros, tables)),
            _ => run(&ByChannel::<8>::new(steps, zeros, tables)),
        }
    }

    /// Cuts rows of a page by groups.
    fn parts<'a>(
        &self,
        page: Stored<'a>,
        rows: Range<usize>,
    ) -> impl Iterator<Item = Part<'a>> + use<'a> {
        let (group, stride) = (self.group, stream_bytes(page.dim, self.grid.bits));
        (0..page.n_rows.div_ceil(group)).filter_map(move |g| {
            let own = rows.start.max(g * group)..rows.end.min((g + 1) * group);
            let bytes = own.start * stride..own.end * stride;
            let is_last = own.end == rows.end;
            (!own.is_empty()).then(|| Part {
                group: g,
                stored: Rows {
                    ahead: if is_last {
                        page.ahead
                    } else {
                        &page.bytes[bytes.end..]
                    },
                    bytes: &page.bytes[bytes],
                    stride,
                    dim: page.dim,
                    turn: page.turn.and_then(|turn| turn.from_row(own.start)),
                },
                rows: own,
            })
        })
    }

    /// Steps and zeros of a group, by channel.
    fn scales<'w>(
        &self,
        part: &Part<'_>,
        page: Stored<'_>,
        work: &'w mut Vec<f32>,
    ) -> (&'w [f32], &'w [f32]) {
        let dim = page.dim;
        room(work, 2 * dim);
        if work.len() < 2 * dim {
            work.resize(2 * dim, 0.0);
        }
        let (steps, zeros) = work[..2 * dim].split_at_mut(dim);
        let codes = page.n_rows * stream_bytes(dim, self.grid.bits);
        read(
            self.grid,
            &page.bytes[codes..],
            part.group * dim,
            steps,
            zeros,
        );
        (steps, zeros)
    }
}

multiversion! {
    fn read(grid: Grid, bytes: &[u8], first: usize, steps: &mut [f32], zeros: &mut [f32]) = read_body;
}

#[inline(always)]
fn read_body(grid: Grid, bytes: &[u8], first: usize, steps: &mut [f32], zeros: &mut [f32]) {
    grid.read(bytes, first, steps, zeros);
}

/// Smallest and largest element of channels `first..first + TILE`, or as many as there are.
#[inline(always)]
fn extremes(rows: &[f32], dim: usize, first: usize) -> ([f32; TILE], [f32; TILE]) {
    let mut low = [f32::INFINITY; TILE];
    let mut high = [f32::NEG_INFINITY; TILE];
    for row in rows.chunks_exact(dim) {
        for ((l, h), &v) in low.iter_mut().zip(&mut high).zip(&row[first..]) {
            *l = smaller(v, *l);
            *h = larger(v, *h);
        }
    }
    (low, high)
}

multiversion! {
    fn encode(codec: &Channel, rows: &[f32], dim: usize, out: &mut [u8]) = encode_body;
}

multiversion! {
    fn decode(codec: &Channel, bytes: &[u8], dim: usize, rows: &mut [f32]) = decode_body;
}

#[inline(always)]
fn encode_body(codec: &Channel, rows: &[f32], dim: usize, out: &mut [u8]) {
    match codec.grid.bits {
        1 => encode_page::<1>(codec, rows, dim, out),
        2 => encode_page::<2>(codec, rows, dim, out),
        3 => encode_page::<3>(codec, rows, dim, out),
        4 => encode_page::<4>(codec, rows, dim, out),
        _ => encode_page::<8>(codec, rows, dim, out),
    }
}

#[inline(always)]
fn encode_page<const B: usize>(codec: &Channel, rows: &[f32], dim: usize, out: &mut [u8]) {
    let grid = codec.grid;
    let n_rows = rows.len() / dim;
    let row_bytes = stream_bytes(dim, B);
    let (codes, scales) = out.split_at_mut(n_rows * row_bytes);
    let n = grid.scales.bytes();
    let mut tile = Tile::new();
    let mut column = Vec::new();
    let groups = rows.chunks(codec.group * dim);
    for (g, (rows, codes)) in groups
        .zip(codes.chunks_mut(codec.group * row_bytes))
        .enumerate()
    {
        for first in (0..dim).step_by(TILE) {
            let width = TILE.min(dim - first);
            let (low, high) = extremes(rows, dim, first);
            let (steps, zeros) = scales.split_at_mut(n_rows.div_ceil(codec.group) * dim * n);
            for c in 0..width {
                column.clear();
                if grid.fit == Fit::Mse {
                    column.extend(rows.chunks_exact(dim).map(|row| row[first + c]));
                }
                let ends = grid.fit.ends(grid, &column, (low[c], high[c]));
                let at = (g * dim + first + c) * n;
                let zero = zeros.get_mut(at..at + n).unwrap_or_default();
                grid.put(ends, &mut steps[at..at + n], zero);
            }
            grid.read(
                scales,
                g * dim + first,
                &mut tile.step[..width],
                &mut tile.zero[..width],
            );
            let start = first / TILE * tile_bytes(grid);
            for (row, codes) in rows
                .chunks_exact(dim)
                .zip(codes.chunks_exact_mut(row_bytes))
            {
                let end = row_bytes.min(start + tile_bytes(grid));
                tile::encode::<B>(
                    grid,
                    &row[first..first + width],
                    &tile,
                    &mut codes[start..end],
                );
            }
        }
    }
}

#[inline(always)]
fn decode_body(codec: &Channel, bytes: &[u8], dim: usize, rows: &mut [f32]) {
    match codec.grid.bits {
        1 => decode_page::<1>(codec, bytes, dim, rows),
        2 => decode_page::<2>(codec, bytes, dim, rows),
        3 => decode_page::<3>(codec, bytes, dim, rows),
        4 => decode_page::<4>(codec, bytes, dim, rows),
        _ => decode_page::<8>(codec, bytes, dim, rows),
    }
}

#[inline(always)]
fn decode_page<const B: usize>(codec: &Channel, bytes: &[u8], dim: usize, rows: &mut [f32]) {
    let grid = codec.grid;
    let row_bytes = stream_bytes(dim, B);
    let (codes, scales) = bytes.split_at(rows.len() / dim * row_bytes);
    let mut tile = Tile::new();
    let groups = rows.chunks_mut(codec.group * dim);
    for (g, (rows, codes)) in groups
        .zip(codes.chunks(codec.group * row_bytes))
        .enumerate()
    {
        for first in (0..dim).step_by(TILE) {
            let width = TILE.min(dim - first);
            grid.read(
                scales,
                g * dim + first,
                &mut tile.step[..width],
                &mut tile.zero[..width],
            );
            let start = first / TILE * tile_bytes(grid);
            for (row, codes) in rows
                .chunks_exact_mut(dim)
                .zip(codes.chunks_exact(row_bytes))
            {
                tile::decode::<B>(&codes[start..], &tile, &mut row[first..first + width]);
            }
        }
    }
}
