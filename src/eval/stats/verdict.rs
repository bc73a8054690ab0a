//! What may be said of a difference: better, worse, equivalent within a margin, or not distinguishable at this n.
//!
//! Invariants: words are given to a whole table at once, with p corrected by Holm over its rows, for differences and for
//! equivalence apart; what is equal to the bit is equivalent and no test, so it is not counted among them.
//!
//! ```text
//!              −δ            0            δ        (fewer nats are better)
//!  [───]        │            │            │        better
//!               │    [───]   │            │        better, within δ
//!               │         [──┼───]        │        equivalent
//!               │    [───────┼────────────┼──]     not distinguishable at n
//!               │            │    [───]   │        worse, within δ
//!               │            │       [────┼──]     worse
//! ```
//!
//! Equivalence is D. J. Schuirmann's two one-sided tests (J. Pharmacokinetics and Biopharmaceutics 15, 1987) at 5 %: both
//! "at least δ worse" and "at least δ better" are rejected.

use std::fmt;

use serde::Serialize;
use statrs::distribution::ContinuousCDF;

use super::holm::holm;
use super::{COVERAGE, Estimate, McNemar, Over, normal, t_quantile};

/// Differences of NLL below this many nats per token make no difference: about 1 % of perplexity.
pub const NLL_MARGIN: f64 = 0.01;

/// Differences of accuracy below one percentage point make no difference.
pub const ACCURACY_MARGIN: f64 = 0.01;

/// Level of all tests, the corrected p.
const LEVEL: f64 = 1.0 - COVERAGE;

/// Chance of finding a difference of the size seen, where a number of items is asked for.
const POWER: f64 = 0.8;

/// Numbers of items beyond this are no advice.
const MAX_N: f64 = 1e9;

/// One of two paired sets of scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Equal to the bit, or within the margin and not distinguishable from 0.
    Equivalent,
    /// Neither a difference nor its absence is shown.
    NotDistinguishable,
    /// Better, by more than the margin as far as is known.
    Better,
    /// Better, and by less than the margin.
    BetterWithinMargin,
    /// Worse, by more than the margin as far as is known.
    Worse,
    /// Worse, and by less than the margin.
    WorseWithinMargin,
    /// One item: no interval, no verdict.
    NoInterval,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Equivalent => "equivalent",
            Verdict::NotDistinguishable => "not distinguishable",
            Verdict::Better => "better",
            Verdict::BetterWithinMargin => "better, within δ",
            Verdict::Worse => "worse",
            Verdict::WorseWithinMargin => "worse, within δ",
            Verdict::NoInterval => "no interval (n = 1)",
        })
    }
}

/// Which way a score points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sense {
    /// Fewer nats.
    LowerIsBetter,
    /// More right answers.
    HigherIsBetter,
}

/// A difference of two paired scores, before its table is looked at as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Comparison {
    /// Score of the first minus score of the second.
    pub delta: Estimate,
    /// Two-sided p of no difference; `None` where there is no interval.
    pub p: Option<f64>,
    /// p of a difference of at least the margin, the larger of the two one-sided tests.
    pub p_margin: Option<f64>,
    /// The margin δ, in the score's unit.
    pub margin: f64,
    /// Whether the two agree to the bit on everything.
    pub is_identical: bool,
}

impl Comparison {
    /// Of a difference that is not one of identical scores.
    pub fn new(delta: Estimate, margin: f64) -> Self {
        let sides = delta.p_above(-margin).zip(delta.p_below(margin));
        Self {
            delta,
            p: delta.p_value(),
            p_margin: sides.map(|(above, below)| above.max(below)),
            margin,
            is_identical: false,
        }
    }

    /// Of scores that agree to the bit: no difference, p = 1.
    pub fn identical(delta: Estimate, margin: f64) -> Self {
        Self {
            p: Some(1.0),
            p_margin: Some(0.0),
            is_identical: true,
            ..Self::new(delta, margin)
        }
    }

    /// Of right and wrong answers to the same items: the difference of the accuracies with Bonett and Price's interval,
    /// and McNemar's exact p. `None` without items or for lists of different lengths.
    ///
    /// The interval (J. Educational and Behavioral Statistics 37, 2012) adds an item to each kind of disagreement: a few
    /// answers in which the two agree don't show that they always do.
    pub fn of_answers(a: &[bool], b: &[bool], margin: f64) -> Option<Self> {
        let test = McNemar::exact(a, b)?;
        let n = test.n as f64;
        let value = (test.only_a as f64 - test.only_b as f64) / n;
        let spread = |p: f64, q: f64, n: f64| ((p + q - (p - q).powi(2)) / n).sqrt();
        let (p, q) = (
            (test.only_a as f64 + 1.0) / (n + 2.0),
            (test.only_b as f64 + 1.0) / (n + 2.0),
        );
        let half = normal().inverse_cdf(0.5 + COVERAGE / 2.0) * spread(p, q, n + 2.0);
        let is_one = test.n == 1;
        let delta = Estimate {
            value,
            n: test.n,
            se: (!is_one).then(|| spread(test.only_a as f64 / n, test.only_b as f64 / n, n - 1.0)),
            interval: (!is_one).then_some((p - q - half, p - q + half)),
            over: Over::Items,
        };
        Some(Self {
            p: (!is_one).then_some(test.p),
            ..Self::new(delta.within(-1.0, 1.0), margin)
        })
    }
}

