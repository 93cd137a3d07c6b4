//! Removal of names within a transaction.
//!
//! A removal takes the entry away, counts one link less, and hands the contents to the deferred
//! deletes when the last name is gone. `unlink.rs`, `rename.rs` and `trees.rs` remove names as
//! parts of their transactions.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::keys;
use crate::format::record::{DeletedEntry, FLAG_JOINING, FLAG_XATTRS, Time};
use crate::format::slots::Slot;
use crate::namespace::inode::{DirPath, Inode, Location};
use crate::namespace::number_reclaim::put_gone;
use crate::namespace::resolve::{Found, Inside};
use crate::namespace::topology::Topology;
use crate::namespace::transaction::Transaction;
use crate::ops::at::At;
use crate::ops::contents::delete_ranges;
use crate::ops::deferred_delete::DeferredDeletes;

/// How names are removed.
pub(crate) struct Removal<'a> {
    pub(crate) deletes: &'a DeferredDeletes,
    pub(crate) topology: &'a Topology,
    pub(crate) now: Time,
    /// Nothing takes the place of the name, so the entry may become a deleted entry. Otherwise the
    /// caller puts the new entry afterwards.
    pub(crate) may_stay: bool,
}

impl Removal<'_> {
    /// Removes a name of an object that is no directory.
    pub(crate) fn name(
        &self,
        tx: &mut Transaction<'_>,
        at: At<'_>,
        Found { inode, slot }: &Found,
    ) -> Result<()> {
        let dir = self.topology.dir_path(at.dir).map_err(gone_is_not_found)?;
        let location = tx.location(inode);
        let path = self.topology.path_at(&location)?;
        if let Location::Shared { root, .. } = &location {
            let root = self.topology.dir_path(root)?;
            tx.batch.delete(keys::link(&root.path, &dir.path, at.name));
        }
        self.links(tx, inode, &path, 1);
        remove_entry(tx, inode, (at, &dir), *slot);
        Ok(())
    }

    /// Counts `count` names less of an object at `path` that is no directory. Its contents go with
    /// the last one.
    pub(crate) fn links(
        &self,
        tx: &mut Transaction<'_>,
        inode: &Arc<Inode>,
        path: &Bytes,
        count: u32,
    ) {
        let record = tx.edit(inode);
        record.ctime = self.now;
        record.nlink = record.nlink.saturating_sub(count);
        if record.nlink > 0 {
            return;
        }
        let record = record.clone();
        match tx.location(inode) {
            Location::Shared { root, link, .. } => {
                tx.unpin(inode, root.identity());
                tx.lose(&root, Slot::shared(link));
                tx.batch.delete(keys::shared_record(path));
            }
            Location::Child { parent, .. } => tx.unpin(inode, parent.identity()),
            _ => {}
        }
        self.deletes
            .defer_delete(tx, inode, &record, path, self.may_stay);
    }

    /// Removes a directory, which must be empty and whose names are locked. A directory with
    /// deleted entries inside becomes a deleted entry itself if it may stay; otherwise the topology
    /// is held for writing.
    pub(crate) fn empty_dir(
        &self,
        tx: &mut Transaction<'_>,
        at: At<'_>,
        (victim, inside): (&Arc<Inode>, Inside),
    ) -> Result<()> {
        let dir = self.topology.dir_path(at.dir).map_err(gone_is_not_found)?;
        let path = keys::child(&dir.path, at.name);
        match inside {
            Inside::Entries => return Err(Error::NotEmpty),
            Inside::Nothing => {
                if tx.get(victim).has(FLAG_XATTRS) {
                    tx.batch.delete_prefix(keys::xattr(&path, b""));
                }
                tx.move_to(victim, Location::Gone);
            }
            Inside::OnlyDeleted if self.may_stay => {
                let location = Location::Deleted {
                    parent: Arc::clone(at.dir),
                    name: Bytes::copy_from_slice(at.name),
                };
                tx.move_to(victim, location);
            }
            Inside::OnlyDeleted => {
                self.deletes.move_to_orphans(tx, victim, &path);
                delete_ranges(&mut tx.batch, &path, self.deletes.indexes());
            }
        }
        let slot = tx.get(victim).slot;
        remove_entry(tx, victim, (at, &dir), slot);
        tx.unpin(victim, at.dir.identity());
        if victim.is_joining.load(Ordering::SeqCst) {
            // No name is left that the join would move.
            tx.batch.delete(keys::joining(&path));
            tx.edit(victim).flags &= !FLAG_JOINING;
        }
        put_gone(&mut tx.batch, victim.identity());
        let record = tx.edit(victim);
        (record.nlink, record.ctime) = (0, self.now);
        let parent = tx.edit(at.dir);
        parent.nlink = parent.nlink.saturating_sub(1);
        Ok(())
    }
}

/// Removes the entry `at` of the directory whose path is `dir`, or makes it a deleted entry, as the
/// location of `inode` in `tx` says.
fn remove_entry(
    tx: &mut Transaction<'_>,
    inode: &Arc<Inode>,
    (at, dir): (At<'_>, &DirPath),
    slot: Slot,
) {
    let entry = keys::entry(&dir.path, at.name);
    if matches!(tx.location(inode), Location::Deleted { .. }) {
        let deleted = DeletedEntry {
            kind: inode.kind,
            slot,
            pin: tx.get(inode).pin,
        };
        tx.batch.put(entry, deleted.encode());
        tx.batch.count_as_removal();
        // The inode in memory holds its number.
        tx.lose(at.dir, slot);
    } else {
        tx.batch.delete(entry);
        tx.delete_slot((at.dir, &dir.path), slot);
    }
}
