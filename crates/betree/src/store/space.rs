//! Space accounting: space that is reserved for nodes that are in memory only.
//!
//! The node table counts the space of nodes that are written. The store counts, on top of that:
//!
//! ```text
//!  capacity of the volume
//!  ├── space in use                node table
//!  ├── reserve for checkpoints     node table
//!  ├── reserved                    reservations, and the messages in the memory buffer
//!  └── unreserved
//!      ├── backlog reserve         accepted messages take it on their way down; no new data does
//!      │   └── deletion reserve    deletions need it on a full volume; no new data gets it
//!      └── available               space for new data
//! ```
//!
//! Reserved space is backed on a sparse device: its host cannot refuse it later.
//!
//! Short holes, in which no page of the node table fits, are free and are no space for changes that
//! are admitted: the reserves must be ones that pages fit in.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ramet_block::BLOCK_BYTES;
use ramet_nodetable::NodeTable;

use crate::error::{Error, Result};
use crate::node::handle::Kind;
use crate::node::skeleton::{Edge, Skeleton};
use crate::shape::TreeShape;
use crate::store::reservation::SpaceReservation;

/// The space of a volume beyond that of its nodes; see the module header.
///
/// All counts are atomics: a reservation is counted before it is compared with the free space.
pub(crate) struct Space {
    table: Arc<NodeTable>,
    shape: Arc<TreeShape>,
    /// Sum of all space reservations, in bytes.
    reserved: Arc<AtomicU64>,
    /// Bytes of messages in the memory buffer.
    buffered_bytes: AtomicU64,
    /// Bytes of messages that wait in the root for interior nodes.
    waiting_bytes: AtomicU64,
}

/// Most rounds in which the host of a sparse device is given space back at once.
const TRIM_ROUNDS: u32 = 4;

impl Space {
    pub(crate) fn new(table: Arc<NodeTable>, shape: Arc<TreeShape>) -> Self {
        Self {
            table,
            shape,
            reserved: Arc::default(),
            buffered_bytes: AtomicU64::new(0),
            waiting_bytes: AtomicU64::new(0),
        }
    }

    /// Space that no new data gets, in bytes: several leaves, so that deletions can be applied to
    /// the leaves that hold the deleted keys. Half of it is for deletions alone.
    pub(crate) fn deletion_reserve_bytes(&self) -> u64 {
        self.deletion_reserve_of(self.table.space().capacity_bytes())
    }

    fn deletion_reserve_of(&self, total: u64) -> u64 {
        let leaves = 12 * self.shape.leaf_bytes as u64;
        let buffers = (4 * self.shape.buffer_bytes as u64).min(total / 32);
        leaves.max(buffers).max(16 * BLOCK_BYTES).min(total / 8)
    }

    /// Space beyond the reserve for checkpoints and beyond the reserved space, in bytes.
    pub(crate) fn unreserved_bytes(&self) -> u64 {
        self.table
            .space()
            .room_bytes()
            .saturating_sub(self.reserved_bytes())
    }

    /// The same for changes that are admitted, which leave the holes for checkpoints that a page fits
    /// in: bytes in shorter holes do not count.
    pub(crate) fn unreserved_for_changes_bytes(&self) -> u64 {
        self.table
            .space()
            .room_for_pages_bytes()
            .saturating_sub(self.reserved_bytes())
    }

    /// Whether [`Space::unreserved_for_changes_bytes`] is at least `bytes`, as [`Space::secure`].
    pub(crate) fn secure_for_changes(&self, bytes: u64) -> bool {
        let space = self.table.space();
        space.secure_for_pages(self.reserved_bytes() + bytes)
    }

    /// Whether [`Space::unreserved_bytes`] is at least `bytes` and backed. A sparse device is asked
    /// for more of its host if need be.
    pub(crate) fn secure(&self, bytes: u64) -> bool {
        self.table.space().secure(self.reserved_bytes() + bytes)
    }

