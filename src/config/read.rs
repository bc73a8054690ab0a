//! Reading typed values out of a table; whatever is wrong becomes a problem and reading goes on.

use std::ops::RangeInclusive;

use super::problems::{Diagnostics, did_you_mean, nearest};
use super::raw::{At, Entry, Node, Raw, Table};

/// Words that mean opposite things in different tools, or another tool's word for one of ours.
const FOREIGN: &[(&str, &str)] = &[
    ("compression_ratio", AMBIGUOUS),
    ("compression", AMBIGUOUS),
    ("ratio", AMBIGUOUS),
    ("keep", AMBIGUOUS),
    ("keep_ratio", AMBIGUOUS),
    ("prune_ratio", AMBIGUOUS),
    ("sparsity", AMBIGUOUS),
    (
        "cache_type_k",
        "write encode = { k = \"...\", v = \"...\" }",
    ),
    (
        "cache_type_v",
        "write encode = { k = \"...\", v = \"...\" }",
    ),
    ("type_k", "write encode = { k = \"...\", v = \"...\" }"),
    ("type_v", "write encode = { k = \"...\", v = \"...\" }"),
    ("press", "write retain = \"...\" in a [[strategy]]"),
    ("n_ctx", "write `context` or `window` in [protocol]"),
    ("ctx_size", "write `context` or `window` in [protocol]"),
    (
        "limit",
        "write `documents` in [data] or `windows` in [protocol]",
    ),
    ("residual_length", "write `tail`"),
    ("dataset", "write sets = [\"...\"] in [data]"),
    ("datasets", "write sets = [\"...\"] in [data]"),
    ("type", "write `method` in a stage, `kind` in [protocol]"),
    ("strategies", "write [[strategy]], one table per strategy"),
];

const AMBIGUOUS: &str = "write `kept_fraction` (the part of the rows that stays) in `retain`; memory is measured, and \
     shown as `bytes_vs_f16`";

/// What is wrong with a key that other tools use, and what to write; `None` for any other key.
pub fn foreign_word(entry: &Entry) -> Option<(String, String)> {
    let (_, hint) = FOREIGN.iter().find(|(word, _)| *word == entry.key)?;
    if *hint != AMBIGUOUS {
        return Some(("another tool's key".to_owned(), (*hint).to_owned()));
    }
    let value = match entry.node.raw {
        Raw::Float(v) if v > 0.0 && v < 1.0 => v,
        _ => 0.3,
    };
    let what = format!(
        "ambiguous key: {value} of it keeps {value} in KVzip and {} in kvpress",
        (100.0 * (1.0 - value)).round() / 100.0
    );
    Some((what, (*hint).to_owned()))
}

/// A table being read. `path` is its dotted path in messages, empty for the top.
pub struct Reader<'a, 'd> {
    /// The table.
    pub table: &'a Table,
    /// Its path.
    pub path: String,
    /// Where the table stands.
    pub at: At,
    /// Where problems go.
    pub diagnostics: &'d mut Diagnostics,
}

