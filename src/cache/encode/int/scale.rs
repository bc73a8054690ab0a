//! The formats in which a group's step and zero are stored.
//!
//! Invariants: a step is rounded up and a zero down, so that a group always lies inside its grid; zeros that a format
//! has exactly (KIVI's, which are f16 values) stay what they are. Magnitudes are clamped to [`ScaleFormat::limit`]; what is
//! read back is finite, a step is not negative, and 0 only if the group has one value that is a number of the format.
//! E4M3 can't hold steps: its smallest number is 2⁻⁹ and it has 3 bits of mantissa. There the byte holds the whole span
//! (step · divisor).

use half::{bf16, f16};

use super::super::float8::{self, Float8};
use super::super::fp8_e4m3::Fp8E4m3;

/// A format of steps and zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScaleFormat {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// E4M3.
    Fp8,
}

impl ScaleFormat {
    /// Bytes of one number.
    pub fn bytes(self) -> usize {
        match self {
            ScaleFormat::F16 | ScaleFormat::Bf16 => 2,
            ScaleFormat::Fp8 => 1,
        }
    }

    /// The largest magnitude that is stored. For bf16 it is low enough that 255 steps and a zero are finite.
    fn limit(self) -> f32 {
        match self {
            ScaleFormat::F16 => 65_504.0,
            ScaleFormat::Bf16 => 2f32.powi(112),
            ScaleFormat::Fp8 => Fp8E4m3::MAX,
        }
    }

    /// Stores a zero.
    pub fn put_zero(self, zero: f32, out: &mut [u8]) {
        // −0 and 0 are one zero: which of them a minimum is depends on the order of comparisons.
        self.put(
            self.below(zero.clamp(-self.limit(), self.limit()) + 0.0),
            out,
        );
    }

    /// Stores the step of `span / divisor`; a negative span (of a zero that was clamped) counts as 0.
    pub fn put_step(self, span: f32, divisor: f32, out: &mut [u8]) {
        let stored = match self {
            ScaleFormat::F16 | ScaleFormat::Bf16 => span / divisor,
            ScaleFormat::Fp8 => span,
        };
        self.put(self.above(stored.clamp(0.0, self.limit())), out);
    }

    fn put(self, bits: u16, out: &mut [u8]) {
        out.copy_from_slice(&bits.to_le_bytes()[..self.bytes()]);
    }

    /// The smallest number that is not below x, for x from 0 to the limit.
    fn above(self, x: f32) -> u16 {
        let nearest = self.nearest(x);
        nearest + u16::from(self.value(nearest) < x)
    }

    /// The largest number that is not above x, for x inside the limits.
    fn below(self, x: f32) -> u16 {
        if x < 0.0 {
            let sign = 0x80 << (8 * (self.bytes() - 1));
            return self.above(-x) | sign;
        }
        let nearest = self.nearest(x);
        nearest - u16::from(self.value(nearest) > x)
    }

    fn nearest(self, x: f32) -> u16 {
        match self {
            ScaleFormat::F16 => f16::from_f32(x).to_bits(),
            ScaleFormat::Bf16 => bf16::from_f32(x).to_bits(),
            ScaleFormat::Fp8 => float8::from_f32::<Fp8E4m3>(x).into(),
        }
    }

    /// The number of finite bits.
    #[inline(always)]
    fn value(self, bits: u16) -> f32 {
        match self {
            ScaleFormat::F16 => f16_to_f32(bits),
            ScaleFormat::Bf16 => f32::from_bits(u32::from(bits) << 16),
            ScaleFormat::Fp8 => float8::to_f32::<Fp8E4m3>(bits as u8),
        }
    }

