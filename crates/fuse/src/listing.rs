//! Answers to READDIRPLUS, written where the kernel takes them from.

use ramet_fs::{Attr, BLOCK_BYTES, DirEntry};

use crate::terms::{GENERATION, TTL};

/// Bytes of `struct fuse_entry_out`.
const ENTRY_BYTES: usize = 128;
/// Bytes of `struct fuse_dirent` without the name.
const DIRENT_BYTES: usize = 24;
/// Where the next entry begins: multiples of this, in bytes.
const ALIGN: usize = 8;

/// The fields of a READDIRPLUS request (`struct fuse_read_in`) that matter here.
pub(crate) struct ListingIn {
    pub(crate) fh: u64,
    /// Cookie of the last entry that came.
    pub(crate) offset: u64,
    /// Room for the answer.
    pub(crate) bytes: usize,
}

impl ListingIn {
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            fh: u64::from_ne_bytes(bytes.get(..8)?.try_into().ok()?),
            offset: u64::from_ne_bytes(bytes.get(8..16)?.try_into().ok()?),
            bytes: usize::try_from(u32::from_ne_bytes(bytes.get(16..20)?.try_into().ok()?)).ok()?,
        })
    }
}

/// Entries of a directory, one behind the other (`struct fuse_direntplus`).
pub(crate) struct Listing<'a> {
    room: &'a mut [u8],
    len: usize,
}

impl<'a> Listing<'a> {
    pub(crate) fn new(room: &'a mut [u8]) -> Self {
        Self { room, len: 0 }
    }

    /// Bytes written.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds an entry, if there is room. Without attributes the kernel takes its name, number and kind only, and looks it up when somebody asks for more.
    pub(crate) fn push(&mut self, entry: &DirEntry, attr: Option<&Attr>) -> bool {
        let name_at = ENTRY_BYTES + DIRENT_BYTES;
        let bytes = (name_at + entry.name.len()).next_multiple_of(ALIGN);
        let Some(to) = self.room.get_mut(self.len..self.len + bytes) else {
            return false;
        };
        to.fill(0);
        if let Some(attr) = attr {
            put_attributes(&mut to[..ENTRY_BYTES], attr);
        }
        let mut dirent = Fields(&mut to[ENTRY_BYTES..]);
        dirent.long(entry.ino.0);
        dirent.long(entry.cookie);
        dirent.word(u32::try_from(entry.name.len()).expect("a name is short"));
        dirent.word(entry.kind.mode_bits() >> 12);
        to[name_at..name_at + entry.name.len()].copy_from_slice(&entry.name);
        self.len += bytes;
        true
    }
}

/// As `struct fuse_entry_out` has them.
fn put_attributes(to: &mut [u8], attr: &Attr) {
    let times = [attr.atime, attr.mtime, attr.ctime];
    let mut out = Fields(to);
    out.long(attr.ino.0);
    out.long(GENERATION);
    // How long the name and the attributes may be believed.
    out.long(TTL.as_secs());
    out.long(TTL.as_secs());
    out.word(TTL.subsec_nanos());
    out.word(TTL.subsec_nanos());
    out.long(attr.ino.0);
    out.long(attr.size_bytes);
    out.long(attr.sectors);
    for time in times {
        // Signed in the file system and in the kernel.
        out.long(time.secs.cast_unsigned());
    }
    for time in times {
        out.word(time.nanos);
    }
    out.word(u32::from(attr.perm) | attr.kind.mode_bits());
    out.word(attr.nlink);
    out.word(attr.uid);
    out.word(attr.gid);
    out.word(attr.rdev);
    out.word(u32::try_from(BLOCK_BYTES).expect("a few kilobytes"));
}

/// Fields of a structure that are still to be written, in the order of this machine.
struct Fields<'a>(&'a mut [u8]);

impl Fields<'_> {
    fn long(&mut self, value: u64) {
        self.put(&value.to_ne_bytes());
    }

    fn word(&mut self, value: u32) {
        self.put(&value.to_ne_bytes());
    }

    fn put(&mut self, bytes: &[u8]) {
        let (field, rest) = std::mem::take(&mut self.0).split_at_mut(bytes.len());
        field.copy_from_slice(bytes);
        self.0 = rest;
    }
}

#[cfg(test)]
mod tests {
    use ramet_fs::{Ino, Kind, Time};

    use super::*;

    fn entry(name: &'static [u8]) -> DirEntry {
        DirEntry {
            ino: Ino(0x1122),
            kind: Kind::Symlink,
            name: name.into(),
            cookie: 9,
        }
    }

    fn attr() -> Attr {
        let time = |secs| Time { secs, nanos: 5 };
        Attr {
            ino: Ino(0x1122),
            kind: Kind::Symlink,
            perm: 0o1751,
            nlink: 3,
            uid: 4,
            gid: 6,
            rdev: 7,
            size_bytes: 0x33,
            sectors: 8,
            atime: time(-1),
            mtime: time(2),
            ctime: time(1),
            btime: time(0),
        }
    }

    #[test]
    fn entries_lie_as_the_kernel_reads_them() {
        let mut room = [0xff; 400];
        let mut listing = Listing::new(&mut room);
        assert!(listing.push(&entry(b"name"), Some(&attr())));
        assert!(listing.push(&entry(b"12345678"), None));
        assert!(!listing.push(&entry(b"1"), None), "no room");
        assert_eq!(listing.len(), 160 + 160);
        let word = |at: usize| u32::from_ne_bytes(room[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_ne_bytes(room[at..at + 8].try_into().unwrap());
        let ttl = TTL.as_secs();
        let longs = [0, 8, 16, 24, 40, 48, 56, 64, 72, 80].map(long);
        let expected = [0x1122, 0, ttl, ttl, 0x1122, 0x33, 8, u64::MAX, 2, 1];
        assert_eq!(longs, expected);
        let words = [32, 36, 88, 92, 96, 100, 104, 108, 112, 116, 120, 124].map(word);
        let mode = 0o121_751;
        assert_eq!(words, [0, 0, 5, 5, 5, mode, 3, 4, 6, 7, 4096, 0]);
        assert_eq!([128, 136].map(long), [0x1122, 9]);
        assert_eq!([144, 148].map(word), [4, 10]);
        assert_eq!(&room[152..160], b"name\0\0\0\0");
        // Node 0: the kernel is told of no attributes.
        assert!(room[160..288].iter().all(|byte| *byte == 0));
        assert_eq!([288, 296].map(long), [0x1122, 9]);
        assert_eq!([304, 308].map(word), [8, 10]);
        assert_eq!(&room[312..320], b"12345678");
        assert!(room[320..].iter().all(|byte| *byte == 0xff));
    }
}
