//! `window`: the first rows and the newest ones, at their own positions (StreamingLLM without its re-indexing).
//!
//! Invariants: once `n` positions are seen, the rows that live are those below `sinks` and those from `n − recent` on;
//! `sinks + recent` is at least 1, so no head is ever empty; decoding and the compression point follow the same rule.
//!
//! With `sinks = 2`, `recent = 4` after ten tokens:
//!
//! ```text
//! position   0  1  2  3  4  5  6  7  8  9
//! lives      █  █  ·  ·  ·  ·  █  █  █  █
//!            sinks             newest four
//! ```
//!
//! The next token brings row 10, and row 6 leaves at the end of that step.

use std::sync::Arc;

use super::super::stage::{
    Domain, Kind, LiveRows, NewRow, ParamDef, Retention, Stage, StageDef, StageError, Tolerance,
    never,
};
use super::{positions, unprotected};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "window",
    kind: Kind::Retain,
    doc: "the first `sinks` rows and the newest `recent` ones",
    paper: "StreamingLLM, arXiv 2309.17453, with absolute positions",
    params: &[
        ParamDef {
            name: "recent",
            domain: Domain::Int {
                min: 0,
                max: u32::MAX as i64,
            },
            default: Some("256"),
            doc: "newest positions whose rows live",
        },
        ParamDef {
            name: "sinks",
            domain: Domain::Int {
                min: 0,
                max: u32::MAX as i64,
            },
            default: Some("4"),
            doc: "first positions whose rows live",
        },
    ],
    calibrated: never,
    examples: &[
        "{ method = \"window\", recent = 64 }",
        "{ method = \"window\", recent = 12, sinks = 0 }",
    ],
    tolerance: Tolerance::Exact,
    build: |params, _| {
        if positions(params, "recent") + positions(params, "sinks") == 0 {
            return Err(StageError::Parameter {
                kind: Kind::Retain,
                name: "window".to_owned(),
                problem: "`recent` and `sinks` are both 0: at least one row must live".to_owned(),
            });
        }
        Ok(Stage::Retain(Arc::new(Window {
            recent: positions(params, "recent"),
            sinks: positions(params, "sinks"),
        })))
    },
};

/// The stage.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Newest positions whose rows live.
    pub recent: u32,
    /// First positions whose rows live.
    pub sinks: u32,
}

impl Retention for Window {
    fn is_scored(&self) -> bool {
        false
    }

    fn score(&self, row: NewRow<'_>) -> f32 {
        // Newer is kept longer; no decision reads it.
        row.position as f32
    }

    fn evict(&self, live: LiveRows<'_>) -> Vec<usize> {
        unprotected(&live, self.sinks, self.recent).collect()
    }
}
