//! The registered `pack` stages: one file per method, one line here.
//!
//! Invariant shared by all of them: unpacking gives back exactly the bytes that were packed, whatever they are, or an
//! error; damaged bytes are never handed on.

pub mod zstd;

use super::stage::StageDef;

/// Every `pack` stage.
pub static STAGES: &[StageDef] = &[zstd::DEF];
