//! Rows of 2, 4 and 8 bits in one page: one grid, cut more or less finely.
//!
//! A group's grid spans its rows from their minimum to their maximum, whatever their bits. Codes of 4 and of 8 bits stand for
//! 2^b points from end to end, as `int4` and `int8` have it; the 4 codes of 2 bits for the middles of 4 equal cells: points at
//! both ends would waste half of so few.
//!
//! ```text
//!          min |. . . . . . . . . . . . . . . .| max
//! 2 bits       |   0   |   1   |   2   |   3   |
//! 4 bits       0 1 2 3 4 5 6 7 8 9 a b c d e f
//! ```
//!
//! Page layout: each row's level as a stream of 2-bit codes; each row's codes, padded to whole bytes, row after row; all steps
//! (of 8 bits), all zeros: `[channel]` by channel, `[row][group]` by token.
//!
//! Invariants: by channel a page is one group, whose scales its rows share, so that few rows of a level cost nothing more; a
//! page whose rows all have 8 bits decodes to the bits of `int8` over the same groups.

use std::ops::Range;

use super::super::bits::stream_bytes;
use super::Grid;
use super::tile::{self, TILE, Tile, larger, smaller, tile_bytes};
use crate::cache::RANGE;
use crate::cache::stage::{Levels, PageCodec};
use crate::compute::cpu::vector::multiversion;

/// Bits by level.
const BITS: [usize; 3] = [2, 4, 8];

/// Bits of a row's level.
const LEVEL_BITS: usize = 2;

/// Along what a group's scales run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Axis {
    /// The rows of one channel, all of a page.
    Channel,
    /// So many channels of one row.
    Token(usize),
}

/// The codec.
#[derive(Debug, Clone, Copy)]
pub(super) struct Leveled {
    /// Of 8 bits.
    grid: Grid,
    axis: Axis,
    /// Level of rows that none is chosen for.
    base: u8,
}

impl Leveled {
    /// With the scales of another grid, whose bits are those of rows that no level is chosen for; `None`: not of such a grid.
    pub fn new(grid: Grid, axis: Axis) -> Option<Self> {
        let base = BITS.iter().position(|&b| b == grid.bits)?;
        let is_plain = grid.has_zero && grid.fit == super::Fit::MinMax;
        is_plain.then_some(Self {
            grid: Grid { bits: 8, ..grid },
            axis,
            base: base as u8,
        })
    }

    /// Groups that each have a step and a zero.
    fn n_groups(&self, n_rows: usize, dim: usize) -> usize {
        match self.axis {
            Axis::Channel => dim,
            Axis::Token(group) => n_rows * dim.div_ceil(group),
        }
    }

    /// The tile of a row's channels, with 8 bits.
    #[inline(always)]
    fn load(
        &self,
        scales: &[u8],
        (row, dim): (usize, usize),
        channels: Range<usize>,
        tile: &mut Tile,
    ) {
        let n = channels.len();
        let Axis::Token(group) = self.axis else {
            let (steps, zeros) = (&mut tile.step[..n], &mut tile.zero[..n]);
            return self.grid.read(scales, channels.start, steps, zeros);
        };
        for g in channels.start / group..channels.end.div_ceil(group) {
            let own = (g * group).max(channels.start)..((g + 1) * group).min(channels.end);
            let own = own.start - channels.start..own.end - channels.start;
            let [mut step, mut zero] = [[0.0], [0.0]];
            let first = row * dim.div_ceil(group) + g;
            self.grid.read(scales, first, &mut step, &mut zero);
            tile.step[own.clone()].fill(step[0]);
            tile.zero[own].fill(zero[0]);
        }
    }

