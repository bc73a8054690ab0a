//! Bytes of a strategy before anything is run: a real cache is filled with random rows and measured.
//!
//! Invariants: the bytes are summed from live buffers as in a run; layers of equal shape are filled once and counted as
//! often as the model has them; the rows come from a seeded generator, so the bytes are the same each time.

use std::f32::consts::TAU;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::cache::pipeline::StagedCache;
use crate::cache::project::aqua;
use crate::cache::stage::{Calibration, HeadCovariance, HeadRows};
use crate::cache::stages::Materials;
use crate::cache::strategy::{StageSpec, Strategy};
use crate::cache::{
    Admission, Batch, CacheError, Continuation, Geometry, KvCache, LayerGeometry, MemoryReport,
    Repetition, Rows, SeenLayer, SeqId,
};
use crate::config::Protocol;
use crate::config::is_calibrated;

const SEQ: SeqId = SeqId(0);
const STEP: usize = 256;

/// The cache's bytes after `n_tokens` of one sequence: at the compression point, or at the end of a stream.
///
/// # Errors
/// What building or filling the cache gives.
pub fn at(
    strategy: &Strategy,
    geometry: &Geometry,
    protocol: &Protocol,
    n_tokens: usize,
) -> Result<MemoryReport, CacheError> {
    let mut total = MemoryReport::default();
    let of_all_layers = |spec: &StageSpec| {
        ["bytes", "bytes_per_token", "file"]
            .iter()
            .any(|key| spec.params.0.contains_key(*key))
    };
    let shares = strategy.budget.is_some() || strategy.retain.as_ref().is_some_and(of_all_layers);
    if shares || aqua::of(strategy).is_some() {
        // The layers share a budget or a file of weights, or predict each other: one alone says nothing.
        return fill(strategy, geometry, protocol, n_tokens);
    }
    for (layer, n_layers) in distinct(geometry) {
        let one = Geometry {
            layers: vec![layer.clone()],
        };
        let one = fill(strategy, &one, protocol, n_tokens)?;
        // A stage that learns has tables for each layer.
        total.table_bytes += one.table_bytes * if is_calibrated(strategy) { n_layers } else { 1 };
        add(&mut total, &one, n_layers);
    }
    Ok(total)
}

/// The shapes of layers, each with how many layers have it.
fn distinct(geometry: &Geometry) -> Vec<(&LayerGeometry, u64)> {
    let mut shapes: Vec<(&LayerGeometry, u64)> = Vec::new();
    let shape = |l: &LayerGeometry| (l.n_kv_heads, l.head_dim, l.window);
    for layer in &geometry.layers {
        match shapes.iter_mut().find(|(l, _)| shape(l) == shape(layer)) {
            Some((_, n)) => *n += 1,
            None => shapes.push((layer, 1)),
        }
    }
    shapes
}

fn add(total: &mut MemoryReport, one: &MemoryReport, n: u64) {
    total.payload_bytes += n * one.payload_bytes;
    total.scale_bytes += n * one.scale_bytes;
    total.index_bytes += n * one.index_bytes;
    total.page_table_bytes += n * one.page_table_bytes;
    total.projection_bytes += n * one.projection_bytes;
    total.exact_bytes += n * one.exact_bytes;
    total.slack_bytes += n * one.slack_bytes;
    total.scratch_bytes = total.scratch_bytes.max(one.scratch_bytes);
    total.backing_bytes += n * one.backing_bytes;
    total.rows_live += n * one.rows_live;
    for (total, one) in total.rows_at_level.iter_mut().zip(one.rows_at_level) {
        *total += n * one;
    }
    total.rows_seen += n * one.rows_seen;
    total.rebuilt.add(&one.rebuilt, n);
}

fn fill(
    strategy: &Strategy,
    geometry: &Geometry,
    protocol: &Protocol,
    n_tokens: usize,
) -> Result<MemoryReport, CacheError> {
    let admission = match protocol {
        Protocol::Stream { .. } => Admission::Streaming,
        Protocol::CompressOnce { .. } | Protocol::Tasks { .. } | Protocol::Generate { .. } => {
            Admission::Context
        }
    };
    let (mut cache, reports) = fill_to(strategy, geometry, admission, &[n_tokens])?;
    if admission == Admission::Context {
        if cache.needs().context.any() {
            show(&mut cache, geometry, n_tokens)?;
        }
        cache.compress(SEQ, Continuation::Strategy)?;
        return Ok(cache.memory());
    }
    Ok(reports[0])
}

