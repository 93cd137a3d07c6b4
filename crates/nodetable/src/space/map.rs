//! The allocator: the space that is free right now, in memory.
//!
//! Holes are indexed by address (to coalesce) and by length (best fit). Requests are served from
//! windows, which are cut out of holes (`windows.rs`).
//!
//! On a sparse device a free extent is *backed*, when the host has given room for it, or *bare*.
//! Only backed space is handed out, so no write of a node or a page fails for want of room on the
//! host; `backing.rs` makes bare space (`bare.rs`) backed and the reverse. On other devices nothing
//! is bare.
//!
//! The map on disk (`free_map.rs`) describes the free space *of a checkpoint*. The free space here is
//! that, less the extents that were allocated since and that no checkpoint names yet, and less the
//! freed-pending ones: freed by a checkpoint that is not durable yet.
//!
//! Keeps: A1, holes and windows are disjoint, aligned, inside of the usable area, and no two backed
//! holes touch, nor do two bare ones. A2, `free_bytes` is their sum.

use ramet_block::failpoints::{self, Fault};
use ramet_block::{BLOCK_BYTES, Extent};

use super::bare::Bare;
use super::holes::Holes;
use super::windows::{Purpose, Windows};
use crate::error::{Error, Result};

/// Smallest reserve in bytes; smaller volumes keep an eighth.
const RESERVE_MIN: u64 = 1 << 20;
/// Most of the reserve that is backed on a sparse device, in bytes: the writes of a checkpoint
/// beside the nodes that are counted apart.
const BACKED_RESERVE_MAX: u64 = 8 << 20;

fn reserve_of(bytes: u64) -> u64 {
    let reserve = (bytes / 64).max(RESERVE_MIN.min(bytes / 8));
    reserve.next_multiple_of(BLOCK_BYTES)
}

/// The allocator.
#[derive(Debug)]
pub(crate) struct SpaceMap {
    pub(super) usable: Extent,
    /// Backed, without the windows.
    holes: Holes,
    windows: Windows,
    /// Of holes and windows.
    backed_bytes: u64,
    /// Free, and the host has not given room for it.
    bare: Bare,
    is_sparse: bool,
    /// The new part of a sparse device that has grown, until that is released.
    grown: Vec<Extent>,
    reserve_bytes: u64,
    freed: Vec<Extent>,
    pending_bytes: u64,
    /// An extent that was freed though it was free, because the volume names it twice: nothing is
    /// allocated any more.
    twice: Option<Extent>,
}

impl SpaceMap {
    /// An allocator over `usable` in which nothing is free, on a device that is sparse or not.
    pub fn new(usable: Extent, is_sparse: bool) -> Self {
        Self {
            usable,
            holes: Holes::default(),
            windows: Windows::new(usable.len),
            backed_bytes: 0,
            bare: Bare::default(),
            is_sparse,
            grown: Vec::new(),
            reserve_bytes: reserve_of(usable.len),
            freed: Vec::new(),
            pending_bytes: 0,
            twice: None,
        }
    }

    /// Makes the area end at `end`. The new part becomes allocatable like the extents that the next
    /// commit frees.
    pub fn grow(&mut self, end: u64) -> Extent {
        let tail = Extent::new(self.usable.end(), end - self.usable.end());
        self.usable.len += tail.len;
        self.windows.grow(self.usable.len);
        self.pending_bytes += tail.len;
        self.freed.push(tail);
        if self.is_sparse {
            self.grown.push(tail);
        }
        tail
    }

    /// Wants the metadata to come close behind `addr`, where the newest lies, if there is a hole.
    pub fn resume(&mut self, addr: u64) {
        self.windows.resume(addr);
    }

    pub fn free_bytes(&self) -> u64 {
        self.backed_bytes + self.bare.unbacked_bytes()
    }

    pub fn reserve_bytes(&self) -> u64 {
        self.reserve_bytes
    }

    /// Free bytes that are backed.
    pub fn backed_bytes(&self) -> u64 {
        self.backed_bytes
    }

    /// Free bytes that are bare.
    pub fn bare_bytes(&self) -> u64 {
        self.bare.bytes()
    }

