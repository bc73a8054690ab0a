//! Questions on a stored cache: the context is read exactly and compressed, then each way on from it is a fork.
//!
//! Invariants: every scored token's query attends through the compressed cache, the one that predicts an answer's first
//! token too; all options of a question and all strategies share the steps, which changes no bit; the reference is a
//! cache of f32 rows on the same tokens; forks are gone when a question is done, so questions can't see each other.

use super::lockstep::{EvalError, Lockstep, Outcome, Outcomes, Runner, SEQ, each};
use super::reading::{Reading, needs_of};
use crate::cache::strategy::Strategy;
use crate::cache::{CacheError, Continuation, KvCache, SeqId};
use crate::engine::fleet::{Leg, Voyage, sail_all};
use crate::engine::sampler::Sampler;
use crate::model::transformer::Hidden;

/// One way on from the context.
#[derive(Debug, Clone, Copy)]
pub struct Branch<'a> {
    /// Tokens read first, at least one; the last one predicts the target's first.
    pub query: &'a [u32],
    /// Tokens scored, at least one.
    pub target: &'a [u32],
}

/// How texts are generated.
#[derive(Clone, Copy)]
pub struct Generation<'a> {
    /// Most tokens.
    pub max_tokens: usize,
    /// How a token is chosen.
    pub sampler: Sampler,
    /// Whether an answer is over.
    pub is_over: &'a (dyn Fn(&[u32]) -> bool + Sync),
}

/// What is asked about one context.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    /// The tokens that are compressed.
    pub context: &'a [u32],
    /// `[question][option]`.
    pub questions: &'a [Vec<Branch<'a>>],
    /// Whether an answer is generated too, after the query of each question's first option.
    pub generation: Option<Generation<'a>>,
}

/// Answers that were generated for one context, without end tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Generated {
    /// By the strategy, a list of tokens for each thing asked.
    pub strategy: Vec<Vec<u32>>,
    /// By the reference.
    pub reference: Vec<Vec<u32>>,
}

/// Hidden rows of each fork; `None` where the strategy stopped.
type Sailed = Option<Vec<Hidden>>;

