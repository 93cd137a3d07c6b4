//! Deferred deletes: contents outlive their names.
//!
//! The daemon is not told when a file is opened and closed: each open and close would be a request
//! of the kernel. So an object may be open as long as the caller has a reference to it (by a lookup
//! without a forget), and its contents stay until the last reference is gone. The kernel forgets an
//! object that no process has open as soon as its name is gone.
//!
//! - A small file that is unlinked stays at its path, and its entry becomes a *deleted entry*: the
//!   name does not exist any more, and the keys below it are still taken. That costs one key more
//!   than erasing the file at once. An empty directory with deleted entries inside becomes a
//!   deleted entry too.
//! - A larger file, a file that is replaced, and a tree that is removed or replaced move to the
//!   orphan area. Files of such a tree go on, and nothing else can be found in it.
//!
//! Contents of both kinds are queued when their inode leaves the memory (`Inode::leave`), and
//! reaped at once, or by a later sync if that fails. After a crash, orphans are erased when the
//! volume is opened. Deleted entries, which are small, are erased when a reader lists their
//! directory, when their name is used again, or with their directory. A clone of a directory copies
//! its deleted entries, which no reference leads to.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::{Batch, successor_of_prefix};
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result};
use crate::format::keys::{self, Orphan};
use crate::format::record::{DeletedEntry, Entry, Kind, Record};
use crate::format::slots::Slot;
use crate::namespace::inode::{Deferred, Inode, Location, Reach};
use crate::namespace::number_marks::pay_notes;
use crate::namespace::resolve::{Namespace, pay_looks};
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{RECORDS_BYTES, Transaction, lock_states};
use crate::ops::contents::{delete_ranges, erase, move_contents};

