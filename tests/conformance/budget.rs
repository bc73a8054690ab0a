//! Mixed precision by budget: never over it, oldest pages first, the same whatever the chunk.

use kvlab::cache::strategy::{Budget, BudgetStep, Scope, StageSpec, Strategy};
use kvlab::cache::{
    Admission, Batch, CacheError, KvCache, Materials, Rows, SeqId, StagedCache, least_budget,
};

use super::support::{Script, assert_bits, build, resume, run, script, step, tiny};

const N: usize = 700;

fn pair(name: &str) -> (StageSpec, StageSpec) {
    (StageSpec::plain(name), StageSpec::plain(name))
}

/// f16, then q8_0, then q4_0, within `bytes`.
fn within(bytes: u64) -> Strategy {
    let mut s = Strategy::bare("f16");
    s.label = format!("within {bytes}");
    s.sinks = 2;
    s.budget = Some(Budget {
        bytes,
        scope: Scope::Sequence,
        steps: Vec::new(),
        then: vec![pair("q8_0"), pair("q4_0")],
    });
    s
}

fn unlimited_bytes(n_tokens: usize) -> u64 {
    let g = tiny();
    let mut cache = build(&within(u64::MAX), &g);
    run(
        &mut cache,
        &g,
        SeqId(0),
        &script(&g, n_tokens, 5, 1.0),
        &[64],
    );
    cache.memory().resident_bytes()
}

/// Feeds one token at a time and calls `look` after each.
fn decode(
    cache: &mut StagedCache,
    seq: SeqId,
    s: &Script,
    mut look: impl FnMut(usize, &StagedCache),
) {
    let g = tiny();
    cache.admit(seq, Admission::Streaming).unwrap();
    for i in 0..s.n_tokens {
        step(cache, &g, seq, s, i..i + 1).unwrap_or_else(|e| panic!("token {i}: {e}"));
        look(i + 1, cache);
    }
}

#[test]
fn no_step_ends_over_the_budget_and_old_pages_go_first() {
    let g = tiny();
    let s = script(&g, N, 5, 1.0);
    let bytes = unlimited_bytes(N) / 2;
    let mut cache = build(&within(bytes), &g);
    let mut last = [0; 4];
    decode(&mut cache, SeqId(0), &s, |n, cache| {
        let report = cache.memory();
        assert!(
            report.resident_bytes() <= bytes,
            "{} of {bytes} bytes at {n}",
            report.resident_bytes()
        );
        // Rows only ever go down, and as a whole range over all layers and heads.
        assert!(report.rows_at_level[2] >= last[2], "{n}");
        let heads = 4;
        assert_eq!(report.rows_at_level[1] % heads, 0);
        last = report.rows_at_level;
    });
    // 700 tokens, 2 sinks apart: all levels are in use, and the newest rows have the most bits.
    assert!(last.iter().take(3).all(|&n| n > 0), "{last:?}");
    assert_eq!(last.iter().sum::<u64>(), 4 * (N as u64 - 2));
    // A budget that isn't needed costs nothing.
    let mut rich = build(&within(u64::MAX), &g);
    let mut plain = within(0);
    plain.budget = None;
    let mut plain = build(&plain, &g);
    let (a, b) = (
        run(&mut rich, &g, SeqId(0), &s, &[64]),
        run(&mut plain, &g, SeqId(0), &s, &[64]),
    );
    assert_bits("an ample budget", &a, &b);
}

#[test]
fn chunks_change_nothing() {
    let g = tiny();
    let s = script(&g, N, 6, 1.0);
    let strategy = within(unlimited_bytes(N) / 2);
    let decoded = run(&mut build(&strategy, &g), &g, SeqId(0), &s, &[1]);
    for asked in [7, 64, 300] {
        let mut cache = build(&strategy, &g);
        cache.admit(SeqId(0), Admission::Streaming).unwrap();
        let mut all = vec![Vec::new(); g.layers.len()];
        let (mut at, mut n_steps) = (0, 0);
        while at < N {
            let n = cache.step_limit(SeqId(0), asked).min(N - at);
            let outs = step(&mut cache, &g, SeqId(0), &s, at..at + n).unwrap();
            for (all, out) in all.iter_mut().zip(outs) {
                all.extend(out);
            }
            at += n;
            n_steps += 1;
        }
        assert_bits(&format!("steps of at most {asked}"), &decoded, &all);
        assert!(
            n_steps < N / 4 || asked < 8,
            "{n_steps} steps of at most {asked}"
        );
    }
}

