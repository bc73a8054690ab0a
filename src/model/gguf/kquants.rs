//! Decoders of ggml's K-quants: super-blocks of 256 elements whose sub-blocks have quantized scales.
//!
//! Layouts: ggml's `ggml-common.h`. Each decoder takes one whole super-block; the order of products is the reference's
//! (`(d * scale) * q - (dmin * min)`), each rounded, so that values equal it to the bit.

use super::dequant::half_at;

/// Unpacks scale and min number `j` (0 to 7) of the 12 bytes in which Q4_K and Q5_K keep eight 6-bit pairs.
///
/// Bytes 0 to 3 hold scales 0 to 3 and bytes 4 to 7 mins 0 to 3 in their low 6 bits; their upper 2 bits are the top of
/// scales and mins 4 to 7, whose low 4 bits share bytes 8 to 11.
fn scale_and_min(packed: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (
            packed[j + 4] & 15 | packed[j - 4] >> 6 << 4,
            packed[j + 4] >> 4 | packed[j] >> 6 << 4,
        )
    };
    (scale.into(), min.into())
}

/// d, dmin: f16, 12 bytes of scales, 128 bytes of nibbles; 32 bytes hold 32 elements low and the next 32 high.
pub fn q4_k(block: &[u8], y: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for (j, y) in y.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(&block[4..16], j);
        let (scale, min) = (d * scale, dmin * min);
        let nibbles = &block[16 + j / 2 * 32..][..32];
        for (y, q) in y.iter_mut().zip(nibbles) {
            *y = scale * f32::from(q >> (j % 2 * 4) & 15) - min;
        }
    }
}

/// As q4_k, with 32 bytes of fifth bits before the nibbles: bit j of byte i belongs to element i of sub-block j.
pub fn q5_k(block: &[u8], y: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let high = &block[16..48];
    for (j, y) in y.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(&block[4..16], j);
        let (scale, min) = (d * scale, dmin * min);
        let nibbles = &block[48 + j / 2 * 32..][..32];
        for ((y, q), h) in y.iter_mut().zip(nibbles).zip(high) {
            let q = q >> (j % 2 * 4) & 15 | (h >> j & 1) << 4;
            *y = scale * f32::from(q) - min;
        }
    }
}

/// 128 bytes of low nibbles, 64 bytes of upper 2-bit pairs, 16 signed scales (one per 16 elements), d: f16.
///
/// Each half of 128 elements uses 64 + 32 bytes: its four groups of 32 take the low nibbles of bytes 0..32 and 32..64,
/// then the high nibbles of the same, and bits 0-1, 2-3, 4-5, 6-7 of the upper bytes. Value = d * scale * (q - 32).
pub fn q6_k(block: &[u8], y: &mut [f32]) {
    let d = half_at(block, 208);
    for (g, y) in y.chunks_exact_mut(32).enumerate() {
        let (half, group) = (g / 4, g % 4);
        let low = &block[half * 64 + group % 2 * 32..][..32];
        let high = &block[128 + half * 32..][..32];
        let scales = &block[192 + g * 2..][..2];
        for (i, (y, (low, high))) in y.iter_mut().zip(low.iter().zip(high)).enumerate() {
            let q = low >> (group / 2 * 4) & 15 | (high >> (group * 2) & 3) << 4;
            let scale = d * f32::from(scales[i / 16].cast_signed());
            *y = scale * (i32::from(q) - 32) as f32;
        }
    }
}
