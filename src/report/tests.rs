//! Reports of a synthetic bundle: snapshots, hand-computed numbers, equality after a kill.

use std::fs;
use std::path::Path;

use super::*;
use crate::bundle::fixture::{LABELS, all_items, ends, environment, header};
use crate::bundle::{JOURNAL, Mode, Start};
use crate::eval::bars::{Bar, Bound, Metric};
use crate::eval::records::{CellRecord, ItemRecord};
use crate::eval::stats::Verdict;
use rows::{Group, Row};

mod answers;
mod bars;
mod drift;
mod figure;
mod rebuilt;

fn open(dir: &Path) -> Bundle {
    let start = Start {
        results_dir: dir,
        plan: &serde_json::Value::Null,
        header: &header(),
        environment: &environment("x"),
    };
    Bundle::open_or_create(&start, Mode::Resume).unwrap()
}

fn bundle(dir: &Path, items: &[Vec<ItemRecord>], ends: &[CellRecord]) -> Bundle {
    let mut bundle = open(dir);
    for batch in items {
        bundle.append(batch).unwrap();
    }
    for end in ends {
        bundle.append_cell(end).unwrap();
    }
    bundle
}

fn finished() -> Report {
    let dir = tempfile::tempdir().unwrap();
    let mut bundle = bundle(dir.path(), &all_items(), &ends());
    bundle.finish().unwrap();
    write(bundle.path()).unwrap()
}

fn row<'a>(report: &'a Report, group: &str, label: &str) -> &'a Row {
    let group: &Group = report.groups.iter().find(|g| g.title == group).unwrap();
    group.rows.iter().find(|r| r.label == label).unwrap()
}

fn close(got: f64, want: f64) {
    assert!(
        (got - want).abs() < 1e-12 * want.abs().max(1.0),
        "{got} is not {want}"
    );
}

#[test]
fn table_md() {
    insta::assert_snapshot!(markdown::results(&finished()));
}

#[test]
fn an_arithmetic_other_than_f32_stands_above_the_table() {
    let mut report = finished();
    let line = "compute in int8";
    assert!(!markdown::results(&report).contains(line));
    report.header.model.arithmetic = serde_json::from_str("\"int8\"").unwrap();
    assert!(markdown::results(&report).contains(line));
    assert!(latex::results(&report).contains(line));
}

#[test]
fn table_csv() {
    insta::assert_snapshot!(csv::results(&finished()));
}

#[test]
fn table_tex() {
    insta::assert_snapshot!(latex::results(&finished()));
}

#[test]
fn side_tables() {
    let report = finished();
    let writers = [
        markdown::drift,
        markdown::memory,
        markdown::latency,
        markdown::pairs,
        csv::drift,
        csv::memory,
        csv::memory_track,
        csv::latency,
        csv::pairs,
    ];
    let all: Vec<String> = writers.iter().map(|write| write(&report)).collect();
    insta::assert_snapshot!(all.join("\n"));
}

#[test]
fn the_terminal_gets_what_fits() {
    let report = finished();
    for width in [60, 80, 100, 140, 240] {
        let text = terminal::results(&report, width);
        for line in text.lines() {
            assert!(line.chars().count() <= width, "{width}: {line}");
        }
        assert!(text.contains("KLD") && text.contains("ΔPPL %"));
    }
    assert!(!terminal::results(&report, 60).contains("verdict"));
    assert!(terminal::results(&report, 240).contains("keys/tail/sinks"));
    insta::assert_snapshot!(terminal::results(&report, 100));
}

/// q8_0 on the essays: error (1 + (i + item)/4)/64 nat at token i; items of 4, 5, 6 tokens.
/// Σ per item: (4 + 6/4)/64, (5 + 15/4)/64, (6 + 27/4)/64 = 5.5/64, 8.75/64, 12.75/64; together 27/64 over 15 tokens.
#[test]
fn numbers_by_hand() {
    let report = finished();
    let scores = row(&report, "essays", "q8_0").scores().unwrap();
    let quality = &scores.quality;
    assert_eq!((scores.n_items, scores.n_scored), (3, 15));
    let mean = 27.0 / 64.0 / 15.0;
    close(quality.paired.delta().value, mean);
    close(quality.kld.value, mean / 2.0);
    let residuals = [
        5.5 / 64.0 - 4.0 * mean,
        8.75 / 64.0 - 5.0 * mean,
        12.75 / 64.0 - 6.0 * mean,
    ];
    let squares: f64 = residuals.iter().map(|e| e * e).sum();
    close(
        quality.paired.delta().se.unwrap(),
        (1.5 * squares).sqrt() / 15.0,
    );
    // One disagreement in items 0 and 2, one in item 1: s = 1 gives min(1, 1 + item % 2) = 1 each.
    close(quality.same_top.value, 12.0 / 15.0);
    // The floor lies 0.5 nat a token above the reference: kept = (7.5 − 27/64) / 7.5.
    close(
        quality.context_benefit_kept.unwrap().value,
        (7.5 - 27.0 / 64.0) / 7.5,
    );
    let nll: f64 = (0..3)
        .flat_map(|item| (0..4 + item).map(|i| 2.0 + (i % 4) as f64 * 0.25))
        .sum();
    close(quality.ppl(), (nll / 15.0 + mean).exp());
    close(
        quality.bits_per_byte,
        (nll + 27.0 / 64.0) / std::f64::consts::LN_2 / 60.0,
    );
    assert_eq!(quality.paired.judged.verdict, Verdict::Worse);
}

