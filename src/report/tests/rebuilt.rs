//! Pages that were coded anew: told where there are any, and nowhere else.

use super::*;
use crate::cache::{MemoryReport, Rebuilt};

/// Two items with three pages and one, and what changed in them.
fn with_rebuilt() -> Report {
    let dir = tempfile::tempdir().unwrap();
    let mut items = all_items();
    let ids: Vec<String> = header()
        .cells
        .iter()
        .filter(|cell| cell.label == LABELS[1])
        .map(|cell| cell.id.clone())
        .collect();
    let mine = items.iter_mut().flatten();
    let last = mine
        .filter(|r| ids.contains(&r.cell))
        .filter_map(|r| r.memory.last_mut());
    for (i, record) in last.enumerate() {
        record.report.rebuilt = Rebuilt {
            n_pages: 3 - 2 * (i as u64 % 2),
            error_squares: 0.25,
            squares: 100.0,
        };
    }
    let mut bundle = bundle(dir.path(), &items, &ends());
    bundle.finish().unwrap();
    write(bundle.path()).unwrap()
}

#[test]
fn pages_that_were_coded_anew_are_told() {
    let (plain, report) = (finished(), with_rebuilt());
    let memory = row(&report, "all data", LABELS[1]).scores().unwrap().memory;
    let (n, error) = memory.unwrap().rebuilt().unwrap();
    close(n, 2.0);
    close(error, 0.05);
    let of = |report: &Report| {
        let table = markdown::results(report);
        [
            table.contains("| pages rebuilt (error %) |") && table.contains("| 2 (5.00)  "),
            table.contains("Pages rebuilt: pages of rows coded together"),
            markdown::memory(report).contains("pages rebuilt | rebuild error % |"),
            csv::results_json(report).contains("\"pages_rebuilt\":2.0"),
            csv::results_json(report).contains("\"rebuild_error\":0.05"),
        ]
    };
    assert_eq!(of(&report), [true; 5], "{}", csv::results_json(&report));
    assert_eq!(of(&plain), [false; 5]);
    for (name, writer) in FILES {
        let told = name.ends_with(".md") || name.ends_with(".tex");
        assert!(told || writer(&plain) == writer(&report), "{name}");
    }
}

#[test]
fn a_record_of_bytes_without_any_is_as_it_was() {
    let text = |report: &MemoryReport| serde_json::to_string(report).unwrap();
    let mut report = MemoryReport::default();
    assert!(!text(&report).contains("rebuilt"));
    assert_eq!(
        serde_json::from_str::<MemoryReport>(&text(&report)).unwrap(),
        report
    );
    report.rebuilt.n_pages = 2;
    report.rebuilt.squares = 0.5;
    assert_eq!(
        serde_json::from_str::<MemoryReport>(&text(&report)).unwrap(),
        report
    );
}
