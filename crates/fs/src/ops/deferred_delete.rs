//! What outlives its name.
//!
//! Nobody tells when a file is opened and closed: each open and close would be a request of the kernel. So whatever
//! the caller knows (what it looked up and did not forget) may be open, and its contents stay until it
//! is forgotten. The kernel forgets what nobody has open as soon as the name is gone.
//!
//! - A small file that is unlinked stays where it is, and its entry becomes a *deleted entry*: there is no such name,
//!   and the keys below it are taken. That costs one key more than removing it at once. So does an empty
//!   directory in which there are deleted entries.
//! - A larger file, one that is replaced, and a tree that is removed or replaced move to the orphan area.
//!   Of a tree, the files go on and nothing else can be found in it.
//!
//! Either is erased when its inode leaves the memory ([`Inode::leave`](crate::namespace::inode::Inode)), or by a later sync if that fails. When there is no time for
//! that, orphans are erased when the volume is opened the next time; deleted entries, which are small, when somebody reads their
//! directory, uses the name again, or removes the directory. A clone of a directory copies its deleted entries, and
//! nobody knows those.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::{Batch, successor_of_prefix};
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::record::{Entry, Kind, Record};
use crate::namespace::inode::{Deferred, Inode, Location, Reach};
use crate::namespace::resolve::Namespace;
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{RECORDS_BYTES, Transaction, lock_states};
use crate::ops::contents::{delete_ranges, erase, move_contents};

/// Largest file, in bytes, that becomes a deleted entry: nobody looks for deleted entries after a crash.
pub(crate) const IN_PLACE_BYTES_MAX: u64 = 1 << 20;
/// After so many failures the rest waits: the volume may be out of order.
const FAILURES_MAX: usize = 8;

/// Erases contents that outlive their names.
pub(crate) struct DeferredDeletes {
    namespace: Arc<Namespace>,
    /// Deletes that failed and are tried again by [`DeferredDeletes::reap_all`].
    failed: Mutex<Vec<Deferred>>,
    is_read_only: bool,
}

impl DeferredDeletes {
    pub(crate) fn new(namespace: &Arc<Namespace>, is_read_only: bool) -> Arc<Self> {
        Arc::new(Self {
            namespace: Arc::clone(namespace),
            failed: Mutex::default(),
            is_read_only,
        })
    }

    /// Erases the orphan area: files that were unlinked while open when the volume was last in use.
    pub(crate) fn erase_orphans(&self) -> Result<()> {
        let tree = &self.namespace.tree;
        for index in [keys::META, keys::DATA] {
            let orphans = keys::tagged(index, b"", keys::VOLUME_TAGS[1]);
            let end = successor_of_prefix(&orphans);
            let first = tree.scan(&orphans, end.as_deref()).next();
            if first.transpose()?.is_some() {
                let mut batch = Batch::new();
                batch.delete_prefix(orphans);
                tree.admit(RECORDS_BYTES)?;
                tree.apply(batch)?;
            }
        }
        Ok(())
    }

    /// Drops all deletes that wait, with the inodes that they hold.
    pub(crate) fn clear(&self) {
        self.failed.lock().clear();
        while !self.namespace.table.take_deferred().is_empty() {}
    }

    /// Erases those of these deleted entries in `dir`, by name and number, that are not in memory: nobody knew them when
    /// the volume was opened, or they came with a clone.
    pub(crate) fn reap_unknown(&self, dir: &Arc<Inode>, deleted: Vec<(Bytes, Ino)>) {
        if self.is_read_only {
            return;
        }
        for (name, ino) in deleted {
            if self.namespace.table.get(ino).is_none() {
                self.namespace.table.enqueue(Deferred::Entry {
                    parent: Arc::clone(dir),
                    name,
                    ino,
                    record: None,
                });
            }
        }
        self.reap();
    }

