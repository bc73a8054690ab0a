//! Integer codes of a few bits on grids along a row or along a channel, as one stream in order of channels, least
//! significant bit first.

use super::steps::Steps;
use super::{Layout, Rows};
use crate::compute::cpu::simd::{LANES, Simd, simd_kernel};

/// Channels that are held at a time: 16 bytes of 4-bit codes.
const STEP: usize = 32;

/// 0 to 15; with fewer bits the codes repeat, so that what stands above a code does not count.
const fn ramp(bits: usize) -> [f32; LANES] {
    let mut ramp = [0.0; LANES];
    let mut i = 0;
    while i < LANES {
        ramp[i] = (i & ((1 << bits) - 1)) as f32;
        i += 1;
    }
    ramp
}

/// Groups along a row: codes of B bits, then the steps of all groups, then their zeros unless the grid is symmetric. A
/// value is code · step + zero, rounded once.
#[derive(Debug, Clone, Copy)]
pub struct Grid<const B: usize, C> {
    /// Channels of a group.
    pub group: usize,
    /// The zero in steps, where it isn't stored.
    pub symmetric_zero: Option<f32>,
    /// How steps and zeros are stored.
    pub scales: C,
}

impl<const B: usize, C: Steps> Grid<B, C> {
    const RAMP: [f32; LANES] = ramp(if B < 4 { B } else { 4 });

    /// Where a channel's step and zero lie.
    #[inline(always)]
    fn places(&self, dim: usize, channel: usize) -> (usize, usize) {
        let (n_groups, group) = (dim.div_ceil(self.group), channel / self.group);
        let steps = dim * B / 8;
        (
            steps + C::BYTES * group,
            steps + C::BYTES * (n_groups + group),
        )
    }
}

// SAFETY: offsets stay inside a row; codes are read four bytes at a time, past whose end scales or, of 3-bit codes, two bytes of
// scales lie.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
unsafe impl<const B: usize, C: Steps> Layout for Grid<B, C> {
    const STEP: usize = STEP;
    type Held<S: Simd> = ([[S::I; 4]; 2], S::F, S::F);

