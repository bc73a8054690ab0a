//! `kvlab fetch`: models and texts by name, ahead of a run.

use std::io::Write;

use anyhow::bail;

use super::progress::Bar;
use super::{Exit, lookup};
use crate::cli::FetchArgs;
use crate::config::did_you_mean;
use crate::data::{DataError, DataRef, manifest};
use crate::model::source::{self, FetchProgress, ModelDir, Silent};

/// Fetches each name and says where it is. All names are looked at before anything is fetched.
///
/// # Errors
/// An unknown name, or the first fetch that failed.
pub fn fetch(args: &FetchArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let dir = ModelDir::locate(args.places.models_dir.as_deref())?;
    let lookup = lookup(&args.places);
    let wanted: Vec<Wanted> = args
        .names
        .iter()
        .map(|n| wanted(n))
        .collect::<Result<_, _>>()?;
    let progress: &dyn FetchProgress = if args.quiet { &Silent } else { &Bar::default() };
    for item in wanted {
        match item {
            Wanted::Model(name) => {
                let path = source::resolve(&name, &dir, progress)?;
                writeln!(out, "{name}: {}", path.display())?;
            }
            Wanted::Text(text) => {
                let (read, place) = text.load_from(&lookup)?;
                writeln!(out, "{}: {} bytes from {place}", text.name, read.text.len())?;
            }
        }
    }
    Ok(Exit::Ok)
}

enum Wanted {
    Model(String),
    Text(DataRef),
}

fn wanted(name: &str) -> anyhow::Result<Wanted> {
    let models = source::builtin().iter().map(|m| m.name);
    if name.starts_with("hub:") || models.clone().any(|m| m == name) {
        return Ok(Wanted::Model(name.to_owned()));
    }
    match DataRef::named(name) {
        Ok(text) => Ok(Wanted::Text(text)),
        Err(DataError::Unknown { .. }) => {
            let texts = manifest::all()?;
            let known: Vec<&str> = models
                .chain(texts.iter().map(|t| t.name.as_str()))
                .collect();
            let hint = did_you_mean(name, known.iter().copied())
                .map_or(String::new(), |h| format!(" ({h})"));
            bail!(
                "no model or text is called `{name}`{hint}: name one of {}, or hub:org/name",
                known.join(", ")
            )
        }
        Err(e) => Err(e.into()),
    }
}
