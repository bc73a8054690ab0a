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
use super::codes::{Codes, FEW_ROWS, Layout, QUAD, TILE_ROWS};
use super::dot::{GROUP, Weights};
use super::simd::{Ints, Line, ints_kernel};
use crate::model::gguf::TensorType;

/// Vectors of partial sums kept at once, 32 KiB.
const PARTIALS: usize = 512;

/// Lines of a panel's block: 16 outputs of 32 weights.
const BLOCK_LINES: usize = GROUP * BLOCK / size_of::<Line>();

/// Whether weights of this type are read as integers.
pub(super) fn is_coded(kind: TensorType) -> bool {
    matches!(kind, TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q8_0)
}

/// y `[row][out]`, row stride `weights`' rows, of at most [`FEW_ROWS`] rows in [`Layout::Rows`], or of any
/// number in [`Layout::Tiles`]. `lines` is working memory.
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
        Layout::Rows => {
            lines.resize(
                lines.len().max(PARTIALS + PARTIALS / GROUP * QUAD),
                Line([0; 16]),
            );
            few_of::<B>(codes, weights, lines, y);
        }
        Layout::Tiles => {
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
        match (codes.n_planes, codes.n_rows) {
            (1, 1) => few_in::<S, B, 1, 1>(codes, weights, lines, y),
            (1, _) => few_in::<S, B, 1, FEW_ROWS>(codes, weights, lines, y),
            (_, 1) => few_in::<S, B, 2, 1>(codes, weights, lines, y),
            _ => few_in::<S, B, 2, FEW_ROWS>(codes, weights, lines, y),
        }
    }
}

