//! Processes of the daemon that are in its mount for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the processes that the daemon starts and that open something in its mount. The kernel
/// refuses to unmount meanwhile, so `ramet umount` has to tell them from those of others.
#[derive(Clone, Default)]
pub struct OwnProcesses(Arc<Counts>);

#[derive(Default)]
struct Counts {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// A process that counts as running until this is dropped.
pub struct OwnProcess(OwnProcesses);

impl OwnProcesses {
    /// Counts a process, before it is started.
    #[must_use]
    pub fn begin(&self) -> OwnProcess {
        self.0.begun.fetch_add(1, Ordering::SeqCst);
        OwnProcess(self.clone())
    }

    /// The numbers of processes that were begun, and of those that run.
    pub(crate) fn counts(&self) -> (u64, u64) {
        // One that ends in between counts as running, which is true of a moment before.
        let ended = self.0.ended.load(Ordering::SeqCst);
        let begun = self.0.begun.load(Ordering::SeqCst);
        (begun, begun - ended)
    }
}

impl Drop for OwnProcess {
    fn drop(&mut self) {
        self.0.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_runs_from_its_begin_until_it_is_dropped() {
        let processes = OwnProcesses::default();
        let (first, second) = (processes.begin(), processes.begin());
        assert_eq!(processes.counts(), (2, 2));
        drop(first);
        assert_eq!(processes.counts(), (2, 1));
        drop(second);
        assert_eq!(processes.counts(), (2, 0));
    }
}
