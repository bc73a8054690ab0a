//! A run that is killed, or stopped by Ctrl-C, goes on and ends as if nothing had happened.

use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use kvlab::bundle::Contents;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::support::{Bench, model_path};

const PATIENCE: Duration = Duration::from_secs(120);

const EXPERIMENT: &str = r#"
data = { sets = ["quickstart-prose", "quickstart-code", "quickstart-legal"], documents = 4 }
protocol = { kind = "compress-once", context = 48, score = 16, floor = true, latency = { steps = 0 } }
[[strategy]]
encode = ["f16", "nvfp4"]
"#;

/// Lines of the journal; `None` before there is one.
fn n_lines(bench: &Bench, results: &str) -> Option<usize> {
    let journal = bench.bundle(results)?.join("journal.jsonl");
    let bytes = std::fs::read(journal).ok()?;
    Some(bytes.iter().filter(|&&b| b == b'\n').count())
}

/// Starts the program and waits until the journal has `goal` lines.
fn start_until(bench: &Bench, results: &str, goal: usize) -> Child {
    let mut child = bench.command(results, &[]).spawn().expect("it starts");
    let pause = Duration::from_millis(2);
    let mut waited = Duration::ZERO;
    while n_lines(bench, results).is_none_or(|n| n < goal) {
        let ended = child.try_wait().expect("its state");
        assert!(ended.is_none(), "it ended before it could be stopped");
        assert!(waited < PATIENCE, "no {goal} lines in {PATIENCE:?}");
        std::thread::sleep(pause);
        waited += pause;
    }
    child
}

fn assert_equal(bench: &Bench, a: (&str, &Contents), b: (&str, &Contents)) {
    assert_eq!(a.1.items, b.1.items);
    let ends = |c: &Contents| -> Vec<_> {
        c.cells
            .iter()
            .map(|c| (c.id.clone(), c.status.clone()))
            .collect()
    };
    assert_eq!(ends(a.1), ends(b.1));
    for table in ["table.csv", "memory.csv", "pairs.csv"] {
        assert_eq!(bench.file(a.0, table), bench.file(b.0, table), "{table}");
    }
}

fn is_finished(bundle: &Path) -> bool {
    bundle.join("manifest.json").exists()
}

#[test]
fn a_run_killed_at_any_point_ends_as_an_undisturbed_one() {
    if model_path().is_none() {
        return;
    }
    let bench = Bench::new(EXPERIMENT);
    let undisturbed = bench.contents("whole", &[]);
    assert_eq!(undisturbed.items.len(), 3 * 4 * 2);
    let mut rng = ChaCha8Rng::seed_from_u64(53);
    for more in [0, 0, 1, 2, 1, 1] {
        let before = n_lines(&bench, "killed").unwrap_or(0);
        let mut child = start_until(&bench, "killed", before + more);
        std::thread::sleep(Duration::from_millis(rng.random_range(0..60)));
        child.kill().expect("it is running");
        child.wait().expect("it is dead");
        assert!(!is_finished(&bench.bundle("killed").expect("a bundle")));
    }
    // A line that was being written when the power went.
    let journal = bench
        .bundle("killed")
        .expect("a bundle")
        .join("journal.jsonl");
    let mut bytes = std::fs::read(&journal).expect("the journal");
    bytes.extend(b"{\"sum\":\"0123456789abcdef\",\"entry\":{\"items\":[{\"ce");
    std::fs::write(&journal, bytes).expect("written");
    let resumed = bench.contents("killed", &[]);
    assert_equal(&bench, ("whole", &undisturbed), ("killed", &resumed));
    // A finished run is told again, not done again.
    let journal = bench.file("killed", "journal.jsonl");
    bench.contents("killed", &["--threads", "1"]);
    assert_eq!(bench.file("killed", "journal.jsonl"), journal);
}

#[cfg(unix)]
#[test]
fn ctrl_c_is_code_130_and_the_same_command_goes_on() {
    if model_path().is_none() {
        return;
    }
    let bench = Bench::new(EXPERIMENT);
    let child = start_until(&bench, "results", 2);
    let sent = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(sent.expect("kill is there").success());
    let output = child.wait_with_output().expect("it ends");
    let err = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(130), "{err}");
    assert!(err.contains("give the same command again"), "{err}");
    assert!(!is_finished(&bench.bundle("results").expect("a bundle")));
    let kept = n_lines(&bench, "results");
    let resumed = bench.contents("results", &[]);
    assert!(kept >= Some(2) && kept < n_lines(&bench, "results"));
    let undisturbed = bench.contents("whole", &[]);
    assert_equal(&bench, ("whole", &undisturbed), ("results", &resumed));
}
