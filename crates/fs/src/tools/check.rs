//! The invariants of the key space, and the check of them: one pass over all keys.
//!
//! - F1 Every key parses, every value decodes.
//! - F2 Every key belongs to an inode that exists and may have it: entries to directories, blocks
//!   to files, shared inodes and link entries to clone roots. Orphans exist only while the volume
//!   is open. Keys below a deleted entry belong to its object; below a directory they are deleted
//!   entries.
//! - F3 A directory has 2 links and one for each directory in it.
//! - F4 A shared inode has as many links as link entries name it, when the notes of its clone root
//!   are carried out; the link index has exactly the link entries, each under the nearest clone
//!   root.
//! - F5 No two inodes have one visible number, and a link entry shows its shared inode's.
//! - F6 Blocks have numbers below the size rounded up, at most 4096 bytes, and zeros beyond the
//!   size.
//! - F7 A file that is not marked sparse has every block.
//! - F8 Extended attributes belong only to inodes marked to have some.
//! - F9 Every generation and every link number is below the volume's counter of generations.
//! - F10 A sparse file has the blocks that its map tells of, and as many as its record counts; no
//!   other file has a map.
//! - F11 The flags of a record say which access control lists the object has, and its mode has the
//!   permission bits of the list that decides.
//! - F12 The table of protected inodes has an entry only for an inode that exists and is marked, and
//!   for each directory with such inodes below it their count.
//! - F13 Each entry of a directory has a slot of its own below the next slot. The slot index of the
//!   directory leads to each of them and has no other keys. A directory whose next slot is at most
//!   1024 has no index; at 1024 some keys may be there. No entry has slot 1024.
//! - F14 Blocks of numbers and free blocks are disjoint and below the volume's counter. Each block
//!   belongs to a run of a directory that is there or waits for its reclaim, or is held by a pin, and
//!   each number that was shown lies in one.
//! - F15 Each pinned inode is in the table of pins with its place, and each pin in a directory that
//!   is there has its inode.
//! - F17 Notes belong to clone roots, and removed names to notes. A record is counted up to a note
//!   only if it is of a shared inode.
//! - F16 Snapshots have records with names, ids below the next one, each once, and keys below no
//!   other id; their count is right.
//!
//! - F18 Forks have records whose ids, and those of their bases, are below the volume's counter of
//!   generations. Each base that a record tells of exists, in one record, and no other base does.
//!
//! F5 and F13 to F15 are in `check_numbers.rs`, F16 is in `check_snapshots.rs`, F17 is in
//! `check_notes.rs`, F18 is in `check_forks.rs`. All but F16 and F18 holds in each snapshot as
//! well. In the base of a fork, which has no tables of the volume, all holds but these and F5, F12,
//! F14 and F15.
//!
//! The check remembers every inode, some hundred bytes for each, and a bit for each block of one
//! sparse file. It ends where that would be more memory than it may take: a small volume may show
//! more files, by clones of clones, than any memory holds.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use ramet_betree::{Snapshot, Tree, successor_of_prefix};

use crate::error::{Error, Result};
use crate::format::acl::Acl;
use crate::format::blocks::BLOCK_BYTES;
use crate::format::ino::{Identity, ROOT_INO};
use crate::format::keys::{self, NumberKey};
use crate::format::record::{
    DeletedEntry, Entry, FLAG_ACL, FLAG_CLONE_ROOT, FLAG_DEFAULT_ACL, FLAG_PROTECTED, FLAG_SPARSE,
    FLAG_XATTRS, Kind, LinkEntry, Record,
};
use crate::format::slots::Slot;
use crate::namespace::numbers::Counters;
use crate::namespace::protection::{Protection, decode_count};
use crate::ops::acl::flag_of;
use crate::ops::allocation::{CHUNK_BLOCKS, Chunk};
use crate::tools::checked_notes::CheckedNotes;
use crate::tools::checked_tables::Tables;

/// Memory of a key that the check remembers, beside its bytes; an estimate.
const REMEMBERED_BYTES: u64 = 576;

/// A violated invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its number: `F3`.
    pub invariant: &'static str,
    /// The keys that violate it, and how.
    pub detail: String,
}

/// The subject of a key, behind the path that it belongs to.
enum Tail {
    Entry(Bytes),
    Block(u64),
    Map(u64),
    Xattr(Bytes),
    Record,
    Link { dir: Bytes, name: Bytes },
    Counter,
    Protected(Bytes),
    Root,
    Slot(Slot),
    Numbers(NumberKey),
}

/// Splits a key after its index: the path that it belongs to, and its subject.
fn parse(key: &Bytes) -> Option<(Bytes, Tail)> {
    let mut at = 1;
    loop {
        let owner = key.slice(1..at);
        if at == key.len() {
            return Some((owner, Tail::Record));
        }
        let (&zero, &tag) = (key.get(at)?, key.get(at + 1)?);
        if zero != 0 {
            return None;
        }
        let rest = key.slice(at + 2..);
        match tag {
            0 => return Some((owner, Tail::Slot(keys::parse_slot(&rest)?))),
            1 => return Some((owner, Tail::Entry(rest))),
            2 => {
                let len = rest.iter().position(|&byte| byte == 0)?;
                at += 2 + len;
            }
            3 => {
                return Some((
                    owner,
                    Tail::Block(u64::from_be_bytes(rest[..].try_into().ok()?)),
                ));
            }
            4 => return Some((owner, Tail::Xattr(rest))),
            10 => {
                return Some((
                    owner,
                    Tail::Map(u64::from_be_bytes(rest[..].try_into().ok()?)),
                ));
            }
            5 | 7 if rest.len() >= 8 => at += 10,
            6 => {
                let split = rest.iter().rposition(|&byte| byte == 0)?;
                let name = rest
                    .slice(split..)
                    .strip_prefix(&[0, 1])
                    .map(|_| rest.slice(split + 2..))?;
                return Some((
                    owner,
                    Tail::Link {
                        dir: rest.slice(..split),
                        name,
                    },
                ));
            }
            8 if at == 1 => return Some((owner, Tail::Counter)),
            15 if at == 1 && rest.len() == 9 => return Some((owner, Tail::Protected(rest))),
            11 if at == 1 && rest.is_empty() => return Some((owner, Tail::Root)),
            12 if at == 1 => return Some((owner, Tail::Numbers(NumberKey::parse(&rest)?))),
            _ => return None,
        }
    }
}

