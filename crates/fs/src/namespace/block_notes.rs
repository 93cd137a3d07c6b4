//! Notes about blocks of numbers that inodes leave for the tables (`number_marks.rs`).
//!
//! A directory that leaves the memory, or forgets a run, leaves the marks of the block. A name that
//! goes leaves its run, if no marked name is left there. The locks here are the innermost ones, and
//! held for a moment.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use foldhash::HashMap;
use parking_lot::Mutex;

use crate::format::ino::Identity;
use crate::format::slots::{Block, Run};

/// A run of a directory.
pub(super) type At = (Identity, Run);

/// Marks of a block that no directory in memory knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeftMarks {
    /// Generation of the block. The marks say nothing of another block of the same run.
    pub(super) generation: u64,
    pub(super) marks: u64,
}

/// A run that leaves the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub(super) run: Run,
    pub(super) marks: LeftMarks,
    /// No name holds the block.
    pub(super) is_vacant: bool,
}

#[derive(Default)]
pub(crate) struct BlockNotes {
    /// The volume is open for reading: no block is given back, and no mark is stored.
    is_off: AtomicBool,
    marks: Mutex<HashMap<At, LeftMarks>>,
    marks_len: AtomicUsize,
    vacant: Mutex<VecDeque<At>>,
    vacant_len: AtomicUsize,
    /// Of the runs that wait for inodes in memory, so many are looked at again.
    again: AtomicUsize,
}

impl BlockNotes {
    /// Takes no notes from now on.
    pub(super) fn turn_off(&self) {
        self.is_off.store(true, Ordering::Relaxed);
    }

    /// Leaves the marks of a run.
    fn leave(&self, at: At, left: LeftMarks) {
        if self.is_off.load(Ordering::Relaxed) {
            return;
        }
        let mut marks = self.marks.lock();
        marks.insert(at, left);
        self.marks_len.store(marks.len(), Ordering::SeqCst);
    }

    /// Leaves runs of a directory.
    pub(super) fn leave_all(&self, dir: Identity, left: impl IntoIterator<Item = Left>) {
        for one in left {
            self.leave((dir, one.run), one.marks);
            if one.is_vacant {
                self.note_vacant((dir, one.run));
            }
        }
    }

    /// Takes the marks that were left of this block, if `is_still` says so with the marks locked: a
    /// thread that stores marks makes that false before it reads these. `Err` if it is false.
    pub(super) fn take(
        &self,
        at: At,
        block: Block,
        is_still: impl FnOnce() -> bool,
    ) -> Result<Option<LeftMarks>, ()> {
        let mut marks = self.marks.lock();
        if !is_still() {
            return Err(());
        }
        let left = marks.remove(&at);
        self.marks_len.store(marks.len(), Ordering::SeqCst);
        Ok(left.filter(|left| left.generation == block.generation))
    }

    /// The marks that were left of this block.
    pub(super) fn get(&self, at: At, block: Block) -> Option<LeftMarks> {
        let left = self.marks.lock().get(&at).copied();
        left.filter(|left| left.generation == block.generation)
    }

    /// Forgets the marks of runs.
    pub(super) fn forget(&self, all: impl IntoIterator<Item = At>) {
        let mut marks = self.marks.lock();
        for at in all {
            marks.remove(&at);
        }
        self.marks_len.store(marks.len(), Ordering::SeqCst);
    }

    /// Up to `len` of the marks that were left.
    pub(super) fn some(&self, len: usize) -> Vec<(At, LeftMarks)> {
        let marks = self.marks.lock();
        marks
            .iter()
            .take(len)
            .map(|(at, left)| (*at, *left))
            .collect()
    }

    /// Number of the runs of which marks were left.
    pub(super) fn marks_len(&self) -> usize {
        self.marks_len.load(Ordering::SeqCst)
    }

    /// Notes a run whose block may be held by no name now.
    pub(super) fn note_vacant(&self, at: At) {
        if self.is_off.load(Ordering::Relaxed) {
            return;
        }
        let mut vacant = self.vacant.lock();
        if vacant.back() != Some(&at) {
            vacant.push_back(at);
            self.vacant_len.store(vacant.len(), Ordering::SeqCst);
        }
    }

    /// Takes the run that was noted first.
    pub(super) fn next_vacant(&self) -> Option<At> {
        if self.vacant_len() == 0 {
            return None;
        }
        let mut vacant = self.vacant.lock();
        let next = vacant.pop_front();
        self.vacant_len.store(vacant.len(), Ordering::SeqCst);
        next
    }

    /// Notes that all runs that wait are to be looked at again: an inode without a name left the
    /// memory.
    pub(super) fn look_again(&self) {
        self.again.store(usize::MAX, Ordering::SeqCst);
    }

    /// The number of waiting runs that are to be looked at again now: up to `looks` of `waiting`.
    pub(super) fn take_again(&self, waiting: usize, looks: usize) -> usize {
        let all = self.again.load(Ordering::SeqCst);
        let now = all.min(waiting).min(looks);
        // More of them may be due at once: then the next calls look at all.
        let rest = all.min(waiting) - now;
        let _ = self
            .again
            .compare_exchange(all, rest, Ordering::SeqCst, Ordering::SeqCst);
        now
    }

    /// Whether waiting runs are to be looked at again.
    pub(super) fn is_any_again(&self) -> bool {
        self.again.load(Ordering::Relaxed) > 0
    }

    /// Number of the runs that are noted.
    pub(super) fn vacant_len(&self) -> usize {
        self.vacant_len.load(Ordering::SeqCst)
    }
}
