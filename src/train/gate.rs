//! The gate: a linear score per KV head, fitted to ln of what a repetition of the context attends to.
//!
//! Least squares with a ridge, in closed form: sums of products are taken window by window, those of every n-th window
//! apart, to choose the ridge by and to say how well the fit does where it was not made.
//!
//! Invariants: sums of a window are f32, sums of windows f64, in order: threads change nothing; a weight's penalty is
//! relative to its feature's own size.

use std::collections::BTreeMap;

use half::f16;
use nalgebra::{DMatrix, DVector};
use rayon::prelude::*;
use safetensors::{Dtype, tensor::TensorView};

use crate::cache::retain::gate::{EXTRAS, extras};
use crate::cache::{Geometry, LayerGeometry, Repetition};
use crate::compute::cpu::gemm::{Dims, Mat, MatMut, gemm};
use crate::engine::ContextTape;
use crate::engine::tape::TapeLayer;

/// Every how many tokens a held-out window's rows are kept, for ranks.
const STRIDE: usize = 4;

/// What the gate is fitted to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The most attention.
    Kvzip,
    /// The most weighted attention.
    KvzipPlus,
}

/// How a gate is fitted.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// To what.
    pub target: Target,
    /// Targets' logarithms are cut to these.
    pub clip: (f32, f32),
    /// Penalties to choose from, in parts of each feature's mean square.
    pub ridges: Vec<f64>,
}

/// Whether a window is fitted to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// It is.
    Fit,
    /// It judges the fit.
    HeldOut,
}

/// Sums of products of one layer's columns: hidden channels, ln‖k‖ and ln‖v‖ of each KV head, ln(1 + p), 1, and each KV
/// head's target.
struct Sums {
    /// `[column][column]`.
    products: Vec<f64>,
    n: usize,
}

/// One layer's columns.
#[derive(Clone, Copy)]
struct Columns {
    n_embd: usize,
    n_kv_heads: usize,
}

impl Columns {
    fn len(self) -> usize {
        self.n_embd + 3 * self.n_kv_heads + 2
    }

    /// The columns of one head's features, in the gate's order.
    fn of_head(self, h: usize) -> Vec<usize> {
        let own = [
            self.n_embd + h,
            self.n_embd + self.n_kv_heads + h,
            self.n_embd + 2 * self.n_kv_heads,
            self.n_embd + 2 * self.n_kv_heads + 1,
        ];
        (0..self.n_embd).chain(own).collect()
    }

    fn target(self, h: usize) -> usize {
        self.n_embd + 2 * self.n_kv_heads + 2 + h
    }
}

/// A gate on its way.
pub struct Fitting {
    settings: Settings,
    /// By layer: fitted to, held out.
    sums: Vec<[Sums; 2]>,
    columns: Vec<Columns>,
    /// Rows of held-out windows, `[layer][row · column]`.
    kept: Vec<Vec<f32>>,
    /// Tokens fitted to, held out.
    pub n_tokens: [usize; 2],
}

/// How well one layer's gate does on held-out rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerFit {
    /// The penalty that did best.
    pub ridge: f64,
    /// 1 − Σ(error²) / Σ(deviation from the mean²), the mean over heads.
    pub r2: f64,
    /// Spearman's rank correlation of score and target within a head, the mean over heads.
    pub rank: f64,
}

/// A fitted gate.
pub struct Fitted {
    /// `[layer][kv_head][n_embd + EXTRAS]`.
    pub weights: Vec<f16>,
    /// Layers, KV heads, features.
    pub shape: [usize; 3],
    /// By layer.
    pub layers: Vec<LayerFit>,
}

