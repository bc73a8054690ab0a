//! Non-uniform levels: codes of the nearest one, and levels with the least squared error, for one coordinate of a random
//! point on a sphere (Lloyd and Max) or for given numbers (k-means on a line).
//!
//! Both are Lloyd's iteration in f64: borders halfway between levels, levels at the means of what lies between borders,
//! from a fixed start, until nothing moves.

use statrs::function::beta::{beta, beta_reg};

use super::bits::{self, RUN};
use crate::compute::cpu::levels as vectors;
use crate::compute::cpu::vector::multiversion;

/// Codes have at most this many bits.
const MAX_BITS: usize = 4;
const MAX_LEVELS: usize = 1 << MAX_BITS;
// Ten times what 16 levels take to settle.
const MAX_ITERATIONS: usize = 20_000;

/// Ascending levels of `bits`-bit codes, and the borders between them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Levels {
    /// Bits of a code, 1 to 4.
    pub bits: usize,
    level: [f32; MAX_LEVELS],
    border: [f32; MAX_LEVELS - 1],
}

impl Levels {
    /// From 2^bits levels in ascending order.
    pub fn new(ascending: &[f64]) -> Self {
        let (mut level, mut border) = ([0.0; MAX_LEVELS], [f32::INFINITY; MAX_LEVELS - 1]);
        // They repeat, so that what stands above a code's bits does not count.
        for (l, x) in level.iter_mut().zip(ascending.iter().cycle()) {
            *l = *x as f32;
        }
        for (b, pair) in border.iter_mut().zip(ascending.windows(2)) {
            *b = halfway(pair) as f32;
        }
        Self {
            bits: ascending.len().ilog2() as usize,
            level,
            border,
        }
    }

    /// The nearest level's code; halfway between two, the higher one.
    #[inline(always)]
    pub fn code(&self, x: f32) -> u8 {
        self.border.iter().map(|&b| u8::from(x >= b)).sum()
    }

    /// A code's level.
    #[inline(always)]
    pub fn level(&self, code: u32) -> f32 {
        self.level[code as usize % MAX_LEVELS]
    }

    /// Bytes of the levels as a table of f32.
    pub fn table_bytes(&self) -> u64 {
        4 << self.bits
    }
}

multiversion! {
    /// Codes numbers by their nearest levels, as a stream of bits.
    pub(super) fn nearest(levels: &Levels, x: &[f32], codes: &mut [u8]) = nearest_body;
}

/// Decodes a stream of bits to levels times `scale`.
pub(super) fn look_up(levels: &Levels, codes: &[u8], scale: f32, x: &mut [f32]) {
    let n = vectors::look_up(levels.bits, &levels.level, codes, scale, x);
    let (codes, x) = (&codes[n / 8 * levels.bits..], &mut x[n..]);
    match levels.bits {
        1 => look_up_in::<1>(levels, codes, scale, x),
        2 => look_up_in::<2>(levels, codes, scale, x),
        3 => look_up_in::<3>(levels, codes, scale, x),
        _ => look_up_in::<4>(levels, codes, scale, x),
    }
}

#[inline(always)]
fn nearest_body(levels: &Levels, x: &[f32], codes: &mut [u8]) {
    match levels.bits {
        1 => nearest_of::<1>(levels, x, codes),
        2 => nearest_of::<2>(levels, x, codes),
        3 => nearest_of::<3>(levels, x, codes),
        _ => nearest_of::<4>(levels, x, codes),
    }
}

#[inline(always)]
fn nearest_of<const B: usize>(levels: &Levels, x: &[f32], codes: &mut [u8]) {
    for (x, out) in x.chunks(RUN).zip(codes.chunks_mut(B)) {
        let mut q = [0; RUN];
        for (q, &x) in q.iter_mut().zip(x) {
            *q = levels.code(x);
        }
        let mut packed = [0; B];
        bits::pack::<B>(&q, &mut packed);
        out.copy_from_slice(&packed[..out.len()]);
    }
}

