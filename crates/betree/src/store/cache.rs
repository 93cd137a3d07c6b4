//! The node cache: parts of nodes in memory, counted by their bytes, and reads of missing parts.
//!
//! A reader that wants a part that is being read waits for that read. A thread that has the duty to
//! load an entry holds a [`Guard`]; a thread that holds guards never waits for other guards. The
//! parts of the cache have a lock each, which is held over no read.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use quick_cache::Weighter;
use ramet_block::{Budget, Use};
use ramet_nodetable::NodeId;

use crate::counters::{Counters, bump};
use crate::error::{Error, Result};
use crate::node::block::Block;
use crate::node::handle::Handle;
use crate::node::run_index::RunIndex;
use crate::node::skeleton::Skeleton;
use crate::store::device::NodeDevice;
use crate::store::handles::Handles;
use crate::store::resident::may_read;
use crate::store::root_copies::RootCopies;
use crate::sync::{Cache, Guard, GuardResult, cache};

#[derive(Clone)]
pub(crate) enum Cached {
    Skeleton(Arc<Skeleton>),
    Index(Arc<RunIndex>),
    Block(Arc<Block>),
}

#[derive(Clone)]
pub(crate) struct ByBytes;

impl Weighter<CacheKey, Cached> for ByBytes {
    fn weight(&self, _key: &CacheKey, value: &Cached) -> u64 {
        match value {
            Cached::Skeleton(node) => node.memory_bytes() as u64,
            Cached::Index(index) => index.memory_bytes() as u64,
            Cached::Block(block) => block.memory_bytes() as u64 + 64,
        }
    }
}

/// Part of a node in the cache: 0 is the skeleton or the index, `n + 1` block `n`.
pub(crate) type CacheKey = (u64, u32);

/// Which blocks of a request go into the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keeping {
    All,
    /// The first and the last block: the requests before and after may need them as well.
    Ends,
}

/// The key of a block of a run.
pub(super) fn block_key(run: &Handle, at: usize) -> CacheKey {
    let part = u32::try_from(at + 1).expect("blocks of a run fit 32 bits");
    (run.id().0, part)
}

/// The capacity changes by this part of the budget at least.
const STEP_PART: u64 = 64;
/// Misses after which the capacity is set anew. A volume that is open for reading alone has no
/// keeper that does so.
const MISSES_PER_BALANCE: u64 = 64;

/// See the module header.
pub(crate) struct NodeCache {
    /// Dropped first: handles in the cache that are dropped later have no table to report to.
    pub(super) handles: Arc<Handles>,
    pub(super) device: Arc<NodeDevice>,
    pub(super) root_copies: Arc<RootCopies>,
    pub(crate) counters: Arc<Counters>,
    /// Least bytes of a read of the front of a run, and about the size of a block.
    pub(crate) block_bytes: usize,
    pub(super) parts: Cache<CacheKey, Cached, ByBytes>,
    budget: Arc<Budget>,
}

impl std::fmt::Debug for NodeCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeCache").finish_non_exhaustive()
    }
}

impl NodeCache {
    /// A cache of as many bytes as the budget leaves.
    pub(crate) fn new(
        handles: Arc<Handles>,
        (device, root_copies): (Arc<NodeDevice>, Arc<RootCopies>),
        counters: Arc<Counters>,
        block_bytes: usize,
        budget: Arc<Budget>,
    ) -> Self {
        let cache_bytes = budget.cache_bytes();
        let least = budget.cache_bytes_squeezed();
        let items = usize::try_from(cache_bytes / 16384).unwrap_or(usize::MAX);
        Self {
            handles,
            device,
            root_copies,
            counters,
            block_bytes,
            parts: cache(items.max(64), (cache_bytes, least), ByBytes),
            budget,
        }
    }

    /// Tells the budget how much memory the tree holds, and gives the cache the bytes that the
    /// other uses leave.
    pub(crate) fn rebalance(&self) {
        let budget = &self.budget;
        if budget.bounds_cache_only() {
            return;
        }
        budget.set(Use::Fresh, self.handles.dirty.memory_bytes());
        budget.set(Use::Pages, self.handles.cached_page_bytes());
        budget.set(Use::Cache, self.parts.weight());
        budget.look();
        let room = budget.cache_bytes();
        if room.abs_diff(self.parts.capacity()) >= budget.limit() / STEP_PART {
            self.parts.set_capacity(room);
        }
    }

