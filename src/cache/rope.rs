//! Rotary position embedding, applied by the cache: q always, k at append (post-RoPE keys) or at read (pre-RoPE keys).
//!
//! Invariants: the angle of (position, pair) is `position · inv_freq[pair]`, formed in f32 as the reference
//! implementations do; a row's rotation depends on its position alone.

use std::sync::OnceLock;

use super::RANGE;
use super::formats::Mask;
use super::places::bits;
use super::scratch::room;
use crate::compute::cpu::rows::Turn;
use crate::compute::cpu::vector::multiversion;

pub use crate::compute::cpu::rows::PairLayout;

/// Rotation tables for positions `0..n_positions`.
#[derive(Debug, Clone)]
pub struct Rope {
    layout: PairLayout,
    inv_freq: Vec<f32>,
    /// `[position][pair]` of (cos, sin).
    table: Vec<(f32, f32)>,
    /// The same as kernels read them, once rows are turned as they are read: see [`Turn::angles`].
    lanes: OnceLock<Vec<f32>>,
}

/// Positions side by side.
const LANES: usize = 16;

impl Rope {
    /// Tables for `n_positions` positions; `inv_freq` holds one frequency per pair, scaling already applied.
    pub fn new(layout: PairLayout, inv_freq: Vec<f32>, n_positions: usize) -> Self {
        let mut table = Vec::with_capacity(n_positions * inv_freq.len());
        for p in 0..n_positions {
            for &f in &inv_freq {
                let angle = p as f32 * f;
                // f64 keeps the table within half an ulp of the exact cosine on every platform.
                let (s, c) = f64::from(angle).sin_cos();
                table.push((c as f32, s as f32));
            }
        }
        Self {
            layout,
            inv_freq,
            table,
            lanes: OnceLock::new(),
        }
    }

    /// The plain frequencies `base^(-2i/n_rot)`.
    pub fn frequencies(base: f32, n_rot: usize) -> Vec<f32> {
        (0..n_rot / 2)
            .map(|i| f64::from(base).powf(-2.0 * i as f64 / n_rot as f64) as f32)
            .collect()
    }

    /// The mean of the rotations at some positions, in or past the tables, as the rotation of position 0: a linear map that
    /// shortens pairs.
    pub fn averaged(&self, positions: std::ops::Range<u32>) -> Self {
        let n = positions.len().max(1) as f64;
        let mean = |&f: &f32| {
            let sum = positions.clone().fold((0.0, 0.0), |sum: (f64, f64), p| {
                let (sin, cos) = f64::from(p as f32 * f).sin_cos();
                (sum.0 + cos, sum.1 + sin)
            });
            ((sum.0 / n) as f32, (sum.1 / n) as f32)
        };
        Self {
            layout: self.layout,
            inv_freq: self.inv_freq.clone(),
            table: self.inv_freq.iter().map(mean).collect(),
            lanes: OnceLock::new(),
        }
    }

    /// Positions that the tables cover.
    pub fn n_positions(&self) -> usize {
        self.table
            .len()
            .checked_div(self.inv_freq.len())
            .unwrap_or(0)
    }

    /// How rows of a range that begins at position `first` are turned. `buffer` is for rows with others missing between them.
    pub fn turn<'a>(&'a self, first: u32, rows: Mask, buffer: &'a mut Vec<f32>) -> Turn<'a> {
        let n_pairs = self.inv_freq.len();
        let start = rows.trailing_zeros() as usize;
        let run = rows >> (start % RANGE);
        let angles = if run & run.wrapping_add(1) == 0 && start.is_multiple_of(LANES) {
            let lanes = self.lanes.get_or_init(|| self.in_lanes());
            &lanes[(first as usize + start) * 2 * n_pairs..]
        } else {
            room(buffer, RANGE * 2 * n_pairs);
            buffer.resize(RANGE * 2 * n_pairs, 0.0);
            for (row, bit) in bits(rows).enumerate() {
                self.put(first as usize + bit, row, buffer);
            }
            &buffer[..]
        };
        Turn {
            angles,
            n_pairs,
            layout: self.layout,
        }
    }

