//! 8-bit floats: how a number becomes a byte and back, once for every split of the bits into exponent and mantissa.
//!
//! Invariants: rounds to nearest with ties to even; magnitudes above the largest finite one, infinity too, become that
//! one; NaN stays NaN and keeps its sign; zeros keep their signs.

/// A layout of 8 bits: sign, exponent, mantissa.
pub(super) trait Float8 {
    /// Bits of the mantissa.
    const MANTISSA_BITS: u32;
    /// Bias of the exponent.
    const BIAS: u32;
    /// The largest finite magnitude.
    const MAX: f32;
    /// The first code, sign aside, that is no finite number.
    const FIRST_SPECIAL: u32;
    /// What that code is. All codes above it are NaN.
    const SPECIAL: f32;

    /// The smallest positive number.
    const MIN_POSITIVE: f32 = power_of_two(127 + 1 - Self::BIAS - Self::MANTISSA_BITS);
}

/// The code of a NaN, sign aside.
const NAN: u32 = 0x7f;

/// 2^(exponent − 127).
const fn power_of_two(exponent: u32) -> f32 {
    f32::from_bits(exponent << 23)
}

/// The nearest number's byte.
#[inline(always)]
pub(super) fn from_f32<F: Float8>(x: f32) -> u8 {
    let shift = 23 - F::MANTISSA_BITS;
    let bits = x.to_bits();
    let abs = bits & 0x7fff_ffff;
    let clamped = abs.min(F::MAX.to_bits());
    // `shift` bits of the mantissa go; an odd last bit that stays turns a tie upwards.
    let below_half = (1 << (shift - 1)) - 1;
    let rounded = (clamped + below_half + ((clamped >> shift) & 1)) >> shift;
    let normal = rounded.wrapping_sub(rebias::<F>());
    // Adding it leaves an f32 whose last place is worth the fixed step below the smallest normal number.
    let aligned = power_of_two(127 + 23) * F::MIN_POSITIVE;
    let subnormal = (f32::from_bits(clamped) + aligned)
        .to_bits()
        .wrapping_sub(aligned.to_bits());
    let number = if clamped < power_of_two(128 - F::BIAS).to_bits() {
        subnormal
    } else {
        normal
    };
    let code = if abs > f32::INFINITY.to_bits() {
        NAN
    } else {
        number
    };
    ((bits >> 24) & 0x80 | code) as u8
}

/// The number that a byte stands for.
#[inline(always)]
pub(super) fn to_f32<F: Float8>(byte: u8) -> f32 {
    let code = u32::from(byte & 0x7f);
    let normal = f32::from_bits((code + rebias::<F>()) << (23 - F::MANTISSA_BITS));
    let subnormal = code as f32 * F::MIN_POSITIVE;
    let number = if code < 1 << F::MANTISSA_BITS {
        subnormal
    } else {
        normal
    };
    let special = if code == F::FIRST_SPECIAL {
        F::SPECIAL
    } else {
        f32::NAN
    };
    let magnitude = if code < F::FIRST_SPECIAL {
        number
    } else {
        special
    };
    f32::from_bits(magnitude.to_bits() | u32::from(byte & 0x80) << 24)
}

/// f32's exponent bias less the format's, in units of the format's exponent.
#[inline(always)]
const fn rebias<F: Float8>() -> u32 {
    (127 - F::BIAS) << F::MANTISSA_BITS
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The definition of a finite code, in f64.
    fn value<F: Float8>(code: u32) -> f64 {
        let (e, m) = (
            code >> F::MANTISSA_BITS,
            code & ((1 << F::MANTISSA_BITS) - 1),
        );
        let fraction = f64::from(m) / f64::from(1 << F::MANTISSA_BITS);
        let exponent = |e: u32| 2f64.powi(e as i32 - F::BIAS as i32);
        if e == 0 {
            fraction * exponent(1)
        } else {
            (1.0 + fraction) * exponent(e)
        }
    }

    /// Every byte against the definition, and back.
    pub fn every_byte_is_its_value_and_comes_back<F: Float8>() {
        for byte in 0..=255u8 {
            let (code, x) = (u32::from(byte & 0x7f), to_f32::<F>(byte));
            let sign = if byte < 0x80 { 1.0 } else { -1.0 };
            if code < F::FIRST_SPECIAL {
                assert_eq!(f64::from(x), sign * value::<F>(code));
                assert_eq!(from_f32::<F>(x), byte);
            } else if code == F::FIRST_SPECIAL {
                assert!(f64::from(x) == sign * f64::from(F::SPECIAL) || F::SPECIAL.is_nan());
            } else {
                assert!(x.is_nan());
            }
            assert_eq!(x.is_sign_negative(), byte >= 0x80);
        }
        let largest = value::<F>(F::FIRST_SPECIAL - 1);
        assert_eq!(f64::from(F::MAX), largest);
        assert_eq!(f64::from(F::MIN_POSITIVE), value::<F>(1));
    }

    /// Every tie, and the two f32 beside it.
    pub fn ties_go_to_the_even_code_and_their_neighbours_to_the_nearest<F: Float8>() {
        for code in 0..F::FIRST_SPECIAL - 1 {
            let tie = ((value::<F>(code) + value::<F>(code + 1)) / 2.0) as f32;
            let code = code as u8;
            assert_eq!(from_f32::<F>(tie), code + (code & 1), "{tie}");
            assert_eq!(from_f32::<F>(tie.next_down()), code);
            assert_eq!(from_f32::<F>(tie.next_up()), code + 1);
            assert_eq!(from_f32::<F>(-tie), 0x80 | (code + (code & 1)));
        }
    }

    /// Everything beyond the largest number, NaN, and zeros.
    pub fn saturates_and_keeps_nan<F: Float8>() {
        let largest = F::FIRST_SPECIAL as u8 - 1;
        for x in [F::MAX, F::MAX * 1.06, F::MAX * 1.2, 1e30, f32::INFINITY] {
            assert_eq!(from_f32::<F>(x), largest);
            assert_eq!(from_f32::<F>(-x), 0x80 | largest);
        }
        assert!(to_f32::<F>(from_f32::<F>(f32::NAN)).is_nan());
        assert_eq!(from_f32::<F>(-0.0), 0x80);
        assert_eq!(from_f32::<F>(f32::MIN_POSITIVE), 0);
    }
}
