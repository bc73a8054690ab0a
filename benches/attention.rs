//! Attention of one token over contexts of several lengths, for every format: `cargo bench --bench attention [FILTER]`.
//!
//! SmolLM2's shape: 30 layers, 3 KV heads of 64 channels with 3 query heads each; fewer layers where memory would not
//! suffice. All layers are read in turn, as a step of decoding reads them, so what does not fit a cache is read from
//! beyond it. One thread's CPU time. Each line has the time of a row of one KV head (K and V), and the bytes read.
//!
//! The floor: a row takes 2 · 64 · 3 multiply-adds, 24 instructions of 16 lanes, one per clock on a machine with one such
//! unit; f16 rows take 256 bytes, rows of 4.5 bits 72.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::measurement::ValueFormatter;
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use kvlab::cache::rope::{PairLayout, Rope};
use kvlab::cache::stage::{Calibration, HeadCovariance, HeadRows, Kind, Value, registry};
use kvlab::cache::strategy::{StageSpec, Strategy, Tail};
use kvlab::cache::{
    Admission, Batch, Geometry, KvCache, LayerGeometry, Materials, Rows, SeqId, StagedCache,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use support::{CpuTime, Usual};

mod support;

const N_KV_HEADS: usize = 3;
const GROUP: usize = 3;
const HEAD_DIM: usize = 64;
/// Context, and layers.
const SIZES: [(usize, usize); 5] = [(512, 1), (512, 30), (2048, 30), (8192, 30), (65_536, 3)];

/// Tokens of a run over short contexts.
const N_STEPS: usize = 16;

/// Elements are rows, bytes are those read.
struct Rates;

impl ValueFormatter for Rates {
    fn format_throughput(&self, throughput: &Throughput, ns: f64) -> String {
        match throughput {
            Throughput::Bytes(n) => format!("{:.1} GB/s", *n as f64 / ns),
            Throughput::Elements(n) => format!("{:.2} ns per row or token", ns / *n as f64),
            other => Usual.format_throughput(other, ns),
        }
    }

    fn scale_values(&self, typical: f64, values: &mut [f64]) -> &'static str {
        Usual.scale_values(typical, values)
    }

    fn scale_throughputs(
        &self,
        typical: f64,
        throughput: &Throughput,
        values: &mut [f64],
    ) -> &'static str {
        Usual.scale_throughputs(typical, throughput, values)
    }

    fn scale_for_machines(&self, values: &mut [f64]) -> &'static str {
        Usual.scale_for_machines(values)
    }
}

/// Numbers with a bell's shape.
fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n)
        .map(|_| (0..4).map(|_| rng.random_range(-1.0f32..1.0)).sum())
        .collect()
}

fn geometry(n_layers: usize, n_positions: usize) -> Geometry {
    let frequencies = Rope::frequencies(100_000.0, HEAD_DIM);
    let layer = LayerGeometry {
        n_heads: N_KV_HEADS * GROUP,
        n_kv_heads: N_KV_HEADS,
        head_dim: HEAD_DIM,
        scale: 0.125,
        rope: Arc::new(Rope::new(PairLayout::HalfSplit, frequencies, n_positions)),
        window: None,
    };
    Geometry {
        layers: vec![layer; n_layers],
    }
}

fn calibration(n_layers: usize) -> Calibration {
    let n = 200;
    let head = |seed| HeadRows {
        k: numbers(n * HEAD_DIM, seed),
        v: numbers(n * HEAD_DIM, seed + 1),
    };
    let identity: Vec<f64> = (0..HEAD_DIM * HEAD_DIM)
        .map(|i| f64::from(u8::from(i % (HEAD_DIM + 1) == 0)))
        .collect();
    let moments = HeadCovariance {
        k_pre: identity.clone(),
        k_post: identity.clone(),
        v: identity,
    };
    Calibration {
        heads: vec![vec![moments; N_KV_HEADS]; n_layers],
        n_tokens: n,
        rows: vec![(0..N_KV_HEADS as u64).map(|h| head(10 + 2 * h)).collect(); n_layers],
        positions: (0..n as u32).collect(),
    }
}

/// A stage as a TOML names it.
fn spec(text: &str) -> Option<StageSpec> {
    let table: toml::Table = format!("x = {text}").parse().ok()?;
    let mut spec = StageSpec::plain(table["x"].as_str().unwrap_or_default());
    for (key, value) in table["x"].as_table().into_iter().flatten() {
        if key == "method" {
            spec.name = value.as_str()?.to_owned();
        } else {
            let value: Value = value.clone().try_into().ok()?;
            spec.params.0.insert(key.clone(), value);
        }
    }
    let def = registry().find(|d| d.kind == Kind::Encode && d.name == spec.name)?;
    spec.params = kvlab::cache::stage::Params::resolve(def, &spec.params).ok()?;
    Some(spec)
}

/// Formats beyond the registry's examples: presets read them, or they have kernels that no example has.
const MORE: [&str; 7] = [
    "{ method = \"int2\", fit = \"mse\", scales = \"fp8\" }",
    "{ method = \"int3\", fit = \"mse\", scales = \"fp8\" }",
    "{ method = \"int8\", scales = \"fp8\" }",
    "{ method = \"int4\", scales = \"bf16\" }",
    "{ method = \"int3\", axis = \"channel\", group = 128 }",
    "{ method = \"int4\", axis = \"channel\", group = 128 }",
    "{ method = \"int8\", axis = \"channel\", group = 128 }",
];

