//! The gate: a score per KV head, fitted to ln of what a repetition of the context attends to: a line by ridge regression
//! and, if asked for, a small network for what the line leaves over.
//!
//! Invariants: every n-th window is fitted to by nothing and judges all; what is judged are the weights as they are stored.
//! Layers with a sliding window, whose rows no budget takes, are not fitted: their rows score above all others.

use half::f16;
use rayon::prelude::*;

use super::features::{Columns, Target, table, targets};
use super::judge::Judged;
use super::mlp::{self, Network, Sample};
use super::ridge::Sums;
use crate::cache::retain::gate::weights::{Lines, SHARED};
use crate::cache::retain::gate::{EXTRAS, Weights};
use crate::cache::{Geometry, LayerGeometry, Repetition};
use crate::engine::ContextTape;

/// Every how many tokens a held-out window's rows are kept, to judge by.
pub const JUDGED: usize = 4;

/// Every how many tokens a window's rows are kept, for a network.
const SAMPLED: usize = 2;

/// How a gate is fitted.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// To what.
    pub target: Target,
    /// Targets' logarithms are cut to these.
    pub clip: (f32, f32),
    /// Penalties to choose from, in parts of each feature's mean square.
    pub ridges: Vec<f64>,
    /// The network, if there is to be one.
    pub mlp: Option<mlp::Settings>,
}

/// How heads are weighed against each other once they are fitted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EndToEnd {
    /// Windows of training; as many again judge.
    pub windows: usize,
    /// Tokens of a window.
    pub window: usize,
    /// Steps, a window each.
    pub steps: usize,
    /// The part of the rows older than the recent ones that stays.
    pub kept_fraction: f64,
}

/// Whether a window is fitted to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// It is.
    Fit,
    /// It judges the fit.
    HeldOut,
}

/// A gate on its way.
pub struct Fitting {
    settings: Settings,
    layers: Vec<Layer>,
    /// Tokens fitted to, held out.
    pub n_tokens: [usize; 2],
}

/// What has been seen of a layer.
struct Layer {
    columns: Columns,
    /// Fitted to, held out; nothing where the layer is not fitted.
    sums: Option<[Sums; 2]>,
    /// Rows of held-out windows, `[row][column]`.
    held_out: Vec<f32>,
    /// Rows of the others, if there is to be a network.
    sampled: Vec<f16>,
}

/// How well one layer's gate does on held-out rows, the mean over heads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerFit {
    /// The penalty that did best.
    pub ridge: f64,
    /// The line alone.
    pub line: Judged,
    /// With the network.
    pub network: Option<Judged>,
}

/// A fitted gate.
pub struct Fitted {
    /// Its weights.
    pub weights: Weights,
    /// By layer; nothing where one is not fitted.
    pub layers: Vec<Option<LayerFit>>,
}

impl Fitting {
    /// Nothing seen yet.
    pub fn new(geometry: &Geometry, n_embd: usize, settings: Settings) -> Self {
        let layer = |g: &LayerGeometry| {
            let columns = Columns {
                n_embd,
                n_kv_heads: g.n_kv_heads,
            };
            let sums = || [Sums::new(columns), Sums::new(columns)];
            Layer {
                columns,
                sums: g.window.is_none().then(sums),
                held_out: Vec::new(),
                sampled: Vec::new(),
            }
        };
        Self {
            settings,
            layers: geometry.layers.iter().map(layer).collect(),
            n_tokens: [0; 2],
        }
    }

    /// Takes in a window: its rows, hidden ones included, and what its repetition attended to.
    pub fn add(
        &mut self,
        geometry: &Geometry,
        tape: &ContextTape,
        repetition: &[Repetition],
        usage: Use,
    ) {
        let settings = &self.settings;
        let seen = geometry.layers.par_iter().zip(&tape.layers).zip(repetition);
        self.layers
            .par_iter_mut()
            .zip(seen)
            .for_each(|(layer, ((g, rows), repetition))| {
                let Some(sums) = &mut layer.sums else {
                    return;
                };
                let width = layer.columns.width();
                let y = targets(settings.target, settings.clip, repetition);
                let x = table(g, layer.columns, rows, y);
                sums[usage as usize].add(&x, width);
                let some = |every| x.chunks_exact(width).step_by(every).flatten();
                match usage {
                    Use::HeldOut => layer.held_out.extend(some(JUDGED)),
                    Use::Fit if settings.mlp.is_some() => {
                        let rows = some(SAMPLED).map(|&x| f16::from_f32(x));
                        layer.sampled.extend(rows);
                    }
                    Use::Fit => {}
                }
            });
        self.n_tokens[usage as usize] += tape.n_tokens;
    }

