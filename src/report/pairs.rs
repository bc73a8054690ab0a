//! Rows against each other, and the words for whole tables.
//!
//! Invariants: two rows meet on the items that both have; all pairs of a group are one table of hypotheses, all its rows
//! against the reference another.

use std::collections::BTreeMap;

use rayon::prelude::*;

use crate::eval::records::ItemRecord;
use crate::eval::stats::{self, Comparison, Pair, Paired, Sense};

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
            Some(PairRow {
                a: a.label.clone(),
                b: b.label.clone(),
                paired: compare(items_a, items_b)?,
            })
        })
        .collect();
    let mut table: Vec<&mut Paired> = out.iter_mut().map(|pair| &mut pair.paired).collect();
    Paired::judge_table(&mut table);
    out
}

fn compare(a: &[Located<'_>], b: &[Located<'_>]) -> Option<Paired> {
    let known: BTreeMap<(usize, usize), &ItemRecord> = b
        .iter()
        .map(|&(data, item)| ((data, item.item), item))
        .collect();
    let common: Vec<(&ItemRecord, &ItemRecord)> = a
        .iter()
        .filter_map(|&(data, one)| Some((one, *known.get(&(data, one.item))?)))
        .collect();
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
    Some(match common[..] {
        [(one, two)] => paired.over_tokens(&differences(&one.tokens.nll, &two.tokens.nll)),
        _ => paired,
    })
}

/// a − b of each token, `[scored token]`.
pub(super) fn differences(a: &[f32], b: &[f32]) -> Vec<f64> {
    let pairs = a.iter().zip(b);
    pairs.map(|(&a, &b)| f64::from(a) - f64::from(b)).collect()
}

/// Judges each row against the reference, as one table: its likelihood, and its answers.
pub(super) fn judge(rows: &mut [(Row, Vec<Located<'_>>)]) {
    let (mut likelihoods, mut answers) = (Vec::new(), Vec::new());
    for (row, _) in rows {
        if let Outcome::Scored(scores) = &mut row.outcome {
            likelihoods.push(&mut scores.quality.paired);
            answers.extend(scores.accuracy.as_mut());
        }
    }
    Paired::judge_table(&mut likelihoods);
    let comparisons: Vec<Comparison> = answers.iter().map(|a| a.comparison).collect();
    let judged = stats::judge(&comparisons, Sense::HigherIsBetter);
    for (answers, judged) in answers.iter_mut().zip(judged) {
        answers.judged = judged;
    }
}
