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

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::{Range, RangeInclusive};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use quick_cache::Weighter;
use ramet_block::planted::{self, Fault};
use ramet_block::wire::WireError;
use ramet_block::{BLOCK_BYTES, Codec, Device, Extent, checksum};
use ramet_nodetable::{NewNode, NodeId, NodeKind, NodeTable};

use crate::clone::capture::Mended;
use crate::error::{Error, READING_A_NODE, Result};
use crate::node::block::Block;
use crate::node::buffer::MemRun;
use crate::node::run_index::{
    MALFORMED, PackedBuilder, PackedRun, RUN_HEADER_BYTES, RunImage, RunIndex, index_len,
    segment_image,
};
use crate::node::run_view::{DiskRun, RunView};
use crate::node::skeleton::{Edge, Skeleton};
use crate::read::ahead::ReadAhead;
use crate::reshape::sweep::Healing;
use crate::store::fragments::Pieces;
use crate::store::read_whole::{Passed, Spare};
use crate::sync::{Cache, GuardResult, Mutex, cache};

/// What a node holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Leaf = 1,
    Segment = 2,
    Skeleton = 3,
}

impl Kind {
    fn in_table(self) -> NodeKind {
        match self {
            Kind::Leaf => NodeKind::Leaf,
            Kind::Segment => NodeKind::Segment,
            Kind::Skeleton => NodeKind::Skeleton,
        }
    }
}

/// Where a node's bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) extent: Extent,
    pub(crate) used_bytes: u32,
    /// Of the whole node, or of the front part of a run.
    pub(crate) checksum: u64,
}

#[derive(Debug)]
enum State {
    Skeleton(Arc<Skeleton>),
    Run(Arc<MemRun>),
    Packed(Arc<PackedRun>),
    Written {
        place: Place,
        children: Vec<Arc<Handle>>,
        /// A record of the journal names the place.
        is_named: bool,
    },
    Recorded(Option<Place>),
}

impl State {
    /// What a node that is not written yet takes of the memory for such, in bytes.
    fn memory_bytes(&self) -> u64 {
        let bytes = match self {
            State::Skeleton(node) => node.weight(),
            State::Run(run) => run.memory_bytes(),
            State::Packed(run) => run.memory_bytes,
            State::Written { .. } | State::Recorded(_) => 0,
        };
        bytes as u64
    }
}

/// Memory that a handle takes with its entry in [`Store::handles`], about, in bytes.
pub(crate) const HANDLE_BYTES: usize = size_of::<Handle>() + 48;
/// Memory that an allocation of a few bytes takes beyond these, about, in bytes.
pub(crate) const ALLOCATION_BYTES: usize = 32;

/// A node in memory; see the module header.
#[derive(Debug)]
pub(crate) struct Handle {
    id: NodeId,
    kind: Kind,
    height: u8,
    /// Space that writing it takes, in bytes; counted in [`Store::owed_bytes`] while it is fresh.
    owes: AtomicU64,
    state: Mutex<State>,
    store: Weak<Store>,
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
    fn packed_run(&self) -> Option<Arc<PackedRun>> {
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

#[derive(Clone)]
pub(crate) enum Cached {
    Skeleton(Arc<Skeleton>),
    Index(Arc<RunIndex>),
    Block(Arc<Block>),
}

#[derive(Clone)]
struct ByBytes;

/// Room set aside until the nodes that take it are counted themselves.
pub(crate) struct Room<'a> {
    store: &'a Store,
    bytes: u64,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.store
            .owed_bytes
            .fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Part of a node in the cache: 0 is the skeleton or the index, `n + 1` block `n`.
pub(crate) type CacheKey = (u64, u32);

impl Weighter<CacheKey, Cached> for ByBytes {
    fn weight(&self, _key: &CacheKey, value: &Cached) -> u64 {
        match value {
            Cached::Skeleton(node) => node.weight() as u64,
            Cached::Index(index) => index.weight() as u64,
            Cached::Block(block) => block.weight() as u64 + 64,
        }
    }
}

/// Sizes that shape the tree. Tests make them tiny so that every structural path is taken.
#[derive(Clone, Debug)]
pub struct TreeShape {
    /// Aimed-at bytes of a leaf.
    pub leaf_bytes: usize,
    /// Aimed-at bytes of a basement node and of a block of a segment.
    pub block_bytes: usize,
    /// Most children of an interior node.
    pub fanout: usize,
    /// Bytes of messages above which an interior node pushes them down.
    pub buffer_bytes: usize,
    /// Bytes of messages above which the memory buffer becomes a segment of the root.
    pub memory_bytes: usize,
    /// No leaf is rewritten before the messages that wait for it reach this part of its size, in 1/256; a shared one is then,
    /// others when the node above holds more than its buffer.
    pub theta_256: usize,
    /// Most segments of a node before small ones are merged.
    pub segments: usize,
    /// A range that lies in one leaf and is no larger is cloned as a copy.
    pub clone_copy_bytes: usize,
    /// What waits above the source of a clone is copied when it is no more than this. More of it moves to
    /// a node that source and copy share.
    pub clone_waiting_bytes: usize,
    /// Compression of leaves and segments.
    pub codec: Codec,
    /// So many bytes of consecutive values are worth leaves of their own (see [`crate::Graft`]). The tree itself takes
    /// grafts of any size; this is for whoever decides.
    pub graft_bytes: usize,
}

impl TreeShape {
    /// Most range messages of one segment. A reader loads them all when it meets the segment.
    pub(crate) fn ranges_per_segment(&self) -> usize {
        (self.block_bytes / 4).max(16)
    }
}

impl Default for TreeShape {
    fn default() -> Self {
        Self {
            leaf_bytes: 512 << 10,
            block_bytes: 16 << 10,
            fanout: 64,
            buffer_bytes: 16 << 20,
            memory_bytes: 16 << 20,
            theta_256: 64,
            segments: 12,
            clone_copy_bytes: 16 << 10,
            clone_waiting_bytes: 16 << 10,
            codec: Codec::Raw,
            graft_bytes: 128 << 10,
        }
    }
}

/// Counters of the store and the tree; all only grow.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) cache_hits: AtomicU64,
    pub(crate) cache_misses: AtomicU64,
    pub(crate) node_reads: AtomicU64,
    /// Nodes and segments that lookups and clones went through.
    pub(crate) node_visits: AtomicU64,
    pub(crate) bytes_read: AtomicU64,
    /// Lookups in runs that the filter answered.
    pub(crate) filter_denials: AtomicU64,
    /// Leaves that scans asked for before they came to them.
    pub(crate) leaves_ahead: AtomicU64,
    pub(crate) leaf_bytes: AtomicU64,
    /// Of the leaves, those that were grafted.
    pub(crate) graft_bytes: AtomicU64,
    pub(crate) segment_bytes: AtomicU64,
    /// Of the segments, what was copied from others that were written before.
    pub(crate) copied_bytes: AtomicU64,
    pub(crate) skeleton_bytes: AtomicU64,
    // Structural paths taken.
    pub(crate) splits: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) rewrites: AtomicU64,
    pub(crate) coalesces: AtomicU64,
    pub(crate) collapses: AtomicU64,
    pub(crate) flattens: AtomicU64,
    pub(crate) segment_merges: AtomicU64,
    pub(crate) goto_sinks: AtomicU64,
    pub(crate) goto_waits: AtomicU64,
    pub(crate) conversions: AtomicU64,
    pub(crate) overlaps_left: AtomicU64,
    pub(crate) overlaps_right: AtomicU64,
    pub(crate) overlaps_both: AtomicU64,
    pub(crate) unshares: AtomicU64,
    pub(crate) prunes: AtomicU64,
    pub(crate) reclaimed: AtomicU64,
    pub(crate) grafts: AtomicU64,
    pub(crate) mends: AtomicU64,
    pub(crate) clone_waits: AtomicU64,
    pub(crate) checkpoints: AtomicU64,
}

