//! The types tensors are stored in, and their way back to f32.
//!
//! Layouts: ggml's `ggml-common.h` and `ggml-quants.c`, public description of the GGUF format. Elements come in blocks of
//! consecutive elements of a row. Invariants: a product is rounded before an offset is added to it (no fused
//! multiply-add), in the order of the reference, so that values equal it to the bit; a decoder never reads past its block.

use half::{bf16, f16};

use super::kquants;

/// How a tensor's elements are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are ggml's, described by `BLOCKS`")]
#[allow(non_camel_case_types, reason = "the names are ggml's")]
pub enum TensorType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

/// One decoder: whole blocks in, `block_len` floats out for each.
type Decode = fn(&[u8], &mut [f32]);

/// (type, number in GGUF files, elements per block, bytes per block, decoder of one block).
const BLOCKS: [(TensorType, u32, usize, usize, Decode); 11] = [
    (TensorType::F32, 0, 1, 4, |b, y| {
        y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }),
    (TensorType::F16, 1, 1, 2, |b, y| y[0] = half_at(b, 0)),
    (TensorType::Q4_0, 2, 32, 18, q4_0),
    (TensorType::Q4_1, 3, 32, 20, q4_1),
    (TensorType::Q5_0, 6, 32, 22, q5_0),
    (TensorType::Q5_1, 7, 32, 24, q5_1),
    (TensorType::Q8_0, 8, 32, 34, q8_0),
    (TensorType::Q4_K, 12, 256, 144, kquants::q4_k),
    (TensorType::Q5_K, 13, 256, 176, kquants::q5_k),
    (TensorType::Q6_K, 14, 256, 210, kquants::q6_k),
    (TensorType::BF16, 30, 1, 2, |b, y| {
        y[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32()
    }),
];

/// Names of types that exist but aren't read, by number.
const OTHERS: [(u32, &str); 9] = [
    (10, "Q2_K"),
    (11, "Q3_K"),
    (16, "IQ2_XXS"),
    (20, "IQ4_NL"),
    (23, "IQ4_XS"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

impl TensorType {
    fn row(self) -> &'static (TensorType, u32, usize, usize, Decode) {
        BLOCKS
            .iter()
            .find(|row| row.0 == self)
            .expect("BLOCKS has a row for each variant")
    }

    /// The type with this number in GGUF files, if it can be read.
    pub fn from_id(id: u32) -> Option<Self> {
        BLOCKS.iter().find(|row| row.1 == id).map(|row| row.0)
    }

    /// What to call the type with this number in a message.
    pub fn name_of_id(id: u32) -> String {
        let other = OTHERS.iter().find(|(n, _)| *n == id);
        other.map_or_else(|| format!("number {id}"), |(_, name)| (*name).to_owned())
    }

    /// The names of all types that can be read.
    pub fn known() -> String {
        BLOCKS.map(|row| format!("{:?}", row.0)).join(", ")
    }

    /// Elements in a block.
    pub fn block_len(self) -> usize {
        self.row().2
    }

    /// Bytes in a block.
    pub fn block_bytes(self) -> usize {
        self.row().3
    }

    /// Decodes whole blocks: `bytes` holds exactly `out.len()` elements, a multiple of [`Self::block_len`].
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        let (_, _, len, n_bytes, decode) = self.row();
        debug_assert_eq!(bytes.len() / n_bytes, out.len() / len);
        for (block, y) in bytes.chunks_exact(*n_bytes).zip(out.chunks_exact_mut(*len)) {
            decode(block, y);
        }
    }
}

/// The f16 at byte `at`, as f32.
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// d: f16, 16 bytes of nibbles: low nibbles are elements 0 to 15, high ones 16 to 31. Value = d * (q - 8).
fn q4_0(block: &[u8], y: &mut [f32]) {
    let d = half_at(block, 0);
    for (j, q) in block[2..].iter().enumerate() {
        y[j] = (i32::from(q & 15) - 8) as f32 * d;
        y[j + 16] = (i32::from(q >> 4) - 8) as f32 * d;
    }
}

/// d, m: f16, nibbles as in q4_0. Value = d * q + m.
fn q4_1(block: &[u8], y: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (j, q) in block[4..].iter().enumerate() {
        y[j] = f32::from(q & 15) * d + m;
        y[j + 16] = f32::from(q >> 4) * d + m;
    }
}

/// The 32 unsigned 5-bit codes of a block: nibbles as in q4_0, and bit j of `high` on top of element j.
fn five_bits(high: &[u8], nibbles: &[u8]) -> [u8; 32] {
    let high = u32::from_le_bytes([high[0], high[1], high[2], high[3]]);
    let top = |j: usize| (((high >> j) & 1) << 4) as u8;
    std::array::from_fn(|j| {
        if j < 16 {
            nibbles[j] & 15 | top(j)
        } else {
            nibbles[j - 16] >> 4 | top(j)
        }
    })
}

/// d: f16, 4 bytes of fifth bits, nibbles. Value = d * (q - 16).
fn q5_0(block: &[u8], y: &mut [f32]) {
    let d = half_at(block, 0);
    for (y, q) in y.iter_mut().zip(five_bits(&block[2..6], &block[6..])) {
        *y = (i32::from(q) - 16) as f32 * d;
    }
}

/// d, m: f16, 4 bytes of fifth bits, nibbles. Value = d * q + m.
fn q5_1(block: &[u8], y: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (y, q) in y.iter_mut().zip(five_bits(&block[4..8], &block[8..])) {
        *y = f32::from(q) * d + m;
    }
}

/// d: f16, 32 signed bytes. Value = d * q.
fn q8_0(block: &[u8], y: &mut [f32]) {
    let d = half_at(block, 0);
    for (y, q) in y.iter_mut().zip(&block[2..]) {
        *y = f32::from(q.cast_signed()) * d;
    }
}
