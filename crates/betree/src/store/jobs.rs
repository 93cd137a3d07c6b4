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

/// Threads that read ahead: so many requests are in flight, and one of the scan itself.
pub(crate) const THREADS: usize = 3;

/// Most leaves that one scan asks for ahead.
const LEAVES_MAX: usize = 4;

/// Most bytes of one leaf that are read ahead.
pub(crate) const JOB_BYTES_MAX: usize = 1 << 20;

/// Most bytes that one scan has in flight.
const SCAN_BYTES_MAX: usize = 2 << 20;

/// Most jobs that wait; scans beyond them read for themselves.
const QUEUE_MAX: usize = 64;

/// Blocks of a leaf from a number on.
pub(crate) type Found = (usize, Vec<Arc<Block>>);

#[derive(Debug)]
enum Progress {
    /// Holds the node only until somebody else does or nobody wants it: the queue keeps no space from being freed.
    Waiting(Arc<Handle>),
    Running,
    Done(Found),
    /// The scan has what it wanted, or wants it no more.
    Over,
}

/// A leaf that a scan will come to, or an interior node on the way.
pub(crate) struct Wanted {
    pub(crate) node: Arc<Handle>,
    /// What the scan will see of it, in its key space.
    pub(crate) range: KeyRange,
    /// Bytes of values in the range, about, if it is all that is seen of the node; else 0.
    pub(crate) live_bytes: u64,
}

/// Reading ahead of one [`Wanted`] node.
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

    /// What was read, waiting for a read under way. Nothing when none was begun; then none will be.
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

    /// The scan does not want it any more.
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

/// Ends a job also when reading it panics, so that no scan waits for ever.
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
    /// From now on there are threads in [`ReadAhead::work`].
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

    /// Leaves that a scan may ask for at a time; 0 without threads.
    pub(crate) fn depth(&self, leaf_bytes: usize, cache_bytes: u64) -> usize {
        if !self.is_running.load(Ordering::Acquire) {
            return 0;
        }
        let leaf = leaf_bytes.clamp(1, JOB_BYTES_MAX);
        let cache = usize::try_from(cache_bytes / 8).unwrap_or(usize::MAX);
        (SCAN_BYTES_MAX.min(cache) / leaf).clamp(1, LEAVES_MAX)
    }

    /// Asks for a node; `None` when too much waits already.
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

    /// Has `read` do each job that is asked for, until [`ReadAhead::stop`].
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
                // Before the scan goes on: what it is done with must not be kept alive from here.
                drop(node);
            }
        }
    }
}
