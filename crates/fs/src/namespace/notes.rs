//! Notes of clone roots in memory, and the counts of links that follow from them.
//!
//! The purpose of notes is told in `link_counts.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::{Snapshot, successor_of_prefix};

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::keys::{self, NoteKey};
use crate::format::note::Note;
use crate::format::record::{Record, Time};
use crate::namespace::wake::Wake;

/// Shared inodes that one [`Counts`] tells of, at most. A clone root with more is counted by
/// windows, each of which reads the link index once.
const WINDOW_LEN: usize = 1 << 18;

/// The notes of a clone root.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Notes {
    /// Number of the last one; 0 for none.
    pub(crate) last: u64,
    /// Number of the last note "uncounted"; 0 for none.
    pub(crate) uncounted: u64,
    /// The notes "removed", with the time of each.
    pub(crate) removed: BTreeMap<u64, Time>,
    /// The numbers of all.
    pub(crate) all: BTreeSet<u64>,
}

impl Notes {
    /// The notes of the clone root at `root`.
    ///
    /// # Errors
    /// Those of the tree, and `Corrupt`.
    pub(crate) fn read(snapshot: &Snapshot, root: &[u8]) -> Result<Self> {
        let prefix = keys::notes(root);
        let end = successor_of_prefix(&prefix);
        let mut scan = snapshot.scan(&prefix, end.as_deref());
        let mut notes = Self::default();
        while scan.advance()? {
            let Some((_, NoteKey::Note(number))) = keys::parse_note(scan.key()) else {
                return Err(Error::Corrupt {
                    what: "note of a clone root",
                    detail: format!("{:?}", scan.key()),
                });
            };
            notes.last = notes.last.max(number);
            notes.all.insert(number);
            match Note::decode(scan.value())? {
                Note::Uncounted => notes.uncounted = notes.uncounted.max(number),
                Note::Removed { at } => {
                    notes.removed.insert(number, at);
                }
            }
        }
        Ok(notes)
    }
}

impl Notes {
    /// Whether these are the notes `before` and later ones.
    pub(crate) fn go_on_from(&self, before: &Self) -> bool {
        let mut new = self.all.difference(&before.all);
        before.all.is_subset(&self.all) && new.all(|note| *note > before.last)
    }
}

/// The link number in a value of the link index.
pub(crate) fn link_of(value: &[u8]) -> Result<u64> {
    let link = value.try_into().map(u64::from_be_bytes);
    link.map_err(|_| Error::Corrupt {
        what: "link index",
        detail: format!("{value:?}"),
    })
}

/// Names of the shared inodes of a clone root, as far as they are needed to count links.
#[derive(Debug)]
pub(crate) struct Counts {
    pub(crate) notes: Arc<Notes>,
    /// The link numbers that it tells of: from the first on, below the second.
    pub(crate) window: (u64, u64),
    len_max: usize,
    /// Names in the link index, if some shared inodes may be uncounted.
    live: BTreeMap<u64, u32>,
    /// Names that were removed, by link number and note.
    removed: BTreeMap<(u64, u64), u32>,
}

impl Counts {
    /// Counts for the shared inodes from `from` on, of the clone root at `root`, which has these
    /// notes.
    ///
    /// # Errors
    /// Those of the tree, and `Corrupt`.
    pub(crate) fn read(
        snapshot: &Snapshot,
        root: &[u8],
        notes: Arc<Notes>,
        from: u64,
    ) -> Result<Self> {
        Self::read_window(snapshot, root, notes, (from, WINDOW_LEN))
    }

    fn read_window(
        snapshot: &Snapshot,
        root: &[u8],
        notes: Arc<Notes>,
        (from, len_max): (u64, usize),
    ) -> Result<Self> {
        let mut counts = Self {
            notes: Arc::clone(&notes),
            window: (from, u64::MAX),
            len_max,
            live: BTreeMap::new(),
            removed: BTreeMap::new(),
        };
        let mut scan_all = |prefix: Bytes, note: Option<u64>| -> Result<()> {
            let end = successor_of_prefix(&prefix);
            let mut scan = snapshot.scan(&prefix, end.as_deref());
            while scan.advance()? {
                counts.add(link_of(scan.value())?, note);
            }
            Ok(())
        };
        if notes.uncounted > 0 {
            scan_all(keys::link_index(root), None)?;
        }
        for note in notes.removed.keys() {
            scan_all(keys::removed_links(root, *note), Some(*note))?;
        }
        Ok(counts)
    }

