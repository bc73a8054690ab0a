//! Pages that are coded anew: which and when, what of their rows then, and that nobody else sees it; against a restatement of the
//! rule that shares with the cache the codec alone.

mod sequences;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::cache::inspect::HeadRows;
use crate::cache::rope::{PairLayout, Rope};
use crate::cache::stage::{
    BuildContext, Codec, HeadContext, KeyForm, Kind, PageCodec, Params, Side, Stage, Value, find,
};
use crate::cache::strategy::{StageSpec, Strategy};
use crate::cache::{
    Admission, Batch, CacheError, Geometry, KvCache, LayerGeometry, Materials, Rebuilt, Rows,
    SeqId, StagedCache,
};

const D: usize = 32;
const N: usize = 420;
const SEQ: SeqId = SeqId(0);

#[test]
fn a_page_is_due_with_exactly_the_part_that_is_named() {
    let few = |part, n_live, n_stored| super::Rebuild { part, sinks: 0 }.are_few(n_live, n_stored);
    assert!(few(0.29, 29, 100) && !few(0.29, 30, 100));
    assert!(few(0.5, 64, 128) && !few(0.5, 65, 128));
    assert!(few(1.0, 127, 128) && !few(1.0, 128, 128));
}

fn geometry() -> Geometry {
    let rope = Rope::new(PairLayout::HalfSplit, Rope::frequencies(1e4, D), 1024);
    let layer = LayerGeometry {
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: D,
        scale: 0.2,
        rope: Arc::new(rope),
        window: None,
    };
    Geometry {
        layers: vec![layer.clone(), layer],
    }
}

fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut x = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (x >> 8) as f32 / (1 << 22) as f32 - 2.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

fn spec(name: &str, params: &[(&str, Value)]) -> StageSpec {
    let params = params.iter().map(|(k, v)| ((*k).to_owned(), v.clone()));
    StageSpec {
        name: name.to_owned(),
        params: Params(params.collect()),
    }
}

/// K by channel in pages of so many rows.
fn by_channel(page: i64) -> StageSpec {
    let params = [
        ("axis", Value::Text("channel".to_owned())),
        ("group", Value::Int(page.min(64))),
        ("page", Value::Int(page)),
    ];
    spec("int4", &params)
}

/// A retention over K by channel and V in f32.
fn strategy((name, given): (&str, &[(&str, Value)]), rebuild: Option<f64>, page: i64) -> Strategy {
    let mut retain = spec(name, given);
    if let Some(part) = rebuild {
        let value = Value::Float(part);
        retain.params.0.insert("rebuild".to_owned(), value);
    }
    Strategy {
        retain: Some(retain),
        encode_k: by_channel(page),
        ..Strategy::bare("f32")
    }
}

/// 100 rows at random, none spared.
fn at_random(rebuild: Option<f64>, page: i64) -> Strategy {
    let given = [("tokens", Value::Int(100)), ("sinks", Value::Int(0))];
    strategy(("random", &given), rebuild, page)
}

/// Two sinks and the 100 newest.
fn newest(rebuild: Option<f64>) -> Strategy {
    let given = [("recent", Value::Int(100)), ("sinks", Value::Int(2))];
    strategy(("window", &given), rebuild, 128)
}

fn built(strategy: &Strategy) -> Result<StagedCache, CacheError> {
    let geometry = geometry();
    let materials = Materials {
        geometry: &geometry,
        calibration: None,
        backing_dir: None,
    };
    StagedCache::new(strategy, materials)
}

fn streaming(strategy: &Strategy) -> StagedCache {
    let mut cache = built(strategy).unwrap();
    cache.admit(SEQ, Admission::Streaming).unwrap();
    cache
}

/// By layer: K, V, q before RoPE.
struct Script(Vec<[Vec<f32>; 3]>);

impl Script {
    fn new(seed: u32) -> Self {
        let of = |l: u32| {
            [(2, 0u32), (2, 1), (4, 2)].map(|(heads, i)| noise(N * heads * D, seed + 10 * l + i))
        };
        Self((0..2).map(of).collect())
    }

    /// K of the first `n` tokens is 20 times as large.
    fn with_large_start(seed: u32, n: usize) -> Self {
        let mut script = Self::new(seed);
        for [k, ..] in &mut script.0 {
            k[..n * 2 * D].iter_mut().for_each(|x| *x *= 20.0);
        }
        script
    }

    fn part(&self, layer: usize, what: usize, tokens: &Range<usize>) -> &[f32] {
        let x = &self.0[layer][what];
        let width = x.len() / N;
        &x[tokens.start * width..tokens.end * width]
    }

