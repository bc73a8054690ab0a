//! What a cache refuses, with the numbers.

use kvlab::cache::strategy::Strategy;
use kvlab::cache::{Admission, Batch, CacheError, KvCache, SeqId};

use super::support::{build, script, step, tiny};

#[test]
fn non_finite_rows_are_named_and_refused() {
    let g = tiny();
    let mut s = script(&g, 10, 62, 0.5);
    s.k[1][7 * 64 + 3] = f32::INFINITY;
    let mut cache = build(&Strategy::bare("f16"), &g);
    cache.admit(SeqId(0), Admission::Streaming).expect("fresh");
    let error = step(&mut cache, &g, SeqId(0), &s, 0..10).expect_err("an infinity in K");
    assert!(
        matches!(
            error,
            CacheError::NonFinite {
                side: "K",
                layer: 1,
                head: 0,
                position: 7
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("layer 1, KV head 0, position 7"));
    // Layer 0 holds rows that layer 1 lacks: the sequence can only be released.
    let again = step(&mut cache, &g, SeqId(0), &s, 0..5).expect_err("a broken sequence");
    assert!(matches!(again, CacheError::Broken(0)), "{again}");
    assert!(matches!(
        cache.truncate(SeqId(0), 0),
        Err(CacheError::Broken(0))
    ));
    cache.release(SeqId(0)).expect("release");
}

#[test]
fn misuse_is_refused_with_the_numbers() {
    let g = tiny();
    let s = script(&g, 10, 63, 0.5);
    let mut cache = build(&Strategy::bare("f16"), &g);
    assert!(matches!(
        cache.len(SeqId(3)),
        Err(CacheError::UnknownSequence(3))
    ));
    cache.admit(SeqId(0), Admission::Streaming).expect("fresh");
    assert!(matches!(
        cache.admit(SeqId(0), Admission::Streaming),
        Err(CacheError::SequenceExists(0))
    ));
    let gap = step(&mut cache, &g, SeqId(0), &s, 2..4).expect_err("a gap");
    assert_eq!(
        gap.to_string(),
        "sequence 0: rows start at position 2, the next one is 0"
    );
    let batch = Batch::single(SeqId(0), 0..2);
    let mut out = [0.0; 3];
    assert!(matches!(
        cache.attend(0, &batch, &[0.0; 256], &mut out),
        Err(CacheError::Shape { .. })
    ));
    let long = script(&g, 1025, 64, 0.5);
    let over = step(&mut cache, &g, SeqId(0), &long, 0..1025).expect_err("past the context");
    assert!(
        matches!(
            over,
            CacheError::ContextLimit {
                position: 1024,
                limit: 1024
            }
        ),
        "{over}"
    );
}
