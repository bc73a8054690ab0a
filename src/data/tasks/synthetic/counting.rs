//! Counting: the words that occur most often in a numbered list, or in a coded text whose counts fall by a zeta law.
//!
//! Invariant: the words asked occur strictly more often than all others.

use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use super::super::Question;
use super::{Recipe, question, words};

/// Words asked for in a list.
const ASKED: usize = 10;

/// A numbered list.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CommonWords {
    /// Times that each of the ten words occurs.
    common: usize,
    /// Times that any other word occurs.
    other: usize,
}

/// One context's words, the common ones first.
pub(super) struct Listed {
    plan: CommonWords,
    words: Vec<String>,
    example: String,
    rng: ChaCha8Rng,
}

impl CommonWords {
    pub(super) fn recipe(&self, rng: &mut ChaCha8Rng) -> Listed {
        let mut nouns: Vec<String> = words::nouns().into_iter().map(str::to_owned).collect();
        words::shuffle(&mut nouns, rng);
        let own = nouns.split_off(2 * ASKED);
        let body = list(&nouns, (3, 1), rng.clone());
        let example = format!("{body}{}{}\n", ASK_LIST, answer(&nouns[..ASKED]));
        let mut words = own;
        // Enough words for any length: beyond the nouns, pairs.
        words.extend(words::pairs(4096, &mut rng.clone()));
        Listed {
            plan: self.clone(),
            words,
            example,
            rng: rng.clone(),
        }
    }
}

const ASK_LIST: &str = "Question: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often \
                        in the list are:";

fn list(all: &[String], (common, other): (usize, usize), mut rng: ChaCha8Rng) -> String {
    let mut entries: Vec<&str> = Vec::new();
    for (i, word) in all.iter().enumerate() {
        let times = if i < ASKED { common } else { other };
        entries.extend(std::iter::repeat_n(word.as_str(), times));
    }
    words::shuffle(&mut entries, &mut rng);
    let numbered: Vec<String> = entries
        .iter()
        .enumerate()
        .map(|(i, w)| format!("{}. {w}", i + 1))
        .collect();
    format!(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most \
         often.\n{}\n",
        numbered.join(" ")
    )
}

fn answer(words: &[String]) -> String {
    let numbered: Vec<String> = words
        .iter()
        .enumerate()
        .map(|(i, w)| format!("{}. {w}", i + 1))
        .collect();
    format!(" {}", numbered.join(" "))
}

impl Recipe for Listed {
    fn context(&self, n: usize) -> String {
        let words = &self.words[..(ASKED + n).min(self.words.len())];
        let counts = (self.plan.common, self.plan.other);
        format!("{}{}", self.example, list(words, counts, self.rng.clone()))
    }

    fn questions(&self, _: usize, context: &str) -> Vec<Question> {
        let asked = &self.words[..ASKED];
        vec![question(context, ASK_LIST, &answer(asked), asked.to_vec())]
    }
}

/// A coded text.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FrequentWords {
    /// Exponent of the zeta law.
    alpha: f64,
}

/// One context's coded words, the most frequent first.
pub(super) struct Coded {
    alpha: f64,
    words: Vec<String>,
    rng: ChaCha8Rng,
}

/// Ranks that occur at any length in use.
const RANKS: usize = 64;

impl FrequentWords {
    pub(super) fn recipe(&self, rng: &mut ChaCha8Rng) -> Coded {
        let mut words: Vec<String> = Vec::new();
        while words.len() < RANKS {
            let word = words::letters(6, rng);
            if !words.contains(&word) {
                words.push(word);
            }
        }
        Coded {
            alpha: self.alpha,
            words,
            rng: rng.clone(),
        }
    }
}

impl Recipe for Coded {
    fn context(&self, n: usize) -> String {
        let weights: Vec<f64> = (1..=RANKS).map(|k| (k as f64).powf(-self.alpha)).collect();
        let zeta: f64 = weights.iter().sum();
        let mut entries: Vec<&str> = Vec::new();
        for (i, weight) in weights.iter().enumerate() {
            // The most frequent "word" is noise; the next three are asked and must differ at any length.
            let least = [3, 3, 2, 1].get(i).copied().unwrap_or(0);
            let times = ((10 * n) as f64 * weight / zeta).floor() as usize + least;
            let word = if i == 0 { "..." } else { &self.words[i] };
            entries.extend(std::iter::repeat_n(word, times));
        }
        words::shuffle(&mut entries, &mut self.rng.clone());
        format!(
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded \
             words. {}\n",
            entries.join(" ")
        )
    }

    fn questions(&self, _: usize, context: &str) -> Vec<Question> {
        let asked = self.words[1..4].to_vec();
        let ask = "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared \
                   words in the above coded text? Answer: According to the coded text above, the three most frequently appeared words are:";
        vec![question(
            context,
            ask,
            &format!(" {}", asked.join(" ")),
            asked,
        )]
    }
}
