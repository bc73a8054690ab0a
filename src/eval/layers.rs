//! Where a compressed context goes wrong: stored rows, attention maps and attention outputs, per layer and head, beside the
//! exact ones.
//!
//! Invariants: rows come from the cache as attention reads them, exact rows and queries from the reference; all sums are
//! formed in f64 with a softmax of its own, in order of position. Queries are the reference's at the continuation's first
//! [`QUERIES`] tokens, teacher-forced, and attend to the context's rows alone, each to those in its layer's window.
//!
//! Evicted rows: the map of the rows that live is renormalised on both sides before KL(full ‖ strategy) is taken, and the
//! full map's mass on evicted rows stands apart. Outputs are held against those over all rows, so that eviction counts.
//!
//! ```text
//! position    0    1    2    3          full map p over all rows
//! p         0.4  0.1  0.3  0.2
//! lives       x         x               evicted mass 0.3; p over live rows 4/7, 3/7
//! ```

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::lockstep::{EvalError, Lockstep, Runner, SEQ, each};
use crate::cache::inspect::HeadRows;
use crate::cache::stage::KeyForm;
use crate::cache::{CacheError, Geometry, KvCache, LayerGeometry, SeqId, StagedCache};
use crate::engine::{ContextTape, Probe, prefill};

/// Queries at most.
pub const QUERIES: usize = 16;

/// The sequence of the queries.
const PROBE: SeqId = SeqId(1);

/// One layer of a compressed context beside the exact one: sums, never ratios.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerRecord {
    /// Queries.
    pub n_queries: usize,
    /// By KV head.
    pub kv_heads: Vec<KvHeadRecord>,
    /// By query head.
    pub heads: Vec<HeadRecord>,
}

/// Stored rows of one KV head: squared Frobenius norms over the rows that live, K in the form in which it is stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvHeadRecord {
    /// Rows that live.
    pub n_rows: usize,
    /// Of stored minus exact keys.
    pub k_error_sq: f64,
    /// Of exact keys.
    pub k_norm_sq: f64,
    /// Of stored minus exact values.
    pub v_error_sq: f64,
    /// Of exact values.
    pub v_norm_sq: f64,
}

/// Attention of one query head, summed over queries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadRecord {
    /// KL(full ‖ strategy) of the maps over rows that live, nats.
    pub map_kl: f64,
    /// The full map's mass on rows that were evicted.
    pub evicted_mass: f64,
    /// Squared norm of the output minus the exact one.
    pub error_sq: f64,
    /// The same with stored keys and exact values of the rows that live.
    pub error_sq_by_k: f64,
    /// The same with exact keys and stored values.
    pub error_sq_by_v: f64,
    /// Squared norm of the exact output.
    pub norm_sq: f64,
}

impl LayerRecord {
    /// Adds another item's sums.
    pub fn add(&mut self, other: &Self) {
        self.n_queries += other.n_queries;
        self.kv_heads
            .resize(other.kv_heads.len(), KvHeadRecord::default());
        self.heads.resize(other.heads.len(), HeadRecord::default());
        for (a, b) in self.kv_heads.iter_mut().zip(&other.kv_heads) {
            a.n_rows += b.n_rows;
            a.k_error_sq += b.k_error_sq;
            a.k_norm_sq += b.k_norm_sq;
            a.v_error_sq += b.v_error_sq;
            a.v_norm_sq += b.v_norm_sq;
        }
        for (a, b) in self.heads.iter_mut().zip(&other.heads) {
            a.map_kl += b.map_kl;
            a.evicted_mass += b.evicted_mass;
            a.error_sq += b.error_sq;
            a.error_sq_by_k += b.error_sq_by_k;
            a.error_sq_by_v += b.error_sq_by_v;
            a.norm_sq += b.norm_sq;
        }
    }

    /// Every sum.
    pub(super) fn sums(&self) -> impl Iterator<Item = f64> {
        let rows = self.kv_heads.iter();
        let rows = rows.flat_map(|r| [r.k_error_sq, r.k_norm_sq, r.v_error_sq, r.v_norm_sq]);
        rows.chain(self.heads.iter().flat_map(|h| {
            let errors = [h.error_sq, h.error_sq_by_k, h.error_sq_by_v];
            errors
                .into_iter()
                .chain([h.map_kl, h.evicted_mass, h.norm_sq])
        }))
    }
}

