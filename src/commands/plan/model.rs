//! The plan of a model's cache: bytes of each strategy at a context and a batch, and what fits into a memory.
//!
//! Invariants: a cache fits when its resident bytes and the weights' are together within the budget; nothing else is
//! taken off. The share of memory that a cache should have is advice and decides nothing.

use std::io::Write;

use anyhow::{Context, bail};
use rayon::prelude::*;

use super::super::{Exit, local_path, named};
use super::growth::Growth;
use super::table;
use crate::cache::strategy::Strategy;
use crate::cache::{MemoryReport, RANGE};
use crate::cli::{ByteSize, PlanArgs};
use crate::config::{PRESETS, did_you_mean};
use crate::model::shape::{CacheShape, Weights};
use crate::model::source;

/// Formats that are planned bare beside the presets: no tail, no sinks.
const BARE: [&str; 6] = ["f16", "fp8_e4m3", "q8_0", "q4_0", "nvfp4", "mxfp4"];

/// Bits per parameter of the formats that weights may be planned in.
const WEIGHT_FORMATS: [(&str, f64); 10] = [
    ("f32", 32.0),
    ("float32", 32.0),
    ("f16", 16.0),
    ("float16", 16.0),
    ("bf16", 16.0),
    ("bfloat16", 16.0),
    ("fp8", 8.0),
    ("int8", 8.0),
    ("q8_0", 8.5),
    ("q4_0", 4.5),
];

/// Contexts beyond that are not looked for, in tokens.
const LONGEST: usize = 1 << 24;

/// What is planned.
pub struct Outlook {
    /// The model.
    pub shape: CacheShape,
    /// Tokens of a sequence.
    pub n_tokens: usize,
    /// Sequences.
    pub n_sequences: u64,
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Where that number is from.
    pub weights_from: String,
    /// Bytes for weights and cache.
    pub budget_bytes: Option<u64>,
    /// The strategies that can be built for the model.
    pub rows: Vec<Row>,
    /// The others, each with its reason.
    pub refused: Vec<(String, String)>,
}

/// One strategy.
pub struct Row {
    /// Its label.
    pub label: String,
    /// The cache of all sequences.
    pub memory: MemoryReport,
    /// Bytes that one more token of one sequence adds, past all transients.
    pub marginal_bytes: Option<f64>,
    /// Stored bits per value of a full cache, everything charged.
    pub effective_bits: f64,
    /// Whether it and the weights are within the budget.
    pub fits: Option<bool>,
    /// Sequences of the planned length that are.
    pub n_sequences_fit: Option<u64>,
    /// The longest context, in whole pages, at which the planned number of sequences is.
    pub longest_context: Option<Length>,
    /// The first length, in whole pages, at which the planned number of sequences holds as many bytes as the weights.
    pub equals_weights_at: Option<Length>,
    /// Tokens that were really stored of one head.
    pub n_measured: usize,
    /// Longer lengths are the bytes that would be measured, whatever the data.
    pub exact: bool,
}

/// A length that was looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// Tokens.
    Tokens(usize),
    /// More than is looked for.
    Beyond(usize),
}

/// Plans and prints.
///
/// # Errors
/// A model, strategy or format of weights that can't be used, a failed write.
pub fn plan(name: &str, args: &PlanArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let Some(path) = local_path(name, &args.places)? else {
        bail!("{}", not_here(name));
    };
    let mut shape = CacheShape::read(&path)?;
    if source::builtin().iter().any(|m| m.name == name) {
        shape.name = name.to_owned();
    }
    let strategies = strategies(&args.chosen)?;
    let (weight_bytes, weights_from) = weights(&shape.weights, args.weights.as_deref())?;
    let n_tokens = args.context.map_or(shape.context_length, |n| n as usize);
    let mut outlook = Outlook {
        n_tokens,
        n_sequences: args.batch.into(),
        weight_bytes,
        weights_from,
        budget_bytes: args.budget.map(|b| b.0),
        rows: Vec::new(),
        refused: Vec::new(),
        shape,
    };
    outlook.measure(&strategies);
    if outlook.rows.is_empty() {
        let all = outlook.refused.iter();
        let all: Vec<String> = all.map(|(label, why)| format!("{label}: {why}")).collect();
        bail!(
            "no strategy can be planned for this model: {}",
            all.join("; ")
        );
    }
    match args.json {
        true => writeln!(
            out,
            "{}",
            serde_json::to_string_pretty(&table::json(&outlook))?
        )?,
        false => out.write_all(table::text(&outlook).as_bytes())?,
    }
    Ok(Exit::Ok)
}

fn not_here(name: &str) -> String {
    let known: Vec<&str> = source::builtin().iter().map(|m| m.name).collect();
    if known.contains(&name) || name.starts_with("hub:") {
        return format!(
            "the model {name} is not on this machine: `kvlab fetch {name}` brings it; a config.json alone can be planned, too"
        );
    }
    let hint = did_you_mean(name, known.iter().copied());
    let hint = hint.map_or_else(String::new, |h| format!("; {h}"));
    format!(
        "there is no file, folder or model `{name}`{hint}: give one of {}, hub:org/name, a .gguf file, a Hugging Face folder or a config.json",
        known.join(", ")
    )
}

