//! `kvlab plan`: what an experiment would run, or which caches of a model fit into a memory.

mod experiment;
mod growth;
mod model;
mod table;
#[cfg(test)]
mod tests;

use std::io::Write;

use anyhow::bail;

use super::Exit;
use crate::cli::PlanArgs;

/// Shows the plan.
///
/// # Errors
/// The experiment's problems, a model or a number that can't be used, a failed write.
pub fn plan(args: &PlanArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    match (&args.experiment, &args.model) {
        (Some(file), _) => experiment::plan(file, args, out),
        (None, Some(name)) => model::plan(name, args, out),
        (None, None) => bail!("give an experiment's TOML file, or a model with --model"),
    }
}
