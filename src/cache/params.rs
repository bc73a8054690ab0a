//! Parameters of a stage: what a TOML may say, its defaults, and what is wrong with what it says.
//!
//! Invariant: every problem is told, not only the first one.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::stage::StageDef;

/// The value of a stage's parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// An integer.
    Int(i64),
    /// A real number.
    Float(f64),
    /// A name or path.
    Text(String),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Int(v) => write!(f, "{v}"),
            Value::Float(v) => write!(f, "{v}"),
            Value::Text(v) => f.write_str(v),
        }
    }
}

/// What a parameter may be.
#[derive(Debug, Clone, Copy)]
pub enum Domain {
    /// An integer from `min` to `max`.
    Int {
        /// Smallest value.
        min: i64,
        /// Largest value.
        max: i64,
    },
    /// A real number with `min` < x ≤ `max`.
    Fraction {
        /// Exclusive lower end.
        min: f64,
        /// Inclusive upper end.
        max: f64,
    },
    /// A real number from 0 to `max`, both allowed.
    Share {
        /// Largest value.
        max: f64,
    },
    /// Any real number.
    Real,
    /// One of several words; a number is compared as it is printed, so `2.5` may be one of them.
    Choice {
        /// What is allowed.
        of: &'static [&'static str],
    },
    /// Any text (a data set's name).
    Text,
    /// A file, or one of some words. In a TOML a path is relative to it; `sha256` is the parameter that holds the file's sum.
    File {
        /// Words that name no file.
        or: &'static [&'static str],
    },
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Domain::Int { min, max } => write!(f, "an integer from {min} to {max}"),
            Domain::Fraction { min, max } => {
                write!(f, "a number greater than {min} and at most {max}")
            }
            Domain::Share { max } => write!(f, "a number from 0 to {max}"),
            Domain::Real => f.write_str("a number"),
            Domain::Choice { of } => write!(f, "one of: {}", of.join(", ")),
            Domain::Text => f.write_str("a text in quotes"),
            Domain::File { or } => write!(f, "a path in quotes, or: {}", or.join(", ")),
        }
    }
}

/// One parameter of a stage.
#[derive(Debug, Clone, Copy)]
pub struct ParamDef {
    /// TOML key.
    pub name: &'static str,
    /// What is allowed.
    pub domain: Domain,
    /// The default as it would stand in TOML; `None`: no default. A stage whose `build` needs one of several
    /// parameters (say `tokens` or `kept_fraction`) gives none a default and checks in `build`.
    pub default: Option<&'static str>,
    /// One line.
    pub doc: &'static str,
}

/// Parameters of a stage, by name, in a fixed order.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Params(pub BTreeMap<String, Value>);

impl Params {
    /// An integer parameter.
    pub fn int(&self, name: &str) -> Option<i64> {
        match self.0.get(name) {
            Some(Value::Int(v)) => Some(*v),
            _ => None,
        }
    }

    /// A real parameter (an integer counts as one).
    pub fn float(&self, name: &str) -> Option<f64> {
        match self.0.get(name) {
            Some(Value::Float(v)) => Some(*v),
            Some(Value::Int(v)) => Some(*v as f64),
            _ => None,
        }
    }

    /// A text parameter.
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.0.get(name) {
            Some(Value::Text(v)) => Some(v),
            _ => None,
        }
    }

    /// Checks given parameters against a stage's definitions and fills in defaults; all problems at once,
    /// each as (parameter, message).
    pub fn resolve(def: &StageDef, given: &Params) -> Result<Params, Vec<(String, String)>> {
        let mut problems = Vec::new();
        let mut out = BTreeMap::new();
        for (name, value) in &given.0 {
            let Some(p) = def.params.iter().find(|p| p.name == name) else {
                let known: Vec<_> = def.params.iter().map(|p| p.name).collect();
                problems.push((
                    name.clone(),
                    format!(
                        "unknown parameter `{name}`; `{}` has: {}",
                        def.name,
                        known.join(", ")
                    ),
                ));
                continue;
            };
            match check(p, value) {
                Ok(v) => {
                    out.insert(name.clone(), v);
                }
                Err(message) => problems.push((name.clone(), message)),
            }
        }
        for p in def.params {
            if let (false, Some(text)) = (out.contains_key(p.name), p.default) {
                out.insert(p.name.to_owned(), parse_default(p, text));
            }
        }
        if problems.is_empty() {
            Ok(Params(out))
        } else {
            Err(problems)
        }
    }
}

