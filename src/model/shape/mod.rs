//! What a model's cache must hold, known without its weights: heads, widths and windows of its attention layers.
//!
//! A shape comes from a loaded model's [`ModelSpec`] or from a `config.json` alone, of more families than can be run. Invariant:
//! a shape says how many values a token adds and which layers forget; it says nothing that only running the model needs.

mod config;
mod keys;
mod params;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{ModelError, ModelSpec};
use crate::cache::rope::{PairLayout, Rope};
use crate::cache::{Geometry, LayerGeometry};

/// What a layer stores of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stored {
    /// A row of K and a row of V for each KV head (MHA, GQA, MQA).
    KeysAndValues,
    /// One row for all heads, of which K and V are both made (MLA): the latent and the rotary part of K side by side.
    Latent,
}

/// One attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayerShape {
    /// What is stored.
    pub stored: Stored,
    /// Rows of K a token adds: KV heads, or 1 latent.
    pub n_kv_heads: usize,
    /// Values of one row.
    pub head_dim: usize,
    /// Sliding window in tokens; `None` remembers all.
    pub window: Option<usize>,
}

impl LayerShape {
    /// Values that one token adds.
    pub fn values_per_token(&self) -> usize {
        let sides = match self.stored {
            Stored::KeysAndValues => 2,
            Stored::Latent => 1,
        };
        sides * self.n_kv_heads * self.head_dim
    }

    /// Values that are stored of `n_tokens`: a sliding window keeps no more than itself.
    pub fn values_at(&self, n_tokens: usize) -> u64 {
        let n = self.window.map_or(n_tokens, |w| n_tokens.min(w));
        (n * self.values_per_token()) as u64
    }
}

/// What is known of the weights' size.
#[derive(Debug, Clone, PartialEq)]
pub enum Weights {
    /// Bytes of the files.
    Stored {
        /// Those of tensors, or of the files they lie in.
        n_bytes: u64,
    },
    /// No file: parameters counted from the configuration.
    Counted {
        /// How many.
        n_params: u64,
        /// The format that the configuration names; `None` where it names none, or one of its own.
        dtype: Option<String>,
    },
}

/// The attention layers of a model and the little else that planning needs.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheShape {
    /// The model's name, for people.
    pub name: String,
    /// Query heads of a layer.
    pub n_heads: usize,
    /// One entry per layer.
    pub layers: Vec<LayerShape>,
    /// The longest context the model was made for, in tokens.
    pub context_length: usize,
    /// The size of its weights.
    pub weights: Weights,
}

impl CacheShape {
    /// The shape of a model that can be run.
    pub fn of(spec: &ModelSpec) -> Self {
        let layers = spec.layers.iter().map(|layer| LayerShape {
            stored: Stored::KeysAndValues,
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim,
            window: layer.window,
        });
        Self {
            name: spec.name.clone(),
            n_heads: spec.n_heads,
            layers: layers.collect(),
            context_length: spec.context_length,
            weights: Weights::Stored {
                n_bytes: spec.weights_bytes,
            },
        }
    }

    /// Reads a `.gguf` file, a folder with `config.json`, or a `config.json` (any `.json`) by itself.
    ///
    /// # Errors
    /// [`ModelError`] names the file and the key that is missing or not understood.
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        let is_json = path.extension().is_some_and(|e| e == "json");
        if path.is_dir() {
            let mut shape = config::read(&path.join("config.json"))?;
            if let Some(n_bytes) = weight_files(path)? {
                shape.weights = Weights::Stored { n_bytes };
            }
            Ok(shape)
        } else if is_json {
            config::read(path)
        } else {
            Ok(Self::of(&super::load(path)?.spec))
        }
    }

    /// Values that one token adds over all layers, windows not yet full.
    pub fn values_per_token(&self) -> u64 {
        let layers = self.layers.iter();
        layers.map(|l| l.values_per_token() as u64).sum()
    }

    /// Values of a full cache of `n_tokens`, sliding windows at most full.
    pub fn values_at(&self, n_tokens: usize) -> u64 {
        self.layers.iter().map(|l| l.values_at(n_tokens)).sum()
    }

    /// The kinds of layers, each with how many there are, in order of first appearance.
    pub fn kinds(&self) -> Vec<(LayerShape, u64)> {
        let mut kinds: Vec<(LayerShape, u64)> = Vec::new();
        for layer in &self.layers {
            match kinds.iter_mut().find(|(kind, _)| kind == layer) {
                Some((_, n)) => *n += 1,
                None => kinds.push((*layer, 1)),
            }
        }
        kinds
    }

    /// "32 layers: 8 KV heads x 128 (GQA)", with windows where there are any.
    pub fn in_words(&self) -> String {
        let kind = |(layer, n): &(LayerShape, u64)| {
            let rows = match (layer.stored, layer.n_kv_heads) {
                (Stored::Latent, _) => format!("one latent row of {} (MLA)", layer.head_dim),
                (_, 1) if self.n_heads > 1 => format!("1 KV head x {} (MQA)", layer.head_dim),
                (_, n) if n == self.n_heads => format!("{n} KV heads x {} (MHA)", layer.head_dim),
                (_, n) => format!("{n} KV heads x {} (GQA)", layer.head_dim),
            };
            let window = layer.window.map(|w| format!(", window {w}"));
            format!("{n} layers of {rows}{}", window.unwrap_or_default())
        };
        self.kinds().iter().map(kind).collect::<Vec<_>>().join("; ")
    }
}

/// The geometry of layers for a cache that stores rows and is never attended: any rotation will do.
pub fn stand_in(layer: LayerShape, n_layers: usize, n_positions: usize) -> Geometry {
    let rope = Rope::new(
        PairLayout::HalfSplit,
        Rope::frequencies(10_000.0, layer.head_dim / 2 * 2),
        n_positions,
    );
    let layer = LayerGeometry {
        n_heads: layer.n_kv_heads,
        n_kv_heads: layer.n_kv_heads,
        head_dim: layer.head_dim,
        scale: 1.0,
        rope: Arc::new(rope),
        window: layer.window.map(|w| u32::try_from(w).unwrap_or(u32::MAX)),
    };
    Geometry {
        layers: vec![layer; n_layers],
    }
}

/// Bytes of a folder's files of weights; `None` if it has none.
fn weight_files(folder: &Path) -> Result<Option<u64>, ModelError> {
    let entries = std::fs::read_dir(folder).map_err(|e| ModelError::io("read", folder, e))?;
    let mut n_bytes = 0;
    for entry in entries {
        let path: PathBuf = entry.map_err(|e| ModelError::io("read", folder, e))?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let meta = std::fs::metadata(&path).map_err(|e| ModelError::io("read", &path, e))?;
            n_bytes += meta.len();
        }
    }
    Ok((n_bytes > 0).then_some(n_bytes))
}
