//! Making an empty volume.

use std::sync::Arc;

use ramet_betree::Batch;
use ramet_block::Device;

use crate::clock::{Clock, SystemClock};
use crate::error::Result;
use crate::format::keys;
use crate::format::record::{FLAG_CLONE_ROOT, Kind, Record};
use crate::namespace::numbers::Counters;
use crate::options::FormatOptions;

/// Version of the keys and records.
pub(crate) const VERSION: u32 = 8;

/// A device on which a volume is being made. Until it is finished every opener refuses the device,
/// also when the process that makes the volume is killed.
pub struct UnfinishedVolume {
    tree: ramet_betree::UnfinishedVolume,
    owner: (u32, u32),
}

impl UnfinishedVolume {
    /// Marks the device, durably. A volume that the device held is gone.
    ///
    /// # Errors
    /// Those of the tree: the device is too small, or failed.
    pub fn begin(device: &Arc<dyn Device>, options: &FormatOptions) -> Result<Self> {
        let format = ramet_betree::FormatOptions {
            uuid: options.uuid,
            label: options.label.clone(),
            codec: options.compression,
            node_seed: options.node_seed,
            metadata_copies: options.metadata_copies,
            shape: options.shape.clone(),
            journal_bytes: options.journal_bytes,
        };
        Ok(Self {
            tree: ramet_betree::UnfinishedVolume::begin(device, &format)?,
            owner: options.owner,
        })
    }

    /// Gives the old contents of the device back. `progress` is told the bytes done and those to
    /// do.
    ///
    /// # Errors
    /// Those of the device.
    pub fn erase(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
        Ok(self.tree.erase(progress)?)
    }

    /// Makes the volume, as large as the device is now. Durable on return.
    ///
    /// # Errors
    /// Those of [`UnfinishedVolume::begin`].
    pub fn finish(self) -> Result<()> {
        let (uid, gid) = self.owner;
        let mode = Kind::Directory.mode_bits() | 0o755;
        let mut root = Record::new(mode, uid, gid, SystemClock.now());
        root.flags = FLAG_CLONE_ROOT;
        let mut first = Batch::new();
        let version = u64::from(VERSION).to_le_bytes().to_vec();
        first.put(keys::counter(b"version"), version);
        Counters::NEW.put(&mut first);
        first.put(keys::root_record(), root.encode());
        Ok(self.tree.finish(first)?)
    }
}
