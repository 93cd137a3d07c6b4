//! Sending: trees as a stream of items (`format/stream.rs`), without those parts that were
//! sent before.
//!
//! A [`Sender`] makes one section after the other, by a stack of *tasks*. It reads trees that
//! nothing changes: snapshots of the volume, or one moment of the live tree.
//!
//! ```text
//! root ──► walk of a directory ──► walk │ contents of a file │ copy + patch
//!     └──► patch (against the base) ──► walk │ difference of a file │ copy + patch
//! ```
//!
//! - A *walk* makes everything below a directory that the receiver does not have.
//! - A *patch* makes a tree of another one. Only names below nodes that the two trees do not share
//!   are looked at (`diff.rs`). It serves increments, and clones among the trees that are sent.
//! - A *copy* is sent where a tree or a large file has a relative among those that were sent
//!   (`send/seen.rs`), and a patch follows it. So the receiver shares as the sender does.
//!
//! The paths of objects in the receiver's tree are those in the sender's. The state of the receiver
//! after each section follows from the sections so far, so a section begins without a current
//! object.

mod completion;
mod contents;
mod lineage;
mod links;
mod out;
mod patch;
mod seen;
mod walk;

use std::sync::Arc;

use bytes::Bytes;
use ramet_block::Budget;
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::format::record::{Entry, Kind};
use crate::format::stream::{CopyFrom, NewObject, StreamId, StreamItem};
use crate::ops::snapshot_records::SnapshotEntry;
use crate::tools::diff::{Object, Side};

use self::completion::Completion;
use self::contents::{Contents, Differing, Part};
use self::lineage::Lineage;
use self::links::{Anchor, Group, Kept, Links, are_patched, group_of, kept_of};
use self::out::Out;
use self::patch::Patch;
use self::seen::{Relative, Seen};
use self::walk::{Walk, Walks};

/// A tree to be sent.
pub(crate) struct SentRoot {
    /// The name that it gets.
    pub(crate) name: Vec<u8>,
    /// Its identity at its moment.
    pub(crate) id: StreamId,
    pub(crate) side: Arc<Side>,
    /// The tree that the receiver has, with its identity.
    pub(crate) base: Option<(StreamId, Arc<Side>)>,
}

/// The identity of the tree at `path` in a snapshot. No other tree of any volume has it.
pub(crate) fn id_of_snapshot(volume: [u8; 16], snapshot: &SnapshotEntry, path: &[u8]) -> StreamId {
    let numbers = [
        snapshot.id,
        snapshot.seq,
        snapshot.time.secs.cast_unsigned(),
        snapshot.time.nanos.into(),
    ];
    let numbers = numbers.map(u64::to_le_bytes).concat();
    id_of(&[b"tree of a snapshot", &volume, &numbers, path])
}

/// An identity that follows from these parts. Names are among them, which users choose: no two lists
/// of parts with the same one can be found.
pub(crate) fn id_of(parts: &[&[u8]]) -> StreamId {
    let mut all = Sha256::new();
    for part in parts {
        all.update((part.len() as u64).to_le_bytes());
        all.update(part);
    }
    let sum: [u8; 32] = all.finalize().into();
    StreamId::of_hash(*sum.first_chunk().expect("a hash is longer"))
}

/// A piece of work.
enum Task {
    /// The names of the roots from this one on.
    Names(usize),
    /// The trees of the roots from this one on.
    Roots(usize),
    Walk(Walk),
    Patch(Patch),
    /// All contents of a new file.
    Contents(Contents),
    /// The contents of a file that differ from those of another one.
    Differing(Box<Differing>),
    /// Attributes of an object.
    Completion(Box<Completion>),
    /// The stream ends.
    End,
}

/// A stream that is being made.
pub(crate) struct Sender {
    budget: Arc<Budget>,
    roots: Vec<SentRoot>,
    /// Number of the root that is being sent, and its tree.
    now: u32,
    side: Arc<Side>,
    tasks: Vec<Task>,
    walks: Walks,
    out: Out,
    seen: Seen,
    links: Links,
    /// The lineages of the patches that are under way.
    lineages: Vec<Arc<Lineage>>,
    /// Number of the last patch.
    patches: u64,
    /// Memory of the patches that are under way.
    patch_bytes: u64,
}

/// Part of the budget that the patches under way take at most.
const BUDGET_PART: u64 = 2;

