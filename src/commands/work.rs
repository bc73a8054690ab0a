//! The work of a run: every item of every text and protocol, all strategies in lock-step, each item journaled as it ends.
//! Protocols that differ in the continuation alone share an item's context and reference.
//!
//! Invariants: an item's records are appended together; a strategy that breaks fails its cell alone, and a second run
//! tries it again; a second run does only what the journal lacks, and ends with the same records.

use std::collections::BTreeSet;

use indicatif::ProgressBar;

use super::answers::{self, Judge};
use super::items::{Item, Items};
use super::session::Session;
use crate::bundle::Bundle;
use crate::cache::Continuation;
use crate::cache::strategy::Strategy;
use crate::config::{Cell, Protocol};
use crate::engine::clock::{Clock, SystemClock};
use crate::engine::sampler::Sampler;
use crate::eval::answers::{Asked, Branch, Generation};
use crate::eval::floor::Floor;
use crate::eval::lockstep::{Lockstep, Outcome, Outcomes};
use crate::eval::reading::Reading;
use crate::eval::records::{CellRecord, CellStatus, ItemRecord, PerToken, TextRecord};

/// Does all that is left to do; returns how many cells have failed.
///
/// # Errors
/// The reference breaks down, or the bundle can't be written.
pub fn work(session: &Session, bundle: &mut Bundle, bar: &ProgressBar) -> anyhow::Result<usize> {
    let clock = SystemClock::new();
    let mut failed = BTreeSet::new();
    for data in 0..session.plan.data.len() {
        for protocols in session.plan.protocols_by_items() {
            let start = clock.read();
            let group = Group {
                session,
                data,
                protocols,
            };
            group.run(bundle, &clock, (bar, &mut failed))?;
            let wall_s = clock.read().since(start).wall.as_secs_f64();
            group.close(bundle, &failed, wall_s)?;
        }
    }
    bar.finish_and_clear();
    Ok(failed.len())
}

/// The cells of one text under protocols that share their items.
struct Group<'a> {
    session: &'a Session,
    data: usize,
    protocols: Vec<usize>,
}

