//! From `[[strategy]]` tables to strategies: sweeps, presets, labels.

use std::collections::BTreeMap;
use std::path::Path;

use super::budget::budget;
use super::problems::{Diagnostics, Location, Source, SourceKind, did_you_mean};
use super::raw::{At, Entry, Raw, Table, parse};
use super::read::Reader;
use super::stages::{encodings, projections, stage};
use super::sweep::{Variant, expand};
use super::{plan, presets};
use crate::cache::project::aqua;
use crate::cache::stage::{Domain, KeyForm, Kind, find};
use crate::cache::strategy::{Budget, ExactFormat, Scope, StageSpec, Strategy, Tail};

const KEYS: &[&str] = &[
    "label", "preset", "retain", "project", "encode", "pack", "place", "keys", "tail", "sinks",
    "exact", "budget", "sides", "sweep",
];

/// Rows beyond any model's context.
const MAX_ROWS: i64 = 1 << 24;

/// A strategy with the places of its keys.
#[derive(Debug)]
pub struct Resolved {
    /// The strategy.
    pub strategy: Strategy,
    /// The preset it started from.
    pub preset: Option<String>,
    /// Where its label, or else its table, stands.
    pub at: At,
    /// Where each of its keys stands.
    pub places: BTreeMap<String, Location>,
}

/// All strategies of an experiment, sweeps expanded, in file order.
pub fn resolve(list: &Entry, diagnostics: &mut Diagnostics) -> Vec<Resolved> {
    let Raw::List(items) = &list.node.raw else {
        let what = format!("is {}, must be tables: [[strategy]]", list.node.raw.show());
        diagnostics.at(list.node.at, "strategy", what, None);
        return Vec::new();
    };
    let mut resolved = Vec::new();
    for (i, item) in items.iter().enumerate() {
        let path = format!("strategy.{i}");
        let Raw::Table(table) = &item.raw else {
            let what = format!("is {}, must be a table: [[strategy]]", item.raw.show());
            diagnostics.at(item.at, &path, what, None);
            continue;
        };
        let at = table.0.first().map_or(item.at, |e| e.key_at);
        Reader {
            table,
            path: path.clone(),
            at,
            diagnostics,
        }
        .only(KEYS);
        for variant in expand(table, &path, diagnostics) {
            resolved.extend(one(variant, &path, at, diagnostics));
        }
    }
    refuse_twins(&resolved, diagnostics);
    resolved
}

/// Two strategies may share neither a label (rows of a table) nor their content (cells of a journal).
fn refuse_twins(resolved: &[Resolved], diagnostics: &mut Diagnostics) {
    for (i, later) in resolved.iter().enumerate() {
        for earlier in &resolved[..i] {
            let first = diagnostics.sources.locate(earlier.at);
            let label = &later.strategy.label;
            if content(&earlier.strategy) == content(&later.strategy) {
                let what = format!(
                    "\"{label}\" is the same strategy as \"{}\" at {first}",
                    earlier.strategy.label
                );
                diagnostics.at(later.at, "strategy", what, Some("remove one".into()));
                break;
            }
            if *label == earlier.strategy.label {
                let what = format!("the label \"{label}\" is taken by another strategy at {first}");
                diagnostics.at(
                    later.at,
                    "strategy",
                    what,
                    Some("give it another `label`".into()),
                );
                break;
            }
        }
    }
}

/// All of a strategy but its label and where a stage's file lies: the file's sum says which it is.
pub(super) fn content(strategy: &Strategy) -> Strategy {
    let mut content = strategy.clone();
    content.label = String::new();
    for spec in content
        .retain
        .iter_mut()
        .filter(|r| r.params.0.contains_key("sha256"))
    {
        spec.params.0.remove("file");
    }
    content
}

