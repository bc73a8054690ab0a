//! SentencePiece-style tokenizers from GGUF metadata: pieces with scores, bytes for what has no piece.
//!
//! llama.cpp joins the adjacent pair whose union has the highest score, again and again. The crate's BPE joins the pair
//! with the lowest rank; so each way to cut a piece into two known pieces becomes a merge, ranked by the score of the
//! piece it makes. Invariant: equal scores keep llama.cpp's order, the leftmost pair first.

use tokenizers::DecoderWrapper;
use tokenizers::NormalizerWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::utils::Sequence as Normalizers;

use super::{is_byte_token, kind, special_tokens, tokenizer_error, vocabulary};
use crate::model::ModelError;
use crate::model::gguf::Keys;

/// Builds the tokenizer of a `llama` vocabulary.
pub(super) fn build(
    keys: &Keys<'_>,
    tokens: &[&str],
    kinds: &[i64],
) -> Result<tokenizers::Tokenizer, ModelError> {
    let scores = keys.floats("tokenizer.ggml.scores")?;
    if scores.len() != tokens.len() || scores.iter().any(|s| s.is_nan()) {
        let problem = format!(
            "{} tokens but {} scores, or one that is no number",
            tokens.len(),
            scores.len()
        );
        return Err(ModelError::Tokenizer(problem));
    }
    let n_bytes = tokens
        .iter()
        .zip(kinds)
        .filter(|(t, k)| **k == kind::BYTE && is_byte_token(t))
        .count();
    if n_bytes != 256 {
        return Err(ModelError::Tokenizer(format!(
            "{n_bytes} byte tokens, expected 256"
        )));
    }
    let vocab = vocabulary(tokens)?;
    let merges = merges(&vocab, tokens, kinds, scores);
    let model = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .byte_fallback(true)
        .build()
        .map_err(tokenizer_error)?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
    let mut decoders: Vec<DecoderWrapper> =
        vec![Replace::new("▁", " ").map_err(tokenizer_error)?.into()];
    decoders.extend([ByteFallback::new().into(), Fuse::new().into()]);
    if keys
        .bool("tokenizer.ggml.add_space_prefix")?
        .unwrap_or(true)
    {
        normalizers.push(Prepend::new("▁".to_owned()).into());
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    normalizers.push(Replace::new(" ", "▁").map_err(tokenizer_error)?.into());
    tokenizer
        .with_normalizer(Some(Normalizers::new(normalizers)))
        .map_err(tokenizer_error)?;
    tokenizer.with_decoder(Some(Decoders::new(decoders)));
    tokenizer
        .add_special_tokens(special_tokens(tokens, kinds))
        .map_err(tokenizer_error)?;
    Ok(tokenizer)
}

/// All cuts of ordinary pieces into two ordinary pieces, best score first.
fn merges(vocab: &Vocab, tokens: &[&str], kinds: &[i64], scores: &[f32]) -> Merges {
    let ordinary = |piece: &str| {
        vocab
            .get(piece)
            .is_some_and(|&id| kinds[id as usize] == kind::NORMAL)
    };
    let mut order: Vec<usize> = (0..tokens.len())
        .filter(|&id| kinds[id] == kind::NORMAL)
        .collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    let cuts = |token: &str| {
        let at = token
            .char_indices()
            .skip(1)
            .map(|(at, _)| token.split_at(at));
        at.filter(|(left, right)| ordinary(left) && ordinary(right))
            .map(|(left, right)| (left.to_owned(), right.to_owned()))
            .collect::<Vec<_>>()
    };
    order.iter().flat_map(|&id| cuts(tokens[id])).collect()
}
