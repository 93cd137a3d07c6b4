//! Signals: the work that the background threads are asked for, and the end of each round of it.
//!
//! One lock, held for a moment: no lock is taken under it.

use std::sync::Arc;
use std::time::Duration;

use crate::node::handle::Handle;
use crate::sync::{Condvar, Mutex};

/// Work that a background thread is asked for.
#[derive(Default)]
pub(crate) struct Wanted {
    pub(crate) flush: bool,
    /// A node that needs a compacted copy.
    pub(crate) compacted_copy: Option<Arc<Handle>>,
    pub(crate) checkpoint: bool,
    /// Whether the frames that are queued for the journal are to be written.
    pub(crate) journal: bool,
    pub(crate) stop: bool,
}

/// See the module header.
#[derive(Default)]
pub(crate) struct Signals {
    wanted: Mutex<Wanted>,
    /// Signals of the flusher and of the keeper. They are apart, so that a clone that wants a
    /// compacted copy does not make the keeper sync the journal.
    work: Condvar,
    keep: Condvar,
    /// Signalled after each round of background work.
    progress: Condvar,
}

impl Signals {
    /// Asks for work, and wakes the threads.
    pub(crate) fn want(&self, set: impl FnOnce(&mut Wanted)) {
        set(&mut self.wanted.lock());
        self.work.notify_all();
        self.keep.notify_all();
    }

    /// Asks the flusher to move messages down.
    pub(crate) fn want_flush(&self) {
        self.wanted.lock().flush = true;
        self.work.notify_all();
    }

    /// Asks the flusher for a compacted copy of `node`.
    pub(crate) fn want_compacted_copy(&self, node: Arc<Handle>) {
        let before = self.wanted.lock().compacted_copy.replace(node);
        self.work.notify_all();
        // The handle may be the last one: it goes without the lock.
        drop(before);
    }

    /// Asks the keeper to write out the queue of the journal.
    pub(crate) fn want_journal(&self) {
        let mut wanted = self.wanted.lock();
        if !wanted.journal {
            wanted.journal = true;
            self.keep.notify_all();
        }
    }

    /// Asks for a flush and a checkpoint, and waits for a round of background work, `longest` at
    /// most.
    pub(crate) fn wait_for_progress(&self, longest: Duration) {
        let mut wanted = self.wanted.lock();
        wanted.flush = true;
        wanted.checkpoint = true;
        self.work.notify_all();
        self.keep.notify_all();
        self.progress.wait_for(&mut wanted, longest);
    }

    /// Waits for work of the flusher: whether to flush, and the node to be copied. `None` when the
    /// thread is to stop.
    pub(crate) fn wait_for_work(&self) -> Option<(bool, Option<Arc<Handle>>)> {
        let mut wanted = self.wanted.lock();
        while !wanted.flush && wanted.compacted_copy.is_none() && !wanted.stop {
            self.work.wait(&mut wanted);
        }
        if wanted.stop {
            return None;
        }
        let flush = std::mem::take(&mut wanted.flush);
        Some((flush, wanted.compacted_copy.take()))
    }

    /// Waits for work of the keeper, `longest` at most: whether a checkpoint is asked for, and
    /// whether the queue of the journal is to be written out. `None` when the thread is to stop.
    pub(crate) fn wait_to_keep(&self, longest: Duration) -> Option<(bool, bool)> {
        let mut wanted = self.wanted.lock();
        if !wanted.checkpoint && !wanted.journal && !wanted.stop {
            self.keep.wait_for(&mut wanted, longest);
        }
        if wanted.stop {
            return None;
        }
        let journal = std::mem::take(&mut wanted.journal);
        Some((std::mem::take(&mut wanted.checkpoint), journal))
    }

    /// Says that a round of background work is over.
    pub(crate) fn progressed(&self) {
        self.progress.notify_all();
    }
}
