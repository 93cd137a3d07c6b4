//! Threads for jobs that take too long for a thread that reads requests.
//!
//! A thread starts when a job comes while all are busy, and ends when no job came for
//! [`IDLE_MAX`]. Workers that answer requests are [`Workers::lasting`]: their first thread is there
//! from the start and stays. A program may wait for its answer with everything that keeps the system
//! from having another thread.
//!
//! A job may wait for a lock that a program holds for ever. Workers with such jobs are
//! [`Workers::shared`]: the jobs of one user have a part of the threads only, and wait for each
//! other.
//!
//! Every job is done at some time, although the system may refuse threads: one thread of the
//! process, the *starter*, tries again until there is one. A thread runs on every processor, in the
//! usual class, although a thread of a ring may have started it.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

/// A job, and the user whose threads it takes.
struct Queued {
    user: Option<u32>,
    job: Job,
}

/// How long a thread waits for a job before it ends.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// The pause before the system is asked again for a thread that it refused.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);

/// A few threads with one queue. Dropping it waits until all jobs are done, but not for the job that
/// drops it.
pub(crate) struct Workers {
    crew: Arc<Crew>,
    starter: &'static Starter,
}

/// The threads with their queue.
struct Crew {
    name: String,
    threads_max: usize,
    /// Threads that the jobs of one user have at the same time.
    of_user_max: usize,
    /// Threads that do not end without jobs.
    lasting: usize,
    idle_max: Duration,
    state: Mutex<State>,
    /// A job came, or no more will come.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Queued>,
    /// By user: jobs under way.
    running: HashMap<u32, usize>,
    threads: Vec<JoinHandle<()>>,
    /// Threads that wait for a job.
    idle: usize,
    /// No more jobs will come.
    has_ended: bool,
    /// The system has no more threads, in a test.
    #[cfg(test)]
    is_refused: bool,
}

impl Workers {
    /// Up to `threads_max` threads, and none without jobs.
    ///
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn new(name: &str, threads_max: usize) -> std::io::Result<Self> {
        Self::with(name, (0, threads_max), threads_max, IDLE_MAX)
    }

    /// Up to `threads_max` threads, of which the jobs of one user have `of_user_max`, and none
    /// without jobs.
    ///
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn shared(
        name: &str,
        threads_max: usize,
        of_user_max: usize,
    ) -> std::io::Result<Self> {
        Self::with(name, (0, threads_max), of_user_max, IDLE_MAX)
    }

    /// One thread to `threads_max`.
    ///
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn lasting(name: &str, threads_max: usize) -> std::io::Result<Self> {
        Self::with(name, (1, threads_max), threads_max, IDLE_MAX)
    }

    fn with(
        name: &str,
        (lasting, threads_max): (usize, usize),
        of_user_max: usize,
        idle_max: Duration,
    ) -> std::io::Result<Self> {
        let crew = Arc::new(Crew {
            name: name.to_owned(),
            threads_max,
            of_user_max,
            lasting,
            idle_max,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let workers = Self {
            crew,
            starter: Starter::of_process()?,
        };
        for _ in 0..lasting {
            workers.crew.start(&mut workers.crew.state.lock())?;
        }
        Ok(workers)
    }

    /// Runs a job soon, on one of the threads, which goes on with the next one if it panics.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        self.run_of(None, job);
    }

    /// As [`Workers::run`], on one of the threads that the jobs of `user` may have, if one is known.
    pub(crate) fn run_of(&self, user: Option<u32>, job: impl FnOnce() + Send + 'static) {
        let job = Box::new(job);
        let mut state = self.crew.state.lock();
        state.queue.push_back(Queued { user, job });
        let started = self.crew.start_if_busy(&mut state);
        drop(state);
        self.crew.changed.notify_one();
        if let Err(error) = started
            && self.starter.start_later(&self.crew)
        {
            tracing::warn!(%error, name = self.crew.name, "a thread cannot be started yet");
        }
    }
}

impl Crew {
    /// Starts a thread if more jobs may begin than threads wait, and there may be one more.
    fn start_if_busy(self: &Arc<Self>, state: &mut State) -> std::io::Result<()> {
        let is_full = state.threads.len() >= self.threads_max;
        if is_full || state.has_ended || !state.is_busy(self.of_user_max) {
            return Ok(());
        }
        self.start(state)
    }

    fn start(self: &Arc<Self>, state: &mut State) -> std::io::Result<()> {
        #[cfg(test)]
        if state.is_refused {
            return Err(std::io::ErrorKind::WouldBlock.into());
        }
        let crew = Arc::clone(self);
        let name = format!("{}-{}", self.name, state.threads.len());
        let thread = std::thread::Builder::new().name(name);
        let work = move || {
            // A thread begins with the processor and the class of the one that starts it.
            ramet_sys::run_anywhere();
            crew.work();
        };
        state.threads.push(thread.spawn(work)?);
        Ok(())
    }

