//! A table of rows of one side of one KV head, in pages of one range of 128 positions each.
//!
//! Invariants: a page's bytes are those of its stored rows, in order; the bitmap is the only record of which rows live
//! (one bit per position); an open page of row-wise rows grows and shrinks by granules of 16 rows. A row that leaves a
//! page-wise page becomes a hole: still stored, no longer live, until no row of the page lives or it is coded anew.

use super::formats::{Format, Ladder, Mask, pages};
use super::pages::{PageId, PageStore};
use super::places::{Packing, Page, PageBytes, Places, ReadBuffers};
use super::rebuild::Rebuild;
use super::stage::Codec;
use super::types::Rebuilt;
use super::{CacheError, RANGE};

/// Rows by which an open page grows.
const GRANULE: usize = 16;

/// The rows of one side of one KV head in one format, in order of position.
#[derive(Debug, Default)]
pub struct RowTable {
    pages: Vec<Page>,
}

impl RowTable {
    /// Pages in order of their ranges; a range without rows has none.
    pub fn pages(&self) -> &[Page] {
        &self.pages
    }

    /// The page of a range.
    pub fn page(&self, range: u32) -> Option<&Page> {
        self.index(range).ok().map(|i| &self.pages[i])
    }

    fn index(&self, range: u32) -> Result<usize, usize> {
        // Most tables have a page for every range from the first one on.
        let i = range.wrapping_sub(self.pages.first().map_or(0, |p| p.range)) as usize;
        if self.pages.get(i).is_some_and(|p| p.range == range) {
            return Ok(i);
        }
        self.pages.binary_search_by_key(&range, |p| p.range)
    }

    /// Bytes of the page table itself.
    pub fn table_bytes(&self) -> u64 {
        let holes: u64 = self.pages.iter().map(Page::hole_bytes).sum();
        (self.pages.capacity() * size_of::<Page>()) as u64 + holes
    }

    /// Appends rows of level 0: `rows` of a range, which come after every row that is there.
    pub fn push(
        &mut self,
        places: &mut Places<'_>,
        format: &Format,
        (range, rows): (u32, Mask),
        bytes: &[u8],
    ) -> Result<(), CacheError> {
        let i = match self.index(range) {
            Ok(i) => i,
            Err(i) => {
                let page = Page {
                    range,
                    sealed: false,
                    level: 0,
                    live: [0; 2],
                    holes: None,
                    bytes: PageBytes::Raw(places.store.alloc(0)),
                };
                self.reserve();
                self.pages.insert(i, page);
                i
            }
        };
        let id = self.own(i, places, format)?;
        let page = &mut self.pages[i];
        let (live, stored) = (page.live() | rows, page.stored());
        let held = places.reader().raw_bytes(page, format);
        let room = match &format.codec {
            Codec::Rows(_) => room_for(format, stored | rows),
            Codec::Pages(_) => held + bytes.len(),
        };
        if places.store.page_bytes(id) < held + bytes.len() {
            places.store.resize(id, room);
        }
        places.store.write(id, held, bytes);
        page.set(live, stored | rows);
        Ok(())
    }

    /// Appends a range's rows, none of which is there, in a page with room for no others.
    pub fn push_whole(
        &mut self,
        places: &mut Places<'_>,
        (range, rows): (u32, Mask),
        bytes: &[u8],
    ) {
        let id = places.store.alloc(bytes.len());
        places.store.write(id, 0, bytes);
        let mut page = Page {
            range,
            sealed: false,
            level: 0,
            live: [0; 2],
            holes: None,
            bytes: PageBytes::Raw(id),
        };
        page.set(rows, rows);
        self.reserve();
        self.pages.push(page);
    }

    /// Live positions, ascending.
    pub fn positions(&self) -> impl Iterator<Item = u32> {
        self.pages.iter().flat_map(Page::positions)
    }

    /// Grows the page table by little, since it is charged.
    fn reserve(&mut self) {
        if self.pages.len() == self.pages.capacity() {
            self.pages.reserve_exact(1);
        }
    }

    /// Makes a page raw and owned once, and returns it.
    fn own(
        &mut self,
        i: usize,
        places: &mut Places<'_>,
        format: &Format,
    ) -> Result<PageId, CacheError> {
        let page = &mut self.pages[i];
        let id = match page.bytes {
            PageBytes::Raw(id) => places.store.unshare(id),
            sealed => {
                let mut buffers = ReadBuffers::default();
                let raw = places.reader().bytes(page, format, &mut buffers)?.to_vec();
                let id = places.store.alloc(raw.len());
                places.store.write(id, 0, &raw);
                places.free(sealed);
                id
            }
        };
        page.bytes = PageBytes::Raw(id);
        page.sealed = false;
        Ok(id)
    }

