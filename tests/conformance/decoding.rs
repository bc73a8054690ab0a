//! Two phases, two budgets: what a compression point leaves, and by how much heads grow after it.

use kvlab::cache::stage::{KeyForm, Kind};
use kvlab::cache::strategy::{Strategy, Tail};
use kvlab::cache::{Admission, Continuation, KvCache, SeqId};

use super::retain::compressed;
use super::support::{add, assert_bits, build, parse_example, resume, script, step, tiny};

const SEQ: SeqId = SeqId(0);
const CONTEXT: usize = 200;
const END: usize = 290;

fn strategy(retain: &str, encode: &str) -> Strategy {
    let mut strategy = Strategy::bare("f16");
    add(&mut strategy, Kind::Encode, parse_example(encode));
    add(&mut strategy, Kind::Retain, parse_example(retain));
    strategy
}

/// A stage that keeps half of a context; all heads together, or each for itself.
fn stages(growth: &str) -> Vec<String> {
    [
        "{ method = \"knorm\", kept_fraction = 0.5, ",
        "{ method = \"random\", kept_fraction = 0.5, allocate = \"global\", ",
        "{ method = \"random\", tokens = 100, allocate = \"pyramid\", ",
        "{ method = \"gate\", file = \"random\", kept_fraction = 0.5, recent = 5, ",
        "{ method = \"window\", kept_fraction = 0.5, ",
    ]
    .map(|head| format!("{head}{growth} }}"))
    .into()
}

#[test]
fn heads_grow_by_their_second_budget_at_every_step() {
    let g = tiny();
    let s = script(&g, END, 120, 0.5);
    type Grown = fn(usize) -> usize;
    let growths: [(&str, Grown); 4] = [
        ("decoding_tokens = 0", |_| 0),
        ("decoding_tokens = 12", |n| n.min(12)),
        ("decoding_kept_fraction = 0.25", |n| n.div_ceil(4)),
        ("decoding_kept_fraction = 1.0", |n| n),
    ];
    for (growth, grown) in growths {
        for retain in stages(growth) {
            let strategy = strategy(&retain, r#""f16""#);
            let at_point = (CONTEXT, &[64][..]);
            let mut cache = compressed(&strategy, (&g, &s), at_point, Continuation::Strategy);
            let left = cache.memory().rows_live;
            assert_eq!(left, 4 * 100, "{retain}");
            for t in CONTEXT..END {
                step(&mut cache, &g, SEQ, &s, t..t + 1).expect("a step");
                let want = left + 4 * grown(t + 1 - CONTEXT) as u64;
                assert_eq!(cache.memory().rows_live, want, "{retain} after {t}");
            }
        }
    }
}

#[test]
fn chunks_grow_as_steps_do() {
    let g = tiny();
    let s = script(&g, END, 121, 0.5);
    let by_channel = r#"{ method = "int4", axis = "channel" }"#;
    for growth in ["decoding_tokens = 7", "decoding_kept_fraction = 0.3"] {
        for retain in stages(growth) {
            for (encode, tail) in [(r#""q8_0""#, 0), (r#""f16""#, 20), (by_channel, 3)] {
                let mut strategy = strategy(&retain, encode);
                strategy.tail = Tail::both(tail);
                let run = |chunks: &[usize]| {
                    let at_point = (CONTEXT, &[64][..]);
                    let mut cache =
                        compressed(&strategy, (&g, &s), at_point, Continuation::Strategy);
                    let out = resume(&mut cache, &g, SEQ, &s, CONTEXT..END, chunks);
                    (out, cache.memory().rows_live)
                };
                let (want, rows) = run(&[1]);
                for chunks in [&[90][..], &[17], &[1, 40, 3]] {
                    let what = format!("{retain} over {encode}, {chunks:?}");
                    let (got, same) = run(chunks);
                    assert_bits(&what, &want, &got);
                    assert_eq!(rows, same, "{what}");
                }
            }
        }
    }
}

/// Without the second budget a fraction holds in both phases, and an exact continuation stays whole whatever is said.
#[test]
fn one_budget_serves_both_phases_and_an_exact_continuation_none() {
    let g = tiny();
    let s = script(&g, END, 122, 0.5);
    let rows = |retain: &str, continuation| {
        let strategy = strategy(retain, r#""f16""#);
        let at_point = (CONTEXT, &[64][..]);
        let mut cache = compressed(&strategy, (&g, &s), at_point, continuation);
        resume(&mut cache, &g, SEQ, &s, CONTEXT..END, &[16]);
        cache.memory().rows_live
    };
    let one = "{ method = \"knorm\", kept_fraction = 0.5 }";
    assert_eq!(rows(one, Continuation::Strategy), 4 * 145);
    let two = "{ method = \"knorm\", kept_fraction = 0.5, decoding_tokens = 3 }";
    assert_eq!(rows(two, Continuation::Strategy), 4 * 103);
    assert_eq!(rows(two, Continuation::Exact), 4 * 190);
}

/// Rows that leave before their page is coded are none of its rows, whether a chunk or a step brings its last one.
#[test]
fn a_page_is_coded_over_what_lived_when_it_was() {
    let g = tiny();
    let s = script(&g, END, 123, 0.5);
    for retain in [
        "{ method = \"window\", recent = 12 }",
        "{ method = \"knorm\", tokens = 50, recent = 8 }",
        "{ method = \"random\", kept_fraction = 0.3 }",
        "{ method = \"gate\", file = \"random\", threshold = 0.3, recent = 16 }",
    ] {
        for (tail, keys) in [(0, KeyForm::PostRope), (9, KeyForm::PreRope)] {
            let mut strategy = strategy(retain, r#"{ method = "int4", axis = "channel" }"#);
            (strategy.tail, strategy.keys) = (Tail::both(tail), keys);
            let run = |chunks: &[usize]| {
                let mut cache = build(&strategy, &g);
                cache.admit(SEQ, Admission::Streaming).expect("fresh");
                let out = resume(&mut cache, &g, SEQ, &s, 0..END, chunks);
                let m = cache.memory();
                (out, [m.rows_live, m.payload_bytes, m.scale_bytes])
            };
            let (want, stored) = run(&[1]);
            for chunks in [&[END][..], &[97], &[1, 140, 3]] {
                let what = format!("{retain}, tail {tail}, {chunks:?}");
                let (got, same) = run(chunks);
                assert_bits(&what, &want, &got);
                assert_eq!(stored, same, "{what}");
            }
        }
    }
}
