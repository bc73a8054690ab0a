//! The queries of one sequence as attention is asked, kept layer by layer while a model steps through a cache.
//!
//! Invariant: everything passes on unchanged; what is kept is q as it came to `attend`, before RoPE.

use crate::cache::{
    Admission, Batch, CacheError, Continuation, KvCache, MemoryReport, Needs, Rows, SeqId, Trial,
};

/// A cache that passes everything on and keeps one sequence's queries.
pub struct Probe<'a> {
    inner: &'a mut dyn KvCache,
    seq: SeqId,
    queries: Vec<Vec<f32>>,
}

impl<'a> Probe<'a> {
    /// Keeps queries of `seq`.
    pub fn new(inner: &'a mut dyn KvCache, seq: SeqId) -> Self {
        Self {
            inner,
            seq,
            queries: Vec::new(),
        }
    }

    /// What was kept, by layer: `[token][head][head_dim]`, before RoPE.
    pub fn into_queries(self) -> Vec<Vec<f32>> {
        self.queries
    }
}

impl KvCache for Probe<'_> {
    fn needs(&self) -> Needs {
        self.inner.needs()
    }

    fn step_limit(&self, seq: SeqId, asked: usize) -> usize {
        self.inner.step_limit(seq, asked)
    }

    fn admit(&mut self, seq: SeqId, admission: Admission) -> Result<(), CacheError> {
        self.inner.admit(seq, admission)
    }

    fn append(&mut self, layer: usize, batch: &Batch, rows: Rows<'_>) -> Result<(), CacheError> {
        self.inner.append(layer, batch, rows)
    }

    fn attend(
        &mut self,
        layer: usize,
        batch: &Batch,
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), CacheError> {
        self.inner.attend(layer, batch, q, out)?;
        if let Some(span) = batch.spans().iter().find(|s| s.seq == self.seq) {
            if self.queries.len() <= layer {
                self.queries.resize_with(layer + 1, Vec::new);
            }
            let width = q.len() / batch.n_rows();
            let rows = span.first_row * width..(span.first_row + span.n_tokens()) * width;
            self.queries[layer].extend_from_slice(&q[rows]);
        }
        Ok(())
    }

    fn commit(&mut self, batch: &Batch) -> Result<(), CacheError> {
        self.inner.commit(batch)
    }

    fn compress(&mut self, seq: SeqId, continuation: Continuation) -> Result<(), CacheError> {
        self.inner.compress(seq, continuation)
    }

    fn fork(&mut self, from: SeqId, to: SeqId) -> Result<(), CacheError> {
        self.inner.fork(from, to)
    }

    fn truncate(&mut self, seq: SeqId, len: u32) -> Result<(), CacheError> {
        self.inner.truncate(seq, len)
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
