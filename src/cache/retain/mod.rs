//! The registered `retain` stages: one file per method, one line here.
//!
//! Invariants shared by all of them: rows keep their positions, nothing is re-indexed; while decoding, a decision depends
//! on the rows of one KV head and on positions alone, so that any chunk equals decoding.

mod attention;
pub mod budget;
pub mod expected_attention;
pub mod gate;
pub mod growth;
pub mod joint;
pub mod keydiff;
pub mod knorm;
pub mod kvzip;
pub mod observed;
pub mod random;
pub mod selection;
pub mod window;

use super::stage::{Params, Stage, StageDef, StageError};

/// Every `retain` stage.
pub static STAGES: &[StageDef] = &[
    window::DEF,
    random::DEF,
    knorm::DEF,
    keydiff::DEF,
    observed::SNAPKV,
    observed::ADAKV,
    observed::PYRAMID,
    observed::H2O,
    observed::TOVA,
    expected_attention::DEF,
    kvzip::KVZIP,
    kvzip::KVZIP_PLUS,
    gate::DEF,
    joint::DEF,
];

/// A parameter that counts positions; 0 if it was not given.
fn positions(params: &Params, name: &str) -> u32 {
    let value = params.int(name).unwrap_or(0).max(0);
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
