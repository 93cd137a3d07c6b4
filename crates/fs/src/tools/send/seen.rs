//! Relatives: trees and large files that were sent and of which another one is a clone, as a rule
//! with changes.
//!
//! A clone of a directory copies its entries, so a name in the clone has the slot and the birth that
//! it has in the source, and no other name of the volume has them. A few names of each directory
//! that was sent are remembered. A directory in which one of them turns up again is its relative. A
//! clone of a file keeps the time of its creation, and one of size and time of change unless it was
//! edited much.
//!
//! A relative that is none costs a comparison; no wrong tree is sent for it.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::successor_of_prefix;
use ramet_block::{Budget, Held, Use};

use crate::error::Result;
use crate::format::keys;
use crate::format::record::{Entry, Kind, Record, Time};
use crate::format::stream::CopyFrom;
use crate::tools::diff::Side;

/// Names of a directory that are looked at.
const SAMPLE: usize = 8;
/// Smaller files are sent whole: a copy would cost the receiver about as much.
pub(super) const SHARED_BYTES_MIN: u64 = 64 << 10;
/// Part of the budget that remembered objects take at most.
const BUDGET_PART: u64 = 8;
/// Memory of a remembered object beside its path.
const SEEN_BYTES: u64 = 256;

/// A name of a directory, by which its clones are found.
type Mark = (u64, u64);
/// The time of creation of a file, and its size or the time of its last change.
type FileMark = (Time, Option<u64>, Option<Time>);

/// An object that was sent.
#[derive(Clone)]
pub(super) struct Relative {
    pub(super) from: CopyFrom,
    pub(super) side: Arc<Side>,
    pub(super) object: Bytes,
}

/// See the module.
pub(super) struct Seen {
    directories: HashMap<Mark, Relative>,
    files: HashMap<FileMark, Relative>,
    held: Held,
    bytes_max: u64,
    is_full: bool,
}

/// Slots and births of the first names of a directory.
pub(super) fn sample(side: &Side, object: &Bytes) -> Result<Vec<Mark>> {
    let entries = keys::entries(&side.at(object));
    let end = successor_of_prefix(&entries);
    let mut marks = Vec::with_capacity(SAMPLE);
    for item in side
        .snapshot
        .scan(&entries, end.as_deref())
        .take(2 * SAMPLE)
    {
        if let Entry::Inode(record) = Entry::decode(&item?.1)?
            && marks.len() < SAMPLE
        {
            marks.push((record.birth, record.slot.0));
        }
    }
    Ok(marks)
}

fn file_marks(record: &Record) -> [FileMark; 2] {
    [
        (record.btime, Some(record.size_bytes), None),
        (record.btime, None, Some(record.mtime)),
    ]
}

/// Whether relatives of a file are looked for.
pub(super) fn is_large(record: &Record) -> bool {
    record.kind() == Kind::Regular && record.size_bytes >= SHARED_BYTES_MIN
}

impl Seen {
    pub(super) fn new(budget: &Arc<Budget>) -> Self {
        Self {
            directories: HashMap::new(),
            files: HashMap::new(),
            held: Held::new(budget, Use::Requests),
            bytes_max: budget.part(BUDGET_PART),
            is_full: false,
        }
    }

    /// Whether there is room to remember an object.
    fn admits(&mut self, object: &Bytes, marks: usize) -> bool {
        let bytes = object.len() as u64 + marks as u64 * SEEN_BYTES;
        self.is_full = self.is_full || !self.held.add_within(bytes, self.bytes_max);
        !self.is_full
    }

    /// Remembers a directory of which everything was sent.
    pub(super) fn add_directory(&mut self, sample: &[Mark], relative: &Relative) {
        if !sample.is_empty() && self.admits(&relative.object, sample.len()) {
            for mark in sample {
                let known = self.directories.entry(*mark);
                known.or_insert_with(|| relative.clone());
            }
        }
    }

    /// Remembers a large file.
    pub(super) fn add_file(&mut self, record: &Record, relative: &Relative) {
        if is_large(record) && self.admits(&relative.object, 2) {
            for mark in file_marks(record) {
                let known = self.files.entry(mark);
                known.or_insert_with(|| relative.clone());
            }
        }
    }

    /// The directory that has most of these names.
    pub(super) fn relative_of(&self, sample: &[Mark]) -> Option<Relative> {
        let known = sample.iter().flat_map(|mark| self.directories.get(mark));
        let known: Vec<_> = known.collect();
        let count = |one: &&Relative| {
            let same = |other: &&&Relative| {
                other.object == one.object && Arc::ptr_eq(&other.side, &one.side)
            };
            known.iter().filter(same).count()
        };
        known.iter().copied().max_by_key(count).cloned()
    }

    /// The file of which this one may be a clone.
    pub(super) fn relative_of_file(&self, record: &Record) -> Option<Relative> {
        let mut marks = file_marks(record).into_iter();
        marks.find_map(|mark| self.files.get(&mark)).cloned()
    }

    /// Drops the objects of the base of a root.
    pub(super) fn forget_base(&mut self) {
        let stays = |relative: &Relative| relative.from != CopyFrom::Base;
        self.directories.retain(|_, relative| stays(relative));
        self.files.retain(|_, relative| stays(relative));
    }
}
