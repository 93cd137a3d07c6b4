//! The locks and the cache of the concurrent parts.
//!
//! Under `--cfg shuttle`, for tests only, they are those of a model checker, which runs threads one
//! at a time and switches between them at every lock in ways that it chooses: see `shuttled.rs`.
//! Atomics stay those of the standard library: all of them are counters and hints, and no data is
//! published through them. The locks that readers or other writers may have to wait for are
//! [`TimedMutex`]es, whose times `Stats` tells. The queue of reads ahead and the spare buffers have
//! locks of their own, outside of the model (`store/jobs.rs`, `store/buffers.rs`).

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use ramet_block::{Hold, LockTimes, LongestTimes};

#[cfg(all(shuttle, test))]
pub(crate) use modelled::{Cache, Condvar, Guard, GuardResult, Mutex, MutexGuard, cache};
#[cfg(not(all(shuttle, test)))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(all(shuttle, test)))]
pub(crate) use quick_cache::sync::{Cache, GuardResult};

#[cfg(all(shuttle, test))]
pub(crate) use shuttle::thread_local;
#[cfg(not(all(shuttle, test)))]
pub(crate) use std::thread_local;

/// A mutex whose longest hold and wait are counted.
#[derive(Debug, Default)]
pub(crate) struct TimedMutex<T> {
    mutex: Mutex<T>,
    times: LockTimes,
}

/// The guard of a [`TimedMutex`].
pub(crate) struct TimedGuard<'a, T> {
    // Dropped first: the hold is a little longer than the lock was held, never shorter.
    guard: MutexGuard<'a, T>,
    _hold: Hold<'a>,
}

impl<T> TimedMutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            mutex: Mutex::new(value),
            times: LockTimes::default(),
        }
    }

    pub(crate) fn lock(&self) -> TimedGuard<'_, T> {
        let (guard, hold) = self.times.acquire(|| self.try_lock(), || self.mutex.lock());
        TimedGuard { guard, _hold: hold }
    }

    /// As [`TimedMutex::lock`], for a look that takes about as long as a look at the clock. Its
    /// hold is not counted.
    pub(crate) fn lock_briefly(&self) -> MutexGuard<'_, T> {
        self.times
            .acquire_briefly(|| self.try_lock(), || self.mutex.lock())
    }

    /// As [`TimedMutex::lock`], for a caller that waits `longest` at most; `None` after that.
    pub(crate) fn lock_within(&self, longest: Duration) -> Option<TimedGuard<'_, T>> {
        let guard = self.times.acquire_briefly(
            || self.try_lock().map(Some),
            || self.try_lock_within(longest),
        )?;
        Some(TimedGuard {
            guard,
            _hold: self.times.begin(),
        })
    }

    #[cfg(not(all(shuttle, test)))]
    fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.mutex.try_lock()
    }

    #[cfg(not(all(shuttle, test)))]
    fn try_lock_within(&self, longest: Duration) -> Option<MutexGuard<'_, T>> {
        self.mutex.try_lock_for(longest)
    }

    #[cfg(all(shuttle, test))]
    fn try_lock_within(&self, _longest: Duration) -> Option<MutexGuard<'_, T>> {
        self.try_lock()
    }

    /// The model has no time, so its threads wait uncounted.
    #[cfg(all(shuttle, test))]
    fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        Some(self.mutex.lock())
    }

    pub(crate) fn longest(&self) -> LongestTimes {
        self.times.longest()
    }
}

impl<T> Deref for TimedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for TimedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// The duty to load an entry of a cache: other threads that want the entry wait for it.
#[cfg(not(all(shuttle, test)))]
pub(crate) type Guard<'a, K, V, W> = quick_cache::sync::PlaceholderGuard<
    'a,
    K,
    V,
    W,
    quick_cache::DefaultHashBuilder,
    quick_cache::sync::DefaultLifecycle<K, V>,
>;

/// The least size of a part of the cache that has a lock of its own, in bytes. An entry has to fit
/// its part: the front of a run with very many range messages takes a megabyte.
#[cfg(not(all(shuttle, test)))]
const SHARD_BYTES_MIN: u64 = 32 << 20;

/// Parts of a cache that never has less than `least` bytes for long. The cache rounds the number up
/// to a power of two, so it is one already.
#[cfg(not(all(shuttle, test)))]
fn parts(least: u64, processors: usize) -> usize {
    let most = usize::try_from(least / SHARD_BYTES_MIN).unwrap_or(usize::MAX);
    1 << most.clamp(1, 4 * processors).ilog2()
}

/// A cache for entries of `capacity` bytes together, about `items` of them, that may shrink to
/// `least` bytes. The number of its parts stays, so it follows from the least.
#[cfg(not(all(shuttle, test)))]
pub(crate) fn cache<K, V, W>(
    items: usize,
    (capacity, least): (u64, u64),
    weighter: W,
) -> Cache<K, V, W>
where
    K: Eq + std::hash::Hash,
    V: Clone,
    W: quick_cache::Weighter<K, V> + Clone,
{
    let mut options = quick_cache::OptionsBuilder::new();
    options
        .estimated_items_capacity(items)
        .weight_capacity(capacity);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let shards = parts(least, processors);
    let options = options.shards(shards).build();
    let options = options.expect("both capacities are given");
    Cache::with_options(options, weighter, Default::default(), Default::default())
}

#[cfg(all(shuttle, test))]
mod modelled {
    use std::collections::BTreeMap;
    use std::ops::{Deref, DerefMut};
    use std::sync::PoisonError;
    use std::time::Duration;

