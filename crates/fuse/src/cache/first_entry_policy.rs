//! Programs that look whether a directory has an entry before they read it.
//!
//! `rm -r` opens each directory twice: once for its first name, and again to read it. The second
//! reading repeats all names of the first answer, so all names but one were sent in vain. The
//! kernel does not say why a program opens a directory, so the policy learns from each thread. A
//! thread that closed [`PROOF`] directories after one answer each gets a short answer when it opens
//! another directory, and a whole answer when it opens the same directory again. A thread that
//! reads on after a short answer has spent one request too many. It gets whole answers again.
//!
//! The policy applies only where all answers come with attributes. A kernel that may go on without
//! them would miss the attributes of the other entries.

use parking_lot::Mutex;
use ramet_fs::Ino;

/// Threads that are known at the same time, at most. The id of a thread says its slot; a later
/// thread takes the slot over.
const THREADS: usize = 64;
/// Open directories that are known, at most. Their slots work like those of threads.
const OPENED: usize = 64;
/// Directories that a thread closed after one answer before it gets a short answer.
const PROOF: u8 = 3;
/// `.` and `..`.
const DOTS: usize = 2;
/// Entries of a short answer.
pub(crate) const SHORT: usize = DOTS + 1;

/// The policy of a mount.
pub(crate) struct FirstEntryPolicy(Mutex<State>);

struct State {
    threads: [History; THREADS],
    opened: [Opened; OPENED],
}

/// The recent openings of one thread.
#[derive(Clone, Copy, Default)]
struct History {
    /// The id of the thread, 0 if the slot is free.
    thread: u32,
    /// Directories that the thread closed after one answer since it last read on in a directory
    /// that it had not opened just before.
    closed_early: u8,
    /// The last of these directories, and the handle it was open as.
    dir: u64,
    fh: u64,
}

/// An open directory of which the kernel has one answer.
#[derive(Clone, Copy, Default)]
struct Opened {
    /// The handle, 0 if the slot is free.
    fh: u64,
    thread: u32,
    dir: u64,
}

impl State {
    fn history(&mut self, thread: u32) -> &mut History {
        let at = &mut self.threads[usize::try_from(thread).expect("32 bits") % THREADS];
        if at.thread != thread {
            *at = History {
                thread,
                ..History::default()
            };
        }
        at
    }

    /// Whether `thread` opened `dir` last. The close may arrive after the next opening.
    fn opened_last(&mut self, thread: u32, dir: u64) -> bool {
        let is_there = |opened: &Opened| opened.thread == thread && opened.dir == dir;
        self.history(thread).dir == dir || self.opened.iter().any(is_there)
    }

    /// The slot of a handle.
    fn opened(&mut self, fh: u64) -> &mut Opened {
        let at = usize::try_from(fh % OPENED as u64).expect("a small number");
        &mut self.opened[at]
    }

    /// The open directory, if the kernel has one answer of it.
    fn take(&mut self, fh: u64) -> Option<Opened> {
        let opened = self.opened(fh);
        (opened.fh == fh).then(|| std::mem::take(opened))
    }
}

impl Default for FirstEntryPolicy {
    fn default() -> Self {
        Self(Mutex::new(State {
            threads: [History::default(); THREADS],
            opened: [Opened::default(); OPENED],
        }))
    }
}

impl FirstEntryPolicy {
    /// Whether `thread`, which begins to read `dir`, likely wants no more than its first name.
    pub(crate) fn wants_first_only(&self, thread: u32, dir: Ino) -> bool {
        let mut state = self.0.lock();
        state.history(thread).closed_early >= PROOF && !state.opened_last(thread, dir.0)
    }

    /// `thread` got `entries` entries of `dir`, open as `fh`, and may ask for more.
    pub(crate) fn began(&self, thread: u32, dir: Ino, fh: u64, entries: usize) {
        // A program that finds a directory empty asks once more, to hear that there are no more
        // entries.
        if entries > DOTS {
            *self.0.lock().opened(fh) = Opened {
                fh,
                thread,
                dir: dir.0,
            };
        }
    }

    /// A program asks for more of the open directory `fh`.
    pub(crate) fn goes_on(&self, fh: u64) {
        let mut state = self.0.lock();
        if let Some(opened) = state.take(fh)
            && !state.opened_last(opened.thread, opened.dir)
        {
            state.history(opened.thread).closed_early = 0;
        }
    }

    /// The open directory `fh` is closed.
    pub(crate) fn closed(&self, fh: u64) {
        let mut state = self.0.lock();
        if let Some(opened) = state.take(fh) {
            let history = state.history(opened.thread);
            history.closed_early = history.closed_early.saturating_add(1);
            // Closes may arrive in another order than the openings.
            if opened.fh > history.fh {
                (history.dir, history.fh) = (opened.dir, opened.fh);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RM: u32 = 7;

    /// Opens a directory twice, as `rm -r` does. Answers whether the first and the second answer
    /// are short.
    fn looks_and_reads(
        policy: &FirstEntryPolicy,
        thread: u32,
        dir: u64,
        entries: usize,
    ) -> [bool; 2] {
        let dir = Ino(dir);
        let (first, second) = (2 * dir.0, 2 * dir.0 + 1);
        let is_first_short = policy.wants_first_only(thread, dir);
        let entries_first = if is_first_short {
            SHORT.min(entries)
        } else {
            entries
        };
        policy.began(thread, dir, first, entries_first);
        if entries <= DOTS {
            policy.goes_on(first);
        }
        policy.closed(first);
        let is_second_short = policy.wants_first_only(thread, dir);
        policy.began(thread, dir, second, entries);
        policy.goes_on(second);
        policy.closed(second);
        [is_first_short, is_second_short]
    }

    fn reads(policy: &FirstEntryPolicy, thread: u32, dir: u64) -> bool {
        let fh = 1000 + dir;
        let is_short = policy.wants_first_only(thread, Ino(dir));
        policy.began(thread, Ino(dir), fh, 10);
        policy.goes_on(fh);
        policy.goes_on(fh);
        policy.closed(fh);
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
    fn directory_that_is_opened_again_before_its_close_arrives_is_answered_whole() {
        let policy = FirstEntryPolicy::default();
        for dir in 1..=u64::from(PROOF) {
            looks_and_reads(&policy, RM, dir, 12);
        }
        let dir = Ino(50);
        assert!(policy.wants_first_only(RM, dir));
        policy.began(RM, dir, 100, SHORT);
        assert!(!policy.wants_first_only(RM, dir));
        policy.began(RM, dir, 101, 12);
        policy.goes_on(101);
        policy.closed(100);
        assert!(!policy.wants_first_only(RM, dir));
        assert!(policy.wants_first_only(RM, Ino(51)), "still known");
        // The order of the closes makes no difference.
        policy.began(RM, dir, 102, SHORT);
        policy.began(RM, Ino(51), 103, SHORT);
        policy.closed(103);
        policy.closed(102);
        policy.began(RM, Ino(51), 104, 12);
        policy.goes_on(104);
        assert!(policy.wants_first_only(RM, Ino(52)));
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
