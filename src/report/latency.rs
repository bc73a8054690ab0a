//! Latency of a bench: times per token and to the first one, paired with the first strategy's, and whether the machine was quiet.
//!
//! Invariants: what is told of a decode is told of single tokens, what is told of a prefill of whole runs; a paired figure compares runs
//! of the same repetition; a value that does not apply is empty, never 0.

use std::time::Duration;

use super::bench::{At, Field, Sheet};
use super::format::{count, significant};
use crate::eval::bench::cell::Cell;
use crate::eval::bench::spread::{MOST_Z, Spread};
use crate::eval::bench::{Measured, Parts, Work};
use crate::eval::stats::Estimate;

/// Share of a single thread's wall time on a CPU below which something else had it.
const LEAST_SHARE: f64 = 0.9;

/// Load beyond the cores that a quiet machine may show.
const SPARE_LOAD: f64 = 0.5;

/// Fields of CSV and JSON.
pub(super) const FIELDS: &[Field] = &[
    ("time_n", |at| at.spread().map(|s| s.n).into()),
    ("time_mean_ms", |at| at.spread().map(|s| s.mean).into()),
    ("time_p50_ms", |at| at.spread().map(|s| s.p50).into()),
    ("time_p90_ms", |at| at.spread().and_then(|s| s.p90).into()),
    ("time_p99_ms", |at| at.spread().and_then(|s| s.p99).into()),
    ("time_outliers", |at| {
        at.spread().map(|s| s.n_outliers).into()
    }),
    ("ttft_prefill_ms", |at| at.to_first(prefill).into()),
    ("ttft_scoring_ms", |at| at.to_first(|p| p.scoring).into()),
    ("ttft_compression_ms", |at| at.to_first(compression).into()),
    ("time_vs_first", |at| at.vs_first().map(|e| e.value).into()),
    ("time_vs_first_low", |at| at.interval().map(|i| i.0).into()),
    ("time_vs_first_high", |at| at.interval().map(|i| i.1).into()),
    ("cpu_share", |at| at.cpu_share().into()),
    ("n_cores", |at| at.sheet.host.n_cores.into()),
    ("cpu_flags", |at| at.sheet.host.cpu_flags.join(" ").into()),
    ("load_start", |at| at.sheet.host.load_start.into()),
    ("load_end", |at| at.sheet.host.load_end.into()),
    ("cell_before_rss_bytes", |at| {
        at.cell(|c| c.before_rss_bytes).into()
    }),
    ("cell_steady_rss_bytes", |at| {
        at.cell(|c| c.steady_rss_bytes).into()
    }),
    ("cell_peak_rss_bytes", |at| {
        at.cell(|c| c.peak_rss_bytes).into()
    }),
];

fn prefill(parts: &Parts) -> Duration {
    parts.linear + parts.head + parts.attention + parts.rest
}

fn compression(parts: &Parts) -> Duration {
    parts.encoding.saturating_sub(parts.scoring)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl At<'_> {
    /// Times between tokens where it decodes, else of runs.
    fn spread(&self) -> Option<Spread> {
        let times: Vec<f64> = match self.row.gaps.is_empty() {
            true => self.row.runs.iter().map(|r| ms(r.wall)).collect(),
            false => self.row.gaps.iter().copied().map(ms).collect(),
        };
        Spread::of(&times)
    }

    /// A part of the time to the first token, mean over the runs.
    fn to_first(&self, part: impl Fn(&Parts) -> Duration) -> Option<f64> {
        let is_prefill = self.row.test.work == Work::Prefill;
        is_prefill.then(|| ms(part(&self.row.parts)) / self.row.runs.len() as f64)
    }

    /// The time over that of the first strategy in the same repetition; without a cache: per token over that of decoding.
    fn vs_first(&self) -> Option<Estimate> {
        let (row, test) = (self.row, self.row.test);
        if row.strategy == 0 {
            return None;
        }
        let works = |work: Work| match test.work {
            Work::Recompute => work == Work::Decode,
            mine => work == mine,
        };
        let first = self.sheet.rows.iter().find(|r| {
            r.strategy == 0
                && works(r.test.work)
                && (r.test.depth, r.n_threads) == (test.depth, row.n_threads)
                && (test.work == Work::Recompute || r.test.n == test.n)
        })?;
        Estimate::ratio(&per_token(row), &per_token(first))
    }

    fn interval(&self) -> Option<(f64, f64)> {
        self.vs_first()?.interval
    }

    /// CPU time over what the threads could have had; `None` where the system does not tell.
    fn cpu_share(&self) -> Option<f64> {
        let runs = &self.row.runs;
        let cpu: Duration = runs.iter().map(|r| r.cpu).sum();
        let wall: Duration = runs.iter().map(|r| r.wall).sum();
        let had = wall.as_secs_f64() * self.row.n_threads as f64;
        (!cpu.is_zero() && had > 0.0).then(|| cpu.as_secs_f64() / had)
    }

    fn cell(&self, of: fn(&Cell) -> Option<u64>) -> Option<u64> {
        let mut cells = self.sheet.cells.iter();
        let mine =
            cells.find(|(i, depth, _)| (*i, *depth) == (self.row.strategy, self.row.test.depth));
        mine.and_then(|(_, _, cell)| of(cell))
    }
}

