//! Reading a context a second time, as the model's own answer to a prompt that asks to repeat it, and what that attends to.
//!
//! The context goes in parts. Each part is read after a prompt, from the end of the whole context; a row of the part gets
//! the most attention that any query of this reading gives it, weights being a softmax over the context's first rows, the
//! part and the reading itself, as KVzip (arXiv 2505.23416) has it. Rows of layers with a sliding window, which holds few of
//! them anyway, score above all others.
//!
//! Invariants: the context's own sequence is read from and never changed; a maximum has no order, so that steps and
//! threads change nothing.

use rayon::prelude::*;

use super::ContextTape;
use crate::cache::{
    Admission, Batch, CacheError, Continuation, Geometry, KvCache, MemoryReport, Needs, Repetition,
    Rows, SeqId, Trial,
};
use crate::compute::cpu::gemm::{Dims, Mat, MatMut, gemm};
use crate::compute::cpu::vector::{dot_rows, exp_sum, max};
use crate::model::transformer::{LanguageModel, StepError};

/// Tokens of a part.
pub const PART: usize = 2000;

/// Room for a prompt, in tokens.
pub const MAX_PROMPT: usize = 64;

/// Tokens of the part before that a prompt quotes.
pub const QUOTED: usize = 8;

/// First rows of the context that every part's softmax holds.
const SINKS: usize = 4;

/// Queries scored at a time, by head.
const TILE: usize = 64;

/// What is said before the repetition, in tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepeatPrompt {
    /// Before the first part.
    pub first: Vec<u32>,
    /// Before later parts; the end of the part before follows.
    pub later: Vec<u32>,
    /// Between any of these and the part.
    pub then: Vec<u32>,
}

/// Reads the context again, part by part. `seq` of `cache` holds it, exactly, and `other` is no sequence of it; `tape` has
/// its rows, `ids` its tokens. Gives, by layer, what that attended to.
///
/// # Errors
/// Those of a step, and a reading that does not fit the model's context.
pub fn repetition(
    model: &dyn LanguageModel,
    (cache, seq, other): (&mut dyn KvCache, SeqId, SeqId),
    geometry: &Geometry,
    (ids, tape): (&[u32], &ContextTape),
    prompt: &RepeatPrompt,
) -> Result<Vec<Repetition>, StepError> {
    let outputs = output_norms(model, geometry, tape);
    let mut layers: Vec<Repetition> = geometry
        .layers
        .iter()
        .map(|g| {
            // A sliding window does not reach back to what is repeated: such a layer's rows are beyond comparison.
            let least = if g.window.is_some() {
                f32::INFINITY
            } else {
                0.0
            };
            let all = vec![vec![least; ids.len()]; g.n_kv_heads];
            Repetition {
                attention: all.clone(),
                weighted: all,
            }
        })
        .collect();
    for (i, part) in ids.chunks(PART).enumerate() {
        let start = i * PART;
        let mut tokens = match i {
            0 => prompt.first.clone(),
            _ => [&prompt.later, &ids[start - QUOTED..start]].concat(),
        };
        tokens.extend(&prompt.then);
        tokens.extend(part);
        cache.fork(seq, other)?;
        let mut watch = Watch {
            inner: cache,
            held: Held {
                geometry,
                tape,
                outputs: &outputs,
                part: start..start + part.len(),
                keys: vec![Vec::new(); geometry.layers.len()],
                input_norms: Vec::new(),
            },
            layers: &mut layers,
        };
        let read = super::prefill(model, &mut watch, other, &tokens, super::CHUNK);
        cache.release(other)?;
        read?;
    }
    Ok(layers)
}

