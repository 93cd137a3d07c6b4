//! The root node is kept twice, because everything else is found through it.
//!
//! A checkpoint writes the second copy behind all other nodes, and the record of the root names it. A
//! reader that finds the first copy bad takes the second one. The next checkpoint then writes the root
//! anew, at two new places. There is no lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ramet_block::{Call, Device, MetadataCopies, is_no_space};
use ramet_nodetable::{NodeId, NodeTable};

use crate::error::{Error, Result, io_error_at};
use crate::node::handle::Handle;

/// See the module header.
pub(crate) struct RootCopies {
    dev: Arc<dyn Device>,
    table: Arc<NodeTable>,
    /// Number of a node of which one copy is bad; 0 for none.
    damaged: AtomicU64,
    /// Bad copies found since the volume was opened.
    found: AtomicU64,
}

impl RootCopies {
    pub(crate) fn new(dev: Arc<dyn Device>, table: Arc<NodeTable>) -> Self {
        Self {
            dev,
            table,
            damaged: AtomicU64::new(0),
            found: AtomicU64::new(0),
        }
    }

    /// Bytes that the second copy of a root takes: 0 on a volume that keeps one copy, or when a
    /// checkpoint names the root already.
    pub(crate) fn wanted_bytes(&self, root: &Handle) -> u64 {
        match self.table.copies() {
            MetadataCopies::One => 0,
            MetadataCopies::Two => root
                .unrecorded_place()
                .map_or(0, |place| place.owned_bytes()),
        }
    }

    /// Writes the second copy of a root that is written and in no checkpoint yet. Returns its
    /// address; `None` where the copy takes no bytes, on a full volume, or when the first copy cannot
    /// be read back.
    ///
    /// # Errors
    /// `Io`; nothing stays allocated then.
    pub(crate) fn write(&self, root: &Handle) -> Result<Option<u64>> {
        let Some(place) = root
            .unrecorded_place()
            .filter(|_| self.wanted_bytes(root) > 0)
        else {
            return Ok(None);
        };
        let len = usize::try_from(place.extent.len).expect("a node fits memory");
        let mut bytes = vec![0; len];
        if self.dev.read_at(place.extent.addr, &mut bytes).is_err() {
            return Ok(None);
        }
        let Ok(extent) = self.table.space().alloc_copy(place.extent.len) else {
            return Ok(None);
        };
        match self.dev.write_at(extent.addr, &bytes) {
            Ok(()) => Ok(Some(extent.addr)),
            Err(e) => {
                self.table.space().free_unpublished(extent);
                if is_no_space(&e) {
                    return Ok(None);
                }
                Err(io_error_at(
                    Call::Write,
                    "the second copy of the root",
                    extent.addr,
                )(e))
            }
        }
    }

    /// The address of the second copy of a node that has one.
    pub(crate) fn second(&self, node: &Handle) -> Option<u64> {
        let record = self.table.get(node.id()).ok()??;
        record.copy
    }

    /// Notes that one copy of a node is bad and the other is good.
    pub(crate) fn note_damaged(&self, node: NodeId) {
        if self.damaged.swap(node.0, Ordering::Relaxed) != node.0 {
            self.found.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Bad copies of which the other one was good, found since the volume was opened.
    pub(crate) fn damaged_found(&self) -> u64 {
        self.found.load(Ordering::Relaxed)
    }

    /// Whether a bad copy was noted that no checkpoint has taken.
    pub(crate) fn has_damaged(&self) -> bool {
        self.damaged.load(Ordering::Relaxed) != 0
    }

    /// Whether one copy of `root` is bad. The answer is given once.
    pub(crate) fn take_damaged(&self, root: NodeId) -> bool {
        let noted = self
            .damaged
            .compare_exchange(root.0, 0, Ordering::Relaxed, Ordering::Relaxed);
        noted.is_ok()
    }
}

/// The outcome of `second` where `first` failed because bytes are bad or cannot be read.
pub(crate) fn or_second<T>(first: Result<T>, second: impl FnOnce() -> Option<T>) -> Result<T> {
    match first {
        Err(error @ (Error::Corrupt { .. } | Error::Io { .. })) => second().ok_or(error),
        done => done,
    }
}
