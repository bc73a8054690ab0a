//! One token through a cache that chooses what is read: what it reads is chosen and brought before it attends, and a token
//! that is tried out says what the next one will ask for.
//!
//! Invariant: the tokens of a step attend one after the other; only a tried one may follow the sequence's own.

use super::super::formats::{Format, Mask};
use super::super::head_view::HeadView;
use super::super::pipeline::StagedCache;
use super::super::places::Page;
use super::super::stage::Side;
use super::super::token::{self, Token};
use super::super::types::Span;
use super::super::visibility::Class;
use super::super::{CacheError, RANGE};
use super::rank::{self, Ranked};
use super::refetch::When;
use super::{HeadReading, Reading, Sparse, State, Watch};

/// A token of a step, in one layer.
#[derive(Clone, Copy)]
struct Turn<'a> {
    layer: usize,
    span: &'a Span,
    position: u32,
    /// Queries before RoPE, `[head][head_dim]`.
    q: &'a [f32],
}

impl Turn<'_> {
    fn is_tried(&self) -> bool {
        self.position >= self.span.end()
    }
}

impl StagedCache {
    /// Attends the tokens of a decoding sequence's step, one by one. `q`, `out`: `[token][head][head_dim]`.
    pub(in super::super) fn attend_sparse(
        &mut self,
        sparse: &mut Sparse,
        (layer, span): (usize, &Span),
        (q, out): (&[f32], &mut [f32]),
    ) -> Result<(), CacheError> {
        let Some(mut state) = sparse.take(span.seq) else {
            return Err(CacheError::UnknownSequence(span.seq.0));
        };
        let width = q.len() / span.n_tokens();
        let tokens = q.chunks_exact(width).zip(out.chunks_exact_mut(width));
        let mut done = Ok(());
        for ((q, out), position) in tokens.zip(span.positions.clone()) {
            let turn = Turn {
                layer,
                span,
                position,
                q,
            };
            done = done.and_then(|()| self.attend_one(sparse, &mut state, turn, out));
        }
        sparse.put(span.seq, state);
        done
    }

    fn attend_one(
        &mut self,
        sparse: &mut Sparse,
        state: &mut State,
        turn: Turn<'_>,
        out: &mut [f32],
    ) -> Result<(), CacheError> {
        if !turn.is_tried() {
            sparse.traffic.n_steps += u64::from(turn.layer == 0);
            self.choose(sparse, state, turn)?;
        }
        if sparse.watch == Watch::Hits {
            self.count(sparse, state, turn)?;
        }
        let mut partials = std::mem::take(&mut self.partials);
        let token = Token {
            position: turn.position,
            q: turn.q,
            out,
        };
        let done = token::attend(&self.views(state, turn)?, token, &self.pool, &mut partials);
        self.partials = partials;
        done?;
        self.look_ahead(sparse, state, turn)
    }

