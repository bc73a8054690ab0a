//! Attention of one token: its queries meet each range's rows as they are stored, and ranges are shared out to threads.
//!
//! Invariants: the bits are those of a tile of queries ([`super::attention`]): the same chains, partial results per range,
//! merged in order of the ranges. Tasks are fixed runs of ranges of one head, whatever the number of threads.
//!
//! ```text
//! range      0    1    2    3  |  4    5    6    7  |  8 …
//! head 0     task 0            |  task 2            |           each range: m, l, Σ exp(s − m)·v
//! head 1     task 1            |  task 3            |
//! merge      0 → 1 → 2 → 3 → 4 …   per head, in order
//! ```

use std::ops::Range;

use super::attention::Tile;
use super::formats::Mask;
use super::head_view::HeadView;
use super::runs::{Run, Runs};
use super::scratch::{Pool, Scratch, room};
use super::seen::{Found, OfClasses, Seen};
use super::stage::Side;
use super::stored::{Decoded, StoredRange};
use super::visibility::Class;
use super::{CacheError, RANGE};
use crate::compute::cpu::gemm::{Mat, MatMut};
use crate::compute::cpu::partials::{Partial, Shape, Totals, merge};
use crate::compute::cpu::team;
use crate::compute::cpu::vector::exp_rows;

/// Ranges of one task.
const TASK: usize = 4;
/// Ranges whose partial results are held at a time.
const WAVE: usize = 32;
/// Partial results that one thread makes sooner than two would share them.
const FEW: usize = 6;

/// The queries of one token, for all heads of a layer.
pub struct Token<'a> {
    /// Its position.
    pub position: u32,
    /// Queries before RoPE, `[head][head_dim]`.
    pub q: &'a [f32],
    /// Outputs, the same shape.
    pub out: &'a mut [f32],
}

/// Attends one token to everything that it may see. `views`: the KV heads; `partials` is working memory.
pub fn attend(
    views: &[HeadView<'_>],
    token: Token<'_>,
    pool: &Pool,
    partials: &mut Vec<f32>,
) -> Result<(), CacheError> {
    let Some(view) = views.first() else {
        return Ok(());
    };
    let width = view.geometry.group() * view.geometry.head_dim;
    let mut heads: Vec<Box<Scratch>> = views.iter().map(|_| pool.take()).collect();
    for ((scratch, view), q) in heads.iter_mut().zip(views).zip(token.q.chunks_exact(width)) {
        scratch.start(*view, token.position, q);
    }
    let sum = Sum {
        views,
        position: token.position,
        shape: Shape {
            n_queries: view.geometry.group(),
            dims: [view.value_dim(), view.geometry.head_dim],
        },
        pool,
    };
    let result = sum.all(&mut heads, partials);
    for ((scratch, view), out) in heads
        .iter_mut()
        .zip(views)
        .zip(token.out.chunks_exact_mut(width))
    {
        scratch.finish(*view, out);
    }
    for scratch in heads {
        pool.give(scratch);
    }
    result
}

/// What all tasks of a token share.
struct Sum<'a> {
    views: &'a [HeadView<'a>],
    position: u32,
    shape: Shape,
    pool: &'a Pool,
}

/// A head, some ranges, and where their partial results go.
type Task<'a> = (usize, Range<usize>, &'a mut [f32]);

impl Sum<'_> {
    fn all(&self, heads: &mut [Box<Scratch>], partials: &mut Vec<f32>) -> Result<(), CacheError> {
        let (view, n_heads) = (&self.views[0], self.views.len());
        let end = self.position as usize / RANGE + 1;
        let first = view.first_range(self.position) as usize;
        for wave in (first..end).step_by(WAVE) {
            let wave = wave..end.min(wave + WAVE);
            let n = n_heads * wave.len() * self.shape.size();
            room(partials, n);
            partials.resize(n, 0.0);
            let mut tasks = self.tasks(wave.clone(), partials);
            if !view.turns_keys() {
                // One head after the other: what is asked for ahead is what comes next.
                tasks.sort_by_key(|&(h, ..)| h);
            }
            if n_heads * wave.len() <= FEW || rayon::current_num_threads() == 1 {
                for (h, ranges, part) in tasks {
                    self.run(heads, (h, ranges, &mut *part))?;
                    heads[h].take_in(self.shape, part);
                }
                continue;
            }
            let asked = &*heads;
            team::try_map(tasks, |task| self.run(asked, task))?;
            for (h, _, part) in self.tasks(wave, partials) {
                heads[h].take_in(self.shape, part);
            }
        }
        Ok(())
    }

    /// All heads of a few ranges, then all of the next: where keys are turned, those of all heads are turned by the same
    /// angles.
    fn tasks<'p>(&self, wave: Range<usize>, partials: &'p mut [f32]) -> Vec<Task<'p>> {
        let (n_heads, size) = (self.views.len(), self.shape.size());
        let blocks = partials.chunks_mut(n_heads * TASK * size);
        let tasks = wave.step_by(TASK).zip(blocks).flat_map(|(first, block)| {
            let n = block.len() / n_heads;
            let parts = block.chunks_exact_mut(n).enumerate();
            parts.map(move |(h, part)| (h, first..first + n / size, part))
        });
        tasks.collect()
    }

    fn run(&self, heads: &[Box<Scratch>], (h, ranges, part): Task<'_>) -> Result<(), CacheError> {
        let mut scratch = self.pool.take();
        let q = heads[h].q.each_ref().map(Vec::as_slice);
        let done = scratch.partials_of(self, (h, ranges), q, part);
        self.pool.give(scratch);
        done
    }
}

