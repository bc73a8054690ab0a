//! From per-item sums to estimates: token-weighted ratios with cluster intervals, paired tests, percentiles, verdicts.
//!
//! Invariants: sums run in the order given (callers give items in index order), so a number depends on the records
//! alone; `n` travels with every estimate; one cluster gives no interval, never a NaN.
//!
//! Everything is one estimator. With xᵢ and yᵢ the numerator and denominator of cluster i (say ΔNLL and tokens of one
//! document), R = Σx / Σy and, with residuals eᵢ = xᵢ − R·yᵢ,
//!
//! ```text
//! SE(R) = √( n/(n−1) · Σ eᵢ² ) / |Σy|        interval = R ± t(0.975, n−1) · SE(R)
//! ```
//!
//! (the linearised ratio estimator of survey sampling: W. G. Cochran, Sampling Techniques, chapter 6). With equal
//! denominators it is exactly Student's interval of a mean, and, for differences, the paired t test.

use std::fmt;

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, StudentsT};

/// Coverage of every interval.
pub const COVERAGE: f64 = 0.95;

/// A ratio of sums over clusters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// Σx / Σy.
    pub value: f64,
    /// Clusters.
    pub n: usize,
    /// Standard error; `None` with one cluster.
    pub se: Option<f64>,
}

impl Estimate {
    /// The estimate from each cluster's numerator and denominator; `None` without clusters or where Σy is 0.
    pub fn ratio(numerators: &[f64], denominators: &[f64]) -> Option<Self> {
        let n = numerators.len();
        let total: f64 = denominators.iter().sum();
        if n == 0 || n != denominators.len() || total == 0.0 {
            return None;
        }
        let value = numerators.iter().sum::<f64>() / total;
        let squares: f64 = numerators
            .iter()
            .zip(denominators)
            .map(|(x, y)| (x - value * y).powi(2))
            .sum();
        let se = (n > 1).then(|| (n as f64 / (n - 1) as f64 * squares).sqrt() / total.abs());
        Some(Self { value, n, se })
    }

    /// Half the width of the 95 % interval.
    pub fn half_width(&self) -> Option<f64> {
        self.se.map(|se| se * t_quantile(self.n - 1))
    }

    /// The 95 % interval.
    pub fn interval(&self) -> Option<(f64, f64)> {
        self.half_width()
            .map(|half| (self.value - half, self.value + half))
    }

    /// Two-sided p of the hypothesis that the true value is 0.
    pub fn p_value(&self) -> Option<f64> {
        let se = self.se?;
        if se == 0.0 {
            return Some(if self.value == 0.0 { 1.0 } else { 0.0 });
        }
        Some((2.0 * student(self.n - 1).sf((self.value / se).abs())).min(1.0))
    }

    /// The estimate times a constant.
    pub fn scaled(&self, factor: f64) -> Self {
        Self {
            value: self.value * factor,
            n: self.n,
            se: self.se.map(|se| se * factor.abs()),
        }
    }

    /// The square root, its error carried along to first order: √m ± SE(m) / 2√m.
    pub fn sqrt(&self) -> Self {
        let value = self.value.max(0.0).sqrt();
        let se = if value > 0.0 {
            self.se.map(|se| se / (2.0 * value))
        } else {
            self.se.map(|_| 0.0)
        };
        Self {
            value,
            n: self.n,
            se,
        }
    }
}

/// One of two paired sets of log-likelihoods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Equal to the bit on every scored token.
    Equivalent,
    /// The interval of the difference contains 0.
    NotDistinguishable,
    /// The interval lies below 0: fewer nats.
    Better,
    /// The interval lies above 0: more nats.
    Worse,
    /// One cluster: no interval, no verdict.
    NoInterval,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Equivalent => "equivalent",
            Verdict::NotDistinguishable => "not distinguishable",
            Verdict::Better => "better",
            Verdict::Worse => "worse",
            Verdict::NoInterval => "no interval (n = 1)",
        })
    }
}

/// A paired comparison of log-likelihoods on the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Paired {
    /// NLL(a) − NLL(b) per token, nats.
    pub delta: Estimate,
    /// Two-sided p of the paired t test; `None` with one cluster.
    pub p: Option<f64>,
    /// What may be said.
    pub verdict: Verdict,
}

/// One item of a paired comparison: sums over the same tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    /// Σ NLL of the first, nats.
    pub a: f64,
    /// Σ NLL of the second, nats.
    pub b: f64,
    /// Tokens.
    pub n_scored: usize,
    /// Whether the two agree to the bit on every token.
    pub identical: bool,
}

