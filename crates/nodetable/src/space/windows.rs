//! Windows: the places from which requests of one class are served.
//!
//! Small, middle and large requests are served from one window each: a stretch carved out of the
//! smallest hole that can hold it and handed out front to back. So the leaves of one flush,
//! allocated in sequence, lie next to each other; small pages do not perforate the space that
//! leaves want; and old holes are used up before fresh space, which keeps a sparse image short.
//!
//! The small class is the metadata: pages, skeletons and short segments of checkpoints. A disk
//! takes one jump to neighbours, so an opened volume goes on behind the newest page
//! ([`Windows::resume`]). Second copies of metadata have a window of their own near the end of the
//! area that is further from the first copies, so that one damaged stretch of the device does not
//! hold both.

use ramet_block::{BLOCK_BYTES, Extent};

use super::holes::{Holes, is_short};

/// Largest request of each class but the last, and the window of each class, in bytes.
const CLASS_MAX: [u64; 2] = [16 << 10, 256 << 10];
const WINDOW: [u64; 4] = [1 << 20, 4 << 20, 32 << 20, 1 << 20];
/// The class of second copies.
const COPIES: usize = 3;
/// Holes that are looked at from either end for a window of second copies.
const ENDS_MAX: usize = 64;
/// Space is scarce while the holes that are not short are less than this part of the area.
const SCARCE_PART: u64 = 16;
/// A request of a checkpoint is small up to this, in bytes.
pub(super) const METADATA_MAX: u64 = 64 << 10;

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

/// One window a class, cut out of the holes of an area.
#[derive(Debug)]
pub(super) struct Windows {
    open: [Extent; 4],
    /// Where the first window of the small class is wanted.
    resume: Option<u64>,
    area_bytes: u64,
}

impl Windows {
    /// Closed windows of an area of `area_bytes`.
    pub fn new(area_bytes: u64) -> Self {
        Self {
            open: [Extent::default(); 4],
            resume: None,
            area_bytes,
        }
    }

    /// Takes note that the area is `area_bytes` long.
    pub fn grow(&mut self, area_bytes: u64) {
        self.area_bytes = area_bytes;
    }

    /// Wants the metadata to come close behind `addr`, where the newest lies, if there is a hole.
    pub fn resume(&mut self, addr: u64) {
        self.resume = Some(addr);
    }

    /// Where the first window of the small class is wanted, if it was not opened yet.
    pub fn resumes_at(&self) -> Option<u64> {
        self.resume
    }

    /// The windows that are not empty.
    pub fn iter(&self) -> impl Iterator<Item = Extent> {
        self.open
            .iter()
            .filter(|window| !window.is_empty())
            .copied()
    }

    /// Makes all windows holes again.
    pub fn close_all(&mut self, holes: &mut Holes) {
        (0..WINDOW.len()).for_each(|class| self.close(holes, class));
    }

    /// Likewise; the first window of the small class is wanted again where the metadata is.
    pub fn close_all_and_resume(&mut self, holes: &mut Holes) {
        let metadata = self.open[0];
        self.close_all(holes);
        if !metadata.is_empty() {
            self.resume = Some(metadata.addr);
        }
    }

    /// An extent of `len` bytes, a multiple of a block, out of the window of its class or of a new
    /// one; `None` when no hole is long enough.
    pub fn alloc(&mut self, holes: &mut Holes, len: u64, purpose: Purpose) -> Option<Extent> {
        let class = purpose.class_of(len);
        if let Some(addr) = self.resume.take() {
            self.open_behind(holes, addr);
        }
        if class == COPIES {
            self.leave_first_copies(holes, len);
        } else if let Some(hole) = self.short_hole(holes, len) {
            return Some(holes.take_front(hole, len));
        }
        if self.open[class].len < len && !self.refill(holes, class, len) {
            // The rest may be there, only in the windows of other classes.
            self.close_all(holes);
            if !self.refill(holes, class, len) {
                return None;
            }
        }
        let window = &mut self.open[class];
        let extent = Extent::new(window.addr, len);
        *window = Extent::new(window.addr + len, window.len - len);
        Some(extent)
    }

