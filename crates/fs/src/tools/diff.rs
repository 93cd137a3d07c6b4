//! The names that differ between two directory trees, at the cost of the differences.
//!
//! The tree tells which keys differ between the ranges of the two directories
//! ([`Snapshot::diff_range`], which reads no node that clones share). Those keys only point at
//! *candidates*: each is looked up on both sides and compared as a user sees it. So some
//! differences do not count: inode numbers, slots, link counts, times of access, change and birth,
//! times of directories, how a file is stored, and the clone root of a shared inode.
//!
//! - A name that only one side has stands for everything below it, which is left out unread.
//! - The keys of a shared inode lead to its names, through the link index of its clone root.
//! - The shared inodes of a directory that is no clone root may be outside of it. Their keys are
//!   then not in its range, so all link entries below it are candidates: the one cost that does not
//!   follow the differences, as with clones.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use ramet_betree::{Diff, Snapshot, Span, successor_of_prefix};
use ramet_block::{Budget, Held, Use};

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::blocks::trimmed;
use crate::format::ino::Ino;
use crate::format::keys::{self, Part};
use crate::format::record::{Entry, FLAG_XATTRS, Kind, Record};
use crate::namespace::inode::Inode;
use crate::namespace::resolve::Namespace;
use crate::namespace::topology::Topology;
use crate::ops::then::{Roots, Then};

/// Longest encoded comparison, in bytes; a longer one is refused.
pub const DIFF_BYTES_MAX: usize = 256 << 20;
/// Comparisons under way take this part of the memory budget at most, with the buffers of requests.
const BUDGET_PART: u64 = 2;
/// Memory of a path in a set, and of a difference, beside the bytes of names.
const PATH_BYTES: usize = 80;
const DIFFERENCE_BYTES: usize = 200;

/// How a name differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Only the second tree has it.
    Added,
    /// Only the first tree has it.
    Removed,
    /// The name leads to another kind of object in the second tree: a file here, a directory there.
    Kind,
    /// Both have it.
    Both {
        /// The data of a file or the target of a symbolic link differs.
        content: bool,
        /// Mode, owner, extended attributes, device number, or the time of modification of anything
        /// but a directory differs.
        metadata: bool,
    },
}

impl Change {
    /// The words for it.
    #[must_use]
    pub fn words(self) -> &'static [&'static str] {
        match self {
            Self::Added => &["added"],
            Self::Removed => &["removed"],
            Self::Kind => &["type"],
            Self::Both {
                content: true,
                metadata: false,
            } => &["content"],
            Self::Both { content: false, .. } => &["metadata"],
            Self::Both { .. } => &["content", "metadata"],
        }
    }
}

/// A name that differs between two trees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Names on the way from the top, joined by `/`; empty for the top itself.
    pub path: Vec<u8>,
    /// How it differs.
    pub change: Change,
    /// Whether the object is a directory, in the second tree unless it is removed. An added or
    /// removed directory stands for everything in it.
    pub is_dir: bool,
}

/// One of the trees that are compared.
#[derive(Clone)]
pub(crate) struct Side {
    pub(crate) snapshot: Snapshot,
    pub(crate) path: Bytes,
    /// The clone root that the directory is, or is in.
    pub(crate) roots: Roots,
    pub(crate) record: Record,
}

/// The object of a name: its record, and the path of its contents and attributes.
#[derive(Clone)]
pub(crate) struct Object {
    pub(crate) record: Record,
    pub(crate) path: Bytes,
    /// It is a shared inode, and may have other names.
    pub(crate) is_shared: bool,
}

impl Object {
    /// Whether it has other names too.
    pub(crate) fn has_other_names(&self) -> bool {
        self.is_shared && self.record.nlink > 1
    }
}

struct Comparison {
    sides: [Side; 2],
    /// Both are in one tree: equal paths are of one object.
    is_one_tree: bool,
    /// Differences, by path relative to the top.
    found: BTreeMap<Bytes, Difference>,
    /// Objects that only one side has, or of different kinds: nothing below them is compared.
    whole: BTreeSet<Bytes>,
    candidates: BTreeSet<Bytes>,
    /// Shared inodes that may differ, by the path of their clone root relative to the top.
    shared: BTreeMap<Bytes, BTreeSet<u64>>,
    /// Bytes of the answer.
    bytes: usize,
    /// Names that lead to objects of one kind with different births, where these are looked for.
    reborn: Option<Vec<Bytes>>,
    /// Memory of all these.
    memory: Memory,
}

