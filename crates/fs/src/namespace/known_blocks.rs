//! Blocks of numbers that a directory in memory knows of its runs.

use crate::format::slots::{Block, Run};

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
}

impl KnownBlocks {
    /// The blocks of a new directory: none.
    pub(crate) fn of_new() -> Self {
        Self {
            is_complete: true,
            ..Self::default()
        }
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
