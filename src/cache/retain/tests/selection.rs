//! Which rows a budget leaves to heads that share it: drawn cases, and the rule written again as what stays, not as what goes.

use std::collections::BTreeSet;

use proptest::prelude::*;

use crate::cache::retain::budget::{Allocate, Budget, Protect, Rule};
use crate::cache::retain::{knorm::Knorm, selection::Selection};
use crate::cache::stage::{LeftAtPoint, LiveRows, Moment, Retention};

/// `[layer][kv_head][token]`.
pub(super) type Scores = Vec<Vec<Vec<f32>>>;

/// Positions, `[layer][kv_head]`.
pub(super) type Kept = Vec<Vec<Vec<u32>>>;

pub(super) fn rule(budget: Budget, allocate: Allocate) -> Rule {
    Rule {
        budget,
        allocate,
        protect: Protect::default(),
        segments: Vec::new(),
        growth: None,
        rebuild: None,
    }
}

fn stage(rule: &Rule) -> Selection<Knorm> {
    Selection {
        score: Knorm,
        rule: rule.clone(),
    }
}

fn without(rows: &[u32], gone: &[usize]) -> Vec<u32> {
    assert!(gone.is_sorted_by(|a, b| a < b), "{gone:?}");
    let all = rows.iter().enumerate();
    all.filter(|(i, _)| !gone.contains(i))
        .map(|(_, &p)| p)
        .collect()
}

/// What the compression point leaves. `reached`: by layer, newest positions that its sliding window reaches.
fn left(rule: &Rule, scores: &Scores, reached: &[u32]) -> Kept {
    let n = scores[0][0].len() as u32;
    let rows: Vec<Vec<u32>> = reached.iter().map(|r| (n - r..n).collect()).collect();
    let layer = |(l, heads): (usize, &Vec<Vec<f32>>)| -> Vec<Vec<f32>> {
        let live = (n - reached[l]) as usize;
        heads.iter().map(|h| h[live..].to_vec()).collect()
    };
    let live: Scores = scores.iter().enumerate().map(layer).collect();
    let shown = |l: usize| -> Vec<LiveRows<'_>> {
        let head = |scores| LiveRows {
            positions: &rows[l],
            scores,
            n_seen: n,
            n_reached: reached[l],
            compressed: None,
            moment: Moment::CompressionPoint,
        };
        live[l].iter().map(|s| head(s)).collect()
    };
    let heads: Vec<Vec<LiveRows<'_>>> = (0..scores.len()).map(shown).collect();
    let gone = stage(rule).evict_context(&heads);
    let layers = gone.iter().zip(&rows);
    layers
        .map(|(gone, rows)| gone.iter().map(|g| without(rows, g)).collect())
        .collect()
}

/// The same of layers without a window.
pub(super) fn kept(rule: &Rule, scores: &Scores) -> Kept {
    let n = scores[0][0].len() as u32;
    left(rule, scores, &vec![n; scores.len()])
}

/// What a decode step leaves of a head whose rows are `positions`.
pub(super) fn step(
    rule: &Rule,
    positions: &[u32],
    score: impl Fn(u32) -> f32,
    (kept, of): (u32, u32),
) -> Vec<u32> {
    let scores: Vec<f32> = positions.iter().map(|&p| score(p)).collect();
    let n_seen = positions.last().map_or(0, |p| p + 1);
    let since = n_seen.saturating_sub(of);
    let left = LeftAtPoint { kept, of, since };
    let gone = stage(rule).evict(LiveRows {
        positions,
        scores: &scores,
        n_seen,
        n_reached: n_seen,
        compressed: Some(left),
        moment: Moment::Step,
    });
    without(positions, &gone)
}

pub(super) fn counts(kept: &Kept) -> Vec<Vec<usize>> {
    let layer = |heads: &Vec<Vec<u32>>| heads.iter().map(Vec::len).collect();
    kept.iter().map(layer).collect()
}

/// Different everywhere, in no order.
pub(super) fn noise(n_layers: usize, n_heads: usize, n: usize) -> Scores {
    let score = |i: usize| ((i * 7919 + 13) % 10_007) as f32;
    let head = |h: usize| (0..n).map(|t| score(h * n + t)).collect();
    let layer = |l: usize| (0..n_heads).map(|h| head(l * n_heads + h)).collect();
    (0..n_layers).map(layer).collect()
}

/// The header's: the sink's scores are the lowest of all, and it stays.
pub(super) fn drawn() -> Scores {
    vec![vec![
        vec![0.0, 9.0, 1.0, 8.0, 7.0, 2.0],
        vec![0.0, 3.0, 1.0, 2.0, 1.0, 6.0],
    ]]
}

