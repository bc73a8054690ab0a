//! The keys of a `config.json`: counts, flags and the defaults of each family.
//!
//! Invariant: a key that is absent has the default of the transformers library's configuration class, or is an error that
//! names it; a key that is null is absent, but for a window, where null means none.

use std::path::Path;

use serde_json::Value;

use crate::model::ModelError;
use crate::model::gguf::short;

/// The families whose caches are understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama 1 to 3 and what calls itself `llama`.
    Llama,
    /// Mistral, dense.
    Mistral,
    /// Mixtral: Mistral with experts.
    Mixtral,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 2 with experts.
    Qwen2Moe,
    /// Qwen 3, dense.
    Qwen3,
    /// Qwen 3 with experts.
    Qwen3Moe,
    /// Gemma 1.
    Gemma,
    /// Gemma 2: every other layer slides.
    Gemma2,
    /// Gemma 3 (text): five of six layers slide.
    Gemma3,
    /// Phi 1 and 2.
    Phi,
    /// Phi 3 and 4.
    Phi3,
    /// DeepSeek V2: latent attention.
    DeepSeek2,
    /// DeepSeek V3: latent attention.
    DeepSeek3,
}

/// `model_type` of each family.
const FAMILIES: [(&str, Family); 14] = [
    ("llama", Family::Llama),
    ("mistral", Family::Mistral),
    ("mixtral", Family::Mixtral),
    ("qwen2", Family::Qwen2),
    ("qwen2_moe", Family::Qwen2Moe),
    ("qwen3", Family::Qwen3),
    ("qwen3_moe", Family::Qwen3Moe),
    ("gemma", Family::Gemma),
    ("gemma2", Family::Gemma2),
    ("gemma3_text", Family::Gemma3),
    ("phi", Family::Phi),
    ("phi3", Family::Phi3),
    ("deepseek_v2", Family::DeepSeek2),
    ("deepseek_v3", Family::DeepSeek3),
];

/// Models of text and images: the text part is a table of its own.
const WRAPPERS: [&str; 3] = ["gemma3", "mistral3", "llava"];

/// Keys of caches of another kind: they must be absent, null, false, 0 or empty.
const FOREIGN: [&str; 6] = [
    "num_kv_shared_layers",
    "attention_chunk_size",
    "cross_attention_layers",
    "linear_num_key_heads",
    "mamba_d_state",
    "encoder_layers",
];

impl Family {
    fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma | Self::Gemma2 | Self::Gemma3)
    }

    /// Whether the logits use the embedding unless the file says otherwise.
    pub fn ties_output(self) -> bool {
        self.is_gemma()
    }

    /// What the library's class has for a key that a file may leave out.
    fn default(self, key: &str) -> Option<usize> {
        let all: &[(&str, usize)] = match self {
            Self::Mistral | Self::Mixtral => &[("num_key_value_heads", 8)],
            Self::Qwen3 | Self::Qwen3Moe => &[("head_dim", 128)],
            Self::Gemma => &[("head_dim", 256)],
            Self::Gemma2 => &[("head_dim", 256), ("sliding_window", 4096)],
            Self::Gemma3 => &[
                ("vocab_size", 262_208),
                ("num_attention_heads", 8),
                ("num_key_value_heads", 4),
                ("head_dim", 256),
                ("max_position_embeddings", 131_072),
                ("sliding_window", 4096),
            ],
            _ => &[],
        };
        all.iter().find(|(k, _)| *k == key).map(|(_, n)| *n)
    }
}

/// A `config.json`, or the text part of one.
pub struct Keys {
    file: String,
    root: Value,
    /// The family.
    pub family: Family,
}

impl Keys {
    /// Reads a file and refuses what isn't understood.
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        let bytes = std::fs::read(path).map_err(|e| ModelError::io("read", path, e))?;
        let mut root: Value =
            serde_json::from_slice(&bytes).map_err(|e| ModelError::corrupt(path, e.to_string()))?;
        let file = path.display().to_string();
        if WRAPPERS.iter().any(|w| root["model_type"] == *w) && root["text_config"].is_object() {
            root = root["text_config"].take();
        }
        let known = FAMILIES
            .iter()
            .find(|(name, _)| root["model_type"] == *name);
        let Some((_, family)) = known else {
            let names: Vec<&str> = FAMILIES.iter().map(|(name, _)| *name).collect();
            return Err(unsupported(
                &file,
                "model_type",
                &root["model_type"],
                &names.join(", "),
            ));
        };
        let family = *family;
        let keys = Self { file, root, family };
        for key in FOREIGN {
            let value = &keys.root[key];
            let is_absent = value.is_null()
                || *value == Value::Bool(false)
                || value.as_u64() == Some(0)
                || value.as_array().is_some_and(Vec::is_empty);
            if !is_absent {
                return Err(keys.unsupported(key, "absent, null, 0"));
            }
        }
        Ok(keys)
    }

    /// The error about a key.
    pub fn unsupported(&self, key: &str, allowed: &str) -> ModelError {
        unsupported(&self.file, key, &self.root[key], allowed)
    }

    /// The value of a key, null if it is absent.
    pub fn value(&self, key: &str) -> &Value {
        &self.root[key]
    }

    /// Whether a key is there, be it null.
    pub fn names(&self, key: &str) -> bool {
        self.root.get(key).is_some()
    }

    /// A positive count; absent: the family's default.
    pub fn optional(&self, key: &str) -> Result<Option<usize>, ModelError> {
        match &self.root[key] {
            Value::Null => Ok(self.family.default(key)),
            value => match value.as_u64().filter(|n| (1..=MOST).contains(n)) {
                Some(n) => Ok(Some(n as usize)),
                None => Err(self.unsupported(key, "a whole number from 1 to 2^24")),
            },
        }
    }

    /// A positive count that must be there.
    pub fn count(&self, key: &str) -> Result<usize, ModelError> {
        self.optional(key)?
            .ok_or_else(|| self.unsupported(key, "a whole number from 1 to 2^24"))
    }

    /// A count that may be 0, which is what it is if absent.
    pub fn or_zero(&self, key: &str) -> Result<usize, ModelError> {
        match self.root[key].as_u64() {
            Some(0) => Ok(0),
            _ => Ok(self.optional(key)?.unwrap_or(0)),
        }
    }

    /// A flag; absent: `default`.
    pub fn flag(&self, key: &str, default: Option<bool>) -> Result<Option<bool>, ModelError> {
        match &self.root[key] {
            Value::Null => Ok(default),
            Value::Bool(b) => Ok(Some(*b)),
            _ => Err(self.unsupported(key, "true, false")),
        }
    }

    /// Whether a flag is there and true.
    pub fn is_set(&self, key: &str) -> Result<bool, ModelError> {
        Ok(self.flag(key, None)? == Some(true))
    }
}

/// Far above any count of a real model, far below what products of counts could overflow with.
const MOST: u64 = 1 << 24;

fn unsupported(file: &str, key: &str, got: &Value, allowed: &str) -> ModelError {
    ModelError::Unsupported {
        file: file.to_owned(),
        what: key.to_owned(),
        got: match got {
            Value::Null => "missing".to_owned(),
            got => short(&got.to_string()),
        },
        allowed: allowed.to_owned(),
    }
}
