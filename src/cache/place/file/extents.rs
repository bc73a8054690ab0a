//! Which parts of a backing file are free.
//!
//! Invariants: free extents never touch or overlap each other nor the end (they are merged, or cut the end back), so
//! `end` is the least length that holds all live extents; the first free extent that is long enough is taken.

use std::collections::BTreeMap;

use super::super::super::pages::tree_bytes;

/// A run of bytes in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub offset: u64,
    pub len: u64,
}

/// Free space below `end`.
#[derive(Debug, Default)]
pub(crate) struct Extents {
    /// Length by offset.
    free: BTreeMap<u64, u64>,
    end: u64,
}

impl Extents {
    /// The length that the file needs.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Bytes of the table of free extents.
    pub fn bookkeeping_bytes(&self) -> u64 {
        tree_bytes(&self.free)
    }

    /// Takes `len` bytes: the front of the first free extent that holds them, or new ones at the end.
    pub fn take(&mut self, len: u64) -> Extent {
        let fit = self.free.iter().find(|&(_, &l)| l >= len);
        let Some((&offset, &free)) = fit.filter(|_| len > 0) else {
            let offset = self.end;
            self.end += len;
            return Extent { offset, len };
        };
        self.free.remove(&offset);
        if free > len {
            self.free.insert(offset + len, free - len);
        }
        Extent { offset, len }
    }

    /// Gives an extent back.
    pub fn give(&mut self, extent: Extent) {
        if extent.len == 0 {
            return;
        }
        let Extent { mut offset, len } = extent;
        let mut end = offset + len;
        if let Some(after) = self.free.remove(&end) {
            end += after;
        }
        if let Some((&before, &len)) = self.free.range(..offset).next_back()
            && before + len == offset
        {
            self.free.remove(&before);
            offset = before;
        }
        if end == self.end {
            self.end = offset;
        } else {
            self.free.insert(offset, end - offset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_merge_and_the_end_comes_back() {
        let mut extents = Extents::default();
        let [a, b, c, d] = [10, 20, 30, 40].map(|n| extents.take(n));
        extents.give(a);
        extents.give(c);
        extents.give(b);
        assert_eq!(extents.free, BTreeMap::from([(0, 60)]));
        assert_eq!(extents.take(50), Extent { offset: 0, len: 50 });
        assert_eq!(extents.take(11).offset, 100);
        extents.give(Extent {
            offset: 100,
            len: 11,
        });
        extents.give(d);
        assert_eq!((extents.end(), extents.free.len()), (50, 0));
    }

    proptest! {
        #[test]
        fn live_extents_never_overlap(steps in prop::collection::vec((0u64..50, any::<prop::sample::Index>()), 1..200)) {
            let mut extents = Extents::default();
            let mut live: Vec<Extent> = Vec::new();
            for (len, which) in steps {
                // A third of the steps frees one.
                if len % 3 == 0 && !live.is_empty() {
                    extents.give(live.swap_remove(which.index(live.len())));
                } else {
                    live.push(extents.take(len));
                }
                live.sort_by_key(|e| (e.offset, e.len));
                prop_assert!(live.windows(2).all(|w| w[0].offset + w[0].len <= w[1].offset));
                let last = live.last().map_or(0, |e| e.offset + e.len);
                prop_assert!(last <= extents.end());
                let used: u64 = live.iter().map(|e| e.len).sum();
                let free: u64 = extents.free.values().sum();
                prop_assert_eq!(used + free, extents.end());
            }
        }
    }
}
