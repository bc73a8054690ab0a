//! Tables in Markdown: results, bars, bytes by part, errors by position, times, pairs.
//!
//! Invariant: every table of results stands under its conventions.

use std::collections::BTreeSet;

use crate::eval::stats::{Comparison, Estimate};

use super::columns::{COLUMNS, Text, TextRow, p_holm, text};
use super::conventions::{own, shared, short, verdicts};
use super::drift::noise_floor_or_hint;
use super::format::{estimate, grouped, mean_count, signed_estimate, significant};
use super::measures::Memory;
use super::positions::{Bucket, MIN_SPAN, Positions};
use super::rows::{Group, Report, Row};

/// Main tables, one per group.
pub fn results(report: &Report) -> String {
    document(report, "results", &shared(report), |group, out| {
        for line in own(group) {
            out.push_str(&format!("- {line}\n"));
        }
        out.push('\n');
        out.push_str(&table(&text(group, COLUMNS, |column| column.head)));
        push_floor(group, out);
    })
}

/// The noise floor stands under a table of errors.
fn push_floor(group: &Group, out: &mut String) {
    if let Some(line) = noise_floor_or_hint(group) {
        out.push_str(&format!("\n{line}\n"));
    }
}

/// llama.cpp's columns.
pub fn drift(report: &Report) -> String {
    let intro = "The columns of llama.cpp's tables against the reference, a cache of f32 rows: Δp is the change of the \
                 target's probability, quantiles are over all scored tokens. As there, ± is one standard error and not an \
                 interval; here it is over items, whose tokens are alike, where llama.cpp takes tokens for independent.";
    document(report, "drift", &[intro.to_owned()], |group, out| {
        out.push_str(&table(&super::drift::text(group)));
        push_floor(group, out);
    })
}

/// Bytes by part.
pub fn memory(report: &Report) -> String {
    let intro = "Bytes per token of the live cache, shared parts and slack included, at the stated number of tokens. \
                 stored: all parts and what is parked; scratch: the largest working memory, bytes, not stored; \
                 marginal: what one more token costs, in bytes and in bits per value (effective bits).";
    document(
        report,
        "bytes by part",
        &[intro.to_owned()],
        |group, out| {
            out.push_str(&table(&memory_text(group)));
            if let Some(text) = track_text(group) {
                out.push_str(TRACK_INTRO);
                out.push_str(&table(&text));
            }
        },
    )
}

/// What the experiment must show; empty where it states nothing.
pub fn bars(report: &Report) -> String {
    if report.bars.is_empty() {
        return String::new();
    }
    let intro = "What the experiment must show. measured: the paired mean over documents or windows [its 95 % interval]; a \
                 quotient of two strategies and a time have no interval. A bar of perplexity is met when the interval's near end is within it, and says so; every other bar is met \
                 by the mean. Too few: the interval's half-width exceeds half of the bar (of a fraction whose best is 1, \
                 half of what the bar leaves to 1).";
    let mut out = title(report, "bars", &[intro.to_owned()]);
    let rows = report
        .bars
        .iter()
        .map(|bar| super::bars::cells(bar).to_vec());
    out.push('\n');
    out.push_str(&table(&plain(&super::bars::HEADS, rows)));
    out
}

/// Errors by position; empty where no span is long enough.
pub fn positions(report: &Report) -> String {
    let scores = report.groups.iter().flat_map(|g| &g.rows);
    if !scores
        .filter_map(Row::scores)
        .any(|s| s.positions.is_some())
    {
        return String::new();
    }
    let intro = format!(
        "Errors by the position of the query, counted from 0, over items that score more than {MIN_SPAN} tokens. per \
         doubling: change of the KLD with each doubling of the position, least squares over the buckets of each item, then the mean over items; brackets hold \
         a 95 % interval over the n items."
    );
    document(report, "errors by position", &[intro], |group, out| {
        let kld = |p: &Positions| p.kld_per_doubling;
        out.push_str(&table(&positions_text(group, kld, |b| b.kld)));
        out.push_str("\nThe same of ΔNLL, nats per token, paired:\n\n");
        let delta_nll = |p: &Positions| p.delta_nll_per_doubling;
        out.push_str(&table(&positions_text(group, delta_nll, |b| b.delta_nll)));
        push_floor(group, out);
    })
}

