//! Tables as CSV (RFC 4180, `\n` ends), for programs: every field of every row at full precision.
//!
//! Invariants: one fixed set of fields per file; an absent number is an empty field, never 0 or NaN; each row names the
//! cells whose raw records it is made of.

use crate::cache::strategy::ExactFormat;
use crate::eval::stats::{Estimate, Paired};

use super::columns::{key_form, side, stages};
use super::measures::{Latency, Memory, Repetition};
use super::rows::{Group, Report, Row, Scores};

/// A field: its name and its text.
type Field<T> = (&'static str, fn(&T) -> String);
/// A field of a row in its place.
type PlaceField = (&'static str, fn(&At<'_>) -> String);

/// Where a row stands.
struct At<'a> {
    report: &'a Report,
    group: &'a Group,
    row: &'a Row,
}

static PLACE: &[PlaceField] = &[
    ("experiment", |at| at.report.header.experiment.clone()),
    ("run_id", |at| at.report.run_id.clone()),
    ("model", |at| at.report.header.model.name.clone()),
    ("model_sha256", |at| at.report.header.model.sha256.clone()),
    ("protocol", |at| at.group.protocol.name.clone()),
    ("data", |at| at.group.title.clone()),
    ("strategy", |at| at.row.label.clone()),
    ("cells", |at| at.row.cells.join(" ")),
];

static STRATEGY: &[PlaceField] = &[
    ("stages", |at| stages(&at.row.strategy)),
    ("k", |at| {
        side(&at.row.strategy.project_k, &at.row.strategy.encode_k)
    }),
    ("v", |at| {
        side(&at.row.strategy.project_v, &at.row.strategy.encode_v)
    }),
    ("keys", |at| key_form(at.row.strategy.keys).to_owned()),
    ("tail", |at| at.row.strategy.tail.to_string()),
    ("sinks", |at| at.row.strategy.sinks.to_string()),
    ("exact", |at| match at.row.strategy.exact {
        ExactFormat::F16 => "f16".to_owned(),
        ExactFormat::F32 => "f32".to_owned(),
    }),
    ("reason", |at| at.row.reason()),
    ("reference_ppl", |at| {
        at.group
            .baseline
            .map_or_else(String::new, |b| number(b.reference_ppl))
    }),
    ("reference_bits_per_byte", |at| {
        at.group
            .baseline
            .map_or_else(String::new, |b| number(b.reference_bits_per_byte))
    }),
    ("floor_ppl", |at| {
        optional(at.group.baseline.and_then(|b| b.floor_ppl))
    }),
];

static SCORES: &[Field<Scores>] = &[
    ("n_items", |s| s.n_items.to_string()),
    ("n_skipped", |s| s.n_skipped.to_string()),
    ("n_tokens_scored", |s| s.n_scored.to_string()),
    ("ppl", |s| number(s.quality.ppl())),
    ("bits_per_byte", |s| number(s.quality.bits_per_byte)),
    ("nll", |s| number(s.quality.nll.value)),
    ("nll_se", |s| optional(s.quality.nll.se)),
    ("delta_nll", |s| number(s.quality.paired.delta.value)),
    ("delta_nll_low", |s| low(&s.quality.paired.delta)),
    ("delta_nll_high", |s| high(&s.quality.paired.delta)),
    ("delta_ppl_percent", |s| {
        number(s.quality.paired.ppl_change_percent())
    }),
    ("delta_ppl_percent_low", |s| ppl_change(&s.quality.paired).0),
    ("delta_ppl_percent_high", |s| {
        ppl_change(&s.quality.paired).1
    }),
    ("p", |s| optional(s.quality.paired.p)),
    ("verdict", |s| s.quality.paired.verdict.to_string()),
    ("kld", |s| number(s.quality.kld.value)),
    ("kld_low", |s| low(&s.quality.kld)),
    ("kld_high", |s| high(&s.quality.kld)),
    ("kld_median", |s| number(s.quality.kld_median)),
    ("kld_p99", |s| number(s.quality.kld_p99)),
    ("same_top", |s| number(s.quality.same_top.value)),
    ("same_top_low", |s| low(&s.quality.same_top)),
    ("same_top_high", |s| high(&s.quality.same_top)),
    ("mean_delta_p", |s| number(s.quality.mean_delta_p.value)),
    ("rms_delta_p", |s| number(s.quality.rms_delta_p.value)),
    ("rms_delta_p_se", |s| optional(s.quality.rms_delta_p.se)),
    ("context_benefit_kept", |s| {
        optional(s.quality.context_benefit_kept.map(|e| e.value))
    }),
    ("context_benefit_kept_se", |s| {
        optional(s.quality.context_benefit_kept.and_then(|e| e.se))
    }),
    ("bits_per_value", |s| of_memory(s, Memory::bits_per_value)),
    ("bytes_per_token", |s| of_memory(s, Memory::bytes_per_token)),
    ("bytes_vs_f16", |s| of_memory(s, Memory::bytes_vs_f16)),
    ("kept_fraction", |s| {
        optional(s.memory.and_then(|m| m.kept_fraction()))
    }),
    ("latency_depth", |s| {
        s.latency
            .last()
            .map_or_else(String::new, |l| l.depth.to_string())
    }),
    ("ms_per_token", |s| {
        optional(s.latency.last().map(|l| l.ms_per_token.value))
    }),
    ("ms_per_token_se", |s| {
        optional(s.latency.last().and_then(|l| l.ms_per_token.se))
    }),
];

