//! Permissions to clone and to remove trees. The kernel checks all others before it sends a
//! request.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::acl::ACCESS;
use crate::format::record::{Kind, Record, S_ISVTX};
use crate::namespace::inode::Inode;
use crate::namespace::resolve::Namespace;
use crate::ops::acl::list_of;

/// The user on whose behalf an operation runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// User; 0 may do everything.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// The credentials of a process that changes a file, as far as setuid and setgid depend on them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Credentials {
    /// The process has `CAP_FSETID`: its changes leave setuid and setgid.
    pub has_fsetid: bool,
    /// Its group and its supplementary groups.
    pub groups: Vec<u32>,
}

impl Credentials {
    pub(crate) fn privileged() -> Self {
        Self {
            has_fsetid: true,
            groups: Vec::new(),
        }
    }
}

/// Gives the credentials of the process that changes a file. An operation asks for them only when
/// the file has setuid or setgid. With `None` the file keeps both.
pub type Writer<'a> = Option<&'a dyn Fn() -> Credentials>;

const WRITE: u32 = 2;
const SEARCH: u32 = 1;

impl Caller {
    /// The user with all permissions.
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

    fn is_in(&self, group: u32) -> bool {
        self.gid == group || self.groups.contains(&group)
    }

    /// Whether all of `access` is allowed to an object, by the rules of the kernel: they look at the
    /// access control list only where the group bits of the mode allow anything.
    fn may(
        &self,
        namespace: &Namespace,
        (inode, record): (&Arc<Inode>, &Record),
        access: u32,
    ) -> Result<()> {
        const GROUP_BITS: u32 = 0o070;
        if self.is_privileged() {
            return Ok(());
        }
        let of_class = |shift: u32| record.mode >> shift & access == access;
        let is_owner = self.uid == record.uid;
        let list = if is_owner || record.mode & GROUP_BITS == 0 {
            None
        } else {
            list_of(namespace, (inode, record), ACCESS)?
        };
        let is_allowed = match list {
            Some(list) => list.allows(self.uid, record.gid, |group| self.is_in(group), access),
            None if is_owner => of_class(6),
            None if self.is_in(record.gid) => of_class(3),
            None => of_class(0),
        };
        if is_allowed {
            Ok(())
        } else {
            Err(Error::Access)
        }
    }

    /// Whether names in a directory, whose state is locked, may be found.
    pub(crate) fn may_search(
        &self,
        namespace: &Namespace,
        dir: (&Arc<Inode>, &Record),
    ) -> Result<()> {
        self.may(namespace, dir, SEARCH)
    }

    /// Whether entries of a directory, whose state is locked, may be added and removed.
    pub(crate) fn may_change(
        &self,
        namespace: &Namespace,
        dir: (&Arc<Inode>, &Record),
    ) -> Result<()> {
        self.may(namespace, dir, WRITE | SEARCH)
    }

    /// Whether `victim` may be removed from a directory that may be changed. Only the top of a tree
    /// is checked, so it must be the caller's own.
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

    /// Whether an object may be copied with owner and mode. Its owner may, but not copy device
    /// nodes.
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