    /// The duty to load the skeleton or the index of a node, unless it is in the cache or another
    /// thread has that duty.
    pub(super) fn claim(&self, id: NodeId) -> Option<Guard<'_, CacheKey, Cached, ByBytes>> {
        self.claim_part(&(id.0, 0))
    }

    /// The same for any part.
    pub(super) fn claim_part(
        &self,
        key: &CacheKey,
    ) -> Option<Guard<'_, CacheKey, Cached, ByBytes>> {
        match self.parts.get_value_or_guard(key, Some(Duration::ZERO)) {
            GuardResult::Guard(guard) => Some(guard),
            GuardResult::Value(_) | GuardResult::Timeout => None,
        }
    }

    /// Whether the skeleton or the index of a node is in the cache.
    pub(super) fn contains(&self, id: NodeId) -> bool {
        self.parts.contains_key(&(id.0, 0))
    }

    /// Keeps the index of a run that was just written.
    pub(super) fn keep_index(&self, run: NodeId, index: RunIndex) {
        self.parts
            .insert((run.0, 0), Cached::Index(Arc::new(index)));
    }

    /// Keeps an interior node that was just written.
    pub(super) fn keep_skeleton(&self, id: NodeId, node: Arc<Skeleton>) {
        self.parts.insert((id.0, 0), Cached::Skeleton(node));
    }

    pub(super) fn keep_block(&self, run: &Handle, at: usize, block: &Arc<Block>) {
        let kept = Cached::Block(block.clone());
        self.parts.insert(block_key(run, at), kept);
    }

    /// The index of a run, if it is in the cache. Not counted as a use.
    pub(crate) fn cached_index(&self, handle: &Handle) -> Option<Arc<RunIndex>> {
        match self.parts.peek(&(handle.id().0, 0)) {
            Some(Cached::Index(index)) => Some(index),
            _ => None,
        }
    }

    pub(crate) fn is_block_cached(&self, handle: &Handle, at: usize) -> bool {
        u32::try_from(at + 1).is_ok_and(|part| self.parts.contains_key(&(handle.id().0, part)))
    }

    /// A skeleton that is in memory. Not counted as a use.
    pub(crate) fn skeleton_at_hand(&self, handle: &Handle) -> Option<Arc<Skeleton>> {
        self.handles
            .dirty
            .skeleton(handle)
            .or_else(|| match self.parts.peek(&(handle.id().0, 0)) {
                Some(Cached::Skeleton(node)) => Some(node),
                _ => None,
            })
    }

    pub(crate) fn cached(
        &self,
        key: CacheKey,
        load: impl FnOnce() -> Result<Cached>,
    ) -> Result<Cached> {
        if !may_read() {
            // The read of another thread is waited for no more than one's own.
            return self.parts.get(&key).ok_or(Error::NotResident);
        }
        let mut missed = false;
        let found = self.parts.get_or_insert_with(&key, || {
            missed = true;
            load()
        });
        if !missed {
            bump(&self.counters.cache_hits);
            return found;
        }
        let misses = self.counters.cache_misses.fetch_add(1, Ordering::Relaxed);
        if misses % MISSES_PER_BALANCE == MISSES_PER_BALANCE - 1 {
            self.rebalance();
        }
        found
    }

    /// Drops the parts of reclaimed nodes.
    pub(crate) fn evict(&self, ids: &[NodeId]) {
        for id in ids {
            self.parts.remove(&(id.0, 0));
        }
    }

    /// Most bytes in the cache.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.parts.capacity()
    }

    /// Bytes in the cache.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.parts.weight()
    }

    /// Most bytes of one node that may come into the cache before a reader asks for them.
    pub(crate) fn read_ahead_max_bytes(&self) -> usize {
        usize::try_from(self.parts.capacity() / 64).unwrap_or(usize::MAX)
    }

    /// Announces to the device that the addresses `range` are going to be read soon.
    pub(crate) fn expect(&self, range: Range<u64>) {
        self.device.expect(range);
    }

    /// Whether a reader in memory refers to a node.
    pub(crate) fn is_pinned(&self, id: NodeId) -> bool {
        // A cached skeleton of a dead node is no reader; its handles would pin its children.
        self.parts.remove(&(id.0, 0));
        self.handles.is_referred_to(id)
    }
}
