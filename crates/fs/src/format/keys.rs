//! The key space: how paths, blocks, attributes and links become keys of the tree.
//!
//! A *path* `P` is the part of a key that names an object. `P(root)` is empty and
//!
//! ```text
//! P(child `name` of D)     = P(D) 00 02 name
//! P(shared inode `n` of C) = P(C) 00 05 n      a file with several names, see below
//! P(orphan `n`)            =      00 07 n      an object without a name
//! ```
//!
//! Names hold neither NUL nor `/`, so the NUL in front of every tag ends a name and sorts before
//! any longer one: a directory's own keys are consecutive, entries first, before its descendants.
//! The first byte of a key is its index, 01 for metadata, 02 for data and 03 for notes:
//!
//! ```text
//! 01 P(D) 00 00 slot             name of the entry with this slot of D
//! 01 P(D) 00 01 name             entry of D: an inode record, a link entry, a deleted entry
//! 02 P(X) 00 03 n                block n of a file
//! 02 P(X) 00 0A c                chunk c of the allocation map of a sparse file
//! 01 P(X) 00 04 name             extended attribute
//! 01 P(C) 00 05 n                record of a shared inode
//! 01 P(C) 00 06 dir 00 01 name   link index: link entries below C, dir = P(its directory) - P(C)
//! 01 00 08 name                  counters of the volume
//! 01 00 09 n, 02 00 09 n         stage of one batch, n below 2; empty before and after the batch
//! 01 00 0F 00 ino                protection of the inode with this visible number
//! 01 00 0F 01 ino                count of protected inodes below the directory with this number
//! 01 00 0B                       record of the root
//! 01 00 0C kind ...              tables of inode numbers, see [`NumberKey`]
//! 03 P(C) 00 0D n                note of a clone root: links that are not counted yet
//! 03 P(C) 00 0E n dir 00 01 name link entries below C that were removed with a tree
//! 03 P(C) 00 10                  C is being joined to the clone root around it
//! n 01 id 00 ...                 a snapshot of the volume: keys of the root's range in index n, with
//!                                01 id behind the index
//! 01 02 00 name                  record of the snapshot with this name
//! 01 02 01                       counts of snapshots
//! 01 02 02                       policy of snapshots
//! 01 02 03 number generation     record of the fork whose top has this identity
//! n 03 id 00 ...                 base of a fork: keys of its top, as if that were the root, in index
//!                                n, with 03 id behind the index
//! ```
//!
//! Numbers are big-endian `u64` so that they sort. Slots, and all numbers behind `0C`, are
//! *ordered* (`ordered.rs`). The *range of X* in an index is the set of keys
//! that start with `index P(X) 00`: all keys in or below X. The record of X itself is outside of
//! it, with X's siblings. That is why a clone or a rename of X moves two ranges and writes one
//! record. Snapshots of the volume lie outside of the range of the root, so that no clone of the
//! root contains them. The `id` of one takes eight bytes of seven bits each, the highest bit of
//! each set: no NUL is in it. Bases of forks have ids of the same form.

use bytes::Bytes;
use ramet_betree::successor_of_prefix;

use crate::format::ino::{Identity, Ino};
use crate::format::ordered::{Ordered, push_identity, push_ordered, take_identity, take_ordered};
use crate::format::slots::{Run, Slot};

/// Index of metadata.
pub(crate) const META: u8 = 1;
/// Index of data.
pub(crate) const DATA: u8 = 2;
/// Index of notes: links that are not counted yet. It is empty most of the time.
pub(crate) const NOTES: u8 = 3;
/// All indexes.
pub(crate) const INDEXES: [u8; 3] = [META, DATA, NOTES];

const SLOT: u8 = 0;
const ENTRY: u8 = 1;
const CHILD: u8 = 2;
const BLOCK: u8 = 3;
const XATTR: u8 = 4;
const SHARED: u8 = 5;
const LINK: u8 = 6;
const ORPHAN: u8 = 7;
const COUNTER: u8 = 8;
const STAGE: u8 = 9;
const MAP: u8 = 10;
const ROOT: u8 = 11;
const NUMBERS: u8 = 12;
const NOTE: u8 = 13;
const REMOVED: u8 = 14;
const JOINING: u8 = 16;
const PROTECTED: u8 = 15;

/// First byte behind the index of the keys of snapshots, and of the keys about snapshots. The keys
/// of the root's range have 0 there.
const SNAPSHOT: u8 = 1;
const REGISTRY: u8 = 2;
/// The same of the keys of bases of forks.
const BASE: u8 = 3;

/// Tags of the root's range that belong to the volume and not to the tree of files: a clone of
/// the root leaves them out.
pub(crate) const VOLUME_TAGS: [u8; 6] = [ORPHAN, COUNTER, STAGE, ROOT, NUMBERS, PROTECTED];

fn join(parts: &[&[u8]]) -> Bytes {
    let mut key = Vec::with_capacity(parts.iter().map(|part| part.len()).sum());
    for part in parts {
        key.extend_from_slice(part);
    }
    key.into()
}

/// Path of `name` in the directory at `dir`.
pub(crate) fn child(dir: &[u8], name: &[u8]) -> Bytes {
    join(&[dir, &[0, CHILD], name])
}

/// Turns the path of a directory into that of `name` in it.
pub(crate) fn push_child(path: &mut Vec<u8>, name: &[u8]) {
    path.extend_from_slice(&[0, CHILD]);
    path.extend_from_slice(name);
}

