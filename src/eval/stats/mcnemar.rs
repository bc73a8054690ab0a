//! McNemar's exact test: which of two is right more often on the same items.
//!
//! Invariant: only items on which the two disagree count; under the hypothesis of no difference each falls to either side
//! like a fair coin, so p is two-sided binomial.
//!
//! ```text
//! a   1 1 1 0 1 0 1 1 0 1        only a right: items 3, 5, 8 (b: 0)   only b right: item 4
//! b   1 1 0 1 0 0 1 0 0 1        p = 2 · P(Bin(4, ½) ≤ 1) = 2 · 5/16 = 0.625
//! ```
//!
//! Source: Q. McNemar, Psychometrika 12 (1947), with the exact binomial tail.

use serde::Serialize;
use statrs::distribution::{Binomial, DiscreteCDF};

/// Two answers to the same yes-or-no questions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct McNemar {
    /// Items.
    pub n: usize,
    /// Items that only the first has right.
    pub only_a: usize,
    /// Items that only the second has right.
    pub only_b: usize,
    /// Two-sided exact p; 1 where the two never disagree.
    pub p: f64,
}

impl McNemar {
    /// Compares two lists of the same items; `None` without items or for lists of different lengths.
    pub fn exact(a: &[bool], b: &[bool]) -> Option<Self> {
        if a.is_empty() || a.len() != b.len() {
            return None;
        }
        let count = |first: bool| {
            a.iter()
                .zip(b)
                .filter(|&(&a, &b)| a != b && a == first)
                .count()
        };
        let (only_a, only_b) = (count(true), count(false));
        let coins = Binomial::new(0.5, (only_a + only_b) as u64).ok()?;
        let p = (2.0 * coins.cdf(only_a.min(only_b) as u64)).min(1.0);
        Some(Self {
            n: a.len(),
            only_a,
            only_b,
            p,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drawn_example() {
        let bits = |text: &str| text.bytes().map(|c| c == b'1').collect::<Vec<_>>();
        let found = McNemar::exact(&bits("1110101101"), &bits("1101001001")).unwrap();
        assert_eq!((found.n, found.only_a, found.only_b), (10, 3, 1));
        assert!((found.p - 0.625).abs() < 1e-12, "{}", found.p);
        let same = McNemar::exact(&[true, false], &[true, false]).unwrap();
        assert_eq!((same.only_a, same.only_b, same.p), (0, 0, 1.0));
        assert_eq!(McNemar::exact(&[true], &[]), None);
        assert_eq!(McNemar::exact(&[], &[]), None);
    }
}
