//! Nodes that flattening did not help. A node never changes, so a second attempt would not help
//! either.

use std::collections::HashSet;

use ramet_nodetable::NodeId;

use crate::sync::Mutex;

/// Nodes of one generation. The newest two generations are remembered.
const GENERATION: usize = 4096;

#[derive(Default)]
struct Generations {
    newest: HashSet<u64>,
    older: HashSet<u64>,
}

/// See the module header.
#[derive(Default)]
pub(crate) struct Unflattenable(Mutex<Generations>);

impl Unflattenable {
    /// Whether the node is remembered. It stays so while it is asked for.
    pub(crate) fn contains(&self, id: NodeId) -> bool {
        let mut all = self.0.lock();
        if all.newest.contains(&id.0) {
            return true;
        }
        let is_older = all.older.contains(&id.0);
        if is_older {
            all.insert(id);
        }
        is_older
    }

    pub(crate) fn insert(&self, id: NodeId) {
        self.0.lock().insert(id);
    }
}

impl Generations {
    fn insert(&mut self, id: NodeId) {
        if self.newest.len() >= GENERATION {
            self.older = std::mem::take(&mut self.newest);
        }
        self.newest.insert(id.0);
    }
}
