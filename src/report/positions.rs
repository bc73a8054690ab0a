//! How the error grows with the position of the query: a cache that is read for longer has had more to lose.
//!
//! Invariants: a bucket's mean is a ratio of sums with the item as its cluster, as everywhere; the slope is taken in each
//! item and then over items, so that its interval is one over items; only items that score more than [`MIN_SPAN`] tokens
//! count.
//!
//! ```text
//! query at   0 … 63   64 … 127   128 … 255   …   1024 … 2047        a stream: buckets that double
//!            8 equal parts of what is scored                        after a context: positions hardly double
//! ```

use crate::bundle::header::ProtocolKind;
use crate::eval::records::ItemRecord;
use crate::eval::stats::Estimate;

/// Scored tokens of an item below which there is nothing to see.
pub const MIN_SPAN: usize = 512;

/// Positions of the first doubling bucket.
const FIRST: usize = 64;

/// Buckets where positions don't double.
const PARTS: usize = 8;

/// Errors by position, and how they grow.
#[derive(Debug, Clone, PartialEq)]
pub struct Positions {
    /// In order of position.
    pub buckets: Vec<Bucket>,
    /// Change of a bucket's mean KLD for each doubling of the position, nats: least squares over an item's buckets, then
    /// the mean over items.
    pub kld_per_doubling: Option<Estimate>,
    /// The same of ΔNLL.
    pub delta_nll_per_doubling: Option<Estimate>,
}

/// Queries of some positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Bucket {
    /// Position of the first query, from 0.
    pub from: usize,
    /// Position after the last.
    pub until: usize,
    /// Tokens over all items.
    pub n_tokens: usize,
    /// NLL minus the reference's, nats per token, paired.
    pub delta_nll: Estimate,
    /// KL(full ‖ strategy), nats per token.
    pub kld: Estimate,
}

impl Positions {
    /// Of some items; `None` unless they score long spans.
    pub fn new(items: &[&ItemRecord], kind: &ProtocolKind) -> Option<Self> {
        let first = match kind {
            ProtocolKind::Stream { unscored, .. } => unscored - 1,
            ProtocolKind::CompressOnce { context, .. } | ProtocolKind::Generate { context, .. } => {
                *context
            }
            // Options begin where their items end: no position is common to them.
            ProtocolKind::Tasks { .. } => return None,
        };
        let long: Vec<&ItemRecord> = items
            .iter()
            .filter(|r| r.n_scored > MIN_SPAN)
            .copied()
            .collect();
        let n_scored = long.iter().map(|r| r.n_scored).max()?;
        let edges = edges(first, first + n_scored);
        let buckets: Vec<Bucket> = edges
            .windows(2)
            .filter_map(|edge| bucket(&long, first, (edge[0], edge[1])))
            .collect();
        let per_doubling = |values: fn(&ItemRecord) -> Vec<f64>| {
            let slopes: Vec<f64> = long
                .iter()
                .filter_map(|item| slope(&values(item), first, &edges))
                .collect();
            Estimate::ratio(&slopes, &vec![1.0; slopes.len()])
        };
        Some(Self {
            kld_per_doubling: per_doubling(|r| wide(&r.tokens.kld)),
            delta_nll_per_doubling: per_doubling(|r| {
                let reference = r.tokens.nll_reference.iter();
                let pairs = r.tokens.nll.iter().zip(reference);
                pairs.map(|(&a, &b)| f64::from(a) - f64::from(b)).collect()
            }),
            buckets,
        })
    }
}

/// Where buckets begin, and where the last one ends.
fn edges(first: usize, end: usize) -> Vec<usize> {
    let n = end - first;
    if first > n / PARTS {
        return (0..=PARTS).map(|i| first + i * n / PARTS).collect();
    }
    let doubling = std::iter::successors(Some(FIRST), |edge| Some(2 * edge));
    std::iter::once(first)
        .chain(
            doubling
                .skip_while(|&e| e <= first)
                .take_while(|&e| e < end),
        )
        .chain([end])
        .collect()
}

