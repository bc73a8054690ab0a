//! The journal: an append-only file of records that survives `kill -9` at any byte.
//!
//! Invariants: one line is one write of whole records, synced before `append` returns; each line carries a checksum of
//! its own entry; only the last line can be torn, and a torn line is dropped as if it had never been begun; a bad line
//! before the last is damage and an error. The writer holds the file's lock.
//!
//! A line is JSON by itself: `{"sum":"<16 hex of SHA-256 of the entry's bytes>","entry":{...}}`.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::BundleError;
use crate::data::sha256_hex;
use crate::eval::records::{CellRecord, ItemRecord};

const BEFORE_SUM: &[u8] = br#"{"sum":""#;
const BEFORE_ENTRY: &[u8] = br#"","entry":"#;
const SUM_DIGITS: usize = 16;

/// What one line holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Entry {
    /// Items that were finished together.
    Items(Vec<ItemRecord>),
    /// The end of a cell.
    Cell(CellRecord),
}

/// What a journal holds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Replay {
    /// The entries of all whole lines.
    pub entries: Vec<Entry>,
    /// Bytes of whole lines.
    pub whole_bytes: u64,
    /// Bytes of a torn last line.
    pub torn_bytes: u64,
}

/// An open, locked journal.
#[derive(Debug)]
pub struct Journal {
    file: File,
    path: PathBuf,
    len: u64,
}

impl Journal {
    /// Opens or creates the journal and locks it; its content is not read yet.
    pub fn lock(path: &Path) -> Result<Self, BundleError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|e| BundleError::io("open", path, e))?;
        match file.try_lock() {
            Ok(()) => Ok(Self {
                file,
                path: path.to_owned(),
                len: 0,
            }),
            Err(TryLockError::WouldBlock) => Err(BundleError::Locked(path.to_owned())),
            Err(TryLockError::Error(e)) => Err(BundleError::io("lock", path, e)),
        }
    }

    /// Reads what is there, cuts off a torn last line and stands ready to append.
    pub fn recover(&mut self) -> Result<Replay, BundleError> {
        let mut bytes = Vec::new();
        self.at(0)?
            .read_to_end(&mut bytes)
            .map_err(|e| BundleError::io("read", &self.path, e))?;
        let replay = replay(&bytes, &self.path)?;
        self.len = replay.whole_bytes;
        if replay.torn_bytes > 0 {
            self.cut()?;
        }
        Ok(replay)
    }

    /// Appends one line and waits until it is on the disk. After an error the journal is as it was.
    pub fn append(&mut self, entry: &Entry) -> Result<(), BundleError> {
        let line = encode(entry).map_err(|e| BundleError::json("write", &self.path, e))?;
        let len = self.len;
        let written = self
            .at(len)?
            .write_all(&line)
            .and_then(|()| self.file.sync_data());
        if let Err(error) = written {
            // Without room for the line there is still room to shorten the file.
            self.cut()?;
            return Err(BundleError::io("append to", &self.path, error));
        }
        self.len += line.len() as u64;
        Ok(())
    }

    fn at(&mut self, offset: u64) -> Result<&mut File, BundleError> {
        self.file
            .seek(SeekFrom::Start(offset))
            .map_err(|e| BundleError::io("seek in", &self.path, e))?;
        Ok(&mut self.file)
    }

    fn cut(&mut self) -> Result<(), BundleError> {
        self.file
            .set_len(self.len)
            .and_then(|()| self.file.sync_data())
            .map_err(|e| BundleError::io("shorten", &self.path, e))
    }
}

impl Drop for Journal {
    /// Unlocks explicitly: a child process started meanwhile may hold a copy of the handle for a moment.
    fn drop(&mut self) {
        // Closing the file unlocks it too, so a failure here changes nothing.
        let _ = self.file.unlock();
    }
}

/// Reads a journal without locking or changing it.
pub fn read(path: &Path) -> Result<Replay, BundleError> {
    let bytes = std::fs::read(path).map_err(|e| BundleError::io("read", path, e))?;
    replay(&bytes, path)
}

