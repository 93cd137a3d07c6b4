//! Ring threads in the idle scheduling class, so that a program continues on its own processor.
//!
//! When an answer comes, the processor of the program is busy with the thread that answers,
//! although that thread will sleep a microsecond later. The scheduler cannot know this. It moves
//! the program to an idle processor, and moves it again with the next answer; waking an idle
//! processor costs more than the request. A processor that runs only threads of the idle class
//! counts as idle. So after an answer from such a thread the program goes on where it is.
//!
//! A thread of the idle class has a cost: it waits for all other work. So threads enter the class
//! only while one program sends one request after another ([`Run`]). One thread, the watch, moves
//! them in and out. A thread that could run, but answered no request between two looks of the
//! watch, starves: other work has the processor. The watch makes such a thread normal again. A
//! request waits some 4 ms in that case, as long as the watch itself gets a processor. The next run
//! must then be twice as long before threads enter the class, until one run was worth it. A thread
//! that sleeps for several looks, on a processor that the program has left, also becomes normal, so
//! that the watch can stop looking.
//!
//! Pauses tell less. A virtual processor may be taken away for milliseconds, or take as long to
//! wake up. A program that is held up by just the delay that the idle class avoids would then seem
//! to rest. So a run goes on while its pauses last no more than [`PAUSE`], and a run that ends with
//! a pause does not count as vain.

use std::io;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ramet_sys::{SchedulingClass, set_scheduling_class};
use rustix::thread::{Pid, gettid};

/// The longest pause between an answer and the next request of a run: several times the wake-up
/// time of an idle virtual processor.
const PAUSE: Duration = Duration::from_millis(5);
/// How often the watch looks for starving threads.
const LOOK: Duration = Duration::from_millis(2);
/// Looks that find a thread asleep before it leaves the idle class.
const RESTS: u32 = 8;
/// Requests of a run before its threads enter the idle class: at least, and after many runs that
/// starved them.
const LENGTH_MIN: u32 = 32;
const LENGTH_MAX: u32 = 4096;
/// Requests that have to follow: each wins some 20 us, and the end of a run may cost two looks.
const WORTH: u32 = 200;

/// The threads of a mount that enter the idle class at times, and the watch over them.
pub(crate) struct IdleClass {
    shared: Arc<Shared>,
    /// `None` where the system does not let a thread leave the idle class again.
    watch: Option<JoinHandle<()>>,
}

struct Shared {
    threads: Mutex<Vec<Arc<State>>>,
    run: Run,
    origin: Instant,
    has_ended: AtomicBool,
}

/// The part of a thread that answers requests; made by the thread itself.
pub(crate) struct ThreadClass {
    shared: Arc<Shared>,
    state: Arc<State>,
    watch: Option<Thread>,
}

struct State {
    thread: Pid,
    answers: AtomicU64,
    /// Whether the thread should be in the idle class. The class follows with the next look.
    wants_idle: AtomicBool,
    /// These belong to the watch, which alone puts threads into the idle class: whether the thread
    /// is in it, its answers at the last judgement, and the number of judgements in a row without
    /// an answer.
    is_idle: AtomicBool,
    seen: AtomicU64,
    rests: AtomicU32,
}

impl State {
    /// Number of calls in a row, with this one, between which the thread answered no request.
    fn rests(&self) -> u32 {
        let answers = self.answers.load(Ordering::Relaxed);
        let rests = match self.seen.swap(answers, Ordering::Relaxed) == answers {
            true => self.rests.load(Ordering::Relaxed) + 1,
            false => 0,
        };
        self.rests.store(rests, Ordering::Relaxed);
        rests
    }
}

/// Requests of one program thread, one after the other without a pause. Threads that race here may
/// enter the class too soon or too late, and nothing else.
struct Run {
    program: AtomicU32,
    /// The time of the last answer, in ns.
    answered: AtomicU64,
    length: AtomicU32,
    /// Requests before threads enter the idle class.
    enough: AtomicU32,
}

impl Default for Run {
    fn default() -> Self {
        Self {
            program: AtomicU32::new(0),
            answered: AtomicU64::new(0),
            length: AtomicU32::new(0),
            enough: AtomicU32::new(LENGTH_MIN),
        }
    }
}

impl Run {
    /// A request comes at `now` ns. Answers whether it belongs to the run.
    fn goes_on(&self, program: u32, now: u64) -> bool {
        let is_same = self.program.swap(program, Ordering::Relaxed) == program;
        let goes_on = is_same && self.pause(now) <= PAUSE;
        if goes_on {
            self.length.fetch_add(1, Ordering::Relaxed);
        } else {
            self.end(false);
        }
        goes_on
    }

