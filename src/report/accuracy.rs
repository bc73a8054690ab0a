//! What answers are worth: accuracy of strategy and reference on the same questions, paired.
//!
//! Invariants: a mean is over questions with the item as its cluster; a question with options is right when the right one is the most
//! likely, one with a single option when each of its tokens is the most likely one (greedy); the first of equals counts.

use crate::eval::records::{AnswerRecord, GeneratedRecord, ItemRecord, OptionRecord};
use crate::eval::stats::Estimate;

use super::matches::PairedAnswers;

/// Accuracy by one rule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// The strategy's.
    pub value: Estimate,
    /// The reference's.
    pub reference: Estimate,
    /// Strategy minus reference, paired.
    pub delta: Estimate,
}

/// Answers of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Accuracy {
    /// By likelihood.
    pub acc: Rate,
    /// Strategy against reference.
    pub paired: PairedAnswers,
    /// By likelihood per character; `None` where questions have one option.
    pub acc_norm: Option<Rate>,
    /// Part of the reference's right answers that the strategy gives too; `None` where it has none.
    pub kept: Option<Estimate>,
    /// Part of the questions in which both choose the same option, or both are greedy or not.
    pub same_choice: Estimate,
    /// Worth of generated answers.
    pub generated: Option<Rate>,
}

/// Which side of a record.
type Side<T> = fn(&T) -> f64;

impl Accuracy {
    /// Of some items; `None` unless they hold answers.
    pub fn new(items: &[&ItemRecord]) -> Option<Self> {
        let answered: Vec<&ItemRecord> = items
            .iter()
            .copied()
            .filter(|r| !r.answers.is_empty())
            .collect();
        let sum = |f: &dyn Fn(&AnswerRecord) -> f64| -> Vec<f64> {
            let item = |r: &&ItemRecord| r.answers.iter().map(f).sum();
            answered.iter().map(item).collect()
        };
        let asked = sum(&|_| 1.0);
        let rate = |strategy: &dyn Fn(&AnswerRecord) -> f64,
                    reference: &dyn Fn(&AnswerRecord) -> f64| {
            let (ours, full) = (sum(strategy), sum(reference));
            let delta = sum(&|a| strategy(a) - reference(a));
            Some(Rate {
                value: Estimate::proportion(&ours, &asked)?,
                reference: Estimate::proportion(&full, &asked)?,
                delta: Estimate::ratio(&delta, &asked)?.within(-1.0, 1.0),
            })
        };
        let all = || answered.iter().flat_map(|r| &r.answers);
        let right = |a: &AnswerRecord| is_right_strategy(a);
        let right_reference = |a: &AnswerRecord| is_right_reference(a);
        let has_options = all().any(|a| a.options.len() > 1);
        let is_generated = all().any(|a| a.generated.is_some());
        let mut acc = rate(&|a| one(right(a)), &|a| one(right_reference(a)))?;
        let paired = PairedAnswers::with_reference(&answered)?;
        acc.delta = paired.comparison.delta;
        let score = |of: Side<GeneratedRecord>| {
            move |a: &AnswerRecord| a.generated.as_ref().map_or(0.0, of)
        };
        Some(Self {
            acc,
            paired,
            acc_norm: match has_options {
                true => rate(
                    &|a| one(is_right(a, OptionRecord::strategy, Per::Character)),
                    &|a| one(is_right(a, OptionRecord::reference, Per::Character)),
                ),
                false => None,
            },
            kept: Estimate::proportion(
                &sum(&|a| one(right(a) && right_reference(a))),
                &sum(&|a| one(right_reference(a))),
            ),
            same_choice: Estimate::proportion(&sum(&|a| one(is_same(a))), &asked)?,
            generated: match is_generated {
                true => rate(&score(|g| g.score), &score(|g| g.score_reference)),
                false => None,
            },
        })
    }
}

impl OptionRecord {
    fn strategy(&self) -> (f64, bool) {
        (self.nll, self.is_greedy)
    }

    fn reference(&self) -> (f64, bool) {
        (self.nll_reference, self.is_greedy_reference)
    }
}

/// Picks −ln p and greediness of one side.
type Pick = fn(&OptionRecord) -> (f64, bool);

/// What likelihoods are compared by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Per {
    Option,
    Character,
}

/// The most likely option.
fn choice(answer: &AnswerRecord, pick: Pick, per: Per) -> usize {
    let worth = |o: &OptionRecord| match per {
        Per::Character => pick(o).0 / o.n_chars.max(1) as f64,
        Per::Option => pick(o).0,
    };
    let mut best = 0;
    for (i, option) in answer.options.iter().enumerate() {
        if worth(option) < worth(&answer.options[best]) {
            best = i;
        }
    }
    best
}

/// Whether the strategy is right.
pub(super) fn is_right_strategy(answer: &AnswerRecord) -> bool {
    is_right(answer, OptionRecord::strategy, Per::Option)
}

/// Whether the reference is right.
pub(super) fn is_right_reference(answer: &AnswerRecord) -> bool {
    is_right(answer, OptionRecord::reference, Per::Option)
}

fn is_right(answer: &AnswerRecord, pick: Pick, per: Per) -> bool {
    match answer.options.as_slice() {
        [only] => pick(only).1,
        _ => choice(answer, pick, per) == answer.gold,
    }
}

fn is_same(answer: &AnswerRecord) -> bool {
    match answer.options.as_slice() {
        [only] => only.is_greedy == only.is_greedy_reference,
        _ => {
            choice(answer, OptionRecord::strategy, Per::Option)
                == choice(answer, OptionRecord::reference, Per::Option)
        }
    }
}

fn one(is: bool) -> f64 {
    f64::from(u8::from(is))
}
