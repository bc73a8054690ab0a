//! Delayed eviction: a gate's threshold decides on a row when it comes, and the row leaves when it is no longer recent.

use kvlab::cache::stage::{BuildContext, KeyForm, Kind, NewRow, Params, Side, Stage, Value, find};
use kvlab::cache::strategy::{StageSpec, Strategy};
use kvlab::cache::{Admission, Continuation, Geometry, KvCache, SeqId};

use super::oracle::oracle;
use super::support::{
    Script, add, assert_bits, build, parse_example, resume, run, script, step, tiny,
};

const SEQ: SeqId = SeqId(0);
const RECENT: usize = 10;
const THRESHOLD: f32 = 0.3;
const N: usize = 150;

fn spec() -> StageSpec {
    let given = [
        ("file", Value::Text("random".into())),
        ("threshold", Value::Float(f64::from(THRESHOLD))),
        ("sinks", Value::Int(0)),
        ("recent", Value::Int(RECENT as i64)),
    ];
    StageSpec {
        name: "gate".into(),
        params: Params(given.map(|(k, v)| (k.to_owned(), v)).into()),
    }
}

fn strategy(encode: &str) -> Strategy {
    let mut strategy = Strategy::bare("f16");
    add(&mut strategy, Kind::Encode, parse_example(encode));
    add(&mut strategy, Kind::Retain, spec());
    strategy
}

/// Whether each row reaches the threshold by itself, `[layer][kv_head][token]`: the gate is asked for one row at a time.
fn worth_keeping(g: &Geometry, s: &Script) -> Vec<Vec<Vec<bool>>> {
    let def = find(Kind::Retain, "gate").expect("registered");
    let context = BuildContext {
        geometry: g,
        keys: KeyForm::PostRope,
        side: Side::K,
        calibration: None,
        backing_dir: None,
        head: None,
    };
    let params = Params::resolve(def, &spec().params).expect("parameters");
    let Ok(Stage::Retain(gate)) = (def.build)(&params, &context) else {
        panic!("a gate is a retention");
    };
    let row = |layer, kv_head, t| {
        let row = NewRow {
            layer,
            kv_head,
            position: t as u32,
            k: &[],
            v: &[],
            hidden: s.hidden(layer, t),
        };
        gate.score(row) >= THRESHOLD
    };
    let head = |l, h| (0..s.n_tokens).map(|t| row(l, h, t)).collect();
    let layer = |l: usize| (0..g.layers[l].n_kv_heads).map(|h| head(l, h)).collect();
    (0..g.layers.len()).map(layer).collect()
}

/// Rows that live once `n` tokens were seen.
fn n_live(keeps: &[Vec<Vec<bool>>], n: usize) -> u64 {
    let heads = keeps.iter().flatten();
    let lives = |head: &Vec<bool>| (0..n).filter(|&t| head[t] || t + RECENT >= n).count() as u64;
    heads.map(lives).sum()
}

/// A row under the threshold is seen by itself and by exactly `recent` more tokens, whatever the chunks in which a prompt or
/// an answer comes.
#[test]
fn a_low_row_is_seen_until_it_is_no_longer_recent() {
    let g = tiny();
    let s = script(&g, N, 111, 0.5);
    let keeps = worth_keeping(&g, &s);
    let n_low = keeps.iter().flatten().flatten().filter(|k| !**k).count();
    assert!((N..3 * N).contains(&n_low), "{n_low} of {}", 4 * N);
    let mut want: Option<Vec<Vec<f32>>> = None;
    for chunks in [&[1][..], &[90, 1, 1, 7], &[N]] {
        let mut cache = build(&strategy(r#""f32""#), &g);
        let got = run(&mut cache, &g, SEQ, &s, chunks);
        assert_eq!(cache.memory().rows_live, n_live(&keeps, N));
        for (l, got) in got.iter().enumerate() {
            let seen = |q: usize, h: usize, t: usize| keeps[l][h][t] || q - t <= RECENT;
            let exact = oracle(&g, &s, l, &seen);
            for (a, b) in got.iter().zip(&exact) {
                assert!((f64::from(*a) - b).abs() < 2e-5, "layer {l}: {a} {b}");
            }
            // One token sooner or later is another cache.
            for recent in [RECENT - 1, RECENT + 1] {
                let seen = |q: usize, h: usize, t: usize| keeps[l][h][t] || q - t <= recent;
                let other = oracle(&g, &s, l, &seen);
                let far = got.iter().zip(&other);
                let far = far.filter(|(a, b)| (f64::from(**a) - *b).abs() > 1e-3);
                assert!(far.count() > N, "layer {l}: {recent}");
            }
        }
        match &want {
            None => want = Some(got),
            Some(want) => assert_bits("chunks", want, &got),
        }
    }
}

/// Each decoded token frees what ceased to be recent with it, to the byte.
#[test]
fn memory_falls_with_each_token() {
    let g = tiny();
    let s = script(&g, N, 112, 0.5);
    let keeps = worth_keeping(&g, &s);
    let mut cache = build(&strategy(r#""q8_0""#), &g);
    cache.admit(SEQ, Admission::Streaming).expect("fresh");
    let mut n_falls = 0;
    for t in 0..N {
        let before = cache.memory().rows_live;
        step(&mut cache, &g, SEQ, &s, t..t + 1).expect("a step");
        let m = cache.memory();
        assert_eq!(m.rows_live, n_live(&keeps, t + 1), "after {}", t + 1);
        // K and V, 32 channels: a block of 34 bytes.
        let bytes = m.payload_bytes + m.scale_bytes + m.exact_bytes;
        assert_eq!(bytes, m.rows_live * 2 * 34, "after {}", t + 1);
        n_falls += usize::from(m.rows_live < before + 4);
    }
    assert!(n_falls > N / 2, "{n_falls}");
}

/// A compression point decides by the same rule, and what was recent there leaves in its time.
#[test]
fn what_was_recent_at_a_compression_point_leaves_later() {
    let g = tiny();
    let s = script(&g, N, 113, 0.5);
    let keeps = worth_keeping(&g, &s);
    const CONTEXT: usize = 90;
    let mut cache = build(&strategy(r#""f16""#), &g);
    cache.admit(SEQ, Admission::Context).expect("fresh");
    resume(&mut cache, &g, SEQ, &s, 0..CONTEXT, &[40]);
    assert_eq!(cache.memory().rows_live, 4 * CONTEXT as u64);
    cache
        .compress(SEQ, Continuation::Strategy)
        .expect("compressed");
    assert_eq!(cache.memory().rows_live, n_live(&keeps, CONTEXT));
    for t in CONTEXT..N {
        step(&mut cache, &g, SEQ, &s, t..t + 1).expect("a step");
        assert_eq!(cache.memory().rows_live, n_live(&keeps, t + 1));
    }
}
