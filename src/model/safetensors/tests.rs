//! Tests of Hugging Face folders: whole small models, settings of both library versions, and damage.

use std::collections::BTreeMap;

use half::bf16;
use safetensors::tensor::{TensorView, serialize_to_file};
use serde_json::{Value, json};

use super::*;
use crate::model::gguf::testing::tiny_llama;
use crate::model::load;
use crate::model::spec::{LayerSpec, ModelSpec, RopeScaling};
use crate::model::weights::WeightSource;

const EMBD: usize = 16;
const FF: usize = 24;
const VOCAB: usize = 260;

/// A folder under construction: settings and tensor shapes.
struct Folder {
    root: tempfile::TempDir,
    config: Value,
    shapes: BTreeMap<String, Vec<usize>>,
}

impl Folder {
    /// Two layers, 4 query and 2 KV heads of 4, with the tokenizer of the tiny GGUF model.
    fn new(model_type: &str) -> Self {
        let root = tempfile::tempdir().expect("a temporary folder");
        let gguf = root.path().join("tiny.gguf");
        std::fs::write(&gguf, tiny_llama(TensorType::F16).build()).expect("written");
        let tokenizer = load(&gguf).expect("sound").tokenizer;
        tokenizer.save(&root.path().join("tokenizer.json"));
        let config = json!({
            "model_type": model_type, "hidden_size": EMBD, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": FF, "vocab_size": VOCAB,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": true,
            "bos_token_id": 258, "eos_token_id": [259, 257],
        });
        let mut shapes = BTreeMap::new();
        let mut add = |name: String, shape: &[usize]| shapes.insert(name, shape.to_vec());
        add("model.embed_tokens.weight".into(), &[VOCAB, EMBD]);
        add("model.norm.weight".into(), &[EMBD]);
        let gemma = model_type == "gemma3_text";
        for layer in 0..2 {
            let mut add = |name: &str, shape: &[usize]| {
                add(format!("model.layers.{layer}.{name}.weight"), shape)
            };
            add("input_layernorm", &[EMBD]);
            add("post_attention_layernorm", &[EMBD]);
            add("self_attn.q_proj", &[16, EMBD]);
            add("self_attn.k_proj", &[8, EMBD]);
            add("self_attn.v_proj", &[8, EMBD]);
            add("self_attn.o_proj", &[EMBD, 16]);
            add("mlp.gate_proj", &[FF, EMBD]);
            add("mlp.up_proj", &[FF, EMBD]);
            add("mlp.down_proj", &[EMBD, FF]);
            if gemma {
                add("pre_feedforward_layernorm", &[EMBD]);
                add("post_feedforward_layernorm", &[EMBD]);
            }
            if gemma || model_type == "qwen3" {
                add("self_attn.q_norm", &[4]);
                add("self_attn.k_norm", &[4]);
            }
        }
        Self {
            root,
            config,
            shapes,
        }
    }

    fn set(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    fn shape(mut self, name: &str, shape: &[usize]) -> Self {
        self.shapes.insert(name.into(), shape.into());
        self
    }

    fn path(&self) -> &Path {
        self.root.path()
    }

    fn write_config(&self) {
        std::fs::write(self.path().join("config.json"), self.config.to_string()).expect("written");
    }

    /// Writes the named tensors, element i of each being i / 8, which bf16 holds exactly for small i.
    fn write_tensors<'a>(&self, file: &str, names: impl Iterator<Item = &'a String>) {
        let data: Vec<(String, Vec<usize>, Vec<u8>)> = names
            .map(|name| {
                let shape = self.shapes[name].clone();
                let n: usize = shape.iter().product();
                let bytes = (0..n)
                    .flat_map(|i| bf16::from_f32((i % 256) as f32 / 8.0).to_le_bytes())
                    .collect();
                (name.clone(), shape, bytes)
            })
            .collect();
        let views = data.iter().map(|(name, shape, bytes)| {
            (
                name,
                TensorView::new(Dtype::BF16, shape.clone(), bytes).expect("sizes agree"),
            )
        });
        serialize_to_file(views, None, &self.path().join(file)).expect("written");
    }

