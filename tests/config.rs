//! Experiments as users write them: what is refused and in which words, sweeps, `extends`, overrides, cells.

use std::fs;
use std::path::Path;

use kvlab::cache::stage::KeyForm;
use kvlab::cache::{Continuation, Geometry};
use kvlab::config::{Bos, ModelLimits, PRESETS, Plan, Protocol, load, parse};
use kvlab::data::Passages;
use kvlab::eval::bars::{Bound, Metric};
use kvlab::model::ops::Arithmetic;

/// The shortest sound experiment; tests put more behind it.
const HEAD: &str = "schema = 1\nmodel = \"smollm2-135m-instruct\"\n[data]\nsets = [\"quickstart-prose\"]\n\
                    [protocol]\nkind = \"compress-once\"\n";

fn with(body: &str, overrides: &[&str]) -> Result<Plan, String> {
    let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
    parse("t.toml", &format!("{HEAD}{body}"), &overrides).map_err(|e| e.to_string())
}

fn plan(body: &str) -> Plan {
    with(body, &[]).unwrap_or_else(|e| panic!("{e}"))
}

fn refused(body: &str) -> String {
    with(body, &[]).expect_err("refused")
}

fn labels(plan: &Plan) -> Vec<&str> {
    plan.strategies.iter().map(|s| s.label.as_str()).collect()
}

fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no `{part}` in:\n{text}");
    }
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
fn defaults_are_filled_in_and_the_plan_survives_json() {
    let p = plan("[[strategy]]\nencode = { k = \"q8_0\", v = \"q4_0\" }\nkeys = \"pre_rope\"\n");
    assert_eq!((p.name.as_str(), p.chunk, p.latency_steps), ("t", 512, 16));
    assert_eq!(
        p.protocols,
        [Protocol::CompressOnce {
            context: 1024,
            score: 256,
            documents: 4,
            continuation: Continuation::Strategy,
            floor: false,
            bos: Bos::Model,
            passages: Passages::Spread,
        }]
    );
    assert_eq!(labels(&p), ["q8_0/q4_0 pre_rope"]);
    assert_eq!(p.strategies[0].keys, KeyForm::PreRope);
    let json = serde_json::to_string(&p).unwrap();
    let back: Plan = serde_json::from_str(&json).unwrap();
    assert_eq!(back, p);
    assert_eq!(serde_json::to_string(&back).unwrap(), json);
    assert_eq!(back.cells("m"), p.cells("m"));
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
    let p = with(
        "context = 64\n[[strategy]]\nencode = \"f16\"\n",
        &[
            "protocol.continuation=[\"exact\", \"strategy\"]",
            "protocol.score=[32, 64]",
        ],
    )
    .unwrap();
    assert_eq!(p.protocols.len(), 4);
    assert_eq!(p.cells("m").len(), 4);
}

#[test]
fn twins_are_refused_with_both_places() {
    let text = refused(
        "[[strategy]]\nencode = \"q8_0\"\n[[strategy]]\nlabel = \"b\"\nencode = \"q8_0\"\n",
    );
    has(
        &text,
        &["t.toml:10:1: strategy: \"b\" is the same strategy as \"q8_0\" at t.toml:8:1"],
    );
    let text = refused(
        "[[strategy]]\nlabel = \"a\"\nencode = \"q8_0\"\n[[strategy]]\nlabel = \"a\"\nencode = \"q4_0\"\n",
    );
    has(&text, &["the label \"a\" is taken", "at t.toml:8:1"]);
}

