//! The memory of inodes that a volume tells its budget, which other volumes may share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use ramet_block::{Budget, Held, Use};

/// A difference from the bytes told last that a request tells, in bytes: the line of the budget is
/// written by all threads, and most requests change the inodes by one.
const STEP_BYTES: u64 = 32 << 10;

/// The part of [`Use::Inodes`] that is this volume's. It is given back with the volume.
pub(super) struct ToldInodes {
    budget: Arc<Budget>,
    held: Mutex<Held>,
    /// The bytes that were told last.
    last_bytes: AtomicU64,
}

impl ToldInodes {
    /// Nothing yet.
    pub(super) fn new(budget: &Arc<Budget>) -> Self {
        Self {
            budget: Arc::clone(budget),
            held: Mutex::new(Held::new(budget, Use::Inodes)),
            last_bytes: AtomicU64::new(0),
        }
    }

    /// Tells that the inodes of this volume take `bytes` now, unless another thread does so at the
    /// moment. Answers the bytes of the inodes of all volumes.
    pub(super) fn tell(&self, bytes: u64) -> u64 {
        if let Some(mut held) = self.held.try_lock() {
            held.set(bytes);
            self.last_bytes.store(bytes, Ordering::Relaxed);
        }
        self.budget.used(Use::Inodes)
    }

    /// As [`ToldInodes::tell`], if that differs enough from the bytes that were told last.
    pub(super) fn tell_step(&self, bytes: u64) -> u64 {
        let last = self.last_bytes.load(Ordering::Relaxed);
        if bytes.abs_diff(last) < STEP_BYTES {
            return self.budget.used(Use::Inodes);
        }
        self.tell(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_of_one_budget_tell_their_inodes_together() {
        let budget = Budget::of_volumes(1 << 20);
        let (one, other) = (ToldInodes::new(&budget), ToldInodes::new(&budget));
        assert_eq!(one.tell(700), 700);
        assert_eq!(other.tell(300), 1000);
        assert_eq!(one.tell(100), 400);
        drop(other);
        assert_eq!(budget.used(Use::Inodes), 100);
        assert_eq!(one.tell_step(99 + STEP_BYTES), 100, "a small difference");
        assert_eq!(one.tell_step(100 + STEP_BYTES), 100 + STEP_BYTES);
    }
}