/// Two layers of 64 scalars: 256 bytes of f16 a token. q8_0: 128 + 8 bytes a token, 48 + 16 beside them. The first of the
/// two records, at 8 tokens, is the compression point.
#[test]
fn every_stored_byte_is_charged() {
    let report = finished();
    let memory = row(&report, "all data", "q8_0")
        .scores()
        .unwrap()
        .memory
        .unwrap();
    let stored = 6 * (8 * 136 + 64);
    assert_eq!(memory.parts.stored_bytes(), stored);
    assert_eq!(
        (memory.n_items, memory.n_tokens, memory.f16_bytes),
        (6, 48, 48 * 256)
    );
    close(memory.bytes_per_token(), 144.0);
    close(memory.bytes_vs_f16(), 144.0 / 256.0);
    close(memory.bits_per_value(), 9.0);
    close(memory.bytes_vs_fp8(), 144.0 / 128.0);
    close(memory.marginal_bytes_per_token.unwrap(), 136.0);
    close(memory.marginal_bits_per_value.unwrap(), 8.5);
    assert_eq!(memory.parts.scratch_bytes, 4096);
}

/// The first item of each of the two texts carries records at 8, 12 and 16 tokens: 136 bytes a token and 64 beside them.
#[test]
fn bytes_along_the_way() {
    let report = finished();
    let track = &row(&report, "all data", "q8_0")
        .scores()
        .unwrap()
        .memory_track;
    let got: Vec<(usize, f64)> = track
        .iter()
        .map(|m| (m.n_items, m.bytes_per_token()))
        .collect();
    let expected = [8.0, 12.0, 16.0].map(|n| (2, 136.0 + 64.0 / n));
    assert_eq!(got, expected);
    let text = markdown::memory(&report);
    assert!(text.contains("| 0.5469 at 16"), "{text}");
    assert!(text.contains("| 0.5625 at 8"), "{text}");
    assert!(text.contains("| 141 (0.5521)"), "{text}");

    let dir = tempfile::tempdir().unwrap();
    let mut items = all_items();
    for record in items.iter_mut().flatten() {
        record.memory_track.clear();
    }
    let bundle = bundle(dir.path(), &items, &ends());
    write(bundle.path()).unwrap();
    assert!(!bundle.path().join("memory_track.csv").exists());
}

fn bar(strategy: &str, metric: Metric, bound: Bound) -> Bar {
    Bar {
        strategy: strategy.into(),
        metric,
        bound,
        times: None,
        data: None,
        domain: None,
        protocol: None,
        continuation: None,
        n_tokens: None,
    }
}

