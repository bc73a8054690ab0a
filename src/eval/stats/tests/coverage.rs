//! How often 95 % intervals hold the truth, on skewed data: the evidence for the interval that tables print.
//!
//! `cargo test --release --lib stats::tests::coverage -- --ignored --nocapture` prints the table of docs/statistics.md.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use statrs::distribution::ContinuousCDF;

use super::super::bootstrap::bca;
use super::super::{Estimate, normal, t_quantile};

/// Standard normal draws.
pub struct Normals(ChaCha8Rng);

impl Normals {
    /// A stream of its own for every number.
    pub fn new(stream: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(20);
        rng.set_stream(stream);
        Self(rng)
    }

    pub fn next(&mut self) -> f64 {
        normal().inverse_cdf(self.0.random_range(f64::EPSILON..1.0))
    }
}

/// The share of repetitions, 0 up to `repeats`, for which something holds.
pub fn share_that(repeats: u64, holds: impl Fn(u64) -> bool + Sync) -> f64 {
    let count = (0..repeats).into_par_iter().filter(|&i| holds(i)).count();
    count as f64 / repeats as f64
}

/// A population of clusters: its name, the true ratio, a draw of (numerator, denominator).
struct Population {
    name: &'static str,
    truth: f64,
    draw: fn(&mut Normals) -> (f64, f64),
}

fn gamma_half(draws: &mut Normals) -> f64 {
    draws.next().powi(2) / 2.0
}

static POPULATIONS: &[Population] = &[
    Population {
        name: "normal, mean 1, sd 1",
        truth: 1.0,
        draw: |z| (1.0 + z.next(), 1.0),
    },
    Population {
        name: "lognormal, σ = 1",
        truth: 1.648_721_270_700_128,
        draw: |z| (z.next().exp(), 1.0),
    },
    Population {
        name: "gamma, shape ½",
        truth: 0.5,
        draw: |z| (gamma_half(z), 1.0),
    },
    Population {
        name: "exponential less 0.9",
        truth: 0.1,
        draw: |z| (gamma_half(z) + gamma_half(z) - 0.9, 1.0),
    },
    // Documents of lognormal length whose error per token is gamma of shape ½.
    Population {
        name: "gamma over lengths",
        truth: 0.5,
        draw: |z| {
            let length = (5.0 + 0.7 * z.next()).exp();
            (gamma_half(z) * length, length)
        },
    },
];

fn simulated(population: &Population, n: usize, stream: u64) -> (Vec<f64>, Vec<f64>) {
    let mut draws = Normals::new(stream);
    (0..n).map(|_| (population.draw)(&mut draws)).unzip()
}

/// An interval from numerators and denominators.
type Interval = fn(&[f64], &[f64]) -> Option<(f64, f64)>;

/// How often an interval holds the truth.
fn coverage(population: &Population, (n, repeats): (usize, u64), interval: Interval) -> f64 {
    share_that(repeats, |i| {
        let (x, y) = simulated(population, n, i);
        let (low, high) = interval(&x, &y).unwrap();
        low <= population.truth && population.truth <= high
    })
}

fn printed(x: &[f64], y: &[f64]) -> Option<(f64, f64)> {
    Estimate::ratio(x, y)?.interval
}

fn student(x: &[f64], y: &[f64]) -> Option<(f64, f64)> {
    let estimate = Estimate::ratio(x, y)?;
    let half = t_quantile(estimate.n - 1) * estimate.se?;
    Some((estimate.value - half, estimate.value + half))
}

/// The bound that reviewers were promised, on every population at n = 20 and on the two hardest at n = 200.
#[test]
fn the_printed_interval_covers_what_it_says() {
    for population in POPULATIONS {
        let few = coverage(population, (20, 1000), printed);
        assert!((0.91..=0.97).contains(&few), "{}: {few}", population.name);
    }
    for population in [&POPULATIONS[1], &POPULATIONS[4]] {
        let many = coverage(population, (200, 600), printed);
        assert!((0.93..=0.97).contains(&many), "{}: {many}", population.name);
        let plain = coverage(population, (20, 1000), student);
        assert!(plain < 0.91, "{}: Student's {plain}", population.name);
    }
}

#[test]
#[ignore = "minutes: makes the table of docs/statistics.md"]
fn table() {
    println!("| population | n | Student's t | BCa | bootstrap-t |");
    println!("|---|---|---|---|---|");
    for population in POPULATIONS {
        for n in [5, 8, 12, 20, 200] {
            let percent = |interval| 100.0 * coverage(population, (n, 4000), interval);
            println!(
                "| {} | {n} | {:.1} | {:.1} | {:.1} |",
                population.name,
                percent(student),
                percent(bca),
                percent(printed),
            );
        }
    }
}
