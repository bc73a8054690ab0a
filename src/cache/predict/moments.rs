//! Sums of products of two sets of columns, and the least squares that they give.
//!
//! Invariant: each sum is one chain of fused multiply-adds over the rows in order, in f64, whatever the threads and the
//! instruction set.

use nalgebra::{Cholesky, DMatrix};
use rayon::prelude::*;

use crate::compute::cpu::vector::multiversion;

/// Rows and columns of a block of sums: 8 registers of AVX-512.
const ROWS: usize = 4;
const COLUMNS: usize = 16;

type Block = [[f64; COLUMNS]; ROWS];

/// What least squares gives.
pub struct Line {
    /// `[input][output]`.
    pub weights: Vec<f64>,
    /// Means of the inputs.
    mean_x: Vec<f64>,
    /// Means of the outputs.
    mean_y: Vec<f64>,
}

impl Line {
    /// The bias that centres what is left, for weights as they are stored: rounding them moves the predictions' mean.
    pub fn bias(&self, weights: &[f32]) -> Vec<f32> {
        let n = self.mean_y.len();
        let outputs = self.mean_y.iter().enumerate();
        let bias = outputs.map(|(j, y)| {
            let inputs = self.mean_x.iter().enumerate();
            let predicted: f64 = inputs.map(|(i, x)| x * f64::from(weights[i * n + j])).sum();
            (y - predicted) as f32
        });
        bias.collect()
    }
}

/// The weights that minimise Σ |y − x·W − b|² + Σ λᵢ·Wᵢ², where b is free and λᵢ is `ridge` times the squared deviations of
/// input i. `x`: `[row][n_inputs]`, `y`: `[row][n_outputs]`. `None` if the numbers are not finite.
pub fn least_squares(
    (x, n_inputs): (&[f32], usize),
    (y, n_outputs): (&[f32], usize),
    ridge: f64,
) -> Option<Line> {
    let n_rows = (y.len() / n_outputs) as f64;
    let (mean_x, mean_y) = (means(x, n_inputs), means(y, n_outputs));
    let sound = mean_x.iter().chain(&mean_y).all(|x| x.is_finite());
    if n_inputs == 0 {
        return sound.then_some(Line {
            weights: Vec::new(),
            mean_x,
            mean_y,
        });
    }
    let centred = |sums: Vec<f64>, mean_b: &[f64]| {
        let n = mean_b.len();
        DMatrix::from_fn(n_inputs, n, |i, j| {
            sums[i * n + j] - n_rows * mean_x[i] * mean_b[j]
        })
    };
    let mut gram = centred(products((x, n_inputs), (x, n_inputs)), &mean_x);
    for i in 0..n_inputs {
        let spread = gram[(i, i)];
        // A channel that never moves says nothing, and its deviations are rounding: 1 gives it no weight.
        gram[(i, i)] = if spread > 1e-10 * n_rows * mean_x[i] * mean_x[i] {
            spread * (1.0 + ridge)
        } else {
            1.0
        };
    }
    let cross = centred(products((x, n_inputs), (y, n_outputs)), &mean_y);
    let solved = Cholesky::new(gram)?.solve(&cross);
    let sound = sound && solved.iter().all(|x| x.is_finite());
    sound.then(|| Line {
        weights: solved.transpose().as_slice().to_vec(),
        mean_x,
        mean_y,
    })
}

fn means(x: &[f32], n: usize) -> Vec<f64> {
    let mut sums = vec![0.0; n];
    for row in x.chunks_exact(n.max(1)) {
        for (s, &x) in sums.iter_mut().zip(row) {
            *s += f64::from(x);
        }
    }
    let n_rows = (x.len() / n.max(1)) as f64;
    sums.iter().map(|s| s / n_rows).collect()
}

/// Σ over rows of aᵢ·bⱼ, `[column of a][column of b]`.
fn products((a, n_a): (&[f32], usize), (b, n_b): (&[f32], usize)) -> Vec<f64> {
    let (left, right) = (panels::<ROWS>(a, n_a), panels::<COLUMNS>(b, n_b));
    let columns: Vec<Vec<Block>> = right
        .par_iter()
        .map(|right| {
            let sums = left.iter().map(|left| {
                let mut block = Block::default();
                accumulate(left, right, &mut block);
                block
            });
            sums.collect()
        })
        .collect();
    let mut out = vec![0.0; n_a * n_b];
    for (i, row) in out.chunks_exact_mut(n_b).enumerate() {
        for (j, sum) in row.iter_mut().enumerate() {
            *sum = columns[j / COLUMNS][i / ROWS][i % ROWS][j % COLUMNS];
        }
    }
    out
}

/// N columns at a time, `[row][N]`, the last ones filled up with zeros.
fn panels<const N: usize>(x: &[f32], n: usize) -> Vec<Vec<f64>> {
    (0..n)
        .step_by(N)
        .map(|first| {
            let mut panel = Vec::with_capacity(x.len() / n * N);
            for row in x.chunks_exact(n) {
                let columns = (first..first + N).map(|j| row.get(j).map_or(0.0, |&x| x.into()));
                panel.extend(columns);
            }
            panel
        })
        .collect()
}

multiversion! {
    fn accumulate(left: &[f64], right: &[f64], sums: &mut Block) = accumulate_body;
}