/// One variant of a `[[strategy]]` table.
fn one(variant: Variant, path: &str, at: At, diagnostics: &mut Diagnostics) -> Option<Resolved> {
    let table = with_preset(&variant.table, path, diagnostics)?;
    let mut reader = Reader {
        table: &table,
        path: path.to_owned(),
        at,
        diagnostics,
    };
    let rows = exact_rows(&mut reader);
    let budget = budget(&mut reader);
    let has_budget = table.get("budget").is_some();
    let label = label(&mut reader);
    let sides = reader.choice("sides", SIDES).unwrap_or(Sides::Both);
    let before = diagnostics.count();
    let mut part = |kind: Kind| {
        let node = table.get(kind.key())?;
        stage(kind, node, &format!("{path}.{kind}"), diagnostics)
    };
    let (retain, pack, place) = (part(Kind::Retain), part(Kind::Pack), part(Kind::Place));
    let (project_k, project_v) = table
        .get("project")
        .and_then(|n| projections(n, &format!("{path}.project"), diagnostics))
        .unwrap_or_default();
    let (encode_k, encode_v) = table
        .get("encode")
        .and_then(|n| encodings(n, &format!("{path}.encode"), diagnostics))
        .unwrap_or_else(|| (StageSpec::plain("f16"), StageSpec::plain("f16")));
    if has_budget {
        refuse_retain(&table, path, diagnostics);
    }
    if diagnostics.count() > before || has_budget && budget.is_none() {
        return None;
    }
    let mut strategy = Strategy {
        retain,
        project_k,
        project_v,
        encode_k,
        encode_v,
        pack,
        place,
        budget,
        ..rows
    };
    strategy.label = match label {
        Some(label) => with_varied(label, &variant),
        None => derived_label(&variant.table, &strategy),
    };
    only(sides, &mut strategy);
    if let Some(why) = aqua::refusal(&strategy, &super::stand_in_geometry()) {
        let at = table.entry("project").map_or(at, |e| e.node.at);
        let key = format!("{path}.project");
        diagnostics.at(at, &key, format!("`aqua` {why}"), None);
        return None;
    }
    Some(Resolved {
        preset: preset_of(&variant.table).map(str::to_owned),
        places: places(&table, at, diagnostics),
        at: table.entry("label").map_or(at, |e| e.key_at),
        strategy,
    })
}

/// A budget and retention don't go together.
fn refuse_retain(table: &Table, path: &str, diagnostics: &mut Diagnostics) {
    if let Some(node) = table.get("retain") {
        let what = "can't go with `budget`: what retention keeps is not known beforehand";
        let hint = Some("leave one of the two out".to_owned());
        diagnostics.at(node.at, &format!("{path}.retain"), what, hint);
    }
}

/// Which of K and V a strategy's maps and formats are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sides {
    Both,
    K,
    V,
}

const SIDES: &[(&str, Sides)] = &[("both", Sides::Both), ("k", Sides::K), ("v", Sides::V)];

/// Leaves the other side as f16 rows without maps, and says so in the label.
fn only(sides: Sides, strategy: &mut Strategy) {
    match sides {
        Sides::Both => {}
        Sides::K => {
            strategy.project_v = Vec::new();
            strategy.encode_v = StageSpec::plain("f16");
            strategy.label += " k-only";
        }
        Sides::V => {
            strategy.project_k = Vec::new();
            strategy.encode_k = StageSpec::plain("f16");
            strategy.label += " v-only";
        }
    }
}

/// What a strategy says without stages, over the exact format.
fn exact_rows(reader: &mut Reader<'_, '_>) -> Strategy {
    let tail = tail(reader);
    let sinks = reader.count("sinks", 0..=MAX_ROWS);
    let exact = reader.choice(
        "exact",
        &[("f16", ExactFormat::F16), ("f32", ExactFormat::F32)],
    );
    let keys = reader.choice(
        "keys",
        &[
            ("post_rope", KeyForm::PostRope),
            ("pre_rope", KeyForm::PreRope),
        ],
    );
    Strategy {
        keys: keys.unwrap_or_default(),
        tail: tail.unwrap_or_default(),
        sinks: sinks.unwrap_or(0),
        exact: exact.unwrap_or_default(),
        ..Strategy::bare("f16")
    }
}

/// `tail = 32`, or `tail = { k = 0, v = 128 }`.
fn tail(reader: &mut Reader<'_, '_>) -> Option<Tail> {
    match reader.table.get("tail").map(|n| &n.raw) {
        Some(Raw::Table(sides)) => {
            let mut sides = Reader {
                table: sides,
                path: format!("{}.tail", reader.path),
                at: reader.at,
                diagnostics: reader.diagnostics,
            };
            sides.only(&["k", "v"]);
            let k = sides.count("k", 0..=MAX_ROWS).unwrap_or(0);
            let v = sides.count("v", 0..=MAX_ROWS).unwrap_or(0);
            Some(Tail { k, v })
        }
        _ => reader.count("tail", 0..=MAX_ROWS).map(Tail::both),
    }
}

