//! A ragged decode batch over q8_0 bytes, its reference in f64, and the input that the host program reads.
//! Shares no code with the library. Padding codes and the rows beyond a page's last hold junk: reading them shows.

use crate::host::Order;
use half::f16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 34;
const PAGE_ROWS: usize = 128;
const GRANULE_ROWS: usize = 16;
/// As an f16 scale 61,280: a row of it wins every maximum, which NaN would not.
const JUNK: u8 = 0x7b;

/// Lists of q8_0 rows, K and V, and the queries that read them.
#[derive(Clone)]
pub struct Batch {
    pub head_dim: usize,
    pub n_query: usize,
    pub scale: f32,
    /// `[list][query][head_dim]`
    pub q: Vec<f32>,
    /// `[list]`, each `[row][row_bytes]`
    pub k: Vec<Vec<u8>>,
    pub v: Vec<Vec<u8>>,
}

/// How far an output is from the reference.
#[derive(Debug)]
pub struct Judged {
    /// The largest error, in units of what the kernel's contract allows.
    pub worst: f64,
    /// The largest error as a part of Σ p |v|.
    pub largest_error: f64,
    pub largest_score: f64,
}

impl Batch {
    pub fn random(head_dim: usize, n_query: usize, n_rows: &[usize]) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(head_dim as u64 * 16 + n_query as u64);
        let mut values = |n: usize, span: f32| -> Vec<f32> {
            (0..n).map(|_| rng.random_range(-span..span)).collect()
        };
        let mut rows = |n: usize, span: f32| -> Vec<u8> {
            (0..n)
                .flat_map(|_| encode_row(&values(head_dim, span)))
                .collect()
        };
        let k = n_rows.iter().map(|&n| rows(n, 4.0)).collect();
        let v = n_rows.iter().map(|&n| rows(n, 1.0)).collect();
        let q = values(n_rows.len() * n_query * head_dim, 2.0);
        Self {
            head_dim,
            n_query,
            scale: 1.0 / (head_dim as f32).sqrt(),
            q,
            k,
            v,
        }
    }

    /// One list read by one of its queries.
    pub fn only(&self, list: usize, query: usize) -> Self {
        let at = (list * self.n_query + query) * self.head_dim;
        Self {
            n_query: 1,
            q: self.q[at..at + self.head_dim].to_vec(),
            k: vec![self.k[list].clone()],
            v: vec![self.v[list].clone()],
            ..*self
        }
    }

    pub fn row_bytes(&self) -> usize {
        self.head_dim.div_ceil(BLOCK) * BLOCK_BYTES
    }

    /// Pages of a list: `(k, v)` bytes of up to 128 rows.
    pub fn pages(&self, list: usize) -> impl Iterator<Item = (&[u8], &[u8])> {
        let page_bytes = PAGE_ROWS * self.row_bytes();
        self.k[list]
            .chunks(page_bytes)
            .zip(self.v[list].chunks(page_bytes))
    }

    pub fn decode_v(&self, list: usize, row: usize) -> Vec<f32> {
        decode_row(&self.v[list][row * self.row_bytes()..], self.head_dim)
            .iter()
            .map(|&v| v as f32)
            .collect()
    }

    /// Compares `out` with attention in f64, two passes over all rows, without pages.
    pub fn judge(&self, out: &[f32]) -> Judged {
        assert_eq!(out.len(), self.q.len());
        let mut judged = Judged {
            worst: 0.0,
            largest_error: 0.0,
            largest_score: 0.0,
        };
        for (i, (q, out)) in self
            .q
            .chunks(self.head_dim)
            .zip(out.chunks(self.head_dim))
            .enumerate()
        {
            let list = i / self.n_query;
            let (want, magnitude, score) = self.reference(list, q);
            judged.largest_score = judged.largest_score.max(score);
            let allowed = 2e-6 + 2e-7 * score;
            for ((out, want), magnitude) in out.iter().zip(want).zip(magnitude) {
                assert!(out.is_finite(), "list {list}: {out}");
                let error = (f64::from(*out) - want).abs() / magnitude;
                judged.largest_error = judged.largest_error.max(error);
                judged.worst = judged.worst.max(error / allowed);
            }
        }
        judged
    }

    /// The output, Σ p |v| beside it, and the largest |score|.
    fn reference(&self, list: usize, q: &[f32]) -> (Vec<f64>, Vec<f64>, f64) {
        let rows = |bytes: &[u8]| -> Vec<Vec<f64>> {
            bytes
                .chunks(self.row_bytes())
                .map(|row| decode_row(row, self.head_dim))
                .collect()
        };
        let (k, v) = (rows(&self.k[list]), rows(&self.v[list]));
        let dot = |k: &Vec<f64>| q.iter().zip(k).map(|(&q, k)| f64::from(q) * k).sum::<f64>();
        let scores: Vec<f64> = k.iter().map(|k| dot(k) * f64::from(self.scale)).collect();
        let m = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - m).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mean = |of: fn(f64) -> f64, d: usize| {
            weights
                .iter()
                .zip(&v)
                .map(|(p, v)| p * of(v[d]))
                .sum::<f64>()
                / total
        };
        let out = (0..self.head_dim).map(|d| mean(|v| v, d)).collect();
        let magnitude = (0..self.head_dim).map(|d| mean(f64::abs, d)).collect();
        (
            out,
            magnitude,
            scores.iter().fold(0.0, |a, s| a.max(s.abs())),
        )
    }

    /// The launch as `attend_q8_0_host.cpp` reads it.
    pub fn input(&self, order: Order) -> Vec<u8> {
        let (mut list_start, mut page_list, mut page_rows) = (vec![0], Vec::new(), Vec::new());
        let (mut k_offset, mut v_offset, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        for list in 0..self.k.len() {
            for (k, v) in self.pages(list) {
                page_list.push(list as u32);
                page_rows.push((k.len() / self.row_bytes()) as u32);
                k_offset.push(self.store(&mut bytes, k));
                v_offset.push(self.store(&mut bytes, v));
            }
            list_start.push(page_list.len() as u32);
        }
        let (n_list, n_page) = (self.k.len() as u32, page_list.len() as u32);
        let n_query = self.n_query as u32;
        let (pages_grid, merge_grid) = (n_page * n_query, n_list * n_query);
        let head = [
            order as u32,
            pages_grid,
            128,
            merge_grid,
            self.head_dim as u32,
            n_list,
            n_query,
            n_page,
        ];
        let mut input = Vec::new();
        input.extend(head.iter().flat_map(|x| x.to_le_bytes()));
        input.extend(self.scale.to_le_bytes());
        input.extend(
            [list_start, page_list, page_rows]
                .concat()
                .iter()
                .flat_map(|x: &u32| x.to_le_bytes()),
        );
        input.extend(
            [k_offset, v_offset]
                .concat()
                .iter()
                .flat_map(|x: &u64| x.to_le_bytes()),
        );
        input.extend(self.q.iter().flat_map(|x| x.to_le_bytes()));
        input.extend((bytes.len() as u64).to_le_bytes());
        input.extend(bytes);
        input
    }

    /// Appends a page in whole granules, junk after its last row, at a multiple of 16 bytes; says where it lies.
    fn store(&self, bytes: &mut Vec<u8>, page: &[u8]) -> u64 {
        let at = bytes.len().next_multiple_of(16);
        bytes.resize(at, JUNK);
        bytes.extend(page);
        bytes.resize(
            at + page.len().next_multiple_of(GRANULE_ROWS * self.row_bytes()),
            JUNK,
        );
        at as u64
    }
}

/// q8_0 as ggml stores it: d = max |x| / 127 in f16, codes rounded half away from zero with the unrounded d.
/// The pad of the last block holds junk.
fn encode_row(values: &[f32]) -> Vec<u8> {
    let mut row = Vec::new();
    for block in values.chunks(BLOCK) {
        let d = block.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 127.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        row.extend(f16::from_f32(d).to_le_bytes());
        row.extend(block.iter().map(|x| (x * inverse).round() as i8 as u8));
        row.resize(row.len() + BLOCK - block.len(), JUNK);
    }
    row
}

fn decode_row(row: &[u8], head_dim: usize) -> Vec<f64> {
    let value = |block: &[u8], i: usize| {
        f16::from_le_bytes([block[0], block[1]]).to_f64() * f64::from(block[2 + i] as i8)
    };
    (0..head_dim)
        .map(|d| value(&row[d / BLOCK * BLOCK_BYTES..], d % BLOCK))
        .collect()
}