#[inline(always)]
fn accumulate_body(left: &[f64], right: &[f64], sums: &mut Block) {
    let mut held = *sums;
    let rows = left.as_chunks::<ROWS>().0.iter();
    for (a, b) in rows.zip(right.as_chunks::<COLUMNS>().0) {
        for (sums, &a) in held.iter_mut().zip(a) {
            for (s, &b) in sums.iter_mut().zip(b) {
                *s = a.mul_add(b, *s);
            }
        }
    }
    *sums = held;
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};

    fn random(n: usize, seed: u64) -> Vec<f32> {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
        (0..n).map(|_| rng.random_range(-1.0..2.0)).collect()
    }

    #[test]
    fn sums_of_products_are_the_plain_chains() {
        for (n_rows, n_a, n_b) in [(1, 1, 1), (50, 5, 17), (33, 8, 16), (7, 3, 40)] {
            let (a, b) = (random(n_rows * n_a, 1), random(n_rows * n_b, 2));
            let got = products((&a, n_a), (&b, n_b));
            for i in 0..n_a {
                for j in 0..n_b {
                    let chain = (0..n_rows).fold(0.0f64, |s, r| {
                        f64::from(a[r * n_a + i]).mul_add(f64::from(b[r * n_b + j]), s)
                    });
                    assert_eq!(got[i * n_b + j].to_bits(), chain.to_bits());
                }
            }
        }
    }

    /// One input: slope = cov / (var · (1 + ridge)), by hand.
    #[test]
    fn one_input_is_the_textbook_line() {
        let x = [1.0, 2.0, 3.0, 4.0];
        let y = [2.0, 3.0, 5.0, 8.0];
        // Deviations −1.5 −0.5 0.5 1.5 and −2.5 −1.5 0.5 3.5: products add up to 10, squares of x to 5.
        for (ridge, slope) in [(0.0, 2.0), (0.25, 1.6)] {
            let line = least_squares((&x, 1), (&y, 1), ridge).unwrap();
            assert!((line.weights[0] - slope).abs() < 1e-12);
            // Weights that are stored otherwise still go through the middle.
            for stored in [slope as f32, 1.5] {
                let off = line.bias(&[stored])[0] - (4.5 - 2.5 * stored);
                assert!(off.abs() < 1e-6, "{off}");
            }
        }
    }

    /// The gradient vanishes: (X̃ᵀX̃ + Λ)·W = X̃ᵀỸ, checked on centred rows that the fit never forms; a constant input gets
    /// no weight, and exact relations are found again.
    #[test]
    fn the_normal_equations_hold_and_a_known_map_is_found() {
        let (n_rows, n_in, n_out, ridge) = (200, 6, 5, 0.01);
        let mut x = random(n_rows * n_in, 3);
        x.iter_mut().skip(4).step_by(n_in).for_each(|x| *x = 0.5);
        let map = random(n_in * n_out, 4);
        let y: Vec<f32> = (0..n_rows * n_out)
            .map(|at| {
                let (r, j) = (at / n_out, at % n_out);
                let sum: f32 = (0..n_in)
                    .map(|i| x[r * n_in + i] * map[i * n_out + j])
                    .sum();
                sum + j as f32
            })
            .collect();
        let line = least_squares((&x, n_in), (&y, n_out), 1e-12).unwrap();
        let w = &line.weights;
        let b = line.bias(&w.iter().map(|&w| w as f32).collect::<Vec<_>>());
        for i in (0..n_in).filter(|&i| i != 4) {
            for j in 0..n_out {
                let off = w[i * n_out + j] - f64::from(map[i * n_out + j]);
                assert!(off.abs() < 1e-5, "{i} {j} {off}");
            }
        }
        let constant: f64 = 0.5 * f64::from(map[4 * n_out]);
        assert!(w[4 * n_out..5 * n_out].iter().all(|&w| w.abs() < 1e-9));
        assert!((f64::from(b[0]) - constant).abs() < 1e-4);

        let noisy: Vec<f32> = y
            .iter()
            .zip(random(y.len(), 5))
            .map(|(y, e)| y + e)
            .collect();
        let line = least_squares((&x, n_in), (&noisy, n_out), ridge).unwrap();
        let (w, mx, my) = (&line.weights, means(&x, n_in), means(&noisy, n_out));
        let at = |m: &[f32], mean: &[f64], r: usize, i: usize| {
            f64::from(m[r * mean.len() + i]) - mean[i]
        };
        for i in (0..n_in).filter(|&i| i != 4) {
            let spread: f64 = (0..n_rows).map(|r| at(&x, &mx, r, i).powi(2)).sum();
            for j in 0..n_out {
                let gradient: f64 = (0..n_rows)
                    .map(|r| {
                        let inputs = 0..n_in;
                        let predicted: f64 =
                            inputs.map(|i| at(&x, &mx, r, i) * w[i * n_out + j]).sum();
                        let left = at(&noisy, &my, r, j) - predicted;
                        at(&x, &mx, r, i) * left
                    })
                    .sum();
                let pull = ridge * spread * w[i * n_out + j];
                assert!((gradient - pull).abs() < 1e-8, "{i} {j}: {gradient} {pull}");
            }
        }
    }

    #[test]
    fn numbers_that_are_none_give_no_fit() {
        let x = [1.0, f32::NAN, 2.0];
        assert!(least_squares((&x, 1), (&[1.0, 2.0, 3.0], 1), 0.1).is_none());
    }
}