fn positions_text(
    group: &Group,
    per_doubling: fn(&Positions) -> Option<Estimate>,
    value: fn(&Bucket) -> Estimate,
) -> Text {
    let found: Vec<(&str, &Positions)> = group
        .rows
        .iter()
        .filter_map(|row| Some((row.label.as_str(), row.scores()?.positions.as_ref()?)))
        .collect();
    let buckets = found.first().map_or(&[][..], |(_, p)| &p.buckets);
    let range = |b: &Bucket| {
        let last = b.until - 1;
        format!("{} … {}", grouped(b.from as u64), grouped(last as u64))
    };
    let heads = ["strategy", "n", "per doubling"]
        .map(str::to_owned)
        .into_iter()
        .chain(buckets.iter().map(range))
        .collect();
    let rows = found.iter().map(|(label, positions)| {
        let signed = |e: Estimate| signed_estimate(&e);
        let slope = per_doubling(positions);
        let n = slope.map_or_else(String::new, |s| s.n.to_string());
        let slope = slope.map_or_else(String::new, signed);
        let cell = |bucket: &Bucket| signed(value(bucket));
        let ends = [(*label).to_owned(), n, slope];
        TextRow::Cells(
            ends.into_iter()
                .chain(positions.buckets.iter().map(cell))
                .collect(),
        )
    });
    Text {
        heads,
        rows: rows.collect(),
    }
}

/// Times at each depth.
pub fn latency(report: &Report) -> String {
    let intro = "Wall times in one process; brackets hold a 95 % interval over items, or over steps where one item was \
                 timed. `tgN @ dD`: N decoded tokens with D in the cache.";
    document(report, "times", &[intro.to_owned()], |group, out| {
        out.push_str(&table(&latency_text(group)));
    })
}

/// All pairs of strategies.
pub fn pairs(report: &Report) -> String {
    let intro = format!(
        "NLL of a minus NLL of b per token on the same tokens, as a change of perplexity; brackets hold a 95 % interval. p is \
         that of no difference, p (Holm) corrected over all pairs of the table, Wilcoxon that of signed ranks of the items' \
         means. {}",
        verdicts(),
    );
    document(report, "pairs of strategies", &[intro], |group, out| {
        if group.pairs.iter().any(|pair| pair.answers.is_some()) {
            out.push_str(ANSWERS_INTRO);
            out.push_str(&table(&answers_text(group)));
        } else {
            out.push_str(&table(&likelihoods_text(group)));
        }
    })
}

fn likelihoods_text(group: &Group) -> Text {
    let heads = [
        "a", "b", "ΔPPL %", "ΔNLL", "p", "p (Holm)", "Wilcoxon", "n", "a is",
    ];
    let rows = group.pairs.iter().map(|pair| {
        let paired = &pair.paired;
        vec![
            pair.a.clone(),
            pair.b.clone(),
            signed_estimate(&paired.ppl_change_percent()),
            signed_estimate(paired.delta()),
            p(&paired.comparison),
            p_holm(&paired.judged),
            significant(paired.wilcoxon.p, 2),
            paired.delta().n.to_string(),
            paired.judged.to_string(),
        ]
    });
    plain(&heads, rows)
}

const ANSWERS_INTRO: &str = "Right answers of a less those of b, percentage points. p is McNemar's, exact, where each \
    context has one question, else that of the difference over contexts, unless single questions leave more open. gold ΔNLL: of the \
    right option, a's less b's, nats per token; it has no part in the verdict.\n\n";

fn answers_text(group: &Group) -> Text {
    let heads = [
        "a",
        "b",
        "Δacc pp",
        "a alone/b alone",
        "p",
        "p (Holm)",
        "n",
        "gold ΔNLL",
        "a is",
    ];
    let rows = group.pairs.iter().filter_map(|pair| {
        let answers = pair.answers.as_ref()?;
        Some(vec![
            pair.a.clone(),
            pair.b.clone(),
            signed_estimate(&answers.comparison.delta.scaled(100.0)),
            format!("{}/{}", answers.n_only_a, answers.n_only_b),
            p(&answers.comparison),
            p_holm(&answers.judged),
            answers.n_questions.to_string(),
            signed_estimate(&answers.gold_delta_nll),
            answers.judged.to_string(),
        ])
    });
    plain(&heads, rows)
}

fn p(comparison: &Comparison) -> String {
    let p = comparison.p;
    p.map_or_else(String::new, |p| significant(p, 2))
}

/// Title, provenance, what all sections share, then a section per group.
pub(super) fn document(
    report: &Report,
    what: &str,
    intro: &[String],
    section: impl Fn(&Group, &mut String),
) -> String {
    let mut out = title(report, what, intro);
    for group in &report.groups {
        out.push_str(&format!(
            "\n## {}: {}\n\n",
            group.protocol.name, group.title
        ));
        section(group, &mut out);
    }
    out
}

/// What the file is, of which run.
pub(super) fn title(report: &Report, what: &str, intro: &[String]) -> String {
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
    out
}

