//! A model's forward pass over burn tensors from tokens to logits, attention included, so that gradients reach what gates
//! rows: the training-time twin of the engine with a cache, for one short window at a time.
//!
//! A gate multiplies what a query gives a row older than the newest [`RECENT`] (the first [`SINKS`] aside): with 0 the row
//! is evicted, with 1 it lives. Invariants: without gates the logits are the engine's but for rounding; with gates of 0
//! they are those of a cache that holds the first and the newest rows alone.

use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

use crate::cache::rope::Rope;
use crate::cache::{Geometry, LayerGeometry};
use crate::compute::burn::Burn;
use crate::model::ops::Ops;
use crate::model::transformer::Transformer;
use crate::model::{ModelError, Role};

/// First rows that always live.
pub const SINKS: usize = 4;

/// Newest rows, besides the query's own, that always live.
pub const RECENT: usize = 64;

/// A model, with what its attention needs for windows of one length.
pub struct Forward<'a, B: Backend> {
    model: &'a Transformer<Burn<B>>,
    geometry: &'a Geometry,
    n_tokens: usize,
    /// By layer: `[token][head_dim][head_dim]`, a row times which is turned.
    rotations: Vec<Tensor<B, 3>>,
    /// By layer: 0 where a query sees a row, far below elsewhere, `[1][group · token][token]`.
    masks: Vec<Tensor<B, 3>>,
    /// By layer: 1 where a row is old to a query, `[1][group · token][token]`.
    old: Vec<Tensor<B, 3>>,
}

impl<'a, B: Backend> Forward<'a, B> {
    /// For windows of `n_tokens`.
    pub fn new(model: &'a Transformer<Burn<B>>, geometry: &'a Geometry, n_tokens: usize) -> Self {
        let device = B::Device::default();
        let mut ropes: Vec<(Arc<Rope>, Tensor<B, 3>)> = Vec::new();
        let mut rotation = |g: &LayerGeometry| {
            if let Some((_, r)) = ropes.iter().find(|(rope, _)| Arc::ptr_eq(rope, &g.rope)) {
                return r.clone();
            }
            let tensor = rotations::<B>(g, n_tokens, &device);
            ropes.push((g.rope.clone(), tensor.clone()));
            tensor
        };
        let rotations = geometry.layers.iter().map(&mut rotation).collect();
        let pairs = |g: &LayerGeometry, f: &dyn Fn(usize, usize) -> f32| {
            let rows = (0..g.group()).flat_map(|_| 0..n_tokens);
            let values: Vec<f32> = rows
                .flat_map(|t| (0..n_tokens).map(move |j| (t, j)))
                .map(|(t, j)| f(t, j))
                .collect();
            let shape = [1, g.group() * n_tokens, n_tokens];
            Tensor::from_data(TensorData::new(values, shape), &device)
        };
        let mask = |g: &LayerGeometry| {
            let reach = g.window.map_or(usize::MAX, |w| w as usize);
            pairs(g, &|t, j| if j <= t && t - j < reach { 0.0 } else { -1e30 })
        };
        let old =
            |g: &LayerGeometry| pairs(g, &|t, j| f32::from(u8::from(j >= SINKS && j + RECENT < t)));
        Self {
            model,
            geometry,
            n_tokens,
            rotations,
            masks: geometry.layers.iter().map(mask).collect(),
            old: geometry.layers.iter().map(old).collect(),
        }
    }

    /// Logits of some positions, `[position][n_vocab]`. `gates`: by layer, `[kv_head][1][token]`, where there is one.
    ///
    /// # Errors
    /// A token that the model has no embedding for.
    pub fn logits(
        &self,
        tokens: &[u32],
        positions: &[i32],
        gates: &[Option<Tensor<B, 3>>],
    ) -> Result<Tensor<B, 2>, ModelError> {
        let ops = self.model.ops();
        let mut x = ops.embed(tokens)?;
        for layer in 0..ops.spec().n_layers {
            let gate = gates.get(layer).cloned().flatten();
            let attended = self.attention(layer, &x, gate);
            x = ops.add(x, &attended);
            let fed = self.model.feed_forward(layer, &x);
            x = ops.add(x, &fed);
        }
        let indices = Tensor::<B, 1, Int>::from_data(
            TensorData::new(positions.to_vec(), [positions.len()]),
            &B::Device::default(),
        );
        let last = ops.rms_norm(Role::OutputNorm, 0, &x.select(0, indices));
        Ok(ops.head(last))
    }

