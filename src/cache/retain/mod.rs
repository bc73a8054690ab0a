//! The registered `retain` stages: one file per method, one line here.
//!
//! Invariants shared by all of them: rows keep their positions, nothing is re-indexed; a decision depends on the rows of
//! one KV head and on positions alone, so that any chunk equals decoding.

pub mod knorm;
pub mod window;

use std::ops::Range;

use super::stage::{LiveRows, Params, StageDef};

/// Every `retain` stage.
pub static STAGES: &[StageDef] = &[window::DEF, knorm::DEF];

/// A parameter that counts positions; 0 if it was not given.
fn positions(params: &Params, name: &str) -> u32 {
    let value = params.int(name).unwrap_or(0).max(0);
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// Indices of live rows that are neither among the first `sinks` positions nor among the newest `recent` ones.
fn unprotected(live: &LiveRows<'_>, sinks: u32, recent: u32) -> Range<usize> {
    let first = live.positions.partition_point(|&p| p < sinks);
    let newest = live.n_seen.saturating_sub(recent);
    let end = live.positions.partition_point(|&p| p < newest);
    first..end.max(first)
}

#[cfg(test)]
mod tests;
