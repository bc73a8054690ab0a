//! The registered `retain` stages: one file per method, one line here.

use super::stage::StageDef;

/// Every `retain` stage.
pub static STAGES: &[StageDef] = &[];
