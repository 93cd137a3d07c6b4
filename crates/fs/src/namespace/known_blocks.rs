//! Blocks of numbers that a directory in memory knows of its runs, and the slots that hold them.
//!
//! A run keeps its block as long as a number of it is that of an inode that was shown and has its
//! name. Each block has *marks* for that, a bit for each slot:
//!
//! ```text
//! stored marks   slots that may be shown; at least those that were, the dead among them
//! before         of these, the slots that were shown before the block came here and may live
//! shown          slots that were shown since, and live
//! gone           slots whose names went since
//! ```
//!
//! Stored marks are all set as a rule, and then take no bytes. So a number is shown without a write,
//! and a crash leaves marks that hold too much and never too little. A directory that leaves the
//! memory leaves the exact marks behind, if some of its slots were not shown (`number_marks.rs`).

use crate::format::slots::{Block, Run, SLOTS_MAX, Slot};

/// Blocks that are remembered at most.
const BLOCKS_MAX: usize = 512;

/// Some blocks of one directory.
#[derive(Default)]
pub(crate) struct KnownBlocks {
    /// In the order of the runs.
    blocks: Vec<KnownBlock>,
    /// The directory is new, and all of its blocks are here.
    is_complete: bool,
    /// The run that was looked at last for numbers that nobody has.
    pub(crate) swept: Option<Run>,
    /// Before the directory takes this slot its entries are not read for numbers that nobody has.
    pub(crate) swept_again_at: u64,
}

#[derive(Clone, Copy)]
struct KnownBlock {
    run: Run,
    block: Block,
    stored: u64,
    before: u64,
    shown: u64,
    gone: u64,
    /// `before` has no slot without a name.
    is_exact: bool,
}

/// Result of showing a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    /// The number is one of this block.
    By(Block),
    /// The stored marks of this block do not have the slot yet.
    Unmarked(Block),
    /// The block of the run is not known.
    Unknown,
}

/// Result of asking for a block that no shown inode holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vacant {
    /// The block is not known any more: it is to be freed.
    Taken,
    /// A shown inode holds the block.
    Held,
    /// The names of the run have to be read first.
    Unknown,
}

impl KnownBlock {
    fn alive(&self) -> u64 {
        self.before | self.shown
    }

    /// Marks that are to be stored in place of those that are, if some of the slots in `there` were
    /// not shown.
    fn marks(&self, there: u64) -> Option<u64> {
        let unshown = there & !self.alive() & !self.gone;
        (unshown & self.stored != 0).then(|| self.alive())
    }
}

impl KnownBlocks {
    /// The blocks of a new directory: none.
    pub(crate) fn of_new() -> Self {
        Self {
            is_complete: true,
            ..Self::default()
        }
    }

    fn at(&self, run: Run) -> Result<usize, usize> {
        // A name that comes takes a slot of the last run.
        match self.blocks.last() {
            Some(last) if last.run == run => Ok(self.blocks.len() - 1),
            Some(last) if last.run < run => Err(self.blocks.len()),
            _ => self.blocks.binary_search_by_key(&run, |known| known.run),
        }
    }

    fn find(&mut self, run: Run) -> Option<&mut KnownBlock> {
        let at = self.at(run).ok()?;
        Some(&mut self.blocks[at])
    }

    /// The block of a run, if it is known.
    pub(crate) fn get(&self, run: Run) -> Option<Block> {
        let at = self.at(run).ok()?;
        Some(self.blocks[at].block)
    }

    /// Whether a run that is not known has no block.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// The number of a slot is about to be shown: the slot holds its block from now on, if the
    /// stored marks have it.
    pub(crate) fn show(&mut self, slot: Slot) -> Shown {
        let Some(known) = self.find(slot.run()) else {
            return Shown::Unknown;
        };
        if known.stored & slot.mark() == 0 {
            return Shown::Unmarked(known.block);
        }
        known.shown |= slot.mark();
        known.gone &= !slot.mark();
        Shown::By(known.block)
    }

    /// The stored marks of a run have all slots now, or cannot be stored.
    pub(crate) fn mark_all(&mut self, run: Run) {
        if let Some(known) = self.find(run) {
            known.stored = run.marks();
        }
    }

    /// Remembers a block that was given to a run that had none.
    pub(crate) fn insert_given(&mut self, run: Run, block: Block) -> Option<(Run, u64)> {
        self.insert((run, block), (run.marks(), 0), true)
    }

    /// Remembers the stored block of a run, with its stored marks and those that hold it. Gives the
    /// marks of a run that is forgotten for that, if they are to be stored.
    pub(crate) fn insert_stored(
        &mut self,
        run: Run,
        block: Block,
        (stored, marks): (u64, u64),
    ) -> Option<(Run, u64)> {
        self.insert((run, block), (stored, marks), false)
    }

    fn insert(
        &mut self,
        (run, block): (Run, Block),
        (stored, before): (u64, u64),
        is_exact: bool,
    ) -> Option<(Run, u64)> {
        if self.at(run).is_ok() {
            return None;
        }
        let mut left = None;
        if self.blocks.len() == BLOCKS_MAX {
            let first = self.blocks.remove(0);
            self.is_complete = false;
            let marks = first.marks(first.run.marks_below(Slot(SLOTS_MAX)));
            left = marks.map(|marks| (first.run, marks));
        }
        let known = KnownBlock {
            run,
            block,
            stored,
            before,
            shown: 0,
            gone: 0,
            is_exact,
        };
        let at = self.at(run).unwrap_or_else(|at| at);
        self.blocks.insert(at, known);
        left
    }

