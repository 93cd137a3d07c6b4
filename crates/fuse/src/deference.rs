//! Threads that leave their processor to who asked them.
//!
//! When an answer comes, the processor that the program asked on is busy: with the thread that answers, and that will sleep a
//! microsecond later. The scheduler cannot know, moves the program to an idle processor, and moves it again with the next
//! answer; waking an idle one costs more than the request. A processor that runs threads of the idle class alone counts as
//! idle, so the answer of such a thread lets the program go on where it is.
//!
//! But a thread of the idle class waits for all other work. So threads are in it only while one program asks one request after
//! the other ([`Run`]), and one thread, the watch, puts them there and back: who answered nothing between two looks is
//! normal again, whether nobody asks or something else has the processor. So such a request waits some 4 ms, as long as the watch itself
//! gets a processor, and the next run has to be twice as long before threads defer, until one was worth it.

use std::io;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ramet_block::{SchedulingClass, set_scheduling_class};
use rustix::thread::{Pid, gettid};

/// The longest pause between an answer and the next request of a run.
const PAUSE: Duration = Duration::from_micros(500);
/// How often it is looked whether threads that defer answer.
const LOOK: Duration = Duration::from_millis(2);
/// Requests of a run before its threads defer: at least, and after many vain tries.
const LENGTH_MIN: u32 = 32;
const LENGTH_MAX: u32 = 4096;
/// Requests that have to follow: they win some 20 us each, and the end of a run may cost two looks.
const WORTH: u32 = 200;

/// The threads of a mount that defer at times, and who watches them.
pub(crate) struct Deference {
    shared: Arc<Shared>,
    /// `None` where a thread may not leave the idle class again.
    watch: Option<JoinHandle<()>>,
}

struct Shared {
    threads: Mutex<Vec<Arc<State>>>,
    run: Run,
    origin: Instant,
    has_ended: AtomicBool,
}

/// A thread that answers requests; made by the thread itself.
pub(crate) struct Deferrer {
    shared: Arc<Shared>,
    state: Arc<State>,
    watch: Option<Thread>,
}

struct State {
    thread: Pid,
    answers: AtomicU64,
    /// Wanted. The class follows with the next look.
    defers: AtomicBool,
    /// Of the watch, which alone puts threads into the idle class and notes it: their class, and their answers when they were last judged.
    is_idle: AtomicBool,
    seen: AtomicU64,
}

/// Requests of one asker, one after the other without a pause. Who races here errs about when to defer, no more.
struct Run {
    asker: AtomicU32,
    /// When the last answer was given, in ns.
    answered: AtomicU64,
    length: AtomicU32,
    /// Requests before threads defer.
    enough: AtomicU32,
}

impl Default for Run {
    fn default() -> Self {
        Self {
            asker: AtomicU32::new(0),
            answered: AtomicU64::new(0),
            length: AtomicU32::new(0),
            enough: AtomicU32::new(LENGTH_MIN),
        }
    }
}

impl Run {
    /// A request comes at `now` ns; whether it belongs to the run.
    fn goes_on(&self, asker: u32, now: u64) -> bool {
        let is_same = self.asker.swap(asker, Ordering::Relaxed) == asker;
        let goes_on = is_same && self.pause(now) <= PAUSE;
        if goes_on {
            self.length.fetch_add(1, Ordering::Relaxed);
        } else {
            self.end();
        }
        goes_on
    }

    /// An answer is about to be given at `now` ns; whether its thread should defer.
    fn is_long(&self, now: u64) -> bool {
        self.answered.store(now, Ordering::Relaxed);
        self.is_enough()
    }

    /// Whether it is long and goes on, at `now` ns.
    fn is_on(&self, now: u64) -> bool {
        self.is_enough() && self.pause(now) <= LOOK
    }

    fn is_enough(&self) -> bool {
        self.length.load(Ordering::Relaxed) >= self.enough.load(Ordering::Relaxed)
    }

    /// Since the last answer.
    fn pause(&self, now: u64) -> Duration {
        Duration::from_nanos(now.saturating_sub(self.answered.load(Ordering::Relaxed)))
    }

