//! The memory of inodes: compact ones, and requests to forget.
//!
//! Each request makes some inodes compact when there are too many that are not. A thread goes on
//! for as long as inodes take more than the budget allows, whether requests come or not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use ramet_fs::Volume;
use rustix::io::Errno;

use crate::cache::forget_requests::{BATCH, ForgetRequests};
use crate::cache::notify::Kernel;
use crate::server::request_counts::RequestCounts;
use crate::server::workers::Workers;

/// Rounds that make inodes compact before a batch of inodes is to be forgotten.
const ROUNDS: usize = 64;

/// Keeps the memory of inodes within the budget of the volume.
pub(crate) struct InodeMemory {
    keeper: Arc<Keeper>,
    /// One thread, which may wait in the kernel.
    worker: Workers,
}

struct Keeper {
    volume: Arc<Volume>,
    kernel: Kernel,
    counts: Arc<RequestCounts>,
    is_at_work: AtomicBool,
    /// The kernel knows no request to forget. An invalidation of a name is no substitute: the
    /// kernel would detach mounts below the name and unhash directories that programs work in.
    has_no_prune: AtomicBool,
    has_ended: Mutex<bool>,
    ended: Condvar,
}

impl InodeMemory {
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn new(
        volume: Arc<Volume>,
        kernel: Kernel,
        counts: Arc<RequestCounts>,
    ) -> std::io::Result<Self> {
        let keeper = Keeper {
            volume,
            kernel,
            counts,
            is_at_work: AtomicBool::new(false),
            has_no_prune: AtomicBool::new(false),
            has_ended: Mutex::new(false),
            ended: Condvar::new(),
        };
        Ok(Self {
            keeper: Arc::new(keeper),
            worker: Workers::new("forget", 1)?,
        })
    }

    /// Does its part for a request that has come.
    pub(crate) fn keep(&self) {
        let keeper = &self.keeper;
        keeper.volume.compact_inodes();
        if keeper.volume.has_too_many_inodes()
            && !keeper.is_at_work.load(Ordering::Relaxed)
            && !keeper.is_at_work.swap(true, Ordering::SeqCst)
        {
            let keeper = Arc::clone(keeper);
            self.worker.run(move || {
                keeper.work();
                keeper.is_at_work.store(false, Ordering::SeqCst);
            });
        }
    }
}

impl Drop for InodeMemory {
    fn drop(&mut self) {
        *self.keeper.has_ended.lock() = true;
        self.keeper.ended.notify_all();
    }
}

impl Keeper {
    /// Works until inodes take no more than the budget allows, or the mount ends.
    fn work(&self) {
        let mut compacted = 0;
        let mut requests = ForgetRequests::new(self.volume.forgotten_inodes());
        while self.volume.has_too_many_inodes() {
            let rounds = (0..ROUNDS).map(|_| self.volume.compact_inodes());
            compacted += rounds.sum::<usize>() as u64;
            self.ask();
            let pause = requests.pause(compacted + self.volume.forgotten_inodes());
            if self.has_ended_within(pause) {
                return;
            }
        }
    }

    /// Asks the kernel to forget a batch of inodes, if it remembers too many.
    fn ask(&self) {
        if self.has_no_prune.load(Ordering::Relaxed) {
            return;
        }
        let inodes = self.volume.inodes_to_forget(BATCH);
        if inodes.is_empty() {
            return;
        }
        match self.kernel.prune(&inodes) {
            Ok(()) => self.counts.count_asked_to_forget(inodes.len() as u64),
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {
                tracing::info!("the kernel forgets inodes only when its own memory is short");
                self.has_no_prune.store(true, Ordering::Relaxed);
            }
            Err(error) => tracing::debug!(%error, "the kernel forgets nothing"),
        }
    }

    fn has_ended_within(&self, pause: Duration) -> bool {
        let mut has_ended = self.has_ended.lock();
        if !*has_ended {
            self.ended.wait_for(&mut has_ended, pause);
        }
        *has_ended
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read};
    use std::time::Instant;

    use ramet_block::{Budget, Device, MemDevice};
    use ramet_fs::{FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO};
    use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

    use super::*;

    /// A volume whose budget allows inodes of 32 KiB, and files that take more.
    fn remembered(files: u32) -> Arc<Volume> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let options = OpenOptions {
            budget: Some(Budget::of_volumes(256 << 10)),
            ..OpenOptions::default()
        };
        let volume = Volume::open(device, options).unwrap();
        for number in 0..files {
            let name = format!("f{number}");
            let new = NewInode::new(Kind::Regular, 0o644);
            let made = volume.names().create(ROOT_INO, name.as_bytes(), &new);
            made.unwrap();
        }
        volume
    }

    /// The next request to forget that comes out of `pipe`; none if no request comes soon.
    fn asked(pipe: &mut PipeReader) -> Vec<Ino> {
        let mut polled = [PollFd::new(pipe, PollFlags::IN)];
        let soon = Timespec {
            tv_sec: 0,
            tv_nsec: 10_000_000,
        };
        if poll(&mut polled, Some(&soon)).unwrap() == 0 {
            return Vec::new();
        }
        let mut head = [0; 48];
        pipe.read_exact(&mut head).unwrap();
        let len = u32::from_ne_bytes(head[..4].try_into().unwrap()) as usize;
        let mut numbers = vec![0; len - head.len()];
        pipe.read_exact(&mut numbers).unwrap();
        let numbers = numbers.chunks_exact(8);
        numbers
            .map(|number| Ino(u64::from_ne_bytes(number.try_into().unwrap())))
            .collect()
    }

    #[test]
    fn inodes_come_back_into_the_budget_after_the_last_request() {
        let volume = remembered(20_000);
        let kernel = Kernel::default();
        let (mut requests, to_kernel) = std::io::pipe().unwrap();
        kernel.connect(Arc::new(to_kernel.into()));
        let memory = InodeMemory::new(Arc::clone(&volume), kernel, Arc::default()).unwrap();
        memory.keep();
        // A program uses the first one.
        let mut first = None;
        let began = Instant::now();
        while volume.has_too_many_inodes() {
            assert!(began.elapsed() < Duration::from_secs(60), "it goes on");
            for ino in asked(&mut requests) {
                if ino != *first.get_or_insert(ino) {
                    volume.forget(ino, 1);
                }
            }
        }
        assert!(first.is_some());
        drop(memory);
    }

    #[test]
    fn a_kernel_that_cannot_forget_on_request_is_asked_once_and_keeps_its_names() {
        let volume = remembered(2000);
        for _ in 0..1000 {
            volume.compact_inodes();
        }
        assert!(!volume.inodes_to_forget(1).is_empty());
        let kernel = Kernel::default();
        // An epoll refuses to be written to, as an older kernel refuses an unknown notification.
        let refuses = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        kernel.connect(Arc::new(refuses));
        let counts = Arc::<RequestCounts>::default();
        let memory = InodeMemory::new(volume, kernel, Arc::clone(&counts)).unwrap();
        memory.keep();
        let keeper = Arc::clone(&memory.keeper);
        drop(memory);
        assert!(keeper.has_no_prune.load(Ordering::Relaxed));
        assert_eq!(counts.asked_to_forget(), 0);
    }
}
