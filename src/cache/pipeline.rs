//! [`StagedCache`]: the one cache, made of a strategy's stages.
//!
//! Invariants: row-wise work (rotation, projection, encoding of rows that reach the tail's end) happens in `append`,
//! before `attend`; everything that removes rows happens in `commit`; decisions of retention are taken once per
//! position, in order, so that a chunk equals decoding.

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::prelude::*;

use super::append::{Appender, check_span};
use super::attention::Tile;
use super::commit::{commit_layer, truncate};
use super::head_view::HeadView;
use super::pages::{HostStore, PageStore, Tier};
use super::places::{Places, Reader};
use super::point::{self, Point};
use super::predict::{Carries, Carry, Walk};
use super::retention::SeenLayer;
use super::scratch::Pool;
use super::sequence::{HeadState, Phase, SequenceState};
use super::stage::Side;
use super::stages::{Materials, Stages};
use super::strategy::Strategy;
use super::token::{self, Token};
use super::types::{Admission, Batch, Continuation, Geometry, MemoryReport, Rows, SeqId, Span};
use super::visibility::FOREVER;
use super::{CacheError, KvCache, Needs};

/// Query tokens per attention task.
const TILE: usize = 128;

/// The cache of one strategy for one model.
pub struct StagedCache {
    pub(super) geometry: Geometry,
    pub(super) stages: Arc<Stages>,
    pub(super) store: Box<dyn PageStore>,
    pub(super) tier: Option<Tier>,
    pub(super) sequences: BTreeMap<SeqId, SequenceState>,
    carries: Carries,
    pool: Arc<Pool>,
    /// Partial results of one token's attention.
    partials: Vec<f32>,
}

impl StagedCache {
    /// Builds a strategy's cache in host memory.
    pub fn new(strategy: &Strategy, materials: Materials<'_>) -> Result<Self, CacheError> {
        Self::with_store(strategy, materials, Box::new(HostStore::default()))
    }

    /// Builds a strategy's cache over another memory.
    pub fn with_store(
        strategy: &Strategy,
        materials: Materials<'_>,
        store: Box<dyn PageStore>,
    ) -> Result<Self, CacheError> {
        let stages = Arc::new(Stages::build(strategy, materials)?);
        Self::from_stages(stages, materials.geometry, store)
    }

    /// A cache over stages that others may share. `geometry` is the one they were built for.
    pub fn from_stages(
        stages: Arc<Stages>,
        geometry: &Geometry,
        store: Box<dyn PageStore>,
    ) -> Result<Self, CacheError> {
        let tier = match &stages.place {
            Some(place) => Some(Tier::new(place.open()?)),
            None => None,
        };
        Ok(Self {
            geometry: geometry.clone(),
            stages,
            store,
            tier,
            sequences: BTreeMap::new(),
            carries: Carries::default(),
            pool: Arc::default(),
            partials: Vec::new(),
        })
    }

    pub(super) fn sequence(&self, seq: SeqId) -> Result<&SequenceState, CacheError> {
        self.sequences
            .get(&seq)
            .ok_or(CacheError::UnknownSequence(seq.0))
    }

    /// Runs `work` on a sequence that is taken out meanwhile, with access to the pages.
    pub(super) fn with_sequence<T>(
        &mut self,
        seq: SeqId,
        work: impl FnOnce(
            &Stages,
            &Geometry,
            &mut SequenceState,
            &mut Places<'_>,
        ) -> Result<T, CacheError>,
    ) -> Result<T, CacheError> {
        let state = self
            .sequences
            .get_mut(&seq)
            .ok_or(CacheError::UnknownSequence(seq.0))?;
        let mut places = Places {
            store: self.store.as_mut(),
            tier: &mut self.tier,
            packer: self.stages.pack.as_deref(),
        };
        work(&self.stages, &self.geometry, state, &mut places)
    }

