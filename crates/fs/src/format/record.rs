//! Entries of a directory as they are stored: an inode record, a link entry that names a shared
//! inode, or a deleted entry.
//!
//! Little-endian. An inode record:
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
//!     24    8 size in bytes; of a symbolic link the length of the target; of a directory the next
//!             slot
//!     32    8 blocks: allocated 4 KiB blocks of a sparse file
//!     40    8 slot: of the name in its directory, of a shared inode in its clone root
//!     48    8 birth: a generation, see `docs/fs.md`
//!     56   32 seconds of atime, mtime, ctime, btime (signed)
//!     88   16 nanoseconds of the same
//!    104      with the flag for it: the pin
//!             with the flag for it, 8 bytes: number of the note up to which links are counted
//!             target of a symbolic link
//! ```
//!
//! A pin is a number and its generation, and the number and generation of the directory or clone
//! root in which it counts: four ordered numbers (`ordered.rs`). Anywhere else, as in a clone, it
//! says nothing.
//!
//! A link entry is 24 bytes: tag 2, 1 with a pin or 0, two reserved zeros, the type bits of the
//! mode (4), slot (8), the link number of the shared inode (8); then the pin of the shared inode, if
//! it has one.
//!
//! A deleted entry is 16 bytes: tag 3, 1 with a pin or 0, two reserved zeros, the type bits of the
//! mode (4), slot (8); then the pin, if there is one. The name does not exist any more, and the contents of
//! the object are still there: see `ops/deferred_delete.rs`.

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::ino::Identity;
use crate::format::ordered::{push_identity, take_identity};
use crate::format::slots::{SLOTS_WITHOUT_INDEX, Slot};

/// Size of an inode record without pin and target of a symbolic link.
pub(crate) const RECORD_BYTES: usize = 104;
const LINK_BYTES: usize = 24;
const DELETED_BYTES: usize = 16;
const PIN_BYTES_MAX: usize = 36;
const TAG_INODE: u8 = 1;
const TAG_LINK: u8 = 2;
const TAG_DELETED: u8 = 3;
/// Longest target of a symbolic link, in bytes.
pub const TARGET_BYTES_MAX: usize = 4095;

/// The type bits of a mode.
pub(crate) const S_IFMT: u32 = 0o170_000;
/// Set user id on execution.
pub(crate) const S_ISUID: u32 = 0o4000;
/// Set group id on execution; on a directory, entries inherit its group.
pub(crate) const S_ISGID: u32 = 0o2000;
/// On a directory, only owners remove entries.
pub(crate) const S_ISVTX: u32 = 0o1000;

/// The attribute with the capabilities that a program gets when it is executed.
pub(crate) const CAPABILITY: &[u8] = b"security.capability";

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
/// The number of the object was given in another directory.
const FLAG_PINNED: u16 = 1024;
/// A note of the clone root is not newer than the link count of the shared inode.
const FLAG_COUNTED: u16 = 2048;
/// The directory is a clone root that is being joined: shared inodes that it does not have are those
/// of the clone root around it.
pub(crate) const FLAG_JOINING: u16 = 4096;
const FLAGS_KNOWN: u16 = 8183;

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time {
    /// Seconds since 1970.
    pub secs: i64,
    /// Nanoseconds, below 10^9.
    pub nanos: u32,
}

/// The number that an inode keeps in a place where its slot would give another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pin {
    pub(crate) identity: Identity,
    /// The directory or clone root in which the pin counts.
    pub(crate) home: Identity,
}

impl Pin {
    fn put(self, out: &mut Vec<u8>) {
        push_identity(out, self.identity);
        push_identity(out, self.home);
    }

    /// Reads a pin, and steps over it.
    fn take(bytes: &mut &[u8]) -> Result<Self> {
        let both = take_identity(bytes).zip(take_identity(bytes));
        let (identity, home) = both.ok_or_else(|| corrupt("a pin that is none"))?;
        Ok(Self { identity, home })
    }
}

