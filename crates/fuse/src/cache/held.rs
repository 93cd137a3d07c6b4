//! Files whose write-back a program may hold up.
//!
//! syncfs(2) queues the write-back of dirty pages. A page that fsync(2) or msync(2) of another
//! program is writing back at that moment is not dirty any more, and may not be queued yet. The
//! kernel also holds the write-back of a file while the size of the file is being changed. So
//! behind a fence the kernel waits for the pages of every file that was synced or resized lately
//! and may have pages to write back ([`crate::cache::notify::Kernel::write_back`]).
//!
//! At most one wait runs, and one is due. A call while a wait is due joins that one, whose files are
//! those of every such call. The waits run in the order of their numbers, one after the other. So
//! their number, and the memory that they take, do not depend on the number of calls.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ramet_fs::Ino;

/// The least time for which a file is remembered. The longest is twice as much.
const LATELY: Duration = Duration::from_secs(15);

/// Files that were synced or resized lately, and the numbers of the waits for their pages.
pub(crate) struct Held {
    state: Mutex<State>,
    /// Number of the newest wait that has ended. Every older wait has ended before.
    ended: AtomicU64,
}

struct State {
    new: HashSet<Ino>,
    old: HashSet<Ino>,
    since: Instant,
    /// Files of the wait that is due which are remembered for no other reason.
    due: HashSet<Ino>,
    /// Number of the newest wait that has begun or is due.
    newest: u64,
    /// Whether the newest wait is due, and has not begun.
    is_due: bool,
    /// Whether a thread carries waits out.
    is_running: bool,
}

impl State {
    fn age(&mut self, now: Instant) {
        let age = now.saturating_duration_since(self.since);
        if age >= LATELY {
            let new = std::mem::take(&mut self.new);
            let aged = std::mem::replace(&mut self.old, new);
            self.keep_due(aged);
            self.since = now;
        }
        if age >= 2 * LATELY {
            let aged = std::mem::take(&mut self.old);
            self.keep_due(aged);
        }
    }

    /// Files that are no longer remembered stay in the wait that is due.
    fn keep_due(&mut self, aged: HashSet<Ino>) {
        if self.is_due {
            self.due.extend(aged);
        }
    }

    /// Begins the wait that is due, and answers its number and its files.
    fn begin_due(&mut self) -> Option<(u64, Vec<Ino>)> {
        self.is_running = std::mem::take(&mut self.is_due);
        if !self.is_running {
            return None;
        }
        let mut files = std::mem::take(&mut self.due);
        files.extend(self.new.union(&self.old));
        Some((self.newest, files.into_iter().collect()))
    }
}

