//! `zstd`: a sealed page by columns of bytes, then zstd.
//!
//! Rows of one format have the same structure, so byte i of all rows is alike (an exponent, a scale, a pair of codes)
//! while bytes i and i + 1 are not. The page is therefore transposed, and its columns are dealt into 1, 2 or 4 planes,
//! whichever gives the fewest bytes: with two, the noisy low bytes of 16-bit channels are kept apart from the high ones,
//! whose exponents compress. Each plane is a zstd frame of its own, and the number of frames is the number of planes.
//!
//! ```text
//! rows of 4 bytes   a0 a1 a2 a3 | b0 b1 b2 b3 | c0 c1 c2 c3
//! one plane         a0 b0 c0  a1 b1 c1  a2 b2 c2  a3 b3 c3
//! two planes        a0 b0 c0  a2 b2 c2 | a1 b1 c1  a3 b3 c3
//! ```
//!
//! Bytes after the last whole row, if there are any, follow the last plane untouched.
//!
//! Invariants: frames state their length and end with a checksum of their content, and both are verified; a level
//! changes the packed size, never the bytes that come out. Bytes that don't compress grow by a frame's header and
//! checksum, at most 18 bytes.

use std::io;
use std::sync::Arc;

use zstd::bulk::{Compressor, decompress_to_buffer};
use zstd::zstd_safe::find_frame_compressed_size;

use super::super::CacheError;
use super::super::stage::{Domain, Kind, Packer, ParamDef, Stage, StageDef, Tolerance, never};

const DEFAULT_LEVEL: i64 = 3;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "zstd",
    kind: Kind::Pack,
    doc: "sealed pages by byte columns, then zstd; exact",
    paper: "RFC 8878 (Zstandard)",
    params: &[ParamDef {
        name: "level",
        domain: Domain::Int { min: 1, max: 22 },
        default: Some("3"),
        doc: "zstd's compression level",
    }],
    calibrated: never,
    examples: &["\"zstd\"", "{ method = \"zstd\", level = 19 }"],
    tolerance: Tolerance::Exact,
    build: |params, _| {
        let level = params.int("level").unwrap_or(DEFAULT_LEVEL);
        Ok(Stage::Pack(Arc::new(Zstd {
            level: level.clamp(1, 22) as i32,
        })))
    },
};

/// The packer.
#[derive(Debug, Clone, Copy)]
pub struct Zstd {
    /// zstd's level, 1 to 22.
    pub level: i32,
}

/// Numbers of planes that are tried, the first of equal sizes kept.
const PLANES: [usize; 3] = [1, 2, 4];

impl Packer for Zstd {
    fn pack(&self, raw: &[u8], row_bytes: usize) -> Result<Vec<u8>, CacheError> {
        self.smallest(raw, row_bytes).map_err(|e| {
            CacheError::Pack(format!(
                "zstd could not compress {} bytes at level {}: {e}",
                raw.len(),
                self.level
            ))
        })
    }

    fn unpack(&self, packed: &[u8], row_bytes: usize, raw: &mut [u8]) -> Result<(), CacheError> {
        let mut columns = vec![0; raw.len()];
        let n = decompress_to_buffer(packed, &mut columns).map_err(|e| {
            CacheError::Pack(format!(
                "{} packed bytes do not decompress to the page's {}: {e}; the bytes are damaged",
                packed.len(),
                raw.len()
            ))
        })?;
        let n_planes = n_frames(packed);
        if n != raw.len() || !PLANES.contains(&n_planes) {
            return Err(CacheError::Pack(format!(
                "{} packed bytes decompress to {n} bytes in {n_planes} planes, the page has {} bytes in 1, 2 or 4; they \
                 are another page's or damaged",
                packed.len(),
                raw.len()
            )));
        }
        Layout::new(raw.len(), row_bytes, n_planes).restore(&columns, raw);
        Ok(())
    }
}

impl Zstd {
    fn smallest(&self, raw: &[u8], row_bytes: usize) -> io::Result<Vec<u8>> {
        let mut compressor = Compressor::new(self.level)?;
        compressor.include_checksum(true)?;
        let mut best: Option<Vec<u8>> = None;
        for n_planes in PLANES {
            let layout = Layout::new(raw.len(), row_bytes, n_planes);
            let mut columns = vec![0; raw.len()];
            layout.gather(raw, &mut columns);
            let mut packed = Vec::new();
            for plane in layout.planes(&columns) {
                packed.extend(compressor.compress(plane)?);
            }
            if best.as_ref().is_none_or(|b| packed.len() < b.len()) {
                best = Some(packed);
            }
        }
        Ok(best.unwrap_or_default())
    }
}