    /// Part of the backed bytes that only checkpoints may use.
    pub fn backed_reserve_bytes(&self) -> u64 {
        if self.is_sparse {
            let reserve = reserve_of(self.capacity_bytes()).min(BACKED_RESERVE_MAX);
            reserve.min(self.reserve_bytes)
        } else {
            self.reserve_bytes
        }
    }

    /// Size of the area without its bare extents: the size of the volume if the host gives no more
    /// room.
    pub fn capacity_bytes(&self) -> u64 {
        self.usable.len - self.bare.unbacked_bytes()
    }

    /// Free bytes beyond the reserve, when the host gives `host_bytes` more than are backed.
    pub fn room_bytes(&self, host_bytes: u64) -> u64 {
        let free = self.free_bytes();
        let backed = self.backed_bytes.saturating_add(host_bytes).min(free);
        let room = free.saturating_sub(self.reserve_bytes);
        room.min(backed.saturating_sub(self.backed_reserve_bytes()))
    }

    /// Bytes of backed holes that are too short for a page of a checkpoint.
    pub fn short_bytes(&self) -> u64 {
        self.holes.short_bytes()
    }

    /// Where the first window of the small class is wanted, if it was not opened yet.
    pub fn resumes_at(&self) -> Option<u64> {
        self.windows.resumes_at()
    }

    pub fn pending_bytes(&self) -> u64 {
        self.pending_bytes
    }

    /// An extent of `len_bytes`, rounded up to blocks.
    pub fn alloc(&mut self, len_bytes: u64, purpose: Purpose) -> Result<Extent> {
        if let Some(extent) = self.twice {
            let detail = format!("A1: {extent} was freed, and is outside or free already");
            return Err(Error::corrupt("space map", extent.addr, detail));
        }
        let no_space = Error::NoSpace {
            wanted_bytes: len_bytes,
        };
        let Some(len) = len_bytes.max(1).checked_next_multiple_of(BLOCK_BYTES) else {
            return Err(no_space);
        };
        let room = match purpose {
            Purpose::Contents => self.room_bytes(0),
            Purpose::Checkpoint | Purpose::Copy => self.backed_bytes,
        };
        if len > room {
            return Err(no_space);
        }
        let extent = self.windows.alloc(&mut self.holes, len, purpose);
        let extent = extent.ok_or(no_space)?;
        self.backed_bytes -= len;
        Ok(extent)
    }

    /// Makes `extent`, which no durable checkpoint names, allocatable at once. One that is free
    /// already had two owners on the volume: from then on nothing can be allocated.
    pub fn free_now(&mut self, extent: Extent) {
        let is_taken = self.usable.contains(&extent) && !self.is_free_somewhere(extent);
        if !is_taken {
            self.twice.get_or_insert(extent);
            return;
        }
        self.holes.insert(extent);
        self.backed_bytes += extent.len;
    }

    /// As [`SpaceMap::free_now`], for an extent that the device may have no room for.
    pub fn free_bare(&mut self, extent: Extent) {
        if !self.is_sparse || !self.usable.contains(&extent) || self.is_free_somewhere(extent) {
            return self.free_now(extent);
        }
        self.bare.insert(extent);
    }

    /// Whether any byte of `extent` is free.
    pub fn is_free_somewhere(&self, extent: Extent) -> bool {
        self.holes.overlaps(extent)
            || self.bare.overlaps(extent)
            || self.windows.iter().any(|window| window.overlaps(&extent))
    }

    /// Takes `extent`, which must be free as a whole, backed or bare or partly so, out of the free
    /// space. Says whether it was; if not, it stays as it is. Requires that nothing is about to
    /// become backed or bare.
    pub fn take(&mut self, extent: Extent) -> bool {
        self.windows.close_all(&mut self.holes);
        if extent.validate(self.usable).is_err() {
            return false;
        }
        let Some(pieces) = pieces(extent, &self.holes, &self.bare) else {
            return false;
        };
        for piece in pieces {
            if self.holes.take(piece) {
                self.backed_bytes -= piece.len;
            } else {
                let is_bare = self.bare.take(piece);
                debug_assert!(is_bare, "{piece} is of a hole");
            }
        }
        true
    }

    /// Takes bare extents of about `want` bytes together out of the free space, for the host to
    /// give them room. They begin with the first one at or behind `from`, follow each other, and
    /// reach over `span` bytes at most.
    pub fn begin_backing(&mut self, from: u64, want: u64, span: u64) -> Vec<Extent> {
        self.bare.begin(from, want, span)
    }

