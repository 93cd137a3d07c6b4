//! Objects that wait for their names.
//!
//! The kernel makes events for its own system calls only. So a clone that watchers of files shall
//! see comes by rename(2): the kernel knows an object before it has a name, and then moves it to the
//! name. The object is *staged* then. It has a slot of the directory that will name it, and so the
//! number and the generation that it keeps. It has no contents and no name, and nothing of it is in
//! the tree but the slot that is taken. The clone that names it is one batch, as any other.
//!
//! A staged object shows the attributes of the source, with the caller as its owner and all rights
//! of an owner: the kernel moves a directory to another parent only for a caller that may write it.

use std::sync::Arc;

use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::record::{FLAG_CLONE_ROOT, FLAG_PROTECTED, Kind, Record};
use crate::format::slots::Slot;
use crate::namespace::attr::Attr;
use crate::namespace::inode::{Adopted, DirPath, Inode, Location, LockedNames, Table};
use crate::namespace::known_blocks::Showing;
use crate::namespace::link_counts;
use crate::namespace::numbers::Numbers;
use crate::namespace::slot_index::indexing;
use crate::namespace::transaction::{RECORDS_BYTES, Transaction, lock_states};
use crate::ops::access::Caller;
use crate::ops::at::At;
use crate::ops::hard_links::prepare_links;
use crate::ops::snapshots::Snapshots;
use crate::ops::then::{Then, names_of};
use crate::ops::trees::Trees;

/// All rights of an owner.
const OWNER_MAY: u32 = 0o700;

/// An object that waits for its name.
pub struct StagedObject {
    pub(super) inode: Arc<Inode>,
    dir: Arc<Inode>,
    slot: Slot,
    birth: u64,
    table: Arc<Table>,
    numbers: Arc<Numbers>,
}

impl Drop for StagedObject {
    fn drop(&mut self) {
        if matches!(*self.inode.location.read(), Location::Gone) {
            // No name holds the number, and no other one gets the slot.
            self.dir.lose(self.slot);
        }
    }
}

impl StagedObject {
    /// The number that it has, and keeps.
    #[must_use]
    pub fn ino(&self) -> Ino {
        self.inode.ino
    }

    /// Its attributes. The call counts as a lookup.
    #[must_use]
    pub fn look_up(&self) -> Attr {
        self.table.remember(&self.inode);
        self.attr()
    }

    /// Its attributes. They show the links that it will have at least: an object without any would
    /// be gone.
    #[must_use]
    pub fn attr(&self) -> Attr {
        let mut attr = self.inode.attr();
        attr.nlink = if self.inode.is_dir() { 2 } else { 1 };
        attr
    }

    /// Generation of the copy.
    pub(super) fn birth(&self) -> u64 {
        self.birth
    }

    /// Refuses a name in another directory than the one that it was staged for, a second name, and
    /// to become a copy of another kind. The caller has the state of the directory locked until the
    /// name is there.
    fn may_be_named(&self, dir: &Arc<Inode>, kind: Kind) -> Result<()> {
        let waits = matches!(*self.inode.location.read(), Location::Gone);
        if !waits || self.inode.kind != kind || !Arc::ptr_eq(&self.dir, dir) {
            return Err(Error::Stale);
        }
        // The inode in memory holds the number until its slot does.
        self.numbers.show(dir, Showing::one(self.slot))?;
        Ok(())
    }
}

/// The name that a copy gets.
#[derive(Clone, Copy)]
pub(super) struct Destination<'a> {
    pub(super) at: At<'a>,
    /// Generation when the copy is made.
    pub(super) birth: u64,
    /// The object that becomes the copy, if the kernel knows it already.
    pub(super) staged: Option<&'a StagedObject>,
}

impl<'a> Destination<'a> {
    /// Locks the entries of a staged directory.
    pub(super) fn lock_names(&self) -> Option<LockedNames<'a>> {
        self.staged.map(|staged| staged.inode.lock_names())
    }

    /// The inode of a staged object.
    pub(super) fn staged_inode(&self) -> Option<&'a Arc<Inode>> {
        self.staged.map(|staged| &staged.inode)
    }

    /// Refuses a staged object that cannot get this name, as a copy of this kind.
    pub(super) fn may_be_named(&self, kind: Kind) -> Result<()> {
        self.staged
            .map_or(Ok(()), |staged| staged.may_be_named(self.at.dir, kind))
    }

    /// Puts the entry of the copy into the directory at `dir`. `record` is the copy's but for its
    /// place. Returns the slot that it took.
    pub(super) fn put(
        &self,
        tx: &mut Transaction<'_>,
        dir: &DirPath,
        mut record: Record,
    ) -> Result<Slot> {
        let slot = match self.staged {
            Some(staged) => staged.slot,
            None => tx.take_slot(self.at.dir)?,
        };
        (record.slot, record.birth, record.pin) = (slot, self.birth, None);
        record.counted = 0;
        tx.put_slot((self.at.dir, &dir.path), slot, self.at.name);
        match self.staged {
            Some(staged) => {
                *tx.edit(&staged.inode) = record;
                tx.move_to(&staged.inode, self.at.location());
            }
            None => {
                let entry = keys::entry(&dir.path, self.at.name);
                tx.batch.put(entry, record.encode());
            }
        }
        Ok(slot)
    }
}

