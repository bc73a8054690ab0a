//! The manifest: what a finished bundle consists of, by hash.
//!
//! Invariants: it is written last, so its presence means that the run is finished; it covers the raw files only, since
//! tables are derived from them and can be written again at any time.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{BundleError, RAW_FILES, write_atomic};
use crate::data::sha256_hex;

/// Name of the manifest's file.
pub const MANIFEST: &str = "manifest.json";

/// The raw files of a finished bundle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Records in the journal.
    pub n_items: usize,
    /// Each raw file.
    pub files: Vec<FileEntry>,
}

/// One file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Name within the bundle.
    pub name: String,
    /// Its length.
    pub n_bytes: u64,
    /// SHA-256, hexadecimal.
    pub sha256: String,
}

impl Manifest {
    /// Hashes the raw files of a bundle and writes the manifest.
    pub fn seal(folder: &Path, n_items: usize) -> Result<Self, BundleError> {
        let files = RAW_FILES
            .iter()
            .map(|name| hash_file(folder, name))
            .collect::<Result<_, _>>()?;
        let manifest = Self { n_items, files };
        let path = folder.join(MANIFEST);
        let text = serde_json::to_string_pretty(&manifest)
            .map_err(|e| BundleError::json("write", &path, e))?;
        write_atomic(&path, format!("{text}\n").as_bytes())?;
        Ok(manifest)
    }

    /// Reads the manifest and checks every file against it; `None` while the run is unfinished.
    pub fn verify(folder: &Path) -> Result<Option<Self>, BundleError> {
        let path = folder.join(MANIFEST);
        if !path.exists() {
            return Ok(None);
        }
        let manifest: Self = super::read_json(&path)?;
        for name in RAW_FILES {
            let got = hash_file(folder, name)?;
            let expected = manifest.files.iter().find(|file| file.name == name);
            if expected != Some(&got) {
                return Err(BundleError::Altered {
                    path: folder.join(name),
                    got: got.sha256,
                    expected: expected.map_or("no entry".to_owned(), |file| file.sha256.clone()),
                });
            }
        }
        Ok(Some(manifest))
    }
}

fn hash_file(folder: &Path, name: &str) -> Result<FileEntry, BundleError> {
    let path = folder.join(name);
    let bytes = std::fs::read(&path).map_err(|e| BundleError::io("read", &path, e))?;
    Ok(FileEntry {
        name: name.to_owned(),
        n_bytes: bytes.len() as u64,
        sha256: sha256_hex(&bytes),
    })
}