static MEMORY: &[Field<Memory>] = &[
    ("n_items", |m| m.n_items.to_string()),
    ("n_tokens", |m| m.n_tokens.to_string()),
    ("payload_bytes", |m| m.parts.payload_bytes.to_string()),
    ("scale_bytes", |m| m.parts.scale_bytes.to_string()),
    ("index_bytes", |m| m.parts.index_bytes.to_string()),
    ("page_table_bytes", |m| m.parts.page_table_bytes.to_string()),
    ("table_bytes", |m| m.parts.table_bytes.to_string()),
    ("projection_bytes", |m| m.parts.projection_bytes.to_string()),
    ("exact_bytes", |m| m.parts.exact_bytes.to_string()),
    ("slack_bytes", |m| m.parts.slack_bytes.to_string()),
    ("backing_bytes", |m| m.parts.backing_bytes.to_string()),
    ("resident_bytes", |m| m.parts.resident_bytes().to_string()),
    ("stored_bytes", |m| m.parts.stored_bytes().to_string()),
    ("scratch_peak_bytes", |m| m.parts.scratch_bytes.to_string()),
    ("rows_live", |m| m.parts.rows_live.to_string()),
    ("rows_seen", |m| m.parts.rows_seen.to_string()),
    ("f16_bytes", |m| m.f16_bytes.to_string()),
    ("marginal_bytes_per_token", |m| {
        optional(m.marginal_bytes_per_token)
    }),
    ("bytes_vs_f16", |m| number(m.bytes_vs_f16())),
];

static LATENCY: &[Field<Latency>] = &[
    ("depth", |l| l.depth.to_string()),
    ("n_steps", |l| l.n_steps.to_string()),
    ("ms_per_token", |l| number(l.ms_per_token.value)),
    ("ms_per_token_low", |l| low(&l.ms_per_token)),
    ("ms_per_token_high", |l| high(&l.ms_per_token)),
    ("interval_over", |l| match l.over {
        Repetition::Items => "items".to_owned(),
        Repetition::Steps => "steps".to_owned(),
    }),
    ("median_ms", |l| number(l.median_ms)),
    ("p95_ms", |l| number(l.p95_ms)),
    ("cpu_ms_per_token", |l| number(l.cpu_ms_per_token)),
    ("tokens_per_s", |l| number(l.tokens_per_s())),
    ("store_and_compress_ms", |l| number(l.compress_ms)),
];

static PAIR: &[Field<Paired>] = &[
    ("n_items", |p| p.delta.n.to_string()),
    ("delta_nll", |p| number(p.delta.value)),
    ("delta_nll_low", |p| low(&p.delta)),
    ("delta_nll_high", |p| high(&p.delta)),
    ("delta_ppl_percent", |p| number(p.ppl_change_percent())),
    ("p", |p| optional(p.p)),
    ("verdict", |p| p.verdict.to_string()),
];

/// Main table: every group and row, scored or not.
pub fn results(report: &Report) -> String {
    let mut out = Lines::new(names(PLACE).chain(names(STRATEGY)).chain(names(SCORES)));
    for at in rows(report) {
        let place = values(PLACE, |text| text(&at));
        let strategy = values(STRATEGY, |text| text(&at));
        let scores = at.row.scores();
        let scores = values(SCORES, |text| scores.map_or_else(String::new, text));
        out.push(place.chain(strategy).chain(scores));
    }
    out.0
}

