//! From the tree to the plan: every key but those of strategies.

use std::collections::BTreeMap;

use super::data::{Data, data, folder, looks_like_path, text_ref};
use super::plan::{CalibrationPlan, Origins, Plan};
use super::problems::{Diagnostics, did_you_mean};
use super::protocol::{Bos, Protocol};
use super::protocols::{self, PROTOCOLS, ProtocolDef};
use super::raw::{At, Raw, Table};
use super::read::{Reader, quoted};
use super::sweep::expand;
use super::{bars, strategies};
use crate::cache::Continuation;
use crate::data::{DataRef, Passages, Split};
use crate::model::ops::Arithmetic;

const KEYS: &[&str] = &[
    "schema",
    "name",
    "extends",
    "seed",
    "model",
    "threads",
    "arithmetic",
    "data",
    "protocol",
    "calibration",
    "strategy",
    "bar",
];
const BOTH: &[&str] = &["kind", "bos", "chunk", "latency", "memory_every", "sweep"];

/// Positions beyond any model's context.
const MAX_TOKENS: i64 = 1 << 24;

/// What `[protocol]` says beside the protocol itself.
#[derive(Debug, Clone, Copy)]
struct Running {
    chunk: usize,
    latency_steps: usize,
    memory_every: usize,
    layers: bool,
}

/// What holds when nothing is said.
const RUNNING: Running = Running {
    chunk: 512,
    latency_steps: 16,
    memory_every: 0,
    layers: false,
};

/// The plan that a tree describes; `default_name` serves when it has no `name`.
pub fn resolve(tree: &Table, default_name: &str, diagnostics: &mut Diagnostics) -> Option<Plan> {
    let at = At {
        source: 0,
        offset: 0,
    };
    let mut top = Reader {
        table: tree,
        path: String::new(),
        at,
        diagnostics,
    };
    top.only(KEYS);
    schema(&mut top);
    let name = name(&mut top, default_name);
    let seed = top.int("seed", 0..=i64::MAX).unwrap_or(0);
    let threads = top.count("threads", 1..=1024);
    let arithmetic = top.choice("arithmetic", &Arithmetic::ALL.map(|a| (a.name(), a)));
    let model = model(&mut top);
    let data = data(&mut top);
    let (protocols, running) = protocol(&mut top, &data);
    let data = [data.sets, data.tasks].concat();
    let calibration = calibration(&mut top, &data);
    let resolved = match tree.entry("strategy") {
        Some(list) => strategies::resolve(list, diagnostics),
        None => {
            top.missing("strategy", "add a [[strategy]] with e.g. encode = \"q8_0\"");
            Vec::new()
        }
    };
    if tree.get("calibration").is_none() {
        strategies::require_calibration(&resolved, diagnostics);
    }
    let known = bars::Known {
        strategies: &resolved,
        data: &data,
        protocols: &protocols,
    };
    let bars = tree
        .get("bar")
        .map(|list| bars::resolve(list, known, diagnostics));
    let origins = origins(tree, &resolved, diagnostics);
    diagnostics.is_clean().then(|| Plan {
        schema: 1,
        name,
        model: model.unwrap_or_default(),
        data,
        protocols,
        strategies: resolved.into_iter().map(|r| r.strategy).collect(),
        chunk: running.chunk,
        seed: seed.unsigned_abs(),
        latency_steps: running.latency_steps,
        memory_every: running.memory_every,
        layers: running.layers,
        calibration,
        threads,
        arithmetic: arithmetic.unwrap_or_default(),
        bars: bars.unwrap_or_default(),
        origins,
    })
}

pub(super) fn schema(top: &mut Reader<'_, '_>) {
    match top.get("schema").map(|n| (n, &n.raw)) {
        None => top.missing("schema", "write schema = 1 at the top"),
        Some((_, Raw::Int(1))) => {}
        Some((node, _)) => top.wrong(node, "schema", "1, the version that this program reads"),
    }
}

