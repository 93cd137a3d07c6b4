//! The forks of a volume: told to users, and collected when their directories are gone.
//!
//! A record leads to the top of its fork by the top's number, as a handle does (`handles.rs`), and
//! from there up to the directory that a user asks at. A caller is told of a fork below that
//! directory if it owns the fork and could look up each name on the way, or if it could list each
//! directory on the way.
//!
//! A fork that was removed by other means than `drop` leaves base and record. [`Forks::collect`]
//! removes those whose top no name leads to, as of one moment. An identity is never given again,
//! but a rollback to a snapshot brings back those that the snapshot has. So the collection first
//! marks the record of a top that is gone, and keeps it as long as there is a snapshot that was
//! made while the top may have been there.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::{
    Batch, Seq, Snapshot, Span, Tree, exclusive_bytes, newest_seq, successor_of_prefix, window,
};
use ramet_block::Budget;

use crate::error::{Error, Result};
use crate::format::fork::ForkRecord;
use crate::format::ino::{Identity, Ino, ROOT_INO};
use crate::format::keys;
use crate::format::record::Time;
use crate::format::snapshot::SnapshotRecord;
use crate::namespace::inode::{Inode, Location};
use crate::namespace::notes::link_of;
use crate::namespace::numbers::{Numbers, Unstored};
use crate::namespace::paths::path_of;
use crate::namespace::resolve::Namespace;
use crate::namespace::transaction::{RECORDS_BYTES, Shown};
use crate::ops::access::Caller;
use crate::ops::fork_record::{NO_FORK, delete_fork, next_snapshot, stored_fork};
use crate::ops::names::Names;
use crate::ops::then::Then;

/// Records that one call of [`Forks::list`] looks at, and one of [`Forks::collect`].
const LISTED_AT_ONCE: usize = 32;
/// Numbers in one call of [`Forks::within`].
const NUMBERS_MAX: usize = 1000;
const COLLECTED_AT_ONCE: usize = 256;

/// The origin of a fork.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForkOrigin {
    /// Id of the origin, if it was a fork.
    pub fork: Option<u64>,
    /// Number of the origin, when it was forked.
    pub ino: Ino,
    /// Its generation.
    pub generation: u64,
    /// Names that lead to it from the directory of the call today, joined by `/`, if the caller may
    /// follow them.
    pub path: Option<Vec<u8>>,
    /// Names that led to it from the root of the volume when it was forked, for the maker of the
    /// fork and callers that may read everything.
    pub path_then: Option<Vec<u8>>,
}

/// A fork, as users know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForkEntry {
    /// Its number. No other fork of the volume ever has it, and a reset keeps it.
    pub id: u64,
    /// Inode number of its top.
    pub ino: Ino,
    /// Generation of that number.
    pub generation: u64,
    /// Names that lead to it from the directory of the call, joined by `/`.
    pub path: Vec<u8>,
    /// The directory that it is a clone of.
    pub origin: ForkOrigin,
    /// Time by the clock.
    pub time: Time,
    /// User that made it.
    pub uid: u32,
    /// Text of that user.
    pub note: String,
    /// The state that it began with is kept.
    pub has_base: bool,
    /// The caller owns the fork, or may read everything.
    pub is_own: bool,
    /// The caller made the fork.
    pub is_maker: bool,
}

/// Bytes that only a fork or its base uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ForkBytes {
    /// Those of the fork: they come back when its directory alone is removed.
    pub fork: u64,
    /// Those of the base: contents that both sides have changed or removed.
    pub base: u64,
    /// Those of the two together: they come back when the fork is dropped.
    pub both: u64,
}

/// Some forks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SomeForks {
    /// Forks below the directory of the call.
    pub forks: Vec<ForkEntry>,
    /// Number and generation to go on behind, unless there are no more.
    pub next: Option<(u64, u64)>,
}

/// The two states of a fork, each with the tree that has it.
pub(crate) struct BaseAndFork {
    pub(crate) base: (Snapshot, Then),
    pub(crate) fork: (Snapshot, Then),
}

/// The forks of a volume.
pub struct Forks {
    namespace: Arc<Namespace>,
    numbers: Arc<Numbers>,
    /// The place of the collection. Held over the whole of one, before all other locks.
    collection: Mutex<Collection>,
    /// Held over a look at the space of a fork: one at a time.
    pub(crate) measuring: Mutex<()>,
}

