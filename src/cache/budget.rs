//! Mixed precision by budget: as a context grows, its oldest pages are encoded again with fewer bits, so that the cache
//! never takes more than it may.
//!
//! The unit is a range of 128 positions over all layers and heads, K and V. When a further position would not fit, the
//! oldest full range of those with the most bits goes down one level, until it fits:
//!
//! ```text
//! levels 8, 4, 2 bits     8 8 8 .      8 8 8 8      4 8 8 8      4 4 8 8 .     4 4 4 4 .     2 4 4 4 .
//! ```
//!
//! A range never goes up again: when the budget grows, ranges to come stay at more bits for longer, and what the older
//! ones lost stays lost.
//!
//! Invariants: decisions follow from lengths alone, by a bound on the bytes ([`cost`]) that the live buffers never
//! exceed at the end of a step; a step is never so long that decoding would have decided inside it, so chunks change
//! nothing.

use std::sync::Arc;

use super::formats::Mask;
use super::pipeline::StagedCache;
use super::places::Page;
use super::sequence::{HeadState, LayerState, SequenceState};
use super::stage::{Side, StageError};
use super::stages::{LayerFormats, Materials, Stages};
use super::strategy::{Budget, Scope, Strategy};
use super::table::room_for;
use super::types::{Batch, Geometry, SeqId};
use super::visibility::{Class, Rules};
use super::{CacheError, RANGE};

/// Bound on what a store and its list of free places take per page: twice a page's entry of 28 bytes, since the store
/// may have held as many pages again within a step.
const STORE_BYTES_PER_PAGE: usize = 56;

/// The level of a range without coded rows.
const NO_PAGE: u8 = u8::MAX;

/// Bound on the resident bytes of a sequence of `len` positions at the end of a step; `level`: of each range.
fn cost(stages: &Stages, geometry: &Geometry, len: u32, level: &dyn Fn(u32) -> usize) -> u64 {
    let mut bytes = size_of::<SequenceState>();
    for (layer, g) in geometry.layers.iter().enumerate() {
        let rules = stages.rules_of((layer, g.window));
        let formats = &stages.formats[layer];
        let mut head_bytes = size_of::<HeadState>();
        let first = rules[0].window_start(len) / RANGE as u32;
        for range in first..len.div_ceil(RANGE as u32) {
            for side in Side::BOTH {
                let rules = &rules[side as usize];
                head_bytes += range_bytes(formats, (side, rules), (range, len), level(range));
            }
        }
        bytes += size_of::<LayerState>() + g.n_kv_heads * head_bytes;
    }
    bytes as u64
}

/// Bytes of one side of a range of one head.
fn range_bytes(
    formats: &LayerFormats,
    (side, rules): (Side, &Rules),
    (range, len): (u32, u32),
    level: usize,
) -> usize {
    let first = range * RANGE as u32;
    let below = |position: u32| -> Mask {
        match position.saturating_sub(first) {
            n if n >= RANGE as u32 => Mask::MAX,
            n => (1 << n) - 1,
        }
    };
    let (all, sinks, coded) = (
        below(len),
        below(rules.sinks.min(len)),
        below(rules.coded_end(len)),
    );
    let exact = all & !coded | sinks;
    let coded = if rules.page == 1 {
        coded & !sinks
    } else {
        coded
    };
    let table = |rows: Mask, class: Class, level: usize| match rows {
        0 => 0,
        _ => {
            let format = &formats.ladder(0, side, class)[level];
            size_of::<Page>() + STORE_BYTES_PER_PAGE + room_for(format, rows)
        }
    };
    table(coded, Class::Coded, level) + table(exact, Class::Exact, 0)
}

/// Ranges below this are full and coded in every layer, on both sides.
fn full_ranges(stages: &Stages, geometry: &Geometry, len: u32) -> u32 {
    let layers = geometry.layers.iter().enumerate();
    let ends = layers.flat_map(|(layer, g)| {
        stages
            .rules_of((layer, g.window))
            .map(|rules| rules.coded_end(len))
    });
    ends.min().unwrap_or(0) / RANGE as u32
}

/// The least budget that holds a strategy's sequence of up to `n_tokens` positions: its bytes with every full range at
/// the lowest level, at the length at which they are the most.
///
/// # Errors
/// The strategy's stages can't be built.
pub fn least_budget(
    strategy: &Strategy,
    materials: Materials<'_>,
    n_tokens: u32,
) -> Result<u64, StageError> {
    let stages = Stages::build(strategy, materials)?;
    let lowest = strategy.levels().count() - 1;
    let geometry = materials.geometry;
    let bytes = |len| {
        let n_full = full_ranges(&stages, geometry, len - 1);
        cost(&stages, geometry, len, &|range| {
            if range < n_full { lowest } else { 0 }
        })
    };
    Ok((1..=n_tokens).map(bytes).max().unwrap_or(0))
}

impl StagedCache {
    /// Allows another number of bytes from now on, whatever the strategy said. Rows coded before keep their precision.
    pub fn set_budget(&mut self, bytes: u64) {
        if let Some(budget) = &mut Arc::make_mut(&mut self.stages).budget {
            budget.bytes = bytes;
            budget.steps.clear();
        }
    }

