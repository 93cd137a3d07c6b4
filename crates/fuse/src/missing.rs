//! Which names the kernel may remember as leading nowhere.
//!
//! A clone under a new name has nothing to tell the kernel if that never asked for the name: no thread has to wait for the lock of the
//! directory, which is most of what a clone through a mount costs. So each name that is looked up is noted, in a set that may say yes for
//! others too: then the kernel is told in vain.
//!
//! **Nothing is missed.** The kernel remembers that a name leads nowhere only by the answer to a LOOKUP. The lookup notes
//! the name and then reads the tree; a clone changes the tree and then looks here. So if the lookup read the tree before the change, the clone finds the name.
//! What a name led to before it was removed is remembered until the kernel has the answer to UNLINK, RMDIR or RENAME, or hears of the removal of a tree. So such a name is noted too, before
//! it goes, and a clone waits for the lock that the kernel holds until then.
//!
//! Names are never forgotten: when most bits are set, clones wait as they would without the set.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use ramet_fs::{Ino, Invalidation};

/// Bits of the set: half of them are 1 after some 3 million names.
const BITS: usize = 1 << 22;

/// Names that were looked up, in their directories, and others.
pub(crate) struct Missing {
    bits: Box<[AtomicU64]>,
    hasher: RandomState,
}

impl Default for Missing {
    fn default() -> Self {
        let words = BITS / u64::BITS as usize;
        Self {
            bits: (0..words).map(|_| AtomicU64::new(0)).collect(),
            hasher: RandomState::new(),
        }
    }
}

impl Missing {
    /// Where the bit of a name is.
    fn find(&self, dir: Ino, name: &[u8]) -> (&AtomicU64, u64) {
        let hash = self.hasher.hash_one((dir.0, name));
        let word = usize::try_from(hash >> 6 & (self.bits.len() as u64 - 1));
        (
            &self.bits[word.expect("less than the words there are")],
            1 << (hash & 63),
        )
    }

    /// Notes a name before the tree is asked whether it is there, or before it is removed.
    pub(crate) fn note(&self, dir: Ino, name: &[u8]) {
        let (word, bit) = self.find(dir, name);
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        // The tree is read after the name was noted, and a clone changes it before it looks here.
        fence(Ordering::SeqCst);
    }

    /// Whether the kernel has to hear of this, after the tree was changed.
    pub(crate) fn may_matter(&self, stale: &Invalidation) -> bool {
        let Invalidation::Missing { dir, name } = stale else {
            return true;
        };
        fence(Ordering::SeqCst);
        let (word, bit) = self.find(*dir, name);
        word.load(Ordering::Relaxed) & bit != 0
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
        let set = Missing::default();
        let names = (0..20_000).map(|number| format!("name{number}"));
        let noted: Vec<_> = names.collect();
        for name in &noted {
            set.note(Ino(7), name.as_bytes());
        }
        assert!(noted.iter().all(|name| set.may_matter(&missing(7, name))));
        let others = noted
            .iter()
            .filter(|name| set.may_matter(&missing(8, name)));
        // One in 200 by chance.
        assert!(others.count() < 1_000);
        assert!(set.may_matter(&Invalidation::Attributes(Ino(9))));
        let entry = Invalidation::Entry {
            dir: Ino(9),
            name: b"name".to_vec(),
        };
        assert!(set.may_matter(&entry), "somebody may know what was there");
    }
}
