//! From an inode to its keys.
//!
//! Paths change when directories move, so whoever computes keys does it with the topology held, and
//! submits the batch, or takes the snapshot to read from, before letting go. A directory's path
//! is cached with the generation of the topology; moving or replacing a directory starts a new one.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::inode::{Inode, Loc, Place};
use crate::keys;

/// Proof that the topology is held.
pub(crate) struct Topology {
    /// Counts the changes that move or remove directories with something inside.
    pub(crate) generation: u64,
}

impl Topology {
    /// Path and acc of a directory.
    ///
    /// # Errors
    /// `Stale` when it, or a directory above it, was removed.
    pub(crate) fn place(&self, dir: &Arc<Inode>) -> Result<Place> {
        let mut chain: Vec<(Arc<Inode>, Bytes)> = Vec::new();
        let mut at = Arc::clone(dir);
        let mut place = loop {
            if let Some((generation, place)) = &*at.place.lock()
                && *generation == self.generation
            {
                break place.clone();
            }
            let loc = at.loc.read().clone();
            match loc {
                Loc::Root => {
                    break Place {
                        path: Bytes::new(),
                        acc: 0,
                    };
                }
                Loc::Child { parent, name } => {
                    chain.push((std::mem::replace(&mut at, parent), name))
                }
                Loc::Body { .. } | Loc::Orphan | Loc::Gone => return Err(Error::Stale),
            }
        };
        while let Some((inode, name)) = chain.pop() {
            let path = keys::child(&place.path, &name);
            place = Place {
                path,
                acc: place.acc ^ inode.salt.load(Ordering::SeqCst),
            };
            *inode.place.lock() = Some((self.generation, place.clone()));
            // An empty directory is removed without a new generation: it clears its own cache after
            // saying that it is gone.
            if matches!(*inode.loc.read(), Loc::Gone) {
                *inode.place.lock() = None;
                return Err(Error::Stale);
            }
        }
        Ok(place)
    }

    /// `P` of any inode.
    ///
    /// # Errors
    /// `Stale` when it has no contents any more.
    pub(crate) fn path(&self, inode: &Arc<Inode>) -> Result<Bytes> {
        if inode.is_dir() {
            return Ok(self.place(inode)?.path);
        }
        self.path_at(inode, &inode.loc.read().clone())
    }

    /// `P` that an inode other than a directory has at `loc`.
    pub(crate) fn path_at(&self, inode: &Arc<Inode>, loc: &Loc) -> Result<Bytes> {
        match loc {
            Loc::Root => Ok(Bytes::new()),
            Loc::Child { parent, name } => Ok(keys::child(&self.place(parent)?.path, name)),
            Loc::Body { root, link, .. } => Ok(keys::body(&self.place(root)?.path, *link)),
            Loc::Orphan => Ok(keys::orphan(inode.ino)),
            Loc::Gone => Err(Error::Stale),
        }
    }

    /// Where the record of an inode at `loc` lies, and the acc its number is stored with; `None`
    /// when it has no name and so no record.
    pub(crate) fn record_at(&self, loc: &Loc) -> Result<Option<(Bytes, u64)>> {
        let found = match loc {
            Loc::Root => Ok((keys::root_record(), 0)),
            Loc::Child { parent, name } => self
                .place(parent)
                .map(|dir| (keys::entry(&dir.path, name), dir.acc)),
            Loc::Body { root, link, .. } => self
                .place(root)
                .map(|root| (keys::body_record(&keys::body(&root.path, *link)), root.acc)),
            Loc::Orphan | Loc::Gone => return Ok(None),
        };
        match found {
            Ok(found) => Ok(Some(found)),
            Err(Error::Stale) => Ok(None),
            Err(other) => Err(other),
        }
    }

    /// The clone root whose hidden range serves the names in `dir`: `dir` itself, or the nearest above.
    pub(crate) fn clone_root(&self, dir: &Arc<Inode>) -> Result<Arc<Inode>> {
        let mut at = Arc::clone(dir);
        while !at.clone_root {
            let parent = match &*at.loc.read() {
                Loc::Child { parent, .. } => Arc::clone(parent),
                Loc::Root => break,
                Loc::Body { .. } | Loc::Orphan | Loc::Gone => return Err(Error::Stale),
            };
            at = parent;
        }
        Ok(at)
    }

    /// Whether `dir` is `ancestor` or lies below it.
    pub(crate) fn is_within(&self, dir: &Arc<Inode>, ancestor: &Arc<Inode>) -> bool {
        let mut at = Arc::clone(dir);
        loop {
            if Arc::ptr_eq(&at, ancestor) {
                return true;
            }
            let parent = match &*at.loc.read() {
                Loc::Child { parent, .. } => Arc::clone(parent),
                Loc::Root | Loc::Body { .. } | Loc::Orphan | Loc::Gone => return false,
            };
            at = parent;
        }
    }
}
