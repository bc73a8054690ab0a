//! Bars held against the tables: which row a bar is about, what was measured there, and the verdict. What is measured for a bar
//! that is a multiple of another strategy's value is the ratio of the two.
//!
//! Invariants: a bar without a text holds per domain, over all texts of it together; a bar whose row has no numbers has
//! no verdict; the numbers are those of the tables.

use serde::Serialize;

use crate::bundle::header::ProtocolKind;
use crate::cache::Continuation;
use crate::eval::bars::{Bar, Judgement, Measured, Metric, Verdict};
use crate::eval::stats::Estimate;

use super::format::{grouped, significant};
use super::measures::Memory;
use super::rows::{Group, Row, Scores};
use super::traffic::stall_ms;

/// A bar in one place.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BarRow {
    /// Name of the protocol.
    pub protocol: String,
    /// Title of the group: a text, or all texts of a domain.
    pub data: String,
    /// Label of the row.
    pub strategy: String,
    /// The bar.
    pub bar: Bar,
    /// What was measured; `None` where the row has no numbers.
    pub measured: Option<Measured>,
    /// The verdict; `None` where the row has no numbers.
    pub judgement: Option<Judgement>,
    /// Why there are no numbers; empty if there are.
    pub reason: String,
}

impl BarRow {
    /// Whether the bar is missed.
    pub fn is_missed(&self) -> bool {
        self.judgement.is_some_and(|j| j.verdict == Verdict::Missed)
    }

    /// The verdict in words, or why there is none.
    pub fn words(&self) -> String {
        match (&self.judgement, &self.measured) {
            (Some(judgement), Some(measured)) => judgement.words(measured.n),
            _ => format!("no verdict: {}", self.reason),
        }
    }
}

/// All bars in all places that they are about.
pub fn rows(groups: &[Group], bars: &[Bar]) -> Vec<BarRow> {
    let mut out = Vec::new();
    for bar in bars {
        for group in groups.iter().filter(|g| is_about(bar, g, groups)) {
            let named = |row: &&Row| row.strategy.label == bar.strategy;
            out.extend(
                group
                    .rows
                    .iter()
                    .filter(named)
                    .map(|row| hold(bar, group, row)),
            );
        }
    }
    out
}

fn hold(bar: &Bar, group: &Group, row: &Row) -> BarRow {
    let of = |row: &Row| row.scores().and_then(|scores| measure(bar.metric, scores));
    let own = of(row);
    let measured = match &bar.times {
        None => own,
        Some(label) => {
            let other = group.rows.iter().find(|r| r.strategy.label == *label);
            own.zip(other.and_then(of))
                .and_then(|(own, other)| own.over(&other))
        }
    };
    let reason = match (row.reason(), &measured, &bar.times) {
        (reason, None, Some(other)) if reason.is_empty() => {
            format!(
                "{} of both it and {other} is not measured here, or {other}'s is 0",
                bar.metric
            )
        }
        (reason, None, _) if reason.is_empty() => format!("{} is not measured here", bar.metric),
        (reason, ..) => reason,
    };
    BarRow {
        protocol: group.protocol.name.clone(),
        data: group.title.clone(),
        strategy: row.label.clone(),
        bar: bar.clone(),
        judgement: measured.as_ref().map(|m| bar.judge(m)),
        measured,
        reason,
    }
}

fn is_about(bar: &Bar, group: &Group, groups: &[Group]) -> bool {
    let (kind, continuation, n_tokens) = match &group.protocol.kind {
        ProtocolKind::Stream { window, .. } => ("stream", Continuation::Strategy, *window),
        ProtocolKind::CompressOnce {
            context,
            continuation,
            ..
        } => ("compress-once", *continuation, *context),
        ProtocolKind::Generate {
            context,
            continuation,
            ..
        } => ("generate", *continuation, *context),
        ProtocolKind::Tasks {
            length,
            continuation,
            ..
        } => ("tasks", *continuation, *length),
    };
    let is_protocol = bar.protocol.as_deref().is_none_or(|k| k == kind)
        && bar.continuation.is_none_or(|c| c == continuation)
        && bar.n_tokens.is_none_or(|n| n == n_tokens);
    let is_domain = bar.domain.is_none() || bar.domain == group.domain;
    let is_data = match &bar.data {
        Some(name) => group.data.len() == 1 && group.data[0].name == *name,
        None => covers_its_domain(group, groups),
    };
    is_protocol && is_domain && is_data
}

