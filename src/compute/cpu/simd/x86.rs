//! The lanes of x86-64: one register of AVX-512, or two of AVX2.
//!
//! Every method is one or a few intrinsics; it is inlined into a function that has the instruction set.

use std::arch::x86_64::*;

use super::{LANES, Simd};

/// AVX-512 F, VL, BW and DQ.
#[derive(Debug, Clone, Copy)]
pub struct Avx512;

/// AVX2, FMA and F16C: lanes 0 to 7 and 8 to 15.
#[derive(Debug, Clone, Copy)]
pub struct Avx2;

// SAFETY (of all blocks below): the caller's promise, see the trait.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m512) {
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> __m512i {
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_column(p: *const u8, stride: usize) -> __m512i {
        unsafe {
            let at = |i: usize| p.add(i * stride).cast::<i32>().read_unaligned();
            _mm512_setr_epi32(
                at(0),
                at(1),
                at(2),
                at(3),
                at(4),
                at(5),
                at(6),
                at(7),
                at(8),
                at(9),
                at(10),
                at(11),
                at(12),
                at(13),
                at(14),
                at(15),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_f16_column(p: *const u8, stride: usize) -> __m512 {
        unsafe { _mm512_cvtph_ps(halves(p, stride)) }
    }
    #[inline(always)]
    unsafe fn shr<const N: u32>(i: __m512i) -> __m512i {
        unsafe { _mm512_srli_epi32::<N>(i) }
    }
    #[inline(always)]
    unsafe fn lookup(table: __m512, i: __m512i) -> __m512 {
        unsafe { _mm512_permutexvar_ps(i, table) }
    }
    #[inline(always)]
    unsafe fn from_bits(i: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(i) }
    }
    #[inline(always)]
    unsafe fn to_f32(i: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(i) }
    }
    #[inline(always)]
    unsafe fn and(i: __m512i, mask: u32) -> __m512i {
        unsafe { _mm512_and_si512(i, _mm512_set1_epi32(mask.cast_signed())) }
    }
    #[inline(always)]
    unsafe fn shl<const N: u32>(i: __m512i) -> __m512i {
        unsafe { _mm512_slli_epi32::<N>(i) }
    }
    #[inline(always)]
    unsafe fn sums(x: &[__m512; LANES]) -> __m512 {
        unsafe {
            // Each level adds the halves of two sets of partial sums side by side.
            let by_8 = |i: usize| {
                let (a, b) = (x[2 * i], x[2 * i + 1]);
                _mm512_add_ps(
                    _mm512_shuffle_f32x4::<0x44>(a, b),
                    _mm512_shuffle_f32x4::<0xee>(a, b),
                )
            };
            let by_4 = |i: usize| {
                let (a, b) = (by_8(2 * i), by_8(2 * i + 1));
                _mm512_add_ps(
                    _mm512_shuffle_f32x4::<0x88>(a, b),
                    _mm512_shuffle_f32x4::<0xdd>(a, b),
                )
            };
            let by_2 = |i: usize| {
                let (a, b) = (by_4(2 * i), by_4(2 * i + 1));
                _mm512_add_ps(
                    _mm512_shuffle_ps::<0x44>(a, b),
                    _mm512_shuffle_ps::<0xee>(a, b),
                )
            };
            let (a, b) = (by_2(0), by_2(1));
            _mm512_add_ps(
                _mm512_shuffle_ps::<0x88>(a, b),
                _mm512_shuffle_ps::<0xdd>(a, b),
            )
        }
    }
}

/// 16 halves, `stride` bytes apart.
///
/// # Safety
/// The halves may be read; AVX2 is there.
#[inline(always)]
unsafe fn halves(p: *const u8, stride: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let at = |i: usize| p.add(i * stride).cast::<i16>().read_unaligned();
        _mm256_setr_epi16(
            at(0),
            at(1),
            at(2),
            at(3),
            at(4),
            at(5),
            at(6),
            at(7),
            at(8),
            at(9),
            at(10),
            at(11),
            at(12),
            at(13),
            at(14),
            at(15),
        )
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
impl Simd for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Self::F) {
        unsafe {
            _mm256_storeu_ps(p, x[0]);
            _mm256_storeu_ps(p.add(8), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        unsafe {
            [
                _mm256_fmadd_ps(a[0], b[0], c[0]),
                _mm256_fmadd_ps(a[1], b[1], c[1]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        unsafe { [0, 16].map(|at| _mm256_cvtph_ps(_mm_loadu_si128(p.add(at).cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        unsafe {
            [0, 16].map(|at| {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(at).cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::F {
        unsafe {
            [0, 8].map(|at| {
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(at).cast())))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::I {
        unsafe { [0, 8].map(|at| _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(at).cast()))) }
    }
    #[inline(always)]
    unsafe fn load_column(p: *const u8, stride: usize) -> Self::I {
        unsafe {
            let at = |i: usize| p.add(i * stride).cast::<i32>().read_unaligned();
            [0, 8].map(|k| {
                _mm256_setr_epi32(
                    at(k),
                    at(k + 1),
                    at(k + 2),
                    at(k + 3),
                    at(k + 4),
                    at(k + 5),
                    at(k + 6),
                    at(k + 7),
                )
            })
        }
    }
    #[inline(always)]
    unsafe fn load_f16_column(p: *const u8, stride: usize) -> Self::F {
        unsafe {
            let h = halves(p, stride);
            [
                _mm256_cvtph_ps(_mm256_castsi256_si128(h)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(h)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn shr<const N: u32>(i: Self::I) -> Self::I {
        unsafe { i.map(|i| _mm256_srl_epi32(i, _mm_cvtsi32_si128(N as i32))) }
    }
    #[inline(always)]
    unsafe fn lookup(table: Self::F, i: Self::I) -> Self::F {
        unsafe {
            i.map(|i| {
                let (low, high) = (
                    _mm256_permutevar8x32_ps(table[0], i),
                    _mm256_permutevar8x32_ps(table[1], i),
                );
                // Bit 3 of the index chooses, as the sign bit.
                _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(i)))
            })
        }
    }
    #[inline(always)]
    unsafe fn from_bits(i: Self::I) -> Self::F {
        unsafe { i.map(|i| _mm256_castsi256_ps(i)) }
    }
    #[inline(always)]
    unsafe fn to_f32(i: Self::I) -> Self::F {
        unsafe { i.map(|i| _mm256_cvtepi32_ps(i)) }
    }
    #[inline(always)]
    unsafe fn and(i: Self::I, mask: u32) -> Self::I {
        unsafe { i.map(|i| _mm256_and_si256(i, _mm256_set1_epi32(mask.cast_signed()))) }
    }
    #[inline(always)]
    unsafe fn shl<const N: u32>(i: Self::I) -> Self::I {
        unsafe { i.map(|i| _mm256_sll_epi32(i, _mm_cvtsi32_si128(N as i32))) }
    }
    #[inline(always)]
    unsafe fn sums(x: &[Self::F; LANES]) -> Self::F {
        unsafe {
            // Lane i + lane i + 8 is one addition; then as in AVX-512, on half the vectors at a time.
            let by_8 = |i: usize| _mm256_add_ps(x[i][0], x[i][1]);
            let by_4 = |i: usize, j: usize| {
                let (a, b) = (by_8(i), by_8(j));
                _mm256_add_ps(
                    _mm256_permute2f128_ps::<0x20>(a, b),
                    _mm256_permute2f128_ps::<0x31>(a, b),
                )
            };
            // Vectors j and j + 1 of each group of four, j = `first`.
            let half = |first: usize| {
                let p = [0, 1, 2, 3].map(|g| by_4(4 * g + first, 4 * g + first + 1));
                let by_2 = |a: __m256, b: __m256| {
                    _mm256_add_ps(
                        _mm256_shuffle_ps::<0x44>(a, b),
                        _mm256_shuffle_ps::<0xee>(a, b),
                    )
                };
                let (a, b) = (by_2(p[0], p[1]), by_2(p[2], p[3]));
                _mm256_add_ps(
                    _mm256_shuffle_ps::<0x88>(a, b),
                    _mm256_shuffle_ps::<0xdd>(a, b),
                )
            };
            [half(0), half(2)]
        }
    }
}