fn places(table: &Table, at: At, diagnostics: &Diagnostics) -> BTreeMap<String, Location> {
    let keys = Kind::ALL.iter().map(|k| k.key()).chain(["budget"]);
    keys.map(|key| {
        let at = table.entry(key).map_or(at, |e| e.key_at);
        (key.to_owned(), diagnostics.sources.locate(at))
    })
    .collect()
}

/// The preset that a table starts from.
fn preset_of(table: &Table) -> Option<&str> {
    match &table.get("preset")?.raw {
        Raw::Text(name) => Some(name),
        _ => None,
    }
}

/// The table laid over its preset's.
fn with_preset(table: &Table, path: &str, diagnostics: &mut Diagnostics) -> Option<Table> {
    let Some(entry) = table.entry("preset") else {
        return Some(table.clone());
    };
    let key = format!("{path}.preset");
    let Raw::Text(name) = &entry.node.raw else {
        let what = format!("is {}, must be a preset's name", entry.node.raw.show());
        diagnostics.at(entry.node.at, &key, what, None);
        return None;
    };
    let names = presets::PRESETS.iter().map(|p| p.name);
    let Some(preset) = presets::find(name) else {
        let all: Vec<_> = names.clone().collect();
        let what = format!(
            "no preset is called \"{name}\"; there are: {}",
            all.join(", ")
        );
        diagnostics.at(entry.node.at, &key, what, did_you_mean(name, names));
        return None;
    };
    let source = Source {
        kind: SourceKind::Text,
        name: format!("preset {name}"),
        path: None,
        text: preset.composition.to_owned(),
    };
    let mut below = parse(source, diagnostics)?;
    below.overlay(table.clone());
    Some(below)
}

fn label(reader: &mut Reader<'_, '_>) -> Option<String> {
    let (text, node) = reader.text("label")?;
    if text.trim().is_empty() || text.chars().any(char::is_control) || text.chars().count() > 80 {
        reader.wrong(node, "label", "1 to 80 characters without line breaks");
        return None;
    }
    Some(text.trim().to_owned())
}

fn with_varied(label: String, variant: &Variant) -> String {
    let varied: Vec<String> = variant
        .varied
        .iter()
        .filter(|(key, _)| key != "sides")
        .map(|(key, value)| format!(" {key}={value}"))
        .collect();
    label + &varied.concat()
}

/// A preset's name and what differs from it, or the stages in the order in which data meets them.
fn derived_label(table: &Table, strategy: &Strategy) -> String {
    let Some(preset) = preset_of(table) else {
        return describe(strategy);
    };
    let mut label = preset.to_owned();
    for entry in &table.0 {
        let value = match &entry.key[..] {
            "preset" | "label" | "sides" => continue,
            "retain" => strategy.retain.as_ref().map(|s| show(Kind::Retain, s)),
            "project" => Some(project_label(strategy)),
            "encode" => Some(encode_label(strategy)),
            "pack" => strategy.pack.as_ref().map(|s| show(Kind::Pack, s)),
            "budget" => strategy.budget.as_ref().map(budget_label),
            "tail" => Some(format!("tail {}", strategy.tail)),
            "place" => strategy.place.as_ref().map(|s| show(Kind::Place, s)),
            _ => match &entry.node.raw {
                Raw::Text(s) => Some(format!("{} {s}", entry.key)),
                other => Some(format!("{} {}", entry.key, other.show())),
            },
        };
        label.extend(value.map(|v| format!(" {v}")));
    }
    label
}

