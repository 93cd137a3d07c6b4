//! The store: its components, and what each is made of.
//!
//! ```text
//!  Store ── device, node table, shape, counters
//!    ├── Space        reservations over the node table
//!    ├── Handles      handles of nodes, table of dirty nodes, deferred frees    calls: Space, node table
//!    └── NodeDevice   counted reads, buffers of large ones, drop-behind         calls: device
//! ```

use std::sync::Arc;

use ramet_block::Device;
use ramet_nodetable::{NodeId, NodeTable};

use crate::counters::Counters;
use crate::shape::TreeShape;
use crate::store::cache::{ByBytes, CacheKey, Cached};
use crate::store::device::NodeDevice;
use crate::store::handles::Handles;
use crate::store::jobs::ReadAhead;
use crate::store::space::Space;
use crate::store::space_debt::SpaceDebt;
use crate::store::unflattenable::Unflattenable;
use crate::sync::{Cache, Mutex, cache};

/// All nodes of a volume.
pub(crate) struct Store {
    pub(crate) dev: Arc<dyn Device>,
    pub(crate) table: Arc<NodeTable>,
    pub(crate) shape: Arc<TreeShape>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) device: NodeDevice,
    pub(crate) space: Arc<Space>,
    pub(crate) handles: Arc<Handles>,
    /// Steps that were left out for want of space.
    pub(crate) space_debt: SpaceDebt,
    pub(crate) read_ahead: ReadAhead,
    pub(crate) cache: Cache<CacheKey, Cached, ByBytes>,
    /// Held while nodes are claimed that one request reads, so that two who want the same do not get half of them each.
    pub(crate) claiming: Mutex<()>,
    pub(crate) unflattenable: Unflattenable,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

impl Store {
    pub(crate) fn new(
        dev: Arc<dyn Device>,
        table: NodeTable,
        shape: TreeShape,
        cache_bytes: u64,
        next_id: u64,
    ) -> Arc<Self> {
        let items = usize::try_from(cache_bytes / 16384)
            .unwrap_or(usize::MAX)
            .max(64);
        let (table, shape) = (Arc::new(table), Arc::new(shape));
        let counters = Arc::new(Counters::default());
        let device = NodeDevice::new(dev.clone(), counters.clone());
        let space = Arc::new(Space::new(table.clone(), shape.clone()));
        let handles = Handles::new(table.clone(), space.clone(), next_id);
        Arc::new(Self {
            dev,
            device,
            table,
            shape,
            counters,
            space,
            handles,
            unflattenable: Unflattenable::default(),
            space_debt: SpaceDebt::default(),
            read_ahead: ReadAhead::default(),
            cache: cache(items, cache_bytes, ByBytes),
            claiming: Mutex::new(()),
        })
    }

    /// Whether a reader in memory still refers to a node.
    pub(crate) fn is_pinned(&self, id: NodeId) -> bool {
        // A cached skeleton of a dead node is no reader; its handles would pin its children.
        self.cache.remove(&(id.0, 0));
        self.handles.is_referred_to(id)
    }
}
