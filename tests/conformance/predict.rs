//! Rows predicted from the layer before: what it gains where layers are alike, what it costs, what it refuses.

use kvlab::cache::stage::{Calibration, HeadRows, KeyForm, StageError};
use kvlab::cache::stages::Stages;
use kvlab::cache::strategy::{StageSpec, Strategy, Tail};
use kvlab::cache::{CacheError, Geometry, KvCache, Materials, SeqId, StagedCache};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::support::{Script, calibration, parse_example, predicted, run, script, tiny};

/// Channels of a layer's KV heads together.
const WIDTH: usize = 64;

/// Makes layer 1 a linear map of layer 0 plus a little noise: K of K, V of V and K.
fn correlate(s: &mut Script, noise_seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mut map = |n: usize| -> Vec<f32> {
        let scale = (3.0 / n as f32).sqrt();
        (0..n * WIDTH)
            .map(|_| rng.random_range(-scale..scale))
            .collect()
    };
    let (of_k, of_v) = (map(WIDTH), map(2 * WIDTH));
    let mut rng = ChaCha8Rng::seed_from_u64(noise_seed);
    let mut next = |inputs: &[&[f32]], map: &[f32]| -> Vec<f32> {
        let n_tokens = inputs[0].len() / WIDTH;
        let mut out = Vec::new();
        for t in 0..n_tokens {
            let x: Vec<f32> = inputs
                .iter()
                .flat_map(|x| x[t * WIDTH..(t + 1) * WIDTH].iter().copied())
                .collect();
            for j in 0..WIDTH {
                let sum: f32 = x
                    .iter()
                    .zip(map.iter().skip(j).step_by(WIDTH))
                    .map(|(a, b)| a * b)
                    .sum();
                out.push(sum + 2.0 + rng.random_range(-0.02..0.02));
            }
        }
        out
    };
    let k = next(&[&s.k[0]], &of_k);
    let v = next(&[&s.v[0], &k], &of_v);
    (s.k[1], s.v[1]) = (k, v);
}

/// A calibration whose rows are a script's.
fn learned_from(g: &Geometry, s: &Script) -> Calibration {
    let head = |x: &[f32], h: usize| -> Vec<f32> {
        x.chunks_exact(WIDTH)
            .flat_map(|row| row[h * 32..(h + 1) * 32].to_vec())
            .collect()
    };
    Calibration {
        rows: (0..2)
            .map(|l| {
                (0..2)
                    .map(|h| HeadRows {
                        k: head(&s.k[l], h),
                        v: head(&s.v[l], h),
                    })
                    .collect()
            })
            .collect(),
        positions: (0..s.n_tokens as u32).collect(),
        ..calibration(g)
    }
}

fn aqua(encode: &str) -> Strategy {
    let mut s = Strategy::bare(encode);
    s.label = format!("aqua {encode}");
    s.project_k = vec![StageSpec::plain("aqua")];
    s.project_v = vec![StageSpec::plain("aqua")];
    s.keys = KeyForm::PreRope;
    s
}

fn outputs(strategy: &Strategy, g: &Geometry, learned: &Calibration, s: &Script) -> Vec<Vec<f32>> {
    let materials = Materials {
        geometry: g,
        calibration: Some(learned),
        backing_dir: None,
    };
    let mut cache = StagedCache::new(strategy, materials).expect("builds");
    run(&mut cache, g, SeqId(0), s, &[50])
}

fn error(got: &[f32], want: &[f32]) -> f64 {
    let off: f64 = got
        .iter()
        .zip(want)
        .map(|(a, b)| f64::from(a - b).powi(2))
        .sum();
    let all: f64 = want.iter().map(|&b| f64::from(b).powi(2)).sum();
    (off / all).sqrt()
}

#[test]
fn a_layer_that_the_one_before_foretells_loses_far_less() {
    let g = tiny();
    let (mut s, mut text) = (script(&g, 200, 91, 0.5), script(&g, 1000, 92, 0.5));
    correlate(&mut s, 93);
    correlate(&mut text, 94);
    let learned = learned_from(&g, &text);
    let exact = outputs(&Strategy::bare("f32"), &g, &learned, &s);
    let mut plain = Strategy::bare("q4_0");
    plain.keys = KeyForm::PreRope;
    let plain = outputs(&plain, &g, &learned, &s);
    let predicted = outputs(&aqua("q4_0"), &g, &learned, &s);
    let errors = |of: &[Vec<f32>]| [0, 1].map(|l| error(&of[l], &exact[l]));
    let (plain, predicted) = (errors(&plain), errors(&predicted));
    assert!(predicted[1] < 0.25 * plain[1], "{predicted:?} {plain:?}");
    assert!(predicted[1] > 0.0);
    // Layer 0 has nothing before it.
    assert!(predicted[0] > 0.5 * plain[0], "{predicted:?} {plain:?}");
}

