//! Rows against each other, and the words for whole tables.
//!
//! Invariants: two rows meet on the items that both have; all pairs of a group are one table of hypotheses, all its rows
//! against the reference another.

use std::collections::BTreeMap;

use rayon::prelude::*;

use crate::eval::records::ItemRecord;
use crate::eval::stats::{Comparison, Judged, Pair, Paired};

use super::matches::PairedAnswers;
use super::rows::{Located, Outcome, Row};

/// Two rows on the items that both have.
#[derive(Debug, Clone)]
pub struct PairRow {
    /// Label of the first.
    pub a: String,
    /// Label of the second.
    pub b: String,
    /// NLL(a) − NLL(b).
    pub paired: Paired,
    /// Their answers, where questions were asked.
    pub answers: Option<PairedAnswers>,
}

impl PairRow {
    /// a against b: in right answers, where questions were asked, else in likelihood.
    pub fn comparison(&self) -> &Comparison {
        let answers = self.answers.as_ref().map(|a| &a.comparison);
        answers.unwrap_or(&self.paired.comparison)
    }

    /// The words: of the answers, where questions were asked, else of the likelihood.
    pub fn judged(&self) -> &Judged {
        let answers = self.answers.as_ref().map(|a| &a.judged);
        answers.unwrap_or(&self.paired.judged)
    }
}

/// Compares every two scored rows on their common items, in order.
pub(super) fn pairs(rows: &[(Row, Vec<Located<'_>>)]) -> Vec<PairRow> {
    let all: Vec<(usize, usize)> = (0..rows.len())
        .flat_map(|i| (i + 1..rows.len()).map(move |j| (i, j)))
        .collect();
    let mut out: Vec<PairRow> = all
        .into_par_iter()
        .filter_map(|(i, j)| {
            let ((a, items_a), (b, items_b)) = (&rows[i], &rows[j]);
            let common = common(items_a, items_b);
            Some(PairRow {
                a: a.label.clone(),
                b: b.label.clone(),
                paired: compare(&common)?,
                answers: PairedAnswers::of_rows(&common),
            })
        })
        .collect();
    judge_tables(out.iter_mut().map(|p| (&mut p.paired, p.answers.as_mut())));
    out
}

/// The items that both have, in order.
fn common<'a>(a: &[Located<'a>], b: &[Located<'a>]) -> Vec<(&'a ItemRecord, &'a ItemRecord)> {
    let known: BTreeMap<(usize, usize), &ItemRecord> = b
        .iter()
        .map(|&(data, item)| ((data, item.item), item))
        .collect();
    a.iter()
        .filter_map(|&(data, one)| Some((one, *known.get(&(data, one.item))?)))
        .collect()
}

fn compare(common: &[(&ItemRecord, &ItemRecord)]) -> Option<Paired> {
    let sums: Vec<Pair> = common
        .iter()
        .map(|(one, two)| Pair {
            a: one.nll,
            b: two.nll,
            n_scored: one.n_scored,
            identical: one.nll == two.nll && one.tokens.nll == two.tokens.nll,
        })
        .collect();
    let paired = Paired::compare(&sums)?;
    Some(match *common {
        [(one, two)] => paired.over_tokens(&differences(&one.tokens.nll, &two.tokens.nll)),
        _ => paired,
    })
}

/// a − b of each token, `[scored token]`.
pub(super) fn differences(a: &[f32], b: &[f32]) -> Vec<f64> {
    let pairs = a.iter().zip(b);
    pairs.map(|(&a, &b)| f64::from(a) - f64::from(b)).collect()
}

/// Judges each row against the reference.
pub(super) fn judge(rows: &mut [(Row, Vec<Located<'_>>)]) {
    judge_tables(
        rows.iter_mut()
            .filter_map(|(row, _)| match &mut row.outcome {
                Outcome::Scored(scores) => Some((
                    &mut scores.quality.paired,
                    scores.accuracy.as_mut().map(|a| &mut a.paired),
                )),
                Outcome::Failed(_) | Outcome::Skipped(_) | Outcome::Pending => None,
            }),
    );
}

/// Likelihoods are one table of hypotheses, answers another.
fn judge_tables<'a>(rows: impl Iterator<Item = (&'a mut Paired, Option<&'a mut PairedAnswers>)>) {
    let (mut likelihoods, answers): (Vec<_>, Vec<_>) = rows.unzip();
    Paired::judge_table(&mut likelihoods);
    PairedAnswers::judge_table(&mut answers.into_iter().flatten().collect::<Vec<_>>());
}
