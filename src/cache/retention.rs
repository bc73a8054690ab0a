//! `retain`'s seam: what a stage that chooses rows is shown, and what it answers.
//!
//! Invariants: while decoding, a decision depends on the rows of its own head and on positions alone, so that any chunk
//! equals decoding, because the cache asks once per position, in order; at the compression point all heads of all layers
//! may be weighed against each other.

use super::{LayerGeometry, Needs};

/// One new row as retention sees it.
#[derive(Debug, Clone, Copy)]
pub struct NewRow<'a> {
    /// Layer index.
    pub layer: usize,
    /// KV head index.
    pub kv_head: usize,
    /// Absolute position.
    pub position: u32,
    /// The key in the form in which it is stored, before projection, `[head_dim]`.
    pub k: &'a [f32],
    /// The value, `[head_dim]`.
    pub v: &'a [f32],
    /// The layer's normalised input, `[n_embd]`; empty unless [`Needs::hidden`] asks for it.
    pub hidden: &'a [f32],
}

/// When rows are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// After a decode step.
    Step,
    /// At the compression point, after a whole context.
    CompressionPoint,
}

/// The live rows of one KV head of one layer, in order of position.
#[derive(Debug, Clone, Copy)]
pub struct LiveRows<'a> {
    /// Absolute positions, ascending.
    pub positions: &'a [u32],
    /// Scores in the same order; empty for a stage without scores.
    pub scores: &'a [f32],
    /// Positions seen by the sequence, evicted ones included.
    pub n_seen: u32,
    /// Of them, those that the layer's sliding window still reaches; all without a window.
    pub n_reached: u32,
    /// What the compression point left of the head; `None` before it.
    pub compressed: Option<LeftAtPoint>,
    /// When this is asked.
    pub moment: Moment,
}

/// What a compression point left of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeftAtPoint {
    /// Rows that it left.
    pub kept: u32,
    /// Of how many positions that the head reached.
    pub of: u32,
    /// Positions that came since.
    pub since: u32,
}

/// What a stage asks to be shown of a context before its compression point.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ContextNeeds {
    /// Exact keys and values of all tokens.
    pub rows: bool,
    /// Newest tokens whose queries it asks for.
    pub queries: usize,
    /// What a reading of the context a second time, in order to repeat it, attends to.
    pub repetition: bool,
}

impl ContextNeeds {
    /// Anything at all.
    pub fn any(self) -> bool {
        self != Self::default()
    }

    /// What either asks for.
    pub fn or(self, other: Self) -> Self {
        Self {
            rows: self.rows || other.rows,
            queries: self.queries.max(other.queries),
            repetition: self.repetition || other.repetition,
        }
    }
}

/// What the engine saw of one layer while it read a context exactly.
#[derive(Debug, Clone, Copy)]
pub struct SeenLayer<'a> {
    /// Keys before RoPE, `[token][kv_head][head_dim]`.
    pub k: &'a [f32],
    /// Values, `[token][kv_head][head_dim]`.
    pub v: &'a [f32],
    /// Queries of the newest tokens before RoPE, `[token][head][head_dim]`.
    pub q: &'a [f32],
    /// What the repetition attended to.
    pub repetition: Option<&'a Repetition>,
}

/// What a repetition of a context attended to in one layer, `[kv_head][token]`.
///
/// Source: KVzip (arXiv 2505.23416) for `attention`, KVzap (arXiv 2601.07891) for `weighted`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Repetition {
    /// The most attention that a row got from any query of the repetition, over the query heads of its group.
    pub attention: Vec<Vec<f32>>,
    /// The same with each weight times ‖W_O·v‖ of the row over the length of the query's residual stream where the layer reads it.
    pub weighted: Vec<Vec<f32>>,
}

/// One layer of a context with its geometry.
#[derive(Debug, Clone, Copy)]
pub struct ContextLayer<'a> {
    /// Layer index.
    pub layer: usize,
    /// Its geometry.
    pub geometry: &'a LayerGeometry,
    /// What was seen of it.
    pub seen: SeenLayer<'a>,
    /// Tokens of the context.
    pub n_tokens: usize,
}

/// A row leaves when it is no longer among the newest `recent`, if it scores less than `least`, or never.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Threshold {
    /// The least score that stays.
    pub least: f32,
    /// Newest rows that always live; at least one.
    pub recent: u32,
}

/// What is decided at a compression point, `[layer][kv_head]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Choice {
    /// Indices into the live rows (ascending) of those that leave.
    pub gone: Vec<Vec<Vec<usize>>>,
    /// By live row, levels of precision of K and of V, of those that leave any; empty: the format's own.
    pub levels: Vec<Vec<Vec<[u8; 2]>>>,
}

