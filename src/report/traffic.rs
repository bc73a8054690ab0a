//! What decoded tokens read and what was moved for them, where they don't read all that is stored.
//!
//! Invariants: a share is a ratio of sums over the scored tokens; times are those of the timed steps, means per step, and
//! stand in no other table's totals.

use crate::cache::Traffic;
use crate::eval::records::{ItemRecord, TrafficRecord};

use super::columns::Text;
use super::csv::{Lines, names, rows, values};
use super::fields::{PLACE, number};
use super::format::significant;
use super::markdown::{document, plain, table};
use super::rows::{Report, Row};

/// Of some items; `None` where every token reads all that is stored.
pub fn sum(items: &[&ItemRecord]) -> Option<TrafficRecord> {
    let records = items.iter().filter_map(|r| r.traffic);
    records.reduce(|a, b| TrafficRecord {
        scored: add(a.scored, b.scored),
        timed: add(a.timed, b.timed),
    })
}

fn add(a: Traffic, b: Traffic) -> Traffic {
    Traffic {
        n_steps: a.n_steps + b.n_steps,
        read_bytes: a.read_bytes + b.read_bytes,
        tried_bytes: a.tried_bytes + b.tried_bytes,
        ranking_bytes: a.ranking_bytes + b.ranking_bytes,
        readable_bytes: a.readable_bytes + b.readable_bytes,
        moved_bytes: a.moved_bytes + b.moved_bytes,
        n_reads: a.n_reads + b.n_reads,
        n_cached_reads: a.n_cached_reads + b.n_cached_reads,
        rows_wanted: a.rows_wanted + b.rows_wanted,
        rows_hit: a.rows_hit + b.rows_hit,
        stall_ns: a.stall_ns + b.stall_ns,
    }
}

/// A number of a row; `None` where there is none.
type Measure = fn(&TrafficRecord) -> Option<f64>;

/// Mean milliseconds that a timed step waits for rows; `None` where no step was timed.
pub fn stall_ms(traffic: &TrafficRecord) -> Option<f64> {
    share(traffic.timed.stall_ns, traffic.timed.n_steps).map(|ns| ns / 1e6)
}

fn share(part: u64, of: u64) -> Option<f64> {
    (of > 0).then(|| part as f64 / of as f64)
}

/// Name in the CSV, head of the table, value, what the table multiplies it by.
static MEASURES: &[(&str, &str, Measure, f64)] = &[
    (
        "read_bytes_per_token",
        "read KB/token",
        |t| share(t.scored.read_bytes, t.scored.n_steps),
        1e-3,
    ),
    (
        "read_fraction",
        "of all %",
        |t| share(t.scored.read_bytes, t.scored.readable_bytes),
        100.0,
    ),
    (
        "tried_bytes_per_token",
        "tried KB/token",
        |t| share(t.scored.tried_bytes, t.scored.n_steps),
        1e-3,
    ),
    (
        "ranking_bytes_per_token",
        "ranked KB/token",
        |t| share(t.scored.ranking_bytes, t.scored.n_steps),
        1e-3,
    ),
    (
        "moved_bytes_per_token",
        "moved KB/token",
        |t| share(t.scored.moved_bytes, t.scored.n_steps),
        1e-3,
    ),
    (
        "reads_per_token",
        "reads/token",
        |t| share(t.scored.n_reads, t.scored.n_steps),
        1.0,
    ),
    (
        "cached_read_fraction",
        "by page cache %",
        |t| share(t.scored.n_cached_reads, t.scored.n_reads),
        100.0,
    ),
    (
        "hit_fraction",
        "hits %",
        |t| share(t.scored.rows_hit, t.scored.rows_wanted),
        100.0,
    ),
    (
        "timed_moved_bytes_per_token",
        "moved KB/timed",
        |t| share(t.timed.moved_bytes, t.timed.n_steps),
        1e-3,
    ),
    ("stall_ms_per_token", "stall ms/token", stall_ms, 1.0),
];

