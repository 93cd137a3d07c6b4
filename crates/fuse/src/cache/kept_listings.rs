//! Directories whose listings the kernel may keep.
//!
//! The kernel opens directories without a request and keeps their listings for ever. It drops a
//! listing by itself when a program changes the directory through it. When the server changes a
//! directory, by a clone, a removal or an import, the kernel must be told to drop the listing, even
//! if it never heard of the name that came or went. It does so when the first page of the listing
//! is gone.
//!
//! **Nothing is missed.** An answer to READDIR notes the directory and then reads the tree. The
//! server changes the tree and then looks here. So if the answer has the entries of before, the
//! change finds the directory noted.
//!
//! **An answer may be on its way.** The kernel puts the entries of an answer into the listing when
//! it gets the answer, which may be after the change. Each call of getdents64(2) holds the lock of
//! the directory until it has the answer and its entries. So the kernel is first sent a *barrier*,
//! the invalidation of an entry that no directory has, which waits for that lock (Linux up to 6.18;
//! a later one looks for the entry first). Every answer of before is in the listing then, or never
//! will be. A listing that goes on without its first page counts no more than one that lost the page
//! later. Besides, the time of modification is another one when a program opens the directory.
//!
//! A change forgets the directory until the kernel reads it again, so that only the first of
//! several changes tells the kernel.
//!
//! **Names without attributes.** A listing may leave out attributes that its reader has no use for
//! (`cache/readdirplus_policy.rs`). Kept, it would cost each later program that wants them a LOOKUP
//! a file. So when a program looks up a file of such a *partial* listing, and there are more than a
//! few, all of them are dropped, and come with attributes the next time.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};

use parking_lot::Mutex;
use ramet_fs::Ino;

/// Parts of the set, each with its own lock.
const PARTS: usize = 16;

/// Partial listings that stay. A thread gets fewer before the policy knows its habits.
const FEW: usize = 32;

/// The listing of a directory.
#[derive(Clone, Copy)]
struct Kept {
    /// The number of the stream that began last.
    stream: u32,
    /// Whether it has names of files without attributes.
    is_partial: bool,
}

/// The directories of a mount that the kernel has read and not forgotten.
#[derive(Default)]
pub(crate) struct KeptListings {
    parts: [Mutex<HashMap<Ino, Kept>>; PARTS],
    streams: AtomicU32,
    /// Number of partial listings.
    partial: AtomicUsize,
}

impl KeptListings {
    fn part(&self, dir: Ino) -> &Mutex<HashMap<Ino, Kept>> {
        &self.parts[usize::try_from(dir.0 % PARTS as u64).expect("a small number")]
    }

    /// Notes that the kernel reads a directory, before the tree is read. The reader `begins`, or
    /// goes on. Answers the number of its stream.
    pub(crate) fn note(&self, dir: Ino, begins: bool) -> u32 {
        let mut part = self.part(dir).lock();
        let kept = part.entry(dir).or_insert(Kept {
            stream: 0,
            is_partial: false,
        });
        if begins || kept.stream == 0 {
            // Number 0 is that of no stream.
            let before = self.streams.fetch_add(1, Ordering::Relaxed);
            kept.stream = before.wrapping_add(1).max(1);
        }
        let stream = kept.stream;
        drop(part);
        fence(Ordering::SeqCst);
        stream
    }

    /// The listing is gone.
    fn note_gone(&self, kept: Kept) {
        if kept.is_partial {
            self.partial.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// A reader gets names of files of a directory without attributes.
    pub(crate) fn note_partial(&self, dir: Ino) {
        if let Some(kept) = self.part(dir).lock().get_mut(&dir)
            && !std::mem::replace(&mut kept.is_partial, true)
        {
            self.partial.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A program looked up a file in a directory. Answers the directories whose listings the kernel
    /// must be told to drop.
    pub(crate) fn looked_up(&self, dir: Ino) -> Vec<Ino> {
        if self.partial.load(Ordering::Relaxed) <= FEW {
            return Vec::new();
        }
        let kept = self.part(dir).lock().get(&dir).copied();
        if !kept.is_some_and(|kept| kept.is_partial) {
            return Vec::new();
        }
        let mut dirs = Vec::new();
        for part in &self.parts {
            let mut part = part.lock();
            for (dir, kept) in part.extract_if(|_, kept| kept.is_partial) {
                self.note_gone(kept);
                dirs.push(dir);
            }
        }
        dirs
    }

    /// The server has changed a directory. Answers whether the kernel must be told to drop the
    /// listing.
    pub(crate) fn changed(&self, dir: Ino) -> bool {
        fence(Ordering::SeqCst);
        let kept = self.part(dir).lock().remove(&dir);
        kept.map(|kept| self.note_gone(kept)).is_some()
    }

    /// The kernel has forgotten a directory.
    pub(crate) fn forgotten(&self, dir: Ino) {
        let kept = self.part(dir).lock().remove(&dir);
        kept.into_iter().for_each(|kept| self.note_gone(kept));
    }

    /// All directories.
    pub(crate) fn dirs(&self) -> Vec<Ino> {
        let parts = self.parts.iter();
        parts
            .flat_map(|part| part.lock().keys().copied().collect::<Vec<_>>())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: Ino = Ino(7);

    #[test]
    fn listing_is_dropped_once() {
        let kept = KeptListings::default();
        assert!(!kept.changed(DIR), "never read");
        kept.note(DIR, true);
        kept.note(DIR, false);
        assert!(kept.changed(DIR));
        assert!(!kept.changed(DIR), "told before");
        kept.note(DIR, false);
        assert!(kept.changed(DIR), "a reader went on");
        kept.note(DIR, true);
        kept.forgotten(DIR);
        assert!(!kept.changed(DIR));
    }

    #[test]
    fn partial_listings_are_dropped_together_when_a_file_of_one_is_looked_up() {
        let kept = KeptListings::default();
        let dirs = || (1..=2 * FEW as u64).map(Ino);
        for dir in dirs() {
            kept.note(dir, true);
            assert_eq!(kept.looked_up(dir), [], "complete");
            if dir.0 % 2 == 0 || dir.0 == 1 {
                kept.note_partial(dir);
                kept.note_partial(dir);
            }
        }
        assert_eq!(kept.looked_up(Ino(3)), [], "complete");
        assert_eq!(kept.looked_up(Ino(2)).len(), FEW + 1);
        assert_eq!(kept.looked_up(Ino(2)), [], "dropped");
        for dir in dirs() {
            kept.note(dir, true);
            kept.note_partial(dir);
        }
        // These have changed, and were forgotten.
        dirs().take(FEW).for_each(|dir| match dir.0 % 2 {
            0 => kept.forgotten(dir),
            _ => assert!(kept.changed(dir)),
        });
        assert_eq!(kept.looked_up(Ino(2 * FEW as u64)), [], "few");
        kept.note(Ino(1), true);
        kept.note_partial(Ino(1));
        assert_eq!(kept.looked_up(Ino(1)).len(), FEW + 1);
    }

    #[test]
    fn streams_have_numbers_and_directories_are_listed() {
        let kept = KeptListings::default();
        let first = kept.note(DIR, true);
        assert_eq!(kept.note(DIR, false), first);
        let second = kept.note(DIR, true);
        assert_ne!(second, first);
        assert_ne!(kept.note(Ino(8), false), second);
        let mut dirs = kept.dirs();
        dirs.sort_unstable();
        assert_eq!(dirs, [DIR, Ino(8)]);
    }
}
