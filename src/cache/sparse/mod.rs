//! Decoded tokens that do not read all that is stored as it is: chosen blocks ([`blocks`]), or exact copies of the most
//! attended rows ([`refetch`]).
//!
//! Invariants: a context that waits for its compression point is read whole; while a sequence decodes, the tokens of a step
//! attend one by one; nothing here changes what is stored, only what is read of it.

pub mod blocks;
mod rank;
pub mod refetch;
mod step;
pub mod vault;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::CacheError;
use super::formats::Mask;
use super::places::Places;
use super::project::aqua;
use super::sequence::{Phase, SequenceState};
use super::stage::Side;
use super::strategy::Strategy;
use super::table::RowTable;
use super::types::{Geometry, LayerGeometry, SeqId, Span, Traffic, Trial};
use super::visibility::Class;
use refetch::When;
use vault::Vault;

/// How decoded tokens read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reading {
    /// Some blocks.
    Blocks(blocks::Plan),
    /// All coded rows, the most attended ones exact.
    Refetch(refetch::Plan),
}

/// What one KV head's token reads.
#[derive(Debug, Clone, Copy, Default)]
pub enum HeadReading<'a> {
    /// All.
    #[default]
    All,
    /// By range, these rows; all where there is nothing.
    Chosen(&'a [Mask]),
    /// All, these in place of the coded ones.
    Fetched(&'a [RowTable; 2]),
}

/// Tells time.
pub type Timer = Arc<dyn Fn() -> Duration + Send + Sync>;

/// Whether a token's own queries are ranked, to be held against what was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Watch {
    /// They are not: this takes time.
    #[default]
    Nothing,
    /// They are.
    Hits,
}

/// The part of a cache that chooses what is read.
pub struct Sparse {
    reading: Reading,
    vault: Option<Vault>,
    sequences: BTreeMap<SeqId, State>,
    timer: Option<Timer>,
    watch: Watch,
    traffic: Traffic,
    /// The most bytes that came back at a time, of what is let go at once.
    peak_bytes: u64,
    /// The most bytes that ranking rows has taken.
    rank_bytes: u64,
}

/// One sequence's.
#[derive(Debug)]
pub enum State {
    /// By layer and KV head.
    Blocks(Vec<Vec<blocks::Head>>),
    /// By layer.
    Refetch {
        /// Rows.
        layers: Vec<refetch::Layer>,
        /// What the model expects after the next token.
        guess: Option<u32>,
    },
}

impl HeadReading<'_> {
    /// The rows of a range of one class that are read.
    pub fn mask(self, side: Side, class: Class, range: u32) -> Mask {
        match self {
            HeadReading::All => Mask::MAX,
            HeadReading::Chosen([]) => Mask::MAX,
            HeadReading::Chosen(ranges) => ranges.get(range as usize).copied().unwrap_or(0),
            HeadReading::Fetched(tables) if class == Class::Coded => !tables[side as usize]
                .page(range)
                .map_or(0, |page| page.live()),
            HeadReading::Fetched(_) => Mask::MAX,
        }
    }
}

impl State {
    fn new(reading: &Reading, geometry: &Geometry) -> Self {
        let layers = geometry.layers.iter();
        match reading {
            Reading::Blocks(_) => State::Blocks(
                layers
                    .map(|l| vec![blocks::Head::default(); l.n_kv_heads])
                    .collect(),
            ),
            Reading::Refetch(_) => State::Refetch {
                layers: layers
                    .map(|l| {
                        let mut layer = refetch::Layer::default();
                        layer.heads.resize_with(l.n_kv_heads, Default::default);
                        layer
                    })
                    .collect(),
                guess: None,
            },
        }
    }

    /// What a head's token reads.
    pub fn head(&self, layer: usize, head: usize) -> HeadReading<'_> {
        match self {
            State::Blocks(layers) => HeadReading::Chosen(&layers[layer][head].chosen),
            State::Refetch { layers, .. } => {
                HeadReading::Fetched(&layers[layer].heads[head].fetched)
            }
        }
    }

    /// Tables of rows that came back.
    pub fn tables(&self) -> impl Iterator<Item = (usize, usize, &[RowTable; 2])> {
        let layers = match self {
            State::Blocks(_) => &[][..],
            State::Refetch { layers, .. } => layers,
        };
        let layers = layers.iter().enumerate();
        layers.flat_map(|(l, layer)| {
            let heads = layer.heads.iter().enumerate();
            heads.map(move |(h, head)| (l, h, &head.fetched))
        })
    }

    fn bytes(&self) -> u64 {
        match self {
            State::Blocks(layers) => layers.iter().flatten().map(blocks::Head::bytes).sum(),
            State::Refetch { layers, .. } => layers.iter().map(refetch::Layer::bytes).sum(),
        }
    }
}