impl Fitting {
    /// Nothing summed yet.
    pub fn new(geometry: &Geometry, n_embd: usize, settings: Settings) -> Self {
        let columns: Vec<Columns> = geometry
            .layers
            .iter()
            .map(|g| Columns {
                n_embd,
                n_kv_heads: g.n_kv_heads,
            })
            .collect();
        let empty = |c: &Columns| Sums {
            products: vec![0.0; c.len() * c.len()],
            n: 0,
        };
        Self {
            settings,
            sums: columns.iter().map(|c| [empty(c), empty(c)]).collect(),
            kept: vec![Vec::new(); columns.len()],
            columns,
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
        let layers = self.sums.par_iter_mut().zip(&mut self.kept);
        let seen = geometry.layers.par_iter().zip(&tape.layers).zip(repetition);
        layers.zip(&self.columns).zip(seen).for_each(
            |(((sums, kept), &columns), ((g, rows), repetition))| {
                let x = table(g, columns, rows, targets(settings, repetition));
                sums[usage as usize].add(&x, columns.len());
                if usage == Use::HeldOut {
                    let some = x.chunks_exact(columns.len()).step_by(STRIDE);
                    kept.extend(some.flatten());
                }
            },
        );
        self.n_tokens[usage as usize] += tape.n_tokens;
    }

    /// Fits all layers.
    ///
    /// # Errors
    /// Rows that say too little for a fit.
    pub fn finish(&self) -> Result<Fitted, String> {
        let layers = self.sums.par_iter().zip(&self.kept).zip(&self.columns);
        let fits: Vec<(Vec<f16>, LayerFit)> = layers
            .enumerate()
            .map(|(layer, ((sums, kept), &columns))| {
                self.layer(sums, kept, columns).ok_or_else(|| {
                    format!("layer {layer} can't be fitted: take more windows, or a larger ridge")
                })
            })
            .collect::<Result<_, _>>()?;
        let first = self.columns[0];
        let shape = [self.columns.len(), first.n_kv_heads, first.n_embd + EXTRAS];
        let (weights, layers): (Vec<Vec<f16>>, Vec<LayerFit>) = fits.into_iter().unzip();
        Ok(Fitted {
            weights: weights.concat(),
            shape,
            layers,
        })
    }

    fn layer(
        &self,
        [fit, held_out]: &[Sums; 2],
        kept: &[f32],
        columns: Columns,
    ) -> Option<(Vec<f16>, LayerFit)> {
        let ridges = self.settings.ridges.iter();
        let tried = ridges.filter_map(|&ridge| {
            let heads = (0..columns.n_kv_heads).map(|h| fit.solve(columns, h, ridge));
            let heads: Vec<Vec<f64>> = heads.collect::<Option<_>>()?;
            let r2 = heads.iter().enumerate();
            let r2 = r2.map(|(h, w)| held_out.r2(columns, h, w)).sum::<f64>();
            Some((heads, ridge, r2 / columns.n_kv_heads as f64))
        });
        let (heads, ridge, r2) = tried.max_by(|a, b| a.2.total_cmp(&b.2))?;
        let ranks = heads.iter().enumerate().map(|(h, w)| {
            let of = columns.of_head(h);
            let rows = kept.chunks_exact(columns.len());
            let score = |row: &[f32]| of.iter().zip(w).map(|(&c, w)| f64::from(row[c]) * w).sum();
            let scores: Vec<f64> = rows.clone().map(score).collect();
            let targets: Vec<f64> = rows.map(|r| f64::from(r[columns.target(h)])).collect();
            spearman(&scores, &targets)
        });
        let rank = ranks.sum::<f64>() / columns.n_kv_heads as f64;
        let weights = heads.concat().into_iter().map(f16::from_f64).collect();
        Some((weights, LayerFit { ridge, r2, rank }))
    }
}

impl Sums {
    /// Adds `[row][column]`.
    fn add(&mut self, x: &[f32], n_columns: usize) {
        let n = x.len() / n_columns;
        let mut transposed = vec![0.0f32; x.len()];
        for (t, row) in x.chunks_exact(n_columns).enumerate() {
            for (c, &v) in row.iter().enumerate() {
                transposed[c * n + t] = v;
            }
        }
        let mut products = vec![0.0f32; n_columns * n_columns];
        let dims = Dims {
            m: n_columns,
            n: n_columns,
            k: n,
        };
        let a = Mat {
            data: &transposed,
            stride: n,
        };
        let b = Mat {
            data: x,
            stride: n_columns,
        };
        let c = MatMut {
            data: &mut products,
            stride: n_columns,
        };
        gemm(dims, a, b, c);
        for (sum, p) in self.products.iter_mut().zip(products) {
            *sum += f64::from(p);
        }
        self.n += n;
    }

    fn at(&self, a: usize, b: usize, n_columns: usize) -> f64 {
        self.products[a * n_columns + b]
    }

    /// One head's weights. The constant is not penalized.
    fn solve(&self, columns: Columns, h: usize, ridge: f64) -> Option<Vec<f64>> {
        let (of, n) = (columns.of_head(h), columns.len());
        let last = of.len() - 1;
        let mut a = DMatrix::from_fn(of.len(), of.len(), |i, j| self.at(of[i], of[j], n));
        for i in 0..last {
            a[(i, i)] += ridge * a[(i, i)] + f64::EPSILON * self.n as f64;
        }
        let b = DVector::from_fn(of.len(), |i, _| self.at(of[i], columns.target(h), n));
        let solved = a.cholesky()?.solve(&b);
        Some(solved.iter().copied().collect())
    }

