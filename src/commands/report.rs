//! `kvlab report`: the tables of a bundle, made again from its raw records.
//!
//! Invariant: nothing but the bundle, and files of peers that are named, is read, and nothing of it but derived tables is written.

use std::io::Write;
use std::path::Path;

use super::Exit;
use crate::cli::ReportArgs;
use crate::report::{csv, lm_eval, terminal, write};

/// Makes a bundle's tables and prints them.
///
/// # Errors
/// The bundle can't be read or is damaged, or a failed write.
pub fn report(args: &ReportArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let mut peers = Vec::new();
    for file in &args.lm_eval {
        peers.extend(lm_eval::read(file)?);
    }
    let exit = match &args.bundle {
        Some(bundle) => tell(bundle, Form::of(args.json), out)?,
        None => Exit::Ok,
    };
    if !peers.is_empty() {
        match Form::of(args.json) {
            Form::Json => writeln!(out, "{}", serde_json::to_string_pretty(&peers)?)?,
            Form::Terminal => write!(out, "\n{}", lm_eval::markdown(&peers))?,
        }
    }
    Ok(exit)
}

/// How tables are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// For people.
    Terminal,
    /// For programs.
    Json,
}

impl Form {
    /// As the flag `--json` says.
    pub fn of(json: bool) -> Self {
        if json { Form::Json } else { Form::Terminal }
    }
}

/// Writes the tables of a bundle beside its records, prints the main ones, and says how the run stands: some cells
/// failed, a bar is missed, or all is well.
///
/// # Errors
/// As [`report`].
pub fn tell(bundle: &Path, form: Form, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let report = write(bundle)?;
    match form {
        Form::Json => writeln!(out, "{}", csv::results_json(&report))?,
        Form::Terminal => {
            write!(out, "{}", terminal::results(&report, terminal::width()))?;
            writeln!(out, "\nTables and raw records: {}", bundle.display())?;
        }
    }
    Ok(match (report.n_failed, report.misses_a_bar()) {
        (0, false) => Exit::Ok,
        (0, true) => Exit::Regression,
        _ => Exit::CellsFailed,
    })
}
