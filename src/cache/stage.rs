//! The seam a strategy file implements: one stage of five kinds, and the registry that lists them.
//!
//! Data meets the kinds in this order, whatever order a TOML names them in: retain, project, encode, pack, place.
//! Default trait methods are the reference; an override is a fast path and must give the same bits.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Geometry;
pub use super::params::{Domain, ParamDef, Params, Value};
use super::project::aqua::Prediction;
pub use super::retention::{
    Choice, ContextLayer, ContextNeeds, Costs, LeftAtPoint, LiveRows, Moment, NewRow, Repetition,
    Retention, SeenLayer, Shortage, Threshold,
};
use super::sparse::Reading;
pub use super::stored::{Stored, Work};
use crate::compute::cpu::gemm::{Mat, MatMut};
pub use crate::compute::cpu::rows::Kernel;

/// The five kinds of stages, in the order in which data meets them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Which rows live.
    Retain,
    /// Linear maps of rows.
    Project,
    /// Rows to bytes.
    Encode,
    /// Bytes to fewer bytes, exactly.
    Pack,
    /// Where pages live.
    Place,
}

impl Kind {
    /// All kinds in order.
    pub const ALL: [Kind; 5] = [
        Kind::Retain,
        Kind::Project,
        Kind::Encode,
        Kind::Pack,
        Kind::Place,
    ];

    /// The kind's TOML key.
    pub fn key(self) -> &'static str {
        match self {
            Kind::Retain => "retain",
            Kind::Project => "project",
            Kind::Encode => "encode",
            Kind::Pack => "pack",
            Kind::Place => "place",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.key())
    }
}

/// What can go wrong while a stage is built.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// No stage of that kind and name.
    #[error("no {kind} stage is called `{name}`; there are: {known}")]
    Unknown {
        /// The kind asked for.
        kind: Kind,
        /// The name asked for.
        name: String,
        /// Names that exist, comma-separated.
        known: String,
    },
    /// A parameter is wrong.
    #[error("{kind} stage `{name}`: {problem}")]
    Parameter {
        /// The stage's kind.
        kind: Kind,
        /// The stage's name.
        name: String,
        /// What is wrong, what is allowed.
        problem: String,
    },
    /// A stage that learns from a calibration text got none.
    #[error("{kind} stage `{name}` needs calibration statistics: name a text with `calibration`")]
    NoCalibration {
        /// The stage's kind.
        kind: Kind,
        /// The stage's name.
        name: String,
    },
}

/// How far a lossy stage may move a row; the conformance suite checks it on random rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Tolerance {
    /// Bit-exact.
    Exact,
    /// ‖x − x̂‖ / ‖x‖ of a whole row of normal random numbers stays below this; and is never 0.
    RelativeL2(f32),
}

/// Covariances of one KV head over a calibration text, `[head_dim][head_dim]` row-major, in f64.
#[derive(Debug, Clone)]
pub struct HeadCovariance {
    /// Of keys before RoPE.
    pub k_pre: Vec<f64>,
    /// Of keys after RoPE.
    pub k_post: Vec<f64>,
    /// Of values.
    pub v: Vec<f64>,
}

/// One KV head's rows of a calibration text, `[token][head_dim]`.
#[derive(Debug, Clone, Default)]
pub struct HeadRows {
    /// Keys before RoPE.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
}

/// What a calibration text shows of K and V.
#[derive(Debug, Clone)]
pub struct Calibration {
    /// Second moments (not centred), `[layer][kv_head]`.
    pub heads: Vec<Vec<HeadCovariance>>,
    /// Tokens that went in.
    pub n_tokens: usize,
    /// The rows of the first tokens themselves, `[layer][kv_head]`.
    pub rows: Vec<Vec<HeadRows>>,
    /// Positions of those rows.
    pub positions: Vec<u32>,
}

/// Which of the two rows of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Keys.
    K,
    /// Values.
    V,
}

