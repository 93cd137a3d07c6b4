//! The parts of the region that have room on the host of a sparse device.
//!
//! A frame is written to parts that are *backed*: the host has given room for them, so the write
//! does not fail for want of it. The first parts are backed from the start on and stay so; other
//! parts become backed when frames reach them. Where the host refuses, the journal goes on at its
//! first parts, when they are released. So the journal is as long as the host allows, and in any
//! case long enough for the records of removals. The last free space of a host is for contents: the
//! journal does not grow into it, and gives back the space that it took.
//!
//! Parts that an earlier mount took are not known; taking them again has no effect. A volume that is
//! idle gives back all parts but the first ones, those that are not known too.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ramet_block::{Device, Extent, is_no_space};

use crate::sync::Mutex;

/// Room is taken for so many bytes at once.
const PART_BYTES: u64 = 1 << 20;
/// First bytes of the region that are always backed.
pub(super) const KEPT_BYTES: u64 = 4 << 20;
/// Most parts that one call gives back: threads that write wait meanwhile.
const GIVEN_BACK_MAX: usize = 32;
/// With less space left on the host the journal takes no more, unless a long frame needs it.
const LEFT_BYTES: u64 = 16 << 20;
const LONG_BYTES: u64 = KEPT_BYTES / 2;

/// Room of one part on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// An earlier mount may have taken it.
    Unknown,
    Backed,
    GivenBack,
}

/// The reason why parts are given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GiveBack {
    /// The host is short of room; nothing is given back if it is not.
    HostIsShort,
    /// The volume is idle.
    Idle,
}

/// The parts of a journal's region. On a device that is not sparse all parts are backed.
pub(super) struct Backing {
    dev: Arc<dyn Device>,
    region: Extent,
    /// None when the device is not sparse.
    parts: Option<Mutex<Vec<Room>>>,
    /// Held by the thread that takes room or gives it back.
    taking: Mutex<()>,
    /// The host refused when it was last asked.
    is_refused: AtomicBool,
}

impl Backing {
    /// The state of `region` when nothing is known of it yet.
    pub(super) fn new(dev: Arc<dyn Device>, region: Extent) -> Self {
        let count =
            usize::try_from(region.len.div_ceil(PART_BYTES)).expect("a region of few parts");
        let parts = dev
            .is_sparse()
            .then(|| Mutex::new(vec![Room::Unknown; count]));
        Self {
            dev,
            region,
            parts,
            taking: Mutex::default(),
            is_refused: AtomicBool::new(false),
        }
    }

    /// Takes room for the first parts. A host that refuses is asked again when a frame is to be
    /// written.
    pub(super) fn keep_first(&self) {
        let _ = self.secure(0, KEPT_BYTES.min(self.region.len));
    }

    /// Whether all of `[start, end)`, bytes of the region, is backed.
    pub(super) fn is_backed(&self, start: u64, end: u64) -> bool {
        let Some(parts) = &self.parts else {
            return true;
        };
        let parts = parts.lock();
        parts_of(start, end).all(|part| {
            let room = parts.get(part).copied();
            room.unwrap_or(Room::Backed) == Room::Backed
        })
    }

    /// Makes all of `[start, end)` backed.
    ///
    /// # Errors
    /// [`is_no_space`] when the host refuses, else the error of the device.
    pub(super) fn secure(&self, start: u64, end: u64) -> io::Result<()> {
        let Some(parts) = &self.parts else {
            return Ok(());
        };
        if self.is_backed(start, end) {
            return Ok(());
        }
        let _taking = self.taking.lock();
        let grows = start >= KEPT_BYTES && end - start < LONG_BYTES;
        for part in parts_of(start, end.min(self.region.len)) {
            if parts.lock()[part] == Room::Backed {
                continue;
            }
            let (at, len) = self.place_of(part);
            let given = if grows && self.is_host_short() {
                Err(io::ErrorKind::StorageFull.into())
            } else {
                self.dev.allocate(at, len)
            };
            let is_refused = given.as_ref().is_err_and(is_no_space);
            self.is_refused.store(is_refused, Ordering::Relaxed);
            given?;
            parts.lock()[part] = Room::Backed;
        }
        Ok(())
    }

    fn place_of(&self, part: usize) -> (u64, u64) {
        let at = part as u64 * PART_BYTES;
        (self.region.addr + at, PART_BYTES.min(self.region.len - at))
    }

    fn is_host_short(&self) -> bool {
        self.dev.host_free_bytes().unwrap_or(0) < LEFT_BYTES
    }

    /// Whether parts are left that [`Backing::give_back`] would give back while the volume is idle.
    pub(super) fn holds_more(&self, is_used: impl Fn(u64, u64) -> bool) -> bool {
        let Some(parts) = &self.parts else {
            return false;
        };
        let parts = parts.lock();
        self.spare_parts()
            .any(|part| parts[part] != Room::GivenBack && !is_used_part(part, &is_used))
    }

    /// The parts that are not always backed.
    fn spare_parts(&self) -> std::ops::Range<usize> {
        parts_of(KEPT_BYTES.min(self.region.len), self.region.len)
    }

    /// Gives the host back some parts that are neither kept nor in use. Requires that no thread
    /// writes to the region meanwhile. Best effort.
    pub(super) fn give_back(&self, why: GiveBack, is_used: impl Fn(u64, u64) -> bool) {
        let Some(parts) = &self.parts else {
            return;
        };
        if why == GiveBack::HostIsShort && !self.is_host_short() {
            return;
        }
        let _taking = self.taking.lock();
        let mut left = GIVEN_BACK_MAX;
        for part in self.spare_parts() {
            let room = parts.lock()[part];
            let is_wanted = match why {
                GiveBack::HostIsShort => room == Room::Backed,
                GiveBack::Idle => room != Room::GivenBack,
            };
            if !is_wanted || is_used_part(part, &is_used) {
                continue;
            }
            if why == GiveBack::Idle {
                let Some(fewer) = left.checked_sub(1) else {
                    return;
                };
                left = fewer;
            }
            parts.lock()[part] = Room::GivenBack;
            if why == GiveBack::HostIsShort {
                self.is_refused.store(true, Ordering::Relaxed);
            }
            let (at, len) = self.place_of(part);
            // A part that stays allocated is taken again without effect.
            let _ = self.dev.discard(at, len);
        }
    }

    /// Whether the host gave no room when it was last asked.
    pub(super) fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }
}

fn is_used_part(part: usize, is_used: impl Fn(u64, u64) -> bool) -> bool {
    let start = part as u64 * PART_BYTES;
    is_used(start, start + PART_BYTES)
}

fn parts_of(start: u64, end: u64) -> std::ops::Range<usize> {
    let part = |addr: u64| usize::try_from(addr).expect("a region of few parts");
    part(start / PART_BYTES)..part(end.div_ceil(PART_BYTES))
}
