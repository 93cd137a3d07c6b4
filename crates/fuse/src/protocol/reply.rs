//! Answers to the kernel, encoded once for both transports.
//!
//! An answer is a header, a short structure, and a body of any length. The structure lies in the
//! answer itself. The body lies in the room that came with the request, or in bytes of its own.

use std::time::Duration;

use ramet_fs::{Attr, BLOCK_BYTES, ROOT_INO, Time};
use rustix::io::Errno;

use super::negotiate::{MISSING_TTL, TTL};
use super::request::{FileHandle, Unique};
use super::{Answer, abi};

/// The longest structure: an entry and its open file.
const STRUCTURE_BYTES_MAX: usize = abi::EntryOut::BYTES + abi::OpenOut::BYTES;

/// The longest front.
const FRONT_BYTES_MAX: usize = abi::OutHeader::BYTES + STRUCTURE_BYTES_MAX;

/// The part of an answer behind the structure.
#[derive(Debug, PartialEq, Eq)]
pub enum Body {
    /// No bytes.
    Empty,
    /// So many bytes at the start of the room that came with the request.
    Room(usize),
    /// These bytes.
    Bytes(Vec<u8>),
}

/// An answer.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    /// 0 or a negative errno.
    error: i32,
    structure: [u8; STRUCTURE_BYTES_MAX],
    structure_bytes: usize,
    body: Body,
}

impl Reply {
    fn new(structure: &[u8], body: Body) -> Self {
        let mut reply = Self {
            error: 0,
            structure: [0; STRUCTURE_BYTES_MAX],
            structure_bytes: structure.len(),
            body,
        };
        reply.structure[..structure.len()].copy_from_slice(structure);
        reply
    }

    /// Success, without data.
    #[must_use]
    pub fn done() -> Self {
        Self::new(&[], Body::Empty)
    }

    /// Failure.
    #[must_use]
    pub fn error(errno: Errno) -> Self {
        Self {
            error: -errno.raw_os_error(),
            ..Self::done()
        }
    }