    /// The next run is tried later if this one was not worth it, and sooner if it was.
    fn end(&self) {
        let length = self.length.swap(0, Ordering::Relaxed);
        let enough = self.enough.load(Ordering::Relaxed);
        if length >= enough {
            let was_worth_it = length - enough >= WORTH;
            let next = if was_worth_it { enough / 2 } else { enough * 2 };
            let next = next.clamp(LENGTH_MIN, LENGTH_MAX);
            self.enough.store(next, Ordering::Relaxed);
        }
    }
}

impl Deference {
    /// Begins to watch; or lets nobody defer, where that could not be undone.
    ///
    /// # Errors
    /// No more threads.
    pub(crate) fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared::new());
        let (sender, outcome) = channel();
        let watched = Arc::clone(&shared);
        let watch = std::thread::Builder::new()
            .name("ring-watch".to_owned())
            .spawn(move || {
                let tried = try_classes();
                let is_possible = tried.is_ok();
                // Whoever starts the thread waits for this.
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

    /// Has the calling thread defer at times, until this is dropped.
    pub(crate) fn deferrer(&self) -> Deferrer {
        let state = Arc::new(State {
            thread: gettid(),
            answers: AtomicU64::new(0),
            defers: AtomicBool::new(false),
            is_idle: AtomicBool::new(false),
            seen: AtomicU64::new(0),
        });
        self.shared.threads.lock().push(Arc::clone(&state));
        Deferrer {
            shared: Arc::clone(&self.shared),
            state,
            watch: self.watch.as_ref().map(|watch| watch.thread().clone()),
        }
    }
}

impl Drop for Deference {
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

/// There and back, for the calling thread.
fn try_classes() -> io::Result<()> {
    set_scheduling_class(gettid(), SchedulingClass::Idle)?;
    set_scheduling_class(gettid(), SchedulingClass::Normal)
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
            // A thread that wants to defer wakes the watch at any time: too soon to tell who answers nothing.
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

    /// Gives threads the class that they should have; whether one is idle. `judges` those that answered nothing since that was last done.
    ///
    /// # Errors
    /// A class cannot be changed any more.
    fn look(&self, judges: bool) -> io::Result<bool> {
        let is_on = self.run.is_on(self.now());
        let mut any_idle = false;
        for thread in &*self.threads.lock() {
            let wants = thread.defers.load(Ordering::SeqCst);
            let was_idle = thread.is_idle.load(Ordering::Relaxed);
            let rests = judges && was_idle && {
                let answers = thread.answers.load(Ordering::Relaxed);
                thread.seen.swap(answers, Ordering::Relaxed) == answers
            };
            let is_idle = wants && is_on && !rests;
            if is_idle && !was_idle {
                // Noted first: an error leaves it to be made normal.
                thread.is_idle.store(true, Ordering::Relaxed);
                set_scheduling_class(thread.thread, SchedulingClass::Idle)?;
            }
            if !is_idle {
                thread.defers.store(false, Ordering::SeqCst);
            }
            if was_idle && !is_idle {
                set_scheduling_class(thread.thread, SchedulingClass::Normal)?;
                thread.is_idle.store(false, Ordering::Relaxed);
            }
            any_idle |= is_idle;
        }
        if !any_idle {
            self.run.end();
        }
        Ok(any_idle)
    }
}

impl Deferrer {
    /// Before a request is served: `asker` is the thread that waits for it alone. Requests without one do not count.
    pub(crate) fn asked(&self, asker: Option<NonZeroU32>) {
        let (Some(watch), Some(asker)) = (&self.watch, asker) else {
            return;
        };
        let goes_on = self.shared.run.goes_on(asker.get(), self.shared.now());
        if !goes_on && self.state.is_idle.load(Ordering::Relaxed) {
            // All threads are to be normal, not just this one.
            watch.unpark();
        }
    }

    /// After that, right before the kernel is told the answer.
    pub(crate) fn answers(&self, asker: Option<NonZeroU32>) {
        self.state.answers.fetch_add(1, Ordering::Relaxed);
        let Some(watch) = self.watch.as_ref().filter(|_| asker.is_some()) else {
            return;
        };
        let should_defer = self.shared.run.is_long(self.shared.now());
        if should_defer && !self.state.defers.swap(true, Ordering::SeqCst) {
            watch.unpark();
        }
    }
}

impl Drop for Deferrer {
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
    const LATE: u64 = 2_000_000;

    /// A number of requests, each that many ns after the last answer; whether the last one is enough.
    fn ask(run: &Run, asker: u32, requests: u32, pause: u64) -> bool {
        let mut is_long = false;
        for _ in 0..requests {
            let now = run.answered.load(Ordering::Relaxed) + pause;
            run.goes_on(asker, now);
            is_long = run.is_long(now);
        }
        is_long
    }

    /// Pauses of this thread may end a run; another one comes.
    fn ask_until_idle(deferrer: &Deferrer) {
        while !deferrer.state.is_idle.load(Ordering::SeqCst) {
            deferrer.asked(NonZeroU32::new(7));
            deferrer.answers(NonZeroU32::new(7));
        }
    }

    #[test]
    fn a_run_has_one_asker_and_no_pauses() {
        let run = Run::default();
        assert!(!ask(&run, 7, LENGTH_MIN, SOON), "the first one begins it");
        assert!(ask(&run, 7, LENGTH_MAX, SOON));
        assert!(!ask(&run, 8, 1, SOON), "another asker ends it");
        assert!(ask(&run, 8, LENGTH_MAX, SOON));
        assert!(!ask(&run, 8, 1, LATE), "a pause ends it");
        for _ in 0..LENGTH_MAX {
            ask(&run, 7, 1, SOON);
            assert!(!ask(&run, 8, 1, SOON), "by turns there is none");
        }
    }

    #[test]
    fn vain_runs_have_the_next_ones_begin_later_until_one_lasts() {
        let run = Run::default();
        let ask = |requests| ask(&run, 7, requests, SOON);
        ask(1);
        for _ in 0..20 {
            assert!(ask(LENGTH_MAX));
            // As many as were enough.
            run.length
                .store(run.enough.load(Ordering::Relaxed), Ordering::Relaxed);
            run.end();
        }
        assert!(!ask(LENGTH_MAX - 1));
        assert!(ask(1));
        for _ in 0..20 {
            assert!(ask(LENGTH_MAX + WORTH));
            run.end();
        }
        assert!(!ask(LENGTH_MIN - 1));
        assert!(ask(1));
    }

    #[test]
    fn who_answers_nothing_between_two_looks_is_normal_again() {
        let deference = Deference::start().unwrap();
        assert!(deference.watch.is_some(), "root may change classes");
        let deferrer = deference.deferrer();
        ask_until_idle(&deferrer);
        // Nobody asks: the watch has to come by itself.
        while deferrer.state.is_idle.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn who_wakes_the_watch_puts_no_thread_back() {
        let shared = Arc::new(Shared::new());
        // By hand: nobody watches.
        let deference = Deference {
            shared: Arc::clone(&shared),
            watch: None,
        };
        let deferrer = deference.deferrer();
        let look = |judges| {
            // However long this takes, the run goes on.
            shared.run.length.store(LENGTH_MAX, Ordering::Relaxed);
            shared.run.is_long(u64::MAX);
            shared.look(judges).unwrap()
        };
        deferrer.state.answers.store(1, Ordering::Relaxed);
        deferrer.state.defers.store(true, Ordering::SeqCst);
        assert!(look(true), "it just answered");
        assert!(look(true), "the first look at it");
        assert!(look(false), "too soon to tell");
        assert!(!look(true), "nothing since");
    }

    #[test]
    fn another_asker_ends_a_run_for_all_threads() {
        let deference = Deference::start().unwrap();
        let deferrers = [deference.deferrer(), deference.deferrer()];
        deferrers.iter().for_each(ask_until_idle);
        let is_any_idle = || {
            deferrers
                .iter()
                .any(|d| d.state.is_idle.load(Ordering::SeqCst))
        };
        while is_any_idle() {
            deferrers[0].asked(NonZeroU32::new(8));
            deferrers[0].answers(NonZeroU32::new(8));
            deferrers[0].asked(NonZeroU32::new(9));
            deferrers[0].answers(NonZeroU32::new(9));
        }
    }

    #[test]
    fn requests_of_nobody_do_not_count() {
        let deference = Deference::start().unwrap();
        let deferrer = deference.deferrer();
        for _ in 0..2 * LENGTH_MAX {
            deferrer.asked(None);
            deferrer.answers(None);
        }
        assert!(!deferrer.state.defers.load(Ordering::SeqCst));
        ask_until_idle(&deferrer);
        while deferrer.state.is_idle.load(Ordering::SeqCst) {
            deferrer.asked(None);
            deferrer.answers(None);
        }
    }
}
