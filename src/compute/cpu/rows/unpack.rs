//! Rows as numbers: in columns, for products with queries; in rows, as a format's own decoder gives them.

use super::{LANES, Layout, Room, Rows, STRIP, ask, for_each_channel};
use crate::compute::cpu::gemm::MatMut;
use crate::compute::cpu::simd::{Simd, simd_kernel};

simd_kernel! {
    pub(super) fn columns<L: Layout>(layout: &L, rows: Rows<'_>, room: &mut Room, out: MatMut<'_>) = columns_body;
}

simd_kernel! {
    pub(super) fn decode<L: Layout>(layout: &L, rows: Rows<'_>, out: &mut [f32]) = decode_body;
}

/// # Safety
/// The instruction set of `S` is there.
#[inline(always)]
unsafe fn columns_body<S: Simd, L: Layout>(
    layout: &L,
    rows: Rows<'_>,
    room: &mut Room,
    out: MatMut<'_>,
) {
    let (n, dim) = (rows.n(), rows.dim);
    assert!(layout.fits(dim) && layout.row_bytes(dim) == rows.stride);
    if n == 0 {
        return;
    }
    assert!((dim - 1) * out.stride + n <= out.data.len());
    if let Some(turn) = rows.turn {
        turn.check(n, dim);
    }
    for r in (0..n).step_by(STRIP) {
        let turn = rows.turn.and_then(|turn| turn.from_row(r));
        let left = n - r;
        if left >= STRIP {
            let to = &mut out.data[r..];
            // SAFETY: 32 rows lie at r, and each channel of `out` has room for them from r on.
            unsafe {
                let row = rows.bytes.as_ptr().add(r * rows.stride);
                strip::<S, L>(layout, row, (rows, &[]), to.as_mut_ptr(), out.stride);
                if let Some(turn) = turn {
                    turn.columns::<S>(to, out.stride);
                }
            }
            continue;
        }
        let row = Room::padded(&mut room.padding, rows, r).as_ptr();
        let columns = Room::strip(&mut room.columns, dim);
        // SAFETY: 32 rows lie at `row`, and `columns` has room for them.
        unsafe {
            strip::<S, L>(layout, row, (rows, &[]), columns.as_mut_ptr(), STRIP);
            if let Some(turn) = turn {
                turn.columns::<S>(columns, STRIP);
            }
        }
        for (c, column) in columns.chunks_exact(STRIP).enumerate() {
            out.data[c * out.stride + r..][..left].copy_from_slice(&column[..left]);
        }
    }
}

/// Unpacks 32 rows: channel c goes to `to[c * stride..]`. `next` is asked for meanwhile.
///
/// # Safety
/// The instruction set is there; the layout takes the rows, of which 32 may be read at `row`; for each channel 32 numbers
/// may be written.
#[inline(always)]
pub(super) unsafe fn strip<S: Simd, L: Layout>(
    layout: &L,
    row: *const u8,
    (rows, mut next): (Rows<'_>, &[u8]),
    to: *mut f32,
    stride: usize,
) {
    let n_steps = rows.dim / L::STEP;
    let (whole, share) = (n_steps * L::STEP, next.len() / n_steps.max(1));
    let mut first = 0;
    while first < whole {
        let (now, later) = next.split_at(share.min(next.len()));
        ask::<S>(now);
        next = later;
        for b in 0..STRIP / LANES {
            // SAFETY: the caller's promise.
            unsafe {
                let row = row.add(b * LANES * rows.stride);
                let held = layout.hold::<S>(row, rows, first);
                let to = to.add(first * stride + b * LANES);
                if S::WIDE {
                    for_each_channel!(L, c => S::store(to.add(c * stride), layout.channel::<S>(&held, first, c)));
                } else {
                    for c in 0..L::STEP {
                        S::store(to.add(c * stride), layout.channel::<S>(&held, first, c));
                    }
                }
            }
        }
        first += L::STEP;
    }
    for c in whole..rows.dim {
        for b in 0..STRIP / LANES {
            // SAFETY: the caller's promise.
            unsafe {
                let row = row.add(b * LANES * rows.stride);
                S::store(
                    to.add(c * stride + b * LANES),
                    layout.rest::<S>(row, rows, c),
                );
            }
        }
    }
}

/// # Safety
/// The instruction set of `S` is there.
#[inline(always)]
unsafe fn decode_body<S: Simd, L: Layout>(layout: &L, rows: Rows<'_>, out: &mut [f32]) {
    let dim = rows.dim;
    assert!(layout.fits(dim) && layout.row_bytes(dim) == rows.stride);
    assert!(rows.n() * dim <= out.len());
    let whole = dim / LANES * LANES;
    for (row, out) in rows
        .bytes
        .chunks_exact(rows.stride)
        .zip(out.chunks_exact_mut(dim))
    {
        for first in (0..whole).step_by(LANES) {
            // SAFETY: `row` is a whole row, `out` has its channels.
            unsafe {
                let x = layout.values::<S>(row.as_ptr(), rows, first);
                S::store(out.as_mut_ptr().add(first), x);
            }
        }
        for (c, x) in out.iter_mut().enumerate().skip(whole) {
            // SAFETY: `row` is a whole row.
            *x = unsafe { layout.single(row.as_ptr(), c) };
        }
    }
}