impl Held {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            state: Mutex::new(State {
                new: HashSet::new(),
                old: HashSet::new(),
                since: now,
                due: HashSet::new(),
                newest: 0,
                is_due: false,
                is_running: false,
            }),
            ended: AtomicU64::new(0),
        }
    }

    /// The file has been synced or resized.
    pub(crate) fn note(&self, ino: Ino, now: Instant) {
        let mut state = self.state.lock();
        state.age(now);
        state.new.insert(ino);
    }

    /// The kernel has forgotten the file.
    pub(crate) fn forget(&self, ino: Ino) {
        let mut state = self.state.lock();
        let State { new, old, due, .. } = &mut *state;
        for files in [new, old, due] {
            files.remove(&ino);
        }
    }

    /// Has a wait for the files of the moment begin after this call, unless there are none. `run`
    /// starts a job, on another thread, that calls `wait` with the files of each wait. Answers the
    /// number of the wait.
    pub(crate) fn begin(
        self: &Arc<Self>,
        now: Instant,
        wait: impl Fn(Vec<Ino>) + Send + 'static,
        run: impl FnOnce(Box<dyn FnOnce() + Send>),
    ) -> Option<u64> {
        let mut state = self.state.lock();
        state.age(now);
        if state.new.is_empty() && state.old.is_empty() {
            return None;
        }
        if !state.is_due {
            state.is_due = true;
            state.newest += 1;
        }
        let number = state.newest;
        let is_first = !std::mem::replace(&mut state.is_running, true);
        drop(state);
        if is_first {
            let held = Arc::clone(self);
            run(Box::new(move || held.carry_out(wait)));
        }
        Some(number)
    }

    /// Carries waits out until none is due.
    fn carry_out(&self, wait: impl Fn(Vec<Ino>)) {
        let next = || self.state.lock().begin_due();
        while let Some((number, files)) = next() {
            wait(files);
            self.ended.store(number, Ordering::SeqCst);
        }
    }

    /// Whether the wait of this number has ended.
    pub(crate) fn has_ended(&self, number: u64) -> bool {
        self.ended.load(Ordering::SeqCst) >= number
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::JoinHandle;

    use super::*;

    /// The files of the wait that begins now, in order; none if no wait begins.
    fn files_at(held: &Arc<Held>, now: Instant) -> Vec<Ino> {
        let (sender, files) = channel();
        let wait = move |files| sender.send(files).unwrap();
        held.begin(now, wait, |job| job());
        let mut files: Vec<Ino> = files.try_iter().flatten().collect();
        files.sort();
        files
    }

    /// Waits that a test ends, each by one message, and the files of those that have begun.
    struct Waits {
        held: Arc<Held>,
        end: Sender<()>,
        begun: Receiver<Vec<Ino>>,
        thread: Option<JoinHandle<()>>,
    }

    impl Waits {
        /// The first wait, at this moment, which has begun and is held up.
        fn begin(held: Arc<Held>, now: Instant) -> Self {
            let ((end, ended), (begin, begun)) = (channel(), channel());
            let wait = move |files| {
                begin.send(files).unwrap();
                ended.recv().unwrap();
            };
            let mut thread = None;
            let number = held.begin(now, wait, |job| thread = Some(std::thread::spawn(job)));
            assert_eq!(number, Some(1));
            let waits = Self {
                held,
                end,
                begun,
                thread,
            };
            waits.next();
            waits
        }

        /// A call whose wait is carried out by the thread of the first one.
        fn call(&self, now: Instant) -> Option<u64> {
            let no_wait = |_| panic!("another wait runs");
            self.held
                .begin(now, no_wait, |_| panic!("another job is queued"))
        }

        /// The files of the next wait, once that has begun.
        fn next(&self) -> Vec<Ino> {
            let mut files = self.begun.recv().unwrap();
            files.sort();
            files
        }

        fn end_all(mut self) {
            for _ in 0..2 {
                self.end.send(()).unwrap();
            }
            self.thread.take().unwrap().join().unwrap();
        }
    }

    #[test]
    fn file_is_waited_for_until_it_was_synced_long_ago_or_is_forgotten() {
        let start = Instant::now();
        let held = Arc::new(Held::new(start));
        held.note(Ino(1), start);
        held.note(Ino(2), start);
        held.forget(Ino(2));
        held.note(Ino(3), start + LATELY);
        assert_eq!(files_at(&held, start + LATELY), [Ino(1), Ino(3)]);
        assert_eq!(files_at(&held, start + 2 * LATELY), [Ino(3)]);
        assert_eq!(files_at(&held, start + 9 * LATELY), []);
    }

    #[test]
    fn no_wait_ends_with_a_later_one_that_lacks_files_of_it() {
        let start = Instant::now();
        let held = Arc::new(Held::new(start));
        held.note(Ino(1), start);
        let waits = Waits::begin(Arc::clone(&held), start);
        held.note(Ino(2), start + 2 * LATELY);
        assert_eq!(waits.call(start + 2 * LATELY), Some(2));
        assert!(!held.has_ended(1) && !held.has_ended(2));
        waits.end.send(()).unwrap();
        assert_eq!(waits.next(), [Ino(2)]);
        assert!(held.has_ended(1) && !held.has_ended(2));
        waits.end_all();
        assert!(held.has_ended(2));
    }

    #[test]
    fn calls_join_the_wait_that_is_due_and_each_finds_its_files_there() {
        let start = Instant::now();
        let held = Arc::new(Held::new(start));
        held.note(Ino(1), start);
        let waits = Waits::begin(Arc::clone(&held), start);
        held.note(Ino(2), start);
        for _ in 0..100_000 {
            assert_eq!(waits.call(start), Some(2));
        }
        held.note(Ino(3), start);
        held.note(Ino(4), start);
        assert_eq!(waits.call(start), Some(2));
        held.forget(Ino(4));
        // Only the wait that is due remembers the files of before.
        held.note(Ino(5), start + 9 * LATELY);
        waits.end.send(()).unwrap();
        assert_eq!(waits.next(), [1, 2, 3, 5].map(Ino));
        assert_eq!(waits.call(start + 9 * LATELY), Some(3));
        assert!(held.has_ended(1) && !held.has_ended(2));
        waits.end_all();
        assert!(held.has_ended(3));
        let none_runs = |job: Box<dyn FnOnce() + Send>| job();
        assert_eq!(held.begin(start + 9 * LATELY, |_| (), none_runs), Some(4));
        assert!(held.has_ended(4));
    }
}
