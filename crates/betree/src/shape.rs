//! Sizes that shape a tree, and the options with which one is opened.

use std::sync::Arc;

use ramet_block::{Budget, Codec, memory_limit};

/// Sizes that shape the tree. Tests make them tiny so that every structural path is taken.
#[derive(Clone, Debug)]
pub struct TreeShape {
    /// Target size of a leaf, in bytes.
    pub leaf_bytes: usize,
    /// Target size of a basement node and of a block of a segment, in bytes.
    pub block_bytes: usize,
    /// Most children of an interior node.
    pub fanout: usize,
    /// Bytes of messages above which an interior node pushes them down.
    pub buffer_bytes: usize,
    /// Bytes of messages above which the memory buffer becomes a segment of the root.
    pub memory_bytes: usize,
    /// No leaf is rewritten before the messages that wait for it reach this part of its size, in
    /// 1/256. A shared leaf is rewritten then; a private leaf when the node above holds more than
    /// its buffer.
    pub theta_256: usize,
    /// Most segments of a node before small ones are merged.
    pub segments: usize,
    /// A range that lies in one leaf and is no larger is cloned as a copy.
    pub clone_copy_bytes: usize,
    /// Messages above the source of a clone are copied when they are no more than this. More
    /// messages move to a node that source and copy share.
    pub clone_waiting_bytes: usize,
    /// Compression of leaves and segments. An open volume has that of its superblock, or of
    /// [`OpenOptions::codec`].
    pub codec: Codec,
    /// So many bytes of consecutive values are worth leaves of their own (see [`crate::Ingest`]).
    /// The tree itself takes ingests of any size; this value is for its callers.
    pub ingest_bytes: usize,
}

impl TreeShape {
    /// Most range messages of one segment. A reader that meets the segment loads them all.
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
            clone_copy_bytes: 512,
            clone_waiting_bytes: 16 << 10,
            codec: Codec::default(),
            ingest_bytes: 128 << 10,
        }
    }
}

/// Least room of the cache of nodes, in bytes.
const CACHE_BYTES_MIN: u64 = 1 << 20;

/// How to open a volume.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// The memory budget of the volume; `None` is a budget of its own, see
    /// [`ramet_block::memory_limit`].
    pub budget: Option<Arc<Budget>>,
    /// Memory for cached nodes alone, in bytes, in place of a budget.
    pub cache_bytes: Option<u64>,
    /// Refuse every change; nothing is written, the journal is replayed in memory.
    pub read_only: bool,
    /// Open the volume also when the journal has lost acknowledged records: in the state before the
    /// first of them. [`crate::Tree::loss`] says so.
    pub accept_loss: bool,
    /// Sizes of nodes and buffers; `None` takes the volume's. For tests.
    pub shape: Option<crate::TreeShape>,
    /// Compression of blocks written from now on; `None` takes the volume's.
    pub codec: Option<ramet_block::Codec>,
    /// Run no background work: the caller does all work through [`crate::Tree::checkpoint`]. For
    /// tests.
    pub manual: bool,
    /// Make each batch durable before [`crate::Tree::apply`] returns.
    pub sync_each: bool,
}

impl OpenOptions {
    /// The budget that the options stand for.
    pub(crate) fn budget(&self) -> Arc<Budget> {
        match (self.cache_bytes, &self.budget) {
            (Some(bytes), _) => Budget::of_cache(bytes.max(CACHE_BYTES_MIN)),
            (None, Some(budget)) => Arc::clone(budget),
            (None, None) => Budget::of_volumes(memory_limit()),
        }
    }
}

/// Position in the history of changes: every applied batch gets the next number.
pub type Seq = u64;

/// Longest key, in bytes. File systems nest paths; nothing else limits them.
pub const KEY_BYTES_MAX: usize = 1 << 20;

/// Longest value, in bytes.
pub const VALUE_BYTES_MAX: usize = 1 << 20;