pub(super) fn name(top: &mut Reader<'_, '_>, default_name: &str) -> String {
    let Some((text, node)) = top.text("name") else {
        return default_name.to_owned();
    };
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let sound = !text.is_empty() && text.len() <= 80 && text.chars().all(allowed);
    if !sound || text.starts_with('.') {
        let must = "letters, digits, -, _ and . (it names the results' folder)";
        top.wrong(node, "name", must);
    }
    text.to_owned()
}

pub(super) fn model(top: &mut Reader<'_, '_>) -> Option<String> {
    if top.get("model").is_none() {
        let hint = format!("write model = \"{}\"", super::builtin_models()[0]);
        top.missing("model", &hint);
        return None;
    }
    let (text, node) = top.text("model")?;
    if let Some(repo) = text.strip_prefix("hub:") {
        if repo.split('/').filter(|p| !p.is_empty()).count() != 2 || repo.matches('/').count() != 1
        {
            top.wrong(node, "model", "hub:org/name");
            return None;
        }
        return Some(text.to_owned());
    }
    if super::builtin_models().contains(&text) {
        return Some(text.to_owned());
    }
    let path = folder(node, top.diagnostics).join(text);
    if path.exists() {
        return Some(path.display().to_string());
    }
    let (what, hint) = if looks_like_path(text) {
        let what = format!("there is no file or folder `{}`", path.display());
        let hint = "paths are relative to the TOML; a model of the hub is hub:org/name".to_owned();
        (what, Some(hint))
    } else {
        let known = super::builtin_models();
        let what = format!(
            "no model is called \"{text}\"; built in are {}, else hub:org/name or a path",
            quoted(&known)
        );
        (what, did_you_mean(text, known))
    };
    top.diagnostics.at(node.at, "model", what, hint);
    None
}

fn calibration(top: &mut Reader<'_, '_>, data: &[DataRef]) -> Option<CalibrationPlan> {
    let (table, at) = top.below("calibration")?;
    let mut reader = Reader {
        table,
        path: "calibration".into(),
        at,
        diagnostics: top.diagnostics,
    };
    reader.only(&["set", "tokens"]);
    let tokens = reader.count("tokens", 1..=MAX_TOKENS);
    if reader.get("set").is_none() {
        reader.missing("set", "write set = \"calibration-mixed\"");
    }
    let (text, node) = reader.text("set")?;
    let set = text_ref(text, node, "calibration.set", top.diagnostics)?;
    let evaluated = data.iter().any(|d| d.sha256 == set.sha256);
    if set.split == Split::Test || evaluated {
        let why = match evaluated {
            true => "is evaluated in this experiment",
            false => "belongs to the test split",
        };
        let what = format!("\"{text}\" {why}: nothing may be fitted to it");
        let hint = Some("take \"calibration-mixed\" or a text of your own".to_owned());
        top.diagnostics.at(node.at, "calibration.set", what, hint);
    }
    Some(CalibrationPlan {
        data: set,
        tokens: tokens.unwrap_or(4096),
    })
}

