//! Tables in Markdown: results, bytes by part, times, pairs.
//!
//! Invariant: every table of results stands under its conventions.

use super::columns::{COLUMNS, Text, TextRow, text};
use super::conventions::{own, shared, short};
use super::format::{grouped, mean_count, plus_minus, signed_plus_minus, significant};
use super::rows::{Group, Report};

/// Main tables, one per group.
pub fn results(report: &Report) -> String {
    document(report, "results", &shared(report), |group, out| {
        for line in own(group) {
            out.push_str(&format!("- {line}\n"));
        }
        out.push('\n');
        out.push_str(&table(&text(group, COLUMNS, |column| column.head)));
    })
}

/// Bytes by part.
pub fn memory(report: &Report) -> String {
    let intro = "Bytes per token of the live cache, shared parts and slack included, at the stated number of tokens. \
                 stored: all parts and what is parked; scratch: the largest working memory, bytes, not stored; \
                 marginal: what one more token costs.";
    document(
        report,
        "bytes by part",
        &[intro.to_owned()],
        |group, out| {
            out.push_str(&table(&memory_text(group)));
        },
    )
}

/// Times at each depth.
pub fn latency(report: &Report) -> String {
    let intro = "Wall times in one process; ± is half of a 95 % interval over items, or over steps where one item was \
                 timed. `tgN @ dD`: N decoded tokens with D in the cache.";
    document(report, "times", &[intro.to_owned()], |group, out| {
        out.push_str(&table(&latency_text(group)));
    })
}

/// All pairs of strategies.
pub fn pairs(report: &Report) -> String {
    let intro = "NLL of a minus NLL of b per token on the same tokens, as a change of perplexity; ± is half of a 95 % \
                 interval; p of the paired t test, not corrected for the number of pairs.";
    document(
        report,
        "pairs of strategies",
        &[intro.to_owned()],
        |group, out| {
            let heads = ["a", "b", "ΔPPL %", "ΔNLL", "p", "n", "a is"];
            let rows = group.pairs.iter().map(|pair| {
                let delta = &pair.paired.delta;
                vec![
                    pair.a.clone(),
                    pair.b.clone(),
                    signed_plus_minus(
                        pair.paired.ppl_change_percent(),
                        pair.paired.ppl_change_half_percent(),
                    ),
                    signed_plus_minus(delta.value, delta.half_width()),
                    pair.paired
                        .p
                        .map_or_else(String::new, |p| significant(p, 2)),
                    delta.n.to_string(),
                    pair.paired.verdict.to_string(),
                ]
            });
            out.push_str(&table(&plain(&heads, rows)));
        },
    )
}

/// Title, provenance, what all sections share, then a section per group.
fn document(
    report: &Report,
    what: &str,
    intro: &[String],
    section: impl Fn(&Group, &mut String),
) -> String {
    let header = &report.header;
    let mut out = format!(
        "# {}: {what}\n\nModel {} (sha256 {}). Bundle {}/{}{}. Command: `{}`.\n",
        header.experiment,
        header.model.name,
        short(&header.model.sha256),
        header.experiment,
        report.run_id,
        if report.is_finished {
            ""
        } else {
            ", unfinished"
        },
        report.command,
    );
    for line in intro {
        out.push_str(&format!("\n{line}\n"));
    }
    for group in &report.groups {
        out.push_str(&format!(
            "\n## {}: {}\n\n",
            group.protocol.name, group.title
        ));
        section(group, &mut out);
    }
    out
}

fn plain(heads: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Text {
    Text {
        heads: heads.iter().map(|h| (*h).to_owned()).collect(),
        rows: rows.map(TextRow::Cells).collect(),
    }
}

fn memory_text(group: &Group) -> Text {
    let heads = [
        "strategy",
        "tokens",
        "payload",
        "scales",
        "indices",
        "page tables",
        "tables",
        "projections",
        "exact rows",
        "slack",
        "parked",
        "stored",
        "f16",
        "marginal",
        "kept_fraction",
        "scratch bytes",
    ];
    let rows = group.rows.iter().filter_map(|row| {
        let memory = row.scores()?.memory?;
        let parts = &memory.parts;
        let per_token = |bytes: u64| significant(memory.per_token(bytes), 4);
        Some(vec![
            row.label.clone(),
            mean_count(memory.mean_tokens()),
            per_token(parts.payload_bytes),
            per_token(parts.scale_bytes),
            per_token(parts.index_bytes),
            per_token(parts.page_table_bytes),
            per_token(parts.table_bytes),
            per_token(parts.projection_bytes),
            per_token(parts.exact_bytes),
            per_token(parts.slack_bytes),
            per_token(parts.backing_bytes),
            per_token(parts.stored_bytes()),
            per_token(memory.f16_bytes),
            memory
                .marginal_bytes_per_token
                .map_or_else(String::new, |bytes| significant(bytes, 4)),
            memory
                .kept_fraction()
                .map_or_else(String::new, |kept| format!("{kept:.3}")),
            grouped(parts.scratch_bytes),
        ])
    });
    plain(&heads, rows)
}

fn latency_text(group: &Group) -> Text {
    let heads = [
        "strategy",
        "test",
        "ms/token",
        "median ms",
        "p95 ms",
        "CPU ms/token",
        "t/s",
        "store + compress ms",
    ];
    let rows = group.rows.iter().flat_map(|row| {
        let latency = row.scores().map_or(&[][..], |scores| &scores.latency);
        latency.iter().map(|l| {
            vec![
                row.label.clone(),
                format!("tg{} @ d{}", l.n_steps, l.depth),
                plus_minus(l.ms_per_token.value, l.ms_per_token.half_width()),
                significant(l.median_ms, 3),
                significant(l.p95_ms, 3),
                significant(l.cpu_ms_per_token, 3),
                significant(l.tokens_per_s(), 4),
                significant(l.compress_ms, 3),
            ]
        })
    });
    plain(&heads, rows)
}

/// A Markdown table, its columns aligned in the source too; rows without numbers are named below it.
fn table(text: &Text) -> String {
    let escape = |cell: &String| cell.replace('|', "\\|").replace('\n', " ");
    let (mut rows, mut reasons) = (Vec::<Vec<String>>::new(), String::new());
    for row in &text.rows {
        match row {
            TextRow::Cells(cells) => rows.push(cells.iter().map(escape).collect()),
            TextRow::Reason(label, reason) => {
                reasons.push_str(&format!("\n{}: {}\n", escape(label), escape(reason)));
            }
        }
    }
    let widths: Vec<usize> = (0..text.heads.len())
        .map(|i| {
            let cells = rows.iter().map(|row| &row[i]).chain([&text.heads[i]]);
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let line = |cells: &[String]| {
        let padded: Vec<String> = cells
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:<width$}"))
            .collect();
        format!("| {} |\n", padded.join(" | "))
    };
    let rule: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
    if rows.is_empty() {
        return reasons.trim_start().to_owned();
    }
    let mut out = line(&text.heads) + &line(&rule);
    out.extend(rows.iter().map(|row| line(row)));
    out + &reasons
}
