//! Texts: from a name or a path in an experiment to checked bytes, documents and token windows.
//!
//! A text is looked for in this order: the path itself; the program (texts of this project); the data directory
//! (`--data-dir`, else `KVLAB_DATA`); `datasets/` under the current folder; the Hugging Face hub. Invariant: whatever is
//! found has the sha256 that the experiment's plan names, or is refused.

#[cfg(feature = "hub")]
mod hub;
pub mod manifest;
pub mod tasks;
mod text;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use manifest::Split;
pub use text::{Passage, Passages};

use manifest::DataSet;

/// What can go wrong with a text. One line each, ending in what to do.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The manifest can't be read.
    #[error("datasets/manifest.toml: {0}")]
    Manifest(String),
    /// No text of that name.
    #[error(
        "no text is called `{name}`{hint}: name one of {known}, or a file with a path such as ./{name}.txt"
    )]
    Unknown {
        /// The name asked for.
        name: String,
        /// " (did you mean ...?)" or nothing.
        hint: String,
        /// Names of the manifest.
        known: String,
    },
    /// The text is nowhere.
    #[error("text `{name}` is not on this machine (looked for {tried}): {how}")]
    NotFound {
        /// The text.
        name: String,
        /// Places that were tried.
        tried: String,
        /// How to get it.
        how: String,
    },
    /// A file can't be read.
    #[error("can't read `{path}`: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Another edition of the text.
    #[error(
        "`{place}` is another edition of `{name}`: sha256 {got}, expected {expected}; get the original, or name the file by its path"
    )]
    Checksum {
        /// The text.
        name: String,
        /// Where it was found.
        place: String,
        /// Its sum.
        got: String,
        /// The sum it must have.
        expected: String,
    },
    /// Not UTF-8.
    #[error("`{name}` is not UTF-8 text (byte {offset}): convert it first")]
    NotText {
        /// The text.
        name: String,
        /// The first offending byte.
        offset: usize,
    },
    /// Nothing in it.
    #[error("`{name}` is empty: name a text with words in it")]
    Empty {
        /// The text.
        name: String,
    },
    /// Fewer tokens than the windows need.
    #[error("`{name}` has {got} tokens, {n} x {window} need {needed}: {advice}")]
    TooShort {
        /// The text.
        name: String,
        /// Its tokens.
        got: usize,
        /// Tokens needed.
        needed: usize,
        /// Windows asked for.
        n: usize,
        /// Tokens of a window.
        window: usize,
        /// What to change.
        advice: String,
    },
    /// One document is too short.
    #[error(
        "{name} has {got} tokens, {needed} are needed (context + score): make them smaller or take longer documents"
    )]
    ShortDocument {
        /// Document and text.
        name: String,
        /// Its tokens.
        got: usize,
        /// Tokens needed.
        needed: usize,
    },
    /// Fewer documents than asked for.
    #[error(
        "`{name}` has {got} documents, {asked} are asked for: set data.documents to {got} or less"
    )]
    TooFewDocuments {
        /// The text.
        name: String,
        /// Documents it has.
        got: usize,
        /// Documents asked for.
        asked: usize,
    },
    /// The hub did not give it.
    #[error(
        "can't fetch `{name}` from the hub ({repo}): {reason}; check the network, or put the file at DIR/{file} and give --data-dir DIR"
    )]
    Hub {
        /// The text.
        name: String,
        /// The repository.
        repo: String,
        /// The reason.
        reason: String,
        /// Its path in a data directory.
        file: String,
    },
}

/// A text as a plan names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataRef {
    /// The manifest's name, or the path as the experiment gives it.
    pub name: String,
    /// The file, for a text that is named by its path.
    pub path: Option<PathBuf>,
    /// Of the whole file, lower-case hex.
    pub sha256: String,
    /// What it may be used for.
    pub split: Split,
    /// What kind of text it is.
    pub domain: Option<String>,
    /// What stands alone on the line between two documents.
    pub separator: Option<String>,
    /// Whether it is a task: a definition with its items, not a text.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_task: bool,
}

/// A text in memory, its sum checked.
#[derive(Debug, Clone)]
pub struct Text {
    /// Name in messages and tables.
    pub name: String,
    /// Of the whole file, lower-case hex.
    pub sha256: String,
    /// The whole file.
    pub text: String,
    /// What stands alone on the line between two documents.
    pub separator: Option<String>,
}

