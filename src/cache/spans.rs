//! Attention of one span: of one token over stored rows as they are, or of a chunk in tiles of queries; timed where asked for.
//!
//! Invariant: what a query gets does not depend on the tile that it came in.

use std::time::Duration;

use rayon::prelude::*;

use super::CacheError;
use super::attention::Tile;
use super::head_view::HeadView;
use super::pipeline::StagedCache;
use super::places::{Page, PageBytes};
use super::predict::{Carry, Walk};
use super::sparse::{State, Timer, Watch};
use super::stage::Side;
use super::token::{self, Token};
use super::types::{Span, Traffic};

/// Query tokens per attention task.
const TILE: usize = 128;

impl StagedCache {
    /// Starts over counting what decoded tokens read, what is moved for them, and the time that attention takes.
    pub fn watch(&mut self, watch: Watch, timer: Option<Timer>) {
        if let Some(sparse) = &mut self.sparse {
            sparse.watch(watch);
            sparse.time_by(timer.clone());
        }
        self.timer = timer;
        self.attended = Duration::ZERO;
    }

    /// What was counted; `None` where every token reads all that is stored.
    pub fn traffic(&self) -> Option<Traffic> {
        self.sparse.as_ref().map(|s| s.traffic())
    }

    /// Bytes of rows that came back out of a tier and are here now, of the sequence with most.
    pub fn fetched_bytes(&self) -> u64 {
        let bytes = |page: &Page| match page.bytes {
            PageBytes::Raw(id) => self.store.page_bytes(id) as u64,
            _ => 0,
        };
        let of_one = |state: &State| {
            let tables = state.tables().flat_map(|(.., t)| t);
            let pages = tables.flat_map(|table| table.pages());
            pages.map(bytes).sum()
        };
        let states = self.sparse.iter().flat_map(|s| s.states());
        states.map(of_one).max().unwrap_or(0)
    }

    /// Wall time of attention.
    pub fn attended(&self) -> Duration {
        self.attended
    }

    pub(super) fn now(&self) -> Duration {
        self.timer.as_ref().map_or(Duration::ZERO, |now| now())
    }

    /// Attends a span's tokens. `q`, `out`: `[token][head][head_dim]`.
    pub(super) fn attend_span(
        &mut self,
        (layer, span): (usize, &Span),
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), CacheError> {
        if self.chooses(span.seq)
            && let Some(mut sparse) = self.sparse.take()
        {
            let done = self.attend_sparse(&mut sparse, (layer, span), (q, out));
            self.sparse = Some(sparse);
            return done;
        }
        let mut carry = self.take_carry(span.seq);
        if let Some(carry) = &mut carry {
            let walk = Walk {
                stages: &self.stages,
                state: self.sequence(span.seq)?,
                reader: self.reader(),
                pool: &self.pool,
            };
            carry.reach(layer + 1, walk)?;
        }
        let mut partials = std::mem::take(&mut self.partials);
        let done = self.attend_all((layer, span), (q, out), carry.as_ref(), &mut partials);
        self.partials = partials;
        done?;
        self.give_carry(span.seq, carry);
        Ok(())
    }

    fn attend_all(
        &self,
        (layer, span): (usize, &Span),
        (q, out): (&[f32], &mut [f32]),
        carry: Option<&Carry>,
        partials: &mut Vec<f32>,
    ) -> Result<(), CacheError> {
        let g = &self.geometry.layers[layer];
        let state = self.sequence(span.seq)?;
        let (group, d, row) = (g.group(), g.head_dim, g.n_heads * g.head_dim);
        let rules = self.stages.rules(state, (layer, g.window));
        let view = |head: usize| HeadView {
            restored: carry.map(|c| Side::BOTH.map(|side| c.rows(side))),
            ..self.head_view((layer, head), state, rules)
        };
        if span.n_tokens() == 1 {
            let views: Vec<HeadView<'_>> = (0..g.n_kv_heads).map(view).collect();
            let position = span.positions.start;
            return token::attend(&views, Token { position, q, out }, &self.pool, partials);
        }
        let tiles: Vec<(usize, usize)> = (0..g.n_kv_heads)
            .flat_map(|h| (0..span.n_tokens()).step_by(TILE).map(move |t| (h, t)))
            .collect();
        let outputs: Vec<Result<Vec<f32>, CacheError>> = tiles
            .par_iter()
            .map(|&(head, t0)| {
                let n = TILE.min(span.n_tokens() - t0);
                let at = |t: usize| (t0 + t) * row + head * group * d;
                let mut tile_q = Vec::with_capacity(n * group * d);
                for t in 0..n {
                    tile_q.extend_from_slice(&q[at(t)..at(t) + group * d]);
                }
                let mut tile_out = vec![0.0; tile_q.len()];
                let mut scratch = self.pool.take();
                let first = span.positions.start + t0 as u32;
                let done = scratch.attend(
                    view(head),
                    Tile {
                        first,
                        q: &tile_q,
                        out: &mut tile_out,
                    },
                );
                self.pool.give(scratch);
                done.map(|()| tile_out)
            })
            .collect();
        for (&(head, t0), tile_out) in tiles.iter().zip(outputs) {
            for (t, values) in tile_out?.chunks_exact(group * d).enumerate() {
                let at = (t0 + t) * row + head * group * d;
                out[at..at + group * d].copy_from_slice(values);
            }
        }
        Ok(())
    }
}
