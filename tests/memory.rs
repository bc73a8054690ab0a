//! Reported bytes against an allocator that counts: what a cache holds on the heap is what its report adds up to, and what
//! the work around it takes at most stays small beside it.
//!
//! Invariant: allocations are counted as asked for (the allocator's own rounding belongs to no cache); everything but the
//! cache is made before the first count or dropped before the second one.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use kvlab::cache::rope::{PairLayout, Rope};
use kvlab::cache::stage::{Params, Value};
use kvlab::cache::strategy::{StageSpec, Strategy, Tail};
use kvlab::cache::{
    Admission, Batch, Continuation, Geometry, KvCache, LayerGeometry, Materials, Rows, SeqId,
    StagedCache,
};
use kvlab::compute::cpu::Cpu;
use kvlab::engine::{CHUNK, prefill};
use kvlab::model;
use kvlab::model::geometry::geometry;
use kvlab::model::source::{ModelDir, Silent, resolve};
use kvlab::model::tiny::{TinyConfig, TinyModel};
use kvlab::model::transformer::{LanguageModel, Transformer};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Bytes that are allocated now.
static LIVE: AtomicI64 = AtomicI64::new(0);

/// The most that were since [`peak_of`] last began.
static PEAK: AtomicI64 = AtomicI64::new(0);

/// One test at a time: the count is the whole program's.
static ALONE: Mutex<()> = Mutex::new(());

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; the counters touch no memory that is handed out.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let size = layout.size() as i64;
        let live = LIVE.fetch_add(size, Ordering::Relaxed) + size;
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promise about `pointer` and `layout` is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const MODEL: &str = "smollm2-135m-instruct";
/// Its vocabulary of 49,152 tokens and as many merges, twice while the tokenizer is built; weights stay in their file.
const OPENING_BYTES: i64 = 24 << 20;

const SEQ: SeqId = SeqId(0);
const FORK: SeqId = SeqId(1);

/// Below 1024 tokens a report may be off by so much, above by 1 % of what is stored.
const SLACK_BYTES: f64 = 65_536.0;

/// Layers, KV heads and channels of SmolLM2-135M.
fn smollm2() -> Geometry {
    let rope = Arc::new(Rope::new(
        PairLayout::Interleaved,
        Rope::frequencies(100_000.0, 64),
        2048,
    ));
    let layer = LayerGeometry {
        n_heads: 9,
        n_kv_heads: 3,
        head_dim: 64,
        scale: 0.125,
        rope,
        window: None,
    };
    Geometry {
        layers: vec![layer; 30],
    }
}

fn stage(name: &str, params: &[(&str, Value)]) -> StageSpec {
    let params = params.iter().map(|(k, v)| ((*k).to_owned(), v.clone()));
    StageSpec {
        name: name.to_owned(),
        params: Params(params.collect()),
    }
}

fn labelled(label: &str, format: &str, change: impl FnOnce(&mut Strategy)) -> Strategy {
    let mut strategy = Strategy::bare(format);
    strategy.label = label.to_owned();
    change(&mut strategy);
    strategy
}

fn strategies() -> Vec<Strategy> {
    let mut all: Vec<Strategy> = ["f16", "q8_0", "q4_0", "nvfp4"].map(Strategy::bare).into();
    all.push(labelled("nvfp4, tail 32, 4 sinks", "nvfp4", |s| {
        (s.tail, s.sinks) = (Tail::both(32), 4);
    }));
    all.push(labelled("window 252 + 4", "f16", |s| {
        s.retain = Some(stage("window", &[("recent", Value::Int(252))]));
    }));
    all.push(labelled("knorm half", "f16", |s| {
        let half = Value::Float(0.5);
        s.retain = Some(stage("knorm", &[("kept_fraction", half)]));
    }));
    all.push(labelled("hadamard + q4_0", "q4_0", |s| {
        s.project_k = vec![StageSpec::plain("hadamard")];
        s.project_v = vec![StageSpec::plain("hadamard")];
    }));
    all.push(labelled("q8_0 + zstd", "q8_0", |s| {
        s.pack = Some(StageSpec::plain("zstd"));
    }));
    all.push(labelled("q8_0 + file", "q8_0", |s| {
        s.place = Some(StageSpec::plain("file"));
    }));
    all
}

