//! Bits by row through the cache: bytes that hold, 8 bits that are int8's, the same bits from any chunks, threads and neighbours.

use kvlab::cache::inspect::HeadRows;
use kvlab::cache::stage::{KeyForm, Kind, Value};
use kvlab::cache::strategy::{ExactFormat, Strategy};
use kvlab::cache::{Admission, Continuation, Geometry, KvCache, SeqId, StagedCache};

use super::retain::show;
use super::support::{Script, add, build, geometry, parse_example, resume, script};

const SEQ: SeqId = SeqId(0);
const N: usize = 512;
const GATE: &str = r#"{ method = "joint", file = "random", bytes = 1, recent = 8 }"#;
const TEACHER: &str = r#"{ method = "joint", score = "kvzip_plus", bytes = 1, recent = 8 }"#;

/// As int4-best has it: keys before RoPE by channel, values turned and by token; 4 sinks.
fn strategy(retain: &str, bits: &str) -> Strategy {
    let mut s = Strategy::bare("f16");
    let k = format!(r#"{{ method = "{bits}", axis = "channel", page = 128, group = 128 }}"#);
    let v = format!(r#"{{ method = "{bits}", group = 64, scales = "fp8" }}"#);
    (s.encode_k, s.encode_v) = (parse_example(&k), parse_example(&v));
    s.project_v = vec![parse_example(r#""hadamard""#)];
    (s.keys, s.sinks, s.label) = (KeyForm::PreRope, 4, retain.to_owned());
    add(&mut s, Kind::Retain, parse_example(retain));
    s
}

fn within(retain: &str, bytes: i64) -> Strategy {
    let mut s = strategy(retain, "int4");
    let params = &mut s.retain.as_mut().expect("a stage").params.0;
    params.insert("bytes".into(), Value::Int(bytes));
    s
}

fn compress(
    cache: &mut StagedCache,
    (g, s): (&Geometry, &Script),
    seq: SeqId,
    chunks: &[usize],
    continuation: Continuation,
) {
    cache.admit(seq, Admission::Context).expect("fresh");
    resume(cache, g, seq, s, 0..N, chunks);
    show(cache, g, seq, (s, N)).expect("shown");
    cache.compress(seq, continuation).expect("compressed");
}

fn rows(cache: &StagedCache) -> Vec<HeadRows> {
    let mut rows = Vec::new();
    let each = |_: usize, heads: &[HeadRows]| rows.extend(heads.to_vec());
    cache.inspect(SEQ, each).expect("rows");
    rows
}

#[test]
fn the_bytes_hold_and_more_of_them_are_closer_to_the_full_cache() {
    let g = geometry(4, 2, 64);
    let s = script(&g, N + 40, 401, 0.5);
    for (retain, continuation) in [
        (GATE, Continuation::Strategy),
        (TEACHER, Continuation::Exact),
    ] {
        let output = |strategy: &Strategy| {
            let mut cache = build(strategy, &g);
            compress(&mut cache, (&g, &s), SEQ, &[64], continuation);
            let m = cache.memory();
            (resume(&mut cache, &g, SEQ, &s, N..N + 40, &[40]), m)
        };
        let (want, _) = output(&Strategy::bare("f32"));
        let mut last = f64::INFINITY;
        for bytes in [45_000i64, 80_000, 140_000, 10_000_000] {
            let (got, m) = output(&within(retain, bytes));
            assert!(
                m.resident_bytes() <= bytes as u64,
                "{retain} in {bytes}: {m:?}"
            );
            assert!(
                bytes > 200_000 || m.resident_bytes() * 100 > bytes as u64 * 90,
                "{bytes}: {m:?}"
            );
            let pairs = got.iter().flatten().zip(want.iter().flatten());
            let error: f64 = pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum();
            assert!(
                error < last,
                "{retain} in {bytes}: {error}, with fewer bytes {last}"
            );
            last = error;
        }
    }
}

#[test]
fn room_for_everything_is_int8() {
    let g = geometry(4, 2, 64);
    let s = script(&g, N + 40, 402, 0.5);
    let plain = strategy(r#"{ method = "kvzip_plus", kept_fraction = 1.0 }"#, "int8");
    let output = |mut strategy: Strategy| {
        strategy.exact = ExactFormat::F32;
        let mut cache = build(&strategy, &g);
        compress(&mut cache, (&g, &s), SEQ, &[64], Continuation::Exact);
        let m = cache.memory();
        let out = resume(&mut cache, &g, SEQ, &s, N..N + 40, &[40]);
        (rows(&cache), out, m)
    };
    let (want_rows, want, plain) = output(plain);
    let (got_rows, got, m) = output(within(TEACHER, 1 << 40));
    assert_eq!(want_rows, got_rows);
    assert_eq!(want, got);
    assert_eq!(m.rows_live, plain.rows_live);
    // Two bits of level for each key and value; the sinks' places have 2 bits a number instead of 8 for K, and are there for V.
    let n_pages = 4 * 4;
    let levels = n_pages * 2 * 128 / 4;
    let sinks = 4 * (16 + 2) * 4 - 4 * (64 - 16) * 4;
    let coded = |m: &kvlab::cache::MemoryReport| (m.payload_bytes + m.scale_bytes) as i64;
    assert_eq!(coded(&m), coded(&plain) + levels + sinks);
}

#[test]
fn chunks_threads_and_neighbours_change_no_bit() {
    let g = geometry(4, 2, 64);
    let (s, other) = (script(&g, N + 40, 403, 0.5), script(&g, N, 404, 0.5));
    for retain in [GATE, TEACHER] {
        let strategy = within(retain, 60_000);
        let run = |n_threads: usize, chunks: &[usize], beside: bool| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads);
            pool.build().expect("a pool").install(|| {
                let mut cache = build(&strategy, &g);
                if beside {
                    compress(
                        &mut cache,
                        (&g, &other),
                        SeqId(3),
                        &[64],
                        Continuation::Exact,
                    );
                }
                compress(&mut cache, (&g, &s), SEQ, chunks, Continuation::Strategy);
                let fork = SeqId(9);
                cache.fork(SEQ, fork).expect("a fork");
                let out = resume(&mut cache, &g, fork, &s, N..N + 40, chunks);
                (rows(&cache), out)
            })
        };
        let want = run(1, &[64], false);
        assert_eq!(want, run(2, &[N], false));
        assert_eq!(want, run(3, &[7, 50, 1], true));
    }
}

/// Pages that fill up after the point have the bits that `encode` names, and nothing leaves.
#[test]
fn what_comes_after_the_point_has_the_format_s_own_bits() {
    let g = geometry(4, 2, 64);
    let s = script(&g, N + 256, 405, 0.5);
    let mut cache = build(&within(GATE, 60_000), &g);
    compress(&mut cache, (&g, &s), SEQ, &[64], Continuation::Strategy);
    let before = cache.memory();
    resume(&mut cache, &g, SEQ, &s, N..N + 256, &[30]);
    let after = cache.memory();
    assert_eq!(after.rows_live, before.rows_live + 4 * 256);
    let n_pages = 4 * 2;
    // 64 channels of 4 bits, K and V, and 2 bits of level; scales of f16 by channel, of fp8 by row.
    assert_eq!(
        after.payload_bytes - before.payload_bytes,
        n_pages * 128 * 64
    );
    let scales = n_pages * (2 * 32 + 64 * 4 + 128 * 2);
    assert_eq!(after.scale_bytes - before.scale_bytes, scales);
    assert_eq!(after.index_bytes, 0);
}
