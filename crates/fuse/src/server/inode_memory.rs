//! The memory of inodes: compact ones, and requests to forget.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ramet_fs::Volume;
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
    /// The kernel knows no request to forget. An invalidation of a name is no substitute: the
    /// kernel would detach mounts below the name and unhash directories that programs work in.
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
        let can_ask = !self.asking.has_no_prune.load(Ordering::Relaxed);
        if can_ask && self.asking.requests.is_due() {
            let asking = Arc::clone(&self.asking);
            self.worker.run(move || asking.ask());
        }
    }
}

impl Asking {
    fn ask(&self) {
        let inodes = self.volume.inodes_to_forget(BATCH);
        if !inodes.is_empty() {
            match self.kernel.prune(&inodes) {
                Ok(()) => self.counts.count_asked_to_forget(inodes.len() as u64),
                Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {
                    tracing::info!("the kernel forgets inodes only when its own memory is short");
                    self.has_no_prune.store(true, Ordering::Relaxed);
                }
                Err(error) => tracing::debug!(%error, "the kernel forgets nothing"),
            }
        }
        let remembered = self.volume.compact_inode_count();
        self.requests.sent(inodes.len(), remembered);
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Budget, Device, MemDevice};
    use ramet_fs::{FormatOptions, Kind, NewInode, OpenOptions, ROOT_INO};
    use rustix::event::epoll;

    use super::*;

    /// A volume whose budget allows compact inodes of 32 KiB, and files of which the kernel
    /// remembers more.
    fn remembered() -> Arc<Volume> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let options = OpenOptions {
            budget: Some(Budget::of_volumes(256 << 10)),
            ..OpenOptions::default()
        };
        let volume = Volume::open(device, options).unwrap();
        for number in 0..2000 {
            let name = format!("f{number}");
            let new = NewInode::new(Kind::Regular, 0o644);
            let made = volume.names().create(ROOT_INO, name.as_bytes(), &new);
            made.unwrap();
            volume.compact_inodes();
        }
        volume
    }

    #[test]
    fn a_kernel_that_cannot_forget_on_request_is_asked_once_and_keeps_its_names() {
        let volume = remembered();
        assert!(!volume.inodes_to_forget(1).is_empty());
        let kernel = Kernel::default();
        // An epoll refuses to be written to, as an older kernel refuses an unknown notification.
        let refuses = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        kernel.connect(Arc::new(refuses));
        let counts = Arc::<RequestCounts>::default();
        let memory = InodeMemory::new(volume, kernel, Arc::clone(&counts)).unwrap();
        (0..10_000).for_each(|_| memory.keep());
        let asking = Arc::clone(&memory.asking);
        drop(memory);
        assert!(asking.has_no_prune.load(Ordering::Relaxed));
        assert_eq!(counts.asked_to_forget(), 0);
    }
}
