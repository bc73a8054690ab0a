//! Which rows `window` and `knorm` keep: by hand, against a plain restatement of the rule, and at the edges where such
//! tools break (budgets rounded to nothing, fractions of what is left taken for fractions of what goes).

mod bytes;
mod gate;
mod growth;
mod heads;
mod joint;
mod scores;
mod selection;

use proptest::prelude::*;

use crate::cache::Geometry;
use crate::cache::retain::STAGES;
use crate::cache::retain::budget::{Allocate, Budget, Protect, Rule};
use crate::cache::retain::knorm::Knorm;
use crate::cache::retain::selection::Selection;
use crate::cache::retain::window::{Newest, Window};
use crate::cache::stage::{
    BuildContext, KeyForm, LiveRows, Moment, NewRow, Params, Retention, Side, Stage, StageError,
    Value,
};
use std::sync::Arc;

/// The live rows of one head, driven as the cache drives a stage.
struct Head {
    positions: Vec<u32>,
    scores: Vec<f32>,
    n_seen: u32,
}

impl Head {
    fn new() -> Self {
        Self {
            positions: Vec::new(),
            scores: Vec::new(),
            n_seen: 0,
        }
    }

    fn append(&mut self, stage: &dyn Retention, norm: f32) {
        let k = [0.6 * norm, 0.8 * norm];
        let position = self.n_seen;
        self.scores.push(stage.score(NewRow {
            layer: 0,
            kv_head: 0,
            hidden: &[],
            position,
            k: &k,
            v: &k,
        }));
        self.positions.push(position);
        self.n_seen += 1;
    }

    fn evict(&mut self, stage: &dyn Retention, moment: Moment) {
        let live = LiveRows {
            positions: &self.positions,
            scores: &self.scores,
            n_seen: self.n_seen,
            n_reached: self.n_seen,
            compressed: None,
            moment,
        };
        let gone = match moment {
            Moment::Step => stage.evict(live),
            Moment::CompressionPoint => stage.evict_context(&[vec![live]])[0][0].clone(),
        };
        assert!(gone.is_sorted_by(|a, b| a < b), "{gone:?}");
        for i in gone.into_iter().rev() {
            self.positions.remove(i);
            self.scores.remove(i);
        }
        assert!(!self.positions.is_empty());
    }

    /// Decodes one token per norm; calls `check` after each step.
    fn decode(stage: &dyn Retention, norms: &[f32], mut check: impl FnMut(&Head)) -> Head {
        let mut head = Head::new();
        for &norm in norms {
            head.append(stage, norm);
            head.evict(stage, Moment::Step);
            check(&head);
        }
        head
    }

    fn compressed(stage: &dyn Retention, norms: &[f32]) -> Head {
        let mut head = Head::new();
        for &norm in norms {
            head.append(stage, norm);
        }
        head.evict(stage, Moment::CompressionPoint);
        head
    }
}

fn build(name: &str, given: &[(&str, Value)]) -> Result<Arc<dyn Retention>, StageError> {
    let def = STAGES.iter().find(|d| d.name == name).unwrap();
    let given = Params(
        given
            .iter()
            .map(|(k, v)| ((*k).to_owned(), v.clone()))
            .collect(),
    );
    let params = Params::resolve(def, &given).unwrap();
    let context = BuildContext {
        geometry: &Geometry { layers: Vec::new() },
        keys: KeyForm::PostRope,
        side: Side::K,
        calibration: None,
        backing_dir: None,
        head: None,
    };
    match (def.build)(&params, &context)? {
        Stage::Retain(stage) => Ok(stage),
        _ => panic!("{name} is not a retention"),
    }
}

fn refusal(name: &str, given: &[(&str, Value)]) -> String {
    match build(name, given) {
        Ok(_) => panic!("{given:?} was accepted"),
        Err(e) => e.to_string(),
    }
}

