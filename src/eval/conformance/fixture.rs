//! What the checks feed to caches: small layers, seeded rows with outlier channels, a random calibration.
//!
//! Invariant: everything follows from a seed and a stream; rows of a shorter script are the first rows of a longer one.

use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::cache::rope::{PairLayout, Rope};
use crate::cache::stage::{Calibration, HeadCovariance, HeadRows};
use crate::cache::{Geometry, LayerGeometry, Repetition, SeenLayer};

/// Positions that the rotation tables cover.
pub const MAX_POSITIONS: usize = 1024;

/// RoPE's base.
pub const ROPE_BASE: f32 = 10_000.0;

/// Tokens of the calibration.
const CALIBRATION_TOKENS: usize = 128;

/// The channel of each row that is four times as large as the others, as real keys have some.
const OUTLIER_CHANNEL: usize = 3;

/// Two layers alike; of an odd `head_dim` the last channel is not rotated.
pub fn geometry(n_heads: usize, n_kv_heads: usize, head_dim: usize) -> Geometry {
    let rope = Arc::new(Rope::new(
        PairLayout::HalfSplit,
        Rope::frequencies(ROPE_BASE, head_dim / 2 * 2),
        MAX_POSITIONS,
    ));
    let layer = LayerGeometry {
        n_heads,
        n_kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        rope,
        window: None,
    };
    Geometry {
        layers: vec![layer.clone(), layer],
    }
}

/// One sequence's inputs by layer: K and V before RoPE, `[token][kv_head][head_dim]`, queries `[token][head][head_dim]`.
#[derive(Debug, Clone)]
pub struct Script {
    /// Keys.
    pub k: Vec<Vec<f32>>,
    /// Values.
    pub v: Vec<Vec<f32>>,
    /// Queries.
    pub q: Vec<Vec<f32>>,
    /// Tokens.
    pub n_tokens: usize,
}

impl Script {
    /// The first `n` tokens of a layer as an engine that read them would show them; a repetition is made up.
    pub fn seen<'a>(
        &'a self,
        layer: usize,
        g: &LayerGeometry,
        n: usize,
        repetition: &'a Repetition,
    ) -> SeenLayer<'a> {
        let (kv, qw) = (g.n_kv_heads * g.head_dim, g.n_heads * g.head_dim);
        SeenLayer {
            k: &self.k[layer][..n * kv],
            v: &self.v[layer][..n * kv],
            q: &self.q[layer][..n * qw],
            repetition: Some(repetition),
        }
    }

    /// Scores as random as the rows.
    pub fn repetition(&self, layer: usize, g: &LayerGeometry, n: usize) -> Repetition {
        let of = |rows: &[f32]| -> Vec<Vec<f32>> {
            let row = |t: usize, h: usize| rows[(t * g.n_kv_heads + h) * g.head_dim].abs();
            let head = |h: usize| (0..n).map(|t| row(t, h)).collect();
            (0..g.n_kv_heads).map(head).collect()
        };
        Repetition {
            attention: of(&self.k[layer]),
            weighted: of(&self.v[layer]),
        }
    }

    /// What stands for a layer's normalised input at a position.
    pub fn hidden(&self, layer: usize, position: usize) -> &[f32] {
        let width = self.q[layer].len() / self.n_tokens;
        &self.q[layer][position * width..(position + 1) * width]
    }
}

/// Which random numbers a script takes.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// The seed.
    pub seed: u64,
    /// One of the seed's independent streams.
    pub stream: u64,
}

impl Source {
    fn rng(self, substream: u64) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(self.stream * 64 + substream);
        rng
    }
}

/// Bell-shaped rows, `scale` · 1.4 standard deviation, with an outlier channel.
pub fn script(geometry: &Geometry, n_tokens: usize, source: Source, scale: f32) -> Script {
    let mut script = Script {
        k: Vec::new(),
        v: Vec::new(),
        q: Vec::new(),
        n_tokens,
    };
    let mut substream = 0;
    let mut rows = |n: usize, dim: usize| -> Vec<f32> {
        let mut rng = source.rng(substream);
        substream += 1;
        let mut number = |i: usize| {
            let sum: f32 = (0..6).map(|_| rng.random_range(-1.0f32..1.0)).sum();
            let outlier = i % dim == OUTLIER_CHANNEL % dim;
            scale * sum * if outlier { 4.0 } else { 1.0 }
        };
        (0..n * dim).map(&mut number).collect()
    };
    for l in &geometry.layers {
        script.k.push(rows(n_tokens * l.n_kv_heads, l.head_dim));
        script.v.push(rows(n_tokens * l.n_kv_heads, l.head_dim));
        script.q.push(rows(n_tokens * l.n_heads, l.head_dim));
    }
    script
}

/// A calibration with full-rank, uneven second moments, and rows as the codecs' own check draws them.
pub fn calibration(geometry: &Geometry) -> Calibration {
    let moments = |dim: usize, stream: u64| {
        let mut rng = Source { seed: 0, stream }.rng(0);
        let mut sum = vec![0.0f64; dim * dim];
        for _ in 0..4 * dim {
            let x: Vec<f64> = (0..dim)
                .map(|i| rng.random_range(-1.0..1.0) * (1.0 + (dim - i) as f64 / 8.0))
                .collect();
            for (i, a) in x.iter().enumerate() {
                for (j, b) in x.iter().enumerate() {
                    sum[i * dim + j] += a * b;
                }
            }
        }
        sum
    };
    let heads = geometry.layers.iter().enumerate().map(|(l, g)| {
        let head = |h: usize| {
            let stream = 3 * (l * 16 + h) as u64;
            HeadCovariance {
                k_pre: moments(g.head_dim, stream),
                k_post: moments(g.head_dim, stream + 1),
                v: moments(g.head_dim, stream + 2),
            }
        };
        (0..g.n_kv_heads).map(head).collect()
    });
    let mut rng = Source {
        seed: 0,
        stream: 99,
    }
    .rng(0);
    let mut rows = |n: usize| codec_rows(&mut rng, n);
    let rows = geometry.layers.iter().map(|g| {
        let n = CALIBRATION_TOKENS * g.head_dim;
        let mut head = |_| HeadRows {
            k: rows(n),
            v: rows(n),
        };
        (0..g.n_kv_heads).map(&mut head).collect()
    });
    Calibration {
        heads: heads.collect(),
        n_tokens: CALIBRATION_TOKENS,
        rows: rows.collect(),
        positions: (0..CALIBRATION_TOKENS as u32).collect(),
    }
}

/// Numbers of rows for codecs: bell-shaped, none an outlier.
pub fn codec_rows(rng: &mut ChaCha8Rng, n: usize) -> Vec<f32> {
    let mut number = || (0..4).map(|_| rng.random_range(-1.0f32..1.0)).sum();
    (0..n).map(|_| number()).collect()
}
