//! Weighted sums: lanes are channels, which stay in registers while all rows pass.

use super::{LANES, Layout, Rows, STRETCH, ask};
use crate::compute::cpu::gemm::Mat;
use crate::compute::cpu::simd::{Simd, simd_kernel};

simd_kernel! {
    pub(super) fn weighted_sum<L: Layout>(layout: &L, rows: Rows<'_>, weights: Mat<'_>, out: &mut [f32]) = weighted_sum_body;
}

/// # Safety
/// The instruction set of `S` is there.
#[inline(always)]
unsafe fn weighted_sum_body<S: Simd, L: Layout>(
    layout: &L,
    rows: Rows<'_>,
    weights: Mat<'_>,
    out: &mut [f32],
) {
    let (n, dim) = (rows.n(), rows.dim);
    let n_queries = out.len() / dim;
    assert!(layout.fits(dim) && layout.row_bytes(dim) == rows.stride);
    if n == 0 || n_queries == 0 {
        return;
    }
    assert!((n_queries - 1) * weights.stride + n <= weights.data.len());
    let mut first = 0;
    while first < n_queries {
        let left = n_queries - first;
        let width = left.div_ceil(left.div_ceil(S::ABREAST));
        let w = Mat {
            data: &weights.data[first * weights.stride..],
            stride: weights.stride,
        };
        let out = &mut out[first * dim..(first + width) * dim];
        // SAFETY: the instruction set is there; `w` has `width` rows of at least n elements.
        unsafe {
            match width {
                4 if S::ABREAST >= 4 => sum_pass::<S, L, 4>(layout, rows, w, out),
                3 if S::ABREAST >= 3 => sum_pass::<S, L, 3>(layout, rows, w, out),
                2 if S::ABREAST >= 2 => sum_pass::<S, L, 2>(layout, rows, w, out),
                _ => sum_pass::<S, L, 1>(layout, rows, w, out),
            }
        }
        first += width;
    }
}

/// # Safety
/// The instruction set is there; `weights` has Q rows of at least n elements, `out` Q of `dim`.
#[inline(always)]
unsafe fn sum_pass<S: Simd, L: Layout, const Q: usize>(
    layout: &L,
    rows: Rows<'_>,
    weights: Mat<'_>,
    out: &mut [f32],
) {
    let n_vectors = rows.dim / LANES;
    let mut v = 0;
    // SAFETY (all blocks): the vectors asked for lie inside the rows; otherwise the caller's promise.
    while v < n_vectors {
        v += unsafe {
            match n_vectors - v {
                4.. if S::WIDE => sum_strip::<S, L, Q, 4>(layout, rows, weights, v, out),
                2.. if S::ABREAST > 1 => sum_strip::<S, L, Q, 2>(layout, rows, weights, v, out),
                _ => sum_strip::<S, L, Q, 1>(layout, rows, weights, v, out),
            }
        };
    }
    for c in n_vectors * LANES..rows.dim {
        for i in 0..Q {
            let mut sum = out[i * rows.dim + c];
            for (r, row) in rows.bytes.chunks_exact(rows.stride).enumerate() {
                // SAFETY: `row` is a whole row.
                let x = unsafe { layout.single(row.as_ptr(), c) };
                sum = weights.data[i * weights.stride + r].mul_add(x, sum);
            }
            out[i * rows.dim + c] = sum;
        }
    }
}

/// Sums V vectors of channels from vector `v` on; returns V.
///
/// # Safety
/// As in [`sum_pass`].
#[inline(always)]
unsafe fn sum_strip<S: Simd, L: Layout, const Q: usize, const V: usize>(
    layout: &L,
    rows: Rows<'_>,
    weights: Mat<'_>,
    v: usize,
    out: &mut [f32],
) -> usize {
    // Pairs of vectors start at an even one, which a layout of larger blocks may see here.
    let v = if V > 1 { v & !1 } else { v };
    let to = out.as_mut_ptr().wrapping_add(v * LANES);
    // SAFETY (all blocks): the caller's promise.
    unsafe {
        let mut acc = [[S::splat(0.0); V]; Q];
        for (i, acc) in acc.iter_mut().enumerate() {
            for (j, x) in acc.iter_mut().enumerate() {
                *x = S::load(to.add(i * rows.dim + j * LANES));
            }
        }
        let mut row = rows.bytes.as_ptr();
        let mut w = weights.data.as_ptr();
        // The first channels' pass asks for what is read next.
        let (from, mut next, share) = if v == 0 {
            rows.after_sums()
        } else {
            (0, &[][..], 0)
        };
        for r in 0..rows.n() {
            if r.is_multiple_of(STRETCH) && r >= from && !next.is_empty() {
                let (now, later) = next.split_at(share.min(next.len()));
                ask::<S>(now);
                next = later;
            }
            let x = layout.run::<S, V>(row, rows, v * LANES);
            for (i, acc) in acc.iter_mut().enumerate() {
                let weight = S::splat(*w.add(i * weights.stride));
                for (j, sum) in acc.iter_mut().enumerate() {
                    *sum = S::fma(weight, x[j], *sum);
                }
            }
            row = row.add(rows.stride);
            w = w.add(1);
        }
        for (i, acc) in acc.iter().enumerate() {
            for (j, &x) in acc.iter().enumerate() {
                S::store(to.add(i * rows.dim + j * LANES), x);
            }
        }
    }
    V
}
