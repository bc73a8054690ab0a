//! The gate's file, its score in f64, and its bytes.

use std::collections::BTreeMap;
use std::sync::Arc;

use half::f16;
use safetensors::{Dtype, tensor::TensorView};

use super::{build, refusal};
use crate::cache::retain::gate::weights::{Lines, SHARED};
use crate::cache::retain::gate::{EXTRAS, Weights};
use crate::cache::rope::{PairLayout, Rope};
use crate::cache::stage::{NewRow, Params, Value};
use crate::cache::strategy::{StageSpec, Strategy};
use crate::cache::{
    Admission, Batch, CacheError, Geometry, KvCache, LayerGeometry, Materials, Rows, SeqId,
    StagedCache,
};

/// Layers, KV heads, features.
const SHAPE: [usize; 3] = [2, 2, 6 + EXTRAS];

/// Units of a layer.
const UNITS: usize = 3;

fn weight(i: usize) -> f32 {
    ((i * 7919 + 13) % 1009) as f32 / 500.0 - 1.0
}

fn lines() -> Weights {
    let values: Vec<f32> = (0..SHAPE.iter().product()).map(weight).collect();
    let lines = Lines::rounded(&values, 6, EXTRAS);
    Weights::new((SHAPE[0], SHAPE[1]), lines)
}

fn with_units() -> Weights {
    let values: Vec<f32> = (0..SHAPE[0] * UNITS * (6 + SHARED))
        .map(|i| weight(i + 400))
        .collect();
    let out = (0..SHAPE[0] * SHAPE[1] * UNITS).map(|i| weight(i + 700));
    lines().with_units(Lines::rounded(&values, 6, SHARED), out.collect())
}

/// A file as gates had it when their weights were of 16 bits.
fn older() -> Vec<u8> {
    let values = (0..SHAPE.iter().product()).map(|i| f16::from_f32(weight(i)).to_le_bytes());
    let bytes: Vec<u8> = values.flatten().collect();
    let view = TensorView::new(Dtype::F16, SHAPE.to_vec(), &bytes).unwrap();
    let metadata = Some(origin().into_iter().collect());
    safetensors::serialize([("gate.weight", view)], metadata).unwrap()
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
    let width = dtype.bitsize() / 8;
    let bytes = vec![0u8; width * shape.iter().product::<usize>()];
    let view = TensorView::new(dtype, shape.to_vec(), &bytes).unwrap();
    safetensors::serialize([(name, view)], Some(metadata.into_iter().collect())).unwrap()
}

#[test]
fn a_file_gives_back_what_was_fitted() {
    for mut weights in [lines(), with_units()] {
        let read = Weights::read("gate", &weights.file(origin()).unwrap()).unwrap();
        weights.model_sha256 = "ab12".to_owned();
        assert_eq!(read, weights);
        assert_eq!(read.shape, (SHAPE[0], SHAPE[1]));
    }
    let read = Weights::read("older", &older()).unwrap();
    assert!(read.file(origin()).unwrap_err().contains("older file"));
}

