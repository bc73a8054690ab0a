//! The hyperparameters of a transformer: one struct for all architectures.
//!
//! Invariants, checked by [`ModelSpec::validate`] before a spec leaves the loader: no count is zero, `n_heads` is a
//! multiple of `n_kv_heads`, `layers.len() == n_layers`, each `n_rot` is even and at most `head_dim`. What differs
//! between architectures is data here (activation, scales, windows, RoPE per layer), so that the transformer is
//! written once and asks no name.

use super::ModelError;

/// The model families that can be loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 1 to 3 and everything that calls itself `llama` (SmolLM2 too).
    Llama,
    /// Qwen 2 and 2.5: biases on Q, K and V.
    Qwen2,
    /// Qwen 3 (dense): RMS norms on the heads of Q and K.
    Qwen3,
    /// Gemma 3 (text): norms after attention and feed-forward, sliding windows, two RoPE bases.
    Gemma3,
}

impl Architecture {
    /// The name GGUF files give in `general.architecture`, which is also the prefix of their keys.
    pub fn gguf_name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
        }
    }

    /// The activation its models were trained with.
    pub(super) fn activation(self) -> Activation {
        match self {
            Self::Gemma3 => Activation::GeluTanh,
            _ => Activation::Silu,
        }
    }
}

/// Which elements of a head are rotated as a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeLayout {
    /// Pairs (2i, 2i+1): GGUF files of the llama architecture, whose Q and K rows are permuted for it.
    Interleaved,
    /// Pairs (i, i + n_rot/2): Hugging Face checkpoints, and GGUF files of qwen and gemma.
    HalfSplit,
}

/// What is done to the inverse frequencies `base^(-2i/n_rot)`.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Nothing.
    None,
    /// Positions are divided by `factor`.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// Llama 3.1's rule: wavelengths longer than `original_context / low_freq_factor` are stretched by `factor`,
    /// those shorter than `original_context / high_freq_factor` are kept, between them it interpolates.
    Llama3 {
        /// The stretch of long wavelengths.
        factor: f32,
        /// Bounds the wavelengths that are stretched in full.
        low_freq_factor: f32,
        /// Bounds the wavelengths that are kept.
        high_freq_factor: f32,
        /// The context length before stretching, in tokens.
        original_context: usize,
    },
    /// One divisor per inverse frequency, `n_rot / 2` of them: the tensor `rope_freqs.weight` of GGUF files.
    Factors(Vec<f32>),
}

/// The rotary position embedding of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// The base of the frequencies (`rope_theta`).
    pub base: f32,
    /// What is done to the frequencies.
    pub scaling: RopeScaling,
    /// Which elements form a pair.
    pub layout: RopeLayout,
    /// How many of a head's first elements are rotated: even, at most `head_dim`.
    pub n_rot: usize,
}

/// What differs from layer to layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// The layer's position embedding.
    pub rope: RopeSpec,
    /// Sliding window: a query at position p sees the positions above p - window. `None` sees all.
    pub window: Option<usize>,
}

/// The gate's activation in the feed-forward part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x * sigmoid(x).
    Silu,
    /// GELU in its tanh approximation.
    GeluTanh,
}

/// Everything about a model but its weights and its tokenizer.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// The family.
    pub architecture: Architecture,
    /// The name the file gives itself, for people.
    pub name: String,
    /// Number of layers.
    pub n_layers: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Number of query heads.
    pub n_heads: usize,
    /// Number of K and V heads.
    pub n_kv_heads: usize,
    /// Elements per head; not always `n_embd / n_heads`.
    pub head_dim: usize,
    /// Width of the feed-forward part.
    pub n_ff: usize,
    /// Rows of the embedding, which is the length of a row of logits.
    pub n_vocab: usize,
    /// The longest context the model was made for, in tokens.
    pub context_length: usize,
    /// Epsilon of the RMS norms. All norms are `x / rms(x) * w`: loaders fold Gemma's `1 + w` into the weights.
    pub rms_eps: f32,
    /// The factor on q·k before the softmax.
    pub attention_scale: f32,
    /// The gate's activation.
    pub activation: Activation,
    /// The factor on embedding rows: 1, or Gemma's `sqrt(n_embd)`.
    pub embedding_scale: f32,
    /// Whether Q, K and V have biases.
    pub qkv_bias: bool,
    /// Whether the heads of Q and K pass an RMS norm before RoPE.
    pub qk_norm: bool,
    /// Whether the outputs of attention and feed-forward pass a norm before they are added (Gemma).
    pub post_norms: bool,
    /// Whether the logits use the embedding's rows.
    pub tied_output: bool,
    /// What differs from layer to layer, `n_layers` of them.
    pub layers: Vec<LayerSpec>,
    /// Whether the model expects its BOS token before a text.
    pub add_bos: bool,
    /// The BOS token, when there is one.
    pub bos_id: Option<u32>,
    /// Tokens that end a generation, ascending.
    pub eos_ids: Vec<u32>,
    /// Bytes of all weight tensors as stored on disk.
    pub weights_bytes: u64,
}

impl ModelSpec {
    /// Scalars of K and V that one token adds to the cache, over all layers.
    pub fn kv_scalars_per_token(&self) -> usize {
        2 * self.n_layers * self.n_kv_heads * self.head_dim
    }

