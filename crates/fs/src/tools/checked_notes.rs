//! The index of notes, as the check reads it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use ramet_betree::{Snapshot, successor_of_prefix};

use crate::error::Result;
use crate::format::keys::{self, NoteKey};
use crate::format::note::Note;
use crate::namespace::notes::link_of;

/// The notes of all clone roots.
#[derive(Default)]
pub(super) struct CheckedNotes {
    pub(super) notes: BTreeMap<(Bytes, u64), Note>,
    /// Names that were removed, by path of the shared inode and by note.
    removed: HashMap<Bytes, BTreeMap<u64, u32>>,
    /// Clone roots that are being joined.
    pub(super) joining: BTreeSet<Bytes>,
    /// The clone root and the note of removed names.
    pub(super) homes: BTreeMap<(Bytes, u64), u64>,
}

impl CheckedNotes {
    /// Reads the index of notes.
    ///
    /// # Errors
    /// Those of the tree.
    pub(super) fn read(
        &mut self,
        snapshot: &Snapshot,
        mut found: impl FnMut(&'static str, String),
    ) -> Result<()> {
        let prefix = keys::range(keys::NOTES, b"");
        let mut scan = snapshot.scan(&prefix, successor_of_prefix(&prefix).as_deref());
        while scan.advance()? {
            let (key, value) = (scan.key(), scan.value());
            let Some((root, part)) = keys::parse_note(key) else {
                found("F1", format!("key {key:?}"));
                continue;
            };
            let root = Bytes::copy_from_slice(root);
            match part {
                NoteKey::Note(number) => match Note::decode(value) {
                    Ok(note) => {
                        self.notes.insert((root, number), note);
                    }
                    Err(error) => found("F1", format!("{key:?}: {error}")),
                },
                NoteKey::Joining => {
                    self.joining.insert(root);
                }
                NoteKey::Removed(number) => match link_of(value) {
                    Ok(link) => {
                        let shared = keys::shared_inode(&root, link);
                        let names = self.removed.entry(shared).or_default();
                        *names.entry(number).or_default() += 1;
                        *self.homes.entry((root, number)).or_default() += 1;
                    }
                    Err(error) => found("F1", format!("{key:?}: {error}")),
                },
            }
        }
        Ok(())
    }

    /// The notes of the clone root at `root`.
    pub(super) fn of(&self, root: &Bytes) -> impl Iterator<Item = (u64, &Note)> {
        let range = (root.clone(), 0)..=(root.clone(), u64::MAX);
        let notes = self.notes.range(range);
        notes.map(|((_, number), note)| (*number, note))
    }

    /// Names of a shared inode that its record still counts, and that were removed.
    pub(super) fn not_subtracted(&self, path: &Bytes, counted: u64) -> u32 {
        let removed = self.removed.get(path).into_iter().flatten();
        let later = removed.filter(|(note, _)| **note > counted);
        later.map(|(_, names)| names).sum()
    }
}