impl Counters {
    /// Bytes of all nodes that were written.
    pub(crate) fn bytes_written(&self) -> u64 {
        let parts = [&self.leaf_bytes, &self.segment_bytes, &self.skeleton_bytes];
        parts.iter().map(|n| n.load(Ordering::Relaxed)).sum()
    }
}

/// How a node gets to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    /// Like anything: who reads it soon finds it in the cache of the device.
    Cache,
    /// Past that cache: large, and not read by the tree itself soon.
    Bulk,
}

/// Which of the blocks that one request reads go into the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keeping {
    All,
    /// The first and the last, which the requests before and after may need as well.
    Ends,
}

pub(crate) fn bump(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Longest request that reads several blocks of a leaf, in bytes: about a leaf. Others follow it at once, and a disk seeks
/// between them.
const LEAF_READ_BYTES_MAX: u32 = 512 << 10;
/// The same for a segment.
const SEGMENT_READ_BYTES_MAX: u32 = 2 << 20;
/// A scan that reads on takes so much of a segment with its index, in bytes: most segments are no longer than the most, and in most of
/// those that are the index is not.
const SEGMENT_FRONT_BYTES: RangeInclusive<usize> = 64 << 10..=128 << 10;
/// Part of a segment that its index may take.
const SEGMENT_INDEX_PART: usize = 16;
/// Segments up to this length, and skeletons up to a shorter one, are read together, in bytes,
const SEGMENT_TOGETHER_BYTES: usize = *SEGMENT_FRONT_BYTES.start();
const TOGETHER_BYTES: usize = 16 << 10;
/// when no more than this lies between two of them: a disk passes it in a tenth of the time of a jump.
const BETWEEN_BYTES: u64 = 64 << 10;

/// Most nodes remembered as not worth flattening.
const UNFLATTENABLE_MAX: usize = 4096;

/// All nodes of a volume.
pub(crate) struct Store {
    pub(crate) dev: Arc<dyn Device>,
    pub(crate) table: NodeTable,
    pub(crate) shape: TreeShape,
    pub(crate) counters: Counters,
    /// Memory of nodes that are not written yet, in bytes.
    pub(crate) fresh_bytes: AtomicU64,
    /// Space that the next checkpoint takes to write what is in memory only, in bytes.
    owed_bytes: AtomicU64,
    /// Bytes of messages in the memory buffer.
    pub(crate) buffered_bytes: AtomicU64,
    /// Steps that were left out for want of room.
    pub(crate) healing: Healing,
    /// Bytes of messages that wait in the root for interior nodes.
    pub(crate) waiting_bytes: AtomicU64,
    /// Places of dead leaves that records of the journal name, oldest first.
    dead_named: Mutex<Vec<Extent>>,
    pub(crate) read_ahead: ReadAhead,
    pub(crate) spare: Arc<Spare>,
    pub(crate) passed: Mutex<Passed>,
    cache: Cache<CacheKey, Cached, ByBytes>,
    /// Held while nodes are claimed that one request reads, so that two who want the same do not get half of them each.
    claiming: Mutex<()>,
    handles: Mutex<HashMap<u64, Weak<Handle>>>,
    next_id: AtomicU64,
    /// Nodes that flattening did not help, forgotten when they are many.
    unflattenable: Mutex<HashSet<u64>>,
    /// What clones go on from, oldest first.
    pub(crate) mended: Mutex<VecDeque<Mended>>,
    me: Weak<Store>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

pub(crate) fn io_error(what: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |e| Error::Io {
        what,
        source: Arc::new(e),
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
        Arc::new_cyclic(|me| Self {
            dev,
            table,
            shape,
            counters: Counters::default(),
            fresh_bytes: AtomicU64::new(0),
            owed_bytes: AtomicU64::new(0),
            buffered_bytes: AtomicU64::new(0),
            healing: Healing::default(),
            waiting_bytes: AtomicU64::new(0),
            dead_named: Mutex::new(Vec::new()),
            read_ahead: ReadAhead::default(),
            spare: Arc::default(),
            passed: Mutex::default(),
            cache: cache(items, cache_bytes, ByBytes),
            claiming: Mutex::new(()),
            handles: Mutex::new(HashMap::new()),
            next_id: AtomicU64::new(next_id),
            unflattenable: Mutex::new(HashSet::new()),
            mended: Mutex::new(VecDeque::new()),
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
            return (handle.kind == kind && handle.height == height).then_some(handle);
        }
        let handle = Arc::new(Handle {
            id,
            kind,
            height,
            owes: AtomicU64::new(0),
            state: Mutex::new(State::Recorded(None)),
            store: self.me.clone(),
        });
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

    fn fresh(&self, kind: Kind, height: u8, state: State) -> Arc<Handle> {
        let id = NodeId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let bytes = match &state {
            State::Skeleton(node) => node.encoded_bytes_max(),
            State::Run(run) => run.size_bytes() + RUN_HEADER_BYTES,
            State::Packed(run) => run.stored_bytes_max(),
            State::Written { .. } | State::Recorded(_) => 0,
        };
        let owes = (bytes as u64).next_multiple_of(BLOCK_BYTES);
        self.owed_bytes.fetch_add(owes, Ordering::Relaxed);
        self.fresh_bytes
            .fetch_add(state.memory_bytes(), Ordering::Relaxed);
        let handle = Arc::new(Handle {
            id,
            kind,
            height,
            owes: AtomicU64::new(owes),
            state: Mutex::new(state),
            store: self.me.clone(),
        });
        self.handles.lock().insert(id.0, Arc::downgrade(&handle));
        handle
    }

    pub(crate) fn new_skeleton(&self, mut node: Skeleton) -> Arc<Handle> {
        node.shrink();
        self.fresh(Kind::Skeleton, node.height, State::Skeleton(Arc::new(node)))
    }

    pub(crate) fn new_segment(&self, run: MemRun) -> Arc<Handle> {
        self.fresh(Kind::Segment, 0, State::Run(Arc::new(run)))
    }

    pub(crate) fn new_packed(&self, run: PackedRun) -> Arc<Handle> {
        self.fresh(Kind::Segment, 0, State::Packed(Arc::new(run)))
    }

    /// Packs a segment of points that is in memory only; no effect on others.
    pub(crate) fn pack(&self, handle: &Handle) {
        let Some(run) = handle.fresh_run().filter(|run| run.range_count() == 0) else {
            return;
        };
        let mut builder = PackedBuilder::new(self.shape.block_bytes);
        for (key, point) in run.points() {
            builder.add(key, point);
        }
        let Some(packed) = builder.finish() else {
            return;
        };
        let mut state = handle.state.lock();
        // A checkpoint may have written it meanwhile.
        if !matches!(&*state, State::Run(_)) {
            return;
        }
        let packed = State::Packed(Arc::new(packed));
        self.fresh_bytes
            .fetch_add(packed.memory_bytes(), Ordering::Relaxed);
        let old = std::mem::replace(&mut *state, packed);
        self.fresh_bytes
            .fetch_sub(old.memory_bytes(), Ordering::Relaxed);
        drop(state);
        drop((old, run));
    }

    /// Room that is kept for structural work when the volume is as full as it gets, in bytes: several leaves, so that
    /// deletions can be applied to the leaves that hold what they delete, half of it for those alone.
    pub(crate) fn slack_bytes(&self) -> u64 {
        let total = self.table.usable_bytes();
        let leaves = 12 * self.shape.leaf_bytes as u64;
        let buffers = (4 * self.shape.buffer_bytes as u64).min(total / 32);
        leaves.max(buffers).max(16 * BLOCK_BYTES).min(total / 8)
    }

    /// Space beyond the reserve and beyond what a checkpoint takes to write what is in memory now, in bytes.
    pub(crate) fn room_bytes(&self) -> u64 {
        self.table.room_bytes().saturating_sub(self.owed_bytes())
    }

    /// Room that what was accepted may still take, in bytes: the slack, and half of what waits above interior nodes or
    /// in memory. All of that is written once more on its way down, and what it leaves is free only after a checkpoint; by
    /// halves there is always room for that.
    pub(crate) fn liability_bytes(&self) -> u64 {
        let waiting = self.waiting_bytes.load(Ordering::Relaxed)
            + self.buffered_bytes.load(Ordering::Relaxed);
        self.slack_bytes() + waiting.max(self.owed_bytes()) / 2
    }

    /// Room for data to come, in bytes.
    pub(crate) fn available_bytes(&self) -> u64 {
        self.room_bytes().saturating_sub(self.liability_bytes())
    }

    /// `root` is about to become the root.
    pub(crate) fn set_waiting(&self, root: &Skeleton) {
        let is_interior = |e: &Edge| {
            let child = e.child.as_ref();
            child.is_some_and(|c| c.node.kind() == Kind::Skeleton)
        };
        let bytes = if root.edges.iter().any(is_interior) {
            root.segs.iter().map(|seg| seg.bytes).sum()
        } else {
            0
        };
        self.waiting_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Sets `bytes` of the room aside for nodes about to be made.
    ///
    /// # Errors
    /// `NoSpace`.
    pub(crate) fn take_room(&self, bytes: u64) -> Result<Room<'_>> {
        // Counted before it is compared: others who ask meanwhile see it.
        self.owed_bytes.fetch_add(bytes, Ordering::Relaxed);
        let room = Room { store: self, bytes };
        if self.table.room_bytes() < self.owed_bytes() {
            return Err(Error::NoSpace);
        }
        Ok(room)
    }

    /// The same for steps that remove nothing: half of the slack, which deletions need on their way down, is left alone. What
    /// such steps replace may be shared, and so not become free.
    ///
    /// # Errors
    /// `NoSpace`.
    pub(crate) fn take_spare_room(&self, bytes: u64) -> Result<Room<'_>> {
        let room = self.take_room(bytes)?;
        if self.room_bytes() < self.slack_bytes() / 2 {
            return Err(Error::NoSpace);
        }
        Ok(room)
    }

    /// Grows with every step that moves messages down.
    pub(crate) fn structural_work(&self) -> u64 {
        let c = &self.counters;
        [&c.rewrites, &c.flushes, &c.conversions, &c.segment_merges]
            .iter()
            .map(|n| n.load(Ordering::Relaxed))
            .sum()
    }

    /// Nothing will be written for `handle` any more.
    fn settle(&self, handle: &Handle) {
        let owes = handle.owes.swap(0, Ordering::Relaxed);
        self.owed_bytes.fetch_sub(owes, Ordering::Relaxed);
    }

    /// Bytes that are in memory only.
    pub(crate) fn owed_bytes(&self) -> u64 {
        self.owed_bytes.load(Ordering::Relaxed) + self.buffered_bytes.load(Ordering::Relaxed)
    }

    /// The leaf at a place that a record of the journal names.
    pub(crate) fn named_leaf(&self, place: Place) -> Arc<Handle> {
        self.fresh(
            Kind::Leaf,
            0,
            State::Written {
                place,
                children: Vec::new(),
                is_named: true,
            },
        )
    }

    /// Number and bytes of the places of dead leaves that records of the journal name.
    pub(crate) fn dead_named(&self) -> (usize, u64) {
        let dead = self.dead_named.lock();
        (dead.len(), dead.iter().map(|extent| extent.len).sum())
    }

    /// The checkpoint that has no need of the records that named the oldest `count` of them is durable.
    pub(crate) fn free_dead_named(&self, count: usize) {
        let dead: Vec<Extent> = self.dead_named.lock().drain(..count).collect();
        self.table.free_discarded(dead);
    }

    /// Writes a run now, when that leaves room for the next checkpoint; it is durable with the next checkpoint that names it.
    pub(crate) fn write_run(&self, image: RunImage, via: Via) -> Result<Arc<Handle>> {
        let _room = self.take_room((image.bytes.len() as u64).next_multiple_of(BLOCK_BYTES))?;
        let place = self.write_node(image.kind, image.bytes, image.checksum, false, via)?;
        let handle = self.fresh(
            image.kind,
            0,
            State::Written {
                place,
                children: image.children,
                is_named: false,
            },
        );
        // Whoever makes an edge to it looks at its index: what was just written is not read back for that.
        if let Some(index) = image.index {
            let index = Cached::Index(Arc::new(index));
            self.cache.insert((handle.id.0, 0), index);
        }
        Ok(handle)
    }

    fn write_node(
        &self,
        kind: Kind,
        mut bytes: Vec<u8>,
        sum: u64,
        reserved: bool,
        via: Via,
    ) -> Result<Place> {
        let used_bytes = u32::try_from(bytes.len()).expect("a node is far below 4 GiB");
        let len = u64::from(used_bytes);
        let extent = if reserved {
            self.table.alloc_reserved(len)
        } else {
            self.table.alloc(len)
        }?;
        // Whole blocks: a partial block would make the device read before it writes.
        bytes.resize(usize::try_from(extent.len).expect("a node fits memory"), 0);
        let counter = match kind {
            Kind::Leaf => &self.counters.leaf_bytes,
            Kind::Segment => &self.counters.segment_bytes,
            Kind::Skeleton => &self.counters.skeleton_bytes,
        };
        counter.fetch_add(extent.len, Ordering::Relaxed);
        let written = match via {
            Via::Cache => self.dev.write_at(extent.addr, &bytes),
            Via::Bulk => self.dev.write_bulk(extent.addr, &bytes),
        };
        if let Err(e) = written {
            self.table.free_unpublished(extent);
            return Err(io_error("writing a node")(e));
        }
        Ok(Place {
            extent,
            used_bytes,
            checksum: sum,
        })
    }

    /// Writes a new segment for a checkpoint.
    pub(crate) fn write_segment(&self, image: RunImage) -> Result<Arc<Handle>> {
        let place = self.write_node(image.kind, image.bytes, image.checksum, true, Via::Cache)?;
        Ok(self.fresh(
            image.kind,
            0,
            State::Written {
                place,
                children: image.children,
                is_named: false,
            },
        ))
    }

    /// Writes a fresh segment or skeleton whose children are all written; no effect on others. A segment that no
    /// hole takes goes to `pieces` and stays fresh.
    pub(crate) fn write_back(&self, handle: &Arc<Handle>, pieces: &mut Pieces) -> Result<()> {
        let (codec, block_bytes) = (self.shape.codec, self.shape.block_bytes);
        let (run, packed) = (handle.fresh_run(), handle.packed_run());
        let image = match (&run, &packed) {
            (Some(run), _) => Some(segment_image(run, codec, block_bytes)),
            (None, Some(packed)) => Some(packed.image(codec)),
            (None, None) => None,
        };
        if let Some(image) = image {
            let len = image.bytes.len() as u64;
            match self.write_node(image.kind, image.bytes, image.checksum, true, Via::Cache) {
                Ok(place) => {
                    // The next flush weighs it.
                    if let Some(index) = image.index {
                        let index = Cached::Index(Arc::new(index));
                        self.cache.insert((handle.id.0, 0), index);
                    }
                    self.become_written(handle, place, image.children);
                }
                Err(Error::NoSpace) if self.table.stats().free >= len => {
                    let run = run.or_else(|| packed.map(|packed| Arc::new(packed.to_mem())));
                    let run = run.expect("an image is of one of them");
                    // It settles when the last node that refers to it has gone: other pieces may find no room, and then
                    // all of it is written once more.
                    pieces.insert(handle.id, self.write_in_pieces(&run)?);
                }
                Err(error) => return Err(error),
            }
        } else if let Some(node) = handle.fresh_skeleton() {
            let node = node.with_pieces(pieces).map_or(node, Arc::new);
            let bytes = node.encode();
            let sum = checksum(&bytes);
            let place = self.write_node(Kind::Skeleton, bytes, sum, true, Via::Cache)?;
            let children = node.children().cloned().collect();
            self.cache.insert((handle.id.0, 0), Cached::Skeleton(node));
            self.become_written(handle, place, children);
        }
        Ok(())
    }

    fn become_written(&self, handle: &Handle, place: Place, children: Vec<Arc<Handle>>) {
        let old = std::mem::replace(
            &mut *handle.state.lock(),
            State::Written {
                place,
                children,
                is_named: false,
            },
        );
        self.fresh_bytes
            .fetch_sub(old.memory_bytes(), Ordering::Relaxed);
        self.settle(handle);
        // Dropped without the lock: the last hold on a node may go with it.
        drop(old);
    }

    /// What the node table is told about a written node.
    pub(crate) fn record_of(handle: &Handle) -> Option<NewNode> {
        let (place, children) = handle.written()?;
        Some(NewNode {
            id: handle.id,
            extent: place.extent,
            used_bytes: place.used_bytes,
            checksum: place.checksum,
            kind: handle.kind.in_table(),
            height: handle.height,
            children: children.iter().map(|c| c.id).collect(),
        })
    }

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

    pub(crate) fn place(&self, handle: &Handle) -> Result<Place> {
        match &*handle.state.lock() {
            State::Written { place, .. } | State::Recorded(Some(place)) => return Ok(*place),
            State::Recorded(None) => {}
            State::Skeleton(_) | State::Run(_) | State::Packed(_) => {
                unreachable!("the caller has seen that the node is not fresh")
            }
        }
        let record = self.table.get(handle.id)?.ok_or_else(|| Error::Corrupt {
            what: "node table",
            addr: 0,
            detail: format!("node {} is referred to and has no record", handle.id.0),
        })?;
        if record.kind != handle.kind.in_table() || record.height != handle.height {
            return Err(Error::Corrupt {
                what: "node table",
                addr: record.extent.addr,
                detail: format!(
                    "node {} is {:?} of height {}, expected {:?} of height {}",
                    handle.id.0, record.kind, record.height, handle.kind, handle.height
                ),
            });
        }
        let place = Place {
            extent: record.extent,
            used_bytes: record.used_bytes,
            checksum: record.checksum,
        };
        if let State::Recorded(slot) = &mut *handle.state.lock() {
            *slot = Some(place);
        }
        Ok(place)
    }

    pub(crate) fn read(&self, addr: u64, len: usize) -> Result<Vec<u8>> {
        let mut buf = vec![0; len];
        self.read_to(addr, &mut buf)?;
        Ok(buf)
    }

    /// The same into memory that is there.
    pub(crate) fn read_to(&self, addr: u64, buf: &mut [u8]) -> Result<()> {
        self.count_read(buf.len());
        self.dev
            .read_at(addr, buf)
            .map_err(io_error(READING_A_NODE))
    }

    /// The same, and nothing beyond that is read for later.
    fn read_alone(&self, addr: u64, len: usize) -> Result<Vec<u8>> {
        let mut buf = vec![0; len];
        self.count_read(len);
        self.dev
            .read_alone_at(addr, &mut buf)
            .map_err(io_error(READING_A_NODE))?;
        Ok(buf)
    }

    fn count_read(&self, len: usize) {
        bump(&self.counters.node_reads);
        self.counters
            .bytes_read
            .fetch_add(len as u64, Ordering::Relaxed);
    }

    /// The skeleton of an interior node.
    pub(crate) fn skeleton(&self, handle: &Handle) -> Result<Arc<Skeleton>> {
        if let Some(node) = handle.fresh_skeleton() {
            return Ok(node);
        }
        let loaded = self.cached((handle.id.0, 0), || {
            let place = self.place(handle)?;
            let bytes = self.read(place.extent.addr, place.used_bytes as usize)?;
            let node = self.decode_skeleton(handle, &place, &bytes)?;
            Ok(Cached::Skeleton(Arc::new(node)))
        })?;
        match loaded {
            Cached::Skeleton(node) => Ok(node),
            _ => Err(two_kinds(handle)),
        }
    }

    /// The interior node that `bytes`, read from its place, hold.
    pub(crate) fn decode_skeleton(
        &self,
        handle: &Handle,
        place: &Place,
        bytes: &[u8],
    ) -> Result<Skeleton> {
        verify(bytes, place, "skeleton")?;
        let mut node_of = |id, height| self.recorded_child(id, height);
        let mut run_of = |id| self.recorded(NodeId(id), Kind::Segment, 0);
        let node = Skeleton::decode(bytes, &mut node_of, &mut run_of)
            .map_err(|e| malformed("skeleton", place, &e))?;
        if node.height != handle.height {
            return Err(malformed("skeleton", place, &MALFORMED));
        }
        Ok(node)
    }

    /// A leaf or a segment.
    pub(crate) fn run(&self, handle: &Arc<Handle>) -> Result<RunView> {
        // One look: it may be packed or written between two.
        match &*handle.state.lock() {
            State::Run(run) => return Ok(RunView::Mem(run.clone())),
            State::Packed(run) => {
                return Ok(RunView::Disk(DiskRun {
                    handle: handle.clone(),
                    index: run.index.clone(),
                    packed: Some(run.clone()),
                }));
            }
            State::Skeleton(_) | State::Written { .. } | State::Recorded(_) => {}
        }
        let loaded = self.cached((handle.id.0, 0), || {
            self.load_index(handle, self.shape.block_bytes)
        })?;
        match loaded {
            Cached::Index(index) => Ok(RunView::Disk(DiskRun {
                handle: handle.clone(),
                index,
                packed: None,
            })),
            _ => Err(two_kinds(handle)),
        }
    }

    /// Loads the front of a segment for a scan that reads on, with all that a long request gives if it wants the `whole`
    /// segment, as far as the cache has room.
    pub(crate) fn load_eagerly(&self, segment: &Handle, whole: bool) -> Result<()> {
        if segment.is_fresh() || self.room_ahead() <= self.shape.block_bytes {
            return Ok(());
        }
        self.cached((segment.id.0, 0), || {
            let ahead = if whole {
                SEGMENT_READ_BYTES_MAX as usize
            } else {
                let (least, most) = SEGMENT_FRONT_BYTES.into_inner();
                match self.place(segment)?.used_bytes as usize {
                    short if short <= most => most,
                    long => (long / SEGMENT_INDEX_PART).clamp(least, most),
                }
            };
            self.load_index(segment, ahead.min(self.room_ahead()))
        })?;
        Ok(())
    }

    /// Bytes of one node that may come into the cache before somebody asks for them.
    pub(crate) fn room_ahead(&self) -> usize {
        usize::try_from(self.cache.capacity() / 64).unwrap_or(usize::MAX)
    }

    /// Reads the front of a run, `ahead` bytes if it is so long. Blocks that come along whole stay in the cache.
    pub(crate) fn load_index(&self, handle: &Handle, ahead: usize) -> Result<Cached> {
        let place = self.place(handle)?;
        let guess = (place.used_bytes as usize).min(ahead.max(4096));
        let least = guess.min(4096);
        let mut front = match self.read(place.extent.addr, guess) {
            // It may be something that nobody asked for.
            Err(_) if guess > least => self.read(place.extent.addr, least)?,
            read => read?,
        };
        let len = front_len(&place, &front)?;
        if len > front.len() {
            let rest = self.read(place.extent.addr + front.len() as u64, len - front.len())?;
            front.extend_from_slice(&rest);
        }
        let index = self.keep_front(handle, &place, &front, len)?;
        Ok(Cached::Index(Arc::new(index)))
    }

    /// Loads short segments of a node, those that are wanted (with `true`) with those that lie close to them, in one request: those that
    /// one checkpoint wrote do. What cannot be read this way is left to whoever asks for it.
    pub(crate) fn load_together<'a>(
        &self,
        segments: impl Iterator<Item = (&'a Arc<Handle>, bool)>,
    ) -> Result<()> {
        let longest = SEGMENT_TOGETHER_BYTES.min(self.room_ahead());
        self.read_together(segments, longest, |segment, place, front| {
            let len = index_len(front, place.used_bytes)?;
            let index = self.keep_front(segment, place, front, len).ok()?;
            Some(Cached::Index(Arc::new(index)))
        })
    }

    /// The same for the skeletons of neighbours, the first of which is wanted: whoever reads on wants the others soon.
    pub(crate) fn load_neighbours<'a>(
        &self,
        nodes: impl Iterator<Item = &'a Arc<Handle>>,
    ) -> Result<()> {
        let nodes = nodes.filter(|node| node.kind() == Kind::Skeleton);
        let nodes = nodes.enumerate().map(|(at, node)| (node, at == 0));
        self.read_together(nodes, TOGETHER_BYTES, |node, place, bytes| {
            let skeleton = self.decode_skeleton(node, place, bytes).ok()?;
            Some(Cached::Skeleton(Arc::new(skeleton)))
        })
    }

    /// Reads nodes of up to `longest` bytes that lie close to wanted ones with them, and keeps what `decode` makes of the bytes of each.
    fn read_together<'a>(
        &self,
        nodes: impl Iterator<Item = (&'a Arc<Handle>, bool)>,
        longest: usize,
        decode: impl Fn(&Handle, &Place, &[u8]) -> Option<Cached>,
    ) -> Result<()> {
        if self.room_ahead() < TOGETHER_BYTES {
            return Ok(());
        }
        let mut short = Vec::new();
        for (node, is_wanted) in nodes {
            if node.is_fresh() || self.cache.contains_key(&(node.id.0, 0)) {
                continue;
            }
            // Whoever asks for it is told what is wrong with it.
            let Ok(place) = self.place(node) else {
                continue;
            };
            if place.used_bytes as usize <= longest {
                short.push((place, node, is_wanted));
            }
        }
        short.sort_unstable_by_key(|(place, ..)| place.extent.addr);
        let end = |place: &Place| place.extent.addr + u64::from(place.used_bytes);
        let mut rest = &short[..];
        while let [(first, ..), ..] = rest {
            let is_near = |(a, b): (&(Place, _, _), &(Place, _, _))| {
                b.0.extent.addr <= end(&a.0) + BETWEEN_BYTES
                    && end(&b.0) - first.extent.addr <= u64::from(SEGMENT_READ_BYTES_MAX)
            };
            let more = rest
                .iter()
                .zip(&rest[1..])
                .take_while(|&pair| is_near(pair));
            let (group, others) = rest.split_at(1 + more.count());
            rest = others;
            if !group.iter().any(|(.., is_wanted)| *is_wanted) {
                continue;
            }
            // What somebody else reads just now is left to them. Never waits for that while it makes others wait.
            let claiming = self.claiming.lock();
            let claimed = group.iter().filter_map(|(place, node, _)| {
                let key = (node.id.0, 0);
                match self.cache.get_value_or_guard(&key, Some(Duration::ZERO)) {
                    GuardResult::Guard(guard) => Some((place, node, guard)),
                    GuardResult::Value(_) | GuardResult::Timeout => None,
                }
            });
            let claimed = claimed.collect::<Vec<_>>();
            drop(claiming);
            let [(first, ..), .., (last, ..)] = &claimed[..] else {
                continue;
            };
            let start = first.extent.addr;
            let len = last.extent.addr - start + u64::from(last.used_bytes);
            let len = usize::try_from(len).expect("some segments fit memory");
            let Ok(bytes) = self.read(start, len) else {
                continue;
            };
            for (place, node, guard) in claimed {
                let from = (place.extent.addr - start) as usize;
                // Two places that overlap are forged.
                let kept = bytes
                    .get(from..from + place.used_bytes as usize)
                    .and_then(|bytes| decode(node, place, bytes));
                if let Some(kept) = kept {
                    // It stays out when the cache has given the place away meanwhile.
                    let _ = guard.insert(kept);
                }
            }
        }
        Ok(())
    }

    /// The index, `len` bytes long, at the start of `front`. Whole blocks behind it go into the cache.
    fn keep_front(
        &self,
        handle: &Handle,
        place: &Place,
        front: &[u8],
        len: usize,
    ) -> Result<RunIndex> {
        let index = self.decode_index(handle, place, &front[..len])?;
        for (at, meta) in index.blocks.iter().enumerate() {
            let Some(stored) = front.get(meta.offset as usize..meta.end() as usize) else {
                break;
            };
            let next = index.blocks.get(at + 1).map(|next| &next.first_key);
            let addr = place.extent.addr + u64::from(meta.offset);
            let stored = Bytes::copy_from_slice(stored);
            // What came along is judged when it is asked for.
            if let Ok(block) = meta.decode(handle.kind, stored, next, addr) {
                self.keep_block(handle, at, &Arc::new(block));
            }
        }
        Ok(index)
    }

    pub(crate) fn keep_block(&self, handle: &Handle, at: usize, block: &Arc<Block>) {
        let part = u32::try_from(at + 1).expect("blocks of a run fit 32 bits");
        let kept = Cached::Block(block.clone());
        self.cache.insert((handle.id.0, part), kept);
    }

    /// The index that `front`, the front part of a run, holds.
    pub(crate) fn decode_index(
        &self,
        handle: &Handle,
        place: &Place,
        front: &[u8],
    ) -> Result<RunIndex> {
        verify(front, place, RUN_FRONT)?;
        let mut node_of = |id, height| self.recorded_child(id, height);
        RunIndex::decode(front, handle.kind, place.used_bytes, &mut node_of)
            .map_err(|e| malformed(RUN_FRONT, place, &e))
    }

    /// The index of the run that `bytes`, read from its place, begin with.
    pub(crate) fn decode_front(
        &self,
        handle: &Handle,
        place: &Place,
        bytes: &[u8],
    ) -> Result<RunIndex> {
        let front = bytes.get(..front_len(place, bytes)?);
        let front = front.ok_or_else(|| malformed(RUN_FRONT, place, &MALFORMED))?;
        self.decode_index(handle, place, front)
    }

    /// One block of a run.
    pub(crate) fn block(&self, run: &DiskRun, at: usize) -> Result<Arc<Block>> {
        let mut blocks = self.blocks(run, at, 0, Keeping::All, false)?;
        Ok(blocks.pop().expect("a read yields a block"))
    }

    /// Block `at` of a run, and up to `ahead` blocks behind it as far as they come along in the same request. With `alone` the
    /// device is to read no more than that.
    pub(crate) fn blocks(
        &self,
        run: &DiskRun,
        at: usize,
        ahead: usize,
        keeping: Keeping,
        alone: bool,
    ) -> Result<Vec<Arc<Block>>> {
        if let Some(packed) = &run.packed {
            return Ok(vec![packed.blocks[at].clone()]);
        }
        let key = |n: usize| {
            let part = u32::try_from(n + 1).expect("blocks of a run fit 32 bits");
            (run.handle.id.0, part)
        };
        // Whoever else wants the block meanwhile waits for it instead of reading it too.
        let mut guards = match self.cache.get_value_or_guard(&key(at), None) {
            GuardResult::Value(Cached::Block(block)) => {
                bump(&self.counters.cache_hits);
                return Ok(vec![block]);
            }
            GuardResult::Value(_) => return Err(two_kinds(&run.handle)),
            GuardResult::Guard(guard) => vec![guard],
            GuardResult::Timeout => unreachable!("no time was set"),
        };
        bump(&self.counters.cache_misses);
        let metas = &run.index.blocks;
        let start = metas[at].offset;
        let longest = match run.handle.kind {
            Kind::Segment => SEGMENT_READ_BYTES_MAX,
            Kind::Leaf | Kind::Skeleton => LEAF_READ_BYTES_MAX,
        };
        for (n, meta) in metas.iter().enumerate().skip(at + 1).take(ahead) {
            if meta.end() - start > longest {
                break;
            }
            // Never waits while it makes others wait.
            match self.cache.get_value_or_guard(&key(n), Some(Duration::ZERO)) {
                GuardResult::Guard(guard) => guards.push(guard),
                GuardResult::Value(_) | GuardResult::Timeout => break,
            }
        }
        let place = self.place(&run.handle)?;
        let addr = place.extent.addr + u64::from(start);
        let read = |blocks: usize| {
            let len = (metas[at + blocks - 1].end() - start) as usize;
            Ok(match keeping {
                Keeping::All if alone => Bytes::from(self.read_alone(addr, len)?),
                Keeping::All => Bytes::from(self.read(addr, len)?),
                Keeping::Ends => self.read_passing(addr, len)?,
            })
        };
        let bytes: Result<_> = read(guards.len());
        let bytes = match bytes {
            // It may be a block that nobody asked for.
            Err(_) if guards.len() > 1 => {
                guards.truncate(1);
                read(1)?
            }
            bytes => bytes?,
        };
        let firsts = metas.iter().map(|meta| &meta.first_key);
        let mut nexts = firsts.skip(at + 1);
        let metas = &metas[at..at + guards.len()];
        let last = guards.len() - 1;
        let mut blocks = Vec::with_capacity(guards.len());
        for (n, (meta, guard)) in metas.iter().zip(guards).enumerate() {
            let from = (meta.offset - start) as usize;
            let stored = from..from + meta.stored_bytes as usize;
            let is_kept = match keeping {
                Keeping::All => true,
                Keeping::Ends => n == 0 || n == last,
            };
            // A slice of a long read, or of a buffer that is used again, would keep all of it.
            let is_own = keeping == Keeping::All && stored.len() == bytes.len();
            let stored = if !is_kept || is_own {
                bytes.slice(stored)
            } else {
                Bytes::copy_from_slice(&bytes[stored])
            };
            let addr = place.extent.addr + u64::from(meta.offset);
            match meta.decode(run.handle.kind, stored, nexts.next(), addr) {
                Ok(block) => {
                    let block = Arc::new(block);
                    if is_kept {
                        // It stays out when the cache has given the place away meanwhile.
                        let _ = guard.insert(Cached::Block(block.clone()));
                    }
                    blocks.push(block);
                }
                // What came along is judged when it is asked for.
                Err(_) if !blocks.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        Ok(blocks)
    }

    /// The index of a run, if it is in the cache. Not counted as a use.
    pub(crate) fn cached_index(&self, handle: &Handle) -> Option<Arc<RunIndex>> {
        match self.cache.peek(&(handle.id.0, 0)) {
            Some(Cached::Index(index)) => Some(index),
            _ => None,
        }
    }

    /// Where a block lies on the device that has to be read from there.
    pub(crate) fn uncached_block(&self, run: &DiskRun, at: usize) -> Option<Range<u64>> {
        if run.packed.is_some() || self.is_block_cached(&run.handle, at) {
            return None;
        }
        let meta = run.index.blocks.get(at)?;
        let start = self.place(&run.handle).ok()?.extent.addr + u64::from(meta.offset);
        Some(start..start + u64::from(meta.stored_bytes))
    }

    pub(crate) fn is_block_cached(&self, handle: &Handle, at: usize) -> bool {
        u32::try_from(at + 1).is_ok_and(|part| self.cache.contains_key(&(handle.id.0, part)))
    }

    /// A skeleton that can be had without reading. Not counted as a use.
    pub(crate) fn skeleton_at_hand(&self, handle: &Handle) -> Option<Arc<Skeleton>> {
        handle
            .fresh_skeleton()
            .or_else(|| match self.cache.peek(&(handle.id.0, 0)) {
                Some(Cached::Skeleton(node)) => Some(node),
                _ => None,
            })
    }

    pub(crate) fn cached(
        &self,
        key: CacheKey,
        load: impl FnOnce() -> Result<Cached>,
    ) -> Result<Cached> {
        let mut missed = false;
        let found = self.cache.get_or_insert_with(&key, || {
            missed = true;
            load()
        });
        bump(if missed {
            &self.counters.cache_misses
        } else {
            &self.counters.cache_hits
        });
        found
    }

    /// Nodes that are gone leave the cache.
    pub(crate) fn evict(&self, ids: &[NodeId]) {
        for id in ids {
            self.cache.remove(&(id.0, 0));
        }
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

    /// Most bytes that the cache holds.
    pub(crate) fn cache_capacity(&self) -> u64 {
        self.cache.capacity()
    }

    /// Bytes in the cache.
    pub(crate) fn cached_bytes(&self) -> u64 {
        self.cache.weight()
    }
}

/// How errors call the front part of a run.
const RUN_FRONT: &str = "front of a run";

fn verify(bytes: &[u8], place: &Place, what: &'static str) -> Result<()> {
    let found = checksum(bytes);
    if found == place.checksum || planted::is(Fault::NodeChecksumSkipped) {
        return Ok(());
    }
    let detail = format!("checksum {found:016x}, expected {:016x}", place.checksum);
    Err(Error::Corrupt {
        what,
        addr: place.extent.addr,
        detail,
    })
}

/// Two nodes refer to one as different kinds; the table knows only one of them, and it has been read.
fn two_kinds(handle: &Handle) -> Error {
    let detail = format!(
        "node {} is referred to as {:?} and as another kind",
        handle.id.0, handle.kind
    );
    Error::Corrupt {
        what: "node table",
        addr: 0,
        detail,
    }
}

/// How much of a run, which `bytes` begin, its index takes.
fn front_len(place: &Place, bytes: &[u8]) -> Result<usize> {
    index_len(bytes, place.used_bytes).ok_or_else(|| malformed(RUN_FRONT, place, &MALFORMED))
}

fn malformed(what: &'static str, place: &Place, why: &WireError) -> Error {
    Error::Corrupt {
        what,
        addr: place.extent.addr,
        detail: format!("malformed, though its checksum holds: {why}"),
    }
}
