//! `random_rotation`: one random orthogonal map of all channels, for rows of any width (odd ones too, which no
//! Walsh–Hadamard transform serves).
//!
//! z = Rᵀ·x with R drawn from the Haar distribution by `seed`; expand is R·z, and a query is absorbed as Rᵀ·q. A rotation
//! keeps lengths and products; like `hadamard` it spreads an outlier over all channels, but it costs dim² products
//! and 4·dim² bytes.
//!
//! Invariants: one matrix per width of rows, shared by all layers and heads and charged once; drawn in f64, rounded to
//! f32.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::rotation::haar_f32;
use super::super::stage::{
    BuildContext, Domain, Kind, ParamDef, Params, Projection, Stage, StageDef, StageError,
    Tolerance, never,
};
use crate::compute::cpu::vector::{axpy_rows, dot_rows};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "random_rotation",
    kind: Kind::Project,
    doc: "a random orthogonal map of all channels, any head_dim; spreads outliers",
    paper: "random rotations before quantizing: QuIP#, arXiv 2402.04396; TurboQuant, arXiv 2504.19874",
    params: &[ParamDef {
        name: "seed",
        domain: Domain::Int {
            min: 0,
            max: i64::MAX,
        },
        default: Some("0"),
        doc: "which rotation is drawn",
    }],
    calibrated: never,
    examples: &[
        "\"random_rotation\"",
        "{ method = \"random_rotation\", seed = 7 }",
    ],
    tolerance: Tolerance::RelativeL2(2e-6),
    build,
};

/// The rotation.
#[derive(Debug, Clone)]
pub struct RandomRotation {
    /// By layer.
    matrices: Vec<Arc<[f32]>>,
    weight_bytes: u64,
}

fn build(params: &Params, context: &BuildContext<'_>) -> Result<Stage, StageError> {
    let seed = params.int("seed").unwrap_or_default().unsigned_abs();
    let mut by_dim: BTreeMap<usize, Arc<[f32]>> = BTreeMap::new();
    let layers = context.geometry.layers.iter();
    let matrices = layers
        .map(|layer| {
            let drawn = || haar_f32(layer.head_dim, seed).into();
            by_dim.entry(layer.head_dim).or_insert_with(drawn).clone()
        })
        .collect();
    let weight_bytes = by_dim.values().map(|m| size_of_val(&m[..]) as u64).sum();
    Ok(Stage::Project(Arc::new(RandomRotation {
        matrices,
        weight_bytes,
    })))
}

impl Projection for RandomRotation {
    fn output_dim(&self, dim: usize) -> usize {
        dim
    }

    fn forward(&self, layer: usize, _kv_head: usize, x: &[f32], z: &mut [f32]) {
        z.fill(0.0);
        axpy_rows(x, &self.matrices[layer], z);
    }

    fn expand(&self, layer: usize, _kv_head: usize, z: &[f32], x: &mut [f32]) {
        dot_rows(&self.matrices[layer], z, x);
    }

    fn absorb(&self, layer: usize, kv_head: usize, q: &[f32], out: &mut [f32]) {
        self.forward(layer, kv_head, q, out);
    }

    fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }
}
