//! `kvlab run`: from an experiment's TOML to tables. This file is the main path; each line is a module.
//!
//! Invariant: everything that can be refused is refused before the bundle exists.

use std::io::Write;

use indicatif::ProgressBar;

use super::progress::{self, Bar};
use super::report::{Form, tell};
use super::session::Session;
use super::work::work;
use super::{Exit, load_plan};
use crate::bundle::environment::Environment;
use crate::bundle::{Bundle, Mode, Start};
use crate::cli::RunArgs;
use crate::model::source::{FetchProgress, Silent};

/// Runs an experiment, or goes on with it, and prints its table.
///
/// # Errors
/// Why nothing was run.
pub fn run(args: &RunArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    stop_on_interrupt();
    let plan = load_plan(&args.experiment)?;
    let fetching: &dyn FetchProgress = if args.quiet { &Silent } else { &Bar::default() };
    let session = Session::open(plan, args, fetching)?;
    let start = Start {
        results_dir: &args.results_dir,
        plan: &serde_json::to_value(&session.plan)?,
        header: &session.header()?,
        environment: &Environment::capture()?,
    };
    let mut bundle = Bundle::open_or_create(
        &start,
        if args.fresh {
            Mode::Fresh
        } else {
            Mode::Resume
        },
    )?;
    let bar = if args.quiet {
        ProgressBar::hidden()
    } else {
        progress::items(session.n_items())
    };
    let n_failed = work(&session, &mut bundle, &bar)?;
    // A bundle with failed cells stays open: the same command tries them again.
    if n_failed == 0 {
        bundle.finish()?;
    }
    bundle.state_bars(&session.plan.bars)?;
    tell(bundle.path(), Form::of(args.json), out)
}

/// Ctrl-C ends the program at once: every file but the journal is renamed into place whole, and the journal drops a torn
/// line.
#[cfg(unix)]
fn stop_on_interrupt() {
    use signal_hook::{consts::SIGINT, iterator::Signals};
    // Where it can't be set, Ctrl-C ends the program by the signal itself and only the message is missing.
    if let Ok(mut signals) = Signals::new([SIGINT]) {
        std::thread::spawn(move || {
            if signals.forever().next().is_some() {
                eprintln!("\ninterrupted: give the same command again to go on");
                std::process::exit(Exit::Interrupted as i32);
            }
        });
    }
}

/// The system ends the program.
#[cfg(not(unix))]
fn stop_on_interrupt() {}