/// ‖W_O·v‖ of every row as every query head of its group sees it, `[layer][head][token]`.
fn output_norms(
    model: &dyn LanguageModel,
    geometry: &Geometry,
    tape: &ContextTape,
) -> Vec<Vec<Vec<f32>>> {
    let layers = geometry.layers.iter().zip(&tape.layers).enumerate();
    let norms = |(layer, (g, rows)): (
        usize,
        (&crate::cache::LayerGeometry, &super::tape::TapeLayer),
    )| {
        let (d, width) = (g.head_dim, g.n_heads * g.head_dim);
        let mut unit = vec![0.0; width * width];
        (0..width).for_each(|i| unit[i * width + i] = 1.0);
        let maps = model.attention_output(layer, &unit);
        let n_embd = maps.len() / width;
        let head = |h: usize| {
            let map = &maps[h * d * n_embd..(h + 1) * d * n_embd];
            let mut gram = vec![0.0; d * d];
            for (row, out) in map.chunks_exact(n_embd).zip(gram.chunks_exact_mut(d)) {
                dot_rows(map, row, out);
            }
            let own = h / g.group() * d;
            let mut mapped = vec![0.0; d];
            let norm = |v: &[f32]| {
                let v = &v[own..own + d];
                dot_rows(&gram, v, &mut mapped);
                let square = v
                    .iter()
                    .zip(&mapped)
                    .fold(0.0f32, |s, (a, b)| a.mul_add(*b, s));
                square.max(0.0).sqrt()
            };
            rows.v.chunks_exact(g.n_kv_heads * d).map(norm).collect()
        };
        (0..g.n_heads).into_par_iter().map(head).collect()
    };
    layers.map(norms).collect()
}

/// A cache that passes everything on, and holds the queries that pass against the rows of one part of a context.
struct Watch<'a> {
    inner: &'a mut dyn KvCache,
    held: Held<'a>,
    layers: &'a mut [Repetition],
}

/// What the queries of a reading are held against.
struct Held<'a> {
    geometry: &'a Geometry,
    tape: &'a ContextTape,
    outputs: &'a [Vec<Vec<f32>>],
    /// Positions of the part.
    part: std::ops::Range<usize>,
    /// Keys of the reading so far, after RoPE, `[layer][token · kv_head · head_dim]`.
    keys: Vec<Vec<f32>>,
    /// Lengths of the running step's residual stream, by row.
    input_norms: Vec<f32>,
}

/// What one KV head's tile of queries gave: the most weight of each row of the part, plain and weighted.
type Most = [Vec<f32>; 2];

impl Held<'_> {
    /// Positions of the context whose keys share a softmax with the part: its first rows, and the part.
    fn context_rows(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        (0..SINKS.min(self.part.start)).chain(self.part.clone())
    }

    /// Keys of one head as columns: first rows, part, reading.
    fn columns(&self, layer: usize, kv_head: usize) -> (Vec<f32>, usize) {
        let g = &self.geometry.layers[layer];
        let (d, width) = (g.head_dim, g.n_kv_heads * g.head_dim);
        let read = self.keys[layer].chunks_exact(width);
        let n = self.context_rows().count() + read.len();
        let mut columns = vec![0.0; d * n];
        let mut put = |i: usize, key: &[f32]| {
            for (c, &x) in key.iter().enumerate() {
                columns[c * n + i] = x;
            }
        };
        let mut key = vec![0.0; d];
        let mut i = 0;
        for t in self.context_rows() {
            key.copy_from_slice(&self.tape.layers[layer].k[t * width + kv_head * d..][..d]);
            g.rope.rotate(t as u32, &mut key);
            put(i, &key);
            i += 1;
        }
        for row in read {
            put(i, &row[kv_head * d..(kv_head + 1) * d]);
            i += 1;
        }
        (columns, n)
    }

    /// What a tile of the step's rows gives one head. `first`: position of the step's first row.
    fn tile(
        &self,
        (layer, kv_head): (usize, usize),
        (columns, n): (&[f32], usize),
        (q, first): (&[f32], u32),
        rows: std::ops::Range<usize>,
    ) -> Most {
        let g = &self.geometry.layers[layer];
        let (d, group, width) = (g.head_dim, g.group(), g.n_heads * g.head_dim);
        let n_read = self.keys[layer].len() / (g.n_kv_heads * d);
        let n_step = q.len() / width;
        let mut turned = Vec::with_capacity(rows.len() * group * d);
        for row in rows.clone() {
            let start = turned.len();
            turned.extend_from_slice(&q[row * width + kv_head * group * d..][..group * d]);
            for q in turned[start..].chunks_exact_mut(d) {
                g.rope.rotate(first + row as u32, q);
                q.iter_mut().for_each(|x| *x *= g.scale);
            }
        }
        let m = turned.len() / d;
        let mut scores = vec![0.0; m * n];
        let a = Mat {
            data: &turned,
            stride: d,
        };
        let b = Mat {
            data: columns,
            stride: n,
        };
        let out = MatMut {
            data: &mut scores,
            stride: n,
        };
        gemm(Dims { m, n, k: d }, a, b, out);
        let n_part = self.part.len();
        let first_of_part = n - n_read - n_part;
        let mut most = [vec![0.0f32; n_part], vec![0.0f32; n_part]];
        for (i, scores) in scores.chunks_exact_mut(n).enumerate() {
            let (row, head) = (rows.start + i / group, kv_head * group + i % group);
            // The reading sees itself up to the query.
            let seen = &mut scores[..n - (n_step - 1 - row)];
            let sum = exp_sum(seen, max(seen));
            let outputs = &self.outputs[layer][head][self.part.clone()];
            let input = self.input_norms[row].max(f32::MIN_POSITIVE);
            let [plain, weighted] = &mut most;
            let weights = seen[first_of_part..first_of_part + n_part].iter();
            for (((w, norm), p), q) in weights.zip(outputs).zip(plain).zip(weighted) {
                let weight = w / sum;
                *p = p.max(weight);
                *q = q.max(weight * norm / input);
            }
        }
        most
    }
}