/// The names that lead from the directory at `from` to the one at `to` below it.
pub(crate) fn names_between<'a>(from: &[u8], to: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    to[from.len()..]
        .split(|&byte| byte == 0)
        .skip(1)
        .map(|tagged| tagged.strip_prefix(&[CHILD]).unwrap_or(tagged))
}

/// The directory and the last name of a path that ends with a name.
pub(crate) fn split_child(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let zero = path.iter().rposition(|&byte| byte == 0)?;
    let name = path[zero..].strip_prefix(&[0, CHILD])?;
    Some((&path[..zero], name))
}

/// The subject of a key, beside the path that the key starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// A slot of the directory.
    Slot,
    /// A name in the directory.
    Entry(&'a [u8]),
    /// A block of the file.
    Block,
    /// A chunk of the allocation map of the file.
    Map,
    /// An extended attribute of the object.
    Xattr,
    /// A shared inode of the clone root: its record, blocks or attributes.
    Shared(u64),
    /// The link index of the clone root.
    Link,
    /// The volume, or a subject that this version does not know.
    Volume,
}

/// The path that `key` starts with, relative to an object, and the subject of the key. `key` is the
/// rest of a key behind [`range`] of that object.
pub(crate) fn parse_below(key: &[u8]) -> (Bytes, Part<'_>) {
    let mut at = 0;
    // `key` lacks the NUL in front of its first tag.
    while key.get(at) == Some(&CHILD) {
        match key[at..].iter().position(|&byte| byte == 0) {
            Some(len) => at += len + 1,
            None => return (join(&[&[0], key]), Part::Volume),
        }
    }
    let path = if at == 0 {
        Bytes::new()
    } else {
        join(&[&[0], &key[..at - 1]])
    };
    let rest = key.get(at + 1..).unwrap_or_default();
    let part = match key.get(at) {
        Some(&SLOT) => Part::Slot,
        Some(&ENTRY) => Part::Entry(rest),
        Some(&BLOCK) => Part::Block,
        Some(&MAP) => Part::Map,
        Some(&XATTR) => Part::Xattr,
        Some(&SHARED) => match rest.first_chunk() {
            Some(link) => Part::Shared(u64::from_be_bytes(*link)),
            None => Part::Volume,
        },
        Some(&LINK) => Part::Link,
        _ => Part::Volume,
    };
    (path, part)
}

/// The end of the keys in and below the object at the relative path `object`, in the form that
/// [`parse_below`] takes.
pub(crate) fn end_below(object: &[u8]) -> Bytes {
    match object.split_first() {
        Some((_, object)) => join(&[object, &[1]]),
        None => Bytes::from_static(&[0xff]),
    }
}

/// The end of the link index of the clone root at the relative path `root`, in the form that
/// [`parse_below`] takes.
pub(crate) fn end_of_links_below(root: &[u8]) -> Bytes {
    let end = join(&[root, &[0, LINK + 1]]);
    end.slice(1..)
}

/// The end of the slots of the directory at the relative path `dir`, in the form that
/// [`parse_below`] takes.
pub(crate) fn end_of_slots(dir: &[u8]) -> Bytes {
    let end = join(&[dir, &[0, SLOT + 1]]);
    end.slice(1..)
}

/// Directory and name of a link entry, from its key in the index of the clone root at `root`.
pub(crate) fn link_name(root: &[u8], key: &[u8]) -> Option<(Bytes, Bytes)> {
    let tail = key.strip_prefix(&link_index(root)[..])?;
    let zero = tail.iter().rposition(|&byte| byte == 0)?;
    let name = tail[zero..].strip_prefix(&[0, ENTRY])?;
    Some((join(&[root, &tail[..zero]]), Bytes::copy_from_slice(name)))
}

/// Path of shared inode `link` of the clone root at `root`.
pub(crate) fn shared_inode(root: &[u8], link: u64) -> Bytes {
    join(&[root, &[0, SHARED], &link.to_be_bytes()])
}

/// An object in the orphan area. Numbers of orphans are unique as long as the volume is open: when
/// it is opened, the area is erased, or they begin behind those that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Orphan(pub(crate) u64);

/// Path of an object without a name.
pub(crate) fn orphan(orphan: Orphan) -> Bytes {
    join(&[&[0, ORPHAN], &orphan.0.to_be_bytes()])
}

/// The orphan that a key of the orphan area is of.
pub(crate) fn orphan_of(key: &[u8]) -> Option<Orphan> {
    let number = key.get(1..)?.strip_prefix(&[0, ORPHAN])?.first_chunk()?;
    Some(Orphan(u64::from_be_bytes(*number)))
}

/// Prefix of all orphans in an index.
pub(crate) fn orphans(index: u8) -> Bytes {
    tagged(index, b"", ORPHAN)
}

/// Path of a stage, where parts of a structural change wait within one batch; `number` is below 2.
pub(crate) fn stage(number: u8) -> Bytes {
    join(&[&[0, STAGE, number]])
}

/// Whether a path is that of a stage, or leads into one.
pub(crate) fn is_in_stage(path: &[u8]) -> bool {
    path.starts_with(&[0, STAGE])
}

/// Key of the root's record.
pub(crate) fn root_record() -> Bytes {
    Bytes::from_static(&[META, 0, ROOT])
}

