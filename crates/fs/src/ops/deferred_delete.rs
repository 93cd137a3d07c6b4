//! What outlives its name.
//!
//! Nobody tells when a file is opened and closed: each open and close would be a request of the kernel. So whatever
//! the caller knows (what it looked up and did not forget) may be open, and its contents stay until it
//! is forgotten. The kernel forgets what nobody has open as soon as the name is gone.
//!
//! - A small file that is unlinked stays where it is, and its entry becomes a *ghost*: there is no such name,
//!   and the keys below it are taken. That costs one key more than removing it at once. So does an empty
//!   directory in which there are ghosts.
//! - A larger file, one that is replaced, and a tree that is removed or replaced move to the orphan area.
//!   Of a tree, the files go on and nothing else can be found in it.
//!
//! Either is erased when its inode leaves the memory ([`Inode::leave`](crate::namespace::inode::Inode)), or by a later sync if that fails. When there is no time for
//! that, orphans are erased when the volume is opened the next time; ghosts, which are small, when somebody reads their
//! directory, uses the name again, or removes the directory. A clone of a directory copies its ghosts, and
//! nobody knows those.

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::Batch;
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::{Entry, Kind, Record};
use crate::namespace::inode::{Ino, Inode, Loc, ROOT_INO, Reach, Remains};
use crate::namespace::location::Topology;
use crate::namespace::transaction::{Change, lock_states};
use crate::ops::readdir::DirStream;
use crate::volume::{RECORDS_BYTES, Volume};

/// Largest file, in bytes, that becomes a ghost: nobody looks for ghosts after a crash.
pub(crate) const GHOST_BYTES_MAX: u64 = 1 << 20;
/// After so many failures the rest waits: the volume may be out of order.
const FAILURES_MAX: usize = 8;

impl Volume {
    /// The caller drops `lookups` of the references that lookups gave it. What has no name any more is erased when nobody
    /// knows it; when that fails, it is tried again by [`Volume::sync_all`] and [`Volume::close`].
    pub fn forget(&self, ino: Ino, lookups: u64) {
        self.forget_noting(ino, lookups, || {});
    }

    /// The same. `last` is done if none is left, before another lookup of it can succeed.
    pub fn forget_noting(&self, ino: Ino, lookups: u64, last: impl FnOnce()) {
        if ino != ROOT_INO {
            self.table.forget_noting(ino, lookups, last);
            self.bury();
        }
    }

    /// The caller knows nothing any more but the root.
    pub fn forget_all(&self) {
        self.table.clear();
        self.bury_all();
    }

    /// The caller knows `ino` once more, as by a lookup.
    ///
    /// # Errors
    /// `Stale` when it was not known, or has no contents any more.
    pub fn remember(&self, ino: Ino) -> Result<()> {
        let inode = self.inode(ino)?;
        // Nothing is taken away from what is known with the state held.
        let _record = inode.state.read();
        if matches!(*inode.loc.read(), Loc::Gone) {
            return Err(Error::Stale);
        }
        self.table.remember(&inode);
        Ok(())
    }

    /// Erases those of these ghosts in `dir`, by name and number, that are not in memory: nobody knew them when
    /// the volume was opened, or they came with a clone.
    pub(crate) fn bury_unknown(&self, dir: &Arc<Inode>, ghosts: Vec<(Bytes, Ino)>) {
        for (name, ino) in ghosts {
            if self.table.get(ino).is_none() {
                self.table.leave(Remains::Ghost {
                    parent: Arc::clone(dir),
                    name,
                    ino,
                    record: None,
                });
            }
        }
        self.bury();
    }

