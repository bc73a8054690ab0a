//! An experiment's TOML as a tree in which every key and value knows its place, after `extends` and overrides.
//!
//! A tree, not a serde struct: serde stops at the first unknown key or wrong type, and a newcomer deserves all problems
//! at once. Invariants: entries of a table stand in the order of the file; nothing here knows what a key means.

use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problems::{Diagnostics, Source, SourceKind};

/// A place: a source's number and a byte offset in its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct At {
    /// Index into [`super::problems::Sources`].
    pub source: usize,
    /// Byte offset.
    pub offset: usize,
}

/// A value with its place.
#[derive(Debug, Clone)]
pub struct Node {
    /// The value.
    pub raw: Raw,
    /// Where it stands.
    pub at: At,
}

/// A TOML value.
#[derive(Debug, Clone)]
pub enum Raw {
    /// A string.
    Text(String),
    /// An integer that fits 64 bits.
    Int(i64),
    /// A float.
    Float(f64),
    /// `true` or `false`.
    Bool(bool),
    /// An array, or an array of tables.
    List(Vec<Node>),
    /// A table.
    Table(Table),
    /// A value that no key takes: a date, an integer beyond 64 bits. Holds its text.
    Other(String),
}

impl Raw {
    /// The value as it would stand in a message.
    pub fn show(&self) -> String {
        match self {
            Raw::Text(s) => format!("\"{s}\""),
            Raw::Int(v) => v.to_string(),
            Raw::Float(v) => format!("{v:?}"),
            Raw::Bool(v) => v.to_string(),
            Raw::List(items) => format!("a list of {}", items.len()),
            Raw::Table(_) => "a table".to_owned(),
            Raw::Other(text) => text.clone(),
        }
    }
}

/// One key of a table.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Where the key stands.
    pub key_at: At,
    /// Its value.
    pub node: Node,
}

/// A table, in the order of the file.
#[derive(Debug, Clone, Default)]
pub struct Table(pub Vec<Entry>);

impl Table {
    /// The entry of a key.
    pub fn entry(&self, key: &str) -> Option<&Entry> {
        self.0.iter().find(|e| e.key == key)
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.entry(key).map(|e| &e.node)
    }

    /// Takes a key out.
    pub fn remove(&mut self, key: &str) -> Option<Entry> {
        let i = self.0.iter().position(|e| e.key == key)?;
        Some(self.0.remove(i))
    }

    /// Puts `entry` in the place of the entry with its key, or at the end.
    pub fn set(&mut self, entry: Entry) {
        match self.0.iter_mut().find(|e| e.key == entry.key) {
            Some(old) => *old = entry,
            None => self.0.push(entry),
        }
    }

    /// Lays `over` on top: tables merge key by key, everything else is replaced. A table that names another `kind` or
    /// `method` replaces the one below as a whole, whose keys would mean nothing to it.
    pub fn overlay(&mut self, over: Table) {
        for entry in over.0 {
            match self.0.iter_mut().find(|e| e.key == entry.key) {
                Some(old) => match (&mut old.node.raw, entry.node.raw) {
                    (Raw::Table(below), Raw::Table(above)) if !above.is_another_than(below) => {
                        below.overlay(above);
                    }
                    (_, raw) => {
                        old.key_at = entry.key_at;
                        old.node = Node {
                            raw,
                            at: entry.node.at,
                        };
                    }
                },
                None => self.0.push(entry),
            }
        }
    }

    fn is_another_than(&self, below: &Table) -> bool {
        ["kind", "method"].iter().any(|key| {
            let shown = |t: &Table| t.get(key).map(|n| n.raw.show());
            shown(self).is_some_and(|own| shown(below).as_ref() != Some(&own))
        })
    }
}

/// Parses a text. Every syntax error becomes a problem; then there is no tree.
pub fn parse(source: Source, diagnostics: &mut Diagnostics) -> Option<Table> {
    let text = source.text.clone();
    let number = diagnostics.sources.add(source);
    let (document, errors) = DeTable::parse_recoverable(&text);
    for error in &errors {
        let at = At {
            source: number,
            offset: error.span().map_or(0, |s| s.start),
        };
        diagnostics.at(at, "", format!("not TOML: {}", error.message()), None);
    }
    errors
        .is_empty()
        .then(|| table(document.into_inner(), number))
}

fn table(raw: DeTable<'_>, source: usize) -> Table {
    let mut entries: Vec<Entry> = raw
        .into_iter()
        .map(|(key, value)| Entry {
            key_at: At {
                source,
                offset: key.span().start,
            },
            key: key.into_inner().into_owned(),
            node: node(value, source),
        })
        .collect();
    entries.sort_by_key(|e| e.key_at);
    Table(entries)
}