    /// The angles of all positions, and of a few more that a kernel may look at.
    fn in_lanes(&self) -> Vec<f32> {
        let n = self.n_positions();
        let mut lanes =
            vec![0.0; (n.next_multiple_of(RANGE) + 2 * LANES) * 2 * self.inv_freq.len()];
        for position in 0..n {
            self.put(position, position, &mut lanes);
        }
        lanes
    }

    /// Puts a position's angles where a row's are looked for.
    fn put(&self, position: usize, row: usize, lanes: &mut [f32]) {
        let n = self.inv_freq.len();
        let block = &mut lanes[row / LANES * n * 2 * LANES..][..n * 2 * LANES];
        let angles = &self.table[position * n..][..n];
        for (pair, &(cos, sin)) in block.chunks_exact_mut(2 * LANES).zip(angles) {
            pair[row % LANES] = cos;
            pair[LANES + row % LANES] = sin;
        }
    }

    /// Rotates one row (`[head_dim]`) in place; channels past the rotated ones stay.
    pub fn rotate(&self, position: u32, row: &mut [f32]) {
        let n = self.inv_freq.len();
        let first = position as usize * n;
        let angles = &self.table[first..first + n];
        match self.layout {
            PairLayout::Interleaved => interleaved(row, angles),
            PairLayout::HalfSplit => half_split(row, angles),
        }
    }
}

/// Pairs at a time: whole vectors of channels.
const PAIRS: usize = 8;

multiversion! {
    fn interleaved(row: &mut [f32], angles: &[(f32, f32)]) = interleaved_body;
}

multiversion! {
    fn half_split(row: &mut [f32], angles: &[(f32, f32)]) = half_split_body;
}

#[inline(always)]
fn interleaved_body(row: &mut [f32], angles: &[(f32, f32)]) {
    let (blocks, rest) = row[..2 * angles.len()].as_chunks_mut::<{ 2 * PAIRS }>();
    let (angles, last) = angles.as_chunks::<PAIRS>();
    for (block, angles) in blocks.iter_mut().zip(angles) {
        let x = *block;
        for i in 0..PAIRS {
            let (c, s) = angles[i];
            block[2 * i] = x[2 * i] * c - x[2 * i + 1] * s;
            block[2 * i + 1] = x[2 * i] * s + x[2 * i + 1] * c;
        }
    }
    for (pair, &(c, s)) in rest.chunks_exact_mut(2).zip(last) {
        let (a, b) = (pair[0], pair[1]);
        pair[0] = a * c - b * s;
        pair[1] = a * s + b * c;
    }
}

#[inline(always)]
fn half_split_body(row: &mut [f32], angles: &[(f32, f32)]) {
    let (lo, hi) = row.split_at_mut(angles.len());
    for ((x, y), &(c, s)) in lo.iter_mut().zip(hi).zip(angles) {
        let (a, b) = (*x, *y);
        *x = a * c - b * s;
        *y = a * s + b * c;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_rotate_the_same_pairs() {
        let freqs = Rope::frequencies(10_000.0, 8);
        let inter = Rope::new(PairLayout::Interleaved, freqs.clone(), 16);
        let half = Rope::new(PairLayout::HalfSplit, freqs, 16);
        let row: Vec<f32> = (0..8).map(|i| i as f32 - 3.5).collect();
        let mut a = row.clone();
        let mut b: Vec<f32> = (0..8)
            .map(|i| row[if i < 4 { 2 * i } else { 2 * (i - 4) + 1 }])
            .collect();
        inter.rotate(7, &mut a);
        half.rotate(7, &mut b);
        for i in 0..4 {
            assert_eq!(a[2 * i], b[i]);
            assert_eq!(a[2 * i + 1], b[i + 4]);
        }
        assert_ne!(a, row);
    }

    #[test]
    fn position_zero_is_the_identity() {
        let rope = Rope::new(PairLayout::HalfSplit, Rope::frequencies(10_000.0, 4), 2);
        let mut row = [1.0, 2.0, 3.0, 4.0];
        rope.rotate(0, &mut row);
        assert_eq!(row, [1.0, 2.0, 3.0, 4.0]);
    }
}
