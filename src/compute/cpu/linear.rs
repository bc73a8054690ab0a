//! Linear layers over packed weights: y = x·Wᵀ (+ bias).
//!
//! Invariant: `y[row][out]` is the chain that `gemm` defines over the row's inputs in ascending order, then the bias: the
//! same bits for any number of rows and threads. Weights lie in panels of 64 outputs, `[panel][in][64]`, so that one
//! row's pass reads memory front to back.

use bytemuck::{Pod, Zeroable};
use rayon::prelude::*;

use super::gemm::{Dims, Mat, MatMut, gemm};

/// Outputs of a panel.
pub const PANEL: usize = 64;
/// Rows of one task: enough to pay for reading a panel, few enough to spread a prompt over threads.
const TASK_ROWS: usize = 96;
/// Rows up to which a task's tile stays small.
const FEW_ROWS: usize = 6;

/// A cache line of weights; aligned, so that no vector load touches two lines.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

const PANEL_LINES: usize = PANEL / 16;

/// The weights of one linear layer, f32, packed.
#[derive(Debug)]
pub struct Packed {
    n_out: usize,
    n_in: usize,
    lines: Vec<Line>,
}

impl Packed {
    /// Packs a `[n_out][n_in]` matrix; `read(first_row, out)` fills `out` with consecutive rows.
    ///
    /// # Errors
    /// The first error of `read`.
    pub fn pack<E: Send>(
        (n_out, n_in): (usize, usize),
        read: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<Self, E> {
        let panel_lines = n_in * PANEL_LINES;
        let mut lines = vec![Line([0.0; 16]); n_out.div_ceil(PANEL) * panel_lines];
        lines
            .par_chunks_mut(panel_lines.max(1))
            .enumerate()
            .try_for_each(|(p, panel)| {
                let first = p * PANEL;
                let mut rows = vec![0.0; PANEL.min(n_out - first) * n_in];
                read(first, &mut rows)?;
                let panel: &mut [f32] = bytemuck::cast_slice_mut(panel);
                for (j, row) in rows.chunks_exact(n_in).enumerate() {
                    for (kk, &w) in row.iter().enumerate() {
                        panel[kk * PANEL + j] = w;
                    }
                }
                Ok(())
            })?;
        Ok(Self { n_out, n_in, lines })
    }

    /// Outputs.
    pub fn n_out(&self) -> usize {
        self.n_out
    }

    /// Inputs.
    pub fn n_in(&self) -> usize {
        self.n_in
    }

    /// y = x·Wᵀ + bias. `x`: `[row][n_in]`, `y`: `[row][n_out]`, `bias`: `[n_out]` or nothing.
    ///
    /// # Panics
    /// When the buffers' lengths do not belong to one number of rows.
    pub fn apply(&self, x: &[f32], bias: Option<&[f32]>, y: &mut [f32]) {
        let n_rows = x.len() / self.n_in;
        assert_eq!(x.len(), n_rows * self.n_in, "input rows");
        assert_eq!(y.len(), n_rows * self.n_out, "output rows");
        assert!(bias.is_none_or(|b| b.len() == self.n_out), "bias");
        let n_blocks = n_rows.div_ceil(TASK_ROWS);
        let out = Output {
            base: y.as_mut_ptr(),
            n_rows,
            n_out: self.n_out,
        };
        let n_tasks = n_blocks * self.n_out.div_ceil(PANEL);
        // Tasks that follow each other share a panel.
        (0..n_tasks).into_par_iter().for_each(|task| {
            let (panel, first_row) = (task / n_blocks, task % n_blocks * TASK_ROWS);
            let n = TASK_ROWS.min(n_rows - first_row);
            let x = &x[first_row * self.n_in..(first_row + n) * self.n_in];
            let part = Part {
                panel,
                first_row,
                bias,
            };
            if n <= FEW_ROWS {
                self.task::<{ FEW_ROWS * PANEL }>(x, part, &out);
            } else {
                self.task::<{ TASK_ROWS * PANEL }>(x, part, &out);
            }
        });
    }

    fn task<const TILE: usize>(&self, x: &[f32], part: Part<'_>, out: &Output) {
        let n_lines = self.n_in * PANEL_LINES;
        let weights = &self.lines[part.panel * n_lines..(part.panel + 1) * n_lines];
        let mut tile = [0.0f32; TILE];
        let first_out = part.panel * PANEL;
        let width = PANEL.min(self.n_out - first_out);
        let n_rows = x.len() / self.n_in;
        gemm(
            Dims {
                m: n_rows,
                n: width,
                k: self.n_in,
            },
            Mat {
                data: x,
                stride: self.n_in,
            },
            Mat {
                data: bytemuck::cast_slice(weights),
                stride: PANEL,
            },
            MatMut {
                data: &mut tile,
                stride: PANEL,
            },
        );
        for (i, row) in tile.chunks_exact_mut(PANEL).take(n_rows).enumerate() {
            let row = &mut row[..width];
            if let Some(bias) = part.bias {
                super::vector::add(row, &bias[first_out..first_out + width]);
            }
            // SAFETY: each (row, panel) belongs to one task alone.
            unsafe { out.write(part.first_row + i, first_out, row) };
        }
    }
}

/// What one task computes: a panel's outputs for a block of rows.
#[derive(Clone, Copy)]
struct Part<'a> {
    panel: usize,
    first_row: usize,
    bias: Option<&'a [f32]>,
}

