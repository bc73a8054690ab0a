//! Two caches on the same questions: whose answers are right, and what may be said of it.
//!
//! Invariants: the test is McNemar's wherever questions are not clustered; equal likelihoods to the bit are no test;
//! questions on one context are alike and count as one cluster, which never makes an interval narrower.

use crate::eval::records::{AnswerRecord, ItemRecord, OptionRecord};
use crate::eval::stats::{ACCURACY_MARGIN, Comparison, Estimate, Judged, Sense, judge};

use super::accuracy::{is_right_reference, is_right_strategy};

/// One question, answered twice.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Match {
    is_right_a: bool,
    is_right_b: bool,
    /// Whether all options' likelihoods are equal to the bit.
    is_identical: bool,
    /// −ln p of the right option, the first's less the second's, nats.
    gold_nll: f64,
    /// The right option's tokens.
    n_gold_tokens: usize,
}

/// An answer, and whose.
#[derive(Clone, Copy)]
struct Side<'a> {
    answer: &'a AnswerRecord,
    is_right: fn(&AnswerRecord) -> bool,
    nll: fn(&OptionRecord) -> f64,
}

impl<'a> Side<'a> {
    fn strategy(answer: &'a AnswerRecord) -> Self {
        Self {
            answer,
            is_right: is_right_strategy,
            nll: |option| option.nll,
        }
    }

    fn reference(answer: &'a AnswerRecord) -> Self {
        Self {
            answer,
            is_right: is_right_reference,
            nll: |option| option.nll_reference,
        }
    }
}

impl Match {
    fn new(a: Side<'_>, b: Side<'_>) -> Self {
        let likelihoods = |side: Side<'_>| side.answer.options.iter().map(side.nll).collect();
        let (of_a, of_b): (Vec<f64>, Vec<f64>) = (likelihoods(a), likelihoods(b));
        let gold = a.answer.gold;
        let nlls = of_a.get(gold).zip(of_b.get(gold));
        Self {
            is_right_a: (a.is_right)(a.answer),
            is_right_b: (b.is_right)(b.answer),
            is_identical: of_a == of_b,
            gold_nll: nlls.map_or(0.0, |(a, b)| a - b),
            n_gold_tokens: a.answer.options.get(gold).map_or(0, |o| o.n_tokens),
        }
    }

    /// 1 where the first alone is right, −1 where the second alone is.
    fn difference(&self) -> f64 {
        f64::from(i8::from(self.is_right_a) - i8::from(self.is_right_b))
    }
}

/// Two rows' answers to the same questions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PairedAnswers {
    /// Questions.
    pub n_questions: usize,
    /// Questions that the first alone gets right.
    pub n_only_a: usize,
    /// Questions that the second alone gets right.
    pub n_only_b: usize,
    /// The first's accuracy less the second's, with its tests.
    pub comparison: Comparison,
    /// What may be said of it among the pairs of its table.
    pub judged: Judged,
    /// −ln p of the right option, the first's less the second's, nats per token.
    pub gold_delta_nll: Estimate,
}

impl PairedAnswers {
    /// The strategy's answers beside the reference's; `None` unless there are any.
    pub(super) fn with_reference(items: &[&ItemRecord]) -> Option<Self> {
        let question = |answer| Match::new(Side::strategy(answer), Side::reference(answer));
        Self::new(
            items
                .iter()
                .map(|item| item.answers.iter().map(question).collect()),
        )
    }

    /// Two strategies' answers; `None` unless there are any.
    pub(super) fn of_rows(items: &[(&ItemRecord, &ItemRecord)]) -> Option<Self> {
        let question = |(a, b)| Match::new(Side::strategy(a), Side::strategy(b));
        Self::new(
            items
                .iter()
                .map(|(a, b)| a.answers.iter().zip(&b.answers).map(question).collect()),
        )
    }

    /// `items`: the questions of each.
    fn new(items: impl Iterator<Item = Vec<Match>>) -> Option<Self> {
        let items: Vec<Vec<Match>> = items.filter(|questions| !questions.is_empty()).collect();
        let all = || items.iter().flatten();
        let comparison = compare(&items)?;
        let gold_nll = sums(&items, |m| m.gold_nll);
        let n_gold_tokens = sums(&items, |m| m.n_gold_tokens as f64);
        Some(Self {
            n_questions: all().count(),
            n_only_a: all().filter(|m| m.difference() > 0.0).count(),
            n_only_b: all().filter(|m| m.difference() < 0.0).count(),
            comparison,
            judged: judge(&[comparison], Sense::HigherIsBetter)[0],
            gold_delta_nll: Estimate::ratio(&gold_nll, &n_gold_tokens)?,
        })
    }

    /// Judges comparisons as those of one table: Holm's correction over all of them.
    pub(super) fn judge_table(table: &mut [&mut PairedAnswers]) {
        let comparisons: Vec<Comparison> = table.iter().map(|p| p.comparison).collect();
        let judged = judge(&comparisons, Sense::HigherIsBetter);
        for (paired, judged) in table.iter_mut().zip(judged) {
            paired.judged = judged;
        }
    }
}

/// The first against the second. A few clusters may agree by chance in how much the two differ, say in one question
/// lost and one gained in each: of the intervals over clusters and over questions the wider one counts.
fn compare(items: &[Vec<Match>]) -> Option<Comparison> {
    let all = || items.iter().flatten();
    let delta = Estimate::ratio(&sums(items, Match::difference), &sums(items, |_| 1.0))?;
    if all().all(|m| m.is_identical) {
        return Some(Comparison::identical(delta, ACCURACY_MARGIN));
    }
    let sides: (Vec<bool>, Vec<bool>) = all().map(|m| (m.is_right_a, m.is_right_b)).unzip();
    let single = Comparison::of_answers(&sides.0, &sides.1, ACCURACY_MARGIN)?;
    let clustered = Comparison::new(delta, ACCURACY_MARGIN);
    let is_single = items.iter().all(|questions| questions.len() == 1);
    let is_wider = delta.half_width() < single.delta.half_width();
    if is_single || delta.interval.is_some() && is_wider {
        return Some(single);
    }
    Some(Comparison {
        delta: delta.within(-1.0, 1.0),
        ..clustered
    })
}

/// Sums over each item's questions.
fn sums(items: &[Vec<Match>], of: impl Fn(&Match) -> f64) -> Vec<f64> {
    let item = |questions: &Vec<Match>| questions.iter().map(&of).sum();
    items.iter().map(item).collect()
}
