//! Restoring: clones out of a snapshot of the volume, or out of the base of a fork.
//!
//! The source is a file or a tree in a snapshot, or the top of a base. Nothing changes either, so
//! that no lock is needed for it. All else is as with a clone within the live tree (`clone.rs`): one batch, a name with a
//! new slot, and numbers that follow from it. Hard links below a directory that is no clone root
//! are always handled as a whole (`hard_links.rs`).

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Batch, Seq, Snapshot, successor_of_prefix, window};

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::fork::ForkRecord;
use crate::format::ino::{Identity, Ino};
use crate::format::keys;
use crate::format::name::check_new_name;
use crate::format::note::Note;
use crate::format::record::{FLAG_CLONE_ROOT, FLAG_PROTECTED, FLAG_XATTRS, Kind, Record};
use crate::format::slots::Slot;
use crate::namespace::inode::{DirPath, Inode};
use crate::namespace::invalidation::Invalidation;
use crate::namespace::slot_index::indexing;
use crate::namespace::transaction::{RECORDS_BYTES, Round, Transaction, lock_states};
use crate::ops::access::Caller;
use crate::ops::at::At;
use crate::ops::clone::{CloneMode, are_of_one_kind};
use crate::ops::fork_record::{next_identity, prepare_identity};
use crate::ops::removal::Removal;
use crate::ops::snapshots::Snapshots;
use crate::ops::staged::{Destination, StagedObject};
use crate::ops::then::{Then, names_of};
use crate::ops::trees::{Trees, Victim};

/// A file or a tree in a snapshot, or the top of the base of a fork.
pub(super) struct Source {
    then: Then,
    /// The bytes that keys of the snapshot have behind the index.
    base: Bytes,
    /// Hard links with names below it have their shared inodes above.
    has_links: bool,
    /// Clone roots in it have notes.
    has_notes: bool,
}

impl Source {
    pub(super) fn find(tree: &Snapshot, base: Bytes, names: &[&[u8]]) -> Result<Self> {
        let then = Then::find(tree, names)?.ok_or(Error::NotFound)?;
        let has_any = |prefix: Bytes| -> Result<bool> {
            let mut scan = tree.scan(&prefix, successor_of_prefix(&prefix).as_deref());
            Ok(scan.advance()?)
        };
        let is_dir = then.record.kind() == Kind::Directory;
        // Names below it are in several indexes, in which shared inodes may have equal numbers.
        if is_dir && then.roots.all().len() > 1 {
            return Err(Error::Tree(ramet_betree::Error::NoSpace));
        }
        let root = then.roots.innermost();
        Ok(Self {
            has_links: is_dir
                && root != &then.path
                && has_any(keys::links_below(root, &then.path))?,
            has_notes: is_dir && has_any(keys::range(keys::NOTES, &then.path))?,
            then,
            base,
        })
    }

    fn is_dir(&self) -> bool {
        self.then.record.kind() == Kind::Directory
    }

    /// Refuses a caller that may not copy the top as it was then. The top of today may have another
    /// owner, to whom the owner of then gave it with everything below, and not with its past.
    pub(super) fn may_be_copied(&self, caller: &Caller) -> Result<()> {
        caller.may_copy(&self.then.record)
    }

    /// Clones a prefix of the keys of the snapshot to `to`.
    fn clone_prefix(&self, batch: &mut Batch, from: &Bytes, to: Bytes) {
        let from = [&from[..1], &self.base, &from[1..]].concat();
        batch.clone_prefix(from, to);
    }

    /// Clones the keys that an object with this record has beside it.
    fn clone_contents(&self, batch: &mut Batch, record: &Record, from: &[u8], to: &[u8]) {
        let mut indexes = Vec::new();
        if record.has(FLAG_XATTRS) {
            indexes.push(keys::META);
        }
        if record.kind() == Kind::Regular && record.size_bytes > 0 {
            indexes.push(keys::DATA);
        }
        for index in indexes {
            self.clone_prefix(batch, &keys::range(index, from), keys::range(index, to));
        }
    }

    /// Clones everything below the directory to `to`, with the shared inodes of the hard links
    /// below it. A note with this number says that they are not counted.
    fn clone_tree(&self, batch: &mut Batch, to: &Bytes, (indexes, note): (&[u8], u64)) {
        let then = &self.then;
        for index in indexes {
            let from = keys::range(*index, &then.path);
            self.clone_prefix(batch, &from, keys::range(*index, to));
        }
        if then.path.is_empty() {
            for tag in keys::VOLUME_TAGS {
                for index in [keys::META, keys::DATA] {
                    batch.delete_prefix(keys::tagged(index, to, tag));
                }
            }
        }
        if !self.has_links {
            return;
        }
        let root = then.roots.innermost();
        for index in [keys::META, keys::DATA] {
            let from = keys::shared_inodes(index, root);
            self.clone_prefix(batch, &from, keys::shared_inodes(index, to));
        }
        let below = keys::links_below(root, &then.path);
        self.clone_prefix(batch, &below, keys::links_below(to, to));
        batch.put(keys::note(to, note), Note::Uncounted.encode());
    }
}

