//! Small geometries, seeded rows, strategies made from registry examples, and a driver that feeds a cache.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvlab::cache::rope::{PairLayout, Rope};
use kvlab::cache::stage::{
    BuildContext, Calibration, Codec, HeadContext, HeadCovariance, HeadRows, KeyForm, Kind, Params,
    Side, Stage, StageDef, Value, find, registry,
};
use kvlab::cache::strategy::{StageSpec, Strategy, Tail};
use kvlab::cache::{
    Admission, Batch, CacheError, Geometry, KvCache, LayerGeometry, Materials, Rows, SeqId,
    StagedCache,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Two layers; positions up to 1024.
pub fn geometry(n_heads: usize, n_kv_heads: usize, head_dim: usize) -> Geometry {
    let rope = Arc::new(Rope::new(
        PairLayout::HalfSplit,
        Rope::frequencies(10_000.0, head_dim / 2 * 2),
        1024,
    ));
    let layer = LayerGeometry {
        n_heads,
        n_kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        rope,
        window: None,
    };
    Geometry {
        layers: vec![layer.clone(), layer],
    }
}

/// 4 query heads, 2 KV heads, 32 channels.
pub fn tiny() -> Geometry {
    geometry(4, 2, 32)
}

/// One sequence's inputs: per layer K and V before RoPE, and queries.
#[derive(Clone)]
pub struct Script {
    pub k: Vec<Vec<f32>>,
    pub v: Vec<Vec<f32>>,
    pub q: Vec<Vec<f32>>,
    pub n_tokens: usize,
}

/// Gaussian-like rows with a few outlier channels, as real keys have.
pub fn script(geometry: &Geometry, n_tokens: usize, seed: u64, scale: f32) -> Script {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut normal = |n: usize, dim: usize| -> Vec<f32> {
        (0..n * dim)
            .map(|i| {
                let sum: f32 = (0..6).map(|_| rng.random_range(-1.0f32..1.0)).sum();
                scale * sum * if i % dim == 3 { 4.0 } else { 1.0 }
            })
            .collect()
    };
    let mut s = Script {
        k: vec![],
        v: vec![],
        q: vec![],
        n_tokens,
    };
    for l in &geometry.layers {
        s.k.push(normal(n_tokens * l.n_kv_heads, l.head_dim));
        s.v.push(normal(n_tokens * l.n_kv_heads, l.head_dim));
        s.q.push(normal(n_tokens * l.n_heads, l.head_dim));
    }
    s
}

/// A calibration with full-rank, uneven second moments.
pub fn calibration(geometry: &Geometry) -> Calibration {
    let head = |d: usize, seed: u64| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut m = vec![0.0f64; d * d];
        for _ in 0..4 * d {
            let x: Vec<f64> = (0..d)
                .map(|i| rng.random_range(-1.0..1.0) * (1.0 + (d - i) as f64 / 8.0))
                .collect();
            for i in 0..d {
                for j in 0..d {
                    m[i * d + j] += x[i] * x[j];
                }
            }
        }
        m
    };
    let heads = geometry
        .layers
        .iter()
        .enumerate()
        .map(|(l, g)| {
            (0..g.n_kv_heads)
                .map(|h| {
                    let seed = (l * 16 + h) as u64 * 3;
                    HeadCovariance {
                        k_pre: head(g.head_dim, seed),
                        k_post: head(g.head_dim, seed + 1),
                        v: head(g.head_dim, seed + 2),
                    }
                })
                .collect()
        })
        .collect();
    let mut rng = ChaCha8Rng::seed_from_u64(99);
    // As the codec suite draws the rows that it codes.
    let mut number = || (0..4).map(|_| rng.random_range(-1.0f32..1.0)).sum();
    let mut rows = |n: usize| (0..n).map(|_| number()).collect();
    let rows = geometry
        .layers
        .iter()
        .map(|g| {
            (0..g.n_kv_heads)
                .map(|_| HeadRows {
                    k: rows(128 * g.head_dim),
                    v: rows(128 * g.head_dim),
                })
                .collect()
        })
        .collect();
    Calibration {
        heads,
        n_tokens: 128,
        rows,
        positions: (0..128).collect(),
    }
}

