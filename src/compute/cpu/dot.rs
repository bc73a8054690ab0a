//! Products of rows and weights: y = x · w, 16 lanes along the inputs.
//!
//! Invariant: lane l adds the products of inputs l, l + 16, l + 32 … in ascending order, one fused multiply-add each,
//! and the lanes are added by the tree of [`Simd::sums`]: an output has the same bits whichever of the functions here
//! makes it, alone or in a tile. Inputs past the last whole block count as zeros.

use super::blocks::{BLOCK, Bf16, Block, F16, F32, Q4_0, Q4_1, Q8_0};
use super::simd::{CACHE_LINE, LANES, Simd, simd_kernel};
use crate::model::gguf::TensorType;

/// Rows of x, `[row][n_in]`.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub x: &'a [f32],
    pub n_in: usize,
}

/// Rows of weights, back to back.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    pub bytes: &'a [u8],
    pub kind: TensorType,
}

/// Outputs side by side in one go: the sums of 16 vectors are one tree.
pub(super) const GROUP: usize = LANES;

/// How far ahead of what is multiplied weights are asked for, bytes: what memory gives while it takes to answer.
const AHEAD: usize = 4096;

/// Rows that share what is unpacked of a weight without a panel.
pub(super) const FEW_ROWS: usize = 4;

impl Inputs<'_> {
    fn n_rows(&self) -> usize {
        self.x.len() / self.n_in
    }
}

impl Weights<'_> {
    pub fn row_bytes(&self, n_in: usize) -> usize {
        n_in / self.kind.block_len() * self.kind.block_bytes()
    }

    fn n_rows(&self, n_in: usize) -> usize {
        self.bytes.len() / self.row_bytes(n_in)
    }
}

/// y `[row][out]`, row stride `weights`' rows, of at most [`FEW_ROWS`] rows, each weight unpacked once.
///
/// # Panics
/// When `y` is too short.
pub(super) fn few(inputs: Inputs<'_>, weights: Weights<'_>, y: &mut [f32]) {
    assert!(y.len() >= inputs.n_rows() * weights.n_rows(inputs.n_in));
    match weights.kind {
        TensorType::F32 => few_of::<F32>(inputs, weights, y),
        TensorType::F16 => few_of::<F16>(inputs, weights, y),
        TensorType::BF16 => few_of::<Bf16>(inputs, weights, y),
        TensorType::Q4_0 => few_of::<Q4_0>(inputs, weights, y),
        TensorType::Q4_1 => few_of::<Q4_1>(inputs, weights, y),
        TensorType::Q8_0 => few_of::<Q8_0>(inputs, weights, y),
        other => unreachable!("{other:?} is expanded to f32 when a model is loaded"),
    }
}

/// Weights as f32, `[row][n_in]`.
pub(super) fn expand(weights: Weights<'_>, panel: &mut [f32]) {
    match weights.kind {
        TensorType::F32 => bytemuck::cast_slice_mut(panel).copy_from_slice(weights.bytes),
        TensorType::F16 => expand_of::<F16>(weights, panel),
        TensorType::BF16 => expand_of::<Bf16>(weights, panel),
        TensorType::Q4_0 => expand_of::<Q4_0>(weights, panel),
        TensorType::Q4_1 => expand_of::<Q4_1>(weights, panel),
        TensorType::Q8_0 => expand_of::<Q8_0>(weights, panel),
        kind => kind.dequantize(weights.bytes, panel),
    }
}

simd_kernel! {
    fn few_of<B: Block>(inputs: Inputs<'_>, weights: Weights<'_>, y: &mut [f32]) = few_body;
}

