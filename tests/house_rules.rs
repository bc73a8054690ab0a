//! The repository's own rules, read off its files: headers, sizes, the arrows between modules, where time, the
//! environment and unsafe code may stand, and that every stage is documented and tried.

use std::fs;
use std::path::{Path, PathBuf};

use kvlab::cache::stage::registry;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// All files below `dir` with the extension, as (path relative to the repository, text).
fn files(dir: &str, extension: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut pending = vec![root().join(dir)];
    while let Some(dir) = pending.pop() {
        let Ok(entries) = fs::read_dir(&dir) else {
            continue;
        };
        for entry in entries.flatten() {
            let path = entry.path();
            if path.is_dir() {
                pending.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                let name = path
                    .strip_prefix(root())
                    .unwrap_or(&path)
                    .display()
                    .to_string();
                found.push((
                    name,
                    fs::read_to_string(&path).expect("a readable source file"),
                ));
            }
        }
    }
    found.sort();
    assert!(!found.is_empty(), "no .{extension} files below {dir}");
    found
}

fn sources() -> Vec<(String, String)> {
    files("src", "rs")
}

/// The lines of a file that are not its tests, numbered from 1.
fn product_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines()
        .enumerate()
        .map(|(i, l)| (i + 1, l))
        .take_while(|(_, l)| !l.contains("#[cfg(test)]"))
}

fn is_test_file(name: &str) -> bool {
    name.ends_with("tests.rs") || name.ends_with("fixture.rs") || name.contains("/tests/")
}

fn refuse(faults: Vec<String>) {
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn every_file_opens_with_what_it_is_for() {
    let all = sources()
        .into_iter()
        .chain(files("tests", "rs"))
        .chain(files("benches", "rs"));
    refuse(
        all.filter(|(_, text)| !text.starts_with("//!"))
            .map(|(name, _)| format!("{name}: no //! header"))
            .collect(),
    );
}

#[test]
fn no_file_is_longer_than_500_lines() {
    let all = sources().into_iter().chain(files("kernels", "cu"));
    refuse(
        all.map(|(name, text)| (name, text.lines().count()))
            .filter(|(_, n)| *n > 500)
            .map(|(name, n)| format!("{name}: {n} lines"))
            .collect(),
    );
}

#[test]
fn data_flows_one_way() {
    let forbidden: [(&str, &[&str]); 5] = [
        (
            "src/cache/",
            &[
                "model", "engine", "eval", "config", "data", "bundle", "report", "commands",
            ],
        ),
        (
            "src/engine/",
            &["eval", "config", "data", "bundle", "report", "commands"],
        ),
        (
            "src/eval/",
            &["config", "data", "bundle", "report", "commands"],
        ),
        (
            "src/report/",
            &["model", "engine", "config", "data", "commands", "compute"],
        ),
        (
            "src/compute/",
            &[
                "engine", "eval", "config", "data", "bundle", "report", "commands",
            ],
        ),
    ];
    let mut faults = Vec::new();
    for (name, text) in sources() {
        for (dir, modules) in forbidden.iter().filter(|(dir, _)| name.starts_with(dir)) {
            for (n, line) in product_lines(&text) {
                for module in modules
                    .iter()
                    .filter(|m| line.contains(&format!("crate::{m}")))
                {
                    faults.push(format!("{name}:{n}: {dir} must not know `{module}`"));
                }
            }
        }
    }
    refuse(faults);
}

#[test]
fn engine_and_evaluator_name_no_strategy() {
    let mut faults = Vec::new();
    let names: Vec<String> = registry().map(|d| format!("\"{}\"", d.name)).collect();
    for (name, text) in sources()
        .iter()
        .filter(|(n, _)| n.starts_with("src/engine/") || n.starts_with("src/eval/"))
        .filter(|(n, _)| !is_test_file(n))
    {
        for (n, line) in product_lines(text) {
            // The reference is f32 rows, and the floor a window that keeps the sinks: the two fixed points of the scale.
            let fixed_point = line.contains("\"f32\"")
                || line.contains("\"window\"") && name.ends_with("floor.rs");
            if !fixed_point && names.iter().any(|s| line.contains(s)) {
                faults.push(format!("{name}:{n}: {line}"));
            }
        }
    }
    refuse(faults);
}

#[test]
fn time_environment_and_panics_stand_where_they_may() {
    let mut faults = Vec::new();
    for (name, text) in sources().iter().filter(|(n, _)| !is_test_file(n)) {
        for (n, line) in product_lines(text).filter(|(_, l)| !l.trim_start().starts_with("//")) {
            if line.contains("Instant::now") && name != "src/engine/clock.rs" {
                faults.push(format!("{name}:{n}: time is read in engine/clock.rs only"));
            }
            if line.contains("HashMap") || line.contains("HashSet") {
                faults.push(format!("{name}:{n}: an unordered map"));
            }
            if line.contains("static mut") || line.contains("thread_local!") {
                faults.push(format!("{name}:{n}: a global"));
            }
            if line.contains(".unwrap()")
                || line.contains("panic!(")
                || line.contains("todo!")
                || line.contains("unimplemented!")
            {
                faults.push(format!("{name}:{n}: {}", line.trim()));
            }
        }
    }
    refuse(faults);
}

#[test]
fn unsafe_code_is_in_compute_and_says_why_it_is_sound() {
    let mut faults = Vec::new();
    for (name, text) in sources() {
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or("");
            if !(code.contains("unsafe {")
                || code.contains("unsafe fn")
                || code.contains("unsafe impl"))
            {
                continue;
            }
            // A bench may ask the kernel what the program does not.
            let allowed = name.starts_with("src/compute/")
                || name == "benches/random_reads.rs"
                || line.contains("Mmap")
                || lines[i.saturating_sub(4)..i]
                    .iter()
                    .any(|l| l.contains("mmap"));
            if !allowed {
                faults.push(format!("{name}:{}: unsafe outside compute", i + 1));
            }
            // One comment may speak for all operations of an instruction set, or of a layout, below it.
            let for_all = |l: &&str| {
                l.contains("SAFETY (of all blocks below)") || l.contains("For all methods:")
            };
            if !lines[i.saturating_sub(6)..=i]
                .iter()
                .any(|l| l.contains("SAFETY") || l.contains("# Safety"))
                && !lines[..i].iter().any(for_all)
            {
                faults.push(format!("{name}:{}: no SAFETY comment", i + 1));
            }
        }
    }
    refuse(faults);
}

