//! One item alone: an interval over blocks of its neighbouring tokens.
//!
//! Invariant: neighbouring tokens are alike, so whole runs of them are drawn, as long as the values' autocorrelation asks
//! for; such an interval holds for this text alone and is always labelled so ([`Over::Blocks`]).
//!
//! ```text
//! tokens   0 1 2 3 4 5 6 7 8 9        blocks of 3 start anywhere from 0 to 7
//! drawn    [4 5 6] [1 2 3] [7 8 9] [1]      10 tokens again; their mean, over and over, has the spread wanted
//! ```
//!
//! Sources: H. R. Künsch, Annals of Statistics 17 (1989), for moving blocks; D. N. Politis and H. White, Econometric
//! Reviews 23 (2004), with A. Patton's correction (28, 2009), for their length.

use super::bootstrap::{Draws, N_RESAMPLES};
use super::{Estimate, Over, t_quantile};

/// Blocks below which there is no interval.
const MIN_BLOCKS: usize = 5;

/// The length of blocks for a series: Politis and White's, which grows with n^(1/3) and with the autocorrelation, and at
/// least n^(1/3).
///
/// With autocovariances R(k) tapered by λ(k/M), G = Σ λ|k|·R(k) and g = Σ λ·R(k): (3/2 · G²/g² · n)^(1/3), the form for
/// moving blocks. M is twice the lag after which autocorrelations stay below 2·√(log₁₀ n / n).
pub fn block_length(values: &[f64]) -> usize {
    let n = values.len();
    let size = n as f64;
    let least = size.cbrt().ceil();
    let mean = values.iter().sum::<f64>() / size;
    let covariance = |lag: usize| {
        let pairs = values.iter().zip(&values[lag..]);
        pairs.map(|(a, b)| (a - mean) * (b - mean)).sum::<f64>() / size
    };
    let variance = covariance(0);
    let quiet = 5.max(size.log10().sqrt().ceil() as usize);
    let most = (size.sqrt().ceil() as usize + quiet).min(n - 1);
    if variance <= 0.0 {
        return least as usize;
    }
    let threshold = 2.0 * (size.log10() / size).sqrt();
    let covariances: Vec<f64> = (0..=most).map(covariance).collect();
    let is_quiet = |from: usize| {
        let window = &covariances[from.min(most)..(from + quiet).min(most + 1)];
        window.iter().all(|c| c.abs() < threshold * variance)
    };
    let last = (0..most).find(|&m| is_quiet(m + 1)).unwrap_or(most);
    let reach = (2 * last).max(1).min(most);
    let (mut spectrum, mut weighted) = (variance, 0.0);
    for (lag, c) in covariances.iter().enumerate().take(reach + 1).skip(1) {
        let at = lag as f64 / reach as f64;
        let taper = if at <= 0.5 { 1.0 } else { 2.0 * (1.0 - at) };
        spectrum += 2.0 * taper * c;
        weighted += 2.0 * taper * lag as f64 * c;
    }
    let length = (1.5 * (weighted / spectrum).powi(2) * size).cbrt();
    length
        .clamp(least, (size / MIN_BLOCKS as f64).max(least))
        .ceil() as usize
}

impl Estimate {
    /// Gives an estimate of one item, the mean of these values of its tokens, an interval over blocks of them: Student's
    /// with a degree of freedom for each block that fits but one, the error that of resampled means. An estimate of
    /// several items, or of too few tokens, stays as it is.
    pub fn over_tokens(self, values: &[f64]) -> Self {
        let n = values.len();
        if self.n != 1 || n < MIN_BLOCKS {
            return self;
        }
        let length = block_length(values);
        let n_blocks = n / length;
        if n_blocks < MIN_BLOCKS {
            return self;
        }
        let se = error_of_mean(values, length) * (n_blocks as f64 / (n_blocks - 1) as f64).sqrt();
        let half = t_quantile(n_blocks - 1) * se;
        Self {
            se: Some(se),
            interval: Some((self.value - half, self.value + half)),
            over: Over::Blocks { length, n_blocks },
            ..self
        }
    }
}

/// The standard deviation of the means of resampled series.
fn error_of_mean(values: &[f64], length: usize) -> f64 {
    let n = values.len();
    let mean = values.iter().sum::<f64>() / n as f64;
    let mut sums = vec![0.0; n + 1];
    for (i, value) in values.iter().enumerate() {
        sums[i + 1] = sums[i] + (value - mean);
    }
    let mut draws = Draws::new(n - length + 1);
    let means: Vec<f64> = (0..N_RESAMPLES)
        .map(|_| {
            let (mut total, mut left) = (0.0, n);
            while left > 0 {
                let (from, taken) = (draws.next(), length.min(left));
                total += sums[from + taken] - sums[from];
                left -= taken;
            }
            total / n as f64
        })
        .collect();
    let middle = means.iter().sum::<f64>() / N_RESAMPLES as f64;
    let squares: f64 = means.iter().map(|m| (m - middle).powi(2)).sum();
    (squares / (N_RESAMPLES - 1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::tests::coverage::{Normals, share_that};
    use super::*;

    fn one(values: &[f64]) -> Estimate {
        let sum = values.iter().sum::<f64>();
        Estimate::ratio(&[sum], &[values.len() as f64])
            .unwrap()
            .over_tokens(values)
    }

    /// x(i) = φ·x(i − 1) + noise.
    fn autoregressive(phi: f64, n: usize, draws: &mut Normals) -> Vec<f64> {
        let mut x = draws.next() / (1.0 - phi * phi).sqrt();
        (0..n)
            .map(|_| {
                x = phi * x + draws.next();
                x
            })
            .collect()
    }

    #[test]
    fn the_length_follows_the_autocorrelation() {
        let mut draws = Normals::new(1);
        let white = block_length(&autoregressive(0.0, 1000, &mut draws));
        let some = block_length(&autoregressive(0.5, 1000, &mut draws));
        let strong = block_length(&autoregressive(0.9, 1000, &mut draws));
        assert!((10..16).contains(&white), "{white}");
        assert!(white < some && some < strong, "{white} {some} {strong}");
        assert_eq!(block_length(&[1.0; 27]), 3);
    }

    /// Means of 512 tokens of which each has half of the one before: an interval that takes them for independent covers
    /// 74 % (its error is √3 too small).
    #[test]
    fn autocorrelated_tokens_are_covered() {
        let covered = share_that(1000, |i| {
            let values = autoregressive(0.5, 512, &mut Normals::new(i));
            let (low, high) = one(&values).interval.unwrap();
            low <= 0.0 && 0.0 <= high
        });
        assert!((0.91..0.98).contains(&covered), "{covered}");
        let naive = share_that(1000, |i| {
            let values = autoregressive(0.5, 512, &mut Normals::new(i));
            let (low, high) = Estimate::mean(&values).unwrap().interval.unwrap();
            low <= 0.0 && 0.0 <= high
        });
        assert!(naive < 0.8, "{naive}");
    }

    #[test]
    fn only_one_long_enough_item_has_blocks() {
        let few = one(&[1.0, 2.0, 1.0, 2.0]);
        assert_eq!((few.interval, few.over), (None, Over::Items));
        let two = Estimate::mean(&[1.0, 2.0]).unwrap();
        assert_eq!(two.over_tokens(&[1.0; 100]), two);
        let level = one(&[0.5; 100]);
        assert_eq!((level.value, level.interval), (0.5, Some((0.5, 0.5))));
        assert!(matches!(
            level.over,
            Over::Blocks {
                length: 5,
                n_blocks: 20
            }
        ));
    }
}
