//! Options of making and opening a volume, and the counters of an open one.

use std::collections::BTreeMap;
use std::sync::Arc;

use ramet_betree::{Logical, Stats, TreeShape};
use ramet_block::{Budget, Codec, Label, LongestTimes, MetadataCopies, Use};

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
    /// Show the snapshot of this name in place of the volume of today. The volume is opened for
    /// reading only then.
    pub snapshot: Option<String>,
    /// Compression of blocks written while the volume is open; `None` takes the volume's.
    pub compression: Option<Codec>,
    /// How reading files and symbolic links changes access times.
    pub access_time: AccessTime,
    /// How reading directories changes access times.
    pub dir_access_time: AccessTime,
    /// The source of times; `None` is the clock of the machine.
    pub clock: Option<Arc<dyn Clock>>,
    /// Sizes of nodes and buffers; `None` takes the volume's. For tests.
    pub shape: Option<TreeShape>,
    /// Run no background work: see [`ramet_betree::OpenOptions`]. For tests.
    pub manual: bool,
    /// Make each change durable before it returns.
    pub sync_each: bool,
    /// Names of hard links below a tree that its clone or removal counts at once, at most; more of
    /// them are counted in the background. `None` takes 64. Fewer are for tests.
    pub links_at_once: Option<usize>,
}

/// Times of one lock since the volume was opened, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
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

/// Sizes and counters of a volume. Serialized, it is one flat map. Sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct VolumeStats {
    /// Process that serves the volume.
    pub pid: u32,
    /// Identity of the volume.
    pub uuid: String,
    /// The name that a person gave to the volume; empty for none.
    pub label: String,
    /// Sizes and counters of the tree.
    #[serde(flatten)]
    pub tree: Stats,
    /// Whether the `logical_bytes` of the tree are an estimate. Before they are counted
    /// ([`ramet_betree::Snapshot::logical_bytes`]), they are a rough one.
    pub logical_is_estimate: bool,
    /// Memory, by use.
    #[serde(flatten)]
    pub memory: MemoryStats,
    /// Hard links that are counted in the background.
    #[serde(flatten)]
    pub links: LinkStats,
    /// Snapshots.
    pub snapshots: u64,
    /// An estimate of the names, attributes and contents in all snapshots, each counted in full.
    pub snapshots_logical_bytes: u64,
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

impl VolumeStats {
    /// The same with readable bytes that were counted. An estimate leaves parts out of the count, so
    /// it is no less than the root tells.
    #[must_use]
    pub fn with_logical(mut self, logical: Logical) -> Self {
        let told = self.tree.logical_bytes;
        self.tree.logical_bytes = if logical.is_estimate {
            logical.bytes.max(told)
        } else {
            logical.bytes
        };
        self.logical_is_estimate = logical.is_estimate;
        self
    }
}

/// Counting of hard links in the background, since the volume was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LinkStats {
    /// There are links that wait to be counted, after a clone or a removal of a tree with many.
    pub links_waiting: bool,
    /// Files with several names whose links were counted.
    pub links_counted: u64,
    /// Files among those in clones that no name of the clone leads to, and files that lost their
    /// last name with a tree: runs of them that were erased.
    pub links_erased: u64,
    /// Times that the counting of a clone root failed; it is tried again.
    pub links_failures: u64,
}

/// Memory of a process that serves a volume, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemoryStats {
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
}

impl From<&Budget> for MemoryStats {
    fn from(budget: &Budget) -> Self {
        Self {
            memory_limit_bytes: budget.limit(),
            memory_fresh_bytes: budget.used(Use::Fresh),
            memory_pages_bytes: budget.used(Use::Pages),
            memory_inodes_bytes: budget.used(Use::Inodes),
            memory_requests_bytes: budget.used(Use::Requests),
            memory_slack_bytes: budget.slack(),
            memory_squeezed_bytes: budget.squeezed(),
        }
    }
}
