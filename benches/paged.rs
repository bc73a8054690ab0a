//! What pages cost: one token's attention over f16 rows in one buffer, and over the same rows in pages that lie scattered:
//! `cargo bench --bench paged`.
//!
//! SmolLM2's shape: 30 layers, 3 KV heads of 64 channels with 3 query heads each. The kernels are the cache's, the sums
//! run in the same order in every layout, and their results are compared to the bit. Layouts take turns, forwards and
//! backwards, one thread, CPU time; a ratio is of two times of the same round. The last lines are whole caches, which
//! also merge partial results of each page, so that no number depends on threads: one with all rows, and one of which a
//! compression point left a quarter, about 32 of each 128. The kernels take 32 rows at a time: smaller pages would measure
//! their padding.
//!
//! ```text
//! one buffer    K of a head: 0 1 2 3 4 5 6 7 …                one call
//! pages of 2    K of a head: 4 5 | 0 1 | 6 7 | 2 3 …          a table says where each lies; a call for each
//! ```

use std::time::Duration;

use kvlab::cache::rope::{PairLayout, Rope};
use kvlab::cache::stage::{Params, Value, registry};
use kvlab::cache::strategy::{StageSpec, Strategy};
use kvlab::cache::{
    Admission, Batch, Continuation, Geometry, KvCache, LayerGeometry, Materials, Rows, SeqId,
    StagedCache,
};
use kvlab::compute::cpu::gemm::{Mat, MatMut};
use kvlab::compute::cpu::rows::{F16, Kernel, Room, Rows as StoredRows};
use kvlab::compute::cpu::vector::{exp_sum, max};
use kvlab::engine::clock::{Clock, SystemClock};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const N_LAYERS: usize = 30;
const N_KV_HEADS: usize = 3;
const GROUP: usize = 3;
const HEAD_DIM: usize = 64;
const ROW_BYTES: usize = 2 * HEAD_DIM;
/// K and V of each head of each layer.
const N_STREAMS: usize = 2 * N_LAYERS * N_KV_HEADS;
const CONTEXTS: [usize; 3] = [512, 2048, 8192];
const N_ROUNDS: usize = 21;
/// Rows, of one head's K and V, that a layout reads in a round.
const ROUND_ROWS: usize = 6_000_000;

/// Caches by the part of their rows that lives.
const CACHES: [(&str, f64); 2] = [
    ("the cache", 1.0),
    ("the cache, a quarter of its rows", 0.25),
];

/// Rows of all streams in pages of `page_rows`.
struct Memory {
    bytes: Vec<u8>,
    /// Where each page begins, `[stream][page]`, in pages.
    table: Vec<u32>,
    page_rows: usize,
}

impl Memory {
    /// `rows`: `[stream][row]` of f16 bytes. `order`: the place of each page.
    fn new(rows: &[u8], page_rows: usize, order: &mut dyn FnMut(&mut [u32])) -> Self {
        let size = page_rows * ROW_BYTES;
        let mut table: Vec<u32> = (0..(rows.len() / size) as u32).collect();
        order(&mut table);
        let mut bytes = vec![0; rows.len()];
        for (page, &place) in rows.chunks_exact(size).zip(&table) {
            bytes[place as usize * size..][..size].copy_from_slice(page);
        }
        Self {
            bytes,
            table,
            page_rows,
        }
    }

    /// Pages of a stream in order, each with the next one.
    fn pages(&self, stream: usize) -> impl Iterator<Item = StoredRows<'_>> {
        let n = self.table.len() / N_STREAMS;
        let size = self.page_rows * ROW_BYTES;
        let page = move |at: usize| {
            let place = self.table.get(at).copied().unwrap_or(0);
            &self.bytes[place as usize * size..][..size]
        };
        (stream * n..(stream + 1) * n).map(move |at| StoredRows {
            bytes: page(at),
            stride: ROW_BYTES,
            dim: HEAD_DIM,
            ahead: page(at + 1),
            turn: None,
        })
    }
}

/// Working memory of a token's attention.
#[derive(Default)]
struct Work {
    room: Room,
    weights: Vec<f32>,
}