#[test]
fn files_that_are_no_gates_are_refused_by_name() {
    let f16_of = |shape: &[usize]| tensor_file("gate.weight", Dtype::F16, shape, origin());
    let mut nan = lines();
    nan.shift(&[f32::NAN; 4]);
    let endless = lines().with_units(
        Lines::rounded(&[0.0; 2 * 8], 6, SHARED),
        vec![f32::INFINITY; 4],
    );
    let other = lines().with_units(Lines::rounded(&[0.0; 2 * 9], 7, SHARED), vec![0.0; 4]);
    let cases = [
        (b"no safetensors at all".to_vec(), ""),
        (Vec::new(), ""),
        (
            lines().file(BTreeMap::new()).unwrap(),
            "its metadata name no model (`model_sha256`)",
        ),
        (
            tensor_file("weights", Dtype::F16, &SHAPE, origin()),
            "gate.weight",
        ),
        (
            tensor_file("gate.weight", Dtype::F32, &SHAPE, origin()),
            "is F32 with 10 features, it must be I8, or F16",
        ),
        (
            f16_of(&[2, 20]),
            "has the shape [2, 20], it must be [layer, kv_head, feature]",
        ),
        (
            f16_of(&[2, 2, EXTRAS]),
            "with 4 features, it must be I8, or F16 with more than 4",
        ),
        (f16_of(&[0, 2, 10]), "has the shape [0, 2, 10]"),
        (
            tensor_file("gate.weight", Dtype::I8, &SHAPE, origin()),
            "gate.scale",
        ),
        (nan.file(origin()).unwrap(), "weights that are not finite"),
        (
            endless.file(origin()).unwrap(),
            "weights that are not finite",
        ),
        (
            other.file(origin()).unwrap(),
            "`units.weight` is I8 of the shape [2, 1, 7], it must be I8 of [2, 1, 6]",
        ),
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
    let cut = &lines().file(origin()).unwrap()[..200];
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

/// A line's weights as they are stored: hidden ones rounded to 255 steps.
fn stored(first: usize, n_extras: usize) -> Vec<f64> {
    let own: Vec<f64> = (first..first + 6 + n_extras)
        .map(|i| f64::from(weight(i)))
        .collect();
    let largest = own[..6].iter().fold(0.0f64, |m, w| m.max(w.abs()));
    let round = |w: &f64| (w / largest * 127.0).round() * largest / 127.0;
    own[..6]
        .iter()
        .map(round)
        .chain(own[6..].to_vec())
        .collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Calls with every head, some rows, their features in f64 and what the gate in the file scores.
fn scored(bytes: &[u8], check: impl Fn([usize; 2], &[f64], f64)) {
    let (_dir, path) = file(bytes);
    let given = [("file", path), ("kept_fraction", Value::Float(0.5))];
    let stage = build("gate", &given).unwrap();
    assert!(stage.needs().hidden && !stage.needs().context.any());
    assert_eq!(stage.made_for(), Some("ab12"));
    let number = |i: usize| ((i * 31 + 7) % 17) as f32 / 4.0 - 2.0;
    let heads = (0..SHAPE[0]).flat_map(|l| (0..SHAPE[1]).map(move |h| [l, h]));
    for ([layer, kv_head], position) in heads.flat_map(|head| [0u32, 1, 500].map(|p| (head, p))) {
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
            let squares = x.iter().map(|&x| f64::from(x).powi(2));
            squares.sum::<f64>().sqrt().ln()
        };
        let mut features: Vec<f64> = hidden.iter().map(|&x| f64::from(x)).collect();
        features.extend([log_norm(k), log_norm(v), f64::from(position + 1).ln(), 1.0]);
        check([layer, kv_head], &features, f64::from(got));
    }
}

#[test]
fn a_score_is_the_features_dot_product() {
    scored(&older(), |[layer, h], features, got| {
        let at = (layer * SHAPE[1] + h) * SHAPE[2];
        let weights = (at..at + SHAPE[2]).map(|i| f64::from(f16::from_f32(weight(i))));
        let want = dot(&weights.collect::<Vec<_>>(), features);
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    });
    scored(
        &lines().file(origin()).unwrap(),
        |[layer, h], features, got| {
            let line = stored((layer * SHAPE[1] + h) * SHAPE[2], EXTRAS);
            let want = dot(&line, features);
            assert!((got - want).abs() < 1e-5, "{got} {want}");
        },
    );
}

#[test]
fn units_add_their_positive_parts() {
    let bytes = with_units().file(origin()).unwrap();
    scored(&bytes, |[layer, h], features, got| {
        let head = layer * SHAPE[1] + h;
        let mut want = dot(&stored(head * SHAPE[2], EXTRAS), features);
        let shared: Vec<f64> = features[..6]
            .iter()
            .chain(&features[8..])
            .copied()
            .collect();
        for unit in 0..UNITS {
            let line = stored(400 + (layer * UNITS + unit) * (6 + SHARED), SHARED);
            let out = f64::from(weight(700 + head * UNITS + unit));
            want += out * dot(&line, &shared).max(0.0);
        }
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    });
}

#[test]
fn a_row_of_zeros_has_a_finite_score() {
    let (_dir, path) = file(&lines().file(origin()).unwrap());
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
    let charged = |bytes: &[u8]| {
        let (_dir, path) = file(bytes);
        cache(path, SHAPE[0]).unwrap().memory().projection_bytes
    };
    let n_lines = SHAPE[0] * SHAPE[1];
    let of_lines = n_lines * (6 + 4 + 4 * EXTRAS);
    assert_eq!(charged(&lines().file(origin()).unwrap()), of_lines as u64);
    let of_units = SHAPE[0] * UNITS * (6 + 4 + 4 * SHARED) + 4 * n_lines * UNITS;
    let bytes = with_units().file(origin()).unwrap();
    assert_eq!(charged(&bytes), (of_lines + of_units) as u64);
    assert_eq!(charged(&older()), (n_lines * (2 * 6 + 4 * EXTRAS)) as u64);
    let random = cache(Value::Text("random".to_owned()), 2).unwrap();
    assert_eq!(random.memory().projection_bytes, 0);
}

/// Where no sum of the model is at hand, its channels give a gate of another one away.
#[test]
fn a_gate_for_other_channels_is_refused_at_the_first_row() {
    let (_dir, path) = file(&lines().file(origin()).unwrap());
    let append = |n_hidden: usize| {
        let mut cache = cache(path.clone(), SHAPE[0]).unwrap();
        cache.admit(SeqId(0), Admission::Streaming).unwrap();
        let rows = [0.5; 3 * SHAPE[1] * 8];
        let hidden = vec![0.25; 3 * n_hidden];
        let rows = Rows {
            k: &rows,
            v: &rows,
            hidden: &hidden,
            residual_norms: &[],
        };
        cache.append(0, &Batch::single(SeqId(0), 0..3), rows)
    };
    append(6).unwrap();
    for n_hidden in [0, 5, 7, 12] {
        let error = append(n_hidden).unwrap_err();
        assert!(
            matches!(error, CacheError::HiddenWidth { layer: 0, got, expected: 6 } if got == n_hidden),
            "{error}"
        );
        let text = error.to_string();
        let want =
            format!("have {n_hidden} channels, the strategy's gate was trained on inputs of 6");
        assert!(
            text.contains(&want) && text.contains("kvlab train"),
            "{text}"
        );
    }
}

#[test]
fn a_gate_for_other_layers_is_refused() {
    let (_dir, path) = file(&lines().file(origin()).unwrap());
    let refused = cache(path, 3).err().map(|e| e.to_string());
    let text = refused.expect("two layers' weights for three");
    assert!(
        text.contains("was made for 2 layers of 2 KV heads, the model has 3 of 2"),
        "{text}"
    );
}
