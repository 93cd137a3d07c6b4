//! Handles: every node that is referred to in memory, and the contents of nodes that no checkpoint
//! names.
//!
//! A node never changes. "Changing" one makes a new node with a new id; the path to the root is
//! copied in memory and written at the next checkpoint. A [`Handle`] is the shared, in-memory end
//! of a node:
//!
//! ```text
//!  Fresh(content) --write--> Written(extent) --checkpoint durable--> Recorded
//!   in memory only            not in any checkpoint:                 counted by the node table:
//!                             freed when the handle drops            freed with its last reference
//! ```
//!
//! A fresh segment of points is at first the map that the memory buffer was, and is soon packed
//! into blocks. While any handle of a recorded node is alive the checkpoint does not reclaim it
//! ([`Handles::is_referred_to`]), so readers of older states never meet reused space.
//!
//! Concurrency: a lock over the map of all handles, held for a lookup, and those of the table of
//! dirty nodes. No lock is held while a handle is dropped, since handles of other nodes are dropped
//! with its contents.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use ramet_block::failpoints::{self, Fault};
use ramet_nodetable::{NewNode, NodeId, NodeTable};

use crate::error::{Error, Result};
use crate::node::buffer::Buffer;
use crate::node::handle::{Handle, Kind, Owner, Place, Stage};
use crate::node::packed::PackedRun;
use crate::node::run_index::RUN_HEADER_BYTES;
use crate::node::skeleton::Skeleton;
use crate::node::trailer::TRAILER_BYTES;
use crate::store::deferred::DeferredFrees;
use crate::store::dirty::{ById, Contents, DirtyNode, DirtyTable};
use crate::store::reservation::SpaceReservation;
use crate::store::space::Space;
use crate::sync::Mutex;

/// See the module header.
pub(crate) struct Handles {
    table: Arc<NodeTable>,
    space: Arc<Space>,
    /// Nodes that no checkpoint names.
    pub(crate) dirty: DirtyTable,
    pub(crate) deferred: DeferredFrees,
    all: Mutex<ById<Weak<Handle>>>,
    next_id: AtomicU64,
    me: Weak<Handles>,
}