#[test]
fn protocols_take_their_own_keys_only() {
    let stream = |body: &str| {
        let text = format!("{}{body}", HEAD.replace("compress-once", "stream"));
        parse("t.toml", &text, &[]).map_err(|e| e.to_string())
    };
    let text = stream("floor = true\nscore = 3\nwindow = 1\n[[strategy]]\n").unwrap_err();
    has(
        &text,
        &[
            "protocol.floor: belongs to another protocol, this one is stream",
            "protocol.score: belongs",
            "protocol.window: is 1, must be a whole number from 2",
            "3 problems",
        ],
    );
    let p = stream("window = 64\nwindows = 2\nbos = \"never\"\n[[strategy]]\n").unwrap();
    assert_eq!(
        p.protocols,
        [Protocol::Stream {
            window: 64,
            windows: 2,
            bos: Bos::Never
        }]
    );
    let text = with("[[strategy]]\n", &["protocol.kind=steam"]).unwrap_err();
    has(
        &text,
        &[
            "-s protocol.kind=steam: protocol.kind:",
            "did you mean `stream`?",
        ],
    );
    let text = parse(
        "t.toml",
        &HEAD
            .replace("compress-once", "stream")
            .replace("[protocol]", "documents = 3\n[protocol]"),
        &[],
    )
    .unwrap_err()
    .to_string();
    has(
        &text,
        &[
            "data.documents: belongs to compress-once",
            "strategy: is missing",
        ],
    );
}

#[test]
fn tasks_take_tasks_and_texts_take_texts() {
    let tasks = |data: &str, protocol: &str| {
        let text = format!(
            "schema = 1\nmodel = \"smollm2-135m-instruct\"\n[data]\n{data}\n[protocol]\nkind = \"tasks\"\n{protocol}\n[[strategy]]\n"
        );
        parse("t.toml", &text, &[]).map_err(|e| e.to_string())
    };
    let plan = tasks(
        "tasks = [\"copy\", \"piqa\"]\nitems = 7",
        "shots = [0, 5]\nlength = 600",
    )
    .unwrap();
    assert_eq!(plan.data.len(), 2);
    assert!(plan.data.iter().all(|d| d.is_task));
    assert_eq!(plan.latency_steps, 0);
    let shots = |p: &Protocol| match p {
        Protocol::Tasks {
            shots,
            items: 7,
            length: 600,
            generate: true,
            ..
        } => *shots,
        other => panic!("{other:?}"),
    };
    assert_eq!(plan.protocols.iter().map(shots).collect::<Vec<_>>(), [0, 5]);
    let again: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
    assert_eq!(again, plan);

    let wrong = tasks(
        "tasks = [\"pika\", \"copy\", \"copy\"]\ndocuments = 3",
        "context = 5",
    )
    .unwrap_err();
    has(
        &wrong,
        &[
            "data.tasks.0: no task is called `pika` (did you mean `piqa`?)",
            "data.tasks.2: \"copy\" is the same task",
            "data.documents: belongs to compress-once",
            "protocol.context: belongs to another protocol, this one is tasks",
        ],
    );
    has(
        &tasks("sets = [\"quickstart-prose\"]", "").unwrap_err(),
        &["data.tasks: is missing"],
    );
    has(
        &with("[[strategy]]\n", &["data.tasks=[\"copy\"]", "data.items=3"]).unwrap_err(),
        &[
            "data.tasks: belongs to tasks",
            "data.items: belongs to tasks",
        ],
    );
}

#[test]
fn words_of_other_tools_are_answered() {
    for (line, answer) in [
        (
            "ratio = 0.3",
            "0.3 of it keeps 0.3 in KVzip and 0.7 in kvpress",
        ),
        ("cache_type_k = \"q8_0\"", "write encode = { k"),
        ("residual_length = 32", "write `tail`"),
        (
            "encode = \"q4_0-hadamard\"",
            "is a preset: write preset = \"q4_0-hadamard\"",
        ),
        ("pack = \"q8_0\"", "`q8_0` belongs under `encode`"),
        ("encode = { name = \"q8_0\" }", "has no `method`"),
        (
            "encode = { method = \"q8_0\", bits = 4 }",
            "unknown parameter `bits`",
        ),
        (
            "encode = { k = \"q8_0\", v = \"q8_0\", tail = 3 }",
            "allowed beside each other: k, v",
        ),
        ("label = \"\"", "1 to 80 characters"),
        ("encode = 4", "must name a stage of `encode`"),
    ] {
        has(&refused(&format!("[[strategy]]\n{line}\n")), &[answer]);
    }
}

