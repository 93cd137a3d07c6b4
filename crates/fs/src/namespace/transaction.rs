//! Transactions: the batch, the records that it rewrites, and the new locations of inodes in
//! memory.
//!
//! An operation locks the states of the inodes that it changes ([`lock_states`]), edits copies of
//! their records, and adds its own keys to the batch. [`Transaction::apply`] adds the records at
//! the end, at the new locations of the inodes. The copies replace the records only after the tree
//! took the batch: a transaction that fails changes nothing.
//!
//! On a volume that makes each change durable, a sync comes last: after the tree has the batch, it
//! shows, and the memory has to show it too, also if the sync fails. So `apply` does not sync. The
//! operation shows the rest of the change, and then calls [`Shown::make_durable`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::RwLockWriteGuard;
use ramet_betree::{Applied, Batch, Seq, Tree};
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result};
use crate::format::ino::{Identity, Ino};
use crate::format::keys::{self, Orphan};
use crate::format::record::{Pin, Record};
use crate::format::slots::{SLOTS_MAX, Slot};
use crate::namespace::inode::{Inode, Location, LockedNames};
use crate::namespace::invalidation::{Caches, Invalidation};
use crate::namespace::number_tables::{leave_pin, put_pin, put_unpinned};
use crate::namespace::numbers::Numbers;
use crate::namespace::topology::Topology;

/// Journal bytes of a batch of records without data, at most. The tree is asked for this much room.
pub(crate) const RECORDS_BYTES: usize = 16 * 1024;

/// The states of several inodes, locked for writing, in the order of their numbers.
pub(crate) struct States<'a> {
    locked: Vec<Locked<'a>>,
}

/// An inode with its new record and its new location.
struct Locked<'a> {
    inode: &'a Arc<Inode>,
    state: RwLockWriteGuard<'a, Record>,
    edited: Option<Record>,
    moved: Option<Location>,
    /// A slot of the directory whose inode has no name there any more.
    lost: Option<Slot>,
    /// A directory took a slot that has no name.
    has_bare_slot: bool,
}

/// Up to so many inodes are sorted without a copy of their list.
const FEW_INODES: usize = 16;

/// Locks the states of these inodes, each once, in the order of their numbers.
pub(crate) fn lock_states<'a>(inodes: &[&'a Arc<Inode>]) -> States<'a> {
    if inodes.len() > FEW_INODES {
        let mut sorted = inodes.to_vec();
        sorted.sort_unstable_by_key(|inode| inode.ino);
        sorted.dedup_by_key(|inode| inode.ino);
        let locked = sorted.into_iter().map(lock_state).collect();
        return States { locked };
    }
    let mut locked = Vec::with_capacity(inodes.len());
    let mut last = None;
    // They are few: a sorted copy would take an allocation.
    let next_of = |last| {
        let later = inodes.iter().filter(|inode| Some(inode.ino) > last);
        later.min_by_key(|inode| inode.ino)
    };
    while let Some(inode) = next_of(last) {
        last = Some(inode.ino);
        locked.push(lock_state(inode));
    }
    States { locked }
}

fn lock_state(inode: &Arc<Inode>) -> Locked<'_> {
    Locked {
        inode,
        state: inode.state.write(),
        edited: None,
        moved: None,
        lost: None,
        has_bare_slot: false,
    }
}

impl<'a> States<'a> {
    fn find(&self, inode: &Inode) -> Option<&Locked<'a>> {
        let at = self
            .locked
            .binary_search_by_key(&inode.ino, |one| one.inode.ino);
        at.ok().map(|at| &self.locked[at])
    }

    fn find_mut(&mut self, inode: &Inode) -> Option<&mut Locked<'a>> {
        let at = self
            .locked
            .binary_search_by_key(&inode.ino, |one| one.inode.ino);
        at.ok().map(|at| &mut self.locked[at])
    }
}

/// Locks the entries of these directories for a change, each once, in the order of their numbers.
pub(crate) fn lock_names<'a>(dirs: &[&'a Arc<Inode>]) -> Vec<LockedNames<'a>> {
    let mut sorted = dirs.to_vec();
    sorted.sort_unstable_by_key(|inode| inode.ino);
    sorted.dedup_by_key(|inode| inode.ino);
    sorted.into_iter().map(|inode| inode.lock_names()).collect()
}

