//! Counters and sizes that a tree reports.

use ramet_block::{Label, LongestTimes, Uuid};
use serde::Serialize;

use crate::counters::Counts;
use crate::paths::PathCounts;

/// Sizes and counters of an open tree. Sizes in bytes, times in nanoseconds.
///
/// Serialized, it is one flat map of numbers: identity, locks and `poisoned` are left to the caller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Identity of the volume.
    #[serde(skip)]
    pub uuid: Uuid,
    /// Name that people gave to the volume; empty for none.
    #[serde(skip)]
    pub label: Label,
    /// Size of the volume.
    pub device_bytes: u64,
    /// Bytes of keys and values that can be read, each clone counted in full. A rough estimate
    /// from the edges of the root, without messages: [`crate::Snapshot::logical_bytes`] counts.
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
    /// Bytes in the cache.
    pub cached_bytes: u64,
    /// Bytes of the journal written since the volume was opened.
    pub journal_written_bytes: u64,
    /// Counters since the volume was opened.
    #[serde(flatten)]
    pub counts: Counts,
    /// How often each structural path was taken since the volume was opened.
    #[serde(flatten)]
    pub paths: PathCounts,
    /// Names of the locks that readers or writers may wait for, with the longest hold and the longest
    /// wait of each since the volume was opened. The hold of a lookup is not counted, and the wait
    /// for it is.
    #[serde(skip)]
    pub locks: Vec<(&'static str, LongestTimes)>,
    /// Why the volume takes no writes any more, if it does not.
    #[serde(skip)]
    pub poisoned: Option<String>,
}