impl Side {
    /// Both.
    pub const BOTH: [Side; 2] = [Side::K, Side::V];
}

/// In which form keys are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyForm {
    /// Rotated at append.
    #[default]
    PostRope,
    /// Rotated at read.
    PreRope,
}

/// What a stage is built from.
#[derive(Debug, Clone, Copy)]
pub struct BuildContext<'a> {
    /// The model's attention layers.
    pub geometry: &'a Geometry,
    /// Form of the keys.
    pub keys: KeyForm,
    /// The side the stage works on (stages without sides ignore it).
    pub side: Side,
    /// Statistics of the calibration text, when the stage's `needs` ask for them.
    pub calibration: Option<&'a Calibration>,
    /// Directory for backing files.
    pub backing_dir: Option<&'a PathBuf>,
    /// The head that an `encode` stage is built for; the other kinds build once for all heads.
    pub head: Option<HeadContext<'a>>,
}

/// The head that a codec is built for. A codec that learns nothing is built once per number of channels and shared.
#[derive(Debug, Clone, Copy)]
pub struct HeadContext<'a> {
    /// Layer index.
    pub layer: usize,
    /// KV head index.
    pub kv_head: usize,
    /// Channels of a row.
    pub dim: usize,
    /// Calibration rows of the layer's side as the codec will see them (rotated if keys are stored so, projected),
    /// `[kv_head][token · dim]`; empty if the stage learns nothing or there is no calibration text.
    pub samples: &'a [Vec<f32>],
}

impl HeadContext<'_> {
    /// Any head of `dim` channels, for checks without a calibration text.
    pub fn any(dim: usize) -> Self {
        Self {
            layer: 0,
            kv_head: 0,
            dim,
            samples: &[],
        }
    }
}

/// A codec, row by row or page by page.
#[derive(Clone)]
pub enum Codec {
    /// Each row on its own.
    Rows(Arc<dyn RowCodec>),
    /// Several rows together.
    Pages(Arc<dyn PageCodec>),
}

/// A stage that was built.
#[derive(Clone)]
pub enum Stage {
    /// Which rows live.
    Retain(Arc<dyn Retention>),
    /// A linear map.
    Project(Arc<dyn Projection>),
    /// Predictions from the layer before, to be fitted once the codecs are known; they stand before all maps.
    Predict(Prediction),
    /// Rows to bytes.
    Encode(Codec),
    /// Bytes to fewer bytes.
    Pack(Arc<dyn Packer>),
    /// Where pages live.
    Place(Arc<dyn Placement>),
    /// What decoded tokens read; it stands under `place`.
    Read(Reading),
}

/// A registered stage: its definition, documentation and constructor in one place.
#[derive(Debug)]
pub struct StageDef {
    /// Name in the TOML.
    pub name: &'static str,
    /// Kind.
    pub kind: Kind,
    /// One line for `list` and the docs table.
    pub doc: &'static str,
    /// Where it was published or is defined.
    pub paper: &'static str,
    /// Parameters.
    pub params: &'static [ParamDef],
    /// Needs a calibration text, with these parameters: [`always()`], [`never()`] or a rule.
    pub calibrated: fn(&Params) -> bool,
    /// Values of the stage in a TOML, e.g. `"q4_0"` or `{ method = "window", recent = 64 }`; each is built and tested.
    pub examples: &'static [&'static str],
    /// How far it may move a row.
    pub tolerance: Tolerance,
    /// Builds it from resolved parameters.
    pub build: fn(&Params, &BuildContext<'_>) -> Result<Stage, StageError>,
}

/// A stage that learns from a calibration text, whatever its parameters.
pub fn always(_: &Params) -> bool {
    true
}

/// A stage that learns nothing.
pub fn never(_: &Params) -> bool {
    false
}

