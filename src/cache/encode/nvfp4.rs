//! `nvfp4`: E2M1 codes in blocks of 16 channels with an E4M3 scale each, 4.5 bits per channel, bit for bit as NVIDIA's
//! Model Optimizer stores a KV cache.
//!
//! Row layout: all codes, two per byte, even channel in the low nibble; then one E4M3 byte per block.
//! A channel is `E2M1(code) · (scale · s2) + bias`.
//!
//! - `amax`: `constant` pins the tensor scale s2 to 448 / 2688 (recipe `nvfp4_cast`); `calibrated` takes
//!   `s2 = amax / (6 · 448)` from the largest magnitude of a layer's side over calibration rows, all KV heads together,
//!   less their bias (recipe `nvfp4`).
//! - `affine`: `mean` and `max_min` subtract a bias per channel of a KV head before anything else, the calibration rows'
//!   mean or the middle of their range (recipe `nvfp4_affine` is `mean` with `amax = "calibrated"`). The first tokens,
//!   which draw most attention, look like no other: a bias helps where they stay exact and hurts where they don't.
//! - `blocks`: `four_over_six` codes each block twice, with its largest magnitude laid on 6 and on 4, and keeps what has
//!   the smaller squared error, 6 when equal. Scales grow by half then, so a calibrated s2 is `amax / (6 · 256)`.
//!
//! Invariants: the block's scale is `E4M3(clamp(max|x| / (6·s2), 2⁻⁹, 448))`, 1.0 for a block of zeros; a code is the
//! E2M1 number nearest to `x / (scale · s2)`, ties to the even code, magnitudes over 6 to 6; a negative number that
//! rounds to zero has code 8, while −0.0 has code 0. A last block that is short is padded with zeros and stored whole:
//! a row takes ⌈dim/16⌉ · 9 bytes. s2 is charged once per layer and side where it is calibrated, a bias with 4 bytes
//! per channel of a KV head. Missing calibration rows are an error.

use std::sync::Arc;

use super::super::stage::{
    BuildContext, Codec, Domain, HeadContext, Kernel, Kind, ParamDef, Params, RowCodec, Stage,
    StageDef, StageError, Tolerance,
};
use super::float8::{self, Float8};
use super::fp8_e4m3::Fp8E4m3;
use super::with_kernel::WithKernel;
use super::{blocks, calibrated, e2m1};
use crate::compute::cpu::rows;
use crate::compute::cpu::vector::{multiversion, sum_lanes};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "nvfp4",
    kind: Kind::Encode,
    doc: "NVFP4: E2M1 blocks of 16 with an E4M3 scale, 4.5 bits per channel",
    paper: "NVIDIA/Model-Optimizer, nvfp4_tensor.py; four_over_six: arXiv 2512.02010",
    params: &[
        ParamDef {
            name: "amax",
            domain: Domain::Choice {
                of: &["constant", "calibrated"],
            },
            default: Some("constant"),
            doc: "what the tensor scale follows from: 448, or a layer's calibration rows",
        },
        ParamDef {
            name: "affine",
            domain: Domain::Choice {
                of: &["none", "mean", "max_min"],
            },
            default: Some("none"),
            doc: "bias per channel of a KV head that is subtracted first, from calibration rows",
        },
        ParamDef {
            name: "blocks",
            domain: Domain::Choice {
                of: &["six", "four_over_six"],
            },
            default: Some("six"),
            doc: "what a block's largest magnitude is laid on: 6, or 4 where that errs less",
        },
    ],
    calibrated: |params| is_amax_calibrated(params) || bias_of(params).is_some(),
    examples: &[
        "\"nvfp4\"",
        "{ method = \"nvfp4\", blocks = \"four_over_six\" }",
        "{ method = \"nvfp4\", amax = \"calibrated\", affine = \"mean\" }",
    ],
    tolerance: Tolerance::RelativeL2(0.18),
    build,
};

const BLOCK: usize = 16;
const CODE_BYTES: usize = BLOCK / 2;
/// The tensor's scale: amax / (6 · 448) with the amax pinned to 448.
const CONSTANT_SCALE: f32 = 448.0 / 2688.0;
/// The largest block scale that is used, so that half as much again is still an E4M3 number.
const FOUR_OVER_SIX_MAX: f32 = 256.0;

/// What a block's largest magnitude is laid on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blocks {
    Six,
    FourOverSix,
}

/// The codec.
#[derive(Debug, Clone)]
pub struct Nvfp4 {
    /// s2.
    tensor_scale: f32,
    blocks: Blocks,
    /// Per channel; empty without one.
    bias: Vec<f32>,
    table_bytes: u64,
}

