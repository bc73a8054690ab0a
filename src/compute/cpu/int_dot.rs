//! Products of coded rows and weights in integers, a block at a time.
//!
//! Invariant: with S the exact sum over a block of codes of x times codes of the weight, the weight's centre taken off
//! (q − 8 in Q4_0), d its scale and dx the block's scale in x, an output is
//!
//! ```text
//! y = fma(d · dx, S, y)        over the blocks in ascending order, from 0
//! z = fma(m, dx · X, z)        the same for a type with minima m, X being the sum of the codes of x
//! output = y + z
//! ```
//!
//! each of `d · dx`, S and `dx · X` rounded once to f32. It has the same bits whichever of the functions here makes it:
//! integers are exact in any order, and lanes run across outputs, never along a sum.

use super::blocks::{BLOCK, CodedBlock, Q4_0, Q4_1, Q8_0};
use super::codes::{Codes, QUAD, TILE_ROWS};
use super::dot::{FEW_ROWS, GROUP, Weights};
use super::simd::{Ints, Line, ints_kernel};
use crate::model::gguf::TensorType;

/// Bytes between what is read and what is asked for from memory, so that it comes while sums are added up.
const AHEAD: usize = 4096;

/// Vectors of partial sums kept at once, 32 KiB.
const PARTIALS: usize = 512;

/// Lines of a panel's block: 16 outputs of 32 weights.
const BLOCK_LINES: usize = GROUP * BLOCK / size_of::<Line>();

/// Whether weights of this type are read as integers.
pub(super) fn is_coded(kind: TensorType) -> bool {
    matches!(kind, TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q8_0)
}

/// y `[row][out]`, row stride `weights`' rows, of at most [`FEW_ROWS`] rows in [`super::codes::Layout::Rows`], or of any
/// number in [`super::codes::Layout::Tiles`]. `lines` is working memory.
///
/// # Panics
/// When `y` is too short or the codes are of another length than the weights' rows.
pub(super) fn apply(codes: &Codes, weights: Weights<'_>, lines: &mut Vec<Line>, y: &mut [f32]) {
    let row_bytes = weights.row_bytes(codes.n_blocks * BLOCK);
    let n_out = weights.bytes.len() / row_bytes;
    assert_eq!(weights.bytes.len(), n_out * row_bytes, "whole rows");
    assert!(y.len() >= codes.n_rows * n_out);
    match weights.kind {
        TensorType::Q4_0 => rows_of::<Q4_0>(codes, weights.bytes, lines, y),
        TensorType::Q4_1 => rows_of::<Q4_1>(codes, weights.bytes, lines, y),
        TensorType::Q8_0 => rows_of::<Q8_0>(codes, weights.bytes, lines, y),
        other => unreachable!("{other:?} has no codes: `is_coded` is asked first"),
    }
}

fn rows_of<B: CodedBlock>(codes: &Codes, weights: &[u8], lines: &mut Vec<Line>, y: &mut [f32]) {
    match codes.layout {
        super::codes::Layout::Rows => {
            assert!(codes.n_rows <= FEW_ROWS);
            lines.resize(
                lines.len().max(PARTIALS + PARTIALS / GROUP * QUAD),
                Line([0; 16]),
            );
            few_of::<B>(codes, weights, lines, y);
        }
        super::codes::Layout::Tiles => {
            let n_lines = codes.n_blocks * (BLOCK_LINES + 2);
            lines.resize(lines.len().max(n_lines), Line([0; 16]));
            many_of::<B>(codes, weights, lines, y);
        }
    }
}

ints_kernel! {
    fn few_of<B: CodedBlock>(codes: &Codes, weights: &[u8], lines: &mut [Line], y: &mut [f32]) = few_body;
}

ints_kernel! {
    fn many_of<B: CodedBlock>(codes: &Codes, weights: &[u8], lines: &mut [Line], y: &mut [f32]) = many_body;
}

/// # Safety
/// The instruction set of S is there.
#[inline(always)]
unsafe fn few_body<S: Ints, B: CodedBlock>(
    codes: &Codes,
    weights: &[u8],
    lines: &mut [Line],
    y: &mut [f32],
) {
    // SAFETY: the instruction set is the caller's promise.
    unsafe {
        match codes.n_planes {
            1 => few_in::<S, B, 1>(codes, weights, lines, y),
            _ => few_in::<S, B, 2>(codes, weights, lines, y),
        }
    }
}

