//! Space that is kept for what is in memory only.
//!
//! Room that is set aside is backed on a sparse device: its host cannot refuse it later.

use std::sync::atomic::Ordering;

use ramet_block::BLOCK_BYTES;

use crate::error::{Error, Result};
use crate::node::handle::Kind;
use crate::node::skeleton::{Edge, Skeleton};
use crate::store::store::Store;

/// Room set aside until the nodes that take it are counted themselves.
pub(crate) struct Room<'a> {
    store: &'a Store,
    bytes: u64,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.store
            .owed_bytes
            .fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Times that the host is given room back at once.
const TRIM_ROUNDS: u32 = 4;

impl Store {
    /// Room that is kept for structural work when the volume is as full as it gets, in bytes: several leaves, so that
    /// deletions can be applied to the leaves that hold what they delete, half of it for those alone.
    pub(crate) fn slack_bytes(&self) -> u64 {
        self.slack_of(self.table.capacity_bytes())
    }

    fn slack_of(&self, total: u64) -> u64 {
        let leaves = 12 * self.shape.leaf_bytes as u64;
        let buffers = (4 * self.shape.buffer_bytes as u64).min(total / 32);
        leaves.max(buffers).max(16 * BLOCK_BYTES).min(total / 8)
    }

    /// Space beyond the reserve and beyond what a checkpoint takes to write what is in memory now, in bytes.
    pub(crate) fn room_bytes(&self) -> u64 {
        self.table.room_bytes().saturating_sub(self.owed_bytes())
    }

    /// Whether [`Store::room_bytes`] is at least `bytes` and backed. More room is taken of the host of a sparse device if need be.
    pub(crate) fn secure(&self, bytes: u64) -> bool {
        self.table.secure(self.owed_bytes() + bytes)
    }

    /// Gives the host of a sparse device back what is not needed soon.
    pub(crate) fn trim_host(&self) {
        for _ in 0..TRIM_ROUNDS {
            let before = self.table.capacity_bytes();
            // Less is kept of a smaller capacity.
            self.table.trim(self.owed_bytes() + self.liability_bytes());
            if self.table.capacity_bytes() == before {
                return;
            }
        }
    }

    /// Room that what was accepted may still take, in bytes: the slack, and half of what waits above interior nodes or
    /// in memory. All of that is written once more on its way down, and what it leaves is free only after a checkpoint; by
    /// halves there is always room for that.
    pub(crate) fn liability_bytes(&self) -> u64 {
        let waiting = self.waiting_bytes.load(Ordering::Relaxed)
            + self.buffered_bytes.load(Ordering::Relaxed);
        self.slack_bytes() + waiting.max(self.owed_bytes()) / 2
    }

    /// Room for data to come, in bytes.
    pub(crate) fn available_bytes(&self) -> u64 {
        // More slack is kept when the host of a sparse device has given all that it has.
        let capacity = self.table.capacity_bytes();
        let most = capacity + self.table.host_room_bytes();
        let growth = self.slack_of(most) - self.slack_of(capacity);
        self.room_bytes()
            .saturating_sub(self.liability_bytes() + growth)
    }

    /// `root` is about to become the root.
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

    /// Sets `bytes` of the room aside for nodes about to be made.
    ///
    /// # Errors
    /// `NoSpace`.
    pub(crate) fn take_room(&self, bytes: u64) -> Result<Room<'_>> {
        // Counted before it is compared: others who ask meanwhile see it.
        self.owed_bytes.fetch_add(bytes, Ordering::Relaxed);
        let room = Room { store: self, bytes };
        // The slack stays backed as long as a host gives room.
        if self.secure(self.slack_bytes()) || self.secure(0) {
            Ok(room)
        } else {
            Err(Error::NoSpace)
        }
    }

    /// The same for steps that remove nothing: half of the slack, which deletions need on their way down, is left alone. What
    /// such steps replace may be shared, and so not become free.
    ///
    /// # Errors
    /// `NoSpace`.
    pub(crate) fn take_spare_room(&self, bytes: u64) -> Result<Room<'_>> {
        let room = self.take_room(bytes)?;
        if self.secure(self.slack_bytes() / 2) {
            Ok(room)
        } else {
            Err(Error::NoSpace)
        }
    }

    /// Nothing will be written any more for a node that was to take `owes` bytes.
    pub(crate) fn settle(&self, owes: u64) {
        self.owed_bytes.fetch_sub(owes, Ordering::Relaxed);
    }

    /// Bytes that are in memory only.
    pub(crate) fn owed_bytes(&self) -> u64 {
        self.owed_bytes.load(Ordering::Relaxed) + self.buffered_bytes.load(Ordering::Relaxed)
    }
}
