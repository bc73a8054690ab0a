//! A run of at most 64 neighbouring channels of one row, each with its step and zero: the loop that both axes share.
//!
//! Invariant: a tile starts at a multiple of 64 channels, so its codes start at a whole byte.

use super::super::{bits, blocks};
use super::Grid;

/// Channels of a tile.
pub(super) const TILE: usize = 64;

/// Steps and zeros by channel.
pub(super) struct Tile {
    pub step: [f32; TILE],
    pub zero: [f32; TILE],
}

impl Tile {
    pub fn new() -> Self {
        Self {
            step: [0.0; TILE],
            zero: [0.0; TILE],
        }
    }
}

/// A row's codes are in tiles of this many bytes.
pub(super) fn tile_bytes(grid: Grid) -> usize {
    TILE / bits::RUN * grid.bits
}

/// The smaller of two numbers, in one instruction.
#[inline(always)]
pub(super) fn smaller(x: f32, y: f32) -> f32 {
    if x < y { x } else { y }
}

/// The larger of two numbers, in one instruction.
#[inline(always)]
pub(super) fn larger(x: f32, y: f32) -> f32 {
    if x > y { x } else { y }
}

#[inline(always)]
fn code(grid: Grid, x: f32, step: f32, zero: f32) -> u8 {
    // Every channel of a group whose step is 0 gets the lowest code.
    let step = if step == 0.0 { f32::INFINITY } else { step };
    let code = ((x - zero) / step).round_ties_even();
    blocks::low_byte(code.max(grid.low()).min(grid.high()))
}

/// Codes one tile of a row; B is the grid's bits.
#[inline(always)]
pub(super) fn encode<const B: usize>(grid: Grid, x: &[f32], tile: &Tile, codes: &mut [u8]) {
    let (step, _) = tile.step.as_chunks::<{ bits::RUN }>();
    let (zero, _) = tile.zero.as_chunks::<{ bits::RUN }>();
    let (whole, rest) = x.as_chunks::<{ bits::RUN }>();
    let (runs, _) = codes.as_chunks_mut::<B>();
    for (((x, out), s), z) in whole.iter().zip(runs).zip(step).zip(zero) {
        let mut q = [0; bits::RUN];
        for i in 0..bits::RUN {
            q[i] = code(grid, x[i], s[i], z[i]);
        }
        bits::pack::<B>(&q, out);
    }
    if !rest.is_empty() {
        let first = whole.len() * bits::RUN;
        let mut q = [0; bits::RUN];
        for (i, (q, &x)) in q.iter_mut().zip(rest).enumerate() {
            *q = code(grid, x, tile.step[first + i], tile.zero[first + i]);
        }
        let mut last = [0; B];
        bits::pack::<B>(&q, &mut last);
        let out = &mut codes[whole.len() * B..];
        out.copy_from_slice(&last[..out.len()]);
    }
}

/// Decodes one tile of a row; B is the grid's bits.
#[inline(always)]
pub(super) fn decode<const B: usize>(codes: &[u8], tile: &Tile, x: &mut [f32]) {
    let (step, _) = tile.step.as_chunks::<{ bits::RUN }>();
    let (zero, _) = tile.zero.as_chunks::<{ bits::RUN }>();
    let (whole, rest) = x.as_chunks_mut::<{ bits::RUN }>();
    let n_whole = whole.len();
    let (runs, _) = codes.as_chunks::<B>();
    // Whole arrays, one run at a time: over slices the compiler vectorises across runs, which is 8 times slower.
    for (r, x) in whole.iter_mut().enumerate() {
        *x = decode_run::<B>(&runs[r], &step[r], &zero[r]);
    }
    if !rest.is_empty() {
        let last = bits::last(&codes[n_whole * B..]);
        let values = decode_run::<B>(&last, &step[n_whole], &zero[n_whole]);
        rest.copy_from_slice(&values[..rest.len()]);
    }
}

#[inline(always)]
fn decode_run<const B: usize>(
    codes: &[u8; B],
    step: &[f32; bits::RUN],
    zero: &[f32; bits::RUN],
) -> [f32; bits::RUN] {
    let q = bits::unpack::<B>(codes);
    let mut x = [0.0; bits::RUN];
    for i in 0..bits::RUN {
        x[i] = (q[i] as i32 as f32).mul_add(step[i], zero[i]);
    }
    x
}
