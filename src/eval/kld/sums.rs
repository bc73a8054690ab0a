//! What two distributions per token say: perplexities, their ratio, KL divergence, changes of the next token's probability.
//!
//! Estimates are those that llama-perplexity prints, so that both can stand in one table: ± is one standard error of a mean over
//! tokens taken as independent (they are not: intervals over windows are wider), percentiles interpolate between ranks.
//! Source of the definitions: llama.cpp, `tools/perplexity`.

use rayon::prelude::*;
use serde::Serialize;

use super::packed::{PackedRow, log_sum_exp};

/// Nats below which a base probability counts as none: the packing's span.
const NEGLIGIBLE: f32 = -16.0;

/// Fewer tokens have no standard error.
const MIN_TOKENS: usize = 11;

/// One scored token.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pair {
    /// −ln p of the next token, nats.
    pub nll: f64,
    /// The same in the base.
    pub nll_base: f64,
    /// KL(base ‖ this), nats.
    pub kld: f64,
    /// Whether both rank the same token first.
    pub same_top: bool,
}

impl Pair {
    /// Compares a row of logits with a packed row of the base. `next`: the token that came.
    pub fn of(logits: &[f32], base: PackedRow<'_>, next: usize) -> Self {
        let (mut top, mut max) = (0, f32::NEG_INFINITY);
        for (i, &x) in logits.iter().enumerate() {
            if x > max {
                (top, max) = (i, x);
            }
        }
        let log_sum = f64::from(max) + log_sum_exp(logits, max);
        let kld = base
            .log_probs()
            .zip(logits)
            .filter(|(p, _)| *p > NEGLIGIBLE)
            .map(|(p, &x)| f64::from(p).exp() * (f64::from(p) - f64::from(x) + log_sum))
            .sum();
        Self {
            nll: log_sum - f64::from(logits[next]),
            nll_base: -f64::from(base.log_prob(next)),
            kld,
            same_top: top == base.top(),
        }
    }

    /// Change of the next token's probability.
    pub fn p_difference(&self) -> f64 {
        (-self.nll).exp() - (-self.nll_base).exp()
    }
}

/// Compares rows of logits, `[row][n_vocab]`, with the base's rows from `first` on.
pub fn compare<'a>(
    logits: &[f32],
    next: &[u32],
    base: impl Fn(usize) -> PackedRow<'a> + Sync,
) -> Vec<Pair> {
    let n_vocab = logits.len() / next.len().max(1);
    logits
        .par_chunks_exact(n_vocab.max(1))
        .zip(next)
        .enumerate()
        .map(|(i, (row, &next))| Pair::of(row, base(i), next as usize))
        .collect()
}

/// A mean and its standard error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// The value.
    pub value: f64,
    /// Its standard error; 0 for too few tokens.
    pub stderr: f64,
}

impl Estimate {
    fn mean(values: impl Iterator<Item = f64> + Clone) -> Self {
        let n = values.clone().count();
        let value = values.clone().sum::<f64>() / n as f64;
        let square = values.map(|x| x * x).sum::<f64>() / n as f64 - value * value;
        let stderr = match n < MIN_TOKENS || square <= 0.0 {
            true => 0.0,
            false => (square / (n - 1) as f64).sqrt(),
        };
        Self { value, stderr }
    }

    fn map(self, value: impl Fn(f64) -> f64, slope: impl Fn(f64) -> f64) -> Self {
        Self {
            value: value(self.value),
            stderr: slope(self.value).abs() * self.stderr,
        }
    }
}

/// Values by rank: the smallest, some percentiles, the largest.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ranks {
    /// The largest.
    pub max: f64,
    /// (fraction, value), fractions falling.
    pub percentiles: Vec<(f64, f64)>,
    /// The smallest.
    pub min: f64,
}