fn knorm(budget: Budget, sinks: u32, recent: u32) -> Selection<Knorm> {
    let protect = Protect {
        sinks,
        recent,
        whitelist: Vec::new(),
    };
    let rule = Rule {
        budget,
        allocate: Allocate::Uniform,
        protect,
        segments: Vec::new(),
        growth: None,
        rebuild: None,
    };
    Selection { score: Knorm, rule }
}

fn noise(n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| ((i * 7919 + 13) % 1009) as f32 * 0.01)
        .collect()
}

#[test]
fn window_keeps_the_drawn_rows() {
    let stage = build(
        "window",
        &[("recent", Value::Int(4)), ("sinks", Value::Int(2))],
    )
    .unwrap();
    let head = Head::decode(&*stage, &noise(10), |_| {});
    assert_eq!(head.positions, [0, 1, 6, 7, 8, 9]);
    let head = Head::decode(&*stage, &noise(11), |_| {});
    assert_eq!(head.positions, [0, 1, 7, 8, 9, 10]);
    let head = Head::compressed(&*stage, &noise(11));
    assert_eq!(head.positions, [0, 1, 7, 8, 9, 10]);
}

#[test]
fn window_follows_its_rule_after_every_step() {
    for (recent, sinks) in [(1, 0), (1, 4), (5, 0), (12, 4), (64, 4)] {
        let stage = Window {
            newest: Newest::Rows(recent),
            sinks,
            growth: None,
            rebuild: None,
        };
        Head::decode(&stage, &noise(80), |head| {
            let want: Vec<u32> = (0..head.n_seen)
                .filter(|&p| p < sinks || p + recent >= head.n_seen)
                .collect();
            assert_eq!(head.positions, want);
        });
    }
}

#[test]
fn knorm_keeps_the_drawn_rows() {
    let norms = [9.0, 4.0, 7.0, 2.0, 5.0, 2.0, 8.0, 3.0, 6.0, 9.0];
    let given = [
        ("tokens", Value::Int(5)),
        ("sinks", Value::Int(1)),
        ("recent", Value::Int(2)),
    ];
    let stage = build("knorm", &given).unwrap();
    let head = Head::compressed(&*stage, &norms);
    assert_eq!(head.positions, [0, 3, 5, 8, 9]);
    assert_eq!(head.scores[1], -2.0);
}

#[test]
fn of_equal_norms_the_older_row_leaves() {
    let stage = knorm(Budget::Tokens(3), 0, 0);
    let head = Head::compressed(&stage, &[1.0; 8]);
    assert_eq!(head.positions, [5, 6, 7]);
    let head = Head::decode(&stage, &[1.0; 8], |_| {});
    assert_eq!(head.positions, [5, 6, 7]);
}

#[test]
fn an_absolute_budget_holds_after_every_step() {
    let stage = build("knorm", &[("tokens", Value::Int(16))]).unwrap();
    for prompt in [8, 200] {
        let mut head = Head::compressed(&*stage, &noise(prompt));
        assert_eq!(head.positions.len(), prompt.min(16));
        for norm in noise(40) {
            head.append(&*stage, norm);
            head.evict(&*stage, Moment::Step);
            assert!(head.positions.len() <= 16);
            assert_eq!(head.positions[..4], [0, 1, 2, 3]);
        }
        assert_eq!(head.positions.len(), 16);
    }
}

#[test]
fn short_contexts_keep_a_row() {
    for n in [1, 2] {
        for sinks in [0, 4] {
            let stage = knorm(Budget::KeptFraction(0.4), sinks, 0);
            let kept = Head::compressed(&stage, &noise(n)).positions.len();
            assert_eq!(kept, if sinks == 0 { 1 } else { n });
        }
    }
}

#[test]
fn kept_fractions_multiply() {
    let half = knorm(Budget::KeptFraction(0.5), 0, 0);
    let norms = noise(64);
    let first = Head::compressed(&half, &norms);
    assert_eq!(first.positions.len(), 32);
    // What the first one left is a context of 32 to the second.
    let left: Vec<f32> = first.positions.iter().map(|&p| norms[p as usize]).collect();
    let second = Head::compressed(&half, &left);
    assert_eq!(second.positions.len(), 16);
    // The same as a quarter at once.
    let quarter = knorm(Budget::KeptFraction(0.25), 0, 0);
    let both: Vec<u32> = second
        .positions
        .iter()
        .map(|&p| first.positions[p as usize])
        .collect();
    assert_eq!(both, Head::compressed(&quarter, &norms).positions);
}

