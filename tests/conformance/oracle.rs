//! Which rows each retention keeps, by its definition written again here and attention in f64.
//!
//! The suite's own oracle asks the stage which rows leave; here nothing is asked.

use kvlab::cache::stage::{Params, Value};
use kvlab::cache::strategy::{StageSpec, Strategy};
use kvlab::cache::{Geometry, SeqId};

use super::support::{Script, build, geometry, run, script};

/// Half-split rotation in f64.
fn rotate(x: &[f32], position: usize) -> Vec<f64> {
    let d = x.len();
    let half = d / 2;
    let mut out: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    for i in 0..half {
        let angle = position as f64 * 10_000f64.powf(-2.0 * i as f64 / (2 * half) as f64);
        let (a, b) = (f64::from(x[i]), f64::from(x[i + half]));
        out[i] = a * angle.cos() - b * angle.sin();
        out[i + half] = a * angle.sin() + b * angle.cos();
    }
    out
}

/// Attention of one query over the positions that `visible(query, kv_head, position)` admits.
pub fn oracle(
    g: &Geometry,
    s: &Script,
    layer: usize,
    visible: &dyn Fn(usize, usize, usize) -> bool,
) -> Vec<f64> {
    let l = &g.layers[layer];
    let (d, group) = (l.head_dim, l.n_heads / l.n_kv_heads);
    let mut out = Vec::new();
    for q in 0..s.n_tokens {
        for h in 0..l.n_heads {
            let kv = h / group;
            let query = rotate(&s.q[layer][(q * l.n_heads + h) * d..][..d], q);
            let positions: Vec<usize> = (0..=q).filter(|&p| visible(q, kv, p)).collect();
            let scores: Vec<f64> = positions
                .iter()
                .map(|&p| {
                    let key = rotate(&s.k[layer][(p * l.n_kv_heads + kv) * d..][..d], p);
                    query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() / (d as f64).sqrt()
                })
                .collect();
            let top = scores.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
            let total: f64 = scores.iter().map(|x| (x - top).exp()).sum();
            for c in 0..d {
                let sum: f64 = positions
                    .iter()
                    .zip(&scores)
                    .map(|(&p, x)| {
                        (x - top).exp() * f64::from(s.v[layer][(p * l.n_kv_heads + kv) * d + c])
                    })
                    .sum();
                out.push(sum / total);
            }
        }
    }
    out
}

fn check(
    g: &Geometry,
    s: &Script,
    strategy: &Strategy,
    visible: &dyn Fn(usize, usize, usize) -> bool,
    bound: f64,
) {
    for chunks in [&[1usize][..], &[s.n_tokens], &[7, 13, 20]] {
        let mut cache = build(strategy, g);
        let got = run(&mut cache, g, SeqId(0), s, chunks);
        for (layer, got) in got.iter().enumerate() {
            let want = oracle(g, s, layer, visible);
            let worst = got
                .iter()
                .zip(&want)
                .map(|(a, b)| (f64::from(*a) - b).abs())
                .fold(0.0, f64::max);
            assert!(
                worst < bound,
                "{}: layer {layer}, chunks {chunks:?}: {worst}",
                strategy.label
            );
        }
    }
}

#[test]
fn window_retention_keeps_sinks_and_recent_rows() {
    let g = geometry(4, 2, 32);
    let s = script(&g, 200, 6, 0.5);
    let mut strategy = Strategy::bare("f32");
    let mut params = Params::default();
    params.0.insert("recent".into(), Value::Int(12));
    params.0.insert("sinks".into(), Value::Int(4));
    strategy.retain = Some(StageSpec {
        name: "window".into(),
        params,
    });
    // After the step at position q−1 the rows q−12 … q−1 are left; the query's own row joins them.
    check(&g, &s, &strategy, &|q, _, p| p < 4 || p + 12 >= q, 1e-4);
}

/// Low-norm rows stay, decided one position at a time: written again here, without the pipeline's code.
#[test]
fn knorm_retention_keeps_low_norm_rows_per_head() {
    let g = geometry(4, 2, 32);
    let s = script(&g, 120, 7, 0.5);
    let budget = 30;
    let mut strategy = Strategy::bare("f32");
    let mut params = Params::default();
    params.0.insert("tokens".into(), Value::Int(budget as i64));
    params.0.insert("sinks".into(), Value::Int(4));
    strategy.retain = Some(StageSpec {
        name: "knorm".into(),
        params,
    });
    let norm = |layer: usize, kv: usize, p: usize| -> f64 {
        s.k[layer][(p * 2 + kv) * 32..][..32]
            .iter()
            .map(|&x| f64::from(x) * f64::from(x))
            .sum()
    };
    let visible_at = |layer: usize, kv: usize, q: usize| -> Vec<usize> {
        let mut live: Vec<usize> = Vec::new();
        for step in 0..=q {
            live.push(step);
            if step == q {
                return live;
            }
            while live.len() > budget {
                let worst = live.iter().copied().filter(|&p| p >= 4).max_by(|&a, &b| {
                    norm(layer, kv, a)
                        .total_cmp(&norm(layer, kv, b))
                        .then(b.cmp(&a))
                });
                live.retain(|&p| Some(p) != worst);
            }
        }
        live
    };
    for layer in 0..2 {
        let table: Vec<Vec<Vec<usize>>> = (0..2)
            .map(|kv| (0..120).map(|q| visible_at(layer, kv, q)).collect())
            .collect();
        assert_ne!(table[0][119], table[1][119], "heads keep different rows");
        for chunks in [&[1usize][..], &[120], &[7, 13, 20]] {
            let mut cache = build(&strategy, &g);
            let got = run(&mut cache, &g, SeqId(0), &s, chunks);
            let want = oracle(&g, &s, layer, &|q, kv, p| table[kv][q].contains(&p));
            let worst = got[layer]
                .iter()
                .zip(&want)
                .map(|(a, b)| (f64::from(*a) - b).abs())
                .fold(0.0, f64::max);
            assert!(worst < 2e-5, "layer {layer}, chunks {chunks:?}: {worst}");
        }
    }
}
