//! Records of forks within transactions: how they come and go with the trees that they are of
//! (`fork.rs`).

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Batch, Tree};

use crate::error::{Error, Result};
use crate::format::fork::{ForkRecord, ORIGIN_PATH_BYTES_MAX, is_fork_id};
use crate::format::ino::Identity;
use crate::format::keys::{self, SNAPSHOT_IDS_MAX};
use crate::format::record::{Record, Time};
use crate::format::slots::{SLOTS_MAX, Slot};
use crate::format::snapshot::SnapshotCounts;
use crate::namespace::inode::Inode;
use crate::namespace::known_blocks::Showing;
use crate::namespace::numbers::Numbers;
use crate::namespace::transaction::Transaction;

/// A fork to be made.
#[derive(Clone, Copy, Debug, Default)]
pub struct NewFork<'a> {
    /// Text of the user: up to 255 bytes without control characters.
    pub note: &'a str,
    /// Keep the state that the fork begins with.
    pub has_base: bool,
}

/// The error for an object that is no fork.
pub(super) const NO_FORK: Error = Error::Invalid("the object is no fork");

/// The record of the fork with this top.
pub(crate) fn stored_fork(tree: &Tree, top: Identity) -> Result<Option<ForkRecord>> {
    let value = tree.get(&keys::fork_record(top))?;
    value.map(|value| ForkRecord::decode(&value)).transpose()
}

/// Deletes the base and the record of the fork with this top.
pub(super) fn delete_fork(batch: &mut Batch, top: Identity, record: &ForkRecord) {
    if let Some(base) = record.base {
        let base = keys::fork_base(base);
        for index in keys::INDEXES {
            batch.delete_prefix(keys::range(index, &base));
        }
    }
    batch.delete(keys::fork_record(top));
}

/// The id that the next snapshot of the volume gets. Of damaged counts, it is larger than any.
pub(super) fn next_snapshot(tree: &Tree) -> Result<u64> {
    match SnapshotCounts::decode(tree.get(&keys::snapshot_counts())?.as_ref()) {
        Err(Error::Corrupt { .. }) => Ok(SNAPSHOT_IDS_MAX),
        counts => Ok(counts?.next_id),
    }
}

/// The id of the first snapshot that may have a top that is about to be made.
pub(super) fn first_with(tree: &Tree) -> Result<u64> {
    match next_snapshot(tree)? {
        SNAPSHOT_IDS_MAX => Ok(0),
        next => Ok(next),
    }
}

/// The identity of the next name in a directory whose state is locked. It is stored, so that it
/// stays.
///
/// # Errors
/// `SlotIndexMissing` when the directory has to have an index first, `NoSpace` when the identity
/// cannot be stored, and those of the tree.
pub(super) fn next_identity(
    numbers: &Numbers,
    (dir, record): (&Inode, &Record),
    birth: u64,
) -> Result<Identity> {
    if record.is_being_indexed() {
        return Err(Error::SlotIndexMissing);
    }
    if record.next_slot >= SLOTS_MAX {
        return Err(Error::TooManyLinks);
    }
    let slot = Slot(record.next_slot);
    let block = numbers.show(dir, Showing::one(slot))?;
    numbers.store_all()?;
    Ok(block.identity(slot, birth))
}

/// Does the slow part of [`next_identity`] before an operation takes its locks.
pub(super) fn prepare_identity(numbers: &Numbers, dir: &Inode) -> Result<()> {
    let record = dir.state.read().clone();
    match next_identity(numbers, (dir, &record), 0) {
        Ok(_) | Err(Error::SlotIndexMissing) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The circumstances in which a fork is made.
pub(super) struct Made {
    /// Generation of the birth.
    pub(super) birth: u64,
    pub(super) time: Time,
    pub(super) uid: u32,
}

/// The part of a clone that makes it a fork.
pub(super) struct Forking {
    /// The new top.
    top: Identity,
    record: ForkRecord,
}

impl Forking {
    /// The part of a clone of `source` to the next slot of `dir`, whose state is locked, that makes
    /// it the fork `new`. The clone is born with the generation `birth`.
    ///
    /// # Errors
    /// Those of [`next_identity`], and `Corrupt`.
    pub(super) fn plan(
        numbers: &Numbers,
        (tree, source): (&Tree, &Inode),
        (tx, dir): (&Transaction<'_>, &Arc<Inode>),
        (new, made): (NewFork<'_>, Made),
    ) -> Result<Self> {
        if !is_fork_id(made.birth) {
            return Err(Error::TooManyLinks);
        }
        let origin_fork = stored_fork(tree, source.identity())?;
        let record = ForkRecord {
            id: made.birth,
            base: new.has_base.then_some(made.birth),
            made_at: first_with(tree)?,
            gone_at: None,
            origin: source.identity(),
            origin_fork: origin_fork.map(|fork| fork.id),
            origin_path: Bytes::new(),
            time: made.time,
            uid: made.uid,
            note: new.note.to_owned(),
        };
        Ok(Self {
            top: next_identity(numbers, (dir, tx.get(dir)), made.birth)?,
            record,
        })
    }

    /// The path of the base, if there will be one.
    pub(super) fn base(&self) -> Option<Bytes> {
        self.record.base.map(keys::fork_base)
    }

    /// Puts the record of the fork of the directory at `from`, and that of the top of the base,
    /// which is the one of the fork but for its place. `top` is that record.
    pub(super) fn put(mut self, batch: &mut Batch, from: &[u8], mut top: Record) {
        if let Some(base) = self.base() {
            // As the root, the top has no place in a directory.
            (top.slot, top.birth, top.pin, top.counted) = (Slot(0), self.record.id, None, 0);
            batch.put(keys::fork_base_root(&base), top.encode());
        }
        let names: Vec<_> = keys::names_between(b"", from).collect();
        let path = names.join(&b'/');
        if path.len() <= ORIGIN_PATH_BYTES_MAX {
            self.record.origin_path = path.into();
        }
        batch.put(keys::fork_record(self.top), self.record.encode());
    }
}
