//! softmax(scale · q·Kᵀ + mask)·V of one KV head over stored rows, for a tile of queries.
//!
//! Invariants: softmax partials (m, l, acc) are formed per range of 128 positions and merged in order of the ranges;
//! inside a range rows are summed in order of position, coded values apart from exact ones; rows that a query may not
//! see are skipped, never multiplied by zero. What a query gets therefore depends on what it may see alone: not on the
//! tile, the chunk, paging, holes or threads. K and V of a row may stand in different classes.

use super::head_view::HeadView;
use super::places::{Page, bits};
use super::scratch::{Scratch, Source, merge};
use super::stage::Side;
use super::stored::{Decoded, StoredRange};
use super::visibility::Class;
use super::{CacheError, RANGE};
use crate::compute::cpu::gemm::{Dims, Mat, MatMut, gemm};
use crate::compute::cpu::vector::{axpy_rows, exp_sum, max};

/// A tile of queries of one KV head: consecutive positions, `group` query heads each.
pub struct Tile<'a> {
    /// Position of the first query.
    pub first: u32,
    /// Queries before RoPE, `[token][group][head_dim]`.
    pub q: &'a [f32],
    /// Outputs, the same shape.
    pub out: &'a mut [f32],
}

impl Scratch {
    /// Attends a tile of queries to everything that they may see.
    pub fn attend(&mut self, view: HeadView<'_>, tile: Tile<'_>) -> Result<(), CacheError> {
        let d = view.geometry.head_dim;
        let group = view.geometry.group();
        let n_queries = tile.q.len() / d;
        let last = tile.first + (n_queries / group) as u32 - 1;
        self.prepare(view, &tile);
        let first_range = view.rules[0]
            .window
            .map_or(0, |w| (tile.first + 1).saturating_sub(w))
            / RANGE as u32;
        for range in first_range..=last / RANGE as u32 {
            for class in Class::ALL {
                self.load_keys(view, class, range, (tile.first, last))?;
                self.load_values(view, class, range, (tile.first, last))?;
            }
            let [keys, values] = &self.sources;
            match (only(keys), only(values)) {
                (None, _) => {}
                (Some(Alone::Uniform(k)), Some(Alone::Uniform(v))) => {
                    self.sum_uniform((k, v), n_queries);
                }
                _ => {
                    for i in 0..n_queries {
                        self.sum_selected(i, tile.first + (i / group) as u32);
                    }
                }
            }
        }
        self.finish(view, tile.out);
        Ok(())
    }

    /// Rotates and absorbs the queries, clears the accumulators.
    pub(super) fn prepare(&mut self, view: HeadView<'_>, tile: &Tile<'_>) {
        let (g, stages) = (view.geometry, view.stages);
        let d = g.head_dim;
        let n = tile.q.len() / d;
        self.make_room(view, n);
        let [q_exact, q_coded] = &mut self.q;
        q_exact.clear();
        q_exact.extend_from_slice(tile.q);
        for (i, q) in q_exact.chunks_exact_mut(d).enumerate() {
            g.rope.rotate(tile.first + (i / g.group()) as u32, q);
            for x in q {
                *x *= g.scale;
            }
        }
        q_coded.clear();
        if stages.absorbs_keys() {
            for q in q_exact.chunks_exact(d) {
                q_coded.extend(stages.project_k.absorb(view.layer, view.head, q));
            }
        }
        for (space, dim) in self.spaces.iter_mut().zip([view.value_dim(), d]) {
            space.dim = dim;
            space.used = false;
            space.sum.clear();
            space.sum.resize(n * dim, 0.0);
        }
        for (partial, space) in self.partials.iter_mut().zip(&self.spaces) {
            partial.resize(n * space.dim, 0.0);
        }
        self.m.clear();
        self.m.resize(n, f32::NEG_INFINITY);
        self.l.clear();
        self.l.resize(n, 0.0);
    }