/// Names of strategies with their formats of K and of V.
fn formats() -> Vec<(String, StageSpec, StageSpec)> {
    let by_channel = "{ method = \"int4\", axis = \"channel\", group = 64, page = 128 }";
    let mut all = vec![(
        "int4 K by channel, V by token".to_owned(),
        by_channel,
        "\"int4\"",
    )];
    for def in registry().filter(|d| d.kind == Kind::Encode) {
        all.extend(def.examples.iter().map(|&e| (e.to_owned(), e, e)));
    }
    all.extend(MORE.map(|e| (e.to_owned(), e, e)));
    all.into_iter()
        .filter_map(|(name, k, v)| Some((name, spec(k)?, spec(v)?)))
        .collect()
}

/// A cache of one sequence of `n` tokens.
fn filled(strategy: &Strategy, geometry: &Geometry, n: usize) -> StagedCache {
    let calibration = calibration(geometry.layers.len());
    let materials = Materials {
        geometry,
        calibration: Some(&calibration),
        backing_dir: None,
    };
    let mut cache = StagedCache::new(strategy, materials).expect("the strategy can be built");
    let seq = SeqId(0);
    let fits = "a fresh sequence takes in what follows";
    cache.admit(seq, Admission::Streaming).expect(fits);
    let width = N_KV_HEADS * HEAD_DIM;
    let chunk = 128;
    let (k, v) = (numbers(chunk * width, 3), numbers(chunk * width, 4));
    for first in (0..n).step_by(chunk) {
        let batch = Batch::single(seq, first as u32..(first + chunk) as u32);
        for layer in 0..geometry.layers.len() {
            let rows = Rows {
                k: &k,
                v: &v,
                hidden: &[],
                residual_norms: &[],
            };
            cache.append(layer, &batch, rows).expect(fits);
        }
        cache.commit(&batch).expect(fits);
    }
    cache
}

/// Bytes of K and V of a token in one KV head.
fn row_bytes(strategy: &Strategy) -> u64 {
    let n = 128;
    let memory = filled(strategy, &geometry(1, 512), n).memory();
    (memory.payload_bytes + memory.scale_bytes) / (n * N_KV_HEADS) as u64
}

fn contexts(c: &mut Criterion<CpuTime<Rates>>) {
    // A pool that exists already has as many threads as it has: then the times are those of all of them.
    let _ = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build_global();
    for (n, n_layers) in SIZES {
        let geometry = geometry(n_layers, n + 1);
        let mut group = c.benchmark_group(format!("{n} rows, {n_layers} layers"));
        let q = numbers(N_KV_HEADS * GROUP * HEAD_DIM, 5);
        for (name, encode_k, encode_v) in formats() {
            let strategy = Strategy {
                encode_k,
                encode_v,
                ..Strategy::bare("x")
            };
            let mut cache = None;
            // The token asks from the last position that is stored.
            let batch = Batch::single(SeqId(0), n as u32 - 1..n as u32);
            let mut out = vec![0.0; q.len()];
            let elements = (n * N_KV_HEADS * n_layers) as u64;
            group.throughput(Throughput::ElementsAndBytes {
                elements,
                bytes: elements * row_bytes(&strategy),
            });
            group.bench_function(name, |bench| {
                let cache = cache.get_or_insert_with(|| filled(&strategy, &geometry, n));
                bench.iter(|| {
                    for layer in 0..n_layers {
                        cache
                            .attend(layer, &batch, black_box(&q), &mut out)
                            .expect("the sequence is there");
                    }
                })
            });
        }
    }
}

/// What a token costs in all layers beside the model's own work: append, attend, commit. After 128 tokens, with the exact
/// rows that presets have and without.
fn short(c: &mut Criterion<CpuTime<Rates>>) {
    let n = 128;
    let geometry = geometry(30, n + N_STEPS);
    let width = N_KV_HEADS * HEAD_DIM;
    let (k, v) = (numbers(width, 3), numbers(width, 4));
    let q = numbers(GROUP * width, 5);
    let mut group = c.benchmark_group("a token after 128");
    group.throughput(Throughput::Elements(N_STEPS as u64));
    for (name, encode_k, encode_v) in formats() {
        for (exact, sinks, tail) in [("", 0, 0), (", 4 sinks, a tail of 32", 4, 32)] {
            let strategy = Strategy {
                encode_k: encode_k.clone(),
                encode_v: encode_v.clone(),
                sinks,
                tail: Tail::both(tail),
                ..Strategy::bare("x")
            };
            let step = |mut cache: StagedCache| {
                let mut out = vec![0.0; q.len()];
                for p in n as u32..(n + N_STEPS) as u32 {
                    let batch = Batch::single(SeqId(0), p..p + 1);
                    for layer in 0..geometry.layers.len() {
                        let rows = Rows {
                            k: &k,
                            v: &v,
                            hidden: &[],
                            residual_norms: &[],
                        };
                        let done = cache.append(layer, &batch, rows);
                        let done = done.and_then(|()| cache.attend(layer, &batch, &q, &mut out));
                        done.expect("the sequence is there");
                    }
                    cache.commit(&batch).expect("the sequence is there");
                }
                cache
            };
            group.bench_function(format!("{name}{exact}"), |bench| {
                bench.iter_batched(
                    || filled(&strategy, &geometry, n),
                    step,
                    BatchSize::PerIteration,
                )
            });
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .with_measurement(CpuTime::new(Rates))
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(300));
    targets = contexts, short
}
criterion_main!(benches);
