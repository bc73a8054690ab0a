//! Sixteen lanes of f32, whatever the machine calls them: kernels are written once over [`Simd`] and compiled for each
//! instruction set.
//!
//! Invariant: every operation is defined lane by lane and rounds once, and [`Simd::sums`] is one fixed tree, so a kernel
//! gives the same bits with [`Avx512`], with [`Avx2`] (two registers of eight lanes) and with [`Lanes`], the plain twin,
//! which is also what other processors run: on AArch64, where fused multiply-add is part of the base, it compiles to NEON.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod ints;
#[cfg(target_arch = "x86_64")]
mod ints_x86;
mod lanes;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
pub(crate) use ints::ints_kernel;
pub use ints::{Ints, Line};
pub use lanes::Lanes;
#[cfg(target_arch = "x86_64")]
pub use x86::Avx512;

/// Lanes of a vector.
pub const LANES: usize = 16;
/// Bytes that memory gives at a time.
pub const CACHE_LINE: usize = 64;

/// Operations on vectors of 16 lanes.
///
/// # Safety
/// For all methods: the instruction set is there (a `simd_kernel!` sees to it), and what a pointer names may be read or
/// written as the method says, at any alignment.
#[allow(
    clippy::missing_safety_doc,
    reason = "one promise for all methods, above"
)]
pub trait Simd: Copy + 'static {
    /// 16 × f32.
    type F: Copy;
    /// 16 × u32.
    type I: Copy;
    /// Rows and columns of the largest tile of accumulators that stays in registers.
    const WIDE: bool;
    /// Rows that pass together over what is unpacked once, at most 4. Code for each number of them takes its time to
    /// compile: there is one where the lanes are the last resort.
    const ABREAST: usize;

    /// x in every lane.
    unsafe fn splat(x: f32) -> Self::F;
    /// The half at p, little-endian, in every lane.
    unsafe fn splat_f16(p: *const u8) -> Self::F;
    /// The half at p in every lane, and the half after it.
    unsafe fn splat_f16s(p: *const u8) -> [Self::F; 2];
    /// Asks for the cache line of an address that will be read soon; any address will do.
    fn prefetch(p: *const u8);
    /// 16 numbers.
    unsafe fn load(p: *const f32) -> Self::F;
    /// Writes 16 numbers.
    unsafe fn store(p: *mut f32, x: Self::F);
    /// a·b + c, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// a·b.
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// a + b.
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// a − b.
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    /// 16 halves, little-endian.
    unsafe fn load_f16(p: *const u8) -> Self::F;
    /// 16 bfloat16, little-endian.
    unsafe fn load_bf16(p: *const u8) -> Self::F;
    /// 16 signed bytes.
    unsafe fn load_i8(p: *const u8) -> Self::F;
    /// 16 unsigned bytes, one per lane.
    unsafe fn load_u8(p: *const u8) -> Self::I;
    /// One u32 of each of 16 rows, `stride` bytes apart.
    unsafe fn load_column(p: *const u8, stride: usize) -> Self::I;
    /// One half of each of 16 rows, `stride` bytes apart.
    unsafe fn load_f16_column(p: *const u8, stride: usize) -> Self::F;
    /// Four consecutive u32 of each of 16 rows, `stride` bytes apart: vector j holds u32 j of every row.
    unsafe fn columns(p: *const u8, stride: usize) -> [Self::I; 4];
    /// Eight consecutive halves of each of 16 rows, `stride` bytes apart: vector j holds half j of every row.
    unsafe fn f16_columns(p: *const u8, stride: usize) -> [Self::F; 8];
    /// 16 codes of B bits, B at most 4, of a stream that starts at `p` with the least significant bit, in the low bits of
    /// the lanes; what stands above them is not defined. Reads the 2·B bytes that they take.
    unsafe fn load_codes<const B: usize>(p: *const u8) -> Self::I;
    /// i >> n. Best where n is known after inlining.
    unsafe fn shr_by(i: Self::I, n: u32) -> Self::I;
    /// i << n. Best where n is known after inlining.
    unsafe fn shl_by(i: Self::I, n: u32) -> Self::I;
    /// i >> N with copies of the sign bit.
    unsafe fn sar<const N: u32>(i: Self::I) -> Self::I;
    /// The larger of i and n.
    unsafe fn at_least(i: Self::I, n: u32) -> Self::I;
    /// i >> N.
    unsafe fn shr<const N: u32>(i: Self::I) -> Self::I;
    /// `table[i & 15]`.
    unsafe fn lookup(table: Self::F, i: Self::I) -> Self::F;
    /// Bits as numbers.
    unsafe fn from_bits(i: Self::I) -> Self::F;
    /// Signed integers as numbers.
    unsafe fn to_f32(i: Self::I) -> Self::F;
    /// a | b.
    unsafe fn or(a: Self::I, b: Self::I) -> Self::I;
    /// i & mask.
    unsafe fn and(i: Self::I, mask: u32) -> Self::I;
    /// i << N.
    unsafe fn shl<const N: u32>(i: Self::I) -> Self::I;
    /// The tree of [`super::vector::sum_lanes`] over each of 16 vectors: lane 4·i + j is the sum of vector 4·j + i.
    unsafe fn sums(x: &[Self::F; LANES]) -> Self::F;
}

/// Two words that hold the first and the last 8 of 16 codes of B bits, and how far into the second its codes begin.
///
/// # Safety
/// 2·B bytes at `p` may be read.
#[inline(always)]
unsafe fn code_words<const B: usize>(p: *const u8) -> ([u32; 2], u32) {
    // SAFETY: the caller's promise. The second word ends with the codes, so that nothing past them is read.
    unsafe {
        if B == 1 {
            let word = u16::from_le_bytes(p.cast::<[u8; 2]>().read_unaligned());
            return ([word.into(); 2], 8);
        }
        let first = p.cast::<[u8; 4]>().read_unaligned();
        let second = p.add(2 * B - 4).cast::<[u8; 4]>().read_unaligned();
        let words = [u32::from_le_bytes(first), u32::from_le_bytes(second)];
        (words, 8 * (4 - B as u32))
    }
}

/// Defines a function that runs a `#[inline(always)] unsafe fn body<S: Simd, …>` at the machine's level.
macro_rules! simd_kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$g:ident: $bound:path>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident;) => {
        $(#[$meta])*
        $vis fn $name $(<$g: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::compute::cpu::dispatch::{Level, level};
                use $crate::compute::cpu::simd::{Avx2, Avx512};

                #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
                unsafe fn v4 $(<$g: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: this function has the instruction set; the body's own conditions are checked by its caller.
                    unsafe { $body::<Avx512 $(, $g)?>($($arg),*) }
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                unsafe fn v3 $(<$g: $bound>)? ($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: as above.
                    unsafe { $body::<Avx2 $(, $g)?>($($arg),*) }
                }
                match level() {
                    // SAFETY: the instruction sets were detected on this machine.
                    Level::Avx512 => return unsafe { v4 $(::<$g>)? ($($arg),*) },
                    // SAFETY: the instruction sets were detected on this machine.
                    Level::Avx2 => return unsafe { v3 $(::<$g>)? ($($arg),*) },
                    Level::Baseline => {}
                }
            }
            // SAFETY: the plain lanes need no instruction set.
            unsafe { $body::<$crate::compute::cpu::simd::Lanes $(, $g)?>($($arg),*) }
        }
    };
}
pub(crate) use simd_kernel;

#[cfg(test)]
mod tests;
