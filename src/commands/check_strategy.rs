//! `kvlab check-strategy`: the conformance suite for one strategy, or for all that are registered.
//!
//! Invariant: a failure prints what runs that check alone again, with the same numbers.

use std::io::Write;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::{Exit, named, strategies};
use crate::cache::strategy::Strategy;
use crate::cli::CheckStrategyArgs;
use crate::config::did_you_mean;
use crate::engine::clock::SystemClock;
use crate::eval::conformance::{
    CHECKS, Check, Context, Failure, Finding, Stop, find_check, with_small_budgets,
};

/// Runs the checks and prints a line for each.
///
/// # Errors
/// A name that stands for nothing, a strategy that can't be built, a failed write.
pub fn check_strategy(args: &CheckStrategyArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let checks = wanted(&args.only)?;
    let subjects = subjects(args)?;
    let mut records = Vec::new();
    let mut n_failed = 0;
    for (strategy, changes) in &subjects {
        let keys = strategies::keys(strategy);
        let context = Context::new(strategy, args.seed);
        let context = context.with_context(|| {
            // A learned gate belongs to its model's layers.
            let file = strategy.retain.as_ref().and_then(|r| r.params.text("file"));
            let hint = match file.is_some_and(|f| f != "random") {
                true => ", on the suite's own small layers (take file = \"random\")",
                false => "",
            };
            format!("strategy {{ {keys} }}{hint}")
        })?;
        if !args.json {
            writeln!(out, "{}: {keys}", strategy.label)?;
            for change in changes {
                writeln!(out, "  note: {change}, so that it bites in short contexts")?;
            }
        }
        let mut findings = Vec::new();
        for check in &checks {
            let finding = check.timed(&context, &SystemClock::new());
            n_failed += usize::from(failure(&finding).is_some());
            if !args.json {
                out.write_all(line(&finding).as_bytes())?;
                if let Some(failure) = failure(&finding) {
                    let told = reproducer(failure, (check, &keys), args.seed);
                    out.write_all(told.as_bytes())?;
                }
                out.flush()?;
            }
            findings.push(finding);
        }
        records.push(record(&strategy.label, &keys, args.seed, &findings));
    }
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&records)?)?;
    } else if n_failed > 0 {
        writeln!(
            out,
            "{n_failed} of {} checks FAILED",
            checks.len() * subjects.len()
        )?;
    }
    Ok(match n_failed {
        0 => Exit::Ok,
        _ => Exit::Regression,
    })
}

/// The checks to run, in the suite's order.
fn wanted(only: &[String]) -> anyhow::Result<Vec<&'static Check>> {
    for name in only {
        if find_check(name).is_none() {
            let all: Vec<&str> = CHECKS.iter().map(|c| c.name).collect();
            let hint = did_you_mean(name, all.iter().copied());
            let hint = hint.map_or_else(String::new, |h| format!("; {h}"));
            bail!(
                "no check is called `{name}`{hint}; there are: {}",
                all.join(", ")
            );
        }
    }
    let is_wanted = |c: &&Check| only.is_empty() || only.iter().any(|o| o == c.name);
    Ok(CHECKS.iter().filter(is_wanted).collect())
}

/// What is to be checked, with row budgets that bite in short contexts.
fn subjects(args: &CheckStrategyArgs) -> anyhow::Result<Vec<(Strategy, Vec<String>)>> {
    let mut all = Vec::new();
    if args.all {
        all = strategies::everything()?;
    }
    for name in named::elements(&args.names) {
        all.extend(strategies::named(name)?);
    }
    if all.is_empty() {
        bail!(
            "no strategy is named: give a preset, a format, a stage, keys of a [[strategy]], or --all"
        );
    }
    Ok(all.iter().map(with_small_budgets).collect())
}

fn failure(finding: &Finding) -> Option<&Failure> {
    match &finding.verdict {
        Err(Stop::Failed(failure)) => Some(failure),
        _ => None,
    }
}

fn line(finding: &Finding) -> String {
    let (word, note) = match &finding.verdict {
        Ok(None) => ("ok", String::new()),
        Ok(Some(note)) => ("ok", format!("  ({note})")),
        Err(Stop::NotApplicable(why)) => ("n/a", format!("  ({why})")),
        Err(Stop::Failed(_)) => ("FAILED", String::new()),
    };
    let seconds = finding.wall.as_secs_f64();
    format!("  {:<12} {word:<7}{seconds:>6.2} s{note}\n", finding.check)
}

/// What failed, in ten lines.
fn reproducer(failure: &Failure, (check, keys): (&Check, &str), seed: u64) -> String {
    let place = failure.place.map(|p| p.to_string());
    let error = failure.max_error.map(|e| format!("{e:.3e}"));
    let none = || "none compared".to_owned();
    let rows = [
        ("check", format!("{}: {}", check.name, check.doc)),
        ("compared", failure.what.clone()),
        ("seed", seed.to_string()),
        ("geometry", failure.geometry.clone()),
        ("strategy", keys.to_owned()),
        ("tokens", failure.tokens.clone()),
        ("first", place.unwrap_or_else(none)),
        ("got", failure.got.clone()),
        ("expected", failure.expected.clone()),
        ("max error", error.unwrap_or_else(none)),
        ("again", again(check.name, keys, seed)),
    ];
    rows.into_iter()
        .map(|(name, value)| format!("    {name:<10}{value}\n"))
        .collect()
}

fn again(check: &str, keys: &str, seed: u64) -> String {
    format!("kvlab check-strategy '{keys}' --only {check} --seed {seed}")
}

fn record(label: &str, keys: &str, seed: u64, findings: &[Finding]) -> Value {
    let checks = findings.iter().map(|finding| {
        let (word, note) = match &finding.verdict {
            Ok(note) => ("ok", note.clone()),
            Err(Stop::NotApplicable(why)) => ("n/a", Some(why.clone())),
            Err(Stop::Failed(_)) => ("failed", None),
        };
        let failure = failure(finding).map(|f| {
            json!({
                "compared": f.what,
                "geometry": f.geometry,
                "tokens": f.tokens,
                "first": f.place.map(|p| json!({
                    "layer": p.layer, "head": p.head, "position": p.position, "channel": p.channel
                })),
                "got": f.got,
                "expected": f.expected,
                "max_error": f.max_error,
                "again": again(finding.check, keys, seed),
            })
        });
        json!({
            "check": finding.check,
            "status": word,
            "seconds": finding.wall.as_secs_f64(),
            "note": note,
            "failure": failure,
        })
    });
    json!({
        "label": label,
        "strategy": keys,
        "seed": seed,
        "checks": checks.collect::<Vec<_>>(),
    })
}
