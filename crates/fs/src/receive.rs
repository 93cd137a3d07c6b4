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
//!                      /out           a root that is about to get its name
//! ```
//!
//! A received tree is a fork without an origin of its own (`ops/fork.rs`): its base is the tree as it
//! came, and its note tells the identity of that. So a later increment is made of the base, however
//! the tree was changed, and `ramet forks` tells whether it was.
//!
//! No byte of a stream is trusted: names are single names, and all places lie below the stage.

mod destination;
mod in_volume;

use std::collections::BTreeSet;
use std::io;

use ramet_block::{Reader, Writer};
use thiserror::Error;

use crate::format::record::Kind;
use crate::format::stream::{
    CopyFrom, NewObject, SECTION_HEAD_BYTES, SectionHead, Sections, StreamId, StreamItem,
    StreamItems,
};

pub use destination::{Destination, Presence, note_of_received};
pub use in_volume::InVolume;

/// Bytes of items between two checkpoints.
const CHECKPOINT_BYTES: usize = 64 << 20;
/// Roots of a stream, at most.
const ROOTS_MAX: usize = 65536;
/// Longest state of a checkpoint, in bytes.
const STATE_BYTES_MAX: u64 = 32 << 20;
/// Beginning of the name of a stage.
const STAGE: &str = ".ramet-receive-";

/// The reason for which a stream is not received. After a truncated stream, and after a refusal of the
/// destination, another receiver goes on from the last checkpoint.
#[derive(Debug, Error)]
pub enum ReceiveError {
    /// The bytes are no stream, or a damaged one.
    #[error("the stream cannot be read: {0}")]
    Stream(#[from] crate::Error),
    /// Items that make no sense one after the other.
    #[error("the stream makes no sense: {0}")]
    Order(&'static str),
    /// The stream is not whole.
    #[error("the stream ends early, behind section {0}")]
    Truncated(u64),
    /// The destination refuses.
    #[error("{}: {error}", String::from_utf8_lossy(.path))]
    Place {
        /// Root and path in it.
        path: Vec<u8>,
        /// The reason.
        error: io::Error,
    },
    /// A name is taken.
    #[error("{}: already exists: --replace replaces it", String::from_utf8_lossy(.0))]
    Exists(Vec<u8>),
    /// The tree that a root is made of is not there.
    #[error(
        "{}: made of the tree {id}, which was not received here (or was removed since): send it \
         without --from, or from another base",
        String::from_utf8_lossy(.name)
    )]
    NoBase {
        /// The root.
        name: Vec<u8>,
        /// The tree.
        id: StreamId,
    },
}

type Received<T = ()> = std::result::Result<T, ReceiveError>;

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

/// A root of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Root {
    name: Vec<u8>,
    id: StreamId,
    base: Option<StreamId>,
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
    /// Trees of the same names are replaced.
    replaces: bool,
    sections: Sections,
    roots: Vec<Root>,
    /// The root that is being received.
    root: Option<usize>,
    has_base_copy: bool,
    current: Option<Current>,
    counts: ReceiveCounts,
    has_stage: bool,
    /// Items up to this section are in the checkpoint that the receiver began with.
    skips: u64,
    /// The checksum of that section.
    sum_there: u64,
    checkpoint: Option<u64>,
    bytes_since: usize,
    checkpoint_bytes: usize,
    is_whole: bool,
}

