//! New rows on their way in: rotation, the retention's decisions, exact rows, projection and encoding.
//!
//! Invariant: what is stored for a row depends on the row, its position and earlier decisions alone; a row is encoded
//! from its exact copy if it has been exact, whatever the chunk in which it aged.

use rayon::prelude::*;

use super::formats::Format;
use super::sequence::{HeadState, Phase, SequenceState};
use super::stage::{KeyForm, LiveRows, Moment, NewRow, Side};
use super::stages::Stages;
use super::table::{Places, ReadBuffers, Reader};
use super::types::{LayerGeometry, Span};
use super::visibility::{Class, Rules};
use super::{CacheError, RANGE};

/// Refuses gaps and positions past the model's context.
pub fn check_span(
    g: &LayerGeometry,
    state: &SequenceState,
    layer: usize,
    span: &Span,
) -> Result<(), CacheError> {
    if state.broken {
        return Err(CacheError::Broken(span.seq.0));
    }
    let expected = if layer == 0 {
        state.len
    } else {
        span.positions.start
    };
    if span.positions.start != expected {
        return Err(CacheError::Gap {
            seq: span.seq.0,
            expected,
            got: span.positions.start,
        });
    }
    let limit = g.rope.n_positions();
    if span.positions.end as usize > limit {
        return Err(CacheError::ContextLimit {
            position: span.positions.end - 1,
            limit,
        });
    }
    Ok(())
}

/// Appends rows of one layer.
pub struct Appender<'a> {
    /// The strategy.
    pub stages: &'a Stages,
    /// The layer.
    pub geometry: &'a LayerGeometry,
    /// Its index.
    pub layer: usize,
    /// Visibility.
    pub rules: Rules,
}

/// Encoded rows on their way into a table.
#[derive(Default)]
struct Coded {
    /// Runs of consecutive positions: (first, number of rows).
    runs: Vec<(u32, usize)>,
    k: Vec<u8>,
    v: Vec<u8>,
}

/// Rows read back from the exact table: positions, and K and V back to back.
type ExactRows = (Vec<u32>, Vec<f32>, Vec<f32>);

/// One head's new rows, rotated if keys are stored so, `[token][head_dim]`.
struct NewRows {
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Appender<'_> {
    /// Appends a span. `rows`: K and V of the layer, `[token][kv_head][head_dim]`, K before RoPE.
    pub fn append(
        &self,
        state: &mut SequenceState,
        places: &mut Places<'_>,
        span: &Span,
        rows: (&[f32], &[f32]),
    ) -> Result<(), CacheError> {
        let first = span.positions.start;
        self.check_finite(first, rows)?;
        let new: Vec<NewRows> = (0..self.geometry.n_kv_heads)
            .into_par_iter()
            .map(|head| self.split(head, first, rows))
            .collect();
        let phase = state.phase;
        let layer = &mut state.layers[self.layer];
        for (head, new) in layer.heads.iter_mut().zip(&new) {
            self.decide(head, phase, first, new);
            self.push_uncoded(head, places, first, new)?;
        }
        if self.rules.frozen_from.is_some() {
            return Ok(());
        }
        let end = self
            .rules
            .coded_end(span.positions.end - 1)
            .max(layer.coded_end);
        let range = layer.coded_end..end;
        let reader = places.reader();
        let coded: Vec<Coded> = layer
            .heads
            .par_iter()
            .zip(&new)
            .enumerate()
            .map(|(h, (head, new))| self.encode(h, head, reader, (range.clone(), first, new)))
            .collect::<Result<_, _>>()?;
        let formats = &self.stages.formats[self.layer].coded;
        for ((head, coded), format) in layer.heads.iter_mut().zip(coded).zip(formats) {
            let (kb, vb) = (format.k.row_bytes(), format.v.row_bytes());
            let mut at = 0;
            for (position, n) in coded.runs {
                let rows = (
                    &coded.k[at * kb..(at + n) * kb],
                    &coded.v[at * vb..(at + n) * vb],
                );
                head.table(Class::Coded)
                    .push(places, format, position, rows)?;
                at += n;
            }
        }
        layer.coded_end = end;
        Ok(())
    }

