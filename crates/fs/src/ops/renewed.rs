//! Numbers of the objects of a snapshot after a rollback of the open volume.
//!
//! A rollback of an open volume makes a directory of another generation the root, and keeps the
//! tables of numbers of now. So all names that come back have other numbers, from the root on
//! downwards, as those of a clone have ([`ops/live_rollback.rs`](crate::ops::live_rollback)). Tables
//! that name objects by their numbers get the new ones in the same batch: records of forks, and
//! protections. Blocks of numbers are given to the directories on the way before, as for a fork
//! ([`next_identity`](crate::ops::fork_record::next_identity)). Until the batch the new root is among
//! the directories that are gone, so a crash leaves no block without an owner.

use std::collections::HashMap;

use bytes::Bytes;
use ramet_betree::{Batch, Snapshot, Tree, successor_of_prefix};

use crate::error::{Error, Result};
use crate::format::fork::{ForkRecord, is_fork_id};
use crate::format::ino::{Identity, Ino};
use crate::format::keys;
use crate::format::record::{Entry, Kind, Record};
use crate::format::slots::Slot;
use crate::namespace::number_tables::{Get, block_by, owner_by, pin_by};
use crate::namespace::numbers::{Numbers, block_of};
use crate::namespace::slot_index::name_in;
use crate::ops::fork_record::stored_fork;

/// Forks that a rollback renews at most, and protections. Each fork has its base cloned under the
/// locks.
const FORKS_MAX: usize = 1024;
const PROTECTIONS_MAX: usize = 4096;

/// A directory of the snapshot.
struct Dir {
    /// Its identity after the rollback.
    after: Identity,
    path: Bytes,
    has_index: bool,
}

/// From the numbers of a snapshot to those after a rollback to it.
pub(super) struct Renewal<'a> {
    then: &'a Snapshot,
    numbers: &'a Numbers,
    /// Directories that were found, by their identities of then.
    dirs: HashMap<Identity, Dir>,
}

/// A fork that the snapshot has.
pub(super) struct RenewedFork {
    /// The top of then, and of after the rollback.
    then: Identity,
    after: Identity,
    /// The record of then.
    record: ForkRecord,
    /// Origin after the rollback.
    origin: Identity,
    /// Id of the base after the rollback.
    base: u64,
}

/// The tables that a rollback renews.
#[derive(Default)]
pub(super) struct Renewed {
    pub(super) forks: Vec<RenewedFork>,
    /// Keys and values of the table of protections.
    pub(super) protections: Vec<(Bytes, Bytes)>,
}

impl<'a> Renewal<'a> {
    /// From the numbers of `then`, whose root has the record `root`, to those below the new root.
    pub(super) fn new(
        then: &'a Snapshot,
        numbers: &'a Numbers,
        (root, after): (&Record, Identity),
    ) -> Self {
        let dir = Dir {
            after,
            path: Bytes::new(),
            has_index: root.has_slot_index(),
        };
        Self {
            then,
            numbers,
            dirs: HashMap::from([(Identity::root(root.birth), dir)]),
        }
    }

    /// Directory and slot of a number, as the tables of then tell.
    fn place(&self, ino: Ino) -> Result<Option<(Identity, Slot)>> {
        let get: Get<'_> = &|key| self.then.get(key);
        if let Some(place) = pin_by(get, ino)? {
            return Ok(Some(place));
        }
        let Some((base, (home, run))) = owner_by(get, ino)? else {
            return Ok(None);
        };
        let block = block_by(get, home, run)?;
        let is_its = block.is_some_and(|block| block.base == base);
        Ok(is_its.then(|| (home, run.slot_of(base, ino))))
    }

    /// The directory with this identity of then, if names led to it.
    fn dir(&mut self, then: Identity) -> Result<Option<&Dir>> {
        let (mut at, mut steps) = (then, Vec::new());
        while !self.dirs.contains_key(&at) {
            // Entries of directories that are gone may lead to each other.
            let is_seen = steps.iter().any(|(seen, _, _)| *seen == at);
            let place = self.place(at.ino)?.filter(|_| !is_seen);
            let Some((home, slot)) = place else {
                return Ok(None);
            };
            steps.push((at, home, slot));
            at = home;
        }
        for (then, home, slot) in steps.into_iter().rev() {
            let Some(dir) = self.dir_in(then, (home, slot))? else {
                return Ok(None);
            };
            self.dirs.insert(then, dir);
        }
        Ok(self.dirs.get(&then))
    }

    /// The directory with this identity of then in a slot of a directory that was found.
    fn dir_in(&self, then: Identity, (home, slot): (Identity, Slot)) -> Result<Option<Dir>> {
        let Some(above) = self.dirs.get(&home).filter(|_| slot.link().is_none()) else {
            return Ok(None);
        };
        let at = (&above.path[..], above.has_index);
        let Some(name) = name_in(self.then, at, slot)? else {
            return Ok(None);
        };
        let entry = self.then.get(&keys::entry(&above.path, &name))?;
        let Some(Entry::Inode(record)) = entry.map(|e| Entry::decode(&e)).transpose()? else {
            return Ok(None);
        };
        if record.kind() != Kind::Directory || record.slot != slot {
            return Ok(None);
        }
        let shown = match record.pin.filter(|pin| pin.home == home) {
            Some(pin) => Some(pin.identity),
            None => {
                let block = block_by(&|key| self.then.get(key), home, slot.run())?;
                block.map(|block| block.identity(slot, record.birth))
            }
        };
        if shown != Some(then) {
            return Ok(None);
        }
        let block = block_of(self.numbers, above.after, slot.run())?;
        Ok(Some(Dir {
            after: block.identity(slot, record.birth),
            path: keys::child(&above.path, &name),
            has_index: record.has_slot_index(),
        }))
    }

