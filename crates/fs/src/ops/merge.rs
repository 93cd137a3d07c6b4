//! Merging: the steps that bring the changes of a fork into another directory, as one batch.
//!
//! `tools/merge_plan.rs` compares three trees and says which steps there are. Here they are carried
//! out in place: the directories of the destination stay, a name that did not change keeps its
//! inode, and a file with other contents is replaced as by rename(2). So a descriptor of the file
//! before goes on with that file, and a reader never sees half of the new contents.
//!
//! ```text
//! without locks   directories are found, generations taken, clones prepared
//! names, links    the objects at the names of all steps
//! states          each is as it was compared, by its keys; else nothing is done
//! topology        trees that go are so still; one batch; records and locations
//! ```
//!
//! The comparison holds no lock. Under the locks only the keys of the objects of the steps are
//! compared with those of the snapshot that the comparison saw, at the cost of the changes since. So
//! a write is seen by the comparison, or comes after the merge. A tree that goes has objects without
//! locks. With the topology held no batch can come, and its keys are compared once more, with those
//! of the moment before.
//!
//! A merge that is too large for one batch is staged (`merge_staged.rs`). Then all keys of both
//! trees are compared, and nothing but access times may change in the destination until the end.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::RwLockWriteGuard;
use ramet_betree::{Batch, Seq, Snapshot, Span};

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::blocks::BLOCK;
use crate::format::keys::{self, NumberKey, Orphan};
use crate::format::record::{
    CAPABILITY, FLAG_NO_ATIME, FLAG_NO_DUMP, FLAG_SPARSE, FLAG_XATTRS, Kind, Record, S_ISGID, Time,
};
use crate::format::slots::{SLOTS_WITHOUT_INDEX, Slot};
use crate::namespace::inode::{DirPath, Inode, Location};
use crate::namespace::invalidation::Invalidation;
use crate::namespace::link_counts::count_links;
use crate::namespace::resolve::Found;
use crate::namespace::slot_index::indexing;
use crate::namespace::timed::Timed;
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{
    RECORDS_BYTES, Round, Shown, Transaction, lock_names, lock_states, try_on,
};
use crate::ops::access::Caller;
use crate::ops::at::At;
use crate::ops::clone::Plan;
use crate::ops::contents::{FEW_BLOCKS, Few, delete_ranges, few_blocks, move_contents};
use crate::ops::hard_links::{LinksBelow, Use, prepare_links};
use crate::ops::merge_staged::{Copied, Keys, StagedMerge, are_same};
use crate::ops::merge_steps::{Action, Content, KEY_BYTES, Look, MergeParts, MergeStep};
use crate::ops::removal::Removal;
use crate::ops::rename::{Move, move_slot};
use crate::ops::staged::Destination;
use crate::ops::trees::{Trees, Victim, invalidations};
use crate::ops::xattr::flags_of;

/// Most bytes of keys and values of one batch, about.
const BATCH_BYTES_MAX: usize = 6 << 20;
/// Bytes of small files that are copied as values; further ones are cloned.
const FEW_BYTES_MAX: usize = 1 << 20;
/// Bytes of one of them with its keys, at most.
const FILE_BYTES: usize = FEW_BLOCKS as usize * (BLOCK + KEY_BYTES);
/// The flags that contents bring along.
const CONTENT_FLAGS: u16 = FLAG_SPARSE | FLAG_NO_ATIME | FLAG_NO_DUMP;

/// A merge to be carried out.
pub(crate) struct Merge<'a> {
    pub(crate) caller: &'a Caller,
    /// Top of the fork.
    pub(crate) fork: &'a Arc<Inode>,
    /// Top of the destination.
    pub(crate) into: &'a Arc<Inode>,
    pub(crate) steps: &'a [MergeStep],
    /// The state that was compared.
    pub(crate) compared: &'a Snapshot,
    pub(crate) parts: MergeParts,
}

impl Merge<'_> {
    /// Whether it is too large for one batch.
    ///
    /// # Errors
    /// `NotFound` for a destination that is gone.
    pub(crate) fn is_staged(&self, trees: &Trees) -> Result<bool> {
        let merging = Merging { trees, merge: self };
        Ok(merging.batch_bytes()?.is_none())
    }

    /// Whether one batch takes all steps, if the path of the destination has `top_bytes`: bytes of
    /// the batch, or none.
    fn batch_bytes(&self, top_bytes: usize) -> Option<usize> {
        let of_steps = self.steps.iter().map(|step| step.batch_bytes(top_bytes));
        let bytes = RECORDS_BYTES + of_steps.sum::<usize>();
        (bytes <= BATCH_BYTES_MAX && self.steps.len() <= self.parts.steps_max).then_some(bytes)
    }
}

/// The outcome of a merge that was carried out.
pub(crate) struct Applied {
    /// The state of the kernel's caches that is out of date.
    pub(crate) stale: Vec<Invalidation>,
    pub(crate) is_staged: bool,
    /// The error of the sync, on a volume that makes each change durable. The caller was told of the
    /// invalidations then.
    pub(crate) durable: Result<()>,
}

/// A name in a directory that was found by its path.
struct Place {
    dir: Arc<Inode>,
    name: Vec<u8>,
}

impl Place {
    fn at(&self) -> At<'_> {
        At {
            dir: &self.dir,
            name: &self.name,
        }
    }
}

/// A step whose directories are known.
struct Prepared<'a> {
    step: &'a MergeStep,
    place: Place,
    source: Option<Place>,
    /// Generation of the new object.
    birth: u64,
}

