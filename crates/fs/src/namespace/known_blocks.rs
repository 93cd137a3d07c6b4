//! Blocks of numbers that a directory in memory knows of its runs.

use crate::format::slots::{Block, Run, SLOTS_WITHOUT_INDEX};

/// Blocks that are remembered at most.
const BLOCKS_MAX: usize = 64;
/// Runs for which a directory owes looks at most.
const OWED_MAX: usize = 4;

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
    /// The run that was taken last of those for which looks are owed, and their count.
    owed: Option<(Run, usize)>,
}

/// Looks that a directory owes after it took a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owed {
    /// None: no look would find numbers.
    None,
    /// Those for this run alone.
    First,
    /// Those for more runs.
    More,
    /// As many as it may owe.
    Most,
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

    /// Notes that the directory took `run`, and owes a look. A look at all runs goes on until it is
    /// done. The next one begins when the directory may have lost a name since the last one began;
    /// `losses` counts them.
    pub(crate) fn owe(&mut self, run: Run, losses: u64) -> Owed {
        if !self.may_find(run, losses) {
            return Owed::None;
        }
        let runs = self.owed.map_or(0, |(_, runs)| runs) + 1;
        self.owed = Some((run, runs));
        match runs {
            1 => Owed::First,
            OWED_MAX.. => Owed::Most,
            _ => Owed::More,
        }
    }

    /// Takes the debt: the run that was taken last, and the count of runs. `losses` is taken before
    /// the snapshot in which the names are looked for.
    pub(crate) fn pay(&mut self, losses: u64) -> Option<(Run, usize)> {
        let (next, runs) = self.owed.take()?;
        if !self.may_find(next, losses) {
            return None;
        }
        if self.swept.is_none() {
            self.looked_at = Some(losses);
        }
        Some((next, runs))
    }

    /// Whether a look may find numbers that nobody has, when `next` is the run of the next slot.
    fn may_find(&self, next: Run, losses: u64) -> bool {
        let first = next.first().0;
        let is_too_soon = first <= SLOTS_WITHOUT_INDEX && first < self.swept_again_at;
        !is_too_soon && (self.swept.is_some() || self.looked_at != Some(losses))
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
        let looks = |known: &mut KnownBlocks, losses| {
            let owed = known.owe(next, losses);
            let paid = known.pay(losses);
            assert_eq!(paid.is_some(), owed != Owed::None);
            paid.is_some()
        };
        let mut new = KnownBlocks::of_new();
        assert!(!looks(&mut new, 0));
        for mut known in [new, KnownBlocks::default()] {
            assert!(looks(&mut known, 1));
            known.swept = Some(Run(2));
            assert!(looks(&mut known, 1), "the look is not done");
            assert!(looks(&mut known, 2), "the look is not done");
            known.swept = None;
            assert!(looks(&mut known, 2), "a name was lost meanwhile");
            assert!(!looks(&mut known, 2));
        }
    }

    #[test]
    fn a_directory_owes_looks_for_a_few_runs_and_pays_them_at_once() {
        let mut known = KnownBlocks::default();
        assert_eq!(known.pay(0), None);
        let owed: Vec<_> = (40..44).map(|run| known.owe(Run(run), 1)).collect();
        assert_eq!(owed, [Owed::First, Owed::More, Owed::More, Owed::Most]);
        assert_eq!(known.pay(1), Some((Run(43), 4)));
        assert_eq!((known.owe(Run(44), 1), known.pay(1)), (Owed::None, None));
        assert_eq!(known.owe(Run(45), 2), Owed::First);
    }

    #[test]
    fn entries_of_a_directory_without_an_index_are_not_read_too_often() {
        let mut known = KnownBlocks {
            swept_again_at: 184,
            ..KnownBlocks::default()
        };
        assert_eq!(known.owe(Run(4), 0), Owed::None);
        assert_eq!(known.owe(Run(5), 0), Owed::First);
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
