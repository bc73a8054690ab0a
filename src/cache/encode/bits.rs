//! Codes of a few bits as one stream, least significant bit first: code i takes bits `B·i` to `B·(i + 1)` of a
//! little-endian number as long as it needs to be.
//!
//! Eight codes of B bits are B whole bytes, the unit of the loops here. Three bits, codes a to h:
//!
//! ```text
//! byte         0          1          2
//! bit       76543210   76543210   76543210
//! holds     ccbbbaaa   feeedddc   hhhgggff
//! ```
//!
//! Invariant: bits after the last code are 0, so the bytes depend on the codes alone.

/// Codes at a time.
pub(super) const RUN: usize = 8;

/// Bytes of `n` codes of `bits` bits.
pub(super) fn stream_bytes(n: usize, bits: usize) -> usize {
    (n * bits).div_ceil(8)
}

/// Packs eight codes below `2^B`, B at most 8.
#[inline(always)]
pub(super) fn pack<const B: usize>(codes: &[u8; RUN], out: &mut [u8; B]) {
    let mut word = 0u64;
    for (i, &c) in codes.iter().enumerate() {
        word |= u64::from(c) << (B * i);
    }
    out.copy_from_slice(&word.to_le_bytes()[..B]);
}

/// The eight codes of B bytes, B at most 4 or 8.
#[inline(always)]
pub(super) fn unpack<const B: usize>(bytes: &[u8; B]) -> [u32; RUN] {
    let mut codes = [0; RUN];
    if B == 8 {
        for (c, &b) in codes.iter_mut().zip(bytes) {
            *c = u32::from(b);
        }
    } else {
        let mut word = [0; 4];
        word[..B].copy_from_slice(bytes);
        let word = u32::from_le_bytes(word);
        for (i, c) in codes.iter_mut().enumerate() {
            *c = word >> (B * i) & ((1 << B) - 1);
        }
    }
    codes
}

/// The last bytes of a stream, padded to those of eight codes.
#[inline(always)]
pub(super) fn last<const B: usize>(bytes: &[u8]) -> [u8; B] {
    let mut padded = [0; B];
    padded[..bytes.len()].copy_from_slice(bytes);
    padded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back<const B: usize>() {
        let mut bytes = [0xff; B];
        for start in 0..1u32 << B {
            let codes: [u8; RUN] =
                std::array::from_fn(|i| ((start + 3 * i as u32) % (1 << B)) as u8);
            pack(&codes, &mut bytes);
            assert_eq!(unpack(&bytes).map(|c| c as u8), codes);
        }
    }

    #[test]
    fn codes_come_back() {
        there_and_back::<2>();
        there_and_back::<3>();
        there_and_back::<4>();
        there_and_back::<8>();
    }

    #[test]
    fn the_drawing_is_true() {
        let mut bytes = [0; 3];
        for (code, mask) in [
            [0b0000_0111, 0, 0],
            [0b0011_1000, 0, 0],
            [0b1100_0000, 1, 0],
            [0, 0b0000_1110, 0],
            [0, 0b0111_0000, 0],
            [0, 0b1000_0000, 0b11],
            [0, 0, 0b0001_1100],
            [0, 0, 0b1110_0000],
        ]
        .into_iter()
        .enumerate()
        {
            let mut codes = [0; RUN];
            codes[code] = 7;
            pack(&codes, &mut bytes);
            assert_eq!(bytes, mask);
        }
        assert_eq!(stream_bytes(8, 3), 3);
        assert_eq!(stream_bytes(33, 3), 13);
    }
}
