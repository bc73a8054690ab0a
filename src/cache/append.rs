//! New rows on their way in: rotation, the retention's decisions, exact rows, projection and encoding.
//!
//! Invariant: what is stored for a row depends on the row, its position, earlier decisions and, page-wise, on the rows of
//! its page alone; a row is encoded from its exact copy if it has been exact, whatever the chunk in which it aged.

use std::ops::Range;

use super::formats::{Format, Mask};
use super::places::{Places, ReadBuffers, Reader};
use super::predict::{Carry, Walk};
use super::scratch::Pool;
use super::sequence::{HeadState, Phase, SequenceState};
use super::stage::{KeyForm, Side};
use super::stages::Stages;
use super::types::{LayerGeometry, Rows, Span};
use super::visibility::{Class, Rules};
use super::{CacheError, RANGE};
use crate::compute::cpu::team;

/// Rows of a head that are coded sooner than another thread would wake up.
const FEW_ROWS: usize = 16;

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
    /// Visibility, by side.
    pub rules: [Rules; 2],
    /// Levels of the rows of each head that live, as a compression point chose them; empty: none were chosen.
    pub levels: &'a [HeadLevels],
    /// Working memory.
    pub pool: &'a Pool,
}

/// Levels of K and of V by position, ascending.
pub type HeadLevels = Vec<(u32, [u8; 2])>;

/// Encoded rows of one side of one head on their way into a table.
#[derive(Default)]
struct Coded {
    /// By range: which rows, and their bytes.
    parts: Vec<(u32, Mask, usize)>,
    bytes: Vec<u8>,
}

impl Coded {
    /// Takes in rows at ascending positions of one range.
    fn push(&mut self, positions: &[u32], bytes: &[u8]) {
        let range = positions[0] / RANGE as u32;
        let rows = positions
            .iter()
            .fold(0, |m: Mask, &p| m | 1 << (p as usize % RANGE));
        self.parts.push((range, rows, bytes.len()));
        self.bytes.extend_from_slice(bytes);
    }
}

/// Rows read back from the exact table of one side: positions, and rows back to back.
type ExactRows = (Vec<u32>, Vec<f32>);

/// New rows of a span: its first position, and each head's rows.
pub type Fresh<'a> = (u32, &'a [NewRows]);

/// One head's new rows, rotated if keys are stored so, `[token][head_dim]`.
pub struct NewRows {
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
}

impl NewRows {
    fn side(&self, side: Side) -> &[f32] {
        match side {
            Side::K => &self.k,
            Side::V => &self.v,
        }
    }
}

