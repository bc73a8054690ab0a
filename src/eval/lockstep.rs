//! Reference and strategies on the same tokens, chunk by chunk: the two protocols over one item.
//!
//! Invariants: the reference is a cache of f32 rows in the same process; every scored query attends through the stored
//! cache as decoding would have had it; logits exist for a few rows at a time; a strategy that breaks stops alone.
//!
//! `stream`: tokens 0 … n−2 of a window are queries, token i+1 is the target of query i.
//! `compress-once`: the context is read exactly and compressed; then the continuation's tokens are queries, each with the
//! next one as its target. The continuation's first token is no target: the query that predicts it is the context's last
//! one, and that one never reads the compressed cache.

use std::path::PathBuf;

use super::answers::Generated;
use super::drift::{Reference, TokenScore};
use super::floor::{self, Floor};
use super::generate::Written;
use super::layers::LayerRecord;
use super::reading::{Reading, Seen, needs_of};
use super::records::{LatencyRecord, MemoryRecord, TrafficRecord};
use crate::cache::pages::HostStore;
use crate::cache::sparse::Watch;
use crate::cache::stage::Calibration;
use crate::cache::strategy::Strategy;
use crate::cache::{
    Admission, Batch, Built, CacheError, Continuation, Geometry, KvCache, Materials, SeqId,
    StagedCache, Traffic,
};
use crate::engine::clock::Clock;
use crate::engine::fleet::{Member, feed_all};
use crate::engine::{RepeatPrompt, TapeError};
use crate::model::transformer::{Hidden, LanguageModel, StepError};

/// Rows whose logits exist at a time: full tiles for the output matrix, 13 MB for 50,000 words.
const ROWS: usize = 64;

/// The one sequence of an item.
pub(super) const SEQ: SeqId = SeqId(0);

/// What all items of a run share.
#[derive(Clone, Copy)]
pub struct Lockstep<'a> {
    /// The model.
    pub model: &'a dyn LanguageModel,
    /// Its attention layers, with rotation tables long enough for an item and its timed steps.
    pub geometry: &'a Geometry,
    /// Statistics for stages that learn.
    pub calibration: Option<&'a Calibration>,
    /// Where backing files go.
    pub backing_dir: Option<&'a PathBuf>,
    /// What was built for earlier items from the same geometry, statistics and directory.
    pub built: &'a Built,
    /// Tokens of a step. Changes no score, no row and no stored row's bytes; page tables keep the room they once needed.
    pub chunk: usize,
    /// Time.
    pub clock: &'a dyn Clock,
    /// What asks the model to repeat a context, for strategies that watch it do so.
    pub repeat: Option<&'a RepeatPrompt>,
    /// Decode steps to time; 0: none.
    pub latency_steps: usize,
    /// Tokens between two records of memory along what is scored; 0: none. Steps end there, which changes no score.
    pub memory_every: usize,
    /// Queries with which a compressed context is held against the exact one, layer by layer; 0: none.
    pub layer_queries: usize,
}

/// What one strategy gave on one item.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Scored tokens in order.
    pub tokens: Vec<TokenScore>,
    /// The live cache: see [`super::records::ItemRecord::memory`].
    pub memory: Vec<MemoryRecord>,
    /// The live cache along what is scored: see [`super::records::ItemRecord::memory_track`].
    pub memory_track: Vec<MemoryRecord>,
    /// The compressed context beside the exact one, by layer, where asked for.
    pub layers: Vec<LayerRecord>,
    /// Times, where asked for.
    pub latency: Option<LatencyRecord>,
    /// What its tokens read and moved, where they don't read all that is stored.
    pub traffic: Option<TrafficRecord>,
    /// Σ −ln p with the context dropped, where asked for.
    pub nll_floor: Option<f64>,
    /// Tokens of a step as used.
    pub chunk: usize,
    /// Answers, where they are asked for.
    pub generated: Generated,
    /// Texts, where they are.
    pub written: Option<Written>,
}

/// Why a strategy, or the reference, stopped.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// The model or the cache.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The cache, outside a step.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The context could not be replayed.
    #[error(transparent)]
    Tape(#[from] TapeError),
}

