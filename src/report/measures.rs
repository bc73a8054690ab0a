//! What a row measures: quality, bytes, times, each from the sums of its items.
//!
//! Invariants: a mean is a ratio of sums with the item as its cluster; the base of every size is what an f16 cache
//! holds at the same number of tokens; all stored bytes are charged.

use std::collections::{BTreeMap, BTreeSet};

use crate::bundle::header::GeometryHeader;
use crate::cache::{MemoryReport, Rebuilt};
use crate::eval::records::{ItemRecord, LatencyRecord, MemoryRecord, PerToken};
use crate::eval::stats::{Estimate, Pair, Paired, quantile};

use super::pairs::differences;

/// Likelihood and distribution against the reference, per token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quality {
    /// NLL, nats per token.
    pub nll: Estimate,
    /// Bits per byte of the scored text.
    pub bits_per_byte: f64,
    /// NLL minus the reference's, paired.
    pub paired: Paired,
    /// KL(full ‖ strategy), nats per token.
    pub kld: Estimate,
    /// Median of the tokens' KLD.
    pub kld_median: f64,
    /// 99th percentile of the tokens' KLD.
    pub kld_p99: f64,
    /// Fraction of tokens whose most likely token is the reference's.
    pub same_top: Estimate,
    /// Mean change of the target's probability.
    pub mean_delta_p: Estimate,
    /// Root mean square change of the target's probability.
    pub rms_delta_p: Estimate,
    /// (NLL_floor − NLL) / (NLL_floor − NLL_reference); `None` without a floor, or where the context is of no use.
    pub context_benefit_kept: Option<Estimate>,
}

impl Quality {
    /// Of some items; `None` without any.
    pub fn new(items: &[&ItemRecord]) -> Option<Self> {
        let column =
            |f: &dyn Fn(&ItemRecord) -> f64| items.iter().map(|r| f(r)).collect::<Vec<_>>();
        let tokens = column(&|r| r.n_scored as f64);
        // One item has its tokens to tell a spread from, where the record has them one by one.
        let per_token = |f: &dyn Fn(&ItemRecord) -> f64, each: fn(&PerToken) -> Vec<f64>| {
            let estimate = Estimate::ratio(&column(f), &tokens)?;
            Some(match items {
                [only] => estimate.over_tokens(&each(&only.tokens)),
                _ => estimate,
            })
        };
        let nll = per_token(&|r| r.nll, |t| wide(&t.nll))?;
        let pairs: Vec<Pair> = items
            .iter()
            .map(|r| Pair {
                a: r.nll,
                b: r.nll_reference,
                n_scored: r.n_scored,
                identical: r.is_identical_to_reference(),
            })
            .collect();
        let mut kld: Vec<f64> = items
            .iter()
            .flat_map(|r| r.tokens.kld.iter().map(|&x| f64::from(x)))
            .collect();
        kld.sort_by(f64::total_cmp);
        let n_bytes: f64 = items.iter().map(|r| r.bytes_text as f64).sum();
        Some(Self {
            nll,
            bits_per_byte: column(&|r| r.nll).iter().sum::<f64>()
                / std::f64::consts::LN_2
                / n_bytes,
            paired: match items {
                [only] => {
                    let tokens = &only.tokens;
                    Paired::compare(&pairs)?
                        .over_tokens(&differences(&tokens.nll, &tokens.nll_reference))
                }
                _ => Paired::compare(&pairs)?,
            },
            kld: per_token(&|r| r.kld_sum, |t| wide(&t.kld))?,
            kld_median: quantile(&kld, 0.5)?,
            kld_p99: quantile(&kld, 0.99)?,
            same_top: per_token(&|r| r.top1_agree as f64, |_| Vec::new())?.within(0.0, 1.0),
            mean_delta_p: per_token(&|r| r.delta_p_sum, |t| wide(&t.delta_p))?,
            rms_delta_p: per_token(&|r| r.delta_p_sq_sum, |t| {
                t.delta_p.iter().map(|&d| f64::from(d).powi(2)).collect()
            })?
            .sqrt(),
            context_benefit_kept: context_benefit_kept(items),
        })
    }

