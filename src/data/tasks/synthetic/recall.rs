//! What a small model can do: find a pass key, repeat a planted string, recall values by key, and in a program.
//!
//! Invariants: what precedes an answer stands in the context word for word before the planted text, so that copying
//! suffices; keys of one context are all different.

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use super::super::Question;
use super::{Recipe, interleave, places, question, words};

/// A pass key in noise.
pub(super) struct Passkey {
    depth: f64,
    key: String,
}

impl Passkey {
    pub(super) fn new(depth: f64, rng: &mut ChaCha8Rng) -> Self {
        Self {
            depth,
            key: words::number(5, rng),
        }
    }
}

impl Recipe for Passkey {
    fn context(&self, n: usize) -> String {
        let planted = format!(
            "The pass key is {key}. Remember it. {key} is the pass key.",
            key = self.key
        );
        let noise = vec![words::NOISE; n];
        let body = interleave(&noise, &[planted], &places(&[self.depth], n), "\n");
        format!(
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about the \
             important information there.\n{body}\n"
        )
    }

    fn questions(&self, _: usize, context: &str) -> Vec<Question> {
        let ask = "What is the pass key? The pass key is";
        let answer = format!(" {}", self.key);
        vec![question(context, ask, &answer, vec![self.key.clone()])]
    }

    fn depth(&self) -> Option<f64> {
        Some(self.depth)
    }
}

/// A random string in prose.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Copy {
    /// Words of each string.
    words: usize,
    /// Strings, each asked.
    strings: usize,
}

/// Strings with their names and places.
pub(super) struct Copied {
    names: Vec<String>,
    strings: Vec<String>,
    fractions: Vec<f64>,
    prose: Vec<String>,
}

impl Copy {
    pub(super) fn recipe(&self, prose: &[String], rng: &mut ChaCha8Rng) -> Copied {
        let names = words::pairs(self.strings, rng);
        let nouns = words::nouns();
        let string = |rng: &mut ChaCha8Rng| {
            let drawn = (0..self.words).map(|_| nouns[rng.random_range(0..nouns.len())]);
            drawn.collect::<Vec<_>>().join(" ")
        };
        let strings = (0..self.strings).map(|_| string(rng)).collect();
        let mut fractions: Vec<f64> = (0..self.strings)
            .map(|_| rng.random_range(0.0..1.0))
            .collect();
        fractions.sort_by(f64::total_cmp);
        let start = rng.random_range(0..prose.len());
        let turned = prose[start..].iter().chain(&prose[..start]);
        Copied {
            names,
            strings,
            fractions,
            prose: turned.cloned().collect(),
        }
    }
}

impl Recipe for Copied {
    fn context(&self, n: usize) -> String {
        let lines = self.prose.iter().cycle().take(n).map(String::as_str);
        let lines: Vec<&str> = lines.collect();
        let planted = self.names.iter().zip(&self.strings);
        let planted: Vec<String> = planted
            .map(|(name, s)| format!("The song of {name}: {s}."))
            .collect();
        interleave(&lines, &planted, &places(&self.fractions, n), "\n") + "\n"
    }

    fn questions(&self, _: usize, context: &str) -> Vec<Question> {
        let asked = self.names.iter().zip(&self.strings).map(|(name, string)| {
            let ask = format!("The song of {name}:");
            question(context, &ask, &format!(" {string}"), vec![string.clone()])
        });
        asked.collect()
    }
}

/// Keys with values.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeyValue {
    /// Keys asked, spread evenly over the context.
    questions: usize,
}

/// A program with constants.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Code {
    /// Constants asserted, spread evenly over the program.
    questions: usize,
}

/// Names with numbers, as many as there is room for, and how a pair is written and asked.
pub(super) struct Pairs {
    names: Vec<(String, String)>,
    questions: usize,
    form: Form,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Lines,
    Program,
}

/// Pairs that are kept ready: more than fit any context in use.
const MOST: usize = 8192;

impl KeyValue {
    pub(super) fn recipe(&self, rng: &mut ChaCha8Rng) -> Pairs {
        Pairs::new(self.questions, Form::Lines, rng)
    }
}

impl Code {
    pub(super) fn recipe(&self, rng: &mut ChaCha8Rng) -> Pairs {
        Pairs::new(self.questions, Form::Program, rng)
    }
}

impl Pairs {
    fn new(questions: usize, form: Form, rng: &mut ChaCha8Rng) -> Self {
        let mut known = std::collections::BTreeSet::new();
        let mut names = Vec::new();
        while names.len() < MOST {
            let name = words::pair(rng);
            let value = words::number(5, rng);
            if known.insert(name.clone()) {
                names.push((name, value));
            }
        }
        Self {
            names,
            questions,
            form,
        }
    }

    fn written(&self, (name, value): &(String, String)) -> String {
        match self.form {
            Form::Lines => format!("{name}: {value}\n"),
            Form::Program => format!(
                "pub const {}: u32 = {value};\n",
                name.to_uppercase().replace('-', "_")
            ),
        }
    }
}

impl Recipe for Pairs {
    fn context(&self, n: usize) -> String {
        let n = (self.questions + n).min(self.names.len());
        let head = match self.form {
            Form::Lines => "Each name has a number.\n\n",
            Form::Program => "//! Constants of the instrument.\n\n",
        };
        let body: String = self.names[..n].iter().map(|p| self.written(p)).collect();
        head.to_owned() + &body
    }

    fn questions(&self, n: usize, context: &str) -> Vec<Question> {
        let n = (self.questions + n).min(self.names.len());
        let asked =
            (0..self.questions).map(|q| &self.names[(2 * q + 1) * n / (2 * self.questions)]);
        let ask = |pair: &(String, String)| {
            let line = self.written(pair);
            let end = line.len() - pair.1.len() - if self.form == Form::Lines { 2 } else { 3 };
            let before = match self.form {
                Form::Lines => "\n",
                Form::Program => "\n/// Again, as above.\n",
            };
            let ask = format!("{before}{}", &line[..end]);
            question(context, &ask, &format!(" {}", pair.1), vec![pair.1.clone()])
        };
        asked.map(ask).collect()
    }
}
