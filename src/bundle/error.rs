//! What can go wrong with a bundle.
//!
//! Invariant: a message names the file, what is wrong with it and what to do next.

use std::path::{Path, PathBuf};

use crate::eval::records::RecordError;

/// What can go wrong with a bundle.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The file system refused.
    #[error("can't {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A file is no JSON of the expected shape.
    #[error("can't {action} {path}: {source}")]
    Json {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The parser's answer.
        source: serde_json::Error,
    },
    /// Another process writes to the bundle.
    #[error(
        "{0} is locked: another run of the same plan is writing to it; wait for it, or start a second one with --fresh"
    )]
    Locked(PathBuf),
    /// A journal line before the last is damaged.
    #[error(
        "{path}, line {line}: {problem}; the journal was altered or the disk is failing, start anew with --fresh"
    )]
    Damaged {
        /// The journal.
        path: PathBuf,
        /// Line number from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// A file of a finished bundle is not what the manifest says.
    #[error(
        "{path} does not verify: its SHA-256 is {got}, the manifest says {expected}; take an unaltered copy"
    )]
    Altered {
        /// The file.
        path: PathBuf,
        /// Its hash.
        got: String,
        /// The manifest's.
        expected: String,
    },
    /// Same id, other content.
    #[error(
        "{0} states another run than the one asked for, though its hash begins alike; start anew with --fresh"
    )]
    OtherRun(PathBuf),
    /// A name that is no folder name.
    #[error("`{name}` can't be the {what}: it becomes a folder's name, so {allowed}")]
    Name {
        /// Which name.
        what: &'static str,
        /// The name.
        name: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// A record that contradicts itself.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A record of a cell that the header does not list, or for the second time.
    #[error("cell {cell}, item {item}: {problem}")]
    Unexpected {
        /// The cell.
        cell: String,
        /// The item.
        item: usize,
        /// What is wrong.
        problem: &'static str,
    },
    /// Writing to a finished bundle.
    #[error("{0} is finished: start another run of the plan with --fresh")]
    Finished(PathBuf),
}

impl BundleError {
    /// Whether the bundle is not what it was when it was written, as against a refusal before work.
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Damaged { .. } | Self::Altered { .. })
    }

    pub(super) fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io {
            action,
            path: path.to_owned(),
            source,
        }
    }

    pub(super) fn json(action: &'static str, path: &Path, source: serde_json::Error) -> Self {
        Self::Json {
            action,
            path: path.to_owned(),
            source,
        }
    }
}
