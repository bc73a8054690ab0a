//! The columns of the main table, once for Markdown, LaTeX and the terminal.
//!
//! Invariants: adding a column is adding one entry; a column that is empty in all rows is left out; the names are those
//! that readers of llama.cpp's tables know (bits per value, PPL, KLD, RMS Δp, Same top p), a size is never a bare ratio.

use crate::cache::stage::KeyForm;
use crate::cache::strategy::{StageSpec, Strategy};
use crate::eval::stats::{Estimate, Judged};

use super::accuracy::Accuracy;
use super::format::{estimate, mean_count, signed_estimate, significant};
use super::rows::{Group, Row, Scores};
use super::texts::{Sides, Texts};

/// One column.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    /// Heading in Markdown and on the terminal.
    pub head: &'static str,
    /// Heading in LaTeX; empty where the column is not for papers.
    pub tex: &'static str,
    /// The order in which columns are chosen for a narrow terminal.
    pub rank: u8,
    /// The cell's text.
    pub text: fn(&Row, &Scores) -> String,
}

/// All columns after the strategy's label, in order.
pub static COLUMNS: &[Column] = &[
    Column {
        head: "stages K/V",
        tex: "",
        rank: 9,
        text: |row, _| stages(&row.strategy),
    },
    Column {
        head: "keys/tail/sinks",
        tex: "",
        rank: 10,
        text: |row, _| {
            let strategy = &row.strategy;
            format!(
                "{}/{}/{}",
                key_form(strategy.keys),
                strategy.tail,
                strategy.sinks
            )
        },
    },
    Column {
        head: "bits/value",
        tex: "bits/value",
        rank: 1,
        text: |_, s| memory(s, |m| format!("{:.2}", m.bits_per_value())),
    },
    Column {
        head: "bytes/token",
        tex: "bytes/token",
        rank: 6,
        text: |_, s| memory(s, |m| format!("{:.0}", m.bytes_per_token())),
    },
    Column {
        head: "bytes_vs_f16",
        tex: "",
        rank: 8,
        text: |_, s| memory(s, |m| format!("{:.3}", m.bytes_vs_f16())),
    },
    Column {
        head: "bytes_vs_fp8",
        tex: "",
        rank: 8,
        text: |_, s| memory(s, |m| format!("{:.3}", m.bytes_vs_fp8())),
    },
    Column {
        head: "effective bits",
        tex: "effective bits",
        rank: 16,
        text: |_, s| {
            let bits = s.memory.and_then(|m| m.marginal_bits_per_value);
            bits.map_or_else(String::new, |bits| format!("{bits:.3}"))
        },
    },
    Column {
        head: "kept_fraction",
        tex: "kept fraction",
        rank: 13,
        text: |_, s| {
            let kept = s.memory.as_ref().and_then(|m| m.kept_fraction());
            kept.filter(|&fraction| fraction < 1.0)
                .map_or_else(String::new, |fraction| format!("{fraction:.3}"))
        },
    },
    Column {
        head: "tokens by precision",
        tex: "",
        rank: 3,
        text: |row, s| memory_with(s, |m| precision(&row.strategy, m)),
    },
    Column {
        head: "pages rebuilt (error %)",
        tex: "",
        rank: 12,
        text: |_, s| {
            memory(s, |m| match m.rebuilt() {
                Some((n, error)) => {
                    format!("{} ({})", mean_count(n), significant(100.0 * error, 3))
                }
                None => String::new(),
            })
        },
    },
    Column {
        head: "n",
        tex: "$n$",
        rank: 11,
        text: |_, s| match s.n_skipped {
            0 => s.n_items.to_string(),
            skipped => format!("{} ({skipped} skipped)", s.n_items),
        },
    },
    Column {
        head: "acc %",
        tex: r"acc (\%)",
        rank: 0,
        text: |_, s| of_answers(s, |a| percent(&a.acc.value)),
    },
    Column {
        head: "full acc %",
        tex: r"full acc (\%)",
        rank: 2,
        text: |_, s| of_answers(s, |a| format!("{:.1}", 100.0 * a.acc.reference.value)),
    },
    Column {
        head: "Δacc pp",
        tex: r"$\Delta$acc (pp)",
        rank: 0,
        text: |_, s| of_answers(s, |a| points(&a.acc.delta)),
    },
    Column {
        head: "acc_norm %",
        tex: r"acc\_norm (\%)",
        rank: 2,
        text: |_, s| {
            of_answers(s, |a| {
                let rate = a.acc_norm.map(|r| percent(&r.value));
                rate.unwrap_or_default()
            })
        },
    },
    Column {
        head: "lost/gained",
        tex: "lost/gained",
        rank: 3,
        text: |_, s| {
            of_answers(s, |a| {
                format!("{}/{}", a.paired.n_only_b, a.paired.n_only_a)
            })
        },
    },
    Column {
        head: "same choice %",
        tex: r"same choice (\%)",
        rank: 5,
        text: |_, s| of_answers(s, |a| format!("{:.1}", 100.0 * a.same_choice.value)),
    },
    Column {
        head: "kept of right %",
        tex: r"kept of right (\%)",
        rank: 4,
        text: |_, s| of_answers(s, |a| a.kept.map(|k| percent(&k)).unwrap_or_default()),
    },
    Column {
        head: "gold ΔNLL",
        tex: r"gold $\Delta$NLL",
        rank: 1,
        text: |_, s| of_answers(s, |a| signed_estimate(&a.paired.gold_delta_nll)),
    },
    Column {
        head: "generated %",
        tex: r"generated (\%)",
        rank: 3,
        text: |_, s| {
            of_answers(s, |a| {
                let rate = a.generated.map(|r| percent(&r.value));
                rate.unwrap_or_default()
            })
        },
    },
    Column {
        head: "full generated %",
        tex: r"full generated (\%)",
        rank: 6,
        text: |_, s| {
            of_answers(s, |a| {
                let rate = a
                    .generated
                    .map(|r| format!("{:.1}", 100.0 * r.reference.value));
                rate.unwrap_or_default()
            })
        },
    },
    Column {
        head: "same tokens",
        tex: "same tokens",
        rank: 0,
        text: |_, s| of_texts(s, |t| estimate(&t.same_tokens)),
    },
    Column {
        head: "identical %",
        tex: r"identical (\%)",
        rank: 2,
        text: |_, s| of_texts(s, |t| format!("{:.0}", 100.0 * t.identical.value)),
    },
    Column {
        head: "distinct-2",
        tex: "distinct-2",
        rank: 1,
        text: |_, s| of_texts(s, |t| against(&t.distinct)),
    },
    Column {
        head: "repeated",
        tex: "repeated",
        rank: 2,
        text: |_, s| of_texts(s, |t| against(&t.repeated)),
    },
    Column {
        head: "NLL full",
        tex: "NLL full",
        rank: 1,
        text: |_, s| of_texts(s, |t| against(&t.nll_full)),
    },
    Column {
        head: "length",
        tex: "length",
        rank: 4,
        text: |_, s| of_texts(s, |t| against(&t.length)),
    },
    Column {
        head: "PPL",
        tex: "PPL",
        rank: 2,
        text: |_, s| of_text(s, |s| format!("{:.4}", s.quality.ppl())),
    },
    Column {
        head: "bits/byte",
        tex: "",
        rank: 15,
        text: |_, s| of_text(s, |s| significant(s.quality.bits_per_byte, 4)),
    },
    Column {
        head: "ΔPPL %",
        tex: r"$\Delta$PPL (\%)",
        rank: 0,
        text: |_, s| {
            of_text(s, |s| {
                signed_estimate(&s.quality.paired.ppl_change_percent())
            })
        },
    },
    Column {
        head: "KLD",
        tex: "KLD",
        rank: 0,
        text: |_, s| estimate(&s.quality.kld),
    },
    Column {
        head: "KLD p99",
        tex: "KLD p99",
        rank: 7,
        text: |_, s| significant(s.quality.kld_p99, 2),
    },
    Column {
        head: "Same top p %",
        tex: r"same top (\%)",
        rank: 3,
        text: |_, s| estimate(&s.quality.same_top.scaled(100.0)),
    },
    Column {
        head: "RMS Δp %",
        tex: r"RMS $\Delta p$ (\%)",
        rank: 12,
        text: |_, s| estimate(&s.quality.rms_delta_p.scaled(100.0)),
    },
    Column {
        head: "context benefit kept %",
        tex: r"context benefit kept (\%)",
        rank: 14,
        text: |_, s| {
            let kept = s.quality.context_benefit_kept;
            kept.map_or_else(String::new, |e| estimate(&e.scaled(100.0)))
        },
    },
    Column {
        head: "ms/token",
        tex: "ms/token",
        rank: 4,
        text: |_, s| {
            let last = s.latency.last();
            last.map_or_else(String::new, |l| estimate(&l.ms_per_token))
        },
    },
    Column {
        head: "p (Holm)",
        tex: "$p$ (Holm)",
        rank: 17,
        text: |_, s| p_holm(s.judged()),
    },
    Column {
        head: "verdict",
        tex: "",
        rank: 5,
        text: |_, s| s.judged().to_string(),
    },
];

