//! Linear layers over weights as they are stored: y = x·Wᵀ (+ bias).
//!
//! Invariant: an output is what `dot` defines, then the bias: the same bits for any number of rows and threads. A few rows
//! meet the weights as they lie in the file, each unpacked once in registers; for many rows a panel of outputs is expanded
//! to f32 first and stays in a level-2 cache while all rows pass.

use std::cell::RefCell;

use rayon::prelude::*;

use super::blocks::is_native;
use super::dot::{self, FEW_ROWS, Inputs, Weights};
use crate::model::gguf::TensorType;
use crate::model::weights::StoredMatrix;

/// Outputs of one task.
const PANEL: usize = 32;

/// The weights of one linear layer.
#[derive(Debug, Clone)]
pub struct Matrix {
    n_out: usize,
    n_in: usize,
    stored: StoredMatrix,
}

/// One of several layers over the same input.
pub struct Layer<'a> {
    /// Its weights.
    pub weights: &'a Matrix,
    /// `[n_out]` or nothing.
    pub bias: Option<&'a [f32]>,
    /// Outputs, `[row][n_out]`.
    pub y: &'a mut [f32],
}

thread_local! {
    /// Working memory of this thread's tasks: a panel and its outputs.
    static PANELS: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

impl Matrix {
    /// A `[n_out][n_in]` matrix. A type that no kernel reads is expanded to f32.
    pub fn new((n_out, n_in): (usize, usize), stored: StoredMatrix) -> Self {
        let stored = if is_native(stored.kind()) {
            stored
        } else {
            let mut values = vec![0.0f32; n_out * n_in];
            let row_bytes = stored.bytes().len() / n_out.max(1);
            values
                .par_chunks_mut(n_in.max(1))
                .zip(stored.bytes().par_chunks(row_bytes.max(1)))
                .for_each(|(row, bytes)| stored.kind().dequantize(bytes, row));
            StoredMatrix::owned(TensorType::F32, bytemuck::cast_slice(&values).to_vec())
        };
        Self {
            n_out,
            n_in,
            stored,
        }
    }

    /// Outputs.
    pub fn n_out(&self) -> usize {
        self.n_out
    }

    /// Inputs.
    pub fn n_in(&self) -> usize {
        self.n_in
    }

    /// Bytes that one pass over the weights reads.
    pub fn n_bytes(&self) -> usize {
        self.stored.bytes().len()
    }

    /// y = x·Wᵀ + bias. `x`: `[row][n_in]`, `y`: `[row][n_out]`, `bias`: `[n_out]` or nothing.
    ///
    /// # Panics
    /// When the buffers' lengths do not belong to one number of rows.
    pub fn apply(&self, x: &[f32], bias: Option<&[f32]>, y: &mut [f32]) {
        apply(
            x,
            vec![Layer {
                weights: self,
                bias,
                y,
            }],
        );
    }

    fn rows(&self, first: usize, n: usize) -> Weights<'_> {
        let kind = self.stored.kind();
        let row_bytes = self.n_in / kind.block_len() * kind.block_bytes();
        Weights {
            bytes: &self.stored.bytes()[first * row_bytes..(first + n) * row_bytes],
            kind,
        }
    }
}

/// Several layers over the same rows, `[row][n_in]`, in one go: short layers leave no thread waiting.
///
/// # Panics
/// When buffers' lengths do not belong to one number of rows.
pub fn apply(x: &[f32], layers: Vec<Layer<'_>>) {
    let Some(n_in) = layers.first().map(|l| l.weights.n_in) else {
        return;
    };
    let n_rows = x.len() / n_in;
    assert_eq!(x.len(), n_rows * n_in, "input rows");
    let mut tasks = Vec::new();
    for layer in layers {
        let n_out = layer.weights.n_out;
        assert_eq!(layer.weights.n_in, n_in, "inputs");
        assert_eq!(layer.y.len(), n_rows * n_out, "output rows");
        assert!(layer.bias.is_none_or(|b| b.len() == n_out), "bias");
        let (weights, bias) = (layer.weights, layer.bias);
        let out = Output {
            base: layer.y.as_mut_ptr(),
            n_rows,
            n_out,
        };
        tasks.extend((0..n_out).step_by(PANEL).map(|first| Task {
            weights,
            bias,
            out,
            first,
        }));
    }
    let inputs = Inputs { x, n_in };
    if tasks.len() == 1 || n_rows == 0 {
        tasks.iter().for_each(|task| task.run(inputs));
    } else {
        tasks.into_par_iter().for_each(|task| task.run(inputs));
    }
}

/// Outputs `first..first + PANEL` of a layer, for all rows.
struct Task<'a> {
    weights: &'a Matrix,
    bias: Option<&'a [f32]>,
    out: Output,
    first: usize,
}

impl Task<'_> {
    fn run(&self, inputs: Inputs<'_>) {
        let n = PANEL.min(self.out.n_out - self.first);
        let weights = self.weights.rows(self.first, n);
        PANELS.with_borrow_mut(|(panel, y)| {
            y.resize(self.out.n_rows * n, 0.0);
            let y = &mut y[..self.out.n_rows * n];
            if self.out.n_rows <= FEW_ROWS {
                dot::few(inputs, weights, y);
            } else {
                panel.resize(n * inputs.n_in, 0.0);
                dot::expand(weights, panel);
                dot::many(inputs, panel, y);
            }
            for (i, row) in y.chunks_exact_mut(n).enumerate() {
                if let Some(bias) = self.bias {
                    super::vector::add(row, &bias[self.first..self.first + n]);
                }
                // SAFETY: each (row, panel) belongs to one task alone.
                unsafe { self.out.write(i, self.first, row) };
            }
        });
    }
}

/// An output matrix, written by tasks at disjoint places.
#[derive(Clone, Copy)]
struct Output {
    base: *mut f32,
    n_rows: usize,
    n_out: usize,
}

// SAFETY: the pointer stays valid while `apply` borrows its output, and `write` asks for disjoint places.
unsafe impl Sync for Output {}
// SAFETY: as above.
unsafe impl Send for Output {}

impl Output {
    /// Writes `values` to a row, from column `first` on.
    ///
    /// # Safety
    /// No other task may write to the same elements.
    unsafe fn write(&self, row: usize, first: usize, values: &[f32]) {
        assert!(row < self.n_rows && first + values.len() <= self.n_out);
        // SAFETY: the elements lie inside the matrix (checked above) and are this task's alone (the caller's promise);
        // `values` is a buffer of its own.
        unsafe {
            let place = self.base.add(row * self.n_out + first);
            place.copy_from_nonoverlapping(values.as_ptr(), values.len());
        }
    }
}

#[cfg(test)]
mod tests;