/// The memory of a comparison.
struct Memory {
    held: Held,
    /// The most that it takes, if other requests do not count.
    bytes_max: Option<u64>,
}

impl Memory {
    /// Memory that has a part of the budget with that of other requests.
    fn part_of(budget: &Arc<Budget>) -> Self {
        Self {
            held: Held::new(budget, Use::Requests),
            bytes_max: None,
        }
    }

    /// Tells the budget of `bytes` more.
    fn hold(&mut self, bytes: usize) -> Result<()> {
        let fits = match self.bytes_max {
            Some(bytes_max) => self.held.add_within(bytes as u64, bytes_max),
            None => self.held.add(bytes as u64, BUDGET_PART),
        };
        if fits { Ok(()) } else { Err(Error::Range) }
    }

    /// Inserts a path, and tells the budget when it is new.
    fn hold_path(&mut self, paths: &mut BTreeSet<Bytes>, path: Bytes) -> Result<()> {
        let bytes = path.len() + PATH_BYTES;
        if paths.insert(path) {
            self.hold(bytes)?;
        }
        Ok(())
    }
}

/// The differences of two trees, with the memory that they take.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) differences: Vec<Difference>,
    /// Names that lead to objects of one kind with different births: of [`diff_with_births`].
    pub(crate) reborn: Vec<Bytes>,
    pub(crate) held: Held,
}

impl Found {
    /// No differences.
    pub(crate) fn none(budget: &Arc<Budget>) -> Self {
        Self {
            differences: Vec::new(),
            reborn: Vec::new(),
            held: Held::new(budget, Use::Requests),
        }
    }
}

/// The names that differ between the trees of two directories, in the order of directories before
/// their entries, as of one moment.
///
/// # Errors
/// `NotDirectory`, `NotFound`, `Range` when the answer is longer than [`DIFF_BYTES_MAX`] or takes
/// more than its part of the memory budget.
pub(crate) fn diff(namespace: &Namespace, a: Ino, b: Ino) -> Result<Found> {
    let dirs = [namespace.dir(a)?, namespace.dir(b)?];
    let budget = namespace.tree.budget();
    if a == b {
        return Ok(Found::none(budget));
    }
    let [a, b] = live_sides(namespace, [&dirs[0], &dirs[1]])?;
    diff_sides(budget, [&a, &b], true)
}

/// The trees of two directories as of one moment.
///
/// # Errors
/// `NotFound` for a directory that is gone, and those of the tree.
pub(crate) fn live_sides<const N: usize>(
    namespace: &Namespace,
    dirs: [&Arc<Inode>; N],
) -> Result<[Side; N]> {
    let sides = live_sides_of(namespace, &dirs)?;
    Ok(sides
        .try_into()
        .unwrap_or_else(|_| unreachable!("one side for each directory")))
}

/// The trees of any number of directories as of one moment.
///
/// # Errors
/// As [`live_sides`].
pub(crate) fn live_sides_of(namespace: &Namespace, dirs: &[&Arc<Inode>]) -> Result<Vec<Side>> {
    let topology = namespace.topology.read();
    let snapshot = namespace.tree.snapshot();
    let side = |dir: &Arc<Inode>| -> Result<Side> {
        let at = topology.record_at(&dir.location.read().clone())?;
        let value = snapshot.get(&at.ok_or(Error::Stale)?)?;
        let Entry::Inode(record) = Entry::decode(&value.ok_or(Error::Stale)?)? else {
            return Err(Error::Stale);
        };
        Ok(Side {
            snapshot: snapshot.clone(),
            path: topology.dir_path(dir)?.path,
            roots: live_roots(namespace, &topology, dir)?,
            record,
        })
    };
    let sides = dirs.iter().map(|dir| side(dir).map_err(gone_is_not_found));
    sides.collect()
}