type Bias = fn(&[f32], usize) -> Vec<f32>;

fn bias_of(params: &Params) -> Option<Bias> {
    match params.text("affine") {
        Some("mean") => Some(calibrated::means),
        Some("max_min") => Some(calibrated::middles),
        _ => None,
    }
}

fn is_amax_calibrated(params: &Params) -> bool {
    params.text("amax") == Some("calibrated")
}

fn build(params: &Params, context: &BuildContext<'_>) -> Result<Stage, StageError> {
    let blocks = match params.text("blocks") {
        Some("four_over_six") => Blocks::FourOverSix,
        _ => Blocks::Six,
    };
    let mut codec = Nvfp4 {
        tensor_scale: CONSTANT_SCALE,
        blocks,
        bias: Vec::new(),
        table_bytes: 0,
    };
    let bias = bias_of(params);
    if let Some(bias) = bias {
        let head = calibrated::head(DEF.name, context)?;
        codec.bias = bias(&head.samples[head.kv_head], head.dim);
        codec.table_bytes += 4 * codec.bias.len() as u64;
    }
    if is_amax_calibrated(params) {
        let head = calibrated::head(DEF.name, context)?;
        let amax = calibrated::largest(DEF.name, &head, centred(&head, bias).into_iter())?;
        codec.tensor_scale = amax / (6.0 * largest_scale(blocks));
        // One scale for the layer's side, charged to its first head.
        codec.table_bytes += if head.kv_head == 0 { 4 } else { 0 };
    }
    let kernel = kernel(&codec);
    Ok(Stage::Encode(Codec::Rows(Arc::new(WithKernel {
        codec,
        kernel,
    }))))
}

/// How stored rows are read.
fn kernel(codec: &Nvfp4) -> Box<dyn Kernel> {
    let (levels, tensor_scale) = (e2m1::LEVELS, codec.tensor_scale);
    let bias = codec.bias.clone();
    if bias.is_empty() {
        return Box::new(rows::Nvfp4::<false> {
            levels,
            tensor_scale,
            bias,
        });
    }
    Box::new(rows::Nvfp4::<true> {
        levels,
        tensor_scale,
        bias,
    })
}

fn largest_scale(blocks: Blocks) -> f32 {
    match blocks {
        Blocks::Six => Fp8E4m3::MAX,
        Blocks::FourOverSix => FOUR_OVER_SIX_MAX,
    }
}

/// All calibration rows of a layer's side, each head's less its bias.
fn centred(head: &HeadContext<'_>, bias: Option<Bias>) -> Vec<f32> {
    let mut all = Vec::new();
    for rows in head.samples {
        let biases = bias.map_or_else(|| vec![0.0; head.dim], |b| b(rows, head.dim));
        for row in rows.chunks_exact(head.dim) {
            all.extend(row.iter().zip(&biases).map(|(x, b)| x - b));
        }
    }
    all
}

impl RowCodec for Nvfp4 {
    fn row_bytes(&self, dim: usize) -> usize {
        dim.div_ceil(BLOCK) * (CODE_BYTES + 1)
    }

    fn scale_bytes(&self, dim: usize) -> usize {
        dim.div_ceil(BLOCK)
    }

    fn encode(&self, row: &[f32], out: &mut [u8]) {
        encode(self, row, out);
    }

    fn decode(&self, bytes: &[u8], row: &mut [f32]) {
        decode_rows(self, bytes, row.len(), row);
    }

    fn decode_rows(&self, bytes: &[u8], dim: usize, rows: &mut [f32]) {
        decode_rows(self, bytes, dim, rows);
    }

    fn table_bytes(&self) -> u64 {
        self.table_bytes
    }
}

multiversion! {
    fn encode(codec: &Nvfp4, row: &[f32], out: &mut [u8]) = encode_body;
}

multiversion! {
    fn decode_rows(codec: &Nvfp4, bytes: &[u8], dim: usize, rows: &mut [f32]) = decode_rows_body;
}

#[inline(always)]
fn encode_body(codec: &Nvfp4, row: &[f32], out: &mut [u8]) {
    let n_blocks = row.len().div_ceil(BLOCK);
    let (codes, scales) = out.split_at_mut(n_blocks * CODE_BYTES);
    let (codes, _) = codes.as_chunks_mut::<CODE_BYTES>();
    for (i, (q, s)) in codes.iter_mut().zip(scales).enumerate() {
        let first = i * BLOCK;
        let mut x = block_of(row, first);
        if !codec.bias.is_empty() {
            let bias = block_of(&codec.bias, first);
            for (x, b) in x.iter_mut().zip(bias) {
                *x -= b;
            }
        }
        let coded = coded(&x, codec);
        (*q, *s) = (coded.codes, coded.scale);
    }
}

