//! Making volumes.
//!
//! ```text
//!  1 mark      all copies of the superblock say that a volume is being made       durable
//!  2 erase     the space of an older volume is given back                         on request
//!  3 fill      empty tables, a superblock that is still marked, the first batch
//!  4 finish    two superblocks without the mark                                   durable
//! ```
//!
//! An older volume may lie on the device. Its superblocks go before its first node does, and its
//! place is taken by a volume that is complete: a process that is killed in between leaves a
//! device that every opener refuses, by [`SuperblockError::Unfinished`]. The mark goes on with the
//! generations and epochs of the older volume. So it counts as the newest from its first copy on,
//! and no frame that the older volume left in the journal is ever taken for one of the new volume,
//! also when both have one identity.
//!
//! [`SuperblockError::Unfinished`]: ramet_block::SuperblockError::Unfinished

use std::sync::Arc;

use ramet_block::failpoints::{self, Fault};
use ramet_block::owner::is_place;
use ramet_block::superblock::{AREA_END, SLOTS, read_copies, write_superblock};
use ramet_block::{
    BLOCK_BYTES, Call, Codec, Device, Extent, FORMAT_VERSION, JournalPos, Label, MetadataCopies,
    PageRef, Superblock,
};
use ramet_nodetable::NodeTable;

use crate::error::{Error, Result, io_error, io_error_at};
use crate::journal::frame::{REGION_BYTES_MIN, is_valid_region};
use crate::shape::{OpenOptions, TreeShape};
use crate::tree::api::Tree;
use crate::tree::batch::Batch;
use crate::tree::open::{open_at, usable};

/// Smallest volume, in bytes.
pub const VOLUME_BYTES_MIN: u64 = 4 << 20;
/// Smallest volume when the caller chooses the sizes of nodes.
const VOLUME_BYTES_MIN_OF_SHAPE: u64 = 1 << 20;

/// Devices are erased in pieces of so many bytes.
const PIECE_BYTES: u64 = 256 << 20;

/// Options of a new volume.
#[derive(Clone, Debug, Default)]
pub struct FormatOptions {
    /// Identity of the volume.
    pub uuid: [u8; 16],
    /// Name for people.
    pub label: Label,
    /// Random number that the checksums of trailers of nodes are seeded with.
    pub node_seed: u64,
    /// How often pages of the node table and the maps, and the root node, are kept.
    pub metadata_copies: MetadataCopies,
    /// Sizes of nodes; `None` takes the defaults.
    pub shape: Option<TreeShape>,
    /// Compression of new blocks; `None` takes that of the shape.
    pub codec: Option<Codec>,
    /// Bytes of the journal, a multiple of 4096 and at least 64 KiB; `None` takes a sixteenth of
    /// the volume, between 1 MiB and 256 MiB.
    pub journal_bytes: Option<u64>,
}

/// Journal of a volume of `bytes`: a sixteenth, between 1 MiB and 256 MiB.
fn journal_extent(bytes: u64) -> Extent {
    let len =
        (bytes / 16).clamp(REGION_BYTES_MIN.max(1 << 20), 256 << 20) / BLOCK_BYTES * BLOCK_BYTES;
    Extent::new(AREA_END, len)
}

/// Sizes of nodes of a volume of `bytes`: a few leaves must fit the deletion reserve.
fn shape_for(bytes: u64) -> TreeShape {
    let usual = TreeShape::default();
    let leaf_bytes = usize::try_from(bytes / 128)
        .unwrap_or(usize::MAX)
        .next_power_of_two()
        .clamp(32 << 10, usual.leaf_bytes);
    TreeShape {
        leaf_bytes,
        ..usual
    }
}

/// A device whose superblocks say that a volume is being made.
pub struct UnfinishedVolume {
    dev: Arc<dyn Device>,
    options: FormatOptions,
    /// The newest superblock on the device.
    sb: Superblock,
}

impl Tree {
    /// Writes an empty volume over the contents of `dev`. Durable on return.
    ///
    /// # Errors
    /// `Invalid` when the device is smaller than [`VOLUME_BYTES_MIN`], and the errors of the
    /// device.
    pub fn format(dev: &Arc<dyn Device>, options: &FormatOptions) -> Result<()> {
        UnfinishedVolume::begin(dev, options)?.finish(Batch::new())
    }
}

impl UnfinishedVolume {
    /// Marks all superblocks of `dev`, durably. A volume that the device held is gone.
    ///
    /// # Errors
    /// Those of [`Tree::format`].
    pub fn begin(dev: &Arc<dyn Device>, options: &FormatOptions) -> Result<Self> {
        let mut sb = superblock(dev.len_bytes(), options)?;
        let copies = read_copies(&**dev);
        let old = || copies.iter().flatten().flatten();
        sb.epoch = old()
            .map(|old| old.epoch)
            .max()
            .unwrap_or(0)
            .saturating_add(1);
        // No volume comes that far, and a forged number must leave room for the next ones.
        let generations = old().map(|old| old.generation);
        let generations = generations.filter(|number| *number < u64::MAX / 2);
        sb.generation = generations.max().unwrap_or(0);
        let mut unfinished = UnfinishedVolume {
            dev: Arc::clone(dev),
            options: options.clone(),
            sb,
        };
        if !failpoints::is_on(Fault::OldVolumeStands) {
            unfinished.write_both_slots()?;
        }
        Ok(unfinished)
    }