/// Rows of weights are read one after the other, as they lie in memory; four lanes of each block's sum are kept. Then
/// the lanes of 16 rows are added and turned, so that the chains over the blocks run in lanes.
///
/// # Safety
/// The instruction set of S is there.
#[inline(always)]
unsafe fn few_in<S: Ints, B: CodedBlock, const P: usize>(
    codes: &Codes,
    weights: &[u8],
    lines: &mut [Line],
    y: &mut [f32],
) {
    let n_out = weights.len() / (codes.n_blocks * B::BYTES);
    let n_rows = codes.n_rows.max(1);
    let step = PARTIALS / GROUP / n_rows;
    let n_quads = codes.n_blocks.div_ceil(QUAD);
    let (partials, scales) = lines.split_at_mut(PARTIALS);
    for first in (0..n_out).step_by(GROUP) {
        let n = GROUP.min(n_out - first);
        // SAFETY: the instruction set is the caller's promise; places are inside what the caller gave.
        unsafe {
            let mut chains = [[S::splat(0.0); 2]; FEW_ROWS];
            for quad in (0..n_quads).step_by(step) {
                let part = Part {
                    codes,
                    quad,
                    n_quads: step.min(n_quads - quad),
                };
                for o in 0..n {
                    part.sum_row::<S, B, P>(
                        weights,
                        first + o,
                        &mut partials[o..],
                        &mut scales_of(scales)[o..],
                    );
                }
                for (row, chain) in chains.iter_mut().enumerate().take(codes.n_rows) {
                    let partials = &partials[row * part.n_quads * GROUP..][..part.n_quads * GROUP];
                    part.add_up::<S, B>(row, partials, scales, chain);
                }
            }
            for (row, [y_row, z_row]) in chains.into_iter().enumerate().take(codes.n_rows) {
                let sum = if B::MINIMA {
                    S::add(y_row, z_row)
                } else {
                    y_row
                };
                let mut out = [0.0; GROUP];
                S::store(out.as_mut_ptr(), sum);
                y[row * n_out + first..][..n].copy_from_slice(&out[..n]);
            }
        }
    }
}

fn scales_of(lines: &mut [Line]) -> &mut [u32] {
    bytemuck::cast_slice_mut(lines)
}

/// Some of the blocks of few rows.
struct Part<'a> {
    codes: &'a Codes,
    quad: usize,
    n_quads: usize,
}

