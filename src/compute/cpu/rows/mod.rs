//! Scores and weighted sums straight from rows as they are stored: a format says how 16 rows of a channel, or 16 channels
//! of a row, come out of its bytes ([`Layout`]), and the kernels here do the rest in registers.
//!
//! Invariants: a score is the chain of fused multiply-adds over channels in ascending order, a weighted sum the chain over
//! rows in ascending order, both over the values to which the format's own decoder decodes: to the bit what `gemm` gives
//! on decoded rows, for any number of rows, queries and lanes.
//!
//! ```text
//! keys      lanes are 16 rows:      for each channel c      score[query] += q[query][c] · k[c]
//! values    lanes are 16 channels:  for each row r          sum[query]   += weight[query][r] · v[r]
//! ```
//!
//! Keys that were stored before their rotation ([`Turn`]) are unpacked 32 rows at a time, turned where they stand and then
//! scored: the bits of rows that were decoded and rotated.

mod blocks;
mod floats;
mod grid;
mod plain;
mod scores;
mod steps;
mod sums;
mod turn;
mod unpack;

pub use blocks::{Bytes, Fives, Half, HalfAndMin, Nibbles, Power};
pub use floats::{Float8, Nvfp4};
pub use grid::{ByChannel, Grid};
pub use plain::{Bf16, F16, F32};
pub use steps::Steps;
pub use turn::{PairLayout, Turn};

use super::gemm::{Mat, MatMut};
use super::simd::{CACHE_LINE, LANES, Simd};

/// Bytes of rows during which all that is read next is asked for: it stays in a first-level cache beside them.
const SMALL: usize = 12 << 10;
/// Rows of values between two looks ahead.
const STRETCH: usize = 4;
/// Rows that pass together.
const STRIP: usize = 2 * LANES;
/// Queries that pass together.
const QUERIES: usize = 4;

/// Rows that lie back to back.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// Their bytes.
    pub bytes: &'a [u8],
    /// Bytes of a row.
    pub stride: usize,
    /// Channels of a row.
    pub dim: usize,
    /// What is read next, from elsewhere: its beginning is asked for meanwhile.
    pub ahead: &'a [u8],
    /// How keys are turned before they meet queries, if they are.
    pub turn: Option<Turn<'a>>,
}

/// Working memory of the kernels.
#[derive(Debug, Default)]
pub struct Room {
    /// A few rows, filled up to whole vectors.
    padding: Vec<u8>,
    /// Unpacked rows, `[channel][row]`.
    columns: Vec<f32>,
}

impl Room {
    /// Bytes of each buffer.
    pub fn sizes(&self) -> [usize; 2] {
        [
            self.padding.capacity(),
            self.columns.capacity() * size_of::<f32>(),
        ]
    }

    /// The last rows, fewer than [`STRIP`], and whatever makes them up to as many.
    fn padded<'a>(padding: &'a mut Vec<u8>, rows: Rows<'_>, first: usize) -> &'a [u8] {
        let size = padding.len().max(STRIP * rows.stride);
        padding.reserve_exact(size - padding.len());
        padding.resize(size, 0);
        let last = &rows.bytes[first * rows.stride..];
        padding[..last.len()].copy_from_slice(last);
        padding
    }

    /// The columns of [`STRIP`] rows of `dim` channels.
    fn strip(columns: &mut Vec<f32>, dim: usize) -> &mut [f32] {
        let size = columns.len().max(STRIP * dim);
        columns.reserve_exact(size - columns.len());
        columns.resize(size, 0.0);
        &mut columns[..STRIP * dim]
    }
}

impl Rows<'_> {
    fn n(&self) -> usize {
        self.bytes.len() / self.stride
    }

    /// What to ask for while the strip at row `at` is scored: as large a part of what lies elsewhere; of rows of many
    /// bytes, which that would be too early for, the next strip, and only at last the beginning of what lies elsewhere.
    fn after(&self, at: usize) -> &[u8] {
        if self.bytes.len() <= SMALL {
            return self.part_of_ahead(at);
        }
        let size = STRIP * self.stride;
        match self.bytes.get(at * self.stride + size..) {
            Some(later) if !later.is_empty() => &later[..size.min(later.len())],
            _ => &self.ahead[..size.min(self.ahead.len())],
        }
    }

    /// What to ask for while rows are summed: from which row on, what, and how much of it during each [`STRETCH`] of rows.
    /// Of rows of many bytes, those that come later come by themselves.
    fn after_sums(&self) -> (usize, &[u8], usize) {
        let n = self.n();
        if self.bytes.len() <= SMALL {
            return (0, self.ahead, (self.ahead.len() * STRETCH).div_ceil(n));
        }
        let beginning = &self.ahead[..self.ahead.len().min(STRIP * self.stride)];
        (n.saturating_sub(STRIP), beginning, STRETCH * self.stride)
    }

    /// As large a part of what lies elsewhere as a strip from row `at` on is of these.
    fn part_of_ahead(&self, at: usize) -> &[u8] {
        let (size, all) = (self.ahead.len(), self.n());
        &self.ahead[size * at / all..size * (at + STRIP).min(all) / all]
    }
}

/// Asks for every cache line, a few at a time between other work: all at once they would wait for each other. (Reading a
/// byte of each instead is slower here.)
#[inline(always)]
fn ask<S: Simd>(bytes: &[u8]) {
    for byte in bytes.iter().step_by(CACHE_LINE) {
        S::prefetch(byte);
    }
}

