//! `hadamard`: an orthonormal Walsh–Hadamard rotation of each block of channels, which spreads outliers over the block
//! before rows are quantized.
//!
//! The block is the largest power of two that divides the row's channels, at most `block`: one of 64 for head_dim 64,
//! two for 128, five of 16 for 80. With H of size n = 2^k, z = H·x / √n; H is symmetric and H·H = n, so forward, expand
//! and absorb are the same map and there are no weights.
//!
//! A block of 4, outlier 8 in channel 1:
//!
//! ```text
//! x            0   8   0   0
//! h = 1        8  -8   0   0     (a, b) -> (a + b, a - b), one apart
//! h = 2        8  -8   8  -8     the same, two apart
//! · 1/2        4  -4   4  -4
//! ```
//!
//! Invariants: log₂ n passes of additions in one order, then one multiplication; rows with an odd number of channels
//! (a latent of odd rank) stay as they are, and a model whose head_dim is odd is refused.

use std::sync::Arc;

use super::super::stage::{
    BuildContext, Domain, Kind, ParamDef, Params, Projection, Stage, StageDef, StageError,
    Tolerance, never,
};
use crate::compute::cpu::vector::multiversion;

const DEFAULT_BLOCK: usize = 64;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "hadamard",
    kind: Kind::Project,
    doc: "Walsh-Hadamard rotation of blocks of channels; spreads outliers, no weights",
    paper: "QuaRot, arXiv 2404.00456; on KV caches ggml-org/llama.cpp#21038",
    params: &[ParamDef {
        name: "block",
        domain: Domain::Int { min: 2, max: 1024 },
        default: Some("64"),
        doc: "largest block of channels, a power of two",
    }],
    calibrated: never,
    examples: &["\"hadamard\"", "{ method = \"hadamard\", block = 16 }"],
    tolerance: Tolerance::RelativeL2(1e-6),
    build,
};

/// The rotation.
#[derive(Debug, Clone, Copy)]
pub struct Hadamard {
    /// Largest block, a power of two.
    max_block: usize,
}

fn build(params: &Params, context: &BuildContext<'_>) -> Result<Stage, StageError> {
    let refused = |problem: String| StageError::Parameter {
        kind: Kind::Project,
        name: DEF.name.to_owned(),
        problem,
    };
    let max_block = params
        .int("block")
        .map_or(Some(DEFAULT_BLOCK), |b| usize::try_from(b).ok())
        .filter(|b| b.is_power_of_two() && *b > 1)
        .ok_or_else(|| {
            refused(format!(
                "`block` is {}, must be a power of two from 2 to 1024",
                params.int("block").unwrap_or_default()
            ))
        })?;
    let layers = context.geometry.layers.iter().enumerate();
    for (layer, geometry) in layers {
        if geometry.head_dim % 2 == 1 {
            return Err(refused(format!(
                "layer {layer} has head_dim {}, an odd number has no block to rotate: take \"random_rotation\", which serves any",
                geometry.head_dim
            )));
        }
    }
    Ok(Stage::Project(Arc::new(Hadamard { max_block })))
}

impl Hadamard {
    fn rotate(self, x: &[f32], z: &mut [f32]) {
        z.copy_from_slice(x);
        // The lowest set bit is the largest power of two that divides; 0 channels have none.
        let block = (1 << x.len().trailing_zeros().min(31)).min(self.max_block);
        rotate_blocks(block, z);
    }
}

impl Projection for Hadamard {
    fn output_dim(&self, dim: usize) -> usize {
        dim
    }

    fn forward(&self, _layer: usize, _kv_head: usize, x: &[f32], z: &mut [f32]) {
        self.rotate(x, z);
    }

    fn expand(&self, _layer: usize, _kv_head: usize, z: &[f32], x: &mut [f32]) {
        self.rotate(z, x);
    }

    fn absorb(&self, _layer: usize, _kv_head: usize, q: &[f32], out: &mut [f32]) {
        self.rotate(q, out);
    }

    fn weight_bytes(&self) -> u64 {
        0
    }
}

multiversion! {
    fn rotate_blocks(block: usize, x: &mut [f32]) = rotate_blocks_body;
}

#[inline(always)]
fn rotate_blocks_body(block: usize, x: &mut [f32]) {
    let scale = 1.0 / (block as f32).sqrt();
    for block in x.chunks_exact_mut(block) {
        let mut h = 1;
        while h < block.len() {
            for pair in block.chunks_exact_mut(2 * h) {
                let (low, high) = pair.split_at_mut(h);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            h *= 2;
        }
        for v in block {
            *v *= scale;
        }
    }
}