    /// As [`SpaceMap::begin_backing`] for one extent of `want` bytes, or of `least` where no bare
    /// one is longer.
    pub fn begin_backing_one(&mut self, want: u64, least: u64) -> Option<Extent> {
        self.bare.begin_one(want, least)
    }

    /// Takes backed holes of `want` bytes together, those with the highest addresses, out of the
    /// free space, to give their room back.
    pub fn begin_baring(&mut self, want: u64) -> Vec<Extent> {
        let (mut taken, mut left) = (Vec::new(), want);
        while let Some(hole) = self.holes.last().filter(|_| left > 0) {
            let part = self.holes.take_back(hole, left);
            left -= part.len;
            self.backed_bytes -= part.len;
            taken.push(part);
        }
        self.bare.begin_baring(&taken);
        taken
    }

    /// Ends all windows, so that their rests are holes. The metadata goes on where it is, if there is
    /// a hole then.
    pub fn close_windows(&mut self) {
        self.windows.close_all_and_resume(&mut self.holes);
    }

    /// Takes up to `count` bare extents from the first one at or behind `from` on out of the free
    /// space, to give room back that an earlier mount took.
    pub fn begin_clearing(&mut self, from: u64, count: usize) -> Vec<Extent> {
        self.bare.begin_some(from, count)
    }

    /// Ends the change that [`SpaceMap::begin_backing`] or [`SpaceMap::begin_baring`] began: the
    /// extents are backed from now on, or bare.
    pub fn end_moving(&mut self, extents: &[Extent], backed: bool) {
        self.bare.end(extents);
        for extent in extents {
            if backed {
                self.holes.insert(*extent);
                self.backed_bytes += extent.len;
            } else {
                self.bare.insert(*extent);
            }
        }
    }

    /// Takes note of an extent that the running commit frees. It becomes allocatable when that
    /// commit is durable ([`SpaceMap::release`]).
    pub fn free_at_commit(&mut self, extent: Extent) {
        if failpoints::is_on(Fault::FreedSpaceReusedEarly) {
            return self.free_now(extent);
        }
        self.pending_bytes += extent.len;
        self.freed.push(extent);
    }

    /// Number of extents that the running commit frees.
    pub fn freed_count(&self) -> usize {
        self.freed.len()
    }

    /// Takes back the freeing of all extents but the first `count`: the commit failed.
    pub fn keep_freed(&mut self, count: usize) {
        for extent in self.freed.drain(count.min(self.freed.len())..) {
            self.pending_bytes -= extent.len;
        }
    }

    /// Hands over the extents freed since the last call; they stay freed-pending.
    pub fn take_freed(&mut self) -> Vec<Extent> {
        std::mem::take(&mut self.freed)
    }

    /// Makes freed-pending extents allocatable.
    pub fn release(&mut self, freed: &[Extent]) {
        for extent in freed {
            self.pending_bytes -= extent.len;
            match self.grown.iter().position(|grown| grown == extent) {
                // The host has not been asked for it yet.
                Some(at) => {
                    self.grown.swap_remove(at);
                    self.free_bare(*extent);
                }
                None => self.free_now(*extent),
            }
        }
        // An area that has grown has a larger reserve.
        self.reserve_bytes = reserve_of(self.usable.len);
    }

    /// Every free extent, windows included, by address; neighbours may touch.
    pub fn free_extents(&self) -> Vec<Extent> {
        let holes = self.holes.iter().chain(self.bare.iter());
        let mut all: Vec<_> = holes.chain(self.windows.iter()).collect();
        all.sort_unstable();
        all
    }
}

/// The parts of `extent`, each of which lies in one backed or bare hole; `None` if a byte of it is
/// in none.
fn pieces(extent: Extent, holes: &Holes, bare: &Bare) -> Option<Vec<Extent>> {
    let mut pieces = Vec::new();
    let mut at = extent.addr;
    while at < extent.end() {
        let next = [holes.first_from(at), bare.first_from(at)];
        let around = next.into_iter().flatten().find(|hole| hole.addr == at)?;
        pieces.push(Extent::new(at, around.len.min(extent.end() - at)));
        at = around.end();
    }
    Some(pieces)
}
