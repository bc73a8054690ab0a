//! Tensors by their role in the transformer, whatever the file calls them and however it stores them.
//!
//! A matrix has shape (rows = outputs, columns = inputs), row-major; a vector is one row. Invariants: a [`MappedWeights`]
//! that exists has every tensor its [`ModelSpec`] calls for, in the shape the spec calls for, inside its file; reading
//! rows twice gives the same bits.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

use super::ModelError;
use super::gguf::TensorType;
use super::spec::ModelSpec;

/// What a tensor is for. Those of a layer go with the layer's index, the first three with 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// (n_vocab, n_embd): a row per token.
    TokenEmbedding,
    /// The norm before the logits, n_embd.
    OutputNorm,
    /// (n_vocab, n_embd): the logits; absent when they use the embedding.
    Output,
    /// The norm before attention, n_embd.
    AttnNorm,
    /// (n_heads * head_dim, n_embd).
    Q,
    /// (n_kv_heads * head_dim, n_embd).
    K,
    /// (n_kv_heads * head_dim, n_embd).
    V,
    /// n_heads * head_dim.
    QBias,
    /// n_kv_heads * head_dim.
    KBias,
    /// n_kv_heads * head_dim.
    VBias,
    /// The norm on each head of Q before RoPE, head_dim.
    QNorm,
    /// The norm on each head of K before RoPE, head_dim.
    KNorm,
    /// (n_embd, n_heads * head_dim).
    AttnOut,
    /// The norm on the output of attention, n_embd.
    PostAttnNorm,
    /// The norm before the feed-forward part, n_embd.
    FfnNorm,
    /// (n_ff, n_embd): goes through the activation.
    Gate,
    /// (n_ff, n_embd).
    Up,
    /// (n_embd, n_ff).
    Down,
    /// The norm on the output of the feed-forward part, n_embd.
    PostFfnNorm,
}

impl Role {
    /// The roles outside layers.
    pub const OUTER: [Self; 3] = [Self::TokenEmbedding, Self::OutputNorm, Self::Output];

    /// The roles within a layer.
    pub const OF_LAYER: [Self; 16] = [
        Self::AttnNorm,
        Self::Q,
        Self::K,
        Self::V,
        Self::QBias,
        Self::KBias,
        Self::VBias,
        Self::QNorm,
        Self::KNorm,
        Self::AttnOut,
        Self::PostAttnNorm,
        Self::FfnNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
        Self::PostFfnNorm,
    ];

    /// Whether the tensor is the weight of an RMS norm.
    pub fn is_norm(self) -> bool {
        use Role::*;
        matches!(
            self,
            OutputNorm | AttnNorm | QNorm | KNorm | PostAttnNorm | FfnNorm | PostFfnNorm
        )
    }

    /// The shape (rows, columns) a model of this spec needs; `None` if it has no such tensor.
    pub fn shape_in(self, spec: &ModelSpec) -> Option<(usize, usize)> {
        let (q, kv) = (
            spec.n_heads * spec.head_dim,
            spec.n_kv_heads * spec.head_dim,
        );
        let shape = match self {
            Self::TokenEmbedding | Self::Output => (spec.n_vocab, spec.n_embd),
            Self::Q => (q, spec.n_embd),
            Self::K | Self::V => (kv, spec.n_embd),
            Self::QBias => (1, q),
            Self::KBias | Self::VBias => (1, kv),
            Self::QNorm | Self::KNorm => (1, spec.head_dim),
            Self::AttnOut => (spec.n_embd, q),
            Self::Gate | Self::Up => (spec.n_ff, spec.n_embd),
            Self::Down => (spec.n_embd, spec.n_ff),
            _ => (1, spec.n_embd),
        };
        let present = match self {
            Self::Output => !spec.tied_output,
            Self::QBias | Self::KBias | Self::VBias => spec.qkv_bias,
            Self::QNorm | Self::KNorm => spec.qk_norm,
            Self::PostAttnNorm | Self::PostFfnNorm => spec.post_norms,
            _ => true,
        };
        present.then_some(shape)
    }
}

