//! `keydiff`: rows whose keys point away from the mean direction of the context's keys live.
//!
//! The score of a row is −cos(k, m), m the mean of the head's keys after RoPE, each scaled to length 1.

use super::super::Needs;
use super::super::stage::{ContextLayer, ContextNeeds, Kind, StageDef, Tolerance, never};
use super::budget::COMMON;
use super::selection::{Score, Selection};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "keydiff",
    kind: Kind::Retain,
    doc: "rows whose keys differ most from the mean direction",
    paper: "KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364",
    params: COMMON,
    calibrated: never,
    examples: &["{ method = \"keydiff\", kept_fraction = 0.5 }"],
    tolerance: Tolerance::Exact,
    build: |params, _| Selection::stage("keydiff", params, 0, KeyDiff),
};

/// The score.
pub struct KeyDiff;

impl Score for KeyDiff {
    fn needs(&self) -> Needs {
        Needs {
            context: ContextNeeds {
                rows: true,
                ..ContextNeeds::default()
            },
            ..Needs::default()
        }
    }

    fn context(&self, context: ContextLayer<'_>) -> Vec<Vec<f32>> {
        let g = context.geometry;
        let d = g.head_dim;
        let head = |kv_head: usize| {
            let mut keys = Vec::with_capacity(context.n_tokens * d);
            let mut mean = vec![0.0f32; d];
            for (t, all) in context.seen.k.chunks_exact(g.n_kv_heads * d).enumerate() {
                keys.extend_from_slice(&all[kv_head * d..(kv_head + 1) * d]);
                let key = &mut keys[t * d..];
                g.rope.rotate(t as u32, key);
                let norm = dot(key, key).sqrt().max(f32::MIN_POSITIVE);
                key.iter_mut().for_each(|x| *x /= norm);
                mean.iter_mut().zip(key).for_each(|(m, x)| *m += *x);
            }
            let norm = dot(&mean, &mean).sqrt().max(f32::MIN_POSITIVE);
            let cosine = |key| dot(key, &mean) / norm;
            keys.chunks_exact(d).map(|key| -cosine(key)).collect()
        };
        (0..g.n_kv_heads).map(head).collect()
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |s, (x, y)| x.mul_add(*y, s))
}
