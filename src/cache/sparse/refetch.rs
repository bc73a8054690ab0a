//! Exact copies of coded rows in a tier, and those of them that the next token reads in place of the coded ones (SpeCache).
//!
//! Every row that is coded leaves its exact copy in a vault. Of each KV head the most attended rows are brought back:
//! those that the token's own queries ask for, which has to wait for them (`demand`); or those that the queries of a token
//! asked for that was tried out beside the token before it, and these come while the rest of that step is computed
//! (`speculative`). `all` brings back everything, layer by layer: plain offloading.
//!
//! ```text
//! step    t                           t + 1
//! tokens  x(t), guess of x(t+1)       x(t+1), guess of x(t+2)
//! layer 0 guess ranks → reads start … → rows are here, or are waited for
//! ```
//!
//! Invariants: a row's K is read exact only where it was coded, its V likewise, and apart from each other; which rows are asked for depends on the queries and
//! on what they see, never on when a read ended.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::formats::{Format, Mask};
use super::super::places::{Page, Places, bits};
use super::super::stage::Side;
use super::super::stages::LayerFormats;
use super::super::table::RowTable;
use super::super::types::Traffic;
use super::super::visibility::Class;
use super::super::{CacheError, RANGE};
use super::vault::{Block, Home, Request, Vault, Wanted};

/// Which rows are brought back, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// All, layer by layer.
    All,
    /// Those that the token's own queries attend to most, when they are known.
    Demand,
    /// Those that a tried token's queries attended to most, ahead of time.
    Speculative,
}

/// What is brought back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Rows of each KV head.
    pub n_rows: usize,
    /// When.
    pub when: When,
    /// Where exact rows are.
    pub home: Home,
}

/// The exact rows of one range in the vault.
#[derive(Debug, Clone)]
struct Kept {
    block: Arc<Block>,
    /// By [`Side`].
    written: [Mask; 2],
}

/// One KV head's rows in the vault, and those that came back.
#[derive(Debug, Default)]
pub struct Head {
    kept: BTreeMap<u32, Kept>,
    /// By [`Side`]: exact rows that are read in place of coded ones.
    pub fetched: [RowTable; 2],
}

/// One layer's.
#[derive(Debug, Default)]
pub struct Layer {
    /// By KV head.
    pub heads: Vec<Head>,
    next: Option<Next>,
}

/// What the next token of a layer is to read.
#[derive(Debug)]
struct Next {
    /// By KV head, ascending.
    picks: Vec<Vec<Pick>>,
    rows: Coming,
}

#[derive(Debug)]
enum Coming {
    Asked(Vec<Part>, Request),
    Here(Rows),
}

/// A row that is read exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pick {
    position: u32,
    /// By [`Side`]: what the vault held when it was picked.
    sides: [bool; 2],
}

/// Neighbouring rows of one KV head that were asked for together.
#[derive(Debug)]
struct Part {
    head: usize,
    first: u32,
    n_bytes: usize,
}

/// Exact rows by KV head and position: K and V, back to back.
type Rows = BTreeMap<(usize, u32), Vec<u8>>;

impl Head {
    /// Puts exact rows, back to back, into the vault.
    pub fn keep(
        &mut self,
        vault: &Vault,
        (side, positions): (Side, &[u32]),
        row_bytes: usize,
        bytes: &[u8],
    ) -> Result<(), CacheError> {
        for (&p, row) in positions.iter().zip(bytes.chunks_exact(row_bytes)) {
            let kept = match self.kept.entry(p / RANGE as u32) {
                std::collections::btree_map::Entry::Occupied(kept) => kept.into_mut(),
                std::collections::btree_map::Entry::Vacant(gap) => gap.insert(Kept {
                    block: vault.block(2 * row_bytes)?,
                    written: [0; 2],
                }),
            };
            if Arc::strong_count(&kept.block) > 1 {
                kept.block = Arc::new(kept.block.copy()?);
            }
            let slot = p as usize % RANGE;
            let offset = (2 * slot + side as usize) * row_bytes;
            kept.block.write(offset, row)?;
            kept.written[side as usize] |= 1 << slot;
        }
        Ok(())
    }

    /// Which sides of a row can be brought back.
    fn sides(&self, position: u32) -> [bool; 2] {
        let kept = self.kept.get(&(position / RANGE as u32));
        let bit = |mask: Mask| mask >> (position % RANGE as u32) & 1 == 1;
        kept.map_or([false; 2], |k| k.written.map(bit))
    }

    /// All rows that can be brought back, ascending.
    fn all(&self) -> Vec<u32> {
        let rows = self.kept.iter().flat_map(|(&range, kept)| {
            let rows = bits(kept.written[0] | kept.written[1]);
            rows.map(move |slot| range * RANGE as u32 + slot as u32)
        });
        rows.collect()
    }

