//! Files whose write-back a program may hold up.
//!
//! syncfs(2) queues the write-back of dirty pages. A page that fsync(2) or msync(2) of another
//! program is writing back at that moment is not dirty any more, and may not be queued yet. The
//! kernel also holds the write-back of a file while the size of the file is being changed. So
//! behind a fence the kernel waits for the pages of every file that was synced or resized lately
//! and may have pages to write back ([`crate::cache::notify::Kernel::write_back`]).

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
    files: Mutex<Files>,
    begun: AtomicU64,
    /// Number of the newest wait that has ended. Every older wait has ended with it, because a
    /// later wait covers the files of the earlier ones.
    ended: AtomicU64,
}

struct Files {
    new: HashSet<Ino>,
    old: HashSet<Ino>,
    since: Instant,
}

impl Files {
    fn age(&mut self, now: Instant) {
        let age = now.saturating_duration_since(self.since);
        if age >= LATELY {
            self.old = std::mem::take(&mut self.new);
            self.since = now;
        }
        if age >= 2 * LATELY {
            self.old.clear();
        }
    }
}

impl Held {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            files: Mutex::new(Files {
                new: HashSet::new(),
                old: HashSet::new(),
                since: now,
            }),
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
        }
    }

    /// The file has been synced or resized.
    pub(crate) fn note(&self, ino: Ino, now: Instant) {
        let mut files = self.files.lock();
        files.age(now);
        files.new.insert(ino);
    }

    /// The kernel has forgotten the file.
    pub(crate) fn forget(&self, ino: Ino) {
        let mut files = self.files.lock();
        files.new.remove(&ino);
        files.old.remove(&ino);
    }

    /// The files to wait for.
    pub(crate) fn lately(&self, now: Instant) -> Vec<Ino> {
        let mut files = self.files.lock();
        files.age(now);
        files.new.union(&files.old).copied().collect()
    }

    /// Has `run` carry out `wait` on another thread. Answers the number of the wait.
    pub(crate) fn begin(
        self: &Arc<Self>,
        wait: impl FnOnce() + Send + 'static,
        run: impl FnOnce(Box<dyn FnOnce() + Send>),
    ) -> u64 {
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let held = Arc::clone(self);
        run(Box::new(move || {
            wait();
            held.ended.fetch_max(number, Ordering::SeqCst);
        }));
        number
    }

    /// Whether the wait of this number has ended.
    pub(crate) fn has_ended(&self, number: u64) -> bool {
        self.ended.load(Ordering::SeqCst) >= number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_waited_for_until_it_was_synced_long_ago_or_is_forgotten() {
        let start = Instant::now();
        let held = Held::new(start);
        held.note(Ino(1), start);
        held.note(Ino(2), start);
        held.forget(Ino(2));
        held.note(Ino(3), start + LATELY);
        let mut both = held.lately(start + LATELY);
        both.sort();
        assert_eq!(both, [Ino(1), Ino(3)]);
        assert_eq!(held.lately(start + 2 * LATELY), [Ino(3)]);
        assert_eq!(held.lately(start + 9 * LATELY), []);
    }

    #[test]
    fn earlier_wait_ends_with_a_later_one() {
        let held = Arc::new(Held::new(Instant::now()));
        let mut waits = Vec::new();
        let first = held.begin(|| (), |wait| waits.push(wait));
        let second = held.begin(|| (), |wait| waits.push(wait));
        assert!(!held.has_ended(first));
        waits.pop().unwrap()();
        assert!(held.has_ended(first) && held.has_ended(second));
        waits.pop().unwrap()();
        assert!(held.has_ended(second));
    }
}