impl<D: Destination> Receiver<D> {
    /// A receiver of this stream. Directories of the names of its roots are replaced if it
    /// `replaces`.
    pub fn new(to: D, stream: StreamId, replaces: bool) -> Self {
        Self {
            to,
            stream,
            replaces,
            sections: Sections::of(stream),
            roots: Vec::new(),
            root: None,
            has_base_copy: false,
            current: None,
            counts: ReceiveCounts::default(),
            has_stage: false,
            skips: 0,
            sum_there: 0,
            checkpoint: None,
            bytes_since: 0,
            checkpoint_bytes: CHECKPOINT_BYTES,
            is_whole: false,
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

    /// The section behind which another receiver would go on, if there is a checkpoint.
    #[must_use]
    pub fn checkpoint(&self) -> Option<u64> {
        self.checkpoint
    }

    /// The names of the roots.
    pub fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.roots.iter().map(|root| &root.name[..])
    }

    /// Takes a section. The first one may be the one behind a checkpoint.
    ///
    /// # Errors
    /// See [`ReceiveError`]. The receiver cannot go on then; another one goes on from the last
    /// checkpoint.
    pub fn take(&mut self, head: &[u8; SECTION_HEAD_BYTES], stored: &[u8]) -> Received {
        let found = SectionHead::decode(head)?;
        if self.is_whole {
            return Err(ReceiveError::Order("a section behind the last one"));
        }
        if self.section() == 0 && found.number > 1 {
            self.resume_behind(found.number - 1)?;
        }
        let items = self.sections.open((head, &found), stored)?;
        self.apply(&items)?;
        if self.sections.done().0 == self.skips && self.sections.done().1 != self.sum_there {
            return Err(ReceiveError::Order(
                "it is not the stream that was begun here, though it is of the same trees",
            ));
        }
        self.bytes_since += items.len();
        if found.is_last && !self.is_whole {
            return Err(ReceiveError::Order("the last section has no end"));
        }
        let is_new = found.number > self.skips && self.has_stage;
        if is_new && !found.is_last && self.bytes_since >= self.checkpoint_bytes {
            self.make_checkpoint()?;
        }
        Ok(())
    }

    /// Gives the trees their names, once the stream is whole, and makes them durable.
    ///
    /// # Errors
    /// See [`ReceiveError`].
    pub fn finish(&mut self) -> Received<ReceiveCounts> {
        if !self.is_whole {
            return Err(ReceiveError::Truncated(self.section()));
        }
        self.make_checkpoint()?;
        for number in 0..self.roots.len() {
            self.publish(number)?;
        }
        let done = self.to.drop_stage().and_then(|()| self.to.sync());
        done.map_err(|error| place(b"", error))?;
        self.has_stage = false;
        Ok(self.counts)
    }

    /// Removes everything of a stream that is not received, but for trees that have their names.
    ///
    /// # Errors
    /// See [`ReceiveError`].
    pub fn discard(mut self) -> Received {
        if !self.has_stage {
            return Ok(());
        }
        let done = self.to.drop_stage().and_then(|()| self.to.sync());
        done.map_err(|error| place(b"", error))
    }

    fn publish(&mut self, number: usize) -> Received {
        let root = self.roots[number].clone();
        let failed = |error| place(&root.name, error);
        let presence = self.to.presence(&root.name).map_err(failed)?;
        let exchanges = match presence {
            Presence::Free => false,
            // A receiver before was killed behind this name.
            Presence::Received(id) if id == root.id && self.counts.resumed_behind > 0 => {
                return Ok(());
            }
            _ if self.replaces => true,
            _ => return Err(ReceiveError::Exists(root.name)),
        };
        let staged = self.to.staged_names().map_err(failed)?;
        if staged.iter().any(|name| name == b"out") {
            self.to.remove(b"out").map_err(failed)?;
        }
        let from = format!("now/{number}").into_bytes();
        let note = note_of_received(root.id);
        self.to.fork(b"out", &from, &note).map_err(failed)?;
        self.to
            .publish(b"out", &root.name, exchanges)
            .map_err(failed)
    }

    fn apply(&mut self, items: &[u8]) -> Received {
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
                StreamItem::Begin(number) => self.begin_root(number as usize)?,
                _ if self.root.is_none() => {
                    return Err(ReceiveError::Order("an object of no root"));
                }
                item if self.is_skipped() => self.count(&item),
                item => {
                    self.count(&item);
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

    fn count(&mut self, item: &StreamItem<'_>) {
        let counts = &mut self.counts;
        match item {
            StreamItem::Make {
                object: NewObject::Directory,
                ..
            } => counts.directories += 1,
            StreamItem::Make { .. } | StreamItem::Link { .. } => counts.files += 1,
            StreamItem::Copy { .. } => counts.copies += 1,
            StreamItem::Remove(_) => counts.removed += 1,
            StreamItem::Data { bytes, .. } => counts.bytes += bytes.len() as u64,
            _ => {}
        }
    }

    fn add_root(&mut self, root: Root) -> Received {
        if self.root.is_some() || self.roots.len() >= ROOTS_MAX {
            return Err(ReceiveError::Order("a root too many"));
        }
        self.roots.push(root);
        Ok(())
    }

    /// Begins the next root. With the first one the stage is opened: before that, nothing is changed
    /// and everything is looked at that may be missing.
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
                let copied = self.to.copy_base(&path, id);
                copied.map_err(|error| place(&root.name, error))
            }
            _ => Ok(()),
        }
    }

    fn stage_name(&self) -> String {
        format!("{STAGE}{}", self.stream)
    }

