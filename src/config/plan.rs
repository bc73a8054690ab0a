//! The plan: an experiment, validated and resolved, and the cells it consists of.
//!
//! Invariants: a plan holds no default that is still open, and nothing that the machine decides; a cell's id is the hash
//! of everything that can change its numbers (the threads, the chunk and the label can't). Plans are written into bundles
//! as JSON and read back to the same plan, but for its bars.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::problems::{Location, Problem, Problems};
use super::protocol::{Protocol, QUESTION_TOKENS};
use super::strategies::content;
use crate::cache::project::aqua;
use crate::cache::stage::{BuildContext, HeadContext, Kind, Side, find};
use crate::cache::strategy::{StageSpec, Strategy};
use crate::cache::{Geometry, Materials, least_budget};
use crate::data::{DataRef, sha256_hex};
use crate::eval::bars::Bar;
use crate::eval::layers;
use crate::model::ops::Arithmetic;

/// Raised whenever a change of the program moves numbers, so that cells of before and after have different ids.
pub const NUMBERS: u32 = 3;

/// The text from which stages that learn take their statistics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CalibrationPlan {
    /// The text.
    pub data: DataRef,
    /// Tokens of it.
    pub tokens: usize,
}

/// Where each setting stands in the experiment's files, by its dotted path; empty in a plan read from a bundle.
#[derive(Debug, Clone, Default)]
pub struct Origins(pub BTreeMap<String, Location>);

/// Where a plan came from is no part of what it says.
impl PartialEq for Origins {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// An experiment, resolved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Version of the experiment format.
    pub schema: u32,
    /// Folder of the results.
    pub name: String,
    /// A built-in name, `hub:org/name`, or the path of a GGUF file or a Hugging Face folder.
    pub model: String,
    /// The texts.
    pub data: Vec<DataRef>,
    /// The protocols: one, or several when the experiment sweeps over its settings.
    pub protocols: Vec<Protocol>,
    /// The strategies; labels are unique.
    pub strategies: Vec<Strategy>,
    /// Tokens of a prefill step. Changes no number.
    pub chunk: usize,
    /// Seed of everything random.
    pub seed: u64,
    /// Decode steps that are timed per strategy after the first document; 0: none.
    pub latency_steps: usize,
    /// Tokens between two records of memory along the first document of each text; 0: none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub memory_every: usize,
    /// Whether the first document of each text is held against the exact context, layer by layer.
    #[serde(default, skip_serializing_if = "is_off")]
    pub layers: bool,
    /// The calibration text; present when a stage learns from one.
    pub calibration: Option<CalibrationPlan>,
    /// Threads; `None`: all. Changes no number.
    pub threads: Option<usize>,
    /// What linear layers compute in, the reference's and all strategies'.
    #[serde(default, skip_serializing_if = "Arithmetic::is_f32")]
    pub arithmetic: Arithmetic,
    /// What the experiment must show. No part of the plan's JSON: it makes no result, and may change after a run.
    #[serde(skip)]
    pub bars: Vec<Bar>,
    /// Where the settings stand.
    #[serde(skip)]
    pub origins: Origins,
}

/// One (model, text, protocol, strategy, seed).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cell {
    /// First 12 hex digits of the sha256 over everything that can change the cell's numbers.
    pub id: String,
    /// Index into [`Plan::data`].
    pub data: usize,
    /// Index into [`Plan::protocols`].
    pub protocol: usize,
    /// Index into [`Plan::strategies`].
    pub strategy: usize,
}

/// What a plan must know of a model to be checked against it.
#[derive(Debug, Clone, Copy)]
pub struct ModelLimits<'a> {
    /// The model's name in messages.
    pub name: &'a str,
    /// Of its weights' file, lower-case hex.
    pub sha256: &'a str,
    /// Longest context in tokens.
    pub context_length: usize,
    /// Its attention layers.
    pub geometry: &'a Geometry,
}

impl Plan {
    /// All cells: by text, then protocol, then strategy. `model_sha256` is the identity of the model's weights.
    pub fn cells(&self, model_sha256: &str) -> Vec<Cell> {
        let mut cells = Vec::new();
        for data in 0..self.data.len() {
            for protocol in 0..self.protocols.len() {
                for strategy in 0..self.strategies.len() {
                    let identity = self.identity(model_sha256, data, protocol, strategy);
                    let hash = sha256_hex(canonical(&identity).as_bytes());
                    cells.push(Cell {
                        id: hash[..12].to_owned(),
                        data,
                        protocol,
                        strategy,
                    });
                }
            }
        }
        cells
    }

