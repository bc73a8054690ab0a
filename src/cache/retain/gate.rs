//! `gate`: rows that a learned linear score holds for needed, the score of a row being made when the row is.
//!
//! A head's score is w·h + a·ln‖k‖ + b·ln‖v‖ + c·ln(1 + p) + d: h the layer's normalised input, k and v the row, p its
//! position; a small network may add to it. The weights come from a file that `kvlab train` writes; they are fitted to ln of
//! what `kvzip_plus` gives, so that one threshold can serve all heads.
//!
//! Invariants: a score depends on its own row alone; a file made for another model is refused where the model is known, one for
//! other layers, heads or channels everywhere.

pub mod weights;

use std::path::Path;

use sha2::{Digest, Sha256};

use super::super::Needs;
use super::super::stage::{
    BuildContext, Domain, Kind, NewRow, ParamDef, Params, Stage, StageDef, StageError, Tolerance,
    never,
};
use super::budget::{
    ALLOCATE_GLOBAL, BETA, BYTES, BYTES_PER_TOKEN, KEPT_FRACTION, REBUILD, RECENT_64, SAFEGUARD,
    SEGMENTS, SINKS, TOKENS, WHITELIST,
};
use super::growth::{DECODING_KEPT_FRACTION, DECODING_TOKENS};
use super::selection::{Score, Selection};
use crate::compute::cpu::vector::dot_rows;
pub use weights::{EXTRAS, Weights};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "gate",
    kind: Kind::Retain,
    doc: "rows that a learned gate scores high, by budget or threshold, as they come",
    paper: "after KVzap, arXiv 2601.07891; trained by `kvlab train`",
    params: &[
        ParamDef {
            name: "file",
            domain: Domain::File { or: &["random"] },
            default: None,
            doc: "the gate's weights; or `random`: an untrained one, a control",
        },
        ParamDef {
            name: "sha256",
            domain: Domain::Text,
            default: None,
            doc: "of the file; filled in, refused where it is another",
        },
        ParamDef {
            name: "threshold",
            domain: Domain::Real,
            default: None,
            doc: "rows that score less leave; give this, `tokens` or `kept_fraction`",
        },
        TOKENS,
        KEPT_FRACTION,
        BYTES,
        BYTES_PER_TOKEN,
        DECODING_TOKENS,
        DECODING_KEPT_FRACTION,
        ALLOCATE_GLOBAL,
        SAFEGUARD,
        BETA,
        SINKS,
        RECENT_64,
        WHITELIST,
        SEGMENTS,
        REBUILD,
    ],
    calibrated: never,
    examples: &[
        "{ method = \"gate\", file = \"random\", kept_fraction = 0.5, recent = 16 }",
        "{ method = \"gate\", file = \"random\", threshold = 0.0, recent = 16 }",
    ],
    tolerance: Tolerance::Exact,
    build,
};

/// The features of a row besides the hidden ones.
pub fn extras(k: &[f32], v: &[f32], position: u32) -> [f32; EXTRAS] {
    // A row of zeros has no logarithm; this is far below any real one.
    let log_norm = |x: &[f32]| {
        let mut square = [0.0f32];
        dot_rows(x, x, &mut square);
        square[0].max(1e-12).ln() / 2.0
    };
    [log_norm(k), log_norm(v), (1.0 + position as f32).ln(), 1.0]
}

fn build(params: &Params, context: &BuildContext<'_>) -> Result<Stage, StageError> {
    Selection::stage(DEF.name, params, 0, read(DEF.name, params, context)?)
}

/// The gate that `file` names; `name` is the stage's.
pub(super) fn read(
    name: &str,
    params: &Params,
    context: &BuildContext<'_>,
) -> Result<Gate, StageError> {
    let refused = |problem: String| StageError::Parameter {
        kind: Kind::Retain,
        name: name.to_owned(),
        problem,
    };
    let file = params.text("file").ok_or_else(|| {
        refused(
            "it has no `file`: train one with `kvlab train`, or name a committed one".to_owned(),
        )
    })?;
    if file == "random" {
        return Ok(Gate::Random);
    }
    let bytes = std::fs::read(Path::new(file))
        .map_err(|e| refused(format!("`file` = \"{file}\" can't be read: {e}")))?;
    let sum = format!("{:x}", Sha256::digest(&bytes));
    if let Some(noted) = params.text("sha256").filter(|&noted| noted != sum) {
        return Err(refused(format!(
            "`file` = \"{file}\" has the sum {sum}, `sha256` says {noted}: it is another file, or was replaced since"
        )));
    }
    let weights = Weights::read(file, &bytes).map_err(refused)?;
    let layers = &context.geometry.layers;
    let shape = (layers.len(), layers.first().map_or(0, |l| l.n_kv_heads));
    // One layer or none stands in for a model that is not known yet; no row is ever scored there.
    if shape.0 > 1 && shape != weights.shape {
        return Err(refused(format!(
            "`{file}` was made for {} layers of {} KV heads, the model has {} of {}: train one for this model",
            weights.shape.0, weights.shape.1, shape.0, shape.1
        )));
    }
    Ok(Gate::Learned(Box::new(weights)))
}

/// The score.
pub enum Gate {
    /// Learned weights.
    Learned(Box<Weights>),
    /// A direction of ±1 for each head.
    Random,
}

impl Score for Gate {
    fn needs(&self) -> Needs {
        Needs {
            hidden: true,
            ..Needs::default()
        }
    }

    fn compares_windows(&self) -> bool {
        matches!(self, Gate::Random)
    }

    fn arrival(&self, row: NewRow<'_>) -> f32 {
        let Gate::Learned(weights) = self else {
            let sign = |i: usize| match super::random::mixed(
                (row.layer * 64 + row.kv_head + 64 * 64 * i) as u64,
            ) & 1
            {
                0 => 1.0f32,
                _ => -1.0,
            };
            let terms = row.hidden.iter().enumerate();
            return terms.fold(0.0, |s, (i, x)| sign(i).mul_add(*x, s));
        };
        let extras = extras(row.k, row.v, row.position);
        weights.score((row.layer, row.kv_head), row.hidden, &extras)
    }

    fn weight_bytes(&self) -> u64 {
        match self {
            Gate::Learned(weights) => weights.bytes(),
            Gate::Random => 0,
        }
    }

    fn hidden_width(&self) -> Option<usize> {
        match self {
            Gate::Learned(weights) => Some(weights.n_embd()),
            Gate::Random => None,
        }
    }

    fn made_for(&self) -> Option<&str> {
        match self {
            Gate::Learned(weights) => Some(&weights.model_sha256),
            Gate::Random => None,
        }
    }
}
