//! A strategy: a resolved choice of stages, as an experiment names it. Data only; [`super::stage`] builds it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::stage::{KeyForm, Params, Side};

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

/// Newest rows that stay exact, K and V apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "TailText", into = "TailText")]
pub struct Tail {
    /// Of keys.
    pub k: usize,
    /// Of values.
    pub v: usize,
}

impl Tail {
    /// The same for both sides.
    pub fn both(n: usize) -> Self {
        Self { k: n, v: n }
    }

    /// One side's.
    pub fn side(self, side: Side) -> usize {
        match side {
            Side::K => self.k,
            Side::V => self.v,
        }
    }
}

impl fmt::Display for Tail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.k == self.v {
            write!(f, "{}", self.k)
        } else {
            write!(f, "{}/{}", self.k, self.v)
        }
    }
}

/// How a tail is written: one number where the sides agree.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum TailText {
    Both(usize),
    Sides { k: usize, v: usize },
}

impl From<TailText> for Tail {
    fn from(text: TailText) -> Self {
        match text {
            TailText::Both(n) => Self::both(n),
            TailText::Sides { k, v } => Self { k, v },
        }
    }
}

impl From<Tail> for TailText {
    fn from(tail: Tail) -> Self {
        if tail.k == tail.v {
            TailText::Both(tail.k)
        } else {
            TailText::Sides {
                k: tail.k,
                v: tail.v,
            }
        }
    }
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
    pub tail: Tail,
    /// First rows that stay exact for good.
    pub sinks: usize,
    /// Format of exact rows.
    pub exact: ExactFormat,
    /// Bytes that a sequence may take, and what pages are encoded to when they don't suffice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
}

/// Whose bytes a budget limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Each sequence's.
    #[default]
    Sequence,
    /// Those of all sequences together. What a sequence gets then depends on the others.
    All,
}

/// A change of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetStep {
    /// Length of the sequence (of the longest one, where all share a budget) from which it holds.
    pub at: u32,
    /// Bytes from there on.
    pub bytes: u64,
}

/// Mixed precision by budget: as a context grows, its oldest pages are encoded again with fewer bits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// Resident bytes allowed.
    pub bytes: u64,
    /// Whose.
    pub scope: Scope,
    /// Later budgets, by ascending length.
    pub steps: Vec<BudgetStep>,
    /// Formats of K and V after `encode`, of fewer and fewer bits.
    pub then: Vec<(StageSpec, StageSpec)>,
}

impl Budget {
    /// Bytes allowed at a length.
    pub fn at(&self, len: u32) -> u64 {
        let step = self.steps.iter().rev().find(|s| s.at <= len);
        step.map_or(self.bytes, |s| s.bytes)
    }
}

impl Strategy {
    /// Maps of one side, in order.
    pub fn maps(&self, side: Side) -> &[StageSpec] {
        match side {
            Side::K => &self.project_k,
            Side::V => &self.project_v,
        }
    }

    /// Formats of K and V by level of precision, the most bits first.
    pub fn levels(&self) -> impl Iterator<Item = (&StageSpec, &StageSpec)> {
        let lower = self.budget.iter().flat_map(|b| &b.then);
        std::iter::once((&self.encode_k, &self.encode_v)).chain(lower.map(|(k, v)| (k, v)))
    }

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
            tail: Tail::default(),
            sinks: 0,
            exact: ExactFormat::F16,
            budget: None,
        }
    }
}
