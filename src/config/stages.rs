//! Reading one stage, or the stages of both sides, out of a `[[strategy]]`.

use super::data::folder;
use super::problems::{Diagnostics, did_you_mean};
use super::raw::{Entry, Node, Raw, Table};
use super::read::foreign_word;
use crate::cache::stage::{
    BuildContext, Domain, HeadContext, KeyForm, Kind, Params, Side, StageDef, StageError, Value,
    find, registry,
};
use crate::cache::strategy::StageSpec;
use crate::data::sha256_hex;

/// One stage: a name, or a table with `method` and parameters. `key` is the dotted path in messages.
pub fn stage(
    kind: Kind,
    node: &Node,
    key: &str,
    diagnostics: &mut Diagnostics,
) -> Option<StageSpec> {
    let nothing = Table::default();
    let (name, name_node, table) = match &node.raw {
        Raw::Text(name) => (name, node, &nothing),
        Raw::Table(table) => match table.get("method") {
            Some(method) => match &method.raw {
                Raw::Text(name) => (name, method, table),
                other => {
                    let what = format!("is {}, must name a stage of `{kind}`", other.show());
                    diagnostics.at(method.at, &format!("{key}.method"), what, None);
                    return None;
                }
            },
            None => {
                let hint = format!(
                    "write {{ method = \"...\", ... }}; there are: {}",
                    names(kind)
                );
                diagnostics.at(node.at, key, "has no `method`", Some(hint));
                return None;
            }
        },
        other => {
            let what = format!(
                "is {}, must name a stage of `{kind}`, alone or as {{ method = \"...\", ... }}",
                other.show()
            );
            diagnostics.at(node.at, key, what, None);
            return None;
        }
    };
    let Ok(def) = find(kind, name) else {
        unknown(kind, name, name_node, key, diagnostics);
        return None;
    };
    let mut params = params(def, table, key, diagnostics)?;
    files(def, &mut params, (table, key), diagnostics)?;
    let spec = StageSpec {
        name: name.clone(),
        params,
    };
    try_build(def, &spec, node, key, diagnostics)?;
    Some(spec)
}

fn names(kind: Kind) -> String {
    let names: Vec<_> = registry()
        .filter(|d| d.kind == kind)
        .map(|d| d.name)
        .collect();
    names.join(", ")
}

fn unknown(kind: Kind, name: &str, node: &Node, key: &str, diagnostics: &mut Diagnostics) {
    let of_kind = registry().filter(|d| d.kind == kind).map(|d| d.name);
    let hint = if let Some(other) = registry().find(|d| d.name == name) {
        Some(format!("`{name}` belongs under `{}`", other.kind))
    } else if super::presets::find(name).is_some() {
        Some(format!("`{name}` is a preset: write preset = \"{name}\""))
    } else {
        did_you_mean(name, of_kind)
    };
    let what = format!(
        "no {kind} stage is called \"{name}\"; there are: {}",
        names(kind)
    );
    diagnostics.at(node.at, key, what, hint);
}

fn params(
    def: &StageDef,
    table: &Table,
    key: &str,
    diagnostics: &mut Diagnostics,
) -> Option<Params> {
    let mut given = Params::default();
    let mut sound = true;
    for entry in table.0.iter().filter(|e| e.key != "method") {
        if let Some((what, hint)) = foreign_word(entry) {
            let path = format!("{key}.{}", entry.key);
            diagnostics.at(entry.key_at, &path, what, Some(hint));
            sound = false;
            continue;
        }
        match value(entry) {
            Some(v) => {
                given.0.insert(entry.key.clone(), v);
            }
            None => {
                let path = format!("{key}.{}", entry.key);
                let what = format!("is {}, must be a number or a text", entry.node.raw.show());
                diagnostics.at(entry.node.at, &path, what, None);
                sound = false;
            }
        }
    }
    match Params::resolve(def, &given) {
        Ok(params) if sound => Some(params),
        Ok(_) => None,
        Err(problems) => {
            for (name, what) in problems {
                let known = def.params.iter().map(|p| p.name);
                let is_known = known.clone().any(|k| k == name);
                let hint = (!is_known).then(|| did_you_mean(&name, known)).flatten();
                let Some(entry) = table.entry(&name) else {
                    continue;
                };
                let at = if is_known {
                    entry.node.at
                } else {
                    entry.key_at
                };
                diagnostics.at(at, &format!("{key}.{name}"), what, hint);
            }
            None
        }
    }
}

