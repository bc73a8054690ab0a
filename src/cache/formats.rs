//! How rows lie in memory: a codec for a number of channels, K and V apart.
//!
//! Invariants: the bytes of a range's rows follow from which rows are stored and from nothing else; row-wise rows lie
//! back to back, page-wise pages too, in order of position.
//!
//! Example, pages of 4 rows, stored rows marked x: the first page is coded as 4 rows, the second as 2.
//!
//! ```text
//! position   0 1 2 3 | 4 5 6 7
//! stored     x x x x | . x . x
//! bytes      page_bytes(4) + page_bytes(2)
//! ```

use super::RANGE;
use super::stage::{Codec, Levels};
use super::stored::decode_rows;

/// Rows of a range: bit i stands for position `range · 128 + i`.
pub type Mask = u128;

/// How the rows of one side are laid out.
#[derive(Clone)]
pub struct Format {
    /// Codec.
    pub codec: Codec,
    /// Channels per row.
    pub dim: usize,
}

impl Codec {
    /// Rows that are encoded together; 1 for a row-wise codec.
    pub fn page_rows(&self) -> usize {
        match self {
            Codec::Rows(_) => 1,
            Codec::Pages(codec) => codec.page_rows(),
        }
    }

    /// Rows of a range that lie together: all of a row-wise codec, those of each page of a page-wise one.
    pub fn together(&self, stored: Mask) -> impl Iterator<Item = Mask> + use<> {
        let n = match self {
            Codec::Rows(_) => RANGE,
            Codec::Pages(codec) => codec.page_rows(),
        };
        pages(stored, n)
    }

    /// Bytes of rows that lie together.
    pub fn bytes(&self, n_rows: usize, dim: usize) -> usize {
        match self {
            Codec::Rows(codec) => n_rows * codec.row_bytes(dim),
            Codec::Pages(codec) => codec.page_bytes(n_rows, dim),
        }
    }

    /// The same format with a number of bits for each row, if it has that.
    pub fn leveled(&self) -> Option<Codec> {
        let codec = match self {
            Codec::Rows(codec) => codec.leveled(),
            Codec::Pages(codec) => codec.leveled(),
        };
        codec.map(Codec::Pages)
    }

    /// How it codes rows of different bits, if it does.
    pub fn levels(&self) -> Option<&dyn Levels> {
        match self {
            Codec::Rows(_) => None,
            Codec::Pages(codec) => codec.levels(),
        }
    }

    /// Bytes of what lies together of a range's `bytes`, `n_rows` rows. A page that is the whole range is all of them: with
    /// rows of different bits its length follows from nothing else.
    pub fn bytes_of(&self, n_rows: usize, dim: usize, bytes: &[u8]) -> usize {
        match self {
            Codec::Pages(codec) if codec.page_rows() == RANGE => bytes.len(),
            _ => self.bytes(n_rows, dim),
        }
    }

    /// Bytes of tables shared by all rows.
    pub fn table_bytes(&self) -> u64 {
        match self {
            Codec::Rows(codec) => codec.table_bytes(),
            Codec::Pages(codec) => codec.table_bytes(),
        }
    }
}

/// The pages of `page_rows` positions in a range that hold a row, with the rows they hold.
pub fn pages(stored: Mask, page_rows: usize) -> impl Iterator<Item = Mask> {
    let whole = Mask::MAX >> (RANGE - page_rows);
    (0..RANGE / page_rows)
        .map(move |i| stored & whole << (i * page_rows))
        .filter(|&page| page != 0)
}

impl Format {
    /// Bytes of the stored rows of a range.
    pub fn bytes(&self, stored: Mask) -> usize {
        self.codec
            .together(stored)
            .map(|rows| self.codec.bytes(rows.count_ones() as usize, self.dim))
            .sum()
    }

    /// The part of [`Format::bytes`] that holds scales.
    pub fn scale_bytes(&self, stored: Mask) -> usize {
        match &self.codec {
            Codec::Rows(codec) => stored.count_ones() as usize * codec.scale_bytes(self.dim),
            Codec::Pages(codec) => pages(stored, codec.page_rows())
                .map(|page| codec.scale_bytes(page.count_ones() as usize, self.dim))
                .sum(),
        }
    }

    /// Bytes after which a packer finds the same field again.
    pub fn stride(&self) -> usize {
        match &self.codec {
            Codec::Rows(codec) => codec.row_bytes(self.dim),
            Codec::Pages(_) => 1,
        }
    }

    /// Encodes rows, `[row][dim]`: any number of rows, or the rows of one page.
    pub fn encode(&self, rows: &[f32]) -> Vec<u8> {
        let n_rows = rows.len() / self.dim;
        match &self.codec {
            Codec::Rows(codec) => {
                let n = codec.row_bytes(self.dim);
                let mut out = vec![0; n_rows * n];
                for (row, bytes) in rows.chunks_exact(self.dim).zip(out.chunks_exact_mut(n)) {
                    codec.encode(row, bytes);
                }
                out
            }
            Codec::Pages(codec) => {
                let mut out = vec![0; codec.page_bytes(n_rows, self.dim)];
                codec.encode(rows, self.dim, &mut out);
                out
            }
        }
    }

    /// Encodes the rows of one page, `[row][dim]`, each at its level, if the format has levels.
    pub fn encode_at(&self, rows: &[f32], levels: &[u8]) -> Vec<u8> {
        match self.codec.levels() {
            Some(codec) => codec.encode(rows, self.dim, levels),
            None => self.encode(rows),
        }
    }

    /// Decodes the stored rows of a range into `rows`, `[row][dim]`.
    pub fn decode(&self, stored: Mask, bytes: &[u8], rows: &mut [f32]) {
        match &self.codec {
            Codec::Rows(codec) => decode_rows(codec.as_ref(), bytes, self.dim, rows),
            Codec::Pages(codec) => {
                let (mut bytes, mut rows) = (bytes, rows);
                for page in pages(stored, codec.page_rows()) {
                    let n_rows = page.count_ones() as usize;
                    let n_bytes = self.codec.bytes_of(n_rows, self.dim, bytes);
                    let (b, later_bytes) = bytes.split_at(n_bytes);
                    let (r, later_rows) = rows.split_at_mut(n_rows * self.dim);
                    codec.decode(b, self.dim, r);
                    (bytes, rows) = (later_bytes, later_rows);
                }
            }
        }
    }
}

/// A table's formats by level of precision, the most bits first. Only coded rows of a strategy with a budget have more than
/// one level.
pub type Ladder = [Format];
