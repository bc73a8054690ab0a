//! Builds a strategy's maps, codecs and predictors for a model, layer by layer.
//!
//! Invariants: a codec that learns sees the calibration's rows as the cache will hand them to it: rotated if keys are
//! stored so, less their prediction, projected; predictors are fitted on rows that went through the codecs of the layers
//! before ([`Fit`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::prelude::*;

use super::chain::{Chain, map_statistics};
use super::formats::{Format, Mask};
use super::paged::Paged;
use super::predict::{Fit, Predictor};
use super::project::aqua;
use super::sparse;
use super::stage::{
    BuildContext, Calibration, Codec, HeadContext, KeyForm, Kind, Params, Side, Stage, StageDef,
    StageError, find,
};
use super::stages::Materials;
use super::strategy::{StageSpec, Strategy};

/// Builds the stages of a strategy.
#[derive(Clone, Copy)]
pub struct Builder<'a> {
    /// The strategy.
    pub strategy: &'a Strategy,
    /// What it is built from.
    pub materials: Materials<'a>,
    /// Rows of a page have different bits where their format allows it.
    pub leveled: bool,
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

    /// Builds one stage.
    pub fn stage(&self, kind: Kind, spec: &StageSpec, side: Side) -> Result<Stage, StageError> {
        let (def, params) = self.resolved(kind, spec)?;
        (def.build)(&params, &self.context(side))
    }

    /// Builds a side's maps in order; each sees the geometry and the statistics of what the earlier ones leave.
    pub fn chain(&self, side: Side) -> Result<Chain, StageError> {
        let mut chain = Chain::default();
        let mut geometry = self.materials.geometry.clone();
        let mut mapped: Option<Calibration> = None;
        let predicts = usize::from(aqua::of(self.strategy).is_some());
        for spec in self.strategy.maps(side).iter().skip(predicts) {
            let materials = Materials {
                geometry: &geometry,
                calibration: mapped.as_ref().or(self.materials.calibration),
                ..self.materials
            };
            let builder = Builder { materials, ..*self };
            let Stage::Project(map) = builder.stage(Kind::Project, spec, side)? else {
                return Err(wrong_kind(Kind::Project, spec));
            };
            let statistics = mapped.take();
            let statistics = statistics.or_else(|| self.materials.calibration.map(moments));
            mapped = statistics.map(|mut statistics| {
                map_statistics(map.as_ref(), &mut statistics);
                statistics
            });
            for layer in &mut geometry.layers {
                layer.head_dim = map.output_dim(layer.head_dim);
            }
            chain.maps.push(map);
        }
        Ok(chain)
    }

    /// Refuses a strategy whose predictions can't be made.
    pub fn check(&self) -> Result<(), StageError> {
        let refused = |kind, name: &str, problem| StageError::Parameter {
            kind,
            name: name.to_owned(),
            problem,
        };
        if let Some(problem) = aqua::refusal(self.strategy, self.materials.geometry) {
            return Err(refused(Kind::Project, aqua::DEF.name, problem));
        }
        if let Some(spec) = &self.strategy.place
            && let Stage::Read(_) = self.stage(Kind::Place, spec, Side::K)?
            && let Some(problem) = sparse::refusal(self.strategy)
        {
            return Err(refused(Kind::Place, &spec.name, problem));
        }
        Ok(())
    }

    /// Starts a fit, if the strategy predicts.
    fn fit(&self, known: Option<Predictor>) -> Result<Option<Fit>, StageError> {
        let Some(spec) = aqua::of(self.strategy) else {
            return Ok(None);
        };
        let geometry = self.materials.geometry;
        let Stage::Predict(prediction) = self.stage(Kind::Project, spec, Side::K)? else {
            return Err(wrong_kind(Kind::Project, spec));
        };
        let width = geometry.layers.first();
        let width = width.map_or(0, |l| l.n_kv_heads * l.head_dim);
        let known = known.filter(|k| k.suits(geometry.layers.len(), width));
        Ok(Some(Fit::new(prediction, width, known)))
    }

    /// Builds all codecs, and fits predictors on what they give back, unless they are known.
    pub fn coded(
        &self,
        chains: [&Chain; 2],
        known: Option<Predictor>,
    ) -> Result<Coded, StageError> {
        let mut coders = [self.coders(Side::K)?, self.coders(Side::V)?];
        let mut fit = self.fit(known)?;
        // Known predictors say nothing new to codecs that learn nothing.
        let learns = coders.iter().flatten().any(|c| c.learns)
            || fit.as_ref().is_some_and(|f| !f.is_known());
        let mut layers = Vec::new();
        for (layer, geometry) in self.materials.geometry.layers.iter().enumerate() {
            let mut heads = vec![[Vec::new(), Vec::new()]; geometry.n_kv_heads];
            for (side, coders) in Side::BOTH.into_iter().zip(&mut coders) {
                let chain = chains[side as usize];
                let rows = match learns {
                    true => self.rows((layer, side), chain, fit.as_mut())?,
                    false => CodecRows::default(),
                };
                let dim = chain.output_dim(geometry.head_dim);
                for coder in coders.iter_mut() {
                    let formats = coder.formats(self, (layer, side), dim, &rows)?;
                    for (head, format) in heads.iter_mut().zip(formats) {
                        let ladder: &mut Vec<Format> = &mut head[side as usize];
                        same_pages(ladder.first(), &format, coder.spec)?;
                        ladder.push(format);
                    }
                }
                if let (Some(fit), true) = (&mut fit, learns) {
                    let formats = heads.iter().map(|head| &head[side as usize][0]).collect();
                    fit.restore(
                        side,
                        rows.restored(formats, (layer, geometry.head_dim), chain),
                    );
                }
            }
            layers.push(heads);
        }
        let predictor = fit.map(Fit::finish);
        if predictor.is_some() {
            code_together(&mut layers);
        }
        Ok(Coded {
            layers,
            table_bytes: coders.iter().flatten().map(|c| c.table_bytes).sum(),
            predictor,
        })
    }

    /// A side's codecs by level.
    fn coders(&self, side: Side) -> Result<Vec<Coder<'_>>, StageError> {
        let levels = self.strategy.levels();
        let coder = |(k, v)| {
            let spec: &StageSpec = [k, v][side as usize];
            let (def, params) = self.resolved(Kind::Encode, spec)?;
            Ok(Coder {
                spec,
                def,
                learns: (def.calibrated)(&params),
                params,
                shared: BTreeMap::new(),
                table_bytes: 0,
            })
        };
        levels.map(coder).collect()
    }

    /// Calibration rows of a layer's side as its codecs see them.
    fn rows(
        &self,
        (layer, side): (usize, Side),
        chain: &Chain,
        fit: Option<&mut Fit>,
    ) -> Result<CodecRows, StageError> {
        let geometry = &self.materials.geometry.layers[layer];
        let d = geometry.head_dim;
        let Some(calibration) = self.materials.calibration else {
            return Ok(CodecRows::default());
        };
        // Sinks are never coded, and unlike any other row: a prediction must not bend towards them.
        let first = fit.as_ref().map_or(0, |_| self.strategy.sinks);
        let kept = |&p: &u32| p as usize >= first;
        let positions: Vec<u32> = calibration.positions.iter().copied().filter(kept).collect();
        let of_head = |rows: &[f32]| -> Vec<f32> {
            let rows = rows.chunks_exact(d).zip(&calibration.positions);
            let mut out = Vec::with_capacity(positions.len() * d);
            for (row, &position) in rows.filter(|(_, p)| kept(p)) {
                out.extend_from_slice(row);
                let row = out.len() - d;
                if side == Side::K && self.strategy.keys == KeyForm::PostRope {
                    geometry.rope.rotate(position, &mut out[row..]);
                }
            }
            out
        };
        let heads = calibration.rows.get(layer).map_or(&[][..], |h| h);
        let mut heads: Vec<Vec<f32>> = heads
            .par_iter()
            .map(|rows| of_head([&rows.k, &rows.v][side as usize]))
            .collect();
        if let Some(fit) = fit {
            let mut rows = together(&heads, d);
            fit.residuals(side, &mut rows)?;
            heads = apart(&rows, heads.len(), d);
        }
        if !chain.is_identity() {
            heads.par_iter_mut().enumerate().for_each(|(h, rows)| {
                let mapped = rows.chunks_exact(d).map(|row| chain.forward(layer, h, row));
                *rows = mapped.flatten().collect();
            });
        }
        Ok(CodecRows { heads, positions })
    }
}

