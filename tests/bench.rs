//! `kvlab bench` as a user runs it: refusals before any work, and a short bench of the real model.

use std::process::Command;

use kvlab::model::source::{ModelDir, Silent, resolve};
use serde_json::Value;

const MODEL: &str = "smollm2-135m-instruct";

fn bench(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvlab"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .arg("bench")
        .args(args)
        .output()
        .expect("it runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    let code = output.status.code().unwrap_or(-1);
    (code, text(output.stdout), text(output.stderr))
}

#[test]
fn names_and_numbers_are_refused_before_any_work() {
    for (args, message) in [
        (
            &["-s", "q8"][..],
            "no strategy is called `q8`; did you mean `q8_0`?",
        ),
        (&["-s", "q8_0/q4"], "no strategy is called `q4`"),
        (&["-s", "tail = -1"], "strategy.0.tail: is -1"),
        (&["-s", "f16,f16"], "is the same strategy as \"f16\""),
        (&["-p", "0", "-n", "0"], "nothing to measure"),
        (&["-t", "0"], "threads must be 1 to 1024"),
        (&["-d", "1-"], "`1-` must be a number"),
        (
            &["-m", "smollm2-135m-instrukt"],
            "did you mean `smollm2-135m-instruct`?",
        ),
        (&["-f", "quickstart-pros"], "quickstart-prose"),
    ] {
        let (code, out, err) = bench(args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {err}");
        assert!(err.contains(message), "{args:?}: {err}");
    }
}

fn is_there(model: &str) -> bool {
    let dir = ModelDir::locate(None);
    let found = dir.and_then(|dir| resolve(model, &dir, &Silent));
    if let Err(reason) = &found {
        eprintln!("SKIPPED, the test needs {model}: {reason}");
    }
    found.is_ok()
}

fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or(f64::NAN)
}

#[test]
fn a_bench_holds_weights_and_cache_and_150_mb_at_most() {
    if !is_there(MODEL) {
        return;
    }
    let text = format!("{}/long.txt", env!("CARGO_TARGET_TMPDIR"));
    // Long enough to show what encoding it takes.
    let prose = include_str!("../datasets/quickstart/prose.txt").repeat(40);
    std::fs::write(&text, prose).expect("written");
    let (code, out, err) = bench(&[
        "-p", "0", "-n", "1", "-d", "600", "-t", "2", "-r", "1", "-f", &text, "-o", "json", "-q",
    ]);
    assert_eq!(code, 0, "{err}");
    let rows: Vec<Value> = serde_json::from_str(&out).expect("JSON");
    let held = number(&rows[0], "model_size") + number(&rows[0], "cache_bytes");
    if let Some(peak) = rows[0]["peak_rss_bytes"].as_f64() {
        let besides = peak - held;
        assert!(besides > 0.0 && besides <= 150e6, "{besides} beside {held}");
    }
}

#[test]
fn a_short_bench_of_a_real_model_has_a_row_per_strategy_test_depth_and_threads() {
    if !is_there(MODEL) {
        return;
    }
    let (code, out, err) = bench(&[
        "-s",
        "f16,q8_0/q4_0",
        "-s",
        "encode = \"kvquant\", tail = 32",
        "-p",
        "16",
        "-n",
        "2",
        "-d",
        "0,130",
        "-t",
        "1-2",
        "-r",
        "2",
        "-o",
        "json",
        "-q",
    ]);
    assert_eq!(code, 0, "{err}");
    let rows: Vec<Value> = serde_json::from_str(&out).expect("JSON");
    assert_eq!(rows.len(), 3 * 2 * 2 * 2);
    let names: Vec<&str> = rows[..3]
        .iter()
        .filter_map(|r| r["strategy"].as_str())
        .collect();
    assert_eq!(names, ["f16", "q8_0/q4_0", "kvquant tail 32"]);
    for row in &rows {
        assert_eq!(row["gate_holds"], true);
        assert_eq!(row["model_n_params"], 134_515_008);
        assert!(number(row, "avg_ts") > 0.0 && number(row, "machine_read_bytes_per_s") > 1e8);
        let shares = [
            "linear_share",
            "head_share",
            "attention_share",
            "encoding_share",
            "rest_share",
        ];
        let sum: f64 = shares.map(|s| number(row, s)).iter().sum();
        assert!((sum - 1.0).abs() < 1e-9, "{row}");
        assert!(
            number(row, "linear_share") > number(row, "rest_share"),
            "{row}"
        );
    }
    let deep = |strategy: &str| {
        let here = |r: &&Value| r["test"] == "tg2 @ d130" && r["strategy"] == strategy;
        rows.iter().find(here).expect("a row")
    };
    // 23,040 bytes of f16 rows per token, and the weights of one step.
    let weights = number(deep("f16"), "bytes_per_step") - 131.0 * 23_040.0;
    assert!(
        (weights / number(&rows[0], "model_size") - 1.0).abs() < 0.01,
        "{weights}"
    );
    assert!(number(deep("q8_0/q4_0"), "cache_bytes") < 0.5 * number(deep("f16"), "cache_bytes"));
}

#[test]
fn latency_stands_beside_no_cache_and_each_process_holds_its_own_cache() {
    if !is_there(MODEL) {
        return;
    }
    let (code, out, err) = bench(&[
        "-s",
        "f16,q8_0",
        "-p",
        "32",
        "-n",
        "12",
        "--no-cache",
        "1",
        "-d",
        "400",
        "-t",
        "1",
        "-r",
        "2",
        "--isolate",
        "-o",
        "json",
        "-q",
    ]);
    assert_eq!(code, 0, "{err}");
    let rows: Vec<Value> = serde_json::from_str(&out).expect("JSON");
    let tests: Vec<&str> = rows.iter().filter_map(|r| r["test"].as_str()).collect();
    let expected = [
        "pp32 @ d400",
        "pp32 @ d400",
        "tg12 @ d400",
        "tg12 @ d400",
        "tg1 nocache @ d400",
    ];
    assert_eq!(tests, expected);
    let parts = ["ttft_prefill_ms", "ttft_scoring_ms", "ttft_compression_ms"];
    let sum: f64 = parts.map(|p| number(&rows[0], p)).iter().sum();
    assert!((sum / number(&rows[0], "time_mean_ms") - 1.0).abs() < 1e-6);
    assert_eq!(rows[3]["time_n"], 24);
    assert!(number(&rows[3], "time_p90_ms") >= number(&rows[3], "time_p50_ms"));
    // 401 tokens through the model instead of one: even in chunks that takes several times as long.
    assert!(number(&rows[4], "time_vs_first") > 3.0, "{}", rows[4]);
    assert_eq!(rows[4]["cell_peak_rss_bytes"], Value::Null);
    let cell = |row: usize, of: &str| number(&rows[row], &format!("cell_{of}_rss_bytes"));
    if rows[2]["cell_peak_rss_bytes"].is_number() {
        assert!(cell(2, "before") < cell(2, "steady") && cell(2, "steady") <= cell(2, "peak"));
        // The whole bench has read 128 MiB for the machine's rate, which no process of a cell does.
        assert!(cell(3, "peak") < number(&rows[3], "peak_rss_bytes"));
    }
    let (code, _, err) = bench(&["--cell", "{}", "-q"]);
    assert_eq!(code, 2);
    assert!(err.contains("not a strategy as JSON"), "{err}");
}
