//! `specache`: coded rows stay in memory, their exact copies go to a tier, and the most attended ones are brought back for
//! the next token while this one is computed, as a token tried out beside it asks for them.
//!
//! Invariant: see [`refetch`].

use super::super::sparse::refetch::{Plan, When};
use super::super::sparse::vault::Home;
use super::super::sparse::{Reading, refetch};
use super::super::stage::{
    BuildContext, Domain, Kind, ParamDef, Params, Stage, StageDef, StageError, Tolerance, never,
};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "specache",
    kind: Kind::Place,
    doc: "exact copies in a tier; the most attended rows come back ahead of time",
    paper: "SpeCache, arXiv 2503.16163",
    params: &[
        ParamDef {
            name: "tokens",
            domain: Domain::Int {
                min: 1,
                max: 1 << 20,
            },
            default: Some("64"),
            doc: "rows of each KV head that a token reads exact",
        },
        ParamDef {
            name: "fetch",
            domain: Domain::Choice {
                of: &["speculative", "demand", "all"],
            },
            default: Some("speculative"),
            doc: "ahead of time; when the token's own queries are known; or every row, layer by layer",
        },
        ParamDef {
            name: "tier",
            domain: Domain::Choice {
                of: &["file", "memory"],
            },
            default: Some("file"),
            doc: "where exact rows are: a file read past the page cache, or host memory",
        },
    ],
    calibrated: never,
    examples: &[
        "{ method = \"specache\", tokens = 8, tier = \"memory\" }",
        "{ method = \"specache\", tokens = 8, fetch = \"demand\" }",
        "{ method = \"specache\", fetch = \"all\" }",
    ],
    tolerance: Tolerance::Exact,
    build,
};

fn build(params: &Params, context: &BuildContext<'_>) -> Result<Stage, StageError> {
    let n_rows = params.int("tokens").and_then(|n| usize::try_from(n).ok());
    let plan: refetch::Plan = Plan {
        n_rows: n_rows.unwrap_or(64),
        when: match params.text("fetch") {
            Some("demand") => When::Demand,
            Some("all") => When::All,
            _ => When::Speculative,
        },
        home: match params.text("tier") {
            Some("memory") => Home::Memory,
            _ => Home::File(context.backing_dir.cloned()),
        },
    };
    Ok(Stage::Read(Reading::Refetch(plan)))
}