    use quick_cache::Weighter;
    use shuttle::rand::{Rng, thread_rng};

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    /// The inner guard is away only within [`MutexGuard::unlocked`] and while its thread waits for
    /// a condition.
    pub(crate) struct MutexGuard<'a, T> {
        mutex: &'a Mutex<T>,
        guard: Option<shuttle::sync::MutexGuard<'a, T>>,
    }

    const LOCKED: &str = "no thread looks at the value while the lock is released";

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        fn acquire(&self) -> shuttle::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard {
                mutex: self,
                guard: Some(self.acquire()),
            }
        }
    }

    impl<T> MutexGuard<'_, T> {
        pub(crate) fn unlocked<U>(this: &mut Self, run: impl FnOnce() -> U) -> U {
            this.guard = None;
            let answer = run();
            this.guard = Some(this.mutex.acquire());
            answer
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.guard.as_ref().expect(LOCKED)
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.guard.as_mut().expect(LOCKED)
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self::default()
        }

        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            let held = guard.guard.take().expect(LOCKED);
            let again = self.0.wait(held).unwrap_or_else(PoisonError::into_inner);
            guard.guard = Some(again);
        }

        /// The model has no time: a thread that waits for a while yields once and looks again.
        pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) {
            MutexGuard::unlocked(guard, shuttle::thread::yield_now);
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    #[expect(
        dead_code,
        reason = "no thread waits here: any number of threads may load an entry"
    )]
    pub(crate) enum GuardResult<'a, K, V, W> {
        Value(V),
        Guard(Guard<'a, K, V, W>),
        Timeout,
    }

    /// The duty to load an entry.
    pub(crate) struct Guard<'a, K, V, W> {
        cache: &'a Cache<K, V, W>,
        key: K,
    }

    impl<K: Ord + Clone, V: Clone, W: Weighter<K, V>> Guard<'_, K, V, W> {
        pub(crate) fn insert(self, value: V) -> Result<(), V> {
            self.cache.insert(self.key, value);
            Ok(())
        }
    }

    /// The model of the cache drops any entry at any moment, and lets two threads load the same
    /// entry. The real cache does both less often. Values are dropped without its lock.
    pub(crate) struct Cache<K, V, W> {
        map: Mutex<BTreeMap<K, V>>,
        weighter: W,
        capacity: u64,
    }

    pub(crate) fn cache<K, V, W>(
        _items: usize,
        (capacity, _least): (u64, u64),
        weighter: W,
    ) -> Cache<K, V, W> {
        Cache {
            map: Mutex::new(BTreeMap::new()),
            weighter,
            capacity,
        }
    }

    impl<K: Ord + Clone, V: Clone, W: Weighter<K, V>> Cache<K, V, W> {
        pub(crate) fn get(&self, key: &K) -> Option<V> {
            let mut map = self.map.lock();
            let found = map.get(key).cloned();
            let forgotten = thread_rng().gen_bool(0.2).then(|| map.remove(key));
            drop(map);
            drop(forgotten);
            found
        }

        pub(crate) fn insert(&self, key: K, value: V) {
            let mut map = self.map.lock();
            let old = map.insert(key, value);
            let evicted = (map.len() > 4).then(|| map.pop_first());
            drop(map);
            drop((old, evicted));
        }

        pub(crate) fn set_capacity(&self, _capacity: u64) {}

        pub(crate) fn peek(&self, key: &K) -> Option<V> {
            self.map.lock().get(key).cloned()
        }

        pub(crate) fn contains_key(&self, key: &K) -> bool {
            self.peek(key).is_some()
        }

        pub(crate) fn get_value_or_guard(
            &self,
            key: &K,
            _timeout: Option<Duration>,
        ) -> GuardResult<'_, K, V, W> {
            match self.get(key) {
                Some(value) => GuardResult::Value(value),
                None => GuardResult::Guard(Guard {
                    cache: self,
                    key: key.clone(),
                }),
            }
        }

        pub(crate) fn remove(&self, key: &K) {
            let old = self.map.lock().remove(key);
            drop(old);
        }

        pub(crate) fn get_or_insert_with<E>(
            &self,
            key: &K,
            load: impl FnOnce() -> Result<V, E>,
        ) -> Result<V, E> {
            if let Some(found) = self.get(key) {
                return Ok(found);
            }
            let value = load()?;
            self.insert(key.clone(), value.clone());
            Ok(value)
        }

        pub(crate) fn capacity(&self) -> u64 {
            self.capacity
        }

        pub(crate) fn weight(&self) -> u64 {
            let map = self.map.lock();
            let weights = map
                .iter()
                .map(|(key, value)| self.weighter.weight(key, value));
            weights.sum()
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use ramet_block::Budget;

    use super::*;

    #[test]
    fn parts_of_the_cache_stay_large_while_the_machine_is_short_of_memory() {
        const MIB: u64 = 1 << 20;
        for limit in [16, 64, 100, 256, 1024, 1 << 16].map(|mib| mib * MIB) {
            let budget = Budget::of_process(limit);
            let parts = parts(budget.cache_bytes_squeezed(), 4) as u64;
            (0..9).for_each(|_| budget.squeeze());
            let part = budget.cache_bytes() / parts;
            assert!(parts == 1 || part >= SHARD_BYTES_MIN, "{limit}: {part}");
        }
        assert_eq!(parts(1 << 40, 4), 16);
    }
}
