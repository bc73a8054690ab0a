//! The end of a step, and its undoing: rows that nobody may see any more leave, pages seal; a sequence goes back.
//!
//! Invariants: rows leave here alone, and pages are coded anew where too few of their rows are left; a truncated sequence is what it would be if it had never gone on.

use super::places::{Page, Places};
use super::sequence::SequenceState;
use super::stage::Side;
use super::stages::Stages;
use super::types::SeqId;
use super::visibility::Class;
use super::{CacheError, RANGE};

/// Rows that no later query may see leave one layer, and finished pages seal.
pub fn commit_layer(
    stages: &Stages,
    state: &mut SequenceState,
    places: &mut Places<'_>,
    (layer, window): (usize, Option<u32>),
) -> Result<(), CacheError> {
    let next = state.len;
    let rules = stages.rules(state, (layer, window));
    let formats = &stages.formats[layer];
    let window_start = rules[0].window_start(next);
    let coded_end = state.layers[layer].coded_end;
    let mut earliest = state.earliest;
    let rebuild = stages.rebuild();
    for (h, head) in state.layers[layer].heads.iter_mut().enumerate() {
        let evicted = !head.dying.is_empty();
        let dying = std::mem::take(&mut head.dying);
        let gone = |p: u32| dying.contains_key(&p) || p < window_start;
        if !head.scores.is_empty() && (evicted || window_start > 0) {
            let positions = head.live_positions();
            let mut kept = positions.iter().map(|&p| !gone(p));
            head.scores.retain(|_| kept.next().unwrap_or(true));
            head.scores
                .shrink_to(head.scores.len().next_multiple_of(RANGE));
        }
        for side in Side::BOTH {
            let (rules, end) = (&rules[side as usize], coded_end[side as usize]);
            let aged = |p: u32| p < end && rules.coded_from(p).is_some_and(|from| from <= next);
            let mut n_gone = 0;
            for class in Class::ALL {
                let ladder = formats.ladder(h, side, class);
                let table = head.table(side, class);
                let first = table.pages().first().map_or(window_start, Page::first);
                // Coded and frozen rows leave by eviction and with the window alone.
                if class != Class::Exact && !evicted && first >= window_start {
                    continue;
                }
                let n = table.remove(places, ladder, |p| {
                    gone(p) || class == Class::Exact && aged(p)
                })?;
                if let (Class::Coded, Some(rule), 1..) = (class, &rebuild, n) {
                    let rebuilt = table.rebuild(places, ladder, rule)?;
                    places.rebuilt.add(&rebuilt, 1);
                }
                n_gone += n;
            }
            if n_gone > 0 && (evicted || window_start > 0) {
                earliest = next;
            }
            for (class, end) in [(Class::Coded, end), (Class::Exact, next)] {
                let ladder = formats.ladder(h, side, class);
                head.table(side, class).fit(places, ladder, end)?;
            }
            let ladder = formats.ladder(h, side, Class::Coded);
            head.table(side, Class::Coded).seal(places, ladder, end)?;
        }
    }
    state.earliest = earliest;
    Ok(())
}

/// Rows of tokens that were tried out leave.
pub fn drop_tried(
    stages: &Stages,
    state: &mut SequenceState,
    places: &mut Places<'_>,
) -> Result<(), CacheError> {
    let len = state.len;
    for (layer, formats) in state.layers.iter_mut().zip(&stages.formats) {
        for (h, head) in layer.heads.iter_mut().enumerate() {
            for side in Side::BOTH {
                for class in [Class::Exact, Class::Frozen] {
                    let ladder = formats.ladder(h, side, class);
                    head.table(side, class)
                        .remove(places, ladder, |p| p >= len)?;
                }
            }
        }
    }
    Ok(())
}

/// The shortest length that a sequence can go back to.
pub fn earliest(stages: &Stages, state: &SequenceState) -> u32 {
    let mut earliest = state.earliest.max(state.frozen_from.unwrap_or(0));
    for (layer, formats) in state.layers.iter().zip(&stages.formats) {
        for side in Side::BOTH {
            let (end, tail) = (layer.coded_end[side as usize], stages.tail[side as usize]);
            let format = formats.format(0, side, Class::Coded);
            // A coded row younger than the tail, or of a page that is no longer full, would have to be exact again.
            if (tail > 0 || format.codec.page_rows() > 1) && end > stages.sinks {
                earliest = earliest.max(end + tail);
            }
        }
    }
    earliest
}

/// Goes back to `len` positions, or says how far back is possible.
pub fn truncate(
    stages: &Stages,
    state: &mut SequenceState,
    places: &mut Places<'_>,
    (seq, len): (SeqId, u32),
) -> Result<(), CacheError> {
    if state.broken {
        return Err(CacheError::Broken(seq.0));
    }
    if len >= state.len {
        return Ok(());
    }
    let earliest = earliest(stages, state);
    if len < earliest {
        return Err(CacheError::Irreversible {
            seq: seq.0,
            asked: len,
            earliest,
        });
    }
    for (layer, formats) in state.layers.iter_mut().zip(&stages.formats) {
        for (h, head) in layer.heads.iter_mut().enumerate() {
            let live = head.live_positions().iter().filter(|&&p| p < len).count();
            head.scores.truncate(live);
            for side in Side::BOTH {
                for class in Class::ALL {
                    let ladder = formats.ladder(h, side, class);
                    head.table(side, class)
                        .remove(places, ladder, |p| p >= len)?;
                }
            }
            head.n_seen = len;
        }
        for end in &mut layer.coded_end {
            *end = (*end).min(len);
        }
    }
    state.len = len;
    Ok(())
}