    /// Whether these sides of a row are here.
    fn has(&self, Pick { position, sides }: Pick) -> bool {
        let here = |table: &RowTable| {
            let page = table.page(position / RANGE as u32);
            page.is_some_and(|p| p.live() >> (position % RANGE as u32) & 1 == 1)
        };
        let tables = self.fetched.iter().zip(sides);
        tables
            .filter(|(_, wanted)| *wanted)
            .all(|(table, _)| here(table))
    }

    /// Lets go of rows that have left, and of blocks without others. `live`: by range, the rows that live.
    fn forget(&mut self, live: impl Fn(u32) -> Mask) {
        for (&range, kept) in &mut self.kept {
            kept.written = kept.written.map(|mask| mask & live(range));
        }
        self.kept.retain(|_, kept| kept.written != [0; 2]);
    }

    /// Rows of a list that can be brought back.
    fn picks(&self, positions: &[u32]) -> Vec<Pick> {
        let pick = |&position| Pick {
            position,
            sides: self.sides(position),
        };
        let picks = positions.iter().map(pick);
        picks.filter(|p| p.sides != [false; 2]).collect()
    }

    /// A copy that shares blocks and pages.
    fn fork(&self, places: &mut Places<'_>) -> Self {
        Self {
            kept: self.kept.clone(),
            fetched: self.fetched.each_ref().map(|t| t.fork(places)),
        }
    }
}

impl Layer {
    /// Asks the vault for those rows of each KV head that are not here yet; the next call of [`Layer::bring`] waits for them.
    pub fn ask(
        &mut self,
        vault: &Vault,
        positions: Vec<Vec<u32>>,
        record_bytes: usize,
        traffic: &mut Traffic,
    ) {
        let heads = self.heads.iter().zip(&positions);
        let picks: Vec<Vec<Pick>> = heads.map(|(head, p)| head.picks(p)).collect();
        let (mut parts, mut wanted) = (Vec::new(), Vec::new());
        for (h, (head, picks)) in self.heads.iter().zip(&picks).enumerate() {
            let missing = picks.iter().filter(|&&pick| !head.has(pick));
            let missing: Vec<u32> = missing.map(|p| p.position).collect();
            // Neighbours come in one read.
            for run in missing.chunk_by(|a, b| a + 1 == *b && a / RANGE as u32 == b / RANGE as u32)
            {
                let Some(kept) = head.kept.get(&(run[0] / RANGE as u32)) else {
                    continue;
                };
                wanted.push(Wanted {
                    tag: parts.len(),
                    block: Arc::clone(&kept.block),
                    offset: run[0] as usize % RANGE * record_bytes,
                    n_bytes: run.len() * record_bytes,
                });
                parts.push(Part {
                    head: h,
                    first: run[0],
                    n_bytes: run.len() * record_bytes,
                });
            }
        }
        let request = vault.ask(wanted, traffic);
        self.next = Some(Next {
            picks,
            rows: Coming::Asked(parts, request),
        });
    }

    /// Asks for every row of a KV head and position for which `live` holds.
    pub fn ask_for_all(
        &mut self,
        vault: &Vault,
        live: impl Fn(usize, u32) -> bool,
        record_bytes: usize,
        traffic: &mut Traffic,
    ) {
        let heads = self.heads.iter().enumerate();
        let all = heads.map(|(h, head)| {
            let mut rows = head.all();
            rows.retain(|&p| live(h, p));
            rows
        });
        let all = all.collect();
        self.ask(vault, all, record_bytes, traffic);
    }

    /// Waits for the rows that were asked for.
    pub fn wait(&mut self, record_bytes: usize) -> Result<(), CacheError> {
        let Some(next) = &mut self.next else {
            return Ok(());
        };
        if let Coming::Asked(..) = next.rows {
            let Coming::Asked(parts, request) =
                std::mem::replace(&mut next.rows, Coming::Here(Rows::new()))
            else {
                return Ok(());
            };
            let mut rows = Rows::new();
            for (tag, bytes) in request.wait()? {
                let part = &parts[tag];
                for (row, p) in bytes.chunks_exact(record_bytes).zip(part.first..) {
                    rows.insert((part.head, p), row.to_vec());
                }
            }
            next.rows = Coming::Here(rows);
        }
        Ok(())
    }

