//! Hugging Face folders: `config.json`, `tokenizer.json`, and weights in one safetensors file or in shards.
//!
//! Invariants: shard names stay inside the folder; each tensor the index names is in the shard it names, and no tensor
//! comes twice; Gemma's norms, which its files keep as w - 1, leave the loader as w.

mod config;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use super::gguf::{TensorType, short};
use super::tokenizer::Tokenizer;
use super::weights::{MappedWeights, Role, Stored, Table, map_file};
use super::{Architecture, ModelError};
use config::Config;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Opens a folder as a model; also gives the files that make up its identity.
pub(super) fn open_folder(
    folder: &Path,
) -> Result<(MappedWeights, Tokenizer, Vec<PathBuf>), ModelError> {
    let lacking = |what: &str| ModelError::NotAModel {
        path: folder.into(),
        problem: format!("it has no {what}"),
    };
    for needed in ["config.json", "tokenizer.json"] {
        if !folder.join(needed).is_file() {
            return Err(lacking(needed));
        }
    }
    let index = folder.join(INDEX);
    let (shards, placed) = if index.is_file() {
        let placed = read_index(&index)?;
        (shard_names(&placed), placed)
    } else if folder.join(SINGLE).is_file() {
        (vec![SINGLE.to_owned()], BTreeMap::new())
    } else {
        return Err(lacking(&format!("{SINGLE} or {INDEX}")));
    };
    let config = Config::read(folder)?;
    let mut maps = Vec::new();
    let mut table = Table::new();
    for shard in &shards {
        let path = folder.join(shard);
        maps.push(map_file(&path)?);
        let tensors = tensors(&path, &maps[maps.len() - 1])?;
        if let Some((name, _)) = placed
            .iter()
            .find(|(name, at)| *at == shard && !tensors.contains_key(*name))
        {
            return Err(ModelError::corrupt(
                &path,
                format!(
                    "it lacks tensor {}, which the index places in it",
                    short(name)
                ),
            ));
        }
        for (name, mut stored) in tensors {
            stored.map = maps.len() - 1;
            add(&mut table, &path, &name, stored, config.architecture)?;
        }
    }
    if config.tied_output()? {
        // Where the output is tied, a copy of it in the file is not read, as Hugging Face's loader does.
        table.remove(&(Role::Output, 0));
    }
    let tokenizer = Tokenizer::from_json(&folder.join("tokenizer.json"))?;
    let spec = config.spec(&table, &tokenizer)?;
    let mut files: Vec<PathBuf> = shards.iter().map(|shard| folder.join(shard)).collect();
    files.extend(["config.json", "tokenizer.json"].map(|name| folder.join(name)));
    Ok((MappedWeights::new(spec, maps, table)?, tokenizer, files))
}

/// The weight files an index names, each once, sorted.
#[cfg(feature = "hub")]
pub(super) fn index_files(path: &Path) -> Result<Vec<String>, ModelError> {
    Ok(shard_names(&read_index(path)?))
}

fn shard_names(placed: &BTreeMap<String, String>) -> Vec<String> {
    let names: std::collections::BTreeSet<&String> = placed.values().collect();
    names.into_iter().cloned().collect()
}

/// Tensor names and the shards they are in.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>, ModelError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let json = std::fs::read(path).map_err(|e| ModelError::io("read", path, e))?;
    let index: Index =
        serde_json::from_slice(&json).map_err(|e| ModelError::corrupt(path, e.to_string()))?;
    let outside = |shard: &&String| {
        Path::new(shard.as_str()).file_name() != Some(std::ffi::OsStr::new(shard.as_str()))
    };
    match index.weight_map.values().find(outside) {
        Some(shard) => Err(ModelError::corrupt(
            path,
            format!("shard {} isn't a plain file name", short(shard)),
        )),
        None if index.weight_map.is_empty() => Err(ModelError::corrupt(path, "it names no tensor")),
        None => Ok(index.weight_map),
    }
}

