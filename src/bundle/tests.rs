//! Bundles: resumption, refusals, verification.

use std::fs;
use std::path::Path;

use super::fixture::{all_items, ends, environment, header, items};
use super::manifest::MANIFEST;
use super::*;

fn open(results_dir: &Path, executable: &str, mode: Mode) -> Result<Bundle, BundleError> {
    let start = Start {
        results_dir,
        plan: &serde_json::json!({"model": "abacus-1b", "tail": [0, 32]}),
        header: &header(),
        environment: &environment(executable),
    };
    Bundle::open_or_create(&start, mode)
}

/// What a run does: each item that is not there yet, then the cells' ends, then the seal.
fn go_on(bundle: &mut Bundle) {
    for batch in all_items() {
        if !batch.iter().all(|r| bundle.is_done(&r.cell, r.item)) {
            bundle.append(&batch).unwrap();
        }
    }
    for end in ends() {
        if !bundle.ended().iter().any(|c| c.id == end.id) {
            bundle.append_cell(&end).unwrap();
        }
    }
    bundle.finish().unwrap();
}

#[test]
fn a_run_states_itself_before_it_works() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = open(dir.path(), "x", Mode::Resume).unwrap();
    assert_eq!(bundle.state(), State::New);
    assert_eq!(bundle.path(), dir.path().join("synthetic").join("0123abcd"));
    for name in [PLAN, HEADER, ENVIRONMENT, JOURNAL] {
        assert!(bundle.path().join(name).exists(), "{name}");
    }
    let contents = Bundle::read(bundle.path()).unwrap();
    assert_eq!(contents.header, header());
    assert!(contents.items.is_empty() && !contents.is_finished);
}

#[test]
fn killed_anywhere_and_resumed_it_is_the_same_bundle() {
    let whole_dir = tempfile::tempdir().unwrap();
    let mut whole = open(whole_dir.path(), "x", Mode::Resume).unwrap();
    go_on(&mut whole);
    let journal = fs::read(whole.path().join(JOURNAL)).unwrap();
    let expected = Bundle::read(whole.path()).unwrap();

    let dir = tempfile::tempdir().unwrap();
    let folder = open(dir.path(), "x", Mode::Resume)
        .unwrap()
        .path()
        .to_owned();
    // Every byte near a line's end, where whole and torn meet, and a sample of the others (the journal's own test
    // cuts at each byte).
    let near_end =
        |at: usize| journal[at.saturating_sub(2)..(at + 2).min(journal.len())].contains(&b'\n');
    for cut in (0..=journal.len()).filter(|&at| at % 1009 == 0 || near_end(at)) {
        fs::write(folder.join(JOURNAL), &journal[..cut]).unwrap();
        let _ = fs::remove_file(folder.join(MANIFEST));
        let mut bundle = open(dir.path(), "x", Mode::Resume).unwrap();
        assert!(matches!(bundle.state(), State::Resumed { .. }));
        go_on(&mut bundle);
        assert_eq!(
            fs::read(folder.join(JOURNAL)).unwrap(),
            journal,
            "cut at {cut}"
        );
        for name in RAW_FILES {
            assert_eq!(
                fs::read(folder.join(name)).unwrap(),
                fs::read(expected.path.join(name)).unwrap()
            );
        }
    }
}

#[test]
fn killed_while_it_stated_itself() {
    for missing in [PLAN, HEADER, ENVIRONMENT] {
        let dir = tempfile::tempdir().unwrap();
        let folder = open(dir.path(), "x", Mode::Resume)
            .unwrap()
            .path()
            .to_owned();
        fs::remove_file(folder.join(missing)).unwrap();
        let bundle = open(dir.path(), "x", Mode::Resume).unwrap();
        assert_eq!(bundle.path(), folder);
        assert!(folder.join(missing).exists());
    }
}

#[test]
fn a_finished_run_says_so_and_takes_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    go_on(&mut open(dir.path(), "x", Mode::Resume).unwrap());
    let mut again = open(dir.path(), "x", Mode::Resume).unwrap();
    assert_eq!(again.state(), State::Finished);
    assert!(matches!(
        again.append(&items(0, 0)).unwrap_err(),
        BundleError::Finished(_)
    ));
    assert!(Bundle::read(again.path()).unwrap().is_finished);
}