/// The place of the collection.
#[derive(Default)]
struct Collection {
    /// Key of the last record of this round that was looked at.
    after: Option<Bytes>,
    /// The moment when this round began, and that of the last one that has ended.
    began: Seq,
    ended: Option<Seq>,
}

impl Forks {
    pub(crate) fn new(namespace: &Arc<Namespace>, numbers: &Arc<Numbers>) -> Self {
        Self {
            namespace: Arc::clone(namespace),
            numbers: Arc::clone(numbers),
            collection: Mutex::default(),
            measuring: Mutex::new(()),
        }
    }

    /// The keys and values of some records behind the key `after`.
    fn records(&self, after: Option<&[u8]>, count: usize) -> Result<Vec<(Bytes, Bytes)>> {
        let prefix = keys::fork_records();
        let end = successor_of_prefix(&prefix);
        let lo = after.map_or(prefix.to_vec(), |key| [key, &[0]].concat());
        let tree = &self.namespace.tree;
        let records = tree.scan(&lo, end.as_deref()).take(count);
        Ok(records.collect::<ramet_betree::Result<_>>()?)
    }

    /// Some of the forks below the directory `dir` that the caller may find, in the order of their
    /// numbers, behind the one with this number and generation. Forks with damaged records, or in
    /// damaged directories, are left out.
    ///
    /// # Errors
    /// `NotDirectory`, and those of the tree.
    pub fn list(
        &self,
        names: &Names,
        caller: &Caller,
        dir: Ino,
        after: Option<(u64, u64)>,
    ) -> Result<SomeForks> {
        let dir = self.namespace.dir(dir)?;
        let after = after.map(|(ino, generation)| {
            keys::fork_record(Identity {
                ino: Ino(ino),
                generation,
            })
        });
        let records = self.records(after.as_deref(), LISTED_AT_ONCE)?;
        let is_last = records.len() < LISTED_AT_ONCE;
        let last = records.last().filter(|_| !is_last);
        let next = last.and_then(|(key, _)| keys::top_of_fork(key));
        let mut forks = Vec::new();
        for (key, value) in records {
            match self.entry(names, (caller, &dir), (&key, &value)) {
                Ok(found) => forks.extend(found),
                Err(error) => tracing::warn!(%error, "a fork is left out of a list"),
            }
        }
        Ok(SomeForks {
            forks,
            next: next.map(|top| (top.ino.0, top.generation)),
        })
    }

    /// The fork with this record, if the caller may find it below `dir`.
    fn entry(
        &self,
        names: &Names,
        (caller, dir): (&Caller, &Arc<Inode>),
        stored: (&Bytes, &Bytes),
    ) -> Result<Option<ForkEntry>> {
        let (top, record) = decode(stored)?;
        let Some((inode, path)) = self.found(names, (caller, dir), top)? else {
            return Ok(None);
        };
        let owner = inode.state.read().uid;
        let origin = self.found(names, (caller, dir), record.origin)?;
        let knows_origin = caller.may_see_all_of(record.uid);
        let path_then = record.origin_path.to_vec();
        Ok(Some(ForkEntry {
            id: record.id,
            ino: top.ino,
            generation: top.generation,
            path,
            origin: ForkOrigin {
                fork: record.origin_fork,
                ino: record.origin.ino,
                generation: record.origin.generation,
                path: origin.map(|(_, path)| path),
                path_then: (knows_origin && !path_then.is_empty()).then_some(path_then),
            },
            time: record.time,
            uid: record.uid,
            note: record.note,
            has_base: record.base.is_some(),
            is_own: caller.may_see_all_of(owner),
            is_maker: caller.uid == record.uid,
        }))
    }

