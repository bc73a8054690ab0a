//! Bars: what an experiment must show, and whether it does.
//!
//! Invariants: a bar is held against the mean over items as the tables print it; what it is held against never changes
//! what is measured. Perplexity has the widest intervals, so its bar is met by the interval's near end, which the
//! verdict says; every other bar is met by the mean alone.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::stats::Estimate;
use crate::cache::Continuation;

/// What a bar is about: a column of the tables, by its name in CSV and JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// KL(full ‖ strategy), nats per token.
    Kld,
    /// Median of the tokens' KLD.
    KldMedian,
    /// 90th percentile of the tokens' KLD.
    KldP90,
    /// 99th percentile of the tokens' KLD.
    KldP99,
    /// 99.9th percentile of the tokens' KLD.
    KldP999,
    /// Fraction of tokens whose most likely token is the reference's.
    SameTop,
    /// NLL minus the reference's, nats per token.
    DeltaNll,
    /// Change of perplexity against the reference, percent.
    DeltaPplPercent,
    /// Root mean square change of the target's probability, a fraction.
    RmsDeltaP,
    /// Part of the context's benefit that is kept, a fraction.
    ContextBenefitKept,
    /// Bits stored per value of K and V.
    BitsPerValue,
    /// Bits that one more token costs per value.
    EffectiveBits,
    /// Stored bytes per token.
    BytesPerToken,
    /// Stored bytes over those of an f16 cache.
    BytesVsF16,
    /// Stored bytes over those of a cache at one byte per value.
    BytesVsFp8,
    /// Bytes in memory over those of an f16 cache, what lies in a tier left out.
    ResidentVsF16,
    /// Time that a timed step waits for rows out of a tier, milliseconds.
    StallMsPerToken,
}

/// Every metric with its name.
pub const METRICS: &[(&str, Metric)] = &[
    ("kld", Metric::Kld),
    ("kld_median", Metric::KldMedian),
    ("kld_p90", Metric::KldP90),
    ("kld_p99", Metric::KldP99),
    ("kld_p999", Metric::KldP999),
    ("same_top", Metric::SameTop),
    ("delta_nll", Metric::DeltaNll),
    ("delta_ppl_percent", Metric::DeltaPplPercent),
    ("rms_delta_p", Metric::RmsDeltaP),
    ("context_benefit_kept", Metric::ContextBenefitKept),
    ("bits_per_value", Metric::BitsPerValue),
    ("effective_bits", Metric::EffectiveBits),
    ("bytes_per_token", Metric::BytesPerToken),
    ("bytes_vs_f16", Metric::BytesVsF16),
    ("bytes_vs_fp8", Metric::BytesVsFp8),
    ("resident_vs_f16", Metric::ResidentVsF16),
    ("stall_ms_per_token", Metric::StallMsPerToken),
];

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = METRICS
            .iter()
            .find(|(_, m)| m == self)
            .map(|(name, _)| name);
        f.write_str(name.unwrap_or(&"?"))
    }
}

impl Metric {
    /// Perplexity in either scale.
    fn is_perplexity(self) -> bool {
        matches!(self, Metric::DeltaNll | Metric::DeltaPplPercent)
    }

    /// What half a bar is taken of: the bar itself; of a fraction whose best is 1, what it leaves.
    fn room(self, bound: f64) -> f64 {
        match self {
            Metric::SameTop | Metric::ContextBenefitKept => (1.0 - bound).abs(),
            _ => bound.abs(),
        }
    }
}

/// A limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// The value must not be greater.
    AtMost(f64),
    /// The value must not be smaller.
    AtLeast(f64),
}

impl Bound {
    /// The limit's value.
    pub fn value(&self) -> f64 {
        let (Bound::AtMost(value) | Bound::AtLeast(value)) = *self;
        value
    }

    fn admits(&self, value: f64) -> bool {
        match *self {
            Bound::AtMost(most) => value <= most,
            Bound::AtLeast(least) => value >= least,
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bound::AtMost(most) => write!(f, "≤ {most}"),
            Bound::AtLeast(least) => write!(f, "≥ {least}"),
        }
    }
}

/// What one strategy must show. What is not given holds everywhere.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bar {
    /// Label of the strategy.
    pub strategy: String,
    /// The column.
    pub metric: Metric,
    /// The limit.
    pub bound: Bound,
    /// Label of the strategy whose value the limit is a multiple of; else it is a number by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<String>,
    /// Name of one text; else the bar holds per domain, over its texts together.
    pub data: Option<String>,
    /// Domain of the texts.
    pub domain: Option<String>,
    /// Kind of the protocol.
    pub protocol: Option<String>,
    /// What becomes of the rows of a continuation.
    pub continuation: Option<Continuation>,
    /// Tokens of the context, or of a stream's window.
    pub n_tokens: Option<usize>,
}

/// What was measured for a bar.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Measured {
    /// Mean over items, or the quantile that the metric is.
    pub value: f64,
    /// Its 95 % interval; `None` with one item, and for what has none.
    pub interval: Option<(f64, f64)>,
    /// Items.
    pub n: usize,
    /// Tokens scored.
    pub n_tokens: usize,
}

impl Measured {
    /// Of an estimate over items.
    pub fn from_estimate(estimate: &Estimate, n_tokens: usize) -> Self {
        Self {
            value: estimate.value,
            interval: estimate.interval,
            n: estimate.n,
            n_tokens,
        }
    }

