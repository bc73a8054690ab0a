//! Every registered format, row by row or page by page as the cache calls it: `cargo bench --bench codecs`.
//!
//! CPU time of one thread. Each line has two throughputs of the same run, in 10⁹ bytes per second: of the f32 numbers
//! that went in or came out, and of the bytes that are stored for them. The rows fit the second-level cache.

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::ValueFormatter;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvlab::cache::Geometry;
use kvlab::cache::stage::{
    BuildContext, Codec, HeadContext, KeyForm, Kind, Params, Side, Stage, StageDef, Value, registry,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use support::{CpuTime, Usual};

mod support;

/// SmolLM2's head_dim, and the most frequent one.
const DIMS: [usize; 2] = [64, 128];
const N_NUMBERS: usize = 1 << 16;

/// Bytes are those of f32 numbers, elements those that are stored.
struct Rates;

impl ValueFormatter for Rates {
    fn format_throughput(&self, throughput: &Throughput, ns: f64) -> String {
        match throughput {
            Throughput::Bytes(n) => format!("{:.2} GB/s of f32", *n as f64 / ns),
            Throughput::Elements(n) => format!("{:.2} GB/s stored", *n as f64 / ns),
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

fn built(def: &StageDef, example: &str, dim: usize) -> Option<Codec> {
    let table: toml::Table = format!("x = {example}").parse().ok()?;
    let mut given = Params::default();
    for (key, value) in table["x"].as_table().into_iter().flatten() {
        if key != "method" {
            let value: Value = value.clone().try_into().ok()?;
            given.0.insert(key.clone(), value);
        }
    }
    let samples = [numbers(256 * dim, 3), numbers(256 * dim, 4)];
    let context = BuildContext {
        geometry: &Geometry { layers: Vec::new() },
        keys: KeyForm::PostRope,
        side: Side::K,
        calibration: None,
        backing_dir: None,
        head: Some(HeadContext {
            samples: &samples,
            ..HeadContext::any(dim)
        }),
    };
    match (def.build)(&Params::resolve(def, &given).ok()?, &context) {
        Ok(Stage::Encode(codec)) => Some(codec),
        _ => None,
    }
}

/// Rows that one call of the codec takes, and the bytes that they become.
fn unit(codec: &Codec, dim: usize) -> (usize, usize) {
    match codec {
        Codec::Rows(c) => (1, c.row_bytes(dim)),
        Codec::Pages(c) => (c.page_rows(), c.page_bytes(c.page_rows(), dim)),
    }
}

fn encode(codec: &Codec, dim: usize, rows: &[f32], bytes: &mut [u8]) {
    let (n_rows, n_bytes) = unit(codec, dim);
    for (rows, bytes) in rows
        .chunks_exact(n_rows * dim)
        .zip(bytes.chunks_exact_mut(n_bytes))
    {
        match codec {
            Codec::Rows(c) => c.encode(rows, bytes),
            Codec::Pages(c) => c.encode(rows, dim, bytes),
        }
    }
}

fn decode(codec: &Codec, dim: usize, bytes: &[u8], rows: &mut [f32]) {
    let (n_rows, n_bytes) = unit(codec, dim);
    match codec {
        Codec::Rows(c) => c.decode_rows(bytes, dim, rows),
        Codec::Pages(c) => {
            for (bytes, rows) in bytes
                .chunks_exact(n_bytes)
                .zip(rows.chunks_exact_mut(n_rows * dim))
            {
                c.decode(bytes, dim, rows);
            }
        }
    }
}

fn formats(c: &mut Criterion<CpuTime<Rates>>) {
    for dim in DIMS {
        let rows = numbers(N_NUMBERS, 5);
        let mut back = rows.clone();
        let mut group = c.benchmark_group(format!("{dim} channels"));
        for def in registry().filter(|d| d.kind == Kind::Encode) {
            for example in def.examples {
                let Some(codec) = built(def, example, dim) else {
                    continue;
                };
                let (n_rows, n_bytes) = unit(&codec, dim);
                let mut bytes = vec![0; N_NUMBERS / (n_rows * dim) * n_bytes];
                group.throughput(Throughput::ElementsAndBytes {
                    elements: bytes.len() as u64,
                    bytes: 4 * N_NUMBERS as u64,
                });
                group.bench_function(format!("{example} encode"), |bench| {
                    bench.iter(|| encode(&codec, dim, black_box(&rows), &mut bytes))
                });
                group.bench_function(format!("{example} decode"), |bench| {
                    bench.iter(|| decode(&codec, dim, black_box(&bytes), &mut back))
                });
            }
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
    targets = formats
}
criterion_main!(benches);
