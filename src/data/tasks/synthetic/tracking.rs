//! Variable tracking: `VAR A = 12345`, `VAR B = VAR A`, … among noise; asked are all names that hold the value.
//!
//! Invariant: names of one context are all different; a chain's assignments stand in order.

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use super::super::Question;
use super::{Recipe, interleave, places, question, words};

/// Lines of the solved example before the question.
const EXAMPLE_LINES: usize = 8;

/// How many chains, how long.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tracking {
    /// Chains, each with a value of its own; all are asked.
    chains: usize,
    /// Assignments after the first.
    hops: usize,
}

struct Chain {
    value: String,
    names: Vec<String>,
    fractions: Vec<f64>,
}

/// One context's chains, and the solved example.
pub(super) struct Tracked {
    chains: Vec<Chain>,
    example: String,
}

impl Tracking {
    pub(super) fn recipe(&self, rng: &mut ChaCha8Rng) -> Tracked {
        let example = self.chain(3, rng);
        let text = text(std::slice::from_ref(&example), EXAMPLE_LINES);
        let answer = example.names.join(" ");
        let example = format!("{}{} {answer}\n\n\n\n", text, ask(&example));
        Tracked {
            chains: (0..self.chains).map(|_| self.chain(5, rng)).collect(),
            example,
        }
    }

    fn chain(&self, n_letters: usize, rng: &mut ChaCha8Rng) -> Chain {
        let mut names: Vec<String> = Vec::new();
        while names.len() <= self.hops {
            let name = words::letters(n_letters, rng).to_uppercase();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        let mut fractions: Vec<f64> = names.iter().map(|_| rng.random_range(0.0..1.0)).collect();
        fractions.sort_by(f64::total_cmp);
        Chain {
            value: words::number(5, rng),
            names,
            fractions,
        }
    }
}

fn text(chains: &[Chain], n: usize) -> String {
    let mut planted: Vec<(f64, String)> = Vec::new();
    for chain in chains {
        for (i, (name, fraction)) in chain.names.iter().zip(&chain.fractions).enumerate() {
            let line = match i.checked_sub(1) {
                None => format!("VAR {name} = {}", chain.value),
                Some(before) => format!("VAR {name} = VAR {}", chain.names[before]),
            };
            planted.push((*fraction, line));
        }
    }
    planted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (fractions, planted): (Vec<f64>, Vec<String>) = planted.into_iter().unzip();
    let noise = vec![words::NOISE; n];
    let body = interleave(&noise, &planted, &places(&fractions, n), "\n");
    format!(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{body}\n"
    )
}

/// RULER's words, its slip of the pen among them.
fn ask(chain: &Chain) -> String {
    let (value, n) = (&chain.value, chain.names.len());
    format!(
        "Question: Find all variables that are assigned the value {value} in the text above. Answer: According to the chain(s) of \
         variable assignment in the text above, {n} variables are assgined the value {value}, they are:"
    )
}

impl Recipe for Tracked {
    fn context(&self, n: usize) -> String {
        format!("{}{}", self.example, text(&self.chains, n))
    }

    fn questions(&self, _: usize, context: &str) -> Vec<Question> {
        let asked = self.chains.iter().map(|chain| {
            let answer = format!(" {}", chain.names.join(" "));
            question(context, &ask(chain), &answer, chain.names.clone())
        });
        asked.collect()
    }
}