    /// Refuses NaN and infinity, naming the first position, whatever the chunk.
    fn check_finite(&self, first: u32, rows: (&[f32], &[f32])) -> Result<(), CacheError> {
        let d = self.geometry.head_dim;
        let width = self.geometry.n_kv_heads * d;
        let tokens = rows.0.chunks_exact(width).zip(rows.1.chunks_exact(width));
        for ((k, v), position) in tokens.zip(first..) {
            for (side, row) in [("K", k), ("V", v)] {
                if let Some(i) = row.iter().position(|x| !x.is_finite()) {
                    return Err(CacheError::NonFinite {
                        side,
                        layer: self.layer,
                        head: i / d,
                        position,
                    });
                }
            }
        }
        Ok(())
    }

    /// Picks one head's rows, rotates keys that are stored rotated.
    fn split(&self, head: usize, first: u32, rows: (&[f32], &[f32])) -> NewRows {
        let (d, width) = (
            self.geometry.head_dim,
            self.geometry.n_kv_heads * self.geometry.head_dim,
        );
        let pick = |x: &[f32]| -> Vec<f32> {
            x.chunks_exact(width)
                .flat_map(|row| row[head * d..(head + 1) * d].iter().copied())
                .collect()
        };
        let mut new = NewRows {
            k: pick(rows.0),
            v: pick(rows.1),
        };
        if self.stages.keys == KeyForm::PostRope {
            for (row, p) in new.k.chunks_exact_mut(d).zip(first..) {
                self.geometry.rope.rotate(p, row);
            }
        }
        new
    }

    /// Lets retention score the new rows and, while decoding, evict after each position in order.
    fn decide(&self, head: &mut HeadState, phase: Phase, first: u32, new: &NewRows) {
        head.n_seen = first + (new.k.len() / self.geometry.head_dim) as u32;
        let Some(retain) = self.stages.retain.as_deref() else {
            return;
        };
        if self.rules.frozen_from.is_some() {
            return;
        }
        let d = self.geometry.head_dim;
        let scored = retain.is_scored();
        let fresh: Vec<f32> = new
            .k
            .chunks_exact(d)
            .zip(new.v.chunks_exact(d))
            .zip(first..)
            .filter(|_| scored)
            .map(|((k, v), position)| retain.score(NewRow { position, k, v }))
            .collect();
        let stepwise = phase == Phase::Decoding;
        let mut positions = if stepwise {
            head.live_positions()
        } else {
            Vec::new()
        };
        let mut live = if stepwise {
            head.scores.clone()
        } else {
            Vec::new()
        };
        if head.scores.capacity() < head.scores.len() + fresh.len() {
            let room =
                (head.scores.len() + fresh.len()).next_multiple_of(RANGE) - head.scores.len();
            head.scores.reserve_exact(room);
        }
        head.scores.extend_from_slice(&fresh);
        if !stepwise {
            return;
        }
        for (i, position) in (first..head.n_seen).enumerate() {
            // What the sliding window dropped before this position competes no more.
            let start = self.rules.window_start(position);
            let n_dropped = positions.partition_point(|&p| p < start);
            positions.drain(..n_dropped);
            if scored {
                live.drain(..n_dropped);
            }
            positions.push(position);
            live.extend(fresh.get(i));
            let rows = LiveRows {
                positions: &positions,
                scores: &live,
                n_seen: position + 1,
                moment: Moment::Step,
            };
            for i in retain.evict(rows).into_iter().rev() {
                head.dying.insert(positions[i], position + 1);
                positions.remove(i);
                if scored {
                    live.remove(i);
                }
            }
        }
    }

    /// Stores what stays uncoded at first: a frozen continuation, the tail, sinks.
    fn push_uncoded(
        &self,
        head: &mut HeadState,
        places: &mut Places<'_>,
        first: u32,
        new: &NewRows,
    ) -> Result<(), CacheError> {
        let formats = &self.stages.formats[self.layer];
        let d = self.geometry.head_dim;
        let n = new.k.len() / d;
        let (class, format, n_kept) = if self.rules.frozen_from.is_some() {
            (Class::Frozen, &formats.frozen, n)
        } else if self.rules.tail > 0 {
            (Class::Exact, &formats.exact, n)
        } else {
            (
                Class::Exact,
                &formats.exact,
                (self.rules.sinks.saturating_sub(first) as usize).min(n),
            )
        };
        if n_kept == 0 {
            return Ok(());
        }
        let k = encode_rows(&format.k, &new.k[..n_kept * d]);
        let v = encode_rows(&format.v, &new.v[..n_kept * d]);
        head.table(class).push(places, format, first, (&k, &v))
    }

