//! What one evaluation yields: sums and per-token values of one (cell, item), and how a cell ended.
//!
//! Invariants: a record holds raw sums, never means or ratios; it round-trips through JSON to the bit; all of its
//! numbers are finite and its sums agree with its per-token values ([`ItemRecord::check`]).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::layers::LayerRecord;
use crate::cache::{MemoryReport, Traffic};

/// One cell's result on one item (a document, or a window of one). The item is the cluster of all intervals.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ItemRecord {
    /// Id of the cell.
    pub cell: String,
    /// Index of the item within the cell's data; the same index is the same text in every cell of that data.
    pub item: usize,
    /// Name of the document.
    pub doc: String,
    /// Domain of the document (prose, code, ...).
    pub domain: String,
    /// Tokens scored.
    pub n_scored: usize,
    /// Bytes of the scored tokens' text.
    pub bytes_text: usize,
    /// Negative log-likelihood under the strategy's cache, summed over scored tokens, in nats.
    pub nll: f64,
    /// The same sum under the reference (a cache of f32 rows), same tokens.
    pub nll_reference: f64,
    /// The same sum with the context dropped but for its sinks; only where a context is compressed once.
    pub nll_floor: Option<f64>,
    /// Σ KL(full ‖ strategy) over scored tokens, in nats.
    pub kld_sum: f64,
    /// Scored tokens at which strategy and reference rank the same token first.
    pub top1_agree: usize,
    /// Σ (p_strategy − p_reference) of the target token.
    pub delta_p_sum: f64,
    /// Σ (p_strategy − p_reference)² of the target token.
    pub delta_p_sq_sum: f64,
    /// The same quantities token by token.
    pub tokens: PerToken,
    /// Bytes of the live cache, in order of `n_tokens`: at the compression point where there is one, and at the end unless
    /// the continuation is kept exact (its f32 rows are no part of the strategy). Tables show the first.
    pub memory: Vec<MemoryRecord>,
    /// Bytes of the live cache along what is scored, in order of `n_tokens`: from the compression point where there is
    /// one. Empty unless the plan asks for it, and where the continuation is kept exact.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_track: Vec<MemoryRecord>,
    /// The compressed context beside the exact one, one entry per layer, where a context is compressed once and the plan
    /// asks for it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerRecord>,
    /// Times, where the plan asks for them.
    pub latency: Option<LatencyRecord>,
    /// What decoded tokens read and what was moved for them, where they don't read all that is stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<TrafficRecord>,
    /// Answers, one entry per question asked of the item's cache; empty for texts. The scored tokens are then the options' in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub answers: Vec<AnswerRecord>,
    /// The text that was generated; its tokens are then the scored ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<TextRecord>,
    /// Settings as used, not as asked for (chunk, threads, backend, ...).
    pub effective: BTreeMap<String, String>,
}

/// Per-token values of one item, `[scored token]` each; stored as base64 of little-endian f32.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerToken {
    /// Negative log-likelihood under the strategy's cache, nats.
    #[serde(with = "f32_base64")]
    pub nll: Vec<f32>,
    /// Negative log-likelihood under the reference, nats.
    #[serde(with = "f32_base64")]
    pub nll_reference: Vec<f32>,
    /// KL(full ‖ strategy), nats.
    #[serde(with = "f32_base64")]
    pub kld: Vec<f32>,
    /// p_strategy − p_reference of the target token.
    #[serde(with = "f32_base64")]
    pub delta_p: Vec<f32>,
}

/// What came of one question.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnswerRecord {
    /// Index of the right option.
    pub gold: usize,
    /// The options, in the task's order; one where there is one right continuation.
    pub options: Vec<OptionRecord>,
    /// The generated answer, where one was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generated: Option<GeneratedRecord>,
}

/// The likelihood of one option.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptionRecord {
    /// Its tokens.
    pub n_tokens: usize,
    /// Characters that normalise its likelihood.
    pub n_chars: usize,
    /// −ln p under the strategy's cache, nats.
    pub nll: f64,
    /// −ln p under the reference, nats.
    pub nll_reference: f64,
    /// Each of its tokens is the strategy's most likely one.
    pub is_greedy: bool,
    /// Each of its tokens is the reference's most likely one.
    pub is_greedy_reference: bool,
}

