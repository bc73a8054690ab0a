//! Floats of 4 bits under scales of a row (NVFP4), and of 8 bits.

use super::{Layout, Rows};
use crate::compute::cpu::simd::{LANES, Simd};

/// Channels that are held at a time: 16 bytes of 4-bit codes.
const STEP: usize = 32;

/// NVFP4: E2M1 codes of a whole row, then an E4M3 scale for every 16 channels. A value is level · (scale · `tensor_scale`),
/// plus the channel's bias if there is one.
#[derive(Debug, Clone)]
pub struct Nvfp4<const BIASED: bool> {
    /// The level of each code.
    pub levels: [f32; LANES],
    /// A factor of all scales.
    pub tensor_scale: f32,
    /// By channel, if there is any.
    pub bias: Vec<f32>,
}

/// What makes the bits of an E4M3 number, moved into an f32's exponent and mantissa, that number: exact.
const E4M3_UNIT: f32 = f32::from_bits((127 + 120) << 23);

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY (of all blocks below): the caller's promise, see the trait; offsets stay inside a row.
unsafe impl<const BIASED: bool> Layout for Nvfp4<BIASED> {
    const STEP: usize = STEP;
    type Held<S: Simd> = ([S::I; 4], [S::F; 2]);

    fn row_bytes(&self, dim: usize) -> usize {
        dim / 16 * 9
    }
    fn fits(&self, dim: usize) -> bool {
        dim.is_multiple_of(STEP) && (!BIASED || self.bias.len() >= dim)
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(
        &self,
        row: *const u8,
        rows: Rows<'_>,
        first: usize,
    ) -> ([S::I; 4], [S::F; 2]) {
        unsafe {
            // The two bytes before a step's scales belong to the row, too; those after them may not.
            let at = rows.dim / 2 + first / 16 - 2;
            let scales = S::load_column(row.add(at), rows.stride);
            let scale = |bits: S::I| {
                let number = S::mul(S::from_bits(S::shl::<20>(bits)), S::splat(E4M3_UNIT));
                S::mul(number, S::splat(self.tensor_scale))
            };
            let scales = [
                scale(S::and(S::shr::<16>(scales), 0x7f)),
                scale(S::and(S::shr::<24>(scales), 0x7f)),
            ];
            (S::columns(row.add(first / 2), rows.stride), scales)
        }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(
        &self,
        (codes, scales): &([S::I; 4], [S::F; 2]),
        first: usize,
        c: usize,
    ) -> S::F {
        unsafe {
            let code = S::shr_by(codes[c / 8], (4 * (c % 8)) as u32);
            let level = S::lookup(S::load(self.levels.as_ptr()), code);
            let x = S::mul(level, scales[c / 16]);
            if BIASED {
                return S::add(x, S::splat(*self.bias.as_ptr().add(first + c)));
            }
            x
        }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> S::F {
        unsafe {
            let scale = u32::from(*row.add(rows.dim / 2 + first / 16)) & 0x7f;
            let step = f32::from_bits(scale << 20) * E4M3_UNIT * self.tensor_scale;
            let table = S::mul(S::load(self.levels.as_ptr()), S::splat(step));
            let x = S::lookup(table, S::load_codes::<4>(row.add(first / 2)));
            if BIASED {
                return S::add(x, S::load(self.bias.as_ptr().add(first)));
            }
            x
        }
    }
}

/// 8-bit floats with EXPONENT bits of exponent, all finite: a value is number · `down`, where `down` is the row's own first
/// four bytes if it is not given.
#[derive(Debug, Clone, Copy)]
pub struct Float8<const EXPONENT: u32> {
    /// The factor of all rows.
    pub down: Option<f32>,
}

impl<const EXPONENT: u32> Float8<EXPONENT> {
    /// As [`E4M3_UNIT`]: the exponent's bias becomes f32's.
    const UNIT: f32 = f32::from_bits((127 + 127 - ((1 << (EXPONENT - 1)) - 1)) << 23);

    #[inline(always)]
    fn codes_at(&self) -> usize {
        if self.down.is_some() { 0 } else { 4 }
    }

    /// The number in each lane's top byte, the bytes below it being anything.
    ///
    /// # Safety
    /// The instruction set of `S` is there.
    #[inline(always)]
    unsafe fn number<S: Simd>(top: S::I) -> S::F {
        // SAFETY: the caller's promise.
        unsafe {
            // The sign stays on top; exponent and mantissa move down to where an f32 has the last bits of its exponent.
            let bits = if EXPONENT == 4 {
                S::and(S::sar::<4>(top), 0x87f0_0000)
            } else {
                S::and(S::sar::<3>(top), 0x8fe0_0000)
            };
            S::mul(S::from_bits(bits), S::splat(Self::UNIT))
        }
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: offsets stay inside a row.
unsafe impl<const EXPONENT: u32> Layout for Float8<EXPONENT> {
    const STEP: usize = LANES;
    type Held<S: Simd> = ([S::I; 4], S::F);

    fn row_bytes(&self, dim: usize) -> usize {
        self.codes_at() + dim
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(
        &self,
        row: *const u8,
        rows: Rows<'_>,
        first: usize,
    ) -> ([S::I; 4], S::F) {
        unsafe {
            let down = match self.down {
                Some(down) => S::splat(down),
                None => S::from_bits(S::load_column(row, rows.stride)),
            };
            let codes = row.add(self.codes_at() + first);
            (S::columns(codes, rows.stride), down)
        }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(
        &self,
        (codes, down): &([S::I; 4], S::F),
        _: usize,
        c: usize,
    ) -> S::F {
        unsafe {
            let top = S::shl_by(codes[c / 4], (24 - 8 * (c % 4)) as u32);
            S::mul(Self::number::<S>(top), *down)
        }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, _: Rows<'_>, first: usize) -> S::F {
        unsafe {
            let down = match self.down {
                Some(down) => down,
                None => row.cast::<f32>().read_unaligned(),
            };
            let codes = S::load_u8(row.add(self.codes_at() + first));
            S::mul(Self::number::<S>(S::shl::<24>(codes)), S::splat(down))
        }
    }
}
