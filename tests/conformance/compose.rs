//! Stages compose: every pair of kinds, one stack of all five, and what each stage must not change.

use kvlab::cache::stage::{Kind, registry};
use kvlab::cache::strategy::{StageSpec, Strategy, Tail};
use kvlab::cache::{Admission, Continuation, KvCache, SeqId};
use kvlab::eval::conformance::find_check;

use super::suite::hold;
use super::support::{add, assert_bits, build, examples, parse_example, resume, run, script, tiny};

/// Every pair of stages of two kinds, and stacks of all five.
fn compositions() -> Vec<Strategy> {
    let stages: Vec<(Kind, StageSpec)> = registry()
        .filter(|d| d.kind != Kind::Encode || matches!(d.name, "f16" | "nvfp4"))
        .flat_map(|d| examples(d).into_iter().take(1).map(move |s| (d.kind, s)))
        .collect();
    let mut all = Vec::new();
    for (i, (kind_a, a)) in stages.iter().enumerate() {
        for (kind_b, b) in stages[i + 1..].iter().filter(|(k, _)| k != kind_a) {
            let mut s = Strategy::bare("q8_0");
            s.label = format!("{} + {}", a.name, b.name);
            add(&mut s, *kind_a, a.clone());
            add(&mut s, *kind_b, b.clone());
            // Predictions need every row of the layer before, and all of them at each read.
            let chooses = matches!(b.name.as_str(), "specache" | "quest");
            if !(*kind_a == Kind::Retain && b.name == "aqua" || a.name == "aqua" && chooses) {
                all.push(s);
            }
        }
    }
    for (retain, project, encode, tail) in [
        (
            r#"{ method = "window", recent = 100 }"#,
            r#""hadamard""#,
            "q4_0",
            0,
        ),
        (
            r#"{ method = "knorm", kept_fraction = 0.6 }"#,
            r#"{ method = "svd", rank = 24 }"#,
            "nvfp4",
            20,
        ),
    ] {
        let mut s = Strategy::bare(encode);
        s.label = format!("all five over {encode}");
        s.tail = Tail::both(tail);
        s.sinks = 2;
        add(&mut s, Kind::Retain, parse_example(retain));
        add(&mut s, Kind::Project, parse_example(project));
        add(&mut s, Kind::Pack, parse_example(r#""zstd""#));
        add(&mut s, Kind::Place, parse_example(r#""file""#));
        all.push(s);
    }
    all
}

#[test]
fn every_composition_holds() {
    let all = compositions();
    assert!(all.len() > 20, "{}", all.len());
    let names = [
        "oracle",
        "chunking",
        "exactness",
        "bytes",
        "truncate",
        "device",
    ];
    let checks: Vec<_> = names.iter().filter_map(|n| find_check(n)).collect();
    assert_eq!(checks.len(), names.len());
    assert!(hold(&all, &checks) > 4 * all.len());
}

#[test]
fn packing_and_placing_change_bytes_and_nothing_else() {
    let g = tiny();
    let s = script(&g, 300, 72, 0.5);
    for format in ["f32", "f16", "q4_0"] {
        let plain = Strategy::bare(format);
        let mut cache = build(&plain, &g);
        let want = run(&mut cache, &g, SeqId(0), &s, &[60]);
        let full = cache.memory();
        for (pack, place) in [(true, false), (false, true), (true, true)] {
            let mut strategy = plain.clone();
            strategy.pack = pack.then(|| StageSpec::plain("zstd"));
            strategy.place = place.then(|| StageSpec::plain("file"));
            let mut cache = build(&strategy, &g);
            let got = run(&mut cache, &g, SeqId(0), &s, &[60]);
            assert_bits(&format!("{format} pack {pack} place {place}"), &want, &got);
            let m = cache.memory();
            if place {
                assert!(
                    m.backing_bytes > 0 && m.payload_bytes < full.payload_bytes / 4,
                    "{m:?}"
                );
            }
            if pack {
                assert!(
                    m.payload_bytes + m.scale_bytes + m.backing_bytes
                        <= full.payload_bytes + full.scale_bytes,
                    "{m:?}"
                );
            }
        }
    }
}

#[test]
fn keeping_everything_is_the_full_cache() {
    let g = tiny();
    let s = script(&g, 200, 73, 0.5);
    let full = Strategy::bare("f16");
    let want = run(&mut build(&full, &g), &g, SeqId(0), &s, &[200]);
    for retain in [
        r#"{ method = "knorm", kept_fraction = 1.0 }"#,
        r#"{ method = "window", recent = 500 }"#,
    ] {
        let mut strategy = full.clone();
        add(&mut strategy, Kind::Retain, parse_example(retain));
        let got = run(&mut build(&strategy, &g), &g, SeqId(0), &s, &[200]);
        assert_bits(retain, &want, &got);
    }
}

#[test]
fn a_compression_point_compresses_once() {
    let g = tiny();
    let s = script(&g, 260, 74, 0.5);
    let mut strategy = Strategy::bare("f16");
    add(
        &mut strategy,
        Kind::Retain,
        parse_example(r#"{ method = "knorm", kept_fraction = 0.5, sinks = 4 }"#),
    );
    for (continuation, live_after) in [
        (Continuation::Exact, 100 + 60),
        (Continuation::Strategy, 130),
    ] {
        let mut cache = build(&strategy, &g);
        cache.admit(SeqId(0), Admission::Context).expect("fresh");
        resume(&mut cache, &g, SeqId(0), &s, 0..200, &[64]);
        assert_eq!(
            cache.memory().rows_live,
            200 * 4,
            "nothing leaves before the compression point"
        );
        let before = cache.memory().payload_bytes;
        cache.compress(SeqId(0), continuation).expect("compress");
        let m = cache.memory();
        assert_eq!(m.rows_live, 100 * 4);
        assert_eq!(m.payload_bytes, before / 2, "memory falls at once");
        resume(&mut cache, &g, SeqId(0), &s, 200..260, &[25]);
        assert_eq!(cache.memory().rows_live, live_after * 4, "{continuation:?}");
    }
}

/// Composition multiplies kept fractions: half of the rows at half of the bytes is a quarter.
#[test]
fn kept_fractions_multiply() {
    let g = tiny();
    let s = script(&g, 256, 75, 0.5);
    let bytes = |strategy: &Strategy| {
        let mut cache = build(strategy, &g);
        run(&mut cache, &g, SeqId(0), &s, &[256]);
        let m = cache.memory();
        (m.payload_bytes + m.scale_bytes, m.rows_live, m.rows_seen)
    };
    let mut half_rows = Strategy::bare("f32");
    add(
        &mut half_rows,
        Kind::Retain,
        parse_example(r#"{ method = "knorm", kept_fraction = 0.5 }"#),
    );
    let mut both = half_rows.clone();
    both.encode_k = StageSpec::plain("f16");
    both.encode_v = StageSpec::plain("f16");
    let full = bytes(&Strategy::bare("f32"));
    assert_eq!(bytes(&half_rows), (full.0 / 2, full.1 / 2, full.2));
    assert_eq!(bytes(&both), (full.0 / 4, full.1 / 2, full.2));
}

/// A full-rank basis learned after a rotation is as good as one learned before it: rank 16 of 32 keeps the same energy.
#[test]
fn a_map_that_learns_sees_what_the_earlier_map_leaves() {
    let g = tiny();
    let s = script(&g, 120, 77, 0.5);
    let run_with = |maps: &[&str]| {
        let mut strategy = Strategy::bare("f32");
        for map in maps {
            add(&mut strategy, Kind::Project, parse_example(map));
        }
        run(&mut build(&strategy, &g), &g, SeqId(0), &s, &[120])
    };
    let svd = r#"{ method = "svd", rank = 16 }"#;
    let (alone, after) = (run_with(&[svd]), run_with(&[r#""hadamard""#, svd]));
    for (a, b) in alone.iter().flatten().zip(after.iter().flatten()) {
        assert!((a - b).abs() < 1e-3, "the same subspace: {a} {b}");
    }
}
