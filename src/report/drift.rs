//! How the next-token distribution drifts: quantiles over tokens, llama.cpp's columns, and the noise that no strategy
//! can be told from.
//!
//! Invariants: quantiles are over all scored tokens of all items; the noise floor is the row whose only change is bf16
//! rows, and a table says where it has none.

use crate::cache::strategy::{StageSpec, Strategy};
use crate::eval::records::ItemRecord;
use crate::eval::stats::{Estimate, quantile};

use super::columns::Text;
use super::format::{estimate, plus_minus, signed_plus_minus, significant};
use super::markdown::plain;
use super::rows::{Group, Row, Scores};

/// The codec of the noise floor: as many bits as the base, fewer digits, and nothing else changed.
const FLOOR: &str = "bf16";

/// Quantiles of a token's KLD and of the change of its target's probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drift {
    /// KLD at [`KLD_LEVELS`], nats.
    pub kld: [f64; KLD_LEVELS.len()],
    /// Δp at [`DELTA_P_LEVELS`].
    pub delta_p: [f64; DELTA_P_LEVELS.len()],
}

/// Quantiles of the KLD, as llama-perplexity prints them, the greatest first.
pub const KLD_LEVELS: [f64; 8] = [1.0, 0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.0];

/// Quantiles of Δp, as llama-perplexity prints them, the greatest first.
pub const DELTA_P_LEVELS: [f64; 11] = [
    1.0, 0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01, 0.001, 0.0,
];

impl Drift {
    /// Of some items; `None` without scored tokens.
    pub fn new(items: &[&ItemRecord]) -> Option<Self> {
        let sorted = |list: fn(&ItemRecord) -> &[f32]| {
            let mut values: Vec<f64> = items
                .iter()
                .flat_map(|r| list(r).iter().map(|&x| f64::from(x)))
                .collect();
            values.sort_unstable_by(f64::total_cmp);
            values
        };
        let kld = sorted(|r| &r.tokens.kld);
        let delta_p = sorted(|r| &r.tokens.delta_p);
        (!kld.is_empty() && !delta_p.is_empty()).then(|| Self {
            kld: KLD_LEVELS.map(|q| quantile(&kld, q).unwrap_or_default()),
            delta_p: DELTA_P_LEVELS.map(|q| quantile(&delta_p, q).unwrap_or_default()),
        })
    }
}

/// The noise floor in one line, or how to have one; nothing for a group without numbers.
pub fn noise_floor_or_hint(group: &Group) -> Option<String> {
    group.baseline?;
    let hint = || {
        format!(
            "Noise floor: no row here; one with `encode = \"{FLOOR}\"` shows what mere rounding does."
        )
    };
    Some(noise_floor(group).unwrap_or_else(hint))
}

/// The noise floor in one line, where the group has one.
pub fn noise_floor(group: &Group) -> Option<String> {
    let rows = group.rows.iter();
    rows.filter(|row| is_floor(&row.strategy))
        .find_map(|row| Some(floor_words(row, row.scores()?)))
}

fn floor_words(row: &Row, scores: &Scores) -> String {
    let quality = &scores.quality;
    format!(
        "Noise floor ({}): KLD {}, Same top p {} %, RMS Δp {} %, ΔNLL {}: what mere rounding of the cache does.",
        row.label,
        estimate(&quality.kld),
        estimate(&quality.same_top.scaled(100.0)),
        estimate(&quality.rms_delta_p.scaled(100.0)),
        estimate(quality.paired.delta()),
    )
}

/// Whether nothing but the rows' format is changed, and that to the floor's.
fn is_floor(strategy: &Strategy) -> bool {
    let is_plain = |spec: &StageSpec| spec.name == FLOOR;
    is_plain(&strategy.encode_k)
        && is_plain(&strategy.encode_v)
        && strategy.project_k.is_empty()
        && strategy.project_v.is_empty()
        && strategy.retain.is_none()
        && strategy.budget.is_none()
}

/// The columns of llama.cpp's tables, with its ± of one standard error.
const HEADS: [&str; 15] = [
    "strategy",
    "n",
    "PPL",
    "PPL ratio",
    "ln PPL ratio",
    "Mean KLD",
    "Median KLD",
    "90 % KLD",
    "99 % KLD",
    "99.9 % KLD",
    "Max KLD",
    "Mean Δp %",
    "RMS Δp %",
    "1 % Δp %",
    "Same top p %",
];

/// One group's table.
pub fn text(group: &Group) -> Text {
    let rows = group.rows.iter().filter_map(|row| {
        let scores = row.scores()?;
        let (quality, drift) = (&scores.quality, &scores.drift);
        let ln = quality.paired.delta();
        let times = ln.value.exp();
        let percent = |e: &Estimate| e.scaled(100.0);
        let (mean, rms) = (
            percent(&quality.mean_delta_p),
            percent(&quality.rms_delta_p),
        );
        let top = percent(&quality.same_top);
        let ppl_se = quality.nll.se.map(|se| se * quality.ppl());
        let [max, p999, p99, _, p90, median, ..] = drift.kld;
        let [.., low_delta_p, _, _] = drift.delta_p;
        Some(vec![
            row.label.clone(),
            scores.n_items.to_string(),
            plus_minus(quality.ppl(), ppl_se),
            plus_minus(times, ln.se.map(|se| se * times)),
            signed_plus_minus(ln.value, ln.se),
            plus_minus(quality.kld.value, quality.kld.se),
            significant(median, 2),
            significant(p90, 2),
            significant(p99, 2),
            significant(p999, 2),
            significant(max, 2),
            signed_plus_minus(mean.value, mean.se),
            plus_minus(rms.value, rms.se),
            significant(100.0 * low_delta_p, 2),
            plus_minus(top.value, top.se),
        ])
    });
    plain(&HEADS, rows)
}
