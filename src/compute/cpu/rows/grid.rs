//! Integer codes of a few bits on grids along a row or along a channel, as one stream in order of channels, least
//! significant bit first.

use super::steps::{Number, Steps};
use super::{Layout, Rows};
use crate::compute::cpu::simd::{LANES, Simd, simd_kernel};

/// Channels that are held at a time: 16 bytes of 4-bit codes.
const STEP: usize = 32;

/// The number of each code; with fewer than 4 bits they repeat, so that what stands above a code does not count.
const fn ramp<const B: usize>() -> [f32; LANES] {
    let mut ramp = [0.0; LANES];
    let mut i = 0;
    while i < LANES {
        ramp[i] = (i % (1 << B)) as f32;
        i += 1;
    }
    ramp
}

/// Codes of B bits of 32 channels of 16 rows.
#[derive(Debug, Clone, Copy)]
pub struct Codes<S: Simd, const B: usize>([[S::I; 4]; 2]);

impl<S: Simd, const B: usize> Codes<S, B> {
    /// # Safety
    /// The instruction set is there; 4·B bytes at `p` and at each of 15 more rows, `stride` bytes apart, may be read.
    #[inline(always)]
    unsafe fn load(p: *const u8, stride: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            Self(match B {
                8 => [S::columns(p, stride), S::columns(p.add(LANES), stride)],
                4 => [S::columns(p, stride); 2],
                1 => [[S::load_column(p, stride); 4]; 2],
                // Four words that overlap: each holds the codes of 8 channels.
                3 => {
                    let (a, b) = (S::load_column(p, stride), S::load_column(p.add(2), stride));
                    let c = S::load_column(p.add(5), stride);
                    [[a, b, c, S::load_column(p.add(8), stride)]; 2]
                }
                _ => {
                    let (a, b) = (S::load_column(p, stride), S::load_column(p.add(4), stride));
                    [[a, b, b, b]; 2]
                }
            })
        }
    }

    /// The code of channel `c`; unless it has 8 bits, what stands above it is anything.
    ///
    /// # Safety
    /// The instruction set is there.
    #[inline(always)]
    unsafe fn at(&self, c: usize) -> S::I {
        let ([low, high], c8) = (&self.0, c % 8);
        // SAFETY: the caller's promise.
        unsafe {
            match B {
                8 => {
                    let word = if c < LANES {
                        low[c / 4]
                    } else {
                        high[c / 4 - 4]
                    };
                    S::and(S::shr_by(word, (c % 4 * 8) as u32), 0xff)
                }
                4 => S::shr_by(low[c / 8], (4 * c8) as u32),
                1 => S::shr_by(low[0], c as u32),
                // All words but the first begin a byte before their first code.
                3 => S::shr_by(low[c / 8], (3 * c8 + if c < 8 { 0 } else { 8 }) as u32),
                _ => S::shr_by(low[c / 16], (2 * (c % 16)) as u32),
            }
        }
    }

    /// The same of channels `first..first + 16` of one row.
    ///
    /// # Safety
    /// The instruction set is there; 2·B bytes at `p` may be read.
    #[inline(always)]
    unsafe fn of_row(p: *const u8) -> S::I {
        // SAFETY: the caller's promise.
        unsafe {
            if B == 8 {
                S::load_u8(p)
            } else {
                S::load_codes::<B>(p)
            }
        }
    }

    /// Codes as numbers.
    ///
    /// # Safety
    /// The instruction set is there.
    #[inline(always)]
    unsafe fn number(codes: S::I) -> S::F {
        // SAFETY: the caller's promise.
        unsafe {
            if B == 8 {
                S::to_f32(codes)
            } else {
                S::lookup(S::load(const { ramp::<B>() }.as_ptr()), codes)
            }
        }
    }
}

/// Groups along a row: codes of B bits, then the steps of all groups, then their zeros unless the grid is symmetric. A
/// value is code · step + zero, rounded once.
#[derive(Debug, Clone)]
pub struct Grid<const B: usize> {
    /// Channels of a group; beside them, what a channel is shifted by to be the number of its group (a division in the
    /// innermost loop would cost as much as all else).
    group: (usize, u32),
    /// The zero in steps, where it isn't stored.
    symmetric_zero: Option<f32>,
    /// How steps and zeros are stored.
    steps: Steps,
}

