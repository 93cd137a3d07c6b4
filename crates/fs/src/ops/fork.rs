//! Forks: clones of directories that know their origin, and the state that they began with.
//!
//! A fork is a clone (`clone.rs`), a *record*, and as a rule a *base*: a second clone of the source
//! to a key range of its own, outside of the root's range, in which the source is the root. Nothing
//! changes a base, and no name and no clone leads to it. All three are one batch. So is a removal
//! with base and record, and a reset, which puts a clone of the base in the place of the fork.
//!
//! The key of the record has the identity of the top of the fork. Renames keep that, so none of
//! them touches the record. A reset makes another top, with a record and a base of its own: a
//! snapshot of the volume may have the top before, and a rollback would bring that back. A fork
//! that was removed in another way than by [`Trees::drop_fork`] leaves its record and base behind,
//! and so does a reset: `forks.rs` collects them.

use std::sync::Arc;
use std::time::Duration;

use ramet_betree::window;

use crate::error::{Error, Result};
use crate::format::fork::check_note;
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::name::{check_name, check_new_name};
use crate::namespace::inode::Inode;
use crate::namespace::invalidation::Invalidation;
use crate::namespace::transaction::RECORDS_BYTES;
use crate::ops::access::Caller;
use crate::ops::at::At;
use crate::ops::clone::{CloneMode, Purpose};
use crate::ops::fork_record::{NO_FORK, NewFork, first_with, stored_fork};
use crate::ops::restore::{Source, Successor};
use crate::ops::staged::Destination;
use crate::ops::trees::{Removed, Trees};

impl Trees {
    /// Clones the directory `source` to `name` in `dir`, as [`Trees::clone_entry`] does where
    /// nothing is replaced, and remembers where it came from. Atomic, durable with the next sync.
    ///
    /// # Errors
    /// Those of [`Trees::clone_entry`]; `NotDirectory` for any other source; `NameTooLong` and
    /// `Invalid` for the note.
    pub fn fork(
        &self,
        caller: &Caller,
        source: Ino,
        (dir, name): (Ino, &[u8]),
        new: NewFork<'_>,
    ) -> Result<Vec<Invalidation>> {
        check_note(new.note)?;
        self.copy_entry(caller, source, (dir, name), Purpose::Fork(new))
    }

    /// Removes the fork `name` in `dir`, which has the number `top`, as [`Trees::remove_tree`]
    /// does, with base and record. Atomic, durable with the next sync.
    ///
    /// # Errors
    /// Those of [`Trees::remove_tree`]; `Stale` when another object has the name, `Invalid` for an
    /// object that is no fork.
    pub fn drop_fork(
        &self,
        caller: &Caller,
        (dir, name): (Ino, &[u8]),
        top: Ino,
    ) -> Result<Vec<Invalidation>> {
        self.remove(caller, (dir, name), Removed::Fork(top))
    }

    /// Puts a clone of the base of the fork `name` in `dir`, which has the number `number`, in the
    /// place of the fork. It is the same fork, with a clone of the base. Atomic, durable with the
    /// next sync.
    ///
    /// # Errors
    /// Those of [`Trees::clone_entry`] where it replaces a directory, with the top of the base as the
    /// source; `Invalid` for an object that is no fork, `NoAttribute` for a fork without a base,
    /// `Stale` when another object has the name.
    pub fn reset_fork(
        &self,
        caller: &Caller,
        (dir, name): (Ino, &[u8]),
        number: Ino,
    ) -> Result<Vec<Invalidation>> {
        check_name(name)?;
        let dir = self.namespace.dir(dir)?;
        let at = At { dir: &dir, name };
        let top = {
            let _names = dir.names.read();
            self.namespace.find(&dir, name)?.ok_or(Error::NotFound)?
        };
        if top.ino != number {
            return Err(Error::Stale);
        }
        let tree = &self.namespace.tree;
        let fork = stored_fork(tree, top.identity())?.ok_or(NO_FORK)?;
        let base = keys::fork_base(fork.base.ok_or(Error::NoAttribute)?);
        let source = Source::find(&window(tree, base.clone()).snapshot(), base, &[]);
        // The fork and its base were dropped meanwhile.
        let source = source.map_err(|error| match error {
            Error::Corrupt { .. }
                if stored_fork(tree, top.identity()).is_ok_and(|f| f.is_none()) =>
            {
                Error::Stale
            }
            error => error,
        })?;
        tree.admit(RECORDS_BYTES + 10 * 4096)?;
        let successor = Successor {
            before: top.identity(),
            fork,
            made_at: first_with(tree)?,
        };
        self.put_successor(caller, &source, at, &successor)
    }

    /// Clones the base of the fork with the top `top` to `name` in `dir`, where nothing is replaced.
    /// The clone is no fork. Atomic, durable with the next sync.
    ///
    /// # Errors
    /// Those of [`Trees::clone_entry`] for the tops of the fork and of its base; `Invalid` for an
    /// object that is no fork, `NoAttribute` for a fork without a base.
    pub(crate) fn copy_base(
        &self,
        caller: &Caller,
        top: &Arc<Inode>,
        (dir, name): (Ino, &[u8]),
    ) -> Result<Vec<Invalidation>> {
        check_new_name(dir, name)?;
        let dir = self.namespace.dir(dir)?;
        caller.may_copy(&top.state.read())?;
        let tree = &self.namespace.tree;
        let record = stored_fork(tree, top.identity())?.ok_or(NO_FORK)?;
        let base = keys::fork_base(record.base.ok_or(Error::NoAttribute)?);
        let source = Source::find(&window(tree, base.clone()).snapshot(), base, &[])?;
        source.may_be_copied(caller)?;
        tree.admit(RECORDS_BYTES + 8 * 4096)?;
        let copy = Destination {
            at: At { dir: &dir, name },
            birth: self.numbers.generation()?,
            staged: None,
        };
        self.put_copy(caller, &source, copy, (CloneMode::New, None))
    }
}

/// Whether `name` in `dir` leads to no object, and a fork of that name was dropped in the time
/// before now that is `within`. The last 4,096 drops are known, until the volume is closed.
///
/// # Errors
/// `NotDirectory`, `NotFound`, and those of the tree.
pub fn was_dropped(trees: &Trees, (dir, name): (Ino, &[u8]), within: Duration) -> Result<bool> {
    let inode = trees.namespace.dir(dir)?;
    let _names = inode.names.read();
    let is_there = trees.namespace.find(&inode, name)?.is_some();
    Ok(!is_there && trees.dropped.has((dir, name), within))
}