#[test]
fn heads_that_share_keep_the_drawn_rows() {
    let mut rule = rule(Budget::Tokens(3), Allocate::Layer(0.0));
    rule.protect.sinks = 1;
    assert_eq!(kept(&rule, &drawn()), [[vec![0, 1, 3, 4], vec![0, 5]]]);
    rule.budget = Budget::KeptFraction(0.5);
    assert_eq!(kept(&rule, &drawn()), [[vec![0, 1, 3, 4], vec![0, 5]]]);
    rule.allocate = Allocate::Uniform;
    assert_eq!(kept(&rule, &drawn()), [[[0, 1, 3], [0, 1, 5]]]);
}

#[test]
fn rows_beyond_comparison_take_no_room_of_others() {
    let mut scores = noise(2, 2, 10);
    scores[1] = vec![vec![f32::INFINITY; 10], vec![f32::MAX; 10]];
    let rule = rule(Budget::KeptFraction(0.5), Allocate::Global);
    let first = kept(&rule, &scores[..1].to_vec());
    let both = kept(&rule, &scores);
    assert_eq!(counts(&both)[1], [10, 10]);
    assert_eq!(both[0], first[0]);
}

#[test]
fn a_safeguard_keeps_a_heads_best_rows_from_the_others() {
    let mut rule = rule(Budget::Tokens(3), Allocate::Layer(1.0));
    rule.protect.sinks = 1;
    // All of its own budget: nothing is shared.
    assert_eq!(kept(&rule, &drawn()), [[[0, 1, 3], [0, 1, 5]]]);
    // Two rows each for sure, the sink one of them: the 6 is sure, 9, 8 and 7 win the rest.
    rule.allocate = Allocate::Layer(0.7);
    assert_eq!(kept(&rule, &drawn()), [[vec![0, 1, 3, 4], vec![0, 5]]]);
    // A head that scores nothing still has a fifth of its budget.
    let mut poor = noise(1, 2, 100);
    poor[0][1] = (0..100).map(|t| t as f32 * 1e-6).collect();
    rule = self::rule(Budget::Tokens(50), Allocate::Layer(0.2));
    let kept = kept(&rule, &poor);
    assert_eq!(counts(&kept), [[90, 10]]);
    assert_eq!(kept[0][1], (90..100).collect::<Vec<u32>>());
}

#[test]
fn layers_share_nothing_but_a_global_budget() {
    let mut scores = noise(2, 2, 60);
    scores[1]
        .iter_mut()
        .flatten()
        .for_each(|s| *s = 1e6 + *s * 0.5);
    let layered = rule(Budget::KeptFraction(0.5), Allocate::Layer(0.0));
    let by_layer = counts(&kept(&layered, &scores));
    assert!(
        by_layer.iter().all(|l| l.iter().sum::<usize>() == 60),
        "{by_layer:?}"
    );
    assert_ne!(by_layer[0], [30, 30]);
    // One threshold: every row of the second layer is above it, and the first one keeps a row of each head.
    let global = rule(Budget::KeptFraction(0.5), Allocate::Global);
    let by_score = kept(&global, &scores);
    assert_eq!(counts(&by_score), [[1, 1], [60, 60]]);
    for (head, scores) in by_score[0].iter().zip(&scores[0]) {
        let best = scores.iter().copied().fold(0.0, f32::max);
        assert_eq!(scores[head[0] as usize], best);
    }
    // Without such a difference the budget is met exactly, and no row that left is above one that stayed.
    let scores = noise(3, 2, 40);
    let by_score = kept(&rule(Budget::KeptFraction(0.25), Allocate::Global), &scores);
    let n: usize = counts(&by_score).iter().flatten().sum();
    assert_eq!(n, 60);
    let (mut least, mut most) = (f32::INFINITY, f32::NEG_INFINITY);
    for (kept, scores) in by_score.iter().flatten().zip(scores.iter().flatten()) {
        for (t, &s) in scores.iter().enumerate() {
            match kept.contains(&(t as u32)) {
                true => least = least.min(s),
                false => most = most.max(s),
            }
        }
    }
    assert!(least > most, "{least} {most}");
}

