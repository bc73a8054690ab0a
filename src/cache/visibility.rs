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
//!
//! The same with pages of 4 rows and no tail: a page is coded at the end of the step that fills it.
//!
//! ```text
//! exact     x . . . x x x x . .
//! coded     . x x x . . . . . .
//! ```

use std::collections::BTreeMap;

use super::RANGE;
use super::formats::Mask;

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
    /// Exact copies of coded rows, out of a tier, read in their place. They lie in no table of a sequence's own.
    Fetched,
}

impl Class {
    /// Those with tables, in the order in which a range's rows are summed.
    pub const ALL: [Class; 3] = [Class::Coded, Class::Exact, Class::Frozen];

    /// Those that one token reads, in that order.
    pub const READ: [Class; 4] = [Class::Coded, Class::Exact, Class::Frozen, Class::Fetched];
}

/// The rules of one side of one layer of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Newest rows that stay exact; of a page-wise side, rows that must follow a page before it is coded.
    pub tail: u32,
    /// Rows that are coded together, 1 for a row-wise side.
    pub page: u32,
    /// First rows that stay exact.
    pub sinks: u32,
    /// Queries before this position see no page-wise page coded; [`FOREVER`] while a compression point is ahead.
    pub not_before: u32,
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
        // Ageing happens in steps before the freeze only.
        if self
            .frozen_from
            .is_some_and(|f| position >= self.coded_end(f))
        {
            return None;
        }
        if self.page == 1 {
            return Some(position.saturating_add(self.tail));
        }
        Some(self.page_coded_at(position)).filter(|&p| p < FOREVER)
    }

    /// The length of the sequence at the end of the step that codes the row's page; [`FOREVER`]: none does yet.
    pub fn page_coded_at(&self, position: u32) -> u32 {
        let page_end = (position / self.page + 1) * self.page;
        page_end.saturating_add(self.tail).max(self.not_before)
    }

    /// Rows below this position are coded at the end of a step after which the sequence has `len` positions, unless they
    /// are sinks.
    pub fn coded_end(&self, len: u32) -> u32 {
        if self.page > 1 && len < self.not_before {
            return 0;
        }
        len.saturating_sub(self.tail) / self.page * self.page
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
            Class::Coded | Class::Fetched => {
                (self.coded_from(position).unwrap_or(FOREVER), FOREVER)
            }
            Class::Exact => (position, self.coded_from(position).unwrap_or(FOREVER)),
            Class::Frozen => (position, FOREVER),
        };
        let windowed = self.window.map_or(FOREVER, |w| position.saturating_add(w));
        (from, until.min(windowed))
    }

    /// The rules for a query that is tried out one position past a sequence's end: no row is older for it than for the
    /// sequence's own last query.
    pub fn past_the_end(self) -> Self {
        match (self.page, self.frozen_from) {
            (1, None) => Self {
                tail: self.tail.saturating_add(1),
                ..self
            },
            _ => self,
        }
    }

    /// Rows from the sinks up to this position are seen coded by a query.
    fn coded_below(&self, query: u32) -> u32 {
        if self.page > 1 && query < self.not_before {
            return 0;
        }
        let aged = match self.page {
            1 => (query + 1).saturating_sub(self.tail),
            page => query.saturating_sub(self.tail) / page * page,
        };
        // Ageing happens in steps before the freeze only.
        self.frozen_from
            .map_or(aged, |f| aged.min(self.coded_end(f)))
    }

    /// What a query may see, evictions apart.
    pub fn sight(&self, query: u32) -> Sight {
        let first_in_window = self.window.map_or(0, |w| (query + 1).saturating_sub(w));
        Sight {
            past: (first_in_window, query + 1),
            coded: (self.sinks, self.coded_below(query)),
        }
    }

    /// The rows of a range whose version in one class a query may see, evictions apart: [`Rules::interval`] for all of
    /// them at once.
    pub fn seen(&self, class: Class, query: u32, range: u32) -> Mask {
        self.sight(query).seen(class, range)
    }
}

/// What one query may see, evictions apart: positions from `.0` up to `.1`.
#[derive(Debug, Clone, Copy)]
pub struct Sight {
    past: (u32, u32),
    coded: (u32, u32),
}

impl Sight {
    /// The rows of a range whose version in one class may be seen.
    pub fn seen(&self, class: Class, range: u32) -> Mask {
        let past = slots(self.past, range);
        match class {
            // What came back is read where the coded row would be.
            Class::Coded | Class::Fetched => past & slots(self.coded, range),
            Class::Exact => past & !slots(self.coded, range),
            Class::Frozen => past,
        }
    }
}

