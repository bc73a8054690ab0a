//! A model's plan as a table for people and as JSON for scripts.
//!
//! Invariant: the JSON has every number of the table, in bytes and tokens.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, TableStyle};
use serde_json::{Value, json};

use super::model::{Length, Outlook, Row};
use crate::cli::ByteSize;
use crate::model::shape::Stored;
use crate::report::format::{count, grouped};

/// Shares of memory that practitioners leave to the cache.
const HEADROOM: [f64; 2] = [0.5, 0.7];

/// The plan for people.
pub fn text(outlook: &Outlook) -> String {
    let mut out = String::new();
    // Writing to a string can't fail.
    let _ = head(outlook, &mut out);
    let _ = writeln!(out, "\n{}\n", table(outlook));
    let _ = notes(outlook, &mut out);
    out
}

fn head(outlook: &Outlook, out: &mut String) -> std::fmt::Result {
    let shape = &outlook.shape;
    writeln!(out, "model    {}: {}", shape.name, shape.in_words())?;
    writeln!(
        out,
        "weights  {}, {}",
        ByteSize(outlook.weight_bytes),
        outlook.weights_from
    )?;
    let n_values = shape.values_at(outlook.n_tokens) * outlook.n_sequences;
    writeln!(
        out,
        "cache    {} x {}: {} values, {} of each token; in f16 {} of values alone",
        count(outlook.n_tokens, "token"),
        count(outlook.n_sequences as usize, "sequence"),
        grouped(n_values),
        grouped(shape.values_per_token()),
        ByteSize(2 * n_values),
    )?;
    if outlook.n_tokens > shape.context_length {
        writeln!(
            out,
            "         the model was made for {} at most",
            count(shape.context_length, "token")
        )?;
    }
    if let (Some(budget), Some(room)) = (outlook.budget_bytes, outlook.room_bytes()) {
        writeln!(
            out,
            "budget   {}: {}",
            ByteSize(budget),
            headroom(outlook, budget, room)
        )?;
    }
    Ok(())
}

/// What is left for the cache, and the rule of thumb about it.
fn headroom(outlook: &Outlook, budget: u64, room: u64) -> String {
    if room == 0 {
        return format!(
            "the weights alone take {}: nothing is left for a cache",
            ByteSize(outlook.weight_bytes)
        );
    }
    let [low, high] = HEADROOM.map(|share| ByteSize((share * budget as f64) as u64));
    format!(
        "{} are left beside the weights, {:.0} %; as a rule of thumb a cache gets 50 to 70 %, {low} to {high} (advice, no limit)",
        ByteSize(room),
        100.0 * room as f64 / budget as f64,
    )
}

