//! The words that the engine and a cache share: sequences, batches, rows, geometry, memory.
//!
//! Invariants: a position is absolute in its sequence and is never the cache's length; rows of one [`Span`] have
//! consecutive positions; batches are ragged and never padded.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::rope::Rope;

/// Names one sequence (one user, one document, one fork) in a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u32);

/// Consecutive new tokens of one sequence within a [`Batch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The sequence.
    pub seq: SeqId,
    /// Absolute positions of the tokens.
    pub positions: Range<u32>,
    /// Row of the span's first token in the batch's buffers.
    pub first_row: usize,
    /// Tokens at its end that are tried out: they attend like any other, and are gone when the step ends.
    pub n_tried: usize,
}

impl Span {
    /// Number of tokens.
    pub fn n_tokens(&self) -> usize {
        self.positions.len()
    }

    /// The sequence's length after the step.
    pub fn end(&self) -> u32 {
        self.positions.end - self.n_tried as u32
    }
}

/// One engine step: a ragged set of spans, at most one per sequence, rows back to back.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Batch {
    spans: Vec<Span>,
    n_rows: usize,
}

impl Batch {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// A batch of one span.
    pub fn single(seq: SeqId, positions: Range<u32>) -> Self {
        let mut batch = Self::new();
        batch.push(seq, positions);
        batch
    }

    /// Adds a span after the rows that are there.
    pub fn push(&mut self, seq: SeqId, positions: Range<u32>) {
        self.push_with(seq, positions, 0);
    }

    /// Adds a span whose last `n_tried` tokens are tried out.
    pub fn push_with(&mut self, seq: SeqId, positions: Range<u32>, n_tried: usize) {
        let n = positions.len();
        self.spans.push(Span {
            seq,
            positions,
            first_row: self.n_rows,
            n_tried,
        });
        self.n_rows += n;
    }

    /// The spans, in order of their rows.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Rows in all spans together.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }
}

/// The new rows of one layer, before RoPE.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// Keys before RoPE, `[row][kv_head][head_dim]`.
    pub k: &'a [f32],
    /// Values, `[row][kv_head][head_dim]`.
    pub v: &'a [f32],
    /// The layer's normalised input, `[row][n_embd]`; empty unless [`super::Needs::hidden`] asks for it.
    pub hidden: &'a [f32],
    /// Length of each row's residual stream where the layer reads it, before any norm, `[row]`; empty unless hidden rows
    /// are asked for.
    pub residual_norms: &'a [f32],
}

/// What a cache must know of one attention layer.
#[derive(Debug, Clone)]
pub struct LayerGeometry {
    /// Query heads.
    pub n_heads: usize,
    /// Key/value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Channels of one head.
    pub head_dim: usize,
    /// Factor on q·k before the softmax, usually 1/√head_dim.
    pub scale: f32,
    /// The layer's rotary embedding (layers with equal settings share one table).
    pub rope: Arc<Rope>,
    /// Sliding window: a query at p sees positions greater than p − window.
    pub window: Option<u32>,
}

impl LayerGeometry {
    /// Query heads that share one key/value head.
    pub fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }
}

/// All attention layers of a model.
#[derive(Debug, Clone)]
pub struct Geometry {
    /// One entry per layer.
    pub layers: Vec<LayerGeometry>,
}

impl Geometry {
    /// Scalars of K and V together that one token adds over all layers.
    pub fn scalars_per_token(&self) -> usize {
        self.layers
            .iter()
            .map(|l| 2 * l.n_kv_heads * l.head_dim)
            .sum()
    }
}

/// How a sequence starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Every step is a decode step: retention acts at each commit.
    Streaming,
    /// A context that is compressed once: retention waits for [`super::KvCache::compress`].
    Context,
}

/// What becomes of rows that are appended after the compression point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Continuation {
    /// They go through the same strategy.
    Strategy,
    /// They stay f32 and are never evicted; nothing ages any more.
    Exact,
}

/// What a cache wants tried out beside a sequence's next token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trial {
    /// Nothing.
    Nothing,
    /// That next token itself, alone and before its own step: nothing was tried out yet.
    Next,
    /// This token, after the next one.
    Token(u32),
}