/// The rows of a range at positions from `start` up to `end`.
fn slots((start, end): (u32, u32), range: u32) -> Mask {
    let first = range * RANGE as u32;
    if start <= first && first + RANGE as u32 <= end {
        return Mask::MAX;
    }
    let slot = |p: u32| p.saturating_sub(first).min(RANGE as u32);
    let below = |n: u32| Mask::MAX.checked_shr(RANGE as u32 - n).unwrap_or(0);
    below(slot(end)) & !below(slot(start))
}

/// Rows of one head that leave at the end of the running step: position → first query that does not see it.
pub type Dying = BTreeMap<u32, u32>;

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(tail: u32, page: u32, sinks: u32) -> Rules {
        Rules {
            tail,
            page,
            sinks,
            not_before: 0,
            frozen_from: None,
            window: None,
        }
    }

    #[test]
    fn every_query_sees_each_row_in_exactly_one_version() {
        for (tail, page) in [(0, 1), (1, 1), (3, 1), (50, 1), (0, 4), (3, 4), (50, 4)] {
            for sinks in [0, 2] {
                for (frozen_from, not_before) in
                    [(None, 0), (Some(6), 0), (Some(8), 8), (None, FOREVER)]
                {
                    let rules = Rules {
                        frozen_from,
                        not_before,
                        ..rules(tail, page, sinks)
                    };
                    for q in 0..16u32 {
                        for p in 0..=q {
                            let in_freeze = frozen_from.is_some_and(|f| p >= f);
                            let n = Class::ALL
                                .iter()
                                .filter(|&&c| (c == Class::Frozen) == in_freeze)
                                .map(|&c| rules.interval(c, p))
                                .filter(|&(from, until)| from <= q && q < until)
                                .count();
                            assert_eq!(n, 1, "{rules:?} q {q} p {p}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_range_s_rows_at_once_are_those_of_the_intervals() {
        for (tail, page) in [(0, 1), (3, 1), (0, 4), (130, 64), (3, 128)] {
            for (sinks, frozen_from) in [(0, None), (2, Some(200)), (300, None), (4, Some(131))] {
                for (not_before, window) in [(0, None), (150, Some(40)), (FOREVER, Some(200))] {
                    let rules = Rules {
                        not_before,
                        frozen_from,
                        window,
                        ..rules(tail, page, sinks)
                    };
                    for (q, class) in (0..400).flat_map(|q| Class::ALL.map(|c| (q, c))) {
                        for range in 0..3 {
                            let first = range * RANGE as u32;
                            let want = (first..=q.min(first + 127))
                                .filter(|&p| {
                                    let (from, until) = rules.interval(class, p);
                                    from <= q && q < until
                                })
                                // Rows of the continuation are frozen, those before it aren't.
                                .filter(|&p| {
                                    let frozen = frozen_from.is_some_and(|f| p >= f);
                                    frozen == (class == Class::Frozen)
                                })
                                .fold(0, |m: Mask, p| m | 1 << (p - first));
                            let stored = (first..first + 128)
                                .filter(|&p| {
                                    let frozen = frozen_from.is_some_and(|f| p >= f);
                                    frozen == (class == Class::Frozen)
                                })
                                .fold(0, |m: Mask, p| m | 1 << (p - first));
                            let got = rules.seen(class, q, range) & stored;
                            assert_eq!(got, want, "{rules:?} {class:?} query {q}, range {range}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_is_coded_for_the_queries_after_the_step_that_coded_it() {
        for (tail, page) in [(0, 1), (3, 1), (0, 4), (3, 4)] {
            let rules = rules(tail, page, 0);
            for p in 0..20 {
                // A row-wise row is coded before its step's own query, a page at the end of its last row's step.
                let coded = (0..40).find(|&len| rules.coded_end(len) > p).unwrap();
                let own = u32::from(page == 1);
                assert_eq!(rules.coded_from(p), Some(coded - own), "{rules:?} p {p}");
            }
        }
    }

    #[test]
    fn pages_wait_for_the_compression_point() {
        let rules = Rules {
            not_before: 10,
            ..rules(0, 4, 0)
        };
        assert_eq!((rules.coded_end(9), rules.coded_end(10)), (0, 8));
        assert_eq!(rules.coded_from(3), Some(10));
        assert_eq!(rules.coded_from(9), Some(12));
    }
}
