//! Predictors of a layer's rows from those of the layer before: their weights, their fit, and the reconstruction that a
//! step carries from layer to layer. The stage that asks for them is [`super::project::aqua`].
//!
//! Invariants: a row's prediction is one chain of fused multiply-adds per channel, so it depends on the row alone; rows
//! are predicted from what is stored of the layer before, in encoding and in reading alike, to the same bits.

mod carry;
mod fit;
mod moments;
mod shelf;

pub use carry::{Carries, Carry, Walk};
pub use fit::Fit;
pub use shelf::Shelf;

use super::project::aqua::WeightFormat;
use super::stage::Side;
use crate::compute::cpu::gemm::{Dims, Mat, MatMut, gemm};

/// x·W + b for rows of all KV heads together.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Affine {
    /// `[input][kv_head · head_dim]`, each input's row encoded; empty for a layer that has nothing before it.
    pub weights: Vec<u8>,
    /// `[kv_head · head_dim]`.
    pub bias: Vec<f32>,
}

impl Affine {
    /// The weights as numbers to multiply by.
    pub fn widen(&self, format: WeightFormat, weights: &mut Vec<f32>) {
        let (codec, width) = (format.codec(), self.bias.len());
        let n = self.weights.len() / codec.row_bytes(width) * width;
        super::scratch::room(weights, n);
        weights.resize(n, 0.0);
        codec.decode_rows(&self.weights, width, weights);
    }

    /// Predicts rows. `weights`: as [`Affine::widen`] gave them; `inputs`: `[row][input]`; `out`: `[row][channel]`.
    pub fn apply(&self, weights: &[f32], inputs: &[f32], out: &mut [f32]) {
        let width = self.bias.len();
        let depth = weights.len() / width;
        gemm(
            Dims {
                m: out.len() / width,
                n: width,
                k: depth,
            },
            Mat {
                data: inputs,
                stride: depth,
            },
            Mat {
                data: weights,
                stride: width,
            },
            MatMut {
                data: out,
                stride: width,
            },
        );
        for row in out.chunks_exact_mut(width) {
            for (x, b) in row.iter_mut().zip(&self.bias) {
                *x += b;
            }
        }
    }
}

/// All layers' predictors.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Predictor {
    /// How the weights are stored.
    pub format: WeightFormat,
    /// By layer and [`Side`]: K from `[K of the layer before]`, V from `[V of the layer before, K of the layer]`.
    pub layers: Vec<[Affine; 2]>,
}

impl Predictor {
    /// Bytes of the weights.
    pub fn weight_bytes(&self) -> u64 {
        let all = self.layers.iter().flatten();
        all.map(|a| (size_of_val(&a.weights[..]) + size_of_val(&a.bias[..])) as u64)
            .sum()
    }

    /// Whether the shapes are those for so many layers and channels of all KV heads together.
    pub fn suits(&self, n_layers: usize, width: usize) -> bool {
        let sound = |(layer, sides): (usize, &[Affine; 2])| {
            Side::BOTH.iter().zip(sides).all(|(&side, affine)| {
                let n_inputs = if layer == 0 {
                    0
                } else {
                    (1 + side as usize) * width
                };
                let n_bytes = n_inputs * self.format.codec().row_bytes(width);
                affine.bias.len() == width && affine.weights.len() == n_bytes
            })
        };
        self.layers.len() == n_layers && self.layers.iter().enumerate().all(sound)
    }

    /// The predictor of one side of a layer.
    pub fn affine(&self, layer: usize, side: Side) -> &Affine {
        &self.layers[layer][side as usize]
    }
}

/// What a side is predicted from, row by row: `[row][input]`. `before`: the side's rows of the layer before; `keys`: K of
/// the layer itself; both `[row][width]`.
fn gather(side: Side, before: &[f32], keys: &[f32], width: usize, inputs: &mut Vec<f32>) {
    inputs.clear();
    match side {
        Side::K => inputs.extend_from_slice(before),
        Side::V => {
            for (v, k) in before.chunks_exact(width).zip(keys.chunks_exact(width)) {
                inputs.extend_from_slice(v);
                inputs.extend_from_slice(k);
            }
        }
    }
}
