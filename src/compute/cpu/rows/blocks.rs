//! Blocks of 32 channels as ggml lays them out: a scale, then codes; 4-bit codes with channel j in the low and channel
//! j + 16 in the high nibble of byte j.

use super::{Layout, Rows};
use crate::compute::cpu::simd::{LANES, Simd};

/// Channels of a block.
const BLOCK: usize = 32;

/// What stands before a block's codes, and what it makes of them.
///
/// # Safety
/// For all methods: the instruction set of `S` is there, and `block` names the first byte of a block (of one in each of 16
/// rows, `stride` bytes apart, in [`Scale::column`]) that may be read.
pub unsafe trait Scale: Copy + Send + Sync {
    /// Bytes before the codes.
    const BYTES: usize;
    /// Lanes.
    type Lanes<S: Simd>: Copy;

    /// The scales of 16 rows.
    unsafe fn column<S: Simd>(block: *const u8, stride: usize) -> Self::Lanes<S>;
    /// The scale of one row, in every lane.
    unsafe fn splat<S: Simd>(block: *const u8) -> Self::Lanes<S>;
    /// The values of levels.
    unsafe fn apply<S: Simd>(level: S::F, scale: Self::Lanes<S>) -> S::F;
}

/// d as f16: level · d.
#[derive(Debug, Clone, Copy)]
pub struct Half;

/// d and m as f16: level · d + m. The product of a half and a level of 4 or 5 bits is exact, so the sum rounds alone.
#[derive(Debug, Clone, Copy)]
pub struct HalfAndMin;

/// OCP's E8M0, a power of two: level · 2^(e − 127).
#[derive(Debug, Clone, Copy)]
pub struct Power;

/// The bits of 2^−127, E8M0's smallest number and a subnormal f32.
const SMALLEST: u32 = 1 << 22;

// SAFETY (of all blocks below): the caller's promise, see the traits; offsets stay inside a row.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
unsafe impl Scale for Half {
    const BYTES: usize = 2;
    type Lanes<S: Simd> = S::F;

