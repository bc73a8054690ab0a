//! Rotary position embedding, applied by the cache: q always, k at append (post-RoPE keys) or at read (pre-RoPE keys).
//!
//! Invariants: the angle of (position, pair) is `position · inv_freq[pair]`, formed in f32 as the reference
//! implementations do; a row's rotation depends on its position alone.

use crate::compute::cpu::vector::multiversion;

/// Which two channels form a rotated pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PairLayout {
    /// Channels 2i and 2i+1 (GGUF files of the llama architecture).
    Interleaved,
    /// Channels i and i + n_rot/2 (Hugging Face checkpoints, qwen, gemma).
    HalfSplit,
}

/// Rotation tables for positions `0..n_positions`.
#[derive(Debug, Clone)]
pub struct Rope {
    layout: PairLayout,
    inv_freq: Vec<f32>,
    /// `[position][pair]` of (cos, sin).
    table: Vec<(f32, f32)>,
}

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
        }
    }

    /// The plain frequencies `base^(-2i/n_rot)`.
    pub fn frequencies(base: f32, n_rot: usize) -> Vec<f32> {
        (0..n_rot / 2)
            .map(|i| f64::from(base).powf(-2.0 * i as f64 / n_rot as f64) as f32)
            .collect()
    }

    /// Positions that the tables cover.
    pub fn n_positions(&self) -> usize {
        self.table
            .len()
            .checked_div(self.inv_freq.len())
            .unwrap_or(0)
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
