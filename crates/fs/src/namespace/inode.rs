//! Inodes in memory, and the table of them.
//!
//! The table has at most one [`Inode`] for a visible number, so all changes of an inode are changes
//! of that one. Its record is authoritative while it is in memory. Every change is written through,
//! so an inode can be dropped and read again at any time. An inode is kept alive by a reference: of
//! the kernel (counted, see [`Table::remember`]), of a child that needs it to know its path, or of
//! an operation.
//!
//! Reading a record and putting it in the table are two steps. An inode that was changed and
//! dropped in between would come back with old contents. [`Table::evictions`] detects that. The
//! reader then reads again, with the inode already in the table and locked (`Namespace::adopt`).
//!
//! An inode that the kernel has references to and that no thread uses is made *compact* when there
//! are many of them: the table keeps its directory, its name and the count of the references. Its
//! record is read again when a request names it (`compact.rs`). The directory of a compact inode is
//! reached by names: the record of another inode may be in memory alone.
//!
//! The location of an inode in memory is as authoritative as its record: an inode whose only name
//! is `name` in `dir` is the object of that name, and the tree need not be asked. [`Table::at`]
//! finds it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use bytes::Bytes;
use foldhash::HashMap;
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};

use crate::format::ino::{Identity, Ino, ROOT_INO};
use crate::format::keys::Orphan;
use crate::format::record::{FLAG_CLONE_ROOT, FLAG_JOINING, Kind, Record, Time};
use crate::format::slots::{Run, SLOTS_MAX, Slot};
use crate::namespace::absent_names::AbsentNames;
use crate::namespace::block_notes::BlockNotes;
use crate::namespace::hints::{HINTS_MAX, HINTS_MIN, Hints};
use crate::namespace::known_blocks::KnownBlocks;
use crate::namespace::notes::KnownNotes;

/// The location of an inode.
#[derive(Clone)]
pub(crate) enum Location {
    /// The root of the volume.
    Root,
    /// Its only name.
    Child { parent: Arc<Inode>, name: Bytes },
    /// The inode has, or had, several names: it is shared inode `link` in the hidden range of the
    /// clone root `root`. `via` is the directory of the name that last led to it.
    Shared {
        root: Arc<Inode>,
        link: u64,
        via: Arc<Inode>,
    },
    /// The only name of a file, or of a directory that holds nothing but deleted entries, was
    /// removed. The contents are still there. See `ops/deferred_delete.rs`.
    Deleted { parent: Arc<Inode>, name: Bytes },
    /// The last name is gone. The contents, of a directory everything below, are in the orphan
    /// area.
    Orphan(Orphan),
    /// The file never had a name, and may get one. The contents are in the orphan area. See
    /// `ops/tmpfile.rs`.
    Unnamed(Orphan),
    /// The last name and the contents are gone.
    Gone,
}

/// Whether a directory can be reached by names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The directory is reached from the root.
    Live,
    /// The directory, or one above, is a deleted entry: it holds nothing but deleted entries and
    /// takes no entries.
    Deleted,
    /// The directory, or one above, is an orphan: inodes below that are referenced go on, and no
    /// name leads anywhere.
    Orphan,
}

/// Path of a directory, as of a generation of the topology.
#[derive(Clone)]
pub(crate) struct DirPath {
    /// `P` of `keys.rs`.
    pub(crate) path: Bytes,
    pub(crate) reach: Reach,
}

/// Contents that wait to be erased: of an inode that lost its last name while it was referenced, or
/// of a clone that failed.
pub(crate) enum Deferred {
    /// The contents are below this orphan.
    Orphan(Orphan),
    /// The contents are below the orphans before this one. The volume had no room to erase them when
    /// it was opened.
    OrphansBefore(Orphan),
    /// The contents are at and below a deleted entry.
    Entry {
        parent: Arc<Inode>,
        name: Bytes,
        /// Slot of the name.
        slot: Slot,
        /// Record of the object, unless it was not in memory.
        record: Option<Box<Record>>,
    },
}

/// Numbers of entries in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) entries: u64,
    pub(crate) deleted: u64,
}

/// The entries of a directory, locked for a change.
pub(crate) struct LockedNames<'a> {
    inode: &'a Inode,
    before: Option<Count>,
    /// Changes of the entries before this one.
    changes: u64,
    loses_none: bool,
    _held: RwLockWriteGuard<'a, ()>,
}

impl LockedNames<'_> {
    /// Whether these are the names of `dir`.
    pub(crate) fn are_of(&self, dir: &Inode) -> bool {
        std::ptr::eq(self.inode, dir)
    }

    /// Whether the table remembers that `name` did not exist before the change.
    pub(crate) fn lack(&self, name: &[u8]) -> bool {
        let directory = (self.inode.serial, self.changes);
        self.inode.table.absent.has(directory, name)
    }

    /// The counts before the change, or behind the entries that it took, if they are known.
    pub(crate) fn known(&self) -> Option<Count> {
        self.before
    }

    /// Tells that the change takes no entry away.
    pub(crate) fn lose_none(&mut self) {
        self.loses_none = true;
    }

    /// Tells that the change is done: it took one entry away, which may have become a deleted
    /// entry, and changed no other.
    pub(crate) fn took_entry(&mut self, is_deleted: bool) {
        self.is_now(|before| {
            Some(Count {
                entries: before.entries.checked_sub(1)?,
                deleted: before.deleted + u64::from(is_deleted),
            })
        });
    }

    /// Tells that the change is done: it took one deleted entry away, if there was one, and changed
    /// no other.
    pub(crate) fn took_deleted(&mut self, was_there: bool) {
        self.is_now(|before| {
            Some(Count {
                deleted: before.deleted.checked_sub(u64::from(was_there))?,
                ..before
            })
        });
    }

    /// Tells that the change changes no entry.
    pub(crate) fn changed_nothing(&mut self) {
        self.lose_none();
        self.is_now(Some);
    }

    fn is_now(&mut self, after: impl FnOnce(Count) -> Option<Count>) {
        self.before = self.before.and_then(after);
        *self.inode.count.lock() = self.before;
    }
}

impl Drop for LockedNames<'_> {
    fn drop(&mut self) {
        if !self.loses_none {
            self.inode.note_loss();
        }
    }
}