impl Part<'_> {
    /// One row of weights: partial sums to `partials[row of x][quad][16]`, the blocks' first four bytes to
    /// `scales[quad][block][16]`, both every 16th from the first on.
    ///
    /// # Safety
    /// The instruction set of S is there; `weights` has the row, and the buffers the room.
    #[inline(always)]
    unsafe fn sum_row<S: Ints, B: CodedBlock, const P: usize>(
        &self,
        weights: &[u8],
        out: usize,
        partials: &mut [Line],
        scales: &mut [u32],
    ) {
        let codes = self.codes;
        let n_quads_all = codes.n_blocks.div_ceil(QUAD);
        let x = codes.bytes()[self.quad * P * QUAD * BLOCK..].as_ptr();
        let first = (out * codes.n_blocks + self.quad * QUAD) * B::BYTES;
        let rest = &weights[first..];
        assert!(partials.len() > (codes.n_rows * self.n_quads - 1) * GROUP);
        assert!(scales.len() > (self.n_quads * QUAD - 1) * GROUP);
        let (partials, scales) = (partials.as_mut_ptr(), scales.as_mut_ptr());
        let mut padded = [0u8; QUAD * 64];
        for q in 0..self.n_quads {
            let at = q * QUAD * B::BYTES;
            // SAFETY: a block of row `out` is inside `weights`, and all lie before the end of `rest` but a last quad's.
            let mut w = unsafe { rest.as_ptr().add(at) };
            for line in (0..QUAD * B::BYTES).step_by(size_of::<Line>()) {
                S::prefetch(w.wrapping_add(AHEAD + line));
            }
            // Codes of x past a row's last block are zeros, so what stands there is read but does not count.
            if rest.len() - at < QUAD * B::BYTES {
                padded[..rest.len() - at].copy_from_slice(&rest[at..]);
                w = padded.as_ptr();
            }
            // SAFETY: four blocks at w and the codes of four blocks of each row may be read; the buffers have the room that
            // was asserted; the instruction set is the caller's promise.
            unsafe {
                let w_codes = B::codes::<S>(w, B::BYTES);
                for row in 0..codes.n_rows {
                    let x = x.add((row * n_quads_all + q) * P * QUAD * BLOCK);
                    let place = partials.add((row * self.n_quads + q) * GROUP);
                    S::store_i(place.cast(), quad_sums::<S, P>(w_codes, x));
                }
                for i in 0..QUAD {
                    let bits = w.add(i * B::BYTES).cast::<u32>().read_unaligned();
                    *scales.add((q * QUAD + i) * GROUP) = bits;
                }
            }
        }
    }

    /// Adds the blocks of one row of x to the chains of 16 outputs.
    ///
    /// # Safety
    /// The instruction set of S is there.
    #[inline(always)]
    unsafe fn add_up<S: Ints, B: CodedBlock>(
        &self,
        row: usize,
        partials: &[Line],
        scales: &[Line],
        chain: &mut [S::F; 2],
    ) {
        let codes = self.codes;
        let [mut y, mut z] = *chain;
        for q in 0..self.n_quads {
            let block = (self.quad + q) * QUAD;
            // SAFETY: the instruction set is the caller's promise; lines are whole.
            unsafe {
                let p: *const u8 = partials[q * GROUP..][..GROUP].as_ptr().cast();
                let mut sums = [S::splat_i(0); 4];
                for (i, sums) in sums.iter_mut().enumerate() {
                    let p = p.add(i * 4 * size_of::<Line>());
                    let [a, b, c, d] = S::transpose_lanes([
                        S::load_i(p),
                        S::load_i(p.add(64)),
                        S::load_i(p.add(128)),
                        S::load_i(p.add(192)),
                    ]);
                    *sums = S::add_i(S::add_i(a, b), S::add_i(c, d));
                }
                let sums = S::transpose_quarters(sums);
                for (i, &sums) in sums.iter().enumerate().take(codes.n_blocks - block) {
                    let at = row * codes.n_blocks + block + i;
                    let bits = S::load_i((&raw const scales[q * QUAD + i]).cast());
                    let d = S::low_halves(bits);
                    let s = centred::<S, B>(sums, codes.sums[at]);
                    y = S::fma(S::mul(d, S::splat(codes.scales[at])), S::to_f32(s), y);
                    if B::MINIMA {
                        let m = S::low_halves(S::shr::<16>(bits));
                        z = S::fma(m, S::splat(codes.masses[at]), z);
                    }
                }
            }
        }
        *chain = [y, z];
    }
}

/// Four lanes of the sums of each of four blocks; `x`: `[plane][half][64]`.
///
/// # Safety
/// The instruction set of S is there; P · 128 bytes at x may be read.
#[inline(always)]
unsafe fn quad_sums<S: Ints, const P: usize>(w: [S::I; 2], x: *const u8) -> S::I {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = S::splat_i(0);
        for plane in 0..P {
            if plane > 0 {
                sums = S::shl::<8>(sums);
            }
            let x = x.add(plane * QUAD * BLOCK);
            sums = S::dot(sums, w[0], S::load_i(x));
            sums = S::dot(sums, w[1], S::load_i(x.add(64)));
        }
        sums
    }
}

/// Sums of products with the weights' codes less their centre.
///
/// # Safety
/// The instruction set of S is there.
#[inline(always)]
unsafe fn centred<S: Ints, B: CodedBlock>(sums: S::I, x_sum: i32) -> S::I {
    if B::CENTRE == 0 {
        return sums;
    }
    // SAFETY: the caller's promise.
    unsafe { S::add_i(sums, S::splat_i(-B::CENTRE * x_sum)) }
}

