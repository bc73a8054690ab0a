//! Codes of a few bits as one stream in order of channels, least significant bit first: integer grids along a row or along
//! a channel, and NVFP4; and 8-bit floats.

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

/// How steps and zeros are stored.
///
/// # Safety
/// For all methods: the instruction set of `S` is there, and `p` names a step or a zero (of one in each of 16 rows,
/// `stride` bytes apart, in the columns) of which [`Steps::BYTES`] bytes may be read.
#[allow(clippy::missing_safety_doc, reason = "one promise for all: see above")]
pub unsafe trait Steps: Send + Sync {
    /// Bytes of one.
    const BYTES: usize;
    /// The steps of 16 rows.
    unsafe fn step_column<S: Simd>(&self, p: *const u8, stride: usize) -> S::F;
    /// The zeros of 16 rows.
    unsafe fn zero_column<S: Simd>(&self, p: *const u8, stride: usize) -> S::F;
    /// A step in every lane.
    unsafe fn step<S: Simd>(&self, p: *const u8) -> S::F;
    /// A zero in every lane.
    unsafe fn zero<S: Simd>(&self, p: *const u8) -> S::F;
}

/// Halves.
#[derive(Debug, Clone, Copy)]
pub struct Halves;

/// A byte each, which stands for an entry of a table.
#[derive(Debug, Clone)]
pub struct ByteSteps {
    /// The step that each byte stands for.
    pub steps: Box<[f32; 256]>,
    /// The zero that each byte stands for.
    pub zeros: Box<[f32; 256]>,
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY (of all blocks below): the caller's promise, see the traits.
unsafe impl Steps for Halves {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn step_column<S: Simd>(&self, p: *const u8, stride: usize) -> S::F {
        unsafe { S::load_f16_column(p, stride) }
    }
    #[inline(always)]
    unsafe fn zero_column<S: Simd>(&self, p: *const u8, stride: usize) -> S::F {
        unsafe { S::load_f16_column(p, stride) }
    }
    #[inline(always)]
    unsafe fn step<S: Simd>(&self, p: *const u8) -> S::F {
        unsafe { S::splat_f16(p) }
    }
    #[inline(always)]
    unsafe fn zero<S: Simd>(&self, p: *const u8) -> S::F {
        unsafe { S::splat_f16(p) }
    }
}

/// Entries of a table for a byte of each of 16 rows.
///
/// # Safety
/// The instruction set is there; the bytes, `stride` apart, may be read.
#[inline(always)]
unsafe fn entries<S: Simd>(table: &[f32; 256], p: *const u8, stride: usize) -> S::F {
    let mut column = [0.0; LANES];
    for (r, x) in column.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *x = table[usize::from(unsafe { *p.add(r * stride) })];
    }
    // SAFETY: the column has 16 entries.
    unsafe { S::load(column.as_ptr()) }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: as above.
unsafe impl Steps for ByteSteps {
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn step_column<S: Simd>(&self, p: *const u8, stride: usize) -> S::F {
        unsafe { entries::<S>(&self.steps, p, stride) }
    }
    #[inline(always)]
    unsafe fn zero_column<S: Simd>(&self, p: *const u8, stride: usize) -> S::F {
        unsafe { entries::<S>(&self.zeros, p, stride) }
    }
    #[inline(always)]
    unsafe fn step<S: Simd>(&self, p: *const u8) -> S::F {
        unsafe { S::splat(self.steps[usize::from(*p)]) }
    }
    #[inline(always)]
    unsafe fn zero<S: Simd>(&self, p: *const u8) -> S::F {
        unsafe { S::splat(self.zeros[usize::from(*p)]) }
    }
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

/// NVFP4: E2M1 codes of a whole row, then an E4M3 scale for every 16 channels. A value is level · (scale · `tensor_scale`),
/// plus the channel's bias if there is one.
#[derive(Debug, Clone)]
pub struct Nvfp4<const BIASED: bool> {
    /// The level of each code.
    pub levels: [f32; LANES],
    /// A factor of all scales.
    pub tensor_scale: f32,
    /// By channel, if there is any.
    pub bias: Vec<f32>,
}

/// What makes the bits of an E4M3 number, moved into an f32's exponent and mantissa, that number: exact.
const E4M3_UNIT: f32 = f32::from_bits((127 + 120) << 23);

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: offsets stay inside a row.
unsafe impl<const BIASED: bool> Layout for Nvfp4<BIASED> {
    const STEP: usize = STEP;
    type Held<S: Simd> = ([S::I; 4], [S::F; 2]);

