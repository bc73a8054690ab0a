//! How well scores follow targets.

/// What is said of a head's scores, or of several heads' as a mean.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Judged {
    /// 1 − Σ(error²) / Σ(deviation from the mean²).
    pub r2: f64,
    /// Spearman's rank correlation of scores and targets.
    pub rank: f64,
}

impl Judged {
    /// Of one head's scores.
    pub fn of(scores: &[f64], targets: &[f64]) -> Self {
        Self {
            r2: r2(scores, targets),
            rank: spearman(scores, targets),
        }
    }

    /// The mean of several.
    pub fn mean(all: &[Self]) -> Self {
        let mean = |f: fn(&Self) -> f64| all.iter().map(f).sum::<f64>() / all.len().max(1) as f64;
        Self {
            r2: mean(|j| j.r2),
            rank: mean(|j| j.rank),
        }
    }
}

fn r2(scores: &[f64], targets: &[f64]) -> f64 {
    let mean = targets.iter().sum::<f64>() / targets.len().max(1) as f64;
    let pairs = scores.iter().zip(targets);
    let error: f64 = pairs.map(|(s, y)| (s - y) * (s - y)).sum();
    let deviation: f64 = targets.iter().map(|y| (y - mean) * (y - mean)).sum();
    if deviation == 0.0 {
        return 0.0;
    }
    1.0 - error / deviation
}

/// Spearman's rank correlation; equal values share the mean of their ranks.
fn spearman(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (ranks(a), ranks(b));
    let mean = (a.len() as f64 - 1.0) / 2.0;
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (x, y) in a.iter().zip(&b) {
        ab += (x - mean) * (y - mean);
        aa += (x - mean) * (x - mean);
        bb += (y - mean) * (y - mean);
    }
    if aa == 0.0 || bb == 0.0 {
        return 0.0;
    }
    ab / (aa * bb).sqrt()
}

fn ranks(x: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&i, &j| x[i].total_cmp(&x[j]));
    let mut ranks = vec![0.0; x.len()];
    let mut at = 0;
    for equal in order.chunk_by(|&i, &j| x[i] == x[j]) {
        let mean = at as f64 + (equal.len() as f64 - 1.0) / 2.0;
        equal.iter().for_each(|&i| ranks[i] = mean);
        at += equal.len();
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_equal_values_are_shared_and_order_is_all_that_counts() {
        assert_eq!(ranks(&[3.0, 1.0, 3.0, 2.0]), [2.5, 0.0, 2.5, 1.0]);
        assert!((spearman(&[1.0, 2.0, 3.0], &[1.0, 10.0, 100.0]) - 1.0).abs() < 1e-12);
        assert!((spearman(&[1.0, 2.0, 3.0], &[9.0, 5.0, 4.0]) + 1.0).abs() < 1e-12);
        // By SciPy: spearmanr([1, 2, 2, 4, 5], [2, 1, 3, 3, 5]).
        assert!(
            (spearman(&[1.0, 2.0, 2.0, 4.0, 5.0], &[2.0, 1.0, 3.0, 3.0, 5.0]) - 0.763_157_894_7)
                .abs()
                < 1e-9
        );
    }

    #[test]
    fn r2_is_1_for_the_targets_and_0_for_their_mean() {
        let y = [1.0, 2.0, 6.0];
        assert_eq!(Judged::of(&y, &y), Judged { r2: 1.0, rank: 1.0 });
        assert_eq!(Judged::of(&[3.0; 3], &y), Judged { r2: 0.0, rank: 0.0 });
        assert_eq!(Judged::of(&[1.0, 2.0, 6.0 - 14f64.sqrt()], &y).r2, 0.0);
    }
}
