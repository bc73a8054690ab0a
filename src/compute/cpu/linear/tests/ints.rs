//! Integer arithmetic against its definition, taken block by block off the bytes, and against f32.

use super::*;

const CODED: [TensorType; 3] = [TensorType::Q4_0, TensorType::Q4_1, TensorType::Q8_0];
const ARITHMETICS: [Arithmetic; 2] = [Arithmetic::Int16, Arithmetic::Int8];

fn random_rows(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// A block's scale, minimum and 32 signed weights.
fn block(kind: TensorType, bytes: &[u8]) -> (f32, f32, Vec<i32>) {
    let half = |i: usize| half::f16::from_le_bytes([bytes[i], bytes[i + 1]]).to_f32();
    let nibbles = |from: usize, centre: i32| -> Vec<i32> {
        let low = bytes[from..].iter().map(|b| i32::from(b & 15) - centre);
        low.chain(bytes[from..].iter().map(|b| i32::from(b >> 4) - centre))
            .collect()
    };
    match kind {
        TensorType::Q4_0 => (half(0), 0.0, nibbles(2, 8)),
        TensorType::Q4_1 => (half(0), half(2), nibbles(4, 0)),
        _ => {
            let codes = bytes[2..].iter().map(|&b| i32::from(b.cast_signed()));
            (half(0), 0.0, codes.collect())
        }
    }
}

/// An output as the module defines it.
fn output(x: &[f32], kind: TensorType, row: &[u8], arithmetic: Arithmetic) -> f32 {
    let largest = if arithmetic == Arithmetic::Int16 {
        32_639.0f32
    } else {
        127.0
    };
    let (mut y, mut z) = (0.0f32, 0.0f32);
    for (x, bytes) in x.chunks(32).zip(row.chunks(kind.block_bytes())) {
        let (d, m, w) = block(kind, bytes);
        let a = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        let codes: Vec<i32> = x
            .iter()
            .map(|x| (x * (largest / a)).round_ties_even() as i32)
            .collect();
        let dot: i32 = codes.iter().zip(&w).map(|(x, w)| x * w).sum();
        let dx = a / largest;
        y = (d * dx).mul_add(dot as f32, y);
        z = m.mul_add(dx * codes.iter().sum::<i32>() as f32, z);
    }
    if kind == TensorType::Q4_1 { y + z } else { y }
}

#[test]
fn every_coded_type_at_every_level_gives_the_defined_outputs() {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    for (i, kind) in CODED.into_iter().enumerate() {
        // Blocks that are no multiple of four, fewer and more rows than lanes, sums kept in several goes.
        for (n_out, n_in) in [(1, 32), (7, 160), (37, 192), (70, 256), (17, 4224)] {
            let (matrix, _) = matrix(kind, (n_out, n_in), i as u64);
            let row_bytes = n_in / 32 * kind.block_bytes();
            for arithmetic in ARITHMETICS {
                let matrix = matrix.clone().computed_in(arithmetic);
                for n_rows in [1, 2, 3, 4, 5, 9, 12, 31] {
                    let x = random_rows(n_rows * n_in, 5 + n_rows as u64);
                    let rows = matrix.stored.bytes().chunks(row_bytes);
                    let want: Vec<f32> = x
                        .chunks(n_in)
                        .flat_map(|x| rows.clone().map(|w| output(x, kind, w, arithmetic)))
                        .collect();
                    for level in levels() {
                        let mut y = vec![7.0; n_rows * n_out];
                        pool.install(|| at(level, || matrix.apply(&x, None, &mut y)));
                        assert_eq!(
                            bits(&y),
                            bits(&want),
                            "{kind:?} {arithmetic:?} {level:?} {n_rows} x {n_in} x {n_out}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_coded_row_has_the_same_bits_alone_and_in_any_batch_on_any_threads() {
    let (n_out, n_in) = (200, 576);
    let x = random_rows(512 * n_in, 7);
    let bias: Vec<f32> = (0..n_out).map(|i| i as f32 * 0.01).collect();
    for (kind, arithmetic) in CODED.iter().zip([ARITHMETICS, ARITHMETICS].concat()) {
        let (a, _) = matrix(*kind, (n_out, n_in), 1);
        // Two layers over one input, the second of a type without codes.
        let (b, _) = matrix(TensorType::F16, (40, n_in), 2);
        let (a, b) = (a.computed_in(arithmetic), b.computed_in(arithmetic));
        let run = |x: &[f32]| {
            let n_rows = x.len() / n_in;
            let (mut ya, mut yb) = (vec![0.0; n_rows * n_out], vec![0.0; n_rows * 40]);
            let layer = |weights, bias, y| Layer { weights, bias, y };
            let layers = vec![
                layer(&a, Some(&bias[..]), &mut ya[..]),
                layer(&b, None, &mut yb[..]),
            ];
            apply(x, layers);
            (bits(&ya), bits(&yb))
        };
        let alone: Vec<_> = x.chunks(n_in).map(run).collect();
        for n_threads in [1, 2] {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(n_threads)
                .build()
                .unwrap();
            for n_rows in [2, 4, 5, 7, 64, 512] {
                let (ya, yb) = pool.install(|| run(&x[..n_rows * n_in]));
                for (row, (a, b)) in alone.iter().take(n_rows).enumerate() {
                    assert_eq!(ya[row * n_out..][..n_out], a[..], "{kind:?} {arithmetic:?}");
                    assert_eq!(yb[row * 40..][..40], b[..]);
                }
            }
        }
    }
}

/// Root of the mean squared error over that of the outputs.
fn error_of(arithmetic: Arithmetic, kind: TensorType) -> f64 {
    let (n_out, n_in, n_rows) = (100, 576, 20);
    let (matrix, _) = matrix(kind, (n_out, n_in), 11);
    let x = random_rows(n_rows * n_in, 12);
    let (mut want, mut got) = (vec![0.0; n_rows * n_out], vec![0.0; n_rows * n_out]);
    matrix.apply(&x, None, &mut want);
    matrix.computed_in(arithmetic).apply(&x, None, &mut got);
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = want.iter().zip(&got).map(|(a, b)| square(a - b)).sum();
    (error / want.iter().map(|&a| square(a)).sum::<f64>()).sqrt()
}

#[test]
fn integers_are_near_f32_and_not_equal_to_it() {
    for kind in CODED {
        let int16 = error_of(Arithmetic::Int16, kind);
        assert!(int16 > 1e-7 && int16 < 2e-5, "{kind:?} {int16}");
        let int8 = error_of(Arithmetic::Int8, kind);
        assert!(int8 > 100.0 * int16 && int8 < 0.01, "{kind:?} {int8}");
    }
    // Types without codes compute as they did.
    assert_eq!(error_of(Arithmetic::Int8, TensorType::F16), 0.0);
}

#[test]
fn what_is_no_number_stays_none() {
    let (matrix, _) = matrix(TensorType::Q4_1, (20, 64), 3);
    let matrix = matrix.computed_in(Arithmetic::Int8);
    let mut x = random_rows(6 * 64, 4);
    x[2 * 64 + 3] = f32::NAN;
    let mut y = vec![0.0; 6 * 20];
    matrix.apply(&x, None, &mut y);
    for (row, y) in y.chunks(20).enumerate() {
        assert!(y.iter().all(|v| v.is_nan() == (row == 2)), "{row}");
    }
    matrix.apply(&[], None, &mut []);
    let mut alone = vec![0.0; 20];
    matrix.apply(&x[2 * 64..3 * 64], None, &mut alone);
    assert!(alone.iter().all(|v| v.is_nan()));
}
