//! A bundle: the folder `results/<experiment>/<run-id>/` that holds everything a run stated and measured.
//!
//! ```text
//! plan.json         the resolved plan                      written before work
//! header.json       what reports need of it ([`header`])   written before work
//! environment.json  program, machine, moment               written before work
//! journal.jsonl     records, one synced line per append    grows ([`journal`])
//! manifest.json     hashes of the four above               written last: its presence means finished
//! bars.json         what the run must show                 can change: it makes no result
//! table.md ...      derived by `report`, can be written again at any time
//! ```
//!
//! Invariants: a file is written whole and renamed into place, the journal apart; one writer at a time; the run-id is
//! the plan's hash (8 digits), so that the same plan goes on where it ended. Records of different programs or machine
//! classes never mix: a bundle made by another [`environment::Engine`] is left alone, and `<hash>-2` begins.

pub mod environment;
mod error;
pub mod header;
pub mod journal;
pub mod manifest;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::eval::bars::Bar;
use crate::eval::records::{CellRecord, ItemRecord};
use environment::Environment;
pub use error::BundleError;
use header::RunHeader;
use journal::{Entry, Journal, Replay};
use manifest::Manifest;

/// The resolved plan.
pub const PLAN: &str = "plan.json";
/// The run's header.
pub const HEADER: &str = "header.json";
/// Where the run was made.
pub const ENVIRONMENT: &str = "environment.json";
/// What the run must show.
pub const BARS: &str = "bars.json";
/// The records.
pub const JOURNAL: &str = "journal.jsonl";

const RAW_FILES: [&str; 4] = [PLAN, HEADER, ENVIRONMENT, JOURNAL];
const ID_DIGITS: usize = 8;

/// Whether to go on with an earlier run of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Go on with the newest one made by the same engine.
    Resume,
    /// Always begin another one.
    Fresh,
}

/// What a run is, before it starts.
#[derive(Debug, Clone, Copy)]
pub struct Start<'a> {
    /// Folder of all results.
    pub results_dir: &'a Path,
    /// The resolved plan, as it is to be kept.
    pub plan: &'a serde_json::Value,
    /// The run's header.
    pub header: &'a RunHeader,
    /// Where it runs.
    pub environment: &'a Environment,
}

/// How a bundle was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nothing was there.
    New,
    /// An interrupted run goes on.
    Resumed {
        /// Records that are there already.
        n_items: usize,
        /// Bytes of a torn line that were dropped.
        torn_bytes: u64,
    },
    /// The run is finished; only reports are left to make.
    Finished,
}

/// A bundle open for writing; it holds the bundle's lock.
#[derive(Debug)]
pub struct Bundle {
    path: PathBuf,
    state: State,
    journal: Journal,
    cells: BTreeSet<String>,
    done: BTreeSet<(String, usize)>,
    ended: Vec<CellRecord>,
}

impl Bundle {
    /// Opens the bundle of a plan, or creates it and writes plan, header and environment.
    ///
    /// # Errors
    /// The folder can't be written, is locked by another run, is damaged, or states another plan.
    pub fn open_or_create(start: &Start<'_>, mode: Mode) -> Result<Self, BundleError> {
        let path = choose_folder(start, mode)?;
        fs::create_dir_all(&path).map_err(|e| BundleError::io("create", &path, e))?;
        let mut journal = Journal::lock(&path.join(JOURNAL))?;
        let finished = Manifest::verify(&path)?.is_some();
        let replay = journal.recover()?;
        let fresh = !path.join(ENVIRONMENT).exists();
        write_or_compare(&path.join(PLAN), start.plan)?;
        write_or_compare(&path.join(HEADER), start.header)?;
        if fresh {
            write_json(&path.join(ENVIRONMENT), start.environment)?;
        }
        let mut bundle = Self {
            path,
            state: State::New,
            journal,
            cells: start.header.cells.iter().map(|c| c.id.clone()).collect(),
            done: BTreeSet::new(),
            ended: Vec::new(),
        };
        let torn_bytes = replay.torn_bytes;
        let (items, cells) = split(replay);
        for item in &items {
            bundle.expect_new(item)?;
            bundle.done.insert((item.cell.clone(), item.item));
        }
        bundle.ended = cells;
        bundle.state = match (finished, fresh) {
            (true, _) => State::Finished,
            (false, true) => State::New,
            (false, false) => State::Resumed {
                n_items: bundle.done.len(),
                torn_bytes,
            },
        };
        Ok(bundle)
    }

