//! Reading a strategy's `budget`: bytes, whose, later changes, and the formats that pages are encoded to.
//!
//! ```toml
//! budget = { bytes = 6_000_000, then = ["int4", "int2"], grow = [{ at = 1024, bytes = 9_000_000 }] }
//! ```

use super::raw::{At, Node, Raw, Table};
use super::read::Reader;
use super::stages::encodings;
use crate::cache::strategy::{Budget, BudgetStep, Scope, StageSpec};

/// Levels of precision that a memory report can tell apart, less the first.
const MAX_THEN: usize = 3;

const MAX_BYTES: i64 = 1 << 50;

/// The budget of a `[[strategy]]`; `None` too if anything is wrong with it.
pub fn budget(reader: &mut Reader<'_, '_>) -> Option<Budget> {
    let (table, at) = reader.below("budget")?;
    let before = reader.diagnostics.count();
    let mut below = inner(reader, table, at, "budget");
    below.only(&["bytes", "scope", "then", "grow"]);
    let bytes = below.count("bytes", 1..=MAX_BYTES);
    if table.get("bytes").is_none() {
        below.missing("bytes", "write bytes = 6_000_000");
    }
    let scope = below.choice(
        "scope",
        &[("sequence", Scope::Sequence), ("all", Scope::All)],
    );
    let steps = grow(&mut below);
    let then = then(&mut below);
    let budget = Budget {
        bytes: bytes? as u64,
        scope: scope.unwrap_or_default(),
        steps,
        then,
    };
    (reader.diagnostics.count() == before).then_some(budget)
}

fn inner<'a, 'd>(
    reader: &'d mut Reader<'_, '_>,
    table: &'a Table,
    at: At,
    key: &str,
) -> Reader<'a, 'd> {
    Reader {
        path: reader.key(key),
        table,
        at,
        diagnostics: reader.diagnostics,
    }
}

fn list<'a>(reader: &mut Reader<'a, '_>, key: &str, of: &str) -> &'a [Node] {
    match reader.get(key) {
        None => &[],
        Some(node) => match &node.raw {
            Raw::List(items) => items,
            _ => {
                reader.wrong(node, key, &format!("a list of {of}"));
                &[]
            }
        },
    }
}

fn then(reader: &mut Reader<'_, '_>) -> Vec<(StageSpec, StageSpec)> {
    let items = list(reader, "then", "formats, of fewer and fewer bits");
    if reader.get("then").is_none() || items.len() > MAX_THEN {
        let what = format!("has {} formats, must have 1 to {MAX_THEN}", items.len());
        let hint = "name what pages are encoded to: then = [\"int4\", \"int2\"]".to_owned();
        let key = reader.key("then");
        reader.diagnostics.at(reader.at, &key, what, Some(hint));
    }
    let key = reader.key("then");
    let read = items
        .iter()
        .map(|item| encodings(item, &key, reader.diagnostics));
    read.flatten().collect()
}

fn grow(reader: &mut Reader<'_, '_>) -> Vec<BudgetStep> {
    let mut steps: Vec<BudgetStep> = Vec::new();
    for item in list(reader, "grow", "{ at = 1024, bytes = 9_000_000 }") {
        let Raw::Table(table) = &item.raw else {
            reader.wrong(item, "grow", "tables: { at = 1024, bytes = 9_000_000 }");
            continue;
        };
        let mut below = inner(reader, table, item.at, "grow");
        below.only(&["at", "bytes"]);
        let (at, bytes) = (
            below.count("at", 1..=1 << 24),
            below.count("bytes", 1..=MAX_BYTES),
        );
        for key in ["at", "bytes"] {
            if table.get(key).is_none() {
                below.missing(key, "write { at = 1024, bytes = 9_000_000 }");
            }
        }
        if let (Some(at), Some(bytes)) = (at, bytes) {
            if steps.last().is_some_and(|s| s.at >= at as u32) {
                let what = format!("is {at}, must be past the step before it");
                below.diagnostics.at(item.at, &below.key("at"), what, None);
            }
            steps.push(BudgetStep {
                at: at as u32,
                bytes: bytes as u64,
            });
        }
    }
    steps
}