impl Paired {
    /// Compares a with b over items; `None` without items.
    pub fn compare(pairs: &[Pair]) -> Option<Self> {
        let differences: Vec<f64> = pairs.iter().map(|p| p.a - p.b).collect();
        let tokens: Vec<f64> = pairs.iter().map(|p| p.n_scored as f64).collect();
        let delta = Estimate::ratio(&differences, &tokens)?;
        if pairs.iter().all(|p| p.identical) {
            return Some(Self {
                delta,
                p: Some(1.0),
                verdict: Verdict::Equivalent,
            });
        }
        let verdict = match delta.interval() {
            None => Verdict::NoInterval,
            Some((low, _)) if low > 0.0 => Verdict::Worse,
            Some((_, high)) if high < 0.0 => Verdict::Better,
            Some(_) => Verdict::NotDistinguishable,
        };
        Some(Self {
            delta,
            p: delta.p_value(),
            verdict,
        })
    }

    /// The change of perplexity from b to a, in percent of b's.
    pub fn ppl_change_percent(&self) -> f64 {
        100.0 * self.delta.value.exp_m1()
    }

    /// 95 % interval of the change of perplexity, in percent: the interval of ΔNLL through exp.
    pub fn ppl_change_interval_percent(&self) -> Option<(f64, f64)> {
        let (low, high) = self.delta.interval()?;
        Some((100.0 * low.exp_m1(), 100.0 * high.exp_m1()))
    }

    /// Half the width of that interval, in percent.
    pub fn ppl_change_half_percent(&self) -> Option<f64> {
        let (low, high) = self.ppl_change_interval_percent()?;
        Some((high - low) / 2.0)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f64, want: f64, tolerance: f64) {
        assert!((got - want).abs() <= tolerance, "{got} is not {want}");
    }

    fn pairs(a: &[f64], b: &[f64]) -> Vec<Pair> {
        a.iter()
            .zip(b)
            .map(|(&a, &b)| Pair {
                a,
                b,
                n_scored: 1,
                identical: a == b,
            })
            .collect()
    }

    /// Tables of Student's t (two-sided 95 %).
    #[test]
    fn quantiles_of_t_match_the_printed_tables() {
        for (freedom, want, tolerance) in [
            (1, 12.706_204_736, 2e-8),
            (2, 4.302_652_730, 2e-8),
            (7, 2.364_624_252, 2e-8),
            (19, 2.093_024_054, 2e-8),
            (100, 1.983_971_519, 2e-8),
            (100_000, 1.959_987_708, 1e-5),
        ] {
            close(t_quantile(freedom), want, tolerance);
        }
    }