const INTRO: &str = "What a decoded token reads, and what comes out of a tier for it. read: bytes of the rows, scales and \
    bounds that attention reads, over all layers; of all: of the bytes of every live row. tried: what the attention of a token reads that is only tried out beside \
    it; ranked: keys that are read once more to rank rows by; neither is part of read. KB: 1000 bytes. moved: bytes that came out of the \
    tier, whole sectors of a file; by page cache: reads that did not reach the disk itself, where the file system has no \
    others. hits: of the rows that the token's own queries rank first, those that were here before they were asked for. These \
    over the scored tokens. stall: time spent waiting for rows, over the timed steps, as are the bytes beside it; ms/token \
    stands in latency.md, bytes in memory.md: rows that came back count as exact ones there, as many as were here when the last \
    token was scored.";

/// A table; empty where every token reads all that is stored.
pub fn markdown(report: &Report) -> String {
    if all(report).next().is_none() {
        return String::new();
    }
    document(
        report,
        "what decoding reads and moves",
        &[INTRO.to_owned()],
        |group, out| {
            if group.rows.iter().any(|row| of(row).is_some()) {
                out.push_str(&table(&text(&group.rows)));
                out.push('\n');
            }
        },
    )
}

fn text(rows: &[Row]) -> Text {
    let heads: Vec<&str> = std::iter::once("strategy")
        .chain(MEASURES.iter().map(|m| m.1))
        .collect();
    let line = |row: &Row| {
        let record = of(row)?;
        let cells = MEASURES.iter().map(|(_, _, measure, unit)| {
            measure(record).map_or_else(String::new, |x| significant(unit * x, 3))
        });
        Some(std::iter::once(row.label.clone()).chain(cells).collect())
    };
    plain(&heads, rows.iter().filter_map(line))
}

/// A line for each strategy; empty where every token reads all that is stored.
pub fn csv(report: &Report) -> String {
    if all(report).next().is_none() {
        return String::new();
    }
    let own = ["n_scored", "n_timed"].into_iter();
    let heads = own.chain(MEASURES.iter().map(|m| m.0)).map(str::to_owned);
    let mut out = Lines::new(names(PLACE).chain(heads));
    for at in rows(report) {
        let Some(record) = of(at.row) else { continue };
        let place = values(PLACE, |text| text(&at));
        let counts = [record.scored.n_steps, record.timed.n_steps].map(|n| n.to_string());
        let measures = MEASURES
            .iter()
            .map(|(_, _, measure, _)| measure(record).map_or_else(String::new, number));
        out.push(place.chain(counts).chain(measures));
    }
    out.0
}

fn of(row: &Row) -> Option<&TrafficRecord> {
    row.scores()?.traffic.as_ref()
}

fn all(report: &Report) -> impl Iterator<Item = &TrafficRecord> {
    report.groups.iter().flat_map(|g| &g.rows).filter_map(of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::fixture::all_items;

    fn record(n: u64) -> TrafficRecord {
        TrafficRecord {
            scored: Traffic {
                n_steps: 10 * n,
                read_bytes: 2500 * n,
                tried_bytes: 4000 * n,
                ranking_bytes: 30 * n,
                readable_bytes: 10_000 * n,
                moved_bytes: 512 * n,
                n_reads: n,
                rows_wanted: 8 * n,
                rows_hit: 6 * n,
                ..Traffic::default()
            },
            timed: Traffic {
                n_steps: 4,
                stall_ns: 6_000_000 * n,
                ..Traffic::default()
            },
        }
    }

    #[test]
    fn shares_are_ratios_of_sums_and_steps_are_those_they_belong_to() {
        let mut items = all_items()[0].clone();
        assert!(sum(&items.iter().collect::<Vec<_>>()).is_none());
        items[0].traffic = Some(record(1));
        items[1].traffic = Some(record(3));
        let sum = sum(&items.iter().collect::<Vec<_>>()).unwrap();
        let measured: Vec<Option<f64>> = MEASURES.iter().map(|m| (m.2)(&sum)).collect();
        let want = [
            Some(250.0),
            Some(0.25),
            Some(400.0),
            Some(3.0),
            Some(51.2),
            Some(0.1),
            Some(0.0),
            Some(0.75),
            Some(0.0),
            Some(3.0),
        ];
        assert_eq!(measured, want);
    }
}
