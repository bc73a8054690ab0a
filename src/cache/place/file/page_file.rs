//! A file that is read and written at offsets, by several readers at a time.
//!
//! Invariants: no position is shared between calls; a short read or write is an error.

use std::fs::File;
use std::io;

/// The file.
#[cfg(unix)]
#[derive(Debug)]
pub(crate) struct PageFile(File);

/// The file; where there are no reads at offsets, a seek and what follows it must not be torn apart.
#[cfg(not(unix))]
#[derive(Debug)]
pub(crate) struct PageFile(std::sync::Mutex<File>);

#[cfg(unix)]
impl PageFile {
    pub fn new(file: File) -> Self {
        Self(file)
    }

    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(&self.0, bytes, offset)
    }

    pub fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, out, offset)
    }

    pub fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
}

#[cfg(not(unix))]
impl PageFile {
    pub fn new(file: File) -> Self {
        Self(std::sync::Mutex::new(file))
    }

    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.at(offset, |file| io::Write::write_all(file, bytes))
    }

    pub fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        self.at(offset, |file| io::Read::read_exact(file, out))
    }

    pub fn set_len(&self, len: u64) -> io::Result<()> {
        self.at(len, |file| file.set_len(len))
    }

    fn at<T>(&self, offset: u64, act: impl FnOnce(&mut File) -> io::Result<T>) -> io::Result<T> {
        let mut file = self.0.lock().map_err(|e| io::Error::other(e.to_string()))?;
        io::Seek::seek(&mut *file, io::SeekFrom::Start(offset))?;
        act(&mut file)
    }
}