    /// Does jobs until none comes for long, or no more will come.
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(Queued { user, job }) = state.begin_next(self.of_user_max) {
                drop(state);
                run_caught(job);
                state = self.state.lock();
                // The next job of the user may begin now, at the latest on this thread.
                user.into_iter().for_each(|user| state.end_of(user));
                continue;
            }
            if state.has_ended {
                return;
            }
            state.idle += 1;
            let waited = self.changed.wait_for(&mut state, self.idle_max);
            state.idle -= 1;
            let is_spare = state.threads.len() > self.lasting;
            let has_next = state.place_of_next(self.of_user_max).is_some();
            if waited.timed_out() && !has_next && is_spare && !state.has_ended {
                return state.take(std::thread::current().id());
            }
        }
    }
}

impl State {
    /// Whether more jobs may begin than threads wait for one.
    fn is_busy(&self, of_user_max: usize) -> bool {
        let mut running = self.running.clone();
        let may_begin = self.queue.iter().filter(|queued| {
            let Some(user) = queued.user else {
                return true;
            };
            let count = running.entry(user).or_default();
            *count += 1;
            *count <= of_user_max
        });
        may_begin.take(self.idle + 1).count() > self.idle
    }

    /// The place of the first job that may begin.
    fn place_of_next(&self, of_user_max: usize) -> Option<usize> {
        let count = |user: u32| self.running.get(&user).copied().unwrap_or(0);
        let may_begin = |queued: &Queued| queued.user.is_none_or(|user| count(user) < of_user_max);
        self.queue.iter().position(may_begin)
    }

    /// Takes the first job that may begin.
    fn begin_next(&mut self, of_user_max: usize) -> Option<Queued> {
        let queued = self.queue.remove(self.place_of_next(of_user_max)?)?;
        if let Some(user) = queued.user {
            *self.running.entry(user).or_default() += 1;
        }
        Some(queued)
    }

    /// A job of the user has ended.
    fn end_of(&mut self, user: u32) {
        if let Some(count) = self.running.get_mut(&user) {
            *count -= 1;
            if *count == 0 {
                self.running.remove(&user);
            }
        }
    }

    /// Takes a thread off the list, which ends. Nobody waits for its end.
    fn take(&mut self, id: ThreadId) {
        self.threads.retain(|thread| thread.thread().id() != id);
    }
}

fn run_caught(job: Job) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        let thread = std::thread::current();
        tracing::error!(thread = thread.name(), "a job panicked");
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let mut state = self.crew.state.lock();
        state.has_ended = true;
        // The last job may own these workers, so this may be one of their threads.
        state.take(std::thread::current().id());
        let threads = std::mem::take(&mut state.threads);
        let mut left = VecDeque::new();
        if threads.is_empty() {
            left.append(&mut state.queue);
        }
        drop(state);
        self.crew.changed.notify_all();
        left.into_iter().for_each(|queued| run_caught(queued.job));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a worker thread panicked");
            }
        }
    }
}

/// Starts threads of workers that the system refused. It is there from the first [`Workers`] of the
/// process on, since it could not be started when it is needed.
struct Starter {
    /// Crews that have jobs and were refused a thread, each once.
    waiting: Mutex<Vec<Weak<Crew>>>,
    added: Condvar,
}

