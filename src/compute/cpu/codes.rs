//! Rows of activations as integers: a scale and signed bytes for each block of 32 values.
//!
//! Invariant: a row's codes depend on the row alone. With a the block's largest magnitude and n the largest code, 127
//! (`int8`) or 32,639 = 127 · 257 (`int16`, the largest number whose negative, too, is two signed bytes), the scale is
//! a / n and a code is x · (n / a), rounded to nearest even. An int16 code is 256 · high + low, both signed bytes: planes
//! of their own, high first, so that every product is one of bytes. A block that holds a number which is not finite has
//! codes of 0 and a scale of NaN, and a block too small to be scaled is 0.

use rayon::prelude::*;

use super::blocks::BLOCK;
use super::dispatch::multiversion;
use super::simd::Line;
use crate::model::ops::Arithmetic;

/// Rows that are read one after the other, weights as they come; for more, weights are unpacked to a panel first.
pub(super) const FEW_ROWS: usize = 2;

/// Rows of a tile of many rows.
pub(super) const TILE_ROWS: usize = 12;

/// Rows of the last tile are filled up to a multiple of this with rows of zeros.
const TILE_STEP: usize = 4;

/// Blocks side by side in a vector, where one row is read along its inputs.
pub(super) const QUAD: usize = 4;

/// Values whose codes are worth a task.
const TASK_VALUES: usize = 16 * 1024;

/// How codes lie in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// For few rows: `[four blocks][row][plane][half of a block][block][16]`; scales, sums: `[block][row]`.
    Rows,
    /// For many: `[tile][block][plane][8][row of the tile][4]`; scales, sums: `[tile][block][row of the tile]`.
    Tiles,
}

/// Rows of one input.
pub(super) struct Codes {
    pub layout: Layout,
    pub n_rows: usize,
    pub n_blocks: usize,
    /// Bytes of a code.
    pub n_planes: usize,
    bytes: Vec<Line>,
    /// Scales.
    pub scales: Vec<f32>,
    /// Sums of a block's codes.
    pub sums: Vec<i32>,
    /// Scale times sum.
    pub masses: Vec<f32>,
}

impl Codes {
    /// Codes of rows of `n_in` values, a multiple of the block.
    pub fn new(x: &[f32], n_in: usize, arithmetic: Arithmetic) -> Self {
        let (n_rows, n_blocks) = (x.len() / n_in, n_in / BLOCK);
        let layout = match n_rows {
            0..=FEW_ROWS => Layout::Rows,
            _ => Layout::Tiles,
        };
        let (largest, n_planes) = match arithmetic {
            Arithmetic::Int16 => (32_639.0, 2),
            _ => (127.0, 1),
        };
        let (unit_rows, padded) = match layout {
            Layout::Rows => (n_rows.max(1), n_rows),
            Layout::Tiles => (TILE_ROWS, n_rows.next_multiple_of(TILE_STEP)),
        };
        let row_bytes = match layout {
            Layout::Rows => n_blocks.next_multiple_of(QUAD) * BLOCK * n_planes,
            Layout::Tiles => n_blocks * BLOCK * n_planes,
        };
        let n_lines = (padded * row_bytes).div_ceil(size_of::<Line>());
        let mut codes = Self {
            layout,
            n_rows,
            n_blocks,
            n_planes,
            bytes: vec![Line([0; 16]); n_lines],
            scales: vec![0.0; padded * n_blocks],
            sums: vec![0; padded * n_blocks],
            masses: vec![0.0; padded * n_blocks],
        };
        let n_scales = unit_rows * n_blocks;
        let all: &mut [u8] = bytemuck::cast_slice_mut(&mut codes.bytes);
        let units = x.chunks(unit_rows * n_in);
        let units = units
            .zip(all.chunks_mut(unit_rows * row_bytes))
            .zip(codes.scales.chunks_mut(n_scales))
            .zip(codes.sums.chunks_mut(n_scales))
            .zip(codes.masses.chunks_mut(n_scales))
            .map(|((((x, bytes), scales), sums), masses)| Unit {
                x,
                n_in,
                bytes,
                scales,
                sums,
                masses,
            });
        let encode = |mut unit: Unit<'_>| unit.encode(largest, n_planes, layout);
        if x.len() < TASK_VALUES {
            units.for_each(encode);
        } else {
            units.collect::<Vec<_>>().into_par_iter().for_each(encode);
        }
        codes
    }