/// The fork that a clone of its base replaces, and becomes.
pub(super) struct Successor {
    /// The top that is replaced.
    pub(super) before: Identity,
    /// Its record.
    pub(super) fork: ForkRecord,
    /// Id of the first snapshot that may have the new top.
    pub(super) made_at: u64,
}

impl Successor {
    /// Puts a record and a base of the new top. Those of the top before stay: a snapshot may have
    /// that. `base` is the id of the new base.
    fn put(&self, batch: &mut Batch, top: Identity, base: u64) {
        if let Some(before) = self.fork.base.map(keys::fork_base) {
            let after = keys::fork_base(base);
            for index in keys::INDEXES {
                batch.clone_prefix(keys::range(index, &before), keys::range(index, &after));
            }
        }
        let record = ForkRecord {
            base: self.fork.base.map(|_| base),
            made_at: self.made_at,
            gone_at: None,
            ..self.fork.clone()
        };
        batch.put(keys::fork_record(top), record.encode());
    }
}

impl Trees {
    /// Clones the file or tree that `path`, names joined by `/`, leads to in a snapshot to `name`
    /// in `dir`; `mode` says how an entry there is treated. Atomic, durable with the next sync.
    /// Symbolic links on the way are not followed.
    ///
    /// The caller needs write and search on `dir`, and to replace a directory must own that or be
    /// privileged. The caller of this function checks whether it may read the snapshot.
    ///
    /// # Errors
    /// Those of [`Trees::clone_entry`]; `NotFound` also when there is no such snapshot or object.
    pub fn restore(
        &self,
        caller: &Caller,
        (snapshots, snapshot, path): (&Snapshots, &str, &[u8]),
        (dir, name): (Ino, &[u8]),
        mode: CloneMode,
    ) -> Result<Vec<Invalidation>> {
        let source = (snapshots, snapshot, path);
        self.restore_to(caller, source, (dir, name), mode, None)
    }

    /// The same with an object that waits for its name, and becomes the clone. It was staged for
    /// `dir` and for this source.
    ///
    /// # Errors
    /// Those of [`Trees::restore`]; `Stale` when the object has a name already, or was staged for
    /// another directory.
    pub fn restore_staged(
        &self,
        caller: &Caller,
        (source, staged): ((&Snapshots, &str, &[u8]), &StagedObject),
        (dir, name): (Ino, &[u8]),
        mode: CloneMode,
    ) -> Result<Vec<Invalidation>> {
        self.restore_to(caller, source, (dir, name), mode, Some(staged))
    }

    fn restore_to(
        &self,
        caller: &Caller,
        (snapshots, snapshot, path): (&Snapshots, &str, &[u8]),
        (dir, name): (Ino, &[u8]),
        mode: CloneMode,
        staged: Option<&StagedObject>,
    ) -> Result<Vec<Invalidation>> {
        check_new_name(dir, name)?;
        let names = names_of(path)?;
        let _reaped = self.deletes.reap_on_drop();
        let (_viewed, base) = snapshots.view(snapshot)?;
        let tree = window(&self.namespace.tree, base.clone()).snapshot();
        let source = Source::find(&tree, base, &names)?;
        let dir = self.namespace.dir(dir)?;
        let at = At { dir: &dir, name };
        self.namespace.tree.admit(RECORDS_BYTES + 8 * 4096)?;
        let birth = match staged {
            Some(staged) => staged.birth(),
            None => self.numbers.generation()?,
        };
        let copy = Destination { at, birth, staged };
        self.put_copy(caller, &source, copy, (mode, None))
    }

    /// Clones the base `source` to the name of the fork that it is of, which becomes `successor`.
    ///
    /// # Errors
    /// `NotPermitted` also for a caller that may not copy the top of the base.
    pub(super) fn put_successor(
        &self,
        caller: &Caller,
        source: &Source,
        at: At<'_>,
        successor: &Successor,
    ) -> Result<Vec<Invalidation>> {
        source.may_be_copied(caller)?;
        let _reaped = self.deletes.reap_on_drop();
        let copy = Destination {
            at,
            birth: self.numbers.generation()?,
            staged: None,
        };
        prepare_identity(&self.numbers, at.dir)?;
        let mode = CloneMode::ReplaceOnly(successor.before.ino);
        self.put_copy(caller, source, copy, (mode, Some(successor)))
    }

    pub(super) fn put_copy(
        &self,
        caller: &Caller,
        source: &Source,
        copy: Destination<'_>,
        how: (CloneMode, Option<&Successor>),
    ) -> Result<Vec<Invalidation>> {
        let dir = copy.at.dir;
        let restore = |round| self.restore_now(caller, source, copy, how, round);
        let ((stale, slot), shown) = indexing(&self.namespace, &[dir], || {
            self.namespace.until_applied(restore)
        })?;
        self.namespace.took_slot(dir, slot);
        shown.make_durable_telling(&self.namespace.caches, || &stale)?;
        Ok(stale)
    }