/// Shows a context of noise: how much leaves does not depend on what was seen.
fn show(cache: &mut StagedCache, geometry: &Geometry, n_tokens: usize) -> Result<(), CacheError> {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let n_queries = cache.needs().context.queries.min(n_tokens);
    let mut layers = Vec::new();
    for layer in &geometry.layers {
        let n = layer.n_kv_heads * layer.head_dim;
        let rows = [
            n * n_tokens,
            n * n_tokens,
            n_queries * layer.n_heads * layer.head_dim,
        ]
        .map(|n| normal(&mut rng, n));
        let mut scores = || {
            (0..layer.n_kv_heads)
                .map(|_| normal(&mut rng, n_tokens))
                .map(|x| x.iter().map(|x| x.abs()).collect())
                .collect()
        };
        let repetition = Repetition {
            attention: scores(),
            weighted: scores(),
        };
        layers.push((rows, repetition));
    }
    let seen: Vec<SeenLayer<'_>> = layers
        .iter()
        .map(|([k, v, q], repetition)| SeenLayer {
            k,
            v,
            q,
            repetition: Some(repetition),
        })
        .collect();
    cache.show(SEQ, &seen)
}

/// A cache that was filled with random rows, and its bytes at each of the lengths, which rise.
///
/// # Errors
/// What building or filling the cache gives.
pub fn fill_to(
    strategy: &Strategy,
    geometry: &Geometry,
    admission: Admission,
    lengths: &[usize],
) -> Result<(StagedCache, Vec<MemoryReport>), CacheError> {
    // Maps would turn statistics that nothing learns from.
    let calibration = is_calibrated(strategy).then(|| white(geometry));
    let materials = Materials {
        geometry,
        calibration: calibration.as_ref(),
        backing_dir: None,
    };
    let mut cache = StagedCache::new(strategy, materials)?;
    cache.admit(SEQ, admission)?;
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let n_hidden = cache.hidden_width().unwrap_or(0);
    let (mut start, mut reports) = (0, Vec::new());
    for &length in lengths {
        while start < length {
            let n = cache.step_limit(SEQ, STEP).min(length - start);
            let batch = Batch::single(SEQ, start as u32..(start + n) as u32);
            let hidden = vec![0.0; n * n_hidden];
            for (i, layer) in geometry.layers.iter().enumerate() {
                let n = n * layer.n_kv_heads * layer.head_dim;
                let (k, v) = (normal(&mut rng, n), normal(&mut rng, n));
                let rows = Rows {
                    k: &k,
                    v: &v,
                    hidden: &hidden,
                    residual_norms: &[],
                };
                cache.append(i, &batch, rows)?;
            }
            cache.commit(&batch)?;
            start += n;
        }
        reports.push(cache.memory());
    }
    Ok((cache, reports))
}