    /// The codes' bytes.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.bytes)
    }

    /// Rows that a tile starting at `row` has, those of zeros included. Few rows are one tile.
    pub fn tile_rows(&self, row: usize) -> usize {
        match self.layout {
            Layout::Rows => self.n_rows,
            Layout::Tiles => TILE_ROWS.min((self.n_rows - row).next_multiple_of(TILE_STEP)),
        }
    }
}

/// One row, or one tile of rows.
struct Unit<'a> {
    x: &'a [f32],
    n_in: usize,
    bytes: &'a mut [u8],
    scales: &'a mut [f32],
    sums: &'a mut [i32],
    masses: &'a mut [f32],
}

impl Unit<'_> {
    fn encode(&mut self, largest: f32, n_planes: usize, layout: Layout) {
        let n_blocks = self.n_in / BLOCK;
        // Rows of this unit, those of zeros included.
        let m = self.scales.len() / n_blocks;
        let mut row_codes = Row {
            bytes: vec![[0; BLOCK]; n_blocks * n_planes],
            n_planes,
            scales: vec![0.0; n_blocks],
            sums: vec![0; n_blocks],
        };
        for (row, x) in self.x.chunks_exact(self.n_in).enumerate() {
            encode_row(x, largest, &mut row_codes);
            for b in 0..n_blocks {
                let (scale, sum) = (row_codes.scales[b], row_codes.sums[b]);
                self.scales[b * m + row] = scale;
                self.sums[b * m + row] = sum;
                self.masses[b * m + row] = scale * sum as f32;
            }
            match layout {
                Layout::Rows => self.place_in_quads(&row_codes, (row, m)),
                Layout::Tiles => self.place_in_tile(&row_codes, (row, m)),
            }
        }
    }

    /// Row `row` of m.
    fn place_in_quads(&mut self, codes: &Row, (row, m): (usize, usize)) {
        for (i, bytes) in codes.bytes.iter().enumerate() {
            let (b, plane) = (i / codes.n_planes, i % codes.n_planes);
            let group = ((b / QUAD * m + row) * codes.n_planes + plane) * 2;
            for (half, bytes) in bytes.as_chunks::<16>().0.iter().enumerate() {
                let at = ((group + half) * QUAD + b % QUAD) * 16;
                self.bytes[at..at + 16].copy_from_slice(bytes);
            }
        }
    }

    /// Row `row` of m.
    fn place_in_tile(&mut self, codes: &Row, (row, m): (usize, usize)) {
        let (dwords, _) = self.bytes.as_chunks_mut::<4>();
        let blocks = dwords.chunks_exact_mut(BLOCK / 4 * m);
        for (bytes, block) in codes.bytes.iter().zip(blocks) {
            let (from, _) = bytes.as_chunks::<4>();
            for (from, to) in from.iter().zip(block.chunks_exact_mut(m)) {
                to[row] = *from;
            }
        }
    }
}

/// One row's codes.
struct Row {
    /// `[block][plane]`.
    bytes: Vec<[u8; BLOCK]>,
    n_planes: usize,
    scales: Vec<f32>,
    sums: Vec<i32>,
}

multiversion! {
    /// One row's codes.
    fn encode_row(x: &[f32], largest: f32, row: &mut Row) = encode_row_body;
}

// 1.5 · 2^23: adding it leaves the nearest integer, ties to even, in the low bits.
const ROUND: f32 = 12_582_912.0;

