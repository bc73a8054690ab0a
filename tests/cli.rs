//! The program as a user runs it: exit codes, one line for an error, lists that other programs can read.

use std::path::Path;

use assert_cmd::Command;
use serde_json::Value;

fn kvlab(args: &[&str]) -> (i32, String, String) {
    let home = tempfile::tempdir().expect("a temporary folder");
    let output = Command::cargo_bin("kvlab")
        .expect("the program is built")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("KVLAB_HOME", home.path())
        .env_remove("KVLAB_DATA")
        .args(args)
        .output()
        .expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    (
        output.status.code().unwrap_or(-1),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn an_unsound_experiment_is_refused_with_code_2_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bad.toml");
    std::fs::write(&file, "schema = 1\nmodle = \"x\"\n").unwrap();
    for command in ["check", "plan"] {
        let (code, out, err) = kvlab(&[command, file.to_str().unwrap()]);
        assert_eq!(code, 2, "{err}");
        assert!(out.is_empty());
        assert!(
            err.contains("bad.toml:2:1: modle: unknown key; did you mean `model`?"),
            "{err}"
        );
        assert!(err.ends_with("problems: nothing was run\n"), "{err}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    let (code, _, err) = kvlab(&["check", "no-such.toml"]);
    assert_eq!(code, 2);
    assert!(err.contains("can't read `no-such.toml`"), "{err}");
}

#[test]
fn wrong_names_and_usage_are_code_2_and_one_line() {
    let (code, _, err) = kvlab(&["fetch", "gemma-3-270n"]);
    assert_eq!((code, err.lines().count()), (2, 1), "{err}");
    assert!(err.contains("did you mean `gemma-3-270m`?"), "{err}");
    assert_eq!(kvlab(&["chekc"]).0, 2);
}

#[test]
fn a_sound_experiment_without_its_model_is_planned_with_a_note() {
    let file = Path::new("experiments").join("quickstart.toml");
    let (code, out, err) = kvlab(&["check", file.to_str().unwrap()]);
    assert_eq!(code, 0, "{err}");
    assert!(
        out.contains("24 cells = 8 strategies x 1 protocol x 3 texts")
            && out.contains("note: model"),
        "{out}"
    );
    let (code, out, err) = kvlab(&["plan", file.to_str().unwrap(), "--json"]);
    assert_eq!(code, 0, "{err}");
    let json: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(json["plan"]["strategies"].as_array().map(Vec::len), Some(8));
    assert_eq!(json["model_sha256"], Value::Null);
}

#[test]
fn lists_are_complete_and_readable_by_programs() {
    let (code, out, _) = kvlab(&["list", "--json"]);
    assert_eq!(code, 0);
    let items: Vec<Value> = serde_json::from_str(&out).expect("JSON");
    for stage in kvlab::cache::stage::registry() {
        let found = items
            .iter()
            .any(|i| i["kind"] == stage.kind.key() && i["name"] == stage.name);
        assert!(found, "{} {}", stage.kind, stage.name);
    }
    let (_, out, _) = kvlab(&["list"]);
    for item in &items {
        assert!(out.contains(item["name"].as_str().unwrap()), "{item}");
    }
}

#[test]
fn a_text_of_the_program_is_fetched_from_itself() {
    let (code, out, _) = kvlab(&["fetch", "quickstart-prose"]);
    assert_eq!(code, 0);
    assert_eq!(
        out,
        "quickstart-prose: 31117 bytes from the program itself\n"
    );
}

#[test]
fn a_strategy_is_held_against_the_suite() {
    let keys = "encode = \"q4_0\", tail = 32";
    let (code, out, err) = kvlab(&[
        "check-strategy",
        keys,
        "--only",
        "oracle,bytes",
        "--seed",
        "7",
    ]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 3, "{out}");
    assert!(lines[0].contains(keys), "{out}");
    assert!(
        lines[1].trim_start().starts_with("oracle       ok"),
        "{out}"
    );
    let (code, out, _) = kvlab(&[
        "check-strategy",
        "streaming-llm",
        "--only",
        "short",
        "--json",
    ]);
    let records: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(
        (code, &records[0]["checks"][0]["status"]),
        (0, &Value::from("ok"))
    );
    assert!(
        records[0]["strategy"]
            .as_str()
            .unwrap()
            .contains("recent = 24")
    );
}

#[test]
fn what_can_t_be_checked_is_refused_with_code_2() {
    for (args, told) in [
        (&["q4"][..], "did you mean `q4_0`?"),
        (&["q4_0", "--only", "oracel"], "did you mean `oracle`?"),
        (&[], "--all"),
        (&["project = { method = \"svd\", rank = 500 }"], "rank"),
        (
            &[
                "retain = { method = \"gate\", file = \"experiments/artifacts/gate-smollm2-135m-instruct.safetensors\", kept_fraction = 0.5 }",
            ],
            "on the suite's own small layers (take file = \"random\")",
        ),
    ] {
        let (code, out, err) = kvlab(&[&["check-strategy"], args].concat());
        assert_eq!((code, out.as_str()), (2, ""), "{err}");
        assert!(err.contains(told), "{err}");
    }
}