    /// Checks the invariants of this file's header.
    ///
    /// # Errors
    /// [`ModelError::Invalid`] names the first field that breaks one.
    pub fn validate(&self) -> Result<(), ModelError> {
        let wrong = |what: String| Err(ModelError::invalid(&self.name, what));
        let counts = [
            ("layers", self.n_layers),
            ("embedding length", self.n_embd),
            ("query heads", self.n_heads),
            ("KV heads", self.n_kv_heads),
            ("head length", self.head_dim),
            ("feed-forward length", self.n_ff),
            ("vocabulary", self.n_vocab),
            ("context length", self.context_length),
        ];
        for (what, n) in counts {
            if n == 0 || n > u32::MAX as usize {
                return wrong(format!("{what} is {n}, which can't be"));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return wrong(format!(
                "{} query heads can't share {} KV heads evenly",
                self.n_heads, self.n_kv_heads
            ));
        }
        if !(self.rms_eps.is_finite() && self.rms_eps > 0.0) {
            return wrong(format!(
                "the norms' epsilon is {}, expected a small positive number",
                self.rms_eps
            ));
        }
        if self.layers.len() != self.n_layers {
            return wrong(format!(
                "{} layers are described, expected {}",
                self.layers.len(),
                self.n_layers
            ));
        }
        self.layers
            .iter()
            .try_for_each(|layer| self.validate_layer(layer))?;
        let special = self.bos_id.iter().chain(&self.eos_ids);
        for &id in special {
            if id as usize >= self.n_vocab {
                return wrong(format!(
                    "special token {id} is outside the vocabulary of {}",
                    self.n_vocab
                ));
            }
        }
        Ok(())
    }

    fn validate_layer(&self, layer: &LayerSpec) -> Result<(), ModelError> {
        let rope = &layer.rope;
        let finite = |x: f32| x.is_finite() && x > 0.0;
        let scaling_ok = match &rope.scaling {
            RopeScaling::None => true,
            RopeScaling::Linear { factor } => finite(*factor),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                finite(*factor)
                    && finite(*low_freq_factor)
                    && finite(*high_freq_factor)
                    && high_freq_factor > low_freq_factor
                    && *original_context > 0
            }
            RopeScaling::Factors(factors) => {
                factors.len() * 2 == rope.n_rot && factors.iter().all(|&x| finite(x))
            }
        };
        if rope.n_rot == 0 || !rope.n_rot.is_multiple_of(2) || rope.n_rot > self.head_dim {
            return Err(ModelError::invalid(
                &self.name,
                format!(
                    "RoPE rotates {} elements, expected an even number up to {}",
                    rope.n_rot, self.head_dim
                ),
            ));
        }
        if !finite(rope.base) || !scaling_ok || layer.window == Some(0) {
            return Err(ModelError::invalid(
                &self.name,
                format!(
                    "a layer's RoPE or window makes no sense: base {}, {:?}, window {:?}",
                    rope.base, rope.scaling, layer.window
                ),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A small valid spec for tests to break.
    pub(crate) fn tiny() -> ModelSpec {
        let rope = RopeSpec {
            base: 10_000.0,
            scaling: RopeScaling::None,
            layout: RopeLayout::HalfSplit,
            n_rot: 4,
        };
        ModelSpec {
            architecture: Architecture::Llama,
            name: "tiny".into(),
            n_layers: 2,
            n_embd: 8,
            n_heads: 2,
            n_kv_heads: 1,
            head_dim: 4,
            n_ff: 16,
            n_vocab: 32,
            context_length: 64,
            rms_eps: 1e-5,
            attention_scale: 0.5,
            activation: Activation::Silu,
            embedding_scale: 1.0,
            qkv_bias: false,
            qk_norm: false,
            post_norms: false,
            tied_output: true,
            layers: vec![LayerSpec { rope, window: None }; 2],
            add_bos: false,
            bos_id: Some(1),
            eos_ids: vec![2],
            weights_bytes: 0,
        }
    }

    #[test]
    fn a_sane_spec_passes_and_counts_its_scalars() {
        let spec = tiny();
        spec.validate().expect("the tiny spec is sane");
        assert_eq!(spec.kv_scalars_per_token(), 2 * 2 * 4);
    }

    #[test]
    fn each_broken_invariant_is_named() {
        type Break = fn(&mut ModelSpec);
        let breaks: [(Break, &str); 9] = [
            (|s| s.n_layers = 0, "layers is 0"),
            (|s| s.n_kv_heads = 3, "share 3 KV heads"),
            (|s| s.rms_eps = f32::NAN, "epsilon is NaN"),
            (|s| s.layers.truncate(1), "1 layers are described"),
            (|s| s.layers[1].rope.n_rot = 6, "rotates 6"),
            (|s| s.layers[0].rope.n_rot = 3, "rotates 3"),
            (|s| s.layers[0].rope.base = 0.0, "base 0"),
            (
                |s| s.layers[0].rope.scaling = RopeScaling::Factors(vec![1.0]),
                "Factors",
            ),
            (|s| s.eos_ids = vec![32], "special token 32"),
        ];
        for (damage, expected) in breaks {
            let mut spec = tiny();
            damage(&mut spec);
            let message = spec.validate().expect_err(expected).to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
