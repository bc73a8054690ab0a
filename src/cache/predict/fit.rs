//! Fitting predictors layer by layer on a calibration text.
//!
//! Invariant: the inputs of a layer's fit are the rows of the layer before as a cache would hold them: predicted by the
//! rounded weights, plus what the layer's own codecs give back of the residual.

use super::moments::least_squares;
use super::{Affine, Predictor, gather};
use crate::cache::project::aqua::{DEF, Prediction};
use crate::cache::stage::{Kind, Side, StageError};

/// A fit on its way through the layers: [`Fit::residuals`] and [`Fit::restore`] in turns, K before V.
#[derive(Debug)]
pub struct Fit {
    prediction: Prediction,
    width: usize,
    /// Weights that are known already.
    known: Option<Predictor>,
    layers: Vec<[Affine; 2]>,
    /// By side: rows of the layer at work where it was restored, else of the layer before, `[row][width]`.
    rows: [Vec<f32>; 2],
    predicted: Vec<f32>,
}

impl Fit {
    /// Nothing fitted yet; `known` weights are taken as they are. `width`: channels of all KV heads together.
    pub fn new(prediction: Prediction, width: usize, known: Option<Predictor>) -> Self {
        Self {
            prediction,
            width,
            known,
            layers: Vec::new(),
            rows: Default::default(),
            predicted: Vec::new(),
        }
    }

    /// Whether there is nothing to fit.
    pub fn is_known(&self) -> bool {
        self.known.is_some()
    }

    /// Fits one side of the next layer to its rows, `[row][kv_head · head_dim]`, and leaves of them what the prediction
    /// misses.
    ///
    /// # Errors
    /// No rows, or rows that are not finite.
    pub fn residuals(&mut self, side: Side, rows: &mut [f32]) -> Result<(), StageError> {
        if side == Side::K {
            self.layers.push(Default::default());
        }
        let layer = self.layers.len() - 1;
        let width = self.width;
        let mut inputs = Vec::new();
        if layer > 0 {
            let [keys, _] = &self.rows;
            gather(side, &self.rows[side as usize], keys, width, &mut inputs);
        }
        let affine = match &self.known {
            Some(known) => known.affine(layer, side).clone(),
            None => fit(&inputs, (rows, width), self.prediction).ok_or_else(|| refused(layer))?,
        };
        let mut weights = Vec::new();
        affine.widen(self.prediction.weights, &mut weights);
        self.predicted.resize(rows.len(), 0.0);
        affine.apply(&weights, &inputs, &mut self.predicted);
        for (x, p) in rows.iter_mut().zip(&self.predicted) {
            *x -= p;
        }
        self.layers[layer][side as usize] = affine;
        Ok(())
    }

    /// Takes in what the codecs gave back of the residuals that were handed out last.
    pub fn restore(&mut self, side: Side, decoded: Vec<f32>) {
        let rows = &mut self.rows[side as usize];
        *rows = decoded;
        for (x, p) in rows.iter_mut().zip(&self.predicted) {
            *x += p;
        }
    }

    /// The predictors of all layers.
    pub fn finish(self) -> Predictor {
        self.known.unwrap_or(Predictor {
            format: self.prediction.weights,
            layers: self.layers,
        })
    }
}

fn fit(inputs: &[f32], (rows, width): (&[f32], usize), prediction: Prediction) -> Option<Affine> {
    let n_rows = rows.len() / width;
    let n_inputs = inputs.len().checked_div(n_rows)?;
    let line = least_squares((inputs, n_inputs), (rows, width), prediction.ridge)?;
    let codec = prediction.weights.codec();
    let weights: Vec<f32> = line.weights.iter().map(|&w| w as f32).collect();
    let n = codec.row_bytes(width);
    let mut affine = Affine {
        weights: vec![0; n_inputs * n],
        bias: vec![0.0; width],
    };
    for (row, out) in weights
        .chunks_exact(width)
        .zip(affine.weights.chunks_exact_mut(n))
    {
        codec.encode(row, out);
    }
    let mut stored = Vec::new();
    affine.widen(prediction.weights, &mut stored);
    affine.bias = line.bias(&stored);
    Some(affine)
}

fn refused(layer: usize) -> StageError {
    StageError::Parameter {
        kind: Kind::Project,
        name: DEF.name.to_owned(),
        problem: format!(
            "layer {layer}: the calibration has no rows after the sinks, or some that are not finite: calibrate on \
             more text"
        ),
    }
}
