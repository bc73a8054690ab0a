//! The reconstruction of a sequence's coded rows, one layer at a time, carried from layer to layer during a step.
//!
//! Invariants: it holds what decoding each row alone would give, whatever the chunk; it is begun anew in each step, so
//! that nothing stays of rows that were cut off; sinks are never coded, and stand as zeros.
//!
//! ```text
//! rows (K, then V)    layer 0          layer 1          layer 2
//! predict             mean             A₁·K̂₀            A₂·K̂₁
//! restore             + decoded = K̂₀   + decoded = K̂₁   + decoded = K̂₂
//! ```

use std::collections::BTreeMap;
use std::convert::Infallible;

use super::gather;
use crate::cache::places::Reader;
use crate::cache::scratch::{Pool, room};
use crate::cache::sequence::SequenceState;
use crate::cache::stage::Side;
use crate::cache::stages::Stages;
use crate::cache::types::SeqId;
use crate::cache::visibility::Class;
use crate::cache::{CacheError, RANGE};
use crate::compute::cpu::team;

/// What a reconstruction reads.
#[derive(Clone, Copy)]
pub struct Walk<'a> {
    /// The strategy, which has predictors.
    pub stages: &'a Stages,
    /// The sequence.
    pub state: &'a SequenceState,
    /// Page access.
    pub reader: Reader<'a>,
    /// Working memory.
    pub pool: &'a Pool,
}

/// A sequence's coded rows in one layer.
#[derive(Debug, Default)]
pub struct Carry {
    /// By side: layers that were restored.
    n_layers: [usize; 2],
    /// By side, `[position][kv_head · head_dim]`: rows of the last restored layer, or predictions for the next.
    rows: [Vec<f32>; 2],
    weights: Vec<f32>,
}

impl Carry {
    /// One side's rows as they stand.
    pub fn rows(&self, side: Side) -> &[f32] {
        &self.rows[side as usize]
    }

    /// Goes on until `n` layers are restored.
    pub fn reach(&mut self, n: usize, walk: Walk<'_>) -> Result<(), CacheError> {
        if self.n_layers[Side::K as usize] > n {
            self.n_layers = [0; 2];
        }
        while self.n_layers[Side::V as usize] < n {
            let layer = &walk.state.layers[self.n_layers[Side::V as usize]];
            for side in Side::BOTH {
                self.predict(side, layer.coded_end[side as usize], walk);
                self.restore(side, walk)?;
            }
        }
        Ok(())
    }

    /// Replaces one side's rows by the predictions for the next layer, whose rows below `end` are coded or about to be.
    pub fn predict(&mut self, side: Side, end: u32, walk: Walk<'_>) {
        let Some(predictor) = &walk.stages.predictor else {
            return;
        };
        let affine = predictor.affine(self.n_layers[side as usize], side);
        let width = affine.bias.len();
        affine.widen(predictor.format, &mut self.weights);
        let weights = &self.weights;
        let [keys, values] = &mut self.rows;
        let (rows, keys) = match side {
            Side::K => (keys, &[][..]),
            Side::V => (values, &keys[..]),
        };
        let n = end as usize * width;
        room(rows, n);
        rows.resize(n, 0.0);
        let block = RANGE * width;
        let blocks = rows.chunks_mut(block).enumerate();
        let Ok(_) = team::try_map(blocks, |(i, out)| {
            let mut scratch = walk.pool.take();
            scratch.inputs.clear();
            if !weights.is_empty() {
                room(&mut scratch.inputs, RANGE * (weights.len() / width));
                let keys = keys.get(i * block..).unwrap_or(&[]);
                gather(side, out, keys, width, &mut scratch.inputs);
            }
            affine.apply(weights, &scratch.inputs, out);
            walk.pool.give(scratch);
            Ok::<(), Infallible>(())
        });
    }

    /// Adds what is stored of the next layer's residuals to its predictions.
    pub fn restore(&mut self, side: Side, walk: Walk<'_>) -> Result<(), CacheError> {
        let layer = self.n_layers[side as usize];
        let (stages, heads) = (walk.stages, &walk.state.layers[layer].heads);
        let d = stages.formats[layer].format(0, side, Class::Exact).dim;
        let width = heads.len() * d;
        let n_sinks = stages.sinks as usize;
        let chain = stages.chain(side);
        let ranges = self.rows[side as usize].chunks_mut(RANGE * width);
        team::try_map(ranges.enumerate(), |(range, rows)| {
            let mut scratch = walk.pool.take();
            for (h, head) in heads.iter().enumerate() {
                let table = &head.tables[side as usize][Class::Coded as usize];
                let Some(page) = table.page(range as u32) else {
                    continue;
                };
                let format = stages.formats[layer].format(h, side, Class::Coded);
                room(&mut scratch.rows, RANGE * format.dim);
                scratch.rows.resize(RANGE * format.dim, 0.0);
                let (buffers, decoded) = (&mut scratch.buffers, &mut scratch.rows);
                walk.reader.decode(page, format, buffers, decoded)?;
                for (z, p) in decoded.chunks_exact(format.dim).zip(page.positions()) {
                    let at = p as usize % RANGE * width + h * d;
                    let expanded;
                    let mut residual = z;
                    if !chain.is_identity() {
                        expanded = chain.expand(layer, h, z, d);
                        residual = &expanded;
                    }
                    for (x, r) in rows[at..at + d].iter_mut().zip(residual) {
                        *x += r;
                    }
                }
            }
            let n = n_sinks.saturating_sub(range * RANGE) * width;
            let n = n.min(rows.len());
            rows[..n].fill(0.0);
            walk.pool.give(scratch);
            Ok::<(), CacheError>(())
        })?;
        self.n_layers[side as usize] += 1;
        Ok(())
    }

    fn bytes(&self) -> usize {
        let all = self.rows.iter().chain([&self.weights]);
        all.map(|b| b.capacity() * size_of::<f32>()).sum()
    }
}

/// The reconstructions of a running step, and buffers of earlier ones.
#[derive(Debug, Default)]
pub struct Carries {
    running: BTreeMap<SeqId, Carry>,
    idle: Vec<Carry>,
}

impl Carries {
    /// A sequence's reconstruction, to be put back with [`Carries::put`].
    pub fn take(&mut self, seq: SeqId) -> Carry {
        let running = self.running.remove(&seq);
        running.or_else(|| self.idle.pop()).unwrap_or_default()
    }

    /// Keeps a reconstruction for the step's next layer.
    pub fn put(&mut self, seq: SeqId, carry: Carry) {
        self.running.insert(seq, carry);
    }

    /// Ends a sequence's reconstruction; its buffers serve another one.
    pub fn end(&mut self, seq: SeqId) {
        if let Some(mut carry) = self.running.remove(&seq) {
            carry.n_layers = [0; 2];
            self.idle.push(carry);
        }
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> u64 {
        let all = self.running.values().chain(&self.idle);
        all.map(Carry::bytes).sum::<usize>() as u64
    }
}