impl Scratch {
    /// The partial results of up to [`TASK`] ranges of one head, into `partials`. `q`: the queries in the space of exact rows
    /// and in that of coded keys.
    fn partials_of(
        &mut self,
        sum: &Sum<'_>,
        (head, ranges): (usize, Range<usize>),
        q: [&[f32]; 2],
        partials: &mut [f32],
    ) -> Result<(), CacheError> {
        let shape = sum.shape;
        let view = sum.views[head];
        let reach = view.reach(sum.position);
        let mut found = [Found::default(); TASK];
        for (found, range) in found.iter_mut().zip(ranges.clone()) {
            reach.find(range, found);
        }
        let mut after = OfClasses::default();
        reach.see(Side::K, ranges.end, &mut after);
        let n_weights = shape.n_queries * RANGE;
        room(&mut self.weights, n_weights);
        self.weights.resize(n_weights, 0.0);
        let next = found.iter().skip(1).take(ranges.len() - 1);
        let next = next.map(|found| &found.keys).chain([&after]);
        let partials = partials.chunks_exact_mut(shape.size());
        for ((found, next), partial) in found.iter().zip(next).zip(partials) {
            self.partial(view, (found, next), q, shape.split(partial))?;
        }
        Ok(())
    }

    /// The partial results of one range. `next`: the keys that are read after it.
    fn partial(
        &mut self,
        view: HeadView<'_>,
        (found, next): (&Found<'_>, &OfClasses<'_>),
        q: [&[f32]; 2],
        partial: Partial<'_>,
    ) -> Result<(), CacheError> {
        let Partial { used, m, l, sums } = partial;
        let Found { keys, values } = found;
        let all = keys.iter().flatten().fold(0, |m, s| m | s.visible);
        used.fill(0.0);
        if all == 0 {
            return Ok(());
        }
        for (class, seen) in Class::READ.into_iter().zip(keys) {
            if let Some(seen) = seen {
                let seen = seen.before(values[class as usize]);
                self.score(view, class, seen, q, all)?;
            }
        }
        exp_rows(&mut self.weights, (RANGE, all.count_ones() as usize), m, l);
        for (class, seen) in Class::READ.into_iter().zip(values) {
            let Some(seen) = seen else {
                continue;
            };
            let space = usize::from(class != Class::Coded);
            if used[space] == 0.0 {
                used[space] = 1.0;
                sums[space].fill(0.0);
            }
            let seen = seen.before(next[class as usize]);
            self.weigh(view, class, seen, all, &mut *sums[space])?;
        }
        Ok(())
    }

