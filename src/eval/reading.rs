//! A context read exactly, once for all strategies, and once for what contexts have in common; and what they ask to see
//! of it.
//!
//! Invariant: a context read on from another one's beginning has the bits of one that was read alone.

use super::lockstep::{EvalError, Lockstep, Runner, SEQ};
use crate::cache::strategy::Strategy;
use crate::cache::{
    Admission, CacheError, KvCache, Needs, Repetition, SeenLayer, SeqId, StagedCache,
};
use crate::engine::repetition::repetition;
use crate::engine::{self, ContextTape, Extras, Recording};

/// The sequence in which a context is repeated, while that lasts.
const REPEATED: SeqId = SeqId(u32::MAX);

/// A context that was read exactly.
pub struct Reading {
    pub(super) reference: Runner,
    pub(super) seen: Seen,
    ids: Vec<u32>,
    hidden: bool,
}

/// What was seen of a context.
pub struct Seen {
    pub(super) tape: ContextTape,
    repetition: Vec<Repetition>,
    /// What the repetition took, ms.
    pub(super) repetition_ms: f64,
}

impl Seen {
    /// By layer.
    pub(super) fn layers(&self) -> Vec<SeenLayer<'_>> {
        let layer = |(i, rows)| {
            let rows: &engine::tape::TapeLayer = rows;
            SeenLayer {
                k: &rows.k,
                v: &rows.v,
                q: &rows.q,
                repetition: self.repetition.get(i),
            }
        };
        self.tape.layers.iter().enumerate().map(layer).collect()
    }
}

/// What strategies ask for together.
pub(super) fn needs_of(runners: &[Result<Runner, EvalError>]) -> Needs {
    let all = runners.iter().flatten().map(|r| r.cache.needs());
    all.fold(Needs::default(), |all, one| Needs {
        hidden: all.hidden || one.hidden,
        context: all.context.or(one.context),
        ..all
    })
}

impl Reading {
    /// Goes back to what it has in common with the start of `ids`; `None` where that can't be (a window has let rows go).
    fn back_to(self, ids: &[u32], needs: Needs) -> Option<Recording<StagedCache>> {
        let common = self.ids.iter().zip(ids).take_while(|(a, b)| a == b).count();
        if common == 0 || (needs.hidden && !self.hidden) || needs.context.queries > 0 {
            return None;
        }
        let mut recording = Recording::resume(self.reference.cache, SEQ, self.seen.tape);
        recording.truncate(SEQ, common as u32).ok()?;
        Some(recording)
    }
}

impl Lockstep<'_> {
    /// Reads a context exactly. What it has in common with the start of the one before is not read again, which changes no
    /// bit.
    pub(super) fn read(
        &self,
        before: Option<Reading>,
        ids: &[u32],
        needs: Needs,
    ) -> Result<Reading, EvalError> {
        let mut recording = match before.and_then(|reading| reading.back_to(ids, needs)) {
            Some(recording) => recording,
            None => {
                let cache = self.build(&Strategy::bare("f32"))?.cache;
                let extras = Extras {
                    hidden: needs.hidden,
                    queries: needs.context.queries,
                };
                let mut recording = Recording::with(cache, SEQ, extras);
                recording.admit(SEQ, Admission::Streaming)?;
                recording
            }
        };
        let rest = &ids[recording.tape().n_tokens..];
        engine::prefill(self.model, &mut recording, SEQ, rest, self.chunk)?;
        let (mut cache, tape) = recording.into_parts();
        let start = self.clock.read();
        let repetition = match needs.context.repetition {
            true => self.repeat(&mut cache, ids, &tape)?,
            false => Vec::new(),
        };
        Ok(Reading {
            reference: self.runner(cache),
            seen: Seen {
                tape,
                repetition,
                repetition_ms: self.clock.read().since(start).wall_ms(),
            },
            ids: ids.to_vec(),
            hidden: needs.hidden,
        })
    }

    fn repeat(
        &self,
        cache: &mut StagedCache,
        ids: &[u32],
        tape: &ContextTape,
    ) -> Result<Vec<Repetition>, EvalError> {
        let prompt = self.repeat.ok_or(CacheError::Unseen { seq: SEQ.0 })?;
        let cache: (&mut dyn KvCache, SeqId, SeqId) = (cache, SEQ, REPEATED);
        let read = (ids, tape);
        Ok(repetition(self.model, cache, self.geometry, read, prompt)?)
    }
}
