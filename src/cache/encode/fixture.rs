//! Codecs built from the registry's examples, and rows to try them on.

use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::cache::Geometry;
use crate::cache::stage::{
    BuildContext, Codec, HeadContext, KeyForm, PageCodec, Params, RowCodec, Side, Stage, StageDef,
    StageError, Value,
};

/// Normal random numbers.
pub fn normals(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n)
        .map(|_| {
            let (a, b): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
            ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
        })
        .collect()
}

/// ‖x − y‖ / ‖x‖.
pub fn relative_error(x: &[f32], y: &[f32]) -> f64 {
    let sum = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
        x.iter()
            .zip(y)
            .map(|(&a, &b)| f(f64::from(a), f64::from(b)))
            .sum()
    };
    (sum(&|a, b| (a - b) * (a - b)) / sum(&|a, _| a * a)).sqrt()
}

/// Builds a stage for rows of `dim` channels of K; a stage that learns sees 200 normal rows.
pub fn build(def: &StageDef, params: &Params, dim: usize) -> Result<Codec, StageError> {
    build_for(Side::K, def, params, dim)
}

fn build_for(side: Side, def: &StageDef, params: &Params, dim: usize) -> Result<Codec, StageError> {
    if (def.calibrated)(params) {
        build_on(side, def, params, (dim, &[normals(200 * dim, 77)]))
    } else {
        build_on(side, def, params, (dim, &[]))
    }
}

/// Builds a stage for rows of `dim` channels from calibration rows.
pub fn build_on(
    side: Side,
    def: &StageDef,
    params: &Params,
    (dim, samples): (usize, &[Vec<f32>]),
) -> Result<Codec, StageError> {
    let context = BuildContext {
        geometry: &Geometry { layers: Vec::new() },
        keys: KeyForm::PostRope,
        side,
        calibration: None,
        backing_dir: None,
        head: Some(HeadContext {
            samples,
            ..HeadContext::any(dim)
        }),
    };
    match (def.build)(params, &context)? {
        Stage::Encode(codec) => Ok(codec),
        _ => panic!("{} is not a codec", def.name),
    }
}

/// Every example of a stage with its parameters.
pub fn examples(def: &'static StageDef) -> impl Iterator<Item = (&'static str, Params)> {
    def.examples.iter().map(|&example| {
        let table: toml::Table = format!("x = {example}").parse().unwrap();
        let mut given = Params::default();
        for (key, value) in table["x"].as_table().into_iter().flatten() {
            let value = match value {
                toml::Value::Integer(v) => Value::Int(*v),
                toml::Value::Float(v) => Value::Float(*v),
                other => Value::Text(other.as_str().unwrap().to_owned()),
            };
            given.0.insert(key.clone(), value);
        }
        given.0.remove("method");
        (example, Params::resolve(def, &given).unwrap())
    })
}

/// Every example, built for rows of `dim` channels; what learns is built for K and for V.
pub fn codecs(def: &'static StageDef, dim: usize) -> impl Iterator<Item = (&'static str, Codec)> {
    examples(def).flat_map(move |(example, params)| {
        let n_sides = 1 + usize::from((def.calibrated)(&params));
        let sides = [Side::K, Side::V].into_iter().take(n_sides);
        let build = |side| build_for(side, def, &params, dim);
        let built: Vec<Codec> = sides
            .map(|side| build(side).unwrap_or_else(|e| panic!("{example}: {e}")))
            .collect();
        built.into_iter().map(move |codec| (example, codec))
    })
}

/// The examples that code rows, built for rows of `dim` channels.
pub fn row_codecs(def: &'static StageDef, dim: usize) -> Vec<(&'static str, Arc<dyn RowCodec>)> {
    codecs(def, dim)
        .filter_map(|(example, codec)| match codec {
            Codec::Rows(codec) => Some((example, codec)),
            Codec::Pages(_) => None,
        })
        .collect()
}

/// The examples that code pages, built for rows of `dim` channels.
pub fn page_codecs(def: &'static StageDef, dim: usize) -> Vec<(&'static str, Arc<dyn PageCodec>)> {
    codecs(def, dim)
        .filter_map(|(example, codec)| match codec {
            Codec::Pages(codec) => Some((example, codec)),
            Codec::Rows(_) => None,
        })
        .collect()
}
