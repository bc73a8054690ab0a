//! A strategy's stages, built for one model: what the pipeline runs.
//!
//! Invariant: everything here is immutable and shared by all sequences of a cache.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use super::builder::{Builder, wrong_kind};
use super::chain::Chain;
use super::encode;
use super::formats::{Format, Ladder};
use super::predict::{Predictor, Shelf};
use super::project::aqua;
use super::rebuild::Rebuild;
use super::sequence::SequenceState;
use super::sparse::Reading;
use super::stage::{
    Calibration, Codec, KeyForm, Kind, Packer, Placement, Retention, Side, Stage, StageError,
};
use super::strategy::{Budget, ExactFormat, Strategy};
use super::visibility::{Class, Rules};
use super::{Geometry, Needs};

/// Formats of one layer's rows.
#[derive(Clone)]
pub struct LayerFormats {
    /// Coded rows (after projection), by KV head and side: formats by level.
    coded: Vec<[Vec<Format>; 2]>,
    /// Sinks and tail, of both sides.
    exact: [Format; 1],
    /// Rows of an exact continuation, of both sides.
    frozen: [Format; 1],
}

impl LayerFormats {
    /// The formats of one side and class of a KV head, by level.
    pub fn ladder(&self, head: usize, side: Side, class: Class) -> &Ladder {
        match class {
            Class::Coded => &self.coded[head][side as usize],
            Class::Exact | Class::Fetched => &self.exact,
            Class::Frozen => &self.frozen,
        }
    }

    /// The codec of one side's coded rows of a KV head, and their channels (after projection).
    pub fn coded_rows(&self, head: usize, side: Side) -> (&Codec, usize) {
        let format = self.format(head, side, Class::Coded);
        (&format.codec, format.dim)
    }

    /// The codec of sinks and tail.
    pub fn exact_rows(&self) -> &Codec {
        &self.exact[0].codec
    }

    /// Puts another codec behind the coded rows of both sides, for tests of what finds faults.
    #[cfg(test)]
    pub(crate) fn replace_codec(&mut self, codec: &Codec) {
        for format in self.coded.iter_mut().flatten().flatten() {
            format.codec = codec.clone();
        }
    }

    /// The format in which new rows of one side and class of a KV head are written.
    pub fn format(&self, head: usize, side: Side, class: Class) -> &Format {
        &self.ladder(head, side, class)[0]
    }
}

/// A strategy built for a model.
#[derive(Clone)]
pub struct Stages {
    /// Which rows live.
    pub retain: Option<Arc<dyn Retention>>,
    /// Maps of K.
    pub project_k: Chain,
    /// Maps of V.
    pub project_v: Chain,
    /// Packer of sealed pages.
    pub pack: Option<Arc<dyn Packer>>,
    /// Tier of sealed pages.
    pub place: Option<Arc<dyn Placement>>,
    /// What decoded tokens read, if not all.
    pub reading: Option<Reading>,
    /// Form of stored keys.
    pub keys: KeyForm,
    /// Newest rows that stay exact, by side.
    pub tail: [u32; 2],
    /// First rows that stay exact.
    pub sinks: u32,
    /// Bytes that a sequence may take.
    pub budget: Option<Budget>,
    /// Per layer.
    pub formats: Vec<LayerFormats>,
    /// Predictors of rows from the layer before.
    pub predictor: Option<Predictor>,
    table_bytes: u64,
}

/// What stages are built from besides the strategy.
#[derive(Debug, Clone, Copy)]
pub struct Materials<'a> {
    /// The model's attention layers.
    pub geometry: &'a Geometry,
    /// Statistics of a calibration text.
    pub calibration: Option<&'a Calibration>,
    /// Directory for backing files; the system's temporary directory if `None`.
    pub backing_dir: Option<&'a PathBuf>,
}

/// Strategies that were built, each once: what a stage learned is learned for a whole run. One of these belongs to one
/// set of [`Materials`].
#[derive(Default)]
pub struct Built {
    stages: Mutex<Vec<(Strategy, Arc<Stages>)>>,
    shelf: Option<Shelf>,
}

impl Built {
    /// Nothing built yet; fitted predictors are kept on a shelf between runs.
    pub fn with_shelf(shelf: Shelf) -> Self {
        Self {
            shelf: Some(shelf),
            ..Self::default()
        }
    }

    /// The strategy's stages, built now unless they were before.
    ///
    /// # Errors
    /// A stage that can't be built; the next call tries again.
    pub fn stages(
        &self,
        strategy: &Strategy,
        materials: Materials<'_>,
    ) -> Result<Arc<Stages>, StageError> {
        let mut built = self.stages.lock().unwrap_or_else(|e| e.into_inner());
        if let Some((_, stages)) = built.iter().find(|(s, _)| s == strategy) {
            return Ok(Arc::clone(stages));
        }
        let shelf = self.shelf.as_ref().filter(|_| aqua::of(strategy).is_some());
        let known = shelf.map(|s| s.load(strategy)).transpose()?.flatten();
        let is_new = known.is_none();
        let stages = Stages::build_with(strategy, materials, known)?;
        if let (true, Some(shelf), Some(predictor)) = (is_new, shelf, &stages.predictor) {
            shelf.store(strategy, predictor);
        }
        let stages = Arc::new(stages);
        built.push((strategy.clone(), Arc::clone(&stages)));
        Ok(stages)
    }
}

impl Stages {
    /// Builds every stage of a strategy.
    pub fn build(strategy: &Strategy, materials: Materials<'_>) -> Result<Self, StageError> {
        Self::build_with(strategy, materials, None)
    }

