//! Scores: lanes are rows, 32 at a time, to which one channel after the other is added.

use super::turn::{add, columns_strip, turned_strip};
use super::{LANES, Layout, QUERIES, Room, Rows, STRIP, Turn, ask, for_each_channel};
use crate::compute::cpu::gemm::MatMut;
use crate::compute::cpu::simd::{Simd, simd_kernel};

simd_kernel! {
    pub(super) fn scores<L: Layout>(layout: &L, rows: Rows<'_>, q: &[f32], room: &mut Room, out: MatMut<'_>) = scores_body;
}

/// # Safety
/// The instruction set of `S` is there.
#[inline(always)]
unsafe fn scores_body<S: Simd, L: Layout>(
    layout: &L,
    rows: Rows<'_>,
    q: &[f32],
    room: &mut Room,
    out: MatMut<'_>,
) {
    let (n, dim) = (rows.n(), rows.dim);
    let n_queries = q.len() / dim;
    assert!(layout.fits(dim) && layout.row_bytes(dim) == rows.stride);
    if n == 0 || n_queries == 0 {
        return;
    }
    assert!((n_queries - 1) * out.stride + n <= out.data.len());
    if let Some(turn) = rows.turn {
        turn.check(n, dim);
        // SAFETY: the instruction set is there, the layout takes the rows, and `out` and the angles suffice.
        return unsafe { turned::<S, L>(layout, (rows, turn), q, room, out) };
    }
    let mut first = 0;
    while first < n_queries {
        let left = n_queries - first;
        let width = left.div_ceil(left.div_ceil(S::ABREAST));
        let q = &q[first * dim..];
        let to = MatMut {
            data: &mut out.data[first * out.stride..],
            stride: out.stride,
        };
        // SAFETY: the instruction set is there; `q` and `to` have `width` rows, of `dim` and of at least n elements.
        unsafe {
            match width {
                4 if S::ABREAST >= 4 => score_pass::<S, L, 4>(layout, rows, q, room, to),
                3 if S::ABREAST >= 3 => score_pass::<S, L, 3>(layout, rows, q, room, to),
                2 if S::ABREAST >= 2 => score_pass::<S, L, 2>(layout, rows, q, room, to),
                _ => score_pass::<S, L, 1>(layout, rows, q, room, to),
            }
        }
        first += width;
    }
}

/// # Safety
/// The instruction set is there; `q` and `out` have Q rows, of `dim` and of at least n elements.
#[inline(always)]
unsafe fn score_pass<S: Simd, L: Layout, const Q: usize>(
    layout: &L,
    rows: Rows<'_>,
    q: &[f32],
    room: &mut Room,
    out: MatMut<'_>,
) {
    let n = rows.n();
    let is_short = n < LANES;
    let mut few = [[0.0f32; STRIP]; Q];
    // One place where a strip is scored, since it is a long piece of code.
    let (from, to, stride) = if is_short {
        let padded = Room::padded(&mut room.padding, rows, 0);
        (padded.as_ptr(), few.as_mut_ptr().cast(), STRIP)
    } else {
        (rows.bytes.as_ptr(), out.data.as_mut_ptr(), out.stride)
    };
    let last = n.saturating_sub(LANES);
    let mut r = 0;
    while n - r > LANES {
        // The second vector of a last strip that would be short has rows that were there before.
        let at = [r, (r + LANES).min(last)];
        // SAFETY: 16 rows can be read from each row of `at` on, and there is room for their scores.
        unsafe {
            let halves = at.map(|r| from.add(r * rows.stride));
            let scores = strip::<S, L, Q, 2>(layout, halves, rows, rows.after(r), q.as_ptr());
            store::<S, Q, 2>(&scores, at.map(|r| to.add(r)), stride);
        }
        r = n.min(r + STRIP);
    }
    if r < n {
        // A few that are left over are one vector's work.
        // SAFETY: 16 rows can be read from row `last` on, and there is room for their scores.
        unsafe {
            let rest = [from.add(last * rows.stride)];
            let scores = strip::<S, L, Q, 1>(layout, rest, rows, rows.after(r), q.as_ptr());
            store::<S, Q, 1>(&scores, [to.add(last)], stride);
        }
    }
    if is_short {
        for (i, few) in few.iter().enumerate() {
            out.data[i * out.stride..][..n].copy_from_slice(&few[..n]);
        }
    }
}

/// # Safety
/// The instruction set is there; 16 numbers may be written at each of `to`, and for each further query `stride` numbers on.
#[inline(always)]
unsafe fn store<S: Simd, const Q: usize, const H: usize>(
    scores: &[[S::F; Q]; H],
    to: [*mut f32; H],
    stride: usize,
) {
    for (to, scores) in to.into_iter().zip(scores) {
        for (i, &x) in scores.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { S::store(to.add(i * stride), x) };
        }
    }
}

/// The scores of H vectors of rows for Q queries: two make enough chains to keep the multipliers busy. `next` is asked for
/// meanwhile.
///
/// # Safety
/// The instruction set is there; 16 rows may be read at each of `halves`, `[Q][dim]` numbers at `q`.
#[inline(always)]
unsafe fn strip<S: Simd, L: Layout, const Q: usize, const H: usize>(
    layout: &L,
    halves: [*const u8; H],
    rows: Rows<'_>,
    mut next: &[u8],
    q: *const f32,
) -> [[S::F; Q]; H] {
    // SAFETY (all blocks): the caller's promise.
    unsafe {
        let mut acc = [[S::splat(0.0); Q]; H];
        let n_steps = rows.dim / L::STEP;
        let (whole, share) = (n_steps * L::STEP, next.len() / n_steps.max(1));
        let mut first = 0;
        while first < whole {
            let mut held = [layout.hold::<S>(halves[0], rows, first); H];
            for h in 1..H {
                held[h] = layout.hold::<S>(halves[h], rows, first);
            }
            let group = Group::<S, L, H> {
                layout,
                held,
                q: q.add(first),
                first,
                dim: rows.dim,
            };
            let (now, later) = next.split_at(share.min(next.len()));
            ask::<S>(now);
            next = later;
            if S::WIDE {
                for_each_channel!(L, c => group.add::<Q>(c, &mut acc));
            } else {
                for c in 0..L::STEP {
                    group.add::<Q>(c, &mut acc);
                }
            }
            first += L::STEP;
        }
        for c in whole..rows.dim {
            let k = halves.map(|row| layout.rest::<S>(row, rows, c));
            add::<S, Q, H>(k, q.add(c), rows.dim, &mut acc);
        }
        acc
    }
}

