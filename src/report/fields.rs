//! The fields of the tables for programs: names, and how each is written.
//!
//! Invariants: an absent number is an empty text, never 0 or NaN; a number keeps every digit; names never change their
//! meaning.

use crate::cache::strategy::ExactFormat;
use crate::eval::bars::Bound;
use crate::eval::stats::{Comparison, Estimate, Judged, Over};

use super::accuracy::Accuracy;
use super::bars::BarRow;
use super::columns::{key_form, side, stages};
use super::matches::PairedAnswers;
use super::measures::{Latency, Memory, Repetition};
use super::pairs::PairRow;
use super::positions::{Bucket, Positions};
use super::rows::{Group, Report, Row, Scores};
use super::texts::Texts;

/// A field: its name and its text.
pub(super) type Field<T> = (&'static str, fn(&T) -> String);
/// A field of a row in its place.
pub(super) type PlaceField = (&'static str, fn(&At<'_>) -> String);

/// Where a row stands.
pub(super) struct At<'a> {
    pub report: &'a Report,
    pub group: &'a Group,
    pub row: &'a Row,
}

pub(super) static PLACE: &[PlaceField] = &[
    ("experiment", |at| at.report.header.experiment.clone()),
    ("run_id", |at| at.report.run_id.clone()),
    ("model", |at| at.report.header.model.name.clone()),
    ("model_sha256", |at| at.report.header.model.sha256.clone()),
    ("protocol", |at| at.group.protocol.name.clone()),
    ("data", |at| at.group.title.clone()),
    ("strategy", |at| at.row.label.clone()),
    ("cells", |at| at.row.cells.join(" ")),
];

