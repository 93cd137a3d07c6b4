//! Handles: the shared ends of nodes in memory, with what is not written yet.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use ramet_block::planted::{self, Fault};
use ramet_nodetable::NodeId;

use crate::node::buffer::MemRun;
use crate::node::handle::{Kind, Place};
use crate::node::packed::PackedRun;
use crate::node::skeleton::Skeleton;
use crate::store::contents::State;
use crate::store::store::Store;
use crate::sync::Mutex;

/// Memory that a handle takes with its entry in [`Store::handles`], about, in bytes.
pub(crate) const HANDLE_BYTES: usize = size_of::<Handle>() + 48;

/// Memory that an allocation of a few bytes takes beyond these, about, in bytes.
pub(crate) const ALLOCATION_BYTES: usize = 32;

/// A node in memory; see the module header.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) id: NodeId,
    pub(crate) kind: Kind,
    pub(crate) height: u8,
    /// Space that writing it takes, in bytes; counted in [`Store::owed_bytes`] while it is fresh.
    pub(crate) owes: AtomicU64,
    pub(crate) state: Mutex<State>,
    pub(crate) store: Weak<Store>,
}

impl Handle {
    pub(crate) fn id(&self) -> NodeId {
        self.id
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// 0 for leaves and segments; falls along every edge.
    pub(crate) fn height(&self) -> u8 {
        self.height
    }

    /// Whether it is in memory only.
    pub(crate) fn is_fresh(&self) -> bool {
        !matches!(
            *self.state.lock(),
            State::Written { .. } | State::Recorded(_)
        )
    }

    /// Whether a durable checkpoint names the node.
    pub(crate) fn is_recorded(&self) -> bool {
        matches!(*self.state.lock(), State::Recorded(_))
    }

    /// The contents of a skeleton that is not written yet.
    pub(crate) fn fresh_skeleton(&self) -> Option<Arc<Skeleton>> {
        match &*self.state.lock() {
            State::Skeleton(node) => Some(node.clone()),
            _ => None,
        }
    }

    /// The contents of a segment that is neither written nor packed yet.
    pub(crate) fn fresh_run(&self) -> Option<Arc<MemRun>> {
        match &*self.state.lock() {
            State::Run(run) => Some(run.clone()),
            _ => None,
        }
    }

    /// The contents of a packed segment that is not written yet.
    pub(crate) fn packed_run(&self) -> Option<Arc<PackedRun>> {
        match &*self.state.lock() {
            State::Packed(run) => Some(run.clone()),
            _ => None,
        }
    }

    /// Place and children of a node that is written but in no checkpoint.
    pub(crate) fn written(&self) -> Option<(Place, Vec<Arc<Handle>>)> {
        match &*self.state.lock() {
            State::Written {
                place, children, ..
            } => Some((*place, children.clone())),
            _ => None,
        }
    }

    /// Says that a record of the journal names the place: it is not free before the next checkpoint then, whatever
    /// becomes of the node.
    pub(crate) fn set_named(&self) {
        if let State::Written { is_named, .. } = &mut *self.state.lock() {
            *is_named = true;
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Some(store) = self.store.upgrade() else {
            return;
        };
        store.forget(self.id);
        match self.state.get_mut() {
            State::Written {
                place,
                is_named: true,
                ..
            } if !planted::is(Fault::NamedLeafFreedAtOnce) => {
                store.dead_named.lock().push(place.extent)
            }
            State::Written { place, .. } => store.table.free_unpublished(place.extent),
            State::Recorded(_) => {}
            fresh => {
                let bytes = fresh.memory_bytes();
                store.fresh_bytes.fetch_sub(bytes, Ordering::Relaxed);
                store.settle(self);
            }
        }
    }
}

impl Store {
    /// The checkpoint that names the node is durable: the node table owns it from now on.
    pub(crate) fn set_recorded(&self, handle: &Handle) {
        let mut state = handle.state.lock();
        if let State::Written { place, .. } = &*state {
            let recorded = State::Recorded(Some(*place));
            let old = std::mem::replace(&mut *state, recorded);
            drop(state);
            drop(old);
        }
    }

    /// Whether somebody in memory still refers to a node.
    pub(crate) fn is_pinned(&self, id: NodeId) -> bool {
        // A cached skeleton of a dead node is no user; its handles would pin its children.
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
