//! Kernels over stored bytes against decoding and `gemm`, for every registered format.

use crate::cache::RANGE;
use crate::cache::encode::STAGES;
use crate::cache::encode::fixture::{build, codecs, normals};
use crate::cache::formats::Format;
use crate::cache::places;
use crate::cache::rope::{PairLayout, Rope};
use crate::cache::stage::{Codec, Params, Value, Work};
use crate::cache::stored::{StoredRange, Turning};
use crate::compute::cpu::dispatch::tests::{at, levels};
use crate::compute::cpu::gemm::{Dims, Mat, MatMut, gemm};

const MOST_QUERIES: usize = 8;
/// The first position of the range.
const FIRST: usize = RANGE;

/// A range's rows as they are stored, and as they are decoded.
struct Case {
    format: Format,
    stored: u128,
    bytes: Vec<u8>,
    rows: Vec<f32>,
    n: usize,
}

impl Case {
    fn new(codec: Codec, dim: usize, n: usize) -> Self {
        let format = Format { codec, dim };
        // Some rows are missing, so that page-wise pages have several lengths.
        let stored = (0..RANGE).filter(|i| n == RANGE || i % 5 != 3).take(n);
        let stored = stored.fold(0u128, |m, i| m | 1 << i);
        let n = stored.count_ones() as usize;
        let mut rows = normals(n * dim, 31);
        for (row, scale) in rows
            .chunks_mut(dim)
            .zip([1.0, 1e3, 1.0, 1e-6, 0.0].iter().cycle())
        {
            row.iter_mut().for_each(|x| *x *= scale);
        }
        let mut bytes = Vec::new();
        let mut left = &rows[..];
        for page in crate::cache::formats::pages(stored, format.codec.page_rows()) {
            let (page, later) = left.split_at(page.count_ones() as usize * dim);
            bytes.extend(format.encode(page));
            left = later;
        }
        match &format.codec {
            Codec::Rows(codec) => codec.decode_rows(&bytes, dim, &mut rows),
            Codec::Pages(_) => format.decode(stored, &bytes, &mut rows),
        }
        Self {
            format,
            stored,
            bytes,
            rows,
            n,
        }
    }

    /// The rows as they are stored; to be turned if there is something to turn them.
    fn range<'a>(&'a self, rope: Option<&'a Rope>) -> StoredRange<'a> {
        StoredRange {
            stored: self.stored,
            bytes: &self.bytes,
            ahead: &self.bytes[..self.bytes.len() / 2],
            turning: rope.map(|rope| Turning {
                rope,
                first: FIRST as u32,
            }),
        }
    }

    /// The same case with its decoded rows turned.
    fn turned(&self, rope: &Rope) -> Self {
        let mut rows = self.rows.clone();
        let positions = places::bits(self.stored).map(|bit| (FIRST + bit) as u32);
        for (row, p) in rows.chunks_exact_mut(self.format.dim).zip(positions) {
            rope.rotate(p, row);
        }
        Self {
            format: self.format.clone(),
            stored: self.stored,
            bytes: Vec::new(),
            rows,
            n: self.n,
        }
    }

    /// Bits by channel and row.
    fn columns_of_rows(&self) -> Vec<u32> {
        let dim = self.format.dim;
        let at = |i: usize| self.rows[i % self.n * dim + i / self.n].to_bits();
        (0..dim * self.n).map(at).collect()
    }

    fn columns(&self, rope: Option<&Rope>) -> Vec<u32> {
        let mut out = vec![f32::NAN; self.format.dim * RANGE];
        let to = MatMut {
            data: &mut out,
            stride: RANGE,
        };
        self.format
            .columns(self.range(rope), &mut Work::default(), to);
        out.chunks(RANGE).flat_map(|c| bits(&c[..self.n])).collect()
    }

    fn decoded(&self) -> Vec<u32> {
        let mut rows = vec![f32::NAN; self.rows.len()];
        self.format.decode(self.stored, &self.bytes, &mut rows);
        bits(&rows)
    }

    fn scores_by_gemm(&self, q: &[f32]) -> Vec<u32> {
        let (dim, m) = (self.format.dim, q.len() / self.format.dim);
        let mut turned = vec![0.0; dim * self.n];
        for (r, row) in self.rows.chunks_exact(dim).enumerate() {
            for (c, &x) in row.iter().enumerate() {
                turned[c * self.n + r] = x;
            }
        }
        let mut out = vec![0.0; m * self.n];
        let dims = Dims {
            m,
            n: self.n,
            k: dim,
        };
        product(dims, (q, dim), (&turned, self.n), &mut out);
        bits(&out)
    }

    fn scores(&self, q: &[f32], rope: Option<&Rope>) -> Vec<u32> {
        let m = q.len() / self.format.dim;
        let mut out = vec![f32::NAN; m * RANGE];
        let to = MatMut {
            data: &mut out,
            stride: RANGE,
        };
        self.format
            .scores(self.range(rope), q, &mut Work::default(), to);
        out.chunks(RANGE).flat_map(|s| bits(&s[..self.n])).collect()
    }

    fn sum_by_gemm(&self, weights: &[f32], (start, end): (usize, usize), m: usize) -> Vec<u32> {
        let dim = self.format.dim;
        let mut out = vec![0.0; m * dim];
        let dims = Dims {
            m,
            n: dim,
            k: end - start,
        };
        product(
            dims,
            (weights, RANGE),
            (&self.rows[start * dim..], dim),
            &mut out,
        );
        bits(&out)
    }

