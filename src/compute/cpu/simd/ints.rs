//! Integer lanes: bytes times bytes, summed in i32, and the moves that bring blocks into lanes.
//!
//! Invariant: integers are exact, so every instruction set gives the same numbers whatever order it adds in. A vector of
//! 64 bytes is 16 lanes of 4 bytes, or four quarters of 16 bytes. AVX-512 means VNNI here; a machine that has the one
//! without the other uses AVX2.

use super::{LANES, Lanes, Simd};

/// A cache line, so that vectors never straddle two.
#[derive(Debug, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
pub struct Line(pub [u32; LANES]);

/// Operations on vectors of 64 bytes.
///
/// # Safety
/// For all methods: as for [`Simd`], with an `ints_kernel!`.
#[allow(
    clippy::missing_safety_doc,
    reason = "one promise for all methods, above"
)]
pub trait Ints: Simd {
    /// 64 bytes.
    unsafe fn load_i(p: *const u8) -> Self::I;
    /// Writes 64 bytes.
    unsafe fn store_i(p: *mut u8, i: Self::I);
    /// i in every lane.
    unsafe fn splat_i(i: i32) -> Self::I;
    /// a + b in each lane.
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    /// i ^ mask.
    unsafe fn xor_i(i: Self::I, mask: u32) -> Self::I;
    /// Quarters of 16 bytes from `p`, `p + stride`, `p + 2·stride` and `p + 3·stride`.
    unsafe fn quarters(p: *const u8, stride: usize) -> Self::I;
    /// sum + the four products of unsigned bytes of w and signed bytes of x, in each lane.
    unsafe fn dot(sum: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// In each quarter: lane j of vector i becomes lane i of vector j.
    unsafe fn transpose_lanes(v: [Self::I; 4]) -> [Self::I; 4];
    /// Quarter j of vector i becomes quarter i of vector j.
    unsafe fn transpose_quarters(v: [Self::I; 4]) -> [Self::I; 4];
    /// The half in the low 16 bits of each lane.
    unsafe fn low_halves(i: Self::I) -> Self::F;
}

// SAFETY (of all blocks below): the caller's promise, see the trait.
impl Ints for Lanes {
    #[inline(always)]
    unsafe fn load_i(p: *const u8) -> Self::I {
        // SAFETY: see above.
        unsafe { p.cast::<[u32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_i(p: *mut u8, i: Self::I) {
        // SAFETY: see above.
        unsafe { p.cast::<[u32; LANES]>().write_unaligned(i) }
    }
    #[inline(always)]
    unsafe fn splat_i(i: i32) -> Self::I {
        [i.cast_unsigned(); LANES]
    }
    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    unsafe fn xor_i(i: Self::I, mask: u32) -> Self::I {
        i.map(|i| i ^ mask)
    }
    #[inline(always)]
    unsafe fn quarters(p: *const u8, stride: usize) -> Self::I {
        // SAFETY: see above.
        bytemuck::cast(std::array::from_fn::<[u32; 4], 4, _>(|i| unsafe {
            p.add(i * stride).cast::<[u32; 4]>().read_unaligned()
        }))
    }
    #[inline(always)]
    unsafe fn dot(sum: Self::I, w: Self::I, x: Self::I) -> Self::I {
        std::array::from_fn(|i| {
            let (w, x) = (w[i].to_le_bytes(), x[i].to_le_bytes());
            let products = (0..4).map(|j| i32::from(w[j]) * i32::from(x[j].cast_signed()));
            sum[i].wrapping_add(products.sum::<i32>().cast_unsigned())
        })
    }
    #[inline(always)]
    unsafe fn transpose_lanes(v: [Self::I; 4]) -> [Self::I; 4] {
        std::array::from_fn(|j| std::array::from_fn(|lane| v[lane % 4][lane / 4 * 4 + j]))
    }
    #[inline(always)]
    unsafe fn transpose_quarters(v: [Self::I; 4]) -> [Self::I; 4] {
        std::array::from_fn(|j| std::array::from_fn(|lane| v[lane / 4][4 * j + lane % 4]))
    }
    #[inline(always)]
    unsafe fn low_halves(i: Self::I) -> Self::F {
        i.map(|i| half::f16::from_bits(i as u16).to_f32())
    }
}

/// Defines a function that runs a `#[inline(always)] unsafe fn body<S: Ints, …>` at the machine's level.
macro_rules! ints_kernel {
    ($(#[$meta:meta])* $vis:vis fn $name:ident <$g:ident: $bound:path> ($($arg:ident: $ty:ty),* $(,)?) = $body:ident;) => {
        $(#[$meta])*
        $vis fn $name <$g: $bound> ($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::compute::cpu::dispatch::{Level, level};
                use $crate::compute::cpu::simd::{Avx2, Avx512};

                #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512vnni,avx2,fma,f16c")]
                unsafe fn v4<$g: $bound>($($arg: $ty),*) {
                    // SAFETY: this function has the instruction set; the body's own conditions are checked by its caller.
                    unsafe { $body::<Avx512, $g>($($arg),*) }
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                unsafe fn v3<$g: $bound>($($arg: $ty),*) {
                    // SAFETY: as above.
                    unsafe { $body::<Avx2, $g>($($arg),*) }
                }
                match level() {
                    // SAFETY: the instruction sets were detected on this machine.
                    Level::Avx512 if is_x86_feature_detected!("avx512vnni") => return unsafe { v4::<$g>($($arg),*) },
                    // SAFETY: the instruction sets were detected on this machine.
                    Level::Avx512 | Level::Avx2 => return unsafe { v3::<$g>($($arg),*) },
                    Level::Baseline => {}
                }
            }
            // SAFETY: the plain lanes need no instruction set.
            unsafe { $body::<$crate::compute::cpu::simd::Lanes, $g>($($arg),*) }
        }
    };
}
pub(crate) use ints_kernel;

#[cfg(test)]
mod tests {
    use super::*;

    trait Nothing {}
    impl Nothing for () {}

    /// What every operation makes of some bytes.
    ///
    /// # Safety
    /// The instruction set is there.
    #[inline(always)]
    unsafe fn all_body<S: Ints, N: Nothing>(bytes: &[u8; 1024], out: &mut Vec<u32>) {
        // SAFETY: every offset leaves room for what is read; the instruction set is there.
        unsafe {
            for at in [0, 1, 100, 333] {
                let p = bytes.as_ptr().add(at);
                let v = [
                    S::load_i(p),
                    S::load_i(p.add(64)),
                    S::quarters(p.add(128), 18),
                    S::quarters(p.add(200), 77),
                ];
                let [a, b, c, d] = S::transpose_lanes(v);
                let [e, f, g, h] = S::transpose_quarters(v);
                let made = [
                    S::splat_i(at as i32 - 50),
                    S::add_i(v[0], v[1]),
                    S::xor_i(v[2], 0x8080_8080),
                    S::dot(v[0], v[1], v[2]),
                    S::dot(v[3], v[2], v[1]),
                ];
                for i in made.into_iter().chain([a, b, c, d, e, f, g, h]) {
                    let mut y = [0u32; LANES];
                    S::store_i(y.as_mut_ptr().cast(), i);
                    out.extend(y);
                }
                // Exponents of halves stay below those of NaN, whose bits conversions may change.
                let mut halves = [0.0f32; LANES];
                S::store(halves.as_mut_ptr(), S::low_halves(S::and(v[3], !0x4400)));
                out.extend(halves.map(f32::to_bits));
            }
        }
    }

    ints_kernel! {
        fn all<N: Nothing>(bytes: &[u8; 1024], out: &mut Vec<u32>) = all_body;
    }

    #[test]
    fn every_level_gives_the_numbers_of_the_plain_lanes() {
        use crate::compute::cpu::dispatch::tests::{at, levels};
        let bytes: [u8; 1024] = std::array::from_fn(|i| ((i * 89 + i * i * 7) % 256) as u8);
        let mut want = Vec::new();
        // SAFETY: plain code.
        unsafe { all_body::<Lanes, ()>(&bytes, &mut want) };
        for level in levels() {
            let mut got = Vec::new();
            at(level, || all::<()>(&bytes, &mut got));
            let first = got.iter().zip(&want).position(|(a, b)| a != b);
            assert_eq!(first.map(|i| i / LANES), None, "{level:?}");
        }
    }

    #[test]
    fn plain_products_are_of_unsigned_and_signed_bytes() {
        let w = [u32::from_le_bytes([255, 1, 0, 200]); LANES];
        let x = [u32::from_le_bytes([0x80, 0xff, 7, 100]); LANES];
        // SAFETY: plain code.
        let sums = unsafe { Lanes::dot([5; LANES], w, x) };
        assert_eq!(sums[0].cast_signed(), 5 - 255 * 128 - 1 + 200 * 100);
    }
}
