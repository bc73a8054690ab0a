//! E2M1, the 4-bit float of NVFP4 and of OCP's MXFP4: sign, two bits of exponent (bias 1), one of mantissa; no
//! infinities, no NaN.
//!
//! ```text
//! code & 7   0    1    2    3    4    5    6    7
//! value      0   .5    1  1.5    2    3    4    6
//! tie          .25  .75 1.25 1.75  2.5  3.5   5
//! goes to       0    1    1    2    2    4    4
//! ```

/// The code, below 8, of the magnitude nearest to |x|: how many of the thresholds lie below, a tie counting where the
/// code above it is even. Magnitudes over 6 become 6. The sign is the caller's: formats disagree on that of zero.
#[inline(always)]
pub(super) fn magnitude_code(x: f32) -> u32 {
    let a = x.abs();
    u32::from(a > 0.25)
        + u32::from(a >= 0.75)
        + u32::from(a > 1.25)
        + u32::from(a >= 1.75)
        + u32::from(a > 2.5)
        + u32::from(a >= 3.5)
        + u32::from(a > 5.0)
}

/// The numbers of all codes.
pub(super) const LEVELS: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// The number of a code below 16, by arithmetic rather than a table so that the loop vectorises.
#[inline(always)]
pub(super) fn to_f32(code: u32) -> f32 {
    let m = code & 7;
    // Exponent bias 1 in E2M1, 127 in f32; one mantissa bit.
    let normal = (m + (126 << 1)) << 22;
    let subnormal = if m == 0 { 0 } else { 0.5f32.to_bits() };
    let magnitude = if m < 2 { subnormal } else { normal };
    f32::from_bits(magnitude | (code & 8) << 28)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_numbers_with_their_signs() {
        for (code, level) in (0..).zip(LEVELS) {
            assert_eq!(to_f32(code).to_bits(), level.to_bits(), "{code}");
        }
    }

    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    #[test]
    fn codes_have_their_values() {
        for code in 0..16u32 {
            let m = MAGNITUDES[code as usize & 7];
            let want = if code < 8 { m } else { -m };
            assert_eq!(to_f32(code).to_bits(), want.to_bits());
            assert_eq!(magnitude_code(want), code & 7);
        }
    }

    #[test]
    fn ties_go_to_the_even_code() {
        let ties = [0.25f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
        let values = [0.0f32, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0];
        let value = |x| MAGNITUDES[magnitude_code(x) as usize];
        for (i, (&t, &v)) in ties.iter().zip(&values).enumerate() {
            assert_eq!(value(t), v);
            assert_eq!(value(t.next_down()), MAGNITUDES[i]);
            assert_eq!(value(t.next_up()), MAGNITUDES[i + 1]);
            assert_eq!(value(-t), v);
        }
        assert_eq!(value(1e9), 6.0);
    }
}