/// A step with the objects at its names.
struct Target<'a> {
    prepared: &'a Prepared<'a>,
    /// The object that goes.
    victim: Option<Victim>,
    /// The object that is changed.
    changed: Option<Arc<Inode>>,
    source: Option<Arc<Inode>>,
    /// Slot of the source's name.
    source_slot: Option<Slot>,
    /// Names of hard links below the source.
    links: Option<LinksBelow>,
}

/// The names that a merge gave, with their slots.
type Slots = Vec<(Arc<Inode>, Slot)>;
type Done = (Vec<Invalidation>, Slots);
/// The topology, held for writing.
type HeldTopology<'a> = Timed<'a, RwLockWriteGuard<'a, Topology>>;

/// How the batch of a merge is made.
struct Making<'a> {
    /// Bytes of contents that may be copied as values.
    few_bytes: usize,
    /// The trees that may not change meanwhile; without them, the objects of the steps are compared.
    still: Option<Still<'a>>,
    /// The time of the merge, and the orphans that have the contents of some objects already.
    staged: Option<&'a StagedMerge>,
}

/// Ranges that were, a moment before the locks were taken, as they were compared.
struct Still<'a> {
    ranges: &'a [Keys],
    before: Snapshot,
}

/// A batch with the locks that it was made under.
struct Made<'a> {
    tx: Transaction<'a>,
    topology: HeldTopology<'a>,
    targets: &'a [Target<'a>],
    slots: Slots,
    now: Time,
}

/// Erases orphans at the end of a merge that is staged.
struct Unused<'a> {
    trees: &'a Trees,
    orphans: Vec<Orphan>,
}

impl Drop for Unused<'_> {
    fn drop(&mut self) {
        self.trees
            .deletes
            .erase_unused(std::mem::take(&mut self.orphans));
    }
}

impl Trees {
    /// Carries a merge out, durable with the next sync. `None` if the trees are not as they were
    /// compared: nothing is changed then.
    ///
    /// # Errors
    /// `TooBig` for more than can be staged, `Access` and `NotPermitted` for a step that the
    /// caller may not do with cp, mv, rm, chmod or setfattr, and those of the tree.
    pub(crate) fn merge(&self, merge: &Merge<'_>) -> Result<Option<Applied>> {
        let merging = Merging { trees: self, merge };
        merging.run()
    }

    /// Refuses a caller that may not list a directory on the way to a path below `top`, as far as
    /// the path leads.
    ///
    /// # Errors
    /// `Access`, and those of the tree.
    pub(crate) fn may_find(&self, caller: &Caller, top: &Arc<Inode>, path: &[u8]) -> Result<()> {
        let mut dir = Arc::clone(top);
        for name in keys::names_between(b"", path) {
            caller.may_list(&self.namespace, (&dir, &dir.state.read()))?;
            let found = {
                let _names = dir.names.read();
                self.namespace.find(&dir, name)?
            };
            match found.filter(|found| found.is_dir()) {
                Some(below) => dir = below,
                None => break,
            }
        }
        Ok(())
    }
}

/// A merge that is being carried out.
struct Merging<'a> {
    trees: &'a Trees,
    merge: &'a Merge<'a>,
}

impl<'a> Merging<'a> {
    fn run(&self) -> Result<Option<Applied>> {
        let _reaped = self.trees.deletes.reap_on_drop();
        if let Some(bytes) = self.batch_bytes()? {
            match self.run_at_once(bytes) {
                Err(Error::TooBig) => {}
                done => return done,
            }
        }
        self.run_staged()
    }

    fn batch_bytes(&self) -> Result<Option<usize>> {
        let top = self.trees.namespace.topology.read();
        let top = top.dir_path(self.merge.into).map_err(gone_is_not_found)?;
        Ok(self.merge.batch_bytes(top.path.len()))
    }

    /// Carries the merge out by one batch of so many bytes.
    fn run_at_once(&self, bytes: usize) -> Result<Option<Applied>> {
        let few_bytes = self.admit_merge(bytes, self.merge.steps)?;
        let Some(prepared) = self.prepare_merge()? else {
            return Ok(None);
        };
        let making = Making {
            few_bytes,
            still: None,
            staged: None,
        };
        let done = self.indexing(&prepared, || {
            let run = |round| {
                self.make((&prepared, &making), |made| {
                    let gone = made.gone();
                    let tree = &self.trees.namespace.tree;
                    let seq = made.tx.apply_or_defer(&made.topology, tree, round)?;
                    let done = self.done((made.topology, made.targets), gone, made.slots);
                    Ok((Some(done), seq))
                })
            };
            self.trees.namespace.until_applied(run)
        });
        // Hard links below trees come on top of the estimate.
        let (done, shown) = done.map_err(too_big)?;
        Ok(done.map(|done| self.finish(done, shown, false)))
    }

    /// Stages the merge and publishes it.
    fn run_staged(&self) -> Result<Option<Applied>> {
        let namespace = &self.trees.namespace;
        let Some(prepared) = self.prepare_merge()? else {
            return Ok(None);
        };
        namespace.tree.admit(RECORDS_BYTES + 8 * 4096)?;
        for top in [self.merge.into, self.merge.fork] {
            namespace.prepare_clone(top)?;
        }
        let begin = || namespace.until_applied(|round| self.begin_staged(&prepared, round));
        let (staged, shown) = self.indexing(&prepared, begin).map_err(too_big)?;
        let Some(mut staged) = staged else {
            return Ok(None);
        };
        let mut unused = Unused {
            trees: self.trees,
            orphans: staged.all_orphans(),
        };
        shown.make_durable()?;
        let part_bytes = self.merge.parts.part_bytes;
        staged.carry_out(namespace, part_bytes).map_err(too_big)?;
        namespace
            .tree
            .admit(staged.rest_bytes)
            .map_err(Error::from)
            .map_err(too_big)?;
        let publish = |round| self.publish(&prepared, &staged, round);
        let done = self.indexing(&prepared, || namespace.until_applied(publish));
        let (done, shown) = done.map_err(too_big)?;
        let Some((done, orphans)) = done else {
            return Ok(None);
        };
        unused.orphans = orphans;
        Ok(Some(self.finish(done, shown, true)))
    }