#[test]
fn fractions_round_up_but_not_their_rounding_error() {
    assert_eq!(Budget::KeptFraction(0.07).rows(100), 7.0);
    assert_eq!(Budget::KeptFraction(0.071).rows(100), 8.0);
    assert_eq!(Budget::KeptFraction(1e-9).rows(100), 1.0);
    for n in 0..3000 {
        assert_eq!(Budget::KeptFraction(1.0).rows(n), f64::from(n.max(1)));
        assert_eq!(Budget::KeptFraction(0.1).rows(10 * n), f64::from(n.max(1)));
    }
}

#[test]
fn a_whole_fraction_keeps_everything() {
    let stage = build("knorm", &[("kept_fraction", Value::Float(1.0))]).unwrap();
    let head = Head::decode(&*stage, &noise(70), |_| {});
    assert_eq!(head.positions.len(), 70);
}

#[test]
fn budgets_that_say_nothing_or_too_much_are_refused() {
    let none = refusal("knorm", &[]);
    assert!(
        none.contains("`tokens`") && none.contains("`kept_fraction`"),
        "{none}"
    );
    let two = refusal(
        "knorm",
        &[
            ("tokens", Value::Int(9)),
            ("kept_fraction", Value::Float(0.5)),
        ],
    );
    assert!(two.contains("give one of them"), "{two}");
    let small = refusal(
        "knorm",
        &[("tokens", Value::Int(9)), ("recent", Value::Int(6))],
    );
    assert!(
        small.contains("can't hold the 10 protected rows"),
        "{small}"
    );
    assert!(
        build(
            "knorm",
            &[("tokens", Value::Int(10)), ("recent", Value::Int(6))]
        )
        .is_ok()
    );
}

#[test]
fn every_definition_resolves_its_own_defaults() {
    for def in STAGES {
        assert!(
            Params::resolve(def, &Params::default()).is_ok(),
            "{}",
            def.name
        );
    }
}

proptest! {
    #[test]
    fn knorm_leaves_the_smallest_norms(
        norms in prop::collection::vec(0u8..20, 1..80),
        tokens in 1u32..40,
        sinks in 0u32..6,
        recent in 0u32..6,
    ) {
        let norms: Vec<f32> = norms.into_iter().map(f32::from).collect();
        let n = norms.len() as u32;
        let stage = knorm(Budget::Tokens(tokens), sinks, recent);
        let head = Head::compressed(&stage, &norms);
        let protected = |p: u32| p < sinks || p + recent >= n;
        let mut rest: Vec<u32> = (0..n).filter(|&p| !protected(p)).collect();
        let n_protected = (n as usize) - rest.len();
        // Best first: small norms, then newer rows.
        rest.sort_by(|&a, &b| norms[a as usize].total_cmp(&norms[b as usize]).then(b.cmp(&a)));
        rest.truncate((tokens as usize).saturating_sub(n_protected));
        let mut want: Vec<u32> = (0..n).filter(|&p| protected(p)).chain(rest).collect();
        want.sort_unstable();
        prop_assert_eq!(head.positions, want);
    }

    #[test]
    fn knorm_holds_its_budget_while_decoding(
        norms in prop::collection::vec(0u8..20, 1..80),
        percent in 1u32..=100,
    ) {
        let norms: Vec<f32> = norms.into_iter().map(f32::from).collect();
        let stage = knorm(Budget::KeptFraction(f64::from(percent) / 100.0), 2, 3);
        Head::decode(&stage, &norms, |head| {
            let want = (head.n_seen * percent).div_ceil(100).max(1).max(5.min(head.n_seen));
            assert!(head.positions.len() <= want as usize);
        });
    }
}
