//! One page of a table, where its bytes are, and how they are read.
//!
//! Invariants: a page's bytes are those of its stored rows, in order; the bitmap is the only record of which rows live
//! (one bit per position).

use super::formats::{Format, Ladder, Mask};
use super::pages::{PageId, PageStore, Tier};
use super::scratch::room;
use super::sparse::Sparse;
use super::stage::{Codec, Packer, Slot};
use super::types::{Rebuilt, SeqId};
use super::{CacheError, RANGE};

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
    pub(super) live: [u64; 2],
    /// Stored rows that no longer live; only page-wise formats have any.
    pub(super) holes: Option<Box<Mask>>,
    /// Where the stored rows are.
    pub bytes: PageBytes,
}

impl Page {
    /// The page's format.
    pub fn format<'a>(&self, ladder: &'a Ladder) -> &'a Format {
        &ladder[usize::from(self.level)]
    }

    /// The range's first position.
    pub fn first(&self) -> u32 {
        self.range * RANGE as u32
    }

    /// Rows that live.
    pub fn live(&self) -> Mask {
        Mask::from(self.live[0]) | Mask::from(self.live[1]) << 64
    }

    /// Rows whose bytes are here.
    pub fn stored(&self) -> Mask {
        self.live() | self.holes.as_deref().copied().unwrap_or(0)
    }

    /// Notes which rows live and which are stored.
    pub fn set(&mut self, live: Mask, stored: Mask) {
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
    /// What keeps exact copies of a sequence's coded rows, if anything does.
    pub keeper: Option<(&'a mut Sparse, SeqId)>,
    /// Pages that were coded anew through this.
    pub rebuilt: Rebuilt,
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
        let n = self.raw_bytes(page, format);
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

    /// Length of a page's encoded bytes: rows may have room behind them, pages have none.
    pub fn raw_bytes(&self, page: &Page, format: &Format) -> usize {
        match (&format.codec, page.bytes) {
            (Codec::Pages(_), PageBytes::Raw(id)) => self.store.page_bytes(id),
            _ => format.bytes(page.stored()),
        }
    }

    /// The encoded bytes of a page where they lie in host memory so; else nothing.
    pub fn view(&self, page: &Page, format: &Format) -> &'a [u8] {
        let view = match page.bytes {
            PageBytes::Raw(id) => self.store.view(id).unwrap_or_default(),
            _ => &[],
        };
        match format.codec {
            Codec::Rows(_) if !view.is_empty() => &view[..format.bytes(page.stored())],
            _ => view,
        }
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

    /// Gives up what holds a page.
    pub fn free(&mut self, bytes: PageBytes) {
        match bytes {
            PageBytes::Raw(id) | PageBytes::Packed { id, .. } => self.store.free(id),
            PageBytes::Parked { slot, .. } => {
                if let Some(tier) = self.tier {
                    tier.free(slot);
                }
            }
        }
    }

    /// Adds an owner to what holds a page.
    pub fn share(&mut self, bytes: PageBytes) {
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