    /// Indices of the protocols, those together that share their items.
    pub fn protocols_by_items(&self) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for (i, protocol) in self.protocols.iter().enumerate() {
            let shares =
                |group: &&mut Vec<usize>| self.protocols[group[0]].shares_items_with(protocol);
            match groups.iter_mut().find(shares) {
                Some(group) => group.push(i),
                None => groups.push(vec![i]),
            }
        }
        groups
    }

    /// Queries with which the first document is compared layer by layer; 0: it is not.
    pub fn layer_queries(&self) -> usize {
        if self.layers { layers::QUERIES } else { 0 }
    }

    fn identity(&self, model: &str, data: usize, protocol: usize, strategy: usize) -> Value {
        let text = &self.data[data];
        let strategy = &self.strategies[strategy];
        let mut stages = json!(content(strategy));
        if let Some(fields) = stages.as_object_mut() {
            fields.remove("label");
        }
        let calibration = self
            .calibration
            .as_ref()
            .filter(|_| is_calibrated(strategy));
        let mut identity = json!({
            "numbers": NUMBERS,
            "engine": env!("CARGO_PKG_VERSION"),
            "model": model,
            "text": { "sha256": text.sha256, "separator": text.separator },
            "protocol": self.protocols[protocol],
            "strategy": stages,
            "seed": self.seed,
            "latency_steps": self.latency_steps,
            "calibration": calibration.map(|c| json!({ "sha256": c.data.sha256, "tokens": c.tokens })),
        });
        if self.memory_every > 0 {
            identity["memory_every"] = json!(self.memory_every);
        }
        if self.layers {
            identity["layers"] = json!(layers::QUERIES);
        }
        if !self.arithmetic.is_f32() {
            identity["arithmetic"] = json!(self.arithmetic);
        }
        identity
    }

    /// Checks the plan against a model: lengths, and that every stage can be built for its heads.
    ///
    /// # Errors
    /// All that doesn't fit, each with its place in the experiment.
    pub fn check_model(&self, model: &ModelLimits<'_>) -> Result<(), Problems> {
        let mut problems = Problems::default();
        for protocol in &self.protocols {
            // Timed steps follow a window; in compress-once they repeat the continuation's first positions.
            let (key, words, needed) = match protocol {
                Protocol::Stream { window, .. } => (
                    "protocol.window",
                    format!("a window of {window} + {} timed steps", self.latency_steps),
                    window + self.latency_steps,
                ),
                Protocol::CompressOnce { context, score, .. } => (
                    "protocol.context",
                    format!("context {context} + score {score}"),
                    context + score,
                ),
                Protocol::Generate {
                    context, tokens, ..
                } => (
                    "protocol.context",
                    format!("context {context} + {tokens} tokens of text"),
                    context + tokens,
                ),
                Protocol::Tasks { length, .. } => (
                    "protocol.length",
                    format!("contexts of {length} + {QUESTION_TOKENS} for a question"),
                    protocol.n_tokens(),
                ),
            };
            if needed > model.context_length {
                let what = format!(
                    "{words} need {needed} positions, `{}` has {}",
                    model.name, model.context_length
                );
                problems.push(self.problem(key, key, what, Some("make them smaller")));
            }
        }
        for (i, strategy) in self.strategies.iter().enumerate() {
            let before = problems.len();
            self.check_strategy(i, strategy, model, &mut problems);
            self.check_retention(i, strategy, model, &mut problems);
            if problems.len() == before {
                self.check_budget(i, strategy, model, &mut problems);
            }
        }
        problems.into_result(())
    }

    fn check_strategy(
        &self,
        index: usize,
        strategy: &Strategy,
        model: &ModelLimits<'_>,
        problems: &mut Problems,
    ) {
        let head_dim = model.geometry.layers.iter().map(|l| l.head_dim).min();
        for (kind, side, spec) in stages_of(strategy) {
            let Ok(def) = find(kind, &spec.name) else {
                continue;
            };
            let key = format!("strategy.{index}.{}", kind.key());
            let rank = spec.params.int("rank").unwrap_or(0);
            if head_dim.is_some_and(|d| kind == Kind::Project && rank > d as i64) {
                let what = format!(
                    "{}: `rank` is {rank}, the heads of `{}` have {} channels",
                    strategy.label,
                    model.name,
                    head_dim.unwrap_or(0)
                );
                problems.push(self.problem(&key, kind.key(), what, Some("take a smaller rank")));
                continue;
            }
            // A stage that learns is built after calibration; its own checks come then.
            if (def.calibrated)(&spec.params) {
                continue;
            }
            let context = BuildContext {
                geometry: model.geometry,
                keys: strategy.keys,
                side,
                calibration: None,
                backing_dir: None,
                head: head_dim.map(HeadContext::any),
            };
            if let Err(e) = (def.build)(&spec.params, &context) {
                let what = format!("{}: {e}", strategy.label);
                problems.push(self.problem(&key, kind.key(), what, None));
            }
        }
        if let Some(why) = aqua::refusal(strategy, model.geometry) {
            let key = format!("strategy.{index}.project");
            let what = format!("{}: `aqua` {why}", strategy.label);
            problems.push(self.problem(&key, "project", what, None));
        }
    }

    /// Refuses a budget that can't hold what the protocols put into a sequence, with every page at its fewest bits.
    fn check_budget(
        &self,
        index: usize,
        strategy: &Strategy,
        model: &ModelLimits<'_>,
        problems: &mut Problems,
    ) {
        let Some(budget) = &strategy.budget else {
            return;
        };
        // A codebook's bytes are known once it is learned; the run says then what a step needs.
        if is_calibrated(strategy) {
            return;
        }
        let materials = Materials {
            geometry: model.geometry,
            calibration: None,
            backing_dir: None,
        };
        let key = format!("strategy.{index}.budget");
        let n_tokens = self
            .protocols
            .iter()
            .map(|p| p.n_stored(self.latency_steps));
        let n_tokens = n_tokens.max().unwrap_or(0) as u32;
        let n_exact = strategy.sinks + strategy.tail.k.max(strategy.tail.v);
        for (n, what) in [
            (n_tokens, format!("the {n_tokens} tokens of a sequence")),
            (
                n_tokens.min(n_exact as u32),
                format!("{n_exact} sinks and newest rows"),
            ),
        ] {
            match least_budget(strategy, materials, n) {
                Ok(least) if least > budget.at(n) => {
                    let what = format!(
                        "{}: {} bytes can't hold {what}, which take {least} with every page at its fewest bits",
                        strategy.label,
                        budget.at(n)
                    );
                    let hint = "raise `bytes`, or add a format of fewer bits to `then`";
                    problems.push(self.problem(&key, "budget", what, Some(hint)));
                }
                Ok(_) => {}
                Err(e) => {
                    let what = format!("{}: {e}", strategy.label);
                    problems.push(self.problem(&key, "budget", what, None));
                }
            }
        }
    }

    /// `origin` is the setting's place; `key` is how the message calls it (sweeps have numbers that no file shows).
    pub(super) fn problem(
        &self,
        origin: &str,
        key: &str,
        what: String,
        hint: Option<&str>,
    ) -> Problem {
        Problem {
            location: self.origins.0.get(origin).cloned(),
            key: key.to_owned(),
            what,
            hint: hint.map(str::to_owned),
        }
    }
}

