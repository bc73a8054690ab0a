//! Decode time per token, strategies interleaved step by step so that a busy moment hits all of them, each with
//! tokens of its own.
//!
//! Invariants: the steps run on a fork which is released afterwards, so timing changes no score and no row; a step is one token through the whole model, its logits included; the first step is a warm-up and
//! is not counted.

use super::lockstep::{EvalError, Lockstep, Runner, SEQ, each};
use super::records::LatencyRecord;
use crate::cache::sparse::Watch;
use crate::cache::{KvCache, SeqId, StagedCache};
use crate::engine;
use crate::engine::clock::Clock;
use crate::model::transformer::{LanguageModel, StepError};

/// The fork that timed steps run on.
const FORK: SeqId = SeqId(u32::MAX);

/// A cache, and what it decodes.
pub struct Decode<'a> {
    /// The cache.
    pub cache: &'a mut StagedCache,
    /// The sequence to go on from.
    pub seq: SeqId,
    /// Tokens, one per step.
    pub tokens: &'a [u32],
}

/// Times of one cache.
#[derive(Debug, Clone, Default)]
pub struct Timed {
    /// Tokens in the cache before the first timed step.
    pub depth: usize,
    /// Wall time per step, ms.
    pub step_ms: Vec<f64>,
    /// CPU time of all steps, ms.
    pub cpu_ms: f64,
    /// Wall time of attention in all steps, ms.
    pub attend_ms: f64,
}

/// Times single-token steps of all caches, step by step in turn; `None` in, `None` out.
pub fn interleaved(
    model: &dyn LanguageModel,
    clock: &dyn Clock,
    mut all: Vec<Option<Decode<'_>>>,
) -> Vec<Option<Result<Timed, StepError>>> {
    let mut done: Vec<Option<Result<Timed, StepError>>> = all
        .iter_mut()
        .map(|decode| {
            decode.as_mut().map(|Decode { cache, seq, .. }| {
                cache.fork(*seq, FORK)?;
                cache.watch(Watch::Nothing, Some(clock.timer()));
                let depth = cache.len(FORK)? as usize;
                Ok(Timed {
                    depth,
                    ..Timed::default()
                })
            })
        })
        .collect();
    let n_steps = all.iter().flatten().map(|d| d.tokens.len()).max();
    for i in 0..n_steps.unwrap_or(0) {
        for (decode, timed) in all.iter_mut().zip(&mut done) {
            let (Some(Decode { cache, tokens, .. }), Some(Ok(t))) =
                (decode.as_mut(), timed.as_mut())
            else {
                continue;
            };
            let Some(&token) = tokens.get(i) else {
                continue;
            };
            match step(model, clock, cache, token) {
                Ok(_) if i == 0 && tokens.len() > 1 => {
                    t.depth += 1;
                    cache.watch(Watch::Nothing, Some(clock.timer()));
                }
                Ok((wall_ms, cpu_ms)) => {
                    t.step_ms.push(wall_ms);
                    t.cpu_ms += cpu_ms;
                }
                Err(e) => *timed = Some(Err(e)),
            }
        }
    }
    for (decode, timed) in all.into_iter().zip(&mut done) {
        let (Some(Decode { cache, .. }), Some(Ok(t))) = (decode, timed.as_mut()) else {
            continue;
        };
        t.attend_ms = cache.attended().as_secs_f64() * 1e3;
        if let Err(e) = cache.release(FORK) {
            *timed = Some(Err(e.into()));
        }
    }
    done
}

impl Lockstep<'_> {
    /// Times steps through each runner's own tokens.
    pub(super) fn time(
        &self,
        runners: &mut [Result<Runner, EvalError>],
        tokens: &[&[u32]],
        prefill_ms: f64,
    ) -> Vec<Option<LatencyRecord>> {
        if tokens.iter().all(|t| t.is_empty()) {
            return vec![None; runners.len()];
        }
        let before: Vec<[f64; 2]> = runners
            .iter()
            .map(|r| {
                r.as_ref()
                    .map_or([0.0; 2], |r| [r.compress_ms, r.repetition_ms])
            })
            .collect();
        let all = runners
            .iter_mut()
            .zip(tokens)
            .map(|(runner, tokens)| {
                let cache = &mut runner.as_mut().ok()?.cache;
                Some(Decode {
                    cache,
                    seq: SEQ,
                    tokens,
                })
            })
            .collect();
        let timed = interleaved(self.model, self.clock, all);
        each(runners, |r| {
            r.note_traffic(|record| &mut record.timed);
            Ok(())
        });
        timed
            .into_iter()
            .zip(runners)
            .zip(before)
            .map(
                |((timed, runner), [compress_ms, repetition_ms])| match timed {
                    Some(Ok(t)) => Some(LatencyRecord {
                        depth: t.depth,
                        step_ms: t.step_ms,
                        cpu_ms: t.cpu_ms,
                        attend_ms: t.attend_ms,
                        prefill_ms,
                        compress_ms,
                        repetition_ms: Some(repetition_ms),
                    }),
                    Some(Err(e)) => {
                        *runner = Err(e.into());
                        None
                    }
                    None => None,
                },
            )
            .collect()
    }
}

fn step(
    model: &dyn LanguageModel,
    clock: &dyn Clock,
    cache: &mut StagedCache,
    token: u32,
) -> Result<(f64, f64), StepError> {
    let at = cache.len(FORK)?;
    let start = clock.read();
    let hidden = engine::step(model, cache, FORK, at, &[token])?;
    let mut logits = vec![0.0; model.spec().n_vocab];
    model.logits(&hidden, 0..1, &mut logits);
    let spent = clock.read().since(start);
    Ok((spent.wall_ms(), spent.cpu_ms()))
}
