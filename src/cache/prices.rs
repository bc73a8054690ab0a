//! What a choice of rows takes, before any of it is stored: the bound by which byte budgets are kept.
//!
//! Invariants: [`Prices`] follow from lengths, formats and the choice alone, never from what else a cache holds, so that a
//! sequence is compressed alike whatever its neighbours are; the live buffers of a sequence that is alone in its cache
//! never exceed them right after its compression point. Packed or parked pages take less; what `place` holds beside rows
//! (bounds of `quest`, tables of `specache`) comes on top.

use super::RANGE;
use super::formats::{Format, Mask};
use super::pages::{ENTRY_BYTES, FREE_ENTRY_BYTES};
use super::places::Page;
use super::sequence::{HeadState, LayerState, SequenceState};
use super::stage::{Choice, Codec, Costs, LiveRows, Moment, Retention, Shortage, Side, StageError};
use super::stages::{Materials, Stages};
use super::strategy::Strategy;
use super::table::room_for;
use super::types::{Continuation, Geometry};
use super::visibility::{Class, Rules};

/// Levels of precision that rows of a page may have.
const N_LEVELS: usize = 3;

/// By how many places a store of pages grows.
const STORE_GROWTH: usize = 8;

/// Prices of one sequence's rows.
pub struct Prices<'a> {
    /// The strategy.
    pub stages: &'a Stages,
    /// The model's layers.
    pub geometry: &'a Geometry,
    /// Positions seen.
    pub len: u32,
    /// Whether scores are kept after the point.
    pub keeps_scores: bool,
}

/// Pages and their bytes.
#[derive(Default)]
struct Sum {
    n_pages: usize,
    bytes: usize,
}

impl Costs for Prices<'_> {
    fn bytes(&self, heads: &[Vec<LiveRows<'_>>], choice: &Choice) -> u64 {
        let mut sum = Sum::default();
        let (mut n_before, mut most_at_once) = (0, 0);
        let mut bytes = size_of::<SequenceState>();
        for (layer, heads) in heads.iter().enumerate() {
            let rules = self
                .stages
                .rules_of((layer, self.geometry.layers[layer].window));
            bytes += size_of::<LayerState>() + heads.len() * size_of::<HeadState>();
            let n_others = sum.n_pages;
            for (h, live) in heads.iter().enumerate() {
                let levels = choice.levels.get(layer).map(|l| &l[h][..]);
                let kept = self.kept(live.positions, (&choice.gone[layer][h], levels));
                let n_kept = live.positions.len() - choice.gone[layer][h].len();
                if self.keeps_scores {
                    bytes +=
                        live.scores.len().min(n_kept).next_multiple_of(RANGE) * size_of::<f32>();
                }
                for side in Side::BOTH {
                    self.side(((layer, h), side), &rules[side as usize], &kept, &mut sum);
                    n_before += self.pages_before(&rules[side as usize]);
                }
            }
            most_at_once = most_at_once.max(sum.n_pages - n_others);
        }
        // A layer's pages are made before those that they replace are freed.
        let n_places = (n_before + most_at_once).max(sum.n_pages) + STORE_GROWTH;
        let n_free = n_before.saturating_sub(sum.n_pages) + 2 * most_at_once;
        bytes += sum.bytes + sum.n_pages * size_of::<Page>();
        // A list of free places grows by doubling.
        bytes += n_places * ENTRY_BYTES + 2 * n_free * FREE_ENTRY_BYTES;
        bytes as u64 + self.stages.table_bytes() + self.stages.projection_bytes()
    }

    fn row_bytes(&self, layer: usize, kv_head: usize) -> Vec<[f64; 2]> {
        let formats = &self.stages.formats[layer];
        let bytes = |side, level: usize| {
            let format = formats.format(kv_head, side, Class::Coded);
            // Of many rows together, since some of their bytes are shared.
            let mut counts = [0; N_LEVELS];
            counts[level] = RANGE;
            let n_bytes = match format.codec.levels() {
                Some(codec) => {
                    codec.bytes(&counts, format.dim) - codec.bytes(&[0; N_LEVELS], format.dim)
                }
                None => format.bytes(Mask::MAX),
            };
            n_bytes as f64 / RANGE as f64
        };
        let one = |level| Side::BOTH.map(|side| bytes(side, level));
        (0..N_LEVELS).map(one).collect()
    }
}

/// The rows of a range that stay.
#[derive(Clone, Copy, Default)]
struct Kept {
    rows: Mask,
    /// Rows of each level but the format's own, by side.
    at_level: [[Mask; N_LEVELS]; 2],
}

impl Kept {
    /// How many of some rows have each level; sinks have the lowest.
    fn counts(&self, rows: Mask, sinks: Mask, side: Side) -> [usize; N_LEVELS] {
        let n = |mask: Mask| mask.count_ones() as usize;
        let mut counts = self.at_level[side as usize].map(|level| n(level & rows & !sinks));
        counts[0] += n(rows & sinks);
        counts
    }
}

