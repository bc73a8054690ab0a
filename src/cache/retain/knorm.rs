//! `knorm`: rows whose keys have a small norm live.
//!
//! The score of a row is −‖k‖₂ (RoPE leaves the norm as it is). With `tokens = 5`, `sinks = 1`, `recent = 2`, ten tokens
//! compressed at once:
//!
//! ```text
//! position    0   1   2   3   4   5   6   7   8   9
//! ‖k‖         9   4   7   2   5   2   8   3   6   9
//! protected   █                               █   █
//! lowest two              █       █
//! lives       █   ·   ·   █   ·   █   ·   ·   █   █
//! ```

use super::super::stage::{Kind, NewRow, StageDef, Tolerance, never};
use super::budget::{
    ALLOCATE, BETA, BYTES, BYTES_PER_TOKEN, KEPT_FRACTION, REBUILD, RECENT, SAFEGUARD, SEGMENTS,
    SINKS, TOKENS, WHITELIST,
};
use super::growth::{DECODING_KEPT_FRACTION, DECODING_TOKENS};
use super::selection::{Score, Selection};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "knorm",
    kind: Kind::Retain,
    doc: "rows with small key norms",
    paper: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430",
    params: &[
        TOKENS,
        KEPT_FRACTION,
        BYTES,
        BYTES_PER_TOKEN,
        DECODING_TOKENS,
        DECODING_KEPT_FRACTION,
        ALLOCATE,
        SAFEGUARD,
        BETA,
        SINKS,
        RECENT,
        WHITELIST,
        SEGMENTS,
        REBUILD,
    ],
    calibrated: never,
    examples: &[
        "{ method = \"knorm\", kept_fraction = 0.5 }",
        "{ method = \"knorm\", tokens = 64, recent = 32 }",
        "{ method = \"knorm\", kept_fraction = 0.5, decoding_tokens = 8 }",
        "{ method = \"knorm\", kept_fraction = 0.5, rebuild = 0.5 }",
    ],
    tolerance: Tolerance::Exact,
    build: |params, _| Selection::stage("knorm", params, 0, Knorm),
};

/// The score.
pub struct Knorm;

impl Score for Knorm {
    fn arrival(&self, row: NewRow<'_>) -> f32 {
        -row.k.iter().fold(0.0f32, |s, &x| x.mul_add(x, s)).sqrt()
    }
}
