//! Rollback: the files of a volume become those of one of its snapshots.
//!
//! One batch replaces the root's range by that of the snapshot, after a snapshot of the state
//! before. While nobody has the volume open, no inode is in memory and the kernel remembers
//! nothing. Tables of inode numbers go back with the names that they are of. The counter of
//! generations does not: a number that is given again has another generation, and handles of
//! objects that were made after the snapshot lead nowhere.
//!
//! An open volume keeps the tables of now ([`ops/live_rollback.rs`](crate::ops::live_rollback)).

use std::sync::Arc;

use ramet_betree::Batch;
use ramet_block::Device;

use crate::error::Result;
use crate::format::keys;
use crate::namespace::numbers::Counters;
use crate::ops::live_rollback::RolledBack;
use crate::ops::snapshot_records::{SnapshotEntry, bring_back};
use crate::options::OpenOptions;
use crate::volume::{Volume, finish_joins, view};

/// Makes the files of the volume on `device` those of the snapshot `name`, durably. Returns the
/// snapshot that keeps the state before. All snapshots stay.
///
/// # Errors
/// `NotFound` when there is no such snapshot, those of a view of it, and those of [`Volume::open`]
/// and of the tree. The files are as before then, but there may be a snapshot more.
pub fn roll_back(
    device: Arc<dyn Device>,
    options: OpenOptions,
    name: &str,
) -> Result<SnapshotEntry> {
    // No thread of the volume changes anything on the way.
    let options = OpenOptions {
        manual: true,
        ..options
    };
    let volume = Volume::open(device, options)?;
    let rolled = volume.snapshots().find(name).and_then(|snapshot| {
        // A snapshot that cannot be shown would be a volume that cannot be opened.
        drop(view(&volume, name)?);
        let before = volume.snapshots().create_before_rollback()?;
        volume.tree().apply(rollback_to(&volume, &snapshot)?)?;
        Ok(before)
    });
    let closed = volume.close();
    let before = rolled?;
    closed?;
    Ok(before)
}

/// Makes the files of the open volume those of the snapshot `name`, for a caller that may have
/// references to inodes. Atomic, durable with the next sync. All snapshots stay.
///
/// # Errors
/// `NotFound` when there is no such snapshot, `TooBig` when it has more forks or protected inodes
/// than one batch renews, and those of a view of it and of the tree. The files are as before then.
pub fn roll_back_open(volume: &Volume, name: &str) -> Result<RolledBack> {
    // A snapshot that cannot be shown would be a volume that cannot be opened.
    drop(view(volume, name)?);
    let rolled = volume.snapshots().roll_back(name)?;
    finish_joins(volume);
    Ok(rolled)
}

/// The batch of a rollback.
fn rollback_to(volume: &Volume, snapshot: &SnapshotEntry) -> Result<Batch> {
    let generation = Counters::read(volume.tree())?.generation;
    let mut batch = Batch::new();
    bring_back(&mut batch, snapshot.id, keys::ranges_of_snapshots())?;
    for index in keys::INDEXES {
        batch.delete_prefix(keys::orphans(index));
    }
    Counters::put_generation(&mut batch, generation);
    Ok(batch)
}

#[cfg(test)]
mod tests {
    use ramet_block::MemDevice;

    use super::*;
    use crate::error::Error;
    use crate::format::ino::ROOT_INO;
    use crate::options::FormatOptions;

    #[test]
    fn snapshot_without_its_root_is_refused_and_everything_stays() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 26));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let open = || Volume::open(Arc::clone(&device), OpenOptions::default());
        let volume = open().unwrap();
        let entry = volume.snapshots().create("damaged").unwrap();
        let (base, root) = (keys::snapshot_base(entry.id), keys::root_record());
        let mut batch = Batch::new();
        batch.delete([&root[..1], &base, &root[1..]].concat());
        volume.tree().apply(batch).unwrap();
        volume.close().unwrap();
        drop(volume);
        let rolled = roll_back(Arc::clone(&device), OpenOptions::default(), "damaged");
        assert!(matches!(rolled, Err(Error::Corrupt { .. })), "{rolled:?}");
        let volume = open().unwrap();
        assert_eq!(
            volume.snapshots().count().unwrap(),
            1,
            "none before a rollback"
        );
        assert!(volume.attributes().getattr(ROOT_INO).is_ok());
        volume.close().unwrap();
    }
}