#[test]
fn a_budget_that_grows_keeps_old_losses_and_codes_new_rows_better() {
    let g = tiny();
    let s = script(&g, N, 7, 1.0);
    let full = unlimited_bytes(N);
    let mut tight = within(full / 2);
    let mut grown = tight.clone();
    if let Some(budget) = &mut grown.budget {
        budget.steps = vec![BudgetStep {
            at: 520,
            bytes: full,
        }];
    }
    let at_end = |strategy: &Strategy| {
        let mut cache = build(strategy, &g);
        let mut at_520 = [0; 4];
        decode(&mut cache, SeqId(0), &s, |n, cache| {
            if n == 519 {
                at_520 = cache.memory().rows_at_level;
            }
        });
        (at_520, cache.memory().rows_at_level)
    };
    let (before, after) = at_end(&grown);
    // What stood at few bits still does; every new row has the most.
    assert_eq!(before[1..], after[1..], "{before:?} {after:?}");
    assert_eq!(after[0] - before[0], 4 * (N as u64 - 519));
    let (_, without) = at_end(&tight);
    assert!(without[2] > after[2]);
    // The same by hand, at run time.
    tight.label = "by hand".into();
    let mut cache = build(&tight, &g);
    run(&mut cache, &g, SeqId(0), &s, &[1]);
    let before = cache.memory().rows_at_level;
    cache.set_budget(4 * full);
    let more = script(&g, N + 60, 7, 1.0);
    resume(&mut cache, &g, SeqId(0), &more, N..N + 60, &[1]);
    let after = cache.memory().rows_at_level;
    assert_eq!((before[1], before[2]), (after[1], after[2]));
}

#[test]
fn what_can_t_fit_is_refused_before_anything_is_stored() {
    let g = tiny();
    let s = script(&g, N, 8, 1.0);
    let materials = Materials {
        geometry: &g,
        calibration: None,
        backing_dir: None,
    };
    let least = least_budget(&within(1), materials, N as u32).unwrap();
    // Enough is enough ...
    decode(&mut build(&within(least), &g), SeqId(0), &s, |_, _| {});
    // ... and less is not.
    let mut cache = build(&within(least * 3 / 4), &g);
    cache.admit(SeqId(0), Admission::Streaming).unwrap();
    let mut at = 0;
    let error = loop {
        let before = cache.memory();
        match step(&mut cache, &g, SeqId(0), &s, at..at + 1) {
            Ok(_) => at += 1,
            Err(e) => {
                assert_eq!(cache.memory(), before);
                break e;
            }
        }
    };
    assert!(at > 200 && at < N, "{at}");
    match error {
        CacheError::OverBudget {
            position,
            needed_bytes,
            budget_bytes,
            ..
        } => {
            assert_eq!((position, budget_bytes), (at as u32, least * 3 / 4));
            assert!(needed_bytes > budget_bytes);
        }
        other => panic!("{other}"),
    }
    // The sequence is as it was: it can be read and freed.
    assert_eq!(cache.len(SeqId(0)).unwrap(), at as u32);
    cache.release(SeqId(0)).unwrap();
}

#[test]
fn lost_precision_can_t_be_truncated_away() {
    let g = tiny();
    let s = script(&g, N, 9, 1.0);
    let mut cache = build(&within(unlimited_bytes(N) / 2), &g);
    run(&mut cache, &g, SeqId(0), &s, &[1]);
    let error = cache.truncate(SeqId(0), 200).unwrap_err();
    assert!(
        matches!(error, CacheError::Irreversible { asked: 200, .. }),
        "{error}"
    );
}

#[test]
fn sequences_may_share_a_budget() {
    let g = tiny();
    let s = script(&g, 400, 10, 1.0);
    let allowed = unlimited_bytes(400) * 5 / 4;
    let mut strategy = within(allowed);
    if let Some(budget) = &mut strategy.budget {
        budget.scope = Scope::All;
    }
    let mut cache = build(&strategy, &g);
    for seq in [0, 1] {
        cache.admit(SeqId(seq), Admission::Streaming).unwrap();
    }

    for i in 0..400u32 {
        let mut batch = Batch::new();
        batch.push(SeqId(0), i..i + 1);
        batch.push(SeqId(1), i..i + 1);
        for (l, layer) in g.layers.iter().enumerate() {
            let w = layer.n_kv_heads * layer.head_dim;
            let at = i as usize * w..(i as usize + 1) * w;
            let twice = |x: &[f32]| [&x[at.clone()], &x[at.clone()]].concat();
            let (k, v) = (twice(&s.k[l]), twice(&s.v[l]));
            let rows = Rows {
                k: &k,
                v: &v,
                hidden: &[],
                residual_norms: &[],
            };
            cache.append(l, &batch, rows).unwrap();
        }
        cache.commit(&batch).unwrap();
        let bytes = cache.memory().resident_bytes();
        assert!(bytes <= allowed, "{bytes} of {allowed} at {i}");
    }
    assert!(cache.memory().rows_at_level[1] > 0);
}
