//! The commands: one file each. Here: dispatch, exit codes, what commands share.
//!
//! Invariant: a command that returns an error has done no work that counts: the program's exit code is then 2.

mod answers;
mod bench;
mod bytes;
mod check;
mod check_strategy;
mod fetch;
mod items;
mod kld;
mod list;
mod named;
mod pace;
mod plan;
pub mod progress;
mod report;
mod run;
mod session;
pub mod strategies;
mod train;
mod work;

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::cache::Geometry;
use crate::cli::{Command, Experiment, Places};
use crate::config::{ModelLimits, Plan, Problems, Protocol, load};
use crate::data::Lookup;
use crate::model::LoadedModel;
use crate::model::geometry::geometry;
use crate::model::source::{self, ModelDir};

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// All is well.
    Ok = 0,
    /// A comparison says regression.
    Regression = 1,
    /// Refused before work.
    Refused = 2,
    /// Some cells failed.
    CellsFailed = 3,
    /// A bundle does not verify.
    NotVerified = 4,
    /// Stopped; the same command goes on.
    Interrupted = 130,
}

/// Does what a command line asks for; what it says goes to `out`.
///
/// # Errors
/// The reason why nothing was done, one line unless it is [`Problems`].
pub fn dispatch(command: &Command, out: &mut dyn Write) -> anyhow::Result<Exit> {
    match command {
        Command::Run(args) => run::run(args, out),
        Command::Report(args) => report::report(args, out),
        Command::Check(args) => check::check(args, out),
        Command::Plan(args) => plan::plan(args, out),
        Command::List(args) => list::list(args, out),
        Command::Fetch(args) => fetch::fetch(args, out),
        Command::Train(args) => train::train(args, out),
        Command::Bench(args) => bench::bench(args, out),
        Command::Kld(args) => kld::kld(args, out),
        Command::CheckStrategy(args) => check_strategy::check_strategy(args, out),
    }
}

/// An error as the program tells it: the problems of an experiment a line each, then one line that sums up.
pub fn explain(error: &anyhow::Error) -> String {
    match error.downcast_ref::<Problems>() {
        Some(problems) => format!("{problems}: nothing was run"),
        None => format!("error: {error:#}").replace('\n', " "),
    }
}

/// Whether the reader of our output went away (`kvlab list | head`), which is no error.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

/// "1 text", "3 texts".
fn counted(n: usize, word: &str) -> String {
    format!("{n} {word}{}", if n == 1 { "" } else { "s" })
}

/// A plan's cells in words.
fn cells_of(plan: &Plan) -> String {
    let (strategies, protocols, texts) =
        (plan.strategies.len(), plan.protocols.len(), plan.data.len());
    let strategies_word = if strategies == 1 {
        "strategy"
    } else {
        "strategies"
    };
    let asks = plan.data.iter().any(|d| d.is_task);
    format!(
        "{} = {strategies} {strategies_word} x {} x {}",
        counted(strategies * protocols * texts, "cell"),
        counted(protocols, "protocol"),
        counted(texts, if asks { "task" } else { "text" })
    )
}

fn load_plan(experiment: &Experiment) -> Result<Plan, Problems> {
    load(&experiment.file, &experiment.overrides)
}

/// A model that is on this machine, and its layers with rotation tables for the plan.
struct LocalModel {
    model: LoadedModel,
    geometry: Geometry,
}

/// Opens the plan's model when it is on this machine and checks the plan against it. `n_positions`: tables' least length.
fn checked_model(
    plan: &Plan,
    places: &Places,
    n_positions: usize,
) -> anyhow::Result<Option<LocalModel>> {
    let Some(path) = local_model(plan, places)? else {
        return Ok(None);
    };
    let model = crate::model::load(&path)?;
    let tokens = plan
        .protocols
        .iter()
        .map(Protocol::n_tokens)
        .max()
        .unwrap_or(0);
    let longest = (tokens + plan.latency_steps).min(model.spec.context_length);
    let geometry = geometry(&model.spec, longest.max(n_positions));
    plan.check_model(&limits(plan, &model, &geometry))?;
    Ok(Some(LocalModel { model, geometry }))
}

/// What a plan is checked against.
fn limits<'a>(plan: &'a Plan, model: &'a LoadedModel, geometry: &'a Geometry) -> ModelLimits<'a> {
    ModelLimits {
        name: &plan.model,
        sha256: &model.sha256,
        context_length: model.spec.context_length,
        geometry,
    }
}

/// The model's file or folder when it is on this machine.
fn local_model(plan: &Plan, places: &Places) -> anyhow::Result<Option<PathBuf>> {
    local_path(&plan.model, places)
}

/// The file or folder of the model called `name` when it is on this machine.
fn local_path(name: &str, places: &Places) -> anyhow::Result<Option<PathBuf>> {
    let builtin = source::builtin().iter().find(|m| m.name == name);
    // A path needs no folder of models.
    let dir = || ModelDir::locate(places.models_dir.as_deref());
    let path = match (builtin, name.strip_prefix("hub:")) {
        (Some(model), _) => return Ok(dir()?.builtin(model)?),
        (None, Some(repo)) => dir()?.hub_path(repo),
        (None, None) => PathBuf::from(name),
    };
    Ok(path.exists().then_some(path))
}

/// Where texts are looked for: `--data-dir`, else `KVLAB_DATA`.
fn lookup(places: &Places) -> Lookup {
    let from_environment = || std::env::var_os("KVLAB_DATA").filter(|v| !v.is_empty());
    let data_dir = places.data_dir.clone();
    Lookup {
        data_dir: data_dir.or_else(|| from_environment().map(|v| Path::new(&v).to_owned())),
        ..Lookup::default()
    }
}