/// Where texts are looked for.
#[derive(Debug, Clone, Default)]
pub struct Lookup {
    /// The data directory: `--data-dir`, else `KVLAB_DATA`.
    pub data_dir: Option<PathBuf>,
    /// Whether to ask the hub for what isn't here.
    pub network: Network,
}

/// Whether the network may be used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Network {
    /// What isn't on this machine is fetched.
    #[default]
    Allowed,
    /// Only what is on this machine is used.
    Offline,
}

impl DataRef {
    /// The text of the manifest called `name`.
    ///
    /// # Errors
    /// [`DataError::Unknown`] with the known names and the nearest one.
    pub fn named(name: &str) -> Result<Self, DataError> {
        let set = set_named(name)?;
        Ok(Self {
            name: set.name,
            path: None,
            sha256: set.sha256,
            split: set.split,
            domain: Some(set.domain),
            separator: set.separator,
            is_task: false,
        })
    }

    /// A file of the user's. A line that holds a form feed alone separates documents, when there is one.
    ///
    /// # Errors
    /// [`DataError::Io`], [`DataError::NotText`], [`DataError::Empty`].
    pub fn file(name: &str, path: &Path) -> Result<Self, DataError> {
        let bytes = read(path)?;
        let sha256 = sha256_hex(&bytes);
        let text = decode(name, bytes)?;
        Ok(Self {
            name: name.to_owned(),
            path: Some(path.to_owned()),
            sha256,
            split: Split::Own,
            domain: None,
            separator: text
                .lines()
                .any(|l| l == "\u{c}")
                .then(|| "\u{c}".to_owned()),
            is_task: false,
        })
    }

    /// Reads the text and checks it.
    ///
    /// # Errors
    /// Any [`DataError`] about finding, reading or checking a file.
    pub fn load(&self, lookup: &Lookup) -> Result<Text, DataError> {
        Ok(self.load_from(lookup)?.0)
    }

    /// As [`DataRef::load`], and says where the text was found.
    ///
    /// # Errors
    /// Any [`DataError`] about finding, reading or checking a file.
    pub fn load_from(&self, lookup: &Lookup) -> Result<(Text, String), DataError> {
        let (bytes, place) = match &self.path {
            Some(path) => (read(path)?, path.display().to_string()),
            None => find(&set_named(&self.name)?, lookup)?,
        };
        let got = sha256_hex(&bytes);
        if got != self.sha256 {
            return Err(DataError::Checksum {
                name: self.name.clone(),
                place,
                got,
                expected: self.sha256.clone(),
            });
        }
        let text = Text {
            name: self.name.clone(),
            sha256: got,
            text: decode(&self.name, bytes)?,
            separator: self.separator.clone(),
        };
        Ok((text, place))
    }
}

fn set_named(name: &str) -> Result<DataSet, DataError> {
    let sets = manifest::all()?;
    if let Some(set) = sets.iter().find(|s| s.name == name) {
        return Ok(set.clone());
    }
    // Items of tasks are asked for by their task.
    let texts = sets.iter().filter(|s| s.domain != "task");
    let names: Vec<&str> = texts.map(|s| s.name.as_str()).collect();
    Err(DataError::Unknown {
        name: name.to_owned(),
        hint: crate::config::did_you_mean(name, names.iter().copied())
            .map_or(String::new(), |h| format!(" ({h})")),
        known: names.join(", "),
    })
}

/// A named text's bytes, and where they were found.
fn find(set: &DataSet, lookup: &Lookup) -> Result<(Vec<u8>, String), DataError> {
    if let Some(bytes) = manifest::embedded(&set.file) {
        return Ok((bytes.to_vec(), "the program itself".to_owned()));
    }
    let mut tried = Vec::new();
    for dir in lookup
        .data_dir
        .iter()
        .map(PathBuf::as_path)
        .chain([Path::new("datasets")])
    {
        let path = dir.join(&set.file);
        if path.is_file() {
            return Ok((read(&path)?, path.display().to_string()));
        }
        tried.push(path.display().to_string());
    }
    if let (Some(file), Network::Allowed) = (&set.hub, lookup.network) {
        return fetch(set, file);
    }
    Err(DataError::NotFound {
        name: set.name.clone(),
        tried: tried.join(", "),
        how: format!(
            "put it at DIR/{} and give --data-dir DIR or set KVLAB_DATA (origin: {})",
            set.file, set.origin
        ),
    })
}

