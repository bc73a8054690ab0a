//! The registered `project` stages: one file per method, one line here.

use super::stage::StageDef;

/// Every `project` stage.
pub static STAGES: &[StageDef] = &[];
