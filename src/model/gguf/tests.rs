//! Tests of the GGUF reader: goldens for each block type, whole small models, and files damaged in every way.

use std::path::{Path, PathBuf};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::SafeTensors;

use super::testing::{Builder, Meta, tiny_gemma, tiny_llama};
use super::*;
use crate::model::source::real_model;
use crate::model::spec::{Activation, RopeLayout, RopeScaling};
use crate::model::weights::WeightSource;

const ALL: [TensorType; 11] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q8_0,
    TensorType::Q4_K,
    TensorType::Q5_K,
    TensorType::Q6_K,
];

fn written(folder: &tempfile::TempDir, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, bytes).expect("the temporary folder is writable");
    path
}

fn open(bytes: &[u8]) -> Result<(MappedWeights, Tokenizer), ModelError> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    open_model(&written(&folder, bytes))
}

fn refusal(bytes: &[u8]) -> String {
    let Err(error) = open(bytes) else {
        panic!("a damaged file was opened")
    };
    let message = error.to_string();
    assert!(!message.contains('\n'), "one line: {message}");
    message
}

#[test]
fn blocks_decode_as_gguf_py_does_to_the_bit() {
    let golden = include_bytes!("../../../tests/golden/dequant.safetensors");
    let golden = SafeTensors::deserialize(golden).expect("the golden file is sound");
    for kind in ALL.into_iter().filter(|kind| *kind != TensorType::F32) {
        let blocks = golden
            .tensor(&format!("{kind:?}.blocks"))
            .expect("blocks of each type");
        let values = golden
            .tensor(&format!("{kind:?}.values"))
            .expect("values of each type");
        let expected: Vec<u32> = values
            .data()
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        let mut out = vec![f32::NAN; expected.len()];
        kind.dequantize(blocks.data(), &mut out);
        let got: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
        assert_eq!(got, expected, "{kind:?}");
    }
}

#[test]
fn a_whole_model_of_each_type_is_read() {
    for kind in ALL {
        let (weights, tokenizer) =
            open(&tiny_llama(kind).build()).expect("the tiny model is sound");
        let spec = weights.spec();
        assert_eq!(
            (spec.n_layers, spec.n_vocab, spec.n_heads, spec.n_kv_heads),
            (2, 260, 4, 2)
        );
        assert_eq!(tokenizer.vocab_size(), 260);
        assert!(spec.tied_output && !spec.qkv_bias && !spec.add_bos);
        assert_eq!(
            (spec.bos_id, spec.eos_ids.as_slice()),
            (Some(258), &[259][..])
        );
        assert_eq!(spec.layers[0].rope.layout, RopeLayout::Interleaved);
        assert_eq!(spec.attention_scale, 1.0 / (spec.head_dim as f32).sqrt());
        let (rows, cols) = weights.shape(Role::Down, 1).expect("each layer has it");
        assert_eq!((rows, cols), (spec.n_embd, spec.n_ff));
        let mut all = vec![0.0; rows * cols];
        weights
            .rows_f32(Role::Down, 1, 0, &mut all)
            .expect("all rows");
        let mut two = vec![0.0; 2 * cols];
        weights
            .rows_f32(Role::Down, 1, 3, &mut two)
            .expect("two rows");
        assert_eq!(
            two.map_bits(),
            all[3 * cols..5 * cols].to_vec().map_bits(),
            "{kind:?}"
        );
    }
}

trait MapBits {
    fn map_bits(&self) -> Vec<u32>;
}

impl MapBits for Vec<f32> {
    fn map_bits(&self) -> Vec<u32> {
        self.iter().map(|x| x.to_bits()).collect()
    }
}

#[test]
fn rows_that_are_not_there_are_refused() {
    let (weights, _) = open(&tiny_llama(TensorType::F16).build()).expect("the tiny model is sound");
    for (role, layer, first, n) in [
        (Role::Output, 0, 0, 32),
        (Role::Q, 2, 0, 32),
        (Role::Q, 0, 32, 32),
        (Role::Q, 0, 0, 33),
        (Role::Q, 0, usize::MAX, 32),
    ] {
        let error = weights
            .rows_f32(role, layer, first, &mut vec![0.0; n])
            .expect_err("outside");
        assert!(matches!(error, ModelError::NoSuchRows { .. }), "{error}");
    }
}

#[test]
fn gemma_gets_its_windows_scales_and_norms() {
    let (weights, _) = open(&tiny_gemma().build()).expect("the tiny gemma is sound");
    let spec = weights.spec();
    assert_eq!((spec.head_dim, spec.n_embd, spec.n_heads), (32, 64, 4));
    assert_eq!(spec.embedding_scale, 8.0);
    assert_eq!(spec.attention_scale, 1.0 / 32f32.sqrt());
    assert_eq!(spec.activation, Activation::GeluTanh);
    assert!(spec.qk_norm && spec.post_norms && spec.add_bos);
    let windows: Vec<_> = spec
        .layers
        .iter()
        .map(|l| (l.window, l.rope.base))
        .collect();
    let (local, full) = ((Some(512), 10_000.0), (None, 1_000_000.0));
    assert_eq!(windows, [local, local, local, local, local, full, local]);
    // The file's norms are taken as they are.
    let mut norm = vec![0.0; 64];
    weights
        .rows_f32(Role::AttnNorm, 0, 0, &mut norm)
        .expect("a norm");
    assert_eq!(norm[..3], [0.0, 0.25, 0.5]);
}

