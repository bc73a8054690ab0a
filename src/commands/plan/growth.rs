//! How a strategy's bytes grow with the sequence: measured on one KV head of each kind of layer, then counted.
//!
//! Invariants: every byte comes from a live cache that was filled with random rows. What is counted instead of filled is
//! what repeats: heads and layers of one kind hold equal buffers, and past the transients (windows, tail, sinks) a cache grows by
//! the same bytes every [`PERIOD`] tokens, which is checked where it is used: [`Growth::exact`]. A strategy whose layers
//! depend on each other is filled whole.

use std::collections::BTreeMap;

use anyhow::bail;

use crate::cache::project::aqua;
use crate::cache::strategy::Strategy;
use crate::cache::{Admission, KvCache, MemoryReport, RANGE, Rebuilt};
use crate::commands::bytes;
use crate::config::is_calibrated;
use crate::model::shape::{CacheShape, LayerShape, Stored, stand_in};

/// Tokens after which page tables, pages and groups are all where they were: 16 pages.
const PERIOD: usize = 16 * RANGE;

/// Values of a cache that is filled whole, at most: half a GiB of f32.
const MOST_VALUES: u64 = 1 << 27;

/// Bytes of one sequence by its length.
pub struct Growth {
    kinds: Vec<Kind>,
    /// Tables and projections, which all sequences share.
    shared: MemoryReport,
    /// Tokens that were really stored, at most; longer sequences are counted.
    pub n_measured: usize,
    /// Two periods after each other grew by equal bytes in every part: counting loses nothing.
    pub exact: bool,
}

/// The measured caches of one kind of layer.
struct Kind {
    /// Heads over all layers of the kind.
    n_heads: u64,
    /// One head's bytes by tokens.
    at: BTreeMap<usize, MemoryReport>,
    /// From here on a period is like the next.
    settled: usize,
}

impl Growth {
    /// Measures a strategy for a model; `n_tokens` is the length that will be asked for beside whole pages.
    ///
    /// # Errors
    /// A strategy that can't be built for the model's heads, or whose layers must be filled whole and are too many.
    pub fn measure(
        strategy: &Strategy,
        shape: &CacheShape,
        n_tokens: usize,
    ) -> anyhow::Result<Self> {
        if strategy.budget.is_some() || aqua::of(strategy).is_some() {
            return whole(strategy, shape, n_tokens);
        }
        let mut shared = MemoryReport::default();
        let mut kinds = Vec::new();
        for (layer, n_layers) in shape.kinds() {
            let strategy = &stored_sides(strategy, layer);
            add(&mut shared, &shared_parts(strategy, layer, n_layers)?);
            let n_heads = n_layers * layer.n_kv_heads as u64;
            kinds.push(Kind::measure(strategy, layer, n_heads, n_tokens)?);
        }
        let n_measured = kinds.iter().map(Kind::last).max().unwrap_or(0);
        Ok(Self {
            exact: kinds.iter().all(Kind::is_periodic),
            kinds,
            shared,
            n_measured,
        })
    }

    /// Bytes of `n_sequences` sequences of `n_tokens`; those are whole pages, or the length that was asked for.
    pub fn at(&self, n_tokens: usize, n_sequences: u64) -> MemoryReport {
        let mut all = self.shared;
        for kind in &self.kinds {
            add(
                &mut all,
                &scaled(&kind.at(n_tokens), kind.n_heads * n_sequences),
            );
        }
        all
    }

    /// Bytes that one more token of one sequence adds, mean over a period past all transients; `None` where only one
    /// length was filled.
    pub fn marginal_bytes(&self) -> Option<f64> {
        let mut sum = 0.0;
        for kind in &self.kinds {
            let end = kind.last() / RANGE * RANGE;
            let (last, before) = (kind.at.get(&end)?, kind.at.get(&end.checked_sub(PERIOD)?)?);
            let grown = last.stored_bytes() as f64 - before.stored_bytes() as f64;
            sum += grown * kind.n_heads as f64 / PERIOD as f64;
        }
        Some(sum)
    }

    /// Whether other lengths than the one that was asked for are known.
    pub fn is_curve(&self) -> bool {
        self.kinds.iter().all(|k| k.at.len() > 1)
    }
}

