//! One or two rows: weights are read in registers as they come.
//!
//! Invariant: rows of weights are read one after the other, in order of memory.

use super::super::blocks::{BLOCK, CodedBlock};
use super::super::codes::{Codes, FEW_ROWS, QUAD};
use super::super::dot::GROUP;
use super::super::simd::{Ints, Line, ints_kernel};
use super::centred;

/// Vectors of partial sums kept at once, 32 KiB.
const PARTIALS: usize = 512;

/// Working memory.
pub(super) const LINES: usize = PARTIALS + PARTIALS / GROUP * QUAD;

ints_kernel! {
    /// Outputs of rows in [`super::Layout::Rows`]; `lines`: [`LINES`].
    pub(super) fn outputs<B: CodedBlock>(codes: &Codes, weights: &[u8], lines: &mut [Line], y: &mut [f32]) = few_body;
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