    /// Makes the batch of a merge that is staged, and clones the trees. `None` if one is not as it
    /// was compared.
    fn begin_staged(
        &self,
        prepared: &[Prepared<'_>],
        round: Round,
    ) -> Result<(Option<StagedMerge>, Seq)> {
        let (merge, namespace) = (self.merge, &self.trees.namespace);
        let paths = {
            let topology = namespace.topology.read();
            let path = |top| topology.dir_path(top).map_err(gone_is_not_found);
            [path(merge.into)?.path, path(merge.fork)?.path]
        };
        let copied = || {
            paths.each_ref().map(|path| {
                let orphan = self.trees.numbers.new_orphan();
                Copied::new(path, orphan)
            })
        };
        let copies = copied();
        let ranges: Vec<Keys> = copies.iter().flat_map(Copied::keys).collect();
        let Some(still) = self.still(merge.compared, &ranges)? else {
            return Ok((None, 0));
        };
        let making = Making {
            few_bytes: 0,
            still: Some(still),
            staged: None,
        };
        self.make((prepared, &making), |made| {
            let orphans = made.tx.orphaned();
            let whole = made.tx.into_batch(&made.topology)?;
            let mut batch = Batch::new();
            copies.iter().for_each(|copy| copy.put(&mut batch));
            let seq = try_on(&namespace.tree, batch, round)?;
            let seen = namespace.tree.snapshot();
            drop(made.topology);
            let staged = StagedMerge::new(&whole, copies, orphans, (seen, made.now))?;
            Ok((Some(staged), seq))
        })
    }

    /// Publishes the merge. Answers also the orphans that nothing leads to. `None` if the
    /// destination is not as it was.
    #[expect(clippy::type_complexity, reason = "a pair that one caller takes apart")]
    fn publish(
        &self,
        prepared: &[Prepared<'_>],
        staged: &StagedMerge,
        round: Round,
    ) -> Result<(Option<(Done, Vec<Orphan>)>, Seq)> {
        let Some(still) = self.still(&staged.seen, &staged.still)? else {
            return Ok((None, 0));
        };
        let making = Making {
            few_bytes: 0,
            still: Some(still),
            staged: Some(staged),
        };
        let tree = &self.trees.namespace.tree;
        self.make((prepared, &making), |made| {
            let (gone, unused) = (made.gone(), staged.unused(&made.tx.orphaned()));
            let mut is_same = true;
            let applied = made.tx.apply_by(&made.topology, tree, |batch| {
                match staged.last_batch(&batch)? {
                    Some(last) => try_on(tree, last, round),
                    None => {
                        is_same = false;
                        Err(Error::Busy)
                    }
                }
            });
            if !is_same {
                return Ok((None, 0));
            }
            let seq = applied?.unwrap_or_default();
            let done = self.done((made.topology, made.targets), gone, made.slots);
            Ok((Some((done, unused)), seq))
        })
    }

    /// The moment until which these ranges were as in a state, if they are still.
    fn still<'r>(&self, then: &Snapshot, ranges: &'r [Keys]) -> Result<Option<Still<'r>>> {
        let before = self.trees.namespace.tree.snapshot();
        let is_same = are_same((then, &before), ranges)?;
        Ok(is_same.then_some(Still { ranges, before }))
    }

    /// Runs an operation that gives the names of all steps.
    fn indexing<T>(
        &self,
        prepared: &[Prepared<'_>],
        operation: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        let mut dirs: BTreeMap<_, (&Arc<Inode>, u64)> = BTreeMap::new();
        for one in prepared.iter().filter(|one| one.step.puts_name()) {
            let dir = &one.place.dir;
            dirs.entry(dir.ino).or_insert((dir, 0)).1 += 1;
        }
        for (dir, names) in dirs.values() {
            self.skip_to_index(dir, *names)?;
        }
        let dirs: Vec<_> = dirs.into_values().map(|(dir, _)| dir).collect();
        indexing(&self.trees.namespace, &dirs, operation)
    }

    /// Shows a merge whose batch was applied to others than the tree. It cannot fail: objects that are
    /// open have their contents in orphans by now, and the kernel has to be told.
    fn done(
        &self,
        (mut topology, targets): (HeldTopology<'_>, &[Target<'_>]),
        gone: Vec<NumberKey>,
        slots: Slots,
    ) -> Done {
        topology.generation += 1;
        drop(topology);
        gone.into_iter()
            .for_each(|gone| self.trees.numbers.note_gone(gone));
        let mut stale = Vec::new();
        for target in targets {
            stale.extend(self.invalidations_of(target));
        }
        (stale, slots)
    }

    fn finish(&self, (stale, slots): Done, shown: Shown<'_>, is_staged: bool) -> Applied {
        let namespace = &self.trees.namespace;
        for (dir, slot) in slots {
            namespace.took_slot(&dir, slot);
        }
        Applied {
            durable: shown.make_durable_telling(&namespace.caches, || &stale),
            stale,
            is_staged,
        }
    }

