//! A gate's weights: how they lie in memory, in a file, and what they score.
//!
//! A *line* is a linear function of a row's features: a byte per hidden channel with one scale, and f32 for the few other
//! features. A head's score is its line, plus, where the gate has *units* (the hidden layer of a small network that all
//! heads of a layer share), what their positive parts weigh: s = line(x) + Σ out·max(unit(x), 0).
//!
//! Invariants: weights are read once and never change; what is charged is what lies in memory; sums have one order.
//!
//! The file is safetensors: `gate.weight` (I8 `[layer][kv_head][n_embd]`), `gate.scale` (F32 `[layer][kv_head]`),
//! `gate.extras` (F32 `[layer][kv_head][4]`) and, with units, `units.weight` (I8 `[layer][unit][n_embd]`), `units.scale`,
//! `units.extras` (F32 `[layer][unit][2]`) and `units.out` (F32 `[layer][kv_head][unit]`); or, of older ones, `gate.weight`
//! alone: F16 `[layer][kv_head][n_embd + 4]`. Its metadata say what it was made from.

use std::collections::BTreeMap;

use half::f16;
use half::slice::HalfFloatSliceExt;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::compute::cpu::vector::{dot_codes, dot_rows};

/// Features of a row besides the hidden ones: ln‖k‖, ln‖v‖, ln(1 + p), 1.
pub const EXTRAS: usize = 4;

/// Those that do not depend on the head, which units see: ln(1 + p), 1.
pub const SHARED: usize = 2;

/// Linear functions of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Lines {
    codes: Codes,
    n_embd: usize,
    /// `[line][feature]`.
    extras: Vec<f32>,
    n_extras: usize,
}

/// Weights of hidden channels, `[line][n_embd]`.
#[derive(Debug, Clone, PartialEq)]
enum Codes {
    I8 { codes: Vec<i8>, scales: Vec<f32> },
    F16(Vec<f16>),
}

impl Lines {
    /// Rounds weights `[line][n_embd + n_extras]` to 8 bits, the largest of a line being 127.
    pub fn rounded(weights: &[f32], n_embd: usize, n_extras: usize) -> Self {
        let (mut codes, mut scales, mut extras) = (Vec::new(), Vec::new(), Vec::new());
        for line in weights.chunks_exact(n_embd + n_extras) {
            let (hidden, own) = line.split_at(n_embd);
            let scale = hidden.iter().fold(0.0f32, |m, w| m.max(w.abs())) / 127.0;
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            codes.extend(hidden.iter().map(|w| (w * inverse).round() as i8));
            scales.push(scale);
            extras.extend(own);
        }
        Self {
            codes: Codes::I8 { codes, scales },
            n_embd,
            extras,
            n_extras,
        }
    }

    fn value(&self, line: usize, hidden: &[f32], extras: &[f32]) -> f32 {
        let at = line * self.n_embd..(line + 1) * self.n_embd;
        let sum = match &self.codes {
            Codes::I8 { codes, scales } => scales[line] * dot_codes(&codes[at], hidden),
            Codes::F16(values) => {
                let mut own = vec![0.0f32; self.n_embd];
                values[at].convert_to_f32_slice(&mut own);
                let mut sum = [0.0f32];
                dot_rows(&own, hidden, &mut sum);
                sum[0]
            }
        };
        let own = &self.extras[line * self.n_extras..(line + 1) * self.n_extras];
        let terms = own.iter().zip(extras);
        terms.fold(sum, |s, (w, x)| w.mul_add(*x, s))
    }

    fn bytes(&self) -> u64 {
        let codes = match &self.codes {
            Codes::I8 { codes, scales } => codes.len() + 4 * scales.len(),
            Codes::F16(values) => 2 * values.len(),
        };
        (codes + 4 * self.extras.len()) as u64
    }

    fn is_finite(&self) -> bool {
        let codes = match &self.codes {
            Codes::I8 { scales, .. } => scales.iter().all(|s| s.is_finite()),
            Codes::F16(values) => values.iter().all(|w| w.is_finite()),
        };
        codes && self.extras.iter().all(|w| w.is_finite())
    }
}

/// The hidden layers of a gate that has some.
#[derive(Debug, Clone, PartialEq)]
struct Units {
    lines: Lines,
    /// Units of a layer.
    n: usize,
    /// `[layer][kv_head][unit]`.
    out: Vec<f32>,
}

