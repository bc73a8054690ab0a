//! The conformance suite: what a cache must hold whatever its strategy, as checks that anyone can run on any strategy.
//!
//! Invariants: a check names no strategy and learns what to expect from the stages themselves; everything random follows from
//! one seed; a check that does not hold ends with a [`Failure`] that can be run again alone.

mod bytes;
mod codecs;
mod edges;
mod failure;
pub mod fixture;
mod history;
mod invariance;
mod reference;
mod rig;
mod store;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

pub use codecs::{Learned, registered_codec};
pub use failure::{Failure, Place, Stop, Verdict, shape};
pub use store::NoSlices;

use crate::cache::pages::PageStore;
use crate::cache::stage::{Codec, Kind, Side, StageError, Tolerance, Value, find};
use crate::cache::stages::Stages;
use crate::cache::strategy::{StageSpec, Strategy};
use crate::cache::{CacheError, Geometry, KvCache, Materials, StagedCache};
use crate::engine::clock::Clock;
use rig::Rig;
pub use rig::{batch_step, step};

/// What is under test. A strategy is one, with the stages and the cache that everyone gets; the suite's own tests put
/// faults into either.
pub trait Subject: Sync {
    /// The strategy.
    fn strategy(&self) -> &Strategy;

    /// Its stages.
    ///
    /// # Errors
    /// What can't be built on these layers.
    fn stages(&self, materials: Materials<'_>) -> Result<Stages, StageError> {
        Stages::build(self.strategy(), materials)
    }

    /// An empty cache over such stages.
    ///
    /// # Errors
    /// A tier that does not open.
    fn cache(
        &self,
        stages: Arc<Stages>,
        geometry: &Geometry,
        store: Box<dyn PageStore>,
    ) -> Result<Box<dyn KvCache>, CacheError> {
        Ok(Box::new(StagedCache::from_stages(stages, geometry, store)?))
    }

    /// What one of its codecs promises.
    ///
    /// # Errors
    /// No codec of that name.
    fn tolerance(&self, spec: &StageSpec) -> Result<Tolerance, StageError> {
        Ok(find(Kind::Encode, &spec.name)?.tolerance)
    }

    /// A new instance of one of its codecs.
    ///
    /// # Errors
    /// What the stage refuses.
    fn codec(&self, spec: &StageSpec, side: Side, learned: &Learned) -> Result<Codec, StageError> {
        registered_codec(spec, side, learned)
    }
}

impl Subject for Strategy {
    fn strategy(&self) -> &Strategy {
        self
    }
}

/// A subject on the layers that most checks use.
pub struct Context<'a> {
    rig: Rig<'a>,
    /// The same with a sliding window on its second layer, or why not.
    windowed: Result<Rig<'a>, String>,
}

/// Channels of a head.
const HEAD_DIM: usize = 32;

/// Channels of a head where a strategy refuses so few.
const LARGER: [usize; 2] = [64, 128];

/// Sliding window of the second layer where one is asked for.
const WINDOW: u32 = 50;

impl<'a> Context<'a> {
    /// Builds the subject.
    ///
    /// # Errors
    /// A strategy that can't be built on layers of any usual head size: the reason with the smallest.
    pub fn new(subject: &'a dyn Subject, seed: u64) -> Result<Self, CacheError> {
        let on = |head_dim| Rig::new(subject, fixture::geometry(4, 2, head_dim), seed);
        let mut rig = on(HEAD_DIM);
        for head_dim in LARGER {
            if rig.is_err() {
                rig = on(head_dim).or(rig);
            }
        }
        let rig = rig?;
        let mut geometry = rig.geometry.clone();
        if let Some(layer) = geometry.layers.last_mut() {
            layer.window = Some(WINDOW);
        }
        let windowed = Rig::new(subject, geometry, seed).map_err(|e| e.to_string());
        Ok(Self { rig, windowed })
    }

    /// Whether truncation must reach any length: nothing leaves, and each row is coded alone and at once.
    fn reaches_any_length(&self) -> bool {
        let s = &self.rig.stages;
        let page = |side| s.formats[0].coded_rows(0, side).0.page_rows();
        s.retain.is_none()
            && s.budget.is_none()
            && s.reading.is_none()
            && s.tail == [0, 0]
            && Side::BOTH.into_iter().all(|side| page(side) == 1)
    }
}

