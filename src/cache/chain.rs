//! A side's linear maps in order, and what a map makes of a calibration text's second moments.
//!
//! Invariant: `absorb(q)·forward(x) = q·expand(forward(x))` up to rounding, as for a single map.

use std::sync::Arc;

use super::stage::{Calibration, Projection};

/// Maps applied in order.
#[derive(Clone, Default)]
pub struct Chain {
    pub(super) maps: Vec<Arc<dyn Projection>>,
}

impl Chain {
    /// No map at all.
    pub fn is_identity(&self) -> bool {
        self.maps.is_empty()
    }

    /// Channels after the last map.
    pub fn output_dim(&self, dim: usize) -> usize {
        self.maps.iter().fold(dim, |d, m| m.output_dim(d))
    }

    /// The row after all maps.
    pub fn forward(&self, layer: usize, head: usize, x: &[f32]) -> Vec<f32> {
        self.fold(
            x.to_vec(),
            |m, d| m.output_dim(d),
            |m, x, z| m.forward(layer, head, x, z),
        )
    }

    /// The query after all maps, so that its product with a mapped row is that with the expanded row.
    pub fn absorb(&self, layer: usize, head: usize, q: &[f32]) -> Vec<f32> {
        self.fold(
            q.to_vec(),
            |m, d| m.output_dim(d),
            |m, q, out| m.absorb(layer, head, q, out),
        )
    }

    fn fold(
        &self,
        first: Vec<f32>,
        dim: impl Fn(&dyn Projection, usize) -> usize,
        apply: impl Fn(&dyn Projection, &[f32], &mut [f32]),
    ) -> Vec<f32> {
        self.maps.iter().fold(first, |x, m| {
            let mut z = vec![0.0; dim(m.as_ref(), x.len())];
            apply(m.as_ref(), &x, &mut z);
            z
        })
    }

    /// The best guess at the row before all maps; `dim` is its length.
    pub fn expand(&self, layer: usize, head: usize, z: &[f32], dim: usize) -> Vec<f32> {
        let mut dims = vec![dim];
        for m in &self.maps {
            dims.push(m.output_dim(dims[dims.len() - 1]));
        }
        self.maps
            .iter()
            .enumerate()
            .rev()
            .fold(z.to_vec(), |z, (i, m)| {
                let mut x = vec![0.0; dims[i]];
                m.expand(layer, head, &z, &mut x);
                x
            })
    }

    /// Bytes of all maps' weights.
    pub fn weight_bytes(&self) -> u64 {
        self.maps.iter().map(|m| m.weight_bytes()).sum()
    }
}

/// Second moments after a map: P·C·Pᵀ. Rotation by position comes before every map of post-RoPE keys and after every map
/// of pre-RoPE ones, so each kind of moments goes through on its own.
pub fn map_statistics(map: &dyn Projection, statistics: &mut Calibration) {
    for (layer, heads) in statistics.heads.iter_mut().enumerate() {
        for (head, moments) in heads.iter_mut().enumerate() {
            for c in [&mut moments.k_pre, &mut moments.k_post, &mut moments.v] {
                let dim = c.len().isqrt();
                let p = matrix(map, (layer, head), dim);
                let half = product(&p, c, dim);
                // (P·C)·Pᵀ = (P·(P·C)ᵀ)ᵀ, and the result is symmetric.
                *c = product(&p, &transposed(&half, dim), dim);
            }
        }
    }
}

/// A map as a matrix, `[output][input]`.
fn matrix(map: &dyn Projection, (layer, head): (usize, usize), dim: usize) -> Vec<f64> {
    let n = map.output_dim(dim);
    let mut columns = Vec::new();
    for i in 0..dim {
        let mut unit = vec![0.0; dim];
        unit[i] = 1.0;
        let mut z = vec![0.0; n];
        map.forward(layer, head, &unit, &mut z);
        columns.extend(z.into_iter().map(f64::from));
    }
    transposed(&columns, n)
}

/// A·B for A `[m][dim]` and B `[dim][n]`.
fn product(a: &[f64], b: &[f64], dim: usize) -> Vec<f64> {
    let n = b.len() / dim;
    let mut out = Vec::with_capacity(a.len() / dim * n);
    for row in a.chunks_exact(dim) {
        for j in 0..n {
            out.push(row.iter().enumerate().map(|(k, x)| x * b[k * n + j]).sum());
        }
    }
    out
}

/// A `[m][n]` to `[n][m]`.
fn transposed(a: &[f64], n: usize) -> Vec<f64> {
    (0..n)
        .flat_map(|j| a.iter().skip(j).step_by(n).copied())
        .collect()
}
