//! Hyperparameters out of GGUF metadata.
//!
//! Keys carry the architecture's name as a prefix (`llama.block_count`), read from the file and never assumed. Defaults
//! are those llama.cpp has for a missing key. Invariants: a count is read through [`Keys::count`], which bounds it; a key
//! that changes what the model computes and isn't understood is an error.

use std::path::Path;

use super::{Architecture, Header, Value, architecture};
use crate::model::spec::{LayerSpec, ModelSpec, RopeLayout, RopeScaling, RopeSpec};
use crate::model::weights::{Role, Table};
use crate::model::{ModelError, gguf::header::short};

/// A header whose architecture is known: typed access to its keys.
pub(in crate::model) struct Keys<'a> {
    file: String,
    header: &'a Header<'a>,
    pub architecture: Architecture,
}

/// Gemma 3's local layers use this base unless the file says otherwise.
const GEMMA_LOCAL_BASE: f32 = 10_000.0;
/// In Gemma 3 every sixth layer sees the whole context.
const GEMMA_PATTERN: usize = 6;
/// Gemma 3 27B scales attention by its embedding's share per head instead of the head's length; no key says so.
const GEMMA_27B_LAYERS: usize = 62;

/// Keys of other architectures' arithmetic that could stand in a file of ours.
const FOREIGN_ARITHMETIC: [&str; 8] = [
    "expert_count",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.clamp_kqv",
    "attention.scale",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
];

impl<'a> Keys<'a> {
    pub fn new(path: &Path, header: &'a Header<'a>) -> Result<Self, ModelError> {
        let file = path.display().to_string();
        let mut keys = Self {
            file,
            header,
            architecture: Architecture::Llama,
        };
        let name = keys.text("general.architecture")?;
        let known = "llama, qwen2, qwen3, gemma3";
        keys.architecture = architecture(name)
            .ok_or_else(|| keys.unsupported("general.architecture", short(name), known))?;
        Ok(keys)
    }

    pub fn unsupported(
        &self,
        what: &str,
        got: impl Into<String>,
        allowed: impl Into<String>,
    ) -> ModelError {
        ModelError::Unsupported {
            file: self.file.clone(),
            what: what.into(),
            got: got.into(),
            allowed: allowed.into(),
        }
    }

    fn wrong(&self, key: &str, value: Option<&Value<'_>>, expected: &str) -> ModelError {
        let got = value.map_or("missing".to_owned(), |v| short(&format!("{v:?}")));
        let problem = format!("key {key} is {got}, expected {expected}");
        ModelError::Corrupt {
            file: self.file.clone(),
            problem,
        }
    }

    pub fn get(&self, key: &str) -> Option<&'a Value<'a>> {
        self.header.metadata.get(key)
    }

