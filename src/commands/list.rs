//! `kvlab list`: every name that an experiment may use, with a line each.

use std::io::Write;

use serde::Serialize;

use super::Exit;
use crate::cache::stage::{Kind, ParamDef, registry};
use crate::cli::{ListArgs, Listed};
use crate::config::{PRESETS, PROTOCOLS};
use crate::data::manifest;
use crate::data::tasks::{self, TaskDef};

/// One name.
#[derive(Debug, Serialize)]
struct Item {
    kind: &'static str,
    name: String,
    doc: String,
    /// Paper, origin or licence.
    source: String,
    /// How it is written in an experiment.
    toml: Vec<String>,
    parameters: Vec<Parameter>,
}

#[derive(Debug, Serialize)]
struct Parameter {
    name: &'static str,
    allowed: String,
    default: Option<&'static str>,
    doc: &'static str,
}

const SECTIONS: [(Listed, &str, &str); 10] = [
    (Listed::Retain, "retain", "which rows live"),
    (Listed::Project, "project", "linear maps of rows, in order"),
    (Listed::Encode, "encode", "rows to bytes"),
    (
        Listed::Pack,
        "pack",
        "bytes of sealed pages to fewer bytes, exactly",
    ),
    (Listed::Place, "place", "where sealed pages live"),
    (
        Listed::Presets,
        "preset",
        "named strategies; keys beside `preset` override",
    ),
    (
        Listed::Protocols,
        "protocol",
        "how a cache is judged: kind in [protocol]",
    ),
    (
        Listed::Texts,
        "text",
        "sets in [data], set in [calibration]",
    ),
    (
        Listed::Tasks,
        "task",
        "tasks in [data]; also the path of a definition",
    ),
    (
        Listed::Models,
        "model",
        "built-in models; also hub:org/name, a .gguf file, a Hugging Face folder",
    ),
];

/// Lists names as text or JSON.
///
/// # Errors
/// A failed write.
pub fn list(args: &ListArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let sections = SECTIONS
        .iter()
        .filter(|(s, ..)| args.kind.is_none_or(|k| k == *s));
    if args.json {
        let mut all = Vec::new();
        for (section, ..) in sections {
            all.extend(items(*section)?);
        }
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
        return Ok(Exit::Ok);
    }
    for (i, (section, word, doc)) in sections.enumerate() {
        if i > 0 {
            writeln!(out)?;
        }
        writeln!(out, "{word}: {doc}")?;
        let items = items(*section)?;
        let width = items.iter().map(|i| i.name.len()).max().unwrap_or(0);
        for item in items {
            writeln!(
                out,
                "  {:width$}  {} [{}]",
                item.name, item.doc, item.source
            )?;
            if args.kind.is_some() {
                details(&item, out)?;
            }
        }
    }
    Ok(Exit::Ok)
}

fn details(item: &Item, out: &mut dyn Write) -> std::io::Result<()> {
    for p in &item.parameters {
        let default = p
            .default
            .map_or("no default".into(), |d| format!("default {d}"));
        writeln!(
            out,
            "      {}: {} ({}, {default})",
            p.name, p.doc, p.allowed
        )?;
    }
    for line in &item.toml {
        writeln!(out, "      {line}")?;
    }
    Ok(())
}

fn items(section: Listed) -> anyhow::Result<Vec<Item>> {
    Ok(match section {
        Listed::Retain => stages(Kind::Retain),
        Listed::Project => stages(Kind::Project),
        Listed::Encode => stages(Kind::Encode),
        Listed::Pack => stages(Kind::Pack),
        Listed::Place => stages(Kind::Place),
        Listed::Presets => PRESETS
            .iter()
            .map(|p| {
                let toml = p.composition.lines().map(str::to_owned).collect();
                item("preset", p.name, p.doc, p.paper, toml)
            })
            .collect(),
        Listed::Protocols => PROTOCOLS
            .iter()
            .map(|p| {
                let toml = vec![format!("keys: {}", p.keys.join(", "))];
                item("protocol", p.name, p.doc, p.paper, toml)
            })
            .collect(),
        Listed::Tasks => tasks::builtin()
            .iter()
            .map(|(name, text)| {
                let def = TaskDef::parse(name, text)?;
                let version = vec![format!("version {}", def.version)];
                Ok(item("task", &def.name, &def.doc, &def.paper, version))
            })
            .collect::<anyhow::Result<_>>()?,
        Listed::Texts => manifest::all()?
            .iter()
            .filter(|t| t.domain != "task")
            .map(|t| {
                let split = serde_json::to_value(t.split).unwrap_or_default();
                let doc = format!(
                    "{}, {} bytes, split {}",
                    t.domain,
                    t.bytes,
                    split.as_str().unwrap_or("?")
                );
                item(
                    "text",
                    &t.name,
                    &doc,
                    &t.licence,
                    vec![format!("origin: {}", t.origin)],
                )
            })
            .collect(),
        Listed::Models => models(),
    })
}

fn item(kind: &'static str, name: &str, doc: &str, source: &str, toml: Vec<String>) -> Item {
    Item {
        kind,
        name: name.to_owned(),
        doc: doc.to_owned(),
        source: source.to_owned(),
        toml,
        parameters: Vec::new(),
    }
}

fn models() -> Vec<Item> {
    let models = crate::model::source::builtin().iter();
    models
        .map(|m| {
            let size = vec![format!("{} bytes", m.n_bytes)];
            item("model", m.name, m.description, m.licence, size)
        })
        .collect()
}

fn stages(kind: Kind) -> Vec<Item> {
    registry()
        .filter(|d| d.kind == kind)
        .map(|d| {
            let toml = d.examples.iter().map(|e| format!("{kind} = {e}")).collect();
            Item {
                parameters: d.params.iter().map(parameter).collect(),
                ..item(kind.key(), d.name, d.doc, d.paper, toml)
            }
        })
        .collect()
}

fn parameter(p: &ParamDef) -> Parameter {
    Parameter {
        name: p.name,
        allowed: p.domain.to_string(),
        default: p.default,
        doc: p.doc,
    }
}
