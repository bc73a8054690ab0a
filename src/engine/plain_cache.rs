//! A full f32 cache for tests: every row is kept, attention is written as its formula in f64.
//!
//! Invariant: a query's answer depends on its own row and the rows before it alone.

use std::collections::BTreeMap;

use crate::cache::{
    Admission, Batch, CacheError, Continuation, Geometry, KvCache, MemoryReport, Needs, Rows, SeqId,
};

/// Rows of one sequence, per layer `[token][kv_head][head_dim]`, keys rotated.
#[derive(Debug, Clone, Default)]
struct Sequence {
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
    len: u32,
}

/// The cache.
#[derive(Debug, Clone)]
pub(crate) struct PlainCache {
    geometry: Geometry,
    sequences: BTreeMap<SeqId, Sequence>,
    /// What it claims to need.
    pub needs: Needs,
    /// Floats of hidden rows that came in, over all layers.
    pub n_hidden: usize,
}

impl PlainCache {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            sequences: BTreeMap::new(),
            needs: Needs::default(),
            n_hidden: 0,
        }
    }

    /// Keys and values of a layer as stored.
    pub(crate) fn rows(&self, seq: SeqId, layer: usize) -> (&[f32], &[f32]) {
        let s = &self.sequences[&seq];
        (&s.k[layer], &s.v[layer])
    }

    fn get(&self, seq: SeqId) -> Result<&Sequence, CacheError> {
        self.sequences
            .get(&seq)
            .ok_or(CacheError::UnknownSequence(seq.0))
    }

    fn get_mut(&mut self, seq: SeqId) -> Result<&mut Sequence, CacheError> {
        self.sequences
            .get_mut(&seq)
            .ok_or(CacheError::UnknownSequence(seq.0))
    }
}

impl KvCache for PlainCache {
    fn needs(&self) -> Needs {
        self.needs
    }

    fn admit(&mut self, seq: SeqId, _: Admission) -> Result<(), CacheError> {
        let n = self.geometry.layers.len();
        let empty = Sequence {
            k: vec![Vec::new(); n],
            v: vec![Vec::new(); n],
            len: 0,
        };
        match self.sequences.insert(seq, empty) {
            None => Ok(()),
            Some(_) => Err(CacheError::SequenceExists(seq.0)),
        }
    }

    fn append(&mut self, layer: usize, batch: &Batch, rows: Rows<'_>) -> Result<(), CacheError> {
        let g = self.geometry.layers[layer].clone();
        let width = g.n_kv_heads * g.head_dim;
        assert_eq!(rows.k.len(), batch.n_rows() * width);
        self.n_hidden += rows.hidden.len();
        for span in batch.spans() {
            let s = self.get_mut(span.seq)?;
            assert_eq!(s.len, span.positions.start);
            let part = span.first_row * width..(span.first_row + span.n_tokens()) * width;
            let first = s.k[layer].len();
            s.k[layer].extend_from_slice(&rows.k[part.clone()]);
            s.v[layer].extend_from_slice(&rows.v[part]);
            for (i, row) in s.k[layer][first..].chunks_exact_mut(g.head_dim).enumerate() {
                let position = span.positions.start + (i / g.n_kv_heads) as u32;
                g.rope.rotate(position, row);
            }
        }
        Ok(())
    }

    fn attend(
        &mut self,
        layer: usize,
        batch: &Batch,
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), CacheError> {
        let g = self.geometry.layers[layer].clone();
        let (d, kv_width) = (g.head_dim, g.n_kv_heads * g.head_dim);
        for span in batch.spans() {
            let s = self.get(span.seq)?;
            for (i, p) in span.positions.clone().enumerate() {
                let first = g.window.map_or(0, |w| (p + 1).saturating_sub(w));
                for head in 0..g.n_heads {
                    let at = ((span.first_row + i) * g.n_heads + head) * d;
                    let mut query = q[at..at + d].to_vec();
                    g.rope.rotate(p, &mut query);
                    let kv = head / g.group() * d;
                    let row = |x: &[f32], t: u32| -> Vec<f64> {
                        let at = t as usize * kv_width + kv;
                        x[at..at + d].iter().map(|&v| f64::from(v)).collect()
                    };
                    let mut total = 0.0;
                    let mut acc = vec![0.0f64; d];
                    for t in first..=p {
                        let k = row(&s.k[layer], t);
                        let dot: f64 = query.iter().zip(&k).map(|(&q, k)| f64::from(q) * k).sum();
                        let weight = (dot * f64::from(g.scale)).exp();
                        total += weight;
                        for (a, v) in acc.iter_mut().zip(row(&s.v[layer], t)) {
                            *a += weight * v;
                        }
                    }
                    for (o, a) in out[at..at + d].iter_mut().zip(&acc) {
                        *o = (a / total) as f32;
                    }
                }
            }
        }
        Ok(())
    }

    fn commit(&mut self, batch: &Batch) -> Result<(), CacheError> {
        for span in batch.spans() {
            self.get_mut(span.seq)?.len = span.positions.end;
        }
        Ok(())
    }

    fn compress(&mut self, _: SeqId, _: Continuation) -> Result<(), CacheError> {
        Ok(())
    }

    fn fork(&mut self, from: SeqId, to: SeqId) -> Result<(), CacheError> {
        let copy = self.get(from)?.clone();
        self.sequences.insert(to, copy);
        Ok(())
    }

    fn truncate(&mut self, seq: SeqId, len: u32) -> Result<(), CacheError> {
        let widths: Vec<usize> = self
            .geometry
            .layers
            .iter()
            .map(|l| l.n_kv_heads * l.head_dim)
            .collect();
        let s = self.get_mut(seq)?;
        for (rows, width) in
            s.k.iter_mut()
                .chain(&mut s.v)
                .zip(widths.iter().chain(&widths))
        {
            rows.truncate(len as usize * width);
        }
        s.len = len;
        Ok(())
    }

    fn release(&mut self, seq: SeqId) -> Result<(), CacheError> {
        match self.sequences.remove(&seq) {
            Some(_) => Ok(()),
            None => Err(CacheError::UnknownSequence(seq.0)),
        }
    }

    fn len(&self, seq: SeqId) -> Result<u32, CacheError> {
        Ok(self.get(seq)?.len)
    }

    fn memory(&self) -> MemoryReport {
        MemoryReport::default()
    }
}
