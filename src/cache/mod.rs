//! The KV cache: what the engine sees ([`KvCache`]) and how strategies plug into it ([`stage`]).
//!
//! Invariants: `attend` reads what is stored, never a dense copy kept beside it; the order of summation is tied to
//! positions (fixed ranges of [`RANGE`] positions, merged in order), so results do not depend on paging, chunks, batch
//! or threads; bytes are summed from live buffers.
//!
//! # Glossary
//! *row*: K or V of one token in one KV head of one layer. *page*: the rows of one range of 128 positions. *tail*: the
//! newest rows, kept exact. *sink*: one of the first rows, kept exact. *seal*: a page's range is past and all its rows
//! are coded. *commit*: the end of an engine step, when rows may leave. *compression point*: the one moment at which a
//! context is compressed in the `compress-once` protocol.

mod append;
mod arrival;
mod attention;
mod budget;
mod builder;
mod chain;
mod coded;
mod commit;
pub mod encode;
mod formats;
mod head_view;
pub mod inspect;
mod memory;
pub mod pack;
mod paged;
pub mod pages;
mod params;
pub mod pipeline;
pub mod place;
mod places;
mod point;
mod predict;
mod prices;
pub mod project;
mod rebuild;
pub mod retain;
pub mod retention;
pub mod rope;
pub mod rotation;
mod runs;
mod scratch;
mod seen;
mod sequence;
mod spans;
pub mod sparse;
pub mod stage;
pub mod stages;
mod stored;
pub mod strategy;
mod table;
mod token;
pub mod types;
mod visibility;

pub use budget::least_budget;
pub use pipeline::StagedCache;
pub use predict::Shelf;
pub use prices::least_retained;
pub use retention::{ContextNeeds, Repetition, SeenLayer};
pub use stages::{Built, Materials};
pub use types::{
    Admission, Batch, Continuation, Geometry, LayerGeometry, MemoryReport, Rebuilt, Rows, SeqId,
    Span, Traffic, Trial,
};

/// Positions per range of softmax partials, and per page.
pub const RANGE: usize = 128;

/// What can go wrong inside a cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The sequence was never admitted, or was released.
    #[error("sequence {0} is not in the cache: admit it first")]
    UnknownSequence(u32),
    /// The sequence exists already.
    #[error("sequence {0} is in the cache already: release it first or take another id")]
    SequenceExists(u32),
    /// An append failed half-way: some layers hold rows that others lack.
    #[error("sequence {0} broke in an earlier step and can't go on: release it")]
    Broken(u32),
    /// Rows must follow each other.
    #[error("sequence {seq}: rows start at position {got}, the next one is {expected}")]
    Gap {
        /// The sequence.
        seq: u32,
        /// The position that comes next.
        expected: u32,
        /// The position that came.
        got: u32,
    },
    /// NaN or infinity in a new row.
    #[error(
        "non-finite {side} at layer {layer}, KV head {head}, position {position}: the model or an earlier layer's cache broke down"
    )]
    NonFinite {
        /// "K" or "V".
        side: &'static str,
        /// Layer index.
        layer: usize,
        /// KV head index.
        head: usize,
        /// Absolute position.
        position: u32,
    },
    /// A buffer has another size than the geometry asks for.
    #[error("{what}: {got} values, the geometry asks for {expected}")]
    Shape {
        /// Which buffer.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The length asked for.
        expected: usize,
    },
    /// The layers' inputs have other channels than those that retention was learned from.
    #[error(
        "layer {layer}: its inputs have {got} channels, the strategy's gate was trained on inputs of {expected}: train one for this model (kvlab train), or take file = \"random\""
    )]
    HiddenWidth {
        /// Layer index.
        layer: usize,
        /// Channels that came.
        got: usize,
        /// Channels that it was learned from.
        expected: usize,
    },
    /// The compression point came before what retention scores by.
    #[error(
        "sequence {seq}: the strategy's retention scores rows by what was seen of the context, and nothing was shown: call `show` before `compress`"
    )]
    Unseen {
        /// The sequence.
        seq: u32,
    },
    /// Truncation past something that can't be undone.
    #[error(
        "sequence {seq} can't go back to length {asked}: rows after it caused something irreversible; the earliest reachable length is {earliest} (take a fork as a checkpoint)"
    )]
    Irreversible {
        /// The sequence.
        seq: u32,
        /// The length asked for.
        asked: u32,
        /// The earliest length that can be reached.
        earliest: u32,
    },
    /// The context is longer than the rotation tables.
    #[error("position {position} lies past the model's context of {limit} positions")]
    ContextLimit {
        /// The position asked for.
        position: u32,
        /// Positions available.
        limit: usize,
    },
    /// The backing tier failed.
    #[error("backing file: {0}")]
    Backing(#[from] std::io::Error),
    /// A packed page did not unpack to what was packed.
    #[error("packed page: {0}")]
    Pack(String),
    /// The budget is used up: every page stands at the lowest precision already.
    #[error(
        "sequence {seq}: position {position} needs {needed_bytes} bytes with every page at the lowest precision, the budget is {budget_bytes}: raise it, or add a format of fewer bits to `budget.then`"
    )]
    OverBudget {
        /// The sequence, the first in order of those that share the budget.
        seq: u32,
        /// The position that can't be taken in.
        position: u32,
        /// Bytes with that position.
        needed_bytes: u64,
        /// Bytes allowed.
        budget_bytes: u64,
    },
    /// Rows that always live exceed the retention's byte budget.
    #[error(
        "sequence {seq}: the rows that always live take {needed_bytes} bytes, retention's budget is {budget_bytes}: raise `bytes` (`bytes_per_token`), or protect fewer rows"
    )]
    TooFewBytes {
        /// The sequence.
        seq: u32,
        /// Bytes of the rows that always live.
        needed_bytes: u64,
        /// Bytes allowed.
        budget_bytes: u64,
    },
    /// Building a strategy's stages failed.
    #[error(transparent)]
    Stage(#[from] stage::StageError),
}

