//! A table of rows of one KV head: K and V bytes in pages of one range of 128 positions each.
//!
//! Invariants: a page's rows are the live positions of its range, in order, back to back; the bitmap is the only record
//! of which ones they are (one bit per position); an open page grows and shrinks by granules of 16 rows; K and V of a
//! page hold the same positions.

use super::formats::{Format, PairFormat};
use super::pages::{PageId, PageStore, Tier};
use super::scratch::room;
use super::stage::{Packer, Side, Slot};
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
#[derive(Debug, Clone, Copy)]
pub struct Page {
    /// First position / [`RANGE`].
    pub range: u32,
    /// Bit i: position `range · 128 + i` is here.
    pub live: u128,
    /// Key bytes.
    pub k: PageBytes,
    /// Value bytes.
    pub v: PageBytes,
    /// Sealing was done (packing may not have helped); any change of the rows undoes it.
    pub sealed: bool,
}

impl Page {
    /// Rows here.
    pub fn n_rows(&self) -> usize {
        self.live.count_ones() as usize
    }

    /// Positions here, ascending.
    pub fn positions(&self) -> impl Iterator<Item = u32> + use<> {
        let first = self.range * RANGE as u32;
        let mut bits = self.live;
        std::iter::from_fn(move || {
            (bits != 0).then(|| {
                let i = bits.trailing_zeros();
                bits &= bits - 1;
                first + i
            })
        })
    }

    /// One side's bytes.
    pub fn side(&self, side: Side) -> PageBytes {
        match side {
            Side::K => self.k,
            Side::V => self.v,
        }
    }