    /// Gives the host of a sparse device back the space that is not needed soon.
    pub(crate) fn trim_host(&self) {
        self.trim_by(|keep| self.table.space().trim(keep));
    }

    /// The same for an idle volume: all space that is not needed.
    pub(crate) fn trim_host_idle(&self) {
        self.trim_by(|keep| self.table.space().trim_all(keep));
    }

    fn trim_by(&self, trim: impl Fn(u64)) {
        for _ in 0..TRIM_ROUNDS {
            let before = self.table.space().capacity_bytes();
            // Less is kept of a smaller capacity.
            let short = self.table.space().short_bytes();
            trim(self.reserved_bytes() + self.backlog_reserve_bytes() + short);
            if self.table.space().capacity_bytes() == before {
                return;
            }
        }
    }

    /// Space that accepted messages may still take, in bytes: the deletion reserve, and half of the
    /// messages that wait above interior nodes or in memory. Each of them is written once more on
    /// its way down, and the space that it leaves is free only after a checkpoint. Half is enough:
    /// messages can move down by halves, with a checkpoint between.
    pub(crate) fn backlog_reserve_bytes(&self) -> u64 {
        let waiting = self.waiting_bytes.load(Ordering::Relaxed)
            + self.buffered_bytes.load(Ordering::Relaxed);
        self.deletion_reserve_bytes() + waiting.max(self.reserved_bytes()) / 2
    }

    /// Space for data to come, in bytes.
    pub(crate) fn available_bytes(&self) -> u64 {
        // The deletion reserve grows when the host of a sparse device has given all that it has.
        let capacity = self.table.space().capacity_bytes();
        let most = capacity + self.table.space().host_room_bytes();
        let growth = self.deletion_reserve_of(most) - self.deletion_reserve_of(capacity);
        self.unreserved_for_changes_bytes()
            .saturating_sub(self.backlog_reserve_bytes() + growth)
    }

    /// Counts the messages of `root`, which is about to become the root.
    pub(crate) fn set_waiting(&self, root: &Skeleton) {
        let is_interior = |e: &Edge| {
            let child = e.child.as_ref();
            child.is_some_and(|c| c.node.kind() == Kind::Skeleton)
        };
        let bytes = if root.edges.iter().any(is_interior) {
            root.segs.iter().map(|seg| seg.bytes).sum()
        } else {
            0
        };
        self.waiting_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Sets the bytes of messages in the memory buffer.
    pub(crate) fn set_buffered(&self, bytes: u64) {
        self.buffered_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Reserves the space of a fresh node of `bytes`, without a look at the free space.
    pub(crate) fn reserve_fresh(&self, bytes: u64) -> SpaceReservation {
        SpaceReservation::new(&self.reserved, bytes.next_multiple_of(BLOCK_BYTES))
    }

    /// Reserves `bytes` for nodes about to be made.
    ///
    /// # Errors
    /// `NoSpace`.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<SpaceReservation> {
        // Counted before it is compared: other threads that ask meanwhile see it.
        let reservation = SpaceReservation::new(&self.reserved, bytes);
        // The deletion reserve stays backed as long as a host gives space.
        if self.secure(self.deletion_reserve_bytes()) || self.secure(0) {
            Ok(reservation)
        } else {
            Err(Error::NoSpace)
        }
    }

    /// The same for steps that remove nothing. Half of the deletion reserve is left alone, which
    /// deletions need on their way down: the nodes that a step replaces may be shared, and so not
    /// become free.
    ///
    /// # Errors
    /// `NoSpace`.
    pub(crate) fn reserve_spare(&self, bytes: u64) -> Result<SpaceReservation> {
        let reservation = self.reserve(bytes)?;
        if self.secure(self.deletion_reserve_bytes() / 2) {
            Ok(reservation)
        } else {
            Err(Error::NoSpace)
        }
    }

    /// Space of all reservations and of the messages in the memory buffer, in bytes.
    pub(crate) fn reserved_bytes(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed) + self.buffered_bytes.load(Ordering::Relaxed)
    }
}