    /// Decodes and scores the keys of one class in one range, unless no query of the tile sees any.
    fn load_keys(
        &mut self,
        view: HeadView<'_>,
        class: Class,
        range: u32,
        tile: (u32, u32),
    ) -> Result<(), CacheError> {
        let source = &mut self.sources[Side::K as usize][class as usize];
        let Some(page) = view.see(source, (Side::K, class), range, tile) else {
            return Ok(());
        };
        let format = page.format(view.formats.ladder(view.head, Side::K, class));
        let n = source.positions.len();
        let d = view.geometry.head_dim;
        let in_coded_space = class == Class::Coded && view.stages.absorbs_keys();
        let dim = if in_coded_space { format.dim } else { d };
        source.make_room(RANGE * dim, self.m.len());
        source.data.resize(dim * RANGE, 0.0);
        let columns = MatMut {
            data: &mut source.data,
            stride: RANGE,
        };
        let turning = view.turning(class, page);
        if view.decodes_keys(class) || page.live() != page.stored() {
            view.decode_keys(class, (page, format), &mut self.buffers, &mut self.rows)?;
            let turn = turning.map(|t| t.rope.turn(t.first, page.live(), &mut self.work.angles));
            Decoded::new(&self.rows, dim, &mut self.work.room)
                .turned(turn)
                .columns(columns);
        } else {
            let range = StoredRange {
                stored: page.stored(),
                bytes: view.reader.bytes(page, format, &mut self.buffers)?,
                ahead: &[],
                turning,
            };
            format.columns(range, &mut self.work, columns);
        }
        let q = &self.q[usize::from(in_coded_space)];
        let m = q.len() / dim;
        source.scores.resize(m * RANGE, 0.0);
        gemm(
            Dims { m, n, k: dim },
            Mat {
                data: q,
                stride: dim,
            },
            Mat {
                data: &source.data,
                stride: RANGE,
            },
            MatMut {
                data: &mut source.scores,
                stride: RANGE,
            },
        );
        Ok(())
    }

    /// Decodes the values of one class in one range, unless no query of the tile sees any.
    fn load_values(
        &mut self,
        view: HeadView<'_>,
        class: Class,
        range: u32,
        tile: (u32, u32),
    ) -> Result<(), CacheError> {
        let source = &mut self.sources[Side::V as usize][class as usize];
        let Some(page) = view.see(source, (Side::V, class), range, tile) else {
            return Ok(());
        };
        let format = page.format(view.formats.ladder(view.head, Side::V, class));
        let dim = match (class, view.restored) {
            (Class::Coded, Some(_)) => view.geometry.head_dim,
            _ => format.dim,
        };
        source.make_room(RANGE * dim, 0);
        let n_stored = page.stored().count_ones() as usize;
        source.data.resize(n_stored * dim, 0.0);
        if view.copy_restored((Side::V, class), &source.positions, &mut source.data) {
            return Ok(());
        }
        view.reader
            .decode(page, format, &mut self.buffers, &mut source.data)
    }

    /// Every query sees every row, all keys of one class and all values of one class: one matrix product.
    fn sum_uniform(&mut self, (k, v): (usize, usize), n_queries: usize) {
        let [keys, values] = &mut self.sources;
        let (keys, values) = (&mut keys[k], &values[v]);
        let n = keys.positions.len();
        let which = usize::from(v != Class::Coded as usize);
        let space = &mut self.spaces[which];
        space.used = true;
        self.weights.resize(2 * n_queries, 0.0);
        let rows = keys.scores.chunks_exact_mut(RANGE).take(n_queries);
        for (i, row) in rows.enumerate() {
            let m = max(&row[..n]);
            self.weights[2 * i] = m;
            self.weights[2 * i + 1] = exp_sum(&mut row[..n], m);
        }
        gemm(
            Dims {
                m: n_queries,
                n: space.dim,
                k: n,
            },
            Mat {
                data: &keys.scores,
                stride: RANGE,
            },
            Mat {
                data: &values.data,
                stride: space.dim,
            },
            MatMut {
                data: &mut self.partials[which],
                stride: space.dim,
            },
        );
        let partials = &self.partials;
        for i in 0..n_queries {
            let (m, l) = (self.weights[2 * i], self.weights[2 * i + 1]);
            merge(
                &mut self.spaces,
                (&mut self.m[i], &mut self.l[i]),
                i,
                (m, l),
                [
                    (v == 0).then_some(&*partials[0]),
                    (v != 0).then_some(&*partials[1]),
                ],
            );
        }
    }