    /// Puts the rows that were waited for in place of those of the token before.
    pub fn bring(
        &mut self,
        places: &mut Places<'_>,
        formats: &LayerFormats,
    ) -> Result<(), CacheError> {
        let Some(Next {
            picks,
            rows: Coming::Here(rows),
        }) = self.next.take()
        else {
            return Ok(());
        };
        for (h, (head, picks)) in self.heads.iter_mut().zip(&picks).enumerate() {
            for side in Side::BOTH {
                let picks = picks.iter().filter(|p| p.sides[side as usize]);
                let positions: Vec<u32> = picks.map(|p| p.position).collect();
                let table = &mut head.fetched[side as usize];
                if table.positions().eq(positions.iter().copied()) {
                    continue;
                }
                let format = formats.format(h, side, Class::Fetched);
                let n = format.bytes(1);
                let before = held(table, format, places)?;
                table.clear(places);
                for part in positions.chunk_by(|a, b| a / RANGE as u32 == b / RANGE as u32) {
                    let (mut mask, mut bytes) = (0, Vec::with_capacity(part.len() * n));
                    for &p in part {
                        let new = rows.get(&(h, p)).map(|r| &r[side as usize * n..][..n]);
                        let Some(row) = new.or_else(|| before.get(&p).map(Vec::as_slice)) else {
                            continue;
                        };
                        bytes.extend_from_slice(row);
                        mask |= 1 << (p as usize % RANGE);
                    }
                    if mask != 0 {
                        table.push_whole(places, (part[0] / RANGE as u32, mask), &bytes);
                    }
                }
            }
        }
        Ok(())
    }

    /// Lets go of what came back, and of what is on its way.
    pub fn clear(&mut self, places: &mut Places<'_>) {
        for table in self.heads.iter_mut().flat_map(|h| &mut h.fetched) {
            table.clear(places);
        }
        if let Some(Next {
            rows: Coming::Asked(_, request),
            ..
        }) = self.next.take()
        {
            // Nobody reads them; but their blocks are held until they are there.
            let _ = request.wait();
        }
    }

    /// Whether anything came back, or will.
    pub fn is_used(&self) -> bool {
        let mut tables = self.heads.iter().flat_map(|h| &h.fetched);
        self.next.is_some() || tables.any(|t| !t.pages().is_empty())
    }

    /// Forgets rows from `len` on.
    pub fn truncate(&mut self, len: u32) {
        for head in &mut self.heads {
            head.forget(|range| {
                let n = len.saturating_sub(range * RANGE as u32).min(RANGE as u32);
                Mask::MAX.checked_shr(RANGE as u32 - n).unwrap_or(0)
            });
        }
    }

    /// Lets go of rows that have left. `live`: by KV head and range, the rows that live.
    pub fn forget(&mut self, live: impl Fn(usize, u32) -> Mask) {
        for (h, head) in self.heads.iter_mut().enumerate() {
            head.forget(|range| live(h, range));
        }
    }

    /// Rows that came back.
    pub fn n_fetched(&self) -> u64 {
        let pages = self.heads.iter().flat_map(|h| h.fetched[0].pages());
        pages.map(|p| u64::from(p.live().count_ones())).sum()
    }

    /// Whether there is anything to bring back.
    pub fn has_rows(&self) -> bool {
        self.heads.iter().any(|h| !h.kept.is_empty())
    }

    /// Of the rows that queries rank first, how many can be brought back and how many of these are here.
    pub fn hits(&self, ranked: &[Vec<u32>]) -> (u64, u64) {
        let mut sum = (0, 0);
        for (head, ranked) in self.heads.iter().zip(ranked) {
            let picks = head.picks(ranked);
            sum.0 += picks.len() as u64;
            sum.1 += picks.iter().filter(|&&p| head.has(p)).count() as u64;
        }
        sum
    }

    /// A copy; what is on its way must have been waited for.
    pub fn fork(&self, places: &mut Places<'_>) -> Self {
        let next = self.next.as_ref().and_then(|next| match &next.rows {
            Coming::Here(rows) => Some(Next {
                picks: next.picks.clone(),
                rows: Coming::Here(rows.clone()),
            }),
            Coming::Asked(..) => None,
        });
        Self {
            heads: self.heads.iter().map(|h| h.fork(places)).collect(),
            next,
        }
    }

    /// Bytes of the tables by which exact rows are known, and of rows that wait for their turn.
    pub fn bytes(&self) -> u64 {
        let kept = self.heads.iter().map(|h| {
            super::super::pages::tree_bytes(&h.kept)
                + (h.kept.len() * size_of::<Block>()) as u64
                + h.fetched.iter().map(RowTable::table_bytes).sum::<u64>()
        });
        let waiting = self.next.iter().map(|next| match &next.rows {
            Coming::Here(rows) => rows.values().map(|r| r.len() as u64).sum::<u64>(),
            Coming::Asked(parts, _) => parts.iter().map(|p| p.n_bytes as u64).sum(),
        });
        kept.sum::<u64>()
            + waiting.sum::<u64>()
            + (self.heads.capacity() * size_of::<Head>()) as u64
    }
}

/// The rows of a table by position.
fn held(
    table: &RowTable,
    format: &Format,
    places: &Places<'_>,
) -> Result<BTreeMap<u32, Vec<u8>>, CacheError> {
    let n = format.bytes(1);
    let mut rows = BTreeMap::new();
    let mut buffers = Default::default();
    for page in table.pages() {
        let bytes = places.reader().bytes(page, format, &mut buffers)?;
        rows.extend(Page::positions(page).zip(bytes.chunks_exact(n).map(<[u8]>::to_vec)));
    }
    Ok(rows)
}