    /// A thread is about to answer at `now` ns. Answers whether the thread should enter the idle
    /// class.
    fn is_long(&self, now: u64) -> bool {
        self.answered.store(now, Ordering::Relaxed);
        self.is_enough()
    }

    /// Whether the run is long and goes on, at `now` ns.
    fn is_on(&self, now: u64) -> bool {
        self.is_enough() && self.pause(now) <= PAUSE
    }

    fn is_enough(&self) -> bool {
        self.length.load(Ordering::Relaxed) >= self.enough.load(Ordering::Relaxed)
    }

    /// The time since the last answer.
    fn pause(&self, now: u64) -> Duration {
        Duration::from_nanos(now.saturating_sub(self.answered.load(Ordering::Relaxed)))
    }

    /// Ends the run. After a run that was worth it, the next one needs half as many requests, for
    /// each time that it was. After a vain run that `starved` a thread, it needs twice as many.
    fn end(&self, starved: bool) {
        let length = self.length.swap(0, Ordering::Relaxed);
        let enough = self.enough.load(Ordering::Relaxed);
        let Some(extra) = length.checked_sub(enough) else {
            return;
        };
        let next = match extra / WORTH {
            0 if starved => enough.saturating_mul(2),
            times => enough >> times.min(LENGTH_MAX.ilog2()),
        };
        let next = next.clamp(LENGTH_MIN, LENGTH_MAX);
        self.enough.store(next, Ordering::Relaxed);
    }
}

impl IdleClass {
    /// Starts the watch. Where a thread could not leave the idle class, no thread enters it.
    ///
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared::new());
        let (sender, outcome) = channel();
        let watched = Arc::clone(&shared);
        let watch = std::thread::Builder::new()
            .name("ring-watch".to_owned())
            .spawn(move || {
                let tried = try_classes();
                let is_possible = tried.is_ok();
                // The caller of `start` waits for the outcome.
                let _ = sender.send(tried);
                if is_possible {
                    watched.watch();
                }
            })?;
        let watch = match outcome.recv().map_err(io::Error::other)? {
            Ok(()) => Some(watch),
            Err(error) => {
                tracing::debug!(%error, "threads that answer stay in their scheduling class");
                None
            }
        };
        Ok(Self { shared, watch })
    }

    /// The calling thread enters the idle class at times, until this is dropped.
    pub(crate) fn thread_class(&self) -> ThreadClass {
        let state = Arc::new(State {
            thread: gettid(),
            answers: AtomicU64::new(0),
            wants_idle: AtomicBool::new(false),
            is_idle: AtomicBool::new(false),
            seen: AtomicU64::new(0),
            rests: AtomicU32::new(0),
        });
        self.shared.threads.lock().push(Arc::clone(&state));
        ThreadClass {
            shared: Arc::clone(&self.shared),
            state,
            watch: self.watch.as_ref().map(|watch| watch.thread().clone()),
        }
    }
}

impl Drop for IdleClass {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::SeqCst);
        if let Some(watch) = self.watch.take() {
            watch.thread().unpark();
            if watch.join().is_err() {
                tracing::error!("the watch over scheduling classes panicked");
            }
        }
    }
}

/// Puts the calling thread into the idle class and back.
fn try_classes() -> io::Result<()> {
    set_scheduling_class(gettid(), SchedulingClass::Idle)?;
    set_scheduling_class(gettid(), SchedulingClass::Normal)
}

/// Whether a thread of this process has a processor or waits for one. Also true where the system
/// does not tell.
fn could_run(thread: Pid) -> bool {
    let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    std::fs::read_to_string(path).map_or(true, |stat| is_runnable(&stat))
}

/// Decides by the third field of a `stat` file, behind a name of any bytes.
fn is_runnable(stat: &str) -> bool {
    let fields = stat.rsplit_once(") ");
    fields.is_none_or(|(_, fields)| fields.starts_with('R'))
}

impl Shared {
    fn new() -> Self {
        Self {
            threads: Mutex::new(Vec::new()),
            run: Run::default(),
            origin: Instant::now(),
            has_ended: AtomicBool::new(false),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).expect("584 years")
    }

    fn watch(&self) {
        let mut judged = Instant::now();
        while !self.has_ended.load(Ordering::SeqCst) {
            // A thread that should enter the class wakes the watch at any time: too soon to tell
            // which threads starve.
            let judges = judged.elapsed() >= LOOK;
            if judges {
                judged = Instant::now();
            }
            match self.look(judges) {
                Ok(true) => std::thread::park_timeout(LOOK.saturating_sub(judged.elapsed())),
                Ok(false) => std::thread::park(),
                Err(error) => {
                    tracing::warn!(%error, "threads that answer keep their scheduling class from now on");
                    return;
                }
            }
        }
    }

