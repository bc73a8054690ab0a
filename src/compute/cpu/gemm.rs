//! C = A·B in f32, each output one chain of fused multiply-adds over k in ascending order.
//!
//! Invariant: `c[i][j] = fma(a[i][k-1], b[k-1][j], … fma(a[i][0], b[0][j], 0))`, to the bit, for every shape, thread
//! count and instruction set: a row in a tile of 512 equals the row alone. Vector lanes run across j, never across k.

use super::vector::multiversion;

/// A row-major matrix: row i starts at `data[i * stride]`.
#[derive(Clone, Copy)]
pub struct Mat<'a> {
    /// Elements.
    pub data: &'a [f32],
    /// Distance of two rows.
    pub stride: usize,
}

/// A row-major matrix that is written.
pub struct MatMut<'a> {
    /// Elements.
    pub data: &'a mut [f32],
    /// Distance of two rows.
    pub stride: usize,
}

/// Rows, columns and depth of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
}

/// C = A·B. A is `[m][k]`, B `[k][n]`, C `[m][n]`. With k = 0, C becomes 0.
///
/// # Panics
/// When a buffer is shorter than `dims` and its stride say.
pub fn gemm(dims: Dims, a: Mat<'_>, b: Mat<'_>, c: MatMut<'_>) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the instruction set was detected on this machine.
        return unsafe { super::tile::gemm(dims, a, b, c) };
    }
    generic(dims, a, b, c);
}

multiversion! {
    /// The same product without intrinsics: for machines without AVX-512, and the twin that the tiles are tested by.
    pub fn generic(dims: Dims, a: Mat<'_>, b: Mat<'_>, c: MatMut<'_>) = gemm_body;
}

// 6 · 16 accumulators fill 12 of AVX2's 16 registers.
const BLOCK_ROWS: usize = 6;
const BLOCK_COLUMNS: usize = 16;
// Columns of one row's pass: 8 accumulators of AVX2, and whole cache lines of B.
const ROW_COLUMNS: usize = 64;

#[inline(always)]
fn gemm_body(dims: Dims, a: Mat<'_>, b: Mat<'_>, mut c: MatMut<'_>) {
    let Dims { m, n, k } = dims;
    let blocked = m - m % BLOCK_ROWS;
    for i in (0..blocked).step_by(BLOCK_ROWS) {
        let mut j = 0;
        while j + BLOCK_COLUMNS <= n {
            block::<BLOCK_ROWS, BLOCK_COLUMNS>(k, a.at(i, 0), b.at(0, j), c.at(i, j));
            j += BLOCK_COLUMNS;
        }
        while j < n {
            block::<BLOCK_ROWS, 1>(k, a.at(i, 0), b.at(0, j), c.at(i, j));
            j += 1;
        }
    }
    for i in blocked..m {
        let mut j = 0;
        while j < n {
            j += match n - j {
                ROW_COLUMNS.. => {
                    block::<1, ROW_COLUMNS>(k, a.at(i, 0), b.at(0, j), c.at(i, j));
                    ROW_COLUMNS
                }
                BLOCK_COLUMNS..ROW_COLUMNS => {
                    block::<1, BLOCK_COLUMNS>(k, a.at(i, 0), b.at(0, j), c.at(i, j));
                    BLOCK_COLUMNS
                }
                _ => {
                    block::<1, 1>(k, a.at(i, 0), b.at(0, j), c.at(i, j));
                    1
                }
            };
        }
    }
}

impl<'a> Mat<'a> {
    /// The part from a row and a column on; empty past the end (a product of depth 0).
    #[inline(always)]
    fn at(self, row: usize, column: usize) -> Self {
        Self {
            data: self.data.get(row * self.stride + column..).unwrap_or(&[]),
            stride: self.stride,
        }
    }
}

impl MatMut<'_> {
    #[inline(always)]
    fn at(&mut self, row: usize, column: usize) -> MatMut<'_> {
        MatMut {
            data: &mut self.data[row * self.stride + column..],
            stride: self.stride,
        }
    }
}

#[inline(always)]
fn block<const M: usize, const N: usize>(k: usize, a: Mat<'_>, b: Mat<'_>, c: MatMut<'_>) {
    let mut acc = [[0.0f32; N]; M];
    for kk in 0..k {
        let row = &b.data[kk * b.stride..kk * b.stride + N];
        for (i, acc) in acc.iter_mut().enumerate() {
            let x = a.data[i * a.stride + kk];
            for (s, &y) in acc.iter_mut().zip(row) {
                *s = x.mul_add(y, *s);
            }
        }
    }
    for (i, acc) in acc.iter().enumerate() {
        c.data[i * c.stride..i * c.stride + N].copy_from_slice(acc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};

    fn random(rng: &mut impl Rng, n: usize) -> Vec<f32> {
        (0..n).map(|_| rng.random_range(-1.0..1.0)).collect()
    }

    #[test]
    fn every_shape_is_the_plain_chain_with_and_without_intrinsics() {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(1);
        for (m, n, k) in [
            (1, 1, 1),
            (1, 64, 576),
            (5, 200, 33),
            (7, 15, 64),
            (12, 48, 17),
            (13, 81, 128),
            (2, 64, 1024),
            (9, 70, 2500),
            (3, 64, 0),
            (0, 4, 4),
            (4, 0, 4),
        ] {
            // Rows are farther apart than they are long, as in the tiles of a larger matrix.
            let (sa, sb, sc) = (k + 3, n + 5, n + 1);
            let (a, b) = (random(&mut rng, m * sa), random(&mut rng, k * sb));
            let dims = Dims { m, n, k };
            let product = |f: fn(Dims, Mat<'_>, Mat<'_>, MatMut<'_>)| {
                let mut c = vec![7.0; m * sc];
                f(
                    dims,
                    Mat {
                        data: &a,
                        stride: sa,
                    },
                    Mat {
                        data: &b,
                        stride: sb,
                    },
                    MatMut {
                        data: &mut c,
                        stride: sc,
                    },
                );
                c
            };
            let (fast, plain) = (product(gemm), product(generic));
            for i in 0..m {
                for j in 0..sc {
                    let chain = |s: f32, kk: usize| a[i * sa + kk].mul_add(b[kk * sb + j], s);
                    let want = if j < n {
                        (0..k).fold(0.0f32, chain)
                    } else {
                        7.0
                    };
                    for got in [fast[i * sc + j], plain[i * sc + j]] {
                        assert_eq!(got.to_bits(), want.to_bits(), "{m}x{n}x{k} at {i},{j}");
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic]
    fn a_short_buffer_is_refused() {
        let mut c = [0.0; 4];
        gemm(
            Dims { m: 2, n: 2, k: 2 },
            Mat {
                data: &[0.0; 3],
                stride: 2,
            },
            Mat {
                data: &[0.0; 4],
                stride: 2,
            },
            MatMut {
                data: &mut c,
                stride: 2,
            },
        );
    }
}