/// Parses a registry example (`"q4_0"` or `{ method = "window", recent = 64 }`).
pub fn parse_example(example: &str) -> StageSpec {
    let table: toml::Table = format!("x = {example}")
        .parse()
        .expect("an example is a TOML value");
    match &table["x"] {
        toml::Value::String(name) => StageSpec::plain(name),
        toml::Value::Table(t) => {
            let mut params = BTreeMap::new();
            let mut name = String::new();
            for (key, value) in t {
                let value = match value {
                    toml::Value::Integer(i) => Value::Int(*i),
                    toml::Value::Float(f) => Value::Float(*f),
                    toml::Value::String(s) if key == "method" => {
                        name = s.clone();
                        continue;
                    }
                    toml::Value::String(s) => Value::Text(s.clone()),
                    other => panic!("unexpected value in example {example}: {other}"),
                };
                params.insert(key.clone(), value);
            }
            StageSpec {
                name,
                params: Params(params),
            }
        }
        other => panic!("unexpected example {example}: {other}"),
    }
}

/// Puts a stage into a strategy.
pub fn add(strategy: &mut Strategy, kind: Kind, spec: StageSpec) {
    match kind {
        Kind::Retain => strategy.retain = Some(spec),
        Kind::Project => {
            strategy.project_k.push(spec.clone());
            strategy.project_v.push(spec);
        }
        Kind::Encode => {
            strategy.encode_k = spec.clone();
            strategy.encode_v = spec;
        }
        Kind::Pack => strategy.pack = Some(spec),
        Kind::Place => strategy.place = Some(spec),
    }
}

/// Small examples of every stage: what the registry names, with budgets that bite on short sequences.
pub fn examples(def: &StageDef) -> Vec<StageSpec> {
    def.examples
        .iter()
        .map(|e| {
            let mut spec = parse_example(e);
            for (name, small) in [("recent", 24), ("tokens", 40), ("rank", 16)] {
                if spec.params.int(name).is_some_and(|v| v > small) {
                    spec.params.0.insert(name.to_owned(), Value::Int(small));
                }
            }
            spec
        })
        .collect()
}

/// Every registered stage alone over f16, bare and with 2 sinks and a tail of 20, for both key forms.
pub fn matrix() -> Vec<Strategy> {
    let mut all = Vec::new();
    for def in registry() {
        for spec in examples(def) {
            let mut s = Strategy::bare("f16");
            s.label = format!("{} {}", def.kind, spec.name);
            add(&mut s, def.kind, spec);
            all.push(s.clone());
            s.tail = Tail::both(20);
            s.sinks = 2;
            s.label += " tail 20";
            all.push(s.clone());
            s.keys = kvlab::cache::stage::KeyForm::PreRope;
            s.label += " pre-RoPE";
            all.push(s);
        }
    }
    all.extend(predicted());
    all
}

