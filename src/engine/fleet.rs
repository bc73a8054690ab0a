//! Several caches behind one model step: each linear layer reads its weights once for the rows of all of them.
//!
//! Invariants: a member sees exactly the calls it would see alone, so what it stores and answers has the same bits; a
//! member that fails stops alone, and its rows go on as zeros that nobody reads.

use std::ops::Range;

use rayon::prelude::*;

use crate::cache::{
    Admission, Batch, CacheError, Continuation, KvCache, MemoryReport, Needs, Rows, SeqId, Span,
};
use crate::model::transformer::{Hidden, LanguageModel, StepError};

/// Rows of a step that the linear layers work on at full speed.
const STEP_ROWS: usize = 1024;
/// Tokens of a member below which its cache is decoded more often than for a whole tile of queries.
const MEMBER_ROWS: usize = 128;

/// One cache with one sequence, on its way through the same tokens as the others.
pub struct Member<'a> {
    /// The cache.
    pub cache: &'a mut dyn KvCache,
    /// Its sequence.
    pub seq: SeqId,
    /// Most tokens of a step.
    pub chunk: usize,
}

/// A member with what became of it.
struct Ship<'a> {
    member: Member<'a>,
    at: usize,
    rows: Vec<f32>,
    failed: Option<CacheError>,
}

/// The members of one step, as one cache: sequence i of a batch is member i.
struct Fleet<'f, 'a> {
    ships: &'f mut [Ship<'a>],
}

/// Feeds `ids[range]` to all members, whose sequences are `range.start` long. Gives the hidden rows of each, or why it
/// stopped.
///
/// # Errors
/// The model's; a cache's error is its member's.
pub fn feed_all(
    model: &dyn LanguageModel,
    members: Vec<Member<'_>>,
    ids: &[u32],
    range: Range<usize>,
) -> Result<Vec<Result<Hidden, CacheError>>, StepError> {
    let n_embd = model.spec().n_embd;
    let most = (STEP_ROWS / members.len().max(1)).max(MEMBER_ROWS);
    let mut ships: Vec<Ship<'_>> = members
        .into_iter()
        .map(|member| Ship {
            member,
            at: range.start,
            rows: Vec::new(),
            failed: None,
        })
        .collect();
    loop {
        let mut batch = Batch::new();
        let mut tokens = Vec::new();
        for (i, ship) in ships.iter_mut().enumerate() {
            if ship.failed.is_some() || ship.at == range.end {
                continue;
            }
            let Member { cache, seq, chunk } = &ship.member;
            let n = cache
                .step_limit(*seq, (*chunk).min(most))
                .min(range.end - ship.at);
            batch.push(SeqId(i as u32), ship.at as u32..(ship.at + n) as u32);
            tokens.extend_from_slice(&ids[ship.at..ship.at + n]);
        }
        if tokens.is_empty() {
            break;
        }
        let hidden = model.step(&batch, &tokens, &mut Fleet { ships: &mut ships })?;
        for span in batch.spans() {
            let ship = &mut ships[span.seq.0 as usize];
            let first = span.first_row * n_embd;
            ship.rows
                .extend_from_slice(&hidden.rows[first..first + span.n_tokens() * n_embd]);
            ship.at += span.n_tokens();
        }
    }
    Ok(ships
        .into_iter()
        .map(|ship| match ship.failed {
            Some(error) => Err(error),
            None => Ok(Hidden {
                rows: ship.rows,
                n_embd,
            }),
        })
        .collect())
}

impl Ship<'_> {
    /// Does its part of a call unless it failed before.
    fn sail(
        &mut self,
        span: &Span,
        work: impl FnOnce(&mut dyn KvCache, &Batch) -> Result<(), CacheError>,
    ) {
        if self.failed.is_none() {
            let alone = Batch::single(self.member.seq, span.positions.clone());
            self.failed = work(self.member.cache, &alone).err();
        }
    }
}

impl<'a> Fleet<'_, 'a> {
    /// The ships of a batch's spans, which ascend.
    fn of<'s>(&'s mut self, batch: &'s Batch) -> Vec<(&'s mut Ship<'a>, &'s Span)> {
        let mut spans = batch.spans().iter().peekable();
        let mut all = Vec::with_capacity(batch.spans().len());
        for (i, ship) in self.ships.iter_mut().enumerate() {
            if let Some(span) = spans.next_if(|s| s.seq.0 as usize == i) {
                all.push((ship, span));
            }
        }
        all
    }
}

/// A span's part of rows that lie back to back for the whole batch; nothing of nothing.
fn part<'r>(rows: &'r [f32], batch: &Batch, span: &Span) -> &'r [f32] {
    let width = rows.len() / batch.n_rows();
    &rows[span.first_row * width..(span.first_row + span.n_tokens()) * width]
}

impl KvCache for Fleet<'_, '_> {
    fn needs(&self) -> Needs {
        Needs {
            hidden: self.ships.iter().any(|s| s.member.cache.needs().hidden),
            ..Needs::default()
        }
    }

    fn append(&mut self, layer: usize, batch: &Batch, rows: Rows<'_>) -> Result<(), CacheError> {
        self.of(batch).into_par_iter().for_each(|(ship, span)| {
            let hidden = match ship.member.cache.needs().hidden {
                true => part(rows.hidden, batch, span),
                false => &[],
            };
            let rows = Rows {
                k: part(rows.k, batch, span),
                v: part(rows.v, batch, span),
                hidden,
            };
            ship.sail(span, |cache, alone| cache.append(layer, alone, rows));
        });
        Ok(())
    }