fn random(rng: &mut ChaCha8Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.random_range(-2.0f32..2.0)).collect()
}

/// One step of random rows that attends too, so that working memory is as large as in a real step.
fn step(cache: &mut StagedCache, geometry: &Geometry, batch: &Batch) {
    let mut rng = ChaCha8Rng::seed_from_u64(u64::from(batch.spans()[0].positions.start));
    for (index, layer) in geometry.layers.iter().enumerate() {
        let (kv, q) = (
            layer.n_kv_heads * layer.head_dim,
            layer.n_heads * layer.head_dim,
        );
        let k = random(&mut rng, batch.n_rows() * kv);
        let v = random(&mut rng, batch.n_rows() * kv);
        let rows = Rows {
            k: &k,
            v: &v,
            hidden: &[],
            residual_norms: &[],
        };
        cache.append(index, batch, rows).unwrap();
        // One layer's attention is enough to fill the working memory.
        if index == 0 {
            let mut out = vec![0.0; batch.n_rows() * q];
            let queries = random(&mut rng, batch.n_rows() * q);
            cache.attend(index, batch, &queries, &mut out).unwrap();
        }
    }
    cache.commit(batch).unwrap();
}

fn fill(cache: &mut StagedCache, geometry: &Geometry, seq: SeqId, range: std::ops::Range<u32>) {
    for start in range.clone().step_by(100) {
        let batch = Batch::single(seq, start..(start + 100).min(range.end));
        step(cache, geometry, &batch);
    }
}

struct Ledger {
    before: i64,
    label: String,
}

impl Ledger {
    /// Compares what lives with what is reported.
    fn check(&self, moment: &str, cache: &StagedCache, n_tokens: u32) {
        let live = (LIVE.load(Ordering::Relaxed) - self.before) as f64;
        let report = cache.memory();
        let told = (report.resident_bytes() + report.scratch_bytes) as f64;
        let bound = if n_tokens >= 1024 {
            0.01 * report.stored_bytes() as f64
        } else {
            SLACK_BYTES
        };
        println!(
            "{:24} {moment:28} live {live:9} reported {told:9} off {:7} allowed {bound:9.0}",
            self.label,
            live - told
        );
        assert!(
            (live - told).abs() <= bound,
            "{}, {moment}: {live} bytes live, {told} reported, {bound} of difference allowed: {report:?}",
            self.label
        );
    }
}

fn open(strategy: &Strategy, geometry: &Geometry) -> (Ledger, StagedCache) {
    let before = LIVE.load(Ordering::Relaxed);
    let materials = Materials {
        geometry,
        calibration: None,
        backing_dir: None,
    };
    let cache = StagedCache::new(strategy, materials).unwrap();
    let label = strategy.label.clone();
    (Ledger { before, label }, cache)
}

/// Runs alone and on one thread: working memory is told for one.
fn alone(test: impl FnOnce() + Send) {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    pool.unwrap().install(test);
}

#[test]
fn reported_bytes_are_the_bytes_that_live() {
    alone(streams_report_what_lives);
}

fn streams_report_what_lives() {
    let geometry = smollm2();
    // Threads, their queues and whatever the libraries keep for good exist from here on.
    for strategy in strategies() {
        let (_, mut cache) = open(&strategy, &geometry);
        cache.admit(SEQ, Admission::Streaming).unwrap();
        fill(&mut cache, &geometry, SEQ, 0..200);
    }
    for strategy in strategies() {
        let (ledger, mut cache) = open(&strategy, &geometry);
        cache.admit(SEQ, Admission::Streaming).unwrap();
        let mut at = 0;
        for n in [1, 17, 300, 1024, 1100] {
            fill(&mut cache, &geometry, SEQ, at..n);
            ledger.check(&format!("{n} tokens"), &cache, n);
            at = n;
        }
        cache.fork(SEQ, FORK).unwrap();
        ledger.check("forked", &cache, at);
        fill(&mut cache, &geometry, FORK, at..at + 150);
        ledger.check("fork went on", &cache, at);
        let mut shorter = (0..=at).rev().step_by(500).skip(1);
        while let Some(len) = shorter.next()
            && cache.truncate(SEQ, len).is_ok()
        {
            ledger.check(&format!("truncated to {len}"), &cache, at);
        }
        cache.release(SEQ).unwrap();
        ledger.check("the original released", &cache, at);
        if cache.truncate(FORK, 600).is_ok() {
            ledger.check("the fork truncated", &cache, 600);
        }
        cache.release(FORK).unwrap();
        ledger.check("all released", &cache, 0);
        let left = cache.memory().resident_bytes();
        assert!(left < 1024, "{}: {left} bytes after release", ledger.label);
    }
}

