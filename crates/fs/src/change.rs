//! One change: the batch, the records it rewrites, and what becomes of the inodes in memory.
//!
//! An operation locks the states of the inodes it changes ([`lock_states`]), edits copies of their
//! records, and adds its own keys to the batch. [`Change::apply`] adds the records at the end, where
//! the inodes then lie, and only after the tree took the batch do the copies replace the records:
//! a change that fails leaves nothing behind.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::RwLockWriteGuard;
use ramet_betree::{Batch, Tree};

use crate::error::Result;
use crate::inode::{Inode, Loc};
use crate::place::Topology;
use crate::record::Record;

/// The states of several inodes, locked for writing.
pub(crate) struct States<'a> {
    locked: Vec<(&'a Arc<Inode>, RwLockWriteGuard<'a, Record>)>,
}

/// Locks the states of these inodes, each once, in the order of their numbers.
pub(crate) fn lock_states<'a>(inodes: &[&'a Arc<Inode>]) -> States<'a> {
    let mut sorted = inodes.to_vec();
    sorted.sort_unstable_by_key(|inode| inode.ino);
    sorted.dedup_by_key(|inode| inode.ino);
    States {
        locked: sorted
            .into_iter()
            .map(|inode| (inode, inode.state.write()))
            .collect(),
    }
}

/// Locks the entries of these directories for writing, each once, in the order of their numbers.
pub(crate) fn lock_names<'a>(dirs: &[&'a Arc<Inode>]) -> Vec<RwLockWriteGuard<'a, ()>> {
    let mut sorted = dirs.to_vec();
    sorted.sort_unstable_by_key(|inode| inode.ino);
    sorted.dedup_by_key(|inode| inode.ino);
    sorted
        .into_iter()
        .map(|inode| inode.names.write())
        .collect()
}

/// A change in the making.
pub(crate) struct Change<'a> {
    pub(crate) batch: Batch,
    states: States<'a>,
    edited: Vec<(Arc<Inode>, Record)>,
    moved: Vec<(Arc<Inode>, Loc)>,
}

impl<'a> Change<'a> {
    pub(crate) fn new(states: States<'a>) -> Self {
        Self {
            batch: Batch::new(),
            states,
            edited: Vec::new(),
            moved: Vec::new(),
        }
    }

    /// The record of an inode whose state is locked, as this change leaves it.
    pub(crate) fn get(&self, inode: &Arc<Inode>) -> &Record {
        if let Some((_, record)) = self
            .edited
            .iter()
            .find(|(edited, _)| edited.ino == inode.ino)
        {
            return record;
        }
        let locked = self
            .states
            .locked
            .iter()
            .find(|(locked, _)| locked.ino == inode.ino);
        &locked
            .expect("the operation locked the state of every inode it changes")
            .1
    }

    /// The same, to be edited; it is written with the change.
    pub(crate) fn edit(&mut self, inode: &Arc<Inode>) -> &mut Record {
        let at = self
            .edited
            .iter()
            .position(|(edited, _)| edited.ino == inode.ino);
        let at = at.unwrap_or_else(|| {
            let record = self.get(inode).clone();
            self.edited.push((Arc::clone(inode), record));
            self.edited.len() - 1
        });
        &mut self.edited[at].1
    }

    /// Where an inode lies after this change.
    pub(crate) fn loc(&self, inode: &Arc<Inode>) -> Loc {
        match self
            .moved
            .iter()
            .rev()
            .find(|(moved, _)| moved.ino == inode.ino)
        {
            Some((_, loc)) => loc.clone(),
            None => inode.loc.read().clone(),
        }
    }

    /// Says where an inode lies after this change. Its state is locked, or the topology is held for
    /// writing.
    pub(crate) fn move_to(&mut self, inode: &Arc<Inode>, loc: Loc) {
        self.moved.push((Arc::clone(inode), loc));
    }

    /// Hands the change to the tree and then shows it in memory.
    ///
    /// # Errors
    /// Those of the tree; nothing is changed then.
    pub(crate) fn apply(mut self, topology: &Topology, tree: &Tree) -> Result<()> {
        for (inode, record) in &self.edited {
            if let Some((key, acc)) = topology.record_at(&self.loc(inode))? {
                self.batch.put(key, record.encode(inode.ino.0 ^ acc));
            }
        }
        if !self.batch.is_empty() {
            tree.apply(self.batch)?;
        }
        for (inode, record) in self.edited {
            inode.touched.store(true, Ordering::SeqCst);
            inode.salt.store(record.salt, Ordering::SeqCst);
            if let Some((_, state)) = self
                .states
                .locked
                .iter_mut()
                .find(|(locked, _)| locked.ino == inode.ino)
            {
                **state = record;
            }
        }
        for (inode, loc) in self.moved {
            inode.touched.store(true, Ordering::SeqCst);
            let before = std::mem::replace(&mut *inode.loc.write(), loc);
            // Dropped only now: it may hold the last reference to a directory.
            drop(before);
            *inode.place.lock() = None;
        }
        Ok(())
    }
}
