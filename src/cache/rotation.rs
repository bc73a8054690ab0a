//! Random rotations: orthogonal matrices drawn from the uniform (Haar) distribution, from a seed.
//!
//! The rows of a square matrix of normal random numbers, made orthonormal one after the other (Gram–Schmidt), are Haar
//! distributed: the matrix's distribution does not change when it is rotated, and Gram–Schmidt commutes with rotations.
//!
//! Invariants: all sums in f64 and in one order; two passes over the earlier rows, so that the result is orthogonal to
//! rounding; the same seed and size give the same matrix, other sizes are independent of it.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// An orthogonal matrix of determinant 1 or −1, `[dim][dim]`.
pub fn haar(dim: usize, seed: u64) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(dim as u64);
    let mut matrix: Vec<f64> = (0..dim * dim).map(|_| normal(&mut rng)).collect();
    for i in 0..dim {
        let (earlier, row) = matrix[..(i + 1) * dim].split_at_mut(i * dim);
        for _ in 0..2 {
            for other in earlier.chunks_exact(dim) {
                let along = dot(other, row);
                for (x, o) in row.iter_mut().zip(other) {
                    *x -= along * o;
                }
            }
        }
        let norm = dot(row, row).sqrt();
        for x in row {
            *x /= norm;
        }
    }
    matrix
}

/// The same in f32.
pub fn haar_f32(dim: usize, seed: u64) -> Vec<f32> {
    haar(dim, seed).iter().map(|&x| x as f32).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Box and Muller's transform.
fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let (radius, angle): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
    (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns_are_orthonormal() {
        for dim in [1, 2, 3, 33, 64, 80] {
            let m = haar(dim, 7);
            for i in 0..dim {
                for j in 0..dim {
                    let want = f64::from(u8::from(i == j));
                    let rows = dot(&m[i * dim..][..dim], &m[j * dim..][..dim]);
                    let columns: f64 = (0..dim).map(|r| m[r * dim + i] * m[r * dim + j]).sum();
                    assert!((rows - want).abs() < 1e-13, "{dim} rows {i} {j}");
                    assert!((columns - want).abs() < 1e-13, "{dim} columns {i} {j}");
                }
            }
        }
    }

    #[test]
    fn a_seed_and_a_size_name_one_matrix() {
        assert_eq!(haar(16, 3), haar(16, 3));
        assert_ne!(haar(16, 3), haar(16, 4));
        assert_ne!(haar(16, 3)[..2], haar(17, 3)[..2]);
    }

    #[test]
    fn a_fixed_direction_goes_everywhere_alike() {
        // The image of a unit vector is uniform on the sphere: coordinates have mean 0, second moment 1/d and fourth
        // moment 3/(d(d + 2)).
        let (d, n) = (5usize, 4000u64);
        let mut moments = [0.0f64; 3];
        for seed in 0..n {
            let m = haar(d, seed);
            for r in 0..d {
                let x = m[r * d];
                moments[0] += x;
                moments[1] += x * x;
                moments[2] += x * x * x * x;
            }
        }
        let count = (n * d as u64) as f64;
        let [mean, second, fourth] = moments.map(|m| m / count);
        assert!(mean.abs() < 0.012, "{mean}");
        assert!((second - 0.2).abs() < 1e-9, "{second}");
        assert!((fourth - 3.0 / 35.0).abs() < 0.004, "{fourth}");
        // Both determinants occur: the sign of the last row is free.
        let determinant = |seed| {
            let m = haar(2, seed);
            m[0] * m[3] - m[1] * m[2]
        };
        let positive = (0..200).filter(|&s| determinant(s) > 0.0).count();
        assert!((70..130).contains(&positive), "{positive}");
    }
}