#[test]
fn a_pyramids_budgets_fall_and_their_sum_stays() {
    for (n_layers, mean, beta) in [
        (30, 512, 20.0),
        (5, 20, 20.0),
        (2, 10, 3.0),
        (77, 40, 20.0),
        (1, 40, 20.0),
    ] {
        let rows = |l: usize| {
            Allocate::Pyramid(beta).layer_rows((l, n_layers), f64::from(mean), (100_000, 0))
        };
        let all: Vec<f64> = (0..n_layers).map(rows).collect();
        assert!(all.is_sorted_by(|a, b| a >= b), "{all:?}");
        assert_eq!(
            all.iter().sum::<f64>(),
            f64::from(mean) * n_layers as f64,
            "{all:?}"
        );
        if n_layers > 1 {
            let least = f64::from(mean) / beta;
            assert_eq!(all[n_layers - 1], least.round().max(1.0));
        }
    }
}

#[test]
fn what_a_pyramids_first_layers_cannot_use_its_last_ones_get() {
    // 2·75 − 75/20 = 146 rows of 100: the first layer keeps all, the last one 2·75 − 100.
    let scores = noise(3, 2, 100);
    let pyramid = rule(Budget::KeptFraction(0.75), Allocate::Pyramid(20.0));
    assert_eq!(
        counts(&kept(&pyramid, &scores)),
        [[100, 100], [75, 75], [50, 50]]
    );
    let pyramid = rule(Budget::Tokens(20), Allocate::Pyramid(20.0));
    assert_eq!(
        counts(&kept(&pyramid, &scores)),
        [[39, 39], [20, 20], [1, 1]]
    );
    // Protected rows are part of the budget and no part of what falls.
    let mut safe = pyramid.clone();
    (safe.protect.sinks, safe.protect.recent) = (4, 6);
    assert_eq!(
        counts(&kept(&safe, &scores)),
        [[30, 30], [20, 20], [10, 10]]
    );
    // A head's own best rows, whatever the others score.
    let kept = kept(&pyramid, &scores);
    let best = scores[2][1].iter().copied().fold(0.0, f32::max);
    assert_eq!(scores[2][1][kept[2][1][0] as usize], best);
}

#[test]
fn of_equal_scores_the_older_rows_leave_wherever_they_are() {
    let equal = vec![vec![vec![1.0; 10]; 2]; 2];
    let newest: Vec<u32> = (6..10).collect();
    for allocate in [Allocate::Uniform, Allocate::Layer(0.0), Allocate::Global] {
        let kept = kept(&rule(Budget::Tokens(4), allocate), &equal);
        assert!(
            kept.iter().flatten().all(|k| *k == newest),
            "{allocate:?} {kept:?}"
        );
    }
    // Each segment for itself, its share rounded up.
    let mut odd = rule(Budget::KeptFraction(0.5), Allocate::Layer(0.0));
    odd.segments = vec![7];
    let kept = kept(&odd, &equal);
    assert_eq!(kept[0][0], [3, 4, 5, 6, 8, 9]);
}

#[test]
fn listed_positions_stay_and_count() {
    let scores = noise(1, 1, 20);
    let mut rule = rule(Budget::Tokens(8), Allocate::Uniform);
    rule.protect = Protect {
        sinks: 2,
        recent: 1,
        whitelist: vec![5..7, 7..8],
    };
    let rows = kept(&rule, &scores).remove(0).remove(0);
    assert_eq!(rows.len(), 8);
    for p in [0, 1, 5, 6, 7, 19] {
        assert!(rows.contains(&p), "{p} of {rows:?}");
    }
    // More than the budget: they stay, and nothing else does.
    rule.budget = Budget::Tokens(1);
    assert_eq!(kept(&rule, &scores), [[[0, 1, 5, 6, 7, 19]]]);
    rule.allocate = Allocate::Global;
    assert_eq!(kept(&rule, &scores), [[[0, 1, 5, 6, 7, 19]]]);
}

#[test]
fn each_segment_has_its_share() {
    // All high scores are in the first segment.
    let scores: Scores = vec![vec![(0..100).map(|t| 100.0 - t as f32).collect()]];
    let mut rule = rule(Budget::KeptFraction(0.25), Allocate::Uniform);
    assert_eq!(kept(&rule, &scores), [[(0..25).collect::<Vec<u32>>()]]);
    rule.segments = vec![40, 80];
    let want: Vec<u32> = (0..10).chain(40..50).chain(80..85).collect();
    assert_eq!(kept(&rule, &scores), [[want.clone()]]);
    rule.budget = Budget::Tokens(25);
    assert_eq!(kept(&rule, &scores), [[want]]);
    // One that begins behind the end has no share, one of a single position has a row.
    rule.segments = vec![99, 500];
    rule.budget = Budget::KeptFraction(0.1);
    let want: Vec<u32> = (0..10).chain(99..100).collect();
    assert_eq!(kept(&rule, &scores), [[want]]);
}