#[test]
fn models_and_texts_are_looked_up() {
    let change = |from: &str, to: &str| {
        let text = format!("{HEAD}[[strategy]]\n").replace(from, to);
        parse("t.toml", &text, &[])
            .expect_err("refused")
            .to_string()
    };
    let model = "smollm2-135m-instruct";
    has(
        &change(model, "smollm2-135m"),
        &["did you mean `smollm2-135m-instruct`?"],
    );
    has(
        &change(model, "no/such.gguf"),
        &["no file or folder `no/such.gguf`"],
    );
    has(&change(model, "hub:name"), &["must be hub:org/name"]);
    has(
        &change("quickstart-prose", "./nope.txt"),
        &["can't read `./nope.txt`"],
    );
    has(
        &change("quickstart-prose", "calibration-mixed"),
        &["never evaluated"],
    );
    has(
        &change(
            "[\"quickstart-prose\"]",
            "[\"quickstart-prose\", \"quickstart-prose\"]",
        ),
        &["the same text"],
    );
    has(
        &change("[\"quickstart-prose\"]", "[]"),
        &["must be a list of names"],
    );
}

#[test]
fn bars_name_what_is_there() {
    let strategies = "context = [64, 128]\ncontinuation = [\"exact\", \"strategy\"]\n\
        [[strategy]]\nlabel = \"mine\"\npreset = \"k8v4\"\n[[strategy]]\npreset = \"q4_0-tail\"\ntail = [16, 32]\n\
        [[strategy]]\nencode = \"q8_0\"\n";
    let p = plan(&format!(
        "{strategies}[[bar]]\nstrategy = [\"k8v4\", \"q4_0-tail\", \"q8_0\"]\nmetric = \"kld\"\nat_most = 0.003\n\
         domain = \"prose\"\ncontext = 64\ncontinuation = \"exact\"\n\
         [[bar]]\nstrategy = \"mine\"\nmetric = \"same_top\"\nat_least = 1\n"
    ));
    let named: Vec<&str> = p.bars.iter().map(|b| b.strategy.as_str()).collect();
    // A preset stands for all that start from it; a label for itself.
    assert_eq!(
        named,
        [
            "mine",
            "q4_0-tail tail 16",
            "q4_0-tail tail 32",
            "q8_0",
            "mine"
        ]
    );
    assert_eq!(p.bars[0].metric, Metric::Kld);
    assert_eq!(p.bars[0].bound, Bound::AtMost(0.003));
    assert_eq!(p.bars[0].n_tokens, Some(64));
    assert_eq!(p.bars[4].bound, Bound::AtLeast(1.0));
    let of_another = plan(&format!(
        "{strategies}[[bar]]\nstrategy = \"q8_0\"\nmetric = \"kld\"\nat_most = 1.3\ntimes = \"k8v4\"\n"
    ));
    assert_eq!(of_another.bars[0].times.as_deref(), Some("mine"));
    assert_eq!(of_another.bars[0].limit(), "≤ 1.3 × mine");
    // What must be shown makes no result.
    let bare = plan(strategies);
    assert_eq!(bare.cells("m"), p.cells("m"));
    assert_eq!(
        serde_json::to_string(&bare).unwrap(),
        serde_json::to_string(&p).unwrap()
    );

    // A file's bar that an override leaves without its protocol or strategy goes; a bar of an override does not.
    let body = "context = 64\n[[strategy]]\nencode = \"q8_0\"\n\
        [[bar]]\nstrategy = \"q8_0\"\nmetric = \"kld\"\nat_most = 1\ncontext = 64\n";
    assert_eq!(with(body, &["seed=1"]).unwrap().bars.len(), 1);
    assert!(
        with(body, &["protocol.context=32"])
            .unwrap()
            .bars
            .is_empty()
    );
    assert!(
        with(body, &["strategy.0.encode=q4_0"])
            .unwrap()
            .bars
            .is_empty()
    );
    let own = "bar=[{ strategy = \"q4_0\", metric = \"kld\", at_most = 1 }]";
    has(
        &with(body, &[own]).unwrap_err(),
        &["no strategy here is called \"q4_0\""],
    );

    let percent = "bar=[{ strategy = \"q8_0\", metric = \"same_top\", at_least = 96.5 }]";
    has(
        &with(body, &[percent]).unwrap_err(),
        &["bar.0.at_least: is 96.5, must be from 0 to 1: same_top is a fraction"],
    );

    let text = refused(
        "context = 64\n[[strategy]]\nencode = \"q8_0\"\n\
         [[bar]]\nstrategy = [\"q80\", 3]\nmetric = \"kl\"\nat_most = \"x\"\ndata = \"quickstart-prse\"\n\
         domain = \"code\"\ncontext = 65\n\
         [[bar]]\nmetric = \"kld\"\nat_most = 1\nat_least = 0\nprotocol = \"stream\"\ntop = 1\n\
         times = [\"q8_0\", \"q8_0\"]\n",
    );
    has(
        &text,
        &[
            "t.toml:11:13: bar.0.strategy: no strategy here is called \"q80\"; did you mean `q8_0`?",
            "bar.0.strategy: is 3, must be a label",
            "bar.0.metric: is \"kl\", must be one of \"kld\"",
            "bar.0.at_most: is \"x\", must be a finite number",
            "bar.0.data: is \"quickstart-prse\", must be one of \"quickstart-prose\"; did you mean",
            "bar.0.domain: is \"code\", must be one of \"prose\"",
            "t.toml:16:11: bar.0: belongs to no protocol of this experiment; there are: compress-once, context 64, \
             continuation strategy",
            "bar.1.strategy: is missing",
            "bar.1.times: is a list of 2, must be one label of this experiment",
            "bar.1.at_least: stands beside `at_most`",
            "bar.1.protocol: is \"stream\", must be one of \"compress-once\"",
            "bar.1.top: unknown key",
        ],
    );
}