/// Asks for what will be read soon.
pub fn ask_for(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    ask::<super::simd::Avx2>(bytes);
    #[cfg(not(target_arch = "x86_64"))]
    ask::<super::simd::Lanes>(bytes);
}

/// A format's kernels, whatever its [`Layout`].
pub trait Kernel: Send + Sync {
    /// Whether rows of `dim` channels can be read as they are stored: if not, they are decoded first.
    fn takes(&self, dim: usize) -> bool;
    /// `out[query][row]` = the score of each row for each query, turned before if the rows are to be. `q`: `[query][dim]`.
    ///
    /// # Panics
    /// When `out` or the turn's angles are too few, or the layout doesn't take the rows.
    fn scores(&self, rows: Rows<'_>, q: &[f32], room: &mut Room, out: MatMut<'_>);
    /// `out[channel][row]` = the rows, turned if they are to be.
    ///
    /// # Panics
    /// As [`Kernel::scores`].
    fn columns(&self, rows: Rows<'_>, room: &mut Room, out: MatMut<'_>);
    /// `out[row][channel]` = the rows as they are stored.
    ///
    /// # Panics
    /// When `out` is too small, or the layout doesn't take the rows.
    fn decode(&self, rows: Rows<'_>, out: &mut [f32]);
    /// `out[query]` += Σ `weights[query][row]` · row. `out`: `[query][dim]`.
    ///
    /// # Panics
    /// When `weights` is too small, or the layout doesn't take the rows.
    fn weighted_sum(&self, rows: Rows<'_>, weights: Mat<'_>, out: &mut [f32]);
}

impl<L: Layout + Send + Sync> Kernel for L {
    fn takes(&self, dim: usize) -> bool {
        self.fits(dim)
    }
    fn scores(&self, rows: Rows<'_>, q: &[f32], room: &mut Room, out: MatMut<'_>) {
        scores::scores(self, rows, q, room, out);
    }
    fn columns(&self, rows: Rows<'_>, room: &mut Room, out: MatMut<'_>) {
        unpack::columns(self, rows, room, out);
    }
    fn decode(&self, rows: Rows<'_>, out: &mut [f32]) {
        unpack::decode(self, rows, out);
    }
    fn weighted_sum(&self, rows: Rows<'_>, weights: Mat<'_>, out: &mut [f32]) {
        sums::weighted_sum(self, rows, weights, out);
    }
}

/// How values come out of stored bytes, exactly as the format's decoder gives them.
///
/// # Safety
/// For all methods: the instruction set of `S` is there, and `row` names the first of [`Layout::row_bytes`] bytes (in
/// [`Layout::hold`] and [`Layout::rest`] of 16 rows, back to back) that may be read. Implementations read no others.
#[allow(
    clippy::missing_safety_doc,
    reason = "one promise for all: see the trait"
)]
pub unsafe trait Layout {
    /// Channels that come out of what is held at a time, at most 32.
    const STEP: usize;
    /// What is held of 16 rows: bytes on their way to values.
    type Held<S: Simd>: Copy;

    /// Bytes of a row that is read.
    fn row_bytes(&self, dim: usize) -> usize;
    /// Whether rows of `dim` channels can be read.
    fn fits(&self, dim: usize) -> bool {
        dim.is_multiple_of(Self::STEP) && dim.is_multiple_of(LANES)
    }
    /// Takes up channels `first..first + STEP` of 16 rows.
    unsafe fn hold<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> Self::Held<S>;
    /// Channel `c` of those held; `c` is known after inlining.
    unsafe fn channel<S: Simd>(&self, held: &Self::Held<S>, first: usize, c: usize) -> S::F;
    /// Channels `first..first + 16` of one row.
    unsafe fn values<S: Simd>(&self, row: *const u8, rows: Rows<'_>, first: usize) -> S::F;
    /// V times 16 channels of one row from `first` on.
    #[inline(always)]
    unsafe fn run<S: Simd, const V: usize>(
        &self,
        row: *const u8,
        rows: Rows<'_>,
        first: usize,
    ) -> [S::F; V] {
        // SAFETY: the caller's promise.
        unsafe {
            let mut x = [S::splat(0.0); V];
            for (j, x) in x.iter_mut().enumerate() {
                *x = self.values::<S>(row, rows, first + j * LANES);
            }
            x
        }
    }
    /// Channel `c` of 16 rows, past the last whole step.
    unsafe fn rest<S: Simd>(&self, _row: *const u8, _rows: Rows<'_>, _c: usize) -> S::F {
        // SAFETY: the caller's promise. A layout that fits whole steps alone is never asked.
        unsafe { S::splat(0.0) }
    }
    /// Channel `c` of one row, past the last whole vector.
    unsafe fn single(&self, _row: *const u8, _c: usize) -> f32 {
        0.0
    }
}

/// Does something for every channel of a step in order, unrolled: what a layout does for a channel depends on its number.
macro_rules! for_each_channel {
    ($layout:ident, $c:ident => $do:expr) => {
        $crate::compute::cpu::rows::for_each_channel!(@ $layout, $c => $do,
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31)
    };
    (@ $layout:ident, $c:ident => $do:expr, $($number:literal)*) => {
        $(if $number < $layout::STEP {
            let $c = $number;
            $do;
        })*
    };
}
use for_each_channel;
