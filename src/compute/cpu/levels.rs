//! Streams of codes of a few bits to the levels that they stand for.
//!
//! Invariant: a number is level · scale, rounded once, as in the plain loop that takes what vectors leave.

use super::simd::{LANES, Simd, simd_kernel};

simd_kernel! {
    /// Decodes the whole vectors of a stream of codes of `bits` bits, 1 to 4, least significant bit first; returns how many
    /// numbers that were. `levels` repeat if there are fewer than 16.
    ///
    /// # Panics
    /// When `codes` is too short for `x`.
    pub fn look_up(bits: usize, levels: &[f32; LANES], codes: &[u8], scale: f32, x: &mut [f32]) -> usize = look_up_body;
}

/// # Safety
/// The instruction set of `S` is there.
#[inline(always)]
unsafe fn look_up_body<S: Simd>(
    bits: usize,
    levels: &[f32; LANES],
    codes: &[u8],
    scale: f32,
    x: &mut [f32],
) -> usize {
    // SAFETY: the caller's promise.
    unsafe {
        match bits {
            1 => of_bits::<S, 1>(levels, codes, scale, x),
            2 => of_bits::<S, 2>(levels, codes, scale, x),
            3 => of_bits::<S, 3>(levels, codes, scale, x),
            _ => of_bits::<S, 4>(levels, codes, scale, x),
        }
    }
}

/// # Safety
/// The instruction set of `S` is there.
#[inline(always)]
unsafe fn of_bits<S: Simd, const B: usize>(
    levels: &[f32; LANES],
    codes: &[u8],
    scale: f32,
    x: &mut [f32],
) -> usize {
    let (vectors, _) = x.as_chunks_mut::<LANES>();
    // Sixteen codes take two bytes for each of their bits.
    let codes = &codes[..vectors.len() * 2 * B];
    // SAFETY: the caller's promise; each chunk of codes and of numbers is a whole vector's.
    unsafe {
        let table = S::mul(S::load(levels.as_ptr()), S::splat(scale));
        for (x, codes) in vectors.iter_mut().zip(codes.chunks_exact(2 * B)) {
            let codes = S::load_codes::<B>(codes.as_ptr());
            S::store(x.as_mut_ptr(), S::lookup(table, codes));
        }
    }
    vectors.len() * LANES
}
