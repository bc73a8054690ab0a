//! The `burn` backend of [`Ops`]: every operation in burn's tensors, on burn-flex here and on any other burn backend.
//!
//! It is the independent oracle of the `cpu` backend's logits, and where training starts. Invariant: only embedding rows
//! come in and only queries, keys, values, hidden rows and logits go out; weights are f32 (flex would convert bf16 weights
//! anew at every call). It does **not** promise a row the same bits in every batch.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::activation::{gelu_approximate, silu};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};

use crate::model::ops::{Arithmetic, Load, Needed, Ops, bias_of, head_of, needed};
use crate::model::{Activation, ModelError, ModelSpec, Role, WeightSource};

/// burn-flex: burn on the CPU, in Rust alone.
pub type Flex = burn::backend::Flex;

/// One model's weights in a burn backend.
pub struct Burn<B: Backend> {
    source: Arc<dyn WeightSource>,
    device: B::Device,
    /// Matrices as `[in][out]`, vectors as `[1][n]`.
    weights: BTreeMap<(Role, usize), Tensor<B, 2>>,
}

impl<B: Backend> Burn<B> {
    fn weight(&self, role: Role, layer: usize) -> Tensor<B, 2> {
        self.weights
            .get(&(role, layer))
            .expect("`load` reads every tensor of the spec and the transformer asks for no other")
            .clone()
    }

    /// Logits of hidden rows, as tensors.
    pub fn head(&self, hidden: Tensor<B, 2>) -> Tensor<B, 2> {
        hidden.matmul(self.weight(head_of(self.spec()), 0))
    }

    fn tensor(&self, values: Vec<f32>, width: usize) -> Tensor<B, 2> {
        let shape = [values.len() / width, width];
        Tensor::from_data(TensorData::new(values, shape), &self.device)
    }
}

fn values<B: Backend>(x: Tensor<B, 2>) -> Vec<f32> {
    x.into_data()
        .convert::<f32>()
        .into_vec()
        .expect("the data was just converted to f32")
}

/// Reads a tensor, matrices transposed to `[in][out]`.
fn read(source: &dyn WeightSource, n: Needed) -> Result<TensorData, ModelError> {
    let mut rows = vec![0.0f32; n.rows * n.cols];
    source.rows_f32(n.role, n.layer, 0, &mut rows)?;
    if n.is_vector() {
        return Ok(TensorData::new(rows, [n.rows, n.cols]));
    }
    let mut columns = vec![0.0f32; rows.len()];
    for (o, row) in rows.chunks_exact(n.cols).enumerate() {
        for (i, &w) in row.iter().enumerate() {
            columns[i * n.rows + o] = w;
        }
    }
    Ok(TensorData::new(columns, [n.cols, n.rows]))
}

impl<B: Backend> Load for Burn<B> {
    fn load(source: Arc<dyn WeightSource>, arithmetic: Arithmetic) -> Result<Self, ModelError> {
        if !arithmetic.is_f32() {
            let problem = format!(
                "burn multiplies in f32, got arithmetic {}: take the cpu backend for it",
                arithmetic.name()
            );
            return Err(ModelError::invalid(&source.spec().name, problem));
        }
        let device = B::Device::default();
        let weights = needed(&*source)?
            .into_iter()
            .map(|n| {
                Ok((
                    (n.role, n.layer),
                    Tensor::from_data(read(&*source, n)?, &device),
                ))
            })
            .collect::<Result<_, ModelError>>()?;
        Ok(Self {
            source,
            device,
            weights,
        })
    }
}

impl<B: Backend> Ops for Burn<B> {
    type Act = Tensor<B, 2>;

    fn spec(&self) -> &ModelSpec {
        self.source.spec()
    }

    fn embed(&self, tokens: &[u32]) -> Result<Self::Act, ModelError> {
        let width = self.spec().n_embd;
        let mut rows = vec![0.0; tokens.len() * width];
        for (&token, row) in tokens.iter().zip(rows.chunks_exact_mut(width)) {
            self.source
                .rows_f32(Role::TokenEmbedding, 0, token as usize, row)?;
        }
        let scale = self.spec().embedding_scale;
        Ok(self.tensor(rows, width).mul_scalar(scale))
    }

    fn linear<const N: usize>(
        &self,
        roles: [Role; N],
        layer: usize,
        x: &Self::Act,
    ) -> [Self::Act; N] {
        roles.map(|role| {
            let y = x.clone().matmul(self.weight(role, layer));
            match bias_of(role).filter(|_| self.spec().qkv_bias) {
                Some(bias) => y + self.weight(bias, layer),
                None => y,
            }
        })
    }

    fn rms_norm(&self, role: Role, layer: usize, x: &Self::Act) -> Self::Act {
        let weight = self.weight(role, layer);
        let [n_rows, width] = x.dims();
        let run = weight.dims()[1];
        let x = x.clone().reshape([n_rows * width / run, run]);
        let mean = (x.clone() * x.clone()).mean_dim(1);
        let scale = (mean + self.spec().rms_eps).sqrt().recip();
        (x * scale * weight).reshape([n_rows, width])
    }

    fn gate(&self, gate: Self::Act, up: &Self::Act) -> Self::Act {
        let active = match self.spec().activation {
            Activation::Silu => silu(gate),
            Activation::GeluTanh => gelu_approximate(gate),
        };
        active * up.clone()
    }

    fn add(&self, x: Self::Act, y: &Self::Act) -> Self::Act {
        x + y.clone()
    }

    fn read<'a>(&self, x: &'a Self::Act) -> Cow<'a, [f32]> {
        Cow::Owned(values(x.clone()))
    }

    fn write(&self, rows: Vec<f32>, width: usize) -> Self::Act {
        self.tensor(rows, width)
    }

    fn logits(&self, hidden: &[f32], out: &mut [f32]) {
        let hidden = self.tensor(hidden.to_vec(), self.spec().n_embd);
        out.copy_from_slice(&values(self.head(hidden)));
    }
}
