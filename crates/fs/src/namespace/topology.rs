//! From an inode to its keys.
//!
//! Paths change when directories move. So an operation computes keys with the topology held, and
//! submits the batch, or takes the snapshot to read from, before it lets go. A directory's path is
//! cached with the generation of the topology; moving or replacing a directory starts a new
//! generation.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::keys;
use crate::namespace::inode::{DirPath, Inode, Location, Reach};

/// Paths up to this length are kept by every directory.
const KEPT_BYTES: usize = 4096;

/// Whether a directory keeps its path, which is `len` bytes long, `above` of them its parent's. The
/// paths of a deep chain together are as long as the square of its depth. Few directories of it
/// keep theirs; the others walk up to the next that does.
fn is_kept(above: usize, len: usize) -> bool {
    let step = (len / 8).next_power_of_two();
    len <= KEPT_BYTES || above / step != len / step
}

/// Proof that the topology is held.
pub(crate) struct Topology {
    /// Counts the transactions that move or remove directories with entries inside, or that move
    /// shared inodes to another clone root.
    pub(crate) generation: u64,
}

impl Topology {
    /// Path of a directory that is reached by names.
    ///
    /// # Errors
    /// `Stale` when it, or a directory above it, was removed.
    pub(crate) fn dir_path(&self, dir: &Arc<Inode>) -> Result<DirPath> {
        let found = self.kept_dir_path(dir)?;
        match found.reach {
            Reach::Live => Ok(found),
            Reach::Deleted | Reach::Orphan => Err(Error::Stale),
        }
    }

    /// Path of a directory, also of one that was removed and is kept.
    ///
    /// # Errors
    /// `Stale` when it, or a directory above it, is gone.
    pub(crate) fn kept_dir_path(&self, dir: &Arc<Inode>) -> Result<DirPath> {
        if let Some((generation, found)) = &*dir.cached_path.lock()
            && *generation == self.generation
        {
            return Ok(found.clone());
        }
        let mut chain: Vec<(Arc<Inode>, Bytes)> = Vec::new();
        let mut at = Arc::clone(dir);
        let mut found = loop {
            if let Some((generation, found)) = &*at.cached_path.lock()
                && *generation == self.generation
            {
                break found.clone();
            }
            let location = at.location.read().clone();
            match location {
                Location::Root => {
                    break DirPath {
                        path: Bytes::new(),
                        reach: Reach::Live,
                    };
                }
                Location::Child { parent, name } | Location::Deleted { parent, name } => {
                    chain.push((std::mem::replace(&mut at, parent), name));
                }
                Location::Orphan(orphan) | Location::Unnamed(orphan) => {
                    break DirPath {
                        path: keys::orphan(orphan),
                        reach: Reach::Orphan,
                    };
                }
                Location::Shared { .. } | Location::Gone => return Err(Error::Stale),
            }
        };
        let mut path = Vec::new();
        if !chain.is_empty() {
            path.extend_from_slice(&found.path);
        }
        while let Some((inode, name)) = chain.pop() {
            let above = path.len();
            keys::push_child(&mut path, &name);
            if found.reach == Reach::Live && is_deleted(&inode) {
                found.reach = Reach::Deleted;
            }
            let is_last = chain.is_empty();
            if is_last || is_kept(above, path.len()) {
                found.path = Bytes::copy_from_slice(&path);
            }
            let keep = |found: &DirPath| {
                *inode.cached_path.lock() =
                    is_kept(above, path.len()).then(|| (self.generation, found.clone()));
            };
            keep(&found);
            // An empty directory is removed without a new generation. The removal clears its cached
            // path after it changes the location.
            if found.reach == Reach::Live && is_deleted(&inode) {
                found.reach = Reach::Deleted;
                keep(&found);
            }
            if matches!(*inode.location.read(), Location::Gone) {
                *inode.cached_path.lock() = None;
                return Err(Error::Stale);
            }
        }
        Ok(found)
    }

    /// `P` of any inode.
    ///
    /// # Errors
    /// `Stale` when it has no contents any more.
    pub(crate) fn path(&self, inode: &Arc<Inode>) -> Result<Bytes> {
        if inode.is_dir() {
            return Ok(self.dir_path(inode)?.path);
        }
        self.path_at(&inode.location.read().clone())
    }

    /// `P` of an inode that is no directory and has this location.
    pub(crate) fn path_at(&self, location: &Location) -> Result<Bytes> {
        match location {
            Location::Root => Ok(Bytes::new()),
            Location::Child { parent, name } | Location::Deleted { parent, name } => {
                Ok(keys::child(&self.kept_dir_path(parent)?.path, name))
            }
            Location::Shared { root, link, .. } => {
                Ok(keys::shared_inode(&self.kept_dir_path(root)?.path, *link))
            }
            Location::Orphan(orphan) | Location::Unnamed(orphan) => Ok(keys::orphan(*orphan)),
            Location::Gone => Err(Error::Stale),
        }
    }

    /// The key of the record of an inode with this location; `None` when it has no name and so no
    /// record.
    pub(crate) fn record_at(&self, location: &Location) -> Result<Option<Bytes>> {
        let found = match location {
            Location::Root => Ok(keys::root_record()),
            Location::Child { parent, name } => self
                .dir_path(parent)
                .map(|dir| keys::entry(&dir.path, name)),
            Location::Shared { root, link, .. } => self
                .dir_path(root)
                .map(|root| keys::shared_record(&keys::shared_inode(&root.path, *link))),
            Location::Deleted { .. }
            | Location::Orphan(_)
            | Location::Unnamed(_)
            | Location::Gone => return Ok(None),
        };
        match found {
            Ok(found) => Ok(Some(found)),
            Err(Error::Stale) => Ok(None),
            Err(other) => Err(other),
        }
    }

    /// The clone root whose hidden range serves the names in `dir`: `dir` itself, or the nearest
    /// one above.
    pub(crate) fn clone_root(&self, dir: &Arc<Inode>) -> Result<Arc<Inode>> {
        let mut at = Arc::clone(dir);
        while !at.is_clone_root() {
            let parent = match &*at.location.read() {
                Location::Child { parent, .. } => Arc::clone(parent),
                Location::Root => break,
                Location::Shared { .. }
                | Location::Deleted { .. }
                | Location::Orphan(_)
                | Location::Unnamed(_)
                | Location::Gone => {
                    return Err(Error::Stale);
                }
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
            let parent = match &*at.location.read() {
                Location::Child { parent, .. } => Arc::clone(parent),
                Location::Root
                | Location::Shared { .. }
                | Location::Deleted { .. }
                | Location::Orphan(_)
                | Location::Unnamed(_)
                | Location::Gone => {
                    return false;
                }
            };
            at = parent;
        }
    }
}

fn is_deleted(inode: &Inode) -> bool {
    matches!(*inode.location.read(), Location::Deleted { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deep_chain_keeps_few_paths_and_no_way_up_is_long() {
        for name_bytes in [1, 20, 255] {
            let (mut len, mut kept_bytes, mut since, mut longest) = (0, 0, 0, 0);
            while len < ramet_betree::KEY_BYTES_MAX {
                let above = len;
                len += name_bytes + 2;
                if is_kept(above, len) {
                    kept_bytes += if len > KEPT_BYTES { len } else { 0 };
                    since = len;
                }
                longest = longest.max((len - since) * 8 / len.max(KEPT_BYTES));
            }
            assert!(kept_bytes < 32 * len, "{kept_bytes} bytes for {len}");
            assert!(longest <= 2, "{longest} eighths of the path are walked");
        }
    }
}