/// # Safety
/// The instruction set of S is there.
#[inline(always)]
unsafe fn many_body<S: Ints, B: CodedBlock>(
    codes: &Codes,
    weights: &[u8],
    lines: &mut [Line],
    y: &mut [f32],
) {
    // SAFETY: the instruction set is the caller's promise.
    unsafe {
        match codes.n_planes {
            1 => many_in::<S, B, 1>(codes, weights, lines, y),
            _ => many_in::<S, B, 2>(codes, weights, lines, y),
        }
    }
}

/// A panel of 16 outputs at a time, all rows of x past it.
///
/// # Safety
/// The instruction set of S is there.
#[inline(always)]
unsafe fn many_in<S: Ints, B: CodedBlock, const P: usize>(
    codes: &Codes,
    weights: &[u8],
    lines: &mut [Line],
    y: &mut [f32],
) {
    let row_bytes = codes.n_blocks * B::BYTES;
    let n_out = weights.len() / row_bytes;
    for first in (0..n_out).step_by(GROUP) {
        let n = GROUP.min(n_out - first);
        let rows = &weights[first * row_bytes..(first + n) * row_bytes];
        // SAFETY: the instruction set is the caller's promise; a panel's rows are whole.
        unsafe {
            if n == GROUP {
                fill_panel::<S, B>(rows, codes.n_blocks, lines);
            } else {
                let mut all = rows.to_vec();
                all.resize(GROUP * row_bytes, 0);
                fill_panel::<S, B>(&all, codes.n_blocks, lines);
            }
            let panel = Panel {
                codes,
                lines,
                n,
                n_out,
            };
            let mut row = 0;
            while row < codes.n_rows {
                let y = &mut y[row * n_out + first..];
                match codes.tile_rows(row) {
                    4 => panel.tile::<S, B, P, 4>(row, y),
                    8 => panel.tile::<S, B, P, 8>(row, y),
                    _ => panel.tile::<S, B, P, TILE_ROWS>(row, y),
                }
                row += TILE_ROWS;
            }
        }
    }
}

/// 16 rows of weights to lines: `[block][8][16][4 codes]`, then scales and minima as f32, `[block][16]` each.
///
/// # Safety
/// The instruction set of S is there.
#[inline(always)]
unsafe fn fill_panel<S: Ints, B: CodedBlock>(rows: &[u8], n_blocks: usize, lines: &mut [Line]) {
    let row_bytes = n_blocks * B::BYTES;
    assert!(rows.len() >= GROUP * row_bytes && lines.len() >= n_blocks * (BLOCK_LINES + 2));
    let (codes, scales) = lines.split_at_mut(n_blocks * BLOCK_LINES);
    for (b, codes) in codes.chunks_exact_mut(BLOCK_LINES).enumerate() {
        // SAFETY: block b of 16 rows lies inside `rows`; the instruction set is the caller's promise.
        unsafe {
            let w = rows.as_ptr().add(b * B::BYTES);
            let to: *mut u8 = codes.as_mut_ptr().cast();
            let v0 = B::codes::<S>(w, 4 * row_bytes);
            let v1 = B::codes::<S>(w.add(row_bytes), 4 * row_bytes);
            let v2 = B::codes::<S>(w.add(2 * row_bytes), 4 * row_bytes);
            let v3 = B::codes::<S>(w.add(3 * row_bytes), 4 * row_bytes);
            for half in 0..2 {
                let turned = S::transpose_lanes([v0[half], v1[half], v2[half], v3[half]]);
                for (i, lanes) in turned.into_iter().enumerate() {
                    S::store_i(to.add((half * 4 + i) * size_of::<Line>()), lanes);
                }
            }
            let d: *mut f32 = (&raw mut scales[2 * b]).cast();
            S::store(d, S::load_f16_column(w, row_bytes));
            if B::MINIMA {
                let m: *mut f32 = (&raw mut scales[2 * b + 1]).cast();
                S::store(m, S::load_f16_column(w.add(2), row_bytes));
            }
        }
    }
}

/// 16 outputs, filled by [`fill_panel`], n of them asked for.
struct Panel<'a> {
    codes: &'a Codes,
    lines: &'a [Line],
    n: usize,
    n_out: usize,
}

