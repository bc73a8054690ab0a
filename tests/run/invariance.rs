//! What must not change a number: threads, chunks. And what a user reads: tables, JSON.

use std::collections::BTreeMap;

use kvlab::eval::records::{CellStatus, ItemRecord};
use serde_json::Value;

use super::support::{Bench, ended, model_path};

/// Records as they stand in the journal.
fn lines(items: &[ItemRecord]) -> Vec<String> {
    items
        .iter()
        .map(|item| serde_json::to_string(item).expect("a record is JSON"))
        .collect()
}

#[test]
fn one_thread_and_two_write_the_same_records_and_tables() {
    if model_path().is_none() {
        return;
    }
    let bench = Bench::new(
        r#"
data = { sets = ["quickstart-code"], documents = 2 }
protocol = { kind = "compress-once", context = 96, score = 32, floor = true, latency = { steps = 0 } }
[[strategy]]
encode = ["f16", "nvfp4"]
[[strategy]]
preset = "q4_0-hadamard"
[[strategy]]
retain = { method = "knorm", kept_fraction = 0.5 }
"#,
    );
    let one = bench.contents("one", &["--threads", "1"]);
    let two = bench.contents("two", &["--threads", "2"]);
    assert_eq!(one.items.len(), 2 * 4);
    assert_eq!(lines(&one.items), lines(&two.items));
    for table in ["table.csv", "memory.csv", "pairs.csv"] {
        assert_eq!(
            bench.file("one", table),
            bench.file("two", table),
            "{table}"
        );
    }
    for item in &one.items {
        assert_eq!(item.n_scored, 31);
        assert!(
            item.kld_sum > 0.0,
            "a lossy cache that changes nothing: {item:?}"
        );
        let floor = item.nll_floor.expect("the floor ran");
        assert!(
            floor > item.nll_reference,
            "the context is worth nothing: {item:?}"
        );
    }
}

#[test]
fn chunks_write_the_same_records_as_decoding_token_by_token() {
    if model_path().is_none() {
        return;
    }
    let bench = Bench::new(
        r#"
data = { sets = ["quickstart-prose"] }
protocol = { kind = "stream", window = 140, windows = 1, latency = { steps = 0 } }
[[strategy]]
encode = ["f16", "q8_0", "q4_0", "nvfp4"]
[[strategy]]
retain = { method = "window", recent = 60, sinks = 4 }
[[strategy]]
project = "hadamard"
encode = "q4_0"
[[strategy]]
encode = "nvfp4"
tail = 20
sinks = 2
"#,
    );
    // Only attention's working memory depends on how many queries go at once.
    let run = |results: &str, chunk: &str| {
        let setting = format!("protocol.chunk={chunk}");
        let mut contents = bench.contents(results, &["-s", &setting]);
        for memory in contents.items.iter_mut().flat_map(|i| &mut i.memory) {
            assert!(memory.report.scratch_bytes > 0);
            memory.report.scratch_bytes = 0;
        }
        contents
    };
    let whole = run("whole", "512");
    assert_eq!(whole.items.len(), 7);
    assert!(
        whole
            .items
            .iter()
            .all(|i| i.n_scored == 139 && i.kld_sum > 0.0)
    );
    for chunk in ["7", "1"] {
        let cut = run(chunk, chunk);
        assert_eq!(lines(&whole.items), lines(&cut.items), "chunks of {chunk}");
    }
}

#[test]
fn a_strategy_that_breaks_fails_alone_and_json_tells_it() {
    if model_path().is_none() {
        return;
    }
    let bench = Bench::new(
        r#"
data = { sets = ["quickstart-legal"], documents = 1 }
protocol = { kind = "compress-once", context = 24, score = 8, latency = { steps = 2 } }
[[strategy]]
encode = "q8_0"
[[strategy]]
label = "parked"
place = "file"
"#,
    );
    // Pages are parked in the system's temporary folder: one that is gone breaks that strategy, in its first item.
    let gone = bench.path().join("gone");
    let mut command = bench.command("results", &["--json"]);
    let ran = ended(command.env("TMPDIR", &gone));
    assert_eq!(ran.code, Some(3), "{ran:?}");
    let json: Value = serde_json::from_str(&ran.out).expect("JSON");
    assert!(ran.out.contains("can't make a file in"), "{json:#}");
    let contents = bench.read("results");
    assert!(!contents.is_finished);
    let labels: BTreeMap<&str, &str> = contents
        .header
        .cells
        .iter()
        .map(|c| (c.id.as_str(), c.label.as_str()))
        .collect();
    let scored: Vec<&str> = contents
        .items
        .iter()
        .map(|i| labels[i.cell.as_str()])
        .collect();
    assert_eq!(scored, ["q8_0"], "the other cell ran on");
    for cell in &contents.cells {
        match (labels[cell.id.as_str()], &cell.status) {
            ("parked", CellStatus::Failed { message }) => {
                assert!(message.contains("can't make a file in"), "{message}");
            }
            ("q8_0", CellStatus::Done) => {}
            other => panic!("{other:?}"),
        }
    }
    let latency = contents.items[0]
        .latency
        .as_ref()
        .expect("times were asked for");
    assert!(latency.step_ms.iter().all(|&ms| ms > 0.0) && latency.depth >= 24);
    // The same command tries that cell again, and the others are kept; here it is mended.
    let kept = contents.items;
    let mended = bench.contents("results", &[]);
    assert!(mended.is_finished && mended.cells.iter().all(|c| c.status == CellStatus::Done));
    assert_eq!(mended.items.len(), 2);
    assert!(mended.items.contains(&kept[0]));
}