/// Ids of snapshots are below this one.
pub(crate) const SNAPSHOT_IDS_MAX: u64 = 1 << 56;

/// The bytes behind the index in each key of the snapshot or base with this id.
fn copy_base(kind: u8, id: u64) -> Bytes {
    let mut base = vec![kind];
    base.extend((0..8).rev().map(|at| {
        let seven = (id >> (7 * at)) & 0x7f;
        0x80 | u8::try_from(seven).expect("seven bits")
    }));
    base.into()
}

/// The id of the snapshot or base that a key belongs to, and the key behind it.
fn in_copy(kind: u8, key: &[u8]) -> Option<(u64, Bytes)> {
    let (index, rest) = key.split_first()?;
    let (id, rest) = rest.strip_prefix(&[kind])?.split_first_chunk::<8>()?;
    let id = id
        .iter()
        .fold(0, |id, byte| id << 7 | u64::from(byte & 0x7f));
    Some((id, join(&[&[*index], rest])))
}

/// The bytes behind the index in each key of a snapshot.
pub(crate) fn snapshot_base(id: u64) -> Bytes {
    copy_base(SNAPSHOT, id)
}

/// The id of the snapshot that a key belongs to, and the key in the live tree.
pub(crate) fn in_snapshot(key: &[u8]) -> Option<(u64, Bytes)> {
    in_copy(SNAPSHOT, key)
}

/// The bytes behind the index in each key of the base of a fork. They take the place of the path
/// of a directory in all functions here.
pub(crate) fn fork_base(id: u64) -> Bytes {
    copy_base(BASE, id)
}

/// The id of the fork to whose base a key belongs, and the key of the same part in the live tree if
/// the fork were the root.
pub(crate) fn in_fork_base(key: &[u8]) -> Option<(u64, Bytes)> {
    in_copy(BASE, key)
}

/// All keys of all bases in an index.
pub(crate) fn fork_bases(index: u8) -> Bytes {
    join(&[&[index, BASE]])
}

/// Key of the record of the top of a base.
pub(crate) fn fork_base_root(base: &[u8]) -> Bytes {
    tagged(META, base, ROOT)
}

/// Prefix of the records of forks; number and generation of a top follow.
pub(crate) fn fork_records() -> Bytes {
    Bytes::from_static(&[META, REGISTRY, 3])
}

/// Key of the record of the fork with this top.
pub(crate) fn fork_record(top: Identity) -> Bytes {
    let mut key = fork_records().to_vec();
    push_identity(&mut key, top);
    key.into()
}

/// The identity of the top of a fork, from the key of the record.
pub(crate) fn top_of_fork(key: &[u8]) -> Option<Identity> {
    let mut rest = key.strip_prefix(&fork_records()[..])?;
    let top = take_identity(&mut rest)?;
    rest.is_empty().then_some(top)
}

/// All keys of all snapshots in an index.
pub(crate) fn snapshots(index: u8) -> Bytes {
    join(&[&[index, SNAPSHOT]])
}

/// The ranges of the live tree that a snapshot has, with their indexes: all of the root's range but
/// orphans, which no name leads to.
pub(crate) fn ranges_of_snapshots() -> [(u8, Bytes, Bytes); 5] {
    let behind = |index| (index, tagged(index, b"", ORPHAN + 1), snapshots(index));
    let before = |index| (index, range(index, b""), orphans(index));
    [
        before(META),
        behind(META),
        before(DATA),
        before(NOTES),
        behind(NOTES),
    ]
}

/// The ranges of the live tree that have its names and their contents, with their indexes: those of
/// [`ranges_of_snapshots`] without the record of the root, counters and tables.
pub(crate) fn ranges_of_trees() -> [(u8, Bytes, Bytes); 4] {
    let [names, _, contents, notes, more_notes] = ranges_of_snapshots();
    [names, contents, notes, more_notes]
}

/// Prefix of the records of snapshots; a name follows.
pub(crate) fn snapshot_records() -> Bytes {
    Bytes::from_static(&[META, REGISTRY, 0])
}

/// Key of the record of the snapshot with this name.
pub(crate) fn snapshot_record(name: &str) -> Bytes {
    join(&[&snapshot_records(), name.as_bytes()])
}

/// Key of the counts of snapshots.
pub(crate) fn snapshot_counts() -> Bytes {
    Bytes::from_static(&[META, REGISTRY, 1])
}

/// Key of the policy of snapshots.
pub(crate) fn snapshot_policy() -> Bytes {
    Bytes::from_static(&[META, REGISTRY, 2])
}

/// Key of a counter of the volume.
pub(crate) fn counter(name: &[u8]) -> Bytes {
    join(&[&[META, 0, COUNTER], name])
}

/// Prefix of the keys about protected inodes; a byte and the number of an inode follow.
pub(crate) fn protections() -> Bytes {
    join(&[&[META, 0, PROTECTED]])
}

/// Key of the protection of the inode with this visible number.
pub(crate) fn protection(ino: Ino) -> Bytes {
    join(&[&[META, 0, PROTECTED, 0], &ino.0.to_be_bytes()])
}

/// Key of the count of protected inodes below the directory with this visible number.
pub(crate) fn protected_below(ino: Ino) -> Bytes {
    join(&[&[META, 0, PROTECTED, 1], &ino.0.to_be_bytes()])
}

