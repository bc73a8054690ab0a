//! Sweeps: a list where one value is expected stands for one variant per item; several lists give their Cartesian
//! product.
//!
//! Order: as in the file, the first list changes slowest. `project` takes a list as it stands (maps in order), so its
//! alternatives, and those of any other key, may also be given in a table: `sweep = { project = [[], ["hadamard"]] }`.

use super::problems::Diagnostics;
use super::raw::{Entry, Node, Raw, Table};

/// Variants that one table may stand for; beyond it a sweep is surely a slip.
pub const MAX_VARIANTS: usize = 512;

/// One combination of a swept table.
#[derive(Debug, Clone, Default)]
pub struct Variant {
    /// The table with one value per key.
    pub table: Table,
    /// The keys that vary with their values, in order, as (key, value).
    pub varied: Vec<(String, String)>,
}

/// All variants of a table. `path` names the table in messages.
pub fn expand(table: &Table, path: &str, diagnostics: &mut Diagnostics) -> Vec<Variant> {
    let mut variants = vec![Variant::default()];
    for entry in &table.0 {
        let axes = match (&entry.key[..], &entry.node.raw) {
            ("sweep", Raw::Table(sweep)) => sweep_table(table, sweep, path, diagnostics),
            _ => vec![(
                entry,
                alternatives(&entry.node, &entry.key, path, diagnostics),
            )],
        };
        for (entry, choices) in axes {
            if variants.len() * choices.len() > MAX_VARIANTS {
                let what = format!("the sweep has more than {MAX_VARIANTS} combinations");
                diagnostics.at(entry.key_at, path, what, Some("sweep fewer values".into()));
                return Vec::new();
            }
            variants = product(&variants, entry, &choices);
        }
    }
    variants
}

/// One value of a key, and what varied in it.
type Choice = (Node, Vec<(String, String)>);

fn product(variants: &[Variant], entry: &Entry, choices: &[Choice]) -> Vec<Variant> {
    let mut out = Vec::with_capacity(variants.len() * choices.len());
    for variant in variants {
        for (node, varied) in choices {
            let mut next = variant.clone();
            next.table.0.push(Entry {
                key: entry.key.clone(),
                key_at: entry.key_at,
                node: node.clone(),
            });
            next.varied.extend(varied.iter().cloned());
            out.push(next);
        }
    }
    out
}

/// The axes of an explicit `sweep` table.
fn sweep_table<'a>(
    table: &Table,
    sweep: &'a Table,
    path: &str,
    diagnostics: &mut Diagnostics,
) -> Vec<(&'a Entry, Vec<Choice>)> {
    let mut axes = Vec::new();
    for entry in &sweep.0 {
        let key = format!("{path}.sweep.{}", entry.key);
        if table.entry(&entry.key).is_some() {
            let what = "the key stands beside `sweep` too";
            diagnostics.at(entry.key_at, &key, what, Some("give it once".into()));
            continue;
        }
        let Raw::List(items) = &entry.node.raw else {
            let what = format!("is {}, must be a list of values", entry.node.raw.show());
            diagnostics.at(entry.node.at, &key, what, None);
            continue;
        };
        if items.is_empty() {
            diagnostics.at(entry.node.at, &key, "is an empty list", None);
            continue;
        }
        let mut choices = Vec::new();
        for item in items {
            for (node, mut varied) in alternatives(item, &entry.key, path, diagnostics) {
                varied.insert(0, (short(&entry.key), brief(item)));
                choices.push((node, varied));
            }
        }
        axes.push((entry, choices));
    }
    axes
}

/// The values that a key's node stands for. `key` is dotted within the table.
fn alternatives(node: &Node, key: &str, path: &str, diagnostics: &mut Diagnostics) -> Vec<Choice> {
    match &node.raw {
        Raw::Table(table) => product_of(
            table.0.iter().map(|e| {
                let below = format!("{key}.{}", e.key);
                alternatives(&e.node, &below, path, diagnostics)
            }),
            |nodes| {
                let entries = table.0.iter().zip(nodes).map(|(e, node)| Entry {
                    key: e.key.clone(),
                    key_at: e.key_at,
                    node,
                });
                Raw::Table(Table(entries.collect()))
            },
            node,
        ),
        Raw::List(items) if is_ordered_list(key) => product_of(
            items
                .iter()
                .map(|item| alternatives(item, &format!("{key}[]"), path, diagnostics)),
            Raw::List,
            node,
        ),
        Raw::List(items) => swept(items, node, key, path, diagnostics),
        _ => vec![(node.clone(), Vec::new())],
    }
}

/// Keys whose list is a value: maps of rows, applied in order; what a budget does one after the other.
fn is_ordered_list(key: &str) -> bool {
    matches!(
        key,
        "project" | "project.k" | "project.v" | "budget.then" | "budget.grow"
    )
}

