//! The lanes of x86-64 without AVX-512: two registers of AVX2.
//!
//! Every method is one or a few intrinsics for each register; it is inlined into a function that has the instruction set.

use std::arch::x86_64::*;

use super::x86::halves;
use super::{LANES, Simd, code_words};

/// AVX2, FMA and F16C: lanes 0 to 7 and 8 to 15.
#[derive(Debug, Clone, Copy)]
pub struct Avx2;

// SAFETY (of all blocks below): the caller's promise, see the trait.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
impl Simd for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];
    const WIDE: bool = false;
    const ABREAST: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u8) -> Self::F {
        unsafe { [_mm256_broadcastss_ps(_mm_cvtph_ps(_mm_loadu_si16(p))); 2] }
    }
    #[inline(always)]
    unsafe fn splat_f16s(p: *const u8) -> [Self::F; 2] {
        unsafe {
            let both = _mm256_cvtph_ps(_mm_set1_epi32(p.cast::<i32>().read_unaligned()));
            [[_mm256_moveldup_ps(both); 2], [_mm256_movehdup_ps(both); 2]]
        }
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a prefetch reads nothing; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
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
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast())),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self::F {
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast()));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self::I {
        unsafe {
            [
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())),
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast())),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_column(p: *const u8, stride: usize) -> Self::I {
        unsafe {
            let at = |i: usize| p.add(i * stride).cast::<i32>().read_unaligned();
            [
                _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)),
                _mm256_setr_epi32(at(8), at(9), at(10), at(11), at(12), at(13), at(14), at(15)),
            ]
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
    unsafe fn columns(p: *const u8, stride: usize) -> [Self::I; 4] {
        unsafe {
            let low = turn_words(eighths(p, stride));
            let high = turn_words(eighths(p.add(8 * stride), stride));
            [
                [low[0], high[0]],
                [low[1], high[1]],
                [low[2], high[2]],
                [low[3], high[3]],
            ]
        }
    }
    #[inline(always)]
    unsafe fn f16_columns(p: *const u8, stride: usize) -> [Self::F; 8] {
        unsafe {
            let low = turn_halves(eighths(p, stride));
            let high = turn_halves(eighths(p.add(8 * stride), stride));
            let mut out = [[_mm256_setzero_ps(); 2]; 8];
            for i in 0..4 {
                out[2 * i] = [
                    _mm256_cvtph_ps(_mm256_castsi256_si128(low[i])),
                    _mm256_cvtph_ps(_mm256_castsi256_si128(high[i])),
                ];
                out[2 * i + 1] = [
                    _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(low[i])),
                    _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(high[i])),
                ];
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn load_codes<const B: usize>(p: *const u8) -> Self::I {
        unsafe {
            let by = _mm256_mullo_epi32(
                _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                _mm256_set1_epi32(B as i32),
            );
            let ([first, second], early) = code_words::<B>(p);
            let later = _mm256_add_epi32(by, _mm256_set1_epi32(early.cast_signed()));
            [
                _mm256_srlv_epi32(_mm256_set1_epi32(first.cast_signed()), by),
                _mm256_srlv_epi32(_mm256_set1_epi32(second.cast_signed()), later),
            ]
        }
    }
    #[inline(always)]
    unsafe fn shr_by(i: Self::I, n: u32) -> Self::I {
        unsafe {
            let n = _mm_cvtsi32_si128(n.cast_signed());
            [_mm256_srl_epi32(i[0], n), _mm256_srl_epi32(i[1], n)]
        }
    }
    #[inline(always)]
    unsafe fn shl_by(i: Self::I, n: u32) -> Self::I {
        unsafe {
            let n = _mm_cvtsi32_si128(n.cast_signed());
            [_mm256_sll_epi32(i[0], n), _mm256_sll_epi32(i[1], n)]
        }
    }
    #[inline(always)]
    unsafe fn sar<const N: u32>(i: Self::I) -> Self::I {
        unsafe {
            let n = _mm_cvtsi32_si128(N as i32);
            [_mm256_sra_epi32(i[0], n), _mm256_sra_epi32(i[1], n)]
        }
    }
    #[inline(always)]
    unsafe fn at_least(i: Self::I, n: u32) -> Self::I {
        unsafe {
            let n = _mm256_set1_epi32(n.cast_signed());
            [_mm256_max_epu32(i[0], n), _mm256_max_epu32(i[1], n)]
        }
    }
    #[inline(always)]
    unsafe fn shr<const N: u32>(i: Self::I) -> Self::I {
        unsafe {
            let n = _mm_cvtsi32_si128(N as i32);
            [_mm256_srl_epi32(i[0], n), _mm256_srl_epi32(i[1], n)]
        }
    }
    #[inline(always)]
    unsafe fn lookup(table: Self::F, i: Self::I) -> Self::F {
        unsafe { [choose(table, i[0]), choose(table, i[1])] }
    }
    #[inline(always)]
    unsafe fn from_bits(i: Self::I) -> Self::F {
        unsafe { [_mm256_castsi256_ps(i[0]), _mm256_castsi256_ps(i[1])] }
    }
    #[inline(always)]
    unsafe fn to_f32(i: Self::I) -> Self::F {
        unsafe { [_mm256_cvtepi32_ps(i[0]), _mm256_cvtepi32_ps(i[1])] }
    }
    #[inline(always)]
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I {
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn and(i: Self::I, mask: u32) -> Self::I {
        unsafe {
            let mask = _mm256_set1_epi32(mask.cast_signed());
            [_mm256_and_si256(i[0], mask), _mm256_and_si256(i[1], mask)]
        }
    }
    #[inline(always)]
    unsafe fn shl<const N: u32>(i: Self::I) -> Self::I {
        unsafe {
            let n = _mm_cvtsi32_si128(N as i32);
            [_mm256_sll_epi32(i[0], n), _mm256_sll_epi32(i[1], n)]
        }
    }
    #[inline(always)]
    unsafe fn sums(x: &[Self::F; LANES]) -> Self::F {
        unsafe { [half_sums(x, 0), half_sums(x, 2)] }
    }
}

/// `table[i & 15]`.
#[inline(always)]
unsafe fn choose(table: [__m256; 2], i: __m256i) -> __m256 {
    // SAFETY: the caller has AVX2.
    unsafe {
        let (low, high) = (
            _mm256_permutevar8x32_ps(table[0], i),
            _mm256_permutevar8x32_ps(table[1], i),
        );
        // Bit 3 of the index chooses, as the sign bit.
        _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(i)))
    }
}

