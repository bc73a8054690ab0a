//! Bad input: one line that says what to do, code 2, no results.

use std::fs;

use super::support::{Bench, Ran, ended, model_path};

const EXPERIMENT: &str = r#"
data = { sets = ["quickstart-prose"] }
protocol = { kind = "stream", window = 64, windows = 1, latency = { steps = 0 } }
[[strategy]]
encode = "f16"
"#;

/// The program refuses: code 2, nothing on standard output, no results, and an error that holds `words`.
fn assert_refused(bench: &Bench, ran: &Ran, words: &[&str]) {
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.out.is_empty(), "{ran:?}");
    assert!(!bench.path().join("results").exists(), "{ran:?}");
    for word in words {
        assert!(ran.err.contains(word), "no `{word}` in {}", ran.err);
    }
}

/// Runs with one changed setting; the error is one line.
fn refused_line(bench: &Bench, setting: &str, words: &[&str]) {
    let ran = bench.run("results", &["-s", setting]);
    assert_refused(bench, &ran, words);
    let lines: Vec<&str> = ran.err.lines().collect();
    // A problem of the experiment has a line, and the sum of all problems has one.
    let is_one = lines.len() == 1 || lines.len() == 2 && lines[1] == "1 problem: nothing was run";
    assert!(is_one, "{setting}: {lines:#?}");
}

#[test]
fn settings_that_make_no_sense_are_refused_before_a_model_is_looked_for() {
    let bench = Bench::new(EXPERIMENT);
    fs::write(bench.path().join("empty.txt"), "").unwrap();
    fs::write(bench.path().join("blank.txt"), " \n\n ").unwrap();
    for (setting, words) in [
        ("protocol.windwos = 2", &["did you mean `windows`?"][..]),
        ("strategy.0.pack = \"zst\"", &["there are: zstd"]),
        ("strategy.0.encode = \"q4_00\"", &["did you mean `q4_0`?"]),
        ("protocol.window = 1", &["is 1, must be", "from 2"]),
        ("protocol.windows = 0", &["is 0, must be", "from 1"]),
        ("strategy.0.tail = -3", &["is -3, must be"]),
        (
            "strategy.0.compression_ratio = 0.3",
            &["kept_fraction", "bytes_vs_f16"],
        ),
        ("data.sets = [\"empty.txt\"]", &["`empty.txt` is empty"]),
        ("data.sets = [\"blank.txt\"]", &["`blank.txt` is empty"]),
        ("data.sets = [\"none.txt\"]", &["can't read `none.txt`"]),
        (
            "data.sets = [\"wikitxt2-test\"]",
            &["did you mean `wikitext2-test`?"],
        ),
        (
            "model = \"smolm2-135m-instruct\"",
            &["smollm2-135m-instruct"],
        ),
        ("model = \"none.gguf\"", &["no file or folder `none.gguf`"]),
    ] {
        refused_line(&bench, setting, words);
    }
}

#[test]
fn what_does_not_fit_the_model_or_the_text_is_refused_before_results() {
    let Some(model) = model_path() else {
        return;
    };
    let bench = Bench::new(EXPERIMENT);
    fs::write(bench.path().join("short.txt"), "Three short words.").unwrap();
    let bytes = fs::read(model).unwrap();
    // Cut within the vocabulary, and within the weights.
    fs::write(bench.path().join("header.gguf"), &bytes[..300_000]).unwrap();
    fs::write(bench.path().join("weights.gguf"), &bytes[..40_000_000]).unwrap();
    for (setting, words) in [
        (
            "data.sets = [\"short.txt\"]",
            &["4 tokens, 1 x 64 need 64", "longer text"][..],
        ),
        (
            "protocol.windows = 1000",
            &["set protocol.windows to 115 or less"],
        ),
        (
            "protocol.window = 8193",
            &["8193", "has 8192", "make them smaller"],
        ),
        (
            "strategy.0.project = { method = \"svd\", rank = 65 }",
            &["[calibration]"],
        ),
        (
            "model = \"header.gguf\"",
            &["`header.gguf` is damaged or cut short", "again"],
        ),
        (
            "model = \"weights.gguf\"",
            &["`weights.gguf` is damaged or cut short", "again"],
        ),
    ] {
        refused_line(&bench, setting, words);
    }
}

/// A bar that is missed is a regression, told when all is written; other bars do not make another run.
#[test]
fn a_missed_bar_is_code_1_and_a_met_one_code_0() {
    if model_path().is_none() {
        return;
    }
    let bench = Bench::new(EXPERIMENT);
    let bar = |bound: &str| format!("bar=[{{ strategy = \"f16\", metric = \"kld\", {bound} }}]");
    let missed = bench.run("results", &["-s", &bar("at_most = 0")]);
    assert_eq!(missed.code, Some(1), "{missed:?}");
    assert!(missed.out.contains("missed"), "{missed:?}");
    let bundle = bench.bundle("results").expect("a bundle");
    let journal = bench.file("results", "journal.jsonl");
    assert!(
        bundle.join("manifest.json").exists()
            && bench.file("results", "bars.md").contains("missed")
    );
    let report = |args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvlab"));
        command.arg("report").arg(&bundle).args(args);
        ended(
            command
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::piped()),
        )
    };
    let again = report(&[]);
    assert_eq!(
        (again.code, again.out.contains("Bars: 1 of 1 missed")),
        (Some(1), true),
        "{again:?}"
    );
    assert!(report(&["--json"]).out.contains("\"is_missed\":true"));
    let met = bench.run("results", &["-s", &bar("at_most = 1.5")]);
    assert_eq!(met.code, Some(0), "{met:?}");
    assert!(bench.file("results", "bars.md").contains("| met"));
    assert_eq!(bench.file("results", "journal.jsonl"), journal);
    assert_eq!(report(&[]).code, Some(0));
}

#[test]
fn a_model_that_can_not_be_had_or_was_changed_is_refused() {
    let Some(model) = model_path() else {
        return;
    };
    let bench = Bench::new(EXPERIMENT);
    let home = bench.path().join("home");
    let run = |args: &[&str]| {
        // Neither a package index nor the hub can be reached.
        let mut command = bench.command("results", args);
        command.env("KVLAB_HOME", &home).env("PIP_NO_INDEX", "1");
        ended(command.env("HF_ENDPOINT", "http://127.0.0.1:9"))
    };
    let name = model.file_name().unwrap();
    let ran = run(&[]);
    let hint = format!("{}` yourself", name.to_str().unwrap());
    let words = [
        "can't fetch `smollm2-135m-instruct`",
        "check the network",
        &hint,
    ];
    assert_refused(&bench, &ran, &words);
    assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
    let left: Vec<_> = fs::read_dir(home.join("models")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");

    let mut bytes = fs::read(model).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(home.join("models").join(name), bytes).unwrap();
    let ran = run(&[]);
    let words = [
        "is not `smollm2-135m-instruct`: sha256",
        "delete it to have it fetched again",
    ];
    assert_refused(&bench, &ran, &words);
    assert_eq!(ran.err.lines().count(), 1, "{}", ran.err);
}
