//! From what a strategy answered to records: likelihoods by option, generated texts and what they are worth.
//!
//! Invariant: strategy and reference are judged by the same rule on the same tokens.

use anyhow::Context;
use regex::Regex;

use super::items::{Item, Question};
use crate::data::tasks::{Generate, Matching};
use crate::eval::drift::TokenScore;
use crate::eval::lockstep::Outcome;
use crate::eval::records::{AnswerRecord, GeneratedRecord, OptionRecord};
use crate::model::tokenizer::Tokenizer;

/// Says when a generated answer is over, and what it is worth.
pub struct Judge<'a> {
    generate: &'a Generate,
    pattern: Option<Regex>,
    tokenizer: &'a Tokenizer,
}

impl<'a> Judge<'a> {
    /// For a task's way of generating.
    pub fn new(generate: &'a Generate, tokenizer: &'a Tokenizer) -> anyhow::Result<Self> {
        let pattern = generate.pattern.as_deref().map(Regex::new).transpose();
        Ok(Self {
            generate,
            pattern: pattern.context("generate.pattern")?,
            tokenizer,
        })
    }

    /// Most tokens.
    pub fn max_tokens(&self) -> usize {
        self.generate.max_tokens
    }

    /// Whether a stop text has come.
    pub fn is_over(&self, ids: &[u32]) -> bool {
        let text = self.decoded(ids);
        self.generate
            .stop
            .iter()
            .any(|stop| text.contains(stop.as_str()))
    }

    /// The answer up to the first stop text.
    fn text(&self, ids: &[u32]) -> String {
        let mut text = self.decoded(ids);
        let ends = self
            .generate
            .stop
            .iter()
            .filter_map(|stop| text.find(stop.as_str()));
        if let Some(end) = ends.min() {
            text.truncate(end);
        }
        text
    }

    fn decoded(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids).unwrap_or_default()
    }

    /// Part of what was wanted, 0 … 1.
    fn score(&self, text: &str, wanted: &[String]) -> f64 {
        match self.generate.matching {
            Matching::Exact => {
                let found = match &self.pattern {
                    Some(pattern) => pattern
                        .captures(text)
                        .and_then(|c| c.get(1))
                        .map_or("", |m| m.as_str()),
                    None => text.trim(),
                };
                // As lm-evaluation-harness compares numbers: without thousands' commas and a full stop at the end.
                let plain = found.replace(',', "");
                let plain = plain.trim_end_matches('.');
                f64::from(u8::from(wanted.first().is_some_and(|w| w == plain)))
            }
            Matching::HoldsAll => {
                let text = text.to_lowercase();
                let found = wanted.iter().filter(|w| text.contains(&w.to_lowercase()));
                found.count() as f64 / wanted.len().max(1) as f64
            }
        }
    }

    fn record(&self, (ids, reference): (&[u32], &[u32]), wanted: &[String]) -> GeneratedRecord {
        let (text, text_reference) = (self.text(ids), self.text(reference));
        GeneratedRecord {
            score: self.score(&text, wanted),
            score_reference: self.score(&text_reference, wanted),
            text,
            text_reference,
        }
    }
}

/// The answers to an item's questions.
pub fn records(item: &Item, outcome: &Outcome, judge: Option<&Judge<'_>>) -> Vec<AnswerRecord> {
    let mut tokens = outcome.tokens.as_slice();
    let mut out = Vec::with_capacity(item.questions.len());
    for (i, question) in item.questions.iter().enumerate() {
        let generated = outcome
            .generated
            .strategy
            .get(i)
            .zip(outcome.generated.reference.get(i));
        out.push(AnswerRecord {
            gold: question.gold,
            options: options(question, &mut tokens),
            generated: judge
                .zip(generated)
                .map(|(judge, (ids, full))| judge.record((ids, full), &question.wanted)),
        });
    }
    out
}

/// Takes each option's tokens from the front.
fn options(question: &Question, tokens: &mut &[TokenScore]) -> Vec<OptionRecord> {
    let take = |branch: &crate::data::tasks::prompt::Branch| {
        let (mine, rest) = tokens.split_at(branch.target.len().min(tokens.len()));
        *tokens = rest;
        OptionRecord {
            n_tokens: mine.len(),
            n_chars: branch.n_chars,
            nll: mine.iter().map(|t| t.nll).sum(),
            nll_reference: mine.iter().map(|t| t.nll_reference).sum(),
            is_greedy: mine.iter().all(|t| t.is_greedy),
            is_greedy_reference: mine.iter().all(|t| t.is_greedy_reference),
        }
    };
    question.branches.iter().map(take).collect()
}