fn swept(
    items: &[Node],
    node: &Node,
    key: &str,
    path: &str,
    diagnostics: &mut Diagnostics,
) -> Vec<Choice> {
    if items.is_empty() {
        let what = "is an empty list: a list here is a sweep";
        diagnostics.at(node.at, &format!("{path}.{key}"), what, None);
        return vec![(node.clone(), Vec::new())];
    }
    let mut choices = Vec::new();
    for item in items {
        if matches!(item.raw, Raw::List(_)) {
            let what = "is a list in a list";
            diagnostics.at(item.at, &format!("{path}.{key}"), what, None);
            continue;
        }
        for (node, mut varied) in alternatives(item, key, path, diagnostics) {
            varied.insert(0, (short(key), brief(item)));
            choices.push((node, varied));
        }
    }
    choices
}

fn product_of(
    parts: impl Iterator<Item = Vec<Choice>>,
    build: impl Fn(Vec<Node>) -> Raw,
    node: &Node,
) -> Vec<Choice> {
    let mut out = vec![(Vec::new(), Vec::new())];
    for choices in parts {
        // Past the limit `expand` refuses the table anyway: don't build what it throws away.
        let keep = (2 * MAX_VARIANTS / out.len().max(1)).max(1);
        out = out
            .iter()
            .flat_map(|(nodes, varied)| {
                choices.iter().take(keep).map(move |(node, more)| {
                    let mut nodes = nodes.clone();
                    nodes.push(node.clone());
                    let varied = varied.iter().chain(more).cloned().collect();
                    (nodes, varied)
                })
            })
            .collect();
    }
    out.into_iter()
        .map(|(nodes, varied)| {
            let raw = build(nodes);
            (Node { raw, at: node.at }, varied)
        })
        .collect()
}

/// The last word of a dotted key; `k` and `v` alone would say too little.
fn short(key: &str) -> String {
    match key.rsplit_once('.') {
        Some((_, "k" | "v")) | None => key.to_owned(),
        Some((_, last)) => last.to_owned(),
    }
}

/// A value as labels show it.
fn brief(node: &Node) -> String {
    match &node.raw {
        Raw::Text(s) => s.clone(),
        Raw::List(items) if items.is_empty() => "none".to_owned(),
        Raw::List(items) => items.iter().map(brief).collect::<Vec<_>>().join("+"),
        Raw::Table(table) => {
            let method = table.get("method").map(brief).unwrap_or_default();
            let rest: Vec<_> = table
                .0
                .iter()
                .filter(|e| e.key != "method")
                .map(|e| format!("{}={}", e.key, brief(&e.node)))
                .collect();
            match (&method[..], rest.is_empty()) {
                (_, true) => method,
                ("", _) => rest.join(" "),
                _ => format!("{method}({})", rest.join(" ")),
            }
        }
        other => other.show(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::problems::{Source, SourceKind};
    use super::super::raw::parse;
    use super::*;

    fn variants(text: &str) -> (Vec<Vec<String>>, String) {
        let mut d = Diagnostics::default();
        let source = Source {
            kind: SourceKind::Text,
            name: "t".into(),
            path: None,
            text: text.into(),
        };
        let table = parse(source, &mut d).expect("valid TOML");
        let found = expand(&table, "strategy.0", &mut d)
            .into_iter()
            .map(|v| v.varied.iter().map(|(k, v)| format!("{k}={v}")).collect())
            .collect();
        (found, d.into_problems().to_string())
    }

    #[test]
    fn lists_multiply_in_file_order() {
        let (v, _) = variants("encode = [\"q8_0\", \"q4_0\"]\ntail = [0, 32]");
        assert_eq!(
            v,
            [
                ["encode=q8_0", "tail=0"],
                ["encode=q8_0", "tail=32"],
                ["encode=q4_0", "tail=0"],
                ["encode=q4_0", "tail=32"]
            ]
        );
    }

    #[test]
    fn nested_lists_and_sides_are_named() {
        let (v, _) = variants(
            "encode = { k = [\"q8_0\", \"q4_0\"], v = \"q4_0\" }\nretain = { method = \"window\", recent = [8, 16] }",
        );
        assert_eq!(v.len(), 4);
        assert_eq!(v[3], ["encode.k=q4_0", "recent=16"]);
    }

    #[test]
    fn project_is_a_value_and_its_alternatives_go_in_the_sweep_table() {
        let (v, _) = variants("project = [\"hadamard\", { method = \"svd\", rank = [8, 16] }]");
        assert_eq!(v, [["rank=8"], ["rank=16"]]);
        let (v, _) =
            variants("tail = 1\nsweep = { project = [[], \"hadamard\", [\"hadamard\", \"svd\"]] }");
        assert_eq!(
            v,
            [
                ["project=none"],
                ["project=hadamard"],
                ["project=hadamard+svd"]
            ]
        );
    }

    #[test]
    fn slips_are_told() {
        let (_, p) = variants(
            "tail = []\nsinks = [[1]]\nencode = \"f16\"\nsweep = { encode = [\"f32\"], keys = 3, exact = [] }",
        );
        for part in [
            "empty list: a list here is a sweep",
            "a list in a list",
            "beside `sweep` too",
            "must be a list of values",
            "is an empty list",
        ] {
            assert!(p.contains(part), "{part} not in {p}");
        }
        let many: Vec<String> = (0..30).map(|i| i.to_string()).collect();
        let list = many.join(",");
        let (v, p) = variants(&format!("tail = [{list}]\nsinks = [{list}]"));
        assert!(v.is_empty());
        assert!(p.contains("more than 512"), "{p}");
    }
}