fn parse_default(p: &ParamDef, text: &str) -> Value {
    let as_text = Value::Text(text.to_owned());
    match p.domain {
        Domain::Int { .. } => text.parse().map_or(as_text, Value::Int),
        Domain::Fraction { .. } | Domain::Share { .. } | Domain::Real => {
            text.parse().map_or(as_text, Value::Float)
        }
        Domain::Choice { .. } | Domain::Text | Domain::File { .. } => as_text,
    }
}

fn check(p: &ParamDef, value: &Value) -> Result<Value, String> {
    let number = match value {
        Value::Int(v) => Some(*v as f64),
        Value::Float(v) => Some(*v),
        Value::Text(_) => None,
    };
    let accepted = match p.domain {
        Domain::Int { min, max } => {
            matches!(value, Value::Int(v) if (min..=max).contains(v)).then(|| value.clone())
        }
        Domain::Fraction { min, max } => number.filter(|v| *v > min && *v <= max).map(Value::Float),
        Domain::Share { max } => number.filter(|v| *v >= 0.0 && *v <= max).map(Value::Float),
        Domain::Real => number.filter(|v| v.is_finite()).map(Value::Float),
        Domain::Choice { of } => {
            let word = value.to_string();
            of.contains(&word.as_str()).then_some(Value::Text(word))
        }
        Domain::Text | Domain::File { .. } => {
            matches!(value, Value::Text(_)).then(|| value.clone())
        }
    };
    accepted.ok_or_else(|| {
        let quote = if number.is_some() { "" } else { "\"" };
        format!(
            "`{}` is {quote}{value}{quote}, must be {}",
            p.name, p.domain
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(domain: Domain, value: Value) -> Result<Value, String> {
        let p = ParamDef {
            name: "p",
            domain,
            default: None,
            doc: "",
        };
        check(&p, &value)
    }

    fn text(word: &str) -> Value {
        Value::Text(word.to_owned())
    }

    #[test]
    fn a_choice_takes_its_words_and_numbers_as_they_are_printed() {
        let bits = Domain::Choice {
            of: &["2", "2.5", "best"],
        };
        for (given, word) in [
            (Value::Int(2), "2"),
            (Value::Float(2.0), "2"),
            (Value::Float(2.5), "2.5"),
            (text("best"), "best"),
        ] {
            assert_eq!(checked(bits, given), Ok(text(word)));
        }
        assert_eq!(
            checked(bits, Value::Int(5)).unwrap_err(),
            "`p` is 5, must be one of: 2, 2.5, best"
        );
        assert_eq!(
            checked(bits, text("Best")).unwrap_err(),
            "`p` is \"Best\", must be one of: 2, 2.5, best"
        );
    }

    #[test]
    fn ends_are_in_or_out_as_their_domain_says() {
        let share = Domain::Share { max: 0.5 };
        let fraction = Domain::Fraction { min: 0.0, max: 0.5 };
        assert_eq!(checked(share, Value::Int(0)), Ok(Value::Float(0.0)));
        assert_eq!(checked(share, Value::Float(0.5)), Ok(Value::Float(0.5)));
        for bad in [
            Value::Float(-0.1),
            Value::Float(0.6),
            Value::Float(f64::NAN),
            text("0.1"),
        ] {
            let message = checked(share, bad).unwrap_err();
            assert!(
                message.ends_with("must be a number from 0 to 0.5"),
                "{message}"
            );
        }
        assert_eq!(checked(fraction, Value::Float(0.5)), Ok(Value::Float(0.5)));
        assert!(checked(fraction, Value::Int(0)).is_err());
        let int = Domain::Int { min: 1, max: 3 };
        assert_eq!(checked(int, Value::Int(3)), Ok(Value::Int(3)));
        assert!(checked(int, Value::Float(3.0)).is_err());
        assert!(checked(Domain::Text, Value::Int(3)).is_err());
    }
}
