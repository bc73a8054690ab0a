//! Parts of a whole: right answers of all questions, and their intervals, which stay between 0 and 1.
//!
//! Invariants: an interval never leaves [0, 1] and is never a point; clusters of questions count as fewer questions than
//! they hold, by as much as they are alike.
//!
//! ```text
//! contexts   5 questions each, right: 4 1 0 3 ...      p = Σx / Σy, SE(p) of the linearised ratio, k contexts
//! n*         p(1 − p) / SE² · (z / t)²                 as many independent questions have this error
//!            k where p is 0 or 1, Σy at most           (z normal's and t Student's 97.5 %, k − 1 degrees of freedom)
//! interval   Wilson's of p out of n*
//! ```
//!
//! Sources: E. B. Wilson, J. American Statistical Association 22 (1927); E. L. Korn and B. I. Graubard, Survey Methodology
//! 24 (1998), for the effective number.

use statrs::distribution::ContinuousCDF;

use super::{COVERAGE, Estimate, Over, normal, t_quantile};

impl Estimate {
    /// The fraction of items that hold, with Wilson's interval. The error is lm-eval's: √(f(1 − f)/(n − 1)). `None` without
    /// items.
    pub fn fraction(holds: &[bool]) -> Option<Self> {
        let n = holds.len();
        let count = holds.iter().filter(|&&h| h).count() as f64;
        let value = (n > 0).then(|| count / n as f64)?;
        Some(Self {
            value,
            n,
            se: (n > 1).then(|| (value * (1.0 - value) / (n - 1) as f64).sqrt()),
            interval: (n > 1).then(|| wilson(value, n as f64)),
            over: Over::Items,
        })
    }

    /// Σx / Σy of clusters with y questions each that are worth x ≤ y: [`Estimate::fraction`] where each is one question,
    /// right or wrong. `None` without questions.
    pub fn proportion(numerators: &[f64], denominators: &[f64]) -> Option<Self> {
        let (x, y): (Vec<f64>, Vec<f64>) = numerators
            .iter()
            .zip(denominators)
            .filter(|&(_, &y)| y > 0.0)
            .unzip();
        let is_single = |(&x, &y): (&f64, &f64)| y == 1.0 && (x == 0.0 || x == 1.0);
        if x.iter().zip(&y).all(is_single) {
            return Self::fraction(&x.iter().map(|&x| x == 1.0).collect::<Vec<_>>());
        }
        let (total, clusters) = (y.iter().sum::<f64>(), y.len() as f64);
        let (value, se, _) = Self::linearised(&x, &y)?;
        let interval = se.map(|se| {
            let spread = normal().inverse_cdf(0.5 + COVERAGE / 2.0) / t_quantile(y.len() - 1) / se;
            let is_mixed = value > 0.0 && value < 1.0;
            let effective = if is_mixed {
                value * (1.0 - value) * spread * spread
            } else {
                clusters
            };
            wilson(value, effective.min(total))
        });
        Some(Self {
            value,
            n: y.len(),
            se,
            interval,
            over: Over::Items,
        })
    }
}

/// Wilson's 95 % interval of a fraction of `n` questions.
fn wilson(fraction: f64, n: f64) -> (f64, f64) {
    let z = normal().inverse_cdf(0.5 + COVERAGE / 2.0);
    let middle = (fraction * n + z * z / 2.0) / (n + z * z);
    let half = z / (n + z * z) * (n * fraction * (1.0 - fraction) + z * z / 4.0).sqrt();
    ((middle - half).max(0.0), (middle + half).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::super::tests::coverage::{Normals, share_that};
    use super::*;

    /// Contexts of five questions, 3 1 2 right: p = 0.4, e = 1 −1 0, SE = √(3/2 · 2)/15 = 0.11547, n* = 0.24/0.013333 ·
    /// (1.959964/4.302653)² = 3.73505.
    #[test]
    fn clusters_count_as_fewer_questions() {
        let found = Estimate::proportion(&[3.0, 1.0, 2.0], &[5.0; 3]).unwrap();
        assert!((found.value - 0.4).abs() < 1e-12 && (found.se.unwrap() - 0.115_470).abs() < 1e-6);
        let (low, high) = found.interval.unwrap();
        let (want_low, want_high) = wilson(0.4, 3.735_05);
        assert!((low - want_low).abs() < 1e-5 && (high - want_high).abs() < 1e-5);
        // A context without questions is none; one question each is Wilson's fraction.
        let padded = Estimate::proportion(&[3.0, 0.0, 1.0, 2.0], &[5.0, 0.0, 5.0, 5.0]);
        assert_eq!(padded, Some(found));
        let single = Estimate::proportion(&[1.0, 0.0, 1.0], &[1.0; 3]);
        assert_eq!(single, Estimate::fraction(&[true, false, true]));
        assert_eq!(Estimate::proportion(&[], &[]), None);
    }

    /// Neither all right nor contexts that agree to the question are a point, and no end leaves [0, 1].
    #[test]
    fn an_interval_is_no_point_and_stays_inside() {
        for (right, ends) in [
            (0.0, (0.0, 0.561_5)),
            (5.0, (0.438_5, 1.0)),
            (2.0, (0.198_2, 0.642_5)),
        ] {
            let found = Estimate::proportion(&[right; 3], &[5.0; 3]).unwrap();
            let (low, high) = found.interval.unwrap();
            assert!(
                (low - ends.0).abs() < 1e-4 && (high - ends.1).abs() < 1e-4,
                "{found:?}"
            );
        }
        for right in 0..=15 {
            let x: Vec<f64> = (0..3)
                .map(|i| f64::from((right - 5 * i).clamp(0, 5)))
                .collect();
            let (low, high) = Estimate::proportion(&x, &[5.0; 3])
                .unwrap()
                .interval
                .unwrap();
            assert!(0.0 <= low && low < high && high <= 1.0, "{x:?}");
        }
    }

    /// Contexts of five questions with a chance of their own, normal on a logit scale; the truth is the mean chance.
    #[test]
    fn the_interval_of_clusters_covers_what_it_says() {
        let chance = |z: f64, middle: f64| 1.0 / (1.0 + (-(middle + z)).exp());
        for middle in [-3.0, -1.0, 0.0] {
            let mut draws = Normals::new(77);
            let truth = (0..200_000)
                .map(|_| chance(draws.next(), middle))
                .sum::<f64>()
                / 2e5;
            for n in [3, 8, 20] {
                let held = share_that(2000, |stream| {
                    let mut draws = Normals::new(1000 + stream);
                    let right: Vec<f64> = (0..n)
                        .map(|_| {
                            let p = chance(draws.next(), middle);
                            let limit = normal().inverse_cdf(p);
                            (0..5).filter(|_| draws.next() < limit).count() as f64
                        })
                        .collect();
                    let found = Estimate::proportion(&right, &vec![5.0; n]).unwrap();
                    let (low, high) = found.interval.unwrap();
                    low <= truth && truth <= high
                });
                println!(
                    "mean chance {truth:.3}, {n} contexts: {:.1} %",
                    100.0 * held
                );
                assert!(held >= 0.93, "{truth}, {n}: {held}");
            }
        }
    }
}