    /// Gives the contents of the device back: zeros in the area of the superblocks, so that no
    /// program finds other data there, and everything behind it discarded. Devices without discard
    /// stay as they are. `progress` is told the bytes done and those to do.
    ///
    /// # Errors
    /// Those of the device.
    pub fn erase(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
        let zeros = [0; BLOCK_BYTES as usize];
        let is_kept = |addr| is_place(addr) || SLOTS.iter().flatten().any(|copy| *copy == addr);
        for addr in (0..AREA_END).step_by(zeros.len()) {
            if !is_kept(addr) {
                let written = self.dev.write_at(addr, &zeros);
                written.map_err(io_error_at(Call::Write, "the superblock area", addr))?;
            }
        }
        let total = self.dev.len_bytes();
        let mut at = AREA_END;
        while at < total {
            let len = PIECE_BYTES.min(total - at);
            let discarded = self.dev.discard(at, len);
            discarded.map_err(io_error_at(Call::Discard, "the old contents", at))?;
            at += len;
            progress(at, total);
        }
        Ok(())
    }

    /// Writes an empty volume, as large as the device is now, with the batch `first` in it. Durable
    /// on return.
    ///
    /// # Errors
    /// Those of [`Tree::format`].
    pub fn finish(mut self, first: Batch) -> Result<()> {
        let dev = Arc::clone(&self.dev);
        let (generation, epoch) = (self.sb.generation, self.sb.epoch);
        self.sb = superblock(dev.len_bytes(), &self.options)?;
        (self.sb.generation, self.sb.epoch) = (generation, epoch);
        let roots = NodeTable::format(&dev, usable(&self.sb), self.sb.metadata_copies)?;
        self.sb.node_table = roots.node_table;
        self.sb.space_map = roots.space_map;
        self.sync()?;
        if !first.is_empty() {
            self.write_both_slots()?;
            let open = OpenOptions {
                manual: true,
                ..OpenOptions::default()
            };
            let tree = open_at(&dev, self.sb.clone(), &open)?;
            tree.apply(first)?;
            // The device stays that of the caller: the last superblocks follow, and a store may be
            // opened on it.
            tree.inner.close_tree()?;
            self.sb = tree.inner.checkpointer.superblock.lock().clone();
        }
        self.sb.is_unfinished = false;
        self.write_both_slots()
    }

    /// Writes the superblock to both slots, as the two newest, durably.
    fn write_both_slots(&mut self) -> Result<()> {
        for _ in 0..2 {
            self.sb.generation += 1;
            write_superblock(&*self.dev, &self.sb)?;
        }
        self.sync()
    }

    fn sync(&self) -> Result<()> {
        let synced = self.dev.sync();
        synced.map_err(io_error(Call::Sync, "a new volume"))
    }
}

/// The superblock of a volume without tables, on a device of `device_bytes`, which is being made.
fn superblock(device_bytes: u64, options: &FormatOptions) -> Result<Superblock> {
    let bytes = device_bytes / BLOCK_BYTES * BLOCK_BYTES;
    let bytes_min = match options.shape {
        None => VOLUME_BYTES_MIN,
        Some(_) => VOLUME_BYTES_MIN_OF_SHAPE,
    };
    if bytes < bytes_min {
        return Err(Error::Invalid("a volume takes at least 4 MiB"));
    }
    let shape = options.shape.clone().unwrap_or_else(|| shape_for(bytes));
    let journal = match options.journal_bytes {
        None => journal_extent(bytes),
        Some(len) if is_valid_region(Extent::new(AREA_END, len)) && len <= bytes / 4 => {
            Extent::new(AREA_END, len)
        }
        Some(_) => return Err(Error::Invalid("the size of the journal is out of range")),
    };
    let narrow =
        |n: usize| u32::try_from(n).map_err(|_| Error::Invalid("a node size is out of range"));
    Ok(Superblock {
        uuid: options.uuid,
        format_version: FORMAT_VERSION,
        generation: 0,
        epoch: 0,
        volume_bytes: bytes,
        journal,
        journal_start: JournalPos::default(),
        node_table: PageRef::NONE,
        space_map: PageRef::NONE,
        root_node: 0,
        next_node: 1,
        next_seq: 1,
        leaf_bytes: narrow(shape.leaf_bytes)?,
        basement_bytes: narrow(shape.block_bytes)?,
        fanout: u16::try_from(shape.fanout)
            .map_err(|_| Error::Invalid("the fanout is out of range"))?,
        codec: options.codec.unwrap_or(shape.codec),
        clean: true,
        space_debt: false,
        is_unfinished: true,
        metadata_copies: options.metadata_copies,
        label: options.label.clone(),
        node_seed: options.node_seed,
        openings: 0,
    })
}
