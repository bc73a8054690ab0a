//! From per-item sums to estimates: token-weighted ratios with cluster intervals, paired tests, percentiles, verdicts.
//!
//! Invariants: sums run in the order given (callers give items in index order) and resampling is seeded, so a number
//! depends on the records alone; `n` travels with every estimate; what has no interval says so, never with a NaN.
//!
//! Everything is one estimator. With xᵢ and yᵢ the numerator and denominator of cluster i (say ΔNLL and tokens of one
//! document), R = Σx / Σy and, with residuals eᵢ = xᵢ − R·yᵢ,
//!
//! ```text
//! SE(R) = √( n/(n−1) · Σ eᵢ² ) / |Σy|        interval = [ R − q(0.975) · SE(R), R − q(0.025) · SE(R) ]
//! ```
//!
//! (the linearised ratio estimator of survey sampling: W. G. Cochran, Sampling Techniques, chapter 6), where q are
//! quantiles of (R* − R) / SE(R*) over resampled clusters ([`bootstrap`]), or Student's where there are too few.
//! docs/statistics.md has the coverage of this interval and of those that were not chosen.

pub mod blocks;
pub mod bootstrap;
pub mod holm;
pub mod mcnemar;
pub mod paired;
mod proportion;
pub mod verdict;
pub mod wilcoxon;

#[cfg(test)]
mod tests;

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, Normal, StudentsT};

pub use mcnemar::McNemar;
pub use paired::{Pair, Paired};
pub use verdict::{ACCURACY_MARGIN, Comparison, Judged, NLL_MARGIN, Sense, Verdict, judge};

/// Coverage of every interval.
pub const COVERAGE: f64 = 0.95;

/// What an interval is taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Over {
    /// Clusters: documents or windows.
    Items,
    /// Blocks of neighbouring tokens of the one item there is: says nothing of other items.
    Blocks {
        /// Tokens of a block.
        length: usize,
        /// Blocks that fit.
        n_blocks: usize,
    },
}

/// A ratio of sums over clusters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// Σx / Σy.
    pub value: f64,
    /// Clusters.
    pub n: usize,
    /// Standard error; `None` with one cluster.
    pub se: Option<f64>,
    /// The 95 % interval, low and high; `None` with one cluster, unless it is one over blocks.
    pub interval: Option<(f64, f64)>,
    /// What the interval is taken over.
    pub over: Over,
}

impl Estimate {
    /// The estimate from each cluster's numerator and denominator; `None` without clusters or where Σy is 0.
    pub fn ratio(numerators: &[f64], denominators: &[f64]) -> Option<Self> {
        let (value, se, residuals) = Self::linearised(numerators, denominators)?;
        let n = numerators.len();
        let interval = se.map(|se| {
            let (low, high) = bootstrap::studentized_quantiles(&residuals, denominators, se)
                .unwrap_or_else(|| {
                    let t = t_quantile(n - 1);
                    (-t, t)
                });
            (value - high * se, value - low * se)
        });
        Some(Self {
            value,
            n,
            se,
            interval,
            over: Over::Items,
        })
    }

    /// Σx / Σy, its error and the residuals x − R·y.
    fn linearised(
        numerators: &[f64],
        denominators: &[f64],
    ) -> Option<(f64, Option<f64>, Vec<f64>)> {
        let n = numerators.len();
        let total: f64 = denominators.iter().sum();
        if n == 0 || n != denominators.len() || total == 0.0 {
            return None;
        }
        let value = numerators.iter().sum::<f64>() / total;
        let residuals: Vec<f64> = numerators
            .iter()
            .zip(denominators)
            .map(|(x, y)| x - value * y)
            .collect();
        let squares: f64 = residuals.iter().map(|e| e * e).sum();
        let se = (n > 1).then(|| (n as f64 / (n - 1) as f64 * squares).sqrt() / total.abs());
        Some((value, se, residuals))
    }

    /// The mean of one number per item.
    pub fn mean(values: &[f64]) -> Option<Self> {
        Self::ratio(values, &vec![1.0; values.len()])
    }