/// The channels of a row from `first` on, with zeros after its end.
#[inline(always)]
fn block_of(row: &[f32], first: usize) -> [f32; BLOCK] {
    match row[first..].first_chunk() {
        Some(block) => *block,
        None => blocks::padded(&row[first..]),
    }
}

#[inline(always)]
fn decode_rows_body(codec: &Nvfp4, bytes: &[u8], dim: usize, rows: &mut [f32]) {
    let row_bytes = codec.row_bytes(dim);
    for (b, row) in bytes
        .chunks_exact(row_bytes)
        .zip(rows.chunks_exact_mut(dim))
    {
        decode_row(codec, b, row);
        for (x, b) in row.iter_mut().zip(&codec.bias) {
            *x += b;
        }
    }
}

#[inline(always)]
fn decode_row(codec: &Nvfp4, bytes: &[u8], row: &mut [f32]) {
    let n_blocks = row.len().div_ceil(BLOCK);
    let (codes, scales) = bytes.split_at(n_blocks * CODE_BYTES);
    let (codes, _) = codes.as_chunks::<CODE_BYTES>();
    let (whole, rest) = row.as_chunks_mut::<BLOCK>();
    let mut sources = codes.iter().zip(scales);
    for (x, (q, &s)) in whole.iter_mut().zip(sources.by_ref()) {
        *x = decoded(q, s, codec.tensor_scale);
    }
    if let (false, Some((q, &s))) = (rest.is_empty(), sources.next()) {
        let x = decoded(q, s, codec.tensor_scale);
        rest.copy_from_slice(&x[..rest.len()]);
    }
}

/// A block as it is stored.
struct Coded {
    codes: [u8; CODE_BYTES],
    scale: u8,
}

#[inline(always)]
fn coded(x: &[f32; BLOCK], codec: &Nvfp4) -> Coded {
    let amax = f32::from_bits(blocks::max_magnitude_bits(x));
    let six = coded_by(x, amax, codec.tensor_scale);
    if codec.blocks == Blocks::Six {
        return six;
    }
    let four = coded_by(x, 1.5 * amax, codec.tensor_scale);
    let error = |c: &Coded| squared_distance(x, &decoded(&c.codes, c.scale, codec.tensor_scale));
    if error(&four) < error(&six) {
        four
    } else {
        six
    }
}

/// The block with `amax` laid on 6.
#[inline(always)]
fn coded_by(x: &[f32; BLOCK], amax: f32, tensor_scale: f32) -> Coded {
    let wanted = if amax == 0.0 {
        1.0
    } else {
        // Unclamped, a small block would get scale 0 and a large one NaN.
        (amax / (6.0 * tensor_scale)).clamp(Fp8E4m3::MIN_POSITIVE, Fp8E4m3::MAX)
    };
    let scale = float8::from_f32::<Fp8E4m3>(wanted);
    let step = float8::to_f32::<Fp8E4m3>(scale) * tensor_scale;
    let mut codes = [0; CODE_BYTES];
    for (q, pair) in codes.iter_mut().zip(x.as_chunks::<2>().0) {
        *q = (to_e2m1(pair[0] / step) | to_e2m1(pair[1] / step) << 4) as u8;
    }
    Coded { codes, scale }
}

#[inline(always)]
fn decoded(codes: &[u8; CODE_BYTES], scale: u8, tensor_scale: f32) -> [f32; BLOCK] {
    let step = float8::to_f32::<Fp8E4m3>(scale) * tensor_scale;
    let mut x = [0.0; BLOCK];
    for (pair, &q) in x.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
        pair[0] = e2m1::to_f32(u32::from(q) & 15) * step;
        pair[1] = e2m1::to_f32(u32::from(q) >> 4) * step;
    }
    x
}

/// Σ (x − y)², halving: lanes i and i + 8 first.
#[inline(always)]
fn squared_distance(x: &[f32; BLOCK], y: &[f32; BLOCK]) -> f32 {
    let mut squares = [0.0; BLOCK];
    for (s, (a, b)) in squares.iter_mut().zip(x.iter().zip(y)) {
        *s = (a - b) * (a - b);
    }
    sum_lanes(&squares)
}