#[test]
fn every_stage_is_documented_and_in_an_experiment() {
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    let experiments: String = files("experiments", "toml")
        .into_iter()
        .map(|(_, t)| t)
        .collect();
    let mut faults = Vec::new();
    for def in registry() {
        if !readme.contains(&format!("| `{}` |", def.name)) {
            faults.push(format!(
                "README.md: no row for {} stage `{}`",
                def.kind, def.name
            ));
        }
        if !experiments.contains(&format!("\"{}\"", def.name)) {
            faults.push(format!(
                "experiments/: none uses {} stage `{}`",
                def.kind, def.name
            ));
        }
    }
    refuse(faults);
}

#[test]
fn no_path_of_a_machine_is_written_down() {
    let mut faults = Vec::new();
    let mut all = sources();
    for (dir, extension) in [
        ("tests", "rs"),
        ("tests", "py"),
        ("experiments", "toml"),
        ("kernels", "cu"),
        ("docs", "md"),
        ("datasets", "toml"),
    ] {
        all.extend(files(dir, extension));
    }
    for (name, text) in all {
        if name.ends_with("house_rules.rs") {
            continue;
        }
        for (n, line) in text.lines().enumerate() {
            if ["/home/", "/work/", "/root/", "/Users/"]
                .iter()
                .any(|p| line.contains(p))
            {
                faults.push(format!("{name}:{}: {}", n + 1, line.trim()));
            }
        }
    }
    refuse(faults);
}

/// A path that exists in the repository, as the README's map names it.
#[test]
fn the_map_in_the_readme_is_true() {
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    for dir in [
        "src/commands/run.rs",
        "src/cache/mod.rs",
        "experiments",
        "kernels",
        "datasets",
        "results",
        "docs/adr",
    ] {
        assert!(readme.contains(dir), "README.md does not mention {dir}");
        assert!(
            Path::new(&root().join(dir)).exists(),
            "{dir} does not exist"
        );
    }
}

/// Every row of a README table that follows a link to a committed bundle's table stands in that table with the same figures.
#[test]
fn the_tables_in_the_readme_are_the_committed_bundles() {
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|')
            .split('|')
            .map(|c| c.trim().trim_matches('`').to_owned())
            .collect()
    };
    let sections: Vec<&str> = readme.split("](results/").skip(1).collect();
    assert!(!sections.is_empty(), "no link to a bundle's table");
    for section in sections {
        let link = section.split(')').next().unwrap_or_default();
        let table = root().join("results").join(link);
        let table = fs::read_to_string(&table).unwrap_or_else(|e| panic!("{link}: {e}"));
        let bundle: Vec<Vec<String>> = table
            .lines()
            .filter(|l| l.starts_with("| "))
            .map(cells)
            .collect();
        let rows: Vec<Vec<String>> = section
            .lines()
            .skip_while(|l| !l.starts_with("| strategy"))
            .take_while(|l| l.starts_with('|'))
            .map(cells)
            .collect();
        assert!(rows.len() > 3, "{link}: a table of strategies");
        for row in &rows[2..] {
            let same = |b: &&Vec<String>| b[0] == row[0] && row.iter().all(|c| b.contains(c));
            assert!(
                bundle.iter().any(|b| same(&b)),
                "{link}: no row of the bundle has {row:?}"
            );
        }
    }
}
