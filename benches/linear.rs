//! Linear layers against this machine's peak: `cargo bench --bench linear`.
//!
//! CPU time of the process is measured, so a busy machine distorts the numbers little. `peak` is what fused
//! multiply-adds reach on operands in the first-level cache, `read` what one pass over memory reaches: the quotient of two
//! throughputs is what a layer makes of the machine. Decoding walks through more weights than the caches hold, as a model
//! does. Weights are counted as multiply-adds (2 flop each), whatever they are stored in.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvlab::compute::cpu::gemm::{Dims, Mat, MatMut, gemm};
use kvlab::compute::cpu::linear::Matrix;
use kvlab::model::gguf::TensorType;
use kvlab::model::ops::Arithmetic;
use kvlab::model::weights::StoredMatrix;
use support::{CpuTime, Usual};

mod support;

const KINDS: [(TensorType, Arithmetic); 8] = [
    (TensorType::F32, Arithmetic::F32),
    (TensorType::F16, Arithmetic::F32),
    (TensorType::Q8_0, Arithmetic::F32),
    (TensorType::Q8_0, Arithmetic::Int16),
    (TensorType::Q8_0, Arithmetic::Int8),
    (TensorType::Q4_1, Arithmetic::F32),
    (TensorType::Q4_1, Arithmetic::Int16),
    (TensorType::Q4_1, Arithmetic::Int8),
];

fn name((kind, arithmetic): (TensorType, Arithmetic)) -> String {
    format!("{kind:?} in {}", arithmetic.name())
}

fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i % 251) as f32 * 0.01 - 1.25).collect()
}

/// Bytes whose halves are small numbers, whatever the type.
fn layer(kind: (TensorType, Arithmetic), n_out: usize, n_in: usize) -> Matrix {
    let (kind, arithmetic) = kind;
    let n_bytes = n_out * n_in / kind.block_len() * kind.block_bytes();
    let bytes = (0..n_bytes).map(|i| (i * 37 % 251) as u8 & 0x3b).collect();
    Matrix::new((n_out, n_in), StoredMatrix::owned(kind, bytes)).computed_in(arithmetic)
}

/// One row-block and one panel that stay in the first-level cache: what the tile itself can reach.
fn peak(c: &mut Criterion<CpuTime<Usual>>) {
    let (m, n, k) = (6, 64, 64);
    let (a, b, mut y) = (values(m * k), values(k * n), vec![0.0; m * n]);
    let mut group = c.benchmark_group("peak");
    group.throughput(Throughput::Elements((2 * m * n * k) as u64));
    group.bench_function("tile 6x64x64 (flop/s)", |bench| {
        bench.iter(|| {
            let (a, b) = (black_box(&a), black_box(&b));
            let (a, b) = (Mat { data: a, stride: k }, Mat { data: b, stride: n });
            gemm(
                Dims { m, n, k },
                a,
                b,
                MatMut {
                    data: &mut y,
                    stride: n,
                },
            );
        })
    });
}

fn prefill(c: &mut Criterion<CpuTime<Usual>>) {
    let mut group = c.benchmark_group("prefill");
    for kind in KINDS {
        for (n_out, n_in) in [(1536, 576), (576, 1536)] {
            let layer = layer(kind, n_out, n_in);
            for n_rows in [16, 512] {
                let (x, mut y) = (values(n_rows * n_in), vec![0.0; n_rows * n_out]);
                group.throughput(Throughput::Elements((2 * n_rows * n_out * n_in) as u64));
                let name = format!("{}, {n_in} to {n_out}, {n_rows} rows (flop/s)", name(kind));
                group.bench_function(name, |bench| {
                    bench.iter(|| layer.apply(black_box(&x), None, &mut y))
                });
            }
        }
    }
}

fn decode(c: &mut Criterion<CpuTime<Usual>>) {
    let (n_out, n_in) = (1536, 576);
    let mut group = c.benchmark_group("decode");
    for kind in KINDS {
        let layers: Vec<Matrix> = (0..120).map(|_| layer(kind, n_out, n_in)).collect();
        let (x, mut y) = (values(n_in), vec![0.0; n_out]);
        group.throughput(Throughput::Bytes(
            layers.iter().map(|l| l.n_bytes() as u64).sum(),
        ));
        let mut run = || {
            layers
                .iter()
                .for_each(|l| l.apply(black_box(&x), None, &mut y))
        };
        group.bench_function(
            format!(
                "{}, 120 layers {n_in} to {n_out}, 1 row (bytes/s)",
                name(kind)
            ),
            |bench| bench.iter(|| rayon::scope(|_| run())),
        );
    }
}

/// One layer that stays in a level-2 cache: what unpacking costs.
fn unpack(c: &mut Criterion<CpuTime<Usual>>) {
    let (n_out, n_in) = (192, 576);
    let mut group = c.benchmark_group("unpack");
    group.throughput(Throughput::Elements((16 * n_out * n_in) as u64));
    for kind in KINDS {
        let layer = layer(kind, n_out, n_in);
        let (x, mut y) = (values(n_in), vec![0.0; n_out]);
        let name = format!("{}, {n_in} to {n_out}, 1 row (weights/s)", name(kind));
        group.bench_function(name, |bench| {
            let mut run = || (0..16).for_each(|_| layer.apply(black_box(&x), None, &mut y));
            bench.iter(|| rayon::scope(|_| run()))
        });
    }
}

fn read(c: &mut Criterion<CpuTime<Usual>>) {
    let x = values(60 * 1536 * 576);
    let mut group = c.benchmark_group("read");
    group.throughput(Throughput::Bytes(4 * x.len() as u64));
    group.bench_function("largest of as many f32 (bytes/s)", |bench| {
        bench.iter(|| kvlab::compute::cpu::vector::max(black_box(&x)))
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .with_measurement(CpuTime::new(Usual))
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = peak, prefill, read, unpack, decode
}
criterion_main!(benches);
