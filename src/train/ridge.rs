//! Least squares with a ridge, in closed form: one line per KV head.
//!
//! Invariants: sums of a window are f32, sums of windows f64, in order: threads change nothing; a weight's penalty is
//! relative to its feature's own size.

use nalgebra::{DMatrix, DVector};

use super::features::Columns;
use crate::compute::cpu::gemm::{Dims, Mat, MatMut, gemm};

/// The largest code of 8 bits.
const STEPS: f64 = 127.0;

/// How often each weight is moved on the grid.
const SWEEPS: usize = 4;

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

    /// One head's weights moved to where 8 bits can hold the hidden ones (multiples of the largest / 127), each in turn to
    /// the place that makes up best for what the others lost: rounding them alone ruins the few rows whose channels are
    /// hundreds of times as large as others', which are the ones that matter most.
    pub fn on_grid(&self, columns: Columns, h: usize, w: &[f64]) -> Vec<f64> {
        let (of, n) = (columns.of_head(h), columns.width());
        let hidden = &w[..columns.n_embd];
        let largest =
            (0..hidden.len()).max_by(|&a, &b| hidden[a].abs().total_cmp(&hidden[b].abs()));
        let step = largest.map_or(0.0, |i| hidden[i].abs() / STEPS);
        if step == 0.0 {
            return w.to_vec();
        }
        let nearest = |x: f64| (x / step).round().clamp(-STEPS, STEPS) * step;
        let mut moved: Vec<f64> = w.to_vec();
        moved[..columns.n_embd]
            .iter_mut()
            .for_each(|x| *x = nearest(*x));
        // The error's slope along each weight, halved.
        let mut slope = vec![0.0; w.len()];
        let shift = |slope: &mut [f64], i: usize, by: f64| {
            let products = of.iter().map(|&c| self.at(of[i], c, n));
            slope
                .iter_mut()
                .zip(products)
                .for_each(|(s, p)| *s += by * p);
        };
        for i in 0..w.len() {
            shift(&mut slope, i, moved[i] - w[i]);
        }
        for i in (0..SWEEPS).flat_map(|_| 0..w.len()) {
            let curve = self.at(of[i], of[i], n);
            if curve <= 0.0 || Some(i) == largest {
                continue;
            }
            let best = moved[i] - slope[i] / curve;
            let best = if i < columns.n_embd {
                nearest(best)
            } else {
                best
            };
            shift(&mut slope, i, best - moved[i]);
            moved[i] = best;
        }
        moved
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

    /// A line over channels one of which is a thousand times as large in one row of fifty, and is nearly the double of
    /// another: rounding loses that row, moving on the grid does not.
    #[test]
    fn weights_on_the_grid_make_up_for_each_other() {
        let columns = Columns {
            n_embd: 6,
            n_kv_heads: 1,
        };
        let noise = |i: usize| ((i * 7919 + 13) % 1009) as f64 / 504.5 - 1.0;
        let w: Vec<f64> = vec![1.0, -0.3, 0.001_7, 0.003_1, 0.2, -0.7, 0.1, 0.2, 0.3, -1.0];
        let mut sums = Sums::new(columns);
        let mut x: Vec<f32> = Vec::new();
        for t in 0..1000 {
            let size = if t % 50 == 0 { 1000.0 } else { 1.0 };
            let mut row: Vec<f64> = (0..9).map(|c| noise(11 * t + c)).collect();
            row[2] = size * (1.0 + 0.01 * row[2]);
            row[3] += 2.0 * row[2];
            row.push(1.0);
            let y: f64 = row.iter().zip(&w).map(|(x, w)| x * w).sum();
            x.extend(row.iter().chain([&y]).map(|&x| x as f32));
        }
        sums.add(&x, columns.width());
        let step = 1.0 / 127.0;
        let plain = |x: &f64| (x / step).round() * step;
        let mut rounded = w.clone();
        rounded[..6].iter_mut().for_each(|x| *x = plain(x));
        let moved = sums.on_grid(columns, 0, &w);
        assert!(
            moved[..6].iter().all(|x| (plain(x) - x).abs() < 1e-12),
            "{moved:?}"
        );
        assert_eq!(moved[0], 1.0);
        let lost = |w: &[f64]| 1.0 - sums.r2(columns, 0, w);
        assert!(lost(&rounded) > 0.01, "{}", lost(&rounded));
        assert!(
            lost(&moved) < 0.1 * lost(&rounded),
            "{} {}",
            lost(&moved),
            lost(&rounded)
        );
    }
}