/// The clone root of a directory of today.
fn live_roots(namespace: &Namespace, topology: &Topology, dir: &Arc<Inode>) -> Result<Roots> {
    let mut root = topology.clone_root(dir)?;
    let mut roots = Roots::of(topology.dir_path(&root)?.path);
    while root.is_joining.load(Ordering::SeqCst) {
        let parent = namespace.parent(&root);
        // One that was removed is joined to none.
        if Arc::ptr_eq(&parent, &root) {
            break;
        }
        root = topology.clone_root(&parent)?;
        roots.add_outer(topology.dir_path(&root)?.path);
    }
    Ok(roots)
}

/// The differences of two trees. With `is_one_tree`, equal paths are of one object.
///
/// # Errors
/// As [`diff`].
pub(crate) fn diff_sides(
    budget: &Arc<Budget>,
    sides: [&Side; 2],
    is_one_tree: bool,
) -> Result<Found> {
    Comparison::new(
        sides.map(Clone::clone),
        is_one_tree,
        Memory::part_of(budget),
    )
    .find()
}

/// The differences of two trees, with the names whose objects are others although they may look
/// alike.
///
/// # Errors
/// As [`diff`].
pub(crate) fn diff_with_births(budget: &Arc<Budget>, sides: [&Side; 2]) -> Result<Found> {
    let mut comparison = Comparison::new(sides.map(Clone::clone), false, Memory::part_of(budget));
    comparison.reborn = Some(Vec::new());
    comparison.find()
}

/// The differences between two objects of one kind, each in a tree of its own, of one volume. An
/// object that is no directory is told by the empty path.
///
/// # Errors
/// `Range` as [`diff`], and those of the tree.
pub(crate) fn diff_then(budget: &Arc<Budget>, sides: [(&Snapshot, &Then); 2]) -> Result<Found> {
    let [a, b] = sides.map(|(snapshot, then)| Side::of_then(snapshot, then));
    diff_sides(budget, [&a, &b], false)
}

/// The names that may differ between two trees: each is at or above a key that does.
pub(crate) struct Suspects {
    /// Names that only one side has, or that lead to objects of different kinds. Each stands for
    /// everything below it.
    pub(crate) whole: BTreeMap<Bytes, Change>,
    /// Names that both have.
    pub(crate) candidates: BTreeSet<Bytes>,
    /// Memory of both.
    pub(crate) held: Held,
}

/// The names that may differ between the trees of two directories, within `bytes_max` of memory.
///
/// # Errors
/// `Range` when they take more, and those of the tree.
pub(crate) fn suspects(
    budget: &Arc<Budget>,
    sides: [&Side; 2],
    bytes_max: u64,
) -> Result<Suspects> {
    let memory = Memory {
        held: Held::new(budget, Use::Requests),
        bytes_max: Some(bytes_max),
    };
    let mut comparison = Comparison::new(sides.map(Clone::clone), false, memory);
    comparison.collect()?;
    let candidates = std::mem::take(&mut comparison.candidates);
    let below_none = |object: &Bytes| comparison.whole_above(object).is_none();
    let candidates = candidates.into_iter().filter(below_none).collect();
    let found = std::mem::take(&mut comparison.found).into_iter();
    Ok(Suspects {
        whole: found
            .map(|(object, found)| (object, found.change))
            .collect(),
        candidates,
        held: comparison.memory.held,
    })
}

impl Side {
    /// The tree of an object that no live name leads to.
    pub(crate) fn of_then(snapshot: &Snapshot, then: &Then) -> Self {
        Self {
            snapshot: snapshot.clone(),
            path: then.path.clone(),
            roots: then.roots.clone(),
            record: then.record.clone(),
        }
    }

    /// The tree of a directory below the top.
    pub(crate) fn below(&self, object: &[u8], dir: &Object) -> Result<Self> {
        let mut roots = self.roots_of(object)?;
        roots.enter(dir.path.clone(), &dir.record);
        Ok(Self {
            snapshot: self.snapshot.clone(),
            path: dir.path.clone(),
            roots,
            record: dir.record.clone(),
        })
    }

    pub(crate) fn at(&self, object: &[u8]) -> Bytes {
        [&self.path, object].concat().into()
    }

    pub(crate) fn entry(&self, object: &[u8]) -> Result<Option<Entry>> {
        let (dir, name) = keys::split_child(object).ok_or(Error::Stale)?;
        let value = self.snapshot.get(&keys::entry(&self.at(dir), name))?;
        let entry = value.map(|value| Entry::decode(&value)).transpose()?;
        Ok(entry.filter(|entry| !matches!(entry, Entry::Deleted(_))))
    }

