//! `expected_attention`: rows that queries to come would attend to, if they were distributed as the context's are.
//!
//! With μ and Σ of a query head before RoPE and R̄ the mean rotation of the next `horizon` positions, the logarithm of a
//! row's expected weight is s·k·R̄μ + s²/2·kᵀR̄ΣR̄ᵀk (s the scale of attention), made a weight by a softmax over the
//! context; its score is the mean over the group's heads times ‖v‖. Sinks stay out of the statistics.

use super::super::Needs;
use super::super::stage::{
    ContextLayer, ContextNeeds, Domain, Kind, ParamDef, StageDef, Tolerance, never,
};
use super::attention::key_columns;
use super::budget::{
    ALLOCATE, BETA, BYTES, BYTES_PER_TOKEN, KEPT_FRACTION, RECENT, SAFEGUARD, SEGMENTS, SINKS,
    TOKENS, WHITELIST,
};
use super::positions;
use super::selection::{Score, Selection};
use crate::compute::cpu::gemm::{Dims, Mat, MatMut, gemm};
use crate::compute::cpu::vector::{exp_sum, max};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "expected_attention",
    kind: Kind::Retain,
    doc: "rows that queries to come would attend to, if they were as the context's were, times the value's norm",
    paper: "Expected Attention, arXiv 2510.00636",
    params: &[
        TOKENS,
        KEPT_FRACTION,
        BYTES,
        BYTES_PER_TOKEN,
        ALLOCATE,
        SAFEGUARD,
        BETA,
        SINKS,
        RECENT,
        WHITELIST,
        SEGMENTS,
        ParamDef {
            name: "horizon",
            domain: Domain::Int {
                min: 1,
                max: 65_536,
            },
            default: Some("512"),
            doc: "positions to come over which rotations are averaged",
        },
    ],
    calibrated: never,
    examples: &["{ method = \"expected_attention\", kept_fraction = 0.5 }"],
    tolerance: Tolerance::Exact,
    build: |params, _| {
        let score = Expected {
            horizon: positions(params, "horizon"),
            n_sinks: positions(params, "sinks") as usize,
        };
        Selection::stage("expected_attention", params, 0, score)
    },
};

/// The score.
pub struct Expected {
    horizon: u32,
    n_sinks: usize,
}

impl Score for Expected {
    fn needs(&self) -> Needs {
        Needs {
            context: ContextNeeds {
                rows: true,
                queries: usize::MAX,
                repetition: false,
            },
            ..Needs::default()
        }
    }

    fn context(&self, context: ContextLayer<'_>) -> Vec<Vec<f32>> {
        let g = context.geometry;
        let (d, n) = (g.head_dim, context.n_tokens);
        let n_sinks = self.n_sinks.min(n - 1);
        let rope = g.rope.averaged(n as u32..n as u32 + self.horizon);
        let head = |kv_head: usize| {
            let columns = key_columns(&context, kv_head);
            let mut scores = vec![0.0f32; n];
            for query_head in kv_head * g.group()..(kv_head + 1) * g.group() {
                let (mean, covariance) = moments(&context, query_head, n_sinks);
                let mut mean: Vec<f32> = mean.iter().map(|x| x * g.scale).collect();
                rope.rotate(0, &mut mean);
                let form = turned(&covariance, d, g.scale, |row| rope.rotate(0, row));
                let mut logits = quadratic(&columns, &form, n);
                for (c, &m) in mean.iter().enumerate() {
                    for (l, k) in logits.iter_mut().zip(&columns[c * n..(c + 1) * n]) {
                        *l = m.mul_add(*k, *l);
                    }
                }
                let logits = &mut logits[n_sinks..];
                let sum = exp_sum(logits, max(logits));
                for (s, w) in scores[n_sinks..].iter_mut().zip(logits) {
                    *s += *w / sum;
                }
            }
            let values = context.seen.v.chunks_exact(g.n_kv_heads * d);
            for (s, v) in scores.iter_mut().zip(values) {
                let v = &v[kv_head * d..(kv_head + 1) * d];
                *s *= v.iter().fold(0.0f32, |s, &x| x.mul_add(x, s)).sqrt();
            }
            scores
        };
        (0..g.n_kv_heads).map(head).collect()
    }
}

/// Mean and covariance of one query head's queries before RoPE, sinks left out.
fn moments(context: &ContextLayer<'_>, query_head: usize, n_sinks: usize) -> (Vec<f32>, Vec<f32>) {
    let g = context.geometry;
    let d = g.head_dim;
    let rows = || {
        let all = context.seen.q.chunks_exact(g.n_heads * d).skip(n_sinks);
        all.map(|q| &q[query_head * d..(query_head + 1) * d])
    };
    let n = rows().count().max(1) as f64;
    let mut mean = vec![0.0f64; d];
    for q in rows() {
        mean.iter_mut()
            .zip(q)
            .for_each(|(m, &x)| *m += f64::from(x) / n);
    }
    let mut covariance = vec![0.0f32; d * d];
    let centred: Vec<f32> = rows()
        .flat_map(|q| q.iter().zip(&mean).map(|(&x, m)| (f64::from(x) - m) as f32))
        .collect();
    let n_rows = centred.len() / d;
    let mut columns = vec![0.0f32; centred.len()];
    for (t, row) in centred.chunks_exact(d).enumerate() {
        for (c, &x) in row.iter().enumerate() {
            columns[c * n_rows + t] = x / n as f32;
        }
    }
    gemm(
        Dims {
            m: d,
            n: d,
            k: n_rows,
        },
        Mat {
            data: &columns,
            stride: n_rows,
        },
        Mat {
            data: &centred,
            stride: d,
        },
        MatMut {
            data: &mut covariance,
            stride: d,
        },
    );
    (mean.iter().map(|&m| m as f32).collect(), covariance)
}

/// s²/2 · R·Σ·Rᵀ, `turn` being R on a row.
fn turned(covariance: &[f32], d: usize, scale: f32, turn: impl Fn(&mut [f32])) -> Vec<f32> {
    let transposed = |m: &[f32]| -> Vec<f32> { (0..d * d).map(|i| m[i % d * d + i / d]).collect() };
    let mut once = covariance.to_vec();
    once.chunks_exact_mut(d).for_each(&turn);
    let mut twice = transposed(&once);
    twice.chunks_exact_mut(d).for_each(&turn);
    twice.iter_mut().for_each(|x| *x *= scale * scale / 2.0);
    twice
}

/// kᵀ·M·k of every key. `columns`: `[d][n]`.
fn quadratic(columns: &[f32], form: &[f32], n: usize) -> Vec<f32> {
    let d = columns.len() / n;
    let mut mapped = vec![0.0f32; columns.len()];
    gemm(
        Dims { m: d, n, k: d },
        Mat {
            data: form,
            stride: d,
        },
        Mat {
            data: columns,
            stride: n,
        },
        MatMut {
            data: &mut mapped,
            stride: n,
        },
    );
    let mut out = vec![0.0f32; n];
    for (mapped, keys) in mapped.chunks_exact(n).zip(columns.chunks_exact(n)) {
        for ((o, a), b) in out.iter_mut().zip(mapped).zip(keys) {
            *o = a.mul_add(*b, *o);
        }
    }
    out
}
