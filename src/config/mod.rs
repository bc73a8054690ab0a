//! Experiments: from a TOML file to a checked plan of cells.
//!
//! [`load`] reads a file with what it `extends`, lays the overrides on top, expands sweeps and presets, and gives a
//! [`Plan`], or everything that is wrong at once. experiments/README.md documents every key.
//!
//! Invariant: reading an experiment loads no model and uses no network.

mod bars;
mod budget;
mod data;
mod plan;
mod presets;
mod problems;
mod protocol;
mod protocols;
mod raw;
mod read;
mod resolve;
mod retention;
mod stages;
mod strategies;
mod sweep;
mod training;

use std::path::Path;
use std::sync::Arc;

pub use plan::{
    CalibrationPlan, Cell, ModelLimits, NUMBERS, Origins, Plan, is_calibrated, stages_of,
};
pub use presets::{PRESETS, Preset};
pub use problems::{Location, Problem, Problems, did_you_mean, nearest};
pub use protocol::{Bos, Protocol};
pub use protocols::{PROTOCOLS, ProtocolDef};
pub use strategies::describe;
pub use training::{Training, load_training};

use crate::cache::rope::{PairLayout, Rope};
use crate::cache::{Geometry, LayerGeometry};
use problems::{Diagnostics, Source, SourceKind};

/// Reads an experiment. Each override is `key.path=value`; the value is TOML, a bare word is taken as a string.
///
/// # Errors
/// Everything that is wrong with it, each with file, line and column.
pub fn load(path: &Path, overrides: &[String]) -> Result<Plan, Problems> {
    let mut diagnostics = Diagnostics::default();
    let tree = raw::read_file(path, &mut diagnostics);
    finish(tree, &stem(path), overrides, diagnostics)
}

/// Reads an experiment from a text; `name` is how messages call it. Paths in it are relative to the current folder.
///
/// # Errors
/// As [`load`].
pub fn parse(name: &str, text: &str, overrides: &[String]) -> Result<Plan, Problems> {
    let mut diagnostics = Diagnostics::default();
    let source = Source {
        kind: SourceKind::Text,
        name: name.to_owned(),
        path: None,
        text: text.to_owned(),
    };
    let tree = raw::parse(source, &mut diagnostics);
    finish(tree, &stem(Path::new(name)), overrides, diagnostics)
}

fn stem(path: &Path) -> String {
    path.file_stem()
        .map_or("experiment".into(), |s| s.to_string_lossy().into_owned())
}

fn finish(
    tree: Option<raw::Table>,
    default_name: &str,
    overrides: &[String],
    mut diagnostics: Diagnostics,
) -> Result<Plan, Problems> {
    let plan = tree.and_then(|mut tree| {
        for text in overrides {
            raw::apply_override(&mut tree, text, &mut diagnostics);
        }
        resolve::resolve(&tree, default_name, &mut diagnostics)
    });
    let problems = diagnostics.into_problems();
    match plan {
        Some(plan) if problems.is_empty() => Ok(plan),
        _ => Err(problems),
    }
}

/// Names of the built-in models.
fn builtin_models() -> Vec<&'static str> {
    let models = crate::model::source::builtin();
    models.iter().map(|m| m.name).collect()
}

/// Heads that suit every registered stage: a stage's parameters can be tried without a model.
fn stand_in_geometry() -> Geometry {
    let rope = Arc::new(Rope::new(
        PairLayout::HalfSplit,
        Rope::frequencies(10_000.0, 256),
        1,
    ));
    let layer = LayerGeometry {
        n_heads: 2,
        n_kv_heads: 1,
        head_dim: 256,
        scale: 1.0 / 16.0,
        rope,
        window: None,
    };
    Geometry {
        layers: vec![layer],
    }
}
