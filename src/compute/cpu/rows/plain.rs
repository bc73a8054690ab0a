//! Rows of plain numbers: f32, f16, bf16, little-endian, channels in order.

use super::{Layout, Rows};
use crate::compute::cpu::simd::Simd;

/// IEEE single. Fits any number of channels: decoded rows are such rows.
#[derive(Debug, Clone, Copy)]
pub struct F32;

/// IEEE half.
#[derive(Debug, Clone, Copy)]
pub struct F16;

/// The upper half of a single.
#[derive(Debug, Clone, Copy)]
pub struct Bf16;

// SAFETY (of all blocks below): the caller's promise, see the trait; offsets stay inside a row.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
unsafe impl Layout for F32 {
    const STEP: usize = 4;
    type Held<S: Simd> = [S::I; 4];

    fn row_bytes(&self, dim: usize) -> usize {
        4 * dim
    }
    fn fits(&self, _dim: usize) -> bool {
        true
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> [S::I; 4] {
        unsafe { S::columns(row.add(4 * first), rows.stride) }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(&self, held: &[S::I; 4], _: usize, c: usize) -> S::F {
        unsafe { S::from_bits(held[c]) }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, _: Rows<'_>, first: usize) -> S::F {
        unsafe { S::load(row.add(4 * first).cast()) }
    }
    #[inline(always)]
    unsafe fn rest<S: Simd>(&self, row: *const u8, rows: Rows<'_>, c: usize) -> S::F {
        unsafe { S::from_bits(S::load_column(row.add(4 * c), rows.stride)) }
    }
    #[inline(always)]
    unsafe fn single(&self, row: *const u8, c: usize) -> f32 {
        unsafe { row.add(4 * c).cast::<f32>().read_unaligned() }
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: offsets stay inside a row.
unsafe impl Layout for F16 {
    const STEP: usize = 8;
    type Held<S: Simd> = [S::F; 8];

    fn row_bytes(&self, dim: usize) -> usize {
        2 * dim
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> [S::F; 8] {
        unsafe { S::f16_columns(row.add(2 * first), rows.stride) }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(&self, held: &[S::F; 8], _: usize, c: usize) -> S::F {
        held[c]
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, _: Rows<'_>, first: usize) -> S::F {
        unsafe { S::load_f16(row.add(2 * first)) }
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: offsets stay inside a row.
unsafe impl Layout for Bf16 {
    const STEP: usize = 8;
    type Held<S: Simd> = [S::I; 4];

    fn row_bytes(&self, dim: usize) -> usize {
        2 * dim
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> [S::I; 4] {
        unsafe { S::columns(row.add(2 * first), rows.stride) }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(&self, held: &[S::I; 4], _: usize, c: usize) -> S::F {
        unsafe {
            let pair = held[c / 2];
            S::from_bits(if c.is_multiple_of(2) {
                S::shl::<16>(pair)
            } else {
                S::and(pair, 0xffff_0000)
            })
        }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, _: Rows<'_>, first: usize) -> S::F {
        unsafe { S::load_bf16(row.add(2 * first)) }
    }
}
