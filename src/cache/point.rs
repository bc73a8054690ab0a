//! The compression point of a context: what retention is shown, what it leaves, and the coding of what it left.
//!
//! Invariants: all heads of all layers are weighed at once, before any row leaves; pages are coded over the rows that
//! were left; scores that nothing reads any more are freed.

use rayon::prelude::*;

use super::CacheError;
use super::append::{Appender, HeadLevels};
use super::commit::commit_layer;
use super::places::Places;
use super::prices::{Prices, keeps_scores};
use super::scratch::Pool;
use super::sequence::{HeadState, Phase, SequenceState};
use super::stage::{ContextLayer, LiveRows, Moment, Retention, SeenLayer};
use super::stages::Stages;
use super::types::{Continuation, Geometry, SeqId};
use super::visibility::FOREVER;

/// Lets retention score a context's rows by what was seen of it.
pub fn show(
    stages: &Stages,
    geometry: &Geometry,
    state: &mut SequenceState,
    seen: &[SeenLayer<'_>],
) {
    let Some(retain) = stages.retain.as_deref() else {
        return;
    };
    let n_tokens = state.len as usize;
    if n_tokens == 0 {
        return;
    }
    let layers = seen.par_iter().zip(&geometry.layers).enumerate();
    let scores: Vec<Vec<Vec<f32>>> = layers
        .map(|(layer, (&seen, geometry))| {
            retain.score_context(ContextLayer {
                layer,
                geometry,
                seen,
                n_tokens,
            })
        })
        .collect();
    for (layer, scores) in state.layers.iter_mut().zip(scores) {
        for (head, scores) in layer.heads.iter_mut().zip(scores) {
            let live = head.live_positions();
            head.scores = live.iter().map(|&p| scores[p as usize]).collect();
        }
    }
}

/// What a compression point works with.
pub struct Point<'a> {
    /// The strategy.
    pub stages: &'a Stages,
    /// The model's layers.
    pub geometry: &'a Geometry,
    /// Working memory.
    pub pool: &'a Pool,
}

impl Point<'_> {
    /// Rows leave, pages are coded over the others, and the sequence goes on decoding.
    pub fn compress(
        &self,
        (seq, state): (SeqId, &mut SequenceState),
        places: &mut Places<'_>,
        continuation: Continuation,
    ) -> Result<(), CacheError> {
        if let (Phase::Context, Some(retain)) = (state.phase, self.stages.retain.as_deref()) {
            let keeps_scores = keeps_scores(retain, continuation);
            let prices = Prices {
                stages: self.stages,
                geometry: self.geometry,
                len: state.len,
                keeps_scores,
            };
            let levels = self.choose((seq, state), retain, &prices)?;
            for layer in 0..self.geometry.layers.len() {
                self.code(state, places, layer, levels.get(layer).map_or(&[], |l| l))?;
                for head in &mut state.layers[layer].heads {
                    if !keeps_scores {
                        head.scores = Vec::new();
                    }
                    // What is left of each page lies where the whole page did.
                    for table in head.tables.as_flattened() {
                        table.gather(places.store);
                    }
                }
            }
            state.pages_from = state.len;
        }
        state.phase = Phase::Decoding;
        if continuation == Continuation::Exact {
            state.frozen_from = Some(state.len);
        }
        Ok(())
    }

    /// Marks the rows that leave; levels of those that stay, `[layer][kv_head]`, if they have any.
    fn choose(
        &self,
        (seq, state): (SeqId, &mut SequenceState),
        retain: &dyn Retention,
        prices: &Prices<'_>,
    ) -> Result<Vec<Vec<HeadLevels>>, CacheError> {
        let len = state.len;
        let positions: Vec<Vec<Vec<u32>>> = state
            .layers
            .iter()
            .map(|layer| layer.heads.iter().map(HeadState::live_positions).collect())
            .collect();
        let n_reached = |layer: usize| {
            let window = self.geometry.layers[layer].window;
            len - self.stages.rules(state, (layer, window))[0].window_start(len)
        };
        let mut live: Vec<Vec<LiveRows<'_>>> = Vec::new();
        for (l, (layer, positions)) in state.layers.iter().zip(&positions).enumerate() {
            let mut heads = Vec::new();
            for (head, positions) in layer.heads.iter().zip(positions) {
                if retain.is_scored() && head.scores.len() != positions.len() {
                    return Err(CacheError::Unseen { seq: seq.0 });
                }
                heads.push(LiveRows {
                    positions,
                    scores: &head.scores,
                    n_seen: len,
                    n_reached: n_reached(l),
                    compressed: None,
                    moment: Moment::CompressionPoint,
                });
            }
            live.push(heads);
        }
        let reached: Vec<u32> = (0..live.len()).map(n_reached).collect();
        let chosen = retain.choose(&live, prices);
        let choice = chosen.map_err(|short| CacheError::TooFewBytes {
            seq: seq.0,
            needed_bytes: short.needed_bytes,
            budget_bytes: short.budget_bytes,
        })?;
        let of_head = |(positions, levels): (&Vec<u32>, &Vec<[u8; 2]>)| -> HeadLevels {
            positions
                .iter()
                .copied()
                .zip(levels.iter().copied())
                .collect()
        };
        let layers = positions.iter().zip(&choice.levels);
        let levels = layers
            .map(|(positions, levels)| positions.iter().zip(levels).map(of_head).collect())
            .collect();
        for (l, (layer, gone)) in state.layers.iter_mut().zip(choice.gone).enumerate() {
            for (h, (head, gone)) in layer.heads.iter_mut().zip(gone).enumerate() {
                let positions = &positions[l][h];
                let n_left = (positions.len() - gone.len()) as u32;
                // An empty context says nothing about shares.
                head.compressed = (reached[l] > 0).then_some((n_left, reached[l]));
                head.dying
                    .extend(gone.into_iter().map(|i| (positions[i], len)));
            }
        }
        Ok(levels)
    }

    /// Drops a layer's rows that leave and codes pages over those that stay.
    fn code(
        &self,
        state: &mut SequenceState,
        places: &mut Places<'_>,
        layer: usize,
        levels: &[HeadLevels],
    ) -> Result<(), CacheError> {
        let geometry = &self.geometry.layers[layer];
        let place = (layer, geometry.window);
        let len = state.len;
        commit_layer(self.stages, state, places, place)?;
        state.pages_from = len;
        let appender = Appender {
            stages: self.stages,
            geometry,
            layer,
            rules: self.stages.rules(state, place),
            levels,
            pool: self.pool,
        };
        appender.code(state, places, len, None, None)?;
        commit_layer(self.stages, state, places, place)?;
        state.pages_from = FOREVER;
        Ok(())
    }
}