/// The tensors of one file by name; `map` is still 0.
fn tensors(path: &Path, map: &Mmap) -> Result<BTreeMap<String, Stored>, ModelError> {
    let damaged =
        |e: &dyn std::fmt::Display| ModelError::corrupt(path, e.to_string().replace('\n', " "));
    let (header_len, metadata) = SafeTensors::read_metadata(map).map_err(|e| damaged(&e))?;
    let data_start = header_len + 8;
    let mut tensors = BTreeMap::new();
    for (name, info) in metadata.tensors() {
        let kind = match info.dtype {
            Dtype::F32 => TensorType::F32,
            Dtype::F16 => TensorType::F16,
            Dtype::BF16 => TensorType::BF16,
            // Buffers that transformers recomputes, stored by old versions.
            _ if is_buffer(&name) => continue,
            other => {
                return Err(ModelError::Unsupported {
                    file: path.display().to_string(),
                    what: format!("the type of tensor {}", short(&name)),
                    got: format!("{other:?}"),
                    allowed: "F32, F16, BF16".into(),
                });
            }
        };
        let (start, end) = info.data_offsets;
        let bytes = data_start + start..data_start + end;
        if bytes.end > map.len() || info.shape.is_empty() || info.shape.contains(&0) {
            return Err(ModelError::corrupt(
                path,
                format!("tensor {} has shape {:?}", short(&name), info.shape),
            ));
        }
        tensors.insert(
            name,
            Stored {
                kind,
                map: 0,
                bytes,
                dims: info.shape.clone(),
                offset: 0.0,
            },
        );
    }
    Ok(tensors)
}

fn is_buffer(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq")
}

/// Files a tensor under its role.
fn add(
    table: &mut Table,
    path: &Path,
    name: &str,
    mut stored: Stored,
    arch: Architecture,
) -> Result<(), ModelError> {
    if is_buffer(name) {
        return Ok(());
    }
    let Some(key) = role_of(name, arch) else {
        return Err(ModelError::Unsupported {
            file: path.display().to_string(),
            what: "a tensor".into(),
            got: short(name),
            allowed: format!("those of dense {arch:?} models"),
        });
    };
    if arch == Architecture::Gemma3 && key.0.is_norm() {
        stored.offset = 1.0;
    }
    match table.insert(key, stored) {
        None => Ok(()),
        Some(_) => Err(ModelError::corrupt(
            path,
            format!("tensor {} stands twice", short(name)),
        )),
    }
}

/// (name after `model.layers.N.`, role) of a layer's tensors, for all architectures.
const LAYER_NAMES: [(&str, Role); 15] = [
    ("input_layernorm.weight", Role::AttnNorm),
    ("self_attn.q_proj.weight", Role::Q),
    ("self_attn.k_proj.weight", Role::K),
    ("self_attn.v_proj.weight", Role::V),
    ("self_attn.q_proj.bias", Role::QBias),
    ("self_attn.k_proj.bias", Role::KBias),
    ("self_attn.v_proj.bias", Role::VBias),
    ("self_attn.q_norm.weight", Role::QNorm),
    ("self_attn.k_norm.weight", Role::KNorm),
    ("self_attn.o_proj.weight", Role::AttnOut),
    ("pre_feedforward_layernorm.weight", Role::FfnNorm),
    ("mlp.gate_proj.weight", Role::Gate),
    ("mlp.up_proj.weight", Role::Up),
    ("mlp.down_proj.weight", Role::Down),
    ("post_feedforward_layernorm.weight", Role::PostFfnNorm),
];

fn role_of(name: &str, arch: Architecture) -> Option<(Role, usize)> {
    match name {
        "model.embed_tokens.weight" => return Some((Role::TokenEmbedding, 0)),
        "model.norm.weight" => return Some((Role::OutputNorm, 0)),
        "lm_head.weight" => return Some((Role::Output, 0)),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let layer = layer.parse().ok()?;
    // The one name that means another thing in another architecture.
    if rest == "post_attention_layernorm.weight" {
        let gemma = arch == Architecture::Gemma3;
        return Some((
            if gemma {
                Role::PostAttnNorm
            } else {
                Role::FfnNorm
            },
            layer,
        ));
    }
    let (_, role) = LAYER_NAMES.iter().find(|(known, _)| *known == rest)?;
    Some((*role, layer))
}
