//! The tier of exact rows: blocks of rows in host memory or in a file, read row by row by threads of their own.
//!
//! Invariants: a block belongs to one range of one KV head and has a record, K then V, for each of its 128 positions; a
//! block that forks share is copied before it is written; its room is given back with its last owner. A file has no name
//! and is gone when the vault is. Its reads go past the system's page cache where the file system allows that; what was
//! read is the same either way.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::super::CacheError;
use super::super::place::file::extents::{Extent, Extents};
use super::super::place::file::page_file::PageFile;
use super::super::{RANGE, types::Traffic};

/// Reads past the page cache start and end at multiples of this.
const SECTOR: usize = 512;
/// Threads that read: a disk answers several at a time sooner than one after the other.
const N_READERS: usize = 8;
/// Reads that a thread takes at a time.
const SHARE: usize = 8;

/// Where blocks are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Home {
    /// Host memory.
    Memory,
    /// A file in a directory; the system's temporary one if `None`.
    File(Option<PathBuf>),
}

/// The tier.
pub struct Vault {
    shared: Arc<Shared>,
    jobs: Sender<Job>,
}

#[derive(Debug)]
struct Shared {
    disk: Option<Disk>,
    bytes: AtomicU64,
}

#[derive(Debug)]
struct Disk {
    /// Writes, and reads where `direct` is not to be had.
    file: PageFile,
    /// Reads past the page cache.
    direct: Option<PageFile>,
    extents: Mutex<Extents>,
    dir: PathBuf,
}

/// The records of one range of one KV head.
#[derive(Debug)]
pub struct Block {
    shared: Arc<Shared>,
    room: Room,
    n_bytes: usize,
}

#[derive(Debug)]
enum Room {
    Memory(RwLock<Vec<u8>>),
    Disk(Extent),
}

/// Neighbouring records to be read.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Whose, in the asker's numbering.
    pub tag: usize,
    /// Of which block.
    pub block: Arc<Block>,
    /// The first one's place in the block, bytes.
    pub offset: usize,
    /// Bytes.
    pub n_bytes: usize,
}

struct Job {
    wanted: Vec<Wanted>,
    answers: Sender<Answer>,
}

type Answer = io::Result<Vec<(usize, Vec<u8>)>>;

/// Records on their way.
#[derive(Debug)]
pub struct Request {
    answers: Mutex<Receiver<Answer>>,
    n_left: usize,
}

impl Vault {
    /// An empty tier and its readers.
    ///
    /// # Errors
    /// A file that can't be made, or a thread.
    pub fn open(home: &Home) -> Result<Self, CacheError> {
        let disk = match home {
            Home::Memory => None,
            Home::File(dir) => Some(Disk::open(
                dir.clone().unwrap_or_else(std::env::temp_dir).as_path(),
            )?),
        };
        let (jobs, queue) = channel::<Job>();
        let queue = Arc::new(Mutex::new(queue));
        for _ in 0..N_READERS {
            let queue = Arc::clone(&queue);
            let reader = std::thread::Builder::new().name("kvlab-vault".into());
            reader.spawn(move || {
                loop {
                    let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(job) = job else { return };
                    // Nobody waits any more: the asker's business.
                    let _ = job.answers.send(read_all(job.wanted));
                }
            })?;
        }
        Ok(Self {
            shared: Arc::new(Shared {
                disk,
                bytes: AtomicU64::new(0),
            }),
            jobs,
        })
    }

