//! Lists of numbers as llama-bench takes them.
//!
//! Invariant: a range has at most 64 numbers, none beyond any model's context.

use std::str::FromStr;

/// One element of a list of numbers: `512`, `0-4096+512` or `1-16*2`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counts(pub Vec<usize>);

/// No more numbers than that in one range, and none beyond any model's context.
const MAX_COUNTS: usize = 64;
const MAX_COUNT: usize = 1 << 24;

impl FromStr for Counts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let must = || {
            format!(
                "`{text}` must be a number up to {MAX_COUNT}, or a range like 0-4096+512 or 1-16*2"
            )
        };
        let number = |s: &str| s.trim().parse().ok().filter(|&n: &usize| n <= MAX_COUNT);
        let Some((first, rest)) = text.split_once('-') else {
            return number(text).map(|n| Self(vec![n])).ok_or_else(must);
        };
        let (last, step, factor) = match (rest.split_once('+'), rest.split_once('*')) {
            (Some((last, step)), _) => (last, number(step), Some(1)),
            (None, Some((last, factor))) => (last, Some(0), number(factor)),
            (None, None) => (rest, Some(1), Some(1)),
        };
        let (first, last) = (
            number(first).ok_or_else(must)?,
            number(last).ok_or_else(must)?,
        );
        let (step, factor) = (step.ok_or_else(must)?, factor.ok_or_else(must)?);
        let next = |&n: &usize| Some(n * factor + step).filter(|&next| next > n);
        let all = std::iter::successors(Some(first), next).take_while(|&n| n <= last);
        let all: Vec<usize> = all.take(MAX_COUNTS + 1).collect();
        match all.len() {
            0 => Err(must()),
            n if n > MAX_COUNTS => Err(format!("`{text}` has more than {MAX_COUNTS} numbers")),
            _ => Ok(Self(all)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_numbers_and_ranges() {
        let counts = |text: &str| text.parse::<Counts>().map(|c| c.0);
        assert_eq!(counts("512"), Ok(vec![512]));
        assert_eq!(counts("1-3"), Ok(vec![1, 2, 3]));
        assert_eq!(counts("0-4096+2048"), Ok(vec![0, 2048, 4096]));
        assert_eq!(counts("1-8*2"), Ok(vec![1, 2, 4, 8]));
        assert_eq!(counts("5-9*1"), Ok(vec![5]));
        for wrong in ["", "x", "3-1", "1-", "1-4+x", "1-1000", "99999999"] {
            assert!(counts(wrong).is_err(), "{wrong}");
        }
    }
}
