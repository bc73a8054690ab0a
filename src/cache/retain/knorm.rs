//! `knorm`: rows whose keys have a small norm live, a budget of its own for each KV head.
//!
//! The score of a row is −‖k‖₂ of the key in the form in which it is stored (RoPE leaves the norm as it is). At the end
//! of each decode step, and at the compression point, the rows of lowest score leave until the budget is met: `tokens`
//! rows, or ⌈`kept_fraction` · n⌉ of the n positions seen, at least one. Rows below `sinks` and the newest `recent` never
//! leave, even where that exceeds a fraction's budget.
//!
//! Invariants: of equal scores the older row leaves; an evicted row never comes back, so a head decoded step by step may
//! hold other rows than one compressed at once; with `tokens = n` no more than n rows live after any step.
//!
//! With `tokens = 5`, `sinks = 1`, `recent = 2`, ten tokens compressed at once:
//!
//! ```text
//! position    0   1   2   3   4   5   6   7   8   9
//! ‖k‖         9   4   7   2   5   2   8   3   6   9
//! protected   █                               █   █
//! lowest two              █       █
//! lives       █   ·   ·   █   ·   █   ·   ·   █   █
//! ```

use std::sync::Arc;

use super::super::stage::{
    BuildContext, Domain, Kind, LiveRows, NewRow, ParamDef, Params, Retention, Stage, StageDef,
    StageError, Tolerance, never,
};
use super::{positions, unprotected};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "knorm",
    kind: Kind::Retain,
    doc: "rows with small key norms, per KV head, within `tokens` or `kept_fraction`",
    paper: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430",
    params: &[
        ParamDef {
            name: "tokens",
            domain: Domain::Int {
                min: 1,
                max: u32::MAX as i64,
            },
            default: None,
            doc: "most rows that live per head; give this or `kept_fraction`",
        },
        ParamDef {
            name: "kept_fraction",
            domain: Domain::Fraction { min: 0.0, max: 1.0 },
            default: None,
            doc: "rows that live per position seen, rounded up; give this or `tokens`",
        },
        ParamDef {
            name: "sinks",
            domain: Domain::Int {
                min: 0,
                max: u32::MAX as i64,
            },
            default: Some("4"),
            doc: "first positions, which always live",
        },
        ParamDef {
            name: "recent",
            domain: Domain::Int {
                min: 0,
                max: u32::MAX as i64,
            },
            default: Some("0"),
            doc: "newest positions, which always live",
        },
    ],
    calibrated: never,
    examples: &[
        "{ method = \"knorm\", kept_fraction = 0.5 }",
        "{ method = \"knorm\", tokens = 64, recent = 32 }",
    ],
    tolerance: Tolerance::Exact,
    build,
};

/// How many rows of a head live.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// At most so many.
    Tokens(u32),
    /// So many per position seen, rounded up; in (0, 1].
    KeptFraction(f64),
}

impl Budget {
    /// Rows that may live after `n_seen` positions; at least 1.
    pub fn rows(self, n_seen: u32) -> usize {
        match self {
            Budget::Tokens(n) => n.max(1) as usize,
            // A hair less, or 0.07 · 100 = 7.000000000000001 would be 8 rows.
            Budget::KeptFraction(f) => {
                (f * f64::from(n_seen) * (1.0 - 1e-12)).ceil().max(1.0) as usize
            }
        }
    }
}

/// The stage.
#[derive(Debug, Clone, Copy)]
pub struct Knorm {
    /// Rows that live per head.
    pub budget: Budget,
    /// First positions, which always live.
    pub sinks: u32,
    /// Newest positions, which always live.
    pub recent: u32,
}

fn build(params: &Params, _: &BuildContext<'_>) -> Result<Stage, StageError> {
    let refused = |problem: String| StageError::Parameter {
        kind: Kind::Retain,
        name: DEF.name.to_owned(),
        problem,
    };
    let (sinks, recent) = (positions(params, "sinks"), positions(params, "recent"));
    let budget = match (params.int("tokens"), params.float("kept_fraction")) {
        (Some(_), None) => Budget::Tokens(positions(params, "tokens")),
        (None, Some(f)) => Budget::KeptFraction(f),
        (None, None) => {
            return Err(refused(
                "it has no budget: give `tokens` (rows per head) or `kept_fraction` (0 to 1)"
                    .to_owned(),
            ));
        }
        (Some(n), Some(f)) => {
            return Err(refused(format!(
                "`tokens` = {n} and `kept_fraction` = {f} are two budgets: give one of them"
            )));
        }
    };
    let protected = u64::from(sinks) + u64::from(recent);
    match budget {
        Budget::Tokens(n) if u64::from(n) < protected => Err(refused(format!(
            "`tokens` = {n} can't hold the {protected} protected rows (`sinks` = {sinks} and `recent` = {recent}): give at \
             least {protected}, or protect fewer"
        ))),
        _ => Ok(Stage::Retain(Arc::new(Knorm {
            budget,
            sinks,
            recent,
        }))),
    }
}

impl Retention for Knorm {
    fn score(&self, row: NewRow<'_>) -> f32 {
        -row.k.iter().fold(0.0f32, |s, &x| x.mul_add(x, s)).sqrt()
    }

    fn evict(&self, live: LiveRows<'_>) -> Vec<usize> {
        let candidates = unprotected(&live, self.sinks, self.recent);
        let excess = live
            .positions
            .len()
            .saturating_sub(self.budget.rows(live.n_seen));
        lowest(live.scores, candidates, excess)
    }
}

/// The `n` lowest scores among `candidates` (all of them if there are fewer), the older of equal ones first; ascending.
fn lowest(scores: &[f32], candidates: std::ops::Range<usize>, n: usize) -> Vec<usize> {
    let order = |&a: &usize, &b: &usize| scores[a].total_cmp(&scores[b]).then(a.cmp(&b));
    match n.min(candidates.len()) {
        0 => Vec::new(),
        // What nearly every decode step asks for: one pass, no copy.
        1 => candidates.min_by(order).into_iter().collect(),
        n if n == candidates.len() => candidates.collect(),
        n => {
            let mut rows: Vec<usize> = candidates.collect();
            rows.select_nth_unstable_by(n, order);
            rows.truncate(n);
            rows.sort_unstable();
            rows
        }
    }
}
