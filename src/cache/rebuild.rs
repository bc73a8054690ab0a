//! Pages of rows coded together are coded anew, once few of their rows live: the holes' bytes fall, and the rows that live are
//! coded a second time, from what the first coding left of them.
//!
//! ```text
//! position   0 1 2 3 4 5 6 7
//! stored     x x x x x x x x      lives . x . . x . . x      3 of 8: no more than half
//! then       . x . . x . . x      one group of 3, scales of its own
//! ```
//!
//! Invariants: a page is coded anew at the end of the step in which the row left by which too few live; nothing but its own
//! rows decides on that, and on what it is then. Queries of a step see it as it was: a sequence that decodes takes steps of
//! one token ([`Stages::needs`](super::stages::Stages::needs)).

use super::coded::cover_sinks;
use super::formats::{Format, Mask};
use super::places::bits;
use super::stage::Codec;
use super::types::Rebuilt;

/// When pages are coded anew.
#[derive(Debug, Clone, Copy)]
pub struct Rebuild {
    /// The part of its stored rows, no more of which lives.
    pub part: f64,
    /// First positions of a sequence, which nobody reads from such a page.
    pub sinks: u32,
}

impl Rebuild {
    /// Whether rows stored together, of which some live, are to be coded anew.
    pub fn is_due(&self, format: &Format, (stored, live): (Mask, Mask)) -> bool {
        let (n_stored, n_live) = (stored.count_ones(), (stored & live).count_ones());
        matches!(format.codec, Codec::Pages(_)) && self.are_few(n_live, n_stored)
    }

    fn are_few(&self, n_live: u32, n_stored: u32) -> bool {
        // 0.29 · 100 is a little less than 29 in binary.
        let most = self.part * f64::from(n_stored) * (1.0 + 1e-12);
        n_live < n_stored && f64::from(n_live) <= most
    }

    /// The bytes of the rows of `stored` that live, coded together; `old`: the bytes of all. `first`: the position of the
    /// masks' first bit. Notes in `sum` what that changed.
    pub fn recoded(
        &self,
        format: &Format,
        (first, stored, live): (u32, Mask, Mask),
        old: &[u8],
        sum: &mut Rebuilt,
    ) -> Vec<u8> {
        let d = format.dim;
        let mut decoded = vec![0.0; stored.count_ones() as usize * d];
        format.decode(stored, old, &mut decoded);
        let rows = bits(stored).zip(decoded.chunks_exact(d));
        let rows = rows.filter(|(bit, _)| live >> bit & 1 == 1);
        let mut before: Vec<f32> = rows.flat_map(|(_, row)| row).copied().collect();
        let positions: Vec<u32> = bits(stored & live).map(|bit| first + bit as u32).collect();
        // The row that stood in the place of sinks may be one of those that left.
        cover_sinks(&positions, self.sinks, d, &mut before);
        let bytes = format.encode(&before);
        let mut after = vec![0.0; before.len()];
        format.decode(stored & live, &bytes, &mut after);
        let n_sinks = positions.partition_point(|&p| p < self.sinks);
        sum.n_pages += 1;
        for (&x, &y) in before.iter().zip(&after).skip(n_sinks * d) {
            let (x, y) = (f64::from(x), f64::from(y));
            sum.error_squares += (x - y) * (x - y);
            sum.squares += x * x;
        }
        bytes
    }
}

#[cfg(test)]
mod tests;
