//! The whole of a bench on a small random model by a scripted clock: what runs, in which order, and what is counted.

use std::sync::Arc;

use super::*;
use crate::cache::stage::{Params, Value};
use crate::cache::strategy::StageSpec;
use crate::compute::cpu::Cpu;
use crate::engine::LinearWatch;
use crate::engine::clock::ScriptedClock;
use crate::model::geometry::geometry;
use crate::model::ops::{Arithmetic, Load};
use crate::model::tiny::{TinyConfig, TinyModel};
use crate::model::transformer::Transformer;

const TICK: Duration = Duration::from_millis(1);

fn pools() -> Vec<Pool> {
    [1, 2]
        .map(|n_threads| Pool {
            n_threads,
            pool: rayon::ThreadPoolBuilder::new()
                .num_threads(n_threads)
                .build()
                .unwrap(),
        })
        .into()
}

/// Calls `test` with a bench over two layers of a random model.
fn with_bench(test: impl FnOnce(&Bench<'_>)) {
    let source = Arc::new(TinyModel::new(&TinyConfig::default()));
    let cpu = Cpu::load(source, Arithmetic::F32).unwrap();
    let clock: Arc<dyn Clock> = Arc::new(ScriptedClock::new(TICK));
    let (linear, scoring) = (Tally::default(), Arc::default());
    let model = Transformer::over(LinearWatch::new(cpu, clock.as_ref(), &linear));
    let text: Vec<u32> = (0..301).map(|i| i * i % 251).collect();
    test(&Bench {
        model: &model,
        linear: &linear,
        geometry: &geometry(model.spec(), 1024),
        calibration: None,
        scoring: &scoring,
        clock: &clock,
        text: &text,
    });
}

#[test]
fn strategies_take_turns_within_each_repetition_and_times_have_their_parts() {
    let (f16, q8_0) = (Strategy::bare("f16"), Strategy::bare("q8_0"));
    let pools = pools();
    let schedule = Schedule {
        tests: &[(Work::Prefill, 20), (Work::Decode, 4)],
        depths: &[0, 256],
        pools: &pools,
        repetitions: 3,
        no_cache: None,
    };
    with_bench(|bench| {
        let mut heard = Vec::new();
        let mut done = |work, n| heard.push((work, n));
        let rows = bench.run(&[&f16, &q8_0], &schedule, &mut done).unwrap();
        let shown: Vec<String> = rows
            .iter()
            .map(|r| format!("{} {} {}", r.test, r.n_threads, r.strategy))
            .collect();
        assert_eq!(shown.len(), 16);
        let head = ["pp20 1 0", "pp20 1 1", "pp20 2 0", "pp20 2 1", "tg4 1 0"];
        assert_eq!(shown[..5], head);
        assert_eq!(shown[15], "tg4 @ d256 2 1");
        // Each depth: fill both, one short round and three that count.
        assert_eq!(heard.len(), 2 * (2 + 4 * 8));
        assert_eq!(heard[2..5], [(Work::Prefill, 16); 3]);
        assert_eq!(heard[2 + 8..][..2], [(Work::Prefill, 20); 2]);
        for row in &rows {
            assert_eq!(row.runs.len(), 3);
            // A step calls append, attend and four linear products in two layers, commit once, and the head once if
            // logits are due: two readings each, one tick between them.
            let steps = if row.test.work == Work::Decode { 4 } else { 1 };
            assert_eq!(row.parts.encoding, 3 * 3 * steps * TICK);
            assert_eq!(row.parts.attention, 3 * 2 * steps * TICK);
            assert_eq!(row.parts.head, 3 * steps * TICK);
            assert_eq!(row.parts.linear, 3 * 8 * steps * TICK);
            assert_eq!(row.runs[0].wall, (28 * steps + 1) * TICK);
            assert_eq!(row.parts.rest, 3 * (14 * steps + 1) * TICK);
            assert_eq!(row.parts.scoring, Duration::ZERO);
            // The first gap starts with the run, each later one at the token before.
            let gaps = match row.test.work {
                Work::Decode => vec![28 * TICK; 12],
                _ => Vec::new(),
            };
            assert_eq!(row.gaps, gaps);
            assert_eq!(row.parts.total(), row.runs.iter().map(|r| r.wall).sum());
        }
    });
}

#[test]
fn bytes_are_those_of_the_depth_and_of_what_a_run_adds() {
    let (f16, q8_0) = (Strategy::bare("f16"), Strategy::bare("q8_0"));
    let pools = pools();
    let schedule = Schedule {
        tests: &[(Work::Decode, 8)],
        depths: &[0, 256],
        pools: &pools[..1],
        repetitions: 1,
        no_cache: None,
    };
    with_bench(|bench| {
        let rows = bench
            .run(&[&f16, &q8_0], &schedule, &mut |_, _| ())
            .unwrap();
        let scalars = bench.geometry.scalars_per_token() as f64;
        // Depths 0 and 256, plus half of the 8 tokens that are decoded.
        for (row, bytes) in rows.iter().zip([2.0, 34.0 / 32.0, 2.0, 34.0 / 32.0]) {
            let n = row.test.depth as f64 + 4.0;
            assert_eq!(row.attended_bytes, n * scalars * bytes, "{}", row.test);
        }
        assert_eq!(rows[2].memory.payload_bytes, 256 * 2 * scalars as u64);
    });
}

#[test]
fn a_score_is_the_perplexity_of_the_second_half_in_any_pieces() {
    let f32 = Strategy::bare("f32");
    let schedule = Schedule {
        tests: &[(Work::Score, 101)],
        depths: &[0],
        pools: &pools(),
        repetitions: 1,
        no_cache: None,
    };
    with_bench(|bench| {
        let rows = bench.run(&[&f32], &schedule, &mut |_, _| ()).unwrap();
        let mut cache = bench.cache(&f32).unwrap();
        let (n_vocab, mut nll) = (bench.model.spec().n_vocab, Vec::new());
        for (i, pair) in bench.text[..101].windows(2).enumerate() {
            let row = prefill(bench.model, &mut cache, BASE, &pair[..1], 1).unwrap();
            let mut logits = vec![0.0; n_vocab];
            bench.model.logits(&row.unwrap(), 0..1, &mut logits);
            let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
            if i >= 50 {
                nll.push(sum.ln() - f64::from(logits[pair[1] as usize]));
            }
        }
        assert_eq!(nll.len(), 50);
        let expected = (nll.iter().sum::<f64>() / 50.0).exp();
        let got = rows[0].perplexity.unwrap();
        assert!((got / expected - 1.0).abs() < 1e-6, "{got} {expected}");
        assert_eq!(rows[0].test.to_string(), "ppl101");
    });
}

#[test]
fn the_check_holds_for_every_kind_of_cache_and_sees_what_a_format_loses() {
    let with_tail = Strategy {
        tail: crate::cache::strategy::Tail::both(32),
        sinks: 4,
        ..Strategy::bare("q4_0")
    };
    let all = [
        Strategy::bare("f32"),
        Strategy::bare("q8_0"),
        Strategy::bare("q4_0"),
        with_tail,
    ];
    with_bench(|bench| {
        let mut n_passes = 0;
        let refs: Vec<&Strategy> = all.iter().collect();
        let gates = gate::check(bench, &refs, &pools(), &mut || n_passes += 1).unwrap();
        assert_eq!(n_passes, 2 * all.len());
        assert!(gates.iter().all(gate::Gate::holds));
        assert_eq!(gates[0].max_logit_difference, 0.0);
        assert_eq!(gates[0].same_top_fraction, 1.0);
        assert!(0.0 < gates[1].mean_kld && gates[1].mean_kld < gates[2].mean_kld);
        assert!(gates[3].mean_kld < gates[2].mean_kld);
    });
}

#[test]
fn without_a_cache_each_token_takes_all_before_it_and_leaves_nothing() {
    let (f16, none) = (Strategy::bare("f16"), Strategy::bare("f32"));
    let pools = pools();
    let schedule = Schedule {
        tests: &[(Work::Decode, 2), (Work::Recompute, 3)],
        depths: &[5, 600],
        pools: &pools[..1],
        repetitions: 2,
        no_cache: Some(1),
    };
    with_bench(|bench| {
        let mut n_tokens = 0;
        let rows = bench
            .run(&[&f16, &none], &schedule, &mut |work, n| {
                n_tokens += if work == Work::Prefill { n } else { 0 };
            })
            .unwrap();
        let shown: Vec<String> = rows
            .iter()
            .map(|r| format!("{} {}", r.test, r.strategy))
            .collect();
        let expected = [
            "tg2 @ d5 0",
            "tg3 nocache @ d5 1",
            "tg2 @ d600 0",
            "tg3 nocache @ d600 1",
        ];
        assert_eq!(shown, expected);
        // Depths once, then one token to warm up and two runs of three.
        let recomputed = |d: usize| d + 1 + 2 * (3 * d + 6);
        assert_eq!(n_tokens, 600 + recomputed(5) + recomputed(600));
        for row in &rows[1..] {
            assert_eq!(row.runs.len(), 2);
        }
        assert_eq!(rows[1].gaps.len(), 6);
        assert_eq!(rows[1].memory.payload_bytes, 0);
        // 601 to 603 tokens are two chunks, of 28 readings each.
        let steps = |row: &Measured| row.runs[0].wall.as_millis();
        assert_eq!((steps(&rows[1]), steps(&rows[3])), (3 * 28 + 1, 3 * 56 + 1));
    });
}

#[test]
fn retention_has_its_own_time_within_encoding() {
    let tokens = Params([("tokens".to_owned(), Value::Int(8))].into());
    let knorm = Strategy {
        retain: Some(StageSpec {
            name: "knorm".to_owned(),
            params: tokens,
        }),
        ..Strategy::bare("f16")
    };
    let pools = pools();
    let schedule = Schedule {
        tests: &[(Work::Prefill, 40)],
        depths: &[0],
        pools: &pools[..1],
        repetitions: 1,
        no_cache: None,
    };
    with_bench(|bench| {
        let rows = bench.run(&[&knorm], &schedule, &mut |_, _| ()).unwrap();
        let parts = rows[0].parts;
        assert!(parts.scoring > Duration::ZERO && parts.scoring <= parts.encoding);
    });
}
