//! The gate's file, its score in f64, and its bytes.

use std::collections::BTreeMap;
use std::sync::Arc;

use half::f16;
use safetensors::{Dtype, tensor::TensorView};

use super::{build, refusal};
use crate::cache::retain::gate::{EXTRAS, Weights};
use crate::cache::rope::{PairLayout, Rope};
use crate::cache::stage::{NewRow, Params, Value};
use crate::cache::strategy::{StageSpec, Strategy};
use crate::cache::{CacheError, Geometry, KvCache, LayerGeometry, Materials, StagedCache};
use crate::train::gate::Fitted;

/// Layers, KV heads, features.
const SHAPE: [usize; 3] = [2, 2, 6 + EXTRAS];

fn weight(i: usize) -> f16 {
    f16::from_f32(((i * 7919 + 13) % 1009) as f32 / 500.0 - 1.0)
}

fn fitted() -> Fitted {
    Fitted {
        weights: (0..SHAPE.iter().product()).map(weight).collect(),
        shape: SHAPE,
        layers: Vec::new(),
    }
}

fn origin() -> BTreeMap<String, String> {
    let facts = [("model_sha256", "ab12"), ("texts", "a b; c d")];
    facts.map(|(k, v)| (k.to_owned(), v.to_owned())).into()
}

/// A gate's file in a folder of its own.
fn file(bytes: &[u8]) -> (tempfile::TempDir, Value) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gate.safetensors");
    std::fs::write(&path, bytes).unwrap();
    let path = Value::Text(path.display().to_string());
    (dir, path)
}

fn tensor_file(
    name: &str,
    dtype: Dtype,
    shape: &[usize],
    metadata: BTreeMap<String, String>,
) -> Vec<u8> {
    let width = if dtype == Dtype::F16 { 2 } else { 4 };
    let bytes = vec![0u8; width * shape.iter().product::<usize>()];
    let view = TensorView::new(dtype, shape.to_vec(), &bytes).unwrap();
    safetensors::serialize([(name, view)], Some(metadata.into_iter().collect())).unwrap()
}

#[test]
fn a_file_gives_back_what_was_fitted() {
    let fitted = fitted();
    let read = Weights::read("gate", &fitted.file(origin()).unwrap()).unwrap();
    assert_eq!(read.values, fitted.weights);
    assert_eq!(read.shape, (SHAPE[0], SHAPE[1]));
    assert_eq!(read.model_sha256, "ab12");
}

#[test]
fn files_that_are_no_gates_are_refused_by_name() {
    let f16_of = |shape: &[usize]| tensor_file("gate.weight", Dtype::F16, shape, origin());
    let nan = Fitted {
        weights: vec![f16::NAN; SHAPE.iter().product()],
        ..fitted()
    };
    let cases = [
        (b"no safetensors at all".to_vec(), ""),
        (Vec::new(), ""),
        (
            fitted().file(BTreeMap::new()).unwrap(),
            "its metadata name no model (`model_sha256`)",
        ),
        (
            tensor_file("weights", Dtype::F16, &SHAPE, origin()),
            "gate.weight",
        ),
        (
            tensor_file("gate.weight", Dtype::F32, &SHAPE, origin()),
            "is F32 with 10 features, it must be F16",
        ),
        (
            f16_of(&[2, 20]),
            "has the shape [2, 20], it must be [layer, kv_head, feature]",
        ),
        (
            f16_of(&[2, 2, EXTRAS]),
            "with 4 features, it must be F16 with more than 4",
        ),
        (f16_of(&[0, 2, 10]), "has the shape [0, 2, 10]"),
        (nan.file(origin()).unwrap(), "weights that are not finite"),
    ];
    for (bytes, why) in cases {
        let (_dir, path) = file(&bytes);
        let given = [("file", path), ("kept_fraction", Value::Float(0.5))];
        let text = refusal("gate", &given);
        assert!(
            text.contains("gate.safetensors` is no gate: ") && text.contains(why),
            "{why}: {text}"
        );
    }
    let cut = &fitted().file(origin()).unwrap()[..200];
    assert!(
        Weights::read("cut", cut)
            .unwrap_err()
            .contains("`cut` is no gate")
    );
}

#[test]
fn a_gate_without_a_file_or_with_a_missing_one_is_refused() {
    let text = refusal("gate", &[("kept_fraction", Value::Float(0.5))]);
    assert!(
        text.contains("it has no `file`: train one with `kvlab train`"),
        "{text}"
    );
    let given = [
        ("file", Value::Text("nowhere.safetensors".to_owned())),
        ("kept_fraction", Value::Float(0.5)),
    ];
    let text = refusal("gate", &given);
    assert!(
        text.contains("`file` = \"nowhere.safetensors\" can't be read"),
        "{text}"
    );
}

