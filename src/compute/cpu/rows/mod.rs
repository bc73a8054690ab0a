//! Scores and weighted sums straight from rows as they are stored: a format says how 16 rows of a channel, or 16 channels
//! of a row, come out of its bytes ([`Layout`]), and the kernels here do the rest in registers.
//!
//! Invariants: a score is the chain of fused multiply-adds over channels in ascending order, a weighted sum the chain over
//! rows in ascending order, both over the values to which the format's own decoder decodes: to the bit what `gemm` gives
//! on decoded rows, for any number of rows, queries and lanes.
//!
//! ```text
//! keys      lanes are 16 rows:      for each channel c      score[query] += q[query][c] · k[c]
//! values    lanes are 16 channels:  for each row r          sum[query]   += weight[query][r] · v[r]
//! ```

mod blocks;
mod floats;
mod grid;
mod plain;
mod steps;

pub use blocks::{Bytes, Half, HalfAndMin, Nibbles, Power};
pub use floats::{Float8, Nvfp4};
pub use grid::{ChannelNibbles, Grid};
pub use plain::{Bf16, F16, F32};
pub use steps::{ByteSteps, Halves, Steps};

use super::gemm::{Mat, MatMut};
use super::simd::{LANES, Simd, simd_kernel};

/// Bytes that memory gives at a time.
const CACHE_LINE: usize = 64;
/// Rows of values between two looks ahead.
const STRETCH: usize = 8;
/// Rows that pass together.
const STRIP: usize = 2 * LANES;
/// Queries that pass together.
const QUERIES: usize = 4;

/// Rows that lie back to back.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// Their bytes.
    pub bytes: &'a [u8],
    /// Bytes of a row.
    pub stride: usize,
    /// Channels of a row.
    pub dim: usize,
    /// What is read next, from elsewhere: it is asked for meanwhile.
    pub ahead: &'a [u8],
}

impl Rows<'_> {
    fn n(&self) -> usize {
        self.bytes.len() / self.stride
    }

    /// Asks for as large a part of what comes next as rows `first..first + n` are of these.
    #[inline(always)]
    fn ask<S: Simd>(&self, first: usize, n: usize) {
        let size = self.ahead.len();
        let mut at = size * first / self.n();
        let end = size * (first + n).min(self.n()) / self.n();
        while at < end {
            S::prefetch(self.ahead.as_ptr().wrapping_add(at));
            at += CACHE_LINE;
        }
    }
}

/// A format's kernels, whatever its [`Layout`].
pub trait Kernel: Send + Sync {
    /// Whether rows of `dim` channels can be read as they are stored: if not, they are decoded first.
    fn takes(&self, dim: usize) -> bool;
    /// `out[query][row]` = the score of each row for each query. `q`: `[query][dim]`; `padding` is working memory.
    ///
    /// # Panics
    /// When `out` is too small, or the layout doesn't take the rows.
    fn scores(&self, rows: Rows<'_>, q: &[f32], padding: &mut Vec<u8>, out: MatMut<'_>);
    /// `out[query]` += Σ `weights[query][row]` · row. `out`: `[query][dim]`.
    ///
    /// # Panics
    /// When `weights` is too small, or the layout doesn't take the rows.
    fn weighted_sum(&self, rows: Rows<'_>, weights: Mat<'_>, out: &mut [f32]);
}

impl<L: Layout + Send + Sync> Kernel for L {
    fn takes(&self, dim: usize) -> bool {
        self.fits(dim)
    }
    fn scores(&self, rows: Rows<'_>, q: &[f32], padding: &mut Vec<u8>, out: MatMut<'_>) {
        scores(self, rows, q, padding, out);
    }
    fn weighted_sum(&self, rows: Rows<'_>, weights: Mat<'_>, out: &mut [f32]) {
        weighted_sum(self, rows, weights, out);
    }
}

/// How values come out of stored bytes, exactly as the format's decoder gives them.
///
/// # Safety
/// For all methods: the instruction set of `S` is there, and `row` names the first of [`Layout::row_bytes`] bytes (in
/// [`Layout::hold`] and [`Layout::rest`] of 16 rows, back to back) that may be read. Implementations read no others.
#[allow(
    clippy::missing_safety_doc,
    reason = "one promise for all: see the trait"
)]
pub unsafe trait Layout {
    /// Channels that come out of what is held at a time, at most 32.
    const STEP: usize;
    /// What is held of 16 rows: bytes on their way to values.
    type Held<S: Simd>: Copy;