/// A matrix as it is stored, rows back to back: a part of a mapped file, or bytes of its own.
#[derive(Debug, Clone)]
pub struct StoredMatrix {
    kind: TensorType,
    bytes: Bytes,
}

#[derive(Debug, Clone)]
enum Bytes {
    Mapped(Arc<Mmap>, Range<usize>),
    Owned(Arc<[u8]>),
}

impl StoredMatrix {
    /// Bytes that belong to no file.
    pub fn owned(kind: TensorType, bytes: Vec<u8>) -> Self {
        Self {
            kind,
            bytes: Bytes::Owned(bytes.into()),
        }
    }

    /// How its elements are stored.
    pub fn kind(&self) -> TensorType {
        self.kind
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(map, range) => &map[range.clone()],
            Bytes::Owned(bytes) => bytes,
        }
    }
}

/// Where a transformer takes its weights from.
pub trait WeightSource: Send + Sync {
    /// The model's hyperparameters.
    fn spec(&self) -> &ModelSpec;

    /// Shape (rows, columns) of a tensor; a vector of n is (1, n). `None` if the model has no such tensor.
    fn shape(&self, role: Role, layer: usize) -> Option<(usize, usize)>;

    /// Decodes rows `first .. first + out.len() / columns` to f32, `out` being `[row][column]`.
    ///
    /// # Errors
    /// [`ModelError::NoSuchRows`] if the model hasn't got them or `out` isn't whole rows.
    fn rows_f32(
        &self,
        role: Role,
        layer: usize,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError>;

    /// A matrix as it is stored; by default a copy in f32.
    ///
    /// # Errors
    /// As [`WeightSource::rows_f32`].
    fn matrix(&self, role: Role, layer: usize) -> Result<StoredMatrix, ModelError> {
        self.expanded(role, layer)
    }

    /// A copy of a matrix in f32.
    ///
    /// # Errors
    /// As [`WeightSource::rows_f32`].
    fn expanded(&self, role: Role, layer: usize) -> Result<StoredMatrix, ModelError> {
        let (rows, cols) = self.shape(role, layer).unwrap_or((1, 0));
        let mut values = vec![0.0f32; rows * cols];
        self.rows_f32(role, layer, 0, &mut values)?;
        let bytes = bytemuck::cast_slice(&values).to_vec();
        Ok(StoredMatrix::owned(TensorType::F32, bytes))
    }

    /// Bytes that a tensor takes where it is stored; `None` if the model has no such tensor. Default: as f32.
    fn stored_bytes(&self, role: Role, layer: usize) -> Option<u64> {
        let (rows, cols) = self.shape(role, layer)?;
        Some((rows * cols * size_of::<f32>()) as u64)
    }
}

/// One tensor in a mapped file.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub kind: TensorType,
    /// Index into the maps.
    pub map: usize,
    pub bytes: Range<usize>,
    /// Dimensions as the file has them, but slowest first.
    pub dims: Vec<usize>,
    /// Added to each element when read: 1 where a file keeps Gemma's norms as w - 1.
    pub offset: f32,
}

/// Tensors by role and layer.
pub(super) type Table = BTreeMap<(Role, usize), Stored>;

/// The weights of one model in memory-mapped files.
pub struct MappedWeights {
    spec: ModelSpec,
    maps: Vec<Arc<Mmap>>,
    tensors: Table,
}

