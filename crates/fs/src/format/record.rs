//! Entries of a directory as they are stored: an inode record, a link entry that names a shared
//! inode, or a deleted entry.
//!
//! Little-endian. An inode record, version 1:
//!
//! ```text
//! offset size field
//!      0    1 tag, 1
//!      1    1 reserved, 0
//!      2    2 flags
//!      4    4 mode: type and permission bits, as in st_mode
//!      8    4 uid
//!     12    4 gid
//!     16    4 nlink
//!     20    4 rdev, for device nodes
//!     24    8 size in bytes; of a symbolic link the length of the target
//!     32    8 blocks: allocated 4 KiB blocks of a sparse file
//!     40    8 stored: the visible inode number XOR acc of the directory (see `docs/fs.md`)
//!     48    8 salt, of a directory
//!     56   32 seconds of atime, mtime, ctime, btime (signed)
//!     88   16 nanoseconds of the same
//!    104      target of a symbolic link
//! ```
//!
//! A link entry is 24 bytes: tag 2, three reserved zeros, the type bits of the mode (4), stored
//! (8), the link number of the shared inode (8).
//!
//! A deleted entry is 16 bytes: tag 3, three reserved zeros, the type bits of the mode (4), stored
//! (8). The name does not exist any more, and the contents of the object are still there: see
//! `ops/deferred_delete.rs`.

use bytes::Bytes;

use crate::error::{Error, Result};

/// Size of an inode record without the target of a symbolic link.
pub(crate) const RECORD_BYTES: usize = 104;
const LINK_BYTES: usize = 24;
const DELETED_BYTES: usize = 16;
const TAG_INODE: u8 = 1;
const TAG_LINK: u8 = 2;
const TAG_DELETED: u8 = 3;
/// Longest target of a symbolic link, in bytes.
pub(crate) const TARGET_BYTES_MAX: usize = 4095;

/// The type bits of a mode.
pub(crate) const S_IFMT: u32 = 0o170_000;
/// Set user id on execution.
pub(crate) const S_ISUID: u32 = 0o4000;
/// Set group id on execution; on a directory, entries inherit its group.
pub(crate) const S_ISGID: u32 = 0o2000;
/// On a directory, only owners remove entries.
pub(crate) const S_ISVTX: u32 = 0o1000;

/// A directory whose hidden range holds the shared inodes of the hard links inside.
pub(crate) const FLAG_CLONE_ROOT: u16 = 1;
/// Extended attributes may exist.
pub(crate) const FLAG_XATTRS: u16 = 2;
/// The file may have holes: `blocks` counts the allocated blocks, and the allocation map tells
/// which they are.
pub(crate) const FLAG_SPARSE: u16 = 4;
/// The extended attribute `security.capability` exists.
pub(crate) const FLAG_CAPABILITY: u16 = 16;
/// The access control list of the object is an extended attribute (`format/acl.rs`).
pub(crate) const FLAG_ACL: u16 = 32;
/// The directory has an access control list for new entries.
pub(crate) const FLAG_DEFAULT_ACL: u16 = 64;
/// Reading does not change the access time of the object (chattr +A).
pub(crate) const FLAG_NO_ATIME: u16 = 128;
/// Programs that make backups leave the object out (chattr +d).
pub(crate) const FLAG_NO_DUMP: u16 = 256;
/// The object may be protected: the table of the volume tells whether it is
/// (`namespace/protection.rs`).
pub(crate) const FLAG_PROTECTED: u16 = 512;
const FLAGS_KNOWN: u16 = 1015;

/// The kind of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file with data.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A local socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

impl Kind {
    /// The kind that these bits of a mode name, if any.
    #[must_use]
    pub fn from_mode(mode: u32) -> Option<Self> {
        Some(match mode & S_IFMT {
            0o100_000 => Self::Regular,
            0o040_000 => Self::Directory,
            0o120_000 => Self::Symlink,
            0o010_000 => Self::Fifo,
            0o140_000 => Self::Socket,
            0o020_000 => Self::CharDevice,
            0o060_000 => Self::BlockDevice,
            _ => return None,
        })
    }

