//! The memory budget of a process: one limit for all that it holds for its volumes.
//!
//! ```text
//!  limit      │ cache of nodes │ fresh nodes │ pages │ journal │ inodes │ requests │ slack │
//!              <── the rest       <── each use tells its bytes                  resident - told
//! ```
//!
//! Each consumer of memory tells the budget its bytes ([`Budget::set`]). Consumers that may not
//! give anything back when they are asked (fresh nodes, the queue of the journal) bound themselves
//! by a part of the limit ([`Budget::part`]). The cache of nodes takes the bytes that all others
//! leave ([`Budget::cache_bytes`]). *Slack* is the resident memory of the process beyond the told
//! bytes: holes of the allocator, stacks, and consumers too small to be told. So memory that nobody
//! counts shrinks the cache as well, and the process stays near its limit.
//!
//! Concurrency: counters without a lock; a reader sees each of them at some recent moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::memory_limit::resident_bytes;

/// A use of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Nodes in the cache.
    Cache,
    /// Nodes that are not written yet, and the memory buffer.
    Fresh,
    /// Records that wait to be written to the journal.
    Journal,
    /// Pages of the node table and the free-space map.
    Pages,
    /// Inodes, those that the kernel remembers among them.
    Inodes,
    /// Buffers of requests, remembered listings, and answers of control calls.
    Requests,
}

const USES: usize = 6;

/// The cache keeps this part of the limit, however much others hold: a descent needs the upper
/// nodes.
const CACHE_PART_MIN: u64 = 8;
/// Pressure takes no more than this part of the limit away.
const SQUEEZED_PART_MAX: u64 = 2;

/// The memory that the limit of a budget covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bounds {
    /// The cache of nodes alone.
    Cache,
    /// Everything that is told.
    Told,
    /// Everything that the process has resident.
    Process,
}

/// One limit for everything that a process holds for its volumes. See the module header.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    bounds: Bounds,
    used: [AtomicU64; USES],
    slack: AtomicU64,
    squeezed: AtomicU64,
}

impl Budget {
    fn new(limit: u64, bounds: Bounds) -> Arc<Self> {
        Arc::new(Self {
            limit,
            bounds,
            used: Default::default(),
            slack: AtomicU64::new(0),
            squeezed: AtomicU64::new(0),
        })
    }

    /// A budget of `limit` bytes for everything that this process holds, which serves volumes and
    /// nothing else.
    #[must_use]
    pub fn of_process(limit: u64) -> Arc<Self> {
        Self::new(limit, Bounds::Process)
    }

    /// A budget of `limit` bytes for the memory of volumes in a process that does other things as
    /// well. Holes of the allocator do not count: nobody knows whose they are.
    #[must_use]
    pub fn of_volumes(limit: u64) -> Arc<Self> {
        Self::new(limit, Bounds::Told)
    }

    /// A budget of `limit` bytes for the cache of nodes; other uses have their usual bounds.
    #[must_use]
    pub fn of_cache(limit: u64) -> Arc<Self> {
        Self::new(limit, Bounds::Cache)
    }

    /// The limit, in bytes.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether the limit is that of the cache alone.
    #[must_use]
    pub fn bounds_cache_only(&self) -> bool {
        self.bounds == Bounds::Cache
    }

    /// The `divisor`-th part of the limit, in bytes; no bound if the limit is that of the cache
    /// alone.
    #[must_use]
    pub fn part(&self, divisor: u64) -> u64 {
        if self.bounds_cache_only() {
            u64::MAX
        } else {
            self.limit / divisor
        }
    }

    /// Tells that `what` holds `bytes` now.
    pub fn set(&self, what: Use, bytes: u64) {
        self.used[what as usize].store(bytes, Ordering::Relaxed);
    }