    /// 1 − Σ(error²) / Σ(deviation²) of these weights.
    fn r2(&self, columns: Columns, h: usize, w: &[f64]) -> f64 {
        let (of, n, y) = (columns.of_head(h), columns.len(), columns.target(h));
        let mut error = self.at(y, y, n);
        for (i, &c) in of.iter().enumerate() {
            error -= 2.0 * w[i] * self.at(c, y, n);
            for (j, &d) in of.iter().enumerate() {
                error += w[i] * w[j] * self.at(c, d, n);
            }
        }
        let mean = self.at(of[of.len() - 1], y, n);
        1.0 - error / (self.at(y, y, n) - mean * mean / self.n.max(1) as f64)
    }
}

/// ln of the targets, `[kv_head][token]`, cut.
fn targets(settings: &Settings, repetition: &Repetition) -> Vec<Vec<f32>> {
    let scores = match settings.target {
        Target::Kvzip => &repetition.attention,
        Target::KvzipPlus => &repetition.weighted,
    };
    let (least, most) = settings.clip;
    let log = |&s: &f32| s.max(f32::MIN_POSITIVE).ln().clamp(least, most);
    scores.iter().map(|s| s.iter().map(log).collect()).collect()
}

/// A window's columns, `[token][column]`.
fn table(
    g: &LayerGeometry,
    columns: Columns,
    rows: &TapeLayer,
    targets: Vec<Vec<f32>>,
) -> Vec<f32> {
    let (d, width) = (g.head_dim, g.n_kv_heads * g.head_dim);
    let hidden = rows.hidden.chunks_exact(columns.n_embd);
    let kv = rows.k.chunks_exact(width).zip(rows.v.chunks_exact(width));
    let mut x = Vec::with_capacity(hidden.len() * columns.len());
    for (t, (hidden, (k, v))) in hidden.zip(kv).enumerate() {
        x.extend_from_slice(hidden);
        let heads = k.chunks_exact(d).zip(v.chunks_exact(d));
        let own: Vec<[f32; EXTRAS]> = heads.map(|(k, v)| extras(k, v, t as u32)).collect();
        x.extend(own.iter().map(|e| e[0]));
        x.extend(own.iter().map(|e| e[1]));
        x.extend_from_slice(&own[0][2..]);
        x.extend(targets.iter().map(|y| y[t]));
    }
    x
}

/// Spearman's rank correlation; equal values share the mean of their ranks.
fn spearman(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (ranks(a), ranks(b));
    let mean = (a.len() as f64 - 1.0) / 2.0;
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (x, y) in a.iter().zip(&b) {
        ab += (x - mean) * (y - mean);
        aa += (x - mean) * (x - mean);
        bb += (y - mean) * (y - mean);
    }
    if aa == 0.0 || bb == 0.0 {
        return 0.0;
    }
    ab / (aa * bb).sqrt()
}

fn ranks(x: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&i, &j| x[i].total_cmp(&x[j]));
    let mut ranks = vec![0.0; x.len()];
    let mut at = 0;
    for equal in order.chunk_by(|&i, &j| x[i] == x[j]) {
        let mean = at as f64 + (equal.len() as f64 - 1.0) / 2.0;
        equal.iter().for_each(|&i| ranks[i] = mean);
        at += equal.len();
    }
    ranks
}

impl Fitted {
    /// The file's bytes. `origin`: what it was made from; `model_sha256` among it.
    ///
    /// # Errors
    /// What safetensors says.
    pub fn file(&self, origin: BTreeMap<String, String>) -> Result<Vec<u8>, String> {
        let bytes: Vec<u8> = self.weights.iter().flat_map(|w| w.to_le_bytes()).collect();
        let view =
            TensorView::new(Dtype::F16, self.shape.to_vec(), &bytes).map_err(|e| e.to_string())?;
        safetensors::serialize([("gate.weight", view)], Some(origin.into_iter().collect()))
            .map_err(|e| e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_equal_values_are_shared_and_order_is_all_that_counts() {
        assert_eq!(ranks(&[3.0, 1.0, 3.0, 2.0]), [2.5, 0.0, 2.5, 1.0]);
        assert!((spearman(&[1.0, 2.0, 3.0], &[1.0, 10.0, 100.0]) - 1.0).abs() < 1e-12);
        assert!((spearman(&[1.0, 2.0, 3.0], &[9.0, 5.0, 4.0]) + 1.0).abs() < 1e-12);
        // By SciPy: spearmanr([1, 2, 2, 4, 5], [2, 1, 3, 3, 5]).
        assert!(
            (spearman(&[1.0, 2.0, 2.0, 4.0, 5.0], &[2.0, 1.0, 3.0, 3.0, 5.0]) - 0.763_157_894_7)
                .abs()
                < 1e-9
        );
    }

    #[test]
    fn a_linear_target_is_found_again() {
        let columns = Columns {
            n_embd: 3,
            n_kv_heads: 1,
        };
        let mut sums = Sums {
            products: vec![0.0; 64],
            n: 0,
        };
        let noise = |i: usize| ((i * 7919 + 13) % 1009) as f32 / 1009.0 - 0.5;
        let mut x = Vec::new();
        for t in 0..400 {
            let row: Vec<f32> = (0..6).map(|c| noise(7 * t + c)).collect();
            let y = 2.0 * row[0] - row[1] + 0.5 * row[3] + 0.25 * row[5] - 3.0;
            x.extend_from_slice(&[row[0], row[1], row[2], row[3], row[4], row[5], 1.0, y]);
        }
        sums.add(&x, columns.len());
        let w = sums.solve(columns, 0, 1e-9).unwrap();
        let want = [2.0, -1.0, 0.0, 0.5, 0.0, 0.25, -3.0];
        assert!(
            w.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-3),
            "{w:?}"
        );
        assert!(sums.r2(columns, 0, &w) > 0.999);
        let shrunk = sums.solve(columns, 0, 10.0).unwrap();
        assert!(
            shrunk[0] < 0.5 && sums.r2(columns, 0, &shrunk) < 0.9,
            "{shrunk:?}"
        );
    }
}