/// Per strategy, in the order given: its outcome, or why it stopped.
pub type Outcomes = Vec<Result<Outcome, EvalError>>;

/// A strategy on its way through an item.
pub(super) struct Runner {
    pub(super) cache: StagedCache,
    pub(super) chunk: usize,
    /// What becomes of rows that are scored; in a stream, all are the strategy's.
    pub(super) continuation: Continuation,
    tokens: Vec<TokenScore>,
    memory: Vec<MemoryRecord>,
    memory_track: Vec<MemoryRecord>,
    pub(super) layers: Vec<LayerRecord>,
    traffic: Option<TrafficRecord>,
    /// The most bytes of rows that came back, as far as they were noted.
    fetched_bytes: u64,
    pub(super) compress_ms: f64,
    pub(super) repetition_ms: f64,
}

impl Runner {
    fn measure(&self) -> Result<MemoryRecord, EvalError> {
        Ok(MemoryRecord {
            n_tokens: self.cache.len(SEQ)? as usize,
            report: self.cache.memory(),
        })
    }

    fn remember(&mut self) -> Result<(), EvalError> {
        let record = self.measure()?;
        self.memory.push(record);
        Ok(())
    }

    /// Rows of an exact continuation are no part of the strategy: there is nothing to follow.
    fn remember_end(&mut self) -> Result<(), EvalError> {
        match self.continuation {
            Continuation::Strategy => self.remember(),
            Continuation::Exact => Ok(()),
        }
    }

    pub(super) fn note_traffic(&mut self, part: fn(&mut TrafficRecord) -> &mut Traffic) {
        if let Some(traffic) = self.cache.traffic() {
            *part(self.traffic.get_or_insert_default()) = traffic;
        }
    }

    /// Rows that come back are none of them here yet at the compression point: their bytes are added when they are.
    pub(super) fn note_fetched(&mut self) {
        let n_bytes = self.cache.fetched_bytes();
        if let Some(point) = self.memory.first_mut() {
            point.report.exact_bytes += n_bytes.saturating_sub(self.fetched_bytes);
        }
        self.fetched_bytes = self.fetched_bytes.max(n_bytes);
    }

    fn follow(&mut self) -> Result<(), EvalError> {
        if self.continuation == Continuation::Strategy {
            let record = self.measure()?;
            self.memory_track.push(record);
        }
        Ok(())
    }
}

impl<'a> Lockstep<'a> {
    /// `stream` over one window of token ids.
    ///
    /// # Errors
    /// The reference's; a strategy's own error is its outcome.
    pub fn stream(&self, strategies: &[&Strategy], ids: &[u32]) -> Result<Outcomes, EvalError> {
        let mut reference = self.build(&Strategy::bare("f32"))?;
        reference.cache.admit(SEQ, Admission::Streaming)?;
        let mut runners: Vec<Result<Runner, EvalError>> = strategies
            .iter()
            .map(|s| {
                let mut runner = self.build(s)?;
                runner.cache.admit(SEQ, Admission::Streaming)?;
                Ok(runner)
            })
            .collect();
        let prefill_ms = self.score(&mut reference, &mut runners, ids, 0)?;
        each(&mut runners, Runner::remember);
        let first: Vec<u32> = ids
            .iter()
            .copied()
            .cycle()
            .take(self.latency_steps)
            .collect();
        let first = vec![first.as_slice(); runners.len()];
        let latencies = self.time(&mut runners, &first, prefill_ms);
        Ok(self.collect(runners, latencies, None))
    }