/// Every registered stage, by kind and then in order of registration.
pub fn registry() -> impl Iterator<Item = &'static StageDef> {
    let slices: [&'static [StageDef]; 5] = [
        super::retain::STAGES,
        super::project::STAGES,
        super::encode::STAGES,
        super::pack::STAGES,
        super::place::STAGES,
    ];
    slices.into_iter().flatten()
}

/// The stage of that kind and name.
pub fn find(kind: Kind, name: &str) -> Result<&'static StageDef, StageError> {
    registry()
        .find(|d| d.kind == kind && d.name == name)
        .ok_or_else(|| StageError::Unknown {
            kind,
            name: name.to_owned(),
            known: registry()
                .filter(|d| d.kind == kind)
                .map(|d| d.name)
                .collect::<Vec<_>>()
                .join(", "),
        })
}

/// `project`: a linear map per (layer, KV head), on K or on V.
pub trait Projection: Send + Sync {
    /// Channels after the map, for rows of `dim` channels.
    fn output_dim(&self, dim: usize) -> usize;
    /// z = P·x. `x`: `[dim]`, `z`: `[output_dim]`.
    fn forward(&self, layer: usize, kv_head: usize, x: &[f32], z: &mut [f32]);
    /// x̂ = R·z, the best guess at x. `z`: `[output_dim]`, `x`: `[dim]`.
    fn expand(&self, layer: usize, kv_head: usize, z: &[f32], x: &mut [f32]);
    /// q' with q'·z = q·(R·z), that is Rᵀ·q. `q`: `[dim]`, `out`: `[output_dim]`.
    fn absorb(&self, layer: usize, kv_head: usize, q: &[f32], out: &mut [f32]);
    /// Bytes of the map's weights.
    fn weight_bytes(&self) -> u64;
}

/// `encode`: rows to bytes, each row on its own. A row of `dim` channels takes [`RowCodec::row_bytes`] bytes, whatever
/// its neighbours are.
pub trait RowCodec: Send + Sync {
    /// Bytes of one row of `dim` channels.
    fn row_bytes(&self, dim: usize) -> usize;
    /// The part of [`RowCodec::row_bytes`] that holds scales rather than codes.
    fn scale_bytes(&self, dim: usize) -> usize;
    /// Encodes one row, `[dim]`, into `out` (`row_bytes(dim)` long).
    fn encode(&self, row: &[f32], out: &mut [u8]);
    /// Decodes one row into `row`, `[dim]`.
    fn decode(&self, bytes: &[u8], row: &mut [f32]);
    /// Decodes `rows.len() / dim` rows that lie back to back.
    fn decode_rows(&self, bytes: &[u8], dim: usize, rows: &mut [f32]) {
        let n = self.row_bytes(dim);
        for (b, r) in bytes.chunks_exact(n).zip(rows.chunks_exact_mut(dim)) {
            self.decode(b, r);
        }
    }
    /// Kernels that read stored rows to the bits that decoding gives, if there are any.
    fn kernel(&self) -> Option<&dyn Kernel> {
        None
    }
    /// The same format with a number of bits for each row, if it has that.
    fn leveled(&self) -> Option<Arc<dyn PageCodec>> {
        None
    }
    /// Bytes of tables shared by all rows (codebooks).
    fn table_bytes(&self) -> u64 {
        0
    }
}

