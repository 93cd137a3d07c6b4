//! Names that the kernel may remember as names that do not exist.
//!
//! A clone under a new name has nothing to tell the kernel if the kernel never asked for the name.
//! The clone then waits for no directory lock, and the wait is most of the cost of a clone through
//! a mount. So each name that is looked up is noted in a set. The set may answer yes for other
//! names too: the kernel is then told in vain.
//!
//! **Nothing is missed.** The kernel learns that a name does not exist only by the answer to a
//! LOOKUP. The lookup notes the name and then reads the tree. A clone changes the tree and then
//! reads the set. So if the lookup read the tree before the change, the clone finds the name in the
//! set. After a name is removed, the kernel remembers its old inode until it has the answer to
//! UNLINK, RMDIR or RENAME, or the notification of the removed tree. So a name is noted too before
//! it is removed, and a clone waits for the lock that the kernel holds until then.
//!
//! **Names age.** The kernel believes an answer for [`MISSING_TTL`] only. The set has two
//! generations, and names are noted in the younger one. When the younger generation is older than
//! [`KEPT`], all names of the elder one were noted longer ago than the kernel believes any answer.
//! If one of the two is full by then, the elder one is cleared and becomes the younger one. While
//! names come faster than that, the set grows too full, and clones wait as they would without it.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use parking_lot::Mutex;
use ramet_fs::{Ino, Invalidation};

use crate::protocol::negotiate::MISSING_TTL;

/// Bits of each generation.
const BITS: usize = 1 << 22;
/// A generation is full when one in so many of its bits is set, which 560,000 names do.
const FULL: usize = 8;
/// Age of the younger generation at which the elder one is cleared: the time for which the kernel
/// believes an answer, and as long again for an answer that is on its way.
const KEPT: Duration = MISSING_TTL.saturating_mul(2);

/// Bits of the names of one generation, by the hash of directory and name.
struct Generation {
    bits: Box<[AtomicU64]>,
    /// How many bits are 1.
    set: AtomicUsize,
}

impl Generation {
    fn new(bits: usize) -> Self {
        let words = bits / u64::BITS as usize;
        Self {
            bits: (0..words).map(|_| AtomicU64::new(0)).collect(),
            set: AtomicUsize::new(0),
        }
    }

    /// The word and the bit of a name.
    fn find(&self, hash: u64) -> (&AtomicU64, u64) {
        let word = usize::try_from(hash >> 6 & (self.bits.len() as u64 - 1));
        (
            &self.bits[word.expect("less than the words there are")],
            1 << (hash & 63),
        )
    }