impl Trees {
    /// Stages a copy of `source` for `dir`. Does the slow part of the clone, as far as it can come
    /// before: the caller that names the object may hold locks.
    ///
    /// # Errors
    /// `NotFound`, `Access`, `NotPermitted`, and those of the tree.
    pub fn stage_clone(&self, caller: &Caller, source: Ino, dir: Ino) -> Result<StagedObject> {
        let source = self.namespace.inode(source)?;
        let record = source.state.read().clone();
        caller.may_copy(&record)?;
        let staged = self.stage(caller, dir, record)?;
        self.namespace.prepare_clone(&source)?;
        prepare_links(&self.namespace, &source, true)?;
        link_counts::attr(&self.namespace, &source)?;
        Ok(staged)
    }

    /// Does the slow part of a removal of this object, as far as it can come before.
    ///
    /// # Errors
    /// Those of the tree.
    pub fn prepare_removal(&self, victim: Ino) -> Result<()> {
        let victim = self.namespace.inode(victim)?;
        prepare_links(&self.namespace, &victim, false)?;
        link_counts::attr(&self.namespace, &victim)?;
        Ok(())
    }

    /// Stages a copy of the object that `path` leads to in a snapshot, as [`Trees::restore`] finds
    /// it.
    ///
    /// # Errors
    /// Those of [`Trees::stage_clone`].
    pub fn stage_restored(
        &self,
        caller: &Caller,
        (snapshots, snapshot, path): (&Snapshots, &str, &[u8]),
        dir: Ino,
    ) -> Result<StagedObject> {
        let names = names_of(path)?;
        let (_viewed, base) = snapshots.view(snapshot)?;
        let tree = ramet_betree::window(&self.namespace.tree, base).snapshot();
        let then = Then::find(&tree, &names)?.ok_or(Error::NotFound)?;
        self.stage(caller, dir, then.record)
    }

    fn stage(&self, caller: &Caller, dir: Ino, record: Record) -> Result<StagedObject> {
        let dir = self.namespace.dir(dir)?;
        indexing(&self.namespace, &[&dir], || {
            self.stage_in(caller, Arc::clone(&dir), record.clone())
        })
    }

    fn stage_in(
        &self,
        caller: &Caller,
        dir: Arc<Inode>,
        mut record: Record,
    ) -> Result<StagedObject> {
        self.namespace.tree.admit(RECORDS_BYTES)?;
        let birth = self.numbers.generation()?;
        let mut tx = Transaction::new(lock_states(&[&dir]));
        caller.may_change(&self.namespace, (&dir, tx.get(&dir)))?;
        self.namespace.protections.may_gain_names(&tx, &dir)?;
        let slot = tx.take_slot(&dir)?;
        (record.slot, record.birth, record.pin) = (slot, birth, None);
        (record.uid, record.gid) = (caller.uid, caller.gid);
        record.mode = record.mode & !0o7777 | OWNER_MAY;
        record.flags &= !FLAG_PROTECTED;
        let identity = self.numbers.identity(&dir, &record)?;
        let topology = self.namespace.topology.read();
        let at = topology.dir_path(&dir).map_err(gone_is_not_found)?;
        if failpoints::is_on(Fault::StagedNameKept) {
            let entry = keys::entry(&at.path, b"staged");
            tx.batch.put(entry, record.encode());
        }
        let table = &self.namespace.table;
        let kind = Kind::from_mode(record.mode);
        let kind = kind.expect("the decoder checked the mode");
        if kind == Kind::Directory {
            record.flags |= FLAG_CLONE_ROOT;
        }
        let inode = Inode::new(table, identity, kind, record, Location::Gone);
        if !matches!(table.adopt(&inode, None), Adopted::New { .. }) {
            return Err(Error::Stale);
        }
        let shown = tx.apply(&topology, &self.namespace.tree)?;
        drop(topology);
        self.namespace.took_slot(&dir, slot);
        shown.make_durable()?;
        Ok(StagedObject {
            inode,
            dir,
            slot,
            birth,
            table: Arc::clone(table),
            numbers: Arc::clone(&self.numbers),
        })
    }
}
