//! What a cache holds of a sequence, row by row, for diagnosis: each layer's keys and values as attention would use them, as
//! plain numbers in the head's own channels.
//!
//! Invariants: it reads what is stored, by the readers and maps that attention uses; it changes nothing, and its working
//! memory is no part of the cache's. It allocates: it is nothing to decode with.

use std::collections::BTreeMap;

use super::CacheError;
use super::head_view::HeadView;
use super::pipeline::StagedCache;
use super::places::{Page, ReadBuffers};
use super::predict::{Carry, Walk};
use super::scratch::Pool;
use super::stage::{KeyForm, Side};
use super::types::SeqId;
use super::visibility::Class;

/// Rows of one KV head that the query at the sequence's next position sees.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HeadRows {
    /// Their positions, ascending.
    pub positions: Vec<u32>,
    /// Keys in the form in which the strategy stores them ([`StagedCache::key_form`]), `[row][head_dim]`.
    pub k: Vec<f32>,
    /// Values, `[row][head_dim]`.
    pub v: Vec<f32>,
}

impl StagedCache {
    /// The form of stored keys.
    pub fn key_form(&self) -> KeyForm {
        self.stages.keys
    }

    /// Shows every layer's rows, `[kv_head]`, in order of the layers. Between two steps only. A row that the next step will
    /// encode is shown as it stands.
    ///
    /// # Errors
    /// An unknown sequence, or a page that can't be read.
    pub fn inspect(
        &self,
        seq: SeqId,
        mut each: impl FnMut(usize, &[HeadRows]),
    ) -> Result<(), CacheError> {
        let state = self.sequence(seq)?;
        let pool = Pool::default();
        let walk = Walk {
            stages: &self.stages,
            state,
            reader: self.reader(),
            pool: &pool,
        };
        let mut carry = self.stages.predictor.is_some().then(Carry::default);
        for (layer, geometry) in self.geometry.layers.iter().enumerate() {
            if let Some(carry) = &mut carry {
                carry.reach(layer + 1, walk)?;
            }
            let rules = self.stages.rules(state, (layer, geometry.window));
            let view = |head: usize| HeadView {
                restored: carry.as_ref().map(|c| Side::BOTH.map(|s| c.rows(s))),
                ..self.head_view((layer, head), state, rules)
            };
            let heads = (0..geometry.n_kv_heads)
                .map(|head| view(head).rows_at(state.len))
                .collect::<Result<Vec<HeadRows>, _>>()?;
            each(layer, &heads);
        }
        Ok(())
    }
}