    /// Half the width of the 95 % interval.
    pub fn half_width(&self) -> Option<f64> {
        self.interval.map(|(low, high)| (high - low) / 2.0)
    }

    /// Two-sided p of the hypothesis that the true value is 0: below 0.05 exactly where the interval leaves 0 out.
    pub fn p_value(&self) -> Option<f64> {
        let (above, below) = (self.p_above(0.0)?, self.p_below(0.0)?);
        Some((2.0 * above.min(below)).min(1.0))
    }

    /// One-sided p of the hypothesis that the true value is at most `bound`.
    ///
    /// Student's tail of (value − bound) in units in which the interval's low end lies where Student's would: a smooth p
    /// that agrees with the interval at 0.025, where counting resamples would end at one in their number.
    pub fn p_above(&self, bound: f64) -> Option<f64> {
        let (low, _) = self.interval?;
        Some(self.tail(self.value - bound, self.value - low))
    }

    /// One-sided p of the hypothesis that the true value is at least `bound`.
    pub fn p_below(&self, bound: f64) -> Option<f64> {
        let (_, high) = self.interval?;
        Some(self.tail(bound - self.value, high - self.value))
    }

    fn tail(&self, distance: f64, reach: f64) -> f64 {
        let freedom = self.freedom();
        if reach > 0.0 {
            return student(freedom).sf(t_quantile(freedom) * distance / reach);
        }
        match distance {
            d if d > 0.0 => 0.0,
            d if d < 0.0 => 1.0,
            _ => 0.5,
        }
    }

    fn freedom(&self) -> usize {
        match self.over {
            Over::Items => self.n.max(2) - 1,
            Over::Blocks { n_blocks, .. } => n_blocks.max(2) - 1,
        }
    }

    /// The estimate times a constant.
    pub fn scaled(&self, factor: f64) -> Self {
        self.through(|x| x * factor, factor.abs())
    }

    /// e to the estimate, less 1; the error to first order, the interval through the function.
    pub fn exp_m1(&self) -> Self {
        self.through(f64::exp_m1, self.value.exp())
    }

    /// The square root, of what is below 0 as of 0; the error to first order (√m ± SE(m) / 2√m), the interval through the
    /// function.
    pub fn sqrt(&self) -> Self {
        let root = |x: f64| x.max(0.0).sqrt();
        let slope = if self.value > 0.0 {
            0.5 / self.value.sqrt()
        } else {
            0.0
        };
        self.through(root, slope)
    }

    /// The interval cut off at what the true value can be.
    pub fn within(&self, least: f64, greatest: f64) -> Self {
        Self {
            interval: self
                .interval
                .map(|(low, high)| (low.clamp(least, greatest), high.clamp(least, greatest))),
            ..*self
        }
    }

    /// Through a monotone function with this slope, a magnitude, at the value.
    fn through(&self, function: impl Fn(f64) -> f64, slope: f64) -> Self {
        Self {
            value: function(self.value),
            se: self.se.map(|se| se * slope),
            interval: self.interval.map(|(low, high)| {
                let ends = (function(low), function(high));
                (ends.0.min(ends.1), ends.0.max(ends.1))
            }),
            ..*self
        }
    }
}

/// The q-quantile (0 ≤ q ≤ 1) of sorted values, interpolated linearly between order statistics (Hyndman and Fan's
/// type 7); `None` without values.
pub fn quantile(sorted: &[f64], q: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = q.clamp(0.0, 1.0) * last as f64;
    let below = (at.floor() as usize).min(last);
    let above = (below + 1).min(last);
    let weight = at - below as f64;
    Some(sorted[below] + weight * (sorted[above] - sorted[below]))
}

fn t_quantile(freedom: usize) -> f64 {
    student(freedom).inverse_cdf(0.5 + COVERAGE / 2.0)
}

fn student(freedom: usize) -> StudentsT {
    StudentsT::new(0.0, 1.0, freedom as f64)
        .expect("an interval has at least two clusters, so at least one degree of freedom")
}

fn normal() -> Normal {
    Normal::new(0.0, 1.0).expect("a standard deviation of 1 is positive")
}
