//! Disjoint extents by address and by length.
//!
//! Keeps: no two holes touch; both indexes hold the same ones.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ramet_block::Extent;

use crate::record;

/// A set of free extents that joins neighbours.
#[derive(Debug, Default)]
pub(crate) struct Holes {
    by_addr: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
    bytes: u64,
    /// Of holes that are short.
    short_bytes: u64,
}

/// Whether a hole of so many bytes is too short for a page of any structure.
pub(super) fn is_short(len: u64) -> bool {
    len < u64::from(record::SHAPE.page_bytes)
}

impl Holes {
    /// The sum of all lengths.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The sum of all lengths of holes that are too short for a page.
    pub fn short_bytes(&self) -> u64 {
        self.short_bytes
    }

    /// Every hole, by address.
    pub fn iter(&self) -> impl Iterator<Item = Extent> {
        self.within(0..u64::MAX)
    }

    /// The holes that begin in a range of addresses.
    pub fn within(&self, addrs: Range<u64>) -> impl Iterator<Item = Extent> {
        let holes = self.by_addr.range(addrs);
        holes.map(|(&addr, &len)| Extent::new(addr, len))
    }

    /// The smallest hole of at least `len` bytes, the first of several.
    pub fn smallest(&self, len: u64) -> Option<Extent> {
        let found = self.by_len.range((len, 0)..).next();
        found.map(|&(len, addr)| Extent::new(addr, len))
    }

    /// The first hole that begins at or behind `addr`.
    pub fn first_behind(&self, addr: u64) -> Option<Extent> {
        self.within(addr..u64::MAX).next()
    }

    /// The part of a hole that begins at `addr`, or the first hole behind it.
    pub fn first_from(&self, addr: u64) -> Option<Extent> {
        let below = self.by_addr.range(..=addr).next_back();
        let below = below.map(|(&at, &len)| Extent::new(at, len));
        let around = below.filter(|hole| hole.end() > addr);
        let rest = around.map(|hole| Extent::new(addr, hole.end() - addr));
        rest.or_else(|| self.first_behind(addr))
    }

    /// The lowest hole of at least `len` bytes among the first `most` ones.
    pub fn lowest(&self, len: u64, most: usize) -> Option<Extent> {
        let mut holes = self.iter().take(most);
        holes.find(|hole| hole.len >= len)
    }

    /// The highest hole of at least `len` bytes among the last `most` ones.
    pub fn highest(&self, len: u64, most: usize) -> Option<Extent> {
        let last = self.by_addr.iter().rev().take(most);
        let mut holes = last.map(|(&addr, &len)| Extent::new(addr, len));
        holes.find(|hole| hole.len >= len)
    }

    /// The hole with the highest address.
    pub fn last(&self) -> Option<Extent> {
        let last = self.by_addr.last_key_value();
        last.map(|(&addr, &len)| Extent::new(addr, len))
    }

    /// Whether any byte of `extent` is in a hole.
    pub fn overlaps(&self, extent: Extent) -> bool {
        self.last_before(extent.end())
            .is_some_and(|hole| hole.end() > extent.addr)
    }

    /// The last hole that begins below `addr`.
    fn last_before(&self, addr: u64) -> Option<Extent> {
        let found = self.by_addr.range(..addr).next_back();
        found.map(|(&addr, &len)| Extent::new(addr, len))
    }

    /// Adds `extent`, which has no byte in a hole, and joins it with its neighbours.
    pub fn insert(&mut self, extent: Extent) {
        let mut joined = extent;
        let before = self.last_before(extent.addr);
        let behind = self.first_behind(extent.addr);
        if let Some(before) = before.filter(|hole| hole.end() == extent.addr) {
            self.remove(before);
            joined = Extent::new(before.addr, before.len + joined.len);
        }
        if let Some(behind) = behind.filter(|hole| hole.addr == extent.end()) {
            self.remove(behind);
            joined.len += behind.len;
        }
        self.by_addr.insert(joined.addr, joined.len);
        self.by_len.insert((joined.len, joined.addr));
        self.bytes += joined.len;
        if is_short(joined.len) {
            self.short_bytes += joined.len;
        }
    }

    fn remove(&mut self, hole: Extent) {
        self.by_addr.remove(&hole.addr);
        self.by_len.remove(&(hole.len, hole.addr));
        self.bytes -= hole.len;
        if is_short(hole.len) {
            self.short_bytes -= hole.len;
        }
    }

    /// Takes the first `want` bytes of `hole`, which is one, or all of it when it is shorter.
    pub fn take_front(&mut self, hole: Extent, want: u64) -> Extent {
        self.remove(hole);
        let taken = Extent::new(hole.addr, want.min(hole.len));
        if taken.len < hole.len {
            self.insert(Extent::new(taken.end(), hole.len - taken.len));
        }
        taken
    }

    /// Takes the last `want` bytes of `hole`, which is one, or all of it when it is shorter.
    pub fn take_back(&mut self, hole: Extent, want: u64) -> Extent {
        self.remove(hole);
        let len = want.min(hole.len);
        if len < hole.len {
            self.insert(Extent::new(hole.addr, hole.len - len));
        }
        Extent::new(hole.end() - len, len)
    }

    /// Takes `extent` if all of it lies in one hole. Says whether it does.
    pub fn take(&mut self, extent: Extent) -> bool {
        let Some(hole) = self
            .last_before(extent.addr.saturating_add(1))
            .filter(|hole| hole.contains(&extent))
        else {
            return false;
        };
        self.remove(hole);
        let rests = [
            Extent::new(hole.addr, extent.addr - hole.addr),
            Extent::new(extent.end(), hole.end() - extent.end()),
        ];
        rests
            .into_iter()
            .filter(|rest| !rest.is_empty())
            .for_each(|rest| self.insert(rest));
        true
    }
}
