//! Bars that are multiples of another strategy's value.

use super::*;
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
        "no verdict: kld of both it and broken is not measured here"
    );
}
