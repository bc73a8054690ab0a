//! By how much heads grow while decoding: the drawn counts, windows, and what is refused.

use super::build;
use super::selection::{rule, step};
use crate::cache::retain::budget::{Allocate, Budget};
use crate::cache::retain::growth::Growth;
use crate::cache::stage::{LeftAtPoint, LiveRows, Moment, Retention, Value};

/// Rows of a head of which the point left 4 of 8, after so many new positions.
fn drawn(growth: Growth) -> Vec<u32> {
    let left = |since| LeftAtPoint {
        kept: 4,
        of: 8,
        since,
    };
    (0..5).map(|n| growth.rows(left(n), 8 + n)).collect()
}

#[test]
fn the_drawn_head_grows_as_drawn() {
    assert_eq!(drawn(Growth::Tokens(2)), [4, 5, 6, 6, 6]);
    assert_eq!(drawn(Growth::KeptFraction(0.5)), [4, 5, 5, 6, 6]);
    assert_eq!(drawn(Growth::Tokens(0)), [4; 5]);
    assert_eq!(drawn(Growth::KeptFraction(1.0)), [4, 5, 6, 7, 8]);
}

#[test]
fn a_sliding_window_takes_shares_of_the_rows_that_it_passes_and_no_rows_that_were_left() {
    // 6 of 10 reached positions were left, the window reaches 10: of k old ones ⌈0.6 · k⌉ count in a fraction.
    let rows = |growth: Growth, since: u32| {
        let left = LeftAtPoint {
            kept: 6,
            of: 10,
            since,
        };
        growth.rows(left, 10)
    };
    let of = |growth| [0, 1, 5, 9, 10, 50].map(|since| rows(growth, since));
    assert_eq!(of(Growth::KeptFraction(1.0)), [6, 7, 8, 10, 10, 10]);
    assert_eq!(of(Growth::KeptFraction(0.5)), [6, 7, 6, 6, 5, 5]);
    // A part of something is a row, at least.
    assert_eq!(of(Growth::KeptFraction(0.0)), [6, 7, 4, 2, 1, 1]);
    assert_eq!(of(Growth::Tokens(2)), [6, 7, 8, 8, 8, 8]);
    assert_eq!(of(Growth::Tokens(0)), [6; 6]);
}

#[test]
fn a_head_that_grows_keeps_its_best_rows_old_and_new() {
    let score = |p: u32| ((p * 31 + 7) % 53) as f32;
    for (budget, allocate) in [
        (Budget::KeptFraction(0.3), Allocate::Global),
        (Budget::Tokens(4), Allocate::Heads),
        (Budget::Bytes(1000), Allocate::Uniform),
        (Budget::Threshold(1000.0), Allocate::Uniform),
    ] {
        let mut rule = rule(budget, allocate);
        rule.growth = Some(Growth::Tokens(3));
        let mut rows: Vec<u32> = vec![2, 5, 11, 19];
        for p in 20..60 {
            let mut want = rows.clone();
            want.push(p);
            let room = 4 + (p - 19).min(3) as usize;
            if want.len() > room {
                let worst = want
                    .iter()
                    .copied()
                    .min_by(|&a, &b| score(a).total_cmp(&score(b)));
                want.retain(|&p| Some(p) != worst);
            }
            rows.push(p);
            rows = step(&rule, &rows, score, (4, 20));
            assert_eq!(rows, want, "{budget:?} {allocate:?}");
        }
        assert_eq!(rows.len(), 7);
    }
}

#[test]
fn a_head_that_the_point_left_alone_is_left_alone_later() {
    // Scores that compare nothing, as a trained gate gives in a layer with a sliding window.
    let rows: Vec<u32> = (0..15).collect();
    for (kept, all_stay) in [(10, true), (6, false)] {
        for growth in [Growth::Tokens(0), Growth::KeptFraction(0.5)] {
            let mut rule = rule(Budget::KeptFraction(0.5), Allocate::Global);
            rule.growth = Some(growth);
            let left = step(&rule, &rows, |_| f32::MAX, (kept, 10));
            assert_eq!(left.len() == 15, all_stay, "{growth:?}, {kept} of 10");
        }
    }
}

#[test]
fn a_window_counts_the_sinks_that_a_sliding_window_has_left() {
    let given = [
        ("kept_fraction", Value::Float(0.5)),
        ("decoding_tokens", Value::Int(0)),
    ];
    let window = build("window", &given).unwrap();
    let rows: Vec<u32> = (91..101).collect();
    let gone = window.evict(LiveRows {
        positions: &rows,
        scores: &[],
        n_seen: 101,
        n_reached: 20,
        compressed: Some(LeftAtPoint {
            kept: 9,
            of: 20,
            since: 1,
        }),
        moment: Moment::Step,
    });
    assert_eq!(
        gone,
        [0],
        "nine rows are its own, and no sink is one of them"
    );
}

/// What a stage leaves of rows 0 to 19, of which the point left all, after ten more.
fn after_ten(stage: &dyn Retention) -> Vec<u32> {
    let mut rows: Vec<u32> = (0..20).collect();
    for p in 20..30 {
        rows.push(p);
        let gone = stage.evict(LiveRows {
            positions: &rows,
            scores: &[],
            n_seen: p + 1,
            n_reached: p + 1,
            compressed: Some(LeftAtPoint {
                kept: 12,
                of: 20,
                since: p - 19,
            }),
            moment: Moment::Step,
        });
        for i in gone.into_iter().rev() {
            rows.remove(i);
        }
    }
    rows
}

#[test]
fn a_window_grows_by_its_newest_rows() {
    let window = |extra: (&str, Value)| {
        let given = [("kept_fraction", Value::Float(0.6)), extra];
        build("window", &given).unwrap()
    };
    let by_two = window(("decoding_tokens", Value::Int(2)));
    let want: Vec<u32> = (0..4).chain(20..30).collect();
    assert_eq!(after_ten(&*by_two), want);
    let by_half = window(("decoding_kept_fraction", Value::Float(0.5)));
    let want: Vec<u32> = (0..4).chain(17..30).collect();
    assert_eq!(after_ten(&*by_half), want);
    assert!(by_two.budgets_decoding() && by_two.needs_point().is_some());
}

#[test]
fn two_budgets_for_decoding_are_refused_and_one_needs_a_point() {
    let both = [
        ("tokens", Value::Int(64)),
        ("decoding_tokens", Value::Int(2)),
        ("decoding_kept_fraction", Value::Float(0.5)),
    ];
    for name in ["knorm", "random"] {
        let Err(refused) = build(name, &both) else {
            panic!("{name} takes both");
        };
        let want = "`decoding_tokens` = 2 and `decoding_kept_fraction` = 0.5 are two budgets for decoding: give one of them";
        assert!(refused.to_string().contains(want), "{refused}");
        let one = build(name, &both[..2]).unwrap();
        assert!(one.budgets_decoding() && one.threshold().is_none());
        assert!(one.needs_point().unwrap().contains("decoding_"));
        let none = build(name, &both[..1]).unwrap();
        assert!(!none.budgets_decoding() && none.needs_point().is_none());
    }
}
