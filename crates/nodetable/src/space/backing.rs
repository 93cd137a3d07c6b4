//! Room of the host below a sparse device: taken before it is promised, given back when much of it
//! is free.
//!
//! ```text
//!            secure, alloc: Device::allocate
//!   bare  ───────────────────────────────────>  backed ──> allocated
//!         <───────────────────────────────────         <── freed
//!            trim: Device::discard
//! ```
//!
//! A host that is full refuses to give room. The volume is then as full as a volume of the backed
//! size, and the same rules keep it in order, the reserve first of all. So the reserve has to be
//! backed itself, from the first write on. No write of the volume meets the host's limit later.
//!
//! Room is taken in steps, from the lowest addresses on, and given back from the highest ones. Some
//! is kept for the next writes. So the image stays short. The volume does not record which free
//! extents are backed. A volume that is opened on a full host finds the room that an earlier mount
//! took, since allocating a backed extent again takes nothing. It looks for that once, by some
//! thousand calls of the host, and gives up on a host that is slow to refuse. The search begins
//! where the metadata goes on. At the first piece that the host refuses there it turns to the
//! lowest addresses, where most of the room is that was kept.
//!
//! The host is asked for its free space when room is taken, when it runs short, and by the caller
//! now and then. In between the last answer counts, less the room taken since. This figure is a
//! guess, for statistics and for hopes. A promise rests on backed space alone.
//!
//! Concurrency: one thread at a time takes room or gives it back, and does so without the lock of
//! the allocator.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use ramet_block::{BLOCK_BYTES, Device, Extent};

use super::map::SpaceMap;
use super::windows::Purpose;
use crate::error::{Error, Result};

/// Least and most room that is taken at once, in bytes, and its part of the space that the volume
/// takes.
const STEP_MIN: u64 = 2 << 20;
const STEP_MAX: u64 = 32 << 20;
const STEP_PART: u64 = 16;
/// An idle volume keeps less room than this beyond its reserves, in bytes.
const SPARE_MAX: u64 = 256 << 10;
/// One call of the host reaches so far, over allocated extents, to find bare ones.
const SPAN_MAX: u64 = 64 << 20;
/// Pieces in which the room of an earlier mount is looked for on a full host, in bytes, and how
/// many. A volume of up to 64 MiB is looked through block by block: it needs all that it has. Of a
/// larger one, a piece of which the host has a part is not found.
const PIECE_MAX: u64 = 256 << 10;
const PIECES_MAX: u32 = 1 << 14;
/// Longest search, while which writers wait: btrfs takes some milliseconds to refuse a piece.
const SEARCH_MAX: Duration = Duration::from_secs(1);
/// A host that refused is asked again when it has so many more bytes free.
const MORE: u64 = 256 << 10;

/// The allocator of a device, and knowledge about the host below a sparse one.
pub(crate) struct BackedSpace {
    device: Arc<dyn Device>,
    is_sparse: bool,
    map: Mutex<SpaceMap>,
    /// The last answer of the host.
    free_bytes: AtomicU64,
    /// Free bytes of the host when it last refused; [`NEVER`] when it did not. Until it has some
    /// more it is not asked again.
    refused_at: AtomicU64,
    /// All room that an earlier mount took was looked for on a full host.
    is_searched: AtomicBool,
    /// Held by the thread that takes room or gives it back.
    taking: Mutex<()>,
}

const NEVER: u64 = u64::MAX;

fn step_of(capacity_bytes: u64) -> u64 {
    let step = (capacity_bytes / STEP_PART).clamp(STEP_MIN, STEP_MAX);
    step.next_multiple_of(BLOCK_BYTES)
}

/// Where to look for bare extents.
struct Search {
    from: u64,
    step: u64,
    piece: u64,
    /// The first round begins where the metadata goes on, the second one at the lowest address.
    is_second_round: bool,
    pieces_left: u32,
    began: Instant,
}

impl Search {
    /// Goes on at the lowest address, over the whole area. Says whether it does: not a second time.
    fn begin_second_round(&mut self) -> bool {
        if self.is_second_round {
            return false;
        }
        (self.is_second_round, self.from, self.began) = (true, 0, Instant::now());
        true
    }
}

impl BackedSpace {
    /// An allocator over `usable` in which nothing is free.
    pub(crate) fn new(device: Arc<dyn Device>, usable: Extent) -> Self {
        let is_sparse = device.is_sparse();
        let space = Self {
            device,
            is_sparse,
            map: Mutex::new(SpaceMap::new(usable, is_sparse)),
            free_bytes: AtomicU64::new(0),
            refused_at: AtomicU64::new(NEVER),
            is_searched: AtomicBool::new(false),
            taking: Mutex::new(()),
        };
        space.look_at_host();
        space
    }

