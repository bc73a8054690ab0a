//! Where bytes live: the [`PageStore`] that owns every page of a cache, and the tier that parked pages go to.
//!
//! Invariants: a page is reached through its id alone; a page shared by forks is copied before it is written; bytes are
//! those of the buffers that exist, counted once however many sequences share them.

use std::collections::BTreeMap;

use super::CacheError;
use super::stage::{Backing, Slot};

/// Names a page of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageId(u32);

impl PageId {
    /// The id with that number, for stores of other memories.
    pub fn new(index: u32) -> Self {
        Self(index)
    }

    /// The id's number.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Owns pages in one memory (host, or a device).
pub trait PageStore: Send + Sync {
    /// A page of `bytes` zero bytes, owned once.
    fn alloc(&mut self, bytes: usize) -> PageId;
    /// Grows or shrinks a page that is owned once; kept bytes stay as they are.
    fn resize(&mut self, id: PageId, bytes: usize);
    /// Writes `data` at `offset` of a page that is owned once.
    fn write(&mut self, id: PageId, offset: usize, data: &[u8]);
    /// Copies bytes from `offset` on into `out`.
    fn read(&self, id: PageId, offset: usize, out: &mut [u8]);
    /// The page as a host slice, where the memory is the host's.
    fn view(&self, id: PageId) -> Option<&[u8]>;
    /// Moves pages that are read one after the other, as far as this memory can, to where they lie so.
    fn gather(&mut self, ids: &[PageId]) {
        let _ = ids;
    }
    /// Adds an owner.
    fn share(&mut self, id: PageId);
    /// A page with the same bytes that is owned once: the page itself, or a copy that replaces one ownership.
    fn unshare(&mut self, id: PageId) -> PageId;
    /// Gives one ownership back; the last one frees the page.
    fn free(&mut self, id: PageId);
    /// Allocated bytes of a page.
    fn page_bytes(&self, id: PageId) -> usize;
    /// Allocated bytes of all pages.
    fn bytes(&self) -> u64;
    /// Bytes of the store's own tables.
    fn bookkeeping_bytes(&self) -> u64;
}

#[derive(Debug, Default)]
struct HostPage {
    // No capacity beside the length: what is allocated is charged.
    data: Box<[u8]>,
    owners: u32,
}

/// Bytes of a page's entry in host memory.
pub(super) const ENTRY_BYTES: usize = size_of::<HostPage>();

/// Bytes of the entry of a page that is free.
pub(super) const FREE_ENTRY_BYTES: usize = size_of::<u32>();

/// Pages in host memory.
#[derive(Debug, Default)]
pub struct HostStore {
    pages: Vec<HostPage>,
    free: Vec<u32>,
}

impl PageStore for HostStore {
    fn alloc(&mut self, bytes: usize) -> PageId {
        let page = HostPage {
            data: vec![0; bytes].into_boxed_slice(),
            owners: 1,
        };
        if let Some(i) = self.free.pop() {
            self.pages[i as usize] = page;
            return PageId(i);
        }
        // The table is charged: it grows by little.
        if self.pages.len() == self.pages.capacity() {
            self.pages.reserve_exact(8);
        }
        self.pages.push(page);
        PageId(self.pages.len() as u32 - 1)
    }

    fn resize(&mut self, id: PageId, bytes: usize) {
        let page = &mut self.pages[id.index()].data;
        if bytes < page.len() {
            // What is left moves together with what is left of its neighbours: in place, each page of a sequence of which
            // most rows left would lie alone in the memory that it had, and be read at half the rate.
            *page = page[..bytes].into();
            return;
        }
        let mut data = std::mem::take(page).into_vec();
        data.reserve_exact(bytes.saturating_sub(data.len()));
        data.resize(bytes, 0);
        *page = data.into_boxed_slice();
    }

    fn write(&mut self, id: PageId, offset: usize, data: &[u8]) {
        self.pages[id.index()].data[offset..offset + data.len()].copy_from_slice(data);
    }

    fn read(&self, id: PageId, offset: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.pages[id.index()].data[offset..offset + out.len()]);
    }

    fn view(&self, id: PageId) -> Option<&[u8]> {
        Some(&self.pages[id.index()].data)
    }

    fn gather(&mut self, ids: &[PageId]) {
        // While the old ones are there, an allocator finds no room for the new ones but beside one another.
        let moved = ids.iter().map(|id| self.pages[id.index()].data.clone());
        let moved: Vec<Box<[u8]>> = moved.collect();
        for (id, data) in ids.iter().zip(moved) {
            self.pages[id.index()].data = data;
        }
    }