    /// Scores what is seen of one class's keys, into `weights` by rank among `all` rows that are seen.
    pub(super) fn score(
        &mut self,
        view: HeadView<'_>,
        class: Class,
        seen: Seen<'_>,
        q: [&[f32]; 2],
        all: Mask,
    ) -> Result<(), CacheError> {
        let Seen {
            page,
            format,
            visible,
            ..
        } = seen;
        let in_coded_space = class == Class::Coded && view.stages.absorbs_keys();
        let q = q[usize::from(in_coded_space)];
        let decodes = view.decodes_keys(class);
        let scored = if decodes { page.live() } else { page.stored() };
        // Where every row that is scored is seen and no other class has any, scores stand where they are wanted.
        let in_place = scored == visible && visible == all;
        let few = 2 * visible.count_ones() <= scored.count_ones();
        if few && !decodes && !view.turns_keys() && format.codec.page_rows() == 1 {
            return self.score_few(view, seen, q, all);
        }
        if !in_place {
            let n = self.weights.len();
            room(&mut self.scores, n);
            self.scores.resize(n, 0.0);
        }
        let out = MatMut {
            data: if in_place {
                &mut self.weights
            } else {
                &mut self.scores
            },
            stride: RANGE,
        };
        let turning = view.turning(class, page);
        if decodes {
            view.decode_keys(class, (page, format), &mut self.buffers, &mut self.rows)?;
            let turn = turning.map(|t| t.rope.turn(t.first, scored, &mut self.work.angles));
            let d = view.geometry.head_dim;
            Decoded::new(&self.rows, d, &mut self.work.room)
                .turned(turn)
                .scores(q, out);
        } else {
            let range = StoredRange {
                stored: scored,
                bytes: seen.bytes(view.reader, &mut self.buffers)?,
                ahead: seen.ahead,
                turning,
            };
            format.scores(range, q, &mut self.work, out);
        }
        if !in_place {
            for run in Runs::new(scored, visible, all) {
                let rows = self.scores.chunks_exact(RANGE);
                for (to, from) in self.weights.chunks_exact_mut(RANGE).zip(rows) {
                    to[run.to..][..run.n].copy_from_slice(&from[run.from..][..run.n]);
                }
            }
        }
        Ok(())
    }

    /// The same for few rows of a row-wise page: only these are read.
    fn score_few(
        &mut self,
        view: HeadView<'_>,
        seen: Seen<'_>,
        q: &[f32],
        all: Mask,
    ) -> Result<(), CacheError> {
        let Seen { page, format, .. } = seen;
        let bytes = seen.bytes(view.reader, &mut self.buffers)?;
        let n_bytes = format.bytes(1);
        for run in Runs::new(page.stored(), seen.visible, all) {
            let rows = StoredRange {
                stored: Mask::MAX >> (RANGE - run.n),
                bytes: &bytes[run.from * n_bytes..(run.from + run.n) * n_bytes],
                ahead: &[],
                turning: None,
            };
            let out = MatMut {
                data: &mut self.weights[run.to..],
                stride: RANGE,
            };
            format.scores(rows, q, &mut self.work, out);
        }
        Ok(())
    }

    /// Adds what is seen of one class's values, weighed.
    fn weigh(
        &mut self,
        view: HeadView<'_>,
        class: Class,
        seen: Seen<'_>,
        all: Mask,
        sums: &mut [f32],
    ) -> Result<(), CacheError> {
        let Seen {
            page,
            format,
            visible,
            ..
        } = seen;
        let of = |weights, run: &Run| Mat {
            data: &<Vec<f32> as AsRef<[f32]>>::as_ref(weights)[run.to..],
            stride: RANGE,
        };
        if class == Class::Coded && view.restored.is_some() {
            let d = view.geometry.head_dim;
            let positions: Vec<u32> = page.positions().collect();
            room(&mut self.rows, RANGE * d);
            self.rows.resize(positions.len() * d, 0.0);
            view.copy_restored((Side::V, class), &positions, &mut self.rows);
            let decoded = Decoded::new(&self.rows, d, &mut self.work.room);
            for run in Runs::new(page.live(), visible, all) {
                let rows = run.from..run.from + run.n;
                decoded.weighted_sum(rows, of(&self.weights, &run), sums);
            }
            return Ok(());
        }
        let range = StoredRange {
            stored: page.stored(),
            bytes: seen.bytes(view.reader, &mut self.buffers)?,
            ahead: seen.ahead,
            turning: None,
        };
        for run in Runs::new(page.stored(), visible, all) {
            let rows = run.from..run.from + run.n;
            let weights = of(&self.weights, &run);
            format.weighted_sum(range, rows, weights, &mut self.work, sums);
        }
        Ok(())
    }

    /// Merges partial results of ranges.
    fn take_in(&mut self, shape: Shape, parts: &[f32]) {
        let [coded, exact] = &mut self.spaces;
        for part in parts.chunks_exact(shape.size()) {
            coded.used |= part[0] != 0.0;
            exact.used |= part[1] != 0.0;
        }
        let mut totals = Totals {
            m: &mut self.m,
            l: &mut self.l,
            sums: [&mut coded.sum, &mut exact.sum],
        };
        merge(shape, parts, &mut totals);
    }
}

/// A tile of one token, as its queries are prepared.
impl Scratch {
    pub(super) fn start(&mut self, view: HeadView<'_>, position: u32, q: &[f32]) {
        let tile = Tile {
            first: position,
            q,
            out: &mut [],
        };
        self.prepare(view, &tile);
    }
}