impl Appender<'_> {
    /// Appends a span. `rows`: the span's own.
    pub fn append(
        &self,
        state: &mut SequenceState,
        places: &mut Places<'_>,
        span: &Span,
        rows: Rows<'_>,
        carry: Option<&mut Carry>,
    ) -> Result<(), CacheError> {
        let first = span.positions.start;
        let hidden = rows.hidden;
        let rows = (rows.k, rows.v);
        self.check_finite(first, rows)?;
        let new: Vec<NewRows> =
            self.each_head(span.n_tokens(), |head| Ok(self.split(head, first, rows)))?;
        let phase = state.phase;
        let layer = &mut state.layers[self.layer];
        let n_own = span.n_tokens() - span.n_tried;
        for (h, (head, new)) in layer.heads.iter_mut().zip(&new).enumerate() {
            self.decide_on((h, head), (phase, first), (new, hidden), n_own);
            for side in Side::BOTH {
                self.push_uncoded(head, places, (span, side), new.side(side))?;
            }
        }
        let fresh = Some((first, &new[..]));
        self.code(state, places, span.end(), fresh, carry)
    }

    /// Encodes the rows that are past the tail, or whose page is full, once the sequence has `len` positions.
    pub fn code(
        &self,
        state: &mut SequenceState,
        places: &mut Places<'_>,
        len: u32,
        fresh: Option<Fresh<'_>>,
        mut carry: Option<&mut Carry>,
    ) -> Result<(), CacheError> {
        if state.frozen_from.is_some() {
            return Ok(());
        }
        for side in Side::BOTH {
            let done = state.layers[self.layer].coded_end[side as usize];
            let end = self.rules[side as usize].coded_end(len).max(done);
            if end == done {
                continue;
            }
            if let Some(carry) = &mut carry {
                let walk = self.walk(state, places);
                if side == Side::K {
                    carry.reach(self.layer, walk)?;
                }
                carry.predict(side, end, walk);
            }
            let predicted = carry.as_ref().map(|c| c.rows(side));
            let layer = &mut state.layers[self.layer];
            let reader = places.reader();
            let heads = &layer.heads;
            let keeps = places.keeper.is_some();
            let coded: Vec<(Coded, ExactRows)> = self.each_head((end - done) as usize, |h| {
                let rows = self.rows((h, side), &heads[h], reader, (done..end, fresh))?;
                let exact = if keeps {
                    rows.clone()
                } else {
                    ExactRows::default()
                };
                Ok((self.encode((h, side), rows, predicted), exact))
            })?;
            for (h, (head, (coded, exact))) in layer.heads.iter_mut().zip(coded).enumerate() {
                self.keep((h, side), exact, places)?;
                let format = self.stages.formats[self.layer].format(h, side, Class::Coded);
                let mut at = 0;
                for (range, rows, n) in coded.parts {
                    head.table(side, Class::Coded).push(
                        places,
                        format,
                        (range, rows),
                        &coded.bytes[at..at + n],
                    )?;
                    at += n;
                }
            }
            layer.coded_end[side as usize] = end;
            if let Some(carry) = &mut carry {
                carry.restore(side, self.walk(state, places))?;
            }
        }
        Ok(())
    }

    /// Keeps exact copies of rows that were coded; sinks stay exact anyway.
    fn keep(
        &self,
        (h, side): (usize, Side),
        (positions, rows): ExactRows,
        places: &mut Places<'_>,
    ) -> Result<(), CacheError> {
        let Some((keeper, seq)) = &mut places.keeper else {
            return Ok(());
        };
        let n_sinks = positions.partition_point(|&p| p < self.rules[side as usize].sinks);
        if n_sinks == positions.len() {
            return Ok(());
        }
        let format = self.stages.formats[self.layer].format(h, side, Class::Exact);
        let bytes = format.encode(&rows[n_sinks * self.geometry.head_dim..]);
        keeper.keep(*seq, (self.layer, h, side), (&positions[n_sinks..], &bytes))
    }

    /// What `work` makes of each head; by several threads if there are rows enough.
    fn each_head<T: Send>(
        &self,
        n_rows: usize,
        work: impl Fn(usize) -> Result<T, CacheError> + Sync + Send,
    ) -> Result<Vec<T>, CacheError> {
        let heads = 0..self.geometry.n_kv_heads;
        if n_rows <= FEW_ROWS {
            return heads.map(work).collect();
        }
        team::try_map(heads, work)
    }

    fn walk<'w>(&self, state: &'w SequenceState, places: &'w Places<'_>) -> Walk<'w>
    where
        Self: 'w,
    {
        Walk {
            stages: self.stages,
            state,
            reader: places.reader(),
            pool: self.pool,
        }
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

    /// Lets retention decide on the first `n_own` rows; those that are tried out leave anyway.
    fn decide_on(
        &self,
        head: (usize, &mut HeadState),
        (phase, first): (Phase, u32),
        (new, hidden): (&NewRows, &[f32]),
        n_own: usize,
    ) {
        let d = self.geometry.head_dim;
        let n = new.k.len() / d;
        if n_own == n {
            return self.decide(head, phase, first, (new, hidden));
        }
        if n_own > 0 {
            let own = NewRows {
                k: new.k[..n_own * d].to_vec(),
                v: new.v[..n_own * d].to_vec(),
            };
            let hidden = &hidden[..hidden.len() / n * n_own];
            self.decide(head, phase, first, (&own, hidden));
        }
    }

    /// Picks one head's rows, rotates keys that are stored rotated.
    fn split(&self, head: usize, first: u32, rows: (&[f32], &[f32])) -> NewRows {
        let (d, width) = (
            self.geometry.head_dim,
            self.geometry.n_kv_heads * self.geometry.head_dim,
        );
        let pick = |x: &[f32]| -> Vec<f32> {
            let mut own = Vec::with_capacity(x.len() / width * d);
            for row in x.chunks_exact(width) {
                own.extend_from_slice(&row[head * d..(head + 1) * d]);
            }
            own
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

    /// Stores what stays uncoded at first: a frozen continuation, the tail, an open page, sinks.
    fn push_uncoded(
        &self,
        head: &mut HeadState,
        places: &mut Places<'_>,
        (span, side): (&Span, Side),
        rows: &[f32],
    ) -> Result<(), CacheError> {
        let rules = &self.rules[side as usize];
        let class = match rules.frozen_from {
            Some(_) => Class::Frozen,
            None => Class::Exact,
        };
        let waits = class == Class::Frozen || rules.tail > 0 || rules.page > 1;
        let stays = |&p: &u32| waits || p < rules.sinks || p >= span.end();
        let positions: Vec<u32> = span.positions.clone().filter(stays).collect();
        if positions.is_empty() {
            return Ok(());
        }
        let format = self.stages.formats[self.layer].format(0, side, class);
        let coded = if positions.len() == span.n_tokens() {
            by_range(format, &positions, rows)
        } else {
            let rows = rows
                .chunks_exact(self.geometry.head_dim)
                .zip(span.positions.clone());
            let rows: Vec<f32> = rows
                .filter(|(_, p)| stays(p))
                .flat_map(|(row, _)| row)
                .copied()
                .collect();
            by_range(format, &positions, &rows)
        };
        let mut at = 0;
        for (range, mask, n) in coded.parts {
            let bytes = &coded.bytes[at..at + n];
            head.table(side, class)
                .push(places, format, (range, mask), bytes)?;
            at += n;
        }
        Ok(())
    }

    /// One side of one head's rows at the positions that became coded, and of them, with a page, the sinks.
    fn rows(
        &self,
        (h, side): (usize, Side),
        head: &HeadState,
        reader: Reader<'_>,
        (range, fresh): (Range<u32>, Option<Fresh<'_>>),
    ) -> Result<ExactRows, CacheError> {
        let rules = &self.rules[side as usize];
        let d = self.geometry.head_dim;
        // A page holds its sinks too, so that its layout doesn't depend on them.
        let start = match rules.page {
            1 => range.start.max(rules.sinks),
            _ => range.start,
        };
        if start >= range.end {
            return Ok(ExactRows::default());
        }
        match fresh {
            Some((first, new)) if rules.tail == 0 && rules.page == 1 => {
                let at = (start - first) as usize * d..(range.end - first) as usize * d;
                Ok(((start..range.end).collect(), new[h].side(side)[at].to_vec()))
            }
            _ => self.read_exact(head, side, reader, start..range.end),
        }
    }

    /// Takes predictions off, `[position][kv_head · head_dim]`, projects and encodes.
    fn encode(
        &self,
        (h, side): (usize, Side),
        (positions, mut rows): ExactRows,
        predicted: Option<&[f32]>,
    ) -> Coded {
        let rules = &self.rules[side as usize];
        let d = self.geometry.head_dim;
        if let Some(predicted) = predicted {
            let width = self.geometry.n_kv_heads * d;
            for (row, &p) in rows.chunks_exact_mut(d).zip(&positions) {
                for (x, p) in row.iter_mut().zip(&predicted[p as usize * width + h * d..]) {
                    *x -= p;
                }
            }
        }
        let format = self.stages.formats[self.layer].format(h, side, Class::Coded);
        if rules.page == 1 {
            return by_range(format, &positions, &self.project((h, side), rows));
        }
        let mut coded = Coded::default();
        let mut rows = rows.chunks_exact(d);
        for page in positions.chunk_by(|a, b| a / rules.page == b / rules.page) {
            let mut page_rows: Vec<f32> =
                rows.by_ref().take(page.len()).flatten().copied().collect();
            cover_sinks(page, rules.sinks, d, &mut page_rows);
            let page_rows = self.project((h, side), page_rows);
            let bytes = match self.levels.get(h) {
                Some(levels) => format.encode_at(&page_rows, &self.levels_of(levels, side, page)),
                None => format.encode(&page_rows),
            };
            coded.push(page, &bytes);
        }
        coded
    }

    /// Levels of a page's rows; the lowest of what stands in the place of sinks.
    fn levels_of(&self, levels: &HeadLevels, side: Side, positions: &[u32]) -> Vec<u8> {
        let level = |&p: &u32| match levels.binary_search_by_key(&p, |l| l.0) {
            Ok(i) if p >= self.rules[side as usize].sinks => levels[i].1[side as usize],
            _ => 0,
        };
        positions.iter().map(level).collect()
    }

    fn project(&self, (head, side): (usize, Side), rows: Vec<f32>) -> Vec<f32> {
        let chain = self.stages.chain(side);
        if chain.is_identity() {
            return rows;
        }
        rows.chunks_exact(self.geometry.head_dim)
            .flat_map(|row| chain.forward(self.layer, head, row))
            .collect()
    }

    /// Decodes one side's exact rows whose positions lie in `range`.
    fn read_exact(
        &self,
        head: &HeadState,
        side: Side,
        reader: Reader<'_>,
        range: Range<u32>,
    ) -> Result<ExactRows, CacheError> {
        let format = self.stages.formats[self.layer].format(0, side, Class::Exact);
        let d = self.geometry.head_dim;
        let (mut positions, mut out) = (Vec::new(), Vec::new());
        let mut buffers = ReadBuffers::default();
        let table = &head.tables[side as usize][Class::Exact as usize];
        for r in range.start / RANGE as u32..=(range.end - 1) / RANGE as u32 {
            let Some(page) = table.page(r) else { continue };
            // Exact rows lie back to back without holes: those asked for are neighbours.
            let n_before = page.positions().take_while(|&p| p < range.start).count();
            let first = positions.len();
            positions.extend(page.positions().filter(|p| range.contains(p)));
            let n = positions.len() - first;
            if n == 0 {
                continue;
            }
            let row_bytes = format.bytes(1);
            let bytes = reader.bytes(page, format, &mut buffers)?;
            let bytes = &bytes[n_before * row_bytes..(n_before + n) * row_bytes];
            out.resize((first + n) * d, 0.0);
            format.decode(Mask::MAX >> (RANGE - n), bytes, &mut out[first * d..]);
        }
        Ok((positions, out))
    }
}

/// Encodes rows of a row-wise format, in parts by range.
fn by_range(format: &Format, positions: &[u32], rows: &[f32]) -> Coded {
    let mut coded = Coded::default();
    let mut at = 0;
    for part in positions.chunk_by(|a, b| a / RANGE as u32 == b / RANGE as u32) {
        let n = part.len() * format.dim;
        coded.push(part, &format.encode(&rows[at..at + n]));
        at += n;
    }
    coded
}

/// Puts the page's first other row in the place of sinks, which nobody reads from here: their large values must not
/// widen the page's scales.
pub(super) fn cover_sinks(positions: &[u32], n_sinks: u32, dim: usize, rows: &mut [f32]) {
    let n = positions.partition_point(|&p| p < n_sinks);
    if n == positions.len() {
        return;
    }
    let (sinks, others) = rows.split_at_mut(n * dim);
    for sink in sinks.chunks_exact_mut(dim) {
        sink.copy_from_slice(&others[..dim]);
    }
}