    /// One query sees some of the loaded rows: it selects them.
    fn sum_selected(&mut self, i: usize, position: u32) {
        let [keys, values] = &self.sources;
        let mut slots = [0.0; RANGE];
        let mut seen: u128 = 0;
        for s in keys.iter().filter(|s| !s.positions.is_empty()) {
            let scores = &s.scores[i * RANGE..];
            for ((&p, &x), _) in s
                .positions
                .iter()
                .zip(scores)
                .zip(&s.intervals)
                .filter(|(_, v)| sees(v, position))
            {
                let slot = p as usize % RANGE;
                slots[slot] = x;
                seen |= 1 << slot;
            }
        }
        if seen == 0 {
            return;
        }
        self.weights.clear();
        self.weights.extend(bits(seen).map(|slot| slots[slot]));
        let m = max(&self.weights);
        let l = exp_sum(&mut self.weights, m);
        for (slot, &w) in bits(seen).zip(&self.weights) {
            slots[slot] = w;
        }
        let mut used = [false; 2];
        for (class, s) in values
            .iter()
            .enumerate()
            .filter(|(_, s)| !s.positions.is_empty())
        {
            let which = usize::from(class != Class::Coded as usize);
            let space = &mut self.spaces[which];
            let acc = &mut self.partials[which][i * space.dim..(i + 1) * space.dim];
            let mut row = 0;
            while row < s.intervals.len() {
                let run = s.intervals[row..]
                    .iter()
                    .take_while(|v| sees(v, position))
                    .count();
                if run == 0 {
                    row += 1;
                    continue;
                }
                if !used[which] {
                    acc.fill(0.0);
                    used[which] = true;
                    space.used = true;
                }
                self.weights.clear();
                let slots_of_run = s.positions[row..row + run]
                    .iter()
                    .map(|&p| p as usize % RANGE);
                self.weights.extend(slots_of_run.map(|slot| slots[slot]));
                axpy_rows(
                    &self.weights,
                    &s.data[row * space.dim..(row + run) * space.dim],
                    acc,
                );
                row += run;
            }
        }
        let partials = &self.partials;
        merge(
            &mut self.spaces,
            (&mut self.m[i], &mut self.l[i]),
            i,
            (m, l),
            [
                used[0].then_some(&*partials[0]),
                used[1].then_some(&*partials[1]),
            ],
        );
    }

    /// Divides by the sum of weights and brings coded values back to the head's channels.
    pub(super) fn finish(&mut self, view: HeadView<'_>, out: &mut [f32]) {
        let d = view.geometry.head_dim;
        let [coded, exact] = &self.spaces;
        for (i, out) in out.chunks_exact_mut(d).enumerate() {
            let l = self.l[i];
            out.fill(0.0);
            if exact.used {
                for (o, &x) in out.iter_mut().zip(&exact.sum[i * d..]) {
                    *o = x / l;
                }
            }
            if !coded.used {
                continue;
            }
            let z = &coded.sum[i * coded.dim..(i + 1) * coded.dim];
            if view.stages.sums_coded_values() {
                let z: Vec<f32> = z.iter().map(|x| x / l).collect();
                let x = view.stages.project_v.expand(view.layer, view.head, &z, d);
                for (o, x) in out.iter_mut().zip(x) {
                    *o += x;
                }
            } else {
                for (o, x) in out.iter_mut().zip(z) {
                    *o += x / l;
                }
            }
        }
    }
}

impl<'a> HeadView<'a> {
    /// Notes who sees which rows of a page; `None`, and no rows, if no query from `first` to `last` sees any.
    fn see(
        &self,
        source: &mut Source,
        (side, class): (Side, Class),
        range: u32,
        (first, last): (u32, u32),
    ) -> Option<&'a Page> {
        source.positions.clear();
        source.intervals.clear();
        source.uniform = true;
        let page = self.state.tables[side as usize][class as usize].page(range)?;
        let mut any = false;
        for p in page.positions() {
            let (from, mut until) = self.rules[side as usize].interval(class, p);
            if let Some(&dies) = self.state.dying.get(&p) {
                until = until.min(dies);
            }
            source.uniform &= from <= first && until > last;
            any |= from <= last && until > first && from < until;
            source.positions.push(p);
            source.intervals.push((from, until));
        }
        if any {
            return Some(page);
        }
        source.positions.clear();
        None
    }
}

/// The one source with rows.
enum Alone {
    /// Every query sees all of them.
    Uniform(usize),
    /// Some queries don't, or there are several sources.
    Mixed,
}

fn only(sources: &[Source; 3]) -> Option<Alone> {
    let mut with_rows = (0..3).filter(|&c| !sources[c].positions.is_empty());
    let first = with_rows.next()?;
    Some(match with_rows.next() {
        None if sources[first].uniform => Alone::Uniform(first),
        _ => Alone::Mixed,
    })
}

fn sees(&(from, until): &(u32, u32), position: u32) -> bool {
    from <= position && position < until
}
