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
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use hf_hub::progress::{DownloadEvent, ProgressEvent, ProgressHandler};
    use hf_hub::{HFClient, HFClientSync, HFError};

    use super::*;
    use crate::model::safetensors::index_files;

    const POLL: Duration = Duration::from_millis(200);

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

    /// Counts bytes for a download that runs in another thread.
    struct Counter(AtomicU64);

    impl ProgressHandler for Counter {
        fn on_progress(&self, event: &ProgressEvent) {
            let ProgressEvent::Download(event) = event else {
                return;
            };
            let n = match event {
                DownloadEvent::AggregateProgress {
                    bytes_completed, ..
                } => *bytes_completed,
                DownloadEvent::Progress { files } => files.iter().map(|f| f.bytes_completed).sum(),
                _ => 0,
            };
            self.0.fetch_max(n, Ordering::Relaxed);
        }
    }

    fn download(
        repo: &str,
        file: &str,
        folder: &Path,
        progress: &dyn FetchProgress,
    ) -> Result<PathBuf, Failure> {
        let reason = |e: HFError| match e {
            HFError::Io(e) if e.kind() == std::io::ErrorKind::StorageFull => {
                Failure::Fatal(ModelError::DiskFull {
                    path: folder.into(),
                })
            }
            e => Failure::Reason(format!("hub {repo}: {file}: {}", one_line(&e))),
        };
        let client = HFClient::builder()
            .retry_max_attempts(2)
            .build()
            .map_err(reason)?;
        let client = HFClientSync::from_inner(client).map_err(reason)?;
        let (owner, name) = repo.split_once('/').unwrap_or(("", repo));
        let counter = Arc::new(Counter(AtomicU64::new(0)));
        let (done, finished) = mpsc::channel();
        let handler = Arc::clone(&counter);
        let request = client.model(owner, name);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let outcome = request
                    .download_file()
                    .filename(file)
                    .local_dir(folder)
                    .progress(handler)
                    .send();
                // The receiver outlives this thread's scope.
                let _ = done.send(outcome);
            });
            let mut seen = 0;
            loop {
                let outcome = finished.recv_timeout(POLL);
                let n = counter.0.load(Ordering::Relaxed);
                progress.advance(n.saturating_sub(seen));
                seen = seen.max(n);
                match outcome {
                    Ok(outcome) => return outcome.map_err(reason),
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => {
                        return Err(Failure::Reason(format!("hub {repo}: the download stopped")));
                    }
                }
            }
        })
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
