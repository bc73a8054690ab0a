//! `kvzip` and `kvzip_plus`: rows that the model attends to when it repeats the context.
//!
//! The engine reads the context a second time, as the answer to a prompt that asks to repeat it; a row's score is the most
//! attention that it got meanwhile, for `kvzip_plus` weighted by what the row adds to its layer's output. What is asked
//! about the context later plays no part. With `allocate = "heads"` whole heads stay or go: the paper's head level, but by
//! the context's own repetition, where the paper weighs heads once, on another text.

use super::super::Needs;
use super::super::stage::{ContextLayer, ContextNeeds, Kind, StageDef, Tolerance, never};
use super::budget::{
    ALLOCATE_GLOBAL, BETA, BYTES, BYTES_PER_TOKEN, KEPT_FRACTION, RECENT, SAFEGUARD, SEGMENTS,
    SINKS, TOKENS, WHITELIST,
};
use super::selection::{Score, Selection};

/// By attention.
pub const KVZIP: StageDef = StageDef {
    name: "kvzip",
    kind: Kind::Retain,
    doc: "rows attended to when the model repeats the context",
    paper: "KVzip, arXiv 2505.23416",
    params: &[
        TOKENS,
        KEPT_FRACTION,
        BYTES,
        BYTES_PER_TOKEN,
        ALLOCATE_GLOBAL,
        SAFEGUARD,
        BETA,
        SINKS,
        RECENT,
        WHITELIST,
        SEGMENTS,
    ],
    calibrated: never,
    examples: &[
        "{ method = \"kvzip\", kept_fraction = 0.5 }",
        "{ method = \"kvzip\", kept_fraction = 0.7, allocate = \"heads\", recent = 16 }",
    ],
    tolerance: Tolerance::Exact,
    build: |params, _| Selection::stage("kvzip", params, 0, Repeated::Attention),
};

/// By attention times what is attended to.
pub const KVZIP_PLUS: StageDef = StageDef {
    name: "kvzip_plus",
    doc: "kvzip weighted by the norm of what a row adds to its layer's output",
    paper: "KVzip+, as defined by KVzap, arXiv 2601.07891",
    examples: &["{ method = \"kvzip_plus\", kept_fraction = 0.5, recent = 16 }"],
    build: |params, _| Selection::stage("kvzip_plus", params, 0, Repeated::Weighted),
    ..KVZIP
};

/// Which of the repetition's scores.
pub enum Repeated {
    /// Attention.
    Attention,
    /// Weighted attention.
    Weighted,
}

impl Score for Repeated {
    fn needs(&self) -> Needs {
        Needs {
            context: ContextNeeds {
                repetition: true,
                ..ContextNeeds::default()
            },
            ..Needs::default()
        }
    }

    fn compares_windows(&self) -> bool {
        false
    }

    fn context(&self, context: ContextLayer<'_>) -> Vec<Vec<f32>> {
        let Some(repetition) = context.seen.repetition else {
            return Vec::new();
        };
        match self {
            Repeated::Attention => repetition.attention.clone(),
            Repeated::Weighted => repetition.weighted.clone(),
        }
    }
}
