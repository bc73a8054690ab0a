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

multiversion! {
    /// C = A·B. A is `[m][k]`, B `[k][n]`, C `[m][n]`. With k = 0, C becomes 0.
    pub fn gemm(dims: Dims, a: Mat<'_>, b: Mat<'_>, c: MatMut<'_>) = gemm_body;
}

#[inline(always)]
fn gemm_body(dims: Dims, a: Mat<'_>, b: Mat<'_>, c: MatMut<'_>) {
    let Dims { m, n, k } = dims;
    let mut j = 0;
    while j < n {
        let width = if n - j >= 64 {
            64
        } else if n - j >= 16 {
            16
        } else {
            1
        };
        let mut i = 0;
        while i < m {
            match (width, m - i >= 4) {
                (64, true) => tile::<4, 64>(
                    k,
                    at(a, i, 0),
                    at(b, 0, j),
                    &mut c.data[i * c.stride + j..],
                    c.stride,
                ),
                (64, false) => tile::<1, 64>(
                    k,
                    at(a, i, 0),
                    at(b, 0, j),
                    &mut c.data[i * c.stride + j..],
                    c.stride,
                ),
                (16, true) => tile::<4, 16>(
                    k,
                    at(a, i, 0),
                    at(b, 0, j),
                    &mut c.data[i * c.stride + j..],
                    c.stride,
                ),
                (16, false) => tile::<1, 16>(
                    k,
                    at(a, i, 0),
                    at(b, 0, j),
                    &mut c.data[i * c.stride + j..],
                    c.stride,
                ),
                (_, _) => tile::<1, 1>(
                    k,
                    at(a, i, 0),
                    at(b, 0, j),
                    &mut c.data[i * c.stride + j..],
                    c.stride,
                ),
            }
            i += if width > 1 && m - i >= 4 { 4 } else { 1 };
        }
        j += width;
    }
}

#[inline(always)]
fn at(m: Mat<'_>, row: usize, col: usize) -> Mat<'_> {
    Mat {
        data: m.data.get(row * m.stride + col..).unwrap_or(&[]),
        stride: m.stride,
    }
}

#[inline(always)]
fn tile<const M: usize, const N: usize>(
    k: usize,
    a: Mat<'_>,
    b: Mat<'_>,
    c: &mut [f32],
    ldc: usize,
) {
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
        c[i * ldc..i * ldc + N].copy_from_slice(acc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};

    #[test]
    fn every_shape_is_the_plain_chain() {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(1);
        for (m, n, k) in [
            (1, 1, 1),
            (1, 64, 576),
            (5, 200, 33),
            (7, 15, 64),
            (13, 81, 128),
            (3, 64, 0),
        ] {
            let a: Vec<f32> = (0..m * k).map(|_| rng.random_range(-1.0..1.0)).collect();
            let b: Vec<f32> = (0..k * n).map(|_| rng.random_range(-1.0..1.0)).collect();
            let mut c = vec![7.0; m * n];
            gemm(
                Dims { m, n, k },
                Mat {
                    data: &a,
                    stride: k,
                },
                Mat {
                    data: &b,
                    stride: n,
                },
                MatMut {
                    data: &mut c,
                    stride: n,
                },
            );
            for i in 0..m {
                for j in 0..n {
                    let chain =
                        (0..k).fold(0.0f32, |s, kk| a[i * k + kk].mul_add(b[kk * n + j], s));
                    assert_eq!(
                        c[i * n + j].to_bits(),
                        chain.to_bits(),
                        "{m}x{n}x{k} at {i},{j}"
                    );
                }
            }
        }
    }
}