pub(super) struct Object {
    pub(super) record: Record,
    /// Path of its directory, or clone root.
    pub(super) home: Bytes,
    pub(super) is_shared: bool,
}

impl Object {
    pub(super) fn is_dir(&self) -> bool {
        self.record.kind() == Kind::Directory
    }
}

/// Violations that were found.
#[derive(Default)]
pub(super) struct Findings(Vec<Finding>);

impl Findings {
    pub(super) fn add(&mut self, invariant: &'static str, detail: String) {
        self.0.push(Finding { invariant, detail });
    }

    pub(super) fn into_all(self) -> Vec<Finding> {
        self.0
    }
}

#[derive(Default)]
pub(super) struct Scan {
    pub(super) objects: BTreeMap<Bytes, Object>,
    pub(super) links: Vec<(Bytes, Bytes, LinkEntry)>,
    /// Paths of deleted entries, with the directory of each.
    pub(super) deleted: BTreeMap<Bytes, (Bytes, DeletedEntry)>,
    /// Names by directory and slot.
    pub(super) slots: HashMap<(Bytes, Slot), Bytes>,
    pub(super) tables: Tables,
    pub(super) notes: CheckedNotes,
    indexed: BTreeSet<(Bytes, Bytes, Bytes, u64)>,
    with_xattrs: BTreeSet<Bytes>,
    /// Access control lists, with the flag and the bytes of each.
    lists: BTreeMap<Bytes, Vec<(u16, Bytes)>>,
    /// The table of protected inodes: those that have an entry, and the counts of directories.
    protected: BTreeSet<u64>,
    protected_below: BTreeMap<u64, u64>,
    /// Number of blocks of each file that has any.
    counts: HashMap<Bytes, u64>,
    findings: Vec<Finding>,
}

impl Scan {
    fn found(&mut self, invariant: &'static str, detail: String) {
        self.findings.push(Finding { invariant, detail });
    }

    fn meta(&mut self, key: &Bytes, value: &Bytes) {
        let Some((owner, tail)) = parse(key) else {
            return self.found("F1", format!("key {key:?}"));
        };
        match tail {
            Tail::Counter => {}
            Tail::Protected(rest) => self.protected(&rest, value),
            Tail::Slot(slot) => {
                self.slots.insert((owner, slot), value.clone());
            }
            Tail::Numbers(key) => {
                if let Err(error) = self.tables.add(key, value) {
                    self.found("F1", format!("{key:?}: {error}"));
                }
            }
            Tail::Xattr(name) => {
                if let Some(flag) = flag_of(&name) {
                    let lists = self.lists.entry(owner.clone()).or_default();
                    lists.push((flag, value.clone()));
                }
                self.with_xattrs.insert(owner);
            }
            Tail::Block(_) | Tail::Map(_) => self.found("F1", format!("key {key:?}")),
            Tail::Link { dir, name } => match value[..].try_into() {
                Ok(link) => {
                    self.indexed
                        .insert((owner, dir, name, u64::from_be_bytes(link)));
                }
                Err(_) => self.found("F1", format!("link_entry index {key:?}: {value:?}")),
            },
            Tail::Root => self.record(Bytes::new(), Bytes::new(), value, false),
            Tail::Entry(name) => self.record(keys::child(&owner, &name), owner, value, false),
            Tail::Record => match owner.len().checked_sub(10) {
                Some(at) if owner[at..at + 2] == [0, 5] => {
                    self.record(owner.clone(), owner.slice(..at), value, true)
                }
                _ => self.found("F2", format!("record of an orphan: {key:?}")),
            },
        }
    }

    fn record(&mut self, path: Bytes, home: Bytes, value: &Bytes, is_shared: bool) {
        match Entry::decode(value) {
            Ok(Entry::Inode(record)) => {
                self.objects.insert(
                    path,
                    Object {
                        record,
                        home,
                        is_shared,
                    },
                );
            }
            Ok(Entry::Link(link_entry)) if !is_shared => self.links.push((path, home, link_entry)),
            Ok(Entry::Deleted(deleted)) if !is_shared => {
                self.deleted.insert(path, (home, deleted));
            }
            Ok(Entry::Link(_) | Entry::Deleted(_)) => {
                self.found("F1", format!("shared {path:?} is a name"));
            }
            Err(error) => self.found("F1", format!("{path:?}: {error}")),
        }
    }

    /// The path of the nearest clone root at or above the directory at `dir`.
    pub(super) fn root_of(&self, dir: &Bytes) -> Option<Bytes> {
        let mut at = dir.clone();
        loop {
            let object = self.objects.get(&at)?;
            if object.record.has(FLAG_CLONE_ROOT) {
                return Some(at);
            }
            at = object.home.clone();
        }
    }