    /// The type bits of the mode.
    #[must_use]
    pub fn mode_bits(self) -> u32 {
        match self {
            Self::Regular => 0o100_000,
            Self::Directory => 0o040_000,
            Self::Symlink => 0o120_000,
            Self::Fifo => 0o010_000,
            Self::Socket => 0o140_000,
            Self::CharDevice => 0o020_000,
            Self::BlockDevice => 0o060_000,
        }
    }
}

/// Nanoseconds of a [`Time`] are fewer.
pub(crate) const NANOS_PER_SEC: u32 = 1_000_000_000;

/// A point in time, as `struct timespec`: before 1970 the seconds are negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Seconds since 1970.
    pub secs: i64,
    /// Nanoseconds, below 10^9.
    pub nanos: u32,
}

/// An inode without its number. The stored number depends on the directory, and is added when
/// encoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) flags: u16,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) nlink: u32,
    pub(crate) rdev: u32,
    pub(crate) size_bytes: u64,
    /// Allocated blocks, meaningful with [`FLAG_SPARSE`].
    pub(crate) blocks: u64,
    pub(crate) salt: u64,
    pub(crate) atime: Time,
    pub(crate) mtime: Time,
    pub(crate) ctime: Time,
    pub(crate) btime: Time,
    /// Target of a symbolic link, else empty.
    pub(crate) target: Bytes,
}

impl Record {
    /// A new inode of this kind.
    pub(crate) fn new(mode: u32, uid: u32, gid: u32, now: Time) -> Self {
        let nlink = if mode & S_IFMT == Kind::Directory.mode_bits() {
            2
        } else {
            1
        };
        Self {
            flags: 0,
            mode,
            uid,
            gid,
            nlink,
            rdev: 0,
            size_bytes: 0,
            blocks: 0,
            salt: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            target: Bytes::new(),
        }
    }

    /// The kind. The decoder has checked the mode.
    pub(crate) fn kind(&self) -> Kind {
        Kind::from_mode(self.mode).expect("records are made, and decoded, with the mode of a kind")
    }

    /// Whether all of these flags are set.
    pub(crate) fn has(&self, flags: u16) -> bool {
        self.flags & flags == flags
    }

    /// The bytes of the record in a directory where the number is stored as `stored`.
    pub(crate) fn encode(&self, stored: u64) -> Bytes {
        let mut out = Vec::with_capacity(RECORD_BYTES + self.target.len());
        out.extend_from_slice(&[TAG_INODE, 0]);
        out.extend_from_slice(&self.flags.to_le_bytes());
        for field in [self.mode, self.uid, self.gid, self.nlink, self.rdev] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        for field in [self.size_bytes, self.blocks, stored, self.salt] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        let times = [self.atime, self.mtime, self.ctime, self.btime];
        for time in times {
            out.extend_from_slice(&time.secs.to_le_bytes());
        }
        for time in times {
            out.extend_from_slice(&time.nanos.to_le_bytes());
        }
        out.extend_from_slice(&self.target);
        out.into()
    }
}

/// An entry, decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// The entry is the inode itself.
    Inode { record: Record, stored: u64 },
    /// The inode is a shared inode of the enclosing clone root.
    Link(LinkEntry),
    /// There is no such name. Its object is referenced by the kernel, or was before a crash.
    Deleted(DeletedEntry),
}

/// The rest of a name that was deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeletedEntry {
    /// Kind of the object: a file or a directory.
    pub(crate) kind: Kind,
    /// Visible number XOR acc of the directory.
    pub(crate) stored: u64,
}

impl DeletedEntry {
    pub(crate) fn encode(self) -> Bytes {
        let mut out = Vec::with_capacity(DELETED_BYTES);
        out.extend_from_slice(&[TAG_DELETED, 0, 0, 0]);
        out.extend_from_slice(&self.kind.mode_bits().to_le_bytes());
        out.extend_from_slice(&self.stored.to_le_bytes());
        out.into()
    }
}

