//! Bars that are multiples of another strategy's value.

use super::*;
use crate::cache::Traffic;
use crate::eval::records::TrafficRecord;
use crate::report::bars::{cells, rows};

#[test]
fn a_multiple_is_of_the_same_groups_row() {
    let report = finished();
    let bar = |times: &str, bound| Bar {
        strategy: "q4_0 tail 32".into(),
        metric: Metric::Kld,
        bound,
        times: Some(times.into()),
        data: Some("essays".into()),
        domain: None,
        protocol: None,
        continuation: None,
        n_tokens: None,
    };
    let of = |bar: Bar| rows(&report.groups, &[bar]).remove(0);
    let plain = |label: &str| {
        let bar = Bar {
            strategy: label.into(),
            times: None,
            ..bar("", Bound::AtMost(0.0))
        };
        of(bar).measured.unwrap().value
    };
    let (one, other) = (plain("q4_0 tail 32"), plain("q8_0"));
    assert!(one != other && other > 0.0);
    let held = of(bar("q8_0", Bound::AtMost(one / other * 1.01)));
    assert_eq!(held.measured.unwrap().value, one / other);
    assert_eq!(held.measured.unwrap().interval, None);
    assert_eq!(held.words(), "met");
    assert!(of(bar("q8_0", Bound::AtMost(one / other * 0.99))).is_missed());
    assert!(cells(&held)[4].ends_with(" × q8_0"), "{:?}", cells(&held));
    let none = of(bar("broken", Bound::AtMost(1.0)));
    assert_eq!(
        none.words(),
        "no verdict: kld of both it and broken is not measured here, or broken's is 0"
    );
}

/// Two strategies of the essays wait 3 and 1 ms a step, over 4 and 8 steps; the third text's row was not timed.
#[test]
fn a_wait_is_held_against_another_ones_and_counts_steps() {
    let waits = |n_steps, ms| TrafficRecord {
        timed: Traffic {
            n_steps,
            stall_ns: n_steps * ms * 1_000_000,
            ..Traffic::default()
        },
        ..TrafficRecord::default()
    };
    let mut items = all_items();
    for record in items.iter_mut().flatten() {
        record.traffic = Some(waits(0, 0));
    }
    items[0][1].traffic = Some(waits(4, 3));
    items[0][2].traffic = Some(waits(8, 1));
    let dir = tempfile::tempdir().unwrap();
    let report = write(bundle(dir.path(), &items, &ends()).path()).unwrap();
    let bar = |times: Option<&str>, data: &str| Bar {
        times: times.map(str::to_owned),
        data: Some(data.into()),
        ..super::bar("q4_0 tail 32", Metric::StallMsPerToken, Bound::AtMost(0.66))
    };
    let of = |bar: Bar| rows(&report.groups, &[bar]).remove(0);
    let alone = of(bar(None, "essays"));
    let measured = alone.measured.unwrap();
    assert_eq!((measured.value, measured.n), (1.0, 8));
    assert_eq!(alone.words(), "missed");
    let less = of(bar(Some("q8_0"), "essays"));
    close(less.measured.unwrap().value, 1.0 / 3.0);
    assert_eq!(less.words(), "met");
    let untimed = of(bar(Some("q8_0"), "sources"));
    assert!(untimed.measured.is_none(), "{untimed:?}");
    assert!(untimed.words().contains("stall_ms_per_token"));
}

/// What lies in a tier is stored, and takes no memory.
#[test]
fn resident_bytes_leave_a_tier_out() {
    let values = |in_tier: u64| {
        let mut items = all_items();
        for record in items.iter_mut().flatten().flat_map(|r| &mut r.memory) {
            record.report.backing_bytes = in_tier;
        }
        let dir = tempfile::tempdir().unwrap();
        let report = write(bundle(dir.path(), &items, &ends()).path()).unwrap();
        [Metric::ResidentVsF16, Metric::BytesVsF16].map(|metric| {
            let bar = Bar {
                data: Some("essays".into()),
                ..super::bar("q8_0", metric, Bound::AtMost(1.0))
            };
            rows(&report.groups, &[bar])[0].measured.unwrap().value
        })
    };
    let ([resident, stored], [same, more]) = (values(0), values(1 << 16));
    close(resident, stored);
    close(same, resident);
    assert!(more > 2.0 * stored, "{more} {stored}");
}
