//! Hyperparameters out of `config.json`, as the transformers library reads it (versions 4 and 5).
//!
//! Defaults are those of the library's configuration classes. Invariant: a setting that changes what the model computes
//! and isn't understood is an error.

use std::path::Path;

use serde_json::Value;

use crate::model::ModelError;
use crate::model::gguf::short;
use crate::model::spec::{Architecture, LayerSpec, ModelSpec, RopeLayout, RopeScaling, RopeSpec};
use crate::model::tokenizer::Tokenizer;
use crate::model::weights::{Role, Table};

/// The settings of a folder.
pub(super) struct Config {
    file: String,
    name: String,
    root: Value,
    tokenizer: Value,
    generation: Value,
    pub architecture: Architecture,
}

/// Settings of other arithmetic: they must be absent, null, false or empty.
const FOREIGN_ARITHMETIC: [&str; 6] = [
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "mlp_bias",
    "num_experts",
    "quantization_config",
    "use_bidirectional_attention",
];

const GEMMA_PATTERN: usize = 6;

impl Config {
    pub fn read(folder: &Path) -> Result<Self, ModelError> {
        let path = folder.join("config.json");
        let root = read_json(&path)?.unwrap_or_default();
        let file = path.display().to_string();
        let model_type = root["model_type"].as_str().unwrap_or("missing").to_owned();
        let architecture = match model_type.as_str() {
            "llama" => Architecture::Llama,
            "qwen2" => Architecture::Qwen2,
            "qwen3" => Architecture::Qwen3,
            "gemma3_text" => Architecture::Gemma3,
            other => {
                return Err(ModelError::Unsupported {
                    file,
                    what: "model_type".into(),
                    got: short(other),
                    allowed: "llama, qwen2, qwen3, gemma3_text".into(),
                });
            }
        };
        let name = folder.file_name().map_or(model_type, |name| {
            name.to_string_lossy().replace(char::is_control, " ")
        });
        let tokenizer = read_json(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
        let generation = read_json(&folder.join("generation_config.json"))?.unwrap_or_default();
        let config = Self {
            file,
            name,
            root,
            tokenizer,
            generation,
            architecture,
        };
        config.refuse_unknown_arithmetic()?;
        Ok(config)
    }

    fn unsupported(&self, what: &str, got: &Value, allowed: impl Into<String>) -> ModelError {
        let got = short(&got.to_string());
        ModelError::Unsupported {
            file: self.file.clone(),
            what: what.into(),
            got,
            allowed: allowed.into(),
        }
    }

    fn wrong(&self, key: &str, got: &Value, expected: &str) -> ModelError {
        let problem = format!("{key} is {}, expected {expected}", short(&got.to_string()));
        ModelError::Corrupt {
            file: self.file.clone(),
            problem,
        }
    }

    fn refuse_unknown_arithmetic(&self) -> Result<(), ModelError> {
        for key in FOREIGN_ARITHMETIC {
            let value = &self.root[key];
            if !(value.is_null() || *value == Value::Bool(false)) {
                return Err(self.unsupported(key, value, "absent, null, false"));
            }
        }
        let (key, expected) = match self.architecture {
            Architecture::Gemma3 => ("hidden_activation", "gelu_pytorch_tanh"),
            _ => ("hidden_act", "silu"),
        };
        match &self.root[key] {
            Value::Null => Ok(()),
            Value::String(name) if name == expected => Ok(()),
            other => Err(self.unsupported(key, other, expected)),
        }
    }

    fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        match &self.root[key] {
            Value::Null => Ok(None),
            value => match value.as_u64().filter(|&n| n > 0 && n <= u32::MAX.into()) {
                Some(n) => Ok(Some(n as usize)),
                None => Err(self.wrong(key, value, "a positive integer")),
            },
        }
    }

    fn count(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_count(key)?
            .ok_or_else(|| self.wrong(key, &Value::Null, "a positive integer"))
    }

    fn number(&self, of: &Value, key: &str) -> Result<Option<f32>, ModelError> {
        match &of[key] {
            Value::Null => Ok(None),
            value => value
                .as_f64()
                .map(|x| Some(x as f32))
                .ok_or_else(|| self.wrong(key, value, "a number")),
        }
    }

    fn flag(&self, of: &Value, key: &str) -> Result<Option<bool>, ModelError> {
        match &of[key] {
            Value::Null => Ok(None),
            Value::Bool(b) => Ok(Some(*b)),
            other => Err(self.wrong(key, other, "true or false")),
        }
    }