impl HeadView<'_> {
    fn rows_at(&self, position: u32) -> Result<HeadRows, CacheError> {
        let keys = self.side_at(Side::K, position)?;
        let mut values = self.side_at(Side::V, position)?;
        let mut rows = HeadRows::default();
        for (position, k) in keys {
            // K and V of a row live together.
            if let Some(v) = values.remove(&position) {
                rows.positions.push(position);
                rows.k.extend(k);
                rows.v.extend(v);
            }
        }
        Ok(rows)
    }

    /// One side's rows by position. A row that stands in two classes is read coded, unless it is a sink.
    fn side_at(&self, side: Side, position: u32) -> Result<BTreeMap<u32, Vec<f32>>, CacheError> {
        let mut rows = BTreeMap::new();
        let rules = &self.rules[side as usize];
        for class in Class::ALL {
            for page in self.state.tables[side as usize][class as usize].pages() {
                // What is not coded yet stays exact, whatever the next step will do.
                let seen = match class {
                    Class::Coded => rules.seen(Class::Coded, position, page.range),
                    Class::Exact | Class::Frozen | Class::Fetched => {
                        rules.seen(Class::Frozen, position, page.range)
                    }
                };
                let decoded = self.live_rows(side, class, page)?;
                let d = self.geometry.head_dim;
                for (p, row) in page.positions().zip(decoded.chunks_exact(d)) {
                    if seen >> (p - page.first()) & 1 == 1 {
                        rows.entry(p).or_insert_with(|| row.to_vec());
                    }
                }
            }
        }
        Ok(rows)
    }

    /// A page's live rows in the head's channels, `[row][head_dim]`.
    fn live_rows(&self, side: Side, class: Class, page: &Page) -> Result<Vec<f32>, CacheError> {
        let d = self.geometry.head_dim;
        let format = page.format(self.formats.ladder(self.head, side, class));
        let positions: Vec<u32> = page.positions().collect();
        let mut rows = vec![0.0; positions.len() * d];
        if self.copy_restored((side, class), &positions, &mut rows) {
            return Ok(rows);
        }
        let n_stored = page.stored().count_ones() as usize;
        let mut rows = vec![0.0; n_stored * format.dim];
        let mut buffers = ReadBuffers::default();
        self.reader.decode(page, format, &mut buffers, &mut rows)?;
        rows.truncate(positions.len() * format.dim);
        let chain = self.stages.chain(side);
        if class != Class::Coded || chain.is_identity() {
            return Ok(rows);
        }
        let expanded = rows
            .chunks_exact(format.dim)
            .flat_map(|z| chain.expand(self.layer, self.head, z, d));
        Ok(expanded.collect())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cache::rope::{PairLayout, Rope};
    use crate::cache::stage::{Params, Value};
    use crate::cache::strategy::{StageSpec, Strategy, Tail};
    use crate::cache::{
        Admission, Batch, Continuation, Geometry, KvCache, LayerGeometry, Materials, Rows,
    };

    const D: usize = 64;
    const N: u32 = 150;
    const SEQ: SeqId = SeqId(0);

    fn geometry() -> Geometry {
        let rope = Rope::new(PairLayout::HalfSplit, Rope::frequencies(1e4, D), 256);
        let layer = |window| LayerGeometry {
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: D,
            scale: 0.125,
            rope: Arc::new(rope.clone()),
            window,
        };
        Geometry {
            layers: vec![layer(None), layer(Some(40))],
        }
    }

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut x = seed;
        let next = || {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        std::iter::repeat_with(next).take(n).collect()
    }

    fn stage(name: &str, params: &[(&str, Value)]) -> StageSpec {
        let params = params.iter().map(|(k, v)| ((*k).to_owned(), v.clone()));
        StageSpec {
            name: name.to_owned(),
            params: Params(params.collect()),
        }
    }

    fn strategies() -> Vec<Strategy> {
        let bare = Strategy::bare;
        let rotated = |keys| Strategy {
            project_k: vec![StageSpec::plain("hadamard")],
            project_v: vec![StageSpec::plain("hadamard")],
            keys,
            ..bare("q4_0")
        };
        let paged = [
            ("axis", Value::Text("channel".into())),
            ("page", Value::Int(64)),
            ("group", Value::Int(64)),
        ];
        vec![
            bare("f32"),
            Strategy {
                sinks: 3,
                tail: Tail { k: 0, v: 20 },
                ..bare("q8_0")
            },
            rotated(KeyForm::PostRope),
            rotated(KeyForm::PreRope),
            Strategy {
                keys: KeyForm::PreRope,
                encode_k: stage("int4", &paged),
                sinks: 4,
                ..bare("q4_0")
            },
            Strategy {
                retain: Some(stage(
                    "window",
                    &[("recent", Value::Int(30)), ("sinks", Value::Int(2))],
                )),
                pack: Some(StageSpec::plain("zstd")),
                ..bare("nvfp4")
            },
        ]
    }

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter()
            .zip(b)
            .map(|(&a, &b)| f64::from(a) * f64::from(b))
            .sum()
    }

    /// What the last query gets, from the rows that are shown.
    fn attention(rows: &HeadRows, form: KeyForm, g: &LayerGeometry, q: &[f32]) -> Vec<f64> {
        let mut q = q.to_vec();
        g.rope.rotate(N - 1, &mut q);
        let mut weights = Vec::new();
        for (&p, k) in rows.positions.iter().zip(rows.k.chunks_exact(D)) {
            let mut k = k.to_vec();
            if form == KeyForm::PreRope {
                g.rope.rotate(p, &mut k);
            }
            weights.push((f64::from(g.scale) * dot(&q, &k)).exp());
        }
        let total: f64 = weights.iter().sum();
        let mut out = vec![0.0; D];
        for (w, v) in weights.iter().zip(rows.v.chunks_exact(D)) {
            for (o, &x) in out.iter_mut().zip(v) {
                *o += w / total * f64::from(x);
            }
        }
        out
    }

    #[test]
    fn rows_are_those_that_attention_uses() {
        let geometry = geometry();
        for strategy in strategies() {
            let materials = Materials {
                geometry: &geometry,
                calibration: None,
                backing_dir: None,
            };
            let mut cache = StagedCache::new(&strategy, materials).unwrap();
            cache.admit(SEQ, Admission::Context).unwrap();
            let batch = Batch::single(SEQ, 0..N);
            let rows = |layer: u32| [1, 2].map(|s| noise(N as usize * 2 * D, 10 * layer + s));
            for layer in 0..2 {
                let [k, v] = rows(layer);
                let rows = Rows {
                    k: &k,
                    v: &v,
                    hidden: &[],
                    residual_norms: &[],
                };
                cache.append(layer as usize, &batch, rows).unwrap();
            }
            cache.commit(&batch).unwrap();
            cache.compress(SEQ, Continuation::Strategy).unwrap();
            let q = noise(4 * D, 99);
            let last = Batch::single(SEQ, N - 1..N);
            let mut outs = Vec::new();
            for layer in 0..2 {
                let mut out = vec![0.0; 4 * D];
                cache.attend(layer, &last, &q, &mut out).unwrap();
                outs.push(out);
            }
            let before = cache.memory();
            let label = &strategy.label;
            let mut n_layers = 0;
            cache
                .inspect(SEQ, |layer, heads| {
                    n_layers += 1;
                    let g = &geometry.layers[layer];
                    for (h, (q, out)) in q.chunks(D).zip(outs[layer].chunks(D)).enumerate() {
                        let rows = &heads[h / 2];
                        let want = attention(rows, cache.key_form(), g, q);
                        let error = want.iter().zip(out).map(|(a, &b)| (a - f64::from(b)).abs());
                        let error = error.fold(0.0, f64::max);
                        // A window of 40 shows the last query one row that the next one does not see.
                        let differs = g.window.is_some() && strategy.retain.is_none();
                        assert!(differs || error < 3e-6, "{label} {layer} {h}: {error}");
                    }
                    let n = match (layer, &strategy.retain) {
                        (0, None) => N as usize,
                        (0, Some(_)) => 32,
                        (_, None) => 39,
                        (_, Some(_)) => 30,
                    };
                    assert!(
                        heads.iter().all(|r| r.positions.len() == n),
                        "{label} {layer}"
                    );
                })
                .unwrap();
            assert_eq!(n_layers, 2);
            assert_eq!(cache.memory(), before, "{label}: looking changes nothing");
        }
    }
}