impl Ranks {
    fn of(mut values: Vec<f64>, fractions: &[f64]) -> Self {
        values.sort_by(f64::total_cmp);
        let last = values.len() - 1;
        let at = |fraction: f64| {
            let p = fraction * last as f64;
            let i = p as usize;
            let part = p - i as f64;
            (1.0 - part) * values[i] + part * values[(i + 1).min(last)]
        };
        Self {
            max: values[last],
            percentiles: fractions.iter().map(|&f| (f, at(f))).collect(),
            min: values[0],
        }
    }
}

/// Fractions at which KL divergences are shown.
pub const KLD_FRACTIONS: [f64; 9] = [0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01, 0.001];

/// Fractions at which changes of probability are shown.
pub const P_FRACTIONS: [f64; 11] = [
    0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001,
];

/// What all tokens say together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Statistics {
    /// Tokens.
    pub n_tokens: usize,
    /// Perplexity.
    pub ppl: Estimate,
    /// Perplexity of the base, from its packed log-probabilities.
    pub ppl_base: Estimate,
    /// Correlation of ln p between the two.
    pub correlation: f64,
    /// ln of the perplexities' ratio.
    pub ln_ppl_ratio: Estimate,
    /// The perplexities' ratio.
    pub ppl_ratio: Estimate,
    /// The perplexities' difference.
    pub ppl_difference: Estimate,
    /// Mean KL(base ‖ this), nats.
    pub kld: Estimate,
    /// KL divergences by rank.
    pub kld_ranks: Ranks,
    /// Mean change of the next token's probability, as a fraction.
    pub p_difference: Estimate,
    /// Its root mean square.
    pub p_rms: Estimate,
    /// Changes by rank.
    pub p_ranks: Ranks,
    /// Fraction of tokens at which both rank the same token first.
    pub same_top: Estimate,
}

impl Statistics {
    /// Sums up; `None` for no tokens.
    pub fn of(pairs: &[Pair]) -> Option<Self> {
        if pairs.is_empty() {
            return None;
        }
        let n = pairs.len();
        let nll = Estimate::mean(pairs.iter().map(|p| p.nll));
        let base = Estimate::mean(pairs.iter().map(|p| p.nll_base));
        let both = pairs.iter().map(|p| p.nll * p.nll_base).sum::<f64>() / n as f64;
        let covariance = match n < MIN_TOKENS {
            true => 0.0,
            false => (both - nll.value * base.value) / (n - 1) as f64,
        };
        let difference = |a: f64, b: f64, ab: f64| (a * a + b * b - 2.0 * ab).max(0.0).sqrt();
        let ln_ppl_ratio = Estimate {
            value: nll.value - base.value,
            stderr: difference(nll.stderr, base.stderr, covariance),
        };
        let (ppl, ppl_base) = (nll.map(f64::exp, f64::exp), base.map(f64::exp, f64::exp));
        let p = pairs.iter().map(Pair::p_difference);
        let squares = Estimate::mean(p.clone().map(|x| x * x));
        let slope = |mean: f64| if mean > 0.0 { 0.5 / mean.sqrt() } else { 0.0 };
        let same = pairs.iter().filter(|p| p.same_top).count() as f64 / n as f64;
        Some(Self {
            n_tokens: n,
            ppl,
            ppl_base,
            correlation: covariance / (nll.stderr * base.stderr),
            ln_ppl_ratio,
            ppl_ratio: ln_ppl_ratio.map(f64::exp, f64::exp),
            ppl_difference: Estimate {
                value: ppl.value - ppl_base.value,
                stderr: difference(
                    ppl.stderr,
                    ppl_base.stderr,
                    ppl.value * ppl_base.value * covariance,
                ),
            },
            kld: Estimate::mean(pairs.iter().map(|p| p.kld)),
            kld_ranks: Ranks::of(pairs.iter().map(|p| p.kld).collect(), &KLD_FRACTIONS),
            p_difference: Estimate::mean(p.clone()),
            p_rms: squares.map(f64::sqrt, slope),
            p_ranks: Ranks::of(p.collect(), &P_FRACTIONS),
            same_top: Estimate {
                value: same,
                stderr: (same * (1.0 - same) / (n.max(2) - 1) as f64).sqrt(),
            },
        })
    }
}