#[inline(always)]
fn encode_row_body(x: &[f32], largest: f32, row: &mut Row) {
    let (x, _) = x.as_chunks::<BLOCK>();
    let planes = row.bytes.chunks_exact_mut(row.n_planes);
    for (((x, planes), scale), sum) in x.iter().zip(planes).zip(&mut row.scales).zip(&mut row.sums)
    {
        // Magnitudes are in order as integers, infinity and NaN last.
        let mut bits = 0;
        for x in x {
            bits = bits.max(x.to_bits() & 0x7fff_ffff);
        }
        let a = f32::from_bits(bits);
        let factor = largest / a;
        let mut codes = [0i16; BLOCK];
        if a.is_finite() && factor.is_finite() {
            *scale = a / largest;
            for (code, x) in codes.iter_mut().zip(x) {
                // The low 16 bits of ROUND are zeros.
                *code = (x * factor + ROUND).to_bits() as i16;
            }
        } else {
            *scale = if a.is_finite() { 0.0 } else { f32::NAN };
        }
        *sum = codes.iter().map(|&c| i32::from(c)).sum();
        // Loops rather than `map`, which is a call.
        for (to, code) in planes[row.n_planes - 1].iter_mut().zip(&codes) {
            *to = *code as u8;
        }
        if row.n_planes == 2 {
            for (to, code) in planes[0].iter_mut().zip(&codes) {
                // The low byte counts as signed: a half of 256 and more carries. Codes leave room for the half.
                *to = ((code + 128) >> 8) as u8;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(n_rows: usize, n_in: usize) -> Vec<f32> {
        (0..n_rows * n_in)
            .map(|i| ((i * 37 + i * i * 11) % 1013) as f32 * 0.01 - 5.0)
            .collect()
    }

    /// Codes of a row, put together from their planes.
    fn read(codes: &Codes, row: usize) -> Vec<i32> {
        let tile = row / TILE_ROWS * TILE_ROWS;
        let n = codes.n_blocks;
        let p = codes.n_planes;
        let at = |b: usize, plane: usize, i: usize| match codes.layout {
            Layout::Rows => {
                let group = ((b / QUAD * codes.tile_rows(0) + row) * p + plane) * 2 + i / 16;
                (group * QUAD + b % QUAD) * 16 + i % 16
            }
            Layout::Tiles => {
                let m = codes.tile_rows(tile);
                let dword = ((b * p + plane) * 8 + i / 4) * m + row - tile;
                tile * n * BLOCK * p + dword * 4 + i % 4
            }
        };
        let byte = |b, plane, i| i32::from(codes.bytes()[at(b, plane, i)].cast_signed());
        (0..n * BLOCK)
            .map(|i| {
                (0..p).fold(0, |code, plane| {
                    code * 256 + byte(i / BLOCK, plane, i % BLOCK)
                })
            })
            .collect()
    }

    #[test]
    fn codes_are_the_nearest_and_their_bytes_make_them_in_both_layouts() {
        let n_in = 6 * BLOCK;
        for (arithmetic, largest) in [(Arithmetic::Int8, 127.0f32), (Arithmetic::Int16, 32_639.0)] {
            for (layout, n_rows) in [(Layout::Rows, 2), (Layout::Tiles, 3), (Layout::Tiles, 30)] {
                let x = rows(n_rows, n_in);
                let codes = Codes::new(&x, n_in, arithmetic);
                assert_eq!(codes.layout, layout);
                for (row, x) in x.chunks(n_in).enumerate() {
                    let got = read(&codes, row);
                    for (b, x) in x.chunks(BLOCK).enumerate() {
                        let a = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
                        let want: Vec<i32> = x
                            .iter()
                            .map(|x| (x * (largest / a)).round_ties_even() as i32)
                            .collect();
                        assert_eq!(got[b * BLOCK..][..BLOCK], want, "{arithmetic:?} {layout:?}");
                        assert!(
                            want.contains(&(largest as i32)) || want.contains(&-(largest as i32))
                        );
                        let tile = row / TILE_ROWS * TILE_ROWS;
                        let at = tile * codes.n_blocks + b * codes.tile_rows(tile) + row - tile;
                        let sum: i32 = want.iter().sum();
                        assert_eq!(codes.sums[at], sum);
                        assert_eq!(codes.scales[at], a / largest);
                        assert_eq!(codes.masses[at], a / largest * sum as f32);
                    }
                }
            }
        }
    }

    #[test]
    fn a_block_without_a_number_is_told_and_a_tiny_one_is_zero() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = rows(1, 2 * BLOCK);
            x[40] = bad;
            let codes = Codes::new(&x, 2 * BLOCK, Arithmetic::Int8);
            assert!(codes.scales[0].is_finite() && codes.scales[1].is_nan());
        }
        let tiny = vec![1e-40f32; BLOCK];
        let codes = Codes::new(&tiny, BLOCK, Arithmetic::Int16);
        assert_eq!((codes.scales[0], codes.sums[0]), (0.0, 0));
        let zeros = Codes::new(&[0.0; BLOCK], BLOCK, Arithmetic::Int16);
        assert_eq!((zeros.scales[0], zeros.masses[0]), (0.0, 0.0));
    }
}
