//! Files and folders from the Hugging Face hub, through the crate `hf-hub` (feature `hub`).
//!
//! Invariant: a folder under its final name has all files its index names; it is filled under a temporary name first.

use std::path::PathBuf;

use super::pip::Failure;
use super::{FetchProgress, ModelDir, Sink};
use crate::model::ModelError;

/// Streams one file of a repository into `sink`.
pub(super) fn fetch_file(
    repo: &str,
    file: &str,
    sink: &mut Sink,
    progress: &dyn FetchProgress,
) -> Result<(), Failure> {
    imp::fetch_file(repo, file, sink, progress)
}

/// The folder of `hub:owner/name`, fetched if it isn't there.
pub(super) fn resolve_folder(
    repo: &str,
    dir: &ModelDir,
    progress: &dyn FetchProgress,
) -> Result<PathBuf, ModelError> {
    let plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let parts = repo
        .split_once('/')
        .filter(|(owner, name)| plain(owner) && plain(name));
    if parts.is_none() {
        return Err(ModelError::UnknownModel {
            name: format!("hub:{repo}"),
            hint: " (a hub name is hub:owner/name)".into(),
            known: super::builtin()
                .iter()
                .map(|m| m.name)
                .collect::<Vec<_>>()
                .join(", "),
        });
    }
    let target = dir.hub_path(repo);
    if target.join("config.json").is_file() {
        return Ok(target);
    }
    let parent = dir.path().join("hub");
    std::fs::create_dir_all(&parent).map_err(|e| ModelError::io("create", &parent, e))?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".fetch-");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
    let temporary = builder.tempdir_in(&parent);
    let temporary = temporary.map_err(|e| ModelError::io("write", &parent, e))?;
    imp::fetch_folder(repo, temporary.path(), progress).map_err(|failure| match failure {
        Failure::Fatal(error) => error,
        Failure::Reason(reasons) => ModelError::Fetch {
            name: format!("hub:{repo}"),
            reasons,
            target: target.clone(),
        },
    })?;
    let kept = temporary.keep();
    std::fs::rename(&kept, &target).map_err(|e| ModelError::io("write", &target, e))?;
    Ok(target)
}

#[cfg(not(feature = "hub"))]
mod imp {
    use std::path::Path;

    use super::*;

    const ABSENT: &str = "this program was built without the feature `hub`";

    pub fn fetch_file(
        _: &str,
        _: &str,
        _: &mut Sink,
        _: &dyn FetchProgress,
    ) -> Result<(), Failure> {
        Err(Failure::Reason(ABSENT.into()))
    }

    pub fn fetch_folder(_: &str, _: &Path, _: &dyn FetchProgress) -> Result<(), Failure> {
        Err(Failure::Reason(ABSENT.into()))
    }
}

#[cfg(feature = "hub")]
mod imp {
    use std::fs::File;
    use std::path::Path;

    use hf_hub::api::Progress;
    use hf_hub::api::sync::{ApiBuilder, ApiError};

    use super::*;
    use crate::model::safetensors::index_files;

    /// Files a folder must have, then those it may have.
    const NEEDED: [&str; 2] = ["tokenizer.json", "config.json"];
    const OPTIONAL: [&str; 2] = ["tokenizer_config.json", "generation_config.json"];

    pub fn fetch_file(
        repo: &str,
        file: &str,
        sink: &mut Sink,
        progress: &dyn FetchProgress,
    ) -> Result<(), Failure> {
        let folder = sink.target.parent().unwrap_or(Path::new("."));
        let temporary = tempfile::Builder::new().prefix(".hub-").tempdir_in(folder);
        let temporary = temporary.map_err(|e| ModelError::io("write", folder, e))?;
        let path = download(repo, file, temporary.path(), progress)?;
        let mut source = File::open(&path).map_err(|e| ModelError::io("read", &path, e))?;
        Ok(sink.copy_from(&mut source)?)
    }

    pub fn fetch_folder(
        repo: &str,
        folder: &Path,
        progress: &dyn FetchProgress,
    ) -> Result<(), Failure> {
        let index = "model.safetensors.index.json";
        progress.begin(repo, None);
        let outcome = (|| {
            let weights = match download(repo, index, folder, progress) {
                Ok(path) => index_files(&path)?,
                Err(_) => vec!["model.safetensors".to_owned()],
            };
            for file in OPTIONAL {
                // Absent in many repositories; whatever else is wrong will show with the files that are needed.
                let _ = download(repo, file, folder, progress);
            }
            for file in weights.iter().map(String::as_str).chain(NEEDED) {
                download(repo, file, folder, progress)?;
            }
            Ok(())
        })();
        progress.end();
        outcome
    }

    /// Hands the bytes of a download on.
    struct Bytes<'a>(&'a dyn FetchProgress);

    impl Progress for Bytes<'_> {
        fn init(&mut self, _: usize, _: &str) {}

        fn update(&mut self, size: usize) {
            self.0.advance(size as u64);
        }

        fn finish(&mut self) {}
    }

    /// Downloads one file to `folder/file`. The client's own cache is a temporary folder beside it.
    fn download(
        repo: &str,
        file: &str,
        folder: &Path,
        progress: &dyn FetchProgress,
    ) -> Result<PathBuf, Failure> {
        let reason = |e: ApiError| match e {
            ApiError::IoError(e) if e.kind() == std::io::ErrorKind::StorageFull => {
                Failure::Fatal(ModelError::DiskFull {
                    path: folder.into(),
                })
            }
            e => Failure::Reason(format!("hub {repo}: {file}: {}", one_line(&e))),
        };
        let cache = tempfile::Builder::new().prefix(".part-").tempdir_in(folder);
        let cache = cache.map_err(|e| ModelError::io("write", folder, e))?;
        let api = ApiBuilder::from_env()
            .with_cache_dir(cache.path().to_owned())
            .with_progress(false)
            .with_retries(2)
            .build()
            .map_err(reason)?;
        let got = api
            .model(repo.to_owned())
            .download_with_progress(file, Bytes(progress))
            .map_err(reason)?;
        let target = folder.join(file);
        // The client gives a link into its cache; the file behind it moves.
        let moved = std::fs::canonicalize(&got).and_then(|blob| std::fs::rename(blob, &target));
        moved.map_err(|e| ModelError::io("write", &target, e))?;
        Ok(target)
    }

    /// The innermost cause: that is where "no network" stands.
    fn one_line(error: &dyn std::error::Error) -> String {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(inner) = source {
            text = inner.to_string();
            source = inner.source();
        }
        text.replace(['\n', '\r'], " ").chars().take(200).collect()
    }
}
