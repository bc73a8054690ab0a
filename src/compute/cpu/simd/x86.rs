//! The lanes of x86-64 with AVX-512: one register.
//!
//! Every method is one or a few intrinsics; it is inlined into a function that has the instruction set.

use std::arch::x86_64::*;

use super::{LANES, Simd, code_words};

/// AVX-512 F, VL, BW and DQ.
#[derive(Debug, Clone, Copy)]
pub struct Avx512;

// SAFETY (of all blocks below): the caller's promise, see the trait.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    const WIDE: bool = true;
    const ABREAST: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn splat_f16(p: *const u8) -> __m512 {
        unsafe { _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_loadu_si16(p))) }
    }
    #[inline(always)]
    unsafe fn splat_f16s(p: *const u8) -> [__m512; 2] {
        unsafe {
            // A pair is spread as it is loaded, and converted at once: halves one by one would take twice the shuffles.
            let pairs = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
            let both = _mm512_cvtph_ps(pairs);
            [_mm512_moveldup_ps(both), _mm512_movehdup_ps(both)]
        }
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a prefetch reads nothing; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
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
    unsafe fn columns(p: *const u8, stride: usize) -> [__m512i; 4] {
        unsafe {
            // Lane i of 128 bits holds rows 4i to 4i + 3, one in each register.
            let (a, b) = (four_rows(p, stride), four_rows(p.add(stride), stride));
            let c = four_rows(p.add(2 * stride), stride);
            let d = four_rows(p.add(3 * stride), stride);
            let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
            let (ef, gh) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
            [
                _mm512_unpacklo_epi64(ab, cd),
                _mm512_unpackhi_epi64(ab, cd),
                _mm512_unpacklo_epi64(ef, gh),
                _mm512_unpackhi_epi64(ef, gh),
            ]
        }
    }
    #[inline(always)]
    unsafe fn f16_columns(p: *const u8, stride: usize) -> [__m512; 8] {
        unsafe {
            let mut rows = [_mm256_setzero_si256(); 8];
            for (i, both) in rows.iter_mut().enumerate() {
                let row = p.add(i * stride);
                let low = _mm256_castsi128_si256(_mm_loadu_si128(row.cast()));
                let high = _mm_loadu_si128(row.add(8 * stride).cast());
                *both = _mm256_inserti128_si256::<1>(low, high);
            }
            // Three rounds inside halves turn 8 × 8: what comes out is a column of all rows in order.
            let columns = interleave(interleave(interleave(rows)));
            let mut out = [_mm512_setzero_ps(); 8];
            for (x, column) in out.iter_mut().zip(columns) {
                *x = _mm512_cvtph_ps(column);
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn load_codes<const B: usize>(p: *const u8) -> __m512i {
        unsafe {
            let ([first, second], early) = code_words::<B>(p);
            let first = _mm512_set1_epi32(first.cast_signed());
            let words = _mm512_inserti64x4::<1>(first, _mm256_set1_epi32(second.cast_signed()));
            let by = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
            let by = _mm512_mullo_epi32(by, _mm512_set1_epi32(B as i32));
            let early = _mm256_set1_epi32(early.cast_signed());
            let early = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), early);
            _mm512_srlv_epi32(words, _mm512_add_epi32(by, early))
        }
    }
    #[inline(always)]
    unsafe fn shr_by(i: __m512i, n: u32) -> __m512i {
        unsafe { _mm512_srl_epi32(i, _mm_cvtsi32_si128(n.cast_signed())) }
    }
    #[inline(always)]
    unsafe fn shl_by(i: __m512i, n: u32) -> __m512i {
        unsafe { _mm512_sll_epi32(i, _mm_cvtsi32_si128(n.cast_signed())) }
    }
    #[inline(always)]
    unsafe fn sar<const N: u32>(i: __m512i) -> __m512i {
        unsafe { _mm512_srai_epi32::<N>(i) }
    }
    #[inline(always)]
    unsafe fn at_least(i: __m512i, n: u32) -> __m512i {
        unsafe { _mm512_max_epu32(i, _mm512_set1_epi32(n.cast_signed())) }
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
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
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
            let a = by_2(
                by_4(by_8(x[0], x[1]), by_8(x[2], x[3])),
                by_4(by_8(x[4], x[5]), by_8(x[6], x[7])),
            );
            let b = by_2(
                by_4(by_8(x[8], x[9]), by_8(x[10], x[11])),
                by_4(by_8(x[12], x[13]), by_8(x[14], x[15])),
            );
            _mm512_add_ps(
                _mm512_shuffle_ps::<0x88>(a, b),
                _mm512_shuffle_ps::<0xdd>(a, b),
            )
        }
    }
}

// Functions rather than closures: those would be compiled without the instruction set, and intrinsics called in them.

/// Lane i + lane i + 8 of both, a's first.
#[inline(always)]
unsafe fn by_8(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller has AVX-512.
    unsafe {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0x44>(a, b),
            _mm512_shuffle_f32x4::<0xee>(a, b),
        )
    }
}

/// Lane i + lane i + 4 within each half of both.
#[inline(always)]
unsafe fn by_4(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller has AVX-512.
    unsafe {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0x88>(a, b),
            _mm512_shuffle_f32x4::<0xdd>(a, b),
        )
    }
}

/// Lane i + lane i + 2 within each quarter of both.
#[inline(always)]
unsafe fn by_2(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller has AVX-512.
    unsafe {
        _mm512_add_ps(
            _mm512_shuffle_ps::<0x44>(a, b),
            _mm512_shuffle_ps::<0xee>(a, b),
        )
    }
}

/// Halves of registers i and i + 4 in turns.
#[inline(always)]
unsafe fn interleave(x: [__m256i; 8]) -> [__m256i; 8] {
    // SAFETY: the caller has AVX2.
    unsafe {
        [
            _mm256_unpacklo_epi16(x[0], x[4]),
            _mm256_unpackhi_epi16(x[0], x[4]),
            _mm256_unpacklo_epi16(x[1], x[5]),
            _mm256_unpackhi_epi16(x[1], x[5]),
            _mm256_unpacklo_epi16(x[2], x[6]),
            _mm256_unpackhi_epi16(x[2], x[6]),
            _mm256_unpacklo_epi16(x[3], x[7]),
            _mm256_unpackhi_epi16(x[3], x[7]),
        ]
    }
}

/// 16 bytes of a row and of the fourth, eighth and twelfth after it.
#[inline(always)]
unsafe fn four_rows(p: *const u8, stride: usize) -> __m512i {
    // SAFETY: the caller has AVX-512, and the bytes may be read.
    unsafe {
        let x = _mm512_castsi128_si512(_mm_loadu_si128(p.cast()));
        let x = _mm512_inserti32x4::<1>(x, _mm_loadu_si128(p.add(4 * stride).cast()));
        let x = _mm512_inserti32x4::<2>(x, _mm_loadu_si128(p.add(8 * stride).cast()));
        _mm512_inserti32x4::<3>(x, _mm_loadu_si128(p.add(12 * stride).cast()))
    }
}

/// 16 halves, `stride` bytes apart.
///
/// # Safety
/// The halves may be read; AVX2 is there.
#[inline(always)]
pub(super) unsafe fn halves(p: *const u8, stride: usize) -> __m256i {
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