fn look_up_in<const B: usize>(levels: &Levels, codes: &[u8], scale: f32, x: &mut [f32]) {
    for (x, codes) in x.chunks_mut(RUN).zip(codes.chunks(B)) {
        let q = bits::unpack::<B>(&bits::last(codes));
        let values = q.map(|q| levels.level(q) * scale);
        x.copy_from_slice(&values[..x.len()]);
    }
}

fn halfway(pair: &[f64]) -> f64 {
    (pair[0] + pair[1]) / 2.0
}

/// The 2^bits levels for √dim times one coordinate of a random point on the unit sphere in `dim` dimensions, ascending
/// and symmetric around 0. One dimension has the points −1 and 1 alone: there they are spread evenly between those.
pub(super) fn sphere(dim: usize, bits: usize) -> Vec<f64> {
    let n_half = 1 << (bits - 1);
    let d = dim as f64;
    let positive: Vec<f64> = if dim < 2 {
        (0..n_half)
            .map(|i| (2 * i + 1) as f64 / (2 * n_half - 1) as f64)
            .collect()
    } else {
        // Half of the density ∝ (1 − t²)^((d−3)/2) lies above 0.
        let exponent = (d - 1.0) / 2.0;
        let total = beta(0.5, exponent);
        let mass_below = |t: f64| beta_reg(0.5, exponent, (t * t).min(1.0)) / 2.0;
        let moment_above =
            |t: f64| (1.0 - t * t).max(0.0).powf(exponent) / (2.0 * exponent * total);
        let widest = (3.0 / d.sqrt()).min(1.0);
        let start = (0..n_half).map(|i| (i as f64 + 0.5) / n_half as f64 * widest);
        settle(start.collect(), |low, high| {
            let (low, high) = (low.unwrap_or(0.0), high.unwrap_or(1.0));
            let mass = mass_below(high) - mass_below(low);
            (mass > 0.0).then(|| (moment_above(low) - moment_above(high)) / mass)
        })
    };
    let scaled: Vec<f64> = positive.iter().map(|t| t * d.sqrt()).collect();
    scaled
        .iter()
        .rev()
        .map(|t| -t)
        .chain(scaled.iter().copied())
        .collect()
}

/// The 2^bits levels of numbers in ascending order, ascending; all 0 if there are none. The start is
/// the numbers' own quantiles.
pub(super) fn of_sorted(sorted: &[f64], bits: usize) -> Vec<f64> {
    let n_levels = 1 << bits;
    if sorted.is_empty() {
        return vec![0.0; n_levels];
    }
    let mut sums = vec![0.0];
    let mut sum = 0.0;
    sums.extend(sorted.iter().map(|x| {
        sum += x;
        sum
    }));
    let start = (0..n_levels).map(|i| sorted[(2 * i + 1) * sorted.len() / (2 * n_levels)]);
    let index = |border: f64| sorted.partition_point(|&x| x < border);
    settle(start.collect(), |low, high| {
        let (low, high) = (low.map_or(0, index), high.map_or(sorted.len(), index));
        (high > low).then(|| (sums[high] - sums[low]) / (high - low) as f64)
    })
}