    /// One step; outputs by layer.
    fn step(&self, cache: &mut StagedCache, seq: SeqId, tokens: Range<usize>) -> Vec<Vec<f32>> {
        let batch = Batch::single(seq, tokens.start as u32..tokens.end as u32);
        let hidden = match cache.needs().hidden {
            true => self.part(0, 2, &tokens),
            false => &[],
        };
        let layers = 0..2;
        let outputs = layers.map(|layer| {
            let rows = Rows {
                k: self.part(layer, 0, &tokens),
                v: self.part(layer, 1, &tokens),
                hidden,
                residual_norms: &[],
            };
            cache.append(layer, &batch, rows).unwrap();
            let q = self.part(layer, 2, &tokens);
            let mut out = vec![0.0; q.len()];
            cache.attend(layer, &batch, q, &mut out).unwrap();
            out
        });
        let outputs = outputs.collect();
        cache.commit(&batch).unwrap();
        outputs
    }

    /// Tokens of a sequence in steps of up to `chunk`, as long as the cache allows; the bits of all outputs, by layer.
    fn run(
        &self,
        cache: &mut StagedCache,
        seq: SeqId,
        tokens: Range<usize>,
        chunk: usize,
    ) -> [Vec<u32>; 2] {
        let mut all = [Vec::new(), Vec::new()];
        let mut at = tokens.start;
        while at < tokens.end {
            let end = tokens.end.min(at + cache.step_limit(seq, chunk));
            for (all, out) in all.iter_mut().zip(self.step(cache, seq, at..end)) {
                all.extend(out.iter().map(|x| x.to_bits()));
            }
            at = end;
        }
        all
    }
}

fn rows(cache: &StagedCache, seq: SeqId) -> Vec<HeadRows> {
    let mut all = Vec::new();
    cache
        .inspect(seq, |_, heads| all.extend(heads.to_vec()))
        .unwrap();
    all
}

/// Bytes of K's coded rows, with V's in f32.
fn key_bytes(cache: &StagedCache, n_coded_v: usize) -> usize {
    let m = cache.memory();
    (m.payload_bytes + m.scale_bytes) as usize - n_coded_v * 4 * D
}

fn codec(page: i64) -> Arc<dyn PageCodec> {
    let spec = by_channel(page);
    let def = find(Kind::Encode, &spec.name).unwrap();
    let params = Params::resolve(def, &spec.params).unwrap();
    let context = BuildContext {
        geometry: &geometry(),
        keys: KeyForm::PostRope,
        side: Side::K,
        calibration: None,
        backing_dir: None,
        head: Some(HeadContext::any(D)),
    };
    match (def.build)(&params, &context) {
        Ok(Stage::Encode(Codec::Pages(codec))) => codec,
        _ => panic!("no page-wise format"),
    }
}

/// Rows after coding.
fn coded(codec: &dyn PageCodec, rows: &[f32]) -> Vec<f32> {
    let mut bytes = vec![0; codec.page_bytes(rows.len() / D, D)];
    codec.encode(rows, D, &mut bytes);
    let mut out = vec![0.0; rows.len()];
    codec.decode(&bytes, D, &mut out);
    out
}

fn by_position(rows: &HeadRows) -> BTreeMap<usize, &[f32]> {
    let positions = rows.positions.iter().map(|&p| p as usize);
    positions.zip(rows.k.chunks_exact(D)).collect()
}

/// One head's pages, restated: rows stored of each page that was coded.
#[derive(Default)]
struct Head {
    stored: BTreeMap<usize, Vec<usize>>,
}

impl Head {
    /// After a step of token `t`: checks the coded rows that live against those before; returns what was coded anew.
    fn check(
        &mut self,
        (part, page): (f64, usize),
        (t, codec): (usize, &dyn PageCodec),
        [before, after]: [&HeadRows; 2],
    ) -> Rebuilt {
        let [before, after] = [by_position(before), by_position(after)];
        let fresh = (t + 1) % page == 0;
        if fresh {
            let rows = before.keys().copied().chain([t]);
            let rows = rows.filter(|p| p / page == t / page).collect();
            self.stored.insert(t / page, rows);
        }
        let mut sum = Rebuilt::default();
        for (&unit, stored) in &mut self.stored {
            let live: Vec<usize> = stored
                .iter()
                .copied()
                .filter(|p| after.contains_key(p))
                .collect();
            let old: Vec<f32> = (live.iter().filter_map(|p| before.get(p)))
                .flat_map(|row| row.to_vec())
                .collect();
            let new: Vec<f32> = live.iter().flat_map(|p| after[p].to_vec()).collect();
            if live.len() == stored.len() || live.len() as f64 > part * stored.len() as f64 {
                assert!(fresh && unit == t / page || new == old, "{t}: page {unit}");
                continue;
            }
            if live.is_empty() {
                stored.clear();
                continue;
            }
            assert!(!(fresh && unit == t / page), "coded and coded anew at once");
            assert_eq!(new, coded(codec, &old), "{t}: page {unit}");
            sum.n_pages += 1;
            for (&x, &y) in old.iter().zip(&new) {
                sum.error_squares += (f64::from(x) - f64::from(y)).powi(2);
                sum.squares += f64::from(x).powi(2);
            }
            *stored = live;
        }
        sum
    }

    fn bytes(&self, codec: &dyn PageCodec) -> usize {
        let pages = self.stored.values().filter(|rows| !rows.is_empty());
        pages.map(|rows| codec.page_bytes(rows.len(), D)).sum()
    }
}