    /// Compares the records, link entries and deleted entries with each other, and with the tables
    /// of the volume if they are here. `counters` are those of the volume.
    fn compare(&mut self, counters: Counters, has_tables: bool) {
        let mut findings = Findings::default();
        self.compare_homes(&mut findings);
        self.compare_directories(&mut findings);
        self.compare_links(counters, &mut findings);
        self.compare_notes(counters, &mut findings);
        self.compare_deleted(&mut findings);
        self.compare_xattrs(&mut findings);
        self.compare_lists(&mut findings);
        self.compare_slots(&mut findings);
        if has_tables {
            self.compare_protected(&self.identities(), &mut findings);
            self.compare_numbers(counters, &mut findings);
        }
        self.findings.append(&mut findings.0);
    }

    /// F2 for inodes.
    fn compare_homes(&self, findings: &mut Findings) {
        for (path, object) in &self.objects {
            let home = self.objects.get(&object.home);
            if !home.is_some_and(Object::is_dir) {
                findings.add("F2", format!("{path:?} lies in no directory"));
            } else if object.is_shared && !home.is_some_and(|home| home.record.has(FLAG_CLONE_ROOT))
            {
                let detail = format!("shared inode {path:?} lies in no clone root");
                findings.add("F2", detail);
            }
        }
    }

    /// F3, and F4 for inodes with one name.
    fn compare_directories(&self, findings: &mut Findings) {
        let mut subdirs: HashMap<&Bytes, u32> = HashMap::new();
        for (path, object) in &self.objects {
            if object.is_dir() && !path.is_empty() {
                *subdirs.entry(&object.home).or_default() += 1;
            }
        }
        for (path, object) in &self.objects {
            let found = object.record.nlink;
            if object.is_dir() {
                let links = 2 + subdirs.get(path).copied().unwrap_or(0);
                if found != links {
                    findings.add("F3", format!("{path:?} has {found} links, not {links}"));
                }
            } else if !object.is_shared && found != 1 {
                findings.add("F4", format!("{path:?} has {found} links and one name"));
            }
        }
    }

    /// F4 and F9 for link entries.
    fn compare_links(&self, counters: Counters, findings: &mut Findings) {
        let mut names: HashMap<Bytes, u32> = HashMap::new();
        let mut indexed = self.indexed.clone();
        for (path, dir, entry) in &self.links {
            let Some(root) = self.root_of_link(dir, entry.link) else {
                findings.add("F2", format!("link entry {path:?} lies in no directory"));
                continue;
            };
            let name = path.slice(dir.len() + 2..);
            if !indexed.remove(&(root.clone(), dir.slice(root.len()..), name, entry.link)) {
                let detail = format!("link entry {path:?} is not in the index of {root:?}");
                findings.add("F4", detail);
            }
            let shared = keys::shared_inode(&root, entry.link);
            self.compare_link((path, entry), &shared, findings);
            if entry.link >= counters.generation {
                let last = counters.generation;
                let detail = format!("shared inode {shared:?} is above the counter, {last}");
                findings.add("F9", detail);
            }
            *names.entry(shared).or_default() += 1;
        }
        for (root, dir, name, link) in indexed {
            let detail = format!(
                "index of {root:?} has {link} for {dir:?} {name:?}, which is no link entry"
            );
            findings.add("F4", detail);
        }
        for (path, object) in self.objects.iter().filter(|(_, object)| object.is_shared) {
            let names = names.get(path).copied().unwrap_or(0);
            self.compare_count((path, object), names, findings);
        }
    }

    /// Compares a link entry with the shared inode at `shared`.
    fn compare_link(
        &self,
        (path, entry): (&Bytes, &LinkEntry),
        shared: &Bytes,
        findings: &mut Findings,
    ) {
        let Some(object) = self.objects.get(shared) else {
            let detail =
                format!("link entry {path:?} names shared inode {shared:?}, which is missing");
            return findings.add("F4", detail);
        };
        if Kind::from_mode(object.record.mode) != Some(entry.kind) {
            let detail = format!("link entry {path:?} is of another kind than {shared:?}");
            findings.add("F4", detail);
        }
    }

    /// F2 for deleted entries.
    fn compare_deleted(&self, findings: &mut Findings) {
        for (path, (home, _)) in &self.deleted {
            let is_deleted_dir =
                |(_, deleted): &(Bytes, DeletedEntry)| deleted.kind == Kind::Directory;
            if !self.objects.get(home).is_some_and(Object::is_dir)
                && !self.deleted.get(home).is_some_and(is_deleted_dir)
            {
                findings.add("F2", format!("deleted entry {path:?} lies in no directory"));
            }
        }
    }

    /// F8, and F2 for extended attributes.
    fn compare_xattrs(&self, findings: &mut Findings) {
        for path in &self.with_xattrs {
            match self.objects.get(path) {
                Some(object) if object.record.has(FLAG_XATTRS) => {}
                Some(_) => {
                    findings.add("F8", format!("{path:?} has attributes and is not marked"));
                }
                None if self.deleted.contains_key(path) => {}
                None => findings.add("F2", format!("attributes of {path:?}, which is missing")),
            }
        }
    }
}

impl Scan {
    /// F11.
    fn compare_lists(&self, findings: &mut Findings) {
        const BOTH: u16 = FLAG_ACL | FLAG_DEFAULT_ACL;
        for (path, object) in &self.objects {
            let found = self.lists.get(path).map_or(&[][..], |lists| lists);
            let flags = found.iter().fold(0, |flags, (flag, _)| flags | flag);
            let marked = object.record.flags & BOTH;
            if flags != marked {
                let detail = format!("{path:?} is marked {marked:#x} and has lists {flags:#x}");
                findings.add("F11", detail);
            }
            for (flag, bytes) in found {
                let bits = object.record.mode & 0o777;
                let is_right = Acl::decode(bytes)
                    .is_ok_and(|list| *flag == FLAG_DEFAULT_ACL || list.mode_bits() == bits);
                if !is_right {
                    findings.add(
                        "F11",
                        format!("{path:?} has mode {bits:#o}, list {bytes:?}"),
                    );
                }
            }
        }
    }
}

