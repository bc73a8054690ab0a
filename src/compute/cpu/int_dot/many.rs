//! Many rows: the codes of 16 outputs are laid out in a panel, past which all rows go.
//!
//! Invariant: lanes run across outputs; the rows of a tile, filled up with rows of zeros, are worked on together.

use super::super::blocks::{BLOCK, CodedBlock};
use super::super::codes::{Codes, TILE_ROWS};
use super::super::dot::GROUP;
use super::super::simd::{Ints, Line, ints_kernel};
use super::centred;

/// Lines of a panel's block: 16 outputs of 32 weights.
const BLOCK_LINES: usize = GROUP * BLOCK / size_of::<Line>();

/// Working memory: codes, scales and minima.
pub(super) fn n_lines(n_blocks: usize) -> usize {
    n_blocks * (BLOCK_LINES + 2)
}

ints_kernel! {
    /// Outputs of rows in [`super::Layout::Tiles`]; `lines`: as [`n_lines`] says.
    pub(super) fn outputs<B: CodedBlock>(codes: &Codes, weights: &[u8], lines: &mut [Line], y: &mut [f32]) = many_body;
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
    assert!(rows.len() >= GROUP * row_bytes && lines.len() >= n_lines(n_blocks));
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
