//! `svd`: each KV head's rows as coordinates along the `rank` directions in which a calibration text's rows are largest.
//!
//! With C = Σ x·xᵀ / n over the calibration rows of one layer and KV head (not centred), B holds the eigenvectors of C's
//! `rank` largest eigenvalues as columns: z = Bᵀ·x is stored, x̂ = B·z is what attention sees, and a query is absorbed as
//! q' = Bᵀ·q. Of all subspaces of that dimension this one loses the least of the calibration rows' energy. K uses the
//! covariance of the form in which keys are stored, before or after RoPE.
//!
//! Ten rows of two channels near the line (2, 1), rank 1: each row becomes its coordinate along B, and what lies across
//! the line is lost.
//!
//! ```text
//! x   |              •  •            B = (.89, .45)
//!     |          • •                 z = .89·x₀ + .45·x₁
//!     |      • •                     x̂ = z·B
//!     |  • •
//!     |• •__________________
//! ```
//!
//! Invariants: eigenvectors in f64, then rounded to f32; in order of falling eigenvalue; the component of largest
//! magnitude (the first of several) is positive, so a basis does not depend on signs that the solver is free to choose.
//! Weights are `[layer][kv_head][head_dim][rank]` f32, shared by all sequences and charged.

use std::sync::Arc;

use nalgebra::{DMatrix, SymmetricEigen};

use super::super::stage::{
    BuildContext, Domain, HeadCovariance, KeyForm, Kind, ParamDef, Params, Projection, Side, Stage,
    StageDef, StageError, Tolerance, always,
};
use crate::compute::cpu::vector::{axpy_rows, dot_rows};

// Far above what a matrix of 1,024 channels needs; only numbers that are not finite get there.
const MAX_ITERATIONS: usize = 1 << 20;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "svd",
    kind: Kind::Project,
    doc: "the `rank` strongest directions of each KV head over a calibration text",
    paper: "truncated SVD of calibration rows; low-rank KV caches: Palu, arXiv 2407.21118",
    params: &[ParamDef {
        name: "rank",
        domain: Domain::Int { min: 1, max: 1024 },
        default: None,
        doc: "channels that are stored per row, at most head_dim",
    }],
    calibrated: always,
    examples: &["{ method = \"svd\", rank = 16 }"],
    // A rank below head_dim may lose all of a random row, but never more.
    tolerance: Tolerance::RelativeL2(1.000_001),
    build,
};

/// The bases.
#[derive(Debug, Clone)]
pub struct Svd {
    rank: usize,
    /// `[layer][kv_head]` of `[head_dim][rank]`.
    bases: Vec<Vec<Vec<f32>>>,
}

fn refused(problem: String) -> StageError {
    StageError::Parameter {
        kind: Kind::Project,
        name: DEF.name.to_owned(),
        problem,
    }
}

fn build(params: &Params, context: &BuildContext<'_>) -> Result<Stage, StageError> {
    let rank = params
        .int("rank")
        .and_then(|r| usize::try_from(r).ok())
        .ok_or_else(|| refused("`rank` is missing: give 1 to head_dim".to_owned()))?;
    let layers = &context.geometry.layers;
    for (layer, geometry) in layers.iter().enumerate() {
        if !(1..=geometry.head_dim).contains(&rank) {
            return Err(refused(format!(
                "`rank` is {rank}, layer {layer} has head_dim {0}: give 1 to {0}",
                geometry.head_dim
            )));
        }
    }
    let calibration = context
        .calibration
        .ok_or_else(|| StageError::NoCalibration {
            kind: Kind::Project,
            name: DEF.name.to_owned(),
        })?;
    if calibration.heads.len() != layers.len() {
        return Err(refused(format!(
            "the calibration covers {} layers, the model has {}: calibrate with this model",
            calibration.heads.len(),
            layers.len()
        )));
    }
    let bases = layers
        .iter()
        .zip(&calibration.heads)
        .enumerate()
        .map(|(layer, (geometry, heads))| {
            if heads.len() != geometry.n_kv_heads {
                return Err(refused(format!(
                    "the calibration covers {} KV heads of layer {layer}, the model has {}: calibrate with this model",
                    heads.len(),
                    geometry.n_kv_heads
                )));
            }
            let covariances = heads.iter().map(|h| covariance(h, context));
            covariances
                .enumerate()
                .map(|(head, c)| {
                    basis(c, geometry.head_dim, rank)
                        .map_err(|why| refused(format!("layer {layer}, KV head {head}: {why}")))
                })
                .collect()
        })
        .collect::<Result<_, _>>()?;
    Ok(Stage::Project(Arc::new(Svd { rank, bases })))
}

fn covariance<'a>(head: &'a HeadCovariance, context: &BuildContext<'_>) -> &'a [f64] {
    match (context.side, context.keys) {
        (Side::K, KeyForm::PreRope) => &head.k_pre,
        (Side::K, KeyForm::PostRope) => &head.k_post,
        (Side::V, _) => &head.v,
    }
}

/// The first `rank` eigenvectors as columns of `[dim][rank]`.
fn basis(covariance: &[f64], dim: usize, rank: usize) -> Result<Vec<f32>, String> {
    if covariance.len() != dim * dim {
        return Err(format!(
            "the calibration has {} numbers, head_dim {dim} asks for {}: calibrate with this model",
            covariance.len(),
            dim * dim
        ));
    }
    if covariance.iter().any(|c| !c.is_finite()) {
        return Err("the calibration has numbers that are not finite: calibrate again".to_owned());
    }
    let matrix = DMatrix::from_row_slice(dim, dim, covariance);
    let eigen = SymmetricEigen::try_new(matrix, f64::EPSILON, MAX_ITERATIONS).ok_or_else(|| {
        "the eigenvalues did not converge: use another calibration text".to_owned()
    })?;
    let mut order: Vec<usize> = (0..dim).collect();
    // Stable: equal eigenvalues stay in the solver's order.
    order.sort_by(|&a, &b| eigen.eigenvalues[b].total_cmp(&eigen.eigenvalues[a]));
    let mut basis = vec![0.0; dim * rank];
    for (r, &column) in order.iter().take(rank).enumerate() {
        let vector = eigen.eigenvectors.column(column);
        let largest = vector
            .iter()
            .fold(0.0f64, |m, &x| if x.abs() > m.abs() { x } else { m });
        let sign = if largest < 0.0 { -1.0 } else { 1.0 };
        for (d, x) in vector.iter().enumerate() {
            basis[d * rank + r] = (sign * x) as f32;
        }
    }
    Ok(basis)
}

impl Svd {
    fn basis(&self, layer: usize, kv_head: usize) -> &[f32] {
        &self.bases[layer][kv_head]
    }
}

impl Projection for Svd {
    fn output_dim(&self, _dim: usize) -> usize {
        self.rank
    }

    fn forward(&self, layer: usize, kv_head: usize, x: &[f32], z: &mut [f32]) {
        z.fill(0.0);
        axpy_rows(x, self.basis(layer, kv_head), z);
    }

    fn expand(&self, layer: usize, kv_head: usize, z: &[f32], x: &mut [f32]) {
        dot_rows(self.basis(layer, kv_head), z, x);
    }

    fn absorb(&self, layer: usize, kv_head: usize, q: &[f32], out: &mut [f32]) {
        self.forward(layer, kv_head, q, out);
    }

    fn weight_bytes(&self) -> u64 {
        let heads = self.bases.iter().flatten();
        heads.map(|b| size_of_val(b.as_slice()) as u64).sum()
    }
}
