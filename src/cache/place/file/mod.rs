//! `file`: sealed pages parked in a temporary file, read back when they are attended.
//!
//! Invariants: the file has no name (it is unlinked as soon as it is open where the system can do that) and is gone when
//! the cache is, whatever ends the program; a page comes back exactly or as an error, since a checksum kept in memory is
//! compared at each read; freed extents are used again and the file is cut when its end is free.
//!
//! `prefetch` does nothing: pages pass through the operating system's page cache when they are written, which keeps them
//! while memory is free and reads ahead otherwise. A read is one `pread` per page.

pub(crate) mod extents;
pub(crate) mod page_file;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::CacheError;
use super::super::pages::tree_bytes;
use super::super::stage::{
    Backing, BuildContext, Kind, Params, Placement, Slot, Stage, StageDef, StageError, Tolerance,
    never,
};
use extents::{Extent, Extents};
use page_file::PageFile;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "file",
    kind: Kind::Place,
    doc: "sealed pages in a temporary file, read when attended",
    paper: "FlexGen, arXiv 2303.06865 (disk as the third tier)",
    params: &[],
    calibrated: never,
    examples: &["\"file\""],
    tolerance: Tolerance::Exact,
    build,
};

fn build(_: &Params, context: &BuildContext<'_>) -> Result<Stage, StageError> {
    let dir = context.backing_dir.cloned();
    match dir {
        Some(dir) if !dir.is_dir() => Err(StageError::Parameter {
            kind: Kind::Place,
            name: DEF.name.to_owned(),
            problem: format!(
                "backing directory {} is not a directory: create it or name another",
                dir.display()
            ),
        }),
        dir => Ok(Stage::Place(Arc::new(FilePlacement { dir }))),
    }
}

/// The stage: opens one file per cache.
#[derive(Debug, Clone)]
pub struct FilePlacement {
    /// Where files are made; the system's temporary directory if `None`.
    pub dir: Option<PathBuf>,
}

impl Placement for FilePlacement {
    fn open(&self) -> Result<Box<dyn Backing>, CacheError> {
        let dir = self.dir.clone().unwrap_or_else(std::env::temp_dir);
        let file = tempfile::tempfile_in(&dir)
            .map_err(|e| explained(&e, &format!("can't make a file in {}", dir.display())))?;
        Ok(Box::new(FileBacking {
            file: PageFile::new(file),
            dir,
            extents: Extents::default(),
            pages: BTreeMap::new(),
            next_slot: 0,
            live_bytes: 0,
        }))
    }
}

#[derive(Debug)]
struct Parked {
    extent: Extent,
    checksum: u64,
}

#[derive(Debug)]
struct FileBacking {
    file: PageFile,
    dir: PathBuf,
    extents: Extents,
    /// By slot; slots are never used twice, so a stale one is noticed.
    pages: BTreeMap<u64, Parked>,
    next_slot: u64,
    live_bytes: u64,
}

impl Backing for FileBacking {
    fn park(&mut self, bytes: &[u8]) -> Result<Slot, CacheError> {
        let extent = self.extents.take(bytes.len() as u64);
        if let Err(e) = self.file.write_at(bytes, extent.offset) {
            self.extents.give(extent);
            return Err(failed(&e, "parking", extent, &self.dir));
        }
        let slot = self.next_slot;
        self.next_slot += 1;
        self.live_bytes += extent.len;
        let checksum = checksum(bytes);
        self.pages.insert(slot, Parked { extent, checksum });
        Ok(Slot(slot))
    }

    fn prefetch(&self, _slots: &[Slot]) {}

    fn fetch(&self, slot: Slot, out: &mut [u8]) -> Result<(), CacheError> {
        let Some(&Parked {
            extent,
            checksum: want,
        }) = self.pages.get(&slot.0)
        else {
            let message = format!(
                "slot {} holds no page: it was never parked or was discarded",
                slot.0
            );
            return Err(io::Error::new(io::ErrorKind::NotFound, message).into());
        };
        if extent.len != out.len() as u64 {
            let message = format!(
                "slot {} holds {} bytes, {} were asked for",
                slot.0,
                extent.len,
                out.len()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message).into());
        }
        self.file
            .read_at(out, extent.offset)
            .map_err(|e| failed(&e, "fetching", extent, &self.dir))?;
        if checksum(out) == want {
            return Ok(());
        }
        let e = io::Error::new(
            io::ErrorKind::InvalidData,
            "they are not the bytes that were parked; the disk or another program changed them",
        );
        Err(failed(&e, "fetching", extent, &self.dir))
    }

    fn discard(&mut self, slot: Slot) {
        let Some(page) = self.pages.remove(&slot.0) else {
            return;
        };
        let before = self.extents.end();
        self.extents.give(page.extent);
        self.live_bytes -= page.extent.len;
        if self.extents.end() < before {
            // Only gives disk space back early: a failure changes nothing that is read later.
            let _ = self.file.set_len(self.extents.end());
        }
    }

    fn bytes(&self) -> u64 {
        self.live_bytes
    }

    fn bookkeeping_bytes(&self) -> u64 {
        tree_bytes(&self.pages) + self.extents.bookkeeping_bytes()
    }
}

fn explained(e: &io::Error, what: &str) -> CacheError {
    io::Error::new(e.kind(), format!("{what}: {e}")).into()
}

fn failed(e: &io::Error, doing: &str, extent: Extent, dir: &Path) -> CacheError {
    let Extent { offset, len } = extent;
    explained(
        e,
        &format!(
            "{doing} {len} bytes at {offset} of the pages' file in {}",
            dir.display()
        ),
    )
}

/// Words of 8 bytes through a multiplication and a rotation each: any single damaged byte changes it.
fn checksum(bytes: &[u8]) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |h: u64, word: u64| ((h ^ word).wrapping_mul(ODD)).rotate_left(29);
    let (words, rest) = bytes.as_chunks();
    let h = words
        .iter()
        .fold(bytes.len() as u64, |h, w| mix(h, u64::from_le_bytes(*w)));
    rest.iter().fold(h, |h, &b| mix(h, u64::from(b)))
}

#[cfg(test)]
mod tests;
