//! Threads for jobs that take too long for a thread that reads requests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use parking_lot::Mutex;

type Job = Box<dyn FnOnce() + Send>;

/// A few threads with one queue. Dropping it waits until all jobs are done.
pub(crate) struct Workers {
    queue: Mutex<Option<Sender<Job>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    pub(crate) fn new(name: &str, count: usize) -> std::io::Result<Self> {
        let (sender, receiver) = channel::<Job>();
        let receiver = Arc::new(Mutex::new(receiver));
        let spawn = |number| {
            let receiver = Arc::clone(&receiver);
            std::thread::Builder::new()
                .name(format!("{name}-{number}"))
                .spawn(move || run(&receiver))
        };
        let threads = (0..count).map(spawn).collect::<std::io::Result<_>>()?;
        Ok(Self {
            queue: Mutex::new(Some(sender)),
            threads,
        })
    }

    /// Runs a job soon, on one of the threads, which goes on with the next one if it panics.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        if let Some(queue) = &*self.queue.lock() {
            queue
                .send(Box::new(job))
                .expect("the threads live as long as the queue is open");
        }
    }
}

fn run(jobs: &Mutex<Receiver<Job>>) {
    loop {
        let job = jobs.lock().recv();
        let Ok(job) = job else {
            return;
        };
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            let thread = std::thread::current();
            tracing::error!(thread = thread.name(), "a job panicked");
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.queue.lock().take();
        for thread in self.threads.drain(..) {
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
    fn a_job_that_panics_leaves_its_thread_to_the_next_one() {
        let workers = Workers::new("test", 1).unwrap();
        workers.run(|| panic!("on purpose"));
        let (done, is_done) = channel();
        workers.run(move || done.send(()).unwrap());
        assert_eq!(is_done.recv(), Ok(()));
    }
}