    /// Fits all layers.
    ///
    /// # Errors
    /// Rows that say too little for a fit; a network in a program without burn.
    pub fn finish(&self) -> Result<Fitted, String> {
        let first = self.layers[0].columns;
        let shape = (self.layers.len(), first.n_kv_heads);
        let lines: Vec<(Vec<f32>, f64)> = self
            .layers
            .par_iter()
            .enumerate()
            .map(|(i, layer)| {
                layer.lines(&self.settings.ridges).ok_or_else(|| {
                    format!("layer {i} can't be fitted: take more windows, or a larger ridge")
                })
            })
            .collect::<Result<_, _>>()?;
        let (lines, ridges): (Vec<Vec<f32>>, Vec<f64>) = lines.into_iter().unzip();
        let weights = Weights::new(shape, Lines::rounded(&lines.concat(), first.n_embd, EXTRAS));
        let of_lines = self.judged(&weights);
        let (weights, of_networks) = match self.settings.mlp {
            None => (weights, vec![None; shape.0]),
            Some(settings) => {
                let weights = self.with_networks(weights, settings)?;
                let judged = self.judged(&weights);
                (weights, judged)
            }
        };
        let fits = ridges.into_iter().zip(of_lines).zip(of_networks);
        let layers = fits
            .map(|((ridge, line), network)| {
                Some(LayerFit {
                    ridge,
                    line: line?,
                    network,
                })
            })
            .collect();
        Ok(Fitted { weights, layers })
    }

    /// How well weights do on held-out rows, by layer.
    fn judged(&self, weights: &Weights) -> Vec<Option<Judged>> {
        let layers = self.layers.par_iter().enumerate();
        layers
            .map(|(i, layer)| {
                layer.sums.as_ref()?;
                let rows = || layer.held_out.chunks_exact(layer.columns.width());
                let heads = (0..layer.columns.n_kv_heads).map(|h| {
                    let score = |row| f64::from(layer.score(weights, (i, h), row));
                    let target = |row: &[f32]| f64::from(row[layer.columns.target(h)]);
                    let scores: Vec<f64> = rows().map(score).collect();
                    Judged::of(&scores, &rows().map(target).collect::<Vec<_>>())
                });
                Some(Judged::mean(&heads.collect::<Vec<_>>()))
            })
            .collect()
    }

    fn with_networks(&self, weights: Weights, settings: mlp::Settings) -> Result<Weights, String> {
        let (mut units, mut out) = (Vec::new(), Vec::new());
        for (i, layer) in self.layers.iter().enumerate() {
            let columns = layer.columns;
            let network = match &layer.sums {
                None => Network {
                    units: vec![0.0; settings.hidden * (columns.n_embd + SHARED)],
                    out: vec![0.0; settings.hidden * columns.n_kv_heads],
                },
                Some(_) => {
                    let sampled: Vec<f32> = layer.sampled.iter().map(|x| x.to_f32()).collect();
                    let rows = layer.left_over(&weights, i, &sampled);
                    mlp::fit(
                        settings,
                        &rows,
                        &layer.left_over(&weights, i, &layer.held_out),
                    )?
                }
            };
            units.extend(network.units);
            out.extend(network.out);
        }
        let lines = Lines::rounded(&units, self.layers[0].columns.n_embd, SHARED);
        Ok(weights.with_units(lines, out))
    }
}

impl Layer {
    /// Every head's line, `[kv_head][n_embd + EXTRAS]`, and the penalty that did best.
    fn lines(&self, ridges: &[f64]) -> Option<(Vec<f32>, f64)> {
        let columns = self.columns;
        let Some([fit, held_out]) = &self.sums else {
            let mut line = vec![0.0; columns.n_embd + EXTRAS];
            line[columns.n_embd + EXTRAS - 1] = f32::MAX;
            return Some((line.repeat(columns.n_kv_heads), 0.0));
        };
        let tried = ridges.iter().filter_map(|&ridge| {
            let heads = (0..columns.n_kv_heads).map(|h| fit.solve(columns, h, ridge));
            let heads: Vec<Vec<f64>> = heads.collect::<Option<_>>()?;
            let r2 = heads.iter().enumerate();
            let r2 = r2.map(|(h, w)| held_out.r2(columns, h, w)).sum::<f64>();
            Some((heads, ridge, r2))
        });
        let (heads, ridge, _) = tried.max_by(|a, b| a.2.total_cmp(&b.2))?;
        let heads = heads.iter().enumerate();
        let lines = heads.flat_map(|(h, w)| fit.on_grid(columns, h, w));
        let lines = lines.map(|w| w as f32).collect();
        Some((lines, ridge))
    }

    fn score(&self, weights: &Weights, (layer, h): (usize, usize), row: &[f32]) -> f32 {
        let (n, heads) = (self.columns.n_embd, self.columns.n_kv_heads);
        let extras = [n + h, n + heads + h, n + 2 * heads, n + 2 * heads + 1].map(|c| row[c]);
        weights.score((layer, h), &row[..n], &extras)
    }

    /// Rows as a network sees them, and what the lines leave of their targets.
    fn left_over(&self, weights: &Weights, layer: usize, rows: &[f32]) -> Sample {
        let (n, heads) = (self.columns.n_embd, self.columns.n_kv_heads);
        let mut sample = Sample {
            n_inputs: n + SHARED,
            n_outputs: heads,
            ..Sample::default()
        };
        for row in rows.chunks_exact(self.columns.width()) {
            let shared = &row[n + 2 * heads..n + 2 * heads + SHARED];
            let inputs = row[..n].iter().chain(shared);
            sample.inputs.extend(inputs.map(|&x| f16::from_f32(x)));
            let left = (0..heads)
                .map(|h| row[self.columns.target(h)] - self.score(weights, (layer, h), row));
            sample.targets.extend(left);
        }
        sample
    }
}
