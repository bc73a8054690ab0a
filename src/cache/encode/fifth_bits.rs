//! Codes of 5 bits as ggml packs them: four bits in nibbles, the fifth bits of all 32 channels in one u32.
//!
//! Bit j of the little-endian u32 belongs to channel j; byte j of the nibbles holds channel j low and channel j + 16 high.

const BLOCK: usize = 32;
const HALF: usize = BLOCK / 2;
/// Bytes of a block's codes.
pub(super) const BYTES: usize = 4 + HALF;

/// Packs codes below 32 into [`BYTES`] bytes.
#[inline(always)]
pub(super) fn pack(codes: &[u8; BLOCK], out: &mut [u8]) {
    for (bits, q) in out.iter_mut().zip(codes.as_chunks::<8>().0) {
        // Byte i's lowest bit times 2^(56 − 7i) is bit 56 + i; no other product of the sum reaches the top byte.
        let ones = u64::from_le_bytes(*q) >> 4 & 0x0101_0101_0101_0101;
        *bits = (ones.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8;
    }
    let (low, high) = codes.split_at(HALF);
    for ((b, a), h) in out[4..].iter_mut().zip(low).zip(high) {
        *b = a & 15 | h << 4;
    }
}

/// The codes that [`pack`] packed.
#[inline(always)]
pub(super) fn unpack(bytes: &[u8]) -> [u8; BLOCK] {
    let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let mut codes = [0; BLOCK];
    let (low, high) = codes.split_at_mut(HALF);
    for (j, ((a, h), b)) in low.iter_mut().zip(high).zip(&bytes[4..]).enumerate() {
        *a = b & 15 | ((bits >> j & 1) << 4) as u8;
        *h = b >> 4 | ((bits >> (j + HALF) & 1) << 4) as u8;
    }
    codes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_stand_where_ggml_has_them_and_come_back() {
        let mut codes = [0; BLOCK];
        (codes[0], codes[3], codes[16], codes[31]) = (0x1f, 0x02, 0x11, 0x18);
        let mut out = [0xee; BYTES];
        pack(&codes, &mut out);
        assert_eq!(out[..4], [1, 0, 1, 0x80]);
        assert_eq!((out[4], out[7], out[19]), (0x1f, 0x02, 0x80));
        assert_eq!(unpack(&out), codes);
        for shift in 0..BLOCK {
            let codes: [u8; BLOCK] = std::array::from_fn(|j| ((j + shift) * 7 % BLOCK) as u8);
            pack(&codes, &mut out);
            assert_eq!(unpack(&out), codes);
        }
    }
}
