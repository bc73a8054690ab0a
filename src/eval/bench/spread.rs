//! Times of many steps as a few numbers: mean, percentiles, and how many lie apart from the rest.
//!
//! Invariants: a percentile is told only where at least one time in expectation lies beyond it; outliers are counted and named,
//! and stay in every number.

use crate::eval::stats::quantile;

/// Modified z-scores beyond this are outliers (B. Iglewicz and D. Hoaglin, How to detect and handle outliers, 1993).
pub const MOST_Z: f64 = 3.5;

/// Fewer times than that have no rest to lie apart from.
const LEAST_N: usize = 5;

/// Makes the median absolute deviation of normal numbers their standard deviation, and the mean one.
const OF_MEDIAN: f64 = 0.6745;
const OF_MEAN: f64 = 0.7979;

/// A distribution of times, ms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// Times.
    pub n: usize,
    /// Their mean.
    pub mean: f64,
    /// Their median.
    pub p50: f64,
    /// 9 of 10 are shorter; `None` for fewer than 10.
    pub p90: Option<f64>,
    /// 99 of 100 are shorter; `None` for fewer than 100.
    pub p99: Option<f64>,
    /// Times whose modified z-score is beyond [`MOST_Z`]; none of fewer than 5.
    pub n_outliers: usize,
}

impl Spread {
    /// Of times in any order; `None` of none.
    pub fn of(times: &[f64]) -> Option<Self> {
        let n = times.len();
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at_least = |least: usize, q: f64| (n >= least).then(|| quantile(&sorted, q)).flatten();
        Some(Self {
            n,
            mean: times.iter().sum::<f64>() / n as f64,
            p50: quantile(&sorted, 0.5)?,
            p90: at_least(10, 0.9),
            p99: at_least(100, 0.99),
            n_outliers: match n {
                0..LEAST_N => 0,
                _ => modified_z(times)
                    .iter()
                    .filter(|z| z.abs() > MOST_Z)
                    .count(),
            },
        })
    }
}

/// 0.6745 (x − median) / MAD of each; where half of the numbers are equal, the mean absolute deviation stands for the median one.
fn modified_z(x: &[f64]) -> Vec<f64> {
    let median = |mut x: Vec<f64>| {
        x.sort_by(f64::total_cmp);
        quantile(&x, 0.5).unwrap_or(0.0)
    };
    let middle = median(x.to_vec());
    let apart: Vec<f64> = x.iter().map(|x| (x - middle).abs()).collect();
    let mean = apart.iter().sum::<f64>() / apart.len() as f64;
    let per_unit = match median(apart) {
        mad if mad > 0.0 => OF_MEDIAN / mad,
        _ if mean > 0.0 => OF_MEAN / mean,
        _ => 0.0,
    };
    x.iter().map(|x| (x - middle) * per_unit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_need_numbers_enough() {
        let all: Vec<f64> = (1..=101).rev().map(f64::from).collect();
        let spread = Spread::of(&all).unwrap();
        assert_eq!((spread.n, spread.mean, spread.p50), (101, 51.0, 51.0));
        assert_eq!((spread.p90, spread.p99), (Some(91.0), Some(100.0)));
        assert_eq!(spread.n_outliers, 0);
        let few = Spread::of(&all[..10]).unwrap();
        assert_eq!((few.p90.is_some(), few.p99), (true, None));
        assert_eq!(Spread::of(&all[..9]).unwrap().p90, None);
        assert_eq!(Spread::of(&[]), None);
    }

    /// Median 10, absolute deviations 0 1 1 2 90: their median is 1, so that 15.2 is the first outlier.
    #[test]
    fn an_outlier_is_3_5_deviations_from_the_median() {
        let n_outliers = |x: &[f64]| Spread::of(x).unwrap().n_outliers;
        assert_eq!(n_outliers(&[9.0, 10.0, 11.0, 12.0, 100.0]), 1);
        assert_eq!(n_outliers(&[8.0, 9.0, 10.0, 11.0, 15.1]), 0);
        assert_eq!(n_outliers(&[8.0, 9.0, 10.0, 11.0, 15.2]), 1);
        // More than half are equal: the mean deviation is 0.09.
        assert_eq!(n_outliers(&[[5.0; 99].as_slice(), &[14.0]].concat()), 1);
        assert_eq!(n_outliers(&[5.0; 7]), 0);
        assert_eq!(n_outliers(&[5.0, 5.1, 100.0]), 0);
    }
}