pub(super) static STRATEGY: &[PlaceField] = &[
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

pub(super) static SCORES: &[Field<Scores>] = &[
    ("n_items", |s| s.n_items.to_string()),
    ("n_skipped", |s| s.n_skipped.to_string()),
    ("n_tokens_scored", |s| s.n_scored.to_string()),
    ("ppl", |s| number(s.quality.ppl())),
    ("bits_per_byte", |s| number(s.quality.bits_per_byte)),
    ("nll", |s| number(s.quality.nll.value)),
    ("nll_se", |s| optional(s.quality.nll.se)),
    ("delta_nll", |s| number(s.quality.paired.delta().value)),
    ("delta_nll_low", |s| low(s.quality.paired.delta())),
    ("delta_nll_high", |s| high(s.quality.paired.delta())),
    ("delta_ppl_percent", |s| {
        number(s.quality.paired.ppl_change_percent().value)
    }),
    ("delta_ppl_percent_low", |s| {
        low(&s.quality.paired.ppl_change_percent())
    }),
    ("delta_ppl_percent_high", |s| {
        high(&s.quality.paired.ppl_change_percent())
    }),
    ("p", |s| optional(s.comparison().p)),
    ("p_wilcoxon", |s| number(s.quality.paired.wilcoxon.p)),
    ("verdict", |s| s.judged().verdict.to_string()),
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
    ("n_questions", |s| {
        of_answers(s, |a| a.paired.n_questions.to_string())
    }),
    ("acc", |s| of_answers(s, |a| number(a.acc.value.value))),
    ("acc_low", |s| of_answers(s, |a| low(&a.acc.value))),
    ("acc_high", |s| of_answers(s, |a| high(&a.acc.value))),
    ("acc_se", |s| of_answers(s, |a| optional(a.acc.value.se))),
    ("acc_reference", |s| {
        of_answers(s, |a| number(a.acc.reference.value))
    }),
    ("delta_acc", |s| {
        of_answers(s, |a| number(a.acc.delta.value))
    }),
    ("delta_acc_low", |s| of_answers(s, |a| low(&a.acc.delta))),
    ("delta_acc_high", |s| of_answers(s, |a| high(&a.acc.delta))),
    ("acc_norm", |s| {
        of_answers(s, |a| optional(a.acc_norm.map(|r| r.value.value)))
    }),
    ("acc_norm_reference", |s| {
        of_answers(s, |a| optional(a.acc_norm.map(|r| r.reference.value)))
    }),
    ("n_lost", |s| {
        of_answers(s, |a| a.paired.n_only_b.to_string())
    }),
    ("n_gained", |s| {
        of_answers(s, |a| a.paired.n_only_a.to_string())
    }),
    ("kept_of_right", |s| {
        of_answers(s, |a| optional(a.kept.map(|k| k.value)))
    }),
    ("same_choice", |s| {
        of_answers(s, |a| number(a.same_choice.value))
    }),
    ("gold_delta_nll", |s| {
        of_answers(s, |a| number(a.paired.gold_delta_nll.value))
    }),
    ("gold_delta_nll_se", |s| {
        of_answers(s, |a| optional(a.paired.gold_delta_nll.se))
    }),
    ("generated", |s| {
        of_answers(s, |a| optional(a.generated.map(|r| r.value.value)))
    }),
    ("generated_reference", |s| {
        of_answers(s, |a| optional(a.generated.map(|r| r.reference.value)))
    }),
    ("n_texts", |s| of_texts(s, |t| t.n.to_string())),
    ("same_tokens", |s| {
        of_texts(s, |t| number(t.same_tokens.value))
    }),
    ("same_tokens_low", |s| of_texts(s, |t| low(&t.same_tokens))),
    ("same_tokens_high", |s| {
        of_texts(s, |t| high(&t.same_tokens))
    }),
    ("identical_texts", |s| {
        of_texts(s, |t| number(t.identical.value))
    }),
    ("distinct_2", |s| {
        of_texts(s, |t| number(t.distinct.value.value))
    }),
    ("distinct_2_reference", |s| {
        of_texts(s, |t| number(t.distinct.reference.value))
    }),
    ("repeated", |s| {
        of_texts(s, |t| number(t.repeated.value.value))
    }),
    ("repeated_reference", |s| {
        of_texts(s, |t| number(t.repeated.reference.value))
    }),
    ("text_nll_full", |s| {
        of_texts(s, |t| number(t.nll_full.value.value))
    }),
    ("text_nll_full_reference", |s| {
        of_texts(s, |t| number(t.nll_full.reference.value))
    }),
    ("text_length", |s| {
        of_texts(s, |t| number(t.length.value.value))
    }),
    ("text_length_reference", |s| {
        of_texts(s, |t| number(t.length.reference.value))
    }),
    ("bits_per_value", |s| of_memory(s, Memory::bits_per_value)),
    ("bytes_per_token", |s| of_memory(s, Memory::bytes_per_token)),
    ("bytes_vs_f16", |s| of_memory(s, Memory::bytes_vs_f16)),
    ("bytes_vs_fp8", |s| of_memory(s, Memory::bytes_vs_fp8)),
    ("effective_bits", |s| {
        optional(s.memory.and_then(|m| m.marginal_bits_per_value))
    }),
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

pub(super) static DRIFT: &[Field<Scores>] = &[
    ("n_items", |s| s.n_items.to_string()),
    ("n_tokens_scored", |s| s.n_scored.to_string()),
    ("ppl", |s| number(s.quality.ppl())),
    ("ppl_se", |s| {
        optional(s.quality.nll.se.map(|se| se * s.quality.ppl()))
    }),
    ("ln_ppl_ratio", |s| number(s.quality.paired.delta().value)),
    ("ln_ppl_ratio_se", |s| optional(s.quality.paired.delta().se)),
    ("kld", |s| number(s.quality.kld.value)),
    ("kld_se", |s| optional(s.quality.kld.se)),
    ("kld_max", |s| number(s.drift.kld[0])),
    ("kld_p999", |s| number(s.drift.kld[1])),
    ("kld_p99", |s| number(s.drift.kld[2])),
    ("kld_p95", |s| number(s.drift.kld[3])),
    ("kld_p90", |s| number(s.drift.kld[4])),
    ("kld_median", |s| number(s.drift.kld[5])),
    ("kld_p10", |s| number(s.drift.kld[6])),
    ("kld_min", |s| number(s.drift.kld[7])),
    ("mean_delta_p", |s| number(s.quality.mean_delta_p.value)),
    ("mean_delta_p_se", |s| optional(s.quality.mean_delta_p.se)),
    ("rms_delta_p", |s| number(s.quality.rms_delta_p.value)),
    ("rms_delta_p_se", |s| optional(s.quality.rms_delta_p.se)),
    ("delta_p_max", |s| number(s.drift.delta_p[0])),
    ("delta_p_p999", |s| number(s.drift.delta_p[1])),
    ("delta_p_p99", |s| number(s.drift.delta_p[2])),
    ("delta_p_p95", |s| number(s.drift.delta_p[3])),
    ("delta_p_p90", |s| number(s.drift.delta_p[4])),
    ("delta_p_median", |s| number(s.drift.delta_p[5])),
    ("delta_p_p10", |s| number(s.drift.delta_p[6])),
    ("delta_p_p5", |s| number(s.drift.delta_p[7])),
    ("delta_p_p1", |s| number(s.drift.delta_p[8])),
    ("delta_p_p01", |s| number(s.drift.delta_p[9])),
    ("delta_p_min", |s| number(s.drift.delta_p[10])),
    ("same_top", |s| number(s.quality.same_top.value)),
    ("same_top_se", |s| optional(s.quality.same_top.se)),
];

pub(super) static MEMORY: &[Field<Memory>] = &[
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
    ("effective_bits", |m| optional(m.marginal_bits_per_value)),
    ("bytes_per_token", |m| number(m.bytes_per_token())),
    ("bits_per_value", |m| number(m.bits_per_value())),
    ("bytes_vs_f16", |m| number(m.bytes_vs_f16())),
    ("bytes_vs_fp8", |m| number(m.bytes_vs_fp8())),
];

pub(super) static LATENCY: &[Field<Latency>] = &[
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
    ("attend_ms_per_token", |l| number(l.attend_ms_per_token)),
    ("tokens_per_s", |l| number(l.tokens_per_s())),
    ("store_and_compress_ms", |l| number(l.compress_ms)),
    ("repetition_ms", |l| optional(l.repetition_ms)),
];

pub(super) static BUCKET: &[Field<Bucket>] = &[
    ("from", |b| b.from.to_string()),
    ("until", |b| b.until.to_string()),
    ("n_tokens_scored", |b| b.n_tokens.to_string()),
    ("delta_nll", |b| number(b.delta_nll.value)),
    ("delta_nll_low", |b| low(&b.delta_nll)),
    ("delta_nll_high", |b| high(&b.delta_nll)),
    ("kld", |b| number(b.kld.value)),
    ("kld_low", |b| low(&b.kld)),
    ("kld_high", |b| high(&b.kld)),
];

pub(super) static SLOPE: &[Field<Positions>] = &[
    ("n_items", |p| {
        p.kld_per_doubling
            .map_or_else(String::new, |e| e.n.to_string())
    }),
    ("delta_nll_per_doubling", |p| {
        optional(p.delta_nll_per_doubling.map(|e| e.value))
    }),
    ("delta_nll_per_doubling_low", |p| {
        p.delta_nll_per_doubling
            .map_or_else(String::new, |e| low(&e))
    }),
    ("delta_nll_per_doubling_high", |p| {
        p.delta_nll_per_doubling
            .map_or_else(String::new, |e| high(&e))
    }),
    ("kld_per_doubling", |p| {
        optional(p.kld_per_doubling.map(|e| e.value))
    }),
    ("kld_per_doubling_low", |p| {
        p.kld_per_doubling.map_or_else(String::new, |e| low(&e))
    }),
    ("kld_per_doubling_high", |p| {
        p.kld_per_doubling.map_or_else(String::new, |e| high(&e))
    }),
];

pub(super) static BAR: &[Field<BarRow>] = &[
    ("protocol", |b| b.protocol.clone()),
    ("data", |b| b.data.clone()),
    ("strategy", |b| b.strategy.clone()),
    ("metric", |b| b.bar.metric.to_string()),
    ("at_most", |b| match b.bar.bound {
        Bound::AtMost(most) => number(most),
        Bound::AtLeast(_) => String::new(),
    }),
    ("at_least", |b| match b.bar.bound {
        Bound::AtMost(_) => String::new(),
        Bound::AtLeast(least) => number(least),
    }),
    ("times", |b| b.bar.times.clone().unwrap_or_default()),
    ("value", |b| optional(b.measured.map(|m| m.value))),
    ("value_low", |b| {
        optional(b.measured.and_then(|m| m.interval).map(|i| i.0))
    }),
    ("value_high", |b| {
        optional(b.measured.and_then(|m| m.interval).map(|i| i.1))
    }),
    ("n_items", |b| {
        b.measured.map_or_else(String::new, |m| m.n.to_string())
    }),
    ("n_items_needed", |b| {
        let needed = b.judgement.and_then(|j| j.n_needed);
        needed.map_or_else(String::new, |n| n.to_string())
    }),
    ("n_tokens_scored", |b| {
        b.measured
            .map_or_else(String::new, |m| m.n_tokens.to_string())
    }),
    ("is_missed", |b| b.is_missed().to_string()),
    ("verdict", BarRow::words),
];

pub(super) static PAIR: &[Field<PairRow>] = &[
    ("n_items", |p| p.paired.delta().n.to_string()),
    ("delta_nll", |p| number(p.paired.delta().value)),
    ("delta_nll_low", |p| low(p.paired.delta())),
    ("delta_nll_high", |p| high(p.paired.delta())),
    ("delta_ppl_percent", |p| {
        number(p.paired.ppl_change_percent().value)
    }),
    ("n_questions", |p| of_pair(p, |a| a.n_questions.to_string())),
    ("delta_acc", |p| {
        of_pair(p, |a| number(a.comparison.delta.value))
    }),
    ("delta_acc_low", |p| {
        of_pair(p, |a| low(&a.comparison.delta))
    }),
    ("delta_acc_high", |p| {
        of_pair(p, |a| high(&a.comparison.delta))
    }),
    ("n_only_a", |p| of_pair(p, |a| a.n_only_a.to_string())),
    ("n_only_b", |p| of_pair(p, |a| a.n_only_b.to_string())),
    ("gold_delta_nll", |p| {
        of_pair(p, |a| number(a.gold_delta_nll.value))
    }),
    ("gold_delta_nll_low", |p| {
        of_pair(p, |a| low(&a.gold_delta_nll))
    }),
    ("gold_delta_nll_high", |p| {
        of_pair(p, |a| high(&a.gold_delta_nll))
    }),
    ("p", |p| optional(p.comparison().p)),
    ("p_wilcoxon", |p| number(p.paired.wilcoxon.p)),
    ("verdict", |p| p.judged().verdict.to_string()),
];

/// What else is told of a comparison.
pub(super) static TESTS: &[Field<(Comparison, Judged)>] = &[
    ("p_holm", |(_, j)| optional(j.p_holm)),
    ("p_margin", |(c, _)| optional(c.p_margin)),
    ("p_margin_holm", |(_, j)| optional(j.p_margin_holm)),
    ("margin", |(c, _)| number(c.margin)),
    ("n_items_needed", |(_, j)| {
        j.n_needed.map_or_else(String::new, |n| n.to_string())
    }),
    ("interval_over", |(c, _)| match c.delta.over {
        Over::Items => "items".to_owned(),
        Over::Blocks { length, .. } => format!("blocks of {length} tokens"),
    }),
];

pub(super) fn number(value: f64) -> String {
    if value.is_finite() {
        // Adding 0 turns -0 into 0.
        (value + 0.0).to_string()
    } else {
        String::new()
    }
}

pub(super) fn optional(value: Option<f64>) -> String {
    value.map_or_else(String::new, number)
}

fn low(estimate: &Estimate) -> String {
    optional(estimate.interval.map(|(low, _)| low))
}

fn high(estimate: &Estimate) -> String {
    optional(estimate.interval.map(|(_, high)| high))
}

fn of_texts(scores: &Scores, f: fn(&Texts) -> String) -> String {
    scores.texts.as_ref().map_or_else(String::new, f)
}

fn of_answers(scores: &Scores, f: fn(&Accuracy) -> String) -> String {
    scores.accuracy.as_ref().map_or_else(String::new, f)
}

fn of_pair(pair: &PairRow, f: fn(&PairedAnswers) -> String) -> String {
    pair.answers.as_ref().map_or_else(String::new, f)
}

fn of_memory(scores: &Scores, f: fn(&Memory) -> f64) -> String {
    optional(scores.memory.as_ref().map(f))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_every_digit_and_are_never_nan() {
        assert_eq!(number(0.1 + 0.2), "0.30000000000000004");
        assert_eq!(number(-0.0), "0");
        assert_eq!(number(f64::NAN), "");
        assert_eq!(optional(None), "");
    }
}