impl Sender {
    /// A stream of these trees, of which there is at least one.
    pub(crate) fn new(budget: &Arc<Budget>, roots: Vec<SentRoot>) -> Result<Self> {
        let first = roots.first().ok_or(Error::Invalid("nothing to send"))?;
        Ok(Self {
            budget: Arc::clone(budget),
            now: 0,
            side: Arc::clone(&first.side),
            roots,
            tasks: vec![Task::End, Task::Roots(0), Task::Names(0)],
            walks: Walks::new(budget),
            out: Out::default(),
            seen: Seen::new(budget),
            links: Links::new(budget),
            lineages: Vec::new(),
            patches: 0,
            patch_bytes: 0,
        })
    }

    /// The identity of the stream: that of its trees and their bases.
    pub(crate) fn id(&self) -> StreamId {
        let mut parts: Vec<&[u8]> = vec![b"stream, made in the way 2"];
        for root in &self.roots {
            parts.push(&root.name);
            parts.push(&root.id.0);
            parts.push(root.base.as_ref().map_or(b"", |(id, _)| &id.0));
        }
        match self.roots.iter().all(|root| root.id.comes_again()) {
            true => id_of(&parts),
            false => id_of(&parts).made_once(),
        }
    }

    /// The items of the next section; `None` when the stream is whole.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn next_section(&mut self) -> Result<Option<Vec<u8>>> {
        while !self.out.is_full() {
            let Some(task) = self.tasks.pop() else {
                break;
            };
            self.step(task)?;
        }
        self.out.take_section()
    }

    /// Whether the section that was taken last ends the stream.
    pub(crate) fn is_done(&self) -> bool {
        self.tasks.is_empty() && self.out.is_empty()
    }

    fn step(&mut self, task: Task) -> Result<()> {
        match task {
            Task::Names(number) => {
                self.put_root(number);
                Ok(())
            }
            Task::Roots(number) => self.begin_root(number),
            Task::Walk(walk) => self.go_on_walk(walk),
            Task::Patch(patch) => self.go_on_patch(patch),
            Task::Contents(contents) => self.send_contents(contents),
            Task::Differing(differing) => self.send_differing(differing),
            Task::Completion(completion) => self.complete(completion),
            Task::End => {
                self.out.put_end();
                Ok(())
            }
        }
    }

    fn put_root(&mut self, number: usize) {
        let Some(root) = self.roots.get(number) else {
            return;
        };
        self.out.put(&StreamItem::Root {
            name: &root.name,
            id: root.id,
            base: root.base.as_ref().map(|(id, _)| *id),
        });
        self.tasks.push(Task::Names(number + 1));
    }

    /// Begins with the root of this number, if there is one.
    fn begin_root(&mut self, number: usize) -> Result<()> {
        let Some(root) = self.roots.get(number) else {
            return Ok(());
        };
        self.tasks.push(Task::Roots(number + 1));
        self.now = u32::try_from(number).map_err(|_| Error::TooBig)?;
        self.side = Arc::clone(&root.side);
        self.links = Links::new(&self.budget);
        self.seen.forget_base();
        let top = Bytes::new();
        let base = root.base.clone();
        self.out.put(&StreamItem::Begin(self.now));
        match base {
            Some((_, base)) => {
                let lineage = self.lineage((base, Bytes::new()), top);
                self.begin_patch(lineage, true)
            }
            None => self.send_directory(top),
        }
    }

    /// The lineage of the object `new` of the root, which is made of `old`.
    fn lineage(&mut self, old: (Arc<Side>, Bytes), new: Bytes) -> Arc<Lineage> {
        self.patches += 1;
        Arc::new(Lineage {
            number: self.patches,
            side: old.0,
            old: old.1,
            new,
        })
    }

    /// Sends a directory that the receiver does not have: as a copy of a relative, or as a new one.
    fn send_directory(&mut self, object: Bytes) -> Result<()> {
        let sample = seen::sample(&self.side, &object)?;
        if let Some(found) = self.seen.relative_of(&sample) {
            let lineage = self.lineage((found.side, found.object.clone()), object.clone());
            // Trees that differ in too many names to be compared are no relatives.
            match self.plan(&lineage) {
                Ok(patch) => {
                    self.out.put_copy(&object, found.from, &found.object);
                    self.push_patch(patch);
                    return Ok(());
                }
                Err(Error::Range) => {}
                Err(error) => return Err(error),
            }
        }
        self.out.put_new(&object, NewObject::Directory);
        let walk = self.walks.begin(&object, sample)?;
        self.tasks.push(Task::Walk(walk));
        Ok(())
    }

    fn send_contents(&mut self, contents: Contents) -> Result<()> {
        match contents.go_on(&mut self.out)? {
            Part::Rest(rest) => self.tasks.push(Task::Contents(rest)),
            Part::Completion(completion) => self.complete(completion)?,
        }
        Ok(())
    }

    fn send_differing(&mut self, differing: Box<Differing>) -> Result<()> {
        match differing.go_on(&mut self.out)? {
            Part::Rest(rest) => self.tasks.push(Task::Differing(rest)),
            Part::Completion(completion) => self.complete(completion)?,
        }
        Ok(())
    }

    fn complete(&mut self, completion: Box<Completion>) -> Result<()> {
        let rest = completion.go_on(&mut self.out)?;
        self.tasks.extend(rest.map(Task::Completion));
        Ok(())
    }

    /// Sends entries of a directory until one needs a task of its own, or the section is full.
    fn go_on_walk(&mut self, mut walk: Walk) -> Result<()> {
        let depth = self.tasks.len();
        while !self.out.is_full() {
            let Some((object, entry)) = self.walks.next_entry(&mut walk, &self.side)? else {
                return self.end_walk(walk);
            };
            self.send_entry(object, entry)?;
            if self.tasks.len() > depth {
                // The tasks of the entry come before the rest of the directory.
                self.walks.suspend(&mut walk);
                self.tasks.insert(depth, Task::Walk(walk));
                return Ok(());
            }
        }
        self.tasks.push(Task::Walk(walk));
        Ok(())
    }

    fn end_walk(&mut self, walk: Walk) -> Result<()> {
        let object = self.walks.end(&walk);
        let found = self.side.object(&object)?;
        let found = found.ok_or(Error::Stale)?;
        let new = (Arc::clone(&self.side), found);
        self.complete(Completion::of_new(object.clone(), new))?;
        let relative = self.relative(object);
        self.seen.add_directory(&walk.sample, &relative);
        Ok(())
    }

    /// An object of the root that is being sent, as a relative of later ones.
    fn relative(&self, object: Bytes) -> Relative {
        Relative {
            from: CopyFrom::Root(self.now),
            side: Arc::clone(&self.side),
            object,
        }
    }

    fn send_entry(&mut self, object: Bytes, entry: Entry) -> Result<()> {
        match entry {
            Entry::Inode(record) if record.kind() == Kind::Directory => self.send_directory(object),
            Entry::Inode(record) => {
                let path = self.side.at(&object);
                let is_shared = false;
                self.make_file(
                    object,
                    Object {
                        record,
                        path,
                        is_shared,
                    },
                )
            }
            Entry::Link(_) => self.send_link(object),
            Entry::Deleted(_) => Ok(()),
        }
    }

    /// Sends a name of a shared inode that the receiver does not have.
    fn send_link(&mut self, object: Bytes) -> Result<()> {
        let group = group_of(&self.side, &object, b"")?.ok_or(Error::Stale)?;
        if self.links.anchor(&group).is_none()
            && let Some(anchor) = self.links.find_kept((&self.side, &self.lineages), &group)?
        {
            self.links.set_anchor(group.clone(), anchor)?;
        }
        if let Some(anchor) = self.links.anchor(&group) {
            self.out.put_link(&object, &anchor.object);
            return self.patch_anchor(&group);
        }
        let anchor = Anchor {
            object: object.clone(),
            kept: None,
            is_sent: true,
        };
        self.links.set_anchor(group, anchor)?;
        let found = self.side.object(&object)?.ok_or(Error::Stale)?;
        self.make_file(object, found)
    }

    /// Sends the differences of an anchor that the patch under way has not come to. A clone of the
    /// directory that got a link to it is sent as a copy, and would be one of the old contents.
    fn patch_anchor(&mut self, group: &Group) -> Result<()> {
        let Some(anchor) = self.links.anchor(group).filter(|anchor| !anchor.is_sent) else {
            return Ok(());
        };
        anchor.is_sent = true;
        let anchor = anchor.clone();
        let is_of = |lineage: &&Arc<Lineage>| Some(lineage.number) == anchor.patch();
        // A patch that has ended has come to all its names.
        let Some(lineage) = self.lineages.iter().find(is_of) else {
            return Ok(());
        };
        let old = lineage.side.object(&lineage.old_of(&anchor.object))?;
        let new = self.side.object(&anchor.object)?;
        let (old, new) = old.zip(new).ok_or(Error::Stale)?;
        let (old, new) = (
            (Arc::clone(&lineage.side), old),
            (Arc::clone(&self.side), new),
        );
        self.send_differing(Box::new(Differing::new(anchor.object, old, new)))
    }

    /// Sends an object that is no directory, and that the receiver does not have.
    fn make_file(&mut self, object: Bytes, file: Object) -> Result<()> {
        let record = &file.record;
        let new = match record.kind() {
            Kind::Directory => return Err(Error::IsDirectory),
            Kind::Regular => return self.make_regular(object, file),
            Kind::Symlink => NewObject::Symlink(&record.target),
            kind => NewObject::Special(kind, record.rdev),
        };
        self.out.put_new(&object, new);
        let new = (Arc::clone(&self.side), file);
        self.complete(Completion::of_new(object, new))
    }

    fn make_regular(&mut self, object: Bytes, file: Object) -> Result<()> {
        if seen::is_large(&file.record)
            && let Some(found) = self.seen.relative_of_file(&file.record)
            && let Some(old) = found.side.object(&found.object)?
            && old.record.kind() == Kind::Regular
        {
            let side = Arc::clone(&self.side);
            let differing = Differing::new(object.clone(), (found.side, old), (side, file.clone()));
            if differing.is_worth_a_copy()? {
                self.out.put_copy(&object, found.from, &found.object);
                self.tasks.push(Task::Differing(Box::new(differing)));
                return Ok(());
            }
        }
        self.out
            .put_new(&object, NewObject::File(file.record.size_bytes));
        let relative = self.relative(object.clone());
        self.seen.add_file(&file.record, &relative);
        let contents = Contents::new(object, Arc::clone(&self.side), file);
        self.send_contents(contents)
    }

    /// Begins a patch, of the base of the root if it is `of_base`.
    fn begin_patch(&mut self, lineage: Arc<Lineage>, of_base: bool) -> Result<()> {
        let patch = self.plan(&lineage)?;
        if of_base {
            for object in &patch.gone {
                let object = patch.at(object);
                self.remember_base(&lineage.side, &object)?;
            }
        }
        self.push_patch(patch);
        Ok(())
    }

    /// The patch of a lineage, within the memory that those under way leave.
    fn plan(&self, lineage: &Arc<Lineage>) -> Result<Patch> {
        let most = self.budget.part(BUDGET_PART);
        let left = most.saturating_sub(self.patch_bytes);
        Patch::plan((&self.budget, left), &self.side, lineage)
    }

    /// Goes on with a patch that begins.
    fn push_patch(&mut self, patch: Patch) {
        self.patch_bytes += patch.bytes();
        self.lineages.push(Arc::clone(&patch.lineage));
        self.tasks.push(Task::Patch(patch));
    }

    /// Remembers an object of the base that goes: it may have moved elsewhere.
    fn remember_base(&mut self, side: &Arc<Side>, object: &Bytes) -> Result<()> {
        let relative = Relative {
            from: CopyFrom::Base,
            side: Arc::clone(side),
            object: object.clone(),
        };
        match side.object(object)? {
            Some(found) if found.record.kind() == Kind::Directory => {
                let sample = seen::sample(side, object)?;
                self.seen.add_directory(&sample, &relative);
            }
            Some(found) => self.seen.add_file(&found.record, &relative),
            None => {}
        }
        Ok(())
    }

    /// Sends differences until one needs a task of its own, or the section is full.
    fn go_on_patch(&mut self, mut patch: Patch) -> Result<()> {
        let depth = self.tasks.len();
        while !self.out.is_full() {
            if let Some(object) = patch.gone.pop_front() {
                let object = patch.at(&object);
                patch.remove(&mut self.out, &object);
            } else if let Some(object) = patch.left.pop_front() {
                let object = patch.at(&object);
                self.patch_object(&mut patch, object)?;
            } else if let Some(dir) = patch.dirs.pop_last() {
                self.complete_dir(&patch, &dir)?;
            } else {
                self.lineages.pop();
                self.patch_bytes -= patch.bytes();
                return Ok(());
            }
            if self.tasks.len() > depth {
                self.tasks.insert(depth, Task::Patch(patch));
                return Ok(());
            }
        }
        self.tasks.push(Task::Patch(patch));
        Ok(())
    }

    /// Completes the directory `below` the top of a patch.
    fn complete_dir(&mut self, patch: &Patch, below: &[u8]) -> Result<()> {
        let (lineage, dir) = (&patch.lineage, patch.at(below));
        let old = lineage.side.object(&lineage.old_of(&dir))?;
        let new = self.side.object(&dir)?.ok_or(Error::Stale)?;
        let old = old.ok_or(Error::Stale)?;
        let old = (Arc::clone(&lineage.side), old);
        let new = (Arc::clone(&self.side), new);
        let touched = patch.touched.contains(below);
        self.complete(Completion::of_changed(dir, (old, new), touched))
    }

    /// Looks at a name that may differ.
    fn patch_object(&mut self, patch: &mut Patch, object: Bytes) -> Result<()> {
        let lineage = Arc::clone(&patch.lineage);
        let new = self.side.object(&object)?;
        let old = lineage.side.object(&lineage.old_of(&object))?;
        match (old, new) {
            (None, None) => Ok(()),
            (Some(_), None) => {
                patch.remove(&mut self.out, &object);
                Ok(())
            }
            (None, Some(new)) => self.add_object(patch, object, new),
            // One of another kind has been removed.
            (Some(old), Some(new)) if old.record.kind() != new.record.kind() => {
                self.add_object(patch, object, new)
            }
            (Some(_), Some(new)) if new.record.kind() == Kind::Directory => {
                patch.dirs.insert(patch.below(&object));
                Ok(())
            }
            (Some(old), Some(new)) => self.patch_file(patch, object, (old, new)),
        }
    }

    fn add_object(&mut self, patch: &mut Patch, object: Bytes, new: Object) -> Result<()> {
        patch.touch(&object);
        if new.record.kind() == Kind::Directory {
            self.send_directory(object)
        } else if new.is_shared {
            self.send_link(object)
        } else {
            self.make_file(object, new)
        }
    }

    fn patch_file(
        &mut self,
        patch: &mut Patch,
        object: Bytes,
        (old, new): (Object, Object),
    ) -> Result<()> {
        let lineage = Arc::clone(&patch.lineage);
        let group = match new.is_shared {
            true => group_of(&self.side, &object, b"")?,
            false => None,
        };
        let kept = kept_of(&self.side, &object, &lineage)?;
        self.anchor_in_outer_trees(group.as_ref(), kept.as_ref())?;
        let anchor = group.as_ref().and_then(|group| self.links.anchor(group));
        let is_its_anchor = match anchor {
            Some(anchor) if kept.is_some() && anchor.kept == kept => {
                if std::mem::replace(&mut anchor.is_sent, true) {
                    return Ok(());
                }
                true
            }
            Some(_) => {
                patch.remove(&mut self.out, &object);
                return self.add_object(patch, object, new);
            }
            None => false,
        };
        // A name of a shared inode that is another one now would change all names of that.
        if !are_patched(&old, &new) || (old.is_shared && kept.is_none()) {
            patch.remove(&mut self.out, &object);
            return self.add_object(patch, object, new);
        }
        if let Some(group) = group.filter(|_| !is_its_anchor) {
            let anchor = Anchor {
                object: object.clone(),
                kept,
                is_sent: true,
            };
            self.links.set_anchor(group, anchor)?;
        }
        let (old, new) = (
            (Arc::clone(&lineage.side), old),
            (Arc::clone(&self.side), new),
        );
        let differing = Differing::new(object, old, new);
        self.send_differing(Box::new(differing))
    }

    /// Looks for the anchor of a group in the trees around the one that is being patched, unless the
    /// group has one.
    fn anchor_in_outer_trees(&mut self, group: Option<&Group>, kept: Option<&Kept>) -> Result<()> {
        let Some(group) = group.filter(|group| self.links.anchor(group).is_none()) else {
            return Ok(());
        };
        let outermost = self.lineages.first().map(|lineage| lineage.number);
        if kept.is_some_and(|(number, _)| Some(*number) == outermost) {
            return Ok(());
        }
        match self.links.find_kept((&self.side, &self.lineages), group)? {
            Some(anchor) => self.links.set_anchor(group.clone(), anchor),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_follow_from_parts_and_not_from_the_bytes_in_a_row() {
        let id = id_of(&[b"ab", b"c"]);
        assert_eq!(id.to_string(), "43ee655579de81cab39b3f95c1c2d3f4");
        assert_ne!(id, id_of(&[b"a", b"bc"]));
        assert_ne!(id, id_of(&[b"abc"]));
        assert_ne!(id, id_of(&[b"ab", b"c", b""]));
    }
}