/// One check.
#[derive(Debug)]
pub struct Check {
    /// Its name.
    pub name: &'static str,
    /// What must hold.
    pub doc: &'static str,
    run: fn(&Context<'_>) -> Verdict,
}

/// Every check, in the order in which they run.
pub static CHECKS: &[Check] = &[
    Check {
        name: "oracle",
        doc: "attention over decoded rows in f64, by code of its own",
        run: edges::oracle,
    },
    Check {
        name: "exactness",
        doc: "bytes alone carry a row; lossless gives the bits back, lossy errs within its bound",
        run: codecs::exactness,
    },
    Check {
        name: "causality",
        doc: "a later token changes no earlier output",
        run: invariance::causality,
    },
    Check {
        name: "chunking",
        doc: "any chunks give the bits and bytes of token by token",
        run: invariance::chunking,
    },
    Check {
        name: "batching",
        doc: "a sequence in a ragged batch is as alone, to the bit",
        run: invariance::batching,
    },
    Check {
        name: "fork",
        doc: "a fork goes on as a sequence of its own, to the bit",
        run: history::fork,
    },
    Check {
        name: "truncate",
        doc: "going back is never having gone on, or the earliest length is named",
        run: history::truncation,
    },
    Check {
        name: "compress",
        doc: "a context compressed once is the same whatever its chunks",
        run: history::compression_point,
    },
    Check {
        name: "short",
        doc: "1, 2, 3 tokens and lengths around a page",
        run: edges::short,
    },
    Check {
        name: "ties",
        doc: "equal rows, zeros, tiny and huge ones: finite, and the same in any chunks",
        run: edges::ties,
    },
    Check {
        name: "non-finite",
        doc: "NaN and infinity are named by layer, head and position",
        run: edges::non_finite,
    },
    Check {
        name: "bytes",
        doc: "what is reported is what is allocated and what the format defines",
        run: bytes::accounting,
    },
    Check {
        name: "determinism",
        doc: "the same again gives the same bits, on 1, 2 and 3 threads",
        run: invariance::determinism,
    },
    Check {
        name: "device",
        doc: "a memory without host slices gives the same bits",
        run: invariance::device,
    },
    Check {
        name: "shapes",
        doc: "4Q/1KV, 9Q/3KV and 4Q/4KV heads of 20, 33, 64 and 80 channels",
        run: edges::shapes,
    },
];

/// The check of that name.
pub fn find_check(name: &str) -> Option<&'static Check> {
    CHECKS.iter().find(|c| c.name == name)
}

/// What a check found, and how long it took.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// The check's name.
    pub check: &'static str,
    /// What it found.
    pub verdict: Verdict,
    /// Wall time.
    pub wall: Duration,
}

impl Check {
    /// Runs it.
    pub fn run(&self, context: &Context<'_>) -> Verdict {
        (self.run)(context)
    }

    /// Runs and times it.
    pub fn timed(&self, context: &Context<'_>, clock: &dyn Clock) -> Finding {
        let start = clock.wall();
        let verdict = self.run(context);
        Finding {
            check: self.name,
            verdict,
            wall: clock.wall().saturating_sub(start),
        }
    }
}

/// Rows that may live at most in the checks' contexts of 150 to 300 tokens, by the parameter that says so.
const SMALL: [(&str, i64); 2] = [("recent", 24), ("tokens", 40)];

/// The strategy with row budgets that bite within the checks' short contexts, and what was changed for that.
pub fn with_small_budgets(strategy: &Strategy) -> (Strategy, Vec<String>) {
    let (mut strategy, mut changes) = (strategy.clone(), Vec::new());
    if let Some(retain) = &mut strategy.retain {
        for (name, small) in SMALL {
            if let Some(Value::Int(n)) = retain.params.0.get_mut(name)
                && *n > small
            {
                changes.push(format!("{name} = {small} in place of {n}"));
                *n = small;
            }
        }
    }
    (strategy, changes)
}
