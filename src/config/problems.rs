//! What is wrong with an experiment: all problems at once, each with file, line, column and what to do.
//!
//! Invariant: reading an experiment never stops at the first problem; readers add to a [`Problems`] and go on with what
//! they understood. Problems print in the order in which they stand in the files.

use std::fmt;
use std::path::PathBuf;

use super::raw::At;

/// What a source is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceKind {
    /// A file or a text of many lines.
    Text,
    /// `-s key.path=value`.
    Override,
}

/// A text that experiments are read from: a file, an override, a preset.
#[derive(Debug, Clone)]
pub struct Source {
    /// What it is.
    pub kind: SourceKind,
    /// How messages call it.
    pub name: String,
    /// The file; `None` for overrides and presets.
    pub path: Option<PathBuf>,
    /// Its text.
    pub text: String,
}

/// A place in a source, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// The source's name.
    pub file: String,
    /// Line, from 1; 0 in an override, which is one line.
    pub line: usize,
    /// Column in characters, from 1.
    pub col: usize,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => f.write_str(&self.file),
            line => write!(f, "{}:{line}:{}", self.file, self.col),
        }
    }
}

/// The texts an experiment came from; [`At`] points into them.
#[derive(Debug, Clone, Default)]
pub struct Sources(Vec<Source>);

impl Sources {
    /// Adds a text and gives its number.
    pub fn add(&mut self, source: Source) -> usize {
        self.0.push(source);
        self.0.len() - 1
    }

    /// Whether a setting was changed on the command line.
    pub fn has_override(&self) -> bool {
        self.0.iter().any(|s| s.kind == SourceKind::Override)
    }

    /// The source that `at` points into.
    pub fn get(&self, at: At) -> &Source {
        &self.0[at.source]
    }

    /// Line and column of a place.
    pub fn locate(&self, at: At) -> Location {
        let source = self.get(at);
        if source.kind == SourceKind::Override {
            return Location {
                file: source.name.clone(),
                line: 0,
                col: 0,
            };
        }
        let mut start = at.offset.min(source.text.len());
        while !source.text.is_char_boundary(start) {
            start -= 1;
        }
        let before = &source.text[..start];
        let line_start = before.rfind('\n').map_or(0, |i| i + 1);
        Location {
            file: source.name.clone(),
            line: before.matches('\n').count() + 1,
            col: before[line_start..].chars().count() + 1,
        }
    }
}

/// One problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where, when it has a place.
    pub location: Option<Location>,
    /// The key's dotted path, e.g. `strategy.1.tail`; empty for a file as a whole.
    pub key: String,
    /// What is wrong, what was given and what is allowed.
    pub what: String,
    /// What to write instead.
    pub hint: Option<String>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(location) = &self.location {
            write!(f, "{location}: ")?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.what)?;
        match &self.hint {
            Some(hint) => write!(f, "; {hint}"),
            None => Ok(()),
        }
    }
}

/// Everything that is wrong with an experiment. The program's exit code for it is 2: refused before work.
#[derive(Debug, Clone, Default, PartialEq, Eq, thiserror::Error)]
pub struct Problems(Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.0 {
            writeln!(f, "{problem}")?;
        }
        let n = self.0.len();
        write!(f, "{n} problem{}", if n == 1 { "" } else { "s" })
    }
}

impl Problems {
    /// The problems, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.0.iter()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a problem.
    pub fn push(&mut self, problem: Problem) {
        if !self.0.contains(&problem) {
            self.0.push(problem);
        }
    }

    /// `value` when there are no problems, else all of them.
    pub fn into_result<T>(self, value: T) -> Result<T, Problems> {
        if self.0.is_empty() {
            Ok(value)
        } else {
            Err(self)
        }
    }
}

/// The problems found so far, and the sources they stand in.
#[derive(Debug, Default)]
pub struct Diagnostics {
    /// The texts read so far.
    pub sources: Sources,
    found: Vec<(Option<At>, Problem)>,
}

impl Diagnostics {
    /// Adds a problem at a place.
    pub fn at(&mut self, at: At, key: &str, what: impl Into<String>, hint: Option<String>) {
        let location = Some(self.sources.locate(at));
        let problem = Problem {
            location,
            key: key.to_owned(),
            what: what.into(),
            hint,
        };
        self.found.push((Some(at), problem));
    }

    /// Adds a problem that has no place in a text.
    pub fn anywhere(&mut self, key: &str, what: impl Into<String>, hint: Option<String>) {
        let problem = Problem {
            location: None,
            key: key.to_owned(),
            what: what.into(),
            hint,
        };
        self.found.push((None, problem));
    }

    /// Problems found so far.
    pub fn count(&self) -> usize {
        self.found.len()
    }

    /// Takes back the problems after the first `count`.
    pub fn forget_since(&mut self, count: usize) {
        self.found.truncate(count);
    }

    /// Whether nothing is wrong so far.
    pub fn is_clean(&self) -> bool {
        self.found.is_empty()
    }

    /// All problems, in the order of the texts; a problem that several swept strategies share is told once.
    pub fn into_problems(mut self) -> Problems {
        self.found.sort_by_key(|(at, _)| *at);
        let mut problems = Problems::default();
        for (_, problem) in self.found {
            problems.push(problem);
        }
        problems
    }
}

/// The known name nearest to `name`, when one is near enough to be what was meant.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |s: &str| s.to_lowercase().replace(['-', ' ', '.'], "_");
    let wanted = plain(name);
    known
        .into_iter()
        .map(|k| {
            let candidate = plain(k);
            let mut score = strsim::jaro_winkler(&wanted, &candidate);
            // Signs and ends left out (`q40`, `fp8`) are the commonest slips, and Jaro-Winkler is harsh on short names.
            if wanted.replace('_', "") == candidate.replace('_', "") {
                score = 1.0;
            } else if wanted.len() >= 2 && candidate.starts_with(&wanted) {
                score = score.max(0.9);
            }
            (score, strsim::damerau_levenshtein(&wanted, &candidate), k)
        })
        .filter(|(score, distance, _)| *score >= 0.87 || *distance == 1)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, _, k)| k)
}

/// "did you mean `x`?" for the nearest known name.
pub fn did_you_mean<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    nearest(name, known).map(|k| format!("did you mean `{k}`?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_characters_from_one() {
        let mut sources = Sources::default();
        let source = sources.add(Source {
            kind: SourceKind::Text,
            name: "a.toml".into(),
            path: None,
            text: "x = 1\n# größe\ny = 2".into(),
        });
        let text = sources.get(At { source, offset: 0 }).text.clone();
        let at = |needle: &str| At {
            source,
            offset: text.find(needle).unwrap(),
        };
        assert_eq!(sources.locate(at("x")).to_string(), "a.toml:1:1");
        assert_eq!(sources.locate(at("e\ny")).to_string(), "a.toml:2:7");
        assert_eq!(sources.locate(at("2")).to_string(), "a.toml:3:5");
        let past = At {
            source,
            offset: 999,
        };
        assert_eq!(sources.locate(past).line, 3);
    }

    #[test]
    fn near_names_are_found_and_far_ones_are_not() {
        let known = ["q4_0", "q8_0", "nvfp4", "fp8_e4m3", "f16"];
        assert_eq!(nearest("q40", known), Some("q4_0"));
        assert_eq!(nearest("Q8_0", known), Some("q8_0"));
        assert_eq!(nearest("nvpf4", known), Some("nvfp4"));
        assert_eq!(nearest("fp8", known), Some("fp8_e4m3"));
        assert_eq!(nearest("fp16", known), Some("f16"));
        assert_eq!(nearest("turbo", known), None);
    }
}