#[test]
fn exact_residuals_give_the_rows_back() {
    let g = tiny();
    let s = script(&g, 200, 95, 0.5);
    let learned = calibration(&g);
    for keys in [KeyForm::PreRope, KeyForm::PostRope] {
        let exact = outputs(&Strategy::bare("f32"), &g, &learned, &s);
        let strategy = Strategy {
            keys,
            ..aqua("f32")
        };
        let got = outputs(&strategy, &g, &learned, &s);
        for l in 0..2 {
            assert!(error(&got[l], &exact[l]) < 1e-5, "{keys:?} layer {l}");
        }
    }
}

#[test]
fn weights_and_working_memory_are_charged() {
    let g = tiny();
    let s = script(&g, 300, 96, 0.5);
    let learned = calibration(&g);
    let materials = Materials {
        geometry: &g,
        calibration: Some(&learned),
        backing_dir: None,
    };
    let memory = |strategy: &Strategy| {
        let mut cache = StagedCache::new(strategy, materials).expect("builds");
        run(&mut cache, &g, SeqId(0), &s, &[50]);
        cache.memory()
    };
    let (m, plain) = (memory(&aqua("q4_0")), memory(&Strategy::bare("q4_0")));
    // Matrices of layer 1 in blocks of 34 bytes for 32 weights, f32 biases of both layers and sides.
    let weights = 3 * WIDTH * WIDTH / 32 * 34 + 4 * 4 * WIDTH;
    assert_eq!(m.projection_bytes, weights as u64);
    assert_eq!(
        (m.payload_bytes, m.scale_bytes),
        (plain.payload_bytes, plain.scale_bytes)
    );
    // K and V of 300 rows of one layer in f32 at least.
    assert!(m.scratch_bytes - plain.scratch_bytes >= 2 * 300 * 4 * WIDTH as u64);
}

#[test]
fn what_cannot_be_predicted_is_refused_with_a_way_out() {
    let learned = calibration(&tiny());
    let refused = |change: &dyn Fn(&mut Strategy, &mut Geometry), word: &str| {
        let (mut strategy, mut g) = (aqua("q4_0"), tiny());
        change(&mut strategy, &mut g);
        let materials = Materials {
            geometry: &g,
            calibration: Some(&learned),
            backing_dir: None,
        };
        let error = StagedCache::new(&strategy, materials).err();
        let error = error.map_or_else(String::new, |e| e.to_string());
        assert!(error.contains(word), "{word}: {error}");
    };
    refused(&|s, _| s.project_v.clear(), "first on both sides");
    refused(
        &|s, _| s.project_k.insert(0, StageSpec::plain("hadamard")),
        "first on both sides",
    );
    refused(
        &|s, _| s.project_k.push(StageSpec::plain("aqua")),
        "stands twice",
    );
    refused(
        &|s, _| {
            s.project_v
                .push(parse_example(r#"{ method = "svd", rank = 8 }"#))
        },
        "`svd` learns from rows",
    );
    refused(
        &|s, _| s.retain = Some(parse_example(r#"{ method = "window", recent = 24 }"#)),
        "`window` would take that away",
    );
    refused(
        &|s, _| s.tail = Tail { k: 0, v: 32 },
        "0 for K and 32 for V",
    );
    refused(&|_, g| g.layers[1].window = Some(64), "sliding window");
    refused(&|_, g| g.layers[1].n_kv_heads = 4, "needs layers alike");
    let g = tiny();
    let untaught = Materials {
        geometry: &g,
        calibration: None,
        backing_dir: None,
    };
    let error = StagedCache::new(&aqua("q4_0"), untaught).err();
    assert!(matches!(
        error,
        Some(CacheError::Stage(StageError::NoCalibration { .. }))
    ));
}

/// A fit is the same on one thread and on two.
#[test]
fn weights_do_not_depend_on_threads() {
    let g = tiny();
    let learned = calibration(&g);
    let materials = Materials {
        geometry: &g,
        calibration: Some(&learned),
        backing_dir: None,
    };
    for strategy in predicted() {
        let [a, b] = [1, 2].map(|n| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build();
            let build = || Stages::build(&strategy, materials).expect("builds");
            pool.expect("a pool").install(build).predictor
        });
        assert!(a.is_some() && a == b, "{}", strategy.label);
    }
}