impl Lockstep<'_> {
    /// Holds each strategy's compressed context against the exact one, if that is asked for. `continuation`: the tokens
    /// after it.
    pub(super) fn compare_layers(
        &self,
        reference: &mut Runner,
        runners: &mut [Result<Runner, EvalError>],
        tape: &ContextTape,
        continuation: &[u32],
    ) -> Result<(), EvalError> {
        let tokens = &continuation[..self.layer_queries.min(continuation.len())];
        if tokens.is_empty() {
            return Ok(());
        }
        reference.cache.fork(SEQ, PROBE)?;
        let mut probe = Probe::new(&mut reference.cache, PROBE);
        prefill(self.model, &mut probe, PROBE, tokens, self.chunk)?;
        let queries = probe.into_queries();
        reference.cache.release(PROBE)?;
        let context = Context {
            geometry: self.geometry,
            tape,
            queries: &queries,
        };
        each(runners, |runner| {
            runner.layers = context.compare(&runner.cache)?;
            Ok(())
        });
        Ok(())
    }
}

/// What is exact.
struct Context<'a> {
    geometry: &'a Geometry,
    tape: &'a ContextTape,
    /// By layer, `[token][head][head_dim]`, before RoPE.
    queries: &'a [Vec<f32>],
}

impl Context<'_> {
    fn compare(&self, cache: &StagedCache) -> Result<Vec<LayerRecord>, CacheError> {
        let mut layers = Vec::new();
        cache.inspect(SEQ, |layer, stored| {
            let heads: Vec<(KvHeadRecord, Vec<HeadRecord>)> = stored
                .par_iter()
                .enumerate()
                .map(|(head, rows)| self.kv_head((layer, head), rows, cache.key_form()))
                .collect();
            let g = &self.geometry.layers[layer];
            let mut record = LayerRecord {
                n_queries: self.queries[layer].len() / (g.n_heads * g.head_dim),
                ..LayerRecord::default()
            };
            for (rows, heads) in heads {
                record.kv_heads.push(rows);
                record.heads.extend(heads);
            }
            layers.push(record);
        })?;
        Ok(layers)
    }

    fn kv_head(
        &self,
        (layer, head): (usize, usize),
        stored: &HeadRows,
        form: KeyForm,
    ) -> (KvHeadRecord, Vec<HeadRecord>) {
        let g = &self.geometry.layers[layer];
        let exact = self.exact(layer, head, form);
        let rows = compare_rows(&exact, stored, g.head_dim);
        let sides = Sides {
            first: self.tape.n_tokens as u32,
            geometry: g,
            exact: Wide::new(&exact, form, g),
            stored: Wide::new(stored, form, g),
        };
        let width = g.n_heads * g.head_dim;
        let heads = (head * g.group()..(head + 1) * g.group()).map(|head| {
            let mut record = HeadRecord::default();
            for (t, q) in self.queries[layer].chunks_exact(width).enumerate() {
                sides.ask(t as u32, &q[head * g.head_dim..][..g.head_dim], &mut record);
            }
            record
        });
        (rows, heads.collect())
    }

    /// All rows of the context, keys in that form.
    fn exact(&self, layer: usize, head: usize, form: KeyForm) -> HeadRows {
        let g = &self.geometry.layers[layer];
        let d = g.head_dim;
        let of_head = |rows: &[f32]| -> Vec<f32> {
            let rows = rows.chunks_exact(g.n_kv_heads * d);
            rows.flat_map(|row| row[head * d..][..d].to_vec()).collect()
        };
        let tape = &self.tape.layers[layer];
        let mut rows = HeadRows {
            positions: (0..self.tape.n_tokens as u32).collect(),
            k: of_head(&tape.k),
            v: of_head(&tape.v),
        };
        if form == KeyForm::PostRope {
            turn(&mut rows.k, &rows.positions, g);
        }
        rows
    }
}

fn turn(keys: &mut [f32], positions: &[u32], g: &LayerGeometry) {
    for (row, &p) in keys.chunks_exact_mut(g.head_dim).zip(positions) {
        g.rope.rotate(p, row);
    }
}

/// Row i of `exact` is that of position i.
fn compare_rows(exact: &HeadRows, stored: &HeadRows, d: usize) -> KvHeadRecord {
    let side = |exact: &[f32], of_stored: &[f32]| -> (f64, f64) {
        let mut sums = (0.0, 0.0);
        for (&p, row) in stored.positions.iter().zip(of_stored.chunks_exact(d)) {
            for (&x, &y) in exact[p as usize * d..][..d].iter().zip(row) {
                let (x, y) = (f64::from(x), f64::from(y));
                sums.0 += (y - x) * (y - x);
                sums.1 += x * x;
            }
        }
        sums
    };
    let (k_error_sq, k_norm_sq) = side(&exact.k, &stored.k);
    let (v_error_sq, v_norm_sq) = side(&exact.v, &stored.v);
    KvHeadRecord {
        n_rows: stored.positions.len(),
        k_error_sq,
        k_norm_sq,
        v_error_sq,
        v_norm_sq,
    }
}

