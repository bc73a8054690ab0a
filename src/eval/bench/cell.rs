//! One strategy alone in its process: what it holds while it decodes, and at most.
//!
//! Invariant: weights are touched and a small cache has come and gone before the first look, so that what is added to it is
//! the cache, what its work needs beside it, and what the allocator keeps.

use serde::{Deserialize, Serialize};

use super::head::Head;
use super::{BASE, Bench, BenchError, Pool, WARM_UP, Work, on, peak};
use crate::cache::strategy::Strategy;
use crate::cache::{KvCache, MemoryReport};
use crate::engine::{CHUNK, feed, prefill};
use crate::model::transformer::StepError;

/// Memory of a process with one cache. Bytes; `None` where the system does not tell.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Resident before the cache was there.
    pub before_rss_bytes: Option<u64>,
    /// Resident after the last step, the cache still there.
    pub steady_rss_bytes: Option<u64>,
    /// Resident at most since the process started.
    pub peak_rss_bytes: Option<u64>,
    /// The cache.
    pub memory: MemoryReport,
}

impl Cell {
    /// What the process holds beyond its start and the cache's buffers: activations, scratch, what the allocator keeps.
    pub fn beside_bytes(&self) -> Option<i64> {
        let (before, steady) = (self.before_rss_bytes?, self.steady_rss_bytes?);
        Some(steady as i64 - before as i64 - self.memory.resident_bytes() as i64)
    }
}

impl Bench<'_> {
    /// Fills a cache to a depth, decodes `n` tokens and looks at the process.
    ///
    /// # Errors
    /// A strategy that can't be built or breaks down.
    pub fn cell(
        &self,
        strategy: &Strategy,
        depth: usize,
        n: usize,
        pool: Option<&Pool>,
    ) -> Result<Cell, BenchError> {
        let cell = on(pool, || self.held(strategy, depth, n));
        cell.map_err(|source| BenchError {
            strategy: strategy.label.clone(),
            source,
        })
    }

    fn held(&self, strategy: &Strategy, depth: usize, n: usize) -> Result<Cell, StepError> {
        self.decode(&Strategy::bare("f32"), 0, WARM_UP)?;
        let before_rss_bytes = peak::rss_bytes();
        let cache = self.decode(strategy, depth, n)?;
        Ok(Cell {
            before_rss_bytes,
            steady_rss_bytes: peak::rss_bytes(),
            peak_rss_bytes: peak::peak_rss_bytes(),
            memory: cache.memory(),
        })
    }

    fn decode(
        &self,
        strategy: &Strategy,
        depth: usize,
        n: usize,
    ) -> Result<impl KvCache + use<>, StepError> {
        let mut cache = self.cache(strategy)?;
        prefill(self.model, &mut cache, BASE, &self.tokens(0, depth), CHUNK)?;
        let tokens = self.tokens(depth, n);
        let mut head = Head::new(self, Work::Decode, &tokens);
        feed(self.model, &mut cache, BASE, &tokens, 1, |chunk| {
            head.read(chunk.hidden);
            Ok::<(), StepError>(())
        })?;
        Ok(cache)
    }
}