#[test]
fn three_budgets_are_two_too_many() {
    let text = refusal(
        "gate",
        &[
            ("file", Value::Text("random".to_owned())),
            ("threshold", Value::Float(-4.0)),
            ("tokens", Value::Int(99)),
            ("kept_fraction", Value::Float(0.5)),
        ],
    );
    assert!(
        text.contains("are three budgets: give one of them"),
        "{text}"
    );
}

#[test]
fn a_score_is_the_features_dot_product() {
    let (_dir, path) = file(&fitted().file(origin()).unwrap());
    let stage = build(
        "gate",
        &[("file", path), ("kept_fraction", Value::Float(0.5))],
    )
    .unwrap();
    assert!(stage.needs().hidden && !stage.needs().context.any());
    assert_eq!(stage.made_for(), Some("ab12"));
    let number = |i: usize| ((i * 31 + 7) % 17) as f32 / 4.0 - 2.0;
    for layer in 0..SHAPE[0] {
        for kv_head in 0..SHAPE[1] {
            for position in [0u32, 1, 500] {
                let rows: Vec<f32> = (0..14)
                    .map(|i| number(i + 14 * position as usize))
                    .collect();
                let (hidden, kv) = rows.split_at(6);
                let (k, v) = kv.split_at(4);
                let got = stage.score(NewRow {
                    layer,
                    kv_head,
                    position,
                    k,
                    v,
                    hidden,
                });
                let log_norm = |x: &[f32]| {
                    x.iter()
                        .map(|&x| f64::from(x).powi(2))
                        .sum::<f64>()
                        .sqrt()
                        .ln()
                };
                let mut features: Vec<f64> = hidden.iter().map(|&x| f64::from(x)).collect();
                features.extend([log_norm(k), log_norm(v), f64::from(position + 1).ln(), 1.0]);
                let at = (layer * SHAPE[1] + kv_head) * SHAPE[2];
                let weights = (at..at + SHAPE[2]).map(|i| f64::from(weight(i)));
                let want: f64 = weights.zip(&features).map(|(w, x)| w * x).sum();
                assert!((f64::from(got) - want).abs() < 1e-5, "{got} {want}");
            }
        }
    }
}

#[test]
fn a_row_of_zeros_has_a_finite_score() {
    let (_dir, path) = file(&fitted().file(origin()).unwrap());
    let stage = build(
        "gate",
        &[("file", path), ("kept_fraction", Value::Float(0.5))],
    )
    .unwrap();
    let score = stage.score(NewRow {
        layer: 1,
        kv_head: 1,
        position: 0,
        k: &[0.0; 4],
        v: &[0.0; 4],
        hidden: &[0.0; 6],
    });
    assert!(score.is_finite(), "{score}");
}

fn geometry(n_layers: usize) -> Geometry {
    let rope = Rope::new(PairLayout::HalfSplit, Rope::frequencies(1e4, 8), 64);
    let layer = LayerGeometry {
        n_heads: 4,
        n_kv_heads: SHAPE[1],
        head_dim: 8,
        scale: 0.35,
        rope: Arc::new(rope),
        window: None,
    };
    Geometry {
        layers: vec![layer; n_layers],
    }
}

fn cache(path: Value, n_layers: usize) -> Result<StagedCache, CacheError> {
    let mut strategy = Strategy::bare("f16");
    let params = [("file", path), ("kept_fraction", Value::Float(0.5))];
    strategy.retain = Some(StageSpec {
        name: "gate".to_owned(),
        params: Params(params.map(|(k, v)| (k.to_owned(), v)).into()),
    });
    let materials = Materials {
        geometry: &geometry(n_layers),
        calibration: None,
        backing_dir: None,
    };
    StagedCache::new(&strategy, materials)
}

#[test]
fn weights_are_charged() {
    let (_dir, path) = file(&fitted().file(origin()).unwrap());
    let report = cache(path, SHAPE[0]).unwrap().memory();
    let n_weights: usize = SHAPE.iter().product();
    assert_eq!(report.projection_bytes, 2 * n_weights as u64);
    let random = cache(Value::Text("random".to_owned()), 2).unwrap();
    assert_eq!(random.memory().projection_bytes, 0);
}

#[test]
fn a_gate_for_other_layers_is_refused() {
    let (_dir, path) = file(&fitted().file(origin()).unwrap());
    let refused = cache(path, 3).err().map(|e| e.to_string());
    let text = refused.expect("two layers' weights for three");
    assert!(
        text.contains("was made for 2 layers of 2 KV heads, the model has 3 of 2"),
        "{text}"
    );
}
