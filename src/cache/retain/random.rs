//! `random`: rows at random, the control that every score must beat.
//!
//! Invariant: a row's score depends on the seed, its layer, its KV head and its position alone.

use super::super::stage::{Domain, Kind, NewRow, ParamDef, StageDef, Tolerance, never};
use super::budget::{
    ALLOCATE, BETA, BYTES, BYTES_PER_TOKEN, KEPT_FRACTION, REBUILD, RECENT, SAFEGUARD, SEGMENTS,
    SINKS, TOKENS, WHITELIST,
};
use super::growth::{DECODING_KEPT_FRACTION, DECODING_TOKENS};
use super::selection::{Score, Selection};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "random",
    kind: Kind::Retain,
    doc: "rows at random, each head its own",
    paper: "a control",
    params: &[
        TOKENS,
        KEPT_FRACTION,
        BYTES,
        BYTES_PER_TOKEN,
        DECODING_TOKENS,
        DECODING_KEPT_FRACTION,
        ALLOCATE,
        SAFEGUARD,
        BETA,
        SINKS,
        RECENT,
        WHITELIST,
        SEGMENTS,
        REBUILD,
        ParamDef {
            name: "seed",
            domain: Domain::Int {
                min: 0,
                max: i64::MAX,
            },
            default: Some("0"),
            doc: "seed of the choice",
        },
    ],
    calibrated: never,
    examples: &["{ method = \"random\", kept_fraction = 0.5 }"],
    tolerance: Tolerance::Exact,
    build: |params, _| {
        let seed = params.int("seed").unwrap_or(0) as u64;
        Selection::stage("random", params, 0, Random { seed })
    },
};

/// The score.
pub struct Random {
    seed: u64,
}

impl Score for Random {
    fn arrival(&self, row: NewRow<'_>) -> f32 {
        let place = (row.layer as u64) << 48 | (row.kv_head as u64) << 32 | u64::from(row.position);
        // SplitMix64's finalizer, twice, so that neighbours share nothing; 24 bits are what a float holds.
        (mixed(mixed(self.seed) ^ place) >> 40) as f32
    }
}

/// SplitMix64's step.
pub(super) fn mixed(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}
