//! Taking names away.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::{DeletedEntry, FLAG_XATTRS};
use crate::namespace::inode::{DirPath, Ino, Inode, Location, LockedNames};
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{Transaction, lock_names, lock_states};
use crate::ops::deferred_delete::delete_ranges;
use crate::ops::lookup::check_name;
use crate::ops::readdir::Inside;
use crate::volume::{RECORDS_BYTES, Volume, gone_is_not_found};

impl Volume {
    /// Removes a name of something else than a directory. With the last name goes the object, once
    /// the caller forgets it.
    ///
    /// # Errors
    /// `NotFound`, `IsDirectory`, and those of the tree.
    pub fn unlink(&self, dir: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let _reaped = self.reap_on_drop();
        let dir = self.dir(dir)?;
        self.tree.admit(RECORDS_BYTES)?;
        let mut names = dir.lock_names();
        let inode = self.find(&dir, name)?.ok_or(Error::NotFound)?;
        if inode.is_dir() {
            return Err(Error::IsDirectory);
        }
        let _links = self.links.read();
        let mut tx = Transaction::new(lock_states(&[&dir, &inode]));
        let topology = self.topology.read();
        self.drop_name(&mut tx, &topology, &dir, name, &inode, true)?;
        let now = self.now();
        let parent = tx.edit(&dir);
        (parent.mtime, parent.ctime) = (now, now);
        tx.apply(&topology, &self.tree)?;
        names.took_entry(inode.is_deleted());
        Ok(())
    }

    /// Takes `name` away from an object that is no directory, which may become a deleted entry if nothing takes its place
    /// (`may_stay`). The entry of what does is put afterwards.
    pub(crate) fn drop_name(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        dir: &Arc<Inode>,
        name: &[u8],
        inode: &Arc<Inode>,
        may_stay: bool,
    ) -> Result<()> {
        let at = topology.dir_path(dir).map_err(gone_is_not_found)?;
        let location = tx.location(inode);
        let path = topology.path_at(inode, &location)?;
        if let Location::Shared { root, .. } = &location {
            tx.batch
                .delete(keys::link(&topology.dir_path(root)?.path, &at.path, name));
        }
        self.drop_links(tx, inode, &path, 1, may_stay);
        remove_entry(tx, inode, &at, name);
        Ok(())
    }

    /// An object at `path`, no directory, loses `count` names. What it has goes with the last.
    pub(crate) fn drop_links(
        &self,
        tx: &mut Transaction<'_>,
        inode: &Arc<Inode>,
        path: &Bytes,
        count: u32,
        may_stay: bool,
    ) {
        let now = self.now();
        let record = tx.edit(inode);
        record.ctime = now;
        record.nlink = record.nlink.saturating_sub(count);
        if record.nlink > 0 {
            return;
        }
        let record = record.clone();
        if matches!(tx.location(inode), Location::Shared { .. }) {
            tx.batch.delete(keys::shared_record(path));
        }
        self.defer_delete(tx, inode, &record, path, may_stay);
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `NotEmpty`, and those of the tree.
    pub fn rmdir(&self, dir: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let _reaped = self.reap_on_drop();
        let dir = self.dir(dir)?;
        self.tree.admit(RECORDS_BYTES)?;
        self.with_victim(&[&dir], &dir, name, |victim, names| {
            let victim = victim.ok_or(Error::NotFound)?;
            if !victim.is_dir() {
                return Err(Error::NotDirectory);
            }
            let its = names.iter().find(|names| names.are_of(victim));
            let inside = match its.and_then(LockedNames::known) {
                Some(count) => Inside::of(count),
                None => self.inside(victim)?,
            };
            let mut tx = Transaction::new(lock_states(&[&dir, victim]));
            let topology = self.topology.read();
            self.drop_empty_dir(&mut tx, &topology, &dir, name, (victim, inside), true)?;
            let now = self.now();
            let parent = tx.edit(&dir);
            (parent.mtime, parent.ctime) = (now, now);
            tx.apply(&topology, &self.tree)?;
            if let Some(names) = names.iter_mut().find(|names| names.are_of(&dir)) {
                names.took_entry(victim.is_deleted());
            }
            Ok(())
        })
    }

    /// Takes a directory away that must be empty. Its names are locked. With deleted entries inside it becomes one too, unless something takes its
    /// place: then the topology is held for writing.
    pub(crate) fn drop_empty_dir(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        dir: &Arc<Inode>,
        name: &[u8],
        (victim, inside): (&Arc<Inode>, Inside),
        may_stay: bool,
    ) -> Result<()> {
        let at = topology.dir_path(dir).map_err(gone_is_not_found)?;
        let path = keys::child(&at.path, name);
        match inside {
            Inside::Entries => return Err(Error::NotEmpty),
            Inside::Nothing => {
                if tx.get(victim).has(FLAG_XATTRS) {
                    tx.batch.delete_prefix(keys::xattr(&path, b""));
                }
                tx.move_to(victim, Location::Gone);
            }
            Inside::OnlyDeleted if may_stay => {
                let location = Location::Deleted {
                    parent: Arc::clone(dir),
                    name: Bytes::copy_from_slice(name),
                };
                tx.move_to(victim, location);
            }
            Inside::OnlyDeleted => {
                self.move_to_orphans(tx, victim, &path);
                delete_ranges(&mut tx.batch, &path);
            }
        }
        remove_entry(tx, victim, &at, name);
        let now = self.now();
        let record = tx.edit(victim);
        (record.nlink, record.ctime) = (0, now);
        let parent = tx.edit(dir);
        parent.nlink = parent.nlink.saturating_sub(1);
        Ok(())
    }

    /// Runs `op` with the names of `dirs` locked, and those of what `name` in `dir` (one of them)
    /// leads to, if it is a directory. Locks are taken in the order of numbers, so the one found
    /// first may have changed until all are held: then again, as often as others replace it.
    pub(crate) fn with_victim<R>(
        &self,
        dirs: &[&Arc<Inode>],
        dir: &Arc<Inode>,
        name: &[u8],
        op: impl FnOnce(Option<&Arc<Inode>>, &mut [LockedNames<'_>]) -> Result<R>,
    ) -> Result<R> {
        loop {
            let expected = {
                let _names = dir.names.read();
                self.find(dir, name)?
            };
            let mut locked = dirs.to_vec();
            locked.extend(expected.iter().filter(|victim| victim.is_dir()));
            let mut names = lock_names(&locked);
            let found = self.find(dir, name)?;
            if found.as_ref().map(|inode| inode.ino) == expected.as_ref().map(|inode| inode.ino) {
                return op(found.as_ref(), &mut names);
            }
        }
    }
}

/// The entry of what lay at a name in the directory at `place` goes, or becomes a deleted entry's, as `change` has it.
fn remove_entry(tx: &mut Transaction<'_>, inode: &Arc<Inode>, at: &DirPath, name: &[u8]) {
    let entry = keys::entry(&at.path, name);
    // Also below a deleted entry: a batch that deletes nothing could be refused for want of space, and removing must not.
    tx.batch.delete(entry.clone());
    if matches!(tx.location(inode), Location::Deleted { .. }) {
        let deleted = DeletedEntry {
            kind: inode.kind,
            stored: inode.ino.0 ^ at.acc,
        };
        tx.batch.put(entry, deleted.encode());
    }
}