    fn open_stage(&mut self) -> Received {
        let name = self.stage_name();
        let failed = |error| place(name.as_bytes(), error);
        let is_there = self.to.open_stage(&name, false).map_err(failed)?;
        let mut names = BTreeSet::new();
        for root in &self.roots {
            let failed = |error| place(&root.name, error);
            if !names.insert(&root.name) {
                return Err(ReceiveError::Order("two roots of one name"));
            }
            match self.to.presence(&root.name).map_err(failed)? {
                Presence::Free => {}
                Presence::Received(id) if is_there && id == root.id => {}
                _ if self.replaces => {}
                _ => return Err(ReceiveError::Exists(root.name.clone())),
            }
            if let Some(id) = root.base
                && !self.to.has_base(id).map_err(failed)?
            {
                let name = root.name.clone();
                return Err(ReceiveError::NoBase { name, id });
            }
        }
        if !is_there {
            self.to.open_stage(&name, true).map_err(failed)?;
        }
        self.has_stage = true;
        if self.load_checkpoint()?.is_none() {
            let made = self.to.make(b"now", NewObject::Directory);
            made.map_err(failed)?;
        }
        Ok(())
    }

    /// Goes on behind a section that a receiver before has reached: this stream begins behind it.
    fn resume_behind(&mut self, number: u64) -> Received {
        let name = self.stage_name();
        let failed = |error| place(name.as_bytes(), error);
        let missing = ReceiveError::Order(
            "it does not begin with its first section, and the sections before were not received",
        );
        if !self.to.open_stage(&name, false).map_err(failed)? {
            return Err(missing);
        }
        self.has_stage = true;
        match self.load_checkpoint()? {
            Some((state, sum)) if self.skips == number => {
                self.sections = Sections::behind(self.stream, (number, sum));
                (self.roots, self.root) = (state.roots, state.root);
                self.counts.items = state.items;
                Ok(())
            }
            _ => Err(missing),
        }
    }

    /// Makes the stage that of the last checkpoint, if there is one; else it is empty then.
    fn load_checkpoint(&mut self) -> Received<Option<(State, u64)>> {
        let failed = |error| place(b"", error);
        let names = self.to.staged_names().map_err(failed)?;
        let number = |name: &Vec<u8>| -> Option<u64> {
            let name = std::str::from_utf8(name).ok()?;
            name.strip_prefix("at-")?.parse().ok()
        };
        let last = names.iter().filter_map(number).max();
        for name in &names {
            if number(name).is_none() || number(name) != last {
                self.to.remove(name).map_err(failed)?;
            }
        }
        let Some(last) = last else {
            return Ok(None);
        };
        let at = format!("at-{last}").into_bytes();
        self.to.copy(b"now", &at).map_err(failed)?;
        let state = self.to.read(b"now/state", STATE_BYTES_MAX);
        let (state, sum) = State::decode(&state.map_err(failed)?)?;
        (self.skips, self.checkpoint, self.sum_there) = (last, Some(last), sum);
        self.counts.resumed_behind = last;
        Ok(Some((state, sum)))
    }

