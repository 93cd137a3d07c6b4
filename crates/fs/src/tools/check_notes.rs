//! The check of link counts, F4, and of the notes about links that are not counted yet, F17.

use bytes::Bytes;

use crate::format::keys;
use crate::format::note::Note;
use crate::format::record::{FLAG_CLONE_ROOT, FLAG_JOINING};
use crate::namespace::numbers::Counters;
use crate::tools::check::{Findings, Object, Scan};

impl Scan {
    /// F4 for a shared inode with so many `names`.
    pub(super) fn compare_count(
        &self,
        (path, object): (&Bytes, &Object),
        names: u32,
        findings: &mut Findings,
    ) {
        let record = &object.record;
        let mut notes = self.notes.of(&object.home).peekable();
        if names == 0 && notes.peek().is_none() {
            findings.add("F4", format!("shared inode {path:?} has no name"));
            return;
        }
        let is_uncounted =
            notes.any(|(number, note)| number > record.counted && *note == Note::Uncounted);
        let links = i64::from(record.nlink);
        let removed = i64::from(self.notes.not_subtracted(path, record.counted));
        if !is_uncounted && links - removed != i64::from(names) {
            let detail = format!(
                "shared inode {path:?} has {links} links, of which {removed} were removed, and \
                 {names} names"
            );
            findings.add("F4", detail);
        }
    }

    /// The clone root that has shared inode `link`, which is named in the directory at `dir`.
    pub(super) fn root_of_link(&self, dir: &Bytes, link: u64) -> Option<Bytes> {
        let mut root = self.root_of(dir)?;
        while self.objects[&root].record.has(FLAG_JOINING)
            && !self.objects.contains_key(&keys::shared_inode(&root, link))
        {
            root = self.root_of(&self.objects[&root].home)?;
        }
        Some(root)
    }

    /// F17, and F9 for notes.
    pub(super) fn compare_notes(&self, counters: Counters, findings: &mut Findings) {
        for (root, number) in self.notes.notes.keys() {
            let object = self.objects.get(root);
            if !object.is_some_and(|object| object.record.has(FLAG_CLONE_ROOT)) {
                findings.add("F17", format!("note of {root:?}, which is no clone root"));
            }
            if *number >= counters.generation {
                findings.add("F9", format!("note {number} of {root:?}"));
            }
        }
        for (home, names) in &self.notes.homes {
            if !matches!(self.notes.notes.get(home), Some(Note::Removed { .. })) {
                let detail = format!("{names} removed names of {home:?}, which is no note");
                findings.add("F17", detail);
            }
        }
        for (path, object) in &self.objects {
            let is_joining = self.notes.joining.contains(path);
            if object.record.has(FLAG_JOINING) != is_joining
                || is_joining && !object.record.has(FLAG_CLONE_ROOT)
            {
                findings.add("F17", format!("{path:?} is being joined, or not"));
            }
            let counted = object.record.counted;
            if counted >= counters.generation || counted > 0 && !object.is_shared {
                findings.add("F17", format!("{path:?} is counted up to note {counted}"));
            }
        }
    }
}
