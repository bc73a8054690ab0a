//! What is refused before work about rows that are to stay and gates that are to be trained, and in which words.

use std::fs;
use std::path::PathBuf;

use kvlab::cache::Geometry;
use kvlab::config::{ModelLimits, Plan, Training, load, load_training, parse};
use kvlab::model::WeightSource;
use kvlab::model::geometry::geometry;
use kvlab::model::tiny::{TinyConfig, TinyModel};

const HEAD: &str =
    "schema = 1\nmodel = \"smollm2-135m-instruct\"\n[data]\nsets = [\"quickstart-prose\"]\n";

const ONCE: &str = "[protocol]\nkind = \"compress-once\"\ncontext = 200\n";

const STREAM: &str = "[protocol]\nkind = \"stream\"\nwindow = 256\n";

const SHA256: &str = "aa11bb22cc33dd44";

fn plan(protocol: &str, retain: &str) -> Result<Plan, String> {
    let text = format!("{HEAD}{protocol}[[strategy]]\nencode = \"f16\"\nretain = {retain}\n");
    parse("t.toml", &text, &[]).map_err(|e| e.to_string())
}

/// A model's limits, of whatever weights and length.
fn limits<'a>(geometry: &'a Geometry, sha256: &'a str, context_length: usize) -> ModelLimits<'a> {
    ModelLimits {
        name: "tiny",
        sha256,
        context_length,
        geometry,
    }
}

/// Against a model whose contexts are `context_length` long.
fn held(protocol: &str, retain: &str, context_length: usize) -> Result<(), String> {
    let geometry = Geometry { layers: Vec::new() };
    let limits = limits(&geometry, SHA256, context_length);
    let plan = plan(protocol, retain).unwrap_or_else(|e| panic!("{retain}: {e}"));
    plan.check_model(&limits).map_err(|e| e.to_string())
}

fn has(text: Result<(), String>, parts: &[&str]) {
    let text = text.expect_err("refused");
    for part in parts {
        assert!(text.contains(part), "no `{part}` in:\n{text}");
    }
}

