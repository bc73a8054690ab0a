//! The model, experiments in temporary folders, and the program run on them.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use kvlab::bundle::{Bundle, Contents};
use kvlab::model::source::{ModelDir, Silent, resolve};
use tempfile::TempDir;

/// The model of all tests.
pub const MODEL: &str = "smollm2-135m-instruct";

/// The model's file; without it the test is skipped, which is said aloud.
pub fn model_path() -> Option<&'static Path> {
    static PATH: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let found = PATH.get_or_init(|| {
        let dir = ModelDir::locate(None).map_err(|e| e.to_string())?;
        resolve(MODEL, &dir, &Silent).map_err(|e| e.to_string())
    });
    match found {
        Ok(path) => Some(path),
        Err(reason) => {
            eprintln!("SKIPPED, the test needs {MODEL}: {reason}");
            None
        }
    }
}

/// How the program ended.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// An experiment in a folder of its own.
pub struct Bench {
    dir: TempDir,
}

impl Bench {
    /// Writes an experiment. `body` follows schema, name and model.
    pub fn new(body: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let head = format!("schema = 1\nname = \"small\"\nmodel = \"{MODEL}\"\n");
        std::fs::write(dir.path().join("small.toml"), head + body).expect("written");
        Self { dir }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// `kvlab run` on the experiment, results under `results`.
    pub fn command(&self, results: &str, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvlab"));
        command
            .current_dir(self.path())
            .args(["run", "small.toml", "--quiet", "--results-dir", results])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs it to its end.
    pub fn run(&self, results: &str, args: &[&str]) -> Ran {
        ended(&mut self.command(results, args))
    }

    /// Runs it to its end, which must be a good one, and reads its bundle.
    pub fn contents(&self, results: &str, args: &[&str]) -> Contents {
        let ran = self.run(results, args);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let contents = self.read(results);
        assert!(contents.is_finished);
        contents
    }

    /// Reads the bundle.
    pub fn read(&self, results: &str) -> Contents {
        Bundle::read(&self.bundle(results).expect("a bundle")).expect("it is sound")
    }

    /// The one bundle under `results`, if there is any.
    pub fn bundle(&self, results: &str) -> Option<PathBuf> {
        let runs = self.path().join(results).join("small");
        let found: Vec<PathBuf> = std::fs::read_dir(runs)
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.path())
            .collect();
        assert!(found.len() < 2, "{found:?}");
        found.into_iter().next()
    }

    /// A file of the bundle.
    pub fn file(&self, results: &str, name: &str) -> String {
        let path = self.bundle(results).expect("a bundle").join(name);
        std::fs::read_to_string(path).expect("a file of the bundle")
    }
}

/// Runs a command to its end.
pub fn ended(command: &mut Command) -> Ran {
    let child: Child = command.spawn().expect("the program starts");
    let output = child.wait_with_output().expect("it ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Ran {
        code: output.status.code(),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}