/// By comparison, not by the sign bit: a negative number that rounds to zero has code 8, −0.0 has code 0.
#[inline(always)]
fn to_e2m1(x: f32) -> u32 {
    e2m1::magnitude_code(x) | u32::from(x < 0.0) << 3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(blocks: Blocks) -> Nvfp4 {
        Nvfp4 {
            tensor_scale: CONSTANT_SCALE,
            blocks,
            bias: Vec::new(),
            table_bytes: 0,
        }
    }

    fn encoded(x: &[f32; BLOCK]) -> [u8; CODE_BYTES + 1] {
        let mut out = [0; CODE_BYTES + 1];
        plain(Blocks::Six).encode(x, &mut out);
        out
    }

    #[test]
    fn a_negative_that_rounds_to_zero_keeps_its_sign_but_minus_zero_does_not() {
        assert_eq!((to_e2m1(-0.1), to_e2m1(-0.0), to_e2m1(-2.5)), (8, 0, 12));
    }

    #[test]
    fn the_block_scale_is_e4m3_of_its_amax() {
        assert_eq!(6.0 * CONSTANT_SCALE, 1.0);
        let scale_of = |amax: f32| {
            let mut x = [0.0; BLOCK];
            x[5] = -amax;
            float8::to_f32::<Fp8E4m3>(encoded(&x)[CODE_BYTES])
        };
        assert_eq!(scale_of(0.0), 1.0);
        assert_eq!(scale_of(3.3), 3.25);
        assert_eq!(scale_of(1e-6), 1.0 / 512.0);
        assert_eq!(scale_of(448.0), 448.0);
        assert_eq!(scale_of(1e6), 448.0);
    }

    #[test]
    fn the_even_channel_is_in_the_low_nibble_and_scales_follow_the_codes() {
        let mut row = [0.0; 2 * BLOCK];
        row[0] = 6.0; // scale 6, step 1
        row[1] = -1.0;
        row[BLOCK + 2] = -0.01;
        row[BLOCK + 3] = 3.0; // scale 3, step 0.5; −0.01 rounds to −0
        let mut out = [0xee; 18];
        plain(Blocks::Six).encode(&row, &mut out);
        assert_eq!(out[..2], [0xa7, 0]);
        assert_eq!(out[CODE_BYTES..CODE_BYTES + 2], [0, 0x78]);
        assert_eq!(
            out[16..],
            [
                float8::from_f32::<Fp8E4m3>(6.0),
                float8::from_f32::<Fp8E4m3>(3.0)
            ]
        );
        let mut back = [1.0; 2 * BLOCK];
        plain(Blocks::Six).decode(&out, &mut back);
        assert_eq!((back[0], back[1], back[BLOCK + 3]), (6.0, -1.0, 3.0));
        assert!(back[BLOCK + 2] == 0.0 && back[BLOCK + 2].is_sign_negative());
    }

    #[test]
    fn large_blocks_saturate() {
        let mut x = [0.0; BLOCK];
        x[0] = 1e4;
        let mut back = [0.0; BLOCK];
        plain(Blocks::Six).decode(&encoded(&x), &mut back);
        assert_eq!(back[0], 6.0 * (448.0 * CONSTANT_SCALE));
    }

    #[test]
    fn a_block_is_laid_on_four_where_that_errs_less() {
        let round_trip = |x: &[f32; BLOCK]| {
            let codec = plain(Blocks::FourOverSix);
            let (mut out, mut back) = ([0; CODE_BYTES + 1], [0.0; BLOCK]);
            codec.encode(x, &mut out);
            codec.decode(&out, &mut back);
            (float8::to_f32::<Fp8E4m3>(out[CODE_BYTES]), back)
        };
        // 5 lies between 4 and 6; with 6 laid on 4, a unit is 1.5 and 5 becomes 4.5, 3 stays.
        let mut x = [6.0; BLOCK];
        (x[1], x[2]) = (5.0, 3.0);
        let (scale, back) = round_trip(&x);
        assert_eq!((scale, back[0], back[1], back[2]), (9.0, 6.0, 4.5, 3.0));
        // 4, 2 and 1 are exact as they are and not with a unit of 1.5: 6 stays 6.
        (x[1], x[2], x[3]) = (4.0, 2.0, 1.0);
        assert_eq!(round_trip(&x), (6.0, x));
        // Equal errors: 6.
        assert_eq!(round_trip(&[6.0; BLOCK]).0, 6.0);
        assert_eq!(round_trip(&[0.0; BLOCK]).0, 1.0);
    }
}
