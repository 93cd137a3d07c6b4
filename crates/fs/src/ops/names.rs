//! Names of single objects.
//!
//! [`Names`] looks names up, and adds, removes and moves them one at a time: `create.rs`,
//! `link.rs`, `unlink.rs` and `rename.rs` have its operations. Operations on whole trees are in
//! `trees.rs`.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::name::check_name;
use crate::namespace::attr::Attr;
use crate::namespace::inode::{Inode, LockedNames};
use crate::namespace::link_counts;
use crate::namespace::numbers::Numbers;
use crate::namespace::resolve::{Found, Namespace, look_up, past_rollbacks_in};
use crate::namespace::transaction::lock_names;
use crate::ops::at::At;
use crate::ops::deferred_delete::DeferredDeletes;
use crate::ops::join::Joins;
use crate::ops::settle::Settling;
use crate::ops::times::Times;

/// The names of single objects.
pub struct Names {
    pub(super) namespace: Arc<Namespace>,
    pub(super) numbers: Arc<Numbers>,
    pub(super) times: Arc<Times>,
    pub(super) deletes: Arc<DeferredDeletes>,
    pub(crate) joins: Joins,
}

impl Names {
    pub(crate) fn new(
        namespace: &Arc<Namespace>,
        numbers: &Arc<Numbers>,
        (times, settling): (&Arc<Times>, &Arc<Settling>),
        deletes: &Arc<DeferredDeletes>,
    ) -> Self {
        Self {
            namespace: Arc::clone(namespace),
            numbers: Arc::clone(numbers),
            times: Arc::clone(times),
            deletes: Arc::clone(deletes),
            joins: Joins::new(namespace, numbers, settling),
        }
    }

    /// Finds the object that `name` in a directory leads to; `.` and `..` are names too. The caller
    /// may use its number until [`Volume::forget`](crate::Volume::forget) gives the reference back.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, and those of the tree.
    pub fn lookup(&self, dir: Ino, name: &[u8]) -> Result<Attr> {
        if name == b"." {
            // The kernel asks so for the object of a handle, which may be of any kind.
            return self.lookup_number(dir);
        }
        if name == b".." {
            let found = self.namespace.parent(&self.namespace.dir(dir)?);
            self.namespace.table.remember(&found);
            return Ok(found.attr());
        }
        check_name(name)?;
        past_rollbacks_in(&self.namespace, &[dir], || {
            let dir = self.namespace.dir(dir)?;
            let _names = dir.names.read();
            let found = look_up(&self.namespace, &dir, name)?.ok_or(Error::NotFound)?;
            // Under the lock, as long as the name cannot be removed.
            let attr = link_counts::attr(&self.namespace, &found)?;
            self.namespace.table.remember(&found);
            Ok(attr)
        })
    }

    /// Runs `op` with the names of `dirs` locked. `name` in `dir`, one of them, may lead to another
    /// directory: the names of that one are locked too.
    ///
    /// Locks are taken in the order of numbers, so the name may lead to another inode by the time
    /// all of them are held. Then the lookup is repeated, as often as others replace the entry.
    pub(crate) fn with_victim<R>(
        &self,
        dirs: &[&Arc<Inode>],
        at: At<'_>,
        op: impl FnOnce(Option<&Found>, &mut [LockedNames<'_>]) -> Result<R>,
    ) -> Result<R> {
        loop {
            let expected = {
                let _names = at.dir.names.read();
                self.namespace.find(at.dir, at.name)?
            };
            let mut locked = dirs.to_vec();
            locked.extend(expected.iter().filter(|victim| victim.is_dir()));
            let mut names = lock_names(&locked);
            let found = self.namespace.find_slot(at.dir, at.name)?;
            let ino = found.as_ref().map(|found| found.inode.ino);
            if ino == expected.as_ref().map(|inode| inode.ino) {
                return op(found.as_ref(), &mut names);
            }
        }
    }
}