/// Whole frames at the front of `packed`.
fn n_frames(mut packed: &[u8]) -> usize {
    let mut n = 0;
    while let Ok(frame) = find_frame_compressed_size(packed)
        && let Some(rest) = packed.get(frame..)
        && frame > 0
    {
        n += 1;
        packed = rest;
    }
    n
}

/// Where a page's columns lie once they are dealt into planes.
#[derive(Debug, Clone, Copy)]
struct Layout {
    row_bytes: usize,
    n_rows: usize,
    n_planes: usize,
}

impl Layout {
    fn new(page_bytes: usize, row_bytes: usize, n_planes: usize) -> Self {
        Self {
            row_bytes,
            n_rows: page_bytes.checked_div(row_bytes).unwrap_or(0),
            n_planes,
        }
    }

    /// Bytes in whole rows.
    fn n_bytes(self) -> usize {
        self.n_rows * self.row_bytes
    }

    /// Columns in the order in which they are stored.
    fn columns(self) -> impl Iterator<Item = usize> {
        (0..self.n_planes).flat_map(move |plane| (plane..self.row_bytes).step_by(self.n_planes))
    }

    fn gather(self, page: &[u8], columns: &mut [u8]) {
        let (rows, rest) = page.split_at(self.n_bytes());
        let (columns, columns_rest) = columns.split_at_mut(self.n_bytes());
        columns_rest.copy_from_slice(rest);
        // A page without whole rows has no columns; chunks of 0 bytes are not allowed.
        let (n_rows, row_bytes) = (self.n_rows.max(1), self.row_bytes.max(1));
        for (column, i) in columns.chunks_exact_mut(n_rows).zip(self.columns()) {
            for (b, row) in column.iter_mut().zip(rows.chunks_exact(row_bytes)) {
                *b = row[i];
            }
        }
    }

    fn restore(self, columns: &[u8], page: &mut [u8]) {
        let (columns, rest) = columns.split_at(self.n_bytes());
        let (rows, page_rest) = page.split_at_mut(self.n_bytes());
        page_rest.copy_from_slice(rest);
        let (n_rows, row_bytes) = (self.n_rows.max(1), self.row_bytes.max(1));
        for (column, i) in columns.chunks_exact(n_rows).zip(self.columns()) {
            for (b, row) in column.iter().zip(rows.chunks_exact_mut(row_bytes)) {
                row[i] = *b;
            }
        }
    }