/// The chosen strategies; all presets and some bare formats if none is.
fn strategies(chosen: &[String]) -> anyhow::Result<Vec<Strategy>> {
    let all = BARE.into_iter().chain(PRESETS.iter().map(|p| p.name));
    let all: Vec<String> = match chosen {
        [] => all.map(str::to_owned).collect(),
        _ => chosen.to_vec(),
    };
    let settings = named::Settings {
        // Strategies alone are wanted; an experiment must name these, too.
        model: source::builtin()[0].name,
        text: "quickstart-prose",
        arithmetic: "f32",
    };
    Ok(named::experiment(&all, &settings)?.strategies)
}

/// The weights' bytes, and where the number is from.
fn weights(known: &Weights, wanted: Option<&str>) -> anyhow::Result<(u64, String)> {
    let format = |name: &str| WEIGHT_FORMATS.iter().find(|(n, _)| *n == name);
    if let Some(text) = wanted.filter(|t| format(t).is_none()) {
        let size: ByteSize = text.parse().map_err(|e: String| {
            let names: Vec<&str> = WEIGHT_FORMATS.iter().map(|(n, _)| *n).collect();
            anyhow::anyhow!("--weights: {e}, or a format: {}", names.join(", "))
        })?;
        return Ok((size.0, "as --weights says".to_owned()));
    }
    match (known, wanted) {
        (Weights::Stored { n_bytes }, None) => Ok((*n_bytes, "as the files store them".to_owned())),
        (Weights::Stored { n_bytes }, Some(name)) => bail!(
            "--weights {name}: parameters are counted from a config.json without weights, and this model's files hold {n_bytes} bytes: leave it out, or give a size"
        ),
        (Weights::Counted { n_params, dtype }, wanted) => {
            let name = wanted.or(dtype.as_deref());
            let name = name.context(
                "config.json names no plain format of the weights (`torch_dtype`, and no `quantization_config`): give --weights with a format or a size",
            )?;
            let (_, bits) = format(name).with_context(|| {
                format!("config.json stores weights as {name}, which is not known: give --weights")
            })?;
            let n_bytes = (*n_params as f64 * bits / 8.0).round() as u64;
            let n_params = crate::report::format::grouped(*n_params);
            Ok((n_bytes, format!("{n_params} parameters in {name}")))
        }
    }
}

impl Outlook {
    /// Fills the rows.
    fn measure(&mut self, strategies: &[Strategy]) {
        let measured: Vec<anyhow::Result<Growth>> = strategies
            .par_iter()
            .map(|s| Growth::measure(s, &self.shape, self.n_tokens))
            .collect();
        for (strategy, growth) in strategies.iter().zip(measured) {
            let label = strategy.label.clone();
            match growth {
                Ok(growth) => self.rows.push(self.row(label, &growth)),
                Err(e) => self.refused.push((label, format!("{e:#}"))),
            }
        }
    }

    /// Bytes for the cache.
    pub fn room_bytes(&self) -> Option<u64> {
        self.budget_bytes
            .map(|b| b.saturating_sub(self.weight_bytes))
    }

    fn row(&self, label: String, growth: &Growth) -> Row {
        let memory = growth.at(self.n_tokens, self.n_sequences);
        let resident = |n_tokens, n| growth.at(n_tokens, n).resident_bytes();
        let n_values = self.shape.values_at(self.n_tokens) * self.n_sequences;
        let room = self.room_bytes();
        let one = resident(self.n_tokens, 1);
        let shared = resident(self.n_tokens, 0);
        let held = |n_pages: usize| resident(n_pages * RANGE, self.n_sequences);
        let first =
            |is_past: &dyn Fn(usize) -> bool| growth.is_curve().then(|| first_page(is_past));
        let longest_context = room.and_then(|room| {
            Some(match first(&|n| held(n) > room)? {
                Some(n) => Length::Tokens((n - 1) * RANGE),
                None => Length::Beyond(LONGEST),
            })
        });
        let equals_weights_at = first(&|n| held(n) >= self.weight_bytes).map(|n| match n {
            Some(n) => Length::Tokens(n * RANGE),
            None => Length::Beyond(LONGEST),
        });
        Row {
            label,
            marginal_bytes: growth.marginal_bytes(),
            effective_bits: 8.0 * memory.stored_bytes() as f64 / n_values as f64,
            fits: room.map(|room| memory.resident_bytes() <= room),
            n_sequences_fit: room.map(|r| r.saturating_sub(shared) / (one - shared).max(1)),
            longest_context,
            equals_weights_at,
            n_measured: growth.n_measured,
            exact: growth.exact || self.n_tokens <= growth.n_measured,
            memory,
        }
    }
}

/// The first number of pages, from 1, for which `is_past`, which stays true from there on.
fn first_page(is_past: &dyn Fn(usize) -> bool) -> Option<usize> {
    let (mut below, mut past) = (0, LONGEST / RANGE);
    if !is_past(past) {
        return None;
    }
    while past - below > 1 {
        let middle = (below + past) / 2;
        if is_past(middle) {
            past = middle;
        } else {
            below = middle;
        }
    }
    Some(past)
}
