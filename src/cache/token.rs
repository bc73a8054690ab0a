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

use rayon::prelude::*;

use super::attention::Tile;
use super::formats::{Format, Mask};
use super::head_view::HeadView;
use super::places::Page;
use super::runs::{Run, Runs};
use super::scratch::{Pool, Scratch, merge, room};
use super::stage::Side;
use super::stored::{Decoded, StoredRange};
use super::visibility::Class;
use super::{CacheError, RANGE};
use crate::compute::cpu::gemm::{Mat, MatMut};
use crate::compute::cpu::rows;
use crate::compute::cpu::vector::{exp_sum, max};

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
    let mut heads: Vec<Scratch> = views.iter().map(|_| pool.take()).collect();
    for ((scratch, view), q) in heads.iter_mut().zip(views).zip(token.q.chunks_exact(width)) {
        scratch.start(*view, token.position, q);
    }
    let result = sum(views, token.position, &mut heads, pool, partials);
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

fn sum(
    views: &[HeadView<'_>],
    position: u32,
    heads: &mut [Scratch],
    pool: &Pool,
    partials: &mut Vec<f32>,
) -> Result<(), CacheError> {
    let end = position as usize / RANGE + 1;
    let view = &views[0];
    let first = view.first_range(position) as usize;
    let shape = Shape::of(view);
    let size = shape.size();
    for wave in (first..end).step_by(WAVE) {
        let wave = wave..end.min(wave + WAVE);
        let n = views.len() * wave.len() * size;
        room(partials, n);
        partials.resize(n, 0.0);
        let asked = &*heads;
        let run = |(h, ranges, part): Task<'_>| {
            let mut scratch = pool.take();
            let q = asked[h].q.each_ref().map(Vec::as_slice);
            let done = scratch.partials_of(views[h], (position, ranges), q, part);
            pool.give(scratch);
            done
        };
        let mut tasks = tasks(wave.clone(), views.len(), size, partials);
        if !view.turns_keys() {
            // One head after the other: what is asked for ahead is what comes next.
            tasks.sort_by_key(|&(h, ..)| h);
        }
        if views.len() * wave.len() <= FEW || rayon::current_num_threads() == 1 {
            tasks.into_iter().try_for_each(run)?;
        } else {
            tasks.into_par_iter().try_for_each(run)?;
        }
        for (h, _, part) in self::tasks(wave, views.len(), size, partials) {
            for partial in part.chunks_exact_mut(size) {
                heads[h].take_in(shape.split(partial));
            }
        }
    }
    Ok(())
}

/// A head, some ranges, and where their partial results go.
type Task<'a> = (usize, Range<usize>, &'a mut [f32]);

/// All heads of a few ranges, then all of the next: where keys are turned, those of all heads are turned by the same angles.
fn tasks(wave: Range<usize>, n_heads: usize, size: usize, partials: &mut [f32]) -> Vec<Task<'_>> {
    let blocks = partials.chunks_mut(n_heads * TASK * size);
    let tasks = wave.step_by(TASK).zip(blocks).flat_map(|(first, block)| {
        let n = block.len() / n_heads;
        let parts = block.chunks_exact_mut(n).enumerate();
        parts.map(move |(h, part)| (h, first..first + n / size, part))
    });
    tasks.collect()
}

/// Which range is asked for by a query at which position.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub position: u32,
    pub range: usize,
}

/// Sizes of a range's partial results.
#[derive(Clone, Copy)]
struct Shape {
    n_queries: usize,
    /// Channels of coded sums and of exact ones.
    dims: [usize; 2],
}

/// A range's partial results.
struct Partial<'a> {
    /// Which sums are used, as numbers: nothing was seen if both are 0.
    used: &'a mut [f32],
    /// The largest score of each query.
    m: &'a mut [f32],
    /// The sum of each query's weights.
    l: &'a mut [f32],
    /// Coded, exact: `[query][dim]`.
    sums: [&'a mut [f32]; 2],
}

impl Shape {
    fn of(view: &HeadView<'_>) -> Self {
        Self {
            n_queries: view.geometry.group(),
            dims: [view.value_dim(), view.geometry.head_dim],
        }
    }

    fn size(self) -> usize {
        2 + self.n_queries * (2 + self.dims[0] + self.dims[1])
    }

    fn split(self, partial: &mut [f32]) -> Partial<'_> {
        let n = self.n_queries;
        let (used, rest) = partial.split_at_mut(2);
        let (m, rest) = rest.split_at_mut(n);
        let (l, rest) = rest.split_at_mut(n);
        let (coded, exact) = rest.split_at_mut(n * self.dims[0]);
        Partial {
            used,
            m,
            l,
            sums: [coded, exact],
        }
    }
}

/// The rows of one class in one range.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    page: &'a Page,
    format: &'a Format,
    /// Rows that the token sees.
    pub visible: Mask,
}

impl<'a> HeadView<'a> {
    /// The first range that a token at `position` sees.
    pub(super) fn first_range(&self, position: u32) -> u32 {
        let first = self.rules[0]
            .window
            .map_or(0, |w| (position + 1).saturating_sub(w));
        first / RANGE as u32
    }

