//! How a cache is judged: the protocols with their lengths.
//!
//! Invariant: a protocol is all that decides which tokens are read, compressed and scored, beside the text and the model.

use serde::{Deserialize, Serialize};

use crate::cache::Continuation;
use crate::data::Passages;

/// Whether a window starts with the model's BOS token. The token counts as one of the window's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bos {
    /// As the model's file says.
    #[default]
    Model,
    /// Always; an error for a model without one.
    Always,
    /// Never.
    Never,
}

/// How a cache is judged.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Protocol {
    /// Every token of a window is scored by a query that attends through the stored cache, as if decoded.
    Stream {
        /// Tokens of a window.
        window: usize,
        /// Windows of each text.
        windows: usize,
        /// BOS at the start of each window.
        bos: Bos,
    },
    /// A context is prefilled exactly, compressed once, and a continuation of it is scored.
    CompressOnce {
        /// Tokens of the context.
        context: usize,
        /// Tokens of the continuation.
        score: usize,
        /// Documents of each text.
        documents: usize,
        /// What becomes of the continuation's rows.
        continuation: Continuation,
        /// Whether the floor runs too: the context dropped but its sinks.
        floor: bool,
        /// BOS at the start of each context.
        bos: Bos,
        /// Which passages of a text without documents.
        #[serde(default, skip_serializing_if = "Passages::is_spread")]
        passages: Passages,
    },
    /// Questions of tasks: a context is prefilled exactly, compressed once, and each answer is a fork of it.
    Tasks {
        /// Solved examples before each question, where a task's items come from a file.
        shots: usize,
        /// Items of each task.
        items: usize,
        /// Tokens of a context that the program makes.
        length: usize,
        /// Whether answers are generated too, where a task says how.
        generate: bool,
        /// What becomes of the rows of queries and answers.
        continuation: Continuation,
        /// BOS at the start of each context.
        bos: Bos,
    },
    /// A context is prefilled exactly and compressed once, and a text is generated from it.
    Generate {
        /// Tokens of the context.
        context: usize,
        /// Most tokens of the text.
        tokens: usize,
        /// Documents of each text.
        documents: usize,
        /// Divides the logits; 0: greedy.
        temperature: f64,
        /// Part of the probability that is chosen from.
        top_p: f64,
        /// What becomes of the text's rows.
        continuation: Continuation,
        /// BOS at the start of each context.
        bos: Bos,
    },
}

/// Tokens that a question with its answer may take beyond a context that the program makes.
pub(super) const QUESTION_TOKENS: usize = 512;

impl Protocol {
    /// Tokens that one window or document takes, BOS included.
    pub fn n_tokens(&self) -> usize {
        match self {
            Protocol::Stream { window, .. } => *window,
            Protocol::CompressOnce { context, score, .. } => context + score,
            Protocol::Tasks { length, .. } => length + QUESTION_TOKENS,
            Protocol::Generate {
                context, tokens, ..
            } => context + tokens,
        }
    }

    /// Most tokens that a strategy's own rows hold: all, but for an exact continuation's.
    pub(super) fn n_stored(&self, latency_steps: usize) -> usize {
        match self {
            Protocol::CompressOnce {
                context,
                continuation: Continuation::Exact,
                ..
            }
            | Protocol::Generate {
                context,
                continuation: Continuation::Exact,
                ..
            } => *context,
            // A question's forks are gone before the next one's.
            Protocol::Tasks { length, .. } => *length,
            _ => self.n_tokens() + latency_steps,
        }
    }

    /// Windows or documents of each text.
    pub fn n_passages(&self) -> usize {
        match self {
            Protocol::Stream { windows, .. } => *windows,
            Protocol::CompressOnce { documents, .. } | Protocol::Generate { documents, .. } => {
                *documents
            }
            Protocol::Tasks { items, .. } => *items,
        }
    }

    /// Whether the two take the same tokens and the same reference: only what becomes of the continuation differs.
    pub fn shares_items_with(&self, other: &Protocol) -> bool {
        let common = |protocol: &Protocol| {
            let mut protocol = *protocol;
            match &mut protocol {
                Protocol::Stream { .. } => {}
                Protocol::CompressOnce { continuation, .. }
                | Protocol::Tasks { continuation, .. }
                | Protocol::Generate { continuation, .. } => *continuation = Continuation::Strategy,
            }
            protocol
        };
        common(self) == common(other)
    }

    /// What becomes of rows that are scored: those of a stream are the strategy's.
    pub fn continuation(&self) -> Continuation {
        match self {
            Protocol::Stream { .. } => Continuation::Strategy,
            Protocol::CompressOnce { continuation, .. }
            | Protocol::Tasks { continuation, .. }
            | Protocol::Generate { continuation, .. } => *continuation,
        }
    }

    /// BOS at the start of each window or context.
    pub fn bos(&self) -> Bos {
        match self {
            Protocol::Stream { bos, .. }
            | Protocol::CompressOnce { bos, .. }
            | Protocol::Tasks { bos, .. }
            | Protocol::Generate { bos, .. } => *bos,
        }
    }

    /// The name in tables: its kind and its lengths, so that those of one experiment differ.
    pub fn title(&self) -> String {
        let continuation = format!("{:?}", self.continuation()).to_lowercase();
        match self {
            Protocol::Stream {
                window, windows, ..
            } => format!("stream {windows}x{window}"),
            Protocol::CompressOnce { context, score, .. } => {
                format!("compress-once {context}+{score} {continuation}")
            }
            Protocol::Tasks { shots, length, .. } => {
                format!("tasks {shots}-shot {length} {continuation}")
            }
            Protocol::Generate {
                context,
                tokens,
                temperature,
                top_p,
                ..
            } => {
                let how = match temperature {
                    0.0 => "greedy".to_owned(),
                    t => format!("temperature {t} top_p {top_p}"),
                };
                format!("generate {context}+{tokens} {how} {continuation}")
            }
        }
    }

    /// The protocol's name in experiments.
    pub fn kind(&self) -> &'static str {
        match self {
            Protocol::Stream { .. } => "stream",
            Protocol::CompressOnce { .. } => "compress-once",
            Protocol::Tasks { .. } => "tasks",
            Protocol::Generate { .. } => "generate",
        }
    }
}