impl Handles {
    /// New nodes get ids from `next_id` on.
    pub(crate) fn new(table: Arc<NodeTable>, space: Arc<Space>, next_id: u64) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            deferred: DeferredFrees::new(table.clone()),
            table,
            space,
            dirty: DirtyTable::default(),
            all: Mutex::default(),
            next_id: AtomicU64::new(next_id),
            me: me.clone(),
        })
    }

    /// Memory of pages of the node table that are kept, in bytes.
    pub(crate) fn cached_page_bytes(&self) -> u64 {
        self.table.cached_page_bytes()
    }

    /// The id that the next new node gets.
    pub(crate) fn next_id(&self) -> u64 {
        self.next_id.load(Ordering::Relaxed)
    }

    /// The handle of a node that a checkpoint names; `None` when the node is known to be of another
    /// kind or height.
    pub(crate) fn recorded(&self, id: NodeId, kind: Kind, height: u32) -> Option<Arc<Handle>> {
        let mut handles = self.all.lock();
        let known = handles.get(&id.0).and_then(Weak::upgrade);
        if let Some(handle) = known {
            drop(handles);
            return (handle.kind() == kind && handle.height() == height).then_some(handle);
        }
        let handle = Handle::new((id, kind, height), Stage::Recorded, None, self.me.clone());
        handles.insert(id.0, Arc::downgrade(&handle));
        Some(handle)
    }

    /// The same for a leaf, at height 0, or an interior node.
    pub(crate) fn recorded_child(&self, id: u64, height: u32) -> Option<Arc<Handle>> {
        let kind = if height == 0 {
            Kind::Leaf
        } else {
            Kind::Skeleton
        };
        self.recorded(NodeId(id), kind, height)
    }

    /// A new node, in memory only.
    fn fresh(&self, kind: Kind, height: u32, contents: Contents) -> Arc<Handle> {
        let bytes = match &contents {
            Contents::Skeleton(node) => node.encoded_bytes_max() + TRAILER_BYTES,
            Contents::Run(run) => run.size_bytes() + RUN_HEADER_BYTES + TRAILER_BYTES,
            Contents::Packed(run) => run.stored_bytes_max() + TRAILER_BYTES,
            Contents::Written { .. } => 0,
        };
        let node = DirtyNode {
            contents,
            reservation: Some(self.space.reserve_fresh(bytes as u64)),
        };
        self.enter((self.new_id(), kind, height), None, node)
    }

    /// An id that no other node gets.
    pub(crate) fn new_id(&self) -> NodeId {
        NodeId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// The handle of a node that is written and in no checkpoint yet.
    pub(crate) fn unrecorded(
        &self,
        (id, kind): (NodeId, Kind),
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
        self.enter((id, kind, 0), Some(place), node)
    }

    fn enter(
        &self,
        (id, kind, height): (NodeId, Kind, u32),
        place: Option<Place>,
        node: DirtyNode,
    ) -> Arc<Handle> {
        let stage = match place {
            Some(_) => Stage::Written,
            None => Stage::Fresh,
        };
        self.dirty.insert(id.0, node);
        let handle = Handle::new((id, kind, height), stage, place, self.me.clone());
        self.all.lock().insert(id.0, Arc::downgrade(&handle));
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

    /// Marks that the checkpoint that names the node is durable: the node table owns the node from
    /// now on.
    pub(crate) fn set_recorded(&self, handle: &Handle) {
        if handle.unrecorded_place().is_some() {
            handle.rise(Stage::Recorded);
            drop(self.dirty.remove(handle.id().0));
        }
    }

    /// Whether a handle of a node is alive.
    pub(crate) fn is_referred_to(&self, id: NodeId) -> bool {
        let handle = self.all.lock().get(&id.0).and_then(Weak::upgrade);
        handle.is_some()
    }

    /// The record of a written node for the node table.
    pub(crate) fn record_of(&self, handle: &Handle) -> Option<NewNode> {
        let place = handle.unrecorded_place()?;
        let children = self.dirty.written_children(handle)?;
        Some(NewNode {
            id: handle.id(),
            extent: place.extent,
            offset: place.offset,
            copy: None,
            used_bytes: place.used_bytes,
            checksum: place.checksum,
            kind: handle.kind().in_table(),
            height: handle.height(),
            children: children.iter().map(|c| c.id()).collect(),
        })
    }

    /// The place of a node that is not fresh.
    pub(crate) fn place(&self, handle: &Handle) -> Result<Place> {
        if let Some(place) = handle.place() {
            return Ok(place);
        }
        assert!(
            !handle.is_fresh(),
            "the caller has seen that the node is not fresh"
        );
        let record = self.table.get(handle.id())?.ok_or_else(|| Error::Corrupt {
            what: "node table",
            addr: 0,
            detail: format!("node {} is referred to and has no record", handle.id().0),
        })?;
        if record.kind != handle.kind().in_table() || record.height != handle.height() {
            return Err(Error::Corrupt {
                what: "node table",
                addr: record.extent.addr,
                detail: format!(
                    "node {} is {:?} of height {}, expected {:?} of height {}",
                    handle.id().0,
                    record.kind,
                    record.height,
                    handle.kind(),
                    handle.height()
                ),
            });
        }
        let place = Place {
            extent: record.extent,
            offset: record.offset,
            used_bytes: record.used_bytes,
            checksum: record.checksum,
        };
        handle.set_place(place);
        Ok(place)
    }

    /// The leaf at a place that a record of the journal names, which is taken out of the free space.
    /// `None` when the place is not free, or the id is in use. New nodes get higher ids.
    pub(crate) fn pinned_leaf(&self, id: NodeId, place: Place) -> Option<Arc<Handle>> {
        let next = id.0.checked_add(1).filter(|_| id.0 > 0)?;
        if self.is_referred_to(id) || !self.table.space().pin(place.extent) {
            return None;
        }
        self.next_id.fetch_max(next, Ordering::Relaxed);
        Some(self.unrecorded((id, Kind::Leaf), place, Vec::new(), true))
    }

    fn forget(&self, id: NodeId) {
        let mut handles = self.all.lock();
        if handles
            .get(&id.0)
            .is_some_and(|weak| weak.strong_count() == 0)
        {
            handles.remove(&id.0);
        }
    }
}

impl Owner for Handles {
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
                self.deferred.push(place.extent);
            }
            // The contents of a guest refer to its carrier, whose end frees the extent.
            (Contents::Written { .. }, Some(place)) if place.is_guest() => {}
            (Contents::Written { .. }, Some(place)) => {
                self.table.space().free_unpublished(place.extent)
            }
            _ => reservation.into_iter().for_each(SpaceReservation::release),
        }
        drop_in_turn(contents);
    }
}

thread_local! {
    /// Contents that this thread is to drop, while it drops some.
    static DROPPED: RefCell<Option<Vec<Contents>>> = const { RefCell::new(None) };
}

/// Drops contents, and those of the nodes that only they referred to, one after the other: a chain
/// of nodes in memory may be far longer than a stack is deep.
fn drop_in_turn(contents: Contents) {
    let mut contents = Some(contents);
    let is_first = DROPPED.try_with(|dropped| match &mut *dropped.borrow_mut() {
        Some(waiting) => {
            waiting.extend(contents.take());
            false
        }
        none => {
            *none = Some(Vec::new());
            true
        }
    });
    // Also after a panic.
    let _end = (is_first == Ok(true)).then(|| EndOfQueue);
    // A thread that ends has no queue any more.
    let queue = || DROPPED.try_with(|dropped| dropped.borrow_mut().as_mut()?.pop());
    while let Some(some) = contents.take() {
        drop(some);
        if is_first == Ok(true) {
            contents = queue().ok().flatten();
        }
    }
}

/// Ends the queue of this thread.
struct EndOfQueue;

impl Drop for EndOfQueue {
    fn drop(&mut self) {
        let left = DROPPED.try_with(|dropped| dropped.take());
        drop(left);
    }
}
