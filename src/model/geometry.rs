//! From a model's spec to what a cache must know of its attention layers, RoPE tables included.
//!
//! Invariant: layers with equal RoPE settings share one table.

use std::f32::consts::TAU;
use std::sync::Arc;

use super::{ModelSpec, RopeLayout, RopeScaling, RopeSpec};
use crate::cache::rope::{PairLayout, Rope};
use crate::cache::{Geometry, LayerGeometry};

/// The geometry of a model's layers, with rotation tables for `n_positions` positions.
pub fn geometry(spec: &ModelSpec, n_positions: usize) -> Geometry {
    let mut tables: Vec<(&RopeSpec, Arc<Rope>)> = Vec::new();
    let layers = spec
        .layers
        .iter()
        .map(|layer| LayerGeometry {
            n_heads: spec.n_heads,
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim,
            scale: spec.attention_scale,
            rope: shared_table(&mut tables, &layer.rope, n_positions),
            // A window beyond u32 sees every position there can be.
            window: layer.window.map(|w| u32::try_from(w).unwrap_or(u32::MAX)),
        })
        .collect();
    Geometry { layers }
}

fn shared_table<'a>(
    tables: &mut Vec<(&'a RopeSpec, Arc<Rope>)>,
    rope: &'a RopeSpec,
    n_positions: usize,
) -> Arc<Rope> {
    if let Some((_, table)) = tables.iter().find(|(known, _)| *known == rope) {
        return Arc::clone(table);
    }
    let layout = match rope.layout {
        RopeLayout::Interleaved => PairLayout::Interleaved,
        RopeLayout::HalfSplit => PairLayout::HalfSplit,
    };
    let table = Arc::new(Rope::new(layout, inverse_frequencies(rope), n_positions));
    tables.push((rope, Arc::clone(&table)));
    table
}

/// One inverse frequency per rotated pair, scaling applied.
fn inverse_frequencies(rope: &RopeSpec) -> Vec<f32> {
    let plain = Rope::frequencies(rope.base, rope.n_rot);
    match &rope.scaling {
        RopeScaling::None => plain,
        RopeScaling::Linear { factor } => plain.iter().map(|f| f / factor).collect(),
        RopeScaling::Factors(factors) => plain.iter().zip(factors).map(|(f, d)| f / d).collect(),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => {
            // Llama 3.1's rule: how many times a wavelength fits into the original context decides.
            let stretch = |&f: &f32| {
                let turns = *original_context as f32 * f / TAU;
                let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let kept = kept.clamp(0.0, 1.0);
                (1.0 - kept) * f / factor + kept * f
            };
            plain.iter().map(stretch).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Architecture;
    use crate::model::WeightSource;
    use crate::model::tiny::{TinyConfig, TinyModel};

    fn rope(scaling: RopeScaling) -> RopeSpec {
        RopeSpec {
            base: 500_000.0,
            scaling,
            layout: RopeLayout::HalfSplit,
            n_rot: 128,
        }
    }

    #[test]
    fn scalings_follow_their_rules() {
        let plain = inverse_frequencies(&rope(RopeScaling::None));
        assert_eq!(plain.len(), 64);
        assert_eq!(plain[0], 1.0);
        let linear = inverse_frequencies(&rope(RopeScaling::Linear { factor: 4.0 }));
        assert!(plain.iter().zip(&linear).all(|(p, l)| *l == p / 4.0));
        let divisors: Vec<f32> = (0..64).map(|i| 1.0 + i as f32).collect();
        let divided = inverse_frequencies(&rope(RopeScaling::Factors(divisors.clone())));
        assert!((0..64).all(|i| divided[i] == plain[i] / divisors[i]));
    }

    /// Llama 3.1 8B's settings: short wavelengths stay, long ones are stretched eightfold, the rest lies between.
    #[test]
    fn llama3_keeps_the_short_and_stretches_the_long() {
        let plain = inverse_frequencies(&rope(RopeScaling::None));
        let scaled = inverse_frequencies(&rope(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        }));
        for (i, (p, s)) in plain.iter().zip(&scaled).enumerate() {
            let wavelength = f64::from(TAU) / f64::from(*p);
            match wavelength {
                w if w < 2048.0 => assert_eq!(s, p, "pair {i}"),
                w if w > 8192.0 => assert_eq!(*s, p / 8.0, "pair {i}"),
                w => {
                    let smooth = (8192.0 / w - 1.0) / 3.0;
                    let want = (1.0 - smooth) * f64::from(*p) / 8.0 + smooth * f64::from(*p);
                    assert!((f64::from(*s) - want).abs() < 1e-6 * want, "pair {i}");
                    assert!(s < p && *s > p / 8.0, "pair {i}");
                }
            }
        }
    }

    #[test]
    fn equal_layers_share_a_table() {
        let config = TinyConfig {
            n_layers: 4,
            ..TinyConfig::of(Architecture::Gemma3)
        };
        let model = TinyModel::new(&config);
        let g = geometry(model.spec(), 32);
        assert!(Arc::ptr_eq(&g.layers[0].rope, &g.layers[2].rope));
        assert!(!Arc::ptr_eq(&g.layers[0].rope, &g.layers[1].rope));
        assert_eq!((g.layers[0].window, g.layers[1].window), (Some(24), None));
        assert_eq!(g.layers[0].rope.n_positions(), 32);
        assert_eq!(g.scalars_per_token(), 4 * 2 * 2 * 32);
    }
}
