//! A table of rows of one side of one KV head, in pages of one range of 128 positions each.
//!
//! Invariants: a page's bytes are those of its stored rows, in order; the bitmap is the only record of which rows live
//! (one bit per position); an open page of row-wise rows grows and shrinks by granules of 16 rows. A row that leaves a
//! page-wise page becomes a hole: still stored, no longer live, until no row of the page lives.

use super::formats::{Format, Ladder, Mask, pages};
use super::pages::{PageId, PageStore, Tier};
use super::scratch::room;
use super::stage::{Codec, Packer, Slot};
use super::{CacheError, RANGE};

/// Rows by which an open page grows.
const GRANULE: usize = 16;

/// Where a page's bytes are. Lengths are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageBytes {
    /// As encoded.
    Raw(PageId),
    /// Packed: the page's first `len` bytes.
    Packed {
        /// The page.
        id: PageId,
        /// Packed length.
        len: u32,
    },
    /// In the backing tier.
    Parked {
        /// The slot.
        slot: Slot,
        /// Length in the tier.
        len: u32,
        /// What the tier holds.
        packed: Packing,
    },
}

/// Whether parked bytes are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// As encoded.
    Raw,
    /// Packed.
    Packed,
}

/// The rows of one range.
#[derive(Debug, Clone)]
pub struct Page {
    /// First position / [`RANGE`].
    pub range: u32,
    /// Sealing was done (packing may not have helped); any change of the rows undoes it.
    pub sealed: bool,
    /// Level of precision: index into the table's formats.
    pub level: u8,
    // Halves, low first: a u128 would align the whole page to 16 bytes, which are charged.
    live: [u64; 2],
    /// Stored rows that no longer live; only page-wise formats have any.
    holes: Option<Box<Mask>>,
    /// Where the stored rows are.
    pub bytes: PageBytes,
}

impl Page {
    /// The page's format.
    pub fn format<'a>(&self, ladder: &'a Ladder) -> &'a Format {
        &ladder[usize::from(self.level)]
    }

    /// Rows that live.
    pub fn live(&self) -> Mask {
        Mask::from(self.live[0]) | Mask::from(self.live[1]) << 64
    }

    /// Rows whose bytes are here.
    pub fn stored(&self) -> Mask {
        self.live() | self.holes.as_deref().copied().unwrap_or(0)
    }

    fn set(&mut self, live: Mask, stored: Mask) {
        self.live = [live as u64, (live >> 64) as u64];
        self.holes = (live != stored).then(|| Box::new(stored & !live));
    }

    /// Bytes of the record of holes.
    pub fn hole_bytes(&self) -> u64 {
        self.holes.as_ref().map_or(0, |_| size_of::<Mask>() as u64)
    }

    /// Live positions, ascending.
    pub fn positions(&self) -> impl Iterator<Item = u32> + use<> {
        let first = self.range * RANGE as u32;
        bits(self.live()).map(move |i| first + i as u32)
    }

    /// Drops what `decoded`, `[stored row][dim]`, holds of holes: `[live row][dim]` is left at its front.
    pub fn drop_holes(&self, dim: usize, decoded: &mut [f32]) {
        if self.holes.is_none() {
            return;
        }
        let live = self.live();
        let stored = bits(self.stored()).enumerate();
        let kept = stored.filter(|(_, bit)| live >> bit & 1 == 1);
        for (to, (from, _)) in kept.enumerate() {
            decoded.copy_within(from * dim..(from + 1) * dim, to * dim);
        }
    }
}

/// Set bits, ascending.
pub fn bits(mut mask: Mask) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        (mask != 0).then(|| {
            let i = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            i
        })
    })
}

/// What page operations need besides the table: the memory, the tier, the packer.
pub struct Places<'a> {
    /// Pages in memory.
    pub store: &'a mut dyn PageStore,
    /// The backing tier, if the strategy has one.
    pub tier: &'a mut Option<Tier>,
    /// The packer, if the strategy has one.
    pub packer: Option<&'a dyn Packer>,
}

/// Read access to the same.
#[derive(Clone, Copy)]
pub struct Reader<'a> {
    /// Pages in memory.
    pub store: &'a dyn PageStore,
    /// The backing tier.
    pub tier: Option<&'a Tier>,
    /// The packer.
    pub packer: Option<&'a dyn Packer>,
}

