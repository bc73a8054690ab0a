//! A strategy on a set of layers, and how tokens are fed to its caches.
//!
//! Invariant: a step never brings more tokens than the cache says equal decoding.

use std::ops::Range;
use std::sync::Arc;

use super::Subject;
use super::failure::{Scene, Stop};
use super::fixture::{Script, Source, calibration, script};
use crate::cache::pages::{HostStore, PageStore};
use crate::cache::stage::{Kind, find};
use crate::cache::stages::Stages;
use crate::cache::strategy::{StageSpec, Strategy};
use crate::cache::{
    Admission, Batch, CacheError, Geometry, KvCache, Materials, MemoryReport, Repetition, Rows,
    SeenLayer, SeqId,
};

/// Outputs, `[layer][token · head · channel]`.
pub type Outputs = Vec<Vec<f32>>;

/// A strategy built for a set of layers.
pub struct Rig<'a> {
    /// What is under test.
    pub subject: &'a dyn Subject,
    /// The layers.
    pub geometry: Geometry,
    /// The stages that all caches of the rig share.
    pub stages: Arc<Stages>,
    /// Seed of everything random.
    pub seed: u64,
}

impl<'a> Rig<'a> {
    /// Builds the strategy's stages, with a random calibration at hand.
    ///
    /// # Errors
    /// A stage that can't work on these layers.
    pub fn new(
        subject: &'a dyn Subject,
        geometry: Geometry,
        seed: u64,
    ) -> Result<Self, CacheError> {
        let stages = Arc::new(build(subject, &geometry)?);
        Ok(Self {
            subject,
            geometry,
            stages,
            seed,
        })
    }

    /// The same stages built once more: nothing that an instance remembers is there.
    pub fn rebuilt(&self) -> Result<Stages, Stop> {
        build(self.subject, &self.geometry).map_err(|e| {
            let scene = self.scene("building the stages a second time", "none");
            scene.refused(&e)
        })
    }

    /// An empty cache.
    pub fn cache(&self) -> Result<Box<dyn KvCache>, Stop> {
        self.cache_over(Arc::clone(&self.stages), Box::new(HostStore::default()))
    }

    /// An empty cache over some stages and a memory.
    pub fn cache_over(
        &self,
        stages: Arc<Stages>,
        store: Box<dyn PageStore>,
    ) -> Result<Box<dyn KvCache>, Stop> {
        let cache = self.subject.cache(stages, &self.geometry, store);
        cache.map_err(|e| self.scene("building a cache", "none").refused(&e))
    }

    /// Seeded rows of the usual size.
    pub fn script(&self, n_tokens: usize, stream: u64) -> Script {
        self.scaled_script(n_tokens, stream, 0.5)
    }

    /// Seeded rows of another size.
    pub fn scaled_script(&self, n_tokens: usize, stream: u64, scale: f32) -> Script {
        let source = Source {
            seed: self.seed,
            stream,
        };
        script(&self.geometry, n_tokens, source, scale)
    }

    /// Where a comparison of outputs from position 0 on stands.
    pub fn scene<'s>(&'s self, what: &'s str, tokens: &'s str) -> Scene<'s> {
        Scene {
            what,
            geometry: &self.geometry,
            tokens,
            first: 0,
        }
    }

    /// Layers times KV heads.
    pub fn n_tables(&self) -> u64 {
        let heads = self.geometry.layers.iter().map(|l| l.n_kv_heads as u64);
        heads.sum()
    }

    /// Feeds a whole script to a fresh sequence in chunks (cycled) and returns the outputs.
    pub fn run(
        &self,
        cache: &mut dyn KvCache,
        seq: SeqId,
        script: &Script,
        chunks: &[usize],
    ) -> Result<Outputs, Stop> {
        admit(self, cache, seq)?;
        self.resume(cache, seq, script, 0..script.n_tokens, chunks)
    }

    /// Goes on with tokens `range` of a script.
    pub fn resume(
        &self,
        cache: &mut dyn KvCache,
        seq: SeqId,
        script: &Script,
        range: Range<usize>,
        chunks: &[usize],
    ) -> Result<Outputs, Stop> {
        let mut all = vec![Vec::new(); self.geometry.layers.len()];
        let (mut at, mut i) = (range.start, 0);
        while at < range.end {
            let asked = chunks[i % chunks.len()].min(range.end - at);
            let n = cache.step_limit(seq, asked).clamp(1, asked);
            let outs = step(cache, &self.geometry, seq, script, at..at + n).map_err(|e| {
                let tokens = format!("{} tokens in chunks of {chunks:?}", script.n_tokens);
                let what = format!("the step of tokens {at} to {}", at + n);
                self.scene(&what, &tokens).refused(&e)
            })?;
            for (all, out) in all.iter_mut().zip(outs) {
                all.extend(out);
            }
            at += n;
            i += 1;
        }
        Ok(all)
    }

    /// Shows the first `n` tokens of a script, as far as the cache asks for that.
    pub fn show(
        &self,
        cache: &mut dyn KvCache,
        seq: SeqId,
        script: &Script,
        n: usize,
    ) -> Result<(), CacheError> {
        let layers = || self.geometry.layers.iter().enumerate();
        let repetitions: Vec<Repetition> =
            layers().map(|(l, g)| script.repetition(l, g, n)).collect();
        let seen: Vec<SeenLayer<'_>> = layers()
            .zip(&repetitions)
            .map(|((l, g), repetition)| script.seen(l, g, n, repetition))
            .collect();
        cache.show(seq, &seen)
    }

    /// A fresh cache after a whole script, and the outputs.
    pub fn fresh_run(
        &self,
        script: &Script,
        chunks: &[usize],
    ) -> Result<(Box<dyn KvCache>, Outputs), Stop> {
        let mut cache = self.cache()?;
        let out = self.run(cache.as_mut(), SeqId(0), script, chunks)?;
        Ok((cache, out))
    }
}

