//! Scores × budget × protection: the retention that all scored stages are.
//!
//! Invariants: of equal scores the older row leaves; an evicted row never comes back; while decoding, each head follows
//! its own budget, which after a compression point is the share of rows that the point left it.
//!
//! Six rows of two heads with a budget of three each, one sink, shared between the two (`adakv`, no safeguard):
//!
//! ```text
//! position    0   1   2   3   4   5
//! head 0      █   9   1   8   7   2     keeps 0 1 3 4
//! head 1      █   3   1   2   1   6     keeps 0 5
//! ```

use std::ops::Range;
use std::sync::Arc;

use super::super::Needs;
use super::super::stage::{
    Choice, ContextLayer, Costs, LeftAtPoint, LiveRows, NewRow, Params, Retention, Shortage, Stage,
    StageError, Threshold,
};
use super::budget::{Allocate, Budget, Rule, part};

/// What rows are worth; higher is kept longer.
pub trait Score: Send + Sync {
    /// What it asks of the engine.
    fn needs(&self) -> Needs {
        Needs::default()
    }
    /// A new row's, of a score that is known when the row comes.
    fn arrival(&self, row: NewRow<'_>) -> f32 {
        let _ = row;
        0.0
    }
    /// Those of a context's rows, `[kv_head][token]`, of a score that asks to see the context.
    fn context(&self, context: ContextLayer<'_>) -> Vec<Vec<f32>> {
        let _ = context;
        Vec::new()
    }
    /// Whether rows of layers with a sliding window have scores that compare with others'.
    fn compares_windows(&self) -> bool {
        true
    }
    /// Bytes of learned weights.
    fn weight_bytes(&self) -> u64 {
        0
    }
    /// Channels of the layers' inputs that it was learned from, if it was.
    fn hidden_width(&self) -> Option<usize> {
        None
    }
    /// SHA-256 of the model that it was learned for, if it was.
    fn made_for(&self) -> Option<&str> {
        None
    }
}

/// A scored retention.
pub struct Selection<S> {
    /// What rows are worth.
    pub score: S,
    /// Which of them live.
    pub rule: Rule,
}

impl<S: Score + 'static> Selection<S> {
    /// As a stage. `window`: newest rows that the score says nothing about.
    pub fn stage(name: &str, params: &Params, window: u32, score: S) -> Result<Stage, StageError> {
        let rule = Rule::read(name, params, window)?;
        Ok(Stage::Retain(Arc::new(Self { score, rule })))
    }
}

impl<S: Score> Retention for Selection<S> {
    fn needs(&self) -> Needs {
        self.score.needs()
    }

    fn score(&self, row: NewRow<'_>) -> f32 {
        self.score.arrival(row)
    }

    fn score_context(&self, context: ContextLayer<'_>) -> Vec<Vec<f32>> {
        self.score.context(context)
    }

    fn evict(&self, live: LiveRows<'_>) -> Vec<usize> {
        self.rule.evict(live)
    }

    fn rebuild(&self) -> Option<f64> {
        self.rule.rebuild
    }