/// The number that a key of the table of protections has, and whether the key has a count.
pub(crate) fn parse_protection(key: &[u8]) -> Option<(Ino, bool)> {
    let (kind, rest) = key.strip_prefix(&protections()[..])?.split_first()?;
    let ino = u64::from_be_bytes(rest.try_into().ok()?);
    (*kind < 2).then_some((Ino(ino), *kind == 1))
}

/// Key of the entry `name` of the directory at `dir`.
pub(crate) fn entry(dir: &[u8], name: &[u8]) -> Bytes {
    join(&[&[META], dir, &[0, ENTRY], name])
}

/// Prefix of the entries of the directory at `dir`; a name follows.
pub(crate) fn entries(dir: &[u8]) -> Bytes {
    entry(dir, b"")
}

/// Prefix of the slots of the directory at `dir`; a slot follows.
pub(crate) fn slots(dir: &[u8]) -> Bytes {
    join(&[&[META], dir, &[0, SLOT]])
}

/// Key of a slot of the directory at `dir`; its value is the name.
pub(crate) fn slot(dir: &[u8], slot: Slot) -> Bytes {
    join(&[&[META], dir, &[0, SLOT], Ordered::new(slot.0).as_bytes()])
}

/// The slot of a key, from the end of the key behind the prefix that [`slots`] gave.
pub(crate) fn parse_slot(mut rest: &[u8]) -> Option<Slot> {
    let slot = take_ordered(&mut rest)?;
    rest.is_empty().then_some(Slot(slot))
}

/// A key of the tables of inode numbers, which belong to the volume: no clone copies them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum NumberKey {
    /// `01 number generation run`: the block of a run of this directory. Value: number (8) and
    /// generation (8).
    Block(Identity, Run),
    /// `02 number`: the run that has the block at this number. Value: number (8), generation (8)
    /// and run (8).
    Owner(u64),
    /// `03 class number`: a free block; `class` is the place of its length among those of runs. No
    /// value.
    Free(u8, u64),
    /// `04 number`: the place of the inode that is pinned to this number. Value: number (8) and
    /// generation (8) of its directory, slot (8).
    Pinned(Ino),
    /// `05 number generation pinned`: a pinned number of this directory. No value.
    PinOf(Identity, Ino),
    /// `06 number generation`: a directory that is gone, whose blocks are to be reclaimed. No
    /// value.
    Dead(Identity),
    /// `07 number`: a number that is not pinned any more. No value.
    Unpinned(Ino),
}

impl NumberKey {
    const BLOCK: u8 = 1;
    const OWNER: u8 = 2;
    const FREE: u8 = 3;
    const PINNED: u8 = 4;
    const PIN_OF: u8 = 5;
    const DEAD: u8 = 6;
    const UNPINNED: u8 = 7;

    fn parts(self) -> (u8, [Option<u64>; 3]) {
        let of =
            |Identity { ino, generation }: Identity, last| [Some(ino.0), Some(generation), last];
        let one = |number| [Some(number), None, None];
        match self {
            Self::Block(dir, run) => (Self::BLOCK, of(dir, Some(run.0))),
            Self::Owner(base) => (Self::OWNER, one(base)),
            Self::Free(class, base) => (Self::FREE, [Some(class.into()), Some(base), None]),
            Self::Pinned(ino) => (Self::PINNED, one(ino.0)),
            Self::PinOf(dir, ino) => (Self::PIN_OF, of(dir, Some(ino.0))),
            Self::Dead(dir) => (Self::DEAD, of(dir, None)),
            Self::Unpinned(ino) => (Self::UNPINNED, one(ino.0)),
        }
    }

    /// The key.
    pub(crate) fn encode(self) -> Bytes {
        let (kind, numbers) = self.parts();
        let mut key = vec![META, 0, NUMBERS, kind];
        numbers
            .into_iter()
            .flatten()
            .for_each(|number| push_ordered(&mut key, number));
        key.into()
    }

    fn prefix(kind: u8, numbers: &[u64]) -> Bytes {
        let mut key = vec![META, 0, NUMBERS, kind];
        numbers
            .iter()
            .for_each(|number| push_ordered(&mut key, *number));
        key.into()
    }

    /// Prefix of the blocks of all directories that ever had this number.
    pub(crate) fn blocks_of_number(ino: Ino) -> Bytes {
        Self::prefix(Self::BLOCK, &[ino.0])
    }

    /// Prefix of the blocks of a directory.
    pub(crate) fn blocks_of(dir: Identity) -> Bytes {
        Self::prefix(Self::BLOCK, &[dir.ino.0, dir.generation])
    }

    /// Prefix of the pinned numbers of all directories that ever had this number.
    pub(crate) fn pins_of_number(ino: Ino) -> Bytes {
        Self::prefix(Self::PIN_OF, &[ino.0])
    }

    /// Prefix of the pinned numbers of a directory.
    pub(crate) fn pins_of(dir: Identity) -> Bytes {
        Self::prefix(Self::PIN_OF, &[dir.ino.0, dir.generation])
    }

    /// Prefix of the free blocks of a class.
    pub(crate) fn free_of(class: u8) -> Bytes {
        Self::prefix(Self::FREE, &[class.into()])
    }

    /// Prefix of the directories that are gone.
    pub(crate) fn all_dead() -> Bytes {
        Self::prefix(Self::DEAD, &[])
    }

    /// Prefix of the numbers that are not pinned any more.
    pub(crate) fn all_unpinned() -> Bytes {
        Self::prefix(Self::UNPINNED, &[])
    }