impl Scan {
    /// Notes an entry of the table of protected inodes.
    fn protected(&mut self, key: &Bytes, value: &Bytes) {
        let ino = u64::from_be_bytes(key[1..].try_into().expect("the parser counts the bytes"));
        let is_noted = match key[0] {
            0 => Protection::decode(value)
                .map(|_| self.protected.insert(ino))
                .is_ok(),
            1 => decode_count(value)
                .map(|count| self.protected_below.insert(ino, count))
                .is_ok(),
            _ => false,
        };
        if !is_noted {
            self.found("F1", format!("protection {key:?}: {value:?}"));
        }
    }

    /// F12.
    fn compare_protected(&self, identities: &HashMap<&Bytes, Identity>, findings: &mut Findings) {
        let (mut left, mut counts) = (self.protected.clone(), BTreeMap::<u64, u64>::new());
        for (path, object) in &self.objects {
            let ino = identities.get(path).map(|identity| identity.ino.0);
            if !ino.is_some_and(|ino| left.remove(&ino)) {
                continue;
            }
            if !object.record.has(FLAG_PROTECTED) {
                findings.add("F12", format!("{path:?} is protected and not marked"));
            }
            let mut at = path;
            while !at.is_empty()
                && let Some(object) = self.objects.get(at)
            {
                at = &object.home;
                if let Some(identity) = identities.get(at) {
                    *counts.entry(identity.ino.0).or_default() += 1;
                }
            }
        }
        for ino in left {
            findings.add(
                "F12",
                format!("inode {ino} is protected and does not exist"),
            );
        }
        if counts != self.protected_below {
            let told = &self.protected_below;
            let detail =
                format!("directories have {counts:?} protected inodes below, not {told:?}");
            findings.add("F12", detail);
        }
    }
}

/// Blocks of one file, as the pass over the data index meets them.
struct File {
    path: Bytes,
    blocks: u64,
    /// The map that a sparse file must have. Chunks are taken out when the stored map has them.
    map: Option<BTreeMap<u64, Vec<u8>>>,
}

impl File {
    /// Notes a block.
    fn add(&mut self, number: u64) {
        self.blocks += 1;
        if let Some(map) = &mut self.map {
            let chunk = map.entry(number / CHUNK_BLOCKS).or_default();
            let inside = usize::try_from(number % CHUNK_BLOCKS).expect("inside of a chunk");
            chunk.resize(chunk.len().max(inside / 8 + 1), 0);
            chunk[inside / 8] |= 1 << (inside % 8);
        }
    }
}

impl Scan {
    /// Makes `file` the file that a key of the data index belongs to.
    fn file_at(&mut self, owner: &Bytes, file: &mut Option<File>) {
        if file.as_ref().is_some_and(|file| file.path == *owner) {
            return;
        }
        self.finish_file(file.take());
        let object = self.objects.get(owner);
        let is_sparse = object.is_some_and(|object| object.record.has(FLAG_SPARSE));
        *file = Some(File {
            path: owner.clone(),
            blocks: 0,
            map: is_sparse.then(BTreeMap::new),
        });
    }

    fn is_deleted_file(&self, path: &Bytes) -> bool {
        let found = self.deleted.get(path);
        found.is_some_and(|(_, deleted)| deleted.kind == Kind::Regular)
    }

    fn finish_file(&mut self, file: Option<File>) {
        let Some(file) = file else { return };
        for chunk in file.map.into_iter().flatten().map(|(chunk, _)| chunk) {
            let path = &file.path;
            self.found(
                "F10",
                format!("blocks of {path:?} are not in chunk {chunk}"),
            );
        }
        self.counts.insert(file.path, file.blocks);
    }

    /// Compares a chunk of the allocation map, which comes after all blocks of its file.
    fn chunk(&mut self, owner: &Bytes, number: u64, value: &Bytes, file: &mut Option<File>) {
        if self.is_deleted_file(owner) {
            return;
        }
        if !self.objects.contains_key(owner) {
            return self.found("F2", format!("map of {owner:?}, which is no file"));
        }
        self.file_at(owner, file);
        let Some(map) = file.as_mut().and_then(|file| file.map.as_mut()) else {
            return self.found("F10", format!("{owner:?} has a map and is not sparse"));
        };
        let expected = map.remove(&number).unwrap_or_default();
        let is_right = Chunk::decode(value).is_ok_and(|chunk| {
            let bit = |block: u64| {
                let byte = usize::try_from(block / 8).expect("inside of a chunk");
                expected
                    .get(byte)
                    .is_some_and(|byte| byte & 1 << (block % 8) != 0)
            };
            (0..CHUNK_BLOCKS).all(|block| chunk.has(block) == bit(block))
        });
        if !is_right {
            self.found(
                "F10",
                format!("chunk {number} of {owner:?} is not its blocks"),
            );
        }
    }

    fn block(&mut self, key: &Bytes, value: &Bytes, file: &mut Option<File>) {
        let (owner, number) = match parse(key) {
            Some((owner, Tail::Block(number))) => (owner, number),
            Some((owner, Tail::Map(number))) => return self.chunk(&owner, number, value, file),
            _ => return self.found("F1", format!("key {key:?}")),
        };
        let size_bytes = match self.objects.get(&owner) {
            Some(object) if Kind::from_mode(object.record.mode) == Some(Kind::Regular) => {
                object.record.size_bytes
            }
            _ if self.is_deleted_file(&owner) => return,
            _ => {
                return self.found(
                    "F2",
                    format!("block {number} of {owner:?}, which is no file"),
                );
            }
        };
        self.file_at(&owner, file);
        if let Some(file) = file {
            file.add(number);
        }
        let start = number.saturating_mul(BLOCK_BYTES);
        let kept = usize::try_from(size_bytes.saturating_sub(start)).unwrap_or(usize::MAX);
        if start >= size_bytes || value.len() as u64 > BLOCK_BYTES {
            self.found(
                "F6",
                format!(
                    "block {number} of {} bytes in {owner:?}, {size_bytes} bytes",
                    value.len()
                ),
            );
        } else if value
            .get(kept..)
            .is_some_and(|rest| rest.iter().any(|&byte| byte != 0))
        {
            self.found(
                "F6",
                format!("block {number} of {owner:?} has bytes beyond the end"),
            );
        }
    }
}

