//! A second budget, for what comes after a compression point: by how much a head may grow while decoding.
//!
//! Invariants: what the point left a head is its share and stays its share; with growth of 0 rows a head's size stands
//! still; rows of the context and later ones compete for both together.
//!
//! ```text
//! the point left 4 rows of 8, `decoding_tokens` = 2
//! new positions   0   1   2   3   4
//! rows that live  4   5   6   6   6
//!
//! the same, `decoding_kept_fraction` = 0.5
//! rows that live  4   5   5   6   6
//! ```

use super::super::stage::{Domain, LeftAtPoint, ParamDef, Params};
use super::budget::part;
use super::positions;

/// `decoding_tokens`.
pub const DECODING_TOKENS: ParamDef = ParamDef {
    name: "decoding_tokens",
    domain: Domain::Int {
        min: 0,
        max: u32::MAX as i64,
    },
    default: None,
    doc: "rows by which a head may grow after its compression point; without it the one budget holds in both phases",
};

/// `decoding_kept_fraction`.
pub const DECODING_KEPT_FRACTION: ParamDef = ParamDef {
    name: "decoding_kept_fraction",
    domain: Domain::Fraction { min: 0.0, max: 1.0 },
    default: None,
    doc: "the same, as a part of the positions that come after the point, rounded up; 1: they all stay",
};

/// How much a head may grow while decoding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Growth {
    /// At most so many rows.
    Tokens(u32),
    /// So many per new position, rounded up.
    KeptFraction(f64),
}

impl Growth {
    /// The one that is given, if any.
    ///
    /// # Errors
    /// Both are.
    pub fn read(params: &Params) -> Result<Option<Self>, String> {
        let names = [DECODING_TOKENS, DECODING_KEPT_FRACTION].map(|def| def.name);
        let [tokens, fraction] = names;
        let rows = params.int(tokens).map(|_| positions(params, tokens));
        match (rows, params.float(fraction)) {
            (Some(n), Some(f)) => Err(format!(
                "`{tokens}` = {n} and `{fraction}` = {f} are two budgets for decoding: give one of them"
            )),
            (Some(n), None) => Ok(Some(Growth::Tokens(n))),
            (None, Some(f)) => Ok(Some(Growth::KeptFraction(f))),
            (None, None) => Ok(None),
        }
    }

    /// Rows that may live of a head of which the point left so many, once it reaches `n_reached` positions.
    pub fn rows(self, left: LeftAtPoint, n_reached: u32) -> u32 {
        let f = match self {
            Growth::Tokens(n) => return left.kept.saturating_add(n.min(left.since)).max(1),
            Growth::KeptFraction(f) => f,
        };
        // Where a sliding window passes the context, shares of what it still reaches count: in the end, of later positions alone.
        let new = left.since.min(n_reached);
        let of_some = |share: f64, n: u32| if n == 0 { 0.0 } else { part(share, n) };
        let share = f64::from(left.kept) / f64::from(left.of.max(1));
        let old = of_some(share, (n_reached - new).min(left.of));
        ((old + of_some(f, new)) as u32).max(1)
    }
}
