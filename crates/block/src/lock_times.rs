//! How long a lock was held, and waited for, at most.
//!
//! The owner of a lock reads the kernel's coarse clock when it has the lock and when it lets go: a
//! request takes several locks, and the exact clock would cost it a microsecond. The coarse clock
//! moves on at each tick of the kernel, every 1 to 10 ms. So a hold is told as the time that it took
//! for certain, and took less than two ticks longer. A thread that finds the lock taken reads the
//! exact clock before it waits. No time is added up: only the longest one counts, since another
//! thread may have to wait for so long.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, Timespec, clock_getres, clock_gettime};

/// The longest hold of a lock, or of several locks of one kind, and the longest wait for it, since
/// it was made.
#[derive(Debug, Default)]
pub struct LockTimes {
    hold_ns: AtomicU64,
    wait_ns: AtomicU64,
}

/// The figures of [`LockTimes`] at one moment, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LongestTimes {
    /// The longest hold, in ticks of the kernel: it was less than two ticks longer.
    pub hold_ns: u64,
    /// The longest wait.
    pub wait_ns: u64,
}

/// A moment of the coarse clock, in nanoseconds since some start.
fn coarse_ns() -> u64 {
    nanos(clock_gettime(ClockId::MonotonicCoarse))
}

/// Time between two ticks, in nanoseconds.
fn tick_ns() -> u64 {
    static TICK_NS: OnceLock<u64> = OnceLock::new();
    *TICK_NS.get_or_init(|| nanos(clock_getres(ClockId::MonotonicCoarse)))
}

fn nanos(time: Timespec) -> u64 {
    Duration::try_from(time).map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

fn raise(longest: &AtomicU64, time: Duration) {
    let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    // Most times are short: the line is then only read.
    if ns > longest.load(Ordering::Relaxed) {
        longest.fetch_max(ns, Ordering::Relaxed);
    }
}

impl LockTimes {
    /// Takes a lock by `try_lock`, or by `lock` if another thread has it, and notes the wait.
    pub fn acquire<G>(
        &self,
        try_lock: impl FnOnce() -> Option<G>,
        lock: impl FnOnce() -> G,
    ) -> (G, Hold<'_>) {
        let guard = self.acquire_briefly(try_lock, lock);
        (guard, self.begin())
    }

    /// As [`LockTimes::acquire`], for a hold so short that the clock would be a part of it: its
    /// length is not noted. A thread that waits for it notes that.
    #[inline]
    pub fn acquire_briefly<G>(
        &self,
        try_lock: impl FnOnce() -> Option<G>,
        lock: impl FnOnce() -> G,
    ) -> G {
        try_lock().unwrap_or_else(|| {
            let begun = Instant::now();
            let guard = lock();
            raise(&self.wait_ns, begun.elapsed());
            guard
        })
    }

    /// Begins a hold of a lock that the caller has just taken.
    pub fn begin(&self) -> Hold<'_> {
        Hold {
            times: self,
            since_ns: coarse_ns(),
        }
    }

    /// The figures now.
    #[must_use]
    pub fn longest(&self) -> LongestTimes {
        LongestTimes {
            hold_ns: self.hold_ns.load(Ordering::Relaxed),
            wait_ns: self.wait_ns.load(Ordering::Relaxed),
        }
    }
}

/// A hold that is under way. It ends, and is noted, when the value is dropped: together with the
/// guard of the lock.
#[derive(Debug)]
pub struct Hold<'a> {
    times: &'a LockTimes,
    since_ns: u64,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let told_ns = coarse_ns().saturating_sub(self.since_ns);
        if told_ns > 0 {
            let sure_ns = told_ns.saturating_sub(tick_ns());
            raise(&self.times.hold_ns, Duration::from_nanos(sure_ns));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_hold_and_wait_stay() {
        let times = LockTimes::default();
        let (_, hold) = times.acquire(|| Some(()), || unreachable!("it is free"));
        assert_eq!(times.longest(), LongestTimes::default(), "still held");
        drop(hold);
        assert_eq!(times.longest().wait_ns, 0);
        raise(&times.hold_ns, Duration::from_secs(7));
        drop(times.acquire(|| Some(()), || unreachable!("it is free")));
        let ((), hold) = times.acquire(|| None, || raise(&times.wait_ns, Duration::from_secs(3)));
        drop(hold);
        let longest = times.longest();
        assert_eq!(
            (longest.hold_ns, longest.wait_ns),
            (7_000_000_000, 3_000_000_000)
        );
    }

    #[test]
    fn brief_hold_is_not_noted_and_the_wait_for_it_is() {
        let times = LockTimes::default();
        times.acquire_briefly(|| Some(()), || unreachable!("it is free"));
        assert_eq!(times.longest(), LongestTimes::default());
        times.acquire_briefly(|| None, || std::thread::sleep(Duration::from_millis(2)));
        let LongestTimes { hold_ns, wait_ns } = times.longest();
        assert!(hold_ns == 0 && wait_ns >= 2_000_000, "{hold_ns} {wait_ns}");
    }

    #[test]
    fn a_hold_is_told_to_two_ticks() {
        let times = LockTimes::default();
        let begun = Instant::now();
        let hold = times.begin();
        let least = Duration::from_nanos(5 * tick_ns());
        std::thread::sleep(least);
        drop(hold);
        let most = u64::try_from(begun.elapsed().as_nanos()).expect("a short time");
        let told = times.longest().hold_ns;
        assert!(told <= most && told >= 3 * tick_ns(), "{told} of {most}");
    }
}
