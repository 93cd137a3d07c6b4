//! Clones: one batch, independent of the size of the source.
//!
//! The range of the source in both indexes is cloned to the range of the destination, and replaces
//! everything there. The destination gets the record of the source with a slot of its directory. Its
//! number follows from that slot, and those of all names below from its number, so that every number
//! is new; none is given before it is shown. A directory becomes a clone root. A source
//! that is a clone root carries the shared inodes of its hard links in its range. Below any other
//! directory, link entries name shared inodes above it: `hard_links.rs` brings those along. A fork is
//! cloned to two places by one batch (`fork.rs`).

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::Seq;

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::name::check_new_name;
use crate::format::record::{FLAG_CLONE_ROOT, FLAG_PROTECTED, Record, Time};
use crate::format::slots::Slot;
use crate::namespace::inode::Inode;
use crate::namespace::invalidation::Invalidation;
use crate::namespace::link_counts::{self, count_links};
use crate::namespace::slot_index::indexing;
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{RECORDS_BYTES, Round, Transaction, lock_states};
use crate::ops::access::Caller;
use crate::ops::at::At;
use crate::ops::contents::copy_contents;
use crate::ops::fork_record::{Forking, Made, NewFork, prepare_identity};
use crate::ops::hard_links::{LinksBelow, Use, prepare_links};
use crate::ops::removal::Removal;
use crate::ops::staged::{Destination, StagedObject};
use crate::ops::trees::{Trees, Victim};

/// How a clone treats a destination that exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CloneMode {
    /// Refuse.
    #[default]
    New,
    /// Replace it whole: a directory by a directory, anything else by anything else.
    Replace,
    /// Replace this object in the same way. Where another object has the name, or none, the clone is
    /// `Stale`. The caller has a reference to the object by a lookup.
    ReplaceOnly(Ino),
}

impl CloneMode {
    /// Refuses the object that has the name of the destination, or the want of one.
    pub(super) fn may_meet(self, found: Option<&Inode>) -> Result<()> {
        match (self, found) {
            (Self::New, Some(_)) => Err(Error::Exists),
            (Self::ReplaceOnly(ino), found) if found.map(|found| found.ino) != Some(ino) => {
                Err(Error::Stale)
            }
            (Self::New | Self::Replace | Self::ReplaceOnly(_), _) => Ok(()),
        }
    }
}

/// The purpose of a clone.
#[derive(Clone, Copy)]
pub(crate) enum Purpose<'a> {
    /// It is a clone and no more. The object that waits for its name, if there is one, becomes it.
    Clone(CloneMode, Option<&'a StagedObject>),
    /// It is a fork of a directory, which replaces nothing.
    Fork(NewFork<'a>),
}

impl<'a> Purpose<'a> {
    fn mode(self) -> CloneMode {
        match self {
            Self::Clone(mode, _) => mode,
            Self::Fork(_) => CloneMode::New,
        }
    }

    fn staged(self) -> Option<&'a StagedObject> {
        match self {
            Self::Clone(_, staged) => staged,
            Self::Fork(_) => None,
        }
    }

    /// Journal bytes that the ranges may take.
    fn ranges_bytes(self) -> usize {
        match self {
            Self::Clone(..) => 8 * 4096,
            Self::Fork(_) => 10 * 4096,
        }
    }
}

/// A clone that may go on: the states of all inodes that it changes are locked.
pub(super) struct Plan<'a> {
    pub(super) source: &'a Arc<Inode>,
    pub(super) copy: Destination<'a>,
    pub(super) victim: Option<&'a Victim>,
    pub(super) links: Option<&'a LinksBelow>,
    /// Indexes that the ranges of trees may have keys in.
    pub(super) indexes: &'static [u8],
    pub(super) fork: Option<Forking>,
    /// The time of the clone.
    pub(super) now: Time,
}

impl Trees {
    /// Clones the file or directory tree `source` to `name` in `dir`; `mode` says how an entry
    /// there is treated. Atomic, durable with the next sync. The caller has a reference to `source`
    /// by a lookup.
    ///
    /// An entry that is another hard link of `source` becomes a file of its own.
    ///
    /// The caller must own the source or be privileged; needs write and search on `dir`; and to
    /// replace a directory must own that or be privileged. Whether it may reach the source and
    /// `dir` is checked where it names them: when it opens directories, and by
    /// [`Attributes::may_search`](crate::ops::attr::Attributes::may_search).
    ///
    /// # Errors
    /// `NotFound`, `Exists`, `IsDirectory` and `NotDirectory` when only one of `source` and the
    /// replaced entry is a directory, `SameFile` when that entry is the only name of `source`,
    /// `Access`, `NotPermitted`, `Stale`, and those of the tree.
    pub fn clone_entry(
        &self,
        caller: &Caller,
        source: Ino,
        dir: Ino,
        name: &[u8],
        mode: CloneMode,
    ) -> Result<Vec<Invalidation>> {
        self.copy_entry(caller, source, (dir, name), Purpose::Clone(mode, None))
    }

