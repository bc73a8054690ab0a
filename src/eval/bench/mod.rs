//! Speed of prefill and decode by strategy, depth and threads.
//!
//! Invariants: within a repetition all strategies run the same test in turn, so that a busy moment hits each of them, in one
//! order and in the next repetition in the other (A B, B A); a depth is filled once per strategy by a real prefill through its
//! own cache, and every timed run works on a fork of it; the first repetition is a short one that warms up and is not counted.

pub mod bandwidth;
pub mod cell;
pub mod gate;
mod head;
pub mod peak;
pub mod spread;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rayon::ThreadPool;

use self::head::Head;
use crate::cache::pages::HostStore;
use crate::cache::stage::Calibration;
use crate::cache::stages::Stages;
use crate::cache::strategy::Strategy;
use crate::cache::{
    Admission, CacheError, Geometry, KvCache, Materials, MemoryReport, SeqId, StagedCache,
};
use crate::engine::clock::{Clock, Reading};
use crate::engine::{CHUNK, ScoringWatch, Stopwatch, Tally, feed, prefill};
use crate::model::transformer::{LanguageModel, StepError};

/// The sequence that is filled to a depth, and its fork that a run works on.
const BASE: SeqId = SeqId(0);
const FORK: SeqId = SeqId(1);

/// Tokens of a run that warms up.
const WARM_UP: usize = 16;

/// What a run does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Chunks of up to [`CHUNK`] tokens, logits of the last one.
    Prefill,
    /// One token at a time, logits of each.
    Decode,
    /// Chunks, logits of every token and the likelihood of the next one: what a perplexity costs.
    Score,
    /// As [`Work::Decode`] without a cache: each token takes a prefill of all that is before it, whose rows are then dropped.
    Recompute,
}

/// What is timed. Shown as llama-bench shows it: `pp512`, `tg128 @ d4096`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Test {
    /// What a run does.
    pub work: Work,
    /// Tokens of one run.
    pub n: usize,
    /// Tokens in the cache before.
    pub depth: usize,
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.work {
            Work::Prefill => "pp",
            Work::Decode => "tg",
            Work::Score => "ppl",
            Work::Recompute => "tg",
        };
        write!(f, "{name}{}", self.n)?;
        if self.work == Work::Recompute {
            write!(f, " nocache")?;
        }
        match self.depth {
            0 => Ok(()),
            depth => write!(f, " @ d{depth}"),
        }
    }
}

impl Test {
    /// Tokens of a run: fewer where it warms up, one where each is a whole prefill.
    fn tokens_of(&self, repetition: usize) -> usize {
        match (repetition, self.work) {
            (0, Work::Recompute) => 1,
            (0, _) => self.n.min(WARM_UP),
            _ => self.n,
        }
    }
}

/// Threads of one width.
pub struct Pool {
    /// How many.
    pub n_threads: usize,
    /// They themselves.
    pub pool: ThreadPool,
}

/// Work on a pool's threads.
fn on<T: Send>(pool: Option<&Pool>, work: impl FnOnce() -> T + Send) -> T {
    match pool {
        Some(pool) => pool.pool.install(work),
        None => work(),
    }
}

/// What to measure: every combination of these.
pub struct Schedule<'a> {
    /// What a run does, and its tokens.
    pub tests: &'a [(Work, usize)],
    /// Tokens in the cache before a run, rising.
    pub depths: &'a [usize],
    /// Numbers of threads, rising.
    pub pools: &'a [Pool],
    /// Runs that count, at least one.
    pub repetitions: usize,
    /// The strategy that stands for no cache: it alone runs [`Work::Recompute`], and nothing else. Its rows are those of one step.
    pub no_cache: Option<usize>,
}

