//! Free space of a sparse device for which the host has not given room.
//!
//! An extent that becomes backed or bare is *moving* while the host is asked, without the lock of
//! the allocator: it is free, and nobody is given it.

use ramet_block::Extent;

use super::holes::Holes;

/// Bare extents, and those that are about to become backed or bare.
#[derive(Debug, Default)]
pub(super) struct Bare {
    holes: Holes,
    moving: Vec<Extent>,
}

impl Bare {
    /// Bytes that are bare.
    pub fn bytes(&self) -> u64 {
        self.holes.bytes()
    }

    /// Bytes that are bare or moving.
    pub fn unbacked_bytes(&self) -> u64 {
        let moving: u64 = self.moving.iter().map(|extent| extent.len).sum();
        self.holes.bytes() + moving
    }

    /// Bare and moving extents.
    pub fn iter(&self) -> impl Iterator<Item = Extent> {
        self.holes.iter().chain(self.moving.iter().copied())
    }

    /// Whether any byte of `extent` is bare or moving.
    pub fn overlaps(&self, extent: Extent) -> bool {
        self.holes.overlaps(extent) || self.moving.iter().any(|moving| moving.overlaps(&extent))
    }

    /// Adds `extent`, which is not free yet.
    pub fn insert(&mut self, extent: Extent) {
        self.holes.insert(extent);
    }

    /// Takes `extent` if all of it is bare. Says whether it is.
    pub fn take(&mut self, extent: Extent) -> bool {
        self.holes.take(extent)
    }

    /// The part of a bare extent that begins at `addr`, or the first one behind it.
    pub fn first_from(&self, addr: u64) -> Option<Extent> {
        self.holes.first_from(addr)
    }

    /// Makes bare extents of about `want` bytes together moving. They begin at the first bare byte
    /// from `from` on, follow each other, and reach over `span` bytes at most.
    pub fn begin(&mut self, from: u64, want: u64, span: u64) -> Vec<Extent> {
        let mut taken = Vec::new();
        // A piece before `from` that the host refused is one with the rest of its hole again.
        let Some(first) = self.holes.first_from(from) else {
            return taken;
        };
        let reach = first.addr.saturating_add(span);
        let (mut left, mut next) = (want, Some(first));
        while let Some(hole) = next.filter(|hole| left > 0 && hole.addr < reach) {
            let part = Extent::new(hole.addr, hole.len.min(left).min(reach - hole.addr));
            let is_bare = self.holes.take(part);
            debug_assert!(is_bare, "{part} is of a hole");
            left -= part.len;
            taken.push(part);
            next = self.holes.first_behind(part.end());
        }
        self.moving.extend_from_slice(&taken);
        taken
    }

    /// As [`Bare::begin`] for one extent of `want` bytes, or of `least` where no bare one is longer.
    pub fn begin_one(&mut self, want: u64, least: u64) -> Option<Extent> {
        let fit = |len: u64| self.holes.smallest(len);
        let hole = fit(want).or_else(|| fit(least))?;
        let taken = self.holes.take_front(hole, want);
        self.moving.push(taken);
        Some(taken)
    }

    /// Makes up to `count` whole bare extents moving, from the first one at or behind `from` on.
    pub fn begin_some(&mut self, from: u64, count: usize) -> Vec<Extent> {
        let mut taken = Vec::new();
        let mut next = self.holes.first_behind(from);
        while let Some(hole) = next.filter(|_| taken.len() < count) {
            taken.push(self.holes.take_front(hole, hole.len));
            next = self.holes.first_behind(hole.end());
        }
        self.moving.extend_from_slice(&taken);
        taken
    }

    /// Makes `extents`, which were backed, moving.
    pub fn begin_baring(&mut self, extents: &[Extent]) {
        self.moving.extend_from_slice(extents);
    }

    /// Ends a move that began above. The caller gives the extents their new place.
    pub fn end(&mut self, extents: &[Extent]) {
        self.moving.retain(|moving| !extents.contains(moving));
    }
}
