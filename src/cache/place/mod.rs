//! The registered `place` stages: one file per method, one line here.

pub mod file;
pub mod quest;
pub mod specache;

use super::stage::StageDef;

/// Every `place` stage.
pub static STAGES: &[StageDef] = &[file::DEF, specache::DEF, quest::DEF];