/// Rows of weights are read one after the other, as they lie in memory; four lanes of each block's sum are kept. Then
/// the lanes of 16 rows are added and turned, so that the chains over the blocks run in lanes.
///
/// # Safety
/// The instruction set of S is there.
#[inline(always)]
unsafe fn few_in<S: Ints, B: CodedBlock, const P: usize, const M: usize>(
    codes: &Codes,
    weights: &[u8],
    lines: &mut [Line],
    y: &mut [f32],
) {
    let n_out = weights.len() / (codes.n_blocks * B::BYTES);
    let n_quads = codes.n_blocks.div_ceil(QUAD);
    let step = PARTIALS / GROUP / M;
    let (partials, scales) = lines.split_at_mut(PARTIALS);
    for first in (0..n_out).step_by(GROUP) {
        let n = GROUP.min(n_out - first);
        // SAFETY: the instruction set is the caller's promise.
        unsafe {
            let mut chains = [[S::splat(0.0); 2]; M];
            for quad in (0..n_quads).step_by(step) {
                let part = Part {
                    codes,
                    quad,
                    n_quads: step.min(n_quads - quad),
                };
                for o in 0..n {
                    let scales: &mut [u32] = bytemuck::cast_slice_mut(scales);
                    let to = (&mut partials[o..], &mut scales[o..]);
                    part.sum_row::<S, B, P, M>(weights, first + o, to);
                }
                part.add_up::<S, B, M>(partials, scales, &mut chains);
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

/// Some of the blocks of few rows.
struct Part<'a> {
    codes: &'a Codes,
    quad: usize,
    n_quads: usize,
}

impl Part<'_> {
    /// One row of weights: partial sums to `[quad][row of x][16]`, the first four bytes of the blocks to
    /// `[quad][block][16]`, each every 16th from the first on.
    ///
    /// # Safety
    /// The instruction set of S is there.
    #[inline(always)]
    unsafe fn sum_row<S: Ints, B: CodedBlock, const P: usize, const M: usize>(
        &self,
        weights: &[u8],
        out: usize,
        (partials, scales): (&mut [Line], &mut [u32]),
    ) {
        let (n_blocks, n_quads) = (self.codes.n_blocks, self.n_quads);
        let w = &weights[(out * n_blocks + self.quad * QUAD) * B::BYTES..];
        let x = &self.codes.bytes()[self.quad * M * P * QUAD * BLOCK..];
        assert!(x.len() >= n_quads * M * P * QUAD * BLOCK);
        assert!(partials.len() > (n_quads * M - 1) * GROUP);
        assert!(scales.len() > (n_quads * QUAD - 1) * GROUP);
        let n_whole = n_quads.min(w.len() / (QUAD * B::BYTES));
        // SAFETY: places up to `n_quads` are inside, as asserted; four whole blocks stand at each `w`.
        unsafe {
            let mut place = Place {
                x: x.as_ptr(),
                partials: partials.as_mut_ptr(),
                scales: scales.as_mut_ptr(),
            };
            for q in 0..n_whole {
                place.put::<S, B, P, M>(w.as_ptr().add(q * QUAD * B::BYTES));
            }
            // Codes of x past a row's last block are zeros: what stands there is read but does not count.
            if n_whole < n_quads {
                let rest = &w[n_whole * QUAD * B::BYTES..];
                let mut padded = [0u8; QUAD * 64];
                padded[..rest.len()].copy_from_slice(rest);
                place.put::<S, B, P, M>(padded.as_ptr());
            }
        }
    }

    /// Adds the blocks to the chains of 16 outputs of M rows.
    ///
    /// # Safety
    /// The instruction set of S is there.
    #[inline(always)]
    unsafe fn add_up<S: Ints, B: CodedBlock, const M: usize>(
        &self,
        partials: &[Line],
        scales: &[Line],
        chains: &mut [[S::F; 2]; M],
    ) {
        let codes = self.codes;
        let mut held = *chains;
        for q in 0..self.n_quads {
            let block = (self.quad + q) * QUAD;
            let n = QUAD.min(codes.n_blocks - block);
            let of_rows = block * M..(block + n) * M;
            let x_scales = &codes.scales[of_rows.clone()];
            let x_sums = &codes.sums[of_rows.clone()];
            let x_masses = &codes.masses[of_rows];
            let bits = &scales[q * QUAD..][..QUAD];
            for (row, [y, z]) in held.iter_mut().enumerate() {
                let partials = &partials[(q * M + row) * GROUP..][..GROUP];
                // SAFETY: the instruction set is the caller's promise; lines are whole, 16 of them.
                unsafe {
                    let sums = totals::<S>(partials.as_ptr().cast());
                    for (i, sums) in sums.into_iter().enumerate() {
                        if i >= n {
                            break;
                        }
                        let at = i * M + row;
                        let bits = S::load_i((&raw const bits[i]).cast());
                        let s = centred::<S, B>(sums, x_sums[at]);
                        let scale = S::mul(S::low_halves(bits), S::splat(x_scales[at]));
                        *y = S::fma(scale, S::to_f32(s), *y);
                        if B::MINIMA {
                            let m = S::low_halves(S::shr::<16>(bits));
                            *z = S::fma(m, S::splat(x_masses[at]), *z);
                        }
                    }
                }
            }
        }
        *chains = held;
    }
}

/// Where the next four blocks' codes of x stand, and where their sums go.
struct Place {
    x: *const u8,
    partials: *mut Line,
    scales: *mut u32,
}

impl Place {
    /// Four blocks at `w`.
    ///
    /// # Safety
    /// They may be read, and the places read and written; the instruction set of S is there.
    #[inline(always)]
    unsafe fn put<S: Ints, B: CodedBlock, const P: usize, const M: usize>(&mut self, w: *const u8) {
        // SAFETY: the caller's promise.
        unsafe {
            let w_codes = B::codes::<S>(w, B::BYTES);
            for _ in 0..M {
                S::store_i(self.partials.cast(), quad_sums::<S, P>(w_codes, self.x));
                self.x = self.x.add(P * QUAD * BLOCK);
                self.partials = self.partials.wrapping_add(GROUP);
            }
            for i in 0..QUAD {
                *self.scales = w.add(i * B::BYTES).cast::<u32>().read_unaligned();
                self.scales = self.scales.wrapping_add(GROUP);
            }
        }
    }
}

/// The sums of four blocks for 16 outputs: a vector of lanes for each block. `partials`: `[output][block][4]`.
///
/// # Safety
/// The instruction set of S is there; 16 lines may be read.
#[inline(always)]
unsafe fn totals<S: Ints>(partials: *const u8) -> [S::I; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [S::splat_i(0); 4];
        for (i, sums) in sums.iter_mut().enumerate() {
            let p = partials.add(i * 4 * size_of::<Line>());
            let [a, b, c, d] = S::transpose_lanes([
                S::load_i(p),
                S::load_i(p.add(64)),
                S::load_i(p.add(128)),
                S::load_i(p.add(192)),
            ]);
            *sums = S::add_i(S::add_i(a, b), S::add_i(c, d));
        }
        S::transpose_quarters(sums)
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
    let next = rows.as_ptr().wrapping_add(GROUP * row_bytes);
    for (b, codes) in codes.chunks_exact_mut(BLOCK_LINES).enumerate() {
        // The next panel is asked for in order of memory, which this one, read across its rows, is not.
        for line in (0..GROUP * B::BYTES).step_by(size_of::<Line>()) {
            S::prefetch(next.wrapping_add(b * GROUP * B::BYTES + line));
        }
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
