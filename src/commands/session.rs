//! What a run works on: the plan checked against its model, the model loaded, the texts cut into items.
//!
//! Invariant: opening a session does no work that counts; all that can be refused is refused here.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};

use super::items::{Items, Source, cut, starts_with_bos};
use super::{limits, lookup};
use crate::bundle::header::{
    self, CellHeader, Cut, DataHeader, ModelHeader, ProtocolHeader, ProtocolKind, RunHeader,
};
use crate::cache::stage::Calibration;
use crate::cache::strategy::Strategy;
use crate::cache::{Admission, Built, Geometry, KvCache, Materials, SeqId, Shelf, StagedCache};
use crate::cli::RunArgs;
use crate::compute::cpu::Cpu;
use crate::config::{Cell, NUMBERS, Plan, Protocol, is_calibrated};
use crate::data::Lookup;
use crate::engine::repetition;
use crate::engine::{Calibrator, Recording, RepeatPrompt, prefill};
use crate::model;
use crate::model::geometry::geometry;
use crate::model::source::{FetchProgress, ModelDir, resolve};
use crate::model::tokenizer::Tokenizer;
use crate::model::transformer::{LanguageModel, Transformer};

/// Tokens of one calibration window.
pub(super) const CALIBRATION_WINDOW: usize = 1024;

/// Everything a run needs.
pub struct Session {
    /// The experiment.
    pub plan: Plan,
    /// Its cells.
    pub cells: Vec<Cell>,
    /// The model.
    pub model: Box<dyn LanguageModel>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its attention layers.
    pub geometry: Geometry,
    /// Statistics for stages that learn.
    pub calibration: Option<Calibration>,
    /// `[data][protocol]`.
    pub items: Vec<Vec<Items>>,
    /// Where backing files go.
    pub backing_dir: Option<PathBuf>,
    /// What asks the model to repeat a context.
    pub repeat: RepeatPrompt,
    /// Strategies built so far.
    pub built: Built,
    model_sha256: String,
}

impl Session {
    /// Finds, checks and loads all that the plan names.
    ///
    /// # Errors
    /// A model or text that can't be had, lengths that do not fit, a stage that can't be built for this model.
    pub fn open(plan: Plan, args: &RunArgs, progress: &dyn FetchProgress) -> anyhow::Result<Self> {
        let threads = args.threads.map(usize::from).or(plan.threads).unwrap_or(0);
        // A pool that exists already (in tests) is as good: threads change no number.
        let _ = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build_global();
        let places = lookup(&args.places);
        let texts = plan
            .data
            .iter()
            .map(|d| Source::load(d, &places))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let models_dir = ModelDir::locate(args.places.models_dir.as_deref())?;
        let path = resolve(&plan.model, &models_dir, progress)?;
        let loaded = model::load(&path)?;
        let longest = plan
            .protocols
            .iter()
            .map(Protocol::n_tokens)
            .max()
            .unwrap_or(0)
            + plan.latency_steps;
        // A context may be read a second time, behind its end and a prompt.
        let longest = longest + longest.min(repetition::PART) + repetition::MAX_PROMPT;
        let spec = loaded.spec.clone();
        let geometry = geometry(
            &spec,
            longest.max(CALIBRATION_WINDOW).min(spec.context_length),
        );
        plan.check_model(&limits(&plan, &loaded, &geometry))?;
        let items = texts
            .iter()
            .map(|text| {
                plan.protocols
                    .iter()
                    .map(|p| cut(text, (p, plan.seed), &spec, &loaded.tokenizer))
                    .collect()
            })
            .collect::<anyhow::Result<Vec<Vec<Items>>>>()?;
        let cells = plan.cells(&loaded.sha256);
        let model: Box<dyn LanguageModel> = Box::new(Transformer::<Cpu>::load_in(
            Arc::from(loaded.weights),
            plan.arithmetic,
        )?);
        let mut session = Self {
            plan,
            cells,
            model,
            repeat: repeat_prompt(&loaded.tokenizer)?,
            tokenizer: loaded.tokenizer,
            geometry,
            calibration: None,
            items,
            backing_dir: None,
            built: Built::default(),
            model_sha256: loaded.sha256,
        };
        let learner = Learner {
            model: session.model.as_ref(),
            tokenizer: &session.tokenizer,
            geometry: &session.geometry,
        };
        session.calibration = learner.calibrate(&session.plan, &places, progress)?;
        session.built = session.shelved(models_dir.learned());
        Ok(session)
    }

    /// Predictors that were fitted to the same model on the same text need no fit.
    fn shelved(&self, dir: PathBuf) -> Built {
        let Some(text) = &self.plan.calibration else {
            return Built::default();
        };
        let separator = text.data.separator.clone().unwrap_or_default();
        let origin = [
            ("model", self.model_sha256.clone()),
            ("calibration_text", text.data.sha256.clone()),
            ("calibration_separator", separator),
            ("calibration_tokens", text.tokens.to_string()),
            ("arithmetic", self.plan.arithmetic.name().to_owned()),
            ("numbers", NUMBERS.to_string()),
            ("engine", env!("CARGO_PKG_VERSION").to_owned()),
        ];
        Built::with_shelf(Shelf {
            dir,
            origin: origin.map(|(k, v)| (k.to_owned(), v)).into(),
        })
    }

    /// Items over all texts and protocols.
    pub fn n_items(&self) -> usize {
        self.items.iter().flatten().map(|i| i.items.len()).sum()
    }