/// How often an operation was run before, for want of room, of nodes in memory, or of other work.
#[derive(Clone, Copy)]
pub(crate) struct Round(u32);

impl Round {
    /// This round, or the first in which the tree does a clone as it is, if that is later: nothing
    /// that would make later reads or clones cheaper comes first, but reads and room.
    pub(crate) fn as_it_is(self) -> Self {
        Self(self.0.max(2))
    }

    /// All rounds, from the first one on.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..=u32::MAX).map(Self)
    }
}

/// A transaction that is being put together.
pub(crate) struct Transaction<'a> {
    pub(crate) batch: Batch,
    states: States<'a>,
    /// Inodes that move and have no locked state: the topology is held for writing.
    others: Vec<(Arc<Inode>, Location)>,
    /// More slots whose inodes have no name there any more.
    lost: Vec<(Arc<Inode>, Slot)>,
    /// Orphans that wait for the contents of some inodes, see [`Transaction::new_orphan`].
    orphans: Option<Arc<BTreeMap<Ino, Orphan>>>,
}

const LOCKED: &str = "the operation locked the state of every inode it changes";

impl<'a> Transaction<'a> {
    pub(crate) fn new(states: States<'a>) -> Self {
        Self {
            batch: Batch::new(),
            states,
            others: Vec::new(),
            lost: Vec::new(),
            orphans: None,
        }
    }

    /// The same with orphans that have the contents of these inodes already.
    pub(crate) fn with_orphans(states: States<'a>, orphans: &Arc<BTreeMap<Ino, Orphan>>) -> Self {
        Self {
            orphans: Some(Arc::clone(orphans)),
            ..Self::new(states)
        }
    }

    /// The orphan that the contents of an inode move to.
    pub(crate) fn new_orphan(&self, inode: &Inode, numbers: &Numbers) -> Orphan {
        let known = self.orphans.as_ref().and_then(|all| all.get(&inode.ino));
        known.copied().unwrap_or_else(|| numbers.new_orphan())
    }

    /// The inodes whose contents move to orphans.
    pub(crate) fn orphaned(&self) -> BTreeMap<Ino, Orphan> {
        let locked = self.states.locked.iter();
        let locked = locked.filter_map(|one| Some((one.inode.ino, one.moved.as_ref()?)));
        let others = self.others.iter().map(|(inode, to)| (inode.ino, to));
        let orphan = |(ino, to): (Ino, &Location)| match to {
            Location::Orphan(orphan) => Some((ino, *orphan)),
            _ => None,
        };
        locked.chain(others).filter_map(orphan).collect()
    }

    /// The record of an inode whose state is locked, as this transaction leaves it.
    pub(crate) fn get(&self, inode: &Arc<Inode>) -> &Record {
        let locked = self.states.find(inode).expect(LOCKED);
        locked.edited.as_ref().unwrap_or(&locked.state)
    }

    /// The same record, to be edited; it is written with the transaction.
    pub(crate) fn edit(&mut self, inode: &Arc<Inode>) -> &mut Record {
        let locked = self.states.find_mut(inode).expect(LOCKED);
        locked.edited.get_or_insert_with(|| locked.state.clone())
    }

    /// Takes the next slot of a directory, once in a transaction.
    ///
    /// # Errors
    /// `SlotIndexMissing` when the directory has to have an index first, `TooManyLinks` when it has
    /// no slot.
    pub(crate) fn take_slot(&mut self, dir: &Arc<Inode>) -> Result<Slot> {
        let may_be_indexed = self.may_be_indexed(dir);
        let record = self.edit(dir);
        if record.is_being_indexed() {
            debug_assert!(may_be_indexed, "the index is made before the transaction");
            return Err(Error::SlotIndexMissing);
        }
        if record.next_slot >= SLOTS_MAX {
            return Err(Error::TooManyLinks);
        }
        record.next_slot += 1;
        let slot = Slot(record.next_slot - 1);
        self.states.find_mut(dir).expect(LOCKED).has_bare_slot = true;
        Ok(slot)
    }

    /// Whether a directory had keys in its slot index before this transaction, or may have had.
    fn may_be_indexed(&self, dir: &Arc<Inode>) -> bool {
        let locked = self.states.find(dir).expect(LOCKED);
        locked.state.may_be_indexed()
    }

