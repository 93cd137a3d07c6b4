//! The pace of requests to forget: the kernel remembers more inodes than the memory budget allows.
//!
//! A request to forget names a batch of inodes, and goes out on a thread of its own, since it
//! waits for locks in the kernel. The kernel answers with FORGETs for the inodes that no program
//! uses. A batch that frees little has met inodes that are *pinned*: open, watched, mapped, or with
//! others below. Then the pause doubles before the next batch.

use std::time::Duration;

/// Inodes of a batch.
pub(crate) const BATCH: usize = 1024;
/// Inodes that a batch frees at least, if few of it are pinned.
const FREED_MIN: u64 = BATCH as u64 / 8;
/// Time between two batches, at least and at most.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// See the module header.
pub(crate) struct ForgetRequests {
    pause: Duration,
    /// Inodes that were freed until the last batch went out.
    freed: u64,
}

impl ForgetRequests {
    /// Before the first batch, `freed` inodes were freed.
    pub(crate) fn new(freed: u64) -> Self {
        Self {
            pause: PAUSE_MIN,
            freed,
        }
    }

    /// The time before the next batch, if `freed` inodes were freed until now.
    pub(crate) fn pause(&mut self, freed: u64) -> Duration {
        let is_pinned = freed.saturating_sub(self.freed) < FREED_MIN;
        self.freed = freed;
        self.pause = if is_pinned {
            (2 * self.pause).min(PAUSE_MAX)
        } else {
            PAUSE_MIN
        };
        self.pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_while_inodes_are_pinned_and_is_short_when_some_are_forgotten() {
        let mut requests = ForgetRequests::new(100_000);
        for factor in [2, 4, 8] {
            assert_eq!(requests.pause(100_000), factor * PAUSE_MIN);
        }
        let longest = (0..10).map(|_| requests.pause(100_000)).max();
        assert_eq!(longest, Some(PAUSE_MAX));
        assert_eq!(requests.pause(100_000 + FREED_MIN), PAUSE_MIN);
        assert_eq!(requests.pause(100_001 + FREED_MIN), 2 * PAUSE_MIN);
    }
}
