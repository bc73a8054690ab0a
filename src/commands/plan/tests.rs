//! What is counted against what is measured in full, and the hand values of known models.

use std::path::PathBuf;

use super::growth::Growth;
use crate::cache::Admission;
use crate::cache::strategy::{StageSpec, Strategy, Tail};
use crate::commands::{bytes, named};
use crate::model::shape::{CacheShape, LayerShape, Stored, Weights, stand_in};

fn shape(name: &str) -> CacheShape {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    CacheShape::read(&root.join(format!("tests/configs/{name}.json"))).unwrap()
}

/// Three layers of two heads; one of them slides.
fn small() -> CacheShape {
    let layer = |window| LayerShape {
        stored: Stored::KeysAndValues,
        n_kv_heads: 2,
        head_dim: 64,
        window,
    };
    CacheShape {
        name: "small".to_owned(),
        n_heads: 4,
        layers: vec![layer(None), layer(Some(300)), layer(None)],
        context_length: 1 << 20,
        weights: Weights::Stored { n_bytes: 1 },
    }
}

fn strategies(names: &[&str]) -> Vec<Strategy> {
    let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
    let settings = named::Settings {
        model: "smollm2-135m-instruct",
        text: "quickstart-prose",
        arithmetic: "f32",
    };
    named::experiment(&names, &settings).unwrap().strategies
}

/// Counting on from 6144 tokens is what filling 9000 gives, part by part.
#[test]
fn counted_bytes_are_the_measured_ones() {
    let shape = small();
    let mut geometry = stand_in(shape.layers[0], 0, 1);
    for layer in &shape.layers {
        geometry.layers.extend(stand_in(*layer, 1, 9000).layers);
    }
    let names = [
        "f16",
        "q4_0-tail",
        "k8v4",
        "kivi-2",
        "int4-best",
        "nvfp4-affine",
        "streaming-llm",
    ];
    for strategy in strategies(&names) {
        let growth = Growth::measure(&strategy, &shape, 9000).unwrap();
        let lengths = [1280, 9000];
        let (_, live) =
            bytes::fill_to(&strategy, &geometry, Admission::Streaming, &lengths).unwrap();
        assert!(growth.exact, "{}", strategy.label);
        assert!(growth.n_measured < 9000);
        for (n, live) in lengths.into_iter().zip(live) {
            let counted = growth.at(n, 1);
            let parts = |m: &crate::cache::MemoryReport| {
                [
                    m.payload_bytes,
                    m.scale_bytes,
                    m.exact_bytes,
                    m.slack_bytes,
                    m.index_bytes,
                    m.table_bytes,
                    m.projection_bytes,
                    m.rows_live,
                ]
            };
            assert_eq!(parts(&counted), parts(&live), "{} at {n}", strategy.label);
            // Structs that are there once are counted with each head.
            let (counted, live) = (counted.stored_bytes() as f64, live.stored_bytes() as f64);
            assert!((counted / live - 1.0).abs() < 0.01, "{counted} {live}");
        }
    }
}

#[test]
fn hand_values_of_known_models() {
    let f16 = &strategies(&["f16"])[0];
    let at = |name: &str, n_tokens: usize, n_sequences: u64| {
        let growth = Growth::measure(f16, &shape(name), n_tokens).unwrap();
        let memory = growth.at(n_tokens, n_sequences);
        // Page tables come to less than half a percent of f16 rows.
        let whole = memory.stored_bytes() as f64 / memory.payload_bytes as f64;
        assert!(whole > 1.0 && whole < 1.005, "{name}: {memory:?}");
        memory.payload_bytes
    };
    // 32 layers x 32 heads x 128 x K and V x 2 bytes x 2000 tokens x 16 sequences.
    assert_eq!(at("llama-2-7b", 2000, 16), 16_777_216_000);
    // 131,072 tokens x 131,072 bytes.
    assert_eq!(at("llama-3-8b", 131_072, 1), 16 << 30);
    // 80 layers x 8 heads x 128 x 4 bytes x 131,072 tokens.
    assert_eq!(at("llama-3-70b", 131_072, 1), 40 << 30);
    assert_eq!(at("gemma-2b", 8192, 1), 18 * 256 * 4 * 8192);
    // 576 values of 2 bytes in each layer.
    assert_eq!(at("deepseek-v2-lite", 32_768, 1), 27 * 576 * 2 * 32_768);
    assert_eq!(at("deepseek-v3", 131_072, 4), 61 * 576 * 2 * 131_072 * 4);
    let window = Growth::measure(f16, &shape("gemma-3-1b"), 32_768).unwrap();
    let memory = window.at(32_768, 1);
    assert_eq!(memory.rows_live, 22 * 512 + 4 * 32_768);
    let kept = (22 * 512 + 4 * 32_768) * 2 * 256 * 2;
    assert_eq!(memory.payload_bytes, kept);
    let marginal = window.marginal_bytes().unwrap();
    assert!(
        (marginal / (4.0 * 1024.0) - 1.0).abs() < 0.005,
        "{marginal}"
    );
}

/// A row of K and V of equal width takes twice what a latent row takes, whatever is asked for V.
#[test]
fn a_latent_is_one_row_coded_as_keys_are() {
    let latent = shape("deepseek-v2-lite");
    let mut pair = latent.clone();
    for layer in &mut pair.layers {
        layer.stored = Stored::KeysAndValues;
    }
    let q8_0 = &strategies(&["q8_0"])[0];
    let k8 = Strategy {
        encode_v: StageSpec::plain("f16"),
        tail: Tail { k: 0, v: 99 },
        ..q8_0.clone()
    };
    let one = Growth::measure(&k8, &latent, 5000).unwrap().at(5000, 1);
    let two = Growth::measure(q8_0, &pair, 5000).unwrap().at(5000, 1);
    assert_eq!(2 * one.payload_bytes, two.payload_bytes);
    assert_eq!(one.payload_bytes + one.scale_bytes, 27 * 5000 * 18 * 34);
    assert_eq!(one.rows_live, two.rows_live);
}