    /// Perplexity: exp of the mean NLL.
    pub fn ppl(&self) -> f64 {
        self.nll.value.exp()
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

fn context_benefit_kept(items: &[&ItemRecord]) -> Option<Estimate> {
    let floors: Option<Vec<f64>> = items.iter().map(|r| r.nll_floor).collect();
    let floors = floors?;
    let benefit = |f: fn(&ItemRecord) -> f64| -> Vec<f64> {
        floors
            .iter()
            .zip(items)
            .map(|(floor, r)| floor - f(r))
            .collect()
    };
    let full = benefit(|r| r.nll_reference);
    if full.iter().sum::<f64>() <= 0.0 {
        return None;
    }
    Estimate::ratio(&benefit(|r| r.nll), &full)
}

/// Live bytes: at the compression point where there is one, at the end of the item where there is none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Memory {
    /// Items that carry a memory record.
    pub n_items: usize,
    /// Tokens in the caches, summed over items.
    pub n_tokens: usize,
    /// Bytes by part, summed over items; scratch is the largest. Pages that were coded anew: until the last record of each.
    pub parts: MemoryReport,
    /// Bytes of f16 caches of the same tokens.
    pub f16_bytes: u64,
    /// Scalars of K and V in them.
    pub n_scalars: u64,
    /// Bytes that one more token costs, from items with records at two lengths.
    pub marginal_bytes_per_token: Option<f64>,
    /// The same in bits per value of K and V.
    pub marginal_bits_per_value: Option<f64>,
}

impl Memory {
    /// Of some items; `None` if none carries a memory record.
    pub fn new(items: &[&ItemRecord], geometry: &GeometryHeader) -> Option<Self> {
        let ends = || {
            items
                .iter()
                .filter_map(|r| r.memory.first().zip(r.memory.last()))
        };
        let mut out = Self::of(ends().map(|(first, _)| first), geometry)?;
        // Pages are coded anew while a sequence decodes: after its compression point.
        out.parts.rebuilt = Rebuilt::default();
        let (mut tokens, mut bytes, mut scalars) = (0.0, 0.0, 0.0);
        for (first, last) in ends() {
            out.parts.rebuilt.add(&last.report.rebuilt, 1);
            let more = |f: &dyn Fn(&MemoryRecord) -> f64| f(last) - f(first);
            tokens += more(&|m| m.n_tokens as f64);
            bytes += more(&|m| m.report.stored_bytes() as f64);
            scalars += more(&|m| geometry.scalars_at(m.n_tokens) as f64);
        }
        if tokens > 0.0 && scalars > 0.0 {
            out.marginal_bytes_per_token = Some(bytes / tokens);
            out.marginal_bits_per_value = Some(8.0 * bytes / scalars);
        }
        Some(out)
    }

    /// Along what is scored: one entry per length at which items carry a record, ascending.
    pub fn track(items: &[&ItemRecord], geometry: &GeometryHeader) -> Vec<Self> {
        let mut by_length: BTreeMap<usize, Vec<&MemoryRecord>> = BTreeMap::new();
        for record in items.iter().flat_map(|r| &r.memory_track) {
            by_length.entry(record.n_tokens).or_default().push(record);
        }
        by_length
            .into_values()
            .filter_map(|records| Self::of(records.into_iter(), geometry))
            .collect()
    }

    fn of<'a>(
        records: impl Iterator<Item = &'a MemoryRecord>,
        geometry: &GeometryHeader,
    ) -> Option<Self> {
        let mut out = Self {
            n_items: 0,
            n_tokens: 0,
            parts: MemoryReport::default(),
            f16_bytes: 0,
            n_scalars: 0,
            marginal_bytes_per_token: None,
            marginal_bits_per_value: None,
        };
        for record in records {
            out.n_items += 1;
            out.n_tokens += record.n_tokens;
            out.parts = sum(&out.parts, &record.report);
            out.f16_bytes += geometry.f16_bytes_at(record.n_tokens);
            out.n_scalars += geometry.scalars_at(record.n_tokens);
        }
        (out.n_tokens > 0).then_some(out)
    }

    /// Tokens of one item's cache, on average.
    pub fn mean_tokens(&self) -> f64 {
        self.n_tokens as f64 / self.n_items as f64
    }

    /// Stored bytes per token, shared tables and slack included.
    pub fn bytes_per_token(&self) -> f64 {
        self.per_token(self.parts.stored_bytes())
    }

    /// Bits stored per value of K and V that a plain cache would hold.
    pub fn bits_per_value(&self) -> f64 {
        8.0 * self.parts.stored_bytes() as f64 / self.n_scalars as f64
    }

    /// Stored bytes over those of an f16 cache of the same tokens.
    pub fn bytes_vs_f16(&self) -> f64 {
        self.parts.stored_bytes() as f64 / self.f16_bytes as f64
    }

    /// Bytes in memory, without those of a tier, over those of an f16 cache of the same tokens.
    pub fn resident_vs_f16(&self) -> f64 {
        self.parts.resident_bytes() as f64 / self.f16_bytes as f64
    }

    /// Stored bytes over those of a cache of the same tokens at one byte per value.
    pub fn bytes_vs_fp8(&self) -> f64 {
        self.parts.stored_bytes() as f64 / self.n_scalars as f64
    }

    /// Rows that can still be attended over rows seen; `None` where rows are not counted.
    pub fn kept_fraction(&self) -> Option<f64> {
        (self.parts.rows_seen > 0)
            .then(|| (self.parts.rows_live as f64 / self.parts.rows_seen as f64).min(1.0))
    }

    /// Pages of an item that were coded anew, on average, and the root mean square of what that changed in their rows over
    /// that of the rows; `None` where none was.
    pub fn rebuilt(&self) -> Option<(f64, f64)> {
        let error = self.parts.rebuilt.relative_error()?;
        Some((
            self.parts.rebuilt.n_pages as f64 / self.n_items as f64,
            error,
        ))
    }