    /// What the run says of itself before it starts.
    ///
    /// # Errors
    /// The plan can't be written as JSON.
    pub fn header(&self) -> anyhow::Result<RunHeader> {
        let plan = serde_json::to_string(&self.plan).context("the plan as JSON")?;
        let protocols = self.plan.protocols.iter();
        let protocols = protocols.map(|p| self.protocol_header(p)).collect();
        let data = self
            .plan
            .data
            .iter()
            .zip(&self.items)
            .map(|(d, per_protocol)| DataHeader {
                name: d.name.clone(),
                sha256: d.sha256.clone(),
                cuts: self
                    .plan
                    .protocols
                    .iter()
                    .zip(per_protocol)
                    .map(|(protocol, items)| Cut {
                        protocol: protocol.title(),
                        n_items: items.items.len(),
                        n_tokens_dropped: items.n_tokens_dropped,
                        skipped: items.skipped.clone(),
                        n_split_borders: items.n_split_borders,
                    })
                    .collect(),
            })
            .collect();
        let cells = self
            .cells
            .iter()
            .map(|c| CellHeader {
                id: c.id.clone(),
                label: self.plan.strategies[c.strategy].label.clone(),
                strategy: self.plan.strategies[c.strategy].clone(),
                data: self.plan.data[c.data].name.clone(),
                protocol: self.plan.protocols[c.protocol].title(),
                seed: self.plan.seed,
            })
            .collect();
        Ok(RunHeader {
            schema: header::SCHEMA,
            experiment: self.plan.name.clone(),
            plan_hash: crate::data::sha256_hex(format!("{plan}{}", self.model_sha256).as_bytes()),
            model: ModelHeader {
                name: self.plan.model.clone(),
                sha256: self.model_sha256.clone(),
                arithmetic: self.plan.arithmetic,
            },
            geometry: (&self.geometry).into(),
            protocols,
            data,
            cells,
        })
    }

    fn protocol_header(&self, protocol: &Protocol) -> ProtocolHeader {
        let kind = match *protocol {
            Protocol::Stream { window, .. } => ProtocolKind::Stream {
                window,
                stride: window,
                unscored: 1,
            },
            Protocol::CompressOnce {
                context,
                score,
                continuation,
                ..
            } => ProtocolKind::CompressOnce {
                context,
                scored: score - 1,
                continuation,
            },
            Protocol::Generate {
                context,
                tokens,
                temperature,
                top_p,
                continuation,
                ..
            } => ProtocolKind::Generate {
                context,
                tokens,
                temperature,
                top_p,
                continuation,
            },
            Protocol::Tasks {
                shots,
                length,
                generate,
                continuation,
                ..
            } => ProtocolKind::Tasks {
                shots,
                length,
                generate,
                continuation,
            },
        };
        ProtocolHeader {
            name: protocol.title(),
            kind,
            bos: match starts_with_bos(protocol.bos(), self.model.spec()) {
                true => header::Bos::EachItem,
                false => header::Bos::None,
            },
        }
    }
}

/// KVzip's requests to repeat a context.
pub(super) fn repeat_prompt(tokenizer: &Tokenizer) -> anyhow::Result<RepeatPrompt> {
    Ok(RepeatPrompt {
        first: tokenizer.encode("\n\nRepeat the previous context exactly.")?,
        later: tokenizer
            .encode("\n\nRepeat the part of the previous context exactly, starting with ")?,
        then: tokenizer.encode("\n")?,
    })
}

/// A model that statistics of a text are made with.
pub(super) struct Learner<'a> {
    pub model: &'a dyn LanguageModel,
    pub tokenizer: &'a Tokenizer,
    pub geometry: &'a Geometry,
}

impl Learner<'_> {
    /// Statistics of the plan's calibration text, if a strategy learns.
    pub fn calibrate(
        &self,
        plan: &Plan,
        places: &Lookup,
        progress: &dyn FetchProgress,
    ) -> anyhow::Result<Option<Calibration>> {
        if !plan.strategies.iter().any(is_calibrated) {
            return Ok(None);
        }
        let Some(wanted) = &plan.calibration else {
            bail!("a strategy learns from a text: name one in [calibration]");
        };
        let text = wanted.data.load(places)?;
        let mut ids = Vec::new();
        for document in text.documents() {
            ids.extend(self.tokenizer.encode(document)?);
        }
        if ids.len() < wanted.tokens {
            bail!(
                "{}: {} tokens, [calibration] asks for {}: take fewer or a longer text",
                text.name,
                ids.len(),
                wanted.tokens
            );
        }
        progress.note(&format!(
            "calibrating on {} tokens of {}",
            wanted.tokens, text.name
        ));
        let exact = Strategy::bare("f32");
        let mut calibrator = Calibrator::new(self.geometry);
        for window in ids[..wanted.tokens].chunks(CALIBRATION_WINDOW) {
            let materials = Materials {
                geometry: self.geometry,
                calibration: None,
                backing_dir: None,
            };
            let mut cache = StagedCache::new(&exact, materials)?;
            cache.admit(SeqId(0), Admission::Streaming)?;
            let mut recording = Recording::new(cache, SeqId(0));
            prefill(self.model, &mut recording, SeqId(0), window, plan.chunk)?;
            // The cache is gone before the rows are kept a second time.
            let (_, tape) = recording.into_parts();
            calibrator.add(&tape);
        }
        Ok(Some(calibrator.finish()))
    }
}