    fn attend_span(
        &self,
        layer: usize,
        span: &Span,
        (q, out): (&[f32], &mut [f32]),
        carry: Option<&Carry>,
        partials: &mut Vec<f32>,
    ) -> Result<(), CacheError> {
        let g = &self.geometry.layers[layer];
        let state = self.sequence(span.seq)?;
        let (group, d, row) = (g.group(), g.head_dim, g.n_heads * g.head_dim);
        let rules = self.stages.rules(state, (layer, g.window));
        let view = |head: usize| HeadView {
            state: &state.layers[layer].heads[head],
            formats: &self.stages.formats[layer],
            rules,
            layer,
            head,
            geometry: g,
            stages: &self.stages,
            reader: self.reader(),
            restored: carry.map(|c| Side::BOTH.map(|side| c.rows(side))),
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

    pub(super) fn reader(&self) -> Reader<'_> {
        Reader {
            store: self.store.as_ref(),
            tier: self.tier.as_ref(),
            packer: self.stages.pack.as_deref(),
        }
    }

    /// The reconstruction that a sequence's step carries, if the strategy predicts.
    fn take_carry(&mut self, seq: SeqId) -> Option<Carry> {
        let predicts = self.stages.predictor.is_some();
        predicts.then(|| self.carries.take(seq))
    }

    fn give_carry(&mut self, seq: SeqId, carry: Option<Carry>) {
        if let Some(carry) = carry {
            self.carries.put(seq, carry);
        }
    }

    fn shape(what: &'static str, got: usize, expected: usize) -> Result<(), CacheError> {
        if got == expected {
            Ok(())
        } else {
            Err(CacheError::Shape {
                what,
                got,
                expected,
            })
        }
    }
}

impl KvCache for StagedCache {
    fn needs(&self) -> Needs {
        self.stages.needs()
    }

    fn step_limit(&self, seq: SeqId, asked: usize) -> usize {
        let asked = self.needs().max_chunk.unwrap_or(asked).min(asked).max(1);
        self.budget_limit(seq, asked)
    }

    fn admit(&mut self, seq: SeqId, admission: Admission) -> Result<(), CacheError> {
        if self.sequences.contains_key(&seq) {
            return Err(CacheError::SequenceExists(seq.0));
        }
        let phase = match admission {
            Admission::Streaming => Phase::Decoding,
            Admission::Context => Phase::Context,
        };
        let heads = self.geometry.layers.iter().map(|l| l.n_kv_heads);
        let mut state = SequenceState::new(phase, heads);
        if phase == Phase::Context && self.stages.retain.is_some() {
            // Pages are coded over the rows that the compression point leaves.
            state.pages_from = FOREVER;
        }
        self.sequences.insert(seq, state);
        Ok(())
    }

    fn append(&mut self, layer: usize, batch: &Batch, rows: Rows<'_>) -> Result<(), CacheError> {
        let g = &self.geometry.layers[layer];
        let width = g.n_kv_heads * g.head_dim;
        Self::shape("K rows", rows.k.len(), batch.n_rows() * width)?;
        Self::shape("V rows", rows.v.len(), batch.n_rows() * width)?;
        if layer == 0 {
            self.check_budget(batch)?;
        }
        for span in batch.spans() {
            let at = span.first_row * width..(span.first_row + span.n_tokens()) * width;
            let n_hidden = rows.hidden.len() / batch.n_rows().max(1);
            let own = Rows {
                k: &rows.k[at.clone()],
                v: &rows.v[at],
                hidden: &rows.hidden[span.first_row * n_hidden..][..span.n_tokens() * n_hidden],
                residual_norms: &[],
            };
            let mut carry = self.take_carry(span.seq);
            let pool = Arc::clone(&self.pool);
            self.with_sequence(span.seq, |stages, geometry, state, places| {
                check_span(&geometry.layers[layer], state, layer, span)?;
                let geometry = &geometry.layers[layer];
                let appender = Appender {
                    stages,
                    geometry,
                    layer,
                    rules: stages.rules(state, (layer, geometry.window)),
                    levels: &[],
                    pool: &pool,
                };
                state.broken = true;
                appender.append(state, places, span, own, carry.as_mut())?;
                state.broken = false;
                Ok(())
            })?;
            self.give_carry(span.seq, carry);
        }
        Ok(())
    }