    #[inline(always)]
    unsafe fn column<S: Simd>(block: *const u8, stride: usize) -> S::F {
        unsafe { S::load_f16_column(block, stride) }
    }
    #[inline(always)]
    unsafe fn splat<S: Simd>(block: *const u8) -> S::F {
        unsafe { S::splat_f16(block) }
    }
    #[inline(always)]
    unsafe fn apply<S: Simd>(level: S::F, d: S::F) -> S::F {
        unsafe { S::mul(level, d) }
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: offsets stay inside a block.
unsafe impl Scale for HalfAndMin {
    const BYTES: usize = 4;
    type Lanes<S: Simd> = (S::F, S::F);

    #[inline(always)]
    unsafe fn column<S: Simd>(block: *const u8, stride: usize) -> (S::F, S::F) {
        unsafe {
            (
                S::load_f16_column(block, stride),
                S::load_f16_column(block.add(2), stride),
            )
        }
    }
    #[inline(always)]
    unsafe fn splat<S: Simd>(block: *const u8) -> (S::F, S::F) {
        unsafe { S::splat_f16s(block).into() }
    }
    #[inline(always)]
    unsafe fn apply<S: Simd>(level: S::F, (d, m): (S::F, S::F)) -> S::F {
        unsafe { S::fma(level, d, m) }
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: a block has 16 bytes of codes after its scale.
unsafe impl Scale for Power {
    const BYTES: usize = 1;
    type Lanes<S: Simd> = S::F;

    #[inline(always)]
    unsafe fn column<S: Simd>(block: *const u8, stride: usize) -> S::F {
        unsafe {
            let e = S::and(S::load_column(block, stride), 0xff);
            S::from_bits(S::at_least(S::shl::<23>(e), SMALLEST))
        }
    }
    #[inline(always)]
    unsafe fn splat<S: Simd>(block: *const u8) -> S::F {
        unsafe { S::splat(f32::from_bits((u32::from(*block) << 23).max(SMALLEST))) }
    }
    #[inline(always)]
    unsafe fn apply<S: Simd>(level: S::F, d: S::F) -> S::F {
        unsafe { S::mul(level, d) }
    }
}

/// 4-bit codes.
#[derive(Debug, Clone, Copy)]
pub struct Nibbles<C> {
    /// What stands before the codes.
    pub scale: C,
    /// The level of each code.
    pub levels: [f32; 16],
}

impl<C: Scale> Nibbles<C> {
    const BYTES: usize = C::BYTES + BLOCK / 2;
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: offsets stay inside a row.
unsafe impl<C: Scale> Layout for Nibbles<C> {
    const STEP: usize = BLOCK;
    type Held<S: Simd> = ([S::I; 4], C::Lanes<S>);

    fn row_bytes(&self, dim: usize) -> usize {
        dim.div_ceil(BLOCK) * Self::BYTES
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(
        &self,
        row: *const u8,
        rows: Rows<'_>,
        first: usize,
    ) -> ([S::I; 4], C::Lanes<S>) {
        unsafe {
            let block = row.add(first / BLOCK * Self::BYTES);
            (
                S::columns(block.add(C::BYTES), rows.stride),
                C::column::<S>(block, rows.stride),
            )
        }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(
        &self,
        (codes, scale): &([S::I; 4], C::Lanes<S>),
        _: usize,
        c: usize,
    ) -> S::F {
        unsafe {
            let shift = 8 * (c % 4) + 4 * (c / 16);
            let code = S::shr_by(codes[c % 16 / 4], shift as u32);
            C::apply::<S>(S::lookup(S::load(self.levels.as_ptr()), code), *scale)
        }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, _: Rows<'_>, first: usize) -> S::F {
        unsafe {
            let block = row.add(first / BLOCK * Self::BYTES);
            let codes = S::load_u8(block.add(C::BYTES));
            let codes = if first % BLOCK < LANES {
                codes
            } else {
                S::shr::<4>(codes)
            };
            let scale = C::splat::<S>(block);
            S::lookup(C::apply::<S>(S::load(self.levels.as_ptr()), scale), codes)
        }
    }
}

/// 5-bit codes: a word of their fifth bits, channel j's the j-th, then [`Nibbles`] of the others. A level is code − ZERO.
#[derive(Debug, Clone, Copy)]
pub struct Fives<C, const ZERO: u32> {
    /// What stands before the codes.
    pub scale: C,
}

impl<C: Scale, const ZERO: u32> Fives<C, ZERO> {
    const BYTES: usize = C::BYTES + 4 + BLOCK / 2;

    /// Values of codes, of which 4 bits lie at the bottom of `low` and one at bit 4 of `high`.
    ///
    /// # Safety
    /// The instruction set of `S` is there.
    #[inline(always)]
    unsafe fn value<S: Simd>(low: S::I, high: S::I, scale: C::Lanes<S>) -> S::F {
        unsafe {
            let code = S::to_f32(S::or(S::and(low, 15), S::and(high, 16)));
            if ZERO == 0 {
                return C::apply::<S>(code, scale);
            }
            C::apply::<S>(S::sub(code, S::splat(ZERO as f32)), scale)
        }
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: offsets stay inside a row.
unsafe impl<C: Scale, const ZERO: u32> Layout for Fives<C, ZERO> {
    const STEP: usize = BLOCK;
    type Held<S: Simd> = ([S::I; 4], S::I, C::Lanes<S>);

    fn row_bytes(&self, dim: usize) -> usize {
        dim.div_ceil(BLOCK) * Self::BYTES
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> Self::Held<S> {
        unsafe {
            let block = row.add(first / BLOCK * Self::BYTES);
            let bits = block.add(C::BYTES);
            (
                S::columns(bits.add(4), rows.stride),
                S::load_column(bits, rows.stride),
                C::column::<S>(block, rows.stride),
            )
        }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(
        &self,
        (codes, bits, scale): &Self::Held<S>,
        _: usize,
        c: usize,
    ) -> S::F {
        unsafe {
            let shift = 8 * (c % 4) + 4 * (c / 16);
            let high = if c < 4 {
                S::shl_by(*bits, 4 - c as u32)
            } else {
                S::shr_by(*bits, c as u32 - 4)
            };
            Self::value::<S>(S::shr_by(codes[c % 16 / 4], shift as u32), high, *scale)
        }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, _: Rows<'_>, first: usize) -> S::F {
        unsafe {
            let block = row.add(first / BLOCK * Self::BYTES);
            let bits = block.add(C::BYTES);
            let codes = S::load_u8(bits.add(4));
            let codes = if first % BLOCK < LANES {
                codes
            } else {
                S::shr::<4>(codes)
            };
            let high = S::load_codes::<1>(bits.add(first % BLOCK / 8));
            Self::value::<S>(codes, S::shl::<4>(high), C::splat::<S>(block))
        }
    }
}

/// Signed bytes with one f16 scale: q8_0.
#[derive(Debug, Clone, Copy)]
pub struct Bytes;

/// Bytes of a block of [`Bytes`].
const BYTES_BLOCK: usize = 2 + BLOCK;

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: offsets stay inside a row.
unsafe impl Layout for Bytes {
    const STEP: usize = BLOCK;
    type Held<S: Simd> = ([[S::I; 4]; 2], S::F);

    fn row_bytes(&self, dim: usize) -> usize {
        dim.div_ceil(BLOCK) * BYTES_BLOCK
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(
        &self,
        row: *const u8,
        rows: Rows<'_>,
        first: usize,
    ) -> ([[S::I; 4]; 2], S::F) {
        unsafe {
            let block = row.add(first / BLOCK * BYTES_BLOCK);
            let codes = [
                S::columns(block.add(2), rows.stride),
                S::columns(block.add(2 + LANES), rows.stride),
            ];
            (codes, S::load_f16_column(block, rows.stride))
        }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(
        &self,
        (codes, d): &([[S::I; 4]; 2], S::F),
        _: usize,
        c: usize,
    ) -> S::F {
        unsafe {
            let top = S::shl_by(codes[c / 16][c % 16 / 4], (24 - 8 * (c % 4)) as u32);
            S::mul(S::to_f32(S::sar::<24>(top)), *d)
        }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, _: Rows<'_>, first: usize) -> S::F {
        unsafe {
            let block = row.add(first / BLOCK * BYTES_BLOCK);
            let codes = S::load_i8(block.add(2 + first % BLOCK));
            S::mul(codes, S::splat_f16(block))
        }
    }
}
