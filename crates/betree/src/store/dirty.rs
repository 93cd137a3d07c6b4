//! The table of dirty nodes: the contents, by node id, of nodes that no checkpoint names.
//!
//! A node enters when it is made. Its contents stay until it is written. From then on the table has
//! its children, for the next checkpoint, which adds them to the node table. The entry leaves when
//! that checkpoint is durable. A fresh segment of points is at first the map that the memory buffer
//! was, and is soon packed into blocks.
//!
//! Concurrency: sixteen parts, each with a lock that is held for a lookup. An entry that leaves is
//! dropped without the lock, since handles of other nodes are dropped with it.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::node::buffer::Buffer;
use crate::node::handle::{Handle, Place, Stage};
use crate::node::packed::PackedRun;
use crate::node::skeleton::Skeleton;
use crate::store::reservation::SpaceReservation;
use crate::sync::Mutex;

/// Contents of a node that no checkpoint names.
#[derive(Debug)]
pub(crate) enum Contents {
    Skeleton(Arc<Skeleton>),
    Run(Arc<Buffer>),
    Packed(Arc<PackedRun>),
    /// The contents are on the device.
    Written {
        children: Vec<Arc<Handle>>,
        /// A record of the journal names the place.
        is_pinned_by_journal: bool,
    },
}

impl Contents {
    /// Memory of contents that are not written, in bytes.
    fn memory_bytes(&self) -> u64 {
        let bytes = match self {
            Contents::Skeleton(node) => node.memory_bytes(),
            Contents::Run(run) => run.memory_bytes(),
            Contents::Packed(run) => run.memory_bytes,
            Contents::Written { .. } => 0,
        };
        bytes as u64
    }
}

/// An entry of the table.
#[derive(Debug)]
pub(crate) struct DirtyNode {
    pub(crate) contents: Contents,
    /// Space that the write takes; `None` for a node that is written.
    pub(crate) reservation: Option<SpaceReservation>,
}

/// Hashes a node id. Ids are consecutive, so it suffices that their bits spread.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        let mixed = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

/// A map with node ids for keys.
pub(crate) type ById<V> = HashMap<u64, V, BuildHasherDefault<IdHasher>>;

/// Number of parts, each with a lock.
const SHARDS: usize = 16;

/// See the module header.
#[derive(Default)]
pub(crate) struct DirtyTable {
    shards: [Mutex<ById<DirtyNode>>; SHARDS],
    /// Memory of all contents, in bytes.
    memory_bytes: AtomicU64,
}

impl DirtyTable {
    fn shard(&self, id: u64) -> &Mutex<ById<DirtyNode>> {
        &self.shards[id as usize % SHARDS]
    }

    fn look<T>(&self, handle: &Handle, pick: impl FnOnce(&Contents) -> Option<T>) -> Option<T> {
        let shard = self.shard(handle.id().0).lock();
        pick(&shard.get(&handle.id().0)?.contents)
    }

    /// Memory of contents that are not written, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn insert(&self, id: u64, node: DirtyNode) {
        let bytes = node.contents.memory_bytes();
        self.memory_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.shard(id).lock().insert(id, node);
    }

    /// The contents of a skeleton that is not written yet.
    pub(crate) fn skeleton(&self, handle: &Handle) -> Option<Arc<Skeleton>> {
        if !handle.is_fresh() {
            return None;
        }
        self.look(handle, |contents| match contents {
            Contents::Skeleton(node) => Some(node.clone()),
            _ => None,
        })
    }

    /// The contents of a segment that is neither written nor packed yet.
    pub(crate) fn run(&self, handle: &Handle) -> Option<Arc<Buffer>> {
        self.segment(handle)?.err()
    }

    /// The contents of a segment that is not written yet, packed or not.
    pub(crate) fn segment(&self, handle: &Handle) -> Option<Result<Arc<PackedRun>, Arc<Buffer>>> {
        if !handle.is_fresh() {
            return None;
        }
        self.look(handle, |contents| match contents {
            Contents::Packed(run) => Some(Ok(run.clone())),
            Contents::Run(run) => Some(Err(run.clone())),
            _ => None,
        })
    }

    /// The children of a node that is written but in no checkpoint.
    pub(crate) fn written_children(&self, handle: &Handle) -> Option<Vec<Arc<Handle>>> {
        self.look(handle, |contents| match contents {
            Contents::Written { children, .. } => Some(children.clone()),
            _ => None,
        })
    }

    /// Marks that a record of the journal names the place of the node. Then the space of the node
    /// is not free before the next checkpoint, also when the node dies earlier.
    pub(crate) fn pin_by_journal(&self, handle: &Handle) {
        let mut shard = self.shard(handle.id().0).lock();
        let node = shard.get_mut(&handle.id().0);
        if let Some(Contents::Written {
            is_pinned_by_journal,
            ..
        }) = node.map(|node| &mut node.contents)
        {
            *is_pinned_by_journal = true;
        }
    }

    /// Replaces the contents of a segment by the packed run, unless a checkpoint has written it
    /// meanwhile.
    pub(crate) fn set_packed(&self, handle: &Handle, packed: PackedRun) {
        let packed = Contents::Packed(Arc::new(packed));
        let mut shard = self.shard(handle.id().0).lock();
        let node = shard.get_mut(&handle.id().0);
        let Some(node) = node.filter(|node| matches!(node.contents, Contents::Run(_))) else {
            return;
        };
        let bytes = packed.memory_bytes();
        self.memory_bytes.fetch_add(bytes, Ordering::Relaxed);
        let old = std::mem::replace(&mut node.contents, packed);
        self.memory_bytes
            .fetch_sub(old.memory_bytes(), Ordering::Relaxed);
        drop(shard);
        drop(old);
    }

    /// The node is written at `place`. Returns its reservation, to be committed.
    pub(crate) fn set_written(
        &self,
        handle: &Handle,
        place: Place,
        children: Vec<Arc<Handle>>,
    ) -> Option<SpaceReservation> {
        handle.set_place(place);
        let written = DirtyNode {
            contents: Contents::Written {
                children,
                is_pinned_by_journal: false,
            },
            reservation: None,
        };
        let old = self
            .shard(handle.id().0)
            .lock()
            .insert(handle.id().0, written);
        // A reader that still sees a fresh node finds no contents, and reads from the place.
        handle.rise(Stage::Written);
        let old = old.expect("a node is in the table until a checkpoint names it");
        self.memory_bytes
            .fetch_sub(old.contents.memory_bytes(), Ordering::Relaxed);
        old.reservation
    }

    /// Removes a node, whose last reference is gone or which a durable checkpoint names.
    pub(crate) fn remove(&self, id: u64) -> Option<DirtyNode> {
        let old = self.shard(id).lock().remove(&id)?;
        self.memory_bytes
            .fetch_sub(old.contents.memory_bytes(), Ordering::Relaxed);
        Some(old)
    }
}
