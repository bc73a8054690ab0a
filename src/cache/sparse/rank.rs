//! Which stored rows a token's queries attend to most.
//!
//! Invariant: a row's rank depends on the queries and on what they see alone: the sum of its weights over the queries of
//! the group, ties by position; tasks are whole heads, whatever the number of threads.

use super::super::CacheError;
use super::super::RANGE;
use super::super::head_view::HeadView;
use super::super::places::bits;
use super::super::scratch::{Pool, Scratch, room};
use super::super::seen::Found;
use super::super::visibility::Class;
use crate::compute::cpu::team;
use crate::compute::cpu::vector::{exp_sum, max};

/// Rows that a token attends to most.
pub struct Ranked {
    /// By KV head, ascending.
    pub rows: Vec<Vec<u32>>,
    /// Working memory of the head that took most, besides that of attention.
    pub work_bytes: u64,
}

/// The `n` coded rows of each KV head with the most weight for a token at `position`. `q`: `[head][head_dim]`.
///
/// # Errors
/// Pages that can't be read.
pub fn most_attended(
    views: &[HeadView<'_>],
    position: u32,
    q: &[f32],
    n: usize,
    pool: &Pool,
) -> Result<Ranked, CacheError> {
    let Some(view) = views.first() else {
        return Ok(Ranked {
            rows: Vec::new(),
            work_bytes: 0,
        });
    };
    let width = view.geometry.group() * view.geometry.head_dim;
    let heads = views.iter().zip(q.chunks_exact(width));
    let ranked: Vec<(Vec<u32>, u64)> = team::try_map(heads, |(&view, q)| {
        let [mut asked, mut scratch] = [pool.take(), pool.take()];
        asked.start(view, position, q);
        let q = asked.q.each_ref().map(Vec::as_slice);
        let weights = scratch.coded_weights(view, position, q);
        pool.give(asked);
        pool.give(scratch);
        weights.map(|(weights, n_bytes)| (first(weights, n), n_bytes))
    })?;
    let (rows, n_bytes): (Vec<_>, Vec<_>) = ranked.into_iter().unzip();
    Ok(Ranked {
        rows,
        work_bytes: n_bytes.into_iter().max().unwrap_or(0),
    })
}

/// Coded rows by position with their weights, and the bytes that finding them took.
type Weights = (Vec<(u32, f32)>, u64);

/// The positions of the `n` largest weights, ascending.
fn first(mut weights: Vec<(u32, f32)>, n: usize) -> Vec<u32> {
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if n < weights.len() {
        weights.select_nth_unstable_by(n, order);
        weights.truncate(n);
    }
    let mut positions: Vec<u32> = weights.into_iter().map(|(p, _)| p).collect();
    positions.sort_unstable();
    positions
}

impl Scratch {
    /// Coded rows, or what is read in their place, with their weights summed over the queries.
    fn coded_weights(
        &mut self,
        view: HeadView<'_>,
        position: u32,
        q: [&[f32]; 2],
    ) -> Result<Weights, CacheError> {
        let n_queries = view.geometry.group();
        let mut scores: Vec<Vec<f32>> = vec![Vec::new(); n_queries];
        // Of each row that is seen: its position, if it is a coded one.
        let mut rows: Vec<Option<u32>> = Vec::new();
        let reach = view.reach(position);
        for range in view.first_range(position)..=position / RANGE as u32 {
            let mut found = Found::default();
            reach.find(range as usize, &mut found);
            let Found { keys, values } = found;
            let all = keys.iter().flatten().fold(0, |m, s| m | s.visible);
            if all == 0 {
                continue;
            }
            room(&mut self.weights, n_queries * RANGE);
            self.weights.resize(n_queries * RANGE, 0.0);
            let coded =
                |class| [&keys, &values].map(|s| s[class as usize].map_or(0, |s| s.visible));
            let ranked = [Class::Coded, Class::Fetched].map(coded);
            let ranked = ranked.as_flattened().iter().fold(0, |m, s| m | s);
            for (class, seen) in Class::READ.into_iter().zip(keys) {
                if let Some(seen) = seen {
                    self.score(view, class, seen, q, all)?;
                }
            }
            let n = all.count_ones() as usize;
            for (of_query, row) in scores.iter_mut().zip(self.weights.chunks_exact(RANGE)) {
                of_query.extend_from_slice(&row[..n]);
            }
            let first = range * RANGE as u32;
            let position = |slot: usize| (ranked >> slot & 1 == 1).then_some(first + slot as u32);
            rows.extend(bits(all).map(position));
        }
        let mut weights = vec![0.0f32; rows.len()];
        for of_query in &mut scores {
            let m = max(of_query);
            let l = exp_sum(of_query, m);
            for (w, x) in weights.iter_mut().zip(of_query) {
                *w += *x / l;
            }
        }
        let scores = scores.iter().map(|of_query| of_query.capacity());
        let n_floats = scores.sum::<usize>() + weights.capacity();
        let n_bytes = n_floats * size_of::<f32>() + rows.capacity() * size_of::<Option<u32>>();
        let coded = rows.into_iter().zip(weights);
        let coded: Vec<(u32, f32)> = coded.filter_map(|(p, w)| Some((p?, w))).collect();
        let n_bytes = n_bytes + coded.capacity() * size_of::<(u32, f32)>();
        Ok((coded, n_bytes as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_come_first_and_ties_go_to_the_earlier() {
        let weights = vec![(3, 0.5), (4, 0.1), (9, 0.5), (12, 0.7), (13, 0.5)];
        assert_eq!(first(weights.clone(), 3), [3, 9, 12]);
        assert_eq!(first(weights.clone(), 0), [] as [u32; 0]);
        assert_eq!(first(weights, 9), [3, 4, 9, 12, 13]);
    }
}
