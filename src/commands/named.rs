//! Strategies by name on a command line: presets, formats, or the keys of a `[[strategy]]`.
//!
//! Invariant: a name means what the same words mean in an experiment, since an experiment is what it becomes.

use anyhow::{Context, bail};

use crate::cache::stage::{Kind, registry};
use crate::config::{self, PRESETS, Plan, Problems, did_you_mean};

/// What the experiment around the strategies says.
pub struct Settings<'a> {
    /// The model.
    pub model: &'a str,
    /// The text.
    pub text: &'a str,
    /// The arithmetic of linear layers.
    pub arithmetic: &'a str,
}

/// The experiment that a list of strategies stands for. Elements are names, lists of names, or the keys of a table.
///
/// # Errors
/// A name that is none, and whatever is wrong with a table.
pub fn experiment(strategies: &[String], settings: &Settings<'_>) -> anyhow::Result<Plan> {
    let tables = elements(strategies)
        .map(table)
        .collect::<anyhow::Result<Vec<String>>>()?;
    let quoted = |s: &str| serde_json::to_string(s).context("a name");
    let (model, text) = (quoted(settings.model)?, quoted(settings.text)?);
    let arithmetic = quoted(settings.arithmetic)?;
    let text = format!(
        "schema = 1\nmodel = {model}\narithmetic = {arithmetic}\nstrategy = [{}]\n[data]\nsets = [{text}]\n\
         [protocol]\nkind = \"stream\"\n[calibration]\nset = \"calibration-mixed\"\ntokens = 2048\n",
        tables.join(", ")
    );
    let plan = config::parse("--strategy", &text, &[]);
    // The places are those of a text that nobody wrote.
    plan.map_err(|problems: Problems| {
        let hint = |h: &Option<String>| h.as_ref().map_or_else(String::new, |h| format!("; {h}"));
        let all = problems
            .iter()
            .map(|p| format!("{}: {}{}", p.key, p.what, hint(&p.hint)));
        anyhow::anyhow!("{}", all.collect::<Vec<_>>().join("; "))
    })
}

/// Lists cut at their commas; the keys of a table stay together.
pub fn elements(strategies: &[String]) -> impl Iterator<Item = &str> {
    strategies.iter().flat_map(|text| match text.contains('=') {
        true => vec![text.as_str()],
        false => text.split(',').collect(),
    })
}

/// A name as the keys of a `[[strategy]]`.
fn table(name: &str) -> anyhow::Result<String> {
    let name = name.trim();
    if name.contains('=') {
        return Ok(format!("{{ {name} }}"));
    }
    if PRESETS.iter().any(|p| p.name == name) {
        return Ok(format!("{{ preset = \"{name}\" }}"));
    }
    let formats = || {
        registry()
            .filter(|d| d.kind == Kind::Encode)
            .map(|d| d.name)
    };
    let (k, v) = name.split_once('/').unwrap_or((name, name));
    for part in [k, v] {
        if !formats().any(|f| f == part) {
            let all: Vec<&str> = PRESETS.iter().map(|p| p.name).chain(formats()).collect();
            let hint = did_you_mean(part, all.iter().copied());
            let hint = hint.map_or_else(String::new, |h| format!("; {h}"));
            bail!(
                "no strategy is called `{part}`{hint}: give one of {}, or keys of a [[strategy]] such as 'encode = \"q8_0\", tail = 32'",
                all.join(", ")
            );
        }
    }
    Ok(match k == v {
        true => format!("{{ encode = \"{k}\" }}"),
        false => format!("{{ encode = {{ k = \"{k}\", v = \"{v}\" }} }}"),
    })
}