    fn side_mut(&mut self, side: Side) -> &mut PageBytes {
        match side {
            Side::K => &mut self.k,
            Side::V => &mut self.v,
        }
    }
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
    /// The encoded bytes of one side of a page: a view where possible, else a copy in `buffers`.
    pub fn bytes<'b>(
        &self,
        page: &Page,
        side: Side,
        format: &Format,
        buffers: &'b mut ReadBuffers,
    ) -> Result<&'b [u8], CacheError>
    where
        'a: 'b,
    {
        let n = page.n_rows() * format.row_bytes();
        let packed_len = match page.side(side) {
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
            format.row_bytes(),
            sized(&mut buffers.raw, n),
        )?;
        Ok(&buffers.raw)
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

/// The rows of one KV head in one format, in order of position.
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
        (self.pages.capacity() * size_of::<Page>()) as u64
    }

    /// Appends consecutive rows from `first` on. They come after every row of their pages. `k`, `v`: rows back to back.
    pub fn push(
        &mut self,
        places: &mut Places<'_>,
        format: &PairFormat,
        first: u32,
        rows: (&[u8], &[u8]),
    ) -> Result<(), CacheError> {
        let (kb, vb) = (format.k.row_bytes(), format.v.row_bytes());
        let n = rows.0.len() / kb;
        let mut done = 0;
        while done < n {
            let position = first + done as u32;
            let (range, bit) = (position / RANGE as u32, position as usize % RANGE);
            let take = (RANGE - bit).min(n - done);
            let i = match self.index(range) {
                Ok(i) => i,
                Err(i) => {
                    let page = Page {
                        range,
                        live: 0,
                        k: PageBytes::Raw(places.store.alloc(0)),
                        v: PageBytes::Raw(places.store.alloc(0)),
                        sealed: false,
                    };
                    self.reserve();
                    self.pages.insert(i, page);
                    i
                }
            };
            let held = self.pages[i].n_rows();
            let total = (held + take).next_multiple_of(GRANULE).min(RANGE);
            for (side, row, bytes) in [(Side::K, kb, rows.0), (Side::V, vb, rows.1)] {
                let id = self.own(i, side, places, format)?;
                if places.store.page_bytes(id) < (held + take) * row {
                    places.store.resize(id, total * row);
                }
                places
                    .store
                    .write(id, held * row, &bytes[done * row..(done + take) * row]);
            }
            let mask = if take == RANGE {
                u128::MAX
            } else {
                ((1u128 << take) - 1) << bit
            };
            self.pages[i].live |= mask;
            done += take;
        }
        Ok(())
    }

    /// Grows the page table by little, since it is charged.
    fn reserve(&mut self) {
        if self.pages.len() == self.pages.capacity() {
            self.pages.reserve_exact(4);
        }
    }

    /// Makes one side of a page raw and owned once, and returns it.
    fn own(
        &mut self,
        i: usize,
        side: Side,
        places: &mut Places<'_>,
        format: &PairFormat,
    ) -> Result<PageId, CacheError> {
        let page = self.pages[i];
        let id = match page.side(side) {
            PageBytes::Raw(id) => places.store.unshare(id),
            sealed => {
                let mut buffers = ReadBuffers::default();
                let raw = places
                    .reader()
                    .bytes(&page, side, format.side(side), &mut buffers)?
                    .to_vec();
                let id = places.store.alloc(raw.len());
                places.store.write(id, 0, &raw);
                places.free(sealed);
                id
            }
        };
        *self.pages[i].side_mut(side) = PageBytes::Raw(id);
        self.pages[i].sealed = false;
        Ok(id)
    }

    /// Removes the rows for which `leaves` holds; their bytes are freed at once. Returns how many left.
    pub fn remove(
        &mut self,
        places: &mut Places<'_>,
        format: &PairFormat,
        leaves: impl Fn(u32) -> bool,
    ) -> Result<usize, CacheError> {
        let mut n_removed = 0;
        let mut i = 0;
        while i < self.pages.len() {
            let page = self.pages[i];
            let kept: u128 = page
                .positions()
                .filter(|&p| !leaves(p))
                .fold(0, |m, p| m | 1 << (p as usize % RANGE));
            if kept == page.live {
                i += 1;
                continue;
            }
            n_removed += page.n_rows() - kept.count_ones() as usize;
            if kept == 0 {
                places.free(page.k);
                places.free(page.v);
                self.pages.remove(i);
                continue;
            }
            let indices: Vec<usize> = page
                .positions()
                .enumerate()
                .filter(|(_, p)| kept >> (*p as usize % RANGE) & 1 == 1)
                .map(|(j, _)| j)
                .collect();
            for side in [Side::K, Side::V] {
                let row = format.side(side).row_bytes();
                let id = self.own(i, side, places, format)?;
                gather(places.store, id, row, &indices);
            }
            self.pages[i].live = kept;
            i += 1;
        }
        if self.pages.capacity() > self.pages.len() + 4 {
            self.pages.shrink_to(self.pages.len() + 4);
        }
        Ok(n_removed)
    }

    /// Packs and parks the pages whose range ends at or before `end`, as far as the strategy asks for it.
    pub fn seal(
        &mut self,
        places: &mut Places<'_>,
        format: &PairFormat,
        end: u32,
    ) -> Result<(), CacheError> {
        if places.packer.is_none() && places.tier.is_none() {
            return Ok(());
        }
        for page in &mut self.pages {
            if page.sealed || (page.range + 1) * RANGE as u32 > end {
                continue;
            }
            for side in [Side::K, Side::V] {
                let sealed = seal_side(*page, side, places, format.side(side))?;
                *page.side_mut(side) = sealed;
            }
            page.sealed = true;
        }
        Ok(())
    }

    /// A copy that shares every page.
    pub fn fork(&self, places: &mut Places<'_>) -> Self {
        for page in &self.pages {
            places.share(page.k);
            places.share(page.v);
        }
        Self {
            pages: self.pages.clone(),
        }
    }

    /// Frees every page.
    pub fn clear(&mut self, places: &mut Places<'_>) {
        for page in std::mem::take(&mut self.pages) {
            places.free(page.k);
            places.free(page.v);
        }
    }
}

/// Moves the rows `indices` to the front of a page, in order, and shrinks it.
fn gather(store: &mut dyn PageStore, id: PageId, row: usize, indices: &[usize]) {
    let last = indices.last().map_or(0, |j| j + 1);
    let mut bytes = vec![0; last * row];
    store.read(id, 0, &mut bytes);
    for (to, &from) in indices.iter().enumerate() {
        bytes.copy_within(from * row..(from + 1) * row, to * row);
    }
    store.write(id, 0, &bytes[..indices.len() * row]);
    let size = indices.len().next_multiple_of(GRANULE).min(RANGE) * row;
    if size < store.page_bytes(id) {
        store.resize(id, size);
    }
}

/// Packs (when that helps) and parks one side of a raw page.
fn seal_side(
    page: Page,
    side: Side,
    places: &mut Places<'_>,
    format: &Format,
) -> Result<PageBytes, CacheError> {
    let PageBytes::Raw(id) = page.side(side) else {
        return Ok(page.side(side));
    };
    let mut buffers = ReadBuffers::default();
    let raw = places
        .reader()
        .bytes(&page, side, format, &mut buffers)?
        .to_vec();
    let packed = match places.packer {
        Some(packer) => {
            Some(packer.pack(&raw, format.row_bytes())?).filter(|p| p.len() < raw.len())
        }
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
