//! Least squares with a ridge, in closed form: one line per KV head.
//!
//! Invariants: sums of a window are f32, sums of windows f64, in order: threads change nothing; a weight's penalty is
//! relative to its feature's own size.

use nalgebra::{DMatrix, DVector};

use super::features::Columns;
use crate::compute::cpu::gemm::{Dims, Mat, MatMut, gemm};

/// Sums of products of one layer's columns.
pub struct Sums {
    /// `[column][column]`.
    products: Vec<f64>,
    n: usize,
}

impl Sums {
    /// Of no row.
    pub fn new(columns: Columns) -> Self {
        Self {
            products: vec![0.0; columns.width() * columns.width()],
            n: 0,
        }
    }

    /// Adds `[row][column]`.
    pub fn add(&mut self, x: &[f32], n_columns: usize) {
        let n = x.len() / n_columns;
        let mut transposed = vec![0.0f32; x.len()];
        for (t, row) in x.chunks_exact(n_columns).enumerate() {
            for (c, &v) in row.iter().enumerate() {
                transposed[c * n + t] = v;
            }
        }
        let mut products = vec![0.0f32; n_columns * n_columns];
        let dims = Dims {
            m: n_columns,
            n: n_columns,
            k: n,
        };
        let a = Mat {
            data: &transposed,
            stride: n,
        };
        let b = Mat {
            data: x,
            stride: n_columns,
        };
        let c = MatMut {
            data: &mut products,
            stride: n_columns,
        };
        gemm(dims, a, b, c);
        for (sum, p) in self.products.iter_mut().zip(products) {
            *sum += f64::from(p);
        }
        self.n += n;
    }

    fn at(&self, a: usize, b: usize, n_columns: usize) -> f64 {
        self.products[a * n_columns + b]
    }

    /// One head's weights. The constant is not penalized.
    pub fn solve(&self, columns: Columns, h: usize, ridge: f64) -> Option<Vec<f64>> {
        let (of, n) = (columns.of_head(h), columns.width());
        let last = of.len() - 1;
        let mut a = DMatrix::from_fn(of.len(), of.len(), |i, j| self.at(of[i], of[j], n));
        for i in 0..last {
            a[(i, i)] += ridge * a[(i, i)] + f64::EPSILON * self.n as f64;
        }
        let b = DVector::from_fn(of.len(), |i, _| self.at(of[i], columns.target(h), n));
        let solved = a.cholesky()?.solve(&b);
        Some(solved.iter().copied().collect())
    }

    /// 1 − Σ(error²) / Σ(deviation²) of these weights.
    pub fn r2(&self, columns: Columns, h: usize, w: &[f64]) -> f64 {
        let (of, n, y) = (columns.of_head(h), columns.width(), columns.target(h));
        let mut error = self.at(y, y, n);
        for (i, &c) in of.iter().enumerate() {
            error -= 2.0 * w[i] * self.at(c, y, n);
            for (j, &d) in of.iter().enumerate() {
                error += w[i] * w[j] * self.at(c, d, n);
            }
        }
        let mean = self.at(of[of.len() - 1], y, n);
        1.0 - error / (self.at(y, y, n) - mean * mean / self.n.max(1) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_target_is_found_again() {
        let columns = Columns {
            n_embd: 3,
            n_kv_heads: 1,
        };
        let mut sums = Sums::new(columns);
        let noise = |i: usize| ((i * 7919 + 13) % 1009) as f32 / 1009.0 - 0.5;
        let mut x = Vec::new();
        for t in 0..400 {
            let row: Vec<f32> = (0..6).map(|c| noise(7 * t + c)).collect();
            let y = 2.0 * row[0] - row[1] + 0.5 * row[3] + 0.25 * row[5] - 3.0;
            x.extend_from_slice(&[row[0], row[1], row[2], row[3], row[4], row[5], 1.0, y]);
        }
        sums.add(&x, columns.width());
        let w = sums.solve(columns, 0, 1e-9).unwrap();
        let want = [2.0, -1.0, 0.0, 0.5, 0.0, 0.25, -3.0];
        assert!(
            w.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-3),
            "{w:?}"
        );
        assert!(sums.r2(columns, 0, &w) > 0.999);
        let shrunk = sums.solve(columns, 0, 10.0).unwrap();
        assert!(
            shrunk[0] < 0.5 && sums.r2(columns, 0, &shrunk) < 0.9,
            "{shrunk:?}"
        );
    }
}
