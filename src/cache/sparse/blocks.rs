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
//! Invariants: a block's bounds are kept in f16, follow from its rows alone and go when the last of them has left (until then they
//! may be wider than what lives); a token's own block is always read; which blocks are read depends on the token's query, not on
//! the tokens decoded beside it.

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
    /// Blocks with bounds, ascending: those with rows that live.
    blocks: Vec<u32>,
    /// Theirs, `[least, greatest][head_dim]` each.
    bounds: Vec<f16>,
    /// By range, rows to be read; all where it is empty.
    pub chosen: Vec<Mask>,
}

impl Head {
    /// Takes in keys after RoPE from `first` on, `[row][head_dim]`.
    pub fn take_in(&mut self, plan: Plan, first: u32, keys: &[f32], d: usize) {
        for (key, p) in keys.chunks_exact(d).zip(first as usize..) {
            let block = (p / plan.page) as u32;
            if self.blocks.last() != Some(&block) {
                let row = key.iter().map(|&x| f16::from_f32(x));
                if self.bounds.len() == self.bounds.capacity() {
                    let n = RANGE / plan.page;
                    self.bounds.reserve_exact(2 * d * n);
                    self.blocks.reserve_exact(n);
                }
                self.blocks.push(block);
                self.bounds.extend(row.clone().chain(row));
                continue;
            }
            let at = self.bounds.len() - 2 * d;
            let (least, greatest) = self.bounds[at..].split_at_mut(d);
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
        let ids = self.blocks.iter().map(|&b| b as usize);
        let all = ids.zip(self.bounds.chunks_exact(2 * d));
        all.filter(|(b, _)| blocks.contains(b)).map(bound).collect()
    }

    /// Goes back to `len` rows, a multiple of a block's.
    pub fn truncate(&mut self, plan: Plan, len: u32, d: usize) {
        let end = len / plan.page as u32;
        let n = self.blocks.partition_point(|&b| b < end);
        self.blocks.truncate(n);
        self.bounds.truncate(n * 2 * d);
        self.chosen.clear();
    }

    /// Lets go of blocks whose rows have all left. `live`: by range, the rows that live.
    pub fn forget(&mut self, plan: Plan, live: impl Fn(u32) -> Mask, d: usize) {
        let block = Mask::MAX >> (RANGE - plan.page);
        let is_left = |&b: &u32| {
            let first = b as usize * plan.page;
            live((first / RANGE) as u32) & (block << (first % RANGE)) != 0
        };
        let left: Vec<bool> = self.blocks.iter().map(is_left).collect();
        if left.iter().all(|&l| l) {
            return;
        }
        let rows = self.bounds.chunks_exact(2 * d).zip(&left);
        let rows = rows.filter(|(_, left)| **left).flat_map(|(row, _)| row);
        self.bounds = rows.copied().collect();
        self.bounds.shrink_to_fit();
        let mut left = left.into_iter();
        self.blocks.retain(|_| left.next().unwrap_or(true));
        self.blocks.shrink_to_fit();
    }

    /// Bytes of the bounds.
    pub fn bytes(&self) -> u64 {
        let choice =
            self.blocks.capacity() * size_of::<u32>() + self.chosen.capacity() * size_of::<Mask>();
        (self.bounds.capacity() * size_of::<f16>() + choice) as u64
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