    /// The object that a path from the top leads to.
    pub(crate) fn object(&self, object: &[u8]) -> Result<Option<Object>> {
        if object.is_empty() {
            return Ok(Some(Object {
                record: self.record.clone(),
                path: self.path.clone(),
                is_shared: false,
            }));
        }
        let path = self.at(object);
        let link_entry = match self.entry(object)? {
            None | Some(Entry::Deleted(_)) => return Ok(None),
            Some(Entry::Inode(record)) => {
                return Ok(Some(Object {
                    record,
                    path,
                    is_shared: false,
                }));
            }
            Some(Entry::Link(link_entry)) => link_entry,
        };
        let roots = self.roots_of(object)?;
        let root = roots.of_link(&self.snapshot, link_entry.link)?;
        let path = keys::shared_inode(root, link_entry.link);
        let missing = || Error::Corrupt {
            what: "hard link",
            detail: format!("shared {} is missing", link_entry.link),
        };
        let value = self.snapshot.get(&keys::shared_record(&path))?;
        match Entry::decode(&value.ok_or_else(missing)?)? {
            Entry::Inode(record) => Ok(Some(Object {
                record,
                path,
                is_shared: true,
            })),
            Entry::Link(_) | Entry::Deleted(_) => Err(missing()),
        }
    }

    /// The keys with these prefixes that differ between this tree and another one.
    pub(crate) fn diff(&self, a: Bytes, other: &Self, b: Bytes) -> Result<Diff> {
        let (a, b) = (Span::prefix(a), Span::prefix(b));
        Ok(self.snapshot.diff_range(&a, &other.snapshot, &b)?)
    }