    /// The directory with this identity, and the names that lead to it from `dir`, if the caller
    /// may search each directory on the way, and list it unless it owns the directory that is
    /// looked for.
    fn found(
        &self,
        names: &Names,
        (caller, dir): (&Caller, &Arc<Inode>),
        top: Identity,
    ) -> Result<Option<(Arc<Inode>, Vec<u8>)>> {
        let inode = match names.find_number(top.ino) {
            Err(Error::Stale) => return Ok(None),
            found => found?,
        };
        if inode.identity() != top || !inode.is_dir() {
            return Ok(None);
        }
        let is_own = caller.may_see_all_of(inode.state.read().uid);
        let (mut at, mut path) = (Arc::clone(&inode), Vec::new());
        while !Arc::ptr_eq(&at, dir) {
            let location = at.location.read().clone();
            let Location::Child { parent, name } = location else {
                return Ok(None);
            };
            let above = (&parent, &*parent.state.read());
            let may_find = match is_own {
                true => caller.may_search(&self.namespace, above),
                false => caller.may_list(&self.namespace, above),
            };
            match may_find {
                Err(Error::Access) => return Ok(None),
                done => done?,
            }
            path.push(name);
            at = Arc::clone(&parent);
        }
        path.reverse();
        Ok(Some((inode, path.join(&b'/'))))
    }

    /// The top with this identity of the fork with this id, if the caller may find it.
    ///
    /// # Errors
    /// `NotFound`, and those of the tree.
    pub(crate) fn top_of(
        &self,
        names: &Names,
        caller: &Caller,
        (id, top): (u64, Identity),
    ) -> Result<Arc<Inode>> {
        let root = self.namespace.dir(ROOT_INO)?;
        let found = self.found(names, (caller, &root), top)?;
        let (top, _) = found.ok_or(Error::NotFound)?;
        let record = stored_fork(&self.namespace.tree, top.identity())?;
        match record.is_some_and(|record| record.id == id) {
            true => Ok(top),
            false => Err(Error::NotFound),
        }
    }

    /// The fork `name` in the directory `dir`, which has the number `top`, if the caller owns it or
    /// may read everything.
    ///
    /// # Errors
    /// `Access`, `NotFound`, `NotPermitted`, `Stale` when another object has the name, `Invalid`
    /// for an object that is no fork, and those of the tree.
    pub(crate) fn own_fork(
        &self,
        caller: &Caller,
        (dir, name): (Ino, &[u8]),
        top: Ino,
    ) -> Result<(Arc<Inode>, ForkRecord)> {
        let dir = self.namespace.dir(dir)?;
        caller.may_search(&self.namespace, (&dir, &dir.state.read()))?;
        let inode = {
            let _names = dir.names.read();
            self.namespace.find(&dir, name)?.ok_or(Error::NotFound)?
        };
        if inode.ino != top {
            return Err(Error::Stale);
        }
        let fork = stored_fork(&self.namespace.tree, inode.identity())?;
        let fork = fork.ok_or(NO_FORK)?;
        let owner = inode.state.read().uid;
        match caller.may_see_all_of(owner) {
            true => Ok((inode, fork)),
            false => Err(Error::NotPermitted),
        }
    }

    /// Those of the inodes with these numbers that lie in the directory `top`, or are it. Only
    /// inodes in memory are found: a process that uses one keeps it there. A file with several
    /// names lies in the directory if one of them does.
    ///
    /// # Errors
    /// `Range` for more than [`NUMBERS_MAX`] numbers, and those of the tree.
    pub(crate) fn within(&self, top: &Arc<Inode>, numbers: &[u64]) -> Result<Vec<u64>> {
        if numbers.len() > NUMBERS_MAX {
            return Err(Error::Range);
        }
        // Where a join put the shared inodes of the directory into the clone root around it, names
        // below may be of an inode that was found by another name.
        let outer = self.namespace.topology.read().clone_root(top)?;
        let outer = (!Arc::ptr_eq(&outer, top)).then_some(outer);
        let (mut undecided, mut found) = (HashMap::new(), BTreeSet::new());
        for number in numbers {
            let Ok(inode) = self.namespace.inode(Ino(*number)) else {
                continue;
            };
            let location = inode.location.read().clone();
            let topology = self.namespace.topology.read();
            let is_within = match &location {
                Location::Shared { root, link, via } => {
                    if outer.as_ref().is_some_and(|outer| Arc::ptr_eq(outer, root)) {
                        undecided.insert(*link, *number);
                    }
                    topology.is_within(root, top) || topology.is_within(via, top)
                }
                _ => topology.is_within(&inode, top),
            };
            if is_within {
                found.insert(*number);
            }
        }
        if !undecided.is_empty() {
            let view = self.namespace.view(top)?;
            let below = keys::links_below(&view.root_path.path, &view.dir.path);
            let end = successor_of_prefix(&below);
            let mut scan = view.snapshot.scan(&below, end.as_deref());
            while scan.advance()? {
                found.extend(undecided.get(&link_of(scan.value())?));
            }
        }
        Ok(found.into_iter().collect())
    }

