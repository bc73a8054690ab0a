//! What a gate sees of a window's rows, and what it is fitted to: one table per layer.
//!
//! Invariant: a table's columns are hidden channels, ln‖k‖ and ln‖v‖ of each KV head, ln(1 + p), 1, and each KV head's
//! target, in this order.

use crate::cache::retain::gate::{EXTRAS, Weights, extras};
use crate::cache::{LayerGeometry, Repetition};
use crate::engine::tape::TapeLayer;

/// What the gate is fitted to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The most attention.
    Kvzip,
    /// The most weighted attention.
    KvzipPlus,
}

/// One layer's columns.
#[derive(Clone, Copy)]
pub struct Columns {
    /// Hidden channels.
    pub n_embd: usize,
    /// KV heads.
    pub n_kv_heads: usize,
}

impl Columns {
    /// How many.
    pub fn width(self) -> usize {
        self.n_embd + 3 * self.n_kv_heads + 2
    }

    /// The columns of one head's features, in the gate's order.
    pub fn of_head(self, h: usize) -> Vec<usize> {
        let own = [
            self.n_embd + h,
            self.n_embd + self.n_kv_heads + h,
            self.n_embd + 2 * self.n_kv_heads,
            self.n_embd + 2 * self.n_kv_heads + 1,
        ];
        (0..self.n_embd).chain(own).collect()
    }

    /// The column of one head's target.
    pub fn target(self, h: usize) -> usize {
        self.n_embd + 2 * self.n_kv_heads + 2 + h
    }
}

/// ln of the targets, `[kv_head][token]`, cut to between two numbers.
pub fn targets(
    target: Target,
    (least, most): (f32, f32),
    repetition: &Repetition,
) -> Vec<Vec<f32>> {
    let scores = match target {
        Target::Kvzip => &repetition.attention,
        Target::KvzipPlus => &repetition.weighted,
    };
    let log = |&s: &f32| s.max(f32::MIN_POSITIVE).ln().clamp(least, most);
    scores.iter().map(|s| s.iter().map(log).collect()).collect()
}

/// A window's columns, `[token][column]`.
pub fn table(
    g: &LayerGeometry,
    columns: Columns,
    rows: &TapeLayer,
    targets: Vec<Vec<f32>>,
) -> Vec<f32> {
    let (d, width) = (g.head_dim, g.n_kv_heads * g.head_dim);
    let hidden = rows.hidden.chunks_exact(columns.n_embd);
    let kv = rows.k.chunks_exact(width).zip(rows.v.chunks_exact(width));
    let mut x = Vec::with_capacity(hidden.len() * columns.width());
    for (t, (hidden, (k, v))) in hidden.zip(kv).enumerate() {
        x.extend_from_slice(hidden);
        let heads = k.chunks_exact(d).zip(v.chunks_exact(d));
        let own: Vec<[f32; EXTRAS]> = heads.map(|(k, v)| extras(k, v, t as u32)).collect();
        x.extend(own.iter().map(|e| e[0]));
        x.extend(own.iter().map(|e| e[1]));
        x.extend_from_slice(&own[0][2..]);
        x.extend(targets.iter().map(|y| y[t]));
    }
    x
}

impl Weights {
    /// Scores of a layer's rows, `[kv_head][token]`.
    pub fn of_tape(&self, layer: usize, g: &LayerGeometry, rows: &TapeLayer) -> Vec<Vec<f32>> {
        let (d, width) = (g.head_dim, g.n_kv_heads * g.head_dim);
        let head = |h: usize| {
            let own = |x: &'_ [f32], t: usize| x[t * width + h * d..][..d].to_vec();
            let hidden = rows.hidden.chunks_exact(self.n_embd()).enumerate();
            hidden
                .map(|(t, hidden)| {
                    let extras = extras(&own(&rows.k, t), &own(&rows.v, t), t as u32);
                    self.score((layer, h), hidden, &extras)
                })
                .collect()
        };
        (0..g.n_kv_heads).map(head).collect()
    }
}