pub(super) fn plain(heads: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Text {
    Text {
        heads: heads.iter().map(|h| (*h).to_owned()).collect(),
        rows: rows.map(TextRow::Cells).collect(),
    }
}

fn memory_text(group: &Group) -> Text {
    let mut heads = vec![
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
        "effective bits",
        "kept_fraction",
        "scratch bytes",
    ];
    let memories = || group.rows.iter().filter_map(|row| row.scores()?.memory);
    let any_rebuilt = memories().any(|m| m.rebuilt().is_some());
    if any_rebuilt {
        heads.extend(["pages rebuilt", "rebuild error %"]);
    }
    let rows = group.rows.iter().filter_map(|row| {
        let memory = row.scores()?.memory?;
        let parts = &memory.parts;
        let per_token = |bytes: u64| significant(memory.per_token(bytes), 4);
        let mut cells = vec![
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
                .marginal_bits_per_value
                .map_or_else(String::new, |bits| format!("{bits:.3}")),
            memory
                .kept_fraction()
                .map_or_else(String::new, |kept| format!("{kept:.3}")),
            grouped(parts.scratch_bytes),
        ];
        if any_rebuilt {
            let rebuilt = memory.rebuilt();
            let (n, error) = rebuilt.unwrap_or_default();
            cells.push(mean_count(n));
            cells.push(rebuilt.map_or_else(String::new, |_| significant(100.0 * error, 3)));
        }
        Some(cells)
    });
    plain(&heads, rows)
}

const TRACK_INTRO: &str = "\nAlong what is scored, on the first item of each text: bytes per token (bytes_vs_f16) \
    at each length, its least and greatest. memory_track.csv has every length and part.\n\n";

/// Lengths shown in a table; a file of its own has all.
const MAX_LENGTHS: usize = 17;

/// Bytes along what is scored; `None` where nobody asked for them.
fn track_text(group: &Group) -> Option<Text> {
    let tracks: Vec<(&str, &[Memory])> = group
        .rows
        .iter()
        .filter_map(|row| Some((row.label.as_str(), &row.scores()?.memory_track[..])))
        .filter(|(_, track)| !track.is_empty())
        .collect();
    let length = |m: &Memory| m.mean_tokens() as usize;
    let lengths: BTreeSet<usize> = tracks
        .iter()
        .flat_map(|(_, t)| t.iter().map(length))
        .collect();
    let lengths: Vec<usize> = lengths.into_iter().collect();
    let step = lengths
        .len()
        .saturating_sub(1)
        .div_ceil(MAX_LENGTHS - 1)
        .max(1);
    let shown: Vec<usize> = lengths.iter().rev().step_by(step).rev().copied().collect();
    let heads: Vec<String> = ["strategy", "least", "greatest"]
        .map(str::to_owned)
        .into_iter()
        .chain(shown.iter().map(|n| format!("at {}", grouped(*n as u64))))
        .collect();
    let rows = tracks.iter().map(|(label, track)| {
        let by_size = |a: &&Memory, b: &&Memory| a.bytes_vs_f16().total_cmp(&b.bytes_vs_f16());
        let extreme = |m: Option<&Memory>| {
            m.map_or_else(String::new, |m| {
                format!("{:.4} at {}", m.bytes_vs_f16(), grouped(length(m) as u64))
            })
        };
        let at = |n: &usize| {
            let here = track.iter().find(|m| length(m) == *n);
            here.map_or_else(String::new, |m| {
                format!("{:.0} ({:.4})", m.bytes_per_token(), m.bytes_vs_f16())
            })
        };
        let ends = [
            (*label).to_owned(),
            extreme(track.iter().min_by(by_size)),
            extreme(track.iter().max_by(by_size)),
        ];
        TextRow::Cells(ends.into_iter().chain(shown.iter().map(at)).collect())
    });
    (!tracks.is_empty()).then(|| Text {
        heads,
        rows: rows.collect(),
    })
}

fn latency_text(group: &Group) -> Text {
    let heads = [
        "strategy",
        "test",
        "ms/token",
        "median ms",
        "p95 ms",
        "CPU ms/token",
        "attention ms",
        "t/s",
        "store + compress ms",
        "repetition ms",
    ];
    let rows = group.rows.iter().flat_map(|row| {
        let latency = row.scores().map_or(&[][..], |scores| &scores.latency);
        latency.iter().map(|l| {
            vec![
                row.label.clone(),
                format!("tg{} @ d{}", l.n_steps, l.depth),
                estimate(&l.ms_per_token),
                significant(l.median_ms, 3),
                significant(l.p95_ms, 3),
                significant(l.cpu_ms_per_token, 3),
                significant(l.attend_ms_per_token, 3),
                significant(l.tokens_per_s(), 4),
                significant(l.compress_ms, 3),
                l.repetition_ms
                    .map_or_else(String::new, |ms| significant(ms, 3)),
            ]
        })
    });
    plain(&heads, rows)
}

/// A Markdown table, its columns aligned in the source too; rows without numbers are named below it.
pub(super) fn table(text: &Text) -> String {
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
