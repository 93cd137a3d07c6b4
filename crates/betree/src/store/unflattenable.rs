//! Nodes that flattening did not help. A node never changes, so a second attempt would not help
//! either.

use std::collections::HashSet;

use ramet_nodetable::NodeId;

use crate::sync::Mutex;

/// Most nodes that are remembered; all are forgotten when there are more.
const UNFLATTENABLE_MAX: usize = 4096;

/// See the module header.
#[derive(Default)]
pub(crate) struct Unflattenable(Mutex<HashSet<u64>>);

impl Unflattenable {
    pub(crate) fn contains(&self, id: NodeId) -> bool {
        self.0.lock().contains(&id.0)
    }

    pub(crate) fn insert(&self, id: NodeId) {
        let mut nodes = self.0.lock();
        if nodes.len() >= UNFLATTENABLE_MAX {
            nodes.clear();
        }
        nodes.insert(id.0);
    }
}