    /// `compress-once` over one document: `ids` are the context's tokens and then the continuation's. Each strategy
    /// comes with what becomes of its continuation's rows; context and reference are computed once for all.
    ///
    /// # Errors
    /// The reference's; a strategy's own error is its outcome.
    pub fn compress_once(
        &self,
        entrants: &[(&Strategy, Continuation)],
        ids: &[u32],
        context: usize,
        floor: Floor,
    ) -> Result<Outcomes, EvalError> {
        let build = |strategy: &Strategy, continuation| {
            let runner = self.build(strategy)?;
            Ok(Runner {
                continuation,
                ..runner
            })
        };
        let mut runners: Vec<Result<Runner, EvalError>> =
            entrants.iter().map(|&(s, c)| build(s, c)).collect();
        if floor == Floor::Run {
            runners.push(build(&floor::strategy(), Continuation::Exact));
        }
        let start = self.clock.read();
        let Reading {
            mut reference,
            seen,
            ..
        } = self.read(None, &ids[..context], needs_of(&runners))?;
        let prefill_ms = self.clock.read().since(start).wall_ms() - seen.repetition_ms;
        let n = entrants.len();
        each(&mut runners, |runner| self.compress(runner, &seen));
        self.compare_layers(
            &mut reference,
            &mut runners[..n],
            &seen.tape,
            &ids[context..],
        )?;
        drop(seen);
        let timed = &ids[context..][..self.latency_steps.min(ids.len() - context)];
        let latencies = self.time(&mut runners[..n], &vec![timed; n], prefill_ms);
        self.score(&mut reference, &mut runners, ids, context)?;
        each(&mut runners, Runner::remember_end);
        let floor = runners.drain(n..).next().transpose()?;
        let nll_floor = floor.map(|f| f.tokens.iter().map(|t| t.nll).sum());
        Ok(self.collect(runners, latencies, nll_floor))
    }

    pub(super) fn build(&self, strategy: &Strategy) -> Result<Runner, EvalError> {
        let materials = Materials {
            geometry: self.geometry,
            calibration: self.calibration,
            backing_dir: self.backing_dir,
        };
        let stages = self
            .built
            .stages(strategy, materials)
            .map_err(CacheError::from)?;
        let store = Box::new(HostStore::default());
        let cache = StagedCache::from_stages(stages, self.geometry, store)?;
        Ok(self.runner(cache))
    }

    /// A cache at the start of its way.
    pub(super) fn runner(&self, cache: StagedCache) -> Runner {
        let chunk = self
            .chunk
            .min(cache.needs().max_chunk.unwrap_or(usize::MAX))
            .max(1);
        Runner {
            cache,
            chunk,
            continuation: Continuation::Strategy,
            tokens: Vec::new(),
            memory: Vec::new(),
            memory_track: Vec::new(),
            layers: Vec::new(),
            traffic: None,
            fetched_bytes: 0,
            compress_ms: 0.0,
            repetition_ms: 0.0,
        }
    }

    /// Replays the context into a strategy's cache and compresses it.
    pub(super) fn compress(&self, runner: &mut Runner, seen: &Seen) -> Result<(), EvalError> {
        let start = self.clock.read();
        runner.cache.admit(SEQ, Admission::Context)?;
        seen.tape.replay(&mut runner.cache, SEQ, self.chunk)?;
        let needs = runner.cache.needs().context;
        if needs.any() {
            runner.cache.show(SEQ, &seen.layers())?;
        }
        runner.cache.compress(SEQ, runner.continuation)?;
        runner.compress_ms = self.clock.read().since(start).wall_ms();
        if needs.repetition {
            runner.repetition_ms = seen.repetition_ms;
        }
        runner.remember()?;
        match self.memory_every {
            0 => Ok(()),
            _ => runner.follow(),
        }
    }

    /// Feeds `ids[from..]` to all and scores every query that has a next token. Returns the reference's time, ms.
    fn score(
        &self,
        reference: &mut Runner,
        runners: &mut [Result<Runner, EvalError>],
        ids: &[u32],
        from: usize,
    ) -> Result<f64, EvalError> {
        watch(runners);
        let mut reference_ms = 0.0;
        let mut at = from;
        while at < ids.len() {
            let end = self.step_end(at).min(ids.len());
            let start = self.clock.read();
            let full = self.feed(reference, ids, at..end)?;
            reference_ms += self.clock.read().since(start).wall_ms();
            let hidden = self.feed_all(runners, ids, at..end)?;
            let n_scored = end.min(ids.len() - 1) - at;
            self.score_rows(&full, runners, &hidden, &ids[at + 1..at + 1 + n_scored]);
            if self.memory_every > 0 && end.is_multiple_of(self.memory_every) {
                each(runners, Runner::follow);
            }
            at = end;
        }
        each(runners, |r| {
            r.note_traffic(|record| &mut record.scored);
            r.note_fetched();
            Ok(())
        });
        Ok(reference_ms)
    }