    /// Reads zeros that lie back to back.
    #[inline(always)]
    pub fn zeros(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            ScaleFormat::F16 | ScaleFormat::Bf16 => {
                for (x, b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *x = self.value(u16::from_le_bytes(*b));
                }
            }
            ScaleFormat::Fp8 => {
                for (x, &b) in out.iter_mut().zip(bytes) {
                    *x = self.value(b.into());
                }
            }
        }
    }

    /// Reads steps that lie back to back.
    #[inline(always)]
    pub fn steps(self, bytes: &[u8], divisor: f32, out: &mut [f32]) {
        self.zeros(bytes, out);
        if self == ScaleFormat::Fp8 {
            for x in out {
                *x /= divisor;
            }
        }
    }
}

/// A finite half as f32, exactly and without a call.
#[inline(always)]
fn f16_to_f32(h: u16) -> f32 {
    let h = u32::from(h);
    // The exponent's bias moves by 112; subnormals come out right, too.
    let magnitude = f32::from_bits((h & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    f32::from_bits(magnitude.to_bits() | (h & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [ScaleFormat; 3] = [ScaleFormat::F16, ScaleFormat::Bf16, ScaleFormat::Fp8];

    fn stored(format: ScaleFormat, span: f32, zero: f32, divisor: f32) -> (f32, f32) {
        let mut bytes = [0xa5; 2];
        let bytes = &mut bytes[..format.bytes()];
        let [mut s, mut z] = [[f32::NAN], [f32::NAN]];
        format.put_step(span, divisor, bytes);
        format.steps(bytes, divisor, &mut s);
        format.put_zero(zero, bytes);
        format.zeros(bytes, &mut z);
        (s[0], z[0])
    }

    #[test]
    fn halves_are_read_as_the_half_crate_reads_them() {
        for h in (0..=u16::MAX).filter(|h| f16::from_bits(*h).is_finite()) {
            assert_eq!(
                f16_to_f32(h).to_bits(),
                f16::from_bits(h).to_f32().to_bits()
            );
        }
    }

    #[test]
    fn zeros_go_down_steps_go_up_and_numbers_of_the_format_stay() {
        for format in ALL {
            let sign = 0x80 << (8 * (format.bytes() - 1));
            let n = (0..sign).take_while(|&bits| format.value(bits) < format.limit());
            for bits in n {
                let x = format.value(bits);
                assert_eq!((format.above(x), format.below(x)), (bits, bits));
                assert_eq!(format.above(x.next_up()), bits + 1);
                assert_eq!(format.below(x.next_up()), bits);
                assert_eq!(format.below(-x.next_up()), (bits + 1) | sign);
                if bits > 0 {
                    assert_eq!(format.below(-x), bits | sign);
                    assert_eq!(format.below(-x.next_down()), bits | sign);
                    assert_eq!(format.below(x.next_down()), bits - 1);
                }
            }
        }
    }

    #[test]
    fn numbers_out_of_range_saturate_and_are_finite() {
        for format in ALL {
            for (span, zero) in [
                (f32::MAX, -f32::MAX),
                (f32::INFINITY, f32::MAX),
                (-1.0, 0.0),
            ] {
                let (s, z) = stored(format, span, zero, 15.0);
                assert!(
                    s >= 0.0 && 255.0f32.mul_add(s, z).is_finite(),
                    "{format:?} {s} {z}"
                );
            }
        }
        assert_eq!(stored(ScaleFormat::F16, 1e-8, 0.0, 15.0).0, 2f32.powi(-24));
        assert_eq!(
            stored(ScaleFormat::F16, 1e9, -1e9, 15.0),
            (65_504.0, -65_504.0)
        );
        assert_eq!(stored(ScaleFormat::Fp8, 1e9, -1e9, 7.0), (64.0, -448.0));
        for format in ALL {
            assert_eq!(stored(format, 0.0, -0.0, 3.0).1.to_bits(), 0);
        }
    }

    #[test]
    fn an_e4m3_byte_holds_the_span() {
        // 0.03 is 15.36 of E4M3's smallest numbers; as a step of int4 it would be 1.02 of them.
        assert_eq!(stored(ScaleFormat::Fp8, 0.03, 0.0, 15.0).0, 0.03125 / 15.0);
        assert_eq!(stored(ScaleFormat::F16, 0.75, 0.5, 15.0).1, 0.5);
    }
}