    /// The bundle's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How it was found.
    pub fn state(&self) -> State {
        self.state
    }

    /// Whether a record of this cell and item is kept already.
    pub fn is_done(&self, cell: &str, item: usize) -> bool {
        self.done.contains(&(cell.to_owned(), item))
    }

    /// Ends of cells that are kept already.
    pub fn ended(&self) -> &[CellRecord] {
        &self.ended
    }

    /// Keeps records that were finished together (one document in all cells, say): all of them or, after a crash, none.
    ///
    /// # Errors
    /// A record contradicts itself, is of an unknown cell or kept already, or the disk refuses. Nothing is kept then.
    pub fn append(&mut self, items: &[ItemRecord]) -> Result<(), BundleError> {
        self.expect_unfinished()?;
        let mut keys = BTreeSet::new();
        for item in items {
            item.check()?;
            self.expect_new(item)?;
            if !keys.insert((item.cell.clone(), item.item)) {
                return Err(unexpected(item, "two records at once"));
            }
        }
        if !items.is_empty() {
            self.journal.append(&Entry::Items(items.to_vec()))?;
            self.done.append(&mut keys);
        }
        Ok(())
    }

    /// Keeps the end of a cell. A later one replaces an earlier one.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn append_cell(&mut self, cell: &CellRecord) -> Result<(), BundleError> {
        self.expect_unfinished()?;
        self.journal.append(&Entry::Cell(cell.clone()))?;
        self.ended.retain(|c| c.id != cell.id);
        self.ended.push(cell.clone());
        Ok(())
    }

    /// Seals the bundle: writes the manifest, after which nothing can be appended. Does nothing if it is sealed.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn finish(&mut self) -> Result<(), BundleError> {
        if self.state != State::Finished {
            Manifest::seal(&self.path, self.done.len())?;
            self.state = State::Finished;
        }
        Ok(())
    }

    /// Says what the run must show, in place of what was said before. No result depends on it: a finished bundle takes it
    /// too.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn state_bars(&self, bars: &[Bar]) -> Result<(), BundleError> {
        let path = self.path.join(BARS);
        match bars {
            [] => write_or_remove(&path, &[]),
            _ => write_json(&path, &bars),
        }
    }

    /// Reads a bundle, finished or not, without changing it. A finished one is checked against its manifest.
    ///
    /// # Errors
    /// A file is missing, unreadable, damaged or altered.
    pub fn read(path: &Path) -> Result<Contents, BundleError> {
        let manifest = Manifest::verify(path)?;
        let replay = journal::read(&path.join(JOURNAL))?;
        let torn_bytes = replay.torn_bytes;
        let (items, cells) = split(replay);
        let bars = path.join(BARS);
        Ok(Contents {
            path: path.to_owned(),
            header: read_json(&path.join(HEADER))?,
            environment: read_json(&path.join(ENVIRONMENT))?,
            items,
            cells,
            bars: match bars.exists() {
                true => read_json(&bars)?,
                false => Vec::new(),
            },
            is_finished: manifest.is_some(),
            torn_bytes,
        })
    }

    fn expect_unfinished(&self) -> Result<(), BundleError> {
        match self.state {
            State::Finished => Err(BundleError::Finished(self.path.clone())),
            State::New | State::Resumed { .. } => Ok(()),
        }
    }

    fn expect_new(&self, item: &ItemRecord) -> Result<(), BundleError> {
        if !self.cells.contains(&item.cell) {
            return Err(unexpected(item, "the header lists no such cell"));
        }
        if self.is_done(&item.cell, item.item) {
            return Err(unexpected(item, "it has a record already"));
        }
        Ok(())
    }
}

/// What a bundle holds, in a fixed order that does not depend on the journal's.
#[derive(Debug, Clone, PartialEq)]
pub struct Contents {
    /// The folder.
    pub path: PathBuf,
    /// What the run stated before it started.
    pub header: RunHeader,
    /// Where it was made.
    pub environment: Environment,
    /// All records, by cell id and item.
    pub items: Vec<ItemRecord>,
    /// Ends of cells, by id, the latest of each.
    pub cells: Vec<CellRecord>,
    /// What the run must show.
    pub bars: Vec<Bar>,
    /// Whether the run is finished.
    pub is_finished: bool,
    /// Bytes of a torn last line that were passed over.
    pub torn_bytes: u64,
}