/// Lane i + i + 8, then + i + 4, of two vectors: a's four sums and b's.
#[inline(always)]
unsafe fn narrow_by_4(a: [__m256; 2], b: [__m256; 2]) -> __m256 {
    // SAFETY: the caller has AVX2.
    unsafe {
        let (a, b) = (_mm256_add_ps(a[0], a[1]), _mm256_add_ps(b[0], b[1]));
        _mm256_add_ps(
            _mm256_permute2f128_ps::<0x20>(a, b),
            _mm256_permute2f128_ps::<0x31>(a, b),
        )
    }
}

/// Lane i + lane i + 2 within each half of both.
#[inline(always)]
unsafe fn narrow_by_2(a: __m256, b: __m256) -> __m256 {
    // SAFETY: the caller has AVX2.
    unsafe {
        _mm256_add_ps(
            _mm256_shuffle_ps::<0x44>(a, b),
            _mm256_shuffle_ps::<0xee>(a, b),
        )
    }
}

/// The sums of vectors `first` and `first + 1` of each group of four.
#[inline(always)]
unsafe fn half_sums(x: &[[__m256; 2]; LANES], first: usize) -> __m256 {
    // SAFETY: the caller has AVX2.
    unsafe {
        let a = narrow_by_2(
            narrow_by_4(x[first], x[first + 1]),
            narrow_by_4(x[first + 4], x[first + 5]),
        );
        let b = narrow_by_2(
            narrow_by_4(x[first + 8], x[first + 9]),
            narrow_by_4(x[first + 12], x[first + 13]),
        );
        _mm256_add_ps(
            _mm256_shuffle_ps::<0x88>(a, b),
            _mm256_shuffle_ps::<0xdd>(a, b),
        )
    }
}

/// 16 bytes of each of 8 rows: register i holds rows i and 4 + i.
#[inline(always)]
unsafe fn eighths(p: *const u8, stride: usize) -> [__m256i; 4] {
    // SAFETY: the caller has AVX2, and the bytes may be read.
    unsafe {
        [
            pair(p, stride),
            pair(p.add(stride), stride),
            pair(p.add(2 * stride), stride),
            pair(p.add(3 * stride), stride),
        ]
    }
}

/// 16 bytes of a row and of the fourth one after it.
#[inline(always)]
unsafe fn pair(p: *const u8, stride: usize) -> __m256i {
    // SAFETY: as above.
    unsafe {
        let low = _mm256_castsi128_si256(_mm_loadu_si128(p.cast()));
        _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(p.add(4 * stride).cast()))
    }
}

/// [`eighths`] by column: u32 j of 8 rows.
#[inline(always)]
unsafe fn turn_words([a, b, c, d]: [__m256i; 4]) -> [__m256i; 4] {
    // SAFETY: the caller has AVX2.
    unsafe {
        let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
        let (ef, gh) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab, cd),
            _mm256_unpackhi_epi64(ab, cd),
            _mm256_unpacklo_epi64(ef, gh),
            _mm256_unpackhi_epi64(ef, gh),
        ]
    }
}

/// [`eighths`] by two columns: halves 2j of 8 rows, then halves 2j + 1.
#[inline(always)]
unsafe fn turn_halves([a, b, c, d]: [__m256i; 4]) -> [__m256i; 4] {
    // SAFETY: the caller has AVX2.
    unsafe {
        let (ac, bd) = (_mm256_unpacklo_epi16(a, c), _mm256_unpacklo_epi16(b, d));
        let (eg, fh) = (_mm256_unpackhi_epi16(a, c), _mm256_unpackhi_epi16(b, d));
        [
            _mm256_permute4x64_epi64::<0xd8>(_mm256_unpacklo_epi16(ac, bd)),
            _mm256_permute4x64_epi64::<0xd8>(_mm256_unpackhi_epi16(ac, bd)),
            _mm256_permute4x64_epi64::<0xd8>(_mm256_unpacklo_epi16(eg, fh)),
            _mm256_permute4x64_epi64::<0xd8>(_mm256_unpackhi_epi16(eg, fh)),
        ]
    }
}