    /// Whether the data of a file differ from those of a file of another tree.
    pub(crate) fn data_differs(&self, a: &Object, (other, b): (&Self, &Object)) -> Result<bool> {
        if a.record.size_bytes != b.record.size_bytes {
            return Ok(true);
        }
        for item in self.diff(keys::blocks(&a.path), other, keys::blocks(&b.path))? {
            let item = item?;
            if trimmed(item.before.as_ref()) != trimmed(item.after.as_ref()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether the extended attributes of an object differ from those of an object of another tree.
    pub(crate) fn xattrs_differ(&self, a: &Object, b: (&Self, &Object)) -> Result<bool> {
        if ![a, b.1].iter().any(|one| one.record.has(FLAG_XATTRS)) {
            return Ok(false);
        }
        let mut diff = self.diff_xattrs(a, b)?;
        Ok(diff.next().transpose()?.is_some())
    }

    /// The extended attributes of an object that differ from those of an object of another tree, by
    /// their names.
    pub(crate) fn diff_xattrs(&self, a: &Object, (other, b): (&Self, &Object)) -> Result<Diff> {
        let prefixes = [a, b].map(|object| keys::xattr(&object.path, b""));
        let [before, after] = prefixes;
        self.diff(before, other, after)
    }

    /// The clone root that has the shared inodes of names beside `object`.
    pub(crate) fn roots_of(&self, object: &[u8]) -> Result<Roots> {
        let (dir, _) = keys::split_child(object).unwrap_or_default();
        let mut roots = self.roots.clone();
        let mut at: Vec<u8> = Vec::new();
        for name in keys::names_between(b"", dir) {
            keys::push_child(&mut at, name);
            if let Some(Entry::Inode(record)) = self.entry(&at)? {
                roots.enter(self.at(&at), &record);
            }
        }
        Ok(roots)
    }

    /// Hands the link entries of this side to `each`: those with index keys that start with
    /// `prefix`, of a clone root.
    pub(crate) fn links(
        &self,
        root: &Bytes,
        prefix: &[u8],
        mut each: impl FnMut(u64, Bytes) -> Result<()>,
    ) -> Result<()> {
        let end = successor_of_prefix(prefix);
        for item in self.snapshot.scan(prefix, end.as_deref()) {
            let (key, value) = item?;
            let link = value[..].try_into().map(u64::from_be_bytes);
            let (Ok(link), Some((dir, name))) = (link, keys::link_name(root, &key)) else {
                return Err(Error::Corrupt {
                    what: "link_entry index",
                    detail: format!("{key:?}: {value:?}"),
                });
            };
            if let Some(dir) = dir.strip_prefix(&self.path[..]) {
                each(link, keys::child(dir, &name))?;
            }
        }
        Ok(())
    }
}

impl Comparison {
    fn new(sides: [Side; 2], is_one_tree: bool, memory: Memory) -> Self {
        Self {
            sides,
            is_one_tree,
            found: BTreeMap::new(),
            whole: BTreeSet::new(),
            candidates: BTreeSet::from([Bytes::new()]),
            shared: BTreeMap::new(),
            bytes: 0,
            reborn: None,
            memory,
        }
    }

    fn find(mut self) -> Result<Found> {
        self.run()?;
        Ok(Found {
            differences: self.found.into_values().collect(),
            reborn: self.reborn.unwrap_or_default(),
            held: self.memory.held,
        })
    }

    /// Finds the names that may differ.
    fn collect(&mut self) -> Result<()> {
        self.compare_names()?;
        self.compare_data()?;
        self.name_shared()
    }

    fn run(&mut self) -> Result<()> {
        self.collect()?;
        for object in std::mem::take(&mut self.candidates) {
            if self.whole_above(&object).is_none() {
                self.compare_object(&object)?;
            }
        }
        Ok(())
    }

    /// All keys of an index that differ between the ranges, without the keys above the tops.
    fn diff_index(&self, index: u8) -> Result<Diff> {
        let [a, b] = &self.sides;
        a.diff(keys::range(index, &a.path), b, keys::range(index, &b.path))
    }

    fn compare_names(&mut self) -> Result<()> {
        let mut diff = self.diff_index(keys::META)?;
        while let Some(item) = diff.next().transpose()? {
            let (owner, part) = keys::parse_below(&item.key);
            if self.skip_whole(&mut diff, &owner) {
                continue;
            }
            match part {
                Part::Entry(name) => {
                    let object = keys::child(&owner, name);
                    let entries = [&item.before, &item.after].map(|value| {
                        let entry = value.as_ref().map(Entry::decode).transpose()?;
                        Ok(entry.and_then(|entry| match entry {
                            Entry::Inode(record) => Some(record.kind()),
                            Entry::Link(link_entry) => Some(link_entry.kind),
                            Entry::Deleted(_) => None,
                        }))
                    });
                    let [before, after]: [Result<Option<Kind>>; 2] = entries;
                    let change = match (before?, after?) {
                        (Some(_), None) => Change::Removed,
                        (None, Some(_)) => Change::Added,
                        (Some(x), Some(y)) if x != y => Change::Kind,
                        (None, None) => continue,
                        (Some(_), Some(_)) => {
                            self.suspect(object)?;
                            continue;
                        }
                    };
                    self.hold(object.len() + PATH_BYTES)?;
                    self.whole.insert(object.clone());
                    self.report(&object, change)?;
                }
                Part::Xattr => self.suspect(owner)?,
                Part::Shared(link) => self.suspect_shared(owner, link)?,
                // Slots and the index repeat the entries.
                Part::Slot => diff.skip_to(&keys::end_of_slots(&owner)),
                Part::Link => diff.skip_to(&keys::end_of_links_below(&owner)),
                Part::Block | Part::Map | Part::Volume => {}
            }
        }
        Ok(())
    }

    fn compare_data(&mut self) -> Result<()> {
        let mut diff = self.diff_index(keys::DATA)?;
        while let Some(item) = diff.next().transpose()? {
            let (owner, part) = keys::parse_below(&item.key);
            if self.skip_whole(&mut diff, &owner) {
                continue;
            }
            match part {
                Part::Block => {
                    diff.skip_to(&keys::end_below(&owner));
                    self.suspect(owner)?;
                }
                Part::Shared(link) => self.suspect_shared(owner, link)?,
                // The blocks themselves are compared: a hole is zeros.
                Part::Slot
                | Part::Entry(_)
                | Part::Map
                | Part::Xattr
                | Part::Link
                | Part::Volume => {}
            }
        }
        Ok(())
    }

    /// The names of shared inodes that may differ become candidates.
    fn name_shared(&mut self) -> Result<()> {
        let (candidates, memory) = (&mut self.candidates, &mut self.memory);
        let mut add = |object: Bytes| memory.hold_path(candidates, object);
        for side in &self.sides {
            for (owner, links) in &self.shared {
                let root = side.at(owner);
                side.links(&root, &keys::link_index(&root), |link, object| {
                    if links.contains(&link) {
                        add(object)?;
                    }
                    Ok(())
                })?;
            }
            for root in side.roots.all().iter().filter(|root| **root != side.path) {
                let all = keys::links_below(root, &side.path);
                side.links(root, &all, |_, object| add(object))?;
            }
        }
        Ok(())
    }

    /// Makes an object a candidate.
    fn suspect(&mut self, object: Bytes) -> Result<()> {
        self.memory.hold_path(&mut self.candidates, object)
    }

    /// The names of a shared inode will be candidates.
    fn suspect_shared(&mut self, owner: Bytes, link: u64) -> Result<()> {
        let more = match self.shared.get(&owner) {
            Some(links) if links.contains(&link) => 0,
            Some(_) => PATH_BYTES,
            None => owner.len() + 2 * PATH_BYTES,
        };
        self.hold(more)?;
        self.shared.entry(owner).or_default().insert(link);
        Ok(())
    }

    fn hold(&mut self, bytes: usize) -> Result<()> {
        self.memory.hold(bytes)
    }

    /// The object at or above `object` that is not compared below, if there is one.
    fn whole_above(&self, object: &[u8]) -> Option<Bytes> {
        let mut at = object;
        loop {
            if let Some(whole) = self.whole.get(at) {
                return Some(whole.clone());
            }
            at = keys::split_child(at)?.0;
        }
    }

    /// Skips the rest of an object at or above `owner` that is not compared below, if there is one.
    fn skip_whole(&self, diff: &mut Diff, owner: &[u8]) -> bool {
        let whole = self.whole_above(owner);
        if let Some(whole) = &whole {
            diff.skip_to(&keys::end_below(whole));
        }
        whole.is_some()
    }

    /// Compares the objects that a name leads to on both sides.
    fn compare_object(&mut self, object: &Bytes) -> Result<()> {
        let [left, right] = &self.sides;
        let (a, b) = match (left.object(object)?, right.object(object)?) {
            (Some(a), Some(b)) => (a, b),
            (None, None) => return Ok(()),
            (Some(_), None) => return self.report(object, Change::Removed),
            (None, Some(_)) => return self.report(object, Change::Added),
        };
        if self.is_one_tree && a.path == b.path {
            return Ok(());
        }
        let kind = a.record.kind();
        if kind != b.record.kind() {
            return self.report(object, Change::Kind);
        }
        if let Some(reborn) = &mut self.reborn
            && a.record.birth != b.record.birth
        {
            self.memory.hold(object.len() + PATH_BYTES)?;
            reborn.push(object.clone());
        }
        let content = match kind {
            Kind::Regular => left.data_differs(&a, (right, &b))?,
            Kind::Symlink => a.record.target != b.record.target,
            _ => false,
        };
        let of = |record: &Record| {
            let is_dir = kind == Kind::Directory;
            let mtime = (!is_dir).then_some(record.mtime);
            (record.mode, record.uid, record.gid, record.rdev, mtime)
        };
        let metadata = of(&a.record) != of(&b.record) || left.xattrs_differ(&a, (right, &b))?;
        if content || metadata {
            self.report(object, Change::Both { content, metadata })?;
        }
        Ok(())
    }

    fn report(&mut self, object: &Bytes, change: Change) -> Result<()> {
        let side = &self.sides[usize::from(change != Change::Removed)];
        let is_dir = side
            .object(object)?
            .is_some_and(|object| object.record.kind() == Kind::Directory);
        let names: Vec<&[u8]> = keys::names_between(b"", object).collect();
        let difference = Difference {
            path: names.join(&b'/'),
            change,
            is_dir,
        };
        self.bytes += difference.encoded_bytes();
        if self.bytes > DIFF_BYTES_MAX {
            return Err(Error::Range);
        }
        // The path is kept as a key as well, and encoded.
        self.hold(3 * object.len() + DIFFERENCE_BYTES)?;
        self.found.insert(object.clone(), difference);
        Ok(())
    }
}
