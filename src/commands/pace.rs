//! How fast this machine runs a model: one short step is timed, to tell about how long a plan takes.
//!
//! Invariant: nothing here is a measurement that a table shows; attention over long contexts and coded rows cost more
//! than the step that is timed.

use std::sync::Arc;

use crate::cache::pipeline::StagedCache;
use crate::cache::stages::Materials;
use crate::cache::strategy::Strategy;
use crate::cache::{Admission, Batch, Geometry, KvCache, SeqId};
use crate::compute::cpu::backend::Cpu;
use crate::engine::clock::{Clock, SystemClock};
use crate::model::ops::Arithmetic;
use crate::model::transformer::{LanguageModel, StepError, Transformer};
use crate::model::weights::WeightSource;

/// Tokens of the timed step; also the positions that the geometry's tables must have.
pub const STEP: usize = 128;

/// Logits are asked for in pieces of this many rows.
const PIECE: usize = 32;

/// Seconds per token of prefill with logits, in an f16 cache.
///
/// # Errors
/// What loading the model or stepping it gives.
pub fn seconds_per_token(
    weights: Box<dyn WeightSource>,
    geometry: &Geometry,
    arithmetic: Arithmetic,
) -> Result<f64, StepError> {
    let model = Transformer::<Cpu>::load_in(Arc::from(weights), arithmetic)?;
    let materials = Materials {
        geometry,
        calibration: None,
        backing_dir: None,
    };
    let n_vocab = model.spec().n_vocab;
    let tokens: Vec<u32> = (0..STEP).map(|i| (i % n_vocab) as u32).collect();
    let mut logits = vec![0.0; PIECE * n_vocab];
    let clock = SystemClock::new();
    let mut seconds = f64::INFINITY;
    // The first round warms up caches and threads.
    for seq in [SeqId(0), SeqId(1)] {
        let mut cache = StagedCache::new(&Strategy::bare("f16"), materials)?;
        cache.admit(seq, Admission::Streaming)?;
        let start = clock.read();
        let hidden = model.step(&Batch::single(seq, 0..STEP as u32), &tokens, &mut cache)?;
        for first in (0..STEP).step_by(PIECE) {
            model.logits(&hidden, first..first + PIECE, &mut logits);
        }
        seconds = seconds.min(clock.read().since(start).wall.as_secs_f64());
    }
    Ok(seconds / STEP as f64)
}

/// A duration as people say it.
pub fn roughly(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("about {:.0} s", s.max(1.0)),
        s if s < 5400.0 => format!("about {:.0} min", s / 60.0),
        s => format!("about {:.1} h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Architecture;
    use crate::model::geometry::geometry;
    use crate::model::tiny::{TinyConfig, TinyModel};

    #[test]
    fn a_model_has_a_pace() {
        let model = TinyModel::new(&TinyConfig::of(Architecture::Llama));
        let geometry = geometry(model.spec(), STEP);
        let pace = seconds_per_token(Box::new(model), &geometry, Arithmetic::F32).unwrap();
        assert!(pace > 0.0 && pace < 1.0, "{pace}");
    }

    #[test]
    fn durations_read_well() {
        assert_eq!(roughly(0.2), "about 1 s");
        assert_eq!(roughly(600.0), "about 10 min");
        assert_eq!(roughly(9000.0), "about 2.5 h");
    }
}