    /// Tells that `what` holds `bytes` more.
    pub fn charge(&self, what: Use, bytes: u64) {
        self.used[what as usize].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Tells that `what` holds `bytes` less, which were charged before.
    pub fn give_back(&self, what: Use, bytes: u64) {
        self.used[what as usize].fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The bytes that the use `what` holds.
    #[must_use]
    pub fn used(&self, what: Use) -> u64 {
        self.used[what as usize].load(Ordering::Relaxed)
    }

    fn told(&self) -> u64 {
        self.used.iter().map(|n| n.load(Ordering::Relaxed)).sum()
    }

    /// Looks at the resident memory of the process, if the limit covers that.
    pub fn look(&self) {
        if self.bounds == Bounds::Process
            && let Some(resident) = resident_bytes()
        {
            self.observe(resident);
        }
    }

    /// The process has `resident` bytes of its own in memory.
    fn observe(&self, resident: u64) {
        let slack = resident.saturating_sub(self.told());
        self.slack.store(slack, Ordering::Relaxed);
    }

    /// Resident memory of the process beyond the told bytes, when it was observed last, in bytes.
    #[must_use]
    pub fn slack(&self) -> u64 {
        self.slack.load(Ordering::Relaxed)
    }

    /// Whether the process had more resident than the limit when it was observed last, and an
    /// eighth of the limit of that was slack.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let slack = self.slack();
        slack >= self.limit / 8 && self.told() + slack > self.limit
    }

    /// The machine is short of memory: takes half of the cache's memory away, until [`Budget::relax`]
    /// gives it back.
    pub fn squeeze(&self) {
        let more = self.cache_bytes() / 2;
        let most = self.limit / SQUEEZED_PART_MAX;
        let add = |squeezed: u64| Some(squeezed.saturating_add(more).min(most));
        // Never refused.
        let _ = self
            .squeezed
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// The machine has memory again: gives back an eighth of the most that pressure may take.
    pub fn relax(&self) {
        let step = self.limit / SQUEEZED_PART_MAX / 8;
        let less = |squeezed: u64| Some(squeezed.saturating_sub(step));
        // Never refused.
        let _ = self
            .squeezed
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Bytes that the pressure of the machine has taken away.
    #[must_use]
    pub fn squeezed(&self) -> u64 {
        self.squeezed.load(Ordering::Relaxed)
    }

    /// Bytes that pressure leaves to the cache of nodes if other uses hold nothing.
    #[must_use]
    pub fn cache_bytes_squeezed(&self) -> u64 {
        if self.bounds_cache_only() {
            return self.limit;
        }
        self.limit - self.limit / SQUEEZED_PART_MAX
    }

    /// Bytes that the cache of nodes may hold now: those that all others leave, and an eighth of the
    /// limit at least.
    #[must_use]
    pub fn cache_bytes(&self) -> u64 {
        if self.bounds_cache_only() {
            return self.limit;
        }
        let others = self.told().saturating_sub(self.used(Use::Cache));
        let taken = others + self.slack() + self.squeezed();
        self.limit
            .saturating_sub(taken)
            .max(self.limit / CACHE_PART_MIN)
    }
}

/// Bytes of a use that are given back when the value is dropped.
#[derive(Debug)]
pub struct Held {
    budget: Arc<Budget>,
    what: Use,
    bytes: u64,
}

impl Held {
    /// Nothing yet of the use `what`.
    #[must_use]
    pub fn new(budget: &Arc<Budget>, what: Use) -> Self {
        Self {
            budget: Arc::clone(budget),
            what,
            bytes: 0,
        }
    }

    /// Tells that `bytes` are held now, in all. Returns the bytes that were held until now.
    pub fn set(&mut self, bytes: u64) -> u64 {
        self.budget.charge(self.what, bytes);
        self.budget.give_back(self.what, self.bytes);
        std::mem::replace(&mut self.bytes, bytes)
    }

    /// Tells that `bytes` more are held. Whether the use, with all that others hold of it, stays
    /// within the `divisor`-th part of the limit.
    #[must_use]
    pub fn add(&mut self, bytes: u64, divisor: u64) -> bool {
        self.budget.charge(self.what, bytes);
        self.bytes += bytes;
        self.budget.used(self.what) <= self.budget.part(divisor)
    }

    /// Tells that `bytes` more are held. Whether this holder stays within `bytes_max`, however much
    /// others hold.
    #[must_use]
    pub fn add_within(&mut self, bytes: u64, bytes_max: u64) -> bool {
        self.budget.charge(self.what, bytes);
        self.bytes += bytes;
        self.bytes <= bytes_max
    }

    /// Bytes that are held.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.give_back(self.what, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_cache_gets_what_others_leave_and_an_eighth_at_least() {
        let budget = Budget::of_process(64 * MIB);
        assert_eq!(budget.cache_bytes(), 64 * MIB);
        budget.set(Use::Cache, 30 * MIB);
        budget.set(Use::Fresh, 20 * MIB);
        budget.charge(Use::Inodes, 5 * MIB);
        budget.charge(Use::Inodes, MIB);
        budget.give_back(Use::Inodes, 2 * MIB);
        assert_eq!(budget.cache_bytes(), 40 * MIB);
        budget.observe(64 * MIB);
        assert_eq!((budget.slack(), budget.cache_bytes()), (10 * MIB, 30 * MIB));
        assert!(!budget.is_over());
        budget.set(Use::Fresh, 70 * MIB);
        assert_eq!(budget.cache_bytes(), 8 * MIB);
        assert!(budget.is_over());
        budget.observe(MIB);
        assert_eq!(budget.slack(), 0);
        budget.look();
        assert!(budget.slack() > 0 || budget.told() > MIB);
        let budget = Budget::of_volumes(64 * MIB);
        budget.look();
        assert_eq!(budget.slack(), 0, "the process may hold other things");
    }

    #[test]
    fn held_bytes_count_until_they_are_dropped() {
        let budget = Budget::of_volumes(64 * MIB);
        budget.charge(Use::Requests, 20 * MIB);
        let mut held = Held::new(&budget, Use::Requests);
        assert!(held.add(12 * MIB, 2));
        assert!(!held.add(1, 2));
        assert_eq!(budget.used(Use::Requests), 32 * MIB + 1);
        let mut own = Held::new(&budget, Use::Requests);
        assert!(own.add_within(MIB, MIB) && !own.add_within(1, MIB));
        assert_eq!((own.bytes(), own.set(0)), (MIB + 1, MIB + 1));
        assert_eq!(held.set(MIB), 12 * MIB + 1);
        assert_eq!(budget.used(Use::Requests), 21 * MIB);
        drop(held);
        assert_eq!(budget.used(Use::Requests), 20 * MIB);
    }

    #[test]
    fn pressure_takes_half_of_the_limit_at_most_and_gives_it_back_in_steps() {
        let budget = Budget::of_process(64 * MIB);
        budget.squeeze();
        assert_eq!(budget.cache_bytes(), 32 * MIB);
        budget.squeeze();
        assert_eq!(budget.squeezed(), 32 * MIB, "no more than half");
        assert_eq!(budget.cache_bytes(), budget.cache_bytes_squeezed());
        budget.relax();
        assert_eq!(budget.squeezed(), 28 * MIB);
        (0..9).for_each(|_| budget.relax());
        assert_eq!(budget.cache_bytes(), 64 * MIB);
    }

    #[test]
    fn a_limit_of_the_cache_alone_bounds_nothing_else() {
        let budget = Budget::of_cache(MIB);
        budget.set(Use::Fresh, 70 * MIB);
        budget.observe(200 * MIB);
        assert_eq!((budget.cache_bytes(), budget.part(16)), (MIB, u64::MAX));
        assert_eq!(budget.cache_bytes_squeezed(), MIB);
        assert_eq!(Budget::of_volumes(MIB).part(16), 64 << 10);
    }
}
