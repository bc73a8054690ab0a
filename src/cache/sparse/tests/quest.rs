//! Which blocks are read: by bounds worked out again in f64; and that reading all of them is the plain cache.

use super::*;

#[test]
fn quest_reads_the_blocks_with_the_highest_bounds_and_its_own() {
    let script = Script::new(7);
    let (n, g) = (250, &geometry().layers[0]);
    let mut cache = script.compressed(&quest(64, 1), n);
    let out = script.step(&mut cache, SEQ, n..n + 1, 0).unwrap();
    // The first layer reads all.
    let all: Vec<usize> = (0..=n).collect();
    let (_, want) = oracle(&script, 0, 3, n, &all);
    assert!(error(&out[0][3 * D..4 * D], &want) < 1e-3);
    for kv in 0..2 {
        let keys: Vec<Vec<f32>> = (0..=n)
            .map(|p| {
                let mut k = script.0[1][0][(p * 2 + kv) * D..][..D].to_vec();
                g.rope.rotate(p as u32, &mut k);
                k.iter().map(|&x| half::f16::from_f32(x).to_f32()).collect()
            })
            .collect();
        let bound = |block: usize, head: usize| {
            let mut q = script.0[1][2][(n * 4 + head) * D..][..D].to_vec();
            g.rope.rotate(n as u32, &mut q);
            let channel = |c: usize| {
                let x = keys[16 * block..16 * block + 16]
                    .iter()
                    .map(|k| f64::from(q[c] * k[c]));
                x.fold(f64::MIN, f64::max)
            };
            (0..D).map(channel).sum::<f64>()
        };
        let mut blocks: Vec<usize> = (0..n / 16).collect();
        let highest = |b: usize| bound(b, 2 * kv).max(bound(b, 2 * kv + 1));
        blocks.sort_by(|&a, &b| highest(b).total_cmp(&highest(a)));
        blocks.truncate(3);
        blocks.push(n / 16);
        blocks.sort_unstable();
        let read: Vec<usize> = (0..=n).filter(|p| blocks.contains(&(p / 16))).collect();
        for head in 2 * kv..2 * kv + 2 {
            let (_, want) = oracle(&script, 1, head, n, &read);
            let e = error(&out[1][head * D..(head + 1) * D], &want);
            assert!(e < 1e-3, "head {head}: {e}");
        }
    }
}

#[test]
fn quest_that_reads_everything_is_the_plain_cache_and_chunks_change_nothing() {
    let script = Script::new(8);
    let run = |strategy: &Strategy, chunk: usize| {
        let mut cache = built(strategy).unwrap();
        cache.admit(SEQ, Admission::Streaming).unwrap();
        let mut out = vec![Vec::new(); 2];
        let mut at = 0;
        while at < 280 {
            let end = (at + cache.step_limit(SEQ, chunk)).min(280);
            for (out, part) in out
                .iter_mut()
                .zip(script.step(&mut cache, SEQ, at..end, 0).unwrap())
            {
                out.extend(part);
            }
            at = end;
        }
        out
    };
    let plain = Strategy {
        place: None,
        ..quest(512, 0)
    };
    assert_eq!(run(&quest(512, 0), 1), run(&plain, 1));
    let sparse = run(&quest(48, 0), 1);
    assert_eq!(sparse, run(&quest(48, 0), 50));
    assert_ne!(sparse, run(&plain, 1));
}

#[test]
fn quest_counts_what_it_reads_and_stores() {
    let script = Script::new(9);
    let n = 256;
    let mut cache = script.compressed(&quest(64, 0), n);
    let bounds = cache.memory().index_bytes;
    // Sixteen blocks of 16 rows: least and greatest, f16, and a number, of four heads.
    assert_eq!(bounds, 16 * 4 * (2 * 2 * D as u64 + 4));
    cache.watch(Watch::Hits, None);
    script.step(&mut cache, SEQ, n..n + 1, 0).unwrap();
    let t = cache.traffic().unwrap();
    assert_eq!(t.n_steps, 1);
    // Three blocks of 16 rows and the own one, of which one row is there. Rows are f32, sinks and tail f16.
    assert!(t.read_bytes - bounds <= 49 * 2 * 4 * 4 * D as u64, "{t:?}");
    assert!(t.read_bytes - bounds > 49 * 2 * 4 * 2 * D as u64, "{t:?}");
    assert!(t.readable_bytes > 4 * t.read_bytes / 2, "{t:?}");
    let refused = cache.truncate(SEQ, 200).unwrap_err();
    assert!(
        matches!(refused, CacheError::Irreversible { .. }),
        "{refused}"
    );
}