/// The output matrix, written by tasks at disjoint places.
struct Output {
    base: *mut f32,
    n_rows: usize,
    n_out: usize,
}

// SAFETY: the pointer stays valid while `apply` borrows its output, and `write` asks for disjoint places.
unsafe impl Sync for Output {}

impl Output {
    /// Writes `values` to a row, from column `first` on.
    ///
    /// # Safety
    /// No other task may write to the same elements.
    unsafe fn write(&self, row: usize, first: usize, values: &[f32]) {
        assert!(row < self.n_rows && first + values.len() <= self.n_out);
        // SAFETY: the elements lie inside the matrix (checked above) and are this task's alone (the caller's promise);
        // `values` is a tile of its own.
        unsafe {
            let place = self.base.add(row * self.n_out + first);
            place.copy_from_nonoverlapping(values.as_ptr(), values.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use std::convert::Infallible;

    fn pack(weights: &[f32], shape: (usize, usize)) -> Packed {
        let n_in = shape.1;
        Packed::pack::<Infallible>(shape, |first, out| {
            out.copy_from_slice(&weights[first * n_in..first * n_in + out.len()]);
            Ok(())
        })
        .unwrap()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|v| v.to_bits()).collect()
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_in_any_batch_on_any_threads() {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(7);
        let mut random =
            |n: usize| -> Vec<f32> { (0..n).map(|_| rng.random_range(-1.0..1.0)).collect() };
        for (n_out, n_in) in [(200, 96), (64, 1500), (1, 3), (130, 576)] {
            let (w, x, bias) = (random(n_out * n_in), random(512 * n_in), random(n_out));
            let packed = pack(&w, (n_out, n_in));
            let chain = |row: usize, o: usize| {
                let (x, w) = (&x[row * n_in..][..n_in], &w[o * n_in..][..n_in]);
                x.iter().zip(w).fold(0.0f32, |s, (&x, &w)| x.mul_add(w, s)) + bias[o]
            };
            let want: Vec<f32> = (0..512 * n_out)
                .map(|i| chain(i / n_out, i % n_out))
                .collect();
            for n_threads in [1, 2] {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(n_threads)
                    .build()
                    .unwrap();
                for n_rows in [1, 7, 64, 512] {
                    let mut y = vec![0.0; n_rows * n_out];
                    pool.install(|| packed.apply(&x[..n_rows * n_in], Some(&bias), &mut y));
                    assert_eq!(
                        bits(&y),
                        bits(&want[..n_rows * n_out]),
                        "{n_rows} rows, {n_threads} threads"
                    );
                }
            }
        }
    }

    #[test]
    fn errors_of_the_source_come_through_and_no_rows_are_fine() {
        let failed = Packed::pack(
            (70, 4),
            |first, _| if first == 64 { Err("row 64") } else { Ok(()) },
        );
        assert_eq!(failed.unwrap_err(), "row 64");
        pack(&[1.0; 8], (2, 4)).apply(&[], None, &mut []);
    }
}