impl Scan {
    /// Compares the blocks of all files with their records.
    fn count(&mut self) {
        let mut findings = Vec::new();
        for (path, object) in &self.objects {
            if object.record.kind() != Kind::Regular {
                continue;
            }
            let found = self.counts.get(path).copied().unwrap_or(0);
            let (invariant, told) = if object.record.has(FLAG_SPARSE) {
                ("F10", object.record.blocks)
            } else {
                ("F7", object.record.size_bytes.div_ceil(BLOCK_BYTES))
            };
            if found != told {
                let detail = format!("{path:?} has {found} blocks, not {told}");
                findings.push(Finding { invariant, detail });
            }
        }
        self.findings.append(&mut findings);
    }
}

/// Checks every invariant of the live file system, in about `memory_bytes` at most. Files that are
/// unlinked and open are left out.
///
/// # Errors
/// `CheckTooLarge`, and those of the tree. A violated invariant is a finding, not an error.
pub(crate) fn check(tree: &Tree, memory_bytes: u64) -> Result<Vec<Finding>> {
    check_with(tree, None, memory_bytes)
}

/// Checks the base of a fork in its window. `counters` are those of the volume.
///
/// # Errors
/// As [`check`].
pub(super) fn check_base(
    base: &Tree,
    counters: Counters,
    memory_bytes: u64,
) -> Result<Vec<Finding>> {
    check_with(base, Some(counters), memory_bytes)
}

fn check_with(tree: &Tree, of_volume: Option<Counters>, memory_bytes: u64) -> Result<Vec<Finding>> {
    let snapshot = tree.snapshot();
    let (mut scan, mut taken) = (Scan::default(), 0);
    for item in entries(&snapshot, keys::META) {
        let (key, value) = item?;
        // The path stands in several tables.
        taken += 3 * key.len() as u64 + value.len() as u64 + REMEMBERED_BYTES;
        if taken > memory_bytes {
            return Err(Error::CheckTooLarge {
                bytes: memory_bytes,
            });
        }
        scan.meta(&key, &value);
    }
    let mut findings = Findings::default();
    let found = |invariant, detail| findings.add(invariant, detail);
    scan.notes.read(&snapshot, found)?;
    scan.findings.append(&mut findings.0);
    if !scan.objects.contains_key(&Bytes::new()) {
        return Err(Error::Corrupt {
            what: "record of the root",
            detail: format!("{} is missing", ROOT_INO.0),
        });
    }
    let has_tables = of_volume.is_none();
    let counters = match of_volume {
        Some(counters) => counters,
        None => Counters::read(tree)?,
    };
    scan.compare(counters, has_tables);
    let mut file = None;
    for item in entries(&snapshot, keys::DATA) {
        let (key, value) = item?;
        scan.block(&key, &value, &mut file);
    }
    scan.finish_file(file);
    scan.count();
    Ok(scan.findings)
}

