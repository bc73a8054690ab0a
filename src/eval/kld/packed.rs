//! One row of log-probabilities in llama.cpp's 16 bits.
//!
//! A row of `n_vocab` values takes [`row_words`] words of 16 bits: an f32 step, an f32 least log-probability (each over two
//! words, little-endian), a code for each token, and a word of padding if `n_vocab` is odd. A log-probability is
//! least + step · code. Steps span the logits from the largest down to 16 nats below it; what lies lower has code 0.
//!
//! With logits 0, −1, −20 (ln Σ exp = 0.3133): step = 16 / 65535, least = −16.3133, codes 65535, 61439, 0.
//!
//! Source: llama.cpp, `tools/perplexity/perplexity.cpp` (the layout; nothing else of it is used).

/// Nats below the largest logit that are told apart.
const SPAN: f32 = 16.0;

/// The largest code.
const MAX_CODE: f32 = 65535.0;

/// Words before the codes.
const HEAD_WORDS: usize = 4;

/// Words of a row.
pub fn row_words(n_vocab: usize) -> usize {
    2 * n_vocab.div_ceil(2) + HEAD_WORDS
}

/// Packs one row of logits into `out` (`row_words(logits.len())` long).
pub fn pack(logits: &[f32], out: &mut [u16]) {
    let max = logits.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
    let min = logits.iter().fold(f32::INFINITY, |m, &x| m.min(x));
    let min = min.max(max - SPAN);
    let log_sum = log_sum_exp(logits, max);
    let step = (max - min) / MAX_CODE;
    let least = (f64::from(min) - f64::from(max) - log_sum) as f32;
    for (words, value) in out[..HEAD_WORDS].chunks_exact_mut(2).zip([step, least]) {
        let bits = value.to_bits();
        words.copy_from_slice(&[bits as u16, (bits >> 16) as u16]);
    }
    let codes = &mut out[HEAD_WORDS..];
    codes.fill(0);
    if step > 0.0 {
        let per_step = 1.0 / step;
        for (code, &x) in codes.iter_mut().zip(logits) {
            // Ties to even, as the format's writer rounds.
            *code = (per_step * (x - min))
                .round_ties_even()
                .clamp(0.0, MAX_CODE) as u16;
        }
    }
}

/// ln Σ exp(x − max).
pub fn log_sum_exp(logits: &[f32], max: f32) -> f64 {
    let sum: f64 = logits
        .iter()
        .map(|&x| (f64::from(x) - f64::from(max)).exp())
        .sum();
    sum.ln()
}

/// A packed row.
#[derive(Debug, Clone, Copy)]
pub struct PackedRow<'a> {
    step: f32,
    least: f32,
    codes: &'a [u16],
}

impl<'a> PackedRow<'a> {
    /// Reads a row of `n_vocab` values (`row_words(n_vocab)` words).
    pub fn new(words: &'a [u16], n_vocab: usize) -> Self {
        let number = |i: usize| f32::from_bits(u32::from(words[i]) | u32::from(words[i + 1]) << 16);
        Self {
            step: number(0),
            least: number(2),
            codes: &words[HEAD_WORDS..HEAD_WORDS + n_vocab],
        }
    }

    /// What is wrong with it, if anything.
    pub fn fault(&self) -> Option<String> {
        let (step, least) = (self.step, self.least);
        if !(step.is_finite() && step >= 0.0) {
            return Some(format!("its step is {step}, must be a number from 0"));
        }
        // ln of the largest probability lies between −ln(n_vocab) and 0, up to rounding.
        let top = f64::from(least) + f64::from(step) * f64::from(MAX_CODE);
        let lowest = -(self.codes.len() as f64).ln() - 1e-3;
        if !(least.is_finite() && least <= 1e-3 && top <= 1e-3 && (step == 0.0 || top >= lowest)) {
            let must = format!("must be from {lowest:.3} to 0");
            return Some(format!(
                "its least log-probability is {least} and its largest {top:.3}, which {must}"
            ));
        }
        None
    }

    /// Log-probability of a token, nats.
    pub fn log_prob(&self, token: usize) -> f32 {
        self.step * f32::from(self.codes[token]) + self.least
    }

    /// All log-probabilities, nats.
    pub fn log_probs(&self) -> impl Iterator<Item = f32> + '_ {
        (0..self.codes.len()).map(|i| self.log_prob(i))
    }

    /// The most likely token, the first of several.
    pub fn top(&self) -> usize {
        let first = |best: usize, i: usize| {
            if self.codes[i] > self.codes[best] {
                i
            } else {
                best
            }
        };
        (0..self.codes.len()).fold(0, first)
    }
}
