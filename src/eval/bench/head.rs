//! What a run asks of the last layer's rows, and how long that takes.
//!
//! Invariant: as many logits as the work needs and no more: of the last token of a prefill, of each decoded token, of
//! every scored token but the last, which has no next one.

use std::time::Duration;

use super::{Bench, Work};
use crate::eval::drift::Reference;
use crate::model::transformer::Hidden;

/// Rows of logits at a time.
const PIECE: usize = 32;

/// Reads the rows of one run as its chunks come.
pub struct Head<'a> {
    bench: &'a Bench<'a>,
    work: Work,
    tokens: &'a [u32],
    /// Tokens read so far.
    n_read: usize,
    logits: Vec<f32>,
    /// -ln p of the next tokens in the second half.
    nll: Vec<f64>,
    /// Wall time in here.
    pub spent: Duration,
    /// When each decoded token was there.
    pub ends: Vec<Duration>,
}

impl<'a> Head<'a> {
    /// Before the first of the run's tokens.
    pub fn new(bench: &'a Bench<'a>, work: Work, tokens: &'a [u32]) -> Self {
        let n_rows = if work == Work::Score { PIECE } else { 1 };
        Self {
            bench,
            work,
            tokens,
            n_read: 0,
            logits: vec![0.0; n_rows * bench.model.spec().n_vocab],
            nll: Vec::new(),
            spent: Duration::ZERO,
            ends: Vec::new(),
        }
    }

    /// Takes the rows of the next chunk.
    pub fn read(&mut self, hidden: &Hidden) {
        let start = self.bench.clock.wall();
        let n = hidden.n_rows();
        let is_last = self.n_read + n == self.tokens.len();
        match self.work {
            Work::Score => self.score(hidden),
            Work::Prefill | Work::Recompute if !is_last => {}
            Work::Prefill | Work::Decode | Work::Recompute => {
                let model = self.bench.model;
                model.logits(hidden, n - 1..n, &mut self.logits);
            }
        }
        self.n_read += n;
        let end = self.bench.clock.wall();
        self.spent += end.saturating_sub(start);
        if self.work == Work::Decode || is_last {
            self.ends.push(end);
        }
    }

    fn score(&mut self, hidden: &Hidden) {
        let n_vocab = self.bench.model.spec().n_vocab;
        let targets = &self.tokens[self.n_read + 1..];
        let n_scored = hidden.n_rows().min(targets.len());
        let second_half = self.tokens.len() / 2;
        for first in (0..n_scored).step_by(PIECE) {
            let rows = first..(first + PIECE).min(n_scored);
            let logits = &mut self.logits[..rows.len() * n_vocab];
            self.bench.model.logits(hidden, rows.clone(), logits);
            let nll = Reference::new(logits, n_vocab).nll(&targets[rows]);
            let skipped = second_half.saturating_sub(self.n_read + first);
            self.nll.extend(nll.iter().skip(skipped));
        }
    }

    /// Perplexity of the second half, if the run scores.
    pub fn perplexity(&self) -> Option<f64> {
        let n = self.nll.len() as f64;
        (n > 0.0).then(|| (self.nll.iter().sum::<f64>() / n).exp())
    }
}
