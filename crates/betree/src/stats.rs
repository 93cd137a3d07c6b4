//! Counters and sizes that a tree reports.

use ramet_block::{Label, LongestTimes, Uuid};

use crate::paths::PathCounts;

/// Counters of an open tree. Sizes in bytes, times in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Identity of the volume.
    pub uuid: Uuid,
    /// Name that people gave to the volume; empty for none.
    pub label: Label,
    /// Size of the volume.
    pub device_bytes: u64,
    /// Bytes of keys and values that can be read, each clone counted in full. An estimate from the
    /// edges of the root, without messages in memory.
    pub logical_bytes: u64,
    /// Space in use, with the space that only a checkpoint will free.
    pub allocated_bytes: u64,
    /// Free space.
    pub free_bytes: u64,
    /// Part of the free space that no new data gets. It is kept for checkpoints and deletions, or
    /// accepted messages are still going to take it.
    pub reserved_bytes: u64,
    /// Freed space that the next checkpoint makes usable.
    pub pending_free_bytes: u64,
    /// Free space of the host of a sparse device, as far as it is known; `None` for other devices.
    pub host_free_bytes: Option<u64>,
    /// Space of the host that a sparse device takes; `None` for other devices, or if it cannot be
    /// known.
    pub host_allocated_bytes: Option<u64>,
    /// Pages of the node table and the maps, and root nodes, of which one copy was found bad and the
    /// other good, since the volume was opened.
    pub damaged_copies: u64,
    /// Nodes in the node table.
    pub nodes: u64,
    /// Segments among them.
    pub segments: u64,
    /// Leaves among them.
    pub leaves: u64,
    /// Nodes without references that wait to be reclaimed.
    pub zombies: u64,
    /// Height label of the root.
    pub height: u64,
    /// Memory of messages, and of the nodes made of them, that are not written yet.
    pub pending_message_bytes: u64,
    /// Range messages in the memory buffer.
    pub buffered_ranges: u64,
    /// Time since the last checkpoint.
    pub checkpoint_age_ns: u64,
    /// Journal that a recovery would read now.
    pub journal_bytes: u64,
    /// Number of the last batch applied.
    pub seq: u64,
    /// Parts of nodes found in the cache.
    pub cache_hits: u64,
    /// Parts of nodes not found in the cache.
    pub cache_misses: u64,
    /// Bytes in the cache.
    pub cached_bytes: u64,
    /// Reads of nodes from the device.
    pub node_reads: u64,
    /// Nodes and segments that lookups and clones went through, in the cache or not.
    pub node_visits: u64,
    /// Bytes of nodes read.
    pub bytes_read: u64,
    /// Lookups in leaves and segments that a filter answered, without a read.
    pub filter_denials: u64,
    /// Leaves that scans asked for before they reached them.
    pub leaves_ahead: u64,
    /// Bytes of nodes written.
    pub bytes_written: u64,
    /// All bytes written, by cause.
    pub written: WrittenBytes,
    /// How often each structural path was taken since the volume was opened.
    pub paths: PathCounts,
    /// Names of the locks that readers or writers may wait for, with the longest hold and the longest
    /// wait of each since the volume was opened.
    pub locks: Vec<(&'static str, LongestTimes)>,
    /// Why the volume takes no writes any more, if it does not.
    pub poisoned: Option<String>,
}

/// Bytes written to the device since the volume was opened, without the few of the node table and
/// superblocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBytes {
    /// Frames of the journal.
    pub journal: u64,
    /// Leaves written anew with the messages that waited for them.
    pub leaves: u64,
    /// Leaves that were ingested.
    pub ingests: u64,
    /// Messages that rest in interior nodes over a checkpoint.
    pub segments: u64,
    /// Segments copied from segments that were written before, to merge them or to free dead
    /// messages in them. They are a part of `segments`.
    pub copied: u64,
    /// Interior nodes without their messages.
    pub skeletons: u64,
}
