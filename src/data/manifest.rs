//! The texts that experiments may name: `datasets/manifest.toml`, compiled in together with the texts that this project
//! wrote, so that the program finds them from any folder.
//!
//! Invariant: a text is what its sha256 says; another edition of a file is an error, never another number.

use serde::{Deserialize, Serialize};

use super::DataError;

const MANIFEST: &str = include_str!("../../datasets/manifest.toml");

/// The texts that are part of the program, by the manifest's `file`.
static EMBEDDED: &[(&str, &[u8])] = &[
    (
        "quickstart/prose.txt",
        include_bytes!("../../datasets/quickstart/prose.txt"),
    ),
    (
        "quickstart/code.txt",
        include_bytes!("../../datasets/quickstart/code.txt"),
    ),
    (
        "quickstart/legal.txt",
        include_bytes!("../../datasets/quickstart/legal.txt"),
    ),
    (
        "calibration/mixed.txt",
        include_bytes!("../../datasets/calibration/mixed.txt"),
    ),
];

/// What a text may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// Evaluated; nothing may be fitted to it.
    Test,
    /// Statistics are taken from it; never evaluated.
    Calibration,
    /// Compressors are trained on it; never evaluated.
    Train,
    /// A user's own file: its use is the user's word.
    Own,
}

/// A file on the Hugging Face hub.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HubFile {
    /// Dataset repository, `owner/name`.
    pub repo: String,
    /// File in the repository.
    pub file: String,
    /// Member of that file when it is a zip archive.
    pub member: Option<String>,
}

/// A text of the manifest. The file itself documents the fields.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSet {
    /// Name in experiments.
    pub name: String,
    /// Path relative to a data directory.
    pub file: String,
    /// Where the bytes come from.
    pub origin: String,
    /// Where they can be had.
    pub hub: Option<HubFile>,
    /// The text's licence.
    pub licence: String,
    /// Of the whole file, lower-case hex.
    pub sha256: String,
    /// Length of the whole file.
    pub bytes: u64,
    /// What it may be used for.
    pub split: Split,
    /// What kind of text it is: prose, code, legal, mixed.
    pub domain: String,
    /// What stands alone on the line between two documents.
    pub separator: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    schema: u32,
    dataset: Vec<DataSet>,
}

/// Every text of the manifest, in its order.
///
/// # Errors
/// [`DataError::Manifest`] when the compiled-in manifest is malformed; a test keeps it from being so.
pub fn all() -> Result<Vec<DataSet>, DataError> {
    let manifest: Manifest =
        toml::from_str(MANIFEST).map_err(|e| DataError::Manifest(e.message().to_owned()))?;
    if manifest.schema != 1 {
        return Err(DataError::Manifest(format!(
            "schema is {}, this program reads 1",
            manifest.schema
        )));
    }
    Ok(manifest.dataset)
}

/// The bytes of a text that is part of the program.
pub fn embedded(file: &str) -> Option<&'static [u8]> {
    EMBEDDED.iter().find(|(f, _)| *f == file).map(|(_, b)| *b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::sha256_hex;

    #[test]
    fn the_manifest_is_sound_and_embedded_texts_are_what_it_says() {
        let sets = all().expect("the manifest is sound");
        assert!(sets.len() >= EMBEDDED.len());
        for (i, set) in sets.iter().enumerate() {
            assert!(
                sets[..i].iter().all(|s| s.name != set.name),
                "{} twice",
                set.name
            );
            assert_eq!(set.sha256.len(), 64, "{}", set.name);
            assert_ne!(set.split, Split::Own, "{}", set.name);
        }
        for (file, bytes) in EMBEDDED {
            let set = sets
                .iter()
                .find(|s| s.file == *file)
                .expect("an embedded text is listed");
            assert_eq!(sha256_hex(bytes), set.sha256, "{file}");
            assert_eq!(bytes.len() as u64, set.bytes, "{file}");
        }
    }
}
