//! The kernels against the definition of an output, type by type, level by level.

use super::*;
use crate::compute::cpu::dispatch::tests::{at, levels};
use crate::compute::cpu::vector::{LANES, sum_lanes};
use rand::{Rng, SeedableRng};

mod ints;

const KINDS: [TensorType; 8] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q8_0,
    TensorType::Q5_1,
    TensorType::Q6_K,
];

/// A matrix whose scales are small numbers of both signs.
fn matrix(kind: TensorType, (n_out, n_in): (usize, usize), seed: u64) -> (Matrix, Vec<f32>) {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let n_bytes = n_out * n_in / kind.block_len() * kind.block_bytes();
    let mut bytes: Vec<u8> = match kind {
        TensorType::F32 => (0..n_out * n_in)
            .flat_map(|_| rng.random_range(-1.0f32..1.0).to_le_bytes())
            .collect(),
        // No byte makes a half, a bfloat16 or a scale of the largest exponent.
        _ => (0..n_bytes).map(|_| rng.random::<u8>() & 0xbb).collect(),
    };
    bytes.truncate(n_bytes);
    let mut values = vec![0.0; n_out * n_in];
    kind.dequantize(&bytes, &mut values);
    assert!(values.iter().all(|v| v.is_finite()));
    let matrix = Matrix::new((n_out, n_in), StoredMatrix::owned(kind, bytes));
    (matrix, values)
}

/// An output as the module defines it.
fn output(x: &[f32], w: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (i, (x, w)) in x.iter().zip(w).enumerate() {
        lanes[i % LANES] = x.mul_add(*w, lanes[i % LANES]);
    }
    sum_lanes(&lanes)
}

fn bits(x: &[f32]) -> Vec<u32> {
    // Of zeros the sign is not part of the definition.
    x.iter().map(|v| (v + 0.0).to_bits()).collect()
}

#[test]
fn every_type_at_every_level_gives_the_defined_outputs() {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(3);
    for (i, kind) in KINDS.into_iter().enumerate() {
        let block = kind.block_len();
        for (n_out, n_in) in [(1, block), (7, 3 * block), (70, 256)] {
            let (matrix, w) = matrix(kind, (n_out, n_in), i as u64);
            for n_rows in [1, 2, 3, 4, 5, 9] {
                let x: Vec<f32> = (0..n_rows * n_in)
                    .map(|_| rng.random_range(-1.0..1.0))
                    .collect();
                let want: Vec<f32> = (0..n_rows * n_out)
                    .map(|i| {
                        output(
                            &x[i / n_out * n_in..][..n_in],
                            &w[i % n_out * n_in..][..n_in],
                        )
                    })
                    .collect();
                // In one thread, which is where the level is set.
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(1)
                    .build()
                    .unwrap();
                for level in levels() {
                    let y = pool.install(|| {
                        at(level, || {
                            let mut y = vec![7.0; n_rows * n_out];
                            matrix.apply(&x, None, &mut y);
                            y
                        })
                    });
                    assert_eq!(
                        bits(&y),
                        bits(&want),
                        "{kind:?} {level:?} {n_rows} x {n_in} x {n_out}"
                    );
                }
            }
        }
    }
}

#[test]
fn rows_that_end_inside_a_block_are_whole() {
    for (n_out, n_in) in [(5, 1), (64, 33), (130, 1500)] {
        let (matrix, w) = matrix(TensorType::F32, (n_out, n_in), 9);
        let x: Vec<f32> = (0..6 * n_in).map(|i| (i % 13) as f32 * 0.1 - 0.6).collect();
        let want: Vec<f32> = (0..6 * n_out)
            .map(|i| {
                output(
                    &x[i / n_out * n_in..][..n_in],
                    &w[i % n_out * n_in..][..n_in],
                )
            })
            .collect();
        for n_rows in [1, 6] {
            let mut y = vec![0.0; n_rows * n_out];
            matrix.apply(&x[..n_rows * n_in], None, &mut y);
            assert_eq!(bits(&y), bits(&want[..n_rows * n_out]));
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_batch_on_any_threads() {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(7);
    for kind in [TensorType::F32, TensorType::Q4_1, TensorType::Q8_0] {
        let (n_out, n_in) = (200, 576);
        let (a, _) = matrix(kind, (n_out, n_in), 1);
        let (b, _) = matrix(kind, (40, n_in), 2);
        let x: Vec<f32> = (0..512 * n_in)
            .map(|_| rng.random_range(-1.0..1.0))
            .collect();
        let bias: Vec<f32> = (0..n_out).map(|i| i as f32 * 0.01).collect();
        let mut alone = [Vec::new(), Vec::new()];
        for row in x.chunks(n_in) {
            let (mut ya, mut yb) = (vec![0.0; n_out], vec![0.0; 40]);
            a.apply(row, Some(&bias), &mut ya);
            b.apply(row, None, &mut yb);
            alone[0].extend(ya);
            alone[1].extend(yb);
        }
        for n_threads in [1, 2] {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(n_threads)
                .build()
                .unwrap();
            for n_rows in [1, 7, 64, 512] {
                let (mut ya, mut yb) = (vec![0.0; n_rows * n_out], vec![0.0; n_rows * 40]);
                let layers = vec![
                    Layer {
                        weights: &a,
                        bias: Some(&bias),
                        y: &mut ya,
                    },
                    Layer {
                        weights: &b,
                        bias: None,
                        y: &mut yb,
                    },
                ];
                pool.install(|| apply(&x[..n_rows * n_in], layers));
                assert_eq!(
                    bits(&ya),
                    bits(&alone[0][..n_rows * n_out]),
                    "{kind:?} {n_rows}"
                );
                assert_eq!(
                    bits(&yb),
                    bits(&alone[1][..n_rows * 40]),
                    "{kind:?} {n_rows}"
                );
            }
        }
    }
    apply(&[], Vec::new());
}
