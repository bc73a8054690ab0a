//! Memories of the checks' own: one that counts what it holds, one that hands out no slices.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cache::pages::{HostStore, PageId, PageStore};

/// Host memory that never hands out a slice, as a device's does not.
#[derive(Debug, Default)]
pub struct NoSlices(HostStore);

/// Host memory whose bytes are counted where they are asked for and given back, apart from the cache's own sums.
#[derive(Debug, Default)]
pub struct Counting {
    inner: HostStore,
    /// Bytes that live now.
    pub live_bytes: Arc<AtomicU64>,
}

impl Counting {
    /// What `work` changes is counted.
    fn counted<T>(&mut self, work: impl FnOnce(&mut HostStore) -> T) -> T {
        let before = self.inner.bytes();
        let done = work(&mut self.inner);
        let after = self.inner.bytes();
        self.live_bytes.fetch_add(after, Ordering::Relaxed);
        self.live_bytes.fetch_sub(before, Ordering::Relaxed);
        done
    }
}

impl PageStore for NoSlices {
    fn alloc(&mut self, bytes: usize) -> PageId {
        self.0.alloc(bytes)
    }
    fn resize(&mut self, id: PageId, bytes: usize) {
        self.0.resize(id, bytes);
    }
    fn write(&mut self, id: PageId, offset: usize, data: &[u8]) {
        self.0.write(id, offset, data);
    }
    fn read(&self, id: PageId, offset: usize, out: &mut [u8]) {
        self.0.read(id, offset, out);
    }
    fn view(&self, _: PageId) -> Option<&[u8]> {
        None
    }
    fn share(&mut self, id: PageId) {
        self.0.share(id);
    }
    fn unshare(&mut self, id: PageId) -> PageId {
        self.0.unshare(id)
    }
    fn free(&mut self, id: PageId) {
        self.0.free(id);
    }
    fn page_bytes(&self, id: PageId) -> usize {
        self.0.page_bytes(id)
    }
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }
    fn bookkeeping_bytes(&self) -> u64 {
        self.0.bookkeeping_bytes()
    }
}

impl PageStore for Counting {
    fn alloc(&mut self, bytes: usize) -> PageId {
        self.counted(|s| s.alloc(bytes))
    }
    fn resize(&mut self, id: PageId, bytes: usize) {
        self.counted(|s| s.resize(id, bytes));
    }
    fn write(&mut self, id: PageId, offset: usize, data: &[u8]) {
        self.inner.write(id, offset, data);
    }
    fn read(&self, id: PageId, offset: usize, out: &mut [u8]) {
        self.inner.read(id, offset, out);
    }
    fn view(&self, id: PageId) -> Option<&[u8]> {
        self.inner.view(id)
    }
    fn share(&mut self, id: PageId) {
        self.inner.share(id);
    }
    fn unshare(&mut self, id: PageId) -> PageId {
        self.counted(|s| s.unshare(id))
    }
    fn free(&mut self, id: PageId) {
        self.counted(|s| s.free(id));
    }
    fn page_bytes(&self, id: PageId) -> usize {
        self.inner.page_bytes(id)
    }
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }
    fn bookkeeping_bytes(&self) -> u64 {
        self.inner.bookkeeping_bytes()
    }
}
