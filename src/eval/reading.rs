//! A context read exactly, once for all strategies, and once for what contexts have in common.
//!
//! Invariant: a context read on from another one's beginning has the bits of one that was read alone.

use super::lockstep::{EvalError, Lockstep, Runner, SEQ};
use crate::cache::strategy::Strategy;
use crate::cache::{Admission, KvCache, StagedCache};
use crate::engine::{self, ContextTape, Recording};

/// A context that was read exactly.
pub struct Reading {
    pub(super) reference: Runner,
    pub(super) tape: ContextTape,
    ids: Vec<u32>,
    hidden: bool,
}

impl Reading {
    /// Goes back to what it has in common with the start of `ids`; `None` where that can't be (a window has let rows go).
    fn back_to(self, ids: &[u32], hidden: bool) -> Option<Recording<StagedCache>> {
        let common = self.ids.iter().zip(ids).take_while(|(a, b)| a == b).count();
        if common == 0 || (hidden && !self.hidden) {
            return None;
        }
        let mut recording = Recording::resume(self.reference.cache, SEQ, self.tape);
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
        hidden: bool,
    ) -> Result<Reading, EvalError> {
        let mut recording = match before.and_then(|reading| reading.back_to(ids, hidden)) {
            Some(recording) => recording,
            None => {
                let cache = self.build(&Strategy::bare("f32"))?.cache;
                let mut recording = match hidden {
                    true => Recording::with_hidden(cache, SEQ),
                    false => Recording::new(cache, SEQ),
                };
                recording.admit(SEQ, Admission::Streaming)?;
                recording
            }
        };
        let rest = &ids[recording.tape().n_tokens..];
        engine::prefill(self.model, &mut recording, SEQ, rest, self.chunk)?;
        let (cache, tape) = recording.into_parts();
        Ok(Reading {
            reference: self.runner(cache),
            tape,
            ids: ids.to_vec(),
            hidden,
        })
    }
}
