//! Who may clone and remove trees. Everything else the kernel checks before it asks.

use std::sync::Arc;

use ramet_betree::{Snapshot, successor_of_prefix};

use crate::error::{Error, Result};
use crate::inode::{Inode, Loc};
use crate::keys;
use crate::record::{Entry, Kind, Record, S_ISVTX};
use crate::volume::{Volume, gone_is_not_found};

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// User; 0 may do everything.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

const WRITE: u32 = 2;
const SEARCH: u32 = 1;

impl Caller {
    /// The user who may do everything.
    #[must_use]
    pub fn root() -> Self {
        Self {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
        }
    }

    pub(crate) fn is_privileged(&self) -> bool {
        self.uid == 0
    }

    fn may(&self, record: &Record, access: u32) -> Result<()> {
        let shift = if self.uid == record.uid {
            6
        } else if self.gid == record.gid || self.groups.contains(&record.gid) {
            3
        } else {
            0
        };
        if self.is_privileged() || (record.mode >> shift) & access == access {
            Ok(())
        } else {
            Err(Error::Access)
        }
    }

    /// Whether entries of a directory may be added and removed.
    pub(crate) fn may_change(&self, dir: &Record) -> Result<()> {
        self.may(dir, WRITE | SEARCH)
    }

    /// Whether `victim` may be removed from a directory that may be changed. Of a tree only the top is
    /// asked, so it must be the caller's own.
    pub(crate) fn may_remove(&self, dir: &Record, victim: &Record) -> Result<()> {
        let is_tree = Kind::from_mode(victim.mode) == Some(Kind::Directory);
        let is_sticky = dir.mode & S_ISVTX != 0;
        let owns = self.uid == victim.uid || (is_sticky && !is_tree && self.uid == dir.uid);
        if self.is_privileged() || owns || !(is_sticky || is_tree) {
            Ok(())
        } else {
            Err(Error::NotPermitted)
        }
    }

    /// Whether an object may be copied with owner and mode: by its owner, device nodes not at all.
    pub(crate) fn may_copy(&self, source: &Record) -> Result<()> {
        let is_device = matches!(
            Kind::from_mode(source.mode),
            Some(Kind::CharDevice | Kind::BlockDevice)
        );
        if self.is_privileged() || (self.uid == source.uid && !is_device) {
            Ok(())
        } else {
            Err(Error::NotPermitted)
        }
    }
}

impl Volume {
    /// Whether the caller may search every directory above an object, of a hard link above one of its
    /// names.
    pub(crate) fn may_reach(&self, caller: &Caller, inode: &Arc<Inode>) -> Result<()> {
        match self.may_reach_last_name(caller, inode) {
            Err(Error::NotFound | Error::Access)
                if matches!(*inode.loc.read(), Loc::Body { .. }) =>
            {
                self.may_reach_any_name(caller, inode)
            }
            known => known,
        }
    }

    fn may_reach_last_name(&self, caller: &Caller, inode: &Arc<Inode>) -> Result<()> {
        let mut above = Vec::new();
        {
            let _topology = self.topology.read();
            let mut at = Arc::clone(inode);
            loop {
                let parent = match &*at.loc.read() {
                    Loc::Root => break,
                    Loc::Child { parent, .. } => Arc::clone(parent),
                    // Last found through this directory, where the name may be gone.
                    Loc::Body { via, .. } => Arc::clone(via),
                    Loc::Orphan | Loc::Gone => return Err(Error::NotFound),
                };
                above.push(Arc::clone(&parent));
                at = parent;
            }
        }
        for dir in above {
            caller.may(&dir.state.read(), SEARCH)?;
        }
        Ok(())
    }

    /// The same for all names of a hard link: O(stubs of the clone root), when the last known one fails.
    fn may_reach_any_name(&self, caller: &Caller, inode: &Arc<Inode>) -> Result<()> {
        let (root, link, path, snapshot) = {
            let topology = self.topology.read();
            let Loc::Body { root, link, .. } = inode.loc.read().clone() else {
                return Err(Error::NotFound);
            };
            let path = topology.place(&root).map_err(gone_is_not_found)?.path;
            (root, link, path, self.tree.snapshot())
        };
        self.may_reach_last_name(caller, &root)?;
        caller.may(&root.state.read(), SEARCH)?;
        let all = keys::stub_index(&path);
        let mut refused = Error::NotFound;
        for item in snapshot.scan(&all, successor_of_prefix(&all).as_deref()) {
            let (key, value) = item?;
            if value[..] != link.to_be_bytes() {
                continue;
            }
            let Some((dir, _)) = keys::stub_name(&path, &key) else {
                continue;
            };
            match may_search_between(caller, &snapshot, &path, &dir) {
                Err(error @ (Error::Access | Error::NotFound)) => refused = error,
                other => return other,
            }
        }
        Err(refused)
    }
}

/// Whether the caller may search every directory below the one at `from` down to the one at `to`.
fn may_search_between(caller: &Caller, snapshot: &Snapshot, from: &[u8], to: &[u8]) -> Result<()> {
    let mut path = from.to_vec();
    for name in keys::names_between(from, to) {
        let value = snapshot.get(&keys::entry(&path, name))?;
        match Entry::decode(&value.ok_or(Error::NotFound)?)? {
            Entry::Inode { record, .. } => caller.may(&record, SEARCH)?,
            Entry::Stub(_) => return Err(Error::NotFound),
        }
        keys::push_child(&mut path, name);
    }
    Ok(())
}