    /// Whether the answer is a failure.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.error != 0
    }

    /// An entry that was found or made.
    #[must_use]
    pub fn entry(attr: &Attr) -> Self {
        Self::entry_within(attr, TTL)
    }

    /// An entry with its attributes that leads to the object this once.
    #[must_use]
    pub fn passing_entry(attr: &Attr) -> Self {
        let entry = abi::EntryOut {
            entry_valid: 0,
            entry_valid_nsec: 0,
            ..entry_out(attr)
        };
        Self::new(&entry.encode(), Body::Empty)
    }

    /// An entry that the kernel may believe for `ttl`, and its attributes as long.
    #[must_use]
    pub fn entry_within(attr: &Attr, ttl: Duration) -> Self {
        let (secs, nanos) = (ttl.as_secs(), ttl.subsec_nanos());
        let entry = abi::EntryOut {
            entry_valid: secs,
            entry_valid_nsec: nanos,
            attr_valid: secs,
            attr_valid_nsec: nanos,
            ..entry_out(attr)
        };
        Self::new(&entry.encode(), Body::Empty)
    }

    /// A name that does not exist, which the kernel may remember.
    #[must_use]
    pub fn no_entry() -> Self {
        let entry = abi::EntryOut {
            entry_valid: MISSING_TTL.as_secs(),
            entry_valid_nsec: MISSING_TTL.subsec_nanos(),
            ..abi::EntryOut::default()
        };
        Self::new(&entry.encode(), Body::Empty)
    }

    /// Attributes.
    #[must_use]
    pub fn attr(attr: &Attr) -> Self {
        Self::attr_within(attr, TTL)
    }

    /// Attributes that the kernel may believe for `ttl`.
    #[must_use]
    pub fn attr_within(attr: &Attr, ttl: Duration) -> Self {
        let out = abi::AttrOut {
            attr_valid: ttl.as_secs(),
            attr_valid_nsec: ttl.subsec_nanos(),
            padding: 0,
            attr: attr_out(attr),
        };
        Self::new(&out.encode(), Body::Empty)
    }

    /// Attributes with the time of creation, as statx(2) has them.
    #[must_use]
    pub fn statx(attr: &Attr) -> Self {
        Self::statx_within(attr, TTL)
    }

    /// The same attributes, which the kernel may believe for `ttl`.
    #[must_use]
    pub fn statx_within(attr: &Attr, ttl: Duration) -> Self {
        let out = abi::StatxOut {
            attr_valid: ttl.as_secs(),
            attr_valid_nsec: ttl.subsec_nanos(),
            ..statx_out(attr)
        };
        Self::new(&[], Body::Bytes(out.encode().to_vec()))
    }

    /// An open file or directory; `flags` are of [`abi::fopen`].
    #[must_use]
    pub fn opened(fh: FileHandle, flags: u32) -> Self {
        Self::new(&open_out(fh, flags).encode(), Body::Empty)
    }

    /// A new file, open.
    #[must_use]
    pub fn created(attr: &Attr, fh: FileHandle, flags: u32) -> Self {
        let mut structure = [0; STRUCTURE_BYTES_MAX];
        structure[..abi::EntryOut::BYTES].copy_from_slice(&entry_out(attr).encode());
        structure[abi::EntryOut::BYTES..].copy_from_slice(&open_out(fh, flags).encode());
        Self::new(&structure, Body::Empty)
    }

    /// The number of bytes that were written or copied, below 4 GiB.
    #[must_use]
    pub fn written(size: u32) -> Self {
        let out = abi::WriteOut { size, padding: 0 };
        Self::new(&out.encode(), Body::Empty)
    }

    /// The number of bytes that were copied, where the answer has room for more than 4 GiB.
    #[must_use]
    pub fn copied(bytes_copied: u64) -> Self {
        let out = abi::CopyFileRangeOut { bytes_copied };
        Self::new(&out.encode(), Body::Empty)
    }

    /// An offset in a file.
    #[must_use]
    pub fn offset(offset: u64) -> Self {
        Self::new(&abi::LseekOut { offset }.encode(), Body::Empty)
    }

    /// Room of a file system.
    #[must_use]
    pub fn statfs(room: &abi::StatfsOut) -> Self {
        Self::new(&room.encode(), Body::Empty)
    }

    /// The value of an extended attribute or the list of names, for a request with room for `size`
    /// bytes. A size of 0 asks for the length.
    #[must_use]
    pub fn xattr(value: Vec<u8>, size: u32) -> Self {
        match u32::try_from(value.len()) {
            Ok(len) if size == 0 => {
                let out = abi::GetxattrOut {
                    size: len,
                    padding: 0,
                };
                Self::new(&out.encode(), Body::Empty)
            }
            Ok(len) if len <= size => Self::bytes(value),
            _ => Self::error(Errno::RANGE),
        }
    }

    /// The data of an ioctl that has room for `out_bytes`.
    #[must_use]
    pub fn of_ioctl(answer: Answer<Vec<u8>>, out_bytes: usize) -> Self {
        match answer {
            Ok(data) if data.len() > out_bytes => Self::error(Errno::IO),
            Ok(data) => Self::new(&abi::IoctlOut::default().encode(), Body::Bytes(data)),
            Err(errno) => Self::error(errno),
        }
    }

    /// The answer to INIT.
    #[must_use]
    pub fn init(out: &abi::InitOut) -> Self {
        Self::new(&out.encode(), Body::Empty)
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(bytes: Vec<u8>) -> Self {
        Self::new(&[], Body::Bytes(bytes))
    }

    /// So many bytes at the start of the room that came with the request.
    #[must_use]
    pub fn room(bytes: usize) -> Self {
        Self::new(&[], Body::Room(bytes))
    }

    /// The structure, which follows the header.
    #[must_use]
    pub fn structure(&self) -> &[u8] {
        &self.structure[..self.structure_bytes]
    }

    /// The body, which follows the structure.
    #[must_use]
    pub fn body(&self) -> &Body {
        &self.body
    }

    /// Length of the answer without its header, in bytes.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        let body = match &self.body {
            Body::Empty => 0,
            Body::Room(bytes) => *bytes,
            Body::Bytes(bytes) => bytes.len(),
        };
        self.structure_bytes + body
    }

    /// The header, for the answer to request number `unique`.
    ///
    /// # Panics
    /// When the answer is longer than 4 GiB.
    #[must_use]
    pub fn header(&self, unique: Unique) -> [u8; abi::OutHeader::BYTES] {
        let bytes = abi::OutHeader::BYTES + self.payload_bytes();
        let header = abi::OutHeader {
            len: u32::try_from(bytes).expect("an answer is shorter than 4 GiB"),
            error: self.error,
            unique: unique.0,
        };
        header.encode()
    }

    /// The bytes in front of the body, as they are sent: header and structure.
    #[must_use]
    pub fn front(&self, unique: Unique) -> Front {
        let mut bytes = [0; FRONT_BYTES_MAX];
        let (header, structure) = bytes.split_at_mut(abi::OutHeader::BYTES);
        header.copy_from_slice(&self.header(unique));
        structure.copy_from_slice(&self.structure);
        Front {
            bytes,
            len: abi::OutHeader::BYTES + self.structure_bytes,
        }
    }
}

