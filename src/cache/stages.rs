//! A strategy's stages, built for one model: what the pipeline runs.
//!
//! Invariant: everything here is immutable and shared by all sequences of a cache.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use super::chain::{Chain, map_statistics};
use super::encode;
use super::formats::{Format, Ladder};
use super::sequence::SequenceState;
use super::stage::{
    BuildContext, Calibration, Codec, HeadContext, HeadRows, KeyForm, Kind, Packer, Params,
    Placement, Retention, Side, Stage, StageDef, StageError, find,
};
use super::strategy::{Budget, ExactFormat, StageSpec, Strategy};
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
            Class::Exact => &self.exact,
            Class::Frozen => &self.frozen,
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
pub struct Built(Mutex<Vec<(Strategy, Arc<Stages>)>>);

impl Built {
    /// The strategy's stages, built now unless they were before.
    ///
    /// # Errors
    /// A stage that can't be built; the next call tries again.
    pub fn stages(
        &self,
        strategy: &Strategy,
        materials: Materials<'_>,
    ) -> Result<Arc<Stages>, StageError> {
        let mut built = self.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some((_, stages)) = built.iter().find(|(s, _)| s == strategy) {
            return Ok(Arc::clone(stages));
        }
        let stages = Arc::new(Stages::build(strategy, materials)?);
        built.push((strategy.clone(), Arc::clone(&stages)));
        Ok(stages)
    }
}

#[derive(Clone, Copy)]
struct Builder<'a> {
    strategy: &'a Strategy,
    materials: Materials<'a>,
}

impl Builder<'_> {
    fn resolved(
        &self,
        kind: Kind,
        spec: &StageSpec,
    ) -> Result<(&'static StageDef, Params), StageError> {
        let def = find(kind, &spec.name)?;
        let params =
            Params::resolve(def, &spec.params).map_err(|problems| StageError::Parameter {
                kind,
                name: spec.name.clone(),
                problem: problems
                    .into_iter()
                    .map(|(_, m)| m)
                    .collect::<Vec<_>>()
                    .join("; "),
            })?;
        Ok((def, params))
    }

    fn context(&self, side: Side) -> BuildContext<'_> {
        BuildContext {
            geometry: self.materials.geometry,
            keys: self.strategy.keys,
            side,
            calibration: self.materials.calibration,
            backing_dir: self.materials.backing_dir,
            head: None,
        }
    }

    fn stage(&self, kind: Kind, spec: &StageSpec, side: Side) -> Result<Stage, StageError> {
        let (def, params) = self.resolved(kind, spec)?;
        (def.build)(&params, &self.context(side))
    }

    /// One side's formats, `[layer][kv_head]`, and the bytes of their tables.
    fn formats(
        &self,
        spec: &StageSpec,
        side: Side,
        chain: &Chain,
    ) -> Result<(Vec<Vec<Format>>, u64), StageError> {
        let (def, params) = self.resolved(Kind::Encode, spec)?;
        let learns = (def.calibrated)(&params);
        let mut shared: BTreeMap<usize, Codec> = BTreeMap::new();
        let mut table_bytes = 0;
        let mut all = Vec::new();
        for (layer, geometry) in self.materials.geometry.layers.iter().enumerate() {
            let dim = chain.output_dim(geometry.head_dim);
            let samples = match self.materials.calibration {
                Some(calibration) if learns => samples(calibration, self, (layer, side), chain),
                _ => Vec::new(),
            };
            let mut heads = Vec::new();
            for kv_head in 0..geometry.n_kv_heads {
                let codec = match shared.get(&dim) {
                    Some(codec) if !learns => codec.clone(),
                    _ => {
                        let context = BuildContext {
                            head: Some(HeadContext {
                                layer,
                                kv_head,
                                dim,
                                samples: &samples,
                            }),
                            ..self.context(side)
                        };
                        let Stage::Encode(codec) = (def.build)(&params, &context)? else {
                            return Err(wrong_kind(Kind::Encode, spec));
                        };
                        table_bytes += codec.table_bytes();
                        shared.insert(dim, codec.clone());
                        codec
                    }
                };
                heads.push(Format { codec, dim });
            }
            all.push(heads);
        }
        Ok((all, table_bytes))
    }

    /// Builds maps in order; each sees the geometry and the statistics of what the earlier ones leave.
    fn chain(&self, specs: &[StageSpec], side: Side) -> Result<Chain, StageError> {
        let mut chain = Chain::default();
        let mut geometry = self.materials.geometry.clone();
        let mut calibration = self.materials.calibration.cloned();
        for spec in specs {
            let materials = Materials {
                geometry: &geometry,
                calibration: calibration.as_ref(),
                ..self.materials
            };
            let builder = Builder { materials, ..*self };
            let Stage::Project(map) = builder.stage(Kind::Project, spec, side)? else {
                return Err(wrong_kind(Kind::Project, spec));
            };
            if let Some(statistics) = &mut calibration {
                map_statistics(map.as_ref(), statistics);
            }
            for layer in &mut geometry.layers {
                layer.head_dim = map.output_dim(layer.head_dim);
            }
            chain.maps.push(map);
        }
        Ok(chain)
    }
}