    /// The bytes that only the fork, and only its base, uses. All are of one checkpoint, which is
    /// written first if it `is_fresh`.
    ///
    /// # Errors
    /// `Stale` when one is gone, and those of the tree.
    pub(crate) fn exclusive_bytes(
        &self,
        (top, record): (&Arc<Inode>, &ForkRecord),
        is_fresh: bool,
    ) -> Result<ForkBytes> {
        let path = self.namespace.topology.read().dir_path(top)?.path;
        let base = record.base.map(keys::fork_base);
        let of = |path: &Bytes| {
            keys::INDEXES
                .map(|i| Span::prefix(keys::range(i, path)))
                .to_vec()
        };
        let of_base = base.as_ref().map(of).unwrap_or_default();
        let lists = [of(&path), of_base.clone(), [of(&path), of_base].concat()];
        let bytes = exclusive_bytes(&self.namespace.tree, &lists, is_fresh)?;
        let at = |n: usize| bytes.get(n).copied().unwrap_or(0);
        Ok(ForkBytes {
            fork: at(0),
            base: at(1),
            both: at(2),
        })
    }

    /// A fork and its base, to be compared.
    ///
    /// # Errors
    /// `NoAttribute` for a fork without a base, `Stale` for one that is gone, `Corrupt`, and those
    /// of the tree.
    pub(crate) fn base_and_fork(&self, fork: (&Arc<Inode>, &ForkRecord)) -> Result<BaseAndFork> {
        let (top, record) = fork;
        Ok(BaseAndFork {
            base: self.base(record)?,
            fork: self.today(top)?,
        })
    }

    /// A directory as it is at this moment.
    ///
    /// # Errors
    /// `Stale` for one that is gone, `Corrupt`, and those of the tree.
    pub(crate) fn today(&self, top: &Arc<Inode>) -> Result<(Snapshot, Then)> {
        let (now, path) = {
            let topology = self.namespace.topology.read();
            let now = self.namespace.tree.snapshot();
            (now, topology.dir_path(top)?.path)
        };
        let names: Vec<&[u8]> = keys::names_between(b"", &path).collect();
        let then = Then::find(&now, &names)?.ok_or(Error::Stale)?;
        Ok((now, then))
    }

    /// The base of the fork with this record.
    ///
    /// # Errors
    /// `NoAttribute` for a fork without one, `Stale` for one that is gone, `Corrupt`, and those of
    /// the tree.
    pub(crate) fn base(&self, record: &ForkRecord) -> Result<(Snapshot, Then)> {
        let base = record.base.ok_or(Error::NoAttribute)?;
        let then = window(&self.namespace.tree, keys::fork_base(base)).snapshot();
        let of_base = Then::find(&then, &[])?.ok_or(Error::Stale)?;
        Ok((then, of_base))
    }

    /// The record of the fork with this top.
    ///
    /// # Errors
    /// `Invalid` for a directory that is no fork, `Corrupt`, and those of the tree.
    pub(crate) fn record_of(&self, top: &Inode) -> Result<ForkRecord> {
        stored_fork(&self.namespace.tree, top.identity())?.ok_or(NO_FORK)
    }

    /// Removes bases and records of some forks whose directories are gone, and that no snapshot may
    /// have. To be called every minute or so: each call goes on where the last one ended, and reads
    /// nothing if the volume is as it was in the last round. Returns the number of records that
    /// were removed.
    ///
    /// # Errors
    /// The first of the records, and of the tree. The other records are looked at all the same.
    pub fn collect(&self) -> Result<usize> {
        self.collect_some(COLLECTED_AT_ONCE)
    }

