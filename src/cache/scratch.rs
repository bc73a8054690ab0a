//! Working memory of attention: one task's buffers, kept for the next task of the thread.
//!
//! Invariant: a buffer is as large as the largest task asked for and no larger, so that the largest of each buffer over
//! all threads is what one thread would hold, however many there are.

use std::sync::Mutex;

use super::RANGE;
use super::head_view::HeadView;
use super::places::ReadBuffers;
use super::stage::{Side, Work};
use super::visibility::Class;
use crate::compute::cpu::vector::{exp_pair, rescale_add};

/// Decoded rows of one side and class in the current range.
#[derive(Debug, Default)]
pub struct Source {
    /// Absolute positions, ascending.
    pub positions: Vec<u32>,
    /// Keys, `[channel][row]` with row stride [`RANGE`]; or values, `[row][channel]`.
    pub data: Vec<f32>,
    /// Of keys: `[query][row]`, row stride [`RANGE`].
    pub scores: Vec<f32>,
    /// Visible query positions of each row.
    pub intervals: Vec<(u32, u32)>,
    /// Every query of the tile sees every row.
    pub uniform: bool,
}

/// Accumulators of one space (coded or exact rows), `[query][dim]`.
#[derive(Debug, Default)]
pub struct Space {
    /// Channels.
    pub dim: usize,
    /// Over all ranges so far.
    pub sum: Vec<f32>,
    /// Something was summed.
    pub used: bool,
}

/// Working memory of one task.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Rotated, scaled queries, `[query][head_dim]`; and the same in the space of coded keys.
    pub q: [Vec<f32>; 2],
    /// Decoded keys of one class and range.
    pub rows: Vec<f32>,
    /// By [`Side`] and [`Class`].
    pub sources: [[Source; 3]; 2],
    /// Coded, exact.
    pub spaces: [Space; 2],
    /// Sums of the current range: coded, exact.
    pub partials: [Vec<f32>; 2],
    /// Running maximum of each query.
    pub m: Vec<f32>,
    /// Running sum of each query.
    pub l: Vec<f32>,
    /// Weights of the rows that one query selects, or maxima and sums of all queries; of one token, those of a range,
    /// `[query][row]` with row stride [`RANGE`].
    pub weights: Vec<f32>,
    /// Of one token: scores of one class of a range, `[query][row]`, row stride [`RANGE`].
    pub scores: Vec<f32>,
    /// Of the kernels over stored rows.
    pub work: Work,
    /// Rows of the layer before, where rows are predicted.
    pub inputs: Vec<f32>,
    /// For pages that can't be read in place.
    pub buffers: ReadBuffers,
}

/// Working memory that no task uses now.
#[derive(Debug, Default)]
pub struct Pool(
    #[allow(
        clippy::vec_box,
        reason = "working memory is moved at every task: a pointer, not all its buffers' heads"
    )]
    Mutex<Vec<Box<Scratch>>>,
);

impl Pool {
    /// Working memory for a task, to be given back.
    pub fn take(&self) -> Box<Scratch> {
        let idle = self.0.lock().ok().and_then(|mut idle| idle.pop());
        idle.unwrap_or_default()
    }

    /// Working memory that comes back by itself.
    pub fn lend(&self) -> Lent<'_> {
        Lent {
            pool: self,
            scratch: Some(self.take()),
        }
    }

    /// Keeps working memory for a later task.
    pub fn give(&self, scratch: Box<Scratch>) {
        if let Ok(mut idle) = self.0.lock() {
            idle.push(scratch);
        }
    }

    /// What a thread holds that did all tasks, bytes.
    pub fn bytes_of_one(&self) -> u64 {
        let Ok(pool) = self.0.lock() else { return 0 };
        let mut largest = Vec::new();
        for scratch in pool.iter() {
            let sizes = scratch.sizes();
            largest.resize(sizes.len(), 0);
            for (l, size) in largest.iter_mut().zip(sizes) {
                *l = size.max(*l);
            }
        }
        largest.iter().sum::<usize>() as u64
    }
}

