//! Which grid a group gets: from its minimum to its maximum, or the one of least squared error.
//!
//! A grid from end to end spends its codes on the ends, where few elements are. `fit = "mse"` tries grids whose ends are
//! drawn in towards the middle, each end apart, and takes the one whose decoded elements are nearest to the group's;
//! what lies outside gets an end's code. The format stays: a reader can't tell, and doesn't care, how the grid was found.
//!
//! Invariants: errors are those of the *stored* step and zero, summed in 16 lanes and one tree; of equal errors the wider
//! grid wins, so a group that the wide grid holds exactly keeps it.

use super::Grid;
use crate::compute::cpu::vector::{LANES, sum_lanes};

/// How a group's grid is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fit {
    /// From the minimum to the maximum.
    MinMax,
    /// Of least squared error.
    Mse,
}

/// How far from the middle to a group's end the grid's end lies, widest first.
const SHARES: [f32; 7] = [1.0, 0.93, 0.86, 0.79, 0.72, 0.65, 0.58];

impl Fit {
    /// The ends of the grid for a group with these extremes.
    #[inline(always)]
    pub fn ends(self, grid: Grid, x: &[f32], (min, max): (f32, f32)) -> (f32, f32) {
        if self == Fit::MinMax {
            let margin = if grid.bits == 1 {
                0.25 * (max - min)
            } else {
                0.0
            };
            return (min + margin, max - margin);
        }
        if !grid.has_zero {
            let most = max.max(-min);
            return SHARES
                .iter()
                .map(|share| (-share * most, share * most))
                .fold(Best::none(), |best, ends| best.or(grid, x, ends))
                .ends;
        }
        let (middle, half) = (0.5 * (min + max), 0.5 * (max - min));
        let mut best = Best::none();
        for low in SHARES {
            for high in SHARES {
                let low = if low == 1.0 { min } else { middle - low * half };
                let high = if high == 1.0 {
                    max
                } else {
                    middle + high * half
                };
                best = best.or(grid, x, (low, high));
            }
        }
        best.ends
    }
}

struct Best {
    error: f32,
    ends: (f32, f32),
}

impl Best {
    #[inline(always)]
    fn none() -> Self {
        Self {
            error: f32::INFINITY,
            ends: (0.0, 0.0),
        }
    }

    #[inline(always)]
    fn or(self, grid: Grid, x: &[f32], ends: (f32, f32)) -> Self {
        let error = error(grid, x, ends);
        // The first one stays if every error overflows.
        if error < self.error || self.error == f32::INFINITY && self.ends == (0.0, 0.0) {
            Self { error, ends }
        } else {
            self
        }
    }
}

/// Squared error of a group on the grid between two ends, as it would be stored.
#[inline(always)]
fn error(grid: Grid, x: &[f32], ends: (f32, f32)) -> f32 {
    let mut stored = [0; 4];
    let stored = &mut stored[..grid.scale_bytes(1)];
    let (step, zero) = stored.split_at_mut(grid.scales.bytes());
    grid.put(ends, step, zero);
    let [mut step, mut zero] = [[0.0], [0.0]];
    grid.read(stored, 0, &mut step, &mut zero);
    let (step, zero) = (step[0], zero[0]);
    let divisor = if step == 0.0 { f32::INFINITY } else { step };
    let mut sums = [0.0; LANES];
    for lanes in x.chunks(LANES) {
        for (sum, &x) in sums.iter_mut().zip(lanes) {
            let code = ((x - zero) / divisor).round_ties_even();
            let code = code.max(grid.low()).min(grid.high());
            let off = x - code.mul_add(step, zero);
            *sum = off.mul_add(off, *sum);
        }
    }
    sum_lanes(&sums)
}

#[cfg(test)]
mod tests {
    use super::super::scale::ScaleFormat;
    use super::*;
    use rand::{Rng, SeedableRng};

    fn grid(bits: usize, has_zero: bool) -> Grid {
        Grid {
            bits,
            has_zero,
            scales: ScaleFormat::F16,
            fit: Fit::Mse,
        }
    }

    fn extremes(x: &[f32]) -> (f32, f32) {
        x.iter()
            .fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &v| {
                (l.min(v), h.max(v))
            })
    }

    #[test]
    fn a_fitted_grid_errs_less_on_normal_numbers_and_never_more() {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(3);
        for (bits, at_most) in [(2, 0.75), (3, 0.85), (4, 0.97)] {
            for has_zero in [true, false] {
                let (mut wide, mut fitted) = (0.0, 0.0);
                for _ in 0..200 {
                    let x: Vec<f32> = (0..128)
                        .map(|_| (0..8).map(|_| rng.random_range(-1.0f32..1.0)).sum())
                        .collect();
                    let g = grid(bits, has_zero);
                    let ends = extremes(&x);
                    let (a, b) = (error(g, &x, ends), error(g, &x, Fit::Mse.ends(g, &x, ends)));
                    assert!(b <= a, "{bits} {b} {a}");
                    wide += a;
                    fitted += b;
                }
                assert!(
                    fitted < at_most * wide,
                    "{bits} {has_zero} {}",
                    fitted / wide
                );
            }
        }
    }

    #[test]
    fn what_the_wide_grid_holds_exactly_stays_exact() {
        let g = grid(2, true);
        let x: Vec<f32> = (0..64).map(|i| (i % 4) as f32).collect();
        assert_eq!(Fit::Mse.ends(g, &x, (0.0, 3.0)), (0.0, 3.0));
        assert_eq!(Fit::Mse.ends(g, &[5.0; 9], (5.0, 5.0)), (5.0, 5.0));
        assert_eq!(Fit::Mse.ends(g, &[0.0; 9], (0.0, 0.0)), (0.0, 0.0));
    }
}