    fn open(&self) -> Result<MappedWeights, ModelError> {
        self.write_config();
        self.write_tensors(SINGLE, self.shapes.keys());
        open_folder(self.path()).map(|(weights, _, _)| weights)
    }

    fn spec(&self) -> ModelSpec {
        self.open().expect("a sound folder").spec().clone()
    }

    fn refusal(&self) -> String {
        let Err(error) = self.open() else {
            panic!("it was accepted")
        };
        let message = error.to_string();
        assert!(!message.contains('\n'), "one line: {message}");
        message
    }
}

fn windows(spec: &ModelSpec) -> Vec<(Option<usize>, f32)> {
    spec.layers
        .iter()
        .map(|LayerSpec { window, rope }| (*window, rope.base))
        .collect()
}

#[test]
fn a_llama_folder_gives_weights_spec_tokenizer_and_identity() {
    let folder = Folder::new("llama").set("rope_theta", json!(5e5));
    let weights = folder.open().expect("a sound folder");
    let spec = weights.spec();
    assert_eq!(
        (
            spec.n_vocab,
            spec.head_dim,
            spec.n_kv_heads,
            spec.context_length
        ),
        (VOCAB, 4, 2, 128)
    );
    assert_eq!(
        (spec.bos_id, spec.eos_ids.as_slice(), spec.add_bos),
        (Some(258), &[257, 259][..], false)
    );
    assert_eq!(windows(spec), [(None, 5e5); 2]);
    assert_eq!(
        spec.weights_bytes,
        2 * folder
            .shapes
            .values()
            .map(|s| s.iter().product::<usize>())
            .sum::<usize>() as u64
    );
    let mut rows = vec![0.0; 2 * FF];
    weights
        .rows_f32(Role::Down, 1, 1, &mut rows)
        .expect("there");
    assert_eq!(rows[..3], [3.0, 3.125, 3.25]);
    // llama keeps norms as they are, and this name is its norm before the feed-forward part.
    assert_eq!(weights.shape(Role::FfnNorm, 0), Some((1, EMBD)));
    assert_eq!(weights.shape(Role::PostAttnNorm, 0), None);

    let model = load(folder.path()).expect("a sound folder");
    assert_eq!(
        model.tokenizer.encode("hell<|end|>").expect("encoded"),
        [256, 257, 259]
    );
    assert_eq!(model.tokenizer.token_bytes(259), Some(7));
    let before = model.sha256;
    let other = folder.set("rope_theta", json!(1e4));
    other.write_config();
    assert_ne!(
        load(other.path()).expect("sound").sha256,
        before,
        "settings belong to the identity"
    );
}

#[test]
fn shards_are_joined_and_must_hold_what_the_index_says() {
    let folder = Folder::new("llama");
    folder.write_config();
    let (first, second) = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    );
    let names: Vec<String> = folder.shapes.keys().cloned().collect();
    let (a, b) = names.split_at(7);
    folder.write_tensors(first, a.iter());
    folder.write_tensors(second, b.iter());
    let place = |shards: [&str; 2]| {
        let map: BTreeMap<&String, &str> = a
            .iter()
            .map(|n| (n, shards[0]))
            .chain(b.iter().map(|n| (n, shards[1])))
            .collect();
        std::fs::write(
            folder.path().join(INDEX),
            json!({ "weight_map": map }).to_string(),
        )
        .expect("written");
        open_folder(folder.path())
            .map(|(weights, ..)| weights.spec().clone())
            .map_err(|e| e.to_string())
    };
    assert_eq!(
        place([first, second]).expect("both are there"),
        folder.spec()
    );
    assert!(
        place([second, first])
            .expect_err("swapped")
            .contains("which the index places in it")
    );
    assert!(
        place(["../a.safetensors", second])
            .expect_err("outside")
            .contains("isn't a plain file name")
    );
    assert!(
        place(["absent.safetensors", second])
            .expect_err("absent")
            .contains("can't read")
    );
}