    /// The same for `at_most` records, not 0. Each record that changes is a batch of its own, so a
    /// crash may leave the first of them changed and the others not.
    ///
    /// # Errors
    /// As [`Forks::collect`].
    pub fn collect_some(&self, at_most: usize) -> Result<usize> {
        let tree = &self.namespace.tree;
        let mut collection = self.collection.lock();
        if collection.after.is_none() {
            collection.began = newest_seq(tree);
            if collection.ended == Some(collection.began) {
                return Ok(0);
            }
        }
        let records = self.records(collection.after.as_deref(), at_most)?;
        match records.last() {
            Some((last, _)) if records.len() == at_most => {
                collection.after = Some(last.clone());
            }
            _ => (collection.after, collection.ended) = (None, Some(collection.began)),
        }
        if records.is_empty() {
            return Ok(0);
        }
        // In this order: a block leaves the memory for the tree, and a snapshot that has a top that
        // is gone was made before.
        let unstored = self.numbers.unstored();
        let now = tree.snapshot();
        let snapshots = Snapshots::read(tree)?;
        let (mut count, mut outcome) = (0, Ok(()));
        for (key, value) in &records {
            match self.collect_one((&now, &unstored), &snapshots, (key, value)) {
                Ok(is_collected) => count += usize::from(is_collected),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome.map(|()| count)
    }

    /// Looks at one record, and tells whether it was removed.
    fn collect_one(
        &self,
        now: (&Snapshot, &Unstored),
        snapshots: &Snapshots,
        stored: (&Bytes, &Bytes),
    ) -> Result<bool> {
        let (top, record) = decode(stored)?;
        let is_there = path_of(now, top)?.is_some();
        let gone_at = record.gone_at.unwrap_or(snapshots.next);
        let may_come_back = is_there || snapshots.has_any(record.made_at, gone_at);
        let mark = (!is_there).then_some(gone_at);
        if may_come_back && mark == record.gone_at {
            return Ok(false);
        }
        let mut batch = Batch::new();
        match may_come_back {
            true => {
                let marked = ForkRecord {
                    gone_at: mark,
                    ..record.clone()
                };
                batch.put(keys::fork_record(top), marked.encode());
                // A full volume may mark a record that is removed later.
                batch.count_as_removal();
            }
            false => delete_fork(&mut batch, top, &record),
        }
        let tree = &self.namespace.tree;
        tree.admit(RECORDS_BYTES)?;
        // A fork is dropped and made with the topology held for writing.
        let topology = self.namespace.topology.read();
        if stored_fork(tree, top)?.as_ref() != Some(&record) {
            return Ok(false);
        }
        let seq = tree.apply_admitted(batch)?;
        drop(topology);
        Shown::new(tree, seq).make_durable()?;
        Ok(!may_come_back)
    }

    /// The inodes of the volume.
    pub(crate) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The memory budget, for comparisons.
    pub(crate) fn budget(&self) -> &Arc<Budget> {
        self.namespace.tree.budget()
    }

    /// The number of records, those included whose directories are gone.
    ///
    /// # Errors
    /// Those of the tree.
    pub fn count(&self) -> Result<u64> {
        let prefix = keys::fork_records();
        let end = successor_of_prefix(&prefix);
        let mut scan = self.namespace.tree.scan(&prefix, end.as_deref());
        let mut count = 0;
        while scan.advance()? {
            count += 1;
        }
        Ok(count)
    }
}

/// The snapshots that there are.
struct Snapshots {
    ids: BTreeSet<u64>,
    /// There are more of them, with any ids: their records are damaged.
    has_damaged: bool,
    /// The id that the next one gets.
    next: u64,
}

impl Snapshots {
    fn read(tree: &Tree) -> Result<Self> {
        let next = next_snapshot(tree)?;
        let prefix = keys::snapshot_records();
        let end = successor_of_prefix(&prefix);
        let mut scan = tree.scan(&prefix, end.as_deref());
        let (mut ids, mut has_damaged) = (BTreeSet::new(), false);
        while scan.advance()? {
            match SnapshotRecord::decode(scan.value()) {
                Ok(record) => drop(ids.insert(record.id)),
                Err(_) => has_damaged = true,
            }
        }
        Ok(Self {
            ids,
            has_damaged,
            next,
        })
    }

    /// Whether there is one with an id from `first` on and below `end`, or may be.
    fn has_any(&self, first: u64, end: u64) -> bool {
        first < end && (self.has_damaged || self.ids.range(first..end).next().is_some())
    }
}

/// The top and the record of a key and its value.
fn decode((key, value): (&Bytes, &Bytes)) -> Result<(Identity, ForkRecord)> {
    let top = keys::top_of_fork(key).ok_or_else(|| Error::Corrupt {
        what: "key of a fork",
        detail: format!("{key:?}"),
    })?;
    Ok((top, ForkRecord::decode(value)?))
}
