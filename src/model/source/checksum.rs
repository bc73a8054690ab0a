//! sha256 of files: while they are written, and as the identity of a model.
//!
//! Invariant: the identity depends on the files' contents and, for a folder, on their names; never on where they lie.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::model::ModelError;

const CHUNK_BYTES: usize = 1 << 20;

/// A remembered sum: valid while the file has this size and modification time.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Remembered {
    n_bytes: u64,
    modified_ns: u64,
    sha256: String,
}

/// Lower-case hex of a finished sum.
pub(super) fn hex(sum: Sha256) -> String {
    sum.finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// The identity of a model: its file's sum, or for several the sum over lines of "sum name", sorted by name.
pub(in crate::model) fn identity(files: &[PathBuf]) -> Result<String, ModelError> {
    if let [file] = files {
        return of_file(file);
    }
    let mut lines = Vec::new();
    for file in files {
        let name = file
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        lines.push((name, of_file(file)?));
    }
    lines.sort();
    let mut sum = Sha256::new();
    for (name, sha256) in lines {
        sum.update(format!("{sha256} {name}\n"));
    }
    Ok(hex(sum))
}

/// The sum of one file, from the note beside it where that is still valid.
fn of_file(path: &Path) -> Result<String, ModelError> {
    let failed = |e| ModelError::io("read", path, e);
    let mut file = File::open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    let modified = meta
        .modified()
        .ok()
        .and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let modified_ns = modified.map_or(0, |since| since.as_nanos() as u64);
    let note = note_path(path);
    let known = std::fs::read(&note)
        .ok()
        .and_then(|json| serde_json::from_slice::<Remembered>(&json).ok());
    if let Some(known) = known
        && (known.n_bytes, known.modified_ns) == (meta.len(), modified_ns)
        && modified_ns != 0
    {
        return Ok(known.sha256);
    }
    let mut sum = Sha256::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match file.read(&mut chunk).map_err(failed)? {
            0 => break,
            n => sum.update(&chunk[..n]),
        }
    }
    let sha256 = hex(sum);
    let remembered = Remembered {
        n_bytes: meta.len(),
        modified_ns,
        sha256: sha256.clone(),
    };
    // A folder that can't be written to only costs the next run the time to hash again.
    if let Ok(json) = serde_json::to_vec(&remembered) {
        let _ = std::fs::write(note, json);
    }
    Ok(sha256)
}

/// `folder/.name.kvlab.json`
fn note_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.kvlab.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_sum_is_remembered_until_the_file_changes() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("m.gguf");
        std::fs::write(&file, "abc").expect("written");
        assert_eq!(identity(std::slice::from_ref(&file)).expect("hashed"), ABC);
        let note = note_path(&file);
        let mut known: Remembered =
            serde_json::from_slice(&std::fs::read(&note).expect("a note")).expect("valid");
        known.sha256 = "remembered".into();
        std::fs::write(&note, serde_json::to_vec(&known).expect("json")).expect("written");
        assert_eq!(
            identity(std::slice::from_ref(&file)).expect("noted"),
            "remembered"
        );
        std::fs::write(&file, "abcd").expect("written");
        let changed = identity(std::slice::from_ref(&file)).expect("hashed again");
        assert_ne!(changed, "remembered");
        assert_ne!(changed, ABC);
    }

    #[test]
    fn a_folder_is_known_by_names_and_contents_in_any_order() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("written");
            path
        };
        let (a, b, c) = (file("a", "1"), file("b", "2"), file("c", "2"));
        let ab = identity(&[a.clone(), b.clone()]).expect("hashed");
        assert_eq!(ab, identity(&[b, a.clone()]).expect("hashed"));
        assert_ne!(ab, identity(&[a, c]).expect("hashed"));
    }
}
