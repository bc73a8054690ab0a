//! Small geometries, seeded rows, strategies made from registry examples, and a driver that feeds a cache.

use std::collections::BTreeMap;

use kvlab::cache::stage::{KeyForm, Kind, Params, StageDef, Value};
use kvlab::cache::strategy::{StageSpec, Strategy, Tail};
use kvlab::cache::{Admission, Geometry, KvCache, Materials, SeqId, StagedCache};
use kvlab::eval::conformance::fixture::{self, Source};

pub use kvlab::eval::conformance::fixture::{Script, calibration, geometry};
pub use kvlab::eval::conformance::step;

/// 4 query heads, 2 KV heads, 32 channels.
pub fn tiny() -> Geometry {
    geometry(4, 2, 32)
}

/// Gaussian-like rows with a few outlier channels, as real keys have.
pub fn script(geometry: &Geometry, n_tokens: usize, seed: u64, scale: f32) -> Script {
    let source = Source { seed, stream: 0 };
    fixture::script(geometry, n_tokens, source, scale)
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
