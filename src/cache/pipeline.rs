//! [`StagedCache`]: the one cache, made of a strategy's stages.
//!
//! Invariants: row-wise work (rotation, projection, encoding of rows that reach the tail's end) happens in `append`,
//! before `attend`; everything that removes rows happens in `commit`; decisions of retention are taken once per
//! position, in order, so that a chunk equals decoding.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::append::{Appender, check_span};
use super::commit::{self, commit_layer, drop_tried, truncate};
use super::head_view::HeadView;
use super::pages::{HostStore, PageStore, Tier};
use super::places::{Places, Reader};
use super::point::{self, Point};
use super::predict::{Carries, Carry};
use super::retention::SeenLayer;
use super::scratch::Pool;
use super::sequence::{HeadState, Phase, SequenceState};
use super::sparse::{HeadReading, Sparse, Timer};
use super::stages::{Materials, Stages};
use super::strategy::Strategy;
use super::types::{
    Admission, Batch, Continuation, Geometry, MemoryReport, Rebuilt, Rows, SeqId, Trial,
};
use super::visibility::{FOREVER, Rules};
use super::{CacheError, KvCache, Needs};

/// The cache of one strategy for one model.
pub struct StagedCache {
    pub(super) geometry: Geometry,
    pub(super) stages: Arc<Stages>,
    pub(super) store: Box<dyn PageStore>,
    pub(super) tier: Option<Tier>,
    pub(super) sequences: BTreeMap<SeqId, SequenceState>,
    /// What was coded anew of those sequences of which anything was.
    pub(super) rebuilt: BTreeMap<SeqId, Rebuilt>,
    /// What chooses what is read, if the strategy does.
    pub(super) sparse: Option<Box<Sparse>>,
    carries: Carries,
    pub(super) pool: Arc<Pool>,
    /// Partial results of one token's attention.
    pub(super) partials: Vec<f32>,
    /// What times attention, if anything does.
    pub(super) timer: Option<Timer>,
    pub(super) attended: Duration,
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
        let sparse = stages.reading.as_ref().map(Sparse::open).transpose()?;
        Ok(Self {
            sparse: sparse.map(Box::new),
            geometry: geometry.clone(),
            stages,
            store,
            tier,
            sequences: BTreeMap::new(),
            rebuilt: BTreeMap::new(),
            carries: Carries::default(),
            pool: Arc::default(),
            partials: Vec::new(),
            timer: None,
            attended: Duration::ZERO,
        })
    }

    /// Channels of the layers' inputs that retention was learned from, if it was.
    pub fn hidden_width(&self) -> Option<usize> {
        self.stages.retain.as_deref()?.hidden_width()
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
        let keeper = self.sparse.as_deref_mut().filter(|s| s.keeps());
        let mut places = Places {
            store: self.store.as_mut(),
            tier: &mut self.tier,
            packer: self.stages.pack.as_deref(),
            keeper: keeper.map(|keeper| (keeper, seq)),
            rebuilt: Rebuilt::default(),
        };
        let done = work(&self.stages, &self.geometry, state, &mut places);
        let rebuilt = places.rebuilt;
        if !rebuilt.is_nothing() {
            self.rebuilt.entry(seq).or_default().add(&rebuilt, 1);
        }
        done
    }

    /// Access to the pages.
    pub(super) fn places(&mut self) -> Places<'_> {
        Places {
            store: self.store.as_mut(),
            tier: &mut self.tier,
            packer: self.stages.pack.as_deref(),
            keeper: None,
            rebuilt: Rebuilt::default(),
        }
    }

    /// One KV head, all of it read as it is stored.
    pub(super) fn head_view<'a>(
        &'a self,
        (layer, head): (usize, usize),
        state: &'a SequenceState,
        rules: [Rules; 2],
    ) -> HeadView<'a> {
        HeadView {
            state: &state.layers[layer].heads[head],
            formats: &self.stages.formats[layer],
            rules,
            layer,
            head,
            geometry: &self.geometry.layers[layer],
            stages: &self.stages,
            reader: self.reader(),
            restored: None,
            reading: HeadReading::All,
        }
    }

    pub(super) fn reader(&self) -> Reader<'_> {
        Reader {
            store: self.store.as_ref(),
            tier: self.tier.as_ref(),
            packer: self.stages.pack.as_deref(),
        }
    }

    /// The reconstruction that a sequence's step carries, if the strategy predicts.
    pub(super) fn take_carry(&mut self, seq: SeqId) -> Option<Carry> {
        let predicts = self.stages.predictor.is_some();
        predicts.then(|| self.carries.take(seq))
    }

    pub(super) fn give_carry(&mut self, seq: SeqId, carry: Option<Carry>) {
        if let Some(carry) = carry {
            self.carries.put(seq, carry);
        }
    }

    /// Whether a sequence's tokens choose what they read: while it decodes.
    pub(super) fn chooses(&self, seq: SeqId) -> bool {
        let state = self.sequences.get(&seq);
        self.sparse.is_some() && state.is_some_and(|s| s.phase == Phase::Decoding)
    }

    /// After rows have left: what was kept to choose among them, or of them, goes too.
    fn forget(&mut self, seq: SeqId) -> Result<(), CacheError> {
        let Some(mut sparse) = self.sparse.take() else {
            return Ok(());
        };
        let state = self.sequence(seq);
        if let Ok(state) = &state
            && state.earliest == state.len
        {
            let live = |[layer, head]: [usize; 2], range| {
                let tables = state.layers[layer].heads[head].tables.iter().flatten();
                let pages = tables.filter_map(|table| table.page(range));
                pages.fold(0, |mask, page| mask | page.live())
            };
            sparse.forget(seq, &self.geometry, live);
        }
        let done = state.map(|_| ());
        self.sparse = Some(sparse);
        done
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
        // Rows leave while a sequence decodes: not before a context's compression point, nor in an exact continuation.
        let may_lose = |s: &SequenceState| s.phase == Phase::Decoding && s.frozen_from.is_none();
        let limited = self.sequences.get(&seq).is_none_or(may_lose);
        let most = self.needs().max_chunk.filter(|_| limited);
        let asked = most.unwrap_or(asked).min(asked).max(1);
        match &self.sparse {
            Some(sparse) if self.chooses(seq) => sparse.step_limit(asked),
            _ => self.budget_limit(seq, asked),
        }
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
        if let Some(sparse) = &mut self.sparse {
            sparse.admit(seq, &self.geometry);
        }
        Ok(())
    }

    fn append(&mut self, layer: usize, batch: &Batch, rows: Rows<'_>) -> Result<(), CacheError> {
        let g = &self.geometry.layers[layer];
        let width = g.n_kv_heads * g.head_dim;
        Self::shape("K rows", rows.k.len(), batch.n_rows() * width)?;
        Self::shape("V rows", rows.v.len(), batch.n_rows() * width)?;
        let n_hidden = rows.hidden.len() / batch.n_rows().max(1);
        if let Some(expected) = self.hidden_width()
            && rows.hidden.len() != batch.n_rows() * expected
        {
            return Err(CacheError::HiddenWidth {
                layer,
                got: n_hidden,
                expected,
            });
        }
        if layer == 0 {
            self.check_budget(batch)?;
        }
        for span in batch.spans() {
            let at = span.first_row * width..(span.first_row + span.n_tokens()) * width;
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
            if let Some(sparse) = &mut self.sparse {
                sparse.take_in((layer, &self.geometry.layers[layer]), span, own.k);
            }
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
        let start = self.now();
        for span in batch.spans() {
            let at = span.first_row * width..(span.first_row + span.n_tokens()) * width;
            self.attend_span((layer, span), &q[at.clone()], &mut out[at])?;
        }
        self.attended += self.now().saturating_sub(start);
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
                state.len = span.end();
                if span.n_tried > 0 {
                    drop_tried(stages, state, places)?;
                }
                for (layer, window) in window.iter().enumerate() {
                    commit_layer(stages, state, places, (layer, *window))?;
                }
                Ok(())
            })?;
            self.forget(span.seq)?;
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
        })?;
        self.forget(seq)
    }

    fn fork(&mut self, from: SeqId, to: SeqId) -> Result<(), CacheError> {
        if self.sequences.contains_key(&to) {
            return Err(CacheError::SequenceExists(to.0));
        }
        let copy = self.with_sequence(from, |_, _, state, places| Ok(state.fork(places)))?;
        self.sequences.insert(to, copy);
        if let Some(&rebuilt) = self.rebuilt.get(&from) {
            self.rebuilt.insert(to, rebuilt);
        }
        if let Some(mut sparse) = self.sparse.take() {
            let layers = 0..self.geometry.layers.len();
            let records: Vec<usize> = layers.map(|l| self.record_bytes(l)).collect();
            let done = sparse.fork((from, to), &mut self.places(), &records);
            self.sparse = Some(sparse);
            if done.is_err() {
                self.release(to)?;
            }
            done?;
        }
        Ok(())
    }

    fn truncate(&mut self, seq: SeqId, len: u32) -> Result<(), CacheError> {
        self.carries.end(seq);
        if self.sequence(seq)?.broken {
            return Err(CacheError::Broken(seq.0));
        }
        let old = self.len(seq)?;
        if let (Some(sparse), true) = (&self.sparse, len < old) {
            let earliest = commit::earliest(&self.stages, self.sequence(seq)?);
            let reachable = sparse.reachable(seq, (old, len.max(earliest)));
            if reachable != len {
                return Err(CacheError::Irreversible {
                    seq: seq.0,
                    asked: len,
                    earliest: reachable,
                });
            }
        }
        self.with_sequence(seq, |stages, _, state, places| {
            truncate(stages, state, places, (seq, len))
        })?;
        if let Some(sparse) = &mut self.sparse {
            sparse.truncate(seq, len.min(old), &self.geometry);
        }
        Ok(())
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
        self.rebuilt.remove(&seq);
        if let Some(mut sparse) = self.sparse.take() {
            sparse.release(seq, &mut self.places());
            self.sparse = Some(sparse);
        }
        Ok(())
    }

    fn trial(&self, seq: SeqId) -> Trial {
        let Some((sparse, state)) = self.sparse.as_ref().zip(self.sequences.get(&seq)) else {
            return Trial::Nothing;
        };
        let n_positions = self
            .geometry
            .layers
            .first()
            .map_or(0, |l| l.rope.n_positions());
        sparse.trial(seq, state, n_positions)
    }

    fn expect(&mut self, seq: SeqId, token: u32) {
        if let Some(sparse) = &mut self.sparse {
            sparse.expect(seq, token);
        }
    }

    fn len(&self, seq: SeqId) -> Result<u32, CacheError> {
        Ok(self.sequence(seq)?.len)
    }

    fn memory(&self) -> MemoryReport {
        let scratch_bytes = self.pool.bytes_of_one() + self.carries.bytes();
        let peak_bytes = self.sparse.as_ref().map_or(0, |s| s.peak_bytes());
        let scratch_bytes =
            scratch_bytes + peak_bytes + (self.partials.capacity() * size_of::<f32>()) as u64;
        super::memory::report(self, scratch_bytes)
    }
}

/// Keeps the compiler honest about sharing heads between threads.
const _: fn() = || {
    fn is_sync<T: Sync>() {}
    is_sync::<HeadState>();
};
