//! The tests against SciPy: tests/golden/stats.json, made by make_stats.py.

use serde::Deserialize;

use super::super::bootstrap::bca;
use super::super::holm::holm;
use super::super::wilcoxon::Wilcoxon;
use super::super::*;

#[derive(Deserialize)]
struct Golden {
    t_quantiles: Vec<(usize, f64)>,
    mcnemar: Vec<McNemarCase>,
    wilcoxon: Vec<WilcoxonCase>,
    holm: Vec<HolmCase>,
    tost: Vec<TostCase>,
    bca: Vec<BcaCase>,
    wilson: Vec<(usize, usize, f64, f64)>,
}

#[derive(Deserialize)]
struct McNemarCase {
    both: usize,
    only_a: usize,
    only_b: usize,
    p: f64,
}

#[derive(Deserialize)]
struct WilcoxonCase {
    d: Vec<f64>,
    statistic: f64,
    p: f64,
    exact: bool,
}

#[derive(Deserialize)]
struct HolmCase {
    p: Vec<f64>,
    corrected: Vec<f64>,
}

#[derive(Deserialize)]
struct TostCase {
    d: Vec<f64>,
    margin: f64,
    p: f64,
    p_difference: f64,
}

#[derive(Deserialize)]
struct BcaCase {
    x: Vec<f64>,
    low: f64,
    high: f64,
    /// Spread of the ends over seeds.
    error: f64,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../../../../tests/golden/stats.json")).unwrap()
}

fn close(what: &str, got: f64, want: f64, relative: f64) {
    assert!(
        (got - want).abs() <= relative * want.abs(),
        "{what}: {got} is not {want}"
    );
}

#[test]
fn quantiles_of_t() {
    for (freedom, want) in golden().t_quantiles {
        close("t", t_quantile(freedom), want, 1e-9);
    }
}

#[test]
fn mcnemar_is_scipys_binomtest() {
    for case in golden().mcnemar {
        let (n, first) = (
            case.both + case.only_a + case.only_b,
            case.both + case.only_a,
        );
        let a: Vec<bool> = (0..n).map(|i| i < first).collect();
        let b: Vec<bool> = (0..n).map(|i| i < case.both || i >= first).collect();
        let found = McNemar::exact(&a, &b).unwrap();
        assert_eq!((found.only_a, found.only_b), (case.only_a, case.only_b));
        close("p", found.p, case.p, 1e-9);
    }
}

#[test]
fn wilcoxon_is_scipys() {
    let cases = golden().wilcoxon;
    assert!(cases.iter().any(|c| c.exact) && cases.iter().any(|c| !c.exact));
    for case in cases {
        let found = Wilcoxon::signed_rank(&case.d).unwrap();
        assert_eq!(found.is_exact, case.exact, "{:?}", case.d);
        assert_eq!(found.statistic, case.statistic);
        close("p", found.p, case.p, 1e-9);
    }
}

#[test]
fn holm_is_what_it_says() {
    for case in golden().holm {
        for (got, want) in holm(&case.p).into_iter().zip(case.corrected) {
            close("p", got, want, 1e-12);
        }
    }
}

/// Below 8 items intervals are Student's, and the tests are the paired t test and two one-sided t tests.
#[test]
fn two_one_sided_tests_are_scipys() {
    for case in golden().tost {
        let delta = Estimate::mean(&case.d).unwrap();
        let found = Comparison::new(delta, case.margin);
        close("margin", found.p_margin.unwrap(), case.p, 1e-8);
        close("difference", found.p.unwrap(), case.p_difference, 1e-8);
    }
}

/// Two resampled intervals differ by their draws: within five of the ends' standard errors.
#[test]
fn bca_is_scipys_within_its_noise() {
    for case in golden().bca {
        let (low, high) = bca(&case.x, &vec![1.0; case.x.len()]).unwrap();
        for (got, want) in [(low, case.low), (high, case.high)] {
            assert!((got - want).abs() < 5.0 * case.error, "{got} is not {want}");
        }
    }
}

#[test]
fn wilson_is_scipys() {
    for (count, n, low, high) in golden().wilson {
        let holds: Vec<bool> = (0..n).map(|i| i < count).collect();
        let found = Estimate::fraction(&holds).unwrap().interval.unwrap();
        assert!((found.0 - low).abs() < 1e-10 && (found.1 - high).abs() < 1e-10);
    }
}