    /// Erases what inodes left that are not in memory any more. What cannot be erased waits for [`Volume::bury_all`]; those that forget
    /// are not to fail at it again and again.
    pub(crate) fn bury(&self) {
        let mut failures = 0;
        while failures < FAILURES_MAX {
            let all = self.table.take_remains();
            if all.is_empty() {
                return;
            }
            for remains in all {
                if failures == FAILURES_MAX {
                    self.table.leave(remains);
                } else if let Err(error) = self.erase_remains(&remains) {
                    tracing::debug!(%error, "space of something removed comes back later");
                    failures += 1;
                    // What nobody knew is found again where it was found.
                    if !matches!(remains, Remains::Ghost { record: None, .. }) {
                        self.unburied.lock().push(remains);
                    }
                }
            }
        }
    }

    /// The same, and tries what could not be erased before.
    pub(crate) fn bury_all(&self) {
        let unburied = std::mem::take(&mut *self.unburied.lock());
        unburied
            .into_iter()
            .for_each(|remains| self.table.leave(remains));
        self.bury();
    }

    /// Buries when it is dropped: to be taken before anything that is locked or held.
    pub(crate) fn burial(&self) -> Burial<'_> {
        Burial(self)
    }

    /// Closes a directory; what it kept of something removed is erased.
    pub fn close_dir(&self, stream: Arc<DirStream>) {
        drop(stream);
        self.bury();
    }

    fn erase_remains(&self, remains: &Remains) -> Result<()> {
        self.tree.admit(RECORDS_BYTES)?;
        match remains {
            Remains::Orphan(ino) => {
                let mut batch = Batch::new();
                delete_ranges(&mut batch, &keys::orphan(*ino));
                self.tree.apply(batch)?;
                Ok(())
            }
            Remains::Ghost {
                parent,
                name,
                ino,
                record,
            } => {
                let mut names = parent.change_names();
                // It may be another one by now, or none.
                let is_there = self.ghost_at(parent, name)? == Some(*ino);
                if is_there {
                    self.erase_ghost(parent, name, record.as_ref())?;
                }
                names.took_ghost(is_there);
                Ok(())
            }
        }
    }

    /// The number of the ghost at a name, if there is one. The caller holds the names of the directory.
    fn ghost_at(&self, dir: &Arc<Inode>, name: &[u8]) -> Result<Option<Ino>> {
        let (peek, acc) = {
            let topology = self.topology.read();
            let place = match topology.remaining(dir) {
                Ok(place) if place.reach != Reach::Orphan => place,
                // They go with the directory.
                Ok(_) | Err(Error::Stale) => return Ok(None),
                Err(other) => return Err(other),
            };
            (self.tree.peek(keys::entry(&place.path, name)), place.acc)
        };
        match peek.get()?.as_ref().map(Entry::decode).transpose()? {
            Some(Entry::Ghost(ghost)) => Ok(Some(Ino(ghost.stored ^ acc))),
            Some(Entry::Inode { .. } | Entry::Stub(_)) | None => Ok(None),
        }
    }

    /// Erases a ghost that nobody knows, `record` if that is known. The caller holds the names of the directory.
    fn erase_ghost(&self, dir: &Arc<Inode>, name: &[u8], record: Option<&Record>) -> Result<()> {
        let topology = self.topology.read();
        let mut change = Change::new(lock_states(&[]));
        let path = drop_ghost(&mut change, &topology, dir, name)?;
        match record {
            Some(record) if record.kind() == Kind::Regular => {
                self.erase(&mut change, record, &path);
            }
            _ => delete_ranges(&mut change.batch, &path),
        }
        change.apply(&topology, &self.tree)
    }

    /// Makes the keys at and below a name that does not exist free, if a ghost takes them. The caller holds the names of the
    /// directory for writing, and no state.
    pub(crate) fn vacate(&self, dir: &Arc<Inode>, name: &[u8]) -> Result<()> {
        let Some(ino) = self.ghost_at(dir, name)? else {
            return Ok(());
        };
        if failpoints::is_on(Fault::GhostNotVacated) {
            return Ok(());
        }
        let is_here = |inode: &Arc<Inode>| match &*inode.loc.read() {
            Loc::Ghost { parent, name: its } => Arc::ptr_eq(parent, dir) && its == name,
            _ => false,
        };
        let Some(inode) = self.table.get(ino).filter(is_here) else {
            return self.erase_ghost(dir, name, None);
        };
        let mut change = Change::new(lock_states(&[&inode]));
        if inode.is_dir() {
            let mut topology = self.topology.write();
            let path = drop_ghost(&mut change, &topology, dir, name)?;
            self.put_aside(&mut change, &inode, &path);
            delete_ranges(&mut change.batch, &path);
            change.apply(&topology, &self.tree)?;
            topology.generation += 1;
            return Ok(());
        }
        let topology = self.topology.read();
        let path = drop_ghost(&mut change, &topology, dir, name)?;
        let record = change.get(&inode).clone();
        self.move_contents(&mut change, &record, &path, &keys::orphan(ino), None);
        change.move_to(&inode, Loc::Orphan);
        change.apply(&topology, &self.tree)
    }

    /// Copies what lies at and below `path`, which is then erased or replaced, to the orphan area, unless nobody knows it. The
    /// topology is held for writing.
    pub(crate) fn put_aside(&self, change: &mut Change<'_>, inode: &Arc<Inode>, path: &[u8]) {
        if !inode.is_dir() && !self.table.is_known(inode) {
            change.move_to(inode, Loc::Gone);
            return;
        }
        let orphan = keys::orphan(inode.ino);
        for index in [keys::META, keys::DATA] {
            change
                .batch
                .clone_prefix(keys::range(index, path), keys::range(index, &orphan));
        }
        change.move_to(inode, Loc::Orphan);
    }

    /// The only name of `inode`, no directory, goes: `change` has its record, with no names. What it has is
    /// erased, or kept where it is or in the orphan area.
    pub(crate) fn outlive(
        &self,
        change: &mut Change<'_>,
        inode: &Arc<Inode>,
        record: &Record,
        path: &Bytes,
        may_stay: bool,
    ) {
        if record.kind() != Kind::Regular || !self.table.is_known(inode) {
            self.erase(change, record, path);
            change.move_to(inode, Loc::Gone);
            return;
        }
        match change.loc(inode) {
            Loc::Child { parent, name } if may_stay && record.size_bytes <= GHOST_BYTES_MAX => {
                change.move_to(inode, Loc::Ghost { parent, name });
            }
            _ => {
                self.move_contents(change, record, path, &keys::orphan(inode.ino), None);
                change.move_to(inode, Loc::Orphan);
            }
        }
    }

    /// Before a file of `size_bytes` is written: a ghost must not become large.
    pub(crate) fn exorcise(&self, inode: &Arc<Inode>, size_bytes: u64) -> Result<()> {
        if size_bytes <= GHOST_BYTES_MAX {
            return Ok(());
        }
        let loc = inode.loc.read().clone();
        let Loc::Ghost { parent, name } = loc else {
            return Ok(());
        };
        self.tree.admit(RECORDS_BYTES)?;
        let _names = parent.change_names();
        self.vacate(&parent, &name)
    }
}

/// See [`Volume::burial`].
pub(crate) struct Burial<'a>(&'a Volume);

impl Drop for Burial<'_> {
    fn drop(&mut self) {
        self.0.bury();
    }
}

/// The entry of a ghost goes; the path of what lies there.
fn drop_ghost(
    change: &mut Change<'_>,
    topology: &Topology,
    dir: &Arc<Inode>,
    name: &[u8],
) -> Result<Bytes> {
    let place = topology.remaining(dir)?;
    change.batch.delete(keys::entry(&place.path, name));
    Ok(keys::child(&place.path, name))
}

/// All keys at and below a path, but its entry.
pub(crate) fn delete_ranges(batch: &mut Batch, path: &[u8]) {
    for index in [keys::META, keys::DATA] {
        batch.delete_prefix(keys::range(index, path));
    }
}
