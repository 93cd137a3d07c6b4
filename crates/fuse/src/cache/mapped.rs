//! Files of which the kernel has pages that a program may have mapped.
//!
//! A store into a mapped page reaches the daemon when the kernel writes the page back. The kernel
//! asks the daemon nothing before that. So the daemon may know less of such a file than its readers
//! do:
//!
//! - *Holes.* A page over a hole may have contents. Before the daemon tells where a hole of a file
//!   with holes is, the kernel writes the pages of the file back and drops them.
//! - *Times.* The write-back of a page sets the time of modification. Before a program sets that
//!   time to another one, the kernel writes the pages back and drops them. A store that comes later
//!   reads its page again, and its write-back sets the time again.
//! - *The end.* The last page of a file goes on behind the end of the file, and a mapping may store
//!   there. Those bytes belong to no file, but the kernel takes them for contents when the file
//!   grows over them. So the daemon puts zeros over them before it answers the request that made
//!   the file grow (`cache/tails.rs`).
//!
//! The kernel drops pages before a program writes past them, and Linux before 6.19 does not do so
//! again afterwards. A reader may fill a page in between with the contents before the write. So the
//! daemon has the kernel drop the pages before it answers that write, if any was filled since the
//! last one. The pages up to the end of the file go, since the write may be a part of a longer one.
//!
//! The kernel fills a page by READ, by a buffered write(2), or with prefetched contents. A file
//! without any of these since the kernel came to know it has no page, and needs none of these
//! steps.

use std::collections::HashMap;

use parking_lot::Mutex;
use ramet_fs::Ino;

/// Parts of the set, each with a lock of its own.
const SHARDS: usize = 16;

/// The files of which the kernel has filled pages.
#[derive(Default)]
pub(crate) struct Mapped([Mutex<HashMap<Ino, Pages>>; SHARDS]);

/// The pages of a file.
#[derive(Default)]
struct Pages {
    /// Whether the kernel has written any page back.
    are_written_back: bool,
    /// Whether the kernel has filled pages since a program last wrote past them.
    are_filled: bool,
}

/// Bytes behind the end of a file, up to the end of their page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tail {
    pub(crate) offset: u64,
    end: u64,
}

impl Mapped {
    fn shard(&self, ino: Ino) -> &Mutex<HashMap<Ino, Pages>> {
        let at = usize::try_from(ino.0 % SHARDS as u64).expect("the rest of a small divisor");
        &self.0[at]
    }

    /// The kernel fills a page of the file.
    pub(crate) fn note(&self, ino: Ino) {
        self.shard(ino).lock().entry(ino).or_default().are_filled = true;
    }

    /// A program has written past the pages of the file. Whether the kernel may have filled pages
    /// with older contents since the last such write.
    pub(crate) fn note_passed(&self, ino: Ino) -> bool {
        let mut files = self.shard(ino).lock();
        let pages = files.get_mut(&ino);
        pages.is_some_and(|pages| std::mem::take(&mut pages.are_filled))
    }

    /// The kernel writes a page of the file back.
    pub(crate) fn note_written_back(&self, ino: Ino) {
        let mut files = self.shard(ino).lock();
        files.entry(ino).or_default().are_written_back = true;
    }

    /// The kernel has forgotten the file and its pages.
    pub(crate) fn forget(&self, ino: Ino) {
        self.shard(ino).lock().remove(&ino);
    }

    /// The files that the kernel may have pages of.
    pub(crate) fn files(&self) -> Vec<Ino> {
        let shards = self.0.iter();
        shards
            .flat_map(|shard| shard.lock().keys().copied().collect::<Vec<_>>())
            .collect()
    }

    /// Whether the kernel may have pages of the file.
    pub(crate) fn may_have(&self, ino: Ino) -> bool {
        self.shard(ino).lock().contains_key(&ino)
    }

    /// Whether the kernel has written pages of the file back: a program maps it, and stores into
    /// it.
    pub(crate) fn is_written_back(&self, ino: Ino) -> bool {
        let files = self.shard(ino).lock();
        files.get(&ino).is_some_and(|pages| pages.are_written_back)
    }
}

impl Tail {
    /// The tail of a file of `size_bytes`, in a page of `page_bytes`; `None` if its last page is
    /// full.
    pub(crate) fn of(size_bytes: u64, page_bytes: u64) -> Option<Self> {
        let end = size_bytes.checked_next_multiple_of(page_bytes)?;
        let offset = size_bytes;
        (offset < end).then_some(Self { offset, end })
    }

    /// Whether `start` lies behind the end of the file, in the page of the tail.
    pub(crate) fn is_in_its_page(self, start: u64) -> bool {
        (self.offset..self.end).contains(&start)
    }

    /// Number of its bytes that become contents when the file grows by a write that begins at
    /// `start`.
    pub(crate) fn exposed(self, start: u64) -> usize {
        let bytes = start.min(self.end).saturating_sub(self.offset);
        usize::try_from(bytes).expect("less than a page")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tail_is_exposed_up_to_the_write_and_up_to_its_page() {
        assert_eq!([0, 8192].map(|size| Tail::of(size, 4096)), [None, None]);
        let tail = Tail::of(100, 4096).unwrap();
        let exposed = [0, 100, 101, 4096, 9000].map(|start| tail.exposed(start));
        assert_eq!(exposed, [0, 0, 1, 3996, 3996]);
        let is_in_its_page = [99, 100, 4095, 4096].map(|start| tail.is_in_its_page(start));
        assert_eq!(is_in_its_page, [false, true, true, false]);
        assert_eq!(Tail::of(8192, 65536).unwrap().exposed(9000), 808);
    }

    #[test]
    fn pages_are_stale_if_they_were_filled_since_the_last_write_past_them() {
        let mapped = Mapped::default();
        assert!(!mapped.note_passed(Ino(17)));
        mapped.note(Ino(17));
        assert!(mapped.note_passed(Ino(17)) && !mapped.note_passed(Ino(17)));
        mapped.note_written_back(Ino(17));
        assert!(!mapped.note_passed(Ino(17)));
        mapped.note(Ino(17));
        assert!(mapped.note_passed(Ino(17)) && mapped.is_written_back(Ino(17)));
    }

    #[test]
    fn file_is_known_from_its_first_page_until_it_is_forgotten() {
        let mapped = Mapped::default();
        mapped.note(Ino(17));
        mapped.note(Ino(33));
        mapped.forget(Ino(33));
        assert!(!mapped.is_written_back(Ino(17)));
        mapped.note_written_back(Ino(17));
        mapped.note(Ino(17));
        assert!(mapped.is_written_back(Ino(17)));
        assert_eq!(
            [1, 17, 33].map(|ino| mapped.may_have(Ino(ino))),
            [false, true, false]
        );
    }
}
