//! Logits of the f32 path against Hugging Face transformers on the same weights, dequantized to f32 (`tests/golden/`).
//!
//! Runs where the built-in models lie in the models folder (`kvlab fetch NAME`); skips with a line otherwise.

use std::path::PathBuf;
use std::sync::Arc;

use kvlab::cache::pipeline::StagedCache;
use kvlab::cache::stages::Materials;
use kvlab::cache::strategy::Strategy;
use kvlab::cache::{Admission, Batch, KvCache, SeqId};
use kvlab::compute::cpu::Cpu;
use kvlab::model;
use kvlab::model::geometry::geometry;
use kvlab::model::source::{ModelDir, builtin};
use kvlab::model::transformer::{LanguageModel, Transformer};
use safetensors::SafeTensors;

/// The largest difference of a logit that passes.
const LOGIT_TOLERANCE: f32 = 3e-4;
/// Rows of logits at a time.
const TILE: usize = 32;

/// What `make_logits.py` wrote.
struct Golden {
    ids: Vec<u32>,
    positions: Vec<u32>,
    vocab_ids: Vec<u32>,
    /// `[position][vocab_id]`.
    logits: Vec<f32>,
    logsumexp: Vec<f32>,
    argmax: Vec<u32>,
    margin: Vec<f32>,
}

fn words<T>(file: &SafeTensors<'_>, name: &str, from: fn([u8; 4]) -> T) -> Vec<T> {
    let tensor = file.tensor(name).expect(name);
    let bytes = tensor.data().as_chunks().0;
    bytes.iter().map(|&b| from(b)).collect()
}

fn golden(name: &str) -> Golden {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let bytes = std::fs::read(path.join(name)).expect("golden vectors are in the repository");
    let file = SafeTensors::deserialize(&bytes).expect("golden vectors are whole");
    let ints = |name| words(&file, name, u32::from_le_bytes);
    let floats = |name| words(&file, name, f32::from_le_bytes);
    Golden {
        ids: ints("ids"),
        positions: ints("positions"),
        vocab_ids: ints("vocab_ids"),
        logits: floats("logits"),
        logsumexp: floats("logsumexp"),
        argmax: ints("argmax"),
        margin: floats("margin"),
    }
}

fn installed(name: &str) -> Option<PathBuf> {
    let model = builtin()
        .iter()
        .find(|m| m.name == name)
        .expect("a built-in name");
    let path = ModelDir::locate(None).ok()?.builtin_path(model);
    if !path.is_file() {
        eprintln!(
            "skipped: {name} is not there; `kvlab fetch {name}` puts it into {}",
            path.display()
        );
        return None;
    }
    Some(path)
}

/// Largest distances so far.
#[derive(Debug, Default)]
struct Worst {
    logit: f32,
    logsumexp: f32,
}

impl Worst {
    /// Takes in the logits of one position, and checks its top token where the golden margin leaves no doubt.
    fn update(&mut self, golden: &Golden, position: usize, row: &[f32]) {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|&x| f64::from(x - top).exp()).sum();
        let logsumexp = top + sum.ln() as f32;
        let distance = (logsumexp - golden.logsumexp[position]).abs();
        self.logsumexp = self.logsumexp.max(distance);
        if golden.margin[position] > 2.0 * LOGIT_TOLERANCE {
            let id = golden.argmax[position] as usize;
            assert_eq!(row[id], top, "top token at position {position}");
        }
        let n = golden.vocab_ids.len();
        let at = golden
            .positions
            .iter()
            .position(|&p| p as usize == position);
        let want = at.map_or(&[][..], |at| &golden.logits[at * n..][..n]);
        for (&id, want) in golden.vocab_ids.iter().zip(want) {
            self.logit = self.logit.max((row[id as usize] - want).abs());
        }
    }
}

/// The largest distances from the golden logits and log-sum-exps.
fn compare(name: &str, golden: &Golden, chunk: usize) -> Option<Worst> {
    let loaded = model::load(&installed(name)?).expect("the built-in model loads");
    let model = Transformer::<Cpu>::load(Arc::from(loaded.weights)).expect("its weights load");
    let geometry = geometry(model.spec(), golden.ids.len());
    let materials = Materials {
        geometry: &geometry,
        calibration: None,
        backing_dir: None,
    };
    let mut cache = StagedCache::new(&Strategy::bare("f32"), materials).expect("f32 rows");
    let seq = SeqId(0);
    cache
        .admit(seq, Admission::Streaming)
        .expect("an empty cache admits");
    let n_vocab = model.spec().n_vocab;
    let mut worst = Worst::default();
    for (c, tokens) in golden.ids.chunks(chunk).enumerate() {
        let first = (c * chunk) as u32;
        let batch = Batch::single(seq, first..first + tokens.len() as u32);
        let hidden = model.step(&batch, tokens, &mut cache).expect("a step");
        for first_row in (0..tokens.len()).step_by(TILE) {
            let rows = first_row..(first_row + TILE).min(tokens.len());
            let mut tile = vec![0.0; rows.len() * n_vocab];
            model.logits(&hidden, rows.clone(), &mut tile);
            for (i, row) in rows.zip(tile.chunks_exact(n_vocab)) {
                worst.update(golden, first as usize + i, row);
            }
        }
    }
    let n = golden.ids.len();
    println!("{name}, {n} tokens in chunks of {chunk}: {worst:?}");
    Some(worst)
}

fn check(name: &str, file: &str, chunk: usize) {
    if let Some(worst) = compare(name, &golden(file), chunk) {
        assert!(worst.logit <= LOGIT_TOLERANCE, "{worst:?}");
        assert!(worst.logsumexp <= LOGIT_TOLERANCE, "{worst:?}");
    }
}

#[test]
fn smollm2_agrees_with_transformers() {
    check("smollm2-135m-instruct", "logits_smollm2.safetensors", 512);
}

#[test]
fn gemma3_agrees_with_transformers_inside_its_window() {
    check("gemma-3-270m", "logits_gemma3_512.safetensors", 512);
}

#[test]
fn gemma3_agrees_with_transformers_past_its_window() {
    check("gemma-3-270m", "logits_gemma3_1280.safetensors", 200);
}
