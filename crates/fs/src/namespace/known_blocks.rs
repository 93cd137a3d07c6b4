//! Blocks of numbers that a directory in memory knows of its runs, and the slots that hold them.
//!
//! A run keeps its block as long as a number of it is that of an inode that was shown and has its
//! name in the run. Each block has *marks* for that, a bit for each slot:
//!
//! ```text
//! stored marks   slots that may have been shown, at any moment also after a crash
//! before         of these, the slots that were shown before the block came here, and may have names
//! shown          slots that were shown since, and have names
//! gone           slots whose names went since
//! ```
//!
//! Stored marks are all set as a rule, and then take no bytes. So a number is shown without a write,
//! and a crash leaves marks that hold too much and never too little. A directory that leaves the
//! memory leaves the marks behind that hold its blocks, if some names of the runs were not shown
//! (`number_marks.rs`). Until these are stored they are in memory (`block_notes.rs`).

use ramet_block::failpoints::{self, Fault};

use crate::format::slots::{Block, Run, SLOTS_MAX, SLOTS_WITHOUT_INDEX, Slot};
use crate::namespace::block_notes::{Left, LeftMarks};

/// Blocks that are remembered at most.
const BLOCKS_MAX: usize = 2048;
/// Runs for which a directory owes looks at most.
const OWED_MAX: usize = 4;

/// Some blocks of one directory.
#[derive(Default)]
pub(crate) struct KnownBlocks {
    /// In the order of the runs.
    blocks: Vec<KnownBlock>,
    /// The directory is new, and all of its blocks are here.
    is_complete: bool,
    /// Blocks that were forgotten for want of room.
    forgotten: u64,
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

/// A block with its marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KnownBlock {
    run: Run,
    block: Block,
    stored: u64,
    before: u64,
    shown: u64,
    gone: u64,
    /// `before` has no slot without a name.
    is_exact: bool,
    /// The run is among those that will be looked at.
    is_noted: bool,
}

/// Slots whose numbers are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Showing {
    pub(crate) run: Run,
    pub(crate) marks: u64,
    /// Each of them has a name, or is about to get one. Otherwise some may have none.
    pub(crate) are_named: bool,
}

impl Showing {
    pub(crate) fn one(slot: Slot) -> Self {
        Self {
            run: slot.run(),
            marks: slot.mark(),
            are_named: true,
        }
    }
}

/// Result of showing numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    /// The numbers are of this block, and hold it.
    By(Block),
    /// The stored marks of the run do not have the slots yet.
    Unmarked,
    /// The block of the run is not known.
    Unknown,
}

/// Whether names hold a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vacancy {
    /// No name does.
    Vacant,
    /// A name that was shown does.
    Held,
    /// A marked slot may have no name.
    Unclear,
    /// The block is not known here.
    Unknown,
}

impl KnownBlock {
    /// A block that was given to a run that had none.
    pub(crate) fn given(run: Run, block: Block) -> Self {
        Self {
            is_exact: true,
            ..Self::stored(run, block, (run.marks(), 0))
        }
    }

    /// The block of a run, with its stored marks and those that hold it.
    pub(crate) fn stored(run: Run, block: Block, (stored, held): (u64, u64)) -> Self {
        Self {
            run,
            block,
            stored,
            before: held,
            shown: 0,
            gone: 0,
            is_exact: false,
            is_noted: false,
        }
    }

    /// Slots that hold the block.
    fn held(&self) -> u64 {
        self.before | self.shown
    }

    /// The marks that hold the block when it is forgotten, unless the stored ones do as well: all
    /// names of the run were shown. No slot from `next` on was taken.
    fn left(&self, next: Slot) -> Option<Left> {
        let taken = self.run.marks_below(next);
        let held = self.held() & taken;
        let unshown = taken & !held & !self.gone;
        let are_all = unshown & self.stored == 0 && held & !self.stored == 0;
        (held == 0 || !are_all).then_some(Left {
            run: self.run,
            marks: LeftMarks {
                generation: self.block.generation,
                marks: held,
            },
            is_vacant: held == 0,
        })
    }
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

