//! Texts generated from a compressed context: where a strategy leaves the reference's way, and what becomes of its text.
//!
//! Invariants: strategy and reference draw with the same noise at each step; a strategy's own text is then scored through its cache and
//! through the reference's, from forks of the same compression point, token by token as it was generated.

use super::answers::{Branch, Generation};
use super::lockstep::{EvalError, Lockstep, Outcome, Outcomes, Runner, each, watch};
use super::reading::{Reading, needs_of};
use crate::cache::Continuation;
use crate::cache::strategy::Strategy;

/// Texts written from one context; an end token is part of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Written {
    /// The strategy's.
    pub tokens: Vec<u32>,
    /// The reference's.
    pub tokens_reference: Vec<u32>,
    /// Σ −ln p of the reference's text under the reference's cache, nats.
    pub nll_own_reference: f64,
}

impl Lockstep<'_> {
    /// Goes on from a context. An outcome's tokens are those of the strategy's own text, under its cache and under the
    /// reference's.
    ///
    /// # Errors
    /// The reference's; a strategy's own error is its outcome.
    pub fn go_on(
        &self,
        entrants: &[(&Strategy, Continuation)],
        ids: &[u32],
        generation: Generation<'_>,
    ) -> Result<Outcomes, EvalError> {
        // A cache of f32 rows that is treated as a strategy writes the reference's text, and scores it.
        let exact = Strategy::bare("f32");
        let all = entrants
            .iter()
            .copied()
            .chain([(&exact, Continuation::Strategy)]);
        let mut runners: Vec<Result<Runner, EvalError>> = all
            .map(|(strategy, continuation)| {
                let mut runner = self.build(strategy)?;
                runner.continuation = continuation;
                Ok(runner)
            })
            .collect();
        // The last token is read after the compression: what it predicts, it predicts from the compressed cache.
        let (context, query) = ids.split_at(ids.len() - 1);
        let start = self.clock.read();
        let Reading {
            mut reference,
            seen,
            ..
        } = self.read(None, context, needs_of(&runners))?;
        let prefill_ms = self.clock.read().since(start).wall_ms() - seen.repetition_ms;
        each(&mut runners, |runner| self.compress(runner, &seen));
        drop(seen);
        let way = (query, context.len());
        let (_, mut texts) = self.generate(&mut reference, &mut runners, way, generation)?;
        for (runner, target) in runners.iter_mut().zip(&texts) {
            if runner.is_ok() {
                let branch = [Branch { query, target }];
                let alone = std::slice::from_mut(runner);
                watch(alone);
                self.score_branches(&mut reference, alone, &branch, context.len())?;
                each(alone, |r| {
                    r.note_traffic(|record| &mut record.scored);
                    Ok(())
                });
            }
        }
        // The tokens that wrote each text.
        let read = |text: &Vec<u32>| -> Vec<u32> {
            let all = query.iter().chain(text).take(query.len() + text.len() - 1);
            all.take(self.latency_steps).copied().collect()
        };
        let read: Vec<Vec<u32>> = texts.iter().map(read).collect();
        let read: Vec<&[u32]> = read.iter().map(Vec::as_slice).collect();
        let latencies = self.time(&mut runners, &read, prefill_ms);
        let mut outcomes = self.collect(runners, latencies, None);
        let own = outcomes.pop().transpose()?;
        let tokens_reference = texts.pop().unwrap_or_default();
        let nll_own_reference = own.iter().flat_map(|o| &o.tokens).map(|t| t.nll).sum();
        let with_text = |(outcome, tokens): (Result<Outcome, EvalError>, Vec<u32>)| {
            Ok(Outcome {
                written: Some(Written {
                    tokens,
                    tokens_reference: tokens_reference.clone(),
                    nll_own_reference,
                }),
                ..outcome?
            })
        };
        Ok(outcomes.into_iter().zip(texts).map(with_text).collect())
    }
}