/// Working memory of a thread's tasks, given back when they are done.
pub struct Lent<'a> {
    pool: &'a Pool,
    scratch: Option<Box<Scratch>>,
}

impl Lent<'_> {
    /// The memory.
    pub fn scratch(&mut self) -> &mut Scratch {
        self.scratch.get_or_insert_default()
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(scratch) = self.scratch.take() {
            self.pool.give(scratch);
        }
    }
}

impl Scratch {
    /// Makes room for a task of `n` queries.
    pub fn make_room(&mut self, view: HeadView<'_>, n: usize) {
        let d = view.geometry.head_dim;
        let dim = |side| view.formats.format(view.head, side, Class::Coded).dim;
        let n_coded = if view.stages.absorbs_keys() { n } else { 0 };
        room(&mut self.q[0], n * d);
        room(&mut self.q[1], n_coded * dim(Side::K));
        room(&mut self.m, n);
        room(&mut self.l, n);
        room(&mut self.weights, (2 * n).max(3 * RANGE));
        for (space, dim) in self.spaces.iter_mut().zip([view.value_dim(), d]) {
            room(&mut space.sum, n * dim);
        }
        for (partial, dim) in self.partials.iter_mut().zip([view.value_dim(), d]) {
            room(partial, n * dim);
        }
    }

    /// Bytes of each buffer.
    fn sizes(&self) -> Vec<usize> {
        fn of<T>(buffer: &Vec<T>) -> usize {
            buffer.capacity() * size_of::<T>()
        }
        let others = [&self.m, &self.l, &self.rows, &self.weights];
        let others = others.into_iter().chain([&self.scores, &self.inputs]);
        let mut sizes: Vec<usize> = others.map(of).collect();
        sizes.extend(self.q.iter().chain(&self.partials).map(of));
        sizes.extend(self.spaces.iter().map(|s| of(&s.sum)));
        sizes.extend(self.work.sizes());
        for s in self.sources.iter().flatten() {
            sizes.extend([of(&s.positions), of(&s.intervals)]);
            sizes.extend([&s.data, &s.scores].map(of));
        }
        sizes.extend(self.buffers.sizes());
        sizes
    }
}

impl Source {
    /// Makes room for the rows of a whole page, `n_values` numbers, and `n` queries.
    pub fn make_room(&mut self, n_values: usize, n: usize) {
        room(&mut self.positions, RANGE);
        room(&mut self.intervals, RANGE);
        room(&mut self.data, n_values);
        room(&mut self.scores, RANGE * n);
    }
}

/// Room for `n` elements, and no more than the most ever asked for.
pub fn room<T>(buffer: &mut Vec<T>, n: usize) {
    buffer.reserve_exact(n.saturating_sub(buffer.len()));
}

/// Merges query i's partial (m, l, acc) of one range into its running sums. `sums`: coded, exact, `[query][dim]`.
pub fn merge(
    spaces: &mut [Space; 2],
    total: (&mut f32, &mut f32),
    i: usize,
    partial: (f32, f32),
    sums: [Option<&[f32]>; 2],
) {
    let m = if partial.0 > *total.0 {
        partial.0
    } else {
        *total.0
    };
    let (old, new) = exp_pair(*total.0 - m, partial.0 - m);
    *total.0 = m;
    *total.1 = partial.1.mul_add(new, *total.1 * old);
    for (space, partial) in spaces.iter_mut().zip(sums) {
        let rows = i * space.dim..(i + 1) * space.dim;
        if let Some(partial) = partial {
            rescale_add(&mut space.sum[rows.clone()], old, &partial[rows], new);
        } else if space.used && old != 1.0 {
            for s in &mut space.sum[rows] {
                *s *= old;
            }
        }
    }
}