fn protocol(top: &mut Reader<'_, '_>, data: &Data) -> (Vec<Protocol>, Running) {
    let mut running = RUNNING;
    let Some((table, at)) = top.below("protocol") else {
        if top.get("protocol").is_none() {
            top.missing("protocol", "add [protocol] with kind = \"compress-once\"");
        }
        return (Vec::new(), running);
    };
    let mut reader = Reader {
        table,
        path: "protocol".into(),
        at,
        diagnostics: top.diagnostics,
    };
    running.chunk = reader.count("chunk", 1..=65_536).unwrap_or(512);
    running.latency_steps = latency(&mut reader);
    running.memory_every = reader.count("memory_every", 0..=MAX_TOKENS).unwrap_or(0);
    running.layers = reader.flag("layers").unwrap_or(false);
    if reader.get("kind").is_none() {
        reader.missing(
            "kind",
            "write kind = \"compress-once\", \"stream\", \"tasks\" or \"generate\"",
        );
    }
    let kinds: Vec<(&str, &ProtocolDef)> = PROTOCOLS.iter().map(|p| (p.name, p)).collect();
    let Some(own) = reader.choice("kind", &kinds) else {
        let all = PROTOCOLS.iter().flat_map(|p| p.keys);
        reader.only(&BOTH.iter().chain(all).copied().collect::<Vec<_>>());
        return (Vec::new(), running);
    };
    belongs(&mut reader, own);
    belongs_to_data(own, data, top.diagnostics, at);
    let mut protocols = Vec::new();
    for variant in expand(table, "protocol", top.diagnostics) {
        let mut reader = Reader {
            table: &variant.table,
            path: "protocol".into(),
            at,
            diagnostics: top.diagnostics,
        };
        let protocol = match own.name {
            "stream" => stream(&mut reader),
            "generate" => generate(&mut reader, data.documents.map_or(4, |(n, _)| n)),
            "tasks" => of_tasks(&mut reader, data.items.map_or(100, |(n, _)| n)),
            _ => compress_once(&mut reader, data.documents.map_or(4, |(n, _)| n)),
        };
        if protocols.contains(&protocol) && top.diagnostics.is_clean() {
            let what = "two combinations of the sweep are the same protocol";
            top.diagnostics
                .at(at, "protocol", what, Some("remove one".into()));
        }
        protocols.push(protocol);
    }
    let is_asked = own.name == protocols::GENERATE.name && table.get("latency").is_some();
    if [protocols::TASKS.name, protocols::GENERATE.name].contains(&own.name) && !is_asked {
        // Answers are what it is about; steps are timed where texts are scored.
        running.latency_steps = 0;
    }
    (protocols, running)
}

/// Reports keys of another protocol as such, and unknown ones.
fn belongs(reader: &mut Reader<'_, '_>, own: &ProtocolDef) {
    let others: Vec<&str> = PROTOCOLS.iter().flat_map(|p| p.keys).copied().collect();
    for entry in &reader.table.0 {
        let name = entry.key.as_str();
        if others.contains(&name) && !own.keys.contains(&name) {
            let key = reader.key(name);
            let what = format!("belongs to another protocol, this one is {}", own.name);
            let hint = match (own.name, name) {
                ("compress-once", "windows") => "write `documents` in [data]".to_owned(),
                _ => format!("{} takes: {}", own.name, own.keys.join(", ")),
            };
            reader.diagnostics.at(entry.key_at, &key, what, Some(hint));
        }
    }
    let known: Vec<&str> = BOTH.iter().chain(own.keys).copied().chain(others).collect();
    reader.only(&known);
}

/// Reports keys of `[data]` that the protocol has no use for, and what it lacks there.
fn belongs_to_data(own: &ProtocolDef, data: &Data, diagnostics: &mut Diagnostics, at: At) {
    let is_tasks = own.name == protocols::TASKS.name;
    let mut refuse = |at: Option<At>, key: &str, other: &str, hint: &str| {
        if let Some(at) = at {
            let what = format!("belongs to {other}, the protocol is {}", own.name);
            diagnostics.at(at, key, what, Some(hint.to_owned()));
        }
    };
    let documents = data.documents.map(|d| d.1);
    match own.name {
        "stream" => refuse(
            documents,
            "data.documents",
            "compress-once",
            "write `windows` in [protocol]",
        ),
        "tasks" => refuse(
            documents,
            "data.documents",
            "compress-once",
            "write `items`",
        ),
        _ => {}
    }
    if is_tasks {
        if data.tasks_at.is_none() {
            let hint = "write tasks = [\"copy\"] in [data]; `kvlab list tasks` has the names";
            diagnostics.at(
                at,
                "data.tasks",
                "is missing, the protocol is tasks",
                Some(hint.to_owned()),
            );
        } else if let Some(set) = data.sets.first() {
            let what = format!("`{}` is a text, the protocol is tasks", set.name);
            diagnostics.at(at, "data.sets", what, Some("write only `tasks`".to_owned()));
        }
        return;
    }
    refuse(
        data.tasks_at,
        "data.tasks",
        "tasks",
        "write kind = \"tasks\" in [protocol]",
    );
    refuse(
        data.items.map(|i| i.1),
        "data.items",
        "tasks",
        "write `documents` in [data] or `windows` in [protocol]",
    );
}

