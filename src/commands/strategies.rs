//! Strategies without an experiment around them: what a name stands for, all that is registered, and a strategy as keys.
//!
//! Invariant: names are read as an experiment's file is, so nothing can be said here that a file can't say.

use anyhow::{Context, bail};

use super::named::{Settings, experiment};
use crate::cache::stage::{KeyForm, Kind, StageDef, Value, find, registry};
use crate::cache::strategy::{BudgetStep, ExactFormat, Scope, StageSpec, Strategy, Tail};
use crate::config::PRESETS;

/// The strategies of a preset, a format or the keys of a table, sweeps expanded; no model is asked for.
///
/// # Errors
/// What is wrong with it, in one line.
pub fn read(text: &str) -> anyhow::Result<Vec<Strategy>> {
    let settings = Settings {
        model: "smollm2-135m-instruct",
        text: "quickstart-prose",
        arithmetic: "f32",
    };
    let plan = experiment(&[text.to_owned()], &settings);
    Ok(plan.with_context(|| format!("strategy {text}"))?.strategies)
}

/// What a name stands for: a strategy, or every example of a stage as [`examples`] tries them. A format is both: its examples
/// are tried when it is asked for as `encode:NAME`.
///
/// # Errors
/// No such name.
pub fn named(name: &str) -> anyhow::Result<Vec<Strategy>> {
    let name = name.trim();
    let (kind, stage) = match name.split_once(':') {
        Some((kind, stage)) => (Some(kind), stage),
        None => (None, name),
    };
    let is_plain = |d: &&StageDef| d.name == stage && d.kind != Kind::Encode;
    let of_kind = |d: &&StageDef| d.name == stage && kind == Some(d.kind.key());
    let is_keys = name.contains('=') || PRESETS.iter().any(|p| p.name == name);
    let def = match (is_keys, kind) {
        (true, _) => None,
        (false, Some(_)) => registry().find(of_kind),
        (false, None) => registry().find(is_plain),
    };
    match def {
        Some(def) => examples(def),
        None if !is_keys && kind.is_some() => {
            let known = registry().map(|d| format!("{}:{}", d.kind, d.name));
            bail!(
                "no stage is called `{name}`; there are: {}",
                known.collect::<Vec<_>>().join(", ")
            )
        }
        None => read(name),
    }
}

/// Every example of a stage alone over the exact format: bare, behind 2 sinks and a tail of 20, and the same with keys stored
/// before RoPE.
///
/// # Errors
/// An example that does not read.
pub fn examples(def: &StageDef) -> anyhow::Result<Vec<Strategy>> {
    let mut all = Vec::new();
    for example in def.examples {
        for rows in [
            "",
            ", tail = 20, sinks = 2",
            ", tail = 20, sinks = 2, keys = \"pre_rope\"",
        ] {
            all.extend(read(&format!("{} = {example}{rows}", def.kind))?);
        }
    }
    Ok(all)
}

/// Every preset, and every example of every stage.
///
/// # Errors
/// One that does not read.
pub fn everything() -> anyhow::Result<Vec<Strategy>> {
    let mut all: Vec<Strategy> = Vec::new();
    let presets = PRESETS.iter().map(|p| named(p.name));
    for found in presets.chain(registry().map(examples)) {
        for strategy in found? {
            let same = |s: &Strategy| keys(s) == keys(&strategy);
            if !all.iter().any(same) {
                all.push(strategy);
            }
        }
    }
    Ok(all)
}

