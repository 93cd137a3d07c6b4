//! The number of readers that wait for the next request.
//!
//! The kernel wakes the reader that has waited longest. If many readers wait, every request of a
//! single client goes to another thread, as a rule on another processor, which has cold caches and
//! must be woken from idle. So a reader that has served a request backs off for a moment when
//! [`WAITING`] others wait already. The pause is short: if the others are held up by the device, or
//! have more requests than they can serve, this reader waits again by then. A reader that finds too
//! few others waiting does not back off. On an idle mount all readers wait in the kernel, and none
//! of them wakes up.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Readers that wait although others work: one for a request that comes while another is served,
/// and one to alternate with it.
const WAITING: usize = 2;
/// How long a reader backs off. No request waits for the reader meanwhile; only the end of the
/// session does.
const PAUSE: Duration = Duration::from_millis(5);

/// The number of readers that wait for a request.
pub(crate) struct ReaderBackoff {
    waiting: AtomicUsize,
}

/// A reader that is serving a request.
pub(crate) struct BusyReader<'a>(&'a ReaderBackoff);

impl ReaderBackoff {
    /// All of `threads` readers wait.
    pub(crate) fn new(threads: usize) -> Self {
        Self {
            waiting: AtomicUsize::new(threads),
        }
    }

    /// The reader has a request. It waits again once the value is dropped.
    pub(crate) fn begin(&self) -> BusyReader<'_> {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        BusyReader(self)
    }

    fn others_wait(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) >= WAITING
    }
}

impl Drop for BusyReader<'_> {
    fn drop(&mut self) {
        if self.0.others_wait() {
            std::thread::sleep(PAUSE);
        }
        self.0.waiting.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reader_backs_off_only_when_others_wait() {
        let backoff = ReaderBackoff::new(WAITING + 1);
        let first = backoff.begin();
        assert!(backoff.others_wait());
        let second = backoff.begin();
        assert!(!backoff.others_wait());
        drop(second);
        drop(first);
        assert_eq!(backoff.waiting.load(Ordering::Relaxed), WAITING + 1);
    }
}
