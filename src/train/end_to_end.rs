//! Heads weighed against each other by what eviction does to the model: a number added to each head's scores, found by the
//! KL divergence of the model with gated rows from the model with all.
//!
//! One threshold over all heads takes the same part of all old rows at every step, so that no term need hold it there. A
//! gate is open or closed in the forward pass; backwards it is a sigmoid around the threshold (straight through, as in DMS,
//! NVIDIA's delayed eviction), and moves with the threshold that all heads share.
//!
//! Invariants: scores are those of the exact reading; gradients reach the heads' numbers alone; other windows than those
//! trained on say how far it helps.

use burn::backend::Autodiff;
use burn::tensor::activation::{log_softmax, sigmoid};
use burn::tensor::{Tensor, TensorData};

use super::adam::Adam;
use super::forward::{Forward, RECENT, SINKS};
use super::gate::EndToEnd;
use crate::cache::Geometry;
use crate::compute::burn::{Burn, Flex};
use crate::model::ModelError;
use crate::model::transformer::Transformer;

type B = Autodiff<Flex>;

/// A model that gradients go through.
pub type Differentiable = Transformer<Burn<B>>;

/// Width of the sigmoid, in units of the scores (nats).
const TEMPERATURE: f32 = 0.5;

/// Adam's first rate, in nats.
const RATE: f32 = 0.1;

/// Every how many positions of a window's second half one is compared.
const COMPARED: usize = 2;

/// A window of text with its rows' scores.
#[derive(Debug, Clone, PartialEq)]
pub struct Window {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// `[layer][kv_head][token]`.
    pub scores: Vec<Vec<Vec<f32>>>,
}

/// What came out.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuned {
    /// What to add to each head's scores, `[layer][kv_head]`.
    pub shifts: Vec<f32>,
    /// KL divergence on the judging windows, in nats: before, after.
    pub divergence: [f64; 2],
}

/// Tunes heads on the first windows and judges by the second. All have `settings.window` tokens.
///
/// # Errors
/// A token that the model has no embedding for.
pub fn tune(
    model: &Differentiable,
    geometry: &Geometry,
    [fit, judge]: [&[Window]; 2],
    settings: &EndToEnd,
    step_done: impl Fn(),
) -> Result<Tuned, ModelError> {
    let tuning = Tuning {
        forward: Forward::new(model, geometry, settings.window),
        geometry,
        positions: (settings.window / 2..settings.window)
            .step_by(COMPARED)
            .map(|t| t as i32)
            .collect(),
        kept_fraction: settings.kept_fraction,
    };
    let n_heads = geometry.layers.iter().map(|g| g.n_kv_heads).sum();
    let mut shifts = vec![0.0f32; n_heads];
    let mean = |shifts: &[f32]| -> Result<f64, ModelError> {
        let all = judge.iter().map(|w| {
            let full = tuning.full(w)?;
            let divergence = tuning.gated(w, &full, shifts, leaf(shifts))?;
            Ok(f64::from(divergence.into_scalar()))
        });
        let all = all.collect::<Result<Vec<f64>, ModelError>>()?;
        Ok(all.iter().sum::<f64>() / all.len().max(1) as f64)
    };
    let before = mean(&shifts)?;
    let full: Vec<Tensor<B, 2>> = fit
        .iter()
        .map(|w| tuning.full(w))
        .collect::<Result<_, _>>()?;
    let mut adam = Adam::new(n_heads, RATE, settings.steps);
    for step in 0..settings.steps {
        let i = step % fit.len();
        let gradient = tuning.gradient(&fit[i], &full[i], &shifts)?;
        adam.step(&mut shifts, &gradient);
        step_done();
    }
    Ok(Tuned {
        divergence: [before, mean(&shifts)?],
        shifts,
    })
}

/// The heads' numbers as a tensor.
fn leaf(shifts: &[f32]) -> Tensor<B, 1> {
    let data = TensorData::new(shifts.to_vec(), [shifts.len()]);
    Tensor::from_data(data, &Default::default())
}