/// The strategy in words: `window(recent=64 sinks=4)+hadamard+q8_0/q4_0+zstd tail 32 sinks 4`; K before V where they
/// differ. Two strategies that differ have different descriptions.
pub fn describe(strategy: &Strategy) -> String {
    let mut parts: Vec<String> = Vec::new();
    parts.extend(strategy.retain.iter().map(|s| show(Kind::Retain, s)));
    if !strategy.project_k.is_empty() || !strategy.project_v.is_empty() {
        parts.push(project_label(strategy));
    }
    parts.push(encode_label(strategy));
    parts.extend(strategy.pack.iter().map(|s| show(Kind::Pack, s)));
    parts.extend(strategy.place.iter().map(|s| show(Kind::Place, s)));
    let mut label = parts.join("+");
    if strategy.tail != Tail::default() {
        label += &format!(" tail {}", strategy.tail);
    }
    if strategy.sinks > 0 {
        label += &format!(" sinks {}", strategy.sinks);
    }
    if let Some(budget) = &strategy.budget {
        label += &format!(" {}", budget_label(budget));
    }
    if strategy.exact == ExactFormat::F32 {
        label += " exact f32";
    }
    if strategy.keys == KeyForm::PreRope {
        label += " pre_rope";
    }
    label
}

fn project_label(strategy: &Strategy) -> String {
    let side = |maps: &[StageSpec]| {
        let shown: Vec<String> = maps.iter().map(|s| show(Kind::Project, s)).collect();
        match shown.is_empty() {
            true => "none".to_owned(),
            false => shown.join("+"),
        }
    };
    by_side(side(&strategy.project_k), side(&strategy.project_v))
}

fn encode_label(strategy: &Strategy) -> String {
    by_side(
        show(Kind::Encode, &strategy.encode_k),
        show(Kind::Encode, &strategy.encode_v),
    )
}

/// `then int4 then int2 in 6000000 B, 9000000 B from 1024 (all sequences)`.
fn budget_label(budget: &Budget) -> String {
    let mut label = String::new();
    for (k, v) in &budget.then {
        let formats = by_side(show(Kind::Encode, k), show(Kind::Encode, v));
        label += &format!("then {formats} ");
    }
    label += &format!("in {} B", budget.bytes);
    for step in &budget.steps {
        label += &format!(", {} B from {}", step.bytes, step.at);
    }
    if budget.scope == Scope::All {
        label += " (all sequences)";
    }
    label
}

fn by_side(k: String, v: String) -> String {
    if k == v { k } else { format!("{k}/{v}") }
}

/// A stage by its name and the parameters that aren't at their default.
fn show(kind: Kind, spec: &StageSpec) -> String {
    let def = find(kind, &spec.name).ok();
    let params: Vec<String> = spec
        .params
        .0
        .iter()
        .filter(|(name, value)| {
            let default = def
                .and_then(|d| d.params.iter().find(|p| p.name == **name))
                .and_then(|p| p.default);
            default != Some(&value.to_string()) && **name != "sha256"
        })
        .map(|(name, value)| {
            let is_file = def
                .and_then(|d| d.params.iter().find(|p| p.name == name))
                .is_some_and(|p| matches!(p.domain, Domain::File { .. }));
            match (is_file, spec.params.text("sha256")) {
                (true, Some(sum)) => named_file(&value.to_string(), sum),
                _ => format!("{name}={value}"),
            }
        })
        .collect();
    match params.is_empty() {
        true => spec.name.clone(),
        false => format!("{}({})", spec.name, params.join(" ")),
    }
}

/// A file by its stem and the beginning of its sum: folders differ from machine to machine.
fn named_file(path: &str, sum: &str) -> String {
    let stem = Path::new(path).file_stem().map(|s| s.to_string_lossy());
    format!("{}@{sum:.4}", stem.unwrap_or_default())
}

/// Reports strategies that learn when the experiment names no calibration text.
pub fn require_calibration(resolved: &[Resolved], diagnostics: &mut Diagnostics) {
    for r in resolved {
        let learners: Vec<&str> = plan::stages_of(&r.strategy)
            .into_iter()
            .filter(|(kind, _, s)| find(*kind, &s.name).is_ok_and(|d| (d.calibrated)(&s.params)))
            .map(|(_, _, s)| s.name.as_str())
            .collect();
        if let Some(name) = learners.first() {
            let what = format!(
                "\"{}\": `{name}` learns from a calibration text, and there is none",
                r.strategy.label
            );
            let hint = "add [calibration] with set = \"calibration-mixed\"".to_owned();
            diagnostics.at(r.at, "strategy", what, Some(hint));
        }
    }
}
