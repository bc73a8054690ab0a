//! What attention must give: softmax over the decoded rows in f64, written without the cache's code.
//!
//! It shares with a cache the stages alone, and of them the plain methods: `encode` and `decode` (the latter of stages that
//! were built a second time, so that bytes alone carry a row), `forward` and `expand` of maps, `score` and `evict`. Which
//! rows a query sees in which version, the rotation, the softmax and the bytes are worked out here again.
//!
//! A query at 7 with `tail = 3`, one sink, rows coded one by one:
//!
//! ```text
//! position   0      1 2 3 4     5 6 7
//! version    exact  decoded     exact
//! ```

use super::failure::Stop;
use super::fixture::{ROPE_BASE, Script};
use super::rig::Rig;
use crate::cache::LayerGeometry;
use crate::cache::stage::{Codec, KeyForm, LiveRows, Moment, NewRow, Side};
use crate::cache::stages::Stages;

/// Attention worked out apart from any cache.
pub struct Reference<'a> {
    rig: &'a Rig<'a>,
    /// A second build: it has seen no row.
    decoder: Stages,
}

/// Bytes and rows that a cache must report after a script.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Expected {
    /// Codes and scales of coded rows.
    pub coded_bytes: u64,
    /// Sinks, tail, rows of open pages.
    pub exact_bytes: u64,
    /// Rows that live, over layers and KV heads.
    pub rows_live: u64,
}

/// One side of a head: its rows as a query meets them.
struct Versions {
    /// Sinks and tail, `[token][head_dim]`.
    exact: Vec<f64>,
    /// After coding.
    coded: Vec<f64>,
    /// By position: the first query that sees the coded row.
    coded_from: Vec<usize>,
}

impl<'a> Reference<'a> {
    /// The reference of a rig's strategy, or why there is none.
    ///
    /// # Errors
    /// [`Stop::NotApplicable`].
    pub fn new(rig: &'a Rig<'a>) -> Result<Self, Stop> {
        let s = rig.stages.as_ref();
        let paged = |side| s.formats[0].coded_rows(0, side).0.page_rows() > 1;
        let why = if s.predictor.is_some() {
            "rows are stored less their prediction from the layer before"
        } else if s.budget.is_some() {
            "a budget codes old pages again, so what is stored depends on bytes"
        } else if s.reading.is_some() {
            "a token reads what its own queries choose"
        } else if s.retain.is_some() && Side::BOTH.into_iter().any(paged) {
            "rows leave coded pages, whose other rows are then coded again"
        } else {
            let decoder = rig.rebuilt()?;
            return Ok(Self { rig, decoder });
        };
        Err(Stop::NotApplicable(why.to_owned()))
    }

    /// The outputs of one layer, `[token · head · channel]`.
    pub fn attention(&self, script: &Script, layer: usize) -> Vec<f64> {
        let g = &self.rig.geometry.layers[layer];
        let d = g.head_dim;
        let mut out = vec![0.0; script.n_tokens * g.n_heads * d];
        for kv_head in 0..g.n_kv_heads {
            let live = self.live(script, layer, kv_head);
            let [k, v] = Side::BOTH.map(|side| self.versions(script, (layer, kv_head, side)));
            for (query, live) in live.iter().enumerate() {
                let seen = |p: &usize| live[*p] && in_window(g, query, *p);
                let positions: Vec<usize> = (0..=query).filter(seen).collect();
                let keys: Vec<&[f64]> = positions.iter().map(|&p| k.row(query, p, d)).collect();
                let values: Vec<&[f64]> = positions.iter().map(|&p| v.row(query, p, d)).collect();
                for head in kv_head * g.group()..(kv_head + 1) * g.group() {
                    let at = (query * g.n_heads + head) * d;
                    let q = wide(&script.q[layer][at..at + d]);
                    let q = rotated(&q, query);
                    attend(&q, &keys, &values, f64::from(g.scale), &mut out[at..at + d]);
                }
            }
        }
        out
    }

    /// What a cache holds after a script; layers without a sliding window.
    pub fn expected(&self, script: &Script) -> Expected {
        let (mut sum, n) = (Expected::default(), script.n_tokens);
        for (layer, g) in self.rig.geometry.layers.iter().enumerate() {
            let formats = &self.rig.stages.formats[layer];
            for kv_head in 0..g.n_kv_heads {
                // What a query after the last token would see.
                let live = self.after(script, layer, kv_head);
                sum.rows_live += live.iter().filter(|&&l| l).count() as u64;
                for side in Side::BOTH {
                    let (codec, dim) = formats.coded_rows(kv_head, side);
                    let from = self.coded_from(codec, side, n);
                    // A row that the next append codes is exact until then; a page is coded when its step ends.
                    let is_coded = |p: usize| match codec {
                        Codec::Rows(_) => from[p] < n,
                        Codec::Pages(_) => from[p] <= n,
                    };
                    let exact = (0..n).filter(|&p| live[p] && !is_coded(p)).count();
                    sum.exact_bytes += (exact * row_bytes(formats.exact_rows(), g.head_dim)) as u64;
                    sum.coded_bytes += match codec {
                        Codec::Rows(codec) => {
                            let coded = (0..n).filter(|&p| live[p] && is_coded(p)).count();
                            (coded * codec.row_bytes(dim)) as u64
                        }
                        Codec::Pages(codec) => {
                            let page = codec.page_rows();
                            let tail = self.rig.stages.tail[side as usize] as usize;
                            let pages = n.saturating_sub(tail) / page;
                            (pages * codec.page_bytes(page, dim)) as u64
                        }
                    };
                }
            }
        }
        sum
    }

