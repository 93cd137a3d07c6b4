//! Space of nodes and pages, as users of a table see it: allocated before a commit names it, taken
//! back when no commit ever will, and secured on the host of a sparse device.
//!
//! A commit takes and frees space below this interface; it is refused by the same gate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ramet_block::Extent;
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result};
use crate::space::Purpose;
use crate::store::PageStore;

/// Free and allocated space of one table.
pub struct TableSpace {
    store: Arc<PageStore>,
    pub(crate) gate: Gate,
}

/// Whether the table takes changes.
pub(crate) struct Gate {
    read_only: bool,
    poisoned: AtomicBool,
}

impl Gate {
    /// Refuses when the table is open for reading only, or was poisoned.
    pub fn check(&self) -> Result<()> {
        if self.read_only {
            Err(Error::ReadOnly)
        } else if self.poisoned.load(Ordering::Acquire) {
            Err(Error::Poisoned)
        } else {
            Ok(())
        }
    }

    /// Refuses from now on.
    pub fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
    }
}

impl TableSpace {
    pub(crate) fn new(store: Arc<PageStore>, read_only: bool) -> Self {
        let gate = Gate {
            read_only,
            poisoned: AtomicBool::new(false),
        };
        Self { store, gate }
    }

    /// Space for a new node, `len_bytes` rounded up to blocks. Until a commit names it, it is
    /// allocated in memory only: a crash gives it back.
    ///
    /// # Errors
    /// [`Error::NoSpace`] when no hole is long enough or the reserve would be touched;
    /// [`Error::ReadOnly`], [`Error::Poisoned`].
    pub fn alloc(&self, len_bytes: u64) -> Result<Extent> {
        self.gate.check()?;
        self.store.space.alloc(len_bytes, Purpose::Contents)
    }

    /// As [`TableSpace::alloc`], for writes of a checkpoint: may use the reserve.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::ReadOnly`], [`Error::Poisoned`].
    pub fn alloc_reserved(&self, len_bytes: u64) -> Result<Extent> {
        self.gate.check()?;
        self.store.space.alloc(len_bytes, Purpose::Checkpoint)
    }

    /// As [`TableSpace::alloc_reserved`] for the second copy of a node: far from the first, if space
    /// allows.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::ReadOnly`], [`Error::Poisoned`].
    pub fn alloc_copy(&self, len_bytes: u64) -> Result<Extent> {
        self.gate.check()?;
        self.store.space.alloc(len_bytes, Purpose::Copy)
    }

    /// Takes back an extent that no commit ever named. It is allocatable at once. When it was free
    /// already, two owners would follow: from then on every allocation is refused as
    /// [`Error::Corrupt`].
    pub fn free_unpublished(&self, extent: Extent) {
        self.store.space.lock().free_now(extent);
    }

    /// Takes an extent that no commit names out of the free space of a table just opened, in memory
    /// only: extents that a journal names must not be written over while it is replayed. Says
    /// whether it was free. The answer is `false` for a range that is not an extent of the usable
    /// area.
    #[must_use]
    pub fn pin(&self, extent: Extent) -> bool {
        failpoints::is_on(Fault::NamedExtentNotPinned) || self.store.space.lock().take(extent)
    }

    /// Free bytes beyond the reserve of commits, as far as the host of a sparse device seems to
    /// have room for them. Cheaper than [`crate::NodeTable::stats`], for a caller that asks before each
    /// change.
    #[must_use]
    pub fn room_bytes(&self) -> u64 {
        self.store.space.room_bytes()
    }

    /// As [`TableSpace::room_bytes`], without the holes that are too short for a page of the node
    /// table: new data leaves the others for checkpoints.
    #[must_use]
    pub fn room_for_pages_bytes(&self) -> u64 {
        self.store.space.room_for_pages_bytes()
    }

    /// As [`TableSpace::secure`], without the holes that are too short for a page of the node table.
    #[must_use]
    pub fn secure_for_pages(&self, bytes: u64) -> bool {
        self.store.space.secure_for_pages(bytes)
    }

    /// Free bytes in holes that are too short for a page of the node table.
    #[must_use]
    pub fn short_bytes(&self) -> u64 {
        self.store.space.lock().short_bytes()
    }

    /// Free bytes of a sparse device that the host was not asked for, and seems to have room for.
    #[must_use]
    pub fn host_room_bytes(&self) -> u64 {
        let host = self.store.space.host_free_bytes();
        self.store.space.lock().bare_bytes().min(host)
    }

    /// Says whether so many bytes beyond the reserve of commits are free, with room on the host of
    /// a sparse device. More room is taken of the host if need be. Others may take the bytes the
    /// next moment.
    #[must_use]
    pub fn secure(&self, bytes: u64) -> bool {
        self.store.space.secure(bytes)
    }

    /// Gives the host of a sparse device room back, if there is much more than `keep_bytes` beyond
    /// the reserve of commits.
    pub fn trim(&self, keep_bytes: u64) {
        self.store.space.trim(keep_bytes);
    }

    /// Gives the host of a sparse device all room back beyond `keep_bytes` and the reserve of
    /// commits: the volume is idle.
    pub fn trim_all(&self, keep_bytes: u64) {
        self.store.space.trim_all(keep_bytes);
    }

    /// Gives the host of a sparse device room back that an earlier mount may have taken for `count`
    /// free extents, from the address `from` on. Returns where to go on, if there are more.
    #[must_use]
    pub fn clear_bare(&self, from: u64, count: usize) -> Option<u64> {
        self.store.space.clear_bare(from, count)
    }

    /// Asks the host of a sparse device how much room it has: others take it and give it back as
    /// well.
    pub fn look_at_host(&self) {
        self.store.space.look_at_host();
    }

    /// Size of the usable area in bytes, without the bare extents of a sparse device: the size of
    /// the volume if the host gives no more room.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.store.space.lock().capacity_bytes()
    }

    /// Discards extents that no commit ever named, and makes them allocatable. See
    /// [`TableSpace::free_unpublished`].
    pub fn free_discarded(&self, extents: Vec<Extent>) {
        let runs = if self.store.space.is_sparse() {
            extents
        } else {
            self.store.discard_runs(extents)
        };
        let mut space = self.store.space.lock();
        runs.into_iter().for_each(|run| space.free_now(run));
    }
}
