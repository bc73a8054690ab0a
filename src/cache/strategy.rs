//! A strategy: a resolved choice of stages, as an experiment names it. Data only; [`super::stage`] builds it.

use serde::{Deserialize, Serialize};

use super::stage::{KeyForm, Params};

/// A stage by name with its resolved parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageSpec {
    /// Registered name.
    pub name: String,
    /// Parameters, defaults filled in.
    #[serde(default)]
    pub params: Params,
}

impl StageSpec {
    /// A stage without parameters.
    pub fn plain(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            params: Params::default(),
        }
    }
}

/// Format of exact rows (sinks and tail).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExactFormat {
    /// IEEE half, 2 bytes per scalar.
    #[default]
    F16,
    /// IEEE single, 4 bytes per scalar.
    F32,
}

/// One strategy. Everything here changes numbers and is part of a cell's identity, `label` excepted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Strategy {
    /// Name in tables.
    pub label: String,
    /// Which rows live; `None`: all.
    pub retain: Option<StageSpec>,
    /// Maps of K, in order.
    pub project_k: Vec<StageSpec>,
    /// Maps of V, in order.
    pub project_v: Vec<StageSpec>,
    /// Format of K.
    pub encode_k: StageSpec,
    /// Format of V.
    pub encode_v: StageSpec,
    /// Exact packing of sealed pages.
    pub pack: Option<StageSpec>,
    /// Where sealed pages live.
    pub place: Option<StageSpec>,
    /// Form in which keys are stored.
    pub keys: KeyForm,
    /// Newest rows that stay exact.
    pub tail: usize,
    /// First rows that stay exact for good.
    pub sinks: usize,
    /// Format of exact rows.
    pub exact: ExactFormat,
}

impl Strategy {
    /// The bare format `name` for K and V: no tail, no sinks, nothing else.
    pub fn bare(name: &str) -> Self {
        Self {
            label: name.to_owned(),
            retain: None,
            project_k: Vec::new(),
            project_v: Vec::new(),
            encode_k: StageSpec::plain(name),
            encode_v: StageSpec::plain(name),
            pack: None,
            place: None,
            keys: KeyForm::PostRope,
            tail: 0,
            sinks: 0,
            exact: ExactFormat::F16,
        }
    }
}