/// A strategy as the keys of a `[[strategy]]`, on one line; reading them gives the strategy again, its label apart.
pub fn keys(strategy: &Strategy) -> String {
    let mut parts = Vec::new();
    let mut part = |key: &str, value: String| parts.push(format!("{key} = {value}"));
    if let Some(retain) = &strategy.retain {
        part("retain", stage(Kind::Retain, retain));
    }
    let maps = |specs: &[StageSpec]| {
        let all: Vec<String> = specs.iter().map(|s| stage(Kind::Project, s)).collect();
        match &all[..] {
            [one] => one.clone(),
            _ => format!("[{}]", all.join(", ")),
        }
    };
    match (&strategy.project_k[..], &strategy.project_v[..]) {
        ([], []) => {}
        (k, []) => part("project", format!("{{ k = {} }}", maps(k))),
        ([], v) => part("project", format!("{{ v = {} }}", maps(v))),
        (k, v) => part("project", sides(maps(k), maps(v))),
    }
    let format =
        |(k, v): (&StageSpec, &StageSpec)| sides(stage(Kind::Encode, k), stage(Kind::Encode, v));
    part("encode", format((&strategy.encode_k, &strategy.encode_v)));
    if let Some(pack) = &strategy.pack {
        part("pack", stage(Kind::Pack, pack));
    }
    if let Some(place) = &strategy.place {
        part("place", stage(Kind::Place, place));
    }
    if strategy.keys == KeyForm::PreRope {
        part("keys", "\"pre_rope\"".to_owned());
    }
    if strategy.tail != Tail::default() {
        let tail = strategy.tail;
        part("tail", sides(tail.k.to_string(), tail.v.to_string()));
    }
    if strategy.sinks > 0 {
        part("sinks", strategy.sinks.to_string());
    }
    if strategy.exact == ExactFormat::F32 {
        part("exact", "\"f32\"".to_owned());
    }
    if let Some(budget) = &strategy.budget {
        let then: Vec<String> = budget.then.iter().map(|(k, v)| format((k, v))).collect();
        let mut inner = format!("bytes = {}, then = [{}]", budget.bytes, then.join(", "));
        if budget.scope == Scope::All {
            inner += ", scope = \"all\"";
        }
        if !budget.steps.is_empty() {
            let step = |s: &BudgetStep| format!("{{ at = {}, bytes = {} }}", s.at, s.bytes);
            let steps: Vec<String> = budget.steps.iter().map(step).collect();
            inner += &format!(", grow = [{}]", steps.join(", "));
        }
        part("budget", format!("{{ {inner} }}"));
    }
    parts.join(", ")
}

fn sides(k: String, v: String) -> String {
    match k == v {
        true => k,
        false => format!("{{ k = {k}, v = {v} }}"),
    }
}

/// A stage by its name and the parameters that aren't at their default.
fn stage(kind: Kind, spec: &StageSpec) -> String {
    let def = find(kind, &spec.name).ok();
    let default = |name: &str| def.and_then(|d| d.params.iter().find(|p| p.name == name)?.default);
    let params: String = spec
        .params
        .0
        .iter()
        .filter(|(name, value)| default(name) != Some(&value.to_string()))
        .map(|(name, value)| match value {
            Value::Text(text) => format!(", {name} = {text:?}"),
            number => format!(", {name} = {number}"),
        })
        .collect();
    match params.is_empty() {
        true => format!("{:?}", spec.name),
        false => format!("{{ method = {:?}{params} }}", spec.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_read_as_the_strategy_that_they_were_written_from() {
        let mut all = everything().unwrap();
        assert!(all.len() > 80, "{}", all.len());
        all.extend(
            read(
                "encode = { k = \"q8_0\", v = \"q4_0\" }, tail = { k = 0, v = 8 }, exact = \"f32\", budget = { bytes = 900000, \
                 scope = \"all\", then = [\"q4_0\"], grow = [{ at = 9, bytes = 1000000 }] }",
            )
            .unwrap(),
        );
        for strategy in all {
            let text = keys(&strategy);
            let again = read(&text).unwrap_or_else(|e| panic!("{text}: {e:#}"));
            let unlabelled = |s: &Strategy| Strategy {
                label: String::new(),
                ..s.clone()
            };
            assert_eq!(unlabelled(&again[0]), unlabelled(&strategy), "{text}");
        }
    }

    #[test]
    fn a_name_is_a_preset_a_format_a_stage_or_keys() {
        assert_eq!(named("int4-best").unwrap().len(), 1);
        assert_eq!(named("q8_0/q4_0").unwrap()[0].encode_v.name, "q4_0");
        assert_eq!(named("tail = [0, 8], encode = \"q4_0\"").unwrap().len(), 2);
        assert_eq!(named("window").unwrap().len(), 9);
        assert_eq!(named("encode:q4_0").unwrap().len(), 3);
        for (wrong, told) in [
            ("q4", "did you mean `q4_0`"),
            ("encode:q4", "encode:q4_0"),
            ("tail = -1", "must be"),
        ] {
            let error = format!("{:#}", named(wrong).unwrap_err());
            assert!(error.contains(told), "{wrong}: {error}");
        }
    }
}