    /// A hole that is too short for a page, for a request that fits in it, where space is scarce:
    /// short holes are used up first then.
    fn short_hole(&self, holes: &Holes, len: u64) -> Option<Extent> {
        let longer = holes.bytes() - holes.short_bytes();
        let is_scarce = longer < self.area_bytes / SCARCE_PART;
        let hole = (is_scarce && holes.short_bytes() > 0).then(|| holes.smallest(len));
        hole.flatten().filter(|hole| is_short(hole.len))
    }

    /// The front or the back of a hole of `len` bytes for second copies: near the end of the area that
    /// is further from the first copies, which have the first window.
    fn far_place(&self, holes: &Holes, len: u64) -> Option<(Extent, u64)> {
        let first = self.open[0].addr;
        let lowest = holes.lowest(len, ENDS_MAX);
        let ends = [lowest, holes.highest(len, ENDS_MAX)];
        let places = ends.into_iter().flatten();
        places
            .chain(holes.smallest(len))
            .flat_map(|hole| [(hole, hole.addr), (hole, hole.end() - len)])
            .max_by_key(|(_, addr)| addr.abs_diff(first))
    }

    /// Closes the window of second copies when the first ones came near and there is a far hole.
    fn leave_first_copies(&mut self, holes: &mut Holes, len: u64) {
        if !self.is_near_first_copies(self.open[COPIES].addr) {
            return;
        }
        let far = self.far_place(holes, len);
        if far.is_some_and(|(_, addr)| !self.is_near_first_copies(addr)) {
            self.close(holes, COPIES);
        }
    }

    fn is_near_first_copies(&self, addr: u64) -> bool {
        addr.abs_diff(self.open[0].addr) < self.area_bytes / 4
    }

    /// Makes the rest of a window a hole again.
    fn close(&mut self, holes: &mut Holes, class: usize) {
        let rest = std::mem::take(&mut self.open[class]);
        if !rest.is_empty() {
            holes.insert(rest);
        }
    }

    /// Gives `class` a window of at least `len` bytes: of full size out of the smallest hole that
    /// has it, else the smallest hole that serves this request.
    fn refill(&mut self, holes: &mut Holes, class: usize, len: u64) -> bool {
        self.close(holes, class);
        let want = self.window_bytes(class).max(len);
        if class == COPIES {
            // Small holes at an end are used before a window is opened near the first copies.
            let places = [want, len].map(|len| self.far_place(holes, len));
            let far = places
                .into_iter()
                .flatten()
                .find(|(_, addr)| !self.is_near_first_copies(*addr));
            let Some((hole, addr)) = far.or(places[0]).or(places[1]) else {
                return false;
            };
            self.open[class] = if addr == hole.addr {
                holes.take_front(hole, want)
            } else {
                holes.take_back(hole, want)
            };
            return true;
        }
        let fit = |want: u64| holes.smallest(want);
        let Some(hole) = fit(want).or_else(|| fit(len)) else {
            return false;
        };
        self.open[class] = holes.take_front(hole, want);
        true
    }

    fn window_bytes(&self, class: usize) -> u64 {
        // A window must not swallow a small volume.
        let share = (self.area_bytes / 64).next_multiple_of(BLOCK_BYTES);
        WINDOW[class].min(share)
    }

    /// Gives the small class a window in the first hole behind `addr` that is worth it, if it is
    /// close.
    fn open_behind(&mut self, holes: &mut Holes, addr: u64) {
        let want = self.window_bytes(0);
        let worth = |hole: &Extent| hole.len >= want.min(METADATA_MAX);
        let found = holes.within(addr..addr.saturating_add(want)).find(worth);
        if let Some(hole) = found {
            self.close(holes, 0);
            self.open[0] = holes.take_front(hole, want);
        }
    }
}
