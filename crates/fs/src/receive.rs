//! Receiving: a stream of `ramet send` (`format/stream.rs`) becomes trees, each at once.
//!
//! The trees grow in a *stage*, a hidden directory of the caller beside their names, and get their
//! names when the stream is whole. Every so often a clone of the stage is made, a *checkpoint*: it
//! costs no more than a clone does, and a receiver that was killed goes on from it.
//!
//! ```text
//! DIR/.ramet-receive-ID/now/0         the first root as far as it has come
//!                      /now/base-1    the base of the second one, for copies
//!                      /now/state     roots, and the number of items up to the checkpoint
//!                      /at-120        the checkpoint behind section 120: a clone of `now`
//!                      /out-0         the first root before it gets its name; the tree that had
//!                                     the name behind that
//!                      /gives-0-71    the mark that `out-0` had the inode number 71, when it was
//!                                     about to get its name
//! ```
//!
//! A received tree is a fork without an origin of its own (`ops/fork.rs`): its base is the tree as it
//! came, and its note tells the identity of that. So a later increment is made of the base, however
//! the tree was changed, and `ramet forks` tells whether it was.
//!
//! No byte of a stream is trusted: names are single names, and all places lie below the stage.

mod destination;
mod error;
mod in_volume;
mod names;
mod staged;
mod unfinished;

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::io;

use crate::format::record::Kind;
use crate::format::stream::{
    CopyFrom, NewObject, SECTION_HEAD_BYTES, SectionHead, Sections, StreamId, StreamItem,
    StreamItems,
};
use crate::receive::destination::note_of_received;
use crate::receive::error::{Received, place};
use crate::receive::names::Names;
use crate::receive::staged::{Root, STAGE, STATE_BYTES_MAX, Staged, State, mark, out, stage_of};

pub use destination::{Destination, Found, ReceivedTree};
pub use error::ReceiveError;
pub use in_volume::InVolume;
pub use names::Replace;
pub use unfinished::{Unfinished, discard, unfinished};

/// Bytes of items between two checkpoints.
const CHECKPOINT_BYTES: usize = 64 << 20;
/// Roots of a stream, at most.
const ROOTS_MAX: usize = 65536;
/// The number of objects and bytes that came, without those that were there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiveCounts {
    /// Items.
    pub items: u64,
    /// New files, with links, pipes and devices.
    pub files: u64,
    /// New directories.
    pub directories: u64,
    /// Copies of trees and files that are there.
    pub copies: u64,
    /// Names that were removed.
    pub removed: u64,
    /// Bytes of contents.
    pub bytes: u64,
    /// Extended attributes that the caller may not set.
    pub refused_xattrs: u64,
    /// The section that a receiver before had reached.
    pub resumed_behind: u64,
}

impl ReceiveCounts {
    fn add(&mut self, item: &StreamItem<'_>) {
        match item {
            StreamItem::Make {
                object: NewObject::Directory,
                ..
            } => self.directories += 1,
            StreamItem::Make { .. } | StreamItem::Link { .. } => self.files += 1,
            StreamItem::Copy { .. } => self.copies += 1,
            StreamItem::Remove(_) => self.removed += 1,
            StreamItem::Data { bytes, .. } => self.bytes += bytes.len() as u64,
            _ => {}
        }
    }
}

/// The current object.
struct Current {
    /// Its path in the stage.
    path: Vec<u8>,
    /// Its kind, as soon as that matters.
    kind: Option<Kind>,
}

/// A stream that is being received.
pub struct Receiver<D> {
    to: D,
    stream: StreamId,
    names: Names,
    sections: Sections,
    roots: Vec<Root>,
    /// The root that is being received.
    root: Option<usize>,
    has_base_copy: bool,
    current: Option<Current>,
    counts: ReceiveCounts,
    has_stage: bool,
    /// No other receiver has made anything of the stage.
    is_mine: bool,
    /// Roots that have their names already.
    is_published: bool,
    /// Items up to this section are in the checkpoint that the receiver began with.
    skips: u64,
    /// The checksum of that section.
    sum_there: u64,
    checkpoint: Option<u64>,
    bytes_since: usize,
    checkpoint_bytes: usize,
    /// A checkpoint was made before the stream was whole.
    is_long: bool,
    is_whole: bool,
    has_failed: bool,
}

