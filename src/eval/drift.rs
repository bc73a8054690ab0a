//! What a changed cache does to the next-token distribution: likelihood of the target, KL divergence, top-1, Δp.
//!
//! Conventions: natural logarithms; KL(full ‖ compressed) = Σ p_full · (ln p_full − ln p_compressed) over the whole
//! vocabulary; Δp = p_compressed − p_full of the target token. Equal logits give exactly 0 everywhere. Sums run in fixed
//! blocks: f32 lanes within a block of 1024 entries, f64 over blocks.

use rayon::prelude::*;

use crate::compute::cpu::vector::{LANES, exp_nonpositive, max, multiversion, sum_lanes};

/// Vocabulary entries summed in f32 before they go to f64.
const BLOCK: usize = 1024;

/// One scored token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenScore {
    /// −ln p(target) with the strategy's cache.
    pub nll: f64,
    /// −ln p(target) with the reference.
    pub nll_reference: f64,
    /// KL(full ‖ compressed).
    pub kld: f64,
    /// Both rank the same token first.
    pub same_top: bool,
    /// The strategy ranks the target first.
    pub is_greedy: bool,
    /// The reference ranks the target first.
    pub is_greedy_reference: bool,
    /// p − p_reference of the target.
    pub delta_p: f64,
}

/// The reference's distributions for a few rows, kept to score several strategies against.
pub struct Reference<'a> {
    logits: &'a [f32],
    n_vocab: usize,
    /// e^(x − max), `[row][n_vocab]`.
    weights: Vec<f32>,
    rows: Vec<Row>,
}

/// A row's maximum, its log-sum-exp and its first-ranked token.
#[derive(Debug, Clone, Copy)]
struct Row {
    log_sum: f64,
    sum: f64,
    top: usize,
}

impl<'a> Reference<'a> {
    /// Takes the reference's logits, `[row][n_vocab]`.
    pub fn new(logits: &'a [f32], n_vocab: usize) -> Self {
        let mut weights = logits.to_vec();
        let rows = weights.par_chunks_mut(n_vocab).map(normalise).collect();
        Self {
            logits,
            n_vocab,
            weights,
            rows,
        }
    }

    /// Scores a strategy's logits of the same rows; `targets` holds each row's next token.
    pub fn score(&self, logits: &[f32], targets: &[u32]) -> Vec<TokenScore> {
        let n = self.n_vocab;
        targets
            .par_iter()
            .enumerate()
            .map(|(i, &target)| {
                let at = i * n..(i + 1) * n;
                let (full, other) = (&self.logits[at.clone()], &logits[at.clone()]);
                let row = normalise(&mut other.to_vec());
                let reference = self.rows[i];
                let target = target as usize;
                let gap: f64 = weighted_gap(&self.weights[at], full, other) / reference.sum;
                let ln_p = f64::from(other[target]) - row.log_sum;
                let ln_p_reference = f64::from(full[target]) - reference.log_sum;
                TokenScore {
                    nll: -ln_p,
                    nll_reference: -ln_p_reference,
                    // Rounding may leave a negative of about 1e-7; cutting it off would bias the mean of nearly equal rows.
                    kld: gap - (reference.log_sum - row.log_sum),
                    same_top: row.top == reference.top,
                    is_greedy: row.top == target,
                    is_greedy_reference: reference.top == target,
                    delta_p: ln_p.exp() - ln_p_reference.exp(),
                }
            })
            .collect()
    }

    /// −ln p(target) of the reference alone.
    pub fn nll(&self, targets: &[u32]) -> Vec<f64> {
        targets
            .iter()
            .enumerate()
            .map(|(i, &t)| {
                self.rows[i].log_sum - f64::from(self.logits[i * self.n_vocab + t as usize])
            })
            .collect()
    }
}

/// Replaces logits by e^(x − max).
fn normalise(x: &mut [f32]) -> Row {
    let m = max(x);
    let top = x.iter().position(|&v| v == m).unwrap_or(0);
    let sum = exp_blocks(x, m);
    Row {
        log_sum: f64::from(m) + sum.ln(),
        sum,
        top,
    }
}