impl Panel<'_> {
    /// The tile of M rows that starts at `row`; `y` starts at its first output.
    ///
    /// # Safety
    /// The instruction set of S is there.
    #[inline(always)]
    unsafe fn tile<S: Ints, B: CodedBlock, const P: usize, const M: usize>(
        &self,
        row: usize,
        y: &mut [f32],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if S::WIDE {
                return self.rows::<S, B, P, M, M>(row, 0, y);
            }
            // Two rows fill the registers of smaller sets.
            for r in (0..M).step_by(2) {
                self.rows::<S, B, P, M, 2>(row, r, y);
            }
        }
    }

    /// R rows of a tile of M, from its row `r` on.
    ///
    /// # Safety
    /// The instruction set of S is there.
    #[inline(always)]
    unsafe fn rows<S: Ints, B: CodedBlock, const P: usize, const M: usize, const R: usize>(
        &self,
        row: usize,
        r: usize,
        y: &mut [f32],
    ) {
        let codes = self.codes;
        let n_blocks = codes.n_blocks;
        let (panel, scales) = self.lines.split_at(n_blocks * BLOCK_LINES);
        let x = &codes.bytes()[row * n_blocks * BLOCK * P..][..M * n_blocks * BLOCK * P];
        let of_rows = row * n_blocks..(row + M) * n_blocks;
        let (x_scales, x_sums, x_masses) = (
            &codes.scales[of_rows.clone()],
            &codes.sums[of_rows.clone()],
            &codes.masses[of_rows],
        );
        assert!(r + R <= M && scales.len() >= 2 * n_blocks);
        // SAFETY: all places lie inside the slices cut above; the instruction set is the caller's promise.
        unsafe {
            let mut sums_y = [S::splat(0.0); R];
            let mut sums_z = [S::splat(0.0); R];
            for b in 0..n_blocks {
                let w: *const u8 = panel.as_ptr().add(b * BLOCK_LINES).cast();
                let x = x.as_ptr().add(b * P * BLOCK * M + r * 4);
                let sums = block_sums::<S, P, M, R>(w, x);
                let at = b * M + r;
                let d = S::load(scales.as_ptr().add(2 * b).cast());
                for (i, sums) in sums.into_iter().enumerate() {
                    let s = centred::<S, B>(sums, *x_sums.get_unchecked(at + i));
                    let scale = S::mul(d, S::splat(*x_scales.get_unchecked(at + i)));
                    sums_y[i] = S::fma(scale, S::to_f32(s), sums_y[i]);
                }
            }
            // Apart, so that one loop's sums fit the registers.
            if B::MINIMA {
                for b in 0..n_blocks {
                    let m = S::load(scales.as_ptr().add(2 * b + 1).cast());
                    for (i, z) in sums_z.iter_mut().enumerate() {
                        *z = S::fma(m, S::splat(*x_masses.get_unchecked(b * M + r + i)), *z);
                    }
                }
            }
            let n_rows = codes.n_rows.saturating_sub(row + r).min(R);
            for i in 0..n_rows {
                let sum = if B::MINIMA {
                    S::add(sums_y[i], sums_z[i])
                } else {
                    sums_y[i]
                };
                let mut out = [0.0; GROUP];
                S::store(out.as_mut_ptr(), sum);
                y[(r + i) * self.n_out..][..self.n].copy_from_slice(&out[..self.n]);
            }
        }
    }
}

/// Sums over one block of 16 outputs and R rows of a tile of M.
///
/// # Safety
/// A panel's block at w and a tile's block at x may be read; the instruction set of S is there.
#[inline(always)]
unsafe fn block_sums<S: Ints, const P: usize, const M: usize, const R: usize>(
    w: *const u8,
    x: *const u8,
) -> [S::I; R] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [S::splat_i(0); R];
        for plane in 0..P {
            if plane > 0 {
                for sums in &mut sums {
                    *sums = S::shl::<8>(*sums);
                }
            }
            for step in 0..BLOCK / 4 {
                let w = S::load_i(w.add(step * size_of::<Line>()));
                let x = x.add((plane * (BLOCK / 4) + step) * 4 * M);
                for (i, sums) in sums.iter_mut().enumerate() {
                    let x = S::splat_i(x.add(4 * i).cast::<i32>().read_unaligned());
                    *sums = S::dot(*sums, w, x);
                }
            }
        }
        sums
    }
}