    fn needs_point(&self) -> Option<&'static str> {
        if self.needs().context.any() {
            return Some("it scores rows by a whole context");
        }
        if self.budget_bytes(0).is_some() {
            return Some("its budget is in bytes, which all heads share");
        }
        if self.budgets_decoding() {
            return Some("it has a budget for what comes after a compression point (`decoding_…`)");
        }
        if !self.rule.segments.is_empty() {
            return Some("segments share its budget (`segments`)");
        }
        let alone = matches!(self.rule.allocate, Allocate::Uniform)
            || matches!(self.rule.budget, Budget::Threshold(_));
        (!alone).then_some("its heads share a budget (`allocate`)")
    }

    fn nothing_to_choose(&self, n_tokens: u32) -> Option<String> {
        let protect = &self.rule.protect;
        let protected = protect.n_of(n_tokens);
        match self.rule.budget {
            Budget::KeptFraction(f) => {
                let rows = part(f, n_tokens);
                (f < 1.0 && rows < f64::from(protected)).then(|| {
                    format!(
                        "`kept_fraction` = {f} of {n_tokens} tokens is {rows} rows, fewer than the {protected} protected ones \
                         ({protect})"
                    )
                })
            }
            Budget::Tokens(rows) => (rows < protected).then(|| {
                format!(
                    "`tokens` = {rows} can't hold the {protected} protected rows of {n_tokens} tokens ({protect})"
                )
            }),
            _ => None,
        }
    }

    fn budgets_decoding(&self) -> bool {
        self.rule.growth.is_some()
    }

    fn compares_windows(&self) -> bool {
        self.score.compares_windows()
    }

    fn weight_bytes(&self) -> u64 {
        self.score.weight_bytes()
    }

    fn hidden_width(&self) -> Option<usize> {
        self.score.hidden_width()
    }

    fn made_for(&self) -> Option<&str> {
        self.score.made_for()
    }

    fn evict_context(&self, heads: &[Vec<LiveRows<'_>>]) -> Vec<Vec<Vec<usize>>> {
        self.rule.evict_context(heads)
    }

    fn choose(&self, heads: &[Vec<LiveRows<'_>>], costs: &dyn Costs) -> Result<Choice, Shortage> {
        let n_seen = heads.iter().flatten().map(|h| h.n_seen).max();
        let n_seen = n_seen.unwrap_or(0);
        match self.budget_bytes(n_seen) {
            Some(bytes) => self.rule.fill(heads, (n_seen.max(1), bytes), costs),
            None => Ok(Choice {
                gone: self.evict_context(heads),
                ..Choice::default()
            }),
        }
    }

    fn budget_bytes(&self, n_tokens: u32) -> Option<u64> {
        self.rule.budget.bytes(n_tokens)
    }

    fn threshold(&self) -> Option<Threshold> {
        match (self.rule.budget, self.rule.protect.recent) {
            // Without newest rows one must be spared wherever all score too little: rows compete, as under a budget for decoding.
            (Budget::Threshold(least), recent @ 1..) if !self.budgets_decoding() => {
                Some(Threshold { least, recent })
            }
            _ => None,
        }
    }
}

/// A row that may leave.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    score: f32,
    layer: usize,
    head: usize,
    index: usize,
}

impl Rule {
    /// Rows that leave a head in a decode step.
    fn evict(&self, live: LiveRows<'_>) -> Vec<usize> {
        let n_live = live.positions.len();
        let competes = self.growth.is_some() && live.compressed.is_some();
        if let (Budget::Threshold(least), false) = (self.budget, competes) {
            let low = |&i: &usize| live.scores[i] < least;
            let mut gone: Vec<usize> = self.protect.candidates(live).filter(low).collect();
            spare_one(&mut gone, live);
            return gone;
        }
        let excess = n_live.saturating_sub(self.rows(live) as usize);
        let candidates: Vec<usize> = match excess {
            0 => Vec::new(),
            _ => self.protect.candidates(live).collect(),
        };
        lowest(live.scores, candidates, excess)
    }

    /// Rows of a head that may live after a decode step.
    fn rows(&self, live: LiveRows<'_>) -> f64 {
        let Some(left) = live.compressed else {
            return self.budget.rows(live.n_reached);
        };
        if let Some(growth) = self.growth {
            // What the point left alone, since its scores say nothing, is left alone later.
            let is_left_alone = left.kept == left.of && !is_comparable(live);
            return match is_left_alone {
                true => f64::from(live.n_reached),
                false => f64::from(growth.rows(left, live.n_reached)),
            };
        }
        let LeftAtPoint { kept, of, .. } = left;
        match self.budget {
            _ if kept < of && self.allocate == Allocate::Heads => 1.0,
            Budget::KeptFraction(_) | Budget::BytesPerToken(_) => {
                part(f64::from(kept) / f64::from(of.max(1)), live.n_reached)
            }
            Budget::Bytes(_) => f64::from(kept.max(1)),
            // A head that a shared budget left all its rows has them as its share; one of a context that was no longer than
            // the budget has not met it yet.
            Budget::Tokens(tokens)
                if (kept < of || of > tokens) && self.allocate != Allocate::Uniform =>
            {
                f64::from(kept.max(1))
            }
            _ => self.budget.rows(live.n_reached),
        }
    }

