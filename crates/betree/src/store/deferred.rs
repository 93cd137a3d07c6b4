//! Leaves that a record of the journal names, and their space after their death.

use std::sync::Arc;

use ramet_block::Extent;

use crate::node::handle::{Handle, Kind, Place};
use crate::store::store::Store;

impl Store {
    /// The leaf at a place that a record of the journal names.
    pub(crate) fn pinned_leaf(&self, place: Place) -> Arc<Handle> {
        self.unrecorded(Kind::Leaf, place, Vec::new(), true)
    }

    /// Number and bytes of the places of dead leaves that records of the journal name.
    pub(crate) fn deferred_frees(&self) -> (usize, u64) {
        let dead = self.deferred_frees.lock();
        (dead.len(), dead.iter().map(|extent| extent.len).sum())
    }

    /// The checkpoint that has no need of the records that named the oldest `count` of them is durable.
    pub(crate) fn free_deferred(&self, count: usize) {
        let dead: Vec<Extent> = self.deferred_frees.lock().drain(..count).collect();
        self.table.free_discarded(dead);
    }
}