/// What the runs work with.
#[derive(Clone, Copy)]
pub struct Bench<'a> {
    /// The model.
    pub model: &'a dyn LanguageModel,
    /// Where the time of its linear layers adds up.
    pub linear: &'a Tally,
    /// Its attention layers, with rotation tables for the deepest run.
    pub geometry: &'a Geometry,
    /// Statistics for strategies that learn.
    pub calibration: Option<&'a Calibration>,
    /// Where the time of retention's scores and choices adds up.
    pub scoring: &'a Arc<Tally>,
    /// Tells the time.
    pub clock: &'a Arc<dyn Clock>,
    /// The prompt; repeated where a run is longer.
    pub text: &'a [u32],
}

/// Where the wall time of the runs that count went.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Parts {
    /// The layers' linear products.
    pub linear: Duration,
    /// The matrix that makes logits, and likelihoods where they are asked for.
    pub head: Duration,
    /// Attention over the stored cache.
    pub attention: Duration,
    /// Storing rows: rotation, encoding, eviction, sealing.
    pub encoding: Duration,
    /// What is left: norms, activations, residuals, embedding rows.
    pub rest: Duration,
    /// The part of `encoding` that retention took, to score rows and to choose among them; threads that do so at the same time each
    /// count, up to all of it.
    pub scoring: Duration,
}

impl Parts {
    /// All of them.
    pub fn total(&self) -> Duration {
        self.linear + self.head + self.attention + self.encoding + self.rest
    }
}

/// One strategy in one test at one number of threads.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Index of the strategy.
    pub strategy: usize,
    /// The test.
    pub test: Test,
    /// Threads.
    pub n_threads: usize,
    /// Time of each run that counts.
    pub runs: Vec<Reading>,
    /// Time from one decoded token to the next, over all runs that count; empty for work that decodes none.
    pub gaps: Vec<Duration>,
    /// Their wall time by part.
    pub parts: Parts,
    /// The cache before a run.
    pub memory: MemoryReport,
    /// Bytes of the cache that one decode step reads, mean over a run; to within one page of a row's 128 positions.
    pub attended_bytes: f64,
    /// Perplexity of the second half of a run that scores, in llama-perplexity's convention.
    pub perplexity: Option<f64>,
    /// Most bytes that the whole process held until the last run's end, those of all strategies' caches included.
    pub peak_rss_bytes: Option<u64>,
}

/// A strategy that can't run.
#[derive(Debug, thiserror::Error)]
#[error("strategy \"{strategy}\": {source}")]
pub struct BenchError {
    /// Its label.
    pub strategy: String,
    /// The reason.
    pub source: StepError,
}

/// One run.
struct Run {
    reading: Reading,
    gaps: Vec<Duration>,
    parts: Parts,
    memory_after: MemoryReport,
    perplexity: Option<f64>,
}

type Cache<'a> = Stopwatch<'a, StagedCache>;

impl<'a> Bench<'a> {
    /// Times all strategies; `done` hears of the tokens that went through the model, decoded ones apart.
    ///
    /// # Errors
    /// A strategy that can't be built or breaks down.
    pub fn run(
        &self,
        strategies: &[&Strategy],
        schedule: &Schedule<'_>,
        done: &mut dyn FnMut(Work, usize),
    ) -> Result<Vec<Measured>, BenchError> {
        let named = |i: usize, e: StepError| BenchError {
            strategy: strategies[i].label.clone(),
            source: e,
        };
        let mut caches = Vec::new();
        for (i, strategy) in strategies.iter().enumerate() {
            let cache = self.cache(strategy).map_err(|e| named(i, e.into()))?;
            caches.push(Stopwatch::new(cache, self.clock.as_ref()));
        }
        let mut all = Vec::new();
        for &depth in schedule.depths {
            let mut memory = Vec::new();
            for (i, cache) in caches.iter_mut().enumerate() {
                if schedule.no_cache != Some(i) {
                    let n = self.fill(cache, schedule, depth).map_err(|e| named(i, e))?;
                    done(Work::Prefill, n);
                }
                memory.push(cache.memory());
            }
            let first = all.len();
            all.extend(rows(schedule, depth, &memory));
            for repetition in 0..=schedule.repetitions {
                let n_rows = all.len() - first;
                for i in 0..n_rows {
                    // Forwards in the odd repetitions, backwards in the even ones; the warm-up goes forwards, too.
                    let is_forward = repetition == 0 || repetition % 2 == 1;
                    let i = if is_forward { i } else { n_rows - 1 - i };
                    let row = &mut all[first + i];
                    let n = row.test.tokens_of(repetition);
                    let mut pools = schedule.pools.iter();
                    let pool = pools.find(|p| p.n_threads == row.n_threads);
                    let (test, cache) = (row.test, &mut caches[row.strategy]);
                    let run = on(pool, || match test.work {
                        Work::Recompute => self.recomputed(cache, depth, n),
                        work => self.once(cache, work, n),
                    });
                    let run = run.map_err(|e| named(row.strategy, e))?;
                    match test.work {
                        Work::Recompute => done(Work::Prefill, n * depth + n * (n + 1) / 2),
                        work => done(work, n),
                    }
                    if repetition > 0 {
                        row.take(run);
                    }
                }
            }
        }
        Ok(all)
    }