    /// Notes a name in the link index, or one that a note has. The window ends earlier when there
    /// are too many.
    fn add(&mut self, link: u64, note: Option<u64>) {
        if !self.has(link) {
            return;
        }
        let names = match note {
            None => self.live.entry(link).or_default(),
            Some(note) => self.removed.entry((link, note)).or_default(),
        };
        *names = names.saturating_add(1);
        while self.live.len() + self.removed.len() > self.len_max {
            let last = self.live.last_key_value().map(|(link, _)| *link);
            let last_removed = self.removed.last_key_value().map(|((link, _), _)| *link);
            let Some(last) = last.max(last_removed).filter(|last| *last > self.window.0) else {
                return;
            };
            self.live.remove(&last);
            self.removed.split_off(&(last, 0));
            self.window.1 = last;
        }
    }

    /// Whether it tells of this shared inode.
    pub(crate) fn has(&self, link: u64) -> bool {
        self.window.0 <= link && link < self.window.1
    }

    /// Counts the links of a shared inode with this record. The record is counted then.
    pub(crate) fn count(&self, link: u64, record: &mut Record) {
        if record.counted >= self.notes.last {
            return;
        }
        let is_uncounted = record.counted < self.notes.uncounted;
        let later = (link, record.counted + 1)..=(link, u64::MAX);
        let (mut removed, mut last) = (0, None);
        for ((_, note), names) in self.removed.range(later) {
            removed += names;
            last = self.notes.removed.get(note).copied().max(last);
        }
        record.nlink = if is_uncounted {
            self.live.get(&link).copied().unwrap_or(0)
        } else {
            record.nlink.saturating_sub(removed)
        };
        record.ctime = last.map_or(record.ctime, |last| last.max(record.ctime));
        record.counted = self.notes.last;
    }

    /// Whether a record that is counted has to be stored before the notes go.
    pub(crate) fn changes(&self, before: &Record, counted: &Record) -> bool {
        let is_uncounted = before.counted < self.notes.uncounted;
        let is_same = before.nlink == counted.nlink && before.ctime == counted.ctime;
        !is_same || is_uncounted && before.counted != counted.counted
    }

    /// Whether a name of this shared inode was removed with a tree.
    pub(crate) fn is_removed(&self, link: u64) -> bool {
        let mut removed = self.removed.range((link, 0)..=(link, u64::MAX));
        removed.next().is_some()
    }

    /// The first shared inode from `from` on that has names in the link index or had names that
    /// were removed.
    pub(crate) fn next_named(&self, from: u64) -> Option<u64> {
        let live = self.live.range(from..).next().map(|(link, _)| *link);
        let removed = self.next_removed(from);
        live.into_iter().chain(removed).min()
    }

    /// The first shared inode from `from` on of which names were removed.
    pub(crate) fn next_removed(&self, from: u64) -> Option<u64> {
        let mut removed = self.removed.range((from, 0)..);
        removed.next().map(|((link, _), _)| *link)
    }
}

/// Notes and counts of a clone root in memory.
#[derive(Default)]
pub(crate) struct KnownNotes {
    pub(crate) notes: Arc<Notes>,
    pub(crate) counts: Option<Arc<Counts>>,
}

/// The state of notes of a whole volume.
pub(crate) struct Unsettled {
    /// Whether some clone root may have notes. Set before the batch with a note is applied, cleared
    /// with the links held for writing.
    has_notes: AtomicBool,
    /// Signals that a clone root gets a note.
    pub(crate) made: Wake,
    /// Link entries below a tree that the batch of a clone or a removal handles one by one, at
    /// most.
    pub(crate) links_at_once: usize,
    /// Numbers of the clone roots that got notes since the kernel was last told.
    announced: Mutex<Vec<Ino>>,
}

/// Clone roots that are remembered until the kernel is told, at most. Of more, all are looked at when
/// their links are counted.
const ANNOUNCED_MAX: usize = 1 << 10;

impl Unsettled {
    pub(crate) fn new(has_notes: bool, links_at_once: usize) -> Self {
        Self {
            has_notes: AtomicBool::new(has_notes),
            made: Wake::default(),
            links_at_once,
            announced: Mutex::default(),
        }
    }

