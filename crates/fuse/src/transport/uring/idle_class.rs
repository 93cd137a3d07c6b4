//! Threads that leave their processor to who asked them.
//!
//! When an answer comes, the processor that the program asked on is busy: with the thread that answers, and that will sleep a
//! microsecond later. The scheduler cannot know, moves the program to an idle processor, and moves it again with the next
//! answer; waking an idle one costs more than the request. A processor that runs threads of the idle class alone counts as
//! idle, so the answer of such a thread lets the program go on where it is.
//!
//! But a thread of the idle class waits for all other work. So threads are in it only while one program asks one request after
//! the other ([`Run`]), and one thread, the watch, puts them there and back: who could run and answered nothing between two looks
//! starves, since something else has the processor, and is normal again. So such a request waits some 4 ms, as long as the watch itself
//! gets a processor, and the next run has to be twice as long before threads defer, until one was worth it. Who sleeps for several looks, on a processor that the program has
//! left, is normal again too, so that nobody has to look any longer.
//!
//! Pauses say less. Where a virtual processor is taken away for milliseconds, or takes as long to wake up, a program that is held up
//! by just what deference spares it would seem to rest: its run goes on for as long as a pause lasts no more than [`PAUSE`], and what a pause ends was not vain.

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

/// The longest pause between an answer and the next request of a run: several times what an idle virtual processor takes to wake up.
const PAUSE: Duration = Duration::from_millis(5);
/// How often it is looked whether threads that defer starve.
const LOOK: Duration = Duration::from_millis(2);
/// Looks that find a thread asleep before it defers no more.
const RESTS: u32 = 8;
/// Requests of a run before its threads defer: at least, and after many runs that starved them.
const LENGTH_MIN: u32 = 32;
const LENGTH_MAX: u32 = 4096;
/// Requests that have to follow: they win some 20 us each, and the end of a run may cost two looks.
const WORTH: u32 = 200;

/// The threads of a mount that defer at times, and who watches them.
pub(crate) struct IdleClass {
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
    /// Of the watch, which alone puts threads into the idle class and notes it: their class, their answers when they were last judged, and how often in a row they had given none since.
    is_idle: AtomicBool,
    seen: AtomicU64,
    rests: AtomicU32,
}

impl State {
    /// For how many calls in a row, this one too, it has answered nothing.
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
            self.end(false);
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
        self.is_enough() && self.pause(now) <= PAUSE
    }

    fn is_enough(&self) -> bool {
        self.length.load(Ordering::Relaxed) >= self.enough.load(Ordering::Relaxed)
    }

    /// Since the last answer.
    fn pause(&self, now: u64) -> Duration {
        Duration::from_nanos(now.saturating_sub(self.answered.load(Ordering::Relaxed)))
    }

    /// The next run is tried sooner if this one was worth it, by half for each time that it was; and later if it was not, but `starved` a thread.
    fn end(&self, starved: bool) {
        let length = self.length.swap(0, Ordering::Relaxed);
        let enough = self.enough.load(Ordering::Relaxed);
        let Some(deferred) = length.checked_sub(enough) else {
            return;
        };
        let next = match deferred / WORTH {
            0 if starved => enough.saturating_mul(2),
            times => enough >> times.min(LENGTH_MAX.ilog2()),
        };
        let next = next.clamp(LENGTH_MIN, LENGTH_MAX);
        self.enough.store(next, Ordering::Relaxed);
    }
}