#[test]
fn fresh_and_other_engines_begin_anew() {
    let dir = tempfile::tempdir().unwrap();
    let name = |b: &Bundle| b.path().file_name().unwrap().to_str().unwrap().to_owned();
    go_on(&mut open(dir.path(), "x", Mode::Resume).unwrap());
    let other = open(dir.path(), "y", Mode::Resume).unwrap();
    assert_eq!(
        (name(&other).as_str(), other.state()),
        ("0123abcd-2", State::New)
    );
    drop(other);
    let fresh = open(dir.path(), "y", Mode::Fresh).unwrap();
    assert_eq!(
        (name(&fresh).as_str(), fresh.state()),
        ("0123abcd-3", State::New)
    );
    drop(fresh);
    let newest = open(dir.path(), "y", Mode::Resume).unwrap();
    assert_eq!(name(&newest), "0123abcd-3");
}

#[test]
fn one_writer_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path(), "x", Mode::Resume).unwrap();
    let error = open(dir.path(), "x", Mode::Resume).unwrap_err();
    assert!(matches!(error, BundleError::Locked(_)), "{error}");
    assert!(Bundle::read(first.path()).is_ok(), "readers do not wait");
}

#[test]
fn bad_records_are_refused_whole() {
    let dir = tempfile::tempdir().unwrap();
    let mut bundle = open(dir.path(), "x", Mode::Resume).unwrap();
    let mut batch = items(0, 0);
    batch[2].kld_sum = f64::INFINITY;
    assert!(matches!(bundle.append(&batch), Err(BundleError::Record(_))));
    batch = items(0, 0);
    batch[1].cell = "unknown".into();
    assert!(matches!(
        bundle.append(&batch),
        Err(BundleError::Unexpected { .. })
    ));
    batch = items(0, 0);
    batch[1] = batch[0].clone();
    assert!(matches!(
        bundle.append(&batch),
        Err(BundleError::Unexpected { .. })
    ));
    assert!(Bundle::read(bundle.path()).unwrap().items.is_empty());
    bundle.append(&items(0, 0)).unwrap();
    assert!(bundle.is_done("c01", 0) && !bundle.is_done("c01", 1));
    assert!(matches!(
        bundle.append(&items(0, 0)),
        Err(BundleError::Unexpected { .. })
    ));
}

#[test]
fn altered_files_do_not_verify() {
    let dir = tempfile::tempdir().unwrap();
    let mut bundle = open(dir.path(), "x", Mode::Resume).unwrap();
    go_on(&mut bundle);
    for name in RAW_FILES {
        let path = bundle.path().join(name);
        let kept = fs::read(&path).unwrap();
        let mut altered = kept.clone();
        let last = altered.len() - 1;
        altered[last] ^= 1;
        fs::write(&path, altered).unwrap();
        let error = Bundle::read(bundle.path()).unwrap_err();
        assert!(
            matches!(error, BundleError::Altered { .. }),
            "{name}: {error}"
        );
        fs::write(&path, kept).unwrap();
    }
    let manifest = bundle.path().join(MANIFEST);
    let without = fs::read_to_string(&manifest)
        .unwrap()
        .replace(JOURNAL, "other");
    fs::write(&manifest, without).unwrap();
    assert!(matches!(
        Bundle::read(bundle.path()),
        Err(BundleError::Altered { .. })
    ));
}

#[test]
fn another_plan_of_the_same_id_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = open(dir.path(), "x", Mode::Resume)
        .unwrap()
        .path()
        .to_owned();
    fs::write(folder.join(PLAN), "{}").unwrap();
    let error = open(dir.path(), "x", Mode::Resume).unwrap_err();
    assert!(matches!(error, BundleError::OtherRun(_)), "{error}");
    fs::write(folder.join(PLAN), "{").unwrap();
    let error = open(dir.path(), "x", Mode::Resume).unwrap_err();
    assert!(matches!(error, BundleError::Json { .. }), "{error}");
}

#[test]
fn names_that_are_no_folders_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (experiment, hash) in [
        ("../out", "0123abcd"),
        ("", "0123abcd"),
        ("a", "123"),
        ("a", "../../.."),
    ] {
        let mut header = header();
        header.experiment = experiment.into();
        header.plan_hash = hash.into();
        let start = Start {
            results_dir: dir.path(),
            plan: &serde_json::Value::Null,
            header: &header,
            environment: &environment("x"),
        };
        let error = Bundle::open_or_create(&start, Mode::Resume).unwrap_err();
        assert!(matches!(error, BundleError::Name { .. }), "{error}");
    }
    assert!(fs::read_dir(dir.path()).unwrap().next().is_none());
}

#[test]
fn a_missing_bundle_is_an_io_error() {
    let error = Bundle::read(Path::new("no/such/bundle")).unwrap_err();
    assert!(matches!(error, BundleError::Io { .. }), "{error}");
    let error = write_atomic(Path::new("no/such/folder/file"), b"x").unwrap_err();
    assert!(error.to_string().contains("no/such/folder/file"), "{error}");
}
