//! Small random models for tests and examples: any architecture, any shape, all weights from one seed.
//!
//! Invariants: equal configurations give equal bits; weights are scaled so that attention is neither flat nor a single
//! spike, and logits spread over a few nats.

use std::collections::BTreeMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{
    Activation, Architecture, LayerSpec, ModelError, ModelSpec, Role, RopeLayout, RopeScaling,
    RopeSpec, WeightSource,
};

/// The shape of a [`TinyModel`].
#[derive(Debug, Clone, PartialEq)]
pub struct TinyConfig {
    /// Decides biases, norms, activation, RoPE layout and windows.
    pub architecture: Architecture,
    /// Layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key/value heads.
    pub n_kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Width of the feed-forward part.
    pub n_ff: usize,
    /// Vocabulary.
    pub n_vocab: usize,
    /// Longest context.
    pub context_length: usize,
    /// Sliding window of every second layer (layers 0, 2, …).
    pub window: Option<usize>,
    /// Whether the output has its own matrix or uses the embedding's.
    pub output: TinyOutput,
    /// Seed of all weights.
    pub seed: u64,
}

/// Where a [`TinyModel`]'s logits come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TinyOutput {
    /// The embedding's rows.
    Tied,
    /// A matrix of their own.
    Separate,
}

impl Default for TinyConfig {
    fn default() -> Self {
        Self {
            architecture: Architecture::Llama,
            n_layers: 2,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 32,
            n_embd: 64,
            n_ff: 128,
            n_vocab: 256,
            context_length: 4096,
            window: None,
            output: TinyOutput::Tied,
            seed: 0,
        }
    }
}

impl TinyConfig {
    /// The default shape in another architecture.
    pub fn of(architecture: Architecture) -> Self {
        Self {
            architecture,
            window: (architecture == Architecture::Gemma3).then_some(24),
            ..Self::default()
        }
    }

    fn spec(&self) -> ModelSpec {
        let gemma = self.architecture == Architecture::Gemma3;
        let layer = |i: usize| {
            let window = self.window.filter(|_| i.is_multiple_of(2));
            LayerSpec {
                rope: RopeSpec {
                    // Gemma's windowed layers have a base of their own.
                    base: if gemma && window.is_none() { 1e6 } else { 1e4 },
                    scaling: RopeScaling::None,
                    layout: match self.architecture {
                        Architecture::Llama => RopeLayout::Interleaved,
                        _ => RopeLayout::HalfSplit,
                    },
                    n_rot: self.head_dim,
                },
                window,
            }
        };
        ModelSpec {
            architecture: self.architecture,
            name: "tiny".to_owned(),
            n_layers: self.n_layers,
            n_embd: self.n_embd,
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            n_ff: self.n_ff,
            n_vocab: self.n_vocab,
            context_length: self.context_length,
            rms_eps: 1e-5,
            attention_scale: 1.0 / (self.head_dim as f32).sqrt(),
            activation: if gemma {
                Activation::GeluTanh
            } else {
                Activation::Silu
            },
            embedding_scale: if gemma {
                (self.n_embd as f32).sqrt()
            } else {
                1.0
            },
            qkv_bias: self.architecture == Architecture::Qwen2,
            qk_norm: matches!(
                self.architecture,
                Architecture::Qwen3 | Architecture::Gemma3
            ),
            post_norms: gemma,
            tied_output: self.output == TinyOutput::Tied,
            layers: (0..self.n_layers).map(layer).collect(),
            add_bos: false,
            bos_id: None,
            eos_ids: vec![0],
            weights_bytes: 0,
        }
    }
}

/// A random model in memory.
///
/// ```
/// use std::sync::Arc;
/// use kvlab::compute::cpu::Cpu;
/// use kvlab::model::tiny::{TinyConfig, TinyModel};
/// use kvlab::model::transformer::{LanguageModel, Transformer};
///
/// let source = Arc::new(TinyModel::new(&TinyConfig::default()));
/// let model = Transformer::<Cpu>::load(source)?;
/// assert_eq!(model.spec().n_kv_heads, 2);
/// # Ok::<(), kvlab::model::ModelError>(())
/// ```
#[derive(Debug, Clone)]
pub struct TinyModel {
    spec: ModelSpec,
    tensors: BTreeMap<(Role, usize), Vec<f32>>,
}

impl TinyModel {
    /// Draws the weights.
    pub fn new(config: &TinyConfig) -> Self {
        let mut spec = config.spec();
        let layers = (0..spec.n_layers).flat_map(|l| Role::OF_LAYER.map(|role| (role, l)));
        let outer = Role::OUTER.map(|role| (role, 0));
        let mut rng = ChaCha8Rng::seed_from_u64(config.seed);
        let mut tensors = BTreeMap::new();
        for (role, layer) in outer.into_iter().chain(layers) {
            if let Some(shape) = role.shape_in(&spec) {
                tensors.insert((role, layer), draw(&mut rng, role, shape));
            }
        }
        spec.weights_bytes = tensors.values().map(|t| 4 * t.len() as u64).sum();
        Self { spec, tensors }
    }
}

/// Uniform numbers with the mean and the standard deviation that suit the role.
fn draw(rng: &mut ChaCha8Rng, role: Role, (rows, cols): (usize, usize)) -> Vec<f32> {
    let per_input = 1.0 / (cols as f32).sqrt();
    let (mean, deviation) = match role {
        _ if role.is_norm() => (1.0, 0.1),
        Role::QBias | Role::KBias | Role::VBias => (0.0, 0.2),
        // Scores then have a deviation of about 2.
        Role::Q | Role::K => (0.0, 1.4 * per_input),
        Role::TokenEmbedding | Role::Output => (0.0, 2.0 * per_input),
        _ => (0.0, per_input),
    };
    let half_width = deviation * 3f32.sqrt();
    (0..rows * cols)
        .map(|_| mean + rng.random_range(-half_width..half_width))
        .collect()
}

impl WeightSource for TinyModel {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn shape(&self, role: Role, layer: usize) -> Option<(usize, usize)> {
        self.tensors.get(&(role, layer))?;
        role.shape_in(&self.spec)
    }

    fn rows_f32(
        &self,
        role: Role,
        layer: usize,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let (rows, cols) = self.shape(role, layer).unwrap_or((0, 1));
        let whole = out.len().is_multiple_of(cols);
        let values = self.tensors.get(&(role, layer)).filter(|_| whole);
        let from = first.saturating_mul(cols);
        match values.and_then(|t| t.get(from..from.saturating_add(out.len()))) {
            Some(values) => {
                out.copy_from_slice(values);
                Ok(())
            }
            None => Err(ModelError::NoSuchRows {
                role,
                layer,
                first,
                end: first + out.len().div_ceil(cols),
                rows,
                cols,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_decides_and_reads_are_checked() {
        let (a, b) = (
            TinyModel::new(&TinyConfig::default()),
            TinyModel::new(&TinyConfig::default()),
        );
        assert_eq!(a.tensors, b.tensors);
        assert!(a.spec.weights_bytes > 0);
        let mut row = vec![0.0; 64];
        a.rows_f32(Role::Q, 1, 5, &mut row).unwrap();
        assert_eq!(row, a.tensors[&(Role::Q, 1)][5 * 64..6 * 64]);
        assert!(a.rows_f32(Role::Q, 1, 128, &mut row).is_err());
        assert!(a.rows_f32(Role::Q, 2, 0, &mut row).is_err());
        assert!(a.rows_f32(Role::Output, 0, 0, &mut row).is_err());
        assert!(a.rows_f32(Role::Q, 1, 0, &mut row[..63]).is_err());
    }
}
