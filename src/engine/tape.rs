//! Keys and values of one sequence as the model made them, before RoPE and before any cache touched them, so that one
//! exact prefill can be replayed into the caches of many strategies.
//!
//! Invariants: a tape holds f32 rows, bit for bit what went into `append`; replaying appends them with the same
//! positions, so a cache ends as if it had been prefilled itself with rows that attended through the recorded cache.

use std::ops::Range;

use crate::cache::{
    Admission, Batch, CacheError, Continuation, KvCache, MemoryReport, Needs, Rows, SeqId, Trial,
};

/// One layer of a tape, rows back to back.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TapeLayer {
    /// Keys before RoPE, `[token][kv_head][head_dim]`.
    pub k: Vec<f32>,
    /// Values, `[token][kv_head][head_dim]`.
    pub v: Vec<f32>,
    /// The layer's normalised input, `[token][n_embd]`; empty unless it was asked for.
    pub hidden: Vec<f32>,
    /// Lengths of the residual stream, `[token]`; they come with the inputs.
    pub residual_norms: Vec<f32>,
    /// Queries of the newest tokens before RoPE, `[token][head][head_dim]`, as many as were asked for.
    pub q: Vec<f32>,
}

/// What a tape holds besides keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Extras {
    /// The layers' normalised inputs.
    pub hidden: bool,
    /// Newest tokens whose queries are kept.
    pub queries: usize,
}

/// Keys and values of a context, all layers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ContextTape {
    /// One entry per layer.
    pub layers: Vec<TapeLayer>,
    /// Tokens on the tape.
    pub n_tokens: usize,
}

/// What can go wrong in a replay.
#[derive(Debug, thiserror::Error)]
pub enum TapeError {
    /// The cache refuses or failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The strategy needs hidden rows that were not recorded.
    #[error(
        "the strategy needs each layer's hidden rows and the tape has none: record with `Extras::hidden`"
    )]
    NoHidden,
}

impl ContextTape {
    /// Appends the whole tape to an empty sequence that was admitted to `cache`, in chunks of at most `chunk` tokens, and
    /// commits each; nothing attends.
    ///
    /// # Errors
    /// [`TapeError::NoHidden`], or what the cache says.
    pub fn replay(
        &self,
        cache: &mut dyn KvCache,
        seq: SeqId,
        chunk: usize,
    ) -> Result<(), TapeError> {
        if cache.needs().hidden && self.layers.iter().any(|l| l.hidden.is_empty()) {
            return Err(TapeError::NoHidden);
        }
        let mut first = 0;
        while first < self.n_tokens {
            let n = cache.step_limit(seq, chunk).min(self.n_tokens - first);
            let tokens = first..first + n;
            let batch = Batch::single(seq, tokens.start as u32..tokens.end as u32);
            for (layer, rows) in self.layers.iter().enumerate() {
                let part = |x| self.part(x, &tokens);
                let rows = Rows {
                    k: part(&rows.k),
                    v: part(&rows.v),
                    hidden: part(&rows.hidden),
                    residual_norms: part(&rows.residual_norms),
                };
                cache.append(layer, &batch, rows)?;
            }
            cache.commit(&batch)?;
            first += n;
        }
        Ok(())
    }

    /// Bytes of the rows.
    pub fn bytes(&self) -> u64 {
        let scalars = |l: &TapeLayer| {
            l.k.len() + l.v.len() + l.hidden.len() + l.residual_norms.len() + l.q.len()
        };
        4 * self.layers.iter().map(scalars).sum::<usize>() as u64
    }

    fn part<'a>(&self, rows: &'a [f32], tokens: &Range<usize>) -> &'a [f32] {
        let width = rows.len() / self.n_tokens;
        &rows[tokens.start * width..tokens.end * width]
    }

    fn truncate(&mut self, n_tokens: usize) {
        if n_tokens >= self.n_tokens {
            return;
        }
        for layer in &mut self.layers {
            for rows in [
                &mut layer.k,
                &mut layer.v,
                &mut layer.hidden,
                &mut layer.residual_norms,
            ] {
                rows.truncate(rows.len() / self.n_tokens * n_tokens);
            }
            // Queries are those of the newest tokens, which are others now.
            layer.q.clear();
        }
        self.n_tokens = n_tokens;
    }
}

/// A cache that passes everything on and keeps one sequence's rows on a tape.
///
/// The sequence must be admitted through the decorator, not before it.
pub struct Recording<C> {
    inner: C,
    seq: SeqId,
    extras: Extras,
    tape: ContextTape,
}

impl<C: KvCache> Recording<C> {
    /// Records keys and values of `seq`.
    pub fn new(inner: C, seq: SeqId) -> Self {
        Self::with(inner, seq, Extras::default())
    }

    /// The same and more.
    pub fn with(inner: C, seq: SeqId, extras: Extras) -> Self {
        Self {
            inner,
            seq,
            extras,
            tape: ContextTape::default(),
        }
    }

