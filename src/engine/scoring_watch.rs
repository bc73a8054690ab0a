//! A retention that passes everything on and adds up the time of its scores and its choices.
//!
//! Invariants: two readings of the clock's wall time per call and nothing else is added to the work; heads that decide at the same
//! time on several threads each add theirs.

use std::sync::Arc;

use super::clock::Clock;
use super::linear_watch::Tally;
use crate::cache::Needs;
use crate::cache::stage::{
    Choice, ContextLayer, Costs, LiveRows, NewRow, Retention, Shortage, Threshold,
};

/// A retention with a stopwatch.
pub struct ScoringWatch {
    inner: Arc<dyn Retention>,
    clock: Arc<dyn Clock>,
    spent: Arc<Tally>,
}

impl ScoringWatch {
    /// Times `inner` by that clock into that tally.
    pub fn new(inner: Arc<dyn Retention>, clock: Arc<dyn Clock>, spent: Arc<Tally>) -> Self {
        Self {
            inner,
            clock,
            spent,
        }
    }

    fn timed<T>(&self, work: impl FnOnce() -> T) -> T {
        let start = self.clock.wall();
        let done = work();
        self.spent.add(self.clock.wall().saturating_sub(start));
        done
    }
}

impl Retention for ScoringWatch {
    fn needs(&self) -> Needs {
        self.inner.needs()
    }

    fn is_scored(&self) -> bool {
        self.inner.is_scored()
    }

    fn score(&self, row: NewRow<'_>) -> f32 {
        self.timed(|| self.inner.score(row))
    }

    fn score_context(&self, context: ContextLayer<'_>) -> Vec<Vec<f32>> {
        self.timed(|| self.inner.score_context(context))
    }

    fn evict(&self, live: LiveRows<'_>) -> Vec<usize> {
        self.timed(|| self.inner.evict(live))
    }

    fn evict_context(&self, heads: &[Vec<LiveRows<'_>>]) -> Vec<Vec<Vec<usize>>> {
        self.timed(|| self.inner.evict_context(heads))
    }

    fn choose(&self, heads: &[Vec<LiveRows<'_>>], costs: &dyn Costs) -> Result<Choice, Shortage> {
        self.timed(|| self.inner.choose(heads, costs))
    }

    fn chooses_levels(&self) -> bool {
        self.inner.chooses_levels()
    }

    fn acts_once(&self) -> bool {
        self.inner.acts_once()
    }

    fn threshold(&self) -> Option<Threshold> {
        self.inner.threshold()
    }

    fn rebuild(&self) -> Option<f64> {
        self.inner.rebuild()
    }

    fn needs_point(&self) -> Option<&'static str> {
        self.inner.needs_point()
    }

    fn budgets_decoding(&self) -> bool {
        self.inner.budgets_decoding()
    }

    fn compares_windows(&self) -> bool {
        self.inner.compares_windows()
    }

    fn nothing_to_choose(&self, n_tokens: u32) -> Option<String> {
        self.inner.nothing_to_choose(n_tokens)
    }

    fn budget_bytes(&self, n_tokens: u32) -> Option<u64> {
        self.inner.budget_bytes(n_tokens)
    }

    fn weight_bytes(&self) -> u64 {
        self.inner.weight_bytes()
    }

    fn hidden_width(&self) -> Option<usize> {
        self.inner.hidden_width()
    }

    fn made_for(&self) -> Option<&str> {
        self.inner.made_for()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cache::stage::Moment;
    use crate::engine::clock::ScriptedClock;

    /// Keeps what is long.
    struct Longest;

    impl Retention for Longest {
        fn score(&self, row: NewRow<'_>) -> f32 {
            row.k.iter().sum()
        }

        fn evict(&self, live: LiveRows<'_>) -> Vec<usize> {
            (0..live.positions.len() - 1).collect()
        }
    }

    /// A method that isn't handed on would answer by its default, and a measured cache would do other work than any other.
    #[test]
    fn every_method_is_handed_on() {
        let source = include_str!("../cache/retention.rs");
        let (_, methods) = source
            .split_once("pub trait Retention")
            .expect("it is there");
        let own = include_str!("scoring_watch.rs");
        let names = methods.lines().filter_map(|line| {
            let (name, _) = line.strip_prefix("    fn ")?.split_once('(')?;
            Some(name)
        });
        let names: Vec<&str> = names.collect();
        assert!(names.len() > 12, "{names:?}");
        for name in names {
            assert!(own.contains(&format!("self.inner.{name}(")), "{name}");
        }
    }

    #[test]
    fn each_call_is_timed_and_answers_are_the_inner_ones() {
        let tick = Duration::from_millis(2);
        let spent = Arc::new(Tally::default());
        let clock = Arc::new(ScriptedClock::new(tick));
        let watch = ScoringWatch::new(Arc::new(Longest), clock, Arc::clone(&spent));
        let row = NewRow {
            layer: 0,
            kv_head: 0,
            hidden: &[],
            position: 3,
            k: &[1.0, 2.0],
            v: &[0.0, 0.0],
        };
        assert_eq!(watch.score(row), 3.0);
        let live = LiveRows {
            n_reached: 2,
            compressed: None,
            positions: &[1, 2, 3],
            scores: &[3.0, 3.0, 3.0],
            n_seen: 4,
            moment: Moment::Step,
        };
        assert_eq!(watch.evict(live), [0, 1]);
        assert!(watch.is_scored());
        assert_eq!(watch.needs(), Longest.needs());
        assert_eq!(spent.take(), 2 * tick);
    }
}
