//! Partial softmax sums of ranges, and how they are merged in order.
//!
//! Invariant: a total is one chain over the ranges in order, whatever number of them is merged in a call:
//! m' = max(m, mᵣ), then l' = lᵣ · e^(mᵣ − m') + l · e^(m − m'), and each sum likewise, the first product fused. A range of
//! which nothing was seen leaves everything as it was.
//!
//! ```text
//! range       0        1        2         (1 saw nothing)
//! m           3        –        5
//! total m     3        3        5         sums · e^(3 − 5) + those of range 2
//! ```

use super::vector::{CHANNELS, exp_nonpositive, multiversion};

/// Sizes of a range's partial results.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Queries.
    pub n_queries: usize,
    /// Channels of sums in the first space and in the second one.
    pub dims: [usize; 2],
}

/// A range's partial results.
#[derive(Debug)]
pub struct Partial<'a> {
    /// Which spaces are used, as numbers: nothing was seen if both are 0.
    pub used: &'a mut [f32],
    /// The largest score of each query.
    pub m: &'a mut [f32],
    /// The sum of each query's weights.
    pub l: &'a mut [f32],
    /// By space, `[query][dim]`.
    pub sums: [&'a mut [f32]; 2],
}

/// What partial results are merged into.
#[derive(Debug)]
pub struct Totals<'a> {
    /// The largest score of each query so far.
    pub m: &'a mut [f32],
    /// The sum of each query's weights.
    pub l: &'a mut [f32],
    /// By space, `[query][dim]`; zeros in a space that no range has used.
    pub sums: [&'a mut [f32]; 2],
}

impl Shape {
    /// Numbers of a range's partial results.
    pub fn size(self) -> usize {
        2 + self.n_queries * (2 + self.dims[0] + self.dims[1])
    }

    /// The parts of a range's partial results.
    pub fn split(self, partial: &mut [f32]) -> Partial<'_> {
        let n = self.n_queries;
        let (used, rest) = partial.split_at_mut(2);
        let (m, rest) = rest.split_at_mut(n);
        let (l, rest) = rest.split_at_mut(n);
        let (first, second) = rest.split_at_mut(n * self.dims[0]);
        Partial {
            used,
            m,
            l,
            sums: [first, second],
        }
    }
}

// Ranges and queries whose factors fill a vector.
const RANGES: usize = 4;
const QUERIES: usize = 4;

