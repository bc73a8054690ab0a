//! The transformer, written once over [`Ops`]: llama, qwen2, qwen3 and gemma3 differ only in what their spec says.
//!
//! Invariants: queries and keys go to the cache before RoPE; the cache answers attention; logits are made on demand for
//! a few rows at a time, never for a whole window. With an inference backend a token's logits depend on its sequence
//! alone, not on the batch or the chunk it came in.

use std::ops::Range;
use std::sync::Arc;

use super::ops::{Arithmetic, Load, Ops};
use super::{ModelError, ModelSpec, Role, WeightSource};
use crate::cache::{Batch, CacheError, KvCache, Rows};

/// What can go wrong in a step.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The model's weights can't be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The cache refuses or failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The batch and the tokens do not belong together.
    #[error("a batch of {rows} rows came with {tokens} tokens: give one token per row")]
    Tokens {
        /// Rows in the batch.
        rows: usize,
        /// Tokens given.
        tokens: usize,
    },
    /// A token that the model has no embedding for.
    #[error(
        "token {token} is outside the model's vocabulary of {n_vocab}: was the text encoded by another tokenizer?"
    )]
    Vocabulary {
        /// The token.
        token: u32,
        /// Entries in the vocabulary.
        n_vocab: usize,
    },
}

/// The last layer's output after the final norm, one row per token of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Hidden {
    /// `[row][n_embd]`.
    pub rows: Vec<f32>,
    /// Values per row.
    pub n_embd: usize,
}

impl Hidden {
    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.rows.len() / self.n_embd
    }
}

/// A loaded model, whatever its backend.
pub trait LanguageModel: Send + Sync {
    /// Its hyperparameters.
    fn spec(&self) -> &ModelSpec;

    /// Runs the batch's tokens through all layers, appending to and attending through `cache`, and commits the step.
    ///
    /// # Errors
    /// [`StepError`]; rows of earlier layers may be in the cache by then: truncate or release the sequences.
    fn step(
        &self,
        batch: &Batch,
        tokens: &[u32],
        cache: &mut dyn KvCache,
    ) -> Result<Hidden, StepError>;

    /// Logits of some rows, `out` `[row][n_vocab]`. Ask for at most 64 rows at a time: a row takes `4 · n_vocab` bytes.
    ///
    /// # Panics
    /// When `rows` lies outside `hidden` or `out` has another size.
    fn logits(&self, hidden: &Hidden, rows: Range<usize>, out: &mut [f32]);

    /// What rows of attention become on their way out of a layer's attention, before any norm: W_O of each. `rows`:
    /// `[row][head][head_dim]`; the result: `[row][n_embd]`.
    fn attention_output(&self, layer: usize, rows: &[f32]) -> Vec<f32>;
}

/// The transformer over a backend.
pub struct Transformer<B> {
    ops: B,
}

impl<B: Load> Transformer<B> {
    /// Loads a model's weights into the backend; linear layers compute in f32.
    ///
    /// # Errors
    /// What the backend says: a missing tensor, a failed read.
    pub fn load(source: Arc<dyn WeightSource>) -> Result<Self, ModelError> {
        Self::load_in(source, Arithmetic::F32)
    }

    /// The same with linear layers in an arithmetic of choice.
    ///
    /// # Errors
    /// As [`Transformer::load`], and when the backend has no such arithmetic.
    pub fn load_in(
        source: Arc<dyn WeightSource>,
        arithmetic: Arithmetic,
    ) -> Result<Self, ModelError> {
        Ok(Self::over(B::load(source, arithmetic)?))
    }
}

impl<B: Ops> Transformer<B> {
    /// The transformer over a backend with its weights.
    pub fn over(ops: B) -> Self {
        Self { ops }
    }

    /// The backend.
    #[cfg(feature = "burn")]
    pub(crate) fn ops(&self) -> &B {
        &self.ops
    }

