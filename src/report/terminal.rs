//! The main tables for a terminal: as many columns as fit, the most important first.
//!
//! Invariant: no line of a table is wider than asked for, as long as the labels fit.

use comfy_table::{CellAlignment, ContentArrangement, Table, TableStyle};

use super::bars::cells;
use super::columns::{COLUMNS, Column, Text, TextRow, text};
use super::conventions::{data, protocol};
use super::drift::noise_floor;
use super::rows::Report;

/// Between two columns.
const GAP: usize = 2;

/// Where the terminal's width is not known.
const DEFAULT_WIDTH: usize = 100;

/// Characters in a line of the terminal.
pub fn width() -> usize {
    Table::new().width().map_or(DEFAULT_WIDTH, usize::from)
}

/// All groups at most `width` characters wide, all with the same columns.
pub fn results(report: &Report, width: usize) -> String {
    let columns = fit(report, width);
    let mut out = String::new();
    let mut said = String::new();
    for group in &report.groups {
        if !out.is_empty() {
            out.push('\n');
        }
        out.push_str(&format!("{}: {}\n", group.protocol.name, group.title));
        let sentence = protocol(group);
        if sentence != said {
            out.push_str(&wrapped(&sentence, width));
            said = sentence;
        }
        out.push_str(&wrapped(&data(group), width));
        if let Some(baseline) = group.baseline.as_ref().filter(|_| !group.is_asked()) {
            let line = format!(
                "Reference (f32 rows) PPL {:.4}; brackets hold a 95 % interval, paired where a difference.",
                baseline.reference_ppl
            );
            out.push_str(&wrapped(&line, width));
        }
        out.push_str(&table(text(group, &columns, |column| column.head), width));
        if let Some(line) = noise_floor(group) {
            out.push_str(&wrapped(&line, width));
        }
    }
    out + &bars(report, width)
}

/// The verdicts on what the experiment must show, a paragraph each.
fn bars(report: &Report, width: usize) -> String {
    if report.bars.is_empty() {
        return String::new();
    }
    let missed = report.bars.iter().filter(|b| b.is_missed()).count();
    let mut out = format!("\nBars: {missed} of {} missed\n", report.bars.len());
    for bar in &report.bars {
        let [
            strategy,
            protocol,
            data,
            metric,
            bound,
            measured,
            n,
            verdict,
        ] = cells(bar);
        let line = format!(
            "{strategy}, {protocol}, {data}: {metric} {bound}: {measured}, n = {n}: {verdict}"
        );
        out.push_str(&wrapped(&line, width));
    }
    out
}

fn table(text: Text, width: usize) -> String {
    let mut table = Table::new();
    table
        .load_style(TableStyle::new())
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(text.heads.clone());
    let mut reasons = String::new();
    for row in text.rows {
        match row {
            TextRow::Cells(cells) => {
                table.add_row(cells);
            }
            TextRow::Reason(label, reason) => {
                reasons.push_str(&wrapped(&format!("{label}: {reason}"), width))
            }
        }
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, GAP as u16));
        if column.index > 0 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    format!("{}\n{reasons}", table.trim_fmt())
}

/// The columns that fit in every group, chosen by rank, in table order.
fn fit(report: &Report, width: usize) -> Vec<Column> {
    let mut by_rank: Vec<usize> = (0..COLUMNS.len()).collect();
    by_rank.sort_by_key(|&i| COLUMNS[i].rank);
    let mut chosen: Vec<usize> = Vec::new();
    for &candidate in &by_rank {
        let mut more = chosen.clone();
        more.push(candidate);
        more.sort_unstable();
        let columns: Vec<Column> = more.iter().map(|&i| COLUMNS[i]).collect();
        let fits = |group| total_width(&text(group, &columns, |c| c.head)) <= width;
        if report.groups.iter().all(fits) {
            chosen = more;
        }
    }
    chosen.iter().map(|&i| COLUMNS[i]).collect()
}

fn total_width(text: &Text) -> usize {
    let widest = |i: usize| {
        let cells = text.rows.iter().filter_map(|row| match row {
            TextRow::Cells(cells) => Some(&cells[i]),
            TextRow::Reason(..) => None,
        });
        let widths = cells.chain([&text.heads[i]]).map(|c| c.chars().count());
        widths.max().unwrap_or(0)
    };
    let n = text.heads.len();
    (0..n).map(widest).sum::<usize>() + GAP * (n - 1)
}

/// The text in lines of at most `width` characters, words unbroken.
fn wrapped(text: &str, width: usize) -> String {
    let mut out = String::new();
    let mut used = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if used > 0 && used + 1 + length > width {
            out.push('\n');
            used = 0;
        }
        if used > 0 {
            out.push(' ');
            used += 1;
        }
        out.push_str(word);
        used += length;
    }
    out.push('\n');
    out
}
