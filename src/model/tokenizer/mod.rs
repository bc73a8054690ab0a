//! Texts to token ids and back, by the crate `tokenizers`.
//!
//! From GGUF metadata the result is llama.cpp's, with special tokens in the text recognised and no BOS added; from a
//! `tokenizer.json` it is what that file says. Invariants: encoding is a pure function of the text; no text is silently
//! lost (byte-level encoding checks that its tokens' bytes add up to the text's).

mod bpe;
mod pieces;
mod spm;
#[cfg(test)]
mod tests;

use std::path::Path;

use tokenizers::DecoderWrapper;

use super::ModelError;
use super::gguf::Keys;

/// Encodes and decodes for one model.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Bytes of text each id stands for.
    token_bytes: Vec<u32>,
    loss: LossCheck,
    cuts: Cuts,
}

/// Whether the ids' bytes must add up to the text's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LossCheck {
    Bytes,
    None,
}

/// Where a long text may be cut without a change of its ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cuts {
    /// As in [`pieces`].
    AfterWords,
    Nowhere,
}

/// How a tokenizer writes bytes as characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Alphabet {
    /// GPT-2's: one character per byte.
    ByteLevel,
    /// SentencePiece's: `▁` for a space, `<0xNN>` for a byte without a token.
    SentencePiece,
}

/// A token's text, role and alphabet, as in GGUF's `token_type`.
mod kind {
    pub const NORMAL: i64 = 1;
    pub const UNKNOWN: i64 = 2;
    pub const CONTROL: i64 = 3;
    pub const USER_DEFINED: i64 = 4;
    pub const BYTE: i64 = 6;
}

impl Tokenizer {
    /// Builds the tokenizer a GGUF file's metadata describes.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for a kind or pre-tokenizer whose meaning isn't known; nothing is guessed.
    pub(super) fn from_gguf(keys: &Keys<'_>) -> Result<Self, ModelError> {
        let tokens = keys.texts("tokenizer.ggml.tokens")?;
        let kinds = match keys.ints("tokenizer.ggml.token_type")? {
            Some(kinds) if kinds.len() == tokens.len() => kinds.to_vec(),
            None => vec![kind::NORMAL; tokens.len()],
            Some(kinds) => {
                let problem = format!("{} tokens but {} token types", tokens.len(), kinds.len());
                return Err(ModelError::Tokenizer(problem));
            }
        };
        let (inner, alphabet, loss, cuts) = match keys.text("tokenizer.ggml.model")? {
            "gpt2" => (
                bpe::build(keys, tokens, &kinds)?,
                Alphabet::ByteLevel,
                LossCheck::Bytes,
                Cuts::around(&special_tokens(tokens, &kinds)),
            ),
            "llama" => (
                spm::build(keys, tokens, &kinds)?,
                Alphabet::SentencePiece,
                LossCheck::None,
                Cuts::Nowhere,
            ),
            other => return Err(keys.unsupported("tokenizer.ggml.model", other, "gpt2, llama")),
        };
        let token_bytes = tokens
            .iter()
            .zip(&kinds)
            .map(|(t, &k)| alphabet.n_bytes(t, k))
            .collect();
        Ok(Self {
            inner,
            token_bytes,
            loss,
            cuts,
        })
    }