    /// The number after the rollback of the object with this number of then.
    fn number(&mut self, ino: Ino) -> Result<Option<Ino>> {
        if ino == Identity::ROOT.ino {
            return Ok(Some(ino));
        }
        let Some((home, slot)) = self.place(ino)? else {
            return Ok(None);
        };
        let Some(home) = self.dir(home)?.map(|dir| dir.after) else {
            return Ok(None);
        };
        let block = block_of(self.numbers, home, slot.run())?;
        Ok(Some(block.identity(slot, 0).ino))
    }

    /// The tables after the rollback to the snapshot with this id.
    ///
    /// # Errors
    /// `TooBig` for too many forks or protections, `Corrupt`, and those of the tree.
    pub(super) fn tables(&mut self, tree: &Tree, id: u64) -> Result<Renewed> {
        let mut renewed = Renewed::default();
        for (top, record) in forks_of(tree, id)? {
            let Some(after) = self.dir(top)?.map(|dir| dir.after) else {
                continue;
            };
            let origin = self.dir(record.origin)?.map(|dir| dir.after);
            let base = self.numbers.generation()?;
            if !is_fork_id(base) {
                return Err(Error::TooManyLinks);
            }
            renewed.forks.push(RenewedFork {
                then: top,
                after,
                origin: origin.unwrap_or(record.origin),
                record,
                base,
            });
        }
        let all = keys::protections();
        let mut scan = self.then.scan(&all, successor_of_prefix(&all).as_deref());
        while scan.advance()? {
            let corrupt = || Error::Corrupt {
                what: "table of protected inodes",
                detail: format!("{:?}", scan.key()),
            };
            let (ino, is_count) = keys::parse_protection(scan.key()).ok_or_else(corrupt)?;
            let ino = self.number(ino)?.ok_or_else(corrupt)?;
            let key = match is_count {
                true => keys::protected_below(ino),
                false => keys::protection(ino),
            };
            renewed.protections.push((key, scan.value_bytes()));
            if renewed.protections.len() > PROTECTIONS_MAX {
                return Err(Error::TooBig);
            }
        }
        // A number is stored before a table has it.
        self.numbers.store_all()?;
        Ok(renewed)
    }
}

impl Renewed {
    /// Adds the tables to the batch of the rollback. The topology is held for writing, so no fork
    /// goes meanwhile. `made_at` is the id of the first snapshot that may have the new tops.
    pub(super) fn put(&self, batch: &mut Batch, tree: &Tree, made_at: u64) -> Result<()> {
        for fork in &self.forks {
            // A fork that was dropped since comes back as a directory.
            let is_there = |now: &ForkRecord| now.base == fork.record.base;
            if !stored_fork(tree, fork.then)?.as_ref().is_some_and(is_there) {
                continue;
            }
            if let Some(before) = fork.record.base.map(keys::fork_base) {
                let after = keys::fork_base(fork.base);
                for index in keys::INDEXES {
                    batch.clone_prefix(keys::range(index, &before), keys::range(index, &after));
                }
            }
            let record = ForkRecord {
                base: fork.record.base.map(|_| fork.base),
                made_at,
                gone_at: None,
                origin: fork.origin,
                ..fork.record.clone()
            };
            batch.put(keys::fork_record(fork.after), record.encode());
        }
        batch.delete_prefix(keys::protections());
        for (key, value) in &self.protections {
            batch.put(key.clone(), value.clone());
        }
        Ok(())
    }

    /// Bytes of the batch, at most.
    pub(super) fn bytes(&self) -> usize {
        /// The keys of a fork and the clones of its base, and those of a protection.
        const KEYS_BYTES: usize = 512;
        let forks = self.forks.iter().map(|fork| fork.record.encode().len());
        let count = self.forks.len() + self.protections.len();
        forks.sum::<usize>() + KEYS_BYTES * count
    }
}

/// The forks that the snapshot with this id may have.
///
/// # Errors
/// `TooBig` for too many of them, and those of the tree.
pub(super) fn forks_of(tree: &Tree, id: u64) -> Result<Vec<(Identity, ForkRecord)>> {
    let prefix = keys::fork_records();
    let mut scan = tree.scan(&prefix, successor_of_prefix(&prefix).as_deref());
    let mut forks = Vec::new();
    while scan.advance()? {
        let decoded = (
            keys::top_of_fork(scan.key()),
            ForkRecord::decode(&scan.value_bytes()),
        );
        // A record that is damaged is left alone, as by a list.
        if let (Some(top), Ok(record)) = decoded
            && record.made_at <= id
            && record.gone_at.is_none_or(|gone_at| id < gone_at)
        {
            forks.push((top, record));
            if forks.len() > FORKS_MAX {
                return Err(Error::TooBig);
            }
        }
    }
    Ok(forks)
}
