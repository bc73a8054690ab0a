//! A bench's results for tests: exact small numbers, no machine.

use std::time::Duration;

use super::bench::{Entrant, Host, Sheet};
use crate::cache::MemoryReport;
use crate::eval::bench::gate::Gate;
use crate::eval::bench::{Measured, Parts, Test, Work};

/// A duration of whole milliseconds.
pub fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// A check that holds.
pub fn gate() -> Gate {
    Gate {
        n_tokens: 192,
        first_difference: None,
        first_non_finite: None,
        max_logit_difference: 0.5,
        mean_kld: 0.001,
        same_top_fraction: 0.99,
    }
}

/// A strategy with its check.
pub fn entrant(label: &str, gate: Gate) -> Entrant {
    Entrant {
        label: label.to_owned(),
        type_k: "q8_0".to_owned(),
        type_v: "q4_0".to_owned(),
        gate,
    }
}

/// Runs of ten tokens at depth 64 on one thread, wall and CPU time of each.
pub fn row(strategy: usize, work: Work, runs: &[(Duration, Duration)]) -> Measured {
    let mut row = Measured {
        strategy,
        test: Test {
            work,
            n: 10,
            depth: 64,
        },
        n_threads: 1,
        runs: vec![Default::default(); runs.len()],
        gaps: Vec::new(),
        parts: Parts::default(),
        memory: MemoryReport::default(),
        attended_bytes: 0.0,
        perplexity: None,
        peak_rss_bytes: None,
    };
    for (reading, &times) in row.runs.iter_mut().zip(runs) {
        (reading.wall, reading.cpu) = times;
    }
    row
}

/// A sheet of these.
pub fn sheet(entrants: Vec<Entrant>, rows: Vec<Measured>) -> Sheet {
    Sheet {
        build: "0.1.0".to_owned(),
        cpu: "a, \"b\"".to_owned(),
        model: "m".to_owned(),
        model_bytes: 1 << 20,
        n_params: 1_500_000,
        weight_bytes: 50_000_000,
        backend: "cpu".to_owned(),
        entrants,
        read_bytes_per_s: vec![(2, 40e9)],
        host: Host::default(),
        rows,
        cells: Vec::new(),
    }
}