impl<const B: usize> Grid<B> {
    /// Groups of `group` channels; a symmetric grid's zero, in steps; how steps and zeros are stored.
    pub fn new(group: usize, symmetric_zero: Option<f32>, steps: Steps) -> Self {
        Self {
            group: (group, group.next_power_of_two().trailing_zeros()),
            symmetric_zero,
            steps,
        }
    }

    /// Where a channel's step and zero lie.
    #[inline(always)]
    fn places(&self, dim: usize, channel: usize) -> (usize, usize) {
        let shift = self.group.1;
        let (n_groups, group) = (((dim - 1) >> shift) + 1, channel >> shift);
        let (steps, bytes) = (dim * B / 8, self.steps.bytes());
        (steps + bytes * group, steps + bytes * (n_groups + group))
    }

    /// A channel's step and zero.
    ///
    /// # Safety
    /// As of [`Layout`].
    #[inline(always)]
    unsafe fn scales<S: Simd>(&self, row: *const u8, dim: usize, channel: usize) -> [S::F; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let (step, zero) = self.places(dim, channel);
            let step = self.steps.splat::<S>(Number::Step, row.add(step));
            let zero = match self.symmetric_zero {
                Some(zero) => S::mul(S::splat(zero), step),
                None => self.steps.splat::<S>(Number::Zero, row.add(zero)),
            };
            [step, zero]
        }
    }
}

// SAFETY (of all blocks below): the caller's promise, see the trait; offsets stay inside a row, and before steps lie codes.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
unsafe impl<const B: usize> Layout for Grid<B> {
    const STEP: usize = STEP;
    type Held<S: Simd> = (Codes<S, B>, S::F, S::F);

