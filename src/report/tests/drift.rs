//! Drift in reports: quantiles by hand, the noise floor, the intervals of one item.

use super::*;
use crate::cache::strategy::{StageSpec, Strategy, Tail};
use crate::eval::stats::Over;

/// q8_0's KLD is half of its error: from 1/128 (item 0, token 0) to (1 + 7/4)/128 (item 2, token 5) over 15 tokens.
#[test]
fn quantiles_of_the_drift_by_hand() {
    let report = finished();
    let drift = row(&report, "essays", "q8_0").scores().unwrap().drift;
    close(drift.kld[0], 2.75 / 128.0);
    close(drift.kld[7], 1.0 / 128.0);
    let mut all: Vec<f64> = (0..3)
        .flat_map(|item| (0..4 + item).map(move |i| (1.0 + f64::from(i + item) / 4.0) / 128.0))
        .collect();
    all.sort_by(f64::total_cmp);
    close(drift.kld[5], all[7]);
    // The 90th percentile of 15 values lies at 12.6 of 14.
    close(drift.kld[4], 0.4 * all[12] + 0.6 * all[13]);
    let exact = row(&report, "essays", "f32").scores().unwrap().drift;
    assert_eq!((exact.kld, exact.delta_p), ([0.0; 8], [0.0; 11]));
}

/// The floor is the row that only rounds to bf16; a table without one says how to have it.
#[test]
fn the_noise_floor_is_named() {
    let mut report = finished();
    let text = markdown::results(&report);
    assert_eq!(text.matches("Noise floor: no row here").count(), 3);
    assert!(!terminal::results(&report, 100).contains("Noise floor"));
    report.groups[0].rows[1].strategy = Strategy::bare("bf16");
    let text = markdown::results(&report);
    assert!(
        text.contains("Noise floor (q8_0): KLD 0.0141 [0.0069, 0.0212]"),
        "{text}"
    );
    assert!(terminal::results(&report, 100).contains("Noise floor (q8_0)"));
    report.groups[0].rows[1].strategy.tail = Tail::both(32);
    report.groups[0].rows[1].strategy.project_k = vec![StageSpec {
        name: "hadamard".into(),
        params: Default::default(),
    }];
    assert!(!markdown::results(&report).contains("Noise floor (q8_0)"));
}

/// One item of 640 tokens: intervals over blocks of them, and said to be.
#[test]
fn one_long_item_has_intervals_over_its_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let items: Vec<ItemRecord> = all_items()[0].iter().map(|r| lengthened(r, 640)).collect();
    let bundle = bundle(dir.path(), &[items], &[]);
    let report = write(bundle.path()).unwrap();
    let quality = row(&report, "essays", "q8_0").scores().unwrap().quality;
    assert!(matches!(quality.paired.delta().over, Over::Blocks { .. }));
    assert_eq!(quality.paired.judged.verdict, Verdict::Worse);
    assert_eq!(quality.same_top.interval, None);
    let exact = row(&report, "essays", "f32").scores().unwrap().quality;
    assert_eq!(exact.paired.judged.verdict, Verdict::Equivalent);
    let text = markdown::results(&report);
    assert!(text.contains("over moving blocks of its tokens"), "{text}");
    assert!(csv::pairs(&report).contains("blocks of "));
}
