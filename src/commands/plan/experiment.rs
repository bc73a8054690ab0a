//! The plan of an experiment: what it would run, and what each strategy's cache would hold.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, bail};
use comfy_table::{CellAlignment, Table, TableStyle};
use serde_json::{Value, json};

use super::super::{Exit, bytes, cells_of, checked_model, counted, pace};
use crate::cache::{Geometry, MemoryReport};
use crate::cli::PlanArgs;
use crate::config::{Plan, Protocol, load};

/// Bytes of one strategy under one protocol.
struct Row {
    label: String,
    memory: MemoryReport,
    n_tokens: usize,
    f16_bytes: u64,
}

/// Caches of a whole experiment are filled in full: no longer than that, in tokens.
const LONGEST: u32 = 1 << 20;

/// Shows the plan.
///
/// # Errors
/// The experiment's problems, a model that can't be read, a failed write.
pub fn plan(file: &Path, args: &PlanArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let plan = load(file, &args.chosen)?;
    if let Some(n) = args.context.filter(|n| *n > LONGEST) {
        bail!(
            "--context {n}: an experiment's caches are filled in full, up to {LONGEST} tokens: give fewer, or plan with --model"
        );
    }
    let n_positions = args
        .context
        .map_or(pace::STEP, |c| pace::STEP.max(c as usize));
    let local = checked_model(&plan, &args.places, n_positions)?;
    let mut tables = Vec::new();
    if let Some(local) = &local {
        for protocol in &plan.protocols {
            tables.push((protocol, rows(&plan, protocol, &local.geometry, args)?));
        }
    }
    let (mut sha256, mut seconds) = (None, None);
    if let Some(local) = local {
        sha256 = Some(local.model.sha256);
        let pace = pace::seconds_per_token(local.model.weights, &local.geometry, plan.arithmetic)?;
        seconds = Some(pace * tokens_to_run(&plan) as f64);
    }
    if args.json {
        let cells = sha256.as_deref().map(|s| plan.cells(s));
        let bytes: Vec<Value> = tables
            .iter()
            .map(|(protocol, rows)| json!({ "protocol": protocol, "strategies": rows_json(rows) }))
            .collect();
        let all = json!({
            "plan": plan,
            "bars": plan.bars,
            "model_sha256": sha256,
            "cells": cells,
            "bytes": bytes,
            "n_tokens": tokens_to_run(&plan),
            "estimated_s": seconds,
        });
        writeln!(out, "{}", serde_json::to_string_pretty(&all)?)?;
        return Ok(Exit::Ok);
    }
    summary(&plan, out)?;
    let time = seconds.map_or(String::new(), |s| format!(", {} here", pace::roughly(s)));
    writeln!(
        out,
        "work        {} tokens through the model{time}",
        tokens_to_run(&plan)
    )?;
    for (protocol, rows) in &tables {
        writeln!(out, "\n{}", headline(protocol))?;
        writeln!(out, "{}", table(rows))?;
    }
    if sha256.is_none() {
        writeln!(
            out,
            "\nbytes: the model is not on this machine; kvlab fetch {} brings it, and so does run",
            plan.model
        )?;
    }
    Ok(Exit::Ok)
}

fn rows(
    plan: &Plan,
    protocol: &Protocol,
    geometry: &Geometry,
    args: &PlanArgs,
) -> anyhow::Result<Vec<Row>> {
    let n_tokens = match (args.context, protocol) {
        (Some(n), _) => n as usize,
        (None, Protocol::Stream { window, .. }) => *window,
        (None, Protocol::CompressOnce { context, .. } | Protocol::Generate { context, .. }) => {
            *context
        }
        (None, Protocol::Tasks { length, .. }) => *length,
    };
    let base = |window: Option<u32>| window.map_or(n_tokens, |w| n_tokens.min(w as usize));
    let f16_bytes = geometry
        .layers
        .iter()
        .map(|l| 4 * (base(l.window) * l.n_kv_heads * l.head_dim) as u64)
        .sum();
    plan.strategies
        .iter()
        .map(|s| {
            let memory = bytes::at(s, geometry, protocol, n_tokens)
                .with_context(|| format!("strategy \"{}\"", s.label))?;
            Ok(Row {
                label: s.label.clone(),
                memory,
                n_tokens,
                f16_bytes,
            })
        })
        .collect()
}

