//! Programs that look whether a directory has an entry before they read it.
//!
//! `rm -r` opens each directory twice: once for its first name, and again to read it. The second
//! reading repeats all names of the first answer, so all names but one were sent in vain. The
//! kernel does not say why or when a program opens a directory, so the policy learns from each
//! thread. A thread that began [`PROOF`] directories again after one answer each gets a short answer
//! when it begins another directory, and a whole answer when it begins the same directory again. A
//! thread that reads on after a short answer has spent one request too many. It gets whole answers
//! again.

use parking_lot::Mutex;
use ramet_fs::Ino;

/// Threads that are known at the same time, at most. The id of a thread says its slot; a later
/// thread takes the slot over.
const THREADS: usize = 64;
/// Directories that a thread began again after one answer before it gets a short answer.
const PROOF: u8 = 3;
/// `.` and `..`.
const DOTS: usize = 2;
/// Entries of a short answer.
pub(crate) const SHORT: usize = DOTS + 1;

/// The policy of a mount.
pub(crate) struct FirstEntryPolicy(Mutex<[History; THREADS]>);

/// The recent readings of one thread.
#[derive(Clone, Copy, Default)]
struct History {
    /// The id of the thread, 0 if the slot is free.
    thread: u32,
    /// Directories that the thread began again after one answer since it last read on in a directory
    /// that it had not begun just before.
    only_looked: u8,
    /// The directory that it began last.
    dir: u64,
    /// Whether it had begun that directory just before.
    is_again: bool,
    /// Whether it has one answer of that directory, with names.
    has_one: bool,
}

impl Default for FirstEntryPolicy {
    fn default() -> Self {
        Self(Mutex::new([History::default(); THREADS]))
    }
}

fn history(histories: &mut [History; THREADS], thread: u32) -> &mut History {
    let at = &mut histories[usize::try_from(thread).expect("32 bits") % THREADS];
    if at.thread != thread {
        *at = History {
            thread,
            ..History::default()
        };
    }
    at
}

impl FirstEntryPolicy {
    /// Whether `thread`, which begins to read `dir`, likely wants no more than its first name.
    pub(crate) fn wants_first_only(&self, thread: u32, dir: Ino) -> bool {
        let mut histories = self.0.lock();
        let history = history(&mut histories, thread);
        history.only_looked >= PROOF && history.dir != dir.0
    }

    /// `thread` got the first `entries` entries of `dir`, and may ask for more.
    pub(crate) fn began(&self, thread: u32, dir: Ino, entries: usize) {
        let mut histories = self.0.lock();
        let history = history(&mut histories, thread);
        history.is_again = history.dir == dir.0;
        if history.is_again && history.has_one {
            history.only_looked = (history.only_looked + 1).min(PROOF);
        }
        history.dir = dir.0;
        // A program that finds a directory empty asks once more, to hear that there are no more
        // entries.
        history.has_one = entries > DOTS;
    }

    /// `thread` asks for more of `dir`.
    pub(crate) fn goes_on(&self, thread: u32, dir: Ino) {
        let mut histories = self.0.lock();
        let history = history(&mut histories, thread);
        if history.dir == dir.0 && history.has_one {
            history.has_one = false;
            if !history.is_again {
                history.only_looked = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RM: u32 = 7;

    /// Reads a directory twice, as `rm -r` does. Answers whether the first and the second answer
    /// are short.
    fn looks_and_reads(
        policy: &FirstEntryPolicy,
        thread: u32,
        dir: u64,
        entries: usize,
    ) -> [bool; 2] {
        let dir = Ino(dir);
        let is_first_short = policy.wants_first_only(thread, dir);
        let entries_first = if is_first_short {
            SHORT.min(entries)
        } else {
            entries
        };
        policy.began(thread, dir, entries_first);
        if entries <= DOTS {
            policy.goes_on(thread, dir);
        }
        let is_second_short = policy.wants_first_only(thread, dir);
        policy.began(thread, dir, entries);
        policy.goes_on(thread, dir);
        [is_first_short, is_second_short]
    }

    fn reads(policy: &FirstEntryPolicy, thread: u32, dir: u64) -> bool {
        let dir = Ino(dir);
        let is_short = policy.wants_first_only(thread, dir);
        policy.began(thread, dir, 10);
        policy.goes_on(thread, dir);
        policy.goes_on(thread, dir);
        is_short
    }

    #[test]
    fn thread_that_only_looks_gets_one_entry_and_thread_that_reads_gets_all() {
        let policy = FirstEntryPolicy::default();
        for dir in 1..20 {
            let is_known = dir > u64::from(PROOF);
            assert_eq!(looks_and_reads(&policy, RM, dir, 12), [is_known, false]);
            assert!(!reads(&policy, RM + 1, dir), "another thread");
        }
    }

    #[test]
    fn empty_directories_do_not_count() {
        let policy = FirstEntryPolicy::default();
        for dir in 1..20 {
            let entries = if dir % 2 == 0 { DOTS } else { 12 };
            let is_known = dir > 2 * u64::from(PROOF) - 1;
            assert_eq!(looks_and_reads(&policy, RM, dir, entries)[0], is_known);
        }
    }

    #[test]
    fn thread_that_reads_on_gets_whole_answers_from_then_on() {
        let policy = FirstEntryPolicy::default();
        for dir in 1..=u64::from(PROOF) {
            looks_and_reads(&policy, RM, dir, 12);
        }
        assert!(reads(&policy, RM, 50));
        assert!(!reads(&policy, RM, 51));
        let [first, _] = looks_and_reads(&policy, RM, 52, 12);
        assert!(!first, "it has to be seen again");
    }

    #[test]
    fn thread_that_goes_down_before_it_reads_on_gets_whole_answers() {
        let policy = FirstEntryPolicy::default();
        for dir in 1..20 {
            assert!(!policy.wants_first_only(RM, Ino(dir)));
            policy.began(RM, Ino(dir), 12);
        }
        (1..20).for_each(|dir| policy.goes_on(RM, Ino(20 - dir)));
        assert!(!policy.wants_first_only(RM, Ino(50)));
    }

    #[test]
    fn later_thread_takes_the_slot_of_an_earlier_one() {
        let policy = FirstEntryPolicy::default();
        for dir in 1..=u64::from(PROOF) {
            looks_and_reads(&policy, RM, dir, 12);
        }
        let same_place = RM + u32::try_from(THREADS).unwrap();
        assert!(!reads(&policy, same_place, 50));
        assert!(!reads(&policy, RM, 51), "forgotten");
    }
}
