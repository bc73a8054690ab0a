//! Tests of tokenizers: goldens of other people's implementations on the real vocabularies, and small vocabularies.

use serde::Deserialize;

use super::*;
use crate::model::gguf::TensorType;
use crate::model::gguf::testing::{
    Builder, Meta, byte_characters, tiny_gemma, tiny_llama, tiny_tokens,
};
use crate::model::source::real_model;
use crate::model::{LoadedModel, load};

#[derive(Deserialize)]
struct Golden {
    window: Vec<u32>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    text: String,
    ids: Vec<u32>,
}

fn tokenizer_of(builder: Builder) -> Result<Tokenizer, ModelError> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, builder.build()).expect("written");
    load(&path).map(|model| model.tokenizer)
}

fn check(name: &str, golden: &str) {
    let Some(path) = real_model(name) else { return };
    let LoadedModel {
        tokenizer, spec, ..
    } = load(&path).expect("the real model opens");
    let golden: Golden = serde_json::from_str(golden).expect("the golden file is sound");
    for case in &golden.cases {
        let ids = tokenizer.encode(&case.text).expect("each text has tokens");
        assert_eq!(ids, case.ids, "{:?}", case.text);
        // SentencePiece's own sign for a space can't be told from one afterwards.
        let text = match name {
            "gemma-3-270m" => case.text.replace('\u{2581}', " "),
            _ => case.text.clone(),
        };
        assert_eq!(tokenizer.decode(&ids).expect("decoded"), text);
        let n: usize = ids.iter().filter_map(|&id| tokenizer.token_bytes(id)).sum();
        assert_eq!(n, text.len(), "bytes of {text:?}");
    }
    // The window is a piece of running text, with BOS in front where the model wants one.
    let window = &golden.window[usize::from(spec.add_bos)..];
    let text = tokenizer.decode(window).expect("decoded");
    assert_eq!(tokenizer.encode(&text).expect("encoded"), window);
    let texts = golden.cases.iter().map(|case| case.text.as_str());
    let long: String = texts.cycle().take_while(total_below(100_000)).collect();
    pieces_are_the_whole(tokenizer, &(text + &long));
}

/// Whether texts so far are shorter than `n_bytes` together.
fn total_below(n_bytes: usize) -> impl FnMut(&&str) -> bool {
    let mut total = 0;
    move |text| {
        total += text.len();
        total < n_bytes
    }
}

fn pieces_are_the_whole(mut tokenizer: Tokenizer, text: &str) {
    assert!(pieces::pieces(text).count() > 2);
    let in_pieces = tokenizer.encode(text).expect("encoded");
    tokenizer.cuts = Cuts::Nowhere;
    assert_eq!(tokenizer.encode(text).expect("encoded"), in_pieces);
}

#[test]
fn smollm2_tokenizes_as_the_reference() {
    check(
        "smollm2-135m-instruct",
        include_str!("../../../tests/golden/tokens_smollm2.json"),
    );
}

#[test]
fn gemma_tokenizes_as_the_reference() {
    check(
        "gemma-3-270m",
        include_str!("../../../tests/golden/tokens_gemma3.json"),
    );
}

#[test]
fn byte_level_merges_special_tokens_and_counts_bytes() {
    let tokenizer = tokenizer_of(tiny_llama(TensorType::F16)).expect("sound");
    let ids = tokenizer
        .encode("hell<|end|>é 12")
        .expect("all bytes have tokens");
    let byte = |b: u8| u32::from(b);
    let expected =
        [256, 257, 259, 0xc3, 0xa9]
            .into_iter()
            .chain([byte(b' '), byte(b'1'), byte(b'2')]);
    assert_eq!(ids, expected.collect::<Vec<u32>>());
    assert_eq!(tokenizer.decode(&ids).expect("decoded"), "hell<|end|>é 12");
    assert_eq!(tokenizer.token_bytes(256), Some(2));
    assert_eq!(tokenizer.token_bytes(259), Some(7));
    assert_eq!(tokenizer.token_bytes(260), None);
    assert!(tokenizer.encode("").expect("nothing is fine").is_empty());
    let error = tokenizer.decode(&[260]).expect_err("outside").to_string();
    assert!(
        error.contains("id 260 is outside the vocabulary of 260"),
        "{error}"
    );
}

#[test]
fn a_long_text_in_pieces_has_the_ids_of_the_whole_by_every_pattern() {
    let mut tokens = tiny_tokens();
    // Two bytes that the text lacks make place for tokens that would join what a cut puts apart, were it one word.
    (tokens[0], tokens[1]) = ("oĠ".into(), "Ġw".into());
    let merges = ["h e", "l l", "o Ġ", "Ġ w"].map(String::from);
    let parts = [
        "hello", " ", "world", "  w", "it's o", ".\n", " 42 ", "<|end|>", "\n\n", "é ", "Low ",
        "\t!",
    ];
    let text: String = (0..40_000).map(|i| parts[i * i % 37 % 12]).collect();
    for pre in ["smollm", "gpt-2", "llama-bpe", "qwen2", "default"] {
        let builder = tiny_llama(TensorType::F16)
            .replace("tokenizer.ggml.tokens", Meta::Texts(&tokens))
            .replace("tokenizer.ggml.merges", Meta::Texts(&merges))
            .replace("tokenizer.ggml.pre", Meta::Text(pre));
        let tokenizer = tokenizer_of(builder).expect("sound");
        assert_eq!(tokenizer.cuts, Cuts::AfterWords);
        assert!(
            tokenizer.encode(&text).expect("encoded").contains(&1),
            "{pre}"
        );
        pieces_are_the_whole(tokenizer, &text);
    }
}