    /// Reads a Hugging Face `tokenizer.json`.
    ///
    /// # Errors
    /// [`ModelError::Io`] or [`ModelError::Corrupt`].
    pub(super) fn from_json(path: &Path) -> Result<Self, ModelError> {
        let bytes = std::fs::read(path).map_err(|e| ModelError::io("read", path, e))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|e| ModelError::corrupt(path, one_line(&e)))?;
        // Files made for training may truncate or pad; an evaluation must see the whole text and nothing else.
        inner.with_truncation(None).map_err(tokenizer_error)?;
        inner.with_padding(None);
        let alphabet = match inner.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => Alphabet::ByteLevel,
            _ => Alphabet::SentencePiece,
        };
        let n = inner
            .get_vocab(true)
            .values()
            .max()
            .map_or(0, |&id| id as usize + 1);
        let mut token_bytes = vec![0; n];
        let added = inner.get_added_tokens_decoder();
        for (token, id) in inner.get_vocab(true) {
            let is_byte = alphabet == Alphabet::SentencePiece && is_byte_token(&token);
            let kind = match (added.contains_key(&id), is_byte) {
                (true, _) => kind::CONTROL,
                (_, true) => kind::BYTE,
                _ => kind::NORMAL,
            };
            token_bytes[id as usize] = alphabet.n_bytes(&token, kind);
        }
        Ok(Self {
            inner,
            token_bytes,
            loss: LossCheck::None,
            cuts: Cuts::Nowhere,
        })
    }

    /// The ids of `text`, special tokens in it recognised, nothing added before or after.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] if a part of the text has no token.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let mut ids = Vec::new();
        let mut encode = |piece: &str| -> Result<(), ModelError> {
            let encoding = self.inner.encode_fast(piece, false);
            ids.extend_from_slice(encoding.map_err(tokenizer_error)?.get_ids());
            Ok(())
        };
        match self.cuts {
            Cuts::AfterWords => pieces::pieces(text).try_for_each(encode)?,
            Cuts::Nowhere => encode(text)?,
        }
        if self.loss == LossCheck::Bytes {
            let n: usize = ids.iter().filter_map(|&id| self.token_bytes(id)).sum();
            if n != text.len() {
                let problem = format!(
                    "the vocabulary has no token for {} of {} bytes",
                    text.len().abs_diff(n),
                    text.len()
                );
                return Err(ModelError::Tokenizer(problem));
            }
        }
        Ok(ids)
    }

    /// The text of `ids`, special tokens included. Bytes that aren't UTF-8 become replacement characters.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] if an id is outside the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        if let Some(id) = ids
            .iter()
            .find(|&&id| id as usize >= self.token_bytes.len())
        {
            let problem = format!(
                "id {id} is outside the vocabulary of {}",
                self.token_bytes.len()
            );
            return Err(ModelError::Tokenizer(problem));
        }
        self.inner.decode(ids, false).map_err(tokenizer_error)
    }

    /// Number of ids: the largest plus one.
    pub fn vocab_size(&self) -> usize {
        self.token_bytes.len()
    }

    /// How many bytes of text an id stands for, for bits per byte; `None` outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<usize> {
        self.token_bytes.get(id as usize).map(|&n| n as usize)
    }

    /// Writes the tokenizer as a `tokenizer.json` for a test's folder.
    #[cfg(test)]
    pub(super) fn save(&self, path: &Path) {
        self.inner
            .save(path, false)
            .expect("the temporary folder is writable");
    }

    /// The first token `tokenizer.json` puts before a text of its own accord, if it does.
    pub(super) fn leading_token(&self) -> Option<u32> {
        let with = self.inner.encode_fast("a", true).ok()?;
        let without = self.inner.encode_fast("a", false).ok()?;
        let first = with.get_ids().first().copied();
        first.filter(|_| {
            with.get_ids().len() > without.get_ids().len()
                && with.get_ids()[1..].starts_with(without.get_ids())
        })
    }
}

impl Cuts {
    /// The cuts that leave every special token whole.
    fn around(specials: &[tokenizers::AddedToken]) -> Self {
        let whole = |t: &tokenizers::AddedToken| pieces::first_cut(&t.content, 0).is_none();
        match specials.iter().all(whole) {
            true => Self::AfterWords,
            false => Self::Nowhere,
        }
    }
}

impl Alphabet {
    fn n_bytes(self, token: &str, kind: i64) -> u32 {
        let n = match (self, kind) {
            (Self::ByteLevel, kind::NORMAL) => token.chars().count(),
            (Self::SentencePiece, kind::BYTE) => 1,
            (Self::SentencePiece, kind::NORMAL) => token
                .chars()
                .map(|c| if c == '▁' { 1 } else { c.len_utf8() })
                .sum(),
            _ => token.len(),
        };
        n as u32
    }
}

fn is_byte_token(token: &str) -> bool {
    token.len() == 6 && token.starts_with("<0x") && token.ends_with('>')
}

/// The tokens that are recognised in a text before it is split, as llama.cpp does when it parses special tokens.
fn special_tokens(tokens: &[&str], kinds: &[i64]) -> Vec<tokenizers::AddedToken> {
    let is_special = |k: i64| matches!(k, kind::UNKNOWN | kind::CONTROL | kind::USER_DEFINED);
    let specials = tokens
        .iter()
        .zip(kinds)
        .filter(|(token, k)| is_special(**k) && !token.is_empty());
    specials
        .map(|(token, &k)| {
            tokenizers::AddedToken::from(*token, k != kind::USER_DEFINED).normalized(false)
        })
        .collect()
}

fn vocabulary(tokens: &[&str]) -> Result<tokenizers::models::bpe::Vocab, ModelError> {
    let vocab: tokenizers::models::bpe::Vocab =
        tokens.iter().map(|&t| t.to_owned()).zip(0..).collect();
    if vocab.len() != tokens.len() {
        let problem = format!(
            "{} of {} tokens stand twice",
            tokens.len() - vocab.len(),
            tokens.len()
        );
        return Err(ModelError::Tokenizer(problem));
    }
    Ok(vocab)
}

fn tokenizer_error(error: tokenizers::Error) -> ModelError {
    ModelError::Tokenizer(one_line(&error))
}

fn one_line(error: &tokenizers::Error) -> String {
    error.to_string().replace(['\n', '\r'], " ")
}
