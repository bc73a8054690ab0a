//! Budgets in bytes: what the live buffers hold right after a compression point, whatever else is in the cache.

use kvlab::cache::stage::{KeyForm, Kind, Params, Value, registry};
use kvlab::cache::strategy::{StageSpec, Strategy, Tail};
use kvlab::cache::{
    Admission, CacheError, Continuation, Geometry, KvCache, Materials, SeqId, StagedCache,
    least_retained,
};

use super::retain::show;
use super::support::{Script, add, build, geometry, parse_example, resume, script};

const SEQ: SeqId = SeqId(0);
const N: usize = 600;

/// Every scored stage with its budget in bytes, and nothing else protected than 4 sinks.
fn stages(budget: (&str, Value)) -> Vec<StageSpec> {
    let scored = registry().filter(|d| {
        d.kind == Kind::Retain
            && d.params
                .iter()
                .any(|p| p.name == "kept_fraction" && d.name != "window")
    });
    let all: Vec<StageSpec> = scored
        .map(|d| {
            let mut spec = parse_example(d.examples[0]);
            for other in ["tokens", "kept_fraction", "threshold"] {
                spec.params.0.remove(other);
            }
            spec.params.0.insert("recent".into(), Value::Int(0));
            spec.params.0.insert(budget.0.into(), budget.1.clone());
            spec
        })
        .collect();
    assert!(all.len() >= 12, "{}", all.len());
    all
}

const BY_CHANNEL: &str = r#"{ method = "int4", axis = "channel", group = 64, page = 128 }"#;

fn strategy(retain: StageSpec, (k, v): (&str, &str), tail: usize) -> Strategy {
    let mut s = Strategy::bare("f16");
    (s.encode_k, s.encode_v) = (parse_example(k), parse_example(v));
    (s.tail, s.sinks, s.keys) = (Tail::both(tail), 4, KeyForm::PreRope);
    s.label = format!("{} over {k}/{v} tail {tail}", retain.name);
    add(&mut s, Kind::Retain, retain);
    s
}

fn compressed(
    cache: &mut StagedCache,
    (g, s): (&Geometry, &Script),
    seq: SeqId,
    continuation: Continuation,
) -> Result<(), CacheError> {
    cache.admit(seq, Admission::Context)?;
    resume(cache, g, seq, s, 0..N, &[64]);
    show(cache, g, seq, (s, N))?;
    cache.compress(seq, continuation)
}