/// All keys of the live file system in an index, but orphans.
fn entries(
    snapshot: &Snapshot,
    index: u8,
) -> impl Iterator<Item = ramet_betree::Result<(Bytes, Bytes)>> {
    let orphans = keys::orphans(index);
    let behind = successor_of_prefix(&orphans).expect("tags are small");
    let before = snapshot.scan(&[index], Some(&orphans));
    before.chain(snapshot.scan(&behind, Some(&keys::snapshots(index))))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ramet_betree::Batch;
    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::format::ino::Ino;
    use crate::format::record::Pin;
    use crate::format::slots::{Block, Run, SLOTS_WITHOUT_INDEX};
    use crate::namespace::number_tables::{put_block, put_pin, stored_block};
    use crate::{FormatOptions, NewInode, OpenOptions, RenameMode, Volume};

    /// A volume with a directory `d`, a file `d/f` of 5000 bytes, and a file with the names `d/l`
    /// and `m`.
    fn volume() -> Arc<Volume> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let make = |dir, name: &[u8], kind| {
            let new = NewInode::new(kind, 0o755);
            volume.names().create(dir, name, &new).unwrap().ino
        };
        let dir = make(ROOT_INO, b"d", Kind::Directory);
        let file = make(dir, b"f", Kind::Regular);
        volume.files().write(file, 0, &[1; 5000], None).unwrap();
        let linked = make(dir, b"l", Kind::Regular);
        volume.names().link(linked, ROOT_INO, b"m").unwrap();
        assert_eq!(volume.controls().check().unwrap(), []);
        volume
    }

    fn invariants(forge: impl FnOnce(&Volume, &mut Batch)) -> Vec<&'static str> {
        let volume = volume();
        let mut batch = Batch::new();
        forge(&volume, &mut batch);
        volume.tree().apply(batch).unwrap();
        let mut found: Vec<_> = volume
            .controls()
            .check()
            .unwrap()
            .iter()
            .map(|finding| finding.invariant)
            .collect();
        found.dedup();
        found
    }

    #[test]
    fn a_check_ends_where_the_files_take_more_memory_than_it_may() {
        let volume = volume();
        let within = |bytes| volume.controls().check_within(bytes);
        assert_eq!(within(1 << 20).unwrap(), []);
        let refused = within(1000);
        assert!(matches!(refused, Err(Error::CheckTooLarge { bytes: 1000 })));
    }

    fn entry_of(volume: &Volume, key: &[u8]) -> Record {
        match Entry::decode(&volume.tree().get(key).unwrap().unwrap()).unwrap() {
            Entry::Inode(record) => record,
            Entry::Link(_) | Entry::Deleted(_) => panic!("no record"),
        }
    }

    fn link_of(volume: &Volume) -> u64 {
        match Entry::decode(&volume.tree().get(&keys::entry(b"", b"m")).unwrap().unwrap()).unwrap()
        {
            Entry::Link(link_entry) => link_entry.link,
            Entry::Inode(_) | Entry::Deleted(_) => panic!("no link_entry"),
        }
    }

    fn dir() -> Bytes {
        keys::child(b"", b"d")
    }

    fn blocks() -> Bytes {
        keys::blocks(&keys::child(&dir(), b"f"))
    }

    #[test]
    fn f1_bytes_that_do_not_parse_are_found() {
        assert_eq!(
            invariants(|_, batch| batch.put(&b"\x01\0\x0d"[..], "")),
            ["F1"]
        );
        assert_eq!(
            invariants(|_, batch| batch.put(keys::entry(&dir(), b"x"), "nonsense")),
            ["F1"]
        );
        assert_eq!(
            invariants(|_, batch| batch.put(keys::xattr(b"\0\x02d\0\x0c", b""), "")),
            ["F1"]
        );
    }

    #[test]
    fn f2_a_key_of_no_inode_is_found() {
        let value = |volume: &Volume| entry_of(volume, &keys::entry(&dir(), b"f")).encode();
        let lost = keys::entry(&keys::child(b"", b"lost"), b"x");
        assert!(invariants(|volume, batch| batch.put(lost, value(volume))).contains(&"F2"));
        let block = keys::block(&keys::blocks(&dir()), 0);
        assert_eq!(invariants(|_, batch| batch.put(block, "x")), ["F2"]);
        let xattr = keys::xattr(&keys::child(b"", b"lost"), b"user.x");
        assert_eq!(invariants(|_, batch| batch.put(xattr, "x")), ["F2"]);
        let deleted_at = |kind, slot| {
            let deleted = DeletedEntry {
                kind,
                slot: Slot(slot),
                pin: None,
            };
            deleted.encode()
        };
        let deleted = |kind| deleted_at(kind, 0);
        let file = keys::entry(&dir(), b"f");
        assert_eq!(
            invariants(|_, batch| batch.put(file.clone(), deleted(Kind::Regular))),
            [""; 0]
        );
        assert_eq!(
            invariants(|_, batch| batch.put(file, deleted(Kind::Directory))),
            ["F2"]
        );
        let lost = keys::entry(&keys::child(b"", b"lost"), b"x");
        assert_eq!(
            invariants(|_, batch| batch.put(lost, deleted(Kind::Regular))),
            ["F2"]
        );
        let top = keys::entry(b"", b"d");
        assert!(invariants(|_, batch| batch.put(top, deleted(Kind::Directory))).contains(&"F2"));
    }

    #[test]
    fn f3_a_wrong_number_of_subdirectories_is_found() {
        let forged = invariants(|volume, batch| {
            let key = keys::entry(b"", b"d");
            let mut record = entry_of(volume, &key);
            record.nlink = 3;
            batch.put(key, record.encode());
        });
        assert_eq!(forged, ["F3"]);
    }

    #[test]
    fn f4_links_that_disagree_are_found() {
        let index = keys::link(b"", &dir(), b"l");
        assert_eq!(invariants(|_, batch| batch.delete(index)), ["F4"]);
        let shared =
            |volume: &Volume| keys::shared_record(&keys::shared_inode(b"", link_of(volume)));
        assert_eq!(
            invariants(|volume, batch| batch.delete(shared(volume))),
            ["F4", "F15"]
        );
        assert_eq!(
            invariants(|_, batch| batch.delete(keys::entry(b"", b"m"))),
            ["F4"]
        );
        let extra = keys::link(b"", b"", b"extra");
        assert_eq!(
            invariants(|_, batch| batch.put(extra, 5u64.to_be_bytes().to_vec())),
            ["F4"]
        );
    }

    #[test]
    fn f5_one_number_for_two_is_found() {
        let forged = invariants(|volume, batch| {
            // A name of another directory is pinned to the number of `d/f`.
            let mut twin = entry_of(volume, &keys::entry(&dir(), b"f"));
            let dir = volume.names().lookup(ROOT_INO, b"d").unwrap();
            let file = volume.names().lookup(dir.ino, b"f").unwrap();
            let pin = Pin {
                identity: Identity {
                    ino: file.ino,
                    generation: file.generation,
                },
                home: Identity::ROOT,
            };
            let mut root = entry_of(volume, &keys::root_record());
            (twin.size_bytes, twin.slot, twin.pin) = (0, Slot(root.next_slot), Some(pin));
            root.next_slot += 1;
            batch.put(keys::root_record(), root.encode());
            batch.put(keys::entry(b"", b"twin"), twin.encode());
            put_pin(batch, pin, twin.slot);
        });
        assert_eq!(forged, ["F5"]);
    }

    /// Identity of the directory `d`.
    fn identity_of_dir(volume: &Volume) -> Identity {
        let attr = volume.names().lookup(ROOT_INO, b"d").unwrap();
        Identity {
            ino: attr.ino,
            generation: attr.generation,
        }
    }

    #[test]
    fn f13_slots_that_are_not_those_of_the_names_are_found() {
        let slot = |slot| keys::slot(&dir(), Slot(slot));
        assert_eq!(invariants(|_, batch| batch.put(slot(0), "f")), ["F13"]);
        assert_eq!(invariants(|_, batch| batch.put(slot(9), "f")), ["F13"]);
        let next = |volume: &Volume, batch: &mut Batch, next_slot| {
            let mut record = entry_of(volume, &keys::entry(b"", b"d"));
            record.next_slot = next_slot;
            batch.put(keys::entry(b"", b"d"), record.encode());
        };
        // The index of a larger directory is whole, and before that some keys may be there.
        for (next_slot, name, broken) in [
            (SLOTS_WITHOUT_INDEX + 1, Some("f"), false),
            (SLOTS_WITHOUT_INDEX + 1, Some("other"), true),
            (SLOTS_WITHOUT_INDEX + 1, None, true),
            (SLOTS_WITHOUT_INDEX, Some("f"), false),
            (SLOTS_WITHOUT_INDEX, Some("other"), true),
            (SLOTS_WITHOUT_INDEX, None, false),
            (SLOTS_WITHOUT_INDEX - 1, Some("f"), true),
            (SLOTS_WITHOUT_INDEX - 1, None, false),
        ] {
            let found = invariants(|volume, batch| {
                next(volume, batch, next_slot);
                if next_slot > SLOTS_WITHOUT_INDEX {
                    batch.put(slot(1), "l");
                }
                name.into_iter().for_each(|name| batch.put(slot(0), name));
            });
            assert_eq!(found == ["F13"], broken, "{next_slot} {name:?}: {found:?}");
            assert!(
                broken || found.is_empty(),
                "{next_slot} {name:?}: {found:?}"
            );
        }
        let twice = invariants(|volume, batch| {
            let mut twin = entry_of(volume, &keys::entry(&dir(), b"f"));
            twin.size_bytes = 0;
            batch.put(keys::entry(&dir(), b"twin"), twin.encode());
        });
        assert!(twice.contains(&"F13"), "{twice:?}");
        let early = invariants(|volume, batch| {
            let key = keys::entry(b"", b"d");
            let mut record = entry_of(volume, &key);
            record.next_slot = 1;
            batch.put(key, record.encode());
        });
        assert_eq!(early, ["F13"]);
    }

    #[test]
    fn f14_blocks_that_are_not_those_of_directories_are_found() {
        let forged = |forge: &dyn Fn(&mut Batch, Identity, Block)| {
            invariants(|volume, batch| {
                let dir = identity_of_dir(volume);
                let block = stored_block(volume.tree(), dir, Run(0)).unwrap().unwrap();
                forge(batch, dir, block);
            })
        };
        let owner = |base| NumberKey::Owner(base).encode();
        assert_eq!(
            forged(&|batch, _, block| batch.delete(owner(block.base))),
            ["F14"]
        );
        let free = |base| NumberKey::Free(0, base).encode();
        assert_eq!(
            forged(&|batch, _, block| batch.put(free(block.base), "")),
            ["F14"]
        );
        assert_eq!(
            forged(&|batch, _, block| batch.put(free(block.base + 4), "")),
            ["F14"]
        );
        assert_eq!(forged(&|batch, _, _| batch.put(free(1 << 30), "")), ["F14"]);
        let other = |dir: Identity| Identity {
            generation: dir.generation + 1,
            ..dir
        };
        let lost = |batch: &mut Batch, dir| {
            let block = Block {
                base: 1 << 20,
                generation: 1,
            };
            batch.put(keys::counter(b"number"), vec![0, 0, 0, 0, 1, 0, 0, 0]);
            put_block(batch, (other(dir), Run(0)), block);
        };
        assert_eq!(forged(&|batch, dir, _| lost(batch, dir)), ["F14"]);
        let waits = forged(&|batch, dir, _| {
            lost(batch, dir);
            batch.put(NumberKey::Dead(other(dir)).encode(), "");
        });
        assert_eq!(waits, [""; 0]);
    }

    #[test]
    fn f15_pins_that_are_not_those_of_inodes_are_found() {
        let forged = |forge: &dyn Fn(&mut Batch, Identity, Ino)| {
            invariants(|volume, batch| {
                let dir = identity_of_dir(volume);
                let (from, to) = ((ROOT_INO, &b"moved"[..]), (dir.ino, &b"moved"[..]));
                let new = NewInode::new(Kind::Regular, 0o644);
                let file = volume.names().create(from.0, from.1, &new).unwrap().ino;
                volume
                    .names()
                    .rename(from, to, RenameMode::Replace, None)
                    .unwrap();
                assert_eq!(volume.controls().check().unwrap(), []);
                forge(batch, dir, file);
            })
        };
        let pinned = |ino| NumberKey::Pinned(ino).encode();
        assert_eq!(
            forged(&|batch, _, file| batch.delete(pinned(file))),
            ["F15"]
        );
        let pin_of = |dir, ino| NumberKey::PinOf(dir, ino).encode();
        assert_eq!(
            forged(&|batch, dir, file| batch.delete(pin_of(dir, file))),
            ["F15"]
        );
        let extra = |batch: &mut Batch, dir, _| batch.put(pin_of(dir, Ino(9)), "");
        assert_eq!(forged(&extra), ["F15"]);
    }

    #[test]
    fn f6_blocks_beyond_the_end_are_found() {
        assert!(invariants(|_, batch| batch.put(keys::block(&blocks(), 2), "x")).contains(&"F6"));
        assert_eq!(
            invariants(|_, batch| batch.put(keys::block(&blocks(), 1), vec![1; 905])),
            ["F6"]
        );
        assert_eq!(
            invariants(|_, batch| batch.put(keys::block(&blocks(), 0), vec![1; 4097])),
            ["F6"]
        );
    }

    #[test]
    fn f7_a_missing_block_is_found() {
        assert_eq!(
            invariants(|_, batch| batch.delete(keys::block(&blocks(), 0))),
            ["F7"]
        );
    }

    #[test]
    fn f10_a_map_that_does_not_tell_the_blocks_is_found() {
        let sparse = |forge: &dyn Fn(&mut Batch, Bytes)| {
            invariants(|volume, batch| {
                let new = NewInode::new(Kind::Regular, 0o644);
                let file = volume.names().create(ROOT_INO, b"s", &new).unwrap().ino;
                volume
                    .files()
                    .write(file, 3 * BLOCK_BYTES, b"x", None)
                    .unwrap();
                volume
                    .files()
                    .write(file, 5 * BLOCK_BYTES, b"x", None)
                    .unwrap();
                assert_eq!(volume.controls().check().unwrap(), []);
                forge(batch, keys::child(b"", b"s"));
            })
        };
        let chunk = |path: &[u8], number| keys::chunk(&keys::map(path), number);
        assert_eq!(
            sparse(&|batch, path| batch.delete(chunk(&path, 0))),
            ["F10"]
        );
        assert_eq!(
            sparse(&|batch, path| batch.put(chunk(&path, 0), vec![0b1000])),
            ["F10"]
        );
        assert_eq!(
            sparse(&|batch, path| batch.put(chunk(&path, 1), Bytes::new())),
            ["F10"]
        );
        assert_eq!(
            sparse(&|batch, path| batch.put(chunk(&path, 0), vec![0; 2049])),
            ["F10"]
        );
        let block = |path: &[u8]| keys::block(&keys::blocks(path), 3);
        assert_eq!(sparse(&|batch, path| batch.delete(block(&path))), ["F10"]);
        let dense = keys::child(&dir(), b"f");
        assert_eq!(
            invariants(|_, batch| batch.put(chunk(&dense, 0), Bytes::new())),
            ["F10"]
        );
        let lost = keys::child(b"", b"lost");
        assert_eq!(
            invariants(|_, batch| batch.put(chunk(&lost, 0), Bytes::new())),
            ["F2"]
        );
    }

    #[test]
    fn f8_an_attribute_of_an_unmarked_inode_is_found() {
        let key = keys::xattr(&keys::child(&dir(), b"f"), b"user.x");
        assert_eq!(invariants(|_, batch| batch.put(key, "x")), ["F8"]);
    }

    #[test]
    fn f11_lists_that_the_record_does_not_tell_are_found() {
        use crate::format::acl::ACCESS;
        // The owner and user 5 may do everything, the group and others nothing.
        let list = |mask: u8| {
            let entries = [
                (1, 7, 0xff),
                (2, 7, 5),
                (4, 0, 0xff),
                (16, mask, 0xff),
                (32, 0, 0xff),
            ];
            let mut bytes = vec![2, 0, 0, 0];
            for (tag, perm, id) in entries {
                let high = if id == 5 { 0 } else { 0xff };
                bytes.extend([tag, 0, perm, 0, id, high, high, high]);
            }
            bytes
        };
        let forged = |forge: &dyn Fn(&mut Batch, Bytes)| {
            invariants(|volume, batch| {
                let new = NewInode::new(Kind::Regular, 0o644);
                let file = volume.names().create(ROOT_INO, b"a", &new).unwrap().ino;
                let set = volume.attributes().set_list(file, ACCESS, &list(6), false);
                set.unwrap();
                assert_eq!(volume.attributes().getattr(file).unwrap().perm, 0o760);
                assert_eq!(volume.controls().check().unwrap(), []);
                forge(batch, keys::xattr(&keys::child(b"", b"a"), ACCESS));
            })
        };
        assert_eq!(forged(&|batch, key| batch.delete(key)), ["F11"]);
        assert_eq!(forged(&|batch, key| batch.put(key, list(5))), ["F11"]);
        assert_eq!(forged(&|batch, key| batch.put(key, "nonsense")), ["F11"]);
    }

    #[test]
    fn f12_a_table_of_protected_inodes_that_is_wrong_is_found() {
        use crate::{FileFlags, Ino};
        let forged = |forge: &dyn Fn(&mut Batch, Ino, Ino)| {
            invariants(|volume, batch| {
                let dir = volume.names().lookup(ROOT_INO, b"d").unwrap().ino;
                let file = volume.names().lookup(dir, b"f").unwrap().ino;
                let immutable = FileFlags {
                    immutable: true,
                    ..FileFlags::default()
                };
                volume.attributes().set_flags(file, immutable).unwrap();
                assert_eq!(volume.controls().check().unwrap(), []);
                forge(batch, dir, file);
            })
        };
        let lost = Ino(1 << 40);
        assert_eq!(
            forged(&|batch, _, file| batch.delete(keys::protection(file))),
            ["F12"]
        );
        assert_eq!(
            forged(&|batch, _, _| batch.put(keys::protection(lost), "\x01")),
            ["F12"]
        );
        assert_eq!(
            forged(&|batch, dir, _| batch.delete(keys::protected_below(dir))),
            ["F12"]
        );
        let two = 2u64.to_le_bytes().to_vec();
        assert_eq!(
            forged(&|batch, dir, _| batch.put(keys::protected_below(dir), two.clone())),
            ["F12"]
        );
        assert_eq!(
            forged(&|batch, _, file| batch.put(keys::protection(file), "\x04"))[..1],
            ["F1"]
        );
        assert_eq!(
            forged(&|batch, _, _| batch.put(keys::protection(ROOT_INO), "\x01")),
            ["F12"]
        );
    }

    #[test]
    fn f9_a_shared_inode_above_the_counter_is_found() {
        let forged = invariants(|_, batch| {
            batch.put(keys::counter(b"generation"), vec![3, 0, 0, 0, 0, 0, 0, 0])
        });
        assert_eq!(forged, ["F9"]);
    }
}