    /// Waits for room for a batch of so many bytes, and answers the bytes of contents that may be
    /// copied as values besides.
    fn admit_merge(&self, bytes: usize, steps: &[MergeStep]) -> Result<usize> {
        let tree = &self.trees.namespace.tree;
        let sources = steps.iter().filter(|step| step.source().is_some()).count();
        let few_bytes = (sources * FILE_BYTES).min(FEW_BYTES_MAX);
        match tree.admit(bytes + few_bytes) {
            Err(ramet_betree::Error::Invalid(_)) => {}
            admitted => return Ok(admitted.map(|()| few_bytes)?),
        }
        match tree.admit(bytes) {
            Err(ramet_betree::Error::Invalid(_)) => Err(Error::TooBig),
            admitted => Ok(admitted.map(|()| 0)?),
        }
    }

    /// Finds the directories of all steps, and does the slow part of them as far as it can come
    /// before. `None` if a directory is missing.
    fn prepare_merge(&self) -> Result<Option<Vec<Prepared<'a>>>> {
        let merge = self.merge;
        let mut prepared = Vec::with_capacity(merge.steps.len());
        let mut known = [BTreeMap::new(), BTreeMap::new()];
        for step in merge.steps {
            let [of_dst, of_fork] = &mut known;
            let Some(place) = self.place((merge.caller, merge.into), &step.at, of_dst)? else {
                return Ok(None);
            };
            let source = match step.source() {
                None => None,
                Some((is_fork, from)) => {
                    let (top, known) = match is_fork {
                        true => (merge.fork, of_fork),
                        false => (merge.into, of_dst),
                    };
                    let Some(source) = self.place((merge.caller, top), from, known)? else {
                        return Ok(None);
                    };
                    self.prepare_source(&source, &step.action)?;
                    Some(source)
                }
            };
            if !matches!(step.action, Action::Change { .. })
                && let Some(victim) = self.look(place.at())?
            {
                prepare_links(&self.trees.namespace, &victim, false)?;
            }
            let birth = match step.puts_name() {
                true => self.trees.numbers.generation()?,
                false => 0,
            };
            prepared.push(Prepared {
                step,
                place,
                source,
                birth,
            });
        }
        Ok(Some(prepared))
    }

    fn prepare_source(&self, source: &Place, action: &Action) -> Result<()> {
        if !matches!(action, Action::Tree { .. }) {
            return Ok(());
        }
        match self.look(source.at())? {
            Some(inode) => {
                self.trees.namespace.prepare_clone(&inode)?;
                prepare_links(&self.trees.namespace, &inode, true)
            }
            None => Ok(()),
        }
    }

    fn look(&self, at: At<'_>) -> Result<Option<Arc<Inode>>> {
        let _names = at.dir.names.read();
        self.trees.namespace.find(at.dir, at.name)
    }

    /// The directory and the name of a path below `top`, if the caller may search all directories
    /// on the way. `known` has those that were found before.
    fn place(
        &self,
        (caller, top): (&Caller, &Arc<Inode>),
        path: &[u8],
        known: &mut BTreeMap<Vec<u8>, Arc<Inode>>,
    ) -> Result<Option<Place>> {
        let Some((above, name)) = keys::split_child(path) else {
            return Err(Error::Invalid("a merge of the top itself"));
        };
        let name = name.to_vec();
        if let Some(dir) = known.get(above) {
            let dir = Arc::clone(dir);
            return Ok(Some(Place { dir, name }));
        }
        let mut dir = Arc::clone(top);
        caller.may_search(&self.trees.namespace, (&dir, &dir.state.read()))?;
        for name in keys::names_between(b"", above) {
            let found = self.look(At { dir: &dir, name })?;
            let Some(below) = found.filter(|found| found.is_dir()) else {
                return Ok(None);
            };
            dir = below;
            caller.may_search(&self.trees.namespace, (&dir, &dir.state.read()))?;
        }
        known.insert(above.to_vec(), Arc::clone(&dir));
        Ok(Some(Place { dir, name }))
    }

    /// Leaves slots of a directory out so that `names` more meet the making of its index at the
    /// first one.
    fn skip_to_index(&self, dir: &Arc<Inode>, names: u64) -> Result<()> {
        let _names = dir.lock_names();
        let mut tx = Transaction::new(lock_states(&[dir]));
        let next = tx.get(dir).next_slot;
        if next >= SLOTS_WITHOUT_INDEX || next + names <= SLOTS_WITHOUT_INDEX {
            return Ok(());
        }
        tx.edit(dir).next_slot = SLOTS_WITHOUT_INDEX;
        let topology = self.trees.namespace.topology.read();
        topology.dir_path(dir).map_err(gone_is_not_found)?;
        tx.apply(&topology, &self.trees.namespace.tree)?
            .make_durable()
    }

    /// Makes the batch under all locks, and hands it to `apply`.
    fn make<T>(
        &self,
        (prepared, making): (&[Prepared<'_>], &Making<'_>),
        apply: impl FnOnce(Made<'_>) -> Result<(Option<T>, Seq)>,
    ) -> Result<(Option<T>, Seq)> {
        let merge = self.merge;
        let places = prepared.iter().map(|one| &one.place.dir);
        let sources = prepared.iter().flat_map(|one| &one.source);
        let dirs: Vec<_> = places.chain(sources.map(|source| &source.dir)).collect();
        let _names = lock_names(&dirs);
        let Some(found) = self.find_all(prepared)? else {
            return Ok((None, 0));
        };
        self.trees.numbers.store_all()?;
        let _links = self.trees.namespace.links.write();
        let targets = found
            .into_iter()
            .map(|(prepared, found, source)| self.target(prepared, found, source));
        let targets: Vec<Target<'_>> = targets.collect::<Result<_>>()?;
        let mut inodes = dirs;
        targets
            .iter()
            .for_each(|target| target.add_inodes(&mut inodes));
        let states = lock_states(&inodes);
        let mut tx = match making.staged {
            Some(staged) => Transaction::with_orphans(states, &staged.orphans),
            None => Transaction::new(states),
        };
        for target in &targets {
            self.may_do(merge, &tx, target)?;
        }
        let seen = match &making.still {
            Some(still) => still.before.clone(),
            None => match self.as_compared(&targets)? {
                Some(seen) => seen,
                None => return Ok((None, 0)),
            },
        };
        let few = self.few_of(&tx, &targets, making.few_bytes)?;
        let topology = self.trees.namespace.topology.write();
        if let Some(still) = &making.still {
            let now = self.trees.namespace.tree.snapshot();
            if !are_same((&still.before, &now), still.ranges)? {
                return Ok((None, 0));
            }
        }
        if !self.trees_are_still(&topology, &targets, &seen)? {
            return Ok((None, 0));
        }
        drop(seen);
        let removal = Removal {
            deletes: &self.trees.deletes,
            topology: &topology,
            now: making
                .staged
                .map_or_else(|| self.trees.times.now(), |staged| staged.now),
            // The name of a file that a staged merge removes is free at once.
            may_stay: making.still.is_none(),
        };
        let now = removal.now;
        let steps = targets.iter().zip(few);
        let slots = self.carry_out_all(merge.caller, &mut tx, &removal, steps)?;
        apply(Made {
            tx,
            topology,
            targets: &targets,
            slots,
            now,
        })
    }

    /// The objects at the names and sources of all steps, whose directories are locked. `None` if
    /// one is missing.
    #[expect(clippy::type_complexity, reason = "a list that one caller takes apart")]
    fn find_all<'p>(
        &self,
        prepared: &'p [Prepared<'p>],
    ) -> Result<Option<Vec<(&'p Prepared<'p>, Option<Found>, Option<Found>)>>> {
        let mut all = Vec::with_capacity(prepared.len());
        for one in prepared {
            let At { dir, name } = one.place.at();
            let found = self.trees.namespace.find_slot(dir, name)?;
            if found.is_none() {
                if !one.step.puts_name() {
                    return Ok(None);
                }
                self.trees.deletes.free_name(dir, name)?;
            }
            let source = match &one.source {
                None => None,
                Some(Place { dir, name }) => match self.trees.namespace.find_slot(dir, name)? {
                    None => return Ok(None),
                    found => found,
                },
            };
            all.push((one, found, source));
        }
        Ok(Some(all))
    }

    fn target<'p>(
        &self,
        prepared: &'p Prepared<'p>,
        found: Option<Found>,
        source: Option<Found>,
    ) -> Result<Target<'p>> {
        let (source, source_slot) = source.map(|found| (found.inode, found.slot)).unzip();
        let (mut victim, mut changed) = (None, None);
        match (&prepared.step.action, found) {
            (Action::Change { .. }, Some(found)) => changed = Some(found.inode),
            (_, Some(found)) => victim = Some(Victim::of(&self.trees.namespace, found)?),
            (_, None) => {}
        }
        let links = match &source {
            Some(source) => {
                count_links(&self.trees.namespace, source)?;
                LinksBelow::find(&self.trees.namespace, source, Use::Cloned)?
            }
            None => None,
        };
        Ok(Target {
            prepared,
            victim,
            changed,
            source,
            source_slot,
            links,
        })
    }

    /// Refuses a step that the caller may not do, or that a protection forbids.
    fn may_do(&self, merge: &Merge<'_>, tx: &Transaction<'_>, target: &Target<'_>) -> Result<()> {
        let (caller, protections) = (merge.caller, &self.trees.namespace.protections);
        if let (Some(inode), Action::Change { look, attributes }) =
            (&target.changed, &target.prepared.step.action)
        {
            let record = tx.get(inode);
            protections.of(inode, record)?.allow_change()?;
            caller.may_set(record, (look.uid, look.gid))?;
            return may_set_attributes(caller, inode, attributes);
        }
        if let Action::Move { .. } = target.prepared.step.action {
            self.may_move(caller, tx, target)?;
        } else if let Some(source) = &target.source {
            caller.may_copy(tx.get(source))?;
        }
        let dir = &target.prepared.place.dir;
        caller.may_change(&self.trees.namespace, (dir, tx.get(dir)))?;
        match &target.victim {
            Some(victim) => {
                caller.may_remove(tx.get(dir), tx.get(&victim.inode))?;
                protections.may_lose_tree(tx, (dir, victim))
            }
            None => protections.may_gain_names(tx, dir),
        }
    }

    /// Refuses a rename that the caller may not make, and attributes that it may not set.
    fn may_move(&self, caller: &Caller, tx: &Transaction<'_>, target: &Target<'_>) -> Result<()> {
        let Action::Move {
            look, attributes, ..
        } = &target.prepared.step.action
        else {
            return Ok(());
        };
        let place = target.prepared.source.as_ref().ok_or(Error::Stale)?;
        let inode = target.source.as_ref().ok_or(Error::Stale)?;
        let (dir, record) = (&place.dir, tx.get(inode));
        caller.may_change(&self.trees.namespace, (dir, tx.get(dir)))?;
        caller.may_remove(tx.get(dir), record)?;
        let protections = &self.trees.namespace.protections;
        protections.may_lose_name(tx, (dir, inode))?;
        if Look::of(record) != *look || !attributes.is_empty() {
            caller.may_set(record, (look.uid, look.gid))?;
        }
        may_set_attributes(caller, inode, attributes)
    }

    /// The contents of those files that are copied as values.
    fn few_of(
        &self,
        tx: &Transaction<'_>,
        targets: &[Target<'_>],
        mut room: usize,
    ) -> Result<Vec<Option<Few>>> {
        let of_one = |target: &Target<'_>| {
            let Some(source) = target.source.as_ref().filter(|source| !source.is_dir()) else {
                return Ok(None);
            };
            let record = tx.get(source);
            if room < FILE_BYTES || !target.prepared.step.copies_data() {
                return Ok(None);
            }
            let few = few_blocks(&self.trees.namespace, source, record)?;
            if few.is_some() {
                room -= FILE_BYTES;
            }
            Ok(few)
        };
        targets.iter().map(of_one).collect()
    }

    /// The state now, if all objects of the steps are as they were compared. Their states are locked.
    fn as_compared(&self, targets: &[Target<'_>]) -> Result<Option<Snapshot>> {
        let (keys, ranges, now) = {
            let topology = self.trees.namespace.topology.read();
            let (mut keys, mut ranges) = (Vec::new(), Vec::new());
            for target in targets {
                target.add_keys(&topology, (&mut keys, &mut ranges))?;
            }
            (keys, ranges, self.trees.namespace.tree.snapshot())
        };
        let compared = self.merge.compared;
        for key in keys {
            if compared.get(&key)? != now.get(&key)? {
                return Ok(None);
            }
        }
        match are_equal((compared, &now), &ranges)? {
            true => Ok(Some(now)),
            false => Ok(None),
        }
    }

    /// Whether the trees that go are as they were a moment before, and none has the fork in it.
    fn trees_are_still(
        &self,
        topology: &Topology,
        targets: &[Target<'_>],
        before: &Snapshot,
    ) -> Result<bool> {
        let now = self.trees.namespace.tree.snapshot();
        for victim in targets.iter().flat_map(|target| &target.victim) {
            if !victim.inode.is_dir() {
                continue;
            }
            if topology.is_within(self.merge.fork, &victim.inode) {
                let why = "the fork is in a directory that the merge removes";
                return Err(Error::Invalid(why));
            }
            let mut ranges = Vec::new();
            add_tree(topology, victim, &mut ranges)?;
            if !are_equal((before, &now), &ranges)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Adds all steps to the transaction. Copies of objects that other steps remove come first.
    fn carry_out_all<'p>(
        &self,
        caller: &Caller,
        tx: &mut Transaction<'_>,
        removal: &Removal<'_>,
        targets: impl Iterator<Item = (&'p Target<'p>, Option<Few>)>,
    ) -> Result<Slots> {
        let topology = removal.topology;
        let mut slots = Slots::new();
        let mut targets: Vec<_> = targets.collect();
        let is_own = |step: &MergeStep| matches!(step.source(), Some((false, _)));
        targets.sort_by_key(|(target, _)| !is_own(target.prepared.step));
        for (target, few) in targets {
            let slot = match &target.prepared.step.action {
                Action::Tree { .. } => Some(self.put_tree(tx, removal, target)?),
                Action::File { .. } => Some(self.put_file(caller, tx, removal, (target, few))?),
                Action::Remove => {
                    self.take_away(tx, removal, target)?;
                    None
                }
                Action::Change { look, attributes } => {
                    let inode = target.changed.as_ref().ok_or(Error::Stale)?;
                    let new = (inode, *look, attributes);
                    change(caller, tx, (topology, removal.now), new)?;
                    None
                }
                Action::Move {
                    look, attributes, ..
                } => {
                    let inode = target.source.as_ref().ok_or(Error::Stale)?;
                    let slot = move_name(tx, (topology, removal.now), (target, inode, few))?;
                    let new = (inode, *look, attributes);
                    change(caller, tx, (topology, removal.now), new)?;
                    slot
                }
            };
            let dir = &target.prepared.place.dir;
            slots.extend(slot.map(|slot| (Arc::clone(dir), slot)));
        }
        Ok(slots)
    }

    fn put_tree(
        &self,
        tx: &mut Transaction<'_>,
        removal: &Removal<'_>,
        target: &Target<'_>,
    ) -> Result<Slot> {
        let mut plan = Plan {
            source: target.source.as_ref().ok_or(Error::Stale)?,
            copy: target.destination(),
            victim: target.victim.as_ref(),
            links: target.links.as_ref(),
            indexes: self.trees.namespace.unsettled.indexes(),
            fork: None,
            now: removal.now,
        };
        self.trees.carry_out(tx, removal.topology, &mut plan)
    }

    fn put_file(
        &self,
        caller: &Caller,
        tx: &mut Transaction<'_>,
        removal: &Removal<'_>,
        (target, few): (&Target<'_>, Option<Few>),
    ) -> Result<Slot> {
        let Action::File {
            content,
            look,
            attributes,
        } = &target.prepared.step.action
        else {
            return Err(Error::Stale);
        };
        let at = target.prepared.place.at();
        let topology = removal.topology;
        let dir = topology.dir_path(at.dir).map_err(gone_is_not_found)?;
        let to = keys::child(&dir.path, at.name);
        let origin = target.source.as_ref().ok_or(Error::Stale)?;
        let (mut record, from) = (tx.get(origin).clone(), tx.location(origin));
        let from = topology.path_at(&from)?;
        self.leave(tx, removal, (target, &dir, &to))?;
        let now = removal.now;
        record.flags &= CONTENT_FLAGS;
        (record.nlink, record.ctime, record.btime) = (1, now, now);
        look.put(&mut record);
        caller.give(&mut record);
        match content {
            Content::Text(text, _) => {
                record.flags &= !FLAG_SPARSE;
                (record.size_bytes, record.blocks) = (text.len() as u64, 0);
                let blocks = keys::blocks(&to);
                for (number, block) in (0..).zip(text.chunks(BLOCK)) {
                    tx.batch.put(keys::block(&blocks, number), block.to_vec());
                }
            }
            Content::Fork(_) | Content::Own(_) => copy_data(tx, &record, (&from, few), &to),
        }
        record.mtime = now;
        let kind = record.kind();
        for (name, value) in attributes
            .iter()
            .filter(|(n, _)| caller.may_set_xattr(n, kind))
        {
            tx.batch.put(keys::xattr(&to, name), value.clone());
            record.flags |= flags_of(name);
        }
        let slot = target.destination().put(tx, &dir, record)?;
        let parent = tx.edit(at.dir);
        (parent.mtime, parent.ctime) = (now, now);
        Ok(slot)
    }

    /// The victim of a step leaves its name, which another object takes.
    fn leave(
        &self,
        tx: &mut Transaction<'_>,
        removal: &Removal<'_>,
        (target, dir, to): (&Target<'_>, &DirPath, &Bytes),
    ) -> Result<()> {
        let at = target.prepared.place.at();
        let removal = &Removal {
            may_stay: false,
            ..*removal
        };
        match &target.victim {
            Some(victim) if victim.inode.is_dir() => {
                victim.keep(tx, &self.trees.deletes, to);
                victim.drop(tx, removal, (at, &dir.path))?;
                delete_ranges(&mut tx.batch, to, self.trees.namespace.unsettled.indexes());
                let parent = tx.edit(at.dir);
                parent.nlink = parent.nlink.saturating_sub(1);
                Ok(())
            }
            Some(victim) => removal.name(tx, at, &victim.found()),
            None => Ok(()),
        }
    }

    /// The victim of a step leaves its name, which nothing takes.
    fn take_away(
        &self,
        tx: &mut Transaction<'_>,
        removal: &Removal<'_>,
        target: &Target<'_>,
    ) -> Result<()> {
        let at = target.prepared.place.at();
        let dir = removal.topology.dir_path(at.dir);
        let dir = dir.map_err(gone_is_not_found)?;
        let victim = target.victim.as_ref().ok_or(Error::Stale)?;
        if victim.inode.is_dir() {
            let path = keys::child(&dir.path, at.name);
            self.leave(tx, removal, (target, &dir, &path))?;
            tx.batch.delete(keys::entry(&dir.path, at.name));
        } else {
            removal.name(tx, at, &victim.found())?;
        }
        let parent = tx.edit(at.dir);
        (parent.mtime, parent.ctime) = (removal.now, removal.now);
        Ok(())
    }

    /// The state of the kernel's caches that is out of date after a step. The links are held.
    fn invalidations_of(&self, target: &Target<'_>) -> Vec<Invalidation> {
        if let Some(changed) = &target.changed {
            return vec![Invalidation::Attributes(changed.ino)];
        }
        if let Some(victim) = &target.victim {
            victim.note_removed(&self.trees.namespace);
        }
        let at = target.prepared.place.at();
        let mut stale = invalidations(&self.trees.namespace, at, target.victim.as_ref());
        if let (Action::Move { .. }, Some(from), Some(inode)) = (
            &target.prepared.step.action,
            &target.prepared.source,
            &target.source,
        ) {
            let (dir, name) = (from.dir.ino, from.name.clone());
            stale.push(Invalidation::Entry { dir, name });
            stale.push(Invalidation::Listing(dir));
            stale.push(Invalidation::Attributes(inode.ino));
        }
        stale
    }
}

impl Made<'_> {
    /// Entries of the queue of gone numbers.
    fn gone(&self) -> Vec<NumberKey> {
        let gone = self.targets.iter().flat_map(|target| &target.victim);
        gone.flat_map(|victim| victim.gone(&self.tx))
            .flatten()
            .collect()
    }
}

/// A batch that the journal does not take is too big.
fn too_big(error: Error) -> Error {
    match error {
        Error::Tree(ramet_betree::Error::Invalid(_)) => Error::TooBig,
        error => error,
    }
}

impl Target<'_> {
    fn destination(&self) -> Destination<'_> {
        Destination {
            at: self.prepared.place.at(),
            birth: self.prepared.birth,
            staged: None,
        }
    }

    /// Adds the keys and the prefixes of keys that tell whether the objects of the step are as they
    /// were.
    fn add_keys(
        &self,
        topology: &Topology,
        (keys, ranges): (&mut Vec<Bytes>, &mut Vec<Bytes>),
    ) -> Result<()> {
        let place = &self.prepared.place;
        let dir = topology.dir_path(&place.dir).map_err(gone_is_not_found)?;
        keys.push(keys::entry(&dir.path, &place.name));
        let is_tree = matches!(self.prepared.step.action, Action::Tree { .. });
        let source = self.source.as_ref().filter(|_| !is_tree);
        if let (Some(_), Some(place)) = (source, &self.prepared.source) {
            let dir = topology.dir_path(&place.dir).map_err(gone_is_not_found)?;
            keys.push(keys::entry(&dir.path, &place.name));
        }
        let victim = self.victim.as_ref().map(|victim| &victim.inode);
        for inode in [source, victim, self.changed.as_ref()]
            .into_iter()
            .flatten()
        {
            keys.extend(topology.record_at(&inode.location.read().clone())?);
            let path = topology.path(inode)?;
            ranges.push(keys::xattr(&path, b""));
            if !inode.is_dir() {
                ranges.push(keys::range(keys::DATA, &path));
            }
        }
        match self.victim.as_ref().filter(|victim| victim.inode.is_dir()) {
            Some(victim) => add_tree(topology, victim, ranges),
            None => Ok(()),
        }
    }

    /// Adds the inodes that the step changes or reads.
    fn add_inodes<'a>(&'a self, inodes: &mut Vec<&'a Arc<Inode>>) {
        if let Some(victim) = &self.victim {
            victim.add_inodes(inodes);
        }
        inodes.extend(&self.changed);
        inodes.extend(&self.source);
        inodes.extend(self.links.iter().flat_map(LinksBelow::inodes));
    }
}

