//! What one token sees of a KV head, range after range.
//!
//! Invariants: the tables that have rows, and the rules, are looked up once for all ranges; what is read of a range is looked up
//! before any of it is read, so that lookups, which leave near caches between two tokens, don't wait for one another.

use std::cell::Cell;

use super::formats::{Format, Mask};
use super::head_view::HeadView;
use super::places::{Page, ReadBuffers, Reader};
use super::stage::Side;
use super::visibility::{Class, Sight};
use super::{CacheError, RANGE};
use crate::compute::cpu::rows;

/// The rows of one class in one range.
#[derive(Clone, Copy)]
pub struct Seen<'a> {
    /// The page.
    pub page: &'a Page,
    /// Its format.
    pub format: &'a Format,
    /// Rows that the token sees.
    pub visible: Mask,
    /// The page's bytes where they lie in host memory as encoded; else nothing.
    bytes: &'a [u8],
    /// What is read next: its beginning is asked for meanwhile.
    pub ahead: &'a [u8],
}

/// By class, in order of [`Class::READ`].
pub type OfClasses<'a> = [Option<Seen<'a>>; 4];

/// All rows of a range that are read.
#[derive(Clone, Copy, Default)]
pub struct Found<'a> {
    /// Keys.
    pub keys: OfClasses<'a>,
    /// Values.
    pub values: OfClasses<'a>,
}

/// What a token can see of one head.
pub struct Reach<'a> {
    view: HeadView<'a>,
    position: u32,
    /// By side: the rules, and the tables with rows in order of [`Class::READ`].
    sides: [(Sight, [Option<Walked<'a>>; 4]); 2],
}

/// A table, of which one range after the other is asked for.
struct Walked<'a> {
    pages: &'a [Page],
    /// Where the last answer was.
    at: Cell<usize>,
}

impl<'a> Walked<'a> {
    fn page(&self, range: u32) -> Option<&'a Page> {
        let range_at = |i: usize| self.pages.get(i).map(|page| page.range);
        let mut at = self.at.get();
        let before = at.checked_sub(1).and_then(range_at);
        if before.is_none_or(|there| there >= range) {
            at = self.pages.partition_point(|page| page.range < range);
        }
        while range_at(at).is_some_and(|there| there < range) {
            at += 1;
        }
        self.at.set(at);
        self.pages.get(at).filter(|page| page.range == range)
    }
}

impl<'a> Seen<'a> {
    /// The page's encoded bytes.
    pub fn bytes<'b>(
        &self,
        reader: Reader<'a>,
        buffers: &'b mut ReadBuffers,
    ) -> Result<&'b [u8], CacheError>
    where
        'a: 'b,
    {
        if self.bytes.is_empty() {
            return reader.bytes(self.page, self.format, buffers);
        }
        Ok(self.bytes)
    }

    /// Its bytes as what is read next.
    pub fn coming(&self) -> &'a [u8] {
        if self.format.codec.page_rows() > 1 {
            // A page's scales lie behind its rows, and are what is read first.
            let n = self.format.scale_bytes(self.page.stored());
            rows::ask_for(&self.bytes[self.bytes.len().saturating_sub(n)..]);
        }
        self.bytes
    }

    /// The same with what is read next.
    pub fn before(self, next: Option<Seen<'a>>) -> Self {
        let ahead = next.map_or(&[][..], |next| next.coming());
        Self { ahead, ..self }
    }
}

impl<'a> HeadView<'a> {
    /// The first range that a token at `position` sees.
    pub(super) fn first_range(&self, position: u32) -> u32 {
        let first = self.rules[0]
            .window
            .map_or(0, |w| (position + 1).saturating_sub(w));
        first / RANGE as u32
    }

    /// What a token at `position` can see.
    pub(super) fn reach(self, position: u32) -> Reach<'a> {
        let sides = Side::BOTH.map(|side| {
            let tables = Class::READ.map(|class| {
                let pages = self.table(side, class)?.pages();
                let at = Cell::new(usize::MAX);
                (!pages.is_empty()).then_some(Walked { pages, at })
            });
            (self.rules[side as usize].sight(position), tables)
        });
        Reach {
            view: self,
            position,
            sides,
        }
    }
}

impl<'a> Reach<'a> {
    /// Notes what is read of a range, of which nothing is noted yet.
    pub fn find(&self, range: usize, found: &mut Found<'a>) {
        self.see(Side::K, range, &mut found.keys);
        self.see(Side::V, range, &mut found.values);
    }

    /// Notes what is seen of one side of a range.
    pub fn see(&self, side: Side, range: usize, seen: &mut OfClasses<'a>) {
        let (_, tables) = &self.sides[side as usize];
        for class in Class::READ {
            if tables[class as usize].is_some()
                && let Some(of_class) = self.seen_of(side, class, range as u32)
            {
                seen[class as usize] = Some(of_class);
            }
        }
    }

    fn seen_of(&self, side: Side, class: Class, range: u32) -> Option<Seen<'a>> {
        let (sight, tables) = &self.sides[side as usize];
        let page = tables[class as usize].as_ref()?.page(range)?;
        let view = &self.view;
        let mut visible =
            page.live() & sight.seen(class, range) & view.reading.mask(side, class, range);
        if class == Class::Fetched {
            // What left since it was asked for is not read.
            visible &= tables[Class::Coded as usize].as_ref()?.page(range)?.live();
        }
        if !view.state.dying.is_empty() {
            let first = page.first();
            for (&p, &dies) in view.state.dying.range(first..first + RANGE as u32) {
                if dies <= self.position {
                    visible &= !(1 << (p - first));
                }
            }
        }
        if visible == 0 {
            return None;
        }
        let format = page.format(view.formats.ladder(view.head, side, class));
        Some(Seen {
            page,
            format,
            visible,
            bytes: view.reader.view(page, format),
            ahead: &[],
        })
    }
}