    /// Gives threads the class that they should have, and answers whether one is idle. With
    /// `judges`, threads without an answer since the last judgement may be starving.
    ///
    /// # Errors
    /// The class of a thread cannot be changed any more.
    fn look(&self, judges: bool) -> io::Result<bool> {
        let is_on = self.run.is_on(self.now());
        let (mut any_idle, mut any_starves) = (false, false);
        for thread in &*self.threads.lock() {
            let wants = thread.wants_idle.load(Ordering::SeqCst);
            let was_idle = thread.is_idle.load(Ordering::Relaxed);
            let rests = if judges && was_idle {
                thread.rests()
            } else {
                0
            };
            let starves = rests > 0 && could_run(thread.thread);
            any_starves |= starves;
            let is_idle = wants && is_on && !starves && rests < RESTS;
            if is_idle && !was_idle {
                // The note comes first: after an error the thread still counts as idle and is made
                // normal later.
                thread.is_idle.store(true, Ordering::Relaxed);
                set_scheduling_class(thread.thread, SchedulingClass::Idle)?;
            }
            if !is_idle {
                thread.wants_idle.store(false, Ordering::SeqCst);
            }
            if was_idle && !is_idle {
                set_scheduling_class(thread.thread, SchedulingClass::Normal)?;
                thread.is_idle.store(false, Ordering::Relaxed);
            }
            any_idle |= is_idle;
        }
        if any_starves || !any_idle {
            self.run.end(any_starves);
        }
        Ok(any_idle)
    }
}

impl ThreadClass {
    /// Called before a request is served. `program` is the thread that waits for the request alone.
    /// Requests without one do not count.
    pub(crate) fn request_begins(&self, program: Option<NonZeroU32>) {
        let (Some(watch), Some(program)) = (&self.watch, program) else {
            return;
        };
        let goes_on = self.shared.run.goes_on(program.get(), self.shared.now());
        if !goes_on && self.state.is_idle.load(Ordering::Relaxed) {
            // The watch makes all threads normal.
            watch.unpark();
        }
    }

    /// Called after that, right before the kernel gets the answer.
    pub(crate) fn before_answer(&self, program: Option<NonZeroU32>) {
        self.state.answers.fetch_add(1, Ordering::Relaxed);
        let Some(watch) = self.watch.as_ref().filter(|_| program.is_some()) else {
            return;
        };
        let wants_idle = self.shared.run.is_long(self.shared.now());
        if wants_idle && !self.state.wants_idle.swap(true, Ordering::SeqCst) {
            watch.unpark();
        }
    }
}

