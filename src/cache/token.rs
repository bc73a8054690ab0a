//! Attention of one token: its queries meet each range's rows as they are stored, and ranges are shared out to threads.
//!
//! Invariants: the bits are those of a tile of queries ([`super::attention`]): the same chains, partial results per range,
//! merged in order of the ranges. Tasks are fixed runs of ranges of one head, whatever the number of threads; who has done one
//! merges what has become due, so that nobody waits for one thread to merge it all.
//!
//! ```text
//! range      0    1    2    3  |  4    5    6    7  |  8 …
//! head 0     task 0            |  task 1            |           each range: m, l, Σ exp(s − m)·v
//! head 1     task 2            |  task 3            |
//! merge      0 → 1 → 2 → 3 → 4 …   per head, in order
//! ```

use std::ops::Range;
use std::sync::Mutex;

use super::attention::Tile;
use super::formats::Mask;
use super::head_view::HeadView;
use super::runs::{Run, Runs};
use super::scratch::{Lent, Pool, Scratch, room};
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
const WAVE: usize = 64;
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
    let queries = heads.iter_mut().map(|head| std::mem::take(&mut head.q));
    let queries: Vec<Queries> = queries.collect();
    let sum = Sum {
        views,
        queries: &queries,
        position: token.position,
        shape: Shape {
            n_queries: view.geometry.group(),
            dims: [view.value_dim(), view.geometry.head_dim],
        },
        pool,
    };
    let (first, end) = (
        view.first_range(token.position) as usize,
        token.position as usize / RANGE + 1,
    );
    let mut waves = (first..end).step_by(WAVE);
    let result =
        waves.try_for_each(|wave| sum.wave(wave..end.min(wave + WAVE), &mut heads, partials));
    let outputs = token.out.chunks_exact_mut(width);
    for (((mut scratch, view), out), q) in heads.into_iter().zip(views).zip(outputs).zip(queries) {
        scratch.finish(*view, out);
        scratch.q = q;
        pool.give(scratch);
    }
    result
}

/// A head's queries in the space of exact rows and in that of coded keys.
type Queries = [Vec<f32>; 2];

/// What all tasks of a token share.
struct Sum<'a> {
    views: &'a [HeadView<'a>],
    queries: &'a [Queries],
    position: u32,
    shape: Shape,
    pool: &'a Pool,
}

/// What a task makes.
struct Part<'a> {
    partials: &'a mut [f32],
    done: Option<Result<(), CacheError>>,
}

/// A head's totals, and which of its tasks is merged into them next.
struct Merged<'a> {
    totals: &'a mut Scratch,
    next: usize,
}

impl Sum<'_> {
    /// Adds some ranges of all heads.
    fn wave(
        &self,
        wave: Range<usize>,
        heads: &mut [Box<Scratch>],
        partials: &mut Vec<f32>,
    ) -> Result<(), CacheError> {
        let (n_heads, size) = (heads.len(), self.shape.size());
        let of_head = wave.len() * size;
        room(partials, n_heads * of_head);
        partials.resize(n_heads * of_head, 0.0);
        let parts = partials.chunks_exact_mut(of_head).map(|of_head| {
            let parts = of_head.chunks_mut(TASK * size);
            let part = |partials| {
                Mutex::new(Part {
                    partials,
                    done: None,
                })
            };
            parts.map(part).collect()
        });
        let parts: Vec<Vec<Mutex<Part<'_>>>> = parts.collect();
        let merged = |totals| Mutex::new(Merged { totals, next: 0 });
        let heads = heads.iter_mut().map(|head| merged(&mut **head));
        let heads: Vec<Mutex<Merged<'_>>> = heads.collect();
        let n_tasks = wave.len().div_ceil(TASK);
        let task = |own: &mut Lent<'_>, i: usize| {
            // Where keys are turned, those of all heads by the same angles: all heads of a few ranges, then all of the next. Else
            // one head after the other: what is asked for ahead is what comes next.
            let (h, t) = match self.views[0].turns_keys() {
                true => (i % n_heads, i / n_heads),
                false => (i / n_tasks, i % n_tasks),
            };
            let first = wave.start + t * TASK;
            let ranges = first..wave.end.min(first + TASK);
            if let Ok(mut part) = parts[h][t].lock() {
                let done = own.scratch().partials_of(self, (h, ranges), part.partials);
                part.done = Some(done);
            }
            self.merge(&heads[h], &parts[h]);
        };
        if n_heads * wave.len() <= FEW || rayon::current_num_threads() == 1 {
            let mut own = self.pool.lend();
            (0..n_heads * n_tasks).for_each(|i| task(&mut own, i));
        } else {
            team::for_each_init(n_heads * n_tasks, || self.pool.lend(), task);
        }
        for (head, parts) in heads.iter().zip(parts) {
            // What was done while somebody else merged.
            self.merge(head, &parts);
            let parts = parts.into_iter().map(|part| part.into_inner());
            parts
                .flatten()
                .try_for_each(|part| part.done.unwrap_or(Ok(())))?;
        }
        Ok(())
    }

    /// Merges what is due of a head, unless somebody else is at it.
    fn merge(&self, head: &Mutex<Merged<'_>>, parts: &[Mutex<Part<'_>>]) {
        let Ok(mut head) = head.try_lock() else {
            return;
        };
        while let Some(part) = parts.get(head.next)
            && let Ok(part) = part.try_lock()
            && let Some(Ok(())) = part.done
        {
            head.totals.take_in(self.shape, part.partials);
            head.next += 1;
        }
    }
}

impl Scratch {
    /// The partial results of up to [`TASK`] ranges of one head, into `partials`.
    fn partials_of(
        &mut self,
        sum: &Sum<'_>,
        (head, ranges): (usize, Range<usize>),
        partials: &mut [f32],
    ) -> Result<(), CacheError> {
        let shape = sum.shape;
        let q = sum.queries[head].each_ref().map(Vec::as_slice);
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