    fn row_bytes(&self, dim: usize) -> usize {
        let n_groups = dim.div_ceil(self.group);
        let n_numbers = if self.symmetric_zero.is_some() { 1 } else { 2 };
        dim * B / 8 + n_groups * n_numbers * C::BYTES
    }
    fn fits(&self, dim: usize) -> bool {
        dim.is_multiple_of(STEP) && (self.group.is_multiple_of(STEP) || self.group >= dim)
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(
        &self,
        row: *const u8,
        rows: Rows<'_>,
        first: usize,
    ) -> ([[S::I; 4]; 2], S::F, S::F) {
        unsafe {
            let codes = row.add(first * B / 8);
            let column = |run: usize| S::load_column(codes.add(run * B), rows.stride);
            let codes = match B {
                8 => [
                    S::columns(codes, rows.stride),
                    S::columns(codes.add(LANES), rows.stride),
                ],
                4 => [S::columns(codes, rows.stride); 2],
                // Eight codes begin at a whole byte.
                _ => [[column(0), column(1), column(2), column(3)]; 2],
            };
            let (step, zero) = self.places(rows.dim, first);
            let step = self.scales.step_column::<S>(row.add(step), rows.stride);
            let zero = match self.symmetric_zero {
                Some(zero) => S::mul(S::splat(zero), step),
                None => self.scales.zero_column::<S>(row.add(zero), rows.stride),
            };
            (codes, step, zero)
        }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(
        &self,
        (codes, step, zero): &([[S::I; 4]; 2], S::F, S::F),
        _: usize,
        c: usize,
    ) -> S::F {
        unsafe {
            let code = if B == 8 {
                let code = S::shr_by(codes[c / 16][c % 16 / 4], (8 * (c % 4)) as u32);
                S::to_f32(S::and(code, 0xff))
            } else {
                let code = S::shr_by(codes[0][c / 8], (B * (c % 8)) as u32);
                S::lookup(S::load(Self::RAMP.as_ptr()), code)
            };
            S::fma(code, *step, *zero)
        }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> S::F {
        unsafe {
            let (step, zero) = self.places(rows.dim, first);
            let step = self.scales.step::<S>(row.add(step));
            let zero = match self.symmetric_zero {
                Some(zero) => S::mul(S::splat(zero), step),
                None => self.scales.zero::<S>(row.add(zero)),
            };
            let codes = row.add(first * B / 8);
            if B == 8 {
                return S::fma(S::to_f32(S::load_u8(codes)), step, zero);
            }
            let table = S::fma(S::load(Self::RAMP.as_ptr()), step, zero);
            S::lookup(table, S::load_codes::<B>(codes))
        }
    }
}

/// 4-bit codes of rows whose channels have a step and a zero each: what they are lies beside the rows.
#[derive(Debug, Clone, Copy)]
pub struct ChannelNibbles<'a> {
    /// The values of all codes of each channel, `[dim][16]`; for scores.
    tables: &'a [f32],
    /// `[dim]`, both; for weighted sums.
    grid: (&'a [f32], &'a [f32]),
}

impl<'a> ChannelNibbles<'a> {
    /// From steps and zeros by channel; `tables` is working memory.
    ///
    /// # Panics
    /// When `zeros` is shorter than `steps`.
    pub fn for_scores(steps: &[f32], zeros: &[f32], tables: &'a mut Vec<f32>) -> Self {
        let n = steps.len() * LANES;
        tables.reserve_exact(n.saturating_sub(tables.len()));
        tables.resize(n, 0.0);
        fill(steps, &zeros[..steps.len()], tables);
        Self {
            tables,
            grid: (&[], &[]),
        }
    }

    /// From steps and zeros by channel.
    ///
    /// # Panics
    /// When `zeros` is shorter than `steps`.
    pub fn for_sums(steps: &'a [f32], zeros: &'a [f32]) -> Self {
        Self {
            tables: &[],
            grid: (steps, &zeros[..steps.len()]),
        }
    }
}

simd_kernel! {
    fn fill(steps: &[f32], zeros: &[f32], tables: &mut [f32]) = fill_body;
}

/// # Safety
/// The instruction set of `S` is there.
#[inline(always)]
unsafe fn fill_body<S: Simd>(steps: &[f32], zeros: &[f32], tables: &mut [f32]) {
    const RAMP: [f32; LANES] = ramp(4);
    let (tables, _) = tables.as_chunks_mut::<LANES>();
    for ((table, &step), &zero) in tables.iter_mut().zip(steps).zip(zeros) {
        // SAFETY: a table has 16 entries; the caller's promise.
        unsafe {
            let values = S::fma(S::load(RAMP.as_ptr()), S::splat(step), S::splat(zero));
            S::store(table.as_mut_ptr(), values);
        }
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: offsets stay inside a row; the tables have an entry for each channel, or a kernel that needs them is never run.
unsafe impl Layout for ChannelNibbles<'_> {
    const STEP: usize = STEP;
    type Held<S: Simd> = [S::I; 4];

    fn row_bytes(&self, dim: usize) -> usize {
        dim / 2
    }
    fn fits(&self, dim: usize) -> bool {
        dim.is_multiple_of(STEP)
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> [S::I; 4] {
        // One check for a step's tables.
        assert!(self.tables.len() >= (first + STEP) * LANES);
        unsafe { S::columns(row.add(first / 2), rows.stride) }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(&self, codes: &[S::I; 4], first: usize, c: usize) -> S::F {
        unsafe {
            let code = S::shr_by(codes[c / 8], (4 * (c % 8)) as u32);
            S::lookup(S::load(self.tables.as_ptr().add((first + c) * LANES)), code)
        }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, _: Rows<'_>, first: usize) -> S::F {
        const RAMP: [f32; LANES] = ramp(4);
        let (steps, zeros) = self.grid;
        let (steps, zeros) = (&steps[first..first + LANES], &zeros[first..first + LANES]);
        unsafe {
            let code = S::lookup(
                S::load(RAMP.as_ptr()),
                S::load_codes::<4>(row.add(first / 2)),
            );
            S::fma(code, S::load(steps.as_ptr()), S::load(zeros.as_ptr()))
        }
    }
}