impl<'a> Reader<'a, '_> {
    /// A number within bounds.
    pub fn number(&mut self, key: &str, range: RangeInclusive<f64>) -> Option<f64> {
        let node = self.get(key)?;
        let value = match node.raw {
            Raw::Float(v) => Some(v),
            Raw::Int(v) => Some(v as f64),
            _ => None,
        };
        let found = value.filter(|v| range.contains(v));
        if found.is_none() {
            let must = format!("a number from {} to {}", range.start(), range.end());
            self.wrong(node, key, &must);
        }
        found
    }

    /// The entries of a list of names; one name stands for a list of one. Nothing where the key is absent.
    pub fn names(&mut self, key: &str) -> Vec<&'a Node> {
        match self.get(key).map(|node| (node, &node.raw)) {
            None => Vec::new(),
            Some((_, Raw::List(items))) if !items.is_empty() => items.iter().collect(),
            Some((node, Raw::Text(_))) => vec![node],
            Some((node, _)) => {
                self.wrong(node, key, "a list of names or paths");
                Vec::new()
            }
        }
    }

    /// The dotted path of a key.
    pub fn key(&self, key: &str) -> String {
        if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        }
    }

    /// Reports every key that isn't one of `known`.
    pub fn only(&mut self, known: &[&str]) {
        for entry in &self.table.0 {
            if known.contains(&entry.key.as_str()) {
                continue;
            }
            let key = self.key(&entry.key);
            let (what, hint) = foreign_word(entry).unwrap_or_else(|| {
                let near = did_you_mean(&entry.key, known.iter().copied());
                let all = || format!("allowed here: {}", known.join(", "));
                ("unknown key".to_owned(), near.unwrap_or_else(all))
            });
            self.diagnostics.at(entry.key_at, &key, what, Some(hint));
        }
    }

    /// Reports a value of a wrong type or out of range.
    pub fn wrong(&mut self, node: &Node, key: &str, must: &str) {
        let key = self.key(key);
        let what = format!("is {}, must be {must}", node.raw.show());
        self.diagnostics.at(node.at, &key, what, None);
    }

    /// Reports a key that isn't there. Silent when a misspelling of it is: that is told already.
    pub fn missing(&mut self, key: &str, hint: &str) {
        if self
            .table
            .0
            .iter()
            .any(|e| nearest(&e.key, [key]).is_some())
        {
            return;
        }
        let key = self.key(key);
        self.diagnostics
            .at(self.at, &key, "is missing", Some(hint.to_owned()));
    }

    /// A value that is there.
    pub fn get(&self, key: &str) -> Option<&'a Node> {
        self.table.get(key)
    }

    /// A whole number in a range.
    pub fn int(&mut self, key: &str, range: RangeInclusive<i64>) -> Option<i64> {
        let node = self.get(key)?;
        match node.raw {
            Raw::Int(v) if range.contains(&v) => Some(v),
            _ => {
                let must = format!("a whole number from {} to {}", range.start(), range.end());
                self.wrong(node, key, &must);
                None
            }
        }
    }

    /// A count in a range; ranges here are never negative.
    pub fn count(&mut self, key: &str, range: RangeInclusive<i64>) -> Option<usize> {
        self.int(key, range).and_then(|v| usize::try_from(v).ok())
    }

    /// A string.
    pub fn text(&mut self, key: &str) -> Option<(&'a str, &'a Node)> {
        let node = self.get(key)?;
        match &node.raw {
            Raw::Text(s) => Some((s, node)),
            _ => {
                self.wrong(node, key, "a text in quotes");
                None
            }
        }
    }

    /// `true` or `false`.
    pub fn flag(&mut self, key: &str) -> Option<bool> {
        let node = self.get(key)?;
        match node.raw {
            Raw::Bool(v) => Some(v),
            _ => {
                self.wrong(node, key, "true or false");
                None
            }
        }
    }

    /// One of several words.
    pub fn choice<T: Copy>(&mut self, key: &str, words: &[(&str, T)]) -> Option<T> {
        let (text, node) = self.text(key)?;
        if let Some((_, value)) = words.iter().find(|(w, _)| *w == text) {
            return Some(*value);
        }
        let names: Vec<&str> = words.iter().map(|(w, _)| *w).collect();
        let what = format!("is \"{text}\", must be one of {}", quoted(&names));
        let path = self.key(key);
        let hint = did_you_mean(text, names);
        self.diagnostics.at(node.at, &path, what, hint);
        None
    }

    /// A table below this one.
    pub fn below(&mut self, key: &str) -> Option<(&'a Table, At)> {
        let entry = self.table.entry(key)?;
        match &entry.node.raw {
            Raw::Table(t) => Some((t, entry.key_at)),
            _ => {
                self.wrong(&entry.node, key, &format!("a table: [{key}]"));
                None
            }
        }
    }
}

/// Words in quotes, comma-separated.
pub fn quoted(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|w| format!("\"{w}\"")).collect();
    quoted.join(", ")
}
