//! Heads weighed against each other by what eviction does to the model: how far each head's scores are moved, and how far
//! they are spread, found by the KL divergence of the model with gated rows from the model with all.
//!
//! ```text
//! s' = c + (s − c) · e^(tilt / 4) + shift         c: the mean of the head's scores on the windows of training
//! ```
//!
//! What is made less is the mean logarithm of the divergence, over windows and kept fractions: where little is lost, a part
//! of it counts as much as the same part elsewhere.
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

/// ln of a head's spread, per unit of its tilt.
const TILT: f32 = 0.25;

/// Added to a divergence before its logarithm, in nats.
const LEAST: f32 = 1e-6;

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
    /// What to multiply each head's scores by, and what to add then, `[layer][kv_head]`.
    pub heads: Vec<(f32, f32)>,
    /// Mean KL divergence on the judging windows, of each kept fraction, in nats: before, after.
    pub divergence: Vec<[f64; 2]>,
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
    let n_heads = geometry.layers.iter().map(|g| g.n_kv_heads).sum();
    let tuning = Tuning {
        forward: Forward::new(model, geometry, settings.window),
        geometry,
        positions: (settings.window / 2..settings.window)
            .step_by(COMPARED)
            .map(|t| t as i32)
            .collect(),
        centres: centres(fit, n_heads),
    };
    let fractions = &settings.kept_fractions;
    let mut numbers = vec![0.0f32; 2 * n_heads];
    let judged = |numbers: &[f32]| -> Result<Vec<f64>, ModelError> {
        let mut sums = vec![0.0; fractions.len()];
        for window in judge {
            let full = tuning.full(window)?;
            for (sum, &kept) in sums.iter_mut().zip(fractions) {
                let divergence = tuning.gated((window, kept), &full, numbers, leaf(numbers))?;
                *sum += f64::from(divergence.into_scalar());
            }
        }
        let n = judge.len().max(1) as f64;
        Ok(sums.into_iter().map(|sum| sum / n).collect())
    };
    let before = judged(&numbers)?;
    let full: Vec<Tensor<B, 2>> = fit
        .iter()
        .map(|w| tuning.full(w))
        .collect::<Result<_, _>>()?;
    let mut adam = Adam::new(numbers.len(), RATE, settings.steps);
    for step in 0..settings.steps {
        let i = step % fit.len();
        // Each window meets the fractions in turn.
        let kept = fractions[(i + step / fit.len()) % fractions.len()];
        let gradient = tuning.gradient((&fit[i], kept), &full[i], &numbers)?;
        adam.step(&mut numbers, &gradient);
        step_done();
    }
    let after = judged(&numbers)?;
    Ok(Tuned {
        heads: (0..n_heads)
            .map(|h| {
                let factor = (TILT * numbers[n_heads + h]).exp();
                (factor, tuning.centres[h] * (1.0 - factor) + numbers[h])
            })
            .collect(),
        divergence: before
            .into_iter()
            .zip(after)
            .map(<[f64; 2]>::from)
            .collect(),
    })
}

