//! Notifications: messages that a server sends the kernel by itself, as headers.
//!
//! A notification is written to `/dev/fuse` in one call, as an answer is. Names end with a zero.

use ramet_fs::Ino;

use super::abi::{self, Field, OutHeader, notify};

/// The longest notification without its name or data.
const BYTES_MAX: usize = OutHeader::BYTES + abi::RetrieveOut::BYTES;

/// A notification without the name or the data that follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notification {
    bytes: [u8; BYTES_MAX],
    len: usize,
}

impl Notification {
    /// Bytes of the notification; `following` more come behind them.
    fn new<T: Field>(kind: i32, structure: &T, following: usize) -> Self {
        let len = OutHeader::BYTES + T::BYTES;
        let mut bytes = [0; BYTES_MAX];
        let header = OutHeader {
            len: length(len + following),
            error: kind,
            unique: 0,
        };
        header.put(&mut bytes);
        structure.put(&mut bytes[OutHeader::BYTES..]);
        Self { bytes, len }
    }

    /// The kernel's entry for `name` in `dir` is out of date. The name and a zero follow.
    #[must_use]
    pub fn inval_entry(dir: Ino, name: &[u8]) -> Self {
        let out = abi::InvalEntryOut {
            parent: dir.0,
            namelen: length(name.len()),
            flags: 0,
        };
        Self::new(notify::INVAL_ENTRY, &out, name.len() + 1)
    }

    /// The attributes of an inode are out of date; its pages are not.
    #[must_use]
    pub fn inval_attributes(ino: Ino) -> Self {
        let out = abi::InvalInodeOut {
            ino: ino.0,
            off: -1,
            len: 0,
        };
        Self::new(notify::INVAL_INODE, &out, 0)
    }

    /// The attributes of an inode and the pages of `len` bytes from `offset` on are out of date; a
    /// length of 0 means up to the end.
    #[must_use]
    pub fn inval_pages(ino: Ino, offset: i64, len: i64) -> Self {
        let out = abi::InvalInodeOut {
            ino: ino.0,
            off: offset,
            len,
        };
        Self::new(notify::INVAL_INODE, &out, 0)
    }

    /// Contents of a file from `offset` on, which follow: `len` bytes.
    #[must_use]
    pub fn store(ino: Ino, offset: u64, len: usize) -> Self {
        let out = abi::StoreOut {
            node: ino.0,
            offset,
            size: length(len),
            padding: 0,
        };
        Self::new(notify::STORE, &out, len)
    }

    /// `name` in `dir`, which led to `child`, was removed, and watchers of `child` hear of it. The
    /// name and a zero follow.
    #[must_use]
    pub fn delete(dir: Ino, child: Ino, name: &[u8]) -> Self {
        let out = abi::DeleteOut {
            parent: dir.0,
            child: child.0,
            namelen: length(name.len()),
            padding: 0,
        };
        Self::new(notify::DELETE, &out, name.len() + 1)
    }

    /// All names that the kernel knows are out of date (Linux 6.16).
    #[must_use]
    pub fn inc_epoch() -> Self {
        Self::new::<[u32; 0]>(notify::INC_EPOCH, &[], 0)
    }

    /// The kernel should forget `count` inodes that no program uses (Linux 6.18). Their node ids, 8
    /// bytes each, follow.
    #[must_use]
    pub fn prune(count: usize) -> Self {
        let out = abi::PruneOut {
            count: length(count),
            ..abi::PruneOut::default()
        };
        Self::new(notify::PRUNE, &out, count * u64::BYTES)
    }

    /// The bytes before the name or the data.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("a notification is shorter than 4 GiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(notification: &Notification) -> Vec<u32> {
        let chunks = notification.as_bytes().chunks(4);
        let word = |word: &[u8]| u32::from_ne_bytes(word.try_into().unwrap());
        chunks.map(word).collect()
    }

    #[test]
    fn notifications_lie_as_the_kernel_reads_them() {
        let ino = Ino(0x0011_2233_4455);
        let store = Notification::store(ino, 5, 200);
        let number = ino.0.to_ne_bytes();
        let half = |at: usize| u32::from_ne_bytes(number[at..at + 4].try_into().unwrap());
        let expected = [240, 4, 0, 0, half(0), half(4), 5, 0, 200, 0];
        assert_eq!(words(&store), expected);

        let entry = Notification::inval_entry(Ino(7), b"name");
        assert_eq!(words(&entry), [16 + 16 + 5, 3, 0, 0, 7, 0, 4, 0]);

        let attributes = Notification::inval_attributes(Ino(7));
        let max = u32::MAX;
        assert_eq!(words(&attributes), [40, 2, 0, 0, 7, 0, max, max, 0, 0]);

        assert_eq!(words(&Notification::inc_epoch()), [16, 8, 0, 0]);
        assert_eq!(words(&Notification::prune(2)), [48, 9, 0, 0, 2, 0, 0, 0]);
        let delete = Notification::delete(Ino(7), Ino(8), b"n");
        assert_eq!(words(&delete), [16 + 24 + 2, 6, 0, 0, 7, 0, 8, 0, 1, 0]);
    }
}