/// softmax(q·Kᵀ)·V of all layers and heads. `q` and `out`: `[layer][head][head_dim]`.
fn attend(memory: &Memory, n: usize, q: &[f32], out: &mut [f32], work: &mut Work) {
    work.weights.resize(GROUP * n, 0.0);
    let width = GROUP * HEAD_DIM;
    for (head, (q, out)) in q
        .chunks_exact(width)
        .zip(out.chunks_exact_mut(width))
        .enumerate()
    {
        for (i, keys) in memory.pages(2 * head).enumerate() {
            let scores = MatMut {
                data: &mut work.weights[i * memory.page_rows..],
                stride: n,
            };
            F16.scores(keys, q, &mut work.room, scores);
        }
        out.fill(0.0);
        let mut sums = [0.0; GROUP];
        for (scores, sum) in work.weights.chunks_exact_mut(n).zip(&mut sums) {
            let most = max(scores);
            *sum = exp_sum(scores, most);
        }
        for (i, values) in memory.pages(2 * head + 1).enumerate() {
            let weights = Mat {
                data: &work.weights[i * memory.page_rows..],
                stride: n,
            };
            F16.weighted_sum(values, weights, out);
        }
        for (out, sum) in out.chunks_exact_mut(HEAD_DIM).zip(sums) {
            out.iter_mut().for_each(|x| *x /= sum);
        }
    }
}

fn numbers(n: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
    (0..n).map(|_| rng.random_range(-1.0f32..1.0)).collect()
}

/// f16 rows, of which retention keeps a part, chosen at random: what is left of each range of positions is little.
fn thinned(kept_fraction: f64) -> Strategy {
    let def = registry().find(|def| def.name == "random");
    let params = [("kept_fraction".to_owned(), Value::Float(kept_fraction))];
    let params = Params(params.into_iter().collect());
    let retain = def.map(|def| StageSpec {
        name: def.name.to_owned(),
        params: Params::resolve(def, &params).expect("the stage keeps fractions"),
    });
    Strategy {
        retain,
        ..Strategy::bare("f16")
    }
}

/// A cache with a context of `n` tokens, compressed once.
fn filled(strategy: &Strategy, n: usize, rng: &mut ChaCha8Rng) -> StagedCache {
    let frequencies = Rope::frequencies(100_000.0, HEAD_DIM);
    let layer = LayerGeometry {
        n_heads: N_KV_HEADS * GROUP,
        n_kv_heads: N_KV_HEADS,
        head_dim: HEAD_DIM,
        scale: 0.125,
        rope: std::sync::Arc::new(Rope::new(PairLayout::HalfSplit, frequencies, n)),
        window: None,
    };
    let geometry = Geometry {
        layers: vec![layer; N_LAYERS],
    };
    let materials = Materials {
        geometry: &geometry,
        calibration: None,
        backing_dir: None,
    };
    let fits = "a fresh cache of a bare format takes in what follows";
    let mut cache = StagedCache::new(strategy, materials).expect(fits);
    cache.admit(SeqId(0), Admission::Context).expect(fits);
    let chunk = 128;
    let width = N_KV_HEADS * HEAD_DIM;
    let (k, v) = (numbers(chunk * width, rng), numbers(chunk * width, rng));
    for first in (0..n).step_by(chunk) {
        let batch = Batch::single(SeqId(0), first as u32..(first + chunk) as u32);
        for layer in 0..N_LAYERS {
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
    cache.compress(SeqId(0), Continuation::Exact).expect(fits);
    cache
}

/// One token's attention in all layers, asked from the last position that is stored.
fn ask<'a>(mut cache: StagedCache, n: usize, q: &'a [f32]) -> Box<dyn FnMut() + 'a> {
    let batch = Batch::single(SeqId(0), n as u32 - 1..n as u32);
    let mut out = vec![0.0; q.len() / N_LAYERS];
    Box::new(move || {
        for (layer, q) in q.chunks_exact(out.len()).enumerate() {
            let done = cache.attend(layer, &batch, q, &mut out);
            done.expect("the sequence is there");
        }
    })
}

/// A layout's name and one token's attention.
type Arm<'a> = (String, Box<dyn FnMut() + 'a>);

