//! The attributes that programs need of the directories that they read.
//!
//! The attributes that come with an entry save a request if the program needs them, and cost
//! several times the entry if not. `find` by name needs attributes of directories only; `grep -r`
//! and `du` need all. The kernel sends no request for attributes that it has. So after some answers
//! the attributes of a few files are left out, and the policy watches whether they are looked up.
//! If the thread that read the directory looks up a file, or another thread does so in a directory
//! that the first one read, the reading thread gets all attributes from then on. A thread that
//! never does so gets those of directories only, until a lookup comes.

use std::sync::atomic::{AtomicU64, Ordering};

use ramet_fs::{Ino, Kind};

/// Threads that are known at the same time, at most. The id of a thread says its slot; a later
/// thread takes the slot over.
const THREADS: usize = 64;
/// First answers of a thread, which have all attributes: short programs miss none.
const FULL: u8 = 8;
/// Answers after those, which leave out the attributes of some files.
const PROBES: u8 = 16;
/// Files without attributes in each of these answers.
const MISSING: u32 = 2;

/// Directories whose last reader is known, at most. Their slots work like those of threads.
const DIRECTORIES: usize = 64;

/// The policy of a mount.
pub(crate) struct ReaddirplusPolicy {
    threads: [AtomicU64; THREADS],
    /// Threads that may have missed attributes in a directory: low half of the number of the
    /// directory, and the id of the thread.
    readers: [AtomicU64; DIRECTORIES],
}

/// The recent readings of one thread.
#[derive(Clone, Copy, PartialEq, Eq)]
struct History {
    /// The id of the thread, 0 if the slot is free.
    thread: u32,
    /// Answers that the thread got, counted up to [`FULL`] + [`PROBES`].
    answers: u8,
    /// Whether a file whose attributes the thread may have missed was looked up.
    looks_up: bool,
}

/// The attributes of an answer.
pub(crate) enum Choice {
    All,
    /// All attributes but those of so many files.
    Most(u32),
    /// Attributes of directories.
    Directories,
}

impl History {
    fn of(thread: u32) -> Self {
        Self {
            thread,
            answers: 0,
            looks_up: false,
        }
    }

    fn unpack(bits: u64) -> Self {
        let [a, b, c, d, answers, looks_up, ..] = bits.to_le_bytes();
        Self {
            thread: u32::from_le_bytes([a, b, c, d]),
            answers,
            looks_up: looks_up != 0,
        }
    }

    fn pack(self) -> u64 {
        let [a, b, c, d] = self.thread.to_le_bytes();
        u64::from_le_bytes([a, b, c, d, self.answers, self.looks_up.into(), 0, 0])
    }
}

impl Choice {
    /// Whether the attributes of the next entry, which is of this kind, come with it.
    pub(crate) fn wants(&mut self, kind: Kind) -> bool {
        match self {
            _ if kind == Kind::Directory => true,
            Self::All | Self::Most(0) => true,
            Self::Most(missing) => {
                *missing -= 1;
                false
            }
            Self::Directories => false,
        }
    }
}

impl Default for ReaddirplusPolicy {
    fn default() -> Self {
        Self {
            threads: [const { AtomicU64::new(0) }; THREADS],
            readers: [const { AtomicU64::new(0) }; DIRECTORIES],
        }
    }
}

impl ReaddirplusPolicy {
    /// The slot of `thread`, and its contents. Two threads that change a slot at the same time may
    /// spoil a choice of attributes, and nothing else.
    fn find(&self, thread: u32) -> (&AtomicU64, History) {
        let at = &self.threads[usize::try_from(thread).expect("32 bits") % THREADS];
        (at, History::unpack(at.load(Ordering::Relaxed)))
    }

    /// The slot of a directory, and the low half of the number of the directory.
    fn last_reader(&self, dir: Ino) -> (&AtomicU64, u64) {
        let number = dir.0 & u64::from(u32::MAX);
        let at = usize::try_from(number).expect("32 bits") % DIRECTORIES;
        (&self.readers[at], number << 32)
    }

    /// The thread `thread` reads `dir`, or goes on with it. Answers which attributes it gets.
    pub(crate) fn choose(&self, thread: u32, dir: Ino) -> Choice {
        let (at, mut history) = self.find(thread);
        if history.thread != thread {
            history = History::of(thread);
        }
        if history.looks_up {
            return Choice::All;
        }
        if history.answers >= FULL {
            let (reader, number) = self.last_reader(dir);
            reader.store(number | u64::from(thread), Ordering::Relaxed);
        }
        let choice = match history.answers {
            ..FULL => Choice::All,
            FULL.. if history.answers < FULL + PROBES => Choice::Most(MISSING),
            _ => return Choice::Directories,
        };
        history.answers += 1;
        at.store(history.pack(), Ordering::Relaxed);
        choice
    }

