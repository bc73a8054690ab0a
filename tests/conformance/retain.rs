//! Every retention through the cache: a context is read, shown, compressed once and gone on from.

use kvlab::cache::stage::{KeyForm, Kind, Params, Value, registry};
use kvlab::cache::strategy::{StageSpec, Strategy, Tail};
use kvlab::cache::{
    Admission, CacheError, Continuation, Geometry, KvCache, MemoryReport, Repetition, SeenLayer,
    SeqId, StagedCache,
};

use super::oracle::oracle;
use super::support::{
    Script, add, assert_bits, build, parse_example, resume, run, script, step, tiny,
};

const SEQ: SeqId = SeqId(0);

/// Every stage by its first example, but `joint`, which has no `kept_fraction`.
fn stages() -> Vec<StageSpec> {
    let defs = registry().filter(|d| d.kind == Kind::Retain && d.name != "joint");
    let all: Vec<StageSpec> = defs.map(|d| parse_example(d.examples[0])).collect();
    assert!(all.len() >= 13, "{}", all.len());
    all
}

/// The stage with this part of its rows kept, and nothing protected that it need not protect.
fn keeping(mut spec: StageSpec, kept_fraction: f64) -> StageSpec {
    let params = &mut spec.params.0;
    params.remove("tokens");
    params.remove("threshold");
    params.insert("kept_fraction".into(), Value::Float(kept_fraction));
    // `window` has no other rows than the newest.
    params.remove("recent");
    if spec.name != "window" {
        params.insert("recent".into(), Value::Int(0));
    }
    if params.contains_key("window") {
        params.insert("window".into(), Value::Int(8));
    }
    spec
}

fn with(spec: &StageSpec, encode: &str) -> Strategy {
    let mut strategy = Strategy::bare("f16");
    add(&mut strategy, Kind::Encode, parse_example(encode));
    add(&mut strategy, Kind::Retain, spec.clone());
    strategy.label = format!("{} over {encode}", spec.name);
    strategy
}

/// Shows the first `n` tokens of a script.
pub fn show(
    cache: &mut dyn KvCache,
    g: &Geometry,
    seq: SeqId,
    (s, n): (&Script, usize),
) -> Result<(), CacheError> {
    let layers = || g.layers.iter().enumerate();
    let repetitions: Vec<Repetition> = layers().map(|(l, g)| s.repetition(l, g, n)).collect();
    let seen: Vec<SeenLayer<'_>> = layers()
        .zip(&repetitions)
        .map(|((l, g), r)| s.seen(l, g, n, r))
        .collect();
    cache.show(seq, &seen)
}

/// A cache after a context of `n` tokens and its compression point.
pub fn compressed(
    strategy: &Strategy,
    (g, s): (&Geometry, &Script),
    (n, chunks): (usize, &[usize]),
    continuation: Continuation,
) -> StagedCache {
    let mut cache = build(strategy, g);
    cache.admit(SEQ, Admission::Context).expect("fresh");
    resume(&mut cache, g, SEQ, s, 0..n, chunks);
    show(&mut cache, g, SEQ, (s, n)).expect("shown");
    cache.compress(SEQ, continuation).expect("compressed");
    cache
}

/// What is stored, apart from tables and scratch.
fn rows_and_bytes(m: &MemoryReport) -> [u64; 5] {
    [
        m.rows_live,
        m.payload_bytes,
        m.scale_bytes,
        m.exact_bytes,
        m.slack_bytes,
    ]
}

const BOTH: [Continuation; 2] = [Continuation::Exact, Continuation::Strategy];