/// What rows take once they are stored.
pub trait Costs {
    /// A bound on the resident bytes of a sequence, alone in its cache, after a compression point with that choice.
    fn bytes(&self, heads: &[Vec<LiveRows<'_>>], choice: &Choice) -> u64;
    /// Bytes of a row of a head, K and V, by level of precision, the fewest bits first; of a format without
    /// levels the same at each.
    fn row_bytes(&self, layer: usize, kv_head: usize) -> Vec<[f64; 2]>;
}

/// A byte budget that the rows which always live exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// Bytes of those rows.
    pub needed_bytes: u64,
    /// Bytes allowed.
    pub budget_bytes: u64,
}

/// `retain`: which rows live, per layer and KV head.
pub trait Retention: Send + Sync {
    /// What the stage asks of the engine.
    fn needs(&self) -> Needs {
        Needs::default()
    }
    /// Whether decisions read scores; if not, none are asked for, stored or handed out.
    fn is_scored(&self) -> bool {
        true
    }
    /// The score of a new row; higher is kept longer. Called once, when the row arrives.
    fn score(&self, row: NewRow<'_>) -> f32;
    /// Scores of a context's rows, `[kv_head][token]`, in place of those that they came with; asked at the compression
    /// point of a stage whose needs name something of the context.
    fn score_context(&self, context: ContextLayer<'_>) -> Vec<Vec<f32>> {
        let _ = context;
        Vec::new()
    }
    /// Indices into `live` (ascending) of rows that leave now. Must leave at least one row unless told otherwise by a
    /// parameter.
    fn evict(&self, live: LiveRows<'_>) -> Vec<usize>;
    /// The same for all heads at the compression point, `[layer][kv_head]`.
    fn evict_context(&self, heads: &[Vec<LiveRows<'_>>]) -> Vec<Vec<Vec<usize>>> {
        let layer = |heads: &Vec<LiveRows<'_>>| heads.iter().map(|&h| self.evict(h)).collect();
        heads.iter().map(layer).collect()
    }
    /// What a compression point decides, given what rows take.
    ///
    /// # Errors
    /// A byte budget below what always lives.
    fn choose(&self, heads: &[Vec<LiveRows<'_>>], costs: &dyn Costs) -> Result<Choice, Shortage> {
        let _ = costs;
        Ok(Choice {
            gone: self.evict_context(heads),
            levels: Vec::new(),
        })
    }
    /// How it judges rows, if they do not compete: then a step needs to look at one row.
    fn threshold(&self) -> Option<Threshold> {
        None
    }
    /// Whether it chooses a level of precision for each row.
    fn chooses_levels(&self) -> bool {
        false
    }
    /// Whether a compression point alone decides, and rows that come later stay.
    fn acts_once(&self) -> bool {
        self.needs().context.any()
    }
    /// Resident bytes that a sequence may take after the compression point of a context of `n_tokens`, if bytes are its
    /// budget.
    fn budget_bytes(&self, n_tokens: u32) -> Option<u64> {
        let _ = n_tokens;
        None
    }
    /// A page of rows coded together is coded anew, from its decoded rows, once no more than this part of its stored rows
    /// lives; `None`: never.
    fn rebuild(&self) -> Option<f64> {
        None
    }
    /// Why a compression point alone can decide, if that is so.
    fn needs_point(&self) -> Option<&'static str> {
        let scores = self.needs().context.any();
        scores.then_some("it scores rows by a whole context")
    }
    /// Whether it has a budget of its own for what comes after a compression point.
    fn budgets_decoding(&self) -> bool {
        false
    }
    /// Why a context of `n_tokens` would stay whole, or its budget be broken, if that is so.
    fn nothing_to_choose(&self, n_tokens: u32) -> Option<String> {
        let _ = n_tokens;
        None
    }
    /// Whether scores of layers with a sliding window compare with those of others; where they don't, a budget that heads
    /// share leaves such layers alone.
    fn compares_windows(&self) -> bool {
        true
    }
    /// Bytes of learned weights, shared by all sequences.
    fn weight_bytes(&self) -> u64 {
        0
    }
    /// Channels of the layers' inputs that it was learned from, if it was.
    fn hidden_width(&self) -> Option<usize> {
        None
    }
    /// SHA-256 of the model that it was learned for, if it was.
    fn made_for(&self) -> Option<&str> {
        None
    }
}
