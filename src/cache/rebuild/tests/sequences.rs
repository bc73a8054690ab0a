//! Whole sequences whose pages are coded anew: chunks, forks, sealed pages, what is refused, what it saves.

use super::{N, SEQ, Script, at_random, built, newest, rows, spec, strategy, streaming};
use crate::cache::places::PageBytes;
use crate::cache::stage::{KeyForm, Side, Value};
use crate::cache::strategy::{StageSpec, Strategy};
use crate::cache::visibility::Class;
use crate::cache::{Admission, Continuation, KvCache, MemoryReport, Rebuilt, SeqId};

#[test]
fn chunks_are_as_long_as_they_may_be_and_equal_decoding() {
    let script = Script::new(9);
    for strategy in [
        at_random(Some(0.5), 128),
        at_random(Some(0.5), 32),
        newest(Some(0.5)),
    ] {
        let mut one = streaming(&strategy);
        let want = script.run(&mut one, SEQ, 0..N, 1);
        assert!(one.memory().rebuilt.n_pages > 3);
        for chunk in [7, N] {
            let mut cache = streaming(&strategy);
            assert_eq!(cache.step_limit(SEQ, chunk), 1);
            assert_eq!(script.run(&mut cache, SEQ, 0..N, chunk), want, "{chunk}");
            assert_eq!(cache.memory(), one.memory());
        }
    }
    // As long as nothing limits them, chunks and decoding differ.
    let mut cache = streaming(&at_random(Some(0.5), 32));
    let whole = script.step(&mut cache, SEQ, 0..N);
    let mut one = streaming(&at_random(Some(0.5), 32));
    let steps = script.run(&mut one, SEQ, 0..N, 1);
    let whole = whole[0].iter().map(|x| x.to_bits());
    assert!(whole.collect::<Vec<_>>() != steps[0]);
}

#[test]
fn steps_are_short_only_where_pages_are_coded_anew() {
    assert_eq!(
        built(&at_random(Some(0.5), 64)).unwrap().needs().max_chunk,
        Some(1)
    );
    for strategy in [
        at_random(None, 64),
        Strategy {
            encode_k: StageSpec::plain("q4_0"),
            ..at_random(Some(0.5), 64)
        },
    ] {
        let cache = built(&strategy).unwrap();
        assert_eq!(cache.needs().max_chunk, None);
        assert_eq!(cache.step_limit(SEQ, 50), 50);
    }
    // Before a context's compression point nothing is coded together, in an exact continuation nothing leaves.
    let script = Script::new(3);
    for (continuation, after) in [(Continuation::Exact, 50), (Continuation::Strategy, 1)] {
        let mut outputs = Vec::new();
        for chunk in [1, 70] {
            let mut cache = built(&at_random(Some(0.5), 64)).unwrap();
            cache.admit(SEQ, Admission::Context).unwrap();
            assert_eq!(cache.step_limit(SEQ, 50), 50);
            let mut all = vec![script.run(&mut cache, SEQ, 0..200, chunk)];
            cache.compress(SEQ, continuation).unwrap();
            assert_eq!(cache.step_limit(SEQ, 50), after);
            all.push(script.run(&mut cache, SEQ, 200..N, chunk));
            let n_pages = cache.memory().rebuilt.n_pages;
            assert_eq!(n_pages > 0, continuation == Continuation::Strategy);
            outputs.push(all);
        }
        assert!(outputs[0] == outputs[1], "{continuation:?}");
    }
}

#[test]
fn a_fork_keeps_the_page_that_the_other_codes_anew() {
    let script = Script::new(4);
    let other = SeqId(1);
    // The first page is coded anew with token 178.
    let at = 170;
    let mut alone = streaming(&newest(Some(0.5)));
    script.run(&mut alone, SEQ, 0..at, 1);
    let want = script.run(&mut alone, SEQ, at..N, 1);
    let of_one = alone.memory().rebuilt;

    let mut cache = streaming(&newest(Some(0.5)));
    script.run(&mut cache, SEQ, 0..at, 1);
    assert_eq!(cache.memory().rebuilt.n_pages, 0);
    cache.fork(SEQ, other).unwrap();
    let held = rows(&cache, other);
    let bytes = cache.memory().payload_bytes;
    assert_eq!(script.run(&mut cache, SEQ, at..N, 1), want);
    assert_eq!(cache.memory().rebuilt, of_one);
    assert!(rows(&cache, other) == held);
    assert!(
        cache.memory().payload_bytes > bytes,
        "no page is shared any more"
    );
    assert_eq!(script.run(&mut cache, other, at..N, 1), want);
    let mut both = of_one;
    both.add(&of_one, 1);
    assert_eq!(cache.memory().rebuilt, both);

    // A fork has what was done to its pages before it.
    cache.release(SEQ).unwrap();
    cache.fork(other, SEQ).unwrap();
    assert_eq!(cache.memory().rebuilt, both);
    for seq in [SEQ, other] {
        cache.release(seq).unwrap();
    }
    assert_eq!(cache.memory().rebuilt, Rebuilt::default());
    assert_eq!(cache.memory().payload_bytes, 0);
}

