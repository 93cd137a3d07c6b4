//! Options of making and opening a volume, and the counters of an open one.

use std::collections::BTreeMap;
use std::sync::Arc;

use ramet_betree::TreeShape;
use ramet_block::{Budget, Codec, Label, LongestTimes, MetadataCopies};

use crate::clock::Clock;

/// How reading an object changes its access time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessTime {
    /// The access time changes when it is not later than the last change, or a day old.
    #[default]
    Relative,
    /// The access time changes with each read.
    Strict,
    /// The access time never changes.
    Never,
}

/// Options of making a new volume.
#[derive(Clone, Debug, Default)]
pub struct FormatOptions {
    /// Identity of the volume.
    pub uuid: [u8; 16],
    /// The name that a person gave to the volume.
    pub label: Label,
    /// Owner and group of the root directory.
    pub owner: (u32, u32),
    /// Compression of new blocks; `None` leaves the choice to the tree.
    pub compression: Option<Codec>,
    /// Random number that nobody else knows: it tells nodes of the volume from bytes of files.
    pub node_seed: u64,
    /// How often metadata that everything else depends on is kept.
    pub metadata_copies: MetadataCopies,
    /// Sizes of nodes; `None` leaves the choice to the tree. For tests.
    pub shape: Option<TreeShape>,
    /// Bytes of the journal; `None` leaves the choice to the tree.
    pub journal_bytes: Option<u64>,
}

/// Options of opening a volume.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// The memory budget of the volume; `None` leaves the choice to the tree.
    pub budget: Option<Arc<Budget>>,
    /// Memory for cached nodes alone, in bytes, in place of a budget.
    pub cache_bytes: Option<u64>,
    /// Refuse every change.
    pub read_only: bool,
    /// Open the volume also when the journal has lost acknowledged changes: in the state before the
    /// first of them. [`crate::Volume::loss`] says so.
    pub accept_loss: bool,
    /// Compression of blocks written while the volume is open; `None` takes the volume's.
    pub compression: Option<Codec>,
    /// How reading files and symbolic links changes access times.
    pub access_time: AccessTime,
    /// How reading directories changes access times.
    pub dir_access_time: AccessTime,
    /// The source of times; `None` is the clock of the machine.
    pub clock: Option<Arc<dyn Clock>>,
    /// Seed of the random numbers, for runs that can be repeated.
    pub seed: Option<u64>,
    /// Sizes of nodes and buffers; `None` takes the volume's. For tests.
    pub shape: Option<TreeShape>,
    /// Run no background work: see [`ramet_betree::OpenOptions`]. For tests.
    pub manual: bool,
    /// Make each change durable before it returns.
    pub sync_each: bool,
}

/// Times of one lock since the volume was opened, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LockStats {
    /// The longest time for which a thread held it, to two ticks of the kernel.
    pub longest_hold_ns: u64,
    /// The longest time for which a thread waited for it.
    pub longest_wait_ns: u64,
}

impl From<LongestTimes> for LockStats {
    fn from(longest: LongestTimes) -> Self {
        Self {
            longest_hold_ns: longest.hold_ns,
            longest_wait_ns: longest.wait_ns,
        }
    }
}

/// Counters of a volume. Sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct VolumeStats {
    /// Process that serves the volume.
    pub pid: u32,
    /// Identity of the volume.
    pub uuid: String,
    /// The name that a person gave to the volume; empty for none.
    pub label: String,
    /// Size of the device.
    pub device_bytes: u64,
    /// Bytes that can be read, each clone counted in full; an estimate.
    pub logical_bytes: u64,
    /// Allocated space.
    pub allocated_bytes: u64,
    /// Free space.
    pub free_bytes: u64,
    /// The part of the free space that no new data gets. It is kept back so that deleting and
    /// syncing always succeed, or accepted changes that are not written yet will take it.
    pub reserved_bytes: u64,
    /// Pages of metadata of which one copy was bad and the other read instead, since the volume was opened.
    pub damaged_copies: u64,
    /// Nodes of the tree.
    pub nodes: u64,
    /// Segments of the tree.
    pub segments: u64,
    /// Leaves of the tree.
    pub leaves: u64,
    /// Height of the tree.
    pub height: u64,
    /// Messages on their way to the leaves.
    pub pending_message_bytes: u64,
    /// Time since the last checkpoint, in nanoseconds.
    pub checkpoint_age_ns: u64,
    /// Journal written since the last checkpoint.
    pub journal_bytes: u64,
    /// Nodes found in the cache.
    pub cache_hits: u64,
    /// Nodes not found in the cache.
    pub cache_misses: u64,
    /// Bytes in the cache.
    pub cached_bytes: u64,
    /// Memory that the process may take.
    pub memory_limit_bytes: u64,
    /// Memory of nodes that are not written yet.
    pub memory_fresh_bytes: u64,
    /// Memory of pages of the node table.
    pub memory_pages_bytes: u64,
    /// Memory of inodes, those that the kernel remembers among them.
    pub memory_inodes_bytes: u64,
    /// Memory of buffers of requests.
    pub memory_requests_bytes: u64,
    /// Memory that the process has resident beyond all that is counted.
    pub memory_slack_bytes: u64,
    /// Memory that the cache does without while the machine is short of it.
    pub memory_squeezed_bytes: u64,
    /// Reads of nodes from the device.
    pub node_reads: u64,
    /// Bytes of nodes read.
    pub bytes_read: u64,
    /// Bytes of nodes written.
    pub bytes_written: u64,
    /// Bytes of the journal written since the mount.
    pub journal_written_bytes: u64,
    /// Of the nodes: leaves written anew with the messages that waited for them.
    pub leaves_written_bytes: u64,
    /// Of the nodes: leaves that were ingested by large writes.
    pub ingested_written_bytes: u64,
    /// Of the nodes: messages that rest in interior nodes over a checkpoint.
    pub segments_written_bytes: u64,
    /// Of these messages: copies from segments that were written before.
    pub segments_copied_bytes: u64,
    /// Of the nodes: interior nodes without their messages.
    pub skeletons_written_bytes: u64,
    /// Nodes and segments that lookups and clones went through.
    pub node_visits: u64,
    /// Freed space that the next checkpoint makes usable.
    pub pending_free_bytes: u64,
    /// Space that the file system below an image file still gives, as far as it is known.
    pub host_free_bytes: Option<u64>,
    /// Space of the file system below that the image file takes.
    pub host_allocated_bytes: Option<u64>,
    /// Dead nodes that wait to be reclaimed.
    pub zombies: u64,
    /// Background work since the mount: messages moved from a node to a child.
    pub flushes: u64,
    /// Leaf ranges written anew, because many messages waited for them.
    pub rewrites: u64,
    /// Shared nodes that got a private copy.
    pub unshares: u64,
    /// Children dropped unread under a range message.
    pub prunes: u64,
    /// Runs of small leaves joined.
    pub coalesces: u64,
    /// Segments that were merged, or copied because little of them was alive.
    pub segment_merges: u64,
    /// Nodes that clones had made too high and that were rebuilt.
    pub flattens: u64,
    /// Nodes whose references went to zero.
    pub reclaimed: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Inodes in memory.
    pub inodes_in_memory: u64,
    /// Compact inodes among them.
    pub inodes_compact: u64,
    /// The longest holds and waits of the locks that other operations may need, by the name of the
    /// lock.
    pub locks: BTreeMap<String, LockStats>,
    /// The reason for which the volume takes no more writes, if it takes none.
    pub poisoned: Option<String>,
}