fn node(value: Spanned<DeValue<'_>>, source: usize) -> Node {
    let at = At {
        source,
        offset: value.span().start,
    };
    let raw = match value.into_inner() {
        DeValue::String(s) => Raw::Text(s.into_owned()),
        DeValue::Integer(i) => match i64::from_str_radix(i.as_str(), i.radix()) {
            Ok(v) => Raw::Int(v),
            Err(_) => Raw::Other(i.to_string()),
        },
        DeValue::Float(x) => match x.as_str().parse() {
            Ok(v) => Raw::Float(v),
            Err(_) => Raw::Other(x.to_string()),
        },
        DeValue::Boolean(b) => Raw::Bool(b),
        DeValue::Datetime(d) => Raw::Other(d.to_string()),
        DeValue::Array(items) => Raw::List(items.into_iter().map(|v| node(v, source)).collect()),
        DeValue::Table(t) => Raw::Table(table(t, source)),
    };
    Node { raw, at }
}

/// Reads a file and what it extends; the file's own keys lie on top of its base's.
pub fn read_file(path: &Path, diagnostics: &mut Diagnostics) -> Option<Table> {
    let mut chain = Vec::new();
    read_chain(path, None, &mut chain, diagnostics)
}

type Refusal = (String, Option<String>);

fn read_text(path: &Path) -> Result<String, Refusal> {
    let bytes = std::fs::read(path).map_err(|e| {
        let hint = "name an experiment's TOML file, e.g. experiments/quickstart.toml";
        let what = format!("can't read `{}`: {e}", path.display());
        (what, Some(hint.to_owned()))
    })?;
    String::from_utf8(bytes).map_err(|_| (format!("`{}` is not UTF-8 text", path.display()), None))
}

fn read_chain(
    path: &Path,
    named_at: Option<At>,
    chain: &mut Vec<std::path::PathBuf>,
    diagnostics: &mut Diagnostics,
) -> Option<Table> {
    let mut complain = |what: String, hint: Option<String>| match named_at {
        Some(at) => diagnostics.at(at, "extends", what, hint),
        None => diagnostics.anywhere("", what, hint),
    };
    let text = match read_text(path) {
        Ok(text) => text,
        Err((what, hint)) => {
            complain(what, hint);
            return None;
        }
    };
    let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if chain.contains(&real) {
        let names: Vec<_> = chain.iter().map(|p| p.display().to_string()).collect();
        complain(
            format!(
                "`{}` extends itself by way of {}",
                path.display(),
                names.join(" -> ")
            ),
            Some("remove one `extends`".into()),
        );
        return None;
    }
    chain.push(real);
    let source = Source {
        kind: SourceKind::Text,
        name: path.display().to_string(),
        path: Some(path.to_owned()),
        text,
    };
    let mut own = parse(source, diagnostics)?;
    let Some(extends) = own.remove("extends") else {
        return Some(own);
    };
    let Raw::Text(base) = &extends.node.raw else {
        let what = format!("is {}, must be a file's name", extends.node.raw.show());
        diagnostics.at(extends.node.at, "extends", what, None);
        return Some(own);
    };
    let base = path.parent().unwrap_or(Path::new("")).join(base);
    let mut below = read_chain(&base, Some(extends.node.at), chain, diagnostics)?;
    // A name is the folder of its results: two experiments must not share one by accident.
    below.remove("name");
    below.overlay(own);
    Some(below)
}

/// Lays one override, `key.path=value`, on a tree. The value is TOML; a bare word is taken as a string.
pub fn apply_override(tree: &mut Table, text: &str, diagnostics: &mut Diagnostics) {
    let source = Source {
        kind: SourceKind::Override,
        name: format!("-s {text}"),
        path: None,
        text: text.to_owned(),
    };
    let source = diagnostics.sources.add(source);
    let start = At { source, offset: 0 };
    let Some((path, value)) = text.split_once('=') else {
        let hint = Some("write -s key.path=value, e.g. -s strategy.0.tail=16".to_owned());
        return diagnostics.at(start, "", "has no `=`", hint);
    };
    let at = At {
        source,
        offset: path.len() + 1,
    };
    let value = value.trim();
    let mut node = match DeValue::parse(value) {
        Ok(v) => node(v, source),
        Err(_) => Node {
            raw: Raw::Text(value.to_owned()),
            at,
        },
    };
    place_at(&mut node, at);
    let keys: Vec<&str> = path.split('.').map(str::trim).collect();
    if let Err((what, hint)) = set_path(tree, &keys, start, node) {
        diagnostics.at(start, path.trim(), what, hint);
    }
}

fn place_at(node: &mut Node, at: At) {
    node.at = at;
    match &mut node.raw {
        Raw::List(items) => items.iter_mut().for_each(|n| place_at(n, at)),
        Raw::Table(t) => {
            for e in &mut t.0 {
                e.key_at = at;
                place_at(&mut e.node, at);
            }
        }
        _ => {}
    }
}

