//! Steps and zeros of integer grids as formats store them.
//!
//! Invariant: what comes out is what the format's decoder reads, to the bit.

use crate::compute::cpu::simd::{LANES, Simd};

/// How steps and zeros are stored. One type with all ways, not one type each: they are read once for many codes, and each
/// type would be another set of kernels.
#[derive(Debug, Clone)]
pub enum Steps {
    /// Halves.
    F16,
    /// The upper halves of singles.
    Bf16,
    /// A byte each, which stands for an entry of a table: the step of each byte, and the zero of each.
    Bytes(Box<[[f32; 256]; 2]>),
}

/// One of the two numbers of a group.
#[derive(Debug, Clone, Copy)]
pub(super) enum Number {
    Step = 0,
    Zero = 1,
}

impl Steps {
    /// Bytes of one.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Steps::F16 | Steps::Bf16 => 2,
            Steps::Bytes(_) => 1,
        }
    }

    /// A number of each of 16 rows.
    ///
    /// # Safety
    /// The instruction set of `S` is there; `p` names a number in the first of 16 rows, `stride` bytes apart, that may be
    /// read, and so may the two bytes before it.
    #[inline(always)]
    pub(super) unsafe fn column<S: Simd>(
        &self,
        number: Number,
        p: *const u8,
        stride: usize,
    ) -> S::F {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Steps::F16 => S::load_f16_column(p, stride),
                Steps::Bf16 => S::from_bits(S::and(S::load_column(p.sub(2), stride), 0xffff_0000)),
                Steps::Bytes(tables) => entries::<S>(&tables[number as usize], p, stride),
            }
        }
    }

    /// A number in every lane.
    ///
    /// # Safety
    /// The instruction set of `S` is there; `p` names a number that may be read.
    #[inline(always)]
    pub(super) unsafe fn splat<S: Simd>(&self, number: Number, p: *const u8) -> S::F {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Steps::F16 => S::splat_f16(p),
                Steps::Bf16 => {
                    let bits = p.cast::<u16>().read_unaligned().to_le();
                    S::splat(f32::from_bits(u32::from(bits) << 16))
                }
                Steps::Bytes(tables) => S::splat(tables[number as usize][usize::from(*p)]),
            }
        }
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