    /// The allocator. Its lock is for memory operations only.
    pub(crate) fn lock(&self) -> MutexGuard<'_, SpaceMap> {
        self.map.lock()
    }

    /// Whether the device takes room of a host.
    pub(crate) fn is_sparse(&self) -> bool {
        self.is_sparse
    }

    fn is_host_full(&self) -> bool {
        let refused_at = self.refused_at.load(Ordering::Relaxed);
        let free = self.free_bytes.load(Ordering::Relaxed);
        refused_at != NEVER && free < refused_at.saturating_add(MORE)
    }

    /// Asks the host for its free space. An answer that fails counts as none.
    pub(crate) fn look_at_host(&self) {
        if self.is_sparse {
            let free = self.device.host_free_bytes().unwrap_or(0);
            self.free_bytes.store(free, Ordering::Relaxed);
        }
    }

    /// Bytes that the host still gives, as far as is known.
    pub(crate) fn host_free_bytes(&self) -> u64 {
        if !self.is_sparse || self.is_host_full() {
            return 0;
        }
        self.free_bytes.load(Ordering::Relaxed)
    }

    /// As [`BackedSpace::room_bytes`], without the holes that are too short for a page.
    pub(crate) fn room_for_pages_bytes(&self) -> u64 {
        let host = self.host_free_bytes();
        let space = self.lock();
        space.room_bytes(host).saturating_sub(space.short_bytes())
    }

    /// Free bytes beyond the reserve, if the host keeps the space that it seems to have.
    pub(crate) fn room_bytes(&self) -> u64 {
        let host = self.host_free_bytes();
        self.lock().room_bytes(host)
    }

    /// Has `want` free bytes beyond the reserve backed, and takes room of the host for that if need
    /// be. Says whether they are.
    pub(crate) fn secure(&self, want: u64) -> bool {
        let (room, could_be) = {
            let space = self.lock();
            (space.room_bytes(0), space.room_bytes(u64::MAX))
        };
        if room >= want {
            return true;
        }
        // A full volume, or one whose host is known to be full.
        if !self.is_sparse || could_be < want || self.is_host_full() {
            return false;
        }
        self.take_room(want)
    }

    /// As [`BackedSpace::secure`], without the holes that are too short for a page.
    pub(crate) fn secure_for_pages(&self, want: u64) -> bool {
        let short = {
            let space = self.lock();
            let short = space.short_bytes();
            if space.room_bytes(0).saturating_sub(short) >= want {
                return true;
            }
            short
        };
        self.room_for_pages_bytes() >= want && self.secure(want.saturating_add(short))
    }

    fn take_room(&self, want: u64) -> bool {
        let _taking = self.taking.lock();
        let mut search = None;
        loop {
            let (extents, search) = {
                let mut space = self.lock();
                let room = space.room_bytes(0);
                if room >= want {
                    return true;
                }
                let search = search.get_or_insert_with(|| Search {
                    from: space.resumes_at().unwrap_or(0),
                    step: step_of(space.capacity_bytes())
                        .max(want - room)
                        .next_multiple_of(BLOCK_BYTES),
                    piece: (space.bare_bytes() / u64::from(PIECES_MAX))
                        .next_multiple_of(BLOCK_BYTES)
                        .clamp(BLOCK_BYTES, PIECE_MAX),
                    is_second_round: space.resumes_at().is_none(),
                    pieces_left: match self.is_searched.load(Ordering::Relaxed) {
                        true => 1,
                        false => PIECES_MAX,
                    },
                    began: Instant::now(),
                });
                // One backed piece of an earlier mount says nothing of the next piece.
                let span = if search.step > search.piece {
                    SPAN_MAX
                } else {
                    search.piece
                };
                let extents = space.begin_backing(search.from, search.step, span);
                (extents, search)
            };
            if let (Some(first), Some(last)) = (extents.first(), extents.last()) {
                let span = Extent::new(first.addr, last.end() - first.addr);
                if self.back(&extents, span) {
                    continue;
                }
                // The host may have some of it, or an earlier mount may have taken it.
                if search.step > search.piece {
                    let step = (search.step / 4).next_multiple_of(BLOCK_BYTES);
                    search.step = step.max(search.piece);
                    continue;
                }
                if search.begin_second_round() {
                    continue;
                }
                let is_slow = search.began.elapsed() > SEARCH_MAX;
                search.pieces_left = if is_slow { 0 } else { search.pieces_left - 1 };
                search.from = span.end();
            } else if !search.begin_second_round() {
                search.pieces_left = 0;
            }
            if search.pieces_left == 0 {
                self.is_searched.store(true, Ordering::Relaxed);
                self.look_at_host();
                let free = self.free_bytes.load(Ordering::Relaxed);
                self.refused_at.store(free, Ordering::Relaxed);
                return false;
            }
        }
    }

    /// Allocates `span`, in which the bare `extents` lie. Says whether they are backed now.
    fn back(&self, extents: &[Extent], span: Extent) -> bool {
        let given = self.device.allocate(span.addr, span.len);
        self.lock().end_moving(extents, given.is_ok());
        self.look_at_host();
        given.is_ok()
    }

    /// An extent of `len_bytes`, rounded up to blocks, for which the host has room.
    pub(crate) fn alloc(&self, len_bytes: u64, purpose: Purpose) -> Result<Extent> {
        let refused = match self.lock().alloc(len_bytes, purpose) {
            Err(error @ Error::NoSpace { .. }) if self.is_sparse && !self.is_host_full() => error,
            done => return done,
        };
        // There may be room in pieces, or more than was secured may be wanted.
        let taking = self.taking.lock();
        let len = len_bytes.next_multiple_of(BLOCK_BYTES);
        for want in [len.max(STEP_MIN), len] {
            let extent = self.lock().begin_backing_one(want, len);
            let Some(extent) = extent else {
                return Err(refused);
            };
            if self.back(&[extent], extent) {
                drop(taking);
                return self.lock().alloc(len_bytes, purpose);
            }
        }
        Err(refused)
    }

    /// Gives the host back the backed space beyond `keep` bytes and a step, once it is two steps.
    /// Best effort.
    pub(crate) fn trim(&self, keep: u64) {
        if !self.is_sparse {
            return;
        }
        let _taking = self.taking.lock();
        let extents = {
            let mut space = self.lock();
            let step = step_of(space.capacity_bytes());
            let spare = space.room_bytes(0).saturating_sub(keep);
            match spare.checked_sub(2 * step) {
                None => return,
                Some(_) => space.begin_baring((spare - step) / BLOCK_BYTES * BLOCK_BYTES),
            }
        };
        self.bare(&extents, true);
    }

    /// Gives the host back all backed space beyond `keep` bytes and the least step, once it is more
    /// than a little: the volume is idle. Best effort.
    pub(crate) fn trim_all(&self, keep: u64) {
        if !self.is_sparse {
            return;
        }
        let _taking = self.taking.lock();
        let extents = {
            let mut space = self.lock();
            // Others may take the rest of the host meanwhile.
            let spare = space.room_bytes(0).saturating_sub(keep + STEP_MIN);
            if spare < SPARE_MAX {
                return;
            }
            space.close_windows();
            space.begin_baring(spare / BLOCK_BYTES * BLOCK_BYTES)
        };
        self.bare(&extents, true);
    }

    /// Gives the host back room below `count` bare extents from `from` on, which an earlier mount
    /// may have taken; returns where to go on. Best effort.
    pub(crate) fn clear_bare(&self, from: u64, count: usize) -> Option<u64> {
        if !self.is_sparse {
            return None;
        }
        let _taking = self.taking.lock();
        let extents = self.lock().begin_clearing(from, count);
        self.bare(&extents, false);
        let is_last = extents.len() < count;
        extents
            .last()
            .filter(|_| !is_last)
            .map(|extent| extent.end())
    }

    /// Discards extents that are about to become bare. When that fails, the rest stays as it was:
    /// backed or not.
    fn bare(&self, mut extents: &[Extent], were_backed: bool) {
        while let [extent, rest @ ..] = extents {
            let given_back = self.device.discard(extent.addr, extent.len);
            // Some of it may be gone in any case.
            self.lock().end_moving(&[*extent], false);
            extents = rest;
            if given_back.is_err() {
                break;
            }
        }
        self.lock().end_moving(extents, were_backed);
        self.look_at_host();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io;

    use ramet_block::MemDevice;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A host that gives room in pieces of this length, most often 256 KiB.
    struct Hosted {
        device: MemDevice,
        piece: u64,
        room: Mutex<(u64, BTreeSet<u64>)>,
        refusals: AtomicU64,
        refuses_after: Duration,
    }

    impl Hosted {
        fn new(free: u64) -> Arc<Self> {
            Self::of(MORE, free)
        }

        fn of(piece: u64, free: u64) -> Arc<Self> {
            Arc::new(Self {
                device: MemDevice::new(64 * MIB),
                piece,
                room: Mutex::new((free, BTreeSet::new())),
                refusals: AtomicU64::new(0),
                refuses_after: Duration::ZERO,
            })
        }

        fn pieces(&self, addr: u64, len: u64) -> impl Iterator<Item = u64> {
            addr / self.piece..(addr + len).div_ceil(self.piece)
        }
    }

    impl Device for Hosted {
        fn len_bytes(&self) -> u64 {
            self.device.len_bytes()
        }

        fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
            self.device.read_at(addr, buf)
        }

        fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
            self.allocate(addr, buf.len() as u64)?;
            self.device.write_at(addr, buf)
        }

        fn sync(&self) -> io::Result<()> {
            Ok(())
        }

        fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
            let mut room = self.room.lock();
            for piece in addr.div_ceil(self.piece)..(addr + len_bytes) / self.piece {
                room.0 += u64::from(room.1.remove(&piece)) * self.piece;
            }
            Ok(())
        }

        fn is_sparse(&self) -> bool {
            true
        }

        fn host_free_bytes(&self) -> io::Result<u64> {
            Ok(self.room.lock().0)
        }

        fn allocate(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
            let mut room = self.room.lock();
            let new: Vec<_> = self
                .pieces(addr, len_bytes)
                .filter(|piece| !room.1.contains(piece))
                .collect();
            let Some(left) = room.0.checked_sub(new.len() as u64 * self.piece) else {
                self.refusals.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(self.refuses_after);
                return Err(io::ErrorKind::StorageFull.into());
            };
            room.0 = left;
            room.1.extend(new);
            Ok(())
        }
    }

    fn space(device: &Arc<Hosted>) -> BackedSpace {
        let usable = Extent::new(MIB, 63 * MIB);
        let space = BackedSpace::new(device.clone(), usable);
        space.lock().free_bare(usable);
        space
    }

    #[test]
    fn room_is_promised_as_far_as_the_host_gives_it() {
        let device = Hosted::new(20 * MIB);
        let space = space(&device);
        assert!(space.secure(10 * MIB));
        assert!(device.room.lock().0 <= 10 * MIB);
        assert!(!space.secure(30 * MIB));
        assert!(space.secure(18 * MIB), "all but the reserve");
        assert_eq!(space.host_free_bytes(), 0);
        // It is asked again when it has more.
        device.room.lock().0 += 20 * MIB;
        assert!(!space.secure(30 * MIB));
        space.look_at_host();
        assert!(space.secure(30 * MIB));
        // Most of the room that is not needed goes back.
        space.trim(MIB);
        assert!(device.room.lock().0 > 30 * MIB);
        assert!(space.secure(MIB));
    }

    #[test]
    fn room_that_an_earlier_mount_took_is_found_on_a_full_host() {
        let device = Hosted::new(20 * MIB);
        assert!(space(&device).secure(10 * MIB));
        device.room.lock().0 = 0;
        let space = space(&device);
        assert!(!space.secure(30 * MIB));
        assert!(space.secure(10 * MIB));
    }

    #[test]
    fn room_that_an_earlier_mount_took_is_found_block_by_block_in_a_small_volume() {
        let device = Hosted::of(BLOCK_BYTES, 20 * MIB);
        // Each second block, as nodes leave them that were not recorded.
        for at in 0..256 {
            let addr = MIB + 2 * at * BLOCK_BYTES;
            device.allocate(addr, BLOCK_BYTES).unwrap();
        }
        device.room.lock().0 = 0;
        let space = space(&device);
        assert!(!space.secure(MIB));
        assert_eq!(space.lock().backed_bytes(), MIB);
    }

    /// A volume keeps its lowest room. Behind its newest page lies more bare space than is asked for.
    #[test]
    fn room_far_below_the_newest_page_is_found_on_a_full_host() {
        for refuses_after in [Duration::ZERO, Duration::from_millis(300)] {
            let mut device = Hosted::new(10 * MIB);
            device.allocate(MIB, 10 * MIB).unwrap();
            let slow = Arc::get_mut(&mut device).expect("of one owner");
            slow.refuses_after = refuses_after;
            let usable = Extent::new(MIB, 16 << 30);
            let space = BackedSpace::new(device.clone(), usable);
            space.lock().free_bare(usable);
            space.lock().resume(4 << 30);
            assert!(space.secure(8 * MIB), "refusals take {refuses_after:?}");
        }
    }

    #[test]
    fn a_host_that_is_slow_to_refuse_is_not_asked_for_every_piece() {
        let mut device = Hosted::of(BLOCK_BYTES, 0);
        let slow = Arc::get_mut(&mut device).expect("of one owner");
        slow.refuses_after = Duration::from_millis(10);
        assert!(!space(&device).secure(MIB));
        let refusals = device.refusals.load(Ordering::Relaxed);
        assert!((1..1000).contains(&refusals), "{refusals} refusals");
    }

    #[test]
    fn an_extent_is_backed_as_a_whole_or_refused() {
        let device = Hosted::new(4 * MIB);
        let space = space(&device);
        let extent = space.alloc(3 * MIB, Purpose::Checkpoint).unwrap();
        device.room.lock().0 = 0;
        device.write_at(extent.addr, &[1; 4096]).unwrap();
        let refused = space.alloc(3 * MIB, Purpose::Checkpoint);
        assert!(matches!(refused, Err(Error::NoSpace { .. })));
    }
}
