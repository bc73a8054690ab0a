//! The engine: feeding tokens to a model through a cache.
//!
//! Invariants: names no strategy; what a cache needs ([`crate::cache::Needs`]) is supplied generically, and a chunk is
//! never longer than the cache can take as if decoded. `model/transformer.rs` is the step itself.

pub mod calibrate;
pub mod clock;
pub mod fleet;
pub mod linear_watch;
#[cfg(test)]
pub(crate) mod plain_cache;
pub mod probe;
pub mod repetition;
pub mod sampler;
pub mod scoring_watch;
pub mod stopwatch;
pub mod tape;

use crate::cache::{Batch, CacheError, KvCache, SeqId, Trial};
use crate::compute::cpu::team;
use crate::model::transformer::{Hidden, LanguageModel, StepError};

pub use calibrate::Calibrator;
pub use linear_watch::{LinearWatch, Tally};
pub use probe::Probe;
pub use repetition::RepeatPrompt;
pub use scoring_watch::ScoringWatch;
pub use stopwatch::{Spent, Stopwatch};
pub use tape::{ContextTape, Extras, Recording, TapeError};

/// Tokens of one step when nobody asks for fewer: enough for the linear layers to work at full speed, few enough to keep
/// activations small.
pub const CHUNK: usize = 512;

/// What one chunk of a prefill gave.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// Position of the chunk's first token.
    pub first_position: u32,
    /// The chunk's tokens.
    pub tokens: &'a [u32],
    /// One row per token; [`LanguageModel::logits`] turns rows into logits.
    pub hidden: &'a Hidden,
}

/// One step of one sequence, whose length is `position`; what its cache wants tried out goes with it.
///
/// # Errors
/// Those of the step.
pub fn step(
    model: &dyn LanguageModel,
    cache: &mut dyn KvCache,
    seq: SeqId,
    position: u32,
    tokens: &[u32],
) -> Result<Hidden, StepError> {
    if tokens.len() != 1 || cache.trial(seq) == Trial::Nothing {
        let batch = Batch::single(seq, position..position + tokens.len() as u32);
        return match tokens {
            [_] => team::gathered(|| model.step(&batch, tokens, cache)),
            _ => model.step(&batch, tokens, cache),
        };
    }
    let voyage = fleet::Voyage {
        cache,
        legs: vec![fleet::Leg {
            seq,
            start: position as usize,
            tokens,
        }],
        chunk: 1,
    };
    let mut landed = fleet::sail_all(model, vec![voyage])?;
    Ok(landed.swap_remove(0)?.swap_remove(0))
}

/// Feeds tokens to a sequence, which goes on from where it is, in chunks of at most `chunk` tokens. `each` sees every
/// chunk before the next one begins and may stop by an error.
///
/// # Errors
/// Those of the step and of `each`.
pub fn feed<E: From<StepError>>(
    model: &dyn LanguageModel,
    cache: &mut dyn KvCache,
    seq: SeqId,
    tokens: &[u32],
    chunk: usize,
    mut each: impl FnMut(Chunk<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let first = |e: CacheError| E::from(StepError::from(e));
    let mut position = cache.len(seq).map_err(first)?;
    let mut left = tokens;
    while !left.is_empty() {
        let n = cache.step_limit(seq, chunk).min(left.len());
        let (tokens, later) = left.split_at(n);
        left = later;
        let end = position + tokens.len() as u32;
        let hidden = step(model, cache, seq, position, tokens)?;
        each(Chunk {
            first_position: position,
            tokens,
            hidden: &hidden,
        })?;
        position = end;
    }
    Ok(())
}

/// [`feed`] that keeps nothing but the last chunk's last row: what decoding goes on from. `None` for no tokens.
///
/// # Errors
/// Those of the step.
pub fn prefill(
    model: &dyn LanguageModel,
    cache: &mut dyn KvCache,
    seq: SeqId,
    tokens: &[u32],
    chunk: usize,
) -> Result<Option<Hidden>, StepError> {
    let mut last = None;
    feed(model, cache, seq, tokens, chunk, |chunk| {
        let n = chunk.hidden.n_embd;
        let rows = &chunk.hidden.rows;
        last = Some(Hidden {
            rows: rows[rows.len() - n..].to_vec(),
            n_embd: n,
        });
        Ok::<(), StepError>(())
    })?;
    Ok(last)
}