#[test]
fn a_special_token_of_several_words_is_never_cut() {
    let mut tokens = tiny_tokens();
    tokens[259] = "<|the end|>".into();
    let builder =
        tiny_llama(TensorType::F16).replace("tokenizer.ggml.tokens", Meta::Texts(&tokens));
    let tokenizer = tokenizer_of(builder).expect("sound");
    assert_eq!(tokenizer.cuts, Cuts::Nowhere);
    let ids = tokenizer
        .encode(&"<|the end|>".repeat(5000))
        .expect("encoded");
    assert_eq!(ids, [259].repeat(5000));
}

#[test]
fn sentence_pieces_follow_scores_and_fall_back_to_bytes() {
    let tokenizer = tokenizer_of(tiny_gemma()).expect("sound");
    // "he" (-265) goes before "ll" (-266), then "▁he" (-267), "llo" (-268), "▁hello" (-269).
    assert_eq!(tokenizer.encode(" hello").expect("encoded"), [269]);
    // Two spaces are a piece of the user's, found before anything is joined; é has no piece.
    assert_eq!(
        tokenizer.encode("  hé").expect("encoded"),
        [3, 261, 4 + 0xc3, 4 + 0xa9]
    );
    assert_eq!(
        tokenizer
            .decode(&[3, 261, 4 + 0xc3, 4 + 0xa9])
            .expect("decoded"),
        "  hé"
    );
    assert_eq!(tokenizer.token_bytes(269), Some(6));
    assert_eq!(tokenizer.token_bytes(4), Some(1));
}

#[test]
fn what_is_unknown_or_contradictory_is_refused() {
    let with = |pre: Option<&str>, model: &str, tokens: &[String], merges: &[String]| {
        let mut builder = Builder::new(3)
            .meta("general.architecture", Meta::Text("llama"))
            .meta("llama.block_count", Meta::U32(1))
            .meta("llama.context_length", Meta::U32(8))
            .meta("llama.embedding_length", Meta::U32(4))
            .meta("llama.feed_forward_length", Meta::U32(4))
            .meta("llama.attention.head_count", Meta::U32(1))
            .meta("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5))
            .meta("tokenizer.ggml.model", Meta::Text(model))
            .meta("tokenizer.ggml.tokens", Meta::Texts(tokens))
            .meta("tokenizer.ggml.merges", Meta::Texts(merges))
            .tensor("token_embd.weight", &[4, 300], TensorType::F16, 0);
        if let Some(pre) = pre {
            builder = builder.meta("tokenizer.ggml.pre", Meta::Text(pre));
        }
        let Err(error) = tokenizer_of(builder) else {
            panic!("it was accepted")
        };
        error.to_string()
    };
    let bytes = byte_characters();
    let twice = [bytes.clone(), vec!["h".into()]].concat();
    let merge = |m: &str| vec![m.to_owned()];
    for (message, expected) in [
        (with(Some("glm4"), "gpt2", &bytes, &[]), "smollm, starcoder"),
        (with(None, "gpt2", &bytes, &[]), "missing (an old file"),
        (
            with(Some("smollm"), "bert", &bytes, &[]),
            "supported: gpt2, llama",
        ),
        (
            with(Some("smollm"), "gpt2", &twice, &[]),
            "1 of 257 tokens stand twice",
        ),
        (
            with(Some("smollm"), "gpt2", &bytes, &merge("h e")),
            "merge \"h e\"",
        ),
        (
            with(Some("smollm"), "gpt2", &bytes, &merge("he")),
            "merge \"he\"",
        ),
        (
            with(Some("default"), "llama", &bytes, &[]),
            "scores is missing",
        ),
    ] {
        assert!(message.contains(expected), "`{expected}` not in: {message}");
        assert!(!message.contains('\n'));
    }
}

#[test]
fn a_text_without_tokens_for_all_its_bytes_is_an_error() {
    let mut tokens = tiny_tokens();
    tokens[usize::from(b'z')] = "zzzz".into();
    let spoilt = tiny_llama(TensorType::F16).replace("tokenizer.ggml.tokens", Meta::Texts(&tokens));
    let tokenizer = tokenizer_of(spoilt).expect("sound");
    let error = tokenizer
        .encode("az")
        .expect_err("z has no token")
        .to_string();
    assert!(error.contains("no token for 1 of 2 bytes"), "{error}");
}