/// A gate's weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Weights {
    heads: Lines,
    units: Option<Units>,
    /// Layers and KV heads.
    pub shape: (usize, usize),
    /// SHA-256 of the model that it was made for, as the file says.
    pub model_sha256: String,
}

impl Weights {
    /// Of one line per head, `[layer][kv_head]`; no model is named yet.
    pub fn new(shape: (usize, usize), heads: Lines) -> Self {
        Self {
            heads,
            units: None,
            shape,
            model_sha256: String::new(),
        }
    }

    /// The same with units: their lines `[layer][unit]`, and what a head adds of each, `out` `[layer][kv_head][unit]`.
    pub fn with_units(self, lines: Lines, out: Vec<f32>) -> Self {
        let n = out.len() / (self.shape.0 * self.shape.1);
        Self {
            units: Some(Units { lines, n, out }),
            ..self
        }
    }

    /// Hidden channels that it reads.
    pub fn n_embd(&self) -> usize {
        self.heads.n_embd
    }

    /// A row's score. `hidden`: `[n_embd]`.
    ///
    /// # Panics
    /// When the layer, the head or the channels are none of the gate's.
    pub fn score(
        &self,
        (layer, kv_head): (usize, usize),
        hidden: &[f32],
        extras: &[f32; EXTRAS],
    ) -> f32 {
        let head = layer * self.shape.1 + kv_head;
        let line = self.heads.value(head, hidden, extras);
        let Some(units) = &self.units else {
            return line;
        };
        let shared = &extras[EXTRAS - SHARED..];
        let out = &units.out[head * units.n..(head + 1) * units.n];
        out.iter().enumerate().fold(line, |s, (j, w)| {
            let unit = units.lines.value(layer * units.n + j, hidden, shared);
            w.mul_add(unit.max(0.0), s)
        })
    }

    /// Adds to every head's constant, `[layer][kv_head]`.
    pub fn shift(&mut self, by: &[f32]) {
        for (extras, by) in self.heads.extras.chunks_exact_mut(EXTRAS).zip(by) {
            extras[EXTRAS - 1] += by;
        }
    }

    /// Bytes that lie in memory.
    pub fn bytes(&self) -> u64 {
        let units = self.units.as_ref();
        let units = units.map_or(0, |u| u.lines.bytes() + 4 * u.out.len() as u64);
        self.heads.bytes() + units
    }

    /// Reads a file's bytes; `name` is how messages call it.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub fn read(name: &str, bytes: &[u8]) -> Result<Self, String> {
        Self::parse(bytes).map_err(|what| format!("`{name}` is no gate: {what}"))
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| e.to_string())?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let model_sha256 = metadata
            .get("model_sha256")
            .ok_or("its metadata name no model (`model_sha256`)")?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
        let found = Found(&tensors);
        let (dtype, shape) = found.shape("gate.weight")?;
        let &[n_layers @ (1..), n_kv_heads @ (1..), width] = shape.as_slice() else {
            return Err(format!(
                "`gate.weight` has the shape {shape:?}, it must be [layer, kv_head, feature]"
            ));
        };
        let heads = match dtype {
            Dtype::F16 if width > EXTRAS => found.older(width)?,
            Dtype::I8 if width > 0 => found.lines("gate", shape.clone(), EXTRAS)?,
            _ => {
                return Err(format!(
                    "`gate.weight` is {dtype:?} with {width} features, it must be I8, or F16 with more than {EXTRAS}"
                ));
            }
        };
        let mut weights = Self::new((n_layers, n_kv_heads), heads);
        if tensors.names().contains(&"units.weight") {
            let (_, shape) = found.shape("units.weight")?;
            let n = shape.get(1).copied().unwrap_or(0);
            let lines = found.lines("units", vec![n_layers, n, width], SHARED)?;
            let out = found.floats("units.out", &[n_layers, n_kv_heads, n])?;
            weights = weights.with_units(lines, out);
        }
        let out = weights.units.as_ref();
        let units = out.is_none_or(|u| u.lines.is_finite() && u.out.iter().all(|w| w.is_finite()));
        if !(weights.heads.is_finite() && units) {
            return Err("it has weights that are not finite".to_owned());
        }
        weights.model_sha256.clone_from(model_sha256);
        Ok(weights)
    }

    /// The file's bytes. `origin`: what it was made from; `model_sha256` among it.
    ///
    /// # Errors
    /// What safetensors says, and weights of an older file, which is there already.
    pub fn file(&self, origin: BTreeMap<String, String>) -> Result<Vec<u8>, String> {
        let (n_layers, n_kv_heads) = self.shape;
        let mut tensors = Vec::new();
        tensors.extend(self.heads.tensors("gate", [n_layers, n_kv_heads])?);
        if let Some(units) = &self.units {
            tensors.extend(units.lines.tensors("units", [n_layers, units.n])?);
            let shape = vec![n_layers, n_kv_heads, units.n];
            let out = bytemuck::cast_slice(&units.out);
            tensors.push(("units.out".to_owned(), view(Dtype::F32, shape, out)?));
        }
        safetensors::serialize(tensors, Some(origin.into_iter().collect()))
            .map_err(|e| e.to_string())
    }
}

