//! Rows as blocks of a fixed number of channels, for formats whose blocks lie back to back.
//!
//! Invariants: a last block that is short is padded with zeros before it is coded, so its bytes depend on the row
//! alone; what a block decodes to past the end of the row is dropped.

/// A format whose blocks of `N` channels take `BYTES` bytes each, back to back.
///
/// A trait rather than closures: a direct call to an `#[inline(always)]` function is certain to be compiled for the
/// instruction set of the caller.
pub(super) trait Block<const N: usize, const BYTES: usize> {
    /// Codes one block.
    fn encode_block(x: &[f32; N], out: &mut [u8; BYTES]);
    /// Decodes one block.
    fn decode_block(bytes: &[u8; BYTES], x: &mut [f32; N]);
}

/// Makes a [`Block`] format of `$channels` channels in `$bytes` bytes, `$scale_bytes` of them scales, a codec of rows,
/// compiled for several instruction sets. `$kernel`: its kernels over stored rows, if there are any.
macro_rules! block_codec {
    ($format:ident, $channels:ident, $bytes:ident, $scale_bytes:expr, $kernel:expr) => {
        impl $crate::cache::stage::RowCodec for $format {
            fn row_bytes(&self, dim: usize) -> usize {
                dim.div_ceil($channels) * $bytes
            }

            fn scale_bytes(&self, dim: usize) -> usize {
                dim.div_ceil($channels) * $scale_bytes
            }

            fn encode(&self, row: &[f32], out: &mut [u8]) {
                encode(row, out);
            }

            fn decode(&self, bytes: &[u8], row: &mut [f32]) {
                decode_rows(bytes, row.len(), row);
            }

            fn decode_rows(&self, bytes: &[u8], dim: usize, rows: &mut [f32]) {
                decode_rows(bytes, dim, rows);
            }

            fn kernel(&self) -> Option<&dyn $crate::cache::stage::Kernel> {
                $kernel
            }
        }

        $crate::compute::cpu::vector::multiversion! {
            fn encode(row: &[f32], out: &mut [u8]) =
                $crate::cache::encode::blocks::encode::<$format, $channels, $bytes>;
        }

        $crate::compute::cpu::vector::multiversion! {
            fn decode_rows(bytes: &[u8], dim: usize, rows: &mut [f32]) =
                $crate::cache::encode::blocks::decode_rows::<$format, $channels, $bytes>;
        }
    };
}
pub(super) use block_codec;

/// Codes each block of a row.
#[inline(always)]
pub(super) fn encode<B: Block<N, BYTES>, const N: usize, const BYTES: usize>(
    row: &[f32],
    out: &mut [u8],
) {
    debug_assert_eq!(out.len(), row.len().div_ceil(N) * BYTES);
    let (whole, rest) = row.as_chunks::<N>();
    let (out, _) = out.as_chunks_mut::<BYTES>();
    for (x, b) in whole.iter().zip(out.iter_mut()) {
        B::encode_block(x, b);
    }
    if let (false, Some(last)) = (rest.is_empty(), out.get_mut(whole.len())) {
        B::encode_block(&padded(rest), last);
    }
}

/// Decodes rows of `dim` channels that lie back to back.
#[inline(always)]
pub(super) fn decode_rows<B: Block<N, BYTES>, const N: usize, const BYTES: usize>(
    bytes: &[u8],
    dim: usize,
    rows: &mut [f32],
) {
    let row_bytes = dim.div_ceil(N) * BYTES;
    for (b, row) in bytes
        .chunks_exact(row_bytes)
        .zip(rows.chunks_exact_mut(dim))
    {
        let (b, _) = b.as_chunks::<BYTES>();
        let (whole, rest) = row.as_chunks_mut::<N>();
        for (b, x) in b.iter().zip(whole.iter_mut()) {
            B::decode_block(b, x);
        }
        if let (false, Some(last)) = (rest.is_empty(), b.get(whole.len())) {
            let mut x = [0.0; N];
            B::decode_block(last, &mut x);
            rest.copy_from_slice(&x[..rest.len()]);
        }
    }
}

/// A short block with zeros after it.
#[inline(always)]
pub(super) fn padded<const N: usize>(rest: &[f32]) -> [f32; N] {
    let mut x = [0.0; N];
    x[..rest.len()].copy_from_slice(rest);
    x
}

/// The bits of the largest magnitude: for numbers, their order as integers is the order of |x|. A NaN comes out as the
/// largest, so it is never hidden.
#[inline(always)]
pub(super) fn max_magnitude_bits<const N: usize>(x: &[f32; N]) -> u32 {
    let mut bits = x.map(|v| v.to_bits() & 0x7fff_ffff);
    let mut width = N / 2;
    // Halving keeps each step one vector operation; a running maximum would be one long chain.
    while width > 0 {
        for i in 0..width {
            bits[i] = bits[i].max(bits[i + width]);
        }
        width /= 2;
    }
    bits[0]
}

/// The value of largest magnitude with its sign, the first of several; +0.0 for zeros of whatever sign.
#[inline(always)]
pub(super) fn extreme<const N: usize>(x: &[f32; N]) -> f32 {
    let magnitude = max_magnitude_bits(x);
    let mut first = [N as u32 - 1; N];
    for (i, (f, v)) in first.iter_mut().zip(x).enumerate() {
        if v.to_bits() & 0x7fff_ffff == magnitude {
            *f = i as u32;
        }
    }
    let mut width = N / 2;
    while width > 0 {
        for i in 0..width {
            first[i] = first[i].min(first[i + width]);
        }
        width /= 2;
    }
    x[first[0] as usize & (N - 1)] + 0.0
}

/// The smallest and the largest value. Of zeros of both signs the first one counts, as in a plain loop.
#[inline(always)]
pub(super) fn range<const N: usize>(x: &[f32; N]) -> (f32, f32) {
    let (mut low, mut high) = (*x, *x);
    let mut width = N / 2;
    while width > 0 {
        for i in 0..width {
            low[i] = if low[i + width] < low[i] {
                low[i + width]
            } else {
                low[i]
            };
            high[i] = if high[i + width] > high[i] {
                high[i + width]
            } else {
                high[i]
            };
        }
        width /= 2;
    }
    // Halving meets the channels in another order, which shows in nothing but the sign of a zero.
    let first_zero = || x.iter().copied().find(|v| *v == 0.0);
    let signed = |v: f32| {
        if v == 0.0 {
            first_zero().unwrap_or(v)
        } else {
            v
        }
    };
    (signed(low[0]), signed(high[0]))
}

/// The low byte, in two's complement, of an integer of at most 22 bits that an f32 holds: adding 1.5·2²³ leaves the
/// integer in the mantissa. A cast with `as` would saturate, which does not vectorise here.
#[inline(always)]
pub(super) fn low_byte(integer: f32) -> u8 {
    (integer + 12_582_912.0).to_bits() as u8
}
