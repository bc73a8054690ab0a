//! The intrinsics against the plain lanes, operation by operation.

use super::*;

/// What every operation makes of some bytes, as bits.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
unsafe fn all_body<S: Simd>(bytes: &[u8; 1024], x: &[f32; 256], out: &mut Vec<u32>) {
    let mut put = |v: S::F| {
        let mut y = [0.0f32; LANES];
        // SAFETY: `y` has 16 elements; the instruction set is there.
        unsafe { S::store(y.as_mut_ptr(), v) };
        out.extend(y.map(f32::to_bits));
    };
    // SAFETY: every offset leaves room for what is read; the instruction set is there.
    unsafe {
        let v: [S::F; LANES] = std::array::from_fn(|i| S::load(x.as_ptr().add(16 * i)));
        put(S::splat(1.5));
        put(S::fma(v[0], v[1], v[2]));
        put(S::mul(v[0], v[1]));
        put(S::add(v[0], v[1]));
        put(S::sub(v[0], v[1]));
        put(S::sums(&v));
        for at in [0, 1, 7, 33] {
            let p = bytes.as_ptr().add(at);
            put(S::splat_f16(p));
            S::splat_f16s(p).into_iter().for_each(&mut put);
            put(S::load_bf16(p));
            put(S::load_f16(p));
            put(S::load_i8(p));
            let i = S::load_u8(p);
            put(S::to_f32(i));
            put(S::lookup(v[3], i));
            put(S::to_f32(S::shr::<3>(i)));
            put(S::to_f32(S::shl::<5>(i)));
            put(S::to_f32(S::and(i, 0x15)));
            put(S::from_bits(S::load_column(p, 18)));
            put(S::lookup(v[4], S::shr::<28>(S::load_column(p, 36))));
            put(S::load_f16_column(p, 34));
            put(S::lookup(v[5], S::load_codes::<4>(p)));
            put(S::to_f32(S::and(S::load_codes::<3>(p), 7)));
            put(S::to_f32(S::and(S::load_codes::<2>(p), 3)));
            for j in 0..4 {
                let column = S::columns(p, 18)[j];
                put(S::from_bits(column));
                put(S::lookup(v[6], S::shr_by(column, 4 * j as u32 + 12)));
                let top = S::shl_by(column, 8 * j as u32);
                put(S::to_f32(S::sar::<24>(top)));
                put(S::to_f32(S::sar::<9>(top)));
                put(S::from_bits(S::at_least(S::and(top, 0xff), 0x40)));
            }
            for column in S::f16_columns(p, 34) {
                put(column);
            }
        }
    }
}

simd_kernel! {
    fn all(bytes: &[u8; 1024], x: &[f32; 256], out: &mut Vec<u32>) = all_body;
}

#[test]
fn every_level_gives_the_bits_of_the_plain_lanes() {
    use crate::compute::cpu::dispatch::tests::{at, levels};
    // Exponents of halves stay below those of NaN, whose bits conversions may change.
    let bytes: [u8; 1024] = std::array::from_fn(|i| ((i * 89 + i * i * 7) % 251) as u8 & 0xbb);
    let x: [f32; 256] = std::array::from_fn(|i| ((i * 37) % 101) as f32 * 0.173 - 8.0);
    let mut want = Vec::new();
    // SAFETY: plain code.
    unsafe { all_body::<Lanes>(&bytes, &x, &mut want) };
    for level in levels() {
        let mut got = Vec::new();
        at(level, || all(&bytes, &x, &mut got));
        let first = got.iter().zip(&want).position(|(a, b)| a != b);
        assert_eq!(first.map(|i| i / LANES), None, "{level:?}");
    }
}

#[test]
fn sums_are_the_tree_of_the_lanes_in_the_documented_places() {
    let x: [[f32; LANES]; LANES] =
        std::array::from_fn(|i| std::array::from_fn(|j| ((i * 16 + j) % 7) as f32 * 0.3 - 0.7));
    // SAFETY: plain code.
    let sums = unsafe { Lanes::sums(&x) };
    for i in 0..4 {
        for j in 0..4 {
            assert_eq!(
                sums[4 * i + j],
                crate::compute::cpu::vector::sum_lanes(&x[4 * j + i])
            );
        }
    }
}
