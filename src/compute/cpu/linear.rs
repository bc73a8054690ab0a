//! Linear layers over weights as they are stored: y = x·Wᵀ (+ bias).
//!
//! Invariant: an output is what `dot` defines, or `int_dot` where a matrix computes in integers, then the bias: the same bits
//! for any number of rows and threads. A few rows meet the weights as they lie in the file, each unpacked once in registers;
//! for many rows a panel of outputs is unpacked first and stays in a near cache while all rows pass. Rows are coded once
//! for all outputs.

use rayon::prelude::*;

use super::blocks::is_native;
use super::codes::Codes;
use super::dot::{self, FEW_ROWS, Inputs, Weights};
use super::int_dot;
use super::simd::Line;
use super::team;
use crate::model::gguf::TensorType;
use crate::model::ops::Arithmetic;
use crate::model::weights::StoredMatrix;

/// Outputs of one task.
const PANEL: usize = 32;

/// The weights of one linear layer.
#[derive(Debug, Clone)]
pub struct Matrix {
    n_out: usize,
    n_in: usize,
    stored: StoredMatrix,
    arithmetic: Arithmetic,
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

/// Working memory of a run of tasks.
#[derive(Default)]
struct Scratch {
    /// A panel of f32 weights.
    panel: Vec<f32>,
    /// A panel of codes, or sums on their way.
    lines: Vec<Line>,
    /// Outputs.
    y: Vec<f32>,
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
            arithmetic: Arithmetic::F32,
        }
    }

    /// The same weights, computing in `arithmetic` if their type has codes and in f32 if not.
    pub fn computed_in(mut self, arithmetic: Arithmetic) -> Self {
        self.arithmetic = match int_dot::is_coded(self.stored.kind()) {
            true => arithmetic,
            false => Arithmetic::F32,
        };
        self
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
    let codes = Coded::of(x, n_in, &layers);
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
            codes: codes.of_matrix(weights),
            bias,
            out,
            first,
        }));
    }
    let inputs = Inputs { x, n_in };
    if tasks.len() == 1 || n_rows == 0 {
        let scratch = &mut Scratch::default();
        tasks.iter().for_each(|task| task.run(inputs, scratch));
    } else {
        team::for_each_init(tasks.len(), Scratch::default, |scratch, i| {
            tasks[i].run(inputs, scratch);
        });
    }
}

/// The rows in every arithmetic that a layer asks for.
struct Coded {
    int16: Option<Codes>,
    int8: Option<Codes>,
}

impl Coded {
    fn of(x: &[f32], n_in: usize, layers: &[Layer<'_>]) -> Self {
        let codes = |arithmetic| {
            let wanted = layers.iter().any(|l| l.weights.arithmetic == arithmetic);
            wanted.then(|| Codes::new(x, n_in, arithmetic))
        };
        Self {
            int16: codes(Arithmetic::Int16),
            int8: codes(Arithmetic::Int8),
        }
    }

    fn of_matrix(&self, matrix: &Matrix) -> Option<&Codes> {
        match matrix.arithmetic {
            Arithmetic::F32 => None,
            Arithmetic::Int16 => self.int16.as_ref(),
            Arithmetic::Int8 => self.int8.as_ref(),
        }
    }
}

/// Outputs `first..first + PANEL` of a layer, for all rows.
struct Task<'a> {
    weights: &'a Matrix,
    /// The rows' codes, for a matrix that computes in integers.
    codes: Option<&'a Codes>,
    bias: Option<&'a [f32]>,
    out: Output,
    first: usize,
}

impl Task<'_> {
    fn run(&self, inputs: Inputs<'_>, Scratch { panel, lines, y }: &mut Scratch) {
        let n = PANEL.min(self.out.n_out - self.first);
        let weights = self.weights.rows(self.first, n);
        y.resize(self.out.n_rows * n, 0.0);
        let y = &mut y[..self.out.n_rows * n];
        if let Some(codes) = self.codes {
            int_dot::apply(codes, weights, lines, y);
        } else if self.out.n_rows <= FEW_ROWS {
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
