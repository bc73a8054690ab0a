//! The suite over everything that is registered.

use std::sync::Arc;

use kvlab::cache::strategy::{Strategy, Tail};
use kvlab::cache::{KvCache, SeqId};
use kvlab::commands::strategies;
use kvlab::eval::conformance::{CHECKS, Check, Context, Stop, with_small_budgets};
use rayon::prelude::*;

use super::support::{build, geometry, predicted, run, script};

/// Fails unless the checks hold for the strategies; how many promised what the checks are about.
pub fn hold(strategies: &[Strategy], checks: &[&Check]) -> usize {
    let held: Vec<Result<usize, String>> = strategies
        .par_iter()
        .map(|strategy| {
            let (strategy, _) = with_small_budgets(strategy);
            let keys = strategies::keys(&strategy);
            let context = Context::new(&strategy, 0).map_err(|e| format!("{keys}: {e}"))?;
            let mut n_held = 0;
            for check in checks.iter().filter(|c| is_new(&strategy, c)) {
                match check.run(&context) {
                    Ok(_) => n_held += 1,
                    Err(Stop::NotApplicable(_)) => {}
                    Err(Stop::Failed(f)) => return Err(format!("{}: {keys}: {f}", check.name)),
                }
            }
            Ok(n_held)
        })
        .collect();
    let faults: Vec<&String> = held.iter().filter_map(|h| h.as_ref().err()).collect();
    assert!(faults.is_empty(), "\n{faults:#?}");
    held.into_iter().flatten().sum()
}

/// Codecs alone, and heads of every shape, are looked at for the bare examples: a tail changes nothing about them.
fn is_new(strategy: &Strategy, check: &Check) -> bool {
    let is_variant = strategy.tail == Tail::both(20) && strategy.sinks == 2;
    !(is_variant && matches!(check.name, "exactness" | "shapes"))
}

#[test]
fn every_preset_and_every_stage_holds_every_check() {
    let all: Arc<Vec<Strategy>> = Arc::new(strategies::everything().expect("the registry reads"));
    let checks: Vec<&Check> = CHECKS.iter().collect();
    let n_held = hold(&all, &checks);
    // Two checks are left out for two of three strategies, and what does not apply is a few predictions' oracle.
    assert!(n_held > all.len() * (checks.len() - 2), "{n_held}");
}

#[test]
fn predictions_hold_every_check() {
    let all = predicted();
    let checks: Vec<&Check> = CHECKS.iter().collect();
    let n_held = hold(&all, &checks);
    assert_eq!(n_held, all.len() * (checks.len() - 1), "all but the oracle");
}

/// Rows of SmolLM2's shape: 3 KV heads of 64 channels, here in 2 layers instead of 30.
#[test]
fn bytes_per_row_are_the_formats_definition() {
    let g = geometry(9, 3, 64);
    let s = script(&g, 256, 81, 0.5);
    // Bytes per token over 30 layers, K and V: 23,040 for f16; nvfp4 is 4.5 bits per number.
    for (format, per_token) in [
        ("f32", 46_080),
        ("f16", 23_040),
        ("bf16", 23_040),
        ("fp8_e4m3", 11_520),
        ("fp8_e5m2", 11_520),
        ("q8_0", 12_240),
        ("q5_1", 8_640),
        ("q5_0", 7_920),
        ("q4_1", 7_200),
        ("q4_0", 6_480),
        ("iq4_nl", 6_480),
        ("nvfp4", 6_480),
        ("mxfp4", 6_120),
    ] {
        let mut cache = build(&Strategy::bare(format), &g);
        run(&mut cache, &g, SeqId(0), &s, &[256]);
        let m = cache.memory();
        assert_eq!(
            (m.payload_bytes + m.scale_bytes) * 15,
            per_token * 256,
            "{format}"
        );
        assert_eq!(m.slack_bytes, 0, "{format}: whole pages have no slack");
        assert_eq!(m.exact_bytes, 0);
    }
}