/// Lloyd's iteration: `mean` gives the mean of what lies between two borders, or none if nothing does.
fn settle(
    mut levels: Vec<f64>,
    mean: impl Fn(Option<f64>, Option<f64>) -> Option<f64>,
) -> Vec<f64> {
    for _ in 0..MAX_ITERATIONS {
        let borders: Vec<f64> = levels.windows(2).map(halfway).collect();
        let mut moved = 0.0f64;
        for (i, level) in levels.iter_mut().enumerate() {
            let low = i.checked_sub(1).map(|below| borders[below]);
            if let Some(mean) = mean(low, borders.get(i).copied()) {
                moved = moved.max((mean - *level).abs());
                *level = mean;
            }
        }
        if moved < 1e-10 {
            break;
        }
    }
    levels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::encode::bits::stream_bytes;
    use crate::compute::cpu::dispatch;

    #[test]
    fn a_sphere_s_levels_have_the_published_distortions() {
        // Of a unit vector in 128 dimensions, by sampling a coordinate's density on a fine grid.
        for (bits, published, unit) in [
            (1, 0.36, 0.01),
            (2, 0.117, 0.001),
            (3, 0.03, 0.01),
            (4, 0.009, 0.001),
        ] {
            let levels = Levels::new(&sphere(128, bits));
            let (mut mass, mut error) = (0.0, 0.0);
            for i in -200_000..200_000 {
                let t = (f64::from(i) + 0.5) / 200_000.0;
                let density = (1.0 - t * t).powf(62.5);
                let x = t * 128f64.sqrt();
                let level = f64::from(levels.level(levels.code(x as f32).into()));
                mass += density;
                error += density * (x - level) * (x - level);
            }
            let distortion = error / mass;
            assert!(
                (distortion - published).abs() < unit,
                "{bits} bits: {distortion}"
            );
        }
    }

    #[test]
    fn many_dimensions_have_the_levels_of_a_normal_number() {
        // Max, 1960, table I.
        let normal = [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733];
        for (x, want) in sphere(100_000, 4)[8..].iter().zip(normal) {
            assert!((x - want).abs() < 6e-4, "{x} {want}");
        }
    }

    #[test]
    fn few_dimensions_have_levels_too() {
        // A coordinate in three dimensions is uniform: cells of equal width.
        for (i, x) in sphere(3, 3).iter().enumerate() {
            let want = (i as f64 - 3.5) / 4.0 * 3f64.sqrt();
            assert!((x - want).abs() < 1e-8, "{x} {want}");
        }
        assert_eq!(sphere(1, 1), [-1.0, 1.0]);
        assert_eq!(sphere(1, 2)[3], 1.0);
        let circle = sphere(2, 4);
        assert!(circle.windows(2).all(|p| p[0] < p[1]) && circle[15] < 2f64.sqrt());
    }

    #[test]
    fn vectors_look_up_what_the_plain_loop_does() {
        for bits in 1..=4 {
            let levels = Levels::new(&sphere(64, bits));
            for n in [7, 16, 33, 64] {
                let codes: Vec<u8> = (0..stream_bytes(n, bits))
                    .map(|i| (i * 151) as u8)
                    .collect();
                let code = |i: usize| {
                    let bit = |b: usize| u32::from(codes[b / 8]) >> (b % 8) & 1;
                    (0..bits).map(|j| bit(bits * i + j) << j).sum()
                };
                let want: Vec<f32> = (0..n).map(|i| levels.level(code(i)) * 0.3).collect();
                for level in dispatch::tests::levels() {
                    let mut x = vec![f32::NAN; n];
                    dispatch::tests::at(level, || look_up(&levels, &codes, 0.3, &mut x));
                    assert_eq!(x, want, "{n} codes of {bits} bits, {level:?}");
                }
            }
        }
    }

    #[test]
    fn clusters_are_found_and_empty_cells_stand_still() {
        let mut numbers: Vec<f64> = (0..40)
            .map(|i| f64::from(i / 10) * 5.0 + f64::from(i % 10) * 0.01)
            .collect();
        numbers.sort_by(f64::total_cmp);
        for (x, want) in of_sorted(&numbers, 2)
            .iter()
            .zip([0.045, 5.045, 10.045, 15.045])
        {
            assert!((x - want).abs() < 1e-12, "{x} {want}");
        }
        assert_eq!(of_sorted(&[2.5; 9], 3), [2.5; 8]);
        assert_eq!(of_sorted(&[], 2), [0.0; 4]);
    }

    #[test]
    fn codes_are_those_of_the_nearest_level() {
        let levels = Levels::new(&[-1.0, 0.0, 0.5, 2.0]);
        for (x, code) in [
            (-9.0, 0),
            (-0.5, 1),
            (-0.501, 0),
            (0.24, 1),
            (0.25, 2),
            (1.3, 3),
            (9.0, 3),
        ] {
            assert_eq!(levels.code(x), code, "{x}");
        }
        assert_eq!(levels.level(3), 2.0);
        assert_eq!((levels.bits, levels.table_bytes()), (2, 16));
    }
}
