//! `window`: the first rows and the newest ones, at their own positions (StreamingLLM without its re-indexing).
//!
//! Invariants: once `n` positions are seen, the rows that live are those below `sinks` and those from `n − recent` on;
//! at least one row lives, so no head is ever empty; decoding and the compression point follow the same rule.
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
    BuildContext, Domain, Kind, LiveRows, NewRow, ParamDef, Params, Retention, Stage, StageDef,
    StageError, Tolerance, never,
};
use super::budget::{KEPT_FRACTION, REBUILD, part};
use super::growth::{DECODING_KEPT_FRACTION, DECODING_TOKENS, Growth};
use super::positions;

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
            default: None,
            doc: "newest positions whose rows live; 256 where `kept_fraction` isn't given either",
        },
        ParamDef {
            doc: "rows that live per position, sinks included, rounded up; in place of `recent`",
            ..KEPT_FRACTION
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
        DECODING_TOKENS,
        DECODING_KEPT_FRACTION,
        REBUILD,
    ],
    calibrated: never,
    examples: &[
        "{ method = \"window\", recent = 64 }",
        "{ method = \"window\", recent = 12, sinks = 0 }",
        "{ method = \"window\", kept_fraction = 0.5 }",
    ],
    tolerance: Tolerance::Exact,
    build,
};

fn build(params: &Params, _: &BuildContext<'_>) -> Result<Stage, StageError> {
    let refused = |problem: &str| StageError::Parameter {
        kind: Kind::Retain,
        name: DEF.name.to_owned(),
        problem: problem.to_owned(),
    };
    let sinks = positions(params, "sinks");
    let newest = match (params.int("recent"), params.float("kept_fraction")) {
        (Some(_), Some(_)) => {
            return Err(refused(
                "`recent` and `kept_fraction` are two budgets: give one of them",
            ));
        }
        (None, Some(f)) => Newest::KeptFraction(f),
        (Some(_), None) => Newest::Rows(positions(params, "recent")),
        (None, None) => Newest::Rows(256),
    };
    if newest == Newest::Rows(0) && sinks == 0 {
        return Err(refused(
            "`recent` and `sinks` are both 0: at least one row must live",
        ));
    }
    let growth = Growth::read(params).map_err(|problem| refused(&problem))?;
    Ok(Stage::Retain(Arc::new(Window {
        newest,
        sinks,
        growth,
        rebuild: params.float("rebuild"),
    })))
}

/// How many of the newest positions live.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Newest {
    /// So many.
    Rows(u32),
    /// With the sinks, so many per position seen, rounded up.
    KeptFraction(f64),
}

/// The stage.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Newest positions whose rows live.
    pub newest: Newest,
    /// First positions whose rows live.
    pub sinks: u32,
    /// Another budget for what comes after a compression point.
    pub growth: Option<Growth>,
    /// When pages are coded anew.
    pub rebuild: Option<f64>,
}

impl Retention for Window {
    fn is_scored(&self) -> bool {
        false
    }

    fn score(&self, row: NewRow<'_>) -> f32 {
        // Newer is kept longer; no decision reads it.
        row.position as f32
    }

    fn rebuild(&self) -> Option<f64> {
        self.rebuild
    }

    fn budgets_decoding(&self) -> bool {
        self.growth.is_some()
    }

    fn needs_point(&self) -> Option<&'static str> {
        let after = "it has a budget for what comes after a compression point (`decoding_…`)";
        self.growth.map(|_| after)
    }

    fn nothing_to_choose(&self, n_tokens: u32) -> Option<String> {
        let Newest::KeptFraction(f) = self.newest else {
            return None;
        };
        let rows = part(f, n_tokens);
        (f < 1.0 && rows <= f64::from(self.sinks)).then(|| {
            format!(
                "`kept_fraction` = {f} of {n_tokens} tokens is {rows} rows, no more than the {} sinks: no newest row \
                 would live",
                self.sinks
            )
        })
    }

    fn evict(&self, live: LiveRows<'_>) -> Vec<usize> {
        let grown = |left| {
            self.growth
                .map(|growth: Growth| growth.rows(left, live.n_reached))
        };
        // A sliding window may have passed the sinks.
        let first = live.positions.partition_point(|&p| p < self.sinks);
        let recent = match (live.compressed.and_then(grown), self.newest) {
            (Some(rows), _) => rows.saturating_sub(first as u32),
            (None, Newest::Rows(n)) => n,
            (None, Newest::KeptFraction(f)) => {
                let least = u32::from(self.sinks == 0);
                (part(f, live.n_seen) as u32)
                    .saturating_sub(self.sinks)
                    .max(least)
            }
        };
        let end = live.n_seen.saturating_sub(recent);
        let end = live.positions.partition_point(|&p| p < end);
        (first..end.max(first)).collect()
    }
}
