//! Inodes by number: handles of files.
//!
//! A program may hold a number and a generation, and ask for the file after the kernel forgot it, or
//! in another mount. The tables of numbers lead from the number to a directory and a slot, and the
//! slot to a name; the directory is found in the same way, up to one that is in memory. The caller
//! compares generations: a number may belong to another inode by now.

use std::collections::HashSet;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::ino::{Identity, Ino};
use crate::format::keys;
use crate::format::slots::Slot;
use crate::namespace::attr::Attr;
use crate::namespace::inode::Inode;
use crate::ops::names::Names;

/// A number with its directory and its slot.
type Step = (Ino, (Identity, Slot));

impl Names {
    /// Finds the object that has this number, also if the caller has no reference to it. The call
    /// counts as a lookup.
    ///
    /// # Errors
    /// `Stale` when no object with a name has it, and those of the tree.
    pub fn lookup_number(&self, ino: Ino) -> Result<Attr> {
        let inode = self.find_number(ino)?;
        // An object that is referenced keeps its contents as long as its state is held.
        let record = inode.state.read();
        if inode.is_nameless() {
            return Err(Error::Stale);
        }
        self.namespace.table.remember(&inode);
        drop(record);
        Ok(inode.attr())
    }

    fn find_number(&self, ino: Ino) -> Result<Arc<Inode>> {
        let (mut inode, mut steps) = self.steps_to(ino)?;
        while let Some((ino, place)) = steps.pop() {
            inode = self.step_down(&inode, place).map_err(gone_is_stale)?;
            if inode.ino != ino {
                return Err(Error::Stale);
            }
        }
        Ok(inode)
    }

    /// The steps from an inode in memory to the one with this number, the last one first.
    fn steps_to(&self, ino: Ino) -> Result<(Arc<Inode>, Vec<Step>)> {
        let (mut at, mut steps) = (ino, Vec::new());
        // Entries of directories that are gone may lead to each other.
        let mut seen = HashSet::new();
        loop {
            match self.namespace.inode(at) {
                Err(Error::Stale) => {}
                found => return Ok((found?, steps)),
            }
            let place = self.numbers.place(at)?.ok_or(Error::Stale)?;
            if !seen.insert(at) {
                return Err(Error::Stale);
            }
            steps.push((at, place));
            at = place.0.ino;
        }
    }

    /// The inode in a slot of a directory.
    fn step_down(
        &self,
        dir: &Arc<Inode>,
        (identity, slot): (Identity, Slot),
    ) -> Result<Arc<Inode>> {
        if dir.identity() != identity || !dir.is_dir() {
            return Err(Error::Stale);
        }
        let _names = dir.names.read();
        let view = self.namespace.view(dir)?;
        if let Some(link) = slot.link() {
            let key = keys::shared_record(&keys::shared_inode(&view.dir.path, link));
            if !dir.clone_root || view.snapshot.get(&key)?.is_none() {
                return Err(Error::Stale);
            }
            return self.namespace.shared_inode(&view, link, dir);
        }
        let name = view.snapshot.get(&keys::slot(&view.dir.path, slot))?;
        let name = name.ok_or(Error::Stale)?;
        self.namespace.find(dir, &name)?.ok_or(Error::Stale)
    }
}

fn gone_is_stale(error: Error) -> Error {
    match error {
        Error::NotFound => Error::Stale,
        other => other,
    }
}
