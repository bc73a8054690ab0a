//! Attention weights of some queries of a context, for scores that are made of them.
//!
//! Invariants: each weight is e^(s − m) / l over the positions that the query sees, its own included, one chain of
//! operations per query: tiles and threads change nothing.

use super::super::stage::ContextLayer;
use crate::compute::cpu::gemm::{Dims, Mat, MatMut, gemm};
use crate::compute::cpu::vector::{exp_sum, max};

/// Queries scored at a time.
const TILE: usize = 64;

/// Weights of one query of one query head.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    /// KV head index.
    pub kv_head: usize,
    /// Position of the first weight.
    pub first: usize,
    /// Weights of the positions that the query sees, up to its own.
    pub weights: &'a [f32],
}

/// Rotated rows of one KV head's keys as columns, `[head_dim][token]`.
pub fn key_columns(context: &ContextLayer<'_>, kv_head: usize) -> Vec<f32> {
    let g = context.geometry;
    let (d, n) = (g.head_dim, context.n_tokens);
    let mut columns = vec![0.0; d * n];
    let mut row = vec![0.0; d];
    for (t, all) in context.seen.k.chunks_exact(g.n_kv_heads * d).enumerate() {
        row.copy_from_slice(&all[kv_head * d..(kv_head + 1) * d]);
        g.rope.rotate(t as u32, &mut row);
        for (c, &x) in row.iter().enumerate() {
            columns[c * n + t] = x;
        }
    }
    columns
}

/// Shows `each` the weights of every query that was seen, in order of KV head, position and query head.
pub fn weights(context: &ContextLayer<'_>, mut each: impl FnMut(Weights<'_>)) {
    let g = context.geometry;
    let (d, n) = (g.head_dim, context.n_tokens);
    let width = g.n_heads * d;
    let n_queries = context.seen.q.len() / width;
    for kv_head in 0..g.n_kv_heads {
        let columns = key_columns(context, kv_head);
        for tile in (0..n_queries).step_by(TILE) {
            let n_tile = TILE.min(n_queries - tile);
            let position = |i: usize| n - n_queries + tile + i;
            let mut q = Vec::with_capacity(n_tile * g.group() * d);
            for i in 0..n_tile {
                let at = (tile + i) * width + kv_head * g.group() * d;
                q.extend_from_slice(&context.seen.q[at..at + g.group() * d]);
                let start = q.len() - g.group() * d;
                for q in q[start..].chunks_exact_mut(d) {
                    g.rope.rotate(position(i) as u32, q);
                    q.iter_mut().for_each(|x| *x *= g.scale);
                }
            }
            let m = q.len() / d;
            let mut scores = vec![0.0; m * n];
            let out = MatMut {
                data: &mut scores,
                stride: n,
            };
            let (a, b) = (
                Mat {
                    data: &q,
                    stride: d,
                },
                Mat {
                    data: &columns,
                    stride: n,
                },
            );
            gemm(Dims { m, n, k: d }, a, b, out);
            for (i, row) in scores.chunks_exact_mut(n).enumerate() {
                let query = position(i / g.group());
                let first = g
                    .window
                    .map_or(0, |w| (query + 1).saturating_sub(w as usize));
                let row = &mut row[first..=query];
                let sum = exp_sum(row, max(row));
                row.iter_mut().for_each(|x| *x /= sum);
                each(Weights {
                    kv_head,
                    first,
                    weights: row,
                });
            }
        }
    }
}
