//! What `kvlab train` reads: a model, texts of training, and how a gate is fitted.
//!
//! Invariant: a text of split `test` is refused: what is fitted to is never evaluated.

use std::path::{Path, PathBuf};

use super::data::{folder, text_ref};
use super::problems::{Diagnostics, Problems};
use super::raw::{self, At, Node, Raw};
use super::read::Reader;
use super::resolve::{model, name, schema};
use super::stem;
use crate::data::{DataRef, Split};
use crate::train::features::Target;
use crate::train::gate::{EndToEnd, Settings};
use crate::train::mlp;

/// What is to be trained.
#[derive(Debug, Clone, PartialEq)]
pub struct Training {
    /// Its name.
    pub name: String,
    /// The model's name or path.
    pub model: String,
    /// Where the weights go.
    pub file: PathBuf,
    /// Texts.
    pub texts: Vec<DataRef>,
    /// Windows of each text, spread over it, `[text]`.
    pub windows: Vec<usize>,
    /// Tokens of a window.
    pub window: usize,
    /// Every how many windows one is held out.
    pub held_out: usize,
    /// How the gate is fitted.
    pub settings: Settings,
    /// How its heads are then weighed against each other, if they are.
    pub end_to_end: Option<EndToEnd>,
}

/// Reads a training.
///
/// # Errors
/// Everything that is wrong with it, each with file, line and column.
pub fn load_training(path: &Path, overrides: &[String]) -> Result<Training, Problems> {
    let mut diagnostics = Diagnostics::default();
    let tree = raw::read_file(path, &mut diagnostics);
    let training = tree.and_then(|mut tree| {
        for text in overrides {
            raw::apply_override(&mut tree, text, &mut diagnostics);
        }
        let mut top = Reader {
            table: &tree,
            path: String::new(),
            at: At {
                source: 0,
                offset: 0,
            },
            diagnostics: &mut diagnostics,
        };
        training(&mut top, &stem(path))
    });
    let problems = diagnostics.into_problems();
    match training {
        Some(training) if problems.is_empty() => Ok(training),
        _ => Err(problems),
    }
}

fn training(top: &mut Reader<'_, '_>, default_name: &str) -> Option<Training> {
    top.only(&["schema", "name", "model", "file", "data", "gate"]);
    schema(top);
    let name = name(top, default_name);
    let model = model(top);
    let file = match top.text("file") {
        Some((text, node)) => Some(folder(node, top.diagnostics).join(text)),
        None => {
            top.missing(
                "file",
                "say where the weights go: file = \"gate.safetensors\"",
            );
            None
        }
    };
    let (settings, end_to_end) = gate(top);
    let Some((table, at)) = top.below("data") else {
        top.missing("data", "add [data] with sets = [\"calibration-mixed\"]");
        return None;
    };
    let mut data = Reader {
        table,
        path: "data".into(),
        at,
        diagnostics: top.diagnostics,
    };
    data.only(&["sets", "windows", "window", "held_out"]);
    let window = data.count("window", 64..=2000).unwrap_or(1024);
    let held_out = data.count("held_out", 2..=1000).unwrap_or(10);
    let nodes = data.names("sets");
    if nodes.is_empty() {
        data.missing("sets", "write sets = [\"calibration-mixed\"]");
    }
    let windows = windows(&mut data, nodes.len());
    let texts = texts(&nodes, top.diagnostics);
    Some(Training {
        name,
        model: model?,
        file: file?,
        texts,
        windows,
        window,
        held_out,
        settings,
        end_to_end,
    })
}

/// Windows of each of `n` texts: one number for all of them, or a list.
fn windows(data: &mut Reader<'_, '_>, n: usize) -> Vec<usize> {
    const ALLOWED: std::ops::RangeInclusive<i64> = 1..=100_000;
    let Some(node) = data.get("windows") else {
        return vec![20; n];
    };
    let Raw::List(items) = &node.raw else {
        return vec![data.count("windows", ALLOWED).unwrap_or(20); n];
    };
    let count = |n: &Node| match n.raw {
        Raw::Int(v) if ALLOWED.contains(&v) => usize::try_from(v).ok(),
        _ => None,
    };
    let found = items.iter().map(count).collect::<Option<Vec<_>>>();
    found.filter(|w| w.len() == n).unwrap_or_else(|| {
        let must = format!("a whole number from 1 to 100000, or one for each of the {n} sets");
        data.wrong(node, "windows", &must);
        Vec::new()
    })
}

