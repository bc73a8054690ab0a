//! The floor: the context dropped but for its first rows, which any context must beat.

use crate::cache::stage::{Params, Value};
use crate::cache::strategy::{StageSpec, Strategy};

/// Context rows that the floor keeps: attention sinks, without which no context-free run is meaningful.
pub const FLOOR_SINKS: usize = 4;

/// Whether the floor runs beside the strategies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Floor {
    /// It does.
    Run,
    /// It doesn't.
    Leave,
}

/// f32 rows, the context dropped but for its sinks.
pub(super) fn strategy() -> Strategy {
    let mut params = Params::default();
    params.0.insert("recent".into(), Value::Int(0));
    params
        .0
        .insert("sinks".into(), Value::Int(FLOOR_SINKS as i64));
    Strategy {
        retain: Some(StageSpec {
            name: "window".into(),
            params,
        }),
        label: "floor".into(),
        ..Strategy::bare("f32")
    }
}
