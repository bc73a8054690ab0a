//! Several caches behind one model step: each linear layer reads its weights once for the rows of all of them.
//!
//! Invariants: a member sees exactly the calls it would see alone, so what it stores and answers has the same bits; a
//! member that fails stops alone, and its rows go on as zeros that nobody reads.

use std::ops::Range;

use rayon::prelude::*;

use crate::cache::{
    Admission, Batch, CacheError, Continuation, KvCache, MemoryReport, Needs, Rows, SeqId, Trial,
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
    let most = (STEP_ROWS / members.len().max(1)).max(MEMBER_ROWS);
    let voyages = members
        .into_iter()
        .map(|member| Voyage {
            cache: member.cache,
            legs: vec![Leg {
                seq: member.seq,
                start: range.start,
                tokens: &ids[range.clone()],
            }],
            chunk: member.chunk.min(most),
        })
        .collect();
    let fed = sail_all(model, voyages)?;
    Ok(fed
        .into_iter()
        .map(|legs| Ok(legs?.swap_remove(0)))
        .collect())
}

/// One cache with several sequences, each on its way through tokens of its own.
pub struct Voyage<'a> {
    /// The cache.
    pub cache: &'a mut dyn KvCache,
    /// Its sequences, each at most once, in ascending order of their numbers.
    pub legs: Vec<Leg<'a>>,
    /// Most tokens of a sequence in a step.
    pub chunk: usize,
}

/// The tokens that one sequence is to take.
#[derive(Debug, Clone, Copy)]
pub struct Leg<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Its length before.
    pub start: usize,
    /// The tokens.
    pub tokens: &'a [u32],
}

/// Feeds every sequence of every cache its tokens. Gives the hidden rows of each leg, or why the cache stopped.
///
/// # Errors
/// The model's; a cache's error is its own.
pub fn sail_all(
    model: &dyn LanguageModel,
    voyages: Vec<Voyage<'_>>,
) -> Result<Vec<Result<Vec<Hidden>, CacheError>>, StepError> {
    let n_embd = model.spec().n_embd;
    let mut ships: Vec<Ship<'_>> = voyages.into_iter().map(|v| Ship::new(v, n_embd)).collect();
    loop {
        let mut batch = Batch::new();
        let mut tokens = Vec::new();
        for (i, ship) in ships.iter_mut().enumerate() {
            ship.load(i, &mut batch, &mut tokens);
        }
        if tokens.is_empty() {
            break;
        }
        let hidden = model.step(&batch, &tokens, &mut Fleet { ships: &mut ships })?;
        for ship in &mut ships {
            ship.unload(model, &hidden);
        }
    }
    Ok(ships.into_iter().map(Ship::land).collect())
}

/// A cache's part in the steps, and what became of it.
struct Ship<'a> {
    voyage: Voyage<'a>,
    /// Hidden rows of each leg.
    hidden: Vec<Hidden>,
    /// The cache's own part of the present step.
    alone: Batch,
    /// The legs of that part, with their own tokens and those that are tried out.
    aboard: Vec<(usize, [usize; 2])>,
    /// Row of the step at which its part starts.
    first_row: usize,
    failed: Option<CacheError>,
}

impl<'a> Ship<'a> {
    fn new(voyage: Voyage<'a>, n_embd: usize) -> Self {
        let empty = || Hidden {
            rows: Vec::new(),
            n_embd,
        };
        Self {
            hidden: voyage.legs.iter().map(|_| empty()).collect(),
            voyage,
            alone: Batch::new(),
            aboard: Vec::new(),
            first_row: 0,
            failed: None,
        }
    }

    /// Tokens of a leg that are through.
    fn done(&self, leg: usize) -> usize {
        self.hidden[leg].rows.len() / self.hidden[leg].n_embd
    }

    /// Puts its part of the next step behind those of the ships before it.
    fn load(&mut self, index: usize, batch: &mut Batch, tokens: &mut Vec<u32>) {
        self.alone = Batch::new();
        self.aboard.clear();
        self.first_row = tokens.len();
        if self.failed.is_some() {
            return;
        }
        for (i, leg) in self.voyage.legs.iter().enumerate() {
            let done = self.done(i);
            if done == leg.tokens.len() {
                continue;
            }
            let n = self
                .voyage
                .cache
                .step_limit(leg.seq, self.voyage.chunk)
                .min(leg.tokens.len() - done);
            let trial = match n {
                1 => self.voyage.cache.trial(leg.seq),
                _ => Trial::Nothing,
            };
            let (n_own, n_tried) = match trial {
                Trial::Nothing => (n, 0),
                Trial::Next => (0, 1),
                Trial::Token(_) => (n, 1),
            };
            let first = leg.start + done;
            let positions = first as u32..(first + n_own + n_tried) as u32;
            self.alone.push_with(leg.seq, positions.clone(), n_tried);
            // The model takes positions from the batch; whose they are is the ship's business.
            batch.push_with(SeqId(index as u32), positions, n_tried);
            tokens.extend_from_slice(&leg.tokens[done..done + n]);
            if let Trial::Token(guess) = trial {
                tokens.push(guess);
            }
            self.aboard.push((i, [n_own, n_tried]));
        }
    }