fn gate(top: &mut Reader<'_, '_>) -> (Settings, Option<EndToEnd>) {
    let mut settings = Settings {
        target: Target::KvzipPlus,
        clip: (-12.0, 2.0),
        ridges: vec![1e-5, 1e-4, 1e-3, 1e-2],
        mlp: None,
    };
    let Some((table, at)) = top.below("gate") else {
        return (settings, None);
    };
    let mut gate = Reader {
        table,
        path: "gate".into(),
        at,
        diagnostics: top.diagnostics,
    };
    gate.only(&[
        "target",
        "clip",
        "ridge",
        "kind",
        "hidden",
        "epochs",
        "seed",
        "end_to_end",
    ]);
    let targets = [("kvzip", Target::Kvzip), ("kvzip_plus", Target::KvzipPlus)];
    if let Some(target) = gate.choice("target", &targets) {
        settings.target = target;
    }
    if let Some(clip) = numbers(&mut gate, "clip", |n| n.len() == 2 && n[0] < n[1]) {
        settings.clip = (clip[0] as f32, clip[1] as f32);
    }
    if let Some(ridges) = numbers(&mut gate, "ridge", |n| n.iter().all(|r| *r > 0.0)) {
        settings.ridges = ridges;
    }
    settings.mlp = network(&mut gate);
    (settings, end_to_end(&mut gate))
}

/// What of a network the table says.
fn network(gate: &mut Reader<'_, '_>) -> Option<mlp::Settings> {
    let network = mlp::Settings {
        hidden: gate.count("hidden", 1..=1024).unwrap_or(16),
        epochs: gate.count("epochs", 1..=1000).unwrap_or(20),
        seed: gate.count("seed", 0..=i64::MAX).unwrap_or(0) as u64,
    };
    if gate.choice("kind", &[("ridge", false), ("mlp", true)]) == Some(true) {
        needs_burn(gate, "kind");
        return Some(network);
    }
    for key in ["hidden", "epochs", "seed"] {
        if let Some(node) = gate.get(key) {
            gate.wrong(node, key, "left out: it is for kind = \"mlp\"");
        }
    }
    None
}

fn end_to_end(gate: &mut Reader<'_, '_>) -> Option<EndToEnd> {
    let (table, at) = gate.below("end_to_end")?;
    needs_burn(gate, "end_to_end");
    let mut own = Reader {
        table,
        path: "gate.end_to_end".into(),
        at,
        diagnostics: gate.diagnostics,
    };
    own.only(&["windows", "window", "steps", "kept_fraction"]);
    Some(EndToEnd {
        windows: own.count("windows", 1..=1000).unwrap_or(8),
        window: own.count("window", 128..=2000).unwrap_or(512),
        steps: own.count("steps", 1..=100_000).unwrap_or(40),
        kept_fraction: own.number("kept_fraction", 0.01..=0.99).unwrap_or(0.35),
    })
}

/// Refuses what this program was built without.
fn needs_burn(gate: &mut Reader<'_, '_>, key: &str) {
    if let Some(node) = gate.get(key).filter(|_| !cfg!(feature = "burn")) {
        let what = "is trained with burn, which this program was built without";
        let hint = Some("build it with the feature `burn`".to_owned());
        gate.diagnostics.at(node.at, &gate.key(key), what, hint);
    }
}

/// A list of numbers that pass.
fn numbers(
    reader: &mut Reader<'_, '_>,
    key: &str,
    passes: impl Fn(&[f64]) -> bool,
) -> Option<Vec<f64>> {
    let node = reader.get(key)?;
    let number = |n: &Node| match n.raw {
        Raw::Int(v) => Some(v as f64),
        Raw::Float(v) if v.is_finite() => Some(v),
        _ => None,
    };
    let found = match &node.raw {
        Raw::List(items) => items.iter().map(number).collect::<Option<Vec<f64>>>(),
        _ => None,
    };
    let found = found.filter(|n| !n.is_empty() && passes(n));
    if found.is_none() {
        let must = match key {
            "clip" => "two numbers, the smaller first: [-12, 2]",
            _ => "a list of numbers greater than 0: [1e-4, 1e-3]",
        };
        reader.wrong(node, key, must);
    }
    found
}

fn texts(nodes: &[&Node], diagnostics: &mut Diagnostics) -> Vec<DataRef> {
    let mut found = Vec::new();
    for (i, node) in nodes.iter().enumerate() {
        let key = format!("data.sets.{i}");
        let Raw::Text(text) = &node.raw else {
            let what = format!("is {}, must be a text's name or path", node.raw.show());
            diagnostics.at(node.at, &key, what, None);
            continue;
        };
        let Some(set) = text_ref(text, node, &key, diagnostics) else {
            continue;
        };
        if set.split == Split::Test {
            let what = format!("\"{text}\" is a text that strategies are evaluated on");
            let hint = Some("name texts whose split is `train` or `calibration`".to_owned());
            diagnostics.at(node.at, &key, what, hint);
        }
        found.push(set);
    }
    found
}
