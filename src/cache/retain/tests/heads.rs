//! Whole heads: which stay, that the budget holds, and what the others keep while decoding.

use proptest::prelude::*;

use super::selection::{Scores, counts, drawn, kept, noise, rule, step};
use crate::cache::retain::budget::{Allocate, Budget, Protect};

fn protected(sinks: u32, recent: u32) -> Protect {
    Protect {
        sinks,
        recent,
        whitelist: Vec::new(),
    }
}

#[test]
fn the_drawn_head_stays_whole() {
    let mut rule = rule(Budget::Tokens(4), Allocate::Heads);
    rule.protect.sinks = 1;
    let all: Vec<u32> = (0..6).collect();
    assert_eq!(kept(&rule, &drawn()), [[all.clone(), vec![0]]]);
    // Seven of twelve rows are just enough for that, six are not.
    rule.budget = Budget::KeptFraction(0.51);
    assert_eq!(kept(&rule, &drawn()), [[all, vec![0]]]);
    rule.budget = Budget::KeptFraction(0.5);
    assert_eq!(kept(&rule, &drawn()), [[[0], [0]]]);
}

#[test]
fn heads_of_all_layers_are_weighed_by_their_best_row_that_may_leave() {
    // Three layers of two heads; the best rows: 5, 9, 1, 7, 7, 0. What is highest of all is protected, and counts for nothing.
    let best = [[5.0, 9.0], [1.0, 7.0], [7.0, 0.0]];
    let head = |best: f32, i: usize| -> Vec<f32> {
        let row = |t: usize| match t {
            0 => 100.0 * (6 - i) as f32,
            9 => 50.0,
            t if t == 3 + i % 3 => best,
            _ => -1.0,
        };
        (0..10).map(row).collect()
    };
    let layer = |l: usize| (0..2).map(|h| head(best[l][h], 2 * l + h)).collect();
    let scores: Scores = (0..3).map(layer).collect();
    let mut rule = rule(Budget::Tokens(5), Allocate::Heads);
    rule.protect = protected(1, 1);
    // 30 rows: 12 are protected, two heads have 8 more each. Of the two with 7, the first.
    let want = [[2, 10], [2, 10], [2, 2]];
    assert_eq!(counts(&kept(&rule, &scores)), want);
    rule.budget = Budget::Tokens(6);
    assert_eq!(
        counts(&kept(&rule, &scores)),
        [[2, 10], [2, 10], [10, 2]],
        "36 rows"
    );
    assert_eq!(kept(&rule, &scores)[0][0], [0, 9]);
    // Without protected rows a head that goes keeps its best one.
    rule.protect = protected(0, 0);
    rule.budget = Budget::Tokens(2);
    let alone = kept(&rule, &scores);
    assert_eq!(counts(&alone), [[10, 1], [1, 1], [1, 1]]);
    assert_eq!(alone[0][1], [0]);
}

#[test]
fn decoding_leaves_a_head_that_went_what_is_protected_and_a_whole_one_all() {
    let mut fraction = rule(Budget::KeptFraction(0.6), Allocate::Heads);
    fraction.protect = protected(2, 3);
    let score = |p: u32| (p % 7) as f32;
    let (mut whole, mut gone): (Vec<u32>, Vec<u32>) = ((0..20).collect(), vec![0, 1, 17, 18, 19]);
    for p in 20..60 {
        whole.push(p);
        whole = step(&fraction, &whole, score, (20, 20));
        gone.push(p);
        gone = step(&fraction, &gone, score, (5, 20));
        assert_eq!(gone, [0, 1, p - 2, p - 1, p]);
    }
    assert_eq!(whole.len(), 60);
}

proptest! {
    #[test]
    fn a_head_is_whole_or_protected_and_the_budget_holds(
        (n_layers, n_heads, n) in (1usize..5, 1usize..4, 12usize..60),
        percent in 1u32..=100,
        (sinks, recent) in (1u32..4, 0u32..6),
    ) {
        let scores = noise(n_layers, n_heads, n);
        let fraction = f64::from(percent) / 100.0;
        let mut rule = rule(Budget::KeptFraction(fraction), Allocate::Heads);
        rule.protect = protected(sinks, recent);
        let n_protected = (sinks + recent) as usize;
        let all = n_layers * n_heads;
        let counts = counts(&kept(&rule, &scores)).concat();
        prop_assert!(counts.iter().all(|&c| c == n || c == n_protected), "{counts:?}");
        let most = (n as u32 * percent).div_ceil(100).max(1) as usize * all;
        let sum: usize = counts.iter().sum();
        prop_assert!(sum <= most.max(n_protected * all), "{sum} of {most}");
        // Another head would not have fitted.
        prop_assert!(sum == n * all || sum + n - n_protected > most, "{sum} of {most}");
    }
}

#[test]
fn a_head_that_the_point_left_whole_has_its_rows_as_its_share() {
    let score = |p: u32| ((p * 31 + 7) % 53) as f32;
    let all: Vec<u32> = (0..41).collect();
    for allocate in [Allocate::Heads, Allocate::Global, Allocate::Pyramid(20.0)] {
        let rule = rule(Budget::Tokens(10), allocate);
        // 40 of 40 rows were its share of a mean of 10: the new row takes another's place, thirty others don't leave.
        assert_eq!(step(&rule, &all, score, (40, 40)).len(), 40, "{allocate:?}");
        // A context of 10 rows was no longer than the budget.
        assert_eq!(step(&rule, &all[..11], score, (10, 10)).len(), 10);
        assert_eq!(step(&rule, &all[..9], score, (8, 8)).len(), 9);
    }
    let alone = rule(Budget::Tokens(10), Allocate::Uniform);
    assert_eq!(step(&alone, &all, score, (40, 40)).len(), 10);
}

#[test]
fn a_position_is_protected_once() {
    let protect = Protect {
        sinks: 4,
        recent: 10,
        whitelist: vec![2..6, 5..8, 50..60, 95..200, 300..310],
    };
    for n_seen in [0, 3, 7, 20, 58, 100, 150, 400] {
        let plain = (0..n_seen).filter(|&p| protect.holds(p, n_seen)).count();
        assert_eq!(protect.n_of(n_seen) as usize, plain, "{n_seen}");
    }
}