impl IdleClass {
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
            rests: AtomicU32::new(0),
        });
        self.shared.threads.lock().push(Arc::clone(&state));
        Deferrer {
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

/// There and back, for the calling thread.
fn try_classes() -> io::Result<()> {
    set_scheduling_class(gettid(), SchedulingClass::Idle)?;
    set_scheduling_class(gettid(), SchedulingClass::Normal)
}

/// Whether a thread of this process waits for a processor or has one; also where that cannot be told.
fn could_run(thread: Pid) -> bool {
    let path = format!("/proc/self/task/{}/stat", thread.as_raw_nonzero());
    std::fs::read_to_string(path).map_or(true, |stat| is_runnable(&stat))
}

/// By the third field of a `stat` file, behind a name that may hold anything.
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
            // A thread that wants to defer wakes the watch at any time: too soon to tell who starves.
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

    /// Gives threads the class that they should have; whether one is idle. `judges` whether those that answered nothing since that was last done starve.
    ///
    /// # Errors
    /// A class cannot be changed any more.
    fn look(&self, judges: bool) -> io::Result<bool> {
        let is_on = self.run.is_on(self.now());
        let (mut any_idle, mut any_starves) = (false, false);
        for thread in &*self.threads.lock() {
            let wants = thread.defers.load(Ordering::SeqCst);
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
        if any_starves || !any_idle {
            self.run.end(any_starves);
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
    const LATE: u64 = 6_000_000;

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
        let is_next_enough_at = |requests| !ask(requests - 1) && ask(1);
        let end_vain = |starved| {
            // As many as were enough.
            run.length
                .store(run.enough.load(Ordering::Relaxed), Ordering::Relaxed);
            run.end(starved);
        };
        ask(1);
        for _ in 0..20 {
            end_vain(true);
        }
        assert!(is_next_enough_at(LENGTH_MAX));
        end_vain(false);
        assert!(is_next_enough_at(LENGTH_MAX), "a pause tells nothing");
        assert!(ask(2 * WORTH));
        run.end(true);
        assert!(is_next_enough_at(LENGTH_MAX / 4), "worth it twice");
        assert!(ask(20 * WORTH));
        run.end(true);
        assert!(is_next_enough_at(LENGTH_MIN));
    }

    #[test]
    fn who_rests_is_normal_again() {
        let deference = IdleClass::start().unwrap();
        assert!(deference.watch.is_some(), "root may change classes");
        let deferrer = deference.deferrer();
        ask_until_idle(&deferrer);
        // Nobody asks: the watch has to come by itself.
        while deferrer.state.is_idle.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }

    /// One that nobody watches.
    fn unwatched() -> IdleClass {
        IdleClass {
            shared: Arc::new(Shared::new()),
            watch: None,
        }
    }

    /// A look during a run, which goes on however long this takes.
    fn look(deference: &IdleClass, judges: bool) -> bool {
        let run = &deference.shared.run;
        run.length.store(LENGTH_MAX, Ordering::Relaxed);
        run.is_long(u64::MAX);
        deference.shared.look(judges).unwrap()
    }

    /// Has answered something, and wants to defer.
    fn answer_once(deferrer: &Deferrer) {
        deferrer.state.answers.store(1, Ordering::Relaxed);
        deferrer.state.defers.store(true, Ordering::SeqCst);
    }

    #[test]
    fn who_could_run_and_answers_nothing_between_two_looks_is_normal_again() {
        let deference = unwatched();
        let deferrer = deference.deferrer();
        answer_once(&deferrer);
        assert!(look(&deference, true), "it just answered");
        assert!(look(&deference, true), "the first look at it");
        assert!(
            look(&deference, false),
            "too soon to tell for who wakes the watch"
        );
        assert!(!look(&deference, true), "nothing since");
    }

    #[test]
    fn who_sleeps_does_not_starve_and_is_normal_again_after_a_while() {
        let deference = unwatched();
        std::thread::scope(|scope| {
            let (done, is_done) = channel::<()>();
            let deference = &deference;
            let sleeper = scope.spawn(move || {
                let deferrer = deference.deferrer();
                answer_once(&deferrer);
                let _ = is_done.recv();
            });
            let sleeper_sleeps = || {
                let threads = deference.shared.threads.lock();
                threads.first().is_some_and(|state| {
                    state.defers.load(Ordering::SeqCst) && !could_run(state.thread)
                })
            };
            while !sleeper_sleeps() {
                std::thread::yield_now();
            }
            // It becomes idle, is looked at for the first time, and is found asleep.
            for _ in 0..2 + RESTS - 1 {
                assert!(look(deference, true));
            }
            assert!(!look(deference, true));
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
    fn another_asker_ends_a_run_for_all_threads() {
        let deference = IdleClass::start().unwrap();
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
        let deference = IdleClass::start().unwrap();
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
