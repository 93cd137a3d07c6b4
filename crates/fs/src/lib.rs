//! The file system of a Ramet volume: paths, inodes, data and clones on the tree.
#![forbid(unsafe_code)]

pub mod control;
mod error;

use std::sync::Arc;

pub use error::{Error, Result};
use ramet_betree::Tree;
use ramet_block::Device;

/// How reading a file changes its access time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessTime {
    /// When it is not later than the last change, or a day old.
    #[default]
    Relative,
    /// Never.
    Never,
}

/// How to make a new volume.
#[derive(Clone, Debug, Default)]
pub struct FormatOptions {
    /// Identity of the volume.
    pub uuid: [u8; 16],
    /// Owner and group of the root directory.
    pub owner: (u32, u32),
}

/// How to open a volume.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Memory for cached nodes, in bytes; `None` leaves the choice to the tree.
    pub cache_bytes: Option<u64>,
    /// Refuse every change.
    pub read_only: bool,
    /// How reading changes access times.
    pub access_time: AccessTime,
}

/// Counters of a volume. Sizes in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct VolumeStats {
    /// Process that serves the volume.
    pub pid: u32,
    /// Size of the device.
    pub device_bytes: u64,
    /// Space in use.
    pub allocated_bytes: u64,
    /// Space left for new data.
    pub free_bytes: u64,
    /// Space kept back so that deleting and syncing always succeed.
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
    /// Nodes read from the device.
    pub node_reads: u64,
    /// Inodes in memory.
    pub inodes_in_memory: u64,
    /// Why the volume takes no writes any more, if so.
    pub poisoned: Option<String>,
}

/// A volume that is open. All methods may be called from any thread.
pub struct Volume {
    tree: Tree,
}

impl Volume {
    /// Makes an empty volume on `device`, durable on return. Whatever was there is lost.
    ///
    /// # Errors
    /// Those of the tree: the device is too small, or failed.
    pub fn format(device: &Arc<dyn Device>, _options: &FormatOptions) -> Result<()> {
        Tree::format(device, &ramet_betree::FormatOptions::default())?;
        Ok(())
    }

    /// Opens the volume on `device`: recovers, and reclaims files that were unlinked while open.
    ///
    /// # Errors
    /// Not a volume, a newer version, or the device failed.
    pub fn open(device: Arc<dyn Device>, _options: OpenOptions) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            tree: Tree::open(device, ramet_betree::OpenOptions::default())?,
        }))
    }

    /// Makes everything durable and stops the background work. Later calls fail.
    ///
    /// # Errors
    /// Those of the device.
    pub fn close(&self) -> Result<()> {
        Ok(self.tree.close()?)
    }

    /// Makes every change that returned before this call durable.
    ///
    /// # Errors
    /// Those of the device; the volume takes no writes afterwards.
    pub fn sync_all(&self) -> Result<()> {
        Ok(self.tree.sync()?)
    }

    /// Writes a checkpoint and waits for it.
    ///
    /// # Errors
    /// Those of the device; the volume takes no writes afterwards.
    pub fn checkpoint(&self) -> Result<()> {
        Ok(self.tree.checkpoint()?)
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> VolumeStats {
        VolumeStats::default()
    }

    /// The tree below, for tools.
    #[must_use]
    pub fn tree(&self) -> &Tree {
        &self.tree
    }
}