/// Copies the data of a file with this record to a path that has none.
fn copy_data(
    tx: &mut Transaction<'_>,
    record: &Record,
    (from, few): (&Bytes, Option<Few>),
    to: &Bytes,
) {
    if record.kind() != Kind::Regular || record.size_bytes == 0 {
        return;
    }
    match few {
        Some(few) => {
            for (rest, value) in few {
                tx.batch.put(keys::in_range(keys::DATA, to, &rest), value);
            }
        }
        None => tx
            .batch
            .clone_prefix(keys::range(keys::DATA, from), keys::range(keys::DATA, to)),
    }
}

/// Gives the file a new name, as rename(2). Returns the slot that it takes. A shared inode keeps its
/// place, and its link entry moves.
fn move_name(
    tx: &mut Transaction<'_>,
    (topology, now): (&Topology, Time),
    (target, inode, few): (&Target<'_>, &Arc<Inode>, Option<Few>),
) -> Result<Option<Slot>> {
    let from = target.prepared.source.as_ref().ok_or(Error::Stale)?.at();
    let to = target.prepared.place.at();
    let slot = match tx.location(inode) {
        Location::Shared { .. } => {
            let slot = target.source_slot.ok_or(Error::Stale)?;
            let inode = Arc::clone(inode);
            Move { from, to }.move_link_entry(tx, topology, &Found { inode, slot })?
        }
        _ => move_only_name(tx, topology, (inode, few), (from, to))?,
    };
    for dir in [from.dir, to.dir] {
        let record = tx.edit(dir);
        (record.mtime, record.ctime) = (now, now);
    }
    Ok(slot)
}

/// Moves the name of a file that is no shared inode, with everything of the file.
fn move_only_name(
    tx: &mut Transaction<'_>,
    topology: &Topology,
    (inode, few): (&Arc<Inode>, Option<Few>),
    (from, to): (At<'_>, At<'_>),
) -> Result<Option<Slot>> {
    let path = |at: At<'_>| -> Result<(Bytes, Bytes)> {
        let dir = topology.dir_path(at.dir).map_err(gone_is_not_found)?.path;
        Ok((keys::child(&dir, at.name), keys::entry(&dir, at.name)))
    };
    let ((from_path, from_entry), (to_path, _)) = (path(from)?, path(to)?);
    let record = tx.get(inode).clone();
    move_contents(tx, &record, &from_path, &to_path, few);
    tx.batch.delete(from_entry);
    tx.move_to(inode, to.location());
    move_slot(tx, topology, inode, from, to)
}

