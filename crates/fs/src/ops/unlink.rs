//! Taking names away.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::{FLAG_XATTRS, Ghost};
use crate::namespace::inode::{Ino, Inode, Loc, NamesChange, Place};
use crate::namespace::location::Topology;
use crate::namespace::transaction::{Change, lock_names, lock_states};
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
        let _burial = self.burial();
        let dir = self.dir(dir)?;
        self.tree.admit(RECORDS_BYTES)?;
        let mut names = dir.change_names();
        let inode = self.find(&dir, name)?.ok_or(Error::NotFound)?;
        if inode.is_dir() {
            return Err(Error::IsDirectory);
        }
        let _links = self.links.read();
        let mut change = Change::new(lock_states(&[&dir, &inode]));
        let topology = self.topology.read();
        self.drop_name(&mut change, &topology, &dir, name, &inode, true)?;
        let now = self.now();
        let parent = change.edit(&dir);
        (parent.mtime, parent.ctime) = (now, now);
        change.apply(&topology, &self.tree)?;
        names.took_entry(inode.is_ghost());
        Ok(())
    }

    /// Takes `name` away from an object that is no directory, which may become a ghost if nothing takes its place
    /// (`may_stay`). The entry of what does is put afterwards.
    pub(crate) fn drop_name(
        &self,
        change: &mut Change<'_>,
        topology: &Topology,
        dir: &Arc<Inode>,
        name: &[u8],
        inode: &Arc<Inode>,
        may_stay: bool,
    ) -> Result<()> {
        let place = topology.place(dir).map_err(gone_is_not_found)?;
        let loc = change.loc(inode);
        let path = topology.path_at(inode, &loc)?;
        if let Loc::Body { root, .. } = &loc {
            change
                .batch
                .delete(keys::stub(&topology.place(root)?.path, &place.path, name));
        }
        self.drop_links(change, inode, &path, 1, may_stay);
        remove_entry(change, inode, &place, name);
        Ok(())
    }

    /// An object at `path`, no directory, loses `count` names. What it has goes with the last.
    pub(crate) fn drop_links(
        &self,
        change: &mut Change<'_>,
        inode: &Arc<Inode>,
        path: &Bytes,
        count: u32,
        may_stay: bool,
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
        self.outlive(change, inode, &record, path, may_stay);
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `NotEmpty`, and those of the tree.
    pub fn rmdir(&self, dir: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let _burial = self.burial();
        let dir = self.dir(dir)?;
        self.tree.admit(RECORDS_BYTES)?;
        self.with_victim(&[&dir], &dir, name, |victim, names| {
            let victim = victim.ok_or(Error::NotFound)?;
            if !victim.is_dir() {
                return Err(Error::NotDirectory);
            }
            let its = names.iter().find(|names| names.are_of(victim));
            let inside = match its.and_then(NamesChange::known) {
                Some(count) => Inside::of(count),
                None => self.inside(victim)?,
            };
            let mut change = Change::new(lock_states(&[&dir, victim]));
            let topology = self.topology.read();
            self.drop_empty_dir(&mut change, &topology, &dir, name, (victim, inside), true)?;
            let now = self.now();
            let parent = change.edit(&dir);
            (parent.mtime, parent.ctime) = (now, now);
            change.apply(&topology, &self.tree)?;
            if let Some(names) = names.iter_mut().find(|names| names.are_of(&dir)) {
                names.took_entry(victim.is_ghost());
            }
            Ok(())
        })
    }

    /// Takes a directory away that must be empty. Its names are locked. With ghosts inside it becomes one too, unless something takes its
    /// place: then the topology is held for writing.
    pub(crate) fn drop_empty_dir(
        &self,
        change: &mut Change<'_>,
        topology: &Topology,
        dir: &Arc<Inode>,
        name: &[u8],
        (victim, inside): (&Arc<Inode>, Inside),
        may_stay: bool,
    ) -> Result<()> {
        let place = topology.place(dir).map_err(gone_is_not_found)?;
        let path = keys::child(&place.path, name);
        match inside {
            Inside::Entries => return Err(Error::NotEmpty),
            Inside::Nothing => {
                if change.get(victim).has(FLAG_XATTRS) {
                    change.batch.delete_prefix(keys::xattr(&path, b""));
                }
                change.move_to(victim, Loc::Gone);
            }
            Inside::Ghosts if may_stay => {
                let loc = Loc::Ghost {
                    parent: Arc::clone(dir),
                    name: Bytes::copy_from_slice(name),
                };
                change.move_to(victim, loc);
            }
            Inside::Ghosts => {
                self.put_aside(change, victim, &path);
                delete_ranges(&mut change.batch, &path);
            }
        }
        remove_entry(change, victim, &place, name);
        let now = self.now();
        let record = change.edit(victim);
        (record.nlink, record.ctime) = (0, now);
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
        op: impl FnOnce(Option<&Arc<Inode>>, &mut [NamesChange<'_>]) -> Result<R>,
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

/// The entry of what lay at a name in the directory at `place` goes, or becomes a ghost's, as `change` has it.
fn remove_entry(change: &mut Change<'_>, inode: &Arc<Inode>, place: &Place, name: &[u8]) {
    let entry = keys::entry(&place.path, name);
    // Also below a ghost: a batch that deletes nothing could be refused for want of space, and removing must not.
    change.batch.delete(entry.clone());
    if matches!(change.loc(inode), Loc::Ghost { .. }) {
        let ghost = Ghost {
            kind: inode.kind,
            stored: inode.ino.0 ^ place.acc,
        };
        change.batch.put(entry, ghost.encode());
    }
}