    /// Reads a key of the tables.
    pub(crate) fn decode(key: &[u8]) -> Option<Self> {
        Self::parse(key.strip_prefix(&[META, 0, NUMBERS])?)
    }

    /// Reads the part of a key behind its tag.
    pub(crate) fn parse(rest: &[u8]) -> Option<Self> {
        let (kind, mut rest) = rest.split_first()?;
        let at = &mut rest;
        let key = match *kind {
            Self::BLOCK => Self::Block(take_identity(at)?, Run(take_ordered(at)?)),
            Self::OWNER => Self::Owner(take_ordered(at)?),
            Self::FREE => Self::Free(take_ordered(at)?.try_into().ok()?, take_ordered(at)?),
            Self::PINNED => Self::Pinned(Ino(take_ordered(at)?)),
            Self::PIN_OF => Self::PinOf(take_identity(at)?, Ino(take_ordered(at)?)),
            Self::DEAD => Self::Dead(take_identity(at)?),
            Self::UNPINNED => Self::Unpinned(Ino(take_ordered(at)?)),
            _ => return None,
        };
        rest.is_empty().then_some(key)
    }
}

/// Key of the record of the shared inode at `path`.
pub(crate) fn shared_record(path: &[u8]) -> Bytes {
    join(&[&[META], path])
}

/// Prefix of the shared inodes of the clone root at `root`, in either index.
pub(crate) fn shared_inodes(index: u8, root: &[u8]) -> Bytes {
    join(&[&[index], root, &[0, SHARED]])
}

/// Prefix of the link index of the clone root at `root`.
pub(crate) fn link_index(root: &[u8]) -> Bytes {
    join(&[&[META], root, &[0, LINK]])
}

/// Prefix of the notes of the clone root at `root`; the number of a note follows.
pub(crate) fn notes(root: &[u8]) -> Bytes {
    join(&[&[NOTES], root, &[0, NOTE]])
}

/// Key of a note of the clone root at `root`.
pub(crate) fn note(root: &[u8], number: u64) -> Bytes {
    join(&[&[NOTES], root, &[0, NOTE], &number.to_be_bytes()])
}

/// Prefix of the link entries that the note `number` of the clone root at `root` tells of, in the
/// form of [`links_below`].
pub(crate) fn removed_links(root: &[u8], number: u64) -> Bytes {
    join(&[&[NOTES], root, &[0, REMOVED], &number.to_be_bytes(), &[0]])
}

/// Key that tells that the clone root at `root` is being joined to the one around it.
pub(crate) fn joining(root: &[u8]) -> Bytes {
    join(&[&[NOTES], root, &[0, JOINING]])
}

/// The subject of a key of the index of notes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoteKey {
    /// A note with this number.
    Note(u64),
    /// A link entry that the note with this number tells of.
    Removed(u64),
    /// The clone root is being joined.
    Joining,
}

/// The path of the clone root that a key of the index of notes belongs to, and its subject.
pub(crate) fn parse_note(key: &[u8]) -> Option<(&[u8], NoteKey)> {
    let mut at = 1;
    loop {
        let rest = key.get(at..)?.strip_prefix(&[0])?;
        let (tag, rest) = rest.split_first()?;
        match *tag {
            CHILD => at += 2 + rest.iter().position(|&byte| byte == 0)?,
            NOTE => {
                let number = u64::from_be_bytes(rest.try_into().ok()?);
                return Some((&key[1..at], NoteKey::Note(number)));
            }
            REMOVED => {
                let number = u64::from_be_bytes(*rest.first_chunk()?);
                return Some((&key[1..at], NoteKey::Removed(number)));
            }
            JOINING if rest.is_empty() => return Some((&key[1..at], NoteKey::Joining)),
            _ => return None,
        }
    }
}

/// The link number of a shared inode of the clone root at `root`, from the key of its record.
pub(crate) fn link_of_record(root: &[u8], key: &[u8]) -> Option<u64> {
    let number = key.strip_prefix(&shared_inodes(META, root)[..])?;
    Some(u64::from_be_bytes(number.try_into().ok()?))
}

/// Prefix of all keys in or below the object at `path`.
pub(crate) fn range(index: u8, path: &[u8]) -> Bytes {
    join(&[&[index], path, &[0]])
}

/// Prefix of the keys of the root's range with this tag, moved to `path`.
pub(crate) fn tagged(index: u8, path: &[u8], tag: u8) -> Bytes {
    join(&[&[index], path, &[0, tag]])
}

/// All keys in or below the object at `path` that belong to the tree of files. Those of the volume
/// sort behind them in the range of the root.
pub(crate) fn tree_range(index: u8, path: &[u8]) -> (Bytes, Option<Bytes>) {
    let lo = range(index, path);
    let hi = match index {
        META | DATA if path.is_empty() => Some(tagged(index, path, ORPHAN)),
        _ => successor_of_prefix(&lo),
    };
    (lo, hi)
}

const _: () = {
    let mut at = 0;
    while at < VOLUME_TAGS.len() {
        assert!(VOLUME_TAGS[at] >= ORPHAN);
        at += 1;
    }
    // A directory has keys with these.
    assert!(SLOT < ORPHAN && ENTRY < ORPHAN && CHILD < ORPHAN && XATTR < ORPHAN);
    assert!(SHARED < ORPHAN && LINK < ORPHAN);
};

