//! The AVX-512 tile under `gemm`: up to 6 rows by 64 columns in registers, each output one chain over k.
//!
//! Invariant: gives the bits of `gemm`'s generic body (its scalar twin) for every shape. A chain that is cut along k is
//! stored and loaded as f32, which changes nothing.

use std::arch::x86_64::{
    __m512, __mmask16, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps,
};

use super::gemm::{Dims, Mat, MatMut};

/// Rows of a full tile: 6 · 4 accumulators, 4 vectors of B and a broadcast fill 29 of 32 registers.
const ROWS: usize = 6;
/// Lanes of a vector.
const LANES: usize = 16;
/// Columns of a full tile.
const COLUMNS: usize = 4 * LANES;
/// Depth of a block of B: 1024 · 64 · 4 bytes stay in a level-2 cache while all rows pass.
const DEPTH: usize = 1024;

/// Where a tile's chains start.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// At 0.
    Zero,
    /// At what C holds.
    Output,
}

/// One tile's operands; A has M rows, B `depth` rows, C M rows.
#[derive(Clone, Copy)]
struct Tile {
    depth: usize,
    a: *const f32,
    a_stride: usize,
    b: *const f32,
    b_stride: usize,
    c: *mut f32,
    c_stride: usize,
    /// Columns of the last vector.
    last: __mmask16,
    start: Start,
}

/// C = A·B as `gemm` defines it.
///
/// # Panics
/// When a buffer is shorter than `dims` and its stride say.
#[target_feature(enable = "avx512f")]
pub(super) fn gemm(dims: Dims, a: Mat<'_>, b: Mat<'_>, c: MatMut<'_>) {
    let Dims { m, n, k } = dims;
    if m == 0 || n == 0 {
        return;
    }
    let fits = |len: usize, rows: usize, stride: usize, columns: usize| {
        rows == 0 || (rows - 1) * stride + columns <= len
    };
    assert!(fits(a.data.len(), m, a.stride, k), "A is too short");
    assert!(fits(b.data.len(), k, b.stride, n), "B is too short");
    assert!(fits(c.data.len(), m, c.stride, n), "C is too short");
    let c_base = c.data.as_mut_ptr();
    for j in (0..n).step_by(COLUMNS) {
        let width = COLUMNS.min(n - j);
        let vectors = width.div_ceil(LANES);
        let last = (u32::MAX >> (32 - (width - (vectors - 1) * LANES))) as __mmask16;
        // One block even for k = 0, which stores zeros.
        for block in 0..k.div_ceil(DEPTH).max(1) {
            let k0 = block * DEPTH;
            for i in (0..m).step_by(ROWS) {
                // SAFETY: i < m, j < n and k0 ≤ k, so the three offsets lie within (or, for an empty block, at the
                // end of) the buffers, whose lengths were checked above.
                let tile = unsafe {
                    Tile {
                        depth: DEPTH.min(k - k0),
                        a: a.data.as_ptr().wrapping_add(i * a.stride + k0),
                        a_stride: a.stride,
                        b: b.data.as_ptr().wrapping_add(k0 * b.stride + j),
                        b_stride: b.stride,
                        c: c_base.add(i * c.stride + j),
                        c_stride: c.stride,
                        last,
                        start: if block == 0 {
                            Start::Zero
                        } else {
                            Start::Output
                        },
                    }
                };
                // SAFETY: the tile's rows (ROWS or what is left of m), `depth` steps and `width` columns lie inside
                // the checked buffers; lanes past `width` are masked.
                unsafe { dispatch(ROWS.min(m - i), vectors, tile) };
            }
        }
    }
}

/// # Safety
/// As [`run`], for `rows` rows and `vectors` vectors.
#[target_feature(enable = "avx512f")]
unsafe fn dispatch(rows: usize, vectors: usize, t: Tile) {
    macro_rules! by_vectors {
        ($m:literal) => {
            match vectors {
                4 => run::<$m, 4>(t),
                3 => run::<$m, 3>(t),
                2 => run::<$m, 2>(t),
                _ => run::<$m, 1>(t),
            }
        };
    }
    // SAFETY: the caller's promise.
    unsafe {
        match rows {
            6 => by_vectors!(6),
            5 => by_vectors!(5),
            4 => by_vectors!(4),
            3 => by_vectors!(3),
            2 => by_vectors!(2),
            _ => by_vectors!(1),
        }
    }
}

/// # Safety
/// For i < M, kk < `depth` and each unmasked column j: `a[i·a_stride + kk]`, `b[kk·b_stride + j]` may be read and
/// `c[i·c_stride + j]` may be read and written.
#[target_feature(enable = "avx512f")]
unsafe fn run<const M: usize, const V: usize>(t: Tile) {
    let mut acc = [[_mm512_setzero_ps(); V]; M];
    if t.start == Start::Output {
        for (i, row) in acc.iter_mut().enumerate() {
            for (v, sum) in row.iter_mut().enumerate() {
                // SAFETY: the caller's promise; masked lanes are not touched.
                *sum = unsafe { load::<V>(t.c.add(i * t.c_stride), v, t.last) };
            }
        }
    }
    let mut b = t.b;
    for kk in 0..t.depth {
        let mut y = [_mm512_setzero_ps(); V];
        for (v, y) in y.iter_mut().enumerate() {
            // SAFETY: the caller's promise; masked lanes are not touched.
            *y = unsafe { load::<V>(b, v, t.last) };
        }
        for (i, row) in acc.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let x = _mm512_set1_ps(unsafe { *t.a.add(i * t.a_stride + kk) });
            for (sum, &y) in row.iter_mut().zip(&y) {
                *sum = _mm512_fmadd_ps(x, y, *sum);
            }
        }
        b = b.wrapping_add(t.b_stride);
    }
    for (i, row) in acc.iter().enumerate() {
        for (v, &sum) in row.iter().enumerate() {
            let mask = if v + 1 == V { t.last } else { __mmask16::MAX };
            // SAFETY: the caller's promise; masked lanes are not touched.
            unsafe { _mm512_mask_storeu_ps(t.c.add(i * t.c_stride + v * LANES), mask, sum) };
        }
    }
}

/// Vector `v` of V at `p`, the last one under `mask`.
///
/// # Safety
/// The unmasked elements may be read.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn load<const V: usize>(p: *const f32, v: usize, mask: __mmask16) -> __m512 {
    let p = p.wrapping_add(v * LANES);
    // SAFETY: the caller's promise.
    unsafe {
        if v + 1 == V {
            _mm512_maskz_loadu_ps(mask, p)
        } else {
            _mm512_loadu_ps(p)
        }
    }
}
