//! Threads for jobs that take too long for a thread that reads requests.
//!
//! The first thread is there from the start, so every job is done at some time. Another one starts
//! when a job comes while all are busy.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use parking_lot::Mutex;

type Job = Box<dyn FnOnce() + Send>;

/// A few threads with one queue. Dropping it waits until all jobs are done.
pub(crate) struct Workers {
    name: String,
    threads_max: usize,
    queue: Mutex<Option<Sender<Job>>>,
    jobs: Arc<Jobs>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Jobs {
    queue: Mutex<Receiver<Job>>,
    /// Jobs that are queued or under way.
    count: AtomicUsize,
}

impl Workers {
    /// Up to `threads_max` threads.
    ///
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn new(name: &str, threads_max: usize) -> std::io::Result<Self> {
        let (sender, receiver) = channel::<Job>();
        let jobs = Jobs {
            queue: Mutex::new(receiver),
            count: AtomicUsize::new(0),
        };
        let workers = Self {
            name: name.to_owned(),
            threads_max,
            queue: Mutex::new(Some(sender)),
            jobs: Arc::new(jobs),
            threads: Mutex::default(),
        };
        workers.start_thread(&mut workers.threads.lock())?;
        Ok(workers)
    }

    fn start_thread(&self, threads: &mut Vec<JoinHandle<()>>) -> std::io::Result<()> {
        let jobs = Arc::clone(&self.jobs);
        let name = format!("{}-{}", self.name, threads.len());
        let thread = std::thread::Builder::new().name(name);
        threads.push(thread.spawn(move || jobs.work())?);
        Ok(())
    }

    /// Runs a job soon, on one of the threads, which goes on with the next one if it panics.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let count = self.jobs.count.fetch_add(1, Ordering::SeqCst) + 1;
        if let Some(queue) = &*self.queue.lock() {
            queue
                .send(Box::new(job))
                .expect("the threads live as long as the queue is open");
        }
        let mut threads = self.threads.lock();
        if count > threads.len()
            && threads.len() < self.threads_max
            && let Err(error) = self.start_thread(&mut threads)
        {
            // The others do the job when they come to it.
            tracing::warn!(%error, name = self.name, "a thread cannot be started");
        }
    }
}

impl Jobs {
    fn work(&self) {
        loop {
            let job = self.queue.lock().recv();
            let Ok(job) = job else {
                return;
            };
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                let thread = std::thread::current();
                tracing::error!(thread = thread.name(), "a job panicked");
            }
            self.count.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.queue.lock().take();
        for thread in self.threads.get_mut().drain(..) {
            if thread.join().is_err() {
                tracing::error!("a worker thread panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn dropping_waits_for_every_job() {
        let done = Arc::new(AtomicU32::new(0));
        let workers = Workers::new("test", 3).unwrap();
        for _ in 0..100 {
            let done = Arc::clone(&done);
            workers.run(move || {
                done.fetch_add(1, Ordering::SeqCst);
            });
        }
        drop(workers);
        assert_eq!(done.load(Ordering::SeqCst), 100);
    }

    #[test]
    fn as_many_jobs_as_there_may_be_threads_wait_for_each_other() {
        let workers = Workers::new("test", 3).unwrap();
        assert_eq!(workers.threads.lock().len(), 1);
        let together = Arc::new(std::sync::Barrier::new(3));
        for _ in 0..30 {
            let together = Arc::clone(&together);
            workers.run(move || {
                together.wait();
            });
        }
        assert_eq!(workers.threads.lock().len(), 3);
    }

    #[test]
    fn a_job_that_panics_leaves_its_thread_to_the_next_one() {
        let workers = Workers::new("test", 1).unwrap();
        workers.run(|| panic!("on purpose"));
        let (done, is_done) = channel();
        workers.run(move || done.send(()).unwrap());
        assert_eq!(is_done.recv(), Ok(()));
    }
}
