//! What decoded tokens read: against plain restatements in f64, and against caches that read all.

mod leaving;
mod quest;

use std::sync::Arc;

use super::super::rope::{PairLayout, Rope};
use super::super::strategy::{Budget, Scope, StageSpec, Strategy, Tail};
use super::super::{
    Admission, Batch, CacheError, Continuation, Geometry, KvCache, LayerGeometry, Materials, Rows,
    SeqId, StagedCache, Trial,
};
use super::*;
use crate::cache::stage::{Params, Value};

const D: usize = 16;
const SEQ: SeqId = SeqId(3);
const N: usize = 300;

fn geometry() -> Geometry {
    let rope = Rope::new(PairLayout::HalfSplit, Rope::frequencies(1e4, D), 512);
    let layer = LayerGeometry {
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: D,
        scale: 0.25,
        rope: Arc::new(rope),
        window: None,
    };
    Geometry {
        layers: vec![layer.clone(), layer],
    }
}

/// A text's rows, by layer: K, V, q before RoPE.
struct Script(Vec<[Vec<f32>; 3]>);

fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut x = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (x >> 8) as f32 / (1 << 22) as f32 - 2.0
    };
    std::iter::repeat_with(next).take(n).collect()
}

impl Script {
    fn new(seed: u32) -> Self {
        let layer = |l: u32| {
            [(2, 0u32), (2, 1), (4, 2)].map(|(heads, i)| noise(N * heads * D, seed + 10 * l + i))
        };
        Self((0..2).map(layer).collect())
    }

    fn part(&self, layer: usize, what: usize, tokens: std::ops::Range<usize>) -> &[f32] {
        let x = &self.0[layer][what];
        let width = x.len() / N;
        &x[tokens.start * width..tokens.end * width]
    }

    /// Feeds tokens as one step; the last `n_tried` of them are tried out. Returns all outputs, by layer.
    fn step(
        &self,
        cache: &mut StagedCache,
        seq: SeqId,
        tokens: std::ops::Range<usize>,
        n_tried: usize,
    ) -> Result<Vec<Vec<f32>>, CacheError> {
        let mut batch = Batch::new();
        batch.push_with(seq, tokens.start as u32..tokens.end as u32, n_tried);
        let mut outputs = Vec::new();
        for layer in 0..2 {
            let rows = Rows {
                k: self.part(layer, 0, tokens.clone()),
                v: self.part(layer, 1, tokens.clone()),
                hidden: &[],
                residual_norms: &[],
            };
            cache.append(layer, &batch, rows)?;
            let q = self.part(layer, 2, tokens.clone());
            let mut out = vec![0.0; q.len()];
            cache.attend(layer, &batch, q, &mut out)?;
            outputs.push(out);
        }
        cache.commit(&batch)?;
        Ok(outputs)
    }