#[test]
fn a_context_kept_whole_is_the_full_cache() {
    let g = tiny();
    let s = script(&g, 240, 91, 0.5);
    for encode in [r#""f32""#, r#""f16""#, r#""q8_0""#, r#""nvfp4""#] {
        for continuation in BOTH {
            let mut full = Strategy::bare("f16");
            add(&mut full, Kind::Encode, parse_example(encode));
            full.tail = Tail::both(20);
            full.sinks = 2;
            let mut cache = compressed(&full, (&g, &s), (200, &[64]), continuation);
            let want = resume(&mut cache, &g, SEQ, &s, 200..240, &[9]);
            let stored = rows_and_bytes(&cache.memory());
            for spec in stages() {
                let mut strategy = with(&keeping(spec, 1.0), encode);
                (strategy.tail, strategy.sinks) = (full.tail, full.sinks);
                let mut cache = compressed(&strategy, (&g, &s), (200, &[64]), continuation);
                let got = resume(&mut cache, &g, SEQ, &s, 200..240, &[9]);
                let what = format!("{}, {continuation:?}", strategy.label);
                assert_bits(&what, &want, &got);
                assert_eq!(rows_and_bytes(&cache.memory()), stored, "{what}");
            }
        }
    }
}

#[test]
fn memory_falls_at_once_to_what_the_rows_take() {
    let g = tiny();
    let s = script(&g, 200, 92, 0.5);
    for spec in stages() {
        let strategy = with(&keeping(spec, 0.25), r#""f16""#);
        let cache = compressed(&strategy, (&g, &s), (200, &[64]), Continuation::Exact);
        let m = cache.memory();
        // 4 heads of 50 rows, however they share; a head that would have none keeps one.
        let most = 4 * 50 + 4;
        assert!(
            (4 * 50..=most).contains(&m.rows_live),
            "{}: {m:?}",
            strategy.label
        );
        assert_eq!(m.rows_seen, 800, "{}", strategy.label);
        // K and V, 32 channels, 2 bytes.
        assert_eq!(
            m.payload_bytes + m.exact_bytes,
            m.rows_live * 2 * 32 * 2,
            "{}: {m:?}",
            strategy.label
        );
        // Scores that nothing reads any more are gone: less than a byte for a row that lives.
        assert!(m.index_bytes < m.rows_live, "{}: {m:?}", strategy.label);
    }
}

/// A made-up repetition is shown; what it scores highest over all heads of all layers is what later queries see.
#[test]
fn later_queries_see_the_rows_that_were_scored_highest() {
    let g = tiny();
    let (n, end) = (120, 150);
    let s = script(&g, end, 93, 0.5);
    let strategy = with(&keeping(StageSpec::plain("kvzip"), 0.3), r#""f32""#);
    let n_sinks = 4;
    let repetitions: Vec<Repetition> = (0..2).map(|l| s.repetition(l, &g.layers[l], n)).collect();
    let mut all = Vec::new();
    for (l, r) in repetitions.iter().enumerate() {
        for (h, scores) in r.attention.iter().enumerate() {
            all.extend((n_sinks..n).map(|t| (scores[t], t, l, h)));
        }
    }
    all.sort_by(|a, b| b.partial_cmp(a).expect("finite scores"));
    all.truncate(4 * 36 - 4 * n_sinks);
    let lives = |l: usize, h: usize, t: usize| {
        t < n_sinks
            || t >= n
            || all
                .iter()
                .any(|&(_, p, layer, head)| (p, layer, head) == (t, l, h))
    };
    let counts: Vec<usize> = [(0, 0), (0, 1), (1, 0), (1, 1)]
        .map(|(l, h)| (0..n).filter(|&t| lives(l, h, t)).count())
        .into();
    assert!(counts.iter().any(|&c| c != 36), "{counts:?}");
    for chunk in [1, 30] {
        let mut cache = compressed(&strategy, (&g, &s), (n, &[50]), Continuation::Exact);
        assert_eq!(cache.memory().rows_live, 4 * 36);
        let got = resume(&mut cache, &g, SEQ, &s, n..end, &[chunk]);
        for (l, got) in got.iter().enumerate() {
            let want = oracle(&g, &s, l, &|_, h, t| lives(l, h, t));
            for (a, b) in got.iter().zip(&want[n * 128..]) {
                assert!((f64::from(*a) - b).abs() < 2e-5, "layer {l}: {a} {b}");
            }
        }
    }
}

#[test]
fn prompts_of_one_and_two_tokens_go_on() {
    let g = tiny();
    let s = script(&g, 12, 94, 0.5);
    for spec in stages() {
        for kept_fraction in [0.01, 0.5, 1.0] {
            for n in [1, 2] {
                for continuation in BOTH {
                    let mut spec = keeping(spec.clone(), kept_fraction);
                    spec.params.0.insert("sinks".into(), Value::Int(0));
                    let strategy = with(&spec, r#""q8_0""#);
                    let mut cache = compressed(&strategy, (&g, &s), (n, &[2]), continuation);
                    let live = cache.memory().rows_live;
                    assert!((4..=4 * n as u64).contains(&live), "{}", strategy.label);
                    let out = resume(&mut cache, &g, SEQ, &s, n..12, &[3]);
                    assert!(out.iter().flatten().all(|x| x.is_finite()));
                    assert!(cache.memory().rows_live >= 4);
                }
            }
        }
    }
}

/// An empty context leaves nothing and says nothing: what comes later is as if there had been no point.
#[test]
fn an_empty_context_is_no_context() {
    let g = tiny();
    let s = script(&g, 60, 102, 0.5);
    for mut spec in stages() {
        if spec.name != "window" {
            let uniform = Value::Text("uniform".into());
            spec.params.0.insert("allocate".into(), uniform);
        }
        let strategy = with(&keeping(spec, 0.5), r#""q8_0""#);
        let what = &strategy.label;
        for continuation in BOTH {
            let mut cache = compressed(&strategy, (&g, &s), (0, &[1]), continuation);
            assert_eq!(cache.memory().rows_live, 0, "{what}");
            let got = resume(&mut cache, &g, SEQ, &s, 0..60, &[7]);
            if continuation == Continuation::Exact || cache.needs().context.any() {
                assert_eq!(cache.memory().rows_live, 240, "{what}");
                continue;
            }
            let mut stream = build(&strategy, &g);
            let want = run(&mut stream, &g, SEQ, &s, &[1]);
            assert_bits(what, &want, &got);
            let (a, b) = (cache.memory().rows_live, stream.memory().rows_live);
            assert_eq!((a, b), (120, 120), "{what}");
        }
    }
}

#[test]
fn a_context_must_be_shown_to_be_scored_and_wholly() {
    let g = tiny();
    let s = script(&g, 60, 95, 0.5);
    let mut n_scored = 0;
    for spec in stages() {
        let strategy = with(&keeping(spec, 0.5), r#""f16""#);
        let mut cache = build(&strategy, &g);
        if !cache.needs().context.any() {
            continue;
        }
        n_scored += 1;
        cache.admit(SEQ, Admission::Context).expect("fresh");
        resume(&mut cache, &g, SEQ, &s, 0..40, &[40]);
        let unseen = |e: Result<(), CacheError>| matches!(e, Err(CacheError::Unseen { seq: 0 }));
        assert!(
            unseen(cache.compress(SEQ, Continuation::Exact)),
            "{}",
            strategy.label
        );
        // Shown, and then read on.
        show(&mut cache, &g, SEQ, (&s, 40)).expect("shown");
        resume(&mut cache, &g, SEQ, &s, 40..60, &[20]);
        assert!(
            unseen(cache.compress(SEQ, Continuation::Exact)),
            "{}",
            strategy.label
        );
        // Nothing has left, and it can still be done.
        assert_eq!(cache.memory().rows_live, 240);
        show(&mut cache, &g, SEQ, (&s, 60)).expect("shown");
        cache
            .compress(SEQ, Continuation::Exact)
            .expect("compressed");
        let live = cache.memory().rows_live;
        assert!((120..=124).contains(&live), "{}: {live}", strategy.label);
    }
    assert_eq!(n_scored, 9);
}

#[test]
fn under_a_sliding_window_a_budget_is_of_what_is_stored() {
    let mut g = tiny();
    g.layers[1].window = Some(50);
    let s = script(&g, 240, 96, 0.5);
    for spec in stages() {
        let mut spec = keeping(spec, 0.5);
        if spec.name == "window" {
            continue;
        }
        spec.params
            .0
            .insert("allocate".into(), Value::Text("uniform".into()));
        let strategy = with(&spec, r#""f16""#);
        for continuation in BOTH {
            let run = |chunks: &[usize]| {
                let mut cache = compressed(&strategy, (&g, &s), (200, chunks), continuation);
                // A window drops whole ranges of 128 positions: of 128 to 199, half are left.
                assert_eq!(
                    cache.memory().rows_live,
                    2 * 100 + 2 * 36,
                    "{}",
                    strategy.label
                );
                let out = resume(&mut cache, &g, SEQ, &s, 200..240, chunks);
                (out, rows_and_bytes(&cache.memory()))
            };
            let (want, stored) = run(&[1]);
            let (got, same) = run(&[7, 60, 13]);
            let what = format!("{}, {continuation:?}", strategy.label);
            assert_bits(&what, &want, &got);
            assert_eq!(stored, same, "{what}");
        }
    }
}

#[test]
fn pages_are_coded_over_the_rows_that_stay() {
    let g = tiny();
    let s = script(&g, 220, 97, 0.5);
    const BY_CHANNEL: &str = r#"{ method = "int4", axis = "channel", group = 32 }"#;
    for spec in stages() {
        for keys in [KeyForm::PostRope, KeyForm::PreRope] {
            let spec = keeping(spec.clone(), 0.5);
            let mut strategy = with(&spec, BY_CHANNEL);
            strategy.keys = keys;
            let run = |strategy: &Strategy, chunks: &[usize]| {
                let mut cache = compressed(strategy, (&g, &s), (200, chunks), Continuation::Exact);
                let m = cache.memory();
                let out = resume(&mut cache, &g, SEQ, &s, 200..220, &[20]);
                (out, m)
            };
            let (got, m) = run(&strategy, &[64]);
            let (again, _) = run(&strategy, &[1, 50]);
            assert_bits(&strategy.label, &got, &again);
            assert!((400..=404).contains(&m.rows_live), "{}", strategy.label);
            // The last 8 positions fill no page of 32 and wait, in 64 bytes; what else stayed has 4 bits a number.
            let waiting = m.exact_bytes / 64;
            assert!(waiting <= 4 * 2 * 8, "{}: {m:?}", strategy.label);
            let coded = m.rows_live * 2 - waiting;
            assert_eq!(m.payload_bytes, coded * 16, "{}: {m:?}", strategy.label);
            let mut exact = with(&spec, r#""f32""#);
            exact.keys = keys;
            let (want, _) = run(&exact, &[64]);
            let error = |(a, b): (&f32, &f32)| f64::from(a - b).powi(2);
            let pairs = got.iter().flatten().zip(want.iter().flatten());
            let sum: f64 = pairs.map(error).sum();
            let size: f64 = want.iter().flatten().map(|x| f64::from(*x).powi(2)).sum();
            let relative = (sum / size).sqrt();
            assert!(
                relative > 1e-4 && relative < 0.2,
                "{}: {relative}",
                strategy.label
            );
        }
    }
}

#[test]
fn a_fork_after_the_point_goes_on_alone() {
    let g = tiny();
    let s = script(&g, 260, 98, 0.5);
    let other = script(&g, 260, 99, 0.5);
    let fork = SeqId(5);
    for spec in stages() {
        for continuation in BOTH {
            let strategy = with(&keeping(spec.clone(), 0.5), r#""q8_0""#);
            let what = format!("{}, {continuation:?}", strategy.label);
            let fresh = || compressed(&strategy, (&g, &s), (200, &[64]), continuation);
            let mut alone = fresh();
            let want = resume(&mut alone, &g, SEQ, &s, 200..260, &[11]);
            let mut cache = fresh();
            cache.fork(SEQ, fork).expect("a fork");
            // Another text first, which must not reach the fork.
            resume(&mut cache, &g, SEQ, &other, 200..260, &[30]);
            let got = resume(&mut cache, &g, fork, &s, 200..260, &[11]);
            assert_bits(&what, &want, &got);
            cache.release(SEQ).expect("released");
            assert_eq!(
                rows_and_bytes(&cache.memory()),
                rows_and_bytes(&alone.memory()),
                "{what}"
            );
        }
    }
}

#[test]
fn threads_change_no_bit() {
    let g = tiny();
    let s = script(&g, 230, 100, 0.5);
    for spec in stages() {
        let strategy = with(&keeping(spec, 0.4), r#""f16""#);
        let run = |n_threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads);
            pool.build().expect("a pool").install(|| {
                let mut cache =
                    compressed(&strategy, (&g, &s), (200, &[64]), Continuation::Strategy);
                let out = resume(&mut cache, &g, SEQ, &s, 200..230, &[10]);
                (out, rows_and_bytes(&cache.memory()))
            })
        };
        let (want, stored) = run(1);
        for n_threads in [2, 3] {
            let (got, same) = run(n_threads);
            assert_bits(&format!("{} on {n_threads}", strategy.label), &want, &got);
            assert_eq!(stored, same, "{}", strategy.label);
        }
    }
}

/// Ranges of which nothing, one row, or about a quarter of the rows is left: a token alone, on any number of threads, gets
/// what a chunk gets.
#[test]
fn few_rows_of_a_range_are_read_as_a_chunk_reads_them() {
    let g = tiny();
    let (n, end) = (1010, 1016);
    let s = script(&g, end, 107, 0.5);
    for kept_fraction in [0.004, 0.05, 0.25] {
        let spec = keeping(parse_example("{ method = \"random\" }"), kept_fraction);
        for (encode, tail, keys) in [
            (r#""f16""#, 0, KeyForm::PostRope),
            (r#""q4_0""#, 20, KeyForm::PreRope),
            (
                r#"{ method = "int4", axis = "channel" }"#,
                0,
                KeyForm::PreRope,
            ),
        ] {
            let mut strategy = with(&spec, encode);
            (strategy.tail, strategy.keys) = (Tail::both(tail), keys);
            for continuation in BOTH {
                let run = |n_threads: usize, chunks: &[usize]| {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads);
                    pool.build().expect("a pool").install(|| {
                        let mut cache = compressed(&strategy, (&g, &s), (n, &[512]), continuation);
                        resume(&mut cache, &g, SEQ, &s, n..end, chunks)
                    })
                };
                let want = run(1, &[end - n]);
                for n_threads in [1, 2, 3] {
                    let what = format!("{kept_fraction} of {encode} on {n_threads}");
                    assert_bits(&what, &want, &run(n_threads, &[1]));
                }
            }
        }
    }
}

/// While decoding, a gate's budget holds at every step and its newest rows live.
#[test]
fn a_gates_budget_holds_while_decoding() {
    let g = tiny();
    let s = script(&g, 160, 101, 0.5);
    let given = [
        ("file", Value::Text("random".into())),
        ("allocate", Value::Text("uniform".into())),
        ("kept_fraction", Value::Float(0.25)),
        ("recent", Value::Int(10)),
    ];
    let spec = StageSpec {
        name: "gate".into(),
        params: Params(given.map(|(k, v)| (k.to_owned(), v)).into()),
    };
    let strategy = with(&spec, r#""f16""#);
    let mut cache = build(&strategy, &g);
    cache.admit(SEQ, Admission::Streaming).expect("fresh");
    for t in 0..160 {
        step(&mut cache, &g, SEQ, &s, t..t + 1).expect("a step");
        let n = t as u64 + 1;
        let rows = n.div_ceil(4).max(14).min(n);
        assert_eq!(cache.memory().rows_live, 4 * rows, "after {n}");
    }
}
