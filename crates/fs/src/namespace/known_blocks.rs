//! Blocks of numbers that a directory in memory knows of its runs.

use crate::format::slots::{Block, Run, SLOTS_WITHOUT_INDEX};

/// Blocks that are remembered at most.
const BLOCKS_MAX: usize = 64;

/// Some blocks of one directory.
#[derive(Default)]
pub(crate) struct KnownBlocks {
    blocks: Vec<(Run, Block)>,
    /// The directory is new, and all of its blocks are here.
    is_complete: bool,
    /// The run that was looked at last for numbers that nobody has.
    pub(crate) swept: Option<Run>,
    /// Before the directory takes this slot its entries are not read for numbers that nobody has.
    pub(crate) swept_again_at: u64,
    /// Losses of names when a look at all runs for such numbers last began. A new directory has
    /// had none.
    looked_at: Option<u64>,
}

impl KnownBlocks {
    /// The blocks of a new directory: none.
    pub(crate) fn of_new() -> Self {
        Self {
            is_complete: true,
            looked_at: Some(0),
            ..Self::default()
        }
    }

    /// Whether runs are to be looked at for numbers that nobody has, when `next` is the run of the
    /// next slot. A look at all runs goes on until it is done. The next one begins when the
    /// directory may have lost a name since the last one began; `losses` counts them, and is taken
    /// before the snapshot in which the names are looked for.
    pub(crate) fn goes_on_looking(&mut self, next: Run, losses: u64) -> bool {
        let first = next.first().0;
        if first <= SLOTS_WITHOUT_INDEX && first < self.swept_again_at {
            return false;
        }
        if self.swept.is_none() && self.looked_at == Some(losses) {
            return false;
        }
        if self.swept.is_none() {
            self.looked_at = Some(losses);
        }
        true
    }

    /// The block of a run, if it is known.
    pub(crate) fn get(&self, run: Run) -> Option<Block> {
        let mut newest = self.blocks.iter().rev();
        newest.find(|known| known.0 == run).map(|known| known.1)
    }

    /// Whether a run that is not known has no block.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Remembers the block of a run.
    pub(crate) fn insert(&mut self, run: Run, block: Block) {
        if self.get(run).is_some() {
            return;
        }
        if self.blocks.len() == BLOCKS_MAX {
            self.blocks.remove(0);
            self.is_complete = false;
        }
        self.blocks.push((run, block));
    }

    /// Forgets the block of a run, which has none from now on.
    pub(crate) fn remove(&mut self, run: Run) {
        self.blocks.retain(|known| known.0 != run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_looked_at_again_only_after_a_name_may_be_lost() {
        let next = Run(40);
        let mut new = KnownBlocks::of_new();
        assert!(!new.goes_on_looking(next, 0));
        for mut known in [new, KnownBlocks::default()] {
            assert!(known.goes_on_looking(next, 1));
            known.swept = Some(Run(2));
            assert!(known.goes_on_looking(next, 1), "the look is not done");
            assert!(known.goes_on_looking(next, 2), "the look is not done");
            known.swept = None;
            assert!(known.goes_on_looking(next, 2), "a name was lost meanwhile");
            assert!(!known.goes_on_looking(next, 2));
        }
    }

    #[test]
    fn entries_of_a_directory_without_an_index_are_not_read_too_often() {
        let mut known = KnownBlocks {
            swept_again_at: 184,
            ..KnownBlocks::default()
        };
        assert!(!known.goes_on_looking(Run(4), 0));
        assert!(known.goes_on_looking(Run(5), 0));
    }

    #[test]
    fn a_directory_with_many_blocks_asks_the_table_again() {
        let mut known = KnownBlocks::of_new();
        let block = |base| Block {
            base,
            generation: 1,
        };
        for run in 0..=BLOCKS_MAX as u64 {
            assert!(known.is_complete());
            known.insert(Run(run), block(64 * run));
            known.insert(Run(run), block(7));
        }
        assert!(!known.is_complete());
        assert_eq!(known.get(Run(0)), None);
        assert_eq!(known.get(Run(1)), Some(block(64)));
        known.remove(Run(1));
        assert_eq!(known.get(Run(1)), None);
    }
}
