//! From a text to token windows: documents, windows, passages.
//!
//! Invariants: windows never overlap and never reach over the end of a document; which tokens are taken depends on the
//! text and the lengths asked for alone.

use serde::{Deserialize, Serialize};

use super::{DataError, Text};

/// A stretch of tokens that is prefilled and scored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passage {
    /// Number of the document in its file, from 0; of the stretch, when the file has no separator.
    pub document: usize,
    /// The first token's index in that document.
    pub start: usize,
    /// The tokens.
    pub ids: Vec<u32>,
}

/// Which windows of a text without documents are its passages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Passages {
    /// Some, spread evenly over it.
    #[default]
    Spread,
    /// The first ones, back to back.
    First,
}

impl Passages {
    /// All, by their names.
    pub const ALL: [(&'static str, Self); 2] = [("spread", Self::Spread), ("first", Self::First)];

    /// Whether they are spread, as they are where nothing is said.
    pub fn is_spread(&self) -> bool {
        *self == Self::Spread
    }
}

impl Text {
    /// The documents: what stands between lines that hold the separator alone. Without a separator: the whole text.
    pub fn documents(&self) -> Vec<&str> {
        let Some(separator) = &self.separator else {
            return vec![&self.text];
        };
        let mut documents = Vec::new();
        let (mut start, mut at) = (0, 0);
        for line in self.text.split_inclusive('\n') {
            if line.trim_end_matches(['\n', '\r']) == separator {
                documents.push(&self.text[start..at]);
                start = at + line.len();
            }
            at += line.len();
        }
        documents.push(&self.text[start..]);
        documents.retain(|d| !d.trim().is_empty());
        documents
    }

    /// The first `n` windows of `window` tokens each, back to back from the start of `ids`, the whole text's tokens.
    ///
    /// # Errors
    /// [`DataError::TooShort`] when the text has fewer than `n · window` tokens.
    pub fn windows<'a>(
        &self,
        ids: &'a [u32],
        window: usize,
        n: usize,
    ) -> Result<Vec<&'a [u32]>, DataError> {
        let fits = ids.len().checked_div(window).unwrap_or(0);
        if fits < n {
            return Err(self.too_short(ids.len(), window, n, fits, "protocol.windows"));
        }
        Ok(ids.chunks_exact(window).take(n).collect())
    }

    /// `n` passages of `n_tokens` each: the start of each of the first `n` documents, or, in a text without a separator,
    /// windows of it. `encode` turns a text into tokens.
    ///
    /// # Errors
    /// [`DataError::TooFewDocuments`], [`DataError::TooShort`], or what `encode` gives.
    pub fn passages<E: From<DataError>>(
        &self,
        n_tokens: usize,
        (n, which): (usize, Passages),
        encode: impl Fn(&str) -> Result<Vec<u32>, E>,
    ) -> Result<Vec<Passage>, E> {
        if self.separator.is_none() {
            return Ok(self.cut(&encode(&self.text)?, n_tokens, (n, which))?);
        }
        let documents = self.documents();
        if documents.len() < n {
            return Err(DataError::TooFewDocuments {
                name: self.name.clone(),
                got: documents.len(),
                asked: n,
            }
            .into());
        }
        documents
            .iter()
            .take(n)
            .enumerate()
            .map(|(document, text)| {
                let mut ids = encode(text)?;
                if ids.len() < n_tokens {
                    let name = format!("document {document} of {}", self.name);
                    return Err(DataError::ShortDocument {
                        name,
                        got: ids.len(),
                        needed: n_tokens,
                    }
                    .into());
                }
                ids.truncate(n_tokens);
                Ok(Passage {
                    document,
                    start: 0,
                    ids,
                })
            })
            .collect()
    }

    fn cut(
        &self,
        ids: &[u32],
        n_tokens: usize,
        (n, which): (usize, Passages),
    ) -> Result<Vec<Passage>, DataError> {
        let fits = ids.len().checked_div(n_tokens).unwrap_or(0);
        if fits < n {
            return Err(self.too_short(ids.len(), n_tokens, n, fits, "data.documents"));
        }
        Ok((0..n)
            .map(|document| {
                let window = match which {
                    Passages::Spread => document * fits / n,
                    Passages::First => document,
                };
                let start = window * n_tokens;
                Passage {
                    document,
                    start,
                    ids: ids[start..start + n_tokens].to_vec(),
                }
            })
            .collect())
    }

    fn too_short(
        &self,
        got: usize,
        window: usize,
        n: usize,
        fits: usize,
        key: &'static str,
    ) -> DataError {
        DataError::TooShort {
            name: self.name.clone(),
            got,
            needed: window * n,
            n,
            window,
            advice: if fits == 0 {
                "take a longer text or a smaller window".to_owned()
            } else {
                format!("set {key} to {fits} or less, or take a longer text")
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str, separator: Option<&str>) -> Text {
        Text {
            name: "t.txt".into(),
            sha256: String::new(),
            text: text.into(),
            separator: separator.map(Into::into),
        }
    }

    fn letters(text: &str) -> Result<Vec<u32>, DataError> {
        Ok(text.bytes().map(u32::from).collect())
    }

    #[test]
    fn a_separator_line_belongs_to_no_document() {
        let t = text(
            "one\nfirst\n\u{c}\ntwo \u{c} inside\n\u{c}\r\nthree\n\u{c}\n",
            Some("\u{c}"),
        );
        assert_eq!(
            t.documents(),
            ["one\nfirst\n", "two \u{c} inside\n", "three\n"]
        );
        assert_eq!(text("a\n---\nb", None).documents(), ["a\n---\nb"]);
    }

    #[test]
    fn windows_lie_back_to_back_or_say_what_is_missing() {
        let ids: Vec<u32> = (0..10).collect();
        let t = text("x", None);
        assert_eq!(t.windows(&ids, 4, 2).unwrap(), [&ids[0..4], &ids[4..8]]);
        let message = t.windows(&ids, 4, 3).unwrap_err().to_string();
        assert_eq!(
            message,
            "`t.txt` has 10 tokens, 3 x 4 need 12: set protocol.windows to 2 or less, or take a longer text"
        );
        let message = t.windows(&ids, 11, 1).unwrap_err().to_string();
        assert!(
            message.contains("a longer text or a smaller window"),
            "{message}"
        );
    }

    #[test]
    fn passages_start_each_document_or_spread_over_the_text() {
        let t = text("abcdef\n#\nghijkl", Some("#"));
        let p = t.passages(3, (2, Passages::Spread), letters).unwrap();
        assert_eq!(p[1].ids, [103, 104, 105]);
        assert_eq!((p[1].document, p[1].start), (1, 0));
        let message = t
            .passages(3, (3, Passages::Spread), letters)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("2 documents, 3 are asked for"),
            "{message}"
        );
        let message = t
            .passages(7, (2, Passages::Spread), letters)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("document 1 of t.txt has 6 tokens, 7 are needed"),
            "{message}"
        );

        let t = text("0123456789abcdef", None);
        for (which, want) in [(Passages::Spread, [0, 6]), (Passages::First, [0, 3])] {
            let passages = t.passages(3, (2, which), letters).unwrap();
            let starts: Vec<_> = passages.iter().map(|p| p.start).collect();
            assert_eq!(starts, want);
            assert!(t.passages(3, (6, which), letters).is_err());
        }
    }
}