/// q8_0's KLD on the essays: items of (2.75, 4.375, 6.375)/64 over 4, 5, 6 tokens, mean 0.0140625, residuals −0.01328,
/// −0.00195, 0.01523, SE √(3/2 · 0.000412)/15 = 0.00166, half-width 4.3027 · SE = 0.00713: just over half a bar of 0.014.
#[test]
fn bars_hold_per_domain_and_are_told_in_all_tables() {
    let dir = tempfile::tempdir().unwrap();
    let mut bundle = bundle(dir.path(), &all_items(), &ends());
    bundle.finish().unwrap();
    let bars = [
        bar("q8_0", Metric::Kld, Bound::AtMost(0.0141)),
        Bar {
            domain: Some("prose".into()),
            ..bar("q8_0", Metric::Kld, Bound::AtMost(0.014))
        },
        Bar {
            data: Some("sources".into()),
            n_tokens: Some(16),
            ..bar("q8_0", Metric::BytesVsF16, Bound::AtMost(0.5625))
        },
        Bar {
            n_tokens: Some(17),
            ..bar("q8_0", Metric::Kld, Bound::AtMost(0.0))
        },
        Bar {
            domain: Some("code".into()),
            ..bar(LABELS[3], Metric::Kld, Bound::AtMost(1.0))
        },
    ];
    bundle.state_bars(&bars).unwrap();
    let report = write(bundle.path()).unwrap();
    let told: Vec<String> = report
        .bars
        .iter()
        .map(|b| format!("{}, {}: {}", b.strategy, b.data, b.words()))
        .collect();
    assert_eq!(
        told,
        [
            "q8_0, essays: met; too few documents: 3, need about 4",
            "q8_0, sources: met; too few documents: 3, need about 4",
            "q8_0, essays: missed; too few documents: 3, need about 4",
            "q8_0, sources: met",
            "broken, sources: no verdict: failed: non-finite K at layer 1, KV head 0, position 7",
        ]
    );
    assert!(report.misses_a_bar());
    close(report.bars[0].measured.unwrap().value, 0.014_062_5);
    insta::assert_snapshot!([markdown::bars(&report), csv::bars(&report)].join("\n"));
    let text = terminal::results(&report, 80);
    assert!(text.contains("Bars: 1 of 5 missed"), "{text}");
    assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
    let json: serde_json::Value = serde_json::from_str(&csv::results_json(&report)).unwrap();
    let of = |data: &str, strategy: &str| {
        let rows = json.as_array().unwrap();
        let row = rows
            .iter()
            .find(|r| r["data"] == data && r["strategy"] == strategy);
        row.unwrap()["bars"].clone()
    };
    assert_eq!(of("essays", "q8_0")[1]["is_missed"], true);
    assert_eq!(of("essays", "q8_0")[0]["at_most"], 0.0141);
    assert_eq!(of("sources", "q8_0")[1]["metric"], "bytes_vs_f16");
    assert_eq!(of("all data", "q8_0"), serde_json::json!([]));
}

#[test]
fn a_finished_bundle_takes_other_bars_and_none() {
    let dir = tempfile::tempdir().unwrap();
    let mut bundle = bundle(dir.path(), &all_items(), &ends());
    bundle.finish().unwrap();
    for (most, is_missed) in [(0.0141, false), (0.014, true)] {
        let bars = [bar("q8_0", Metric::Kld, Bound::AtMost(most))];
        bundle.state_bars(&bars).unwrap();
        assert_eq!(write(bundle.path()).unwrap().misses_a_bar(), is_missed);
    }
    bundle.state_bars(&[]).unwrap();
    assert!(write(bundle.path()).unwrap().bars.is_empty());
    assert!(!bundle.path().join("bars.md").exists());
}

/// Texts of one domain are one population; a text of two domains is in both.
#[test]
fn a_domain_of_several_texts_is_pooled() {
    let dir = tempfile::tempdir().unwrap();
    let mut items = all_items();
    for record in items[3..5].iter_mut().flatten() {
        record.domain = "prose".into();
    }
    let bundle = bundle(dir.path(), &items, &ends());
    let bars = [bar("q8_0", Metric::Kld, Bound::AtMost(1.0))];
    bundle.state_bars(&bars).unwrap();
    let report = write(bundle.path()).unwrap();
    let titles: Vec<&str> = report.groups.iter().map(|g| g.title.as_str()).collect();
    assert_eq!(
        titles,
        [
            "essays",
            "sources, prose",
            "sources, code",
            "all prose",
            "all data"
        ]
    );
    assert_eq!(
        row(&report, "all prose", "q8_0").scores().unwrap().n_items,
        5
    );
    let told: Vec<(&str, usize)> = report
        .bars
        .iter()
        .map(|b| (b.data.as_str(), b.measured.unwrap().n))
        .collect();
    assert_eq!(told, [("sources, code", 1), ("all prose", 5)]);
}

/// The record with its tokens over and over, `n` of them.
fn lengthened(record: &ItemRecord, n: usize) -> ItemRecord {
    let mut long = record.clone();
    for list in [
        &mut long.tokens.nll,
        &mut long.tokens.nll_reference,
        &mut long.tokens.kld,
        &mut long.tokens.delta_p,
    ] {
        *list = list.iter().copied().cycle().take(n).collect();
    }
    let sum = |list: &[f32]| list.iter().map(|&x| f64::from(x)).sum::<f64>();
    (long.n_scored, long.top1_agree) = (n, n);
    long.nll = sum(&long.tokens.nll);
    long.nll_reference = sum(&long.tokens.nll_reference);
    long.kld_sum = sum(&long.tokens.kld);
    long.delta_p_sum = sum(&long.tokens.delta_p);
    let squares = long.tokens.delta_p.iter().map(|&x| f64::from(x).powi(2));
    long.delta_p_sq_sum = squares.sum();
    long
}

