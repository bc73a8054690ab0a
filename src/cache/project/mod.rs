//! The registered `project` stages: one file per method, one line here.
//!
//! Invariants shared by all of them: maps are linear and fixed before the first row; `absorb(q)·z = q·expand(z)` up to
//! rounding, whatever q and z; sums run in one fixed order, so a row's image depends on the row alone. `aqua` is no map but
//! what is taken off a row before the maps.

pub mod aqua;
pub mod hadamard;
pub mod random_rotation;
pub mod svd;

use super::stage::StageDef;

/// Every `project` stage.
pub static STAGES: &[StageDef] = &[hadamard::DEF, random_rotation::DEF, svd::DEF, aqua::DEF];

#[cfg(test)]
mod tests;
