//! Identity of a node in memory: id, kind, height, stage and place.
//!
//! ```text
//!  Fresh --written--> Written --checkpoint durable--> Recorded
//!   in memory only     in no checkpoint:               counted by the node table, which frees it
//!                      its space goes with the handle
//! ```
//!
//! A handle holds no contents. The contents of a node that no checkpoint names are in the table of
//! dirty nodes ([`crate::store::dirty`]); contents of other nodes are in the cache. The owner of
//! that table is told when the last reference to a handle goes.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use ramet_block::Extent;
use ramet_nodetable::{NodeId, NodeKind};

/// The kind of a node, as the node table stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Leaf = 1,
    Segment = 2,
    Skeleton = 3,
}

impl Kind {
    pub(crate) fn in_table(self) -> NodeKind {
        match self {
            Kind::Leaf => NodeKind::Leaf,
            Kind::Segment => NodeKind::Segment,
            Kind::Skeleton => NodeKind::Skeleton,
        }
    }
}

/// The place of the bytes of a node. A node owns its extent, but for a *guest*, which lies in the
/// extent of one of its segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) extent: Extent,
    /// Bytes of the extent before the node: 0 but for a guest.
    pub(crate) offset: u32,
    pub(crate) used_bytes: u32,
    /// Checksum of the whole node, or of the front part of a run.
    pub(crate) checksum: u64,
}

impl Place {
    /// The first byte of the node.
    pub(crate) fn addr(&self) -> u64 {
        self.extent.addr + u64::from(self.offset)
    }

    pub(crate) fn is_guest(&self) -> bool {
        self.offset > 0
    }

    /// Bytes of the extent, if the node owns it; 0 for a guest.
    pub(crate) fn owned_bytes(&self) -> u64 {
        if self.is_guest() { 0 } else { self.extent.len }
    }
}

/// The stage of a node on its way to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Stage {
    Fresh,
    Written,
    Recorded,
}

/// Owner of the nodes that no checkpoint names.
pub(crate) trait Owner: Send + Sync {
    /// The last reference to `handle` goes.
    fn dropped(&self, handle: &Handle);
}

/// A node in memory; see the module header.
pub(crate) struct Handle {
    id: NodeId,
    kind: Kind,
    height: u32,
    /// A [`Stage`]; it only rises.
    stage: AtomicU8,
    place: OnceLock<Place>,
    /// The interval between checkpoints in which another reference was made last; 0 when none was.
    shared_in: AtomicU64,
    owner: Weak<dyn Owner>,
}

/// Memory of a handle and of its entry in the table of handles, in bytes; an estimate.
pub(crate) const HANDLE_BYTES: usize = size_of::<Handle>() + 48;

/// Memory of a small allocation beyond its bytes, in bytes; an estimate.
pub(crate) const ALLOCATION_BYTES: usize = 32;

impl Handle {
    pub(crate) fn new(
        (id, kind, height): (NodeId, Kind, u32),
        stage: Stage,
        place: Option<Place>,
        owner: Weak<dyn Owner>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            kind,
            height,
            stage: AtomicU8::new(stage as u8),
            place: place.map_or_else(OnceLock::new, OnceLock::from),
            shared_in: AtomicU64::new(0),
            owner,
        })
    }

    pub(crate) fn id(&self) -> NodeId {
        self.id
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// 0 for leaves and segments; falls along every edge.
    pub(crate) fn height(&self) -> u32 {
        self.height
    }

    fn stage(&self) -> u8 {
        self.stage.load(Ordering::Acquire)
    }

    /// Raises the node to `stage`, if it is below. The place of the node is known.
    pub(crate) fn rise(&self, stage: Stage) {
        self.stage.fetch_max(stage as u8, Ordering::Release);
    }

    /// Whether the node is in memory only.
    pub(crate) fn is_fresh(&self) -> bool {
        self.stage() == Stage::Fresh as u8
    }

    /// Whether a durable checkpoint names the node.
    pub(crate) fn is_recorded(&self) -> bool {
        self.stage() == Stage::Recorded as u8
    }

    /// The interval between checkpoints in which the last further reference to the node was made;
    /// 0 when there is none.
    pub(crate) fn shared_in(&self) -> u64 {
        self.shared_in.load(Ordering::Relaxed)
    }

    /// A further reference to the node is made in this interval between checkpoints.
    pub(crate) fn set_shared_in(&self, interval: u64) {
        self.shared_in.store(interval, Ordering::Relaxed);
    }

    /// The place of the node, if it is known. The place of a written node is always known.
    pub(crate) fn place(&self) -> Option<Place> {
        self.place.get().copied()
    }

    /// Sets the place. A node has one place for life, so the order of two callers does not matter.
    pub(crate) fn set_place(&self, place: Place) {
        let _ = self.place.set(place);
    }

    /// The place of a node that is written but in no checkpoint.
    pub(crate) fn unrecorded_place(&self) -> Option<Place> {
        let is_written = self.stage() == Stage::Written as u8;
        is_written.then(|| self.place()).flatten()
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = f.debug_struct("Handle");
        text.field("id", &self.id).field("kind", &self.kind);
        text.finish_non_exhaustive()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(owner) = self.owner.upgrade() {
            owner.dropped(self);
        }
    }
}
