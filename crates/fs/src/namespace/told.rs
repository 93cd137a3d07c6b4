//! The memory of inodes that a volume tells its budget, which other volumes may share.

use std::sync::Arc;

use parking_lot::Mutex;
use ramet_block::{Budget, Held, Use};

/// The part of [`Use::Inodes`] that is this volume's. It is given back with the volume.
pub(super) struct ToldInodes {
    budget: Arc<Budget>,
    held: Mutex<Held>,
}

impl ToldInodes {
    /// Nothing yet.
    pub(super) fn new(budget: &Arc<Budget>) -> Self {
        Self {
            budget: Arc::clone(budget),
            held: Mutex::new(Held::new(budget, Use::Inodes)),
        }
    }

    /// Tells that the inodes of this volume take `bytes` now, unless another thread does so at the
    /// moment. Answers the bytes of the inodes of all volumes.
    pub(super) fn tell(&self, bytes: u64) -> u64 {
        if let Some(mut held) = self.held.try_lock() {
            held.set(bytes);
        }
        self.budget.used(Use::Inodes)
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
    }
}
