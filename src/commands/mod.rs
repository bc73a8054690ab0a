//! The commands: one file each. Here: dispatch, exit codes, what commands share.
//!
//! Invariant: a command that returns an error has done no work that counts: the program's exit code is then 2.

mod check;
mod list;

use std::io::Write;
use std::path::Path;

use crate::cli::{Command, Experiment, Places};
use crate::config::{Plan, Problems, load};
use crate::data::Lookup;

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
        Command::Check(args) => check::check(args, out),
        Command::List(args) => list::list(args, out),
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

fn load_plan(experiment: &Experiment) -> Result<Plan, Problems> {
    load(&experiment.file, &experiment.overrides)
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
