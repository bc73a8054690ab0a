//! `[data]`: texts and tasks, by name or path.
//!
//! Invariant: what is fitted to is never evaluated; a text or task stands once.

use std::path::{Path, PathBuf};

use super::problems::Diagnostics;
use super::raw::{At, Node, Raw};
use super::read::Reader;
use crate::data::{DataError, DataRef, Split};

/// The folder that paths in a node are relative to: its file's; the current one for overrides.
pub(super) fn folder(node: &Node, diagnostics: &Diagnostics) -> PathBuf {
    let path = diagnostics.sources.get(node.at).path.as_deref();
    path.and_then(Path::parent)
        .unwrap_or(Path::new(""))
        .to_owned()
}

pub(super) fn looks_like_path(text: &str) -> bool {
    let by_ending = [".gguf", ".txt", ".raw", ".md", ".toml", ".json"]
        .iter()
        .any(|e| text.ends_with(e));
    by_ending || text.contains(['/', '\\']) || text == "."
}

pub(super) fn text_ref(
    text: &str,
    node: &Node,
    key: &str,
    diagnostics: &mut Diagnostics,
) -> Option<DataRef> {
    let path = folder(node, diagnostics).join(text);
    let found = match DataRef::named(text) {
        Err(DataError::Unknown { .. }) if looks_like_path(text) || path.is_file() => {
            DataRef::file(text, &path)
        }
        other => other,
    };
    found
        .map_err(|e| diagnostics.at(node.at, key, e.to_string(), None))
        .ok()
}

/// What `[data]` says.
#[derive(Default)]
pub(super) struct Data {
    /// The texts.
    pub sets: Vec<DataRef>,
    /// Documents of each text, and where that stands.
    pub documents: Option<(usize, At)>,
    /// The tasks.
    pub tasks: Vec<DataRef>,
    /// Where `tasks` stands.
    pub tasks_at: Option<At>,
    /// Items of each task, and where that stands.
    pub items: Option<(usize, At)>,
}

/// Reads `[data]`.
pub(super) fn data(top: &mut Reader<'_, '_>) -> Data {
    let hint = "add [data] with sets = [\"quickstart-prose\"]";
    let Some((table, at)) = top.below("data") else {
        if top.get("data").is_none() {
            top.missing("data", hint);
        }
        return Data::default();
    };
    let mut reader = Reader {
        table,
        path: "data".into(),
        at,
        diagnostics: top.diagnostics,
    };
    reader.only(&["sets", "documents", "tasks", "items"]);
    let place = |key: &str| table.entry(key).map(|e| e.key_at);
    let documents = reader
        .count("documents", 1..=100_000)
        .zip(place("documents"));
    let items = reader.count("items", 1..=100_000).zip(place("items"));
    let (tasks, tasks_at) = (reader.names("tasks"), place("tasks"));
    if reader.get("sets").is_none() && tasks_at.is_none() {
        reader.missing(
            "sets",
            "write sets = [\"quickstart-prose\"], or tasks = [\"copy\"]",
        );
    }
    let texts = reader.names("sets");
    Data {
        sets: sets(&texts, top.diagnostics),
        documents,
        tasks: self::tasks(&tasks, top.diagnostics),
        tasks_at,
        items,
    }
}

fn tasks(nodes: &[&Node], diagnostics: &mut Diagnostics) -> Vec<DataRef> {
    let mut found: Vec<DataRef> = Vec::new();
    for (i, node) in nodes.iter().enumerate() {
        let key = format!("data.tasks.{i}");
        let Raw::Text(text) = &node.raw else {
            let what = format!("is {}, must be a task's name or path", node.raw.show());
            diagnostics.at(node.at, &key, what, None);
            continue;
        };
        let task = match text.ends_with(".toml") {
            true => DataRef::task_file(text, &folder(node, diagnostics).join(text)),
            false => DataRef::task(text),
        };
        match task {
            Ok(task) if found.iter().any(|f| f.name == task.name) => {
                let what = format!("\"{text}\" is the same task as an earlier one");
                diagnostics.at(node.at, &key, what, Some("remove one".into()));
            }
            Ok(task) => found.push(task),
            Err(e) => diagnostics.at(node.at, &key, e.to_string(), None),
        }
    }
    found
}

fn sets(nodes: &[&Node], diagnostics: &mut Diagnostics) -> Vec<DataRef> {
    let mut found: Vec<DataRef> = Vec::new();
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
        if matches!(set.split, Split::Calibration | Split::Train) {
            let what = format!("\"{text}\" is a text for calibration or training, never evaluated");
            let hint = Some("name a text whose split is `test`".to_owned());
            diagnostics.at(node.at, &key, what, hint);
        } else if found.iter().any(|f| f.sha256 == set.sha256) {
            let what = format!("\"{text}\" is the same text as an earlier one");
            diagnostics.at(node.at, &key, what, Some("remove one".into()));
        }
        found.push(set);
    }
    found
}