    /// Bytes of a row that is read.
    fn row_bytes(&self, dim: usize) -> usize;
    /// Whether rows of `dim` channels can be read.
    fn fits(&self, dim: usize) -> bool {
        dim.is_multiple_of(Self::STEP) && dim.is_multiple_of(LANES)
    }
    /// Takes up channels `first..first + STEP` of 16 rows.
    unsafe fn hold<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> Self::Held<S>;
    /// Channel `c` of those held; `c` is known after inlining.
    unsafe fn channel<S: Simd>(&self, held: &Self::Held<S>, first: usize, c: usize) -> S::F;
    /// Channels `first..first + 16` of one row.
    unsafe fn values<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> S::F;
    /// Channel `c` of 16 rows, past the last whole step.
    unsafe fn rest<S: Simd>(&self, _row: *const u8, _rows: Rows<'_>, _c: usize) -> S::F {
        // SAFETY: the caller's promise. A layout that fits whole steps alone is never asked.
        unsafe { S::splat(0.0) }
    }
    /// Channel `c` of one row, past the last whole vector.
    unsafe fn single(&self, _row: *const u8, _c: usize) -> f32 {
        0.0
    }
}

simd_kernel! {
    fn scores<L: Layout>(layout: &L, rows: Rows<'_>, q: &[f32], padding: &mut Vec<u8>, out: MatMut<'_>) = scores_body;
}

simd_kernel! {
    fn weighted_sum<L: Layout>(layout: &L, rows: Rows<'_>, weights: Mat<'_>, out: &mut [f32]) = weighted_sum_body;
}

/// # Safety
/// The instruction set of `S` is there.
#[inline(always)]
unsafe fn scores_body<S: Simd, L: Layout>(
    layout: &L,
    rows: Rows<'_>,
    q: &[f32],
    padding: &mut Vec<u8>,
    out: MatMut<'_>,
) {
    let (n, dim) = (rows.n(), rows.dim);
    let n_queries = q.len() / dim;
    assert!(layout.fits(dim) && layout.row_bytes(dim) == rows.stride);
    if n == 0 || n_queries == 0 {
        return;
    }
    assert!((n_queries - 1) * out.stride + n <= out.data.len());
    let mut first = 0;
    while first < n_queries {
        let left = n_queries - first;
        let width = left.div_ceil(left.div_ceil(QUERIES));
        let q = &q[first * dim..];
        let to = MatMut {
            data: &mut out.data[first * out.stride..],
            stride: out.stride,
        };
        // SAFETY: the instruction set is there; `q` and `to` have `width` rows, of `dim` and of at least n elements.
        unsafe {
            match width {
                1 => score_pass::<S, L, 1>(layout, rows, q, padding, to),
                2 => score_pass::<S, L, 2>(layout, rows, q, padding, to),
                3 => score_pass::<S, L, 3>(layout, rows, q, padding, to),
                _ => score_pass::<S, L, QUERIES>(layout, rows, q, padding, to),
            }
        }
        first += width;
    }
}

/// # Safety
/// The instruction set is there; `q` and `out` have Q rows, of `dim` and of at least n elements.
#[inline(always)]
unsafe fn score_pass<S: Simd, L: Layout, const Q: usize>(
    layout: &L,
    rows: Rows<'_>,
    q: &[f32],
    padding: &mut Vec<u8>,
    out: MatMut<'_>,
) {
    let n = rows.n();
    if n < STRIP {
        let size = padding.len().max(STRIP * rows.stride);
        padding.reserve_exact(size - padding.len());
        padding.resize(size, 0);
        padding[..n * rows.stride].copy_from_slice(&rows.bytes[..n * rows.stride]);
        // SAFETY: 32 rows lie in `padding`.
        let scores = unsafe { strip::<S, L, Q>(layout, padding.as_ptr(), rows, q.as_ptr()) };
        let mut all = [[0.0f32; STRIP]; Q];
        // SAFETY: `all` has 32 elements for each query.
        unsafe { store::<S, Q>(&scores, all.as_mut_ptr().cast(), STRIP) };
        for (i, all) in all.iter().enumerate() {
            out.data[i * out.stride..][..n].copy_from_slice(&all[..n]);
        }
        return;
    }
    let to = out.data.as_mut_ptr();
    let mut r = 0;
    while r < n {
        // A last strip that would be short has rows that were there before.
        let at = r.min(n - STRIP);
        // SAFETY: 32 rows from `at` on lie inside `bytes`, and so do their scores inside `out`.
        unsafe {
            rows.ask::<S>(at, STRIP);
            let row = rows.bytes.as_ptr().add(at * rows.stride);
            let scores = strip::<S, L, Q>(layout, row, rows, q.as_ptr());
            store::<S, Q>(&scores, to.add(at), out.stride);
        }
        r += STRIP;
    }
}

