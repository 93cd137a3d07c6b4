//! The queue of the threads that read leaves ahead of scans.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};
use ramet_nodetable::NodeId;

use crate::key::range::KeyRange;
use crate::node::block::Block;
use crate::node::handle::Handle;
use crate::store::cache::Keeping;

/// Threads that read ahead: so many requests are in flight, beside one of the scan itself.
pub(crate) const THREADS: usize = 3;

/// Most leaves that one scan asks for ahead.
const LEAVES_MAX: usize = 4;

/// Most bytes of one leaf that are read ahead.
pub(crate) const JOB_BYTES_MAX: usize = 1 << 20;

/// Most bytes that one scan has in flight.
const SCAN_BYTES_MAX: usize = 2 << 20;

/// Most jobs that wait; further scans read for themselves.
const QUEUE_MAX: usize = 64;

/// Blocks of a leaf, from a number on.
pub(crate) type Found = (usize, Vec<Arc<Block>>);

#[derive(Debug)]
enum Progress {
    /// Holds the node only until a thread takes the job or the scan cancels it: the queue keeps no
    /// space from being freed.
    Waiting(Arc<Handle>),
    Running,
    Done(Found),
    /// The scan has the blocks, or does not want them any more.
    Over,
}

/// A leaf that a scan will reach, or an interior node on the way.
pub(crate) struct Wanted {
    pub(crate) node: Arc<Handle>,
    /// The range of the scan in the node, in the key space of the node.
    pub(crate) range: KeyRange,
    /// Bytes of values in the range, an estimate, if the scan sees no more of the node; else 0.
    pub(crate) live_bytes: u64,
}

/// A read ahead of one [`Wanted`] node.
#[derive(Debug)]
pub(crate) struct Job {
    id: NodeId,
    pub(crate) range: KeyRange,
    pub(crate) live_bytes: u64,
    pub(crate) keeping: Keeping,
    progress: Mutex<Progress>,
    done: Condvar,
}

impl Job {
    pub(crate) fn is_of(&self, node: &Handle) -> bool {
        self.id == node.id()
    }

    /// The blocks of the job; waits for a read under way. `None` when no thread has begun it, and
    /// then none will.
    pub(crate) fn collect(&self) -> Option<Found> {
        let mut progress = self.progress.lock();
        while matches!(*progress, Progress::Running) {
            self.done.wait(&mut progress);
        }
        match std::mem::replace(&mut *progress, Progress::Over) {
            Progress::Done(found) => Some(found),
            _ => None,
        }
    }

    /// Ends a job that the scan does not want any more.
    pub(crate) fn cancel(&self) {
        let mut progress = self.progress.lock();
        if !matches!(*progress, Progress::Running) {
            *progress = Progress::Over;
        }
    }

    fn begin(&self) -> Option<Arc<Handle>> {
        let mut progress = self.progress.lock();
        if !matches!(*progress, Progress::Waiting(_)) {
            return None;
        }
        match std::mem::replace(&mut *progress, Progress::Running) {
            Progress::Waiting(node) => Some(node),
            _ => None,
        }
    }
}

/// Ends a job also when its read panics, so that no scan waits for ever.
struct Ending<'a> {
    job: &'a Job,
    found: Option<Found>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let end = self.found.take().map_or(Progress::Over, Progress::Done);
        *self.job.progress.lock() = end;
        self.job.done.notify_all();
    }
}

/// Jobs that wait for the threads.
#[derive(Debug, Default)]
pub(crate) struct ReadAhead {
    jobs: Mutex<VecDeque<Arc<Job>>>,
    wake: Condvar,
    is_running: AtomicBool,
}

impl ReadAhead {
    /// Marks that there are threads in [`ReadAhead::work`] from now on.
    pub(crate) fn start(&self) {
        self.is_running.store(true, Ordering::Release);
    }

    pub(crate) fn stop(&self) {
        let mut jobs = self.jobs.lock();
        self.is_running.store(false, Ordering::Release);
        jobs.drain(..).for_each(|job| job.cancel());
        drop(jobs);
        self.wake.notify_all();
    }

    /// Most leaves that a scan may ask for at a time; 0 without threads.
    pub(crate) fn depth(&self, leaf_bytes: usize, cache_bytes: u64) -> usize {
        if !self.is_running.load(Ordering::Acquire) {
            return 0;
        }
        let leaf = leaf_bytes.clamp(1, JOB_BYTES_MAX);
        let cache = usize::try_from(cache_bytes / 8).unwrap_or(usize::MAX);
        (SCAN_BYTES_MAX.min(cache) / leaf).clamp(1, LEAVES_MAX)
    }

    /// Makes a job for a node; `None` when too many jobs wait.
    pub(crate) fn ask(&self, wanted: Wanted, keeping: Keeping) -> Option<Arc<Job>> {
        let Wanted {
            node,
            range,
            live_bytes,
        } = wanted;
        let job = Arc::new(Job {
            id: node.id(),
            range,
            live_bytes,
            keeping,
            progress: Mutex::new(Progress::Waiting(node)),
            done: Condvar::new(),
        });
        let mut jobs = self.jobs.lock();
        if jobs.len() >= QUEUE_MAX || !self.is_running.load(Ordering::Acquire) {
            return None;
        }
        jobs.push_back(job.clone());
        drop(jobs);
        self.wake.notify_one();
        Some(job)
    }

    /// Does each job with `read`, until [`ReadAhead::stop`].
    pub(crate) fn work(&self, read: impl Fn(&Arc<Handle>, &Job) -> Option<Found>) {
        loop {
            let job = {
                let mut jobs = self.jobs.lock();
                loop {
                    if !self.is_running.load(Ordering::Acquire) {
                        return;
                    }
                    match jobs.pop_front() {
                        Some(job) => break job,
                        None => self.wake.wait(&mut jobs),
                    }
                }
            };
            if let Some(node) = job.begin() {
                let mut ending = Ending {
                    job: &job,
                    found: None,
                };
                ending.found = read(&node, &job);
                // Dropped before the scan goes on: this thread must not keep nodes alive that the
                // scan is done with.
                drop(node);
            }
        }
    }
}