simd_kernel! {
    fn expand_of<B: Block>(weights: Weights<'_>, panel: &mut [f32]) = expand_body;
}

simd_kernel! {
    /// y `[row][panel's rows]` for any number of rows; `panel`: `[out][n_in]`.
    pub(super) fn many(inputs: Inputs<'_>, panel: &[f32], y: &mut [f32]) = many_body;
}

/// # Safety
/// The instruction set of S is there.
#[inline(always)]
unsafe fn few_body<S: Simd, B: Block>(inputs: Inputs<'_>, weights: Weights<'_>, y: &mut [f32]) {
    // SAFETY: the instruction set is the caller's promise.
    unsafe {
        match inputs.n_rows() {
            0 => {}
            1 => rows_of::<S, B, 1, 4>(inputs, weights, y),
            2 => rows_of::<S, B, 2, 2>(inputs, weights, y),
            3 => rows_of::<S, B, 3, 1>(inputs, weights, y),
            _ => rows_of::<S, B, FEW_ROWS, 1>(inputs, weights, y),
        }
    }
}

/// R outputs side by side, since one alone would wait for its own sum at every step. To the processor their rows are several
/// streams in one page, which it does not foresee: they are asked for, in order of memory.
///
/// # Safety
/// The instruction set of S is there.
#[inline(always)]
unsafe fn rows_of<S: Simd, B: Block, const M: usize, const R: usize>(
    inputs: Inputs<'_>,
    weights: Weights<'_>,
    y: &mut [f32],
) {
    let n_in = inputs.n_in;
    let row_bytes = weights.row_bytes(n_in);
    let n_out = weights.n_rows(n_in);
    assert!(inputs.x.len() >= M * n_in && y.len() >= M * n_out);
    let x = inputs.x.as_ptr();
    for first in (0..n_out).step_by(GROUP) {
        let n = GROUP.min(n_out - first);
        // SAFETY: rows `first..first + n` of the weights and M rows of x are inside their slices.
        unsafe {
            let mut sums = [[S::splat(0.0); GROUP]; M];
            let mut o = 0;
            while o < n {
                let w = weights.bytes.as_ptr().add((first + o) * row_bytes);
                // The last few, one at a time, pass as often as there would be others beside them.
                let (step, stride) = if o + R <= n { (R, row_bytes) } else { (1, 0) };
                let part = dots::<S, B, M, R, AHEAD>(w, stride, x, n_in);
                for (sums, part) in sums.iter_mut().zip(part) {
                    sums[o..o + step].copy_from_slice(&part[..step]);
                }
                o += step;
            }
            for (m, sums) in sums.iter().enumerate() {
                // `sums` wants vector 4·i + j where lane 4·j + i comes out.
                let mut order = *sums;
                for (i, vector) in order.iter_mut().enumerate() {
                    *vector = sums[i % 4 * 4 + i / 4];
                }
                let mut out = [0.0; GROUP];
                S::store(out.as_mut_ptr(), S::sums(&order));
                y[m * n_out + first..m * n_out + first + n].copy_from_slice(&out[..n]);
            }
        }
    }
}

/// # Safety
/// The instruction set of S is there.
#[inline(always)]
unsafe fn many_body<S: Simd>(inputs: Inputs<'_>, panel: &[f32], y: &mut [f32]) {
    let (n_in, n_rows) = (inputs.n_in, inputs.n_rows());
    let n_out = panel.len() / n_in;
    assert!(y.len() >= n_rows * n_out);
    let mut row = 0;
    while row < n_rows {
        let m = (n_rows - row).min(FEW_ROWS);
        let mut out = 0;
        while out < n_out {
            let r = if n_out - out >= 4 { 4 } else { 1 };
            let part = Part {
                // SAFETY: row < n_rows and out < n_out.
                x: unsafe { inputs.x.as_ptr().add(row * n_in) },
                // SAFETY: as above.
                w: unsafe { panel.as_ptr().add(out * n_in) },
                n_in,
                y: &mut y[row * n_out + out..],
                n_out,
            };
            // SAFETY: m rows of x and r rows of the panel are inside; the instruction set is the caller's promise.
            unsafe {
                match (m, r) {
                    (4, 4) if S::WIDE => tile::<S, 4, 4>(part),
                    (4, 4) => narrow::<S, 4, 4>(part),
                    (3, 4) => tile::<S, 3, 4>(part),
                    (2, 4) => tile::<S, 2, 4>(part),
                    (1, 4) => tile::<S, 1, 4>(part),
                    (4, _) => tile::<S, 4, 1>(part),
                    (3, _) => tile::<S, 3, 1>(part),
                    (2, _) => tile::<S, 2, 1>(part),
                    _ => tile::<S, 1, 1>(part),
                }
            }
            out += r;
        }
        row += m;
    }
}

/// One tile's operands: rows of x, rows of f32 weights, the outputs' first element.
struct Part<'a> {
    x: *const f32,
    w: *const f32,
    n_in: usize,
    y: &'a mut [f32],
    n_out: usize,
}

/// # Safety
/// M rows of x and R rows of w may be read; the instruction set of S is there.
#[inline(always)]
unsafe fn tile<S: Simd, const M: usize, const R: usize>(part: Part<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        let acc = dots::<S, F32, M, R, 0>(part.w.cast(), 4 * part.n_in, part.x, part.n_in);
        put::<S, M, R>(&acc, part.y, part.n_out);
    }
}

/// The same in quarters, for sets of registers too small for a whole tile.
///
/// # Safety
/// As [`tile`]; M and R are even.
#[inline(always)]
unsafe fn narrow<S: Simd, const M: usize, const R: usize>(part: Part<'_>) {
    for m in (0..M).step_by(2) {
        for r in (0..R).step_by(2) {
            // SAFETY: the caller's promise.
            unsafe {
                let (x, w) = (part.x.add(m * part.n_in), part.w.add(r * part.n_in));
                let acc = dots::<S, F32, 2, 2, 0>(w.cast(), 4 * part.n_in, x, part.n_in);
                put::<S, 2, 2>(&acc, &mut part.y[m * part.n_out + r..], part.n_out);
            }
        }
    }
}