fn build(subject: &dyn Subject, geometry: &Geometry) -> Result<Stages, CacheError> {
    let calibration = learns(subject.strategy()).then(|| calibration(geometry));
    let materials = Materials {
        geometry,
        calibration: calibration.as_ref(),
        backing_dir: None,
    };
    Ok(subject.stages(materials)?)
}

/// Whether a stage of the strategy asks for a calibration.
fn learns(strategy: &Strategy) -> bool {
    let maps = strategy.project_k.iter().chain(&strategy.project_v);
    let formats = strategy.levels().flat_map(|(k, v)| [k, v]);
    let stages = (strategy.retain.iter().map(|s| (Kind::Retain, s)))
        .chain(maps.map(|s| (Kind::Project, s)))
        .chain(formats.map(|s| (Kind::Encode, s)));
    let asks = |(kind, spec): (Kind, &StageSpec)| {
        find(kind, &spec.name).is_ok_and(|def| (def.calibrated)(&spec.params))
    };
    stages.into_iter().any(asks)
}

/// Starts a sequence that decodes.
pub fn admit(rig: &Rig<'_>, cache: &mut dyn KvCache, seq: SeqId) -> Result<(), Stop> {
    let done = cache.admit(seq, Admission::Streaming);
    done.map_err(|e| rig.scene("admitting a sequence", "none").refused(&e))
}

/// Feeds tokens `range` of a script as one step and returns every layer's attention output.
///
/// # Errors
/// What the cache refuses.
pub fn step(
    cache: &mut dyn KvCache,
    geometry: &Geometry,
    seq: SeqId,
    script: &Script,
    range: Range<usize>,
) -> Result<Outputs, CacheError> {
    batch_step(cache, geometry, &[(seq, script, range)])
}

/// Feeds tokens of several sequences as one step: `[layer]` of outputs, sequences back to back.
///
/// # Errors
/// What the cache refuses.
pub fn batch_step(
    cache: &mut dyn KvCache,
    geometry: &Geometry,
    members: &[(SeqId, &Script, Range<usize>)],
) -> Result<Outputs, CacheError> {
    let mut batch = Batch::new();
    for (seq, _, range) in members {
        batch.push(*seq, range.start as u32..range.end as u32);
    }
    let mut outs = Vec::new();
    for (l, g) in geometry.layers.iter().enumerate() {
        let gather = |pick: &dyn Fn(&Script) -> &[f32], width: usize| -> Vec<f32> {
            let rows = |(_, script, range): &(SeqId, &Script, Range<usize>)| {
                pick(script)[range.start * width..range.end * width].to_vec()
            };
            members.iter().flat_map(rows).collect()
        };
        let (kv, qw) = (g.n_kv_heads * g.head_dim, g.n_heads * g.head_dim);
        let (k, v) = (gather(&|s| &s.k[l], kv), gather(&|s| &s.v[l], kv));
        let q = gather(&|s| &s.q[l], qw);
        let rows = Rows {
            k: &k,
            v: &v,
            // See `Script::hidden`.
            hidden: if cache.needs().hidden { &q } else { &[] },
            residual_norms: &[],
        };
        cache.append(l, &batch, rows)?;
        let mut out = vec![0.0; q.len()];
        cache.attend(l, &batch, &q, &mut out)?;
        outs.push(out);
    }
    cache.commit(&batch)?;
    Ok(outs)
}

/// What is stored, apart from page tables (which keep the room they once needed) and scratch.
pub fn stored(m: &MemoryReport) -> [(&'static str, u64); 7] {
    [
        ("payload_bytes", m.payload_bytes),
        ("scale_bytes", m.scale_bytes),
        ("exact_bytes", m.exact_bytes),
        ("slack_bytes", m.slack_bytes),
        ("backing_bytes", m.backing_bytes),
        ("rows_live", m.rows_live),
        ("rows_seen", m.rows_seen),
    ]
}
