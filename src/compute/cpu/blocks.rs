//! Weights as a file stores them, 32 at a time, and their way into lanes.
//!
//! Invariant: a lane holds what [`TensorType::dequantize`] gives, to the bit. A product of an f16 scale and a code of at
//! most 13 bits is exact in f32, so the fused `d · q + m` rounds once, as the reference's product and sum do.

use super::simd::{Ints, LANES, Simd};
use crate::model::gguf::TensorType;

/// Weights of a block.
pub const BLOCK: usize = 32;

/// A storage type whose rows are made of blocks of 32 weights.
pub trait Block: 'static {
    /// Bytes of a block.
    const BYTES: usize;

    /// The block's weights: 0 to 15, then 16 to 31.
    ///
    /// # Safety
    /// `BYTES` bytes at `block` may be read; the instruction set of S is there.
    unsafe fn unpack<S: Simd>(block: *const u8) -> [S::F; 2];
}

/// A block whose weights are one scale times (a code less a centre), plus a minimum where the type has them.
pub trait CodedBlock: Block {
    /// What is taken off each code.
    const CENTRE: i32;
    /// Whether a minimum, the second half of a block, is added.
    const MINIMA: bool;

    /// Codes as unsigned bytes of four blocks, `stride` bytes apart, a quarter each: weights 0 to 15, then 16 to 31.
    ///
    /// # Safety
    /// Four blocks may be read; the instruction set of S is there.
    unsafe fn codes<S: Ints>(block: *const u8, stride: usize) -> [S::I; 2];
}

/// Whether kernels read this type as it is stored; others are expanded to f32 when a model is loaded.
pub fn is_native(kind: TensorType) -> bool {
    use TensorType::{BF16, F16, F32, Q4_0, Q4_1, Q8_0};
    matches!(kind, F32 | F16 | BF16 | Q4_0 | Q4_1 | Q8_0)
}

/// f32.
pub struct F32;
/// IEEE half.
pub struct F16;
/// bfloat16.
pub struct Bf16;
/// d: f16, 16 bytes of nibbles; a weight is d · (q − 8).
pub struct Q4_0;
/// d, m: f16, 16 bytes of nibbles; a weight is d · q + m.
pub struct Q4_1;
/// d: f16, 32 signed bytes.
pub struct Q8_0;

const CODES: [f32; LANES] = [
    0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
];
const SIGNED_CODES: [f32; LANES] = [
    -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
];

/// The 32 values that nibbles at `p` choose from a table.
///
/// # Safety
/// 16 bytes at `p` may be read; the instruction set of S is there.
#[inline(always)]
unsafe fn nibbles<S: Simd>(table: S::F, p: *const u8) -> [S::F; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let codes = S::load_u8(p);
        [
            S::lookup(table, codes),
            S::lookup(table, S::shr::<4>(codes)),
        ]
    }
}

impl Block for F32 {
    const BYTES: usize = 4 * BLOCK;
    // SAFETY: the promise is the trait's.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(block: *const u8) -> [S::F; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            [
                S::load(block.cast()),
                S::load(block.cast::<f32>().add(LANES)),
            ]
        }
    }
}

impl Block for F16 {
    const BYTES: usize = 2 * BLOCK;
    // SAFETY: the promise is the trait's.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(block: *const u8) -> [S::F; 2] {
        // SAFETY: the caller's promise.
        unsafe { [S::load_f16(block), S::load_f16(block.add(2 * LANES))] }
    }
}

impl Block for Bf16 {
    const BYTES: usize = 2 * BLOCK;
    // SAFETY: the promise is the trait's.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(block: *const u8) -> [S::F; 2] {
        // SAFETY: the caller's promise.
        unsafe { [S::load_bf16(block), S::load_bf16(block.add(2 * LANES))] }
    }
}

impl Block for Q4_0 {
    const BYTES: usize = 18;
    // SAFETY: the promise is the trait's.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(block: *const u8) -> [S::F; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let d = S::splat_f16(block);
            nibbles::<S>(S::mul(d, S::load(SIGNED_CODES.as_ptr())), block.add(2))
        }
    }
}

impl Block for Q4_1 {
    const BYTES: usize = 20;
    // SAFETY: the promise is the trait's.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(block: *const u8) -> [S::F; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let [d, m] = S::splat_f16s(block);
            nibbles::<S>(S::fma(d, S::load(CODES.as_ptr()), m), block.add(4))
        }
    }
}

impl Block for Q8_0 {
    const BYTES: usize = 34;
    // SAFETY: the promise is the trait's.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(block: *const u8) -> [S::F; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let d = S::splat_f16(block);
            let (low, high) = (block.add(2), block.add(2 + LANES));
            [S::mul(d, S::load_i8(low)), S::mul(d, S::load_i8(high))]
        }
    }
}

/// Nibbles of four runs of 16 bytes, low ones first.
///
/// # Safety
/// The runs may be read; the instruction set of S is there.
#[inline(always)]
unsafe fn nibble_codes<S: Ints>(p: *const u8, stride: usize) -> [S::I; 2] {
    const LOW: u32 = 0x0f0f_0f0f;
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = S::quarters(p, stride);
        [S::and(bytes, LOW), S::and(S::shr::<4>(bytes), LOW)]
    }
}

impl CodedBlock for Q4_0 {
    const CENTRE: i32 = 8;
    const MINIMA: bool = false;
    // SAFETY: the promise is the trait's.
    #[inline(always)]
    unsafe fn codes<S: Ints>(block: *const u8, stride: usize) -> [S::I; 2] {
        // SAFETY: the caller's promise.
        unsafe { nibble_codes::<S>(block.add(2), stride) }
    }
}

impl CodedBlock for Q4_1 {
    const CENTRE: i32 = 0;
    const MINIMA: bool = true;
    // SAFETY: the promise is the trait's.
    #[inline(always)]
    unsafe fn codes<S: Ints>(block: *const u8, stride: usize) -> [S::I; 2] {
        // SAFETY: the caller's promise.
        unsafe { nibble_codes::<S>(block.add(4), stride) }
    }
}

impl CodedBlock for Q8_0 {
    const CENTRE: i32 = 128;
    const MINIMA: bool = false;
    // SAFETY: the promise is the trait's.
    #[inline(always)]
    unsafe fn codes<S: Ints>(block: *const u8, stride: usize) -> [S::I; 2] {
        // Signed bytes plus 128.
        const SIGNS: u32 = 0x8080_8080;
        // SAFETY: the caller's promise.
        unsafe {
            [
                S::xor_i(S::quarters(block.add(2), stride), SIGNS),
                S::xor_i(S::quarters(block.add(18), stride), SIGNS),
            ]
        }
    }
}
