//! Paired comparisons of log-likelihoods: two caches on the same tokens of the same items.
//!
//! Invariants: NLL(a) − NLL(b) per token, so below 0 the first is better; a against itself is equivalent with p = 1.

use serde::Serialize;

use super::wilcoxon::Wilcoxon;
use super::{Comparison, Estimate, Judged, NLL_MARGIN, Sense, judge};

/// A paired comparison of log-likelihoods on the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Paired {
    /// NLL(a) − NLL(b) per token, nats, and its tests.
    pub comparison: Comparison,
    /// Wilcoxon's test of the items' mean differences: not weighted by tokens, unmoved by an outlier.
    pub wilcoxon: Wilcoxon,
    /// What may be said: of this comparison alone, or among those of its table ([`Paired::judge_table`]).
    pub judged: Judged,
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
        let means: Vec<f64> = differences
            .iter()
            .zip(&tokens)
            .map(|(d, n)| d / n)
            .collect();
        let comparison = if pairs.iter().all(|p| p.identical) {
            Comparison::identical(delta, NLL_MARGIN)
        } else {
            Comparison::new(delta, NLL_MARGIN)
        };
        Some(Self::new(comparison, Wilcoxon::signed_rank(&means)?))
    }

    /// Gives a comparison of one item an interval over blocks of its tokens, from NLL(a) − NLL(b) of each.
    pub fn over_tokens(self, differences: &[f64]) -> Self {
        if self.comparison.is_identical {
            return self;
        }
        let delta = self.comparison.delta.over_tokens(differences);
        Self::new(Comparison::new(delta, NLL_MARGIN), self.wilcoxon)
    }

    fn new(comparison: Comparison, wilcoxon: Wilcoxon) -> Self {
        Self {
            comparison,
            wilcoxon,
            judged: judge(&[comparison], Sense::LowerIsBetter)[0],
        }
    }

    /// Judges comparisons as the rows of one table: Holm's correction over all of them.
    pub fn judge_table(table: &mut [&mut Paired]) {
        let comparisons: Vec<Comparison> = table.iter().map(|p| p.comparison).collect();
        let judged = judge(&comparisons, Sense::LowerIsBetter);
        for (paired, judged) in table.iter_mut().zip(judged) {
            paired.judged = judged;
        }
    }

    /// NLL(a) − NLL(b) per token, nats.
    pub fn delta(&self) -> &Estimate {
        &self.comparison.delta
    }

    /// The change of perplexity from b to a, in percent of b's: exp of the difference, less 1, and so its interval.
    pub fn ppl_change_percent(&self) -> Estimate {
        self.comparison.delta.exp_m1().scaled(100.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Over, Verdict, t_quantile};
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

    /// Sleep data of Student (1908), drug 2 against drug 1: mean 1.58, t = 4.0621.
    #[test]
    fn the_sleep_data() {
        let one = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0];
        let two = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4];
        let test = Paired::compare(&pairs(&two, &one)).unwrap();
        close(test.delta().value, 1.58, 1e-12);
        let t = test.delta().value / test.delta().se.unwrap();
        close(t, 4.062_127_683, 1e-8);
        assert!(test.comparison.p.unwrap() < 0.01);
        // SciPy: wilcoxon(two - one, method="asymptotic", correction=True), one zero dropped.
        close(test.wilcoxon.p, 0.009_090_698, 1e-8);
        assert_eq!(test.judged.verdict, Verdict::Worse);
        let back = Paired::compare(&pairs(&one, &two)).unwrap();
        assert_eq!(back.judged.verdict, Verdict::Better);
        close(back.comparison.p.unwrap(), test.comparison.p.unwrap(), 1e-3);
    }

    #[test]
    fn perplexity_change_goes_through_exp() {
        let test = Paired::compare(&pairs(&[1.2, 1.2], &[1.1, 1.1])).unwrap();
        close(test.ppl_change_percent().value, 10.517_091_807_6, 1e-9);
        let wide = Paired::compare(&pairs(&[1.1, 1.3], &[1.0, 1.0])).unwrap();
        let (low, high) = wide.ppl_change_percent().interval.unwrap();
        let half: f64 = 12.706_204_736 * 0.1;
        close(low, 100.0 * ((0.2 - half).exp() - 1.0), 1e-5);
        close(high, 100.0 * ((0.2 + half).exp() - 1.0), 1e-4);
        assert_eq!(wide.judged.verdict, Verdict::NotDistinguishable);
    }

    #[test]
    fn a_against_a_is_equivalent() {
        for n in [1, 3, 12] {
            let a: Vec<f64> = (0..n).map(|i| 1.0 + f64::from(i)).collect();
            let test = Paired::compare(&pairs(&a, &a)).unwrap();
            assert_eq!(test.delta().value, 0.0);
            assert_eq!(test.comparison.p, Some(1.0));
            assert_eq!((test.judged.p_holm, test.wilcoxon.p), (Some(1.0), 1.0));
            assert_eq!(test.judged.verdict, Verdict::Equivalent);
            assert_eq!(test.over_tokens(&[0.0; 64]), test);
        }
    }

    /// Sums may agree where tokens do not: that is no identity, and three items are too few to be sure of a margin.
    #[test]
    fn equal_sums_of_different_tokens_are_a_test() {
        let mut items = pairs(&[1.0, 2.0, 0.3], &[1.0, 2.03, 0.28]);
        items[0].identical = false;
        let test = Paired::compare(&items).unwrap();
        assert_eq!(test.judged.verdict, Verdict::NotDistinguishable);
        assert!(!test.comparison.is_identical && test.judged.n_needed.is_some());
    }

    #[test]
    fn one_item_has_no_interval_but_over_its_tokens() {
        let test = Paired::compare(&pairs(&[40.0], &[20.0])).unwrap();
        assert_eq!((test.delta().interval, test.comparison.p), (None, None));
        assert_eq!(test.ppl_change_percent().interval, None);
        assert_eq!(test.judged.verdict, Verdict::NoInterval);
        assert_eq!(Paired::compare(&[]), None);
        let tokens: Vec<f64> = (0..400).map(|i| f64::from(i * 7 % 11) / 100.0).collect();
        let within = test.over_tokens(&tokens);
        assert!(matches!(within.delta().over, Over::Blocks { n_blocks, .. } if n_blocks >= 5));
        assert_eq!(within.delta().value, 20.0);
        assert_eq!(within.judged.verdict, Verdict::Worse);
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
        let t = test.delta().value / test.delta().se.unwrap();
        close(t, 0.5 * 219f64.sqrt(), 1e-9);
        close(
            test.delta().half_width().unwrap(),
            t_quantile(219) * test.delta().se.unwrap(),
            0.002,
        );
        assert!(test.comparison.p.unwrap() < 1e-10);
        let (one, two) = (Estimate::mean(&a).unwrap(), Estimate::mean(&b).unwrap());
        let z = (one.value - two.value) / one.se.unwrap().hypot(two.se.unwrap());
        assert!(z < 0.4, "unpaired z = {z}");
    }
}
