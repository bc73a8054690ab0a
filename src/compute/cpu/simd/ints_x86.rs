//! Integer lanes of x86-64: one register of AVX-512 with VNNI, or two of AVX2.

use std::arch::x86_64::*;

use super::{Avx2, Avx512, Ints};

// SAFETY (of all blocks below): the caller's promise, see the trait.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
impl Ints for Avx512 {
    #[inline(always)]
    unsafe fn load_i(p: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_i(p: *mut u8, i: __m512i) {
        unsafe { _mm512_storeu_si512(p.cast(), i) }
    }
    #[inline(always)]
    unsafe fn splat_i(i: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(i) }
    }
    #[inline(always)]
    unsafe fn add_i(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn xor_i(i: __m512i, mask: u32) -> __m512i {
        unsafe { _mm512_xor_si512(i, _mm512_set1_epi32(mask.cast_signed())) }
    }
    #[inline(always)]
    unsafe fn quarters(p: *const u8, stride: usize) -> __m512i {
        unsafe {
            let [low, high] = Avx2::quarters(p, stride);
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        }
    }
    #[inline(always)]
    unsafe fn dot(sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sum, w, x) }
    }
    #[inline(always)]
    unsafe fn transpose_lanes(v: [__m512i; 4]) -> [__m512i; 4] {
        unsafe {
            let a = _mm512_unpacklo_epi32(v[0], v[1]);
            let b = _mm512_unpackhi_epi32(v[0], v[1]);
            let c = _mm512_unpacklo_epi32(v[2], v[3]);
            let d = _mm512_unpackhi_epi32(v[2], v[3]);
            [
                _mm512_unpacklo_epi64(a, c),
                _mm512_unpackhi_epi64(a, c),
                _mm512_unpacklo_epi64(b, d),
                _mm512_unpackhi_epi64(b, d),
            ]
        }
    }
    #[inline(always)]
    unsafe fn transpose_quarters(v: [__m512i; 4]) -> [__m512i; 4] {
        unsafe {
            let a = _mm512_shuffle_i32x4::<0x44>(v[0], v[1]);
            let b = _mm512_shuffle_i32x4::<0xee>(v[0], v[1]);
            let c = _mm512_shuffle_i32x4::<0x44>(v[2], v[3]);
            let d = _mm512_shuffle_i32x4::<0xee>(v[2], v[3]);
            [
                _mm512_shuffle_i32x4::<0x88>(a, c),
                _mm512_shuffle_i32x4::<0xdd>(a, c),
                _mm512_shuffle_i32x4::<0x88>(b, d),
                _mm512_shuffle_i32x4::<0xdd>(b, d),
            ]
        }
    }
    #[inline(always)]
    unsafe fn low_halves(i: __m512i) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(i)) }
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
impl Ints for Avx2 {
    #[inline(always)]
    unsafe fn load_i(p: *const u8) -> Self::I {
        unsafe {
            [
                _mm256_loadu_si256(p.cast()),
                _mm256_loadu_si256(p.add(32).cast()),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_i(p: *mut u8, i: Self::I) {
        unsafe {
            _mm256_storeu_si256(p.cast(), i[0]);
            _mm256_storeu_si256(p.add(32).cast(), i[1]);
        }
    }
    #[inline(always)]
    unsafe fn splat_i(i: i32) -> Self::I {
        unsafe { [_mm256_set1_epi32(i); 2] }
    }
    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn xor_i(i: Self::I, mask: u32) -> Self::I {
        unsafe {
            let mask = _mm256_set1_epi32(mask.cast_signed());
            [_mm256_xor_si256(i[0], mask), _mm256_xor_si256(i[1], mask)]
        }
    }
    #[inline(always)]
    unsafe fn quarters(p: *const u8, stride: usize) -> Self::I {
        unsafe {
            [
                _mm256_loadu2_m128i(p.add(stride).cast(), p.cast()),
                _mm256_loadu2_m128i(p.add(3 * stride).cast(), p.add(2 * stride).cast()),
            ]
        }
    }
    #[inline(always)]
    unsafe fn dot(sum: Self::I, w: Self::I, x: Self::I) -> Self::I {
        unsafe { [dot_half(sum[0], w[0], x[0]), dot_half(sum[1], w[1], x[1])] }
    }
    #[inline(always)]
    unsafe fn transpose_lanes(v: [Self::I; 4]) -> [Self::I; 4] {
        unsafe {
            let low = transpose_half([v[0][0], v[1][0], v[2][0], v[3][0]]);
            let high = transpose_half([v[0][1], v[1][1], v[2][1], v[3][1]]);
            [
                [low[0], high[0]],
                [low[1], high[1]],
                [low[2], high[2]],
                [low[3], high[3]],
            ]
        }
    }
    #[inline(always)]
    unsafe fn transpose_quarters(v: [Self::I; 4]) -> [Self::I; 4] {
        unsafe {
            [
                [
                    _mm256_permute2x128_si256::<0x20>(v[0][0], v[1][0]),
                    _mm256_permute2x128_si256::<0x20>(v[2][0], v[3][0]),
                ],
                [
                    _mm256_permute2x128_si256::<0x31>(v[0][0], v[1][0]),
                    _mm256_permute2x128_si256::<0x31>(v[2][0], v[3][0]),
                ],
                [
                    _mm256_permute2x128_si256::<0x20>(v[0][1], v[1][1]),
                    _mm256_permute2x128_si256::<0x20>(v[2][1], v[3][1]),
                ],
                [
                    _mm256_permute2x128_si256::<0x31>(v[0][1], v[1][1]),
                    _mm256_permute2x128_si256::<0x31>(v[2][1], v[3][1]),
                ],
            ]
        }
    }
    #[inline(always)]
    unsafe fn low_halves(i: Self::I) -> Self::F {
        unsafe {
            let mask = _mm256_set1_epi32(0xffff);
            // Packing works within 128 bits: its quarters come out as 0, 2, 1, 3.
            let packed =
                _mm256_packus_epi32(_mm256_and_si256(i[0], mask), _mm256_and_si256(i[1], mask));
            let halves = _mm256_permute4x64_epi64::<0xd8>(packed);
            [
                _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)),
            ]
        }
    }
}

/// Even and odd bytes apart, as 16 bits: the instruction for bytes saturates.
#[inline(always)]
unsafe fn dot_half(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let w_even = _mm256_and_si256(w, _mm256_set1_epi16(0xff));
        let w_odd = _mm256_srli_epi16::<8>(w);
        let x_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x));
        let x_odd = _mm256_srai_epi16::<8>(x);
        let even = _mm256_add_epi32(sum, _mm256_madd_epi16(w_even, x_even));
        _mm256_add_epi32(even, _mm256_madd_epi16(w_odd, x_odd))
    }
}

/// A transpose within each 128 bits.
#[inline(always)]
unsafe fn transpose_half(v: [__m256i; 4]) -> [__m256i; 4] {
    // SAFETY: the caller has AVX2.
    unsafe {
        let a = _mm256_unpacklo_epi32(v[0], v[1]);
        let b = _mm256_unpackhi_epi32(v[0], v[1]);
        let c = _mm256_unpacklo_epi32(v[2], v[3]);
        let d = _mm256_unpackhi_epi32(v[2], v[3]);
        [
            _mm256_unpacklo_epi64(a, c),
            _mm256_unpackhi_epi64(a, c),
            _mm256_unpacklo_epi64(b, d),
            _mm256_unpackhi_epi64(b, d),
        ]
    }
}
