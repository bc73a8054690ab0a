//! `quest`: every row stays where it is, and a decoded token reads the blocks whose keys may score highest.
//!
//! Invariant: see [`blocks`].

use super::super::sparse::{Reading, blocks};
use super::super::stage::{
    BuildContext, Domain, Kind, ParamDef, Params, Stage, StageDef, StageError, Tolerance, never,
};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "quest",
    kind: Kind::Place,
    doc: "nothing moves; a token reads the blocks whose keys may score highest",
    paper: "Quest, arXiv 2406.10774",
    params: &[
        ParamDef {
            name: "tokens",
            domain: Domain::Int {
                min: 1,
                max: 1 << 20,
            },
            default: Some("512"),
            doc: "rows that a token reads of each KV head",
        },
        ParamDef {
            name: "page",
            domain: Domain::Choice {
                of: &["8", "16", "32", "64", "128"],
            },
            default: Some("16"),
            doc: "rows of a block",
        },
        ParamDef {
            name: "dense_layers",
            domain: Domain::Int { min: 0, max: 1000 },
            default: Some("2"),
            doc: "first layers, read whole",
        },
    ],
    calibrated: never,
    examples: &[
        "\"quest\"",
        "{ method = \"quest\", tokens = 16, page = 8, dense_layers = 0 }",
    ],
    tolerance: Tolerance::Exact,
    build,
};

fn build(params: &Params, _: &BuildContext<'_>) -> Result<Stage, StageError> {
    let count = |name| params.int(name).and_then(|n| usize::try_from(n).ok());
    let page = params
        .text("page")
        .and_then(|p| p.parse().ok())
        .or(count("page"));
    let plan = blocks::Plan {
        page: page.unwrap_or(16),
        n_rows: count("tokens").unwrap_or(512),
        dense_layers: count("dense_layers").unwrap_or(2),
    };
    if plan.n_rows < plan.page {
        return Err(StageError::Parameter {
            kind: Kind::Place,
            name: DEF.name.to_owned(),
            problem: format!(
                "`tokens` = {} is less than a block of {} rows, and a token's own block is always read: raise it, or lower \
                 `page`",
                plan.n_rows, plan.page
            ),
        });
    }
    Ok(Stage::Read(Reading::Blocks(plan)))
}
