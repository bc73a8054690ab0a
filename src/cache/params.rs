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
    /// Any text (a path, a data set's name).
    Text,
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
    match p.domain {
        Domain::Int { .. } => text
            .parse()
            .map(Value::Int)
            .unwrap_or(Value::Text(text.to_owned())),
        Domain::Fraction { .. } => text
            .parse()
            .map(Value::Float)
            .unwrap_or(Value::Text(text.to_owned())),
        Domain::Text => Value::Text(text.to_owned()),
    }
}

fn check(p: &ParamDef, value: &Value) -> Result<Value, String> {
    match (p.domain, value) {
        (Domain::Int { min, max }, Value::Int(v)) if (min..=max).contains(v) => Ok(value.clone()),
        (Domain::Int { min, max }, _) => Err(format!(
            "`{}` is {value}, must be an integer from {min} to {max}",
            p.name
        )),
        (Domain::Fraction { min, max }, Value::Float(_) | Value::Int(_)) => {
            let v = if let Value::Int(i) = value {
                *i as f64
            } else if let Value::Float(f) = value {
                *f
            } else {
                f64::NAN
            };
            if v > min && v <= max {
                Ok(Value::Float(v))
            } else {
                Err(format!(
                    "`{}` is {value}, must be greater than {min} and at most {max}",
                    p.name
                ))
            }
        }
        (Domain::Fraction { min, max }, Value::Text(_)) => Err(format!(
            "`{}` is \"{value}\", must be a number greater than {min} and at most {max}",
            p.name
        )),
        (Domain::Text, Value::Text(_)) => Ok(value.clone()),
        (Domain::Text, _) => Err(format!("`{}` is {value}, must be a text in quotes", p.name)),
    }
}