impl Kind {
    fn measure(
        strategy: &Strategy,
        layer: LayerShape,
        n_heads: u64,
        n_tokens: usize,
    ) -> anyhow::Result<Self> {
        let head = LayerShape {
            n_kv_heads: 1,
            ..layer
        };
        let transient =
            layer.window.unwrap_or(0) + strategy.tail.k.max(strategy.tail.v) + strategy.sinks;
        let mut settled = (transient + 1).next_multiple_of(PERIOD);
        loop {
            let end = settled + 2 * PERIOD;
            let mut lengths: Vec<usize> = (1..=end / RANGE).map(|i| i * RANGE).collect();
            lengths.extend(asked(n_tokens, settled));
            lengths.sort_unstable();
            lengths.dedup();
            let geometry = stand_in(head, 1, end);
            let (_, reports) = bytes::fill_to(strategy, &geometry, Admission::Streaming, &lengths)?;
            let reports = reports.into_iter().map(|r| one_head(r, layer));
            let kind = Self {
                n_heads,
                at: lengths.into_iter().zip(reports).collect(),
                settled,
            };
            // A retention that has dropped nothing yet has not settled.
            let full = |m: &MemoryReport| m.rows_live == m.rows_seen;
            if strategy.retain.is_none()
                || end >= n_tokens
                || !kind.at.get(&settled).is_some_and(full)
            {
                return Ok(kind);
            }
            settled *= 2;
        }
    }

    fn last(&self) -> usize {
        self.at.last_key_value().map_or(0, |(n, _)| *n)
    }

    /// Bytes of a head, counted on from the last period where the length was not filled.
    fn at(&self, n_tokens: usize) -> MemoryReport {
        if let Some(report) = self.at.get(&n_tokens) {
            return *report;
        }
        let from = residue(n_tokens, self.settled);
        let both = self.at.get(&from).zip(self.at.get(&(from + PERIOD)));
        let (Some((first, second)), true) = (both, n_tokens > from) else {
            // Lengths between pages are asked for nowhere else: the page before is the nearest that was measured.
            let before = self.at.range(..=n_tokens).next_back();
            return before.map_or_else(MemoryReport::default, |(_, m)| *m);
        };
        let n_periods = ((n_tokens - from) / PERIOD) as i128;
        zip(first, second, |a, b| {
            let bytes = i128::from(a) + n_periods * (i128::from(b) - i128::from(a));
            u64::try_from(bytes).unwrap_or(0)
        })
    }

    /// Whether the last two periods grew by equal bytes in every part.
    fn is_periodic(&self) -> bool {
        self.at.range(self.settled..).all(|(n, first)| {
            let next = self
                .at
                .get(&(n + PERIOD))
                .zip(self.at.get(&(n + 2 * PERIOD)));
            next.is_none_or(|(second, third)| {
                let grown = |a, b| zip(a, b, |a, b| b.wrapping_sub(a));
                grown(first, second) == grown(second, third)
            })
        })
    }
}

/// The lengths that stand for `n_tokens`: itself, or its like in each of the last two periods.
fn asked(n_tokens: usize, settled: usize) -> Vec<usize> {
    let end = settled + 2 * PERIOD;
    if n_tokens <= end {
        return vec![n_tokens];
    }
    let from = residue(n_tokens, settled);
    vec![from, from + PERIOD]
}

/// The length from `settled` on that is whole periods short of `n_tokens`.
fn residue(n_tokens: usize, settled: usize) -> usize {
    settled + n_tokens % PERIOD
}

/// MLA stores one row, which is coded as K is.
fn stored_sides(strategy: &Strategy, layer: LayerShape) -> Strategy {
    let mut one = strategy.clone();
    if layer.stored == Stored::Latent {
        one.encode_v = one.encode_k.clone();
        one.project_v = one.project_k.clone();
        one.tail.v = one.tail.k;
    }
    one
}

/// What one head of a cache of K and V of equal format says of a layer: half, where only one of them is stored.
fn one_head(report: MemoryReport, layer: LayerShape) -> MemoryReport {
    let report = MemoryReport {
        table_bytes: 0,
        projection_bytes: 0,
        ..report
    };
    match layer.stored {
        Stored::KeysAndValues => report,
        // Scores and rows are counted once for both sides already.
        Stored::Latent => MemoryReport {
            index_bytes: report.index_bytes,
            rows_live: report.rows_live,
            rows_seen: report.rows_seen,
            rows_at_level: report.rows_at_level,
            ..zip(&report, &report, |a, _| a.div_ceil(2))
        },
    }
}