    /// Notes that a slot of a directory has this name. Its state is locked, and `at` is its path.
    pub(crate) fn put_slot(&mut self, (dir, at): (&Arc<Inode>, &[u8]), slot: Slot, name: &[u8]) {
        self.states.find_mut(dir).expect(LOCKED).has_bare_slot = false;
        if self.may_be_indexed(dir) {
            self.batch.put(keys::slot(at, slot), name.to_vec());
        }
    }

    /// Notes that a slot of a directory has no name any more. Its state is locked, and `at` is its
    /// path.
    pub(crate) fn delete_slot(&mut self, (dir, at): (&Arc<Inode>, &[u8]), slot: Slot) {
        if self.may_be_indexed(dir) {
            self.batch.delete(keys::slot(at, slot));
        }
        self.lose(dir, slot);
    }

    /// Notes that the inode in a slot of a directory, or a shared inode of a clone root, has no name
    /// there any more. Its slot holds no block from the moment on when the batch is in the tree. A
    /// pin that holds the number instead is in that batch.
    pub(crate) fn lose(&mut self, dir: &Arc<Inode>, slot: Slot) {
        match self.states.find_mut(dir) {
            Some(locked) if locked.lost.is_none() => locked.lost = Some(slot),
            _ => self.lost.push((Arc::clone(dir), slot)),
        }
    }

    /// Gives an inode its slot in another place than `from`. Its number is pinned there. The blocks
    /// of all numbers are stored before ([`Numbers::store_all`](super::numbers::Numbers::store_all)).
    pub(crate) fn pin(&mut self, inode: &Arc<Inode>, from: Identity, home: Identity, slot: Slot) {
        if let Some(before) = self.get(inode).pin.filter(|pin| pin.home == from) {
            leave_pin(&mut self.batch, before);
        }
        let pin = Pin {
            identity: inode.identity(),
            home,
        };
        put_pin(&mut self.batch, pin, slot);
        let record = self.edit(inode);
        (record.slot, record.pin) = (slot, Some(pin));
    }

    /// The pin of an inode whose last name in `home` goes leads nowhere from now on.
    pub(crate) fn unpin(&mut self, inode: &Arc<Inode>, home: Identity) {
        if let Some(pin) = self.get(inode).pin.filter(|pin| pin.home == home) {
            put_unpinned(&mut self.batch, pin.identity.ino);
        }
    }

    /// The location of an inode after this transaction.
    pub(crate) fn location(&self, inode: &Arc<Inode>) -> Location {
        let moved = match self.states.find(inode) {
            Some(locked) => locked.moved.as_ref(),
            None => {
                let mut others = self.others.iter().rev();
                others
                    .find(|(other, _)| other.ino == inode.ino)
                    .map(|(_, location)| location)
            }
        };
        moved
            .cloned()
            .unwrap_or_else(|| inode.location.read().clone())
    }

    /// Sets the location of an inode after this transaction. Its state is locked, or the topology
    /// is held for writing.
    pub(crate) fn move_to(&mut self, inode: &Arc<Inode>, location: Location) {
        match self.states.find_mut(inode) {
            Some(locked) => locked.moved = Some(location),
            None => self.others.push((Arc::clone(inode), location)),
        }
    }