/// One file, directory or other object.
pub(crate) struct Inode {
    pub(crate) ino: Ino,
    /// Distinguishes the inodes of this number, also across mounts.
    pub(crate) generation: u64,
    /// Of a directory: blocks of numbers of its runs, as far as they were asked for.
    pub(crate) blocks: Mutex<KnownBlocks>,
    /// Of a directory: changes of its entries since it is in memory. Changes with the names held
    /// for writing.
    pub(crate) changes: AtomicU64,
    /// Of a directory: changes since it is in memory by which numbers of its names may have come
    /// free. Each is counted behind the change.
    losses: AtomicU64,
    pub(crate) kind: Kind,
    /// Of a directory: its entries. Held for writing over the check of a name and the change that
    /// follows ([`Inode::lock_names`]).
    pub(crate) names: RwLock<()>,
    /// The counts of entries, if they are known without asking the tree. Changes with the names
    /// held.
    count: Mutex<Option<Count>>,
    /// The record. Held for writing over a change of it or of the contents.
    pub(crate) state: RwLock<Record>,
    /// Changes with `state` held for writing or the topology held for writing.
    pub(crate) location: RwLock<Location>,
    /// The inode is a clone root: shared inodes are in its hidden range. Changes once, with the
    /// links and the topology held for writing.
    is_clone_root: AtomicBool,
    /// The clone root is being joined to the one around it (`ops/join.rs`). Changes with the links
    /// held for writing.
    pub(crate) is_joining: AtomicBool,
    /// Of a clone root: whether there may be link entries below it, once the tree was asked.
    /// Changes with the links held, and becomes true when a shared inode comes to the memory.
    pub(crate) has_links: Mutex<Option<bool>>,
    /// Of a clone root: its notes, once they were asked for. Changes with the links held.
    pub(crate) notes: Mutex<Option<Box<KnownNotes>>>,
    /// Path of a directory with the generation it is valid in.
    pub(crate) cached_path: Mutex<Option<(u64, DirPath)>>,
    /// The inode was changed since it was read.
    pub(crate) touched: AtomicBool,
    /// The inode had its only name when it gave its location up to leave the memory.
    left_its_place: bool,
    /// Whether a thread asked for it since the table last tried to make it compact.
    is_used: AtomicBool,
    /// Distinguishes the inodes that had this number in memory one after the other. The address
    /// would not: the end of a chain of parents moves them (see `drop`).
    serial: u64,
    table: Arc<Table>,
}

impl Inode {
    pub(crate) fn new(
        table: &Arc<Table>,
        identity: Identity,
        kind: Kind,
        record: Record,
        location: Location,
    ) -> Arc<Self> {
        Arc::new(Self {
            ino: identity.ino,
            generation: identity.generation,
            blocks: Mutex::default(),
            changes: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            kind,
            names: RwLock::new(()),
            count: Mutex::new(None),
            is_clone_root: AtomicBool::new(record.has(FLAG_CLONE_ROOT)),
            is_joining: AtomicBool::new(record.has(FLAG_JOINING)),
            has_links: Mutex::new(None),
            notes: Mutex::new(None),
            state: RwLock::new(record),
            location: RwLock::new(location),
            cached_path: Mutex::new(None),
            touched: AtomicBool::new(false),
            left_its_place: false,
            is_used: AtomicBool::new(false),
            serial: table.serials.fetch_add(1, Ordering::Relaxed),
            table: Arc::clone(table),
        })
    }

    pub(crate) fn identity(&self) -> Identity {
        Identity {
            ino: self.ino,
            generation: self.generation,
        }
    }

    pub(crate) fn is_dir(&self) -> bool {
        self.kind == Kind::Directory
    }

    /// Whether it is a clone root.
    pub(crate) fn is_clone_root(&self) -> bool {
        self.is_clone_root.load(Ordering::Relaxed)
    }

    /// The directory was a clone root, and is none any more.
    pub(crate) fn is_plain(&self) {
        self.is_clone_root.store(false, Ordering::Relaxed);
    }

    /// Locks the entries of a directory for a change. The counts are unknown afterwards, unless the
    /// change tells the entries that it took away.
    pub(crate) fn lock_names(&self) -> LockedNames<'_> {
        let held = self.names.write();
        LockedNames {
            inode: self,
            before: self.count.lock().take(),
            changes: self.changes.fetch_add(1, Ordering::Relaxed),
            loses_none: false,
            _held: held,
        }
    }

    /// Notes that numbers of names of the directory may be free.
    pub(crate) fn note_loss(&self) {
        self.losses.fetch_add(1, Ordering::SeqCst);
    }

    /// The number of these notes.
    pub(crate) fn losses(&self) -> u64 {
        self.losses.load(Ordering::SeqCst)
    }

    /// Notes that the inode in a slot of the directory, or a shared inode of the clone root, has no
    /// name there any more, or is held by a pin: the change is in the tree.
    pub(crate) fn lose(&self, slot: Slot) {
        if self.blocks.lock().lose(slot) {
            self.note_run(slot.run());
        }
    }

    /// Notes that a run of the directory is to be looked at: maybe no name holds its block.
    pub(crate) fn note_run(&self, run: Run) {
        let notes = &self.table.block_notes;
        notes.note_vacant((self.identity(), run));
    }

    /// Leaves the marks of the blocks of a directory that leaves the table. The caller has the
    /// shard of the table locked: an inode that takes the place of this one finds the marks.
    pub(super) fn leave_marks(&self) {
        if !self.is_dir() {
            return;
        }
        let record = self.state.try_read();
        let next = record.map_or(SLOTS_MAX, |record| record.next_slot);
        let left = self.blocks.lock().leave(Slot(next));
        // The blocks of a directory that is gone come back with it.
        if self.left_its_place
            || matches!(
                *self.location.read(),
                Location::Root | Location::Child { .. }
            )
        {
            self.table.block_notes.leave_all(self.identity(), left);
        }
    }

    /// Notes that the directory has no entry `name`. The caller holds the names for reading.
    pub(crate) fn lacks(&self, name: &[u8]) {
        let directory = (self.serial, self.changes.load(Ordering::Relaxed));
        self.table.absent.note(directory, name);
    }

    /// Notes the counts that a reader of a directory found. The reader holds the names.
    pub(crate) fn counted(&self, count: Count) {
        *self.count.lock() = Some(count);
    }

    /// Whether the inode is a deleted entry.
    pub(crate) fn is_deleted(&self) -> bool {
        matches!(*self.location.read(), Location::Deleted { .. })
    }

    /// Whether the last name is gone, or there never was one.
    pub(crate) fn is_nameless(&self) -> bool {
        matches!(
            *self.location.read(),
            Location::Deleted { .. } | Location::Orphan(_) | Location::Unnamed(_) | Location::Gone
        )
    }

    /// Whether the only name is `name` in `dir`.
    pub(crate) fn is_child(&self, dir: &Arc<Self>, name: &[u8]) -> bool {
        match &*self.location.read() {
            Location::Child { parent, name: its } => Arc::ptr_eq(parent, dir) && its == name,
            _ => false,
        }
    }

    /// Takes the inode out of memory: queues contents that are then to be erased, and gives the
    /// directory that it held.
    fn leave(&mut self) -> Option<Arc<Self>> {
        if self.is_nameless() {
            self.table.block_notes.look_again();
        }
        match std::mem::replace(self.location.get_mut(), Location::Gone) {
            Location::Child { parent, .. } => {
                self.left_its_place = true;
                Some(parent)
            }
            Location::Shared { root, via, .. } => {
                // Either one is an ancestor of the other, or they share one that `via` keeps.
                drop(root);
                Some(via)
            }
            Location::Deleted { parent, name } => {
                let record = self.state.get_mut().clone();
                self.table.enqueue(Deferred::Entry {
                    parent,
                    name,
                    slot: record.slot,
                    record: Some(Box::new(record)),
                });
                None
            }
            Location::Orphan(orphan) | Location::Unnamed(orphan) => {
                self.table.enqueue(Deferred::Orphan(orphan));
                None
            }
            Location::Root | Location::Gone => None,
        }
    }
}