/// Every page of every head at every step: which is coded anew, to which rows, in how many bytes; the counters.
#[test]
fn pages_with_few_living_rows_are_coded_anew_from_what_they_decode_to() {
    let script = Script::new(1);
    for (page, part) in [(128, 0.5), (128, 0.8), (32, 0.5)] {
        let codec = codec(page as i64);
        let mut cache = streaming(&at_random(Some(part), page as i64));
        let mut heads: Vec<Head> = (0..4).map(|_| Head::default()).collect();
        let mut sum = Rebuilt::default();
        let mut before = rows(&cache, SEQ);
        for t in 0..N {
            script.step(&mut cache, SEQ, t..t + 1);
            let after = rows(&cache, SEQ);
            for ((head, before), after) in heads.iter_mut().zip(&before).zip(&after) {
                let more = head.check((part, page), (t, &*codec), [before, after]);
                sum.add(&more, 1);
            }
            let n_live = after.iter().map(|r| r.positions.len()).sum();
            let want: usize = heads.iter().map(|head| head.bytes(&*codec)).sum();
            assert_eq!(key_bytes(&cache, n_live), want, "{t}");
            before = after;
        }
        let got = cache.memory().rebuilt;
        assert_eq!(got.n_pages, sum.n_pages);
        assert!(sum.n_pages >= 4, "{}", sum.n_pages);
        let (error, want) = (got.relative_error(), sum.relative_error());
        let (error, want) = (error.unwrap(), want.unwrap());
        assert!((error / want - 1.0).abs() < 1e-9, "{error} {want}");
        // Half a step of 15 over a span of about 4σ, for numbers spread evenly.
        assert!((0.005..0.08).contains(&error), "{error}");
    }
}

#[test]
fn without_it_the_holes_keep_their_bytes() {
    let script = Script::new(1);
    let [mut with, mut without] = [Some(0.5), None].map(|rebuild| streaming(&newest(rebuild)));
    let codec = codec(128);
    // A page of 128 is coded over the 103 rows that live in its last step, of which one leaves in it.
    let mut n_stored = 103;
    for t in 0..215 {
        for cache in [&mut with, &mut without] {
            script.step(cache, SEQ, t..t + 1);
        }
        if t < 127 {
            continue;
        }
        let n_coded_v = 4 * 102;
        // Of the coded rows, 127 is the last; 101 rows before the newest leave, the two sinks don't.
        let n_live = 2 + (127 - (t - 99) + 1);
        if 2 * n_live <= n_stored {
            n_stored = n_live;
        }
        let bytes = |n: usize| 4 * codec.page_bytes(n, D);
        assert_eq!(key_bytes(&with, n_coded_v), bytes(n_stored), "{t}");
        assert_eq!(key_bytes(&without, n_coded_v), bytes(103), "{t}");
    }
    // Of 103 to 51, of those to 25.
    assert_eq!(n_stored, 25);
    assert_eq!(with.memory().rebuilt.n_pages, 8);
    assert_eq!(without.memory().rebuilt, Rebuilt::default());
}

/// A row that has left stood in the place of the sinks: it must not widen the scales of those that live.
#[test]
fn sinks_are_covered_by_a_row_that_lives() {
    let script = Script::with_large_start(5, 60);
    let strategy = Strategy {
        sinks: 2,
        ..newest(Some(0.5))
    };
    let codec = codec(128);
    let mut cache = streaming(&strategy);
    let mut before = rows(&cache, SEQ);
    let mut n_pages = 0;
    for t in 0..200 {
        script.step(&mut cache, SEQ, t..t + 1);
        let after = rows(&cache, SEQ);
        if cache.memory().rebuilt.n_pages > n_pages {
            n_pages = cache.memory().rebuilt.n_pages;
            let mut sum = Rebuilt::default();
            for (before, after) in before.iter().zip(&after) {
                let [before, after] = [by_position(before), by_position(after)];
                let live = || (2..128).filter(|p| after.contains_key(p));
                let first = live().next().unwrap();
                let old = [first, first].into_iter().chain(live());
                let old: Vec<f32> = old.flat_map(|p| before[&p].to_vec()).collect();
                let new: Vec<f32> = live().flat_map(|p| after[&p].to_vec()).collect();
                let want = coded(&*codec, &old);
                assert_eq!(new, want[2 * D..], "{t}");
                // Sinks stay exact.
                assert_eq!(before[&0], after[&0]);
                for (&x, &y) in old[2 * D..].iter().zip(&new) {
                    sum.error_squares += (f64::from(x) - f64::from(y)).powi(2);
                    sum.squares += f64::from(x).powi(2);
                }
            }
            let (got, want) = (
                cache.memory().rebuilt.relative_error(),
                sum.relative_error_of_some(),
            );
            assert!((got.unwrap() / want - 1.0).abs() < 1e-9);
        }
        before = after;
    }
    assert_eq!(n_pages, 4);
}

impl Rebuilt {
    fn relative_error_of_some(&self) -> f64 {
        (self.error_squares / self.squares).sqrt()
    }
}
