//! Resampling clusters: the studentized bootstrap behind every interval, and the BCa interval it was chosen over.
//!
//! Invariants: the seed and the number of resamples are constants and one thread draws, so equal data have equal
//! intervals; a pair compared either way round has mirrored ones.
//!
//! ```text
//! 4 documents, e = −2 0 1 1, y = 1 1 1 1      R = Σx/Σy, e = x − R·y, Σe = 0
//! drawn       1 3 3 0                          e* = 0 1 1 −2,   R* − R = Σe*/Σy* = 0
//! SE(R*)      from e* − (R* − R)·y*            t* = (R* − R) / SE(R*), over and over
//! interval    [R − q₀.₉₇₅(t*)·SE, R − q₀.₀₂₅(t*)·SE]: data with a long right tail reach further right
//! ```
//!
//! Sources: B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993), sections 12.5 (bootstrap-t) and 14.3
//! (BCa); P. Hall, Annals of Statistics 16 (1988), for why studentizing is second-order accurate.

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use statrs::distribution::ContinuousCDF;

use super::{COVERAGE, normal, quantile};

/// Resamples of every interval: the order statistics at 2.5 % and 97.5 % are then whole.
pub const N_RESAMPLES: usize = 1999;

/// Clusters below which resampling can't tell a spread: Student's quantiles are used.
pub const MIN_CLUSTERS: usize = 8;

/// Where the stream of draws starts.
const SEED: u64 = 0x6b76_6c61_6273_7461;

/// A resample whose spread is below this part of the data's has none but rounding.
const NO_SPREAD: f64 = 1e-6;

/// Draws of cluster numbers with replacement.
pub(super) struct Draws {
    rng: ChaCha8Rng,
    n: u64,
}

impl Draws {
    pub(super) fn new(n: usize) -> Self {
        Self {
            rng: ChaCha8Rng::seed_from_u64(SEED),
            n: n as u64,
        }
    }

    /// A number below n: the high half of a 32-bit draw times n, whose unevenness (n / 2³²) is nothing here.
    pub(super) fn next(&mut self) -> usize {
        ((u64::from(self.rng.next_u32()) * self.n) >> 32) as usize
    }
}

/// The 2.5 % and 97.5 % quantiles of (R* − R) / SE(R*) over resampled clusters, from residuals e = x − R·y, the
/// denominators y and SE(R).
///
/// `None` where Student's must do: fewer than [`MIN_CLUSTERS`] clusters, no spread, or so few clusters unlike the others
/// that resamples without any of them (no spread, an infinite t*) reach a quantile.
pub fn studentized_quantiles(
    residuals: &[f64],
    denominators: &[f64],
    se: f64,
) -> Option<(f64, f64)> {
    let n = residuals.len();
    if n < MIN_CLUSTERS || se == 0.0 {
        return None;
    }
    let total: f64 = denominators.iter().sum();
    let inflation = (n as f64 / (n - 1) as f64).sqrt();
    let clusters: Vec<[f64; 5]> = residuals
        .iter()
        .zip(denominators)
        .map(|(&e, &y)| [e, y, e * e, e * y, y * y])
        .collect();
    let mut draws = Draws::new(n);
    let mut t: Vec<f64> = (0..N_RESAMPLES)
        .map(|_| {
            let mut sums = [0.0; 5];
            for _ in 0..n {
                let cluster = &clusters[draws.next()];
                for (sum, term) in sums.iter_mut().zip(cluster) {
                    *sum += term;
                }
            }
            let [e, y, ee, ey, yy] = sums;
            let shift = e / y;
            // Σ (e − shift·y)², which rounding may leave below 0 where there is no spread.
            let squares = (ee - shift * (2.0 * ey - shift * yy)).max(0.0);
            let spread = inflation * squares.sqrt() / y.abs();
            if y * total <= 0.0 || spread <= NO_SPREAD * se {
                return f64::INFINITY.copysign(shift);
            }
            shift / spread
        })
        .collect();
    t.sort_unstable_by(f64::total_cmp);
    let at = |p: f64| t[(p * (N_RESAMPLES + 1) as f64).round() as usize - 1];
    let (low, high) = (at(0.5 - COVERAGE / 2.0), at(0.5 + COVERAGE / 2.0));
    (low.is_finite() && high.is_finite() && low < 0.0 && high > 0.0).then_some((low, high))
}