impl KvCache for Watch<'_> {
    fn needs(&self) -> Needs {
        Needs {
            hidden: true,
            ..self.inner.needs()
        }
    }

    fn step_limit(&self, seq: SeqId, asked: usize) -> usize {
        self.inner.step_limit(seq, asked)
    }

    fn admit(&mut self, seq: SeqId, admission: Admission) -> Result<(), CacheError> {
        self.inner.admit(seq, admission)
    }

    fn append(&mut self, layer: usize, batch: &Batch, rows: Rows<'_>) -> Result<(), CacheError> {
        self.inner.append(layer, batch, rows)?;
        let held = &mut self.held;
        let g = &held.geometry.layers[layer];
        let d = g.head_dim;
        let first = batch.spans().first().map_or(0, |s| s.positions.start);
        let start = held.keys[layer].len();
        held.keys[layer].extend_from_slice(rows.k);
        let new = held.keys[layer][start..].chunks_exact_mut(g.n_kv_heads * d);
        for (key, position) in new.zip(first..) {
            key.chunks_exact_mut(d)
                .for_each(|k| g.rope.rotate(position, k));
        }
        held.input_norms = rows.residual_norms.to_vec();
        Ok(())
    }

    fn attend(
        &mut self,
        layer: usize,
        batch: &Batch,
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), CacheError> {
        self.inner.attend(layer, batch, q, out)?;
        let first = batch.spans().first().map_or(0, |s| s.positions.start);
        let held = &self.held;
        let g = &held.geometry.layers[layer];
        let n_scored = if g.window.is_some() { 0 } else { g.n_kv_heads };
        for kv_head in 0..n_scored {
            let (columns, n) = held.columns(layer, kv_head);
            let tiles: Vec<Most> = (0..batch.n_rows())
                .into_par_iter()
                .step_by(TILE)
                .map(|row| {
                    let rows = row..(row + TILE).min(batch.n_rows());
                    held.tile((layer, kv_head), (&columns, n), (q, first), rows)
                })
                .collect();
            let own = &mut self.layers[layer];
            let part = held.part.clone();
            for [plain, weighted] in tiles {
                let kept = [&mut own.attention[kv_head], &mut own.weighted[kv_head]];
                for (kept, new) in kept.into_iter().zip([plain, weighted]) {
                    for (k, x) in kept[part.clone()].iter_mut().zip(new) {
                        *k = k.max(x);
                    }
                }
            }
        }
        Ok(())
    }

    fn commit(&mut self, batch: &Batch) -> Result<(), CacheError> {
        self.inner.commit(batch)
    }

    fn compress(&mut self, seq: SeqId, continuation: Continuation) -> Result<(), CacheError> {
        self.inner.compress(seq, continuation)
    }

    fn fork(&mut self, from: SeqId, to: SeqId) -> Result<(), CacheError> {
        self.inner.fork(from, to)
    }

    fn truncate(&mut self, seq: SeqId, len: u32) -> Result<(), CacheError> {
        self.inner.truncate(seq, len)
    }

    fn release(&mut self, seq: SeqId) -> Result<(), CacheError> {
        self.inner.release(seq)
    }

    fn trial(&self, seq: SeqId) -> Trial {
        self.inner.trial(seq)
    }

    fn expect(&mut self, seq: SeqId, token: u32) {
        self.inner.expect(seq, token);
    }

    fn len(&self, seq: SeqId) -> Result<u32, CacheError> {
        self.inner.len(seq)
    }

    fn memory(&self) -> MemoryReport {
        self.inner.memory()
    }
}

#[cfg(test)]
mod tests;
