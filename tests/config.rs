//! Experiments as users write them: what is refused and in which words, sweeps, `extends`, overrides, cells.

use kvlab::config::{Plan, parse};

/// The shortest sound experiment; tests put more behind it.
const HEAD: &str = "schema = 1\nmodel = \"smollm2-135m-instruct\"\n[data]\nsets = [\"quickstart-prose\"]\n\
                    [protocol]\nkind = \"compress-once\"\n";

fn plan(body: &str) -> Plan {
    parse("t.toml", &format!("{HEAD}{body}"), &[]).unwrap_or_else(|e| panic!("{e}"))
}

fn refused(body: &str) -> String {
    let text = format!("{HEAD}{body}");
    parse("t.toml", &text, &[])
        .expect_err("refused")
        .to_string()
}

fn labels(plan: &Plan) -> Vec<&str> {
    plan.strategies.iter().map(|s| s.label.as_str()).collect()
}

const TWELVE_FAULTS: &str = r#"schema = 2
modle = "smollm2-135m-instruct"
threads = 0

[data]
sets = ["quickstart-prse", "wikitext2-valid"]

[protocol]
kind = "compress-once"
context = "1k"
windows = 8
continuation = "exakt"

[calibration]
set = "wikitext2-test"

[[strategy]]
encode = "q40"
tail = -1

[[strategy]]
preset = "q4-hadamard"

[[strategy]]
encode = { k = "q8_0" }
compression_ratio = 0.25
keys = "prerope"
"#;

#[test]
fn everything_wrong_is_told_at_once() {
    let problems = parse("bad.toml", TWELVE_FAULTS, &[]).expect_err("refused");
    insta::assert_snapshot!(problems.to_string());
}

#[test]
fn sweeps_multiply_and_label_themselves() {
    let p = plan("[[strategy]]\nencode = [\"q8_0\", \"q4_0\"]\ntail = [0, 32]\n");
    assert_eq!(labels(&p), ["q8_0", "q8_0 tail 32", "q4_0", "q4_0 tail 32"]);
    let p = plan("[[strategy]]\nlabel = \"mine\"\nencode = \"q8_0\"\ntail = [0, 32]\n");
    assert_eq!(labels(&p), ["mine tail=0", "mine tail=32"]);
    let p = plan("[[strategy]]\npreset = [\"k8v4\", \"q4_0-tail\"]\ntail = 16\n");
    assert_eq!(labels(&p), ["k8v4 tail 16", "q4_0-tail tail 16"]);
    assert_eq!(p.strategies[1].sinks, 4);
}

#[test]
fn twins_are_refused_with_both_places() {
    let text = refused(
        "[[strategy]]\nencode = \"q8_0\"\n[[strategy]]\nlabel = \"b\"\nencode = \"q8_0\"\n",
    );
    assert!(
        text.contains(
            "t.toml:10:1: strategy: \"b\" is the same strategy as \"q8_0\" at t.toml:8:1"
        ),
        "{text}"
    );
}
