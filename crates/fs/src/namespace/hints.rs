//! Hints of the inodes that names led to.
//!
//! The table of hints grows and shrinks with the number of inodes in memory. A hint has a *tag*
//! beside its inode number: the bits of its hash that tell its place in any larger table. So the
//! hints move along when the table changes its size.
//!
//! ```text
//! hash      ... bits that are not used | bits 8..19: the tag | bits 0..8
//! place     the low bits, as many as the table has groups for: 8 to 19
//! hint      inode number (53 bits) | tag (11)
//! ```

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::fast::FixedState;

use crate::format::ino::Ino;

/// Slots for hints: two for each inode in memory, at least and at most.
pub(super) const HINTS_MIN: usize = 1 << 10;
pub(super) const HINTS_MAX: usize = 1 << 21;

/// Hints of one place.
const GROUP_LEN: usize = 4;
/// Bits of a hash that tell the place in the smallest table.
const PLACE_BITS_MIN: u32 = (HINTS_MIN / GROUP_LEN).ilog2();
const TAG_BITS: u32 = (HINTS_MAX / GROUP_LEN).ilog2() - PLACE_BITS_MIN;
const TAG_MASK: u64 = (1 << TAG_BITS) - 1;
/// Inode numbers of hints are below.
const INO_END: u64 = 1 << (u64::BITS - TAG_BITS);
const _: () = assert!(INO_END >= 1 << 53);

/// Numbers of the inodes that names led to, by a hash of directory and name, in groups: the last
/// ones of a place, the newest first. 0 stands for none. A hint may be wrong and is checked; some
/// hints are lost.
pub(super) struct Hints {
    slots: Vec<AtomicU64>,
}

fn hash(dir: Ino, name: &[u8]) -> u64 {
    FixedState::default().hash_one((dir.0, name))
}

fn tag(hash: u64) -> u64 {
    (hash >> PLACE_BITS_MIN) & TAG_MASK
}

impl Hints {
    /// `slots` is a power of two between the least and the most.
    pub(super) fn new(slots: usize) -> Self {
        Self {
            slots: (0..slots).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    fn group(&self, hash: u64) -> &[AtomicU64] {
        let groups = self.slots.len() / GROUP_LEN;
        let at = usize::try_from(hash % groups as u64).expect("below their number");
        &self.slots[GROUP_LEN * at..GROUP_LEN * (at + 1)]
    }

    pub(super) fn get(&self, dir: Ino, name: &[u8]) -> [Option<Ino>; GROUP_LEN] {
        let hash = hash(dir, name);
        let group = self.group(hash);
        std::array::from_fn(|at| {
            let hint = group[at].load(Ordering::Relaxed);
            let is_its = hint != 0 && hint & TAG_MASK == tag(hash);
            is_its.then_some(Ino(hint >> TAG_BITS))
        })
    }

    pub(super) fn put(&self, dir: Ino, name: &[u8], ino: Ino) {
        if ino.0 < INO_END {
            let hash = hash(dir, name);
            self.put_hint(hash, ino.0 << TAG_BITS | tag(hash));
        }
    }

    fn put_hint(&self, hash: u64, hint: u64) {
        let mut newer = hint;
        for slot in self.group(hash) {
            newer = slot.swap(newer, Ordering::Relaxed);
            if newer == hint || newer == 0 {
                return;
            }
        }
    }

    /// The same hints in a table of another size. A smaller one loses some.
    pub(super) fn resized(&self, slots: usize) -> Self {
        let resized = Self::new(slots);
        for (place, group) in (0_u64..).zip(self.slots.chunks_exact(GROUP_LEN)) {
            for slot in group.iter().rev() {
                let hint = slot.load(Ordering::Relaxed);
                if hint != 0 {
                    let low = place & ((1 << PLACE_BITS_MIN) - 1);
                    resized.put_hint((hint & TAG_MASK) << PLACE_BITS_MIN | low, hint);
                }
            }
        }
        resized
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: Ino = Ino(3);

    fn found(hints: &Hints, names: std::ops::Range<u64>) -> usize {
        let is_found = |ino: &u64| {
            let hints = hints.get(DIR, &ino.to_le_bytes());
            hints.contains(&Some(Ino(*ino)))
        };
        names.filter(is_found).count()
    }

    #[test]
    fn hints_move_along_when_the_table_grows_and_shrinks() {
        let mut hints = Hints::new(HINTS_MIN);
        for ino in 1..200_u64 {
            hints.put(DIR, &ino.to_le_bytes(), Ino(ino));
        }
        let first = found(&hints, 1..200);
        assert!(first > 180, "{first}");
        while hints.len() < HINTS_MAX {
            hints = hints.resized(2 * hints.len());
            assert_eq!(found(&hints, 1..200), first, "of {} slots", hints.len());
        }
        let last = (1 << 53) - 1;
        hints.put(DIR, b"last", Ino(last));
        assert_eq!(hints.get(DIR, b"last")[0], Some(Ino(last)));
        while hints.len() > HINTS_MIN {
            hints = hints.resized((hints.len() / 4).max(HINTS_MIN));
            assert_eq!(found(&hints, 1..200), first, "of {} slots", hints.len());
        }
    }

    #[test]
    fn a_hint_of_another_name_in_the_same_place_is_none() {
        let hints = Hints::new(HINTS_MIN);
        hints.put(DIR, b"a", Ino(7));
        let names = (0..20_000_u64).map(u64::to_le_bytes);
        let wrong = names.filter(|name| hints.get(DIR, name) != [None; GROUP_LEN]);
        // One place in 256, and one tag in 2,048.
        assert!(wrong.count() <= 2);
    }
}