    /// Gathered bytes by plane; what follows the last whole row goes with the last plane.
    fn planes(self, columns: &[u8]) -> impl Iterator<Item = &[u8]> {
        let mut rest = columns;
        (0..self.n_planes).map(move |plane| {
            let n_columns = self.row_bytes.saturating_sub(plane).div_ceil(self.n_planes);
            let n = if plane + 1 == self.n_planes {
                rest.len()
            } else {
                n_columns * self.n_rows
            };
            let (this, after) = rest.split_at(n);
            rest = after;
            this
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::{RngCore, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    const PACKER: Zstd = Zstd { level: 3 };

    fn random(n: usize) -> Vec<u8> {
        let mut bytes = vec![0; n];
        ChaCha8Rng::seed_from_u64(9).fill_bytes(&mut bytes);
        bytes
    }

    fn unpacked(packed: &[u8], row_bytes: usize, n: usize) -> Result<Vec<u8>, String> {
        let mut raw = vec![0x77; n];
        PACKER
            .unpack(packed, row_bytes, &mut raw)
            .map_err(|e| e.to_string())?;
        Ok(raw)
    }

    #[test]
    fn columns_are_as_drawn() {
        let page: Vec<u8> = (0..14).collect();
        let drawn = [
            (
                1,
                vec![0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11, 12, 13],
                vec![14],
            ),
            (
                2,
                vec![0, 4, 8, 2, 6, 10, 1, 5, 9, 3, 7, 11, 12, 13],
                vec![6, 8],
            ),
        ];
        for (n_planes, want, sizes) in drawn {
            let layout = Layout::new(14, 4, n_planes);
            let mut columns = [0; 14];
            layout.gather(&page, &mut columns);
            assert_eq!(columns, want[..]);
            let planes: Vec<usize> = layout.planes(&columns).map(<[u8]>::len).collect();
            assert_eq!(planes, sizes);
            let mut rows = [0; 14];
            layout.restore(&columns, &mut rows);
            assert_eq!(rows, page[..]);
        }
    }

    #[test]
    fn pages_come_back_and_only_structure_shrinks() {
        let noise = random(128 * 36);
        let packed = PACKER.pack(&noise, 36).unwrap();
        assert!(packed.len() >= noise.len() && packed.len() <= noise.len() + 18);
        assert_eq!(unpacked(&packed, 36, noise.len()).unwrap(), noise);

        // Half of each row is noise, the other half is its column's number.
        let page: Vec<u8> = (noise.iter().enumerate())
            .map(|(i, &b)| if i % 2 == 0 { b } else { (i % 36) as u8 })
            .collect();
        let packed = PACKER.pack(&page, 36).unwrap();
        assert!(packed.len() < page.len() * 55 / 100, "{}", packed.len());
        assert_eq!(unpacked(&packed, 36, page.len()).unwrap(), page);
        let by_rows = zstd::bulk::compress(&page, 3).unwrap();
        assert!(packed.len() < by_rows.len() * 4 / 5, "{}", by_rows.len());
    }

    #[test]
    fn bf16_rows_shrink_as_far_as_their_exponents_allow() {
        // Channels of different scale, as keys have them; mantissas are noise.
        let noise = random(128 * 64 * 4);
        let page: Vec<u8> = (noise.chunks(4).enumerate())
            .flat_map(|(i, b)| {
                let unit = f32::from(b[0]) + f32::from(b[1]) + f32::from(b[2]) - 381.0;
                let x = (unit + f32::from(b[3]) / 256.0) * 2f32.powi((i % 64) as i32 / 4 - 8);
                half::bf16::from_f32(x).to_le_bytes()
            })
            .collect();
        let packed = PACKER.pack(&page, 128).unwrap();
        assert_eq!(unpacked(&packed, 128, page.len()).unwrap(), page);
        let by_rows = zstd::bulk::compress(&page, 3).unwrap();
        assert!(
            packed.len() * 4 < page.len() * 3,
            "{} of {}",
            packed.len(),
            page.len()
        );
        assert!(packed.len() < by_rows.len());
    }

    #[test]
    fn an_empty_page_and_rows_without_bytes_are_fine() {
        for (page, row_bytes) in [(vec![], 36), (vec![], 0), (vec![1, 2, 3], 0)] {
            let packed = PACKER.pack(&page, row_bytes).unwrap();
            assert_eq!(unpacked(&packed, row_bytes, page.len()).unwrap(), page);
        }
    }

    #[test]
    fn damage_is_an_error_that_says_so() {
        let page: Vec<u8> = random(4096).iter().map(|b| b & 0x0f).collect();
        let packed = PACKER.pack(&page, 32).unwrap();
        for at in 0..packed.len() {
            let mut broken = packed.clone();
            broken[at] ^= 0x10;
            // A bit that carries nothing (in the header) may be ignored; wrong bytes must never come out.
            match unpacked(&broken, 32, page.len()) {
                Ok(raw) => assert_eq!(raw, page, "byte {at}"),
                Err(e) => assert!(e.starts_with("packed page: "), "{e}"),
            }
        }
        let mut broken = packed.clone();
        broken[packed.len() / 2] ^= 1;
        assert!(
            unpacked(&broken, 32, page.len())
                .unwrap_err()
                .contains("damaged")
        );
        assert!(unpacked(&packed[..packed.len() - 1], 32, page.len()).is_err());
        assert!(unpacked(&[], 32, page.len()).is_err());
        assert!(unpacked(&packed, 32, page.len() - 32).is_err());
        let longer = unpacked(&packed, 32, page.len() + 32).unwrap_err();
        assert!(
            longer.contains("4096") && longer.contains("4128"),
            "{longer}"
        );
    }

    proptest! {
        #[test]
        fn any_bytes_come_back(page in prop::collection::vec(any::<u8>(), 0..600), row_bytes in 0usize..80, level in 1i32..6) {
            let packed = Zstd { level }.pack(&page, row_bytes).unwrap();
            prop_assert_eq!(unpacked(&packed, row_bytes, page.len()).unwrap(), page);
        }
    }
}
