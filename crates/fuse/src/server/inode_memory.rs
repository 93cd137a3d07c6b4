//! The memory of inodes: compact ones, and requests to forget.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ramet_fs::{Ino, Invalidation, Volume};
use rustix::io::Errno;

use crate::cache::forget_requests::{BATCH, ForgetRequests};
use crate::cache::notify::Kernel;
use crate::server::request_counts::RequestCounts;
use crate::server::workers::Workers;

/// Keeps the memory of inodes within the budget of the volume.
pub(crate) struct InodeMemory {
    asking: Arc<Asking>,
    /// One thread: see `cache/forget_requests.rs`.
    worker: Workers,
}

struct Asking {
    volume: Arc<Volume>,
    kernel: Kernel,
    counts: Arc<RequestCounts>,
    requests: ForgetRequests,
    /// The kernel knows no request to forget: names are invalidated instead.
    has_no_prune: AtomicBool,
}

impl InodeMemory {
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn new(
        volume: Arc<Volume>,
        kernel: Kernel,
        counts: Arc<RequestCounts>,
    ) -> std::io::Result<Self> {
        let asking = Asking {
            volume,
            kernel,
            counts,
            requests: ForgetRequests::default(),
            has_no_prune: AtomicBool::new(false),
        };
        Ok(Self {
            asking: Arc::new(asking),
            worker: Workers::new("forget", 1)?,
        })
    }

    /// Does its part for a request that has come.
    pub(crate) fn keep(&self) {
        self.asking.volume.compact_inodes();
        if self.asking.requests.is_due() {
            let asking = Arc::clone(&self.asking);
            self.worker.run(move || asking.ask());
        }
    }
}

impl Asking {
    fn ask(&self) {
        let inodes = self.volume.inodes_to_forget(BATCH);
        if !inodes.is_empty() {
            self.forget(&inodes);
            self.counts.count_asked_to_forget(inodes.len() as u64);
        }
        let remembered = self.volume.compact_inode_count();
        self.requests.sent(inodes.len(), remembered);
    }

    fn forget(&self, inodes: &[Ino]) {
        if !self.has_no_prune.load(Ordering::Relaxed) {
            match self.kernel.prune(inodes) {
                Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {
                    self.has_no_prune.store(true, Ordering::Relaxed);
                }
                Err(error) => return tracing::debug!(%error, "the kernel forgets nothing"),
                Ok(()) => return,
            }
        }
        let places = inodes
            .iter()
            .filter_map(|ino| self.volume.place_to_forget(*ino));
        let stale: Vec<_> = places
            .map(|(dir, name)| Invalidation::Entry { dir, name })
            .collect();
        self.kernel.invalidate(&stale);
    }
}