    /// Level of each range of a sequence; [`NO_PAGE`] where nothing is coded.
    fn levels(&self, seq: SeqId) -> Vec<u8> {
        let Some(state) = self.sequences.get(&seq) else {
            return Vec::new();
        };
        let mut levels = vec![NO_PAGE; state.len as usize / RANGE + 1];
        for layer in &state.layers {
            for head in layer.heads.iter().take(1) {
                for page in head.tables[Side::K as usize][Class::Coded as usize].pages() {
                    levels[page.range as usize] = page.level;
                }
            }
        }
        levels
    }

    fn cost_at(&self, seq: SeqId, len: u32) -> u64 {
        let levels = self.levels(seq);
        let coded = |range: u32| levels.get(range as usize).filter(|&&l| l != NO_PAGE);
        let level = |range: u32| coded(range).map_or(0, |&l| usize::from(l));
        cost(&self.stages, &self.geometry, len, &level)
    }

    /// The sequences that share a budget with `seq`; none if nothing limits it.
    fn sharers(&self, seq: SeqId) -> Vec<SeqId> {
        let limited = |seq: &SeqId| {
            let state = self.sequences.get(seq);
            state.is_some_and(|s| s.frozen_from.is_none())
        };
        match &self.stages.budget {
            None => Vec::new(),
            Some(_) if !limited(&seq) => Vec::new(),
            Some(budget) => match budget.scope {
                Scope::Sequence => vec![seq],
                Scope::All => self.sequences.keys().copied().filter(limited).collect(),
            },
        }
    }

    /// Bytes of sequences that each have `more` positions more, and the budget for them.
    fn demand(&self, budget: &Budget, sharers: &[SeqId], more: u32) -> (u64, u64) {
        let len = |seq: &SeqId| self.sequences.get(seq).map_or(0, |s| s.len) + more;
        let bytes = sharers.iter().map(|s| self.cost_at(*s, len(s))).sum();
        let longest = sharers.iter().map(len).max().unwrap_or(0);
        (bytes, budget.at(longest))
    }

    /// See [`super::KvCache::step_limit`].
    pub(super) fn budget_limit(&self, seq: SeqId, asked: usize) -> usize {
        let Some(budget) = &self.stages.budget else {
            return asked;
        };
        let sharers = self.sharers(seq);
        let most = match sharers.len() {
            0 => return asked,
            1 => asked,
            // The others' steps are not known.
            _ => 1,
        };
        let fits = |n: &usize| {
            let (bytes, allowed) = self.demand(budget, &sharers, *n as u32);
            bytes <= allowed
        };
        (1..=most).take_while(fits).last().unwrap_or(1)
    }

    /// Refuses a step that would not fit, before anything of it is stored.
    pub(super) fn check_budget(&self, batch: &Batch) -> Result<(), CacheError> {
        let Some(budget) = &self.stages.budget else {
            return Ok(());
        };
        for span in batch.spans() {
            let sharers = self.sharers(span.seq);
            let (needed_bytes, budget_bytes) =
                self.demand(budget, &sharers, span.n_tokens() as u32);
            if needed_bytes > budget_bytes {
                return Err(CacheError::OverBudget {
                    seq: span.seq.0,
                    position: span.positions.end - 1,
                    needed_bytes,
                    budget_bytes,
                });
            }
        }
        Ok(())
    }

    /// Makes room for one further position of each sequence in a batch, as far as levels reach.
    pub(super) fn make_room(&mut self, batch: &Batch) -> Result<(), CacheError> {
        for span in batch.spans() {
            let sharers = self.sharers(span.seq);
            while let Some(budget) = &self.stages.budget {
                let (bytes, allowed) = self.demand(budget, &sharers, 1);
                if bytes <= allowed {
                    break;
                }
                let Some((seq, range)) = self.next_to_shrink(&sharers, budget.then.len()) else {
                    break;
                };
                self.shrink(seq, range)?;
            }
        }
        Ok(())
    }

    /// The oldest of the full ranges with the most bits, if any can still go down.
    fn next_to_shrink(&self, sharers: &[SeqId], lowest: usize) -> Option<(SeqId, u32)> {
        let mut best: Option<(u8, u32, SeqId)> = None;
        for &seq in sharers {
            let len = self.sequences.get(&seq)?.len;
            let n_full = full_ranges(&self.stages, &self.geometry, len);
            for (range, level) in self.levels(seq).into_iter().enumerate() {
                let candidate = (level, range as u32, seq);
                let can = (range as u32) < n_full && usize::from(level) < lowest;
                if can && best.is_none_or(|b| candidate < b) {
                    best = Some(candidate);
                }
            }
        }
        best.map(|(_, range, seq)| (seq, range))
    }

    /// Encodes a range again, one level lower, in all layers and heads.
    fn shrink(&mut self, seq: SeqId, range: u32) -> Result<(), CacheError> {
        self.with_sequence(seq, |stages, _, state, places| {
            for (layer, formats) in state.layers.iter_mut().zip(&stages.formats) {
                for (h, head) in layer.heads.iter_mut().enumerate() {
                    for side in Side::BOTH {
                        let ladder = formats.ladder(h, side, Class::Coded);
                        head.table(side, Class::Coded)
                            .recode(places, ladder, range)?;
                    }
                }
            }
            state.earliest = state.earliest.max(state.len);
            Ok(())
        })
    }
}