    /// A cache whose first `n` tokens were compressed once.
    fn compressed(&self, strategy: &Strategy, n: usize) -> StagedCache {
        let mut cache = built(strategy).unwrap();
        cache.admit(SEQ, Admission::Context).unwrap();
        let mut at = 0;
        while at < n {
            let end = (at + cache.step_limit(SEQ, 100)).min(n);
            self.step(&mut cache, SEQ, at..end, 0).unwrap();
            at = end;
        }
        cache.compress(SEQ, Continuation::Exact).unwrap();
        cache
    }
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

fn placed(encode: &str, name: &str, params: &[(&str, Value)]) -> Strategy {
    let params = params.iter().map(|(k, v)| ((*k).to_owned(), v.clone()));
    Strategy {
        place: Some(StageSpec {
            name: name.to_owned(),
            params: Params(params.collect()),
        }),
        sinks: 2,
        tail: Tail::both(20),
        ..Strategy::bare(encode)
    }
}

fn specache(encode: &str, tokens: i64, fetch: &str, tier: &str) -> Strategy {
    let text = |x: &str| Value::Text(x.to_owned());
    let params = [
        ("tokens", Value::Int(tokens)),
        ("fetch", text(fetch)),
        ("tier", text(tier)),
    ];
    placed(encode, "specache", &params)
}

fn quest(tokens: i64, dense_layers: i64) -> Strategy {
    let params = [
        ("tokens", Value::Int(tokens)),
        ("page", Value::Int(16)),
        ("dense_layers", Value::Int(dense_layers)),
    ];
    placed("f32", "quest", &params)
}

/// Softmax weights of a query head's rows at positions 0..n, in f64; and the output.
fn oracle(
    script: &Script,
    layer: usize,
    head: usize,
    query: usize,
    rows: &[usize],
) -> (Vec<f64>, Vec<f64>) {
    let g = &geometry().layers[layer];
    let rotated = |what: usize, heads: usize, h: usize, p: usize| {
        let at = (p * heads + h) * D;
        let mut x = script.0[layer][what][at..at + D].to_vec();
        g.rope.rotate(p as u32, &mut x);
        x
    };
    let kv = head / g.group();
    let q = rotated(2, 4, head, query);
    let scores: Vec<f64> = rows
        .iter()
        .map(|&p| {
            let k = rotated(0, 2, kv, p);
            let dot: f64 = q
                .iter()
                .zip(&k)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum();
            dot * f64::from(g.scale)
        })
        .collect();
    let m = scores.iter().copied().fold(f64::MIN, f64::max);
    let total: f64 = scores.iter().map(|s| (s - m).exp()).sum();
    let weights: Vec<f64> = scores.iter().map(|s| (s - m).exp() / total).collect();
    let mut out = vec![0.0; D];
    for (w, &p) in weights.iter().zip(rows) {
        for (o, v) in out.iter_mut().zip(&script.0[layer][1][(p * 2 + kv) * D..]) {
            *o += w * f64::from(*v);
        }
    }
    (weights, out)
}

/// The `n` coded rows with the most weight over the queries of a KV head.
fn first_by_oracle(
    script: &Script,
    layer: usize,
    kv: usize,
    query: usize,
    coded: std::ops::Range<usize>,
    n: usize,
) -> Vec<u32> {
    let rows: Vec<usize> = (0..=query).collect();
    let of = |head| oracle(script, layer, head, query, &rows).0;
    let (a, b) = (of(2 * kv), of(2 * kv + 1));
    let mut ranked: Vec<usize> = coded.collect();
    ranked.sort_by(|&x, &y| (a[y] + b[y]).total_cmp(&(a[x] + b[x])).then(x.cmp(&y)));
    let mut first: Vec<u32> = ranked[..n].iter().map(|&p| p as u32).collect();
    first.sort_unstable();
    first
}

fn fetched(cache: &StagedCache, layer: usize, kv: usize) -> Vec<u32> {
    let state = cache.sparse.as_ref().unwrap().states().next().unwrap();
    let HeadReading::Fetched(tables) = state.head(layer, kv) else {
        panic!("nothing is fetched here");
    };
    let [k, v] = tables
        .each_ref()
        .map(|t| t.positions().collect::<Vec<u32>>());
    assert_eq!(k, v);
    k
}

fn error(got: &[f32], want: &[f64]) -> f64 {
    let sq = |x: f64| x * x;
    let e: f64 = got
        .iter()
        .zip(want)
        .map(|(g, w)| sq(f64::from(*g) - w))
        .sum();
    (e / want.iter().map(|w| sq(*w)).sum::<f64>()).sqrt()
}

fn output_error(script: &Script, out: &[Vec<f32>], query: usize) -> f64 {
    let rows: Vec<usize> = (0..=query).collect();
    let errors = (0..2)
        .flat_map(|l| (0..4).map(move |h| (l, h)))
        .map(|(layer, head)| {
            let (_, want) = oracle(script, layer, head, query, &rows);
            error(&out[layer][head * D..(head + 1) * D], &want)
        });
    errors.fold(0.0, f64::max)
}

#[test]
fn the_rows_that_a_token_attends_to_most_are_read_exact() {
    let script = Script::new(1);
    let n = 260;
    // Rows 2 to 239 are coded when 260 are there: the tail is 20.
    for tier in ["memory", "file"] {
        let mut cache = script.compressed(&specache("f16", 9, "demand", tier), n);
        script.step(&mut cache, SEQ, n..n + 1, 0).unwrap();
        for (layer, kv) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let want = first_by_oracle(&script, layer, kv, n, 2..240, 9);
            assert_eq!(
                fetched(&cache, layer, kv),
                want,
                "{tier} layer {layer} KV head {kv}"
            );
        }
    }
    let error = |tokens, fetch| {
        let strategy = specache("nvfp4", tokens, fetch, "file");
        let mut cache = script.compressed(&strategy, n);
        let out = script.step(&mut cache, SEQ, n..n + 1, 0).unwrap();
        output_error(&script, &out, n)
    };
    let plain = error(1, "speculative");
    let (some, more, all) = (error(20, "demand"), error(100, "demand"), error(1, "all"));
    assert!(plain > 0.02 && some < 0.7 * plain, "{plain} {some}");
    assert!(more < 0.5 * some && all < 1e-3, "{more} {all}");
}