#[test]
fn gemma_norms_gain_one_and_layers_alternate() {
    let gemma = || {
        Folder::new("gemma3_text")
            .set("sliding_window", json!(64))
            .set("query_pre_attn_scalar", json!(16))
    };
    let folder = gemma().set("sliding_window_pattern", json!(2));
    let weights = folder.open().expect("a sound folder");
    let spec = weights.spec().clone();
    assert_eq!(spec.attention_scale, 0.25);
    assert_eq!(spec.embedding_scale, 4.0);
    assert!(spec.qk_norm && spec.post_norms);
    let both = [(Some(64), 1e4), (None, 1e6)];
    assert_eq!(windows(&spec), both);
    let mut norm = vec![0.0; EMBD];
    for role in [
        Role::AttnNorm,
        Role::PostAttnNorm,
        Role::FfnNorm,
        Role::PostFfnNorm,
        Role::OutputNorm,
    ] {
        weights.rows_f32(role, 0, 0, &mut norm).expect("there");
        assert_eq!(norm[..3], [1.0, 1.125, 1.25], "{role:?}");
    }
    weights.rows_f32(Role::Q, 0, 0, &mut norm).expect("there");
    assert_eq!(norm[..3], [0.0, 0.125, 0.25], "matrices gain nothing");

    let types = json!(["sliding_attention", "full_attention"]);
    let rope = json!({
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    });
    let newer = gemma()
        .set("layer_types", types)
        .set("rope_parameters", rope)
        .spec();
    assert_eq!(windows(&newer), both);
    assert_eq!(newer.layers[0].rope.scaling, RopeScaling::None);
    assert_eq!(
        newer.layers[1].rope.scaling,
        RopeScaling::Linear { factor: 8.0 }
    );
}

#[test]
fn qwen_has_biases_or_head_norms_and_may_slide() {
    let mut qwen2 = Folder::new("qwen2").set("use_sliding_window", json!(true));
    qwen2 = qwen2
        .set("sliding_window", json!(32))
        .set("max_window_layers", json!(1));
    for layer in 0..2 {
        for (part, n) in [("q", 16), ("k", 8), ("v", 8)] {
            qwen2 = qwen2.shape(
                &format!("model.layers.{layer}.self_attn.{part}_proj.bias"),
                &[n],
            );
        }
    }
    let spec = qwen2.spec();
    assert!(spec.qkv_bias && !spec.qk_norm);
    assert_eq!(windows(&spec), [(None, 1e4), (Some(32), 1e4)]);
    let spec = Folder::new("qwen3")
        .set("sliding_window", Value::Null)
        .spec();
    assert!(spec.qk_norm && !spec.qkv_bias);
    assert_eq!(windows(&spec), [(None, 1e4); 2]);
}

#[test]
fn outputs_may_be_tied_or_not() {
    let untied = Folder::new("llama").set("tie_word_embeddings", json!(false));
    assert!(untied.refusal().contains("lacks its Output"));
    let untied = untied.shape("lm_head.weight", &[VOCAB, EMBD]);
    assert!(!untied.spec().tied_output);
    let tied = untied
        .set("tie_word_embeddings", json!(true))
        .open()
        .expect("sound");
    assert!(tied.spec().tied_output);
    assert_eq!(tied.shape(Role::Output, 0), None);
}

#[test]
fn llama3_rope_is_read_from_both_versions() {
    let rope = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 5e5});
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    let old = Folder::new("llama")
        .set("rope_theta", json!(5e5))
        .set("rope_scaling", rope.clone())
        .spec();
    let new = Folder::new("llama").set("rope_parameters", rope).spec();
    for spec in [old, new] {
        assert_eq!(spec.layers[1].rope.scaling, expected);
        assert_eq!(spec.layers[1].rope.base, 5e5);
    }
}