    /// The thread `thread` looked up a name in `dir`, and found an inode of this kind.
    pub(crate) fn looks_up(&self, thread: u32, dir: Ino, kind: Kind) {
        if kind == Kind::Directory {
            return;
        }
        self.misses(thread);
        let (reader, number) = self.last_reader(dir);
        let reader = reader.load(Ordering::Relaxed) ^ number;
        // The slot of another directory leaves bits of its number.
        if let Ok(reader) = u32::try_from(reader)
            && reader != thread
        {
            self.misses(reader);
        }
    }

    /// The thread `thread` would have used more attributes, if it misses any.
    fn misses(&self, thread: u32) {
        let (at, history) = self.find(thread);
        let may_miss = history.thread == thread && history.answers > FULL;
        if may_miss && !history.looks_up {
            let history = History {
                looks_up: true,
                ..history
            };
            at.store(history.pack(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIND: u32 = 7;
    const DIR: Ino = Ino(1 << 40 | 5);
    const OTHER: Ino = Ino(6);

    /// Number of files without attributes in the next answer, of a directory and `files` files.
    fn missing(policy: &ReaddirplusPolicy, thread: u32, files: u32) -> u32 {
        let mut choice = policy.choose(thread, DIR);
        assert!(choice.wants(Kind::Directory));
        (0..files).filter(|_| !choice.wants(Kind::Regular)).count() as u32
    }

    fn list(policy: &ReaddirplusPolicy, thread: u32, answers: u8) {
        for _ in 0..answers {
            missing(policy, thread, 1);
        }
    }

    #[test]
    fn thread_that_looks_up_no_file_gets_no_attributes_of_files() {
        let policy = ReaddirplusPolicy::default();
        for answer in 0..FULL + PROBES + 10 {
            let expected = match answer {
                ..FULL => 0,
                FULL.. if answer < FULL + PROBES => MISSING,
                _ => 100,
            };
            assert_eq!(missing(&policy, FIND, 100), expected, "answer {answer}");
        }
        // Another thread has its own history.
        policy.looks_up(FIND + 1, OTHER, Kind::Regular);
        assert_eq!(missing(&policy, FIND, 100), 100);
        assert_eq!(missing(&policy, FIND + 1, 100), 0);
        policy.looks_up(FIND, OTHER, Kind::Directory);
        assert_eq!(missing(&policy, FIND, 100), 100, "it had those");
        policy.looks_up(FIND, OTHER, Kind::Symlink);
        assert_eq!(missing(&policy, FIND, 100), 0);
    }

    #[test]
    fn thread_that_misses_attributes_once_gets_all() {
        let policy = ReaddirplusPolicy::default();
        list(&policy, FIND, FULL);
        // The thread got all attributes so far: these are names of a command line.
        policy.looks_up(FIND, OTHER, Kind::Regular);
        assert_eq!(missing(&policy, FIND, 100), MISSING);
        policy.looks_up(FIND, OTHER, Kind::Regular);
        for _ in 0..1000 {
            assert_eq!(missing(&policy, FIND, 100), 0);
        }
    }

    #[test]
    fn thread_gets_all_attributes_when_another_looks_up_where_it_read() {
        let policy = ReaddirplusPolicy::default();
        list(&policy, FIND, FULL + PROBES);
        let same_place = Ino(DIR.0 + DIRECTORIES as u64);
        policy.looks_up(FIND + 1, same_place, Kind::Regular);
        assert_eq!(missing(&policy, FIND, 100), 100, "not where it read");
        policy.looks_up(FIND + 1, DIR, Kind::Regular);
        assert_eq!(missing(&policy, FIND, 100), 0);
    }

    #[test]
    fn later_thread_takes_the_slot_of_an_earlier_one() {
        let policy = ReaddirplusPolicy::default();
        list(&policy, FIND, FULL + PROBES);
        let same_place = FIND + u32::try_from(THREADS).unwrap();
        assert_eq!(missing(&policy, same_place, 100), 0);
        policy.looks_up(FIND, OTHER, Kind::Regular);
        assert_eq!(missing(&policy, FIND, 100), 0, "forgotten");
        list(&policy, FIND, FULL);
        assert_eq!(missing(&policy, FIND, 100), MISSING);
    }

    #[test]
    fn history_survives_packing() {
        let history = History {
            thread: u32::MAX - 1,
            answers: 24,
            looks_up: true,
        };
        assert!(History::unpack(history.pack()) == history);
        assert!(History::unpack(0) == History::of(0));
    }
}