#[test]
fn a_stream_has_no_point_at_which_a_context_could_be_scored() {
    for stage in [
        "snapkv",
        "adakv",
        "pyramid",
        "h2o",
        "tova",
        "keydiff",
        "expected_attention",
        "kvzip",
        "kvzip_plus",
    ] {
        let retain = format!("{{ method = \"{stage}\", tokens = 200 }}");
        has(
            held(STREAM, &retain, 4096),
            &[
                "t.toml:10:1: retain: ",
                "it scores rows by a whole context, and `stream` has no compression point",
                "use kind = \"compress-once\" in [protocol]",
            ],
        );
        held(ONCE, &retain, 4096).unwrap();
    }
    held(STREAM, r#"{ method = "knorm", tokens = 200 }"#, 4096).unwrap();
    held(STREAM, r#"{ method = "window", recent = 64 }"#, 4096).unwrap();
}

#[test]
fn a_stream_has_no_point_at_which_heads_could_share() {
    for allocate in ["global", "adakv", "pyramid", "heads"] {
        let retain =
            format!("{{ method = \"knorm\", kept_fraction = 0.5, allocate = \"{allocate}\" }}");
        has(
            held(STREAM, &retain, 4096),
            &["its heads share a budget (`allocate`), and `stream` has no compression point"],
        );
        held(ONCE, &retain, 4096).unwrap();
    }
    // A threshold is each head's own matter.
    held(
        STREAM,
        r#"{ method = "gate", file = "random", threshold = 0.0 }"#,
        4096,
    )
    .unwrap();
    has(
        held(
            STREAM,
            r#"{ method = "gate", file = "random", kept_fraction = 0.5 }"#,
            4096,
        ),
        &["its heads share a budget"],
    );
}

#[test]
fn a_budget_for_decoding_needs_a_point_and_rows_that_may_leave_after_it() {
    let strategy = format!("{ONCE}continuation = \"strategy\"\n");
    let exact = format!("{ONCE}continuation = \"exact\"\n");
    for retain in [
        "{ method = \"knorm\", tokens = 64, decoding_tokens = 8 }",
        "{ method = \"window\", kept_fraction = 0.5, decoding_kept_fraction = 0.5 }",
        "{ method = \"gate\", file = \"random\", kept_fraction = 0.5, decoding_tokens = 0 }",
    ] {
        held(&strategy, retain, 4096).unwrap();
        has(
            held(&exact, retain, 4096),
            &[
                "t.toml:11:1: retain: ",
                "`decoding_…` budgets rows that come after the compression point, and with continuation = \"exact\" these all stay",
                "write continuation = \"strategy\", or leave `decoding_…` out",
            ],
        );
        has(
            held(STREAM, retain, 4096),
            &[
                "it has a budget for what comes after a compression point (`decoding_…`), and `stream` has no compression point",
            ],
        );
    }
    let nonsense = "{ method = \"knorm\", tokens = 64, decoding_kept_fraction = 1.5 }";
    has(
        plan(&strategy, nonsense).map(|_| ()),
        &["decoding_kept_fraction", "1.5"],
    );
    // What is scored by a whole context has no scores for later rows.
    let unknown = "{ method = \"snapkv\", tokens = 64, decoding_tokens = 8 }";
    has(plan(&strategy, unknown).map(|_| ()), &["decoding_tokens"]);
}

#[test]
fn pages_are_coded_anew_only_where_rows_share_pages_and_leave_them() {
    let check = |protocol: &str, encode: &str| {
        let text = format!(
            "{HEAD}{protocol}[[strategy]]\nencode = {encode}\nretain = {{ method = \"knorm\", kept_fraction = 0.5, rebuild = 0.5 }}\n"
        );
        let geometry = Geometry { layers: Vec::new() };
        let plan = parse("t.toml", &text, &[]).unwrap();
        plan.check_model(&limits(&geometry, SHA256, 4096))
            .map_err(|e| e.to_string())
    };
    let by_channel = "{ k = { method = \"int4\", axis = \"channel\" }, v = \"q4_0\" }";
    let strategy = format!("{ONCE}continuation = \"strategy\"\n");
    check(STREAM, by_channel).unwrap();
    check(&strategy, by_channel).unwrap();
    has(
        check(STREAM, "\"q8_0\""),
        &[
            "retain: ",
            "rows of `encode` = \"q8_0\" are coded one by one",
            "leave `rebuild` out, or take a format by channel",
        ],
    );
    has(
        check(&format!("{ONCE}continuation = \"exact\"\n"), by_channel),
        &["with continuation = \"exact\" none leaves after the compression point"],
    );
    let generate = "[protocol]\nkind = \"generate\"\ncontext = 200\ncontinuation = \"strategy\"\n";
    has(
        check(generate, by_channel),
        &["`rebuild` is counted where a sequence is scored to its end"],
    );
}

#[test]
fn bytes_below_the_protected_rows_are_refused_with_what_they_take() {
    let model = TinyModel::new(&TinyConfig::default());
    let geometry = geometry(model.spec(), 512);
    let limits = limits(&geometry, SHA256, 512);
    let check = |budget: &str| {
        let retain = format!("{{ method = \"knorm\", {budget}, recent = 60 }}");
        plan(ONCE, &retain)
            .unwrap()
            .check_model(&limits)
            .map_err(|e| e.to_string())
    };
    let text = check("bytes = 2_000").unwrap_err();
    assert!(
        text.contains("a budget of 2000 bytes can't hold the rows of a context of 200 that always live: they take "),
        "{text}"
    );
    let words: Vec<&str> = text.split_whitespace().collect();
    let take = words.iter().position(|w| *w == "take").unwrap();
    let digits: String = words[take + 1]
        .chars()
        .filter(char::is_ascii_digit)
        .collect();
    let least: u64 = digits.parse().unwrap();
    check(&format!("bytes = {least}")).unwrap();
    check(&format!("bytes = {}", least - 1)).unwrap_err();
    check("bytes_per_token = 10").unwrap_err();
    has(
        held(STREAM, r#"{ method = "random", bytes = 9_000 }"#, 4096),
        &["its budget is in bytes, which all heads share, and `stream` has no compression point"],
    );
    has(
        plan(ONCE, r#"{ method = "knorm", bytes = 9_000, tokens = 100 }"#).map(|_| ()),
        &["`tokens` = 100 and `bytes` = 9000 are two budgets: give one of them"],
    );
}

#[test]
fn bits_by_row_are_refused_where_rows_can_t_have_them() {
    const JOINT: &str = r#"{ method = "joint", score = "kvzip_plus", bytes = 900_000 }"#;
    has(
        held(STREAM, JOINT, 4096),
        &[
            "its budget is in bytes, which all rows of a context share, and `stream` has no compression point",
        ],
    );
    let over = |rest: &str| {
        let text = format!("{HEAD}{ONCE}[[strategy]]\nretain = {JOINT}\n{rest}\n");
        let plan = parse("t.toml", &text, &[]).map_err(|e| e.to_string())?;
        let geometry = Geometry { layers: Vec::new() };
        let limits = limits(&geometry, SHA256, 4096);
        plan.check_model(&limits).map_err(|e| e.to_string())
    };
    over("encode = \"int4\"").unwrap();
    over("preset = \"int4-best\"").unwrap();
    for (rest, name) in [
        ("encode = \"q4_0\"", "q4_0"),
        ("encode = \"int3\"", "int3"),
        ("encode = { k = \"int4\", v = \"f16\" }", "f16"),
        (
            "encode = { method = \"int4\", zero = \"symmetric\" }",
            "int4",
        ),
    ] {
        let all = format!(
            "it chooses bits row by row, and rows of `encode` = \"{name}\" all have the same"
        );
        has(
            over(rest),
            &[&all, "write preset = \"int4-best\", or encode = \"int4\""],
        );
    }
    has(
        over("encode = \"int4\"\npack = \"zstd\""),
        &["pages of rows of different bits are not packed, and `pack` is \"zstd\""],
    );
}

#[test]
fn bits_by_row_by_a_gate_of_another_model_are_refused() {
    let given = r#"{ method = "joint", file = "gate.safetensors", bytes = 900_000 }"#;
    let (_dir, path) = experiment("00ff00ff00ff00ff", given);
    let geometry = Geometry { layers: Vec::new() };
    let limits = limits(&geometry, SHA256, 4096);
    let text = load(&path, &[]).unwrap().check_model(&limits).unwrap_err();
    assert!(
        text.to_string()
            .contains("it was trained for the model of sha256 00ff00ff00ff"),
        "{text}"
    );
}

#[test]
fn a_budget_below_the_protected_rows_chooses_nothing() {
    has(
        held(ONCE, r#"{ method = "snapkv", kept_fraction = 0.25 }"#, 4096),
        &[
            "`kept_fraction` = 0.25 of 200 tokens is 50 rows, fewer than the 68 protected ones (`sinks` = 4 \
             and `recent` = 64)",
            "protect fewer rows, keep more, or take a longer context",
        ],
    );
    held(ONCE, r#"{ method = "snapkv", kept_fraction = 0.34 }"#, 4096).unwrap();
    held(
        ONCE,
        r#"{ method = "snapkv", kept_fraction = 0.25, window = 46 }"#,
        4096,
    )
    .unwrap();
    has(
        held(
            ONCE,
            r#"{ method = "snapkv", kept_fraction = 0.25, window = 47 }"#,
            4096,
        ),
        &["is 50 rows, fewer than the 51 protected ones"],
    );
    // Listed positions count, a stream has its window, and a window has rows besides its sinks.
    for (protocol, retain, why) in [
        (
            ONCE,
            r#"{ method = "knorm", kept_fraction = 0.25, whitelist = "0-99" }"#,
            "is 50 rows, fewer than the 100 protected ones (`sinks` = 4 and `recent` = 0, and `whitelist`)",
        ),
        (
            STREAM,
            r#"{ method = "knorm", kept_fraction = 0.25, recent = 61 }"#,
            "of 256 tokens is 64 rows, fewer than the 65 protected ones",
        ),
        (
            ONCE,
            r#"{ method = "knorm", tokens = 9, whitelist = "0-9" }"#,
            "`tokens` = 9 can't hold the 10 protected rows of 200 tokens",
        ),
        (
            ONCE,
            r#"{ method = "window", kept_fraction = 0.02 }"#,
            "is 4 rows, no more than the 4 sinks: no newest row would live",
        ),
    ] {
        has(held(protocol, retain, 4096), &[why]);
    }
    held(
        STREAM,
        r#"{ method = "knorm", kept_fraction = 0.25, recent = 60 }"#,
        4096,
    )
    .unwrap();
    held(
        ONCE,
        r#"{ method = "window", kept_fraction = 0.025 }"#,
        4096,
    )
    .unwrap();
    // All of it is all of it.
    held(
        ONCE,
        r#"{ method = "snapkv", kept_fraction = 1.0, window = 300 }"#,
        4096,
    )
    .unwrap();
}

#[test]
fn a_context_that_is_read_again_needs_room_for_that() {
    for stage in ["kvzip", "kvzip_plus"] {
        let retain = format!("{{ method = \"{stage}\", kept_fraction = 0.5 }}");
        // 200 + 200 + a prompt of 64, with 256 to be scored: n_tokens of the protocol is 456.
        let protocol = "[protocol]\nkind = \"compress-once\"\ncontext = 200\nscore = 16\n";
        let text = held(protocol, &retain, 400);
        has(
            text,
            &["read a second time behind itself, needs", "`tiny` has 400"],
        );
        held(protocol, &retain, 4096).unwrap();
    }
}

#[test]
fn another_tools_word_is_answered() {
    let text = plan(ONCE, r#"{ method = "knorm", compression_ratio = 0.25 }"#).unwrap_err();
    assert!(text.contains("compression_ratio"), "{text}");
    assert!(
        text.contains("ambiguous key: 0.25 of it keeps 0.25 in KVzip and 0.75 in kvpress")
            && text.contains("write `kept_fraction`"),
        "{text}"
    );
}

#[test]
fn a_fraction_is_one_and_a_list_of_positions_is_one() {
    for (retain, why) in [
        (
            r#"{ method = "knorm", kept_fraction = 0.0 }"#,
            "kept_fraction",
        ),
        (
            r#"{ method = "knorm", kept_fraction = 1.5 }"#,
            "kept_fraction",
        ),
        (r#"{ method = "knorm", tokens = 0 }"#, "tokens"),
        (
            r#"{ method = "knorm", tokens = 9, whitelist = "9-3" }"#,
            "`whitelist` is \"9-3\"",
        ),
        (
            r#"{ method = "knorm", tokens = 9, whitelist = "x" }"#,
            "such as \"0-31, 90-99\"",
        ),
        (
            r#"{ method = "knorm", tokens = 9, segments = "8, 8" }"#,
            "`segments` is \"8, 8\"",
        ),
        (
            r#"{ method = "knorm", tokens = 9, segments = "0, 8" }"#,
            "ascending",
        ),
        (
            r#"{ method = "knorm", tokens = 9, allocate = "fair" }"#,
            "allocate",
        ),
        (
            r#"{ method = "knorm", tokens = 9, rebuild = 0.0 }"#,
            "must be a number greater than 0 and at most 1",
        ),
        (r#"{ method = "window", rebuild = 1.5 }"#, "rebuild"),
        (
            r#"{ method = "kvzip", tokens = 9, rebuild = 0.5 }"#,
            "unknown parameter `rebuild`",
        ),
        (
            r#"{ method = "snapkv", tokens = 99, kernel = 4 }"#,
            "`kernel` is 4: it must be odd",
        ),
        (
            r#"{ method = "snapkv", tokens = 40 }"#,
            "can't hold the 68 protected rows",
        ),
        (
            r#"{ method = "gate", file = "random", sha256 = "ab", kept_fraction = 0.5 }"#,
            "stands beside file = \"random\", which is no file",
        ),
        (
            r#"{ method = "gate", file = "random", threshold = 0.0, segments = "8" }"#,
            "`segments` (from 8 on) share a budget, and `threshold` is none",
        ),
        (
            r#"{ method = "gate", kept_fraction = 0.5 }"#,
            "it has no `file`",
        ),
    ] {
        let text = plan(ONCE, retain).expect_err(retain);
        assert!(text.contains(why), "{retain}: {text}");
    }
    plan(
        ONCE,
        r#"{ method = "knorm", tokens = 9, whitelist = "3, 5-9", segments = "8, 80" }"#,
    )
    .unwrap();
}

/// A gate of one layer and KV head, whose weights are zeros, made for a model of some sum.
fn gate(model_sha256: &str) -> Vec<u8> {
    let header = format!(
        r#"{{"__metadata__":{{"model_sha256":"{model_sha256}"}},"gate.weight":{{"dtype":"F16","shape":[1,1,8],"data_offsets":[0,16]}}}}"#
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([0; 16]);
    bytes
}

/// A folder with an experiment that has this `retain`, and a gate beside it.
fn experiment(model_sha256: &str, retain: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("gate.safetensors"), gate(model_sha256)).unwrap();
    let path = dir.path().join("e.toml");
    let text = format!("{HEAD}{ONCE}[[strategy]]\nencode = \"f16\"\nretain = {retain}\n");
    fs::write(&path, text).unwrap();
    (dir, path)
}

const GATE: &str = r#"{ method = "gate", file = "gate.safetensors", kept_fraction = 0.5 }"#;

#[test]
fn a_gate_lies_beside_its_experiment_and_its_sum_is_filled_in() {
    let (_dir, path) = experiment(SHA256, GATE);
    let plan = load(&path, &[]).unwrap();
    let params = &plan.strategies[0].retain.as_ref().unwrap().params;
    let sum = params.text("sha256").unwrap().to_owned();
    assert_eq!(sum.len(), 64);
    let given = GATE.replace("kept", &format!("sha256 = \"{sum}\", kept"));
    let (_dir, path) = experiment(SHA256, &given);
    load(&path, &[]).unwrap();
    let (_dir, path) = experiment("another model", &given);
    let text = load(&path, &[]).unwrap_err().to_string();
    assert!(
        text.contains("gate.safetensors` has the sum ")
            && text.contains(&format!("`sha256` says {sum}"))
            && text.contains("e.toml:10:"),
        "{text}"
    );
}

#[test]
fn a_gate_of_another_model_is_refused() {
    let (_dir, path) = experiment("00ff00ff00ff00ff", GATE);
    let geometry = Geometry { layers: Vec::new() };
    let limits = |sha256| limits(&geometry, sha256, 4096);
    let plan = load(&path, &[]).unwrap();
    let text = plan.check_model(&limits(SHA256)).unwrap_err().to_string();
    assert!(
        text.contains(
            "it was trained for the model of sha256 00ff00ff00ff, `tiny` is aa11bb22cc33"
        ) && text.contains("kvlab train"),
        "{text}"
    );
    plan.check_model(&limits("00ff00ff00ff00ff")).unwrap();
    // What `bench` and `kld` ask, which have no protocol.
    let alone = |gate: &str, sha256| {
        let (_dir, path) = experiment("00ff00ff00ff00ff", gate);
        let plan = load(&path, &[]).unwrap();
        plan.check_as_read(&limits(sha256))
            .map_err(|e| e.to_string())
    };
    let as_they_come = GATE.replace("kept_fraction = 0.5", "threshold = 0.0");
    assert_ne!(as_they_come, GATE);
    has(
        alone(&as_they_come, SHA256),
        &["it was trained for the model of sha256 00ff00ff00ff"],
    );
    alone(&as_they_come, "00ff00ff00ff00ff").unwrap();
    // Heads that share a budget would never meet it there.
    has(
        alone(GATE, "00ff00ff00ff00ff"),
        &[
            "its heads share a budget (`allocate`), and this command has no compression point: something else would be measured",
            "kvlab run with kind = \"compress-once\"",
        ],
    );
}

#[test]
fn what_only_a_point_lets_act_is_refused_where_there_is_none() {
    let geometry = Geometry { layers: Vec::new() };
    let limits = limits(&geometry, SHA256, 4096);
    let read = |retain: &str| {
        let plan = plan(ONCE, retain).unwrap();
        plan.check_as_read(&limits).map_err(|e| e.to_string())
    };
    for (retain, why) in [
        (
            r#"{ method = "snapkv", tokens = 99 }"#,
            "it scores rows by a whole context",
        ),
        (
            r#"{ method = "knorm", bytes = 9000 }"#,
            "its budget is in bytes",
        ),
        (
            r#"{ method = "knorm", tokens = 9, allocate = "global" }"#,
            "its heads share a budget",
        ),
        (
            r#"{ method = "knorm", tokens = 9, segments = "8" }"#,
            "segments share its budget",
        ),
    ] {
        has(
            read(retain),
            &[why, "this command has no compression point"],
        );
        has(
            held(STREAM, retain, 4096),
            &[why, "`stream` has no compression point"],
        );
    }
    read(r#"{ method = "knorm", tokens = 9 }"#).unwrap();
    read(r#"{ method = "window", kept_fraction = 0.5 }"#).unwrap();
}

#[test]
fn where_a_gate_lies_is_no_part_of_what_a_cell_is() {
    let (_here, path) = experiment(SHA256, GATE);
    let (_there, other) = experiment(SHA256, GATE);
    let ids = |path: &PathBuf| -> Vec<String> {
        let cells = load(path, &[]).unwrap().cells(SHA256);
        cells.into_iter().map(|c| c.id).collect()
    };
    assert_eq!(ids(&path), ids(&other));
    let (_else, another) = experiment("00ff00ff00ff00ff", GATE);
    assert_ne!(ids(&path), ids(&another));
    // One gate at two places is one strategy.
    let (dir, path) = experiment(SHA256, GATE);
    fs::copy(
        dir.path().join("gate.safetensors"),
        dir.path().join("copy.safetensors"),
    )
    .unwrap();
    let twin = GATE.replace("gate.saf", "copy.saf");
    let text = fs::read_to_string(&path).unwrap();
    let text =
        format!("{text}\n[[strategy]]\nlabel = \"twin\"\nencode = \"f16\"\nretain = {twin}\n");
    fs::write(&path, text).unwrap();
    let text = load(&path, &[]).unwrap_err().to_string();
    assert!(text.contains("\"twin\" is the same strategy as "), "{text}");
}

#[test]
fn a_gate_that_was_replaced_since_is_refused() {
    let (dir, path) = experiment(SHA256, GATE);
    let plan = load(&path, &[]).unwrap();
    let geometry = Geometry { layers: Vec::new() };
    let build = || {
        let materials = kvlab::cache::Materials {
            geometry: &geometry,
            calibration: None,
            backing_dir: None,
        };
        kvlab::cache::StagedCache::new(&plan.strategies[0], materials).map(drop)
    };
    build().unwrap();
    fs::write(
        dir.path().join("gate.safetensors"),
        gate("00ff00ff00ff00ff"),
    )
    .unwrap();
    let text = build().unwrap_err().to_string();
    assert!(
        text.contains("it is another file, or was replaced since"),
        "{text}"
    );
}

#[test]
fn a_gate_that_is_not_there_is_refused_with_its_path() {
    let (dir, path) = experiment(SHA256, &GATE.replace("gate.saf", "gait.saf"));
    let text = load(&path, &[]).unwrap_err().to_string();
    let missing = dir.path().join("gait.safetensors");
    assert!(
        text.contains(&format!("`{}` can't be read", missing.display()))
            && text.contains("paths are relative to the TOML"),
        "{text}"
    );
    // What is no gate is refused where it stands.
    fs::write(missing, b"nothing").unwrap();
    let text = load(&path, &[]).unwrap_err().to_string();
    assert!(text.contains("is no gate"), "{text}");
}

const TRAINING: &str = "schema = 1\nmodel = \"smollm2-135m-instruct\"\nfile = \"gate.safetensors\"\n\
                        [data]\nsets = [\"calibration-mixed\"]\n";

fn training(body: &str) -> Result<Training, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.toml");
    fs::write(&path, body).unwrap();
    load_training(&path, &[]).map_err(|e| e.to_string())
}

#[test]
fn a_training_fills_in_what_it_is_not_told() {
    let t = training(TRAINING).unwrap();
    assert_eq!(
        (t.name.as_str(), t.model.as_str()),
        ("mine", "smollm2-135m-instruct")
    );
    assert_eq!((t.windows, t.window, t.held_out), (vec![20], 1024, 10));
    assert_eq!((t.settings.mlp, t.end_to_end), (None, None));
    assert_eq!(t.settings.clip, (-12.0, 2.0));
    assert!(t.file.ends_with("gate.safetensors") && t.file.is_absolute());
    assert_eq!(t.texts.len(), 1);
    let t = training(&format!(
        "{TRAINING}[gate]\nclip = [-9, 1.5]\nridge = [1]\n"
    ))
    .unwrap();
    assert_eq!(
        (t.settings.clip, t.settings.ridges),
        ((-9.0, 1.5), vec![1.0])
    );
}

#[test]
fn windows_are_as_many_of_each_text_or_a_number_for_each() {
    let of = |windows: &str| {
        let sets = format!("windows = {windows}\nsets = [\"wikitext2-valid\", ");
        training(&TRAINING.replace("sets = [", &sets)).map(|t| t.windows)
    };
    assert_eq!(of("7").unwrap(), [7, 7]);
    assert_eq!(of("[7, 9]").unwrap(), [7, 9]);
    for windows in ["[7]", "[7, 0]", "[7, 8, 9]", "[7, \"9\"]"] {
        let text = of(windows).unwrap_err();
        assert!(
            text.contains("data.windows") && text.contains("one for each of the 2 sets"),
            "{windows}: {text}"
        );
    }
}

#[cfg(feature = "burn")]
#[test]
fn a_training_may_ask_for_a_network_and_for_heads_weighed_end_to_end() {
    let of = |gate: &str| training(&format!("{TRAINING}[gate]\n{gate}\n"));
    let mlp = of("kind = \"mlp\"").unwrap().settings.mlp.unwrap();
    assert_eq!((mlp.hidden, mlp.epochs, mlp.seed), (16, 20, 0));
    let mlp = of("kind = \"mlp\"\nhidden = 4\nepochs = 2\nseed = 9").unwrap();
    let mlp = mlp.settings.mlp.unwrap();
    assert_eq!((mlp.hidden, mlp.epochs, mlp.seed), (4, 2, 9));
    let e = of("end_to_end = { steps = 5, kept_fraction = 0.5 }").unwrap();
    let e = e.end_to_end.unwrap();
    assert_eq!(
        (e.windows, e.window, e.steps, e.kept_fraction),
        (8, 512, 5, 0.5)
    );
    for (gate, why) in [
        ("kind = \"mpl\"", "must be one of \"ridge\", \"mlp\""),
        ("hidden = 8", "gate.hidden"),
        ("kind = \"ridge\"\nseed = 1", "it is for kind = \"mlp\""),
        ("kind = \"mlp\"\nhidden = 0", "gate.hidden"),
        ("end_to_end = true", "end_to_end"),
        ("end_to_end = { window = 64 }", "gate.end_to_end.window"),
        (
            "end_to_end = { kept_fraction = 1.0 }",
            "gate.end_to_end.kept_fraction",
        ),
        ("end_to_end = { step = 3 }", "did you mean `steps`"),
    ] {
        let text = of(gate).unwrap_err();
        assert!(text.contains(why), "{gate}: {text}");
    }
}

#[cfg(not(feature = "burn"))]
#[test]
fn what_is_trained_with_burn_is_refused_without_it() {
    for gate in ["kind = \"mlp\"", "end_to_end = { steps = 5 }"] {
        let text = training(&format!("{TRAINING}[gate]\n{gate}\n")).unwrap_err();
        assert!(text.contains("build it with the feature `burn`"), "{text}");
    }
}

#[test]
fn nothing_is_fitted_to_what_is_evaluated_on() {
    for set in ["wikitext2-test", "quickstart-prose"] {
        let text = training(&TRAINING.replace("calibration-mixed", set)).unwrap_err();
        assert!(
            text.contains(&format!(
                "\"{set}\" is a text that strategies are evaluated on"
            )) && text.contains("mine.toml:5:"),
            "{text}"
        );
    }
    let one_of_two = TRAINING.replace("[\"calib", "[\"wikitext2-test\", \"calib");
    assert!(training(&one_of_two).unwrap_err().contains("data.sets.0"));
}

#[test]
fn a_training_with_nonsense_is_refused_with_all_of_it() {
    for clip in [
        "[2, -12]",
        "[1]",
        "[1, 1]",
        "[-12, 2, 3]",
        "3",
        "[\"a\", \"b\"]",
        "[-inf, 2]",
        "[nan, 2]",
    ] {
        let text = training(&format!("{TRAINING}[gate]\nclip = {clip}\n")).expect_err(clip);
        assert!(
            text.contains("gate.clip") && text.contains("two numbers, the smaller first"),
            "{clip}: {text}"
        );
    }
    for ridge in ["[]", "[0]", "[1e-3, -1.0]", "1e-3", "[inf]", "[nan]"] {
        let text = training(&format!("{TRAINING}[gate]\nridge = {ridge}\n")).expect_err(ridge);
        assert!(
            text.contains("gate.ridge") && text.contains("a list of numbers greater than 0"),
            "{ridge}: {text}"
        );
    }
    let text = training("schema = 1\n[gate]\ntarget = \"h2o\"\nclip = 1\n").unwrap_err();
    for part in ["model", "file", "data", "gate.target", "gate.clip"] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    // A misspelt key is told once.
    let text = training(&TRAINING.replace("file", "fiel")).unwrap_err();
    assert!(
        text.contains("did you mean `file`") && !text.contains("weights go"),
        "{text}"
    );
    let text = training(&TRAINING.replace("file = \"gate.safetensors\"", "")).unwrap_err();
    assert!(text.contains("say where the weights go"), "{text}");
    let text = training(&TRAINING.replace("sets", "windows = 0\nwindow = 1\nheld_out = 1\nsets"))
        .unwrap_err();
    for part in ["data.windows", "data.window", "data.held_out"] {
        assert!(text.contains(part), "no {part} in {text}");
    }
}