    /// The KV heads as a token reads them.
    fn views<'a>(
        &'a self,
        state: &'a State,
        turn: Turn<'_>,
    ) -> Result<Vec<HeadView<'a>>, CacheError> {
        let g = &self.geometry.layers[turn.layer];
        let sequence = self.sequence(turn.span.seq)?;
        let rules = self.stages.rules(sequence, (turn.layer, g.window));
        let rules = match turn.is_tried() {
            true => rules.map(|r| r.past_the_end()),
            false => rules,
        };
        let view = |head| HeadView {
            reading: state.head(turn.layer, head),
            ..self.head_view((turn.layer, head), sequence, rules)
        };
        Ok((0..g.n_kv_heads).map(view).collect())
    }

    /// Chooses what a token reads, and waits until it is here.
    fn choose(
        &mut self,
        sparse: &mut Sparse,
        state: &mut State,
        turn: Turn<'_>,
    ) -> Result<(), CacheError> {
        let g = &self.geometry.layers[turn.layer];
        let plan = match (&sparse.reading, &mut *state) {
            (Reading::Blocks(plan), State::Blocks(layers)) => {
                if plan.acts_in(turn.layer) {
                    let first = g
                        .window
                        .map_or(0, |w| (turn.position + 1).saturating_sub(w));
                    let width = g.group() * g.head_dim;
                    for (head, q) in layers[turn.layer]
                        .iter_mut()
                        .zip(turn.q.chunks_exact(width))
                    {
                        let mut q = q.to_vec();
                        for q in q.chunks_exact_mut(g.head_dim) {
                            g.rope.rotate(turn.position, q);
                        }
                        head.choose(*plan, (first, turn.position), &q, g.head_dim);
                    }
                }
                return Ok(());
            }
            (Reading::Refetch(plan), _) => plan.clone(),
            _ => return Ok(()),
        };
        if plan.when == When::Demand {
            let ranked = self.rank(sparse, state, turn, plan.n_rows)?;
            self.note_hits(sparse, state, turn, &ranked);
            self.ask(sparse, state, turn, ranked);
        }
        let record_bytes = self.record_bytes(turn.layer);
        let (State::Refetch { layers, .. }, Some(vault)) = (&mut *state, &sparse.vault) else {
            return Ok(());
        };
        let layer = &mut layers[turn.layer];
        if plan.when == When::All {
            let heads = &self.sequence(turn.span.seq)?.layers[turn.layer].heads;
            let first = g
                .window
                .map_or(0, |w| (turn.position + 1).saturating_sub(w));
            let live = |h: usize, p: u32| {
                let tables = heads[h].tables.iter().map(|t| &t[Class::Coded as usize]);
                let mut pages = tables.filter_map(|t| t.page(p / RANGE as u32));
                p >= first && pages.any(|page| page.live() >> (p % RANGE as u32) & 1 == 1)
            };
            layer.ask_for_all(vault, live, record_bytes, &mut sparse.traffic);
        }
        let start = sparse.timer.as_ref().map(|now| now());
        layer.wait(record_bytes)?;
        if let (Some(now), Some(start)) = (&sparse.timer, start) {
            sparse.traffic.stall_ns += now().saturating_sub(start).as_nanos() as u64;
        }
        let stages = std::sync::Arc::clone(&self.stages);
        layer.bring(&mut self.places(), &stages.formats[turn.layer])?;
        if plan.when == When::Speculative && sparse.watch == Watch::Hits {
            // What is held against what was here, and is no part of the method.
            let ranked = self.ranked(state, turn, plan.n_rows)?;
            self.note_hits(sparse, state, turn, &ranked.rows);
        }
        Ok(())
    }

    /// Asks for what a tried token attends to most; lets go of what came back for one token alone.
    fn look_ahead(
        &mut self,
        sparse: &mut Sparse,
        state: &mut State,
        turn: Turn<'_>,
    ) -> Result<(), CacheError> {
        let Reading::Refetch(plan) = &sparse.reading else {
            return Ok(());
        };
        match plan.when {
            When::Speculative if turn.is_tried() => {
                let n_rows = plan.n_rows;
                let ranked = self.rank(sparse, state, turn, n_rows)?;
                self.ask(sparse, state, turn, ranked);
            }
            When::All => {
                if let State::Refetch { layers, .. } = state {
                    let layer = &mut layers[turn.layer];
                    let n_bytes = layer.n_fetched() * self.record_bytes(turn.layer) as u64;
                    sparse.peak_bytes = sparse.peak_bytes.max(n_bytes);
                    layer.clear(&mut self.places());
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Ranks rows, and counts what that takes.
    fn rank(
        &self,
        sparse: &mut Sparse,
        state: &State,
        turn: Turn<'_>,
        n_rows: usize,
    ) -> Result<Vec<Vec<u32>>, CacheError> {
        let ranked = self.ranked(state, turn, n_rows)?;
        sparse.rank_bytes = sparse.rank_bytes.max(ranked.work_bytes);
        if sparse.watch == Watch::Hits {
            for (head, view) in self.views(state, turn)?.into_iter().enumerate() {
                sparse.traffic.ranking_bytes += read_bytes(&view, head, Side::K);
            }
        }
        Ok(ranked.rows)
    }

    fn ranked(&self, state: &State, turn: Turn<'_>, n_rows: usize) -> Result<Ranked, CacheError> {
        let views = self.views(state, turn)?;
        rank::most_attended(&views, turn.position, turn.q, n_rows, &self.pool)
    }

    fn ask(&self, sparse: &mut Sparse, state: &mut State, turn: Turn<'_>, ranked: Vec<Vec<u32>>) {
        if let (State::Refetch { layers, .. }, Some(vault)) = (state, &sparse.vault) {
            let record_bytes = self.record_bytes(turn.layer);
            layers[turn.layer].ask(vault, ranked, record_bytes, &mut sparse.traffic);
        }
    }

    fn note_hits(&self, sparse: &mut Sparse, state: &State, turn: Turn<'_>, ranked: &[Vec<u32>]) {
        if let State::Refetch { layers, .. } = state {
            let (wanted, hit) = layers[turn.layer].hits(ranked);
            sparse.traffic.rows_wanted += wanted;
            sparse.traffic.rows_hit += hit;
        }
    }

    /// Bytes of an exact row's K and V in a layer.
    pub(in super::super) fn record_bytes(&self, layer: usize) -> usize {
        let formats = &self.stages.formats[layer];
        let side = |side| formats.format(0, side, Class::Fetched).bytes(1);
        side(Side::K) + side(Side::V)
    }

    /// Adds up what a token reads; of one that is no trial also what it could.
    fn count(&self, sparse: &mut Sparse, state: &State, turn: Turn<'_>) -> Result<(), CacheError> {
        let (mut read, mut readable) = (0, 0);
        for (head, view) in self.views(state, turn)?.into_iter().enumerate() {
            if let State::Blocks(layers) = state {
                read += layers[turn.layer][head].read_bytes();
            }
            for side in Side::BOTH {
                read += read_bytes(&view, head, side);
                readable += stored_bytes(&view, head, side, |_, page| page.live());
            }
        }
        let traffic = &mut sparse.traffic;
        match turn.is_tried() {
            true => traffic.tried_bytes += read,
            false => {
                traffic.read_bytes += read;
                traffic.readable_bytes += readable;
            }
        }
        Ok(())
    }
}

/// Bytes of one side of a head that its token reads, rows that came back included.
fn read_bytes(view: &HeadView<'_>, head: usize, side: Side) -> u64 {
    let chosen = |class, page: &Page| view.reading.mask(side, class, page.range) & page.live();
    let mut sum = stored_bytes(view, head, side, chosen);
    if let HeadReading::Fetched(tables) = view.reading {
        let format = view.formats.format(head, side, Class::Fetched);
        let fetched = tables[side as usize].pages().iter();
        let n_bytes = fetched.map(|page| format.bytes(page.stored()) as u64);
        sum += n_bytes.sum::<u64>();
    }
    sum
}

/// Bytes of what lies together with some rows of each page of one side of a head.
fn stored_bytes(
    view: &HeadView<'_>,
    head: usize,
    side: Side,
    rows: impl Fn(Class, &Page) -> Mask,
) -> u64 {
    let tables = Class::ALL
        .into_iter()
        .zip(&view.state.tables[side as usize]);
    let pages = tables.flat_map(|(class, table)| table.pages().iter().map(move |p| (class, p)));
    let n_bytes = pages.map(|(class, page)| {
        let format = page.format(view.formats.ladder(head, side, class));
        touched(format, page.stored(), rows(class, page))
    });
    n_bytes.sum()
}

/// Bytes of what lies together with the rows that are read.
fn touched(format: &Format, stored: Mask, read: Mask) -> u64 {
    let together = match format.codec.page_rows() {
        1 => return format.bytes(read) as u64,
        _ => format.codec.together(stored),
    };
    let units = together.filter(|unit| unit & read != 0);
    let n_bytes = units.map(|unit| format.codec.bytes(unit.count_ones() as usize, format.dim));
    n_bytes.sum::<usize>() as u64
}