/// A generated answer and what it is worth.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GeneratedRecord {
    /// Under the strategy's cache.
    pub text: String,
    /// Under the reference.
    pub text_reference: String,
    /// Part of what was wanted, 0 … 1.
    pub score: f64,
    /// The same of the reference's.
    pub score_reference: f64,
}

/// Texts generated from one context with the same noise; an end token is part of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextRecord {
    /// The strategy's tokens.
    pub tokens: Vec<u32>,
    /// The reference's tokens.
    pub tokens_reference: Vec<u32>,
    /// −ln p of the reference's own text under the reference's cache, summed, nats.
    pub nll_own_reference: f64,
}

/// Live bytes of a cache that holds exactly one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryRecord {
    /// Tokens that the sequence has seen.
    pub n_tokens: usize,
    /// Bytes by part.
    pub report: MemoryReport,
}

/// Times of one item. Wall times by the engine's clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatencyRecord {
    /// Tokens in the cache when the first timed step starts.
    pub depth: usize,
    /// Wall time of each decoded token, ms.
    pub step_ms: Vec<f64>,
    /// CPU time of all timed steps together, ms.
    pub cpu_ms: f64,
    /// Wall time of attention in all timed steps together, ms.
    #[serde(default)]
    pub attend_ms: f64,
    /// Wall time that the reference (f32 rows) took to read the same tokens, ms.
    pub prefill_ms: f64,
    /// Wall time of storing the context and compressing it, ms; 0 where there is no compression point.
    pub compress_ms: f64,
    /// Wall time of the repetition that the retention's scores come from, ms; 0 where it asks for none. Older records lack it:
    /// theirs is part of `compress_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repetition_ms: Option<f64>,
}

/// What the tokens of one item read and moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrafficRecord {
    /// Scored tokens; nothing is timed.
    pub scored: Traffic,
    /// Timed steps, which watch neither hits nor what is read; nothing where none were timed.
    pub timed: Traffic,
}

/// How a cell ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CellRecord {
    /// Id of the cell.
    pub id: String,
    /// Its end.
    pub status: CellStatus,
    /// Items that could not be scored (a text shorter than the window, for one).
    pub n_skipped: usize,
    /// Wall time, in this run, of the group of cells that ran in lock-step, seconds.
    pub wall_s: f64,
}

/// The end of a cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum CellStatus {
    /// All items scored or counted as skipped.
    Done,
    /// Stopped by an error; its items are not reported as results.
    Failed {
        /// What went wrong, where.
        message: String,
    },
    /// Not run.
    Skipped {
        /// Why.
        reason: String,
    },
}

/// A record that contradicts itself.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum RecordError {
    /// NaN or infinity.
    #[error(
        "cell {cell}, item {item}: {field} is {value}, not a finite number: mark the cell as failed instead of recording it"
    )]
    NonFinite {
        /// The cell.
        cell: String,
        /// The item.
        item: usize,
        /// The field.
        field: &'static str,
        /// Its value.
        value: f64,
    },
    /// A per-token list of another length.
    #[error(
        "cell {cell}, item {item}: tokens.{field} has {got} values for {expected} scored tokens"
    )]
    Length {
        /// The cell.
        cell: String,
        /// The item.
        item: usize,
        /// The list.
        field: &'static str,
        /// Its length.
        got: usize,
        /// Tokens scored.
        expected: usize,
    },
    /// A sum that its parts do not make.
    #[error("cell {cell}, item {item}: {field} is {got}, its tokens sum to {expected}")]
    Sum {
        /// The cell.
        cell: String,
        /// The item.
        item: usize,
        /// The sum.
        field: &'static str,
        /// Its value.
        got: f64,
        /// The sum over tokens.
        expected: f64,
    },
    /// Nothing was scored, or more tokens agree than were scored.
    #[error(
        "cell {cell}, item {item}: {top1_agree} agreeing tokens of {n_scored} scored; at least one must be scored"
    )]
    Count {
        /// The cell.
        cell: String,
        /// The item.
        item: usize,
        /// Tokens that agree.
        top1_agree: usize,
        /// Tokens scored.
        n_scored: usize,
    },
}