impl Prices<'_> {
    /// By range, the rows of a head that stay. `levels`: by live row.
    fn kept(&self, positions: &[u32], (gone, levels): (&[usize], Option<&[[u8; 2]]>)) -> Vec<Kept> {
        let mut kept = vec![Kept::default(); self.len.div_ceil(RANGE as u32) as usize];
        let mut gone = gone.iter().peekable();
        for (i, &p) in positions.iter().enumerate() {
            if gone.next_if(|&&g| g == i).is_some() {
                continue;
            }
            let (kept, bit) = (&mut kept[p as usize / RANGE], 1 << (p as usize % RANGE));
            kept.rows |= bit;
            for (at_level, level) in kept
                .at_level
                .iter_mut()
                .zip(levels.map_or([0; 2], |l| l[i]))
            {
                at_level[level as usize] |= bit;
            }
        }
        kept
    }

    /// One side of one head, whose rows by range are `kept`.
    fn side(
        &self,
        ((layer, head), side): ((usize, usize), Side),
        rules: &Rules,
        kept: &[Kept],
        sum: &mut Sum,
    ) {
        let formats = &self.stages.formats[layer];
        let coded_end = rules.coded_end(self.len);
        for (range, in_range) in kept.iter().enumerate().filter(|(_, kept)| kept.rows != 0) {
            let kept = in_range.rows;
            let first = (range * RANGE) as u32;
            let (coded, sinks) = (below(first, coded_end), below(first, rules.sinks));
            let exact = kept & (!coded | sinks);
            let mut page = |class, rows: Mask, end: u32| {
                if rows == 0 {
                    return;
                }
                let format = formats.format(head, side, class);
                sum.n_pages += 1;
                sum.bytes += match format.codec.levels() {
                    Some(codec) => codec.bytes(&in_range.counts(rows, sinks, side), format.dim),
                    None => page_bytes(format, rows, first + RANGE as u32 <= end),
                };
            };
            let coded = match rules.page {
                1 => kept & coded & !sinks,
                _ => kept & coded,
            };
            page(Class::Coded, coded, coded_end);
            page(Class::Exact, exact, self.len);
        }
    }

    /// Pages of one side of a head before the point.
    fn pages_before(&self, rules: &Rules) -> usize {
        let ranges = |from: u32, to: u32| match to.checked_sub(from) {
            None | Some(0) => 0,
            Some(_) => (to.div_ceil(RANGE as u32) - from / RANGE as u32) as usize,
        };
        // A sliding window's pages leave with the step after; a step may be as long as the whole context.
        if rules.page > 1 {
            return ranges(0, self.len);
        }
        let end = rules.coded_end(self.len);
        ranges(rules.sinks, end) + ranges(end, self.len) + ranges(0, rules.sinks.min(self.len))
    }
}

/// Bytes of a page whose range is past, or still open.
fn page_bytes(format: &Format, rows: Mask, is_past: bool) -> usize {
    match (&format.codec, is_past) {
        (Codec::Rows(_), false) => room_for(format, rows),
        _ => format.bytes(rows),
    }
}

/// The rows of the range from `first` on that lie below `position`.
fn below(first: u32, position: u32) -> Mask {
    match position.saturating_sub(first) {
        n if n >= RANGE as u32 => Mask::MAX,
        n => (1 << n) - 1,
    }
}

/// What a strategy's byte budget lacks at the compression point of a context of so many tokens, if it lacks anything;
/// what follows the point decides whether scores are held.
///
/// # Errors
/// The strategy's stages can't be built.
pub fn least_retained(
    strategy: &Strategy,
    materials: Materials<'_>,
    (n_tokens, continuation): (u32, Continuation),
) -> Result<Option<Shortage>, StageError> {
    let stages = Stages::build(strategy, materials)?;
    let Some(retain) = stages.retain.as_deref() else {
        return Ok(None);
    };
    if retain.budget_bytes(n_tokens).is_none() {
        return Ok(None);
    }
    let prices = Prices {
        stages: &stages,
        geometry: materials.geometry,
        len: n_tokens,
        keeps_scores: keeps_scores(retain, continuation),
    };
    Ok(prices.shortage(retain))
}

/// Whether a retention goes on choosing after the point.
pub fn keeps_scores(retain: &dyn Retention, continuation: Continuation) -> bool {
    continuation != Continuation::Exact && !retain.acts_once()
}

impl Prices<'_> {
    /// Asks for a choice among rows that all score the same, those beyond comparison aside.
    fn shortage(&self, retain: &dyn Retention) -> Option<Shortage> {
        let scores = [0.0, f32::MAX].map(|score| vec![score; self.len as usize]);
        let layers = self.geometry.layers.iter().enumerate();
        let positions: Vec<Vec<u32>> = layers
            .map(|(layer, g)| {
                let rules = self.stages.rules_of((layer, g.window));
                (rules[0].window_start(self.len)..self.len).collect()
            })
            .collect();
        let heads: Vec<Vec<LiveRows<'_>>> = positions
            .iter()
            .zip(&self.geometry.layers)
            .map(|(positions, g)| {
                let is_beyond = g.window.is_some() && !retain.compares_windows();
                let live = LiveRows {
                    positions,
                    scores: &scores[usize::from(is_beyond)][..positions.len()],
                    n_seen: self.len,
                    n_reached: positions.len() as u32,
                    compressed: None,
                    moment: Moment::CompressionPoint,
                };
                vec![live; g.n_kv_heads]
            })
            .collect();
        retain.choose(&heads, self).err()
    }
}