    /// A block of records of that size.
    ///
    /// # Errors
    /// What the system says of the file.
    pub fn block(&self, record_bytes: usize) -> Result<Arc<Block>, CacheError> {
        Ok(Arc::new(Block::new(&self.shared, RANGE * record_bytes)?))
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// Asks for records; they come while the asker does something else. Adds to `traffic` what will be moved.
    pub fn ask(&self, wanted: Vec<Wanted>, traffic: &mut Traffic) -> Request {
        let cached = self
            .shared
            .disk
            .as_ref()
            .is_some_and(|d| d.direct.is_none());
        for w in &wanted {
            let (_, n) = self.shared.span(&w.block.room, w.offset, w.n_bytes);
            traffic.moved_bytes += n as u64;
            traffic.n_reads += 1;
            traffic.n_cached_reads += u64::from(cached);
        }
        let (answer, answers) = channel();
        let mut n_left = 0;
        for share in wanted.chunks(SHARE) {
            let job = Job {
                wanted: share.to_vec(),
                answers: answer.clone(),
            };
            // Readers live as long as the vault.
            n_left += usize::from(self.jobs.send(job).is_ok());
        }
        Request {
            answers: Mutex::new(answers),
            n_left,
        }
    }
}

impl Request {
    /// Waits for all records: their tags and bytes, in order of the tags.
    ///
    /// # Errors
    /// The first read that failed.
    pub fn wait(self) -> Result<Vec<(usize, Vec<u8>)>, CacheError> {
        let answers = self
            .answers
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        let mut all = Vec::new();
        for _ in 0..self.n_left {
            let answer = answers.recv();
            all.extend(answer.map_err(|e| CacheError::Pack(format!("the tier's reader: {e}")))??);
        }
        all.sort_by_key(|&(tag, _)| tag);
        Ok(all)
    }
}

fn read_all(wanted: Vec<Wanted>) -> Answer {
    let read = |w: Wanted| Ok((w.tag, w.block.read(w.offset, w.n_bytes)?));
    wanted.into_iter().map(read).collect()
}

impl Disk {
    fn open(dir: &Path) -> io::Result<Self> {
        let named = tempfile::NamedTempFile::new_in(dir).map_err(|e| {
            io::Error::new(
                e.kind(),
                format!("can't make a file in {}: {e}", dir.display()),
            )
        })?;
        let direct = past_the_page_cache(named.path());
        // Without a name from here on: gone with its last handle, whatever ends the program.
        let file = PageFile::new(named.into_file());
        file.set_len(SECTOR as u64)?;
        // Some file systems refuse such reads when they are opened, some when they read.
        let direct = direct.filter(|direct| read_aligned(direct, 0, SECTOR, |_| ()).is_ok());
        Ok(Self {
            file,
            direct,
            extents: Mutex::default(),
            dir: dir.to_owned(),
        })
    }

    fn extents(&self) -> std::sync::MutexGuard<'_, Extents> {
        self.extents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A second handle whose reads pass the page cache by, if the file system has that.
#[cfg(target_os = "linux")]
fn past_the_page_cache(path: &Path) -> Option<PageFile> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = File::options();
    let options = options.read(true).custom_flags(libc::O_DIRECT);
    options.open(path).ok().map(PageFile::new)
}

#[cfg(not(target_os = "linux"))]
fn past_the_page_cache(_: &Path) -> Option<PageFile> {
    None::<File>.map(PageFile::new)
}

impl Shared {
    /// What is read for `n` bytes at `offset` of a room: where from, and how many.
    fn span(&self, room: &Room, offset: usize, n: usize) -> (u64, usize) {
        match (room, &self.disk) {
            (
                Room::Disk(extent),
                Some(Disk {
                    direct: Some(_), ..
                }),
            ) => {
                let first = extent.offset as usize + offset;
                let start = first / SECTOR * SECTOR;
                (start as u64, (first + n).next_multiple_of(SECTOR) - start)
            }
            (Room::Disk(extent), _) => (extent.offset + offset as u64, n),
            (Room::Memory(_), _) => (offset as u64, n),
        }
    }
}

impl Block {
    fn new(shared: &Arc<Shared>, n_bytes: usize) -> Result<Self, CacheError> {
        let room = match &shared.disk {
            None => Room::Memory(RwLock::new(vec![0; n_bytes])),
            Some(disk) => {
                let mut extents = disk.extents();
                let extent = extents.take(n_bytes.next_multiple_of(SECTOR) as u64);
                // Records that were never written are read along with their neighbours.
                let sized = disk.file.set_len(extents.end());
                sized.map_err(|e| explained(&e, "growing", &disk.dir))?;
                Room::Disk(extent)
            }
        };
        shared.bytes.fetch_add(n_bytes as u64, Ordering::Relaxed);
        Ok(Self {
            shared: Arc::clone(shared),
            room,
            n_bytes,
        })
    }

    fn disk(&self) -> io::Result<&Disk> {
        let none = || io::Error::new(io::ErrorKind::NotFound, "a block on disk without a file");
        self.shared.disk.as_ref().ok_or_else(none)
    }

    /// A copy with room of its own.
    ///
    /// # Errors
    /// Those of reading and writing.
    pub fn copy(&self) -> Result<Self, CacheError> {
        let copy = Self::new(&self.shared, self.n_bytes)?;
        copy.write(0, &self.read(0, self.n_bytes)?)?;
        Ok(copy)
    }

    /// Writes at `offset`.
    ///
    /// # Errors
    /// What the system says of the file.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), CacheError> {
        match &self.room {
            Room::Memory(room) => {
                let mut room = room.write().unwrap_or_else(PoisonError::into_inner);
                room[offset..offset + bytes.len()].copy_from_slice(bytes);
            }
            Room::Disk(extent) => {
                let disk = self.disk()?;
                let written = disk.file.write_at(bytes, extent.offset + offset as u64);
                written.map_err(|e| explained(&e, "writing to", &disk.dir))?;
            }
        }
        Ok(())
    }

