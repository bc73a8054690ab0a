//! Chunks, batches, threads and forks never change a result, for every registered stage.

use kvlab::cache::{Admission, Batch, KvCache, Rows, SeqId};

use super::support::{
    assert_bits, build, is_page_wise, matrix, predicts, resume, run, script, tiny,
};

#[test]
fn chunks_equal_decoding_to_the_bit_and_store_the_same_bytes() {
    let mut windowed = tiny();
    windowed.layers[1].window = Some(50);
    for g in [tiny(), windowed] {
        let s = script(&g, 290, 11, 0.5);
        let windowed = g.layers[1].window.is_some();
        for strategy in matrix().into_iter().filter(|s| !windowed || !predicts(s)) {
            let mut one = build(&strategy, &g);
            let want = run(&mut one, &g, SeqId(0), &s, &[1]);
            for chunks in [&[290usize][..], &[7, 13, 20], &[64, 1]] {
                let mut cache = build(&strategy, &g);
                let got = run(&mut cache, &g, SeqId(0), &s, chunks);
                let what = format!(
                    "{}, window {:?}, in chunks {chunks:?}",
                    strategy.label, g.layers[1].window
                );
                assert_bits(&what, &want, &got);
                assert_eq!(stored(&one), stored(&cache), "{what}");
            }
        }
    }
}

/// What is stored, apart from page tables (which keep the room they once needed) and scratch.
fn stored(cache: &dyn KvCache) -> [u64; 7] {
    let m = cache.memory();
    [
        m.payload_bytes,
        m.scale_bytes,
        m.exact_bytes,
        m.slack_bytes,
        m.backing_bytes,
        m.rows_live,
        m.rows_seen,
    ]
}

#[test]
fn a_ragged_batch_equals_each_sequence_alone() {
    let g = tiny();
    let scripts = [
        script(&g, 3, 21, 0.5),
        script(&g, 140, 22, 500.0),
        script(&g, 40, 23, 0.5),
    ];
    for strategy in matrix() {
        let mut together = build(&strategy, &g);
        for i in 0..3 {
            together
                .admit(SeqId(i), Admission::Streaming)
                .expect("fresh");
        }
        let mut got = vec![vec![Vec::new(); 2]; 3];
        let mut at = [0usize; 3];
        while at.iter().zip(&scripts).any(|(a, s)| *a < s.n_tokens) {
            let mut batch = Batch::new();
            let mut members = Vec::new();
            for (i, s) in scripts.iter().enumerate() {
                let n = (5 + 3 * i).min(s.n_tokens - at[i]);
                if n > 0 {
                    batch.push(SeqId(i as u32), at[i] as u32..(at[i] + n) as u32);
                    members.push((i, at[i]..at[i] + n));
                    at[i] += n;
                }
            }
            for layer in [0, 1] {
                let gather = |pick: &dyn Fn(usize) -> (Vec<f32>, usize)| -> Vec<f32> {
                    members
                        .iter()
                        .flat_map(|(i, r)| {
                            let (x, w) = pick(*i);
                            x[r.start * w..r.end * w].to_vec()
                        })
                        .collect()
                };
                let k = gather(&|i| (scripts[i].k[layer].clone(), 64));
                let v = gather(&|i| (scripts[i].v[layer].clone(), 64));
                let q = gather(&|i| (scripts[i].q[layer].clone(), 128));
                together
                    .append(
                        layer,
                        &batch,
                        Rows {
                            k: &k,
                            v: &v,
                            hidden: &[],
                        },
                    )
                    .expect("append");
                let mut out = vec![0.0; q.len()];
                together
                    .attend(layer, &batch, &q, &mut out)
                    .expect("attend");
                for (span, (i, _)) in batch.spans().iter().zip(&members) {
                    got[*i][layer]
                        .extend_from_slice(&out[span.first_row * 128..][..span.n_tokens() * 128]);
                }
            }
            together.commit(&batch).expect("commit");
        }
        for (i, s) in scripts.iter().enumerate() {
            let mut alone = build(&strategy, &g);
            let want = run(&mut alone, &g, SeqId(9), s, &[s.n_tokens]);
            assert_bits(&format!("{}, sequence {i}", strategy.label), &want, &got[i]);
        }
    }
}