/// What decoded tokens read and what was moved for them, summed over steps, layers and KV heads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Traffic {
    /// Decoded tokens.
    pub n_steps: u64,
    /// Bytes that attention reads: rows, their scales, and what rows are chosen by.
    pub read_bytes: u64,
    /// Bytes that the attention of tokens reads that are only tried out.
    #[serde(default)]
    pub tried_bytes: u64,
    /// Bytes of keys that are read once more to rank rows by.
    #[serde(default)]
    pub ranking_bytes: u64,
    /// Bytes of all rows that could be read.
    pub readable_bytes: u64,
    /// Bytes that came out of a tier, those read along with them included.
    pub moved_bytes: u64,
    /// Reads of the tier.
    pub n_reads: u64,
    /// Of these, reads through the system's page cache, where the file system allows no others.
    pub n_cached_reads: u64,
    /// Rows that the tokens' own queries rank first, where that was watched.
    pub rows_wanted: u64,
    /// Of these, rows that were there.
    pub rows_hit: u64,
    /// Time spent waiting for rows, ns; of a tier alone.
    pub stall_ns: u64,
}

/// Pages of rows coded together that were coded anew from their decoded rows, after others of their rows had left, and
/// what that changed in the rows that live, in the channels in which they are coded; K and V together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rebuilt {
    /// Pages; one that was coded anew twice counts twice.
    pub n_pages: u64,
    /// Σ (x − y)² over the numbers x that such a page's rows decoded to before and y after.
    pub error_squares: f64,
    /// Σ x².
    pub squares: f64,
}

impl Rebuilt {
    /// Whether no page was coded anew.
    pub fn is_nothing(&self) -> bool {
        self.n_pages == 0
    }

    /// Takes in what `n` others like `more` did.
    pub fn add(&mut self, more: &Self, n: u64) {
        self.n_pages += n * more.n_pages;
        self.error_squares += n as f64 * more.error_squares;
        self.squares += n as f64 * more.squares;
    }

    /// Root mean square of the changes over that of the rows, as a fraction; `None` where nothing was coded anew.
    pub fn relative_error(&self) -> Option<f64> {
        // Rows of zeros decode to zeros again.
        let square = self.error_squares / self.squares.max(f64::MIN_POSITIVE);
        (!self.is_nothing()).then(|| square.sqrt())
    }
}

/// Bytes by part, summed from live buffers. All in bytes unless the name says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Codes of compressed rows (packed pages: the packed bytes).
    pub payload_bytes: u64,
    /// Scales, zero points and norms that travel with the codes.
    pub scale_bytes: u64,
    /// Live bitmaps, retention scores and positions.
    pub index_bytes: u64,
    /// Page tables and the store's own bookkeeping.
    pub page_table_bytes: u64,
    /// Codebooks and other tables shared by all sequences.
    pub table_bytes: u64,
    /// Projection weights, shared by all sequences.
    pub projection_bytes: u64,
    /// Rows kept exact: sinks, tail, an exact continuation.
    pub exact_bytes: u64,
    /// Allocated and unused room of pages.
    pub slack_bytes: u64,
    /// Working memory that attention has needed, of one thread. The one number here that depends on the chunk: on how
    /// many queries go at once.
    pub scratch_bytes: u64,
    /// Bytes parked in a backing tier (not part of [`MemoryReport::resident_bytes`]).
    pub backing_bytes: u64,
    /// Rows that can still be attended, summed over layers and KV heads.
    pub rows_live: u64,
    /// Coded rows by level of precision, the most bits first, summed over layers and KV heads; one level without a budget.
    #[serde(default)]
    pub rows_at_level: [u64; 4],
    /// Rows ever appended and not truncated, summed over layers and KV heads.
    pub rows_seen: u64,
    /// Pages that were coded anew, over the sequences that live; a fork has those of what it was made of too.
    #[serde(default, skip_serializing_if = "Rebuilt::is_nothing")]
    pub rebuilt: Rebuilt,
}

impl MemoryReport {
    /// The cache's bytes in memory: everything but scratch and the backing tier.
    pub fn resident_bytes(&self) -> u64 {
        self.payload_bytes
            + self.scale_bytes
            + self.index_bytes
            + self.page_table_bytes
            + self.table_bytes
            + self.projection_bytes
            + self.exact_bytes
            + self.slack_bytes
    }

    /// Resident and parked bytes together.
    pub fn stored_bytes(&self) -> u64 {
        self.resident_bytes() + self.backing_bytes
    }
}