#[test]
fn a_compressed_context_reports_the_bytes_that_live() {
    alone(compressed_contexts_report_what_lives);
}

fn compressed_contexts_report_what_lives() {
    let geometry = smollm2();
    for strategy in strategies() {
        let (ledger, mut cache) = open(&strategy, &geometry);
        cache.admit(SEQ, Admission::Context).unwrap();
        fill(&mut cache, &geometry, SEQ, 0..1024);
        ledger.check("before the compression", &cache, 1024);
        cache.compress(SEQ, Continuation::Exact).unwrap();
        ledger.check("compressed", &cache, 1024);
        fill(&mut cache, &geometry, SEQ, 1024..1060);
        ledger.check("went on", &cache, 1060);
    }
}

/// What `work` gives, and the most bytes that it held at once beside those that lived before.
fn peak_of<T>(work: impl FnOnce() -> T) -> (T, i64) {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let done = work();
    (done, PEAK.load(Ordering::Relaxed) - before)
}

#[test]
fn a_prefill_holds_its_cache_and_the_rows_of_one_chunk() {
    alone(prefill_holds_little);
}

fn prefill_holds_little() {
    // Two layers as wide as SmolLM2-135M's.
    let config = TinyConfig {
        n_heads: 9,
        n_kv_heads: 3,
        head_dim: 64,
        n_embd: 576,
        n_ff: 1536,
        context_length: 4096,
        ..TinyConfig::default()
    };
    let model = Transformer::<Cpu>::load(Arc::new(TinyModel::new(&config))).unwrap();
    let geometry = geometry(model.spec(), 4096);
    let tokens: Vec<u32> = (0..4096).map(|i| i * 7 % 256).collect();
    let (_, mut cache) = open(&Strategy::bare("f16"), &geometry);
    cache.admit(SEQ, Admission::Streaming).unwrap();
    let fill = || prefill(&model, &mut cache, SEQ, &tokens, CHUNK);
    let (last, peak) = peak_of(fill);
    last.unwrap();
    let stored = cache.memory().stored_bytes() as i64;
    // Residual, norm, gate, up and what the down projection makes of them, in f32; as much again for everything else.
    let chunk = 2 * 4 * (3 * 576 + 2 * 1536) * CHUNK as i64;
    println!(
        "prefill: {stored} stored, {} beside, {chunk} allowed",
        peak - stored
    );
    assert!(peak - stored <= chunk, "{peak} bytes for {stored} stored");
}

#[test]
fn a_long_text_takes_little_more_than_its_ids() {
    let dir = ModelDir::locate(None);
    match dir.and_then(|dir| resolve(MODEL, &dir, &Silent)) {
        Ok(path) => alone(|| long_text_takes_little(&path)),
        Err(reason) => eprintln!("SKIPPED, the test needs {MODEL}: {reason}"),
    }
}

fn long_text_takes_little(path: &Path) {
    let (loaded, opening) = peak_of(|| model::load(path).unwrap());
    let prose = include_str!("../datasets/quickstart/prose.txt");
    let text = prose.repeat(40);
    let (ids, encoding) = peak_of(|| loaded.tokenizer.encode(&text).unwrap());
    println!(
        "opening {opening}, encoding {encoding} for {} bytes, {} ids",
        text.len(),
        ids.len()
    );
    assert!(opening <= OPENING_BYTES, "{opening} bytes to open {MODEL}");
    // The ids' own buffer doubles as it grows; a piece takes a hundred times its 16 KiB, and the words seen are kept.
    let allowed = 3 * 4 * ids.len() as i64 + 8 * (1 << 20);
    assert!(
        encoding <= allowed,
        "{encoding} bytes to encode {}",
        text.len()
    );
}