impl Lockstep<'_> {
    /// Asks all questions of one context. An outcome's tokens are the targets' in order of question, option and token.
    /// `before`: the context read before, whose beginning may be this one's too; replaced by this one.
    ///
    /// # Errors
    /// The reference's; a strategy's own error is its outcome.
    pub fn answer(
        &self,
        entrants: &[(&Strategy, Continuation)],
        asked: Asked<'_>,
        before: &mut Option<Reading>,
    ) -> Result<Outcomes, EvalError> {
        let mut runners: Vec<Result<Runner, EvalError>> = entrants
            .iter()
            .map(|&(strategy, continuation)| {
                let mut runner = self.build(strategy)?;
                runner.continuation = continuation;
                Ok(runner)
            })
            .collect();
        let needs = needs_of(&runners);
        let mut reading = self.read(before.take(), asked.context, needs)?;
        each(&mut runners, |runner| self.compress(runner, &reading.seen));
        let reference = &mut reading.reference;
        let mut generated = vec![Generated::default(); runners.len()];
        for branches in asked.questions {
            self.score_branches(reference, &mut runners, branches, asked.context.len())?;
            let Some((generation, first)) = asked.generation.zip(branches.first()) else {
                continue;
            };
            let start = asked.context.len();
            let (full, others) =
                self.generate(reference, &mut runners, (first.query, start), generation)?;
            let without_end = |mut tokens: Vec<u32>| {
                tokens.retain(|t| !self.model.spec().eos_ids.contains(t));
                tokens
            };
            let full = without_end(full);
            for (into, tokens) in generated.iter_mut().zip(others) {
                into.strategy.push(without_end(tokens));
                into.reference.push(full.clone());
            }
        }
        *before = Some(reading);
        let outcomes = self.collect(runners, vec![None; entrants.len()], None);
        Ok(outcomes
            .into_iter()
            .zip(generated)
            .map(|(outcome, generated)| {
                Ok(Outcome {
                    generated,
                    ..outcome?
                })
            })
            .collect())
    }

    pub(super) fn score_branches(
        &self,
        reference: &mut Runner,
        runners: &mut [Result<Runner, EvalError>],
        branches: &[Branch<'_>],
        start: usize,
    ) -> Result<(), EvalError> {
        let tokens: Vec<Vec<u32>> = branches
            .iter()
            .map(|b| [b.query, &b.target[..b.target.len() - 1]].concat())
            .collect();
        let forks: Vec<(SeqId, &[u32])> = (1..)
            .map(SeqId)
            .zip(tokens.iter().map(Vec::as_slice))
            .collect();
        fork(&mut reference.cache, &forks)?;
        each(runners, |r| Ok(fork(&mut r.cache, &forks)?));
        let (full, hidden) = self.sail(reference, runners, &forks, start)?;
        each(runners, |r| {
            r.note_fetched();
            Ok(())
        });
        release(&mut reference.cache, &forks)?;
        each(runners, |r| Ok(release(&mut r.cache, &forks)?));
        let targets: Vec<u32> = branches.iter().flat_map(|b| b.target).copied().collect();
        let hidden: Vec<Option<Hidden>> = hidden
            .into_iter()
            .map(|h| h.map(|legs| scored_rows(&legs, branches)))
            .collect();
        self.score_rows(&scored_rows(&full, branches), runners, &hidden, &targets);
        Ok(())
    }

    /// Feeds each fork its tokens, in all caches together. `start`: the forks' length before.
    fn sail(
        &self,
        reference: &mut Runner,
        runners: &mut [Result<Runner, EvalError>],
        forks: &[(SeqId, &[u32])],
        start: usize,
    ) -> Result<(Vec<Hidden>, Vec<Sailed>), EvalError> {
        let legs = || {
            let leg = |&(seq, tokens)| Leg { seq, start, tokens };
            forks.iter().map(leg).collect()
        };
        let voyages = std::iter::once(reference)
            .chain(runners.iter_mut().flatten())
            .map(|r| Voyage {
                cache: &mut r.cache,
                legs: legs(),
                chunk: r.chunk,
            });
        let mut sailed = sail_all(self.model, voyages.collect())?.into_iter();
        let full = sailed.next().transpose()?.unwrap_or_default();
        let others = runners
            .iter_mut()
            .map(|runner| {
                runner.as_ref().ok()?;
                match sailed.next()? {
                    Ok(hidden) => Some(hidden),
                    Err(e) => {
                        *runner = Err(e.into());
                        None
                    }
                }
            })
            .collect();
        Ok((full, others))
    }

    /// Texts after `query`: the reference's, and each runner's (empty where it stopped).
    pub(super) fn generate(
        &self,
        reference: &mut Runner,
        runners: &mut [Result<Runner, EvalError>],
        (query, start): (&[u32], usize),
        generation: Generation<'_>,
    ) -> Result<(Vec<u32>, Vec<Vec<u32>>), EvalError> {
        let forks = [(SeqId(1), query)];
        fork(&mut reference.cache, &forks)?;
        each(runners, |r| Ok(fork(&mut r.cache, &forks)?));
        let (full, others) = self.sail(reference, runners, &forks, start)?;
        let mut texts = vec![Vec::new(); 1 + runners.len()];
        let mut next: Vec<Option<u32>> = std::iter::once(Some(full))
            .chain(others)
            .map(|h| h.map(|legs| self.choose(&legs, generation, 0)))
            .collect();
        let eos = &self.model.spec().eos_ids;
        loop {
            for (text, next) in texts.iter_mut().zip(&mut next) {
                if let Some(token) = *next {
                    text.push(token);
                    let over = eos.contains(&token)
                        || text.len() == generation.max_tokens
                        || (generation.is_over)(text);
                    *next = (!over).then_some(token);
                }
            }
            if next.iter().all(Option::is_none) {
                break;
            }
            self.decode(
                reference,
                runners,
                (&texts, &mut next),
                (start + query.len(), generation),
            )?;
        }
        release(&mut reference.cache, &forks)?;
        each(runners, |r| Ok(release(&mut r.cache, &forks)?));
        let full = texts.remove(0);
        Ok((full, texts))
    }

    /// One decode step of those that go on; replaces each one's token by the next.
    fn decode(
        &self,
        reference: &mut Runner,
        runners: &mut [Result<Runner, EvalError>],
        (texts, next): (&[Vec<u32>], &mut [Option<u32>]),
        (start, generation): (usize, Generation<'_>),
    ) -> Result<(), EvalError> {
        let mut tokens: Vec<(usize, [u32; 1])> = Vec::new();
        tokens.extend(
            next.iter()
                .enumerate()
                .filter_map(|(i, t)| Some((i, [(*t)?]))),
        );
        let mut caches: Vec<Option<&mut Runner>> = std::iter::once(Some(reference))
            .chain(runners.iter_mut().map(|r| r.as_mut().ok()))
            .collect();
        let voyages = tokens.iter().filter_map(|(i, token)| {
            let runner = caches[*i].take()?;
            Some(Voyage {
                cache: &mut runner.cache,
                legs: vec![Leg {
                    seq: SeqId(1),
                    start: start + texts[*i].len() - 1,
                    tokens: token,
                }],
                chunk: 1,
            })
        });
        let sailed = sail_all(self.model, voyages.collect())?;
        for ((i, _), hidden) in tokens.iter().zip(sailed) {
            match hidden {
                Ok(legs) => next[*i] = Some(self.choose(&legs, generation, texts[*i].len())),
                Err(e) if *i == 0 => return Err(e.into()),
                Err(e) => {
                    next[*i] = None;
                    runners[*i - 1] = Err(e.into());
                }
            }
        }
        Ok(())
    }

    /// The token of a step after the last row.
    fn choose(&self, legs: &[Hidden], generation: Generation<'_>, step: usize) -> u32 {
        let n_vocab = self.model.spec().n_vocab;
        let mut logits = vec![0.0; n_vocab];
        if let Some(hidden) = legs.last() {
            let n = hidden.rows.len() / hidden.n_embd;
            self.model.logits(hidden, n - 1..n, &mut logits);
        }
        let sampler = generation.sampler;
        sampler.pick(&logits, &sampler.noise(step, n_vocab))
    }
}

fn fork(cache: &mut dyn KvCache, forks: &[(SeqId, &[u32])]) -> Result<(), CacheError> {
    forks.iter().try_for_each(|&(to, _)| cache.fork(SEQ, to))
}

fn release(cache: &mut dyn KvCache, forks: &[(SeqId, &[u32])]) -> Result<(), CacheError> {
    forks.iter().try_for_each(|&(seq, _)| cache.release(seq))
}

/// The rows that predict the targets, back to back.
fn scored_rows(legs: &[Hidden], branches: &[Branch<'_>]) -> Hidden {
    let n_embd = legs.first().map_or(0, |h| h.n_embd);
    let rows = legs.iter().zip(branches).flat_map(|(hidden, branch)| {
        let first = (branch.query.len() - 1) * n_embd;
        &hidden.rows[first..first + branch.target.len() * n_embd]
    });
    Hidden {
        rows: rows.copied().collect(),
        n_embd,
    }
}
