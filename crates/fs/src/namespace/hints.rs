//! Hints of the inodes that names led to.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::fast::FixedState;

use crate::format::ino::Ino;

/// Slots for hints: two for each inode in memory, at least and at most.
pub(super) const HINTS_MIN: usize = 1 << 10;
pub(super) const HINTS_MAX: usize = 1 << 21;

/// Numbers of the inodes that names led to, by a hash of directory and name, in pairs: the last
/// inode of that hash and the one before. 0 stands for none. A hint may be wrong and is checked;
/// some hints are lost.
pub(super) struct Hints {
    pub(super) slots: Vec<AtomicU64>,
}

impl Hints {
    /// `slots` is a power of two.
    pub(super) fn new(slots: usize) -> Self {
        Self {
            slots: (0..slots).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn pair(&self, dir: Ino, name: &[u8]) -> &[AtomicU64] {
        let hash = FixedState::default().hash_one((dir.0, name));
        let pairs = self.slots.len() as u64 / 2;
        let at = usize::try_from(hash % pairs).expect("below their number");
        &self.slots[2 * at..2 * at + 2]
    }

    pub(super) fn get(&self, dir: Ino, name: &[u8]) -> [Ino; 2] {
        let pair = self.pair(dir, name);
        [0, 1].map(|at| Ino(pair[at].load(Ordering::Relaxed)))
    }

    pub(super) fn put(&self, dir: Ino, name: &[u8], ino: Ino) {
        let pair = self.pair(dir, name);
        let before = pair[0].swap(ino.0, Ordering::Relaxed);
        if before != ino.0 {
            pair[1].store(before, Ordering::Relaxed);
        }
    }
}