    /// The key behind the architecture's prefix.
    fn own(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.gguf_name())
    }

    pub fn text(&self, key: &str) -> Result<&'a str, ModelError> {
        match self.get(key) {
            Some(Value::Text(text)) => Ok(text),
            other => Err(self.wrong(key, other, "a text")),
        }
    }

    pub fn texts(&self, key: &str) -> Result<&'a [&'a str], ModelError> {
        match self.get(key) {
            Some(Value::Texts(texts)) => Ok(texts),
            other => Err(self.wrong(key, other, "a list of texts")),
        }
    }

    pub fn floats(&self, key: &str) -> Result<&'a [f32], ModelError> {
        match self.get(key) {
            Some(Value::Floats(floats)) => Ok(floats),
            other => Err(self.wrong(key, other, "a list of numbers")),
        }
    }

    pub fn ints(&self, key: &str) -> Result<Option<&'a [i64]>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Ints(ints)) => Ok(Some(ints)),
            other => Err(self.wrong(key, other, "a list of integers")),
        }
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            other => Err(self.wrong(key, other, "a truth value")),
        }
    }

    pub fn token_id(&self, key: &str) -> Result<Option<u32>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(&Value::Int(id)) if u32::try_from(id).is_ok() => Ok(Some(id as u32)),
            other => Err(self.wrong(key, other, "a token's id")),
        }
    }

    fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let key = self.own(key);
        match self.get(&key) {
            None => Ok(None),
            Some(&Value::Int(n)) if n > 0 && u32::try_from(n).is_ok() => Ok(Some(n as usize)),
            // Some converters write a list with one entry per layer; a list of equal entries says the same.
            Some(Value::Ints(list))
                if list.iter().all(|&n| n == list[0]) && !list.is_empty() && list[0] > 0 =>
            {
                Ok(Some(list[0] as usize))
            }
            other => Err(self.wrong(&key, other, "a positive integer")),
        }
    }

    fn count(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_count(key)?
            .ok_or_else(|| self.wrong(&self.own(key), None, "a positive integer"))
    }

    fn float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let key = self.own(key);
        match self.get(&key) {
            None => Ok(None),
            Some(&Value::Float(x)) => Ok(Some(x as f32)),
            other => Err(self.wrong(&key, other, "a number")),
        }
    }

    /// Refuses keys that change what a model computes in ways the transformer doesn't know.
    fn refuse_unknown_arithmetic(&self) -> Result<(), ModelError> {
        for key in FOREIGN_ARITHMETIC {
            let key = self.own(key);
            let neutral = match self.get(&key) {
                None => true,
                Some(&Value::Float(x)) => x == 0.0,
                Some(&Value::Int(n)) => n == 0,
                Some(_) => false,
            };
            if !neutral {
                return Err(self.unsupported(
                    &key,
                    short(&format!("{:?}", self.get(&key))),
                    "no such key, or 0",
                ));
            }
        }
        Ok(())
    }

    /// The spec of the file's model; `factors` is its tensor of RoPE divisors.
    pub fn spec(&self, table: &Table, factors: Option<Vec<f32>>) -> Result<ModelSpec, ModelError> {
        self.refuse_unknown_arithmetic()?;
        let n_layers = self.n_layers(table)?;
        let n_embd = self.count("embedding_length")?;
        let n_heads = self.count("attention.head_count")?;
        let head_dim = self.head_dim(n_embd / n_heads)?;
        let gemma = self.architecture == Architecture::Gemma3;
        let embedding = table.get(&(Role::TokenEmbedding, 0));
        let scaled_width = if gemma && n_layers == GEMMA_27B_LAYERS {
            n_embd / n_heads
        } else {
            head_dim
        };
        let (add_bos, bos_id, eos_ids) = self.special_tokens()?;
        Ok(ModelSpec {
            architecture: self.architecture,
            name: self.name(),
            n_layers,
            n_embd,
            n_heads,
            n_kv_heads: self
                .optional_count("attention.head_count_kv")?
                .unwrap_or(n_heads),
            head_dim,
            n_ff: self.count("feed_forward_length")?,
            n_vocab: embedding.map_or(0, |t| t.dims[0]),
            context_length: self.count("context_length")?,
            rms_eps: self
                .float("attention.layer_norm_rms_epsilon")?
                .unwrap_or(0.0),
            attention_scale: 1.0 / (scaled_width as f32).sqrt(),
            activation: self.architecture.activation(),
            embedding_scale: if gemma { (n_embd as f32).sqrt() } else { 1.0 },
            qkv_bias: table.contains_key(&(Role::QBias, 0)),
            qk_norm: gemma || self.architecture == Architecture::Qwen3,
            post_norms: gemma,
            tied_output: !table.contains_key(&(Role::Output, 0)),
            layers: self.layers(n_layers, head_dim, factors)?,
            add_bos,
            bos_id,
            eos_ids,
            weights_bytes: table.values().map(|t| t.bytes.len() as u64).sum(),
        })
    }

    /// The file's name for its model, in a form that fits a line.
    fn name(&self) -> String {
        let name = self
            .text("general.name")
            .unwrap_or(self.architecture.gguf_name());
        name.replace(char::is_control, " ")
    }

    fn n_layers(&self, table: &Table) -> Result<usize, ModelError> {
        let n = self.count("block_count")?;
        if n <= table.len() {
            return Ok(n);
        }
        let problem = format!("it claims {n} layers, but has only {} tensors", table.len());
        Err(ModelError::Corrupt {
            file: self.file.clone(),
            problem,
        })
    }

    /// The length of a head: stated, or its share of the embedding.
    fn head_dim(&self, share: usize) -> Result<usize, ModelError> {
        let head_dim = self
            .optional_count("attention.key_length")?
            .unwrap_or(share);
        match self.optional_count("attention.value_length")? {
            Some(n) if n != head_dim => {
                let allowed = format!("the key length {head_dim}");
                Err(self.unsupported("attention.value_length", n.to_string(), allowed))
            }
            _ => Ok(head_dim),
        }
    }

    fn layers(
        &self,
        n: usize,
        head_dim: usize,
        factors: Option<Vec<f32>>,
    ) -> Result<Vec<LayerSpec>, ModelError> {
        let gemma = self.architecture == Architecture::Gemma3;
        let layout = match self.architecture {
            Architecture::Llama => RopeLayout::Interleaved,
            _ => RopeLayout::HalfSplit,
        };
        let rope = RopeSpec {
            base: self.float("rope.freq_base")?.unwrap_or(10_000.0),
            scaling: self.rope_scaling(factors)?,
            layout,
            n_rot: self
                .optional_count("rope.dimension_count")?
                .unwrap_or(head_dim),
        };
        let full = LayerSpec {
            rope: rope.clone(),
            window: None,
        };
        let window = self.optional_count("attention.sliding_window")?;
        let Some(window) = window else {
            return Ok(vec![full; n]);
        };
        if !gemma {
            let got = window.to_string();
            return Err(self.unsupported(
                "attention.sliding_window",
                got,
                "no window outside gemma3",
            ));
        }
        // A stretched context stretches the global layers only.
        let base = self
            .float("rope.freq_base_swa")?
            .unwrap_or(GEMMA_LOCAL_BASE);
        let rope = RopeSpec {
            base,
            scaling: RopeScaling::None,
            ..rope
        };
        let local = LayerSpec {
            rope,
            window: Some(window),
        };
        let is_local = self.local_layers(n)?;
        Ok(is_local
            .into_iter()
            .map(|is| if is { local.clone() } else { full.clone() })
            .collect())
    }

    fn local_layers(&self, n: usize) -> Result<Vec<bool>, ModelError> {
        let key = self.own("attention.sliding_window_pattern");
        let period = match self.get(&key) {
            None => GEMMA_PATTERN,
            Some(Value::Bools(list)) if list.len() == n => return Ok(list.clone()),
            Some(&Value::Int(period)) if period > 0 && u32::try_from(period).is_ok() => {
                period as usize
            }
            other => {
                return Err(self.wrong(&key, other, "a period, or a truth value for each layer"));
            }
        };
        Ok((0..n).map(|layer| layer % period < period - 1).collect())
    }

    fn rope_scaling(&self, factors: Option<Vec<f32>>) -> Result<RopeScaling, ModelError> {
        let key = self.own("rope.scaling.type");
        let kind = if self.get(&key).is_some() {
            self.text(&key)?
        } else {
            ""
        };
        // `rope.scale_linear` is the key's name in old files.
        let factor = match self.float("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.float("rope.scale_linear")?,
        };
        let stretched = factor.filter(|&f| f != 0.0 && f != 1.0);
        match (kind, stretched, factors) {
            ("" | "none" | "linear", None, Some(factors)) => Ok(RopeScaling::Factors(factors)),
            ("none", _, None) | ("" | "linear", None, None) => Ok(RopeScaling::None),
            ("" | "linear", Some(factor), None) => Ok(RopeScaling::Linear { factor }),
            (other, _, None) => {
                Err(self.unsupported(&key, short(other), "none, linear, or rope_freqs.weight"))
            }
            (other, _, Some(_)) => Err(self.unsupported(
                &key,
                short(other),
                "no other scaling beside the tensor rope_freqs.weight",
            )),
        }
    }

    /// Whether BOS goes first, BOS, and the ids that end a generation.
    fn special_tokens(&self) -> Result<(bool, Option<u32>, Vec<u32>), ModelError> {
        let bos_id = self.token_id("tokenizer.ggml.bos_token_id")?;
        // Without the key, SentencePiece models and Llama 3 expect a BOS, other byte-level models don't.
        let by_kind = self.text("tokenizer.ggml.model")? == "llama"
            || matches!(
                self.text("tokenizer.ggml.pre"),
                Ok("llama3" | "llama-v3" | "llama-bpe")
            );
        let add_bos = self
            .bool("tokenizer.ggml.add_bos_token")?
            .unwrap_or(by_kind);
        let mut eos_ids = Vec::new();
        for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
            eos_ids.extend(self.token_id(&format!("tokenizer.ggml.{key}"))?);
        }
        let ends_turn = |t: &&str| matches!(*t, "<|im_end|>" | "<|eot_id|>" | "<end_of_turn>");
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        eos_ids.extend(
            tokens
                .iter()
                .enumerate()
                .filter(|(_, t)| ends_turn(t))
                .map(|(id, _)| id as u32),
        );
        eos_ids.sort_unstable();
        eos_ids.dedup();
        Ok((add_bos && bos_id.is_some(), bos_id, eos_ids))
    }
}