/// Seconds per token of each run.
fn per_token(row: &Measured) -> Vec<f64> {
    let n = row.test.n as f64;
    row.runs.iter().map(|r| r.wall.as_secs_f64() / n).collect()
}

/// The table of times, and that of processes where there are any.
pub(super) fn markdown(sheet: &Sheet) -> String {
    let first = sheet.entrants.first().map_or("", |e| e.label.as_str());
    let vs = format!("time vs {first}");
    let heads = [
        "strategy",
        "threads",
        "test",
        "n",
        "mean ms",
        "p50",
        "p90",
        "p99",
        "outliers",
        "CPU %",
        "prefill ms",
        "scoring ms",
        "compression ms",
        &vs,
    ];
    let rows = sheet.rows().map(|at| cells(&at));
    let mut out = super::markdown::table(&super::markdown::plain(&heads, rows));
    out.push('\n');
    if !sheet.cells.is_empty() {
        out.push_str(&processes(sheet));
        out.push('\n');
    }
    out
}

fn cells(at: &At<'_>) -> Vec<String> {
    let ms = |x: Option<f64>| x.map_or_else(String::new, |x| significant(x, 4));
    let spread = at.spread();
    let of = |f: fn(&Spread) -> Option<f64>| ms(spread.as_ref().and_then(f));
    let count = |f: fn(&Spread) -> usize| {
        spread
            .as_ref()
            .map_or_else(String::new, |s| f(s).to_string())
    };
    vec![
        at.entrant().label.clone(),
        at.row.n_threads.to_string(),
        at.row.test.to_string(),
        count(|s| s.n),
        of(|s| Some(s.mean)),
        of(|s| Some(s.p50)),
        of(|s| s.p90),
        of(|s| s.p99),
        count(|s| s.n_outliers),
        at.cpu_share()
            .map_or_else(String::new, |x| format!("{:.0}", 100.0 * x)),
        ms(at.to_first(prefill)),
        ms(at.to_first(|p| p.scoring)),
        ms(at.to_first(compression)),
        at.vs_first().map_or_else(String::new, |e| interval(&e)),
    ]
}

/// "1.23 (1.20 to 1.26)".
fn interval(estimate: &Estimate) -> String {
    let value = significant(estimate.value, 3);
    match estimate.interval {
        Some((low, high)) => format!(
            "{value} ({} to {})",
            significant(low, 3),
            significant(high, 3)
        ),
        None => value,
    }
}