/// `encode`, page-wise: consecutive rows together, so that a scale can run along a channel. What is stored for a row
/// depends on its neighbours; until its page is full the row stays exact.
pub trait PageCodec: Send + Sync {
    /// Rows that are encoded together; divides [`RANGE`](super::RANGE).
    fn page_rows(&self) -> usize;
    /// Bytes of `n_rows` rows (1 to `page_rows`) of `dim` channels.
    fn page_bytes(&self, n_rows: usize, dim: usize) -> usize;
    /// The part of [`PageCodec::page_bytes`] that holds scales rather than codes.
    fn scale_bytes(&self, n_rows: usize, dim: usize) -> usize;
    /// Encodes rows, `[n_rows][dim]`, into `out` (`page_bytes(n_rows, dim)` long).
    fn encode(&self, rows: &[f32], dim: usize, out: &mut [u8]);
    /// Decodes into `rows`, `[n_rows][dim]`.
    fn decode(&self, bytes: &[u8], dim: usize, rows: &mut [f32]);
    /// `out[query][row]` = the score of each row of the page for each query. `q`: `[query][dim]`.
    fn scores(&self, page: Stored<'_>, q: &[f32], work: &mut Work, out: MatMut<'_>) {
        work.decoded(page, |bytes, rows| self.decode(bytes, page.dim, rows))
            .scores(q, out);
    }
    /// `out[channel][row]` = the rows of the page as they meet queries.
    fn columns(&self, page: Stored<'_>, work: &mut Work, out: MatMut<'_>) {
        work.decoded(page, |bytes, rows| self.decode(bytes, page.dim, rows))
            .columns(out);
    }
    /// `out[query]` += Σ `weights[query][row]` · row over some rows of the page, whose weights come first. `out`:
    /// `[query][dim]`.
    fn weighted_sum(
        &self,
        page: Stored<'_>,
        rows: Range<usize>,
        weights: Mat<'_>,
        work: &mut Work,
        out: &mut [f32],
    ) {
        work.decoded(page, |bytes, rows| self.decode(bytes, page.dim, rows))
            .weighted_sum(rows, weights, out);
    }
    /// The same format with a number of bits for each row, if it has that.
    fn leveled(&self) -> Option<Arc<dyn PageCodec>> {
        None
    }
    /// How it codes rows of different bits, if it does. A page of such a codec is a whole range, and as long as its bytes.
    fn levels(&self) -> Option<&dyn Levels> {
        None
    }
    /// Bytes of tables shared by all pages (codebooks).
    fn table_bytes(&self) -> u64 {
        0
    }
}

/// A page codec whose rows have a number of bits each.
pub trait Levels {
    /// Bits by level, ascending.
    fn bits(&self) -> &'static [usize];
    /// Bytes of a page with so many rows of each level, of `dim` channels.
    fn bytes(&self, n_rows: &[usize], dim: usize) -> usize;
    /// Encodes a page of rows, `[n_rows][dim]`, each at its level.
    fn encode(&self, rows: &[f32], dim: usize, levels: &[u8]) -> Vec<u8>;
}

/// `pack`: a sealed page's bytes to fewer bytes, exactly.
pub trait Packer: Send + Sync {
    /// Packs `raw`; rows of `row_bytes` bytes lie back to back in it.
    fn pack(&self, raw: &[u8], row_bytes: usize) -> Result<Vec<u8>, super::CacheError>;
    /// Restores exactly the bytes that were packed into `raw`.
    fn unpack(
        &self,
        packed: &[u8],
        row_bytes: usize,
        raw: &mut [u8],
    ) -> Result<(), super::CacheError>;
}

/// Names a parked page in a [`Backing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot(pub u64);

/// `place`: opens the tier in which sealed pages are parked.
pub trait Placement: Send + Sync {
    /// A fresh, empty tier.
    fn open(&self) -> Result<Box<dyn Backing>, super::CacheError>;
}

/// A tier outside memory.
pub trait Backing: Send + Sync {
    /// Stores bytes.
    fn park(&mut self, bytes: &[u8]) -> Result<Slot, super::CacheError>;
    /// A hint that the slots will be fetched soon.
    fn prefetch(&self, slots: &[Slot]);
    /// Reads a slot's bytes into `out`, which has their length.
    fn fetch(&self, slot: Slot, out: &mut [u8]) -> Result<(), super::CacheError>;
    /// Frees a slot.
    fn discard(&mut self, slot: Slot);
    /// Bytes in the tier now.
    fn bytes(&self) -> u64;
    /// Bytes in memory by which the tier knows its slots.
    fn bookkeeping_bytes(&self) -> u64;
}