/// Whether the object at `path` lies in the range of the one at `ancestor`.
pub(crate) fn is_below(path: &[u8], ancestor: &[u8]) -> bool {
    path.strip_prefix(ancestor)
        .is_some_and(|rest| rest.first() == Some(&0))
}

/// Prefix of the blocks of the file at `path`; the number follows.
pub(crate) fn blocks(path: &[u8]) -> Bytes {
    join(&[&[DATA], path, &[0, BLOCK]])
}

/// Key of a block, from the prefix that [`blocks`] gave.
pub(crate) fn block(blocks: &[u8], number: u64) -> Bytes {
    join(&[blocks, &number.to_be_bytes()])
}

/// Number of the block with this key, from the prefix that [`blocks`] gave.
pub(crate) fn block_number(blocks: &[u8], key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(
        key.strip_prefix(blocks)?.try_into().ok()?,
    ))
}

/// Prefix of the chunks of the allocation map of the file at `path`; the number follows.
pub(crate) fn map(path: &[u8]) -> Bytes {
    join(&[&[DATA], path, &[0, MAP]])
}

/// Key of a chunk, from the prefix that [`map`] gave.
pub(crate) fn chunk(map: &[u8], number: u64) -> Bytes {
    block(map, number)
}

/// The key in the range of the object at `path` that ends with `rest`.
pub(crate) fn in_range(index: u8, path: &[u8], rest: &[u8]) -> Bytes {
    join(&[&[index], path, &[0], rest])
}

/// Key of an extended attribute. With an empty name it is the prefix of all attributes of the
/// object.
pub(crate) fn xattr(path: &[u8], name: &[u8]) -> Bytes {
    join(&[&[META], path, &[0, XATTR], name])
}

/// Key in the link index of the clone root at `root` for `name` in the directory at `dir`.
pub(crate) fn link(root: &[u8], dir: &[u8], name: &[u8]) -> Bytes {
    join(&[
        &[META],
        root,
        &[0, LINK],
        &dir[root.len()..],
        &[0, ENTRY],
        name,
    ])
}