    /// Stores the scales of all groups.
    fn put_scales(&self, rows: &[f32], dim: usize, scales: &mut [u8]) {
        let n = self.grid.scales.bytes();
        let (steps, zeros) = scales.split_at_mut(scales.len() / 2);
        let places = steps.chunks_exact_mut(n).zip(zeros.chunks_exact_mut(n));
        let span = |x: &mut dyn Iterator<Item = f32>| {
            x.fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), x| {
                (smaller(x, low), larger(x, high))
            })
        };
        match self.axis {
            Axis::Channel => {
                for (c, (step, zero)) in places.enumerate() {
                    let mut column = rows.iter().skip(c).step_by(dim).copied();
                    self.grid.put(span(&mut column), step, zero);
                }
            }
            Axis::Token(group) => {
                let groups = rows.chunks_exact(dim).flat_map(|row| row.chunks(group));
                for (x, (step, zero)) in groups.zip(places) {
                    self.grid.put(span(&mut x.iter().copied()), step, zero);
                }
            }
        }
    }
}

/// The same tile with the steps of fewer bits.
#[inline(always)]
fn at_level(tile: &mut Tile, level: u8) {
    match BITS[level as usize] {
        8 => {}
        4 => tile.step.iter_mut().for_each(|s| *s *= 17.0),
        _ => {
            for (s, z) in tile.step.iter_mut().zip(&mut tile.zero) {
                *s *= 255.0 / 4.0;
                *z += *s / 2.0;
            }
        }
    }
}

/// A row's level in a page's bytes.
#[inline(always)]
fn level_of(bytes: &[u8], row: usize) -> u8 {
    bytes[row / 4] >> (row % 4 * LEVEL_BITS) & 3
}

impl Levels for Leveled {
    fn bits(&self) -> &'static [usize] {
        &BITS
    }

    fn bytes(&self, n_rows: &[usize], dim: usize) -> usize {
        let all = n_rows.iter().sum();
        let codes = n_rows.iter().zip(BITS);
        let codes: usize = codes.map(|(n, bits)| n * stream_bytes(dim, bits)).sum();
        codes + self.scale_bytes(all, dim)
    }

    fn encode(&self, rows: &[f32], dim: usize, levels: &[u8]) -> Vec<u8> {
        let mut counts = [0; BITS.len()];
        for &level in levels {
            counts[level as usize] += 1;
        }
        let mut out = vec![0; self.bytes(&counts, dim)];
        encode(self, (rows, dim), levels, &mut out);
        out
    }
}

impl PageCodec for Leveled {
    fn page_rows(&self) -> usize {
        RANGE
    }

    fn page_bytes(&self, n_rows: usize, dim: usize) -> usize {
        n_rows * stream_bytes(dim, BITS[self.base as usize]) + self.scale_bytes(n_rows, dim)
    }

    fn scale_bytes(&self, n_rows: usize, dim: usize) -> usize {
        stream_bytes(n_rows, LEVEL_BITS) + self.grid.scale_bytes(self.n_groups(n_rows, dim))
    }

    fn encode(&self, rows: &[f32], dim: usize, out: &mut [u8]) {
        encode(self, (rows, dim), &vec![self.base; rows.len() / dim], out);
    }

    fn decode(&self, bytes: &[u8], dim: usize, rows: &mut [f32]) {
        decode(self, bytes, dim, rows);
    }

    fn levels(&self) -> Option<&dyn Levels> {
        Some(self)
    }
}

multiversion! {
    fn encode(codec: &Leveled, rows: (&[f32], usize), levels: &[u8], out: &mut [u8]) = encode_body;
}

multiversion! {
    fn decode(codec: &Leveled, bytes: &[u8], dim: usize, rows: &mut [f32]) = decode_body;
}