    /// Goes on recording `seq`, whose rows are on `tape`; hidden rows where the tape has them.
    pub fn resume(inner: C, seq: SeqId, tape: ContextTape) -> Self {
        let hidden = tape.layers.iter().any(|l| !l.hidden.is_empty());
        Self {
            inner,
            seq,
            extras: Extras { hidden, queries: 0 },
            tape,
        }
    }

    /// The cache and the tape.
    pub fn into_parts(self) -> (C, ContextTape) {
        (self.inner, self.tape)
    }

    /// The tape so far.
    pub fn tape(&self) -> &ContextTape {
        &self.tape
    }
}

impl<C: KvCache> KvCache for Recording<C> {
    fn needs(&self) -> Needs {
        let needs = self.inner.needs();
        Needs {
            hidden: needs.hidden || self.extras.hidden,
            ..needs
        }
    }

    fn step_limit(&self, seq: SeqId, asked: usize) -> usize {
        self.inner.step_limit(seq, asked)
    }

    fn admit(&mut self, seq: SeqId, admission: Admission) -> Result<(), CacheError> {
        self.inner.admit(seq, admission)?;
        if seq == self.seq {
            self.tape = ContextTape::default();
        }
        Ok(())
    }

    fn append(&mut self, layer: usize, batch: &Batch, rows: Rows<'_>) -> Result<(), CacheError> {
        self.inner.append(layer, batch, rows)?;
        let Some(span) = batch.spans().iter().find(|s| s.seq == self.seq) else {
            return Ok(());
        };
        if span.positions.start as usize != self.tape.n_tokens {
            return Err(CacheError::Gap {
                seq: self.seq.0,
                expected: self.tape.n_tokens as u32,
                got: span.positions.start,
            });
        }
        if self.tape.layers.len() <= layer {
            self.tape.layers.resize_with(layer + 1, TapeLayer::default);
        }
        let part = |rows: &[f32]| {
            let width = rows.len() / batch.n_rows();
            let first = span.first_row * width;
            rows[first..first + span.n_tokens() * width].to_vec()
        };
        let kept = &mut self.tape.layers[layer];
        kept.k.extend(part(rows.k));
        kept.v.extend(part(rows.v));
        if self.extras.hidden {
            kept.hidden.extend(part(rows.hidden));
            kept.residual_norms.extend(part(rows.residual_norms));
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
        self.inner.attend(layer, batch, q, out)?;
        let span = batch.spans().iter().find(|s| s.seq == self.seq);
        if let (Some(span), true) = (span, self.extras.queries > 0) {
            let width = q.len() / batch.n_rows();
            let own = &q[span.first_row * width..][..span.n_tokens() * width];
            let kept = &mut self.tape.layers[layer].q;
            kept.extend_from_slice(own);
            let n_old = (kept.len() / width).saturating_sub(self.extras.queries);
            kept.drain(..n_old * width);
        }
        Ok(())
    }

    fn commit(&mut self, batch: &Batch) -> Result<(), CacheError> {
        self.inner.commit(batch)?;
        if let Some(span) = batch.spans().iter().find(|s| s.seq == self.seq) {
            self.tape.n_tokens += span.n_tokens();
        }
        Ok(())
    }

    fn compress(&mut self, seq: SeqId, continuation: Continuation) -> Result<(), CacheError> {
        self.inner.compress(seq, continuation)
    }

    fn fork(&mut self, from: SeqId, to: SeqId) -> Result<(), CacheError> {
        self.inner.fork(from, to)
    }

    fn truncate(&mut self, seq: SeqId, len: u32) -> Result<(), CacheError> {
        self.inner.truncate(seq, len)?;
        if seq == self.seq {
            self.tape.truncate(len as usize);
        }
        Ok(())
    }

    fn release(&mut self, seq: SeqId) -> Result<(), CacheError> {
        self.inner.release(seq)
    }

    fn trial(&self, seq: SeqId) -> Trial {
        self.inner.trial(seq)
    }

    fn expect(&mut self, seq: SeqId, token: u32) {
        self.inner.expect(seq, token);
    }

    fn len(&self, seq: SeqId) -> Result<u32, CacheError> {
        self.inner.len(seq)
    }

    fn memory(&self) -> MemoryReport {
        self.inner.memory()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Geometry;
    use crate::compute::cpu::Cpu;
    use crate::engine::plain_cache::PlainCache;
    use crate::engine::{CHUNK, feed, prefill};
    use crate::model::geometry::geometry;
    use crate::model::tiny::{TinyConfig, TinyModel};
    use crate::model::transformer::{LanguageModel, StepError, Transformer};
    use std::sync::Arc;

    const SEQ: SeqId = SeqId(4);

    fn model() -> (Transformer<Cpu>, Geometry) {
        let model =
            Transformer::<Cpu>::load(Arc::new(TinyModel::new(&TinyConfig::default()))).unwrap();
        let geometry = geometry(model.spec(), 256);
        (model, geometry)
    }

    fn text(n: u32) -> Vec<u32> {
        (0..n).map(|i| (i * i * 13 + i * 5 + 3) % 256).collect()
    }

    fn record(
        model: &Transformer<Cpu>,
        geometry: &Geometry,
        tokens: &[u32],
    ) -> (PlainCache, ContextTape) {
        let mut cache = Recording::new(PlainCache::new(geometry.clone()), SEQ);
        cache.admit(SEQ, Admission::Context).unwrap();
        prefill(model, &mut cache, SEQ, tokens, 20).unwrap();
        cache.into_parts()
    }

    #[test]
    fn a_replay_stores_what_the_prefill_stored_in_any_chunks() {
        let (model, geometry) = model();
        let (exact, tape) = record(&model, &geometry, &text(70));
        assert_eq!(tape.n_tokens, 70);
        assert_eq!(tape.bytes(), 70 * 4 * geometry.scalars_per_token() as u64);
        for chunk in [1, 33, CHUNK] {
            let mut cache = PlainCache::new(geometry.clone());
            cache.needs.max_chunk = Some(chunk);
            cache.admit(SEQ, Admission::Context).unwrap();
            tape.replay(&mut cache, SEQ, CHUNK).unwrap();
            assert_eq!(cache.len(SEQ).unwrap(), 70);
            for layer in 0..2 {
                assert_eq!(cache.rows(SEQ, layer), exact.rows(SEQ, layer));
            }
            // Keys on the tape are not rotated, those in the cache are.
            assert_ne!(tape.layers[1].k, exact.rows(SEQ, 1).0);
            assert_eq!(tape.layers[1].v, exact.rows(SEQ, 1).1);
        }
    }

    #[test]
    fn only_the_sequence_in_question_is_kept_and_truncation_reaches_the_tape() {
        let (model, geometry) = model();
        let tokens = text(30);
        let (_, alone) = record(&model, &geometry, &tokens);
        let mut cache = Recording::new(PlainCache::new(geometry), SEQ);
        for seq in [SeqId(0), SEQ] {
            cache.admit(seq, Admission::Context).unwrap();
        }
        let mut batch = Batch::new();
        batch.push(SeqId(0), 0..5);
        batch.push(SEQ, 0..30);
        let both = [&tokens[3..8], &tokens].concat();
        model.step(&batch, &both, &mut cache).unwrap();
        assert_eq!(*cache.tape(), alone);
        cache.truncate(SEQ, 10).unwrap();
        prefill(&model, &mut cache, SEQ, &tokens[10..], 7).unwrap();
        assert_eq!(*cache.tape(), alone);
        cache.fork(SeqId(0), SEQ).unwrap();
        let stale = prefill(&model, &mut cache, SEQ, &tokens, 7);
        assert!(
            matches!(stale, Err(StepError::Cache(CacheError::Gap { .. }))),
            "{stale:?}"
        );
    }

    #[test]
    fn hidden_rows_are_recorded_on_demand_and_missed_where_they_are_needed() {
        let (model, geometry) = model();
        let tokens = text(12);
        let (_, plain) = record(&model, &geometry, &tokens);
        let mut cache = Recording::with(
            PlainCache::new(geometry.clone()),
            SEQ,
            Extras {
                hidden: true,
                queries: 3,
            },
        );
        cache.admit(SEQ, Admission::Context).unwrap();
        prefill(&model, &mut cache, SEQ, &tokens, 5).unwrap();
        let (_, with_hidden) = cache.into_parts();
        assert_eq!(with_hidden.layers[1].hidden.len(), 12 * 64);
        assert_eq!(with_hidden.layers[1].residual_norms.len(), 12);
        assert_eq!(with_hidden.layers[1].q.len(), 3 * 4 * 32);
        let mut needy = PlainCache::new(geometry);
        needy.needs.hidden = true;
        needy.admit(SEQ, Admission::Context).unwrap();
        let refused = plain.replay(&mut needy, SEQ, 4);
        assert!(matches!(refused, Err(TapeError::NoHidden)));
        with_hidden.replay(&mut needy, SEQ, 4).unwrap();
        assert_eq!(needy.n_hidden, 2 * 12 * 64);
    }

    #[test]
    fn feeding_goes_on_where_the_sequence_is_and_respects_the_chunk() {
        let (model, geometry) = model();
        let tokens = text(40);
        let mut cache = PlainCache::new(geometry);
        cache.admit(SEQ, Admission::Streaming).unwrap();
        let last = prefill(&model, &mut cache, SEQ, &tokens[..23], CHUNK).unwrap();
        assert_eq!(last.unwrap().n_rows(), 1);
        cache.needs.max_chunk = Some(5);
        let mut seen = Vec::new();
        feed(&model, &mut cache, SEQ, &tokens[23..], CHUNK, |c| {
            assert_eq!(c.hidden.n_rows(), c.tokens.len());
            seen.push((c.first_position, c.tokens.len()));
            Ok::<(), StepError>(())
        })
        .unwrap();
        assert_eq!(seen, [(23, 5), (28, 5), (33, 5), (38, 2)]);
        assert_eq!(prefill(&model, &mut cache, SEQ, &[], 1).unwrap(), None);
    }
}