    /// Its value over another's, on the same items, unless that is 0. It has no interval.
    pub fn over(&self, other: &Self) -> Option<Self> {
        (other.value != 0.0).then(|| Self {
            value: self.value / other.value,
            interval: None,
            ..*self
        })
    }
}

/// Whether a bar is met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// By the value.
    Met,
    /// By the interval's lower end, for a perplexity.
    MetByLowerEnd,
    /// By the interval's upper end, for a perplexity that must be at least something.
    MetByUpperEnd,
    /// Not.
    Missed,
}

/// A verdict, and whether there are enough documents for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Judgement {
    /// The verdict.
    pub verdict: Verdict,
    /// Items that would bring the interval's half-width down to half the bar, where it is wider.
    pub n_needed: Option<usize>,
}

impl Bar {
    /// The limit in words: `≤ 1.3`, `≤ 1.3 × teacher`.
    pub fn limit(&self) -> String {
        match &self.times {
            None => self.bound.to_string(),
            Some(other) => format!("{} × {other}", self.bound),
        }
    }

    /// Holds a measurement against the bar.
    pub fn judge(&self, measured: &Measured) -> Judgement {
        let interval = measured.interval;
        let near_end = interval.filter(|_| self.metric.is_perplexity());
        let verdict = match (self.bound, near_end) {
            (bound, _) if bound.admits(measured.value) => Verdict::Met,
            (Bound::AtMost(_), Some((low, _))) if self.bound.admits(low) => Verdict::MetByLowerEnd,
            (Bound::AtLeast(_), Some((_, high))) if self.bound.admits(high) => {
                Verdict::MetByUpperEnd
            }
            _ => Verdict::Missed,
        };
        let wanted = self.metric.room(self.bound.value()) / 2.0;
        let half_width = interval.map_or(0.0, |(low, high)| (high - low) / 2.0);
        let is_wide = wanted > 0.0 && half_width > wanted;
        let needed = || (measured.n as f64 * (half_width / wanted).powi(2)).ceil() as usize;
        Judgement {
            verdict,
            n_needed: is_wide.then(needed),
        }
    }
}

impl Judgement {
    /// The judgement in words.
    pub fn words(&self, n: usize) -> String {
        let verdict = match self.verdict {
            Verdict::Met => "met",
            Verdict::MetByLowerEnd => "met: lower end",
            Verdict::MetByUpperEnd => "met: upper end",
            Verdict::Missed => "missed",
        };
        match self.n_needed {
            None => verdict.to_owned(),
            Some(needed) => format!("{verdict}; too few documents: {n}, need about {needed}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(metric: Metric, bound: Bound) -> Bar {
        Bar {
            strategy: "x".into(),
            metric,
            bound,
            times: None,
            data: None,
            domain: None,
            protocol: None,
            continuation: None,
            n_tokens: None,
        }
    }

    fn words(metric: Metric, bound: Bound, value: f64, half: f64) -> String {
        let measured = Measured {
            value,
            interval: (half > 0.0).then_some((value - half, value + half)),
            n: 20,
            n_tokens: 5100,
        };
        bar(metric, bound).judge(&measured).words(20)
    }

    #[test]
    fn the_mean_decides_and_for_perplexity_the_near_end() {
        let most = Bound::AtMost(0.003);
        assert_eq!(words(Metric::Kld, most, 0.003, 0.0002), "met");
        assert_eq!(words(Metric::Kld, most, 0.0031, 0.0002), "missed");
        let most = Bound::AtMost(0.5);
        assert_eq!(words(Metric::DeltaPplPercent, most, 0.4, 0.2), "met");
        assert_eq!(
            words(Metric::DeltaPplPercent, most, 0.6, 0.2),
            "met: lower end"
        );
        assert_eq!(words(Metric::DeltaPplPercent, most, 0.71, 0.2), "missed");
        assert_eq!(words(Metric::DeltaPplPercent, most, 0.6, 0.0), "missed");
        let least = Bound::AtLeast(4.2);
        assert_eq!(
            words(Metric::DeltaPplPercent, least, 4.1, 0.2),
            "met: upper end"
        );
        assert_eq!(words(Metric::DeltaPplPercent, least, 3.9, 0.2), "missed");
        assert_eq!(
            words(Metric::SameTop, Bound::AtLeast(0.965), 0.964, 0.003),
            "missed"
        );
    }

    /// A half-width of 0.5 against half a bar of 0.25: four times the documents.
    #[test]
    fn a_wide_interval_asks_for_documents() {
        assert_eq!(
            words(Metric::DeltaPplPercent, Bound::AtMost(0.5), 0.9, 0.5),
            "met: lower end; too few documents: 20, need about 80"
        );
        // Half of the 3.5 % that may differ, not half of 96.5 %.
        assert_eq!(
            words(Metric::SameTop, Bound::AtLeast(0.965), 0.97, 0.035),
            "met; too few documents: 20, need about 80"
        );
        assert_eq!(
            words(Metric::BytesVsF16, Bound::AtMost(0.28), 0.27, 0.0),
            "met"
        );
    }

    #[test]
    fn names_are_those_of_json() {
        for (name, metric) in METRICS {
            assert_eq!(serde_json::to_value(metric).unwrap(), *name);
            assert_eq!(metric.to_string(), *name);
        }
    }
}