/// What a strategy asks of the engine beyond K and V.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Needs {
    /// The layer's normalised input with each row.
    pub hidden: bool,
    /// Covariances of K and V over a calibration text, before work starts.
    pub calibration: bool,
    /// What must be seen of a context before its compression point.
    pub context: ContextNeeds,
    /// Largest number of tokens of a sequence in one step that still equals decoding; `None`: any.
    pub max_chunk: Option<usize>,
}

/// A key/value cache as the engine sees it.
///
/// Per step the engine calls, for each layer in order, `append` and `attend`, and after the last layer `commit`.
pub trait KvCache: Send {
    /// What the cache asks of the engine.
    fn needs(&self) -> Needs;
    /// Most tokens, up to `asked`, that the sequence's next step may bring and still equal decoding them one by one.
    fn step_limit(&self, seq: SeqId, asked: usize) -> usize {
        let _ = seq;
        self.needs().max_chunk.unwrap_or(asked).min(asked).max(1)
    }
    /// Starts an empty sequence.
    fn admit(&mut self, seq: SeqId, admission: Admission) -> Result<(), CacheError>;
    /// Stores the new rows of one layer. `rows.k`, `rows.v`: `[row][kv_head][head_dim]`, before RoPE.
    fn append(&mut self, layer: usize, batch: &Batch, rows: Rows<'_>) -> Result<(), CacheError>;
    /// softmax(scale · q·Kᵀ + mask)·V over what is stored, each query as if it had been decoded alone.
    /// `q`, `out`: `[row][head][head_dim]`, q before RoPE.
    fn attend(
        &mut self,
        layer: usize,
        batch: &Batch,
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), CacheError>;
    /// Ends the step: rows that no later query may see leave, pages seal, pack and move.
    fn commit(&mut self, batch: &Batch) -> Result<(), CacheError>;
    /// Shows what was seen of a context, `[layer]`, whose compression point comes next; nothing to a cache whose needs name
    /// nothing of the context.
    fn show(&mut self, seq: SeqId, seen: &[SeenLayer<'_>]) -> Result<(), CacheError> {
        let _ = (seq, seen);
        Ok(())
    }
    /// The compression point of a sequence admitted as [`Admission::Context`].
    fn compress(&mut self, seq: SeqId, continuation: Continuation) -> Result<(), CacheError>;
    /// Makes `to` a copy of `from`; pages are shared until one of the two writes to them.
    fn fork(&mut self, from: SeqId, to: SeqId) -> Result<(), CacheError>;
    /// Goes back to `len` positions, bit-equal to never having appended the rest, or says how far back is possible.
    fn truncate(&mut self, seq: SeqId, len: u32) -> Result<(), CacheError>;
    /// Frees a sequence.
    fn release(&mut self, seq: SeqId) -> Result<(), CacheError>;
    /// What the cache wants tried out beside a sequence's next token, so as to know ahead what the one after it asks for.
    fn trial(&self, seq: SeqId) -> Trial {
        let _ = seq;
        Trial::Nothing
    }
    /// What the model expects after the token that was tried out.
    fn expect(&mut self, seq: SeqId, token: u32) {
        let _ = (seq, token);
    }
    /// Positions seen by a sequence.
    fn len(&self, seq: SeqId) -> Result<u32, CacheError>;
    /// Bytes by part over all sequences.
    fn memory(&self) -> MemoryReport;
}
