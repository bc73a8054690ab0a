//! Steps and zeros of integer grids as formats store them.
//!
//! Invariant: what comes out is what the format's decoder reads, to the bit.

use crate::compute::cpu::simd::{LANES, Simd};

/// How steps and zeros are stored.
///
/// # Safety
/// For all methods: the instruction set of `S` is there, and `p` names a step or a zero (of one in each of 16 rows,
/// `stride` bytes apart, in the columns) of which [`Steps::BYTES`] bytes may be read.
#[allow(clippy::missing_safety_doc, reason = "one promise for all: see above")]
pub unsafe trait Steps: Send + Sync {
    /// Bytes of one.
    const BYTES: usize;
    /// The steps of 16 rows.
    unsafe fn step_column<S: Simd>(&self, p: *const u8, stride: usize) -> S::F;
    /// The zeros of 16 rows.
    unsafe fn zero_column<S: Simd>(&self, p: *const u8, stride: usize) -> S::F;
    /// A step in every lane.
    unsafe fn step<S: Simd>(&self, p: *const u8) -> S::F;
    /// A zero in every lane.
    unsafe fn zero<S: Simd>(&self, p: *const u8) -> S::F;
}

/// Halves.
#[derive(Debug, Clone, Copy)]
pub struct Halves;

/// A byte each, which stands for an entry of a table.
#[derive(Debug, Clone)]
pub struct ByteSteps {
    /// The step that each byte stands for.
    pub steps: Box<[f32; 256]>,
    /// The zero that each byte stands for.
    pub zeros: Box<[f32; 256]>,
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY (of all blocks below): the caller's promise, see the traits.
unsafe impl Steps for Halves {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn step_column<S: Simd>(&self, p: *const u8, stride: usize) -> S::F {
        unsafe { S::load_f16_column(p, stride) }
    }
    #[inline(always)]
    unsafe fn zero_column<S: Simd>(&self, p: *const u8, stride: usize) -> S::F {
        unsafe { S::load_f16_column(p, stride) }
    }
    #[inline(always)]
    unsafe fn step<S: Simd>(&self, p: *const u8) -> S::F {
        unsafe { S::splat_f16(p) }
    }
    #[inline(always)]
    unsafe fn zero<S: Simd>(&self, p: *const u8) -> S::F {
        unsafe { S::splat_f16(p) }
    }
}

/// Entries of a table for a byte of each of 16 rows.
///
/// # Safety
/// The instruction set is there; the bytes, `stride` apart, may be read.
#[inline(always)]
unsafe fn entries<S: Simd>(table: &[f32; 256], p: *const u8, stride: usize) -> S::F {
    let mut column = [0.0; LANES];
    for (r, x) in column.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *x = table[usize::from(unsafe { *p.add(r * stride) })];
    }
    // SAFETY: the column has 16 entries.
    unsafe { S::load(column.as_ptr()) }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: as above.
unsafe impl Steps for ByteSteps {
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn step_column<S: Simd>(&self, p: *const u8, stride: usize) -> S::F {
        unsafe { entries::<S>(&self.steps, p, stride) }
    }
    #[inline(always)]
    unsafe fn zero_column<S: Simd>(&self, p: *const u8, stride: usize) -> S::F {
        unsafe { entries::<S>(&self.zeros, p, stride) }
    }
    #[inline(always)]
    unsafe fn step<S: Simd>(&self, p: *const u8) -> S::F {
        unsafe { S::splat(self.steps[usize::from(*p)]) }
    }
    #[inline(always)]
    unsafe fn zero<S: Simd>(&self, p: *const u8) -> S::F {
        unsafe { S::splat(self.zeros[usize::from(*p)]) }
    }
}
