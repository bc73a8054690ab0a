//! Base logits in a file: written from one cache, read to judge any other, ours or llama.cpp's.
//!
//! The convention is llama-perplexity's: a text is cut into chunks of `n_ctx` tokens, each evaluated on its own (a BOS token in
//! the place of its first token where the model wants one), and what follows the second half's tokens is scored.
//!
//! Invariant: every scored query attends through the stored cache of its strategy, as if decoded token by token.

pub mod file;
pub mod packed;
pub mod sums;
#[cfg(test)]
mod tests;

use std::path::Path;

pub use file::{Header, LogitsFileError, LogitsReader, LogitsWriter, PackedRows};
pub use sums::{Estimate, Pair, Ranks, Statistics};

use crate::cache::pages::HostStore;
use crate::cache::strategy::Strategy;
use crate::cache::{
    Admission, Built, CacheError, Geometry, KvCache, Materials, SeqId, StagedCache,
};
use crate::engine::{CHUNK, feed};
use crate::model::transformer::{LanguageModel, StepError};

const SEQ: SeqId = SeqId(0);

/// Rows of logits at a time.
const PIECE: usize = 64;

/// What can go wrong between a model and a file of base logits.
#[derive(Debug, thiserror::Error)]
pub enum KldError {
    /// The file.
    #[error(transparent)]
    File(#[from] LogitsFileError),
    /// A strategy's step through the model.
    #[error("{strategy}: {source}")]
    Step {
        /// Its label.
        strategy: String,
        /// What broke down.
        source: StepError,
    },
    /// Logits that are no numbers.
    #[error(
        "{strategy}: chunk {chunk}, position {position}: a logit is not finite; nothing is averaged over it"
    )]
    NonFinite {
        /// The strategy's label.
        strategy: String,
        /// Chunk index.
        chunk: usize,
        /// Position in the chunk.
        position: usize,
    },
    /// The file is another model's.
    #[error(
        "the file has a vocabulary of {file} tokens, the model one of {model}: give the model that the file was made with"
    )]
    Vocabulary {
        /// In the file.
        file: usize,
        /// Of the model.
        model: usize,
    },
    /// Chunks longer than the model's context.
    #[error("chunks have {n_ctx} tokens, the model's context is {limit}")]
    Context {
        /// Tokens of a chunk.
        n_ctx: usize,
        /// The model's.
        limit: usize,
    },
    /// A text too short.
    #[error("the text has {n_tokens} tokens, two chunks of {n_ctx} take {}: give a longer text or a smaller -c", 2 * n_ctx)]
    ShortText {
        /// Its tokens.
        n_tokens: usize,
        /// Tokens of a chunk.
        n_ctx: usize,
    },
    /// A stage that can't be built.
    #[error("{strategy}: {source}")]
    Cache {
        /// Its label.
        strategy: String,
        /// Why not.
        source: CacheError,
    },
}

/// A model that is run over chunks.
#[derive(Clone, Copy)]
pub struct Evaluator<'a> {
    /// The model.
    pub model: &'a dyn LanguageModel,
    /// What stages are built from.
    pub materials: Materials<'a>,
}

/// Refuses chunks that a model can't be given.
///
/// # Errors
/// Another vocabulary, a context that is too short.
pub fn check(header: Header, n_vocab: usize, context_length: usize) -> Result<(), KldError> {
    if header.n_vocab != n_vocab {
        return Err(KldError::Vocabulary {
            file: header.n_vocab,
            model: n_vocab,
        });
    }
    if header.n_ctx > context_length {
        return Err(KldError::Context {
            n_ctx: header.n_ctx,
            limit: context_length,
        });
    }
    Ok(())
}

/// How a text is cut: as many whole chunks as it has, `most` at most.
///
/// # Errors
/// A text of fewer than two chunks.
pub fn cut(
    n_tokens: usize,
    n_ctx: usize,
    n_vocab: usize,
    most: Option<usize>,
) -> Result<Header, KldError> {
    // What llama-perplexity asks for, so that a file it would not write isn't written here.
    if n_tokens < 2 * n_ctx {
        return Err(KldError::ShortText { n_tokens, n_ctx });
    }
    let n_chunks = n_tokens / n_ctx;
    Ok(Header {
        n_ctx,
        n_vocab,
        n_chunks: most.unwrap_or(n_chunks).clamp(1, n_chunks),
    })
}

/// A strategy on its way through chunks.
struct Runner<'a> {
    evaluator: Evaluator<'a>,
    label: &'a str,
    cache: StagedCache,
}

