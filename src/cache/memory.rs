//! Bytes by part, summed from the buffers that live.
//!
//! Invariants: the resident parts but the sequences' own structs add up to the store's bytes; a page that forks share
//! counts once.
//!
//! Left out, since it depends on no token: the stages and each layer's formats and geometry, about 300 bytes a layer. A
//! tier's tables of slots are B-trees, whose nodes are estimated ([`tree_bytes`](super::pages::tree_bytes)).

use std::collections::BTreeSet;

use super::formats::Format;
use super::pages::{PageId, tree_bytes};
use super::pipeline::StagedCache;
use super::places::{Page, PageBytes};
use super::sequence::{HeadState, LayerState, SequenceState};
use super::stage::Side;
use super::types::MemoryReport;
use super::visibility::Class;

/// Sums a cache's buffers. `scratch_bytes`: working memory of attention.
pub fn report(cache: &StagedCache, scratch_bytes: u64) -> MemoryReport {
    let mut sum = Sum {
        cache,
        seen: BTreeSet::new(),
        report: MemoryReport::default(),
    };
    for state in cache.sequences.values() {
        sum.sequence(state);
    }
    sum.fetched();
    let mut report = sum.report;
    report.page_table_bytes +=
        cache.store.bookkeeping_bytes() + cache.tier.as_ref().map_or(0, |t| t.bookkeeping_bytes());
    report.page_table_bytes += tree_bytes(&cache.rebuilt);
    for rebuilt in cache.rebuilt.values() {
        report.rebuilt.add(rebuilt, 1);
    }
    report.table_bytes = cache.stages.table_bytes();
    report.projection_bytes = cache.stages.projection_bytes();
    report.backing_bytes = cache.tier.as_ref().map_or(0, |t| t.bytes());
    if let Some(sparse) = &cache.sparse {
        report.index_bytes += sparse.index_bytes();
        report.backing_bytes += sparse.backing_bytes();
    }
    report.scratch_bytes = scratch_bytes;
    report
}

struct Sum<'a> {
    cache: &'a StagedCache,
    seen: BTreeSet<PageId>,
    report: MemoryReport,
}

impl Sum<'_> {
    fn sequence(&mut self, state: &SequenceState) {
        let structs =
            size_of::<SequenceState>() + state.layers.capacity() * size_of::<LayerState>();
        self.report.page_table_bytes += structs as u64;
        let geometry = self.cache.geometry.layers.iter();
        for ((layer, formats), window) in state
            .layers
            .iter()
            .zip(&self.cache.stages.formats)
            .zip(geometry.map(|l| l.window))
        {
            self.report.page_table_bytes +=
                (layer.heads.capacity() * size_of::<HeadState>()) as u64;
            for (kv_head, head) in layer.heads.iter().enumerate() {
                self.report.index_bytes += (head.scores.capacity() * size_of::<f32>()) as u64;
                // Past a sliding window no cache keeps a row: it counts neither as seen nor as evicted.
                let most = window.unwrap_or(u32::MAX);
                let live = head.live_positions().len() as u64;
                self.report.rows_seen += u64::from(head.n_seen.min(most)).max(live);
                self.report.rows_live += live;
                for page in head.tables[Side::K as usize][Class::Coded as usize].pages() {
                    let sinks = self.cache.stages.sinks;
                    let n_rows = page.positions().filter(|&p| p >= sinks).count() as u64;
                    if let Some(n) = self.report.rows_at_level.get_mut(usize::from(page.level)) {
                        *n += n_rows;
                    }
                }
                for (side, tables) in Side::BOTH.into_iter().zip(&head.tables) {
                    for (class, table) in Class::ALL.into_iter().zip(tables) {
                        self.report.page_table_bytes += table.table_bytes();
                        for page in table.pages() {
                            let format = page.format(formats.ladder(kv_head, side, class));
                            self.page(class, page, format);
                        }
                    }
                }
            }
        }
    }

    /// Exact copies that came back.
    fn fetched(&mut self) {
        let states = self.cache.sparse.iter().flat_map(|s| s.states());
        for (layer, head, tables) in states.flat_map(|state| state.tables()) {
            for (side, table) in Side::BOTH.into_iter().zip(tables) {
                let format = self.cache.stages.formats[layer].format(head, side, Class::Fetched);
                for page in table.pages() {
                    self.page(Class::Fetched, page, format);
                }
            }
        }
    }

    fn page(&mut self, class: Class, page: &Page, format: &Format) {
        let stored = page.stored();
        let (id, used) = match page.bytes {
            PageBytes::Raw(id) => (id, self.cache.reader().raw_bytes(page, format)),
            PageBytes::Packed { id, len } => (id, len as usize),
            PageBytes::Parked { .. } => return,
        };
        if !self.seen.insert(id) {
            return;
        }
        let slack = self.cache.store.page_bytes(id) - used;
        self.report.slack_bytes += slack as u64;
        if class != Class::Coded {
            self.report.exact_bytes += used as u64;
            return;
        }
        let scales = match page.bytes {
            PageBytes::Raw(_) => format.scale_bytes(stored),
            _ => 0,
        };
        self.report.scale_bytes += scales as u64;
        self.report.payload_bytes += (used - scales) as u64;
    }
}