    fn sum(&self, weights: &[f32], (start, end): (usize, usize), m: usize) -> Vec<u32> {
        let mut out = vec![0.0; m * self.format.dim];
        let weights = Mat {
            data: weights,
            stride: RANGE,
        };
        // In two parts: the chains go on where they were.
        let middle = (start + end) / 2;
        for (part, first) in [(start..middle, 0), (middle..end, middle - start)] {
            let weights = Mat {
                data: &weights.data[first..],
                ..weights
            };
            let work = &mut Work::default();
            self.format
                .weighted_sum(self.range(None), part, weights, work, &mut out);
        }
        bits(&out)
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn product(
    dims: Dims,
    (a, a_stride): (&[f32], usize),
    (b, b_stride): (&[f32], usize),
    c: &mut [f32],
) {
    let a = Mat {
        data: a,
        stride: a_stride,
    };
    let b = Mat {
        data: b,
        stride: b_stride,
    };
    gemm(
        dims,
        a,
        b,
        MatMut {
            data: c,
            stride: dims.n,
        },
    );
}

/// Integers with parameters that have a kernel, or a path through one, beyond the registry's examples.
fn grids(dim: usize) -> impl Iterator<Item = (String, Codec)> {
    let by_token = ["int2", "int3", "int4", "int8"]
        .into_iter()
        .flat_map(|name| {
            let scales = ["f16", "bf16", "fp8"].into_iter();
            scales
                .flat_map(move |s| ["asymmetric", "symmetric"].map(|zero| [name, "token", s, zero]))
        });
    let by_channel = [
        ["int2", "channel", "fp8", "symmetric"],
        ["int3", "channel", "bf16", "asymmetric"],
        ["int4", "channel", "f16", "asymmetric"],
        ["int8", "channel", "fp8", "asymmetric"],
        ["int8", "channel", "f16", "symmetric"],
    ];
    by_token.chain(by_channel).map(move |names| {
        let def = STAGES.iter().find(|d| d.name == names[0]).unwrap();
        let mut given = Params::default();
        for (key, value) in ["axis", "scales", "zero"].into_iter().zip(&names[1..]) {
            given
                .0
                .insert(key.to_owned(), Value::Text((*value).to_owned()));
        }
        let params = Params::resolve(def, &given).unwrap();
        (names.join(" "), build(def, &params, dim).unwrap())
    })
}

/// All formats for rows of `dim` channels.
fn formats(dim: usize) -> impl Iterator<Item = (String, Codec)> {
    let examples = STAGES.iter().flat_map(move |def| codecs(def, dim));
    examples
        .map(|(example, codec)| (example.to_owned(), codec))
        .chain(grids(dim))
}

#[test]
fn stored_rows_give_the_bits_of_decoded_ones() {
    for dim in [20, 32, 64, 80, 128] {
        let q = normals(MOST_QUERIES * dim, 1);
        let weights: Vec<f32> = normals(MOST_QUERIES * RANGE, 2)
            .iter()
            .map(|x| x.abs())
            .collect();
        for (example, codec) in formats(dim) {
            for (n, m) in [
                (1, 3),
                (15, 1),
                (16, 2),
                (17, 3),
                (40, 5),
                (77, 4),
                (101, 7),
                (RANGE, 8),
            ] {
                let case = Case::new(codec.clone(), dim, n);
                let q = &q[..m * dim];
                let part = (case.n / 7, case.n);
                let want = (case.scores_by_gemm(q), case.sum_by_gemm(&weights, part, m));
                for level in levels() {
                    let got = at(level, || {
                        (case.scores(q, None), case.sum(&weights, part, m))
                    });
                    let place =
                        format!("{example}, {dim} channels, {n} rows, {m} queries, {level:?}");
                    assert!(got.0 == want.0, "scores of {place}");
                    assert!(got.1 == want.1, "sums of {place}");
                }
            }
        }
    }
}

#[test]
fn stored_rows_are_unpacked_and_turned_to_the_bits_of_decoded_and_rotated_ones() {
    for dim in [20, 64, 80] {
        let q = normals(MOST_QUERIES * dim, 1);
        let rope = |layout, n_rot| Rope::new(layout, Rope::frequencies(1e4, n_rot), 2 * RANGE);
        let ropes = [
            rope(PairLayout::Interleaved, dim),
            rope(PairLayout::HalfSplit, dim - 4),
        ];
        for (example, codec) in formats(dim) {
            for (n, m) in [(1, 3), (33, 1), (48, 6), (101, 3), (RANGE, 4)] {
                let case = Case::new(codec.clone(), dim, n);
                let q = &q[..m * dim];
                for level in levels() {
                    let place =
                        format!("{example}, {dim} channels, {n} rows, {m} queries, {level:?}");
                    let plain = at(level, || (case.columns(None), case.decoded()));
                    assert!(plain.0 == case.columns_of_rows(), "columns of {place}");
                    assert!(plain.1 == bits(&case.rows), "rows of {place}");
                    for rope in &ropes {
                        let turned = case.turned(rope);
                        let want = (turned.columns_of_rows(), turned.scores_by_gemm(q));
                        let got = at(level, || {
                            (case.columns(Some(rope)), case.scores(q, Some(rope)))
                        });
                        assert!(got.0 == want.0, "turned columns of {place}");
                        assert!(got.1 == want.1, "turned scores of {place}");
                    }
                }
            }
        }
    }
}