impl Drop for Inode {
    fn drop(&mut self) {
        let is_touched = *self.touched.get_mut();
        self.table.remove(self, is_touched);
        // A child holds its parent; dropping a chain of ten thousand must not recurse as deep.
        let mut next = self.leave();
        while let Some(parent) = next {
            next = Arc::into_inner(parent).and_then(|mut parent| parent.leave());
        }
    }
}

pub(crate) const SHARDS: usize = 64;
/// A number of the table that is taken.
struct Seat {
    inode: Weak<Inode>,
    serial: u64,
    held: Option<Arc<Inode>>,
    lookups: u64,
}

/// The memory of a compact inode.
struct Compact {
    parent: Arc<Inode>,
    name: Box<[u8]>,
    lookups: u32,
    /// The access time may be in memory alone.
    atime_nanos: u32,
    atime_secs: i64,
}

impl Compact {
    /// `None` for an inode that has several names, none, or more references than a compact one
    /// counts.
    fn new(location: &Location, lookups: u64, atime: Time) -> Option<Self> {
        let Location::Child { parent, name } = location else {
            return None;
        };
        Some(Self {
            parent: Arc::clone(parent),
            name: name[..].into(),
            lookups: u32::try_from(lookups).ok()?,
            atime_nanos: atime.nanos,
            atime_secs: atime.secs,
        })
    }

    fn atime(&self) -> Time {
        Time {
            secs: self.atime_secs,
            nanos: self.atime_nanos,
        }
    }

    fn lies_at(&self, location: &Location) -> bool {
        match location {
            Location::Child { parent, name } => {
                Arc::ptr_eq(parent, &self.parent) && name[..] == self.name[..]
            }
            _ => false,
        }
    }

    /// Memory that it takes, about, in bytes.
    fn memory_bytes(&self) -> usize {
        COMPACT_BYTES + self.name.len()
    }
}

/// Memory of an entry of a map of compact inodes, two thirds full, and of the allocation of its name.
const COMPACT_BYTES: usize = (size_of::<(u64, Compact)>() + 1) * 3 / 2 + 12;
const _: () = assert!(COMPACT_BYTES <= 88);
/// Memory of an inode that is not compact with its slot, about, in bytes.
pub(crate) const WHOLE_BYTES: usize = 640;
/// Memory of a block of numbers that is in memory only, about, in bytes.
const BLOCK_BYTES: usize = 112;

#[derive(Default)]
struct Shard {
    slots: HashMap<u64, Seat>,
    compact: HashMap<u64, Compact>,
    /// Numbers of inodes in `slots`, the longest there first, and some that have left.
    order: VecDeque<u64>,
    /// Evictions when the last changed inode left this shard.
    last_eviction: u64,
    /// Places in `slots` and in `compact` behind the inodes that the kernel was asked to forget
    /// last. Asking goes on there, since the kernel may keep those.
    asked: [usize; 2],
}

/// Inodes of a shard that are looked at in one round, and those of them that may be made compact.
pub(crate) const LOOKED_AT: usize = 64;
const CANDIDATES: usize = 16;
/// Looks that a shard counts for at least, however few inodes it has.
const LOOKS_MIN: usize = 8;

/// Entries for which a map always has room.
const ROOM_MIN: usize = 64;

/// Gives the memory of a map back of which most entries have left.
fn shrink<V>(map: &mut HashMap<u64, V>) {
    if map.capacity() > ROOM_MIN && map.len() < map.capacity() / 4 {
        map.shrink_to(2 * map.len());
    }
}

impl Shard {
    /// An inode of this number is in `slots` now.
    fn enqueue(&mut self, ino: Ino) {
        self.order.push_back(ino.0);
        self.shorten_order();
    }

    /// Shortens the order if most of it has left.
    fn shorten_order(&mut self) {
        if self.order.len() > 2 * self.slots.len() + LOOKED_AT {
            self.order = self.slots.keys().copied().collect();
        }
    }

    fn remove(&mut self, ino: Ino) -> Option<Seat> {
        let slot = self.slots.remove(&ino.0);
        shrink(&mut self.slots);
        self.shorten_order();
        slot
    }

    /// Inodes that the kernel remembers and that nobody asked for in the last round, without those
    /// that others refer to, and the number of inodes that were looked at. Each of these comes last
    /// in the order then.
    fn candidates(&mut self) -> (Vec<Arc<Inode>>, usize) {
        let mut found = Vec::new();
        let mut looked_at = 0;
        while looked_at < LOOKED_AT.min(self.order.len()) && found.len() < CANDIDATES {
            looked_at += 1;
            let Some(ino) = self.order.pop_front() else {
                break;
            };
            let Some(slot) = self.slots.get(&ino) else {
                continue;
            };
            self.order.push_back(ino);
            let Some(held) = &slot.held else {
                continue;
            };
            if !held.is_used.swap(false, Ordering::Relaxed) && Arc::strong_count(held) == 1 {
                found.push(Arc::clone(held));
            }
        }
        (found, looked_at)
    }

    /// The inodes that are not compact.
    fn whole(&self) -> Vec<Arc<Inode>> {
        let all = self.slots.values().filter_map(|seat| seat.inode.upgrade());
        all.collect()
    }

    /// Up to `count` inodes that the kernel remembers and nobody uses: compact ones, and some that
    /// cannot be compact because they have several names.
    fn forgettable(&mut self, count: usize) -> Vec<Ino> {
        let is_unused = |slot: &Seat| {
            slot.held.as_ref().is_some_and(|held| {
                !held.is_used.load(Ordering::Relaxed)
                    && Arc::strong_count(held) == 1
                    && matches!(*held.location.read(), Location::Shared { .. })
            })
        };
        let [at_slot, at_compact] = &mut self.asked;
        let from = (*at_slot < self.slots.len()).then_some(*at_slot);
        let looked_at = self.slots.iter().skip(from.unwrap_or(0)).take(count);
        let shared = looked_at.filter(|(_, slot)| is_unused(slot));
        let mut found: Vec<_> = shared.map(|(ino, _)| Ino(*ino)).collect();
        *at_slot = from.unwrap_or(0) + count;
        let from = (*at_compact < self.compact.len()).then_some(*at_compact);
        let left = count - found.len();
        let compact = self.compact.keys().skip(from.unwrap_or(0)).take(left);
        found.extend(compact.map(|ino| Ino(*ino)));
        *at_compact = from.unwrap_or(0) + left;
        found
    }
}