#[test]
fn a_byte_budget_holds_in_the_live_buffers_and_is_used() {
    let g = geometry(4, 2, 32);
    let s = script(&g, N, 301, 0.5);
    let formats = [
        (r#""f16""#, r#""f16""#),
        (r#""q8_0""#, r#""q4_0""#),
        (BY_CHANNEL, r#""int4""#),
        (BY_CHANNEL, BY_CHANNEL),
    ];
    for (i, spec) in stages(("bytes", Value::Int(80_000)))
        .into_iter()
        .enumerate()
    {
        for (j, formats) in formats.into_iter().enumerate() {
            // Each of these once with each format, not all with all.
            let tail = [0, 20][(i + j) % 2];
            let continuation = [Continuation::Exact, Continuation::Strategy][(i / 2 + j) % 2];
            let mut strategy = strategy(spec.clone(), formats, tail);
            let mut last = 0;
            for budget in [40_000i64, 55_000, 80_000] {
                let params = &mut strategy.retain.as_mut().expect("a stage").params.0;
                params.insert("bytes".into(), Value::Int(budget));
                let mut cache = build(&strategy, &g);
                compressed(&mut cache, (&g, &s), SEQ, continuation).expect("compressed");
                let m = cache.memory();
                let what = format!("{} in {budget}: {m:?}", strategy.label);
                assert!(m.resident_bytes() <= budget as u64, "{what}");
                let is_whole = m.rows_live == m.rows_seen;
                assert!(
                    is_whole || m.resident_bytes() * 100 > budget as u64 * 87,
                    "{what}"
                );
                assert!(m.rows_live >= last, "{what}");
                last = m.rows_live;
            }
            assert!(last > 0);
        }
    }
}

#[test]
fn a_byte_budget_holds_beside_a_sliding_window_in_whatever_steps_it_is_read() {
    let mut g = geometry(4, 2, 32);
    // Most layers have one, as in Gemma: pages of theirs that leave are more than what a list has to spare.
    let mut windowed = g.layers[0].clone();
    windowed.window = Some(150);
    g.layers = vec![windowed; 7]
        .into_iter()
        .chain(g.layers.drain(..1))
        .collect();
    let s = script(&g, N, 306, 0.5);
    // As many budgets as it takes for some to be used to the last row.
    for (spec, n) in stages(("bytes", Value::Int(45_000)))
        .into_iter()
        .zip([64, 64].into_iter().chain([2; 20]))
    {
        for i in 0..n {
            let mut strategy = strategy(spec.clone(), (r#""f16""#, r#""q8_0""#), 0);
            let budget = 160_000 + 97 * i;
            let params = &mut strategy.retain.as_mut().expect("a stage").params.0;
            params.insert("bytes".into(), Value::Int(budget));
            let mut cache = build(&strategy, &g);
            cache.admit(SEQ, Admission::Context).expect("admitted");
            resume(&mut cache, &g, SEQ, &s, 0..N, &[[64, N][i as usize % 2]]);
            show(&mut cache, &g, SEQ, (&s, N)).expect("shown");
            let continuation = [Continuation::Exact, Continuation::Strategy][i as usize / 2 % 2];
            cache.compress(SEQ, continuation).expect("compressed");
            let m = cache.memory();
            assert!(
                m.resident_bytes() * 100 > budget as u64 * 87,
                "{} in {budget}: {m:?}",
                strategy.label
            );
            assert!(
                m.resident_bytes() <= budget as u64,
                "{} in {budget}: {m:?}",
                strategy.label
            );
        }
    }
}

#[test]
fn bytes_per_token_are_bytes_by_the_length() {
    let g = geometry(4, 2, 32);
    let s = script(&g, N, 302, 0.5);
    let per_token = stages(("bytes_per_token", Value::Float(100.5)));
    let total = stages(("bytes", Value::Int(60_300)));
    for (per_token, total) in per_token.into_iter().zip(total) {
        let held = |spec| {
            let strategy = strategy(spec, (r#""q8_0""#, r#""q8_0""#), 0);
            let mut cache = build(&strategy, &g);
            compressed(&mut cache, (&g, &s), SEQ, Continuation::Exact).expect("compressed");
            cache.memory()
        };
        assert_eq!(held(per_token), held(total));
    }
}

#[test]
fn neighbours_and_chunks_change_no_choice() {
    let g = geometry(4, 2, 32);
    let s = script(&g, N, 303, 0.5);
    let other = script(&g, N, 304, 0.5);
    for spec in stages(("bytes", Value::Int(45_000))) {
        let strategy = strategy(spec, (BY_CHANNEL, r#""int4""#), 0);
        let rows = |cache: &StagedCache| {
            let mut rows = Vec::new();
            let each =
                |_: usize, heads: &[kvlab::cache::inspect::HeadRows]| rows.extend(heads.to_vec());
            cache.inspect(SEQ, each).expect("rows");
            rows
        };
        let mut alone = build(&strategy, &g);
        compressed(&mut alone, (&g, &s), SEQ, Continuation::Exact).expect("compressed");
        let mut beside = build(&strategy, &g);
        compressed(&mut beside, (&g, &other), SeqId(7), Continuation::Exact).expect("compressed");
        compressed(&mut beside, (&g, &s), SEQ, Continuation::Exact).expect("compressed");
        assert_eq!(rows(&alone), rows(&beside), "{}", strategy.label);
    }
}

#[test]
fn what_is_told_to_be_least_is_least_whatever_follows() {
    let mut g = geometry(4, 2, 32);
    let s = script(&g, N, 307, 0.5);
    for window in [None, Some(150)] {
        g.layers[0].window = window;
        let mut least = Vec::new();
        for continuation in [Continuation::Exact, Continuation::Strategy] {
            let with = |bytes: i64| {
                let of = |(k, v): (&str, i64)| (k.to_owned(), Value::Int(v));
                let spec = StageSpec {
                    name: "knorm".into(),
                    params: Params([("recent", 200), ("bytes", bytes)].map(of).into()),
                };
                strategy(spec, (r#""f16""#, r#""q8_0""#), 0)
            };
            let materials = Materials {
                geometry: &g,
                calibration: None,
                backing_dir: None,
            };
            let short = least_retained(&with(1), materials, (N as u32, continuation));
            let needed = short.expect("built").expect("a byte is too few");
            let needed = needed.needed_bytes as i64;
            let within =
                |bytes| compressed(&mut build(&with(bytes), &g), (&g, &s), SEQ, continuation);
            within(needed).expect("enough");
            let short = within(needed - 1);
            assert!(
                matches!(short, Err(CacheError::TooFewBytes { .. })),
                "{short:?}"
            );
            least.push(needed);
        }
        assert!(least[0] < least[1], "{least:?}");
    }
}

#[test]
fn rows_that_always_live_may_not_exceed_the_bytes() {
    let g = geometry(4, 2, 32);
    let s = script(&g, N, 305, 0.5);
    let spec = StageSpec {
        name: "kvzip".into(),
        params: Params(
            [("bytes", Value::Int(9_000)), ("recent", Value::Int(200))]
                .map(|(k, v)| (k.to_owned(), v))
                .into(),
        ),
    };
    let mut cache = build(&strategy(spec, (r#""f16""#, r#""f16""#), 0), &g);
    let refused = compressed(&mut cache, (&g, &s), SEQ, Continuation::Exact);
    let Err(CacheError::TooFewBytes {
        seq: 0,
        needed_bytes,
        budget_bytes: 9_000,
    }) = refused
    else {
        panic!("{refused:?}");
    };
    // K and V of 204 rows of 4 heads, 32 channels of 2 bytes.
    assert!(needed_bytes > 204 * 4 * 128, "{needed_bytes}");
    // Nothing has left.
    assert_eq!(cache.memory().rows_live, 4 * N as u64);
}
