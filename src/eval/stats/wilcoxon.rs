//! Wilcoxon's signed-rank test: whether paired differences lie around 0, whatever their distribution's tails.
//!
//! Invariants: zeros are dropped, equal magnitudes share their mean rank; the distribution is exact up to
//! [`MAX_EXACT`] differences without ties or zeros, else normal with the variance corrected for ties and half a unit of
//! continuity. These are SciPy's `wilcoxon(d, zero_method="wilcox", method="exact")` and `method="asymptotic",
//! correction=True`.
//!
//! ```text
//! d      0.3 −0.1  0.7  0.2 −0.5      |d| in order: 0.1 0.2 0.3 0.5 0.7
//! rank     3    1    5    2    4      W⁺ = 3 + 5 + 2 = 10, W⁻ = 5; exact: p = 2 · P(W ≤ 5) = 2 · 10/32 = 0.625
//! ```
//!
//! Source: F. Wilcoxon, Biometrics Bulletin 1 (1945).

use serde::Serialize;
use statrs::distribution::ContinuousCDF;

use super::normal;

/// Differences up to which the distribution is counted out.
pub const MAX_EXACT: usize = 50;

/// The test of some differences.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Wilcoxon {
    /// Differences that are not 0.
    pub n: usize,
    /// The smaller of the two sums of ranks.
    pub statistic: f64,
    /// Two-sided p; 1 where all differences are 0.
    pub p: f64,
    /// Whether p is counted out, not normal.
    pub is_exact: bool,
}

impl Wilcoxon {
    /// Tests differences; `None` without any.
    pub fn signed_rank(differences: &[f64]) -> Option<Self> {
        if differences.is_empty() {
            return None;
        }
        let mut d: Vec<f64> = differences.iter().copied().filter(|&d| d != 0.0).collect();
        d.sort_by(|a, b| a.abs().total_cmp(&b.abs()));
        let n = d.len();
        let (mut positive, mut ties, mut first) = (0.0, 0.0, 0);
        for run in d.chunk_by(|a, b| a.abs() == b.abs()) {
            let size = run.len() as f64;
            let rank = first as f64 + (size + 1.0) / 2.0;
            positive += rank * run.iter().filter(|&&d| d > 0.0).count() as f64;
            ties += size * (size * size - 1.0);
            first += run.len();
        }
        let all = n as f64 * (n + 1) as f64 / 2.0;
        let statistic = positive.min(all - positive);
        let is_exact = n > 0 && n <= MAX_EXACT && n == differences.len() && ties == 0.0;
        let p = match (n, is_exact) {
            (0, _) => 1.0,
            (_, true) => exact_p(n, statistic as usize),
            (_, false) => normal_p(n, statistic, ties),
        };
        Some(Self {
            n,
            statistic,
            p,
            is_exact,
        })
    }
}

/// Twice the chance of a sum of ranks of at most `statistic`, each rank of 1 … n taken or not with chance ½.
fn exact_p(n: usize, statistic: usize) -> f64 {
    // ways[s]: choices of ranks with sum s; below 2⁵⁰, so exact.
    let mut ways = vec![0.0; n * (n + 1) / 2 + 1];
    ways[0] = 1.0;
    for rank in 1..=n {
        for sum in (rank..ways.len()).rev() {
            ways[sum] += ways[sum - rank];
        }
    }
    let tail: f64 = ways[..=statistic].iter().sum();
    (2.0 * tail / 2f64.powi(n as i32)).min(1.0)
}

fn normal_p(n: usize, statistic: f64, ties: f64) -> f64 {
    let n = n as f64;
    let mean = n * (n + 1.0) / 4.0;
    let variance = (n * (n + 1.0) * (2.0 * n + 1.0) - ties / 2.0) / 24.0;
    let z = (mean - statistic - 0.5).max(0.0) / variance.sqrt();
    (2.0 * normal().sf(z)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drawn_example() {
        let found = Wilcoxon::signed_rank(&[0.3, -0.1, 0.7, 0.2, -0.5]).unwrap();
        assert_eq!((found.n, found.statistic, found.is_exact), (5, 5.0, true));
        assert!((found.p - 0.625).abs() < 1e-15, "{}", found.p);
    }

    #[test]
    fn zeros_say_nothing() {
        let none = Wilcoxon::signed_rank(&[0.0, 0.0]).unwrap();
        assert_eq!((none.n, none.p), (0, 1.0));
        assert_eq!(Wilcoxon::signed_rank(&[]), None);
        let even = Wilcoxon::signed_rank(&[1.0, -1.0]).unwrap();
        assert_eq!((even.p, even.is_exact), (1.0, false));
    }
}