#[test]
fn a_strategy_may_be_for_one_side() {
    let p = plan(
        "[[strategy]]\nencode = \"q4_0\"\nproject = \"hadamard\"\nsides = [\"both\", \"k\", \"v\"]\n",
    );
    assert_eq!(
        labels(&p),
        [
            "hadamard+q4_0",
            "hadamard+q4_0 k-only",
            "hadamard+q4_0 v-only"
        ]
    );
    let sides = |i: usize| {
        let s = &p.strategies[i];
        (
            &s.encode_k.name[..],
            &s.encode_v.name[..],
            s.project_k.len(),
            s.project_v.len(),
        )
    };
    assert_eq!(sides(1), ("q4_0", "f16", 1, 0));
    assert_eq!(sides(2), ("f16", "q4_0", 0, 1));
    let p = plan(
        "[[strategy]]\npreset = \"q4_0-hadamard\"\nsides = \"v\"\n[[strategy]]\nlabel = \"x\"\nsides = [\"k\"]\nencode = \"q8_0\"\n",
    );
    assert_eq!(labels(&p), ["q4_0-hadamard v-only", "x k-only"]);
    assert_eq!(p.strategies[0].tail.k, 32);
    has(
        &refused("[[strategy]]\nsides = \"kv\"\n"),
        &["must be one of \"both\", \"k\", \"v\""],
    );
}

#[test]
fn predictions_that_cannot_be_are_refused_where_they_stand() {
    let told = |strategy: &str| {
        refused(&format!(
            "[calibration]\nset = \"calibration-mixed\"\n[[strategy]]\n{strategy}\n"
        ))
    };
    has(
        &told("project = [\"hadamard\", \"aqua\"]"),
        &["strategy.0.project", "`aqua` must come first on both sides"],
    );
    has(
        &told("project = { k = \"aqua\" }"),
        &["`aqua` must come first on both sides"],
    );
    has(
        &told("project = \"aqua\"\nretain = { method = \"window\", recent = 64 }"),
        &["`window` would take that away: leave one of the two out"],
    );
    has(
        &told("project = \"aqua\"\ntail = { k = 0, v = 32 }"),
        &["`tail` is 0 for K and 32 for V: give both the same"],
    );
    let sound = "[calibration]\nset = \"calibration-mixed\"\n[[strategy]]\n\
                 project = { k = \"aqua\", v = [\"aqua\", \"hadamard\"] }\nencode = \"q4_0\"\n";
    assert_eq!(labels(&plan(sound)), ["aqua/aqua+hadamard+q4_0"]);
}

