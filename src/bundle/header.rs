//! What a run states of itself before it starts: model, geometry, protocols, data, cells.
//!
//! Invariant: a header and the journal are all that a report needs; nothing here is a result.

use serde::{Deserialize, Serialize};

use crate::cache::strategy::Strategy;
use crate::cache::{Continuation, Geometry};
use crate::model::ops::Arithmetic;

/// Version of the bundle's files.
pub const SCHEMA: u32 = 1;

/// Bytes of one scalar in the base of every size comparison (IEEE half).
const F16_BYTES: u64 = 2;

/// A run in words and numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunHeader {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name of the experiment; the folder under the results directory.
    pub experiment: String,
    /// Hash of the resolved plan, hexadecimal, at least 8 digits.
    pub plan_hash: String,
    /// The model.
    pub model: ModelHeader,
    /// What its cache holds per token.
    pub geometry: GeometryHeader,
    /// The protocols, in order of the tables.
    pub protocols: Vec<ProtocolHeader>,
    /// The data, in order of the tables.
    pub data: Vec<DataHeader>,
    /// The cells, in order of the tables' rows.
    pub cells: Vec<CellHeader>,
}

/// The model of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelHeader {
    /// Its name as the experiment gives it.
    pub name: String,
    /// SHA-256 of its file, hexadecimal (of the sorted list of files' hashes where there are several).
    pub sha256: String,
    /// What its linear layers compute in.
    #[serde(default, skip_serializing_if = "Arithmetic::is_f32")]
    pub arithmetic: Arithmetic,
}

/// What one token adds to a cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GeometryHeader {
    /// One entry per layer.
    pub layers: Vec<LayerHeader>,
}

/// One attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerHeader {
    /// Scalars of K and V together that one token adds.
    pub scalars_per_token: usize,
    /// Sliding window in tokens: the most the layer ever needs to hold.
    pub window: Option<u32>,
}

impl From<&Geometry> for GeometryHeader {
    fn from(geometry: &Geometry) -> Self {
        let layers = geometry
            .layers
            .iter()
            .map(|layer| LayerHeader {
                scalars_per_token: 2 * layer.n_kv_heads * layer.head_dim,
                window: layer.window,
            })
            .collect();
        Self { layers }
    }
}

impl GeometryHeader {
    /// Scalars of K and V that a plain cache holds after `n_tokens`: layers with a sliding window hold at most it.
    pub fn scalars_at(&self, n_tokens: usize) -> u64 {
        self.layers
            .iter()
            .map(|layer| {
                let rows = layer
                    .window
                    .map_or(n_tokens, |window| n_tokens.min(window as usize));
                (rows * layer.scalars_per_token) as u64
            })
            .sum()
    }

    /// Bytes of an f16 cache of `n_tokens`, the base of `bytes_vs_f16`.
    pub fn f16_bytes_at(&self, n_tokens: usize) -> u64 {
        F16_BYTES * self.scalars_at(n_tokens)
    }
}

/// How tokens are scored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProtocolHeader {
    /// Name that cells refer to.
    pub name: String,
    /// The kind and its lengths.
    pub kind: ProtocolKind,
    /// Whether each item starts with the model's BOS token.
    pub bos: Bos,
}

/// BOS at the start of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bos {
    /// None.
    None,
    /// Before every item; it is never scored.
    EachItem,
}

/// The protocols and their lengths, in tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "protocol",
    rename_all = "kebab-case",
    rename_all_fields = "snake_case",
    deny_unknown_fields
)]
pub enum ProtocolKind {
    /// Every scored token's query attends through the stored cache, as if decoded.
    Stream {
        /// Tokens per window.
        window: usize,
        /// Tokens from one window's start to the next one's.
        stride: usize,
        /// First tokens of each window that are not scored (at least 1: nothing predicts the first).
        unscored: usize,
    },
    /// A context is read exactly, compressed once, and its continuation is scored through the stored cache.
    CompressOnce {
        /// Tokens of the context.
        context: usize,
        /// Tokens of the scored continuation.
        scored: usize,
        /// What becomes of the continuation's own rows.
        continuation: Continuation,
    },
    /// A context is read exactly and compressed once; each option of each question goes on from a fork of it.
    Tasks {
        /// Solved examples before each question of a task with a file.
        shots: usize,
        /// Tokens of a context that the program makes.
        length: usize,
        /// Whether answers are generated too.
        generate: bool,
        /// What becomes of the rows of queries and answers.
        continuation: Continuation,
    },
    /// A context is read exactly and compressed once, and a text generated from it.
    Generate {
        /// Tokens of the context.
        context: usize,
        /// Most tokens of the text.
        tokens: usize,
        /// Divides the logits; 0: greedy.
        temperature: f64,
        /// Part of the probability that is chosen from.
        top_p: f64,
        /// What becomes of the text's rows.
        continuation: Continuation,
    },
}

/// One text, or a set of documents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataHeader {
    /// Name that cells refer to.
    pub name: String,
    /// SHA-256 of its bytes, hexadecimal.
    pub sha256: String,
    /// Per protocol that uses it: what it was cut into.
    pub cuts: Vec<Cut>,
}

/// What a protocol made of a text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cut {
    /// The protocol's name.
    pub protocol: String,
    /// Items to score.
    pub n_items: usize,
    /// Tokens that no item covers (too short a rest, or past the number of items asked for).
    pub n_tokens_dropped: usize,
    /// Items that do not fit the model's context, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<String>,
    /// Options whose border to the context lies inside a token of the whole.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub n_split_borders: usize,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// One cell: a strategy on some data by a protocol.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CellHeader {
    /// Hash of everything that can change its numbers.
    pub id: String,
    /// Row name in tables.
    pub label: String,
    /// The strategy.
    pub strategy: Strategy,
    /// Name of the data.
    pub data: String,
    /// Name of the protocol.
    pub protocol: String,
    /// Seed.
    pub seed: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 30 layers of 3 KV heads of 64: 23,040 bytes a token; a sliding layer stops at its window.
    #[test]
    fn the_f16_base() {
        let full = LayerHeader {
            scalars_per_token: 2 * 3 * 64,
            window: None,
        };
        let smol = GeometryHeader {
            layers: vec![full; 30],
        };
        assert_eq!(smol.f16_bytes_at(1), 23_040);
        assert_eq!(smol.f16_bytes_at(1280), 1280 * 23_040);
        let sliding = LayerHeader {
            scalars_per_token: 8,
            window: Some(512),
        };
        let mixed = GeometryHeader {
            layers: vec![full, sliding],
        };
        assert_eq!(mixed.scalars_at(2048), 2048 * 384 + 512 * 8);
        assert_eq!(mixed.scalars_at(100), 100 * 384 + 100 * 8);
    }

    #[test]
    fn protocols_read_as_they_are_written() {
        let kind = ProtocolKind::CompressOnce {
            context: 1024,
            scored: 256,
            continuation: Continuation::Exact,
        };
        let text = serde_json::to_string(&kind).unwrap();
        assert_eq!(
            text,
            r#"{"protocol":"compress-once","context":1024,"scored":256,"continuation":"exact"}"#
        );
        assert_eq!(serde_json::from_str::<ProtocolKind>(&text).unwrap(), kind);
    }
}