    /// Takes what the step gave: rows of its own tokens, and of one that was tried out the token that the model expects next.
    fn unload(&mut self, model: &dyn LanguageModel, step: &Hidden) {
        let mut row = self.first_row;
        for &(leg, [n_own, n_tried]) in &self.aboard {
            let rows = row * step.n_embd..(row + n_own) * step.n_embd;
            self.hidden[leg].rows.extend_from_slice(&step.rows[rows]);
            row += n_own;
            if n_tried > 0 && self.failed.is_none() {
                let mut logits = vec![0.0; model.spec().n_vocab];
                model.logits(step, row..row + 1, &mut logits);
                let likeliest = logits
                    .iter()
                    .zip(0..)
                    .max_by(|a, b| a.0.total_cmp(b.0).then(b.1.cmp(&a.1)));
                if let Some((_, token)) = likeliest {
                    self.voyage.cache.expect(self.voyage.legs[leg].seq, token);
                }
            }
            row += n_tried;
        }
    }

    fn land(self) -> Result<Vec<Hidden>, CacheError> {
        match self.failed {
            Some(error) => Err(error),
            None => Ok(self.hidden),
        }
    }

    /// Does its part of a call unless it failed before.
    fn sail(&mut self, work: impl FnOnce(&mut dyn KvCache, &Batch) -> Result<(), CacheError>) {
        if self.failed.is_none() {
            self.failed = work(self.voyage.cache, &self.alone).err();
        }
    }

    /// Its part of rows that lie back to back for the whole step; nothing of nothing.
    fn part<'r>(&self, rows: &'r [f32], batch: &Batch) -> &'r [f32] {
        let width = rows.len() / batch.n_rows();
        &rows[self.first_row * width..(self.first_row + self.alone.n_rows()) * width]
    }
}

/// The ships of one step, as one cache.
struct Fleet<'f, 'a> {
    ships: &'f mut [Ship<'a>],
}

impl<'a> Fleet<'_, 'a> {
    /// Those that take part in the step.
    fn at_sea(&mut self) -> Vec<&mut Ship<'a>> {
        let ships = self.ships.iter_mut();
        ships.filter(|ship| ship.alone.n_rows() > 0).collect()
    }
}

impl KvCache for Fleet<'_, '_> {
    fn needs(&self) -> Needs {
        Needs {
            hidden: self.ships.iter().any(|s| s.voyage.cache.needs().hidden),
            ..Needs::default()
        }
    }

    fn append(&mut self, layer: usize, batch: &Batch, rows: Rows<'_>) -> Result<(), CacheError> {
        self.at_sea().into_par_iter().for_each(|ship| {
            let hidden = match ship.voyage.cache.needs().hidden {
                true => ship.part(rows.hidden, batch),
                false => &[],
            };
            let rows = Rows {
                k: ship.part(rows.k, batch),
                v: ship.part(rows.v, batch),
                hidden,
                residual_norms: &[],
            };
            ship.sail(|cache, alone| cache.append(layer, alone, rows));
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
        let ships = self.at_sea();
        let mut left = out;
        let mut outs = Vec::with_capacity(ships.len());
        for ship in &ships {
            let (mine, later) = left.split_at_mut(ship.alone.n_rows() * width);
            outs.push(mine);
            left = later;
        }
        ships.into_par_iter().zip(outs).for_each(|(ship, out)| {
            let q = ship.part(q, batch);
            ship.sail(|cache, alone| cache.attend(layer, alone, q, out));
            if ship.failed.is_some() {
                out.fill(0.0);
            }
        });
        Ok(())
    }

    fn commit(&mut self, _: &Batch) -> Result<(), CacheError> {
        self.at_sea()
            .into_par_iter()
            .for_each(|ship| ship.sail(|cache, alone| cache.commit(alone)));
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
        Err(CacheError::UnknownSequence(seq.0))
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