/// Settings that are off are left out of a plan's JSON, so that a new one leaves the ids of older plans alone.
fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// The same of a switch.
fn is_off(on: &bool) -> bool {
    !on
}

/// Every stage of a strategy with its kind and side; stages without sides come as K.
pub fn stages_of(strategy: &Strategy) -> Vec<(Kind, Side, &StageSpec)> {
    let mut stages = Vec::new();
    stages.extend(strategy.retain.iter().map(|s| (Kind::Retain, Side::K, s)));
    stages.extend(
        strategy
            .project_k
            .iter()
            .map(|s| (Kind::Project, Side::K, s)),
    );
    stages.extend(
        strategy
            .project_v
            .iter()
            .map(|s| (Kind::Project, Side::V, s)),
    );
    stages.push((Kind::Encode, Side::K, &strategy.encode_k));
    stages.push((Kind::Encode, Side::V, &strategy.encode_v));
    for (k, v) in strategy.budget.iter().flat_map(|b| &b.then) {
        stages.push((Kind::Encode, Side::K, k));
        stages.push((Kind::Encode, Side::V, v));
    }
    stages.extend(strategy.pack.iter().map(|s| (Kind::Pack, Side::K, s)));
    stages.extend(strategy.place.iter().map(|s| (Kind::Place, Side::K, s)));
    stages
}

/// Whether a stage of the strategy learns from the calibration text.
pub fn is_calibrated(strategy: &Strategy) -> bool {
    stages_of(strategy).iter().any(|(kind, _, spec)| {
        find(*kind, &spec.name).is_ok_and(|def| (def.calibrated)(&spec.params))
    })
}

/// JSON with the keys of every object in order of their bytes, so that equal values have equal text.
fn canonical(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let sorted: BTreeMap<&String, &Value> = map.iter().collect();
            let fields: Vec<String> = sorted
                .into_iter()
                .map(|(k, v)| format!("{}:{}", json!(k), canonical(v)))
                .collect();
            format!("{{{}}}", fields.join(","))
        }
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(canonical).collect();
            format!("[{}]", items.join(","))
        }
        other => other.to_string(),
    }
}