    /// Numbers are about to be shown. Their slots hold the block from now on, if the stored marks
    /// have them, or if `anyway`: they cannot be stored.
    pub(crate) fn show(&mut self, showing: Showing, anyway: bool) -> Shown {
        let Some(known) = self.find(showing.run) else {
            return Shown::Unknown;
        };
        let missing = showing.marks & !(known.stored | known.shown);
        if missing != 0 && !anyway {
            return Shown::Unmarked;
        }
        if !failpoints::is_on(Fault::NumberMarkLost) {
            match showing.are_named {
                true => known.shown |= showing.marks,
                false => {
                    known.before |= showing.marks;
                    known.is_exact = false;
                }
            }
        }
        known.gone &= !showing.marks;
        Shown::By(known.block)
    }

    /// The stored marks of a run have all slots now.
    pub(crate) fn stored_all(&mut self, run: Run) {
        if let Some(known) = self.find(run) {
            known.stored = run.marks();
        }
    }

    /// Remembers the block of a run. Gives the run that is forgotten for that.
    pub(crate) fn insert(&mut self, known: KnownBlock) -> Option<Left> {
        if self.at(known.run).is_ok() {
            return None;
        }
        let mut left = None;
        if self.blocks.len() == BLOCKS_MAX {
            left = self.blocks.remove(0).left(Slot(SLOTS_MAX));
            self.is_complete = false;
            self.forgotten += 1;
        }
        let at = self.at(known.run).unwrap_or_else(|at| at);
        self.blocks.insert(at, known);
        left
    }

    /// The inode in a slot has no name there any more. Tells whether its run is to be looked at.
    pub(crate) fn lose(&mut self, slot: Slot) -> bool {
        let is_complete = self.is_complete;
        let Some(known) = self.find(slot.run()) else {
            return !is_complete;
        };
        known.shown &= !slot.mark();
        known.before &= !slot.mark();
        known.gone |= slot.mark();
        let is_new = !known.is_noted && (known.held() == 0 || !known.is_exact);
        known.is_noted |= is_new;
        is_new
    }

    /// Whether no name holds the block of a run. The run is looked at then, or waits for that.
    pub(crate) fn note(&mut self, run: Run) -> bool {
        let Some(known) = self.find(run) else {
            return false;
        };
        let is_vacant = known.held() == 0;
        known.is_noted |= is_vacant;
        is_vacant
    }

    /// Tells whether names hold a block. The run is noted again when the next name goes. No slot
    /// from `next` on was taken.
    pub(crate) fn vacancy(&mut self, run: Run, next: Slot) -> Vacancy {
        let Some(known) = self.find(run) else {
            return Vacancy::Unknown;
        };
        known.is_noted = false;
        match (known.held() & run.marks_below(next), known.is_exact) {
            (0, _) => Vacancy::Vacant,
            (_, true) => Vacancy::Held,
            (_, false) => Vacancy::Unclear,
        }
    }

    /// Blocks that were forgotten, and the marks of `runs` that may have no names. To be asked for
    /// before the names are read.
    pub(crate) fn unclear(&self, runs: impl Fn(Run) -> bool) -> (u64, Vec<(Run, u64)>) {
        let all = self.blocks.iter();
        let all = all.filter(|known| !known.is_exact && runs(known.run));
        let unclear = all.map(|known| (known.run, known.before)).collect();
        (self.forgotten, unclear)
    }

    /// Whether marked slots of a run may have no names, and hold its block.
    pub(crate) fn is_unclear(&self, run: Run) -> bool {
        let known = self.at(run).map(|at| self.blocks[at]);
        known.is_ok_and(|known| !known.is_exact && known.held() != 0)
    }