multiversion! {
    /// Merges the partial results of ranges, back to back in `parts`.
    ///
    /// # Panics
    /// When `to` is smaller than the shape.
    pub fn merge(shape: Shape, parts: &[f32], to: &mut Totals<'_>) = merge_body;
}

#[inline(always)]
fn merge_body(shape: Shape, parts: &[f32], to: &mut Totals<'_>) {
    for block in parts.chunks(RANGES * shape.size()) {
        let mut seen = Block {
            shape,
            parts: [&[]; RANGES],
            n: 0,
        };
        for part in block.chunks_exact(shape.size()) {
            if part[0] != 0.0 || part[1] != 0.0 {
                seen.parts[seen.n] = part;
                seen.n += 1;
            }
        }
        for first in (0..shape.n_queries).step_by(QUERIES) {
            let n = QUERIES.min(shape.n_queries - first);
            let [old, new] = factors(&seen, (first, n), to);
            for space in 0..2 {
                for query in 0..n {
                    sums(
                        &seen,
                        (first + query, space),
                        [&old[query], &new[query]],
                        to,
                    );
                }
            }
        }
    }
}

/// A few ranges of which something was seen.
struct Block<'a> {
    shape: Shape,
    parts: [&'a [f32]; RANGES],
    n: usize,
}

impl<'a> Block<'a> {
    #[inline(always)]
    fn parts(&self) -> impl Iterator<Item = (usize, &'a [f32])> {
        self.parts.into_iter().take(self.n).enumerate()
    }
}

/// Of up to [`QUERIES`] queries and [`RANGES`] ranges: what a total is multiplied by, and what a partial result is.
type Factors = [[[f32; RANGES]; QUERIES]; 2];

/// Merges m and l.
#[inline(always)]
fn factors(block: &Block<'_>, (first, n): (usize, usize), to: &mut Totals<'_>) -> Factors {
    let mut factors: Factors = [[[0.0; RANGES]; QUERIES]; 2];
    for i in 0..n {
        let most = &mut to.m[first + i];
        for (r, part) in block.parts() {
            let own = part[2 + first + i];
            let larger = if own > *most { own } else { *most };
            factors[0][i][r] = *most - larger;
            factors[1][i][r] = own - larger;
            *most = larger;
        }
    }
    for x in factors.as_flattened_mut().as_flattened_mut() {
        *x = exp_nonpositive(*x);
    }
    for i in 0..n {
        let l = &mut to.l[first + i];
        for (r, part) in block.parts() {
            let own = part[2 + block.shape.n_queries + first + i];
            *l = own.mul_add(factors[1][i][r], *l * factors[0][i][r]);
        }
    }
    factors
}

/// Merges the sums of one query in one space.
#[inline(always)]
fn sums(
    block: &Block<'_>,
    (query, space): (usize, usize),
    [old, new]: [&[f32; RANGES]; 2],
    to: &mut Totals<'_>,
) {
    let (n, dims) = (block.shape.n_queries, block.shape.dims);
    let dim = dims[space];
    let at = 2 + 2 * n + space * n * dims[0] + query * dim;
    let total = &mut to.sums[space][query * dim..(query + 1) * dim];
    let is_used = |part: &[f32]| part[space] != 0.0;
    if !block.parts().all(|(_, part)| is_used(part)) {
        for (r, part) in block.parts() {
            if is_used(part) {
                rescale_add(total, old[r], &part[at..at + dim], new[r]);
            } else if old[r] != 1.0 {
                total.iter_mut().for_each(|s| *s *= old[r]);
            }
        }
        return;
    }
    // A few channels stay in registers while all ranges pass.
    for (c, total) in total.chunks_mut(CHANNELS).enumerate() {
        let at = at + c * CHANNELS;
        let Ok(whole) = <&mut [f32; CHANNELS]>::try_from(&mut *total) else {
            for (r, part) in block.parts() {
                rescale_add(total, old[r], &part[at..at + total.len()], new[r]);
            }
            continue;
        };
        let mut held = *whole;
        for (r, part) in block.parts() {
            rescale_add(&mut held, old[r], &part[at..at + CHANNELS], new[r]);
        }
        *whole = held;
    }
}

#[inline(always)]
fn rescale_add(total: &mut [f32], old: f32, x: &[f32], new: f32) {
    for (s, &x) in total.iter_mut().zip(x) {
        *s = x.mul_add(new, *s * old);
    }
}

#[cfg(test)]
mod tests {
    use super::super::dispatch::tests::{at, levels};
    use super::super::vector::exp_pair;
    use super::*;

    /// One range after the other, one query after the other.
    fn plain(shape: Shape, parts: &mut [f32], to: &mut Totals<'_>) {
        for part in parts.chunks_exact_mut(shape.size()) {
            let part = shape.split(part);
            for i in 0..shape.n_queries {
                if part.used == [0.0; 2] {
                    continue;
                }
                let m = to.m[i].max(part.m[i]);
                let (old, new) = exp_pair(to.m[i] - m, part.m[i] - m);
                to.m[i] = m;
                to.l[i] = part.l[i].mul_add(new, to.l[i] * old);
                for (space, dim) in shape.dims.into_iter().enumerate() {
                    for c in i * dim..(i + 1) * dim {
                        let s = &mut to.sums[space][c];
                        *s = match part.used[space] {
                            0.0 => *s * old,
                            _ => part.sums[space][c].mul_add(new, *s * old),
                        };
                    }
                }
            }
        }
    }

    #[test]
    fn merging_at_once_is_merging_one_after_the_other() {
        for (n_queries, dims) in [(1, [5, 64]), (3, [64, 64]), (4, [20, 256]), (7, [100, 3])] {
            let shape = Shape { n_queries, dims };
            for n_ranges in [1, 3, 4, 11] {
                let mut parts: Vec<f32> = (0..n_ranges * shape.size())
                    .map(|i| ((i * 37 % 1009) as f32).mul_add(0.02, -9.0))
                    .collect();
                for (r, part) in parts.chunks_exact_mut(shape.size()).enumerate() {
                    // Nothing, one space, the other one, both; a first range that saw nothing.
                    let used = [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]][r % 4];
                    part[..2].copy_from_slice(&used);
                }
                let run = |merge: &dyn Fn(&mut [f32], &mut Totals<'_>)| {
                    let mut m = vec![f32::NEG_INFINITY; n_queries];
                    let mut l = vec![0.0; n_queries];
                    let mut sums = dims.map(|dim| vec![0.0; n_queries * dim]);
                    let [first, second] = &mut sums;
                    let mut to = Totals {
                        m: &mut m,
                        l: &mut l,
                        sums: [first, second],
                    };
                    merge(&mut parts.clone(), &mut to);
                    let all = m.iter().chain(&l).chain(sums.iter().flatten());
                    all.map(|x| x.to_bits()).collect::<Vec<_>>()
                };
                let want = run(&|parts, to| plain(shape, parts, to));
                assert!(n_ranges == 1 || want.iter().any(|&x| x != 0));
                for level in levels() {
                    let got = at(level, || run(&|parts, to| merge(shape, parts, to)));
                    assert_eq!(got, want, "{shape:?}, {n_ranges} ranges, {level:?}");
                }
            }
        }
    }
}
