//! From a `config.json` to the layers of a cache.
//!
//! Which layers slide follows the transformers library's model files: `layer_types` where it is given, else each family's rule.

use std::path::Path;

use serde_json::Value;

use super::keys::{Family, Keys};
use super::{CacheShape, LayerShape, Stored, Weights, params};
use crate::model::ModelError;

/// The period of Gemma 3's layers: the last of each six sees all.
const GEMMA3_PATTERN: usize = 6;

/// Reads a `config.json`.
pub fn read(path: &Path) -> Result<CacheShape, ModelError> {
    let keys = Keys::read(path)?;
    let n_heads = keys.count("num_attention_heads")?;
    Ok(CacheShape {
        name: name(path),
        n_heads,
        layers: layers(&keys, n_heads)?,
        context_length: keys.count("max_position_embeddings")?,
        weights: Weights::Counted {
            n_params: params::count(&keys)?,
            dtype: dtype(&keys),
        },
    })
}

/// The folder's name for a `config.json`, else the file's.
fn name(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default();
    let folder = path.parent().and_then(Path::file_name);
    let name = match folder {
        Some(folder) if stem == "config" => folder,
        _ => stem,
    };
    name.to_string_lossy().replace(char::is_control, " ")
}

/// The format of the weights, unless they are stored in one of the quantizer's own.
fn dtype(keys: &Keys) -> Option<String> {
    if !keys.value("quantization_config").is_null() {
        return None;
    }
    let named = [keys.value("dtype"), keys.value("torch_dtype")];
    let named = named.into_iter().find_map(Value::as_str);
    named.map(str::to_owned)
}

fn layers(keys: &Keys, n_heads: usize) -> Result<Vec<LayerShape>, ModelError> {
    let n = keys.count("num_hidden_layers")?;
    let row = match keys.family {
        Family::DeepSeek2 | Family::DeepSeek3 => LayerShape {
            stored: Stored::Latent,
            n_kv_heads: 1,
            head_dim: keys.count("kv_lora_rank")? + keys.count("qk_rope_head_dim")?,
            window: None,
        },
        _ => LayerShape {
            stored: Stored::KeysAndValues,
            n_kv_heads: kv_heads(keys, n_heads)?,
            head_dim: head_dim(keys)?,
            window: None,
        },
    };
    let slides = sliding(keys, n)?;
    if !slides.contains(&true) {
        return Ok(vec![row; n]);
    }
    let window = Some(keys.count("sliding_window")?);
    let local = LayerShape { window, ..row };
    let layers = slides.into_iter();
    Ok(layers.map(|s| if s { local } else { row }).collect())
}

/// KV heads of a layer.
pub fn kv_heads(keys: &Keys, n_heads: usize) -> Result<usize, ModelError> {
    let n = keys.optional("num_key_value_heads")?.unwrap_or(n_heads);
    if !n_heads.is_multiple_of(n) {
        let allowed = format!("a divisor of num_attention_heads, {n_heads}");
        return Err(keys.unsupported("num_key_value_heads", &allowed));
    }
    Ok(n)
}

/// Values of a head's row.
pub fn head_dim(keys: &Keys) -> Result<usize, ModelError> {
    if let Some(n) = keys.optional("head_dim")? {
        return Ok(n);
    }
    let (width, n_heads) = (
        keys.count("hidden_size")?,
        keys.count("num_attention_heads")?,
    );
    match width / n_heads {
        0 => Err(keys.unsupported("hidden_size", "at least one value per attention head")),
        n => Ok(n),
    }
}

/// Which of `n` layers have a sliding window.
fn sliding(keys: &Keys, n: usize) -> Result<Vec<bool>, ModelError> {
    if !keys.value("layer_types").is_null() {
        return listed(keys, n);
    }
    // Null says no window; only Mistral's class has one where the key is absent.
    let has_window = !keys.value("sliding_window").is_null();
    let slides = |of: &dyn Fn(usize) -> bool| Ok((0..n).map(of).collect());
    match keys.family {
        Family::Mistral if !keys.names("sliding_window") => {
            Err(keys.unsupported("sliding_window", "a window in tokens, null for none"))
        }
        Family::Mistral | Family::Mixtral | Family::Phi3 => slides(&|_| has_window),
        Family::Qwen2 | Family::Qwen2Moe | Family::Qwen3 | Family::Qwen3Moe => {
            let first = match keys.is_set("use_sliding_window")? {
                true => keys.or_zero("max_window_layers")?,
                false => n,
            };
            slides(&|layer| layer >= first)
        }
        Family::Gemma2 => slides(&|layer| layer % 2 == 0),
        Family::Gemma3 => {
            let period = match keys.optional("sliding_window_pattern")? {
                Some(period) => period,
                None => keys
                    .optional("_sliding_window_pattern")?
                    .unwrap_or(GEMMA3_PATTERN),
            };
            slides(&|layer| (layer + 1) % period != 0)
        }
        _ => slides(&|_| false),
    }
}

/// `layer_types`, one for each layer.
fn listed(keys: &Keys, n: usize) -> Result<Vec<bool>, ModelError> {
    const ALLOWED: &str = "full_attention, sliding_attention, one for each layer";
    let wrong = || keys.unsupported("layer_types", ALLOWED);
    let types = keys.value("layer_types").as_array().ok_or_else(wrong)?;
    if types.len() != n {
        return Err(wrong());
    }
    let slides = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(wrong()),
    };
    types.iter().map(slides).collect()
}
