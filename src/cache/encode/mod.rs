//! The registered `encode` stages: one file per method, one line here.

use super::stage::StageDef;

/// Every `encode` stage.
pub static STAGES: &[StageDef] = &[];