/// All inodes in memory, by visible number.
pub(crate) struct Table {
    shards: Vec<Mutex<Shard>>,
    /// Inodes that are not compact.
    inodes: AtomicUsize,
    compact: AtomicUsize,
    compact_bytes: AtomicUsize,
    /// Blocks of numbers that are in memory only (`numbers.rs`).
    pub(crate) blocks: AtomicUsize,
    next_shard: AtomicUsize,
    next_asked: AtomicUsize,
    /// Inodes of which the kernel has dropped the last reference, so far.
    forgotten: AtomicU64,
    hints: RwLock<Hints>,
    absent: AbsentNames,
    /// The root directories so far that may be in memory. A rollback makes another one.
    roots: Mutex<Vec<Weak<Inode>>>,
    /// Notes about blocks of numbers, for the tables.
    pub(super) block_notes: BlockNotes,
    evictions: AtomicU64,
    serials: AtomicU64,
    deferred: Mutex<Vec<Deferred>>,
    /// Looks at all inodes for those of one clone root, so far.
    pub(crate) walks: AtomicU64,
}

/// Result of a round of [`Table::compact`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) looked_at: usize,
    /// Inodes that are compact now.
    pub(crate) made: usize,
}

/// The fate of an inode that was offered to the table.
pub(crate) enum Adopted {
    /// The inode is in the table. It was compact if there is an access time, which is the right
    /// one.
    New { atime: Option<Time> },
    /// Another inode was there already.
    Known(Arc<Inode>),
    /// The record may be out of date, and the inode is not in the table.
    Outdated,
    /// The table has a compact one of its number that lies elsewhere.
    Elsewhere,
}

