//! A repetition against its formula in f64, on a random model; and what it must leave as it is.

use std::ops::Range;
use std::sync::Arc;

use super::{PART, QUOTED, RepeatPrompt, repetition};
use crate::cache::strategy::Strategy;
use crate::cache::{
    Admission, Batch, CacheError, Geometry, KvCache, Materials, Repetition, SeqId, StagedCache,
};
use crate::compute::cpu::Cpu;
use crate::engine::plain_cache::PlainCache;
use crate::engine::{ContextTape, Extras, Recording, prefill};
use crate::model::geometry::geometry;
use crate::model::tiny::{TinyConfig, TinyModel};
use crate::model::transformer::{LanguageModel, Transformer};

const SEQ: SeqId = SeqId(2);
const OTHER: SeqId = SeqId(9);

fn model() -> (Transformer<Cpu>, Geometry) {
    let model = Transformer::<Cpu>::load(Arc::new(TinyModel::new(&TinyConfig::default()))).unwrap();
    let geometry = geometry(model.spec(), 4096);
    (model, geometry)
}

fn text(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 13 + i * 5 + 3) % 256).collect()
}

fn prompt() -> RepeatPrompt {
    RepeatPrompt {
        first: vec![7, 100, 3],
        later: vec![9, 8],
        then: vec![55],
    }
}

fn staged(geometry: &Geometry) -> StagedCache {
    let materials = Materials {
        geometry,
        calibration: None,
        backing_dir: None,
    };
    StagedCache::new(&Strategy::bare("f32"), materials).unwrap()
}

/// Reads tokens and keeps everything that passes.
fn read<C: KvCache>(model: &Transformer<Cpu>, cache: C, tokens: &[u32]) -> (C, ContextTape) {
    let extras = Extras {
        hidden: true,
        queries: usize::MAX,
    };
    let mut cache = Recording::with(cache, SEQ, extras);
    cache.admit(SEQ, Admission::Streaming).unwrap();
    prefill(model, &mut cache, SEQ, tokens, 512).unwrap();
    cache.into_parts()
}

/// A context and what its repetition attends to.
fn repeated<C: KvCache>(
    model: &Transformer<Cpu>,
    geometry: &Geometry,
    cache: C,
    ids: &[u32],
) -> (C, Vec<Repetition>) {
    let (mut cache, tape) = read(model, cache, ids);
    let place: (&mut dyn KvCache, SeqId, SeqId) = (&mut cache, SEQ, OTHER);
    let found = repetition(model, place, geometry, (ids, &tape), &prompt()).unwrap();
    (cache, found)
}

/// Interleaved rotation.
fn turned(x: &[f32], position: usize) -> Vec<f64> {
    let d = x.len();
    let pair = |i: usize| {
        let angle = position as f64 * 1e4f64.powf(-2.0 * i as f64 / d as f64);
        let (a, b) = (f64::from(x[2 * i]), f64::from(x[2 * i + 1]));
        [
            a * angle.cos() - b * angle.sin(),
            a * angle.sin() + b * angle.cos(),
        ]
    };
    (0..d / 2).flat_map(pair).collect()
}

fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// What a reading of `tokens` behind a context of `n` attends to of its rows `part`, `[layer][kv_head]` of (plain,
/// weighted): by recording context and reading as one text.
fn by_formula(
    model: &Transformer<Cpu>,
    geometry: &Geometry,
    (ids, part): (&[u32], Range<usize>),
    tokens: &[u32],
) -> Vec<Vec<Vec<(f64, f64)>>> {
    let n = ids.len();
    let (_, tape) = read(model, staged(geometry), &[ids, tokens].concat());
    let layers = geometry.layers.iter().zip(&tape.layers).enumerate();
    let layer = |(l, (g, rows)): (
        usize,
        (&crate::cache::LayerGeometry, &super::super::tape::TapeLayer),
    )| {
        let d = g.head_dim;
        let kv = |x: &[f32], t: usize, h: usize| x[(t * g.n_kv_heads + h) * d..][..d].to_vec();
        let head = |kv_head: usize| {
            let keys: Vec<Vec<f64>> = (0..n + tokens.len())
                .map(|t| turned(&kv(&rows.k, t, kv_head), t))
                .collect();
            let sinks = 0..4.min(part.start);
            let context: Vec<usize> = sinks.chain(part.clone()).collect();
            let mut most = vec![(0.0f64, 0.0f64); part.len()];
            for h in kv_head * g.group()..(kv_head + 1) * g.group() {
                let output = |t: usize| {
                    let mut heads = vec![0.0; g.n_heads * d];
                    heads[h * d..(h + 1) * d].copy_from_slice(&kv(&rows.v, t, kv_head));
                    norm(&model.attention_output(l, &heads))
                };
                let outputs: Vec<f64> = part.clone().map(output).collect();
                for t in n..n + tokens.len() {
                    let q = turned(&rows.q[(t * g.n_heads + h) * d..][..d], t);
                    let seen: Vec<usize> = context.iter().copied().chain(n..=t).collect();
                    let logit = |&p: &usize| {
                        let dot: f64 = q.iter().zip(&keys[p]).map(|(a, b)| a * b).sum();
                        (dot * f64::from(g.scale)).exp()
                    };
                    let weights: Vec<f64> = seen.iter().map(logit).collect();
                    let total: f64 = weights.iter().sum();
                    let input = f64::from(rows.residual_norms[t]);
                    let first = context.len() - part.len();
                    for (j, most) in most.iter_mut().enumerate() {
                        let weight = weights[first + j] / total;
                        most.0 = most.0.max(weight);
                        most.1 = most.1.max(weight * outputs[j] / input);
                    }
                }
            }
            most
        };
        (0..g.n_kv_heads).map(head).collect()
    };
    layers.map(layer).collect()
}