/// Memory of each strategy's own process.
fn processes(sheet: &Sheet) -> String {
    let heads = [
        "own process",
        "depth",
        "cache MiB",
        "before MiB",
        "steady RSS MiB",
        "peak RSS MiB",
        "beside the cache MiB",
    ];
    let mib = |bytes: f64| significant(bytes / f64::from(1 << 20), 4);
    let known = |bytes: Option<u64>| bytes.map_or_else(String::new, |b| mib(b as f64));
    let rows = sheet.cells.iter().map(|(strategy, depth, cell)| {
        vec![
            sheet.entrants[*strategy].label.clone(),
            depth.to_string(),
            mib(cell.memory.resident_bytes() as f64),
            known(cell.before_rss_bytes),
            known(cell.steady_rss_bytes),
            known(cell.peak_rss_bytes),
            cell.beside_bytes()
                .map_or_else(String::new, |b| mib(b as f64)),
        ]
    });
    super::markdown::table(&super::markdown::plain(&heads, rows))
}

/// What a cache is worth, what outliers are, and the machine.
pub(super) fn sentences(sheet: &Sheet) -> Vec<String> {
    let mut all = Vec::new();
    let first = sheet.entrants.first().map_or("", |e| e.label.as_str());
    for at in sheet
        .rows()
        .filter(|at| at.row.test.work == Work::Recompute)
    {
        let Some(times) = at.vs_first() else { continue };
        let test = at.row.test;
        all.push(format!(
            "no cache: at depth {} a token takes {} times as long as with {first}, {}, {} of {}",
            test.depth,
            interval(&times),
            count(at.row.n_threads, "thread"),
            count(at.row.runs.len(), "run"),
            test.n,
        ));
    }
    if sheet
        .rows()
        .any(|at| at.spread().is_some_and(|s| s.n_outliers > 0))
    {
        all.push(format!(
            "outliers: modified z-scores beyond {MOST_Z}; they stay in every number"
        ));
    }
    let host = &sheet.host;
    let load = |x: Option<f64>| x.map_or("unknown".to_owned(), |x| format!("{x:.2}"));
    all.push(format!(
        "host: {} cores, {}, load {} before and {} after",
        host.n_cores,
        host.cpu_flags.join(" "),
        load(host.load_start),
        load(host.load_end)
    ));
    all.extend(busy(sheet).map(|why| {
        format!("WARNING: the machine was busy, {why}: trust paired times and t/CPU s, not t/s")
    }));
    all
}

