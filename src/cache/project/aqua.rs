//! `aqua`: each layer's rows are predicted from those of the layer before, and only what the prediction misses is
//! projected and encoded.
//!
//! K of layer l comes from K of layer l−1, V of layer l from [V of layer l−1, K of layer l], all KV heads together, by one
//! affine map each. The inputs are what the cache holds, never the clean rows, so that errors don't pile up from layer to
//! layer: each layer's residual corrects what the layers before it left. Layer 0 has no layer before it and loses its
//! mean alone. The maps are fitted on a calibration text, layer by layer, on rows that went through the same codecs
//! (module `predict` of the cache).
//!
//! ```text
//!                 layer l−1          layer l
//! K       K̂ ── A ──→ prediction + decoded residual = K̂
//! V       V̂ ── B ──→ prediction + decoded residual = V̂
//!                    ↑ K̂ of layer l
//! ```
//!
//! Keys are predicted in the form in which they are stored. Before RoPE the relation of two layers' keys is the same at
//! every position; after it, it turns with the position, and one map can follow that only where it treats the two
//! channels of a pair alike: `keys = "pre_rope"` predicts better.
//!
//! K and V of a row must be coded together, so both sides wait for the larger page and have one tail.

use super::super::stage::{
    BuildContext, Domain, Kind, ParamDef, Params, RowCodec, Side, Stage, StageDef, StageError,
    Tolerance, always, find,
};
use super::super::strategy::{StageSpec, Strategy};
use super::super::{Geometry, encode};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "aqua",
    kind: Kind::Project,
    doc: "rows minus a linear prediction from the layer before, as the cache holds it; comes first, on both sides",
    paper: "AQUA-KV, arXiv 2501.19392",
    params: &[
        ParamDef {
            name: "ridge",
            domain: Domain::Fraction { min: 0.0, max: 1.0 },
            default: Some("0.001"),
            doc: "regularisation, as a share of each input channel's variance",
        },
        ParamDef {
            name: "weights",
            domain: Domain::Choice {
                of: &["f16", "q8_0", "q4_0"],
            },
            default: Some("q8_0"),
            doc: "how the predictors' weights are stored; they count as the cache's bytes",
        },
    ],
    calibrated: always,
    examples: &["\"aqua\""],
    // Residuals are stored exactly where the codec is exact; sums round.
    tolerance: Tolerance::RelativeL2(1e-5),
    build,
};

/// How predictors are fitted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Regularisation, as a share of each input channel's variance.
    pub ridge: f64,
    /// How weights are stored.
    pub weights: WeightFormat,
}

/// How the predictors' weights are stored. The residuals make up for what rounding them loses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightFormat {
    /// IEEE half.
    F16,
    /// 8.5 bits.
    #[default]
    Q8_0,
    /// 4.5 bits.
    Q4_0,
}

impl WeightFormat {
    const ALL: [Self; 3] = [Self::F16, Self::Q8_0, Self::Q4_0];

    /// The name in experiments.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
        }
    }

    /// The format of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }

    /// The codec of a row of weights.
    pub fn codec(self) -> &'static dyn RowCodec {
        match self {
            Self::F16 => &encode::f16::F16,
            Self::Q8_0 => &encode::q8_0::Q8_0,
            Self::Q4_0 => &encode::q4_0::Q4_0,
        }
    }
}

fn build(params: &Params, context: &BuildContext<'_>) -> Result<Stage, StageError> {
    if context.calibration.is_none() {
        return Err(StageError::NoCalibration {
            kind: Kind::Project,
            name: DEF.name.to_owned(),
        });
    }
    let weights = params.text("weights").and_then(WeightFormat::named);
    Ok(Stage::Predict(Prediction {
        ridge: params.float("ridge").unwrap_or(1e-3),
        weights: weights.unwrap_or_default(),
    }))
}

/// The stage in a strategy that has it.
pub fn of(strategy: &Strategy) -> Option<&StageSpec> {
    strategy
        .project_k
        .iter()
        .chain(&strategy.project_v)
        .find(|s| s.name == DEF.name)
}

/// Why the strategy can't predict layers of this geometry; `None`: it can, or doesn't ask for it.
pub fn refusal(strategy: &Strategy, geometry: &Geometry) -> Option<String> {
    let spec = of(strategy)?;
    let firsts = [&strategy.project_k, &strategy.project_v].map(|maps| maps.first());
    if firsts != [Some(spec); 2] {
        return Some(
            "must come first on both sides, with the same parameters: write it at the front of `project`, or of both \
             lists of { k = [..], v = [..] }"
                .to_owned(),
        );
    }
    for side in Side::BOTH {
        for map in &strategy.maps(side)[1..] {
            if map.name == DEF.name {
                return Some("stands twice in `project`: once is enough".to_owned());
            }
            if find(Kind::Project, &map.name).is_ok_and(|d| (d.calibrated)(&map.params)) {
                return Some(format!(
                    "`{}` learns from rows, and behind a prediction there are none before the codecs exist: leave one \
                     of the two out",
                    map.name
                ));
            }
        }
    }
    if let Some(retain) = &strategy.retain {
        return Some(format!(
            "predicts each row from the layer before, and `{}` would take that away: leave one of the two out",
            retain.name
        ));
    }
    if strategy.budget.is_some() {
        return Some(
            "corrects each layer for what the layers before it lost, and a `budget` would change that later: leave one \
             of the two out"
                .to_owned(),
        );
    }
    if strategy.tail.k != strategy.tail.v {
        return Some(format!(
            "codes K and V of a row together, and `tail` is {} for K and {} for V: give both the same",
            strategy.tail.k, strategy.tail.v
        ));
    }
    unlike_layers(geometry)
}

fn unlike_layers(geometry: &Geometry) -> Option<String> {
    let first = geometry.layers.first()?;
    for (i, layer) in geometry.layers.iter().enumerate() {
        if layer.window.is_some() {
            return Some(format!(
                "needs the same rows in every layer, and layer {i} keeps a sliding window alone: leave it out for this \
                 model"
            ));
        }
        if (layer.n_kv_heads, layer.head_dim) != (first.n_kv_heads, first.head_dim) {
            return Some(format!(
                "needs layers alike, and layer {i} has {} KV heads of {} channels, layer 0 {} of {}: leave it out for \
                 this model",
                layer.n_kv_heads, layer.head_dim, first.n_kv_heads, first.head_dim
            ));
        }
    }
    None
}
