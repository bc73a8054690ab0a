//! What attention reads of one KV head, and how its keys come to where queries are.
//!
//! Invariants: coded keys stay in their own space if queries can come there ([`Stages::absorbs_keys`]); all others meet
//! queries as rows of the head's channels, after RoPE.

use super::formats::Format;
use super::places::{Page, ReadBuffers, Reader};
use super::scratch::room;
use super::sequence::HeadState;
use super::sparse::HeadReading;
use super::stage::{KeyForm, Side};
use super::stages::{LayerFormats, Stages};
use super::stored::Turning;
use super::table::RowTable;
use super::types::LayerGeometry;
use super::visibility::{Class, Rules};
use super::{CacheError, RANGE};

/// One KV head's rows as attention reads them.
#[derive(Clone, Copy)]
pub struct HeadView<'a> {
    /// Its tables, and the rows that leave during this step.
    pub state: &'a HeadState,
    /// The layer's formats.
    pub formats: &'a LayerFormats,
    /// Visibility, by side.
    pub rules: [Rules; 2],
    /// Layer index.
    pub layer: usize,
    /// KV head index.
    pub head: usize,
    /// The layer.
    pub geometry: &'a LayerGeometry,
    /// The strategy.
    pub stages: &'a Stages,
    /// Page access.
    pub reader: Reader<'a>,
    /// The layer's coded rows, where they are predictions and residuals: K and V, `[position][kv_head · head_dim]`.
    pub restored: Option<[&'a [f32]; 2]>,
    /// What is read of all this.
    pub reading: HeadReading<'a>,
}

impl<'a> HeadView<'a> {
    /// Channels in which coded values are summed.
    pub fn value_dim(&self) -> usize {
        let d = self.geometry.head_dim;
        match self.stages.sums_coded_values() {
            true => self.stages.project_v.output_dim(d),
            false => d,
        }
    }

    /// The table of one side and class.
    pub(super) fn table(&self, side: Side, class: Class) -> Option<&'a RowTable> {
        match (class, self.reading) {
            (Class::Fetched, HeadReading::Fetched(tables)) => Some(&tables[side as usize]),
            (Class::Fetched, _) => None,
            _ => Some(&self.state.tables[side as usize][class as usize]),
        }
    }

    /// Whether keys must be decoded before they meet queries: expanded, or predicted.
    pub(super) fn decodes_keys(&self, class: Class) -> bool {
        class == Class::Coded
            && (self.restored.is_some()
                || !self.stages.project_k.is_identity() && !self.stages.absorbs_keys())
    }

    /// Whether any keys are turned before they meet queries.
    pub(super) fn turns_keys(&self) -> bool {
        self.stages.keys == KeyForm::PreRope
    }

    /// What turns a page's keys before they meet queries, if anything.
    pub(super) fn turning(&self, class: Class, page: &Page) -> Option<Turning<'a>> {
        let in_coded_space = class == Class::Coded && self.stages.absorbs_keys();
        (self.turns_keys() && !in_coded_space).then(|| Turning {
            rope: &self.geometry.rope,
            first: page.first(),
        })
    }

    /// Decodes a page's live keys, in their own space only if queries come there, `[row][head_dim]`.
    pub(super) fn decode_keys(
        &self,
        class: Class,
        (page, format): (&Page, &Format),
        buffers: &mut ReadBuffers,
        rows: &mut Vec<f32>,
    ) -> Result<(), CacheError> {
        let d = self.geometry.head_dim;
        let stages = self.stages;
        let [n_live, n_stored] = [page.live(), page.stored()].map(|m| m.count_ones() as usize);
        room(rows, RANGE * format.dim.max(d));
        rows.resize(n_stored * format.dim.max(d), 0.0);
        let dim = if self.restored.is_some() && class == Class::Coded {
            let positions: Vec<u32> = page.positions().collect();
            self.copy_restored((Side::K, class), &positions, rows);
            d
        } else {
            self.reader.decode(page, format, buffers, rows)?;
            if self.decodes_keys(class) {
                let expanded: Vec<f32> = rows[..n_live * format.dim]
                    .chunks_exact(format.dim)
                    .flat_map(|z| stages.project_k.expand(self.layer, self.head, z, d))
                    .collect();
                rows[..expanded.len()].copy_from_slice(&expanded);
                d
            } else {
                format.dim
            }
        };
        rows.truncate(n_live * dim);
        Ok(())
    }

    /// Copies coded rows from their reconstruction, `[row][head_dim]`, if there is one.
    pub(super) fn copy_restored(
        &self,
        (side, class): (Side, Class),
        positions: &[u32],
        rows: &mut [f32],
    ) -> bool {
        let (Class::Coded, Some(restored)) = (class, self.restored) else {
            return false;
        };
        let d = self.geometry.head_dim;
        let width = self.geometry.n_kv_heads * d;
        for (row, &p) in rows.chunks_exact_mut(d).zip(positions) {
            let at = p as usize * width + self.head * d;
            row.copy_from_slice(&restored[side as usize][at..at + d]);
        }
        true
    }
}