/// Why the machine was not quiet, if it was not.
fn busy(sheet: &Sheet) -> Option<String> {
    let host = &sheet.host;
    let n_threads = sheet.rows.iter().map(|r| r.n_threads).max()?;
    let spare = host.n_cores as f64 + SPARE_LOAD - n_threads as f64;
    if let Some(load) = host.load_start.filter(|load| *load > spare) {
        return Some(format!(
            "with a load of {load:.2} on {} cores beside {}",
            host.n_cores,
            count(n_threads, "thread")
        ));
    }
    let shares = sheet
        .rows()
        .filter(|at| at.row.n_threads == 1)
        .filter_map(|at| at.cpu_share());
    let least = shares.fold(1.0, f64::min);
    (least < LEAST_SHARE).then(|| {
        format!(
            "one thread had a CPU for {:.0} % of its time",
            100.0 * least
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::bench::{Host, csv, json, markdown};
    use super::super::bench_fixture::{self as fixture, entrant, gate, ms};
    use super::*;
    use crate::cache::MemoryReport;

    /// Two strategies and no cache, three runs each of ten tokens; q8_0 takes 1.5 times as long, no cache 20 times.
    fn sheet() -> Sheet {
        let row = |strategy, work, times: f64| {
            let runs = [100.0, 110.0, 120.0].map(|wall| {
                let wall = Duration::from_secs_f64(wall * times / 1e3);
                (wall, wall)
            });
            let mut row = Measured {
                parts: Parts {
                    linear: ms(30),
                    encoding: ms(30),
                    scoring: ms(12),
                    ..Parts::default()
                },
                ..fixture::row(strategy, work, &runs)
            };
            if work != Work::Prefill {
                row.gaps = vec![ms(10); 119];
                row.gaps.push(ms(500));
            }
            row
        };
        let labels = ["f16", "q8_0", "no cache"];
        Sheet {
            host: Host {
                n_cores: 4,
                cpu_flags: vec!["avx2".to_owned(), "fma".to_owned()],
                load_start: Some(0.25),
                load_end: Some(1.0),
            },
            cells: vec![(
                1,
                64,
                Cell {
                    before_rss_bytes: Some(100 << 20),
                    steady_rss_bytes: Some(170 << 20),
                    peak_rss_bytes: Some(200 << 20),
                    memory: MemoryReport {
                        payload_bytes: 50 << 20,
                        ..MemoryReport::default()
                    },
                },
            )],
            ..fixture::sheet(
                labels.map(|label| entrant(label, gate())).into(),
                vec![
                    row(0, Work::Prefill, 1.0),
                    row(1, Work::Prefill, 1.5),
                    row(0, Work::Decode, 1.0),
                    row(1, Work::Decode, 1.5),
                    row(2, Work::Recompute, 20.0),
                ],
            )
        }
    }

    #[test]
    fn each_run_is_paired_with_the_first_strategys_and_parts_add_up() {
        let sheet = sheet();
        let rows: Vec<Value> = serde_json::from_str(&json(&sheet)).unwrap();
        assert_eq!(rows[0]["time_vs_first"], Value::Null);
        for (row, times) in [(1, 1.5), (3, 1.5), (4, 20.0)] {
            let low = rows[row]["time_vs_first_low"].as_f64().unwrap();
            let high = rows[row]["time_vs_first_high"].as_f64().unwrap();
            // Runs that differ, in a proportion that does not.
            assert!((low - times).abs() < 1e-6 && (high - times).abs() < 1e-6);
        }
        assert_eq!(rows[1]["time_n"], 3);
        assert_eq!(rows[1]["time_p90_ms"], Value::Null);
        // 30 ms of linear products, 30 ms of storing of which 12 scored, over three runs.
        assert_eq!(rows[0]["ttft_prefill_ms"], 10.0);
        assert_eq!(rows[0]["ttft_scoring_ms"], 4.0);
        assert_eq!(rows[0]["ttft_compression_ms"], 6.0);
        assert_eq!(rows[2]["ttft_prefill_ms"], Value::Null);
        assert_eq!(
            (&rows[2]["time_n"], &rows[2]["time_outliers"]),
            (&120.into(), &1.into())
        );
        assert_eq!(rows[2]["time_p99_ms"], 10.0);
        assert_eq!(rows[4]["n_no_cache"], 10);
        assert_eq!(rows[3]["cell_peak_rss_bytes"], 200 << 20);
        assert_eq!(rows[2]["cell_peak_rss_bytes"], Value::Null);
        assert_eq!(csv(&sheet).lines().count(), 6);
    }

    #[test]
    fn the_table_says_what_a_cache_is_worth_and_what_a_process_holds() {
        let text = markdown(&sheet());
        for expected in [
            "| tg10 nocache @ d64 |",
            "no cache: at depth 64 a token takes 20.0 (20.0 to 20.0) times as long as with f16, 1 thread, 3 runs of 10",
            "1.50 (1.50 to 1.50)",
            "time vs f16",
            "host: 4 cores, avx2 fma, load 0.25 before and 1.00 after",
            "outliers: modified z-scores beyond 3.5",
            "| beside the cache MiB |",
        ] {
            assert!(text.contains(expected), "{expected} not in\n{text}");
        }
        assert!(!text.contains("WARNING"), "{text}");
        // 170 - 100 - 50 MiB.
        assert!(
            text.lines()
                .any(|l| l.starts_with("| q8_0") && l.ends_with("| 20.00                |")),
            "{text}"
        );
    }

    #[test]
    fn a_busy_machine_is_told_by_its_load_or_by_time_without_a_cpu() {
        let mut loaded = sheet();
        loaded.host.load_start = Some(3.6);
        assert!(
            markdown(&loaded)
                .contains("WARNING: the machine was busy, with a load of 3.60 on 4 cores")
        );
        let mut waiting = sheet();
        for run in &mut waiting.rows[2].runs {
            run.cpu = run.wall / 2;
        }
        assert!(markdown(&waiting).contains("one thread had a CPU for 50 % of its time"));
    }
}
