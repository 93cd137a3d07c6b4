//! Requests to forget: the kernel remembers more inodes than the memory budget allows.
//!
//! A request to forget names a batch of inodes, and goes out on a thread of its own, since it
//! waits for locks in the kernel. The kernel answers with FORGETs for the inodes that no program
//! uses. The next batch waits until requests of the kernel come, the FORGETs among them, so the pace
//! is that of the mount. A batch that frees little has met inodes that are *pinned*: open, watched,
//! mapped, or with others below. Then the pause doubles before the next batch.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Inodes of a batch.
pub(crate) const BATCH: usize = 1024;
/// Requests of the kernel between two batches, at least and at most.
const PAUSE_MIN: u64 = 256;
const PAUSE_MAX: u64 = 1 << 16;

/// When the next batch goes out.
#[derive(Default)]
pub(crate) struct ForgetRequests {
    /// Requests of the kernel since the last batch.
    waited: AtomicU64,
    pause: AtomicU64,
    is_under_way: AtomicBool,
    /// Inodes that the kernel remembered when the last batch went out.
    before: AtomicU64,
}

impl ForgetRequests {
    /// The kernel has sent a request. Answers whether the next batch may go out; the caller says
    /// when it has ([`Self::sent`]).
    pub(crate) fn is_due(&self) -> bool {
        let waited = self.waited.fetch_add(1, Ordering::Relaxed);
        let pause = self.pause.load(Ordering::Relaxed).max(PAUSE_MIN);
        waited >= pause && !self.is_under_way.swap(true, Ordering::SeqCst)
    }

    /// A batch of `inodes` went out, while the kernel remembers `remembered`; none if it remembers
    /// few enough.
    pub(crate) fn sent(&self, inodes: usize, remembered: u64) {
        let before = self.before.swap(remembered, Ordering::Relaxed);
        let freed = before.saturating_sub(remembered);
        let pause = self.pause.load(Ordering::Relaxed).max(PAUSE_MIN);
        let is_pinned = inodes > 0 && freed < BATCH as u64 / 8;
        let pause = if is_pinned { 2 * pause } else { PAUSE_MIN };
        self.pause.store(pause.min(PAUSE_MAX), Ordering::Relaxed);
        self.waited.store(0, Ordering::Relaxed);
        self.is_under_way.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests of the kernel until the next batch is due.
    fn pause(requests: &ForgetRequests) -> u64 {
        let mut count = 0;
        while !requests.is_due() {
            count += 1;
            assert!(count <= 2 * PAUSE_MAX);
        }
        assert!(!requests.is_due(), "one batch at a time");
        count
    }

    #[test]
    fn the_pause_doubles_while_inodes_are_pinned_and_is_short_when_some_are_forgotten() {
        let requests = ForgetRequests::default();
        assert_eq!(pause(&requests), PAUSE_MIN);
        requests.sent(BATCH, 100_000);
        let pinned: Vec<_> = (0..10)
            .map(|_| {
                let pause = pause(&requests);
                requests.sent(BATCH, 100_000);
                pause
            })
            .collect();
        assert_eq!(pinned[..3], [2, 4, 8].map(|n| n * PAUSE_MIN));
        assert_eq!(pinned[9], PAUSE_MAX);
        pause(&requests);
        requests.sent(BATCH, 90_000);
        assert_eq!(pause(&requests), PAUSE_MIN);
    }

    #[test]
    fn a_kernel_that_remembers_little_is_looked_at_at_the_usual_pace() {
        let requests = ForgetRequests::default();
        for _ in 0..3 {
            assert_eq!(pause(&requests), PAUSE_MIN);
            requests.sent(0, 7);
        }
    }
}