/// Calibration rows of a layer's side as its codecs see them, `[kv_head][token · dim]`.
fn samples(
    calibration: &Calibration,
    builder: &Builder<'_>,
    (layer, side): (usize, Side),
    chain: &Chain,
) -> Vec<Vec<f32>> {
    let geometry = &builder.materials.geometry.layers[layer];
    let heads = calibration.rows.get(layer).map_or(&[][..], |h| h);
    let head = |(head, rows): (usize, &HeadRows)| {
        let rows = match side {
            Side::K => &rows.k,
            Side::V => &rows.v,
        };
        let mut out = Vec::with_capacity(rows.len());
        for (row, &position) in rows
            .chunks_exact(geometry.head_dim)
            .zip(&calibration.positions)
        {
            let mut row = row.to_vec();
            if side == Side::K && builder.strategy.keys == KeyForm::PostRope {
                geometry.rope.rotate(position, &mut row);
            }
            out.extend(chain.forward(layer, head, &row));
        }
        out
    };
    heads.iter().enumerate().map(head).collect()
}

fn wrong_kind(kind: Kind, spec: &StageSpec) -> StageError {
    StageError::Parameter {
        kind,
        name: spec.name.clone(),
        problem: format!("its constructor did not build a {kind} stage"),
    }
}

/// Levels of precision share their pages: a page is encoded again as a whole.
fn same_pages(first: Option<&Format>, lower: &Format, spec: &StageSpec) -> Result<(), StageError> {
    let pages = |f: &Format| f.codec.page_rows();
    match first {
        Some(first) if pages(first) != pages(lower) => Err(StageError::Parameter {
            kind: Kind::Encode,
            name: spec.name.clone(),
            problem: format!(
                "it codes {} rows together, the formats of more bits in the same budget {}: give them the same `page`",
                pages(lower),
                pages(first)
            ),
        }),
        _ => Ok(()),
    }
}

impl Stages {
    /// Builds every stage of a strategy.
    pub fn build(strategy: &Strategy, materials: Materials<'_>) -> Result<Self, StageError> {
        let b = Builder {
            strategy,
            materials,
        };
        let project_k = b.chain(&strategy.project_k, Side::K)?;
        let project_v = b.chain(&strategy.project_v, Side::V)?;
        let exact = match strategy.exact {
            ExactFormat::F16 => Codec::Rows(Arc::new(encode::f16::F16)),
            ExactFormat::F32 => Codec::Rows(Arc::new(encode::f32::F32)),
        };
        let frozen = Codec::Rows(Arc::new(encode::f32::F32));
        let format = |codec: &Codec, dim| Format {
            codec: codec.clone(),
            dim,
        };
        let mut formats: Vec<LayerFormats> = materials
            .geometry
            .layers
            .iter()
            .map(|layer| LayerFormats {
                coded: vec![[Vec::new(), Vec::new()]; layer.n_kv_heads],
                exact: [format(&exact, layer.head_dim)],
                frozen: [format(&frozen, layer.head_dim)],
            })
            .collect();
        let mut table_bytes = 0;
        for (encode_k, encode_v) in strategy.levels() {
            for (spec, side, chain) in [
                (encode_k, Side::K, &project_k),
                (encode_v, Side::V, &project_v),
            ] {
                let (built, bytes) = b.formats(spec, side, chain)?;
                table_bytes += bytes;
                for (layer, built) in formats.iter_mut().zip(built) {
                    for (head, format) in layer.coded.iter_mut().zip(built) {
                        let ladder = &mut head[side as usize];
                        same_pages(ladder.first(), &format, spec)?;
                        ladder.push(format);
                    }
                }
            }
        }
        let retain = match &strategy.retain {
            Some(spec) => match b.stage(Kind::Retain, spec, Side::K)? {
                Stage::Retain(r) => Some(r),
                _ => return Err(wrong_kind(Kind::Retain, spec)),
            },
            None => None,
        };
        let pack = match &strategy.pack {
            Some(spec) => match b.stage(Kind::Pack, spec, Side::K)? {
                Stage::Pack(p) => Some(p),
                _ => return Err(wrong_kind(Kind::Pack, spec)),
            },
            None => None,
        };
        let place = match &strategy.place {
            Some(spec) => match b.stage(Kind::Place, spec, Side::K)? {
                Stage::Place(p) => Some(p),
                _ => return Err(wrong_kind(Kind::Place, spec)),
            },
            None => None,
        };
        Ok(Self {
            retain,
            project_k,
            project_v,
            pack,
            place,
            keys: strategy.keys,
            tail: Side::BOTH
                .map(|side| u32::try_from(strategy.tail.side(side)).unwrap_or(u32::MAX)),
            sinks: u32::try_from(strategy.sinks).unwrap_or(u32::MAX),
            formats,
            table_bytes,
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

    /// What the stages ask of the engine, together.
    pub fn needs(&self) -> Needs {
        self.retain
            .as_ref()
            .map_or_else(Needs::default, |r| r.needs())
    }

    /// Bytes of projection weights.
    pub fn projection_bytes(&self) -> u64 {
        self.project_k.weight_bytes() + self.project_v.weight_bytes()
    }

    /// Bytes of codebooks.
    pub fn table_bytes(&self) -> u64 {
        self.table_bytes
    }
}