    /// By query: which rows live when it comes, its own included.
    fn live(&self, script: &Script, layer: usize, kv_head: usize) -> Vec<Vec<bool>> {
        let mut history = self.history(script, layer, kv_head);
        history.truncate(script.n_tokens);
        for (query, live) in history.iter_mut().enumerate() {
            live[query] = true;
        }
        history
    }

    /// Which rows live once the last step has ended.
    fn after(&self, script: &Script, layer: usize, kv_head: usize) -> Vec<bool> {
        let mut history = self.history(script, layer, kv_head);
        history.pop().unwrap_or_default()
    }

    /// Entry i: which rows live after i steps of one token.
    fn history(&self, script: &Script, layer: usize, kv_head: usize) -> Vec<Vec<bool>> {
        let n = script.n_tokens;
        let mut live = vec![false; n];
        let mut history = vec![live.clone()];
        let g = &self.rig.geometry.layers[layer];
        let keys = self.stored_keys(script, layer, kv_head);
        let values = side_rows(&script.v[layer], g, kv_head);
        let (mut positions, mut scores) = (Vec::new(), Vec::new());
        // What is scored by a whole context leaves at its compression point or not at all.
        let retain = self.rig.stages.retain.as_deref();
        let retain = retain.filter(|r| !r.needs().context.any());
        for p in 0..n {
            live[p] = true;
            if let Some(retain) = retain {
                positions.push(p as u32);
                if retain.is_scored() {
                    scores.push(retain.score(NewRow {
                        layer,
                        kv_head,
                        hidden: script.hidden(layer, p),
                        position: p as u32,
                        k: &keys[p * g.head_dim..(p + 1) * g.head_dim],
                        v: &values[p * g.head_dim..(p + 1) * g.head_dim],
                    }));
                }
                let evicted = retain.evict(LiveRows {
                    positions: &positions,
                    scores: &scores,
                    n_seen: p as u32 + 1,
                    n_reached: p as u32 + 1,
                    compressed: None,
                    moment: Moment::Step,
                });
                for i in evicted.into_iter().rev() {
                    live[positions.remove(i) as usize] = false;
                    if retain.is_scored() {
                        scores.remove(i);
                    }
                }
            }
            history.push(live.clone());
        }
        history
    }

    fn coded_from(&self, codec: &Codec, side: Side, n: usize) -> Vec<usize> {
        let stages = &self.rig.stages;
        let (tail, sinks) = (stages.tail[side as usize] as usize, stages.sinks as usize);
        let page = codec.page_rows();
        let from = |p: usize| match (p < sinks, page) {
            (true, _) => usize::MAX,
            (_, 1) => p + tail,
            _ => (p / page + 1) * page + tail,
        };
        (0..n).map(from).collect()
    }

    /// Keys in the form in which they are stored, `[token][head_dim]`.
    fn stored_keys(&self, script: &Script, layer: usize, kv_head: usize) -> Vec<f32> {
        let g = &self.rig.geometry.layers[layer];
        let mut rows = side_rows(&script.k[layer], g, kv_head);
        if self.rig.stages.keys == KeyForm::PostRope {
            // Rotated in f32, as codecs get them; `oracle` holds this rotation against one in f64.
            for (p, row) in rows.chunks_exact_mut(g.head_dim).enumerate() {
                g.rope.rotate(p as u32, row);
            }
        }
        rows
    }