/// What a comparison comes to among those of its table.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Judged {
    /// p of no difference, corrected by Holm over the table.
    pub p_holm: Option<f64>,
    /// p of a difference of at least the margin, corrected likewise.
    pub p_margin_holm: Option<f64>,
    /// The word.
    pub verdict: Verdict,
    /// Items at which the difference seen would, with a chance of 80 %, be found or shown to be within the margin,
    /// whichever is fewer; `None` unless it is not distinguishable.
    pub n_needed: Option<usize>,
}

impl fmt::Display for Judged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.n_needed {
            Some(n) => write!(f, "{}; n ≈ {n} would tell", self.verdict),
            None => write!(f, "{}", self.verdict),
        }
    }
}

/// The words for all comparisons of one table, in order.
pub fn judge(table: &[Comparison], sense: Sense) -> Vec<Judged> {
    let corrected = |p: fn(&Comparison) -> Option<f64>| {
        let tests: Vec<Option<f64>> = table
            .iter()
            .map(|c| p(c).filter(|_| !c.is_identical))
            .collect();
        let known: Vec<f64> = tests.iter().copied().flatten().collect();
        let mut corrected = holm(&known).into_iter();
        let each = table.iter().zip(tests);
        each.map(|(c, test)| match test {
            Some(_) => corrected.next(),
            None => p(c),
        })
        .collect::<Vec<_>>()
    };
    let (of_difference, of_margin) = (corrected(|c| c.p), corrected(|c| c.p_margin));
    let n_tests = table
        .iter()
        .filter(|c| c.p.is_some() && !c.is_identical)
        .count();
    table
        .iter()
        .zip(of_difference.into_iter().zip(of_margin))
        .map(|(c, (p_holm, p_margin_holm))| {
            let verdict = word(c, p_holm, p_margin_holm, sense);
            Judged {
                p_holm,
                p_margin_holm,
                verdict,
                n_needed: (verdict == Verdict::NotDistinguishable)
                    .then(|| n_needed(c, LEVEL / n_tests.max(1) as f64))
                    .flatten(),
            }
        })
        .collect()
}

fn word(comparison: &Comparison, p: Option<f64>, p_margin: Option<f64>, sense: Sense) -> Verdict {
    if comparison.is_identical {
        return Verdict::Equivalent;
    }
    let (Some(p), Some(p_margin)) = (p, p_margin) else {
        return Verdict::NoInterval;
    };
    let is_better = (comparison.delta.value > 0.0) == (sense == Sense::HigherIsBetter);
    match (p < LEVEL, p_margin < LEVEL, is_better) {
        (false, false, _) => Verdict::NotDistinguishable,
        (false, true, _) => Verdict::Equivalent,
        (true, false, true) => Verdict::Better,
        (true, true, true) => Verdict::BetterWithinMargin,
        (true, false, false) => Verdict::Worse,
        (true, true, false) => Verdict::WorseWithinMargin,
    }
}