/// A table of text: headings and, per row, the label, the cells and what stands instead of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// Headings, the label's first.
    pub heads: Vec<String>,
    /// Rows of as many cells; a row without numbers has a label and a reason.
    pub rows: Vec<TextRow>,
}

/// One row of a [`Text`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TextRow {
    /// Label and cells.
    Cells(Vec<String>),
    /// Label, and why there are no numbers.
    Reason(String, String),
}

/// The main table of a group in some columns, those left out that are empty everywhere.
pub fn text(group: &Group, columns: &[Column], head: fn(&Column) -> &'static str) -> Text {
    let filled: Vec<&Column> = columns
        .iter()
        .filter(|column| {
            group
                .rows
                .iter()
                .filter_map(|row| Some((row, row.scores()?)))
                .any(|(row, scores)| !(column.text)(row, scores).is_empty())
        })
        .collect();
    let heads = std::iter::once("strategy")
        .chain(filled.iter().map(|column| head(column)))
        .map(str::to_owned)
        .collect();
    let rows = group
        .rows
        .iter()
        .map(|row| match row.scores() {
            None => TextRow::Reason(row.label.clone(), row.reason()),
            Some(scores) => TextRow::Cells(
                std::iter::once(row.label.clone())
                    .chain(filled.iter().map(|column| (column.text)(row, scores)))
                    .collect(),
            ),
        })
        .collect();
    Text { heads, rows }
}