impl<D: Destination> Receiver<D> {
    /// A receiver of this stream.
    pub fn new(to: D, stream: StreamId, replaces: Replace) -> Self {
        Self {
            to,
            stream,
            names: Names::new(replaces),
            sections: Sections::of(stream),
            roots: Vec::new(),
            root: None,
            has_base_copy: false,
            current: None,
            counts: ReceiveCounts::default(),
            has_stage: false,
            is_mine: false,
            is_published: false,
            skips: 0,
            sum_there: 0,
            checkpoint: None,
            bytes_since: 0,
            checkpoint_bytes: CHECKPOINT_BYTES,
            is_long: false,
            is_whole: false,
            has_failed: false,
        }
    }

    /// The same with a checkpoint behind each `bytes` of items.
    #[must_use]
    pub fn with_checkpoints(mut self, bytes: usize) -> Self {
        self.checkpoint_bytes = bytes;
        self
    }

    /// The objects that came so far.
    #[must_use]
    pub fn counts(&self) -> &ReceiveCounts {
        &self.counts
    }

    /// The last section that came.
    #[must_use]
    pub fn section(&self) -> u64 {
        self.sections.done().0
    }

    /// The names of the roots.
    pub fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.roots.iter().map(|root| &root.name[..])
    }

    /// Takes a section. The first one may be the one behind a checkpoint.
    ///
    /// # Errors
    /// See [`ReceiveError`]. The receiver cannot go on then; another one goes on from the last
    /// checkpoint, if [`Receiver::give_up`] leaves it.
    pub fn take(&mut self, head: &[u8; SECTION_HEAD_BYTES], stored: &[u8]) -> Received {
        if self.has_failed {
            return Err(ReceiveError::Order("a section behind a failure"));
        }
        let taken = self.take_section(head, stored);
        self.has_failed = taken.is_err();
        taken
    }

    fn take_section(&mut self, head: &[u8; SECTION_HEAD_BYTES], stored: &[u8]) -> Received {
        let found = SectionHead::decode(head)?;
        if self.is_whole {
            return Err(ReceiveError::Order("a section behind the last one"));
        }
        if self.section() == 0 && found.number > 1 {
            self.resume_behind(found.number - 1)?;
        }
        let items = self.sections.open((head, &found), stored)?;
        self.check_sum(found.is_last)?;
        self.apply(&items, found.is_last)?;
        self.bytes_since += items.len();
        if found.is_last && !self.is_whole {
            return Err(ReceiveError::Order("the last section has no end"));
        }
        let is_new = found.number > self.skips && self.has_stage;
        if is_new && !found.is_last && self.bytes_since >= self.checkpoint_bytes {
            self.make_checkpoint()?;
            self.is_long = true;
        }
        Ok(())
    }

    /// Refuses a stream whose sections are not those that the checkpoint is of. The sum of a section
    /// is good for all before it, so a stream has to come as far as the checkpoint.
    fn check_sum(&self, is_last: bool) -> Received {
        let (number, sum) = self.sections.done();
        let is_other = match number.cmp(&self.skips) {
            Ordering::Less => is_last,
            Ordering::Equal => sum != self.sum_there,
            Ordering::Greater => false,
        };
        match is_other && self.has_stage {
            true => Err(ReceiveError::Foreign),
            false => Ok(()),
        }
    }

    /// Gives the trees their names, once the stream is whole, and makes them durable.
    ///
    /// # Errors
    /// See [`ReceiveError`].
    pub fn finish(&mut self) -> Received<ReceiveCounts> {
        if !self.is_whole || self.has_failed {
            return Err(ReceiveError::Truncated(self.section()));
        }
        let done = self.publish_all();
        self.has_failed = done.is_err();
        done
    }

    fn publish_all(&mut self) -> Received<ReceiveCounts> {
        self.make_checkpoint()?;
        let staged = self.look_at_stage()?;
        let failed = |error| place(b"", error);
        self.names.trees = self.to.received().map_err(failed)?;
        for number in 0..self.roots.len() {
            self.publish(number, &staged)?;
        }
        self.to.sync().map_err(failed)?;
        self.drop_stage()?;
        self.to.sync().map_err(failed)?;
        self.has_stage = false;
        Ok(self.counts)
    }

    /// Removes the stage. The trees that were replaced may have files that are protected: then these
    /// trees stay.
    fn drop_stage(&mut self) -> Received {
        let failed = |error| place(b"", error);
        let Err(error) = self.to.drop_stage() else {
            return Ok(());
        };
        let name = stage_of(self.stream);
        if self.to.open_stage(&name, false).map_err(failed)? {
            let names = self.to.staged_names().map_err(failed)?;
            for name in names.iter().filter(|name| !name.starts_with(b"out-")) {
                self.to.remove(name).map_err(failed)?;
            }
        }
        Err(ReceiveError::Left(name, error))
    }

    /// Ends a receiver that failed. The stage stays for another one, if the same stream may be
    /// received later, or if another one has made a checkpoint in it: then the answer is the section
    /// behind which that goes on. Else everything is removed, but for trees that have their names.
    /// A stream `comes_again` if its sender can make it again, or if it is in a file.
    ///
    /// # Errors
    /// See [`ReceiveError`].
    pub fn give_up(mut self, error: &ReceiveError, comes_again: bool) -> Received<Option<u64>> {
        let is_worth_it = self.is_long && comes_again || self.is_published;
        let stays = !self.is_mine || is_worth_it && (self.is_whole || error.may_pass());
        if let ReceiveError::Left(..) = error {
            return Ok(None);
        }
        if !self.has_stage || stays {
            return Ok(self.checkpoint);
        }
        let done = self.to.drop_stage().and_then(|()| self.to.sync());
        done.map_err(|error| place(b"", error))?;
        Ok(None)
    }

    fn publish(&mut self, number: usize, staged: &Staged) -> Received {
        let root = self.roots[number].clone();
        let failed = |error| place(&root.name, error);
        let found = self.to.look(&root.name).map_err(failed)?;
        let from = format!("now/{number}").into_bytes();
        if self.names.has(&root, staged.given.get(&number), found) {
            self.is_published = true;
            return self.to.settle(&from, &root.name).map_err(failed);
        }
        let exchanges = self.names.may_take(&root, found)?;
        let out = out(number);
        if staged.names.contains(&out) {
            self.to.remove(&out).map_err(failed)?;
        }
        if let Some(before) = staged.given.get(&number) {
            self.to.remove(&mark(number, *before)).map_err(failed)?;
        }
        let note = note_of_received(root.id);
        self.to.fork(&out, &from, &note).map_err(failed)?;
        let given = self.to.status(&out).map_err(failed)?.number;
        let mark = mark(number, given);
        let marked = self.to.make(&mark, NewObject::File(0));
        marked.map_err(failed)?;
        let published = self.to.publish(&out, &root.name, exchanges);
        published.map_err(failed)?;
        self.is_published = true;
        Ok(())
    }

    fn apply(&mut self, items: &[u8], is_last: bool) -> Received {
        let mut items = StreamItems::new(items);
        self.current = None;
        while let Some(item) = items.next_item()? {
            if self.is_whole {
                return Err(ReceiveError::Order("an item behind the end"));
            }
            let counted = self.counts.items;
            match item {
                StreamItem::End(count) if count != counted => {
                    return Err(ReceiveError::Order("items are missing"));
                }
                StreamItem::End(_) if self.has_stage => self.is_whole = true,
                StreamItem::Root { name, id, base } => self.add_root(Root {
                    name: name.to_vec(),
                    id,
                    base,
                })?,
                StreamItem::Begin(number) => {
                    let had_stage = self.has_stage;
                    self.begin_root(number as usize)?;
                    if !had_stage {
                        self.check_sum(is_last)?;
                    }
                }
                _ if self.root.is_none() => {
                    return Err(ReceiveError::Order("an object of no root"));
                }
                item if self.is_skipped() => self.counts.add(&item),
                item => {
                    self.counts.add(&item);
                    self.apply_item(&item)?;
                }
            }
            self.counts.items += 1;
        }
        Ok(())
    }

    /// Whether the items of this section are in the stage already.
    fn is_skipped(&self) -> bool {
        self.section() <= self.skips
    }

    fn add_root(&mut self, root: Root) -> Received {
        if self.root.is_some() || self.roots.len() >= ROOTS_MAX {
            return Err(ReceiveError::Order("a root too many"));
        }
        if root.name.starts_with(STAGE.as_bytes()) {
            return Err(ReceiveError::Order("a root with the name of a stage"));
        }
        self.roots.push(root);
        Ok(())
    }

    /// Begins the next root. With the first one the stage is opened.
    fn begin_root(&mut self, number: usize) -> Received {
        let next = self.root.map_or(0, |root| root + 1);
        if number != next || number >= self.roots.len() {
            return Err(ReceiveError::Order("a root out of order"));
        }
        if !self.has_stage {
            self.open_stage()?;
        }
        (self.root, self.current, self.has_base_copy) = (Some(number), None, false);
        let root = &self.roots[number];
        match root.base {
            Some(id) if !self.is_skipped() => {
                let path = format!("now/{number}").into_bytes();
                self.copy_base(number, &path, id)
            }
            _ => Ok(()),
        }
    }

    /// Opens the stage. Before anything is changed, everything is looked at that may be missing.
    fn open_stage(&mut self) -> Received {
        let name = stage_of(self.stream);
        let failed = |error| place(name.as_bytes(), error);
        let is_there = self.to.open_stage(&name, false).map_err(failed)?;
        let staged = match is_there {
            true => self.look_at_stage()?,
            false => Staged::default(),
        };
        let last = self.last_checkpoint(&staged)?;
        // The sections of the roots alone are more than the checkpoint has.
        if last.is_some() && self.section() > self.skips {
            return Err(ReceiveError::Foreign);
        }
        self.check_roots(&staged, last.as_ref())?;
        if !is_there {
            self.to.open_stage(&name, true).map_err(failed)?;
        }
        self.enter_stage(&staged, last.is_some())
    }

    /// Goes on behind a section that a receiver before has reached: this stream begins behind it.
    fn resume_behind(&mut self, number: u64) -> Received {
        let name = stage_of(self.stream);
        let failed = |error| place(name.as_bytes(), error);
        if !self.to.open_stage(&name, false).map_err(failed)? {
            return Err(ReceiveError::Behind(None));
        }
        let staged = self.look_at_stage()?;
        let Some(state) = self.last_checkpoint(&staged)? else {
            return Err(ReceiveError::Behind(None));
        };
        if self.skips != number {
            return Err(ReceiveError::Behind(Some(self.skips)));
        }
        self.sections = Sections::behind(self.stream, (number, self.sum_there));
        (self.roots, self.root) = (state.roots.clone(), state.root);
        self.counts.items = state.items;
        self.check_roots(&staged, Some(&state))?;
        self.enter_stage(&staged, true)
    }

    fn look_at_stage(&mut self) -> Received<Staged> {
        let names = self.to.staged_names();
        Ok(Staged::of(names.map_err(|error| place(b"", error))?))
    }

    /// The state of the last checkpoint.
    fn last_checkpoint(&mut self, staged: &Staged) -> Received<Option<State>> {
        let Some((last, name)) = &staged.checkpoint else {
            return Ok(None);
        };
        let path = [&name[..], b"/state"].concat();
        let state = self.to.read(&path, STATE_BYTES_MAX);
        let state = State::decode(&state.map_err(|error| place(b"", error))?)?;
        (self.skips, self.checkpoint, self.sum_there) = (*last, Some(*last), state.sum);
        self.is_long = true;
        Ok(Some(state))
    }

    /// Refuses roots whose names are taken, or whose bases are missing. A root that a receiver
    /// before began needs no base.
    fn check_roots(&mut self, staged: &Staged, last: Option<&State>) -> Received {
        let begun = last.and_then(|state| state.root).map_or(0, |root| root + 1);
        let mut names = BTreeSet::new();
        if !self.roots.iter().all(|root| names.insert(&root.name)) {
            return Err(ReceiveError::Order("two roots of one name"));
        }
        self.names.trees = self.to.received().map_err(|error| place(b"", error))?;
        for (number, root) in self.roots.clone().iter().enumerate() {
            let found = self.to.look(&root.name);
            let found = found.map_err(|error| place(&root.name, error))?;
            let is_missing = |id: &StreamId| self.names.base(*id, None).is_none();
            if let Some(id) = root.base.filter(|id| number >= begun && is_missing(id)) {
                let name = root.name.clone();
                return Err(ReceiveError::NoBase { name, id });
            }
            if !self.names.has(root, staged.given.get(&number), found) {
                self.names.may_take(root, found)?;
            }
        }
        Ok(())
    }

    /// Makes the stage that of its last checkpoint, if there is one; else it is empty then.
    fn enter_stage(&mut self, staged: &Staged, has_checkpoint: bool) -> Received {
        let failed = |error| place(b"", error);
        (self.has_stage, self.is_mine) = (true, !has_checkpoint);
        let stage = stage_of(self.stream).into_bytes();
        for name in staged.passing() {
            let removed = self.to.remove(name);
            removed.map_err(|error| place(&[&stage[..], b"/", name].concat(), error))?;
        }
        let Some((last, at)) = &staged.checkpoint else {
            let made = self.to.make(b"now", NewObject::Directory);
            return made.map_err(failed);
        };
        self.counts.resumed_behind = *last;
        self.to.copy(b"now", at).map_err(failed)
    }

    fn make_checkpoint(&mut self) -> Received {
        let (number, sum) = self.sections.done();
        self.bytes_since = 0;
        if self.checkpoint == Some(number) {
            return Ok(());
        }
        let failed = |error| place(b"", error);
        let state = State {
            sum,
            items: self.counts.items,
            root: self.root,
            roots: self.roots.clone(),
        };
        let bytes = state.encode();
        let names = self.to.staged_names().map_err(failed)?;
        let made = match self.checkpoint {
            Some(_) => Ok(()),
            None => self.to.make(b"now/state", NewObject::File(0)),
        };
        let state = b"now/state";
        let len = bytes.len() as u64;
        made.and_then(|()| self.to.write(state, 0, &bytes))
            .and_then(|()| self.to.resize(state, len))
            .and_then(|()| self.to.copy(format!("at-{number}").as_bytes(), b"now"))
            .map_err(failed)?;
        for name in names.iter().filter(|name| name.starts_with(b"at-")) {
            self.to.remove(name).map_err(failed)?;
        }
        self.checkpoint = Some(number);
        Ok(())
    }

    fn apply_item(&mut self, item: &StreamItem<'_>) -> Received {
        let root = self.root.ok_or(ReceiveError::Order("no root"))?;
        let here = |path| path_of(&format!("now/{root}"), path);
        let near = match *item {
            StreamItem::Make { path, .. }
            | StreamItem::Link { path, .. }
            | StreamItem::Copy { path, .. }
            | StreamItem::Remove(path)
            | StreamItem::At(path) => here(path),
            _ => match &self.current {
                Some(current) => current.path.clone(),
                None => return Err(ReceiveError::Order("no current object")),
            },
        };
        if !self.takes(item)? {
            return Ok(());
        }
        let done = match *item {
            StreamItem::Make { object, .. } => self.to.make(&near, object),
            StreamItem::Link { first, .. } => self.to.link(&near, &here(first)),
            StreamItem::Copy {
                from, from_path, ..
            } => {
                let source = self.source_of(root, from, from_path)?;
                let is_inside = near == source || near.starts_with(&[&source[..], b"/"].concat());
                if is_inside {
                    return Err(ReceiveError::Order("a copy into itself"));
                }
                self.to.copy(&near, &source)
            }
            StreamItem::Remove(_) => self.to.remove(&near),
            StreamItem::At(_) => Ok(()),
            StreamItem::Data { offset, bytes } => self.to.write(&near, offset, bytes),
            StreamItem::Hole { offset, len } => self.to.punch(&near, offset, len),
            StreamItem::Size(bytes) => self.to.resize(&near, bytes),
            StreamItem::Attributes(attributes) => self.to.set_attributes(&near, &attributes),
            StreamItem::Flags(flags) => self.to.set_flags(&near, flags),
            StreamItem::Xattr { name, value } => {
                let set = self.to.set_xattr(&near, name, value);
                set.map(|is_set| self.counts.refused_xattrs += u64::from(!is_set))
            }
            StreamItem::NoXattr(name) => self.to.remove_xattr(&near, name),
            StreamItem::Root { .. } | StreamItem::Begin(_) | StreamItem::End(_) => Ok(()),
        };
        done.map_err(|error| self.place_of(&near, error))?;
        self.current = match *item {
            StreamItem::Link { .. } | StreamItem::Remove(_) => None,
            StreamItem::Make { object, .. } => Some(Current {
                path: near,
                kind: Some(kind_of(object)),
            }),
            StreamItem::At(_) | StreamItem::Copy { .. } => Some(Current {
                path: near,
                kind: None,
            }),
            _ => return Ok(()),
        };
        Ok(())
    }

    /// Refuses contents of an object that has none: the bytes would go to a device. Answers whether
    /// the object takes the item: streams of version 0.1 may have flags of objects that take none.
    fn takes(&mut self, item: &StreamItem<'_>) -> Received<bool> {
        let is_of_files = match item {
            StreamItem::Data { .. } | StreamItem::Hole { .. } | StreamItem::Size(_) => true,
            StreamItem::Flags(_) => false,
            _ => return Ok(true),
        };
        let Some(current) = &mut self.current else {
            return Err(ReceiveError::Order("no current object"));
        };
        let kind = match current.kind {
            Some(kind) => Ok(kind),
            None => self.to.status(&current.path).map(|found| found.kind),
        };
        current.kind = kind.as_ref().ok().copied();
        match kind {
            Ok(Kind::Regular) => Ok(true),
            Ok(Kind::Directory) if !is_of_files => Ok(true),
            Ok(_) if is_of_files => Err(ReceiveError::Order("contents of an object without any")),
            Ok(_) => Ok(false),
            Err(error) => {
                let path = current.path.clone();
                Err(self.place_of(&path, error))
            }
        }
    }

    /// Path in the stage of the object that is copied.
    fn source_of(&mut self, root: usize, from: CopyFrom, path: &[u8]) -> Received<Vec<u8>> {
        match from {
            CopyFrom::Root(number) if number as usize <= root => {
                Ok(path_of(&format!("now/{number}"), path))
            }
            CopyFrom::Root(_) => Err(ReceiveError::Order("a copy of a root to come")),
            CopyFrom::Base => {
                let top = format!("now/base-{root}");
                let id = self.roots[root].base;
                let id = id.ok_or(ReceiveError::Order("a copy of a base that is none"))?;
                if !self.has_base_copy {
                    self.copy_base_once(root, top.as_bytes(), id)?;
                }
                Ok(path_of(&top, path))
            }
        }
    }

    /// Makes the copy of the base, unless a checkpoint has it.
    fn copy_base_once(&mut self, root: usize, top: &[u8], id: StreamId) -> Received {
        self.has_base_copy = true;
        match self.copy_base(root, top, id) {
            Err(ReceiveError::Place { error, .. })
                if error.kind() == io::ErrorKind::AlreadyExists =>
            {
                Ok(())
            }
            copied => copied,
        }
    }

    /// Clones the base of a root: that of the tree with its name, if that is of the same identity.
    fn copy_base(&mut self, root: usize, path: &[u8], id: StreamId) -> Received {
        let name = self.roots[root].name.clone();
        let failed = |error| place(&name, error);
        let here = self.to.look(&name).map_err(failed)?;
        let copied = match self.names.base(id, here) {
            Some(base) => self.to.copy_base(path, &base),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        match copied {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(ReceiveError::NoBase { name, id })
            }
            copied => copied.map_err(failed),
        }
    }

    /// The error of a place in the stage, by the path that a user knows.
    fn place_of(&self, path: &[u8], error: io::Error) -> ReceiveError {
        let below = path.splitn(3, |&byte| byte == b'/').nth(2);
        let root = self.root.and_then(|root| self.roots.get(root));
        let name = root.map_or(&b""[..], |root| &root.name);
        let shown = match below {
            Some(below) => [name, b"/", below].concat(),
            None => name.to_vec(),
        };
        place(&shown, error)
    }
}

/// Path in the stage of a path in the tree at `top`.
fn path_of(top: &str, path: &[u8]) -> Vec<u8> {
    match path {
        b"" => top.as_bytes().to_vec(),
        path => [top.as_bytes(), b"/", path].concat(),
    }
}

fn kind_of(object: NewObject<'_>) -> Kind {
    match object {
        NewObject::Directory => Kind::Directory,
        NewObject::File(_) => Kind::Regular,
        NewObject::Symlink(_) => Kind::Symlink,
        NewObject::Special(kind, _) => kind,
    }
}