    fn read(&self, offset: usize, n: usize) -> io::Result<Vec<u8>> {
        let (start, span) = self.shared.span(&self.room, offset, n);
        let extent = match &self.room {
            Room::Memory(room) => {
                let room = room.read().unwrap_or_else(PoisonError::into_inner);
                return Ok(room[offset..offset + n].to_vec());
            }
            Room::Disk(extent) => extent,
        };
        let disk = self.disk()?;
        let failed = |e| explained(&e, "reading from", &disk.dir);
        let Some(direct) = &disk.direct else {
            let mut out = vec![0; n];
            disk.file.read_at(&mut out, start).map_err(failed)?;
            return Ok(out);
        };
        let skip = extent.offset as usize + offset - start as usize;
        let own = |read: &[u8]| read[skip..skip + n].to_vec();
        read_aligned(direct, start, span, own).map_err(failed)
    }
}

/// Reads `n` bytes, whole sectors, past the page cache: into memory that starts at a sector's multiple, too.
fn read_aligned<T>(
    file: &PageFile,
    start: u64,
    n: usize,
    take: impl FnOnce(&[u8]) -> T,
) -> io::Result<T> {
    let mut room = vec![0; n + SECTOR];
    let at = room.as_ptr().align_offset(SECTOR);
    let room = &mut room[at..at + n];
    file.read_at(room, start)?;
    Ok(take(room))
}

impl Drop for Block {
    fn drop(&mut self) {
        self.shared
            .bytes
            .fetch_sub(self.n_bytes as u64, Ordering::Relaxed);
        if let (Room::Disk(extent), Some(disk)) = (&self.room, &self.shared.disk) {
            disk.extents().give(*extent);
        }
    }
}

fn explained(e: &io::Error, doing: &str, dir: &Path) -> io::Error {
    let what = format!("{doing} the file of exact rows in {}: {e}", dir.display());
    io::Error::new(e.kind(), what)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn homes() -> [Home; 2] {
        [Home::Memory, Home::File(None)]
    }

    #[test]
    fn records_come_back_whole_and_in_order_of_their_tags() {
        for home in homes() {
            let vault = Vault::open(&home).unwrap();
            let blocks: Vec<Arc<Block>> = (0..3).map(|_| vault.block(24).unwrap()).collect();
            for (i, block) in blocks.iter().enumerate() {
                let bytes: Vec<u8> = (0..RANGE * 24).map(|b| (b * 7 + i * 31) as u8).collect();
                block.write(0, &bytes).unwrap();
            }
            let wanted: Vec<Wanted> = (0..60)
                .map(|tag| Wanted {
                    tag: 59 - tag,
                    block: Arc::clone(&blocks[tag % 3]),
                    offset: 24 * (tag * 2),
                    n_bytes: 24 * (1 + tag % 4),
                })
                .collect();
            let mut traffic = Traffic::default();
            let got = vault.ask(wanted.clone(), &mut traffic).wait().unwrap();
            assert_eq!(traffic.n_reads, 60);
            let least: usize = wanted.iter().map(|w| w.n_bytes).sum();
            assert!(traffic.moved_bytes >= least as u64, "{home:?}");
            assert_eq!(
                got.iter().map(|g| g.0).collect::<Vec<_>>(),
                (0..60).collect::<Vec<_>>()
            );
            for w in wanted {
                let i = blocks
                    .iter()
                    .position(|b| Arc::ptr_eq(b, &w.block))
                    .unwrap();
                let want: Vec<u8> = (w.offset..w.offset + w.n_bytes)
                    .map(|b| (b * 7 + i * 31) as u8)
                    .collect();
                assert_eq!(got[w.tag].1, want, "{home:?}");
            }
        }
    }

    #[test]
    fn a_block_s_room_is_given_back_and_a_copy_is_its_own() {
        for home in homes() {
            let vault = Vault::open(&home).unwrap();
            let a = vault.block(16).unwrap();
            a.write(32, &[5; 16]).unwrap();
            let b = Arc::new(a.copy().unwrap());
            b.write(32, &[6; 16]).unwrap();
            assert_eq!(a.read(32, 16).unwrap(), [5; 16]);
            assert_eq!(b.read(32, 16).unwrap(), [6; 16]);
            assert_eq!(vault.bytes(), 2 * 16 * RANGE as u64);
            drop((a, b));
            assert_eq!(vault.bytes(), 0);
            if let Some(disk) = &vault.shared.disk {
                assert_eq!(disk.extents().end(), 0);
            }
        }
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let home = Home::File(Some("/nonexistent-kvlab".into()));
        let error = Vault::open(&home).err().unwrap().to_string();
        assert!(error.contains("/nonexistent-kvlab"), "{error}");
    }
}
