//! Reading the blocks of rows whose keys may score highest (Quest): nothing leaves, less is read.
//!
//! A block of `page` neighbours keeps the least and the greatest value of each channel of its keys after RoPE. No key in
//! it scores more than Σ max(q·least, q·greatest), and the blocks with the highest bounds are read. With 3 channels:
//!
//! ```text
//! keys      ( 1, 4,-2) ( 3, 2,-1)      least (1, 2,-2)   greatest (3, 4,-1)
//! query     ( 2,-1, 1)                  bound  6 - 2 - 1 = 3       scores -4, 3
//! ```
//!
//! Invariants: a block's bounds are kept in f16 and follow from its rows alone; a token's own block is always read; which
//! blocks are read depends on the token's query, not on the tokens decoded beside it.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::super::RANGE;
use super::super::formats::Mask;

/// What is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Rows of a block; divides [`RANGE`].
    pub page: usize,
    /// Rows that a token reads of each KV head, its own block included.
    pub n_rows: usize,
    /// First layers, whose rows are all read.
    pub dense_layers: usize,
}

/// One KV head's bounds, and what its next token reads.
#[derive(Debug, Clone, Default)]
pub struct Head {
    /// `[block][least, greatest][head_dim]`.
    bounds: Vec<f16>,
    /// By range, rows to be read; all where it is empty.
    pub chosen: Vec<Mask>,
}

impl Head {
    /// Takes in keys after RoPE from `first` on, `[row][head_dim]`.
    pub fn take_in(&mut self, plan: Plan, first: u32, keys: &[f32], d: usize) {
        for (key, p) in keys.chunks_exact(d).zip(first as usize..) {
            let at = p / plan.page * 2 * d;
            if self.bounds.len() == at {
                let row = key.iter().map(|&x| f16::from_f32(x));
                if self.bounds.len() == self.bounds.capacity() {
                    self.bounds.reserve_exact(2 * d * (RANGE / plan.page));
                }
                self.bounds.extend(row.clone().chain(row));
                continue;
            }
            let (least, greatest) = self.bounds[at..at + 2 * d].split_at_mut(d);
            for ((least, greatest), &x) in least.iter_mut().zip(greatest).zip(key) {
                let x = f16::from_f32(x);
                *least = least.min(x);
                *greatest = greatest.max(x);
            }
        }
    }

    /// Chooses what a token at `position`, who sees rows from `first` on, reads. `q`: its queries after RoPE, `[query][head_dim]`.
    pub fn choose(&mut self, plan: Plan, (first, position): (u32, u32), q: &[f32], d: usize) {
        let own = position as usize / plan.page;
        let n_blocks = (plan.n_rows / plan.page).saturating_sub(1);
        let n_ranges = position as usize / RANGE + 1;
        self.chosen.clear();
        self.chosen.resize(n_ranges, 0);
        let mut bounds = self.upper_bounds(first as usize / plan.page..own, q, d);
        let order = |a: &(usize, f32), b: &(usize, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if n_blocks < bounds.len() {
            bounds.select_nth_unstable_by(n_blocks, order);
            bounds.truncate(n_blocks);
        }
        let block = Mask::MAX >> (RANGE - plan.page);
        for b in bounds.into_iter().map(|(b, _)| b).chain([own]) {
            let first = b * plan.page;
            self.chosen[first / RANGE] |= block << (first % RANGE);
        }
    }

    /// The bounds of some blocks, the largest over the queries.
    fn upper_bounds(&self, blocks: Range<usize>, q: &[f32], d: usize) -> Vec<(usize, f32)> {
        let mut pair = vec![0.0f32; 2 * d];
        let bound = |(b, block): (usize, &[f16])| {
            block.convert_to_f32_slice(&mut pair);
            let (least, greatest) = pair.split_at(d);
            let of_query = |q: &[f32]| {
                let channels = q.iter().zip(least).zip(greatest);
                channels.fold(0.0f32, |s, ((q, a), b)| s + (q * a).max(q * b))
            };
            let bounds = q.chunks_exact(d).map(of_query);
            (b, bounds.fold(f32::NEG_INFINITY, f32::max))
        };
        let all = self.bounds.chunks_exact(2 * d).enumerate();
        all.take(blocks.end).skip(blocks.start).map(bound).collect()
    }

    /// Goes back to `len` rows, a multiple of a block's.
    pub fn truncate(&mut self, plan: Plan, len: u32, d: usize) {
        self.bounds.truncate(len as usize / plan.page * 2 * d);
        self.chosen.clear();
    }

    /// Bytes of the bounds.
    pub fn bytes(&self) -> u64 {
        (self.bounds.capacity() * size_of::<f16>() + self.chosen.capacity() * size_of::<Mask>())
            as u64
    }

    /// Bytes of the bounds that a choice reads.
    pub fn read_bytes(&self) -> u64 {
        (self.bounds.len() * size_of::<f16>()) as u64
    }
}

impl Plan {
    /// Whether a layer's rows are chosen at all.
    pub fn acts_in(self, layer: usize) -> bool {
        layer >= self.dense_layers
    }
}