fn view(dtype: Dtype, shape: Vec<usize>, bytes: &[u8]) -> Result<TensorView<'_>, String> {
    TensorView::new(dtype, shape, bytes).map_err(|e| e.to_string())
}

impl Lines {
    fn tensors(
        &self,
        name: &str,
        [n_layers, n_lines]: [usize; 2],
    ) -> Result<[(String, TensorView<'_>); 3], String> {
        let Codes::I8 { codes, scales } = &self.codes else {
            return Err("weights of 16 bits are of an older file: they are not written".to_owned());
        };
        let shape = |width: &[usize]| [&[n_layers, n_lines], width].concat();
        let part = |what: &str, dtype, width: &[usize], bytes| {
            let view = view(dtype, shape(width), bytes)?;
            Ok::<_, String>((format!("{name}.{what}"), view))
        };
        let (codes, extras) = (
            bytemuck::cast_slice(codes),
            bytemuck::cast_slice(&self.extras),
        );
        Ok([
            part("weight", Dtype::I8, &[self.n_embd], codes)?,
            part("scale", Dtype::F32, &[], bytemuck::cast_slice(scales))?,
            part("extras", Dtype::F32, &[self.n_extras], extras)?,
        ])
    }
}

/// A file's tensors.
struct Found<'a>(&'a SafeTensors<'a>);

impl Found<'_> {
    fn shape(&self, name: &str) -> Result<(Dtype, Vec<usize>), String> {
        let tensor = self.0.tensor(name).map_err(|e| e.to_string())?;
        Ok((tensor.dtype(), tensor.shape().to_vec()))
    }

    fn bytes(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<&[u8], String> {
        let tensor = self.0.tensor(name).map_err(|e| e.to_string())?;
        if tensor.dtype() != dtype || tensor.shape() != shape {
            return Err(format!(
                "`{name}` is {:?} of the shape {:?}, it must be {dtype:?} of {shape:?}",
                tensor.dtype(),
                tensor.shape()
            ));
        }
        Ok(tensor.data())
    }

    fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
        let (words, _) = self.bytes(name, Dtype::F32, shape)?.as_chunks::<4>();
        Ok(words.iter().map(|&b| f32::from_le_bytes(b)).collect())
    }

    fn lines(&self, name: &str, shape: Vec<usize>, n_extras: usize) -> Result<Lines, String> {
        let codes = self.bytes(&format!("{name}.weight"), Dtype::I8, &shape)?;
        let (lines, n_embd) = (&shape[..2], shape[2]);
        Ok(Lines {
            codes: Codes::I8 {
                codes: bytemuck::cast_slice(codes).to_vec(),
                scales: self.floats(&format!("{name}.scale"), lines)?,
            },
            n_embd,
            extras: self.floats(&format!("{name}.extras"), &[lines, &[n_extras]].concat())?,
            n_extras,
        })
    }

    /// Lines of 16 bits, all features of one in a row.
    fn older(&self, width: usize) -> Result<Lines, String> {
        let (_, shape) = self.shape("gate.weight")?;
        let (words, _) = self
            .bytes("gate.weight", Dtype::F16, &shape)?
            .as_chunks::<2>();
        let values: Vec<f16> = words.iter().map(|&b| f16::from_le_bytes(b)).collect();
        let (mut hidden, mut extras) = (Vec::new(), Vec::new());
        for line in values.chunks_exact(width) {
            hidden.extend(&line[..width - EXTRAS]);
            extras.extend(line[width - EXTRAS..].iter().map(|w| w.to_f32()));
        }
        Ok(Lines {
            codes: Codes::F16(hidden),
            n_embd: width - EXTRAS,
            extras,
            n_extras: EXTRAS,
        })
    }
}
