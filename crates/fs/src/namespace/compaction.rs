//! The pace at which inodes are made compact.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::namespace::inode::{LOOKED_AT, Round};

/// Calls without a round after rounds that found few inodes, at most.
const PAUSE_MAX: usize = 64;

/// When inodes are made compact: rounds that find few are followed by longer and longer pauses.
#[derive(Default)]
pub(crate) struct Compaction {
    /// Calls that pass before the next round.
    waits: AtomicUsize,
    pause: AtomicUsize,
}

impl Compaction {
    /// Whether a round may begin.
    pub(super) fn is_due(&self) -> bool {
        let one_less = |waits: usize| waits.checked_sub(1);
        let waits = &self.waits;
        let waited = waits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        waited.is_err()
    }

    /// A round is done.
    pub(super) fn is_done(&self, round: Round) {
        let found_few = round.looked_at >= LOOKED_AT && round.made < round.looked_at / 16;
        let longer = (2 * self.pause.load(Ordering::Relaxed)).clamp(1, PAUSE_MAX);
        let pause = if found_few { longer } else { 0 };
        self.pause.store(pause, Ordering::Relaxed);
        self.waits.store(pause, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_that_find_few_inodes_are_followed_by_longer_and_longer_pauses() {
        let compaction = Compaction::default();
        let pause = || (0..).find(|_| compaction.is_due()).unwrap();
        let round = |made| Round {
            looked_at: LOOKED_AT,
            made,
        };
        let pauses: Vec<_> = (0..9)
            .map(|_| {
                compaction.is_done(round(3));
                pause()
            })
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        compaction.is_done(round(4));
        assert_eq!(pause(), 0);
    }
}