impl Starter {
    fn of_process() -> std::io::Result<&'static Self> {
        static STARTER: OnceLock<Starter> = OnceLock::new();
        static STARTING: Mutex<()> = Mutex::new(());
        let _starting = STARTING.lock();
        if let Some(starter) = STARTER.get() {
            return Ok(starter);
        }
        let thread = std::thread::Builder::new().name("starter".to_owned());
        let make = || Self {
            waiting: Mutex::default(),
            added: Condvar::new(),
        };
        thread.spawn(move || STARTER.get_or_init(make).work())?;
        Ok(STARTER.get_or_init(make))
    }

    /// Starts a thread when there is one, and answers whether that is new.
    fn start_later(&self, crew: &Arc<Crew>) -> bool {
        let mut waiting = self.waiting.lock();
        let crew = Arc::downgrade(crew);
        if waiting.iter().any(|other| other.ptr_eq(&crew)) {
            return false;
        }
        waiting.push(crew);
        drop(waiting);
        self.added.notify_one();
        true
    }

    fn work(&self) -> ! {
        let mut waiting = self.waiting.lock();
        loop {
            let is_refused = |crew: &Weak<Crew>| {
                let crew = crew.upgrade();
                crew.is_some_and(|crew| crew.start_if_busy(&mut crew.state.lock()).is_err())
            };
            waiting.retain(is_refused);
            if waiting.is_empty() {
                self.added.wait(&mut waiting);
            } else {
                self.added.wait_for(&mut waiting, REFUSED_PAUSE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn threads(crew: &Crew) -> usize {
        crew.state.lock().threads.len()
    }

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
        assert_eq!(threads(&workers.crew), 0, "no job has come");
        let together = Arc::new(std::sync::Barrier::new(3));
        for _ in 0..30 {
            let together = Arc::clone(&together);
            workers.run(move || {
                together.wait();
            });
        }
        assert_eq!(threads(&workers.crew), 3);
    }

    #[test]
    fn jobs_of_a_user_that_wait_for_ever_leave_threads_to_the_others() {
        const HELD: u32 = 1000;
        let workers = Workers::shared("test", 3, 2).unwrap();
        let (release, released) = channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let (sender, done) = channel();
        for _ in 0..10 {
            let (released, sender) = (Arc::clone(&released), sender.clone());
            workers.run_of(Some(HELD), move || {
                let _ = released.lock().recv();
                sender.send(HELD).unwrap();
            });
        }
        for user in [0, 1001, 0, 1002] {
            let sender = sender.clone();
            workers.run_of(Some(user), move || sender.send(user).unwrap());
        }
        let all = sender.clone();
        workers.run(move || all.send(7).unwrap());
        for user in [0, 1001, 0, 1002, 7] {
            assert_eq!(done.recv_timeout(LONG), Ok(user));
        }
        assert_eq!(workers.crew.state.lock().queue.len(), 8);
        drop(release);
        drop((workers, sender));
        assert_eq!(done.iter().collect::<Vec<_>>(), [HELD; 10]);
    }

    #[test]
    fn a_job_that_panics_leaves_its_thread_to_the_next_one() {
        let workers = Workers::new("test", 1).unwrap();
        workers.run(|| panic!("on purpose"));
        let (done, is_done) = channel();
        workers.run(move || done.send(()).unwrap());
        assert_eq!(is_done.recv_timeout(LONG), Ok(()));
    }

    #[test]
    fn threads_end_without_jobs_and_start_with_the_next_one() {
        let workers = Workers::with("test", (0, 3), 3, Duration::from_millis(1)).unwrap();
        let begun = Instant::now();
        for _ in 0..50 {
            let (done, is_done) = channel();
            workers.run(move || done.send(()).unwrap());
            assert_eq!(is_done.recv_timeout(LONG), Ok(()));
            while threads(&workers.crew) > 0 {
                assert!(begun.elapsed() < LONG, "the thread is idle");
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn a_lasting_thread_is_there_from_the_start_and_stays() {
        let workers = Workers::with("test", (1, 3), 3, Duration::from_millis(1)).unwrap();
        assert_eq!(threads(&workers.crew), 1);
        let together = Arc::new(std::sync::Barrier::new(3));
        for _ in 0..3 {
            let together = Arc::clone(&together);
            workers.run(move || {
                together.wait();
            });
        }
        let begun = Instant::now();
        while threads(&workers.crew) > 1 {
            assert!(begun.elapsed() < LONG, "two threads are idle");
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(threads(&workers.crew), 1, "that one lasts");
    }

    #[test]
    fn a_thread_runs_where_its_starter_may_not() {
        let workers = Workers::new("test", 1).unwrap();
        let all = rustix::thread::sched_getaffinity(None).unwrap();
        let mut one = rustix::thread::CpuSet::new();
        let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu));
        one.set(first.unwrap());
        let (done, is_done) = channel();
        let pinned = std::thread::spawn(move || {
            rustix::thread::sched_setaffinity(None, &one).unwrap();
            workers.run(move || {
                let affinity = rustix::thread::sched_getaffinity(None);
                done.send(affinity.unwrap().count()).unwrap();
            });
            workers
        });
        assert!(is_done.recv_timeout(LONG).unwrap() >= all.count());
        drop(pinned.join());
    }

    #[test]
    fn a_job_is_done_once_the_system_has_threads_again() {
        let workers = Workers::new("test", 3).unwrap();
        workers.crew.state.lock().is_refused = true;
        let (done, is_done) = channel();
        workers.run(move || done.send(()).unwrap());
        is_done.recv_timeout(2 * REFUSED_PAUSE).unwrap_err();
        workers.crew.state.lock().is_refused = false;
        assert_eq!(is_done.recv_timeout(LONG), Ok(()));
    }

    #[test]
    fn dropping_does_jobs_for_which_there_was_no_thread() {
        let workers = Workers::new("test", 3).unwrap();
        workers.crew.state.lock().is_refused = true;
        let (done, is_done) = channel();
        workers.run(move || done.send(()).unwrap());
        drop(workers);
        assert_eq!(is_done.try_recv(), Ok(()));
    }

    #[test]
    fn a_job_may_own_its_workers() {
        let workers = Workers::new("test", 2).unwrap();
        let (send, owned) = channel::<Workers>();
        let (first, done) = channel();
        let second = first.clone();
        workers.run(move || {
            drop(owned.recv_timeout(LONG));
            first.send(1).unwrap();
        });
        workers.run(move || second.send(2).unwrap());
        assert!(send.send(workers).is_ok());
        let mut told = [done.recv_timeout(LONG), done.recv_timeout(LONG)];
        told.sort_by_key(|number| number.unwrap_or(0));
        assert_eq!(told, [Ok(1), Ok(2)]);
    }
}