impl MappedWeights {
    /// Brings a spec and its tensors together.
    ///
    /// # Errors
    /// [`ModelError::Invalid`] if a tensor is missing, has another shape than the spec calls for, or isn't in the spec.
    pub(super) fn new(
        spec: ModelSpec,
        maps: Vec<Mmap>,
        tensors: Table,
    ) -> Result<Self, ModelError> {
        spec.validate()?;
        let layers = (0..spec.n_layers).flat_map(|l| Role::OF_LAYER.map(|role| (role, l)));
        let mut n_needed = 0;
        for (role, layer) in Role::OUTER.into_iter().map(|role| (role, 0)).chain(layers) {
            let (Some(shape), found) = (role.shape_in(&spec), tensors.get(&(role, layer))) else {
                continue;
            };
            n_needed += 1;
            let shape = if shape.0 == 1 {
                vec![shape.1]
            } else {
                vec![shape.0, shape.1]
            };
            match found {
                None => {
                    return Err(ModelError::invalid(
                        &spec.name,
                        format!("layer {layer} lacks its {role:?} tensor"),
                    ));
                }
                Some(t) if t.dims != shape => {
                    let problem = format!(
                        "{role:?} of layer {layer} has shape {:?}, expected {shape:?}",
                        t.dims
                    );
                    return Err(ModelError::invalid(&spec.name, problem));
                }
                Some(_) => {}
            }
        }
        if n_needed != tensors.len() {
            let unused = |(role, layer): &&(Role, usize)| {
                *layer >= spec.n_layers || role.shape_in(&spec).is_none()
            };
            let problem = tensors.keys().find(unused).map_or(
                "a tensor isn't used by its spec".to_owned(),
                |(role, layer)| format!("{role:?} of layer {layer} isn't used by its spec"),
            );
            return Err(ModelError::invalid(&spec.name, problem));
        }
        Ok(Self {
            spec,
            maps: maps.into_iter().map(Arc::new).collect(),
            tensors,
        })
    }
}

impl WeightSource for MappedWeights {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn shape(&self, role: Role, layer: usize) -> Option<(usize, usize)> {
        let dims = &self.tensors.get(&(role, layer))?.dims;
        Some(if dims.len() == 1 {
            (1, dims[0])
        } else {
            (dims[0], dims[1])
        })
    }

    fn rows_f32(
        &self,
        role: Role,
        layer: usize,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let (rows, cols) = self.shape(role, layer).unwrap_or((0, 0));
        let end = first.saturating_add(out.len().div_ceil(cols.max(1)));
        let Some(tensor) = self
            .tensors
            .get(&(role, layer))
            .filter(|_| end <= rows && out.len().is_multiple_of(cols))
        else {
            return Err(ModelError::NoSuchRows {
                role,
                layer,
                first,
                end,
                rows,
                cols,
            });
        };
        let row_bytes = cols / tensor.kind.block_len() * tensor.kind.block_bytes();
        let bytes = &self.maps[tensor.map][tensor.bytes.clone()];
        tensor
            .kind
            .dequantize(&bytes[first * row_bytes..end * row_bytes], out);
        if tensor.offset != 0.0 {
            out.iter_mut().for_each(|x| *x += tensor.offset);
        }
        Ok(())
    }

    fn matrix(&self, role: Role, layer: usize) -> Result<StoredMatrix, ModelError> {
        // An offset is for norms, which are no matrices; without one the file's bytes are the matrix.
        match self.tensors.get(&(role, layer)) {
            Some(t) if t.offset == 0.0 => Ok(StoredMatrix {
                kind: t.kind,
                bytes: Bytes::Mapped(Arc::clone(&self.maps[t.map]), t.bytes.clone()),
            }),
            _ => self.expanded(role, layer),
        }
    }

    fn stored_bytes(&self, role: Role, layer: usize) -> Option<u64> {
        let bytes = &self.tensors.get(&(role, layer))?.bytes;
        Some(bytes.len() as u64)
    }
}

/// Maps a file into memory.
pub(super) fn map_file(path: &Path) -> Result<Mmap, ModelError> {
    let file = File::open(path).map_err(|e| ModelError::io("read", path, e))?;
    // SAFETY: the map is read-only and lives as long as the model. Writing to or cutting the file meanwhile would change
    // what is read or end the process (SIGBUS); `load` documents that model files must not change while in use, and
    // this program itself only ever replaces them by rename, which leaves a mapped file whole.
    let map = unsafe { Mmap::map(&file) };
    map.map_err(|e| ModelError::io("read", path, e))
}
