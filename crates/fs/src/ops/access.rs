//! Who may clone and remove trees. Everything else the kernel checks before it asks.

use crate::error::{Error, Result};
use crate::format::record::{Kind, Record, S_ISVTX};

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

/// The process that changes a file, as far as setuid and setgid depend on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Credentials {
    /// It has `CAP_FSETID`: what it changes keeps setuid and setgid.
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

/// Tells the credentials of the process that changes a file; they are asked for only when the file has setuid or setgid.
/// With `None` the process may keep both.
pub type Writer<'a> = Option<&'a dyn Fn() -> Credentials>;

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

    /// Whether names in a directory may be found.
    pub(crate) fn may_search(&self, dir: &Record) -> Result<()> {
        self.may(dir, SEARCH)
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
