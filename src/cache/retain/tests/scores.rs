//! Scores by a whole context against their formulas in f64, and that what another strategy asked for changes no bit.

use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::build;
use crate::cache::rope::{PairLayout, Rope};
use crate::cache::stage::{ContextLayer, SeenLayer, Value};
use crate::cache::{LayerGeometry, Repetition};

/// Query heads, KV heads.
const HEADS: (usize, usize) = (4, 2);

const BASE: f64 = 10_000.0;

/// A context of one layer; of 16 channels or fewer, so that the last ones may not be turned.
struct Case {
    geometry: LayerGeometry,
    k: Vec<f32>,
    v: Vec<f32>,
    q: Vec<f32>,
    n: usize,
}

impl Case {
    fn new(n: usize, head_dim: usize, window: Option<u32>) -> Self {
        let n_rot = head_dim / 4 * 4;
        let rope = Rope::new(
            PairLayout::HalfSplit,
            Rope::frequencies(BASE as f32, n_rot),
            64,
        );
        let geometry = LayerGeometry {
            n_heads: HEADS.0,
            n_kv_heads: HEADS.1,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            rope: Arc::new(rope),
            window,
        };
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let mut rows = |heads: usize, mean: f32| -> Vec<f32> {
            let number = |_| mean + rng.random_range(-1.5f32..1.5);
            (0..n * heads * head_dim).map(number).collect()
        };
        Self {
            k: rows(HEADS.1, 0.3),
            v: rows(HEADS.1, 0.0),
            q: rows(HEADS.0, 0.2),
            geometry,
            n,
        }
    }

    /// What a stage makes of it, shown the queries of the newest `n_queries` tokens.
    fn scores(&self, stage: &str, given: &[(&str, Value)], n_queries: usize) -> Vec<Vec<f32>> {
        let given = [given, &[("tokens", Value::Int(4096))]].concat();
        let stage = build(stage, &given).unwrap();
        let skipped = (self.n - n_queries) * HEADS.0 * self.geometry.head_dim;
        stage.score_context(ContextLayer {
            layer: 0,
            geometry: &self.geometry,
            n_tokens: self.n,
            seen: SeenLayer {
                k: &self.k,
                v: &self.v,
                q: &self.q[skipped..],
                repetition: None,
            },
        })
    }

    fn row(&self, rows: &[f32], n_heads: usize, (t, h): (usize, usize)) -> Vec<f64> {
        let d = self.geometry.head_dim;
        let at = (t * n_heads + h) * d;
        rows[at..at + d].iter().map(|&x| f64::from(x)).collect()
    }

    fn query(&self, t: usize, h: usize) -> Vec<f64> {
        self.row(&self.q, HEADS.0, (t, h))
    }

    /// A key, turned.
    fn key(&self, t: usize, h: usize) -> Vec<f64> {
        let k = self.row(&self.k, HEADS.1, (t, h));
        turned(&k, |f| {
            let (sin, cos) = (t as f64 * f).sin_cos();
            (cos, sin)
        })
    }

    /// Attention that query head `h` of token `t` gives, by position.
    fn weights(&self, t: usize, h: usize) -> Vec<f64> {
        let group = HEADS.0 / HEADS.1;
        let query = turned(&self.query(t, h), |f| {
            let (sin, cos) = (t as f64 * f).sin_cos();
            (cos, sin)
        });
        let first = self
            .geometry
            .window
            .map_or(0, |w| (t + 1).saturating_sub(w as usize));
        let logits: Vec<f64> = (0..self.n)
            .map(|p| match (first..=t).contains(&p) {
                true => dot(&query, &self.key(p, h / group)) * f64::from(self.geometry.scale),
                false => f64::NEG_INFINITY,
            })
            .collect();
        softmax(&logits)
    }

    /// Σ over these queries and a group's heads, `[kv_head][token]`.
    fn attention(&self, queries: std::ops::Range<usize>) -> Vec<Vec<f64>> {
        let group = HEADS.0 / HEADS.1;
        let mut sums = vec![vec![0.0; self.n]; HEADS.1];
        for t in queries {
            for h in 0..HEADS.0 {
                let weights = self.weights(t, h);
                sums[h / group]
                    .iter_mut()
                    .zip(weights)
                    .for_each(|(s, w)| *s += w);
            }
        }
        sums
    }
}

/// Half-split rotation; `angle` gives cosine and sine, or their means, for a frequency.
fn turned(x: &[f64], angle: impl Fn(f64) -> (f64, f64)) -> Vec<f64> {
    let n_rot = x.len() / 4 * 4;
    let half = n_rot / 2;
    let mut out = x.to_vec();
    for i in 0..half {
        let (cos, sin) = angle(BASE.powf(-2.0 * i as f64 / n_rot as f64));
        out[i] = x[i] * cos - x[i + half] * sin;
        out[i + half] = x[i] * sin + x[i + half] * cos;
    }
    out
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.iter().map(|l| (l - top).exp()).sum();
    logits.iter().map(|l| (l - top).exp() / total).collect()
}