/// The main table as a JSON array of objects with the same fields; an absent value is null.
pub fn results_json(report: &Report) -> String {
    let rows: Vec<serde_json::Value> = rows(report)
        .map(|at| {
            let texts = PLACE.iter().map(|(name, text)| (*name, text(&at).into()));
            let scores = at.row.scores();
            let measured = STRATEGY
                .iter()
                .map(|(name, text)| (*name, text(&at)))
                .chain(
                    SCORES
                        .iter()
                        .map(|(name, text)| (*name, scores.map_or_else(String::new, text))),
                );
            let values = measured.map(|(name, text)| (name, json_value(text)));
            texts
                .chain(values)
                .map(|(name, value)| (name.to_owned(), value))
                .collect()
        })
        .collect();
    serde_json::Value::from(rows).to_string()
}

fn json_value(text: String) -> serde_json::Value {
    match text.parse::<f64>() {
        _ if text.is_empty() => serde_json::Value::Null,
        Ok(number) if number.is_finite() => number.into(),
        _ => text.into(),
    }
}

/// Bytes by part, summed over the items of each row.
pub fn memory(report: &Report) -> String {
    let mut out = Lines::new(names(PLACE).chain(names(MEMORY)));
    for at in rows(report) {
        if let Some(memory) = at.row.scores().and_then(|s| s.memory.as_ref()) {
            let place = values(PLACE, |text| text(&at));
            out.push(place.chain(values(MEMORY, |text| text(memory))));
        }
    }
    out.0
}

/// Times, a line per row and depth.
pub fn latency(report: &Report) -> String {
    let mut out = Lines::new(names(PLACE).chain(names(LATENCY)));
    for at in rows(report) {
        for latency in at.row.scores().map_or(&[][..], |s| &s.latency) {
            let place = values(PLACE, |text| text(&at));
            out.push(place.chain(values(LATENCY, |text| text(latency))));
        }
    }
    out.0
}

/// All pairs of strategies.
pub fn pairs(report: &Report) -> String {
    let heads = ["protocol", "data", "a", "b"].map(str::to_owned);
    let mut out = Lines::new(heads.into_iter().chain(names(PAIR)));
    for group in &report.groups {
        for pair in &group.pairs {
            let place = [&group.protocol.name, &group.title, &pair.a, &pair.b].map(Clone::clone);
            out.push(
                place
                    .into_iter()
                    .chain(values(PAIR, |text| text(&pair.paired))),
            );
        }
    }
    out.0
}

fn rows(report: &Report) -> impl Iterator<Item = At<'_>> {
    report
        .groups
        .iter()
        .flat_map(move |group| group.rows.iter().map(move |row| At { report, group, row }))
}

fn names<F>(fields: &[(&'static str, F)]) -> impl Iterator<Item = String> {
    fields.iter().map(|(name, _)| (*name).to_owned())
}

fn values<F>(
    fields: &[(&'static str, F)],
    apply: impl Fn(&F) -> String,
) -> impl Iterator<Item = String> {
    fields.iter().map(move |(_, text)| apply(text))
}

fn number(value: f64) -> String {
    if value.is_finite() {
        // Adding 0 turns -0 into 0.
        (value + 0.0).to_string()
    } else {
        String::new()
    }
}

fn optional(value: Option<f64>) -> String {
    value.map_or_else(String::new, number)
}

fn low(estimate: &Estimate) -> String {
    optional(estimate.interval().map(|(low, _)| low))
}

fn high(estimate: &Estimate) -> String {
    optional(estimate.interval().map(|(_, high)| high))
}

fn ppl_change(paired: &Paired) -> (String, String) {
    let interval = paired.ppl_change_interval_percent();
    (
        optional(interval.map(|i| i.0)),
        optional(interval.map(|i| i.1)),
    )
}

fn of_memory(scores: &Scores, f: fn(&Memory) -> f64) -> String {
    optional(scores.memory.as_ref().map(f))
}

/// Lines of comma-separated, quoted fields.
struct Lines(String);

impl Lines {
    fn new(heads: impl Iterator<Item = String>) -> Self {
        let mut lines = Self(String::new());
        lines.push(heads);
        lines
    }

    fn push(&mut self, fields: impl Iterator<Item = String>) {
        let quoted: Vec<String> = fields.map(|field| quote(&field)).collect();
        self.0.push_str(&quoted.join(","));
        self.0.push('\n');
    }
}

fn quote(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_quoted_where_they_must_be() {
        assert_eq!(quote("plain text"), "plain text");
        assert_eq!(quote("a,b"), "\"a,b\"");
        assert_eq!(quote("say \"x\"\n"), "\"say \"\"x\"\"\n\"");
    }

    #[test]
    fn numbers_keep_every_digit_and_are_never_nan() {
        assert_eq!(number(0.1 + 0.2), "0.30000000000000004");
        assert_eq!(number(-0.0), "0");
        assert_eq!(number(f64::NAN), "");
        assert_eq!(optional(None), "");
    }
}
