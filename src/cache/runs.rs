//! Which rows of a class stand together both where they are stored and among all rows that a query sees.
//!
//! Invariant: the runs are as long as they can be, and in order of position.

use super::RANGE;
use super::formats::Mask;

/// Neighbours among the rows of a class that are neighbours among all rows that are seen, too.
#[derive(Debug, PartialEq, Eq)]
pub struct Run {
    /// Rank of the first one in its class.
    pub from: usize,
    /// Its rank among all.
    pub to: usize,
    /// How many.
    pub n: usize,
}

/// Cuts the rows of a class that are seen into runs.
pub struct Runs {
    stored: Mask,
    left: Mask,
    all: Mask,
}

impl Runs {
    /// Of the rows that are `stored`, those that are `visible`, which are among `all`.
    pub fn new(stored: Mask, visible: Mask, all: Mask) -> Self {
        Self {
            stored,
            left: visible,
            all,
        }
    }
}

impl Iterator for Runs {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        if self.left == 0 {
            return None;
        }
        if self.left == self.stored && self.stored == self.all {
            // The usual range: nothing but these rows.
            let n = std::mem::take(&mut self.left).count_ones() as usize;
            return Some(Run { from: 0, to: 0, n });
        }
        let rank = |of: Mask, slot: u32| (of & ((1 << slot) - 1)).count_ones() as usize;
        let first = self.left.trailing_zeros();
        let (from, to) = (rank(self.stored, first), rank(self.all, first));
        let mut n = 0;
        // Rows that are neither stored nor seen between two neighbours don't part them.
        while self.left != 0 {
            let slot = self.left.trailing_zeros();
            if (rank(self.stored, slot), rank(self.all, slot)) != (from + n, to + n) {
                break;
            }
            let len = (self.left >> slot).trailing_ones();
            n += len as usize;
            let done = if len == RANGE as u32 {
                Mask::MAX
            } else {
                ((1 << len) - 1) << slot
            };
            self.left &= !done;
        }
        Some(Run { from, to, n })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_what_lies_together_in_both_orders() {
        let runs = |stored, visible, all| Runs::new(stored, visible, all).collect::<Vec<_>>();
        let run = |from, to, n| Run { from, to, n };
        assert_eq!(runs(Mask::MAX, Mask::MAX, Mask::MAX), [run(0, 0, RANGE)]);
        // Holes everywhere, but in both alike.
        assert_eq!(runs(0b101_0101, 0b101_0101, 0b101_0101), [run(0, 0, 4)]);
        // A stored row that is not seen; a row of another class.
        assert_eq!(runs(0b1111, 0b1011, 0b1011), [run(0, 0, 2), run(3, 2, 1)]);
        assert_eq!(runs(0b1011, 0b1011, 0b1111), [run(0, 0, 2), run(2, 3, 1)]);
        assert_eq!(runs(1 << 127, 1 << 127, Mask::MAX), [run(0, 127, 1)]);
        assert_eq!(runs(Mask::MAX, 0, Mask::MAX), []);
    }
}