    /// Removes the rows for which `leaves` holds, and frees the bytes of every row or page-wise page of which nothing
    /// lives. Returns how many left.
    pub fn remove(
        &mut self,
        places: &mut Places<'_>,
        ladder: &Ladder,
        leaves: impl Fn(u32) -> bool,
    ) -> Result<usize, CacheError> {
        let mut n_removed = 0;
        let mut i = 0;
        while i < self.pages.len() {
            let page = &self.pages[i];
            let format = page.format(ladder);
            let (live, stored) = (page.live(), page.stored());
            let kept: Mask = page
                .positions()
                .filter(|&p| !leaves(p))
                .fold(0, |m, p| m | 1 << (p as usize % RANGE));
            if kept == live {
                i += 1;
                continue;
            }
            n_removed += (live & !kept).count_ones() as usize;
            if kept == 0 {
                places.free(page.bytes);
                self.pages.remove(i);
                continue;
            }
            let still_stored = match &format.codec {
                Codec::Rows(_) => kept,
                Codec::Pages(codec) => pages(stored, codec.page_rows())
                    .filter(|page| page & kept != 0)
                    .fold(0, |m, page| m | page),
            };
            if still_stored != stored {
                let id = self.own(i, places, format)?;
                cut(places.store, id, format, (stored, still_stored));
            }
            self.pages[i].set(kept, still_stored);
            i += 1;
        }
        self.pages.shrink_to_fit();
        Ok(n_removed)
    }

    /// Frees the room that pages kept for rows to come, where their range ends at or before `end`.
    pub fn fit(
        &mut self,
        places: &mut Places<'_>,
        ladder: &Ladder,
        end: u32,
    ) -> Result<(), CacheError> {
        for i in 0..self.pages.len() {
            let page = &self.pages[i];
            let PageBytes::Raw(id) = page.bytes else {
                continue;
            };
            let format = page.format(ladder);
            let n = places.reader().raw_bytes(page, format);
            if (page.range + 1) * RANGE as u32 <= end && places.store.page_bytes(id) > n {
                let id = self.own(i, places, format)?;
                places.store.resize(id, n);
            }
        }
        Ok(())
    }

    /// Moves the bytes of all pages that are raw to where they can be read one after the other.
    pub fn gather(&self, store: &mut dyn PageStore) {
        let raw = self.pages.iter().filter_map(|page| match page.bytes {
            PageBytes::Raw(id) => Some(id),
            _ => None,
        });
        store.gather(&raw.collect::<Vec<_>>());
    }

    /// Packs and parks the pages whose range ends at or before `end`, as far as the strategy asks for it.
    pub fn seal(
        &mut self,
        places: &mut Places<'_>,
        ladder: &Ladder,
        end: u32,
    ) -> Result<(), CacheError> {
        if places.packer.is_none() && places.tier.is_none() {
            return Ok(());
        }
        for page in &mut self.pages {
            if page.sealed || (page.range + 1) * RANGE as u32 > end {
                continue;
            }
            page.bytes = sealed(page, places, page.format(ladder))?;
            page.sealed = true;
        }
        Ok(())
    }

    /// Encodes a range's rows again, from what is stored of them, one level lower.
    pub fn recode(
        &mut self,
        places: &mut Places<'_>,
        ladder: &Ladder,
        range: u32,
    ) -> Result<(), CacheError> {
        let Ok(i) = self.index(range) else {
            return Ok(());
        };
        let page = &mut self.pages[i];
        let (old, new) = (page.format(ladder), &ladder[usize::from(page.level) + 1]);
        let stored = page.stored();
        let mut rows = vec![0.0; stored.count_ones() as usize * old.dim];
        let mut buffers = ReadBuffers::default();
        old.decode(
            stored,
            places.reader().bytes(page, old, &mut buffers)?,
            &mut rows,
        );
        let mut bytes = Vec::with_capacity(new.bytes(stored));
        let mut left = &rows[..];
        let units: Vec<Mask> = match &new.codec {
            Codec::Rows(_) => vec![stored],
            Codec::Pages(codec) => pages(stored, codec.page_rows()).collect(),
        };
        for unit in units {
            let (unit, later) = left.split_at(unit.count_ones() as usize * new.dim);
            bytes.extend(new.encode(unit));
            left = later;
        }
        replace(page, places, &bytes);
        page.level += 1;
        Ok(())
    }

