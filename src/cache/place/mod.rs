//! The registered `place` stages: one file per method, one line here.

pub mod file;

use super::stage::StageDef;

/// Every `place` stage.
pub static STAGES: &[StageDef] = &[file::DEF];