fn summary(plan: &Plan, out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "experiment  {}", plan.name)?;
    writeln!(out, "model       {}", plan.model)?;
    writeln!(
        out,
        "arithmetic  {} in linear layers",
        plan.arithmetic.name()
    )?;
    for text in &plan.data {
        writeln!(
            out,
            "text        {} (sha256 {})",
            text.name,
            &text.sha256[..12]
        )?;
    }
    if let Some(c) = &plan.calibration {
        writeln!(out, "calibration {} ({} tokens)", c.data.name, c.tokens)?;
    }
    writeln!(
        out,
        "cells       {}, and the f32 reference of each",
        cells_of(plan)
    )
}

/// Tokens that go through the model in a run: the reference once, each strategy where it differs from it.
fn tokens_to_run(plan: &Plan) -> usize {
    let of = |protocols: Vec<usize>| {
        let n = plan.strategies.len() * protocols.len();
        let protocol = &plan.protocols[protocols[0]];
        let per_passage = match protocol {
            Protocol::Stream { window, .. } => (n + 1) * window,
            Protocol::CompressOnce {
                context,
                score,
                floor,
                ..
            } => context + (n + 1 + usize::from(*floor)) * score,
            // A text is written and then scored.
            Protocol::Generate {
                context, tokens, ..
            } => context + 2 * (n + 1) * tokens,
            // How long a question is, its items tell only when they are read.
            Protocol::Tasks { length, .. } => length + (n + 1) * ANSWER_TOKENS,
        };
        protocol.n_passages() * per_passage + n * plan.latency_steps
    };
    plan.data.len() * plan.protocols_by_items().into_iter().map(of).sum::<usize>()
}

/// Tokens of a question's options, about.
const ANSWER_TOKENS: usize = 100;

fn headline(protocol: &Protocol) -> String {
    match protocol {
        Protocol::Stream {
            window, windows, ..
        } => format!("stream: {} of {window} tokens", counted(*windows, "window")),
        Protocol::CompressOnce {
            context,
            score,
            documents,
            continuation,
            ..
        } => {
            let continuation = serde_json::to_value(continuation).unwrap_or_default();
            let word = continuation.as_str().unwrap_or("?").to_owned();
            format!(
                "compress-once: {} of {context} + {score} tokens, continuation {word}",
                counted(*documents, "document")
            )
        }
        Protocol::Generate {
            context,
            tokens,
            documents,
            ..
        } => format!(
            "generate: {tokens} tokens from {} of {context} tokens",
            counted(*documents, "document")
        ),
        Protocol::Tasks {
            shots,
            items,
            length,
            ..
        } => format!(
            "tasks: {}, {} before each; contexts that are made have {length} tokens",
            counted(*items, "item"),
            counted(*shots, "solved example")
        ),
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(TableStyle::new());
    table.set_header([
        "strategy",
        "tokens",
        "bytes",
        "resident",
        "bytes/token",
        "bytes_vs_f16",
        "live rows",
    ]);
    for row in rows {
        let m = &row.memory;
        let stored = m.stored_bytes();
        table.add_row([
            row.label.clone(),
            row.n_tokens.to_string(),
            stored.to_string(),
            m.resident_bytes().to_string(),
            format!("{:.0}", stored as f64 / row.n_tokens as f64),
            format!("{:.4}", stored as f64 / row.f16_bytes as f64),
            format!(
                "{:.1} %",
                100.0 * m.rows_live as f64 / m.rows_seen.max(1) as f64
            ),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn rows_json(rows: &[Row]) -> Vec<Value> {
    rows.iter()
        .map(|r| {
            json!({
                "label": r.label,
                "n_tokens": r.n_tokens,
                "memory": r.memory,
                "stored_bytes": r.memory.stored_bytes(),
                "resident_bytes": r.memory.resident_bytes(),
                "f16_bytes": r.f16_bytes,
            })
        })
        .collect()
}