/// Times of all arms in turn, `[arm][round]`, of as many tokens as make a round.
fn rounds(arms: &mut [Arm<'_>], n: usize) -> Vec<Vec<Duration>> {
    let clock = SystemClock::new();
    let n_tokens = ROUND_ROWS.div_ceil(n * N_LAYERS * N_KV_HEADS);
    let mut times = vec![Vec::new(); arms.len()];
    for round in 0..=N_ROUNDS {
        let forwards: Vec<usize> = (0..arms.len()).collect();
        let backwards = forwards.iter().rev().copied().collect();
        for arm in [forwards, backwards][round % 2].clone() {
            let start = clock.read();
            (0..n_tokens).for_each(|_| arms[arm].1());
            // The first round warms up.
            if round > 0 {
                times[arm].push(clock.read().since(start).cpu / n_tokens as u32);
            }
        }
    }
    times
}

fn median(values: impl Iterator<Item = f64>) -> (f64, f64, f64) {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    let quarter = |q: usize| sorted[q * (sorted.len() - 1) / 4];
    (quarter(2), quarter(1), quarter(3))
}

/// Prints the layouts' times; returns how many times as fast the cache is with a quarter of its rows.
fn compare(n: usize) -> (f64, f64, f64) {
    let mut rng = ChaCha8Rng::seed_from_u64(n as u64);
    let rows: Vec<u8> = numbers(N_STREAMS * n * HEAD_DIM, &mut rng)
        .into_iter()
        .flat_map(|x| half::f16::from_f32(x).to_le_bytes())
        .collect();
    let q = numbers(N_LAYERS * N_KV_HEADS * GROUP * HEAD_DIM, &mut rng);
    let mut shuffle = |places: &mut [u32]| places.shuffle(&mut rng);
    let layouts = [
        ("one buffer".to_owned(), Memory::new(&rows, n, &mut |_| {})),
        (
            "one buffer, 128 rows a call".to_owned(),
            Memory::new(&rows, 128, &mut |_| {}),
        ),
        (
            "scattered pages of 128".to_owned(),
            Memory::new(&rows, 128, &mut shuffle),
        ),
        (
            "scattered pages of 32".to_owned(),
            Memory::new(&rows, 32, &mut shuffle),
        ),
    ];
    drop(rows);
    let mut outputs = vec![vec![0.0; q.len()]; layouts.len()];
    let mut arms: Vec<Arm<'_>> = Vec::new();
    for ((name, memory), out) in layouts.iter().zip(&mut outputs) {
        let mut work = Work::default();
        let q = &q;
        arms.push((
            name.clone(),
            Box::new(move || attend(memory, n, q, out, &mut work)),
        ));
    }
    for (name, kept_fraction) in CACHES {
        let strategy = thinned(kept_fraction);
        let cache = filled(&strategy, n, &mut ChaCha8Rng::seed_from_u64(1));
        arms.push((name.to_owned(), ask(cache, n, &q)));
    }
    let times = rounds(&mut arms, n);
    let per_row = 1e9 / (n * N_LAYERS * N_KV_HEADS) as f64;
    for ((name, _), own) in arms.iter().zip(&times) {
        let (ns, ..) = median(own.iter().map(|t| t.as_secs_f64() * per_row));
        let ratios = own.iter().zip(&times[0]);
        let (ratio, low, high) = median(ratios.map(|(a, b)| a.as_secs_f64() / b.as_secs_f64()));
        println!("| {n} | {name} | {ns:.2} | {ratio:.3} ({low:.3} … {high:.3}) |");
    }
    drop(arms);
    let [.., whole, quarter] = &times[..] else {
        unreachable!("there are as many times as arms, and two of these are caches")
    };
    let faster = whole.iter().zip(quarter);
    let faster = median(faster.map(|(a, b)| a.as_secs_f64() / b.as_secs_f64()));
    assert!(
        outputs.iter().all(|out| *out == outputs[0]),
        "layouts differ in their results"
    );
    faster
}

fn main() {
    // A pool of one thread, for the whole cache's sake.
    let _ = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build_global();
    println!(
        "CPU time per row of one KV head (K and V), f16, {N_ROUNDS} rounds in turn; ratios to the first layout of the same"
    );
    println!("round: median (quartiles). A thinned cache's are per row of the context, too.\n");
    println!("| context | layout | ns | ratio |\n|---|---|---|---|");
    let faster = CONTEXTS.map(|n| (n, compare(n)));
    println!("\nThe cache with a quarter of its rows, times as fast as with all:\n");
    for (n, (ratio, low, high)) in faster {
        println!("{n}: {ratio:.2} ({low:.2} … {high:.2})");
    }
}