impl Sparse {
    /// Opens what the reading needs.
    ///
    /// # Errors
    /// A tier that can't be opened.
    pub fn open(reading: &Reading) -> Result<Self, CacheError> {
        let vault = match reading {
            Reading::Blocks(_) => None,
            Reading::Refetch(plan) => Some(Vault::open(&plan.home)?),
        };
        Ok(Self {
            reading: reading.clone(),
            vault,
            sequences: BTreeMap::new(),
            timer: None,
            watch: Watch::Nothing,
            traffic: Traffic::default(),
            peak_bytes: 0,
            rank_bytes: 0,
        })
    }

    /// Times what is waited for; or doesn't.
    pub fn time_by(&mut self, timer: Option<Timer>) {
        self.timer = timer;
    }

    /// Starts over counting.
    pub fn watch(&mut self, watch: Watch) {
        self.watch = watch;
        self.traffic = Traffic::default();
    }

    /// What was counted.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Most tokens of a decoding sequence's step: what comes back for one follows from those before it.
    pub fn step_limit(&self, asked: usize) -> usize {
        match self.reading {
            Reading::Blocks(_) => asked,
            Reading::Refetch(_) => 1,
        }
    }

    /// Whether rows leave exact copies when they are coded.
    pub fn keeps(&self) -> bool {
        self.vault.is_some()
    }

    /// Starts a sequence.
    pub fn admit(&mut self, seq: SeqId, geometry: &Geometry) {
        self.sequences
            .insert(seq, State::new(&self.reading, geometry));
    }

    /// One sequence's state, taken out while it is worked on.
    pub fn take(&mut self, seq: SeqId) -> Option<State> {
        self.sequences.remove(&seq)
    }

    /// Puts it back.
    pub fn put(&mut self, seq: SeqId, state: State) {
        self.sequences.insert(seq, state);
    }

    /// All sequences.
    pub fn states(&self) -> impl Iterator<Item = &State> {
        self.sequences.values()
    }

    /// What is to be tried out beside a sequence's next token.
    pub fn trial(&self, seq: SeqId, state: &SequenceState, n_positions: usize) -> Trial {
        let Some(State::Refetch { layers, guess }) = self.sequences.get(&seq) else {
            return Trial::Nothing;
        };
        let speculates =
            matches!(&self.reading, Reading::Refetch(p) if p.when == When::Speculative);
        let has_rows = layers.iter().any(refetch::Layer::has_rows);
        if !speculates || state.phase != Phase::Decoding || !has_rows {
            return Trial::Nothing;
        }
        match guess {
            None => Trial::Next,
            Some(token) if (state.len as usize) + 1 < n_positions => Trial::Token(*token),
            Some(_) => Trial::Nothing,
        }
    }

    /// What the model expects after the token that was tried out.
    pub fn expect(&mut self, seq: SeqId, token: u32) {
        if let Some(State::Refetch { guess, .. }) = self.sequences.get_mut(&seq) {
            *guess = Some(token);
        }
    }

    /// Takes in new rows: their keys before RoPE, `[token][kv_head][head_dim]`.
    pub fn take_in(&mut self, (layer, g): (usize, &LayerGeometry), span: &Span, keys: &[f32]) {
        let (Some(State::Blocks(layers)), Reading::Blocks(plan)) =
            (self.sequences.get_mut(&span.seq), &self.reading)
        else {
            return;
        };
        if !plan.acts_in(layer) {
            return;
        }
        let d = g.head_dim;
        let mut key = vec![0.0; d];
        for (row, p) in keys
            .chunks_exact(g.n_kv_heads * d)
            .zip(span.positions.clone())
        {
            for (head, own) in layers[layer].iter_mut().zip(row.chunks_exact(d)) {
                key.copy_from_slice(own);
                g.rope.rotate(p, &mut key);
                head.take_in(*plan, p, &key, d);
            }
        }
    }

    /// Keeps exact copies of rows that are coded: `rows`, back to back, of one side of one KV head.
    ///
    /// # Errors
    /// What the tier says.
    pub fn keep(
        &mut self,
        seq: SeqId,
        (layer, head, side): (usize, usize, Side),
        (positions, bytes): (&[u32], &[u8]),
    ) -> Result<(), CacheError> {
        let (Some(State::Refetch { layers, .. }), Some(vault)) =
            (self.sequences.get_mut(&seq), &self.vault)
        else {
            return Ok(());
        };
        let row_bytes = bytes.len() / positions.len().max(1);
        layers[layer].heads[head].keep(vault, (side, positions), row_bytes, bytes)
    }