    /// Codes the rows that live anew wherever too few of those stored together do. Returns what that was.
    pub fn rebuild(
        &mut self,
        places: &mut Places<'_>,
        ladder: &Ladder,
        rule: &Rebuild,
    ) -> Result<Rebuilt, CacheError> {
        let mut sum = Rebuilt::default();
        for page in &mut self.pages {
            let format = page.format(ladder);
            let (live, stored) = (page.live(), page.stored());
            let units = || pages(stored, format.codec.page_rows());
            if live == stored || !units().any(|unit| rule.is_due(format, (unit, live))) {
                continue;
            }
            let mut buffers = ReadBuffers::default();
            let old = places.reader().bytes(page, format, &mut buffers)?;
            let (mut at, mut bytes, mut still_stored) = (0, Vec::with_capacity(old.len()), 0);
            for unit in units() {
                let old = &old[at..at + format.bytes(unit)];
                at += old.len();
                if rule.is_due(format, (unit, live)) {
                    let rows = (page.first(), unit, live);
                    bytes.extend(rule.recoded(format, rows, old, &mut sum));
                    still_stored |= unit & live;
                } else {
                    bytes.extend(old);
                    still_stored |= unit;
                }
            }
            replace(page, places, &bytes);
            page.set(live, still_stored);
        }
        Ok(sum)
    }

    /// A copy that shares every page.
    pub fn fork(&self, places: &mut Places<'_>) -> Self {
        for page in &self.pages {
            places.share(page.bytes);
        }
        Self {
            pages: self.pages.clone(),
        }
    }

    /// Frees every page.
    pub fn clear(&mut self, places: &mut Places<'_>) {
        for page in std::mem::take(&mut self.pages) {
            places.free(page.bytes);
        }
    }
}

/// Puts other bytes in the place of a page's; who shares the page keeps the old ones.
fn replace(page: &mut Page, places: &mut Places<'_>, bytes: &[u8]) {
    places.free(page.bytes);
    let id = places.store.alloc(bytes.len());
    places.store.write(id, 0, bytes);
    page.bytes = PageBytes::Raw(id);
    page.sealed = false;
}

/// Allocated bytes for the stored rows of an open page.
pub fn room_for(format: &Format, stored: Mask) -> usize {
    match &format.codec {
        Codec::Rows(codec) => {
            let n = stored.count_ones() as usize;
            n.next_multiple_of(GRANULE).min(RANGE) * codec.row_bytes(format.dim)
        }
        Codec::Pages(_) => format.bytes(stored),
    }
}

/// Moves the rows of `kept`, or the page-wise pages that it names whole, to the front of a page that holds those of
/// `stored`, in order, and shrinks it.
fn cut(store: &mut dyn PageStore, id: PageId, format: &Format, (stored, kept): (Mask, Mask)) {
    let mut bytes = vec![0; format.bytes(stored)];
    store.read(id, 0, &mut bytes);
    let (mut from, mut to) = (0, 0);
    for unit in pages(stored, format.codec.page_rows()) {
        let n = format.bytes(unit);
        if unit & kept != 0 {
            bytes.copy_within(from..from + n, to);
            to += n;
        }
        from += n;
    }
    store.write(id, 0, &bytes[..to]);
    let size = room_for(format, kept);
    if size < store.page_bytes(id) {
        store.resize(id, size);
    }
}

/// Packs (when that helps) and parks a raw page.
fn sealed(page: &Page, places: &mut Places<'_>, format: &Format) -> Result<PageBytes, CacheError> {
    let PageBytes::Raw(id) = page.bytes else {
        return Ok(page.bytes);
    };
    let mut buffers = ReadBuffers::default();
    let raw = places.reader().bytes(page, format, &mut buffers)?.to_vec();
    // A page of rows of different bits is as long as its bytes: packed, they would not say.
    let packer = places.packer.filter(|_| format.codec.levels().is_none());
    let packed = match packer {
        Some(packer) => Some(packer.pack(&raw, format.stride())?).filter(|p| p.len() < raw.len()),
        None => None,
    };
    let (bytes, packing) = match &packed {
        Some(p) => (p.as_slice(), Packing::Packed),
        None => (raw.as_slice(), Packing::Raw),
    };
    let len = bytes.len() as u32;
    if let Some(tier) = places.tier {
        let slot = tier.park(bytes)?;
        places.store.free(id);
        return Ok(PageBytes::Parked {
            slot,
            len,
            packed: packing,
        });
    }
    if packing == Packing::Raw {
        return Ok(PageBytes::Raw(id));
    }
    places.store.free(id);
    let id = places.store.alloc(bytes.len());
    places.store.write(id, 0, bytes);
    Ok(PageBytes::Packed { id, len })
}