/// Tables and projections of all layers of a kind, from one that is built and left empty. A stage that learns has tables for each.
fn shared_parts(
    strategy: &Strategy,
    layer: LayerShape,
    n_layers: u64,
) -> anyhow::Result<MemoryReport> {
    // Stages that learn do so from the first rows of a text.
    let geometry = stand_in(layer, 1, PERIOD);
    let (cache, _) = bytes::fill_to(strategy, &geometry, Admission::Streaming, &[])?;
    let memory = cache.memory();
    let of_side = |bytes: u64| match layer.stored {
        Stored::KeysAndValues => bytes,
        Stored::Latent => bytes.div_ceil(2),
    };
    Ok(MemoryReport {
        table_bytes: of_side(memory.table_bytes)
            * if is_calibrated(strategy) { n_layers } else { 1 },
        projection_bytes: of_side(memory.projection_bytes) * n_layers,
        ..MemoryReport::default()
    })
}

/// All layers and heads of one sequence at one length.
fn whole(strategy: &Strategy, shape: &CacheShape, n_tokens: usize) -> anyhow::Result<Growth> {
    let most = MOST_VALUES / shape.values_per_token().max(1);
    if shape.values_at(n_tokens) > MOST_VALUES {
        bail!(
            "its layers depend on each other, so that they are filled whole: up to {most} tokens of this model, not {n_tokens}"
        );
    }
    if shape.layers.iter().any(|l| l.stored == Stored::Latent) {
        bail!(
            "its layers depend on each other, which rows of K and V have and latent rows have not"
        );
    }
    let mut geometry = stand_in(shape.layers[0], 0, 1);
    for layer in &shape.layers {
        geometry
            .layers
            .extend(stand_in(*layer, 1, n_tokens.max(PERIOD)).layers);
    }
    let (_, reports) = bytes::fill_to(strategy, &geometry, Admission::Streaming, &[n_tokens])?;
    let all = reports[0];
    let shared = MemoryReport {
        table_bytes: all.table_bytes,
        projection_bytes: all.projection_bytes,
        ..MemoryReport::default()
    };
    let own = MemoryReport {
        table_bytes: 0,
        projection_bytes: 0,
        ..all
    };
    let kind = Kind {
        n_heads: 1,
        at: BTreeMap::from([(n_tokens, own)]),
        settled: n_tokens,
    };
    Ok(Growth {
        kinds: vec![kind],
        shared,
        n_measured: n_tokens,
        exact: true,
    })
}

fn add(total: &mut MemoryReport, more: &MemoryReport) {
    let scratch = total.scratch_bytes.max(more.scratch_bytes);
    *total = zip(total, more, |a, b| a + b);
    total.scratch_bytes = scratch;
}

fn scaled(one: &MemoryReport, n: u64) -> MemoryReport {
    MemoryReport {
        scratch_bytes: one.scratch_bytes,
        ..zip(one, one, |a, _| a.saturating_mul(n))
    }
}

/// Field by field.
fn zip(a: &MemoryReport, b: &MemoryReport, f: impl Fn(u64, u64) -> u64) -> MemoryReport {
    let mut rows_at_level = a.rows_at_level;
    for (a, b) in rows_at_level.iter_mut().zip(b.rows_at_level) {
        *a = f(*a, b);
    }
    MemoryReport {
        payload_bytes: f(a.payload_bytes, b.payload_bytes),
        scale_bytes: f(a.scale_bytes, b.scale_bytes),
        index_bytes: f(a.index_bytes, b.index_bytes),
        page_table_bytes: f(a.page_table_bytes, b.page_table_bytes),
        table_bytes: f(a.table_bytes, b.table_bytes),
        projection_bytes: f(a.projection_bytes, b.projection_bytes),
        exact_bytes: f(a.exact_bytes, b.exact_bytes),
        slack_bytes: f(a.slack_bytes, b.slack_bytes),
        scratch_bytes: f(a.scratch_bytes, b.scratch_bytes),
        backing_bytes: f(a.backing_bytes, b.backing_bytes),
        rows_live: f(a.rows_live, b.rows_live),
        rows_at_level,
        rows_seen: f(a.rows_seen, b.rows_seen),
        // Of rows of noise it would say nothing.
        rebuilt: Rebuilt::default(),
    }
}