/// An inode without its number, which follows from its directory, its slot and its pin.
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
    /// The next slot of a directory.
    pub(crate) next_slot: u64,
    pub(crate) slot: Slot,
    /// Generation when the object got this slot.
    pub(crate) birth: u64,
    pub(crate) pin: Option<Pin>,
    /// Of a shared inode: the note of its clone root up to which `nlink` is right
    /// (`namespace/link_counts.rs`); 0 for none.
    pub(crate) counted: u64,
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
            next_slot: 0,
            slot: Slot(0),
            birth: 0,
            pin: None,
            counted: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            target: Bytes::new(),
        }
    }

    /// The record of the root directory, from the value at its key.
    ///
    /// # Errors
    /// `Corrupt` for any other value, and for none.
    pub(crate) fn of_root(value: Option<Bytes>) -> Result<Self> {
        let corrupt = |detail| Error::Corrupt {
            what: "record of the root",
            detail,
        };
        let value = value.ok_or_else(|| corrupt("missing".to_owned()))?;
        match Entry::decode(&value)? {
            Entry::Inode(record)
                if record.kind() == Kind::Directory && record.has(FLAG_CLONE_ROOT) =>
            {
                Ok(record)
            }
            other => Err(corrupt(format!("{other:?}"))),
        }
    }

    /// The kind. The decoder has checked the mode.
    pub(crate) fn kind(&self) -> Kind {
        Kind::from_mode(self.mode).expect("records are made, and decoded, with the mode of a kind")
    }

    /// Of a directory: whether the slot index leads to each entry.
    pub(crate) fn has_slot_index(&self) -> bool {
        self.next_slot > SLOTS_WITHOUT_INDEX
    }

    /// Of a directory: whether the slot index is made. It may lack entries, and has no wrong ones.
    pub(crate) fn is_being_indexed(&self) -> bool {
        self.next_slot == SLOTS_WITHOUT_INDEX
    }

    /// Of a directory: whether the slot index may have keys.
    pub(crate) fn may_be_indexed(&self) -> bool {
        self.next_slot >= SLOTS_WITHOUT_INDEX
    }

    /// Whether all of these flags are set.
    pub(crate) fn has(&self, flags: u16) -> bool {
        self.flags & flags == flags
    }

    /// The bytes of the record.
    pub(crate) fn encode(&self) -> Bytes {
        let room = pin_room(self.pin) + if self.counted == 0 { 0 } else { 8 };
        let mut out = Vec::with_capacity(RECORD_BYTES + room + self.target.len());
        let pinned = if self.pin.is_some() { FLAG_PINNED } else { 0 };
        let counted = if self.counted == 0 { 0 } else { FLAG_COUNTED };
        let size = match self.kind() {
            Kind::Directory => self.next_slot,
            _ => self.size_bytes,
        };
        out.extend_from_slice(&[TAG_INODE, 0]);
        out.extend_from_slice(&(self.flags | pinned | counted).to_le_bytes());
        for field in [self.mode, self.uid, self.gid, self.nlink, self.rdev] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        for field in [size, self.blocks, self.slot.0, self.birth] {
            out.extend_from_slice(&field.to_le_bytes());
        }
        let times = [self.atime, self.mtime, self.ctime, self.btime];
        for time in times {
            out.extend_from_slice(&time.secs.to_le_bytes());
        }
        for time in times {
            out.extend_from_slice(&time.nanos.to_le_bytes());
        }
        if let Some(pin) = self.pin {
            pin.put(&mut out);
        }
        if self.counted != 0 {
            out.extend_from_slice(&self.counted.to_le_bytes());
        }
        out.extend_from_slice(&self.target);
        out.into()
    }
}

/// An entry, decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// The entry is the inode itself.
    Inode(Record),
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
    pub(crate) slot: Slot,
    pub(crate) pin: Option<Pin>,
}

impl DeletedEntry {
    pub(crate) fn encode(self) -> Bytes {
        let mut out = Vec::with_capacity(DELETED_BYTES + pin_room(self.pin));
        out.extend_from_slice(&[TAG_DELETED, u8::from(self.pin.is_some()), 0, 0]);
        out.extend_from_slice(&self.kind.mode_bits().to_le_bytes());
        out.extend_from_slice(&self.slot.0.to_le_bytes());
        if let Some(pin) = self.pin {
            pin.put(&mut out);
        }
        out.into()
    }
}

/// One name of a file with several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkEntry {
    /// Kind of the shared inode.
    pub(crate) kind: Kind,
    /// Slot of the name.
    pub(crate) slot: Slot,
    /// Number of the shared inode in its clone root.
    pub(crate) link: u64,
    /// Pin of the shared inode.
    pub(crate) pin: Option<Pin>,
}