impl<'a> Group<'a> {
    fn cells(&self) -> impl Iterator<Item = &'a Cell> {
        self.session
            .cells
            .iter()
            .filter(|c| c.data == self.data && self.protocols.contains(&c.protocol))
    }

    fn items(&self) -> &'a Items {
        &self.session.items[self.data][self.protocols[0]]
    }

    fn run(
        &self,
        bundle: &mut Bundle,
        clock: &dyn Clock,
        (bar, failed): (&ProgressBar, &mut BTreeSet<String>),
    ) -> anyhow::Result<()> {
        let items = &self.items().items;
        let mut before = None;
        for (index, item) in items.iter().enumerate() {
            let left: Vec<&Cell> = self
                .cells()
                .filter(|c| !bundle.is_done(&c.id, index) && !failed.contains(&c.id))
                .collect();
            bar.set_message(item.doc.clone());
            if !left.is_empty() {
                failed.extend(self.item(bundle, clock, (index, item), (&left, &mut before))?);
            }
            bar.inc(self.protocols.len() as u64);
        }
        Ok(())
    }

    /// One item through all of these cells; returns the ids of those that failed.
    fn item(
        &self,
        bundle: &mut Bundle,
        clock: &dyn Clock,
        (index, item): (usize, &Item),
        (cells, before): (&[&Cell], &mut Option<Reading>),
    ) -> anyhow::Result<Vec<String>> {
        let s = self.session;
        let lockstep = Lockstep {
            model: s.model.as_ref(),
            geometry: &s.geometry,
            calibration: s.calibration.as_ref(),
            backing_dir: s.backing_dir.as_ref(),
            built: &s.built,
            chunk: s.plan.chunk,
            clock,
            repeat: Some(&s.repeat),
            // Times and sizes along the text are taken on its first item; more would cost more than they tell.
            latency_steps: if index == 0 { s.plan.latency_steps } else { 0 },
            memory_every: if index == 0 { s.plan.memory_every } else { 0 },
            layer_queries: if index == 0 {
                s.plan.layer_queries()
            } else {
                0
            },
        };
        let generate = self.items().generate.as_ref();
        let judge = generate.map(|g| Judge::new(g, &s.tokenizer)).transpose()?;
        let outcomes = self.outcomes(&lockstep, (index, item, before), (cells, judge.as_ref()))?;
        let (mut records, mut failed) = (Vec::new(), Vec::new());
        for (cell, outcome) in cells.iter().zip(outcomes) {
            let kept = outcome.map_err(|e| e.to_string()).and_then(|outcome| {
                let answers = answers::records(item, &outcome, judge.as_ref());
                let record = ItemRecord {
                    answers,
                    ..self.record(cell, (index, item), outcome)
                };
                // A number that is none would make the whole item unkeepable.
                record.check().map(|()| record).map_err(|e| e.to_string())
            });
            match kept {
                Ok(record) => records.push(record),
                Err(e) => {
                    let message = format!("{}: {e}", item.doc);
                    bundle.append_cell(&CellRecord {
                        id: cell.id.clone(),
                        status: CellStatus::Failed { message },
                        n_skipped: 0,
                        wall_s: 0.0,
                    })?;
                    failed.push(cell.id.clone());
                }
            }
        }
        bundle.append(&records)?;
        Ok(failed)
    }

    /// What the cells gave, in their order.
    fn outcomes(
        &self,
        lockstep: &Lockstep<'_>,
        (index, item, before): (usize, &Item, &mut Option<Reading>),
        (cells, judge): (&[&Cell], Option<&Judge<'_>>),
    ) -> anyhow::Result<Outcomes> {
        let plan = &self.session.plan;
        let strategy = |cell: &Cell| &plan.strategies[cell.strategy];
        let entrants: Vec<(&Strategy, Continuation)> = cells
            .iter()
            .map(|c| (strategy(c), plan.protocols[c.protocol].continuation()))
            .collect();
        match plan.protocols[self.protocols[0]] {
            Protocol::Stream { .. } => {
                let strategies: Vec<&Strategy> = entrants.iter().map(|e| e.0).collect();
                Ok(lockstep.stream(&strategies, &item.ids)?)
            }
            Protocol::CompressOnce { context, floor, .. } => {
                let floor = if floor { Floor::Run } else { Floor::Leave };
                Ok(lockstep.compress_once(&entrants, &item.ids, context, floor)?)
            }
            Protocol::Generate {
                tokens,
                temperature,
                top_p,
                ..
            } => {
                let generation = Generation {
                    max_tokens: tokens,
                    sampler: Sampler {
                        temperature,
                        top_p,
                        // Each item has noise of its own.
                        seed: plan.seed ^ (index as u64) << 32,
                    },
                    is_over: &|_| false,
                };
                Ok(lockstep.go_on(&entrants, &item.ids, generation)?)
            }
            Protocol::Tasks { .. } => {
                let questions: Vec<Vec<Branch<'_>>> = item
                    .questions
                    .iter()
                    .map(|q| {
                        let branches = q.branches.iter();
                        branches
                            .map(|b| Branch {
                                query: &b.query,
                                target: &b.target,
                            })
                            .collect()
                    })
                    .collect();
                let is_over = |ids: &[u32]| judge.is_some_and(|j| j.is_over(ids));
                let asked = Asked {
                    context: &item.ids,
                    questions: &questions,
                    generation: judge.map(|j| Generation {
                        max_tokens: j.max_tokens(),
                        sampler: Sampler::GREEDY,
                        is_over: &is_over,
                    }),
                };
                Ok(lockstep.answer(&entrants, asked, before)?)
            }
        }
    }

    /// The scored tokens.
    fn targets(&self, item: &Item, outcome: &Outcome) -> Vec<u32> {
        match self.session.plan.protocols[self.protocols[0]] {
            Protocol::Stream { .. } => item.ids[1..].to_vec(),
            Protocol::CompressOnce { context, .. } => item.ids[context + 1..].to_vec(),
            Protocol::Generate { .. } => {
                let written = outcome.written.as_ref();
                written.map_or_else(Vec::new, |w| w.tokens.clone())
            }
            Protocol::Tasks { .. } => {
                let branches = item.questions.iter().flat_map(|q| &q.branches);
                branches.flat_map(|b| b.target.iter().copied()).collect()
            }
        }
    }

    fn record(&self, cell: &Cell, (index, item): (usize, &Item), outcome: Outcome) -> ItemRecord {
        let s = self.session;
        let pick = |f: fn(&crate::eval::drift::TokenScore) -> f64| -> Vec<f32> {
            outcome.tokens.iter().map(|t| f(t) as f32).collect()
        };
        let tokens = PerToken {
            nll: pick(|t| t.nll),
            nll_reference: pick(|t| t.nll_reference),
            kld: pick(|t| t.kld),
            delta_p: pick(|t| t.delta_p),
        };
        let sum = |f: fn(&crate::eval::drift::TokenScore) -> f64| {
            outcome.tokens.iter().map(f).sum::<f64>()
        };
        ItemRecord {
            cell: cell.id.clone(),
            item: index,
            doc: item.doc.clone(),
            domain: s.plan.data[self.data]
                .domain
                .clone()
                .unwrap_or_else(|| "own".to_owned()),
            n_scored: outcome.tokens.len(),
            bytes_text: self
                .targets(item, &outcome)
                .into_iter()
                .filter_map(|t| s.tokenizer.token_bytes(t))
                .sum(),
            nll: sum(|t| t.nll),
            nll_reference: sum(|t| t.nll_reference),
            nll_floor: outcome.nll_floor,
            kld_sum: sum(|t| t.kld),
            top1_agree: outcome.tokens.iter().filter(|t| t.same_top).count(),
            delta_p_sum: sum(|t| t.delta_p),
            delta_p_sq_sum: sum(|t| t.delta_p * t.delta_p),
            tokens,
            memory: outcome.memory,
            memory_track: outcome.memory_track,
            layers: outcome.layers,
            latency: outcome.latency,
            traffic: outcome.traffic,
            answers: Vec::new(),
            text: outcome.written.map(|w| TextRecord {
                tokens: w.tokens,
                tokens_reference: w.tokens_reference,
                nll_own_reference: w.nll_own_reference,
            }),
            // The chunk and the threads change no score: left out, so that equal runs have equal records.
            effective: [("backend", format!("cpu {}", s.plan.arithmetic.name()))]
                .into_iter()
                .chain(item.depth.map(|d| ("depth", format!("{d:.4}"))))
                .map(|(key, value)| (key.to_owned(), value))
                .collect(),
        }
    }

    /// Records the end of every cell that has not failed in this run.
    fn close(
        &self,
        bundle: &mut Bundle,
        failed: &BTreeSet<String>,
        wall_s: f64,
    ) -> anyhow::Result<()> {
        for cell in self.cells().filter(|c| !failed.contains(&c.id)) {
            let is_done = |c: &CellRecord| c.id == cell.id && c.status == CellStatus::Done;
            if !bundle.ended().iter().any(is_done) {
                bundle.append_cell(&CellRecord {
                    id: cell.id.clone(),
                    status: CellStatus::Done,
                    n_skipped: self.items().skipped.len(),
                    wall_s,
                })?;
            }
        }
        Ok(())
    }
}
