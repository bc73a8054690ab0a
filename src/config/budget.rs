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
    if items.is_empty() || items.len() > MAX_THEN {
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

#[cfg(test)]
mod tests {
    use super::super::{ModelLimits, Plan, parse};
    use super::*;
    use crate::model::WeightSource;
    use crate::model::geometry::geometry;
    use crate::model::tiny::{TinyConfig, TinyModel};

    fn read(strategy: &str) -> Result<Plan, String> {
        let text = format!(
            "schema = 1\nmodel = \"smollm2-135m-instruct\"\n[data]\nsets = [\"quickstart-prose\"]\n[protocol]\n\
             kind = \"stream\"\nwindow = 400\nwindows = 1\nlatency = {{ steps = 0 }}\n[[strategy]]\n{strategy}\n"
        );
        parse("t.toml", &text, &[]).map_err(|e| e.to_string())
    }

    #[test]
    fn a_budget_is_read_and_named() {
        let plan = read(
            "encode = \"q8_0\"\nsinks = 2\nbudget = { bytes = 300_000, scope = \"all\", then = [\"q4_0\", { k = \"q4_0\", \
             v = \"nvfp4\" }], grow = [{ at = 100, bytes = 400_000 }] }",
        )
        .unwrap();
        let strategy = &plan.strategies[0];
        let budget = strategy.budget.as_ref().unwrap();
        assert_eq!(budget.scope, Scope::All);
        assert_eq!((budget.at(99), budget.at(100)), (300_000, 400_000));
        let levels: Vec<String> = strategy
            .levels()
            .map(|(k, v)| format!("{}/{}", k.name, v.name))
            .collect();
        assert_eq!(levels, ["q8_0/q8_0", "q4_0/q4_0", "q4_0/nvfp4"]);
        assert_eq!(
            strategy.label,
            "q8_0 sinks 2 then q4_0 then q4_0/nvfp4 in 300000 B, 400000 B from 100 (all sequences)"
        );
    }

    #[test]
    fn what_is_wrong_with_a_budget_is_told_at_once() {
        let text = read(
            "encode = \"q8_0\"\nretain = \"window\"\nbudget = { byte = 3, scope = \"each\", then = [\"q4\"], grow = [{ at = 9 \
             }, { at = 8, bytes = 1 }] }",
        )
        .unwrap_err();
        for part in [
            "budget.byte: unknown key",
            "must be one of \"sequence\", \"all\"",
            "no encode stage is called \"q4\"",
            "budget.grow.bytes: is missing",
            "can't go with `budget`",
        ] {
            assert!(text.contains(part), "no `{part}` in:\n{text}");
        }
        for none in ["", "bytes = 5", "bytes = 5, then = []"] {
            let text = read(&format!("encode = \"q8_0\"\nbudget = {{ {none} }}")).unwrap_err();
            assert!(text.contains("has 0 formats, must have 1 to 3"), "{text}");
        }
    }

    #[test]
    fn a_budget_that_can_t_hold_the_context_is_refused_with_what_it_takes() {
        let model = TinyModel::new(&TinyConfig::default());
        let geometry = geometry(model.spec(), 512);
        let limits = ModelLimits {
            name: "tiny",
            sha256: "",
            context_length: 512,
            geometry: &geometry,
        };
        let check = |bytes: u64, rest: &str| {
            let strategy = format!(
                "encode = \"q8_0\"\n{rest}\nbudget = {{ bytes = {bytes}, then = [\"q4_0\"] }}"
            );
            let plan = read(&strategy).unwrap();
            plan.check_model(&limits).map_err(|e| e.to_string())
        };
        let text = check(20_000, "").unwrap_err();
        assert!(text.contains("20000 bytes can't hold the 400 tokens of a sequence, which take"));
        assert!(text.contains("t.toml:"), "{text}");
        let words: Vec<&str> = text.split_whitespace().collect();
        let take = words.iter().position(|w| *w == "take").unwrap();
        let least: u64 = words[take + 1].parse().unwrap();
        assert!(check(least, "").is_ok());
        assert!(check(least - 1, "").is_err());
        let text = check(20_000, "tail = 100\nsinks = 4").unwrap_err();
        assert!(
            text.contains("can't hold 104 sinks and newest rows"),
            "{text}"
        );
    }
}