    /// Sleep data of Student (1908), drug 2 against drug 1: mean 1.58, t = 4.0621, p = 0.002833, [0.7001, 2.4599].
    #[test]
    fn paired_t_of_the_sleep_data() {
        let one = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0];
        let two = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4];
        let test = Paired::compare(&pairs(&two, &one)).unwrap();
        close(test.delta.value, 1.58, 1e-12);
        close(
            test.delta.value / test.delta.se.unwrap(),
            4.062_127_683,
            1e-8,
        );
        close(test.p.unwrap(), 0.002_832_89, 1e-8);
        let (low, high) = test.delta.interval().unwrap();
        close(low, 0.700_114_2, 1e-6);
        close(high, 2.459_885_8, 1e-6);
        assert_eq!(test.verdict, Verdict::Worse);
        let back = Paired::compare(&pairs(&one, &two)).unwrap();
        assert_eq!(back.verdict, Verdict::Better);
        assert_eq!(back.p, test.p);
    }

    /// Three documents of 10, 20 and 30 tokens with Σd = 1, 1, 4: R = 6/60 = 0.1, e = 0, −1, 1,
    /// SE = √(3/2 · 2)/60 = √3/60; half width 4.302653 · 0.0288675 = 0.1242069.
    #[test]
    fn token_weighted_ratio_by_hand() {
        let r = Estimate::ratio(&[1.0, 1.0, 4.0], &[10.0, 20.0, 30.0]).unwrap();
        close(r.value, 0.1, 1e-15);
        close(r.se.unwrap(), 3f64.sqrt() / 60.0, 1e-15);
        close(r.half_width().unwrap(), 0.124_206_9, 1e-7);
        assert_eq!(r.n, 3);
        let percent = r.scaled(-100.0);
        close(percent.value, -10.0, 1e-12);
        close(percent.half_width().unwrap(), 12.420_69, 1e-5);
    }

    #[test]
    fn perplexity_change_goes_through_exp() {
        let test = Paired::compare(&pairs(&[1.2, 1.2], &[1.1, 1.1])).unwrap();
        close(test.ppl_change_percent(), 10.517_091_807_6, 1e-9);
        let wide = Paired::compare(&pairs(&[1.1, 1.3], &[1.0, 1.0])).unwrap();
        let (low, high) = wide.ppl_change_interval_percent().unwrap();
        let half: f64 = 12.706_204_736 * 0.1;
        close(low, 100.0 * ((0.2 - half).exp() - 1.0), 1e-5);
        close(high, 100.0 * ((0.2 + half).exp() - 1.0), 1e-4);
        assert_eq!(wide.verdict, Verdict::NotDistinguishable);
    }

    #[test]
    fn a_against_a_is_equivalent() {
        let a = [1.0, 2.5, 0.25];
        let test = Paired::compare(&pairs(&a, &a)).unwrap();
        assert_eq!(test.delta.value, 0.0);
        assert_eq!(test.p, Some(1.0));
        assert_eq!(test.verdict, Verdict::Equivalent);
    }

    /// Sums may agree where tokens do not: that is no equivalence.
    #[test]
    fn equal_sums_of_different_tokens_are_not_equivalent() {
        let mut items = pairs(&[1.0, 2.0], &[1.0, 2.0]);
        items[0].identical = false;
        let test = Paired::compare(&items).unwrap();
        assert_eq!(test.verdict, Verdict::NotDistinguishable);
        assert_eq!(test.p, Some(1.0));
    }

    #[test]
    fn one_cluster_has_no_interval() {
        let test = Paired::compare(&pairs(&[2.0], &[1.0])).unwrap();
        assert_eq!(test.delta.se, None);
        assert_eq!(test.delta.interval(), None);
        assert_eq!(test.p, None);
        assert_eq!(test.ppl_change_interval_percent(), None);
        assert_eq!(test.verdict, Verdict::NoInterval);
        assert_eq!(Paired::compare(&[]), None);
        assert_eq!(Estimate::ratio(&[1.0], &[0.0]), None);
    }

    /// 220 paired items whose spread dwarfs their difference: the pairs see what two unpaired means can't.
    /// d alternates 0.3, −0.1: mean 0.1, sd 0.2·√(220/219), t = 0.1·√219/0.2 = 7.399.
    #[test]
    fn pairing_sees_what_unpaired_means_hide() {
        let b: Vec<f64> = (0..220).map(|i| f64::from(i % 11)).collect();
        let a: Vec<f64> = b
            .iter()
            .enumerate()
            .map(|(i, x)| x + if i % 2 == 0 { 0.3 } else { -0.1 })
            .collect();
        let test = Paired::compare(&pairs(&a, &b)).unwrap();
        let t = test.delta.value / test.delta.se.unwrap();
        close(t, 0.5 * 219f64.sqrt(), 1e-9);
        assert!(test.p.unwrap() < 1e-11);
        let ones = vec![1.0; 220];
        let (one, two) = (
            Estimate::ratio(&a, &ones).unwrap(),
            Estimate::ratio(&b, &ones).unwrap(),
        );
        let z = (one.value - two.value) / one.se.unwrap().hypot(two.se.unwrap());
        assert!(z < 0.4, "unpaired z = {z}");
    }

    #[test]
    fn quantiles_interpolate() {
        let sorted = [1.0, 2.0, 3.0, 4.0];
        assert_eq!(quantile(&sorted, 0.5), Some(2.5));
        assert_eq!(quantile(&sorted, 0.0), Some(1.0));
        assert_eq!(quantile(&sorted, 1.0), Some(4.0));
        close(quantile(&sorted, 0.99).unwrap(), 3.97, 1e-12);
        assert_eq!(quantile(&[7.0], 0.99), Some(7.0));
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn root_mean_square_carries_its_error() {
        let mean = Estimate {
            value: 0.04,
            n: 5,
            se: Some(0.008),
        };
        let root = mean.sqrt();
        close(root.value, 0.2, 1e-15);
        close(root.se.unwrap(), 0.02, 1e-15);
        let zero = Estimate::ratio(&[0.0, 0.0], &[1.0, 1.0]).unwrap().sqrt();
        assert_eq!((zero.value, zero.se), (0.0, Some(0.0)));
    }
}