fn hold(found: &[Repetition], want: &[Vec<Vec<(f64, f64)>>], part: Range<usize>) {
    let near = |a: f32, b: f64| (f64::from(a) - b).abs() < 1e-3 * b + 1e-9;
    for (l, (found, want)) in found.iter().zip(want).enumerate() {
        for (h, want) in want.iter().enumerate() {
            for (t, &(plain, weighted)) in part.clone().zip(want) {
                let got = (found.attention[h][t], found.weighted[h][t]);
                assert!(
                    near(got.0, plain) && near(got.1, weighted),
                    "layer {l}, head {h}, row {t}: {got:?} {plain} {weighted}"
                );
            }
        }
    }
}

#[test]
fn a_context_of_one_part_is_read_as_the_formula_says() {
    let (model, geometry) = model();
    for n in [1, 2, 40, 130] {
        let ids = text(n);
        let (_, found) = repeated(&model, &geometry, staged(&geometry), &ids);
        let p = prompt();
        let tokens = [&p.first[..], &p.then, &ids].concat();
        let part = 0..ids.len();
        let want = by_formula(&model, &geometry, (&ids, part.clone()), &tokens);
        for layer in &found {
            assert!(layer.attention.iter().all(|h| h.len() == ids.len()));
        }
        hold(&found, &want, part);
    }
}

#[test]
fn a_later_part_quotes_the_one_before_and_sees_the_first_rows() {
    let (model, geometry) = model();
    let ids = text(PART as u32 + 30);
    let (_, found) = repeated(&model, &geometry, staged(&geometry), &ids);
    let p = prompt();
    let quoted = &ids[PART - QUOTED..PART];
    let tokens = [&p.later[..], quoted, &p.then, &ids[PART..]].concat();
    let part = PART..ids.len();
    let want = by_formula(&model, &geometry, (&ids, part.clone()), &tokens);
    hold(&found, &want, part);
    // Every row of the first part got something too.
    let first = |h: &Vec<f32>| h[..PART].iter().all(|&s| s > 0.0 && s <= 1.0);
    assert!(found.iter().all(|l| l.attention.iter().all(first)));
}

#[test]
fn the_context_goes_on_as_if_nothing_had_been_read() {
    let (model, geometry) = model();
    let ids = text(150);
    let next = |cache: &mut StagedCache| {
        let batch = Batch::single(SEQ, 150..152);
        model.step(&batch, &[17, 4], cache).unwrap().rows
    };
    let (mut plain, _) = read(&model, staged(&geometry), &ids);
    let (mut cache, _) = repeated(&model, &geometry, staged(&geometry), &ids);
    assert_eq!(cache.len(SEQ).unwrap(), 150);
    assert!(matches!(
        cache.len(OTHER),
        Err(CacheError::UnknownSequence(9))
    ));
    assert_eq!(cache.memory().rows_live, plain.memory().rows_live);
    assert_eq!(cache.memory().exact_bytes, plain.memory().exact_bytes);
    assert_eq!(cache.memory().payload_bytes, plain.memory().payload_bytes);
    let bits = |rows: Vec<f32>| -> Vec<u32> { rows.iter().map(|x| x.to_bits()).collect() };
    assert_eq!(bits(next(&mut cache)), bits(next(&mut plain)));
}

#[test]
fn steps_and_threads_change_no_bit() {
    let (model, geometry) = model();
    let ids = text(90);
    let run = |max_chunk: Option<usize>, n_threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads);
        let mut cache = PlainCache::new(geometry.clone());
        cache.needs.max_chunk = max_chunk;
        let work = || repeated(&model, &geometry, cache, &ids).1;
        pool.build().unwrap().install(work)
    };
    let want = run(None, 1);
    for (max_chunk, n_threads) in [(None, 3), (Some(1), 2), (Some(7), 1), (Some(65), 2)] {
        assert_eq!(run(max_chunk, n_threads), want, "{max_chunk:?} {n_threads}");
    }
}

#[test]
fn a_reading_longer_than_the_model_is_refused() {
    let (model, _) = model();
    let short = geometry(model.spec(), 50);
    let ids = text(40);
    let (mut cache, tape) = read(&model, staged(&short), &ids);
    let place: (&mut dyn KvCache, SeqId, SeqId) = (&mut cache, SEQ, OTHER);
    let refused = repetition(&model, place, &short, (&ids, &tape), &prompt());
    let text = refused.expect_err("84 positions of 50").to_string();
    assert!(
        text.contains("lies past the model's context of 50"),
        "{text}"
    );
    // What was begun is released.
    assert!(cache.len(OTHER).is_err() && cache.len(SEQ).is_ok());
}
