//! The state that the threads of all queues of a mount share, and the test for a stuck queue.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::io::Errno;

use super::idle_class::IdleClass;
use crate::protocol::Answer;
use crate::server::server::Server;

/// The state that the threads of all queues share.
pub(super) struct Connection {
    pub(super) server: Arc<Server>,
    pub(super) idle_class: IdleClass,
    pub(super) device: OwnedFd,
    pub(super) queues: Vec<Queue>,
    pub(super) has_failed: AtomicBool,
    /// Ends the mount, since requests of a queue without threads would wait for ever.
    pub(super) abort: Box<dyn Fn() + Send + Sync>,
}

/// The queue of a processor.
pub(super) struct Queue {
    /// Number of its threads, without those whose entry the kernel refused.
    pub(super) threads: AtomicUsize,
    /// Number of its threads that wait for work that may wait for other requests. Syncs do not
    /// count: they end by themselves.
    pub(super) waiting: AtomicUsize,
}

impl Connection {
    /// Whether all threads of some queue wait, so that its requests may wait for each other.
    pub(super) fn is_stuck(&self) -> bool {
        // The queues of these threads are not known, so they count for each queue.
        let anywhere = self.server.waiting();
        let all_wait = |queue: &Queue| {
            let waiting = queue.waiting.load(Ordering::SeqCst) + anywhere;
            waiting >= queue.threads.load(Ordering::SeqCst)
        };
        self.queues.iter().any(all_wait)
    }

    /// Counts the calling thread, of queue `number`, as waiting while it does `work`. Answers
    /// `None` after a panic.
    pub(super) fn waiting<T>(&self, number: u16, work: impl FnOnce() -> T) -> Option<T> {
        let queue = &self.queues[usize::from(number)];
        queue.waiting.fetch_add(1, Ordering::SeqCst);
        let done = catch_unwind(AssertUnwindSafe(work));
        queue.waiting.fetch_sub(1, Ordering::SeqCst);
        done.ok()
    }

    /// Does `work`, which takes long, as [`Connection::waiting`] does, if another thread of the
    /// queue is left for its other requests. The only thread of a queue does the work too.
    ///
    /// # Errors
    /// `EAGAIN` if no other thread is left.
    pub(super) fn waiting_long<T>(
        &self,
        number: u16,
        work: impl FnOnce() -> T,
    ) -> Answer<Option<T>> {
        let queue = &self.queues[usize::from(number)];
        let most = queue
            .threads
            .load(Ordering::SeqCst)
            .saturating_sub(1)
            .max(1);
        let more = |waiting| (waiting < most).then_some(waiting + 1);
        let (set, fetch) = (Ordering::SeqCst, Ordering::SeqCst);
        let taken = queue.waiting.fetch_update(set, fetch, more);
        taken.map_err(|_| Errno::AGAIN)?;
        let done = catch_unwind(AssertUnwindSafe(work));
        queue.waiting.fetch_sub(1, Ordering::SeqCst);
        Ok(done.ok())
    }

    /// Ends the mount, at most once.
    pub(super) fn fail(&self) {
        if !self.has_failed.swap(true, Ordering::SeqCst) {
            (self.abort)();
        }
    }
}