/// All codecs of a strategy, and its predictors.
pub struct Coded {
    /// Formats by level, `[layer][kv_head][side][level]`.
    pub layers: Vec<Vec<[Vec<Format>; 2]>>,
    /// Bytes of the codecs' tables.
    pub table_bytes: u64,
    /// Predictors, if the strategy asks for them.
    pub predictor: Option<Predictor>,
}

/// One side's codec of one level, built layer by layer.
struct Coder<'a> {
    spec: &'a StageSpec,
    def: &'static StageDef,
    params: Params,
    learns: bool,
    /// By channels, if it learns nothing.
    shared: BTreeMap<usize, Codec>,
    table_bytes: u64,
}

impl Coder<'_> {
    /// A layer's formats by KV head.
    fn formats(
        &mut self,
        builder: &Builder<'_>,
        (layer, side): (usize, Side),
        dim: usize,
        rows: &CodecRows,
    ) -> Result<Vec<Format>, StageError> {
        let samples: &[Vec<f32>] = if self.learns { &rows.heads } else { &[] };
        let n = builder.materials.geometry.layers[layer].n_kv_heads;
        let mut format = |kv_head| {
            let codec = match self.shared.get(&dim) {
                Some(codec) if !self.learns => codec.clone(),
                _ => {
                    let context = BuildContext {
                        head: Some(HeadContext {
                            layer,
                            kv_head,
                            dim,
                            samples,
                        }),
                        ..builder.context(side)
                    };
                    let Stage::Encode(codec) = (self.def.build)(&self.params, &context)? else {
                        return Err(wrong_kind(Kind::Encode, self.spec));
                    };
                    let leveled = builder.leveled.then(|| codec.leveled()).flatten();
                    let codec = leveled.unwrap_or(codec);
                    self.table_bytes += codec.table_bytes();
                    self.shared.insert(dim, codec.clone());
                    codec
                }
            };
            Ok(Format { codec, dim })
        };
        (0..n).map(&mut format).collect()
    }
}

