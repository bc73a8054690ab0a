//! The registered `pack` stages: one file per method, one line here.

use super::stage::StageDef;

/// Every `pack` stage.
pub static STAGES: &[StageDef] = &[];
