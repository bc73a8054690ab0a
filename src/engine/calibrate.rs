//! Second moments of keys and values over recorded contexts, for strategies that learn from a calibration text.
//!
//! Invariants: sums run in f64 over tokens in order, so they do not depend on threads; matrices are symmetric to the bit.

use rayon::prelude::*;

use crate::cache::Geometry;
use crate::cache::stage::{Calibration, HeadCovariance, HeadRows};

use super::ContextTape;

/// Tokens whose rows are kept.
const MAX_ROWS: usize = 4096;

/// Adds up x·xᵀ of every KV head's rows.
#[derive(Debug, Clone)]
pub struct Calibrator {
    geometry: Geometry,
    /// Sums, `[layer][kv_head]`.
    heads: Vec<Vec<HeadCovariance>>,
    n_tokens: usize,
    /// The first rows, `[layer][kv_head]`.
    rows: Vec<Vec<HeadRows>>,
    positions: Vec<u32>,
}

impl Calibrator {
    /// Nothing summed yet.
    pub fn new(geometry: &Geometry) -> Self {
        let zeros = |d: usize| HeadCovariance {
            k_pre: vec![0.0; d * d],
            k_post: vec![0.0; d * d],
            v: vec![0.0; d * d],
        };
        let heads: Vec<Vec<HeadCovariance>> = geometry
            .layers
            .iter()
            .map(|l| vec![zeros(l.head_dim); l.n_kv_heads])
            .collect();
        Self {
            geometry: geometry.clone(),
            rows: heads
                .iter()
                .map(|h| vec![HeadRows::default(); h.len()])
                .collect(),
            heads,
            n_tokens: 0,
            positions: Vec::new(),
        }
    }

    /// Takes in a context whose first token stands at position 0.
    pub fn add(&mut self, tape: &ContextTape) {
        let layers = self.geometry.layers.par_iter().zip(&tape.layers);
        layers.zip(&mut self.heads).for_each(|((g, rows), heads)| {
            let (d, stride) = (g.head_dim, g.n_kv_heads * g.head_dim);
            heads.par_iter_mut().enumerate().for_each(|(head, sums)| {
                let mut rotated = vec![0.0; d];
                let rows = rows.k.chunks_exact(stride).zip(rows.v.chunks_exact(stride));
                for (position, (k, v)) in rows.enumerate() {
                    let (k, v) = (&k[head * d..][..d], &v[head * d..][..d]);
                    rotated.copy_from_slice(k);
                    g.rope.rotate(position as u32, &mut rotated);
                    add_outer(&mut sums.k_pre, k);
                    add_outer(&mut sums.k_post, &rotated);
                    add_outer(&mut sums.v, v);
                }
            });
        });
        self.keep(tape);
        self.n_tokens += tape.n_tokens;
    }

    /// Keeps rows while there are few: codebooks and predictors learn from the rows themselves.
    fn keep(&mut self, tape: &ContextTape) {
        let n = tape.n_tokens.min(MAX_ROWS - self.positions.len());
        self.positions.extend(0..n as u32);
        let layers = self.geometry.layers.iter().zip(&tape.layers);
        for ((g, rows), heads) in layers.zip(&mut self.rows) {
            let (d, stride) = (g.head_dim, g.n_kv_heads * g.head_dim);
            for (head, kept) in heads.iter_mut().enumerate() {
                for (from, to) in [(&rows.k, &mut kept.k), (&rows.v, &mut kept.v)] {
                    let rows = from.chunks_exact(stride).take(n);
                    to.extend(rows.flat_map(|row| &row[head * d..][..d]));
                }
            }
        }
    }

    /// The mean of x·xᵀ over all tokens taken in.
    pub fn finish(mut self) -> Calibration {
        let scale = 1.0 / self.n_tokens.max(1) as f64;
        for head in self.heads.iter_mut().flatten() {
            for sums in [&mut head.k_pre, &mut head.k_post, &mut head.v] {
                sums.iter_mut().for_each(|s| *s *= scale);
            }
        }
        Calibration {
            heads: self.heads,
            n_tokens: self.n_tokens,
            rows: self.rows,
            positions: self.positions,
        }
    }
}

/// sums += x·xᵀ; products commute, so both triangles get the same bits.
fn add_outer(sums: &mut [f64], x: &[f32]) {
    for (row, &a) in sums.chunks_exact_mut(x.len()).zip(x) {
        for (s, &b) in row.iter_mut().zip(x) {
            *s += f64::from(a) * f64::from(b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tape::TapeLayer;
    use crate::model::WeightSource;
    use crate::model::geometry::geometry;
    use crate::model::tiny::{TinyConfig, TinyModel};
    use rand::{Rng, SeedableRng};

    fn tape(geometry: &Geometry, n_tokens: usize, seed: u64) -> ContextTape {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
        let mut rows = |n: usize| (0..n).map(|_| rng.random_range(-1.0..2.0)).collect();
        let width = |l: &crate::cache::LayerGeometry| l.n_kv_heads * l.head_dim;
        let layers = geometry
            .layers
            .iter()
            .map(|l| TapeLayer {
                k: rows(n_tokens * width(l)),
                v: rows(n_tokens * width(l)),
                ..TapeLayer::default()
            })
            .collect();
        ContextTape { layers, n_tokens }
    }

    #[test]
    fn moments_are_means_of_products_before_and_after_rotation() {
        let model = TinyModel::new(&TinyConfig::default());
        let g = geometry(model.spec(), 64);
        let tapes = [tape(&g, 50, 1), tape(&g, 7, 2)];
        let mut sums = Calibrator::new(&g);
        tapes.iter().for_each(|t| sums.add(t));
        let c = sums.finish();
        assert_eq!((c.n_tokens, c.heads.len(), c.heads[1].len()), (57, 2, 2));
        let (layer, head, i, j) = (1, 1, 3, 17);
        let mut want = [0.0f64; 3];
        for t in &tapes {
            for p in 0..t.n_tokens {
                let at = (p * 2 + head) * 32;
                let k = &t.layers[layer].k[at..at + 32];
                let v = &t.layers[layer].v[at..at + 32];
                let mut r = k.to_vec();
                g.layers[layer].rope.rotate(p as u32, &mut r);
                for (w, x) in want.iter_mut().zip([k, &r, v]) {
                    *w += f64::from(x[i]) * f64::from(x[j]) / 57.0;
                }
            }
        }
        let h = &c.heads[layer][head];
        for (m, want) in [&h.k_pre, &h.k_post, &h.v].into_iter().zip(want) {
            assert!(
                (m[i * 32 + j] - want).abs() < 1e-12,
                "{} {want}",
                m[i * 32 + j]
            );
            assert_eq!(m[i * 32 + j], m[j * 32 + i]);
        }
        // Rotation turns channels within pairs: the trace stays.
        let trace = |m: &[f64]| (0..32).map(|i| m[i * 33]).sum::<f64>();
        assert!((trace(&h.k_pre) - trace(&h.k_post)).abs() < 1e-5);
        assert_ne!(h.k_pre, h.k_post);
    }
}
