//! Notes about blocks of numbers that inodes leave for the tables (`number_marks.rs`).
//!
//! A directory that leaves the memory leaves the marks of its blocks, and a name that goes leaves
//! its run, if its block may be held by nothing now. The locks here are taken for a moment.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::format::ino::Identity;
use crate::format::slots::Run;

/// Runs that are noted at most. More wait for the next name that goes.
const VACANT_MAX: usize = 8192;

/// Noted runs of which requests look at some.
pub(crate) const VACANT_MANY: usize = 1024;

/// Marks of a run of a directory.
pub(crate) type Marks = ((Identity, Run), u64);

#[derive(Default)]
pub(crate) struct BlockNotes {
    marks: Mutex<Vec<Marks>>,
    /// There are marks that are not stored: here, or with the tables.
    has_marks: AtomicBool,
    vacant: Mutex<VecDeque<(Identity, Run)>>,
    vacant_len: AtomicUsize,
}

impl BlockNotes {
    /// Leaves marks of a directory.
    pub(crate) fn leave(&self, dir: Identity, left: impl IntoIterator<Item = (Run, u64)>) {
        let mut left = left.into_iter().peekable();
        if left.peek().is_some() {
            let mut marks = self.marks.lock();
            marks.extend(left.map(|(run, marks)| ((dir, run), marks)));
            self.has_marks.store(true, Ordering::SeqCst);
        }
    }

    /// Whether there are marks that are not stored.
    pub(crate) fn has_marks(&self) -> bool {
        self.has_marks.load(Ordering::SeqCst)
    }

    /// Whether requests should see to the notes.
    pub(crate) fn are_many(&self) -> bool {
        self.vacant_len() >= VACANT_MANY || self.has_marks()
    }

    /// Takes the marks that were left.
    pub(crate) fn take_marks(&self) -> Vec<Marks> {
        std::mem::take(&mut *self.marks.lock())
    }

    /// All marks that were taken are stored.
    pub(crate) fn stored_all(&self) {
        let marks = self.marks.lock();
        if marks.is_empty() {
            self.has_marks.store(false, Ordering::SeqCst);
        }
    }

    /// Notes a run of which the block may be held by nothing now.
    pub(crate) fn note_vacant(&self, dir: Identity, run: Run) {
        let mut vacant = self.vacant.lock();
        if vacant.len() < VACANT_MAX && vacant.back() != Some(&(dir, run)) {
            vacant.push_back((dir, run));
            self.vacant_len.store(vacant.len(), Ordering::Relaxed);
        }
    }

    /// Takes the run that was noted first.
    pub(crate) fn next_vacant(&self) -> Option<(Identity, Run)> {
        if self.vacant_len() == 0 {
            return None;
        }
        let mut vacant = self.vacant.lock();
        let next = vacant.pop_front();
        self.vacant_len.store(vacant.len(), Ordering::Relaxed);
        next
    }

    /// Number of the runs that are noted.
    pub(crate) fn vacant_len(&self) -> usize {
        self.vacant_len.load(Ordering::Relaxed)
    }
}