fn encode(entry: &Entry) -> serde_json::Result<Vec<u8>> {
    let entry = serde_json::to_vec(entry)?;
    let sum = sha256_hex(&entry);
    let parts = [
        BEFORE_SUM,
        &sum.as_bytes()[..SUM_DIGITS],
        BEFORE_ENTRY,
        &entry,
        b"}\n",
    ];
    Ok(parts.concat())
}

/// The entry of one line without its newline, or what is wrong with it.
fn decode(line: &[u8]) -> Result<Entry, String> {
    let (sum, entry) = line
        .strip_prefix(BEFORE_SUM)
        .and_then(|rest| rest.split_at_checked(SUM_DIGITS))
        .and_then(|(sum, rest)| Some((sum, rest.strip_prefix(BEFORE_ENTRY)?.strip_suffix(b"}")?)))
        .ok_or("it has no checksum and entry")?;
    if &sha256_hex(entry).as_bytes()[..SUM_DIGITS] != sum {
        return Err("its checksum does not match".to_owned());
    }
    serde_json::from_slice(entry).map_err(|e| e.to_string())
}

fn replay(bytes: &[u8], path: &Path) -> Result<Replay, BundleError> {
    let mut out = Replay::default();
    let mut start = 0;
    while let Some(end) = bytes[start..].iter().position(|&b| b == b'\n') {
        let next = start + end + 1;
        match decode(&bytes[start..next - 1]) {
            Ok(entry) => out.entries.push(entry),
            Err(_) if next == bytes.len() => break,
            Err(problem) => {
                return Err(BundleError::Damaged {
                    path: path.to_owned(),
                    line: out.entries.len() + 1,
                    problem,
                });
            }
        }
        start = next;
    }
    out.whole_bytes = start as u64;
    out.torn_bytes = (bytes.len() - start) as u64;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::records::CellStatus;

    fn cell(id: &str) -> Entry {
        Entry::Cell(CellRecord {
            id: id.to_owned(),
            status: CellStatus::Done,
            n_skipped: 0,
            wall_s: 0.1,
        })
    }

    fn three_lines() -> Vec<u8> {
        ["a", "b", "c"]
            .iter()
            .flat_map(|id| encode(&cell(id)).unwrap())
            .collect()
    }

    #[test]
    fn a_line_is_json() {
        let line = encode(&cell("x")).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&line).unwrap();
        assert_eq!(value["sum"].as_str().unwrap().len(), 16);
        assert_eq!(value["entry"]["cell"]["id"], "x");
    }

    #[test]
    fn cut_at_every_byte_the_whole_lines_stay() {
        let whole = three_lines();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let ends: Vec<usize> = (1..=whole.len())
            .filter(|&i| whole[i - 1] == b'\n')
            .collect();
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let mut journal = Journal::lock(&path).unwrap();
            let got = journal.recover().unwrap();
            let kept = ends.iter().filter(|&&end| end <= cut).count();
            assert_eq!(got.entries.len(), kept, "cut at {cut}");
            for id in ["a", "b", "c"].iter().skip(kept) {
                journal.append(&cell(id)).unwrap();
            }
            drop(journal);
            assert_eq!(std::fs::read(&path).unwrap(), whole, "cut at {cut}");
        }
    }

    #[test]
    fn a_flipped_byte_is_found() {
        let whole = three_lines();
        let path = Path::new("journal.jsonl");
        let first = whole.iter().position(|&b| b == b'\n').unwrap();
        for at in [0, 9, 40, first - 1] {
            let mut bad = whole.clone();
            bad[at] ^= 1;
            let error = replay(&bad, path).unwrap_err();
            assert!(
                matches!(error, BundleError::Damaged { line: 1, .. }),
                "{error}"
            );
        }
        let mut bad = whole.clone();
        let last = bad.len() - 4;
        bad[last] ^= 1;
        let got = replay(&bad, path).unwrap();
        assert_eq!(got.entries.len(), 2);
        assert!(got.torn_bytes > 0);
    }

    #[test]
    fn two_writers_are_one_too_many() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let first = Journal::lock(&path).unwrap();
        assert!(matches!(Journal::lock(&path), Err(BundleError::Locked(_))));
        drop(first);
        Journal::lock(&path).unwrap();
    }
}