    /// The same with predictors that were fitted before.
    fn build_with(
        strategy: &Strategy,
        materials: Materials<'_>,
        known: Option<Predictor>,
    ) -> Result<Self, StageError> {
        let mut b = Builder {
            strategy,
            materials,
            leveled: false,
        };
        b.check()?;
        let retain = match &strategy.retain {
            Some(spec) => match b.stage(Kind::Retain, spec, Side::K)? {
                Stage::Retain(r) => Some(r),
                _ => return Err(wrong_kind(Kind::Retain, spec)),
            },
            None => None,
        };
        b.leveled = retain.as_ref().is_some_and(|r| r.chooses_levels());
        let project_k = b.chain(Side::K)?;
        let project_v = b.chain(Side::V)?;
        let coded = b.coded([&project_k, &project_v], known)?;
        let exact = match strategy.exact {
            ExactFormat::F16 => Codec::Rows(Arc::new(encode::f16::F16)),
            ExactFormat::F32 => Codec::Rows(Arc::new(encode::f32::F32)),
        };
        let frozen = Codec::Rows(Arc::new(encode::f32::F32));
        let format = |codec: &Codec, dim| Format {
            codec: codec.clone(),
            dim,
        };
        let formats = materials
            .geometry
            .layers
            .iter()
            .zip(coded.layers)
            .map(|(layer, coded)| LayerFormats {
                coded,
                exact: [format(&exact, layer.head_dim)],
                frozen: [format(&frozen, layer.head_dim)],
            })
            .collect();
        let pack = match &strategy.pack {
            Some(spec) => match b.stage(Kind::Pack, spec, Side::K)? {
                Stage::Pack(p) => Some(p),
                _ => return Err(wrong_kind(Kind::Pack, spec)),
            },
            None => None,
        };
        let (place, reading) = match &strategy.place {
            Some(spec) => match b.stage(Kind::Place, spec, Side::K)? {
                Stage::Place(p) => (Some(p), None),
                Stage::Read(reading) => (None, Some(reading)),
                _ => return Err(wrong_kind(Kind::Place, spec)),
            },
            None => (None, None),
        };
        Ok(Self {
            retain,
            project_k,
            project_v,
            pack,
            place,
            reading,
            keys: strategy.keys,
            tail: Side::BOTH
                .map(|side| u32::try_from(strategy.tail.side(side)).unwrap_or(u32::MAX)),
            sinks: u32::try_from(strategy.sinks).unwrap_or(u32::MAX),
            formats,
            predictor: coded.predictor,
            table_bytes: coded.table_bytes,
            budget: strategy.budget.clone(),
        })
    }

    /// The visibility rules of one layer of a sequence, by side.
    pub fn rules(&self, state: &SequenceState, place: (usize, Option<u32>)) -> [Rules; 2] {
        self.rules_of(place).map(|rules| Rules {
            not_before: state.pages_from,
            frozen_from: state.frozen_from,
            ..rules
        })
    }

    /// The rules of a layer with that sliding window in any sequence that decodes.
    pub fn rules_of(&self, (layer, window): (usize, Option<u32>)) -> [Rules; 2] {
        Side::BOTH.map(|side| {
            let format = self.formats[layer].format(0, side, Class::Coded);
            Rules {
                tail: self.tail[side as usize],
                page: format.codec.page_rows() as u32,
                sinks: self.sinks,
                not_before: 0,
                frozen_from: None,
                window,
            }
        })
    }

    /// The maps of one side.
    pub fn chain(&self, side: Side) -> &Chain {
        match side {
            Side::K => &self.project_k,
            Side::V => &self.project_v,
        }
    }

    /// Coded keys are scored in their own space: a projection that need not be undone before RoPE, or before a prediction
    /// is added.
    pub fn absorbs_keys(&self) -> bool {
        self.keys == KeyForm::PostRope && !self.project_k.is_identity() && self.predictor.is_none()
    }

    /// Coded values are summed in their own space and expanded afterwards.
    pub fn sums_coded_values(&self) -> bool {
        !self.project_v.is_identity() && self.predictor.is_none()
    }

    /// What the stages ask of the engine, together.
    pub fn needs(&self) -> Needs {
        let needs = self.retain.as_ref().map(|r| r.needs());
        let needs = needs.unwrap_or_default();
        Needs {
            // What the next query sees of a page depends on which rows left before it.
            max_chunk: match self.rebuild() {
                Some(_) => Some(1),
                None => needs.max_chunk,
            },
            ..needs
        }
    }

    /// When pages are coded anew; `None` too where no rows are coded together.
    pub fn rebuild(&self) -> Option<Rebuild> {
        let part = self.retain.as_ref()?.rebuild()?;
        let codecs = self.formats.iter().flat_map(|layer| &layer.coded);
        let mut codecs = codecs.flatten().flatten().map(|format| &format.codec);
        codecs
            .any(|codec| matches!(codec, Codec::Pages(_)))
            .then_some(Rebuild {
                part,
                sinks: self.sinks,
            })
    }

    /// Bytes of learned weights: of projections and of retention.
    pub fn projection_bytes(&self) -> u64 {
        let retain = self.retain.as_ref().map_or(0, |r| r.weight_bytes());
        let predictor = self.predictor.as_ref().map_or(0, Predictor::weight_bytes);
        self.project_k.weight_bytes() + self.project_v.weight_bytes() + predictor + retain
    }

    /// Bytes of codebooks.
    pub fn table_bytes(&self) -> u64 {
        self.table_bytes
    }
}