    fn row_bytes(&self, dim: usize) -> usize {
        dim / 16 * 9
    }
    fn fits(&self, dim: usize) -> bool {
        dim.is_multiple_of(STEP) && (!BIASED || self.bias.len() >= dim)
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(
        &self,
        row: *const u8,
        rows: Rows<'_>,
        first: usize,
    ) -> ([S::I; 4], [S::F; 2]) {
        unsafe {
            // The two bytes before a step's scales belong to the row, too; those after them may not.
            let at = rows.dim / 2 + first / 16 - 2;
            let scales = S::load_column(row.add(at), rows.stride);
            let scale = |bits: S::I| {
                let number = S::mul(S::from_bits(S::shl::<20>(bits)), S::splat(E4M3_UNIT));
                S::mul(number, S::splat(self.tensor_scale))
            };
            let scales = [
                scale(S::and(S::shr::<16>(scales), 0x7f)),
                scale(S::and(S::shr::<24>(scales), 0x7f)),
            ];
            (S::columns(row.add(first / 2), rows.stride), scales)
        }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(
        &self,
        (codes, scales): &([S::I; 4], [S::F; 2]),
        first: usize,
        c: usize,
    ) -> S::F {
        unsafe {
            let code = S::shr_by(codes[c / 8], (4 * (c % 8)) as u32);
            let level = S::lookup(S::load(self.levels.as_ptr()), code);
            let x = S::mul(level, scales[c / 16]);
            if BIASED {
                return S::add(x, S::splat(*self.bias.as_ptr().add(first + c)));
            }
            x
        }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> S::F {
        unsafe {
            let scale = u32::from(*row.add(rows.dim / 2 + first / 16)) & 0x7f;
            let step = f32::from_bits(scale << 20) * E4M3_UNIT * self.tensor_scale;
            let table = S::mul(S::load(self.levels.as_ptr()), S::splat(step));
            let x = S::lookup(table, S::load_codes::<4>(row.add(first / 2)));
            if BIASED {
                return S::add(x, S::load(self.bias.as_ptr().add(first)));
            }
            x
        }
    }
}

/// 8-bit floats with EXPONENT bits of exponent, all finite: a value is number · `down`, where `down` is the row's own first
/// four bytes if it is not given.
#[derive(Debug, Clone, Copy)]
pub struct Float8<const EXPONENT: u32> {
    /// The factor of all rows.
    pub down: Option<f32>,
}

impl<const EXPONENT: u32> Float8<EXPONENT> {
    /// As [`E4M3_UNIT`]: the exponent's bias becomes f32's.
    const UNIT: f32 = f32::from_bits((127 + 127 - ((1 << (EXPONENT - 1)) - 1)) << 23);

    #[inline(always)]
    fn codes_at(&self) -> usize {
        if self.down.is_some() { 0 } else { 4 }
    }

    /// The number in each lane's top byte, the bytes below it being anything.
    ///
    /// # Safety
    /// The instruction set of `S` is there.
    #[inline(always)]
    unsafe fn number<S: Simd>(top: S::I) -> S::F {
        // SAFETY: the caller's promise.
        unsafe {
            // The sign stays on top; exponent and mantissa move down to where an f32 has the last bits of its exponent.
            let bits = if EXPONENT == 4 {
                S::and(S::sar::<4>(top), 0x87f0_0000)
            } else {
                S::and(S::sar::<3>(top), 0x8fe0_0000)
            };
            S::mul(S::from_bits(bits), S::splat(Self::UNIT))
        }
    }
}

#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one promise for all: see the trait"
)]
// SAFETY: offsets stay inside a row.
unsafe impl<const EXPONENT: u32> Layout for Float8<EXPONENT> {
    const STEP: usize = LANES;
    type Held<S: Simd> = ([S::I; 4], S::F);

    fn row_bytes(&self, dim: usize) -> usize {
        self.codes_at() + dim
    }
    #[inline(always)]
    unsafe fn hold<S: Simd>(
        &self,
        row: *const u8,
        rows: Rows<'_>,
        first: usize,
    ) -> ([S::I; 4], S::F) {
        unsafe {
            let down = match self.down {
                Some(down) => S::splat(down),
                None => S::from_bits(S::load_column(row, rows.stride)),
            };
            let codes = row.add(self.codes_at() + first);
            (S::columns(codes, rows.stride), down)
        }
    }
    #[inline(always)]
    unsafe fn channel<S: Simd>(
        &self,
        (codes, down): &([S::I; 4], S::F),
        _: usize,
        c: usize,
    ) -> S::F {
        unsafe {
            let top = S::shl_by(codes[c / 4], (24 - 8 * (c % 4)) as u32);
            S::mul(Self::number::<S>(top), *down)
        }
    }
    #[inline(always)]
    unsafe fn values<S: Simd>(&self, row: *const u8, _: Rows<'_>, first: usize) -> S::F {
        unsafe {
            let down = match self.down {
                Some(down) => down,
                None => row.cast::<f32>().read_unaligned(),
            };
            let codes = S::load_u8(row.add(self.codes_at() + first));
            S::mul(Self::number::<S>(S::shl::<24>(codes)), S::splat(down))
        }
    }
}
