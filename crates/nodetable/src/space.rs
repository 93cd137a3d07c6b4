//! Which space is free right now: the allocator, in memory.
//!
//! Holes are indexed by address (to coalesce) and by length (best fit). Small, middle and large
//! requests are served from one *window* each: a stretch carved out of the smallest hole that can
//! hold it and handed out front to back. So the leaves of one flush, allocated in sequence, lie next
//! to each other; small pages do not perforate the space that leaves want; and old holes are used
//! up before fresh space, which keeps a sparse image short.
//!
//! The small class is the metadata: pages, skeletons and short segments of checkpoints. A disk takes one
//! jump to what lies together, so an opened volume goes on behind the newest page ([`SpaceMap::resume`]).
//!
//! The map on disk (`maps.rs`) describes the free space *of a checkpoint*. What is free here is that,
//! less what was allocated since and is named by no checkpoint yet, and less what is freed-pending:
//! freed by a checkpoint that is not durable yet.
//!
//! Keeps: A1, holes and windows are disjoint, aligned, inside of the usable area, and no two holes
//! touch. A2, `free_bytes` is their sum.

use std::collections::{BTreeMap, BTreeSet};

use ramet_block::planted::{self, Fault};
use ramet_block::{BLOCK_BYTES, Extent};

use crate::error::{Error, Result};

/// Largest request of each class but the last, and the window of each class, in bytes.
const CLASS_MAX: [u64; 2] = [16 << 10, 256 << 10];
const WINDOW: [u64; 3] = [1 << 20, 4 << 20, 32 << 20];
/// What a checkpoint writes is small up to this, in bytes.
const METADATA_MAX: u64 = 64 << 10;

/// Smallest reserve in bytes; smaller volumes keep an eighth.
const RESERVE_MIN: u64 = 1 << 20;

/// Who asks for space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// New contents: leaves the reserve alone.
    Contents,
    /// What a checkpoint needs to complete: may use the reserve.
    Checkpoint,
}

impl Purpose {
    fn class_of(self, len: u64) -> usize {
        if self == Purpose::Checkpoint && len <= METADATA_MAX {
            return 0;
        }
        CLASS_MAX.iter().take_while(|&&max| len > max).count()
    }
}

fn reserve_of(usable: Extent) -> u64 {
    let reserve = (usable.len / 64).max(RESERVE_MIN.min(usable.len / 8));
    reserve.next_multiple_of(BLOCK_BYTES)
}

/// The allocator.
#[derive(Debug)]
pub(crate) struct SpaceMap {
    usable: Extent,
    by_addr: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
    windows: [Extent; 3],
    /// Where the first window of the small class is wanted.
    resume: Option<u64>,
    free_bytes: u64,
    reserve_bytes: u64,
    freed: Vec<Extent>,
    pending_bytes: u64,
    /// What was freed though it was free, because the volume names it twice: nothing is allocated any more.
    twice: Option<Extent>,
}

impl SpaceMap {
    /// An allocator over `usable` in which nothing is free.
    pub fn new(usable: Extent) -> Self {
        Self {
            usable,
            by_addr: BTreeMap::new(),
            by_len: BTreeSet::new(),
            windows: [Extent::default(); 3],
            resume: None,
            free_bytes: 0,
            reserve_bytes: reserve_of(usable),
            freed: Vec::new(),
            pending_bytes: 0,
            twice: None,
        }
    }

    /// Makes the area end at `end`. What is new becomes allocatable like what the next commit frees.
    pub fn grow(&mut self, end: u64) -> Extent {
        let tail = Extent::new(self.usable.end(), end - self.usable.end());
        self.usable.len += tail.len;
        self.pending_bytes += tail.len;
        self.freed.push(tail);
        tail
    }

    /// Wants the metadata to come close behind `addr`, where the newest lies, if there is a hole.
    pub fn resume(&mut self, addr: u64) {
        self.resume = Some(addr);
    }