#[inline(always)]
fn encode_body(codec: &Leveled, (rows, dim): (&[f32], usize), levels: &[u8], out: &mut [u8]) {
    let n_rows = levels.len();
    let (header, out) = out.split_at_mut(stream_bytes(n_rows, LEVEL_BITS));
    header.fill(0);
    for (row, &level) in levels.iter().enumerate() {
        header[row / 4] |= level << (row % 4 * LEVEL_BITS);
    }
    let n_scales = codec.grid.scale_bytes(codec.n_groups(n_rows, dim));
    let (mut codes, scales) = out.split_at_mut(out.len() - n_scales);
    codec.put_scales(rows, dim, scales);
    let mut tile = Tile::new();
    for ((r, row), &level) in rows.chunks_exact(dim).enumerate().zip(levels) {
        let grid = Grid {
            bits: BITS[level as usize],
            ..codec.grid
        };
        let (own, later) = codes.split_at_mut(stream_bytes(dim, grid.bits));
        let tiles = row.chunks(TILE).zip(own.chunks_mut(tile_bytes(grid)));
        for (t, (x, out)) in tiles.enumerate() {
            codec.load(scales, (r, dim), t * TILE..t * TILE + x.len(), &mut tile);
            at_level(&mut tile, level);
            match grid.bits {
                2 => tile::encode::<2>(grid, x, &tile, out),
                4 => tile::encode::<4>(grid, x, &tile, out),
                _ => tile::encode::<8>(grid, x, &tile, out),
            }
        }
        codes = later;
    }
}

#[inline(always)]
fn decode_body(codec: &Leveled, bytes: &[u8], dim: usize, rows: &mut [f32]) {
    let n_rows = rows.len() / dim;
    let (header, bytes) = bytes.split_at(stream_bytes(n_rows, LEVEL_BITS));
    let n_scales = codec.grid.scale_bytes(codec.n_groups(n_rows, dim));
    let (mut codes, scales) = bytes.split_at(bytes.len() - n_scales);
    let mut tile = Tile::new();
    for (r, row) in rows.chunks_exact_mut(dim).enumerate() {
        let level = level_of(header, r);
        let grid = Grid {
            bits: BITS[level as usize],
            ..codec.grid
        };
        let (own, later) = codes.split_at(stream_bytes(dim, grid.bits));
        let tiles = row.chunks_mut(TILE).zip(own.chunks(tile_bytes(grid)));
        for (t, (x, codes)) in tiles.enumerate() {
            codec.load(scales, (r, dim), t * TILE..t * TILE + x.len(), &mut tile);
            at_level(&mut tile, level);
            match grid.bits {
                2 => tile::decode::<2>(codes, &tile, x),
                4 => tile::decode::<4>(codes, &tile, x),
                _ => tile::decode::<8>(codes, &tile, x),
            }
        }
        codes = later;
    }
}

#[cfg(test)]
mod tests {
    use super::super::scale::ScaleFormat;
    use super::*;
    use crate::cache::encode::fixture::{normals, relative_error};
    use crate::cache::stage::{
        BuildContext, Codec, HeadContext, KeyForm, Params, Side, Stage, Value,
    };

    fn leveled(axis: Axis, scales: ScaleFormat) -> Leveled {
        let grid = Grid {
            bits: 4,
            has_zero: true,
            scales,
            fit: super::super::Fit::MinMax,
        };
        Leveled::new(grid, axis).unwrap()
    }

    fn decoded(codec: &Leveled, bytes: &[u8], dim: usize, n: usize) -> Vec<f32> {
        let mut rows = vec![f32::NAN; n * dim];
        PageCodec::decode(codec, bytes, dim, &mut rows);
        rows
    }

    #[test]
    fn a_page_of_8_bits_is_int8_s() {
        let (n, dim) = (50, 80);
        let rows = normals(n * dim, 3);
        for (axis, params) in [
            (Axis::Channel, ("axis", "channel")),
            (Axis::Token(64), ("axis", "token")),
        ] {
            let codec = leveled(axis, ScaleFormat::F16);
            let bytes = Levels::encode(&codec, &rows, dim, &vec![2; n]);
            let params = Params([(params.0.to_owned(), Value::Text(params.1.to_owned()))].into());
            let context = BuildContext {
                geometry: &crate::cache::Geometry { layers: Vec::new() },
                keys: KeyForm::PostRope,
                side: Side::K,
                calibration: None,
                backing_dir: None,
                head: Some(HeadContext::any(dim)),
            };
            let Ok(Stage::Encode(plain)) = (super::super::INT8.build)(&params, &context) else {
                panic!("int8");
            };
            let mut want = vec![0.0; n * dim];
            match &plain {
                Codec::Pages(plain) => {
                    let mut out = vec![0; plain.page_bytes(n, dim)];
                    plain.encode(&rows, dim, &mut out);
                    plain.decode(&out, dim, &mut want);
                }
                Codec::Rows(plain) => {
                    for (row, want) in rows.chunks_exact(dim).zip(want.chunks_exact_mut(dim)) {
                        let mut out = vec![0; plain.row_bytes(dim)];
                        plain.encode(row, &mut out);
                        plain.decode(&out, want);
                    }
                }
            }
            assert_eq!(decoded(&codec, &bytes, dim, n), want, "{axis:?}");
        }
    }

