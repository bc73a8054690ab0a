//! Speed of prefill and decode by strategy, depth and threads.
//!
//! Invariants: within a repetition all strategies run the same test in turn, so that a busy moment hits each of them; a
//! depth is filled once per strategy by a real prefill through its own cache, and every timed run works on a fork of it;
//! the first repetition is a short one that warms up and is not counted.

pub mod bandwidth;
pub mod gate;
mod head;
pub mod peak;

use std::fmt;
use std::time::Duration;

use rayon::ThreadPool;

use self::head::Head;
use crate::cache::stage::Calibration;
use crate::cache::strategy::Strategy;
use crate::cache::{
    Admission, CacheError, Geometry, KvCache, Materials, MemoryReport, SeqId, StagedCache,
};
use crate::engine::clock::{Clock, Reading};
use crate::engine::{CHUNK, Stopwatch, Tally, feed, prefill};
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
        };
        write!(f, "{name}{}", self.n)?;
        match self.depth {
            0 => Ok(()),
            depth => write!(f, " @ d{depth}"),
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
    /// Tells the time.
    pub clock: &'a dyn Clock,
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
            caches.push(Stopwatch::new(cache, self.clock));
        }
        let mut all = Vec::new();
        for &depth in schedule.depths {
            let mut memory = Vec::new();
            for (i, cache) in caches.iter_mut().enumerate() {
                let n = self.fill(cache, schedule, depth).map_err(|e| named(i, e))?;
                done(Work::Prefill, n);
                memory.push(cache.memory());
            }
            let first = all.len();
            all.extend(rows(schedule, depth, &memory));
            for repetition in 0..=schedule.repetitions {
                for row in &mut all[first..] {
                    let (i, n) = (row.strategy, row.test.n);
                    let n = if repetition == 0 { n.min(WARM_UP) } else { n };
                    let mut pools = schedule.pools.iter();
                    let pool = pools.find(|p| p.n_threads == row.n_threads);
                    let cache = &mut caches[i];
                    let run = on(pool, || self.once(cache, row.test.work, n));
                    let run = run.map_err(|e| named(i, e))?;
                    done(row.test.work, n);
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
        let mut cache = StagedCache::new(strategy, materials)?;
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
        cache.take();
        self.linear.take();
        let start = self.clock.read();
        let chunk = if work == Work::Decode { 1 } else { CHUNK };
        feed(self.model, cache, FORK, &tokens, chunk, |chunk| {
            head.read(chunk.hidden);
            Ok::<(), StepError>(())
        })?;
        let reading = self.clock.read().since(start);
        let (spent, linear) = (cache.take(), self.linear.take());
        let memory_after = cache.memory();
        cache.release(FORK)?;
        let (attention, encoding) = (spent.attend, spent.append + spent.commit);
        let timed = linear + head.spent + attention + encoding;
        let parts = Parts {
            linear,
            head: head.spent,
            attention,
            encoding,
            rest: reading.wall.saturating_sub(timed),
        };
        Ok(Run {
            reading,
            parts,
            memory_after,
            perplexity: head.perplexity(),
        })
    }
}

impl Measured {
    fn take(&mut self, run: Run) {
        self.runs.push(run.reading);
        self.perplexity = run.perplexity;
        self.peak_rss_bytes = peak::peak_rss_bytes();
        self.parts.linear += run.parts.linear;
        self.parts.head += run.parts.head;
        self.parts.attention += run.parts.attention;
        self.parts.encoding += run.parts.encoding;
        self.parts.rest += run.parts.rest;
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
                .map(move |(strategy, memory)| Measured {
                    strategy,
                    test: Test { work, n, depth },
                    n_threads: pool.n_threads,
                    runs: Vec::new(),
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
