//! Which threads wait for the next request.
//!
//! The kernel wakes the thread that has waited longest. With many of them in line every request of a single client goes to
//! another thread, as a rule on another processor, whose caches know nothing and which has to be woken from idling. So a thread
//! that has served a request steps aside for a moment when [`IN_LINE`] others wait already. It does not stay away: if the others
//! are held up by the device, or there is more to do than they can, it is back in line by then, and a thread that
//! finds the line short stays in it. An idle mount has all threads in line and wakes up for nothing.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Threads that wait although others work: one for the request that comes while another is served, one to take turns.
const IN_LINE: usize = 2;
/// How long a thread steps aside. Nothing waits for it, but for the end of the session.
const ASIDE: Duration = Duration::from_millis(5);

/// The line of threads that wait for requests.
pub(crate) struct ReaderBackoff {
    in_line: AtomicUsize,
}

/// A request that is being served.
pub(crate) struct Turn<'a>(&'a ReaderBackoff);

impl ReaderBackoff {
    /// All of `threads` are in line.
    pub(crate) fn new(threads: usize) -> Self {
        Self {
            in_line: AtomicUsize::new(threads),
        }
    }

    /// The thread leaves the line, and gets back into it once this is dropped.
    pub(crate) fn take(&self) -> Turn<'_> {
        self.in_line.fetch_sub(1, Ordering::Relaxed);
        Turn(self)
    }

    fn is_long(&self) -> bool {
        self.in_line.load(Ordering::Relaxed) >= IN_LINE
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.0.is_long() {
            std::thread::sleep(ASIDE);
        }
        self.0.in_line.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_steps_aside_only_when_others_wait() {
        let turns = ReaderBackoff::new(IN_LINE + 1);
        let first = turns.take();
        assert!(turns.is_long());
        let second = turns.take();
        assert!(!turns.is_long());
        drop(second);
        drop(first);
        assert_eq!(turns.in_line.load(Ordering::Relaxed), IN_LINE + 1);
    }
}