    fn attend(
        &mut self,
        layer: usize,
        batch: &Batch,
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), CacheError> {
        let g = &self.geometry.layers[layer];
        let width = g.n_heads * g.head_dim;
        Self::shape("queries", q.len(), batch.n_rows() * width)?;
        Self::shape("attention output", out.len(), batch.n_rows() * width)?;
        for span in batch.spans() {
            let at = span.first_row * width..(span.first_row + span.n_tokens()) * width;
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
            let rows = (&q[at.clone()], &mut out[at]);
            let mut partials = std::mem::take(&mut self.partials);
            let done = self.attend_span(layer, span, rows, carry.as_ref(), &mut partials);
            self.partials = partials;
            done?;
            self.give_carry(span.seq, carry);
        }
        Ok(())
    }

    fn commit(&mut self, batch: &Batch) -> Result<(), CacheError> {
        for span in batch.spans() {
            self.carries.end(span.seq);
            let window = self
                .geometry
                .layers
                .iter()
                .map(|l| l.window)
                .collect::<Vec<_>>();
            self.with_sequence(span.seq, |stages, _, state, places| {
                state.len = span.positions.end;
                for (layer, window) in window.iter().enumerate() {
                    commit_layer(stages, state, places, (layer, *window))?;
                }
                Ok(())
            })?;
        }
        self.make_room(batch)
    }

    fn show(&mut self, seq: SeqId, seen: &[SeenLayer<'_>]) -> Result<(), CacheError> {
        self.with_sequence(seq, |stages, geometry, state, _| {
            if stages.needs().context.any() {
                point::show(stages, geometry, state, seen);
            }
            Ok(())
        })
    }

    fn compress(&mut self, seq: SeqId, continuation: Continuation) -> Result<(), CacheError> {
        let pool = Arc::clone(&self.pool);
        self.with_sequence(seq, |stages, geometry, state, places| {
            let point = Point {
                stages,
                geometry,
                pool: &pool,
            };
            point.compress((seq, state), places, continuation)
        })
    }

    fn fork(&mut self, from: SeqId, to: SeqId) -> Result<(), CacheError> {
        if self.sequences.contains_key(&to) {
            return Err(CacheError::SequenceExists(to.0));
        }
        let copy = self.with_sequence(from, |_, _, state, places| Ok(state.fork(places)))?;
        self.sequences.insert(to, copy);
        Ok(())
    }

    fn truncate(&mut self, seq: SeqId, len: u32) -> Result<(), CacheError> {
        self.carries.end(seq);
        self.with_sequence(seq, |stages, _, state, places| {
            truncate(stages, state, places, (seq, len))
        })
    }

    fn release(&mut self, seq: SeqId) -> Result<(), CacheError> {
        self.carries.end(seq);
        self.with_sequence(seq, |_, _, state, places| {
            for head in state.heads_mut() {
                for table in head.tables.iter_mut().flatten() {
                    table.clear(places);
                }
            }
            Ok(())
        })?;
        self.sequences.remove(&seq);
        Ok(())
    }

    fn len(&self, seq: SeqId) -> Result<u32, CacheError> {
        Ok(self.sequence(seq)?.len)
    }

    fn memory(&self) -> MemoryReport {
        let scratch_bytes = self.pool.bytes_of_one() + self.carries.bytes();
        let scratch_bytes = scratch_bytes + (self.partials.capacity() * size_of::<f32>()) as u64;
        super::memory::report(self, scratch_bytes)
    }
}

/// Keeps the compiler honest about sharing heads between threads.
const _: fn() = || {
    fn is_sync<T: Sync>() {}
    is_sync::<HeadState>();
};