    /// The first length from `len` on, up to `old`, that a sequence of `old` rows can go back to.
    pub fn reachable(&self, seq: SeqId, (old, len): (u32, u32)) -> u32 {
        match (self.sequences.get(&seq), &self.reading) {
            // Bounds do not say what they were before a row.
            (_, Reading::Blocks(plan)) => len.next_multiple_of(plan.page as u32).min(old),
            // What was asked for follows from all tokens so far.
            (Some(State::Refetch { layers, guess }), _)
                if guess.is_some() || layers.iter().any(refetch::Layer::is_used) =>
            {
                old
            }
            _ => len,
        }
    }

    /// Goes back to `len` rows, a length that is reachable.
    pub fn truncate(&mut self, seq: SeqId, len: u32, geometry: &Geometry) {
        match (self.sequences.get_mut(&seq), &self.reading) {
            (Some(State::Blocks(layers)), Reading::Blocks(plan)) => {
                for (heads, g) in layers.iter_mut().zip(&geometry.layers) {
                    for head in heads {
                        head.truncate(*plan, len, g.head_dim);
                    }
                }
            }
            (Some(State::Refetch { layers, .. }), _) => {
                layers.iter_mut().for_each(|layer| layer.truncate(len));
            }
            _ => {}
        }
    }

    /// Lets go of what was kept for rows that have left. `live`: by layer, KV head and range, the rows that live.
    pub fn forget(
        &mut self,
        seq: SeqId,
        geometry: &Geometry,
        live: impl Fn([usize; 2], u32) -> Mask,
    ) {
        match (self.sequences.get_mut(&seq), &self.reading) {
            (Some(State::Blocks(layers)), Reading::Blocks(plan)) => {
                for (l, (heads, g)) in layers.iter_mut().zip(&geometry.layers).enumerate() {
                    for (h, head) in heads.iter_mut().enumerate() {
                        head.forget(*plan, |range| live([l, h], range), g.head_dim);
                    }
                }
            }
            (Some(State::Refetch { layers, .. }), _) => {
                for (l, layer) in layers.iter_mut().enumerate() {
                    layer.forget(|h, range| live([l, h], range));
                }
            }
            _ => {}
        }
    }

    /// A copy of a sequence that shares blocks and pages.
    ///
    /// # Errors
    /// Rows on their way that do not come.
    pub fn fork(
        &mut self,
        (from, to): (SeqId, SeqId),
        places: &mut Places<'_>,
        records: &[usize],
    ) -> Result<(), CacheError> {
        let copy = match self.sequences.get_mut(&from) {
            None => return Ok(()),
            Some(State::Blocks(layers)) => State::Blocks(layers.clone()),
            Some(State::Refetch { layers, guess }) => {
                for (layer, &record_bytes) in layers.iter_mut().zip(records) {
                    layer.wait(record_bytes)?;
                }
                State::Refetch {
                    layers: layers.iter().map(|l| l.fork(places)).collect(),
                    guess: *guess,
                }
            }
        };
        self.sequences.insert(to, copy);
        Ok(())
    }

    /// Frees a sequence's.
    pub fn release(&mut self, seq: SeqId, places: &mut Places<'_>) {
        if let Some(State::Refetch { mut layers, .. }) = self.sequences.remove(&seq) {
            layers.iter_mut().for_each(|layer| layer.clear(places));
        }
    }

    /// Bytes in the vault.
    pub fn backing_bytes(&self) -> u64 {
        self.vault.as_ref().map_or(0, Vault::bytes)
    }

    /// Bytes of bounds, choices and tables.
    pub fn index_bytes(&self) -> u64 {
        self.sequences.values().map(State::bytes).sum()
    }

    /// Working memory: the most bytes that came back at a time, where they are let go at once, and that ranking has taken.
    pub fn peak_bytes(&self) -> u64 {
        self.peak_bytes + self.rank_bytes
    }
}

/// Why a strategy's tokens can't choose what they read, if they can't.
pub fn refusal(strategy: &Strategy) -> Option<String> {
    if aqua::of(strategy).is_some() {
        return Some(format!(
            "chooses among stored rows, and `{}` stores what is left of them after a prediction: leave one of the two out",
            aqua::DEF.name
        ));
    }
    if strategy.budget.is_some() {
        return Some(
            "chooses what is read, and `budget` counts what is stored: leave one of the two out"
                .to_owned(),
        );
    }
    None
}

#[cfg(test)]
mod tests;
