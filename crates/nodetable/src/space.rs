//! The allocator: the space that is free right now, in memory.
//!
//! Holes are indexed by address (to coalesce) and by length (best fit). Small, middle and large
//! requests are served from one *window* each: a stretch carved out of the smallest hole that can
//! hold it and handed out front to back. So the leaves of one flush, allocated in sequence, lie
//! next to each other; small pages do not perforate the space that leaves want; and old holes are
//! used up before fresh space, which keeps a sparse image short.
//!
//! The small class is the metadata: pages, skeletons and short segments of checkpoints. A disk
//! takes one jump to neighbours, so an opened volume goes on behind the newest page
//! ([`SpaceMap::resume`]).
//! Second copies of metadata have a window of their own near the end of the area that is further from
//! the first copies, so that one damaged stretch of the device does not hold both.
//!
//! On a sparse device a free extent is *backed*, when the host has given room for it, or *bare*.
//! Only backed space is handed out, so no write of a node or a page fails for want of room on the
//! host; `backing.rs` makes bare space backed and the reverse. On other devices nothing is bare.
//!
//! The map on disk (`maps.rs`) describes the free space *of a checkpoint*. The free space here is
//! that, less the extents that were allocated since and that no checkpoint names yet, and less the
//! freed-pending ones: freed by a checkpoint that is not durable yet.
//!
//! Keeps: A1, holes and windows are disjoint, aligned, inside of the usable area, and no two backed
//! holes touch, nor do two bare ones. A2, `free_bytes` is their sum.

use ramet_block::failpoints::{self, Fault};
use ramet_block::{BLOCK_BYTES, Extent};

use crate::error::{Error, Result};
use crate::holes::Holes;

/// Largest request of each class but the last, and the window of each class, in bytes.
const CLASS_MAX: [u64; 2] = [16 << 10, 256 << 10];
const WINDOW: [u64; 4] = [1 << 20, 4 << 20, 32 << 20, 1 << 20];
/// The class of second copies.
const COPIES: usize = 3;
/// Holes that are looked at from either end for a window of second copies.
const ENDS_MAX: usize = 64;
/// A request of a checkpoint is small up to this, in bytes.
const METADATA_MAX: u64 = 64 << 10;

/// Smallest reserve in bytes; smaller volumes keep an eighth.
const RESERVE_MIN: u64 = 1 << 20;
/// Most of the reserve that is backed on a sparse device, in bytes: the writes of a checkpoint
/// beside the nodes that are counted apart.
const BACKED_RESERVE_MAX: u64 = 8 << 20;

/// The use of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// New contents: leaves the reserve alone.
    Contents,
    /// Writes that a checkpoint needs to complete: may use the reserve.
    Checkpoint,
    /// The second copy of a page: as `Checkpoint`, far from the first one.
    Copy,
}

impl Purpose {
    fn class_of(self, len: u64) -> usize {
        match self {
            Purpose::Checkpoint if len <= METADATA_MAX => return 0,
            Purpose::Copy => return COPIES,
            _ => {}
        }
        CLASS_MAX.iter().take_while(|&&max| len > max).count()
    }
}

fn reserve_of(bytes: u64) -> u64 {
    let reserve = (bytes / 64).max(RESERVE_MIN.min(bytes / 8));
    reserve.next_multiple_of(BLOCK_BYTES)
}