/// Errors by position appear once spans are long enough; buckets of equal errors have no slope.
#[test]
fn long_spans_are_told_by_position() {
    let dir = tempfile::tempdir().unwrap();
    let items: Vec<Vec<ItemRecord>> = all_items()
        .iter()
        .map(|batch| batch.iter().map(|r| lengthened(r, 640)).collect())
        .collect();
    let bundle = bundle(dir.path(), &items, &ends());
    let report = write(bundle.path()).unwrap();
    let text = fs::read_to_string(bundle.path().join("positions.md")).unwrap();
    insta::assert_snapshot!(text);
    let csv = csv::positions(&report);
    // Three groups of three scored rows with five doubling buckets.
    assert_eq!(csv.lines().count(), 1 + 3 * 3 * 5, "{csv}");
    assert!(!finished_files_have("positions.md"));
}

fn finished_files_have(name: &str) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path(), &all_items(), &ends());
    write(bundle.path()).unwrap();
    bundle.path().join(name).exists()
}

#[test]
fn the_exact_row_is_equivalent_and_a_failed_one_has_no_numbers() {
    let report = finished();
    let quality = row(&report, "all data", "f32").scores().unwrap().quality;
    assert_eq!(quality.paired.judged.verdict, Verdict::Equivalent);
    assert_eq!(
        (quality.paired.delta().value, quality.paired.comparison.p),
        (0.0, Some(1.0))
    );
    let broken = row(&report, "all data", LABELS[3]);
    assert!(broken.scores().is_none());
    assert!(broken.reason().contains("non-finite K at layer 1"));
    assert_eq!(report.n_failed, 2);
    let titles: Vec<&str> = report.groups.iter().map(|g| g.title.as_str()).collect();
    assert_eq!(titles, ["essays", "sources", "all data"]);
}

#[test]
fn one_item_gives_no_interval_and_no_nan() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = bundle(dir.path(), &all_items()[..1], &[]);
    let report = write(bundle.path()).unwrap();
    assert!(!report.is_finished);
    let quality = row(&report, "essays", "q8_0").scores().unwrap().quality;
    assert_eq!(quality.paired.judged.verdict, Verdict::NoInterval);
    assert_eq!(row(&report, "sources", "q8_0").reason(), "not run yet");
    for (name, writer) in FILES {
        let text = writer(&report);
        assert!(
            !text.contains("NaN") && !text.contains("inf"),
            "{name}: {text}"
        );
    }
    let text = markdown::results(&report);
    assert!(text.contains("n = 1 context of 1 document"), "{text}");
    assert!(text.contains("no interval (n = 1)"), "{text}");
    assert!(text.contains("unfinished"), "{text}");
}

#[test]
fn an_empty_bundle_reports_nothing_and_does_not_fail() {
    let dir = tempfile::tempdir().unwrap();
    let report = write(open(dir.path()).path()).unwrap();
    assert!(markdown::results(&report).contains("not run yet"));
    assert!(terminal::results(&report, 80).contains("nothing scored"));
}

/// Domains of one data set stand apart, and together.
#[test]
fn domains_are_reported_apart() {
    let dir = tempfile::tempdir().unwrap();
    let mut items = all_items();
    for record in &mut items[2] {
        record.domain = "verse".into();
    }
    let bundle = bundle(dir.path(), &items[..3], &[]);
    let report = write(bundle.path()).unwrap();
    let titles: Vec<&str> = report.groups.iter().map(|g| g.title.as_str()).collect();
    assert_eq!(
        titles,
        ["essays, prose", "essays, verse", "sources", "all data"]
    );
    assert_eq!(
        row(&report, "essays, verse", "q8_0")
            .scores()
            .unwrap()
            .n_items,
        1
    );
    assert_eq!(
        row(&report, "all data", "q8_0").scores().unwrap().n_items,
        3
    );
}

/// A run in another order of items, killed in the middle of a line and gone on with, gives the same tables.
#[test]
fn tables_do_not_depend_on_how_the_journal_came_about() {
    let dir = tempfile::tempdir().unwrap();
    let mut whole = bundle(dir.path(), &all_items(), &ends());
    whole.finish().unwrap();
    let expected = write(whole.path()).unwrap();
    let journal = fs::read(whole.path().join(JOURNAL)).unwrap();
    for cut in [1, journal.len() / 3, journal.len() / 2, journal.len() - 1] {
        let dir = tempfile::tempdir().unwrap();
        let first = open(dir.path());
        let folder = first.path().to_owned();
        drop(first);
        fs::write(folder.join(JOURNAL), &journal[..cut]).unwrap();
        let mut bundle = open(dir.path());
        for batch in all_items().iter().rev() {
            if !bundle.is_done(&batch[0].cell, batch[0].item) {
                bundle.append(batch).unwrap();
            }
        }
        for end in ends().iter().rev() {
            bundle.append_cell(end).unwrap();
        }
        bundle.finish().unwrap();
        write(bundle.path()).unwrap();
        for (name, writer) in FILES {
            let got = fs::read_to_string(folder.join(name)).unwrap_or_default();
            assert_eq!(got, writer(&expected), "{name}, cut at {cut}");
        }
    }
}