/// The mean of each head's scores.
fn centres(windows: &[Window], n_heads: usize) -> Vec<f32> {
    let mut sums = vec![(0.0f64, 0usize); n_heads];
    for window in windows {
        for ((sum, n), scores) in sums.iter_mut().zip(window.scores.iter().flatten()) {
            *sum += scores.iter().map(|&s| f64::from(s)).sum::<f64>();
            *n += scores.len();
        }
    }
    let mean = |(sum, n): (f64, usize)| (sum / n.max(1) as f64) as f32;
    sums.into_iter().map(mean).collect()
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
    /// About which each head's scores are spread.
    centres: Vec<f32>,
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
        (window, kept): (&Window, f64),
        full: &Tensor<B, 2>,
        numbers: &[f32],
        leaf: Tensor<B, 1>,
    ) -> Result<Tensor<B, 1>, ModelError> {
        let device = Default::default();
        let threshold = self.threshold((window, kept), numbers);
        let n_heads = self.centres.len();
        let mut first = 0;
        let gates = self.geometry.layers.iter().zip(&window.scores);
        let gates: Vec<Option<Tensor<B, 3>>> = gates
            .map(|(g, scores)| {
                let heads = first..first + g.n_kv_heads;
                first = heads.end;
                if g.window.is_some() {
                    return None;
                }
                let apart = scores.iter().zip(&self.centres[heads.clone()]);
                let apart: Vec<f32> = apart
                    .flat_map(|(scores, c)| scores.iter().map(move |s| s - c))
                    .collect();
                let shape = [g.n_kv_heads, 1, window.ids.len()];
                let apart = Tensor::<B, 3>::from_data(TensorData::new(apart, shape), &device);
                let own = |at: usize| {
                    let own = heads.start + at..heads.end + at;
                    leaf.clone().slice([own]).reshape([g.n_kv_heads, 1, 1])
                };
                let centres = self.centres[heads.clone()].to_vec();
                let centres = TensorData::new(centres, [g.n_kv_heads, 1, 1]);
                let centres = Tensor::<B, 3>::from_data(centres, &device);
                let spread = own(n_heads).mul_scalar(TILT).exp();
                let over = (apart * spread + (own(0) + centres)).sub_scalar(threshold);
                let open = over.clone().greater_equal_elem(0.0).float();
                let soft = sigmoid(over.div_scalar(TEMPERATURE));
                Some(open + (soft.clone() - soft.detach()))
            })
            .collect();
        let logits = self.forward.logits(&window.ids, &self.positions, &gates)?;
        let apart = full.clone() - log_softmax(logits, 1);
        Ok((full.clone().exp() * apart).sum_dim(1).mean())
    }

    /// Of the logarithm of the divergence, for the heads' numbers, the threshold's own movement included.
    fn gradient(
        &self,
        window: (&Window, f64),
        full: &Tensor<B, 2>,
        numbers: &[f32],
    ) -> Result<Vec<f32>, ModelError> {
        let leaf = leaf(numbers).require_grad();
        let divergence = self.gated(window, full, numbers, leaf.clone())?;
        let gradients = divergence.clamp_min(0.0).add_scalar(LEAST).log().backward();
        let Some(gradient) = leaf.grad(&gradients) else {
            return Ok(vec![0.0; numbers.len()]);
        };
        let gradient: Vec<f32> = gradient
            .into_data()
            .convert::<f32>()
            .into_vec()
            .expect("the data was just converted to f32");
        let total: f32 = gradient[..self.centres.len()].iter().sum();
        let moves = self.moves(window, numbers);
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
        numbers: &'a [f32],
    ) -> impl Iterator<Item = Vec<f32>> + 'a {
        let layers = self.geometry.layers.iter().zip(&window.scores);
        let heads = layers.flat_map(|(g, heads)| heads.iter().map(|s| (g.window.is_none(), s)));
        let (shifts, tilts) = numbers.split_at(self.centres.len());
        let own = shifts.iter().zip(tilts).zip(&self.centres);
        heads.zip(own).map(|((gated, scores), ((shift, tilt), c))| {
            let end = scores.len().saturating_sub(RECENT + 1);
            let old = if gated { scores.get(SINKS..end) } else { None };
            let spread = (TILT * tilt).exp();
            let moved = |s: &f32| (s - c).mul_add(spread, shift + c);
            old.unwrap_or(&[]).iter().map(moved).collect()
        })
    }

    /// The score that as many old rows reach as are to stay.
    fn threshold(&self, (window, kept): (&Window, f64), numbers: &[f32]) -> f32 {
        let mut all: Vec<f32> = self.candidates(window, numbers).flatten().collect();
        if all.is_empty() {
            return f32::NEG_INFINITY;
        }
        all.sort_unstable_by(|a, b| b.total_cmp(a));
        let kept = (kept * all.len() as f64).round() as usize;
        all[kept.clamp(1, all.len()) - 1]
    }

    /// How far the threshold moves with each head's numbers: by what is near it.
    fn moves(&self, window: (&Window, f64), numbers: &[f32]) -> Vec<f32> {
        let threshold = self.threshold(window, numbers);
        let slope = |s: f32| {
            let soft = 1.0 / (1.0 + ((threshold - s) / TEMPERATURE).exp());
            soft * (1.0 - soft)
        };
        let n_heads = self.centres.len();
        let mut moves = vec![0.0f32; 2 * n_heads];
        for (h, scores) in self.candidates(window.0, numbers).enumerate() {
            let still = self.centres[h] + numbers[h];
            for s in scores {
                moves[h] += slope(s);
                moves[n_heads + h] += slope(s) * TILT * (s - still);
            }
        }
        let near = moves[..n_heads].iter().sum::<f32>();
        moves
            .iter_mut()
            .for_each(|m| *m /= near.max(f32::MIN_POSITIVE));
        moves
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
            kept_fractions: vec![0.4, 0.2],
        };
        let tuned = tune(&model, &geometry, [&windows, &windows], &settings, || ()).unwrap();
        for [before, after] in &tuned.divergence {
            assert!(*before > 1e-4 && *after < 0.9 * before, "{before} {after}");
        }
        // At the first head's usual score, which is too high.
        let at = |(factor, addend): (f32, f32)| factor * 3.0 + addend - 3.0;
        let others = tuned.heads[1..].iter().map(|(_, addend)| *addend);
        let least = others.fold(f32::INFINITY, f32::min);
        assert!(at(tuned.heads[0]) < least, "{:?}", tuned.heads);
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
            centres: vec![3.0, 0.0, 0.1, -0.1],
        };
        let window = window(&geometry, 7);
        let numbers = [-3.0, 0.5, 0.0, 0.0, 1.0, -2.0, 0.0, 0.5];
        let threshold = tuning.threshold((&window, 0.3), &numbers);
        let rows: Vec<f32> = tuning.candidates(&window, &numbers).flatten().collect();
        assert_eq!(rows.len(), 4 * (N - RECENT - 1 - SINKS));
        let kept = rows.iter().filter(|&&s| s >= threshold).count();
        assert_eq!(kept, (0.3 * rows.len() as f64).round() as usize);
        let moves = tuning.moves((&window, 0.3), &numbers);
        let (shifts, tilts) = moves.split_at(4);
        assert!((shifts.iter().sum::<f32>() - 1.0).abs() < 1e-5 && shifts.iter().all(|m| *m > 0.0));
        // All heads moved alike move the threshold alike.
        let all: Vec<f32> = [2.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]
            .iter()
            .zip(numbers)
            .map(|(by, x)| x + by)
            .collect();
        let moved = tuning.threshold((&window, 0.3), &all);
        assert!((moved - threshold - 2.0).abs() < 1e-5);
        // Moved with a number, the threshold keeps as many rows as before, counted by how far open their gates are.
        let open = |numbers: &[f32], threshold: f32| -> f64 {
            let rows = tuning.candidates(&window, numbers).flatten();
            let soft = |s: f32| 1.0 / (1.0 + f64::from((threshold - s) / TEMPERATURE).exp());
            rows.map(soft).sum()
        };
        let before = open(&numbers, threshold);
        for i in 0..8 {
            let mut nudged = numbers;
            nudged[i] += 0.02;
            let still = open(&nudged, threshold) - before;
            let with = open(&nudged, threshold + 0.02 * moves[i]) - before;
            assert!(with.abs() < 0.1 * still.abs() + 1e-4, "{i}: {with} {still}");
        }
        assert!(tilts.iter().any(|m| m.abs() > 1e-2), "{tilts:?}");
    }
}