    /// Where a step from `at` ends: a chunk later, or at the next position at which memory is measured.
    fn step_end(&self, at: usize) -> usize {
        match self.memory_every {
            0 => at + self.chunk,
            every => (at + self.chunk).min((at + 1).next_multiple_of(every)),
        }
    }

    /// One chunk through the model, in steps that the cache allows.
    fn feed(
        &self,
        runner: &mut Runner,
        ids: &[u32],
        range: std::ops::Range<usize>,
    ) -> Result<Hidden, EvalError> {
        let mut all = Hidden {
            rows: Vec::new(),
            n_embd: self.model.spec().n_embd,
        };
        let mut at = range.start;
        while at < range.end {
            let n = runner.cache.step_limit(SEQ, runner.chunk);
            let end = (at + n).min(range.end);
            let batch = Batch::single(SEQ, at as u32..end as u32);
            all.rows.extend(
                self.model
                    .step(&batch, &ids[at..end], &mut runner.cache)?
                    .rows,
            );
            at = end;
        }
        Ok(all)
    }

    /// One chunk through the model for all strategies that still run, their rows in the same steps.
    fn feed_all(
        &self,
        runners: &mut [Result<Runner, EvalError>],
        ids: &[u32],
        range: std::ops::Range<usize>,
    ) -> Result<Vec<Option<Hidden>>, EvalError> {
        let members = runners.iter_mut().flatten().map(|r| Member {
            cache: &mut r.cache,
            seq: SEQ,
            chunk: r.chunk,
        });
        let mut fed = feed_all(self.model, members.collect(), ids, range)?.into_iter();
        let each = runners.iter_mut().map(|runner| {
            runner.as_ref().ok()?;
            match fed.next()? {
                Ok(hidden) => Some(hidden),
                Err(e) => {
                    *runner = Err(e.into());
                    None
                }
            }
        });
        Ok(each.collect())
    }

    pub(super) fn score_rows(
        &self,
        full: &Hidden,
        runners: &mut [Result<Runner, EvalError>],
        hidden: &[Option<Hidden>],
        targets: &[u32],
    ) {
        let n_vocab = self.model.spec().n_vocab;
        let mut full_logits = vec![0.0; ROWS.min(targets.len()) * n_vocab];
        let mut logits = full_logits.clone();
        for (i, targets) in targets.chunks(ROWS).enumerate() {
            let rows = i * ROWS..i * ROWS + targets.len();
            let n = targets.len() * n_vocab;
            self.model.logits(full, rows.clone(), &mut full_logits[..n]);
            let reference = Reference::new(&full_logits[..n], n_vocab);
            for (runner, hidden) in runners.iter_mut().zip(hidden) {
                if let (Ok(runner), Some(hidden)) = (runner, hidden) {
                    self.model.logits(hidden, rows.clone(), &mut logits[..n]);
                    runner.tokens.extend(reference.score(&logits[..n], targets));
                }
            }
        }
    }

    pub(super) fn collect(
        &self,
        runners: Vec<Result<Runner, EvalError>>,
        latencies: Vec<Option<LatencyRecord>>,
        nll_floor: Option<f64>,
    ) -> Outcomes {
        runners
            .into_iter()
            .zip(latencies)
            .map(|(runner, latency)| {
                let r = runner?;
                Ok(Outcome {
                    tokens: r.tokens,
                    memory: r.memory,
                    memory_track: r.memory_track,
                    layers: r.layers,
                    traffic: r.traffic,
                    latency,
                    nll_floor,
                    chunk: r.chunk,
                    generated: Generated::default(),
                    written: None,
                })
            })
            .collect()
    }
}

/// Starts counting what decoded tokens read and move.
pub(super) fn watch(runners: &mut [Result<Runner, EvalError>]) {
    each(runners, |r| {
        r.cache.watch(Watch::Hits, None);
        Ok(())
    });
}

pub(super) fn each(
    runners: &mut [Result<Runner, EvalError>],
    work: impl Fn(&mut Runner) -> Result<(), EvalError>,
) {
    for runner in runners {
        if let Ok(r) = runner
            && let Err(e) = work(r)
        {
            *runner = Err(e);
        }
    }
}