    /// A slot has no name any more. Tells whether its block may be held by nothing now.
    pub(crate) fn lose(&mut self, slot: Slot) -> bool {
        let is_complete = self.is_complete;
        let Some(known) = self.find(slot.run()) else {
            return !is_complete;
        };
        known.shown &= !slot.mark();
        known.before &= !slot.mark();
        known.gone |= slot.mark();
        !known.is_exact || known.alive() == 0
    }

    /// Takes note of the slots of a run that had names after the block came here.
    pub(crate) fn learn(&mut self, run: Run, names: u64) {
        if let Some(known) = self.find(run) {
            known.before &= names;
            known.gone |= !names & !known.shown;
            known.is_exact = true;
        }
    }

    /// Forgets the block of a run if no shown inode holds it.
    pub(crate) fn take_vacant(&mut self, run: Run) -> Vacant {
        let Some(known) = self.find(run) else {
            return Vacant::Unknown;
        };
        match (known.alive(), known.is_exact) {
            (0, _) => {
                self.remove(run);
                Vacant::Taken
            }
            (_, true) => Vacant::Held,
            (_, false) => Vacant::Unknown,
        }
    }

    /// Forgets the block of a run, which is about to be freed.
    pub(crate) fn remove(&mut self, run: Run) {
        if let Ok(at) = self.at(run) {
            self.is_complete = false;
            self.blocks.remove(at);
        }
    }

    /// Forgets all blocks of a directory that leaves the memory, and gives the marks that are to be
    /// stored. The next name would get the slot `next`.
    pub(crate) fn leave(&mut self, next: Slot) -> Vec<(Run, u64)> {
        self.is_complete = false;
        let all = std::mem::take(&mut self.blocks).into_iter();
        let left = all.filter_map(|known| {
            let there = known.run.marks_below(next);
            Some((known.run, known.marks(there)?))
        });
        left.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(base: u64) -> Block {
        Block {
            base,
            generation: 1,
        }
    }

    #[test]
    fn a_directory_with_many_blocks_asks_the_table_again() {
        let mut known = KnownBlocks::of_new();
        for run in 0..=BLOCKS_MAX as u64 {
            assert!(known.is_complete());
            known.insert_given(Run(run), block(64 * run));
            known.insert_given(Run(run), block(7));
        }
        assert!(!known.is_complete());
        assert_eq!(known.get(Run(0)), None);
        assert_eq!(known.get(Run(1)), Some(block(64)));
        known.remove(Run(1));
        assert_eq!(known.get(Run(1)), None);
    }

    #[test]
    fn block_is_vacant_when_its_last_shown_name_goes() {
        let mut known = KnownBlocks::of_new();
        known.insert_given(Run(1), block(16));
        for slot in [9, 11] {
            assert_eq!(known.show(Slot(slot)), Shown::By(block(16)));
        }
        assert!(!known.lose(Slot(9)));
        assert_eq!(known.take_vacant(Run(1)), Vacant::Held);
        assert!(known.lose(Slot(11)));
        assert_eq!(known.take_vacant(Run(1)), Vacant::Taken);
        assert_eq!(known.show(Slot(11)), Shown::Unknown);
    }

    #[test]
    fn stored_block_is_held_by_its_marks_that_have_names() {
        let mut known = KnownBlocks::default();
        known.insert_stored(Run(0), block(8), (0b1011, 0b1011));
        assert!(known.lose(Slot(0)), "the names are not known");
        assert_eq!(known.take_vacant(Run(0)), Vacant::Unknown);
        // Slot 5 gets its name after slots 0, 3 and 4 were read.
        assert_eq!(known.show(Slot(5)), Shown::Unmarked(block(8)));
        known.mark_all(Run(0));
        assert_eq!(known.show(Slot(5)), Shown::By(block(8)));
        known.learn(Run(0), 0b11001);
        assert!(!known.lose(Slot(3)));
        assert!(known.lose(Slot(5)));
        assert_eq!(known.take_vacant(Run(0)), Vacant::Taken);
    }

    #[test]
    fn directory_leaves_marks_if_some_slots_were_not_shown() {
        let leaves = |shown: &[u64], lost: &[u64], next| {
            let mut known = KnownBlocks::of_new();
            known.insert_given(Run(0), block(8));
            for slot in shown {
                known.show(Slot(*slot));
            }
            for slot in lost {
                known.lose(Slot(*slot));
            }
            known.leave(Slot(next))
        };
        assert_eq!(leaves(&[0, 1, 2], &[], 3), []);
        assert_eq!(leaves(&[0, 1, 2], &[1], 3), []);
        assert_eq!(leaves(&[0, 2], &[], 3), [(Run(0), 0b101)]);
        assert_eq!(leaves(&[0, 2], &[2], 9), [(Run(0), 0b1)]);
    }
}
