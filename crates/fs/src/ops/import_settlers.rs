//! Threads that settle blocks of imports beside the streams.
//!
//! All imports of a volume share them: at most one thread a processor runs, each for one part of
//! the blocks, and so their memory is bounded. A stream that finds all of them busy settles its
//! blocks itself, which also holds it up while the device is slower than the source.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use crate::error::Result;

/// Threads at most, however many processors there are.
const THREADS_MAX: usize = 8;

/// The threads of a volume.
pub(crate) struct Settlers {
    running: AtomicUsize,
    threads_max: usize,
}

impl Settlers {
    /// As many threads as there are processors; none runs yet.
    pub(crate) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            running: AtomicUsize::new(0),
            threads_max: processors.min(THREADS_MAX),
        }
    }
}

/// The right to run one thread.
struct Turn(Arc<Settlers>);

impl Turn {
    fn take(settlers: &Arc<Settlers>) -> Option<Turn> {
        let more = |running| (running < settlers.threads_max).then_some(running + 1);
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        settlers.running.fetch_update(set, fetch, more).ok()?;
        Some(Turn(Arc::clone(settlers)))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Parts of one import that are settled beside it. The last ones end before the value is dropped.
pub(crate) struct Settled {
    settlers: Arc<Settlers>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Settled {
    /// Nothing is under way.
    pub(crate) fn new(settlers: &Arc<Settlers>) -> Self {
        Self {
            settlers: Arc::clone(settlers),
            threads: Vec::new(),
        }
    }

    /// Runs `job` on a thread of its own if there is a turn, and here otherwise.
    ///
    /// # Errors
    /// Those of this job, if it ran here, and of earlier ones.
    pub(crate) fn run(&mut self, job: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        let (ended, running) = std::mem::take(&mut self.threads)
            .into_iter()
            .partition(|thread| thread.is_finished());
        self.threads = running;
        join(ended)?;
        let Some(turn) = Turn::take(&self.settlers) else {
            return job();
        };
        let slot = Arc::new(parking_lot::Mutex::new(Some(job)));
        let named = std::thread::Builder::new().name("ramet-import".to_owned());
        let started = named.spawn({
            let slot = Arc::clone(&slot);
            move || {
                // The stream may come from a thread that stays on one processor.
                ramet_sys::run_anywhere();
                let _turn = turn;
                let job = slot.lock().take();
                job.map_or(Ok(()), |job| job())
            }
        });
        match started {
            Ok(thread) => self.threads.push(thread),
            // The machine has no thread left: the job is still there.
            Err(_) => {
                let job = slot.lock().take();
                return job.map_or(Ok(()), |job| job());
            }
        }
        Ok(())
    }

    /// Waits for all jobs.
    ///
    /// # Errors
    /// The first error of a job.
    pub(crate) fn finish(&mut self) -> Result<()> {
        join(std::mem::take(&mut self.threads))
    }
}

impl Drop for Settled {
    fn drop(&mut self) {
        // The import ends without its tree, and so its errors are nobody's: the stream had one.
        for thread in std::mem::take(&mut self.threads) {
            let _ = thread.join();
        }
    }
}

fn join(threads: Vec<JoinHandle<Result<()>>>) -> Result<()> {
    let mut result = Ok(());
    for thread in threads {
        let ended = thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        result = result.and(ended);
    }
    result
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    use super::*;

    #[test]
    fn a_job_runs_where_its_stream_may_not() {
        let all = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu));
        let mut one = CpuSet::new();
        one.set(first.unwrap());
        let (tell, told) = channel();
        let stream = std::thread::spawn(move || {
            sched_setaffinity(None, &one).unwrap();
            let mut settled = Settled::new(&Arc::new(Settlers::new()));
            let job = move || {
                tell.send(sched_getaffinity(None).unwrap().count()).unwrap();
                Ok(())
            };
            settled.run(job).unwrap();
            settled.finish().unwrap();
        });
        stream.join().unwrap();
        assert!(told.recv().unwrap() >= all.count());
    }
}