/// The front of an answer, in one piece: the kernel pins the page of each piece that it reads.
pub struct Front {
    bytes: [u8; FRONT_BYTES_MAX],
    len: usize,
}

impl std::ops::Deref for Front {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl From<Answer<()>> for Reply {
    fn from(answer: Answer<()>) -> Self {
        answer.map_or_else(Self::error, |()| Self::done())
    }
}

fn open_out(fh: FileHandle, open_flags: u32) -> abi::OpenOut {
    abi::OpenOut {
        fh: fh.0,
        open_flags,
        backing_id: 0,
    }
}

/// An entry that the kernel may believe for as long as it likes.
pub(super) fn entry_out(attr: &Attr) -> abi::EntryOut {
    abi::EntryOut {
        node: attr.ino.0,
        // The kernel wants none of the root.
        generation: if attr.ino == ROOT_INO {
            0
        } else {
            attr.generation
        },
        entry_valid: TTL.as_secs(),
        attr_valid: TTL.as_secs(),
        entry_valid_nsec: TTL.subsec_nanos(),
        attr_valid_nsec: TTL.subsec_nanos(),
        attr: attr_out(attr),
    }
}

fn attr_out(attr: &Attr) -> abi::Attr {
    abi::Attr {
        ino: attr.ino.0,
        size: attr.size_bytes,
        blocks: attr.sectors,
        atime: attr.atime.secs,
        mtime: attr.mtime.secs,
        ctime: attr.ctime.secs,
        atimensec: attr.atime.nanos,
        mtimensec: attr.mtime.nanos,
        ctimensec: attr.ctime.nanos,
        mode: u32::from(attr.perm) | attr.kind.mode_bits(),
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: u32::try_from(BLOCK_BYTES).expect("a few kilobytes"),
        flags: 0,
    }
}

fn statx_out(attr: &Attr) -> abi::StatxOut {
    let basic = attr_out(attr);
    let time = |time: Time| abi::SxTime {
        sec: time.secs,
        nsec: time.nanos,
        reserved: 0,
    };
    let dev = u64::from(attr.rdev);
    abi::StatxOut {
        stat: abi::Statx {
            mask: abi::statx::BASIC_STATS | abi::statx::BTIME,
            blksize: basic.blksize,
            nlink: basic.nlink,
            uid: basic.uid,
            gid: basic.gid,
            mode: u16::try_from(basic.mode).expect("the type and twelve bits"),
            ino: basic.ino,
            size: basic.size,
            blocks: basic.blocks,
            atime: time(attr.atime),
            btime: time(attr.btime),
            ctime: time(attr.ctime),
            mtime: time(attr.mtime),
            rdev_major: rustix::fs::major(dev),
            rdev_minor: rustix::fs::minor(dev),
            ..abi::Statx::default()
        },
        ..abi::StatxOut::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_tells_its_length_and_an_error_is_negative() {
        let reply = Reply::of_ioctl(Ok(vec![1, 2, 3]), 3);
        assert_eq!((reply.structure().len(), reply.payload_bytes()), (16, 19));
        let header = abi::OutHeader::decode(&reply.header(Unique(9))).unwrap();
        let expected = abi::OutHeader {
            len: 35,
            error: 0,
            unique: 9,
        };
        assert_eq!(header, expected);
        let header = Reply::error(Errno::NOENT).header(Unique(9));
        let header = abi::OutHeader::decode(&header).unwrap();
        assert_eq!((header.len, header.error), (16, -2));
    }

    #[test]
    fn the_front_of_an_answer_is_header_and_structure() {
        let structure: [u8; STRUCTURE_BYTES_MAX] =
            std::array::from_fn(|at| u8::try_from(at).expect("below 256"));
        for len in [0, 16, STRUCTURE_BYTES_MAX] {
            let reply = Reply::new(&structure[..len], Body::Empty);
            let front = [&reply.header(Unique(9))[..], &structure[..len]].concat();
            assert_eq!(reply.front(Unique(9))[..], front);
        }
    }

    #[test]
    fn an_xattr_is_measured_given_or_too_long() {
        let value = || b"value".to_vec();
        assert_eq!(
            Reply::xattr(value(), 0).structure(),
            [5, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(Reply::xattr(value(), 5).body(), &Body::Bytes(value()));
        assert_eq!(Reply::xattr(value(), 4), Reply::error(Errno::RANGE));
        assert_eq!(Reply::of_ioctl(Ok(value()), 4), Reply::error(Errno::IO));
    }
}