#[test]
fn what_cannot_be_computed_or_contradicts_itself_is_named() {
    let llama = || Folder::new("llama");
    let refused = [
        (
            llama().set("model_type", json!("mixtral")),
            "supported: llama, qwen2",
        ),
        (
            llama().set("rope_scaling", json!({"type": "yarn", "factor": 2.0})),
            "rope_type is `\"yarn\"`",
        ),
        (
            llama().set("rope_scaling", json!({"type": "linear"})),
            "factor is `null`",
        ),
        (llama().set("hidden_act", json!("gelu")), "hidden_act"),
        (llama().set("mlp_bias", json!(true)), "mlp_bias"),
        (
            llama().set("quantization_config", json!({"bits": 4})),
            "quantization_config",
        ),
        (llama().set("hidden_size", json!(-1)), "hidden_size is `-1`"),
        (
            llama().set("hidden_size", json!(null)),
            "hidden_size is `null`",
        ),
        (
            llama().set("num_hidden_layers", json!(4_000_000_000u32)),
            "num_hidden_layers",
        ),
        (llama().set("num_hidden_layers", json!(3)), "layer 2 lacks"),
        (
            llama().set("num_hidden_layers", json!(1)),
            "isn't used by its spec",
        ),
        (llama().set("vocab_size", json!(300)), "expected [300, 16]"),
        (llama().set("bos_token_id", json!("one")), "bos_token_id"),
        (
            llama().shape("model.layers.0.mlp.experts.weight", &[1]),
            "mlp.experts",
        ),
        (
            llama().shape("model.layers.0.self_attn.q_proj.bias", &[16]),
            "lacks its KBias",
        ),
        (Folder::new("gemma3_text"), "sliding_window is `null`"),
        (
            Folder::new("gemma3_text").set("final_logit_softcapping", json!(30.0)),
            "softcapping",
        ),
    ];
    for (folder, expected) in refused {
        let message = folder.refusal();
        assert!(message.contains(expected), "`{expected}` not in: {message}");
    }
}

#[test]
fn missing_and_damaged_files_are_refused() {
    let folder = Folder::new("llama");
    let message = |path: &Path| {
        let Err(error) = load(path) else {
            panic!("it was accepted")
        };
        error.to_string()
    };
    assert!(message(folder.path()).contains("it has no config.json"));
    folder.write_config();
    assert!(message(folder.path()).contains("it has no model.safetensors"));
    folder.write_tensors(SINGLE, folder.shapes.keys());
    assert!(load(folder.path()).is_ok());

    let weights = folder.path().join(SINGLE);
    let whole = std::fs::read(&weights).expect("written above");
    for n in [0, 4, 8, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&weights, &whole[..n]).expect("written");
        let message = message(folder.path());
        assert!(
            message.contains("damaged or cut short") || message.contains("can't read"),
            "{message}"
        );
    }
    for huge in [u64::MAX, 1 << 40, whole.len() as u64] {
        let mut damaged = whole.clone();
        damaged[..8].copy_from_slice(&huge.to_le_bytes());
        std::fs::write(&weights, &damaged).expect("written");
        assert!(message(folder.path()).contains("damaged or cut short"));
    }
    std::fs::write(&weights, &whole).expect("written");
    for name in ["config.json", "tokenizer.json"] {
        let sound = std::fs::read(folder.path().join(name)).expect("written above");
        std::fs::write(folder.path().join(name), &sound[..sound.len() / 2]).expect("written");
        assert!(message(folder.path()).contains(name));
        std::fs::write(folder.path().join(name), &sound).expect("written");
    }
    assert!(load(folder.path()).is_ok());
}