/// f32 rounding of each token's value, with room.
const SUM_TOLERANCE: f64 = 1e-6;

impl ItemRecord {
    /// Says whether the record may be kept: finite numbers, lists of `n_scored` values, sums that match them.
    pub fn check(&self) -> Result<(), RecordError> {
        if self.n_scored == 0 || self.top1_agree > self.n_scored {
            return Err(RecordError::Count {
                cell: self.cell.clone(),
                item: self.item,
                top1_agree: self.top1_agree,
                n_scored: self.n_scored,
            });
        }
        self.check_finite("nll_floor", self.nll_floor.unwrap_or(0.0))?;
        self.check_sum("nll", self.nll, &self.tokens.nll, |x| x)?;
        self.check_sum(
            "nll_reference",
            self.nll_reference,
            &self.tokens.nll_reference,
            |x| x,
        )?;
        self.check_sum("kld_sum", self.kld_sum, &self.tokens.kld, |x| x)?;
        self.check_sum("delta_p_sum", self.delta_p_sum, &self.tokens.delta_p, |x| x)?;
        self.check_sum(
            "delta_p_sq_sum",
            self.delta_p_sq_sum,
            &self.tokens.delta_p,
            |x| x * x,
        )?;
        for sum in self.layers.iter().flat_map(LayerRecord::sums) {
            self.check_finite("layers", sum)?;
        }
        if let Some(latency) = &self.latency {
            for &ms in latency.step_ms.iter().chain([
                &latency.cpu_ms,
                &latency.attend_ms,
                &latency.prefill_ms,
                &latency.compress_ms,
                &latency.repetition_ms.unwrap_or(0.0),
            ]) {
                self.check_finite("latency", ms)?;
            }
        }
        Ok(())
    }

    /// Whether every scored token has exactly the reference's likelihood and distribution.
    pub fn is_identical_to_reference(&self) -> bool {
        self.nll == self.nll_reference
            && self.top1_agree == self.n_scored
            && self.kld_sum == 0.0
            && self.delta_p_sq_sum == 0.0
            && self.tokens.nll == self.tokens.nll_reference
    }

    fn check_finite(&self, field: &'static str, value: f64) -> Result<(), RecordError> {
        if value.is_finite() {
            return Ok(());
        }
        Err(RecordError::NonFinite {
            cell: self.cell.clone(),
            item: self.item,
            field,
            value,
        })
    }

    fn check_sum(
        &self,
        field: &'static str,
        sum: f64,
        tokens: &[f32],
        term: fn(f64) -> f64,
    ) -> Result<(), RecordError> {
        self.check_finite(field, sum)?;
        if tokens.len() != self.n_scored {
            return Err(RecordError::Length {
                cell: self.cell.clone(),
                item: self.item,
                field,
                got: tokens.len(),
                expected: self.n_scored,
            });
        }
        let (mut total, mut magnitude) = (0.0, 0.0);
        for &token in tokens {
            self.check_finite(field, f64::from(token))?;
            total += term(f64::from(token));
            magnitude += term(f64::from(token)).abs();
        }
        if (total - sum).abs() > SUM_TOLERANCE * magnitude + f64::from(f32::MIN_POSITIVE) {
            return Err(RecordError::Sum {
                cell: self.cell.clone(),
                item: self.item,
                field,
                got: sum,
                expected: total,
            });
        }
        Ok(())
    }
}

/// Exact storage of f32 lists in JSON.
mod f32_base64 {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(values: &[f32], serializer: S) -> Result<S::Ok, S::Error> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        serializer.serialize_str(&STANDARD.encode(bytes))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = STANDARD.decode(&text).map_err(D::Error::custom)?;
        let (values, rest) = bytes.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(D::Error::custom(format!(
                "{} bytes are no list of 4-byte floats",
                bytes.len()
            )));
        }
        Ok(values.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}

#[cfg(test)]
mod tests;