    fn cache(&self, strategy: &Strategy) -> Result<StagedCache, CacheError> {
        let materials = Materials {
            geometry: self.geometry,
            calibration: self.calibration,
            backing_dir: None,
        };
        let mut stages = Stages::build(strategy, materials)?;
        if let Some(retain) = stages.retain.take() {
            let (clock, spent) = (Arc::clone(self.clock), Arc::clone(self.scoring));
            stages.retain = Some(Arc::new(ScoringWatch::new(retain, clock, spent)));
        }
        let store = Box::new(HostStore::default());
        let mut cache = StagedCache::from_stages(Arc::new(stages), self.geometry, store)?;
        cache.admit(BASE, Admission::Streaming)?;
        Ok(cache)
    }

    /// Brings a cache to a depth; returns the tokens that it took.
    fn fill(
        &self,
        cache: &mut Cache<'_>,
        schedule: &Schedule<'_>,
        depth: usize,
    ) -> Result<usize, StepError> {
        let at = cache.len(BASE)? as usize;
        let tokens = self.tokens(at, depth.saturating_sub(at));
        on(schedule.pools.last(), || {
            prefill(self.model, cache, BASE, &tokens, CHUNK)
        })?;
        Ok(tokens.len())
    }

    fn tokens(&self, first: usize, n: usize) -> Vec<u32> {
        let text = self.text.iter().cycle();
        text.skip(first % self.text.len())
            .take(n)
            .copied()
            .collect()
    }

    /// One run on a fork, which is gone afterwards.
    fn once(&self, cache: &mut Cache<'_>, work: Work, n: usize) -> Result<Run, StepError> {
        let first = cache.len(BASE)?;
        let tokens = self.tokens(first as usize, n);
        let mut head = Head::new(self, work, &tokens);
        cache.fork(BASE, FORK)?;
        let start = self.start(cache);
        let chunk = if work == Work::Decode { 1 } else { CHUNK };
        feed(self.model, cache, FORK, &tokens, chunk, |chunk| {
            head.read(chunk.hidden);
            Ok::<(), StepError>(())
        })?;
        let run = self.end(cache, start, &head);
        cache.release(FORK)?;
        Ok(run)
    }

    /// One run without a cache: for each of `n` tokens, all before it goes through the model again, on an empty sequence that is
    /// gone afterwards.
    fn recomputed(&self, cache: &mut Cache<'_>, depth: usize, n: usize) -> Result<Run, StepError> {
        let start = self.start(cache);
        let (mut ends, mut spent) = (Vec::new(), Duration::ZERO);
        let tokens = self.tokens(0, depth + n);
        for end in depth + 1..=depth + n {
            let mut head = Head::new(self, Work::Recompute, &tokens[..end]);
            cache.fork(BASE, FORK)?;
            feed(self.model, cache, FORK, &tokens[..end], CHUNK, |chunk| {
                head.read(chunk.hidden);
                Ok::<(), StepError>(())
            })?;
            cache.release(FORK)?;
            ends.extend(head.ends);
            spent += head.spent;
        }
        let mut head = Head::new(self, Work::Recompute, &[]);
        (head.ends, head.spent) = (ends, spent);
        Ok(self.end(cache, start, &head))
    }

