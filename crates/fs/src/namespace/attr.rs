//! The attributes of an inode, as `stat` shows them.

use crate::format::blocks::BLOCK_BYTES;
use crate::format::ino::{Identity, Ino, ROOT_INO};
use crate::format::record::{FLAG_SPARSE, Kind, Record, Time};
use crate::namespace::inode::Inode;

/// Attributes, as `stat` shows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Inode number.
    pub ino: Ino,
    /// Distinguishes the inodes that had this number one after the other.
    pub generation: u64,
    /// Kind of the object.
    pub kind: Kind,
    /// Permission bits with setuid, setgid and sticky.
    pub perm: u16,
    /// Number of names; of a directory 2 and one for each directory inside.
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

impl Inode {
    /// The attributes now; an inode without a name has no links.
    pub(crate) fn attr(&self) -> Attr {
        let record = self.state.read();
        let mut attr = attr_of(self.identity(), &record);
        if self.is_nameless() {
            attr.nlink = 0;
        }
        attr
    }
}

/// The attributes in a record.
pub(crate) fn attr_of(identity: Identity, record: &Record) -> Attr {
    let blocks = record.size_bytes.div_ceil(BLOCK_BYTES);
    let kind = Kind::from_mode(record.mode).expect("the decoder checked the mode");
    // Bytes that a program stores into a mapped page are in no block before the kernel writes the
    // page back. Programs take a file without blocks for one without data, and do not read it.
    let least_sectors = u64::from(kind == Kind::Regular && record.size_bytes > 0);
    let blocks = match kind {
        Kind::Regular if record.has(FLAG_SPARSE) => record.blocks,
        Kind::Regular => blocks,
        _ => 0,
    };
    // The kernel wants 0 for the generation of the root.
    let generation = match identity.ino {
        ROOT_INO => 0,
        _ => identity.generation,
    };
    Attr {
        ino: identity.ino,
        generation,
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
            attr_of(Identity::ROOT, &record).sectors
        };
        assert_eq!([0, 1, 8 << 20].map(shown), [0, 1, 1]);
    }
}