    /// Whether some clone root may have notes.
    pub(crate) fn may_have_notes(&self) -> bool {
        self.has_notes.load(Ordering::SeqCst)
    }

    /// Tells that the operation which holds the links for writing may make a note.
    pub(crate) fn expect_note(&self) {
        self.has_notes.store(true, Ordering::SeqCst);
        self.made.wake();
    }

    /// Notes that the kernel is to be told of the shared inodes of a clone root.
    pub(crate) fn announce(&self, root: Ino) {
        let mut announced = self.announced.lock();
        if announced.len() < ANNOUNCED_MAX && !announced.contains(&root) {
            announced.push(root);
        }
    }

    /// The clone roots of whose shared inodes the kernel is to be told.
    pub(crate) fn take_announced(&self) -> Vec<Ino> {
        std::mem::take(&mut *self.announced.lock())
    }

    /// Tells that no clone root has a note. The caller holds the links for writing.
    pub(crate) fn has_none(&self) {
        self.has_notes.store(false, Ordering::SeqCst);
    }

    /// The indexes that the range of a tree may have keys in.
    pub(crate) fn indexes(&self) -> &'static [u8] {
        match self.may_have_notes() {
            true => &[keys::META, keys::DATA, keys::NOTES],
            false => &[keys::META, keys::DATA],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::Kind;

    fn record(nlink: u32, counted: u64) -> Record {
        let mut record = Record::new(Kind::Regular.mode_bits(), 0, 0, Time::default());
        (record.nlink, record.counted) = (nlink, counted);
        record
    }

    fn counts(uncounted: u64, removed: &[u64], len_max: usize) -> Counts {
        let at = |note: &u64| {
            let secs = i64::try_from(*note).unwrap();
            (*note, Time { secs, nanos: 0 })
        };
        let notes = Notes {
            last: removed.iter().copied().max().unwrap_or(0).max(uncounted),
            uncounted,
            removed: removed.iter().map(at).collect(),
            all: removed.iter().copied().chain([uncounted]).collect(),
        };
        Counts {
            notes: Arc::new(notes),
            window: (0, u64::MAX),
            len_max,
            live: BTreeMap::new(),
            removed: BTreeMap::new(),
        }
    }

    #[test]
    fn count_follows_from_the_notes_after_the_record() {
        let mut counts = counts(5, &[3, 8], 100);
        counts.add(1, None);
        counts.add(1, None);
        for note in [3, 8, 8] {
            counts.add(1, Some(note));
        }
        // Each case has the count of the record, the note up to which it is counted, and the result.
        for (nlink, counted, want, ctime) in [
            (9, 0, 2, 8),
            (9, 4, 2, 8),
            (9, 5, 7, 8),
            (9, 7, 7, 8),
            (9, 8, 9, 0),
        ] {
            let mut record = record(nlink, counted);
            counts.count(1, &mut record);
            let told = (record.nlink, record.counted, record.ctime.secs);
            assert_eq!(told, (want, 8, ctime), "{nlink} up to {counted}");
        }
        let mut unused = record(4, 0);
        counts.count(2, &mut unused);
        assert_eq!(unused.nlink, 0);
    }

    #[test]
    fn removed_names_are_subtracted_once_each() {
        let mut counts = counts(0, &[3, 8], 100);
        for (link, note) in [(1, 3), (1, 8), (2, 8)] {
            counts.add(link, Some(note));
        }
        for (link, counted, want) in [(1, 0, 3), (1, 3, 4), (1, 8, 5), (2, 0, 4), (3, 0, 5)] {
            let mut record = record(5, counted);
            counts.count(link, &mut record);
            assert_eq!(record.nlink, want, "{link} up to {counted}");
        }
    }

    #[test]
    fn a_window_ends_before_it_is_too_long_and_is_whole_inside() {
        let mut counts = counts(5, &[8], 4);
        for link in [9, 3, 7, 1, 5, 9, 3] {
            counts.add(link, None);
            counts.add(link, Some(8));
        }
        assert_eq!(counts.window, (0, 5));
        assert_eq!(
            (counts.next_named(0), counts.next_named(2)),
            (Some(1), Some(3))
        );
        assert_eq!(counts.next_named(4), None);
        let mut record = record(0, 0);
        counts.count(3, &mut record);
        assert_eq!(record.nlink, 2);
    }
}
