//! Which query may see which version of a row: the rules of "as if decoded" in one place.
//!
//! Invariant: a row's version is visible in a half-open interval of query positions that depends on the row's position
//! and on decisions already made, never on how the queries are cut into chunks.
//!
//! Example, `tail = 3`, one sink, query at position 7 of a sequence of 10:
//!
//! ```text
//! position  0 1 2 3 4 5 6 7 8 9
//! exact     x . . . . x x x . .     the sink, and rows younger than 3
//! coded     . x x x x . . . . .     rows of age 3 and more
//! ```

use std::collections::BTreeMap;

use super::RANGE;

/// Query positions from `.0` up to, not including, `.1`.
pub type Interval = (u32, u32);

/// No end.
pub const FOREVER: u32 = u32::MAX;

/// In which table a version of a row lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Projected and encoded.
    Coded,
    /// Sinks and tail.
    Exact,
    /// Rows of an exact continuation.
    Frozen,
}

impl Class {
    /// In the order in which a range's rows are summed.
    pub const ALL: [Class; 3] = [Class::Coded, Class::Exact, Class::Frozen];
}

/// The rules of one layer of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Newest rows that stay exact.
    pub tail: u32,
    /// First rows that stay exact.
    pub sinks: u32,
    /// First position of an exact continuation; nothing ages from there on.
    pub frozen_from: Option<u32>,
    /// The layer's sliding window.
    pub window: Option<u32>,
}

impl Rules {
    /// The first query position that sees the row coded; `None`: never.
    pub fn coded_from(&self, position: u32) -> Option<u32> {
        if position < self.sinks || self.frozen_from.is_some_and(|f| position >= f) {
            return None;
        }
        let from = position.saturating_add(self.tail);
        // Ageing happens in steps before the freeze only.
        if self.frozen_from.is_some_and(|f| from >= f) {
            None
        } else {
            Some(from)
        }
    }

    /// Rows below this position are past the tail once a query at `last` is asked: coded, unless they are sinks.
    pub fn coded_end(&self, last: u32) -> u32 {
        (last + 1).saturating_sub(self.tail)
    }

    /// Rows below this position are dropped before a query at `next`: a sliding window drops whole pages, so that a step
    /// between them costs nothing.
    pub fn window_start(&self, next: u32) -> u32 {
        let first_seen = self.window.map_or(0, |w| (next + 1).saturating_sub(w));
        first_seen / RANGE as u32 * RANGE as u32
    }

    /// Query positions that may see this version of the row, evictions apart.
    pub fn interval(&self, class: Class, position: u32) -> Interval {
        let (from, until) = match class {
            Class::Coded => (self.coded_from(position).unwrap_or(FOREVER), FOREVER),
            Class::Exact => (position, self.coded_from(position).unwrap_or(FOREVER)),
            Class::Frozen => (position, FOREVER),
        };
        let windowed = self.window.map_or(FOREVER, |w| position.saturating_add(w));
        (from, until.min(windowed))
    }
}

/// Rows of one head that leave at the end of the running step: position → first query that does not see it.
pub type Dying = BTreeMap<u32, u32>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_query_sees_each_row_in_exactly_one_version() {
        for tail in [0, 1, 3, 50] {
            for sinks in [0, 2] {
                for frozen_from in [None, Some(6)] {
                    let rules = Rules {
                        tail,
                        sinks,
                        frozen_from,
                        window: None,
                    };
                    for q in 0..12u32 {
                        for p in 0..=q {
                            let in_freeze = frozen_from.is_some_and(|f| p >= f);
                            let n = Class::ALL
                                .iter()
                                .filter(|&&c| (c == Class::Frozen) == in_freeze)
                                .map(|&c| rules.interval(c, p))
                                .filter(|&(from, until)| from <= q && q < until)
                                .count();
                            assert_eq!(
                                n, 1,
                                "tail {tail} sinks {sinks} freeze {frozen_from:?} q {q} p {p}"
                            );
                        }
                    }
                }
            }
        }
    }
}