    /// Takes note of the slots of a run that had names, of those in `asked`. Blocks that were
    /// forgotten since that moment may have come back with marks of slots that were taken since.
    pub(crate) fn learn(&mut self, forgotten: u64, (run, asked): (Run, u64), names: u64) {
        if self.forgotten != forgotten {
            return;
        }
        if let Some(known) = self.find(run) {
            let dead = known.before & asked & !names;
            known.before &= !dead;
            known.gone |= dead & !known.shown;
            known.is_exact = known.before & !asked == 0;
        }
    }

    /// Forgets the block of a run, which is about to be freed.
    pub(crate) fn remove(&mut self, run: Run) -> Option<KnownBlock> {
        let at = self.at(run).ok()?;
        Some(self.blocks.remove(at))
    }

    /// Forgets all blocks of a directory that leaves the memory. Its next name would get the slot
    /// `next`.
    pub(crate) fn leave(&mut self, next: Slot) -> Vec<Left> {
        self.is_complete = false;
        self.forgotten += 1;
        let all = std::mem::take(&mut self.blocks).into_iter();
        all.filter_map(|known| known.left(next)).collect()
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

    fn block(base: u64) -> Block {
        Block {
            base,
            generation: base,
        }
    }

    /// A block that was given to a run that had none.
    fn given(run: u64, base: u64) -> KnownBlock {
        KnownBlock::given(Run(run), block(base))
    }

    fn show(known: &mut KnownBlocks, slot: u64) -> Shown {
        known.show(Showing::one(Slot(slot)), false)
    }

    const NEXT: Slot = Slot(SLOTS_MAX);

    #[test]
    fn a_directory_with_many_blocks_asks_the_table_again() {
        let mut known = KnownBlocks::of_new();
        let behind = BLOCKS_MAX as u64;
        for run in 0..=behind {
            assert!(known.is_complete());
            let left = known.insert(given(run, 64 * run + 64));
            assert_eq!(left.is_some(), run == behind, "no name of run 0 was shown");
            assert_eq!(known.insert(given(run, 7)), None);
        }
        assert!(!known.is_complete());
        assert_eq!(known.get(Run(0)), None);
        assert_eq!(known.get(Run(1)), Some(block(128)));
        known.remove(Run(1));
        assert_eq!(known.get(Run(1)), None);
    }

    #[test]
    fn block_is_vacant_when_its_last_shown_name_goes() {
        let mut known = KnownBlocks::of_new();
        known.insert(given(1, 16));
        for slot in [9, 11] {
            assert_eq!(show(&mut known, slot), Shown::By(block(16)));
        }
        assert!(!known.lose(Slot(9)));
        assert_eq!(known.vacancy(Run(1), NEXT), Vacancy::Held);
        assert!(known.lose(Slot(11)));
        assert!(!known.lose(Slot(12)), "the run is noted already");
        assert_eq!(known.vacancy(Run(1), NEXT), Vacancy::Vacant);
        assert!(known.remove(Run(1)).is_some());
        assert_eq!(show(&mut known, 11), Shown::Unknown);
        assert_eq!(known.vacancy(Run(1), NEXT), Vacancy::Unknown);
    }

    #[test]
    fn mark_of_a_creation_that_failed_holds_nothing() {
        let mut known = KnownBlocks::of_new();
        known.insert(given(0, 8));
        show(&mut known, 3);
        assert_eq!(known.vacancy(Run(0), Slot(4)), Vacancy::Held);
        assert_eq!(known.vacancy(Run(0), Slot(3)), Vacancy::Vacant);
        let left = known.leave(Slot(3));
        assert_eq!(left.len(), 1);
        assert!(left[0].is_vacant);
    }

    #[test]
    fn stored_block_is_held_by_its_marks_that_have_names() {
        let mut known = KnownBlocks::default();
        let stored = KnownBlock::stored(Run(0), block(8), (0b1011, 0b1011));
        known.insert(stored);
        assert!(known.lose(Slot(0)), "the names are not known");
        assert_eq!(known.vacancy(Run(0), NEXT), Vacancy::Unclear);
        assert!(known.is_unclear(Run(0)));
        let (forgotten, asked) = known.unclear(|_| true);
        assert_eq!(asked, [(Run(0), 0b1010)]);
        // Slot 5 gets its name after the names were read.
        assert_eq!(show(&mut known, 5), Shown::Unmarked);
        known.stored_all(Run(0));
        assert_eq!(show(&mut known, 5), Shown::By(block(8)));
        known.learn(forgotten, asked[0], 0b1000);
        assert_eq!(known.vacancy(Run(0), NEXT), Vacancy::Held);
        assert!(!known.lose(Slot(3)));
        assert!(known.lose(Slot(5)));
        assert_eq!(known.vacancy(Run(0), NEXT), Vacancy::Vacant);
    }

    #[test]
    fn names_that_were_read_before_a_block_was_forgotten_tell_nothing_of_it() {
        let mut known = KnownBlocks::default();
        let stored = |run| KnownBlock::stored(Run(run), block(64 * run), (u64::MAX, 1));
        known.insert(stored(5));
        let (forgotten, asked) = known.unclear(|_| true);
        known.leave(NEXT);
        known.insert(stored(5));
        known.learn(forgotten, asked[0], 0);
        assert_eq!(known.vacancy(Run(5), NEXT), Vacancy::Unclear);
    }

    #[test]
    fn numbers_that_are_told_of_slots_without_names_are_looked_at() {
        let mut known = KnownBlocks::of_new();
        known.insert(given(0, 8));
        show(&mut known, 1);
        let showing = Showing {
            run: Run(0),
            marks: 0b111,
            are_named: false,
        };
        assert_eq!(known.show(showing, false), Shown::By(block(8)));
        assert!(known.lose(Slot(1)), "slots 0 and 2 may have names");
        let (forgotten, asked) = known.unclear(|_| true);
        known.learn(forgotten, asked[0], 0b100);
        assert_eq!(known.vacancy(Run(0), NEXT), Vacancy::Held);
        assert!(known.lose(Slot(2)));
        assert_eq!(known.vacancy(Run(0), NEXT), Vacancy::Vacant);
    }

    #[test]
    fn marks_that_cannot_be_stored_are_left() {
        let mut known = KnownBlocks::default();
        known.insert(KnownBlock::stored(Run(0), block(8), (0b1, 0b1)));
        assert_eq!(show(&mut known, 1), Shown::Unmarked);
        let one = Showing::one(Slot(1));
        assert_eq!(known.show(one, true), Shown::By(block(8)));
        assert_eq!(known.show(one, false), Shown::By(block(8)));
        let left = known.leave(Slot(2));
        assert_eq!(left[0].marks.marks, 0b11);
    }

    #[test]
    fn directory_leaves_marks_if_some_slots_were_not_shown() {
        let leaves = |shown: &[u64], lost: &[u64], next| {
            let mut known = KnownBlocks::of_new();
            known.insert(given(0, 8));
            for slot in shown {
                show(&mut known, *slot);
            }
            for slot in lost {
                known.lose(Slot(*slot));
            }
            let left = known.leave(Slot(next)).into_iter();
            left.map(|left| (left.marks.marks, left.is_vacant))
                .collect::<Vec<_>>()
        };
        assert_eq!(leaves(&[0, 1, 2], &[], 3), []);
        assert_eq!(leaves(&[0, 1, 2], &[1], 3), []);
        assert_eq!(leaves(&[0, 2], &[], 3), [(0b101, false)]);
        assert_eq!(leaves(&[0, 2], &[2], 9), [(0b1, false)]);
        assert_eq!(leaves(&[0], &[0], 9), [(0, true)]);
    }
}