#[inline(always)]
fn exp_blocks_body(x: &mut [f32], shift: f32) -> f64 {
    let mut total = 0.0;
    for block in x.chunks_mut(BLOCK) {
        let mut lanes = [0.0f32; LANES];
        for chunk in block.chunks_mut(LANES) {
            for (s, v) in lanes.iter_mut().zip(chunk) {
                *v = exp_nonpositive(*v - shift);
                *s += *v;
            }
        }
        total += f64::from(sum_lanes(&lanes));
    }
    total
}

multiversion! {
    fn exp_blocks(x: &mut [f32], shift: f32) -> f64 = exp_blocks_body;
}

#[inline(always)]
fn weighted_gap_body(w: &[f32], a: &[f32], b: &[f32]) -> f64 {
    let mut total = 0.0;
    for ((w, a), b) in w.chunks(BLOCK).zip(a.chunks(BLOCK)).zip(b.chunks(BLOCK)) {
        let mut lanes = [0.0f32; LANES];
        for ((w, a), b) in w.chunks(LANES).zip(a.chunks(LANES)).zip(b.chunks(LANES)) {
            for (i, s) in lanes.iter_mut().enumerate().take(w.len()) {
                *s = w[i].mul_add(a[i] - b[i], *s);
            }
        }
        total += f64::from(sum_lanes(&lanes));
    }
    total
}

multiversion! {
    /// Σ w · (a − b).
    fn weighted_gap(w: &[f32], a: &[f32], b: &[f32]) -> f64 = weighted_gap_body;
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};

    fn oracle(full: &[f32], other: &[f32], target: usize) -> (f64, f64, f64) {
        let lse = |x: &[f32]| {
            let m = x
                .iter()
                .fold(f64::NEG_INFINITY, |m, &v| m.max(f64::from(v)));
            m + x
                .iter()
                .map(|&v| (f64::from(v) - m).exp())
                .sum::<f64>()
                .ln()
        };
        let (a, b) = (lse(full), lse(other));
        let kld = full
            .iter()
            .zip(other)
            .map(|(&x, &y)| {
                let p = (f64::from(x) - a).exp();
                p * ((f64::from(x) - a) - (f64::from(y) - b))
            })
            .sum();
        (
            b - f64::from(other[target]),
            a - f64::from(full[target]),
            kld,
        )
    }

    #[test]
    fn scores_agree_with_f64() {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(5);
        let n = 49_152;
        let full: Vec<f32> = (0..2 * n)
            .map(|_| rng.random_range(-12.0f32..12.0))
            .collect();
        let other: Vec<f32> = full
            .iter()
            .map(|x| x + rng.random_range(-0.05f32..0.05))
            .collect();
        let reference = Reference::new(&full, n);
        let targets = [17, 40_000];
        for (i, s) in reference.score(&other, &targets).into_iter().enumerate() {
            let at = i * n..(i + 1) * n;
            let (nll, nll_reference, kld) =
                oracle(&full[at.clone()], &other[at], targets[i] as usize);
            assert!(
                (s.nll - nll).abs() < 1e-6 && (s.nll_reference - nll_reference).abs() < 1e-6,
                "{s:?}"
            );
            assert!((s.kld - kld).abs() < 1e-7, "{} {kld}", s.kld);
            assert!((s.delta_p - ((-nll).exp() - (-nll_reference).exp())).abs() < 1e-9);
            assert_eq!(reference.nll(&targets)[i], s.nll_reference);
        }
    }

    #[test]
    fn equal_logits_give_exactly_nothing() {
        let logits: Vec<f32> = (0..500).map(|i| (i % 37) as f32 * 0.3 - 4.0).collect();
        let reference = Reference::new(&logits, 500);
        let s = reference.score(&logits, &[3])[0];
        assert_eq!(
            (s.kld, s.delta_p, s.nll, s.same_top),
            (0.0, 0.0, s.nll_reference, true)
        );
    }
}