fn set_path(table: &mut Table, keys: &[&str], at: At, value: Node) -> Result<(), Refusal> {
    let (key, rest) = match keys {
        [] | [""] => return Err(("has no key before `=`".into(), None)),
        [key, rest @ ..] => (*key, rest),
    };
    let entry = |node| Entry {
        key: key.to_owned(),
        key_at: at,
        node,
    };
    if rest.is_empty() {
        table.set(entry(value));
        return Ok(());
    }
    if table.get(key).is_none() {
        table.set(entry(Node {
            raw: Raw::Table(Table::default()),
            at,
        }));
    }
    let Some(below) = table.0.iter_mut().find(|e| e.key == key) else {
        return Err((format!("no key `{key}`"), None));
    };
    match &mut below.node.raw {
        Raw::Table(t) => set_path(t, rest, at, value),
        Raw::List(items) => set_item(items, key, rest, at, value),
        other => Err((
            format!("`{key}` is {}, it has no keys of its own", other.show()),
            None,
        )),
    }
}

fn set_item(
    items: &mut [Node],
    key: &str,
    rest: &[&str],
    at: At,
    value: Node,
) -> Result<(), Refusal> {
    let n = items.len();
    let Some(item) = rest[0].parse().ok().and_then(|i: usize| items.get_mut(i)) else {
        return Err((
            format!(
                "`{key}` is a list of {n}, its items are numbered from 0; got `{}`",
                rest[0]
            ),
            Some(format!("write {key}.0 to {key}.{}", n.saturating_sub(1))),
        ));
    };
    if rest.len() == 1 {
        *item = value;
        return Ok(());
    }
    match &mut item.raw {
        Raw::Table(t) => set_path(t, &rest[1..], at, value),
        other => Err((
            format!(
                "`{key}.{}` is {}, it has no keys of its own",
                rest[0],
                other.show()
            ),
            None,
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(text: &str) -> (Option<Table>, Diagnostics) {
        let mut diagnostics = Diagnostics::default();
        let source = Source {
            kind: SourceKind::Text,
            name: "t.toml".into(),
            path: None,
            text: text.into(),
        };
        (parse(source, &mut diagnostics), diagnostics)
    }

    #[test]
    fn entries_keep_the_file_order_and_numbers_their_value() {
        let (t, d) = tree(
            "z = 1_000\na = -2\n[m]\nx = 0x10\n[c]\ny = +1e3\nd = 1979-05-27\nbig = 99999999999999999999",
        );
        assert!(d.is_clean(), "{}", d.into_problems());
        let t = t.unwrap();
        let keys: Vec<_> = t.0.iter().map(|e| e.key.as_str()).collect();
        assert_eq!(keys, ["z", "a", "m", "c"]);
        assert!(matches!(t.get("z").unwrap().raw, Raw::Int(1000)));
        assert!(matches!(t.get("a").unwrap().raw, Raw::Int(-2)));
        let Raw::Table(c) = &t.get("c").unwrap().raw else {
            panic!("c is a table")
        };
        assert!(matches!(c.get("y").unwrap().raw, Raw::Float(1000.0)));
        assert!(matches!(c.get("d").unwrap().raw, Raw::Other(_)));
        assert!(matches!(c.get("big").unwrap().raw, Raw::Other(_)));
    }

    #[test]
    fn all_syntax_errors_are_told() {
        let (t, d) = tree("a = \nb = 2\nc = [1,,2]\n");
        assert!(t.is_none());
        let text = d.into_problems().to_string();
        assert!(text.contains("t.toml:1:"), "{text}");
        assert!(text.contains("t.toml:3:"), "{text}");
    }

    #[test]
    fn overrides_reach_into_lists_and_make_tables() {
        let (t, mut d) = tree("a = 1\n[[strategy]]\ntail = 0\n");
        let mut t = t.unwrap();
        for s in [
            "strategy.0.tail=[0, 16]",
            "model=smollm2-135m-instruct",
            "protocol.kind=\"stream\"",
        ] {
            apply_override(&mut t, s, &mut d);
        }
        assert!(d.is_clean());
        let Raw::List(items) = &t.get("strategy").unwrap().raw else {
            panic!("a list")
        };
        let Raw::Table(s) = &items[0].raw else {
            panic!("a table")
        };
        assert_eq!(s.get("tail").unwrap().raw.show(), "a list of 2");
        assert_eq!(
            t.get("model").unwrap().raw.show(),
            "\"smollm2-135m-instruct\""
        );
        for s in [
            "strategy.1.tail=3",
            "a.b=1",
            "novalue",
            "=1",
            "strategy.0.tail.x=1",
            "strategy.0.tail.0.x=1",
        ] {
            apply_override(&mut t, s, &mut d);
        }
        let text = d.into_problems().to_string();
        assert_eq!(text.lines().count(), 7, "{text}");
        assert!(text.contains("numbered from 0; got `1`"), "{text}");
    }
}
