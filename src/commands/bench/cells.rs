//! Strategies in processes of their own: this program, started again for each strategy and depth, one after another.
//!
//! Invariants: a process gets its strategy as data, not by name, so that it holds what the table's row holds; it reads no memory for
//! the machine's rate and checks nothing, so that its peak belongs to the model and one cache.

use std::io::Write;
use std::process::Command;

use anyhow::{Context, bail};

use super::{Opened, Wanted};
use crate::cache::strategy::Strategy;
use crate::cli::BenchArgs;
use crate::commands::Exit;
use crate::config::Plan;
use crate::eval::bench::Work;
use crate::eval::bench::cell::Cell;
use crate::model::source::Silent;

/// Tokens decoded at least, so that the state is that of decoding.
const LEAST: usize = 8;

/// The strategy that a process is told to hold.
pub fn strategy(json: &str) -> anyhow::Result<Strategy> {
    serde_json::from_str(json).context("--cell: not a strategy as JSON")
}

/// Holds the plan's one strategy in this process and prints what that takes, as JSON.
pub fn hold(
    opened: &Opened,
    plan: &Plan,
    wanted: &Wanted,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    let depth = wanted.depths.last().copied().unwrap_or(0);
    let cell = opened.with_bench(plan, &Silent, |bench| {
        let pool = opened.pools.last();
        Ok(bench.cell(&plan.strategies[0], depth, wanted.decoded(), pool)?)
    })?;
    writeln!(out, "{}", serde_json::to_string(&cell)?)?;
    Ok(Exit::Ok)
}

/// What each strategy's own process held at each depth: strategy, depth, memory.
pub fn isolated(
    args: &BenchArgs,
    strategies: &[Strategy],
    wanted: &Wanted,
) -> anyhow::Result<Vec<(usize, usize, Cell)>> {
    let mut cells = Vec::new();
    for &depth in &wanted.depths {
        for (i, strategy) in strategies.iter().enumerate() {
            let cell = alone(args, strategy, depth, wanted)
                .with_context(|| format!("strategy \"{}\" in its own process", strategy.label))?;
            cells.push((i, depth, cell));
        }
    }
    Ok(cells)
}

fn alone(
    args: &BenchArgs,
    strategy: &Strategy,
    depth: usize,
    wanted: &Wanted,
) -> anyhow::Result<Cell> {
    let n_threads = wanted.threads.last().copied().unwrap_or(1);
    let mut command = Command::new(std::env::current_exe().context("this program's own file")?);
    command.args([
        "bench",
        "--quiet",
        "--n-prompt",
        "0",
        "--model",
        &args.model,
    ]);
    command.args(["--text", &args.text, "--arithmetic", &args.arithmetic]);
    command.args(["--n-gen", &wanted.decoded().to_string()]);
    command.args([
        "--n-depth",
        &depth.to_string(),
        "--threads",
        &n_threads.to_string(),
    ]);
    command.args(["--cell", &serde_json::to_string(strategy)?]);
    for (name, dir) in [
        ("--models-dir", &args.places.models_dir),
        ("--data-dir", &args.places.data_dir),
    ] {
        if let Some(dir) = dir {
            command.arg(name).arg(dir);
        }
    }
    let output = command.output().context("starting it")?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        bail!("{}: {}", output.status, reason.trim());
    }
    serde_json::from_slice(&output.stdout).context("reading what it printed")
}

impl Wanted {
    /// Tokens that a process decodes.
    fn decoded(&self) -> usize {
        let decodes = self.tests.iter().filter(|(work, _)| *work == Work::Decode);
        decodes.map(|(_, n)| *n).max().unwrap_or(LEAST).max(LEAST)
    }
}