/// The bias-corrected and accelerated interval of Σx / Σy; `None` below 2 clusters, where Σy is 0, or without spread.
///
/// Not what tables print: it covers less than the studentized interval (docs/statistics.md).
pub fn bca(numerators: &[f64], denominators: &[f64]) -> Option<(f64, f64)> {
    let n = numerators.len();
    let (x, y): (f64, f64) = (numerators.iter().sum(), denominators.iter().sum());
    if n < 2 || n != denominators.len() || y == 0.0 {
        return None;
    }
    let value = x / y;
    let mut draws = Draws::new(n);
    let mut ratios: Vec<f64> = (0..N_RESAMPLES)
        .map(|_| {
            let (mut x, mut y) = (0.0, 0.0);
            for _ in 0..n {
                let i = draws.next();
                x += numerators[i];
                y += denominators[i];
            }
            x / y
        })
        .collect();
    ratios.sort_unstable_by(f64::total_cmp);
    let below = ratios.iter().filter(|&&r| r < value).count();
    let equal = ratios.iter().filter(|&&r| r == value).count();
    let bias = (below as f64 + 0.5 * equal as f64) / N_RESAMPLES as f64;
    let left_out: Vec<f64> = (0..n)
        .map(|i| (x - numerators[i]) / (y - denominators[i]))
        .collect();
    let mean = left_out.iter().sum::<f64>() / n as f64;
    let moment = |k: i32| left_out.iter().map(|r| (mean - r).powi(k)).sum::<f64>();
    let acceleration = moment(3) / (6.0 * moment(2).powf(1.5));
    let z = normal();
    let z0 = z.inverse_cdf(bias);
    let end = |p: f64| {
        let shifted = z0 + z.inverse_cdf(p);
        let level = z.cdf(z0 + shifted / (1.0 - acceleration * shifted));
        level
            .is_finite()
            .then(|| quantile(&ratios, level))
            .flatten()
    };
    Some((end(0.5 - COVERAGE / 2.0)?, end(0.5 + COVERAGE / 2.0)?))
}

#[cfg(test)]
mod tests {
    use super::super::{Estimate, t_quantile};
    use super::*;

    fn skewed(n: usize) -> Vec<f64> {
        (0..n)
            .map(|i| (f64::from(i as u32 * 37 % 101) / 25.0).exp())
            .collect()
    }

    #[test]
    fn the_longer_tail_has_the_longer_reach() {
        let right = Estimate::mean(&skewed(40)).unwrap();
        let (low, high) = right.interval.unwrap();
        assert!(high - right.value > 1.2 * (right.value - low), "{right:?}");
        let mirrored: Vec<f64> = skewed(40).iter().map(|x| -x).collect();
        let left = Estimate::mean(&mirrored).unwrap();
        let (mirrored_low, mirrored_high) = left.interval.unwrap();
        assert!((mirrored_low + high).abs() < 0.02 * (high - low));
        assert!((mirrored_high + low).abs() < 0.02 * (high - low));
    }

    /// A scale and an origin change nothing but the scale and the origin; nor do the threads around it.
    #[test]
    fn equal_data_have_equal_intervals() {
        let base = Estimate::mean(&skewed(24)).unwrap();
        let moved: Vec<f64> = skewed(24).iter().map(|x| 8.0 * x - 64.0).collect();
        let moved = Estimate::mean(&moved).unwrap();
        let (a, b) = (base.interval.unwrap(), moved.interval.unwrap());
        assert!((8.0 * a.0 - 64.0 - b.0).abs() < 1e-9 && (8.0 * a.1 - 64.0 - b.1).abs() < 1e-9);
        let many: Vec<_> = std::thread::scope(|s| {
            let threads: Vec<_> = (0..4)
                .map(|_| s.spawn(|| Estimate::mean(&skewed(24))))
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(many.iter().all(|e| *e == Some(base)));
    }

    /// One document unlike the others: a third of all resamples leave it out and have no spread at all.
    #[test]
    fn where_resamples_have_no_spread_students_interval_stands() {
        let mut x = vec![0.0; 30];
        x[7] = 1.0;
        let found = Estimate::mean(&x).unwrap();
        let half = t_quantile(29) * found.se.unwrap();
        let (low, high) = found.interval.unwrap();
        assert!((found.value - half - low).abs() < 1e-15);
        assert!((found.value + half - high).abs() < 1e-15);
        let few = Estimate::mean(&skewed(MIN_CLUSTERS - 1)).unwrap();
        let half = t_quantile(MIN_CLUSTERS - 2) * few.se.unwrap();
        assert!((few.half_width().unwrap() - half).abs() < 1e-9);
    }

    #[test]
    fn bca_of_nothing_is_nothing() {
        assert_eq!(bca(&[1.0], &[1.0]), None);
        assert_eq!(bca(&[1.0, 2.0], &[1.0, -1.0]), None);
        assert_eq!(bca(&[2.0; 9], &[1.0; 9]), None);
    }
}