#[test]
fn llama3_factors_and_linear_scaling_are_read() {
    let factors = tiny_llama(TensorType::F16).tensor("rope_freqs.weight", &[4], TensorType::F32, 1);
    let (weights, _) = open(&factors.build()).expect("sound");
    let expected = RopeScaling::Factors(vec![1.0, 1.25, 1.5, 1.75]);
    assert_eq!(weights.spec().layers[1].rope.scaling, expected);

    let linear = tiny_llama(TensorType::F16)
        .meta("llama.rope.scaling.type", Meta::Text("linear"))
        .meta("llama.rope.scaling.factor", Meta::F32(4.0));
    let (weights, _) = open(&linear.build()).expect("sound");
    assert_eq!(
        weights.spec().layers[0].rope.scaling,
        RopeScaling::Linear { factor: 4.0 }
    );

    let yarn = tiny_llama(TensorType::F16).meta("llama.rope.scaling.type", Meta::Text("yarn"));
    assert!(refusal(&yarn.build()).contains("yarn"));
}

#[test]
fn qwen_biases_and_an_untied_output_are_found() {
    let kind = TensorType::F16;
    let mut untied = tiny_llama(kind).tensor("output.weight", &[32, 260], kind, 9);
    for layer in 0..2 {
        for (part, n) in [("q", 32), ("k", 16), ("v", 16)] {
            untied = untied.tensor(
                &format!("blk.{layer}.attn_{part}.bias"),
                &[n],
                TensorType::F32,
                3,
            );
        }
    }
    let (weights, _) = open(&untied.build()).expect("sound");
    assert!(weights.spec().qkv_bias && !weights.spec().tied_output);
    assert_eq!(weights.shape(Role::KBias, 1), Some((1, 16)));
    assert_eq!(weights.shape(Role::Output, 0), Some((260, 32)));
}

#[test]
fn what_does_not_fit_is_named() {
    let tiny = || tiny_llama(TensorType::F16);
    let f16 = TensorType::F16;
    let refused = [
        (
            tiny().tensor("blk.2.attn_q.weight", &[32, 32], f16, 0),
            "isn't used by its spec",
        ),
        (
            tiny().tensor("blk.0.ffn_gate_inp.weight", &[32, 32], f16, 0),
            "ffn_gate_inp",
        ),
        (
            tiny().tensor("blk.0.attn_q.weight", &[32, 32], f16, 0),
            "stands twice",
        ),
        (
            tiny().tensor("blk.0.attn_q.bias", &[32], f16, 0),
            "lacks its KBias",
        ),
        (
            tiny().tensor("output.weight", &[32, 259], f16, 0),
            "shape [259, 32], expected [260, 32]",
        ),
        (
            tiny().meta("llama.expert_count", Meta::U32(8)),
            "expert_count",
        ),
        (
            tiny().meta("llama.attention.value_length", Meta::U32(4)),
            "value_length",
        ),
        (
            tiny().meta("llama.attention.sliding_window", Meta::U32(4)),
            "sliding_window",
        ),
        (
            tiny().meta("llama.rope.dimension_count", Meta::U32(7)),
            "rotates 7",
        ),
    ];
    check_refusals(refused);
}

fn check_refusals<const N: usize>(refused: [(Builder, &str); N]) {
    for (builder, expected) in refused {
        let message = refusal(&builder.build());
        assert!(message.contains(expected), "`{expected}` not in: {message}");
    }
}

#[test]
fn contradictory_and_missing_keys_are_named() {
    let tiny = || tiny_llama(TensorType::F16);
    check_refusals([
        (
            tiny().meta("general.alignment", Meta::U32(24)),
            "power of two",
        ),
        (
            tiny().replace("llama.block_count", Meta::U32(1 << 30)),
            "claims 1073741824 layers",
        ),
        (
            tiny().meta("llama.block_count", Meta::U32(2)),
            "stands twice",
        ),
        (Builder::new(3), "general.architecture is missing"),
        (
            Builder::new(3).meta("general.architecture", Meta::Text("mamba")),
            "supported: llama, qwen2",
        ),
        (
            Builder::new(3).meta("general.architecture", Meta::U32(1)),
            "expected a text",
        ),
        (Builder::new(1), "version is 1"),
    ]);
}

