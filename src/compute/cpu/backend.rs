//! The `cpu` backend of [`Ops`]: matrices stay where their file is mapped, in its blocks; norms and biases are f32.
//!
//! Invariant: a row's bits do not depend on its neighbours, the number of rows or the threads.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::prelude::*;

use super::linear::{self, Layer, Matrix};
use super::vector;
use crate::model::ops::{Arithmetic, Load, Needed, Ops, bias_of, head_of, needed};
use crate::model::{Activation, ModelError, ModelSpec, Role, WeightSource};

/// Values per task of an element-wise operation: 64 KiB.
const TASK_VALUES: usize = 16 * 1024;

/// Activations on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct HostRows {
    /// `[row][width]`.
    pub data: Vec<f32>,
    /// Values per row.
    pub width: usize,
}

/// One model's weights on the CPU.
pub struct Cpu {
    source: Arc<dyn WeightSource>,
    matrices: BTreeMap<(Role, usize), Matrix>,
    vectors: BTreeMap<(Role, usize), Vec<f32>>,
}

impl Cpu {
    fn matrix(&self, role: Role, layer: usize) -> &Matrix {
        self.matrices
            .get(&(role, layer))
            .expect("`load` opens every matrix of the spec and the transformer asks for no other")
    }
}

fn load_vector(source: &dyn WeightSource, n: Needed) -> Result<Vec<f32>, ModelError> {
    let mut values = vec![0.0; n.cols];
    source.rows_f32(n.role, n.layer, 0, &mut values)?;
    Ok(values)
}

impl Load for Cpu {
    fn load(source: Arc<dyn WeightSource>, arithmetic: Arithmetic) -> Result<Self, ModelError> {
        let (vectors, matrices): (Vec<_>, Vec<_>) =
            needed(&*source)?.into_iter().partition(Needed::is_vector);
        let matrices = matrices
            .into_iter()
            .map(|n| {
                let stored = source.matrix(n.role, n.layer)?;
                let matrix = Matrix::new((n.rows, n.cols), stored).computed_in(arithmetic);
                Ok(((n.role, n.layer), matrix))
            })
            .collect::<Result<_, ModelError>>()?;
        let vectors = vectors
            .into_iter()
            .map(|n| Ok(((n.role, n.layer), load_vector(&*source, n)?)))
            .collect::<Result<_, ModelError>>()?;
        Ok(Self {
            source,
            matrices,
            vectors,
        })
    }
}

impl Ops for Cpu {
    type Act = HostRows;

    fn spec(&self) -> &ModelSpec {
        self.source.spec()
    }

    fn embed(&self, tokens: &[u32]) -> Result<HostRows, ModelError> {
        let (width, scale) = (self.spec().n_embd, self.spec().embedding_scale);
        let mut data = vec![0.0; tokens.len() * width];
        for (&token, row) in tokens.iter().zip(data.chunks_exact_mut(width)) {
            self.source
                .rows_f32(Role::TokenEmbedding, 0, token as usize, row)?;
            row.iter_mut().for_each(|x| *x *= scale);
        }
        Ok(HostRows { data, width })
    }

    fn linear<const N: usize>(
        &self,
        roles: [Role; N],
        layer: usize,
        x: &HostRows,
    ) -> [HostRows; N] {
        let n_rows = x.data.len() / x.width;
        let mut all = roles.map(|role| {
            let width = self.matrix(role, layer).n_out();
            HostRows {
                data: vec![0.0; n_rows * width],
                width,
            }
        });
        let layers = roles.iter().zip(&mut all).map(|(&role, y)| {
            let bias = bias_of(role).and_then(|bias| self.vectors.get(&(bias, layer)));
            Layer {
                weights: self.matrix(role, layer),
                bias: bias.map(Vec::as_slice),
                y: &mut y.data,
            }
        });
        linear::apply(&x.data, layers.collect());
        all
    }

    fn rms_norm(&self, role: Role, layer: usize, x: &HostRows) -> HostRows {
        let weight = self
            .vectors
            .get(&(role, layer))
            .expect("`load` reads every norm of the spec and the transformer asks for no other");
        let eps = self.spec().rms_eps;
        let mut out = x.clone();
        out.data
            .par_chunks_exact_mut(weight.len())
            .with_min_len(TASK_VALUES / weight.len())
            .for_each(|run| vector::rms_norm(run, weight, eps));
        out
    }

    fn gate(&self, mut gate: HostRows, up: &HostRows) -> HostRows {
        let activate = match self.spec().activation {
            Activation::Silu => vector::silu_mul,
            Activation::GeluTanh => vector::gelu_tanh_mul,
        };
        gate.data
            .par_chunks_mut(TASK_VALUES)
            .zip(up.data.par_chunks(TASK_VALUES))
            .for_each(|(gate, up)| activate(gate, up));
        gate
    }

    fn add(&self, mut x: HostRows, y: &HostRows) -> HostRows {
        vector::add(&mut x.data, &y.data);
        x
    }

    fn read<'a>(&self, x: &'a HostRows) -> Cow<'a, [f32]> {
        Cow::Borrowed(&x.data)
    }

    fn write(&self, rows: Vec<f32>, width: usize) -> HostRows {
        HostRows { data: rows, width }
    }

    fn logits(&self, hidden: &[f32], out: &mut [f32]) {
        self.matrix(head_of(self.spec()), 0)
            .apply(hidden, None, out);
    }
}
