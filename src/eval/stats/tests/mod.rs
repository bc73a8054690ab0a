//! Estimates by hand, their coverage, and the tests against SciPy.

pub mod coverage;
mod golden;

use super::*;

fn close(got: f64, want: f64, tolerance: f64) {
    assert!((got - want).abs() <= tolerance, "{got} is not {want}");
}

/// Tables of Student's t (two-sided 95 %).
#[test]
fn quantiles_of_t_match_the_printed_tables() {
    for (freedom, want, tolerance) in [
        (1, 12.706_204_736, 2e-8),
        (2, 4.302_652_730, 2e-8),
        (7, 2.364_624_252, 2e-8),
        (19, 2.093_024_054, 2e-8),
        (100, 1.983_971_519, 2e-8),
        (100_000, 1.959_987_708, 1e-5),
    ] {
        close(t_quantile(freedom), want, tolerance);
    }
}

/// Three documents of 10, 20 and 30 tokens with Σd = 1, 1, 4: R = 6/60 = 0.1, e = 0, −1, 1,
/// SE = √(3/2 · 2)/60 = √3/60; half width 4.302653 · 0.0288675 = 0.1242069.
#[test]
fn token_weighted_ratio_by_hand() {
    let r = Estimate::ratio(&[1.0, 1.0, 4.0], &[10.0, 20.0, 30.0]).unwrap();
    close(r.value, 0.1, 1e-15);
    close(r.se.unwrap(), 3f64.sqrt() / 60.0, 1e-15);
    close(r.half_width().unwrap(), 0.124_206_9, 1e-7);
    assert_eq!(r.n, 3);
    let percent = r.scaled(-100.0);
    close(percent.value, -10.0, 1e-12);
    close(percent.half_width().unwrap(), 12.420_69, 1e-5);
    let (low, high) = percent.interval.unwrap();
    assert!(low < percent.value && percent.value < high);
}

/// p and the interval are one statement: a bound at the interval's end has a one-sided p of 0.025.
#[test]
fn p_agrees_with_the_interval() {
    let x: Vec<f64> = (0..30).map(|i| f64::from(i * i % 17) + 0.1).collect();
    let mean = Estimate::mean(&x).unwrap();
    let (low, high) = mean.interval.unwrap();
    assert!(
        high - mean.value != mean.value - low,
        "an even interval: {mean:?}"
    );
    close(mean.p_above(low).unwrap(), 0.025, 1e-9);
    close(mean.p_below(high).unwrap(), 0.025, 1e-9);
    close(mean.p_above(mean.value).unwrap(), 0.5, 1e-12);
    let at_end: Vec<f64> = x.iter().map(|x| x - low * (1.0 - 1e-12)).collect();
    close(
        Estimate::mean(&at_end).unwrap().p_value().unwrap(),
        0.05,
        1e-6,
    );
}

#[test]
fn one_cluster_has_no_interval_and_equal_ones_have_a_point() {
    let one = Estimate::ratio(&[2.0], &[1.0]).unwrap();
    assert_eq!((one.se, one.interval, one.p_value()), (None, None, None));
    assert_eq!(Estimate::ratio(&[1.0], &[0.0]), None);
    assert_eq!(Estimate::ratio(&[], &[]), None);
    for n in [2, 5, 8, 40] {
        let equal = Estimate::mean(&vec![0.75; n]).unwrap();
        assert_eq!((equal.se, equal.interval), (Some(0.0), Some((0.75, 0.75))));
        assert_eq!(equal.p_value(), Some(0.0));
        let nothing = Estimate::mean(&vec![0.0; n]).unwrap();
        assert_eq!(nothing.p_value(), Some(1.0));
    }
}

/// 7 of 10: Wilson's interval is [0.3968, 0.8922] (SciPy, binomtest).
#[test]
fn a_fraction_has_wilsons_interval() {
    let mut holds = [true; 10];
    holds[..3].fill(false);
    let found = Estimate::fraction(&holds).unwrap();
    let (low, high) = found.interval.unwrap();
    close(found.value, 0.7, 1e-15);
    close(found.se.unwrap(), (0.21f64 / 9.0).sqrt(), 1e-15);
    close(low, 0.396_778_147, 1e-8);
    close(high, 0.892_208_732, 1e-8);
    let wide = Estimate::mean(&[1.0, 0.2, 0.9]).unwrap();
    let cut = wide.within(0.0, 1.0).interval.unwrap();
    assert!(wide.interval.unwrap().0 < 0.0 && wide.interval.unwrap().1 > 1.0);
    assert_eq!(cut, (0.0, 1.0));
    let all = Estimate::fraction(&[true; 20]).unwrap();
    close(all.interval.unwrap().1, 1.0, 1e-12);
    assert!(all.interval.unwrap().0 < 0.9);
    assert_eq!(Estimate::fraction(&[]), None);
    assert_eq!(Estimate::fraction(&[true]).unwrap().interval, None);
}

#[test]
fn quantiles_interpolate() {
    let sorted = [1.0, 2.0, 3.0, 4.0];
    assert_eq!(quantile(&sorted, 0.5), Some(2.5));
    assert_eq!(quantile(&sorted, 0.0), Some(1.0));
    assert_eq!(quantile(&sorted, 1.0), Some(4.0));
    close(quantile(&sorted, 0.99).unwrap(), 3.97, 1e-12);
    assert_eq!(quantile(&[7.0], 0.99), Some(7.0));
    assert_eq!(quantile(&[], 0.5), None);
}

#[test]
fn root_mean_square_carries_its_error() {
    let mean = Estimate {
        value: 0.04,
        n: 5,
        se: Some(0.008),
        interval: Some((-0.01, 0.09)),
        over: Over::Items,
    };
    let root = mean.sqrt();
    close(root.value, 0.2, 1e-15);
    close(root.se.unwrap(), 0.02, 1e-15);
    assert_eq!(root.interval.map(|(low, _)| low), Some(0.0));
    close(root.interval.unwrap().1, 0.3, 1e-15);
    let zero = Estimate::ratio(&[0.0, 0.0], &[1.0, 1.0]).unwrap().sqrt();
    assert_eq!((zero.value, zero.se), (0.0, Some(0.0)));
}