/// An item's values at the queries from one position until another.
fn part<T>(values: &[T], first: usize, (from, until): (usize, usize)) -> &[T] {
    let end = (until - first).min(values.len());
    &values[(from - first).min(end)..end]
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

fn sum(values: &[f32]) -> f64 {
    wide(values).iter().sum()
}

fn bucket(items: &[&ItemRecord], first: usize, edges: (usize, usize)) -> Option<Bucket> {
    let column = |f: &dyn Fn(&ItemRecord) -> f64| items.iter().map(|r| f(r)).collect::<Vec<_>>();
    let total = |values: &[f32]| sum(part(values, first, edges));
    let tokens = column(&|r| part(&r.tokens.kld, first, edges).len() as f64);
    let delta = column(&|r| total(&r.tokens.nll) - total(&r.tokens.nll_reference));
    Some(Bucket {
        from: edges.0,
        until: edges.1,
        n_tokens: tokens.iter().sum::<f64>() as usize,
        delta_nll: Estimate::ratio(&delta, &tokens)?,
        kld: Estimate::ratio(&column(&|r| total(&r.tokens.kld)), &tokens)?,
    })
}

/// Least squares of the buckets' means of one item's values over log2 of the position (counted from 1).
fn slope(values: &[f64], first: usize, edges: &[usize]) -> Option<f64> {
    let points: Vec<(f64, f64)> = edges
        .windows(2)
        .filter_map(|edge| {
            let here = part(values, first, (edge[0], edge[1]));
            let n = here.len() as f64;
            let doublings: f64 = (edge[0]..edge[0] + here.len())
                .map(|p| ((p + 1) as f64).log2())
                .sum();
            (n > 0.0).then(|| (doublings / n, here.iter().sum::<f64>() / n))
        })
        .collect();
    let n = points.len() as f64;
    let mean = |f: fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let spread: f64 = points.iter().map(|p| (p.0 - x).powi(2)).sum();
    let common: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
    (spread > 0.0).then(|| common / spread)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::fixture::all_items;
    use crate::cache::Continuation;

    /// An item whose KLD at query position p is a·log2(p+1)'s bucket mean, whose ΔNLL is 0.25 throughout.
    fn item(first: usize, n: usize, a: f64) -> ItemRecord {
        let mut item = all_items()[0][1].clone();
        let edges = edges(first, first + n);
        let doublings = |p: usize| ((p + 1) as f64).log2();
        let mean = |p: usize| {
            let edge = edges.windows(2).find(|e| p < e[1]).unwrap();
            let all: Vec<f64> = (edge[0]..edge[1]).map(doublings).collect();
            all.iter().sum::<f64>() / all.len() as f64
        };
        item.n_scored = n;
        item.tokens.kld = (first..first + n).map(|p| (a * mean(p)) as f32).collect();
        item.tokens.nll = vec![2.25; n];
        item.tokens.nll_reference = vec![2.0; n];
        item
    }

    fn stream(window: usize) -> ProtocolKind {
        ProtocolKind::Stream {
            window,
            stride: window,
            unscored: 1,
        }
    }

    #[test]
    fn a_known_slope_is_found_with_its_interval() {
        // Slopes 0.01, 0.02, 0.03: mean 0.02, se 0.01/√3, t(2) = 4.302653.
        let items = [0.01, 0.02, 0.03].map(|a| item(0, 2047, a));
        let found = Positions::new(&items.each_ref(), &stream(2048)).unwrap();
        let slope = found.kld_per_doubling.unwrap();
        assert!((slope.value - 0.02).abs() < 1e-7, "{slope:?}");
        assert_eq!(slope.n, 3);
        let half = 4.302_653 * 0.01 / 3f64.sqrt();
        assert!((slope.half_width().unwrap() - half).abs() < 1e-6);
        let edges: Vec<_> = found.buckets.iter().map(|b| (b.from, b.until)).collect();
        assert_eq!(
            edges,
            [
                (0, 64),
                (64, 128),
                (128, 256),
                (256, 512),
                (512, 1024),
                (1024, 2047)
            ]
        );
        let flat = found.delta_nll_per_doubling.unwrap();
        assert_eq!((flat.value, flat.half_width()), (0.0, Some(0.0)));
        for bucket in &found.buckets {
            assert_eq!(bucket.delta_nll.value, 0.25);
            assert_eq!(bucket.n_tokens, 3 * (bucket.until - bucket.from));
        }
    }

    #[test]
    fn after_a_context_the_span_is_cut_in_eighths() {
        let kind = ProtocolKind::CompressOnce {
            context: 2048,
            scored: 1023,
            continuation: Continuation::Strategy,
        };
        let items = [item(2048, 1023, 0.5), item(2048, 1023, 0.5)];
        let found = Positions::new(&items.each_ref(), &kind).unwrap();
        assert_eq!(found.buckets.len(), 8);
        assert_eq!(
            (found.buckets[0].from, found.buckets[7].until),
            (2048, 3071)
        );
        assert!((found.kld_per_doubling.unwrap().value - 0.5).abs() < 1e-5);
        let n: usize = found.buckets.iter().map(|b| b.n_tokens).sum();
        assert_eq!(n, 2 * 1023);
    }

    #[test]
    fn short_spans_say_nothing_and_one_item_has_no_interval() {
        assert!(Positions::new(&[&item(0, 512, 0.1)], &stream(513)).is_none());
        let one = Positions::new(&[&item(0, 600, 0.1)], &stream(601)).unwrap();
        assert_eq!(one.kld_per_doubling.unwrap().half_width(), None);
    }
}