/// Whether the group holds all that the protocol has of one domain; a domain that is not known yet is its own.
fn covers_its_domain(group: &Group, groups: &[Group]) -> bool {
    let has_more = |other: &Group| {
        other.protocol.name == group.protocol.name
            && other.domain == group.domain
            && other.data.len() > group.data.len()
    };
    match group.domain {
        Some(_) => !groups.iter().any(has_more),
        None => group.data.len() == 1 && group.baseline.is_none(),
    }
}

/// A metric of a row. Sizes, and quantiles over tokens, have no interval over items; n of a time counts steps.
fn measure(metric: Metric, scores: &Scores) -> Option<Measured> {
    let quality = &scores.quality;
    let estimate = |e: &Estimate| Some(Measured::from_estimate(e, scores.n_scored));
    let plain = |value: f64| {
        Some(Measured {
            value,
            interval: None,
            n: scores.n_items,
            n_tokens: scores.n_scored,
        })
    };
    let size = |f: fn(&Memory) -> f64| plain(f(scores.memory.as_ref()?));
    match metric {
        Metric::Kld => estimate(&quality.kld),
        Metric::KldMedian => plain(quality.kld_median),
        Metric::KldP90 => plain(scores.drift.kld[4]),
        Metric::KldP99 => plain(quality.kld_p99),
        Metric::KldP999 => plain(scores.drift.kld[1]),
        Metric::SameTop => estimate(&quality.same_top),
        Metric::DeltaNll => estimate(quality.paired.delta()),
        Metric::DeltaPplPercent => estimate(&quality.paired.ppl_change_percent()),
        Metric::RmsDeltaP => estimate(&quality.rms_delta_p),
        Metric::ContextBenefitKept => estimate(quality.context_benefit_kept.as_ref()?),
        Metric::BitsPerValue => size(Memory::bits_per_value),
        Metric::EffectiveBits => plain(scores.memory?.marginal_bits_per_value?),
        Metric::BytesPerToken => size(Memory::bytes_per_token),
        Metric::BytesVsF16 => size(Memory::bytes_vs_f16),
        Metric::BytesVsFp8 => size(Memory::bytes_vs_fp8),
        Metric::ResidentVsF16 => size(Memory::resident_vs_f16),
        Metric::StallMsPerToken => {
            let record = scores.traffic.as_ref()?;
            let n = record.timed.n_steps as usize;
            let value = stall_ms(record)?;
            Some(Measured {
                value,
                interval: None,
                n,
                n_tokens: n,
            })
        }
    }
}

/// Headings of [`cells`].
pub const HEADS: [&str; 8] = [
    "strategy", "protocol", "data", "metric", "bar", "measured", "n", "verdict",
];

/// One bar's row of text.
pub fn cells(row: &BarRow) -> [String; 8] {
    let number = |value: f64| significant(value, 4);
    let measured = row.measured.map_or_else(String::new, |m| match m.interval {
        Some((low, high)) => format!("{} [{}, {}]", number(m.value), number(low), number(high)),
        None => number(m.value),
    });
    let n = row.measured.map_or_else(String::new, |m| {
        format!("{} ({} tokens)", m.n, grouped(m.n_tokens as u64))
    });
    [
        row.strategy.clone(),
        row.protocol.clone(),
        row.data.clone(),
        row.bar.metric.to_string(),
        row.bar.limit(),
        measured,
        n,
        row.words(),
    ]
}