#[cfg(feature = "hub")]
fn fetch(set: &DataSet, file: &manifest::HubFile) -> Result<(Vec<u8>, String), DataError> {
    let bytes = hub::fetch(file).map_err(|reason| hub_error(set, file, reason))?;
    Ok((bytes, format!("{} on the hub", file.repo)))
}

#[cfg(not(feature = "hub"))]
fn fetch(set: &DataSet, file: &manifest::HubFile) -> Result<(Vec<u8>, String), DataError> {
    let reason = "this build has no downloads (feature `hub`)".to_owned();
    Err(hub_error(set, file, reason))
}

fn hub_error(set: &DataSet, file: &manifest::HubFile, reason: String) -> DataError {
    DataError::Hub {
        name: set.name.clone(),
        repo: file.repo.clone(),
        reason,
        file: set.file.clone(),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, DataError> {
    std::fs::read(path).map_err(|source| DataError::Io {
        path: path.to_owned(),
        source,
    })
}

fn decode(name: &str, bytes: Vec<u8>) -> Result<String, DataError> {
    let text = String::from_utf8(bytes).map_err(|e| DataError::NotText {
        name: name.to_owned(),
        offset: e.utf8_error().valid_up_to(),
    })?;
    if text.trim().is_empty() {
        return Err(DataError::Empty {
            name: name.to_owned(),
        });
    }
    Ok(text)
}

/// The sha256 of bytes, lower-case hex.
pub fn sha256_hex(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offline(data_dir: Option<&Path>) -> Lookup {
        Lookup {
            data_dir: data_dir.map(Path::to_owned),
            network: Network::Offline,
        }
    }

    #[test]
    fn a_text_of_the_program_needs_no_folder() {
        let text = DataRef::named("quickstart-prose").unwrap();
        let (read, place) = text.load_from(&offline(None)).unwrap();
        assert_eq!(place, "the program itself");
        assert_eq!(read.documents().len(), 4);
    }

    #[test]
    fn a_text_that_is_nowhere_says_how_to_get_it() {
        let dir = tempfile::tempdir().unwrap();
        let text = DataRef::named("wikitext2-test").unwrap();
        let message = text
            .load(&offline(Some(dir.path())))
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("put it at DIR/wikitext-2/wiki.test.raw"),
            "{message}"
        );
        assert!(message.contains("KVLAB_DATA"), "{message}");
    }

    #[test]
    fn another_edition_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("wikitext-2")).unwrap();
        std::fs::write(dir.path().join("wikitext-2/wiki.test.raw"), "= Robert =").unwrap();
        let text = DataRef::named("wikitext2-test").unwrap();
        let message = text
            .load(&offline(Some(dir.path())))
            .unwrap_err()
            .to_string();
        assert!(message.contains("another edition"), "{message}");

        let path = dir.path().join("mine.txt");
        std::fs::write(&path, "one\n\u{c}\ntwo\n").unwrap();
        let mine = DataRef::file("mine.txt", &path).unwrap();
        assert_eq!(
            mine.load(&offline(None)).unwrap().documents(),
            ["one\n", "two\n"]
        );
        std::fs::write(&path, "changed after the plan was made").unwrap();
        let message = mine.load(&offline(None)).unwrap_err().to_string();
        assert!(message.contains("another edition"), "{message}");
    }

    #[test]
    fn files_that_are_no_text_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            DataRef::file(name, &path).unwrap_err().to_string()
        };
        assert!(refused("a.txt", b"ab\xff").contains("not UTF-8 text (byte 2)"));
        assert!(refused("b.txt", b" \n").contains("is empty"));
        let message = DataRef::file("c.txt", &dir.path().join("c.txt")).unwrap_err();
        assert!(message.to_string().contains("can't read"));
        let message = DataRef::named("wikitext2-tets").unwrap_err().to_string();
        assert!(
            message.contains("did you mean `wikitext2-test`?"),
            "{message}"
        );
    }
}
