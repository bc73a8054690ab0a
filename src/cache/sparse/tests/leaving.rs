//! What is kept for rows goes with them; and what trials and ranking read is counted.

use super::*;

/// Lives: 4 first rows and the 40 newest.
fn windowed(strategy: Strategy) -> Strategy {
    let params = [("recent", Value::Int(40)), ("sinks", Value::Int(4))];
    Strategy {
        retain: Some(StageSpec {
            name: "window".to_owned(),
            params: Params(params.map(|(k, v)| (k.to_owned(), v)).into()),
        }),
        ..strategy
    }
}

/// Decodes up to `n` tokens one by one; all outputs.
fn decoded(script: &Script, strategy: &Strategy, n: usize) -> (StagedCache, Vec<Vec<f32>>) {
    let mut cache = built(strategy).unwrap();
    cache.admit(SEQ, Admission::Streaming).unwrap();
    let mut out = vec![Vec::new(); 2];
    for t in 0..n {
        let step = script.step(&mut cache, SEQ, t..t + 1, 0).unwrap();
        out.iter_mut().zip(step).for_each(|(a, b)| a.extend(b));
    }
    (cache, out)
}

/// Blocks of 16 of which a head keeps bounds.
fn n_blocks(cache: &StagedCache) -> Vec<usize> {
    let state = cache.sparse.as_ref().unwrap().states().next().unwrap();
    let State::Blocks(layers) = state else {
        panic!("no blocks here");
    };
    let heads = layers.iter().flatten();
    heads.map(|h| h.read_bytes() as usize / (4 * D)).collect()
}

#[test]
fn bounds_go_with_the_last_row_of_a_block() {
    let script = Script::new(31);
    let strategy = windowed(quest(512, 0));
    // Rows 0 to 3 and 160 to 199: blocks 0, 10, 11 and 12.
    let (cache, out) = decoded(&script, &strategy, 200);
    assert_eq!(n_blocks(&cache), [4; 4]);
    // Rows 165 to 204 need no other block.
    assert_eq!(n_blocks(&decoded(&script, &strategy, 205).0), [4; 4]);
    assert_eq!(n_blocks(&decoded(&script, &strategy, 209).0), [5; 4]);
    // All that lives is read: the plain cache, to the bit.
    let plain = Strategy {
        place: None,
        ..strategy.clone()
    };
    assert_eq!(out, decoded(&script, &plain, 200).1);
    // A fork keeps its own, and a context's point lets go of what leaves there.
    let mut cache = script.compressed(&strategy, 200);
    assert_eq!(n_blocks(&cache), [4; 4]);
    cache.fork(SEQ, SeqId(9)).unwrap();
    cache.release(SEQ).unwrap();
    assert_eq!(n_blocks(&cache), [4; 4]);
}

#[test]
fn few_blocks_are_chosen_among_those_that_live() {
    // The last token sees rows 0 to 3 and 159 to 199, in five blocks, its own among them; eight others have left.
    let script = Script::new(32);
    let (_, few) = decoded(&script, &windowed(quest(48, 0)), 200);
    let (_, all) = decoded(&script, &windowed(quest(80, 0)), 200);
    let last = |out: &[Vec<f32>]| out[0][199 * 4 * D..].to_vec();
    assert_ne!(last(&few), last(&all));
    let (_, more) = decoded(&script, &windowed(quest(512, 0)), 200);
    assert_eq!(
        last(&all),
        last(&more),
        "five blocks live, and five are read"
    );
}

#[test]
fn copies_in_the_tier_go_with_their_rows() {
    let script = Script::new(33);
    for tier in ["memory", "file"] {
        let strategy = windowed(specache("f16", 9, "demand", tier));
        let bytes = |n| decoded(&script, &strategy, n).0.memory().backing_bytes;
        // 128 records of K and V in f16 for each range of each of 4 heads.
        let block = 4 * 128 * 2 * 2 * D as u64;
        // Coded and alive: 2, 3 and 210 to 229; then 2, 3 and 260 to 279.
        assert_eq!(bytes(250), 2 * block, "{tier}");
        assert_eq!(bytes(300), 2 * block, "{tier}");
        let unlimited = specache("f16", 9, "demand", tier);
        let all = decoded(&script, &unlimited, 300).0.memory().backing_bytes;
        assert_eq!(all, 3 * block, "{tier}");
        // A fork's copies are its own to keep.
        let (mut cache, _) = decoded(&script, &strategy, 250);
        cache.fork(SEQ, SeqId(9)).unwrap();
        for t in 250..300 {
            script.step(&mut cache, SEQ, t..t + 1, 0).unwrap();
        }
        assert_eq!(cache.memory().backing_bytes, 3 * block, "{tier}");
        cache.release(SeqId(9)).unwrap();
        assert_eq!(cache.memory().backing_bytes, 2 * block, "{tier}");
    }
}

#[test]
fn trials_and_ranking_read_what_they_read() {
    let script = Script::new(34);
    let n = 260;
    // One side of four heads: rows in f16, and the token's own in f32.
    let side = 4 * (n as u64 * 2 * D as u64 + 4 * D as u64);
    let mut cache = script.compressed(&specache("f16", 9, "demand", "memory"), n);
    cache.watch(Watch::Hits, None);
    script.step(&mut cache, SEQ, n..n + 1, 0).unwrap();
    let t = cache.traffic().unwrap();
    assert_eq!((t.n_steps, t.ranking_bytes, t.tried_bytes), (1, side, 0));
    assert_eq!(t.readable_bytes, 2 * side);
    let mut cache = script.compressed(&specache("f16", 9, "speculative", "memory"), n);
    let before = cache.memory().scratch_bytes;
    cache.watch(Watch::Hits, None);
    script.step(&mut cache, SEQ, n..n + 1, 1).unwrap();
    let t = cache.traffic().unwrap();
    assert_eq!((t.n_steps, t.ranking_bytes), (0, side));
    assert_eq!((t.tried_bytes, t.read_bytes), (2 * side, 0));
    // Ranking's working memory is charged.
    let least = 2 * n as u64 * 4 + 2 * n as u64 * 8;
    let after = cache.memory().scratch_bytes;
    assert!(after >= before + least, "{before} {after}");
    // Where nothing is watched nothing is counted.
    cache.watch(Watch::Nothing, None);
    script.step(&mut cache, SEQ, n..n + 2, 1).unwrap();
    let t = cache.traffic().unwrap();
    assert_eq!((t.n_steps, t.ranking_bytes, t.tried_bytes), (1, 0, 0));
}
