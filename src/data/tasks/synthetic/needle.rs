//! Needles in a haystack: facts `One of the special magic numbers for KEY is: VALUE.` among noise, prose or other needles.
//!
//! Invariant: keys and values of one context are all different; every key that is asked stands in the context.

use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use super::super::Question;
use super::{Recipe, interleave, places, question, words};

/// Kinds of haystack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Haystack {
    /// One sentence, over and over.
    Noise,
    /// Prose.
    Essay,
    /// Other needles.
    Needles,
}

/// Kinds of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    /// `adjective-noun`.
    Words,
    /// Seven digits.
    Numbers,
    /// Random UUIDs.
    Uuids,
}

/// What is hidden and asked.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Needle {
    haystack: Haystack,
    key: Kind,
    value: Kind,
    /// Keys in the context beside those of the haystack.
    keys: usize,
    /// Values of each key.
    values: usize,
    /// Keys asked in one question; 1: each key in a question of its own.
    asked_together: usize,
}

impl Kind {
    fn draw(self, rng: &mut ChaCha8Rng) -> String {
        match self {
            Kind::Words => words::pair(rng),
            Kind::Numbers => words::number(7, rng),
            Kind::Uuids => words::uuid(rng),
        }
    }

    fn many(self, n: usize, rng: &mut ChaCha8Rng) -> Vec<String> {
        let mut found = Vec::with_capacity(n);
        while found.len() < n {
            let next = self.draw(rng);
            if !found.contains(&next) {
                found.push(next);
            }
        }
        found
    }

    fn plural(self) -> &'static str {
        match self {
            Kind::Words => "words",
            Kind::Numbers => "numbers",
            Kind::Uuids => "uuids",
        }
    }
}

/// One context's needles.
pub(super) struct Hidden {
    plan: Needle,
    keys: Vec<String>,
    /// `[key][value]`.
    values: Vec<Vec<String>>,
    /// Where the needles stand, a fraction of the haystack each, ascending; in the order of `order`.
    fractions: Vec<f64>,
    /// (key, value) of the needles as they stand.
    order: Vec<(usize, usize)>,
    filling: Vec<String>,
}

/// Depths from which a needle's place is drawn, as RULER does.
const DEPTHS: usize = 40;
/// Other needles that are kept ready.
const OTHERS: usize = 4096;

impl Needle {
    pub(super) fn recipe(&self, prose: &[String], rng: &mut ChaCha8Rng) -> Hidden {
        let keys = self.key.many(self.keys, rng);
        let all = self.value.many(self.keys * self.values, rng);
        let values = all.chunks(self.values).map(<[String]>::to_vec).collect();
        let mut depths: Vec<usize> = (0..DEPTHS).collect();
        words::shuffle(&mut depths, rng);
        let mut fractions: Vec<f64> = depths
            .iter()
            .cycle()
            .take(self.keys * self.values)
            .map(|d| *d as f64 / (DEPTHS - 1) as f64)
            .collect();
        fractions.sort_by(f64::total_cmp);
        let mut order: Vec<(usize, usize)> = (0..self.keys)
            .flat_map(|k| (0..self.values).map(move |v| (k, v)))
            .collect();
        words::shuffle(&mut order, rng);
        let filling = match self.haystack {
            Haystack::Noise => vec![words::NOISE.to_owned()],
            Haystack::Essay => prose.to_vec(),
            Haystack::Needles => {
                let mut rng = rng.clone();
                (0..OTHERS)
                    .map(|_| (self.key.draw(&mut rng), self.value.draw(&mut rng)))
                    .filter(|(key, _)| !keys.contains(key))
                    .map(|(key, value)| self.sentence(&key, &value))
                    .collect()
            }
        };
        Hidden {
            plan: self.clone(),
            keys,
            values,
            fractions,
            order,
            filling,
        }
    }

    fn sentence(&self, key: &str, value: &str) -> String {
        let kind = self.value.plural();
        format!("One of the special magic {kind} for {key} is: {value}.")
    }

    fn is_single(&self) -> bool {
        self.values * self.asked_together == 1
    }
}

impl Recipe for Hidden {
    fn context(&self, n: usize) -> String {
        let plan = &self.plan;
        let lines: Vec<&str> = self
            .filling
            .iter()
            .cycle()
            .take(n)
            .map(String::as_str)
            .collect();
        let needle = |&(k, v): &(usize, usize)| plan.sentence(&self.keys[k], &self.values[k][v]);
        let planted: Vec<String> = self.order.iter().map(needle).collect();
        let joint = match plan.haystack {
            Haystack::Essay => " ",
            Haystack::Noise | Haystack::Needles => "\n",
        };
        let text = interleave(&lines, &planted, &places(&self.fractions, n), joint);
        let kind = plan.value.plural();
        let opening = match plan.is_single() {
            true => format!(
                "A special magic {} is hidden within the following text.",
                kind.trim_end_matches('s')
            ),
            false => format!("Some special magic {kind} are hidden within the following text."),
        };
        let quiz = kind.trim_end_matches(if plan.is_single() { "s" } else { "" });
        format!(
            "{opening} Make sure to memorize it. I will quiz you about the {quiz} afterwards.\n{text}\n"
        )
    }

    fn questions(&self, _: usize, context: &str) -> Vec<Question> {
        let plan = &self.plan;
        let kind = plan.value.plural();
        let indices: Vec<usize> = (0..self.keys.len()).collect();
        let groups = indices.chunks(plan.asked_together);
        groups
            .map(|group| {
                let names: Vec<&str> = group.iter().map(|&k| self.keys[k].as_str()).collect();
                let query = match names.as_slice() {
                    [one] => (*one).to_owned(),
                    [first @ .., last] => format!("{}, and {last}", first.join(", ")),
                    [] => String::new(),
                };
                let ask = if plan.is_single() {
                    let one = kind.trim_end_matches('s');
                    format!(
                        "What is the special magic {one} for {query} mentioned in the provided text? The special magic {one} for \
                         {query} mentioned in the provided text is"
                    )
                } else {
                    format!(
                        "What are all the special magic {kind} for {query} mentioned in the provided text? The special magic {kind} for \
                         {query} mentioned in the provided text are"
                    )
                };
                let wanted: Vec<String> =
                    group.iter().flat_map(|&k| self.values[k].clone()).collect();
                question(context, &ask, &format!(" {}", wanted.join(", ")), wanted)
            })
            .collect()
    }
}