impl Table {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            inodes: AtomicUsize::new(0),
            compact: AtomicUsize::new(0),
            compact_bytes: AtomicUsize::new(0),
            blocks: AtomicUsize::new(0),
            next_shard: AtomicUsize::new(0),
            next_asked: AtomicUsize::new(0),
            forgotten: AtomicU64::new(0),
            hints: RwLock::new(Hints::new(HINTS_MIN)),
            absent: AbsentNames::default(),
            roots: Mutex::default(),
            block_notes: BlockNotes::default(),
            evictions: AtomicU64::new(0),
            serials: AtomicU64::new(0),
            deferred: Mutex::default(),
            walks: AtomicU64::new(0),
        })
    }

    fn shard(&self, ino: Ino) -> &Mutex<Shard> {
        let hash = ino.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
        &self.shards[usize::try_from(hash).expect("six bits") % SHARDS]
    }

    /// Counts the changed inodes that were dropped. Sample it before reading a record.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions.load(Ordering::SeqCst)
    }

    fn evicted(&self, shard: &mut Shard) {
        shard.last_eviction = self.evictions.fetch_add(1, Ordering::SeqCst) + 1;
    }

    /// The inode of this number, if it is in memory and not compact.
    pub(crate) fn get(&self, ino: Ino) -> Option<Arc<Inode>> {
        let inode = self.shard(ino).lock().slots.get(&ino.0)?.inode.upgrade()?;
        // Most are: the line of an inode that many ask for is then only read.
        if !inode.is_used.load(Ordering::Relaxed) {
            inode.is_used.store(true, Ordering::Relaxed);
        }
        Some(inode)
    }

    /// Whether an inode of this number is in memory, compact or not.
    pub(crate) fn has(&self, ino: Ino) -> bool {
        let shard = self.shard(ino).lock();
        let seat = shard.slots.get(&ino.0);
        seat.is_some_and(|seat| seat.inode.strong_count() > 0) || shard.compact.contains_key(&ino.0)
    }

    /// Directory and name of the compact inode of this number.
    pub(crate) fn compact_at(&self, ino: Ino) -> Option<(Arc<Inode>, Bytes)> {
        let shard = self.shard(ino).lock();
        let compact = shard.compact.get(&ino.0)?;
        let name = Bytes::copy_from_slice(&compact.name);
        Some((Arc::clone(&compact.parent), name))
    }

    /// Makes inodes compact that the kernel remembers and nobody uses, of those whose directory
    /// `is_live`: looks at `looks` inodes, about. The caller holds the topology, so that directories
    /// stay so.
    pub(crate) fn compact(&self, looks: usize, is_live: impl Fn(&Arc<Inode>) -> bool) -> Round {
        let mut round = Round::default();
        let mut looks_left = looks;
        for _ in 0..SHARDS {
            let turn = self.next_shard.fetch_add(1, Ordering::Relaxed);
            let shard = &self.shards[turn % SHARDS];
            let (candidates, looked_at) = shard.lock().candidates();
            for inode in candidates {
                let parent = match &*inode.location.read() {
                    Location::Child { parent, .. } => Arc::clone(parent),
                    _ => continue,
                };
                if is_live(&parent) {
                    round.made += usize::from(self.make_compact(shard, inode));
                }
            }
            round.looked_at += looked_at;
            looks_left = looks_left.saturating_sub(looked_at.max(LOOKS_MIN));
            if looks_left == 0 {
                break;
            }
        }
        round
    }

    /// The same for one inode, which the caller refers to once; whether it is compact now.
    fn make_compact(&self, shard: &Mutex<Shard>, inode: Arc<Inode>) -> bool {
        let mut shard = shard.lock();
        let slot = shard.slots.get(&inode.ino.0);
        let Some(slot) = slot.filter(|slot| slot.serial == inode.serial) else {
            return false;
        };
        // That of the caller and that of the slot. More are made with the shard locked only.
        if slot.held.is_none() || Arc::strong_count(&inode) != 2 {
            return false;
        }
        // Nobody else can hold the state.
        let Some(atime) = inode.state.try_read().map(|record| record.atime) else {
            return false;
        };
        let Some(compact) = Compact::new(&inode.location.read(), slot.lookups, atime) else {
            return false;
        };
        let slot = self.replace(&mut shard, &inode, compact);
        // Dropping the inode takes the lock of the shard.
        drop(shard);
        drop((slot, inode));
        true
    }

    /// The record of an inode that was in the table cannot be read. If the kernel remembers it, it
    /// is compact from then on.
    pub(crate) fn give_up(&self, inode: &Arc<Inode>, atime: Time) {
        let mut shard = self.shard(inode.ino).lock();
        let slot = shard.slots.get(&inode.ino.0);
        let Some(slot) = slot.filter(|slot| slot.serial == inode.serial && slot.lookups > 0) else {
            return;
        };
        let Some(compact) = Compact::new(&inode.location.read(), slot.lookups, atime) else {
            return;
        };
        let slot = self.replace(&mut shard, inode, compact);
        drop(shard);
        drop(slot);
    }

    /// Puts `compact` in the place of the slot of an inode.
    fn replace(&self, shard: &mut Shard, inode: &Inode, compact: Compact) -> Option<Seat> {
        let bytes = compact.memory_bytes();
        inode.leave_marks();
        let slot = shard.remove(inode.ino);
        self.inodes.fetch_sub(1, Ordering::Relaxed);
        if inode.touched.load(Ordering::SeqCst) {
            self.evicted(shard);
        }
        shard.compact.insert(inode.ino.0, compact);
        self.compact.fetch_add(1, Ordering::Relaxed);
        self.compact_bytes.fetch_add(bytes, Ordering::Relaxed);
        slot
    }

    /// Takes a compact inode out of its shard.
    fn take_compact(&self, shard: &mut Shard, ino: Ino) -> Option<Compact> {
        let compact = shard.compact.remove(&ino.0)?;
        shrink(&mut shard.compact);
        self.compact.fetch_sub(1, Ordering::Relaxed);
        let bytes = compact.memory_bytes();
        self.compact_bytes.fetch_sub(bytes, Ordering::Relaxed);
        Some(compact)
    }

    /// Up to `count` inodes that the kernel remembers and nobody uses, others than last time as far
    /// as there are more.
    pub(crate) fn forgettable(&self, count: usize) -> Vec<Ino> {
        let mut some = Vec::new();
        for _ in 0..SHARDS {
            let turn = self.next_asked.fetch_add(1, Ordering::Relaxed);
            let mut shard = self.shards[turn % SHARDS].lock();
            some.extend(shard.forgettable(count - some.len()));
            if some.len() >= count {
                break;
            }
        }
        some
    }

    /// The inode whose only name is `name` in `dir`, if it is in memory and that name was noted
    /// lately. The caller holds the names of `dir`, and `dir` is reached by names.
    pub(crate) fn at(&self, dir: &Arc<Inode>, name: &[u8]) -> Option<Arc<Inode>> {
        let inos = self.hints.read().get(dir.ino, name);
        let mut known = inos.into_iter().flatten().filter_map(|ino| self.get(ino));
        known.find(|inode| inode.is_child(dir, name))
    }

    /// Notes for [`Table::at`] that `name` in `dir` leads to the inode `ino`.
    pub(crate) fn note(&self, dir: Ino, name: &[u8], ino: Ino) {
        let wanted = 2 * self.inodes.load(Ordering::Relaxed);
        let hints = self.hints.read();
        let len = hints.len();
        let len_wanted = match len {
            len if wanted > len => (2 * len).min(HINTS_MAX),
            len if wanted < len / 8 => (len / 4).max(HINTS_MIN),
            len => len,
        };
        if len_wanted == len {
            hints.put(dir, name, ino);
            return;
        }
        drop(hints);
        let mut hints = self.hints.write();
        if hints.len() == len {
            *hints = hints.resized(len_wanted);
        }
        hints.put(dir, name, ino);
    }

    /// Puts an inode into the table whose record was read after `seen` was sampled; `None` puts it
    /// in anyway.
    pub(crate) fn adopt(&self, inode: &Arc<Inode>, seen: Option<u64>) -> Adopted {
        let mut shard = self.shard(inode.ino).lock();
        let slot = shard.slots.get(&inode.ino.0);
        if let Some(known) = slot.and_then(|slot| slot.inode.upgrade()) {
            return Adopted::Known(known);
        }
        // A dead slot belongs to an inode whose drop has not counted itself yet.
        let is_dying = slot.is_some();
        if seen.is_some_and(|seen| is_dying || seen < shard.last_eviction) {
            return Adopted::Outdated;
        }
        let compact = shard.compact.get(&inode.ino.0);
        if compact.is_some_and(|compact| !compact.lies_at(&inode.location.read())) {
            return Adopted::Elsewhere;
        }
        let compact = self.take_compact(&mut shard, inode.ino);
        if is_dying {
            // The inode that takes the slot may leave before the dying one has.
            self.evicted(&mut shard);
        }
        let before = shard.slots.insert(
            inode.ino.0,
            Seat {
                inode: Arc::downgrade(inode),
                serial: inode.serial,
                held: compact.is_some().then(|| Arc::clone(inode)),
                lookups: compact.as_ref().map_or(0, |compact| compact.lookups.into()),
            },
        );
        if before.is_none() {
            self.inodes.fetch_add(1, Ordering::Relaxed);
        }
        shard.enqueue(inode.ino);
        // Dropping the directory may take the lock of the shard.
        drop(shard);
        Adopted::New {
            atime: compact.map(|compact| compact.atime()),
        }
    }

    fn remove(&self, inode: &Inode, is_touched: bool) {
        let mut shard = self.shard(inode.ino).lock();
        if is_touched {
            self.evicted(&mut shard);
        }
        if shard
            .slots
            .get(&inode.ino.0)
            .is_some_and(|slot| slot.serial == inode.serial)
        {
            inode.leave_marks();
            drop(shard.remove(inode.ino));
            self.inodes.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The kernel gets one more reference to the inode.
    pub(crate) fn remember(&self, inode: &Arc<Inode>) {
        self.remember_noting(inode, || {});
    }

    /// As [`Table::remember`]. If the kernel had no reference before, `first` runs before any
    /// thread can drop the new one.
    pub(crate) fn remember_noting(&self, inode: &Arc<Inode>, first: impl FnOnce()) {
        let mut shard = self.shard(inode.ino).lock();
        if let Some(slot) = shard.slots.get_mut(&inode.ino.0) {
            if slot.lookups == 0 {
                first();
            }
            slot.lookups += 1;
            slot.held.get_or_insert_with(|| Arc::clone(inode));
        }
    }

    /// The kernel drops `lookups` references. If none is left, `last` runs before the kernel can
    /// get another one.
    pub(crate) fn forget_noting(&self, ino: Ino, lookups: u64, last: impl FnOnce()) {
        let mut shard = self.shard(ino).lock();
        if let Some(compact) = shard.compact.get_mut(&ino.0) {
            let left = u64::from(compact.lookups).saturating_sub(lookups);
            compact.lookups = u32::try_from(left).expect("no more than before");
            if compact.lookups == 0 {
                last();
                self.forgotten.fetch_add(1, Ordering::Relaxed);
                let compact = self.take_compact(&mut shard, ino);
                drop(shard);
                drop(compact);
            }
            return;
        }
        let Some(slot) = shard.slots.get_mut(&ino.0) else {
            return;
        };
        slot.lookups = slot.lookups.saturating_sub(lookups);
        let held = if slot.lookups == 0 {
            last();
            self.forgotten.fetch_add(1, Ordering::Relaxed);
            slot.held.take()
        } else {
            None
        };
        // Dropping the inode takes the lock of the shard.
        drop(shard);
        drop(held);
    }

    /// Notes that records were changed that no inode in memory had: an inode whose record is being
    /// read now has its record read again.
    pub(crate) fn note_changed_records(&self) {
        for shard in &self.shards {
            self.evicted(&mut shard.lock());
        }
    }

    /// The shared inodes of a clone root in memory that are not counted up to the note `last`, with
    /// their numbers there. Looks at all inodes in memory, unless nothing refers to the root.
    pub(crate) fn uncounted(&self, root: &Arc<Inode>, last: u64) -> Vec<(u64, Ino)> {
        let mut found = Vec::new();
        // Each shared inode refers to its clone root, as the caller and the kernel do.
        if Arc::strong_count(root) <= 1 + usize::from(self.is_known(root)) {
            return found;
        }
        self.walks.fetch_add(1, Ordering::Relaxed);
        for shard in &self.shards {
            let all = shard.lock().whole();
            for inode in all {
                let link = match &*inode.location.read() {
                    Location::Shared {
                        root: its, link, ..
                    } if Arc::ptr_eq(its, root) => *link,
                    _ => continue,
                };
                if inode.state.read().counted < last {
                    found.push((link, inode.ino));
                }
            }
        }
        found
    }

    /// Whether the kernel has a reference to the inode: it may be open, then.
    pub(crate) fn is_known(&self, inode: &Inode) -> bool {
        let shard = self.shard(inode.ino).lock();
        let slot = shard.slots.get(&inode.ino.0);
        slot.is_some_and(|slot| slot.serial == inode.serial && slot.lookups > 0)
    }

    /// Queues contents to be erased.
    pub(crate) fn enqueue(&self, deferred: Deferred) {
        self.deferred.lock().push(deferred);
    }

    /// Takes the queue of contents to be erased.
    pub(crate) fn take_deferred(&self) -> Vec<Deferred> {
        std::mem::take(&mut *self.deferred.lock())
    }

    /// Inodes in memory that are not compact.
    pub(crate) fn len(&self) -> usize {
        self.inodes.load(Ordering::Relaxed)
    }

    /// Compact inodes.
    pub(crate) fn compact_len(&self) -> usize {
        self.compact.load(Ordering::Relaxed)
    }

    /// Inodes of which the kernel has dropped the last reference, so far.
    pub(crate) fn forgotten(&self) -> u64 {
        self.forgotten.load(Ordering::Relaxed)
    }

    /// Memory of all inodes and of blocks of numbers that are in memory only, about, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let whole = self.len() * WHOLE_BYTES;
        let blocks = self.blocks.load(Ordering::Relaxed) * BLOCK_BYTES;
        (whole + blocks + self.compact_bytes.load(Ordering::Relaxed)) as u64
    }

    /// Drops all references of the kernel: the mount is gone.
    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            let compact = std::mem::take(&mut shard.compact);
            self.compact.fetch_sub(compact.len(), Ordering::Relaxed);
            let bytes = compact.values().map(Compact::memory_bytes).sum();
            self.compact_bytes.fetch_sub(bytes, Ordering::Relaxed);
            let held: Vec<_> = shard
                .slots
                .values_mut()
                .filter_map(|slot| {
                    slot.lookups = 0;
                    slot.held.take()
                })
                .collect();
            drop(shard);
            drop((held, compact));
        }
    }
}