/// Writes a file whole: beside its place, synced, then renamed into it.
///
/// # Errors
/// The file system refuses; nothing is left behind.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), BundleError> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let beside = PathBuf::from(name);
    let written = fs::File::create(&beside)
        .and_then(|mut file| {
            std::io::Write::write_all(&mut file, bytes)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&beside, path));
    if let Err(error) = written {
        // The first error is the one to report; the leftover may not even exist.
        let _ = fs::remove_file(&beside);
        return Err(BundleError::io("write", path, error));
    }
    sync_folder(path)
}

/// [`write_atomic`]; with nothing to write, no file is left either.
///
/// # Errors
/// The file system refuses.
pub fn write_or_remove(path: &Path, bytes: &[u8]) -> Result<(), BundleError> {
    if !bytes.is_empty() {
        return write_atomic(path, bytes);
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(BundleError::io("remove", path, error))
        }
        _ => Ok(()),
    }
}

/// Makes a rename last: on Unix the folder is synced too.
fn sync_folder(path: &Path) -> Result<(), BundleError> {
    #[cfg(unix)]
    if let Some(folder) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        fs::File::open(folder)
            .and_then(|f| f.sync_all())
            .map_err(|e| BundleError::io("sync", folder, e))?;
    }
    Ok(())
}

fn unexpected(item: &ItemRecord, problem: &'static str) -> BundleError {
    BundleError::Unexpected {
        cell: item.cell.clone(),
        item: item.item,
        problem,
    }
}

fn split(replay: Replay) -> (Vec<ItemRecord>, Vec<CellRecord>) {
    let (mut items, mut cells) = (Vec::new(), Vec::<CellRecord>::new());
    for entry in replay.entries {
        match entry {
            Entry::Items(mut more) => items.append(&mut more),
            Entry::Cell(cell) => {
                cells.retain(|c| c.id != cell.id);
                cells.push(cell);
            }
        }
    }
    items.sort_by(|a, b| (&a.cell, a.item).cmp(&(&b.cell, b.item)));
    cells.sort_by(|a, b| a.id.cmp(&b.id));
    (items, cells)
}

/// `<results>/<experiment>/<hash>`, or the newest `<hash>-k` after it.
fn choose_folder(start: &Start<'_>, mode: Mode) -> Result<PathBuf, BundleError> {
    let header = start.header;
    let is_plain = |name: &str| {
        !name.starts_with('.')
            && !name.is_empty()
            && name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    if !is_plain(&header.experiment) {
        return Err(BundleError::Name {
            what: "experiment's name",
            name: header.experiment.clone(),
            allowed: "letters, digits, `.`, `_` and `-` are allowed and it does not begin with `.`",
        });
    }
    let id = header
        .plan_hash
        .get(..ID_DIGITS)
        .filter(|id| id.chars().all(|c| c.is_ascii_hexdigit()))
        .ok_or_else(|| BundleError::Name {
            what: "plan's hash",
            name: header.plan_hash.clone(),
            allowed: "it has at least 8 hexadecimal digits",
        })?;
    let parent = start.results_dir.join(&header.experiment);
    let nth = |k: usize| match k {
        1 => parent.join(id),
        _ => parent.join(format!("{id}-{k}")),
    };
    let Some(newest) = (1..).take_while(|&k| nth(k).exists()).last() else {
        return Ok(nth(1));
    };
    let goes_on = mode == Mode::Resume && {
        let environment = nth(newest).join(ENVIRONMENT);
        // Killed before its environment was written: it holds nothing yet.
        !environment.exists()
            || read_json::<Environment>(&environment)?.engine == start.environment.engine
    };
    Ok(nth(if goes_on { newest } else { newest + 1 }))
}

fn write_or_compare<T: Serialize>(path: &Path, value: &T) -> Result<(), BundleError> {
    if !path.exists() {
        return write_json(path, value);
    }
    let asked = serde_json::to_value(value).map_err(|e| BundleError::json("compare", path, e))?;
    if read_json::<serde_json::Value>(path)? != asked {
        return Err(BundleError::OtherRun(path.to_owned()));
    }
    Ok(())
}

fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), BundleError> {
    let text =
        serde_json::to_string_pretty(value).map_err(|e| BundleError::json("write", path, e))?;
    write_atomic(path, format!("{text}\n").as_bytes())
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, BundleError> {
    let bytes = fs::read(path).map_err(|e| BundleError::io("read", path, e))?;
    serde_json::from_slice(&bytes).map_err(|e| BundleError::json("read", path, e))
}

#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod tests;