#[test]
fn versions_two_and_three_are_the_same_to_us_and_big_endian_is_refused() {
    let three = tiny_llama(TensorType::Q8_0).build();
    let mut two = three.clone();
    two[4] = 2;
    assert_eq!(Header::parse(&two), Header::parse(&three));
    two[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert!(refusal(&two).contains("big-endian"));
    let mut unknown = three;
    // The last tensor's type stands 12 bytes before the end of the table; Q2_K is known by name only.
    let table_end =
        find(&unknown, b"blk.1.ffn_down.weight") + "blk.1.ffn_down.weight".len() + 4 + 16;
    unknown[table_end] = 10;
    assert!(refusal(&unknown).contains("Q2_K"));
}

fn find(bytes: &[u8], needle: &[u8]) -> usize {
    bytes
        .windows(needle.len())
        .position(|w| w == needle)
        .expect("it is there")
}

#[test]
fn a_file_cut_short_anywhere_is_refused() {
    let whole = tiny_llama(TensorType::Q4_0).build();
    let end_of_header = find(&whole, b"blk.1.ffn_down.weight");
    for n in (0..end_of_header).step_by(7).chain([whole.len() - 1]) {
        assert!(Header::parse(&whole[..n]).is_err(), "{n} bytes were enough");
    }
    assert!(Header::parse(&whole).is_ok());
    assert!(refusal(&whole[..whole.len() - 1]).contains("the file ends at"));
    assert!(refusal(b"").contains("magic needs 4 bytes"));
    assert!(refusal(b"GGML....").contains("letters GGUF"));
}

/// Damage at random: the loader may refuse or accept, but neither panic nor reserve what isn't there.
/// `KVLAB_FUZZ_ROUNDS` makes it longer.
#[test]
fn damage_at_random_never_panics() {
    let rounds = std::env::var("KVLAB_FUZZ_ROUNDS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1500);
    let sound = [tiny_llama(TensorType::Q4_0).build(), tiny_gemma().build()];
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut n_opened = 0;
    for _ in 0..rounds {
        let mut bytes = sound[rng.random_range(0..2)].clone();
        for _ in 0..rng.random_range(1..4) {
            damage(&mut bytes, &mut rng);
        }
        if let Ok((weights, tokenizer)) = open_model(&written(&folder, &bytes)) {
            n_opened += 1;
            exercise(&weights, &tokenizer);
        }
    }
    assert!(
        n_opened > 0 && n_opened < rounds,
        "{n_opened} of {rounds} opened: the damage is too mild or too wild"
    );
}

fn damage(bytes: &mut Vec<u8>, rng: &mut ChaCha8Rng) {
    if bytes.len() < 16 {
        return;
    }
    // Most of the file is tensor data and token texts; half of the hits go where the structure is.
    let at = if rng.random() {
        rng.random_range(0..bytes.len().min(1200))
    } else {
        rng.random_range(0..bytes.len())
    };
    match rng.random_range(0..5) {
        0 => bytes[at] = rng.random(),
        1 => bytes[at] ^= 1 << rng.random_range(0..8),
        2 => {
            let value: u64 = [0, 1, u64::MAX, 1 << 31, 1 << 63, 1 << 40][rng.random_range(0..6)];
            let end = (at + 8).min(bytes.len());
            bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
        }
        3 => {
            let n = rng.random_range(1..64).min(bytes.len() - at);
            bytes.drain(at..at + n);
        }
        _ => bytes.truncate(at),
    }
}

fn exercise(weights: &MappedWeights, tokenizer: &Tokenizer) {
    let mut row = vec![0.0; weights.spec().n_embd];
    weights
        .rows_f32(Role::TokenEmbedding, 0, 0, &mut row)
        .expect("a checked model has its first row");
    if let Ok(ids) = tokenizer.encode("hello <|end|> 12\u{2581}é") {
        // Damaged token texts may decode to anything, but not panic.
        let _ = tokenizer.decode(&ids);
    }
}

#[test]
fn the_real_models_have_the_hyperparameters_they_are_known_for() {
    if let Some(path) = real_model("smollm2-135m-instruct") {
        let (weights, _) = open_model(&path).expect("the real model opens");
        let spec = weights.spec();
        assert_eq!(
            (spec.n_layers, spec.n_embd, spec.n_heads, spec.n_kv_heads),
            (30, 576, 9, 3)
        );
        assert_eq!(
            (spec.head_dim, spec.n_vocab, spec.context_length),
            (64, 49_152, 8192)
        );
        assert_eq!(spec.kv_scalars_per_token(), 11_520);
        assert!(spec.tied_output && !spec.add_bos);
        assert_eq!(spec.layers[29].rope.base, 100_000.0);
        assert_eq!(spec.eos_ids, [2]);
    }
    if let Some(path) = real_model("gemma-3-270m") {
        let (weights, _) = open_model(&path).expect("the real model opens");
        let spec = weights.spec();
        assert_eq!(
            (spec.n_layers, spec.n_embd, spec.n_heads, spec.n_kv_heads),
            (18, 640, 4, 1)
        );
        assert_eq!((spec.head_dim, spec.n_vocab), (256, 262_144));
        assert_eq!(spec.attention_scale, 1.0 / 16.0);
        let full: Vec<usize> = (0..18)
            .filter(|&l| spec.layers[l].window.is_none())
            .collect();
        assert_eq!(full, [5, 11, 17]);
        assert!(spec.add_bos && spec.bos_id == Some(2));
    }
    let absent = open_model(Path::new("absent.gguf"));
    assert!(matches!(absent, Err(ModelError::Io { action: "read", .. })));
}
