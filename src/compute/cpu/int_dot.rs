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

mod few;
mod many;

use super::blocks::{BLOCK, CodedBlock, Q4_0, Q4_1, Q8_0};
use super::codes::{Codes, Layout};
use super::dot::Weights;
use super::simd::{Ints, Line};
use crate::model::gguf::TensorType;

/// Whether weights of this type are read as integers.
pub(super) fn is_coded(kind: TensorType) -> bool {
    matches!(kind, TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q8_0)
}

/// y `[row][out]`, row stride `weights`' rows. `lines` is working memory.
///
/// # Panics
/// When `y` is too short or the codes are of another length than the weights' rows.
pub(super) fn apply(codes: &Codes, weights: Weights<'_>, lines: &mut Vec<Line>, y: &mut [f32]) {
    if codes.n_rows == 0 {
        return;
    }
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
    let n_lines = match codes.layout {
        Layout::Rows => few::LINES,
        Layout::Tiles => many::n_lines(codes.n_blocks),
    };
    lines.resize(lines.len().max(n_lines), Line([0; 16]));
    match codes.layout {
        Layout::Rows => few::outputs::<B>(codes, weights, lines, y),
        Layout::Tiles => many::outputs::<B>(codes, weights, lines, y),
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