    /// Hands the batch to the tree and then shows the changes in memory.
    ///
    /// # Errors
    /// Those of the tree; nothing is changed then.
    pub(crate) fn apply<'t>(self, topology: &Topology, tree: &'t Tree) -> Result<Shown<'t>> {
        let applied = self.apply_by(topology, tree, |batch| Ok(tree.apply_admitted(batch)?))?;
        Ok(Shown::new(tree, applied.unwrap_or_default()))
    }

    /// The same without waiting, for an operation that holds the topology or the link lock for
    /// writing and is run by [`Namespace::until_applied`](super::resolve::Namespace::until_applied).
    ///
    /// # Errors
    /// `Deferred` when the batch has to wait, and those of the tree; nothing is changed then.
    pub(crate) fn apply_or_defer(
        self,
        topology: &Topology,
        tree: &Tree,
        round: Round,
    ) -> Result<Seq> {
        let applied = self.apply_by(topology, tree, |batch| try_on(tree, batch, round))?;
        Ok(applied.unwrap_or_default())
    }

    /// The batch with all records, for a caller that does not apply it.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn into_batch(mut self, topology: &Topology) -> Result<Batch> {
        self.put_records(topology)?;
        Ok(self.batch)
    }

    fn put_records(&mut self, topology: &Topology) -> Result<()> {
        for locked in &self.states.locked {
            let Some(record) = &locked.edited else {
                continue;
            };
            if let Some(key) = topology.record_at(&self.location(locked.inode))? {
                self.batch.put(key, record.encode());
            }
        }
        Ok(())
    }

    /// Hands the batch over, and then shows the changes in memory. Returns the number of the batch,
    /// if it was not empty.
    ///
    /// # Errors
    /// Those of `hand_over`, and of the tree; nothing is changed then.
    pub(crate) fn apply_by(
        mut self,
        topology: &Topology,
        tree: &Tree,
        hand_over: impl FnOnce(Batch) -> Result<Seq>,
    ) -> Result<Option<Seq>> {
        if failpoints::is_on(Fault::ChangeTorn) && !self.batch.is_empty() {
            tree.apply(std::mem::take(&mut self.batch))?;
        }
        self.put_records(topology)?;
        let applied = match self.batch.is_empty() {
            true => None,
            false => Some(hand_over(self.batch)?),
        };
        for locked in &mut self.states.locked {
            if let Some(record) = locked.edited.take() {
                locked.inode.touched.store(true, Ordering::SeqCst);
                *locked.state = record;
            }
            if let Some(slot) = locked.lost.take() {
                locked.inode.lose(slot);
            }
            if locked.has_bare_slot {
                // The number is free when the object goes, and no name goes with it.
                locked.inode.note_loss();
            }
            if let Some(location) = locked.moved.take() {
                show_move(locked.inode, location);
            }
        }
        for (inode, location) in self.others {
            show_move(&inode, location);
        }
        for (dir, slot) in self.lost {
            dir.lose(slot);
        }
        Ok(applied)
    }
}

/// A change that the tree and the states of the inodes have, and that may not be durable yet. The
/// operation shows the rest of it first.
#[must_use = "the change may have to be durable"]
pub(crate) struct Shown<'t> {
    tree: &'t Tree,
    seq: Seq,
}

impl<'t> Shown<'t> {
    /// The change of the batch with this number; 0 for none.
    pub(crate) fn new(tree: &'t Tree, seq: Seq) -> Self {
        Self { tree, seq }
    }

    /// The number of the batch, for a change of two batches that is made durable at once.
    pub(crate) fn seq(self) -> Seq {
        self.seq
    }

    /// Makes the change durable, on a volume that does so with each change.
    ///
    /// # Errors
    /// Those of a sync; the change is made all the same.
    pub(crate) fn make_durable(self) -> Result<()> {
        Ok(Applied::make_durable(self.tree, self.seq)?)
    }

    /// The same for a change of objects that the caller may have in caches. If the sync fails, the
    /// caller is told of the invalidations in `stale`.
    ///
    /// # Errors
    /// Those of a sync; the change is made all the same.
    pub(crate) fn make_durable_telling<S: AsRef<[Invalidation]>>(
        self,
        caches: &Caches,
        stale: impl FnOnce() -> S,
    ) -> Result<()> {
        self.make_durable()
            .inspect_err(|_| caches.tell(stale().as_ref()))
    }
}

/// Applies a batch without waiting, as [`Transaction::apply_or_defer`].
///
/// # Errors
/// `Deferred` when the batch has to wait, and those of the tree.
pub(crate) fn try_on(tree: &Tree, batch: Batch, round: Round) -> Result<Seq> {
    match Applied::try_on(tree, batch, round.0)? {
        Applied::Done(seq) => Ok(seq),
        Applied::Deferred(work) => Err(Error::Deferred(work)),
    }
}

fn show_move(inode: &Inode, location: Location) {
    inode.touched.store(true, Ordering::SeqCst);
    let before = std::mem::replace(&mut *inode.location.write(), location);
    // The old location is dropped last: it may hold the last reference to a directory.
    drop(before);
    *inode.cached_path.lock() = None;
}
