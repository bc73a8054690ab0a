//! A long text in pieces that are encoded one after the other: the crate needs about a hundred times a text's bytes
//! while it encodes it.
//!
//! Invariant: the pieces' ids in a row are the whole text's. A cut lies between a letter and a space, which every pattern
//! of a byte-level pre-tokenizer here puts into two words: a space only ever begins one, or stands among other white
//! space; none of them looks behind, and the one that looks ahead does so from white space.

/// The least bytes of a piece that is not the last.
const PIECE_BYTES: usize = 1 << 14;

/// The pieces of a text, in order.
pub fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut left = text;
    std::iter::from_fn(move || {
        let end = first_cut(left, PIECE_BYTES).unwrap_or(left.len());
        let (piece, later) = left.split_at(end);
        left = later;
        (!piece.is_empty()).then_some(piece)
    })
}

/// The first byte from `from` on before which a text may be cut.
pub fn first_cut(text: &str, from: usize) -> Option<usize> {
    let mut pairs = text.as_bytes().windows(2).skip(from);
    let found = pairs.position(|pair| pair[0].is_ascii_alphabetic() && pair[1] == b' ');
    found.map(|i| from + i + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_make_the_text_and_end_with_a_word() {
        let words = ["a word", "s,  ", "42 ", "é \n", "the\n", "(it's) "];
        let text: String = (0..20_000).map(|i| words[i * i % 13 % 6]).collect();
        let all: Vec<&str> = pieces(&text).collect();
        assert_eq!(all.concat(), text);
        assert!(all.len() > 3);
        for pair in all.windows(2) {
            assert!(pair[0].len() >= PIECE_BYTES && pair[0].len() < PIECE_BYTES + 100);
            assert!(pair[0].ends_with(|c: char| c.is_ascii_alphabetic()));
            assert!(pair[1].starts_with(' '));
        }
        assert_eq!(pieces("").count(), 0);
        assert_eq!(pieces(&"é".repeat(PIECE_BYTES)).count(), 1);
        assert_eq!(first_cut("<|a b|>", 0), Some(3));
        assert_eq!(first_cut("<|ab|> ", 0), None);
    }
}
