//! How volumes are made and opened, and what an open one tells.

use std::sync::Arc;

use ramet_betree::TreeShape;
use ramet_block::{Codec, Label};

use crate::clock::Clock;

/// How reading an object changes its access time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessTime {
    /// When it is not later than the last change, or a day old.
    #[default]
    Relative,
    /// With each read.
    Strict,
    /// Never.
    Never,
}

/// How to make a new volume.
#[derive(Clone, Debug, Default)]
pub struct FormatOptions {
    /// Identity of the volume.
    pub uuid: [u8; 16],
    /// Name for people.
    pub label: Label,
    /// Owner and group of the root directory.
    pub owner: (u32, u32),
    /// Compression of new blocks; `None` leaves the choice to the tree.
    pub compression: Option<Codec>,
    /// Sizes of nodes; `None` leaves the choice to the tree. For tests.
    pub shape: Option<TreeShape>,
    /// Bytes of the journal; `None` leaves the choice to the tree.
    pub journal_bytes: Option<u64>,
}

/// How to open a volume.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Memory for cached nodes, in bytes; `None` leaves the choice to the tree.
    pub cache_bytes: Option<u64>,
    /// Refuse every change.
    pub read_only: bool,
    /// Compression of blocks written while the volume is open; `None` takes the volume's.
    pub compression: Option<Codec>,
    /// How reading files and symbolic links changes access times.
    pub access_time: AccessTime,
    /// How reading directories does.
    pub dir_access_time: AccessTime,
    /// Where times come from; `None` is the clock of the machine.
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

/// Counters of a volume. Sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct VolumeStats {
    /// Process that serves the volume.
    pub pid: u32,
    /// Identity of the volume.
    pub uuid: String,
    /// Name that people gave to the volume; empty for none.
    pub label: String,
    /// Size of the device.
    pub device_bytes: u64,
    /// Bytes that can be read, each clone counted in full; an estimate.
    pub logical_bytes: u64,
    /// Space in use.
    pub allocated_bytes: u64,
    /// Space left.
    pub free_bytes: u64,
    /// What of it no new data gets: kept back so that deleting and syncing always succeed, or going to be taken by what was
    /// accepted and is not written yet.
    pub reserved_bytes: u64,
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
    /// Reads of nodes from the device.
    pub node_reads: u64,
    /// Bytes of nodes read.
    pub bytes_read: u64,
    /// Bytes of nodes written.
    pub bytes_written: u64,
    /// Bytes of the journal written since the mount.
    pub journal_written_bytes: u64,
    /// Of the nodes, leaves written anew with what waited for them.
    pub leaves_written_bytes: u64,
    /// Leaves that were ingested: large writes.
    pub ingested_written_bytes: u64,
    /// Messages that rest in interior nodes over a checkpoint.
    pub segments_written_bytes: u64,
    /// Of these, copied from segments that were written before.
    pub segments_copied_bytes: u64,
    /// Interior nodes without their messages.
    pub skeletons_written_bytes: u64,
    /// Nodes and segments that lookups and clones went through.
    pub node_visits: u64,
    /// Freed space that the next checkpoint makes usable.
    pub pending_free_bytes: u64,
    /// What the file system below an image file still gives, as far as is known.
    pub host_free_bytes: Option<u64>,
    /// What the image file takes there.
    pub host_allocated_bytes: Option<u64>,
    /// Dead nodes that wait to be reclaimed.
    pub zombies: u64,
    /// Background work since the mount: messages moved from a node to a child.
    pub flushes: u64,
    /// Leaf ranges written anew, because messages abounded for them.
    pub rewrites: u64,
    /// Shared nodes of which a private copy was made.
    pub unshares: u64,
    /// Children dropped unread under a range message.
    pub prunes: u64,
    /// Runs of small leaves joined.
    pub coalesces: u64,
    /// Segments merged, or copied because little of them was alive.
    pub segment_merges: u64,
    /// Nodes that clones had made too high, rebuilt.
    pub flattens: u64,
    /// Nodes whose references went to zero.
    pub reclaimed: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Inodes in memory.
    pub inodes_in_memory: u64,
    /// Why the volume takes no writes any more, if so.
    pub poisoned: Option<String>,
}