    fn insert(&self, hash: u64) {
        let (word, bit) = self.find(hash);
        if word.load(Ordering::Relaxed) & bit == 0
            && word.fetch_or(bit, Ordering::Relaxed) & bit == 0
        {
            self.set.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn may_have(&self, hash: u64) -> bool {
        let (word, bit) = self.find(hash);
        word.load(Ordering::Relaxed) & bit != 0
    }

    fn is_full(&self) -> bool {
        self.set.load(Ordering::Relaxed) >= self.bits.len() * u64::BITS as usize / FULL
    }

    fn clear(&self) {
        self.set.store(0, Ordering::Relaxed);
        for word in &self.bits {
            word.store(0, Ordering::Relaxed);
        }
    }
}

/// Names that were looked up lately, in their directories. Other names may share their bits.
pub(crate) struct NegativeDentries {
    generations: [Generation; 2],
    /// Index of the younger generation.
    younger: AtomicUsize,
    /// The moment when that generation became the younger one.
    since: Mutex<Instant>,
    hasher: RandomState,
}

impl Default for NegativeDentries {
    fn default() -> Self {
        Self::new(BITS, Instant::now())
    }
}

impl NegativeDentries {
    fn new(bits: usize, now: Instant) -> Self {
        Self {
            generations: [Generation::new(bits), Generation::new(bits)],
            younger: AtomicUsize::new(0),
            since: Mutex::new(now),
            hasher: RandomState::default(),
        }
    }

    /// Notes a name before the tree is read for it, or before the name is removed.
    pub(crate) fn note(&self, dir: Ino, name: &[u8]) {
        self.note_at(dir, name, Instant::now);
    }

    fn note_at(&self, dir: Ino, name: &[u8], now: impl FnOnce() -> Instant) {
        let hash = self.hasher.hash_one((dir.0, name));
        let mut younger = self.younger.load(Ordering::SeqCst);
        loop {
            self.generations[younger].insert(hash);
            // A thread that was preempted here for long may have used a generation that was cleared
            // meanwhile.
            match self.younger.load(Ordering::SeqCst) {
                same if same == younger => break,
                other => younger = other,
            }
        }
        if self.is_full() {
            self.age(now());
        }
        // The tree is read after the name was noted. A clone changes the tree before it reads the
        // set.
        fence(Ordering::SeqCst);
    }

    fn is_full(&self) -> bool {
        self.generations.iter().any(Generation::is_full)
    }

    /// Clears the elder generation and makes it the younger one, if no name in it matters any more.
    fn age(&self, now: Instant) {
        // The other thread, which holds the lock, clears it.
        let Some(mut since) = self.since.try_lock() else {
            return;
        };
        if !self.is_full() || now.saturating_duration_since(*since) < KEPT {
            return;
        }
        let elder = 1 - self.younger.load(Ordering::SeqCst);
        self.generations[elder].clear();
        self.younger.store(elder, Ordering::SeqCst);
        *since = now;
    }

    /// Whether the kernel has to hear of this invalidation, after the tree was changed.
    pub(crate) fn may_matter(&self, stale: &Invalidation) -> bool {
        let Invalidation::Missing { dir, name } = stale else {
            return true;
        };
        fence(Ordering::SeqCst);
        let hash = self.hasher.hash_one((dir.0, &name[..]));
        self.generations.iter().any(|one| one.may_have(hash))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(dir: u64, name: &str) -> Invalidation {
        Invalidation::Missing {
            dir: Ino(dir),
            name: name.into(),
        }
    }

    #[test]
    fn names_that_were_noted_matter_and_few_others() {
        let set = NegativeDentries::default();
        let names = (0..20_000).map(|number| format!("name{number}"));
        let noted: Vec<_> = names.collect();
        for name in &noted {
            set.note(Ino(7), name.as_bytes());
        }
        assert!(noted.iter().all(|name| set.may_matter(&missing(7, name))));
        let others = noted
            .iter()
            .filter(|name| set.may_matter(&missing(8, name)));
        // One in 200 collides by chance.
        assert!(others.count() < 1_000);
        assert!(set.may_matter(&Invalidation::Attributes(Ino(9))));
        let entry = Invalidation::Entry {
            dir: Ino(9),
            name: b"name".to_vec(),
        };
        assert!(set.may_matter(&entry), "what was there may be known");
    }

    #[test]
    fn names_matter_for_as_long_as_the_kernel_believes_them_and_then_no_more() {
        const BITS: usize = 1 << 14;
        const SECOND: Duration = Duration::from_secs(1);
        let start = Instant::now();
        let set = NegativeDentries::new(BITS, start);
        let others = || {
            let strange = (0..1000).filter(|n| set.may_matter(&missing(8, &n.to_string())));
            strange.count()
        };
        // The loop notes 100 new names a second, so a generation is full after some 22 seconds.
        let mut now = start;
        for second in 0..4000u32 {
            now = start + SECOND * second;
            for n in 0..100 {
                let name = format!("{second} {n}");
                set.note_at(Ino(7), name.as_bytes(), || now);
                assert!(set.may_matter(&missing(7, &name)));
            }
            let oldest = second.saturating_sub(u32::try_from(MISSING_TTL.as_secs()).unwrap());
            for n in 0..100 {
                assert!(set.may_matter(&missing(7, &format!("{oldest} {n}"))));
            }
        }
        // Names came faster than they age, yet the set does not answer yes to every name.
        assert!(others() < 1000);
        // Rare names are enough to clear the others, in two steps.
        for step in 1..=3 {
            now += KEPT;
            set.note_at(Ino(7), format!("rare {step}").as_bytes(), || now);
        }
        assert!(others() < 500, "{}", others());
    }
}
