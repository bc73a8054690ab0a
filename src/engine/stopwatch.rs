//! A cache that passes everything on and adds up the wall time of what a step asks of it.
//!
//! Invariant: two readings of the clock's wall time per call and nothing else is added to the work; what a step takes
//! beyond these parts is the model's: its linear layers (`linear_watch` times them), norms and activations.

use std::time::Duration;

use super::clock::Clock;
use crate::cache::{
    Admission, Batch, CacheError, Continuation, KvCache, MemoryReport, Needs, Rows, SeqId, Trial,
};

/// Wall time by what the engine called.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spent {
    /// Taking in new rows: rotation, projection, encoding.
    pub append: Duration,
    /// Attention over what is stored.
    pub attend: Duration,
    /// The ends of steps: eviction, sealing, packing, moving.
    pub commit: Duration,
}

/// A cache with a stopwatch.
pub struct Stopwatch<'a, C> {
    inner: C,
    clock: &'a dyn Clock,
    spent: Spent,
}

impl<'a, C: KvCache> Stopwatch<'a, C> {
    /// Times `inner` by that clock, from zero.
    pub fn new(inner: C, clock: &'a dyn Clock) -> Self {
        Self {
            inner,
            clock,
            spent: Spent::default(),
        }
    }

    /// What was spent since the last call, or since the beginning.
    pub fn take(&mut self) -> Spent {
        std::mem::take(&mut self.spent)
    }

    fn timed<T>(
        &mut self,
        part: fn(&mut Spent) -> &mut Duration,
        work: impl FnOnce(&mut C) -> T,
    ) -> T {
        let start = self.clock.wall();
        let done = work(&mut self.inner);
        *part(&mut self.spent) += self.clock.wall().saturating_sub(start);
        done
    }
}

impl<C: KvCache> KvCache for Stopwatch<'_, C> {
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
        self.timed(|s| &mut s.append, |c| c.append(layer, batch, rows))
    }

    fn attend(
        &mut self,
        layer: usize,
        batch: &Batch,
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), CacheError> {
        self.timed(|s| &mut s.attend, |c| c.attend(layer, batch, q, out))
    }

    fn commit(&mut self, batch: &Batch) -> Result<(), CacheError> {
        self.timed(|s| &mut s.commit, |c| c.commit(batch))
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::compute::cpu::Cpu;
    use crate::engine::clock::ScriptedClock;
    use crate::engine::plain_cache::PlainCache;
    use crate::engine::prefill;
    use crate::model::geometry::geometry;
    use crate::model::tiny::{TinyConfig, TinyModel};
    use crate::model::transformer::{LanguageModel, Transformer};

    const SEQ: SeqId = SeqId(2);

    #[test]
    fn each_part_of_each_step_is_timed_and_nothing_stored_changes() {
        let model =
            Transformer::<Cpu>::load(Arc::new(TinyModel::new(&TinyConfig::default()))).unwrap();
        let geometry = geometry(model.spec(), 64);
        let tick = Duration::from_millis(3);
        let clock = ScriptedClock::new(tick);
        let mut plain = PlainCache::new(geometry.clone());
        let mut watched = Stopwatch::new(PlainCache::new(geometry), &clock);
        let tokens: Vec<u32> = (0..20).map(|i| i * 7 % 256).collect();
        plain.admit(SEQ, Admission::Streaming).unwrap();
        watched.admit(SEQ, Admission::Streaming).unwrap();
        let alone = prefill(&model, &mut plain, SEQ, &tokens, 8).unwrap();
        let timed = prefill(&model, &mut watched, SEQ, &tokens, 8).unwrap();
        assert_eq!(alone, timed);
        assert_eq!(watched.inner.rows(SEQ, 1), plain.rows(SEQ, 1));
        // Three steps of two layers; each part lasts one tick of a scripted clock.
        let spent = Spent {
            append: 6 * tick,
            attend: 6 * tick,
            commit: 3 * tick,
        };
        assert_eq!(watched.take(), spent);
        assert_eq!(watched.take(), Spent::default());
    }
}
