//! `turbo`: TurboQuant's MSE quantizer. A row is rotated at random, its norm is stored, and each coordinate of what is
//! left, a point on the unit sphere, is coded by the scalar quantizer that is best for a random such coordinate.
//!
//! Row layout: the codes of the first channels (after rotation), those of the others, each a stream of bits
//! (`bits.rs`) padded to a whole byte; then the norm, f16. At 2.5 and 3.5 bits the first ⌈d/2⌉ rotated
//! coordinates take the higher whole number of bits and the others the lower one; the paper gives the higher one to
//! channels with outliers, but rotated coordinates are exchangeable: any half is as good as any other.
//!
//! A row of 4 channels at 2 bits, levels ±.44 and ±1.35 (times 1/√4):
//!
//! ```text
//! x                3     0     4     0      norm 5
//! R·x / 5         .1   −.7    .4   .58      a point on the sphere
//! · √4            .2  −1.4    .8  1.16
//! code             2     0     2     3
//! level          .44 −1.35   .44  1.35      · 5/√4, rotated back: x̂
//! ```
//!
//! Invariants: one rotation per number of channels, from `seed`, shared by all layers and heads and charged with the
//! levels as a table; levels are those of Lloyd and Max for the density ∝ (1 − t²)^((d−3)/2) of one coordinate, found in
//! f64; codes come from the row's direction, so they don't depend on how its norm is rounded. A row of zeros decodes to
//! zeros, norms above 65,504 to that one.

use std::sync::Arc;

use half::f16;

use super::super::rotation::haar_f32;
use super::super::stage::{
    BuildContext, Codec, Domain, HeadContext, Kind, ParamDef, Params, RowCodec, Stage, StageDef,
    StageError, Tolerance, never,
};
use super::bits::stream_bytes;
use super::levels::{self, Levels, look_up, nearest};
use crate::compute::cpu::gemm::{Dims, Mat, MatMut, gemm};
use crate::compute::cpu::vector::dot_rows;

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "turbo",
    kind: Kind::Encode,
    doc: "TurboQuant (MSE): random rotation, f16 norm, best scalar levels for a point on the sphere",
    paper: "TurboQuant, arXiv 2504.19874",
    params: &[
        ParamDef {
            name: "bits",
            domain: Domain::Choice {
                of: &["2", "2.5", "3", "3.5", "4"],
            },
            default: Some("4"),
            doc: "bits of a rotated coordinate; a half gives one more to every other half of them",
        },
        ParamDef {
            name: "seed",
            domain: Domain::Int {
                min: 0,
                max: i64::MAX,
            },
            default: Some("0"),
            doc: "which rotation is drawn",
        },
    ],
    calibrated: never,
    examples: &["\"turbo\"", "{ method = \"turbo\", bits = 2.5 }"],
    tolerance: Tolerance::RelativeL2(0.5),
    build,
};

/// Rows that are rotated back by one product: enough for whole tiles, few enough to stay in a first-level cache.
const TURNED_TOGETHER: usize = 24;

/// The codec of rows of one number of channels.
#[derive(Debug, Clone)]
pub struct Turbo {
    /// `[dim][dim]`, applied to rows; its transpose rotates back.
    rotation: Vec<f32>,
    dim: usize,
    /// Levels of the first half of the coordinates, if they have more bits than the others.
    first: Option<Levels>,
    /// In units of 1/√dim.
    levels: Levels,
}

fn build(params: &Params, context: &BuildContext<'_>) -> Result<Stage, StageError> {
    let seed = params.int("seed").unwrap_or_default().unsigned_abs();
    let HeadContext { dim, .. } = context.head.unwrap_or(HeadContext::any(64));
    let (bits, is_half) = match params.text("bits") {
        Some("2") => (2, false),
        Some("2.5") => (2, true),
        Some("3") => (3, false),
        Some("3.5") => (3, true),
        _ => (4, false),
    };
    let levels = |bits| Levels::new(&levels::sphere(dim, bits));
    Ok(Stage::Encode(Codec::Rows(Arc::new(Turbo {
        rotation: haar_f32(dim, seed),
        dim,
        first: is_half.then(|| levels(bits + 1)),
        levels: levels(bits),
    }))))
}

