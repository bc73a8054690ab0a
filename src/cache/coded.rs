//! Encoded rows of one head on their way into a table, in parts by range.
//!
//! Invariant: a part's rows lie in one range of 128 positions, in order.

use super::RANGE;
use super::formats::{Format, Mask};

/// Encoded rows of one side of one head on their way into a table.
#[derive(Default)]
pub struct Coded {
    /// By range: which rows, and their bytes.
    pub parts: Vec<(u32, Mask, usize)>,
    /// Of all parts, back to back.
    pub bytes: Vec<u8>,
}

impl Coded {
    /// Takes in rows at ascending positions of one range.
    pub fn push(&mut self, positions: &[u32], bytes: &[u8]) {
        let range = positions[0] / RANGE as u32;
        let rows = positions
            .iter()
            .fold(0, |m: Mask, &p| m | 1 << (p as usize % RANGE));
        self.parts.push((range, rows, bytes.len()));
        self.bytes.extend_from_slice(bytes);
    }
}

/// Encodes rows of a row-wise format, in parts by range.
pub fn by_range(format: &Format, positions: &[u32], rows: &[f32]) -> Coded {
    let mut coded = Coded::default();
    let mut at = 0;
    for part in positions.chunk_by(|a, b| a / RANGE as u32 == b / RANGE as u32) {
        let n = part.len() * format.dim;
        coded.push(part, &format.encode(&rows[at..at + n]));
        at += n;
    }
    coded
}

/// Puts the page's first other row in the place of sinks, which nobody reads from here: their large values must not
/// widen the page's scales.
pub fn cover_sinks(positions: &[u32], n_sinks: u32, dim: usize, rows: &mut [f32]) {
    let n = positions.partition_point(|&p| p < n_sinks);
    if n == positions.len() {
        return;
    }
    let (sinks, others) = rows.split_at_mut(n * dim);
    for sink in sinks.chunks_exact_mut(dim) {
        sink.copy_from_slice(&others[..dim]);
    }
}