#[test]
fn a_token_that_is_tried_out_asks_for_the_next_one_s_rows_and_leaves_nothing() {
    let script = Script::new(2);
    let n = 260;
    let strategy = specache("f16", 9, "speculative", "file");
    let mut cache = script.compressed(&strategy, n);
    let before = cache.memory();
    assert_eq!(cache.trial(SEQ), Trial::Next);
    // The next token alone, before its own step; and then with the one after it: guesses that are right.
    script.step(&mut cache, SEQ, n..n + 1, 1).unwrap();
    assert_eq!(cache.len(SEQ).unwrap(), n as u32);
    let after = cache.memory();
    assert_eq!(
        (before.exact_bytes, before.rows_live, before.rows_seen),
        (after.exact_bytes, after.rows_live, after.rows_seen)
    );
    cache.expect(SEQ, 17);
    assert_eq!(cache.trial(SEQ), Trial::Token(17));
    for query in n..n + 3 {
        script.step(&mut cache, SEQ, query..query + 2, 1).unwrap();
        assert_eq!(cache.len(SEQ).unwrap(), query as u32 + 1);
        for (layer, kv) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let want = first_by_oracle(&script, layer, kv, query, 2..240, 9);
            assert_eq!(
                fetched(&cache, layer, kv),
                want,
                "query {query} layer {layer} KV head {kv}"
            );
        }
    }
    let m = cache.memory();
    // Three rows of the continuation in f32 and nine that came back in f16, K and V of four heads; K and V of all coded ones.
    assert_eq!(
        m.exact_bytes - before.exact_bytes,
        (3 * 4 + 9 * 2) * 2 * 4 * D as u64
    );
    assert_eq!(m.backing_bytes, 2 * 4 * 128 * 4 * D as u64);
}

#[test]
fn a_wrong_guess_costs_hits_and_changes_no_stored_row() {
    let script = Script::new(3);
    let n = 260;
    let mut cache = script.compressed(&specache("f16", 9, "speculative", "memory"), n);
    cache.watch(Watch::Hits, None);
    script.step(&mut cache, SEQ, n..n + 1, 1).unwrap();
    script.step(&mut cache, SEQ, n..n + 2, 1).unwrap();
    let right = cache.traffic().unwrap();
    assert_eq!(
        (right.n_steps, right.rows_wanted, right.rows_hit),
        (1, 36, 36)
    );
    assert_eq!(right.n_cached_reads, 0);
    assert!(
        right.moved_bytes >= 36 * 4 * D as u64 && right.n_reads > 0,
        "{right:?}"
    );
    assert!(
        right.read_bytes > 0 && right.read_bytes <= right.readable_bytes,
        "{right:?}"
    );
    // The tried token was n + 1; the real one gets other rows.
    let other = Script::new(4);
    cache.watch(Watch::Hits, None);
    other.step(&mut cache, SEQ, n + 1..n + 2, 0).unwrap();
    let wrong = cache.traffic().unwrap();
    assert!(wrong.rows_wanted == 36 && wrong.rows_hit < 18, "{wrong:?}");
}

#[test]
fn k_and_v_that_are_coded_at_different_times_come_back_apart() {
    let script = Script::new(10);
    let n = 260;
    let error = |tail| {
        let strategy = Strategy {
            tail,
            ..specache("int2", 1, "all", "memory")
        };
        let mut cache = script.compressed(&strategy, n);
        let out = script.step(&mut cache, SEQ, n..n + 1, 0).unwrap();
        output_error(&script, &out, n)
    };
    for tail in [Tail { k: 0, v: 100 }, Tail { k: 100, v: 0 }] {
        let error = error(tail);
        assert!(error < 1e-3, "{tail} {error}");
    }
}

