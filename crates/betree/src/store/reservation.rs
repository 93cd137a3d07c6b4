//! The reservation of space for nodes that are in memory only.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Space that nodes in memory are going to take on the device.
///
/// The life of a reservation:
///
/// ```text
///  reserve ──> held by a step, or by a fresh node ──> commit   the node table counts the node
///     │                                          └──> release  no node will be written
///     └─ NoSpace: the step is left out
/// ```
///
/// 1. A step that makes nodes *reserves* an upper bound of their space (`Space::reserve`,
///    `Space::reserve_spare`) before it makes the first one. This is the only point of refusal.
/// 2. Each fresh node reserves an upper bound of its own space (`Space::reserve_fresh`) and holds
///    the reservation in the table of dirty nodes. The step *releases* its own reservation when its
///    nodes hold theirs.
/// 3. The write of the node *commits* the reservation of the node: its extent is counted by the
///    node table from then on. The extent is no longer than the reservation, and often shorter,
///    since compression decides its length.
/// 4. A node whose last reference goes before it is written *releases* its reservation: `Drop`.
#[derive(Debug)]
pub(crate) struct SpaceReservation {
    reserved_bytes: Arc<AtomicU64>,
    bytes: u64,
}

impl SpaceReservation {
    /// Adds `bytes` to the sum of all reservations, `reserved_bytes`, without a look at the free
    /// space.
    pub(crate) fn new(reserved_bytes: &Arc<AtomicU64>, bytes: u64) -> Self {
        reserved_bytes.fetch_add(bytes, Ordering::Relaxed);
        Self {
            reserved_bytes: reserved_bytes.clone(),
            bytes,
        }
    }

    /// Ends the reservation of a node that was written: the node table counts its extent now.
    pub(crate) fn commit(self) {
        drop(self);
    }

    /// Ends a reservation for which no node is going to be written any more.
    pub(crate) fn release(self) {
        drop(self);
    }
}

impl Drop for SpaceReservation {
    fn drop(&mut self) {
        self.reserved_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