/// The allocator.
#[derive(Debug)]
pub(crate) struct SpaceMap {
    usable: Extent,
    /// Backed, without the windows.
    holes: Holes,
    windows: [Extent; 4],
    /// Where the first window of the small class is wanted.
    resume: Option<u64>,
    /// Of holes and windows.
    backed_bytes: u64,
    /// Free, and the host has not given room for it.
    bare: Holes,
    /// Free, and about to become backed or bare.
    moving: Vec<Extent>,
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
            windows: [Extent::default(); 4],
            resume: None,
            backed_bytes: 0,
            bare: Holes::default(),
            moving: Vec::new(),
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
        self.pending_bytes += tail.len;
        self.freed.push(tail);
        if self.is_sparse {
            self.grown.push(tail);
        }
        tail
    }

    /// Wants the metadata to come close behind `addr`, where the newest lies, if there is a hole.
    pub fn resume(&mut self, addr: u64) {
        self.resume = Some(addr);
    }

    pub fn free_bytes(&self) -> u64 {
        let moving: u64 = self.moving.iter().map(|extent| extent.len).sum();
        self.backed_bytes + self.bare.bytes() + moving
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
        let moving: u64 = self.moving.iter().map(|extent| extent.len).sum();
        self.usable.len - self.bare.bytes() - moving
    }

    /// Free bytes beyond the reserve, when the host gives `host_bytes` more.
    pub fn room_bytes(&self, host_bytes: u64) -> u64 {
        let free = self.free_bytes();
        let backed = self.backed_bytes.saturating_add(host_bytes).min(free);
        let room = free.saturating_sub(self.reserve_bytes);
        room.min(backed.saturating_sub(self.backed_reserve_bytes()))
    }

    /// Backed bytes beyond the reserve.
    pub fn backed_room_bytes(&self) -> u64 {
        self.room_bytes(0)
    }

    /// Where the first window of the small class is wanted, if it was not opened yet.
    pub fn resumes_at(&self) -> Option<u64> {
        self.resume
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
            Purpose::Contents => self.backed_room_bytes(),
            Purpose::Checkpoint | Purpose::Copy => self.backed_bytes,
        };
        if len > room {
            return Err(no_space);
        }
        let class = purpose.class_of(len);
        if let Some(addr) = self.resume.take() {
            self.open_window_behind(addr);
        }
        if class == COPIES {
            self.leave_first_copies(len);
        }
        if self.windows[class].len < len && !self.refill(class, len) {
            // The rest may be there, only in the windows of other classes.
            for class in 0..self.windows.len() {
                self.close_window(class);
            }
            if !self.refill(class, len) {
                return Err(no_space);
            }
        }
        let window = &mut self.windows[class];
        let extent = Extent::new(window.addr, len);
        *window = Extent::new(window.addr + len, window.len - len);
        self.backed_bytes -= len;
        Ok(extent)
    }

    /// The front or the back of a hole of `len` bytes for second copies: near the end of the area that
    /// is further from the first copies, which have the first window.
    fn far_place(&self, len: u64) -> Option<(Extent, u64)> {
        let first = self.windows[0].addr;
        let lowest = self.holes.lowest(len, ENDS_MAX);
        let ends = [lowest, self.holes.highest(len, ENDS_MAX)];
        let places = ends.into_iter().flatten();
        places
            .chain(self.holes.smallest(len))
            .flat_map(|hole| [(hole, hole.addr), (hole, hole.end() - len)])
            .max_by_key(|(_, addr)| addr.abs_diff(first))
    }

    /// Closes the window of second copies when the first ones came near and there is a far hole.
    fn leave_first_copies(&mut self, len: u64) {
        if !self.is_near_first_copies(self.windows[COPIES].addr) {
            return;
        }
        let far = self.far_place(len);
        if far.is_some_and(|(_, addr)| !self.is_near_first_copies(addr)) {
            self.close_window(COPIES);
        }
    }

    fn is_near_first_copies(&self, addr: u64) -> bool {
        addr.abs_diff(self.windows[0].addr) < self.usable.len / 4
    }

    fn close_window(&mut self, class: usize) {
        let rest = std::mem::take(&mut self.windows[class]);
        if !rest.is_empty() {
            self.holes.insert(rest);
        }
    }

    /// Gives `class` a window of at least `len` bytes: of full size out of the smallest hole that
    /// has it, else the smallest hole that serves this request.
    fn refill(&mut self, class: usize, len: u64) -> bool {
        self.close_window(class);
        let want = self.window_bytes(class).max(len);
        if class == COPIES {
            // Small holes at an end are used before a window is opened near the first copies.
            let places = [want, len].map(|len| self.far_place(len));
            let far = places
                .into_iter()
                .flatten()
                .find(|(_, addr)| !self.is_near_first_copies(*addr));
            let Some((hole, addr)) = far.or(places[0]).or(places[1]) else {
                return false;
            };
            self.windows[class] = if addr == hole.addr {
                self.holes.take_front(hole, want)
            } else {
                self.holes.take_back(hole, want)
            };
            return true;
        }
        let fit = |want: u64| self.holes.smallest(want);
        let Some(hole) = fit(want).or_else(|| fit(len)) else {
            return false;
        };
        self.open_window(class, hole, want);
        true
    }

    fn window_bytes(&self, class: usize) -> u64 {
        // A window must not swallow a small volume.
        let share = (self.usable.len / 64).next_multiple_of(BLOCK_BYTES);
        WINDOW[class].min(share)
    }

    /// Makes the front of `hole` the window of `class`, which has none.
    fn open_window(&mut self, class: usize, hole: Extent, want: u64) {
        self.windows[class] = self.holes.take_front(hole, want);
    }

    /// Gives the small class a window in the first hole behind `addr` that is worth it, if it is
    /// close.
    fn open_window_behind(&mut self, addr: u64) {
        let want = self.window_bytes(0);
        let worth = |hole: &Extent| hole.len >= want.min(METADATA_MAX);
        let found = self
            .holes
            .within(addr..addr.saturating_add(want))
            .find(worth);
        if let Some(hole) = found {
            self.close_window(0);
            self.open_window(0, hole, want);
        }
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
            || self.moving.iter().any(|moving| moving.overlaps(&extent))
            || self.windows.iter().any(|window| window.overlaps(&extent))
    }

    /// Takes `extent`, which must be free as a whole, out of the free space. Says whether it was.
    /// Requires that nothing is about to become backed or bare.
    pub fn take(&mut self, extent: Extent) -> bool {
        for class in 0..self.windows.len() {
            self.close_window(class);
        }
        if extent.validate(self.usable).is_err() {
            return false;
        }
        if self.holes.take(extent) {
            self.backed_bytes -= extent.len;
            return true;
        }
        self.bare.take(extent)
    }

    // ---- backing ----

    /// Takes bare extents of about `want` bytes together out of the free space, for the host to
    /// give them room. They begin with the first one at or behind `from`, follow each other, and
    /// reach over `span` bytes at most.
    pub fn begin_backing(&mut self, from: u64, want: u64, span: u64) -> Vec<Extent> {
        let mut taken = Vec::new();
        let Some(first) = self.bare.first_behind(from) else {
            return taken;
        };
        let reach = first.addr.saturating_add(span);
        let (mut left, mut next) = (want, Some(first));
        while let Some(hole) = next.filter(|hole| left > 0 && hole.addr < reach) {
            let part = self.bare.take_front(hole, left.min(reach - hole.addr));
            left -= part.len;
            taken.push(part);
            next = self.bare.first_behind(part.end());
        }
        self.moving.extend_from_slice(&taken);
        taken
    }

    /// As [`SpaceMap::begin_backing`] for one extent of `want` bytes, or of `least` where no bare
    /// one is longer.
    pub fn begin_backing_one(&mut self, want: u64, least: u64) -> Option<Extent> {
        let fit = |len: u64| self.bare.smallest(len);
        let hole = fit(want).or_else(|| fit(least))?;
        let taken = self.bare.take_front(hole, want);
        self.moving.push(taken);
        Some(taken)
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
        self.moving.extend_from_slice(&taken);
        taken
    }

    /// Ends the change that [`SpaceMap::begin_backing`] or [`SpaceMap::begin_baring`] began: the
    /// extents are backed from now on, or bare.
    pub fn end_moving(&mut self, extents: &[Extent], backed: bool) {
        self.moving.retain(|moving| !extents.contains(moving));
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
        let holes = holes.chain(self.moving.iter().copied());
        let windows = self
            .windows
            .iter()
            .filter(|window| !window.is_empty())
            .copied();
        let mut all: Vec<_> = holes.chain(windows).collect();
        all.sort_unstable();
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn fresh(len: u64) -> SpaceMap {
        let usable = Extent::new(MIB, len);
        let mut space = SpaceMap::new(usable, false);
        space.free_now(usable);
        space
    }

    fn sparse(len: u64) -> SpaceMap {
        let usable = Extent::new(MIB, len);
        let mut space = SpaceMap::new(usable, true);
        space.free_bare(usable);
        space
    }

    fn verify(space: &SpaceMap) {
        let all = space.free_extents();
        assert!(
            all.windows(2).all(|pair| pair[0].end() <= pair[1].addr),
            "A1"
        );
        assert!(
            all.iter()
                .all(|extent| extent.validate(space.usable).is_ok()),
            "A1"
        );
        assert_eq!(
            all.iter().map(|extent| extent.len).sum::<u64>(),
            space.free_bytes(),
            "A2"
        );
    }

    #[test]
    fn extents_allocated_in_sequence_are_contiguous() {
        let mut space = fresh(4096 * MIB);
        let mut last: Option<Extent> = None;
        let mut breaks = 0;
        for i in 0..200 {
            let leaf = space.alloc(MIB, Purpose::Contents).unwrap();
            // Pages and segments that are allocated meanwhile must not lie between the leaves.
            space.alloc(8192, Purpose::Checkpoint).unwrap();
            space
                .alloc(65_536 + 4096 * (i % 7), Purpose::Contents)
                .unwrap();
            breaks += u32::from(last.is_some_and(|last| last.end() != leaf.addr));
            last = Some(leaf);
        }
        assert!(breaks <= 200 / 32, "{breaks} breaks");
        verify(&space);
    }

    #[test]
    fn only_a_checkpoint_may_use_the_reserve_and_it_can_use_it_all() {
        let mut space = fresh(16 * MIB);
        assert_eq!(space.reserve_bytes(), MIB);
        let mut contents = 0;
        while space.alloc(65_536, Purpose::Contents).is_ok() {
            contents += 65_536;
        }
        assert_eq!(contents, 15 * MIB);
        let mut reserve = 0;
        while space.alloc(8192, Purpose::Checkpoint).is_ok() {
            reserve += 8192;
        }
        assert_eq!(reserve, MIB);
        assert!(matches!(
            space.alloc(1, Purpose::Checkpoint),
            Err(Error::NoSpace { wanted_bytes: 1 })
        ));
        verify(&space);
    }

    #[test]
    fn absurd_lengths_are_no_space() {
        let mut space = fresh(16 * MIB);
        for len in [17 * MIB, u64::MAX, u64::MAX - 5000] {
            assert!(matches!(
                space.alloc(len, Purpose::Contents),
                Err(Error::NoSpace { .. })
            ));
        }
    }

    #[test]
    fn freed_at_commit_is_not_reused_before_release() {
        let mut space = fresh(16 * MIB);
        let extent = space.alloc(15 * MIB, Purpose::Contents).unwrap();
        space.free_at_commit(extent);
        assert!(space.alloc(2 * MIB, Purpose::Checkpoint).is_err());
        assert_eq!(space.pending_bytes(), 15 * MIB);
        let freed = space.take_freed();
        space.release(&freed);
        assert_eq!((space.pending_bytes(), space.free_bytes()), (0, 16 * MIB));
        verify(&space);
    }

    #[test]
    fn only_an_extent_that_is_free_as_a_whole_is_taken() {
        let mut space = fresh(16 * MIB);
        let (start, end) = (space.usable.addr, space.usable.end());
        let middle = Extent::new(start + 4 * MIB, MIB);
        assert!(space.take(middle));
        assert!(!space.take(middle), "twice");
        for (addr, len) in [
            (start - 4096, 8192),
            (end - 4096, 8192),
            (start, 0),
            (start + 1, 4096),
            (middle.addr - 4096, 8192),
            (middle.end() - 4096, 8192),
            (u64::MAX - 4095, 4096),
        ] {
            assert!(!space.take(Extent::new(addr, len)), "{addr} {len}");
        }
        assert!(space.take(Extent::new(start, 4 * MIB)));
        assert!(space.take(Extent::new(middle.end(), end - middle.end())));
        assert_eq!(space.free_bytes(), 0);
        verify(&space);
        space.free_now(middle);
        assert!(space.alloc(4096, Purpose::Checkpoint).is_ok());
        assert!(!space.take(middle), "a part is in use");
        verify(&space);
    }

    #[test]
    fn only_backed_extents_are_handed_out() {
        let mut space = sparse(64 * MIB);
        assert_eq!((space.free_bytes(), space.backed_bytes()), (64 * MIB, 0));
        assert!(space.alloc(4096, Purpose::Checkpoint).is_err());

        let front = space.begin_backing(0, 8 * MIB, 64 * MIB);
        assert_eq!(front, [Extent::new(MIB, 8 * MIB)]);
        assert!(space.is_free_somewhere(front[0]), "about to be backed");
        verify(&space);
        space.end_moving(&front, true);
        // The reserve is that of a volume of 8 MiB.
        assert_eq!(space.backed_room_bytes(), 7 * MIB);
        assert_eq!(space.room_bytes(4 * MIB), 11 * MIB);
        assert_eq!(space.room_bytes(u64::MAX), 63 * MIB);
        let used = space.alloc(7 * MIB, Purpose::Contents).unwrap();
        assert!(space.alloc(4096, Purpose::Contents).is_err());
        assert!(space.alloc(MIB, Purpose::Checkpoint).is_ok());
        assert!(space.alloc(4096, Purpose::Checkpoint).is_err());

        // A freed extent is backed; the highest goes first.
        space.free_now(used);
        let back = space.begin_baring(2 * MIB);
        assert_eq!(back, [Extent::new(used.end() - 2 * MIB, 2 * MIB)]);
        space.end_moving(&back, false);
        assert_eq!(space.backed_bytes(), 5 * MIB);
        verify(&space);
        let pieces = space.begin_backing(0, 4 * MIB, 64 * MIB);
        assert_eq!(pieces, [back[0], Extent::new(9 * MIB, 2 * MIB)]);
        space.end_moving(&pieces, false);
        let one = space.begin_backing_one(3 * MIB, 3 * MIB).unwrap();
        assert_eq!(
            one,
            Extent::new(9 * MIB, 3 * MIB),
            "the smallest that is long enough"
        );
        space.end_moving(&[one], false);
        assert!(space.take(Extent::new(20 * MIB, MIB)), "also what is bare");
        verify(&space);
    }

    #[test]
    fn the_new_part_of_a_sparse_device_is_bare() {
        let mut space = sparse(16 * MIB);
        let end = space.usable.end();
        space.grow(end + 16 * MIB);
        let freed = space.take_freed();
        space.release(&freed);
        assert_eq!((space.free_bytes(), space.backed_bytes()), (32 * MIB, 0));
        verify(&space);
    }

    #[test]
    fn the_new_part_of_the_area_is_free_after_the_commit() {
        let mut space = fresh(16 * MIB);
        let most = space.alloc(12 * MIB, Purpose::Contents).unwrap();
        let end = space.usable.end();
        assert_eq!(space.grow(end + 48 * MIB), Extent::new(end, 48 * MIB));
        assert_eq!(
            (space.free_bytes(), space.pending_bytes()),
            (4 * MIB, 48 * MIB)
        );
        assert!(space.alloc(5 * MIB, Purpose::Checkpoint).is_err());
        assert!(space.alloc(2 * MIB, Purpose::Contents).is_ok());
        let freed = space.take_freed();
        space.release(&freed);
        assert!(space.alloc(5 * MIB, Purpose::Contents).is_ok());
        space.free_now(most);
        verify(&space);
    }

    #[test]
    fn old_holes_are_used_before_fresh_space() {
        let mut space = fresh(4096 * MIB);
        let old = space.alloc(64 * MIB, Purpose::Contents).unwrap();
        let _wall = space.alloc(64 * MIB, Purpose::Contents).unwrap();
        space.free_now(old);
        assert!(old.contains(&space.alloc(MIB, Purpose::Contents).unwrap()));
    }

    #[test]
    fn metadata_lies_together_and_apart_from_contents() {
        let mut space = fresh(4096 * MIB);
        let mut last = space.alloc(4096, Purpose::Checkpoint).unwrap();
        for kib in [48, 4, 8, 64, 12, 8].repeat(6) {
            space.alloc(kib << 13, Purpose::Contents).unwrap();
            let next = space.alloc(kib << 10, Purpose::Checkpoint).unwrap();
            assert_eq!(next.addr, last.end());
            last = next;
        }
        let long = space.alloc(METADATA_MAX + 1, Purpose::Checkpoint).unwrap();
        assert!(long.addr > last.end() || long.end() < last.addr);
        assert!(long.addr.abs_diff(last.end()) >= MIB / 4, "another window");
        verify(&space);
    }

    #[test]
    fn an_opened_volume_goes_on_behind_its_newest_page() {
        for (gap, is_close) in [(0, true), (MIB / 2, true), (2 * MIB, false)] {
            let mut space = SpaceMap::new(Extent::new(MIB, 4096 * MIB), false);
            let (old, page) = (Extent::new(16 * MIB, MIB), Extent::new(64 * MIB, 8192));
            let hole = Extent::new(page.end() + gap, 32 * MIB);
            // Best fit, and too small.
            space.free_now(old);
            space.free_now(Extent::new(page.addr - 8192, 8192));
            space.free_now(hole);
            space.resume(page.addr);
            let leaf = space.alloc(MIB / 2, Purpose::Checkpoint).unwrap();
            let next = space.alloc(4096, Purpose::Checkpoint).unwrap();
            let want = if is_close { hole } else { old };
            assert_eq!(next.addr, want.addr, "{gap}");
            assert!(!leaf.overlaps(&next));
            verify(&space);
        }
    }

    #[test]
    fn freeing_twice_ends_all_allocation() {
        let mut space = fresh(16 * MIB);
        let extent = space.alloc(MIB, Purpose::Contents).unwrap();
        space.free_at_commit(extent);
        space.free_now(extent);
        let freed = space.take_freed();
        space.release(&freed);
        assert_eq!((space.free_bytes(), space.pending_bytes()), (16 * MIB, 0));
        let refused = space.alloc(4096, Purpose::Checkpoint);
        let Err(Error::Corrupt { detail, .. }) = refused else {
            panic!("{refused:?}");
        };
        assert!(detail.starts_with("A1"), "{detail}");
        verify(&space);
    }

    #[test]
    fn random_traffic_keeps_the_invariants_and_ends_in_one_hole() {
        let mut state = 12345u64;
        let mut next = move |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963);
            (state >> 33) % below
        };
        let mut space = fresh(64 * MIB);
        let mut live: Vec<Extent> = Vec::new();
        for step in 0..20_000 {
            if live.is_empty() || next(100) < 55 {
                let len = [4096, 8192, 40_000, 300_000, MIB][next(5) as usize];
                let purpose = match next(8) {
                    0 => Purpose::Checkpoint,
                    1 => Purpose::Copy,
                    _ => Purpose::Contents,
                };
                if let Ok(extent) = space.alloc(len, purpose) {
                    assert!(!live.iter().any(|other| other.overlaps(&extent)));
                    live.push(extent);
                }
            } else {
                let extent = live.swap_remove(next(live.len() as u64) as usize);
                if next(2) == 0 {
                    space.free_now(extent);
                } else {
                    space.free_at_commit(extent);
                }
            }
            if step % 97 == 0 {
                let freed = space.take_freed();
                space.release(&freed);
                verify(&space);
            }
        }
        let freed = space.take_freed();
        space.release(&freed);
        for extent in live {
            space.free_now(extent);
        }
        (0..WINDOW.len()).for_each(|class| space.close_window(class));
        assert_eq!(space.free_extents(), [Extent::new(MIB, 64 * MIB)]);
        verify(&space);
    }

    /// Pages of a table that is changed for long: each change writes a page anew and frees the old one.
    #[test]
    fn second_copies_lie_far_from_the_first_ones_on_an_aged_map_too() {
        let mut space = fresh(256 * MIB);
        let mut state = 7u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005) + 1;
            (state >> 33) % below
        };
        let pair = |space: &mut SpaceMap| {
            [Purpose::Checkpoint, Purpose::Copy].map(|purpose| space.alloc(8192, purpose).unwrap())
        };
        let mut pages: Vec<_> = (0..400).map(|_| pair(&mut space)).collect();
        for _ in 0..20_000 {
            let at = next(pages.len() as u64) as usize;
            let new = pair(&mut space);
            for old in std::mem::replace(&mut pages[at], new) {
                space.free_at_commit(old);
            }
            if next(8) == 0 {
                let freed = space.take_freed();
                space.release(&freed);
            }
        }
        let distance = |[first, copy]: &[Extent; 2]| first.addr.abs_diff(copy.addr);
        let least = pages.iter().map(distance).min();
        assert!(least.is_some_and(|least| least > 60 * MIB), "{least:?}");
    }
}