    pub fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    pub fn reserve_bytes(&self) -> u64 {
        self.reserve_bytes
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
        let keep = match purpose {
            Purpose::Contents => self.reserve_bytes,
            Purpose::Checkpoint => 0,
        };
        if len
            .checked_add(keep)
            .is_none_or(|want| want > self.free_bytes)
        {
            return Err(no_space);
        }
        let class = purpose.class_of(len);
        if let Some(addr) = self.resume.take() {
            self.open_window_behind(addr);
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
        self.free_bytes -= len;
        Ok(extent)
    }

    fn close_window(&mut self, class: usize) {
        let rest = std::mem::take(&mut self.windows[class]);
        if !rest.is_empty() {
            self.insert_hole(rest);
        }
    }

    /// Gives `class` a window of at least `len` bytes: of full size out of the smallest hole that
    /// has it, else the smallest hole that serves this request.
    fn refill(&mut self, class: usize, len: u64) -> bool {
        self.close_window(class);
        let want = self.window_bytes(class).max(len);
        let fit = |want: u64| self.by_len.range((want, 0)..).next().copied();
        let Some((hole_len, addr)) = fit(want).or_else(|| fit(len)) else {
            return false;
        };
        self.open_window(class, Extent::new(addr, hole_len), want);
        true
    }

    fn window_bytes(&self, class: usize) -> u64 {
        // A window must not swallow a small volume.
        let share = (self.usable.len / 64).next_multiple_of(BLOCK_BYTES);
        WINDOW[class].min(share)
    }

    /// Makes the front of `hole` the window of `class`, which has none.
    fn open_window(&mut self, class: usize, hole: Extent, want: u64) {
        self.remove_hole(hole.addr, hole.len);
        let take = want.min(hole.len);
        if take < hole.len {
            self.insert_hole(Extent::new(hole.addr + take, hole.len - take));
        }
        self.windows[class] = Extent::new(hole.addr, take);
    }

    /// Gives the small class a window in the first hole behind `addr` that is worth it, if it is close.
    fn open_window_behind(&mut self, addr: u64) {
        let want = self.window_bytes(0);
        let close = self.by_addr.range(addr..addr.saturating_add(want));
        let worth = |len: u64| len >= want.min(METADATA_MAX);
        let found = close
            .map(|(&addr, &len)| Extent::new(addr, len))
            .find(|hole| worth(hole.len));
        if let Some(hole) = found {
            self.close_window(0);
            self.open_window(0, hole, want);
        }
    }

    fn remove_hole(&mut self, addr: u64, len: u64) {
        self.by_addr.remove(&addr);
        self.by_len.remove(&(len, addr));
    }

    fn insert_hole(&mut self, extent: Extent) {
        let (mut addr, mut len) = (extent.addr, extent.len);
        let before = self
            .by_addr
            .range(..addr)
            .next_back()
            .map(|(&a, &l)| (a, l));
        let after = self.by_addr.range(addr..).next().map(|(&a, &l)| (a, l));
        if let Some((a, l)) = before
            && a + l == addr
        {
            self.remove_hole(a, l);
            addr = a;
            len += l;
        }
        if let Some((a, l)) = after
            && addr + len == a
        {
            self.remove_hole(a, l);
            len += l;
        }
        self.by_addr.insert(addr, len);
        self.by_len.insert((len, addr));
    }

    /// Makes `extent`, which no durable checkpoint names, allocatable at once. One that is free already had two owners
    /// on the volume: from then on nothing can be allocated.
    pub fn free_now(&mut self, extent: Extent) {
        let is_taken = self.usable.contains(&extent) && !self.is_free_somewhere(extent);
        if !is_taken {
            self.twice.get_or_insert(extent);
            return;
        }
        self.insert_hole(extent);
        self.free_bytes += extent.len;
    }

    /// Whether any byte of `extent` is free.
    pub fn is_free_somewhere(&self, extent: Extent) -> bool {
        let hole = self.by_addr.range(..extent.end()).next_back();
        hole.is_some_and(|(&addr, &len)| addr + len > extent.addr)
            || self.windows.iter().any(|window| window.overlaps(&extent))
    }

    /// Takes `extent`, which must be free as a whole, out of the free space. Says whether it was.
    pub fn take(&mut self, extent: Extent) -> bool {
        for class in 0..self.windows.len() {
            self.close_window(class);
        }
        let hole = self.by_addr.range(..=extent.addr).next_back();
        let Some((&addr, &len)) = hole else {
            return false;
        };
        let hole = Extent::new(addr, len);
        if extent.validate(self.usable).is_err() || !hole.contains(&extent) {
            return false;
        }
        self.remove_hole(addr, len);
        for rest in [
            Extent::new(addr, extent.addr - addr),
            Extent::new(extent.end(), hole.end() - extent.end()),
        ] {
            if !rest.is_empty() {
                self.insert_hole(rest);
            }
        }
        self.free_bytes -= extent.len;
        true
    }

    /// Takes note of an extent that the running commit frees. It becomes allocatable when that
    /// commit is durable ([`SpaceMap::release`]).
    pub fn free_at_commit(&mut self, extent: Extent) {
        if planted::is(Fault::FreedSpaceReusedEarly) {
            return self.free_now(extent);
        }
        self.pending_bytes += extent.len;
        self.freed.push(extent);
    }

    /// Hands over what has been freed since the last call; it stays freed-pending.
    pub fn take_freed(&mut self) -> Vec<Extent> {
        std::mem::take(&mut self.freed)
    }

    /// Makes freed-pending extents allocatable.
    pub fn release(&mut self, freed: &[Extent]) {
        for extent in freed {
            self.pending_bytes -= extent.len;
            self.free_now(*extent);
        }
        // Of an area that has grown more is kept back, once it is there.
        self.reserve_bytes = reserve_of(self.usable);
    }

    /// Every free extent, windows included, by address; neighbours may touch.
    pub fn free_extents(&self) -> Vec<Extent> {
        let holes = self
            .by_addr
            .iter()
            .map(|(&addr, &len)| Extent::new(addr, len));
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
        let mut space = SpaceMap::new(usable);
        space.free_now(usable);
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
            space.free_bytes,
            "A2"
        );
        assert_eq!(space.by_addr.len(), space.by_len.len());
    }

    #[test]
    fn extents_allocated_in_sequence_are_contiguous() {
        let mut space = fresh(4096 * MIB);
        let mut last: Option<Extent> = None;
        let mut breaks = 0;
        for i in 0..200 {
            let leaf = space.alloc(MIB, Purpose::Contents).unwrap();
            // Pages and segments in between must not come in between.
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
    fn only_what_is_free_as_a_whole_is_taken() {
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
    fn what_is_new_is_free_after_the_commit() {
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
            let mut space = SpaceMap::new(Extent::new(MIB, 4096 * MIB));
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
                let purpose = if next(4) == 0 {
                    Purpose::Checkpoint
                } else {
                    Purpose::Contents
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
        (0..3).for_each(|class| space.close_window(class));
        assert_eq!(space.free_extents(), [Extent::new(MIB, 64 * MIB)]);
        verify(&space);
    }
}
