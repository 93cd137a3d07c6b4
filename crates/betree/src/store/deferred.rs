//! Deferred frees: the space of dead leaves that records of the journal name.

use std::sync::Arc;

use ramet_block::Extent;
use ramet_nodetable::NodeTable;

use crate::sync::Mutex;

/// The places of dead leaves that records of the journal name, oldest first.
pub(crate) struct DeferredFrees {
    table: Arc<NodeTable>,
    extents: Mutex<Vec<Extent>>,
}

impl DeferredFrees {
    pub(crate) fn new(table: Arc<NodeTable>) -> Self {
        Self {
            table,
            extents: Mutex::new(Vec::new()),
        }
    }

    pub(crate) fn push(&self, extent: Extent) {
        self.extents.lock().push(extent);
    }

    /// Number and bytes of the places.
    pub(crate) fn count_and_bytes(&self) -> (usize, u64) {
        let extents = self.extents.lock();
        let bytes = extents.iter().map(|extent| extent.len).sum();
        (extents.len(), bytes)
    }

    /// Frees the oldest `count` places. Requires that a checkpoint is durable that does not need
    /// the records that named them.
    pub(crate) fn free_oldest(&self, count: usize) {
        let dead: Vec<Extent> = self.extents.lock().drain(..count).collect();
        self.table.space().free_discarded(dead);
    }
}
