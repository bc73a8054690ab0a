//! Contexts made by the program, to a length in tokens, from a seed: needles, chains, counts, and what a small model can do: copying
//! and recall.
//!
//! Invariants: item i depends on the task, the seed, i and the length alone; a context has at most the tokens asked for
//! and no unit more would fit; the question is never part of the context, so one compressed cache serves all questions.
//! RULER's tasks follow C. Hsieh et al. 2024 (arXiv:2404.06654) and its generator's wording; there the question is part
//! of what a method may see, here it is not (as kvpress evaluates), and the haystack is prose of this project.

mod counting;
mod needle;
mod recall;
mod tracking;
mod words;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use super::{AnswerOption, Asking, Example, Question, TaskError};

/// What is generated.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(super) enum Plan {
    /// Facts hidden in a haystack.
    Needle(needle::Needle),
    /// A five-digit key at a stated depth: item i of n stands at i/(n−1) of the text.
    Passkey,
    /// A chain of variables that hand on one value.
    VariableTracking(tracking::Tracking),
    /// The ten words that occur most often.
    CommonWords(counting::CommonWords),
    /// The three coded words that occur most often, by a zeta law.
    FrequentWords(counting::FrequentWords),
    /// A random string in prose, to be repeated from its introduction on.
    Copy(recall::Copy),
    /// Keys with values, several asked.
    KeyValue(recall::KeyValue),
    /// Constants of a program, several asserted at its end.
    Code(recall::Code),
}

/// A context in the making: its text with `n` units, and what is asked then.
trait Recipe {
    /// The context with `n` units of filling, n ≥ 0.
    fn context(&self, n: usize) -> String;
    /// Questions with their answers, the context's text being `context`.
    fn questions(&self, n: usize, context: &str) -> Vec<Question>;
    /// Where what is asked stands, where that is one place.
    fn depth(&self) -> Option<f64> {
        None
    }
}

pub(super) fn examples(
    task: &str,
    plan: &Plan,
    asking: Asking,
    n_tokens: &dyn Fn(&str) -> usize,
) -> Result<Vec<Example>, TaskError> {
    let prose = words::prose();
    (0..asking.items)
        .map(|i| {
            let mut rng = ChaCha8Rng::seed_from_u64(asking.seed);
            rng.set_stream(i as u64);
            let depth = i as f64 / (asking.items.max(2) - 1) as f64;
            let recipe: Box<dyn Recipe> = match plan {
                Plan::Needle(needle) => Box::new(needle.recipe(&prose, &mut rng)),
                Plan::Passkey => Box::new(recall::Passkey::new(depth, &mut rng)),
                Plan::VariableTracking(t) => Box::new(t.recipe(&mut rng)),
                Plan::CommonWords(c) => Box::new(c.recipe(&mut rng)),
                Plan::FrequentWords(f) => Box::new(f.recipe(&mut rng)),
                Plan::Copy(c) => Box::new(c.recipe(&prose, &mut rng)),
                Plan::KeyValue(k) => Box::new(k.recipe(&mut rng)),
                Plan::Code(c) => Box::new(c.recipe(&mut rng)),
            };
            fill(recipe.as_ref(), asking.length, n_tokens)
                .map(|n| {
                    let context = recipe.context(n);
                    Example {
                        doc: format!("{task} {i}"),
                        depth: recipe.depth(),
                        questions: recipe.questions(n, &context),
                        context,
                    }
                })
                .map_err(|least| TaskError::TooShort {
                    task: task.to_owned(),
                    length: asking.length,
                    least,
                })
        })
        .collect()
}

/// The most units with which a context has at most `length` tokens; else the tokens of the emptiest one.
fn fill(
    recipe: &dyn Recipe,
    length: usize,
    n_tokens: &dyn Fn(&str) -> usize,
) -> Result<usize, usize> {
    let tokens = |n: usize| n_tokens(&recipe.context(n));
    let least = tokens(0);
    if least > length {
        return Err(least);
    }
    let mut above = 1;
    while tokens(above) <= length {
        above *= 2;
        // A unit without tokens of its own would never fill a context.
        if above > 1 << 24 {
            break;
        }
    }
    let mut fits = above / 2;
    while above - fits > 1 {
        let middle = fits + (above - fits) / 2;
        if tokens(middle) <= length {
            fits = middle;
        } else {
            above = middle;
        }
    }
    Ok(fits)
}

/// A question with one right continuation.
fn question(context: &str, ask: &str, answer: &str, wanted: Vec<String>) -> Question {
    Question {
        options: vec![AnswerOption {
            before: format!("{context}{ask}"),
            target: answer.to_owned(),
            n_chars: answer.trim_start().chars().count(),
        }],
        gold: 0,
        wanted,
    }
}

/// Where `k` things go among `n` lines: for each, the lines before it; ascending. Fractions lie in 0 … 1.
fn places(fractions: &[f64], n: usize) -> Vec<usize> {
    let mut at: Vec<usize> = fractions
        .iter()
        .map(|f| (f * n as f64).round() as usize)
        .collect();
    at.sort_unstable();
    at
}

/// Lines with others put in between, joined.
fn interleave(lines: &[&str], planted: &[String], at: &[usize], joint: &str) -> String {
    let mut all: Vec<&str> = Vec::with_capacity(lines.len() + planted.len());
    let mut next = planted.iter().zip(at).peekable();
    for i in 0..=lines.len() {
        while let Some((text, _)) = next.next_if(|(_, place)| **place <= i) {
            all.push(text);
        }
        all.extend(lines.get(i));
    }
    all.join(joint)
}

#[cfg(test)]
mod tests;