/// Predictions over lossy codecs: row-wise, page-wise on both sides, and on one alone.
pub fn predicted() -> Vec<Strategy> {
    const BY_CHANNEL: &str = r#"{ method = "int4", axis = "channel", group = 32 }"#;
    const LARGER: &str = r#"{ method = "int3", axis = "channel" }"#;
    let mut all = Vec::new();
    for (k, v) in [
        (r#""q4_0""#, r#""q4_0""#),
        (LARGER, BY_CHANNEL),
        (BY_CHANNEL, r#""int4""#),
    ] {
        for keys in [KeyForm::PostRope, KeyForm::PreRope] {
            for (tail, sinks) in [(0, 0), (20, 3)] {
                let mut s = Strategy::bare("f16");
                (s.encode_k, s.encode_v) = (parse_example(k), parse_example(v));
                s.project_k = vec![StageSpec::plain("aqua")];
                s.project_v = vec![StageSpec::plain("aqua"), StageSpec::plain("hadamard")];
                (s.keys, s.tail, s.sinks) = (keys, Tail::both(tail), sinks);
                s.label = format!("aqua {k}/{v} tail {tail} sinks {sinks} {keys:?}");
                all.push(s);
            }
        }
    }
    all
}

/// Whether the strategy predicts layers, which must then be alike.
pub fn predicts(strategy: &Strategy) -> bool {
    strategy.project_k.iter().any(|s| s.name == "aqua")
}

/// Whether a codec of the strategy codes whole pages.
pub fn is_page_wise(strategy: &Strategy) -> bool {
    [&strategy.encode_k, &strategy.encode_v].iter().any(|spec| {
        let def = find(Kind::Encode, &spec.name).expect("a registered stage");
        let context = BuildContext {
            geometry: &tiny(),
            keys: strategy.keys,
            side: Side::K,
            calibration: None,
            backing_dir: None,
            head: Some(HeadContext::any(32)),
        };
        matches!(
            (def.build)(&spec.params, &context),
            Ok(Stage::Encode(Codec::Pages(_)))
        )
    })
}

/// Builds a cache with a random calibration at hand.
pub fn build(strategy: &Strategy, geometry: &Geometry) -> StagedCache {
    let calibration = calibration(geometry);
    let materials = Materials {
        geometry,
        calibration: Some(&calibration),
        backing_dir: None,
    };
    StagedCache::new(strategy, materials).unwrap_or_else(|e| panic!("{}: {e}", strategy.label))
}

/// Feeds tokens `from..to` of a script as one span and returns every layer's attention output.
pub fn step(
    cache: &mut dyn KvCache,
    geometry: &Geometry,
    seq: SeqId,
    script: &Script,
    range: std::ops::Range<usize>,
) -> Result<Vec<Vec<f32>>, CacheError> {
    let batch = Batch::single(seq, range.start as u32..range.end as u32);
    let mut outs = Vec::new();
    for (l, g) in geometry.layers.iter().enumerate() {
        let (kv, qw) = (g.n_kv_heads * g.head_dim, g.n_heads * g.head_dim);
        let rows = Rows {
            k: &script.k[l][range.start * kv..range.end * kv],
            v: &script.v[l][range.start * kv..range.end * kv],
            hidden: &[],
        };
        cache.append(l, &batch, rows)?;
        let mut out = vec![0.0; range.len() * qw];
        cache.attend(
            l,
            &batch,
            &script.q[l][range.start * qw..range.end * qw],
            &mut out,
        )?;
        outs.push(out);
    }
    cache.commit(&batch)?;
    Ok(outs)
}

/// Runs a whole script in chunks (cycled), streaming; outputs are `[layer][token · head · dim]`.
pub fn run(
    cache: &mut dyn KvCache,
    geometry: &Geometry,
    seq: SeqId,
    script: &Script,
    chunks: &[usize],
) -> Vec<Vec<f32>> {
    cache
        .admit(seq, Admission::Streaming)
        .expect("a fresh sequence");
    resume(cache, geometry, seq, script, 0..script.n_tokens, chunks)
}

/// Goes on with tokens `range` of a script.
pub fn resume(
    cache: &mut dyn KvCache,
    geometry: &Geometry,
    seq: SeqId,
    script: &Script,
    range: std::ops::Range<usize>,
    chunks: &[usize],
) -> Vec<Vec<f32>> {
    let mut all = vec![Vec::new(); geometry.layers.len()];
    let (mut at, mut i) = (range.start, 0);
    while at < range.end {
        let n = chunks[i % chunks.len()].min(range.end - at);
        let outs = step(cache, geometry, seq, script, at..at + n).expect("a valid step");
        for (all, out) in all.iter_mut().zip(outs) {
            all.extend(out);
        }
        at += n;
        i += 1;
    }
    all
}

/// Bit patterns, for exact comparison with a readable position of the first difference.
pub fn assert_bits(what: &str, a: &[Vec<f32>], b: &[Vec<f32>]) {
    for (l, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.len(), b.len(), "{what}: layer {l} lengths");
        if let Some(i) = (0..a.len()).find(|&i| a[i].to_bits() != b[i].to_bits()) {
            panic!("{what}: layer {l}, value {i}: {} and {}", a[i], b[i]);
        }
    }
}
