//! Taking names away.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::change::{Change, lock_names, lock_states};
use crate::error::{Error, Result};
use crate::inode::{Ino, Inode, Loc};
use crate::keys;
use crate::lookup::check_name;
use crate::place::Topology;
use crate::record::FLAG_XATTRS;
use crate::volume::{RECORDS_BYTES, Volume, gone_is_not_found};

impl Volume {
    /// Removes a name of something else than a directory. With the last name goes the object, once
    /// nobody has it open.
    ///
    /// # Errors
    /// `NotFound`, `IsDirectory`, and those of the tree.
    pub fn unlink(&self, dir: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let dir = self.dir(dir)?;
        self.tree.admit(RECORDS_BYTES)?;
        let _names = dir.names.write();
        let inode = self.find(&dir, name)?.ok_or(Error::NotFound)?;
        if inode.is_dir() {
            return Err(Error::IsDirectory);
        }
        let _links = self.links.read();
        let mut change = Change::new(lock_states(&[&dir, &inode]));
        let topology = self.topology.read();
        self.drop_name(&mut change, &topology, &dir, name, &inode)?;
        let now = self.now();
        let parent = change.edit(&dir);
        (parent.mtime, parent.ctime) = (now, now);
        change.apply(&topology, &self.tree)
    }

    /// Takes `name` away from an object that is no directory. Its entry, when it is replaced, is put
    /// afterwards.
    pub(crate) fn drop_name(
        &self,
        change: &mut Change<'_>,
        topology: &Topology,
        dir: &Arc<Inode>,
        name: &[u8],
        inode: &Arc<Inode>,
    ) -> Result<()> {
        let place = topology.place(dir).map_err(gone_is_not_found)?;
        let loc = change.loc(inode);
        let path = topology.path_at(inode, &loc)?;
        change.batch.delete(keys::entry(&place.path, name));
        if let Loc::Body { root, .. } = &loc {
            change
                .batch
                .delete(keys::stub(&topology.place(root)?.path, &place.path, name));
        }
        self.drop_links(change, inode, &path, 1);
        Ok(())
    }

    /// An object at `path`, no directory, loses `count` names. What it has is erased with the last,
    /// or kept as an orphan when it is open.
    pub(crate) fn drop_links(
        &self,
        change: &mut Change<'_>,
        inode: &Arc<Inode>,
        path: &Bytes,
        count: u32,
    ) {
        let now = self.now();
        let record = change.edit(inode);
        record.ctime = now;
        record.nlink = record.nlink.saturating_sub(count);
        if record.nlink > 0 {
            return;
        }
        let record = record.clone();
        if matches!(change.loc(inode), Loc::Body { .. }) {
            change.batch.delete(keys::body_record(path));
        }
        if inode.opens.load(Ordering::SeqCst) > 0 {
            self.move_contents(change, &record, path, &keys::orphan(inode.ino), None);
            change.move_to(inode, Loc::Orphan);
        } else {
            self.erase(change, &record, path);
            change.move_to(inode, Loc::Gone);
        }
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `NotEmpty`, and those of the tree.
    pub fn rmdir(&self, dir: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let dir = self.dir(dir)?;
        self.tree.admit(RECORDS_BYTES)?;
        self.with_victim(&[&dir], &dir, name, |victim| {
            let victim = victim.ok_or(Error::NotFound)?;
            if !victim.is_dir() {
                return Err(Error::NotDirectory);
            }
            if !self.is_empty(victim)? {
                return Err(Error::NotEmpty);
            }
            let mut change = Change::new(lock_states(&[&dir, victim]));
            let topology = self.topology.read();
            self.drop_empty_dir(&mut change, &topology, &dir, name, victim)?;
            let now = self.now();
            let parent = change.edit(&dir);
            (parent.mtime, parent.ctime) = (now, now);
            change.apply(&topology, &self.tree)
        })
    }

    /// Takes an empty directory away. Its names are locked.
    pub(crate) fn drop_empty_dir(
        &self,
        change: &mut Change<'_>,
        topology: &Topology,
        dir: &Arc<Inode>,
        name: &[u8],
        victim: &Arc<Inode>,
    ) -> Result<()> {
        let place = topology.place(dir).map_err(gone_is_not_found)?;
        change.batch.delete(keys::entry(&place.path, name));
        if change.get(victim).has(FLAG_XATTRS) {
            change
                .batch
                .delete_prefix(keys::xattr(&keys::child(&place.path, name), b""));
        }
        let now = self.now();
        let record = change.edit(victim);
        (record.nlink, record.ctime) = (0, now);
        change.move_to(victim, Loc::Gone);
        let parent = change.edit(dir);
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
        op: impl FnOnce(Option<&Arc<Inode>>) -> Result<R>,
    ) -> Result<R> {
        loop {
            let expected = {
                let _names = dir.names.read();
                self.find(dir, name)?
            };
            let mut locked = dirs.to_vec();
            locked.extend(expected.iter().filter(|victim| victim.is_dir()));
            let _names = lock_names(&locked);
            let found = self.find(dir, name)?;
            if found.as_ref().map(|inode| inode.ino) == expected.as_ref().map(|inode| inode.ino) {
                return op(found.as_ref());
            }
        }
    }
}