/// Equal but for one factor, which all rows share.
fn proportional(got: &[Vec<f32>], want: &[Vec<f64>], rows: std::ops::Range<usize>) {
    let sums = got.iter().zip(want).fold((0.0, 0.0), |sums, (got, want)| {
        let got: f64 = got[rows.clone()].iter().map(|&x| f64::from(x)).sum();
        (
            sums.0 + got,
            sums.1 + want[rows.clone()].iter().sum::<f64>(),
        )
    });
    let factor = sums.0 / sums.1;
    assert!(factor.is_finite() && factor > 0.0, "{sums:?}");
    for (h, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.len(), want.len());
        for t in rows.clone() {
            let (got, want) = (f64::from(got[t]), factor * want[t]);
            let near = 2e-5 * want.abs() + 1e-7;
            assert!((got - want).abs() < near, "head {h}, row {t}: {got} {want}");
        }
    }
}

fn bits(scores: &[Vec<f32>]) -> Vec<Vec<u32>> {
    let head = |s: &Vec<f32>| s.iter().map(|x| x.to_bits()).collect();
    scores.iter().map(head).collect()
}

fn cases() -> Vec<Case> {
    vec![
        Case::new(40, 16, None),
        Case::new(37, 10, None),
        Case::new(40, 8, Some(12)),
    ]
}

#[test]
fn snapkv_is_the_windows_attention_smoothed() {
    for case in cases() {
        for (window, kernel) in [(8, 5), (1, 1), (16, 7)] {
            let given = [
                ("window", Value::Int(window as i64)),
                ("kernel", Value::Int(kernel as i64)),
            ];
            let rest = case.n - window;
            let attention = case.attention(rest..case.n);
            let pooled = |sums: &Vec<f64>| -> Vec<f64> {
                let at = |i: isize| match (0..rest as isize).contains(&i) {
                    true => sums[i as usize],
                    false => 0.0,
                };
                let half = kernel as isize / 2;
                let mean = |i: isize| (i - half..=i + half).map(at).sum::<f64>() / kernel as f64;
                (0..case.n as isize).map(mean).collect()
            };
            let want: Vec<Vec<f64>> = attention.iter().map(pooled).collect();
            let got = case.scores("snapkv", &given, window);
            // Rows of the window live whatever they score.
            proportional(&got, &want, 0..rest);
            for n_queries in [window + 1, case.n] {
                let more = case.scores("snapkv", &given, n_queries);
                assert_eq!(bits(&got), bits(&more), "{n_queries} queries");
            }
            for twin in ["adakv", "pyramid"] {
                let twin = case.scores(twin, &given, window);
                assert_eq!(bits(&got), bits(&twin));
            }
        }
    }
}

#[test]
fn a_window_longer_than_the_context_asks_all_of_it() {
    let case = Case::new(6, 8, None);
    let got = case.scores("snapkv", &[("window", Value::Int(64))], 6);
    assert!(
        got.iter()
            .all(|s| s.len() == 6 && s.iter().all(|x| x.is_finite()))
    );
}

#[test]
fn h2o_is_all_attention_over_who_saw_the_row() {
    for case in cases() {
        let mut want = case.attention(0..case.n);
        for sums in &mut want {
            for (p, s) in sums.iter_mut().enumerate() {
                let saw = (p..case.n).filter(|t| {
                    let window = case.geometry.window;
                    window.is_none_or(|w| t - p < w as usize)
                });
                *s /= saw.count() as f64;
            }
        }
        proportional(&case.scores("h2o", &[], case.n), &want, 0..case.n);
    }
}

#[test]
fn tova_is_the_newest_querys_attention_by_all_heads() {
    for case in cases() {
        let by_head = case.attention(case.n - 1..case.n);
        let all: Vec<f64> = (0..case.n).map(|t| by_head[0][t] + by_head[1][t]).collect();
        let got = case.scores("tova", &[], 1);
        proportional(&got, &[all.clone(), all], 0..case.n);
        assert_eq!(bits(&got), bits(&case.scores("tova", &[], case.n)));
    }
}

/// The mean of the turned unit vectors of the positions to come, by frequency.
fn mean_turn(n: usize, horizon: usize) -> impl Fn(f64) -> (f64, f64) {
    move |f| {
        let angles = (n..n + horizon).map(|p| (p as f64 * f).sin_cos());
        let sum = angles.fold((0.0, 0.0), |s, (sin, cos)| (s.0 + cos, s.1 + sin));
        (sum.0 / horizon as f64, sum.1 / horizon as f64)
    }
}