/// Whether two states have equal keys with these prefixes.
fn are_equal((before, now): (&Snapshot, &Snapshot), prefixes: &[Bytes]) -> Result<bool> {
    for prefix in prefixes {
        let range = Span::prefix(prefix.clone());
        if before.diff_range(&range, now, &range)?.next().is_some() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Adds the prefixes of everything in a tree that goes, and of shared inodes that it has names of.
fn add_tree(topology: &Topology, victim: &Victim, ranges: &mut Vec<Bytes>) -> Result<()> {
    let path = topology.path(&victim.inode)?;
    ranges.extend([keys::META, keys::DATA].map(|index| keys::range(index, &path)));
    if let Some(links) = &victim.links {
        let root = topology.dir_path(&links.root)?.path;
        ranges.extend([keys::META, keys::DATA].map(|index| keys::shared_inodes(index, &root)));
    }
    Ok(())
}

/// Refuses attributes that the caller may not set or remove. Capabilities of a file may always go,
/// as with a write.
fn may_set_attributes(
    caller: &Caller,
    inode: &Inode,
    attributes: &BTreeMap<Bytes, Option<Bytes>>,
) -> Result<()> {
    let may_be = |(name, value): (&Bytes, &Option<Bytes>)| {
        let takes_rights = value.is_none() && name == CAPABILITY;
        takes_rights || caller.may_set_xattr(name, inode.kind)
    };
    match attributes.iter().all(may_be) {
        true => Ok(()),
        false => Err(Error::NotPermitted),
    }
}

/// Gives an object other attributes.
fn change(
    caller: &Caller,
    tx: &mut Transaction<'_>,
    (topology, now): (&Topology, Time),
    (inode, look, attributes): (&Arc<Inode>, Look, &BTreeMap<Bytes, Option<Bytes>>),
) -> Result<()> {
    let path = topology.path_at(&tx.location(inode))?;
    for (name, value) in attributes {
        let key = keys::xattr(&path, name);
        let record = tx.edit(inode);
        match value {
            Some(value) => {
                record.flags |= flags_of(name);
                tx.batch.put(key, value.clone());
            }
            None => {
                record.flags &= !(flags_of(name) & !FLAG_XATTRS);
                tx.batch.delete(key);
            }
        }
    }
    let record = tx.edit(inode);
    let is_new = look.mode != record.mode || look.gid != record.gid;
    look.put(record);
    if is_new && !caller.may_set_setgid(record.gid) {
        record.mode &= !S_ISGID;
    }
    record.ctime = now;
    Ok(())
}