impl LinkEntry {
    pub(crate) fn encode(self) -> Bytes {
        let mut out = Vec::with_capacity(LINK_BYTES + pin_room(self.pin));
        out.extend_from_slice(&[TAG_LINK, u8::from(self.pin.is_some()), 0, 0]);
        out.extend_from_slice(&self.kind.mode_bits().to_le_bytes());
        out.extend_from_slice(&self.slot.0.to_le_bytes());
        out.extend_from_slice(&self.link.to_le_bytes());
        if let Some(pin) = self.pin {
            pin.put(&mut out);
        }
        out.into()
    }
}

/// Room for a pin. Most records have none, and take no more than they need then: many of them wait in
/// memory.
fn pin_room(pin: Option<Pin>) -> usize {
    pin.map_or(0, |_| PIN_BYTES_MAX)
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

/// Reads the number of a note, which is not 0, and steps over it.
fn take_counted(bytes: &mut &[u8]) -> Result<u64> {
    let (number, rest) = bytes
        .split_first_chunk()
        .ok_or_else(|| corrupt("a note that is none"))?;
    *bytes = rest;
    match u64::from_le_bytes(*number) {
        0 => Err(corrupt("a note without a number")),
        number => Ok(number),
    }
}

/// The pin of a link entry or deleted entry, which has `len` bytes without it.
fn name_pin(bytes: &[u8], len: usize) -> Result<Option<Pin>> {
    if bytes.len() < len || bytes[1] > 1 || bytes[2..4] != [0; 2] {
        return Err(corrupt(format!("a name of {} bytes", bytes.len())));
    }
    let mut rest = &bytes[len..];
    let pin = match bytes[1] {
        0 => None,
        _ => Some(Pin::take(&mut rest)?),
    };
    match rest {
        [] => Ok(pin),
        rest => Err(corrupt(format!("a name with {} bytes more", rest.len()))),
    }
}

impl Entry {
    /// Slot of the name.
    pub(crate) fn slot(&self) -> Slot {
        match self {
            Self::Inode(record) => record.slot,
            Self::Link(link_entry) => link_entry.slot,
            Self::Deleted(deleted) => deleted.slot,
        }
    }

    /// The slot of an entry that `decode` accepts.
    ///
    /// # Errors
    /// `Corrupt` for bytes that are too short.
    pub(crate) fn slot_of(bytes: &[u8]) -> Result<Slot> {
        let at = if bytes.first() == Some(&TAG_INODE) {
            40
        } else {
            8
        };
        if bytes.len() < at + 8 {
            return Err(corrupt(format!("{} bytes", bytes.len())));
        }
        Ok(Slot(u64_at(bytes, at)))
    }

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
        let (size_bytes, next_slot) = match kind {
            Kind::Directory => (0, u64_at(bytes, 24)),
            _ => (u64_at(bytes, 24), 0),
        };
        let mut rest = &bytes[RECORD_BYTES..];
        let pin = match flags & FLAG_PINNED {
            0 => None,
            _ => Some(Pin::take(&mut rest)?),
        };
        let counted = match flags & FLAG_COUNTED {
            0 => 0,
            _ => take_counted(&mut rest)?,
        };
        // The target is copied: a slice would keep the block that the record came from in memory.
        let target = Bytes::copy_from_slice(rest);
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
            flags: flags & !(FLAG_PINNED | FLAG_COUNTED),
            mode,
            uid: u32_at(bytes, 8),
            gid: u32_at(bytes, 12),
            nlink: u32_at(bytes, 16),
            rdev: u32_at(bytes, 20),
            size_bytes,
            blocks: u64_at(bytes, 32),
            next_slot,
            slot: Slot(u64_at(bytes, 40)),
            birth: u64_at(bytes, 48),
            pin,
            counted,
            atime: time(0)?,
            mtime: time(1)?,
            ctime: time(2)?,
            btime: time(3)?,
            target,
        };
        Ok(Self::Inode(record))
    }

    fn decode_link(bytes: &Bytes) -> Result<Self> {
        let pin = name_pin(bytes, LINK_BYTES)?;
        let mode = u32_at(bytes, 4);
        let kind = Kind::from_mode(mode)
            .filter(|kind| kind.mode_bits() == mode && *kind != Kind::Directory)
            .ok_or_else(|| corrupt(format!("mode {mode:#o} of a link_entry")))?;
        Ok(Self::Link(LinkEntry {
            kind,
            slot: Slot(u64_at(bytes, 8)),
            link: u64_at(bytes, 16),
            pin,
        }))
    }

    fn decode_deleted(bytes: &Bytes) -> Result<Self> {
        let pin = name_pin(bytes, DELETED_BYTES)?;
        let mode = u32_at(bytes, 4);
        let kind = Kind::from_mode(mode)
            .filter(|kind| kind.mode_bits() == mode)
            .filter(|kind| matches!(kind, Kind::Regular | Kind::Directory))
            .ok_or_else(|| corrupt(format!("mode {mode:#o} of a deleted")))?;
        Ok(Self::Deleted(DeletedEntry {
            kind,
            slot: Slot(u64_at(bytes, 8)),
            pin,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::ino::Ino;

    /// The pin of the tests, as it is stored.
    const PIN: [u8; 8] = [1, 21, 1, 22, 1, 23, 1, 24];

    fn pin() -> Pin {
        let identity = |ino, generation| Identity {
            ino: Ino(ino),
            generation,
        };
        Pin {
            identity: identity(21, 22),
            home: identity(23, 24),
        }
    }

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
            next_slot: 0,
            slot: Slot(9),
            birth: 8,
            pin: None,
            counted: 0,
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
        let bytes = sample().encode();
        assert_eq!(bytes, want);
        assert_eq!(Entry::decode(&bytes).unwrap(), Entry::Inode(sample()));

        let pinned = Record {
            pin: Some(pin()),
            ..sample()
        };
        want[3] = 4;
        want.splice(104..104, PIN);
        let bytes = pinned.encode();
        assert_eq!(bytes, want);
        assert_eq!(Entry::decode(&bytes).unwrap(), Entry::Inode(pinned.clone()));

        let counted = Record {
            counted: 0x0102,
            ..pinned
        };
        want[3] = 12;
        want.splice(112..112, [2, 1, 0, 0, 0, 0, 0, 0]);
        let bytes = counted.encode();
        assert_eq!(bytes, want);
        assert_eq!(Entry::decode(&bytes).unwrap(), Entry::Inode(counted));
    }

    #[test]
    fn golden_bytes_of_a_directory_hold_the_next_slot() {
        let directory = Record {
            mode: 0o40_755,
            next_slot: 0x0102,
            target: Bytes::new(),
            size_bytes: 0,
            ..sample()
        };
        let bytes = directory.encode();
        assert_eq!(
            (bytes.len(), &bytes[24..32]),
            (104, &[2, 1, 0, 0, 0, 0, 0, 0][..])
        );
        assert_eq!(Entry::decode(&bytes).unwrap(), Entry::Inode(directory));
    }

    #[test]
    fn golden_bytes_of_names() {
        let link_entry = LinkEntry {
            kind: Kind::Regular,
            slot: Slot(5),
            link: 6,
            pin: None,
        };
        let bytes = link_entry.encode();
        assert_eq!(
            bytes[..],
            [
                2, 0, 0, 0, 0, 0x80, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0
            ]
        );
        assert_eq!(Entry::decode(&bytes).unwrap(), Entry::Link(link_entry));
        let pinned = LinkEntry {
            pin: Some(pin()),
            ..link_entry
        };
        let bytes = pinned.encode();
        assert_eq!((bytes[1], &bytes[24..]), (1, &PIN[..]));
        assert_eq!(Entry::decode(&bytes).unwrap(), Entry::Link(pinned));

        let deleted = DeletedEntry {
            kind: Kind::Directory,
            slot: Slot(5),
            pin: None,
        };
        let bytes = deleted.encode();
        assert_eq!(
            bytes[..],
            [3, 0, 0, 0, 0, 0x40, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(Entry::decode(&bytes).unwrap(), Entry::Deleted(deleted));
        let pinned = DeletedEntry {
            pin: Some(pin()),
            ..deleted
        };
        let bytes = pinned.encode();
        assert_eq!((bytes[1], &bytes[16..]), (1, &PIN[..]));
        assert_eq!(Entry::decode(&bytes).unwrap(), Entry::Deleted(pinned));
    }

    #[test]
    fn damaged_bytes_are_corrupt_and_never_a_panic() {
        let good = sample().encode();
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
            slot: Slot(5),
            link: 6,
            pin: None,
        }
        .encode();
        assert!(matches!(
            Entry::decode(&link_entry),
            Err(Error::Corrupt { .. })
        ));
        let deleted = DeletedEntry {
            kind: Kind::Symlink,
            slot: Slot(5),
            pin: None,
        }
        .encode();
        assert!(matches!(
            Entry::decode(&deleted),
            Err(Error::Corrupt { .. })
        ));
    }
}