fn table(outlook: &Outlook) -> Table {
    let mut table = Table::new();
    table.load_style(TableStyle::new());
    let mut names = vec!["strategy", "bytes/token", "cache", "bits/value"];
    if outlook.budget_bytes.is_some() {
        names.extend(["fits", "sequences", "longest context"]);
    }
    names.push("as large as the weights at");
    table.set_header(names);
    for row in &outlook.rows {
        table.add_row(cells(row));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn cells(row: &Row) -> Vec<String> {
    let about = if row.exact { "" } else { "≈ " };
    let length = |l: Option<Length>| match l {
        Some(Length::Tokens(n)) => grouped(n as u64),
        Some(Length::Beyond(n)) => format!("> {}", grouped(n as u64)),
        None => String::new(),
    };
    let mut cells = vec![
        row.label.clone(),
        row.marginal_bytes
            .map_or_else(String::new, |b| grouped(b.round() as u64)),
        format!("{about}{}", ByteSize(row.memory.stored_bytes())),
        format!("{:.3}", row.effective_bits),
    ];
    if let (Some(fits), Some(n)) = (row.fits, row.n_sequences_fit) {
        let fits = if fits { "yes" } else { "no" };
        cells.extend([fits.to_owned(), grouped(n), length(row.longest_context)]);
    }
    cells.push(length(row.equals_weights_at));
    cells
}

fn notes(outlook: &Outlook, out: &mut String) -> std::fmt::Result {
    writeln!(
        out,
        "bytes/token: what one more token of one sequence adds, past windows, tail and sinks. cache: all sequences, with scales, indices, \
         page tables, tables, projections, exact rows and slack; bits/value: those bytes over all values of the tokens. \
         Lengths are whole pages of 128 tokens. Not counted: activations, logits, attention's working memory."
    )?;
    let n_measured = outlook.rows.iter().map(|r| r.n_measured).max();
    writeln!(
        out,
        "measured: live caches of random rows, one KV head of each kind of layer, up to {}; times heads, layers and \
         sequences. Longer ones repeat the growth of 2,048 tokens.",
        count(n_measured.unwrap_or(0), "token")
    )?;
    if outlook.rows.iter().any(|r| !r.exact) {
        writeln!(
            out,
            "≈: two such periods did not grow alike, the bytes depend on the data."
        )?;
    }
    if outlook
        .shape
        .layers
        .iter()
        .any(|l| l.stored == Stored::Latent)
    {
        writeln!(
            out,
            "latent rows: one row serves K and V and is coded as K is; a format of V is not used."
        )?;
    }
    for row in outlook.rows.iter().filter(|r| r.memory.backing_bytes > 0) {
        writeln!(
            out,
            "parked: {} keeps {} of its cache in files; what is resident, {}, counts against the budget.",
            row.label,
            ByteSize(row.memory.backing_bytes),
            ByteSize(row.memory.resident_bytes())
        )?;
    }
    for (label, reason) in &outlook.refused {
        writeln!(out, "not for this model: {label}: {reason}")?;
    }
    Ok(())
}

/// The plan for scripts.
pub fn json(outlook: &Outlook) -> Value {
    let shape = &outlook.shape;
    let layers: Vec<Value> = shape
        .kinds()
        .iter()
        .map(|(l, n)| {
            json!({
                "n_layers": n,
                "n_kv_heads": l.n_kv_heads,
                "head_dim": l.head_dim,
                "window": l.window,
                "latent": l.stored == Stored::Latent,
            })
        })
        .collect();
    let rows: Vec<Value> = outlook.rows.iter().map(row_json).collect();
    let refused: Vec<Value> = outlook
        .refused
        .iter()
        .map(|(label, reason)| json!({ "label": label, "reason": reason }))
        .collect();
    json!({
        "model": shape.name,
        "layers": layers,
        "context_length": shape.context_length,
        "n_tokens": outlook.n_tokens,
        "n_sequences": outlook.n_sequences,
        "values_per_token": shape.values_per_token(),
        "n_values": shape.values_at(outlook.n_tokens) * outlook.n_sequences,
        "weight_bytes": outlook.weight_bytes,
        "weights_from": outlook.weights_from,
        "budget_bytes": outlook.budget_bytes,
        "room_bytes": outlook.room_bytes(),
        "strategies": rows,
        "refused": refused,
    })
}

/// A length beyond what is looked for is null, and the field `..._beyond` says so.
fn row_json(row: &Row) -> Value {
    let tokens = |l: Option<Length>| match l {
        Some(Length::Tokens(n)) => Some(n),
        _ => None,
    };
    let beyond = |l: Option<Length>| match l {
        Some(Length::Beyond(n)) => Some(n),
        _ => None,
    };
    json!({
        "label": row.label,
        "marginal_bytes_per_token": row.marginal_bytes,
        "memory": row.memory,
        "stored_bytes": row.memory.stored_bytes(),
        "resident_bytes": row.memory.resident_bytes(),
        "effective_bits": row.effective_bits,
        "fits": row.fits,
        "n_sequences_fit": row.n_sequences_fit,
        "longest_context": tokens(row.longest_context),
        "longest_context_beyond": beyond(row.longest_context),
        "equals_weights_at": tokens(row.equals_weights_at),
        "equals_weights_beyond": beyond(row.equals_weights_at),
        "n_measured_tokens": row.n_measured,
        "exact": row.exact,
    })
}