    /// The same with an object that waits for its name, and becomes the clone. It was staged for
    /// `dir` and for this source.
    ///
    /// # Errors
    /// Those of [`Trees::clone_entry`]; `Stale` when the object has a name already, or was staged
    /// for another directory.
    pub fn clone_staged(
        &self,
        caller: &Caller,
        (source, staged): (Ino, &StagedObject),
        (dir, name): (Ino, &[u8]),
        mode: CloneMode,
    ) -> Result<Vec<Invalidation>> {
        self.copy_entry(
            caller,
            source,
            (dir, name),
            Purpose::Clone(mode, Some(staged)),
        )
    }

    /// Makes a copy for any purpose.
    pub(super) fn copy_entry(
        &self,
        caller: &Caller,
        source: Ino,
        (dir, name): (Ino, &[u8]),
        purpose: Purpose<'_>,
    ) -> Result<Vec<Invalidation>> {
        check_new_name(dir, name)?;
        let _reaped = self.deletes.reap_on_drop();
        let (source, dir) = (self.namespace.inode(source)?, self.namespace.dir(dir)?);
        let at = At { dir: &dir, name };
        let ranges_bytes = purpose.ranges_bytes();
        self.namespace.tree.admit(RECORDS_BYTES + ranges_bytes)?;
        // Checked again under the locks. The check here keeps a caller without permission from
        // costing the tree work.
        caller.may_copy(&source.state.read())?;
        caller.may_change(&self.namespace, (&dir, &dir.state.read()))?;
        // The generation comes first: it may take a batch of its own, and a preparation may hold
        // until the next batch only.
        let staged = purpose.staged();
        let birth = match staged {
            Some(staged) => staged.birth(),
            None => self.numbers.generation()?,
        };
        let copy = Destination { at, birth, staged };
        if let Purpose::Fork(_) = purpose {
            if !source.is_dir() {
                return Err(Error::NotDirectory);
            }
            prepare_identity(&self.numbers, &dir)?;
        }
        self.namespace.prepare_clone(&source)?;
        self.prepare_victim(&dir, name)?;
        prepare_links(&self.namespace, &source, true)?;
        // The links of a file are counted under the locks. To read the names takes longer.
        link_counts::attr(&self.namespace, &source)?;
        let clone = |round| self.clone_now(caller, &source, copy, purpose, round);
        let ((stale, slot), shown) = indexing(&self.namespace, &[&dir], || {
            self.namespace.until_applied(clone)
        })?;
        self.namespace.took_slot(&dir, slot);
        shown.make_durable_telling(&self.namespace.caches, || &stale)?;
        Ok(stale)
    }

    /// Does the slow part of removing the links below an entry that is replaced.
    fn prepare_victim(&self, dir: &Arc<Inode>, name: &[u8]) -> Result<()> {
        let victim = {
            let _names = dir.names.read();
            self.namespace.find(dir, name)?
        };
        match victim {
            Some(victim) => prepare_links(&self.namespace, &victim, false),
            None => Ok(()),
        }
    }

    /// Makes the clone, if it has not to wait. Returns also the slot that it took.
    fn clone_now(
        &self,
        caller: &Caller,
        source: &Arc<Inode>,
        copy: Destination<'_>,
        purpose: Purpose<'_>,
        round: Round,
    ) -> Result<((Vec<Invalidation>, Slot), Seq)> {
        let (at, At { dir, name }) = (copy.at, copy.at);
        let _names = (dir.lock_names(), copy.lock_names());
        let found = self.namespace.find_slot(dir, name)?;
        let mode = purpose.mode();
        mode.may_meet(found.as_ref().map(|found| &*found.inode))?;
        match &found {
            Some(found) => may_take_the_place_of(source, &found.inode)?,
            None => self.deletes.free_name(dir, name)?,
        }
        let _links = self.namespace.links.write();
        count_links(&self.namespace, source)?;
        let links = LinksBelow::find(&self.namespace, source, Use::Cloned)?;
        let victim = found.map(|found| Victim::of(&self.namespace, found));
        let victim = victim.transpose()?;
        let mut inodes = vec![dir, source];
        inodes.extend(copy.staged_inode());
        inodes.extend(links.iter().flat_map(LinksBelow::inodes));
        if let Some(victim) = &victim {
            victim.add_inodes(&mut inodes);
        }
        let mut tx = Transaction::new(lock_states(&inodes));
        copy.may_be_named(source.kind)?;
        caller.may_change(&self.namespace, (dir, tx.get(dir)))?;
        check_caller(caller, &tx, source, at, victim.as_ref())?;
        match &victim {
            Some(victim) => self
                .namespace
                .protections
                .may_lose_tree(&tx, (dir, victim))?,
            None => self.namespace.protections.may_gain_names(&tx, dir)?,
        }
        let fork = match purpose {
            Purpose::Clone(..) => None,
            Purpose::Fork(new) => {
                let made = Made {
                    birth: copy.birth,
                    time: self.times.now(),
                    uid: caller.uid,
                };
                let from = (&*self.namespace.tree, &**source);
                let fork = Forking::plan(&self.numbers, from, (&tx, dir), (new, made));
                Some(fork?)
            }
        };
        let topology = self.namespace.topology.write();
        let mut plan = Plan {
            source,
            copy,
            victim: victim.as_ref(),
            links: links.as_ref(),
            indexes: self.namespace.unsettled.indexes(),
            fork,
            now: self.times.now(),
        };
        let slot = self.carry_out(&mut tx, &topology, &mut plan)?;
        let changed = (at, victim.as_ref());
        let (stale, seq) = self.apply_structure(tx, topology, changed, round)?;
        Ok(((stale, slot), seq))
    }