#[test]
fn a_page_that_is_full_is_read_once_in_the_step_that_fills_it() {
    let script = Script::new(11);
    let params = |page| {
        [
            ("axis", Value::Text("channel".into())),
            ("page", Value::Int(page)),
            ("group", Value::Int(page)),
        ]
        .map(|(k, v)| (k.to_owned(), v))
    };
    let strategy = Strategy {
        encode_v: StageSpec {
            name: "int8".into(),
            params: Params(params(16).into_iter().collect()),
        },
        tail: Tail { k: 0, v: 0 },
        ..specache("f16", 4, "all", "memory")
    };
    let mut cache = built(&strategy).unwrap();
    cache.admit(SEQ, Admission::Streaming).unwrap();
    for query in 0..70 {
        let out = script.step(&mut cache, SEQ, query..query + 1, 0).unwrap();
        let error = output_error(&script, &out, query);
        assert!(error < 1e-2, "query {query}: {error}");
    }
}

#[test]
fn tiers_threads_and_forks_give_the_same_bits() {
    let script = Script::new(5);
    let n = 200;
    let steps = |cache: &mut StagedCache, seq: SeqId, from: usize| {
        let step = |at: usize| script.step(cache, seq, at..at + 2, 1).unwrap();
        (from..from + 6).map(step).collect::<Vec<_>>()
    };
    let run = |tier: &str, n_threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads);
        pool.build().unwrap().install(|| {
            let mut cache = script.compressed(&specache("q4_0", 7, "speculative", tier), n);
            let first = steps(&mut cache, SEQ, n);
            cache.fork(SEQ, SeqId(9)).unwrap();
            let mut both = [SEQ, SeqId(9)].map(|seq| steps(&mut cache, seq, n + 6));
            assert_eq!(both[0], both[1]);
            cache.release(SEQ).unwrap();
            let later = steps(&mut cache, SeqId(9), n + 12);
            cache.release(SeqId(9)).unwrap();
            assert_eq!(
                (
                    cache.memory().backing_bytes,
                    cache.memory().resident_bytes()
                ),
                (0, 0)
            );
            both[0].extend(first);
            both[0].extend(later);
            both[0].clone()
        })
    };
    let want = run("memory", 1);
    assert_eq!(want, run("file", 2));
    assert_eq!(want, run("memory", 3));
}

#[test]
fn while_decoding_rows_that_age_join_the_tier_and_forks_part() {
    let script = Script::new(6);
    for encode in ["q4_0", "nvfp4"] {
        let mut cache = built(&specache(encode, 5, "demand", "file")).unwrap();
        cache.admit(SEQ, Admission::Streaming).unwrap();
        let run = |cache: &mut StagedCache, seq, tokens: std::ops::Range<usize>| {
            tokens
                .map(|t| script.step(cache, seq, t..t + 1, 0).unwrap())
                .collect::<Vec<_>>()
        };
        run(&mut cache, SEQ, 0..140);
        cache.fork(SEQ, SeqId(1)).unwrap();
        let own = run(&mut cache, SEQ, 140..190);
        let fork = run(&mut cache, SeqId(1), 140..190);
        assert_eq!(own, fork);
        // Rows 2 to 169 are coded: the vault of each sequence and head has two ranges, the first one shared if unchanged.
        let blocks = cache.memory().backing_bytes / (128 * 4 * D as u64);
        assert_eq!(blocks, 4 * 4, "{encode}");
        let error = output_error(&script, &own[49], 189);
        assert!(error < 0.3, "{error}");
        let refused = cache.truncate(SEQ, 150).unwrap_err();
        assert!(
            matches!(refused, CacheError::Irreversible { earliest: 190, .. }),
            "{refused}"
        );
    }
}

#[test]
fn what_can_t_be_read_so_is_refused() {
    let budget = Strategy {
        budget: Some(Budget {
            bytes: 1 << 20,
            scope: Scope::Sequence,
            steps: Vec::new(),
            then: Vec::new(),
        }),
        ..specache("q8_0", 4, "demand", "memory")
    };
    let predicted = Strategy {
        project_k: vec![StageSpec::plain("aqua")],
        project_v: vec![StageSpec::plain("aqua")],
        ..quest(64, 0)
    };
    let small = quest(8, 0);
    for (strategy, word) in [
        (budget, "`budget`"),
        (predicted, "`aqua`"),
        (small, "a block of 16"),
    ] {
        let error = built(&strategy).err().unwrap().to_string();
        assert!(error.contains(word), "{error}");
    }
}
