//! What must not change a number: threads, chunks. And what a user reads: tables, JSON.

use std::collections::BTreeMap;

use kvlab::bundle::Contents;
use kvlab::data::{DataRef, Lookup};
use kvlab::eval::records::{CellStatus, ItemRecord};
use kvlab::model::load;
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
    assert_table_is_counted_by_hand(&bench.file("whole", "table.csv"), &whole);
    for chunk in ["7", "1"] {
        let cut = run(chunk, chunk);
        assert_eq!(lines(&whole.items), lines(&cut.items), "chunks of {chunk}");
    }
}

/// Perplexity per token and bits per byte of one window: its first token is no target, its bytes don't count.
fn assert_table_is_counted_by_hand(table: &str, contents: &Contents) {
    let text = DataRef::named("quickstart-prose").and_then(|d| d.load(&Lookup::default()));
    let text = text.expect("a text of the program").text;
    let tokenizer = load(model_path().expect("it was there"))
        .expect("a sound model")
        .tokenizer;
    let ids = tokenizer.encode(&text).expect("tokens");
    let n_bytes = |n_tokens: usize| {
        let whole = |n: &usize| {
            text.is_char_boundary(*n)
                && tokenizer.encode(&text[..*n]).expect("tokens") == ids[..n_tokens]
        };
        (1..4000).find(whole).expect("tokens end somewhere")
    };
    let n_bytes = n_bytes(140) - n_bytes(1);
    let rows: Vec<Vec<&str>> = table.lines().map(fields).collect();
    let column = |name: &str| rows[0].iter().position(|c| *c == name).expect("a column");
    assert_eq!(rows.len(), 1 + contents.items.len());
    for (item, cell) in contents.items.iter().zip(cells_by_id(contents)) {
        let row = rows
            .iter()
            .find(|r| r[column("strategy")] == cell)
            .expect("a row");
        let near = |name: &str, by_hand: f64| {
            let told: f64 = row[column(name)].parse().expect("a number");
            assert!(
                (told / by_hand - 1.0).abs() < 1e-9,
                "{cell}, {name}: {told}, by hand {by_hand}"
            );
        };
        assert_eq!(item.bytes_text, n_bytes);
        let nll: f64 = item.tokens.nll.iter().map(|&x| f64::from(x)).sum();
        assert!((nll - item.nll).abs() < 1e-3);
        near("ppl", (item.nll / 139.0).exp());
        near(
            "bits_per_byte",
            item.nll / std::f64::consts::LN_2 / n_bytes as f64,
        );
        near("kld", item.kld_sum / 139.0);
    }
}

/// Fields of a line of CSV; those with a comma inside stand in quotes.
fn fields(line: &str) -> Vec<&str> {
    let mut quoted = false;
    line.split(|c| {
        quoted ^= c == '"';
        c == ',' && !quoted
    })
    .collect()
}

/// Labels of the cells in the order of the records.
fn cells_by_id(contents: &Contents) -> Vec<&str> {
    let mut cells: Vec<_> = contents.header.cells.iter().collect();
    cells.sort_by(|a, b| a.id.cmp(&b.id));
    cells.iter().map(|c| c.label.as_str()).collect()
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