impl<'a> Evaluator<'a> {
    fn runner(self, strategy: &'a Strategy, built: &Built) -> Result<Runner<'a>, KldError> {
        let stages = built.stages(strategy, self.materials);
        let cache = stages.map_err(CacheError::from).and_then(|stages| {
            let geometry: &Geometry = self.materials.geometry;
            StagedCache::from_stages(stages, geometry, Box::new(HostStore::default()))
        });
        let cache = cache.map_err(|source| KldError::Cache {
            strategy: strategy.label.clone(),
            source,
        })?;
        Ok(Runner {
            evaluator: self,
            label: &strategy.label,
            cache,
        })
    }

    /// Writes a file of base logits from a strategy's. `ids`: `header.n_chunks · header.n_ctx` tokens and more; `done` hears of each
    /// chunk.
    ///
    /// # Errors
    /// A step or a write that fails; no file of that name is left then.
    pub fn write(
        self,
        strategy: &'a Strategy,
        (path, header): (&Path, Header),
        ids: &[u32],
        done: &mut dyn FnMut(),
    ) -> Result<f64, KldError> {
        let ids = &ids[..header.n_chunks * header.n_ctx];
        let mut writer = LogitsWriter::create(path, header, ids)?;
        let mut runner = self.runner(strategy, &Built::default())?;
        let mut nll = 0.0;
        for (i, tokens) in ids.chunks_exact(header.n_ctx).enumerate() {
            runner.chunk((i, tokens), header, |_, logits, next| {
                for (row, &next) in logits.chunks_exact(header.n_vocab).zip(next) {
                    writer.push(row)?;
                    let max = row.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
                    let log_sum = f64::from(max) + packed::log_sum_exp(row, max);
                    nll += log_sum - f64::from(row[next as usize]);
                }
                Ok(())
            })?;
            done();
        }
        writer.finish()?;
        Ok((nll / (header.n_chunks * header.n_scored()) as f64).exp())
    }

    /// Compares strategies with a file, `most` chunks of it at most: every token's pair, by strategy.
    ///
    /// # Errors
    /// A step or a read that fails.
    pub fn compare(
        self,
        strategies: &'a [Strategy],
        reader: &mut LogitsReader,
        most: usize,
        done: &mut dyn FnMut(),
    ) -> Result<Vec<Vec<Pair>>, KldError> {
        let (header, built) = (reader.header(), Built::default());
        let runners = strategies.iter().map(|s| self.runner(s, &built));
        let mut runners = runners.collect::<Result<Vec<_>, _>>()?;
        let mut pairs = vec![Vec::new(); strategies.len()];
        let mut rows = PackedRows::default();
        for i in 0..header.n_chunks.min(most) {
            reader.next_rows(&mut rows)?;
            for (runner, pairs) in runners.iter_mut().zip(&mut pairs) {
                runner.chunk((i, reader.tokens(i)), header, |first, logits, next| {
                    pairs.extend(sums::compare(logits, next, |i| rows.row(first + i)));
                    Ok(())
                })?;
                done();
            }
        }
        Ok(pairs)
    }
}

impl Runner<'_> {
    /// Runs one chunk. `each`: index of the first scored row, logits `[row][n_vocab]`, the token that follows each.
    fn chunk(
        &mut self,
        (index, tokens): (usize, &[u32]),
        header: Header,
        mut each: impl FnMut(usize, &[f32], &[u32]) -> Result<(), KldError>,
    ) -> Result<(), KldError> {
        let model = self.evaluator.model;
        let step = |source: StepError| KldError::Step {
            strategy: self.label.to_owned(),
            source,
        };
        let mut fed = tokens.to_vec();
        if let (true, Some(bos)) = (model.spec().add_bos, model.spec().bos_id) {
            fed[0] = bos;
        }
        let first_scored = header.first_scored();
        let scored = first_scored..header.n_ctx - 1;
        let mut logits = Vec::new();
        let admitted = self.cache.admit(SEQ, Admission::Streaming);
        admitted.map_err(|e| step(e.into()))?;
        let result = feed(model, &mut self.cache, SEQ, &fed, CHUNK, |chunk| {
            let first = chunk.first_position as usize;
            let from = scored.start.max(first);
            let end = scored.end.min(first + chunk.tokens.len());
            for from in (from..end).step_by(PIECE) {
                let rows = from..end.min(from + PIECE);
                logits.resize(rows.len() * header.n_vocab, 0.0);
                let hidden = rows.start - first..rows.end - first;
                model.logits(chunk.hidden, hidden, &mut logits);
                if let Some(i) = logits.iter().position(|x| !x.is_finite()) {
                    return Err(Stop::Kld(KldError::NonFinite {
                        strategy: self.label.to_owned(),
                        chunk: index,
                        position: rows.start + i / header.n_vocab,
                    }));
                }
                let next = &tokens[rows.start + 1..rows.end + 1];
                each(rows.start - first_scored, &logits, next).map_err(Stop::Kld)?;
            }
            Ok(())
        });
        result.map_err(|stop| match stop {
            Stop::Step(source) => step(source),
            Stop::Kld(error) => error,
        })?;
        self.cache.release(SEQ).map_err(|e| step(e.into()))
    }
}

/// Why a chunk ends early.
enum Stop {
    Step(StepError),
    Kld(KldError),
}

impl From<StepError> for Stop {
    fn from(source: StepError) -> Self {
        Stop::Step(source)
    }
}