    fn share(&mut self, id: PageId) {
        self.pages[id.index()].owners += 1;
    }

    fn unshare(&mut self, id: PageId) -> PageId {
        if self.pages[id.index()].owners == 1 {
            return id;
        }
        let data = self.pages[id.index()].data.clone();
        self.free(id);
        let copy = self.alloc(0);
        self.pages[copy.index()].data = data;
        copy
    }

    fn free(&mut self, id: PageId) {
        let page = &mut self.pages[id.index()];
        page.owners -= 1;
        if page.owners == 0 {
            page.data = Box::default();
            self.free.push(id.0);
        }
        // The last page takes the tables with it: an empty cache holds nothing.
        if self.free.len() == self.pages.len() {
            *self = Self::default();
        }
    }

    fn page_bytes(&self, id: PageId) -> usize {
        self.pages[id.index()].data.len()
    }

    fn bytes(&self) -> u64 {
        self.pages.iter().map(|p| p.data.len() as u64).sum()
    }

    fn bookkeeping_bytes(&self) -> u64 {
        (self.pages.capacity() * size_of::<HostPage>() + self.free.capacity() * size_of::<u32>())
            as u64
    }
}

/// A backing tier whose slots may be shared by forks.
pub struct Tier {
    backing: Box<dyn Backing>,
    owners: BTreeMap<Slot, u32>,
}

impl Tier {
    /// An empty tier.
    pub fn new(backing: Box<dyn Backing>) -> Self {
        Self {
            backing,
            owners: BTreeMap::new(),
        }
    }

    /// Stores bytes in a slot that is owned once.
    pub fn park(&mut self, bytes: &[u8]) -> Result<Slot, CacheError> {
        let slot = self.backing.park(bytes)?;
        self.owners.insert(slot, 1);
        Ok(slot)
    }

    /// Reads a slot.
    pub fn fetch(&self, slot: Slot, out: &mut [u8]) -> Result<(), CacheError> {
        self.backing.fetch(slot, out)
    }

    /// Announces reads.
    pub fn prefetch(&self, slots: &[Slot]) {
        self.backing.prefetch(slots);
    }

    /// Adds an owner.
    pub fn share(&mut self, slot: Slot) {
        *self.owners.entry(slot).or_insert(0) += 1;
    }

    /// Gives one ownership back.
    pub fn free(&mut self, slot: Slot) {
        if let Some(n) = self.owners.get_mut(&slot) {
            *n -= 1;
            if *n == 0 {
                self.owners.remove(&slot);
                self.backing.discard(slot);
            }
        }
    }

    /// Bytes in the tier.
    pub fn bytes(&self) -> u64 {
        self.backing.bytes()
    }

    /// Bytes in memory by which the tier knows what it holds.
    pub fn bookkeeping_bytes(&self) -> u64 {
        self.backing.bookkeeping_bytes() + tree_bytes(&self.owners)
    }
}

/// About the bytes of a map's leaves: std's have room for 11 entries and a header, and keys that ascend leave 6 in each.
/// Inner nodes (a sixth of a leaf for each) are left out.
pub fn tree_bytes<K, V>(map: &BTreeMap<K, V>) -> u64 {
    let leaf = 11 * (size_of::<K>() + size_of::<V>()) + 16;
    (map.len().div_ceil(6) * leaf) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_page_is_copied_before_it_is_written() {
        let mut store = HostStore::default();
        let a = store.alloc(4);
        store.write(a, 0, &[1, 2, 3, 4]);
        store.share(a);
        let b = store.unshare(a);
        assert_ne!(a, b);
        store.write(b, 0, &[9]);
        let mut out = [0; 4];
        store.read(a, 0, &mut out);
        assert_eq!(out, [1, 2, 3, 4]);
        store.read(b, 0, &mut out);
        assert_eq!(out, [9, 2, 3, 4]);
        assert_eq!(store.bytes(), 8);
        store.free(a);
        assert_eq!(store.bytes(), 4);
        assert_eq!(store.unshare(b), b);
        store.gather(&[b]);
        store.read(b, 0, &mut out);
        assert_eq!(out, [9, 2, 3, 4]);
        assert!(store.bookkeeping_bytes() > 0);
        store.free(b);
        assert_eq!(store.bytes() + store.bookkeeping_bytes(), 0);
    }
}
