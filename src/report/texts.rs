//! Generated texts: how long a strategy keeps the reference's way, and whether its text becomes poorer.
//!
//! Invariants: n-grams are of tokens; a share is a ratio of sums over texts with the text as its cluster; both sides are measured
//! by the same rule.

use std::collections::BTreeSet;

use crate::eval::records::{ItemRecord, TextRecord};
use crate::eval::stats::Estimate;

/// What is said of both sides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sides {
    /// The strategy's.
    pub value: Estimate,
    /// The reference's.
    pub reference: Estimate,
    /// Strategy minus reference, text by text.
    pub delta: Estimate,
}

/// Texts of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Texts {
    /// Texts.
    pub n: usize,
    /// Tokens before the first one that is not the reference's; the text's length where there is none.
    pub same_tokens: Estimate,
    /// Part of the texts that are the reference's to the last token.
    pub identical: Estimate,
    /// Tokens of a text.
    pub length: Sides,
    /// Different pairs of neighbouring tokens over all pairs (distinct-2).
    pub distinct: Sides,
    /// Part of the tokens that end a run of four that stood in the text before.
    pub repeated: Sides,
    /// −ln p per token under the full cache of the strategy's text, and of the reference's own.
    pub nll_full: Sides,
}

/// Tokens of a run that counts as repeated.
const RUN: usize = 4;

impl Texts {
    /// Of some items; `None` unless they hold texts.
    pub fn new(items: &[&ItemRecord]) -> Option<Self> {
        let texts: Vec<(&ItemRecord, &TextRecord)> = items
            .iter()
            .filter_map(|r| Some((*r, r.text.as_ref()?)))
            .collect();
        let mean = |of: &dyn Fn(&TextRecord) -> f64| -> Option<Estimate> {
            Estimate::mean(&texts.iter().map(|(_, t)| of(t)).collect::<Vec<_>>())
        };
        let sides = |of: fn(&[u32]) -> f64| -> Option<Sides> {
            Some(Sides {
                value: mean(&|t| of(&t.tokens))?,
                reference: mean(&|t| of(&t.tokens_reference))?,
                delta: mean(&|t| of(&t.tokens) - of(&t.tokens_reference))?,
            })
        };
        let per_text = |of: &dyn Fn(&ItemRecord, &TextRecord) -> f64| {
            Estimate::mean(&texts.iter().map(|(r, t)| of(r, t)).collect::<Vec<_>>())
        };
        let own = |_: &ItemRecord, t: &TextRecord| {
            t.nll_own_reference / t.tokens_reference.len().max(1) as f64
        };
        let strategy = |r: &ItemRecord, _: &TextRecord| r.nll_reference / r.n_scored as f64;
        Some(Self {
            n: texts.len(),
            same_tokens: mean(&|t| same_tokens(t) as f64)?,
            identical: mean(&|t| f64::from(u8::from(t.tokens == t.tokens_reference)))?,
            length: sides(|ids| ids.len() as f64)?,
            distinct: sides(distinct)?,
            repeated: sides(repeated)?,
            nll_full: Sides {
                value: per_text(&strategy)?,
                reference: per_text(&own)?,
                delta: per_text(&|r, t| strategy(r, t) - own(r, t))?,
            },
        })
    }
}

fn same_tokens(text: &TextRecord) -> usize {
    let both = text.tokens.iter().zip(&text.tokens_reference);
    both.take_while(|(a, b)| a == b).count()
}

/// Different neighbouring pairs over all; 1 for a text without a pair.
fn distinct(ids: &[u32]) -> f64 {
    let pairs = ids.windows(2);
    match pairs.len() {
        0 => 1.0,
        n => pairs.collect::<BTreeSet<_>>().len() as f64 / n as f64,
    }
}

/// Part of the runs of four tokens that stood before; 0 for a text without one.
fn repeated(ids: &[u32]) -> f64 {
    let mut seen = BTreeSet::new();
    let runs = ids.windows(RUN);
    match runs.len() {
        0 => 0.0,
        n => runs.filter(|run| !seen.insert(*run)).count() as f64 / n as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1 2 1 2 1 2 1: pairs 12 21 12 21 12 21 → 2 of 6; runs 1212 2121 1212 2121 → 2 of 4 stood before.
    #[test]
    fn measures_by_hand() {
        let ids = [1, 2, 1, 2, 1, 2, 1];
        assert_eq!(distinct(&ids), 2.0 / 6.0);
        assert_eq!(repeated(&ids), 0.5);
        assert_eq!((distinct(&[4]), repeated(&[4, 4, 4])), (1.0, 0.0));
        let text = |tokens: &[u32]| TextRecord {
            tokens: tokens.to_vec(),
            tokens_reference: ids.to_vec(),
            nll_own_reference: 1.0,
        };
        assert_eq!(same_tokens(&text(&[1, 2, 3, 2])), 2);
        assert_eq!(same_tokens(&text(&ids)), 7);
        assert_eq!(same_tokens(&text(&[9])), 0);
    }
}