    /// Whether the logits use the embedding.
    pub fn tied_output(&self) -> Result<bool, ModelError> {
        let by_default = self.architecture == Architecture::Gemma3;
        Ok(self
            .flag(&self.root, "tie_word_embeddings")?
            .unwrap_or(by_default))
    }

    /// The spec of the folder's model.
    pub fn spec(&self, table: &Table, tokenizer: &Tokenizer) -> Result<ModelSpec, ModelError> {
        let gemma = self.architecture == Architecture::Gemma3;
        let n_layers = self.count("num_hidden_layers")?;
        if n_layers > table.len() {
            return Err(self.wrong(
                "num_hidden_layers",
                &self.root["num_hidden_layers"],
                "fewer than there are tensors",
            ));
        }
        let (n_embd, n_heads) = (
            self.count("hidden_size")?,
            self.count("num_attention_heads")?,
        );
        let default_head = if gemma { 256 } else { n_embd / n_heads };
        let head_dim = self.optional_count("head_dim")?.unwrap_or(default_head);
        let scaled_width = match self.number(&self.root, "query_pre_attn_scalar")? {
            Some(width) if gemma => width,
            None if gemma => 256.0,
            _ => head_dim as f32,
        };
        let default_eps = if gemma { 1e-6 } else { 0.0 };
        let (add_bos, bos_id, eos_ids) = self.special_tokens(tokenizer)?;
        Ok(ModelSpec {
            architecture: self.architecture,
            name: self.name.clone(),
            n_layers,
            n_embd,
            n_heads,
            n_kv_heads: self
                .optional_count("num_key_value_heads")?
                .unwrap_or(n_heads),
            head_dim,
            n_ff: self.count("intermediate_size")?,
            n_vocab: self.count("vocab_size")?,
            context_length: self.count("max_position_embeddings")?,
            rms_eps: self
                .number(&self.root, "rms_norm_eps")?
                .unwrap_or(default_eps),
            attention_scale: 1.0 / scaled_width.sqrt(),
            activation: self.architecture.activation(),
            embedding_scale: if gemma { (n_embd as f32).sqrt() } else { 1.0 },
            qkv_bias: table.contains_key(&(Role::QBias, 0)),
            qk_norm: gemma || self.architecture == Architecture::Qwen3,
            post_norms: gemma,
            tied_output: self.tied_output()?,
            layers: self.layers(n_layers, head_dim)?,
            add_bos,
            bos_id,
            eos_ids,
            weights_bytes: table.values().map(|t| t.bytes.len() as u64).sum(),
        })
    }

    fn layers(&self, n: usize, head_dim: usize) -> Result<Vec<LayerSpec>, ModelError> {
        let slides = self.sliding_layers(n)?;
        let full = LayerSpec {
            rope: self.rope(Attention::Full, head_dim)?,
            window: None,
        };
        if !slides.contains(&true) {
            return Ok(vec![full; n]);
        }
        let window = Some(self.count("sliding_window")?);
        let local = LayerSpec {
            rope: self.rope(Attention::Sliding, head_dim)?,
            window,
        };
        Ok(slides
            .into_iter()
            .map(|slides| if slides { local.clone() } else { full.clone() })
            .collect())
    }

    /// Which layers have a sliding window.
    fn sliding_layers(&self, n: usize) -> Result<Vec<bool>, ModelError> {
        if let Some(types) = self.root["layer_types"].as_array() {
            let slides = |kind: &Value| match kind.as_str() {
                Some("full_attention") => Ok(false),
                Some("sliding_attention") => Ok(true),
                _ => {
                    Err(self.unsupported("layer_types", kind, "full_attention, sliding_attention"))
                }
            };
            if types.len() != n {
                return Err(self.wrong(
                    "layer_types",
                    &Value::from(types.len()),
                    "one for each layer",
                ));
            }
            return types.iter().map(slides).collect();
        }
        match self.architecture {
            Architecture::Llama => Ok(vec![false; n]),
            Architecture::Gemma3 => {
                let period = self
                    .optional_count("sliding_window_pattern")?
                    .unwrap_or(GEMMA_PATTERN);
                Ok((0..n).map(|layer| (layer + 1) % period != 0).collect())
            }
            Architecture::Qwen2 | Architecture::Qwen3 => {
                let slides = self
                    .flag(&self.root, "use_sliding_window")?
                    .unwrap_or(false);
                let first = if slides {
                    self.count("max_window_layers")?
                } else {
                    n
                };
                Ok((0..n).map(|layer| layer >= first).collect())
            }
        }
    }