#[test]
fn a_file_extends_another_and_paths_follow_their_file() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    };
    write("shared/my.txt", "some words");
    write(
        "shared/base.toml",
        &format!(
            "name = \"base\"\nseed = 7\n{HEAD}context = 64\n[[strategy]]\nencode = \"q8_0\"\n"
        )
        .replace("quickstart-prose", "my.txt"),
    );
    let child = write(
        "child.toml",
        "extends = \"shared/base.toml\"\n[protocol]\nscore = 32\n[[strategy]]\nencode = \"f16\"\n",
    );
    let p = load(&child, &[]).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(
        (p.name.as_str(), p.seed, p.protocols[0].n_tokens()),
        ("child", 7, 96)
    );
    assert_eq!(labels(&p), ["f16"]);
    assert_eq!(
        p.data[0].path.as_deref(),
        Some(dir.path().join("shared/my.txt").as_path())
    );
    let stream = write(
        "stream.toml",
        "extends = \"child.toml\"\n[protocol]\nkind = \"stream\"\n",
    );
    let p = load(&stream, &[]).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(p.protocols[0].kind(), "stream");

    write("a.toml", "extends = \"b.toml\"");
    let b = write("b.toml", "extends = \"a.toml\"");
    has(
        &load(&b, &[]).unwrap_err().to_string(),
        &["a.toml:1:11: extends:", "extends itself"],
    );
    let c = write("c.toml", "extends = \"none.toml\"");
    has(
        &load(&c, &[]).unwrap_err().to_string(),
        &["c.toml:1:11: extends: can't read"],
    );
    let empty = write("empty.txt", " \n");
    let text = with(
        "[[strategy]]\n",
        &[&format!("data.sets={}", empty.display())],
    )
    .unwrap_err();
    has(&text, &["is empty"]);
    has(
        &load(Path::new("no.toml"), &[]).unwrap_err().to_string(),
        &["can't read `no.toml`"],
    );
}

#[test]
fn a_cell_is_what_can_change_its_numbers() {
    let base = plan("[[strategy]]\nencode = \"q8_0\"\n");
    let id = |p: &Plan, model: &str| p.cells(model)[0].id.clone();
    let first = id(&base, "m");
    assert_eq!(first.len(), 12);
    let mut same = base.clone();
    (same.chunk, same.threads, same.name) = (7, Some(3), "other".into());
    same.strategies[0].label = "another".into();
    same.data[0].name = "another".into();
    assert_eq!(id(&same, "m"), first);
    assert_ne!(id(&base, "another model"), first);
    for change in [
        "seed=1",
        "protocol.score=255",
        "protocol.bos=never",
        "strategy.0.tail=1",
        "strategy.0.encode=q4_0",
        "protocol.latency.steps=2",
        "protocol.memory_every=16",
        "protocol.layers=true",
        "arithmetic=int8",
        "data.sets=quickstart-code",
    ] {
        let p = with("[[strategy]]\nencode = \"q8_0\"\n", &[change]).unwrap();
        assert_ne!(id(&p, "m"), first, "{change}");
    }
}

#[test]
fn the_arithmetic_is_f32_unless_said_and_an_unknown_one_is_refused() {
    let body = "[[strategy]]\nencode = \"q8_0\"\n";
    let json = |p: &Plan| serde_json::to_string(p).unwrap();
    assert_eq!(plan(body).arithmetic, Arithmetic::F32);
    assert!(!json(&plan(body)).contains("arithmetic"));
    let p = with(body, &["arithmetic=int16"]).unwrap();
    assert_eq!(p.arithmetic, Arithmetic::Int16);
    assert_eq!(serde_json::from_str::<Plan>(&json(&p)).unwrap(), p);
    has(
        &with(body, &["arithmetic=int18"]).unwrap_err(),
        &[
            "arithmetic: is \"int18\", must be one of \"f32\", \"int16\", \"int8\"; did you mean `int8`?",
        ],
    );
}