impl Drop for ThreadClass {
    fn drop(&mut self) {
        // The watch touches no thread that is not in the list.
        let mut threads = self.shared.threads.lock();
        threads.retain(|thread| !Arc::ptr_eq(thread, &self.state));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: u64 = 1_000;
    const LATE: u64 = 6_000_000;

    /// Sends a number of requests, each `pause` ns after the last answer. Answers whether the run
    /// is long then.
    fn send(run: &Run, program: u32, requests: u32, pause: u64) -> bool {
        let mut is_long = false;
        for _ in 0..requests {
            let now = run.answered.load(Ordering::Relaxed) + pause;
            run.goes_on(program, now);
            is_long = run.is_long(now);
        }
        is_long
    }

    /// Sends requests until the thread is idle. Pauses of this test may end a run; then another run
    /// begins.
    fn send_until_idle(thread: &ThreadClass) {
        while !thread.state.is_idle.load(Ordering::SeqCst) {
            thread.request_begins(NonZeroU32::new(7));
            thread.before_answer(NonZeroU32::new(7));
        }
    }

    #[test]
    fn run_has_one_program_and_no_pauses() {
        let run = Run::default();
        assert!(!send(&run, 7, LENGTH_MIN, SOON), "the first one begins it");
        assert!(send(&run, 7, LENGTH_MAX, SOON));
        assert!(!send(&run, 8, 1, SOON), "another program ends it");
        assert!(send(&run, 8, LENGTH_MAX, SOON));
        assert!(!send(&run, 8, 1, LATE), "a pause ends it");
        for _ in 0..LENGTH_MAX {
            send(&run, 7, 1, SOON);
            assert!(!send(&run, 8, 1, SOON), "by turns there is none");
        }
    }

    #[test]
    fn vain_runs_make_the_next_ones_begin_later_until_one_lasts() {
        let run = Run::default();
        let send = |requests| send(&run, 7, requests, SOON);
        let is_next_enough_at = |requests| !send(requests - 1) && send(1);
        let end_vain = |starved| {
            // The run had exactly enough requests.
            run.length
                .store(run.enough.load(Ordering::Relaxed), Ordering::Relaxed);
            run.end(starved);
        };
        send(1);
        for _ in 0..20 {
            end_vain(true);
        }
        assert!(is_next_enough_at(LENGTH_MAX));
        end_vain(false);
        assert!(is_next_enough_at(LENGTH_MAX), "a pause tells nothing");
        assert!(send(2 * WORTH));
        run.end(true);
        assert!(is_next_enough_at(LENGTH_MAX / 4), "worth it twice");
        assert!(send(20 * WORTH));
        run.end(true);
        assert!(is_next_enough_at(LENGTH_MIN));
    }

    #[test]
    fn thread_without_requests_becomes_normal() {
        let idle_class = IdleClass::start().unwrap();
        assert!(idle_class.watch.is_some(), "root may change classes");
        let thread = idle_class.thread_class();
        send_until_idle(&thread);
        // No request comes, so the watch has to come by itself.
        while thread.state.is_idle.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }

    /// Threads without a watch.
    fn unwatched() -> IdleClass {
        IdleClass {
            shared: Arc::new(Shared::new()),
            watch: None,
        }
    }

    /// A look during a run, which goes on however long the test takes.
    fn look(idle_class: &IdleClass, judges: bool) -> bool {
        let run = &idle_class.shared.run;
        run.length.store(LENGTH_MAX, Ordering::Relaxed);
        run.is_long(u64::MAX);
        idle_class.shared.look(judges).unwrap()
    }

    /// Makes the thread one that has answered a request and should enter the class.
    fn answer_once(thread: &ThreadClass) {
        thread.state.answers.store(1, Ordering::Relaxed);
        thread.state.wants_idle.store(true, Ordering::SeqCst);
    }

    #[test]
    fn thread_that_could_run_and_answers_no_request_between_two_looks_becomes_normal() {
        let idle_class = unwatched();
        let thread = idle_class.thread_class();
        answer_once(&thread);
        assert!(look(&idle_class, true), "it just answered");
        assert!(look(&idle_class, true), "the first look at it");
        assert!(
            look(&idle_class, false),
            "too soon to judge: a thread woke the watch"
        );
        assert!(!look(&idle_class, true), "nothing since");
    }

    #[test]
    fn sleeping_thread_does_not_starve_and_becomes_normal_after_some_looks() {
        let idle_class = unwatched();
        std::thread::scope(|scope| {
            let (done, is_done) = channel::<()>();
            let idle_class = &idle_class;
            let sleeper = scope.spawn(move || {
                let thread = idle_class.thread_class();
                answer_once(&thread);
                let _ = is_done.recv();
            });
            let sleeper_sleeps = || {
                let threads = idle_class.shared.threads.lock();
                threads.first().is_some_and(|state| {
                    state.wants_idle.load(Ordering::SeqCst) && !could_run(state.thread)
                })
            };
            while !sleeper_sleeps() {
                std::thread::yield_now();
            }
            // The first look puts the thread into the class, the second judges it for the first
            // time, and the following ones find it asleep.
            for _ in 0..2 + RESTS - 1 {
                assert!(look(idle_class, true));
            }
            assert!(!look(idle_class, true));
            drop(done);
            sleeper.join().unwrap();
        });
    }

    #[test]
    fn states_of_threads_are_read() {
        assert!(is_runnable("7 (a) R 1 2"));
        assert!(!is_runnable("7 (a) S 1 2"));
        assert!(!is_runnable("7 (b) R) D 1 2"));
        assert!(is_runnable("odd"), "more harm is done by starving");
    }

    #[test]
    fn another_program_ends_a_run_for_all_threads() {
        let idle_class = IdleClass::start().unwrap();
        let threads = [idle_class.thread_class(), idle_class.thread_class()];
        threads.iter().for_each(send_until_idle);
        let is_any_idle = || {
            threads
                .iter()
                .any(|d| d.state.is_idle.load(Ordering::SeqCst))
        };
        while is_any_idle() {
            threads[0].request_begins(NonZeroU32::new(8));
            threads[0].before_answer(NonZeroU32::new(8));
            threads[0].request_begins(NonZeroU32::new(9));
            threads[0].before_answer(NonZeroU32::new(9));
        }
    }

    #[test]
    fn requests_without_a_waiting_program_do_not_count() {
        let idle_class = IdleClass::start().unwrap();
        let thread = idle_class.thread_class();
        for _ in 0..2 * LENGTH_MAX {
            thread.request_begins(None);
            thread.before_answer(None);
        }
        assert!(!thread.state.wants_idle.load(Ordering::SeqCst));
        send_until_idle(&thread);
        while thread.state.is_idle.load(Ordering::SeqCst) {
            thread.request_begins(None);
            thread.before_answer(None);
        }
    }
}
