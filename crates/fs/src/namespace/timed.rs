//! A lock of the whole volume whose longest holds and waits are counted.

use std::ops::{Deref, DerefMut};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use ramet_block::{Hold, LockTimes, LongestTimes};

/// A lock for readers and writers; both are counted apart.
pub(crate) struct TimedRwLock<T> {
    lock: RwLock<T>,
    reads: LockTimes,
    writes: LockTimes,
}

/// A guard, and the hold that ends with it.
pub(crate) struct Timed<'a, G> {
    guard: G,
    _hold: Hold<'a>,
}

impl<T> TimedRwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            lock: RwLock::new(value),
            reads: LockTimes::default(),
            writes: LockTimes::default(),
        }
    }

    pub(crate) fn read(&self) -> Timed<'_, RwLockReadGuard<'_, T>> {
        let (lock, times) = (&self.lock, &self.reads);
        let (guard, _hold) = times.acquire(|| lock.try_read(), || lock.read());
        Timed { guard, _hold }
    }

    /// `None` while a thread has it for writing, or waits for that.
    pub(crate) fn try_read(&self) -> Option<Timed<'_, RwLockReadGuard<'_, T>>> {
        let guard = self.lock.try_read()?;
        let _hold = self.reads.begin();
        Some(Timed { guard, _hold })
    }

    pub(crate) fn write(&self) -> Timed<'_, RwLockWriteGuard<'_, T>> {
        let (lock, times) = (&self.lock, &self.writes);
        let (guard, _hold) = times.acquire(|| lock.try_write(), || lock.write());
        Timed { guard, _hold }
    }

    /// The figures of readers and of writers.
    pub(crate) fn longest(&self) -> [LongestTimes; 2] {
        [self.reads.longest(), self.writes.longest()]
    }
}

impl<G: Deref> Deref for Timed<'_, G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for Timed<'_, G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Longer than four ticks of any kernel.
    const HELD: Duration = Duration::from_millis(50);

    #[test]
    fn holds_of_readers_and_writers_are_counted_apart() {
        let lock = TimedRwLock::new(7);
        let reader = lock.read();
        assert_eq!((*reader, lock.longest()[0].hold_ns), (7, 0), "still held");
        std::thread::sleep(HELD);
        drop(reader);
        let [reads, writes] = lock.longest();
        assert!(
            reads.hold_ns > 0 && writes.hold_ns == 0,
            "{reads:?} {writes:?}"
        );
        let mut writer = lock.write();
        *writer = 8;
        std::thread::sleep(HELD);
        drop(writer);
        assert!(lock.longest()[1].hold_ns > 0);
        assert_eq!(*lock.read(), 8);
    }
}
