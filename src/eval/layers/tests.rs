//! Layers of a tiny random model: what must be zero is zero, what must not be is what a count by hand gives.

use std::sync::Arc;

use super::*;
use crate::cache::stage::{Params, Value};
use crate::cache::strategy::{StageSpec, Strategy};
use crate::cache::{Admission, Built, Continuation, Materials};
use crate::compute::cpu::Cpu;
use crate::engine::Recording;
use crate::engine::clock::SystemClock;
use crate::eval::floor::Floor;
use crate::eval::lockstep::Outcome;
use crate::model::geometry::geometry;
use crate::model::tiny::{TinyConfig, TinyModel};
use crate::model::transformer::{LanguageModel, Transformer};

const CONTEXT: usize = 150;

struct Tiny {
    model: Transformer<Cpu>,
    geometry: Geometry,
    ids: Vec<u32>,
}

impl Tiny {
    fn new() -> Self {
        let model = TinyModel::new(&TinyConfig::default());
        let model = Transformer::<Cpu>::load(Arc::new(model)).unwrap();
        Self {
            geometry: geometry(model.spec(), 256),
            model,
            ids: (0..CONTEXT as u32 + 20)
                .map(|i| (i * i * 13 + i * 5 + 3) % 256)
                .collect(),
        }
    }

    /// Each strategy's layers, from a run that scores the continuation too.
    fn layers(&self, strategies: &[Strategy], layer_queries: usize) -> Vec<Vec<LayerRecord>> {
        let outcomes = self.run(strategies, layer_queries);
        outcomes.into_iter().map(|o| o.layers).collect()
    }

    fn run(&self, strategies: &[Strategy], layer_queries: usize) -> Vec<Outcome> {
        let lockstep = Lockstep {
            model: &self.model,
            geometry: &self.geometry,
            calibration: None,
            backing_dir: None,
            built: &Built::default(),
            chunk: 13,
            clock: &SystemClock::new(),
            repeat: None,
            latency_steps: 0,
            memory_every: 0,
            layer_queries,
        };
        let entrants: Vec<_> = strategies
            .iter()
            .map(|s| (s, Continuation::Strategy))
            .collect();
        let outcomes = lockstep.compress_once(&entrants, &self.ids, CONTEXT, Floor::Run);
        outcomes.unwrap().into_iter().map(Result::unwrap).collect()
    }

    fn of(&self, strategy: Strategy) -> Vec<LayerRecord> {
        self.layers(&[strategy], QUERIES).remove(0)
    }

    /// Exact rows of the context and the queries after it, by another way than the evaluator's: in one sequence.
    fn exact(&self) -> (ContextTape, Vec<Vec<f32>>) {
        let materials = Materials {
            geometry: &self.geometry,
            calibration: None,
            backing_dir: None,
        };
        let cache = StagedCache::new(&Strategy::bare("f32"), materials).unwrap();
        let mut recording = Recording::new(cache, SEQ);
        recording.admit(SEQ, Admission::Streaming).unwrap();
        let (context, rest) = self.ids.split_at(CONTEXT);
        prefill(&self.model, &mut recording, SEQ, context, 64).unwrap();
        let tape = recording.tape().clone();
        let mut probe = Probe::new(&mut recording, SEQ);
        prefill(&self.model, &mut probe, SEQ, &rest[..QUERIES], 1).unwrap();
        (tape, probe.into_queries())
    }
}

fn window() -> Strategy {
    let params = [("recent", 40), ("sinks", 2)];
    Strategy {
        retain: Some(StageSpec {
            name: "window".into(),
            params: Params(params.map(|(k, v)| (k.to_owned(), Value::Int(v))).into()),
        }),
        ..Strategy::bare("f32")
    }
}

fn heads(layers: &[LayerRecord]) -> Vec<HeadRecord> {
    layers.iter().flat_map(|l| l.heads.clone()).collect()
}

fn kv_heads(layers: &[LayerRecord]) -> Vec<KvHeadRecord> {
    layers.iter().flat_map(|l| l.kv_heads.clone()).collect()
}

#[test]
fn f32_rows_are_exact_in_either_form() {
    let tiny = Tiny::new();
    let before = Strategy {
        keys: KeyForm::PreRope,
        ..Strategy::bare("f32")
    };
    for layers in tiny.layers(&[Strategy::bare("f32"), before], QUERIES) {
        assert_eq!(layers.len(), tiny.geometry.layers.len());
        for (layer, g) in layers.iter().zip(&tiny.geometry.layers) {
            let n = (layer.kv_heads.len(), layer.heads.len());
            assert_eq!(n, (g.n_kv_heads, g.n_heads));
            assert_eq!(layer.n_queries, QUERIES);
        }
        for rows in kv_heads(&layers) {
            assert_eq!(
                (rows.n_rows, rows.k_error_sq, rows.v_error_sq),
                (CONTEXT, 0.0, 0.0)
            );
            assert!(rows.k_norm_sq > 0.0 && rows.v_norm_sq > 0.0);
        }
        for head in heads(&layers) {
            let errors = [head.error_sq, head.error_sq_by_k, head.error_sq_by_v];
            assert_eq!(
                (errors, head.map_kl, head.evicted_mass),
                ([0.0; 3], 0.0, 0.0)
            );
            assert!(head.norm_sq > 0.0);
        }
    }
}

