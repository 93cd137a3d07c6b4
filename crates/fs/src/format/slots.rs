//! Slots of directories, and the runs and blocks in which their numbers are given.
//!
//! A name takes the next *slot* of its directory and keeps it until it goes or moves to another
//! directory; no slot is taken twice. Slots lie in *runs*, which are short at first:
//!
//! ```text
//! run      0       1        2        3         4
//! slots    0..8    8..24    24..56   56..120   120..184   ... 64 each
//! ```
//!
//! The numbers of a run are a *block*: as many consecutive inode numbers, aligned to their count.
//! The number of a slot is the first number of the block and the place of the slot in its run. A
//! block is given when a number of its run is first shown, so names that nobody looks at cost no
//! numbers.
//!
//! The shared inodes of a clone root have slots of their own, above those of names: the link number
//! with the highest bit set. Their runs are 64 long.

use crate::format::ino::{Identity, Ino};

/// Lengths of the runs of a directory; the last one is that of all further runs.
pub(crate) const RUN_LENS: [u64; 4] = [8, 16, 32, 64];
/// Length of the longest runs.
pub(crate) const RUN_LEN_MAX: u64 = 64;
/// First slots of those runs.
const RUN_STARTS: [u64; 4] = [0, 8, 24, 56];
/// Slots of names are below.
pub(crate) const SLOTS_MAX: u64 = 1 << 44;
/// A directory whose next slot is not above this one has no slot index: its entries are read
/// whole. The next slot is this one only while an index is made.
pub(crate) const SLOTS_WITHOUT_INDEX: u64 = 1024;
/// Marks slots and runs of shared inodes.
const SHARED: u64 = 1 << 63;

/// A slot of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot(pub(crate) u64);

/// A run of slots of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Run(pub(crate) u64);

/// The numbers of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// The first number.
    pub(crate) base: u64,
    /// Generation of the numbers: no block that had one of them before has it.
    pub(crate) generation: u64,
}

impl Slot {
    /// The slot of shared inode `link` in its clone root.
    pub(crate) fn shared(link: u64) -> Self {
        Self(link | SHARED)
    }

    /// The link number of a slot of a shared inode.
    pub(crate) fn link(self) -> Option<u64> {
        (self.0 & SHARED != 0).then_some(self.0 & !SHARED)
    }

    /// The bit of the slot among the marks of its run.
    pub(crate) fn mark(self) -> u64 {
        1 << (self.0 - self.run().first().0)
    }

    /// The run that the slot lies in.
    pub(crate) fn run(self) -> Run {
        if let Some(link) = self.link() {
            return Run((link / RUN_LEN_MAX) | SHARED);
        }
        let last = RUN_STARTS.len() - 1;
        let at = RUN_STARTS[1..].iter().filter(|start| self.0 >= **start);
        match at.count() {
            at if at < last => Run(at as u64),
            _ => Run((self.0 - RUN_STARTS[last]) / RUN_LEN_MAX + last as u64),
        }
    }
}

impl Run {
    /// The first slot.
    pub(crate) fn first(self) -> Slot {
        if self.0 & SHARED != 0 {
            return Slot(((self.0 & !SHARED) * RUN_LEN_MAX) | SHARED);
        }
        let last = RUN_STARTS.len() as u64 - 1;
        match RUN_STARTS.get(usize::try_from(self.0).unwrap_or(usize::MAX)) {
            Some(start) => Slot(*start),
            None => Slot(RUN_STARTS[RUN_STARTS.len() - 1] + (self.0 - last) * RUN_LEN_MAX),
        }
    }

    /// Number of its slots.
    pub(crate) fn len(self) -> u64 {
        RUN_LENS[self.class()]
    }

    /// The marks of all its slots.
    pub(crate) fn marks(self) -> u64 {
        u64::MAX >> (RUN_LEN_MAX - self.len())
    }

    /// The marks of its slots below `next`. A run of shared inodes has all marks: no slot is the
    /// next one there.
    pub(crate) fn marks_below(self, next: Slot) -> u64 {
        match next.0.saturating_sub(self.first().0) {
            _ if self.first().link().is_some() => self.marks(),
            0 => 0,
            len if len >= self.len() => self.marks(),
            len => self.marks() >> (self.len() - len),
        }
    }

    /// The place of its length in [`RUN_LENS`].
    pub(crate) fn class(self) -> usize {
        usize::try_from(self.0)
            .map_or(RUN_LENS.len(), |at| at)
            .min(RUN_LENS.len() - 1)
    }

    /// The slot with this number of the block at `base`.
    pub(crate) fn slot_of(self, base: u64, ino: Ino) -> Slot {
        Slot(self.first().0 + (ino.0 - base))
    }
}

impl Block {
    /// The identity of the inode in a slot of its run, which was born with the generation `birth`.
    pub(crate) fn identity(self, slot: Slot, birth: u64) -> Identity {
        Identity {
            ino: Ino(self.base + (slot.0 - slot.run().first().0)),
            generation: self.generation.max(birth),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slot_lies_in_one_run_and_runs_have_no_gaps() {
        let (mut run, mut slot) = (0, 0);
        while slot < 10_000 {
            let first = Run(run).first();
            assert_eq!(first.0, slot);
            assert_eq!(Run(run).len(), [8, 16, 32, 64][usize::min(run as usize, 3)]);
            for at in slot..slot + Run(run).len() {
                assert_eq!(Slot(at).run(), Run(run));
                assert_eq!(Run(run).slot_of(640, Ino(640 + at - slot)), Slot(at));
            }
            slot += Run(run).len();
            run += 1;
        }
        for slot in [SLOTS_MAX - 1, Slot::shared(0).0, Slot::shared(1 << 40).0] {
            let run = Slot(slot).run();
            let at = slot - run.first().0;
            assert!(at < run.len() && run.len() == 64, "{slot}");
            assert_eq!(Slot(slot).link().is_some(), run.first().link().is_some());
        }
    }

    #[test]
    fn marks_have_a_bit_for_each_slot_of_a_run() {
        assert_eq!(Run(0).marks(), 0xff);
        assert_eq!(Run(7).marks(), u64::MAX);
        for run in [Run(0), Run(1), Run(2), Run(3), Run(9)] {
            let (first, mut all) = (run.first().0, 0);
            for slot in first..first + run.len() {
                assert_eq!(run.marks_below(Slot(slot)), all);
                all |= Slot(slot).mark();
            }
            assert_eq!(all, run.marks());
            assert_eq!(run.marks_below(Slot(first + 1000)), all);
        }
        let shared = Slot::shared(65);
        assert_eq!(shared.mark(), 2);
        assert_eq!(shared.run().marks_below(Slot(1000)), u64::MAX);
    }

    #[test]
    fn number_is_place_in_the_block_and_generation_the_later_one() {
        let block = Block {
            base: 128,
            generation: 9,
        };
        let told = |slot, birth| {
            let identity = block.identity(Slot(slot), birth);
            (identity.ino.0, identity.generation)
        };
        assert_eq!(told(24, 3), (128, 9));
        assert_eq!(told(55, 12), (159, 12));
    }
}