    fn rope(&self, attention: Attention, head_dim: usize) -> Result<RopeSpec, ModelError> {
        let gemma = self.architecture == Architecture::Gemma3;
        let parameters = &self.root["rope_parameters"];
        // Version 5 keeps everything in one table, or in one for each kind of attention; version 4 has separate keys, of
        // which `rope_scaling` is for full attention only.
        let own = &parameters[attention.name()];
        let table = match (own, parameters, attention) {
            (Value::Object(_), _, _) => own,
            (_, Value::Object(_), _) => parameters,
            (_, _, Attention::Full) => &self.root["rope_scaling"],
            (_, _, Attention::Sliding) if gemma => &Value::Null,
            (_, _, Attention::Sliding) => &self.root["rope_scaling"],
        };
        let (key, by_default) = match attention {
            Attention::Sliding if gemma => ("rope_local_base_freq", 10_000.0),
            _ if gemma => ("rope_theta", 1_000_000.0),
            _ => ("rope_theta", 10_000.0),
        };
        let base = match self.number(table, "rope_theta")? {
            Some(base) => base,
            None => self.number(&self.root, key)?.unwrap_or(by_default),
        };
        let rotated = self
            .number(&self.root, "partial_rotary_factor")?
            .unwrap_or(1.0);
        Ok(RopeSpec {
            base,
            scaling: self.rope_scaling(table)?,
            layout: RopeLayout::HalfSplit,
            n_rot: (head_dim as f32 * rotated) as usize,
        })
    }

    fn rope_scaling(&self, table: &Value) -> Result<RopeScaling, ModelError> {
        let named = [&table["rope_type"], &table["type"]]
            .into_iter()
            .find(|v| !v.is_null());
        let needed = |key: &str| {
            self.number(table, key)?
                .ok_or_else(|| self.wrong(key, &Value::Null, "a number"))
        };
        match named.map(|v| v.as_str()) {
            None | Some(Some("default")) => Ok(RopeScaling::None),
            Some(Some("linear")) => Ok(RopeScaling::Linear {
                factor: needed("factor")?,
            }),
            Some(Some("llama3")) => Ok(RopeScaling::Llama3 {
                factor: needed("factor")?,
                low_freq_factor: needed("low_freq_factor")?,
                high_freq_factor: needed("high_freq_factor")?,
                original_context: needed("original_max_position_embeddings")? as usize,
            }),
            _ => Err(self.unsupported(
                "rope_type",
                named.unwrap_or(&Value::Null),
                "default, linear, llama3",
            )),
        }
    }

    /// Whether BOS goes first, BOS, and the ids that end a generation.
    fn special_tokens(
        &self,
        tokenizer: &Tokenizer,
    ) -> Result<(bool, Option<u32>, Vec<u32>), ModelError> {
        let leading = tokenizer.leading_token();
        let bos_id = self
            .ids(&self.root, "bos_token_id")?
            .first()
            .copied()
            .or(leading);
        let add_bos = self
            .flag(&self.tokenizer, "add_bos_token")?
            .unwrap_or(leading.is_some() && leading == bos_id);
        let mut eos_ids = self.ids(&self.root, "eos_token_id")?;
        eos_ids.extend(self.ids(&self.generation, "eos_token_id")?);
        eos_ids.sort_unstable();
        eos_ids.dedup();
        Ok((add_bos && bos_id.is_some(), bos_id, eos_ids))
    }

    /// One id, a list of them, or nothing.
    fn ids(&self, of: &Value, key: &str) -> Result<Vec<u32>, ModelError> {
        let id = |value: &Value| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| self.wrong(key, value, "a token's id"))
        };
        match &of[key] {
            Value::Null => Ok(Vec::new()),
            Value::Array(list) => list.iter().map(id).collect(),
            value => Ok(vec![id(value)?]),
        }
    }
}

/// The two kinds of attention a layer can have.
#[derive(Clone, Copy)]
enum Attention {
    Full,
    Sliding,
}

impl Attention {
    fn name(self) -> &'static str {
        match self {
            Self::Full => "full_attention",
            Self::Sliding => "sliding_attention",
        }
    }
}

/// A JSON file's value; `None` if there is no such file.
fn read_json(path: &Path) -> Result<Option<Value>, ModelError> {
    match std::fs::read(path) {
        Ok(json) => serde_json::from_slice(&json)
            .map(Some)
            .map_err(|e| ModelError::corrupt(path, e.to_string())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(ModelError::io("read", path, e)),
    }
}