    fn attend(
        &mut self,
        layer: usize,
        batch: &Batch,
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), CacheError> {
        let width = q.len() / batch.n_rows();
        let mut left = out;
        let mut outs = Vec::with_capacity(batch.spans().len());
        for span in batch.spans() {
            let (mine, later) = left.split_at_mut(span.n_tokens() * width);
            outs.push(mine);
            left = later;
        }
        self.of(batch)
            .into_par_iter()
            .zip(outs)
            .for_each(|((ship, span), out)| {
                let q = part(q, batch, span);
                ship.sail(span, |cache, alone| cache.attend(layer, alone, q, out));
                if ship.failed.is_some() {
                    out.fill(0.0);
                }
            });
        Ok(())
    }

    fn commit(&mut self, batch: &Batch) -> Result<(), CacheError> {
        self.of(batch)
            .into_par_iter()
            .for_each(|(ship, span)| ship.sail(span, |cache, alone| cache.commit(alone)));
        Ok(())
    }

    // What happens to a sequence outside a step is its own cache's business.

    fn admit(&mut self, seq: SeqId, _: Admission) -> Result<(), CacheError> {
        Err(CacheError::SequenceExists(seq.0))
    }

    fn compress(&mut self, seq: SeqId, _: Continuation) -> Result<(), CacheError> {
        Err(CacheError::UnknownSequence(seq.0))
    }

    fn fork(&mut self, from: SeqId, _: SeqId) -> Result<(), CacheError> {
        Err(CacheError::UnknownSequence(from.0))
    }

    fn truncate(&mut self, seq: SeqId, _: u32) -> Result<(), CacheError> {
        Err(CacheError::UnknownSequence(seq.0))
    }

    fn release(&mut self, seq: SeqId) -> Result<(), CacheError> {
        Err(CacheError::UnknownSequence(seq.0))
    }

    fn len(&self, seq: SeqId) -> Result<u32, CacheError> {
        match self.ships.get(seq.0 as usize) {
            Some(ship) => Ok(ship.at as u32),
            None => Err(CacheError::UnknownSequence(seq.0)),
        }
    }

    fn memory(&self) -> MemoryReport {
        // Each cache reports for itself.
        MemoryReport::default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cache::strategy::Strategy;
    use crate::cache::{Materials, StagedCache};
    use crate::compute::cpu::Cpu;
    use crate::model::geometry::geometry;
    use crate::model::tiny::{TinyConfig, TinyModel};
    use crate::model::transformer::Transformer;

    const SEQ: SeqId = SeqId(5);

    fn cache(model: &Transformer<Cpu>, encode: &str, n_positions: usize) -> StagedCache {
        let geometry = geometry(model.spec(), n_positions);
        let materials = Materials {
            geometry: &geometry,
            calibration: None,
            backing_dir: None,
        };
        let mut cache = StagedCache::new(&Strategy::bare(encode), materials).unwrap();
        cache.admit(SEQ, Admission::Streaming).unwrap();
        cache
    }

    #[test]
    fn members_have_the_bits_they_have_alone_and_fail_alone() {
        let model =
            Transformer::<Cpu>::load(Arc::new(TinyModel::new(&TinyConfig::default()))).unwrap();
        let ids: Vec<u32> = (0..60).map(|i| (i * 37 + i * i) % 256).collect();
        let plan = [
            ("f32", 60, 64),
            ("q8_0", 60, 1),
            ("f16", 25, 7),
            ("q8_0", 60, 64),
        ];
        let mut caches: Vec<StagedCache> = plan
            .iter()
            .map(|&(encode, n, _)| cache(&model, encode, n))
            .collect();
        let mut together: Vec<Vec<f32>> = vec![Vec::new(); plan.len()];
        let mut failed = [false; 4];
        for range in [0..20, 20..60] {
            let members = caches.iter_mut().zip(plan).zip(failed).filter(|(_, f)| !f);
            let members = members.map(|((cache, (_, _, chunk)), _)| Member {
                cache,
                seq: SEQ,
                chunk,
            });
            let mut fed = feed_all(&model, members.collect(), &ids, range)
                .unwrap()
                .into_iter();
            for (i, failed) in failed.iter_mut().enumerate().filter(|(_, f)| !**f) {
                match fed.next().unwrap() {
                    Ok(hidden) => together[i].extend(hidden.rows),
                    Err(e) => {
                        assert!(
                            matches!(e, CacheError::ContextLimit { limit: 25, .. }),
                            "{e}"
                        );
                        *failed = true;
                    }
                }
            }
        }
        assert_eq!(failed, [false, false, true, false]);
        for (i, &(encode, n, _)) in plan.iter().enumerate().filter(|(i, _)| !failed[*i]) {
            let mut alone = cache(&model, encode, n);
            let hidden = model
                .step(&Batch::single(SEQ, 0..60), &ids, &mut alone)
                .unwrap();
            assert_eq!(together[i], hidden.rows, "{encode}");
            let (a, b) = (alone.memory(), caches[i].memory());
            assert_eq!(
                (a.payload_bytes, a.rows_live),
                (b.payload_bytes, b.rows_live)
            );
        }
    }
}
