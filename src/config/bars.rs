//! From `[[bar]]` tables to bars: what an experiment says it must show.
//!
//! Invariant: a bar that is accepted belongs to a strategy, a text or domain and a protocol that the experiment has. With
//! settings changed on the command line, the bars of a file that belong to nothing any more are left out.

use super::problems::{Diagnostics, SourceKind, did_you_mean};
use super::protocol::Protocol;
use super::raw::{Node, Raw};
use super::read::{Reader, quoted};
use super::strategies::Resolved;
use crate::cache::Continuation;
use crate::data::DataRef;
use crate::eval::bars::{Bar, Bound, METRICS, Metric};

const KEYS: &[&str] = &[
    "strategy",
    "metric",
    "at_most",
    "at_least",
    "times",
    "data",
    "domain",
    "protocol",
    "continuation",
    "context",
    "window",
];

/// What bars may refer to.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    /// The strategies.
    pub strategies: &'a [Resolved],
    /// The texts.
    pub data: &'a [DataRef],
    /// The protocols.
    pub protocols: &'a [Protocol],
}

/// All bars of an experiment, one per strategy that each table names.
pub fn resolve(node: &Node, known: Known<'_>, diagnostics: &mut Diagnostics) -> Vec<Bar> {
    let Raw::List(items) = &node.raw else {
        let what = format!("is {}, must be tables: [[bar]]", node.raw.show());
        diagnostics.at(node.at, "bar", what, None);
        return Vec::new();
    };
    let mut bars = Vec::new();
    for (i, item) in items.iter().enumerate() {
        let path = format!("bar.{i}");
        let Raw::Table(table) = &item.raw else {
            let what = format!("is {}, must be a table: [[bar]]", item.raw.show());
            diagnostics.at(item.at, &path, what, None);
            continue;
        };
        let mut reader = Reader {
            table,
            path,
            at: table.0.first().map_or(item.at, |e| e.key_at),
            diagnostics,
        };
        reader.only(KEYS);
        bars.extend(one(&mut reader, known));
    }
    bars
}

fn one(reader: &mut Reader<'_, '_>, known: Known<'_>) -> Vec<Bar> {
    let metric = reader.choice("metric", METRICS);
    if reader.get("metric").is_none() {
        reader.missing(
            "metric",
            "write metric = \"kld\", a column by its name in JSON",
        );
    }
    let bound = bound(reader);
    if let (Some(metric), Some(bound)) = (metric, bound) {
        fits(reader, metric, bound);
    }
    let before = reader.diagnostics.count();
    let all = strategies(reader, "strategy", known.strategies);
    if reader.get("strategy").is_none() {
        reader.missing("strategy", "name a strategy by its label or preset");
    }
    let times = strategies(reader, "times", known.strategies);
    if let (Some(node), 2..) = (reader.get("times"), times.len()) {
        reader.wrong(node, "times", "one label of this experiment");
    }
    let domains: Vec<&str> = known.data.iter().map(domain_of).collect();
    let data = named(
        reader,
        "data",
        &known
            .data
            .iter()
            .map(|d| d.name.as_str())
            .collect::<Vec<_>>(),
    );
    let domain = named(reader, "domain", &domains);
    let place = Place::read(reader, known.protocols);
    let sources = &reader.diagnostics.sources;
    let is_of_file = sources.get(reader.at).kind != SourceKind::Override;
    if reader.diagnostics.count() > before && sources.has_override() && is_of_file {
        reader.diagnostics.forget_since(before);
        return Vec::new();
    }
    let (Some(metric), Some(bound)) = (metric, bound) else {
        return Vec::new();
    };
    all.into_iter()
        .map(|strategy| Bar {
            strategy,
            metric,
            bound,
            times: times.first().cloned(),
            data: data.clone(),
            domain: domain.clone(),
            protocol: place.protocol.clone(),
            continuation: place.continuation,
            n_tokens: place.n_tokens,
        })
        .collect()
}

/// A text's domain as its records name it.
fn domain_of(data: &DataRef) -> &str {
    data.domain.as_deref().unwrap_or("own")
}

/// Labels of the strategies that a key of a bar names, by label or by preset.
fn strategies(reader: &mut Reader<'_, '_>, key: &str, known: &[Resolved]) -> Vec<String> {
    let nodes: Vec<&Node> = match reader.get(key).map(|n| (n, &n.raw)) {
        None => Vec::new(),
        Some((_, Raw::List(items))) => items.iter().collect(),
        Some((node, _)) => vec![node],
    };
    let mut found = Vec::new();
    for node in nodes {
        let Raw::Text(name) = &node.raw else {
            reader.wrong(
                node,
                key,
                "a label or preset of this experiment, or a list of them",
            );
            continue;
        };
        let by = |is: &dyn Fn(&Resolved) -> bool| -> Vec<String> {
            let those = known.iter().filter(|r| is(r));
            those.map(|r| r.strategy.label.clone()).collect()
        };
        let by_label = by(&|r| r.strategy.label == *name);
        let by_preset = by(&|r| r.preset.as_deref() == Some(name));
        match (by_label.is_empty(), by_preset.is_empty()) {
            (false, _) => found.extend(by_label),
            (true, false) => found.extend(by_preset),
            (true, true) => {
                let labels: Vec<&str> = known.iter().map(|r| r.strategy.label.as_str()).collect();
                let what = format!("no strategy here is called \"{name}\"");
                let hint = did_you_mean(name, labels.iter().copied())
                    .unwrap_or_else(|| format!("there are: {}", quoted(&labels)));
                let key = reader.key(key);
                reader.diagnostics.at(node.at, &key, what, Some(hint));
            }
        }
    }
    found
}

