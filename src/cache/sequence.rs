//! The state of one sequence in a [`super::pipeline::StagedCache`]: per layer and KV head, its row tables.
//!
//! Invariants: rows below a side's `coded_end` are coded unless they are sinks, frozen or gone; K and V of a row live and
//! leave together; a head's scores lie beside its live rows in order of position; `earliest` is the shortest length that
//! truncation can still reach.

use super::places::Places;
use super::stage::Side;
use super::table::RowTable;
use super::visibility::{Class, Dying};

/// One KV head's rows.
#[derive(Debug, Default)]
pub struct HeadState {
    /// Tables by [`Side`] and [`Class`].
    pub tables: [[RowTable; 3]; 2],
    /// Retention scores of live rows in order of position; empty if the strategy's retention has none.
    pub scores: Vec<f32>,
    /// Rows that a compression point left, of how many that it could have; `None` before it, and after an empty context.
    pub compressed: Option<(u32, u32)>,
    /// Rows that leave at the next commit.
    pub dying: Dying,
    /// Rows seen.
    pub n_seen: u32,
}

impl HeadState {
    /// Live positions, ascending.
    pub fn live_positions(&self) -> Vec<u32> {
        let mut all: Vec<u32> = self.tables[Side::K as usize]
            .iter()
            .flat_map(|t| t.pages().iter().flat_map(|p| p.positions()))
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// A copy that shares every page.
    pub fn fork(&self, places: &mut Places<'_>) -> Self {
        Self {
            tables: [0, 1].map(|s| [0, 1, 2].map(|c| self.tables[s][c].fork(places))),
            scores: self.scores.clone(),
            compressed: self.compressed,
            dying: self.dying.clone(),
            n_seen: self.n_seen,
        }
    }

    /// The table of one side and class.
    pub fn table(&mut self, side: Side, class: Class) -> &mut RowTable {
        &mut self.tables[side as usize][class as usize]
    }
}

/// One layer's heads.
#[derive(Debug, Default)]
pub struct LayerState {
    /// By KV head.
    pub heads: Vec<HeadState>,
    /// By side: rows below this were offered to the codec.
    pub coded_end: [u32; 2],
}

/// When retention acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// A context that waits for its compression point.
    Context,
    /// Every step.
    Decoding,
}

/// One sequence.
#[derive(Debug)]
pub struct SequenceState {
    /// Positions seen (committed or being appended).
    pub len: u32,
    /// When retention acts.
    pub phase: Phase,
    /// Queries before this see no page-wise page coded: see [`super::visibility::Rules::not_before`].
    pub pages_from: u32,
    /// First position of an exact continuation.
    pub frozen_from: Option<u32>,
    /// Shortest length that truncation can reach, ageing apart.
    pub earliest: u32,
    /// An append failed half-way.
    pub broken: bool,
    /// By layer.
    pub layers: Vec<LayerState>,
}

impl SequenceState {
    /// An empty sequence for `n_kv_heads` heads per layer.
    pub fn new(phase: Phase, n_kv_heads: impl Iterator<Item = usize>) -> Self {
        let layers = n_kv_heads
            .map(|n| LayerState {
                heads: (0..n).map(|_| HeadState::default()).collect(),
                coded_end: [0; 2],
            })
            .collect();
        Self {
            len: 0,
            phase,
            pages_from: 0,
            frozen_from: None,
            earliest: 0,
            broken: false,
            layers,
        }
    }

    /// A copy that shares every page.
    pub fn fork(&self, places: &mut Places<'_>) -> Self {
        let layers = self
            .layers
            .iter()
            .map(|l| LayerState {
                heads: l.heads.iter().map(|h| h.fork(places)).collect(),
                coded_end: l.coded_end,
            })
            .collect();
        Self {
            len: self.len,
            phase: self.phase,
            pages_from: self.pages_from,
            frozen_from: self.frozen_from,
            earliest: self.earliest,
            broken: self.broken,
            layers,
        }
    }

    /// Every head of every layer.
    pub fn heads_mut(&mut self) -> impl Iterator<Item = &mut HeadState> {
        self.layers.iter_mut().flat_map(|l| l.heads.iter_mut())
    }
}