    /// What a token sees of one class.
    pub(super) fn seen(&self, side: Side, class: Class, place: Place) -> Option<Seen<'a>> {
        let range = place.range as u32;
        let mut visible = self.rules[side as usize].seen(class, place.position, range);
        if visible == 0 {
            return None;
        }
        let page = self.table(side, class)?.page(range)?;
        visible &= page.live() & self.reading.mask(side, class, range);
        if class == Class::Fetched {
            // What left since it was asked for is not read.
            visible &= self.table(side, Class::Coded)?.page(range)?.live();
        }
        let first = range * RANGE as u32;
        if !self.state.dying.is_empty() {
            for (&p, &dies) in self.state.dying.range(first..first + RANGE as u32) {
                if dies <= place.position {
                    visible &= !(1 << (p - first));
                }
            }
        }
        let format = page.format(self.formats.ladder(self.head, side, class));
        (visible != 0).then_some(Seen {
            page,
            format,
            visible,
        })
    }

    /// The bytes of a page, as far as they can be had without work.
    fn ahead(&self, side: Side, class: Class, range: u32) -> &'a [u8] {
        let Some(page) = self.table(side, class).and_then(|t| t.page(range)) else {
            return &[];
        };
        let bytes = self.reader.view(page);
        let format = page.format(self.formats.ladder(self.head, side, class));
        if format.codec.page_rows() > 1 {
            // A page's scales lie behind its rows, and are what is read first.
            rows::ask_for(
                &bytes[bytes
                    .len()
                    .saturating_sub(format.scale_bytes(page.stored()))..],
            );
        }
        bytes
    }
}

impl Scratch {
    /// The partial results of ranges of one head, into `partials`.
    fn partials_of(
        &mut self,
        view: HeadView<'_>,
        (position, ranges): (u32, Range<usize>),
        q: [&[f32]; 2],
        partials: &mut [f32],
    ) -> Result<(), CacheError> {
        let shape = Shape::of(&view);
        for (range, partial) in ranges.zip(partials.chunks_exact_mut(shape.size())) {
            self.partial(view, Place { position, range }, q, shape.split(partial))?;
        }
        Ok(())
    }

    /// The partial results of one range. `q`: the queries in the space of exact rows and in that of coded keys.
    fn partial(
        &mut self,
        view: HeadView<'_>,
        place: Place,
        q: [&[f32]; 2],
        partial: Partial<'_>,
    ) -> Result<(), CacheError> {
        let n_queries = partial.m.len();
        let keys = Class::READ.map(|class| view.seen(Side::K, class, place));
        let all = keys.iter().flatten().fold(0, |m, s| m | s.visible);
        partial.used.fill(0.0);
        if all == 0 {
            return Ok(());
        }
        room(&mut self.weights, n_queries * RANGE);
        self.weights.resize(n_queries * RANGE, 0.0);
        for (class, seen) in Class::READ.into_iter().zip(keys) {
            if let Some(seen) = seen {
                self.score(view, class, seen, q, all)?;
            }
        }
        let n = all.count_ones() as usize;
        for (i, row) in self.weights.chunks_exact_mut(RANGE).enumerate() {
            partial.m[i] = max(&row[..n]);
            partial.l[i] = exp_sum(&mut row[..n], partial.m[i]);
        }
        let Partial { used, sums, .. } = partial;
        for class in Class::READ {
            let Some(seen) = view.seen(Side::V, class, place) else {
                continue;
            };
            let space = usize::from(class != Class::Coded);
            if used[space] == 0.0 {
                used[space] = 1.0;
                sums[space].fill(0.0);
            }
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
                bytes: view.reader.bytes(page, format, &mut self.buffers)?,
                ahead: view.ahead(Side::V, class, page.range),
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
        let bytes = view.reader.bytes(page, format, &mut self.buffers)?;
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
            bytes: view.reader.bytes(page, format, &mut self.buffers)?,
            ahead: view.ahead(Side::K, class, page.range + 1),
            turning: None,
        };
        for run in Runs::new(page.stored(), visible, all) {
            let rows = run.from..run.from + run.n;
            let weights = of(&self.weights, &run);
            format.weighted_sum(range, rows, weights, &mut self.work, sums);
        }
        Ok(())
    }

    /// Merges a range's partial results.
    fn take_in(&mut self, partial: Partial<'_>) {
        let used = [partial.used[0] != 0.0, partial.used[1] != 0.0];
        if used == [false; 2] {
            return;
        }
        for (space, used) in self.spaces.iter_mut().zip(used) {
            space.used |= used;
        }
        let [coded, exact] = &partial.sums;
        for i in 0..partial.m.len() {
            merge(
                &mut self.spaces,
                (&mut self.m[i], &mut self.l[i]),
                i,
                (partial.m[i], partial.l[i]),
                [used[0].then_some(&**coded), used[1].then_some(&**exact)],
            );
        }
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