/// Paths become relative to the current folder, and a file's sum is noted: it is part of what a strategy is.
fn files(
    def: &StageDef,
    params: &mut Params,
    (table, key): (&Table, &str),
    diagnostics: &mut Diagnostics,
) -> Option<()> {
    for p in def.params {
        let (Domain::File { or }, Some(text)) = (p.domain, params.text(p.name)) else {
            continue;
        };
        if or.contains(&text) {
            if let Some(entry) = table.entry("sha256") {
                let what = format!("stands beside {} = \"{text}\", which is no file", p.name);
                let hint = Some("leave it out".to_owned());
                diagnostics.at(entry.key_at, &format!("{key}.sha256"), what, hint);
                return None;
            }
            continue;
        }
        let node = &table.entry(p.name)?.node;
        let path = folder(node, diagnostics).join(text);
        let path_key = format!("{key}.{}", p.name);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) => {
                let what = format!("`{}` can't be read: {e}", path.display());
                let hint = Some("paths are relative to the TOML".to_owned());
                diagnostics.at(node.at, &path_key, what, hint);
                return None;
            }
        };
        let sum = sha256_hex(&bytes);
        if let Some(given) = params.text("sha256").filter(|&g| g != sum) {
            let what = format!(
                "`{}` has the sum {sum}, `sha256` says {given}",
                path.display()
            );
            diagnostics.at(node.at, &path_key, what, None);
            return None;
        }
        let values = [(p.name, path.display().to_string()), ("sha256", sum)];
        for (name, value) in values {
            params.0.insert(name.to_owned(), Value::Text(value));
        }
    }
    Some(())
}

fn value(entry: &Entry) -> Option<Value> {
    match &entry.node.raw {
        Raw::Text(s) => Some(Value::Text(s.clone())),
        Raw::Int(v) => Some(Value::Int(*v)),
        Raw::Float(v) => Some(Value::Float(*v)),
        _ => None,
    }
}

/// Builds the stage for heads that suit every stage, to hear of parameters that don't go together without a model.
fn try_build(
    def: &StageDef,
    spec: &StageSpec,
    node: &Node,
    key: &str,
    diagnostics: &mut Diagnostics,
) -> Option<()> {
    let geometry = super::stand_in_geometry();
    let context = BuildContext {
        geometry: &geometry,
        keys: KeyForm::PostRope,
        side: Side::K,
        calibration: None,
        backing_dir: None,
        head: Some(HeadContext::any(64)),
    };
    match (def.build)(&spec.params, &context) {
        Err(StageError::Parameter { problem, .. }) => {
            diagnostics.at(node.at, key, format!("`{}`: {problem}", def.name), None);
            None
        }
        _ => Some(()),
    }
}

/// The encoding of K and of V.
pub fn encodings(
    node: &Node,
    key: &str,
    diagnostics: &mut Diagnostics,
) -> Option<(StageSpec, StageSpec)> {
    let Some((k, v)) = sides(node, key, diagnostics)? else {
        let spec = stage(Kind::Encode, node, key, diagnostics)?;
        return Some((spec.clone(), spec));
    };
    let mut side = |side: Option<&Node>, name: &str| match side {
        Some(n) => stage(Kind::Encode, n, &format!("{key}.{name}"), diagnostics),
        None => {
            let hint = format!("there are: {}", names(Kind::Encode));
            diagnostics.at(node.at, &format!("{key}.{name}"), "is missing", Some(hint));
            None
        }
    };
    let (k, v) = (side(k, "k"), side(v, "v"));
    Some((k?, v?))
}

/// The maps of K and of V, in order; a side that isn't named has none.
pub fn projections(
    node: &Node,
    key: &str,
    diagnostics: &mut Diagnostics,
) -> Option<(Vec<StageSpec>, Vec<StageSpec>)> {
    let Some((k, v)) = sides(node, key, diagnostics)? else {
        let maps = maps(node, key, diagnostics)?;
        return Some((maps.clone(), maps));
    };
    let mut side = |side: Option<&Node>, name: &str| match side {
        Some(n) => maps(n, &format!("{key}.{name}"), diagnostics),
        None => Some(Vec::new()),
    };
    let (k, v) = (side(k, "k"), side(v, "v"));
    Some((k?, v?))
}

fn maps(node: &Node, key: &str, diagnostics: &mut Diagnostics) -> Option<Vec<StageSpec>> {
    let Raw::List(items) = &node.raw else {
        return Some(vec![stage(Kind::Project, node, key, diagnostics)?]);
    };
    let read: Vec<_> = items
        .iter()
        .map(|item| stage(Kind::Project, item, key, diagnostics))
        .collect();
    read.into_iter().collect()
}

type BySide<'a> = (Option<&'a Node>, Option<&'a Node>);

/// A table with `k` and `v` as its sides; `Some(None)` for anything that stands for both sides at once.
fn sides<'a>(
    node: &'a Node,
    key: &str,
    diagnostics: &mut Diagnostics,
) -> Option<Option<BySide<'a>>> {
    let Raw::Table(table) = &node.raw else {
        return Some(None);
    };
    let (k, v) = (table.get("k"), table.get("v"));
    if k.is_none() && v.is_none() {
        return Some(None);
    }
    let mut sound = true;
    for entry in table.0.iter().filter(|e| e.key != "k" && e.key != "v") {
        let path = format!("{key}.{}", entry.key);
        let hint = Some("allowed beside each other: k, v".to_owned());
        diagnostics.at(entry.key_at, &path, "unknown key", hint);
        sound = false;
    }
    sound.then_some(Some((k, v)))
}