/// # Safety
/// The instruction set of S is there.
#[inline(always)]
unsafe fn put<S: Simd, const M: usize, const R: usize>(
    acc: &[[S::F; R]; M],
    y: &mut [f32],
    n_out: usize,
) {
    // SAFETY: `out` has 16 elements; the instruction set is the caller's promise.
    unsafe {
        let mut order = [S::splat(0.0); LANES];
        for (m, acc) in acc.iter().enumerate() {
            for (r, &sum) in acc.iter().enumerate() {
                order[4 * r + m] = sum;
            }
        }
        let mut out = [0.0; LANES];
        S::store(out.as_mut_ptr(), S::sums(&order));
        for m in 0..M {
            y[m * n_out..m * n_out + R].copy_from_slice(&out[4 * m..4 * m + R]);
        }
    }
}

/// Lane sums of M rows of x with R rows of weights; what lies so many bytes AHEAD is asked for, unless that is 0.
///
/// # Safety
/// M rows of x, `n_in` apart, and R rows of weights, `row_bytes` apart, may be read; the instruction set of S is there.
#[inline(always)]
unsafe fn dots<S: Simd, B: Block, const M: usize, const R: usize, const AHEAD: usize>(
    w: *const u8,
    row_bytes: usize,
    x: *const f32,
    n_in: usize,
) -> [[S::F; R]; M] {
    // SAFETY: the caller's promise; a last block that is not whole is copied and padded.
    unsafe {
        let mut acc = [[S::splat(0.0); R]; M];
        let whole = n_in / BLOCK;
        for b in 0..whole {
            if AHEAD > 0 {
                let ahead = w.wrapping_add(b * R * B::BYTES + AHEAD);
                for line in (0..R * B::BYTES).step_by(CACHE_LINE) {
                    S::prefetch(ahead.wrapping_add(line));
                }
            }
            step::<S, B, M, R>(
                &mut acc,
                w.add(b * B::BYTES),
                row_bytes,
                x.add(b * BLOCK),
                n_in,
            );
        }
        let rest = n_in % BLOCK;
        if rest > 0 {
            let mut x_rest = [[0.0f32; BLOCK]; M];
            for (m, x_rest) in x_rest.iter_mut().enumerate() {
                x.add(m * n_in + whole * BLOCK)
                    .copy_to_nonoverlapping(x_rest.as_mut_ptr(), rest);
            }
            // Only types without blocks of their own have rows that end inside one.
            let mut w_rest = [[0u8; 4 * BLOCK]; R];
            for (r, w_rest) in w_rest.iter_mut().enumerate() {
                let from = w.add(r * row_bytes + whole * B::BYTES);
                from.copy_to_nonoverlapping(w_rest.as_mut_ptr(), rest * B::BYTES / BLOCK);
            }
            let (x, w) = (x_rest.as_ptr().cast(), w_rest.as_ptr().cast());
            step::<S, B, M, R>(&mut acc, w, 4 * BLOCK, x, BLOCK);
        }
        acc
    }
}

/// One block of inputs.
///
/// # Safety
/// As [`dots`], for one block.
#[inline(always)]
unsafe fn step<S: Simd, B: Block, const M: usize, const R: usize>(
    acc: &mut [[S::F; R]; M],
    w: *const u8,
    row_bytes: usize,
    x: *const f32,
    x_stride: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut weights = [[S::splat(0.0); 2]; R];
        for (r, w_r) in weights.iter_mut().enumerate() {
            let block = w.add(r * row_bytes);
            *w_r = B::unpack::<S>(block);
        }
        for half in 0..2 {
            for (m, acc) in acc.iter_mut().enumerate() {
                let x = S::load(x.add(m * x_stride + half * LANES));
                for (acc, w) in acc.iter_mut().zip(&weights) {
                    *acc = S::fma(x, w[half], *acc);
                }
            }
        }
    }
}

/// # Safety
/// The instruction set of S is there.
#[inline(always)]
unsafe fn expand_body<S: Simd, B: Block>(weights: Weights<'_>, panel: &mut [f32]) {
    let (blocks, tail) = panel.as_chunks_mut::<BLOCK>();
    let bytes = weights.bytes.chunks_exact(B::BYTES);
    let rest = bytes.remainder();
    for (block, out) in bytes.zip(blocks) {
        // SAFETY: a block is `BYTES` long and `out` has 32 elements; the instruction set is the caller's promise.
        unsafe {
            let [low, high] = B::unpack::<S>(block.as_ptr());
            S::store(out.as_mut_ptr(), low);
            S::store(out.as_mut_ptr().add(LANES), high);
        }
    }
    weights.kind.dequantize(rest, tail);
}