    fn attention(
        &self,
        layer: usize,
        x: &Tensor<B, 2>,
        gate: Option<Tensor<B, 3>>,
    ) -> Tensor<B, 2> {
        let (ops, g, n) = (
            self.model.ops(),
            &self.geometry.layers[layer],
            self.n_tokens,
        );
        let normed = ops.rms_norm(Role::AttnNorm, layer, x);
        let [mut q, mut k, v] = ops.linear([Role::Q, Role::K, Role::V], layer, &normed);
        if ops.spec().qk_norm {
            q = ops.rms_norm(Role::QNorm, layer, &q);
            k = ops.rms_norm(Role::KNorm, layer, &k);
        }
        let turned = |x: Tensor<B, 2>, heads: usize| {
            let rows = x.reshape([n, heads, g.head_dim]);
            rows.matmul(self.rotations[layer].clone()).swap_dims(0, 1)
        };
        let shape = [g.n_kv_heads, g.group() * n, g.head_dim];
        let q = turned(q, g.n_heads).reshape(shape);
        let k = turned(k, g.n_kv_heads);
        let v = v.reshape([n, g.n_kv_heads, g.head_dim]).swap_dims(0, 1);
        let scores = q.matmul(k.swap_dims(1, 2)).mul_scalar(g.scale) + self.masks[layer].clone();
        let most = scores.clone().max_dim(2).detach();
        let mut weights = (scores - most).exp();
        if let Some(gate) = gate {
            let old = self.old[layer].clone();
            let young = old.clone().neg().add_scalar(1.0);
            weights = weights * (young + old * gate);
        }
        let sums = weights.clone().sum_dim(2);
        let out = (weights / sums).matmul(v);
        let rows = out.reshape([g.n_heads, n, g.head_dim]).swap_dims(0, 1);
        let rows = rows.reshape([n, g.n_heads * g.head_dim]);
        let [out] = ops.linear([Role::AttnOut], layer, &rows);
        self.model.post_norm(Role::PostAttnNorm, layer, out)
    }
}

/// What the engine's own rotation makes of each unit vector, `[token][channel][head_dim]`.
fn rotations<B: Backend>(g: &LayerGeometry, n_tokens: usize, device: &B::Device) -> Tensor<B, 3> {
    let d = g.head_dim;
    let mut values = vec![0.0f32; n_tokens * d * d];
    for (i, row) in values.chunks_exact_mut(d).enumerate() {
        row[i % d] = 1.0;
        g.rope.rotate((i / d) as u32, row);
    }
    Tensor::from_data(TensorData::new(values, [n_tokens, d, d]), device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::stage::{Params, Value};
    use crate::cache::strategy::{StageSpec, Strategy};
    use crate::cache::{Admission, Batch, KvCache, Materials, SeqId, StagedCache};
    use crate::compute::burn::Flex;
    use crate::compute::cpu::Cpu;
    use crate::model::Architecture;
    use crate::model::geometry::geometry;
    use crate::model::tiny::{TinyConfig, TinyModel};
    use crate::model::transformer::LanguageModel;

    const N: usize = 100;

    fn tokens() -> Vec<u32> {
        (0..N)
            .map(|i| ((i * 89 + i * i * 7) % 256) as u32)
            .collect()
    }

    /// The engine's logits of the last position, token by token.
    fn engine(source: Arc<TinyModel>, strategy: &Strategy) -> Vec<f32> {
        let model = Transformer::<Cpu>::load(source).unwrap();
        let geometry = geometry(model.spec(), N);
        let materials = Materials {
            geometry: &geometry,
            calibration: None,
            backing_dir: None,
        };
        let mut cache = StagedCache::new(strategy, materials).unwrap();
        cache.admit(SeqId(0), Admission::Streaming).unwrap();
        let mut logits = vec![0.0; model.spec().n_vocab];
        for (t, &token) in tokens().iter().enumerate() {
            let batch = Batch::single(SeqId(0), t as u32..t as u32 + 1);
            let hidden = model.step(&batch, &[token], &mut cache).unwrap();
            model.logits(&hidden, 0..1, &mut logits);
        }
        logits
    }

    /// The twin's, with one value for all gates.
    fn twin(source: Arc<TinyModel>, gate: Option<f32>) -> Vec<f32> {
        let model = Transformer::<Burn<Flex>>::load(source).unwrap();
        let geometry = geometry(model.spec(), N);
        let gates: Vec<_> = geometry
            .layers
            .iter()
            .map(|g| {
                let shape = [g.n_kv_heads, 1, N];
                gate.map(|gate| Tensor::full(shape, gate, &Default::default()))
            })
            .collect();
        let forward = Forward::new(&model, &geometry, N);
        let logits = forward.logits(&tokens(), &[N as i32 - 1], &gates).unwrap();
        logits.into_data().into_vec().unwrap()
    }

    fn apart(a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).fold(0.0, |m, (a, b)| m.max((a - b).abs()))
    }

    #[test]
    fn logits_are_the_engine_s_in_every_architecture() {
        for architecture in [
            Architecture::Llama,
            Architecture::Qwen2,
            Architecture::Qwen3,
            Architecture::Gemma3,
        ] {
            let source = Arc::new(TinyModel::new(&TinyConfig::of(architecture)));
            let engine = engine(source.clone(), &Strategy::bare("f32"));
            for gate in [None, Some(1.0)] {
                let worst = apart(&engine, &twin(source.clone(), gate));
                assert!(worst <= 1e-3, "{architecture:?}: {worst:e}");
            }
        }
    }

    #[test]
    fn closed_gates_leave_the_first_and_the_newest_rows() {
        let source = Arc::new(TinyModel::new(&TinyConfig::default()));
        let mut strategy = Strategy::bare("f32");
        let params = [("recent", RECENT), ("sinks", SINKS)];
        let params = params.map(|(k, v)| (k.to_owned(), Value::Int(v as i64)));
        strategy.retain = Some(StageSpec {
            name: "window".to_owned(),
            params: Params(params.into()),
        });
        let closed = twin(source.clone(), Some(0.0));
        let worst = apart(&engine(source.clone(), &strategy), &closed);
        assert!(worst <= 1e-3, "{worst:e}");
        let open = twin(source, None);
        assert!(apart(&open, &closed) > 1e-2, "the gates change nothing");
    }
}