/// Calibration rows as codecs see them.
#[derive(Default)]
struct CodecRows {
    /// `[kv_head][token · dim]`.
    heads: Vec<Vec<f32>>,
    /// By token.
    positions: Vec<u32>,
}

impl CodecRows {
    /// The rows after encoding, in pages, and decoding, before the maps: `[token][kv_head · head_dim]`.
    fn restored(
        &self,
        formats: Vec<&Format>,
        (layer, d): (usize, usize),
        chain: &Chain,
    ) -> Vec<f32> {
        let restore = |(h, (rows, format)): (usize, (&Vec<f32>, &Format))| {
            let page = format.codec.page_rows() as u32;
            let mut out = Vec::with_capacity(self.positions.len() * d);
            let mut rows = &rows[..];
            for page in self
                .positions
                .chunk_by(|a, b| b == &(a + 1) && a / page == b / page)
            {
                let (coded, later) = rows.split_at(page.len() * format.dim);
                let mut decoded = vec![0.0; coded.len()];
                let stored = Mask::MAX >> (Mask::BITS as usize - page.len());
                format.decode(stored, &format.encode(coded), &mut decoded);
                match chain.is_identity() {
                    true => out.extend(decoded),
                    false => {
                        let rows = decoded.chunks_exact(format.dim);
                        out.extend(rows.flat_map(|z| chain.expand(layer, h, z, d)));
                    }
                }
                rows = later;
            }
            out
        };
        let all = self.heads.par_iter().zip(formats).enumerate();
        together(&all.map(restore).collect::<Vec<_>>(), d)
    }
}

/// `[kv_head][token · d]` to `[token][kv_head · d]`.
fn together(heads: &[Vec<f32>], d: usize) -> Vec<f32> {
    let n_tokens = heads.first().map_or(0, |h| h.len() / d);
    let mut out = Vec::with_capacity(n_tokens * heads.len() * d);
    for t in 0..n_tokens {
        for head in heads {
            out.extend_from_slice(&head[t * d..(t + 1) * d]);
        }
    }
    out
}

/// `[token][kv_head · d]` to `[kv_head][token · d]`.
fn apart(rows: &[f32], n_heads: usize, d: usize) -> Vec<Vec<f32>> {
    let head = |h| {
        let tokens = rows.chunks_exact(n_heads * d);
        tokens
            .flat_map(|row| &row[h * d..(h + 1) * d])
            .copied()
            .collect()
    };
    (0..n_heads).map(head).collect()
}

/// Makes all codecs wait for the largest page.
fn code_together(layers: &mut [Vec<[Vec<Format>; 2]>]) {
    let all = || layers.iter().flatten().flatten().flatten();
    let page_rows = all().map(|f| f.codec.page_rows()).max().unwrap_or(1);
    for format in layers.iter_mut().flatten().flatten().flatten() {
        if format.codec.page_rows() < page_rows {
            let codec = format.codec.clone();
            format.codec = Codec::Pages(Arc::new(Paged { codec, page_rows }));
        }
    }
}

/// Second moments alone.
fn moments(calibration: &Calibration) -> Calibration {
    Calibration {
        heads: calibration.heads.clone(),
        n_tokens: calibration.n_tokens,
        rows: Vec::new(),
        positions: Vec::new(),
    }
}

/// A constructor that did not do what its registry entry says.
pub fn wrong_kind(kind: Kind, spec: &StageSpec) -> StageError {
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