/// The inode with this identity, if it is in memory and not compact.
pub(crate) fn with_identity(table: &Table, identity: Identity) -> Option<Arc<Inode>> {
    let inode = table.get(identity.ino)?;
    (inode.identity() == identity).then_some(inode)
}

/// Whether the directory with this identity may be in memory, compact or not. Of the root there is
/// one for each rollback.
pub(crate) fn has_dir(table: &Table, dir: Identity) -> bool {
    if dir.ino != ROOT_INO {
        return table.has(dir.ino);
    }
    let roots = table.roots.lock();
    let known: Vec<_> = roots.iter().filter_map(Weak::upgrade).collect();
    drop(roots);
    known.iter().any(|root| root.identity() == dir)
}

/// Notes a root directory that comes, for [`has_dir`].
pub(crate) fn note_root(table: &Table, root: &Arc<Inode>) {
    let mut roots = table.roots.lock();
    roots.retain(|root| root.strong_count() > 0);
    roots.push(Arc::downgrade(root));
}

/// Puts a root directory in the place of the one before, with the references of the kernel.
pub(super) fn seat_root(table: &Table, root: &Arc<Inode>) {
    let mut shard = table.shard(root.ino).lock();
    let lookups = shard.slots.get(&root.ino.0).map_or(0, |seat| seat.lookups);
    let seat = Seat {
        inode: Arc::downgrade(root),
        serial: root.serial,
        held: (lookups > 0).then(|| Arc::clone(root)),
        lookups,
    };
    let before = shard.slots.insert(root.ino.0, seat);
    if before.is_none() {
        table.inodes.fetch_add(1, Ordering::Relaxed);
        shard.enqueue(root.ino);
    }
    // Dropping an inode takes the lock of the shard.
    drop(shard);
    drop(before);
}

/// The place of an inode in memory.
pub(super) enum Placed<'a> {
    /// Its only name, in this directory.
    Name(&'a Arc<Inode>, &'a [u8]),
    /// It has, or had, several names; its clone root.
    Shared(&'a Arc<Inode>),
}