fn bound(reader: &mut Reader<'_, '_>) -> Option<Bound> {
    let (most, least) = (number(reader, "at_most"), number(reader, "at_least"));
    let given = |key| reader.table.get(key).is_some();
    match (given("at_most"), given("at_least")) {
        (true, false) => most.map(Bound::AtMost),
        (false, true) => least.map(Bound::AtLeast),
        (false, false) => {
            reader.missing("at_most", "write at_most or at_least with a number");
            None
        }
        (true, true) => {
            let (key, at) = (reader.key("at_least"), reader.at);
            let hint = Some("write two bars".to_owned());
            reader
                .diagnostics
                .at(at, &key, "stands beside `at_most`", hint);
            None
        }
    }
}

/// Refuses a percentage where the metric is a fraction: the bar could never be met.
fn fits(reader: &mut Reader<'_, '_>, metric: Metric, bound: Bound) {
    let key = match bound {
        Bound::AtMost(_) => "at_most",
        Bound::AtLeast(_) => "at_least",
    };
    let is_fraction = (0.0..=1.0).contains(&bound.value());
    if let (Metric::SameTop, false, Some(node)) = (metric, is_fraction, reader.get(key)) {
        reader.wrong(
            node,
            key,
            "from 0 to 1: same_top is a fraction of the tokens",
        );
    }
}

fn number(reader: &mut Reader<'_, '_>, key: &str) -> Option<f64> {
    let node = reader.get(key)?;
    match node.raw {
        Raw::Float(v) if v.is_finite() => Some(v),
        Raw::Int(v) => Some(v as f64),
        _ => {
            reader.wrong(node, key, "a finite number");
            None
        }
    }
}

/// One of the names that the experiment has.
fn named(reader: &mut Reader<'_, '_>, key: &str, names: &[&str]) -> Option<String> {
    let mut words: Vec<(&str, &str)> = Vec::new();
    for name in names {
        if !words.contains(&(*name, *name)) {
            words.push((name, name));
        }
    }
    reader.choice(key, &words).map(str::to_owned)
}

/// The protocols that a bar is about.
#[derive(Debug, Default)]
struct Place {
    protocol: Option<String>,
    continuation: Option<Continuation>,
    n_tokens: Option<usize>,
}

impl Place {
    fn read(reader: &mut Reader<'_, '_>, protocols: &[Protocol]) -> Self {
        let kinds: Vec<&str> = protocols.iter().map(Protocol::kind).collect();
        let continuations = [
            ("strategy", Continuation::Strategy),
            ("exact", Continuation::Exact),
        ];
        let context = reader.count("context", 1..=i64::MAX);
        let place = Self {
            protocol: named(reader, "protocol", &kinds),
            continuation: reader.choice("continuation", &continuations),
            n_tokens: context.or(reader.count("window", 1..=i64::MAX)),
        };
        if !protocols.is_empty() && !protocols.iter().any(|p| place.admits(p)) {
            let there: Vec<String> = protocols.iter().map(describe).collect();
            // The first key that says which protocol, else the table.
            let at = ["protocol", "continuation", "context", "window"]
                .iter()
                .find_map(|key| reader.table.entry(key))
                .map_or(reader.at, |e| e.node.at);
            let key = reader.path.clone();
            let hint = Some(format!("there are: {}", there.join("; ")));
            let what = "belongs to no protocol of this experiment";
            reader.diagnostics.at(at, &key, what, hint);
        }
        place
    }

    fn admits(&self, protocol: &Protocol) -> bool {
        let n_tokens = match protocol {
            Protocol::Stream { window, .. } => *window,
            Protocol::CompressOnce { context, .. } | Protocol::Generate { context, .. } => *context,
            Protocol::Tasks { length, .. } => *length,
        };
        self.protocol
            .as_deref()
            .is_none_or(|kind| kind == protocol.kind())
            && self
                .continuation
                .is_none_or(|c| c == protocol.continuation())
            && self.n_tokens.is_none_or(|n| n == n_tokens)
    }
}

fn describe(protocol: &Protocol) -> String {
    match protocol {
        Protocol::Stream { window, .. } => format!("stream, window {window}"),
        Protocol::CompressOnce { context, .. } => {
            let continuation = format!("{:?}", protocol.continuation()).to_lowercase();
            format!("compress-once, context {context}, continuation {continuation}")
        }
        Protocol::Generate {
            context, tokens, ..
        } => format!("generate, context {context}, {tokens} tokens"),
        Protocol::Tasks { shots, length, .. } => {
            let continuation = format!("{:?}", protocol.continuation()).to_lowercase();
            format!("tasks, {shots} shots, length {length}, continuation {continuation}")
        }
    }
}
