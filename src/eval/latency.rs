//! Decode time per token, strategies interleaved step by step so that a busy moment hits all of them.
//!
//! Invariants: the steps run on a fork which is released afterwards, so timing changes no score and no row; a step is one token through the whole model, its logits included; the first step is a warm-up and
//! is not counted.

use crate::cache::sparse::Watch;
use crate::cache::{KvCache, SeqId, StagedCache};
use crate::engine;
use crate::engine::clock::Clock;
use crate::model::transformer::{LanguageModel, StepError};

/// The fork that timed steps run on.
const FORK: SeqId = SeqId(u32::MAX);

/// What to decode.
#[derive(Debug, Clone, Copy)]
pub struct Decode<'a> {
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
    mut caches: Vec<Option<&mut StagedCache>>,
    decode: Decode<'_>,
) -> Vec<Option<Result<Timed, StepError>>> {
    let mut all: Vec<Option<Result<Timed, StepError>>> = caches
        .iter_mut()
        .map(|cache| {
            cache.as_mut().map(|cache| {
                cache.fork(decode.seq, FORK)?;
                cache.watch(Watch::Nothing, Some(clock.timer()));
                let depth = cache.len(FORK)? as usize;
                Ok(Timed {
                    depth,
                    ..Timed::default()
                })
            })
        })
        .collect();
    for (i, &token) in decode.tokens.iter().enumerate() {
        for (cache, timed) in caches.iter_mut().zip(&mut all) {
            let (Some(cache), Some(Ok(t))) = (cache.as_mut(), timed.as_mut()) else {
                continue;
            };
            match step(model, clock, cache, token) {
                Ok(_) if i == 0 && decode.tokens.len() > 1 => {
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
    for (cache, timed) in caches.iter().zip(&mut all) {
        if let (Some(cache), Some(Ok(t))) = (cache, timed.as_mut()) {
            t.attend_ms = cache.attended().as_secs_f64() * 1e3;
        }
    }
    for (cache, timed) in caches.into_iter().zip(&mut all) {
        if let (Some(cache), Some(Ok(_))) = (cache, timed.as_ref())
            && let Err(e) = cache.release(FORK)
        {
            *timed = Some(Err(e.into()));
        }
    }
    all
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