    /// Erases what inodes left that are not in memory any more. What cannot be erased waits for [`Volume::reap_all`]; those that forget
    /// are not to fail at it again and again.
    pub(crate) fn reap(&self) {
        let mut failures = 0;
        while failures < FAILURES_MAX {
            let all = self.namespace.table.take_deferred();
            if all.is_empty() {
                return;
            }
            for deferred in all {
                if failures == FAILURES_MAX {
                    self.namespace.table.enqueue(deferred);
                } else if let Err(error) = self.erase_deferred(&deferred) {
                    tracing::debug!(%error, "space of something removed comes back later");
                    failures += 1;
                    // What nobody knew is found again where it was found.
                    if !matches!(deferred, Deferred::Entry { record: None, .. }) {
                        self.failed.lock().push(deferred);
                    }
                }
            }
        }
    }

    /// The same, and tries what could not be erased before.
    pub(crate) fn reap_all(&self) {
        let failed = std::mem::take(&mut *self.failed.lock());
        failed
            .into_iter()
            .for_each(|deferred| self.namespace.table.enqueue(deferred));
        self.reap();
    }

    /// Reaps when it is dropped: to be taken before anything that is locked or held.
    pub(crate) fn reap_on_drop(&self) -> ReapOnDrop<'_> {
        ReapOnDrop(self)
    }

    fn erase_deferred(&self, deferred: &Deferred) -> Result<()> {
        self.namespace.tree.admit(RECORDS_BYTES)?;
        match deferred {
            Deferred::Orphan(ino) => {
                let mut batch = Batch::new();
                delete_ranges(&mut batch, &keys::orphan(*ino));
                self.namespace.tree.apply(batch)?;
                Ok(())
            }
            Deferred::Entry {
                parent,
                name,
                ino,
                record,
            } => {
                let mut names = parent.lock_names();
                // It may be another one by now, or none.
                let is_there = self.deleted_at(parent, name)? == Some(*ino);
                if is_there {
                    self.erase_deleted(parent, name, record.as_ref())?;
                }
                names.took_deleted(is_there);
                Ok(())
            }
        }
    }

    /// The number of the deleted entry at a name, if there is one. The caller holds the names of the directory.
    fn deleted_at(&self, dir: &Arc<Inode>, name: &[u8]) -> Result<Option<Ino>> {
        let (lookup, acc) = {
            let topology = self.namespace.topology.read();
            let at = match topology.kept_dir_path(dir) {
                Ok(at) if at.reach != Reach::Orphan => at,
                // They go with the directory.
                Ok(_) | Err(Error::Stale) => return Ok(None),
                Err(other) => return Err(other),
            };
            (
                self.namespace
                    .tree
                    .lookup_deferred(keys::entry(&at.path, name)),
                at.acc,
            )
        };
        match lookup.get()?.as_ref().map(Entry::decode).transpose()? {
            Some(Entry::Deleted(deleted)) => Ok(Some(Ino(deleted.stored ^ acc))),
            Some(Entry::Inode { .. } | Entry::Link(_)) | None => Ok(None),
        }
    }

    /// Erases a deleted entry that nobody knows, `record` if that is known. The caller holds the names of the directory.
    fn erase_deleted(&self, dir: &Arc<Inode>, name: &[u8], record: Option<&Record>) -> Result<()> {
        let topology = self.namespace.topology.read();
        let mut tx = Transaction::new(lock_states(&[]));
        let path = drop_deleted(&mut tx, &topology, dir, name)?;
        match record {
            Some(record) if record.kind() == Kind::Regular => {
                erase(&mut tx, record, &path);
            }
            _ => delete_ranges(&mut tx.batch, &path),
        }
        tx.apply(&topology, &self.namespace.tree)
    }

    /// Makes the keys at and below a name that does not exist free, if a deleted entry takes them. The caller holds the names of the
    /// directory for writing, and no state.
    pub(crate) fn free_name(&self, dir: &Arc<Inode>, name: &[u8]) -> Result<()> {
        let Some(ino) = self.deleted_at(dir, name)? else {
            return Ok(());
        };
        if failpoints::is_on(Fault::DeletedNameNotFreed) {
            return Ok(());
        }
        let is_here = |inode: &Arc<Inode>| match &*inode.location.read() {
            Location::Deleted { parent, name: its } => Arc::ptr_eq(parent, dir) && its == name,
            _ => false,
        };
        let Some(inode) = self.namespace.table.get(ino).filter(is_here) else {
            return self.erase_deleted(dir, name, None);
        };
        let mut tx = Transaction::new(lock_states(&[&inode]));
        if inode.is_dir() {
            let mut topology = self.namespace.topology.write();
            let path = drop_deleted(&mut tx, &topology, dir, name)?;
            self.move_to_orphans(&mut tx, &inode, &path);
            delete_ranges(&mut tx.batch, &path);
            tx.apply(&topology, &self.namespace.tree)?;
            topology.generation += 1;
            return Ok(());
        }
        let topology = self.namespace.topology.read();
        let path = drop_deleted(&mut tx, &topology, dir, name)?;
        let record = tx.get(&inode).clone();
        move_contents(&mut tx, &record, &path, &keys::orphan(ino), None);
        tx.move_to(&inode, Location::Orphan);
        tx.apply(&topology, &self.namespace.tree)
    }

    /// Copies what lies at and below `path`, which is then erased or replaced, to the orphan area, unless nobody knows it. The
    /// topology is held for writing.
    pub(crate) fn move_to_orphans(
        &self,
        tx: &mut Transaction<'_>,
        inode: &Arc<Inode>,
        path: &[u8],
    ) {
        if !inode.is_dir() && !self.namespace.table.is_known(inode) {
            tx.move_to(inode, Location::Gone);
            return;
        }
        let orphan = keys::orphan(inode.ino);
        for index in [keys::META, keys::DATA] {
            tx.batch
                .clone_prefix(keys::range(index, path), keys::range(index, &orphan));
        }
        tx.move_to(inode, Location::Orphan);
    }

    /// The only name of `inode`, no directory, goes: `change` has its record, with no names. What it has is
    /// erased, or kept where it is or in the orphan area.
    pub(crate) fn defer_delete(
        &self,
        tx: &mut Transaction<'_>,
        inode: &Arc<Inode>,
        record: &Record,
        path: &Bytes,
        may_stay: bool,
    ) {
        if record.kind() != Kind::Regular || !self.namespace.table.is_known(inode) {
            erase(tx, record, path);
            tx.move_to(inode, Location::Gone);
            return;
        }
        match tx.location(inode) {
            Location::Child { parent, name }
                if may_stay && record.size_bytes <= IN_PLACE_BYTES_MAX =>
            {
                tx.move_to(inode, Location::Deleted { parent, name });
            }
            _ => {
                move_contents(tx, record, path, &keys::orphan(inode.ino), None);
                tx.move_to(inode, Location::Orphan);
            }
        }
    }

    /// Before a file of `size_bytes` is written: a deleted entry must not become large.
    pub(crate) fn orphan_if_large(&self, inode: &Arc<Inode>, size_bytes: u64) -> Result<()> {
        if size_bytes <= IN_PLACE_BYTES_MAX {
            return Ok(());
        }
        let location = inode.location.read().clone();
        let Location::Deleted { parent, name } = location else {
            return Ok(());
        };
        self.namespace.tree.admit(RECORDS_BYTES)?;
        let _names = parent.lock_names();
        self.free_name(&parent, &name)
    }
}

/// See [`Volume::reap_on_drop`].
pub(crate) struct ReapOnDrop<'a>(&'a DeferredDeletes);

impl Drop for ReapOnDrop<'_> {
    fn drop(&mut self) {
        self.0.reap();
    }
}

/// The entry of a deleted entry goes; the path of what lies there.
fn drop_deleted(
    tx: &mut Transaction<'_>,
    topology: &Topology,
    dir: &Arc<Inode>,
    name: &[u8],
) -> Result<Bytes> {
    let at = topology.kept_dir_path(dir)?;
    tx.batch.delete(keys::entry(&at.path, name));
    Ok(keys::child(&at.path, name))
}
