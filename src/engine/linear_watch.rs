//! A backend that passes everything on and adds up the wall time of the layers' linear products.
//!
//! Invariant: two readings of the clock's wall time per call and nothing else is added to the work; a model over a plain
//! backend reads no clock.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::clock::Clock;
use crate::model::ops::Ops;
use crate::model::{ModelError, ModelSpec, Role};

/// Wall time that adds up, whoever holds it.
#[derive(Debug, Default)]
pub struct Tally(AtomicU64);

impl Tally {
    /// What came together since the last call, or since the beginning.
    pub fn take(&self) -> Duration {
        Duration::from_nanos(self.0.swap(0, Ordering::Relaxed))
    }

    pub(super) fn add(&self, time: Duration) {
        self.0.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }
}

/// A backend with a stopwatch on its linear layers; the matrix that makes logits is not among them.
pub struct LinearWatch<'a, B> {
    inner: B,
    clock: &'a dyn Clock,
    spent: &'a Tally,
}

impl<'a, B: Ops> LinearWatch<'a, B> {
    /// Times the linear layers of `inner` by that clock into that tally.
    pub fn new(inner: B, clock: &'a dyn Clock, spent: &'a Tally) -> Self {
        Self {
            inner,
            clock,
            spent,
        }
    }
}

impl<B: Ops> Ops for LinearWatch<'_, B> {
    type Act = B::Act;

    fn spec(&self) -> &ModelSpec {
        self.inner.spec()
    }

    fn embed(&self, tokens: &[u32]) -> Result<B::Act, ModelError> {
        self.inner.embed(tokens)
    }

    fn linear<const N: usize>(&self, roles: [Role; N], layer: usize, x: &B::Act) -> [B::Act; N] {
        let start = self.clock.wall();
        let all = self.inner.linear(roles, layer, x);
        self.spent.add(self.clock.wall().saturating_sub(start));
        all
    }

    fn rms_norm(&self, role: Role, layer: usize, x: &B::Act) -> B::Act {
        self.inner.rms_norm(role, layer, x)
    }

    fn gate(&self, gate: B::Act, up: &B::Act) -> B::Act {
        self.inner.gate(gate, up)
    }

    fn add(&self, x: B::Act, y: &B::Act) -> B::Act {
        self.inner.add(x, y)
    }

    fn read<'a>(&self, x: &'a B::Act) -> Cow<'a, [f32]> {
        self.inner.read(x)
    }

    fn write(&self, rows: Vec<f32>, width: usize) -> B::Act {
        self.inner.write(rows, width)
    }

    fn logits(&self, hidden: &[f32], out: &mut [f32]) {
        self.inner.logits(hidden, out);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cache::{Admission, KvCache, SeqId};
    use crate::compute::cpu::Cpu;
    use crate::engine::clock::ScriptedClock;
    use crate::engine::plain_cache::PlainCache;
    use crate::engine::prefill;
    use crate::model::geometry::geometry;
    use crate::model::ops::{Arithmetic, Load};
    use crate::model::tiny::{TinyConfig, TinyModel};
    use crate::model::transformer::{LanguageModel, Transformer};

    #[test]
    fn the_four_products_of_each_layer_are_timed_and_no_bit_changes() {
        let cpu = || {
            let source = Arc::new(TinyModel::new(&TinyConfig::default()));
            Cpu::load(source, Arithmetic::F32).unwrap()
        };
        let tick = Duration::from_millis(3);
        let (clock, spent) = (ScriptedClock::new(tick), Tally::default());
        let plain = Transformer::over(cpu());
        let watched = Transformer::over(LinearWatch::new(cpu(), &clock, &spent));
        let tokens: Vec<u32> = (0..20).map(|i| i * 7 % 256).collect();
        let run = |model: &dyn LanguageModel| {
            let mut cache = PlainCache::new(geometry(model.spec(), 64));
            cache.admit(SeqId(1), Admission::Streaming).unwrap();
            let last = prefill(model, &mut cache, SeqId(1), &tokens, 8).unwrap();
            let mut logits = vec![0.0; model.spec().n_vocab];
            model.logits(&last.unwrap(), 0..1, &mut logits);
            logits
        };
        assert_eq!(run(&plain), run(&watched));
        // Three steps of two layers: QKV, the attention's output, gate with up, down.
        assert_eq!(spent.take(), 3 * 2 * 4 * tick);
        assert_eq!(spent.take(), Duration::ZERO);
    }
}