#[test]
fn after_the_point_a_head_follows_the_share_that_it_was_left() {
    let scores = noise(2, 2, 40);
    let fraction = rule(Budget::KeptFraction(0.25), Allocate::Global);
    let after = kept(&fraction, &scores);
    assert_ne!(counts(&after), [[10, 10], [10, 10]]);
    let score = |p: u32| ((p * 31 + 7) % 53) as f32;
    for head in after.iter().flatten() {
        let n_left = head.len() as u32;
        let mut rows = head.clone();
        for p in 40..120 {
            rows.push(p);
            rows = step(&fraction, &rows, score, (n_left, 40));
            let most = (n_left * (p + 1)).div_ceil(40);
            assert!(rows.len() as u32 <= most.max(1), "{n_left} {p} {rows:?}");
        }
        assert_eq!(rows.len() as u32, 3 * n_left);
    }
    // A number of rows stays the number that the head was left, unless it was left all.
    let tokens = rule(Budget::Tokens(10), Allocate::Layer(0.2));
    let all: Vec<u32> = (0..31).collect();
    assert_eq!(step(&tokens, &all, score, (17, 30)).len(), 17);
    assert_eq!(step(&tokens, &all, score, (3, 30)).len(), 3);
    assert_eq!(step(&tokens, &all[..8], score, (7, 7)).len(), 8);
    assert_eq!(step(&tokens, &all, score, (7, 7)).len(), 10);
    let alone = rule(Budget::Tokens(10), Allocate::Uniform);
    assert_eq!(step(&alone, &all, score, (17, 30)).len(), 10);
}

#[test]
fn a_threshold_keeps_what_reaches_it() {
    let mut rule = rule(Budget::Threshold(5.0), Allocate::Global);
    let scores = vec![vec![
        vec![1.0, 5.0, 4.9, 7.0, 2.0],
        vec![1.0, 0.0, 3.0, 2.0, 1.5],
    ]];
    // A head below it keeps its best row.
    assert_eq!(kept(&rule, &scores), [[vec![1, 3], vec![2]]]);
    rule.protect = Protect {
        sinks: 1,
        recent: 1,
        whitelist: Vec::new(),
    };
    assert_eq!(kept(&rule, &scores), [[vec![0, 1, 3, 4], vec![0, 4]]]);
    let rows = [0, 2, 5, 6];
    let score = |p: u32| if p == 2 { 6.0 } else { 1.0 };
    assert_eq!(step(&rule, &rows, score, (3, 6)), [0, 2, 6]);
}

#[test]
fn a_whole_budget_keeps_all_however_it_is_shared() {
    let scores = noise(3, 2, 50);
    let all: Vec<u32> = (0..50).collect();
    for budget in [Budget::KeptFraction(1.0), Budget::Tokens(50)] {
        for allocate in [
            Allocate::Uniform,
            Allocate::Layer(0.2),
            Allocate::Pyramid(20.0),
            Allocate::Global,
            Allocate::Heads,
        ] {
            for segments in [Vec::new(), vec![7, 31]] {
                let mut rule = rule(budget, allocate);
                rule.segments = segments;
                let kept = kept(&rule, &scores);
                assert!(kept.iter().flatten().all(|k| *k == all), "{rule:?}");
            }
        }
    }
}

/// Rows that a head may have of a segment of `n` positions, `n_safe` of them protected, of `reached` in all.
fn share(
    rule: &Rule,
    (layer, n_layers): (usize, usize),
    (n, n_safe): (u32, u32),
    reached: u32,
) -> f64 {
    let mean = match rule.budget {
        Budget::Tokens(t) => (f64::from(t) * f64::from(n) / f64::from(reached)).ceil(),
        Budget::KeptFraction(f) => {
            let percent = (f * 100.0).round() as u32;
            f64::from((n * percent).div_ceil(100).max(1))
        }
        _ => unreachable!("not drawn"),
    };
    let rows = match rule.allocate {
        Allocate::Pyramid(beta) if n_layers > 1 => {
            let free = (mean - f64::from(n_safe)).max(0.0);
            let first = (2.0 * free - free / beta).min(f64::from(n - n_safe));
            let slope = 2.0 * (first - free) / (n_layers - 1) as f64;
            let middle = (n_layers - 1) as f64 / 2.0;
            let above = slope * (middle - layer as f64);
            (f64::from(n_safe) + free + above.abs().round() * above.signum()).max(1.0)
        }
        _ => mean,
    };
    rows.min(f64::from(n))
}