    /// The largest part of all rows, in steps of one row in `n`, that takes no more than `bytes`.
    fn fill(
        &self,
        heads: &[Vec<LiveRows<'_>>],
        (n, bytes): (u32, u64),
        costs: &dyn Costs,
    ) -> Result<Choice, Shortage> {
        let keeping = |rows: u32| {
            let part = Budget::KeptFraction(f64::from(rows) / f64::from(n));
            let rule = Rule {
                budget: part,
                ..self.clone()
            };
            let choice = Choice {
                gone: rule.evict_context(heads),
                ..Choice::default()
            };
            (costs.bytes(heads, &choice), choice)
        };
        let (mut fits, mut too_many) = (0, n + 1);
        let mut best = None;
        while too_many - fits > 1 {
            let rows = fits + (too_many - fits) / 2;
            let (needed, choice) = keeping(rows);
            if needed <= bytes {
                (fits, best) = (rows, Some(choice));
            } else {
                too_many = rows;
            }
        }
        best.ok_or_else(|| Shortage {
            needed_bytes: keeping(1).0,
            budget_bytes: bytes,
        })
    }

    /// Rows that leave at the compression point, `[layer][kv_head]`.
    fn evict_context(&self, heads: &[Vec<LiveRows<'_>>]) -> Vec<Vec<Vec<usize>>> {
        let mut gone: Vec<Vec<Vec<usize>>> =
            heads.iter().map(|l| vec![Vec::new(); l.len()]).collect();
        if let Budget::Threshold(_) = self.budget {
            for (gone, heads) in gone.iter_mut().zip(heads) {
                *gone = heads.iter().map(|&live| self.evict(live)).collect();
            }
            return gone;
        }
        for segment in self.segments() {
            let all = (0..heads.len()).flat_map(|l| (0..heads[l].len()).map(move |h| (l, h)));
            let groups: Vec<Vec<(usize, usize)>> = match self.allocate {
                Allocate::Uniform | Allocate::Pyramid(_) => all.map(|head| vec![head]).collect(),
                Allocate::Layer(_) => {
                    let layer = |l: usize| (0..heads[l].len()).map(|h| (l, h)).collect();
                    (0..heads.len()).map(layer).collect()
                }
                Allocate::Global | Allocate::Heads => {
                    vec![all.filter(|&(l, h)| is_comparable(heads[l][h])).collect()]
                }
            };
            for group in groups {
                for c in self.excess(heads, &group, &segment) {
                    gone[c.layer][c.head].push(c.index);
                }
            }
        }
        for (gone, &live) in gone.iter_mut().flatten().zip(heads.iter().flatten()) {
            gone.sort_unstable();
            spare_one(gone, live);
        }
        gone
    }

    /// Rows of one segment that leave heads which share a budget.
    fn excess(
        &self,
        heads: &[Vec<LiveRows<'_>>],
        group: &[(usize, usize)],
        segment: &Range<u32>,
    ) -> Vec<Candidate> {
        let (mut total, mut n_live, mut free) = (0.0, 0, Vec::new());
        for &(layer, head) in group {
            let live = heads[layer][head];
            let first = live.n_seen - live.n_reached;
            let n = segment
                .end
                .min(live.n_seen)
                .saturating_sub(segment.start.max(first));
            let mut rows = self.budget.rows(n);
            if let Budget::Tokens(_) = self.budget {
                rows = (rows * f64::from(n) / f64::from(live.n_reached.max(1))).ceil();
            }
            let inside = |&i: &usize| segment.contains(&live.positions[i]);
            n_live += (0..live.positions.len()).filter(inside).count();
            let mut own: Vec<usize> = self.protect.candidates(live).filter(inside).collect();
            let n_protected = n.saturating_sub(own.len() as u32);
            let rows = self
                .allocate
                .layer_rows((layer, heads.len()), rows, (n, n_protected))
                .min(f64::from(n));
            total += rows;
            if let Allocate::Layer(safeguard) = self.allocate {
                // The head's best rows, as many as it is sure of, compete with nobody.
                let n_sure = (safeguard * rows) as usize;
                let n_sure = n_sure.saturating_sub(n_protected as usize);
                let n_free = own.len().saturating_sub(n_sure);
                own = lowest(live.scores, own, n_free);
            }
            free.extend(own.into_iter().map(|index| Candidate {
                score: live.scores[index],
                layer,
                head,
                index,
            }));
        }
        let excess = n_live.saturating_sub(total as usize);
        if self.allocate == Allocate::Heads {
            let n_leave = free.len();
            return all_but_whole_heads(free, n_leave.saturating_sub(excess));
        }
        let key = |c: &Candidate| (heads[c.layer][c.head].positions[c.index], c.layer, c.head);
        lowest_by(free, excess, |a, b| {
            a.score
                .total_cmp(&b.score)
                .then_with(|| key(a).cmp(&key(b)))
        })
    }
}

/// Whether a head's rows have scores to compare. Those of a layer with a sliding window, which a repetition does not reach, are
/// above all others: in a budget with them they would take the room of all layers that see far.
pub(super) fn is_comparable(live: LiveRows<'_>) -> bool {
    live.scores.iter().any(|&s| s < f32::MAX)
}

/// Rows of all heads but those whose best rows score highest, of which so many stay whole as have room for `n_rows`. A head's
/// rows are neighbours; of equal heads the first stays.
fn all_but_whole_heads(rows: Vec<Candidate>, n_rows: usize) -> Vec<Candidate> {
    let same = |a: &Candidate, b: &Candidate| (a.layer, a.head) == (b.layer, b.head);
    let higher = |a: f32, c: &Candidate| match c.score.total_cmp(&a) {
        std::cmp::Ordering::Greater => c.score,
        _ => a,
    };
    let best = |head: &[Candidate]| head.iter().fold(head[0].score, higher);
    let mut heads: Vec<(f32, &[Candidate])> =
        rows.chunk_by(same).map(|head| (best(head), head)).collect();
    heads.sort_by(|a, b| b.0.total_cmp(&a.0));
    let ends = heads.iter().scan(0, |n, (_, head)| {
        *n += head.len();
        Some(*n)
    });
    let n_whole = ends.take_while(|&n| n <= n_rows).count();
    let gone = heads[n_whole..].iter().map(|&(_, head)| head);
    gone.flatten().copied().collect()
}

/// Keeps a head's best row if all would leave.
fn spare_one(gone: &mut Vec<usize>, live: LiveRows<'_>) {
    if gone.len() < live.positions.len() || gone.is_empty() {
        return;
    }
    let best = lowest(live.scores, gone.clone(), gone.len() - 1);
    *gone = best;
}

/// The `n` lowest scores among `candidates` (all of them if there are fewer), the older of equal ones first; ascending.
fn lowest(scores: &[f32], candidates: Vec<usize>, n: usize) -> Vec<usize> {
    let mut rows = lowest_by(candidates, n, |&a, &b| {
        scores[a].total_cmp(&scores[b]).then(a.cmp(&b))
    });
    rows.sort_unstable();
    rows
}

/// The `n` first in that order, in any order; all if there are fewer.
fn lowest_by<T: Copy>(
    mut rows: Vec<T>,
    n: usize,
    order: impl Fn(&T, &T) -> std::cmp::Ordering,
) -> Vec<T> {
    match n {
        0 => Vec::new(),
        // What nearly every decode step asks for: one pass.
        1 => rows
            .into_iter()
            .min_by(|a, b| order(a, b))
            .into_iter()
            .collect(),
        n if n >= rows.len() => rows,
        n => {
            rows.select_nth_unstable_by(n, |a, b| order(a, b));
            rows.truncate(n);
            rows
        }
    }
}