#[test]
fn a_plan_is_held_against_the_model() {
    let p = plan("context = 200\n[[strategy]]\nencode = \"q8_0\"\n");
    let geometry = Geometry { layers: Vec::new() };
    let limits = |context_length| ModelLimits {
        name: "tiny",
        sha256: "",
        context_length,
        geometry: &geometry,
    };
    assert!(p.check_model(&limits(456)).is_ok());
    let text = p.check_model(&limits(455)).unwrap_err().to_string();
    has(
        &text,
        &[
            "t.toml:7:11: protocol.context: context 200 + score 256 need 456 positions, `tiny` has 455",
        ],
    );
}

#[test]
fn every_preset_is_an_experiment() {
    let learnt = "[calibration]\nset = \"calibration-mixed\"\n[[strategy]]\n";
    for preset in PRESETS {
        let by_name = plan(&format!("{learnt}preset = \"{}\"\n", preset.name));
        let spelled = plan(&format!("{learnt}{}\n", preset.composition));
        assert_eq!(labels(&by_name), [preset.name]);
        let mut a = by_name.strategies[0].clone();
        a.label = spelled.strategies[0].label.clone();
        assert_eq!(a, spelled.strategies[0], "{}", preset.name);
    }
}

#[test]
fn every_experiment_of_the_repository_is_sound() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("experiments");
    let mut n = 0;
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "toml") {
            let p = load(&path, &[]).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(
                Some(p.name.as_str()),
                path.file_stem().and_then(|s| s.to_str())
            );
            n += 1;
        }
    }
    assert!(n >= 4, "{n} experiments");
}

/// Bytes cut out, doubled, swapped and overwritten: refused or planned, never a panic, and never without a word.
fn mutate(text: &str, edits: &[(usize, u8, u8)]) -> String {
    let mut bytes = text.as_bytes().to_vec();
    for &(at, kind, byte) in edits {
        if bytes.is_empty() {
            break;
        }
        let at = at % bytes.len();
        let end = (at + usize::from(byte) % 16).min(bytes.len());
        match kind % 5 {
            0 => bytes[at] = byte,
            1 => bytes.insert(at, byte),
            2 => drop(bytes.drain(at..end)),
            3 => {
                let piece = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
            _ => {
                let words: [&[u8]; 8] = [
                    b"[",
                    b"]",
                    b"\"",
                    b" = ",
                    b"{ method = ",
                    b"[[strategy]]\n",
                    b"-1",
                    b"1e400",
                ];
                bytes.splice(
                    at..at,
                    words[usize::from(byte) % words.len()].iter().copied(),
                );
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

const SOUND: &str = r#"schema = 1
name = "x"
seed = 3
model = "smollm2-135m-instruct"
threads = 2
[data]
sets = ["quickstart-prose", "quickstart-code"]
documents = 2
[protocol]
kind = "compress-once"
context = [64, 128]
score = 32
continuation = ["exact", "strategy"]
floor = true
latency = { steps = 4 }
[calibration]
set = "calibration-mixed"
tokens = 512
[[strategy]]
encode = ["f16", { method = "q8_0" }]
tail = [0, 32]
sweep = { sinks = [0, 4], project = [[], []] }
[[strategy]]
preset = "k8v4"
keys = "pre_rope"
exact = "f32"
"#;

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig {
        cases: std::env::var("KVLAB_FUZZ_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(400),
        ..Default::default()
    })]

    #[test]
    fn no_bytes_make_the_reader_panic(
        edits in proptest::collection::vec((0usize..2000, 0u8..=255, 0u8..=255), 1..12),
        set in ".{0,40}",
    ) {
        match parse("f.toml", &mutate(SOUND, &edits), &[set]) {
            Ok(plan) => {
                let json = serde_json::to_string(&plan).expect("a plan is JSON");
                let back: Plan = serde_json::from_str(&json).expect("and comes back");
                proptest::prop_assert_eq!(back, plan);
            }
            Err(problems) => proptest::prop_assert!(!problems.is_empty()),
        }
    }
}
