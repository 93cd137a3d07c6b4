//! The store: its components, and the calls between them.
//!
//! ```text
//!  Store ── device, node table, shape, counters
//!    ├── Space        reservations over the node table
//!    │                calls: node table
//!    ├── SpaceDebt    steps that were left out, and when a sweep pays off
//!    │                calls: Space, node table
//!    ├── Unflattenable
//!    │                nodes that flattening did not help
//!    ├── Sharing      references that no checkpoint has counted
//!    ├── Handles      handles of nodes, table of dirty nodes, deferred frees
//!    │                calls: Space, node table
//!    ├── NodeDevice   counted reads, buffers of large reads, drop-behind
//!    │                calls: device
//!    ├── RootCopies   second copies of root nodes
//!    │                calls: node table, device
//!    ├── NodeCache    parts of nodes in memory; reads the missing ones
//!    │                calls: Handles, NodeDevice, RootCopies
//!    ├── Prefetcher   nodes read together and ahead of scans
//!    │                calls: NodeCache, Handles, NodeDevice
//!    └── WriteBack    writes of nodes
//!                     calls: Space, Handles, NodeCache, node table, device
//! ```

use std::sync::Arc;

use ramet_block::{Budget, Device};
use ramet_nodetable::NodeTable;

use crate::counters::Counters;
use crate::node::trailer::Opening;
use crate::shape::TreeShape;
use crate::store::cache::NodeCache;
use crate::store::device::NodeDevice;
use crate::store::handles::Handles;
use crate::store::prefetch::Prefetcher;
use crate::store::root_copies::RootCopies;
use crate::store::sharing::Sharing;
use crate::store::space::Space;
use crate::store::space_debt::SpaceDebt;
use crate::store::unflattenable::Unflattenable;
use crate::store::write::WriteBack;

/// Pages of the node table take this part of the budget at most.
const PAGES_PART: u64 = 8;

/// All nodes of a volume: the components above, each with its own locks.
pub(crate) struct Store {
    pub(crate) dev: Arc<dyn Device>,
    pub(crate) table: Arc<NodeTable>,
    pub(crate) shape: Arc<TreeShape>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) device: Arc<NodeDevice>,
    pub(crate) space: Arc<Space>,
    pub(crate) handles: Arc<Handles>,
    /// Steps that were left out for want of space.
    pub(crate) space_debt: SpaceDebt,
    pub(crate) unflattenable: Unflattenable,
    pub(crate) root_copies: Arc<RootCopies>,
    /// References that no checkpoint has counted.
    pub(crate) sharing: Sharing,
    pub(crate) write_back: WriteBack,
    pub(crate) prefetch: Arc<Prefetcher>,
    /// The memory of the tree counts against it.
    pub(crate) budget: Arc<Budget>,
    pub(crate) nodes: Arc<NodeCache>,
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
        budget: Arc<Budget>,
        (next_id, opening): (u64, Opening),
    ) -> Arc<Self> {
        table.limit_cached_pages(budget.part(PAGES_PART));
        let (table, shape) = (Arc::new(table), Arc::new(shape));
        let counters = Arc::new(Counters::default());
        let device = Arc::new(NodeDevice::new(dev.clone(), counters.clone()));
        let space = Arc::new(Space::new(table.clone(), shape.clone()));
        let handles = Handles::new(table.clone(), space.clone(), next_id);
        let root_copies = Arc::new(RootCopies::new(dev.clone(), table.clone()));
        let nodes = Arc::new(NodeCache::new(
            handles.clone(),
            (device.clone(), root_copies.clone()),
            counters.clone(),
            shape.block_bytes,
            budget.clone(),
        ));
        let prefetch = Prefetcher::new(
            nodes.clone(),
            handles.clone(),
            device.clone(),
            shape.leaf_bytes,
        );
        let space_debt = SpaceDebt::new(table.clone(), space.clone(), shape.leaf_bytes);
        let write_back = WriteBack::new(
            (dev.clone(), table.clone(), opening),
            space.clone(),
            handles.clone(),
            nodes.clone(),
            shape.clone(),
            counters.clone(),
        );
        Arc::new(Self {
            dev,
            table,
            shape,
            counters,
            device,
            space,
            handles,
            space_debt,
            unflattenable: Unflattenable::default(),
            root_copies,
            sharing: Sharing::default(),
            write_back,
            prefetch: Arc::new(prefetch),
            budget,
            nodes,
        })
    }
}