#[test]
fn nobody_asked_means_nothing_and_asking_moves_no_score() {
    let tiny = Tiny::new();
    let all = [Strategy::bare("q4_0"), window()];
    for (with, without) in tiny.run(&all, 3).iter().zip(tiny.run(&all, 0)) {
        assert_eq!(with.layers[0].n_queries, 3);
        assert!(without.layers.is_empty());
        assert_eq!(with.tokens, without.tokens);
        assert_eq!(with.memory, without.memory);
    }
}

/// A block of 32 is stored to half a step of its largest value's 127th, and the step to 11 bits: no row is further off
/// than √32 times that part of its block's norm.
#[test]
fn q8_0_stays_within_its_bound() {
    let tiny = Tiny::new();
    let bound = 32.0f64.sqrt() * (1.0 / 254.0 + 1.0 / 2048.0);
    let layers = tiny.of(Strategy::bare("q8_0"));
    for rows in kv_heads(&layers) {
        for (error, norm) in [
            (rows.k_error_sq, rows.k_norm_sq),
            (rows.v_error_sq, rows.v_norm_sq),
        ] {
            let relative = (error / norm).sqrt();
            assert!(
                relative > 0.0 && relative < bound,
                "{relative}, bound {bound}"
            );
        }
    }
    for head in heads(&layers) {
        assert!(head.map_kl > 0.0 && head.error_sq > 0.0);
        assert!(head.error_sq < 0.1 * head.norm_sq);
        assert_eq!(head.evicted_mass, 0.0);
    }
}

#[test]
fn a_side_that_is_exact_adds_nothing() {
    let tiny = Tiny::new();
    let f32 = || StageSpec::plain("f32");
    let (only_k, only_v) = (Strategy::bare("q4_0"), Strategy::bare("q4_0"));
    let only_k = Strategy {
        encode_v: f32(),
        ..only_k
    };
    let only_v = Strategy {
        encode_k: f32(),
        ..only_v
    };
    let [k, v] = <[_; 2]>::try_from(tiny.layers(&[only_k, only_v], QUERIES)).unwrap();
    assert!(
        kv_heads(&k)
            .iter()
            .all(|r| r.v_error_sq == 0.0 && r.k_error_sq > 0.0)
    );
    assert!(
        kv_heads(&v)
            .iter()
            .all(|r| r.k_error_sq == 0.0 && r.v_error_sq > 0.0)
    );
    for head in heads(&k) {
        assert_eq!(
            (head.error_sq, head.error_sq_by_v),
            (head.error_sq_by_k, 0.0)
        );
        assert!(head.error_sq > 0.0 && head.map_kl > 0.0);
    }
    for head in heads(&v) {
        assert_eq!(
            (head.error_sq, head.error_sq_by_k),
            (head.error_sq_by_v, 0.0)
        );
        assert!(head.error_sq > 0.0 && head.map_kl == 0.0);
    }
}

/// 2 sinks and the newest 40 of 150 rows live: they are exact, so the map over them is too; what is lost is mass.
#[test]
fn evicted_rows_count_by_their_mass() {
    let tiny = Tiny::new();
    let (tape, queries) = tiny.exact();
    for (l, layer) in tiny.of(window()).iter().enumerate() {
        let g = &tiny.geometry.layers[l];
        let d = g.head_dim;
        for rows in &layer.kv_heads {
            assert_eq!(
                (rows.n_rows, rows.k_error_sq, rows.v_error_sq),
                (42, 0.0, 0.0)
            );
        }
        for (h, head) in layer.heads.iter().enumerate() {
            let mut mass = 0.0;
            for (t, q) in queries[l].chunks(g.n_heads * d).enumerate() {
                let mut q = q[h * d..][..d].to_vec();
                g.rope.rotate((CONTEXT + t) as u32, &mut q);
                let weights: Vec<f64> = (0..CONTEXT)
                    .map(|p| {
                        let row = (p * g.n_kv_heads + h / g.group()) * d;
                        let mut k = tape.layers[l].k[row..row + d].to_vec();
                        g.rope.rotate(p as u32, &mut k);
                        let dot = |(a, b): (&f32, &f32)| f64::from(*a) * f64::from(*b);
                        (f64::from(g.scale) * k.iter().zip(&q).map(dot).sum::<f64>()).exp()
                    })
                    .collect();
                mass += weights[2..CONTEXT - 40].iter().sum::<f64>() / weights.iter().sum::<f64>();
            }
            assert!((head.evicted_mass - mass).abs() < 1e-9 * mass, "{l} {h}");
            assert!(mass > 1.0, "a random model looks everywhere: {mass}");
            assert_eq!(head.map_kl, 0.0);
            assert!(head.error_sq > 0.0);
            assert_eq!(
                (head.error_sq_by_k, head.error_sq_by_v),
                (head.error_sq, head.error_sq)
            );
        }
    }
}
