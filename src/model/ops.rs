//! What a backend computes for the transformer: about ten operations over weights that it owns.
//!
//! Invariants: activations are f32 rows, one per token of the batch, and stay the backend's own type between operations;
//! only queries, keys, values, hidden rows and the attention's output cross as slices. An inference backend gives a row
//! the same bits whatever its neighbours in the batch are. RoPE and attention are the cache's.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{ModelError, ModelSpec, Role, WeightSource};

/// What linear layers compute in, where their weights are stored in blocks of codes (q4_0, q4_1, q8_0); all others compute
/// in f32 whatever is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arithmetic {
    /// Fused multiply-adds of f32: the reference.
    #[default]
    F32,
    /// Activations as 16-bit integers, a scale per 32 of them; products and sums of a block are exact.
    Int16,
    /// The same with 8-bit integers.
    Int8,
}

impl Arithmetic {
    /// All, the reference first.
    pub const ALL: [Self; 3] = [Self::F32, Self::Int16, Self::Int8];

    /// Its name in experiments.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Int16 => "int16",
            Self::Int8 => "int8",
        }
    }

    /// The arithmetic of a name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|a| a.name() == name)
    }

    /// Whether it is the reference.
    pub fn is_f32(&self) -> bool {
        *self == Self::F32
    }
}

/// A backend with one model's weights loaded.
///
/// Operations may assume shapes that follow from the spec: [`super::transformer`] is the one caller.
pub trait Ops: Send + Sync + Sized {
    /// Rows of activations, `[row][width]`.
    type Act;

    /// The model's hyperparameters.
    fn spec(&self) -> &ModelSpec;
    /// Embedding rows times the spec's factor, `[token][n_embd]`.
    ///
    /// # Errors
    /// What the source says: a token outside the vocabulary.
    fn embed(&self, tokens: &[u32]) -> Result<Self::Act, ModelError>;
    /// x·Wᵀ of several layers over the same input, plus the bias where a role has one ([`bias_of`]).
    fn linear<const N: usize>(
        &self,
        roles: [Role; N],
        layer: usize,
        x: &Self::Act,
    ) -> [Self::Act; N];
    /// RMS norm of rows, or of each head in them: of every run of values as long as the norm's weight.
    fn rms_norm(&self, role: Role, layer: usize, x: &Self::Act) -> Self::Act;
    /// activation(gate) · up, the activation being the spec's.
    fn gate(&self, gate: Self::Act, up: &Self::Act) -> Self::Act;
    /// x + y.
    fn add(&self, x: Self::Act, y: &Self::Act) -> Self::Act;
    /// Rows to the host, `[row][width]`.
    fn read<'a>(&self, x: &'a Self::Act) -> Cow<'a, [f32]>;
    /// Rows from the host.
    fn write(&self, rows: Vec<f32>, width: usize) -> Self::Act;
    /// Logits of hidden rows: `hidden` `[row][n_embd]`, `out` `[row][n_vocab]`.
    fn logits(&self, hidden: &[f32], out: &mut [f32]);
}

/// A backend that brings its weights in by itself.
pub trait Load: Ops {
    /// Loads every tensor that the spec calls for.
    ///
    /// # Errors
    /// What the source says, or [`ModelError::Invalid`] when it lacks a tensor or the backend has no such arithmetic.
    fn load(source: Arc<dyn WeightSource>, arithmetic: Arithmetic) -> Result<Self, ModelError>;
}

/// The bias that goes with a linear layer, where a model has one.
pub fn bias_of(role: Role) -> Option<Role> {
    match role {
        Role::Q => Some(Role::QBias),
        Role::K => Some(Role::KBias),
        Role::V => Some(Role::VBias),
        _ => None,
    }
}

/// The matrix that makes logits.
pub fn head_of(spec: &ModelSpec) -> Role {
    if spec.tied_output {
        Role::TokenEmbedding
    } else {
        Role::Output
    }
}

/// A tensor that a model must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needed {
    /// What it is for.
    pub role: Role,
    /// Its layer, 0 outside layers.
    pub layer: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl Needed {
    /// Whether it is a norm's weight or a bias rather than a matrix.
    pub fn is_vector(&self) -> bool {
        self.role.is_norm() || matches!(self.role, Role::QBias | Role::KBias | Role::VBias)
    }
}

/// Every tensor that a backend loads: the layers', the last norm and the matrix of [`head_of`]. Embedding rows are
/// read from the source as tokens come.
///
/// # Errors
/// [`ModelError::Invalid`] when the source lacks one or has it in another shape.
pub fn needed(source: &dyn WeightSource) -> Result<Vec<Needed>, ModelError> {
    let spec = source.spec();
    let layers = (0..spec.n_layers).flat_map(|layer| Role::OF_LAYER.map(|role| (role, layer)));
    let outer = [(Role::OutputNorm, 0), (head_of(spec), 0)];
    let mut all = Vec::new();
    for (role, layer) in layers.chain(outer) {
        let Some((rows, cols)) = role.shape_in(spec) else {
            continue;
        };
        let found = source.shape(role, layer);
        if found != Some((rows, cols)) {
            return Err(ModelError::invalid(
                &spec.name,
                format!("{role:?} of layer {layer} has shape {found:?}, expected ({rows}, {cols})"),
            ));
        }
        all.push(Needed {
            role,
            layer,
            rows,
            cols,
        });
    }
    Ok(all)
}
