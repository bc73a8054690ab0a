//! Whether what is timed is right: chunks against single steps to the bit, and how far the logits are from exact rows.
//!
//! Invariant: the two paths run on different numbers of threads where there are several, so one comparison holds chunk
//! and threads against decoding on one thread.

use serde::Serialize;

use super::{BASE, Bench, BenchError, Pool, on};
use crate::cache::KvCache;
use crate::cache::strategy::Strategy;
use crate::engine::{CHUNK, feed};
use crate::eval::drift::Reference;
use crate::model::transformer::{Hidden, StepError};

/// Tokens of the check: more than a page of 128 rows, so that pages that seal are read as they are stored.
pub const TOKENS: usize = 192;

/// Rows of logits at a time.
const PIECE: usize = 32;

/// What the check of one strategy found.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Gate {
    /// Tokens compared.
    pub n_tokens: usize,
    /// The first position whose logits differ between single steps and chunks; `None`: none does.
    pub first_difference: Option<usize>,
    /// The first position with a logit that is no number.
    pub first_non_finite: Option<usize>,
    /// Largest difference of a logit from the cache with f32 rows.
    pub max_logit_difference: f32,
    /// Mean KL(f32 rows ‖ strategy), nats.
    pub mean_kld: f64,
    /// Fraction of positions at which both rank the same token first.
    pub same_top_fraction: f64,
}

impl Gate {
    /// Whether the strategy's times may be trusted.
    pub fn holds(&self) -> bool {
        self.first_difference.is_none() && self.first_non_finite.is_none()
    }
}

/// Checks every strategy on the beginning of the text, on the first and the last of the pools; `done` hears of each pass through the model.
///
/// # Errors
/// A strategy that can't be built or breaks down.
pub fn check(
    bench: &Bench<'_>,
    strategies: &[&Strategy],
    pools: &[Pool],
    done: &mut dyn FnMut(),
) -> Result<Vec<Gate>, BenchError> {
    let exact = Strategy::bare("f32");
    let of = |strategy: &Strategy, pool: Option<&Pool>, chunk: usize| {
        let rows = on(pool, || hidden(bench, strategy, chunk));
        rows.map_err(|source| BenchError {
            strategy: strategy.label.clone(),
            source,
        })
    };
    let (narrowest, widest) = (pools.first(), pools.last());
    let reference = of(&exact, widest, CHUNK)?;
    strategies
        .iter()
        .map(|strategy| {
            let chunked = of(strategy, widest, CHUNK)?;
            done();
            let single = of(strategy, narrowest, 1)?;
            done();
            Ok(compare(bench, &reference, &chunked, &single))
        })
        .collect()
}

/// The last layer's rows of the check's tokens, fed in chunks.
fn hidden(bench: &Bench<'_>, strategy: &Strategy, chunk: usize) -> Result<Hidden, StepError> {
    let mut cache = bench.cache(strategy)?;
    let n = TOKENS.min(bench.model.spec().context_length);
    let tokens = bench.tokens(cache.len(BASE)? as usize, n);
    let mut rows = Vec::new();
    feed(bench.model, &mut cache, BASE, &tokens, chunk, |chunk| {
        rows.extend_from_slice(&chunk.hidden.rows);
        Ok::<(), StepError>(())
    })?;
    Ok(Hidden {
        rows,
        n_embd: bench.model.spec().n_embd,
    })
}

/// Rows that must be equal to the bit give logits that are: the head is one more product per row, which goes through it
/// in pieces and alone.
fn compare(bench: &Bench<'_>, reference: &Hidden, chunked: &Hidden, single: &Hidden) -> Gate {
    let n_vocab = bench.model.spec().n_vocab;
    let n_tokens = chunked.n_rows();
    let mut gate = Gate {
        n_tokens,
        first_difference: None,
        first_non_finite: None,
        max_logit_difference: 0.0,
        mean_kld: 0.0,
        same_top_fraction: 0.0,
    };
    let mut n_same = 0;
    let mut exact = vec![0.0; PIECE * n_vocab];
    let mut piece = exact.clone();
    let mut alone = vec![0.0; n_vocab];
    for first in (0..n_tokens).step_by(PIECE) {
        let rows = first..(first + PIECE).min(n_tokens);
        let (exact, piece) = (
            &mut exact[..rows.len() * n_vocab],
            &mut piece[..rows.len() * n_vocab],
        );
        bench.model.logits(reference, rows.clone(), exact);
        bench.model.logits(chunked, rows.clone(), piece);
        for row in rows.clone() {
            let at = (row - first) * n_vocab;
            bench.model.logits(single, row..row + 1, &mut alone);
            let (full, chunked) = (&exact[at..at + n_vocab], &piece[at..at + n_vocab]);
            gate.compare_row(row, full, chunked, &alone);
        }
        // The sum of the distributions' differences needs no target: any token does.
        let scores = Reference::new(exact, n_vocab).score(piece, &vec![0; rows.len()]);
        gate.mean_kld += scores.iter().map(|s| s.kld).sum::<f64>();
        n_same += scores.iter().filter(|s| s.same_top).count();
    }
    gate.mean_kld /= n_tokens as f64;
    gate.same_top_fraction = n_same as f64 / n_tokens as f64;
    gate
}

impl Gate {
    fn compare_row(&mut self, row: usize, exact: &[f32], chunked: &[f32], single: &[f32]) {
        let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
        if chunked.iter().zip(single).any(differs) {
            self.first_difference.get_or_insert(row);
        }
        if chunked.iter().any(|x| !x.is_finite()) {
            self.first_non_finite.get_or_insert(row);
        }
        let gaps = exact.iter().zip(chunked).map(|(a, b)| (a - b).abs());
        self.max_logit_difference = gaps.fold(self.max_logit_difference, f32::max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GATE: Gate = Gate {
        n_tokens: 3,
        first_difference: None,
        first_non_finite: None,
        max_logit_difference: 0.0,
        mean_kld: 0.0,
        same_top_fraction: 1.0,
    };

    #[test]
    fn one_bit_fails_it_and_a_lossy_format_does_not() {
        let row = [1.0f32, -2.0, 0.5];
        let mut equal = GATE;
        equal.compare_row(0, &row, &[1.5, -2.0, 0.5], &[1.5, -2.0, 0.5]);
        assert!(equal.holds());
        assert_eq!(equal.max_logit_difference, 0.5);

        let mut off = GATE;
        let next = f32::from_bits(row[1].to_bits() + 1);
        off.compare_row(1, &row, &row, &[row[0], next, row[2]]);
        off.compare_row(2, &row, &row, &[0.0; 3]);
        assert_eq!(off.first_difference, Some(1));
        assert!(!off.holds());

        let mut broken = GATE;
        let nan = [f32::NAN; 3];
        broken.compare_row(2, &row, &nan, &nan);
        assert_eq!(broken.first_non_finite, Some(2));
        assert!(!broken.holds());
    }
}
