//! Shapes of published models against their published numbers, and what is refused.

use std::path::PathBuf;

use super::*;

fn shape(name: &str) -> CacheShape {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    CacheShape::read(&root.join(format!("tests/configs/{name}.json"))).unwrap()
}

fn n_params(shape: &CacheShape) -> u64 {
    match shape.weights {
        Weights::Counted { n_params, .. } => n_params,
        Weights::Stored { .. } => panic!("there are no weights"),
    }
}

/// Parameters as the models' safetensors files and cards have them.
#[test]
fn parameters_are_those_of_the_published_files() {
    for (name, expected) in [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen1.5-moe-a2.7b", 14_315_784_192),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gemma-2b", 2_506_172_416),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-3-1b", 999_885_952),
        ("phi-2", 2_779_683_840),
        ("phi-3-mini-4k", 3_821_079_552),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v3", 671_026_419_200),
    ] {
        assert_eq!(n_params(&shape(name)), expected, "{name}");
    }
}

#[test]
fn values_per_token_are_the_hand_counts() {
    for (name, expected) in [
        // 32 layers x 32 heads x 128 x K and V.
        ("llama-2-7b", 262_144),
        ("llama-3-8b", 65_536),
        ("mistral-7b-v0.1", 65_536),
        // One KV head: 18 layers x 256 x 2.
        ("gemma-2b", 9_216),
        // A latent of 512 and 64 rotary values, 27 and 61 layers.
        ("deepseek-v2-lite", 27 * 576),
        ("deepseek-v3", 61 * 576),
    ] {
        assert_eq!(shape(name).values_per_token(), expected, "{name}");
    }
    // The claim of 8.4 billion values at 2000 tokens: a batch of 16.
    assert_eq!(16 * shape("llama-2-7b").values_at(2000), 8_388_608_000);
    // 128k tokens x 128 KiB = 16 GiB.
    assert_eq!(2 * shape("llama-3-8b").values_at(131_072), 16 << 30);
}

#[test]
fn windows_stand_where_each_family_has_them() {
    let windows = |name: &str| -> Vec<Option<usize>> {
        shape(name).layers.iter().map(|l| l.window).collect()
    };
    let gemma3 = windows("gemma-3-1b");
    assert_eq!(gemma3.len(), 26);
    assert_eq!(
        gemma3[..6],
        [Some(512), Some(512), Some(512), Some(512), Some(512), None]
    );
    assert_eq!(gemma3.iter().filter(|w| w.is_none()).count(), 4);
    assert_eq!(windows("gemma-2-2b")[..2], [Some(4096), None]);
    assert!(windows("mistral-7b-v0.1").iter().all(|w| *w == Some(4096)));
    assert!(windows("qwen2.5-7b").iter().all(Option::is_none));
    // Past the windows 22 layers keep 512 rows each, the other 4 all.
    let values = 2 * 256 * (22 * 512 + 4 * 32_768);
    assert_eq!(shape("gemma-3-1b").values_at(32_768), values);
    // The text part of a model of images and text, and the class's defaults.
    let wrapped = shape("gemma-3-4b");
    assert_eq!(wrapped.values_per_token(), 34 * 2 * 4 * 256);
    assert_eq!(
        wrapped.in_words(),
        "29 layers of 4 KV heads x 256 (GQA), window 1024; 5 layers of 4 KV heads x 256 (GQA)"
    );
}

#[test]
fn what_is_not_understood_is_named_by_its_key() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.json");
    let good = r#""hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 9, "intermediate_size": 8, "max_position_embeddings": 16"#;
    let read = |text: String| {
        std::fs::write(&file, text).unwrap();
        CacheShape::read(&file).map_err(|e| e.to_string())
    };
    let sound = read(format!(r#"{{"model_type": "llama", {good}}}"#)).unwrap();
    assert_eq!(sound.values_per_token(), 2 * 2 * 64);
    for (text, expected) in [
        (
            format!(r#"{{{good}}}"#),
            "model_type is missing; supported: llama, mistral",
        ),
        (
            format!(r#"{{"model_type": "mamba", {good}}}"#),
            "model_type is `\"mamba\"`",
        ),
        (
            format!(r#"{{"model_type": "mistral", "num_key_value_heads": 2, {good}}}"#),
            "sliding_window is missing",
        ),
        (
            format!(r#"{{"model_type": "llama", "num_kv_shared_layers": 2, {good}}}"#),
            "num_kv_shared_layers is `2`",
        ),
        (
            format!(r#"{{"model_type": "llama", "num_key_value_heads": 3, {good}}}"#),
            "num_key_value_heads is `3`; supported: a divisor of num_attention_heads, 4",
        ),
        (
            format!(r#"{{"model_type": "llama", "layer_types": ["full_attention"], {good}}}"#),
            "layer_types is",
        ),
        (
            format!(r#"{{"model_type": "deepseek_v3", {good}}}"#),
            "kv_lora_rank is missing",
        ),
        (
            r#"{"model_type": "llama"}"#.to_owned(),
            "num_attention_heads is missing",
        ),
        (
            format!(
                r#"{{"model_type": "llama", {}}}"#,
                good.replace("64", "-64")
            ),
            "hidden_size is `-64`",
        ),
        ("{".to_owned(), "is damaged or cut short"),
    ] {
        let message = read(text).unwrap_err();
        assert!(message.contains(expected), "{message}");
        assert!(!message.contains('\n'));
    }
}

#[test]
fn a_folder_with_weights_tells_their_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let config = dir.path().join("config.json");
    std::fs::copy(root.join("tests/configs/gemma-2b.json"), &config).unwrap();
    let counted = CacheShape::read(dir.path()).unwrap();
    assert_eq!(counted, CacheShape::read(&config).unwrap());
    std::fs::write(dir.path().join("a.safetensors"), [0; 30]).unwrap();
    std::fs::write(dir.path().join("b.safetensors"), [0; 12]).unwrap();
    let stored = CacheShape::read(dir.path()).unwrap();
    assert_eq!(stored.weights, Weights::Stored { n_bytes: 42 });
    assert_eq!(stored.layers, counted.layers);
}
