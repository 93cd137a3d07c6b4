//! Looks at blocks of numbers that directories owe.
//!
//! A directory that takes a run looks for numbers that nobody has (`number_reclaim.rs`). A request
//! that makes a name does not wait for that: the directory *owes* the look. The next request that
//! forgets or removes an inode pays for it, and so does a sync. A directory that owes the looks for
//! a few runs pays itself, so no debt grows.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::namespace::inode::Inode;

/// Directories that owe looks, each once. A directory that leaves the memory owes none any more:
/// the next run that it takes makes it look at all of its blocks.
#[derive(Default)]
pub(crate) struct Looks {
    owing: Mutex<VecDeque<Weak<Inode>>>,
    is_any: AtomicBool,
}

impl Looks {
    /// Adds a directory that owed none before.
    pub(crate) fn push(&self, dir: &Arc<Inode>) {
        self.owing.lock().push_back(Arc::downgrade(dir));
        self.is_any.store(true, Ordering::Release);
    }

    /// Takes the directory that owes its looks for the longest time.
    pub(crate) fn pop(&self) -> Option<Arc<Inode>> {
        if !self.is_any.load(Ordering::Acquire) {
            return None;
        }
        let mut owing = self.owing.lock();
        loop {
            let Some(first) = owing.pop_front() else {
                self.is_any.store(false, Ordering::Release);
                return None;
            };
            if let Some(dir) = first.upgrade() {
                return Some(dir);
            }
        }
    }
}
