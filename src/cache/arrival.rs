//! New rows and retention: their scores, and, while decoding, what leaves for them.
//!
//! Invariant: retention is asked once per position, in order, with the rows that lived then: a chunk equals decoding.

use super::RANGE;
use super::append::{Appender, NewRows};
use super::sequence::{HeadState, Phase};
use super::stage::{LeftAtPoint, LiveRows, Moment, NewRow, Retention, Threshold};

impl Appender<'_> {
    /// Lets retention score the new rows and, while decoding, evict after each position in order.
    pub(super) fn decide(
        &self,
        (h, head): (usize, &mut HeadState),
        phase: Phase,
        first: u32,
        (new, hidden): (&NewRows, &[f32]),
    ) {
        head.n_seen = first + (new.k.len() / self.geometry.head_dim) as u32;
        let Some(retain) = self.stages.retain.as_deref() else {
            return;
        };
        // What is scored by a whole context leaves at its compression point or not at all.
        let is_over = phase == Phase::Decoding && retain.acts_once();
        if self.rules[0].frozen_from.is_some() || retain.needs().context.any() || is_over {
            return;
        }
        let fresh = self.scores(retain, h, first, (new, hidden));
        let n_older = head.scores.len();
        if head.scores.capacity() < n_older + fresh.len() {
            let room = (n_older + fresh.len()).next_multiple_of(RANGE) - n_older;
            head.scores.reserve_exact(room);
        }
        head.scores.extend_from_slice(&fresh);
        if phase == Phase::Decoding && !all_stay(retain, head, first) {
            self.evict(retain, head, first, &fresh);
        }
    }

    /// Scores of new rows; none of a retention without scores.
    fn scores(
        &self,
        retain: &dyn Retention,
        kv_head: usize,
        first: u32,
        (new, hidden): (&NewRows, &[f32]),
    ) -> Vec<f32> {
        let d = self.geometry.head_dim;
        if !retain.is_scored() {
            return Vec::new();
        }
        let width = hidden.len() / (new.k.len() / d).max(1);
        let rows = new.k.chunks_exact(d).zip(new.v.chunks_exact(d));
        rows.enumerate()
            .map(|(i, (k, v))| {
                retain.score(NewRow {
                    layer: self.layer,
                    kv_head,
                    position: first + i as u32,
                    k,
                    v,
                    hidden: &hidden[i * width..(i + 1) * width],
                })
            })
            .collect()
    }

    /// Evicts after each new position, in order. `fresh`: the new rows' scores, which the head has already.
    fn evict(&self, retain: &dyn Retention, head: &mut HeadState, first: u32, fresh: &[f32]) {
        let scored = retain.is_scored();
        let mut positions = head.live_positions();
        let mut live = head.scores[..head.scores.len() - fresh.len()].to_vec();
        for (i, position) in (first..head.n_seen).enumerate() {
            // What the sliding window dropped before this position competes no more.
            let start = self.rules[0].window_start(position);
            let n_dropped = positions.partition_point(|&p| p < start);
            positions.drain(..n_dropped);
            if scored {
                live.drain(..n_dropped);
            }
            positions.push(position);
            live.extend(fresh.get(i));
            let rows = LiveRows {
                positions: &positions,
                scores: &live,
                n_seen: position + 1,
                n_reached: position + 1 - start,
                compressed: head.compressed.map(|(kept, of)| LeftAtPoint {
                    kept,
                    of,
                    since: position + 1 - self.rules[0].not_before.min(position + 1),
                }),
                moment: Moment::Step,
            };
            for i in retain.evict(rows).into_iter().rev() {
                head.dying.insert(positions[i], position + 1);
                positions.remove(i);
                if scored {
                    live.remove(i);
                }
            }
        }
    }
}

/// Whether rows are judged one by one, and none of those that cease to be among the newest in the steps from `first` on has a
/// score to leave for. Older ones were judged before.
fn all_stay(retain: &dyn Retention, head: &HeadState, first: u32) -> bool {
    let Some(Threshold { least, recent }) = retain.threshold() else {
        return false;
    };
    // The newest rows are all there, so that a position says where its score lies; one before them all was dropped.
    let score = |p: u32| {
        let back = (head.n_seen - p) as usize;
        Some(head.scores[head.scores.len().checked_sub(back)?])
    };
    let mut judged = first.saturating_sub(recent)..head.n_seen.saturating_sub(recent);
    !judged.any(|p| score(p).is_some_and(|s| s < least))
}