/// # Safety
/// The instruction set is there; 32 numbers may be written at `to`, and for each further query `stride` numbers on.
#[inline(always)]
unsafe fn store<S: Simd, const Q: usize>(scores: &[[S::F; Q]; 2], to: *mut f32, stride: usize) {
    for (b, scores) in scores.iter().enumerate() {
        for (i, &x) in scores.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { S::store(to.add(i * stride + b * LANES), x) };
        }
    }
}

/// The scores of two vectors of rows for Q queries: enough chains to keep the multipliers busy.
///
/// # Safety
/// The instruction set is there; 32 rows may be read at `row`, `[Q][dim]` numbers at `q`.
#[inline(always)]
unsafe fn strip<S: Simd, L: Layout, const Q: usize>(
    layout: &L,
    row: *const u8,
    rows: Rows<'_>,
    q: *const f32,
) -> [[S::F; Q]; 2] {
    // SAFETY (all blocks): the caller's promise.
    unsafe {
        let mut acc = [[S::splat(0.0); Q]; 2];
        let later = row.add(LANES * rows.stride);
        let whole = rows.dim / L::STEP * L::STEP;
        let mut first = 0;
        while first < whole {
            let group = Group::<S, L> {
                layout,
                held: [
                    layout.hold::<S>(row, rows, first),
                    layout.hold::<S>(later, rows, first),
                ],
                q: q.add(first),
                first,
                dim: rows.dim,
            };
            if S::WIDE {
                for_each_channel!(L, group, acc);
            } else {
                for c in 0..L::STEP {
                    group.add::<Q>(c, &mut acc);
                }
            }
            first += L::STEP;
        }
        for c in whole..rows.dim {
            let k = [row, later].map(|row| layout.rest::<S>(row, rows, c));
            add_channel::<S, Q>(k, q.add(c), rows.dim, &mut acc);
        }
        acc
    }
}

/// What is held of two vectors of rows, and the queries at its first channel.
struct Group<'a, S: Simd, L: Layout> {
    layout: &'a L,
    held: [L::Held<S>; 2],
    q: *const f32,
    first: usize,
    dim: usize,
}

impl<S: Simd, L: Layout> Group<'_, S, L> {
    /// # Safety
    /// As in [`strip`].
    #[inline(always)]
    unsafe fn add<const Q: usize>(&self, c: usize, acc: &mut [[S::F; Q]; 2]) {
        // SAFETY: the caller's promise.
        unsafe {
            let k = [
                self.layout.channel::<S>(&self.held[0], self.first, c),
                self.layout.channel::<S>(&self.held[1], self.first, c),
            ];
            add_channel::<S, Q>(k, self.q.add(c), self.dim, acc);
        }
    }
}

/// # Safety
/// As in [`strip`]; `q` names the channel of the first query.
#[inline(always)]
unsafe fn add_channel<S: Simd, const Q: usize>(
    k: [S::F; 2],
    q: *const f32,
    dim: usize,
    acc: &mut [[S::F; Q]; 2],
) {
    #[allow(clippy::needless_range_loop, reason = "accumulators stay in registers")]
    for i in 0..Q {
        // SAFETY: the caller's promise.
        unsafe {
            let x = S::splat(*q.add(i * dim));
            acc[0][i] = S::fma(x, k[0], acc[0][i]);
            acc[1][i] = S::fma(x, k[1], acc[1][i]);
        }
    }
}

/// All channels of a group in order, unrolled: what a layout does for a channel depends on its number.
macro_rules! for_each_channel {
    ($layout:ident, $group:ident, $acc:ident) => {
        for_each_channel!(@ $layout, $group, $acc,
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31)
    };
    (@ $layout:ident, $group:ident, $acc:ident, $($c:literal)*) => {
        $(if $c < $layout::STEP {
            $group.add::<Q>($c, &mut $acc);
        })*
    };
}
use for_each_channel;

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
        let width = left.div_ceil(left.div_ceil(QUERIES));
        let w = Mat {
            data: &weights.data[first * weights.stride..],
            stride: weights.stride,
        };
        let out = &mut out[first * dim..(first + width) * dim];
        // SAFETY: the instruction set is there; `w` has `width` rows of at least n elements.
        unsafe {
            match width {
                1 => sum_pass::<S, L, 1>(layout, rows, w, out),
                2 => sum_pass::<S, L, 2>(layout, rows, w, out),
                3 => sum_pass::<S, L, 3>(layout, rows, w, out),
                _ => sum_pass::<S, L, QUERIES>(layout, rows, w, out),
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
                2.. => sum_strip::<S, L, Q, 2>(layout, rows, weights, v, out),
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
        for r in 0..rows.n() {
            if v == 0 && r % STRETCH == 0 {
                rows.ask::<S>(r, STRETCH);
            }
            let mut x = [S::splat(0.0); V];
            for (j, x) in x.iter_mut().enumerate() {
                *x = layout.values::<S>(row, rows, (v + j) * LANES);
            }
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