    fn versions(&self, script: &Script, (layer, kv_head, side): (usize, usize, Side)) -> Versions {
        let (g, stages) = (&self.rig.geometry.layers[layer], &self.rig.stages);
        let d = g.head_dim;
        let rows = match side {
            Side::K => self.stored_keys(script, layer, kv_head),
            Side::V => side_rows(&script.v[layer], g, kv_head),
        };
        let (codec, dim) = stages.formats[layer].coded_rows(kv_head, side);
        let (decoder, _) = self.decoder.formats[layer].coded_rows(kv_head, side);
        let exact = round_trip(stages.formats[layer].exact_rows(), None, &rows, d);
        // A row that has been exact is coded from its exact copy.
        let was_exact = stages.tail[side as usize] > 0 || codec.page_rows() > 1;
        let mut source = if was_exact { exact.clone() } else { rows };
        cover_sinks(&mut source, stages.sinks as usize, codec.page_rows(), d);
        let chain = stages.chain(side);
        let mapped: Vec<f32> = source
            .chunks_exact(d)
            .flat_map(|row| chain.forward(layer, kv_head, row))
            .collect();
        let decoded = round_trip(codec, Some(decoder), &mapped, dim);
        let coded: Vec<f32> = decoded
            .chunks_exact(dim)
            .flat_map(|z| chain.expand(layer, kv_head, z, d))
            .collect();
        let turn = side == Side::K && stages.keys == KeyForm::PreRope;
        let as_met = |rows: &[f32]| -> Vec<f64> {
            let rows = rows.chunks_exact(d).map(wide).enumerate();
            rows.flat_map(|(p, row)| if turn { rotated(&row, p) } else { row })
                .collect()
        };
        Versions {
            exact: as_met(&exact),
            coded: as_met(&coded),
            coded_from: self.coded_from(codec, side, script.n_tokens),
        }
    }
}

impl Versions {
    /// The row at a position as a query sees it.
    fn row(&self, query: usize, position: usize, dim: usize) -> &[f64] {
        let rows = match query >= self.coded_from[position] {
            true => &self.coded,
            false => &self.exact,
        };
        &rows[position * dim..(position + 1) * dim]
    }
}

fn in_window(g: &LayerGeometry, query: usize, position: usize) -> bool {
    g.window.is_none_or(|w| query - position < w as usize)
}

/// Nobody reads the coded copies of sinks that lie in a page: the page's next row stands in their place, so that they don't
/// widen its scales.
fn cover_sinks(rows: &mut [f32], n_sinks: usize, page_rows: usize, dim: usize) {
    let next = n_sinks * dim..(n_sinks + 1) * dim;
    let first = n_sinks / page_rows * page_rows;
    if page_rows > 1 && next.end <= rows.len() {
        let row = rows[next].to_vec();
        for sink in rows[first * dim..n_sinks * dim].chunks_exact_mut(dim) {
            sink.copy_from_slice(&row);
        }
    }
}

fn row_bytes(codec: &Codec, dim: usize) -> usize {
    codec.bytes(1, dim)
}

/// One head's rows of a layer's `[token][kv_head][head_dim]`.
fn side_rows(all: &[f32], g: &LayerGeometry, kv_head: usize) -> Vec<f32> {
    let d = g.head_dim;
    all.chunks_exact(g.n_kv_heads * d)
        .flat_map(|row| row[kv_head * d..(kv_head + 1) * d].to_vec())
        .collect()
}

/// Rows through a codec; rows of an open page come back as they are. `decoder`: who decodes, if another does.
fn round_trip(codec: &Codec, decoder: Option<&Codec>, rows: &[f32], dim: usize) -> Vec<f32> {
    let mut back = rows.to_vec();
    match (codec, decoder.unwrap_or(codec)) {
        (Codec::Rows(codec), Codec::Rows(decoder)) => {
            let mut bytes = vec![0; codec.row_bytes(dim)];
            for (row, back) in rows.chunks_exact(dim).zip(back.chunks_exact_mut(dim)) {
                codec.encode(row, &mut bytes);
                decoder.decode(&bytes, back);
            }
        }
        (Codec::Pages(codec), Codec::Pages(decoder)) => {
            let n = codec.page_rows() * dim;
            let mut bytes = vec![0; codec.page_bytes(codec.page_rows(), dim)];
            for (rows, back) in rows.chunks_exact(n).zip(back.chunks_exact_mut(n)) {
                codec.encode(rows, dim, &mut bytes);
                decoder.decode(&bytes, dim, back);
            }
        }
        _ => back.fill(f32::NAN),
    }
    back
}

fn wide(row: &[f32]) -> Vec<f64> {
    row.iter().map(|&x| f64::from(x)).collect()
}

/// Half-split rotation; the last channel of an odd row stays.
pub fn rotated(row: &[f64], position: usize) -> Vec<f64> {
    let half = row.len() / 2;
    let mut out = row.to_vec();
    for i in 0..half {
        let frequency = f64::from(ROPE_BASE).powf(-(i as f64) / half as f64);
        let (sin, cos) = (position as f64 * frequency).sin_cos();
        out[i] = row[i] * cos - row[i + half] * sin;
        out[i + half] = row[i] * sin + row[i + half] * cos;
    }
    out
}

/// softmax(scale · q·kᵀ)·v.
fn attend(q: &[f64], keys: &[&[f64]], values: &[&[f64]], scale: f64, out: &mut [f64]) {
    let dot = |k: &&[f64]| scale * q.iter().zip(*k).map(|(a, b)| a * b).sum::<f64>();
    let scores: Vec<f64> = keys.iter().map(dot).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
    let total: f64 = weights.iter().sum();
    for (weight, value) in weights.iter().zip(values) {
        for (o, v) in out.iter_mut().zip(*value) {
            *o += weight / total * v;
        }
    }
}
