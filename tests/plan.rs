//! `kvlab plan --model` as a user runs it: known models without weights, sizes, refusals.

use std::process::Command;

use serde_json::Value;

fn plan(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvlab"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .arg("plan")
        .args(args)
        .output()
        .expect("it runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    let code = output.status.code().unwrap_or(-1);
    (code, text(output.stdout), text(output.stderr))
}

fn json(args: &[&str]) -> Value {
    let (code, out, err) = plan(args);
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).expect("JSON")
}

fn row<'a>(plan: &'a Value, label: &str) -> &'a Value {
    let rows = plan["strategies"].as_array().expect("rows");
    let mut rows = rows.iter().filter(|r| r["label"] == label);
    rows.next().expect("a row")
}

#[test]
fn a_config_without_weights_is_planned_for_all_presets_and_formats() {
    let plan = json(&[
        "--model",
        "tests/configs/llama-3-8b.json",
        "--context",
        "131072",
        "--budget",
        "24GiB",
        "--json",
    ]);
    assert_eq!(plan["weight_bytes"], 16_060_522_496u64);
    assert_eq!(plan["weights_from"], "8,030,261,248 parameters in bfloat16");
    assert_eq!(plan["room_bytes"], (24u64 << 30) - 16_060_522_496);
    let rows = plan["strategies"].as_array().unwrap();
    assert!(rows.len() >= 20, "{}", plan["refused"]);
    assert!(rows.iter().all(|r| r["exact"] == true));
    let f16 = row(&plan, "f16");
    assert_eq!(f16["memory"]["payload_bytes"], 16u64 << 30);
    assert_eq!(
        (&f16["fits"], &f16["n_sequences_fit"]),
        (&Value::Bool(false), &Value::from(0))
    );
    // 9,709,281,280 bytes at 131,072 each and 0.4 % of page tables: 73 thousand tokens.
    let longest = f16["longest_context"].as_u64().unwrap();
    assert!((73_000..74_100).contains(&longest), "{longest}");
    // 16.06 GB at 131,072 bytes a token: 122,532 tokens, less what page tables take.
    let equal = f16["equals_weights_at"].as_u64().unwrap();
    assert!((121_500..122_600).contains(&equal), "{equal}");
    let q4_0 = row(&plan, "q4_0");
    assert_eq!(q4_0["fits"], true);
    let bits = q4_0["effective_bits"].as_f64().unwrap();
    assert!((4.5..4.6).contains(&bits), "{bits}");
    let window = row(&plan, "streaming-llm");
    assert_eq!(window["marginal_bytes_per_token"], 0.0);
    assert_eq!(window["longest_context"], Value::Null);
    assert_eq!(window["longest_context_beyond"], 1 << 24);
}

#[test]
fn a_batch_counts_sequences_and_tables_are_for_people() {
    let args = [
        "--model",
        "tests/configs/llama-2-7b.json",
        "--context",
        "2000",
        "--batch",
        "16",
        "--budget",
        "40GB",
        "-s",
        "f16,q8_0",
    ];
    let (code, out, err) = plan(&args);
    assert_eq!(code, 0, "{err}");
    for expected in [
        "model    llama-2-7b: 32 layers of 32 KV heads x 128 (MHA)",
        "8,388,608,000 values",
        "weights  12.55 GiB, 6,738,415,616 parameters in float16",
        "(advice, no limit)",
        " f16           525,440  15.66 GiB      16.041   yes         25 ",
    ] {
        assert!(out.contains(expected), "{expected} not in\n{out}");
    }
    let plan = json(&[&args[..], &["--json"]].concat());
    // 40 GB less 13,476,831,232 bytes of weights, 1,048,576,000 and page tables each.
    assert_eq!(row(&plan, "f16")["n_sequences_fit"], 25);
    assert_eq!(
        row(&plan, "f16")["memory"]["payload_bytes"],
        16_777_216_000u64
    );
}

#[test]
fn what_does_not_suit_a_model_is_told_beside_what_does() {
    // 2048 tokens of this model are 335 million values.
    let budget =
        r#"encode = "int8", budget = { bytes = 10_000_000, then = ["int4"] }, label = "b""#;
    let phi = ["--model", "tests/configs/phi-2.json", "-s", budget];
    let (code, out, err) = plan(&[&phi[..], &["-s", "f16"]].concat());
    assert_eq!(code, 0, "{err}");
    assert!(
        out.contains("not for this model: b: its layers depend on each other, so that they are filled whole: up to 819 tokens"),
        "{out}"
    );
    let (code, _, err) = plan(&phi);
    assert_eq!(code, 2);
    assert!(
        err.contains("no strategy can be planned for this model: b: its layers"),
        "{err}"
    );
    // The weights' own format is not a plain one.
    let deepseek = "tests/configs/deepseek-v3.json";
    let (code, _, err) = plan(&["--model", deepseek, "-s", "f16", "--context", "4096"]);
    assert_eq!(code, 2);
    assert!(
        err.contains("give --weights with a format or a size"),
        "{err}"
    );
    let args = [
        "--model",
        deepseek,
        "-s",
        "f16",
        "--context",
        "4096",
        "--weights",
        "fp8",
        "--json",
    ];
    let plan = json(&args);
    assert_eq!(plan["weight_bytes"], 671_026_419_200u64);
    assert_eq!(
        row(&plan, "f16")["memory"]["payload_bytes"],
        61 * 576 * 2 * 4096
    );
}

#[test]
fn wrong_words_are_refused_in_one_line() {
    let llama = "tests/configs/llama-3-8b.json";
    for (args, message) in [
        (
            &["--model", llama, "--budget", "24G"][..],
            "`24G` is no size: write a number and B, KB",
        ),
        (&["--model", llama, "--budget", "0"], "1 B to 1024 TiB"),
        (
            &["--model", llama, "--weights", "q5"],
            "--weights: `q5` is no size",
        ),
        (
            &["--model", llama, "-s", "q8"],
            "no strategy is called `q8`",
        ),
        (&["--model", llama, "--context", "0"], "0 is not in 1..="),
        (
            &["--model", "no-such.json"],
            "there is no file, folder or model `no-such.json`",
        ),
        (&["--model", "tests/configs/README.md"], "README.md"),
        (
            &["--model", "hub:nobody/nothing"],
            "`kvlab fetch hub:nobody/nothing` brings it",
        ),
        (&["x.toml", "--model", llama], "cannot be used with"),
        (&["x.toml", "--budget", "1GB"], "cannot be used with"),
        (&[], "<EXPERIMENT>"),
    ] {
        let (code, out, err) = plan(args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {err}");
        assert!(err.contains(message), "{args:?}: {err}");
    }
}
