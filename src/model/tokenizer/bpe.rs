//! Byte-level BPE from GGUF metadata: vocabulary, merges, and the pre-tokenizer that `tokenizer.ggml.pre` names.
//!
//! The patterns are those of llama.cpp's `llama-vocab.cpp` for the same names (public source), applied one after the
//! other, each to the pieces the last one left. Invariant: every merge given to the crate is a pair of known tokens whose
//! concatenation is known, since the crate assumes it.

use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior};

use super::{special_tokens, tokenizer_error, vocabulary};
use crate::model::ModelError;
use crate::model::gguf::Keys;

/// One pre-tokenizer: its names in GGUF files, its patterns in order, and whether a piece that is itself a token stays
/// whole even where the merges don't lead to it.
struct PreTokenizer {
    names: &'static [&'static str],
    patterns: &'static [&'static str],
    whole_tokens_first: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const PRE_TOKENIZERS: [PreTokenizer; 5] = [
    PreTokenizer {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell"],
        patterns: &[r"\p{N}", GPT2],
        whole_tokens_first: false,
    },
    PreTokenizer {
        names: &["gpt-2", "phi-2", "mpt", "olmo"],
        patterns: &[GPT2],
        whole_tokens_first: false,
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        patterns: &[LLAMA3],
        whole_tokens_first: true,
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen", "stablelm2"],
        patterns: &[QWEN2],
        whole_tokens_first: false,
    },
    PreTokenizer {
        names: &["default"],
        patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
        whole_tokens_first: false,
    },
];

/// Builds the tokenizer of a `gpt2` vocabulary.
pub(super) fn build(
    keys: &Keys<'_>,
    tokens: &[&str],
    kinds: &[i64],
) -> Result<tokenizers::Tokenizer, ModelError> {
    let pre = pre_tokenizer(keys)?;
    let vocab = vocabulary(tokens)?;
    let mut merges = Vec::new();
    for merge in keys.texts("tokenizer.ggml.merges")? {
        // A token never holds a space, but the first part may begin with one in damaged files; search from the second byte.
        let pair = merge
            .char_indices()
            .skip(1)
            .find(|(_, c)| *c == ' ')
            .map(|(at, _)| (&merge[..at], &merge[at + 1..]));
        let known = |pair: &(&str, &str)| {
            [pair.0, pair.1, &[pair.0, pair.1].concat()]
                .iter()
                .all(|part| vocab.contains_key(*part))
        };
        let Some((left, right)) = pair.filter(known) else {
            let problem =
                format!("merge {merge:?} isn't made of two known tokens that form a third");
            return Err(ModelError::Tokenizer(problem));
        };
        merges.push((left.to_owned(), right.to_owned()));
    }
    let model = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(pre.whole_tokens_first)
        .build()
        .map_err(tokenizer_error)?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for pattern in pre.patterns {
        let pattern = SplitPattern::Regex((*pattern).to_owned());
        steps.push(
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map_err(tokenizer_error)?
                .into(),
        );
    }
    // Only the mapping of bytes to characters is left to do: no space is added, and the splitting is done.
    let bytes = ByteLevel::new(false, false, false);
    steps.push(bytes.into());
    tokenizer.with_pre_tokenizer(Some(Sequence::new(steps)));
    tokenizer.with_decoder(Some(bytes));
    tokenizer
        .add_special_tokens(special_tokens(tokens, kinds))
        .map_err(tokenizer_error)?;
    Ok(tokenizer)
}

fn pre_tokenizer(keys: &Keys<'_>) -> Result<&'static PreTokenizer, ModelError> {
    const KEY: &str = "tokenizer.ggml.pre";
    let known = || {
        PRE_TOKENIZERS
            .iter()
            .flat_map(|p| p.names)
            .copied()
            .collect::<Vec<_>>()
            .join(", ")
    };
    if keys.get(KEY).is_none() {
        return Err(keys.unsupported(
            KEY,
            "missing (an old file, which would be tokenized wrongly)",
            known(),
        ));
    }
    let name = keys.text(KEY)?;
    let found = PRE_TOKENIZERS.iter().find(|p| p.names.contains(&name));
    found.ok_or_else(|| keys.unsupported(KEY, format!("{name:?}"), known()))
}