fn latency(reader: &mut Reader<'_, '_>) -> usize {
    let Some((table, at)) = reader.below("latency") else {
        return 16;
    };
    let mut below = Reader {
        table,
        path: "protocol.latency".into(),
        at,
        diagnostics: reader.diagnostics,
    };
    below.only(&["steps"]);
    below.count("steps", 0..=100_000).unwrap_or(16)
}

const BOS: &[(&str, Bos)] = &[
    ("model", Bos::Model),
    ("always", Bos::Always),
    ("never", Bos::Never),
];

fn stream(reader: &mut Reader<'_, '_>) -> Protocol {
    Protocol::Stream {
        window: reader.count("window", 2..=MAX_TOKENS).unwrap_or(2048),
        windows: reader.count("windows", 1..=100_000).unwrap_or(8),
        bos: reader.choice("bos", BOS).unwrap_or_default(),
    }
}

fn generate(reader: &mut Reader<'_, '_>, documents: usize) -> Protocol {
    Protocol::Generate {
        context: reader.count("context", 2..=MAX_TOKENS).unwrap_or(512),
        tokens: reader.count("tokens", 1..=MAX_TOKENS).unwrap_or(256),
        documents,
        temperature: reader.number("temperature", 0.0..=100.0).unwrap_or(0.0),
        top_p: reader.number("top_p", 0.0..=1.0).unwrap_or(1.0),
        continuation: continuation(reader),
        bos: reader.choice("bos", BOS).unwrap_or_default(),
    }
}

fn of_tasks(reader: &mut Reader<'_, '_>, items: usize) -> Protocol {
    Protocol::Tasks {
        shots: reader.count("shots", 0..=1000).unwrap_or(0),
        items,
        length: reader.count("length", 16..=MAX_TOKENS).unwrap_or(1024),
        generate: reader.flag("generate").unwrap_or(true),
        continuation: continuation(reader),
        bos: reader.choice("bos", BOS).unwrap_or_default(),
    }
}

fn continuation(reader: &mut Reader<'_, '_>) -> Continuation {
    let all = [
        ("strategy", Continuation::Strategy),
        ("exact", Continuation::Exact),
    ];
    reader
        .choice("continuation", &all)
        .unwrap_or(Continuation::Strategy)
}

fn compress_once(reader: &mut Reader<'_, '_>, documents: usize) -> Protocol {
    Protocol::CompressOnce {
        context: reader.count("context", 1..=MAX_TOKENS).unwrap_or(1024),
        score: reader.count("score", 2..=MAX_TOKENS).unwrap_or(256),
        documents,
        continuation: continuation(reader),
        floor: reader.flag("floor").unwrap_or(false),
        bos: reader.choice("bos", BOS).unwrap_or_default(),
        passages: reader
            .choice("passages", &Passages::ALL)
            .unwrap_or_default(),
    }
}

fn origins(tree: &Table, resolved: &[strategies::Resolved], diagnostics: &Diagnostics) -> Origins {
    let mut places = BTreeMap::new();
    for entry in &tree.0 {
        places.insert(entry.key.clone(), diagnostics.sources.locate(entry.key_at));
        if let Raw::Table(table) = &entry.node.raw {
            for below in &table.0 {
                let key = format!("{}.{}", entry.key, below.key);
                places.insert(key, diagnostics.sources.locate(below.node.at));
            }
        }
    }
    for (i, r) in resolved.iter().enumerate() {
        for (key, place) in &r.places {
            places.insert(format!("strategy.{i}.{key}"), place.clone());
        }
    }
    Origins(places)
}