/// Items that would settle it at this level, by the normal approximation, were the difference and the spread as seen.
/// Never fewer than one more than there are. `None` without a spread over items, and beyond any sensible number.
fn n_needed(comparison: &Comparison, level: f64) -> Option<usize> {
    let delta = &comparison.delta;
    if delta.over != Over::Items {
        return None;
    }
    let n = delta.n as f64;
    let spread = delta.half_width()? / t_quantile(delta.freedom()) * n.sqrt();
    let z = normal();
    let is_enough = |n: f64| {
        let se = spread / n.sqrt();
        let size = delta.value.abs();
        let found = z.cdf(size / se - z.inverse_cdf(1.0 - level / 2.0));
        let near = (comparison.margin - size) / se - z.inverse_cdf(1.0 - level);
        let far = (comparison.margin + size) / se - z.inverse_cdf(1.0 - level);
        found >= POWER || z.cdf(near) + z.cdf(far) - 1.0 >= POWER
    };
    if spread == 0.0 || !is_enough(MAX_N) {
        return None;
    }
    let (mut too_few, mut enough) = (n, MAX_N);
    while enough - too_few > 1.0 {
        let middle = ((too_few + enough) / 2.0).floor();
        if is_enough(middle) {
            enough = middle;
        } else {
            too_few = middle;
        }
    }
    Some(enough as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A difference with Student's interval.
    fn delta(value: f64, se: f64, n: usize) -> Estimate {
        let half = t_quantile(n - 1) * se;
        Estimate {
            value,
            n,
            se: Some(se),
            interval: Some((value - half, value + half)),
            over: Over::Items,
        }
    }

    fn alone(value: f64, se: f64, sense: Sense) -> Judged {
        judge(&[Comparison::new(delta(value, se, 101), 0.01)], sense)[0]
    }

    #[test]
    fn every_word_has_its_place() {
        use Sense::{HigherIsBetter, LowerIsBetter};
        let words = [
            (-0.02, 0.002, Verdict::Better, Verdict::Worse),
            (
                -0.005,
                0.001,
                Verdict::BetterWithinMargin,
                Verdict::WorseWithinMargin,
            ),
            (-0.001, 0.001, Verdict::Equivalent, Verdict::Equivalent),
            (
                0.003,
                0.02,
                Verdict::NotDistinguishable,
                Verdict::NotDistinguishable,
            ),
            (
                0.005,
                0.001,
                Verdict::WorseWithinMargin,
                Verdict::BetterWithinMargin,
            ),
            (0.011, 0.002, Verdict::Worse, Verdict::Better),
        ];
        for (value, se, lower, higher) in words {
            assert_eq!(alone(value, se, LowerIsBetter).verdict, lower, "{value}");
            assert_eq!(alone(value, se, HigherIsBetter).verdict, higher, "{value}");
        }
        let one = Estimate::mean(&[0.3]).unwrap();
        let judged = judge(&[Comparison::new(one, 0.01)], LowerIsBetter)[0];
        assert_eq!(judged.verdict, Verdict::NoInterval);
        assert_eq!((judged.p_holm, judged.n_needed), (None, None));
    }

    /// t = 2.5 with 100 degrees of freedom: p = 0.0140, 5 such rows 0.070. An identical row is no test.
    #[test]
    fn a_table_is_judged_as_a_whole() {
        let row = Comparison::new(delta(0.05, 0.02, 101), 0.01);
        let same = Comparison::identical(delta(0.0, 0.0, 101), 0.01);
        let few = judge(&[row, same, row, same], Sense::LowerIsBetter);
        assert_eq!(few[0].verdict, Verdict::Worse);
        assert_eq!(few[1].verdict, Verdict::Equivalent);
        assert_eq!(few[1].p_holm, Some(1.0));
        assert!((few[0].p_holm.unwrap() - 2.0 * row.p.unwrap()).abs() < 1e-15);
        let many = judge(&[row; 5], Sense::LowerIsBetter);
        assert!(
            many.iter()
                .all(|j| j.verdict == Verdict::NotDistinguishable)
        );
        assert!((many[4].p_holm.unwrap() - 0.0702).abs() < 2e-4);
    }

    /// d = 0.02, sd = 0.2: n = ((1.959964 + 0.841621)·0.2/0.02)² = 784.9. A small d is settled as equivalent: d = 0, δ =
    /// 0.01, sd = 0.2: 2Φ(δ/se − 1.644854) − 1 = 0.8, n = ((1.644854 + 1.281552)·0.2/0.01)² = 3425.5.
    #[test]
    fn how_many_more_would_settle_it() {
        let of = |value: f64| {
            let comparison = Comparison::new(delta(value, 0.02, 100), 0.01);
            judge(&[comparison], Sense::LowerIsBetter)[0].n_needed
        };
        assert_eq!(of(0.02), Some(785));
        assert_eq!(of(0.0), Some(3426));
        // As wide as the margin: neither ever.
        let level = Comparison::new(delta(0.01, 0.02, 100), 0.01);
        assert_eq!(
            judge(&[level], Sense::LowerIsBetter)[0].n_needed,
            Some(3140)
        );
        let words = judge(&[level], Sense::LowerIsBetter)[0].to_string();
        assert_eq!(words, "not distinguishable; n ≈ 3140 would tell");
    }

    /// 30 against 10 discordant answers of 400: Δ = 5 points, McNemar's p = 0.00222.
    #[test]
    fn answers_are_judged_by_mcnemar() {
        let a: Vec<bool> = (0..400).map(|i| i < 330).collect();
        let b: Vec<bool> = (0..400)
            .map(|i| i < 300 || (330..340).contains(&i))
            .collect();
        let found = Comparison::of_answers(&a, &b, ACCURACY_MARGIN).unwrap();
        assert!((found.delta.value - 0.05).abs() < 1e-15);
        assert!((found.p.unwrap() - 0.002_221_6).abs() < 1e-6, "{found:?}");
        let word = judge(&[found], Sense::HigherIsBetter)[0].verdict;
        assert_eq!(word, Verdict::Better);
        // p = 31/402, q = 11/402: 20/402 ± 1.959964 · √((42/402 − (20/402)²)/402).
        let (low, high) = found.delta.interval.unwrap();
        assert!((low - 0.018_530_7).abs() < 1e-6 && (high - 0.080_971_8).abs() < 1e-6);
        // Agreement on 400 items is within a point, on 20 it may be chance.
        for (n, word) in [
            (400, Verdict::Equivalent),
            (20, Verdict::NotDistinguishable),
        ] {
            let same = Comparison::of_answers(&a[..n], &a[..n], ACCURACY_MARGIN).unwrap();
            assert_eq!((same.delta.value, same.p), (0.0, Some(1.0)));
            assert_eq!(
                judge(&[same], Sense::HigherIsBetter)[0].verdict,
                word,
                "{n}"
            );
        }
        assert_eq!(Comparison::of_answers(&a, &b[1..], 0.01), None);
    }
}
