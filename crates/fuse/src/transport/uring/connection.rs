//! What the threads of all queues of a mount share, and whether a queue is stuck.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::idle_class::IdleClass;
use crate::server::server::Server;

/// What the threads of all queues share.
pub(super) struct Connection {
    pub(super) server: Arc<Server>,
    pub(super) idle_class: IdleClass,
    pub(super) device: OwnedFd,
    pub(super) queues: Vec<Queue>,
    pub(super) has_failed: AtomicBool,
    /// Ends the mount: requests of a queue without threads would wait for ever.
    pub(super) abort: Box<dyn Fn() + Send + Sync>,
}

/// The queue of a processor.
pub(super) struct Queue {
    /// Its threads. Those that the kernel refused do not count.
    pub(super) threads: AtomicUsize,
    /// Threads that wait for what may wait for others. Syncs end by themselves.
    pub(super) waiting: AtomicUsize,
}

impl Connection {
    /// Whether requests of some processor wait for others of it.
    pub(super) fn is_stuck(&self) -> bool {
        // Of which queue those threads are is not known.
        let anywhere = self.server.waiting();
        let all_wait = |queue: &Queue| {
            let waiting = queue.waiting.load(Ordering::SeqCst) + anywhere;
            waiting >= queue.threads.load(Ordering::SeqCst)
        };
        self.queues.iter().any(all_wait)
    }

    /// Counts the calling thread, of queue `number`, among those that wait while it does `work`. A
    /// panic is `None`.
    pub(super) fn waiting<T>(&self, number: u16, work: impl FnOnce() -> T) -> Option<T> {
        let queue = &self.queues[usize::from(number)];
        queue.waiting.fetch_add(1, Ordering::SeqCst);
        let done = catch_unwind(AssertUnwindSafe(work));
        queue.waiting.fetch_sub(1, Ordering::SeqCst);
        done.ok()
    }

    /// Ends the mount, once.
    pub(super) fn fail(&self) {
        if !self.has_failed.swap(true, Ordering::SeqCst) {
            (self.abort)();
        }
    }
}