    /// Projects and encodes one head's rows of the positions that became coded.
    fn encode(
        &self,
        h: usize,
        head: &HeadState,
        reader: Reader<'_>,
        (range, first, new): (std::ops::Range<u32>, u32, &NewRows),
    ) -> Result<Coded, CacheError> {
        let mut out = Coded::default();
        let start = range.start.max(self.rules.sinks);
        if start >= range.end {
            return Ok(out);
        }
        let d = self.geometry.head_dim;
        let (positions, k, v) = if self.rules.tail == 0 {
            let at = (start - first) as usize * d..(range.end - first) as usize * d;
            (
                (start..range.end).collect(),
                new.k[at.clone()].to_vec(),
                new.v[at].to_vec(),
            )
        } else {
            self.read_exact(head, reader, start..range.end)?
        };
        for &p in &positions {
            match out.runs.last_mut() {
                Some((first, n)) if *first + *n as u32 == p => *n += 1,
                _ => out.runs.push((p, 1)),
            }
        }
        let coded = &self.stages.formats[self.layer].coded[h];
        out.k = self.project_and_encode(Side::K, h, &coded.k, &k);
        out.v = self.project_and_encode(Side::V, h, &coded.v, &v);
        Ok(out)
    }

    fn project_and_encode(
        &self,
        side: Side,
        head: usize,
        format: &Format,
        rows: &[f32],
    ) -> Vec<u8> {
        let chain = match side {
            Side::K => &self.stages.project_k,
            Side::V => &self.stages.project_v,
        };
        if chain.is_identity() {
            return encode_rows(format, rows);
        }
        let d = self.geometry.head_dim;
        let projected: Vec<f32> = rows
            .chunks_exact(d)
            .flat_map(|row| chain.forward(self.layer, head, row))
            .collect();
        encode_rows(format, &projected)
    }

    /// Decodes the exact rows whose positions lie in `range`.
    fn read_exact(
        &self,
        head: &HeadState,
        reader: Reader<'_>,
        range: std::ops::Range<u32>,
    ) -> Result<ExactRows, CacheError> {
        let format = &self.stages.formats[self.layer].exact;
        let d = self.geometry.head_dim;
        let (mut positions, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        let mut buffers = ReadBuffers::default();
        let table = &head.tables[Class::Exact as usize];
        for r in range.start / RANGE as u32..=(range.end - 1) / RANGE as u32 {
            let Some(page) = table.page(r) else { continue };
            let wanted: Vec<(usize, u32)> = page
                .positions()
                .enumerate()
                .filter(|(_, p)| range.contains(p))
                .collect();
            let (Some(&(from, _)), Some(&(to, _))) = (wanted.first(), wanted.last()) else {
                continue;
            };
            positions.extend(wanted.iter().map(|(_, p)| p));
            for (side, out) in [(Side::K, &mut k), (Side::V, &mut v)] {
                let f = format.side(side);
                let bytes = reader.bytes(page, side, f, &mut buffers)?;
                let at = out.len();
                out.resize(at + (to + 1 - from) * d, 0.0);
                f.rows().decode_rows(
                    &bytes[from * f.row_bytes()..(to + 1) * f.row_bytes()],
                    d,
                    &mut out[at..],
                );
            }
        }
        Ok((positions, k, v))
    }
}

fn encode_rows(format: &Format, rows: &[f32]) -> Vec<u8> {
    let n = format.row_bytes();
    let mut out = vec![0; rows.len() / format.dim * n];
    for (row, bytes) in rows.chunks_exact(format.dim).zip(out.chunks_exact_mut(n)) {
        format.rows().encode(row, bytes);
    }
    out
}