/// What is held of H vectors of rows, and the queries at its first channel.
struct Group<'a, S: Simd, L: Layout, const H: usize> {
    layout: &'a L,
    held: [L::Held<S>; H],
    q: *const f32,
    first: usize,
    dim: usize,
}

impl<S: Simd, L: Layout, const H: usize> Group<'_, S, L, H> {
    /// # Safety
    /// As in [`strip`].
    #[inline(always)]
    unsafe fn add<const Q: usize>(&self, c: usize, acc: &mut [[S::F; Q]; H]) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut k = [S::splat(0.0); H];
            for (k, held) in k.iter_mut().zip(&self.held) {
                *k = self.layout.channel::<S>(held, self.first, c);
            }
            add::<S, Q, H>(k, self.q.add(c), self.dim, acc);
        }
    }
}

/// Scores of rows that are turned before: unpacked, turned and scored 32 rows at a time.
///
/// # Safety
/// The instruction set is there; the layout takes the rows; there are angles for all of them, up to a whole strip; `out`
/// has a row of at least n elements for each query.
#[inline(always)]
unsafe fn turned<S: Simd, L: Layout>(
    layout: &L,
    (rows, turn): (Rows<'_>, Turn<'_>),
    q: &[f32],
    room: &mut Room,
    out: MatMut<'_>,
) {
    let (n, dim) = (rows.n(), rows.dim);
    let columns = Room::strip(&mut room.columns, dim);
    for r in (0..n).step_by(STRIP) {
        let n_here = STRIP.min(n - r);
        let row = if n_here == STRIP {
            rows.bytes[r * rows.stride..].as_ptr()
        } else {
            Room::padded(&mut room.padding, rows, r).as_ptr()
        };
        // SAFETY: 32 rows may be read at `row`, and `columns` takes them.
        unsafe {
            super::unpack::strip::<S, L>(
                layout,
                row,
                (rows, rows.after(r)),
                columns.as_mut_ptr(),
                STRIP,
            );
        }
        let to = MatMut {
            data: &mut out.data[r..],
            stride: out.stride,
        };
        // SAFETY: the caller's promise; `columns` holds 32 rows.
        unsafe { meet::<S>(columns, turn.from_row(r), (q, dim), to, n_here) };
    }
}

/// Scores of 32 rows in columns, of which `n` count, for any number of queries; the rows are turned in place before.
///
/// # Safety
/// As in [`turned`].
#[inline(always)]
unsafe fn meet<S: Simd>(
    columns: &mut [f32],
    mut turn: Option<Turn<'_>>,
    (q, dim): (&[f32], usize),
    out: MatMut<'_>,
    n: usize,
) {
    let n_queries = q.len() / dim;
    let width = n_queries.div_ceil(n_queries.div_ceil(S::ABREAST));
    let mut first = 0;
    for q in q.chunks(width * dim) {
        let width = q.len() / dim;
        let mut all = [[0.0f32; STRIP]; QUERIES];
        let (to, stride) = if n == STRIP {
            (out.data[first * out.stride..].as_mut_ptr(), out.stride)
        } else {
            (all.as_mut_ptr().cast(), STRIP)
        };
        let turn = turn.take();
        // SAFETY: `columns` holds 32 rows of `dim` channels, `q` `width` queries; `to` takes their scores.
        unsafe {
            match width {
                4 if S::ABREAST >= 4 => pass::<S, 4>(columns, turn, q, (to, stride)),
                3 if S::ABREAST >= 3 => pass::<S, 3>(columns, turn, q, (to, stride)),
                2 if S::ABREAST >= 2 => pass::<S, 2>(columns, turn, q, (to, stride)),
                _ => pass::<S, 1>(columns, turn, q, (to, stride)),
            }
        }
        if n < STRIP {
            for (i, all) in all.iter().enumerate().take(width) {
                out.data[(first + i) * out.stride..][..n].copy_from_slice(&all[..n]);
            }
        }
        first += width;
    }
}

/// Scores of 32 rows in columns, which are turned in place before if they have not been yet.
///
/// # Safety
/// The instruction set is there; `q` has Q rows; the turn has angles for 32 rows; 32 numbers may be
/// written at `to`, and for each further query `stride` numbers on.
#[inline(always)]
unsafe fn pass<S: Simd, const Q: usize>(
    columns: &mut [f32],
    turn: Option<Turn<'_>>,
    q: &[f32],
    (to, stride): (*mut f32, usize),
) {
    let dim = q.len() / Q;
    // SAFETY: the caller's promise.
    unsafe {
        let scores = match turn {
            Some(turn) => turned_strip::<S, Q>(columns, turn, q),
            None => columns_strip::<S, Q>(columns, 0..dim, q, [[S::splat(0.0); Q]; 2]),
        };
        store::<S, Q, 2>(&scores, [to, to.add(LANES)], stride);
    }
}