#[test]
fn one_thread_and_two_give_the_same_bits() {
    let g = tiny();
    let s = script(&g, 200, 31, 0.5);
    let pool = |n| {
        rayon::ThreadPoolBuilder::new()
            .num_threads(n)
            .build()
            .expect("a pool")
    };
    for strategy in matrix() {
        let [a, b] = [1, 2].map(|n| {
            pool(n).install(|| {
                let mut cache = build(&strategy, &g);
                run(&mut cache, &g, SeqId(0), &s, &[50])
            })
        });
        assert_bits(&strategy.label, &a, &b);
    }
}

#[test]
fn a_fork_continues_as_the_original_would_and_leaves_it_alone() {
    let g = tiny();
    let s = script(&g, 260, 41, 0.5);
    let other = script(&g, 260, 42, 0.5);
    for strategy in matrix() {
        let mut cache = build(&strategy, &g);
        cache.admit(SeqId(0), Admission::Streaming).expect("fresh");
        resume(&mut cache, &g, SeqId(0), &s, 0..150, &[50]);
        cache.fork(SeqId(0), SeqId(1)).expect("fork");
        // The fork goes another way first; then the original goes on.
        resume(&mut cache, &g, SeqId(1), &other, 150..260, &[30]);
        let got = resume(&mut cache, &g, SeqId(0), &s, 150..260, &[30]);
        let mut alone = build(&strategy, &g);
        alone.admit(SeqId(0), Admission::Streaming).expect("fresh");
        resume(&mut alone, &g, SeqId(0), &s, 0..150, &[50]);
        let want = resume(&mut alone, &g, SeqId(0), &s, 150..260, &[30]);
        assert_bits(&strategy.label, &want, &got);
        cache.release(SeqId(1)).expect("release");
        let (a, b) = (cache.memory(), alone.memory());
        assert_eq!(
            (a.payload_bytes, a.exact_bytes, a.backing_bytes),
            (b.payload_bytes, b.exact_bytes, b.backing_bytes),
            "{}",
            strategy.label
        );
    }
}

#[test]
fn truncation_equals_never_having_appended_or_names_how_far_back_it_can_go() {
    let g = tiny();
    let s = script(&g, 300, 51, 0.5);
    for strategy in matrix() {
        for to in [0u32, 1, 127, 128, 200, 290] {
            let mut cache = build(&strategy, &g);
            run(&mut cache, &g, SeqId(0), &s, &[100]);
            let to = match cache.truncate(SeqId(0), to) {
                Ok(()) => to,
                Err(kvlab::cache::CacheError::Irreversible { earliest, .. }) => {
                    let reversible = strategy.retain.is_none()
                        && strategy.tail == Default::default()
                        && !is_page_wise(&strategy);
                    assert!(
                        !reversible,
                        "{}: row-wise without retention reaches any length",
                        strategy.label
                    );
                    assert!(
                        earliest > to && earliest <= 300,
                        "{}: {earliest}",
                        strategy.label
                    );
                    cache
                        .truncate(SeqId(0), earliest)
                        .expect("the named length can be reached");
                    earliest
                }
                Err(e) => panic!("{}: {e}", strategy.label),
            };
            let got = resume(&mut cache, &g, SeqId(0), &s, to as usize..300, &[33]);
            let mut fresh = build(&strategy, &g);
            fresh.admit(SeqId(0), Admission::Streaming).expect("fresh");
            resume(&mut fresh, &g, SeqId(0), &s, 0..to as usize, &[100]);
            let want = resume(&mut fresh, &g, SeqId(0), &s, to as usize..300, &[33]);
            assert_bits(&format!("{} back to {to}", strategy.label), &want, &got);
        }
    }
}