/// Prefix of the index keys of all link entries in and below the directory at `dir`.
pub(crate) fn links_below(root: &[u8], dir: &[u8]) -> Bytes {
    join(&[&[META], root, &[0, LINK], &dir[root.len()..], &[0]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_and_its_descendants_are_one_range_whatever_the_names() {
        let names: [&[u8]; 6] = [b"\x01", b"a", b"a\x01", b"ab", b"a\xff", b"\xff\xff"];
        for outer in names {
            let path = child(b"", outer);
            let range_of = range(META, &path);
            for inner in names {
                let inside = child(&path, inner);
                assert!(is_below(&inside, &path) && !is_below(&path, &inside));
                for key in [
                    entry(&path, inner),
                    xattr(&path, inner),
                    entry(&inside, b"x"),
                    shared_record(&shared_inode(&path, 1)),
                ] {
                    assert!(key.starts_with(&range_of), "{key:?}");
                    assert!(entries(&path) <= key);
                }
                if inner != outer {
                    assert!(!is_below(&child(b"", inner), &path));
                    assert!(!entry(b"", inner).starts_with(&range_of));
                    assert!(!entry(&child(b"", inner), b"x").starts_with(&range_of));
                }
            }
            assert!(!entry(b"", outer).starts_with(&range_of));
        }
    }

    #[test]
    fn numbers_are_ordered_and_read_back() {
        let numbers = [0, 1, 255, 256, 65_535, 1 << 44, u64::MAX];
        let slots: Vec<_> = numbers
            .iter()
            .map(|slot_of| slot(b"", Slot(*slot_of)))
            .collect();
        assert!(slots.is_sorted());
        let prefix = super::slots(b"");
        for (key, number) in slots.iter().zip(numbers) {
            assert_eq!(parse_slot(&key[prefix.len()..]), Some(Slot(number)));
        }
        for damaged in [
            &b""[..],
            b"\x01",
            b"\x01\x00",
            b"\x09123456789",
            b"\x01\x01\x01",
        ] {
            assert_eq!(parse_slot(damaged), None, "{damaged:?}");
        }
    }

    #[test]
    fn golden_keys_of_numbers() {
        let dir = Identity {
            ino: Ino(0x0123),
            generation: 7,
        };
        let keys: [(NumberKey, &[u8]); 7] = [
            (
                NumberKey::Block(dir, Run(0)),
                b"\x01\x02\x01\x23\x01\x07\x00",
            ),
            (NumberKey::Owner(64), b"\x02\x01\x40"),
            (NumberKey::Free(3, 64), b"\x03\x01\x03\x01\x40"),
            (NumberKey::Pinned(Ino(65)), b"\x04\x01\x41"),
            (
                NumberKey::PinOf(dir, Ino(65)),
                b"\x05\x02\x01\x23\x01\x07\x01\x41",
            ),
            (NumberKey::Dead(dir), b"\x06\x02\x01\x23\x01\x07"),
            (NumberKey::Unpinned(Ino(65)), b"\x07\x01\x41"),
        ];
        for (key, bytes) in keys {
            assert_eq!(key.encode(), [b"\x01\0\x0c", bytes].concat());
            assert_eq!(NumberKey::decode(&key.encode()), Some(key));
            assert_eq!(NumberKey::parse(&bytes[..bytes.len() - 1]), None);
        }
        assert!(
            NumberKey::Block(dir, Run(9))
                .encode()
                .starts_with(&NumberKey::blocks_of(dir))
        );
        assert!(NumberKey::blocks_of(dir).starts_with(&NumberKey::blocks_of_number(dir.ino)));
        assert_eq!(
            slot(&child(b"", b"d"), Slot(300)),
            &b"\x01\0\x02d\0\0\x02\x01\x2c"[..]
        );
        assert_eq!(root_record(), &b"\x01\0\x0b"[..]);
    }

    #[test]
    fn entries_sort_by_name_and_before_deeper_keys() {
        let dir = child(b"", b"d");
        let keys = [
            slot(&dir, Slot(0)),
            slot(&dir, Slot(u64::MAX)),
            entry(&dir, b"\x01"),
            entry(&dir, b"\xff"),
            entry(&child(&dir, b"\x01"), b"x"),
            xattr(&dir, b"user.x"),
            shared_record(&shared_inode(&dir, 0)),
            link(&dir, &dir, b"x"),
        ];
        assert!(keys.is_sorted());
    }

    #[test]
    fn link_entries_below_a_directory_are_one_prefix() {
        let (root, sibling) = (child(b"", b"r"), child(&child(b"", b"r"), b"d\x01"));
        let dir = child(&root, b"d");
        let below = links_below(&root, &dir);
        assert!(link(&root, &dir, b"x").starts_with(&below));
        assert!(link(&root, &child(&dir, b"e"), b"x").starts_with(&below));
        assert!(!link(&root, &root, b"d").starts_with(&below));
        assert!(!link(&root, &sibling, b"x").starts_with(&below));
    }

    #[test]
    fn link_keys_tell_directory_and_name() {
        let root = child(b"", b"r");
        let mut dir = root.to_vec();
        for names in [&[][..], &[&b"d"[..]], &[b"\x02", b"\x01\xff"]] {
            dir.truncate(root.len());
            names.iter().for_each(|name| push_child(&mut dir, name));
            let told = link_name(&root, &link(&root, &dir, b"x"));
            assert_eq!(told, Some((dir.clone().into(), Bytes::from_static(b"x"))));
            assert_eq!(names_between(&root, &dir).collect::<Vec<_>>(), names);
        }
    }

    #[test]
    fn keys_below_an_object_are_taken_apart() {
        let top = child(b"", b"top");
        let paths = [
            Bytes::new(),
            child(b"", b"d"),
            child(&child(b"", b"\x01"), b"\xff"),
        ];
        for relative in &paths {
            let path = join(&[&top, relative]);
            let cases: [(Bytes, Part<'_>); 7] = [
                (entry(&path, b"x\x02"), Part::Entry(b"x\x02")),
                (block(&blocks(&path), 256), Part::Block),
                (chunk(&map(&path), 256), Part::Map),
                (xattr(&path, b"user.a"), Part::Xattr),
                (
                    shared_record(&shared_inode(&path, 1 << 40)),
                    Part::Shared(1 << 40),
                ),
                (blocks(&shared_inode(&path, 7)), Part::Shared(7)),
                (link(&path, &child(&path, b"e"), b"x"), Part::Link),
            ];
            for (key, part) in cases {
                let index = key[0];
                let told = key.strip_prefix(&range(index, &top)[..]).unwrap();
                assert_eq!(parse_below(told), (relative.clone(), part));
                assert!(told < &end_below(relative)[..]);
                assert_eq!(part == Part::Link, {
                    let end = end_of_links_below(relative);
                    told < &end[..]
                        && told >= &end_of_links_below(relative)[..end.len() - 1]
                        && told[end.len() - 1] == LINK
                });
            }
            let split = split_child(relative).map(|(dir, name)| child(dir, name));
            assert_eq!(split.unwrap_or_default(), *relative);
        }
        let (dir, sibling) = (child(b"", b"d"), child(b"", b"d\x01"));
        let below = |path: &[u8]| entry(path, b"x").slice(2..);
        assert!(below(&dir) < end_below(&dir) && end_below(&dir) <= below(&sibling));
        // Arbitrary bytes cause no panic.
        for key in [
            &b""[..],
            b"\x02",
            b"\x02abc",
            b"\x05abc",
            b"\xff",
            b"\x02a\0",
        ] {
            parse_below(key);
        }
    }

    #[test]
    fn keys_of_snapshots_are_pinned() {
        let base = snapshot_base(0x81);
        assert_eq!(base[..], *b"\x01\x80\x80\x80\x80\x80\x80\x81\x81");
        assert_eq!(snapshot_record("daily")[..], *b"\x01\x02\x00daily");
        assert_eq!(snapshot_counts()[..], *b"\x01\x02\x01");
        assert_eq!(snapshot_policy()[..], *b"\x01\x02\x02");
        for id in [0, 1, 0x7f, 0x80, 1 << 40, SNAPSHOT_IDS_MAX - 1] {
            let base = snapshot_base(id);
            assert!(
                !base.contains(&0) && base < snapshot_base(id + 1) || id == SNAPSHOT_IDS_MAX - 1
            );
            let inside = join(&[&[DATA], &base, b"\0\x02d\0\x03"]);
            let outside = Bytes::from_static(b"\x02\0\x02d\0\x03");
            assert_eq!(in_snapshot(&inside), Some((id, outside)));
            assert!(inside.starts_with(&snapshots(DATA)));
        }
        assert_eq!(in_snapshot(&entry(b"", b"f")), None);
    }

    #[test]
    fn keys_of_forks_are_pinned() {
        let base = fork_base(0x81);
        assert_eq!(base[..], *b"\x03\x80\x80\x80\x80\x80\x80\x81\x81");
        let file = block(&blocks(&child(&base, b"f")), 1);
        let outside = block(&blocks(&child(b"", b"f")), 1);
        assert_eq!(in_fork_base(&file), Some((0x81, outside.clone())));
        assert_eq!(in_fork_base(&outside), None);
        assert_eq!(in_snapshot(&file), None);
        assert!(file.starts_with(&fork_bases(DATA)));
        let root = [&[META], &base[..], b"\0\x0b"].concat();
        assert_eq!(fork_base_root(&base)[..], root);
        let top = Identity {
            ino: Ino(300),
            generation: 7,
        };
        let key = fork_record(top);
        assert_eq!(key[..], *b"\x01\x02\x03\x02\x01\x2c\x01\x07");
        assert_eq!(top_of_fork(&key), Some(top));
        for other in [&key[..7], &[&key[..], &[0]].concat(), &snapshot_counts()] {
            assert_eq!(top_of_fork(other), None, "{other:?}");
        }
    }

    #[test]
    fn ranges_of_snapshots_have_everything_of_the_root_but_orphans() {
        let ranges = ranges_of_snapshots();
        let has = |key: &[u8]| {
            let within = |(_, lo, hi): &&(u8, Bytes, Bytes)| key >= &lo[..] && key < &hi[..];
            ranges.iter().filter(within).count()
        };
        let file = child(b"", b"f");
        let inside = [
            entry(b"", b"f"),
            slot(b"", Slot(1)),
            block(&blocks(&file), 0),
            xattr(&file, b"user.a"),
            shared_record(&shared_inode(b"", 7)),
            block(&blocks(&shared_inode(b"", 7)), 0),
            link(b"", b"", b"x"),
            counter(b"number"),
            root_record(),
            NumberKey::Owner(8).encode(),
            protection(Ino(9)),
            note(b"", 3),
            note(&child(b"", b"d"), 3),
        ];
        inside
            .iter()
            .for_each(|key| assert_eq!(has(key), 1, "{key:?}"));
        let outside = [
            orphans(META),
            block(&blocks(&orphan(Orphan(3))), 0),
            snapshots(META),
            snapshots(DATA),
            snapshot_records(),
            fork_record(Identity::ROOT),
            entry(&fork_base(3), b"f"),
        ];
        outside
            .iter()
            .for_each(|key| assert_eq!(has(key), 0, "{key:?}"));
    }

    #[test]
    fn keys_are_pinned() {
        let dir = child(b"", b"d");
        assert_eq!(entry(&dir, b"f")[..], *b"\x01\0\x02d\0\x01f");
        assert_eq!(
            block(&blocks(&child(&dir, b"f")), 258)[..],
            *b"\x02\0\x02d\0\x02f\0\x03\0\0\0\0\0\0\x01\x02"
        );
        assert_eq!(
            chunk(&map(&child(&dir, b"f")), 258)[..],
            *b"\x02\0\x02d\0\x02f\0\x0a\0\0\0\0\0\0\x01\x02"
        );
        assert_eq!(link(b"", &dir, b"f")[..], *b"\x01\0\x06\0\x02d\0\x01f");
        assert_eq!(
            shared_record(&shared_inode(b"", 7))[..],
            *b"\x01\0\x05\0\0\0\0\0\0\0\x07"
        );
        assert_eq!(
            block_number(&blocks(&dir), &block(&blocks(&dir), 9)),
            Some(9)
        );
        assert_eq!(note(&dir, 7)[..], *b"\x03\0\x02d\0\x0d\0\0\0\0\0\0\0\x07");
        assert_eq!(joining(&dir)[..], *b"\x03\0\x02d\0\x10");
        let removed = [&removed_links(&dir, 7)[..], b"\x02e\0\x01f"].concat();
        assert_eq!(
            removed,
            b"\x03\0\x02d\0\x0e\0\0\0\0\0\0\0\x07\0\x02e\0\x01f"
        );
    }

    #[test]
    fn keys_of_notes_tell_clone_root_and_number() {
        let dir = child(&child(b"", b"d"), b"\x0d");
        for root in [&b""[..], &dir] {
            let told = |key: &[u8]| parse_note(key).map(|(path, note)| (path.to_vec(), note));
            let told_note = told(&note(root, 1 << 40));
            assert_eq!(told_note, Some((root.to_vec(), NoteKey::Note(1 << 40))));
            let removed = [&removed_links(root, 5)[..], b"\x01f"].concat();
            assert_eq!(told(&removed), Some((root.to_vec(), NoteKey::Removed(5))));
            assert_eq!(
                told(&joining(root)),
                Some((root.to_vec(), NoteKey::Joining))
            );
            let record = shared_record(&shared_inode(root, 9));
            assert_eq!(link_of_record(root, &record), Some(9));
            let attribute = xattr(&shared_inode(root, 9), b"user.a");
            assert_eq!(link_of_record(root, &attribute), None);
        }
        for damaged in [
            &b"\x03"[..],
            b"\x03\0\x0d",
            b"\x03\0\x02d",
            b"\x03\0\x05",
            b"",
        ] {
            assert_eq!(parse_note(damaged), None, "{damaged:?}");
        }
    }
}
