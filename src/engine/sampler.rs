//! From logits to the next token: greedy, or sampled with noise that several caches can share.
//!
//! Invariants: the choice depends on the logits, the seed and the step alone; caches that share seed and step share their noise (the
//! Gumbel trick), so equal distributions choose the same token and close ones nearly always do: a pair of texts differs by what
//! the caches differ in, not by chance.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    /// Divides the logits; 0: the most likely token.
    pub temperature: f64,
    /// Only the most likely tokens whose probabilities together reach it are chosen from; 1: all.
    pub top_p: f64,
    /// Seed of the noise.
    pub seed: u64,
}

impl Sampler {
    /// The most likely token, the first of equals.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_p: 1.0,
        seed: 0,
    };

    /// Noise of a step, a number per token of the vocabulary; nothing where none is needed.
    pub fn noise(&self, step: usize, n_vocab: usize) -> Vec<f64> {
        if self.temperature == 0.0 {
            return Vec::new();
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(step as u64);
        // Gumbel: −ln(−ln u), u in (0, 1).
        let gumbel = |_| {
            let u: f64 = rng.random::<f64>().max(f64::MIN_POSITIVE);
            -(-u.ln()).max(f64::MIN_POSITIVE).ln()
        };
        (0..n_vocab).map(gumbel).collect()
    }

    /// The next token by its logits and the step's noise.
    pub fn pick(&self, logits: &[f32], noise: &[f64]) -> u32 {
        if noise.is_empty() {
            return first_greatest((0..).zip(logits.iter().map(|&x| f64::from(x))));
        }
        let scaled = |i: u32| f64::from(logits[i as usize]) / self.temperature;
        let nucleus = self.nucleus(logits.len(), &scaled);
        first_greatest(
            nucleus
                .into_iter()
                .map(|i| (i, scaled(i) + noise[i as usize])),
        )
    }

    /// The fewest most likely tokens that reach `top_p`, at least one.
    fn nucleus(&self, n_vocab: usize, scaled: &dyn Fn(u32) -> f64) -> Vec<u32> {
        let mut tokens: Vec<u32> = (0..n_vocab as u32).collect();
        if self.top_p >= 1.0 {
            return tokens;
        }
        tokens.sort_by(|&a, &b| scaled(b).total_cmp(&scaled(a)).then(a.cmp(&b)));
        let top = tokens.first().map_or(0.0, |&t| scaled(t));
        let weights: Vec<f64> = tokens.iter().map(|&t| (scaled(t) - top).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut reached = 0.0;
        let last = weights.iter().position(|w| {
            reached += w / total;
            reached >= self.top_p
        });
        tokens.truncate(last.map_or(n_vocab, |i| i + 1));
        tokens
    }
}

fn first_greatest(scores: impl Iterator<Item = (u32, f64)>) -> u32 {
    let mut best = (0, f64::NEG_INFINITY);
    for (token, score) in scores {
        if score > best.1 {
            best = (token, score);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warm(top_p: f64) -> Sampler {
        Sampler {
            temperature: 0.8,
            top_p,
            seed: 3,
        }
    }

    #[test]
    fn greedy_takes_the_first_of_the_greatest() {
        assert_eq!(Sampler::GREEDY.pick(&[1.0, 3.0, 3.0, -2.0], &[]), 1);
        assert!(Sampler::GREEDY.noise(0, 4).is_empty());
    }

    /// Frequencies of 20,000 draws are the softmax at the temperature, renormalised over the nucleus.
    #[test]
    fn draws_follow_the_distribution() {
        let logits = [1.0f32, 0.2, -1.0, -4.0];
        let weights: Vec<f64> = logits.iter().map(|&x| (f64::from(x) / 0.8).exp()).collect();
        for (top_p, kept) in [(1.0, 4), (0.9, 2)] {
            let sampler = warm(top_p);
            let total: f64 = weights[..kept].iter().sum();
            let n = 20_000;
            let mut counts = [0usize; 4];
            for step in 0..n {
                counts[sampler.pick(&logits, &sampler.noise(step, 4)) as usize] += 1;
            }
            for (i, count) in counts.iter().enumerate() {
                let p = if i < kept { weights[i] / total } else { 0.0 };
                let error = (p * (1.0 - p) / n as f64).sqrt();
                let got = *count as f64 / n as f64;
                assert!((got - p).abs() <= 4.0 * error, "{top_p} {i}: {got} for {p}");
            }
        }
    }

    /// Shared noise: distributions that hardly differ choose the same token hardly ever differently.
    #[test]
    fn close_distributions_choose_alike() {
        let (a, b) = ([0.5f32, 0.1, 0.0, -0.3], [0.51f32, 0.1, 0.0, -0.31]);
        let sampler = warm(1.0);
        let differ = (0..5000).filter(|&step| {
            let noise = sampler.noise(step, 4);
            sampler.pick(&a, &noise) != sampler.pick(&b, &noise)
        });
        assert!(differ.count() < 50);
    }
}