/// Rows as they meet queries: keys after RoPE.
struct Wide {
    positions: Vec<u32>,
    k: Vec<f64>,
    v: Vec<f64>,
}

impl Wide {
    fn new(rows: &HeadRows, form: KeyForm, g: &LayerGeometry) -> Self {
        let mut k = rows.k.clone();
        if form == KeyForm::PreRope {
            turn(&mut k, &rows.positions, g);
        }
        let wide = |x: &[f32]| x.iter().copied().map(f64::from).collect();
        Self {
            positions: rows.positions.clone(),
            k: wide(&k),
            v: wide(&rows.v),
        }
    }
}

/// Exact and stored rows of one KV head. Row i of the exact ones is that of position i.
struct Sides<'a> {
    /// Position of the first query.
    first: u32,
    geometry: &'a LayerGeometry,
    exact: Wide,
    stored: Wide,
}

impl Sides<'_> {
    /// Adds what one query of one head makes of both.
    fn ask(&self, token: u32, q: &[f32], record: &mut HeadRecord) {
        let g = self.geometry;
        let d = g.head_dim;
        let position = self.first + token;
        let mut q = q.to_vec();
        g.rope.rotate(position, &mut q);
        let q: Vec<f64> = q
            .iter()
            .map(|&x| f64::from(x) * f64::from(g.scale))
            .collect();
        let score = |keys: &[f64], i: usize| -> f64 {
            keys[i * d..][..d].iter().zip(&q).map(|(k, q)| k * q).sum()
        };
        let sees = |p: u32| g.window.is_none_or(|w| p + w > position);
        let all: Vec<usize> = rows(&self.exact, sees);
        let live: Vec<usize> = rows(&self.stored, sees);
        let same: Vec<usize> = live
            .iter()
            .map(|&i| self.stored.positions[i] as usize)
            .collect();
        let of = |keys: &[f64], rows: &[usize]| rows.iter().map(|&i| score(keys, i)).collect();
        let full = log_softmax(of(&self.exact.k, &all));
        let kept = log_softmax(of(&self.exact.k, &same));
        let coded = log_softmax(of(&self.stored.k, &live));
        let exact = weigh(&full, &self.exact.v, &all, d);
        let outputs = [
            weigh(&coded, &self.stored.v, &live, d),
            weigh(&coded, &self.exact.v, &same, d),
            weigh(&kept, &self.stored.v, &live, d),
        ];
        let [error, by_k, by_v] = outputs.map(|out| {
            let differences = out.iter().zip(&exact).map(|(a, b)| a - b);
            differences.map(|x| x * x).sum::<f64>()
        });
        record.error_sq += error;
        record.error_sq_by_k += by_k;
        record.error_sq_by_v += by_v;
        record.norm_sq += exact.iter().map(|x| x * x).sum::<f64>();
        let kl = kept.iter().zip(&coded).map(|(p, q)| p.exp() * (p - q));
        // Rounding may leave less than nothing.
        record.map_kl += kl.sum::<f64>().max(0.0);
        let evicted = all
            .iter()
            .zip(&full)
            .filter(|(i, _)| same.binary_search(i).is_err());
        record.evicted_mass += evicted.map(|(_, p)| p.exp()).sum::<f64>();
    }
}

/// Which rows a query sees.
fn rows(side: &Wide, sees: impl Fn(u32) -> bool) -> Vec<usize> {
    let all = side.positions.iter().enumerate();
    all.filter(|(_, p)| sees(**p)).map(|(i, _)| i).collect()
}

/// ln of the softmax; nothing of nothing.
fn log_softmax(mut scores: Vec<f64>) -> Vec<f64> {
    let m = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - m).exp()).sum();
    for s in &mut scores {
        *s = *s - m - sum.ln();
    }
    scores
}

/// Σ p · row, `[head_dim]`.
fn weigh(log_p: &[f64], values: &[f64], rows: &[usize], d: usize) -> Vec<f64> {
    let mut out = vec![0.0; d];
    for (p, &i) in log_p.iter().zip(rows) {
        let p = p.exp();
        for (o, x) in out.iter_mut().zip(&values[i * d..][..d]) {
            *o += p * x;
        }
    }
    out
}

#[cfg(test)]
mod tests;
