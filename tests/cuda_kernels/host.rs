//! Kernels as programs on the CPU: built with the machine's C++ compiler into a temporary folder, fed through pipes.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Which thread of a block the shim runs first.
#[derive(Clone, Copy)]
pub enum Order {
    Forward = 0,
    Backward = 1,
}

/// A built program; its folder goes when it is dropped.
pub struct HostProgram {
    folder: tempfile::TempDir,
}

impl HostProgram {
    /// Builds `kernels/host/{source}`; `None`, said on standard error, where there is no C++ compiler.
    pub fn build(source: &str, defines: &[String]) -> Option<Self> {
        let Some(compiler) = compiler() else {
            eprintln!(
                "SKIPPED: no C++ compiler (c++, g++, clang++) found, so {source} was not run on the CPU"
            );
            return None;
        };
        let folder = tempfile::tempdir().expect("a temporary folder");
        let program = Self { folder };
        let output = Command::new(compiler)
            .args([
                "-std=c++17",
                "-O2",
                "-ffp-contract=off",
                "-fno-strict-aliasing",
                "-Wall",
                "-Wextra",
                "-Werror",
            ])
            .args(defines)
            .arg(
                Path::new(env!("CARGO_MANIFEST_DIR"))
                    .join("kernels/host")
                    .join(source),
            )
            .arg("-o")
            .arg(program.path())
            .output()
            .expect("the compiler answered a moment ago");
        assert!(
            output.status.success(),
            "{source}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Some(program)
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("program")
    }

    /// One launch of an attention kernel: the program's input to `[list][query][head_dim]`.
    pub fn attend(&self, input: &[u8]) -> Vec<f32> {
        let output = self.output(&[], input);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        output
            .stdout
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| f32::from_le_bytes(*word))
            .collect()
    }

    /// What the program prints.
    pub fn run(&self, arguments: &[&str]) -> Vec<u8> {
        let output = self.output(arguments, &[]);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        output.stdout
    }

    /// Exit status and message of a run that should end badly.
    pub fn fail(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let output = self.output(arguments, &[]);
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    }

    fn output(&self, arguments: &[&str], input: &[u8]) -> Output {
        let mut child = Command::new(self.path())
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a program built a moment ago");
        // The programs read all of their input before they write, so this can't block for good.
        let written = child.stdin.take().expect("stdin is piped").write_all(input);
        let output = child.wait_with_output().expect("the program ends");
        assert!(
            written.is_ok(),
            "input refused: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        output
    }
}

fn compiler() -> Option<&'static str> {
    ["c++", "g++", "clang++"].into_iter().find(|name| {
        Command::new(name)
            .arg("--version")
            .output()
            .is_ok_and(|output| output.status.success())
    })
}
