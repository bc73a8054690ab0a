//! How many parameters a `config.json` stands for.
//!
//! Counted from the transformers library's model files: embeddings, attention (with latent projections), feed-forward parts
//! (gated, plain, experts), norms and biases. Multi-token-prediction layers, which no cache of the base model feeds, are left out.

use super::config::{head_dim, kv_heads};
use super::keys::{Family, Keys};
use crate::model::ModelError;

/// All parameters of the text model.
pub fn count(keys: &Keys) -> Result<u64, ModelError> {
    let width = keys.count("hidden_size")? as u64;
    let n_vocab = keys.count("vocab_size")? as u64;
    let n_layers = keys.count("num_hidden_layers")?;
    let tied = keys.flag("tie_word_embeddings", Some(keys.family.ties_output()))?;
    let phi = keys.family == Family::Phi;
    let mut all = n_vocab * width;
    if tied != Some(true) {
        all += n_vocab * width + if phi { n_vocab } else { 0 };
    }
    let attention = match keys.family {
        Family::DeepSeek2 | Family::DeepSeek3 => latent_attention(keys, width)?,
        _ => attention(keys, width)?,
    };
    // Phi has one norm a layer, with a bias as its last norm has; Gemma 2 and 3 have norms after each part, too.
    let norms = match keys.family {
        Family::Gemma2 | Family::Gemma3 => 4 * width,
        _ => 2 * width,
    };
    for layer in 0..n_layers {
        all += attention + norms + feed_forward(keys, width, layer)?;
    }
    Ok(all + if phi { 2 * width } else { width })
}

fn attention(keys: &Keys, width: u64) -> Result<u64, ModelError> {
    let n_heads = keys.count("num_attention_heads")?;
    let (n_kv, dim) = (kv_heads(keys, n_heads)? as u64, head_dim(keys)? as u64);
    let (q, kv) = (n_heads as u64 * dim, n_kv * dim);
    let products = 2 * width * q + 2 * width * kv;
    let biases = match keys.family {
        Family::Qwen2 | Family::Qwen2Moe => q + 2 * kv,
        Family::Phi => q + 2 * kv + width,
        _ if keys.is_set("attention_bias")? => q + 2 * kv + width,
        _ => 0,
    };
    let head_norms = match keys.family {
        Family::Qwen3 | Family::Qwen3Moe | Family::Gemma3 => 2 * dim,
        _ => 0,
    };
    Ok(products + biases + head_norms)
}

/// DeepSeek's: down to latents of q (where there is one) and of K and V, and up again.
fn latent_attention(keys: &Keys, width: u64) -> Result<u64, ModelError> {
    let of = |key: &str| keys.count(key).map(|n| n as u64);
    let (n_heads, rank) = (of("num_attention_heads")?, of("kv_lora_rank")?);
    let (plain, turned, v) = (
        of("qk_nope_head_dim")?,
        of("qk_rope_head_dim")?,
        of("v_head_dim")?,
    );
    let queries = n_heads * (plain + turned);
    let q = match keys.optional("q_lora_rank")? {
        Some(rank) => (width + 1 + queries) * rank as u64,
        None => width * queries,
    };
    let down = width * (rank + turned) + rank;
    Ok(q + down + rank * n_heads * (plain + v) + n_heads * v * width)
}

fn feed_forward(keys: &Keys, width: u64, layer: usize) -> Result<u64, ModelError> {
    let gated = |n_ff: u64| 3 * width * n_ff;
    match experts(keys, layer)? {
        Some(e) => Ok(e.n * gated(e.n_ff) + e.n * width + gated(e.n_shared_ff) + e.extra),
        None => {
            let n_ff = keys.count("intermediate_size")? as u64;
            if keys.family == Family::Phi {
                return Ok(2 * width * n_ff + n_ff + width);
            }
            let biases = if keys.is_set("mlp_bias")? {
                2 * n_ff + width
            } else {
                0
            };
            Ok(gated(n_ff) + biases)
        }
    }
}

/// The experts of one layer.
struct Experts {
    n: u64,
    /// Width of each.
    n_ff: u64,
    /// Width of those that every token takes, together.
    n_shared_ff: u64,
    /// What else choosing takes, beside a row per expert.
    extra: u64,
}

/// `None` for a dense layer.
fn experts(keys: &Keys, layer: usize) -> Result<Option<Experts>, ModelError> {
    let of = |key: &str| keys.count(key).map(|n| n as u64);
    match keys.family {
        Family::Mixtral => Ok(Some(Experts {
            n: of("num_local_experts")?,
            n_ff: of("intermediate_size")?,
            n_shared_ff: 0,
            extra: 0,
        })),
        Family::Qwen2Moe | Family::Qwen3Moe => {
            let step = keys.optional("decoder_sparse_step")?.unwrap_or(1);
            let dense = keys.value("mlp_only_layers").as_array();
            let is_dense = dense.is_some_and(|l| l.iter().any(|l| *l == layer));
            if is_dense || !(layer + 1).is_multiple_of(step) {
                return Ok(None);
            }
            let shared = keys.or_zero("shared_expert_intermediate_size")? as u64;
            Ok(Some(Experts {
                n: of("num_experts")?,
                n_ff: of("moe_intermediate_size")?,
                n_shared_ff: shared,
                // A gate over the shared expert.
                extra: if shared > 0 { of("hidden_size")? } else { 0 },
            }))
        }
        Family::DeepSeek2 | Family::DeepSeek3 => {
            let n = keys.or_zero("n_routed_experts")? as u64;
            let frequency = keys.optional("moe_layer_freq")?.unwrap_or(1);
            let first = keys.or_zero("first_k_dense_replace")?;
            if n == 0 || layer < first || !layer.is_multiple_of(frequency) {
                return Ok(None);
            }
            let n_ff = of("moe_intermediate_size")?;
            Ok(Some(Experts {
                n,
                n_ff,
                n_shared_ff: keys.or_zero("n_shared_experts")? as u64 * n_ff,
                // V3 corrects each expert's score by a learned number.
                extra: if keys.family == Family::DeepSeek3 {
                    n
                } else {
                    0
                },
            }))
        }
        _ => Ok(None),
    }
}