    fn row_bytes(&self, dim: usize) -> usize {
        let n_groups = dim.div_ceil(self.group.0);
        let n_numbers = if self.symmetric_zero.is_some() { 1 } else { 2 };
        dim * B / 8 + n_groups * n_numbers * self.steps.bytes()
    }
    fn fits(&self, dim: usize) -> bool {
        let (group, _) = self.group;
        dim.is_multiple_of(STEP)
            && (group >= dim || group.is_power_of_two() && group.is_multiple_of(STEP))
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> Self::Held<S> {
        unsafe {
            let (step, zero) = self.places(rows.dim, first);
            let (step, zero) = (row.add(step), row.add(zero));
            let step = self.steps.column::<S>(Number::Step, step, rows.stride);
            let zero = match self.symmetric_zero {
                Some(zero) => S::mul(S::splat(zero), step),
                None => self.steps.column::<S>(Number::Zero, zero, rows.stride),
            };
            (Codes::load(row.add(first * B / 8), rows.stride), step, zero)
        }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(
        &self,
        (codes, step, zero): &Self::Held<S>,
        _: usize,
        c: usize,
    ) -> S::F {
        unsafe { S::fma(Codes::<S, B>::number(codes.at(c)), *step, *zero) }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> S::F {
        unsafe {
            let [step, zero] = self.scales::<S>(row, rows.dim, first);
            let codes = Codes::<S, B>::of_row(row.add(first * B / 8));
            S::fma(Codes::<S, B>::number(codes), step, zero)
        }
    }
    #[inline(always)]
    unsafe fn run<S: Simd, const V: usize>(
        &self,
        row: *const u8,
        rows: Rows<'_>,
        first: usize,
    ) -> [S::F; V] {
        let shift = self.group.1;
        unsafe {
            let mut x = [S::splat(0.0); V];
            if B == 8 || V == 1 || first >> shift != (first + V * LANES - 1) >> shift {
                for (j, x) in x.iter_mut().enumerate() {
                    *x = self.values::<S>(row, rows, first + j * LANES);
                }
                return x;
            }
            // One group: the values of all its codes are at hand.
            let [step, zero] = self.scales::<S>(row, rows.dim, first);
            let table = S::fma(S::load(const { ramp::<B>() }.as_ptr()), step, zero);
            for (j, x) in x.iter_mut().enumerate() {
                let codes = row.add((first + j * LANES) * B / 8);
                *x = S::lookup(table, Codes::<S, B>::of_row(codes));
            }
            x
        }
    }
}

/// Codes of B bits of rows whose channels have a step and a zero each, which lie beside the rows. A value is
/// code · step + zero, rounded once.
#[derive(Debug, Clone, Copy)]
pub struct ByChannel<'a, const B: usize> {
    /// The values of all codes of each channel, `[dim][16]`; for scores of codes below 16.
    tables: &'a [f32],
    /// `[dim]`, both.
    grid: (&'a [f32], &'a [f32]),
}

impl<'a, const B: usize> ByChannel<'a, B> {
    /// From steps and zeros by channel; `tables` is working memory. Without it rows can be summed, but not scored.
    ///
    /// # Panics
    /// When `zeros` is shorter than `steps`.
    pub fn new(steps: &'a [f32], zeros: &'a [f32], tables: Option<&'a mut Vec<f32>>) -> Self {
        let grid = (steps, &zeros[..steps.len()]);
        let Some(tables) = tables.filter(|_| B < 8) else {
            return Self { tables: &[], grid };
        };
        let n = steps.len() * LANES;
        tables.reserve_exact(n.saturating_sub(tables.len()));
        tables.resize(n, 0.0);
        fill(const { &ramp::<B>() }, grid.0, grid.1, tables);
        Self { tables, grid }
    }
}

simd_kernel! {
    fn fill(ramp: &[f32; LANES], steps: &[f32], zeros: &[f32], tables: &mut [f32]) = fill_body;
}

/// # Safety
/// The instruction set of `S` is there.
#[inline(always)]
unsafe fn fill_body<S: Simd>(
    ramp: &[f32; LANES],
    steps: &[f32],
    zeros: &[f32],
    tables: &mut [f32],
) {
    let (tables, _) = tables.as_chunks_mut::<LANES>();
    for ((table, &step), &zero) in tables.iter_mut().zip(steps).zip(zeros) {
        // SAFETY: a table has 16 entries; the caller's promise.
        unsafe {
            let values = S::fma(S::load(ramp.as_ptr()), S::splat(step), S::splat(zero));
            S::store(table.as_mut_ptr(), values);
        }
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: offsets stay inside a row; the tables have an entry for each channel, or a kernel that needs them is never run.
unsafe impl<const B: usize> Layout for ByChannel<'_, B> {
    const STEP: usize = STEP;
    type Held<S: Simd> = Codes<S, B>;

    fn row_bytes(&self, dim: usize) -> usize {
        dim * B / 8
    }
    fn fits(&self, dim: usize) -> bool {
        dim.is_multiple_of(STEP)
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> Codes<S, B> {
        // One check for a step's channels.
        let (n_values, n_channels) = (self.tables.len(), self.grid.0.len());
        assert!(n_channels >= first + STEP && (B == 8 || n_values >= (first + STEP) * LANES));
        unsafe { Codes::load(row.add(first * B / 8), rows.stride) }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(&self, codes: &Codes<S, B>, first: usize, c: usize) -> S::F {
        unsafe {
            let (code, c) = (codes.at(c), first + c);
            if B < 8 {
                return S::lookup(S::load(self.tables.as_ptr().add(c * LANES)), code);
            }
            let (steps, zeros) = (self.grid.0.as_ptr(), self.grid.1.as_ptr());
            let (step, zero) = (S::splat(*steps.add(c)), S::splat(*zeros.add(c)));
            S::fma(Codes::<S, B>::number(code), step, zero)
        }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, _: Rows<'_>, first: usize) -> S::F {
        let (steps, zeros) = self.grid;
        let (steps, zeros) = (&steps[first..first + LANES], &zeros[first..first + LANES]);
        unsafe {
            let code = Codes::<S, B>::number(Codes::<S, B>::of_row(row.add(first * B / 8)));
            S::fma(code, S::load(steps.as_ptr()), S::load(zeros.as_ptr()))
        }
    }
}