    /// Sets all watches to zero and reads the clock.
    fn start(&self, cache: &mut Cache<'_>) -> Reading {
        cache.take();
        self.linear.take();
        self.scoring.take();
        self.clock.read()
    }

    /// What the watches say at the end of a run.
    fn end(&self, cache: &mut Cache<'_>, start: Reading, head: &Head<'_>) -> Run {
        let reading = self.clock.read().since(start);
        let (spent, linear) = (cache.take(), self.linear.take());
        let (attention, encoding) = (spent.attend, spent.append + spent.commit);
        let timed = linear + head.spent + attention + encoding;
        let starts = std::iter::once(&start.wall).chain(&head.ends);
        let gaps = head
            .ends
            .iter()
            .zip(starts)
            .map(|(end, start)| end.saturating_sub(*start));
        Run {
            reading,
            gaps: gaps.collect(),
            parts: Parts {
                linear,
                head: head.spent,
                attention,
                encoding,
                rest: reading.wall.saturating_sub(timed),
                scoring: self.scoring.take().min(encoding),
            },
            memory_after: cache.memory(),
            perplexity: head.perplexity(),
        }
    }
}

impl Measured {
    fn take(&mut self, run: Run) {
        self.runs.push(run.reading);
        if matches!(self.test.work, Work::Decode | Work::Recompute) {
            self.gaps.extend(run.gaps);
        }
        self.perplexity = run.perplexity;
        self.peak_rss_bytes = peak::peak_rss_bytes();
        self.parts.linear += run.parts.linear;
        self.parts.head += run.parts.head;
        self.parts.attention += run.parts.attention;
        self.parts.encoding += run.parts.encoding;
        self.parts.rest += run.parts.rest;
        self.parts.scoring += run.parts.scoring;
        // The fork shares what was there, so that what it added is the growth of one sequence.
        let before = attended(&self.memory) as f64;
        self.attended_bytes = (before + attended(&run.memory_after) as f64) / 2.0;
    }

    /// Tokens per second of wall time, each run's.
    pub fn tokens_per_s(&self) -> Vec<f64> {
        let n = self.test.n as f64;
        self.runs.iter().map(|r| n / r.wall.as_secs_f64()).collect()
    }

    /// Tokens per second of CPU time over all runs; `None` where the system does not tell it.
    pub fn tokens_per_cpu_s(&self) -> Option<f64> {
        let cpu: Duration = self.runs.iter().map(|r| r.cpu).sum();
        let n = (self.test.n * self.runs.len()) as f64;
        (!cpu.is_zero()).then(|| n / cpu.as_secs_f64())
    }
}

/// Rows of one depth in the order in which they run: the strategies of a test next to each other.
fn rows<'s>(
    schedule: &'s Schedule<'_>,
    depth: usize,
    memory: &'s [MemoryReport],
) -> impl Iterator<Item = Measured> + 's {
    schedule.tests.iter().flat_map(move |&(work, n)| {
        schedule.pools.iter().flat_map(move |pool| {
            memory
                .iter()
                .enumerate()
                .filter(move |(i, _)| (schedule.no_cache == Some(*i)) == (work == Work::Recompute))
                .map(move |(strategy, memory)| Measured {
                    strategy,
                    test: Test { work, n, depth },
                    n_threads: pool.n_threads,
                    runs: Vec::new(),
                    gaps: Vec::new(),
                    parts: Parts::default(),
                    memory: *memory,
                    attended_bytes: 0.0,
                    perplexity: None,
                    peak_rss_bytes: None,
                })
        })
    })
}

/// Bytes that a query reads of the cache: rows with their scales, and what it takes to decode them.
fn attended(m: &MemoryReport) -> u64 {
    m.payload_bytes
        + m.scale_bytes
        + m.exact_bytes
        + m.table_bytes
        + m.projection_bytes
        + m.backing_bytes
}

#[cfg(test)]
mod tests;
