//! Finding inodes, and what is known about them.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::record::{FLAG_SPARSE, Kind, Record, Time};
use crate::namespace::inode::{Ino, Inode, Location};
use crate::ops::data::BLOCK_BYTES;
use crate::options::AccessTime;
use crate::tools::control::NAME_BYTES_MAX;
use crate::volume::Volume;

/// What `stat` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: Ino,
    /// What it is.
    pub kind: Kind,
    /// Permission bits with setuid, setgid and sticky.
    pub perm: u16,
    /// Names; of a directory 2 and one for each directory inside.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node.
    pub rdev: u32,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Allocated space in units of 512 bytes.
    pub sectors: u64,
    /// Last read.
    pub atime: Time,
    /// Last change of the contents.
    pub mtime: Time,
    /// Last change of the contents or the attributes.
    pub ctime: Time,
    /// Creation.
    pub btime: Time,
}

/// Refuses what cannot be the name of an entry.
pub(crate) fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_BYTES_MAX {
        return Err(Error::NameTooLong);
    }
    if name.is_empty() || name == b"." || name == b".." || name.contains(&0) || name.contains(&b'/')
    {
        return Err(Error::Invalid("name"));
    }
    Ok(())
}

impl Volume {
    /// The object that `name` in a directory leads to; `.` and `..` too. Until [`Volume::forget`] is
    /// told about it, the caller may use its number.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, and those of the tree.
    pub fn lookup(&self, dir: Ino, name: &[u8]) -> Result<Attr> {
        let dir = self.dir(dir)?;
        let found = match name {
            b"." => dir,
            b".." => self.parent(&dir),
            _ => {
                check_name(name)?;
                let _names = dir.names.read();
                let found = self.find(&dir, name)?.ok_or(Error::NotFound)?;
                // Before the name can be taken away.
                self.table.remember(&found);
                return self.attr_known(&found);
            }
        };
        self.table.remember(&found);
        self.attr_known(&found)
    }

    /// Attributes of what was just remembered, and is forgotten again if there are none.
    pub(crate) fn attr_known(&self, found: &Arc<Inode>) -> Result<Attr> {
        self.attr(found)
            .inspect_err(|_| self.table.forget(found.ino, 1))
    }

    /// The directory above `dir`; of the root, and of a removed directory, itself.
    pub(crate) fn parent(&self, dir: &Arc<Inode>) -> Arc<Inode> {
        match &*dir.location.read() {
            Location::Child { parent, .. } => Arc::clone(parent),
            Location::Root
            | Location::Shared { .. }
            | Location::Deleted { .. }
            | Location::Orphan
            | Location::Gone => Arc::clone(dir),
        }
    }

    /// Attributes of an inode the caller knows.
    ///
    /// # Errors
    /// `Stale` when it is not known.
    pub fn getattr(&self, ino: Ino) -> Result<Attr> {
        let inode = self.inode(ino)?;
        let mut attr = self.attr(&inode)?;
        if attr.nlink > 0 && self.is_detached(&inode) {
            attr.nlink = 0;
        }
        Ok(attr)
    }

    /// Whether what it lies in was removed with everything inside.
    fn is_detached(&self, inode: &Inode) -> bool {
        let parent = match &*inode.location.read() {
            Location::Child { parent, .. } | Location::Shared { root: parent, .. } => {
                Arc::clone(parent)
            }
            Location::Root | Location::Deleted { .. } | Location::Orphan | Location::Gone => {
                return false;
            }
        };
        matches!(self.topology.read().dir_path(&parent), Err(Error::Stale))
    }

    pub(crate) fn attr(&self, inode: &Arc<Inode>) -> Result<Attr> {
        let record = inode.state.read();
        let mut attr = attr_of(inode.ino, &record);
        if inode.is_nameless() {
            attr.nlink = 0;
        }
        Ok(attr)
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// `Invalid` when it is none.
    pub fn readlink(&self, ino: Ino) -> Result<bytes::Bytes> {
        let inode = self.inode(ino)?;
        if inode.kind != Kind::Symlink {
            return Err(Error::Invalid("not a symbolic link"));
        }
        self.read_now(&inode);
        let target = inode.state.read().target.clone();
        Ok(target)
    }

    /// Notes that the inode was read. Only memory changes; the new time is stored with the next
    /// change of the record, and is lost when there is none before the inode leaves the memory.
    pub(crate) fn read_now(&self, inode: &Arc<Inode>) {
        const DAY_SECS: i64 = 24 * 60 * 60;
        let how = if inode.is_dir() {
            self.dir_access_time
        } else {
            self.access_time
        };
        if how == AccessTime::Never {
            return;
        }
        let now = self.now();
        let is_due = |record: &Record| {
            how == AccessTime::Strict
                || record.atime <= record.mtime
                || record.atime <= record.ctime
                || now.secs - record.atime.secs >= DAY_SECS
        };
        if is_due(&inode.state.read()) {
            inode.state.write().atime = now;
        }
    }
}

/// What `stat` shows of a record.
pub(crate) fn attr_of(ino: Ino, record: &Record) -> Attr {
    let blocks = record.size_bytes.div_ceil(BLOCK_BYTES);
    let kind = Kind::from_mode(record.mode).expect("the decoder checked the mode");
    // What a program stores into a mapped page is in no block before the kernel writes the page back. Programs take a
    // file without blocks for one without data, and do not look.
    let least_sectors = u64::from(kind == Kind::Regular && record.size_bytes > 0);
    let blocks = match kind {
        Kind::Regular if record.has(FLAG_SPARSE) => record.blocks,
        Kind::Regular => blocks,
        _ => 0,
    };
    Attr {
        ino,
        kind,
        perm: u16::try_from(record.mode & 0o7777).expect("twelve bits"),
        nlink: record.nlink,
        uid: record.uid,
        gid: record.gid,
        rdev: record.rdev,
        size_bytes: if kind == Kind::Directory {
            BLOCK_BYTES
        } else {
            record.size_bytes
        },
        sectors: (blocks * (BLOCK_BYTES / 512)).max(least_sectors),
        atime: record.atime,
        mtime: record.mtime,
        ctime: record.ctime,
        btime: record.btime,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_holes_is_not_shown_without_blocks_unless_it_is_empty() {
        let shown = |size_bytes| {
            let mut record = Record::new(Kind::Regular.mode_bits(), 0, 0, Time::default());
            (record.flags, record.size_bytes) = (FLAG_SPARSE, size_bytes);
            attr_of(Ino(2), &record).sectors
        };
        assert_eq!([0, 1, 8 << 20].map(shown), [0, 1, 1]);
    }
}