/// The rule as what stays: protected rows, what each head is sure of, then the best of the rest, newer ones first.
fn plain(rule: &Rule, scores: &Scores, reached: &[u32]) -> Kept {
    let n = scores[0][0].len() as u32;
    let mut kept = BTreeSet::new();
    let heads: Vec<(usize, usize)> = (0..scores.len())
        .flat_map(|l| (0..scores[l].len()).map(move |h| (l, h)))
        .collect();
    let unit = |&(l, h): &(usize, usize)| match rule.allocate {
        Allocate::Global => (0, 0),
        Allocate::Layer(_) => (l, 0),
        _ => (l, h),
    };
    let units: BTreeSet<(usize, usize)> = heads.iter().map(unit).collect();
    let starts: Vec<u32> = [0].into_iter().chain(rule.segments.clone()).collect();
    for (i, &start) in starts.iter().enumerate() {
        let end = starts.get(i + 1).map_or(n, |&e| e.min(n));
        for one in &units {
            let (mut room, mut n_kept, mut rest) = (0.0, 0, Vec::new());
            for &(l, h) in heads.iter().filter(|head| unit(head) == *one) {
                let mut own: Vec<u32> = (start.max(n - reached[l])..end).collect();
                let is_safe = |p: u32| rule.protect.holds(p, n);
                let key = |p: u32| (is_safe(p), scores[l][h][p as usize], p);
                own.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).unwrap());
                let n_safe = own.iter().filter(|&&p| is_safe(p)).count();
                let n = (own.len() as u32, n_safe as u32);
                let rows = share(rule, (l, scores.len()), n, reached[l]);
                let n_sure = match rule.allocate {
                    Allocate::Layer(part) => n_safe.max((part * rows) as usize),
                    _ => n_safe,
                };
                room += rows;
                n_kept += n_sure;
                kept.extend(own[..n_sure].iter().map(|&p| (l, h, p)));
                let others = own[n_sure..].iter();
                rest.extend(others.map(|&p| (scores[l][h][p as usize], p, l, h)));
            }
            rest.sort_by(|a, b| b.partial_cmp(a).unwrap());
            let n_more = (room as usize).saturating_sub(n_kept);
            kept.extend(rest.iter().take(n_more).map(|&(_, p, l, h)| (l, h, p)));
        }
    }
    let rows = |l: usize, h: usize| {
        let own: Vec<u32> = (0..n).filter(|&p| kept.contains(&(l, h, p))).collect();
        let value = |p: u32| (scores[l][h][p as usize], p);
        let best = (n - reached[l]..n).max_by(|&a, &b| value(a).partial_cmp(&value(b)).unwrap());
        if own.is_empty() {
            best.into_iter().collect()
        } else {
            own
        }
    };
    let layer = |l: usize| (0..scores[l].len()).map(|h| rows(l, h)).collect();
    (0..scores.len()).map(layer).collect()
}

fn allocations() -> impl Strategy<Value = Allocate> {
    prop_oneof![
        Just(Allocate::Uniform),
        prop_oneof![Just(0.0), Just(0.2), Just(0.5), Just(1.0)].prop_map(Allocate::Layer),
        prop_oneof![Just(1.0), Just(3.0), Just(20.0)].prop_map(Allocate::Pyramid),
        Just(Allocate::Global),
    ]
}

fn budgets() -> impl Strategy<Value = Budget> {
    prop_oneof![
        (1u32..=100).prop_map(|p| Budget::KeptFraction(f64::from(p) / 100.0)),
        (1u32..40).prop_map(Budget::Tokens),
    ]
}

proptest! {
    #[test]
    fn what_stays_is_what_the_rule_says(
        (n_layers, n_heads, n) in (1usize..4, 1usize..4, 1usize..40),
        (budget, allocate) in (budgets(), allocations()),
        draws in prop::collection::vec(0u8..6, 9 * 40),
        (sinks, recent, listed) in (0u32..4, 0u32..4, 0u32..40),
        segments in prop::collection::btree_set(1u32..45, 0..3),
        windows in prop::collection::vec(1u32..60, 3),
    ) {
        let score = |l: usize, h: usize, t: usize| f32::from(draws[(l * 3 + h) * 40 + t]);
        let head = |l: usize, h: usize| (0..n).map(|t| score(l, h, t)).collect();
        let layer = |l: usize| (0..n_heads).map(|h| head(l, h)).collect();
        let scores: Scores = (0..n_layers).map(layer).collect();
        let reached: Vec<u32> = windows[..n_layers].iter().map(|w| (*w).min(n as u32)).collect();
        let mut rule = rule(budget, allocate);
        rule.protect = Protect { sinks, recent, whitelist: vec![listed..listed + 2, 30..31] };
        rule.segments = segments.into_iter().collect();
        prop_assert_eq!(left(&rule, &scores, &reached), plain(&rule, &scores, &reached));
    }
}