/// Largest file, in bytes, that becomes a deleted entry: opening a volume after a crash does not
/// look for deleted entries.
pub(crate) const IN_PLACE_BYTES_MAX: u64 = 1 << 20;
/// Steps of the reclaim of numbers that go with a removal, and with a sync.
const STEPS: usize = 2;
const STEPS_OF_SYNC: usize = 64;
/// Orphans that cannot be read have smaller numbers than this one: each mount counts from one, from
/// the last one that it found, or from here on.
const UNREADABLE_END: Orphan = Orphan(1 << 62);
/// After this many failures the other deletes wait: the volume may be out of order.
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

    /// The indexes that the range of a tree may have keys in.
    pub(crate) fn indexes(&self) -> &'static [u8] {
        self.namespace.unsettled.indexes()
    }

    /// Erases the orphan area: files that were unlinked while open when the volume was last in use.
    /// On a volume without room for that, they stay until there is room: new orphans have other
    /// numbers.
    pub(crate) fn erase_orphans(&self) -> Result<()> {
        match self.erase_orphans_before(None) {
            Err(Error::Tree(ramet_betree::Error::NoSpace)) => {
                let end = match self.end_of_orphans(Orphan(0)) {
                    Err(Error::Tree(error)) if error.is_of_a_read() => {
                        self.end_of_orphans(UNREADABLE_END)?
                    }
                    end => end?,
                };
                self.namespace.numbers.begin_orphans_at(end);
                self.failed.lock().push(Deferred::OrphansBefore(end));
                Ok(())
            }
            erased => erased,
        }
    }

    /// Erases the orphans with numbers before that of `end`, or all.
    fn erase_orphans_before(&self, end: Option<Orphan>) -> Result<()> {
        let tree = &self.namespace.tree;
        for index in [keys::META, keys::DATA] {
            let orphans = keys::orphans(index);
            let end = match end {
                Some(end) => Some(keys::range(index, &keys::orphan(end))),
                None => successor_of_prefix(&orphans),
            };
            let first = tree.scan(&orphans, end.as_deref()).next();
            // Orphans that cannot be read are erased unread.
            if first.is_some() {
                let mut batch = Batch::new();
                batch.delete_range(orphans, end);
                tree.admit(RECORDS_BYTES)?;
                tree.apply(batch)?;
            }
        }
        Ok(())
    }

    /// The number behind those of all orphans, `from` at least.
    fn end_of_orphans(&self, from: Orphan) -> Result<Orphan> {
        let mut end = from;
        for index in [keys::META, keys::DATA] {
            let all = successor_of_prefix(&keys::orphans(index));
            let first = keys::range(index, &keys::orphan(end));
            let mut scan = self.namespace.tree.scan(&first, all.as_deref());
            while scan.advance()? {
                let found = keys::orphan_of(scan.key()).ok_or_else(|| Error::Corrupt {
                    what: "orphan",
                    detail: format!("key {:?} has no number", scan.key()),
                })?;
                end = end.max(Orphan(found.0.saturating_add(1)));
                let above = keys::range(index, &keys::orphan(end));
                scan = self.namespace.tree.scan(&above, all.as_deref());
            }
        }
        Ok(end)
    }

    /// Drops all deletes that wait, with the inodes that they hold.
    pub(crate) fn clear(&self) {
        self.failed.lock().clear();
        while !self.namespace.table.take_deferred().is_empty() {}
    }

    /// Erases those of these deleted entries in `dir`, by name, that have no inode in memory: they
    /// are older than the mount, or came with a clone. Does nothing on a volume that is read-only.
    pub(crate) fn note_unknown(&self, dir: &Arc<Inode>, deleted: Vec<(Bytes, DeletedEntry)>) {
        if self.is_read_only {
            return;
        }
        for (name, entry) in deleted {
            let Ok(found) = self.inode_of(dir, &entry) else {
                continue;
            };
            if found.is_none() {
                self.namespace.table.enqueue(Deferred::Entry {
                    parent: Arc::clone(dir),
                    name,
                    slot: entry.slot,
                    record: None,
                });
            }
        }
    }

    /// Erases the contents in the queue. A delete that fails waits for
    /// [`DeferredDeletes::reap_all`], so that not every forget tries it again.
    pub(crate) fn reap(&self) {
        self.reclaim_numbers(STEPS, false);
        let mut failures = 0;
        while failures < FAILURES_MAX {
            let all = self.namespace.table.take_deferred();
            if all.is_empty() {
                return;
            }
            // A directory that a deleted entry kept in memory leaves it, and numbers wait for that.
            self.namespace.numbers.note_forgotten();
            for deferred in all {
                if failures == FAILURES_MAX {
                    self.namespace.table.enqueue(deferred);
                } else if let Err(error) = self.erase_deferred(&deferred) {
                    tracing::debug!(%error, "space of something removed comes back later");
                    failures += 1;
                    // An entry without a record is found again by the next reader of its directory.
                    if !matches!(deferred, Deferred::Entry { record: None, .. }) {
                        self.failed.lock().push(deferred);
                    }
                }
            }
        }
    }

    /// Gives back numbers of removed names.
    fn reclaim_numbers(&self, steps: usize, is_sync: bool) {
        if self.is_read_only {
            return;
        }
        pay_looks(&self.namespace, steps);
        let numbers = &self.namespace.numbers;
        let reclaimed = numbers.reclaim(steps);
        if let Err(error) = reclaimed.and_then(|_| pay_notes(&self.namespace, steps, is_sync)) {
            tracing::debug!(%error, "numbers of something removed come back later");
        }
    }

    /// As [`DeferredDeletes::reap`], and tries the deletes again that failed before.
    pub(crate) fn reap_all(&self) {
        let failed = std::mem::take(&mut *self.failed.lock());
        failed
            .into_iter()
            .for_each(|deferred| self.namespace.table.enqueue(deferred));
        self.reap();
        self.reclaim_numbers(STEPS_OF_SYNC, true);
    }

    /// Reaps when the result is dropped. An operation calls it before it takes a lock.
    pub(crate) fn reap_on_drop(&self) -> ReapOnDrop<'_> {
        ReapOnDrop(self)
    }

    /// Erases these orphans, which no inode in memory has. Those that it cannot erase now are erased
    /// later.
    pub(crate) fn erase_unused(&self, mut orphans: Vec<Orphan>) {
        const RUNS_OF_BATCH: usize = 32;
        orphans.sort_unstable();
        let runs: Vec<&[Orphan]> = orphans.chunk_by(|a, b| a.0 + 1 == b.0).collect();
        for runs in runs.chunks(RUNS_OF_BATCH) {
            let mut batch = Batch::new();
            for run in runs {
                let (first, last) = (run[0], run[run.len() - 1]);
                for index in [keys::META, keys::DATA] {
                    let end = successor_of_prefix(&keys::range(index, &keys::orphan(last)));
                    batch.delete_range(keys::range(index, &keys::orphan(first)), end);
                }
            }
            let tree = &self.namespace.tree;
            let erased = tree.admit(RECORDS_BYTES).and_then(|()| tree.apply(batch));
            if let Err(error) = erased {
                tracing::debug!(%error, "space of something staged comes back later");
                let all = runs.iter().copied().flatten();
                let mut failed = self.failed.lock();
                failed.extend(all.map(|orphan| Deferred::Orphan(*orphan)));
            }
        }
    }

    fn erase_deferred(&self, deferred: &Deferred) -> Result<()> {
        self.namespace.tree.admit(RECORDS_BYTES)?;
        match deferred {
            Deferred::Orphan(orphan) => {
                let mut batch = Batch::new();
                let indexes = [keys::META, keys::DATA];
                delete_ranges(&mut batch, &keys::orphan(*orphan), &indexes);
                self.namespace.tree.apply(batch)?;
                Ok(())
            }
            Deferred::OrphansBefore(end) => self.erase_orphans_before(Some(*end)),
            Deferred::Entry {
                parent,
                name,
                slot,
                record,
            } => {
                let mut names = parent.lock_names();
                // The name may have another deleted entry by now, or none.
                let found = self.deleted_at(parent, name)?;
                let is_there = found.is_some_and(|found| found.slot == *slot);
                if is_there {
                    self.erase_deleted(parent, (name, *slot), record.as_deref())?;
                }
                names.took_deleted(is_there);
                Ok(())
            }
        }
    }

    /// The inode in memory of a deleted entry in `dir`.
    fn inode_of(&self, dir: &Arc<Inode>, deleted: &DeletedEntry) -> Result<Option<Arc<Inode>>> {
        let numbers = &self.namespace.numbers;
        let ino = numbers.known(dir, deleted.slot, deleted.pin)?;
        Ok(ino.and_then(|ino| self.namespace.table.get(ino)))
    }

    /// The deleted entry at a name, if there is one. The caller holds the names of the directory.
    fn deleted_at(&self, dir: &Arc<Inode>, name: &[u8]) -> Result<Option<DeletedEntry>> {
        let lookup = {
            let topology = self.namespace.topology.read();
            let at = match topology.kept_dir_path(dir) {
                Ok(at) if at.reach != Reach::Orphan => at,
                // They are erased with the directory.
                Ok(_) | Err(Error::Stale) => return Ok(None),
                Err(other) => return Err(other),
            };
            self.namespace
                .tree
                .lookup_deferred(keys::entry(&at.path, name))
        };
        match lookup.get()?.as_ref().map(Entry::decode).transpose()? {
            Some(Entry::Deleted(deleted)) => Ok(Some(deleted)),
            Some(Entry::Inode(_) | Entry::Link(_)) | None => Ok(None),
        }
    }

    /// Erases a deleted entry without an inode in memory; `record` is that of its object, if it is
    /// known. The caller holds the names of the directory.
    fn erase_deleted(
        &self,
        dir: &Arc<Inode>,
        at: (&[u8], Slot),
        record: Option<&Record>,
    ) -> Result<()> {
        let at = (at.0, at.1, dir.state.read().may_be_indexed());
        let mut tx = Transaction::new(lock_states(&[]));
        let topology = self.namespace.topology.read();
        let path = drop_deleted(&mut tx, &topology, dir, at)?;
        match record {
            Some(record) if record.kind() == Kind::Regular => {
                erase(&mut tx, record, &path);
            }
            _ => delete_ranges(&mut tx.batch, &path, self.namespace.unsettled.indexes()),
        }
        tx.apply(&topology, &self.namespace.tree)?.make_durable()
    }

    /// Frees the keys at and below a name that does not exist, if a deleted entry takes them. The
    /// caller holds the names of the directory for writing, and no state.
    pub(crate) fn free_name(&self, dir: &Arc<Inode>, name: &[u8]) -> Result<()> {
        let Some(deleted) = self.deleted_at(dir, name)? else {
            return Ok(());
        };
        let at = (name, deleted.slot, dir.state.read().may_be_indexed());
        if failpoints::is_on(Fault::DeletedNameNotFreed) {
            return Ok(());
        }
        let is_here = |inode: &Arc<Inode>| match &*inode.location.read() {
            Location::Deleted { parent, name: its } => Arc::ptr_eq(parent, dir) && its == name,
            _ => false,
        };
        let Some(inode) = self.inode_of(dir, &deleted)?.filter(is_here) else {
            return self.erase_deleted(dir, (name, deleted.slot), None);
        };
        let mut tx = Transaction::new(lock_states(&[&inode]));
        if inode.is_dir() {
            let mut topology = self.namespace.topology.write();
            let path = drop_deleted(&mut tx, &topology, dir, at)?;
            self.move_to_orphans(&mut tx, &inode, &path);
            delete_ranges(&mut tx.batch, &path, self.namespace.unsettled.indexes());
            let shown = tx.apply(&topology, &self.namespace.tree)?;
            topology.generation += 1;
            return shown.make_durable();
        }
        let topology = self.namespace.topology.read();
        let path = drop_deleted(&mut tx, &topology, dir, at)?;
        let record = tx.get(&inode).clone();
        let orphan = self.namespace.numbers.new_orphan();
        move_contents(&mut tx, &record, &path, &keys::orphan(orphan), None);
        tx.move_to(&inode, Location::Orphan(orphan));
        tx.apply(&topology, &self.namespace.tree)?.make_durable()
    }

    /// Copies everything at and below `path`, which is then erased or replaced, to the orphan area,
    /// unless the kernel has no reference to it. The topology is held for writing.
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
        let orphan = tx.new_orphan(inode, &self.namespace.numbers);
        let to = keys::orphan(orphan);
        for index in [keys::META, keys::DATA] {
            tx.batch
                .clone_prefix(keys::range(index, path), keys::range(index, &to));
        }
        tx.move_to(inode, Location::Orphan(orphan));
    }

    /// Handles the contents of `inode`, no directory, whose last name goes. `record` is its record
    /// in `tx`. The contents are erased, stay at their path, or move to the orphan area.
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
                let orphan = tx.new_orphan(inode, &self.namespace.numbers);
                move_contents(tx, record, path, &keys::orphan(orphan), None);
                tx.move_to(inode, Location::Orphan(orphan));
            }
        }
    }

    /// Moves a file that is a deleted entry to the orphan area before a write makes it `size_bytes`
    /// long, if that is too large for one.
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

/// See [`DeferredDeletes::reap_on_drop`].
pub(crate) struct ReapOnDrop<'a>(&'a DeferredDeletes);

impl Drop for ReapOnDrop<'_> {
    fn drop(&mut self) {
        self.0.reap();
    }
}

/// Deletes a deleted entry, and gives the path of its contents. `is_indexed` tells whether the slot
/// index of its directory may have a key for it.
fn drop_deleted(
    tx: &mut Transaction<'_>,
    topology: &Topology,
    dir: &Arc<Inode>,
    (name, slot, is_indexed): (&[u8], Slot, bool),
) -> Result<Bytes> {
    let at = topology.kept_dir_path(dir)?;
    tx.batch.delete(keys::entry(&at.path, name));
    if is_indexed {
        tx.batch.delete(keys::slot(&at.path, slot));
    }
    Ok(keys::child(&at.path, name))
}