    /// Makes the clone, if it has not to wait. Returns also the slot that it took.
    fn restore_now(
        &self,
        caller: &Caller,
        source: &Source,
        copy: Destination<'_>,
        (mode, successor): (CloneMode, Option<&Successor>),
        round: Round,
    ) -> Result<((Vec<Invalidation>, Slot), Seq)> {
        let (at, At { dir, name }) = (copy.at, copy.at);
        let _names = (dir.lock_names(), copy.lock_names());
        let found = self.namespace.find_slot(dir, name)?;
        mode.may_meet(found.as_ref().map(|found| &*found.inode))?;
        let is_there = |top| found.as_ref().is_some_and(|f| f.inode.identity() == top);
        if successor.is_some_and(|successor| !is_there(successor.before)) {
            return Err(Error::Stale);
        }
        match &found {
            Some(found) => are_of_one_kind(source.is_dir(), found.inode.is_dir())?,
            None => self.deletes.free_name(dir, name)?,
        }
        let _links = self.namespace.links.write();
        // Later than all notes of the clone root, as the links are held for writing.
        let note = self.numbers.generation()?;
        if source.has_links || source.has_notes {
            self.namespace.unsettled.expect_note();
        }
        let victim = found.map(|found| Victim::of(&self.namespace, found));
        let victim = victim.transpose()?;
        let mut inodes = vec![dir];
        inodes.extend(copy.staged_inode());
        if let Some(victim) = &victim {
            victim.add_inodes(&mut inodes);
        }
        let mut tx = Transaction::new(lock_states(&inodes));
        copy.may_be_named(source.then.record.kind())?;
        self.may_put(caller, &tx, dir, victim.as_ref())?;
        if let Some(successor) = successor {
            let top = next_identity(&self.numbers, (dir, tx.get(dir)), copy.birth)?;
            successor.put(&mut tx.batch, top, copy.birth);
        }
        let topology = self.namespace.topology.write();
        let dir_path = topology.dir_path(dir).map_err(gone_is_not_found)?;
        let removal = Removal {
            deletes: &self.deletes,
            topology: &topology,
            now: self.times.now(),
            may_stay: false,
        };
        let restored = Restored {
            source,
            copy,
            note,
            indexes: self.namespace.unsettled.indexes(),
        };
        let slot = restored.put(&mut tx, (&dir_path, &removal), victim.as_ref())?;
        let changed = (at, victim.as_ref());
        let (stale, seq) = self.apply_structure(tx, topology, changed, round)?;
        Ok(((stale, slot), seq))
    }
}

impl Trees {
    /// Refuses a caller that may not put an entry into `dir`, in the place of `victim`.
    fn may_put(
        &self,
        caller: &Caller,
        tx: &Transaction<'_>,
        dir: &Arc<Inode>,
        victim: Option<&Victim>,
    ) -> Result<()> {
        let protections = &self.namespace.protections;
        caller.may_change(&self.namespace, (dir, tx.get(dir)))?;
        let Some(victim) = victim else {
            return protections.may_gain_names(tx, dir);
        };
        caller.may_remove(tx.get(dir), tx.get(&victim.inode))?;
        protections.may_lose_tree(tx, (dir, victim))
    }
}

/// A clone of a source, to be made.
struct Restored<'a> {
    source: &'a Source,
    copy: Destination<'a>,
    /// Number of its note.
    note: u64,
    /// Indexes that trees have keys in.
    indexes: &'a [u8],
}

impl Restored<'_> {
    /// Adds the clone to the transaction. Returns the slot that it takes.
    fn put(
        &self,
        tx: &mut Transaction<'_>,
        (dir, removal): (&DirPath, &Removal<'_>),
        victim: Option<&Victim>,
    ) -> Result<Slot> {
        let (source, at) = (self.source, self.copy.at);
        let to = keys::child(&dir.path, at.name);
        match victim {
            Some(victim) if source.is_dir() => victim.keep(tx, removal.deletes, &to),
            Some(victim) => removal.name(tx, at, &victim.found())?,
            None => {}
        }
        let mut record = source.then.record.clone();
        if source.is_dir() {
            source.clone_tree(&mut tx.batch, &to, (self.indexes, self.note));
            if let Some(victim) = victim {
                victim.drop(tx, removal, (at, &dir.path))?;
            }
            record.flags |= FLAG_CLONE_ROOT;
        } else {
            let from = &source.then.path;
            source.clone_contents(&mut tx.batch, &record, from, &to);
            record.nlink = 1;
        }
        record.ctime = removal.now;
        record.flags &= !FLAG_PROTECTED;
        let slot = self.copy.put(tx, dir, record)?;
        let parent = tx.edit(at.dir);
        (parent.mtime, parent.ctime) = (removal.now, removal.now);
        if source.is_dir() && victim.is_none() {
            parent.nlink = parent.nlink.checked_add(1).ok_or(Error::TooManyLinks)?;
        }
        Ok(slot)
    }
}