#[test]
fn packed_and_parked_pages_are_coded_anew_and_sealed_again() {
    let script = Script::new(6);
    let with = |pack: Option<&str>, place: Option<&str>| Strategy {
        pack: pack.map(StageSpec::plain),
        place: place.map(StageSpec::plain),
        ..newest(Some(0.5))
    };
    let mut plain = streaming(&with(None, None));
    let want = script.run(&mut plain, SEQ, 0..N, 1);
    let of_plain = plain.memory().rebuilt;
    for (pack, place) in [
        (Some("zstd"), None),
        (None, Some("file")),
        (Some("zstd"), Some("file")),
    ] {
        let mut cache = streaming(&with(pack, place));
        let mut got = script.run(&mut cache, SEQ, 0..178, 1);
        assert_eq!(cache.memory().rebuilt.n_pages, 0);
        let before = cache.memory();
        let next = script.run(&mut cache, SEQ, 178..180, 1);
        let after = cache.memory();
        assert_eq!(after.rebuilt.n_pages, 4, "{pack:?} {place:?}");
        let bytes = |m: &MemoryReport| match place {
            Some(_) => m.backing_bytes,
            None => m.payload_bytes + m.scale_bytes,
        };
        // Half a byte a channel for 52 of 103 rows of four heads; V's rows take 1024 bytes of that again, at most.
        let fallen = bytes(&before) as i64 - bytes(&after) as i64;
        assert!(fallen > 2300, "{pack:?} {place:?}: {fallen}");
        for head in cache.sequences[&SEQ].layers.iter().flat_map(|l| &l.heads) {
            let table = &head.tables[Side::K as usize][Class::Coded as usize];
            let page = table.page(0).unwrap();
            assert!(page.sealed);
            let parked = matches!(page.bytes, PageBytes::Parked { .. });
            assert_eq!(parked, place.is_some());
        }
        let rest = script.run(&mut cache, SEQ, 180..N, 1);
        for part in [next, rest] {
            for (got, part) in got.iter_mut().zip(part) {
                got.extend(part);
            }
        }
        assert!(got == want, "{pack:?} {place:?}");
        assert_eq!(cache.memory().rebuilt, of_plain);
    }
}

#[test]
fn a_part_is_more_than_nothing_and_at_most_the_whole() {
    for (part, is_one) in [(0.0, false), (-0.5, false), (1.5, false), (0.25, true)] {
        for name in ["window", "random", "knorm"] {
            let given = [match name {
                "window" => ("recent", Value::Int(50)),
                _ => ("tokens", Value::Int(50)),
            }];
            let told = built(&strategy((name, &given), Some(part), 128));
            assert_eq!(told.is_ok(), is_one, "{name} {part}");
            if let Err(e) = told {
                let text = e.to_string();
                let words = "a number greater than 0 and at most 1";
                assert!(text.contains("`rebuild`") && text.contains(words), "{text}");
            }
        }
    }
    // Where nothing leaves while a sequence decodes, there is nothing to code anew.
    let given = [("tokens", Value::Int(200))];
    let told = built(&strategy(("snapkv", &given), Some(0.5), 128));
    let text = told.err().unwrap().to_string();
    assert!(text.contains("unknown parameter `rebuild`"), "{text}");
}

/// Streams over K and V as `int4-best` has them.
#[test]
fn a_stream_takes_fewer_bytes_by_row() {
    let script = Script::new(8);
    let gate = [
        ("file", Value::Text("random".to_owned())),
        ("tokens", Value::Int(60)),
        ("allocate", Value::Text("uniform".to_owned())),
        ("recent", Value::Int(32)),
    ];
    let knorm = [("tokens", Value::Int(60))];
    for retain in [("gate", &gate[..]), ("knorm", &knorm)] {
        let bytes = |rebuild: Option<f64>| {
            let value = [
                ("group", Value::Int(64)),
                ("scales", Value::Text("fp8".to_owned())),
            ];
            let strategy = Strategy {
                keys: KeyForm::PreRope,
                project_v: vec![StageSpec::plain("hadamard")],
                encode_v: spec("int4", &value),
                sinks: 4,
                ..strategy(retain, rebuild, 128)
            };
            let mut cache = streaming(&strategy);
            script.run(&mut cache, SEQ, 0..N, 1);
            let m = cache.memory();
            assert_eq!(m.rebuilt.is_nothing(), rebuild.is_none());
            m.resident_bytes() as f64 / m.rows_live as f64
        };
        let [with, without] = [Some(0.5), None].map(bytes);
        assert!(with < 0.95 * without, "{retain:?}: {with} {without}");
    }
}
