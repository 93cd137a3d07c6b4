//! Nodes: identity, where the bytes are, and the bounded cache in front of the device.
//!
//! A node never changes. "Changing" one makes a new node with a new id; the path to the root is copied
//! in memory and written at the next checkpoint. A [`Handle`] is the shared, in-memory end of a node:
//!
//! ```text
//!  Fresh(content) --write--> Written(extent) --checkpoint durable--> Recorded
//!   in memory only            not in any checkpoint:                 counted by the node table,
//!                             freed when the handle drops            lives as long as it is referenced there
//! ```
//!
//! A fresh segment of points is at first the map that the memory buffer was, and is soon packed into blocks.
//! While any handle of a recorded node is alive the checkpoint does not reclaim it ([`Store::is_pinned`]),
//! so readers of older states never meet reused space.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use ramet_block::failpoints::{self, Fault};
use ramet_block::{Device, Extent};
use ramet_nodetable::{NodeId, NodeTable};

use crate::counters::Counters;
use crate::node::buffer::Buffer;
use crate::node::handle::{Handle, Kind, Owner, Place, Stage};
use crate::node::packed::PackedRun;
use crate::node::run_index::RUN_HEADER_BYTES;
use crate::node::skeleton::Skeleton;
use crate::shape::TreeShape;
use crate::store::cache::{ByBytes, CacheKey, Cached};
use crate::store::device::NodeDevice;
use crate::store::dirty::{ById, Contents, DirtyNode, DirtyTable};
use crate::store::jobs::ReadAhead;
use crate::store::reservation::SpaceReservation;
use crate::store::space::Space;
use crate::store::space_debt::SpaceDebt;
use crate::sync::{Cache, Mutex, cache};

/// Most nodes remembered as not worth flattening.
const UNFLATTENABLE_MAX: usize = 4096;