    fn make_checkpoint(&mut self) -> Received {
        let (number, sum) = self.sections.done();
        self.bytes_since = 0;
        if self.checkpoint == Some(number) {
            return Ok(());
        }
        let failed = |error| place(b"", error);
        let state = State {
            items: self.counts.items,
            root: self.root,
            roots: self.roots.clone(),
        };
        let bytes = state.encode(sum);
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

    /// Path in the stage of a path in a root.
    fn path(&self, number: usize, path: &[u8]) -> Vec<u8> {
        let top = format!("now/{number}").into_bytes();
        match path {
            b"" => top,
            path => [&top[..], b"/", path].concat(),
        }
    }

    fn apply_item(&mut self, item: &StreamItem<'_>) -> Received {
        let root = self.root.ok_or(ReceiveError::Order("no root"))?;
        let here = |receiver: &Self, path: &[u8]| receiver.path(root, path);
        let near = match *item {
            StreamItem::Make { path, .. }
            | StreamItem::Link { path, .. }
            | StreamItem::Copy { path, .. }
            | StreamItem::Remove(path)
            | StreamItem::At(path) => here(self, path),
            _ => match &self.current {
                Some(current) => current.path.clone(),
                None => return Err(ReceiveError::Order("no current object")),
            },
        };
        self.check_kind(item)?;
        let done = match *item {
            StreamItem::Make { object, .. } => self.to.make(&near, object),
            StreamItem::Link { first, .. } => self.to.link(&near, &here(self, first)),
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

    /// Refuses contents of an object that has none: the bytes would go to a device.
    fn check_kind(&mut self, item: &StreamItem<'_>) -> Received {
        let is_of_files = match item {
            StreamItem::Data { .. } | StreamItem::Hole { .. } | StreamItem::Size(_) => true,
            StreamItem::Flags(_) => false,
            _ => return Ok(()),
        };
        let Some(current) = &mut self.current else {
            return Err(ReceiveError::Order("no current object"));
        };
        let kind = match current.kind {
            Some(kind) => Ok(kind),
            None => self.to.kind(&current.path),
        };
        current.kind = kind.as_ref().ok().copied();
        match kind {
            Ok(Kind::Regular) => Ok(()),
            Ok(Kind::Directory) if !is_of_files => Ok(()),
            Ok(_) if is_of_files => Err(ReceiveError::Order("contents of an object without any")),
            Ok(_) => Err(ReceiveError::Order("flags of an object without any")),
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
                Ok(self.path(number as usize, path))
            }
            CopyFrom::Root(_) => Err(ReceiveError::Order("a copy of a root to come")),
            CopyFrom::Base => {
                let top = format!("now/base-{root}").into_bytes();
                let id = self.roots[root].base;
                let id = id.ok_or(ReceiveError::Order("a copy of a base that is none"))?;
                if !self.has_base_copy {
                    self.copy_base_once(&top, id)?;
                }
                Ok(match path {
                    b"" => top,
                    path => [&top[..], b"/", path].concat(),
                })
            }
        }
    }

    /// Makes the copy of the base, unless a checkpoint has it.
    fn copy_base_once(&mut self, top: &[u8], id: StreamId) -> Received {
        let copied = match self.to.copy_base(top, id) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            copied => copied,
        };
        self.has_base_copy = true;
        copied.map_err(|error| self.place_of(top, error))
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

fn kind_of(object: NewObject<'_>) -> Kind {
    match object {
        NewObject::Directory => Kind::Directory,
        NewObject::File(_) => Kind::Regular,
        NewObject::Symlink(_) => Kind::Symlink,
        NewObject::Special(kind, _) => kind,
    }
}

fn place(path: &[u8], error: io::Error) -> ReceiveError {
    ReceiveError::Place {
        path: path.to_vec(),
        error,
    }
}

/// The state of a receiver at a checkpoint.
#[derive(Debug, PartialEq, Eq)]
struct State {
    items: u64,
    root: Option<usize>,
    roots: Vec<Root>,
}

impl State {
    /// The bytes of the state behind the section with this checksum.
    fn encode(&self, sum: u64) -> Vec<u8> {
        let mut w = Writer::new();
        w.u64(sum);
        w.u64(self.items);
        w.u64(self.root.map_or(0, |root| root as u64 + 1));
        for root in &self.roots {
            let (name, id, base) = (&root.name[..], root.id, root.base);
            StreamItem::Root { name, id, base }.encode(&mut w);
        }
        w.into_vec()
    }

    fn decode(bytes: &[u8]) -> Received<(Self, u64)> {
        const DAMAGED: ReceiveError = ReceiveError::Order("the state of the stage is damaged");
        let mut r = Reader::new(bytes);
        let mut number = || r.u64().map_err(|_| DAMAGED);
        let (sum, items, root) = (number()?, number()?, number()?);
        let mut rest = StreamItems::new(bytes.get(24..).unwrap_or_default());
        let mut roots = Vec::new();
        while let Some(item) = rest.next_item()? {
            let StreamItem::Root { name, id, base } = item else {
                return Err(DAMAGED);
            };
            let name = name.to_vec();
            roots.push(Root { name, id, base });
        }
        let root = root.checked_sub(1).map(|root| root as usize);
        if root.is_some_and(|root| root >= roots.len()) {
            return Err(DAMAGED);
        }
        Ok((Self { items, root, roots }, sum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_comes_back_and_notes_tell_trees() {
        let root = |name: &[u8], base| Root {
            name: name.to_vec(),
            id: StreamId([1; 16]),
            base,
        };
        let state = State {
            items: 70,
            root: Some(1),
            roots: vec![root(b"a", None), root(b"b", Some(StreamId([2; 16])))],
        };
        let bytes = state.encode(9);
        assert_eq!(State::decode(&bytes).unwrap(), (state, 9));
        assert!(State::decode(&bytes[..bytes.len() - 1]).is_err());
        assert!(State::decode(&bytes[..10]).is_err());
        let id = StreamId(*b"0123456789abcdef");
        let note = note_of_received(id);
        assert_eq!(note, "received 30313233343536373839616263646566");
        assert_eq!(Presence::of_note(&note), Presence::Received(id));
        assert_eq!(Presence::of_note("received by mail"), Presence::Taken);
    }
}