/// What is said of texts alone: perplexity over the options of questions would mean nothing.
fn of_text(scores: &Scores, f: fn(&Scores) -> String) -> String {
    match (&scores.accuracy, &scores.texts) {
        (None, None) => f(scores),
        _ => String::new(),
    }
}

fn of_answers(scores: &Scores, f: fn(&Accuracy) -> String) -> String {
    scores.accuracy.as_ref().map_or_else(String::new, f)
}

fn of_texts(scores: &Scores, f: fn(&Texts) -> String) -> String {
    scores.texts.as_ref().map_or_else(String::new, f)
}

/// The strategy's value, and by how much it is more than the reference's.
fn against(sides: &Sides) -> String {
    let delta = signed_estimate(&sides.delta);
    format!("{} ({delta})", significant(sides.value.value, 3))
}

fn percent(rate: &Estimate) -> String {
    estimate(&rate.scaled(100.0))
}

fn points(delta: &Estimate) -> String {
    signed_estimate(&delta.scaled(100.0))
}

fn memory(scores: &Scores, f: fn(&super::measures::Memory) -> String) -> String {
    scores.memory.as_ref().map_or_else(String::new, f)
}

fn memory_with(scores: &Scores, f: impl Fn(&super::measures::Memory) -> String) -> String {
    scores.memory.as_ref().map_or_else(String::new, f)
}

/// The corrected p to two digits; empty where there is none.
pub fn p_holm(judged: &Judged) -> String {
    let p = judged.p_holm;
    p.map_or_else(String::new, |p| significant(p, 2))
}

/// How many tokens of an item stand at which precision, the most bits first: `int8 256, int4 640, int2 128, exact 4`;
/// empty for a strategy without a budget.
fn precision(strategy: &Strategy, memory: &super::measures::Memory) -> String {
    if strategy.budget.is_none() || memory.parts.rows_seen == 0 {
        return String::new();
    }
    let tokens_per_row = memory.mean_tokens() / memory.parts.rows_seen as f64;
    let coded = memory.parts.rows_at_level;
    let exact = memory.parts.rows_live - coded.iter().sum::<u64>().min(memory.parts.rows_live);
    let names = strategy.levels().map(|(k, v)| {
        if k == v {
            k.name.clone()
        } else {
            format!("{}/{}", k.name, v.name)
        }
    });
    let counts = names.zip(coded).chain([("exact".to_owned(), exact)]);
    let counts = counts.map(|(name, rows)| format!("{name} {:.0}", rows as f64 * tokens_per_row));
    counts.collect::<Vec<_>>().join(", ")
}

/// A key form by its TOML name.
pub fn key_form(keys: KeyForm) -> &'static str {
    match keys {
        KeyForm::PostRope => "post_rope",
        KeyForm::PreRope => "pre_rope",
    }
}

/// K's or V's stages, outermost first: `hadamard+q4_0`.
pub fn side(project: &[StageSpec], encode: &StageSpec) -> String {
    let mut names: Vec<&str> = project.iter().map(|s| s.name.as_str()).collect();
    names.push(&encode.name);
    names.join("+")
}

/// All stages in the order in which data meets them: `window, hadamard+q4_0/q4_0, zstd, file`.
pub fn stages(strategy: &Strategy) -> String {
    let k = side(&strategy.project_k, &strategy.encode_k);
    let v = side(&strategy.project_v, &strategy.encode_v);
    let name = |stage: &Option<StageSpec>| stage.as_ref().map(|s| s.name.clone());
    [
        name(&strategy.retain),
        Some(format!("{k}/{v}")),
        name(&strategy.pack),
        name(&strategy.place),
    ]
    .into_iter()
    .flatten()
    .collect::<Vec<_>>()
    .join(", ")
}