/// Reusable buffers for reading pages.
#[derive(Debug, Default)]
pub struct ReadBuffers {
    raw: Vec<u8>,
    packed: Vec<u8>,
}

impl ReadBuffers {
    /// Bytes of each.
    pub fn sizes(&self) -> [usize; 2] {
        [self.raw.capacity(), self.packed.capacity()]
    }
}

/// The buffer with a length of `n`, no larger than the most ever asked for.
fn sized(buffer: &mut Vec<u8>, n: usize) -> &mut [u8] {
    room(buffer, n);
    buffer.resize(n, 0);
    buffer
}

impl<'a> Reader<'a> {
    /// The encoded bytes of a page: a view where possible, else a copy in `buffers`.
    pub fn bytes<'b>(
        &self,
        page: &Page,
        format: &Format,
        buffers: &'b mut ReadBuffers,
    ) -> Result<&'b [u8], CacheError>
    where
        'a: 'b,
    {
        let n = format.bytes(page.stored());
        let packed_len = match page.bytes {
            PageBytes::Raw(id) => {
                if let Some(view) = self.store.view(id) {
                    return Ok(&view[..n]);
                }
                self.store.read(id, 0, sized(&mut buffers.raw, n));
                return Ok(&buffers.raw);
            }
            PageBytes::Packed { id, len } => {
                self.store
                    .read(id, 0, sized(&mut buffers.packed, len as usize));
                len
            }
            PageBytes::Parked { slot, len, packed } => {
                let tier = self
                    .tier
                    .ok_or_else(|| CacheError::Pack("a parked page without a tier".into()))?;
                tier.fetch(slot, sized(&mut buffers.packed, len as usize))?;
                if packed == Packing::Raw {
                    return Ok(&buffers.packed);
                }
                len
            }
        };
        let packer = self
            .packer
            .ok_or_else(|| CacheError::Pack("a packed page without a packer".into()))?;
        packer.unpack(
            &buffers.packed[..packed_len as usize],
            format.stride(),
            sized(&mut buffers.raw, n),
        )?;
        Ok(&buffers.raw)
    }

    /// Decodes a page's live rows into the front of `rows`, `[row][dim]`, which has room for the stored ones.
    pub fn decode(
        &self,
        page: &Page,
        format: &Format,
        buffers: &mut ReadBuffers,
        rows: &mut [f32],
    ) -> Result<(), CacheError> {
        let stored = page.stored();
        let rows = &mut rows[..stored.count_ones() as usize * format.dim];
        format.decode(stored, self.bytes(page, format, buffers)?, rows);
        page.drop_holes(format.dim, rows);
        Ok(())
    }
}

impl Places<'_> {
    /// Read access.
    pub fn reader(&self) -> Reader<'_> {
        Reader {
            store: &*self.store,
            tier: self.tier.as_ref(),
            packer: self.packer,
        }
    }

    fn free(&mut self, bytes: PageBytes) {
        match bytes {
            PageBytes::Raw(id) | PageBytes::Packed { id, .. } => self.store.free(id),
            PageBytes::Parked { slot, .. } => {
                if let Some(tier) = self.tier {
                    tier.free(slot);
                }
            }
        }
    }

    fn share(&mut self, bytes: PageBytes) {
        match bytes {
            PageBytes::Raw(id) | PageBytes::Packed { id, .. } => self.store.share(id),
            PageBytes::Parked { slot, .. } => {
                if let Some(tier) = self.tier {
                    tier.share(slot);
                }
            }
        }
    }
}

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
        let held = format.bytes(stored);
        if places.store.page_bytes(id) < held + bytes.len() {
            places.store.resize(id, room_for(format, stored | rows));
        }
        places.store.write(id, held, bytes);
        page.set(live, stored | rows);
        Ok(())
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
            let n = format.bytes(page.stored());
            if (page.range + 1) * RANGE as u32 <= end && places.store.page_bytes(id) > n {
                let id = self.own(i, places, format)?;
                places.store.resize(id, n);
            }
        }
        Ok(())
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
        places.free(page.bytes);
        let id = places.store.alloc(bytes.len());
        places.store.write(id, 0, &bytes);
        page.bytes = PageBytes::Raw(id);
        page.sealed = false;
        page.level += 1;
        Ok(())
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
    let packed = match places.packer {
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