/// Calls `each` with place and number of all inodes in memory that are reached by names. Calls
/// `between` after some of them, with no lock held.
pub(super) fn each_placed(
    table: &Table,
    mut each: impl FnMut(Placed<'_>, Ino),
    mut between: impl FnMut(),
) {
    for shard in &table.shards {
        between();
        let (whole, compact): (_, Vec<_>) = {
            let shard = shard.lock();
            let compact = shard
                .compact
                .iter()
                .map(|(ino, compact)| (*ino, Arc::clone(&compact.parent), compact.name.clone()));
            (shard.whole(), compact.collect())
        };
        for inode in whole {
            let location = inode.location.read().clone();
            match location {
                Location::Child { parent, name } => each(Placed::Name(&parent, &name), inode.ino),
                Location::Shared { root, .. } => each(Placed::Shared(&root), inode.ino),
                _ => {}
            }
        }
        for (ino, parent, name) in compact {
            each(Placed::Name(&parent, &name), Ino(ino));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Enough for every shard.
    const LOOKS: usize = SHARDS * LOOKED_AT;

    fn inode(table: &Arc<Table>, ino: u64, kind: Kind, location: Location) -> Arc<Inode> {
        let record = Record::new(kind.mode_bits(), 0, 0, Time::default());
        let identity = Identity {
            ino: Ino(ino),
            generation: 0,
        };
        Inode::new(table, identity, kind, record, location)
    }

    #[test]
    fn a_record_read_before_its_inode_was_changed_and_dropped_is_outdated() {
        let table = Table::new();
        for (touched, outdated) in [(true, true), (false, false)] {
            let first = inode(&table, 7, Kind::Regular, Location::Gone);
            assert!(matches!(table.adopt(&first, None), Adopted::New { .. }));
            let seen = table.evictions();
            first.touched.store(touched, Ordering::SeqCst);
            drop(first);
            let second = inode(&table, 7, Kind::Regular, Location::Gone);
            assert_eq!(
                matches!(table.adopt(&second, Some(seen)), Adopted::Outdated),
                outdated
            );
        }
    }

    #[test]
    fn only_evictions_of_the_same_shard_make_a_record_outdated() {
        let table = Table::new();
        let shares_shard = |ino: &u64| std::ptr::eq(table.shard(Ino(*ino)), table.shard(Ino(7)));
        let near = (8..).find(shares_shard).unwrap();
        let far = (8..).find(|ino| !shares_shard(ino)).unwrap();
        for (other, outdated) in [(near, true), (far, false)] {
            let seen = table.evictions();
            let evicted = inode(&table, other, Kind::Regular, Location::Gone);
            evicted.touched.store(true, Ordering::SeqCst);
            drop(evicted);
            let read = inode(&table, 7, Kind::Regular, Location::Gone);
            let adopted = table.adopt(&read, Some(seen));
            assert_eq!(matches!(adopted, Adopted::Outdated), outdated, "{other}");
        }
    }

    #[test]
    fn an_inode_that_takes_the_slot_of_a_dying_one_does_not_hide_its_eviction() {
        let table = Table::new();
        let seen = table.evictions();
        let leaving = inode(&table, 7, Kind::Regular, Location::Gone);
        table.adopt(&leaving, None);
        let slot = |inode| Seat {
            inode,
            serial: leaving.serial,
            held: None,
            lookups: 0,
        };
        // The state of the table while the inode is dropped, before it counts itself.
        let shard = table.shard(Ino(7));
        shard.lock().slots.insert(7, slot(Weak::new()));
        let heir = inode(&table, 7, Kind::Regular, Location::Gone);
        assert!(matches!(table.adopt(&heir, None), Adopted::New { .. }));
        drop(heir);
        let late = inode(&table, 7, Kind::Regular, Location::Gone);
        assert!(matches!(table.adopt(&late, Some(seen)), Adopted::Outdated));
    }

    #[test]
    fn a_noted_name_leads_to_its_inode() {
        let table = Table::new();
        let [dir, other] = [1, 2].map(|ino| inode(&table, ino, Kind::Directory, Location::Root));
        let child_of = |dir: &Arc<Inode>| Location::Child {
            parent: Arc::clone(dir),
            name: Bytes::from_static(b"a"),
        };
        let file = inode(&table, 7, Kind::Regular, child_of(&dir));
        table.adopt(&file, None);
        assert!(table.at(&dir, b"a").is_none(), "not noted");
        for (at, name) in [(&dir, b"a"), (&dir, b"b"), (&other, b"a")] {
            table.note(at.ino, name, Ino(7));
        }
        assert!(Arc::ptr_eq(&table.at(&dir, b"a").unwrap(), &file));
        assert!(table.at(&dir, b"b").is_none(), "another name");
        assert!(table.at(&other, b"a").is_none(), "another directory");
        *file.location.write() = child_of(&other);
        assert!(table.at(&dir, b"a").is_none(), "it moved");
        assert!(table.at(&other, b"a").is_some());
        *file.location.write() = Location::Orphan(Orphan(1));
        assert!(table.at(&other, b"a").is_none(), "it has no name");
        *file.location.write() = child_of(&dir);
        drop(file);
        assert!(table.at(&dir, b"a").is_none(), "it left the memory");
    }

    #[test]
    fn most_names_that_were_noted_are_found_however_many() {
        let table = Table::new();
        let dir = inode(&table, 1, Kind::Directory, Location::Root);
        let name = |ino: u64| Bytes::from(ino.to_string());
        let make = |ino: u64| {
            let location = Location::Child {
                parent: Arc::clone(&dir),
                name: name(ino),
            };
            let file = inode(&table, ino, Kind::Regular, location);
            table.adopt(&file, None);
            table.note(dir.ino, &name(ino), Ino(ino));
            file
        };
        let files: Vec<_> = (2..20_002).map(make).collect();
        assert_eq!(table.len(), files.len());
        let is_found = |file: &&Arc<Inode>| {
            let found = table.at(&dir, &name(file.ino.0));
            found.is_some_and(|found| Arc::ptr_eq(&found, file))
        };
        let found = files.iter().filter(is_found).count();
        assert!(found > 18_000, "{found} of {}", files.len());
    }

    #[test]
    fn the_table_has_one_inode_for_a_number_and_keeps_remembered_ones() {
        let table = Table::new();
        let first = inode(&table, 7, Kind::Regular, Location::Gone);
        assert!(matches!(
            table.adopt(&first, Some(table.evictions())),
            Adopted::New { .. }
        ));
        let second = inode(&table, 7, Kind::Regular, Location::Gone);
        let known = table.adopt(&second, Some(table.evictions()));
        assert!(matches!(known, Adopted::Known(known) if Arc::ptr_eq(&known, &first)));
        drop(second);
        table.remember(&first);
        table.remember(&first);
        drop(first);
        table.forget_noting(Ino(7), 1, || {});
        assert!(table.get(Ino(7)).is_some());
        table.forget_noting(Ino(7), 1, || {});
        assert!(table.get(Ino(7)).is_none());
        assert_eq!(table.len(), 0);
    }

    #[test]
    fn a_chain_of_directories_is_dropped_without_recursion() {
        let table = Table::new();
        let mut at = inode(&table, 1, Kind::Directory, Location::Root);
        for ino in 2..200_000 {
            let location = Location::Child {
                parent: at,
                name: Bytes::from_static(b"d"),
            };
            at = inode(&table, ino, Kind::Directory, location);
        }
        drop(at);
    }

    /// A directory, and a file in it that the kernel was told about twice.
    fn remembered(table: &Arc<Table>) -> (Arc<Inode>, Arc<Inode>) {
        let dir = inode(table, 1, Kind::Directory, Location::Root);
        let location = Location::Child {
            parent: Arc::clone(&dir),
            name: Bytes::from_static(b"a"),
        };
        let file = inode(table, 7, Kind::Regular, location);
        table.adopt(&file, None);
        table.remember(&file);
        table.remember(&file);
        (dir, file)
    }

    #[test]
    fn an_inode_becomes_compact_when_nobody_refers_to_it_and_its_lookups_stay() {
        let table = Table::new();
        let (dir, file) = remembered(&table);
        file.touched.store(true, Ordering::SeqCst);
        table.compact(LOOKS, |_| true);
        assert_eq!(table.compact_len(), 0, "somebody refers to it");
        drop(file);
        table.compact(LOOKS, |_| false);
        assert_eq!(table.compact_len(), 0, "its directory is removed");
        let seen = table.evictions();
        table.compact(LOOKS, |found| Arc::ptr_eq(found, &dir));
        assert_eq!((table.compact_len(), table.len()), (1, 0));
        assert!(table.get(Ino(7)).is_none() && table.has(Ino(7)));
        let (parent, name) = table.compact_at(Ino(7)).unwrap();
        assert!(Arc::ptr_eq(&parent, &dir) && name == b"a"[..]);
        let location = || Location::Child {
            parent: Arc::clone(&dir),
            name: Bytes::from_static(b"a"),
        };
        let read = inode(&table, 7, Kind::Regular, location());
        let outdated = table.adopt(&read, Some(seen));
        assert!(matches!(outdated, Adopted::Outdated), "it was changed");
        let elsewhere = inode(&table, 7, Kind::Regular, Location::Gone);
        let adopted = table.adopt(&elsewhere, None);
        assert!(matches!(adopted, Adopted::Elsewhere));
        assert!(matches!(table.adopt(&read, None), Adopted::New { .. }));
        assert_eq!((table.compact_len(), table.len()), (0, 1));
        table.forget_noting(Ino(7), 1, || {});
        drop(read);
        assert!(table.get(Ino(7)).is_some(), "the kernel was told twice");
        table.forget_noting(Ino(7), 1, || {});
        assert!(!table.has(Ino(7)));
        assert_eq!(table.memory_bytes(), 0);
    }

    #[test]
    fn a_compact_inode_is_forgotten_with_its_last_lookup() {
        let table = Table::new();
        let (dir, file) = remembered(&table);
        drop(file);
        table.compact(LOOKS, |_| true);
        table.forget_noting(Ino(7), 1, || panic!("not the last"));
        let mut is_last = false;
        table.forget_noting(Ino(7), 1, || is_last = true);
        assert!(is_last && !table.has(Ino(7)));
        assert_eq!(Arc::strong_count(&dir), 1);
    }

    #[test]
    fn an_inode_that_was_asked_for_lately_is_not_made_compact_at_once() {
        let table = Table::new();
        let (_dir, file) = remembered(&table);
        drop(file);
        drop(table.get(Ino(7)));
        table.compact(LOOKS, |_| true);
        assert_eq!(table.compact_len(), 0);
        table.compact(LOOKS, |_| true);
        assert_eq!(table.compact_len(), 1);
    }

    #[test]
    fn the_order_of_inodes_does_not_grow_with_those_that_left() {
        let table = Table::new();
        for ino in 0..100_000 {
            table.adopt(&inode(&table, ino, Kind::Regular, Location::Gone), None);
        }
        let kept: usize = table
            .shards
            .iter()
            .map(|shard| shard.lock().order.len())
            .sum();
        assert!(kept <= SHARDS * (LOOKED_AT + 1), "{kept}");
    }

    /// Inodes of which the kernel knows one after the other, in one directory.
    fn many(table: &Arc<Table>, location: impl Fn(&Arc<Inode>, u64) -> Location) {
        let dir = inode(table, 1, Kind::Directory, Location::Root);
        for ino in 2..10_002 {
            let file = inode(table, ino, Kind::Regular, location(&dir, ino));
            table.adopt(&file, None);
            table.remember(&file);
        }
    }

    fn child(dir: &Arc<Inode>, ino: u64) -> Location {
        Location::Child {
            parent: Arc::clone(dir),
            name: Bytes::from(ino.to_string().into_bytes()),
        }
    }

    #[test]
    fn the_kernel_is_asked_to_forget_others_after_those_that_it_keeps() {
        let table = Table::new();
        many(&table, child);
        for _ in 0..SHARDS {
            table.compact(LOOKS, |_| true);
        }
        assert_eq!(table.compact_len(), 10_000);
        let batches = (0..8 * SHARDS).flat_map(|_| table.forgettable(100));
        let asked: std::collections::HashSet<_> = batches.map(|ino| ino.0).collect();
        assert_eq!(asked.len(), 10_000);
        assert!(table.forgettable(100).len() == 100, "and from the start");
    }

    #[test]
    fn inodes_with_several_names_are_to_be_forgotten_since_they_cannot_be_compact() {
        let table = Table::new();
        many(&table, |dir, link| Location::Shared {
            root: Arc::clone(dir),
            link,
            via: Arc::clone(dir),
        });
        table.compact(LOOKS, |_| true);
        assert_eq!(table.compact_len(), 0);
        let used = table.get(Ino(7)).unwrap();
        let batches = (0..8 * SHARDS).flat_map(|_| table.forgettable(100));
        let asked: std::collections::HashSet<_> = batches.map(|ino| ino.0).collect();
        assert_eq!(asked.len(), 9_999);
        assert!(!asked.contains(&used.ino.0));
    }

    #[test]
    fn a_round_looks_at_few_inodes_and_takes_few_locks() {
        let table = Table::new();
        let nothing = table.compact(LOOKED_AT, |_| true);
        assert_eq!(nothing, Round::default());
        let passed = table.next_shard.load(Ordering::Relaxed);
        assert_eq!(passed, LOOKED_AT / LOOKS_MIN);
        many(&table, child);
        let round = table.compact(LOOKED_AT, |_| false);
        assert!(round.looked_at < 2 * LOOKED_AT, "{round:?}");
        let round = table.compact(16 * LOOKED_AT, |_| true);
        assert!(round.made >= 15 * LOOKED_AT, "{round:?}");
    }

    #[test]
    fn a_table_that_many_inodes_have_left_gives_its_memory_back() {
        let room = |table: &Table| -> usize {
            let shards = table.shards.iter().map(|shard| {
                let shard = shard.lock();
                shard.slots.capacity() + shard.order.capacity() + shard.compact.capacity()
            });
            shards.sum::<usize>() + table.hints.read().len()
        };
        let table = Table::new();
        many(&table, child);
        let dir = inode(&table, 1, Kind::Directory, Location::Root);
        table.note(dir.ino, b"a", Ino(7));
        let before = room(&table);
        for _ in 0..SHARDS {
            table.compact(LOOKS / 8, |_| true);
        }
        assert!(table.compact_len() > 0);
        for ino in 2..10_002 {
            table.forget_noting(Ino(ino), 1, || {});
        }
        (0..9).for_each(|_| table.note(dir.ino, b"a", Ino(7)));
        let left = room(&table);
        assert!(left < SHARDS * 4 * ROOM_MIN + 2 * HINTS_MIN, "{left}");
        assert!(left < before, "{left} of {before}");
    }

    #[test]
    fn a_compact_inode_takes_a_hundred_bytes_and_its_name_at_most() {
        let table = Table::new();
        let dir = inode(&table, 1, Kind::Directory, Location::Root);
        let files = 100_000;
        for ino in 2..2 + files {
            let location = Location::Child {
                parent: Arc::clone(&dir),
                name: Bytes::from(format!("a-name-of-{ino}").into_bytes()),
            };
            let file = inode(&table, ino, Kind::Regular, location);
            table.adopt(&file, None);
            table.remember(&file);
            drop(file);
            table.compact(LOOKED_AT, |_| true);
        }
        for _ in 0..4 * SHARDS {
            table.compact(LOOKS, |_| true);
        }
        assert!(
            table.compact_len() + 1000 > files as usize,
            "{}",
            table.compact_len()
        );
        let room = |shard: &Mutex<Shard>| shard.lock().compact.capacity();
        let slots: usize = table.shards.iter().map(room).sum();
        // A map has eight slots for seven entries, and a byte for each.
        let maps = slots * 8 / 7 * (size_of::<(u64, Compact)>() + 1);
        // Rounded up to a multiple of 16, with the header of the allocator.
        let names = table.compact_len() * 32;
        let each = (maps + names) / table.compact_len();
        assert!(each <= 100 + "a-name-of-12345".len(), "{each} bytes");
    }
}
