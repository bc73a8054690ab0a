//! Reported bytes against hand values, and stages that cheat.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use kvlab::cache::stage::{Codec, HeadContext, Kind, RowCodec, Stage, Tolerance, registry};
use kvlab::cache::strategy::Strategy;
use kvlab::cache::{KvCache, SeqId};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::support::{build, calibration, examples, geometry, matrix, run, script, tiny};

/// Rows of SmolLM2's shape: 3 KV heads of 64 channels, here in 2 layers instead of 30.
#[test]
fn bytes_per_row_are_the_formats_definition() {
    let g = geometry(9, 3, 64);
    let s = script(&g, 256, 81, 0.5);
    // Bytes per token over 30 layers, K and V: 23,040 for f16; nvfp4 is 4.5 bits per number.
    for (format, per_token) in [
        ("f32", 46_080),
        ("f16", 23_040),
        ("bf16", 23_040),
        ("fp8_e4m3", 11_520),
        ("fp8_e5m2", 11_520),
        ("q8_0", 12_240),
        ("q5_1", 8_640),
        ("q5_0", 7_920),
        ("q4_1", 7_200),
        ("q4_0", 6_480),
        ("iq4_nl", 6_480),
        ("nvfp4", 6_480),
        ("mxfp4", 6_120),
    ] {
        let mut cache = build(&Strategy::bare(format), &g);
        run(&mut cache, &g, SeqId(0), &s, &[256]);
        let m = cache.memory();
        assert_eq!(
            (m.payload_bytes + m.scale_bytes) * 15,
            per_token * 256,
            "{format}"
        );
        assert_eq!(m.slack_bytes, 0, "{format}: whole pages have no slack");
        assert_eq!(m.exact_bytes, 0);
    }
}

#[test]
fn every_strategy_reports_bytes_and_a_constant_slope() {
    let g = tiny();
    let s = script(&g, 512, 82, 0.5);
    for strategy in matrix() {
        let stored = |n: usize| {
            let mut cache = build(&strategy, &g);
            let mut part = s.clone();
            part.n_tokens = n;
            run(&mut cache, &g, SeqId(0), &part, &[n]);
            cache.memory()
        };
        assert!(
            stored(1).stored_bytes() > 0 && stored(1).rows_live == 4,
            "{}",
            strategy.label
        );
        if strategy.retain.is_some() || strategy.pack.is_some() {
            continue;
        }
        let bytes = |n| {
            let m = stored(n);
            m.payload_bytes + m.scale_bytes + m.exact_bytes + m.backing_bytes
        };
        // From 256 on a first page is sealed behind any tail here, and sinks stand beside its coded rows.
        let (a, b) = (bytes(384) - bytes(256), bytes(512) - bytes(384));
        assert_eq!(a, b, "{}: bytes per 128 tokens", strategy.label);
    }
}

/// Head sizes with whole and partial blocks.
const DIMS: [usize; 7] = [20, 32, 33, 64, 80, 128, 256];

/// A row's bytes, or a page's; the codec is gone afterwards.
fn encoded(codec: Codec, rows: &[f32], dim: usize) -> Vec<u8> {
    match codec {
        Codec::Rows(codec) => {
            let mut bytes = vec![0; codec.row_bytes(dim)];
            codec.encode(rows, &mut bytes);
            bytes
        }
        Codec::Pages(codec) => {
            let mut bytes = vec![0; codec.page_bytes(rows.len() / dim, dim)];
            codec.encode(rows, dim, &mut bytes);
            bytes
        }
    }
}

/// What a codec must hold: its bytes alone carry the row, a lossy one errs, within its stated bound.
fn check_codec(fresh: &dyn Fn(usize) -> Codec, tolerance: Tolerance) -> Result<(), String> {
    let mut rng = ChaCha8Rng::seed_from_u64(83);
    for dim in DIMS {
        for _ in 0..16 {
            let n_rows = match fresh(dim) {
                Codec::Rows(_) => 1,
                Codec::Pages(codec) => codec.page_rows(),
            };
            let row: Vec<f32> = (0..n_rows * dim)
                .map(|_| (0..4).map(|_| rng.random_range(-1.0f32..1.0)).sum())
                .collect();
            let bytes = encoded(fresh(dim), &row, dim);
            let mut back = vec![f32::NAN; row.len()];
            match fresh(dim) {
                Codec::Rows(codec) => codec.decode(&bytes, &mut back),
                Codec::Pages(codec) => codec.decode(&bytes, dim, &mut back),
            }
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|v| v * v).sum::<f32>().sqrt();
            let error = norm(&mut row.iter().zip(&back).map(|(a, b)| a - b))
                / norm(&mut row.iter().copied());
            match tolerance {
                Tolerance::Exact if error != 0.0 => {
                    return Err(format!("dim {dim}: exact format errs by {error}"));
                }
                Tolerance::RelativeL2(_) if error == 0.0 => {
                    return Err(format!("dim {dim}: a lossy format without any error"));
                }
                Tolerance::RelativeL2(bound) if error.is_nan() || error > bound => {
                    return Err(format!("dim {dim}: error {error} over {bound}"));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

#[test]
fn every_codec_holds_its_bound_on_every_head_dim() {
    let g = tiny();
    let statistics = calibration(&g);
    let samples: BTreeMap<usize, Vec<Vec<f32>>> = DIMS
        .iter()
        .map(|&dim| {
            let calibration = calibration(&geometry(4, 2, dim));
            let keys = calibration.rows[0].iter().map(|h| h.k.clone());
            (dim, keys.collect())
        })
        .collect();
    for def in registry().filter(|d| d.kind == Kind::Encode) {
        for spec in examples(def) {
            let fresh = |dim: usize| -> Codec {
                let context = kvlab::cache::stage::BuildContext {
                    geometry: &g,
                    keys: Default::default(),
                    side: kvlab::cache::stage::Side::K,
                    calibration: Some(&statistics),
                    backing_dir: None,
                    head: Some(HeadContext {
                        samples: &samples[&dim],
                        ..HeadContext::any(dim)
                    }),
                };
                match (def.build)(&spec.params, &context) {
                    Ok(Stage::Encode(codec)) => codec,
                    _ => panic!("{} does not build a codec", def.name),
                }
            };
            check_codec(&fresh, def.tolerance).unwrap_or_else(|e| panic!("{}: {e}", def.name));
        }
    }
}

/// Claims 4 bits per number and keeps the rows beside the bytes.
#[derive(Default)]
struct Cheat(Mutex<Vec<f32>>);

impl RowCodec for Cheat {
    fn row_bytes(&self, dim: usize) -> usize {
        dim / 2
    }
    fn scale_bytes(&self, _: usize) -> usize {
        0
    }
    fn encode(&self, row: &[f32], _: &mut [u8]) {
        *self.0.lock().expect("one thread") = row.iter().map(|x| x * 1.001).collect();
    }
    fn decode(&self, _: &[u8], row: &mut [f32]) {
        let kept = self.0.lock().expect("one thread");
        if kept.len() == row.len() {
            row.copy_from_slice(&kept);
        }
    }
}

#[test]
fn simulated_storage_fails_conformance() {
    let error = check_codec(
        &|_| Codec::Rows(Arc::new(Cheat::default())),
        Tolerance::RelativeL2(0.1),
    );
    assert!(
        error.is_err(),
        "rows kept beside the stored bytes must be found out"
    );
}
