//! The `cpu` backend against the `burn` backend: one transformer, two sets of kernels that share no code.
#![cfg(feature = "burn")]

use std::path::PathBuf;
use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use kvlab::cache::pipeline::StagedCache;
use kvlab::cache::stages::Materials;
use kvlab::cache::strategy::Strategy;
use kvlab::cache::{Admission, Batch, KvCache, SeqId};
use kvlab::compute::burn::{Burn, Flex};
use kvlab::compute::cpu::Cpu;
use kvlab::compute::cpu::linear::Matrix;
use kvlab::model::geometry::geometry;
use kvlab::model::gguf::TensorType;
use kvlab::model::source::{ModelDir, builtin};
use kvlab::model::tiny::{TinyConfig, TinyModel, TinyOutput};
use kvlab::model::transformer::{LanguageModel, Transformer};
use kvlab::model::weights::StoredMatrix;
use kvlab::model::{Architecture, WeightSource, load};
use rand::{Rng, SeedableRng};

/// Logits of a text in one step over a cache of f32 rows, `[token][n_vocab]`.
fn logits(model: &dyn LanguageModel, tokens: &[u32]) -> Vec<f32> {
    let geometry = geometry(model.spec(), tokens.len());
    let materials = Materials {
        geometry: &geometry,
        calibration: None,
        backing_dir: None,
    };
    let mut cache = StagedCache::new(&Strategy::bare("f32"), materials).unwrap();
    cache.admit(SeqId(0), Admission::Streaming).unwrap();
    let batch = Batch::single(SeqId(0), 0..tokens.len() as u32);
    let hidden = model.step(&batch, tokens, &mut cache).unwrap();
    let mut out = vec![0.0; tokens.len() * model.spec().n_vocab];
    model.logits(&hidden, 0..tokens.len(), &mut out);
    out
}

fn largest_difference(source: Arc<dyn WeightSource>, tokens: &[u32]) -> f32 {
    let ours = logits(&Transformer::<Cpu>::load(source.clone()).unwrap(), tokens);
    let theirs = logits(&Transformer::<Burn<Flex>>::load(source).unwrap(), tokens);
    let spread = ours.iter().copied().fold(0.0f32, |m, x| m.max(x.abs()));
    assert!(spread > 1.0, "logits of {spread} at most test nothing");
    let pairs = ours.iter().zip(&theirs);
    pairs.fold(0.0, |worst, (a, b)| worst.max((a - b).abs()))
}

#[test]
fn tiny_models_of_every_architecture_agree() {
    let tokens: Vec<u32> = (0..60).map(|i| (i * i * 7 + i * 3) % 256).collect();
    for architecture in [
        Architecture::Llama,
        Architecture::Qwen2,
        Architecture::Qwen3,
        Architecture::Gemma3,
    ] {
        for output in [TinyOutput::Tied, TinyOutput::Separate] {
            let config = TinyConfig {
                output,
                ..TinyConfig::of(architecture)
            };
            let worst = largest_difference(Arc::new(TinyModel::new(&config)), &tokens);
            assert!(worst <= 1e-3, "{architecture:?}, {output:?}: {worst:e}");
        }
    }
}

fn installed(name: &str) -> Option<PathBuf> {
    let model = builtin().iter().find(|m| m.name == name).unwrap();
    let path = ModelDir::locate(None).ok()?.builtin_path(model);
    if !path.is_file() {
        eprintln!(
            "skipped: `kvlab fetch {name}` puts it into {}",
            path.display()
        );
        return None;
    }
    Some(path)
}

#[test]
fn smollm2_agrees_over_64_tokens() {
    let Some(path) = installed("smollm2-135m-instruct") else {
        return;
    };
    let loaded = load(&path).unwrap();
    let tokens = loaded
        .tokenizer
        .encode(include_str!("../src/lib.rs"))
        .unwrap();
    let worst = largest_difference(Arc::from(loaded.weights), &tokens[..64]);
    println!("SmolLM2: logits of the two backends within {worst:e}");
    assert!(worst <= 1e-3, "{worst:e}");
}

/// How many of a row's 1536 outputs have other bits when the row is alone than when it is the first of 2, 7, 64 and 512.
#[test]
fn a_row_alone_and_in_a_batch() {
    let (n_in, n_out) = (576, 1536);
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(3);
    let mut random =
        |n: usize| -> Vec<f32> { (0..n).map(|_| rng.random_range(-1.0..1.0)).collect() };
    let (x, w) = (random(512 * n_in), random(n_in * n_out));
    let device = Default::default();
    let weights = Tensor::<Flex, 2>::from_data(TensorData::new(w.clone(), [n_in, n_out]), &device);
    let flex = |n: usize| -> Vec<f32> {
        let x = TensorData::new(x[..n * n_in].to_vec(), [n, n_in]);
        let y = Tensor::<Flex, 2>::from_data(x, &device).matmul(weights.clone());
        y.into_data().into_vec().unwrap()
    };
    let rows: Vec<f32> = (0..n_out * n_in)
        .map(|i| w[i % n_in * n_out + i / n_in])
        .collect();
    let stored = StoredMatrix::owned(TensorType::F32, bytemuck::cast_slice(&rows).to_vec());
    let matrix = Matrix::new((n_out, n_in), stored);
    let ours = |n: usize| {
        let mut y = vec![0.0; n * n_out];
        matrix.apply(&x[..n * n_in], None, &mut y);
        y
    };
    let differing = |alone: &[f32], batch: &[f32]| {
        let pairs = alone.iter().zip(batch);
        pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).count()
    };
    for n in [2, 7, 64, 512] {
        let (burn, cpu) = (differing(&flex(1), &flex(n)), differing(&ours(1), &ours(n)));
        println!("first row of {n}: burn-flex differs in {burn} of {n_out} outputs, cpu in {cpu}");
        assert_eq!(cpu, 0);
    }
    let worst = ours(512)
        .iter()
        .zip(&flex(512))
        .fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(worst < 1e-3, "{worst:e}");
}