    #[test]
    fn each_row_has_the_bytes_and_the_error_of_its_level() {
        for axis in [Axis::Channel, Axis::Token(32)] {
            for (dim, scales) in [(64, ScaleFormat::Fp8), (33, ScaleFormat::F16)] {
                let codec = leveled(axis, scales);
                let n = 90;
                let rows = normals(n * dim, 8);
                let levels: Vec<u8> = (0..n).map(|i| (i % 3) as u8).collect();
                let counts = [0, 1, 2].map(|l| levels.iter().filter(|&&x| x == l).count());
                let bytes = Levels::encode(&codec, &rows, dim, &levels);
                assert_eq!(bytes.len(), codec.bytes(&counts, dim));
                let back = decoded(&codec, &bytes, dim, n);
                let error = |level: u8| {
                    let of = |x: &[f32]| -> Vec<f32> {
                        let rows = x.chunks_exact(dim).zip(&levels);
                        rows.filter(|(_, l)| **l == level)
                            .flat_map(|(r, _)| r.to_vec())
                            .collect()
                    };
                    relative_error(&of(&rows), &of(&back))
                };
                let errors = [0, 1, 2].map(error);
                let what = format!("{axis:?} {dim} {scales:?}: {errors:?}");
                assert!(errors[0] > 0.2 && errors[0] < 0.5, "{what}");
                assert!(errors[1] > 0.04 && errors[1] < 0.15, "{what}");
                assert!(errors[2] > 0.002 && errors[2] < 0.02, "{what}");
                // What one row has changes no other's numbers.
                let mut others = levels.clone();
                others[7] = 2;
                let again = Levels::encode(&codec, &rows, dim, &others);
                let again = decoded(&codec, &again, dim, n);
                let same = |r: usize| again[r * dim..][..dim] == back[r * dim..][..dim];
                assert!(
                    (0..n).all(|r| same(r) == (r != 7 || levels[7] == 2)),
                    "{what}"
                );
            }
        }
    }

    #[test]
    fn two_bits_stand_for_the_middles_of_cells() {
        let codec = leveled(Axis::Token(8), ScaleFormat::F16);
        let row = [0.0, 255.0, 10.0, 70.0, 130.0, 200.0, 63.0, 64.0];
        let bytes = Levels::encode(&codec, &row, 8, &[0]);
        // A level, two bytes of codes, a step and a zero.
        assert_eq!(bytes.len(), 1 + 2 + 4);
        let back = decoded(&codec, &bytes, 8, 1);
        let (low, second, third, high) = (31.875, 95.625, 159.375, 223.125);
        assert_eq!(back, [low, high, low, second, third, high, low, second]);
    }

    #[test]
    fn grids_without_levels_have_none() {
        let grid = leveled(Axis::Channel, ScaleFormat::F16).grid;
        assert!(Leveled::new(Grid { bits: 3, ..grid }, Axis::Channel).is_none());
        let symmetric = Grid {
            has_zero: false,
            ..grid
        };
        assert!(Leveled::new(symmetric, Axis::Channel).is_none());
        let fitted = Grid {
            fit: super::super::Fit::Mse,
            ..grid
        };
        assert!(Leveled::new(fitted, Axis::Channel).is_none());
    }
}
