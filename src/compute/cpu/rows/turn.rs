//! Keys turned by their positions (RoPE) between unpacking and scoring: lanes are rows, so a pair of channels is turned by
//! vectors of cosines and sines.
//!
//! Invariant: x·cos − y·sin and x·sin + y·cos, products and sums rounded one by one, as rows are rotated when they are
//! stored turned.

use std::ops::Range;

use super::{LANES, STRIP};
use crate::compute::cpu::simd::Simd;

/// Which two channels form a rotated pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PairLayout {
    /// Channels 2i and 2i+1 (GGUF files of the llama architecture).
    Interleaved,
    /// Channels i and i + n_rot/2 (Hugging Face checkpoints, qwen, gemma).
    HalfSplit,
}

/// By how much each of some rows is turned.
#[derive(Debug, Clone, Copy)]
pub struct Turn<'a> {
    /// Of row 0 and the following, up to a multiple of 32 rows: `[row / 16][pair]` of 16 cosines, then 16 sines.
    pub angles: &'a [f32],
    /// Pairs of channels that are turned: the first 2 · `n_pairs` channels.
    pub n_pairs: usize,
    /// Which channels those are.
    pub layout: PairLayout,
}

impl<'a> Turn<'a> {
    /// The same for the rows from `row` on; `None` unless that is a multiple of 16.
    pub fn from_row(self, row: usize) -> Option<Self> {
        let angles = self.angles.get(row * self.n_pairs * 2..)?;
        row.is_multiple_of(LANES).then_some(Self { angles, ..self })
    }

    /// # Panics
    /// Unless there are angles for `n` rows, up to a whole strip, and `dim` channels have the pairs.
    pub(super) fn check(&self, n: usize, dim: usize) {
        assert!(
            2 * self.n_pairs <= dim
                && n.next_multiple_of(STRIP) * 2 * self.n_pairs <= self.angles.len()
        );
    }

    /// The channels of a pair.
    #[inline(always)]
    fn pair(&self, i: usize) -> [usize; 2] {
        match self.layout {
            PairLayout::Interleaved => [2 * i, 2 * i + 1],
            PairLayout::HalfSplit => [i, i + self.n_pairs],
        }
    }

    /// Turns 32 rows in columns, `stride` apart.
    ///
    /// # Safety
    /// The instruction set is there; there are angles for 32 rows, and the channels of all pairs.
    #[inline(always)]
    pub(super) unsafe fn columns<S: Simd>(self, columns: &mut [f32], stride: usize) {
        let to = columns.as_mut_ptr();
        for i in 0..self.n_pairs {
            for b in 0..STRIP / LANES {
                // SAFETY: the caller's promise.
                unsafe { self.turn::<S>(to.add(b * LANES), stride, i, b) };
            }
        }
    }

    /// Turns pair i of 16 rows in place; returns both channels.
    ///
    /// # Safety
    /// As in [`Turn::columns`], `to` naming block b of the first channel.
    #[inline(always)]
    unsafe fn turn<S: Simd>(&self, to: *mut f32, stride: usize, i: usize, b: usize) -> [S::F; 2] {
        let [x, y] = self.pair(i);
        // SAFETY: the caller's promise.
        unsafe {
            let (x, y) = (to.add(x * stride), to.add(y * stride));
            let angle = self.angles.as_ptr().add((b * self.n_pairs + i) * 2 * LANES);
            let (cos, sin) = (S::load(angle), S::load(angle.add(LANES)));
            let (a, b) = (S::load(x), S::load(y));
            let turned = [
                S::sub(S::mul(a, cos), S::mul(b, sin)),
                S::add(S::mul(a, sin), S::mul(b, cos)),
            ];
            S::store(x, turned[0]);
            S::store(y, turned[1]);
            turned
        }
    }
}

/// Turns 32 rows in columns in place and scores them for Q queries.
///
/// # Safety
/// The instruction set is there; `q` has Q rows, `columns` 32 rows of as many channels; there are angles for 32 rows.
#[inline(always)]
pub(super) unsafe fn turned_strip<S: Simd, const Q: usize>(
    columns: &mut [f32],
    turn: Turn<'_>,
    q: &[f32],
) -> [[S::F; Q]; 2] {
    let dim = q.len() / Q;
    let to = columns.as_mut_ptr();
    let is_adjacent = turn.layout == PairLayout::Interleaved;
    // SAFETY (all blocks): the caller's promise.
    unsafe {
        let mut acc = [[S::splat(0.0); Q]; 2];
        for i in 0..turn.n_pairs {
            let [c, _] = turn.pair(i);
            let low = turn.turn::<S>(to, STRIP, i, 0);
            let high = turn.turn::<S>(to.add(LANES), STRIP, i, 1);
            add::<S, Q, 2>([low[0], high[0]], q.as_ptr().add(c), dim, &mut acc);
            if is_adjacent {
                add::<S, Q, 2>([low[1], high[1]], q.as_ptr().add(c + 1), dim, &mut acc);
            }
        }
        let done = turn.n_pairs * if is_adjacent { 2 } else { 1 };
        columns_strip::<S, Q>(columns, done..dim, q, acc)
    }
}

/// Adds some channels of 32 rows in columns to their scores for Q queries.
///
/// # Safety
/// The instruction set is there; `q` has Q rows, `columns` 32 rows of as many channels, among them those named.
#[inline(always)]
pub(super) unsafe fn columns_strip<S: Simd, const Q: usize>(
    columns: &[f32],
    channels: Range<usize>,
    q: &[f32],
    mut acc: [[S::F; Q]; 2],
) -> [[S::F; Q]; 2] {
    let dim = q.len() / Q;
    for c in channels {
        // SAFETY: the caller's promise.
        unsafe {
            let column = columns.as_ptr().add(c * STRIP);
            let k = [S::load(column), S::load(column.add(LANES))];
            add::<S, Q, 2>(k, q.as_ptr().add(c), dim, &mut acc);
        }
    }
    acc
}

/// Adds one channel of H times 16 rows to their scores for Q queries.
///
/// # Safety
/// The instruction set is there; `q` names the channel of the first query, and those of the others are `dim` numbers apart.
#[inline(always)]
pub(super) unsafe fn add<S: Simd, const Q: usize, const H: usize>(
    k: [S::F; H],
    q: *const f32,
    dim: usize,
    acc: &mut [[S::F; Q]; H],
) {
    #[allow(clippy::needless_range_loop, reason = "accumulators stay in registers")]
    for i in 0..Q {
        // SAFETY: the caller's promise.
        unsafe {
            let x = S::splat(*q.add(i * dim));
            for (acc, &k) in acc.iter_mut().zip(&k) {
                acc[i] = S::fma(x, k, acc[i]);
            }
        }
    }
}