    /// Some bytes over all tokens.
    pub fn per_token(&self, n_bytes: u64) -> f64 {
        n_bytes as f64 / self.n_tokens as f64
    }
}

fn sum(a: &MemoryReport, b: &MemoryReport) -> MemoryReport {
    MemoryReport {
        payload_bytes: a.payload_bytes + b.payload_bytes,
        scale_bytes: a.scale_bytes + b.scale_bytes,
        index_bytes: a.index_bytes + b.index_bytes,
        page_table_bytes: a.page_table_bytes + b.page_table_bytes,
        table_bytes: a.table_bytes + b.table_bytes,
        projection_bytes: a.projection_bytes + b.projection_bytes,
        exact_bytes: a.exact_bytes + b.exact_bytes,
        slack_bytes: a.slack_bytes + b.slack_bytes,
        scratch_bytes: a.scratch_bytes.max(b.scratch_bytes),
        backing_bytes: a.backing_bytes + b.backing_bytes,
        rows_live: a.rows_live + b.rows_live,
        rows_at_level: std::array::from_fn(|i| a.rows_at_level[i] + b.rows_at_level[i]),
        rows_seen: a.rows_seen + b.rows_seen,
        rebuilt: {
            let mut both = a.rebuilt;
            both.add(&b.rebuilt, 1);
            both
        },
    }
}

/// What the interval of a time is taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repetition {
    /// Items.
    Items,
    /// Steps of the one item that was timed: neighbouring steps are alike, so the interval is too narrow.
    Steps,
}

/// Decode and prefill times at one depth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latency {
    /// Tokens in the cache when timing starts.
    pub depth: usize,
    /// Timed decode steps.
    pub n_steps: usize,
    /// Wall time per decoded token, ms.
    pub ms_per_token: Estimate,
    /// What its interval is taken over.
    pub over: Repetition,
    /// Median of the steps, ms.
    pub median_ms: f64,
    /// 95th percentile of the steps, ms.
    pub p95_ms: f64,
    /// CPU time per decoded token, ms.
    pub cpu_ms_per_token: f64,
    /// Wall time of attention per decoded token, ms.
    pub attend_ms_per_token: f64,
    /// Storing a context and compressing it, ms per item.
    pub compress_ms: f64,
    /// The repetition that the retention's scores come from, ms per item; 0: it asks for none. `None`: of older records,
    /// which have it in `compress_ms`.
    pub repetition_ms: Option<f64>,
}

impl Latency {
    /// Of some items, one entry per depth, ascending.
    pub fn by_depth(items: &[&ItemRecord]) -> Vec<Self> {
        let records: Vec<&LatencyRecord> =
            items.iter().filter_map(|r| r.latency.as_ref()).collect();
        let depths: BTreeSet<usize> = records.iter().map(|r| r.depth).collect();
        depths
            .iter()
            .filter_map(|&depth| {
                let here: Vec<&LatencyRecord> = records
                    .iter()
                    .filter(|r| r.depth == depth)
                    .copied()
                    .collect();
                Self::new(depth, &here)
            })
            .collect()
    }

    fn new(depth: usize, records: &[&LatencyRecord]) -> Option<Self> {
        let column =
            |f: fn(&LatencyRecord) -> f64| records.iter().map(|r| f(r)).collect::<Vec<_>>();
        let total = |f: fn(&LatencyRecord) -> f64| column(f).iter().sum::<f64>();
        let mut steps: Vec<f64> = records
            .iter()
            .flat_map(|r| r.step_ms.iter().copied())
            .collect();
        let (ms_per_token, over) = if records.len() > 1 {
            let sums = column(|r| r.step_ms.iter().sum());
            let counts = column(|r| r.step_ms.len() as f64);
            (Estimate::ratio(&sums, &counts)?, Repetition::Items)
        } else {
            (
                Estimate::ratio(&steps, &vec![1.0; steps.len()])?,
                Repetition::Steps,
            )
        };
        steps.sort_by(f64::total_cmp);
        let repetitions: Option<Vec<f64>> = records.iter().map(|r| r.repetition_ms).collect();
        Some(Self {
            depth,
            n_steps: steps.len(),
            ms_per_token,
            over,
            median_ms: quantile(&steps, 0.5)?,
            p95_ms: quantile(&steps, 0.95)?,
            cpu_ms_per_token: total(|r| r.cpu_ms) / steps.len() as f64,
            attend_ms_per_token: total(|r| r.attend_ms) / steps.len() as f64,
            compress_ms: total(|r| r.compress_ms) / records.len() as f64,
            repetition_ms: repetitions.map(|ms| ms.iter().sum::<f64>() / ms.len() as f64),
        })
    }

    /// Decoded tokens per second.
    pub fn tokens_per_s(&self) -> f64 {
        1000.0 / self.ms_per_token.value
    }
}