impl Turbo {
    /// Coordinates of the first stream, and its bytes.
    fn split(&self, dim: usize) -> (usize, usize) {
        self.first.map_or((0, 0), |first| {
            let n = dim.div_ceil(2);
            (n, stream_bytes(n, first.bits))
        })
    }

    /// A stored row's coordinates, still rotated, `[dim]`.
    fn coordinates(&self, bytes: &[u8], z: &mut [f32]) {
        let (codes, scale) = bytes.split_at(bytes.len() - 2);
        let scale = f16::from_le_bytes([scale[0], scale[1]]).to_f32() / (z.len() as f32).sqrt();
        let (n, first_bytes) = self.split(z.len());
        let (first, second) = codes.split_at(first_bytes);
        if let Some(levels) = &self.first {
            look_up(levels, first, scale, &mut z[..n]);
        }
        look_up(&self.levels, second, scale, &mut z[n..]);
    }

    /// Both streams of a row: levels, coordinates, and how many bytes they take.
    fn code_bytes(&self, dim: usize) -> usize {
        let (n, bytes) = self.split(dim);
        bytes + stream_bytes(dim - n, self.levels.bits)
    }
}

impl RowCodec for Turbo {
    fn row_bytes(&self, dim: usize) -> usize {
        self.code_bytes(dim) + 2
    }

    fn scale_bytes(&self, _dim: usize) -> usize {
        2
    }

    fn encode(&self, row: &[f32], out: &mut [u8]) {
        let [mut square, mut z] = [vec![0.0], vec![0.0; row.len()]];
        dot_rows(row, row, &mut square);
        let norm = square[0].sqrt();
        dot_rows(&self.rotation, row, &mut z);
        let unit = if norm == 0.0 {
            0.0
        } else {
            (row.len() as f32).sqrt() / norm
        };
        for z in &mut z {
            *z *= unit;
        }
        let (codes, scale) = out.split_at_mut(self.code_bytes(row.len()));
        scale.copy_from_slice(&f16::from_f32(norm.min(f16::MAX.to_f32())).to_le_bytes());
        let (n, bytes) = self.split(row.len());
        let (first, second) = codes.split_at_mut(bytes);
        if let Some(levels) = &self.first {
            nearest(levels, &z[..n], first);
        }
        nearest(&self.levels, &z[n..], second);
    }

    fn decode(&self, bytes: &[u8], row: &mut [f32]) {
        self.decode_rows(bytes, row.len(), row);
    }

    fn decode_rows(&self, bytes: &[u8], dim: usize, rows: &mut [f32]) {
        let mut z = vec![0.0; dim * TURNED_TOGETHER.min(rows.len() / dim)];
        let stored = bytes.chunks(self.row_bytes(dim) * TURNED_TOGETHER);
        for (bytes, rows) in stored.zip(rows.chunks_mut(dim * TURNED_TOGETHER)) {
            let stored = bytes.chunks_exact(self.row_bytes(dim));
            for (bytes, z) in stored.zip(z.chunks_exact_mut(dim)) {
                self.coordinates(bytes, z);
            }
            let dims = Dims {
                m: rows.len() / dim,
                n: dim,
                k: dim,
            };
            let (data, stride) = (rows, dim);
            let [z, rotation] = [&z, &self.rotation].map(|data| Mat { data, stride });
            gemm(dims, z, rotation, MatMut { data, stride });
        }
    }

    fn table_bytes(&self) -> u64 {
        let levels = self.levels.table_bytes() + self.first.map_or(0, |l| l.table_bytes());
        (4 * self.dim * self.dim) as u64 + levels
    }
}