    fn run(
        &self,
        batch: &Batch,
        tokens: &[u32],
        cache: &mut dyn KvCache,
    ) -> Result<Hidden, StepError> {
        let ops = &self.ops;
        let n_embd = ops.spec().n_embd;
        let mut x = ops.embed(tokens)?;
        for layer in 0..ops.spec().n_layers {
            let attended = self.attention(layer, &x, batch, cache)?;
            x = ops.add(x, &attended);
            let fed = self.feed_forward(layer, &x);
            x = ops.add(x, &fed);
        }
        cache.commit(batch)?;
        let last = ops.rms_norm(Role::OutputNorm, 0, &x);
        Ok(Hidden {
            rows: ops.read(&last).into_owned(),
            n_embd,
        })
    }

    fn attention(
        &self,
        layer: usize,
        x: &B::Act,
        batch: &Batch,
        cache: &mut dyn KvCache,
    ) -> Result<B::Act, CacheError> {
        let ops = &self.ops;
        let spec = ops.spec();
        let normed = ops.rms_norm(Role::AttnNorm, layer, x);
        let [mut q, mut k, v] = ops.linear([Role::Q, Role::K, Role::V], layer, &normed);
        if spec.qk_norm {
            q = ops.rms_norm(Role::QNorm, layer, &q);
            k = ops.rms_norm(Role::KNorm, layer, &k);
        }
        let hidden = cache.needs().hidden.then(|| ops.read(&normed));
        let residual_norms = match &hidden {
            Some(_) => norms(&ops.read(x), spec.n_embd),
            None => Vec::new(),
        };
        let rows = Rows {
            k: &ops.read(&k),
            v: &ops.read(&v),
            hidden: hidden.as_deref().unwrap_or(&[]),
            residual_norms: &residual_norms,
        };
        cache.append(layer, batch, rows)?;
        let width = spec.n_heads * spec.head_dim;
        let mut out = vec![0.0; batch.n_rows() * width];
        cache.attend(layer, batch, &ops.read(&q), &mut out)?;
        let [out] = ops.linear([Role::AttnOut], layer, &ops.write(out, width));
        Ok(self.post_norm(Role::PostAttnNorm, layer, out))
    }

    /// A layer's second half, without the sum.
    pub(crate) fn feed_forward(&self, layer: usize, x: &B::Act) -> B::Act {
        let ops = &self.ops;
        let normed = ops.rms_norm(Role::FfnNorm, layer, x);
        let [gate, up] = ops.linear([Role::Gate, Role::Up], layer, &normed);
        let [out] = ops.linear([Role::Down], layer, &ops.gate(gate, &up));
        self.post_norm(Role::PostFfnNorm, layer, out)
    }

    /// The norm after a layer's half, of a model that has one.
    pub(crate) fn post_norm(&self, role: Role, layer: usize, x: B::Act) -> B::Act {
        if self.ops.spec().post_norms {
            self.ops.rms_norm(role, layer, &x)
        } else {
            x
        }
    }
}

/// ‖x‖ of each row, `[row][width]`.
fn norms(rows: &[f32], width: usize) -> Vec<f32> {
    let norm = |x: &[f32]| x.iter().fold(0.0f32, |s, &x| x.mul_add(x, s)).sqrt();
    rows.chunks_exact(width).map(norm).collect()
}

impl<B: Ops> LanguageModel for Transformer<B> {
    fn spec(&self) -> &ModelSpec {
        self.ops.spec()
    }

    fn step(
        &self,
        batch: &Batch,
        tokens: &[u32],
        cache: &mut dyn KvCache,
    ) -> Result<Hidden, StepError> {
        if batch.n_rows() != tokens.len() {
            return Err(StepError::Tokens {
                rows: batch.n_rows(),
                tokens: tokens.len(),
            });
        }
        let n_vocab = self.spec().n_vocab;
        if let Some(&token) = tokens.iter().find(|&&t| t as usize >= n_vocab) {
            return Err(StepError::Vocabulary { token, n_vocab });
        }
        // Inside the pool, so that the many small parallel parts of a step need no waking from outside.
        rayon::scope(|_| self.run(batch, tokens, cache))
    }

    fn logits(&self, hidden: &Hidden, rows: Range<usize>, out: &mut [f32]) {
        let n = hidden.n_embd;
        self.ops
            .logits(&hidden.rows[rows.start * n..rows.end * n], out);
    }