struct Tuning<'a> {
    forward: Forward<'a, B>,
    geometry: &'a Geometry,
    /// Those whose logits are compared.
    positions: Vec<i32>,
    kept_fraction: f64,
}

impl Tuning<'_> {
    /// Log-probabilities with all rows.
    fn full(&self, window: &Window) -> Result<Tensor<B, 2>, ModelError> {
        let logits = self.forward.logits(&window.ids, &self.positions, &[])?;
        Ok(log_softmax(logits, 1))
    }

    /// The mean divergence of the gated model, which depends on the heads' numbers as `leaf`. What is not differentiated
    /// must not be tracked: burn holds a graph, gigabytes of a window, until it is walked backwards.
    fn gated(
        &self,
        window: &Window,
        full: &Tensor<B, 2>,
        shifts: &[f32],
        leaf: Tensor<B, 1>,
    ) -> Result<Tensor<B, 1>, ModelError> {
        let device = Default::default();
        let threshold = self.threshold(window, shifts);
        let mut first = 0;
        let gates = self.geometry.layers.iter().zip(&window.scores);
        let gates: Vec<Option<Tensor<B, 3>>> = gates
            .map(|(g, scores)| {
                let heads = first..first + g.n_kv_heads;
                first = heads.end;
                if g.window.is_some() {
                    return None;
                }
                let shape = [g.n_kv_heads, 1, window.ids.len()];
                let scores = TensorData::new(scores.concat(), shape);
                let scores = Tensor::<B, 3>::from_data(scores, &device);
                let own = leaf.clone().slice([heads]).reshape([g.n_kv_heads, 1, 1]);
                let over = (scores + own).sub_scalar(threshold);
                let open = over.clone().greater_equal_elem(0.0).float();
                let soft = sigmoid(over.div_scalar(TEMPERATURE));
                Some(open + (soft.clone() - soft.detach()))
            })
            .collect();
        let logits = self.forward.logits(&window.ids, &self.positions, &gates)?;
        let apart = full.clone() - log_softmax(logits, 1);
        Ok((full.clone().exp() * apart).sum_dim(1).mean())
    }

    /// For the heads' numbers, the threshold's own movement included.
    fn gradient(
        &self,
        window: &Window,
        full: &Tensor<B, 2>,
        shifts: &[f32],
    ) -> Result<Vec<f32>, ModelError> {
        let leaf = leaf(shifts).require_grad();
        let divergence = self.gated(window, full, shifts, leaf.clone())?;
        let gradients = divergence.backward();
        let Some(gradient) = leaf.grad(&gradients) else {
            return Ok(vec![0.0; shifts.len()]);
        };
        let gradient: Vec<f32> = gradient
            .into_data()
            .convert::<f32>()
            .into_vec()
            .expect("the data was just converted to f32");
        let total: f32 = gradient.iter().sum();
        let moves = self.moves(window, shifts);
        Ok(gradient
            .iter()
            .zip(moves)
            .map(|(g, m)| g - m * total)
            .collect())
    }

    /// Scores of the rows that the last query may do without, by head: nothing for layers that are not gated.
    fn candidates<'a>(
        &'a self,
        window: &'a Window,
        shifts: &'a [f32],
    ) -> impl Iterator<Item = Vec<f32>> + 'a {
        let layers = self.geometry.layers.iter().zip(&window.scores);
        let heads = layers.flat_map(|(g, heads)| heads.iter().map(|s| (g.window.is_none(), s)));
        heads.zip(shifts).map(|((gated, scores), shift)| {
            let end = scores.len().saturating_sub(RECENT + 1);
            let old = if gated { scores.get(SINKS..end) } else { None };
            old.unwrap_or(&[]).iter().map(|s| s + shift).collect()
        })
    }

    /// The score that as many old rows reach as are to stay.
    fn threshold(&self, window: &Window, shifts: &[f32]) -> f32 {
        let mut all: Vec<f32> = self.candidates(window, shifts).flatten().collect();
        if all.is_empty() {
            return f32::NEG_INFINITY;
        }
        all.sort_unstable_by(|a, b| b.total_cmp(a));
        let kept = (self.kept_fraction * all.len() as f64).round() as usize;
        all[kept.clamp(1, all.len()) - 1]
    }

    /// How far the threshold moves with each head's number: the head's part of what is near it.
    fn moves(&self, window: &Window, shifts: &[f32]) -> Vec<f32> {
        let threshold = self.threshold(window, shifts);
        let slope = |s: &f32| {
            let soft = 1.0 / (1.0 + ((threshold - s) / TEMPERATURE).exp());
            soft * (1.0 - soft)
        };
        let near: Vec<f32> = self
            .candidates(window, shifts)
            .map(|scores| scores.iter().map(slope).sum())
            .collect();
        let total: f32 = near.iter().sum();
        near.iter()
            .map(|n| n / total.max(f32::MIN_POSITIVE))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cache::LayerGeometry;
    use crate::model::geometry::geometry;
    use crate::model::tiny::{TinyConfig, TinyModel};
    use crate::model::transformer::LanguageModel;

    const N: usize = 160;

    fn noise(i: usize) -> f32 {
        ((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0
    }

    /// Scores that say nothing; the first head's are too high by far.
    fn window(geometry: &Geometry, seed: usize) -> Window {
        let head = |l: usize, h: usize| {
            let more = if l + h == 0 { 3.0 } else { 0.0 };
            (0..N)
                .map(|t| noise(seed + 31 * t + 577 * (2 * l + h)) + more)
                .collect()
        };
        let layer =
            |(l, g): (usize, &LayerGeometry)| (0..g.n_kv_heads).map(|h| head(l, h)).collect();
        Window {
            ids: (0..N)
                .map(|i| ((i * 89 + i * i * 7 + seed) % 256) as u32)
                .collect(),
            scores: geometry.layers.iter().enumerate().map(layer).collect(),
        }
    }

    #[test]
    fn a_head_that_takes_too_much_gives_some_back() {
        let model = Differentiable::load(Arc::new(TinyModel::new(&TinyConfig::default()))).unwrap();
        let geometry = geometry(model.spec(), N);
        let windows = [window(&geometry, 1), window(&geometry, 50)];
        let settings = EndToEnd {
            windows: 2,
            window: N,
            steps: 24,
            kept_fraction: 0.4,
        };
        let tuned = tune(&model, &geometry, [&windows, &windows], &settings, || ()).unwrap();
        let [before, after] = tuned.divergence;
        assert!(before > 1e-4 && after < 0.9 * before, "{before} {after}");
        let others = tuned.shifts[1..]
            .iter()
            .copied()
            .fold(f32::INFINITY, f32::min);
        assert!(tuned.shifts[0] < others, "{:?}", tuned.shifts);
        let again = tune(&model, &geometry, [&windows, &windows], &settings, || ()).unwrap();
        assert_eq!(again, tuned);
    }

    #[test]
    fn the_threshold_takes_the_part_that_is_asked_for_and_moves_with_all_heads() {
        let model = Differentiable::load(Arc::new(TinyModel::new(&TinyConfig::default()))).unwrap();
        let geometry = geometry(model.spec(), N);
        let tuning = Tuning {
            forward: Forward::new(&model, &geometry, N),
            geometry: &geometry,
            positions: vec![N as i32 - 1],
            kept_fraction: 0.3,
        };
        let window = window(&geometry, 7);
        let shifts = [-3.0, 0.5, 0.0, 0.0];
        let threshold = tuning.threshold(&window, &shifts);
        let rows: Vec<f32> = tuning.candidates(&window, &shifts).flatten().collect();
        assert_eq!(rows.len(), 4 * (N - RECENT - 1 - SINKS));
        let kept = rows.iter().filter(|&&s| s >= threshold).count();
        assert_eq!(kept, (0.3 * rows.len() as f64).round() as usize);
        let moves = tuning.moves(&window, &shifts);
        assert!((moves.iter().sum::<f32>() - 1.0).abs() < 1e-5 && moves.iter().all(|m| *m > 0.0));
        // All heads moved alike move the threshold alike.
        let moved = tuning.threshold(&window, &shifts.map(|s| s + 2.0));
        assert!((moved - threshold - 2.0).abs() < 1e-5);
    }
}
