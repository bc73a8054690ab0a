//! Groups along a row: each row on its own.
//!
//! Row layout: the codes of all channels as one stream of bits ([`bits`](super::super::bits)), padded to a whole byte;
//! then the steps of all groups, then their zeros. int4, 20 channels in groups of 16, f16:
//!
//! ```text
//! byte     0 … 9                    10 11   12 13   14 15   16 17
//! holds    20 codes, even ones low  step 0  step 1  zero 0  zero 1
//! ```

use std::sync::Arc;

use super::super::bits::stream_bytes;
use super::Grid;
use super::leveled::{Axis, Leveled};
use super::scale::ScaleFormat;
use super::tile::{self, TILE, Tile, larger, smaller, tile_bytes};
use crate::cache::stage::{Kernel, PageCodec, RowCodec};
use crate::compute::cpu::rows;
use crate::compute::cpu::vector::{LANES, multiversion};

/// The codec.
#[derive(Debug, Clone, Copy)]
pub(super) struct Token {
    pub grid: Grid,
    /// Channels of a group, a multiple of 8.
    pub group: usize,
}

impl RowCodec for Token {
    fn row_bytes(&self, dim: usize) -> usize {
        stream_bytes(dim, self.grid.bits) + self.scale_bytes(dim)
    }

    fn scale_bytes(&self, dim: usize) -> usize {
        self.grid.scale_bytes(dim.div_ceil(self.group))
    }

    fn encode(&self, row: &[f32], out: &mut [u8]) {
        encode(self, row, out);
    }

    fn decode(&self, bytes: &[u8], row: &mut [f32]) {
        decode_rows(self, bytes, row.len(), row);
    }

    fn decode_rows(&self, bytes: &[u8], dim: usize, rows: &mut [f32]) {
        decode_rows(self, bytes, dim, rows);
    }

    fn leveled(&self) -> Option<Arc<dyn PageCodec>> {
        Some(Arc::new(Leveled::new(self.grid, Axis::Token(self.group))?))
    }
}

impl Token {
    /// How stored rows are read.
    pub fn kernel(&self) -> Box<dyn Kernel> {
        match self.grid.bits {
            1 => self.kernel_of::<1>(),
            2 => self.kernel_of::<2>(),
            3 => self.kernel_of::<3>(),
            4 => self.kernel_of::<4>(),
            _ => self.kernel_of::<8>(),
        }
    }

    fn kernel_of<const B: usize>(&self) -> Box<dyn Kernel> {
        let grid = self.grid;
        let zero = (!grid.has_zero).then(|| grid.symmetric_zero());
        Box::new(rows::Grid::<B>::new(
            self.group,
            zero,
            match grid.scales {
                ScaleFormat::F16 => rows::Steps::F16,
                ScaleFormat::Bf16 => rows::Steps::Bf16,
                ScaleFormat::Fp8 => {
                    let bytes: [u8; 256] = std::array::from_fn(|b| b as u8);
                    let mut tables = Box::new([[0.0; 256]; 2]);
                    let [steps, zeros] = &mut *tables;
                    grid.scales.steps(&bytes, grid.divisor(), steps);
                    grid.scales.zeros(&bytes, zeros);
                    rows::Steps::Bytes(tables)
                }
            },
        ))
    }

    /// Fills the tile that starts at channel `first`.
    #[inline(always)]
    fn load(&self, scales: &[u8], first: usize, n: usize, tile: &mut Tile) {
        let mut at = 0;
        while at < n {
            let group = (first + at) / self.group;
            let end = ((group + 1) * self.group - first).min(n);
            let [mut step, mut zero] = [[0.0], [0.0]];
            self.grid.read(scales, group, &mut step, &mut zero);
            tile.step[at..end].fill(step[0]);
            tile.zero[at..end].fill(zero[0]);
            at = end;
        }
    }
}

/// The smallest and the largest element.
#[inline(always)]
fn extremes(x: &[f32]) -> (f32, f32) {
    let mut low = [f32::INFINITY; LANES];
    let mut high = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for lanes in whole {
        for i in 0..LANES {
            low[i] = smaller(lanes[i], low[i]);
            high[i] = larger(lanes[i], high[i]);
        }
    }
    for (i, &v) in rest.iter().enumerate() {
        low[i] = smaller(v, low[i]);
        high[i] = larger(v, high[i]);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            low[i] = smaller(low[i + width], low[i]);
            high[i] = larger(high[i + width], high[i]);
        }
        width /= 2;
    }
    (low[0], high[0])
}

multiversion! {
    fn encode(codec: &Token, row: &[f32], out: &mut [u8]) = encode_body;
}

multiversion! {
    fn decode_rows(codec: &Token, bytes: &[u8], dim: usize, rows: &mut [f32]) = decode_rows_body;
}

#[inline(always)]
fn encode_body(codec: &Token, row: &[f32], out: &mut [u8]) {
    match codec.grid.bits {
        1 => encode_row::<1>(codec, row, out),
        2 => encode_row::<2>(codec, row, out),
        3 => encode_row::<3>(codec, row, out),
        4 => encode_row::<4>(codec, row, out),
        _ => encode_row::<8>(codec, row, out),
    }
}

#[inline(always)]
fn encode_row<const B: usize>(codec: &Token, row: &[f32], out: &mut [u8]) {
    let grid = codec.grid;
    let (codes, scales) = out.split_at_mut(stream_bytes(row.len(), B));
    let n = grid.scales.bytes();
    let n_groups = row.len().div_ceil(codec.group);
    let (steps, zeros) = scales.split_at_mut(n_groups * n);
    for (g, x) in row.chunks(codec.group).enumerate() {
        let zero = zeros.get_mut(g * n..(g + 1) * n).unwrap_or_default();
        let ends = grid.fit.ends(grid, x, extremes(x));
        grid.put(ends, &mut steps[g * n..(g + 1) * n], zero);
    }
    let mut tile = Tile::new();
    for (t, (x, codes)) in row
        .chunks(TILE)
        .zip(codes.chunks_mut(tile_bytes(grid)))
        .enumerate()
    {
        codec.load(scales, t * TILE, x.len(), &mut tile);
        tile::encode::<B>(grid, x, &tile, codes);
    }
}

#[inline(always)]
fn decode_rows_body(codec: &Token, bytes: &[u8], dim: usize, rows: &mut [f32]) {
    match codec.grid.bits {
        1 => decode_each::<1>(codec, bytes, dim, rows),
        2 => decode_each::<2>(codec, bytes, dim, rows),
        3 => decode_each::<3>(codec, bytes, dim, rows),
        4 => decode_each::<4>(codec, bytes, dim, rows),
        _ => decode_each::<8>(codec, bytes, dim, rows),
    }
}

#[inline(always)]
fn decode_each<const B: usize>(codec: &Token, bytes: &[u8], dim: usize, rows: &mut [f32]) {
    let mut tile = Tile::new();
    let row_bytes = codec.row_bytes(dim);
    for (b, row) in bytes
        .chunks_exact(row_bytes)
        .zip(rows.chunks_exact_mut(dim))
    {
        let (codes, scales) = b.split_at(stream_bytes(dim, B));
        let tiles = row
            .chunks_mut(TILE)
            .zip(codes.chunks(tile_bytes(codec.grid)));
        for (t, (x, codes)) in tiles.enumerate() {
            codec.load(scales, t * TILE, x.len(), &mut tile);
            tile::decode::<B>(codes, &tile, x);
        }
    }
}