    fn attention_output(&self, layer: usize, rows: &[f32]) -> Vec<f32> {
        let (ops, spec) = (&self.ops, self.ops.spec());
        let rows = ops.write(rows.to_vec(), spec.n_heads * spec.head_dim);
        let [out] = ops.linear([Role::AttnOut], layer, &rows);
        ops.read(&out).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{Admission, SeqId};
    use crate::compute::cpu::Cpu;
    use crate::engine::plain_cache::PlainCache;
    use crate::model::Architecture;
    use crate::model::geometry::geometry;
    use crate::model::gguf::TensorType;
    use crate::model::tiny::{TinyConfig, TinyModel, TinyOutput};
    use crate::model::weights::StoredMatrix;

    const ALL: [Architecture; 4] = [
        Architecture::Llama,
        Architecture::Qwen2,
        Architecture::Qwen3,
        Architecture::Gemma3,
    ];

    fn load(config: &TinyConfig) -> (Transformer<Cpu>, PlainCache) {
        let model = Transformer::<Cpu>::load(Arc::new(TinyModel::new(config))).unwrap();
        let cache = PlainCache::new(geometry(model.spec(), 128));
        (model, cache)
    }

    fn tokens(n: usize, seed: usize) -> Vec<u32> {
        (0..n)
            .map(|i| ((i * 89 + seed * 31 + i * i * 7) % 256) as u32)
            .collect()
    }

    /// Logits of every token of a text, fed in the given chunks.
    fn logits(
        model: &Transformer<Cpu>,
        cache: &mut PlainCache,
        text: &[u32],
        chunk: usize,
    ) -> Vec<f32> {
        let seq = SeqId(9);
        cache.admit(seq, Admission::Streaming).unwrap();
        let mut all = Vec::new();
        for (i, part) in text.chunks(chunk).enumerate() {
            let first = (i * chunk) as u32;
            let batch = Batch::single(seq, first..first + part.len() as u32);
            let hidden = model.step(&batch, part, cache).unwrap();
            let mut out = vec![0.0; part.len() * model.spec().n_vocab];
            model.logits(&hidden, 0..hidden.n_rows(), &mut out);
            all.extend(out);
        }
        cache.release(seq).unwrap();
        all
    }

    #[test]
    fn chunks_do_not_change_a_bit_in_any_architecture() {
        for architecture in ALL {
            let (model, mut cache) = load(&TinyConfig::of(architecture));
            let text = tokens(50, 1);
            let whole = logits(&model, &mut cache, &text, 50);
            assert!(whole.iter().all(|x| x.is_finite()));
            for chunk in [1, 7, 16] {
                assert_eq!(
                    whole,
                    logits(&model, &mut cache, &text, chunk),
                    "{architecture:?}, {chunk}"
                );
            }
        }
    }

    /// A tiny model whose matrices are stored in q8_0.
    struct Q8(TinyModel);

    impl WeightSource for Q8 {
        fn spec(&self) -> &ModelSpec {
            self.0.spec()
        }
        fn shape(&self, role: Role, layer: usize) -> Option<(usize, usize)> {
            self.0.shape(role, layer)
        }
        fn rows_f32(
            &self,
            role: Role,
            layer: usize,
            first: usize,
            out: &mut [f32],
        ) -> Result<(), ModelError> {
            self.0.rows_f32(role, layer, first, out)
        }
        fn matrix(&self, role: Role, layer: usize) -> Result<StoredMatrix, ModelError> {
            let stored = self.0.matrix(role, layer)?;
            let values: &[f32] = bytemuck::cast_slice(stored.bytes());
            let mut bytes = Vec::new();
            for block in values.chunks(32) {
                let a = block.iter().fold(0.0f32, |a, x| a.max(x.abs()));
                let d = half::f16::from_f32(a / 127.0);
                bytes.extend(d.to_le_bytes());
                bytes.extend(block.iter().map(|x| (x / d.to_f32()).round() as i8 as u8));
            }
            Ok(StoredMatrix::owned(TensorType::Q8_0, bytes))
        }
    }

    #[test]
    fn chunks_do_not_change_a_bit_in_integers_and_each_arithmetic_is_its_own() {
        let source = || Arc::new(Q8(TinyModel::new(&TinyConfig::default())));
        let text = tokens(50, 1);
        let all = Arithmetic::ALL.map(|arithmetic| {
            let model = Transformer::<Cpu>::load_in(source(), arithmetic).unwrap();
            let mut cache = PlainCache::new(geometry(model.spec(), 128));
            let whole = logits(&model, &mut cache, &text, 50);
            for chunk in [1, 3, 7, 16] {
                let parts = logits(&model, &mut cache, &text, chunk);
                assert_eq!(whole, parts, "{arithmetic:?}, {chunk}");
            }
            whole
        });
        let worst = |other: &[f32]| {
            let differences = all[0].iter().zip(other).map(|(a, b)| (a - b).abs());
            differences.fold(0.0, f32::max)
        };
        let (int16, int8) = (worst(&all[1]), worst(&all[2]));
        assert!(int16 > 0.0 && int16 < 1e-3, "{int16}");
        assert!(int8 > 10.0 * int16 && int8 < 0.3, "{int8}");
    }

    #[test]
    fn a_ragged_batch_equals_its_sequences_alone() {
        let (model, mut cache) = load(&TinyConfig::default());
        let texts = [tokens(3, 1), tokens(17, 2), tokens(40, 3)];
        let mut batch = Batch::new();
        for (i, text) in texts.iter().enumerate() {
            cache.admit(SeqId(i as u32), Admission::Streaming).unwrap();
            batch.push(SeqId(i as u32), 0..text.len() as u32);
        }
        let hidden = model.step(&batch, &texts.concat(), &mut cache).unwrap();
        let n_vocab = model.spec().n_vocab;
        let mut first_row = 0;
        for text in &texts {
            let mut together = vec![0.0; text.len() * n_vocab];
            model.logits(&hidden, first_row..first_row + text.len(), &mut together);
            assert_eq!(together, logits(&model, &mut cache, text, text.len()));
            first_row += text.len();
        }
    }

    /// Each thing that sets an architecture apart must move the logits.
    #[test]
    fn every_part_of_a_spec_counts() {
        let text = tokens(40, 5);
        let run = |config: &TinyConfig| {
            let (model, mut cache) = load(config);
            logits(&model, &mut cache, &text, 40)
        };
        let gemma = TinyConfig::of(Architecture::Gemma3);
        let full = TinyConfig {
            window: None,
            ..gemma.clone()
        };
        let (windowed, full) = (run(&gemma), run(&full));
        let row = 256;
        // Bases differ too, so only the first position, where RoPE and window do nothing, stays.
        assert_eq!(windowed[..row], full[..row]);
        assert_ne!(windowed[39 * row..], full[39 * row..]);
        let tied = run(&TinyConfig::default());
        let separate = run(&TinyConfig {
            output: TinyOutput::Separate,
            ..TinyConfig::default()
        });
        assert_ne!(tied, separate);
        let other_seed = run(&TinyConfig {
            seed: 1,
            ..TinyConfig::default()
        });
        assert_ne!(tied, other_seed);
    }

    #[test]
    fn hidden_rows_come_only_when_asked_for() {
        let (model, mut cache) = load(&TinyConfig::default());
        logits(&model, &mut cache, &tokens(5, 0), 5);
        assert_eq!(cache.n_hidden, 0);
        cache.needs.hidden = true;
        logits(&model, &mut cache, &tokens(5, 0), 5);
        assert_eq!(cache.n_hidden, 2 * 5 * 64);
    }

    #[test]
    fn wrong_tokens_are_refused_before_anything_is_stored() {
        let (model, mut cache) = load(&TinyConfig::default());
        cache.admit(SeqId(0), Admission::Streaming).unwrap();
        let batch = Batch::single(SeqId(0), 0..2);
        let few = model.step(&batch, &[1], &mut cache).unwrap_err();
        assert!(
            few.to_string().contains("2 rows came with 1 tokens"),
            "{few}"
        );
        let high = model.step(&batch, &[1, 256], &mut cache).unwrap_err();
        assert!(high.to_string().contains("token 256"), "{high}");
        assert_eq!(cache.rows(SeqId(0), 0).0.len(), 0);
    }
}