#[test]
fn expected_attention_is_its_formula() {
    for case in cases() {
        for (horizon, sinks) in [(512, 4), (1, 0), (30, 2)] {
            let group = HEADS.0 / HEADS.1;
            let scale = f64::from(case.geometry.scale);
            let turn = mean_turn(case.n, horizon);
            let mut want = vec![vec![0.0; case.n]; HEADS.1];
            for h in 0..HEADS.0 {
                let queries: Vec<Vec<f64>> = (sinks..case.n).map(|t| case.query(t, h)).collect();
                let n = queries.len() as f64;
                let mean: Vec<f64> = (0..case.geometry.head_dim)
                    .map(|c| queries.iter().map(|q| q[c]).sum::<f64>() / n)
                    .collect();
                // kᵀRΣRᵀk is the mean square of what R of a centred query has in common with k.
                let centred: Vec<Vec<f64>> = queries
                    .iter()
                    .map(|q| q.iter().zip(&mean).map(|(a, b)| a - b).collect())
                    .collect();
                let centred: Vec<Vec<f64>> = centred.iter().map(|c| turned(c, &turn)).collect();
                let mean = turned(&mean, &turn);
                let logit = |t: usize| {
                    let key = case.key(t, h / group);
                    let squares = centred.iter().map(|c| dot(c, &key).powi(2));
                    scale * dot(&mean, &key) + scale * scale / 2.0 * squares.sum::<f64>() / n
                };
                let logits: Vec<f64> = (sinks..case.n).map(logit).collect();
                for (t, w) in (sinks..).zip(softmax(&logits)) {
                    want[h / group][t] += w;
                }
            }
            for (h, want) in want.iter_mut().enumerate() {
                for (t, s) in want.iter_mut().enumerate() {
                    let v = case.row(&case.v, HEADS.1, (t, h));
                    *s *= dot(&v, &v).sqrt();
                }
            }
            let given = [
                ("horizon", Value::Int(horizon as i64)),
                ("sinks", Value::Int(sinks as i64)),
            ];
            let got = case.scores("expected_attention", &given, case.n);
            proportional(&got, &want, 0..case.n);
        }
    }
}

#[test]
fn keydiff_is_the_cosine_to_the_mean_direction() {
    for case in cases() {
        let got = case.scores("keydiff", &[], 0);
        for (h, got) in got.iter().enumerate() {
            let unit = |t: usize| -> Vec<f64> {
                let key = case.key(t, h);
                let norm = dot(&key, &key).sqrt();
                key.iter().map(|x| x / norm).collect()
            };
            let mut mean = vec![0.0; case.geometry.head_dim];
            for t in 0..case.n {
                mean.iter_mut().zip(unit(t)).for_each(|(m, x)| *m += x);
            }
            let norm = dot(&mean, &mean).sqrt();
            for (t, &got) in got.iter().enumerate() {
                let want = -dot(&unit(t), &mean) / norm;
                assert!((f64::from(got) - want).abs() < 1e-5, "{t}: {got} {want}");
            }
        }
    }
}

#[test]
fn contexts_of_one_and_two_tokens_have_finite_scores() {
    for n in [1, 2] {
        let case = Case::new(n, 8, None);
        for stage in [
            "snapkv",
            "adakv",
            "pyramid",
            "h2o",
            "tova",
            "expected_attention",
            "keydiff",
        ] {
            let scores = case.scores(stage, &[], n);
            assert_eq!(scores.len(), HEADS.1);
            let sound = |s: &Vec<f32>| s.len() == n && s.iter().all(|x| x.is_finite());
            assert!(scores.iter().all(sound), "{stage} {n}: {scores:?}");
        }
    }
}

#[test]
fn kvzip_takes_what_the_repetition_gave() {
    let case = Case::new(3, 8, None);
    let repetition = Repetition {
        attention: vec![vec![0.1, 0.2, 0.3], vec![0.4, 0.5, 0.6]],
        weighted: vec![vec![1.0, 2.0, 3.0], vec![4.0, 5.0, 6.0]],
    };
    let of = |stage: &str, repetition| {
        let stage = build(stage, &[("kept_fraction", Value::Float(0.5))]).unwrap();
        assert!(stage.needs().context.repetition && stage.needs_point().is_some());
        stage.score_context(ContextLayer {
            layer: 0,
            geometry: &case.geometry,
            n_tokens: 3,
            seen: SeenLayer {
                k: &case.k,
                v: &case.v,
                q: &[],
                repetition,
            },
        })
    };
    assert_eq!(of("kvzip", Some(&repetition)), repetition.attention);
    assert_eq!(of("kvzip_plus", Some(&repetition)), repetition.weighted);
    // Nothing shown is no score, which the cache refuses.
    assert_eq!(of("kvzip", None), Vec::<Vec<f32>>::new());
}