/// Normal random numbers (Box and Muller's method).
fn normal(rng: &mut ChaCha8Rng, n: usize) -> Vec<f32> {
    (0..n)
        .map(|_| {
            let radius = (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
            radius * (TAU * rng.random::<f32>()).cos()
        })
        .collect()
}

/// Rows of noise that a codebook is learned from.
const WHITE_ROWS: usize = 256;

/// The statistics of white noise: a stage that learns gets a basis of the right size from it.
fn white(geometry: &Geometry) -> Calibration {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let layers = geometry.layers.iter();
    let (heads, rows) = layers.map(|l| white_layer(l, &mut rng)).unzip();
    Calibration {
        heads,
        n_tokens: WHITE_ROWS,
        rows,
        positions: (0..WHITE_ROWS as u32).collect(),
    }
}

fn white_layer(
    layer: &LayerGeometry,
    rng: &mut ChaCha8Rng,
) -> (Vec<HeadCovariance>, Vec<HeadRows>) {
    let n = layer.head_dim;
    let identity: Vec<f64> = (0..n * n)
        .map(|i| if i % (n + 1) == 0 { 1.0 } else { 0.0 })
        .collect();
    let head = HeadCovariance {
        k_pre: identity.clone(),
        k_post: identity.clone(),
        v: identity,
    };
    let rows = (0..layer.n_kv_heads)
        .map(|_| HeadRows {
            k: normal(rng, WHITE_ROWS * n),
            v: normal(rng, WHITE_ROWS * n),
        })
        .collect();
    (vec![head; layer.n_kv_heads], rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::retain::gate::weights::Lines;
    use crate::cache::retain::gate::{EXTRAS, Weights};
    use crate::cache::stage::{Params, Value};
    use crate::config::Bos;
    use crate::data::Passages;
    use crate::model::Architecture;
    use crate::model::geometry::geometry;
    use crate::model::tiny::{TinyConfig, TinyModel};

    /// One layer counted three times is what a cache of three layers holds.
    #[test]
    fn layers_of_equal_shape_are_counted_as_often_as_they_are_there() {
        let config = TinyConfig {
            n_layers: 3,
            ..TinyConfig::of(Architecture::Llama)
        };
        let model = TinyModel::new(&config);
        let geometry = geometry(crate::model::weights::WeightSource::spec(&model), 300);
        let strategy = Strategy {
            tail: crate::cache::strategy::Tail::both(16),
            sinks: 4,
            ..Strategy::bare("q8_0")
        };
        let protocol = Protocol::Stream {
            window: 300,
            windows: 1,
            bos: Bos::Never,
        };
        let planned = at(&strategy, &geometry, &protocol, 300).unwrap();

        let materials = Materials {
            geometry: &geometry,
            calibration: None,
            backing_dir: None,
        };
        let mut cache = StagedCache::new(&strategy, materials).unwrap();
        cache.admit(SEQ, Admission::Streaming).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for start in [0, 150] {
            let batch = Batch::single(SEQ, start..start + 150);
            for (layer, g) in geometry.layers.iter().enumerate() {
                let k = normal(&mut rng, 150 * g.n_kv_heads * g.head_dim);
                let rows = Rows {
                    k: &k,
                    v: &k,
                    hidden: &[],
                    residual_norms: &[],
                };
                cache.append(layer, &batch, rows).unwrap();
            }
            cache.commit(&batch).unwrap();
        }
        let live = cache.memory();
        assert_eq!(planned.payload_bytes, live.payload_bytes);
        assert_eq!(planned.exact_bytes, live.exact_bytes);
        assert_eq!(planned.rows_live, live.rows_live);
        let (planned, live) = (
            planned.resident_bytes() as f64,
            live.resident_bytes() as f64,
        );
        assert!((planned / live - 1.0).abs() < 0.01, "{planned} {live}");
    }

    /// A gate's weights are one file for all layers.
    #[test]
    fn a_gates_weights_are_counted_once() {
        let model = TinyModel::new(&TinyConfig {
            n_layers: 3,
            ..TinyConfig::of(Architecture::Llama)
        });
        let geometry = geometry(crate::model::weights::WeightSource::spec(&model), 64);
        let n_heads = geometry.layers[0].n_kv_heads;
        let lines = Lines::rounded(&vec![0.5; 3 * n_heads * (6 + EXTRAS)], 6, EXTRAS);
        let weights = Weights::new((3, n_heads), lines);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gate.safetensors");
        let origin = [("model_sha256".to_owned(), "ab".to_owned())].into();
        std::fs::write(&path, weights.file(origin).unwrap()).unwrap();
        let mut params = Params::default();
        let path = Value::Text(path.display().to_string());
        params.0.insert("file".to_owned(), path);
        params
            .0
            .insert("kept_fraction".to_owned(), Value::Float(0.5));
        let strategy = Strategy {
            retain: Some(StageSpec {
                name: "gate".to_owned(),
                params,
            }),
            ..Strategy::bare("f16")
        };
        let protocol = Protocol::CompressOnce {
            context: 64,
            score: 1,
            documents: 1,
            continuation: Continuation::Exact,
            floor: false,
            bos: Bos::Never,
            passages: Passages::Spread,
        };
        let planned = at(&strategy, &geometry, &protocol, 64).unwrap();
        assert_eq!(planned.projection_bytes, weights.bytes());
    }

    /// What is scored by a context is planned on noise; what counts bytes counts those of all layers.
    #[test]
    fn what_leaves_at_the_compression_point_is_planned() {
        let config = TinyConfig {
            n_layers: 3,
            ..TinyConfig::of(Architecture::Llama)
        };
        let model = TinyModel::new(&config);
        let geometry = geometry(crate::model::weights::WeightSource::spec(&model), 300);
        let protocol = Protocol::CompressOnce {
            context: 300,
            score: 1,
            documents: 1,
            continuation: Continuation::Exact,
            floor: false,
            bos: Bos::Never,
            passages: Passages::Spread,
        };
        let planned = |name: &str, key: &str, value: Value| {
            let mut params = Params::default();
            params.0.insert(key.to_owned(), value);
            let strategy = Strategy {
                retain: Some(StageSpec {
                    name: name.to_owned(),
                    params,
                }),
                ..Strategy::bare("f32")
            };
            at(&strategy, &geometry, &protocol, 300).unwrap()
        };
        for name in ["snapkv", "kvzip_plus", "expected_attention", "keydiff"] {
            let half = planned(name, "kept_fraction", Value::Float(0.5));
            let kept = half.rows_live as f64 / half.rows_seen as f64;
            assert!((0.49..0.51).contains(&kept), "{name} {kept}");
        }
        let row = 8 * geometry.scalars_per_token() as u64 / 2;
        let most = 300 * row / 2;
        let held = planned("keydiff", "bytes", Value::Int(most as i64)).resident_bytes();
        assert!(held <= most && held > most / 2, "{held} of {most}");
    }
}