    /// Adds the clone to the transaction.
    pub(super) fn carry_out(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        plan: &mut Plan<'_>,
    ) -> Result<Slot> {
        let from = topology.path(plan.source).map_err(gone_is_not_found)?;
        let dir = topology.dir_path(plan.copy.at.dir);
        let dir = dir.map_err(gone_is_not_found)?;
        let to = keys::child(&dir.path, plan.copy.at.name);
        let now = plan.now;
        let removal = Removal {
            deletes: &self.deletes,
            topology,
            now,
            may_stay: false,
        };
        let replaces_tree = plan.victim.is_some_and(|victim| victim.inode.is_dir());
        // The source may be all around the destination, and is copied with the victim in it.
        let replaces_range = plan.source.is_dir() || replaces_tree;
        match plan.victim {
            Some(victim) if replaces_range => victim.keep(tx, &self.deletes, &to),
            Some(victim) => removal.name(tx, plan.copy.at, &victim.found())?,
            None => {}
        }
        let record = tx.get(plan.source).clone();
        // The base comes first: the source may be all around the destination.
        if let Some(base) = plan.fork.as_ref().and_then(Forking::base) {
            plan.clone_ranges(tx, topology, &from, &base)?;
        }
        if replaces_range {
            plan.clone_ranges(tx, topology, &from, &to)?;
            if let Some(victim) = plan.victim {
                victim.drop(tx, &removal, (plan.copy.at, &dir.path))?;
            }
        } else {
            copy_contents(tx, &record, &from, &to);
        }
        let record = plan.record(record, now);
        let slot = plan.copy.put(tx, &dir, record.clone())?;
        if let Some(fork) = plan.fork.take() {
            fork.put(&mut tx.batch, &from, record);
        }
        let parent = tx.edit(plan.copy.at.dir);
        (parent.mtime, parent.ctime) = (now, now);
        if plan.source.is_dir() {
            parent.nlink = parent.nlink.checked_add(1).ok_or(Error::TooManyLinks)?;
        }
        if replaces_tree {
            parent.nlink = parent.nlink.saturating_sub(1);
        }
        Ok(slot)
    }
}

impl Plan<'_> {
    /// The record of the copy, but for its place. `record` is the source's.
    fn record(&self, mut record: Record, now: Time) -> Record {
        record.ctime = now;
        record.flags &= !FLAG_PROTECTED;
        if self.source.is_dir() {
            record.flags |= FLAG_CLONE_ROOT;
        } else {
            record.nlink = 1;
        }
        record
    }

    /// Clones everything below `from` to `to`, with the shared inodes of the hard links below.
    fn clone_ranges(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        from: &Bytes,
        to: &Bytes,
    ) -> Result<()> {
        let staged = match self.links {
            Some(links) => Some(links.stage(tx, topology, self.source, to)?),
            None => None,
        };
        for index in self.indexes {
            let (lo, hi) = keys::tree_range(*index, from);
            let strip = u32::try_from(lo.len()).unwrap_or(u32::MAX);
            let to = keys::range(*index, to);
            tx.batch.clone_range(lo, hi, strip, to);
        }
        if let Some(staged) = staged {
            staged.put(tx, to);
        }
        Ok(())
    }
}

/// Refuses a clone of `source` in the place of `found` when only one of them is a directory.
fn may_take_the_place_of(source: &Inode, found: &Inode) -> Result<()> {
    // A directory has one name.
    if source.is_dir() && found.ino == source.ino {
        return Err(Error::SameFile);
    }
    are_of_one_kind(source.is_dir(), found.is_dir())
}

/// Refuses to put a directory in the place of another object, and the other way round.
pub(super) fn are_of_one_kind(source_is_dir: bool, found_is_dir: bool) -> Result<()> {
    match (source_is_dir, found_is_dir) {
        (true, false) => Err(Error::NotDirectory),
        (false, true) => Err(Error::IsDirectory),
        (true, true) | (false, false) => Ok(()),
    }
}

/// Refuses a clone that the caller may not make, and one of the only name of a file to itself.
fn check_caller(
    caller: &Caller,
    tx: &Transaction<'_>,
    source: &Arc<Inode>,
    at: At<'_>,
    victim: Option<&Victim>,
) -> Result<()> {
    caller.may_copy(tx.get(source))?;
    let Some(victim) = victim else { return Ok(()) };
    // The other links may have gone since.
    if victim.inode.ino == source.ino && tx.get(source).nlink < 2 {
        return Err(Error::SameFile);
    }
    caller.may_remove(tx.get(at.dir), tx.get(&victim.inode))
}
