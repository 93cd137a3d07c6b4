//! Permissions to clone and to remove trees. The kernel checks all others before it sends a
//! request.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::acl::ACCESS;
use crate::format::record::{CAPABILITY, Kind, Record, S_ISGID, S_ISUID, S_ISVTX, Time};
use crate::namespace::inode::Inode;
use crate::namespace::resolve::Namespace;
use crate::ops::acl::list_of;

/// The capabilities of a process that permissions depend on, as the bits of capabilities(7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities(pub u64);

impl Capabilities {
    const CHOWN: Self = Self(1 << 0);
    /// No mode of a file or directory keeps the process out.
    pub const DAC_OVERRIDE: Self = Self(1 << 1);
    const DAC_READ_SEARCH: Self = Self(1 << 2);
    const FOWNER: Self = Self(1 << 3);
    /// Changes leave setuid and setgid.
    pub const FSETID: Self = Self(1 << 4);
    /// Attributes of `trusted.` are shown.
    pub const SYS_ADMIN: Self = Self(1 << 21);
    /// Devices can be made.
    pub const MKNOD: Self = Self(1 << 27);
    /// The attribute `security.capability` can be set.
    pub const SETFCAP: Self = Self(1 << 31);
    /// All capabilities.
    pub const ALL: Self = Self(u64::MAX);

    /// Whether all of `others` are among these.
    #[must_use]
    pub fn have(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// These and `others`.
    pub(crate) fn with(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }
}

/// The number of no user and no group: the process cannot be seen.
pub const NOBODY: u32 = u32::MAX;

/// The process on whose behalf an operation runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// User. [`NOBODY`] may do nothing.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Rights of the process beyond those of its user.
    pub capabilities: Capabilities,
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

const READ: u32 = 4;
const WRITE: u32 = 2;
const SEARCH: u32 = 1;

impl Caller {
    /// The user with all permissions.
    #[must_use]
    pub fn root() -> Self {
        Self {
            capabilities: Capabilities::ALL,
            ..Self::user(0, 0)
        }
    }

    /// A user with one group and no capabilities.
    #[must_use]
    pub fn user(uid: u32, gid: u32) -> Self {
        Self {
            uid,
            gid,
            groups: Vec::new(),
            capabilities: Capabilities::default(),
        }
    }

    fn has(&self, capabilities: Capabilities) -> bool {
        self.capabilities.have(capabilities)
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
        let reads = access & WRITE == 0 && self.has(Capabilities::DAC_READ_SEARCH);
        if reads || self.has(Capabilities::DAC_OVERRIDE) {
            return Ok(());
        }
        if self.uid == NOBODY {
            return Err(Error::Access);
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

    /// Whether it may look at everything that a user with this number owns.
    pub(crate) fn may_see_all_of(&self, owner: u32) -> bool {
        self.uid == owner || self.has(Capabilities::DAC_READ_SEARCH)
    }

    /// Makes the owner of a new object one that the process may give it, by the rules of `cp -a`: a
    /// process that may not give files away keeps the group if it is in it. An object with another
    /// owner loses setuid, setgid and sticky.
    pub(crate) fn give(&self, record: &mut Record) {
        let gives_away = self.has(Capabilities::CHOWN) && self.has(Capabilities::FOWNER);
        if !gives_away && (record.uid != self.uid || !self.is_in(record.gid)) {
            record.mode &= !(S_ISUID | S_ISGID | S_ISVTX);
            record.uid = self.uid;
            if !self.is_in(record.gid) {
                record.gid = self.gid;
            }
        }
        if !self.may_set_setgid(record.gid) {
            record.mode &= !S_ISGID;
        }
    }

    /// Permission bits, user and group that an object of the process gets in place of these, by the
    /// rules of `cp -a`.
    #[must_use]
    pub fn given(&self, perm: u32, (uid, gid): (u32, u32)) -> (u32, (u32, u32)) {
        let mode = Kind::Regular.mode_bits() | perm & 0o7777;
        let mut record = Record::new(mode, uid, gid, Time::default());
        self.give(&mut record);
        (record.mode & 0o7777, (record.uid, record.gid))
    }

    /// Whether an extended attribute of this name may be set on a new object of the process.
    #[must_use]
    pub fn may_set_xattr(&self, name: &[u8], kind: Kind) -> bool {
        if name == CAPABILITY {
            self.has(Capabilities::SETFCAP)
        } else if name.starts_with(b"trusted.") || name.starts_with(b"security.") {
            self.has(Capabilities::SYS_ADMIN)
        } else {
            !name.starts_with(b"user.") || matches!(kind, Kind::Regular | Kind::Directory)
        }
    }

    /// Whether the mode and the owner of an object with this record may be set, the owner to this
    /// user and group.
    pub(crate) fn may_set(&self, record: &Record, (uid, gid): (u32, u32)) -> Result<()> {
        let owns = self.uid == record.uid || self.has(Capabilities::FOWNER);
        let gives = uid == record.uid && (gid == record.gid || self.is_in(gid));
        match owns && (gives || self.has(Capabilities::CHOWN)) {
            true => Ok(()),
            false => Err(Error::NotPermitted),
        }
    }

    /// Whether a new mode of an object of this group may have setgid, by the rules of chmod(2).
    pub(crate) fn may_set_setgid(&self, gid: u32) -> bool {
        self.is_in(gid) || self.has(Capabilities::FSETID)
    }

    /// Whether it may look at everything of all users.
    pub(crate) fn may_see_all(&self) -> bool {
        self.has(Capabilities::DAC_OVERRIDE) || self.has(Capabilities::DAC_READ_SEARCH)
    }

    /// Whether names in a directory, whose state is locked, may be found.
    pub(crate) fn may_search(
        &self,
        namespace: &Namespace,
        dir: (&Arc<Inode>, &Record),
    ) -> Result<()> {
        self.may(namespace, dir, SEARCH)
    }

    /// Whether names in a directory, whose state is locked, may be listed and found.
    pub(crate) fn may_list(
        &self,
        namespace: &Namespace,
        dir: (&Arc<Inode>, &Record),
    ) -> Result<()> {
        self.may(namespace, dir, READ | SEARCH)
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
        // The rest of the tree may belong to others, in directories that are closed.
        let may_all = if is_tree {
            self.has(Capabilities::FOWNER) && self.has(Capabilities::DAC_OVERRIDE)
        } else {
            self.has(Capabilities::FOWNER)
        };
        if may_all || owns || !(is_sticky || is_tree) {
            Ok(())
        } else {
            Err(Error::NotPermitted)
        }
    }

    /// Whether an object may be copied with owner and mode. Its owner may; others need the
    /// capabilities to read everything, and to give the copy its owner and mode. A device node needs
    /// that to make one.
    pub(crate) fn may_copy(&self, source: &Record) -> Result<()> {
        let is_device = matches!(
            Kind::from_mode(source.mode),
            Some(Kind::CharDevice | Kind::BlockDevice)
        );
        let reads_all =
            self.has(Capabilities::DAC_OVERRIDE) || self.has(Capabilities::DAC_READ_SEARCH);
        let gives_away = self.has(Capabilities::CHOWN) && self.has(Capabilities::FOWNER);
        let may_copy = self.uid == source.uid || reads_all && gives_away;
        if may_copy && (!is_device || self.has(Capabilities::MKNOD)) {
            Ok(())
        } else {
            Err(Error::NotPermitted)
        }
    }
}