/// All nodes of a volume.
pub(crate) struct Store {
    pub(crate) dev: Arc<dyn Device>,
    pub(crate) table: Arc<NodeTable>,
    pub(crate) shape: Arc<TreeShape>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) device: NodeDevice,
    /// Nodes that no checkpoint names.
    pub(crate) dirty: DirtyTable,
    pub(crate) space: Space,
    /// Steps that were left out for want of space.
    pub(crate) space_debt: SpaceDebt,
    /// Places of dead leaves that records of the journal name, oldest first.
    pub(crate) deferred_frees: Mutex<Vec<Extent>>,
    pub(crate) read_ahead: ReadAhead,
    pub(crate) cache: Cache<CacheKey, Cached, ByBytes>,
    /// Held while nodes are claimed that one request reads, so that two who want the same do not get half of them each.
    pub(crate) claiming: Mutex<()>,
    handles: Mutex<ById<Weak<Handle>>>,
    next_id: AtomicU64,
    /// Nodes that flattening did not help, forgotten when they are many.
    unflattenable: Mutex<HashSet<u64>>,
    me: Weak<Store>,
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
        let space = Space::new(table.clone(), shape.clone());
        Arc::new_cyclic(|me| Self {
            dev,
            device,
            table,
            shape,
            counters,
            dirty: DirtyTable::default(),
            space,
            space_debt: SpaceDebt::default(),
            deferred_frees: Mutex::new(Vec::new()),
            read_ahead: ReadAhead::default(),
            cache: cache(items, cache_bytes, ByBytes),
            claiming: Mutex::new(()),
            handles: Mutex::default(),
            next_id: AtomicU64::new(next_id),
            unflattenable: Mutex::new(HashSet::new()),
            me: me.clone(),
        })
    }

    /// The id that the next new node gets.
    pub(crate) fn next_id(&self) -> u64 {
        self.next_id.load(Ordering::Relaxed)
    }

    /// The handle of a node that a checkpoint names; `None` when the node is known to be of another kind or height.
    pub(crate) fn recorded(&self, id: NodeId, kind: Kind, height: u8) -> Option<Arc<Handle>> {
        let mut handles = self.handles.lock();
        let known = handles.get(&id.0).and_then(Weak::upgrade);
        if let Some(handle) = known {
            drop(handles);
            return (handle.kind() == kind && handle.height() == height).then_some(handle);
        }
        let handle = Handle::new((id, kind, height), Stage::Recorded, None, self.me.clone());
        handles.insert(id.0, Arc::downgrade(&handle));
        Some(handle)
    }

    /// The same for a leaf or an interior node, whichever has this height.
    pub(crate) fn recorded_child(&self, id: u64, height: u8) -> Option<Arc<Handle>> {
        let kind = if height == 0 {
            Kind::Leaf
        } else {
            Kind::Skeleton
        };
        self.recorded(NodeId(id), kind, height)
    }

    /// A new node, in memory only.
    fn fresh(&self, kind: Kind, height: u8, contents: Contents) -> Arc<Handle> {
        let bytes = match &contents {
            Contents::Skeleton(node) => node.encoded_bytes_max(),
            Contents::Run(run) => run.size_bytes() + RUN_HEADER_BYTES,
            Contents::Packed(run) => run.stored_bytes_max(),
            Contents::Written { .. } => 0,
        };
        let node = DirtyNode {
            contents,
            reservation: Some(self.space.reserve_fresh(bytes as u64)),
        };
        self.enter(kind, height, None, node)
    }

    /// The handle of a node that is written and in no checkpoint yet.
    pub(crate) fn unrecorded(
        &self,
        kind: Kind,
        place: Place,
        children: Vec<Arc<Handle>>,
        is_pinned_by_journal: bool,
    ) -> Arc<Handle> {
        let contents = Contents::Written {
            children,
            is_pinned_by_journal,
        };
        let node = DirtyNode {
            contents,
            reservation: None,
        };
        self.enter(kind, 0, Some(place), node)
    }

    fn enter(&self, kind: Kind, height: u8, place: Option<Place>, node: DirtyNode) -> Arc<Handle> {
        let id = NodeId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let stage = match place {
            Some(_) => Stage::Written,
            None => Stage::Fresh,
        };
        self.dirty.insert(id.0, node);
        let handle = Handle::new((id, kind, height), stage, place, self.me.clone());
        self.handles.lock().insert(id.0, Arc::downgrade(&handle));
        handle
    }

    pub(crate) fn new_skeleton(&self, mut node: Skeleton) -> Arc<Handle> {
        node.shrink();
        self.fresh(
            Kind::Skeleton,
            node.height,
            Contents::Skeleton(Arc::new(node)),
        )
    }

    pub(crate) fn new_segment(&self, run: Buffer) -> Arc<Handle> {
        self.fresh(Kind::Segment, 0, Contents::Run(Arc::new(run)))
    }

    pub(crate) fn new_packed(&self, run: PackedRun) -> Arc<Handle> {
        self.fresh(Kind::Segment, 0, Contents::Packed(Arc::new(run)))
    }

    /// Grows with every step that moves messages down.
    pub(crate) fn structural_work(&self) -> u64 {
        let c = &self.counters;
        [&c.rewrites, &c.flushes, &c.conversions, &c.segment_merges]
            .iter()
            .map(|n| n.load(Ordering::Relaxed))
            .sum()
    }

    pub(crate) fn is_unflattenable(&self, id: NodeId) -> bool {
        self.unflattenable.lock().contains(&id.0)
    }

    pub(crate) fn set_unflattenable(&self, id: NodeId) {
        let mut nodes = self.unflattenable.lock();
        if nodes.len() >= UNFLATTENABLE_MAX {
            nodes.clear();
        }
        nodes.insert(id.0);
    }

    /// The checkpoint that names the node is durable: the node table owns it from now on.
    pub(crate) fn set_recorded(&self, handle: &Handle) {
        if handle.unrecorded_place().is_some() {
            handle.rise(Stage::Recorded);
            drop(self.dirty.remove(handle.id().0));
        }
    }

    /// Whether a reader in memory still refers to a node.
    pub(crate) fn is_pinned(&self, id: NodeId) -> bool {
        // A cached skeleton of a dead node is no reader; its handles would pin its children.
        self.cache.remove(&(id.0, 0));
        let handle = self.handles.lock().get(&id.0).and_then(Weak::upgrade);
        handle.is_some()
    }

    fn forget(&self, id: NodeId) {
        let mut handles = self.handles.lock();
        if handles
            .get(&id.0)
            .is_some_and(|weak| weak.strong_count() == 0)
        {
            handles.remove(&id.0);
        }
    }
}

impl Owner for Store {
    fn dropped(&self, handle: &Handle) {
        self.forget(handle.id());
        if handle.is_recorded() {
            return;
        }
        let Some(node) = self.dirty.remove(handle.id().0) else {
            return;
        };
        let DirtyNode {
            contents,
            reservation,
        } = node;
        match (&contents, handle.place()) {
            (
                Contents::Written {
                    is_pinned_by_journal: true,
                    ..
                },
                Some(place),
            ) if !failpoints::is_on(Fault::PinnedLeafFreedAtOnce) => {
                self.deferred_frees.lock().push(place.extent);
            }
            (Contents::Written { .. }, Some(place)) => self.table.free_unpublished(place.extent),
            _ => reservation.into_iter().for_each(SpaceReservation::release),
        }
    }
}
