//! GGUF files: header, tensor types, and what their keys and tensor names mean.
//!
//! `open_model` is the whole door: it maps the file, checks the header against the file's size, reads the
//! hyperparameters of the architecture and the tokenizer, and hands out tensors by role. Invariant: a tensor that has no
//! role is refused, since a model with parts that are silently left out computes something else.

mod dequant;
mod header;
mod keys;
mod kquants;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::path::Path;

pub use dequant::TensorType;
pub(super) use header::short;
pub use header::{Header, Problem, TensorInfo, Value};
pub(super) use keys::Keys;

use super::spec::ModelSpec;
use super::tokenizer::Tokenizer;
use super::weights::{MappedWeights, Role, Stored, Table, map_file};
use super::{Architecture, ModelError};

/// The tensor of RoPE divisors, which belongs to the spec and not to the weights.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Opens a GGUF file as a model.
pub(super) fn open_model(path: &Path) -> Result<(MappedWeights, Tokenizer), ModelError> {
    let map = map_file(path)?;
    let header = Header::parse(&map).map_err(|problem| match problem {
        Problem::Damaged(problem) => ModelError::corrupt(path, problem),
        Problem::Unsupported { what, got, allowed } => ModelError::Unsupported {
            file: path.display().to_string(),
            what,
            got,
            allowed,
        },
    })?;
    let keys = Keys::new(path, &header)?;
    let mut factors = None;
    if let Some(tensor) = header.tensors.get(ROPE_FACTORS) {
        let mut values = vec![0.0; tensor.dims.iter().product()];
        tensor
            .kind
            .dequantize(&map[tensor.bytes.clone()], &mut values);
        factors = Some(values);
    }
    let table = table(&header, path)?;
    let spec = keys.spec(&table, factors)?;
    let tokenizer = Tokenizer::from_gguf(&keys)?;
    check_vocabulary(&spec, &tokenizer)?;
    drop(header);
    Ok((MappedWeights::new(spec, vec![map], table)?, tokenizer))
}

fn check_vocabulary(spec: &ModelSpec, tokenizer: &Tokenizer) -> Result<(), ModelError> {
    if tokenizer.vocab_size() <= spec.n_vocab {
        return Ok(());
    }
    let problem = format!(
        "its tokenizer has {} tokens, its embedding {} rows",
        tokenizer.vocab_size(),
        spec.n_vocab
    );
    Err(ModelError::invalid(&spec.name, problem))
}

/// Sorts the file's tensors by role.
fn table(header: &Header<'_>, path: &Path) -> Result<Table, ModelError> {
    let mut table = Table::new();
    for (&name, info) in &header.tensors {
        if name == ROPE_FACTORS {
            continue;
        }
        let Some(role) = role_of(name) else {
            return Err(ModelError::Unsupported {
                file: path.display().to_string(),
                what: "a tensor".into(),
                got: short(name),
                allowed: "those of dense llama, qwen2, qwen3 and gemma3 models".into(),
            });
        };
        let mut dims: Vec<usize> = info.dims.iter().rev().copied().collect();
        while dims.len() > 1 && dims[0] == 1 {
            dims.remove(0);
        }
        let stored = Stored {
            kind: info.kind,
            map: 0,
            bytes: info.bytes.clone(),
            dims,
            offset: 0.0,
        };
        table.insert(role, stored);
    }
    Ok(table)
}

/// (name in GGUF files, role) of the tensors outside layers.
const OUTER_NAMES: [(&str, Role); 3] = [
    ("token_embd.weight", Role::TokenEmbedding),
    ("output_norm.weight", Role::OutputNorm),
    ("output.weight", Role::Output),
];

/// (name in GGUF files after `blk.N.`, role) of a layer's tensors.
const LAYER_NAMES: [(&str, Role); 16] = [
    ("attn_norm.weight", Role::AttnNorm),
    ("attn_q.weight", Role::Q),
    ("attn_k.weight", Role::K),
    ("attn_v.weight", Role::V),
    ("attn_q.bias", Role::QBias),
    ("attn_k.bias", Role::KBias),
    ("attn_v.bias", Role::VBias),
    ("attn_q_norm.weight", Role::QNorm),
    ("attn_k_norm.weight", Role::KNorm),
    ("attn_output.weight", Role::AttnOut),
    ("post_attention_norm.weight", Role::PostAttnNorm),
    ("ffn_norm.weight", Role::FfnNorm),
    ("ffn_gate.weight", Role::Gate),
    ("ffn_up.weight", Role::Up),
    ("ffn_down.weight", Role::Down),
    ("post_ffw_norm.weight", Role::PostFfnNorm),
];

fn role_of(name: &str) -> Option<(Role, usize)> {
    if let Some((_, role)) = OUTER_NAMES.iter().find(|(outer, _)| *outer == name) {
        return Some((*role, 0));
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (_, role) = LAYER_NAMES.iter().find(|(inner, _)| *inner == rest)?;
    let plain = !layer.starts_with('+') && (layer == "0" || !layer.starts_with('0'));
    Some((*role, layer.parse().ok().filter(|_| plain)?))
}

/// The architecture a file names.
fn architecture(name: &str) -> Option<Architecture> {
    use Architecture::*;
    [Llama, Qwen2, Qwen3, Gemma3]
        .into_iter()
        .find(|a| a.gguf_name() == name)
}
