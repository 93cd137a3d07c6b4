//! Entries of a directory, in the form that the kernel reads.

use ramet_fs::{Attr, DirEntry};

use super::abi::{self, Field};
use super::reply::entry_out;

/// Entries behind each other, in the room of a READDIR or a READDIRPLUS.
pub struct Dirents<'a> {
    room: &'a mut [u8],
    len: usize,
}

impl<'a> Dirents<'a> {
    /// No entries yet.
    #[must_use]
    pub fn new(room: &'a mut [u8]) -> Self {
        Self { room, len: 0 }
    }

    /// Bytes written.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no entry was written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds an entry to the answer to READDIR, if there is room.
    pub fn push(&mut self, entry: &DirEntry) -> bool {
        self.put(&dirent(entry), &entry.name)
    }

    /// Adds an entry to the answer to READDIRPLUS, if there is room. An entry without attributes
    /// tells the kernel name, number and kind only, and the kernel looks it up when it needs more.
    pub fn push_plus(&mut self, entry: &DirEntry, attr: Option<&Attr>) -> bool {
        let plus = abi::Direntplus {
            entry: attr.map(entry_out).unwrap_or_default(),
            dirent: dirent(entry),
        };
        self.put(&plus, &entry.name)
    }

    fn put<T: Field>(&mut self, structure: &T, name: &[u8]) -> bool {
        let end = T::BYTES + name.len();
        let bytes = end.next_multiple_of(abi::ALIGN_BYTES);
        let Some(to) = self.room.get_mut(self.len..self.len + bytes) else {
            return false;
        };
        structure.put(to);
        to[T::BYTES..end].copy_from_slice(name);
        to[end..].fill(0);
        self.len += bytes;
        true
    }
}

fn dirent(entry: &DirEntry) -> abi::Dirent {
    abi::Dirent {
        ino: entry.ino.0,
        off: entry.cookie,
        namelen: u32::try_from(entry.name.len()).expect("a name is short"),
        kind: entry.kind.mode_bits() >> 12,
    }
}

#[cfg(test)]
mod tests {
    use ramet_fs::{Ino, Kind, Time};

    use super::*;
    use crate::protocol::negotiate::TTL;

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
            generation: 0,
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
    fn entries_with_attributes_lie_as_the_kernel_reads_them() {
        let mut room = [0xff; 400];
        let mut entries = Dirents::new(&mut room);
        assert!(entries.push_plus(&entry(b"name"), Some(&attr())));
        assert!(entries.push_plus(&entry(b"12345678"), None));
        assert!(!entries.push_plus(&entry(b"1"), None), "no room");
        assert_eq!(entries.len(), 160 + 160);
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
        // Node 0 tells the kernel that the entry comes without attributes.
        assert!(room[160..288].iter().all(|byte| *byte == 0));
        assert_eq!([288, 296].map(long), [0x1122, 9]);
        assert_eq!([304, 308].map(word), [8, 10]);
        assert_eq!(&room[312..320], b"12345678");
        assert!(room[320..].iter().all(|byte| *byte == 0xff));
    }

    #[test]
    fn entries_without_attributes_are_short() {
        let mut room = [0xff; 60];
        let mut entries = Dirents::new(&mut room);
        assert!(entries.push(&entry(b"name")));
        assert!(!entries.push(&entry(b"123")), "28 bytes are left");
        assert_eq!(entries.len(), 32);
        let word = |at: usize| u32::from_ne_bytes(room[at..at + 4].try_into().unwrap());
        assert_eq!([0, 8, 16, 20].map(word), [0x1122, 9, 4, 10]);
        assert_eq!(&room[24..33], b"name\0\0\0\0\xff");
    }
}
