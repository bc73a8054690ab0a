//! FP8 rows, one byte per channel, with the scale of one's choice; shared by `fp8_e4m3` and `fp8_e5m2`.
//!
//! | `scale` | from | stored |
//! |---|---|---|
//! | `none` | no scale: a plain cast | - |
//! | `tensor` | the largest magnitude of all calibration rows of a layer's side | 4 bytes per layer and side |
//! | `head` | the same of one KV head | 4 bytes per layer, side and KV head |
//! | `token` | the row's own largest magnitude | 4 bytes per row, before the codes |
//!
//! Invariants, as NVIDIA's Model Optimizer has them: with `up = MAX · (1 / amax)` and `down = 1 / up` in f32, each step
//! rounded, a byte is the nearest number to `x · up` and reads as its value times `down`; beyond amax it saturates. A
//! row's amax of at most 2⁻²⁴ counts as 1. A calibrated scale without calibration rows is an error.

use std::marker::PhantomData;
use std::sync::Arc;

use super::super::stage::{
    BuildContext, Codec, Domain, Kernel, ParamDef, Params, RowCodec, Stage, StageError,
};
use super::calibrated;
use super::float8::Float8;
use super::with_kernel::WithKernel;

/// Parameters of both formats.
pub(super) const PARAMS: &[ParamDef] = &[ParamDef {
    name: "scale",
    domain: Domain::Choice {
        of: &["none", "tensor", "head", "token"],
    },
    default: Some("none"),
    doc: "what a scale is shared by: nothing is scaled, a layer's side, a KV head, a token's row",
}];

/// Bytes of a scale.
const SCALE_BYTES: usize = 4;
/// A row's largest magnitude up to this is taken for 1.
const NEGLIGIBLE: f32 = 1.0 / (1 << 24) as f32;

/// Rows of one layout compiled for several instruction sets: [`encode`] and [`decode`], which can't be chosen at run time
/// in generic code.
pub(super) trait Layout: Float8 + Send + Sync + 'static {
    /// [`encode`] of this layout.
    fn encode(row: &[f32], up: f32, out: &mut [u8]);
    /// [`decode`] of this layout.
    fn decode(bytes: &[u8], down: f32, row: &mut [f32]);
    /// Kernels for rows with that factor, or with their own.
    fn kernel(down: Option<f32>) -> Box<dyn Kernel>;
}

/// The bytes of `row · up`.
#[inline(always)]
pub(super) fn encode<F: Float8>(row: &[f32], up: f32, out: &mut [u8]) {
    for (b, &x) in out.iter_mut().zip(row) {
        *b = super::float8::from_f32::<F>(x * up);
    }
}

/// The values of bytes, times `down`.
#[inline(always)]
pub(super) fn decode<F: Float8>(bytes: &[u8], down: f32, row: &mut [f32]) {
    for (x, &b) in row.iter_mut().zip(bytes) {
        *x = super::float8::to_f32::<F>(b) * down;
    }
}

/// What lays `amax` on the largest number. torch divides a number by a tensor in these two steps.
fn up<F: Float8>(amax: f32) -> f32 {
    amax.recip() * F::MAX
}

#[derive(Debug, Clone, Copy)]
enum Scale {
    /// The same for every row; `table_bytes` is what this head is charged for it.
    Fixed { up: f32, table_bytes: u64 },
    /// Each row's own.
    Token,
}

struct Fp8<F> {
    scale: Scale,
    layout: PhantomData<F>,
}

/// Whether the parameters ask for calibration rows.
pub(super) fn is_calibrated(params: &Params) -> bool {
    matches!(params.text("scale"), Some("tensor" | "head"))
}

/// The codec of the stage `name`.
///
/// # Errors
/// [`StageError::NoCalibration`] for a calibrated scale without calibration rows.
pub(super) fn build<F: Layout>(
    name: &str,
    params: &Params,
    context: &BuildContext<'_>,
) -> Result<Stage, StageError> {
    let scale = match params.text("scale") {
        Some("token") => Scale::Token,
        Some("tensor") => {
            let head = calibrated::head(name, context)?;
            let amax = calibrated::largest(name, &head, head.samples.iter().flatten().copied())?;
            // One scale for the layer's side, charged to its first head.
            let table_bytes = if head.kv_head == 0 {
                SCALE_BYTES as u64
            } else {
                0
            };
            Scale::Fixed {
                up: up::<F>(amax),
                table_bytes,
            }
        }
        Some("head") => {
            let head = calibrated::head(name, context)?;
            let rows = head.samples[head.kv_head].iter().copied();
            let amax = calibrated::largest(name, &head, rows)?;
            Scale::Fixed {
                up: up::<F>(amax),
                table_bytes: SCALE_BYTES as u64,
            }
        }
        _ => Scale::Fixed {
            up: 1.0,
            table_bytes: 0,
        },
    };
    let down = match scale {
        Scale::Fixed { up, .. } => Some(1.0 / up),
        Scale::Token => None,
    };
    Ok(Stage::Encode(Codec::Rows(Arc::new(WithKernel {
        codec: Fp8::<F> {
            scale,
            layout: PhantomData,
        },
        kernel: F::kernel(down),
    }))))
}

impl<F: Layout> RowCodec for Fp8<F> {
    fn row_bytes(&self, dim: usize) -> usize {
        dim + self.scale_bytes(dim)
    }

    fn scale_bytes(&self, _dim: usize) -> usize {
        match self.scale {
            Scale::Fixed { .. } => 0,
            Scale::Token => SCALE_BYTES,
        }
    }

    fn encode(&self, row: &[f32], out: &mut [u8]) {
        match self.scale {
            Scale::Fixed { up, .. } => F::encode(row, up, out),
            Scale::Token => {
                // As integers, so that a NaN is the largest and shows in the scale.
                let bits = row
                    .iter()
                    .fold(0, |m, x| (x.to_bits() & 0x7fff_ffff).max(m));
                let amax = f32::from_bits(bits);
                let up = up::<F>(if amax <= NEGLIGIBLE { 1.0 } else { amax });
                let (scale, codes) = out.split_at_mut(SCALE_BYTES);
                scale.copy_from_slice(&(1.0 / up).to_le_bytes());
                F::encode(row, up, codes);
            }
        }
    }

    fn decode(&self, bytes: &[u8], row: &mut [f32]) {
        match self.scale {
            Scale::Fixed { up, .. } => F::decode(bytes, 1.0 / up, row),
            Scale::Token => {
                let down = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                F::decode(&bytes[SCALE_BYTES..], down, row);
            }
        }
    }

    fn decode_rows(&self, bytes: &[u8], dim: usize, rows: &mut [f32]) {
        if let Scale::Fixed { .. } = self.scale {
            return self.decode(bytes, rows);
        }
        let n = self.row_bytes(dim);
        for (b, row) in bytes.chunks_exact(n).zip(rows.chunks_exact_mut(dim)) {
            self.decode(b, row);
        }
    }

    fn table_bytes(&self) -> u64 {
        match self.scale {
            Scale::Fixed { table_bytes, .. } => table_bytes,
            Scale::Token => 0,
        }
    }
}
