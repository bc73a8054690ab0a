//! Lanes as an array: the twin of the intrinsics, and the path of processors other than x86-64.

use half::{bf16, f16};

use super::{LANES, Simd, code_words};
use crate::compute::cpu::vector::sum_lanes;

/// Plain code.
#[derive(Debug, Clone, Copy)]
pub struct Lanes;

#[inline(always)]
fn each<T>(f: impl FnMut(usize) -> T) -> [T; LANES] {
    std::array::from_fn(f)
}

/// # Safety
/// N bytes at `p` may be read.
#[inline(always)]
unsafe fn bytes<const N: usize>(p: *const u8) -> [u8; N] {
    // SAFETY: the caller's promise.
    unsafe { p.cast::<[u8; N]>().read_unaligned() }
}

// SAFETY (of all blocks below): the caller's promise, see the trait.
impl Simd for Lanes {
    type F = [f32; LANES];
    type I = [u32; LANES];
    const WIDE: bool = false;
    const ABREAST: usize = if cfg!(target_arch = "x86_64") { 1 } else { 4 };

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u8) -> Self::F {
        // SAFETY: see above.
        [f16::from_le_bytes(unsafe { bytes(p) }).to_f32(); LANES]
    }
    #[inline(always)]
    unsafe fn splat_f16s(p: *const u8) -> [Self::F; 2] {
        // SAFETY: see above.
        unsafe { [Self::splat_f16(p), Self::splat_f16(p.add(2))] }
    }
    #[inline(always)]
    fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: see above.
        unsafe { p.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: see above.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        each(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        // SAFETY: see above.
        let b = unsafe { bytes::<{ 2 * LANES }>(p) };
        each(|i| f16::from_le_bytes([b[2 * i], b[2 * i + 1]]).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        // SAFETY: see above.
        let b = unsafe { bytes::<{ 2 * LANES }>(p) };
        each(|i| bf16::from_le_bytes([b[2 * i], b[2 * i + 1]]).to_f32())
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::F {
        // SAFETY: see above.
        let b = unsafe { bytes::<LANES>(p) };
        each(|i| f32::from(b[i].cast_signed()))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::I {
        // SAFETY: see above.
        let b = unsafe { bytes::<LANES>(p) };
        each(|i| u32::from(b[i]))
    }
    #[inline(always)]
    unsafe fn load_column(p: *const u8, stride: usize) -> Self::I {
        // SAFETY: see above.
        each(|i| u32::from_le_bytes(unsafe { bytes(p.add(i * stride)) }))
    }
    #[inline(always)]
    unsafe fn load_f16_column(p: *const u8, stride: usize) -> Self::F {
        // SAFETY: see above.
        each(|i| f16::from_le_bytes(unsafe { bytes(p.add(i * stride)) }).to_f32())
    }
    #[inline(always)]
    unsafe fn columns(p: *const u8, stride: usize) -> [Self::I; 4] {
        // SAFETY: see above.
        let rows = each(|i| unsafe { bytes::<16>(p.add(i * stride)) });
        [0, 4, 8, 12]
            .map(|at| rows.map(|r| u32::from_le_bytes([r[at], r[at + 1], r[at + 2], r[at + 3]])))
    }
    #[inline(always)]
    unsafe fn f16_columns(p: *const u8, stride: usize) -> [Self::F; 8] {
        // SAFETY: see above.
        let rows = each(|i| unsafe { bytes::<16>(p.add(i * stride)) });
        [0, 2, 4, 6, 8, 10, 12, 14]
            .map(|at| rows.map(|r| f16::from_le_bytes([r[at], r[at + 1]]).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_codes<const B: usize>(p: *const u8) -> Self::I {
        // SAFETY: see above.
        let (words, early) = unsafe { code_words::<B>(p) };
        each(|i| words[i / 8] >> ((B * (i % 8)) as u32 + early * (i / 8) as u32))
    }
    #[inline(always)]
    unsafe fn shr_by(i: Self::I, n: u32) -> Self::I {
        i.map(|i| i >> n)
    }
    #[inline(always)]
    unsafe fn shl_by(i: Self::I, n: u32) -> Self::I {
        i.map(|i| i << n)
    }
    #[inline(always)]
    unsafe fn sar<const N: u32>(i: Self::I) -> Self::I {
        i.map(|i| (i.cast_signed() >> N).cast_unsigned())
    }
    #[inline(always)]
    unsafe fn at_least(i: Self::I, n: u32) -> Self::I {
        i.map(|i| i.max(n))
    }
    #[inline(always)]
    unsafe fn shr<const N: u32>(i: Self::I) -> Self::I {
        i.map(|i| i >> N)
    }
    #[inline(always)]
    unsafe fn lookup(table: Self::F, i: Self::I) -> Self::F {
        i.map(|i| table[(i & 15) as usize])
    }
    #[inline(always)]
    unsafe fn from_bits(i: Self::I) -> Self::F {
        i.map(f32::from_bits)
    }
    #[inline(always)]
    unsafe fn to_f32(i: Self::I) -> Self::F {
        i.map(|i| i.cast_signed() as f32)
    }
    #[inline(always)]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        each(|i| a[i] | b[i])
    }
    #[inline(always)]
    unsafe fn and(i: Self::I, mask: u32) -> Self::I {
        i.map(|i| i & mask)
    }
    #[inline(always)]
    unsafe fn shl<const N: u32>(i: Self::I) -> Self::I {
        i.map(|i| i << N)
    }
    #[inline(always)]
    unsafe fn sums(x: &[Self::F; LANES]) -> Self::F {
        each(|lane| sum_lanes(&x[lane % 4 * 4 + lane / 4]))
    }
}