/// One name of a file with several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkEntry {
    /// Kind of the shared inode.
    pub(crate) kind: Kind,
    /// Visible number XOR acc of the directory of the name.
    pub(crate) stored: u64,
    /// Number of the shared inode in its clone root.
    pub(crate) link: u64,
}

impl LinkEntry {
    pub(crate) fn encode(self) -> Bytes {
        let mut out = Vec::with_capacity(LINK_BYTES);
        out.extend_from_slice(&[TAG_LINK, 0, 0, 0]);
        out.extend_from_slice(&self.kind.mode_bits().to_le_bytes());
        out.extend_from_slice(&self.stored.to_le_bytes());
        out.extend_from_slice(&self.link.to_le_bytes());
        out.into()
    }
}

fn corrupt(detail: impl Into<String>) -> Error {
    Error::Corrupt {
        what: "directory entry",
        detail: detail.into(),
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

impl Entry {
    /// Whether an entry that `decode` accepts is a deleted entry.
    pub(crate) fn is_deleted(bytes: &[u8]) -> bool {
        bytes.first() == Some(&TAG_DELETED)
    }

    /// Reads an entry.
    ///
    /// # Errors
    /// `Corrupt` for anything that `encode` does not write.
    pub(crate) fn decode(bytes: &Bytes) -> Result<Self> {
        match bytes.first() {
            Some(&TAG_INODE) => Self::decode_inode(bytes),
            Some(&TAG_LINK) => Self::decode_link(bytes),
            Some(&TAG_DELETED) => Self::decode_deleted(bytes),
            tag => Err(corrupt(format!("tag {tag:?}"))),
        }
    }

    fn decode_inode(bytes: &Bytes) -> Result<Self> {
        if bytes.len() < RECORD_BYTES {
            return Err(corrupt(format!("{} bytes", bytes.len())));
        }
        let flags = u16::from_le_bytes([bytes[2], bytes[3]]);
        if bytes[1] != 0 || flags & !FLAGS_KNOWN != 0 {
            return Err(corrupt(format!(
                "flags {flags:#x}, reserved {:#x}",
                bytes[1]
            )));
        }
        let mode = u32_at(bytes, 4);
        let kind = Kind::from_mode(mode).ok_or_else(|| corrupt(format!("mode {mode:#o}")))?;
        let size_bytes = u64_at(bytes, 24);
        // The target is copied: a slice would keep the block that the record came from in memory.
        let target = Bytes::copy_from_slice(&bytes[RECORD_BYTES..]);
        let target_bytes = if kind == Kind::Symlink { size_bytes } else { 0 };
        if target.len() as u64 != target_bytes || target.len() > TARGET_BYTES_MAX {
            return Err(corrupt(format!(
                "{} bytes of target, size {size_bytes}",
                target.len()
            )));
        }
        let time = |index: usize| -> Result<Time> {
            let nanos = u32_at(bytes, 88 + 4 * index);
            if nanos >= NANOS_PER_SEC {
                return Err(corrupt(format!("{nanos} nanoseconds")));
            }
            Ok(Time {
                secs: u64_at(bytes, 56 + 8 * index).cast_signed(),
                nanos,
            })
        };
        let record = Record {
            flags,
            mode,
            uid: u32_at(bytes, 8),
            gid: u32_at(bytes, 12),
            nlink: u32_at(bytes, 16),
            rdev: u32_at(bytes, 20),
            size_bytes,
            blocks: u64_at(bytes, 32),
            salt: u64_at(bytes, 48),
            atime: time(0)?,
            mtime: time(1)?,
            ctime: time(2)?,
            btime: time(3)?,
            target,
        };
        Ok(Self::Inode {
            record,
            stored: u64_at(bytes, 40),
        })
    }

    fn decode_link(bytes: &Bytes) -> Result<Self> {
        if bytes.len() != LINK_BYTES || bytes[1..4] != [0; 3] {
            return Err(corrupt(format!("link_entry of {} bytes", bytes.len())));
        }
        let mode = u32_at(bytes, 4);
        let kind = Kind::from_mode(mode)
            .filter(|kind| kind.mode_bits() == mode && *kind != Kind::Directory)
            .ok_or_else(|| corrupt(format!("mode {mode:#o} of a link_entry")))?;
        Ok(Self::Link(LinkEntry {
            kind,
            stored: u64_at(bytes, 8),
            link: u64_at(bytes, 16),
        }))
    }

    fn decode_deleted(bytes: &Bytes) -> Result<Self> {
        if bytes.len() != DELETED_BYTES || bytes[1..4] != [0; 3] {
            return Err(corrupt(format!("deleted of {} bytes", bytes.len())));
        }
        let mode = u32_at(bytes, 4);
        let kind = Kind::from_mode(mode)
            .filter(|kind| kind.mode_bits() == mode)
            .filter(|kind| matches!(kind, Kind::Regular | Kind::Directory))
            .ok_or_else(|| corrupt(format!("mode {mode:#o} of a deleted")))?;
        Ok(Self::Deleted(DeletedEntry {
            kind,
            stored: u64_at(bytes, 8),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Record {
        let time = |secs| Time { secs, nanos: 7 };
        Record {
            flags: FLAG_XATTRS,
            mode: 0o120_777,
            uid: 1,
            gid: 2,
            nlink: 3,
            rdev: 4,
            size_bytes: 2,
            blocks: 6,
            salt: 8,
            atime: time(-1),
            mtime: time(10),
            ctime: time(11),
            btime: time(12),
            target: Bytes::from_static(b"/x"),
        }
    }

    #[test]
    fn golden_bytes() {
        let mut want = vec![
            1, 0, 2, 0, 0xff, 0xa1, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0,
        ];
        want.extend([
            2, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0,
            0, 0, 0,
        ]);
        want.extend([0xff; 8]);
        want.extend([
            10, 0, 0, 0, 0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0, 0, 0, 0, 0,
        ]);
        want.extend([7, 0, 0, 0, 7, 0, 0, 0, 7, 0, 0, 0, 7, 0, 0, 0]);
        want.extend(b"/x");
        let bytes = sample().encode(9);
        assert_eq!(bytes, want);
        assert_eq!(
            Entry::decode(&bytes).unwrap(),
            Entry::Inode {
                record: sample(),
                stored: 9
            }
        );

        let link_entry = LinkEntry {
            kind: Kind::Regular,
            stored: 5,
            link: 6,
        };
        let bytes = link_entry.encode();
        assert_eq!(
            bytes[..],
            [
                2, 0, 0, 0, 0, 0x80, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0
            ]
        );
        assert_eq!(Entry::decode(&bytes).unwrap(), Entry::Link(link_entry));

        let deleted = DeletedEntry {
            kind: Kind::Directory,
            stored: 5,
        };
        let bytes = deleted.encode();
        assert_eq!(
            bytes[..],
            [3, 0, 0, 0, 0, 0x40, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(Entry::decode(&bytes).unwrap(), Entry::Deleted(deleted));
    }

    #[test]
    fn damaged_bytes_are_corrupt_and_never_a_panic() {
        let good = sample().encode(9);
        for len in 0..good.len() {
            assert!(
                matches!(
                    Entry::decode(&good.slice(..len)),
                    Err(Error::Corrupt { .. })
                ),
                "{len}"
            );
        }
        for at in [0, 1, 3, 5, 24, 91] {
            let mut bytes = good.to_vec();
            bytes[at] ^= 0xf0;
            assert!(
                matches!(Entry::decode(&bytes.into()), Err(Error::Corrupt { .. })),
                "{at}"
            );
        }
        let link_entry = LinkEntry {
            kind: Kind::Directory,
            stored: 5,
            link: 6,
        }
        .encode();
        assert!(matches!(
            Entry::decode(&link_entry),
            Err(Error::Corrupt { .. })
        ));
        let deleted = DeletedEntry {
            kind: Kind::Symlink,
            stored: 5,
        }
        .encode();
        assert!(matches!(
            Entry::decode(&deleted),
            Err(Error::Corrupt { .. })
        ));
    }
}
